"""`TailAverage`: the average of the tail of a stream, at every step."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from tailavg.core import state as layout
from tailavg.core.profile import Profile, dense_weights, profile, reading
from tailavg.core.rules import Rule, WindowRule, as_rule
from tailavg.core.windows import AnyWindow, Reals

__all__ = ["TailAverage", "numbers"]

NanPolicy = Literal["propagate", "raise", "omit"]
Array = npt.NDArray[Any]


class TailAverage:
    """The average of the last samples of a stream of numbers, or of arrays of one shape.

    `rule` says how many samples and how: a number (an int for the last that many, a float in
    (0, 1] for the last fraction), a window (`Fixed`, `Growing`) or a rule (`AnytimeWindow`,
    `Exponential`, `ExactWindow`, `RawTail`).

    `dtype` is that of the accumulators. By default numbers are held in float64; arrays in their
    own precision but at least float32, with sums folded every few hundred samples, so that a
    float32 average keeps 5 digits over a million samples. Integers become float64.

    `nan_policy` is `"propagate"`, `"raise"`, or `"omit"`: a sample with any NaN in it is left
    out whole and not counted. Infinities are data.

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

    __slots__ = (
        "_count",
        "_dtype",
        "_floats",
        "_nan_policy",
        "_plain",
        "_rule",
        "_scalar",
        "_shape",
    )

    _storages: ClassVar[dict[type, type[TailAverage]]] = {}

    _count: int
    _dtype: np.dtype[Any] | None
    _floats: bool  # whether they are held as Python floats
    _nan_policy: NanPolicy
    _plain: bool  # whether samples are held as Python numbers
    _rule: Rule
    _scalar: bool
    _shape: tuple[int, ...]

    def __init_subclass__(cls, rules: tuple[type, ...] = ()) -> None:
        """A storage names the types of rules that it serves."""
        TailAverage._storages.update(dict.fromkeys(rules, cls))

    def __new__(cls, rule: AnyWindow | Rule, **_: Any) -> TailAverage:
        """An average is an instance of the storage that serves its rule."""
        if cls is TailAverage:
            cls = cls._storages[type(as_rule(rule))]
        return object.__new__(cls)

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
        self._rule = as_rule(rule)
        self._nan_policy = nan_policy
        self._dtype = None if dtype is None else _accumulator_dtype(np.dtype(dtype))
        self._scalar = self._plain = self._floats = True
        self._shape = ()
        self._count = 0
        self._reset()

    # What a storage does. Samples reach it checked and converted.

    _reset: Callable[[], None]  # hold nothing
    _start: Callable[[], None]  # make room: the shape and dtype of samples are known
    _add: Callable[[Any], None]  # take one sample
    _add_rows: Callable[[Array], None]  # take many, the rows of a matrix
    _scan_rows: Callable[[Array, Array], None]  # and write the average after each
    _read: Callable[[WindowRule], Any]  # the average, by a rule
    _starts_now: Callable[[], list[int]]  # the starts of the blocks, oldest first
    _save: Callable[[], tuple[list[Any], int, Any]]  # blocks, step of the last fold, partial sum
    _restore: Callable[[list[int], list[Any], int, Any], None]  # starts, and what was saved

    # What a user calls.

    def update(self, x: Any) -> None:
        """Take one sample: a number, or an array of the shape of the samples before.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update([1.0, 10.0])
            >>> average.update([3.0, 30.0])
            >>> average.value()
            array([ 2., 20.])
        """
        sample = self._take(x)
        if sample is not None:
            self._add(sample)

    def value(self, window: AnyWindow | None = None) -> Any:
        """The average now: a float, or a new array. An `AnyTail` is asked for a window.

        Examples:
            >>> TailAverage(100).value()
            Traceback (most recent call last):
            ValueError: value: expected at least one sample before the first read, got none
        """
        self._require_a_sample("value")
        value = self._read(reading(self._rule, window, self._count))
        return value if self._plain or not self._scalar else value.item()

    def update_many(self, xs: Any) -> None:
        """Take many samples, along the first axis: as `update` with each, but much faster.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.value()
            949.5
        """
        rows, _ = self._take_rows(xs)
        if len(rows):
            self._add_rows(rows)

    def scan(self, xs: Any, window: AnyWindow | Sequence[AnyWindow] | None = None) -> Array:
        """Take many samples, and return the average after each.

        An `AnyTail` is asked for a window, or for several: there is then a first axis of windows.

        Examples:
            >>> TailAverage(2).scan([1.0, 3.0, 5.0, 7.0])
            array([1., 2., 4., 6.])
        """
        reading(self._rule, cast("Any", window), self._count)
        before = self.value() if self._count else np.nan
        rows, kept = self._take_rows(xs)
        if not len(rows):
            return np.array(np.broadcast_to(before, np.shape(xs)))
        out: Array = np.empty((len(rows), rows.shape[1]), self._dtype)
        self._scan_rows(rows, out)
        out = out.reshape(len(rows), *self._shape)
        if kept is None:
            return out
        # a sample that is left out leaves the average as it was
        latest = np.cumsum(kept) - 1
        every: Array = out[latest]
        every[latest < 0] = before
        return every

    @property
    def rule(self) -> Rule:
        """The rule, with its window."""
        return self._rule

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
        return self._count

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
        return float(reading(self._rule, None, self._count).size(self._count))

    def weights(self, window: AnyWindow | None = None) -> Reals:
        """The weight of each of the `count` samples, oldest first.

        Examples:
            >>> average = TailAverage(2)
            >>> average.update_many([1.0, 3.0, 5.0])
            >>> average.weights()
            array([0. , 0.5, 0.5])
        """
        rule = reading(self._rule, window, self._count)
        return dense_weights(rule, self._starts_now(), self._count)

    def profile(self, window: AnyWindow | None = None) -> Profile:
        """A summary of the weights: effective size, mean age, oldest age.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> average.profile()  # doctest: +NORMALIZE_WHITESPACE
            Profile(count=1000, size=100.0, effective_size=100.0, mean_age=49.5,
                    oldest_age=99, accumulators=3)
        """
        self._require_a_sample("profile")
        rule = reading(self._rule, window, self._count)
        return profile(rule, self._starts_now(), self._count)

    def state_dict(self) -> dict[str, Any]:
        """All there is to know, as plain data in the layout of `tailavg.core.state`.

        Examples:
            >>> average = TailAverage(3)
            >>> average.update_many([1.0, 2.0, 3.0, 4.0])
            >>> resumed = TailAverage.from_state_dict(average.state_dict())
            >>> resumed.update(5.0)
            >>> resumed.value()
            4.0
        """
        blocks: Any
        blocks, folded, partial = self._save()
        if not self._scalar:
            blocks = np.array(blocks, self._dtype).reshape(len(blocks), *self._shape)
            partial = np.array(np.broadcast_to(partial, self._shape), self._dtype)
        return layout.state(
            self._rule,
            nan_policy=self._nan_policy,
            dtype=None if self._dtype is None else self._dtype.name,
            scalar=self._scalar,
            count=self._count,
            starts=self._starts_now(),
            blocks=blocks,
            folded=folded,
            partial=partial,
        )

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> TailAverage:
        """The average that `state_dict` saved; it goes on as if it had never stopped.

        What another framework saved will do, if it is of one array.
        """
        layout.check(state)
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
            blocks = blocks.astype(average._dtype)
            partial = partial.astype(average._dtype)
            average._begin(shape, average._dtype, state["scalar"])
            average._count = count
            if average._plain:
                average._restore(starts, blocks.tolist(), folded, partial.item())
            else:
                average._restore(starts, list(blocks), folded, partial)
        return average

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one file (npz, no pickle), whole or not at all."""
        layout.write_file(path, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TailAverage:
        """The average that `save` wrote.

        Examples:
            >>> import tempfile
            >>> average = TailAverage(3)
            >>> average.update(1.0)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     average.save(f"{folder}/average.npz")
            ...     TailAverage.load(f"{folder}/average.npz") == average
            True
        """
        return cls.from_state_dict(layout.read_file(path))

    def copy(self) -> TailAverage:
        """An average in the same state, that goes its own way from here."""
        return self.from_state_dict(self.state_dict())

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        return TailAverage.from_state_dict, (self.state_dict(),)

    def __eq__(self, other: object) -> bool:
        """Whether both are in the same state, to the bit (a NaN equals a NaN)."""
        if not isinstance(other, TailAverage):
            return NotImplemented
        mine, its = self.state_dict(), other.state_dict()
        arrays = ("blocks", "partial")
        return all(mine[key] == its[key] for key in mine if key not in arrays) and all(
            np.array_equal(mine[key], its[key], equal_nan=True) for key in arrays
        )

    def __repr__(self) -> str:
        options = [repr(self._rule)]
        if self._dtype is not None:
            options.append(f"dtype={self._dtype.name!r}")
        if self._nan_policy != "propagate":
            options.append(f"nan_policy={self._nan_policy!r}")
        samples = "no samples" if not self._count else f"{self._count} samples"
        shape = f" of shape {self._shape}" if self._shape else ""
        return f"<TailAverage({', '.join(options)}): {samples}{shape}>"

    # What storages share.

    def _require_a_sample(self, call: str) -> None:
        if not self._count:
            raise ValueError(
                f"{call}: expected at least one sample before the first read, got none"
            )

    def _take(self, x: Any) -> Any:
        """A sample, checked, as a storage holds it; None if it is to be left out."""
        sample = numbers(x, "sample")
        self._check_kind(sample.shape, sample.dtype)
        if self._nan_policy != "propagate" and np.isnan(sample).any():
            if self._nan_policy == "raise":
                raise ValueError(f"sample: expected no NaN (nan_policy='raise'), got {x!r}")
            return None
        if not self._count:
            self._begin(sample.shape, sample.dtype, not (sample.shape or isinstance(x, np.ndarray)))
        return self._dtype.type(sample).item() if self._plain and self._dtype else sample

    def _take_rows(self, xs: Any) -> tuple[Array, npt.NDArray[np.bool_] | None]:
        """Samples, checked, as rows of a matrix; and which were kept, if any was left out."""
        rows = numbers(xs, "samples")
        if rows.ndim == 0:
            raise ValueError(f"samples: expected a sequence of them, got the number {xs!r}")
        if len(rows) == 0:
            raise ValueError("samples: expected at least one, got an empty chunk")
        self._check_kind(rows.shape[1:], rows.dtype)
        kept: npt.NDArray[np.bool_] | None = None
        matrix: Array = rows.reshape(len(rows), math.prod(rows.shape[1:]))
        if self._nan_policy != "propagate":
            bad = np.isnan(matrix).any(axis=1)
            if bad.any() and self._nan_policy == "raise":
                raise ValueError(
                    f"samples: expected no NaN (nan_policy='raise'), got {int(bad.sum())} samples "
                    f"with NaN, the first at index {int(bad.argmax())}"
                )
            if bad.any():
                kept = np.logical_not(bad)
                matrix = matrix[kept]
        if not self._count and len(matrix):
            self._begin(rows.shape[1:], rows.dtype, rows.ndim == 1)
        return matrix, kept

    def _check_kind(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if self._count and shape != self._shape:
            raise ValueError(f"sample: expected shape {self._shape}, as before, got {shape}")
        if self._dtype is not None and dtype.kind == "c" and self._dtype.kind != "c":
            raise TypeError(f"sample: expected real numbers for {self._dtype}, got {dtype}")

    def _begin(self, shape: tuple[int, ...], dtype: np.dtype[Any], scalar: bool) -> None:
        """Fix the shape and dtype of the samples, at the first one."""
        self._scalar = scalar
        self._shape = shape
        if self._dtype is None:
            wide = dtype.kind in "biu" or scalar
            self._dtype = np.result_type(dtype, np.float64 if wide else np.float32)
        self._floats = scalar and self._dtype == np.float64
        self._plain = self._floats or (scalar and self._dtype == np.complex128)
        self._start()


def numbers(x: Any, what: str) -> Array:
    """`x` as an array of real or complex numbers."""
    if isinstance(x, np.ma.MaskedArray):
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


def _accumulator_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind not in "fc" or np.finfo(dtype).bits < 32:
        raise TypeError(f"dtype: expected float32, float64 or a complex one, got {dtype}")
    return dtype
