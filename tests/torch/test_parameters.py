"""ParameterAverage: the averages against a slow reference, and every way to look at them."""

import copy
import io
import math
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cases import rules, short
from tailavg import (
    AnytimeWindow,
    ExactWindow,
    Exponential,
    Fixed,
    Growing,
    RawTail,
    TailAverage,
)
from tailavg.torch import ParameterAverage
from torch_models import (
    TORCH_RULES,
    Allocations,
    FailAt,
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    dense,
    flat_tensors,
    named,
    odd_batch,
    small,
    snapshot,
    tolerance,
    wide,
)
from torch_processes import exit_code

every_rule = pytest.mark.parametrize("rule", TORCH_RULES, ids=short)
kept_rules = rules.filter(lambda rule: not isinstance(rule, ExactWindow))


def tensors_of(width: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    """One tensor of each floating type."""
    torch.manual_seed(seed)
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
    return {str(kind)[6:]: torch.rand(width, dtype=kind) for kind in kinds}


def walked(model, rule, steps: int, seed: int = 0, **options):
    """An average after so many updates, and the model's walk and history."""
    average = ParameterAverage(model, rule, **options)
    walk, history = Walk(model, seed), History(model)
    for _ in range(steps):
        walk.step()
        average.update()
        history.record()
    return average, walk, history


def saved(state):
    """A state through a file, with nothing unpickled but tensors and plain data."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# The averages


@every_rule
def test_updates_give_the_averages_of_the_model(rule):
    """Steps enough for several folds and turns; reads in between change nothing."""
    tensors, steps = tensors_of(), 1500
    read_at = {1, 2, 3, 7, 40, 41, 255, 256, 257, 258, 300, 512, 513, 769, 1000, 1001, 1499, 1500}
    average, unread = ParameterAverage(tensors, rule), ParameterAverage(tensors, rule)
    alphas, samples = dense(rule, read_at), {name: [] for name in tensors}
    random = np.random.default_rng(0)
    for t in range(1, steps + 1):
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(1 + random.random(3)))
            samples[name].append(wide(tensor))
        average.update()
        unread.update()
        assert average.count == t
        if t in read_at:
            expected = {name: alphas[t] @ np.array(xs) for name, xs in samples.items()}
            got = average.averaged_state_dict()
            assert {name: x.dtype for name, x in got.items()} == {
                name: x.dtype for name, x in tensors.items()
            }
            assert_averages(got, expected)
            for dtype in (torch.float32, torch.float64):
                got = average.averaged_state_dict(dtype=dtype)
                for name, values in expected.items():
                    if name == "complex64":
                        continue
                    assert got[name].dtype == dtype
                    rtol = tolerance(dtype) if name == "float64" else 4e-6
                    np.testing.assert_allclose(wide(got[name]), values, rtol=rtol, err_msg=name)
    assert bits(average.averaged_state_dict()) == bits(unread.averaged_state_dict())
    assert snapshot(average.state_dict()) == snapshot(unread.state_dict())


@settings(max_examples=25)
@given(kept_rules, st.lists(st.integers(1, 350), max_size=3, unique=True).map(sorted), st.data())
def test_any_rule_resumed_at_any_step_follows_the_reference(rule, stops, data):
    tensors, history = {"w": torch.zeros(2), "b": torch.zeros((), dtype=torch.float64)}, History()
    average, whole = ParameterAverage(tensors, rule), ParameterAverage(tensors, rule)
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    for t in range(1, 351):
        for tensor in tensors.values():
            tensor.copy_(torch.as_tensor(1 + random.random(tensor.shape)))
        average.update()
        whole.update()
        history.record(tensors)
        if t in stops:
            assert_averages(average.averaged_state_dict(), history.average(rule))
            state = saved(average.state_dict())
            average = ParameterAverage(tensors, rule)
            average.load_state_dict(state)
    assert_averages(average.averaged_state_dict(), history.average(rule))
    assert snapshot(average.state_dict()) == snapshot(whole.state_dict())
    assert bits(average.averaged_state_dict()) == bits(whole.averaged_state_dict())


@every_rule
def test_count_size_weights_and_profile_are_those_of_a_tail_average(rule):
    tensor = torch.zeros(1)
    average, plain = ParameterAverage({"w": tensor}, rule), TailAverage(rule)
    assert average.rule == rule
    assert (average.count, average.rule) == (0, rule)
    for t in range(1, 401):
        average.update()
        plain.update(0.0)
        assert (average.count, average.size) == (t, plain.size)
        if t in (1, 2, 10, 399, 400):
            assert average.profile() == plain.profile()
            np.testing.assert_array_equal(average.weights(), plain.weights())


@pytest.mark.parametrize(
    ("given_rule", "rule"),
    [
        (100, AnytimeWindow(100)),
        (0.25, AnytimeWindow(0.25)),
        (Fixed(7), AnytimeWindow(7)),
        (Growing(0.5, at_most=9), AnytimeWindow(Growing(0.5, at_most=9))),
        (Exponential(5), Exponential(5)),
        (RawTail(0.5, total=10), RawTail(0.5, total=10)),
    ],
)
def test_a_number_or_a_window_will_do_for_a_rule(given_rule, rule):
    assert ParameterAverage(small(), given_rule).rule == rule


def test_rules_and_options_that_make_no_sense_are_refused():
    model = small()
    with pytest.raises(TypeError, match="ExactWindow"):
        ParameterAverage(model, ExactWindow(10))
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.complex64, "float32"):
        with pytest.raises(TypeError, match="dtype"):
            ParameterAverage(model, 10, dtype=dtype)
    with pytest.raises(ValueError, match="buffers"):
        ParameterAverage(model, 10, buffers="sometimes")
    for every in (0, -1):
        with pytest.raises(ValueError, match="update_every"):
            ParameterAverage(model, 10, update_every=every)
    for every in (1.5, "2", True):
        with pytest.raises((TypeError, ValueError), match="update_every"):
            ParameterAverage(model, 10, update_every=every)
    with pytest.raises((TypeError, ValueError)):
        ParameterAverage(model, "a quarter")
    with pytest.raises((TypeError, ValueError)):
        ParameterAverage(model, -1)
    with pytest.raises((TypeError, ValueError)):
        ParameterAverage(model.parameters(), 10)  # no names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_accumulators_are_as_wide_as_asked_and_as_the_parameter(dtype):
    tensors = tensors_of()
    average = ParameterAverage(tensors, 10, dtype=dtype)
    average.update()
    state = average.state_dict()
    for held in (*state["blocks"], state["partial"]):
        assert {name: x.dtype for name, x in held.items()} == {
            name: torch.promote_types(dtype, x.dtype) for name, x in tensors.items()
        }


@pytest.mark.parametrize("rule", [AnytimeWindow(250_000), Exponential(250_000)], ids=short)
def test_a_window_of_250_000_in_float32_stays_near_the_truth(rule):
    """A thousand folds, two turns."""
    steps, random = 260_000, np.random.default_rng(0)
    xs = (1 + random.random((steps, 4))).astype(np.float32)
    weight = torch.zeros(4)
    average, rows = ParameterAverage({"w": weight}, rule), torch.from_numpy(xs)
    for row in rows:
        weight.copy_(row)
        average.update()
    if isinstance(rule, Exponential):
        expected = np.zeros(4)
        for t, x in enumerate(xs.astype(np.float64), start=1):
            n, before = min(t, 250_000), min(t - 1, 250_000)
            g = (before - math.sqrt(before * (before + 1 - n) / n)) / (before + 1)
            expected = g * expected + (1 - g) * x
    else:
        expected = dense(rule, [steps])[steps] @ xs.astype(np.float64)
    got = average.averaged_state_dict()["w"]
    np.testing.assert_allclose(wide(got), expected, rtol=0, atol=1e-5)
    assert math.isclose(average.profile().effective_size, 250_000, rel_tol=1e-9)


def test_averages_of_bfloat16_move_where_those_of_torch_stand_still():
    """A step from 1 to 2, seen by a long average: a thousandth of it is lost in bfloat16."""
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    decayed = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)
    )
    plain = torch.optim.swa_utils.AveragedModel(model)
    ours = {rule: ParameterAverage(model, rule) for rule in (AnytimeWindow(1.0), Exponential(1000))}
    for t in range(1200):
        if t == 600:
            nn.init.constant_(model.weight, 1.25)
        decayed.update_parameters(model)
        plain.update_parameters(model)
        for average in ours.values():
            average.update()
    assert (decayed.module.weight == 1.0).all()
    assert (plain.module.weight == 1.0).all()
    for rule, average in ours.items():
        alpha = dense(rule, [1200])[1200]
        expected = 1 + 0.25 * alpha[600:].sum()
        got = average.averaged_state_dict(dtype=torch.float64)["weight"]
        np.testing.assert_allclose(wide(got), expected, rtol=1e-6)
        with average.average_parameters():
            np.testing.assert_allclose(wide(model.weight), expected, rtol=0.004)
            assert (model.weight > 1.0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("rule", "when", "steps"),
    [
        (AnytimeWindow(10), 30, 60),
        (AnytimeWindow(0.25), 30, 150),
        (RawTail(5, 60), 30, 150),
        (AnytimeWindow(1200), 900, 2500),  # after a fold: the carried rest is bad as well
    ],
    ids=str,
)
def test_nan_and_infinity_leave_with_their_block(rule, when, steps, bad):
    """A weight of 0 times NaN is NaN, so what is no longer needed must not be touched."""
    weight = torch.ones(3)
    alphas = dense(rule, {*range(1, steps, max(1, steps // 150)), when, when + 1, steps})
    average = ParameterAverage({"w": weight}, rule)
    for t in range(1, steps + 1):
        weight.fill_(1.0)
        if t == when:
            weight[1] = bad
        average.update()
        if t in alphas:
            got = average.averaged_state_dict()["w"]
            torch.testing.assert_close(got[::2], torch.ones(2))
            holds = t >= when and alphas[t][when - 1] > 0
            assert bool(torch.isfinite(got[1])) is not holds, t
    torch.testing.assert_close(got, torch.ones(3))


def test_what_a_fold_rounds_off_is_not_lost():
    """Late in a long window a fold moves the mean by less than float32 can tell.

    The sums of 256 are exact here, so that only folds round.
    """
    steps, weight = 50_000, torch.ones(4)
    average = ParameterAverage({"w": weight}, AnytimeWindow(1.0))
    values = np.ones(steps)
    values[steps // 2 :: 4] += 2.0**-15
    for value in values.tolist():
        weight.fill_(value)
        average.update()
    got = average.averaged_state_dict()["w"]
    np.testing.assert_allclose(wide(got), values.mean(), rtol=0, atol=1.5 * 2.0**-23)


def test_values_that_only_fit_in_sums_of_many_do_not_overflow():
    for dtype, value in ((torch.float16, 60_000.0), (torch.bfloat16, 1e36), (torch.float32, 1e35)):
        weight = torch.full((2,), value, dtype=dtype)
        average = ParameterAverage({"w": weight}, AnytimeWindow(700))
        for _ in range(1500):
            average.update()
        torch.testing.assert_close(average.averaged_state_dict()["w"], weight)


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.view(-1, 1 if x.numel() % 3 else 3).t(),
    "every other": lambda x: x.repeat_interleave(2)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("rule", [AnytimeWindow(280), Exponential(280)], ids=short)
def test_tensors_of_any_size_and_many_of_them_are_averaged(rule, layout):
    """Sizes around those at which tensors are handled in other ways; every element is looked at."""
    steps, random = 300, torch.Generator().manual_seed(0)
    sizes = [0, 1, 8191, 8192, 8193, 32767, 32768, 131071, 131072, 131073, 262147]
    sizes += torch.randint(1, 300, (400,), generator=random).tolist()
    kinds = [torch.float32, torch.bfloat16, torch.float64]
    tensors = {
        f"{i}": layout((1 + torch.rand(size, generator=random)).to(kinds[i % 3 if i > 10 else 0]))
        for i, size in enumerate(sizes)
    }
    tensors["low"] = layout((1 + torch.rand(131073, generator=random)).to(torch.bfloat16))
    bases = {name: tensor.clone() for name, tensor in tensors.items()}
    factors = 2.0 ** (np.arange(steps) % 3)  # exact in every type: one number tells the average
    cycle = [{name: base * factor for name, base in bases.items()} for factor in factors[:3]]
    average = ParameterAverage(tensors, rule)
    for t in range(steps):
        for name, values in cycle[t % 3].items():
            tensors[name].copy_(values)
        average.update()
    expected = dense(rule, [steps])[steps] @ factors
    before = bits(tensors)
    got = average.averaged_state_dict(dtype=torch.float32)
    for name, base in bases.items():
        np.testing.assert_allclose(wide(got[name]), expected * wide(base), rtol=1e-5, err_msg=name)
    with average.average_parameters():
        for name, tensor in tensors.items():
            rtol = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-5
            np.testing.assert_allclose(wide(tensor), expected * wide(bases[name]), rtol=rtol)
    assert bits(tensors) == before
    resumed = ParameterAverage(tensors, rule)
    resumed.load_state_dict(saved(average.state_dict()))
    assert bits(resumed.averaged_state_dict()) == bits(average.averaged_state_dict())


@pytest.mark.parametrize("rule", [AnytimeWindow(270), Exponential(270)], ids=short)
def test_large_tensors_are_averaged_to_their_last_element(rule):
    """Tensors that are worked on part by part, through a fold and a turn."""
    steps, tensors = 280, {}
    for size, kind in (
        (2**20, torch.float32),
        (2**21 + 3, torch.float32),
        (2**20 + 5, torch.bfloat16),
    ):
        tensors[f"{size}"] = (1 + torch.arange(size) % 7).to(kind)
    bases = {name: tensor.clone() for name, tensor in tensors.items()}
    average, factors = ParameterAverage(tensors, rule), np.repeat([1.0, 2.0, 4.0, 1.0], steps // 4)
    for t in range(steps):
        if t and factors[t] != factors[t - 1]:
            for name, base in bases.items():
                tensors[name].copy_(base * factors[t])
        average.update()
    expected = dense(rule, [steps])[steps] @ factors
    got = average.averaged_state_dict(dtype=torch.float32)
    for name, base in bases.items():
        torch.testing.assert_close(got[name], base.float() * expected, rtol=1e-5, atol=0)
    with average.average_parameters():
        for name, base in bases.items():
            torch.testing.assert_close(
                tensors[name].float(), base.float() * expected, rtol=4e-3, atol=0
            )
    assert all(torch.equal(tensors[name], base) for name, base in bases.items())


# Everything at once


def test_a_model_of_all_kinds_at_once_goes_through_the_whole_surface(tmp_path):
    rule, model = AnytimeWindow(30), Odd()
    outer = torch.compile(model, backend="eager")
    average, history = ParameterAverage(outer, rule, update_every=2), History(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    handle = average.attach(optimizer)
    frozen = bits(model.frozen)
    for step in range(120):
        for part in range(2):  # gradient accumulation
            outer(*odd_batch(2 * step + part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            history.record()
    handle.remove()
    assert average.count == 60
    expected = history.average(rule)
    assert all(np.isfinite(values).all() for values in expected.values())
    assert frozen == bits(model.frozen)

    # state dicts
    got = average.averaged_state_dict()
    assert list(got) == list(model.state_dict())
    assert_averages(got, {n: x for n, x in expected.items() if n in got})
    for name, tensor in model.state_dict().items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or (
            not tensor.numel()
        ), name
    assert got["steps"] == model.steps == 240
    assert got["norm.num_batches_tracked"] == 240
    assert bits(average.full_state_dict()) == bits(got)
    wider = average.averaged_state_dict(dtype=torch.float64)
    assert wider["low.weight"].dtype == torch.float64
    assert wider["steps"].dtype == torch.int64
    np.testing.assert_allclose(wide(wider["low.weight"]), expected["low.weight"], rtol=4e-6)

    # swaps
    before, grads = bits(model), {n: p.grad for n, p in named(model).items()}
    strides = {name: p.stride() for name, p in named(model).items()}
    averaged = Odd(compiled=False).eval()
    averaged.load_state_dict({name.replace("_orig_mod.", ""): x for name, x in got.items()})
    averaged.cache.copy_(model.cache)
    model.eval()
    batch = odd_batch(5)
    with torch.no_grad():
        training_output = outer(*batch)
        model.steps -= 1
        with average.average_parameters():
            assert_same_values(named(model), named(averaged))
            torch.testing.assert_close(outer(*batch), averaged(*batch))
            assert {name: p.stride() for name, p in named(model).items()} == strides
            assert model.head.weight is model.embed.weight
            model.train()
            outer(*batch)
        assert bits(model) == before
        assert {n: p.grad for n, p in named(model).items()} == grads
        model.eval()
        torch.testing.assert_close(outer(*batch), training_output, rtol=0, atol=0)

    # another model, files, states
    for other in (Odd(seed=1), Odd(seed=1, compiled=False)):
        average.copy_to(other)
        assert_same_values(named(other), named(averaged))
    got = average.averaged_state_dict()
    average.save_averaged(tmp_path / "averaged.safetensors")
    on_disk = safetensors.torch.load_file(tmp_path / "averaged.safetensors")
    assert on_disk.keys() <= got.keys()
    missing = got.keys() - on_disk.keys()
    assert missing <= {"head.weight", "embed.weight"}, "only a tied name may be left out"
    for name, tensor in on_disk.items():
        assert bits({"": tensor}) == bits({"": got[name]}), name
    state = saved(average.state_dict())
    assert saved(state)["count"] == 60
    resumed = ParameterAverage(Odd(seed=2, compiled=False), rule, update_every=2)
    resumed.load_state_dict(state)
    assert snapshot(resumed.state_dict()) == snapshot(average.state_dict())


def assert_same_values(one, other) -> None:
    """By name, where a compiled part has a name of its own."""
    plain = {name.replace("_orig_mod.", ""): tensor for name, tensor in other.items()}
    for name, tensor in one.items():
        assert bits({"": tensor}) == bits({"": plain[name.replace("_orig_mod.", "")]}), name


def test_names_are_those_of_the_model_without_its_wrappers():
    plain = small()
    wrapped = {
        "compiled": torch.compile(plain, backend="eager"),
        "parallel": nn.DataParallel(plain),
        "both": torch.compile(nn.DataParallel(plain), backend="eager"),
        "around": nn.DataParallel(torch.compile(plain, backend="eager")),
    }
    reference, _, _ = walked(plain, 10, 5)
    for name, model in wrapped.items():
        average, _, _ = walked(model, 10, 5)
        assert list(average.averaged_state_dict()) == list(plain.state_dict()), name
        assert snapshot(average.state_dict()) == snapshot(reference.state_dict()), name
        other = small(seed=3)
        average.copy_to(nn.DataParallel(other))
        assert bits(named(other)) == bits(
            {n: x for n, x in average.averaged_state_dict().items() if n in named(other)}
        )


def test_a_users_own_submodule_called_module_keeps_its_name():
    class Holder(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.module = inner

        def forward(self, x):
            return self.module(x)

    model = Holder(Holder(nn.Linear(2, 2)))
    names = ["module.module.weight", "module.module.bias"]
    for outer in (model, nn.DataParallel(model), torch.compile(model, backend="eager")):
        average, _, _ = walked(outer, 10, 3)
        assert list(average.averaged_state_dict()) == names
        assert list(average.state_dict()["partial"]) == names


def test_tied_parameters_are_kept_once_under_any_of_their_names():
    model = Odd()
    average, _, _ = walked(model, 10, 5)
    state = average.state_dict()
    kept = [name for name in state["partial"] if name in ("embed.weight", "head.weight")]
    assert len(kept) == 1
    other = {"embed.weight": "head.weight", "head.weight": "embed.weight"}[kept[0]]

    def renamed(tensors):
        return {other if name == kept[0] else name: x for name, x in tensors.items()}

    alias = state | {
        "blocks": [renamed(block) for block in state["blocks"]],
        "partial": renamed(state["partial"]),
    }
    fresh = ParameterAverage(Odd(seed=4), 10)
    fresh.load_state_dict(saved(alias))
    assert snapshot(fresh.state_dict()) == snapshot(state)
    got = average.averaged_state_dict()
    assert bits({"": got["embed.weight"]}) == bits({"": got["head.weight"]})


def test_tensors_may_come_as_pairs_or_as_a_mapping_and_tied_ones_twice():
    shared = torch.ones(2)
    tensors = {"a": shared, "b": torch.zeros(3), "c": shared}
    for given_tensors in (tensors, list(tensors.items()), iter(tensors.items())):
        average = ParameterAverage(given_tensors, 10)
        average.update()
        shared.add_(2)
        average.update()
        got = average.averaged_state_dict()
        assert list(got) == ["a", "b", "c"]
        assert got["a"].tolist() == got["c"].tolist() == [2.0, 2.0]
        assert len(average.state_dict()["partial"]) == 2
        with average.average_parameters():
            assert shared.tolist() == [2.0, 2.0]
        assert shared.tolist() == [3.0, 3.0]
        shared.fill_(1.0)


def test_a_name_that_comes_twice_is_an_error():
    with pytest.raises(ValueError, match=r"\bweight\b"):
        ParameterAverage([("weight", torch.ones(2)), ("weight", torch.zeros(2))], 10)


def test_parameters_of_a_module_come_as_named_pairs_too():
    model = small()
    by_pairs, by_model = ParameterAverage(model.named_parameters(), 10), ParameterAverage(model, 10)
    walk = Walk(model)
    for _ in range(25):
        walk.step()
        by_pairs.update()
        by_model.update()
    got = by_pairs.averaged_state_dict()
    assert list(got) == [name for name, _ in model.named_parameters()]
    assert bits(got).items() <= bits(by_model.averaged_state_dict()).items()
    other = small(seed=5)
    by_pairs.copy_to(other)
    assert bits(named(other)) == bits(got)


def test_nothing_to_average_and_nothing_but_empty_tensors():
    with pytest.raises(ValueError, match="at least one"):
        ParameterAverage(nn.Sequential(nn.Tanh()), 10)
    average = ParameterAverage({"none": torch.zeros(0, 3)}, 10)
    for _ in range(20):
        average.update()
    assert average.averaged_state_dict()["none"].shape == (0, 3)
    with average.average_parameters():
        pass


# What is averaged


def test_patterns_choose_what_is_averaged_and_the_rest_keeps_its_current_value():
    model = small()
    names = [name for name, _ in model.named_parameters()]
    chosen = {
        "include 0.*": ({"include": "0.*"}, {"0.weight", "0.bias"}),
        "include several": (
            {"include": ["0.weight", "*.bias"]},
            {"0.weight", "0.bias", "1.bias", "3.bias"},
        ),
        "exclude": ({"exclude": "*.bias"}, {n for n in names if not n.endswith("bias")}),
        "both": ({"include": "0.*", "exclude": ("*bias",)}, {"0.weight"}),
        "callable": ({"include": lambda name: name == "3.weight"}, {"3.weight"}),
        "excluding callable": ({"exclude": lambda name: name != "3.weight"}, {"3.weight"}),
    }
    for case, (options, kept) in chosen.items():
        average, _, history = walked(model, 10, 40, **options)
        assert set(average.state_dict()["partial"]) == kept, case
        expected, got = history.average(average.rule), average.averaged_state_dict()
        assert list(got) == list(model.state_dict())
        assert_averages(got, {name: expected[name] for name in kept})
        before = bits(model)
        with average.average_parameters():
            assert_averages(named(model), {name: expected[name] for name in kept})
            for name in set(names) - kept:
                assert bits({name: named(model)[name]}).items() <= before.items()
                assert bits({name: got[name]}).items() <= before.items()
        assert bits(model) == before


def test_what_is_left_out_follows_the_model_when_a_state_moves_on():
    model = small()
    average, walk, _ = walked(model, 10, 5, exclude="0.*")
    walk.step()  # no update: outputs still have the present value
    assert bits(average.averaged_state_dict())["0.weight"] == bits(model)["0.weight"]


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(option):
    for patterns in ("haed.*", ["0.*", "haed.*"]):
        with pytest.raises(ValueError, match="haed"):
            ParameterAverage(small(), 10, **{option: patterns})
    for wrong in (3, [4]):
        with pytest.raises((TypeError, ValueError)):
            ParameterAverage(small(), 10, **{option: wrong})


def test_a_parameter_whose_elements_share_memory_is_refused_by_name():
    model = small()
    model.shared = nn.Parameter(torch.ones(1).expand(3))
    with pytest.raises(ValueError, match="shared"):
        ParameterAverage(model, 10)
    assert ParameterAverage(model, 10, exclude="shared").count == 0


@pytest.mark.parametrize("buffers", ["copy", "skip"])
def test_a_buffer_whose_elements_share_memory_is_copied(buffers):
    """Masks are often made with `expand`."""
    model = small()
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    model.register_buffer("position_ids", torch.arange(5).expand((1, -1)))
    average, _, _ = walked(model, 10, 25, buffers=buffers)
    before = bits(model)
    with average.average_parameters():
        assert bits(model) != before
    assert bits(model) == before
    assert bits(average.averaged_state_dict())["mask"] == before["mask"]
    average.update()


def test_parameters_of_eight_bits_are_averaged():
    weight = torch.ones(3).to(torch.float8_e4m3fn)
    average = ParameterAverage({"w": weight}, AnytimeWindow(1.0))
    for value in (1.0, 2.0, 2.0, 1.0):
        weight.copy_(torch.full((3,), value))
        average.update()
    assert average.averaged_state_dict(dtype=torch.float32)["w"].tolist() == [1.5] * 3
    assert average.averaged_state_dict()["w"].dtype == torch.float8_e4m3fn
    with average.average_parameters():
        assert weight.float().tolist() == [1.5] * 3
    assert weight.float().tolist() == [1.0] * 3


def test_parameters_without_a_shape_are_refused_by_name():
    with pytest.raises(ValueError, match=r"0\.weight"):
        ParameterAverage(nn.Sequential(nn.LazyLinear(3)), 10)


def test_everything_excluded_is_an_error():
    with pytest.raises(ValueError, match="exclude"):
        ParameterAverage(small(), 10, exclude="*")


def batches(model, steps: int, seed: int = 0):
    """Forward passes that move BatchNorm's statistics."""
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.rand(6, 3, generator=random))
        yield


