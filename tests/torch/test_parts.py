"""A list of modules: the parts into which a pipeline splits a model, as torchtitan does."""

import copy
import warnings
from itertools import pairwise

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tailavg import AnytimeWindow
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.torch_models import History, assert_averages, bits, snapshot

RULE = AnytimeWindow(12)
STEPS = 31


class MoE(nn.Module):
    """Two experts, balanced by a bias and counters that no gradient changes, as in torchtitan."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 2, bias=False)
        self.experts = nn.Parameter(torch.rand(2, 4, 4))
        self.register_buffer("expert_bias_E", torch.zeros(2))
        self.register_buffer("tokens_per_expert_E", torch.zeros(2), persistent=False)

    def forward(self, x):
        scores = self.router(x).sigmoid()
        chosen = (scores + self.expert_bias_E).argmax(dim=-1)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E += chosen.bincount(minlength=2)
        outputs = torch.einsum("tnd,ned->tne", x[:, None].expand(-1, 2, -1), self.experts)
        rows = torch.arange(len(x))
        return outputs[rows, chosen] * scores[rows, chosen, None]

    @torch.no_grad()
    def balance(self):
        """Before a step of the optimizer, move the bias towards the expert with less work."""
        tokens = self.tokens_per_expert_E
        self.expert_bias_E += 0.01 * torch.sign(tokens.mean() - tokens)
        tokens.zero_()


class Block(nn.Module):
    def __init__(self, moe: bool):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mix = MoE() if moe else nn.Linear(4, 4)

    def forward(self, x):
        return x + self.mix(self.norm(x))


class Decoder(nn.Module):
    """Any part of it may be missing. Each part of a pipeline has its own table of positions."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleDict({str(i): Block(moe=i > 0) for i in range(4)})
        self.head = nn.Linear(4, 9)
        self.register_buffer("positions", torch.linspace(0, 1, 5), persistent=False)

    def forward(self, x):
        x = self.embed(x) + self.positions[: len(x), None] if self.embed is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x) if self.head is not None else x


def split(model, *cuts):
    """Copies of a model, each without the layers of the others, as a pipeline has them."""
    bounds = (0, *cuts, 4)
    parts = []
    for i, (low, high) in enumerate(pairwise(bounds)):
        part = copy.deepcopy(model)
        for name in set(map(str, range(4))) - set(map(str, range(low, high))):
            del part.layers[name]
        if i > 0:
            part.embed = None
        if high < 4:
            part.head = None
        parts.append(part)
    return parts


def parameters(parts):
    return {name: x for part in parts for name, x in part.named_parameters()}


def forward(parts, x):
    for part in parts:
        x = part(x)
    return x


def optimizer_of(parts):
    return torch.optim.SGD(list(set(parameters(parts).values())), lr=0.2)


def train_step(parts, optimizer, step):
    tokens = torch.randint(9, (5,), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(forward(parts, tokens), tokens).backward()
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, MoE):
            module.balance()
    optimizer.step()


def trained(parts, steps=STEPS, rule=RULE, optimizer=None, **options):
    average, history = ParameterAverage(parts, rule, **options), History()
    optimizer = optimizer or optimizer_of(parts)
    for step in range(steps):
        train_step(parts, optimizer, step)
        average.update()
        history.record(parameters(parts))
    return average, history


def all_bits(parts):
    return [bits(part) for part in parts]


def test_parts_are_averaged_under_their_own_names():
    parts = split(Decoder(), 2)
    average, history = trained(parts)
    expected = history.average(RULE)
    got = average.averaged_state_dict()
    assert list(got) == [name for part in parts for name in part.state_dict()]
    assert sorted(got) == sorted(Decoder().state_dict())
    assert_averages(got, expected)
    before = all_bits(parts)
    with average.average_parameters():
        assert_averages({n: x.detach() for n, x in parameters(parts).items()}, expected)
        for part in parts:  # whatever happens inside is undone, in every part
            part.positions = torch.ones(5)
            next(part.parameters()).data = next(part.parameters()).data.clone()
            nn.init.zeros_(next(part.parameters()))
    assert all_bits(parts) == before


def test_any_split_resumes_from_any_other():
    average, history = trained(tuple(split(Decoder(), 1, 3)))
    state, averages = average.state_dict(), bits(average.averaged_state_dict())
    for parts in ([Decoder(seed=5)], split(Decoder(seed=5), 2)):
        names = parameters(parts)
        for source in [parts, *parts] if len(parts) == 1 else [parts]:
            resumed = ParameterAverage(source, RULE)
            resumed.load_state_dict(state)
            assert resumed.count == STEPS
            partial = snapshot(resumed.state_dict()["partial"])
            assert partial == snapshot({name: state["partial"][name] for name in names})
            got = bits(resumed.averaged_state_dict())
            assert {name: got[name] for name in names} == {name: averages[name] for name in names}
        average.copy_to(parts)
        assert_averages({n: x.detach() for n, x in names.items()}, history.average(RULE))


