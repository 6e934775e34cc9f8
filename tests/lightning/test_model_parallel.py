"""`ModelParallelStrategy`: two processes that have a shard of each weight (FSDP2, gloo, CPUs).

All of them are forked from one fresh process: see `processes` in conftest.py. Each function is
run by new processes.

Slow: twenty runs of a Trainer, each in two processes.
"""

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tailavg import AnyTail
from tailavg.lightning import TailAveraging
from tailavg.torch import ParameterAverage
from tests.support.forks import on_ranks
from tests.support.lightning_training import (
    STEPS,
    Batches,
    Plain,
    Saver,
    assert_near,
    bits,
    everything,
    expected,
    held_out,
    make_trainer,
    network,
    values,
)

EPOCHS = 2
WINDOW = 0.4


class Sharded(Plain):
    """A module of which each process has shards: several have the same shape, and one is empty."""

    def __init__(self, seed: int = 0, sharded: bool = True) -> None:
        super().__init__(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            more = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)
            self.net = torch.nn.Sequential(*network(seed)[:1], *more, torch.nn.Linear(4, 1))
        self.sharded = sharded

    def configure_model(self):
        if self.sharded and not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Own(Batches):
    """Other batches in each process."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch + dist.get_rank()


class TensorParallel(Sharded):
    def configure_model(self):
        if not isinstance(self.net[0].weight, DTensor):
            mesh = self.device_mesh["tensor_parallel"]
            parallelize_module(self.net, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def run(*callbacks, seed=0, resume=None, epochs=EPOCHS, strategy=None, module=None, batches=Own):
    """Train, with validation after each epoch."""
    world = dist.get_world_size()
    strategy = strategy or ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    module = module or Sharded(seed)
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = make_trainer(
        *callbacks, epochs=epochs, devices=world, strategy=strategy, enable_checkpointing=saving
    )
    trainer.fit(module, batches(), held_out(), ckpt_path=resume)
    return trainer, module


def averaging(**options) -> TailAveraging:
    return TailAveraging(AnyTail(), window=WINDOW, **options)


def outcome(module, callback) -> tuple:
    """All that a run leaves behind in this process, but for means of no samples."""
    weights, state, optimizer = everything(module, callback)
    used = sum(x < state["/folded"] for key, x in state.items() if key.startswith("/starts/"))
    unused = tuple(f"/blocks/{i}/" for i in range(used, 100))
    return weights, {key: x for key, x in state.items() if not key.startswith(unused)}, optimizer


def save(result, folder: Path, name: str) -> None:
    torch.save(result, folder / f"{name}-{dist.get_rank()}.pt")


def load(folder: Path, name: str) -> list:
    """What each process saved."""
    return [torch.load(folder / f"{name}-{i}.pt", weights_only=False) for i in range(2)]


# What the processes run.


def unbroken(folder: Path) -> None:
    callback = averaging()
    every = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    best = ModelCheckpoint(folder, "best", monitor="val_loss")
    savers = [
        Saver("on_validation_epoch_end", folder / "in-validation.ckpt", STEPS),
        Saver("on_validation_epoch_end", folder / "weights.ckpt", STEPS, weights_only=True),
        Saver("on_train_batch_end", folder / "weights-in-training.ckpt", 5, weights_only=True),
    ]
    # before the callback, in whose hooks the weights change
    trainer, module = run(savers[2], callback, best, every, *savers[:2])
    save(outcome(module, callback), folder, "unbroken")
    history = {"steps": module.steps, "validated": module.validated, "averages": values(module)}
    save(history | {"last": module.last}, folder, "history")
    trainer.save_checkpoint(folder / "after.ckpt")
    (scores,) = trainer.test(module, held_out(), ckpt_path="best", verbose=False)
    assert scores["test_loss"] == pytest.approx(best.best_model_score.item())
    save([best.best_model_path, module.tested[-1]], folder, "best")


def resumed(folder: Path) -> None:
    for name, options in {
        "step=4": {},
        "step=12": {"offload": folder / "blocks"},
        "in-validation": {},
        "after": {},
    }.items():
        callback = averaging(**options)
        _, module = run(callback, seed=7, resume=folder / f"{name}.ckpt")
        save(outcome(module, callback), folder, f"resumed-{name}")


def without_the_callback(folder: Path) -> None:
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer, module = make_trainer(devices=2, strategy=strategy), Sharded(7)
    for name in ("step=4", "in-validation", "weights", "weights-in-training", "after"):
        trainer.validate(module, held_out(), ckpt_path=folder / f"{name}.ckpt", verbose=False)
        _, seen = module.validated[-1]
        save(seen, folder, f"validated-{name}")
    path, seen = load(folder, "best")[dist.get_rank()]
    trainer.test(module, held_out(), ckpt_path=path, verbose=False)
    assert module.tested[-1] == seen


def replicated(folder: Path) -> None:
    """The same run with DDP, where each process has all weights."""
    strategy = DDPStrategy(process_group_backend="gloo")
    _, module = run(averaging(), strategy=strategy, module=Sharded(sharded=False))
    save(values(module), folder, "replicated")


def tensor_parallel(folder: Path) -> None:
    outcomes = []
    for seed, resume in enumerate([None, folder / "parallel" / "step=4.ckpt"]):
        callback, module = averaging(), TensorParallel(seed)
        every = ModelCheckpoint(folder / "parallel", "{step}", every_n_train_steps=4)
        options = {"strategy": ModelParallelStrategy(1, 2), "batches": Batches, "epochs": 1}
        run(callback, *([] if resume else [every]), module=module, resume=resume, **options)
        outcomes.append(outcome(module, callback))
    save(outcomes, folder, "tensor-parallel")


def failed(folder: Path) -> None:
    for hook in ("on_validation_epoch_end", "on_train_end"):
        module = Sharded()
        module.fail[hook] = ValueError("as planned")
        with pytest.raises(ValueError, match="as planned"):
            run(averaging(), module=module, epochs=1)
        assert bits(module) == module.last

    with pytest.raises(ValueError, match="evaluate_raw: not possible with ModelParallelStrategy"):
        run(averaging(evaluate_raw=True))
    whole = ModelParallelStrategy(2, 1, save_distributed_checkpoint=False)
    with pytest.raises(ValueError, match="save_distributed_checkpoint=True"):
        run(averaging(), strategy=whole)
    with pytest.raises(ValueError, match=r"resume with the strategy and callback of that run"):
        run(averaging(), resume=folder / "ddp.ckpt")
    for other in (TailAveraging(0.25), averaging(include="net.0.*"), averaging(dtype=torch.double)):
        with pytest.raises(ValueError, match="with the options with which this average was saved"):
            run(other, resume=folder / "step=2.ckpt")

    # checkpoints that were saved in part
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step=2.ckpt" / "tail_average")
        shutil.copy(folder / "step=6.ckpt" / "meta.pt", folder / "step=8.ckpt")
    dist.barrier()
    for name in ("step=2", "step=8"):
        with pytest.raises(ValueError, match="was not saved completely"):
            run(averaging(), resume=folder / f"{name}.ckpt")

    run(without := ModelCheckpoint(folder, "without"), epochs=1)
    callback = averaging()
    with pytest.warns(match="written without") if dist.get_rank() == 0 else nullcontext():
        run(callback, resume=without.best_model_path, epochs=2)
    assert callback.average.count == STEPS


def one_process(folder: Path) -> None:
    """A checkpoint of two processes, in one."""
    callback = averaging()
    _, module = run(callback, seed=7, resume=folder / "after.ckpt")
    save([values(module), callback.average.count], folder, "one-process")


def main(top: Path) -> None:
    """Run everything above in processes."""
    single = Sharded(sharded=False)
    make_trainer(averaging(), Saver("on_train_end", top / "ddp.ckpt"), epochs=1).fit(
        single, Batches(), held_out()
    )
    together = unbroken, resumed, without_the_callback, replicated, tensor_parallel, failed
    for function in (*together, one_process):
        (top / "store").unlink(missing_ok=True)
        on_ranks(1 if function is one_process else 2, function, top)


# The tests.


@pytest.fixture(scope="module")
def folder(processes):
    """What the processes left."""
    return processes / "sharded"


def averages(folder: Path, step: int) -> dict:
    """The averages after a step, from the weights that the run recorded."""
    history = load(folder, "history")[0]["steps"]
    average = ParameterAverage(Sharded(), AnyTail())
    for _ in range(step):
        average.update()
    return expected(history[:step], average.weights(WINDOW))


def whole(path: Path) -> dict:
    """A folder of torch.distributed.checkpoint, gathered in this process."""
    dcp_to_torch_save(path, path / "whole.pt")
    return torch.load(path / "whole.pt", weights_only=False)


def test_validation_in_a_fit_and_the_end_of_it_have_the_averages(folder):
    first, second = load(folder, "history")
    np.testing.assert_equal(first["averages"], second["averages"])
    assert first["last"] != second["last"]  # each process has its own shards
    assert_near(first["averages"], averages(folder, EPOCHS * STEPS))
    assert [step for step, _ in first["validated"]] == [STEPS, 2 * STEPS]
    for step, seen in first["validated"]:
        assert_near(seen, averages(folder, step))


def test_averages_are_those_of_ddp(folder):
    assert_near(load(folder, "replicated")[0], averages(folder, EPOCHS * STEPS), rtol=1e-4)


@pytest.mark.parametrize("name", ["step=4", "step=12", "in-validation", "after"])
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(folder, name):
    """In particular, the second process goes on from its own shards, not from the first's."""
    first, second = load(folder, "unbroken")
    assert first[0] != second[0]
    assert first[1]["/count"] == EPOCHS * STEPS
    assert load(folder, f"resumed-{name}") == [first, second]


