"""Averages of the tail of a stream: its last k samples, or its last fraction."""

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from tailavg.core.readings import Decay, Freshest
    from tailavg.core.profile import Profile
    from tailavg.core.rules import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail
    from tailavg.core.windows import Fixed, Growing
    from tailavg.numpy import TailAverage, TailAverages

__all__ = [
    "AnyTail",
    "AnytimeWindow",
    "Decay",
    "ExactWindow",
    "Exponential",
    "Fixed",
    "Growing",
    "Profile",
    "RawTail",
    "TailAverage",
    "TailAverages",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # imported when asked for: the command line must handle signals before it imports NumPy
    from importlib import import_module

    if name in ("core", "numpy"):
        return import_module(f"tailavg.{name}")
    if name in __all__:
        for module in ("numpy", "core.rules", "core.windows", "core.readings", "core.profile"):
            found = vars(import_module(f"tailavg.{module}"))
            globals().update({each: found[each] for each in __all__ if each in found})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
