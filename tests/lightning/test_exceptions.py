"""Whatever is raised in a fit, the module has its training weights back."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from tailavg import AnyTail
from tailavg.lightning import TailAveraging
from tests.support.effort import some
from tests.support.interrupts import interrupted
from tests.support.lightning_training import (
    STEPS,
    Batches,
    Net,
    Saver,
    assert_near,
    bits,
    fit,
    held_out,
    make_trainer,
)

HOOKS = [
    "training_step",
    "on_validation_start",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_end",
]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("rule", [0.5, AnyTail()], ids=str)
def test_the_training_weights_come_back(hook, rule):
    module = Net()
    module.fail[hook] = ValueError("as planned")
    callback = TailAveraging(rule, window=0.5 if rule != 0.5 else None)
    with pytest.raises(ValueError, match="as planned"):
        fit(module, callback, epochs=2)
    assert bits(module) == module.last
    assert not callback.average.swapped
    assert callback.average.count == len(module.steps)


@pytest.mark.parametrize("hook", ["validation_step", "on_train_end"])
def test_an_interrupt(hook):
    module = Net()
    module.fail[hook] = KeyboardInterrupt()
    with pytest.raises(SystemExit):
        fit(module, TailAveraging(0.5), epochs=2)
    assert bits(module) == module.last


@pytest.mark.parametrize("hook", [*HOOKS, "in a callback before", "in a callback after"])
def test_checkpoints_that_are_written_because_of_it(tmp_path, hook):
    module = Net()

    class Fails(Callback):
        def on_validation_epoch_end(self, trainer, module):
            if trainer.global_step >= STEPS:
                raise ValueError("as planned")

    module.fail[hook] = ValueError("as planned")
    callback = TailAveraging(0.5)
    own = tmp_path / "own.ckpt"
    callbacks = [Saver("on_exception", own), callback]  # it saves before our turn
    if hook.startswith("in"):
        callbacks.insert(2 if hook.endswith("after") else 0, Fails())
    keep = [
        ModelCheckpoint(
            tmp_path, filename="stopped", save_on_exception=True, every_n_train_steps=1000
        ),
        OnExceptionCheckpoint(tmp_path, "exception"),
    ]
    with pytest.raises(ValueError, match="as planned"):
        fit(module, *callbacks, *keep, epochs=2, enable_checkpointing=True)
    assert bits(module) == module.last
    wanted = bits(callback.average.averaged_state_dict())
    for name in ("own", "stopped", "exception"):
        checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert bits(checkpoint["current_model_state"]) == module.last, name
        assert bits(checkpoint["state_dict"]) == wanted, name
        assert checkpoint["tail_average"]["count"] == len(module.steps), name


def test_a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch):
    module, callback = Net(), TailAveraging(0.5)
    last = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1000)
    trainer = make_trainer(callback, last, epochs=1, enable_checkpointing=True)
    io = trainer.strategy.checkpoint_io

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(io, "save_checkpoint", full)
    with pytest.raises(OSError, match="no space left"):
        trainer.fit(module, Batches(), held_out())
    assert bits(module) == module.last
    assert trainer.strategy.checkpoint_io is io  # ours has left


def test_an_exception_after_the_fit_leaves_the_averages():
    module = Net()
    trainer = fit(module, TailAveraging(0.5), epochs=1)
    averages = bits(module)
    module.fail["validation_step"] = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"):
        trainer.validate(module, held_out(), verbose=False)
    assert bits(module) == averages


def test_weights_that_are_in_no_state_dict():
    class Part(Net):
        def state_dict(self, *args, **kwargs):
            state = super().state_dict(*args, **kwargs)
            return {name: x for name, x in state.items() if not name.startswith("net.3")}

    module = Part()
    module.fail["on_train_end"] = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"):
        fit(module, TailAveraging(0.5), epochs=2)
    assert_near(module, module.steps[-1], rtol=0, atol=0)


def test_a_fit_that_fails_before_it_starts_leaves_the_averages_of_the_last():
    class Refuses(Callback):
        def setup(self, trainer, module, stage):
            raise ValueError("as planned")

    module, callback = Net(), TailAveraging(0.5)
    fit(module, callback, epochs=1)
    averages = bits(module)
    with pytest.raises(ValueError, match="as planned"):
        fit(module, Refuses(), callback)
    assert bits(module) == averages


def test_a_checkpoint_after_a_failed_fit(tmp_path):
    module, callback = Net(), TailAveraging(0.5)
    module.fail["validation_step"] = ValueError("as planned")
    trainer = make_trainer(callback)
    with pytest.raises(ValueError, match="as planned"):
        trainer.fit(module, Batches(), held_out())
    trainer.save_checkpoint(tmp_path / "rescued.ckpt")
    checkpoint = torch.load(tmp_path / "rescued.ckpt", weights_only=True)
    assert bits(checkpoint["current_model_state"]) == module.last
    assert bits(checkpoint["state_dict"]) == bits(callback.average.averaged_state_dict())


def test_a_fit_after_a_failed_one():
    module, callback = Net(), TailAveraging(0.5)
    module.fail["validation_step"] = ValueError("as planned")
    with pytest.raises(ValueError, match="as planned"):
        fit(module, callback)
    module.fail.clear()
    module.steps.clear()
    module.train()
    fit(module, callback, epochs=1)
    assert callback.average.count == STEPS


# An interrupt at any instruction of a hook.


class Stopped:
    """A fit between two hooks."""

    def __init__(self) -> None:
        self.module, self.callback = Net(), TailAveraging(AnyTail(), window=0.5)
        optimizer = self.module.configure_optimizers()
        strategy = SimpleNamespace(
            save_checkpoint=None, lightning_module_state_dict=self.module.state_dict
        )
        state = SimpleNamespace(fn=TrainerFn.FITTING)
        self.trainer = SimpleNamespace(strategy=strategy, optimizers=[optimizer], state=state)
        for hook in ("setup", "on_fit_start"):
            self.call(hook, *(["fit"] if hook == "setup" else []))
        for batch in Batches(steps=3):
            self.module._loss(batch).backward()
            optimizer.step()
        self.last = bits(self.module)

    def call(self, hook, *args):
        return getattr(self.callback, hook)(self.trainer, self.module, *args)


def validate(run):
    run.call("on_validation_start")
    assert bits(run.module) != run.last
    run.call("on_validation_end")


def save_in_validation(run):
    run.call("on_validation_start")
    run.call("on_save_checkpoint", {"state_dict": run.module.state_dict()})
    assert bits(run.module) != run.last
    run.call("on_validation_end")


@pytest.mark.parametrize(
    "call", [validate, save_in_validation, lambda run: run.call("on_train_end")]
)
def test_an_interrupt_at_any_instruction(call):
    places = 0
    for at, run in interrupted(Stopped, call, short=20, some=some(40, 400)):
        places += 1
        run.call("on_exception", KeyboardInterrupt())
        assert bits(run.module) == run.last, at
        assert not run.callback.average.swapped
    assert places > 20
