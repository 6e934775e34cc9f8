"""Tail averages of the weights of PyTorch models.

Start with `parameters`. It uses `tracking` (which tensors are averaged), `accumulators` (their sums
and means, in `storage` or in `folder`), `spread` (the same with variances), `updates`, `swap` and
`export`. So does `model`, the drop-in for torch's `AveragedModel`, but for `spread`. `batchnorm`
and `functions` use none of these.
"""

from tailavg.extras import needs

with needs("torch"):
    from tailavg.torch.batchnorm import (
        convert_tail_batchnorm,
        recompute_batchnorm,
        revert_batchnorm,
    )
    from tailavg.torch.functions import growing_avg_fn, growing_multi_avg_fn
    from tailavg.torch.model import AveragedModel
    from tailavg.torch.parameters import ParameterAverage, Selection

__all__ = [
    "AveragedModel",
    "ParameterAverage",
    "Selection",
    "convert_tail_batchnorm",
    "growing_avg_fn",
    "growing_multi_avg_fn",
    "recompute_batchnorm",
    "revert_batchnorm",
]
