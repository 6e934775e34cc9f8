"""A fit that is stopped and resumed is the same to the bit, wherever it stops."""

import os
import signal
import subprocess
import sys
from pathlib import Path

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
    expected,
    fit,
    leaves,
)


def whole(module, callback):
    """All that a run leaves behind, to the bit."""
    optimizer = module.optimizers().optimizer.state_dict()
    return bits(module), leaves(callback.average.state_dict()), leaves(optimizer)


class LoadsLate(SingleDeviceStrategy):
    """Checkpoints are loaded after `on_fit_start`, as in strategies that shard the model."""

    @property
    def restore_checkpoint_after_setup(self):
        return True


RULES = [(0.5, {}), (AnyTail(), {"window": Decay(0.3, "cosine")}), (8, {"update_every": 3})]


@pytest.mark.parametrize(("rule", "options"), RULES, ids=["0.5", "AnyTail", "every third"])
@pytest.mark.parametrize("step", [3, STEPS, STEPS + 4, 3 * STEPS])
@pytest.mark.parametrize("late", [False, True])
def test_resume(tmp_path, rule, options, step, late):
    path = tmp_path / "saved.ckpt"
    unbroken, first = Net(), TailAveraging(rule, **options)
    fit(unbroken, first, Saver("on_train_batch_end", path, step))
    resumed, second = Net(seed=9), TailAveraging(rule, **options)
    strategy = LoadsLate(torch.device("cpu")) if late else "auto"
    fit(resumed, second, resume=path, strategy=strategy)
    assert whole(resumed, second) == whole(unbroken, first)
    assert resumed.last in (None, unbroken.last)
    seen = [one for one, _ in unbroken.validated if one > step]
    assert [one for one, _ in resumed.validated if one > step] == seen
    for (_, one), (_, other) in zip(
        unbroken.validated[::-1], resumed.validated[::-1], strict=False
    ):
        assert_near(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("hook", ["on_validation_end", "on_train_epoch_end", "on_validation_start"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_resume_from_the_end_of_an_epoch(tmp_path, hook, precision):
    path = tmp_path / "saved.ckpt"
    unbroken, first = Net(), TailAveraging(0.5)
    fit(unbroken, first, Saver(hook, path, 2 * STEPS), precision=precision)
    resumed, second = Net(seed=9), TailAveraging(0.5)
    fit(resumed, second, resume=path, precision=precision)
    assert whole(resumed, second) == whole(unbroken, first)


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
    assert whole(resumed, second) == whole(unbroken, first)


def test_a_checkpoint_without_an_average(tmp_path):
    path = tmp_path / "saved.ckpt"
    plain = Net()
    fit(plain, Saver("on_train_epoch_end", path), epochs=1)
    module, callback = Net(seed=9), TailAveraging(0.5)
    with pytest.warns(UserWarning, match="expected a checkpoint that was written with TailAver"):
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
        pytest.warns(UserWarning, match="expected a checkpoint that was written with TailAver"),
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


# A process that is killed.


def run(folder: Path, seed: int = 0, die: tuple[str, int] | None = None) -> None:
    """Train for three epochs, from the last checkpoint if there is one; be killed in a hook."""
    callback = TailAveraging(AnyTail(), window=0.4, offload=folder / "blocks")
    keep = ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=-1, save_last="link")
    module = Net(seed)
    if die:
        hook, step = die

        def kill(*_):
            if module.trainer.global_step >= step:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(module, hook, kill)
    last = folder / "saved" / "last.ckpt"
    resume = last if last.exists() else None
    fit(module, callback, keep, enable_checkpointing=True, resume=resume)
    torch.save(whole(module, callback), folder / "whole.pt")


def run_and_be_killed(folder: Path) -> None:
    """In a process that has done nothing before: three children, of which two are killed."""
    deaths = [("on_before_optimizer_step", 5), ("on_validation_epoch_end", 2 * STEPS), None]
    for seed, die in enumerate(deaths):
        if not (child := os.fork()):
            run(folder, seed, die)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == (signal.SIGKILL if die else 0), (die, status)


def test_a_run_that_is_killed_twice_is_the_unbroken_one_to_the_bit(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    run(unbroken)
    killed = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, broken],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert killed.returncode == 0, killed.stderr
    one, other = (
        torch.load(folder / "whole.pt", weights_only=False) for folder in (unbroken, broken)
    )
    assert one == other


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
    assert whole(resumed, second) == whole(unbroken, first)


if __name__ == "__main__":
    run_and_be_killed(Path(sys.argv[1]))
