"""Averages of models that live on several processes: gloo groups on the CPU, real ones.

Functions named `…_rank` run on each process of a group; the tests start them there.
"""

import hashlib
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import History, assert_averages, bits, small, wide
from tests.support.torch_shards import every_rule, local_bits, trained, whole

# DDP


def ddp_rank(folder, rule):
    model = small()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, averaged = ParameterAverage(wrapped, rule), AveragedModel(model, rule)
    average.attach(optimizer)
    history = History(model)
    for step in range(40):
        random = torch.Generator().manual_seed(2 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.rand(5, 3, generator=random)).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(wrapped)
        history.record()
    got = average.averaged_state_dict()
    assert list(got) == list(model.state_dict())
    assert_averages(got, history.average(rule))
    assert bits(dict(averaged.module.named_parameters())).items() <= bits(got).items()
    before = bits(model)
    with average.average_parameters():
        wrapped(torch.rand(5, 3))
    assert bits(model) == before
    average.save_averaged(folder / "ddp.safetensors")
    dist.barrier()
    on_disk = safetensors.torch.load_file(folder / "ddp.safetensors")
    parameters = [name for name, _ in model.named_parameters()]
    assert bits({n: on_disk[n] for n in parameters}) == bits({n: got[n] for n in parameters})
    digest = hashlib.sha256()
    for name in parameters:
        digest.update(bits({name: got[name]})[name])
    digest.update(repr(average.profile()).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("rule", [AnytimeWindow(20, 4), Exponential(0.25)], ids=short)
def test_ranks_of_ddp_have_the_same_averages(rule, tmp_path, on_ranks):
    first, second = on_ranks(2, ddp_rank, tmp_path, rule)
    assert first == second


# Tensor parallel


class Layered(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(5)  # stays a plain tensor
        self.down = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def tensor_parallel_rank(folder, rule):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Layered()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model.gain = nn.Parameter(distribute_tensor(torch.ones(5), mesh, [Replicate()]))
    placements = {n: p.placements for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert placements["down.weight"] == (Shard(1),)
    with CommDebugMode() as communication:
        average, history = trained(model, rule, 60)
    assert communication.get_total_counts() == 0
    expected, x = (
        history.average(rule),
        torch.rand(3, 5, generator=torch.Generator().manual_seed(0)),
    )
    before, output = local_bits(model), model(x)
    full = average.full_state_dict()
    assert_averages(full, expected)
    got = average.averaged_state_dict()
    assert {n: p.placements for n, p in got.items() if isinstance(p, DTensor)} == placements
    plain = Layered(seed=2)
    plain.load_state_dict(full)
    with average.average_parameters():
        torch.testing.assert_close(model(x), plain(x))
    assert local_bits(model) == before
    torch.testing.assert_close(model(x), output, rtol=0, atol=0)
    dcp.save({"average": average}, checkpoint_id=folder / "parallel")
    fresh = ParameterAverage(Layered(seed=4), rule)  # not parallel
    dcp.load({"average": fresh}, checkpoint_id=folder / "parallel")
    assert bits(fresh.full_state_dict()) == bits(full)
    model(x).sum().backward()
    return {name: wide(tensor) for name, tensor in full.items()}


@every_rule
def test_tensor_parallel_models_are_averaged_as_they_lie(rule, tmp_path, on_ranks):
    first, second = on_ranks(2, tensor_parallel_rank, tmp_path, rule)
    for name, values in first.items():
        np.testing.assert_array_equal(values, second[name])


# Meshes of two dimensions


def on_mesh(kind: str, seed: int = 0) -> nn.Module:
    model = Layered(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if kind == "replicated shards":
        fully_shard(model, mesh=mesh)
        return model
    if kind == "shards in main memory":
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        return model
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    fully_shard(model, mesh=mesh["outer"])
    return model


def mesh_rank(folder, kind):
    rule, model = AnytimeWindow(20), on_mesh(kind)
    average, history = ParameterAverage(model, rule), History()
    for t in range(30):
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.to_local().mul_(0.9).add_(t + i)  # the same on every rank
        with CommDebugMode() as communication:
            average.update()
        assert communication.get_total_counts() == 0
        history.record(whole(dict(model.named_parameters())))
    full = average.full_state_dict()
    assert_averages(full, history.average(rule))
    plain, x = Layered(seed=2), torch.rand(3, 5, generator=torch.Generator().manual_seed(0))
    plain.load_state_dict(full)
    before, output = local_bits(model), model(x)
    with average.average_parameters():
        torch.testing.assert_close(model(x), plain(x))
    assert local_bits(model) == before
    torch.testing.assert_close(model(x), output, rtol=0, atol=0)
    dcp.save({"average": average}, checkpoint_id=folder / "mesh")
    for other in (*(on_mesh(each, seed=3) for each in MESHES), Layered(seed=4)):
        fresh = ParameterAverage(other, rule)
        dcp.load({"average": fresh}, checkpoint_id=folder / "mesh")
        assert bits(fresh.full_state_dict()) == bits(full)
    return True


def spread_rank(kind):
    """The variance and the samples of a model on a mesh are those of the same model on none."""
    rule, model, plain = AnytimeWindow(20), on_mesh(kind), Layered()
    average = ParameterAverage(model, rule, variance=True)
    alone = ParameterAverage(plain, rule, variance=True)
    for t in range(30):
        with torch.no_grad():
            for i, parameter in enumerate(plain.parameters()):
                parameter.mul_(0.9).add_(t + i)
            for i, parameter in enumerate(model.parameters()):
                parameter.to_local().mul_(0.9).add_(t + i)
        with CommDebugMode() as communication:
            average.update()
        assert communication.get_total_counts() == 0
        alone.update()
    expected = alone.variance()
    assert min(variance.min().item() for variance in expected.values()) > 0.1
    assert bits(whole(average.variance())) == bits(expected)
    with pytest.raises(ValueError, match="the model is sharded; pass a generator"):
        average.sample_parameters().__enter__()
    before = local_bits(model)
    with alone.sample_parameters(0.7, torch.Generator().manual_seed(3)):
        sample = bits(plain)
    with average.sample_parameters(0.7, torch.Generator().manual_seed(3)):
        assert bits(whole(dict(model.named_parameters()))) == sample
    assert local_bits(model) == before
    return True


MESHES = ["replicated shards", "sharded tensor parallel", "shards in main memory"]


@pytest.mark.parametrize("kind", MESHES)
def test_models_on_a_mesh_of_two_dimensions_are_averaged(kind, tmp_path, on_ranks):
    assert all(on_ranks(4, mesh_rank, tmp_path, kind))


@pytest.mark.parametrize("kind", MESHES)
def test_samples_do_not_depend_on_the_mesh(kind, on_ranks):
    assert all(on_ranks(4, spread_rank, kind))


# Offload


def offload_rank(folder, rule):
    """Every process has its own files, of its own shards, and the bits of memory."""
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    average, history = trained(model, rule, 150, offload=folder / "cold")
    memory, _ = trained(model, rule, 150)
    assert list((folder / "cold" / f"rank-{rank}").glob("mean-*"))
    assert not list((folder / "cold").glob("mean-*"))
    got = average.averaged_state_dict()
    assert_averages(whole(got), history.average(rule))
    for name, tensor in memory.averaged_state_dict().items():
        assert bits({"": tensor.to_local()}) == bits({"": got[name].to_local()}), name
    before = local_bits(model)
    with average.average_parameters():
        assert local_bits(model) != before
    assert local_bits(model) == before
    with pytest.raises(TypeError, match=r"save: .*is sharded.*torch\.distributed\.checkpoint"):
        average.save(folder / "state")
    dcp.save({"average": average.state_dict()}, checkpoint_id=folder / "dcp")
    fresh = ParameterAverage(model, rule, offload=folder / "other")
    state = {"average": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    fresh.load_state_dict(state["average"])
    for name, tensor in fresh.averaged_state_dict().items():
        assert bits({"": tensor.to_local()}) == bits({"": got[name].to_local()}), name


@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(5)], ids=short)
def test_shards_are_offloaded_each_by_its_own_process(rule, tmp_path, on_ranks):
    on_ranks(2, offload_rank, tmp_path, rule)


def ddp_offload_rank(folder):
    model = small()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = ParameterAverage(wrapped, 10, offload=folder / "cold")
    memory = ParameterAverage(model, 10)
    average.attach(optimizer)
    for step in range(40):
        random = torch.Generator().manual_seed(2 * step + dist.get_rank())
        optimizer.zero_grad()
        wrapped(torch.rand(5, 3, generator=random)).square().mean().backward()
        optimizer.step()
        memory.update()
    assert bits(average.averaged_state_dict()) == bits(memory.averaged_state_dict())
    average.save(folder / f"state-{dist.get_rank()}")
    memory.load(folder / f"state-{dist.get_rank()}")
    assert bits(average.averaged_state_dict()) == bits(memory.averaged_state_dict())
    got = average.averaged_state_dict()
    averages = bits({name: got[name] for name, _ in model.named_parameters()})
    return hashlib.sha256(repr(averages).encode()).hexdigest()


def test_ranks_of_ddp_offload_side_by_side_and_agree_to_the_bit(tmp_path, on_ranks):
    assert len(set(on_ranks(2, ddp_offload_rank, tmp_path))) == 1


# What cannot be averaged


def fsdp1_rank(use_orig_params):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it is deprecated
        inner = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params
        )
    for model in (inner, nn.Sequential(nn.Linear(4, 4), inner)):
        for average in (ParameterAverage, AveragedModel):
            with pytest.raises(
                TypeError, match=r"shard the model with torch's fully_shard \(FSDP2\)"
            ):
                average(model, 0.25)
    return True


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_original_fsdp_is_refused_at_once(use_orig_params, on_ranks):
    assert all(on_ranks(2, fsdp1_rank, use_orig_params))


def test_partitioned_parameters_of_deepspeed_are_refused_at_once():
    """As ZeRO stage 3 leaves them: empty, with an id. DeepSpeed itself is not installed."""
    model = nn.Linear(4, 4)
    model.weight.data, model.weight.ds_id = torch.empty(0), 0
    with pytest.raises(TypeError, match=r"weight: DeepSpeed's ZeRO stage 3 .* use stage 1 or 2"):
        ParameterAverage(model, 0.25)
