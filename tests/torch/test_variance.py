"""The variance of weights around their average, and samples from it.

Slow: each rule is tried over hundreds of updates, in memory, in files and resumed.
"""

import copy
import math
import pickle
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Decay, Exponential, Freshest, Growing, RawTail
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.any_tails import Tails
from tests.support.cases import of_rules, short
from tests.support.effort import exhaustive
from tests.support.model import Window, freshest
from tests.support.torch_models import (
    TORCH_RULES,
    Allocations,
    FailAt,
    Odd,
    Walk,
    bits,
    comparable,
    dense,
    flat_tensors,
    saved,
    small,
    snapshot,
    walked,
)

STEPS = [1, 2, 3, 41, 255, 256, 257, 258, 300, 513, 620]
FEW_RULES = [
    AnytimeWindow(20),
    AnytimeWindow(0.25, 5, turns="paper"),
    Exponential(10),
    Exponential(0.25),
    RawTail(100, total=300),
    AnyTail(6, shortest=0.5),
]


def spread(alpha, xs, ddof=1):
    """The weighted variance of samples, in double precision."""
    mean = np.tensordot(alpha, xs, 1)
    divisor = 1 - (alpha**2).sum() if ddof else 1
    return np.tensordot(alpha, (xs - mean) ** 2, 1) / divisor


def assert_variance(average, alpha, samples, window=None):
    """That both variances are those of the samples; of a single one, NaN and 0."""
    single = (alpha**2).sum() > 1 - 1e-9
    for ddof in (0, 1):
        for name, variance in average.variance(window, ddof).items():
            if single:
                assert (variance.isnan() if ddof else variance == 0).all()
                continue
            expected = spread(alpha, np.array(samples[name]), ddof)
            eps = torch.finfo(variance.dtype).eps
            # samples are about 3: the mean of a sum may be off by 43 eps of that, and the variance
            # by twice as much times the distance of the mean from the center of the squares
            limit = 1000 * eps * (expected + np.sqrt(expected))
            assert (np.abs(variance.numpy() - expected) <= limit).all(), name


def tensors(seed=0):
    torch.manual_seed(seed)
    kinds = {"float": torch.float32, "double": torch.float64, "low": torch.bfloat16}
    drawn = {name: torch.rand(2, 3).to(kind) for name, kind in kinds.items()}
    return drawn | {"one": torch.rand(()), "turned": torch.rand(5, 4).T}


def taken(average, weights, random):
    """Take a sample: noise around a mean that drifts. Return it in double precision."""
    for weight in weights.values():
        noise = torch.randn(weight.shape, generator=random)
        weight.copy_(3 + 0.1 * noise + 1e-3 * average.count)
    average.update()
    return {name: weight.double().numpy().copy() for name, weight in weights.items()}


@of_rules(TORCH_RULES)
def test_the_variance_is_that_of_the_weights(rule):
    weights, random = tensors(), torch.Generator().manual_seed(0)
    average = ParameterAverage(weights, rule, variance=True)
    samples: dict[str, list] = {name: [] for name in weights}
    alphas = dense(rule, STEPS)
    for t in range(1, max(STEPS) + 1):
        for name, x in taken(average, weights, random).items():
            samples[name].append(x)
        if t in STEPS:
            assert_variance(average, alphas[t], samples)


def cosine(passed):
    return (1 + math.cos(math.pi * passed)) / 2


def early(passed):
    return max(0.0, 1 - 2 * passed)


def decayed(sizes, k, fall=cosine):
    """The weights of blocks, oldest first, under a decay over k samples."""
    ages = [sum(sizes[i:]) for i in range(len(sizes) + 1)]
    left = [fall(max(0.0, 1 - age / k)) for age in ages]
    return np.subtract(left[:-1], left[1:])


READINGS = {
    0.5: None,
    100: None,
    Freshest(0.3): freshest,
    Decay(0.5, "cosine"): decayed,
    Decay(0.8, early): partial(decayed, fall=early),  # the newest samples have no weight
}


@pytest.mark.parametrize("window", READINGS, ids=lambda window: str(window).partition(" at 0x")[0])
def test_the_variance_of_any_tail_is_that_of_the_weights(window):
    rule = AnyTail(8, shortest=0.1)
    weights, random = tensors(), torch.Generator().manual_seed(0)
    average = ParameterAverage(weights, rule, variance=True)
    samples: dict[str, list] = {name: [] for name in weights}
    blocks = Tails(rule)
    for t in range(1, 621):
        blocks.add()
        for name, x in taken(average, weights, random).items():
            samples[name].append(x)
        if t in STEPS[3:]:
            if READINGS[window] is None:
                alpha = blocks.of(window)
            else:
                sizes = [len(block) for block in blocks.blocks]
                k = min(t, Window.of(window.window).size(t))
                each = np.array(READINGS[window](sizes, k), float) / sizes
                alpha = np.repeat(each, sizes)
            assert_variance(average, alpha, samples, window)


