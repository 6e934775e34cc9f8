"""ParameterAverage: the averages against a slow reference, of tensors and models of all kinds."""

import math

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tailavg import AnytimeWindow, ExactWindow, Exponential, Fixed, Growing, RawTail, TailAverage
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.effort import some
from tests.support.torch_models import (
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    dense,
    every_rule,
    kept_rules,
    named,
    odd_batch,
    saved,
    small,
    snapshot,
    tensors_of,
    tolerance,
    walked,
    wide,
)

# The averages


@every_rule
def test_updates_give_the_averages_of_the_model(rule):
    """Steps enough for several folds and turns; reads in between change nothing."""
    tensors, steps = tensors_of(), 1030
    read_at = {1, 2, 3, 7, 40, 41, 255, 256, 257, 258, 300, 512, 513, 769, 1000, 1001, 1030}
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
    for rule in ("10min", AnytimeWindow("10min"), Exponential("10min")):
        with pytest.raises(TypeError, match=r"a window of time works in|a model have none"):
            ParameterAverage(model, rule)
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
    for start in (-1, 1.5, "2", True):
        with pytest.raises((TypeError, ValueError), match="start_after"):
            ParameterAverage(model, 10, start_after=start)


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


LONG = some(25_000, 250_000)


@pytest.mark.parametrize("rule", [AnytimeWindow(LONG), Exponential(LONG)], ids=short)
def test_a_long_window_in_float32_stays_near_the_truth(rule):
    """Many folds, two turns."""
    steps, random = LONG + LONG // 25, np.random.default_rng(0)
    xs = (1 + random.random((steps, 4))).astype(np.float32)
    weight = torch.zeros(4)
    average, rows = ParameterAverage({"w": weight}, rule), torch.from_numpy(xs)
    for row in rows:
        weight.copy_(row)
        average.update()
    if isinstance(rule, Exponential):
        expected = np.zeros(4)
        for t, x in enumerate(xs.astype(np.float64), start=1):
            n, before = min(t, LONG), min(t - 1, LONG)
            g = (before - math.sqrt(before * (before + 1 - n) / n)) / (before + 1)
            expected = g * expected + (1 - g) * x
    else:
        expected = dense(rule, [steps])[steps] @ xs.astype(np.float64)
    got = average.averaged_state_dict()["w"]
    np.testing.assert_allclose(wide(got), expected, rtol=0, atol=some(1e-6, 1e-5))
    assert math.isclose(average.profile().effective_size, LONG, rel_tol=1e-9)


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


@pytest.mark.parametrize(
    ("rule", "layout"),
    [
        (AnytimeWindow(280), "contiguous"),  # through a fold and a turn
        (AnytimeWindow(10), "transposed"),
        (AnytimeWindow(10), "every other"),
        (Exponential(10), "contiguous"),
        (Exponential(10), "transposed"),
        (Exponential(10), "every other"),
    ],
    ids=short,
)
def test_tensors_of_any_size_and_many_of_them_are_averaged(rule, layout):
    """Sizes around those at which tensors are handled in other ways; every element is looked at."""
    steps, random = rule.window.k + 20, torch.Generator().manual_seed(0)
    layout = LAYOUTS[layout]
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


def test_large_tensors_of_8_bits_are_averaged_to_their_last_element():
    """They are copied through a room that is smaller than they are together."""
    tensors = {
        name: (1 + torch.arange(size) % 7).to(torch.float8_e4m3fn)
        for name, size in (("a", 2**20 + 5), ("b", 2**19), ("c", 2**20 - 1))
    }
    average = ParameterAverage(tensors, 10)
    for _ in range(3):
        average.update()
    for name, values in average.averaged_state_dict(torch.float32).items():
        assert torch.equal(values, tensors[name].float()), name


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
    with pytest.raises(ValueError, match="no floating point tensor to average"):
        ParameterAverage(nn.Sequential(nn.Tanh()), 10)
    average = ParameterAverage({"none": torch.zeros(0, 3)}, 10)
    for _ in range(20):
        average.update()
    assert average.averaged_state_dict()["none"].shape == (0, 3)
    with average.average_parameters():
        pass