def test_buffers_are_copied_unless_asked_otherwise():
    model = small()
    average = ParameterAverage(model, 10)
    for _ in batches(model, 20):
        average.update()
    current = {name: b.clone() for name, b in model.named_buffers()}
    got = average.averaged_state_dict()
    assert bits({n: got[n] for n in current}) == bits(current)
    before = bits(model)
    with average.average_parameters():
        assert bits(dict(model.named_buffers())) == bits(current)
        for _ in batches(model, 3, seed=1):
            pass
        assert bits(dict(model.named_buffers())) != bits(current)
    assert bits(model) == before, "what BatchNorm did inside stays inside"
    other = small(seed=2)
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == bits(current)


def test_buffers_may_be_averaged():
    model, rule = small(), AnytimeWindow(10)
    average, history = ParameterAverage(model, rule, buffers="average"), History()
    for _ in batches(model, 50):
        average.update()
        history.record(dict(model.named_buffers()) | named(model))
    expected = history.average(rule)
    got = average.averaged_state_dict()
    assert_averages(got, expected)
    assert int(got["1.num_batches_tracked"]) == 50
    assert {"1.running_mean", "1.running_var"} < set(average.state_dict()["partial"])
    before = bits(model)
    with average.average_parameters():
        assert_averages(dict(model.named_buffers()), {n: expected[n] for n in ("1.running_mean",)})
        assert int(model[1].num_batches_tracked) == 50
        for _ in batches(model, 3, seed=1):
            pass
    assert bits(model) == before
    other = small(seed=2)
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == bits(
        {n: got[n] for n in dict(model.named_buffers())}
    )