@of_rules(FEW_RULES)
def test_the_average_is_the_same_to_the_bit(rule):
    model = Odd(compiled=False)
    options = {"exclude": "spin", "trainable_only": False}
    averages = [ParameterAverage(model, rule, **options, variance=v) for v in (False, True)]
    walk, window = Walk(model), 0.6 if isinstance(rule, AnyTail) else None
    for t in range(1, 300):
        walk.step()
        for average in averages:
            average.update()
        if t in STEPS:
            plain, with_variance = (bits(x.averaged_state_dict(window=window)) for x in averages)
            assert plain == with_variance
            states = [comparable(x) for x in averages]
            states[1].pop("variances"), states[1].pop("squares")
            states[0]["blocks"], states[1]["blocks"] = (state["blocks"][:-1] for state in states)
            assert states[0] == states[1]


def assert_digits(rule, rtol, steps):
    """That this much is right of the variance of weights of 1,000, with a deviation of 1."""
    samples = 1000 + torch.randn(steps, 4, generator=torch.Generator().manual_seed(0))
    weight = torch.zeros(4)
    average = ParameterAverage({"w": weight}, rule, variance=True)
    for sample in samples:
        weight.copy_(sample)
        average.update()
    window = 0.3 if isinstance(rule, AnyTail) else None
    expected = spread(average.weights(window), samples.double().numpy())
    np.testing.assert_allclose(average.variance(window)["w"].numpy(), expected, rtol=rtol)


@of_rules([AnytimeWindow(0.25), AnytimeWindow(1.0), Exponential(0.25), AnyTail(12)])
def test_float32_keeps_digits_far_from_zero(rule):
    assert_digits(rule, 1e-4, steps=20_000)


@exhaustive("takes a million updates, twice")
def test_float32_keeps_digits_over_a_million_updates():
    assert_digits(AnytimeWindow(0.25), 1e-5, steps=1_000_000)
    assert_digits(AnytimeWindow(1000), 1e-3, steps=1_000_000)  # a block is one or two sums


@of_rules([*TORCH_RULES, AnyTail(6), AnyTail(8, shortest=0.5)])
def test_a_constant_has_no_variance(rule):
    constants = torch.tensor([0.1, -1 / 3, 1e20, 1e-30, 0.0, 1000.1])
    weights = {"float": constants.clone(), "low": constants.bfloat16(), "wide": constants.double()}
    average = ParameterAverage(weights, rule, variance=True)
    for t in range(1, 700):
        average.update()
        if t in STEPS or t % 90 == 0:
            window = 0.7 if isinstance(rule, AnyTail) else None
            for variance in average.variance(window, ddof=0).values():
                assert (variance == 0).all(), t
            with average.sample_parameters(5.0, window=window):
                sampled = bits(weights)
            assert sampled == bits(average.averaged_state_dict(window=window))


def test_the_variance_is_never_negative():
    random = torch.Generator().manual_seed(0)
    weight = torch.zeros(500)
    average = ParameterAverage({"w": weight}, AnytimeWindow(20), variance=True)
    scale = 10.0 ** torch.linspace(-9, 9, 500)
    for _ in range(400):
        weight.copy_(1 + scale * torch.randn(500, generator=random))
        average.update()
        assert (average.variance(ddof=0)["w"] >= 0).all()


def test_a_huge_sample_leaves_with_its_block():
    weights, random = tensors(), torch.Generator().manual_seed(0)
    average = ParameterAverage(weights, AnytimeWindow(20), variance=True)
    samples: dict[str, list] = {name: [] for name in weights}
    for t in range(100):
        sample = taken(average, weights, random)
        if t == 40:
            for name, bad in zip(weights, (math.inf, math.nan, 1e18, -math.inf, 1e18), strict=True):
                weights[name].fill_(bad)
            average.update()
            sample = {name: np.zeros_like(x) for name, x in sample.items()}  # out of the window
            for name in weights:
                samples[name].append(sample[name])
        for name, x in sample.items():
            samples[name].append(x)
    assert_variance(average, dense(AnytimeWindow(20), [101])[101], samples)


# Where it is kept


