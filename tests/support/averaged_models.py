"""What the tests of AveragedModel share."""

import torch

from tailavg.torch import AveragedModel
from tests.support.torch_models import History, Walk


def walked(model, rule, steps: int, **options):
    """An averaged model after so many updates, and the walk and history of its source."""
    averaged = AveragedModel(model, rule, **options)
    walk, history = Walk(model), History(model)
    for _ in range(steps):
        walk.step()
        averaged.update_parameters(model)
        history.record()
    return averaged, walk, history


def tensors_of(state) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
