"""Modules of an AveragedModel that someone holds: fresh when used, and plain when handed out."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from tests.support.interrupts import interrupted
from tests.support.torch_models import FailAt, bits, small, walked_module

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


def fresh(averaged):
    """What one would see, without a look at the original."""
    return copy.deepcopy(averaged).module


def hooks(module):
    return [
        hook
        for part in module.modules()
        for kind in (part._forward_pre_hooks, part._state_dict_pre_hooks)
        for hook in kind.values()
    ]


USES = {
    "call": lambda module: module(X),
    "state": lambda module: module.state_dict(),
    "call of a part": lambda module: module[0](X),
    "state of a part": lambda module: module[1].state_dict(),
    "last part": lambda module: module[3](torch.rand(1, 4)),
    "parallel": lambda module: nn.DataParallel(module)(X),
    "in inference mode": torch.inference_mode()(lambda module: module(X)),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_who_uses_a_module_that_he_holds_sees_weights_and_buffers(use, buffers):
    _averaged, held, update = behind(buffers=buffers)
    twin, _, update_twin = behind(buffers=buffers)
    for _ in range(3):
        expected = bits(twin.module)
        assert bits(held) != expected
        use(held)
        assert bits(held) == expected
        update()
        update_twin()


def test_tensors_that_someone_holds_stay_behind_together():
    averaged, held, update = behind()
    tensors = [*averaged.parameters(), *averaged.buffers()]
    before = bits(held)
    update()
    assert bits(held) == before
    list(averaged.parameters())
    assert all(now != was for now, was in zip(bits(held).values(), before.values(), strict=True))
    assert all(a is b for a, b in zip(tensors, held.parameters(), strict=False))


def test_a_module_outlives_its_owner():
    averaged, held, _ = behind()
    expected = bits(fresh(behind()[0]))
    del averaged
    held(X)
    assert bits(held) == expected
    assert all(hook.owner is None for hook in hooks(held)), "the accumulators are not kept"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_module_that_is_handed_out_is_plain():
    averaged, held, update = behind()
    assert hooks(held)
    assert not hooks(averaged.module)
    keys = list(held.state_dict())
    update()
    assert list(held.state_dict()) == keys == list(small().state_dict())
    parameters = averaged.named_parameters
    for look in (averaged.state_dict, lambda: [*parameters()], lambda: averaged(X), averaged.eval):
        update()
        look()
        assert not hooks(held), look
    scripted = torch.jit.script(averaged.module)
    torch.testing.assert_close(scripted(X), averaged(X))
    exported = torch.export.export(averaged.module, (X,))
    torch.testing.assert_close(exported.module()(X), averaged(X))
    torch.testing.assert_close(torch.jit.trace(averaged.module, X)(X), averaged(X))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_a_module_is_on_its_own(again):
    averaged, held, update = behind()
    for copied in (again(held), again(averaged.module)):
        before = bits(copied)
        update()
        copied.eval()(X)
        copied.state_dict()
        assert bits(copied) == before
    held(X)
    assert bits(held) == bits(fresh(averaged))
    update()
    twin = again(averaged)
    its = twin.module
    update()
    before = bits(its)
    held(X)
    assert bits(its) == before
    assert bits(held) == bits(fresh(averaged)) != before


def test_statistics_recomputed_through_a_held_module_stay_until_the_next_update():
    averaged, held, update = behind()
    expected = fresh(averaged)
    for module in (held, expected):
        swa_utils.update_bn([X, X + 1], module)
    assert bits(held) == bits(expected)
    assert bits(averaged.module) == bits(expected)
    update()
    held(X)
    assert bits(held) == bits(fresh(averaged)) != bits(expected)


def test_other_tensors_in_the_module_for_a_while_are_left_alone():
    averaged, held, _ = behind()
    expected = fresh(averaged)
    others = {name: torch.zeros_like(tensor) for name, tensor in held.state_dict().items()}
    averaged, held, _ = behind()
    assert not torch.func.functional_call(held, others, (X,)).any()
    assert not any(tensor.any() for tensor in others.values())
    held(X)
    assert bits(held) == bits(expected)


def test_a_held_module_may_be_converted():
    averaged, held, update = behind()
    averaged.module.double()
    update()
    held(X.double())
    assert bits(held) == bits(fresh(averaged))
    assert held[0].weight.dtype == held[1].running_mean.dtype == torch.float64
    update()
    held.float()  # while it is behind
    before = bits(held)
    held(X)
    assert bits(held) == before, "weights and buffers wait together"
    update()
    held(X)
    assert bits(held) == bits(fresh(averaged)) != before


def test_a_module_that_waits_for_its_average_is_not_exported():
    averaged, held, _ = behind()
    with pytest.raises(RuntimeError, match=r"export averaged\.module"):
        torch.export.export(held, (X,))
    assert torch.export.export(averaged.module, (X,))


class Graphs:
    """A backend that counts what it compiles."""

    count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


def test_a_compiled_module_is_compiled_once():
    torch._dynamo.reset()
    averaged, held, update = behind(Net())
    graphs = Graphs()
    averaged.compile(backend=graphs, fullgraph=True)
    for _ in range(12):
        update()
        torch.testing.assert_close(averaged(X), fresh(averaged)(X))
    assert graphs.count == 1
    # a function that torch compiled cannot notice: it waits for the next look
    compiled = torch.compile(held, backend=graphs, fullgraph=True)
    compiled(X)
    update()
    before = compiled(X)
    expected = fresh(averaged)(X)
    assert averaged.module is held
    torch.testing.assert_close(compiled(X), expected)
    assert not torch.allclose(before, expected)


def test_a_held_module_says_that_the_average_is_not_whole():
    model = small()
    averaged, _, _ = walked_module(model, 10, 5)
    held = averaged.module
    averaged.update_parameters(model)
    with FailAt(2, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        averaged.update_parameters(model)
    for use in (lambda: held(X), held.state_dict, lambda: held[0](X)):
        with pytest.raises(RuntimeError, match="not whole"):
            use()


def test_a_use_may_be_interrupted():
    expected = bits(fresh(behind()[0]))
    for n, (averaged, held, _) in interrupted(behind, lambda run: run[1].eval()(X)):
        held(X)
        assert bits(held) == expected, n
        assert bits(averaged.module) == expected, n
        assert not hooks(held), n
