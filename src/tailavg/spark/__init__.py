"""Tail averages in Spark: of keys in a stream that never ends, and of rows in a table."""

from tailavg.spark.frames import saved_states, tail_mean

__all__ = ["saved_states", "tail_mean"]
