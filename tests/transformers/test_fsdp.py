"""Trainers with FSDP2: two processes (gloo), each with its shards of the model and the average.

accelerate ignores FSDP on CPUs, so the processes change that; see `with_fsdp`. As in
`test_processes`, all of them are forked from one fresh process, which runs this file.

Slow: five runs of two processes, each of them resumed.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor

from tailavg import AnyTail
from tailavg.torch import ParameterAverage
from tests.support.effort import some
from tests.support.forks import on_ranks
from tests.support.hugging_face_training import (
    RESUMED_RULE,
    GPT2LMHeadModel,
    Trainer,
    arguments,
    bits,
    first_is_best,
    make,
    model_of,
    new_run,
    same,
    tokens,
    weights,
)
from tests.support.paths import ROOT
from tests.support.processes import python

WINDOW = RESUMED_RULE["window"]
RUNS = {
    "sharded": {},
    "full": {"fsdp": {"state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True}},
    "files": {"offload": True, "evaluate_raw": True},
    "adapter": {"adapter": True, "bf16": True},
    "best": {"best": True},
    **some({}, {"bf16": {"bf16": True}}),
}
SAME_BITS = ("full", "files")
"""The runs that differ from `sharded` in nothing that changes a result."""


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


def trainer_of(
    folder, *, seed=0, fsdp=(), adapter=False, best=False, tail_average=RESUMED_RULE, **options
):
    """A Trainer whose steps see eight sequences, in two batches, in one process or in two."""
    for name in ("offload", "evaluate_raw"):
        if options.pop(name, False):
            value = folder / "means" if name == "offload" else True
            tail_average = tail_average | {name: value}
    if dist.is_initialized():
        config = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT", **dict(fsdp)}
        options |= {"fsdp": True, "fsdp_config": config, "ddp_backend": "gloo"}
    args, metrics = first_is_best() if best else ({}, None)
    args |= {"per_device_train_batch_size": 2 if dist.is_initialized() else 4}
    args |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    args |= {"adam_epsilon": 1e-4}  # or AdamW turns the rounding of zero gradients into steps
    return make(
        "trainer",
        model_of(adapter, seed),
        arguments(folder, gradient_accumulation_steps=2, **args | options),
        tail_average,
        eval_dataset=tokens(8, 2),
        compute_metrics=metrics,
    )


def gathered(model):
    return {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).clone()
        for name, x in model.state_dict().items()
    }


def train(trainer, folder: Path, resume=None):
    """Train, evaluate and export; return what this process has."""
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trained, average = gathered(trainer.model), trainer.tail_average
    metrics = [trainer.evaluate()]
    metrics += [log for log in trainer.state.log_history if "eval_loss" in log]
    trainer.save_model(str(folder / "export"))
    assert same(gathered(trainer.model), trained)
    return {
        "count": average.count,
        "trained": trained,
        "average": average.full_state_dict(window=WINDOW),
        "losses": [log["eval_loss"] for log in metrics],
        "raw": [log["eval_raw_loss"] for log in metrics if "eval_raw_loss" in log],
        "sharded": [isinstance(x, DTensor) for x in average.state_dict()["partial"].values()],
    }


def runs(folder: Path, resume: bool) -> None:
    with_fsdp()
    for name, options in RUNS.items():
        new_run()
        top = folder.parent
        trainer = trainer_of(folder / name, seed=5 * resume * ("adapter" not in name), **options)
        start = top / "first" / name / "checkpoint-8" if resume else None
        left = train(trainer, folder / name, start)
        assert trainer.accelerator.is_fsdp2
        torch.save(left, folder / name / f"rank-{dist.get_rank()}.pt")


def others(folder: Path) -> None:
    """What is refused, and a plain Trainer."""
    with_fsdp()
    new_run()
    options = {"fsdp": True, "fsdp_config": {"version": 2}, "ddp_backend": "gloo"}
    options |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    args = arguments(folder / "plain", adam_epsilon=1e-4, **options)
    plain = Trainer(model_of(), args, train_dataset=tokens())
    plain.train()
    torch.save(gathered(plain.model), folder / "plain.pt")
    new_run()
    with pytest.raises(ValueError, match=r'the original FSDP is not supported.*"version": 2'):
        trainer_of(folder / "one", fsdp={"version": 1, "sync_module_states": False}).train()
    checkpoint = folder.parent / "first" / "sharded" / "checkpoint-8"
    for wrong, message in (
        ({"rule": 0.5}, "cannot be loaded: files are damaged, or the run had another rule"),
        ({"rule": AnyTail(6, shortest=0.2)}, "create the average with the rule and dtype"),
        ({"dtype": torch.float64}, "create the average with the rule and dtype"),
    ):
        new_run()
        options = RESUMED_RULE | wrong
        if isinstance(options["rule"], float):
            del options["window"]
        other = trainer_of(folder / "other", tail_average=options)
        with pytest.raises(ValueError, match=message):
            other.train(resume_from_checkpoint=str(checkpoint))
        assert other.tail_average is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the processes left."""
    folder = tmp_path_factory.mktemp("fsdp")
    python("-W", "ignore", "-m", "tests.transformers.test_fsdp", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in one process, without FSDP."""
    folder = tmp_path_factory.mktemp("alone")
    return train(trainer_of(folder), folder)


def left(folder, run, name, rank=0):
    return torch.load(folder / run / name / f"rank-{rank}.pt", weights_only=False)


def saved(checkpoint):
    """What a checkpoint holds in the format of torch.distributed.checkpoint."""
    found = {}
    for metadata in sorted(checkpoint.glob("*/.metadata")):
        dcp_to_torch_save(metadata.parent, checkpoint / "all.pt")
        found[metadata.parent.name] = torch.load(checkpoint / "all.pt", weights_only=False)
    return found


def exported(folder, run, name):
    path = folder / run / name / "export"
    if name != "adapter":
        return weights(GPT2LMHeadModel.from_pretrained(path))
    return weights(pytest.importorskip("peft").PeftModel.from_pretrained(model_of(), path))


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_bit_identical(name, folder):
    first, second = (left(folder, run, name) for run in ("first", "second"))
    for value in ("trained", "average"):
        assert same(first[value], second[value])
        assert same(first[value], left(folder, "first", name, rank=1)[value])
    assert second["count"] == first["count"] == (2 if name == "best" else 6)
    assert any(first["sharded"])
    if name != "best":
        assert len(first["losses"]) == 5
        assert first["losses"] == second["losses"]
    unbroken, resumed = (
        saved(folder / run / name / "checkpoint-12") for run in ("first", "second")
    )
    assert "tail_average" in unbroken
    assert bits(unbroken) == bits(resumed)


@pytest.mark.parametrize("name", RUNS)
def test_the_export_is_the_average(name, folder):
    average = left(folder, "first", name)["average"]
    for run in ("first", "second"):
        export = exported(folder, run, name)
        assert same(export, {name: average[name] for name in export})


def test_processes_average_as_one_does(folder, alone):
    sharded = left(folder, "first", "sharded")
    assert same(sharded["trained"], torch.load(folder / "others" / "plain.pt"))
    for value in ("trained", "average"):
        for name, tensor in alone[value].items():
            torch.testing.assert_close(sharded[value][name], tensor, rtol=1e-4, atol=1e-6)
    assert sharded["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    for name in SAME_BITS:
        other = left(folder, "first", name)
        assert same(other["average"], sharded["average"])
        assert same(other["trained"], sharded["trained"])
        assert other["losses"] == sharded["losses"]
    raw = left(folder, "first", "files")["raw"]
    assert len(raw) == 5
    assert raw != sharded["losses"]


def test_the_best_model_is_averaged(folder):
    best = left(folder, "first", "best")
    assert same(best["trained"], {name: best["average"][name] for name in best["trained"]})
    assert not same(best["trained"], left(folder, "first", "sharded")["trained"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_a_checkpoint_of_two(folder):
    model = model_of()
    average = ParameterAverage(model, RESUMED_RULE["rule"], update_every=2)
    path = folder / "first" / "sharded" / "checkpoint-12" / "tail_average"
    dcp.load({"average": average}, checkpoint_id=path)
    average.copy_to(window=WINDOW)
    expected = left(folder, "first", "sharded")["average"]
    assert same(weights(model), {name: expected[name] for name in weights(model)})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, function in (
        ("first", partial(runs, resume=False)),
        ("second", partial(runs, resume=True)),
        ("others", others),
    ):
        (top := Path(sys.argv[1], name)).mkdir()
        on_ranks(2, function, top)
