"""What the tests of AnyTail in torch share."""

import torch

from tailavg import AnyTail
from tailavg.torch import ParameterAverage


def counted(rule=None, steps: int = 100, **options):
    """A weight that was 0, 1, 2, …, and its average."""
    weight = torch.zeros(2)
    average = ParameterAverage({"w": weight}, rule or AnyTail(8), **options)
    for step in range(steps):
        weight.fill_(step)
        average.update()
    return weight, average


def outputs(average, folder):
    return {
        "average_parameters": lambda window: average.average_parameters(window).__enter__(),
        "copy_to": lambda window: average.copy_to(window=window),
        "copy_to another": lambda window: average.copy_to({"w": torch.zeros(2)}, window),
        "averaged_state_dict": lambda window: average.averaged_state_dict(window=window),
        "full_state_dict": lambda window: average.full_state_dict(window=window),
        "save_averaged": lambda window: average.save_averaged(folder / "file", window=window),
        "weights": lambda window: average.weights(window),
        "profile": lambda window: average.profile(window),
        "select_tail": lambda window: average.select_tail(lambda: 1.0, [1.0, window]),
    }
