"""Arguments of AveragedModel in its own order and in torch's, its options and its sources."""

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import AveragedModel, ParameterAverage, growing_avg_fn, growing_multi_avg_fn
from tests.support.torch_models import (
    History,
    Walk,
    assert_averages,
    bits,
    named,
    saved,
    small,
    snapshot,
    walked_module,
)

WAYS = {
    "rule": ((10,), {}),
    "rule by name": ((), {"rule": 10}),
    "rule, device": ((10, "cpu"), {}),
    "rule, device, buffers": ((10, None, False), {}),
    "torch's names": ((), {"device": "cpu", "avg_fn": None, "use_buffers": False, "rule": 10}),
}


@pytest.mark.parametrize(("args", "options"), WAYS.values(), ids=WAYS)
def test_arguments_by_position_and_by_name(args, options):
    model = small()
    averaged = AveragedModel(model, *args, **options)
    assert averaged.rule == AnytimeWindow(10)
    assert averaged.n_averaged.device.type == "cpu"
    assert averaged.use_buffers is False
    averaged.update_parameters(model)


def test_a_model_on_the_meta_device_is_refused():
    with pytest.raises(ValueError, match="meta device"):
        AveragedModel(small(), 10, "meta")


RULE = r"needs a rule .*rule=Exponential.from_decay\(decay\) replaces .*rule=1.0 replaces"
WRONG = {
    "no rule": ((), {}, RULE),
    "a device for a rule": (("cpu",), {}, "rule: expected an int"),
    "an unknown name": ((10,), {"buffer": "copy"}, "buffer"),
    "ema": ((), {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.999)}, RULE),
    "swa": ((), {"avg_fn": swa_utils.get_swa_avg_fn()}, RULE),
    "ours": ((10,), {"multi_avg_fn": growing_multi_avg_fn(0.25)}, RULE),
    "ours, singly": ((10,), {"avg_fn": growing_avg_fn(0.25)}, RULE),
}


@pytest.mark.parametrize(("args", "options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_to_change(args, options, message):
    with pytest.raises(TypeError, match=message):
        AveragedModel(small(), *args, **options)


def test_the_rule_that_stands_for_a_decay_is_the_same_in_the_long_run():
    decay, model = 0.9, nn.Linear(1, 1, bias=False).double()
    rule = Exponential.from_decay(decay)
    theirs = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))
    ours, walk = AveragedModel(model, rule), Walk(model)
    for _ in range(300):  # until the first sample, which torch begins with, is forgotten
        walk.step()
        ours.update_parameters(model)
        theirs.update_parameters(model)
    torch.testing.assert_close(ours.module.weight, theirs.module.weight, rtol=1e-10, atol=0)


def test_only_every_so_many_calls_count_and_a_resume_goes_on():
    model, rule = small(), AnytimeWindow(0.5)
    averaged = AveragedModel(model, rule, update_every=3)
    whole = AveragedModel(model, rule, update_every=3)
    parameters = ParameterAverage(model, rule, update_every=3)
    walk, history = Walk(model), History(model)
    before = bits(averaged.module)
    for call in range(1, 101):
        walk.step()
        model(torch.rand(6, 3))
        averaged.update_parameters(model)
        whole.update_parameters(model)
        parameters.update()
        if call % 3 == 0:
            history.record()
        assert averaged.count == averaged.n_averaged == call // 3
        if call < 3:
            assert bits(averaged.module) == before
        if call % 7 == 0:
            state = saved(averaged.state_dict())
            averaged = AveragedModel(small(seed=call), rule, update_every=3)
            averaged.load_state_dict(state)
    assert_averages(named(averaged.module), history.average(rule))
    assert bits(averaged.module) == bits(whole.module)
    assert snapshot(averaged.get_extra_state()) == snapshot(parameters.state_dict())
    for bad in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="update_every"):
            AveragedModel(model, rule, update_every=bad)


def test_buffers_may_be_copied_averaged_or_skipped():
    kinds = {"copy": False, "average": True, "skip": False}
    for buffers, average in kinds.items():
        model = small()
        start = bits(dict(model.named_buffers()))
        averaged = AveragedModel(model, 10, buffers=buffers)
        same = AveragedModel(model, 10, buffers=buffers, use_buffers=average)
        torchs = AveragedModel(model, 10, use_buffers=average)
        for _ in range(12):
            model(torch.rand(6, 3))
            for one in (averaged, same, torchs):
                one.update_parameters(model)
        assert averaged.use_buffers is average
        assert bits(averaged) == bits(same)
        if buffers == "skip":
            assert bits(dict(averaged.module.named_buffers())) == start
        else:
            assert bits(averaged) == bits(torchs)
        with pytest.raises(ValueError, match=r"use_buffers=.* contradicts .*leave out use_buffers"):
            AveragedModel(model, 10, buffers=buffers, use_buffers=not average)
    with pytest.raises(ValueError, match="buffers: expected one of"):
        AveragedModel(small(), 10, buffers="keep")


