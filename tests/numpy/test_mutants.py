"""Whatever a state or a file holds: an average, or a ValueError, in little time and memory."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailavg import AnyTail, AnytimeWindow, Exponential, TailAverage, TailAverages
from tailavg.numpy.kernel import kernel
from tests.support.cases import FEW_RULES, RULES, of_rules
from tests.support.corrupt_states import broken, mutants, within
from tests.support.effort import some

EVERY = [*RULES, AnyTail(6)]


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    """Import numba and compile before time and memory are watched."""
    kernel(10**9)
    for rule in EVERY:
        made(rule).scan(np.ones(3), 1.0 if isinstance(rule, AnyTail) else None)
        made(rule, (2,)).scan(np.ones((3, 2)), 1.0 if isinstance(rule, AnyTail) else None)


def made(rule: Any, shape: tuple[int, ...] = (), dtype: str | None = None) -> TailAverage:
    average = TailAverage(rule, dtype=dtype)
    for x in np.random.default_rng(3).normal(size=(40, *shape)):
        average.update(x if shape else float(x))
    return average


def used(average: TailAverage) -> None:
    """Do with an average what its owner may do."""
    repr(average)
    shape = average._shape or ()
    average.copy()
    average.update(np.ones(shape) if average._shape is not None else 1.0)
    window = 1.0 if isinstance(average.rule, AnyTail) else None
    average.value(window)
    average.scan(np.ones((3, *shape)), window)
    assert TailAverage.from_state_dict(average.state_dict()) == average


def refused_or_used(load: Any) -> bool:
    """Whether it was refused, with a ValueError and no other error."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            average = within(load)
        except ValueError:
            return True
        within(lambda: used(average))
    return False


@of_rules(EVERY)
def test_a_mutated_state_is_refused_or_works(rule: Any) -> None:
    refused = [
        refused_or_used(lambda: TailAverage.from_state_dict(mutant))  # noqa: B023
        for shape in ((), (2,))
        for mutant in mutants(made(rule, shape).state_dict(), some(60, 300), seed=len(str(rule)))
    ]
    assert 0.3 < np.mean(refused) < 1.0


@of_rules([AnytimeWindow(10), Exponential(10)])
@pytest.mark.parametrize("shape", [(), (2,)], ids=["numbers", "arrays"])
def test_a_damaged_file_is_refused_or_works(
    rule: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "average.npz"
    made(rule, shape).save(path)
    for data in broken(path.read_bytes(), some(60, 300), seed=1):
        path.write_bytes(data)
        refused_or_used(lambda: TailAverage.load(path))


def member(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def claimed(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The header of an array, without the array."""
    file = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


@pytest.mark.parametrize("packed", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["header", "starts", "blocks", "partial"])
def test_a_crafted_member_is_refused(name: str, packed: int, tmp_path: Path) -> None:
    average, path = made(6, (2,)), tmp_path / "average.npz"
    average.save(path)
    with zipfile.ZipFile(path) as file:
        members = {found: file.read(found) for found in file.namelist()}
    huge = member(np.zeros(1))
    for bad in (
        b"no magic",
        b"",
        member(np.array([{"a": 1}], dtype=object)),  # a pickle
        member(np.zeros((3 * 10**7, 0))),
        member(np.zeros((10**6,), "V0")),
        huge.replace(b"(1,), }" + b" " * 8, b"(100000000000,), }"[:15].ljust(15)),
        member(np.zeros(3 * 10**6)) if packed == zipfile.ZIP_DEFLATED else b"x",  # 24 MB of zeros
        member(np.array("[" * 100_000)),
        *(claimed(dtype, (10**12,)) for dtype in ("<U0", "<f16", "<f8")),
    ):
        with zipfile.ZipFile(path, "w", packed) as file:
            for found, data in members.items():
                file.writestr(found, bad if found == f"{name}.npy" else data)
        with pytest.raises(ValueError, match=r"average\.npz|state"):
            within(lambda: TailAverage.load(path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("count", 2**63),
        ("count", 10**5000),
        ("dtype", "f8,,"),
        ("dtype", "O"),
        ("rule", {"type": "ExactWindow", "window": {"type": "Growing", "c": 1.0}}),
        ("rule", {"type": "Growing", "c": 0.5, "at_most": 10**400}),
        ("rule", {"type": "AnytimeWindow", "window": 10, "accumulators": 10**12}),
        ("starts", list(range(10**5))),
        ("blocks", np.zeros((3 * 10**7, 0))),
        ("blocks", [None]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_the_field_is_named(field: str, value: Any) -> None:
    state = made(0.25).state_dict() | {"count": 10**8, "folded": 10**8} | {field: value}
    with pytest.raises(ValueError, match=rf"state: .*{field}|corrupt state"):
        within(lambda: TailAverage.from_state_dict(state))


@pytest.mark.parametrize(
    "rule", [1e-5, AnyTail(12, 1e-3), AnytimeWindow(1e-4, turns="paper"), 0.25, Exponential(1e-3)]
)
def test_a_copy_takes_no_longer_after_a_million_samples(rule: Any) -> None:
    average = TailAverage(rule)
    average.update_many(np.ones(10**6))
    within(average.copy, seconds=0.2)


@pytest.mark.parametrize(
    "dtype", ["float32", "longdouble", "complex64", "complex128", "clongdouble"]
)
@of_rules([*FEW_RULES, AnyTail(6)])
def test_numbers_of_every_dtype_are_saved_as_json_and_in_files(
    rule: Any, dtype: str, tmp_path: Path
) -> None:
    average = TailAverage(rule, dtype=dtype)
    kind = np.dtype(dtype)
    samples = np.random.default_rng(1).normal(size=(2, 300)).astype(kind.type(0).real.dtype)
    for x, y in samples.T / 3:
        average.update(x + 1j * y if kind.kind == "c" else x)
    state = average.state_dict()
    told = json.dumps(state)
    average.save(tmp_path / "average.npz")
    others = [TailAverage.from_state_dict(json.loads(told)), average.copy()]
    others.append(TailAverage.load(tmp_path / "average.npz"))
    assert others == [average] * 3
    window = 0.5 if isinstance(rule, AnyTail) else None
    for one in [average, *others]:
        one.update(0.1)
    assert others == [average] * 3
    assert {one.value(window) for one in others} == {average.value(window)}
    assert json.dumps(state) == told  # it is not alive


def test_masked_arrays_in_a_list_are_refused() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    average = TailAverage(3)
    for xs in ([masked], [[1.0, 2.0], masked], [[masked]], (np.ma.masked, 1.0)):
        for call in (average.update, average.update_many, average.scan):
            with pytest.raises(TypeError, match="masked"):
                call(xs)
    assert average == TailAverage(3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", [{"a": 1}, "b"]),
        ("keys", [[{"a": 1}], "b"]),
        ("starts", [[0], [10**400]]),
        ("counts", [1, 10**400]),
        ("partial", [1.0, 10**400]),
        ("blocks", [[1.0], [10**400]]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_crafted_state_of_keys_is_refused(field: str, value: Any) -> None:
    averages = TailAverages(6)
    averages.update_many(["a", "b"], [1.0, 2.0])
    with pytest.raises(ValueError, match=rf"state: {field}"):
        TailAverages.from_state_dict(averages.state_dict() | {field: value})
