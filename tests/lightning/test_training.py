"""`TailAveraging` in a fit: what counts, what validation sees, and what the module has at last."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from tailavg import AnyTail, AnytimeWindow, Decay, Exponential, Freshest
from tailavg.lightning import TailAveraging
from tests.support.lightning_training import (
    STEPS,
    Batches,
    Net,
    Plain,
    Saver,
    assert_near,
    bits,
    expected,
    fit,
    held_out,
    make_trainer,
    network,
    values,
)
from tests.support.model import weight_matrix


def test_validation_sees_the_averages_and_the_module_has_them_at_last():
    rule = AnytimeWindow(0.5)
    module, callback = Net(), TailAveraging(rule)
    fit(module, callback)
    alpha = weight_matrix(rule, 3 * STEPS)
    assert [step for step, _ in module.validated] == [STEPS, 2 * STEPS, 3 * STEPS]
    for step, seen in module.validated:
        assert_near(seen, expected(module.steps[:step], alpha[step - 1, :step]))
    assert_near(module, expected(module.steps, alpha[-1]))
    assert callback.average.count == 3 * STEPS
    assert not callback.average.swapped


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (20, None),
        (Exponential(0.25), None),
        (AnyTail(), 0.3),
        (AnyTail(), Decay(0.2, "cosine")),
        (AnyTail(), Freshest(0.3)),
        (AnyTail(6, 0.25), Decay(0.5, "1-sqrt")),
    ],
)
def test_every_rule(rule, window):
    module, callback = Net(), TailAveraging(rule, window=window)
    fit(module, callback, epochs=2)
    _, seen = module.validated[-1]
    final = expected(module.steps, callback.average.weights(window))
    assert_near(seen, final)
    assert_near(module, final)


@pytest.mark.parametrize(("batches", "steps"), [(2, 4), (3, 3), (7, 1)])
def test_batches_that_only_accumulate_do_not_count(batches, steps):
    module, callback = Net(), TailAveraging(0.5)
    trainer = fit(module, callback, epochs=2, accumulate_grad_batches=batches)
    assert callback.average.count == trainer.global_step == len(module.steps) == 2 * steps
    assert_near(module, expected(module.steps, callback.average.weights()))


@pytest.mark.parametrize(("every", "after", "first"), [(3, 0, 3), (1, 10, 11), (4, 5, 9)])
def test_update_every_and_start_after(every, after, first):
    module = Net()
    callback = TailAveraging(0.5, update_every=every, start_after=after)
    fit(module, callback)
    counted = module.steps[first - 1 :: every]
    assert callback.average.count == len(counted)
    assert_near(module, expected(counted, callback.average.weights()))
    (_, early), *_ = module.validated
    if first > STEPS:  # nothing to swap in yet
        assert_near(early, module.steps[STEPS - 1], rtol=0, atol=0)


def test_a_run_without_a_counted_step_warns_and_keeps_its_weights():
    module, callback = Net(), TailAveraging(0.5, start_after=1000)
    with pytest.warns(UserWarning, match="expected at least one counted step"):
        fit(module, callback, epochs=1)
    assert bits(module) == module.last


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision):
    module, callback = Net(), TailAveraging(0.5)
    fit(module, callback, epochs=2, precision=precision)
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    assert {p.dtype for p in module.parameters()} == {dtype}
    wanted = expected(module.steps, callback.average.weights())
    close = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert_near(module, wanted, rtol=close, atol=close)
    exact = callback.average.averaged_state_dict(torch.float64)
    assert_near(values({name: exact[name] for name in wanted}), wanted)


def test_steps_that_a_scaler_skips_do_not_count():
    class Overflows(Net):
        def training_step(self, batch, index):
            return super().training_step(batch, index) * (float("inf") if index % 3 == 1 else 1)

    module, callback = Overflows(), TailAveraging(0.5)
    module.net = module.net.float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=10_000)
    fit(module, callback, epochs=1, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    kept = [step for index, step in enumerate(module.steps) if index % 3 != 1]
    assert len(module.steps) == STEPS  # Lightning counts them
    assert callback.average.count == len(kept) == 5
    assert_near(module, expected(kept, callback.average.weights()))


class TwoOptimizers(Net):
    """The second one steps in every other batch, and neither in each fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        assert self.last in (None, bits(self))
        for which, optimizer in enumerate(self.optimizers()):
            if index % 4 == 3 or index % 2 < which:
                continue
            optimizer.zero_grad()
            self.manual_backward(self._loss(batch))
            optimizer.step()
        with torch.no_grad():  # as those who clip weights do: it counts as it is after the step
            self.net[0].weight.clamp_(-0.5, 0.5)

    def on_train_batch_end(self, outputs, batch, index):
        self.last = bits(self)
        if index % 4 != 3:
            self.steps.append(values(self))

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


