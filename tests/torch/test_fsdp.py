"""Averages of models that FSDP2 shards over several processes.

Functions named `…_rank` run on each process of a group; the tests start them there.
"""

import copy

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from tailavg import AnytimeWindow, Exponential, RawTail
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import History, assert_averages, bits, snapshot
from tests.support.torch_shards import SHARDED_RULES, fill, local_bits, trained, whole


class Net(nn.Module):
    """Shapes that no number of ranks divides, and parameters too short for every rank."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.gate = nn.Linear(5, 1)  # one row: only the first rank holds any of it
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.low = nn.Linear(5, 5, bias=False).to(torch.bfloat16)
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.tensor([1.5]))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.gate(x).sigmoid()
        x = x + self.low(x.to(torch.bfloat16)).float() + self.frozen(x)
        return self.head(x) * self.scale


TOKENS = torch.tensor([0, 3, 6, 2])


def sharded(seed: int = 0) -> nn.Module:
    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.blocks, model.low):  # a group of parameters is of one type
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def local_state(average):
    """The state with local shards, to be compared with ==."""

    def local(value):
        if isinstance(value, DTensor):
            return value.to_local()
        if isinstance(value, dict):
            return {key: local(item) for key, item in value.items()}
        return [local(item) for item in value] if isinstance(value, list) else value

    return snapshot(local(average.state_dict()))


def full_state(average):
    """The state with every tensor gathered."""

    def full(value):
        if isinstance(value, DTensor):
            return value.full_tensor()
        if isinstance(value, dict):
            return {key: full(item) for key, item in value.items()}
        return [full(item) for item in value] if isinstance(value, list) else value

    return full(average.state_dict())


def shards_rank(folder, rule, steps):
    model = sharded()
    with CommDebugMode() as communication:
        average, history = trained(model, rule, steps)
    assert communication.get_total_counts() == 0
    expected = history.average(rule)
    before = local_bits(model)
    with CommDebugMode() as communication:
        got = average.averaged_state_dict()
        state = average.state_dict()
        with average.average_parameters():
            inside = {n: x.detach().to_local().clone() for n, x in model.named_parameters()}
        average.load_state_dict(state)
        average.profile()
    assert communication.get_total_counts() == 0
    assert local_bits(model) == before

    assert list(got) == list(model.state_dict())
    for name, parameter in model.state_dict().items():
        assert type(got[name]) is type(parameter), name
        if isinstance(parameter, DTensor):
            assert got[name].placements == parameter.placements, name
            assert got[name].to_local().shape == parameter.to_local().shape, name
    assert_averages(whole(got), expected)
    local = {n: x.to_local() for n, x in got.items() if n in inside}
    assert bits(local) == bits(inside)
    names = [name for name, _ in model.named_parameters()]
    for held in (*state["blocks"], state["partial"]):
        assert list(held) == names
        for name, tensor in held.items():
            assert isinstance(tensor, DTensor), name
            assert tensor.placements == dict(model.named_parameters())[name].placements
    return [model.gate.weight.to_local().numel(), average.count]


@pytest.mark.parametrize(
    ("rule", "steps"), list(zip(SHARDED_RULES, [60, 300, 60, 120], strict=True)), ids=short
)
def test_shards_are_averaged_without_communication(rule, steps, tmp_path, on_ranks):
    assert on_ranks(2, shards_rank, tmp_path, rule, steps) == [[5, steps], [0, steps]]


def evaluation_rank(folder):
    """After a forward in eval the root keeps its gathered weights: a swap must reach them."""
    model, rule = sharded(), AnytimeWindow(20)
    average, history = trained(model, rule, 60)
    reference = Net()
    training = {n: x.clone() for n, x in whole(dict(model.named_parameters())).items()}

    def load(values):
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                parameter.copy_(torch.as_tensor(values[name]))
        reference.eval()
        return reference(TOKENS)

    expected = load(history.average(rule))
    trained_output = load(training)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for swaps in range(2):
            with mode():
                torch.testing.assert_close(model(TOKENS), trained_output)
                with average.average_parameters():
                    for _ in range(2):
                        got = model(TOKENS)
                        torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)
                    assert (got - trained_output).abs().max() > 0.01
                torch.testing.assert_close(model(TOKENS), trained_output, msg=f"{mode} {swaps}")
    with torch.no_grad():
        model(TOKENS)
        average.store()
        average.copy_to()
        torch.testing.assert_close(model(TOKENS), expected, rtol=2e-3, atol=2e-3)
        average.restore()
        torch.testing.assert_close(model(TOKENS), trained_output)
        try:
            with average.average_parameters():
                model(TOKENS)
                raise ValueError("inside")
        except ValueError:
            torch.testing.assert_close(model(TOKENS), trained_output)
        model(TOKENS)  # unsharded again, and then an update and a state
        count = average.count
        average.update()
        assert average.count == count + 1
        average.state_dict()
        average.averaged_state_dict()
    after = whole(dict(model.named_parameters()))
    assert bits(after) == bits(training)
    model.train()
    model(TOKENS).sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    average.update()
    return True


def test_a_swap_evaluates_the_averages_and_then_the_training_weights(tmp_path, on_ranks):
    assert all(on_ranks(2, evaluation_rank, tmp_path))


def update_after_evaluation_rank(folder):
    """An update while the root is still unsharded sees the shards that the optimizer writes."""
    model, rule = sharded(), AnytimeWindow(20)
    average, history = ParameterAverage(model, rule, trainable_only=False), History()
    for t in range(25):
        model.eval()
        with torch.no_grad():
            model(TOKENS)
        model.train()
        model(TOKENS).square().mean().backward()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.step()
        if t % 2:
            model.eval()
            with torch.no_grad():
                model(TOKENS)
        average.update()
        model.reshard()
        history.record(whole(dict(model.named_parameters())))
    assert_averages(whole(average.averaged_state_dict()), history.average(rule))
    return True


def test_updates_between_evaluations_see_the_weights_of_the_optimizer(tmp_path, on_ranks):
    assert all(on_ranks(2, update_after_evaluation_rank, tmp_path))


def export_rank(folder):
    model, rule = sharded(), AnytimeWindow(20)
    average, history = trained(model, rule, 60)
    before, state = local_bits(model), local_state(average)
    full = average.full_state_dict()
    assert list(full) == list(Net().state_dict())
    assert not any(isinstance(x, DTensor) for x in full.values())
    assert {x.device.type for x in full.values()} == {"cpu"}
    assert_averages(full, history.average(rule))
    plain = Net(seed=5)
    plain.load_state_dict(full)
    wider = average.full_state_dict(dtype=torch.float64)
    assert wider["low.weight"].dtype == torch.float64
    average.save_averaged(folder / "sharded.safetensors")
    dist.barrier()
    on_disk = safetensors.torch.load_file(folder / "sharded.safetensors")
    for name, tensor in on_disk.items():
        assert bits({"": tensor}) == bits({"": full[name]}), name
    assert full.keys() - on_disk.keys() <= {"head.weight", "embed.weight"}
    assert [file.name for file in folder.iterdir() if file.suffix == ".safetensors"] == [
        "sharded.safetensors"
    ]
    for tensor in (*full.values(), *wider.values()):
        tensor.fill_(0)
    assert local_bits(model) == before
    assert local_state(average) == state
    with average.average_parameters():
        inside = average.full_state_dict()
    assert_averages(inside, history.average(rule))
    other = sharded(seed=3)
    average.copy_to(other)
    assert_averages(whole(dict(other.named_parameters())), history.average(rule))
    return True


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_export_gathers_the_averages_and_shares_no_memory(world, tmp_path, on_ranks):
    assert all(on_ranks(world, export_rank, tmp_path))


def save_rank(folder, rule, steps):
    model = sharded()
    average, _ = trained(model, rule, steps)
    dcp.save(
        {"model": model.state_dict(), "average": average.state_dict()},
        checkpoint_id=folder / "by-state",
    )
    dcp.save({"average": average}, checkpoint_id=folder / "by-itself")
    full = full_state(average)
    averaged = average.full_state_dict()
    for t in range(steps, steps + 40):
        fill(model, t)
        average.update()
    later = average.full_state_dict()
    if dist.get_rank() == 0:
        torch.save({"state": full, "averaged": averaged, "later": later}, folder / "expected.pt")
    return average.count


def restore_rank(folder, rule, steps, how):
    expected = torch.load(folder / "expected.pt", weights_only=True)
    model = Net(seed=8) if how == "plain" else sharded(seed=8)
    if how == "into a used one":
        average, _ = trained(model, rule, 33)
    else:
        average = ParameterAverage(model, rule, trainable_only=False)  # never updated
    if how == "by itself":
        dcp.load({"average": average}, checkpoint_id=folder / "by-itself")
    else:
        state = {"model": model.state_dict(), "average": average.state_dict()}
        dcp.load(state, checkpoint_id=folder / "by-state")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
    assert snapshot(full_state(average)) == snapshot(expected["state"])
    assert average.count == steps
    parameters = {name for name, _ in Net().named_parameters()} | {"head.weight"}
    got = average.full_state_dict()
    assert bits({n: got[n] for n in parameters}) == bits(
        {n: expected["averaged"][n] for n in parameters}
    )
    for t in range(steps, steps + 40):
        fill(model, t)
        average.update()
    got = average.full_state_dict()
    assert bits({n: got[n] for n in parameters}) == bits(
        {n: expected["later"][n] for n in parameters}
    )
    return average.count


PLAIN, FEWER, MORE = (1, "plain"), (1, "fresh"), (3, "fresh")
ITSELF, USED = (2, "by itself"), (2, "into a used one")


@pytest.mark.parametrize(
    ("rule", "steps", "restores"),
    [
        (AnytimeWindow(20, 4), 290, [PLAIN, FEWER, MORE, ITSELF, USED]),
        (AnytimeWindow(0.3), 5, [MORE, ITSELF]),
        (Exponential(0.25), 90, [PLAIN, MORE, USED]),
        (RawTail(0.5, 100), 70, [FEWER, MORE, ITSELF]),
    ],
    ids=short,
)
def test_a_checkpoint_of_two_ranks_comes_back_on_any_number(
    rule, steps, restores, tmp_path, on_ranks
):
    assert on_ranks(2, save_rank, tmp_path, rule, steps) == [steps + 40] * 2
    for world, how in restores:
        counts = on_ranks(world, restore_rank, tmp_path, rule, steps, how)
        assert counts == [steps + 40] * world, how


def errors_rank(folder):
    model = sharded()
    average, _ = trained(model, AnytimeWindow(20), 30)
    before, state = local_bits(model), local_state(average)
    for call in (average.update, average.state_dict, average.store):
        with average.average_parameters(), pytest.raises(RuntimeError):
            call()
        assert local_bits(model) == before
        assert local_state(average) == state
    try:
        with average.average_parameters():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert local_bits(model) == before
    other = ParameterAverage(sharded(seed=1), AnytimeWindow(20), trainable_only=False)
    good = copy.copy(average.state_dict())
    partial = dict(good["partial"])
    del partial["gate.bias"]
    with pytest.raises(ValueError, match=r"gate\.bias"):
        other.load_state_dict(good | {"partial": partial})
    assert other.count == 0
    other.load_state_dict(good)
    assert local_state(other) == state
    return True


def test_errors_leave_shards_as_they_were(tmp_path, on_ranks):
    assert all(on_ranks(2, errors_rank, tmp_path))


def saved_rank(folder):
    """Shards of any size and place in memory, through torch.save and deepcopy."""
    average, _ = trained(sharded(), AnytimeWindow(20), 45)
    expected = local_state(average)
    path = folder / f"{dist.get_rank()}.pt"
    torch.save(average.state_dict(), path)
    for state in (torch.load(path, weights_only=True), copy.deepcopy(average.state_dict())):
        other = ParameterAverage(sharded(1), AnytimeWindow(20), trainable_only=False)
        other.load_state_dict(state)
        assert local_state(other) == expected
    return path.stat().st_size


def test_every_rank_saves_its_shards_with_torch(tmp_path, on_ranks):
    sizes = on_ranks(2, saved_rank, tmp_path)
    assert all(sizes)


def memory_rank(folder):
    """Shards, not whole tensors: every rank holds its part of the accumulators."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(100, 100)
    fully_shard(model, mesh=mesh)
    average, _ = trained(model, AnytimeWindow(20, 3), 30)
    state = average.state_dict()
    storages = {}
    for held in (*state["blocks"], state["partial"]):
        for tensor in held.values():
            storage = tensor.to_local().untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_every_rank_holds_its_part_of_the_accumulators(tmp_path, on_ranks):
    for size in on_ranks(2, memory_rank, tmp_path):
        assert size <= 4 * 4 * (100 * 100 + 100) / 2 + 4096


