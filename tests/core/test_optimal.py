"""Balanced turns are minimax: a search of all schedules finds none that reaches less far back."""

import math
from itertools import combinations

import pytest

from tailavg import AnytimeWindow, Growing
from tailavg.core.clock import starts_at


def least_reach(k, z):
    """The fewest samples that a schedule touches at its worst, for a window of k samples.

    A schedule holds z + 1 sums over consecutive blocks. It opens a block at the present or does
    not, and removes boundaries as it likes. A read needs whole blocks that hold the window: it
    touches all samples since the newest boundary that is at least k old.
    """
    bound = k
    while not survives(k, z, bound):
        bound += 1
    return bound


def survives(k, z, bound):
    """Whether a schedule can run for ever and never touch more than `bound` samples.

    A state is the ages of the boundaries, just before the next sample. States from which every
    schedule fails are removed until none is left to remove.
    """
    ages = range(bound + 1)
    states = {state for size in range(1, z + 2) for state in combinations(ages, size)}

    def next_states(state):
        older = tuple(age + 1 for age in state if age < bound)
        if not any(age >= k for age in older):  # the window is not covered
            return
        for kept in (each for size in range(len(older) + 1) for each in combinations(older, size)):
            yield kept
            if len(kept) <= z:
                yield (0, *kept)

    safe = states
    while True:
        good = {state for state in safe if any(each in safe for each in next_states(state))}
        if good == safe:
            return bool(safe)
        safe = good


@pytest.mark.parametrize(("k", "z"), [(k, z) for z in (1, 2, 3) for k in range(2, 9)])
def test_no_schedule_for_a_fixed_window_reaches_less_far(k, z):
    assert least_reach(k, z) == k - 1 + math.ceil((k - 1) / z)


@pytest.mark.parametrize("z", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [2, 3, 7, 8, 30])
def test_balanced_turns_reach_one_sample_further_at_most(k, z):
    rule, reach = AnytimeWindow(k, z + 1), 0
    for t in range(3 * k, 9 * k):
        starts = starts_at(rule, t)
        reach = max(reach, t - max(start for start in starts if t - start >= k))
    assert reach == k - 1 + math.ceil(k / z)


@pytest.mark.parametrize("z", [1, 2, 3, 5])
@pytest.mark.parametrize("c", [0.1, 0.25, 0.5])
def test_balanced_turns_of_a_growing_window_reach_that_part_of_the_stream(c, z):
    rule, bound = AnytimeWindow(c, z + 1), 1 - (1 - c) ** (1 + 1 / z)
    worst = 0.0
    for t in range(2000, 6000, 7):
        starts = starts_at(rule, t)
        covering = max(start for start in starts if t - start >= Growing(c).size(t))
        worst = max(worst, (t - covering) / t)
    assert worst <= bound + 3 / 2000
    assert worst >= 0.97 * bound
