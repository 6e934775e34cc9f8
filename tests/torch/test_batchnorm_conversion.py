"""Conversion of models to BatchNorm with tail statistics and back, and their states."""

import copy
import pickle

import pytest
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, ExactWindow, Exponential
from tailavg.torch.batchnorm import convert_tail_batchnorm, revert_batchnorm
from tests.support.batchnorms import assert_dense, draw, kinds, net, same, snapshot, train
from tests.support.torch_models import saved

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
    assert "rule=Exponential(window=Growing(c=0.25, at_most=None))" in repr(norm)


def test_a_process_group_is_kept():
    assert convert_tail_batchnorm(nn.SyncBatchNorm(3, process_group="group"), 5).process_group == (
        "group"
    )


def test_momenta_stay():
    model = convert_tail_batchnorm(net(), 5)
    assert [model.norm.momentum, model.block[1].momentum] == [0.3, None]


def test_conversion_of_a_converted_model_changes_the_rule():
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
    assert "rule=" in repr(model[0])
    x = draw((3, 3, 2, 2), 1)[0]
    model(x)
    with pytest.warns(UserWarning, match=r": 1\.0 \(Mine\)$"):
        convert_tail_batchnorm(model, 0.25)  # the lazy one has become a BatchNorm2d
    assert "rule=" in repr(model[2])
    with pytest.warns(UserWarning, match=r": model \(Mine\)$"):
        convert_tail_batchnorm(Mine(3), 0.25)


@pytest.mark.parametrize("bad", [0, 1.5, True, "0.5", None], ids=repr)
def test_a_bad_rule_is_refused_and_nothing_converted(bad):
    model = net()
    with pytest.raises((ValueError, TypeError), match="rule: expected"):
        convert_tail_batchnorm(model, bad)
    assert type(model.norm) is nn.BatchNorm2d


@pytest.mark.parametrize("rule", ["10min", Exponential("10min")], ids=str)
def test_a_window_of_time_is_refused_and_nothing_converted(rule):
    model = net()
    with pytest.raises(TypeError, match=r"a window of time works in|a model have none"):
        convert_tail_batchnorm(model, rule)
    assert str(model) == str(net())


@pytest.mark.parametrize("rule", [AnyTail(), AnytimeWindow(0.25), ExactWindow(9)], ids=str)
def test_a_rule_other_than_an_exponential_is_refused_and_nothing_converted(rule):
    model = net()
    with pytest.raises(
        TypeError, match=r"rule: .* supports only Exponential, got .*; pass a number"
    ):
        convert_tail_batchnorm(model, rule)
    assert type(model.norm) is nn.BatchNorm2d


def test_an_exponential_is_what_its_window_is():
    batches = draw((6, 3), 20)
    norm = convert_tail_batchnorm(nn.BatchNorm1d(3), Exponential(0.5))
    assert_dense(Exponential(0.5), batches, train(norm, batches))
    assert repr(norm) == repr(convert_tail_batchnorm(nn.BatchNorm1d(3), 0.5))


# Reversion


@kinds
@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
def test_a_reverted_module_is_as_if_it_had_never_been_converted(kind, shape, momentum):
    plain, norm = kind(3, momentum=momentum), kind(3, momentum=momentum)
    buffers = list(norm.buffers())
    assert revert_batchnorm(convert_tail_batchnorm(convert_tail_batchnorm(norm, 5), 0.25)) is norm
    assert type(norm) is kind
    assert norm.__dict__.keys() == plain.__dict__.keys()
    assert all(a is b for a, b in zip(norm.buffers(), buffers, strict=True))
    assert repr(norm) == repr(plain)
    for x in draw(shape, 4):
        assert torch.equal(norm(x), plain(x))
        assert same(norm.state_dict(), plain.state_dict())


def test_reversion_keeps_the_statistics_and_leaves_other_modules_alone():
    model = convert_tail_batchnorm(net(), 5)
    for x in draw((4, 3, 3, 3), 3):
        model(x)
    before, x = snapshot(model), draw((4, 3, 3, 3), 1, seed=9)[0]
    expected = model.eval()(x)
    assert revert_batchnorm(model) is model
    assert same(model.state_dict(), before)
    assert torch.equal(model(x), expected)
    assert repr(model.train()) == repr(net())
    assert repr(revert_batchnorm(model)) == repr(net())


@pytest.mark.parametrize("built", [0.1, None])
@pytest.mark.parametrize("later", [0.01, None])
def test_a_momentum_set_after_the_conversion_is_kept_by_reversion(built, later):
    norm = convert_tail_batchnorm(nn.BatchNorm1d(3, momentum=built), 5)
    norm.momentum = later
    assert revert_batchnorm(copy.deepcopy(norm)).momentum == later
    assert revert_batchnorm(convert_tail_batchnorm(norm, 7)).momentum == later


# State


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    batches = draw((4, 3, 3, 3), 12)
    whole, first, second = (convert_tail_batchnorm(net(), 0.25) for _ in range(3))
    for x in batches:
        whole(x)
    for x in batches[:7]:
        first(x)
    second.load_state_dict(saved(first.state_dict()))
    for x in batches[7:]:
        second(x)
    assert same(second.state_dict(), whole.state_dict())


def test_the_state_dict_goes_from_plain_to_converted_and_back():
    batches = draw((4, 3, 3, 3), 12)
    plain, tail, back = net(), convert_tail_batchnorm(net(), 0.25), net()
    for x in batches[:5]:
        plain(x)
    state = saved(plain.state_dict())
    assert not tail.load_state_dict(state, strict=True).missing_keys
    assert same(tail.state_dict(), plain.state_dict())
    assert tail.state_dict()._metadata == plain.state_dict()._metadata
    convert_tail_batchnorm(plain, 0.25)  # in place, at the same step
    for x in batches[5:]:
        tail(x)
        plain(x)
    assert tail.last.num_batches_tracked == 12
    assert same(tail.state_dict(), plain.state_dict())
    back.load_state_dict(saved(tail.state_dict()), strict=True)
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
