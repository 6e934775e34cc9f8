"""A module that someone holds from before an update: stale until `averaged.module` is asked for."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from tests.support.interrupts import interrupted
from tests.support.torch_models import bits, small, walked_module

X = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Not a container of torch, which would not be compiled."""

    def __init__(self):
        super().__init__()
        self.layers = small()

    def forward(self, x):
        return self.layers(x) * 2


def behind(model=None, **options):
    """An averaged model, its module, held since before two updates, and one more update."""
    model = small() if model is None else model
    averaged, walk, _ = walked_module(model, 10, 5, **options)
    held = averaged.eval().module

    def update():
        walk.step()
        model.train()(X)
        averaged.update_parameters(model)

    update()
    update()
    return averaged, held, update


@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_a_held_module_is_stale_until_the_next_look_and_then_the_same_object(buffers):
    averaged, held, update = behind(buffers=buffers)
    tensors = [*held.parameters(), *held.buffers()]
    averaged.state_dict()
    before = bits(held)
    update()
    held(X)
    held.state_dict()
    assert bits(held) == before
    assert averaged.module is held
    assert all(now != was for now, was in zip(bits(held).values(), before.values(), strict=True))
    assert all(a is b for a, b in zip(tensors, held.parameters(), strict=False))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_the_module_is_a_plain_module():
    averaged, held, update = behind()
    update()
    for part in held.modules():
        assert not part._forward_pre_hooks
        assert not part._state_dict_pre_hooks
    scripted = torch.jit.script(averaged.module)
    torch.testing.assert_close(scripted(X), averaged(X))
    exported = torch.export.export(averaged.module, (X,))
    torch.testing.assert_close(exported.module()(X), averaged(X))
    torch.testing.assert_close(torch.jit.trace(averaged.module, X)(X), averaged(X))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_module_is_on_its_own(again):
    averaged, _, update = behind()
    copied = again(averaged.module)
    before = bits(copied)
    update()
    assert bits(averaged.module) != before
    assert bits(copied) == before


def test_statistics_that_are_recomputed_stay_until_the_next_update():
    averaged, held, update = behind()
    expected = copy.deepcopy(averaged.module)
    for module in (averaged.module, expected):
        swa_utils.update_bn([X, X + 1], module)
    assert bits(averaged.module) == bits(held) == bits(expected)
    update()
    assert bits(averaged.module) != bits(expected)


def test_a_held_module_may_be_converted():
    averaged, held, update = behind()
    held.double()
    expected = copy.deepcopy(averaged).module
    assert bits(averaged.module) == bits(expected)
    assert held[0].weight.dtype == held[1].running_mean.dtype == torch.float64
    update()
    held.float()  # while it is stale
    averaged.module(X)
    assert held[0].weight.dtype == torch.float32


class Graphs:
    """A backend that counts what it compiles."""

    count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def test_a_compiled_module_is_compiled_once():
    torch._dynamo.reset()
    averaged, _, update = behind(Net())
    graphs = Graphs()
    averaged.compile(backend=graphs, fullgraph=True)
    for _ in range(12):
        update()
        torch.testing.assert_close(averaged(X), copy.deepcopy(averaged).module(X))
    assert graphs.count == 1


def test_a_look_may_be_interrupted():
    expected = bits(behind()[0].module)
    for n, (averaged, _, _) in interrupted(behind, lambda run: run[0].module):
        assert bits(averaged.module) == expected, n
