"""BatchNorm with tail statistics: against dense weights, plain BatchNorm, and torch's update_bn."""

import copy
import io
import pickle
import re
from collections import UserDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.optim.swa_utils import update_bn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CAPPED, windows
from model import averages, weight_matrix
from tailavg import Exponential, Fixed, Growing
from tailavg.torch.batchnorm import convert_tail_batchnorm, recompute_batchnorm

WINDOWS = [Fixed(1), Fixed(10), Growing(0.25), Growing(1.0), Growing(0.123456789123), CAPPED]
KINDS = {
    "1d": (nn.BatchNorm1d, (6, 3)),
    "1d of sequences": (nn.BatchNorm1d, (4, 3, 5)),
    "2d": (nn.BatchNorm2d, (3, 3, 2, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2, 2, 3)),
    "sync": (nn.SyncBatchNorm, (4, 3, 5)),
}
kinds = pytest.mark.parametrize(("kind", "shape"), KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Batches are small here: threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(shape, steps, dtype=torch.float32, seed=0):
    """Batches whose channels differ in mean and scale, and which drift."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn((steps, *shape), generator=random, dtype=torch.float64)
    channel = torch.arange(1.0, shape[1] + 1).reshape(-1, *[1] * (len(shape) - 2))
    drift = 1 + torch.arange(steps).reshape(-1, *[1] * len(shape)) / 20
    return (channel * (x + drift)).to(dtype)


def statistics(x):
    """Mean and unbiased variance of each channel of a batch, in double precision."""
    channels = np.moveaxis(x.double().numpy(), 1, 0).reshape(x.shape[1], -1)
    return channels.mean(axis=1), channels.var(axis=1, ddof=1)


def wide(tensor):
    return tensor.double().numpy().copy()


def assert_dense(rule, batches, seen):
    """The statistics after every batch are the weighted sums of those of the batches."""
    matrix = weight_matrix(rule, len(batches))
    for got, each in zip(seen, zip(*map(statistics, batches), strict=True), strict=True):
        rtol = 1e-5 if batches.dtype == torch.float32 else 1e-11
        np.testing.assert_allclose(got, averages(matrix, np.array(each)), rtol=rtol)


def train(norm, batches):
    """The running means and variances after every batch."""
    rows = []
    for x in batches:
        norm(x)
        rows.append([wide(norm.running_mean), wide(norm.running_var)])
    return [np.array(column) for column in zip(*rows, strict=True)]


def same(one, other):
    """Whether two state dicts are equal bit for bit."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def bits(model):
    return {name: value.numpy().tobytes() for name, value in model.state_dict().items()}


def snapshot(model):
    return copy.deepcopy(dict(model.state_dict()))


class Net(nn.Module):
    """Convolutions and BatchNorms, one of them twice, one frozen; extra inputs by keyword."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.BatchNorm2d(4, momentum=0.3)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=None), nn.ReLU())
        self.again = self.norm
        self.last = nn.BatchNorm1d(4, affine=False)

    def forward(self, image, scale=1.0):
        x = self.norm(self.conv(image))
        return self.last(scale * self.again(self.block(x)).mean((2, 3)))


def net():
    torch.manual_seed(0)
    return Net()


# Running statistics


@kinds
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_running_statistics_are_the_growing_exponential_of_the_batches(kind, shape, window):
    batches = draw(shape, 80)
    norm = convert_tail_batchnorm(kind(3), window)
    assert_dense(Exponential(window), batches, train(norm, batches))
    assert norm.num_batches_tracked == 80
    assert not norm.running_mean.requires_grad
    assert not norm.running_var.requires_grad


@given(windows, st.integers(0, 99))
@settings(max_examples=25)
def test_statistics_are_exact_in_double_precision_for_any_window(window, seed):
    batches = draw((4, 2), 40, torch.float64, seed)
    with torch.no_grad():
        seen = train(convert_tail_batchnorm(nn.BatchNorm1d(2).double(), window), batches)
    assert_dense(Exponential(window), batches, seen)


@pytest.mark.parametrize("t", [1, 2, 1000, 10**6, 2**40])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_the_step_is_num_batches_tracked_alone(window, t):
    norm = convert_tail_batchnorm(nn.BatchNorm1d(1).double(), window)
    norm.num_batches_tracked.fill_(t - 1)
    norm.running_mean.fill_(5.0)
    norm(torch.tensor([[1.0], [3.0]], dtype=torch.float64))
    g = Exponential(window).decay(t)
    torch.testing.assert_close(norm.running_mean.item(), 5 * g + 2 * (1 - g), rtol=1e-14, atol=0)
    assert norm.num_batches_tracked == t


def test_momentum_none_is_the_mean_of_all_batches():
    batches = draw((6, 3), 30)
    norm = convert_tail_batchnorm(nn.BatchNorm1d(3), 5)
    norm.momentum = None
    assert_dense(Exponential(1.0), batches, train(norm, batches))


def test_a_momentum_that_is_a_number_is_not_used():
    batches = draw((6, 3), 10)
    one, other = (convert_tail_batchnorm(nn.BatchNorm1d(3, momentum=m), 5) for m in (0.1, 0.9))
    np.testing.assert_array_equal(train(one, batches), train(other, batches))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_16_bits_stay_so_and_are_close(dtype):
    batches = draw((16, 3), 20)
    norm = convert_tail_batchnorm(nn.BatchNorm1d(3).to(dtype), 5)
    means = train(norm, batches.to(dtype))[0]
    assert norm.running_mean.dtype == norm.running_var.dtype == dtype
    full = train(convert_tail_batchnorm(nn.BatchNorm1d(3), 5), batches)[0]
    np.testing.assert_allclose(means, full, rtol=0.02)


# What stays as in plain BatchNorm


@kinds
@pytest.mark.parametrize("affine", [True, False])
def test_output_and_gradients_are_those_of_plain_batchnorm_bit_for_bit(kind, shape, affine):
    plain = kind(3, affine=affine)
    if affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(1))
    tail = convert_tail_batchnorm(copy.deepcopy(plain), 0.25)
    for x in draw(shape, 5):
        outputs = []
        for norm in (plain, tail):
            leaf = x.clone().requires_grad_()
            norm.zero_grad()
            y = norm(leaf)
            y.pow(3).sum().backward()
            outputs.append([y, leaf.grad, *(p.grad for p in norm.parameters())])
            with torch.no_grad():
                outputs[-1].append(norm(x))
        assert len(outputs[0]) == len(outputs[1]) == (5 if affine else 3)
        assert all(map(torch.equal, *outputs))


@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given_as", [torch.float32, torch.bfloat16, torch.float64])
def test_output_is_that_of_plain_batchnorm_in_every_precision_it_takes(held, given_as):
    plain = nn.BatchNorm2d(3).to(held)
    tail = convert_tail_batchnorm(copy.deepcopy(plain), 7)
    x = draw((3, 3, 2, 4), 1, given_as)[0]
    try:
        expected = plain(x)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error))):
            tail(x)
    else:
        assert torch.equal(tail(x), expected)
        assert tail(x).dtype == expected.dtype


@kinds
def test_evaluation_is_that_of_plain_batchnorm_and_changes_nothing(kind, shape):
    plain, tail = kind(3), convert_tail_batchnorm(kind(3), 0.25)
    for x in draw(shape, 3):
        tail(x)
    plain.load_state_dict(tail.state_dict())
    before = snapshot(tail)
    x = draw(shape, 1, seed=9)[0]
    assert torch.equal(tail.eval()(x), plain.eval()(x))
    assert same(tail.state_dict(), before)


@kinds
def test_training_without_tracking_changes_nothing(kind, shape):
    norm = convert_tail_batchnorm(kind(3), 0.25)
    norm.track_running_stats = False
    before = snapshot(norm)
    norm(draw(shape, 1)[0])
    assert same(norm.state_dict(), before)


@kinds
def test_a_batch_that_is_refused_changes_nothing(kind, shape):
    norm = convert_tail_batchnorm(kind(3), 0.25)
    norm(draw(shape, 1)[0])
    before = snapshot(norm)
    one = torch.ones(1, 3, *[1] * (len(shape) - 2))
    for bad, what in [(one, "more than 1 value per channel"), (torch.ones(3), "D input")]:
        with pytest.raises(ValueError, match=what):
            norm(bad)
        assert same(norm.state_dict(), before)


def test_a_synchronised_batch_that_is_refused_changes_nothing(monkeypatch):
    """With a process group torch's own forward is asked, which takes no CPU tensors."""
    norm = convert_tail_batchnorm(nn.SyncBatchNorm(3, momentum=0.3), 0.25)
    norm(draw((4, 3), 1)[0])
    before, buffers = snapshot(norm), list(norm.buffers())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="input tensor to be on GPU"):
        norm(draw((4, 3), 1)[0])
    assert same(norm.state_dict(), before)
    assert all(a is b for a, b in zip(norm.buffers(), buffers, strict=True))
    assert norm.momentum == 0.3


