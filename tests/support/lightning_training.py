"""What the tests of `tailavg.lightning` share: a module that records its weights; runs of it."""

import logging

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.distributed.tensor import DTensor

torch.set_num_threads(1)  # tensors are tiny and tests run side by side
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

STEPS = 7  # batches in an epoch


def values(tensors) -> dict[str, np.ndarray]:
    """Copies in double precision, by name. The shards of all processes are gathered."""
    items = tensors.items() if isinstance(tensors, dict) else tensors.named_parameters()
    whole = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in items}
    return {name: x.detach().double().numpy(force=True).copy() for name, x in whole.items()}


def bits(module) -> dict[str, bytes]:
    """Every parameter and buffer (or this process's shards), to the bit; or a state dict's."""
    state = module if isinstance(module, dict) else module.state_dict()
    shards = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state.items()}
    return {
        name: shard.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, shard in shards.items()
    }


def leaves(tree, path: str = "") -> dict[str, object]:
    """The values in nested dicts and lists, by path; a tensor as its bytes."""
    if isinstance(tree, torch.Tensor):
        return {path: (tree.dtype, tree.shape, bits({"": tree})[""])}
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found = [leaves(value, f"{path}/{key}") for key, value in items]
        return {key: value for one in found for key, value in one.items()}
    return {path: tree}


def everything(module, callback) -> tuple:
    """All that a run leaves behind, to the bit: the weights, the average, the optimizer."""
    optimizer = module.optimizers().optimizer.state_dict()
    return bits(module), leaves(callback.average.state_dict()), leaves(optimizer)


class Batches:
    """A loader that can be resumed in the middle of an epoch; each epoch has other batches."""

    def __init__(self, steps: int = STEPS, size: int = 6, fixed: bool = False) -> None:
        self.steps, self.size, self.fixed = steps, size, fixed
        self.epoch = self.at = 0
        self.sampler, self.batch_sampler = self, None  # Lightning tells it the epoch

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch and not self.fixed:
            self.epoch, self.at = epoch, 0

    def __len__(self):
        return self.steps

    def __iter__(self):
        if self.at == self.steps:
            self.at = 0
        while self.at < self.steps:
            self.at += 1
            random = torch.Generator().manual_seed(1000 * self.epoch + self.at)
            yield torch.rand(self.size, 3, generator=random)

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state):
        self.epoch, self.at = state["epoch"], state["at"]


def held_out(batches: int = 1) -> Batches:
    """For validation: always the same batches."""
    return Batches(batches, fixed=True)


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


class Net(LightningModule):
    """Keeps its weights after each step of the optimizer, and as it sees them in validation."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.net = network(seed)
        self.steps: list[dict] = []
        self.validated: list[tuple[int, dict]] = []
        self.tested: list[dict] = []
        self.last: dict | None = None
        self.fail: dict[str, BaseException] = {}  # by hook

    def _loss(self, batch):
        return (self.net(batch) - batch[:, :2]).square().mean()

    def _maybe_fail(self, hook: str) -> None:
        if hook in self.fail and self.trainer.global_step >= STEPS:
            raise self.fail[hook]

    def training_step(self, batch, index):
        assert self.last in (None, bits(self)), "training goes on from its own weights"
        self._maybe_fail("training_step")
        return self._loss(batch)

    def on_train_batch_end(self, outputs, batch, index):
        self.last = bits(self)
        if self.trainer.global_step > len(self.steps):
            self.steps.append(values(self))

    def on_train_epoch_start(self):
        assert self.last in (None, bits(self))

    def on_validation_start(self):
        self._maybe_fail("on_validation_start")

    def validation_step(self, batch, index):
        self._maybe_fail("validation_step")
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, values(self)))
        self.log("val_loss", self._loss(batch))

    def on_validation_epoch_end(self):
        self._maybe_fail("on_validation_epoch_end")

    def on_train_end(self):
        self._maybe_fail("on_train_end")

    def test_step(self, batch, index):
        self.tested.append(bits(self))
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch, index):
        return self.net(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Plain(Net):
    """Without BatchNorm."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.net[1] = nn.Identity()


class Saver(Callback):
    """Saves a checkpoint in one hook, at the first step that is reached."""

    def __init__(self, hook: str, path, step: int = 1, weights_only: bool = False) -> None:
        self.path, self.step, self.weights_only = path, step, weights_only
        self.saved = False
        setattr(self, hook, self.save)

    def save(self, trainer, module, *_, **__):
        if trainer.global_step >= self.step and not self.saved:
            self.saved = True
            trainer.save_checkpoint(self.path, self.weights_only)


def make_trainer(*callbacks, epochs: int = 3, **options) -> Trainer:
    defaults = {
        "max_epochs": epochs,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(callbacks=list(callbacks), **(defaults | options))


def fit(module, *callbacks, resume=None, **options) -> Trainer:
    """Train, with a validation after every epoch."""
    trainer = make_trainer(*callbacks, **options)
    trainer.fit(module, Batches(), held_out(), ckpt_path=resume)
    return trainer


def expected(steps, alpha) -> dict[str, np.ndarray]:
    """The weighted sum of recorded weights."""
    assert len(steps) == len(alpha)
    return {name: np.tensordot(alpha, np.array([x[name] for x in steps]), 1) for name in steps[0]}


def assert_near(got, wanted, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    got = got if isinstance(got, dict) else values(got)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=atol, err_msg=name)
