"""Two processes that train together have the same average, to the bit."""

import os

import torch
import torch.distributed as dist

from tests.support.hugging_face_training import (
    Seen,
    Steps,
    arguments,
    bits,
    close,
    first_is_best,
    left,
    make,
    tiny,
    tokens,
    weights,
)
from tests.support.torch_processes import on_ranks


def trained(folder, resume):
    torch.set_num_threads(1)
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # accelerate looks for it, and uses our group
    os.environ |= {"OMP_NUM_THREADS": "1"}  # or accelerate asks for more
    best, metrics = first_is_best()
    answers = []
    for path in (None, resume):
        model, steps = tiny(), Steps()
        seen = Seen(model)
        trainer = make(
            "trainer",
            model,
            arguments(
                folder / ("first" if path is None else "second"),
                ddp_backend="gloo",
                gradient_accumulation_steps=2,
                eval_strategy="steps",
                eval_steps=4,
                save_strategy="steps",
                save_steps=4,
                **best,
            ),
            {"rule": 0.5, "offload": folder / f"means-{path is None}"},
            callbacks=[steps],
            eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
            compute_metrics=metrics,
        )
        trainer.args.metric_for_best_model = "eval_one_age"
        assert trainer.args.world_size == 2
        trainer.train(resume_from_checkpoint=path)
        assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
        if path is None:
            assert len(steps.all) == 12
            assert trainer.tail_average.count == trainer.state.best_global_step == 4
            close(seen.all[0], steps.mean(trainer.tail_average.weights()))
        trainer.save_model(str(folder / "export"))
        found = [weights(model), seen.all[-1], trainer.tail_average.state_dict()]
        answers.append(bits(found))
        dist.barrier()
    return answers


def test_two_processes(tmp_path):
    resume = str(tmp_path / "first" / "checkpoint-8")
    one, other = on_ranks(2, trained, tmp_path, resume, seconds=300)
    assert one == other
    assert one[0][0] == one[1][0]  # both end with the best model, of before the resume
    first, second = ((tmp_path / run / "checkpoint-12") for run in ("first", "second"))
    assert left(first) == left(second)  # the resumed run is the unbroken one
