"""Tiny models, data and arguments for Trainers, and what the model was after each step."""

import itertools
import os
import warnings

import numpy as np
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from tailavg import AnyTail, Decay
    from tailavg.io.state import read
    from tailavg.transformers import TailAverageCallback, TailAverageTrainer


def tiny(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes | options, bos_token_id=0, eos_token_id=0))


def new_run() -> None:
    """Forget what accelerate remembers of the Trainer before."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def model_of(adapter=False, seed=0):
    """A model without dropout, or one with a LoRA adapter on it."""
    model = tiny(seed, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    if not adapter:
        return model
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, lora)


def tokens(size=48, seed=1):
    rows = torch.randint(16, (size, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder, kind=TrainingArguments, **options):
    default = {
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "learning_rate": 0.03,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(folder), **default | options)


def first_is_best():
    """Arguments and metrics for which the first evaluation is the best."""
    ages = itertools.count()
    best = {"load_best_model_at_end": True, "metric_for_best_model": "age"}
    return best | {"greater_is_better": False}, lambda _: {"age": next(ages)}


class Steps(TrainerCallback):
    """Copies of the parameters after each step of the optimizer."""

    def __init__(self):
        self.all = []

    def on_optimizer_step(self, args, state, control, model, **_):
        self.all.append(weights(model))

    def mean(self, alphas):
        """What the first of them average to with these weights, in double precision."""
        assert 0 < len(alphas) <= len(self.all)
        assert np.isclose(sum(alphas), 1)
        return {
            name: sum(a * step[name].double() for a, step in zip(alphas, self.all, strict=False))
            for name in self.all[0]
        }


class Seen:
    """The parameters in each forward pass of an evaluation."""

    def __init__(self, model):
        self.all = []
        self.handle = model.register_forward_pre_hook(self._look)

    def _look(self, model, _):
        if not model.training:
            self.all.append(weights(model))


def make(kind, model, args, tail_average, *, callbacks=(), **options):
    """A Trainer that averages, of one of the two kinds."""
    callbacks, options = list(callbacks), {"train_dataset": tokens(), **options}
    if isinstance(model, torch.nn.Module):
        options["model"] = model
    else:
        options["model_init"] = model
    if kind == "trainer":
        return TailAverageTrainer(
            args=args, tail_average=tail_average, callbacks=callbacks, **options
        )
    trainer = Trainer(args=args, callbacks=callbacks, **options)
    TailAverageCallback(tail_average).attach(trainer)
    return trainer


RESUMED_RULE = {"rule": AnyTail(6), "window": Decay(0.4, "1-sqrt"), "update_every": 2}


def resumable(kind, folder, callbacks=(), seed=0, tail_average=RESUMED_RULE, **options):
    """A Trainer that saves every fourth step, and evaluates two datasets every other step."""
    args = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "steps", "eval_steps": 2}
    return make(
        kind,
        tiny(seed),
        arguments(folder, gradient_accumulation_steps=2, **args | options),
        tail_average,
        callbacks=callbacks,
        eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
    )


KINDS = ("trainer", "callback")


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def close(one, other):
    for name, tensor in other.items():
        torch.testing.assert_close(one[name].double(), tensor.double(), rtol=0, atol=2e-7)


def bits(tree):
    """The bytes of tensors and arrays, in a tree that may be compared."""
    if isinstance(tree, torch.Tensor):
        tree = tree.numpy()
    if isinstance(tree, np.ndarray):
        return tree.dtype, tree.shape, tree.tobytes()
    if isinstance(tree, dict):
        return {name: bits(value) for name, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, list | tuple) else tree


def left(folder):
    """What a run left in a folder, but for what has times of day or names of folders in it."""
    found, skipped = {}, {"training_args.bin", "trainer_state.json"}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.name == "tail_average":
            found[name] = bits(read(path))
        elif path.is_file() and path.parent.name != "tail_average" and path.name not in skipped:
            found[name] = path.read_bytes()
    return found
