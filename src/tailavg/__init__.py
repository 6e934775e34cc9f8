"""Averages of the tail of a stream: its last k samples, or its last fraction."""

TYPE_CHECKING = False  # importing typing would take time
if TYPE_CHECKING:
    from tailavg.core.elapsed import Elapsed
    from tailavg.core.profile import Profile
    from tailavg.core.readings import Decay, Freshest
    from tailavg.core.rules import AnyTail, AnytimeWindow, ExactWindow, Exponential, RawTail
    from tailavg.core.windows import Fixed, Growing
    from tailavg.numpy import TailAverage, TailAverages

__all__ = [
    "AnyTail",
    "AnytimeWindow",
    "Decay",
    "Elapsed",
    "ExactWindow",
    "Exponential",
    "Fixed",
    "Freshest",
    "Growing",
    "Profile",
    "RawTail",
    "TailAverage",
    "TailAverages",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # imported on first access: the command line must handle signals before NumPy is imported
    from importlib import import_module

    if name in ("core", "numpy"):
        return import_module(f"tailavg.{name}")
    if name in __all__:
        core = ("elapsed", "rules", "windows", "readings", "profile")
        for module in ("numpy", *(f"core.{name}" for name in core)):
            members = vars(import_module(f"tailavg.{module}"))
            globals().update({public: members[public] for public in __all__ if public in members})
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
