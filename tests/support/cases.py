"""The rules and kinds of samples that the tests share."""

import copy
import json
import pickle
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import strategies as st

from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    RawTail,
    TailAverage,
)
from tests.support.schedule import closes, turn

CAPPED = Growing(0.5, at_most=40)

WINDOWS = [Fixed(1), Fixed(10), Growing(0.25), Growing(1.0), Growing(0.123456789123), CAPPED]

RULES = [
    AnytimeWindow(1),
    AnytimeWindow(10),
    AnytimeWindow(7, 2),
    AnytimeWindow(100, 13),
    AnytimeWindow(400, 4),
    AnytimeWindow(0.01),
    AnytimeWindow(0.3),
    AnytimeWindow(0.9, 2),
    AnytimeWindow(1.0, 5),
    AnytimeWindow(CAPPED, 4),
    AnytimeWindow(10, 4, turns="paper"),
    AnytimeWindow(0.25, 5, turns="paper"),
    AnytimeWindow(CAPPED, 3, turns="paper"),
    Exponential(1),
    Exponential(10),
    Exponential(400),
    Exponential(0.01),
    Exponential(0.3),
    Exponential(1.0),
    Exponential(CAPPED),
    ExactWindow(1),
    ExactWindow(10),
    ExactWindow(0.3),
    ExactWindow(CAPPED),
    RawTail(0.25, total=200),
    RawTail(10, total=100),
    RawTail(50, total=20),
]


@dataclass(frozen=True)
class Kind:
    """A kind of samples: how they are drawn, and what their average is held in."""

    dtype: str
    shape: tuple[int, ...] | None  # None for Python numbers
    held: str
    rtol: float = 1e-12

    def draw(self, steps: int, seed: int = 0) -> np.ndarray:
        """Samples of about 1 to 3, whose averages are never near 0."""
        rng = np.random.default_rng(seed)
        xs = 1 + rng.random((steps, *(self.shape or ())))
        if self.dtype.startswith("complex"):
            return (xs + 1j * rng.random(xs.shape)).astype(self.dtype)
        return (100 * xs if "int" in self.dtype else xs).astype(self.dtype)

    def each(self, xs: np.ndarray) -> list:
        """The samples one by one, as their user has them."""
        return xs.tolist() if self.shape is None else [np.array(x) for x in xs]


KINDS = {
    "float": Kind("float64", None, "float64"),
    "int": Kind("int64", None, "float64"),
    "complex": Kind("complex128", None, "complex128"),
    "0-d float64": Kind("float64", (), "float64"),
    "0-d float32": Kind("float32", (), "float32", 4e-6),
    "float16 (3,)": Kind("float16", (3,), "float32", 4e-6),
    "float32 (3,)": Kind("float32", (3,), "float32", 4e-6),
    "float64 (3,)": Kind("float64", (3,), "float64"),
    "float64 (1,)": Kind("float64", (1,), "float64"),
    "complex64 (2,)": Kind("complex64", (2,), "complex64", 4e-6),
    "complex128 (2, 3)": Kind("complex128", (2, 3), "complex128"),
    "int32 (2,)": Kind("int32", (2,), "float64"),
    "uint8 (2, 2)": Kind("uint8", (2, 2), "float64"),
    "float64 (8, 16)": Kind("float64", (8, 16), "float64"),
}
FLOAT, ROW = KINDS["float"], KINDS["float64 (3,)"]


def samples(steps: int = 600, shape=(5,), dtype="float64", seed: int = 0) -> np.ndarray:
    """Samples of about 1 to 2, whose averages are never near 0."""
    return (1 + np.random.default_rng(seed).random((steps, *shape))).astype(dtype)


def assert_close(got, expected, rtol: float) -> None:
    """Relative, element by element, and the same NaNs and infinities."""
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=0)


# Just below 1 a weight hangs on the last digits of c t; `test_rules` looks at its promises there.
windows = st.one_of(
    st.builds(Fixed, st.integers(1, 60)),
    st.builds(Growing, st.sampled_from([0.07, 0.1, 0.25, 0.3, 0.5, 0.55, 0.9, 1.0])),
    st.builds(Growing, st.floats(0.001, 0.99)),
    st.builds(Growing, st.floats(0.01, 0.99), st.integers(1, 120)),
    st.builds(Growing, st.sampled_from([0.07, 0.1, 0.3, 0.5, 0.9, 1.0]), st.integers(1, 80)),
)
anytime_windows = st.builds(
    AnytimeWindow, windows, st.integers(2, 13), st.sampled_from(["balanced", "paper"])
)
rules = st.one_of(
    anytime_windows,
    st.builds(Exponential, windows),
    st.builds(ExactWindow, windows),
    st.builds(RawTail, windows, st.integers(1, 250)),
)


def short(rule) -> str:
    """A name for a test: AnytimeWindow(0.3, 5, paper)."""
    text = re.sub(r"\b[a-z_]+=|, at_most=None|, turns='balanced'|'", "", repr(rule))
    return re.sub(r"(Fixed|Growing)\((.*?)\)", r"\2", text)


of_rules = partial(pytest.mark.parametrize, "rule", ids=short)

METHODS = ["update", "update_many", "scan"]
every_method = pytest.mark.parametrize("method", METHODS)


def turns_of(rule, steps: int) -> list[int]:
    """The steps at which blocks begin, after the first."""
    starts, found = [0], []
    while isinstance(rule, AnytimeWindow | AnyTail) and (end := closes(rule, starts)) < steps:
        starts = turn(rule, starts, end)
        found.append(end)
    return found


def chunks(steps: int):
    """Ways to take `steps` samples: in what chunks, and each by which method."""
    cuts = st.lists(st.integers(1, steps - 1), max_size=8, unique=True).map(sorted)
    methods = st.lists(st.sampled_from(METHODS), min_size=9, max_size=9)
    return st.builds(
        lambda cuts, methods: list(zip([0, *cuts], [*cuts, steps], methods, strict=False)),
        cuts,
        methods,
    )


def take(average, kind: Kind, xs: np.ndarray, method: str, *window):
    """Hand over samples by one of the three methods; the averages after each, or the last."""
    if method == "scan":
        return average.scan(xs, *window)
    if method == "update_many":
        average.update_many(xs)
    else:
        for x in kind.each(xs):
            average.update(x)
    return average.value(*window)


# The ways of an average to another place, and how to see that it came there whole.


def through_file(average):
    with TemporaryDirectory() as folder:
        average.save(Path(folder) / "average")
        return TailAverage.load(Path(folder) / "average")


def through_json(average):
    text = json.dumps(average.state_dict())
    return TailAverage.from_state_dict(json.loads(text))


WAYS = {
    "state_dict": lambda average: TailAverage.from_state_dict(average.state_dict()),
    "json": through_json,
    "file": through_file,
    "pickle": lambda average: pickle.loads(pickle.dumps(average)),
    "copy": lambda average: average.copy(),
    "deepcopy": copy.deepcopy,
}


def bits(average):
    """The state with nothing but numbers and bytes, so that == is to the bit."""
    state = average.state_dict()
    arrays = ("blocks", "partial")
    return state | {key: np.asarray(state[key], state["dtype"]).tobytes() for key in arrays}