def odd(rule, **options):
    return walked(
        Odd(compiled=False), rule, 0, exclude="spin", trainable_only=False, variance=True, **options
    )


def drawn(average, window, seed=0):
    with average.sample_parameters(0.5, torch.Generator().manual_seed(seed), window):
        return bits(average._tracking.modules[0])


@of_rules(FEW_RULES)
def test_offloaded_results_are_the_same_to_the_bit(rule, tmp_path):
    window = 0.6 if isinstance(rule, AnyTail) else None
    memory, walk, _ = odd(rule)
    model, options = memory._tracking.modules[0], {"exclude": "spin", "trainable_only": False}
    offloaded = [
        ParameterAverage(model, rule, **options, variance=True, offload=place)
        for place in ("cpu", tmp_path)
    ]
    for t in range(1, 260):
        walk.step()
        for average in (memory, *offloaded):
            average.update()
        if t in STEPS:
            state, variances = snapshot(memory.state_dict()), bits(memory.variance(window))
            sample = drawn(memory, window)
            for average in offloaded:
                assert snapshot(average.state_dict()) == state
                assert bits(average.variance(window)) == variances
                assert drawn(average, window) == sample


@pytest.mark.parametrize("in_files", [False, True])
@of_rules(FEW_RULES)
def test_a_run_resumes_to_the_bit(rule, in_files, tmp_path):
    """Whatever is in the sum and in the open block, which may have no mean yet."""
    window, runs = 0.6 if isinstance(rule, AnyTail) else None, []
    for name in ("a", "b"):
        model = small().append(nn.Linear(2, 3).double()).append(nn.Linear(3, 1).bfloat16())
        options = {"offload": tmp_path / name} if in_files else {}
        runs.append(walked(model, rule, 0, variance=True, **options)[:2])
    (average, walk), (resumed, other_walk) = runs
    for stop in [0, 1, 5, 10, 11, 12, 256, 257] if in_files else [*range(25), 256, 257]:
        while average.count < stop:
            walk.step()
            average.update()
        if in_files:
            average.save(tmp_path / "state")
            resumed.load(tmp_path / "state")
        else:
            resumed.load_state_dict(saved(average.state_dict()))
        other_walk.random.set_state(walk.random.get_state())
        for each in (walk, other_walk):
            each.step()
        average.update()
        resumed.update()
        assert comparable(average) == comparable(resumed)
        assert bits(average.variance(window)) == bits(resumed.variance(window))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_to_the_bit(copied):
    average, walk, _ = walked(small(), 20, 33, variance=True)
    other = copied(average)
    other_walk = Walk(other._tracking.modules[0])
    other_walk.random.set_state(walk.random.get_state())
    for _ in range(17):
        for each in (walk, other_walk):
            each.step()
        average.update()
        other.update()
    assert comparable(average) == comparable(other)
    assert bits(average.variance()) == bits(other.variance())


def test_saved_folders_share_closed_blocks(tmp_path):
    average, walk, _ = walked(small(), 20, 45, variance=True, offload=tmp_path / "hot")
    average.save(tmp_path / "first")
    for _ in range(4):
        walk.step()
        average.update()
    average.save(tmp_path / "second")
    shared = [
        file.name
        for file in (tmp_path / "second").iterdir()
        if (tmp_path / "first" / file.name).samefile(file)
    ]
    assert sorted(shared) == ["block-20-30.safetensors", "block-30-40.safetensors"]


def test_an_average_moves_to_another_precision():
    average, walk, _ = walked(small(), 20, 45, variance=True)
    before = average.variance()
    average.to(torch.float64)
    after = average.variance()
    for name, variance in before.items():
        assert after[name].dtype is torch.float64
        torch.testing.assert_close(after[name].float(), variance, rtol=1e-5, atol=1e-9)
    walk.step()
    average.update()


@pytest.mark.parametrize("rule", [AnytimeWindow(10), Exponential(10)], ids=short)
def test_it_doubles_the_memory(rule):
    model = nn.Linear(300, 300)
    held = []
    for variance in (False, True):
        average, _, _ = walked(model, rule, 30, variance=variance)
        storages = [x.untyped_storage() for x in flat_tensors(average.state_dict())]
        held.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
    assert held[1] == 2 * held[0]


