"""How long is the window of your EMA? Measure the weight that real averages give to each step.

    python examples/ema_windows.py

A pretended training run sets the weights of a model, at step t, to a vector that is 1 in place t
and 0 elsewhere. What an average holds at the end is then the weight of each step in it. Its
effective size, 1 / Σ weight², is the window: so many samples of even weight leave as much noise.

Each average is the package's own class, with its own schedule of decays. The size is in updates;
the percentage is the part of the run that they span. Packages that are not installed are left out.
"""

import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tailavg.torch import ParameterAverage

LENGTHS = (1000, 10_000)  # steps


class Average(NamedTuple):
    """What to call after step 1, 2, …, and where to find the averaged weights."""

    update: Callable[[int], object]
    weights: Callable[[], Tensor]


def of_torch(model: nn.Module, **options: object) -> Average:
    """Torch's own class."""
    averaged = AveragedModel(model, **options)
    return Average(lambda _: averaged.update_parameters(model), lambda: averaged.module.weight)


def of_torch_ema(model: nn.Module, **options: object) -> Average:
    """The class of torch-ema."""
    from torch_ema import ExponentialMovingAverage

    ema = ExponentialMovingAverage(model.parameters(), **options)
    return Average(lambda _: ema.update(), lambda: ema.shadow_params[0])


def of_diffusers(model: nn.Module, **options: object) -> Average:
    """The class of diffusers."""
    from diffusers.training_utils import EMAModel

    ema = EMAModel(model.parameters(), **options)
    return Average(lambda _: ema.step(model.parameters()), lambda: ema.shadow_params[0])


def of_timm(model: nn.Module, **options: object) -> Average:
    """The class of timm, from its file: the package needs torchvision, and the file does not."""
    (folder,) = find_spec("timm").submodule_search_locations
    ema = runpy.run_path(Path(folder) / "utils" / "model_ema.py")["ModelEmaV3"](model, **options)
    return Average(lambda step: ema.update(model, step), lambda: ema.module.weight)


def of_ema_pytorch(model: nn.Module, **options: object) -> Average:
    """The class of ema-pytorch."""
    from ema_pytorch import EMA

    ema = EMA(model, **options)
    return Average(lambda _: ema.update(), lambda: ema.ema_model.weight)


def of_tailavg(model: nn.Module, rule: object) -> Average:
    """This library's."""
    average = ParameterAverage(model, rule)
    return Average(lambda _: average.update(), lambda: average.averaged_state_dict()["weight"])


class Case(NamedTuple):
    """A package, its settings, and how many steps lie between two updates."""

    package: str
    name: str
    make: Callable[..., Average]
    options: dict[str, object]
    every: int = 1


EMA = {"multi_avg_fn": get_ema_multi_avg_fn(0.999)}
CASES = (
    Case("torch", "torch, EMA 0.999", of_torch, EMA),
    Case("torch", "torch, SWA from the first step", of_torch, {}),
    Case("torch_ema", "torch-ema, 0.999", of_torch_ema, {"decay": 0.999}),
    Case("torch_ema", "torch-ema, 0.9999", of_torch_ema, {"decay": 0.9999}),
    Case("diffusers", "diffusers, defaults", of_diffusers, {}),
    Case("diffusers", "diffusers, use_ema_warmup", of_diffusers, {"use_ema_warmup": True}),
    Case("timm", "timm, 0.999", of_timm, {"decay": 0.999}),
    Case("timm", "timm, use_warmup", of_timm, {"use_warmup": True}),
    Case("ema_pytorch", "ema-pytorch, defaults", of_ema_pytorch, {}, every=10),
    Case("ema_pytorch", "ema-pytorch, every step", of_ema_pytorch, {"update_every": 1}),
    Case("tailavg", "tailavg, 1999", of_tailavg, {"rule": 1999}),
    Case("tailavg", "tailavg, 0.25", of_tailavg, {"rule": 0.25}),
)


@torch.no_grad()
def weights(case: Case, steps: int) -> Tensor:
    """The weight of each step in an average, at the end of a run."""
    model = nn.Linear(steps, 1, bias=False, dtype=torch.float64)
    now = nn.init.zeros_(model.weight)[0]
    average = case.make(model, **case.options)
    for step in range(1, steps + 1):
        now[step - 2] = 0
        now[step - 1] = 1
        average.update(step)
    return average.weights().detach().flatten().clone()


def main() -> None:
    """Print the table."""
    print(" " * 32 + "".join(f"{f'{steps:,} steps':>20}" for steps in LENGTHS))
    for case in CASES:
        if find_spec(case.package) is None:
            continue
        line = f"{case.name:32}"
        for steps in LENGTHS:
            size = 1 / weights(case, steps).square().sum().item()
            line += f"{size:13,.0f}{size * case.every / steps:7.0%}"
        print(line)


if __name__ == "__main__":
    main()