def test_synchronised_statistics_are_taken_from_torchs_own_forward(monkeypatch):
    def forward(self, input):  # noqa: A002
        assert self.momentum == 1.0
        self.running_mean += 7.0
        self.running_var += 9.0
        self.num_batches_tracked += 1
        return input + 1

    norm = convert_tail_batchnorm(nn.SyncBatchNorm(3), 0.25)
    buffers = list(norm.buffers())
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    for t in range(1, 4):
        assert torch.equal(norm(torch.ones(2, 3)), torch.full((2, 3), 2.0))
        assert norm.num_batches_tracked == t
    assert torch.equal(norm.running_mean, torch.full((3,), 7.0))
    assert torch.equal(norm.running_var, torch.full((3,), 9.0))
    assert all(a is b for a, b in zip(norm.buffers(), buffers, strict=True))


class Reads(TorchDispatchMode):
    """Counts what copies a value from the device to the host, and so waits for it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten._local_scalar_dense.default,)
        return func(*args, **(kwargs or {}))


@kinds
@pytest.mark.parametrize("momentum", [0.1, None])
def test_no_value_is_read_back_from_the_device(kind, shape, momentum):
    norm = convert_tail_batchnorm(kind(3), 0.25)
    norm.momentum = momentum
    x = draw(shape, 1)[0]
    with Reads() as reads:
        norm(x)
        assert reads.count == 0
        norm.num_batches_tracked.item()
    assert reads.count == 1


# Compilation. The counting backends stand for inductor, which needs half a minute to start.


def compiled(model, backend, dynamic):
    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic), counter


@pytest.mark.parametrize(
    ("backend", "dynamic", "window"),
    [
        ("eager", None, Fixed(10)),
        ("eager", True, Growing(0.25)),
        ("eager", True, Growing(0.123456789123, at_most=8)),
        ("aot_eager", None, Growing(0.123456789123, at_most=8)),
    ],
    ids=str,
)
def test_a_compiled_model_is_one_graph_without_breaks(backend, dynamic, window):
    model = convert_tail_batchnorm(
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.SyncBatchNorm(4)), window
    )
    eager = copy.deepcopy(model)
    run, counter = compiled(model, backend, dynamic)
    for x in draw((6, 3), 30):
        y, expected = run(x), eager(x)
        y.sum().backward()
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-5, atol=1e-6)
    assert counter.frame_count == 1
    assert not counters["graph_break"]


def test_a_compiled_model_follows_its_window_and_momentum_when_they_change():
    model = convert_tail_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), 10)
    eager = copy.deepcopy(model)
    run, _ = compiled(model, "eager", None)
    batches = iter(draw((6, 3), 50))

    def go_on():
        for _ in range(4):
            x = next(batches)
            torch.testing.assert_close(run(x), eager(x))
        torch.testing.assert_close(model.state_dict(), eager.state_dict())

    go_on()
    for window in (0.25, 0.7, Growing(0.123456789123, at_most=3), 10):
        convert_tail_batchnorm(model, window)
        convert_tail_batchnorm(eager, window)
        go_on()
    model[0].momentum = eager[0].momentum = None
    go_on()
    assert not counters["graph_break"]


# Conversion


def test_conversion_keeps_every_object_flag_and_hook():
    model, calls = net(), []
    model.norm.eval()
    model.norm.qconfig = "kept"
    model.last.register_forward_hook(lambda *_: calls.append("hook"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    modules = dict(model.named_modules(remove_duplicate=False))
    before = snapshot(model)
    assert convert_tail_batchnorm(model, 0.25) is model
    assert same(model.state_dict(), before)
    for now, then in [
        (dict(model.named_parameters()), parameters),
        (dict(model.named_buffers()), buffers),
        (dict(model.named_modules(remove_duplicate=False)), modules),
    ]:
        assert now.keys() == then.keys()
        assert all(now[name] is then[name] for name in then)
    assert model.again is model.norm
    assert not model.norm.training
    assert model.last.training
    assert model.norm.qconfig == "kept"
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert isinstance(model.last, nn.BatchNorm1d)
    model(draw((4, 3, 3, 3), 1)[0]).pow(3).sum().backward()
    assert calls == ["hook"]
    optimizer.step()
    assert not same(model.state_dict(), before)
    assert model.norm.num_batches_tracked == 0
    assert model.last.num_batches_tracked == model.block[1].num_batches_tracked == 1


@kinds
def test_a_batchnorm_itself_is_converted(kind, shape):
    norm = convert_tail_batchnorm(kind(3), 0.25)
    assert isinstance(norm, kind)
    assert type(norm) is not kind
    assert "window=Growing(c=0.25, at_most=None)" in repr(norm)


def test_a_process_group_is_kept():
    assert convert_tail_batchnorm(nn.SyncBatchNorm(3, process_group="group"), 5).process_group == (
        "group"
    )


def test_a_momentum_of_none_becomes_torchs_default_and_others_stay():
    model = convert_tail_batchnorm(net(), 5)
    assert [model.norm.momentum, model.block[1].momentum] == [0.3, 0.1]


def test_conversion_of_a_converted_model_changes_the_window():
    batches = draw((6, 3), 20)
    norm = convert_tail_batchnorm(convert_tail_batchnorm(nn.BatchNorm1d(3), 3), 0.5)
    assert_dense(Exponential(0.5), batches, train(norm, batches))


def test_what_has_no_statistics_is_left_as_it_is():
    untracked = nn.BatchNorm1d(3, track_running_stats=False)
    model = nn.Sequential(untracked, nn.InstanceNorm1d(3, track_running_stats=True), nn.ReLU())
    kinds = [type(module) for module in model]
    convert_tail_batchnorm(model, 0.25)
    assert [type(module) for module in model] == kinds


def test_what_is_not_torchs_own_is_left_with_a_warning_that_names_it():
    class Mine(nn.BatchNorm2d):
        pass

    model = nn.Sequential(nn.BatchNorm2d(3), nn.Sequential(Mine(3)), nn.LazyBatchNorm2d())
    with pytest.warns(UserWarning, match=r"1\.0 \(Mine\), 2 \(LazyBatchNorm2d\)$") as warned:
        convert_tail_batchnorm(model, 0.25)
    assert len(warned) == 1
    assert warned[0].filename == __file__
    assert type(model[1][0]) is Mine
    assert type(model[2]) is nn.LazyBatchNorm2d
    assert "window" in repr(model[0])
    x = draw((3, 3, 2, 2), 1)[0]
    model(x)
    with pytest.warns(UserWarning, match=r": 1\.0 \(Mine\)$"):
        convert_tail_batchnorm(model, 0.25)  # the lazy one has become a BatchNorm2d
    assert "window" in repr(model[2])
    with pytest.warns(UserWarning, match=r": model \(Mine\)$"):
        convert_tail_batchnorm(Mine(3), 0.25)


@pytest.mark.parametrize("bad", [0, 1.5, True, "0.5", None], ids=repr)
def test_a_bad_window_is_refused_and_nothing_converted(bad):
    model = net()
    with pytest.raises((ValueError, TypeError), match="window: expected"):
        convert_tail_batchnorm(model, bad)
    assert type(model.norm) is nn.BatchNorm2d


# State


def saved(model):
    """What comes back from a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    batches = draw((4, 3, 3, 3), 12)
    whole, first, second = (convert_tail_batchnorm(net(), 0.25) for _ in range(3))
    for x in batches:
        whole(x)
    for x in batches[:7]:
        first(x)
    second.load_state_dict(saved(first))
    for x in batches[7:]:
        second(x)
    assert same(second.state_dict(), whole.state_dict())


def test_the_state_dict_goes_from_plain_to_converted_and_back():
    batches = draw((4, 3, 3, 3), 12)
    plain, tail, back = net(), convert_tail_batchnorm(net(), 0.25), net()
    for x in batches[:5]:
        plain(x)
    state = saved(plain)
    assert not tail.load_state_dict(state, strict=True).missing_keys
    assert same(tail.state_dict(), plain.state_dict())
    assert tail.state_dict()._metadata == plain.state_dict()._metadata
    convert_tail_batchnorm(plain, 0.25)  # in place, at the same step
    for x in batches[5:]:
        tail(x)
        plain(x)
    assert tail.last.num_batches_tracked == 12
    assert same(tail.state_dict(), plain.state_dict())
    back.load_state_dict(saved(tail), strict=True)
    assert torch.equal(back.eval()(batches[0]), tail.eval()(batches[0]))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_as_the_model_would(again):
    batches = draw((4, 3, 3, 3), 8)
    model = convert_tail_batchnorm(net(), 0.25)
    for x in batches[:5]:
        model(x)
    copied = again(model)
    for x in batches[5:]:
        assert torch.equal(copied(x), model(x))
    assert same(copied.state_dict(), model.state_dict())


# Statistics from data


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
