"""BatchNorm with tail statistics: against dense weights and plain BatchNorm."""

import copy
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from tailavg import Exponential, Fixed, Growing
from tailavg.torch.batchnorm import convert_tail_batchnorm
from tests.support.batchnorms import assert_dense, draw, kinds, same, snapshot, train
from tests.support.cases import WINDOWS, windows

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
    made, set_later = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3)
    for norm in (made, set_later):
        convert_tail_batchnorm(norm, 5)
        norm.momentum = None if norm is set_later else norm.momentum
        assert_dense(Exponential(1.0), batches, train(norm, batches))


def test_a_momentum_that_is_a_number_is_not_used():
    batches = draw((6, 3), 10)
    one, other = (convert_tail_batchnorm(nn.BatchNorm1d(3, momentum=m), 5) for m in (0.1, 0.9))
    np.testing.assert_array_equal(train(one, batches), train(other, batches))


@kinds
@pytest.mark.parametrize("momentum", [0.1, None])
def test_an_empty_batch_is_not_counted(kind, shape, momentum):
    norm, only = (convert_tail_batchnorm(kind(3), 5) for _ in range(2))
    norm.momentum = only.momentum = momentum
    empties = [torch.empty(0, *shape[1:]), torch.empty(*shape[:2], *[0] * (len(shape) - 2))]
    for x in draw(shape, 12):
        for empty in empties[: len(shape) - 1]:
            assert norm(empty).shape == empty.shape
        norm(x)
        only(x)
        assert same(norm.state_dict(), only.state_dict())


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


def test_an_empty_share_of_a_synchronised_batch_is_counted(monkeypatch):
    def forward(self, input):  # noqa: A002
        self.running_mean += 7.0  # from another process
        return input

    norm = convert_tail_batchnorm(nn.SyncBatchNorm(3), 0.25)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", forward)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for processes in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda _, n=processes: n)
        norm(torch.empty(0, 3))
        assert norm.num_batches_tracked == processes - 1
    assert torch.equal(norm.running_mean, torch.full((3,), 7.0))


class Operations(TorchDispatchMode):
    """Counts operations, and what copies a value to the host, and so waits for the device."""

    def __init__(self):
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.reads += func in (torch.ops.aten._local_scalar_dense.default,)
        return func(*args, **(kwargs or {}))


@kinds
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_operations_are_few_and_none_waits_for_the_device(kind, shape, window, momentum):
    norm = convert_tail_batchnorm(kind(3), window)
    norm.momentum = momentum
    x = draw(shape, 1)[0]
    with Operations() as operations:
        norm(x)
        assert operations.count <= 25
        assert operations.reads == 0
        norm.num_batches_tracked.item()
    assert operations.reads == 1


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
    for x in draw((6, 3), 15):
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
