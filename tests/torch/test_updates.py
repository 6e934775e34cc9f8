"""When an update counts, by hand or attached to an optimizer."""

import math

import numpy as np
import pytest
import torch

from tailavg import AnytimeWindow, Exponential, TailAverage
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import History, Walk, assert_averages, bits, saved, small, snapshot


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


@pytest.mark.parametrize(("start", "every"), [(0, 3), (1, 1), (7, 1), (7, 3)])
@pytest.mark.parametrize("stop", [1, 6, 7, 8, 9, 10, 11, 20])
def test_updates_before_the_start_do_not_count_and_a_resume_knows_it(start, every, stop):
    rule, model = AnytimeWindow(4), small(norm=False)
    options = {"start_after": start, "update_every": every}
    average, whole = (ParameterAverage(model, rule, **options) for _ in range(2))
    walk, history = Walk(model), History(model)
    for call in range(1, 40):
        walk.step()
        average.update()
        whole.update()
        if call > start and (call - start) % every == 0:
            history.record()
        if call == stop:
            state = saved(average.state_dict())
            average = ParameterAverage(model, rule, **options)
            average.load_state_dict(state)
        assert average.count == whole.count == max(0, call - start) // every
    assert snapshot(average.state_dict()) == snapshot(whole.state_dict())
    assert_averages(average.averaged_state_dict(), history.average(rule))


def test_calls_in_a_state_must_be_a_count():
    average = ParameterAverage(small(), 10, start_after=3)
    average.update()
    state = snapshot(average.state_dict())
    with pytest.raises(ValueError, match="calls"):
        average.load_state_dict(average.state_dict() | {"calls": -1})
    assert snapshot(average.state_dict()) == state
    with pytest.raises(ValueError, match="1 of 4 calls"):
        average.averaged_state_dict()


@pytest.mark.parametrize("rule", [AnytimeWindow(0.3), Exponential(30)], ids=short)
@pytest.mark.parametrize("first", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_accumulators_change_their_precision_and_go_on(rule, first):
    second = torch.float64 if first == torch.float32 else torch.float32
    model, history = small(norm=False), History()
    model[0].double()
    average, walk = ParameterAverage(model, rule, dtype=first), Walk(model)
    calls = [{"dtype": second}, {"device": "cpu", "dtype": second}, {"device": second}]
    for step in range(600):
        if step in (100, 300, 555):
            change = calls.pop()
            average.to(**change)
            average.to(first)
            before = average.averaged_state_dict(torch.float64)
            average.to(**change)
            after = average.averaged_state_dict(torch.float64)
            for name, values in before.items():
                torch.testing.assert_close(after[name], values, rtol=4e-6, atol=0)
            kinds = {name: x.dtype for name, x in average.state_dict()["partial"].items()}
            assert kinds["2.weight"] == second
            assert kinds["0.weight"] == torch.float64
            assert average.state_dict()["dtype"] == str(second).removeprefix("torch.")
        walk.step()
        average.update()
        history.record(dict(model.named_parameters()))
    assert_averages(average.averaged_state_dict(), history.average(rule))
    fresh = ParameterAverage(model, rule, dtype=second)
    fresh.load_state_dict(saved(average.state_dict()))
    assert snapshot(fresh.state_dict()) == snapshot(average.state_dict())
    with pytest.raises(TypeError, match="dtype"):
        average.to(torch.bfloat16)


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
    with pytest.raises(RuntimeError, match="incomplete"):
        average.to("cpu")
