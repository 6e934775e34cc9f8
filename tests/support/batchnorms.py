"""What the tests of BatchNorm share: batches, a model, and how to compare states."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.model import averages, weight_matrix
from tests.support.torch_models import wide

KINDS = {
    "1d": (nn.BatchNorm1d, (6, 3)),
    "1d of sequences": (nn.BatchNorm1d, (4, 3, 5)),
    "2d": (nn.BatchNorm2d, (3, 3, 2, 4)),
    "3d": (nn.BatchNorm3d, (2, 3, 2, 2, 3)),
    "sync": (nn.SyncBatchNorm, (4, 3, 5)),
}
kinds = pytest.mark.parametrize(("kind", "shape"), KINDS.values(), ids=KINDS)


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
