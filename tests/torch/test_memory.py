"""Memory: no copies of a model, no large temporaries, no history."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import (
    Allocations,
    FailAt,
    flat_tensors,
    saved,
    small,
    snapshot,
    walked,
)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise AssertionError("copied")

    def __reduce_ex__(self, protocol):
        raise AssertionError("pickled")


def test_a_model_is_never_copied_nor_pickled(monkeypatch, tmp_path):
    model = nn.Sequential(Uncopyable(3, 4), nn.Tanh(), Uncopyable(4, 2))
    monkeypatch.setattr(copy, "deepcopy", None)
    average, _, _ = walked(model, 10, 30)
    with average.average_parameters():
        pass
    average.averaged_state_dict()
    average.save_averaged(tmp_path / "averaged.safetensors")
    average.load_state_dict(average.state_dict())


@pytest.mark.parametrize(
    "rule", [AnytimeWindow(10), AnytimeWindow(10, 5), Exponential(10)], ids=short
)
def test_memory_is_the_accumulators_and_one_more(rule):
    model = nn.Linear(300, 300)
    average, _, _ = walked(model, rule, 30)
    weights = sum(p.numel() for p in model.parameters()) * 4
    held = [x.untyped_storage() for x in flat_tensors(average.state_dict())]
    storages = {storage.data_ptr(): storage.nbytes() for storage in held}
    assert sum(storages.values()) <= (rule.accumulators + 1) * weights * 1.01 + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_update_makes_no_large_temporary(dtype):
    """Through a fold and a turn, of a tensor whose accumulator is larger than 64 MiB."""
    weight = torch.ones(17_000_001, dtype=dtype)
    average = ParameterAverage({"w": weight}, AnytimeWindow(520))
    average.update()
    for count in (255, 259):
        state = average.state_dict()
        average.load_state_dict(state | {"count": count, "calls": count})
        with Allocations() as made:
            for _ in range(3):
                average.update()
        assert made.largest <= 64 * 2**20


def test_an_average_holds_no_history():
    """Thousands of updates and reads: the same tensors, not more of them."""
    weight = torch.ones(10)
    average = ParameterAverage({"w": weight}, AnytimeWindow(20))
    for _ in range(60):
        average.update()
    storages = {x.untyped_storage().data_ptr() for x in flat_tensors(average.state_dict())}
    for _ in range(500):
        average.update()
    after = {x.untyped_storage().data_ptr() for x in flat_tensors(average.state_dict())}
    assert len(after) <= len(storages)


def test_an_average_keeps_its_model_alive_and_lets_go_of_it_at_once():
    """No cycle needs to be collected, even when it is attached to an optimizer."""
    gc.collect()
    gc.disable()
    try:
        model = small()
        average, seen = ParameterAverage(model, 10), weakref.ref(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average.attach(optimizer)
        optimizer.step()
        with average.average_parameters():
            pass
        del model, optimizer
        assert seen() is not None
        assert list(average.averaged_state_dict()) == list(small().state_dict())
        del average
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(20)], ids=short)
def test_an_update_that_was_interrupted_is_not_passed_over(rule):
    """At each operation of an update in turn, one with a fold and a turn."""
    refused = 0
    for stop in range(1, 60):
        model = small().append(nn.Linear(2, 2, dtype=torch.float64))
        average, _, _ = walked(model, rule, 20)
        good = saved(average.state_dict())
        try:
            with FailAt(stop, KeyboardInterrupt):
                average.update()
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            state = average.state_dict()
        except RuntimeError:
            refused += 1
            for call in (
                average.state_dict,
                average.update,
                average.averaged_state_dict,
                average.copy_to,
            ):
                with pytest.raises(RuntimeError, match="interrupted"):
                    call()
        else:  # nothing was touched yet
            assert snapshot(state) == snapshot(good)
        average.load_state_dict(good)
        average.update()
        assert average.count == 21
    else:
        raise AssertionError("an update has fewer operations")
    assert refused > 3
