"""Averages of the tail of a stream: its last k samples, or its last fraction."""

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
