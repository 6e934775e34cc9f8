"""States of ParameterAverage: resumed is as never stopped, and what does not fit is refused."""

import os
import signal

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnytimeWindow, Exponential, RawTail, TailAverage
from tailavg.torch import ParameterAverage
from tests.support.torch_models import (
    Odd,
    bits,
    flat_tensors,
    named,
    saved,
    small,
    snapshot,
    tensors_of,
    walked,
)
from tests.support.torch_processes import exit_code


def test_saving_a_state_changes_no_later_bit():
    for rule in (AnytimeWindow(300), AnytimeWindow(0.2), Exponential(0.25), RawTail(0.5, 500)):
        tensors = tensors_of()
        saving, plain = ParameterAverage(tensors, rule), ParameterAverage(tensors, rule)
        random = torch.Generator().manual_seed(0)
        for _ in range(700):
            for tensor in tensors.values():
                tensor.copy_(torch.rand(3, generator=random))
            saving.update()
            plain.update()
            saving.state_dict()
        assert snapshot(saving.state_dict()) == snapshot(plain.state_dict())


def test_a_state_is_plain_data_in_the_one_layout():
    model = small()
    average, _, _ = walked(model, AnytimeWindow(10, 4), 12)
    state = average.state_dict()
    plain = TailAverage(AnytimeWindow(10, 4))
    plain.update_many(np.zeros(12))
    reference = plain.state_dict()
    for key in ("format", "version", "rule", "count", "starts"):
        assert state[key] == reference[key], key
    assert set(state) >= set(reference) | {"calls"}
    assert len(state["blocks"]) == 4
    names = [name for name, _ in model.named_parameters()]
    for held in (*state["blocks"], state["partial"]):
        assert list(held) == names
        assert all(x.shape == named(model)[n].shape for n, x in held.items())

    def check(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (str, int, float, bool, torch.Tensor), value

    check(state)


def test_a_fresh_state_has_every_tensor_so_that_it_can_be_loaded_into():
    fresh = ParameterAverage(small(), AnytimeWindow(10, 4))
    state = fresh.state_dict()
    assert (state["count"], len(state["blocks"])) == (0, 4)
    assert all(list(block) == list(state["partial"]) for block in state["blocks"])
    used, _, _ = walked(small(), AnytimeWindow(10, 4), 33)
    used.load_state_dict(saved(state))
    assert used.count == 0
    with pytest.raises(ValueError, match="update"):
        used.averaged_state_dict()
    used.update()
    assert used.count == 1


def test_a_state_loaded_from_an_average_that_goes_on_is_a_copy():
    model = small()
    average, walk, _ = walked(model, 10, 33)
    other = ParameterAverage(small(seed=1), 10)
    other.load_state_dict(average.state_dict())
    before = snapshot(other.state_dict())
    for _ in range(20):
        walk.step()
        average.update()
    assert snapshot(other.state_dict()) == before
    average.load_state_dict(average.state_dict())  # its own: nothing changes
    assert average.count == 53


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    model, rule = small(), AnytimeWindow(10)
    average, _, _ = walked(model, rule, 33)
    good = saved(average.state_dict())
    before = snapshot(average.state_dict())
    taller = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    larger = small().append(nn.Linear(2, 2))

    def state_of(other, other_rule=rule):
        return walked(other, other_rule, 33)[0].state_dict()

    def without(held, name):
        return {key: x for key, x in held.items() if key != name}

    wrong = {
        "another shape": (state_of(taller), r"3\.weight"),
        "unexpected name": (state_of(larger), r"4\.weight"),
        "missing name": (state_of(small()[:2]), r"3\.weight"),
        "missing in one block": (
            good | {"blocks": [without(good["blocks"][0], "1.bias"), *good["blocks"][1:]]},
            r"1\.bias",
        ),
        "missing in the partial sum": (
            good | {"partial": without(good["partial"], "1.bias")},
            r"1\.bias",
        ),
        "another window": (state_of(small(), AnytimeWindow(11)), "11"),
        "other turns": (state_of(small(), AnytimeWindow(10, 4)), "accumulators"),
        "another rule": (state_of(small(), Exponential(10)), "Exponential"),
        "another version": (good | {"version": 2}, "version"),
        "another format": (good | {"format": "other"}, "format"),
        "no count": (without(good, "count"), "count"),
        "too few blocks": (good | {"blocks": good["blocks"][1:]}, "block"),
        "sizes that do not add up": (good | {"starts": [0, 1, 2]}, "start"),
        "a negative count": (good | {"count": -1}, "count|start"),
        "folded later than counted": (good | {"folded": 34}, "folded"),
        "a tensor of another type": (
            good | {"partial": {name: x.half() for name, x in good["partial"].items()}},
            "float16",
        ),
        "a name that is no tensor": (
            good | {"partial": good["partial"] | {"1.bias": 3}},
            r"1\.bias",
        ),
        "not a dict": ([1, 2], "dict"),
    }
    for case, (state, match) in wrong.items():
        with pytest.raises(ValueError, match=match):
            average.load_state_dict(state)
        assert snapshot(average.state_dict()) == before, case
        assert average.count == 33, case


ODD = {
    "None": None,
    "text": "abc",
    "ragged": [1.0, [2.0]],
    "a dict": {},
    "an object": object(),
    "a range": range(10**9),
    "whole numbers": [1, 2, 3, 4],
    "large numbers": [10**400] * 4,
    "dates": np.zeros(4, dtype="M8[s]"),
    "complex": torch.zeros(4, dtype=torch.complex64),
    "meta": torch.zeros(4, device="meta"),
    "sparse": torch.zeros(4).to_sparse(),
    "four bits": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "a number": np.float32(1.0),
    "a long empty one": torch.zeros(3 * 10**7, 0),
    "expanded": torch.zeros(1).expand(10**12),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
@pytest.mark.parametrize("rule", [AnytimeWindow(10), Exponential(10)], ids=str)
def test_anything_else_in_place_of_a_tensor_is_refused_by_name(odd, rule):
    average, _, _ = walked(small(), rule, 33)
    good = saved(average.state_dict())
    before = snapshot(average.state_dict())
    blocks = [*good["blocks"][:-1], good["blocks"][-1] | {"1.bias": odd}]
    for state in (good | {"partial": good["partial"] | {"1.bias": odd}}, good | {"blocks": blocks}):
        with pytest.raises(ValueError, match=r"(block \d|partial): 1\.bias"):
            average.load_state_dict(state)
        assert snapshot(average.state_dict()) == before
    for name in ("blocks", "partial"):
        with pytest.raises(ValueError, match=r"block|partial"):
            average.load_state_dict(good | {name: [odd] * 3 if name == "blocks" else odd})
        assert snapshot(average.state_dict()) == before


def test_arrays_stand_for_tensors_of_their_type():
    scale = torch.tensor(2.0, dtype=torch.float64)
    average = ParameterAverage({"scale": scale}, 10)
    average.update()
    state = saved(average.state_dict())
    other = ParameterAverage({"scale": torch.tensor(0.0, dtype=torch.float64)}, 10)
    for make in (np.float64, np.array):
        plain = state | {"partial": {"scale": make(state["partial"]["scale"].item())}}
        other.load_state_dict(plain)
        assert snapshot(other.state_dict()) == snapshot(state)


@pytest.mark.parametrize("before", [0, 3, 8, 40])
@pytest.mark.parametrize("count", [3, 15, 18, 40])
def test_a_state_may_be_read_into_the_tensors_of_the_average_itself(before, count):
    """As `torch.distributed.checkpoint.load` does."""
    average, _, _ = walked(small(norm=False), AnytimeWindow(20, 4), count)
    other, _, _ = walked(small(norm=False), AnytimeWindow(20, 4), before)
    state, live = saved(average.state_dict()), other.state_dict()
    for mine, theirs in zip(flat_tensors(live), flat_tensors(state), strict=True):
        mine.copy_(theirs)
    other.load_state_dict(state | {key: live[key] for key in ("blocks", "partial")})
    assert bits(other.averaged_state_dict()) == bits(average.averaged_state_dict())


def test_a_state_of_other_accumulators_is_refused():
    for first, second in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        average, _, _ = walked(small(), 10, 33, dtype=first)
        other = ParameterAverage(small(), 10, dtype=second)
        with pytest.raises(ValueError, match="float64"):
            other.load_state_dict(saved(average.state_dict()))
        assert other.count == 0


def training_run(path, steps, killed):
    """Train and average, saving all there is at times; go on from what is saved."""
    model = Odd(compiled=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    average, first = ParameterAverage(model, 0.3, update_every=2), 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        first = state["step"]
    average.attach(optimizer)
    for step in range(first, steps):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        if step % 31 == 30:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"average": average.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    average.save_averaged(path.with_suffix(".safetensors"))


def test_a_run_that_is_killed_and_resumed_ends_as_one_that_never_stopped(tmp_path):
    for name, steps, killed in (("a", 75, True), ("a", 130, False), ("b", 130, False)):
        path = tmp_path / f"{name}.pt"
        assert exit_code(training_run, path, steps, killed) == (-signal.SIGKILL if killed else 0)
    resumed, whole = (
        safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in "ab"
    )
    assert bits(resumed) == bits(whole)
