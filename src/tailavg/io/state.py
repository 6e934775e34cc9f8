"""The layout of saved averages, which all frameworks share, and the files that hold it.

A state is a dict of plain data:

- `format`, `version`: `"tailavg"`, 1
- `rule`: the rule and its window, each as a dict of its fields and its `type`
- `nan_policy`: `"propagate"`, `"raise"` or `"omit"`
- `dtype`: the dtype of the accumulators; None before the first sample, unless one was chosen
- `scalar`: whether samples are numbers rather than arrays
- `count`: the number of samples so far, t
- `starts`: for each block, oldest first, the number of samples before it
- `blocks`: the means of the blocks, stacked along the first axis; the last block is open, and its
  mean covers its samples up to step `folded`
- `folded`: the last step whose sample is included in the means of the blocks
- `partial`: the sum of the samples after step `folded`, plus the rounding error of the last merge
  into a mean; for an `Exponential`, the sum of the samples after step `folded`, where sample i is
  multiplied by (1 - decay(i)) / (decay(folded + 2) ⋯ decay(i))

If the window is a period of time, `elapsed` has times in nanoseconds: for each block, those of the
`first` and the `last` sample. An `Exponential` has `first` and `last` of all samples, its effective
`size`, the `decay` of the first sample after `folded`, and the `scale`, the product of the decays
of the samples after that one.

An average with `variance=True` has two more:

- `variances`: for each block, the mean squared deviation of its samples from the mean, stacked like
  `blocks`
- `squares`: like `partial`, for (x - shift)². The shift is the last mean in `blocks`. While that
  block has no sample in its mean, its place in `blocks` holds its first sample.

If samples are numbers, `blocks` is a list, and the state can be written as JSON. A complex number
is then a list of its real and imaginary parts, and a number in extended precision is a string.

In averages of models, each block and `partial` are dicts of arrays by name. If some calls do not
count as samples, `calls` is the number of calls since the last sample, or since the start. Each
framework loads the states of the others.

An `Exponential` has one block, whose mean is the average at step `folded`. An `ExactWindow` has
blocks of one sample.

Averages by key (`TailAverages`) have the format `"tailavg by key"`. Besides `version`, `rule` and
`nan_policy`, the state has lists with one entry per key: `keys`, `counts`, `starts`, `blocks`,
`folded` and `partial`, and perhaps `variances` and `squares`. In a file, the lists of `starts`,
`blocks` and `variances` of all keys are concatenated,
`held` is the number of blocks of each key, and `keys` is JSON as bytes, with tuples as lists.

`tailavg stream` saves lines of JSON. The first line has the options. Each further line is a list of
a key and its averages; an average is a dict of `count`, `starts`, `blocks`, `folded` and `partial`,
and with `--std` of `variances` and `squares`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import numpy.typing as npt

from tailavg.core.elapsed import Elapsed
from tailavg.core.rules import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail, Rule
from tailavg.core.windows import MOST, Fixed, Growing, short_repr
from tailavg.io.files import saved_folder, sync, whole_file, whole_folder
from tailavg.io.tensors import mapped, write_arrays

__all__ = [
    "FORMAT",
    "STREAM",
    "STREAM_VERSION",
    "as_json",
    "by_name",
    "check",
    "check_elapsed",
    "check_keyed",
    "check_model_state",
    "check_steps",
    "keyed_state",
    "named",
    "no_samples_error",
    "plain",
    "read",
    "read_keyed",
    "rule_from",
    "state",
    "stream_entry",
    "unnamed",
    "write_file",
    "write_folder",
    "write_keyed",
]

FORMAT = "tailavg"
KEYED = "tailavg by key"
VERSION = 1

STREAM = "tailavg stream"
"""The `format` of the states of `tailavg stream`."""
STREAM_VERSION = 4

_HEADER: dict[str, Any] = {"format": str, "version": int, "rule": Mapping, "nan_policy": str}
_FIELDS: dict[str, Any] = _HEADER | {
    "dtype": (str, type(None)),
    "scalar": bool,
    "count": int,
    "starts": (list, tuple),
    "blocks": (list, tuple, np.ndarray),
    "folded": int,
    "partial": (int, float, complex, str, list, tuple, np.number, np.ndarray, Mapping),
}
_SPREAD = {"variances": _FIELDS["blocks"], "squares": _FIELDS["partial"]}
_ARRAYS = ("starts", "blocks", "partial", *_SPREAD)
_LISTS = ("keys", "counts", "starts", "blocks", "folded", "partial")
_OF_BLOCKS = ("starts", "blocks", "variances")  # lists of lists, of averages by key
_KEYED = dict.fromkeys((*_SPREAD, "elapsed"), list)  # what averages by key may have
_DTYPES = {np.dtype(code).name: np.dtype(code) for code in "fdgFDG"}
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Fixed, Growing, Elapsed, AnytimeWindow, Exponential, ExactWindow, RawTail, AnyTail)
}


def plain(description: Any) -> Any:
    """Return a rule or window as a dict of plain data, and anything else unchanged.

    Examples:
        >>> plain(Growing(0.25))
        {'type': 'Growing', 'c': 0.25, 'at_most': None}
    """
    if not dataclasses.is_dataclass(description):
        return description
    fields = {
        field.name: plain(getattr(description, field.name))
        for field in dataclasses.fields(description)
    }
    return {"type": type(description).__name__, **fields}


def rule_from(data: Any) -> Rule:
    """Return the rule that `plain` turned into a dict.

    Examples:
        >>> rule_from(plain(Exponential(0.25))) == Exponential(0.25)
        True
    """
    rule = _from_plain(data)
    if not isinstance(rule, Rule):
        raise ValueError(f"state: expected a rule, got {short_repr(data)}")
    return rule


def _from_plain(data: Any, depth: int = 2) -> Any:
    if not isinstance(data, Mapping):
        return data
    if not depth:
        raise ValueError("state: rule: dicts are nested too deeply")
    fields = {name: _from_plain(value, depth - 1) for name, value in data.items() if name != "type"}
    name = data.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"state: rule: expected a type among {known}, got {short_repr(name)}")
    try:
        return _TYPES[name](**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"state: rule: cannot make a {name}: {error}") from error


def state(
    rule: Rule,
    *,
    nan_policy: str = "propagate",
    dtype: str | None,
    scalar: bool = False,
    count: int,
    starts: list[int],
    blocks: Any,
    folded: int,
    partial: Any,
    **spread: Any,
) -> dict[str, Any]:
    """Return a state in this layout. `spread` is `variances` and `squares`, or nothing."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "rule": plain(rule),
        "nan_policy": nan_policy,
        "dtype": dtype,
        "scalar": scalar,
        "count": count,
        "starts": starts,
        "blocks": blocks,
        "folded": folded,
        "partial": partial,
        **spread,
    }


