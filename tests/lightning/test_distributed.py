"""`TailAveraging` in two processes (DDP, gloo): both have the same averages, to the bit."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.torch_processes import on_ranks

STEPS = 5


def train(folder):
    """One process of two: what each of its runs has at last."""
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader

    from tailavg import AnyTail
    from tailavg.lightning import TailAveraging
    from tests.support.lightning_training import Plain, bits, leaves, make_trainer

    warnings.simplefilter("ignore")
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}  # as torchrun would
    os.environ |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "tests"}
    data = torch.rand(2 * 4 * STEPS, 3, generator=torch.Generator().manual_seed(0))
    path = folder / "saved.ckpt"

    class Net(Plain):
        def on_train_epoch_end(self):
            if self.trainer.current_epoch == 0:
                self.trainer.save_checkpoint(path)

    def run(seed=0, fail=None, resume=None, **options):
        module, callback = Net(seed), TailAveraging(AnyTail(), window=0.5, **options)
        if fail:
            module.fail[fail] = ValueError("as planned")
        trainer = make_trainer(
            callback, epochs=2, devices=2, strategy=DDPStrategy(process_group_backend="gloo")
        )
        assert trainer.global_rank == int(rank)
        loaders = DataLoader(data, batch_size=4), DataLoader(data[:8], batch_size=4)
        if fail:
            with pytest.raises(ValueError, match="as planned"):
                trainer.fit(module, *loaders)
            return bits(module), module.last
        trainer.fit(module, *loaders, ckpt_path=resume)
        seen = [{name: x.tobytes() for name, x in one.items()} for _, one in module.validated]
        return bits(module), module.last, leaves(callback.average.state_dict()), seen[-1]

    found = {"plain": run(), "offloaded": run(offload=folder / "blocks")}
    found["resumed"] = run(seed=9, resume=path)
    found["failed"] = run(fail="on_validation_epoch_end")
    return found


def test_both_processes_have_the_same_averages(tmp_path):
    one, other = on_ranks(2, train, tmp_path, seconds=120)
    assert one == other
    weights, last, state, _ = one["plain"]
    assert state["/count"] == 2 * STEPS
    assert weights != last
    assert one["offloaded"] == one["resumed"] == one["plain"]
    assert len(list((tmp_path / "blocks").iterdir())) == 2  # one for each process
    failed, last = one["failed"]
    assert failed == last
