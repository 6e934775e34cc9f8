"""What Lightning tests of its own `WeightAveraging` holds for `TailAveraging`."""

import pickle
from copy import deepcopy

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import (
    BoringModel,
    RandomDataset,
    RandomIterableDataset,
)
from torch import nn
from torch.utils.data import DataLoader

from tailavg import Exponential
from tailavg.lightning import TailAveraging
from tests.support.lightning_training import bits, make_trainer

EPOCHS = 3
STEPS = 4  # in an epoch: 32 samples, batches of 4, two of them accumulated


class Boring(BoringModel):
    def __init__(self, batch_norm: bool = True, crash: int | None = None) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(32)] if batch_norm else []
        self.layer = nn.Sequential(nn.Linear(32, 32), *norm, nn.ReLU(), nn.Linear(32, 2))
        self.crash = crash

    def training_step(self, batch, index):
        if self.crash is not None and self.trainer.current_epoch >= self.crash:
            raise ValueError("as planned")
        return super().training_step(batch, index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


class Configured(Boring):
    def __init__(self) -> None:
        BoringModel.__init__(self)
        self.layer = self.crash = None

    def configure_model(self):
        self.layer = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


class Counted(TailAveraging):
    """A subclass, with assertions in hooks."""

    ended = 0

    def on_train_epoch_end(self, trainer, *args):
        super().on_train_epoch_end(trainer, *args)
        assert self.average.count == trainer.global_step
        assert not self.average.swapped

    def on_validation_epoch_end(self, trainer, *args):
        super().on_validation_epoch_end(trainer, *args)
        assert self.average.swapped

    def on_train_end(self, trainer, module):
        super().on_train_end(trainer, module)
        assert self.average.count == EPOCHS * STEPS
        assert bits(module) == bits(self.average.averaged_state_dict())
        self.ended += 1


def train(model, callback, folder, *more, dataset=None, resume=None):
    trainer = make_trainer(
        callback,
        *more,
        epochs=EPOCHS,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
        enable_checkpointing=bool(more),
        default_root_dir=folder,
    )
    loader = DataLoader(dataset or RandomDataset(32, 32), batch_size=4, shuffle=False)
    trainer.fit(model, loader, ckpt_path=resume)
    assert trainer.lightning_module is model
    assert callback.ended == 1


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("dataset", [RandomDataset, RandomIterableDataset])
def test_counts_and_swaps(tmp_path, batch_norm, dataset):
    rule = Exponential(1999)  # an EMA of decay 0.999
    train(Boring(batch_norm), Counted(rule), tmp_path, dataset=dataset(32, 32))


def test_a_run_that_crashes_is_resumed(tmp_path):
    torch.manual_seed(0)
    first, dataset = Boring(), RandomDataset(32, 32)
    unbroken = deepcopy(first)
    train(unbroken, Counted(0.25), tmp_path, dataset=dataset)
    for crash in range(1, EPOCHS):
        broken, saved = deepcopy(first), tmp_path / f"saved-{crash}"
        broken.crash = crash
        with pytest.raises(ValueError, match="as planned"):
            train(broken, Counted(0.25), tmp_path, ModelCheckpoint(saved), dataset=dataset)
        (path,) = saved.iterdir()
        again = Boring.load_from_checkpoint(path, weights_only=True)  # the averages so far
        train(again, Counted(0.25), tmp_path, ModelCheckpoint(saved), dataset=dataset, resume=path)
        assert bits(again) == bits(unbroken), crash


def test_configure_model(tmp_path):
    model = Configured()
    train(model, Counted(0.25), tmp_path)
    assert isinstance(model.layer, nn.Sequential)


def test_it_can_be_sent_to_other_processes():
    """As `ddp_spawn` does."""
    callback = Counted(0.25, update_every=2)
    for again in (deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert (again.rule, again._options) == (callback.rule, callback._options)