def keyed_state(rule: Rule, *, nan_policy: str, **lists: list[Any]) -> dict[str, Any]:
    """Return the state of averages by key: lists with one entry per key."""
    head = {"format": KEYED, "version": VERSION, "rule": plain(rule), "nan_policy": nan_policy}
    return head | lists


def named(block: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return a block, or the partial sum, as arrays by name. A single array needs no name."""
    arrays = block if isinstance(block, Mapping) else {"": block}
    names = list(names)
    if len(arrays) == len(names) == 1 and ("" in arrays or "" in names):
        return dict(zip(names, arrays.values(), strict=True))
    return arrays


def by_name(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the means of the blocks, and the partial sum, as arrays by name.

    A single array needs no name.
    Examples:
        >>> state = {"starts": [0], "blocks": np.array([[1.0, 2.0]]), "partial": np.zeros(2)}
        >>> by_name(state, {"weight": (2,)})
        ([{'weight': array([1., 2.])}], {'weight': array([0., 0.])})

    Raises:
        ValueError: If names or shapes differ from `shapes`.
    """
    blocks, number = state["blocks"], len(state["starts"])
    if len(blocks) < number:
        raise ValueError(f"corrupt state: {number} block starts but {len(blocks)} blocks")
    checked = []
    for block in (*blocks[:number], state["partial"]):
        arrays = named(block, shapes)
        if set(arrays) != set(shapes):
            raise ValueError(f"state: expected arrays of {list(shapes)}, got {list(arrays)}")
        checked.append({name: np.asarray(arrays[name]) for name in shapes})
        for name, array in checked[-1].items():
            if array.shape != shapes[name]:
                raise ValueError(f"state: {name}: expected shape {shapes[name]}, got {array.shape}")
    return checked[:-1], checked[-1]


def unnamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with one named array as a state without names."""
    if len(state["partial"]) != 1:
        names = list(state["partial"])
        raise ValueError(f"state: TailAverage takes a single array, got {names}")
    (shape,) = map(np.shape, state["partial"].values())
    changed: dict[str, Any] = {}
    for of_blocks, of_sum in ("blocks", "partial"), tuple(_SPREAD):
        if of_sum in state:
            renamed = {**state, "blocks": state[of_blocks], "partial": state[of_sum]}
            blocks, partial = by_name(renamed, {"": shape})
            arrays = np.array([block[""] for block in blocks]).reshape(len(blocks), *shape)
            changed |= {of_blocks: arrays, of_sum: partial[""]}
    return {**state, **changed}


def as_json(numbers: npt.NDArray[Any]) -> Any:
    """Return numbers as lists for JSON, without rounding.

    Examples:
        >>> as_json(np.array([1 + 2j])), as_json(np.float32(0.5))
        ([[1.0, 2.0]], 0.5)
    """
    if numbers.dtype.kind == "c":
        return as_json(np.stack([numbers.real, numbers.imag], axis=-1))
    if numbers.dtype.itemsize > 8:
        return numbers.astype(str).tolist()
    return numbers.tolist()


def _from_json(data: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers that `as_json` wrote."""
    numbers = np.asarray(data)
    if dtype.kind == "c" and numbers.dtype.kind != "c" and numbers.ndim and numbers.shape[-1] == 2:
        parts = _from_json(data, dtype.type(0).real.dtype)
        numbers = np.empty(parts.shape[:-1], dtype)
        numbers.real, numbers.imag = parts[..., 0], parts[..., 1]
    elif dtype.itemsize > 8 and numbers.dtype.kind == "U":
        numbers = numbers.astype(dtype)
    return numbers


# Checks of states that users pass


def no_samples_error(call: str, hint: str = "") -> ValueError:
    """Return the error of all frameworks for a read before the first sample."""
    return ValueError(f"{call}: expected at least one sample before the first read, got none{hint}")


def check_model_state(state: Mapping[str, Any], variance: bool = False) -> None:
    """Raise a ValueError unless an average of a model, with or without variances, can have a state.

    Such an average has no nan_policy: NaNs propagate.
    """
    if state["nan_policy"] != "propagate":
        raise ValueError(
            f"state: nan_policy: expected 'propagate', got {state['nan_policy']!r}; load the state "
            "with TailAverage"
        )
    if ("variances" in state) != variance:
        raise ValueError(
            "state: it was saved without variance=True, so the variance is unknown"
            if variance
            else "state: it was saved with variance=True; load it into an average that was created "
            "with variance=True (TailAverage or ParameterAverage)"
        )


def check_steps(count: int, starts: Sequence[int], folded: int) -> None:
    """Raise a ValueError unless the steps are consistent, or the state is empty."""
    rises = all(a < b for a, b in pairwise([*starts, count]))
    fits = starts and starts[0] >= 0 and rises and starts[-1] <= folded <= count <= MOST
    if not fits and (count or starts or folded):
        raise ValueError(
            f"corrupt state: starts {short_repr(starts)}, folded {short_repr(folded)} and count "
            f"{short_repr(count)} (at most {MOST}) are inconsistent"
        )


def check_elapsed(state: Mapping[str, Any], timed: bool) -> None:
    """Raise a ValueError unless a state has times exactly if its window is a period of time."""
    if ("elapsed" in state) != timed:
        raise ValueError(
            "state: elapsed: expected the times of an Elapsed window, got none"
            if timed
            else "state: elapsed: expected an Elapsed window, since the state has times"
        )


def check(state: Any) -> dict[str, Any]:
    """Return the state, with numbers from JSON as arrays.

    Raises:
        ValueError: If keys, types or version are not those of this layout.
    """
    _check_fields(state, FORMAT, _FIELDS, {"calls": int, "elapsed": Mapping} | _SPREAD)
    spread = _spread_in(state)
    checked, dtype = dict(state), state["dtype"]
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(
            f"state: dtype: expected one of {', '.join(_DTYPES)}, got {short_repr(dtype)}"
        )
    if isinstance(state["blocks"], np.ndarray) and not state["blocks"].ndim:
        raise ValueError(f"state: blocks: expected a sequence, got {state['blocks']!r}")
    if not all(type(start) is int for start in state["starts"]):
        raise ValueError(
            f"state: starts: expected a list of ints, got {short_repr(state['starts'])}"
        )
    if dtype is not None and state["scalar"]:
        for key in ("blocks", "partial", *spread):
            try:
                checked[key] = _from_json(state[key], _DTYPES[dtype])
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"state: {key}: expected numbers, got: {error}") from error
    return checked


