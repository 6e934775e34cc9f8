"""Trainers and loops with DeepSpeed's ZeRO stages 1 and 2: two processes (gloo) on CPUs.

DeepSpeed is not among the packages that `make` installs; without it, this file is skipped. All
processes are forked from one fresh process, which runs this file.

Slow: eight runs of two processes, each of them resumed.
"""

import copy
import itertools
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tailavg.io.state import read
from tailavg.torch import ParameterAverage
from tests.support.effort import exhaustive
from tests.support.forks import on_ranks
from tests.support.hugging_face_training import (
    RESUMED_RULE,
    GPT2LMHeadModel,
    Seen,
    Steps,
    Trainer,
    arguments,
    bits,
    close,
    first_is_best,
    make,
    model_of,
    new_run,
    same,
    tokens,
    weights,
)
from tests.support.paths import ROOT
from tests.support.processes import python, user_environment

pytestmark = exhaustive("compiles DeepSpeed's extension for 100 s")

WINDOW = RESUMED_RULE["window"]
RUNS = {
    "stage-0": {"stage": 0},
    "stage-1": {"stage": 1},
    "stage-2": {"stage": 2},
    "bf16": {"stage": 2, "bf16": True},
    "files": {"stage": 2, "offload": True, "evaluate_raw": True},
    "optimizer-on-cpu": {"stage": 2, "optimizer_on_cpu": True},
    "adapter": {"stage": 2, "adapter": True},
    "best": {"stage": 2, "best": True},
}

PLAIN = "stage-0", "stage-1", "stage-2", "bf16", "adapter"
"""The runs that are repeated without an average."""


def config_of(stage, optimizer_on_cpu=False, **options):
    zero = {"stage": stage}
    if optimizer_on_cpu:
        zero |= {"offload_optimizer": {"device": "cpu"}}
    return {
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    } | options


def trainer_of(
    folder,
    *,
    stage=None,
    seed=0,
    adapter=False,
    best=False,
    tail_average=RESUMED_RULE,
    callbacks=(),
    kind="trainer",
    **options,
):
    """A Trainer whose steps see eight sequences, in two batches, in one process or in two."""
    for name in ("offload", "evaluate_raw"):
        if options.pop(name, False):
            value = folder / f"means-{dist.get_rank()}" if name == "offload" else True
            tail_average = tail_average | {name: value}
    if stage is not None:
        options |= {"deepspeed": config_of(stage, options.pop("optimizer_on_cpu", False))}
    args, metrics = first_is_best() if best else ({}, None)
    args |= {"per_device_train_batch_size": 2 if dist.is_initialized() else 4}
    args |= {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 4}
    args |= {"adam_epsilon": 1e-4}  # or AdamW turns the rounding of zero gradients into steps
    args = arguments(folder, gradient_accumulation_steps=2, **args | options)
    others = {"eval_dataset": tokens(8, 2), "compute_metrics": metrics}
    if tail_average is None:
        others |= {"train_dataset": tokens(), "callbacks": list(callbacks)}
        return Trainer(model_of(adapter, seed), args, **others)
    model = model_of(adapter, seed)
    return make(kind, model, args, tail_average, callbacks=callbacks, **others)


def train(trainer, folder: Path, resume=None):
    """Train, evaluate and export; return what this process has."""
    steps, seen = Steps(), Seen(trainer.model)
    trainer.add_callback(steps)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trained, average = weights(trainer.model), getattr(trainer, "tail_average", None)
    result = {"trained": trained, "steps": steps.all}
    if average is None:
        return result
    metrics = [trainer.evaluate()]
    metrics += [log for log in trainer.state.log_history if "eval_loss" in log]
    trainer.save_model(str(folder / "export"))
    assert same(weights(trainer.model), trained)
    return result | {
        "count": average.count,
        "alphas": average.weights(WINDOW),
        "seen": seen.all[-1],
        "average": average.averaged_state_dict(window=WINDOW),
        "losses": [log["eval_loss"] for log in metrics],
        "raw": [log["eval_raw_loss"] for log in metrics if "eval_raw_loss" in log],
    }


def runs(folder: Path, resume: bool) -> None:
    for name, options in RUNS.items():
        new_run()
        seed = 5 * resume * ("adapter" not in name)
        kind = "callback" if name == "stage-1" else "trainer"
        trainer = trainer_of(folder / name, seed=seed, kind=kind, **options)
        start = folder.parent / "first" / name / "checkpoint-8" if resume else None
        left = train(trainer, folder / name, start)
        assert trainer.deepspeed.zero_optimization_stage() == options["stage"]
        torch.save(left, folder / name / f"rank-{dist.get_rank()}.pt")


def others(folder: Path) -> None:
    """Trainers without an average, and what is refused."""
    for name in PLAIN:
        new_run()
        plain = trainer_of(folder / name, tail_average=None, **RUNS[name])
        torch.save(train(plain, folder), folder / f"{name}.pt")
    new_run()
    overflow = trainer_of(folder / "overflow", stage=2, tail_average=1.0)
    calls = itertools.count()
    overflow.model.transformer.ln_f.weight.register_hook(
        lambda gradient: gradient * float("nan") if next(calls) == 5 else gradient
    )
    overflow.train()
    assert overflow.state.global_step == 12
    assert overflow.tail_average.count == 11
    new_run()
    with pytest.raises(ValueError, match=r"ZeRO stage 3 is not supported.*use stage 1 or 2, or FS"):
        trainer_of(folder / "three", stage=3).train()