def test_wrappers_of_parts_do_not_change_names():
    parts = split(Decoder(), 2)
    average, history = trained(parts)
    wrapped = [torch.compile(parts[0], backend="eager"), nn.DataParallel(parts[1])]
    parts[1].layers["3"] = checkpoint_wrapper(parts[1].layers["3"])
    other = ParameterAverage(wrapped, RULE)
    other.load_state_dict(average.state_dict())
    assert_averages(other.averaged_state_dict(), history.average(RULE))


def test_a_tensor_that_two_parts_share_is_averaged_once():
    parts = split(Decoder(), 2)
    parts[1].head.weight = parts[0].embed.weight
    average, history = trained(parts)
    assert "head.weight" not in average.state_dict()["partial"]
    got = average.averaged_state_dict()
    assert got["head.weight"] is got["embed.weight"]
    assert_averages(got, history.average(RULE))
    parts[1].head.weight = nn.Parameter(parts[0].embed.weight.detach().clone())
    with pytest.raises(ValueError, match=r"head\.weight was tied to embed\.weight"):
        average.update()
    same = [parts[0], parts[0]]
    assert list(ParameterAverage(same, RULE).state_dict()["partial"]) == [
        name for name, _ in parts[0].named_parameters()
    ]


def test_two_tensors_of_one_name_are_an_error_that_names_the_parts():
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"parts 0 and 1 have different tensors named weight; "):
        ParameterAverage([first, second], RULE)
    average = ParameterAverage(nn.ModuleList([first, second]), RULE)  # as the error says
    assert list(average.state_dict()["partial"])[:2] == ["0.weight", "0.bias"]

    parts = split(Decoder(), 2)
    average, _ = trained(parts, 5)
    state = snapshot(average.state_dict())
    parts[1].layers["1"] = copy.deepcopy(parts[0].layers["1"])
    with pytest.raises(ValueError, match=r"parts 0 and 1 .* named layers\.1\.norm\.weight"):
        average.update()
    del parts[1].layers["1"]
    assert snapshot(average.state_dict()) == state
    average.update()
    assert average.count == 6
    parts[1].register_buffer("positions", torch.ones(5))  # in the state dict from now on
    parts[0].register_buffer("positions", torch.ones(5))
    with pytest.raises(ValueError, match="parts 0 and 1 have different tensors named positions"):
        ParameterAverage(parts, RULE)


def test_what_is_no_list_of_modules_is_refused():
    module = nn.Linear(2, 2)
    for mixed in ([module, torch.ones(2)], [module, None], {"part": module}, iter([module])):
        with pytest.raises((TypeError, ValueError), match="a list of modules"):
            ParameterAverage(mixed, RULE)
    with pytest.raises(TypeError, match=r"one module, got a list; .*ParameterAverage"):
        AveragedModel([module], RULE)


def test_tensors_without_names_go_into_parts_by_order():
    parts = split(Decoder(), 2)
    average = ParameterAverage(list(parameters(parts).values()), RULE)
    average.update()
    other = split(Decoder(seed=3), 2)
    average.copy_to(other)
    assert bits(parameters(other)) == bits(parameters(parts))


# Experts


def test_biases_of_experts_are_copied_or_averaged():
    def biases(parts):
        return {n: x for part in parts for n, x in part.named_buffers() if "bias_E" in n}

    def is_derived(name):
        return name.endswith(("tokens_per_expert_E", "positions"))

    parts = split(Decoder(), 2)
    options = {"buffers": "average", "exclude": is_derived}
    copied, averaged = ParameterAverage(parts, RULE), ParameterAverage(parts, RULE, **options)
    only = ParameterAverage(parts, RULE, buffers="average", include="*.expert_bias_E")
    history, optimizer = History(), optimizer_of(parts)
    for step in range(STEPS):
        train_step(parts, optimizer, step)
        for average in (copied, averaged, only):
            average.update()
        history.record(parameters(parts) | biases(parts))
    expected = history.average(RULE)
    names = list(biases(parts))
    assert len(names) == 3
    assert any(abs(expected[n] - x.numpy()).max() > 1e-3 for n, x in biases(parts).items())
    assert_averages(averaged.averaged_state_dict(), expected)
    assert_averages(only.averaged_state_dict(), {name: expected[name] for name in names})
    assert set(only.state_dict()["partial"]) == set(names)
    got = copied.averaged_state_dict()
    assert bits({name: got[name] for name in names}) == bits(biases(parts))

    parts[1].layers["2"].mix.tokens_per_expert_E.fill_(7)  # in the middle of an accumulation
    before = all_bits(parts)
    for average in (copied, averaged, only):
        with average.average_parameters():
            forward(parts, torch.arange(5))  # counts tokens, since it does not call eval()
        assert all_bits(parts) == before
    with pytest.raises(ValueError, match=r"parts 0 and 1 .* named positions; exclude this buffer"):
        ParameterAverage(parts, RULE, buffers="average")