def check_keyed(state: Any) -> dict[str, Any]:
    """Return the state of averages by key.

    The clock of each key checks its steps later.

    Raises:
        ValueError: If keys, types or version are not those of this layout.
    """
    _check_fields(state, KEYED, _HEADER | dict.fromkeys(_LISTS, list), _KEYED)
    number, spread = len(state["keys"]), _spread_in(state)
    for name in (*_LISTS[1:], *spread):
        entries = state[name]
        if len(entries) != number:
            raise ValueError(
                f"state: {name}: expected one entry per key, {number}, got {len(entries)}"
            )
        if name in _OF_BLOCKS:
            if not all(isinstance(entry, list | tuple) for entry in entries):
                raise ValueError(f"state: {name}: expected lists, got {short_repr(entries)}")
            entries = list(chain.from_iterable(entries))
        kinds = (int, float) if name in ("blocks", "partial", *_SPREAD) else (int,)
        if not all(type(entry) in kinds for entry in entries):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(
                f"state: {name}: expected numbers ({expected}), got {short_repr(entries)}"
            )
        try:
            np.array(entries, np.float64)
        except OverflowError as error:
            raise ValueError(f"state: {name}: {error}") from error
    return dict(state)


def _spread_in(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields that a state has if it has variances."""
    spread = [name for name in _SPREAD if name in state]
    if len(spread) == 1:
        raise ValueError(f"state: expected both {' and '.join(_SPREAD)}, got only {spread[0]}")
    return spread


def _check_fields(
    state: Any, expected: str, needed: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    for key, value in ("format", expected), ("version", VERSION):
        got = state.get(key)
        if type(got) is not type(value) or got != value:
            raise ValueError(
                f"state: expected {key} {value!r}, got {short_repr(got)}; if another version of "
                "tailavg saved it, read it with that version"
            )
    if missing := [key for key in needed if key not in state]:
        raise ValueError(f"state: missing {', '.join(missing)}; was it truncated?")
    fields = {**needed, **optional}
    if unexpected := [str(key) for key in state if key not in fields]:
        raise ValueError(f"state: unexpected {short_repr(', '.join(unexpected))}")
    for key, value in state.items():
        kinds = fields[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ValueError(
                f"state: {key}: got {short_repr(value)} of type {type(value).__name__}"
            )


# Files


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a file or a folder, or the state of a `tailavg stream` with one average.

    Raises:
        ValueError: If a file is incomplete, damaged or of another version. The message names it.
    """
    if saved_folder(path).is_dir():
        return _read_folder(path)
    with Path(path).open("rb") as file:
        is_stream = file.read(1) == b"{"
    if is_stream:
        return _read_stream(path)
    saved = _read_npz(path, _ARRAYS)
    return check(saved | {"starts": _as_list(saved["starts"])})


def write_file(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state to an .npz file, atomically."""
    _write_npz(path, check(state), _ARRAYS)


def write_keyed(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write the state of averages by key to an .npz file, atomically."""
    saved = check_keyed(state)
    keys = json.dumps(state["keys"], default=lambda key: key.item())  # NumPy's numbers
    saved["keys"] = np.frombuffer(keys.encode(), np.uint8)
    saved["held"] = [len(starts) for starts in state["starts"]]
    for name in _OF_BLOCKS:
        if name in state:
            saved[name] = list(chain.from_iterable(state[name]))
    _write_npz(path, saved, (*_LISTS, *_SPREAD, "held"))


def read_keyed(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a file that `write_keyed` wrote. Nothing is unpickled."""
    saved = _read_npz(path, (*_LISTS, *_SPREAD, "held"))
    with _reading(path):
        keys = json.loads(saved["keys"].tobytes())
        names = [name for name in (*_LISTS[1:], *_SPREAD, "held") if name in saved]
        saved |= {name: _as_list(saved[name]) for name in names}
        ends = [0, *accumulate(saved.pop("held"))]
        for name in (name for name in _OF_BLOCKS if name in saved):
            if len(saved[name]) != ends[-1]:
                raise ValueError(f"{ends[-1]} blocks, but {len(saved[name])} {name}")
            saved[name] = [saved[name][start:end] for start, end in pairwise(ends)]
    return check_keyed(saved | {"keys": keys})


def _write_npz(
    path: str | os.PathLike[str], state: Mapping[str, Any], names: Sequence[str]
) -> None:
    """Write the fields in `names` as arrays, and the others as JSON in the array `header`."""
    arrays = {name: np.asarray(state[name]) for name in names if name in state}
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise ValueError(f"state: {', '.join(objects)}: expected numbers, got objects")
    header = json.dumps({name: value for name, value in state.items() if name not in arrays})
    members: dict[str, Any] = {"header": np.asarray(header), **arrays}
    with whole_file(path) as file:
        np.savez(file, **members)


def _read_npz(path: str | os.PathLike[str], names: Sequence[str]) -> dict[str, Any]:
    """Read the fields in a file that `_write_npz` wrote."""
    with Path(path).open("rb") as stream, _reading(path):
        with ZipFile(stream) as members:
            for member in members.infolist():
                with members.open(member) as array:
                    _check_size(array, member)
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as file:
            names = [name for name in names if name in file or name not in _SPREAD]
            arrays = {name: np.asarray(file[name]) for name in names}  # np.load may return bytes
            return {**json.loads(str(file["header"])), **arrays}


def _check_size(array: IO[bytes], member: ZipInfo) -> None:
    """Raise a ValueError if an array needs more bytes than its member of the file has.

    Otherwise, a small crafted file could fill the memory, or take hours to read.
    """
    version = np.lib.format.read_magic(array)
    shape, _, dtype = np.lib.format.read_array_header_1_0(array)
    elements = math.prod(max(1, size) for size in shape)
    fits = elements * max(1, dtype.itemsize) <= member.file_size
    if version != (1, 0) or member.compress_type != ZIP_STORED or dtype.hasobject or not fits:
        raise ValueError(
            f"{member.filename}: {dtype} of shape {shape} in {member.compress_size} bytes"
        )


def _as_list(array: npt.NDArray[Any]) -> Any:
    """Return a list of real numbers. As a list, another array could be far larger than its file."""
    if array.ndim != 1 or array.dtype.kind not in "if":
        raise ValueError(f"state: expected numbers, got {array.dtype} of shape {array.shape}")
    return array.tolist()


def stream_entry(std: bool, timed: bool = False) -> dict[str, Any]:
    """Return the state of an average without samples, as `tailavg stream` saves it."""
    times: dict[str, Any] = {"elapsed": {}} if timed else {}
    spread: dict[str, Any] = {"variances": [], "squares": 0.0} if std else {}
    return {"count": 0, "starts": [], "blocks": [], "folded": 0, "partial": 0.0, **spread, **times}


def _read_stream(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the average in a state of `tailavg stream`. Raise a ValueError if there are several."""
    with Path(path).open("rb") as file, _reading(path):
        saved = json.loads(file.readline())
        if (saved["format"], saved["version"]) != (STREAM, STREAM_VERSION):
            raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
        options = saved["options"]
        std = bool(options["std"])
        if options["by"] is None and len(options["averages"]) == 1 + std:
            entries = list(map(json.loads, file))
            if len(entries) != saved["keys"]:
                raise ValueError(f"{len(entries)} averages instead of {saved['keys']}")
            fields: Any = stream_entry(std)
            for _, (average,) in entries:
                fields = average
            rule, dtype = rule_from(options["rule"][0]), "float64" if entries else None
            policy = options["nan"]
            return check(state(rule, nan_policy=policy, dtype=dtype, scalar=True, **fields))
    raise ValueError(
        f"{path}: only a tailavg stream with one average can be loaded, this one has "
        f"{short_repr(options['averages'])} by {short_repr(options['by'])}; resume it with tailavg "
        "stream --state"
    )


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn any exception, such as those of damaged files, into a ValueError with the path."""
    try:
        yield
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:300]}"
        raise ValueError(f"{path}: damaged, or not saved by tailavg: {message}") from error


# Folders of safetensors files, as docs/state.md describes them

_STATE, _OPEN = "state.json", "open.safetensors"
_BLOCK = re.compile(r"block-\d+-\d+\.safetensors")


def write_folder(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    as_array: Callable[[Any], npt.NDArray[Any]] = np.asarray,
    written: Mapping[int, Path] | None = None,
) -> None:
    """Write a state of arrays by name to a folder, atomically.

    A closed block never changes, so folders on one file system can share its file by hard links.

    Args:
        path: The folder. A folder that holds a state, and nothing else, is replaced.
        state: The state.
        as_array: Converts the values in the state, such as tensors, to arrays.
        written: The files of closed blocks that exist already, by the index of the block.
    """
    state, written = check(state), written or {}
    starts, blocks = state["starts"], state["blocks"]
    arrays = _prefixed("sum.", state["partial"])
    if "variances" in state:
        arrays |= _prefixed("square.", state["squares"])
        pairs = zip(blocks, state["variances"], strict=True)
        blocks = [_prefixed("mean.", mean) | _prefixed("variance.", v) for mean, v in pairs]
        arrays |= blocks[len(starts) - 1] if starts else {}
    elif starts and state["folded"] > starts[-1]:
        arrays |= _prefixed("mean.", blocks[len(starts) - 1])
    fields = {key: value for key, value in state.items() if key not in _ARRAYS[1:]}
    with whole_folder(path, _holds_state) as folder:
        for i, name in enumerate(_block_files(starts)):
            if i not in written or not _linked(written[i], folder / name):
                write_arrays(folder / name, blocks[i], as_array)
        write_arrays(folder / _OPEN, arrays, as_array)
        with (folder / _STATE).open("xb") as file:
            file.write(json.dumps(fields, indent=1).encode())
            sync(file)


def _read_folder(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a folder that `write_folder` wrote. Its arrays are read on access."""
    folder = saved_folder(path)
    try:
        text = (folder / _STATE).read_bytes()
        with _reading(folder / _STATE):
            state = {**json.loads(text)}
        starts = check({**state, "blocks": [], "partial": {}})["starts"]
        blocks = [mapped(folder / name) for name in _block_files(starts)]
        arrays = mapped(folder / _OPEN)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ValueError(
            f"{path}: incomplete, or not saved by tailavg: there is no file {error.filename}"
        ) from error
    partial, squares = _without_prefix("sum.", arrays), _without_prefix("square.", arrays)
    if squares:
        blocks += [arrays] if starts else []
        state["squares"] = squares
        state["variances"] = [_without_prefix("variance.", block) for block in blocks]
        blocks = [_without_prefix("mean.", block) for block in blocks]
    elif starts:
        mean = _without_prefix("mean.", arrays)
        blocks.append(mean or {name: np.zeros_like(array) for name, array in partial.items()})
    return check({**state, "blocks": blocks, "partial": partial})


def _prefixed(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: array for name, array in arrays.items()}


def _without_prefix(prefix: str, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays whose names have the prefix, under the names without it."""
    names = [name for name in arrays if name.startswith(prefix)]
    return {name.removeprefix(prefix): arrays[name] for name in names}


def _holds_state(folder: Path) -> bool:
    """Return whether a folder holds a state, and nothing else."""
    names = {file.name for file in folder.iterdir()} - {_STATE, _OPEN}
    is_complete = (folder / _STATE).is_file() and (folder / _OPEN).is_file()
    return is_complete and all(_BLOCK.fullmatch(name) for name in names)


def _block_files(starts: Sequence[int]) -> list[str]:
    """Return the names of the files of closed blocks."""
    return [f"block-{start}-{end}.safetensors" for start, end in pairwise(starts)]


def _linked(source: Path, path: Path) -> bool:
    """Create a hard link to a file. Return False if that is not possible."""
    try:
        os.link(source, path)
    except OSError:
        return False
    with path.open("rb") as file:
        sync(file)
    return True
