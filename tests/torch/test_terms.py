"""The average is the sum that `clock.terms()` gives, bit for bit, by the same operations."""

import pytest
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential, RawTail
from tailavg.core.clock import SUM
from tests.support.cases import short
from tests.support.torch_models import bits, walked

RULES = [
    AnytimeWindow(40),
    AnytimeWindow(0.25, 5, turns="paper"),
    Exponential(10),
    Exponential(0.25),
    RawTail(400, total=600),
    AnyTail(8),
]


def model():
    """Small and large tensors, in one and another order, of more than one dtype."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 5), nn.Linear(130, 127), nn.Linear(2, 3).double())
    made.register_parameter("turned", nn.Parameter(torch.randn(90, 100).T))
    return made


def sum_of(terms, state, name):
    """Multiply, then add with alpha, in the order of the terms."""
    # the state has the blocks in use first; the clock counts all, empty ones first
    empty = len(state["blocks"]) - len(state["starts"])
    blocks = [*[None] * empty, *state["blocks"]]
    values = [(state["partial"] if i == SUM else blocks[i])[name] for _, i in terms]
    total = values[0].mul(terms[0][0])
    for (weight, _), value in zip(terms[1:], values[1:], strict=True):
        total.add_(value, alpha=weight)
    return total


@pytest.mark.parametrize("rule", RULES, ids=short)
def test_the_average_is_the_sum_of_the_terms_of_the_clock(rule):
    average, walk, _ = walked(model(), rule, 0)
    window = 0.3 if isinstance(rule, AnyTail) else None
    counts = set()
    for t in range(1, 601):
        walk.step()
        average.update()
        if t in (1, 2, 3, 41, 60, 256, 257, 300, 599, 600):
            terms, state = average._accumulators.clock.terms(window), average.state_dict()
            expected = {name: sum_of(terms, state, name) for name in state["partial"]}
            assert bits(average.averaged_state_dict(window=window)) == bits(expected), t
            with average.average_parameters(window):
                assert bits(dict(walk.model.named_parameters())) == bits(expected), t
            counts.add(len(terms))
    assert max(counts) > 1
