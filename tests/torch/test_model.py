"""AveragedModel in the place of torch's own class: the same keys, looks, sources and types."""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from tailavg import AnytimeWindow, ExactWindow, Exponential, Fixed, RawTail, TailAverage
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.torch_models import (
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    every_rule,
    named,
    odd_batch,
    only_tensors,
    saved,
    small,
    walked_module,
)


@every_rule
def test_the_module_has_the_averages_of_the_model(rule):
    model, steps = small(norm=False), 600
    averaged, walk, history = AveragedModel(model, rule), Walk(model), History(model)
    for t in range(1, steps + 1):
        walk.step()
        averaged.update_parameters(model)
        history.record()
        if t in (1, 2, 30, 255, 256, 257, 400, 600):
            assert_averages(named(averaged.module), history.average(rule))
            assert averaged.n_averaged == t


def test_it_is_a_module_with_the_keys_of_torchs_class():
    model = small()
    ours, theirs = AveragedModel(model, 0.5), swa_utils.AveragedModel(model)
    assert isinstance(ours, nn.Module)
    assert list(only_tensors(ours.state_dict())) == list(theirs.state_dict())
    assert set(ours.state_dict()) - set(theirs.state_dict()) == {"_extra_state"}
    assert [name for name, _ in ours.named_parameters()] == [
        name for name, _ in theirs.named_parameters()
    ]
    assert [name for name, _ in ours.named_buffers()] == [n for n, _ in theirs.named_buffers()]
    assert [name for name, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [name for name, _ in ours.named_children()] == [n for n, _ in theirs.named_children()]
    assert ours.n_averaged.dtype == torch.long
    assert (ours.n_averaged.shape, int(ours.n_averaged)) == ((), 0)
    ours.update_parameters(model)
    theirs.update_parameters(model)
    assert ours.n_averaged == theirs.n_averaged == 1
    assert list(only_tensors(ours.state_dict())) == list(theirs.state_dict())


def test_before_the_first_update_it_has_the_weights_it_was_made_with():
    model = small()
    averaged, before = AveragedModel(model, 10), bits(model)
    Walk(model).step()
    assert bits(averaged.module) == before
    assert bits(averaged.module) != bits(model)
    averaged.update_parameters(model)
    assert bits(named(averaged.module)) == bits(named(model))


X = torch.rand(4, 3, generator=torch.Generator().manual_seed(0))
LOOKS = {
    "module": lambda m: m.module[0].weight,
    "forward": lambda m: m(X),
    "forward of module": lambda m: m.module(X),
    "parameters": lambda m: next(iter(m.parameters())),
    "named_parameters": lambda m: dict(m.named_parameters())["module.0.weight"],
    "state_dict": lambda m: m.state_dict()["module.0.weight"],
    "module's state_dict": lambda m: m.module.state_dict()["0.weight"],
    "children": lambda m: next(iter(m.children()))[0].weight,
    "named_children": lambda m: dict(m.named_children())["module"][0].weight,
    "modules": lambda m: list(m.modules())[2].weight,
    "named_modules": lambda m: dict(m.named_modules())["module.0"].weight,
    "get_parameter": lambda m: m.get_parameter("module.0.weight"),
    "get_submodule": lambda m: m.get_submodule("module.0").weight,
    "get_buffer": lambda m: m.get_buffer("module.1.running_mean"),
    "buffers": lambda m: list(m.buffers())[1],
    "named_buffers": lambda m: dict(m.named_buffers())["module.1.running_mean"],
    "functional_call": lambda m: torch.func.functional_call(m, {}, (X,)),
    "deepcopy": lambda m: copy.deepcopy(m).module[0].weight,
    "apply": lambda m: seen_by_apply(m),
    "to": lambda m: m.to(torch.float64).to(torch.float32).module[0].weight,
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "compiled": lambda m: torch.compile(m, backend="eager")(X),
    "pickled whole": lambda m: pickled(m).module[0].weight,
}


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def seen_by_apply(model):
    seen = []
    model.apply(
        lambda module: seen.append(module.weight) if isinstance(module, nn.Linear) else None
    )
    return seen[0].detach().clone()


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_whichever_way_one_looks_one_sees_the_averages(look):
    """Each look is the first after an update; what it should see is set up by hand."""
    model, rule = small(), AnytimeWindow(10)
    averaged, walk, history = walked_module(model, rule, 25)
    averaged.eval()
    for _ in range(3):
        for _ in range(7):
            walk.step()
            model(torch.rand(6, 3))
            averaged.update_parameters(model)
            history.record()
        expected = copy.deepcopy(model).eval()
        with torch.no_grad():
            for name, values in history.average(rule).items():
                named(expected)[name].copy_(torch.from_numpy(values))
        reference = AveragedModel(expected, rule).eval()
        torch.testing.assert_close(look(averaged), look(reference), rtol=1e-5, atol=1e-6)


def test_the_averages_are_written_once_per_update_and_only_when_looked_at():
    model = small()
    averaged, walk, _ = walked_module(model, 10, 5)
    module = averaged.module
    versions = [p._version for p in module.parameters()]
    averaged.state_dict()
    averaged(torch.rand(4, 3))
    assert averaged.module is module
    assert [p._version for p in module.parameters()] == versions
    stale = bits(named(module))
    for _ in range(5):
        walk.step()
        averaged.update_parameters(model)
    assert bits(named(module)) == stale, "nobody looked"
    assert averaged.module is module
    assert bits(named(module)) != stale


def test_what_one_writes_into_the_module_stays_until_the_next_update():
    """Lightning swaps weights through it; `update_bn` writes its statistics there."""
    model = small()
    averaged, walk, history = walked_module(model, 10, 15)
    with torch.no_grad():
        averaged.module[0].weight.fill_(7.0)
        averaged.module[1].running_mean.fill_(8.0)
    for look in (lambda: averaged.module, lambda: averaged(torch.rand(4, 3)), averaged.state_dict):
        averaged.eval()
        look()
        assert (averaged.module[0].weight == 7.0).all()
        assert (averaged.module[1].running_mean == 8.0).all()
    walk.step()
    averaged.update_parameters(model)
    history.record()
    assert_averages(named(averaged.module), history.average(AnytimeWindow(10)))


def test_buffers_follow_the_model_or_are_averaged():
    rule = AnytimeWindow(10)
    for use_buffers in (False, True):
        model, history = small(), History()
        averaged = AveragedModel(model, rule, use_buffers=use_buffers)
        for _ in range(40):
            model(torch.rand(6, 3))
            averaged.update_parameters(model)
            history.record(dict(model.named_buffers()))
        last = dict(model.named_buffers())
        saw = dict(averaged.module.named_buffers())
        assert int(saw["1.num_batches_tracked"]) == 40
        if use_buffers:
            assert_averages(saw, history.average(rule))
            assert bits(saw) != bits(last)
        else:
            assert bits(saw) == bits(last)
            model(torch.rand(6, 3))
            assert bits(saw) != bits(last), "in step with updates, not tied to the model"


def test_a_model_of_all_kinds_at_once_is_averaged():
    rule, model = AnytimeWindow(30), Odd(compiled=False)
    averaged, walk, history = AveragedModel(model, rule), Walk(model), History(model)
    for step in range(300):
        walk.step()
        if step % 50 == 0:
            model.loss(step)
        averaged.update_parameters(model)
        history.record()
    assert_averages(named(averaged.module), history.average(rule))
    assert averaged.module.head.weight is averaged.module.embed.weight
    for (name, got), (_, want) in zip(
        named(averaged.module).items(), named(model).items(), strict=True
    ):
        assert (got.dtype, got.requires_grad) == (want.dtype, want.requires_grad), name
    assert bits(dict(averaged.module.named_buffers())) == bits(dict(model.named_buffers()))
    resumed = AveragedModel(Odd(seed=1, compiled=False), rule)
    resumed.load_state_dict(saved(averaged.state_dict()))
    persistent = averaged.state_dict()
    assert bits(only_tensors(resumed.state_dict())) == bits(only_tensors(persistent))
    averaged.eval()
    resumed.eval()
    resumed.module.cache.copy_(averaged.module.cache)
    torch.testing.assert_close(resumed(*odd_batch(1)), averaged(*odd_batch(1)), rtol=0, atol=0)


def test_the_source_may_come_wrapped():
    model = small()
    sources = {
        "plain": model,
        "compiled": torch.compile(model, backend="eager"),
        "parallel": nn.DataParallel(model),
    }
    averages = {name: AveragedModel(model, 10) for name in sources}
    walk = Walk(model)
    for _ in range(25):
        walk.step()
        for name, source in sources.items():
            averages[name].update_parameters(source)
    assert bits(averages["plain"]) == bits(averages["compiled"]) == bits(averages["parallel"])


def test_a_wrapped_model_may_be_averaged():
    model = small()
    compiled = torch.compile(model, backend="eager")
    averaged, walk = AveragedModel(compiled, 10), Walk(model)
    reference = AveragedModel(model, 10)
    for _ in range(25):
        walk.step()
        averaged.update_parameters(compiled)
        reference.update_parameters(model)
    x = torch.rand(4, 3)
    averaged.eval()
    reference.eval()
    torch.testing.assert_close(averaged(x), reference(x))


def test_another_model_of_the_same_names_goes_on():
    """After a restart the source is another object."""
    first, second = small(), small(seed=1)
    averaged, history = AveragedModel(first, AnytimeWindow(1.0)), History()
    for model in (first, second, first, second):
        averaged.update_parameters(model)
        history.record(named(model))
    assert_averages(named(averaged.module), history.average(AnytimeWindow(1.0)))


def test_a_source_that_does_not_match_is_refused_by_name():
    averaged, _, _ = walked_module(small(), 10, 25)
    before = bits(averaged)
    misshapen = small()
    misshapen[3] = nn.Linear(4, 3)
    for source, name in (
        (misshapen, r"3\.weight"),
        (small().append(nn.Linear(2, 2)), r"4\.weight"),
        (small()[:2], r"3\.weight"),
    ):
        with pytest.raises(ValueError, match=name):
            averaged.update_parameters(source)
        assert averaged.n_averaged == 25
        assert bits(averaged) == before


def test_a_source_that_is_not_tied_as_at_first_is_refused_by_name():
    class Pair(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = self.a if tied else nn.Linear(2, 2)

    averaged, _, _ = walked_module(Pair(tied=True), 10, 25)
    with pytest.raises(ValueError, match=r"[ab]\.weight"):
        averaged.update_parameters(Pair(tied=False))
    assert averaged.n_averaged == 25


def test_a_copy_goes_its_own_way():
    model = small()
    averaged, walk, _ = walked_module(model, 10, 25)
    twin = copy.deepcopy(averaged)
    assert bits(twin) == bits(averaged)
    before = bits(averaged)
    for _ in range(20):
        walk.step()
        twin.update_parameters(model)
    assert bits(averaged) == before
    assert twin.n_averaged == 45
    assert averaged.n_averaged == 25


def test_its_modes_gradients_and_types_are_those_of_a_module():
    model = small()
    averaged, walk, history = walked_module(model, 10, 25)
    averaged.eval()
    assert not averaged.module[1].training
    averaged.train()
    assert averaged.module[1].training
    averaged(torch.rand(4, 3)).sum().backward()
    assert averaged.module[0].weight.grad is not None
    with torch.inference_mode():
        walk.step()
        averaged.update_parameters(model)
        history.record()
        averaged(torch.rand(4, 3))
    walk.step()
    averaged.update_parameters(model)
    history.record()
    assert_averages(named(averaged.module), history.average(AnytimeWindow(10)))
    assert averaged.requires_grad_(False) is averaged
    assert not any(p.requires_grad for p in averaged.parameters())
    averaged.to("cpu")
    averaged.to(torch.float64)
    walk.step()
    averaged.update_parameters(model)
    history.record()
    assert {p.dtype for p in averaged.parameters()} == {torch.float64}
    assert_averages(named(averaged.module), history.average(AnytimeWindow(10)), torch.float32)


def test_accumulators_stay_wide_when_the_module_is_made_narrow():
    model = nn.Linear(2, 2, bias=False)
    averaged = AveragedModel(model, AnytimeWindow(1.0))
    for value in (1.0, 1.001, 1.002, 1.003):
        nn.init.constant_(model.weight, value)
        averaged.update_parameters(model)
        averaged.to(torch.bfloat16)
        assert (averaged.module.weight == 1.0).all()
    averaged.to(torch.float32)
    averaged.update_parameters(model)
    torch.testing.assert_close(averaged.module.weight, torch.full((2, 2), 1.0018))


def test_a_device_may_be_named_as_in_torch():
    for device in ("cpu", torch.device("cpu")):
        averaged, _, _ = walked_module(small(), 10, 5, device=device)
        assert averaged.n_averaged.device.type == "cpu"
    positional = AveragedModel(small(), 10, torch.device("cpu"), True)
    positional.update_parameters(small())


def test_rules_are_checked_at_once():
    with pytest.raises(TypeError, match="ExactWindow"):
        AveragedModel(small(), ExactWindow(10))
    with pytest.raises((TypeError, ValueError)):
        AveragedModel(small(), "a quarter")
    assert AveragedModel(small(), Fixed(3)).module is not None
    assert AveragedModel(small(), RawTail(0.5, 10)).module is not None


def test_it_gives_what_a_parameter_average_gives():
    model = small()
    averaged, average = AveragedModel(model, 0.25), ParameterAverage(model, 0.25)
    walk = Walk(model)
    for _ in range(333):
        walk.step()
        averaged.update_parameters(model)
        average.update()
    assert bits(averaged.module.state_dict()) == bits(average.averaged_state_dict())


@pytest.mark.parametrize("rule", [AnytimeWindow(0.3), AnytimeWindow(7, 4), Exponential(5)], ids=str)
def test_count_size_weights_and_profile_are_those_of_numpy(rule):
    model, numpy = torch.nn.Linear(2, 1), TailAverage(rule)
    averaged = AveragedModel(model, rule)
    with pytest.raises(ValueError, match="profile: expected at least one sample"):
        averaged.profile()
    for step in range(1, 50):
        averaged.update_parameters(model)
        numpy.update(float(step))
        assert averaged.count == averaged.n_averaged == step
        assert averaged.size == numpy.size
        assert averaged.profile() == numpy.profile()
        np.testing.assert_array_equal(averaged.weights(), numpy.weights())
