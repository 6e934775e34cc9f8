"""Averages of numbers and NumPy arrays."""

from tailavg.numpy.average import TailAverage
from tailavg.numpy.stores import Stored

__all__ = ["Stored", "TailAverage"]