# Optimizers


class Optimizers(torch.optim.Optimizer):
    """One optimizer a part, as torchtitan's container: its own group has no learning rate."""

    def __init__(self, parts):
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
        super().__init__([x for part in parts for x in part.parameters()], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def test_a_container_of_optimizers_counts_one_update_a_step(monkeypatch):
    parts = split(Decoder(), 2)
    optimizers = Optimizers(parts)
    average, history = ParameterAverage(parts, RULE), History()
    handle = average.attach(optimizers)
    with monkeypatch.context() as patch:  # no gradient is read, which would wait for the device
        patch.setattr("tailavg.torch.updates._is_nonzero", pytest.fail)
        for step in range(STEPS):
            train_step(parts, optimizers, step)
            history.record(parameters(parts))
    assert average.count == STEPS
    assert_averages(average.averaged_state_dict(), history.average(RULE))
    for inner in optimizers.optimizers:  # as when torch creates the state of an optimizer
        inner.param_groups[0]["lr"] = 0.0
    optimizers.zero_grad()
    optimizers.step()
    assert average.count == STEPS
    train_step(parts, optimizers, STEPS)  # the first step of a warm-up has gradients
    assert average.count == STEPS + 1
    handle.remove()


# Shards


def sharded(parts):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(part, mesh=mesh)
    return parts


def gathered(tensors):
    return {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in tensors.items()}


def sharded_rank(folder):
    """Both parts on each rank, in shards; then the state in parts cut elsewhere."""
    parts = sharded(split(Decoder(), 2))
    average, history = ParameterAverage(parts, RULE, trainable_only=False), History()
    optimizer = optimizer_of(parts)
    for step in range(STEPS):
        train_step(parts, optimizer, step)
        average.update()
        history.record({n: x.detach() for n, x in gathered(parameters(parts)).items()})
    expected = history.average(RULE)
    assert_averages(average.full_state_dict(), expected)
    tokens = torch.arange(5)
    with torch.no_grad():
        forward(parts, tokens)  # leaves the roots of both parts gathered
        with average.average_parameters():
            swapped = forward(parts, tokens)
    plain = Decoder()
    plain.load_state_dict(average.full_state_dict())
    with torch.no_grad():
        torch.testing.assert_close(swapped, plain(tokens), rtol=1e-4, atol=1e-4)
    average.save_averaged(folder / "averaged.safetensors")
    dcp.save({"average": average}, checkpoint_id=folder / "parts")
    other = ParameterAverage(sharded(split(Decoder(seed=5), 1, 3)), RULE)
    dcp.load({"average": other}, checkpoint_id=folder / "parts")
    full, resumed = average.full_state_dict(), other.full_state_dict()
    for name in expected:
        assert bits({"": resumed[name]}) == bits({"": full[name]}), name
    on_disk = safetensors.torch.load_file(folder / "averaged.safetensors")
    assert bits(on_disk) == bits(full)


def test_parts_in_shards(tmp_path, on_ranks):
    on_ranks(2, sharded_rank, tmp_path)


def pipeline_rank(folder):
    """Each rank has one stage: all write one checkpoint, which one process can load."""
    rank = dist.get_rank()
    part = split(Decoder(), 2)[rank]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    fully_shard(part, mesh=mesh)
    average, history = ParameterAverage([part], RULE), History()
    for step in range(STEPS):
        random = torch.Generator().manual_seed(2 * step + rank)
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.to_local().copy_(1 + torch.rand(parameter.shape, generator=random))
        average.update()
        history.record({n: x.detach() for n, x in gathered(parameters([part])).items()})
    dcp.save({"average": average}, checkpoint_id=folder / "state")
    dcp.save(average.averaged_state_dict(), checkpoint_id=folder / "averaged")
    average.save_averaged(folder / f"stage-{rank}.safetensors")
    return history.average(RULE)


def test_stages_on_several_ranks_write_one_checkpoint(tmp_path, on_ranks):
    expected = {}
    for stage in on_ranks(2, pipeline_rank, tmp_path):
        expected |= stage
    whole = Decoder(seed=4)
    average = ParameterAverage(whole, RULE)
    weights = whole.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it loads in one process
        dcp.load({"average": average}, checkpoint_id=tmp_path / "state")
        dcp.load(weights, checkpoint_id=tmp_path / "averaged")
    assert average.count == STEPS
    assert_averages(average.averaged_state_dict(), expected)
    assert_averages(weights, expected)
    stages = [
        safetensors.torch.load_file(tmp_path / f"stage-{rank}.safetensors") for rank in (0, 1)
    ]
    assert_averages(stages[0] | stages[1], expected)
    assert not stages[0].keys() & stages[1].keys()