def test_buffers_may_be_left_alone():
    model = small()
    average = ParameterAverage(model, 10, buffers="skip")
    for _ in batches(model, 20):
        average.update()
    got, current = average.averaged_state_dict(), dict(model.named_buffers())
    assert list(got) == list(model.state_dict())
    assert bits({n: got[n] for n in current}) == bits(current)
    before = bits(current)
    with average.average_parameters():
        for _ in batches(model, 3, seed=1):
            pass
        inside = bits(current)
        assert inside != before
    assert bits(current) == inside, "skipped: a swap does not touch them"
    other = small(seed=2)
    fresh = bits(dict(other.named_buffers()))
    average.copy_to(other)
    assert bits(dict(other.named_buffers())) == fresh


def test_buffers_outside_of_the_state_dict_go_along_with_swaps_and_copies():
    model = Odd()
    average, _, _ = walked(model, 10, 3)
    assert "cache" not in average.averaged_state_dict()
    before = bits(model)
    with average.average_parameters():
        model.cache.fill_(7.0)
        model.steps.fill_(7)
    assert bits(model) == before
    other = Odd(seed=3)
    average.copy_to(other)
    assert bits({"": other.cache}) == bits({"": model.cache})


def test_a_buffer_replaced_inside_a_swap_is_put_back():
    """`self.steps = self.steps + 1` binds a new tensor, as many models do."""
    model = Odd()
    average, _, _ = walked(model, 10, 3)
    before = bits(model)
    with average.average_parameters():
        model.steps = model.steps + 1
        model.norm.running_mean = torch.full((4,), 9.0)
    assert bits(model) == before
    average.update()


