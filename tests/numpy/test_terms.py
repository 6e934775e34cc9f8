"""An average is the sum that its clock's terms give, to the last bit, whichever way it is read."""

import copy
import pickle

import numpy as np
import pytest

from tailavg import AnyTail, ExactWindow, TailAverage
from tailavg.core.clock import SUM, clock_for
from tailavg.numpy.arithmetic import joined
from tests.support.cases import EVERY_KIND, EVERY_RULE, RULES, of_rules


def summed(clock, means, total, window=None):
    """The weighted sum, term by term."""
    value = 0.0
    for weight, block in clock.terms(window):
        value = value + weight * (total if block == SUM else means[block])
    return value


class Obvious:
    """Does what a clock says, sample by sample, with no other code of the library."""

    def __init__(self, rule, zero):
        self.clock, self.zero = clock_for(rule), zero
        self.means, self.sum = [zero] * len(self.clock.blocks), zero

    def fold(self, total, weight, carry):
        mean, self.sum = joined(self.means[-1], self.sum, total, weight, carry)
        self.means = [*self.means[:-1], mean]

    def turn(self, gone, weight):
        if weight:
            pair = self.means[gone - 1], self.means[gone]
            self.means[gone - 1] = pair[0] * (1.0 - weight) + pair[1] * weight
        self.means = [*self.means[:gone], *self.means[gone + 1 :], self.zero]
        self.sum = self.zero

    def update(self, x):
        self.clock.prepare(self)
        self.sum = self.sum + x * self.clock.factor
        self.clock.count += 1

    def value(self, window):
        return summed(self.clock, self.means, self.sum, window)


@of_rules([rule for rule in [*EVERY_RULE, AnyTail(12)] if not isinstance(rule, ExactWindow)])
@pytest.mark.parametrize("kind", ["float", "float32 (3,)"])
@pytest.mark.parametrize("loops", ["compiled", "plain_loops"])
def test_a_value_is_the_sum_of_the_terms_to_the_bit(rule, kind, loops, request):
    request.getfixturevalue(loops)
    kind, window = EVERY_KIND[kind], 0.4 if isinstance(rule, AnyTail) else None
    xs = kind.draw(900)
    zero = 0.0 if xs.ndim == 1 else np.zeros(xs.shape[1:], xs.dtype)
    average, obvious, scanned = (
        TailAverage(rule),
        Obvious(rule, zero),
        TailAverage(rule).scan(xs, window),
    )
    for t, x in enumerate(kind.each(xs)):
        average.update(x)
        obvious.update(x)
        expected = np.asarray(obvious.value(window))
        assert np.asarray(average.value(window)).tobytes() == expected.tobytes(), t
        assert scanned[t].tobytes() == expected.tobytes(), t


class Counted(TailAverage):
    """A subclass as anyone may write it."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.calls = 0

    def update(self, x):
        self.calls += 1
        super().update(2 * x)


@of_rules([*RULES, AnyTail(6)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_subclass_keeps_its_methods_and_attributes(rule, shape):
    window = 0.5 if isinstance(rule, AnyTail) else None
    mine, plain = Counted(rule), TailAverage(rule)
    for x in np.random.default_rng(0).normal(size=(300, *shape)):
        mine.update(x if shape else float(x))
        plain.update(2 * x if shape else 2 * float(x))
    assert type(mine) is Counted
    np.testing.assert_array_equal(mine.value(window), plain.value(window))
    for again in (pickle.loads(pickle.dumps(mine)), copy.deepcopy(mine), copy.copy(mine)):
        assert (type(again), again.calls) == (Counted, 300)
        assert again == mine
        again.update(np.ones(shape) if shape else 1.0)
        assert (again.calls, mine.calls, mine.count) == (301, 300, 300)
        assert again != mine
    resumed = Counted.from_state_dict(mine.state_dict())
    assert (type(resumed), resumed.calls, resumed.count) == (Counted, 0, 300)


def test_a_copy_shares_nothing_that_changes():
    for rule in (10, 0.3, ExactWindow(5)):
        average = TailAverage(rule)
        average.update_many(np.arange(40.0).reshape(20, 2))
        before, other = average.value(), average.copy()
        for _ in range(30):
            other.update(np.full(2, 1e6))
        np.testing.assert_array_equal(average.value(), before)
