"""Frozen weights come out as they are, to the bit, and those that are changed by hand do not."""

import math

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import Odd, bits, raw, saved, wide

RULES = [AnytimeWindow(0.25), AnytimeWindow(300, 4), Exponential(1000), AnyTail(8)]
every_rule = pytest.mark.parametrize("rule", RULES, ids=short)


class Half(nn.Module):
    """Frozen tensors of every kind beside one that is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trained = nn.Linear(3, 3)
        large = torch.randn(1100, 1000)  # more than is read at a time
        frozen = {
            "small": torch.randn(50),
            "wide": torch.randn(300, 300),
            "large": large,
            "turned": torch.randn(90, 100).t(),
            "gaps": torch.randn(200, 100)[:, ::2],
            "precise": torch.randn(60, dtype=torch.float64),
            "low": torch.randn(60).to(torch.bfloat16),
            "spin": torch.randn(60, dtype=torch.complex64),
            "odd": torch.tensor([0.0, -0.0, 1e-45, -7e-44, 3e-39, math.inf, -math.inf, 1e36]),
        }
        self.frozen = nn.ParameterDict(
            {name: nn.Parameter(x, requires_grad=False) for name, x in frozen.items()}
        )
        self.register_buffer("table", torch.randn(40))


def trained(model, average, steps):
    for step in range(steps):
        nn.init.constant_(model.trained.weight, 1 + step % 7)
        average.update()


def frozen_bits(tensors):
    return {n: x for n, x in bits(tensors).items() if n.startswith("frozen.") or n == "table"}


@pytest.mark.parametrize("only", [True, False])
@every_rule
def test_frozen_weights_come_out_to_the_bit_from_every_read(rule, only, tmp_path):
    model = Half()
    window = 0.3 if isinstance(rule, AnyTail) else None
    average = ParameterAverage(model, rule, buffers="average", trainable_only=only)
    before, weight = frozen_bits(model), []
    trained(model, average, 600)
    with average.average_parameters(window):
        assert frozen_bits(model) == before
        weight.append(model.trained.weight[0, 0].item())
    assert 2 < weight[0] < 6
    for state in (
        average.averaged_state_dict(window=window),
        average.full_state_dict(None, window),
    ):
        assert frozen_bits(state) == before
    average.save_averaged(tmp_path / "averaged.safetensors", window=window)
    assert frozen_bits(safetensors.torch.load_file(tmp_path / "averaged.safetensors")) == before
    for dtype in (torch.float64, torch.bfloat16):  # rounded once, from the frozen weights
        got = average.averaged_state_dict(dtype, window)
        for name, tensor in model.frozen.items():
            kind = tensor.dtype if tensor.is_complex() else dtype
            assert raw(got[f"frozen.{name}"]) == raw(tensor.to(kind)), name
    if isinstance(rule, AnyTail):
        seen = []
        average.select_tail(lambda: seen.append(frozen_bits(model)) or 1.0)
        assert seen == [before] * len(seen)
    other = Half()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    average.copy_to(other, window)
    assert frozen_bits(other) == before
    resumed = ParameterAverage(model, rule, buffers="average", trainable_only=only)
    resumed.load_state_dict(saved(average.state_dict()))
    resumed.copy_to(window=window)
    assert frozen_bits(model) == before


def test_frozen_weights_of_an_averaged_model_stay_to_the_bit():
    model = Half()
    averaged = AveragedModel(model, 0.25, use_buffers=True)
    before = frozen_bits(model)
    for step in range(600):
        nn.init.constant_(model.trained.weight, 1 + step % 7)
        averaged.update_parameters(model)
        if step % 100 == 50:
            assert frozen_bits(averaged.module) == before
    assert frozen_bits(averaged.module) == before
    again = AveragedModel(model, 0.25, use_buffers=True)
    again.load_state_dict(averaged.state_dict())
    again.update_parameters(model)
    assert frozen_bits(again.module) == before


def test_frozen_parameters_given_as_tensors_stay_and_plain_tensors_are_averaged():
    """Of a plain tensor nobody said that it stays: it moves by less than 128 floats here."""
    frozen = nn.Parameter(torch.rand(100) + 1, requires_grad=False)
    plain = torch.ones(100)
    before = raw(frozen)
    average = ParameterAverage([frozen, plain], 1.0)
    for step in range(512):
        plain.fill_(1 + 2.0**-15 * (step % 4 == 0))
        average.update()
    assert raw(average.averaged_state_dict()["0"]) == before
    np.testing.assert_allclose(wide(average.averaged_state_dict()["1"]), 1 + 2.0**-17, rtol=2e-7)


@pytest.mark.parametrize("change", ["in place", "data", "assigned", "tiny", "one element"])
def test_frozen_weights_that_are_changed_by_hand_are_averaged(change):
    """Also those that are changed so little that nothing but the numbers tells."""
    weight = nn.Parameter(torch.ones(500), requires_grad=False)
    model = nn.ParameterDict({"w": weight})
    average = ParameterAverage(model, AnytimeWindow(1.0), trainable_only=False)
    for step in range(400):
        if step == 300:
            by = torch.zeros(500)
            by[3 if change == "one element" else slice(None)] = 1e-4 if change == "tiny" else 1.0
            if change == "data":
                weight.data.add_(by)
            elif change == "assigned":
                model["w"] = nn.Parameter(torch.ones(500) + by, requires_grad=False)
            else:
                weight.add_(by)
        average.update()
    expected = 1 + by.double() / 4
    np.testing.assert_allclose(wide(average.averaged_state_dict()["w"]), expected, rtol=4e-6)
    with average.average_parameters():
        np.testing.assert_allclose(wide(model["w"]), expected, rtol=4e-6)


def test_weights_that_were_trained_are_averaged_when_they_are_frozen_for_a_read():
    model = nn.Linear(20, 20)
    average = ParameterAverage(model, 50)
    for step in range(120):
        nn.init.constant_(model.weight, step)
        average.update()
    free = average.averaged_state_dict()
    model.requires_grad_(False)
    assert raw(average.averaged_state_dict()["weight"]) == raw(free["weight"])
    with average.average_parameters():
        assert raw(average.averaged_state_dict()["weight"]) == raw(free["weight"])


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_weights_that_merely_stay_are_off_by_less_than_the_bound(rule, dtype):
    """Half of what counts as rounding; see the caveats in docs/torch.md."""
    weight = (1 + torch.rand(2000, dtype=dtype, generator=torch.Generator().manual_seed(0))) / 3
    average = ParameterAverage({"w": weight.requires_grad_()}, rule, dtype=dtype)
    window = 0.3 if isinstance(rule, AnyTail) else None
    for step in range(1, 1400):
        average.update()
        if step % 50 == 0 or step % 256 == 255:
            got = average.averaged_state_dict(window=window)["w"]
            off = (got / weight.detach() - 1).abs().max().item()
            assert off < 64 * torch.finfo(dtype).eps


def test_a_model_of_all_kinds_keeps_its_frozen_weights_in_a_swap():
    model = Odd(compiled=False)
    average = ParameterAverage(model, AnytimeWindow(0.5), trainable_only=False)
    for _ in range(700):
        average.update()
    frozen = bits(dict(model.frozen.named_parameters()))
    with average.average_parameters():
        assert bits(dict(model.frozen.named_parameters())) == frozen
        model.frozen.weight.zero_()  # comes back all the same
    assert bits(dict(model.frozen.named_parameters())) == frozen