def test_two_optimizers_count_once_in_each_training_step():
    module, callback = TwoOptimizers(), TailAveraging(0.5)
    fit(module, callback, epochs=2)
    assert callback.average.count == len(module.steps) == 12
    assert_near(module, expected(module.steps, callback.average.weights()))


def test_a_checkpoint_before_our_turn_has_the_training_step_and_counts_it_once(tmp_path):
    path = tmp_path / "saved.ckpt"
    module, callback = TwoOptimizers(), TailAveraging(0.5)
    fit(module, Saver("on_train_batch_end", path, 3), callback, epochs=2)
    assert callback.average.count == len(module.steps) == 12
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["tail_average"]["count"] == 2  # three steps of optimizers, in two batches
    resumed, second = TwoOptimizers(), TailAveraging(0.5)
    fit(resumed, second, epochs=2, resume=path)
    assert bits(resumed) == bits(module)
    assert second.average.count == 12


def test_one_optimizer_counts_every_step_in_manual_optimization():
    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(self._loss(batch))
                optimizer.step()
                self.counted = [*getattr(self, "counted", []), values(self)]

    module, callback = Twice(), TailAveraging(10)
    trainer = fit(module, callback, epochs=1)
    assert callback.average.count == trainer.global_step == 2 * STEPS
    assert_near(module, expected(module.counted, callback.average.weights()))


def test_offload_changes_no_bit(tmp_path):
    runs = []
    for offload in (None, "cpu", tmp_path / "blocks"):
        module, callback = Net(), TailAveraging(AnyTail(), window=0.4, offload=offload)
        fit(module, callback, epochs=2)
        runs.append((bits(module), module.validated))
    assert runs[0][0] == runs[1][0] == runs[2][0]
    for _, validated in runs[1:]:
        for (_, one), (_, other) in zip(runs[0][1], validated, strict=True):
            assert_near(one, other, rtol=0, atol=0)


def test_a_window_is_selected_after_the_run():
    module, callback = Net(), TailAveraging(AnyTail(), window=0.5)
    trainer = fit(module, callback)
    before = bits(module)

    def loss():
        (found,) = trainer.validate(module, held_out(2), verbose=False)
        return found["val_loss"]

    found = callback.average.select_tail(loss, [0.2, 0.5, 1.0, Decay(0.4, "cosine")])
    assert bits(module) == before
    assert len({score for _, score in found.scores}) == 4
    assert loss() == dict(zip([0.2, 0.5], [s for _, s in found.scores], strict=False))[0.5]
    callback.average.copy_to(window=found.window)
    assert loss() == found.score == min(score for _, score in found.scores)


def test_one_callback_serves_one_fit_after_the_other(tmp_path):
    callback = TailAveraging(0.5, offload=tmp_path)
    for seed in (1, 2):
        module = Net(seed)
        fit(module, callback, epochs=1)
        assert callback.average.count == STEPS
        assert_near(module, expected(module.steps, callback.average.weights()))


def test_layers_made_in_configure_model_and_frozen_ones():
    class Large(Net):
        def __init__(self):
            super().__init__()
            self.net = None

        def configure_model(self):
            self.net = network()
            self.net[0].requires_grad_(False)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)

    module, callback = Large(), TailAveraging(0.5)
    fit(module, callback, epochs=1)
    wanted = expected(module.steps, callback.average.weights())
    assert_near(module, wanted)
    assert_near(module.net[0], values(network()[0]), rtol=0, atol=0)


