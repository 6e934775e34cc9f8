"""The one table of rules, kinds of samples and ways to move a state.

A test of a contract runs over `RULES` with one kind of samples, over `CASES` (rules and kinds), or
over `EVERY_RULE` where a case is cheap. The strategies below draw any other rule.
"""

import copy
import json
import math
import pickle
import re
from dataclasses import dataclass
from functools import partial
from itertools import cycle
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

# Every class of store and every branch of a clock. An AnyTail needs a window to be read:
# tests/support/any_tails.py has those.
RULES = [
    AnytimeWindow(10),  # blocks shorter than a sum of 256, all alike
    AnytimeWindow(400, 2),  # and longer; the newest block may hold more than the window
    AnytimeWindow(0.3),  # blocks that grow
    AnytimeWindow(0.25, 5, turns="paper"),  # and are lopsided
    AnytimeWindow(CAPPED, 4),  # blocks that grow, and then are alike
    RawTail(0.25, total=200),  # one block, that begins late
    Exponential(10),  # a decay that is constant in the end
    Exponential(0.3),  # and one that grows for ever
    ExactWindow(0.3),  # the samples themselves
]

# Extremes, and further combinations of the same branches.
MORE_RULES = [
    AnytimeWindow(1),  # the latest sample
    AnytimeWindow(1.0, 5),  # all samples: no block is ever given up
    AnytimeWindow(0.01),  # a window of one sample for long
    AnytimeWindow(100, 13),  # many blocks, which do not divide the window
    AnytimeWindow(10, 4, turns="paper"),
    AnytimeWindow(CAPPED, 3, turns="paper"),
    RawTail(10, total=100),
    RawTail(50, total=20),  # a window longer than the run
    Exponential(1),
    Exponential(1.0),
    Exponential(400),
    Exponential(CAPPED),
    ExactWindow(10),
    ExactWindow(CAPPED),
]
EVERY_RULE = RULES + MORE_RULES

# One rule for each class of store and each kind of clock, for what does not depend on the rest.
FEW_RULES = [RULES[0], RULES[2], RULES[5], RULES[6], RULES[8]]


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
    "float": Kind("float64", None, "float64"),  # has a store of its own
    "complex": Kind("complex128", None, "complex128"),  # a number in the store of arrays
    "0-d float32": Kind("float32", (), "float32", 4e-6),  # an array, and not a number
    "float16 (3,)": Kind("float16", (3,), "float32", 4e-6),  # held in another dtype
    "float32 (3,)": Kind("float32", (3,), "float32", 4e-6),  # few digits
    "complex128 (2, 3)": Kind("complex128", (2, 3), "complex128"),  # more than one axis
}
MORE_KINDS = {
    "int": Kind("int64", None, "float64"),
    "0-d float64": Kind("float64", (), "float64"),
    "float64 (1,)": Kind("float64", (1,), "float64"),
    "float64 (3,)": Kind("float64", (3,), "float64"),
    "complex64 (2,)": Kind("complex64", (2,), "complex64", 4e-6),
    "int32 (2,)": Kind("int32", (2,), "float64"),
    "uint8 (2, 2)": Kind("uint8", (2, 2), "float64"),
    "float64 (8, 16)": Kind("float64", (8, 16), "float64"),
}
EVERY_KIND = KINDS | MORE_KINDS
FLOAT, ROW = EVERY_KIND["float"], EVERY_KIND["float64 (3,)"]

# Numbers, and rows, with what to put in place of some samples.
of_bad_samples = pytest.mark.parametrize(
    ("kind", "bad"),
    [
        pytest.param(FLOAT, math.nan, id="nan"),
        pytest.param(FLOAT, math.inf, id="inf"),
        pytest.param(FLOAT, -math.inf, id="-inf"),
        pytest.param(ROW, [math.nan, math.inf, -math.inf], id="all in a row"),
    ],
)


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


def of_kinds(*names: str):
    """Run a test with these kinds of samples."""
    kinds = [EVERY_KIND[name] for name in names]
    return pytest.mark.parametrize("kind", kinds, ids=names)


# Rules and the names of kinds: every pair of the first tables, and some pairs with each other one.
BLOCK_RULES, OTHER_RULES = RULES[:6], RULES[6:]
CASES = [
    *((rule, name) for rule in RULES for name in KINDS),
    *((rule, "float") for rule in MORE_RULES),
    *zip(cycle(BLOCK_RULES), MORE_KINDS),
    *zip(cycle(OTHER_RULES), MORE_KINDS),
]


def of_pairs(pairs):
    """Run a test with these rules, each with the kind of this name."""
    cases = [
        pytest.param(rule, EVERY_KIND[name], id=f"{short(rule)}-{name}") for rule, name in pairs
    ]
    return pytest.mark.parametrize(("rule", "kind"), cases)


of_cases = of_pairs(CASES)

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


def ways_for(kind: Kind) -> dict:
    """The ways that samples of this kind can go: JSON has no arrays."""
    return {name: way for name, way in WAYS.items() if name != "json" or kind.shape is None}


def bits(average):
    """The state with nothing but numbers and bytes, so that == is to the bit."""
    state = average.state_dict()
    arrays = [key for key in ("blocks", "partial", "variances", "squares") if key in state]
    return state | {key: np.asarray(state[key], state["dtype"]).tobytes() for key in arrays}