def test_a_buffer_may_change_its_shape_between_swaps():
    """A cache that grows is copied, not averaged: it is whatever it is."""
    model = Odd()
    average, walk, _ = walked(model, 10, 3)
    model.cache = torch.rand(9)
    model.nothing = torch.rand(2)
    walk.step()
    average.update()
    before = bits(model)
    with average.average_parameters():
        model.cache = torch.rand(2)
    assert bits(model) == before


# When it counts


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
        with pytest.raises(RuntimeError, match="update"):
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


# Swaps


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_is_raised_inside_the_training_weights_come_back(error):
    model = small()
    average, _, _ = walked(model, 10, 30)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
        model[0].weight[0, 1] = -0.0
    before, state = bits(model), snapshot(average.state_dict())

    def evaluate():
        with average.average_parameters():
            assert bits(model) != before
            nn.init.zeros_(model[0].weight)
            raise error("inside")

    with pytest.raises(error, match="inside"):
        evaluate()
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state
    average.update()


@pytest.mark.parametrize(
    ("error", "make"),
    [(RuntimeError, small), (KeyboardInterrupt, Odd)],
    ids=["out of memory", "^C"],
)
def test_an_error_while_swapping_in_leaves_the_training_weights(error, make):
    """Stopped at each operation on tensors in turn, until a swap comes through whole."""
    model = make()
    average, _, _ = walked(model, AnytimeWindow(10, 4), 35)
    before = bits(model)
    for n in range(1, 2000):
        swapping = average.average_parameters()
        try:
            with FailAt(n, error):
                swapping.__enter__()
        except error:
            assert bits(model) == before, n
            state = average.state_dict()  # not while swapped: so it is not
            assert state["count"] == 35
        else:
            assert bits(model) != before
            swapping.__exit__(None, None, None)
            break
    else:
        pytest.fail("a swap takes more than 2000 operations?")
    assert n > 3
    assert bits(model) == before


