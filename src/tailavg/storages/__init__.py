"""Storages: what holds the samples' means. Each registers itself for the rules it serves."""

from tailavg.average import TailAverage
from tailavg.storages.anytail import AnyTailStorage
from tailavg.storages.blocks import BlockStorage
from tailavg.storages.decayed import DecayedStorage
from tailavg.storages.samples import SampleStorage

__all__ = ["AnyTailStorage", "BlockStorage", "DecayedStorage", "SampleStorage", "TailAverage"]
