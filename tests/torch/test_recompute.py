"""Statistics of BatchNorm from data, against torch's update_bn."""

from collections import UserDict
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import update_bn

from tailavg.torch.batchnorm import convert_tail_batchnorm, recompute_batchnorm
from tests.support.batchnorms import draw, kinds, net, same, snapshot, statistics
from tests.support.torch_models import bits


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
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
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
    torch.testing.assert_close(model.state_dict(), expected.state_dict())


def test_batches_are_moved_to_the_device_of_the_statistics():
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3, device="meta")
            self.seen = []

        def forward(self, x=None, **more):
            self.seen.append((x, more))
            self.norm(torch.ones(2, 3, device="meta"))

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
    with pytest.raises(ValueError, match="loader: expected at least one batch with data, got none"):
        recompute_batchnorm(model, empty, call)
    assert same(model.state_dict(), before)
    assert flags(model) == modes


# Which batches count, and how much


@pytest.fixture(params=[lambda model, _: model, convert_tail_batchnorm], ids=["plain", "tail"])
def convert(request):
    return request.param


@kinds
def test_an_empty_batch_does_not_count(kind, shape, convert):
    batches = list(draw(shape, 5))
    only, norm = (convert(kind(3), 0.25) for _ in range(2))
    recompute_batchnorm(only, batches)
    empty = batches[0][:0]
    recompute_batchnorm(norm, [empty, *batches[:2], empty, empty, *batches[2:], empty])
    assert same(norm.state_dict(), only.state_dict())
    assert norm.num_batches_tracked == 5


@pytest.mark.parametrize("weighted", [False, True])
def test_of_a_module_that_is_called_often_each_call_with_data_counts(convert, weighted):
    norm, once = convert(nn.BatchNorm1d(3), 0.25), nn.BatchNorm1d(3)
    batches = draw((6, 3), 4)

    def thrice(norm, pair):
        for x in (pair[0][:0], *pair):
            norm(x)

    recompute_batchnorm(norm, batches.split(2), thrice, weighted=weighted)
    recompute_batchnorm(once, batches, weighted=weighted)
    assert same(norm.state_dict(), once.state_dict())


@pytest.mark.parametrize("batches", [[torch.empty(0, 3)], [torch.empty(0, 3)] * 2])
def test_a_loader_of_empty_batches_is_refused(convert, batches):
    norm = convert(nn.BatchNorm1d(3), 0.25)
    norm(torch.ones(2, 3))
    before = bits(norm)
    with pytest.raises(ValueError, match=f"none of {len(batches)} batches brought data"):
        recompute_batchnorm(norm, batches)
    assert bits(norm) == before


def test_a_module_that_no_batch_reaches_in_training_mode_keeps_its_statistics(convert):
    class Frozen(nn.Sequential):
        def train(self, mode=True):
            return super().train(False)

    model = nn.ModuleDict({name: nn.BatchNorm1d(3) for name in ("used", "unused")})
    model["frozen"] = Frozen(nn.BatchNorm1d(3))
    convert(model, 5)
    for norm in (model["unused"], model["frozen"][0]):
        norm.running_mean.fill_(7.0)
        norm.running_var.fill_(9.0)
        norm.num_batches_tracked.fill_(4)
    before = snapshot(model)
    x = draw((6, 3), 1)[0]
    recompute_batchnorm(model, [x], lambda model, x: model["frozen"](model["used"](x)))
    after = snapshot(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "used.running_mean",
        "used.running_var",
        "used.num_batches_tracked",
    }


@kinds
def test_weighted_statistics_are_those_of_all_batches_as_one(kind, shape, convert):
    sizes = [2, 7, 1, 3, 5] if len(shape) > 2 else [2, 7, 4, 3, 5]
    large = 1000 + draw((sum(sizes), *shape[1:]), 1, torch.float64)[0]
    norm = convert(kind(3).double(), 0.25)
    recompute_batchnorm(norm, [large[:0], *large.split(sizes)], weighted=True)
    mean, var = statistics(large)
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-9)
    assert norm.num_batches_tracked == len(sizes)