# Models with nothing to average: the copy follows


class Counter(nn.Module):
    """Whole numbers, as a parameter and as a buffer."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return x * self.steps + self.codes.sum()


@pytest.mark.parametrize("make", [nn.Tanh, Counter], ids=["empty", "whole numbers"])
@pytest.mark.parametrize("rule", [AnytimeWindow(4), Exponential(0.5)], ids=str)
def test_a_model_with_nothing_to_average_is_followed(make, rule):
    model = make()
    averaged = AveragedModel(model, rule)
    for t in range(1, 30):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(t)
        averaged.update_parameters(model)
        assert averaged.count == averaged.n_averaged == t
        torch.testing.assert_close(averaged(torch.ones(2)), model(torch.ones(2)), rtol=0, atol=0)
        resumed = AveragedModel(make(), rule)
        resumed.load_state_dict(saved(averaged.state_dict()))
        assert bits(resumed) == bits(averaged)
        averaged = resumed


def test_whole_numbers_follow_the_model_beside_averages():
    model = nn.ModuleList([Counter(), nn.Linear(1, 1)])
    averaged, walk, history = walked_module(model, AnytimeWindow(4), 10)
    model[0].codes.fill_(7)
    walk.step()
    averaged.update_parameters(model)
    history.record()
    assert (averaged.module[0].codes == 7).all()
    assert_averages(named(averaged.module), history.average(AnytimeWindow(4)))


# Sources in wrappers of other libraries, and scripted ones


class Wrapper(nn.Module):
    def __init__(self, model, name):
        super().__init__()
        self.name, self.loss = name, nn.MSELoss()
        setattr(self, name, model)

    def forward(self, x):
        return getattr(self, self.name)(x)


WRAPPERS = {
    "module": lambda model: Wrapper(model, "module"),
    "_forward_module": lambda model: Wrapper(model, "_forward_module"),
    "two": lambda model: Wrapper(Wrapper(model, "module"), "inner"),
    "parallel": lambda model: Wrapper(nn.DataParallel(model), "inner"),
    "compiled": lambda model: Wrapper(torch.compile(model, backend="eager"), "inner"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_the_source_may_come_in_any_wrapper_without_tensors(wrap, monkeypatch):
    model = small()
    wrapped = wrap(model)
    averaged, reference, walk = AveragedModel(model, 10), AveragedModel(model, 10), Walk(model)
    bound = []
    bind = AveragedModel._bind
    monkeypatch.setattr(AveragedModel, "_bind", lambda *args: bound.append(1) or bind(*args))
    for step in range(25):
        walk.step()
        averaged.update_parameters(model if step == 12 else wrapped)
        reference.update_parameters(model)
    assert bits(averaged) == bits(reference)
    assert len(bound) == 4, "only when the source changes"
    other = wrap(small(seed=1))
    averaged.update_parameters(other)
    assert averaged.count == 26


def test_a_wrapper_whose_model_is_replaced_is_noticed():
    first, second = small(), small(seed=1)
    wrapper = Wrapper(first, "module")
    averaged, history = AveragedModel(first, AnytimeWindow(1.0)), History()
    for model in (first, second, first):
        wrapper.module = model
        averaged.update_parameters(wrapper)
        history.record(named(model))
    assert_averages(named(averaged.module), history.average(AnytimeWindow(1.0)))


def test_a_wrapper_with_tensors_or_other_names_is_refused():
    averaged, _, _ = walked_module(small(), 10, 5)
    before = bits(averaged)
    scaled = Wrapper(small(), "module")
    scaled.scale = nn.Parameter(torch.ones(()))
    short = Wrapper(small()[:2], "module")
    for source, name in ((scaled, "scale"), (short, r"module\.0\.weight|3\.weight")):
        with pytest.raises(ValueError, match=name):
            averaged.update_parameters(source)
        assert bits(averaged) == before
        assert averaged.count == 5


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_modules_are_refused_clearly():
    model = small().eval()
    averaged = AveragedModel(model, 10)
    scripted = torch.jit.script(model)
    traced = torch.jit.trace(model, torch.rand(2, 3))
    for module in (scripted, traced, nn.Sequential(nn.Linear(3, 3), scripted)):
        for make in (AveragedModel, ParameterAverage):
            with pytest.raises(TypeError, match="expected a Python module"):
                make(module, 10)
        with pytest.raises(TypeError, match="expected a Python module"):
            averaged.update_parameters(module)
    # as the message says: the parameters are the same
    with torch.no_grad():
        dict(scripted.named_parameters())["0.weight"].fill_(3.0)
    averaged.update_parameters(model)
    assert (averaged.module[0].weight == 3.0).all()
    assert torch.equal(
        torch.jit.script(averaged.module)(torch.ones(2, 3)), averaged(torch.ones(2, 3))
    )
    average = ParameterAverage(scripted.named_parameters(), 10)
    average.update()
    assert (average.averaged_state_dict()["0.weight"] == 3.0).all()
