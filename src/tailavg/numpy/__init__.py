"""Averages of numbers and NumPy arrays."""

from tailavg.numpy.average import TailAverage
from tailavg.numpy.keyed import TailAverages

__all__ = ["TailAverage", "TailAverages"]