def test_otherwise_every_batch_counts_the_same(convert):
    batches = draw((18, 3), 1)[0].split([2, 7, 9])
    norm = convert(nn.BatchNorm1d(3), 0.25)
    recompute_batchnorm(norm, batches)
    means, variances = zip(*map(statistics, batches), strict=True)
    np.testing.assert_allclose(norm.running_mean.numpy(), np.mean(means, axis=0), rtol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), np.mean(variances, axis=0), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_elements_of_all_processes_count(monkeypatch, weighted):
    """As if another process had three times as many elements, of the same statistics."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda n, **_: n.mul_(4))
    norm = nn.SyncBatchNorm(3)

    def call(norm, x):
        with pytest.MonkeyPatch.context() as patch:
            hook = norm.register_forward_hook(
                lambda *_: patch.setattr(torch.distributed, "is_initialized", lambda: True),
                prepend=True,
            )
            norm(x)
        hook.remove()

    batches = draw((10, 3), 1)[0].split([4, 6])
    recompute_batchnorm(norm, batches, call, weighted=weighted)
    (m, v), (n, w) = map(statistics, batches)
    if weighted:
        mean = (16 * m + 24 * n) / 40
        var = (15 * v + 16 * (m - mean) ** 2 + 23 * w + 24 * (n - mean) ** 2) / 39
    else:
        mean, var = (m + n) / 2, (v + w) / 2
    np.testing.assert_allclose(norm.running_mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(norm.running_var.numpy(), var, rtol=1e-6)


# What is left as it was


def test_the_random_state_is_as_before_even_after_an_exception(convert):
    model = convert(nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3)), 0.25)
    loader = torch.utils.data.DataLoader(draw((6, 3), 4)[0], batch_size=3, shuffle=True)
    before = torch.get_rng_state()
    recompute_batchnorm(model, loader)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(KeyboardInterrupt):
        recompute_batchnorm(model, loader, call_that_raises(KeyboardInterrupt()))
    assert torch.equal(torch.get_rng_state(), before)


class Numbered:
    """A device module as torch.cuda is, whose state moves with every batch."""

    def __init__(self):
        self.states = {}

    def get_rng_state(self, at):
        return self.states.setdefault(at, 0)

    def set_rng_state(self, state, at):
        self.states[at] = state


class Single(Numbered):
    """One as torch.mps is, which takes no number."""

    def get_rng_state(self):
        return super().get_rng_state("here")

    def set_rng_state(self, state):
        super().set_rng_state(state, "here")


def test_the_random_state_of_the_models_devices_is_as_before(monkeypatch):
    class Model(nn.Sequential):
        def parameters(self, recurse=True):
            return [SimpleNamespace(device=torch.device(name)) for name in names]

    def call(model, x):
        model(x)
        for place in places.values():
            place.states = {at: state + 1 for at, state in place.states.items()}
        raise KeyboardInterrupt

    names = ["cuda:0", "cuda:1", "mps", "cpu", "meta"]
    places = {"cuda": Numbered(), "mps": Single()}
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: places[device.type])
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: nullcontext())  # noqa: ARG005
    with pytest.raises(KeyboardInterrupt):
        recompute_batchnorm(Model(nn.BatchNorm1d(3)), [torch.ones(2, 3)], call)
    assert places["cuda"].states == {torch.device("cuda", 0): 0, torch.device("cuda", 1): 0}
    assert places["mps"].states == {"here": 0}


def test_dropout_is_on_as_in_training():
    norm = nn.BatchNorm1d(3)
    recompute_batchnorm(nn.Sequential(nn.Dropout(1.0), norm), [torch.ones(2, 3)])
    assert torch.equal(norm.running_mean, torch.zeros(3))


def test_hooks_are_removed_and_do_not_see_what_others_make_of_the_output():
    norm = nn.BatchNorm1d(3)
    handle = norm.register_forward_hook(lambda *_: "other")
    x = draw((6, 3), 1)[0]
    recompute_batchnorm(norm, [x])
    np.testing.assert_allclose(norm.running_mean.numpy(), statistics(x)[0], rtol=1e-6)
    handle.remove()
    assert not norm._forward_hooks


def test_a_compiled_model_is_recomputed_time_and_again(convert):
    torch._dynamo.reset()
    model, plain = (convert(nn.Sequential(nn.BatchNorm1d(3, momentum=1.0)), 5) for _ in range(2))
    run = torch.compile(model, backend="eager")
    for seed in range(3):
        with torch.no_grad():
            run(draw((6, 3), 1)[0])
        batches = draw((6, 3), 3, seed=seed)
        recompute_batchnorm(run, batches)
        recompute_batchnorm(plain, batches)
        assert same(model.state_dict(), plain.state_dict())


def test_torchs_order_of_arguments_is_refused_by_name():
    with pytest.raises(
        TypeError, match=r"got list; the model comes first, recompute_batchnorm\(mo"
    ):
        recompute_batchnorm([torch.ones(2, 3)], nn.BatchNorm1d(3))


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
