"""Runs in processes of their own: a killed one, and two that train together (DDP, gloo).

All of them are forked from one fresh process, which runs this file and imports transformers once.
"""

import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.forks import exit_code, kill, on_ranks
from tests.support.hugging_face_training import (
    Seen,
    Steps,
    TrainerCallback,
    arguments,
    bits,
    close,
    first_is_best,
    left,
    make,
    resumable,
    tiny,
    tokens,
    weights,
)
from tests.support.paths import ROOT
from tests.support.processes import python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the processes left."""
    folder = tmp_path_factory.mktemp("processes")
    python("-W", "ignore", "-m", "tests.transformers.test_processes", folder, cwd=ROOT)
    return folder


class Death(TrainerCallback):
    """Of the process, without warning."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 9:  # the last checkpoint is of step 8
            kill()


def die(folder: Path) -> None:
    resumable("callback", folder, [Death()]).train()


def test_a_killed_process(folder, tmp_path):
    killed = folder / "killed"
    checkpoints = sorted(path.name for path in killed.glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-4", "checkpoint-8"]
    resumed = resumable("callback", killed, seed=5)
    resumed.train(resume_from_checkpoint=True)
    unbroken = resumable("trainer", tmp_path)
    unbroken.train()
    for trainer, output in ((resumed, killed), (unbroken, tmp_path)):
        trainer.save_model(str(output / "export"))
    expected, files = left(tmp_path), left(killed)
    assert expected.keys() == files.keys()
    assert [name for name in expected if expected[name] != files[name]] == []


def train_together(folder: Path) -> None:
    """Train in one process of two, then resume from the middle; keep what both runs have."""
    best, metrics = first_is_best()
    answers = []
    for run, resume in (("first", None), ("second", str(folder / "first" / "checkpoint-8"))):
        model, steps = tiny(), Steps()
        seen = Seen(model)
        trainer = make(
            "trainer",
            model,
            arguments(
                folder / run,
                ddp_backend="gloo",
                gradient_accumulation_steps=2,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="steps",
                save_steps=4,
                **best,
            ),
            {"rule": 0.5, "offload": folder / f"means-{run}"},
            callbacks=[steps],
            eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
            compute_metrics=metrics,
        )
        trainer.args.metric_for_best_model = "eval_one_age"
        assert trainer.args.world_size == 2
        trainer.train(resume_from_checkpoint=resume)
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        if run == "first":
            assert len(steps.all) == 12
            assert trainer.tail_average.count == trainer.state.best_global_step == 4
            close(seen.all[0], steps.mean(trainer.tail_average.weights()))
        trainer.save_model(str(folder / "export"))
        answers.append(bits([weights(model), seen.all[-1], trainer.tail_average.state_dict()]))
        dist.barrier()
    torch.save(answers, folder / f"rank-{dist.get_rank()}.pt")


def test_two_processes_have_the_same_average(folder):
    ranks = [torch.load(folder / f"rank-{i}.pt", weights_only=False) for i in range(2)]
    assert ranks[0] == ranks[1]
    first, second = ranks[0]
    assert first[0] == second[0]  # both end with the best model, of before the resume
    unbroken, resumed = (folder / run / "checkpoint-12" for run in ("first", "second"))
    assert left(unbroken) == left(resumed)


if __name__ == "__main__":
    torch.set_num_threads(1)
    top = Path(sys.argv[1])
    assert exit_code(die, top / "killed") == -signal.SIGKILL
    on_ranks(2, train_together, top)
