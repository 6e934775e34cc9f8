"""Averages of the tail of a stream: its last k samples, or its last fraction."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailavg.core.profile import Profile
    from tailavg.core.rules import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail
    from tailavg.core.windows import Fixed, Growing
    from tailavg.numpy import TailAverage

__all__ = [
    "AnyTail",
    "AnytimeWindow",
    "ExactWindow",
    "Exponential",
    "Fixed",
    "Growing",
    "Profile",
    "RawTail",
    "TailAverage",
]
__version__ = "0.1.0"

_MODULES = ("numpy", "core.rules", "core.windows", "core.profile")


def __getattr__(name: str) -> object:
    # imported when asked for: the command line handles signals before it imports NumPy
    if name in __all__ or name in ("core", "numpy"):
        for module in map(import_module, [f"tailavg.{module}" for module in _MODULES]):
            globals().update({each: vars(module)[each] for each in __all__ if each in vars(module)})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
