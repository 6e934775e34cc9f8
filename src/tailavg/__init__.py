"""Averages of the tail of a stream: its last k samples, or its last fraction."""

from tailavg.anytail import AnyTail
from tailavg.profile import Profile
from tailavg.rules import AnytimeWindow, ExactWindow, Exponential, RawTail
from tailavg.storages import TailAverage
from tailavg.windows import Fixed, Growing

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