def test_an_interrupted_restore_can_be_taken_up_again():
    model = Odd()
    average, _, _ = walked(model, 10, 35)
    before = bits(model)
    for n in range(1, 2000):
        average.store()
        average.copy_to()
        try:
            with FailAt(n, KeyboardInterrupt):
                average.restore()
        except KeyboardInterrupt:
            average.restore()
            assert bits(model) == before, n
        else:
            break
    assert n > 3
    assert bits(model) == before


def test_a_generator_that_swaps_and_is_dropped_puts_the_weights_back():
    model = small()
    average, _, _ = walked(model, 10, 30)
    before = bits(model)

    def evaluate():
        with average.average_parameters():
            yield 1
            yield 2

    running = evaluate()
    assert next(running) == 1
    assert bits(model) != before
    running.close()
    assert bits(model) == before


def test_store_copy_and_restore_are_the_swap_in_parts():
    model = small()
    average, _, history = walked(model, 10, 30)
    before, expected = bits(model), history.average(average.rule)
    average.store()
    assert bits(model) == before
    average.copy_to()
    assert_averages(named(model), expected)
    average.restore()
    assert bits(model) == before
    with pytest.raises(RuntimeError, match="store"):
        average.restore()
    average.copy_to()  # for good: training goes on from the average
    assert_averages(named(model), expected)
    average.update()
    assert average.count == 31


def test_while_swapped_in_neither_updates_nor_states_nor_other_swaps_are_allowed():
    model = small()
    average, _, _ = walked(model, 10, 30)
    state = saved(average.state_dict())
    for swap in (average.average_parameters, stored_of(average)):
        with swap():
            inside = bits(model)
            forbidden = [
                average.update,
                average.state_dict,
                lambda: average.load_state_dict(state),
                average.store,
                lambda: average.average_parameters().__enter__(),
            ]
            for call in forbidden:
                with pytest.raises(RuntimeError, match=r"swap|restore|store"):
                    call()
                assert bits(model) == inside
            assert average.count == 30
        assert snapshot(average.state_dict()) == snapshot(state)


def stored_of(average):
    class Stored:
        def __enter__(self):
            average.store()
            average.copy_to()

        def __exit__(self, *error):
            average.restore()

    return Stored


def test_outputs_can_be_made_while_swapped_in(tmp_path):
    """Evaluation scripts save from inside; the averages are the same there."""
    model = small()
    average, _, _ = walked(model, 10, 30)
    outside = bits(average.averaged_state_dict())
    with average.average_parameters():
        assert bits(average.averaged_state_dict()) == outside
        average.save_averaged(tmp_path / "inside.safetensors")
        assert average.profile().count == average.count == 30
        assert bits(model.state_dict()) == outside
    assert bits(safetensors.torch.load_file(tmp_path / "inside.safetensors")) == outside


def test_reading_or_swapping_before_the_first_update_is_an_error(tmp_path):
    model = small()
    average, before = ParameterAverage(model, 10), bits(model)
    for call in (
        average.averaged_state_dict,
        average.full_state_dict,
        average.copy_to,
        lambda: average.copy_to(small(seed=2)),
        lambda: average.average_parameters().__enter__(),
        lambda: average.save_averaged(tmp_path / "none.safetensors"),
        average.profile,
    ):
        with pytest.raises((RuntimeError, ValueError), match="update"):
            call()
        assert bits(model) == before
    with pytest.raises(RuntimeError):
        average.restore()
    assert list(tmp_path.iterdir()) == []
    assert average.count == 0
    average.update()
    assert bits(average.averaged_state_dict()) == bits(model.state_dict())


def test_a_swap_keeps_the_objects_gradients_and_the_graph_to_come():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(6, 3)).square().mean().backward()
    optimizer.step()
    average, _, _ = walked(model, 10, 30)
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    with average.average_parameters():
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(p.requires_grad and p.is_leaf for p in parameters)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    model(torch.rand(6, 3)).square().mean().backward()
    optimizer.step()


def test_two_averages_over_one_model_swap_inside_each_other():
    model = small()
    short_average, long_average = (
        ParameterAverage(model, 3),
        ParameterAverage(model, Exponential(50)),
    )
    walk, history = Walk(model), History(model)
    for _ in range(60):
        walk.step()
        short_average.update()
        long_average.update()
        history.record()
    before = bits(model)
    with short_average.average_parameters():
        outer = bits(model)
        assert_averages(named(model), history.average(short_average.rule))
        with long_average.average_parameters():
            assert_averages(named(model), history.average(long_average.rule))
        assert bits(model) == outer
    assert bits(model) == before


def test_copies_go_by_name_into_a_model_with_its_modules_in_another_order():
    class Net(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(2, 2))

    average, _, _ = walked(Net(["a", "b", "c"]), 10, 20)
    other = Net(["c", "a", "b"])
    average.copy_to(other)
    assert bits(other.state_dict()) == bits(average.averaged_state_dict())
    resumed = ParameterAverage(other, 10)
    resumed.load_state_dict(saved(average.state_dict()))
    assert bits(resumed.averaged_state_dict()) == bits(average.averaged_state_dict())


def test_a_copy_into_a_model_that_does_not_match_names_it_and_writes_nothing():
    average, _, _ = walked(small(), 10, 20)
    smaller = small()[:2]
    misshapen = small(seed=1)
    misshapen[3] = nn.Linear(4, 7)
    for other, name in ((smaller, "3.weight"), (misshapen, "3.weight")):
        before = bits(other)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            average.copy_to(other)
        assert bits(other) == before


class Pair(nn.Module):
    """Two layers, or one under two names."""

    def __init__(self, tied):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a if tied else nn.Linear(2, 2)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_into_a_model_with_other_ties_is_refused_by_name(tied):
    """One tensor cannot hold two averages; of two, neither may be left out silently."""
    average, _, _ = walked(Pair(tied), 10, 25)
    other = Pair(not tied)
    before = bits(other)
    with pytest.raises(ValueError, match=r"[ab]\.weight"):
        average.copy_to(other)
    assert bits(other) == before


def test_a_copy_into_a_model_of_another_type_is_rounded_to_it():
    average, _, history = walked(small(), 10, 20)
    other = small(seed=2).to(torch.bfloat16)
    average.copy_to(other)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert_averages(named(other), history.average(average.rule))
    other = small(seed=2).double()
    average.copy_to(other)
    assert {p.dtype for p in other.parameters()} == {torch.float64}


# States


def test_saving_a_state_changes_no_later_bit():
    for rule in (AnytimeWindow(300), AnytimeWindow(0.2), Exponential(0.25), RawTail(0.5, 500)):
        tensors = tensors_of()
        saving, plain = ParameterAverage(tensors, rule), ParameterAverage(tensors, rule)
        random = torch.Generator().manual_seed(0)
        for _ in range(700):
            for tensor in tensors.values():
                tensor.copy_(torch.rand(3, generator=random))
            saving.update()
            plain.update()
            saving.state_dict()
        assert snapshot(saving.state_dict()) == snapshot(plain.state_dict())


