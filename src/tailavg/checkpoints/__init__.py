"""Averages of saved checkpoints: files and folders of several formats.

`average_checkpoints` is public; `tailavg checkpoints` calls `Merge`. Read `merge.py` first: it cuts
tensors into pieces and averages them. A `Checkpoint` reads and writes the pieces in one format. The
weights are known before any file is read. Numbers with the same bits in all checkpoints, and all
that is no real or complex number, come from the newest.
"""

from tailavg.checkpoints.checkpoint import CheckpointError
from tailavg.checkpoints.merge import average_checkpoints

__all__ = ["CheckpointError", "average_checkpoints"]
