"""Tail averages in Spark: for each key of an endless stream or of a table. See `tail_mean`."""

from tailavg.spark.frames import saved_states, tail_mean

__all__ = ["saved_states", "tail_mean"]
