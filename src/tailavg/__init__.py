"""Averages of the tail of a stream: its last k samples, or its last fraction."""

from tailavg.core.anytail import AnyTail
from tailavg.core.profile import Profile
from tailavg.core.rules import AnytimeWindow, ExactWindow, Exponential, RawTail
from tailavg.numpy import TailAverage
from tailavg.core.windows import Fixed, Growing

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
