"""What checkpoints of a fit with `TailAveraging` have, and what can be done with them."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Decay
from tailavg.lightning import TailAveraging
from tailavg.torch import ParameterAverage
from tests.support.lightning_training import (
    STEPS,
    Net,
    Saver,
    assert_near,
    bits,
    expected,
    fit,
    held_out,
    leaves,
    make_trainer,
    values,
)


def load(path):
    return torch.load(path, weights_only=True)


def check(checkpoint, module, step: int, rule=0.5, window=None) -> None:
    """The averages of the first steps are in it, and the training weights after the last."""
    average = ParameterAverage(Net(), rule)
    average.load_state_dict(checkpoint["tail_average"])
    assert average.count == step
    wanted = expected(module.steps[:step], average.weights(window))
    got = values({name: checkpoint["state_dict"][name] for name in wanted})
    assert_near(got, wanted)
    training = values({name: checkpoint["current_model_state"][name] for name in wanted})
    assert_near(training, module.steps[step - 1], rtol=0, atol=0)
    assert list(checkpoint["state_dict"]) == list(module.state_dict())
    assert list(checkpoint["current_model_state"]) == list(module.state_dict())


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        ("on_train_batch_end", 3),
        ("on_train_epoch_end", STEPS),
        ("on_validation_start", STEPS),
        ("on_validation_batch_end", STEPS),  # the averages are in the module
        ("on_validation_epoch_end", STEPS),
        ("on_validation_end", STEPS),
        ("on_train_end", 2 * STEPS),
        ("on_fit_end", 2 * STEPS),
        ("teardown", 2 * STEPS),
    ],
)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_wherever_it_is_saved(tmp_path, hook, step, first):
    path = tmp_path / "saved.ckpt"
    module, callback, saver = Net(), TailAveraging(0.5), Saver(hook, path, step)
    fit(module, *((saver, callback) if first else (callback, saver)), epochs=2)
    check(load(path), module, step)
    assert_near(module, expected(module.steps, callback.average.weights()))


def test_a_checkpoint_within_validation_leaves_the_buffers_alone(tmp_path):
    class Recomputes(Net):
        def validation_step(self, batch, index):
            super().validation_step(batch, index)
            self.net[1].running_mean.fill_(7.0)

        def on_validation_epoch_end(self):
            assert (self.net[1].running_mean == 7.0).all()

    saver = Saver("on_validation_batch_end", tmp_path / "saved.ckpt", STEPS)
    fit(Recomputes(), TailAveraging(0.5), saver, epochs=2)
    assert saver.saved


@pytest.mark.parametrize("window", [0.3, Decay(0.4, "cosine")])
def test_an_any_tail_is_saved_as_it_is_read(tmp_path, window):
    path, rule = tmp_path / "saved.ckpt", AnyTail(8)
    module = Net()
    fit(module, TailAveraging(rule, window=window), Saver("on_train_batch_end", path, 10))
    check(load(path), module, 10, rule, window)


def test_before_the_first_counted_step(tmp_path):
    path = tmp_path / "saved.ckpt"
    module, callback = Net(), TailAveraging(0.5, start_after=5)
    fit(module, callback, Saver("on_train_batch_end", path, 3), epochs=1)
    checkpoint = load(path)
    for part in ("state_dict", "current_model_state"):
        got = values({name: checkpoint[part][name] for name in module.steps[0]})
        assert_near(got, module.steps[2], rtol=0, atol=0)
    resumed, callback = Net(9), TailAveraging(0.5, start_after=5)
    fit(resumed, callback, epochs=1, resume=path)
    assert callback.average.count == STEPS - 5
    assert bits(resumed) == bits(module)


def test_after_the_fit(tmp_path):
    module, callback = Net(), TailAveraging(0.5)
    trainer = fit(module, callback, epochs=2)
    trainer.save_checkpoint(tmp_path / "full.ckpt")
    check(load(tmp_path / "full.ckpt"), module, 2 * STEPS)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert bits(load(tmp_path / "weights.ckpt")["state_dict"]) == bits(module)
    trainer.test(module, held_out(), verbose=False)
    trainer.save_checkpoint(tmp_path / "tested.ckpt")
    check(load(tmp_path / "tested.ckpt"), module, 2 * STEPS)
    # now the module has other weights, which are not those of the run
    trainer.test(module, held_out(), verbose=False, ckpt_path=tmp_path / "full.ckpt")
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    assert "current_model_state" not in load(tmp_path / "other.ckpt")


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_epoch_end", "on_train_end"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_weights_only_has_the_averages(tmp_path, hook, asynchronous):
    """Lightning does not tell callbacks of it."""
    path, step = tmp_path / "saved.ckpt", {"on_train_batch_end": 4}.get(hook, STEPS)
    plugins = [AsyncCheckpointIO()] if asynchronous else None
    module, callback = Net(), TailAveraging(0.5)
    saver = Saver(hook, path, step, weights_only=True)
    trainer = fit(module, callback, saver, epochs=1, plugins=plugins)
    checkpoint = load(path)
    assert not {"current_model_state", "tail_average", "callbacks"} & checkpoint.keys()
    average = ParameterAverage(Net(), 0.5)
    for _ in range(step):
        average.update()
    wanted = expected(module.steps[:step], average.weights())
    assert_near(values({name: checkpoint["state_dict"][name] for name in wanted}), wanted)
    assert type(trainer.strategy.checkpoint_io).__module__.startswith("lightning.")


def test_model_checkpoint_with_weights_only(tmp_path):
    module = Net()
    keep = ModelCheckpoint(tmp_path, save_weights_only=True, save_top_k=-1, filename="{step}")
    fit(module, TailAveraging(1.0), keep, epochs=2, enable_checkpointing=True)
    for step in (STEPS, 2 * STEPS):
        again = Net.load_from_checkpoint(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_near(again, expected(module.steps[:step], [1 / step] * step))


def test_the_best_checkpoint_is_the_best_average(tmp_path):
    module, callback = Net(), TailAveraging(0.5)
    best = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1, save_last=True)
    trainer = fit(module, callback, best, epochs=3, enable_checkpointing=True)
    steps = torch.load(best.best_model_path, weights_only=True)["global_step"]
    (wanted,) = (seen for step, seen in module.validated if step == steps)
    again = Net.load_from_checkpoint(best.best_model_path, weights_only=True)
    assert_near(again, wanted, rtol=0, atol=0)
    for stage in ("test", "validate", "predict"):
        module.net[0].weight.data.zero_()
        run = getattr(trainer, stage)
        quiet = {} if stage == "predict" else {"verbose": False}
        found = run(module, held_out(), ckpt_path="best", **quiet)
        assert bits(module) == bits(again)
        assert not callback.average.swapped
        if stage == "validate":
            assert found[0]["val_loss"] == pytest.approx(best.best_model_score.item())
    assert module.tested == [bits(again)]
    assert load(best.last_model_path)["tail_average"]["count"] == 3 * STEPS


def test_save_last_that_is_written_when_training_ends(tmp_path):
    """`ModelCheckpoint.on_train_end` comes after all others."""
    module = Net()
    last = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1000)
    fit(module, TailAveraging(0.5), last, epochs=2, enable_checkpointing=True)
    check(load(tmp_path / "last.ckpt"), module, 2 * STEPS)


def test_a_resume_of_another_model_is_refused(tmp_path):
    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(2, 2)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)

    path = tmp_path / "saved.ckpt"
    fit(Net(), TailAveraging(0.5), Saver("on_train_batch_end", path), epochs=1)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict"):
        fit(Wider(), TailAveraging(0.5), epochs=1, resume=path)
    wider = Wider()
    wider.strict_loading = False
    with pytest.raises(
        ValueError, match=r"missing more\.weight, more\.bias, which the average has"
    ):
        fit(wider, TailAveraging(0.5), epochs=1, resume=path)
    with pytest.raises(ValueError, match="rule"):
        fit(Net(), TailAveraging(0.25), epochs=1, resume=path)
    wider = Wider()
    wider.strict_loading = False
    fit(wider, TailAveraging(0.5, include="net.*"), epochs=1, resume=path)
    assert wider.trainer.global_step == STEPS


def test_other_state_in_a_checkpoint_is_left_alone(tmp_path):
    class Part(Net):
        """Saves but a part of its weights, and something else."""

        strict_loading = False

        def __init__(self, seed=0):
            super().__init__(seed)
            self.strict_loading = False

        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {name: x for name, x in state.items() if not name.startswith("net.3")}

        def on_save_checkpoint(self, checkpoint):
            checkpoint["mine"] = sorted(checkpoint["state_dict"])

    path = tmp_path / "saved.ckpt"
    module = Part()
    fit(module, TailAveraging(AnytimeWindow(0.5)), Saver("on_validation_end", path), epochs=1)
    checkpoint = load(path)
    assert checkpoint["mine"] == sorted(checkpoint["current_model_state"]) == sorted(bits(module))
    assert not any(name.startswith("net.3") for name in checkpoint["state_dict"])
    assert len([key for key in leaves(checkpoint["tail_average"]) if "net.3" in key]) > 0


def test_versions_of_modules_are_kept(tmp_path):
    for hook in ("on_train_batch_end", "on_validation_epoch_end", "on_train_end"):
        path = tmp_path / f"{hook}.ckpt"
        fit(Net(), Saver(hook, path), TailAveraging(0.5), epochs=1)
        checkpoint = torch.load(path, weights_only=False)
        for part in ("state_dict", "current_model_state"):
            assert checkpoint[part]._metadata["net.1"] == {"version": 2}


def test_a_checkpoint_outside_a_fit_is_untouched(tmp_path):
    module = Net()
    trainer = make_trainer(TailAveraging(0.5))
    trainer.validate(module, held_out(), verbose=False)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    assert not {"current_model_state", "tail_average"} & load(tmp_path / "plain.ckpt").keys()