def test_a_state_is_plain_data_in_the_one_layout():
    model = small()
    average, _, _ = walked(model, AnytimeWindow(10, 4), 12)
    state = average.state_dict()
    plain = TailAverage(AnytimeWindow(10, 4))
    plain.update_many(np.zeros(12))
    reference = plain.state_dict()
    for key in ("format", "version", "rule", "count", "starts"):
        assert state[key] == reference[key], key
    assert set(state) >= set(reference) | {"calls"}
    assert len(state["blocks"]) == 4
    names = [name for name, _ in model.named_parameters()]
    for held in (*state["blocks"], state["partial"]):
        assert list(held) == names
        assert all(x.shape == named(model)[n].shape for n, x in held.items())

    def check(value):
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (str, int, float, bool, torch.Tensor), value

    check(state)


def test_a_fresh_state_has_every_tensor_so_that_it_can_be_loaded_into():
    fresh = ParameterAverage(small(), AnytimeWindow(10, 4))
    state = fresh.state_dict()
    assert (state["count"], len(state["blocks"])) == (0, 4)
    assert all(list(block) == list(state["partial"]) for block in state["blocks"])
    used, _, _ = walked(small(), AnytimeWindow(10, 4), 33)
    used.load_state_dict(saved(state))
    assert used.count == 0
    with pytest.raises(RuntimeError, match="update"):
        used.averaged_state_dict()
    used.update()
    assert used.count == 1


def test_a_state_loaded_from_an_average_that_goes_on_is_a_copy():
    model = small()
    average, walk, _ = walked(model, 10, 33)
    other = ParameterAverage(small(seed=1), 10)
    other.load_state_dict(average.state_dict())
    before = snapshot(other.state_dict())
    for _ in range(20):
        walk.step()
        average.update()
    assert snapshot(other.state_dict()) == before
    average.load_state_dict(average.state_dict())  # its own: nothing changes
    assert average.count == 53


def test_a_state_that_does_not_fit_is_refused_by_name_and_changes_nothing():
    model, rule = small(), AnytimeWindow(10)
    average, _, _ = walked(model, rule, 33)
    good = saved(average.state_dict())
    before = snapshot(average.state_dict())
    taller = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    larger = small().append(nn.Linear(2, 2))

    def state_of(other, other_rule=rule):
        return walked(other, other_rule, 33)[0].state_dict()

    def without(held, name):
        return {key: x for key, x in held.items() if key != name}

    wrong = {
        "another shape": (state_of(taller), r"3\.weight"),
        "unexpected name": (state_of(larger), r"4\.weight"),
        "missing name": (state_of(small()[:2]), r"3\.weight"),
        "missing in one block": (
            good | {"blocks": [without(good["blocks"][0], "1.bias"), *good["blocks"][1:]]},
            r"1\.bias",
        ),
        "missing in the partial sum": (
            good | {"partial": without(good["partial"], "1.bias")},
            r"1\.bias",
        ),
        "another window": (state_of(small(), AnytimeWindow(11)), "11"),
        "other turns": (state_of(small(), AnytimeWindow(10, 4)), "accumulators"),
        "another rule": (state_of(small(), Exponential(10)), "Exponential"),
        "another version": (good | {"version": 2}, "version"),
        "another format": (good | {"format": "other"}, "format"),
        "no count": (without(good, "count"), "count"),
        "too few blocks": (good | {"blocks": good["blocks"][1:]}, "block"),
        "sizes that do not add up": (good | {"starts": [0, 1, 2]}, "start"),
        "a negative count": (good | {"count": -1}, "count|start"),
        "folded later than counted": (good | {"folded": 34}, "folded"),
        "a tensor of another type": (
            good | {"partial": {name: x.half() for name, x in good["partial"].items()}},
            "float16",
        ),
        "a name that is no tensor": (
            good | {"partial": good["partial"] | {"1.bias": 3}},
            r"1\.bias",
        ),
        "not a dict": ([1, 2], "dict"),
    }
    for case, (state, match) in wrong.items():
        with pytest.raises(ValueError, match=match):
            average.load_state_dict(state)
        assert snapshot(average.state_dict()) == before, case
        assert average.count == 33, case


def test_a_state_of_other_accumulators_is_refused():
    for first, second in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        average, _, _ = walked(small(), 10, 33, dtype=first)
        other = ParameterAverage(small(), 10, dtype=second)
        with pytest.raises(ValueError, match="float64"):
            other.load_state_dict(saved(average.state_dict()))
        assert other.count == 0


def training_run(path, steps, killed):
    """Train and average, saving all there is at times; go on from what is saved."""
    model = Odd(compiled=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    average, first = ParameterAverage(model, 0.3, update_every=2), 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        average.load_state_dict(state["average"])
        first = state["step"]
    average.attach(optimizer)
    for step in range(first, steps):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        if step % 31 == 30:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"average": average.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    average.save_averaged(path.with_suffix(".safetensors"))


def test_a_run_that_is_killed_and_resumed_ends_as_one_that_never_stopped(tmp_path):
    for name, steps, killed in (("a", 75, True), ("a", 130, False), ("b", 130, False)):
        path = tmp_path / f"{name}.pt"
        assert exit_code(training_run, path, steps, killed) == (-signal.SIGKILL if killed else 0)
    resumed, whole = (
        safetensors.torch.load_file(tmp_path / f"{name}.safetensors") for name in "ab"
    )
    assert bits(resumed) == bits(whole)


# Parameters that are replaced


def replaced_weight(model):
    model[0].weight = nn.Parameter(torch.full((4, 3), 5.0))


def assigned_state(model):
    model.load_state_dict(small(seed=9).state_dict(), assign=True)


def new_data(model):
    model[0].weight.data = torch.full((4, 3), 5.0)


def new_submodule(model):
    model[0] = nn.Linear(3, 4)


def doubled(model):
    model.to(torch.float64)


def halved(model):
    model.to(torch.bfloat16)


def transposed(model):
    model[0].weight.data = torch.full((3, 4), 5.0).t()


def parametrized(model):
    """torch's own way to recompute a weight: its parameters get other names."""
    torch.nn.utils.parametrizations.weight_norm(model[0])


@pytest.mark.parametrize(
    "change",
    [replaced_weight, assigned_state, new_data, new_submodule, doubled, halved, transposed],
)
@pytest.mark.parametrize("rule", [AnytimeWindow(10), Exponential(10)], ids=short)
def test_a_replaced_parameter_is_noticed(rule, change):
    model = small()
    average, walk, history = walked(model, rule, 25)
    change(model)
    before = bits(model)
    with average.average_parameters():  # a swap before the next update
        assert_averages(named(model), history.average(rule))
        assert bits(model) != before
    assert bits(model) == before
    for _ in range(4):
        average.update()  # the new values count at once
        history.record()
        assert_averages(average.averaged_state_dict(), history.average(rule))
        walk.step()
    got = average.averaged_state_dict()
    assert {n: x.dtype for n, x in got.items()} == {
        n: x.dtype for n, x in model.state_dict().items()
    }
    before = bits(model)
    with average.average_parameters():
        assert bits(model) != before
    assert bits(model) == before
    assert model[0].weight.requires_grad


def test_a_change_of_memory_format_is_noticed():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 3, 3))
    average, walk, history = walked(model, 10, 15)
    for memory_format in (torch.channels_last, torch.contiguous_format):
        model.to(memory_format=memory_format)
        for _ in range(15):
            walk.step()
            average.update()
            history.record()
        assert_averages(average.averaged_state_dict(), history.average(average.rule))
        before = bits(model)
        with average.average_parameters():
            assert_averages(named(model), history.average(average.rule))
            assert model[0].weight.is_contiguous(memory_format=memory_format)
        assert bits(model) == before


def test_new_data_of_a_plain_tensor_is_noticed_too():
    weight = nn.Parameter(torch.ones(3))
    average = ParameterAverage({"w": weight}, AnytimeWindow(1.0))
    average.update()
    weight.data = torch.full((3,), 2.0)
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [1.5, 1.5, 1.5]
    weight.data = torch.ones(4)
    with pytest.raises(ValueError, match="w"):
        average.update()


