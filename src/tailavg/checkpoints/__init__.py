"""Average saved checkpoints: files and folders of several formats.

`average_checkpoints` is public; `tailavg checkpoints` calls `Merge`. Read `merge.py` first: it cuts
tensors into pieces and averages them. Then read `checkpoint.py`: each format is a subclass of
`Checkpoint`, which reads and writes pieces. `weights.py` computes the weights before any tensor is
read; `processes.py` splits the work. Integers, booleans and other data that cannot be averaged come
from the newest checkpoint.
"""

from tailavg.checkpoints.checkpoint import CheckpointError
from tailavg.checkpoints.merge import average_checkpoints

__all__ = ["CheckpointError", "average_checkpoints"]