@exhaustive("holds 0.8 GB")
def test_an_update_makes_no_large_temporary():
    """Through a fold and a turn, of a tensor whose accumulator is larger than 64 MiB."""
    weight = torch.ones(8501, 2000, dtype=torch.bfloat16)
    average = ParameterAverage({"w": weight}, AnytimeWindow(520), variance=True)
    average.update()
    for count in (255, 259):
        state = average.state_dict()
        average.load_state_dict(state | {"count": count, "calls": count})
        with Allocations() as made:
            for _ in range(3):
                average.update()
        assert made.largest <= 64 * 2**20
    weight.data = weight.T.contiguous().T  # no longer in the order of the sum
    with Allocations() as made:
        average.update()
    assert made.largest <= 64 * 2**20


def test_a_tensor_may_take_another_order_in_memory():
    weights, random = {"w": torch.rand(300, 5, 2)}, torch.Generator().manual_seed(0)
    average = ParameterAverage(weights, 40, variance=True)
    samples = []
    for t in range(100):
        if t in (50, 75):
            weights["w"].data = (
                torch.rand(5, 2, 300).permute(2, 0, 1) if t == 50 else (torch.rand(600, 5, 2)[::2])
            )
        samples.append(taken(average, weights, random)["w"])
    assert_variance(average, average.weights(), {"w": samples})


@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(20)], ids=short)
def test_an_update_that_was_interrupted_is_not_passed_over(rule):
    """At each operation of an update in turn, one with a fold and a turn."""
    refused = 0
    model = small().append(nn.Linear(2, 2).double())
    average, _, _ = walked(model, rule, 20, variance=True)
    good = saved(average.state_dict())
    for stop in range(1, 200):
        try:
            with FailAt(stop, KeyboardInterrupt):
                average.update()
        except KeyboardInterrupt:
            pass
        else:
            break
        try:
            average.state_dict()
        except RuntimeError:
            refused += 1
        average.load_state_dict(good)
        assert snapshot(average.state_dict()) == snapshot(good)
    else:
        raise AssertionError("an update has fewer operations")
    assert average.count == 21
    assert refused > 3


# Samples


def test_samples_have_the_mean_and_the_spread():
    average, _, _ = walked(small(norm=False), 0.5, 60, variance=True)
    model, random = average._tracking.modules[0], torch.Generator().manual_seed(0)
    means, variances = average.averaged_state_dict(), average.variance(ddof=0)
    number, scale = 1000, 0.5
    found: dict[str, list] = {name: [] for name in means}
    for _ in range(number):
        with average.sample_parameters(scale, random):
            for name, weight in model.named_parameters():
                found[name].append(weight.detach().clone())
    for name, mean in means.items():
        draws, std = torch.stack(found[name]).double(), scale * variances[name].sqrt()
        off = (draws.mean(0) - mean) / std * math.sqrt(number)
        assert off.abs().max() < 4.5  # standard errors
        off = (draws.std(0) / std - 1) * math.sqrt(2 * number)
        assert off.abs().max() < 4.5
        assert off.abs().max() > 0.5


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_sample_is_the_average_plus_noise_in_the_order_of_the_model(scale):
    """Rounded once to the dtype of the model, whatever the layout of tensors in memory."""
    average, walk, _ = odd(AnytimeWindow(30))
    for _ in range(70):
        walk.step()
        average.update()
    model, random = average._tracking.modules[0], torch.Generator().manual_seed(7)
    means = average.averaged_state_dict(dtype=torch.float64)
    variances = average.variance(ddof=0)
    expected = {}
    for name, variance in variances.items():
        noise = torch.randn(variance.shape, dtype=variance.dtype, generator=random)
        expected[name] = means[name] + scale * variance.sqrt() * noise
    with average.sample_parameters(scale, torch.Generator().manual_seed(7)):
        for name, weight in model.named_parameters():
            if name in expected:
                off = (weight.detach().double() - expected[name]).abs()
                rounding = torch.finfo(weight.dtype).eps / 2 * expected[name].abs()
                assert (off <= rounding + 2e-6).all(), name


def test_a_generator_decides_the_sample():
    average, _, _ = walked(small(), 0.5, 60, variance=True)
    model, random = average._tracking.modules[0], torch.Generator().manual_seed(0)
    first, again, other = drawn(average, None), drawn(average, None), drawn(average, None, 1)
    assert first == again != other
    seen = []
    for _ in range(2):
        with average.sample_parameters(generator=random):
            seen.append(bits(model))
    assert seen[0] != seen[1]
    for _ in range(2):
        torch.manual_seed(3)
        with average.sample_parameters():
            seen.append(bits(model))
    assert seen[2] == seen[3]
    with average.sample_parameters(0.0):
        nothing = bits(model)
    with average.average_parameters():
        assert bits(model) == nothing


