"""`TailAverage`: the average of the tail of a stream, at every step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from tailavg.core import state as layout
from tailavg.core.clock import Clock, clock_for
from tailavg.core.decay import Reading
from tailavg.core.profile import Profile, block_weights, dense_weights, profile
from tailavg.core.rules import AnyTail, Rule, as_rule, size_of, window_of
from tailavg.core.windows import AnyWindow, Reals, shown
from tailavg.numpy.arithmetic import Array

__all__ = ["TailAverage", "Windows"]

SPREAD = 4
"""The fewest blocks whose spread tells the error of an average."""

NanPolicy = Literal["propagate", "raise", "omit"]
Windows = Reading | list[Reading] | tuple[Reading, ...] | None


class TailAverage:
    """The average of the last samples of a stream of numbers, or of arrays of one shape.

    Args:
        rule: How many samples are averaged, and how. A number (an int for the last that many, a
            float in (0, 1] for the last fraction), a window (`Fixed`, `Growing`) or a rule
            (`AnytimeWindow`, `Exponential`, `AnyTail`, `ExactWindow`, `RawTail`).
        dtype: That of the accumulators. By default numbers are held in float64; arrays in their own
            precision but at least float32, with sums folded every few hundred samples, so that a
            float32 average keeps 5 digits over a million samples. Integers become float64.
        nan_policy: `"propagate"`, `"raise"`, or `"omit"`: a sample with any NaN in it is left out
            whole and not counted. Infinities are data.

    Examples:
        >>> average = TailAverage(0.5)
        >>> for x in [1.0, 2.0, 3.0, 4.0]:
        ...     average.update(x)
        ...     print(average.value())
        1.0
        2.0
        2.7886751345948126
        3.5
    """

    # An average is a `TailAverage` until its first sample. Then its kind is known, and it becomes
    # of the class that stores such samples: an update has no time to look for its store.

    __slots__ = (
        "_buffer",
        "_clock",
        "_dtype",
        "_due",
        "_end",
        "_factors",
        "_left",
        "_means",
        "_nan_policy",
        "_scratch",
        "_shape",
        "_split",
        "_sum",
    )

    _stores: ClassVar[dict[tuple[type[Clock], bool], type[TailAverage]]] = {}

    # No sample is ever half taken. A plain update adds it to the sum between `_left = None` and the
    # next number, with operators: Python handles signals at calls only. All else is in `_wholly`.

    _held_in: ClassVar[tuple[str, str]] = "_dtype", "_shape"
    """Where it holds what a change may replace; nothing there is changed in place."""
    _held_now: ClassVar[Callable[[TailAverage], tuple[Any, Any]]] = attrgetter(*_held_in)

    _clock: Clock
    _left: int | None
    """How many more samples need nothing but an addition; None while one is made."""
    _due: int
    """The count after those."""
    _dtype: np.dtype[Any] | None
    _nan_policy: NanPolicy
    _shape: tuple[int, ...] | None  # None for numbers

    def __init__(
        self,
        rule: AnyWindow | Rule,
        *,
        dtype: npt.DTypeLike | None = None,
        nan_policy: NanPolicy = "propagate",
    ) -> None:
        if nan_policy not in get_args(NanPolicy):
            raise ValueError(
                f"nan_policy: expected one of {get_args(NanPolicy)}, got {nan_policy!r}"
            )
        self._clock = clock_for(as_rule(rule))
        self._nan_policy = nan_policy
        self._dtype = None if dtype is None else _accumulator_dtype(dtype)
        self._shape = None
        self._due = self._left = 0

    def update(self, x: Any) -> None:
        """Take one sample: a number, or an array of the shape of the samples before.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update([1.0, 10.0])
            >>> average.update([3.0, 30.0])
            >>> average.value()
            array([ 2., 20.])
        """
        sample = self._checked(x)
        if sample is None:
            return
        if self.count:
            self._add(sample)
        else:
            number = not (sample.shape or isinstance(x, np.ndarray))
            self._wholly(self._add_first, sample, None if number else sample.shape)

    def value(self, window: Reading | None = None) -> Any:
        """The average now: a float, or a new array. An `AnyTail` is asked for a window or `Decay`.

        Examples:
            >>> TailAverage(100).value()
            Traceback (most recent call last):
            ValueError: value: expected at least one sample before the first read, got none
        """
        if not self._now.count:
            raise layout.nothing_yet("value")
        average = self._average(window)
        return average.item() if self._shape is None else average

    def update_many(self, xs: Any) -> None:
        """Take many samples, along the first axis: as `update` with each, but much faster.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.value()
            949.5
        """
        samples = numbers(xs, "samples")
        rows, _ = self._checked_rows(samples)
        if len(rows):
            self._wholly(self._take_many, samples, rows)

    def _take_many(self, samples: Array, rows: Array) -> None:
        self._begin_with(samples)
        self._add_rows(rows)

    def scan(self, xs: Any, window: Windows = None) -> Array:
        """Take many samples, and return the average after each.

        An `AnyTail` is asked for a window, or for several: there is then a first axis of windows.

        Examples:
            >>> TailAverage(2).scan([1.0, 3.0, 5.0, 7.0])
            array([1., 2., 4., 6.])
        """
        samples = numbers(xs, "samples")
        rows, kept = self._checked_rows(samples)
        several = isinstance(window, list | tuple)
        windows: list[Any] = list(window) if isinstance(window, list | tuple) else [window]
        if not windows:
            raise ValueError("window: expected at least one, got none")
        for one in windows:
            window_of(self.rule, one, self.count + len(rows))
        if several and not isinstance(self.rule, AnyTail):
            raise ValueError(
                f"window: expected none, since {self.rule} has its own, got {window!r}"
            )
        every: Array = self._wholly(self._scan, samples, rows, kept, windows)
        return every if several else every[0]

    def _scan(self, samples: Array, rows: Array, kept: Array | None, windows: list[Any]) -> Array:
        before: list[Any] = [np.nan] * len(windows)
        if self._clock.count and kept is not None:
            before = [self._average(window) for window in windows]
        if len(rows):
            self._begin_with(samples)
        out: Array = np.empty((len(windows), *rows.shape), self._dtype)
        if len(rows):
            self._scan_rows(rows, windows, out)
        shape = samples.shape[1:]
        every = out.reshape(len(windows), len(rows), *shape)
        if kept is None:
            return every
        # a sample that is left out leaves the average as it was
        first = np.empty((len(windows), 1, *shape), every.dtype)
        for averages, value in zip(first, before, strict=True):
            averages[0] = value
        return np.concatenate([first, every], axis=1)[:, np.cumsum(kept)]

    @property
    def rule(self) -> Rule:
        """The rule, with its window."""
        return self._clock.rule

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The dtype of the accumulators; None while neither asked for nor known."""
        return self._dtype

    @property
    def nan_policy(self) -> NanPolicy:
        """What is done with a NaN."""
        return self._nan_policy

    @property
    def count(self) -> int:
        """The number of samples so far, t."""
        left = self._left
        if left is None:
            raise RuntimeError(
                "the average is not whole: a call was interrupted half-way; load a saved state, "
                "or create a new average"
            )
        return self._due - left

    @property
    def size(self) -> float:
        """The size of the window, k_t: what was asked for. `profile` has what was got.

        An `AnyTail` has none of its own, and raises.

        Examples:
            >>> average = TailAverage(0.25)
            >>> average.update_many(range(1000))
            >>> average.size
            250.0
        """
        return size_of(self.rule, None, self.count)

    def weights(self, window: Reading | None = None) -> Reals:
        """The weight of each of the `count` samples, oldest first.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update_many([1.0, 3.0, 5.0])
            >>> average.weights()
            array([0. , 0.5, 0.5])
        """
        clock = self._now
        return dense_weights(self.rule, clock.starts, clock.count, window)

    def profile(self, window: Reading | None = None) -> Profile:
        """A summary of the weights: effective size, mean age, oldest age.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.profile()  # doctest: +NORMALIZE_WHITESPACE
            Profile(count=1000, size=100.0, effective_size=100.0, mean_age=49.5,
                    oldest_age=99, accumulators=3)
        """
        clock = self._now
        if not clock.count:
            raise layout.nothing_yet("profile")
        return profile(self.rule, clock.starts, clock.count, window)

    @np.errstate(all="ignore")
    def standard_error(self, window: Reading | None = None) -> Any:
        """The standard error of `value`, from how much the means of its blocks differ.

        Samples that are alike for a while, as those of a training are, make it larger, as they
        should; so does a trend within the window. The more blocks, the steadier: use twelve
        accumulators. NaN while fewer than four blocks have a weight, as with an `Exponential`, or
        with three accumulators: the spread of so few says little.

        Examples:
            >>> from tailavg import AnytimeWindow
            >>> average = TailAverage(AnytimeWindow(1000, accumulators=12))
            >>> average.update_many(np.random.default_rng(0).normal(size=5000))
            >>> float(round(average.standard_error(), 3))  # 1000 samples of variance 1: about 0.032
            0.037
        """
        clock = self._now
        t, starts = clock.count, clock.starts
        if not t:
            raise layout.nothing_yet("standard_error")
        sizes, weights = (np.array(each) for each in block_weights(self.rule, starts, t, window))
        means, folded, rest = self._arrays()
        means[-1:] += (rest - (t - folded) * means[-1:]) / sizes[-1]  # of the open block, whole
        used = weights > 0.0
        sizes, weights, means = sizes[used], weights[used], means[used]
        if len(sizes) < SPREAD:
            return np.nan if self._shape is None else np.full(self._shape, np.nan, self._dtype)
        apart = np.abs(means - np.tensordot(sizes / sizes.sum(), means, 1))
        scale = np.max(apart, axis=0)  # of the largest floats, squares would be infinite
        parts = apart / np.where(scale > 0, scale, 1.0)
        variance = np.tensordot(sizes, parts**2, 1) / (len(sizes) - 1)  # of a sample
        error = scale * np.sqrt(variance * np.sum(weights**2 / sizes))
        return error.item() if self._shape is None else error.astype(self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """All there is to know, as plain data in the layout of `tailavg.core.state`.

        Examples:
            >>> average = TailAverage(4)
            >>> average.update_many([1.0, 2.0, 3.0, 4.0, 5.0])
            >>> resumed = TailAverage.from_state_dict(average.state_dict())
            >>> resumed.update(6.0)
            >>> resumed.value()
            4.5
        """
        blocks, folded, partial = self._arrays()
        clock, number = self._clock, self._shape is None
        return layout.state(
            self.rule,
            nan_policy=self._nan_policy,
            dtype=None if self._dtype is None else self._dtype.name,
            scalar=number,
            count=clock.count,
            starts=clock.starts,
            blocks=layout.as_json(blocks) if number else blocks,
            folded=folded,
            partial=layout.as_json(partial) if number else partial,
        )

    def _arrays(self) -> tuple[Array, int, Array]:
        """Copies of what `_held` gives."""
        shape, _ = self._shape or (), self._now
        means, folded, partial = self._held()
        if shape:
            means = [np.broadcast_to(mean, shape) for mean in means]
        blocks = np.array(means, self._dtype)
        return blocks, folded, np.array(np.broadcast_to(partial, shape), self._dtype)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TailAverage:
        """The average that `state_dict` saved; it goes on as if it had never stopped.

        A state that another framework saved is accepted if it is of one array.
        """
        state = layout.check(state)
        if isinstance(state["partial"], Mapping):
            state = layout.unnamed(state)
        try:
            average = TailAverage(
                layout.rule_from(state["rule"]),
                dtype=state["dtype"],
                nan_policy=state["nan_policy"],
            )
        except TypeError as error:
            raise ValueError(f"state: {error}") from error
        count, starts, folded = state["count"], list(state["starts"]), state["folded"]
        empty = not (starts or folded or np.any(state["partial"]))
        if count < 0 or len(starts) != len(state["blocks"]) or (count == 0) != empty:
            raise ValueError(
                f"state: sizes do not add up: count {count}, {len(starts)} starts, "
                f"{len(state['blocks'])} blocks"
            )
        if count:
            if average._dtype is None:
                raise ValueError(f"state: dtype: expected that of {count} samples, got None")
            layout.check_steps(count, starts, folded)
            try:
                blocks = numbers(state["blocks"], "state: blocks")
                partial = numbers(state["partial"], "state: partial")
            except TypeError as error:
                raise ValueError(*error.args) from error
            shape = blocks.shape[1:]
            if partial.shape != shape or (state["scalar"] and shape):
                raise ValueError(
                    f"state: expected a partial sum of the blocks' shape {shape}, "
                    f"got {partial.shape}"
                )
            if not np.can_cast(np.result_type(blocks, partial), average._dtype, "same_kind"):
                raise ValueError(f"state: blocks are not of dtype {average._dtype}")
            average._clock.restore(count, starts, folded)
            average._begin(None if state["scalar"] else shape, average._dtype)
            average._restore(blocks.astype(average._dtype), partial.astype(average._dtype))
            average._commit()
        return average

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one file (npz, no pickle), whole or not at all."""
        layout.write_file(path, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TailAverage:
        """The average that `save` wrote, or `ParameterAverage.save` of a single tensor.

        Or `tailavg stream --state`, of one column and one window, without `--by`.

        Examples:
            >>> import tempfile
            >>> average = TailAverage(3)
            >>> average.update(1.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     average.save(f"{folder}/average.npz")
            ...     TailAverage.load(f"{folder}/average.npz") == average
            True
        """
        return cls.from_state_dict(layout.read(path))

    def copy(self) -> TailAverage:
        """An average in the same state, that goes its own way from here."""
        return self.from_state_dict(self.state_dict())

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return TailAverage.from_state_dict, (self.state_dict(),)

    def __eq__(self, other: object) -> bool:
        """Whether both are in the same state: equal numbers, and a NaN equals a NaN."""
        if not isinstance(other, TailAverage):
            return NotImplemented
        (mine, *arrays), (its, *others) = self._described(), other._described()
        return mine == its and all(
            np.array_equal(*pair, equal_nan=True) for pair in zip(arrays, others, strict=True)
        )

    def _described(self) -> tuple[Any, Array, Array]:
        """All there is to know: what is equal if it is equal, and two arrays."""
        blocks, folded, partial = self._arrays()
        clock = self._clock
        described = self.rule, self._nan_policy, self._dtype, self._shape
        return (*described, clock.count, clock.starts, folded), blocks, partial

    def __repr__(self) -> str:
        options = [repr(self.rule)]
        if self._dtype is not None:
            options.append(f"dtype={self._dtype.name!r}")
        if self._nan_policy != "propagate":
            options.append(f"nan_policy={self._nan_policy!r}")
        samples = "not whole" if self._left is None else f"{self.count or 'no'} samples"
        shape = f" of shape {self._shape}" if self._shape else ""
        return f"<TailAverage({', '.join(options)}): {samples}{shape}>"

    # How a change is made.

    def _wholly(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Change the average, from the clock's count on: it happens wholly, or not at all."""
        clock, kind, left = self._clock, self.__class__, self._left
        clock.count = self.count if left is None else self._due - left
        time = clock.count, clock.blocks, clock.folded
        held = kind._held_now(self)
        try:
            self._left = None
            result = change(*arguments)
            self._commit()
        except BaseException:
            self._bring_back(kind, held, time)
            raise
        return result

    def _bring_back(
        self, kind: type[TailAverage], held: tuple[Any, Any], time: tuple[int, list[int], int]
    ) -> None:
        """Undo a change. If this is interrupted, too, the average is not whole."""
        self._left = None
        self.__class__ = kind
        for name, was in zip(kind._held_in, held, strict=True):
            setattr(self, name, was)
        self._clock.resume(*time)
        self._commit()

    def _commit(self) -> None:
        """Count the samples that the clock has counted."""
        self._due = self._clock.count
        self._left = 0

    @property
    def _now(self) -> Clock:
        """The clock, at this step: updates count without it until something is due."""
        self._clock.count = self.count
        return self._clock

    # What a store fills in. Samples reach it checked, as arrays, or as the rows of a matrix.
    # All but `_add` are called by `_wholly`, or to read.

    def _make_room(self) -> None:
        """Hold no sample, in room for samples of this shape and dtype."""

    def _add(self, sample: Array) -> None:
        """Take one sample that is not the first."""

    def _add_due(self, sample: Array) -> None:
        """Do what is due, and take one sample."""

    def _add_rows(self, rows: Array) -> None:
        """Take many."""

    def _scan_rows(self, rows: Array, windows: list[Reading | None], out: Array) -> None:
        """Take many, and write the averages over each window after each of them."""

    def _average(self, window: Reading | None) -> Any:
        """The average over a window, a new array or a number."""

    def _held(self) -> tuple[Sequence[Any], int, Any]:
        """The means, the step up to which samples are in them, and the sum of those since."""
        return [], 0, 0.0

    def _restore(self, blocks: Array, partial: Array) -> None:
        """Hold these means and this sum. The clock has been restored."""

    def __init_subclass__(cls, clock: type[Clock] | None = None, numbers: bool = False) -> None:
        """A store names the clock that it follows, and whether it is for numbers or arrays."""
        cls._held_now = attrgetter(*cls._held_in)
        if clock is not None:
            TailAverage._stores[clock, numbers] = cls

    def _begin(self, shape: tuple[int, ...] | None, dtype: np.dtype[Any]) -> None:
        """Fix the shape and dtype of the samples, and become the average that stores such."""
        if self._dtype is None:
            exact = dtype.kind in "biu" or shape is None
            self._dtype = np.result_type(dtype, np.float64 if exact else np.float32)
        self._shape = shape
        numbers = shape is None and self._dtype == np.float64
        self.__class__ = self._stores[type(self._clock), numbers]
        self._make_room()

    def _begin_with(self, samples: Array) -> None:
        """Begin with the first of many samples, if there was none before."""
        if not self._clock.count:
            self._begin(samples.shape[1:] if samples.ndim > 1 else None, samples.dtype)

    def _add_first(self, sample: Array, shape: tuple[int, ...] | None) -> None:
        self._begin(shape, sample.dtype)
        self._add_due(sample)

    # Checks.

    def _checked(self, x: Any) -> Array | None:
        """A sample as an array; None if it is to be left out."""
        sample = numbers(x, "sample")
        self._check_kind(sample.shape, sample.dtype)
        if self._nan_policy != "propagate" and np.isnan(sample).any():
            if self._nan_policy == "raise":
                raise ValueError(f"sample: expected no NaN (nan_policy='raise'), got {x!r}")
            return None
        return sample

    def _checked_rows(self, xs: Array) -> tuple[Array, npt.NDArray[np.bool_] | None]:
        """Samples as rows of a matrix; and which are kept, if any is left out."""
        if xs.ndim == 0:
            raise ValueError(f"samples: expected a sequence of them, got the number {xs}")
        if len(xs) == 0:
            raise ValueError("samples: expected at least one, got an empty chunk")
        self._check_kind(xs.shape[1:], xs.dtype)
        rows: Array = xs.reshape(len(xs), math.prod(xs.shape[1:]))
        kept = None
        if self._nan_policy != "propagate" and has_nan(rows):
            bad = np.isnan(rows).any(axis=1)
            if self._nan_policy == "raise":
                raise ValueError(
                    f"samples: expected no NaN (nan_policy='raise'), got {int(bad.sum())} samples "
                    f"with NaN, the first at index {int(bad.argmax())}"
                )
            kept = np.logical_not(bad)
            rows = rows[kept]
        return rows, kept

    def _check_kind(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if self.count and shape != (self._shape or ()):
            raise ValueError(f"sample: expected shape {self._shape or ()}, as before, got {shape}")
        if self._dtype is not None and dtype.kind == "c" and self._dtype.kind != "c":
            raise TypeError(f"sample: expected real numbers for {self._dtype}, got {dtype}")


def has_nan(xs: Array) -> bool:
    """Whether there is a NaN: the sum is one then, which is found faster."""
    with np.errstate(all="ignore"):
        return bool(np.isnan(xs.sum()) and np.isnan(xs).any())


def numbers(x: Any, what: str) -> Array:
    """`x` as an array of real or complex numbers."""
    if _is_masked(x):
        raise TypeError(
            f"{what}: expected numbers, got a masked array; fill it with NaN and see nan_policy"
        )
    try:
        array = np.asarray(float(x) if isinstance(x, int) else x)
    except (ValueError, OverflowError) as error:
        raise ValueError(
            f"{what}: expected arrays of one shape, got {type(x).__name__}: {error}"
        ) from error
    if array.dtype.kind not in "biufc":
        raise TypeError(
            f"{what}: expected real or complex numbers, got {type(x).__name__} of {array.dtype}"
        )
    return array


def _is_masked(x: Any) -> bool:
    """Whether `x`, or anything in a list, is a masked array: its mask would be lost."""
    if not isinstance(x, list | tuple):
        return isinstance(x, np.ma.MaskedArray)
    kinds = set(map(type, x))
    if any(issubclass(kind, np.ma.MaskedArray) for kind in kinds):
        return True
    return any(issubclass(kind, list | tuple) for kind in kinds) and any(map(_is_masked, x))


def _accumulator_dtype(asked: npt.DTypeLike) -> np.dtype[Any]:
    try:
        dtype = np.dtype(np.dtype(asked).type)  # NumPy's own object, that updates compare with
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in "fc" or np.finfo(dtype).bits < 32:
        raise TypeError(f"dtype: expected float32, float64 or a complex one, got {shown(asked)}")
    return dtype
