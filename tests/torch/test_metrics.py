"""`TailAverage` over tensors: a metric may require gradients, or come in bfloat16."""

import numpy as np
import pytest
import torch

from tailavg import TailAverage


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_loss_is_averaged_without_its_graph(dtype):
    weight = torch.ones(3, requires_grad=True, dtype=dtype)
    average, expected = TailAverage(10), TailAverage(10)
    for step in range(30):
        loss = (weight * step).sum()
        average.update(loss)
        expected.update(loss.item())
    assert average.value() == expected.value()
    assert weight.grad is None


def test_vectors_that_require_gradients():
    average = TailAverage(2)
    average.update_many(torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True))
    np.testing.assert_array_equal(average.value(), [2.0, 3.0])
