"""Trainers with FSDP2: two processes (gloo), each with its shards of the model and the average.

accelerate ignores FSDP on CPUs, so the processes tell it otherwise; see `with_fsdp`. As in
`test_processes`, all of them are forked from one fresh process, which runs this file.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from tailavg.torch import ParameterAverage
from tests.support.forks import on_ranks
from tests.support.hugging_face_training import (
    RESUMED_RULE,
    GPT2LMHeadModel,
    Seen,
    Steps,
    arguments,
    bits,
    close,
    first_is_best,
    make,
    tiny,
    tokens,
    weights,
)
from tests.support.paths import ROOT
from tests.support.processes import python

WINDOW = RESUMED_RULE["window"]
SAVED = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
RUNS = {
    "sharded": {},
    "full": {"fsdp": {"state_dict_type": "FULL_STATE_DICT"}},
    "bf16": {"bf16": True},
    "checkpointing": {"fsdp": {"activation_checkpointing": True}},
    "files": {"offload": True},
    "adapter": {"adapter": True},
}


def with_fsdp() -> None:
    """Make accelerate use FSDP on CPUs, as it does on accelerators."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def init_with_fsdp(self, *args, fsdp_plugin=None, **options):
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init_with_fsdp


def adapted(seed=0):
    import peft

    torch.manual_seed(seed)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(tiny(), lora)


def trainer_of(folder, *, seed=0, fsdp=(), adapter=False, offload=None, **options):
    """A Trainer with FSDP2 whose steps see eight sequences, in two batches a process."""
    config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **dict(fsdp)}
    default = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "ddp_backend": "gloo",
        "fsdp": True,
        "fsdp_config": config,
        **SAVED,
    }
    return make(
        "trainer",
        (adapted if adapter else tiny)(seed),
        arguments(folder, **default | options),
        RESUMED_RULE | ({"offload": folder / "means"} if offload else {}),
        callbacks=[],
        eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
    )


def whole(trainer):
    """The parameters of the model, gathered."""
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in trainer.model.named_parameters()
    }


def train(folder: Path, *, resume=None, **options) -> None:
    """Train, evaluate and export; leave what this process has in the folder."""
    with_fsdp()
    trainer = trainer_of(folder / "run", **options)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    assert trainer.accelerator.is_fsdp2
    average = trainer.tail_average
    assert average.count == 6
    assert any(isinstance(x, DTensor) for x in average.state_dict()["partial"].values())
    before = whole(trainer)
    metrics = trainer.evaluate()
    trainer.save_model(str(folder / "export"))
    after = whole(trainer)
    full = average.full_state_dict(window=WINDOW)
    losses = {name: value for name, value in metrics.items() if name.endswith("_loss")}
    logs = [log for log in trainer.state.log_history if "eval_one_loss" in log]
    assert bits(before) == bits(after)
    left = {"average": full, "weights": after, "losses": losses}
    left["logs"] = [log["eval_one_loss"] for log in logs][-2:]
    torch.save(left, folder / f"rank-{dist.get_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    top = Path(sys.argv[1])
    for name in sys.argv[2:] or RUNS:
        for run, resume in (("first", None), ("second", top / name / "first/run/checkpoint-8")):
            (top / name / run).mkdir(parents=True)
            seed = 0 if name == "adapter" or not resume else 5
            options = RUNS[name] | {"resume": resume, "seed": seed}
            on_ranks(2, partial(train, **options), top / name / run)
