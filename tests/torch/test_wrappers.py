"""Modules around other modules: names are those of the state dict, whatever is around."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)

from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.torch_models import Walk, bits, saved, small, snapshot, walked


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("cache", torch.rand(3), persistent=False)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x):
        return self.inner(x) * self.scale + self.cache


def stack():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(3, 3))
    model[2].weight = model[0].inner.weight
    return model


def wrapped_blocks():
    model = stack()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def wrapped_twice():
    model = stack()
    model[0] = offload_wrapper(checkpoint_wrapper(model[0]))
    model[1].inner = checkpoint_wrapper(torch.compile(model[1].inner, backend="eager"))
    return model


@pytest.mark.parametrize(
    "wrap", [wrapped_blocks, wrapped_twice, lambda: checkpoint_wrapper(wrapped_blocks())]
)
def test_activation_checkpointing_may_be_turned_on_and_off_between_runs(wrap):
    models = {"plain": stack(), "wrapped": wrap()}
    averages = {name: walked(model, 10, 25, buffers="average")[0] for name, model in models.items()}
    states = {name: saved(average.state_dict()) for name, average in averages.items()}
    assert snapshot(states["plain"]) == snapshot(states["wrapped"])
    assert not any("wrapped" in name for name in states["wrapped"]["partial"])
    for name, other in (("plain", "wrapped"), ("wrapped", "plain")):
        resumed = ParameterAverage(models[name], 10, buffers="average")
        resumed.load_state_dict(states[other])
        averages[other].copy_to(models[name])
        walk = Walk(models[name], seed=1)
        walk.step()
        resumed.update()
    got = averages["wrapped"].averaged_state_dict()
    assert list(got) == list(models["wrapped"].state_dict())


def test_a_model_with_checkpointing_is_averaged_by_averaged_model_too():
    model, plain = wrapped_blocks(), stack()
    averaged = AveragedModel(model, 10)
    averaged.update_parameters(model)
    averaged.update_parameters(plain)
    assert averaged.count == 2


def test_any_module_whose_state_dict_leaves_a_child_out_is_seen_through():
    class Around(nn.Module):
        def __init__(self, layer, extra):
            super().__init__()
            self.layer, self.extra = layer, extra
            self._register_state_dict_hook(self.strip)

        @staticmethod
        def strip(_, state, prefix, __):
            for key in [key for key in state if key.startswith(f"{prefix}layer.")]:
                state[prefix + key.removeprefix(f"{prefix}layer.")] = state.pop(key)

    model = nn.Sequential(Around(nn.Linear(2, 2), nn.Linear(2, 1)))
    average, _, _ = walked(model, 10, 3)
    names = ["0.weight", "0.bias", "0.extra.weight", "0.extra.bias"]
    assert sorted(average.state_dict()["partial"]) == sorted(names) == sorted(model.state_dict())
    new = torch.full((2, 2), 7.0)
    model[0].layer = nn.Linear(2, 2)  # still found when it is replaced
    model[0].layer.weight.data.copy_(new)
    average.update()
    got = average.averaged_state_dict(window=None)["0.weight"]
    assert got.mean() > 2


def test_a_hook_that_leaves_nothing_out_changes_no_names():
    class Tied(nn.Module):
        """Its own weight is also that of its child."""

        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.weight = self.inner.weight
            self._register_state_dict_hook(lambda *_: None)

    average, _, _ = walked(Tied(), 10, 3)
    assert list(average.averaged_state_dict()) == ["weight", "inner.weight"]
    assert average._tracking.aliases == {"weight": "weight", "inner.weight": "weight"}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("where", ["all", "a child"])
def test_a_scripted_module_is_refused_and_its_parameters_are_taken(where):
    plain = small(norm=False)
    scripted = torch.jit.script(plain)
    model = scripted if where == "all" else nn.ModuleDict({"part": scripted})
    name = "the model" if where == "all" else "part"
    for average in (ParameterAverage, AveragedModel):
        with pytest.raises(TypeError, match=rf"{name}: expected .*ScriptModule.*named_parameters"):
            average(model, 10)
    average, walk = ParameterAverage(model.named_parameters(), 10), Walk(model)
    reference, same = ParameterAverage(plain.named_parameters(), 10), Walk(plain)
    for _ in range(25):
        for one in (walk, same):
            one.step()
        average.update()
        reference.update()
    expected = list(bits(reference.averaged_state_dict()).values())
    assert list(bits(average.averaged_state_dict()).values()) == expected
    before = bits(dict(model.named_parameters()))
    with average.average_parameters():
        assert list(bits(dict(model.named_parameters())).values()) == expected
    assert bits(dict(model.named_parameters())) == before
