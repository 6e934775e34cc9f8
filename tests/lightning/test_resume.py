"""A fit that is stopped and resumed is the same to the bit, wherever it stops."""

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from tailavg import AnyTail, Decay
from tailavg.lightning import TailAveraging
from tests.support.lightning_training import (
    STEPS,
    Net,
    Saver,
    assert_near,
    bits,
    everything,
    expected,
    fit,
)


class LoadsLate(SingleDeviceStrategy):
    """Checkpoints are loaded after `on_fit_start`, as in strategies that shard the model."""

    @property
    def restore_checkpoint_after_setup(self):
        return True


STOPS = (3, STEPS, STEPS + 4, 3 * STEPS)


@pytest.mark.parametrize(
    ("rule", "options", "late"),
    [
        (0.5, {}, {3, STEPS + 4}),
        (AnyTail(), {"window": Decay(0.3, "cosine")}, {STEPS, 3 * STEPS}),
        (8, {"update_every": 3}, {3, 3 * STEPS}),
    ],
    ids=["0.5", "AnyTail", "every third"],
)
def test_resume(tmp_path, rule, options, late):
    unbroken, first = Net(), TailAveraging(rule, **options)
    paths = {step: tmp_path / f"step-{step}.ckpt" for step in STOPS}
    fit(unbroken, first, *(Saver("on_train_batch_end", paths[step], step) for step in STOPS))
    seen = dict(unbroken.validated)
    for step, path in paths.items():
        resumed, second = Net(seed=9), TailAveraging(rule, **options)
        strategy = LoadsLate(torch.device("cpu")) if step in late else "auto"
        fit(resumed, second, resume=path, strategy=strategy)
        assert everything(resumed, second) == everything(unbroken, first), step
        assert resumed.last in (None, unbroken.last), step
        validated = dict(resumed.validated)
        assert {at for at in seen if at > step} <= validated.keys() <= seen.keys(), step
        for at, weights in validated.items():
            assert_near(weights, seen[at], rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_resume_from_the_end_of_an_epoch(tmp_path, precision):
    hooks = ("on_validation_end", "on_train_epoch_end", "on_validation_start")
    unbroken, first = Net(), TailAveraging(0.5)
    savers = [Saver(hook, tmp_path / f"{hook}.ckpt", 2 * STEPS) for hook in hooks]
    fit(unbroken, first, *savers, precision=precision)
    for hook in hooks:
        resumed, second = Net(seed=9), TailAveraging(0.5)
        fit(resumed, second, resume=tmp_path / f"{hook}.ckpt", precision=precision)
        assert everything(resumed, second) == everything(unbroken, first), hook


def test_a_finished_run_is_resumed_and_goes_on(tmp_path):
    path = tmp_path / "saved.ckpt"
    unbroken, first = Net(), TailAveraging(0.5)
    fit(unbroken, first, epochs=3)
    half, callback = Net(), TailAveraging(0.5)
    fit(half, callback, epochs=2).save_checkpoint(path)  # the module has the averages by then
    again, callback = Net(seed=9), TailAveraging(0.5)
    fit(again, callback, epochs=2, resume=path)  # nothing left to train
    assert bits(again) == bits(half)
    resumed, second = Net(seed=9), TailAveraging(0.5)
    fit(resumed, second, epochs=3, resume=path)
    assert everything(resumed, second) == everything(unbroken, first)


def test_a_checkpoint_without_an_average(tmp_path):
    path = tmp_path / "saved.ckpt"
    plain = Net()
    fit(plain, Saver("on_train_epoch_end", path), epochs=1)
    module, callback = Net(seed=9), TailAveraging(0.5)
    with pytest.warns(UserWarning, match="the checkpoint was written without TailAver"):
        fit(module, callback, epochs=2, resume=path)
    assert callback.average.count == STEPS
    unbroken = Net()
    fit(unbroken, epochs=2)
    assert module.last == unbroken.last
    assert_near(module, expected(unbroken.steps[STEPS:], callback.average.weights()))


def test_a_checkpoint_of_lightnings_own_callback(tmp_path):
    """Training goes on from its training weights."""
    path = tmp_path / "saved.ckpt"
    saver = Saver("on_train_epoch_end", path)
    fit(Net(), EMAWeightAveraging(decay=0.9), saver, epochs=1)
    module, callback = Net(seed=9), TailAveraging(0.5)
    with (
        pytest.warns(UserWarning, match="the checkpoint was written without TailAver"),
        pytest.warns(UserWarning, match="Please add the following callbacks"),
    ):
        fit(module, callback, epochs=2, resume=path)
    unbroken = Net()
    fit(unbroken, epochs=2)
    assert module.last == unbroken.last


def test_a_resume_without_the_callback_warns(tmp_path):
    path = tmp_path / "saved.ckpt"
    fit(Net(), TailAveraging(0.5), Saver("on_train_epoch_end", path), epochs=1)
    with pytest.warns(UserWarning, match=r"Please add the following callbacks: \['TailAveraging'"):
        fit(Net(), epochs=2, resume=path)


# An exception, and the checkpoint that it leaves. (In `training_step`, Lightning loses the batch.)


@pytest.mark.parametrize("hook", ["validation_step", "on_validation_epoch_end"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.filterwarnings("ignore:.*Please add the following callbacks")
def test_resume_after_an_exception(tmp_path, hook, own):
    unbroken, first = Net(), TailAveraging(0.5)
    fit(unbroken, first)
    broken = Net()
    broken.fail[hook] = ValueError("as planned")
    if own:
        keep = ModelCheckpoint(
            tmp_path, filename="stopped", save_on_exception=True, every_n_epochs=100
        )
    else:
        keep = OnExceptionCheckpoint(tmp_path, "stopped")
    with pytest.raises(ValueError, match="as planned"):
        fit(broken, TailAveraging(0.5), keep, enable_checkpointing=True)
    resumed, second = Net(seed=9), TailAveraging(0.5)
    fit(resumed, second, resume=tmp_path / "stopped.ckpt")
    assert everything(resumed, second) == everything(unbroken, first)
