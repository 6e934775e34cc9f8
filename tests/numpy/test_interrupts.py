"""A call that is interrupted anywhere takes full effect or none, or the average says so.

Slow: `make test-all` interrupts long calls at every opcode.
"""

from __future__ import annotations

import signal
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail, TailAverage
from tailavg.numpy import kernel
from tests.support.cases import FEW_RULES
from tests.support.effort import some
from tests.support.interrupts import Interrupt, interrupted

RULES = [*FEW_RULES, AnytimeWindow(0.3, turns="paper"), AnyTail(6)]
KINDS: dict[str, dict[str, Any]] = {
    "numbers": {},
    "float32": {"dtype": "float32"},
    "arrays": {"shape": (3,)},
    "float32 arrays": {"shape": (3,), "dtype": "float32"},
    "omitted": {"nan_policy": "omit"},
    "omitted arrays": {"shape": (3,), "nan_policy": "omit"},
}


# Every rule with numbers, and the other kinds each with a rule of blocks and a decaying one.
CASES = [
    *((rule, "numbers") for rule in RULES),
    *((rule, kind) for rule in RULES[2:4] for kind in KINDS if kind != "numbers"),
    (RULES[4], "arrays"),
]


@pytest.fixture(autouse=True)
def from_the_first_number_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan with compiled loops, if there are some, and not with plain ones until there were many.

    An interrupt is told by its opcode: each call must take the same path.
    """
    monkeypatch.setattr(kernel, "LONG", 0)
    monkeypatch.setattr(kernel, "SHORT", 0)


def samples(n: int, shape: tuple[int, ...] = ()) -> Any:
    return np.random.default_rng(n).normal(size=(n, *shape))


def made(rule: Any, count: int, shape: tuple[int, ...] = (), **options: Any) -> TailAverage:
    average = TailAverage(rule, **options)
    for x in samples(count, shape):
        average.update(x if shape else float(x))
    return average


def check(rule: Any, count: int, kind: dict[str, Any], change: Any, most: int) -> None:
    """Interrupt a change at every opcode, or at so many of them if there are more."""
    window = 0.5 if isinstance(rule, AnyTail) else None
    before, after = made(rule, count, **kind), made(rule, count, **kind)
    change(after)
    refused = 0
    for at, average in interrupted(before.copy, change, some(most, 10**6), most):
        if "incomplete" in repr(average):
            refused += 1
            for read in (
                lambda: average.value(window),  # noqa: B023
                average.state_dict,
                average.copy,
                lambda: average.update(1.0),  # noqa: B023
                lambda: average.update_many(samples(3, kind.get("shape", ()))),  # noqa: B023
                lambda: average.weights(window),  # noqa: B023
                lambda: average.count,  # noqa: B023
            ):
                with pytest.raises(RuntimeError, match="incomplete"):
                    read()
            continue
        assert average in (before, after), f"opcode {at}"
        if average == before:
            change(average)  # and it goes on as if nothing had happened
            assert average == after, f"opcode {at}"
    assert refused <= 40  # an addition takes a few opcodes


@pytest.mark.parametrize(("rule", "kind"), CASES, ids=str)
def test_an_update_is_whole(rule: Any, kind: str) -> None:
    options = KINDS[kind]
    sample = samples(1, options.get("shape", ()))[0]
    x = sample if "shape" in options else float(sample)

    def update(average: TailAverage) -> None:
        average.update(x)

    counts, most = (0, 17, 256, 257), 60 if kind == "numbers" else 30
    due = [not made(rule, count, **options)._left for count in counts]
    plain = isinstance(rule, ExactWindow | RawTail) or "nan_policy" in options
    assert True in due  # a fold or a turn comes with it
    assert plain or False in due  # or nothing but an addition
    for count in counts:
        check(rule, count, options, update, most)


@pytest.mark.parametrize(
    ("rule", "kind"), [*zip(RULES[2:], cycle(["omitted", "numbers", "arrays"]))], ids=str
)
@pytest.mark.parametrize("call", ["update_many", "scan"])
def test_many_updates_are_whole(rule: Any, kind: str, call: str) -> None:
    options = KINDS[kind]
    xs = samples(40, options.get("shape", ()))
    if kind == "omitted":
        xs[5] = np.nan
    window = [0.5, 0.3] if isinstance(rule, AnyTail) and call == "scan" else None

    def change(average: TailAverage) -> None:
        arguments = () if window is None else (window,)
        getattr(average, call)(xs, *arguments)

    for count in (0, 17):
        check(rule, count, options, change, 20)


@pytest.mark.parametrize(("rule", "kind"), [*zip(RULES, cycle(["numbers", "arrays"]))], ids=str)
def test_a_read_changes_nothing(rule: Any, kind: str) -> None:
    window = (0.5,) if isinstance(rule, AnyTail) else ()
    average = made(rule, 17, **KINDS[kind])
    before, now = average.copy(), average.value(*window)
    for read in (
        lambda average: average.value(*window),
        lambda average: average.weights(*window),
        lambda average: average.profile(*window),
        lambda average: average.state_dict(),
        lambda average: average.copy(),
        lambda average: average == before,
    ):
        for _, it in interrupted(lambda: average, read, 40, 40):
            assert it == before
            np.testing.assert_array_equal(it.value(*window), now)


@pytest.mark.parametrize("rule", [AnytimeWindow(1.0), AnytimeWindow(50), Exponential(50)], ids=str)
def test_a_signal_leaves_an_average_that_can_be_read(rule: Any) -> None:
    """Python handles signals at calls only: a plain update has none that could be cut in two."""

    def interrupt(*_: Any) -> None:
        raise Interrupt

    x, before = np.ones(20_000), signal.signal(signal.SIGALRM, interrupt)
    average = TailAverage(rule)
    average.update(x)
    try:
        for _ in range(some(30, 300)):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                while True:
                    average.update(x)
            except Interrupt:
                np.testing.assert_allclose(average.value(), 1.0, rtol=1e-12)
                state = average.state_dict()
                if isinstance(rule, AnytimeWindow):
                    assert (state["partial"] == state["count"] - state["folded"]).all()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_an_error_in_arithmetic_changes_nothing_or_is_told(rule: Any) -> None:
    average, raised = made(rule, 10, (2,)), False
    with np.errstate(all="raise"):
        for _ in range(250):
            before = average.copy()
            try:
                average.update(np.full(2, 1e308))
            except FloatingPointError:
                raised = True
                break
    assert raised != isinstance(rule, ExactWindow)  # which keeps them as they are
    if raised and "incomplete" not in repr(average):
        assert average == before


@pytest.mark.parametrize("call", ["update_many", "scan"])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_infinities_are_data_for_many_samples(rule: Any, call: str, scanner: str) -> None:
    window = (0.5,) if isinstance(rule, AnyTail) and call == "scan" else ()
    average, xs = made(rule, 20), np.ones(1100)
    xs[1000:] = 1e308
    with np.errstate(all="raise"):
        getattr(average, call)(xs, *window)
    assert average.count == 1120


def test_a_sample_that_overflows_is_infinite() -> None:
    average = TailAverage(1, dtype="float32")
    with np.errstate(over="raise"):
        average.update(np.full(2, 1e300))
    assert np.isposinf(average.value()).all()
