"""The layout in which every store saves an average, and the files that hold it.

A state is a dict of plain data:

- `format`, `version`: `"tailavg"`, 1
- `rule`: the rule and its window, as dicts of their fields with their `type`
- `nan_policy`: `"propagate"`, `"raise"` or `"omit"`
- `dtype`: the dtype of the accumulators; None if none was chosen and there is no sample yet
- `scalar`: whether samples are numbers rather than arrays
- `count`: the number of samples so far, t
- `starts`: for each block, oldest first, the number of samples before it
- `blocks`: the means of the blocks, stacked along the first axis; the last block is open, and its
  mean is over its samples up to step `folded`
- `folded`: the last step whose sample is in the blocks' means
- `partial`: the sum of the later samples, and of the rounding error of the last merge into a mean;
  for an `Exponential`, the sum of sample i times (1 - decay(i)) / (decay(folded + 2) ⋯ decay(i))

When samples are numbers, `blocks` is a list and the whole state is JSON: a complex number is a list
of its two parts, and one in extended precision is a string.

In averages of models, each block and `partial` are dicts of arrays by name. If not every call
counts as a sample, `calls` is the number of calls since the last sample, or since the start. Every
framework loads what another one saved.

An `Exponential` has one block, whose mean is the average at step `folded`. An `ExactWindow` has
blocks of one sample.

Averages by key (`TailAverages`) are of format `"tailavg by key"`. Beside `version`, `rule` and
`nan_policy` they have lists with an entry for each key: `keys`, `counts`, `starts`, `blocks`,
`folded` and `partial`. In their file, `starts` and `blocks` of all keys follow each other, `held`
says how many each key has, and `keys` are JSON as bytes, a tuple as a list.

`tailavg stream` saves lines of JSON: first its options, then for each key a list of the key and of
its averages, of each what differs between averages of a rule: `count` and all that comes after.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import numpy.typing as npt

from tailavg.core.rules import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail, Rule
from tailavg.core.windows import MOST, Fixed, Growing, shown
from tailavg.io import folders
from tailavg.io.files import saved_folder, whole_file

__all__ = [
    "FORMAT",
    "KEYED",
    "STREAM",
    "STREAM_VERSION",
    "VERSION",
    "as_json",
    "by_name",
    "check",
    "check_keyed",
    "check_nan_policy",
    "check_steps",
    "from_json",
    "keyed_state",
    "named",
    "nothing_yet",
    "plain",
    "read",
    "read_file",
    "read_folder",
    "read_keyed",
    "read_stream",
    "rule_from",
    "state",
    "unnamed",
    "write_file",
    "write_folder",
    "write_keyed",
]

FORMAT = "tailavg"
KEYED = "tailavg by key"
VERSION = 1

STREAM = "tailavg stream"
"""The format of what `tailavg stream` saves."""
STREAM_VERSION = 3

_KEYS: dict[str, Any] = {
    "format": str,
    "version": int,
    "rule": Mapping,
    "nan_policy": str,
    "dtype": (str, type(None)),
    "scalar": bool,
    "count": int,
    "starts": (list, tuple),
    "blocks": (list, tuple, np.ndarray),
    "folded": int,
    "partial": (int, float, complex, str, list, tuple, np.number, np.ndarray, Mapping),
}
_KEYED: dict[str, Any] = {
    "format": str,
    "version": int,
    "rule": Mapping,
    "nan_policy": str,
    "keys": list,
    "counts": list,
    "starts": list,
    "blocks": list,
    "folded": list,
    "partial": list,
}
_OPTIONAL: dict[str, Any] = {"calls": int}
_DTYPES = {np.dtype(code).name: np.dtype(code) for code in "fdgFDG"}
_TYPES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Fixed, Growing, AnytimeWindow, Exponential, ExactWindow, RawTail, AnyTail)
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
    """Return the rule that `plain` described.

    Examples:
        >>> rule_from(plain(Exponential(0.25))) == Exponential(0.25)
        True
    """
    rule = _described(data)
    if not isinstance(rule, Rule):
        raise ValueError(f"state: expected a rule, got {shown(data)}")
    return rule


def _described(data: Any, depth: int = 2) -> Any:
    if not isinstance(data, Mapping):
        return data
    if not depth:
        raise ValueError("state: rule: expected a rule and its window, got more inside them")
    fields = {name: _described(value, depth - 1) for name, value in data.items() if name != "type"}
    name = data.get("type")
    if not isinstance(name, str) or name not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(f"state: rule: expected a type among {known}, got {shown(name)}")
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
) -> dict[str, Any]:
    """Return a state in this layout."""
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
    }


def named(block: Any, names: Iterable[str]) -> Mapping[str, Any]:
    """Return a block, or a partial sum, as arrays by name. A single array needs no name."""
    arrays = block if isinstance(block, Mapping) else {"": block}
    names = list(names)
    if len(arrays) == len(names) == 1 and ("" in arrays or "" in names):
        return dict(zip(names, arrays.values(), strict=True))
    return arrays


def by_name(
    state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the means of the blocks, and the partial sum, as arrays by name.

    A single array needs no name. Raise a ValueError if names or shapes differ from `shapes`.

    Examples:
        >>> state = {"starts": [0], "blocks": np.array([[1.0, 2.0]]), "partial": np.zeros(2)}
        >>> by_name(state, {"weight": (2,)})
        ([{'weight': array([1., 2.])}], {'weight': array([0., 0.])})
    """
    blocks, number = state["blocks"], len(state["starts"])
    if len(blocks) < number:
        raise ValueError(f"state: sizes do not add up: {number} starts, {len(blocks)} blocks")
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
    """Return a state of one named array as a state of an array without a name."""
    if len(state["partial"]) != 1:
        names = list(state["partial"])
        raise ValueError(f"state: expected one array, as TailAverage holds no more, got {names}")
    (shape,) = map(np.shape, state["partial"].values())
    blocks, partial = by_name(state, {"": shape})
    means = np.array([block[""] for block in blocks]).reshape(len(blocks), *shape)
    return {**state, "blocks": means, "partial": partial[""]}


