"""States of AveragedModel: saved, loaded, assigned and refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import swa_utils

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import AveragedModel
from tests.support.torch_models import (
    History,
    Walk,
    assert_averages,
    bits,
    kept_rules,
    named,
    raw,
    saved,
    small,
    walked_module,
)


@settings(max_examples=20)
@given(kept_rules, st.integers(1, 120))
def test_any_rule_resumed_at_any_step_follows_the_reference(rule, stop):
    model = small(norm=False)
    averaged, walk, history = AveragedModel(model, rule), Walk(model), History(model)
    whole = AveragedModel(model, rule)
    for t in range(1, 121):
        walk.step()
        averaged.update_parameters(model)
        whole.update_parameters(model)
        history.record()
        if t == stop:
            state = saved(averaged.state_dict())
            averaged = AveragedModel(small(seed=1, norm=False), rule)
            averaged.load_state_dict(state)
    assert_averages(named(averaged.module), history.average(rule))
    assert bits(averaged) == bits(whole)


def test_a_state_of_torchs_own_class_is_refused_clearly():
    theirs = swa_utils.AveragedModel(small(seed=3))
    theirs.update_parameters(small(seed=4))
    for strict in (True, False):
        averaged, _, _ = walked_module(small(), 10, 25)
        before = bits(averaged)
        with pytest.raises(ValueError, match="AveragedModel"):
            averaged.load_state_dict(theirs.state_dict(), strict=strict)
        assert bits(averaged) == before


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    model = small()
    averaged, _, _ = walked_module(model, 10, 25)
    good, before = saved(averaged.state_dict()), bits(averaged)
    own = list(averaged.parameters())
    other_rule, _, _ = walked_module(small(), Exponential(10), 25)
    with pytest.raises(ValueError, match="Exponential"):
        averaged.load_state_dict(other_rule.state_dict())
    assert bits(averaged) == before
    with pytest.raises((ValueError, RuntimeError), match="version"):
        averaged.load_state_dict(good | {"_extra_state": good["_extra_state"] | {"version": 99}})
    assert bits(averaged) == before
    for count in (25, 12):  # a refusal by torch itself, after it has loaded some of it
        other, _, _ = walked_module(small(seed=1), 10, count)
        for wrong in (
            {"module.3.bias": torch.zeros(3)},
            {"module.4.bias": torch.zeros(3)},
            {"module.3.bias": torch.zeros(2, device="meta")},
        ):
            for assign in (False, True):
                state = saved(other.state_dict()) | wrong
                with pytest.raises((ValueError, RuntimeError), match=r"[34]\.bias"):
                    averaged.load_state_dict(state, assign=assign)
                assert bits(averaged) == before
                assert averaged.count == averaged.n_averaged == 25
                assert all(a is b for a, b in zip(averaged.parameters(), own, strict=True))
    del state["module.3.bias"]
    with pytest.raises(RuntimeError, match=r"module\.3\.bias"):
        averaged.load_state_dict(state)
    assert bits(averaged) == before
    taller, _, _ = walked_module(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 7)), 10, 25)
    with pytest.raises((ValueError, RuntimeError), match="weight"):
        averaged.load_state_dict(taller.state_dict())
    assert bits(averaged) == before
    averaged.load_state_dict(good)
    assert bits(averaged) == before


def test_saving_changes_no_later_bit_and_loading_goes_on_as_if_never_stopped():
    model = small()
    plain, saving, resumed = (AveragedModel(model, 0.3, use_buffers=True) for _ in range(3))
    walk = Walk(model)
    for step in range(300):
        walk.step()
        model(torch.rand(6, 3))
        for one in (plain, saving, resumed):
            one.update_parameters(model)
        state = saving.state_dict()
        if step % 37 == 0:
            resumed = AveragedModel(small(seed=step), 0.3, use_buffers=True)
            resumed.load_state_dict(saved(state))
    assert bits(plain) == bits(saving) == bits(resumed)
    assert bits_of_state(plain) == bits_of_state(saving) == bits_of_state(resumed)


def bits_of_state(averaged):
    leaves, _ = torch.utils._pytree.tree_flatten(averaged.state_dict())
    return [raw(x) if isinstance(x, torch.Tensor) else x for x in leaves]


def test_a_fresh_model_can_be_saved_and_loaded():
    averaged = AveragedModel(small(), 10)
    state = saved(averaged.state_dict())
    other, _, _ = walked_module(small(seed=1), 10, 12)
    other.load_state_dict(state)
    assert other.n_averaged == 0
    assert bits(other) == bits(averaged)


def test_a_state_may_be_assigned():
    model = small()
    averaged, walk, history = walked_module(model, 10, 25)
    other = AveragedModel(small(seed=1), 10)
    other.load_state_dict(saved(averaged.state_dict()), assign=True)
    assert bits(other) == bits(averaged)
    for _ in range(15):
        walk.step()
        averaged.update_parameters(model)
        other.update_parameters(model)
        history.record()
    assert bits(other) == bits(averaged)
    assert_averages(named(other.module), history.average(AnytimeWindow(10)))