def loops(folder: Path) -> None:
    """Loops of one's own over `engine.module`."""
    import deepspeed

    for stage in (1, 2):
        for dtype in (torch.float32, torch.bfloat16):
            trained = []
            for swaps in (True, False):
                torch.manual_seed(0)
                net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
                config = config_of(stage, bf16={"enabled": dtype == torch.bfloat16})
                config |= {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
                engine, optimizer, _, _ = deepspeed.initialize(
                    model=net,
                    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
                    config=config,
                )
                average = ParameterAverage(engine.module, 0.5)
                with pytest.raises(ValueError, match=r"with DeepSpeed, .*after each engine.step"):
                    average.attach(optimizer)
                random = torch.Generator().manual_seed(dist.get_rank())
                recorded = []
                for _ in range(24):
                    batch = torch.rand(4, 3, generator=random).to(dtype)
                    engine.backward((engine(batch) - batch[:, :2]).square().mean())
                    engine.step()
                    if engine.was_step_applied():
                        average.update()
                        recorded.append(copy.deepcopy(weights(engine.module)))
                        if swaps:
                            with average.average_parameters():
                                engine.module(batch)
                assert average.count == engine.global_steps == len(recorded) == 12
                for name, tensor in average.averaged_state_dict(torch.float32).items():
                    samples = torch.stack([step[name].double() for step in recorded])
                    mean = torch.tensordot(torch.as_tensor(average.weights()), samples, 1)
                    torch.testing.assert_close(tensor.double(), mean, rtol=0, atol=1e-6)
                    ranks = [torch.empty_like(tensor) for _ in range(2)]
                    dist.all_gather(ranks, tensor)
                    assert torch.equal(*ranks)
                trained.append(weights(engine.module))
            assert same(*trained)
    # an optimizer of which DeepSpeed takes the parameters away
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    average = ParameterAverage(net, 0.5)
    average.attach(optimizer)
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 4},
    )
    engine.backward(engine(torch.ones(4, 3)).sum())
    with pytest.raises(ValueError, match=r"with DeepSpeed, .*after each engine.step"):
        engine.step()
    assert not average.count
    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(3, 2),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
        config={
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": 4,
        },
    )
    with pytest.raises(TypeError, match=r"DeepSpeed's ZeRO stage 3 .* use stage 1 or 2"):
        ParameterAverage(engine.module, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the processes left."""
    pytest.importorskip("deepspeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    environment = user_environment(DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1")
    # DeepSpeed compiles with the program ninja, which a virtual environment has beside Python
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = "-W", "ignore", "-m", "tests.transformers.test_deepspeed", folder
    python(*command, cwd=ROOT, env=environment)
    return folder


def left(folder, run, name, rank=0):
    return torch.load(folder / run / name / f"rank-{rank}.pt", weights_only=False)


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_is_bit_identical(name, folder):
    first, second = (left(folder, run, name) for run in ("first", "second"))
    for value in ("trained", "average"):
        assert same(first[value], second[value])
        assert same(first[value], left(folder, "first", name, rank=1)[value])
    assert second["count"] == first["count"] == (2 if name == "best" else 6)
    if name != "best":
        assert len(first["losses"]) == 5
        assert first["losses"] == second["losses"]
    unbroken, resumed = (
        bits(read(folder / run / name / "checkpoint-12" / "tail_average"))
        for run in ("first", "second")
    )
    assert unbroken == resumed


@pytest.mark.parametrize("name", RUNS)
def test_the_average_is_that_of_the_steps(name, folder):
    first = left(folder, "first", name)
    counted = Steps()
    counted.all = first["steps"][1::2]  # update_every=2
    expected = counted.mean(first["alphas"])
    average = {key: first["average"][key] for key in expected}
    if name == "bf16":
        assert {tensor.dtype for tensor in average.values()} == {torch.bfloat16}
        for key, tensor in average.items():
            torch.testing.assert_close(tensor.double(), expected[key], rtol=2**-8, atol=1e-6)
    elif name != "best":
        close(average, expected)
    assert same(first["seen"], average)


@pytest.mark.parametrize("name", RUNS)
def test_the_export_is_the_average(name, folder):
    average = left(folder, "first", name)["average"]
    for run in ("first", "second"):
        path = folder / run / name / "export"
        if name == "adapter":
            export = weights(
                pytest.importorskip("peft").PeftModel.from_pretrained(model_of(), path)
            )
        else:
            export = weights(GPT2LMHeadModel.from_pretrained(path))
        assert same(export, {key: average[key] for key in export})


@pytest.mark.parametrize("name", PLAIN)
def test_training_does_not_change(name, folder):
    plain = torch.load(folder / "others" / f"{name}.pt", weights_only=False)
    first = left(folder, "first", name)
    assert len(plain["steps"]) == len(first["steps"]) == 12
    for step, other in zip(plain["steps"], first["steps"], strict=True):
        assert same(step, other)


def test_processes_average_as_one_does(folder, tmp_path):
    alone = train(trainer_of(tmp_path), tmp_path)
    for name in ("stage-0", "stage-1", "stage-2", "optimizer-on-cpu", "files"):
        run = left(folder, "first", name)
        for value in ("trained", "average"):
            for key, tensor in alone[value].items():
                torch.testing.assert_close(run[value][key], tensor, rtol=1e-4, atol=1e-6)
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert len(run["raw"]) == 5
    assert run["raw"] != run["losses"]


def test_the_best_model_is_averaged(folder):
    best = left(folder, "first", "best")
    assert same(best["trained"], {name: best["average"][name] for name in best["trained"]})
    assert not same(best["trained"], left(folder, "first", "stage-2")["trained"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, function in (
        ("first", partial(runs, resume=False)),
        ("second", partial(runs, resume=True)),
        ("others", others),
        ("loops", loops),
    ):
        (top := Path(sys.argv[1], name)).mkdir()
        on_ranks(2, function, top)