def check_nan_policy(state: Mapping[str, Any]) -> None:
    """Raise a ValueError unless NaNs are to propagate, as they do in averages of models."""
    if state["nan_policy"] != "propagate":
        raise ValueError(
            f"state: nan_policy: expected 'propagate', got {state['nan_policy']!r}; load it "
            "with TailAverage"
        )


def check_steps(count: int, starts: Sequence[int], folded: int) -> None:
    """Raise a ValueError unless `starts` are possible after `count` samples."""
    if not count and not starts and not folded:
        return
    if not 1 <= count <= MOST:
        raise ValueError(f"state: count: expected 0 to {MOST}, got {shown(count)}")
    if not starts or starts[0] < 0 or any(b <= a for a, b in pairwise([*starts, count])):
        raise ValueError(
            f"state: sizes do not add up: expected starts that rise from 0 or more to "
            f"below the count {count}, got {shown(starts)}"
        )
    if not starts[-1] <= folded <= count:
        raise ValueError(
            f"state: sizes do not add up: expected folded in [{starts[-1]}, {count}], "
            f"got {shown(folded)}"
        )


def as_json(numbers: npt.NDArray[Any]) -> Any:
    """Return numbers as lists that JSON can hold, without rounding.

    Examples:
        >>> as_json(np.array([1 + 2j])), as_json(np.float32(0.5))
        ([[1.0, 2.0]], 0.5)
    """
    if numbers.dtype.kind == "c":
        return as_json(np.stack([numbers.real, numbers.imag], axis=-1))
    if numbers.dtype.itemsize > 8:
        return numbers.astype(str).tolist()
    return numbers.tolist()


