"""Tail averages of streams: the last k samples, or the last fraction of them, in constant memory."""

from tailavg import storages as _storages  # noqa: F401
from tailavg.average import TailAverage
from tailavg.profile import Profile
from tailavg.rules import AnytimeWindow, ExactWindow, Exponential, RawTail
from tailavg.windows import Fixed, Growing

__all__ = [
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
