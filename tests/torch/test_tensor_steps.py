"""Windows and decays take a tensor of steps, and are traced into a graph."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tailavg import Exponential, Fixed, Growing
from tests.support.cases import short, windows


@pytest.mark.parametrize(
    "window",
    [
        Fixed(7),
        Growing(1e-6),
        Growing(0.07),
        Growing(0.25),
        Growing(1.0),
        Growing(0.123456789123),
        Growing(11 / 1_000_003),  # no ratio below a million: its sizes are rounded
        Growing(1 - 2**-53),
        Growing(0.07, 2**24 + 1),
    ],
    ids=short,
)
def test_the_size_at_a_tensor_is_that_at_a_number_to_the_last_bit(window):
    prime = 1_000_003
    steps = [*range(1, 500), 2**24 + 1, 10**9 + 7, 2**51 + 1, *range(prime, 50 * prime, prime)]
    expected = [window.size(t) for t in steps]
    t = torch.tensor(steps, dtype=torch.float64)
    assert torch.broadcast_to(torch.as_tensor(window.size(t)), t.shape).tolist() == expected
    assert [float(window.size(step)) for step in t] == expected


@given(windows, st.lists(st.integers(1, 10**7), min_size=1, max_size=20))
def test_a_decay_takes_a_tensor(window, steps):
    rule, tensor = Exponential(window), torch.tensor(steps, dtype=torch.float64)
    expected = [rule.decay(t) for t in steps]
    for decays in (rule.decay(tensor), torch.stack([rule.decay(t) for t in tensor])):
        assert decays.dtype == torch.float64
        np.testing.assert_allclose(decays.numpy(), expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    "window", [Fixed(10), Growing(0.07), Growing(0.123456789123, 30)], ids=short
)
def test_a_decay_is_traced_into_one_graph(window):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    decay = torch.compile(Exponential(window).decay, backend=backend, fullgraph=True)
    for t in [*range(1, 60), 299, 300, 10_000]:
        traced = decay(torch.tensor(t, dtype=torch.float64))
        assert math.isclose(traced, Exponential(window).decay(t), rel_tol=1e-12, abs_tol=1e-15), t
    assert len(graphs) == 1
