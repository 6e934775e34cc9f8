"""Storages: what holds the samples' means. Each registers itself for the rules it serves."""

from tailavg.numpy.average import TailAverage
from tailavg.numpy.anytail import AnyTailStorage
from tailavg.numpy.blocks import BlockStorage
from tailavg.numpy.decayed import DecayedStorage
from tailavg.numpy.samples import SampleStorage

__all__ = ["AnyTailStorage", "BlockStorage", "DecayedStorage", "SampleStorage", "TailAverage"]