def test_only_what_is_included_is_averaged():
    module, callback = Net(), TailAveraging(0.5, include="net.0.*")
    fit(module, callback, epochs=1)
    wanted = expected(module.steps, callback.average.weights())
    for name, value in values(module).items():
        right = wanted if name.startswith("net.0.") else module.steps[-1]
        np.testing.assert_allclose(value, right[name], rtol=1e-5, atol=1e-6)


def test_buffers_come_back_after_validation_and_can_be_averaged():
    class Changes(Net):
        def validation_step(self, batch, index):
            super().validation_step(batch, index)
            self.net[1].running_mean.fill_(7.0)  # such as statistics that are recomputed

    module = Changes()  # which asserts that training goes on with its own bits
    fit(module, TailAveraging(0.5), epochs=2)
    assert (module.net[1].running_mean != 7.0).all()

    class Seen(Net):
        means = ()

        def on_train_batch_end(self, *args):
            super().on_train_batch_end(*args)
            self.means = [*self.means, values({"mean": self.net[1].running_mean})]

    module, callback = Seen(), TailAveraging(0.5, buffers="average")
    fit(module, callback, epochs=2)
    wanted = expected(module.means, callback.average.weights())
    assert_near(values({"mean": module.net[1].running_mean}), wanted)


def test_no_validation_at_all():
    module, callback = Plain(), TailAveraging(0.5)
    trainer = make_trainer(callback, epochs=2)
    trainer.fit(module, Batches())
    assert_near(module, expected(module.steps, callback.average.weights()))


def test_the_learning_rate_finder_comes_first_and_does_not_count(tmp_path):
    class Found(Net):
        lr = 0.1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.lr)

        def on_fit_start(self):
            self.steps, self.last = [], None

    module, callback = Found(), TailAveraging(0.5)
    finder = LearningRateFinder(num_training_steps=4, update_attr=False, early_stop_threshold=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="TailAveraging")
        trainer = make_trainer(callback, finder, epochs=1, default_root_dir=tmp_path)
        trainer.fit(module, DataLoader(torch.rand(STEPS, 6, 3), batch_size=None))
    assert callback.average.count == trainer.global_step == STEPS
    assert_near(module, expected(module.steps, callback.average.weights()))


# The training weights in validation.


class Measured(Net):
    """Logs in all the ways there are: a tensor, a metric, and a list that the module keeps."""

    def __init__(self):
        super().__init__()
        self.metric = MeanSquaredError()
        self.losses: list[float] = []

    def on_validation_epoch_start(self):
        self.losses.clear()

    def validation_step(self, batch):
        loss = self._loss(batch)
        self.losses.append(float(loss))
        self.metric(self.net(batch), batch[:, :2].clone())
        self.log("val_loss", loss)
        self.log_dict({"val_error": self.metric})

    def on_validation_epoch_end(self):
        self.log("val_worst", max(self.losses))


class Logged(Callback):
    """The metrics at the end of each validation."""

    def __init__(self):
        self.all = []

    def on_validation_end(self, trainer, pl_module):
        self.all.append({name: float(x) for name, x in trainer.callback_metrics.items()})


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_training_weights_are_validated_too(loaders):
    def run(*callbacks):
        module, logged = (Measured() if loaders == 1 else Loaders()), Logged()
        trainer = make_trainer(*callbacks, logged, num_sanity_val_steps=0)
        trainer.fit(module, Batches(), [held_out(2) for _ in range(loaders)])
        return module, logged.all

    plain_module, plain = run()
    _, averaged = run(TailAveraging(0.5))
    module, both = run(callback := TailAveraging(0.5, evaluate_raw=True))
    for step, raw_step in zip(module.steps, plain_module.steps, strict=True):
        assert all(np.array_equal(step[name], raw_step[name]) for name in step)
    for metrics, average, raw in zip(both, averaged, plain, strict=True):
        assert metrics == average | {f"raw_{name}": raw[name] for name in raw}
        assert all(metrics[f"raw_{name}"] != metrics[name] for name in raw)
    assert callback._raw is None


