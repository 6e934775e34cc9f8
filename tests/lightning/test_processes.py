"""Runs in processes of their own: killed ones, and two that train together (DDP, gloo).

All of them are forked from one fresh process: see `processes` in conftest.py.
"""

import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tailavg import AnyTail
from tailavg.lightning import TailAveraging
from tests.support.forks import exit_code, kill, on_ranks
from tests.support.lightning_training import (
    STEPS,
    Net,
    Plain,
    bits,
    everything,
    fit,
    leaves,
    make_trainer,
)


@pytest.fixture(scope="module")
def folder(processes):
    """What the processes left."""
    return processes / "processes"


# Killed runs.


def run(folder: Path, seed: int = 0, death: tuple[str, int] | None = None) -> None:
    """Train for three epochs, from the last checkpoint if there is one; be killed in a hook."""
    callback = TailAveraging(AnyTail(), window=0.4, offload=folder / "blocks")
    keep = ModelCheckpoint(folder / "saved", every_n_train_steps=2, save_top_k=-1, save_last="link")
    module = Net(seed)
    if death:
        hook, step = death
        setattr(module, hook, lambda *_: module.trainer.global_step >= step and kill())
    last = folder / "saved" / "last.ckpt"
    resume = last if last.exists() else None
    fit(module, callback, keep, enable_checkpointing=True, resume=resume)
    torch.save(everything(module, callback), folder / "everything.pt")


def test_a_run_that_is_killed_twice_is_the_unbroken_one_to_the_bit(folder, tmp_path):
    run(tmp_path)
    unbroken, resumed = (
        torch.load(path / "everything.pt", weights_only=False)
        for path in (tmp_path, folder / "killed")
    )
    assert resumed == unbroken


# Two processes that train together.

TOGETHER = 5  # steps in an epoch


def train_together(folder: Path) -> None:
    """Train in one process of two, and keep what each of its runs has in the end."""
    data = torch.rand(2 * 4 * TOGETHER, 3, generator=torch.Generator().manual_seed(0))
    path = folder / "saved.ckpt"

    class Saving(Plain):
        def on_train_epoch_end(self):
            if self.trainer.current_epoch == 0:
                self.trainer.save_checkpoint(path)

    def run(seed=0, fail=None, resume=None, **options):
        module, callback = Saving(seed), TailAveraging(AnyTail(), window=0.5, **options)
        if fail:
            module.fail[fail] = ValueError("as planned")
        trainer = make_trainer(
            callback, epochs=2, devices=2, strategy=DDPStrategy(process_group_backend="gloo")
        )
        assert trainer.global_rank == dist.get_rank()
        loaders = DataLoader(data, batch_size=4), DataLoader(data[:8], batch_size=4)
        if fail:
            with pytest.raises(ValueError, match="as planned"):
                trainer.fit(module, *loaders)
            return bits(module), module.last
        trainer.fit(module, *loaders, ckpt_path=resume)
        _, validated = module.validated[-1]
        seen = {name: value.tobytes() for name, value in validated.items()}
        return bits(module), module.last, leaves(callback.average.state_dict()), seen

    runs = {"plain": run(), "offloaded": run(offload=folder / "blocks")}
    runs["resumed"] = run(seed=9, resume=path)
    runs["failed"] = run(fail="on_validation_epoch_end")
    torch.save(runs, folder / f"rank-{dist.get_rank()}.pt")


def test_both_processes_have_the_same_averages(folder):
    ranks = [torch.load(folder / f"rank-{i}.pt", weights_only=False) for i in range(2)]
    assert ranks[0] == ranks[1]
    runs = ranks[0]
    weights, last, state, _ = runs["plain"]
    assert state["/count"] == 2 * TOGETHER
    assert weights != last
    assert runs["offloaded"] == runs["resumed"] == runs["plain"]
    assert len(list((folder / "blocks").iterdir())) == 2  # one for each process
    failed, last = runs["failed"]
    assert failed == last


def main(top: Path) -> None:
    """Run everything above in processes."""
    (top / "killed").mkdir()
    deaths = [("on_before_optimizer_step", 5), ("on_validation_epoch_end", 2 * STEPS), None]
    codes = [exit_code(run, top / "killed", seed, death) for seed, death in enumerate(deaths)]
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, 0]
    on_ranks(2, train_together, top)
