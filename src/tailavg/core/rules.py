"""Rules: immutable descriptions of how to average. The clocks of `core.clock` carry them out.

- `AnytimeWindow` (the paper's *awa*): a few blocks of consecutive samples; the oldest is dropped.
- `Exponential` (*exp*): one mean, with a decay that depends on t.
- `AnyTail`: blocks that cover the whole stream and are read with any window; neighbours are merged.
- `ExactWindow` (*true*) stores the samples; `RawTail` (*raw*) needs to know the end in advance. The
  paper compares its averages with these two.

A block is identified by its start, the number of samples before it. The last block is open. There
are always as many blocks as accumulators; empty blocks come first and start at 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from functools import cached_property, wraps
from numbers import Real
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from tailavg.core.elapsed import Counted, Elapsed
from tailavg.core.equation import square_root, weights
from tailavg.core.readings import ByAge, Decay, Reading
from tailavg.core.windows import (
    NEVER,
    TIE,
    AnyWindow,
    Fixed,
    Growing,
    OfAnyWindow,
    OfWindow,
    Window,
    as_elapsed,
    as_window,
    fraction,
    is_elapsed,
    positive_int,
    short_repr,
    smaller,
)

__all__ = [
    "AnyRule",
    "AnyTail",
    "AnytimeWindow",
    "BlockRule",
    "ExactWindow",
    "Exponential",
    "RawTail",
    "Rule",
    "TrainingRule",
    "WindowRule",
    "as_rule",
    "as_training_rule",
    "check_window",
    "is_timed",
    "no_window_error",
    "refuses_decay",
    "shared_rules",
    "size_of",
    "window_of",
]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Turns = Literal["balanced", "paper"]

_MOST = 10_000  # accumulators: more would take as much memory as storing samples


@dataclass(frozen=True, init=False)
class AnytimeWindow(OfAnyWindow):
    """The paper's anytime window average, for any window and number of accumulators.

    The open block is closed when it has its share of the window *and* the blocks after the oldest
    hold the whole window, so that the oldest can be dropped. With `turns="paper"`, as in the paper,
    a growing window does not wait for the share; some accumulators then hold small blocks.
    """

    window: Window
    accumulators: int = 3
    turns: Turns = "balanced"

    def __init__(self, window: AnyWindow, accumulators: int = 3, turns: Turns = "balanced") -> None:
        super().__init__(window)
        if turns not in ("balanced", "paper"):
            raise ValueError(f'turns: expected "balanced" or "paper", got {turns!r}')
        object.__setattr__(
            self, "accumulators", positive_int(accumulators, "accumulators", 2, _MOST)
        )
        if turns == "paper" and self.is_timed:
            raise ValueError('turns: an Elapsed window needs turns="balanced"')
        object.__setattr__(self, "turns", turns)

    def closes(self, starts: Sequence[int]) -> int:
        """Return the step after which the open block takes no more samples.

        Examples:
            >>> AnytimeWindow(100).closes([0, 0, 50]), AnytimeWindow(100).closes([0, 50, 100])
            (100, 150)
        """
        window = self.window
        if isinstance(window, Fixed):  # the blocks are equal shares of the window
            return window.filled_at(starts[-1], self.accumulators - 1)
        balanced = self.turns == "balanced"
        end = window.filled_at(starts[-1], self.accumulators - 1) if balanced else starts[-1] + 1
        # while a block is empty, none is dropped
        return end if starts[0] == starts[1] else max(end, window.filled_at(starts[1]))

    def alike_until(self, starts: Sequence[int], size: int) -> int:
        """Return the last step at which a block of `size` starts, if all blocks have that size.

        Examples:
            >>> AnytimeWindow(0.001).alike_until([0, 1, 2], 1)
            1998
        """
        window, z = self.window, self.accumulators - 1
        # turns then depend only on the sizes of the blocks
        if isinstance(window, Fixed) or starts[1] >= window.steady_from:
            return NEVER
        balanced = self.turns == "balanced"
        if not balanced and size > 1:
            return -1
        share = window.filled_until(size, z) if balanced else NEVER
        # z blocks must hold the window when the last of them is closed
        return min(share, window.filled_until(z * size) + (z - 1) * size)


@dataclass(frozen=True, init=False)
class Exponential(OfAnyWindow):
    """An exponential average that has the variance of k_t samples at every step.

    Its effective size is n_t = min(n_{t-1} + 1, k_t): it is the plain mean at first, and has the
    effective size k_t later. The decay of a fixed window is then (k-1)/(k+1), as in the paper.

    With an `Elapsed` window, all samples count at first. From then on, if dt passes between two
    samples, the part dt / period of the effective size is lost, and the new sample adds 1.
    """

    window: Window
    accumulators = 1

    @classmethod
    def from_decay(cls, decay: float) -> Exponential:
        """Return the EMA with this decay: its window is k = (1 + decay) / (1 - decay) samples.

        k is rounded to a whole number: 0.93 gives k = 28, whose decay is 0.931. At the start, the
        average is the plain mean.

        Args:
            decay: The weight of the average so far, above 0.2 and below 1. A smaller decay would be
                rounded to a window of one sample, which averages nothing.

        Examples:
            >>> Exponential.from_decay(0.9), Exponential.from_decay(0.999)
            (Exponential(window=Fixed(k=19)), Exponential(window=Fixed(k=1999)))
        """
        if isinstance(decay, bool | np.bool_) or not isinstance(decay, Real):
            raise TypeError(f"decay: expected a number in (0.2, 1), got {decay!r}")
        if not 0.2 < float(decay) < 1:
            raise ValueError(f"decay: expected a number in (0.2, 1), got {short_repr(decay)}")
        return cls(_samples_of(decay))

    def decay(self, t: Any) -> Any:
        """Return the weight of the average so far when sample t = 1, 2, … arrives.

        Use it in other libraries: average = decay(t) * average + (1 - decay(t)) * x.

        Examples:
            >>> [round(Exponential(0.5).decay(t), 3) for t in (1, 2, 10, 100, 1000)]
            [0.0, 0.0, 0.696, 0.966, 0.997]
        """
        return abs(self._joined(t)[1])

    def weight(self, t: Any) -> Any:
        """Return the weight of sample t when it arrives, 1 - decay(t), accurate in float32.

        Examples:
            >>> [round(Exponential(0.5).weight(t), 3) for t in (1, 2, 10, 100, 1000)]
            [1.0, 1.0, 0.304, 0.034, 0.003]
        """
        return self._joined(t)[0]

    def _joined(self, t: Any) -> Any:
        """Return the weights of sample t and of the average before it."""
        before = self.window.size(t - 1)
        # the number of samples beyond n_t; subtracting n_t would cancel digits in float32
        excess = (t - 1 >= before) * (1.0 - self.window.growth(t))
        return weights(smaller(t - 1, before), 1.0, excess, square_root)


@dataclass(frozen=True)
class AnyTail:
    """Averages that are read with any window, from the fraction `shortest` of the stream to all.

    Pass the window when you read: `value(0.3)`, `value(5000)`.

    The blocks cover the whole stream. An average consists of the newest blocks that hold the
    window. All samples of the oldest of these blocks have a weight, even samples before the window.
    To keep such samples few, blocks are merged so that their ages stay close to a geometric series.
    With more accumulators, an average reaches less far beyond the window.

    Examples:
        >>> from tailavg import TailAverage
        >>> average = TailAverage(AnyTail())
        >>> average.update_many(range(1000))
        >>> [round(average.value(c), 1) for c in (0.25, 0.5, 1.0)]  # exact: 874.5, 749.5, 499.5
        [877.0, 751.1, 499.5]
    """

    accumulators: int = 12
    shortest: float = 0.1

    def __post_init__(self) -> None:
        given: object = self.accumulators
        if isinstance(given, Fixed | Growing) or (isinstance(given, float) and 0 < given <= 1):
            raise TypeError(f"AnyTail takes its window when it is read: value({given!r})")
        object.__setattr__(
            self, "accumulators", positive_int(self.accumulators, "accumulators", 6, _MOST)
        )
        shortest = self.shortest
        if isinstance(shortest, bool | np.bool_) or not isinstance(shortest, Real):
            raise TypeError(f"shortest: expected a fraction in (0, 1), got {shortest!r}")
        if not (1e-6 <= shortest < 1 and float(shortest) < 1):
            raise ValueError(
                f"shortest: expected a fraction in [0.000001, 1), got {short_repr(shortest)}"
            )
        object.__setattr__(self, "shortest", float(shortest))

    @cached_property
    def _share(self) -> Fraction:
        """The share of the stream that a block has when it is closed: at most `shortest`.

        Larger blocks make averages worse while they are the newest; smaller blocks force more
        merges. The formula was fitted to the best shares in simulations.
        """
        c = self.shortest
        best = (0.3 + 2.0 * math.log(1.0 / c) / (1.0 - c)) / (self.accumulators - 1)
        thousandths = max(1, min(1000, round(1000 * best)))
        return Fraction(thousandths, 1000) * fraction(c)

    def closes(self, starts: Sequence[int]) -> int:
        """Return the step after which the open block takes no more samples."""
        last = starts[-1]
        if starts[0] == starts[1]:  # a block is empty
            return last + 1
        before = 1 - self._share  # the share of the stream before the open block
        return max(last + 1, -(-last * before.denominator // before.numerator))

    def merged(self, starts: Sequence[int], t: int) -> int:
        """Return the block to merge with the one before it when a block is opened at step t.

        The pair with the smallest ratio is merged: the joint size of the pair, divided by the
        number of samples after it. The ratio says how far a window that starts inside the pair
        overshoots. If a pair is so new that every allowed window starts before it, the ratio is
        computed for the first step at which a window starts inside the pair.
        """
        p, q = fraction(self.shortest).as_integer_ratio()
        best, least, since = 0, 1, 0  # the best pair so far, its size and the samples after it
        for block, end in enumerate([*starts[2:], t], start=1):
            size, after = end - starts[block - 1], max((q - p) * (t - end), p * end)
            if size * since < least * after:  # compares the ratios in integers
                best, least, since = block, size, after
        return best

    def window(self, window: Reading | None, t: int) -> Window | ByAge:
        """Return the window or decay to read with at step t. A linear decay becomes its window."""
        if window is None:
            raise no_window_error()
        reading = window if isinstance(window, ByAge) else as_window(window)
        if isinstance(reading, Decay) and reading.shape == "linear":
            reading = reading.window
        if not self.reads(reading, t):
            raise ValueError(
                f"window: expected at least {self.shortest:g} of the samples so far, which is "
                f"{self.shortest * t:g} of {t}, got {window!r}; create the AnyTail with a smaller "
                "`shortest` to read shorter windows"
            )
        return reading

    def reads(self, window: Window | ByAge, t: int) -> bool:
        """Return whether a window is long enough at step t. It is then long enough before, too."""
        return bool(window.size(t) >= self.shortest * t * (1 - float(TIE)))


@dataclass(frozen=True, init=False)
class ExactWindow(OfWindow):
    """The true average of the last ⌈k_t⌉ samples, all of which are stored."""

    window: Window

    def samples(self, t: Any) -> Any:
        """Return how many samples are averaged at step t: k_t rounded up, but at most t.

        Examples:
            >>> ExactWindow(0.07).samples(100), ExactWindow(0.07).samples(101)
            (7, 8)
        """
        if isinstance(t, np.ndarray):
            return np.minimum(t, np.ceil(self.window.size(t))).astype(np.int64)
        return min(t, math.ceil(self.window.size(t)))


@dataclass(frozen=True, init=False)
class RawTail(OfWindow):
    """The standard tail average: the mean of the last k_T samples of a stream of `total` samples.

    Before the tail starts, the value is the latest sample. After `total` samples, the value is the
    mean of all samples since the start of the tail.
    """

    window: Window
    total: int
    accumulators = 1

    def __init__(self, window: AnyWindow, total: int) -> None:
        super().__init__(window)
        object.__setattr__(self, "total", positive_int(total, "total"))

    @property
    def first(self) -> int:
        """The number of samples before the tail."""
        return self.total - int(min(self.total, math.ceil(self.window.size(self.total))))

    def size(self, t: Any) -> Any:
        """Return how many samples are averaged at step t."""
        most = np.maximum if isinstance(t, np.ndarray) else max
        return most(1.0, t - self.first)

    def closes(self, starts: Sequence[int]) -> int:
        """See `AnytimeWindow`. Each sample before the tail is a block; the tail is one block."""
        return starts[-1] + 1 if starts[-1] < self.first else NEVER

    def alike_until(self, starts: Sequence[int], size: int) -> int:
        """See `AnytimeWindow`."""
        return self.first - 1 if size == 1 else -1


BlockRule = AnytimeWindow | RawTail
WindowRule = BlockRule | Exponential | ExactWindow
Rule = WindowRule | AnyTail
TrainingRule = BlockRule | Exponential | AnyTail
AnyRule = AnyWindow | Rule | Elapsed | str | timedelta | np.timedelta64
"""What `as_rule` takes. Text and timedeltas are periods of time, as for `Elapsed`."""


def as_rule(rule: AnyRule, timed: bool = True) -> Rule:
    """Return a rule. A window, or a number that stands for one, becomes an `AnytimeWindow`."""
    if isinstance(rule, ByAge):
        raise TypeError(
            f"rule: expected a number, a window or a rule, got {rule}; average with AnyTail(), and "
            f"read the average with value({type(rule).__name__}(…))"
        )
    if isinstance(rule, Rule):
        return rule
    window: Any = as_elapsed(rule) if timed else rule
    is_time = timed and is_elapsed(window)
    return AnytimeWindow(window if is_time else as_window(window, "rule"))


def is_timed(rule: Rule) -> bool:
    """Return whether the rule has a window of time, so that each sample has a time."""
    return isinstance(rule, AnytimeWindow | Exponential) and rule.is_timed


def as_training_rule(rule: AnyWindow | Rule, stacklevel: int = 4) -> TrainingRule:
    """Return a rule for averaging the weights of a model. Raise if it is an `ExactWindow`.

    Warn about a number that looks like an EMA's decay. `stacklevel` is passed to `warnings.warn`,
    so that the warning points to the user's line.
    """
    given = as_rule(rule, timed=False)
    if is_timed(given):
        raise TypeError(
            f"rule: {given} averages samples that have times; the weights of a model have none: "
            "use a number of steps or a fraction"
        )
    if isinstance(given, ExactWindow):
        raise TypeError(
            f"rule: {given} holds every sample, which takes too much memory for a model; use "
            "AnytimeWindow, which has the same variance"
        )
    if isinstance(rule, float) and 0.9 <= rule < 1:
        warnings.warn(
            f"{rule:g} is the last {100 * rule:g} % of the steps, not a decay; the EMA with decay "
            f"{rule:g} is Exponential({_samples_of(rule)}); pass Growing({rule:g}) if you mean the "
            "fraction",
            stacklevel=stacklevel,
        )
    return given


def refuses_decay(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a function that takes a rule: if it gets `decay=0.999`, say what to pass instead."""

    @wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if "decay" in kwargs:
            decay = kwargs["decay"]
            ema = "Exponential(1999) has the decay 0.999"
            if isinstance(decay, float) and 0.2 < decay < 1:
                ema = f"the EMA with decay {decay:g} is Exponential({_samples_of(decay)})"
            raise TypeError(f"decay: pass a rule instead: {ema}")
        return call(*args, **kwargs)

    return checked