class Hooked(Measured):
    """Prepares validation, and logs, in hooks other than validation_step."""

    def on_validation_start(self):
        self.total = 0.0

    def on_validation_batch_start(self, batch, index):
        self.factor = 2.0

    def validation_step(self, batch, index):
        return self._loss(batch) + torch.rand(())  # the random state must not change

    def on_validation_batch_end(self, outputs, batch, index):
        self.total += self.factor * float(self._loss(batch))
        self.log("val_batch", self._loss(batch))

    def on_validation_epoch_end(self):
        self.log("val_total", self.total)


def test_all_hooks_of_validation_see_the_training_weights_too():
    def run(*callbacks):
        module, logged = Hooked(), Logged()
        make_trainer(*callbacks, logged, num_sanity_val_steps=0).fit(module, Batches(), held_out(2))
        return module, logged.all

    plain_module, plain = run()
    module, both = run(TailAveraging(0.5, evaluate_raw=True))
    for step, raw_step in zip(module.steps, plain_module.steps, strict=True):
        assert all(np.array_equal(step[name], raw_step[name]) for name in step)
    for metrics, raw in zip(both, plain, strict=True):
        assert {"val_batch", "val_total"} <= {*raw}
        assert {name: metrics[f"raw_{name}"] for name in raw} == raw


def test_a_module_that_cannot_be_copied():
    class Keeps(Measured):
        def training_step(self, batch, index):
            self.kept = super().training_step(batch, index)
            return self.kept

    trainer = make_trainer(TailAveraging(0.5, evaluate_raw=True))
    with pytest.raises(RuntimeError, match=r"evaluate_raw: .* self\.loss = loss\.detach\(\)"):
        trainer.fit(Keeps(), Batches(), held_out(2))


class Loaders(Measured):
    """Validates with several loaders."""

    def validation_step(self, batch, index, dataloader_idx):
        self.losses.append(float(dataloader_idx) + float(self._loss(batch)))
        self.log("val_loss", self._loss(batch))


# Refusals.


def test_options_are_checked_at_once():
    with pytest.raises(TypeError, match="unexpected keyword argument 'every_n_steps'"):
        TailAveraging(0.25, every_n_steps=2)
    with pytest.raises(ValueError, match=r"a float in \(0, 1\]"):
        TailAveraging(2.5)
    with pytest.raises(ValueError, match="AnyTail has no window of its own"):
        TailAveraging(AnyTail())
    with pytest.raises(ValueError, match=r"window: 100 is too short for .* in a long run"):
        TailAveraging(AnyTail(), window=100)  # too short once there are a thousand steps
    with pytest.raises(ValueError, match="has its own window"):
        TailAveraging(0.25, window=0.5)
    with pytest.raises(RuntimeError, match="expected a fit that has started"):
        _ = TailAveraging(0.25).average


def test_two_callbacks_are_refused():
    with pytest.raises(RuntimeError, match="more than one stateful callback"):
        make_trainer(TailAveraging(0.25), TailAveraging(0.5))


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [(FSDPStrategy, "flattens several"), (DeepSpeedStrategy, "in every ZeRO stage")],
)
def test_strategies_that_are_refused(strategy, reason):
    trainer = SimpleNamespace(strategy=object.__new__(strategy))
    message = f"not support {strategy.__name__}: .*{reason}.* ModelParallelStr"
    with pytest.raises(TypeError, match=message):
        TailAveraging(0.25).setup(trainer, Net(), "fit")


@pytest.mark.parametrize("rule", ["10min", AnytimeWindow("10min"), Exponential("10min")], ids=str)
def test_a_window_of_time_is_refused(rule):
    with pytest.raises(TypeError, match=r"a window of time works in|a model have none"):
        TailAveraging(rule)