def taller(model):
    model[3] = nn.Linear(4, 3)


def longer(model):
    model.append(nn.Linear(2, 2))


def shorter(model):
    del model[3]


def without_bias(model):
    model[0].bias = None


def with_new_parameter(model):
    model[2].gain = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (taller, "3.weight"),
        (longer, "4.weight"),
        (shorter, "3.weight"),
        (without_bias, "0.bias"),
        (with_new_parameter, "2.gain"),
        (parametrized, "0.weight|0.parametrizations"),
    ],
)
def test_parameters_that_changed_shape_appeared_or_vanished_raise_by_name(change, name):
    model = small()
    average, _, _ = walked(model, 10, 25)
    live = average.state_dict()
    state = snapshot(live)
    change(model)
    before = bits(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            call()
        assert bits(model) == before
        assert average.count == 25
        assert snapshot(live) == state


def test_a_change_that_is_undone_is_forgiven():
    model = small()
    average, walk, history = walked(model, 10, 25)
    old = model[3]
    model[3] = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"3\.weight"):
        average.update()
    model[3] = old
    for _ in range(10):
        walk.step()
        average.update()
        history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule))


def test_a_module_that_is_replaced_where_the_old_one_was_in_memory_is_noticed():
    """Python gives the place of a deleted object to the next one: an id is no proof."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    model = Net()
    average = ParameterAverage(model, AnytimeWindow(1))
    average.update()
    for value in range(50):
        del model.head
        model.head = nn.Linear(4, 2)
        nn.init.constant_(model.head.weight, value)
        average.update()
        assert (average.averaged_state_dict()["head.weight"] == value).all()
        with average.average_parameters():
            nn.init.zeros_(model.head.weight)
        assert (model.head.weight == value).all()


@pytest.mark.parametrize(
    "cut", [lambda x: x[:1], lambda x: x[:, :1], lambda x: x[0, :1], lambda x: x.t()]
)
def test_a_shape_that_changes_at_the_same_place_in_memory_is_noticed(cut):
    """Such a tensor may even broadcast into its accumulator."""
    model = small()
    average, _, _ = walked(model, 10, 25)
    model[0].weight.data = cut(model[0].weight.data)
    before = bits(model)
    for call in (average.update, lambda: average.average_parameters().__enter__(), average.copy_to):
        with pytest.raises(ValueError, match=r"0\.weight"):
            call()
        assert average.count == 25
        assert bits(model) == before


def test_a_layout_that_changes_at_the_same_place_in_memory_is_noticed():
    weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    average = ParameterAverage({"w": weight}, AnytimeWindow(1))
    average.update()
    weight.data = weight.data.t()
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    with average.average_parameters():
        assert weight.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_a_type_that_changes_at_the_same_place_in_memory_is_noticed():
    memory = torch.full((4,), 2.0)
    weight = nn.Parameter(memory)
    average = ParameterAverage({"w": weight}, AnytimeWindow(1))
    average.update()
    weight.data = torch.zeros(0)
    halves = memory.view(torch.bfloat16)[:4]
    halves.fill_(3.0)
    weight.data = halves
    average.update()
    assert average.averaged_state_dict()["w"].tolist() == [3.0] * 4


def test_a_tie_that_is_broken_or_made_is_noticed_or_refused():
    """After the untying the two have two averages: one accumulator cannot hold them."""
    model = Odd()
    average, _, _ = walked(model, 10, 5)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"head\.weight|embed\.weight"):
        average.update()
    assert average.count == 5


MOVES = {
    "double": lambda model: model.double(),
    "new data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "assigned": lambda model: model.load_state_dict(
        {name: x.clone() for name, x in model.state_dict().items()}, assign=True
    ),
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_model_that_is_moved_or_converted_inside_a_swap_gets_its_weights_back(move):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    average, walk, history = walked(model, 10, 25)
    before = {name: wide(x) for name, x in model.state_dict().items()}
    with average.average_parameters():
        move(model)
        assert_averages(named(model), history.average(average.rule), torch.float32)
    after = {name: wide(x) for name, x in model.state_dict().items()}
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, err_msg=name)
    walk.step()
    average.update()
    history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule), torch.float32)


def test_what_changes_its_shape_inside_a_swap_comes_back_too():
    def grown(model):
        model.cache = torch.ones(9)

    def resized(model):
        model.cache.resize_(9)

    def dropped(model):
        model.cache = None

    def unbiased(model):
        model.module.bias = None

    def reshaped(model):
        model.module.bias = nn.Parameter(torch.zeros(3))

    for change in (grown, resized, dropped, unbiased, reshaped):
        model = Odd()
        average, _, _ = walked(model, 10, 25)
        before = bits(model)
        with average.average_parameters():
            change(model)
        assert bits(model) == before, change.__name__
        with pytest.raises(RuntimeError, match="store"):
            average.restore()
        average.update()
        assert average.count == 26


def test_a_parameter_replaced_inside_a_swap_does_not_spoil_the_others():
    model = small()
    average, _, _ = walked(model, 10, 25)
    before = bits(model)
    with average.average_parameters():
        model[0].weight = nn.Parameter(torch.zeros(4, 3))
    after = bits(model)
    assert {n: x for n, x in after.items() if n != "0.weight"} == {
        n: x for n, x in before.items() if n != "0.weight"
    }
    assert after["0.weight"] == before["0.weight"]


# Modes and devices


def test_any_call_may_be_made_in_inference_mode():
    model, reference = small(), small()
    with torch.inference_mode():
        average = ParameterAverage(model, 10)
        average.update()
        for _ in batches(model, 2):
            pass
    expected = ParameterAverage(reference, 10)
    expected.update()
    list(batches(reference, 2))
    for turn in range(40):
        for net, one, mode in ((model, average, True), (reference, expected, False)):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.1 * turn)
            with torch.inference_mode(mode and turn % 2 == 0):
                one.update()
                with one.average_parameters():
                    net.eval()(torch.ones(2, 3))
                    net.train()
                one.store()
                one.copy_to()
                one.restore()
                got = one.averaged_state_dict()
                one.load_state_dict(saved(one.state_dict()))
                one.to("cpu")
        assert not any(p.is_inference() for p in model.parameters())
        model(torch.rand(6, 3)).sum().backward()
        reference(torch.rand(6, 3)).sum().backward()
    assert snapshot(average.state_dict()) == snapshot(expected.state_dict())
    assert bits(named(model)) == bits(named(reference))
    assert got.keys() == model.state_dict().keys()


def test_defaults_that_are_set_elsewhere_do_not_matter():
    model = small()
    expected, _, _ = walked(small(), 10, 30)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu"), torch.enable_grad():
            average = ParameterAverage(model, 10)
            walk = Walk(model)
            for _ in range(30):
                with torch.device("cpu"):
                    walk.step()
                average.update()
            got = average.averaged_state_dict()
            with average.average_parameters():
                inside = bits(named(model))
            average.load_state_dict(average.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(x.device.type == "cpu" and not x.requires_grad for x in got.values())
    reference = expected.averaged_state_dict()
    assert bits({n: got[n] for n in named(model)}) == bits({n: reference[n] for n in named(model)})
    assert inside.items() <= bits(got).items()


def test_an_average_leaves_random_numbers_and_gradients_alone():
    model = small()
    model(torch.rand(6, 3)).sum().backward()
    grads = {name: p.grad.clone() for name, p in named(model).items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    average = ParameterAverage(model, 3)
    for _ in range(300):
        average.update()
    with average.average_parameters():
        pass
    average.averaged_state_dict()
    average.load_state_dict(saved(average.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)
    assert bits({name: p.grad for name, p in named(model).items()}) == bits(grads)
    assert not any(x.requires_grad for x in flat_tensors(average.state_dict()))


def test_accumulators_may_be_kept_on_a_device_of_their_own():
    model = small()
    average, walk, history = walked(model, 10, 15, device="cpu")
    assert average.to("cpu") is average or average.to("cpu") is None
    average.to(torch.device("cpu"))
    for _ in range(15):
        walk.step()
        average.update()
        history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule))
    assert {x.device.type for x in flat_tensors(average.state_dict())} == {"cpu"}


def test_an_average_updates_next_to_a_graph_that_is_not_yet_walked_back():
    """Forward, update, backward: an update only reads the weights."""
    model = small(norm=False)
    average = ParameterAverage(model, 10)
    loss = model(torch.rand(6, 3)).square().mean()
    average.update()
    average.averaged_state_dict()
    loss.backward()


# Outputs


def test_outputs_are_fresh_and_free_of_the_model():
    model = small()
    average, _, _ = walked(model, 10, 25)
    before, state = bits(model), snapshot(average.state_dict())
    for outputs in (
        average.averaged_state_dict(),
        average.full_state_dict(),
        average.averaged_state_dict(dtype=torch.float64),
        average.averaged_state_dict(dtype=torch.float32),
    ):
        for tensor in outputs.values():
            assert not tensor.requires_grad
            tensor.fill_(9)
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state
    average, _, _ = walked(model, AnytimeWindow(1), 1)  # where the read is one accumulator
    for tensor in average.averaged_state_dict().values():
        tensor.fill_(9)
    assert bits(average.averaged_state_dict()) == bits(model.state_dict())


def test_a_saved_file_is_whole_or_not_there(tmp_path, monkeypatch):
    model = small()
    average, _, _ = walked(model, 10, 25)
    path = tmp_path / "averaged.safetensors"
    average.save_averaged(str(path))
    expected = bits(average.averaged_state_dict())
    assert bits(safetensors.torch.load_file(path)) == expected
    other = small(seed=2)
    other.load_state_dict(safetensors.torch.load_file(path))
    old = path.read_bytes()

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    average.update()
    with pytest.raises(OSError, match="disk full"):
        average.save_averaged(path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    average.save_averaged(path, dtype=torch.bfloat16)
    kinds = {name: x.dtype for name, x in safetensors.torch.load_file(path).items()}
    assert kinds.pop("1.num_batches_tracked") == torch.int64
    assert set(kinds.values()) == {torch.bfloat16}
    with pytest.raises(FileNotFoundError):
        average.save_averaged(tmp_path / "no such folder" / "averaged.safetensors")


def test_a_file_has_tied_and_transposed_tensors_too(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.rand(2, 2).t())
    average, _, history = walked(model, 10, 25)
    average.save_averaged(tmp_path / "averaged.safetensors")
    on_disk = safetensors.torch.load_file(tmp_path / "averaged.safetensors")
    assert set(on_disk) == set(model.state_dict())
    assert_averages(on_disk, history.average(average.rule))


def test_a_state_dict_that_hands_out_other_tensors_is_averaged_all_the_same():
    """Hooks that detach, rename or add: what is exported is the average, by any name."""
    model = small()
    average, _, history = walked(model, 10, 25)
    expected = history.average(average.rule)
    handle = model._register_state_dict_hook(detached)
    assert_averages(average.averaged_state_dict(), expected)
    handle.remove()
    handle = model._register_state_dict_hook(renamed)  # the tensors themselves: by any name
    assert_averages(average.averaged_state_dict(), {f"x.{n}": x for n, x in expected.items()})
    handle.remove()
    handle = model._register_state_dict_hook(unknown)
    with pytest.raises(ValueError, match="unknown"):
        average.averaged_state_dict()
    handle.remove()
    model.register_module("extra", WithExtraState())
    got = average.averaged_state_dict()
    assert got["extra._extra_state"] == {"seen": 3}
    assert_averages(got, expected)


def renamed(module, state, prefix, metadata):
    return {f"x.{name}": tensor for name, tensor in state.items()}


def unknown(module, state, prefix, metadata):
    return state | {"unknown": 2 * state["0.weight"]}


def detached(module, state, prefix, metadata):
    return {name: tensor.detach() for name, tensor in state.items()}


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


class Pretrained(nn.Module):
    """As in transformers: a model that saves itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.config = {"hidden": 3}

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        safetensors.torch.save_file(self.state_dict(), folder / "model.safetensors")