def test_the_training_weights_come_back_after_an_exception():
    average, _, _ = walked(small(), 0.5, 60, variance=True)
    model = average._tracking.modules[0]
    before = bits(model)

    def evaluate():
        with average.sample_parameters():
            assert average.swapped
            assert bits(model) != before
            model[1].running_mean.add_(1)  # as by recompute_batchnorm
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    assert bits(model) == before
    interrupts = 0
    for stop in range(1, 60):
        with suppress(KeyboardInterrupt), FailAt(stop, KeyboardInterrupt):
            with average.sample_parameters():
                pass
            interrupts -= 1
        interrupts += 1
        if average.swapped:  # the restore itself was interrupted
            average.restore()
        assert bits(model) == before
    assert interrupts > 20
    average.update()


def test_averaged_buffers_get_no_noise():
    model = small()
    average = ParameterAverage(model, 0.5, buffers="average", variance=True)
    for t in range(40):
        with torch.no_grad():
            model[1].running_var.fill_(t % 3)
            model[0].weight.normal_()
        average.update()
    mean = average.averaged_state_dict()
    assert average.variance()["1.running_var"].min() > 0.5
    with average.sample_parameters(10.0):
        assert bits({"var": model[1].running_var}) == bits({"var": mean["1.running_var"]})
        assert bits({"w": model[0].weight}) != bits({"w": mean["0.weight"]})


# What is refused


def test_without_variance_there_is_none():
    average, _, _ = walked(small(), 10, 5)
    with pytest.raises(ValueError, match="variance: create the average with variance=True"):
        average.variance()
    with pytest.raises(ValueError, match="sample_parameters: create the average with variance=T"):
        average.sample_parameters().__enter__()
    assert not average.swapped


def test_reads_before_the_first_update_are_refused():
    average = ParameterAverage(small(), 10, variance=True)
    for call in (average.variance, average.sample_parameters().__enter__):
        with pytest.raises(ValueError, match="at least one sample before the first read"):
            call()


@pytest.mark.parametrize("ddof", [2, -1, 0.5, None])
def test_another_ddof_is_refused(ddof):
    average, _, _ = walked(small(), 10, 5, variance=True)
    with pytest.raises(ValueError, match="ddof: expected 0 or 1"):
        average.variance(ddof=ddof)


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_another_scale_is_refused(scale):
    average, _, _ = walked(small(), 10, 5, variance=True)
    with pytest.raises(ValueError, match="scale: expected a number of at least 0"):
        average.sample_parameters(scale).__enter__()
    assert not average.swapped


def test_complex_weights_are_refused():
    with pytest.raises(TypeError, match="variance: spin is complex; exclude it"):
        ParameterAverage(Odd(), 10, variance=True)


def test_a_window_is_needed_where_the_average_needs_one():
    average, _, _ = walked(small(), AnyTail(6), 5, variance=True)
    for call in (average.variance, average.sample_parameters().__enter__):
        with pytest.raises(ValueError, match="AnyTail has no window of its own"):
            call()


def test_states_with_and_without_variances_do_not_mix(tmp_path):
    make = partial(walked, small(), 10, 25)
    states = {variance: make(variance=variance)[0] for variance in (False, True)}
    for variance, other in states.items():
        average = make(variance=not variance)[0]
        before = snapshot(average.state_dict())
        with pytest.raises(ValueError, match="with" if variance else "without variance=True"):
            average.load_state_dict(other.state_dict())
        other.save(tmp_path / str(variance))
        with pytest.raises(ValueError, match="variance=True"):
            average.load(tmp_path / str(variance))
        assert snapshot(average.state_dict()) == before
    module = AveragedModel(small(), 10)
    with pytest.raises(ValueError, match="saved with variance=True"):
        module.set_extra_state(states[True].state_dict())


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("squares", lambda x: {**x, "0.weight": x["0.weight"][:1]}, "squares: 0.weight: expected"),
        ("squares", lambda _: {}, "squares: missing"),
        ("variances", lambda x: x[:1], "3 block starts but 1 variances"),
        ("variances", lambda x: [x[0], {**x[1], "more": x[0]["0.bias"]}, x[2]], "variance 1: un"),
    ],
)
def test_a_damaged_state_is_refused(key, change, message):
    average, _, _ = walked(small(), Growing(0.5), 25, variance=True)
    before = snapshot(average.state_dict())
    state = average.state_dict()
    with pytest.raises(ValueError, match=message):
        average.load_state_dict(state | {key: change(state[key])})
    assert snapshot(average.state_dict()) == before