def _samples_of(decay: float) -> int:
    """Return the window whose `Exponential` has this decay, rounded to whole samples."""
    exact = Fraction(repr(float(decay)))  # the decimal number that was written
    return round((1 + exact) / (1 - exact))


def window_of(rule: Rule, window: Reading | None, t: int) -> Window | ByAge:
    """Return the window or decay of an average at step t: the rule's own window, or `window`."""
    if isinstance(window, Counted):
        return window
    if isinstance(rule, AnyTail):
        return rule.window(window, t)
    if window is not None:
        raise ValueError(
            f"window: {rule} has its own window, got {short_repr(window)}; average with AnyTail() "
            "to choose the window when you read"
        )
    return rule.window


def check_window(rule: Rule, window: Reading | None, steps: int | None = None) -> None:
    """Raise unless an average can be read with this window until the end of a run.

    Trainers call it before a run, with the number of its steps if that is known. Otherwise the run
    may have any length, and a fixed number of steps is refused for an `AnyTail`.

    Examples:
        >>> check_window(AnyTail(), 0.25)
        >>> check_window(AnyTail(), 1000, steps=10_000)
    """
    if not isinstance(rule, AnyTail):
        window_of(rule, window, 1)
        return
    if window is None:
        raise ValueError("AnyTail has no window of its own: pass one, as in window=0.25")
    reading = window if isinstance(window, ByAge) else as_window(window)
    if rule.reads(reading, NEVER if steps is None else steps):
        return
    least = f"{rule.shortest:g}"
    if steps is None:
        raise ValueError(
            f"window: {window!r} is too short for {rule} in a long run, where it is less than "
            f"{least} of the steps; pass a fraction of at least {least}, or a Decay or a Freshest "
            "over such a fraction"
        )
    raise ValueError(
        f"window: {window!r} is too short for the {steps} counted steps of this run: {rule} needs "
        f"at least {least} of them, {rule.shortest * steps:g}; pass a longer window, or create the "
        "AnyTail with a smaller `shortest`"
    )