def test_a_model_that_saves_itself_does_so_inside_the_context_manager(tmp_path):
    model = Pretrained()
    average, _, _ = walked(model, 10, 25)
    with average.average_parameters():
        model.save_pretrained(tmp_path / "averaged")
    on_disk = safetensors.torch.load_file(tmp_path / "averaged" / "model.safetensors")
    assert bits(on_disk) == bits(average.averaged_state_dict())


# Memory


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise AssertionError("copied")

    def __reduce_ex__(self, protocol):
        raise AssertionError("pickled")


def test_a_model_is_never_copied_nor_pickled(monkeypatch, tmp_path):
    model = nn.Sequential(Uncopyable(3, 4), nn.Tanh(), Uncopyable(4, 2))
    monkeypatch.setattr(copy, "deepcopy", None)
    average, _, _ = walked(model, 10, 30)
    with average.average_parameters():
        pass
    average.averaged_state_dict()
    average.save_averaged(tmp_path / "averaged.safetensors")
    average.load_state_dict(average.state_dict())


@pytest.mark.parametrize(
    "rule", [AnytimeWindow(10), AnytimeWindow(10, 5), Exponential(10)], ids=short
)
def test_memory_is_the_accumulators_and_one_more(rule):
    model = nn.Linear(300, 300)
    average, _, _ = walked(model, rule, 30)
    weights = sum(p.numel() for p in model.parameters()) * 4
    held = [x.untyped_storage() for x in flat_tensors(average.state_dict())]
    storages = {storage.data_ptr(): storage.nbytes() for storage in held}
    assert sum(storages.values()) <= (rule.accumulators + 1) * weights * 1.01 + 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_update_makes_no_large_temporary(dtype):
    """Through a fold and a turn, of a tensor whose accumulator is larger than 64 MiB."""
    weight = torch.ones(17_000_001, dtype=dtype)
    average = ParameterAverage({"w": weight}, AnytimeWindow(520))
    average.update()
    for count in (255, 259):
        state = average.state_dict()
        average.load_state_dict(state | {"count": count, "calls": count})
        with Allocations() as made:
            for _ in range(3):
                average.update()
        assert made.largest <= 64 * 2**20


def test_an_average_holds_no_history():
    """Thousands of updates and reads: the same tensors, not more of them."""
    weight = torch.ones(10)
    average = ParameterAverage({"w": weight}, AnytimeWindow(20))
    for _ in range(60):
        average.update()
    storages = {x.untyped_storage().data_ptr() for x in flat_tensors(average.state_dict())}
    for _ in range(500):
        average.update()
    after = {x.untyped_storage().data_ptr() for x in flat_tensors(average.state_dict())}
    assert len(after) <= len(storages)


@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(20)], ids=short)
def test_an_update_that_was_interrupted_is_not_passed_over(rule):
    """At each operation of an update in turn, one with a fold and a turn."""
    refused = 0
    for stop in range(1, 60):
        model = small().append(nn.Linear(2, 2, dtype=torch.float64))
        average, _, _ = walked(model, rule, 20)
        good = saved(average.state_dict())
        try:
            with FailAt(stop, KeyboardInterrupt):
                average.update()
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            state = average.state_dict()
        except RuntimeError:
            refused += 1
            for call in (
                average.state_dict,
                average.update,
                average.averaged_state_dict,
                average.copy_to,
            ):
                with pytest.raises(RuntimeError, match="interrupted"):
                    call()
        else:  # nothing was touched yet
            assert snapshot(state) == snapshot(good)
        average.load_state_dict(good)
        average.update()
        assert average.count == 21
    else:
        raise AssertionError("an update has fewer operations")
    assert refused > 3
