"""Averages of numbers and NumPy arrays."""

from tailavg.numpy import stores as stores  # which an average becomes
from tailavg.numpy.average import TailAverage
from tailavg.numpy.keyed import TailAverages

__all__ = ["TailAverage", "TailAverages"]
