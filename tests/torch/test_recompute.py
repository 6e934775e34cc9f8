"""Statistics of BatchNorm from data, against torch's update_bn."""

from collections import UserDict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from batchnorms import draw, net, same, snapshot
from tailavg.torch.batchnorm import convert_tail_batchnorm, recompute_batchnorm
from torch_models import bits


def trained():
    """A model that has seen some batches, with modules in both modes, and its state."""
    model = net()
    for x in draw((4, 3, 3, 3), 3, seed=5):
        model(x)
    model.eval()
    model.block.train()
    model.norm.train()
    return model


def flags(model):
    return {
        name: (module.training, getattr(module, "momentum", "none"))
        for name, module in model.named_modules()
    }


def images(steps=6):
    return draw((4, 3, 3, 3), steps, seed=1)


class Parcel:
    """A batch of a kind of its own, that knows how to go to a device."""

    def __init__(self, image, at=None):
        self.image, self.at = image, at

    def to(self, device):
        return Parcel(self.image, device)


LOADERS = {
    "tensors": lambda: list(images()),
    "one tensor": images,
    "tuples": lambda: [(x, "label") for x in images()],
    "lists": lambda: [[x, torch.ones(4)] for x in images()],
    "dicts": lambda: [{"image": x} for x in images()],
    "dicts with more": lambda: [{"scale": 1.0, "image": x} for x in images()],
    "other mappings": lambda: [UserDict(image=x) for x in images()],
    "an iterator": lambda: iter(images()),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize("convert", [lambda model, _: model, convert_tail_batchnorm])
def test_recomputed_statistics_are_those_of_update_bn(loader, convert):
    expected, model = (convert(trained(), 0.25) for _ in range(2))
    update_bn(images(), expected)
    before = flags(model)
    recompute_batchnorm(model, loader())
    assert same(model.state_dict(), expected.state_dict())
    assert flags(model) == before
    assert model.last.num_batches_tracked == 6


def test_update_bn_works_on_a_converted_model():
    plain, tail = trained(), convert_tail_batchnorm(trained(), 3)
    update_bn(images(), plain)
    update_bn(images(), tail)
    torch.testing.assert_close(dict(tail.state_dict()), dict(plain.state_dict()))
    assert tail.norm.momentum == 0.3


def test_a_call_runs_the_model_on_batches_of_any_kind():
    expected, model, seen = trained(), trained(), []
    update_bn(images(), expected)

    def call(given_model, batch):
        assert given_model is model
        assert all(module.training for module in model.modules())
        seen.append(batch)
        model(batch["x"])

    batches = [{"x": x} for x in images()]
    recompute_batchnorm(model, batches, call)
    assert all(a is b for a, b in zip(seen, batches, strict=True))
    assert same(model.state_dict(), expected.state_dict())


def test_batches_are_moved_to_the_device_of_the_statistics():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, device="meta")
            self.seen = []

        def forward(self, x=None, **more):
            self.seen.append((x, more))

    model = Takes()
    parcel = Parcel(torch.ones(3))
    batches = [torch.ones(2), (parcel, torch.ones(2)), {"x": torch.ones(2), "y": "text"}, None]
    recompute_batchnorm(model, batches)
    tensor, first, by_name, other = model.seen
    assert tensor[0].device.type == first[0].at.type == by_name[0].device.type == "meta"
    assert first[0].image is parcel.image
    assert by_name[1] == {"y": "text"}
    assert other == (None, {})


def test_statistics_are_computed_without_gradients():
    outputs = []
    recompute_batchnorm(trained(), images(), lambda model, x: outputs.append(model(x)))
    assert outputs
    assert not any(y.requires_grad for y in outputs)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("empty", [[], iter(()), torch.empty(0, 4, 3, 3, 3)], ids=type)
@pytest.mark.parametrize("call", [None, lambda model, x: model(x)], ids=["model", "call"])
def test_an_empty_loader_is_refused_and_erases_nothing(empty, call):
    model = trained()
    before, modes = snapshot(model), flags(model)
    with pytest.raises(ValueError, match="loader: expected at least one batch, got none"):
        recompute_batchnorm(model, empty, call)
    assert same(model.state_dict(), before)
    assert flags(model) == modes


def loader_that_raises(error):
    yield from images(2)
    raise error


def call_that_raises(error):
    def call(model, x):
        model(x)
        raise error

    return call


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), StopIteration("no")])
@pytest.mark.parametrize("convert", [lambda model, _: model, convert_tail_batchnorm])
def test_whatever_is_raised_the_statistics_modes_and_momenta_are_as_before(error, convert):
    model = convert(trained(), 0.25)
    model.norm.running_mean[0] = float("nan")
    model.last.running_var[1] = -0.0
    before, modes = bits(model), flags(model)
    raising = [(images(), call_that_raises(error)), ([*images(2), torch.ones(1)], None)]
    if not isinstance(error, StopIteration):  # which a generator cannot raise
        raising.append((loader_that_raises(error), None))
    for loader, call in raising:
        with pytest.raises((type(error), RuntimeError)):
            recompute_batchnorm(model, loader, call)
        assert bits(model) == before
        assert flags(model) == modes


def test_without_statistics_nothing_is_loaded():
    def loader():
        raise AssertionError("loaded")
        yield

    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    for model in (nn.Linear(3, 3), nn.Sequential(untracked).eval(), nn.InstanceNorm1d(3)):
        mode = model.training
        assert recompute_batchnorm(model, loader()) is None
        assert model.training == mode
