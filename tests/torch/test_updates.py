"""When an update counts, by hand or attached to an optimizer."""

import math

import numpy as np
import pytest
import torch

from tailavg import AnytimeWindow, Exponential, TailAverage
from tailavg.torch import ParameterAverage
from torch_models import History, Walk, assert_averages, bits, saved, small, snapshot


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_every_nth_call_counts_and_a_window_is_in_updates_that_count(every):
    rule, model = AnytimeWindow(12), small(norm=False)
    average, walk, history = (
        ParameterAverage(model, rule, update_every=every),
        Walk(model),
        History(model),
    )
    for call in range(1, 200):
        walk.step()
        average.update()
        if call % every == 0:
            history.record()
        assert average.count == call // every
    assert_averages(average.averaged_state_dict(), history.average(rule))
    assert average.profile().effective_size == pytest.approx(12)
    assert average.profile().count == average.count


@pytest.mark.parametrize("stop", range(1, 15))
def test_the_phase_of_update_every_is_saved(stop):
    rule, model = AnytimeWindow(4), small(norm=False)
    whole, walk = ParameterAverage(model, rule, update_every=5), Walk(model)
    average = ParameterAverage(model, rule, update_every=5)
    for call in range(1, 40):
        walk.step()
        average.update()
        whole.update()
        if call == stop:
            state = saved(average.state_dict())
            average = ParameterAverage(model, rule, update_every=5)
            average.load_state_dict(state)
        assert average.count == whole.count == call // 5
    assert snapshot(average.state_dict()) == snapshot(whole.state_dict())


def test_before_the_first_counted_update_nothing_can_be_read():
    average = ParameterAverage(small(), 10, update_every=3)
    for _ in range(2):
        average.update()
        with pytest.raises(ValueError, match="update"):
            average.averaged_state_dict()
    average.update()
    average.averaged_state_dict()


def test_attached_to_an_optimizer_every_step_counts_whatever_the_accumulation():
    rule, model = AnytimeWindow(5), small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average, history = ParameterAverage(model, rule), History(model)
    handle = average.attach(optimizer)
    with pytest.raises(RuntimeError, match="attach"):
        average.attach(optimizer)
    for batch in range(60):
        model(torch.rand(6, 3)).square().mean().backward()
        if batch % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            history.record()
    assert average.count == 15
    assert_averages(average.averaged_state_dict(), history.average(rule))
    handle.remove()
    optimizer.step()
    assert average.count == 15
    handle = average.attach(optimizer)
    optimizer.step()
    assert average.count == 16
    handle.remove()
    handle.remove()


def test_a_second_attach_is_refused_to_another_optimizer_too():
    model = small()
    average = ParameterAverage(model, 5)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    average.attach(first)
    with pytest.raises(RuntimeError, match="attach"):
        average.attach(second)
    second.step()
    assert average.count == 0


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_step_that_the_gradient_scaler_skips_is_no_update(fused):
    model = small(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    average, history = ParameterAverage(model, 10), History(model)
    average.attach(optimizer)
    taken = 0
    for batch in range(20):
        optimizer.zero_grad()
        loss = model(torch.rand(6, 3)).square().mean()
        scaler.scale(loss * (math.inf if batch % 5 == 2 else 1.0)).backward()
        before = bits(model)
        scaler.step(optimizer)
        scaler.update()
        if bits(model) != before:
            taken += 1
            history.record()
    assert taken == 16
    assert average.count == 16
    assert_averages(average.averaged_state_dict(), history.average(average.rule))


@pytest.mark.parametrize("rule", [AnytimeWindow(2000), Exponential(2000)], ids=str)
@pytest.mark.parametrize("when", [100, 300])
def test_an_infinity_that_meets_a_fold_stays_an_infinity(rule, when):
    weight = torch.zeros(3)
    average, numpy = ParameterAverage({"weight": weight}, rule), TailAverage(rule, dtype="float32")
    for t in range(800):
        weight.copy_(torch.tensor([1.0, math.inf if t == when else 2.0, -math.inf]))
        average.update()
        numpy.update(weight.numpy())
    got = average.averaged_state_dict()["weight"]
    np.testing.assert_allclose(got, numpy.value(), rtol=1e-6)
    np.testing.assert_allclose(got, [1.0, math.inf, -math.inf], rtol=1e-6)


def test_a_move_does_not_make_a_broken_average_whole(monkeypatch):
    average = ParameterAverage(small(), 10)
    average.update()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(type(average._accumulators._groups[0]), "add", fail)
    with pytest.raises(KeyboardInterrupt):
        average.update()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="not whole"):
        average.to("cpu")