def wrapped_rank(folder):
    """FSDP inside torch.compile, and an outer name that is the user's own."""
    model = sharded()
    compiled = torch.compile(model, backend="eager")
    average, history = trained(model, AnytimeWindow(20), 5)
    other = ParameterAverage(compiled, AnytimeWindow(20), trainable_only=False)
    assert list(other.state_dict()["partial"]) == list(average.state_dict()["partial"])
    other.load_state_dict(average.state_dict())
    assert local_state(other) == local_state(average)
    assert_averages(whole(other.averaged_state_dict()), history.average(AnytimeWindow(20)))
    return True


def test_wrappers_around_a_sharded_model_are_seen_through(tmp_path, on_ranks):
    assert all(on_ranks(2, wrapped_rank, tmp_path))


def update_every_rank(folder):
    model = sharded()
    average, history = (
        ParameterAverage(model, AnytimeWindow(5), trainable_only=False, update_every=3),
        History(),
    )
    for t in range(40):
        full = fill(model, t)
        average.update()
        if t % 3 == 2:
            history.record(full)
        if t == 19:
            dcp.save({"average": average}, checkpoint_id=folder / "phase")
            average = ParameterAverage(
                model, AnytimeWindow(5), trainable_only=False, update_every=3
            )
            dcp.load({"average": average}, checkpoint_id=folder / "phase")
    assert average.count == 13
    assert_averages(average.full_state_dict(), history.average(AnytimeWindow(5)))
    return True