def shared_rules(
    windows: Sequence[Window], accumulators: int = 12
) -> list[tuple[Rule, Window | None]]:
    """Return a rule for each of several windows, and the window to read it with, if any.

    One `AnyTail` serves all fractions. It cannot serve a fixed window, which becomes an ever
    smaller fraction of the stream.

    Examples:
        >>> shared_rules([Growing(0.1), Growing(0.5), Fixed(100)])
        [(AnyTail(accumulators=12, shortest=0.1), Growing(c=0.1, at_most=None)),
         (AnyTail(accumulators=12, shortest=0.1), Growing(c=0.5, at_most=None)),
         (AnytimeWindow(window=Fixed(k=100), accumulators=3, turns='balanced'), None)]
    """
    fractions = [w.c for w in windows if isinstance(w, Growing) and w.at_most is None]
    shortest = min(fractions, default=1.0)
    shared = AnyTail(accumulators, shortest if shortest < 1.0 else 0.5)
    return [
        (shared, window)
        if isinstance(window, Growing) and window.at_most is None
        else (AnytimeWindow(window), None)
        for window in windows
    ]


def no_window_error(advice: str = "pass one, as in value(0.25)") -> ValueError:
    """Return the error for an `AnyTail` that is read without a window."""
    return ValueError(f"AnyTail has no window of its own: {advice}")


def size_of(rule: Rule, window: Reading | None, t: int) -> float:
    """Return k_t of the window that an average is read with: see `window_of`.

    An `AnyTail` without a window has the size of the whole stream.

    Examples:
        >>> size_of(AnyTail(), 0.25, 1000), size_of(AnytimeWindow(100), None, 1000)
        (250.0, 100.0)
    """
    if isinstance(rule, AnyTail) and window is None:
        return float(t)
    reading = window_of(rule, window, t)
    if isinstance(rule, AnyTail) or isinstance(reading, Counted):
        return float(reading.size(t))
    return float(rule.size(t))