def test_a_resumed_run_with_tensor_parallelism_is_the_unbroken_one_to_the_bit(folder):
    first, second = load(folder, "tensor-parallel")
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0][0] != second[0][0]  # each process has its own shards
    assert first[0][1]["/count"] == STEPS


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step=4", 4),
        ("in-validation", STEPS),
        ("weights", STEPS),
        ("weights-in-training", 5),
        ("after", EPOCHS * STEPS),
    ],
)
def test_a_checkpoint_has_the_averages(folder, name, step):
    wanted = averages(folder, step)
    assert_near(values(whole(folder / f"{name}.ckpt")["state_dict"]), wanted)
    for seen in load(folder, f"validated-{name}"):
        assert_near(seen, wanted)
    shards = folder / f"{name}.ckpt" / "tail_average"
    assert shards.exists() == ("weights" not in name)
    if shards.exists():
        state = whole(shards)
        assert state["tail_average"]["count"] == step
        weights = load(folder, "history")[0]["steps"][step - 1]
        np.testing.assert_equal(values(state["current_model_state"]), weights)


def test_a_checkpoint_of_two_processes_is_loaded_by_one(folder):
    weights, count = torch.load(folder / "one-process-0.pt", weights_only=False)
    assert count == EPOCHS * STEPS
    np.testing.assert_equal(weights, load(folder, "history")[0]["averages"])