def test_the_phase_of_update_every_is_in_a_checkpoint(tmp_path, on_ranks):
    assert all(on_ranks(2, update_every_rank, tmp_path))


def checkpointed_rank(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    states = []
    for wrap in (False, True):
        model = Net()
        if wrap:
            model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
        for part in (*model.blocks, model.low):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        average = ParameterAverage(model, AnytimeWindow(0.5), trainable_only=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average.attach(optimizer)
        for _ in range(20):
            model(TOKENS).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = average.full_state_dict()
        assert list(full) == list(model.state_dict())
        frozen = whole({"frozen.weight": model.frozen.weight.detach()})
        assert bits({"frozen.weight": full["frozen.weight"]}) == bits(frozen)
        states.append((local_state(average), bits(full)))
    assert states[0] == states[1]
    return True


def test_shards_in_checkpoint_wrappers_keep_their_names_and_frozen_ones_their_bits(
    tmp_path, on_ranks
):
    assert all(on_ranks(2, checkpointed_rank, tmp_path))


def phantom_steps_rank():
    counts = []
    model = nn.Linear(5, 1)  # one row: only the first rank has gradients
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    average = ParameterAverage(model, 10)
    average.attach(optimizer)
    get_optimizer_state_dict(model, optimizer)  # takes a step of its own
    counts.append(average.count)
    for _ in range(5):
        model(torch.ones(2, 5)).square().sum().backward()
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        counts.append(average.count)
    return counts


def test_every_rank_counts_the_same_steps(on_ranks):
    assert on_ranks(2, phantom_steps_rank) == [[0, 1, 2, 3, 4, 5]] * 2


def async_rank(folder):
    """A save in the background has the state at the call, whatever is updated meanwhile."""
    model = sharded()
    average, _ = trained(model, AnytimeWindow(20), 45)
    expected = local_state(average)
    group = dist.new_group(backend="gloo")
    saved = dcp.async_save(
        {"average": average}, checkpoint_id=folder / "async", process_group=group
    )
    for t in range(45, 90):
        fill(model, t)
        average.update()
    saved.result()
    assert local_state(average) != expected
    fresh = ParameterAverage(sharded(1), AnytimeWindow(20), trainable_only=False)
    dcp.load({"average": fresh}, checkpoint_id=folder / "async")
    assert local_state(fresh) == expected
    return True


def test_a_save_in_the_background_has_the_state_at_the_call(tmp_path, on_ranks):
    assert all(on_ranks(2, async_rank, tmp_path))
