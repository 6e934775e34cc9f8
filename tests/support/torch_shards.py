"""A model that is sharded over processes, and how to see it and its average whole."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tailavg import AnytimeWindow, Exponential, RawTail
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import History, bits

SHARDED_RULES = [AnytimeWindow(20, 4), AnytimeWindow(0.3), Exponential(0.25), RawTail(0.5, 100)]
every_rule = pytest.mark.parametrize("rule", SHARDED_RULES, ids=short)


def fill(model, t: int) -> dict[str, torch.Tensor]:
    """Write the weights of step t; the full tensors, the same on every rank."""
    random, full = torch.Generator().manual_seed(t), {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full[name] = (1 + torch.rand(parameter.shape, generator=random)).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(shard_of(full[name], parameter))
            else:
                parameter.copy_(full[name])
    return full


def shard_of(full: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """This rank's part of a tensor, which may be none of it."""
    (placement,) = parameter.placements
    if placement.is_replicate():
        return full
    parts = full.chunk(dist.get_world_size(), placement.dim)
    rank = dist.get_rank()
    return parts[rank] if rank < len(parts) else full.narrow(placement.dim, 0, 0)


def trained(model, rule, steps: int, **options):
    """An average over so many updates, and its history of full weights."""
    options = {"trainable_only": False} | options
    average, history = ParameterAverage(model, rule, **options), History()
    for t in range(steps):
        full = fill(model, t)
        average.update()
        history.record(full)
    return average, history


def whole(tensors) -> dict[str, torch.Tensor]:
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in tensors.items()}


def local_bits(model) -> dict[str, bytes]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return bits({n: x.to_local() if isinstance(x, DTensor) else x for n, x in tensors.items()})