def from_json(data: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers that `as_json` wrote.

    Examples:
        >>> from_json([[1.0, 2.0]], np.dtype(complex))
        array([1.+2.j])
    """
    found = np.asarray(data)
    if dtype.kind == "c" and found.dtype.kind != "c" and found.ndim and found.shape[-1] == 2:
        parts = from_json(data, dtype.type(0).real.dtype)
        found = np.empty(parts.shape[:-1], dtype)
        found.real, found.imag = parts[..., 0], parts[..., 1]
    elif dtype.itemsize > 8 and found.dtype.kind == "U":
        found = found.astype(dtype)
    return found


def check(state: Any) -> dict[str, Any]:
    """Return the state, with numbers of JSON as arrays.

    Raises:
        ValueError: If it lacks the keys, types or version of this layout.
    """
    _check_fields(state, FORMAT, _KEYS, _OPTIONAL)
    dtype = state["dtype"]
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"state: dtype: expected one of {', '.join(_DTYPES)}, got {shown(dtype)}")
    if isinstance(state["blocks"], np.ndarray) and not state["blocks"].ndim:
        raise ValueError(f"state: blocks: expected a sequence, got {state['blocks']!r}")
    if not all(isinstance(start, int) and not isinstance(start, bool) for start in state["starts"]):
        raise ValueError(f"state: starts: expected a list of ints, got {shown(state['starts'])}")
    found = dict(state)
    if dtype is not None and state["scalar"]:
        for key in ("blocks", "partial"):
            try:
                found[key] = from_json(state[key], _DTYPES[dtype])
            except (ValueError, TypeError, OverflowError) as error:
                raise ValueError(f"state: {key}: expected numbers, got: {error}") from error
    return found


def _check_fields(
    state: Any, expected: str, needed: Mapping[str, Any], optional: Mapping[str, Any]
) -> None:
    if not isinstance(state, Mapping):
        raise ValueError(f"state: expected a dict, got {type(state).__name__}")
    form, version = state.get("format"), state.get("version")
    if not (isinstance(form, str) and form == expected):
        raise ValueError(f"state: expected format {expected!r}, got {shown(form)}")
    if not (isinstance(version, int) and version == VERSION):
        raise ValueError(
            f"state: expected version {VERSION}, got {shown(version)}; "
            "read it with the version of tailavg that wrote it"
        )
    if missing := [key for key in needed if key not in state]:
        raise ValueError(f"state: missing {', '.join(missing)}; was it truncated?")
    keys = {**needed, **optional}
    if unexpected := [str(key) for key in state if key not in keys]:
        raise ValueError(f"state: unexpected {shown(', '.join(unexpected))}")
    for key, value in state.items():
        kinds = keys[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ValueError(f"state: {key}: got {shown(value)} of type {type(value).__name__}")


def write_file(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write a state to one .npz file, completely or not at all."""
    state = check(state)
    arrays = {key: np.asarray(state[key]) for key in ("starts", "blocks", "partial")}
    header = {key: value for key, value in state.items() if key not in arrays}
    _write_npz(path, header, arrays)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a file that `write_file` wrote. Nothing is unpickled."""
    header, found = _read_npz(path, "starts", "blocks", "partial")
    return check(header | found | {"starts": found["starts"].tolist()})


def _write_npz(
    path: str | os.PathLike[str], header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write arrays, and a header as JSON, to one .npz file, completely or not at all."""
    if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
        raise ValueError(f"state: {', '.join(objects)}: expected numbers, got objects")
    with whole_file(path) as file:
        members: dict[str, Any] = {"header": np.asarray(json.dumps(header)), **arrays}
        np.savez(file, **members)


def _read_npz(
    path: str | os.PathLike[str], *names: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Read the header and the arrays in a file that `_write_npz` wrote."""
    with Path(path).open("rb") as stream:
        try:
            with ZipFile(stream) as members:  # a small compressed file could fill the memory
                if any(member.compress_type != ZIP_STORED for member in members.infolist()):
                    raise ValueError("compressed arrays")
            with np.load(stream, allow_pickle=False) as file:
                header, arrays = file["header"], {name: file[name] for name in names}
            if not (header.dtype.kind == "U" and header.ndim == 0):
                raise ValueError("a header that is not text")
            starts = arrays["starts"]
            if starts.ndim != 1 or (len(starts) and starts.dtype.kind != "i"):
                raise ValueError(f"starts of {starts.dtype} and shape {starts.shape}")
            return {**json.loads(str(header))}, arrays
        except Exception as error:  # a damaged file fails in as many ways as there are
            raise ValueError(f"{path}: expected a file saved by tailavg, got: {error}") from error


def write_folder(
    path: str | os.PathLike[str],
    state: Mapping[str, Any],
    array: Callable[[Any], npt.NDArray[Any]] = np.asarray,
    written: Mapping[int, Path] | None = None,
) -> None:
    """Write a state of arrays by name to a folder, completely or not at all.

    Args:
        path: The folder. A folder that holds a state, and nothing else, is replaced.
        state: The state.
        array: Converts what the state holds, such as tensors, to arrays.
        written: Files of closed blocks that exist already, by the place of the block.
    """
    folders.write(path, check(state), array, written or {})


def read_folder(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a folder that `write_folder` wrote. Arrays are read on access.

    Raises:
        ValueError: If anything is missing, damaged or of another version; it names the file.
    """
    return check(folders.read(path, check))


def read_stream(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of the one average that `tailavg stream --state` saved, if it is one.

    Raises:
        ValueError: If there are several, or the file is damaged.
    """
    try:
        with Path(path).open("rb") as file:
            saved = json.loads(file.readline())
            if (saved["format"], saved["version"]) != (STREAM, STREAM_VERSION):
                raise ValueError(f"format {saved['format']!r}, version {saved['version']!r}")
            options, own = saved["options"], dict[str, Any]()
            several = _several(options)
            if not several:
                own = {key: one[0] for key, one in map(json.loads, file)}
                if len(own) != saved["keys"]:
                    raise ValueError(f"{len(own)} averages instead of {saved['keys']}")
        if not several:
            found = own.get(
                "", {"count": 0, "starts": [], "blocks": [], "folded": 0, "partial": 0.0}
            )
            rule = rule_from(options["rule"][0])
            fields = {
                name: found[name] for name in ("count", "starts", "blocks", "folded", "partial")
            }
            return check(state(rule, dtype="float64" if own else None, scalar=True, **fields))
    except OSError:
        raise
    except Exception as error:  # a damaged file fails in as many ways as there are
        raise ValueError(
            f"{path}: expected a file saved by tailavg, got: {repr(error)[:300]}"
        ) from error
    raise ValueError(
        f"{path}: expected a state of tailavg stream with one average, got one with {several}; "
        "resume it with tailavg stream --state"
    )


def _several(options: Mapping[str, Any]) -> str:
    """What a stream with these options has more than one average for; "" if it has one."""
    found = []
    if options["by"] is not None:
        found.append(f"averages by {shown(options['by'])}")
    if len(options["columns"]) > 1:
        found.append(f"the columns {shown(options['columns'])}")
    if len(options["averages"]) > len(options["columns"]):
        found.append(f"several windows, {shown(options['averages'])}")
    return " and ".join(found)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the state in a file or a folder, or of a `tailavg stream` with one average."""
    if saved_folder(path).is_dir():
        return read_folder(path)
    with Path(path).open("rb") as file:
        lines = file.read(1) == b"{"
    return read_stream(path) if lines else read_file(path)


def nothing_yet(call: str, hint: str = "") -> ValueError:
    """Return what every framework raises for a read before the first sample."""
    return ValueError(f"{call}: expected at least one sample before the first read, got none{hint}")


def keyed_state(
    rule: Rule,
    *,
    nan_policy: str,
    keys: list[Any],
    counts: list[int],
    starts: list[list[int]],
    blocks: list[list[float]],
    folded: list[int],
    partial: list[float],
) -> dict[str, Any]:
    """The state of averages of numbers by key: lists with an entry for each key."""
    return {
        "format": KEYED,
        "version": VERSION,
        "rule": plain(rule),
        "nan_policy": nan_policy,
        "keys": keys,
        "counts": counts,
        "starts": starts,
        "blocks": blocks,
        "folded": folded,
        "partial": partial,
    }


def check_keyed(state: Any) -> dict[str, Any]:
    """The state of averages by key, if it has the keys, types and version; or raise a ValueError.

    Whether the steps of each key are possible is left to its clock.
    """
    _check_fields(state, KEYED, _KEYED, {})
    number = len(state["keys"])
    for name in ("counts", "starts", "blocks", "folded", "partial"):
        if len(state[name]) != number:
            raise ValueError(
                f"state: {name}: expected one for each of {number} keys, got {len(state[name])}"
            )
    lists = state["starts"], state["blocks"]
    if not all(isinstance(entry, list | tuple) for found in lists for entry in found):
        raise ValueError("state: expected lists of starts and of blocks, got others")
    flat_starts = [start for found in state["starts"] for start in found]
    for name, entries in (
        ("counts", state["counts"]),
        ("folded", state["folded"]),
        ("starts", flat_starts),
    ):
        if not all(type(entry) is int for entry in entries):
            raise ValueError(f"state: {name}: expected ints, got {shown(entries)}")
    flat_blocks = [mean for found in state["blocks"] for mean in found]
    for name, entries in (("partial", state["partial"]), ("blocks", flat_blocks)):
        if not all(type(entry) in (float, int) for entry in entries):
            raise ValueError(f"state: {name}: expected numbers, got {shown(entries)}")
    return dict(state)


def write_keyed(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write the state of averages by key to one .npz file, whole or not at all.

    What has an entry for each key becomes an array; the keys are JSON, as bytes.
    """
    state = check_keyed(state)
    arrays = {name: np.array(state[name], np.int64) for name in ("counts", "folded")}
    keys = json.dumps(state["keys"], default=lambda key: key.item())  # NumPy's numbers
    arrays["keys"] = np.frombuffer(keys.encode(), np.uint8)
    arrays["partial"] = np.array(state["partial"], np.float64)
    arrays["held"] = np.array([len(starts) for starts in state["starts"]], np.int64)
    arrays["starts"] = np.array([x for found in state["starts"] for x in found], np.int64)
    arrays["blocks"] = np.array([x for found in state["blocks"] for x in found], np.float64)
    header = {name: value for name, value in state.items() if name not in arrays}
    _write_npz(path, header, arrays)


def read_keyed(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file that `write_keyed` wrote. Nothing is unpickled."""
    header, found = _read_npz(
        path, "keys", "counts", "held", "starts", "blocks", "folded", "partial"
    )
    kinds = {"keys": np.uint8, "blocks": np.float64, "partial": np.float64}
    for name, array in found.items():
        if array.ndim != 1 or array.dtype != kinds.get(name, np.int64):
            raise ValueError(f"{path}: {name}: got {array.dtype} of shape {array.shape}")
    held = found.pop("held").tolist()
    ends = [0, *accumulate(held)]
    if any(number < 0 for number in held) or {ends[-1]} != {
        len(found["starts"]),
        len(found["blocks"]),
    }:
        raise ValueError(f"{path}: sizes do not add up: {ends[-1]} blocks, got others")
    try:
        keys = json.loads(found.pop("keys").tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: keys: expected JSON, got: {error}") from error
    lists: dict[str, Any] = {name: array.tolist() for name, array in found.items()}
    for name in ("starts", "blocks"):
        lists[name] = [lists[name][a:b] for a, b in pairwise(ends)]
    return check_keyed({**header, "keys": keys, **lists})
