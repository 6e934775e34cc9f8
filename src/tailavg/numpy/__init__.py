"""Averages of numbers and NumPy arrays."""

from tailavg.numpy import stores as stores  # which an average becomes
from tailavg.numpy.average import TailAverage

__all__ = ["TailAverage"]
