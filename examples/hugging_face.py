"""Train a small language model with a tail average, resume it, and export the averaged model.

    python examples/hugging_face.py [--quick] [--folder build/hugging_face]

The text is a Markov chain, so the loss of the perfect model is known. The learning rate is
constant, and the weights jump around a good model; their average is closer to it. Then a second
Trainer resumes from the middle, and must end with the same average to the bit.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded: the model is made from a configuration

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from tailavg import AnyTail, Decay
from tailavg.transformers import TailAverageTrainer

TOKENS, LENGTH = 12, 24


def chain(size: int, seed: int) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Rows of a Markov chain, and the loss of the chain itself, which knows the probabilities."""
    steps = torch.softmax(2 * torch.randn(TOKENS, TOKENS, generator=random(0)), dim=1)
    draw, rows = random(seed), torch.zeros(size, LENGTH, dtype=torch.long)
    for i in range(1, LENGTH):
        rows[:, i] = torch.multinomial(steps[rows[:, i - 1]], 1, generator=draw)[:, 0]
    best = -steps[rows[:, :-1], rows[:, 1:]].log().mean().item()
    labels = rows.clone()
    labels[:, 0] = -100  # the first token has none before it, so it is not predicted
    return [{"input_ids": x, "labels": y} for x, y in zip(rows, labels, strict=True)], best


@torch.no_grad()
def loss_of(model: GPT2LMHeadModel, rows: list[dict[str, torch.Tensor]]) -> float:
    """The loss of a model as it is."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return model(**batch).loss.item()


def random(seed: int) -> torch.Generator:
    """Random numbers of their own."""
    return torch.Generator().manual_seed(seed)


class Report(TrainerCallback):
    """Prints the loss of the averaged weights, which is the Trainer's, and that of the others."""

    def __init__(self, test: list[dict[str, torch.Tensor]]) -> None:
        self.test = test

    def on_evaluate(self, args, state, control, model, metrics, **_):
        """By now the model has its training weights again."""
        raw, averaged = loss_of(model, self.test), metrics["eval_loss"]
        print(f"step {state.global_step:4}   {raw:.4f}   {averaged:.4f}", flush=True)


def trainer(folder: Path, steps: int) -> TailAverageTrainer:
    """A Trainer that averages: one argument more than usual."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=TOKENS, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    test, _ = chain(500, seed=2)
    every = steps // 4
    made = TailAverageTrainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=500,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            eval_strategy="steps",
            eval_steps=every,
            save_strategy="steps",
            save_steps=every,
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=chain(4000, seed=1)[0],
        eval_dataset=test,
        callbacks=[Report(test)],
        tail_average={"rule": AnyTail(), "window": Decay(0.5, "1-sqrt")},
    )
    made.remove_callback(PrinterCallback)
    return made


def main() -> None:
    """Train, export, resume and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--folder", type=Path, default=Path("build/hugging_face"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # a model this small gains nothing from more
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    steps, folder = 200 if options.quick else 800, options.folder

    test, best = chain(500, seed=2)
    print(f"test loss of the weights and of their average; the chain itself has {best:.4f}")
    whole = trainer(folder / "whole", steps)
    whole.train()
    whole.save_model(str(folder / "averaged"))  # for from_pretrained, as ever

    averaged = GPT2LMHeadModel.from_pretrained(folder / "averaged").eval()
    print(f"{folder / 'averaged'} has a loss of {loss_of(averaged, test):.4f}\n")

    half = folder / "whole" / f"checkpoint-{steps // 2}"
    count = json.loads((half / "tail_average" / "state.json").read_text())["count"]
    print(f"resumed from {half}, whose average has {count} updates:")
    resumed = trainer(folder / "resumed", steps)
    resumed.train(resume_from_checkpoint=str(half))
    resumed.save_model(str(folder / "averaged-again"))
    one, other = (
        (folder / name / "model.safetensors").read_bytes()
        for name in ("averaged", "averaged-again")
    )
    print(f"the averaged models are {'equal to the bit' if one == other else 'DIFFERENT'}")
    if one != other:
        sys.exit(1)


if __name__ == "__main__":
    main()
