"""States and files with something wrong in them, and limits of time and memory."""

from __future__ import annotations

import copy
import random
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

DEEP: dict[str, Any] = {}
for _ in range(300):  # more than Python can copy is more than it can load
    DEEP = {"type": "Exponential", "window": DEEP}

NASTY: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    255,
    256,
    257,
    10**8,
    2**31,
    2**62,
    2**63 - 1,
    2**63,
    10**400,
    10**5000,
    -(10**400),
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    5e-324,
    1e308,
    float("nan"),
    float("inf"),
    -float("inf"),
    1j,
    "",
    "x",
    "f8,,",
    "O",
    "V0",
    "float16",
    "int64",
    "\ud800",
    "AnyTail",
    "Growing",
    b"bytes",
    [],
    [[]],
    [0],
    [1, 2],
    [None],
    ["1"],
    {},
    {"type": "Fixed", "k": 10**9},
    {"type": "Growing", "c": 1e-300, "at_most": None},
    {"type": ["Fixed"], "k": 1},
    DEEP,
    np.zeros(0),
    np.zeros((3 * 10**7, 0)),
    np.zeros((0, 10**9)),
    np.zeros((), "V0"),
    np.array(None),
    np.broadcast_to(np.zeros(1), (3, 10)),
    np.float64(1.0),
    np.int64(3),
]


def _places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in nested dicts and lists."""
    pairs: Any = ()
    if isinstance(data, dict):
        pairs = data.items()
    elif isinstance(data, list):
        pairs = enumerate(data)
    for key, value in pairs:
        yield (*path, key)
        yield from _places(value, (*path, key))


def mutants(state: dict[str, Any], number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Copies of a state, each with one to three things changed, removed, doubled or swapped."""
    chance = random.Random(seed)
    for _ in range(number):
        mutant: Any = copy.deepcopy(state)
        for _ in range(chance.choice([1, 1, 1, 2, 3])):
            places = list(_places(mutant))
            if not places:
                break
            *way, last = chance.choice(places)
            inside = mutant
            for key in way:
                inside = inside[key]
            what = chance.random()
            if what < 0.6:
                inside[last] = copy.deepcopy(chance.choice(NASTY))
            elif what < 0.7:
                del inside[last]
            elif what < 0.8 and isinstance(inside, list):
                inside.insert(last, copy.deepcopy(inside[last]))
            elif what < 0.9 and isinstance(inside[last], int | float):
                inside[last] = inside[last] + chance.choice([-1, 1, 7, 256])
            else:
                other = chance.choice(list(inside)) if isinstance(inside, dict) else 0
                inside[last] = copy.deepcopy(inside[other])
        yield mutant


def broken(data: bytes, number: int, seed: int) -> Iterator[bytes]:
    """Copies of a file, cut off or with some bytes changed, removed or inserted."""
    chance = random.Random(seed)
    for _ in range(number):
        found = bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 5])):
            at = chance.randrange(len(found) + 1)
            what = chance.random()
            if what < 0.2:
                del found[at:]
            elif what < 0.7 and at < len(found):
                found[at] = chance.choice([0, 1, 255, 127, found[at] ^ (1 << chance.randrange(8))])
            elif what < 0.85:
                del found[at : at + chance.randrange(1, 20)]
            else:
                found[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 20)))
        yield bytes(found)


def within(call: Callable[[], Any], seconds: float = 2.0, megabytes: float = 20.0) -> Any:
    """Call something in limited processor time and memory."""

    def late(*_: Any) -> None:
        raise AssertionError(f"expected an end within {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    tracemalloc.start()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < megabytes * 1e6, f"{peak / 1e6:.0f} MB"
