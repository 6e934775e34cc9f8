"""The average in evaluations, checkpoints, the best model and the export of real Trainers."""

import json
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tailavg import AnyTail, AnytimeWindow, Decay
from tests.support import model as brute
from tests.support.effort import some
from tests.support.hugging_face_training import (
    KINDS,
    GPT2LMHeadModel,
    Seen,
    Steps,
    TailAverageTrainer,
    Trainer,
    arguments,
    close,
    first_is_best,
    make,
    same,
    tiny,
    tokens,
    weights,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
    )

    from tailavg.transformers import TailAverageMixin


# A callback gives a Trainer the methods of the mixin: one test of both is enough for every day.
either_kind = pytest.mark.parametrize("kind", some(KINDS[1:], KINDS))
EVERY_FOUR = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}


def exported(trainer, folder):
    trainer.save_model(str(folder))
    return weights(GPT2LMHeadModel.from_pretrained(folder))


def expected(steps, rule, t):
    """The average after t steps, by the slow model."""
    return steps.mean(brute.weight_matrix(rule, t)[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_two_datasets_and_the_best_model_before_the_last(kind, tmp_path):
    model, steps = tiny(), Steps()
    seen = Seen(model)
    trainer = make(
        kind,
        model,
        arguments(
            tmp_path,
            gradient_accumulation_steps=2,
            load_best_model_at_end=True,
            metric_for_best_model="eval_one_loss",
            **EVERY_FOUR,
        ),
        0.5,
        callbacks=[steps],
        eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
    )
    assert trainer.tail_average is None
    trainer.train()
    rule = AnytimeWindow(0.5)

    assert len(steps.all) == 12  # 24 batches
    assert len(seen.all) == 6  # two datasets, three times
    for i, found in enumerate(seen.all):
        close(found, expected(steps, rule, 4 * (i // 2 + 1)))
        assert not same(found, steps.all[4 * (i // 2 + 1) - 1])
    for t in (4, 8, 12):  # checkpoints have the training weights
        found = load_file(tmp_path / f"checkpoint-{t}" / "model.safetensors")
        assert all(torch.equal(found[name], steps.all[t - 1][name]) for name in found)
        state = json.loads((tmp_path / f"checkpoint-{t}/tail_average/state.json").read_text())
        assert state["count"] == t

    best = trainer.state.best_global_step
    assert best == 4
    assert trainer.tail_average.count == 4
    assert same(weights(model), seen.all[0])  # to the bit
    assert trainer.evaluate()["eval_one_loss"] == trainer.state.best_metric
    assert same(exported(trainer, tmp_path / "export"), seen.all[0])


@either_kind
def test_the_model_keeps_its_training_weights(kind, tmp_path):
    model, steps = tiny(), Steps()
    options = {"rule": 0.5, "update_every": 2, "start_after": 1, "dtype": torch.float64}
    trainer = make(kind, model, arguments(tmp_path, max_steps=11), options, callbacks=[steps])
    trainer.train()
    assert trainer.tail_average.count == 5
    assert same(weights(model), steps.all[-1])
    steps.all = steps.all[2::2]  # steps 3, 5, …, 11
    average = steps.mean(trainer.tail_average.weights())
    seen = Seen(model)
    trainer.predict(tokens(4))
    close(exported(trainer, tmp_path / "export"), average)
    close(seen.all[0], average)
    assert same(weights(model), steps.all[-1])


@either_kind
def test_the_training_weights_are_back_whatever_an_evaluation_raises(kind, tmp_path):
    model, steps, fails = tiny(), Steps(), []

    def metrics(_):
        if fails:
            raise fails.pop()
        return {}

    trainer = make(
        kind,
        model,
        arguments(tmp_path, eval_strategy="steps", eval_steps=3, eval_accumulation_steps=1),
        0.5,
        callbacks=[steps],
        eval_dataset={"one": tokens(8, 2), "two": tokens(8, 3)},
        compute_metrics=metrics,
    )
    for error in (ValueError("metrics"), KeyboardInterrupt()):
        fails[:], steps.all[:] = [error], []
        with pytest.raises(type(error)):
            trainer.train()
        assert same(weights(model), steps.all[-1])
        assert not trainer.tail_average.swapped
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.evaluate()
    handle.remove()
    assert same(weights(model), steps.all[-1])
    model.save_pretrained = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.save_model()
    assert same(weights(model), steps.all[-1])
    trainer.evaluate()


@pytest.mark.parametrize("window", [0.4, Decay(0.5, "cosine")])
def test_any_tail_and_the_window_it_is_read_with(window, tmp_path):
    model, steps = tiny(), Steps()
    seen = Seen(model)
    options = {"rule": AnyTail(6), "window": window, "offload": str(tmp_path / "means")}
    best, metrics = first_is_best()
    trainer = make(
        "trainer",
        model,
        arguments(tmp_path, **EVERY_FOUR, **best),
        options,
        callbacks=[steps],
        eval_dataset=tokens(8, 2),
        compute_metrics=metrics,
    )
    trainer.train()
    average = trainer.tail_average
    assert average.count == trainer.state.best_global_step == 4
    steps.all = steps.all[:4]
    close(seen.all[0], steps.mean(average.weights(window)))
    assert same(weights(model), seen.all[0])
    assert same(exported(trainer, tmp_path / "export"), seen.all[0])

    seen.all.clear()  # each window in turn is evaluated, not the one of the options
    selection = average.select_tail(lambda: trainer.evaluate()["eval_loss"], [0.25, 0.5, 1.0])
    for found, read in zip(seen.all, (0.25, 0.5, 1.0), strict=True):
        close(found, steps.mean(average.weights(read)))
    assert selection.score == min(score for _, score in selection.scores)


def test_before_the_first_update_the_weights_are_as_they_are(tmp_path):
    model, steps = tiny(), Steps()
    start, seen = weights(model), Seen(model)
    trainer = make(
        "trainer",
        model,
        arguments(tmp_path, eval_on_start=True, load_best_model_at_end=True, **EVERY_FOUR),
        {"rule": 0.5, "start_after": 100},
        callbacks=[steps],
        eval_dataset=tokens(8, 2),
    )
    trainer.evaluate()
    trainer.train()
    assert trainer.tail_average.count == 0
    found = [start, start, steps.all[3], steps.all[7], steps.all[11]]
    assert all(same(one, other) for one, other in zip(seen.all, found, strict=True))
    best = steps.all[trainer.state.best_global_step - 1]
    assert same(weights(model), best)
    assert same(exported(trainer, tmp_path / "export"), best)


def test_each_train_begins_an_average(tmp_path):
    steps = Steps()
    args = arguments(tmp_path, max_steps=5)
    options = {"rule": 0.5, "offload": tmp_path / "means"}
    trainer = make("trainer", lambda: tiny(), args, options, callbacks=[steps])
    trainer.train()
    first = weights(trainer.model)
    trainer.train()
    assert trainer.tail_average.count == 5
    assert same(weights(trainer.model), first)
    steps.all = steps.all[5:]
    close(exported(trainer, tmp_path / "one"), steps.mean(trainer.tail_average.weights()))

    model = tiny()
    trainer = make("callback", model, args, 0.5, callbacks=[steps])
    averages = []
    for _ in range(2):  # the second goes on with the training weights
        steps.all.clear()
        before = weights(model)
        trainer.train()
        assert not same(weights(model), before)
        averages.append(trainer.tail_average)
        assert [average.count for average in averages] == [5] * len(averages)
        close(exported(trainer, tmp_path / "two"), steps.mean(trainer.tail_average.weights()))


def test_the_best_model_of_checkpoints_that_have_only_models(tmp_path):
    model, steps = tiny(), Steps()
    seen = Seen(model)
    best, metrics = first_is_best()
    trainer = make(
        "trainer",
        model,
        arguments(tmp_path, save_only_model=True, save_total_limit=1, **EVERY_FOUR, **best),
        0.5,
        callbacks=[steps],
        eval_dataset=tokens(8, 2),
        compute_metrics=metrics,
    )
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    assert same(weights(model), seen.all[0])
    close(seen.all[0], expected(steps, AnytimeWindow(0.5), 4))


class Scaled(TailAverageTrainer):
    """With a gradient scaler, as half precision has on an accelerator."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)


def test_steps_that_a_gradient_scaler_skips_do_not_count(tmp_path):
    model, steps = tiny(), Steps()
    trainer = Scaled(
        model=model,
        args=arguments(tmp_path, max_steps=6),
        train_dataset=tokens(),
        callbacks=[steps],
        tail_average=1.0,
    )
    model.lm_head.weight.register_hook(
        lambda grad: grad / (trainer.state.global_step not in (1, 4))
    )
    trainer.train()
    assert len(steps.all) == 6
    assert same(steps.all[0], steps.all[1])
    assert trainer.tail_average.count == 4
    steps.all = [steps.all[i] for i in (0, 2, 3, 5)]
    close(exported(trainer, tmp_path / "export"), steps.mean([0.25] * 4))


def test_the_hub_gets_the_average(tmp_path, monkeypatch):
    trainer = make("trainer", tiny(), arguments(tmp_path, max_steps=3), 1.0)
    trainer.train()
    pushed = {}

    def push(**_):  # as push_to_hub begins
        trainer.save_model(_internal_call=True)
        pushed.update(load_file(tmp_path / "model.safetensors"))

    monkeypatch.setattr(trainer, "push_to_hub", push)
    trainer.args.push_to_hub = True
    trainer.save_model()
    average = trainer.tail_average.averaged_state_dict()
    assert all(torch.equal(pushed[name], average[name]) for name in pushed)
    pushed.clear()
    trainer.push_to_hub()
    assert all(torch.equal(pushed[name], average[name]) for name in pushed)


class Summarizer(TailAverageMixin, Seq2SeqTrainer):
    pass


def test_a_mixin_for_other_trainers(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "vocab_size": 16}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 1, f"{side}_attention_heads": 1, f"{side}_ffn_dim": 8}
    model = BartForConditionalGeneration(BartConfig(**sizes, max_position_embeddings=16))
    steps, seen = Steps(), []
    args = arguments(
        tmp_path,
        kind=Seq2SeqTrainingArguments,
        max_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        predict_with_generate=True,
        generation_max_length=4,
    )
    trainer = Summarizer(
        model=model,
        args=args,
        train_dataset=tokens(),
        eval_dataset=tokens(4, 2),
        compute_metrics=lambda _: {},
        callbacks=[steps],
        tail_average=0.75,
    )
    model.model.encoder.register_forward_pre_hook(
        lambda *_: None if model.training else seen.append(weights(model))
    )
    trainer.train()
    assert len(seen) >= 2  # generation and loss
    for found in seen:
        close(found, steps.mean(trainer.tail_average.weights()))
    assert same(weights(model), steps.all[-1])


def test_frozen_weights_take_no_memory(tmp_path):
    model = tiny()
    for name, tensor in model.named_parameters():
        tensor.requires_grad_("attn" in name)
    trainer = make("trainer", model, arguments(tmp_path, max_steps=3), 1.0)
    trainer.train()
    assert all("attn" in name for name in trainer.tail_average.state_dict()["partial"])


def test_an_adapter_of_peft(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = pytest.importorskip("peft")
    base = weights(tiny())

    def adapted():
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return peft.get_peft_model(tiny(), lora)

    model, steps = adapted(), Steps()
    args = arguments(tmp_path, load_best_model_at_end=True, **EVERY_FOUR)
    trainer = make("trainer", model, args, 0.5, callbacks=[steps], eval_dataset=tokens(8, 2))
    seen = Seen(model)
    trainer.train()
    average = trainer.tail_average
    assert all("lora_" in name for name in average.state_dict()["partial"])
    best = trainer.state.best_global_step
    found = seen.all[best // 4 - 1]
    close(found, expected(steps, AnytimeWindow(0.5), best))
    assert same(weights(model), found)

    trainer.save_model(str(tmp_path / "export"))
    files = {path.name for path in (tmp_path / "export").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files
    loaded = weights(peft.PeftModel.from_pretrained(tiny(), tmp_path / "export"))
    assert same(loaded, found)
    assert same({name: weights(tiny())[name] for name in base}, base)

    again = make("trainer", adapted(), args, 0.5, eval_dataset=tokens(8, 2))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert same(weights(again.model), found)


class Generating(TailAverageMixin, Trainer):
    """Stands for TRL's trainers with vLLM: the first generation of a step sends the weights."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._last_loaded_step = -1
        self.sent, self.sends, self.current = None, 0, []

    def _generate(self):
        if self.state.global_step != self._last_loaded_step:
            self.sent, self.sends = weights(self.model), self.sends + 1
            self._last_loaded_step = self.state.global_step
        self.current.append(same(self.sent, weights(self.model)))

    def training_step(self, *args, **options):
        self._generate()
        return super().training_step(*args, **options)

    def prediction_step(self, *args, **options):
        self._generate()
        return super().prediction_step(*args, **options)


def test_generated_text_is_of_the_weights_that_are_evaluated_or_trained(tmp_path):
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    trainer = Generating(
        tiny(),
        arguments(tmp_path, per_device_eval_batch_size=4, **options),
        train_dataset=tokens(),
        eval_dataset=tokens(8, 2),
        tail_average={"rule": AnyTail(), "window": 0.5},
    )
    trainer.train()
    assert len(trainer.current) == 2 * 12 + 2 * 4
    assert trainer.sends == 12 + 4
    trainer.tail_average.select_tail(lambda: trainer.evaluate()["eval_loss"], [0.25, 0.5, 1.0])
    assert trainer.sends == 12 + 4 + 3
    assert all(trainer.current)


def test_what_cannot_be_right_is_refused(tmp_path):
    def trainer(rule=0.5):
        return make("trainer", tiny(), arguments(tmp_path, max_steps=30), rule)

    for wrong, message in [
        ({"window": 0.5}, 'expected a number, a rule, or a dict with a "rule"'),
        ({"rule": 0.5, "windows": 1}, "unexpected keyword argument 'windows'"),
        (AnyTail(), "AnyTail has no window of its own"),
        ({"rule": 0.5, "window": 0.5}, "has its own window, got 0.5"),
        ({"rule": AnyTail(), "window": 2}, "window: 2 is too short for the 30 counted steps"),
        ({"rule": 0.5, "update_every": 0}, "update_every: expected an int >= 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            trainer(rule=wrong)
    with pytest.raises(TypeError, match="a window of time works in TailAverage"):
        trainer(rule="10min")
    with pytest.raises(TypeError, match="tail_average"):
        TailAverageTrainer(model=tiny(), args=arguments(tmp_path))
    for enough in (
        {"window": 3},
        {"window": 2, "update_every": 2},
        {"window": 2, "start_after": 10},
    ):
        trainer(rule={"rule": AnyTail(), **enough})
    # Trainer learns from its data how many steps there are: a window would be too short at the last
    epochs = arguments(tmp_path, max_steps=-1, num_train_epochs=5)
    short = make("trainer", tiny(), epochs, {"rule": AnyTail(), "window": Decay(1, "cosine")})
    with pytest.raises(ValueError, match=r"too short for the \d+ counted steps of this run"):
        short.train()
    assert short.state.global_step == 0

    sharded = trainer()
    sharded.is_fsdp_xla_enabled = True
    with pytest.raises(ValueError, match="is not supported, since it splits"):
        sharded._check_sharding()
    for stage, parallel, message in (
        (3, 1, "ZeRO stage 3 is not supported, .* use stage 1 or 2, or FSDP2"),
        (1, 2, "tensor parallelism of DeepSpeed is not supported"),
        (1, 1, None),
        (2, 1, None),
    ):
        sharded = trainer()
        sharded.is_deepspeed_enabled = True
        config = {"tensor_parallel": {"autotp_size": parallel}}
        plugin = SimpleNamespace(zero_stage=stage, deepspeed_config=config)
        sharded.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            sharded._check_sharding()
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.eval = optimizer.train = lambda: None
    free = TailAverageTrainer(
        model=model,
        args=arguments(tmp_path),
        train_dataset=tokens(),
        optimizers=(optimizer, None),
        tail_average=0.5,
    )
    with pytest.raises(ValueError, match="already averages: its eval\\(\\) changes"):
        free.train()


def evaluations(trainer):
    """The metrics of each evaluation that was logged, by step; without how long it took."""
    logs = [log for log in trainer.state.log_history if any("loss" in name for name in log)]
    return [
        {name: value for name, value in log.items() if name.endswith(("loss", "agreement"))}
        for log in logs
        if any(name.startswith("eval") for name in log)
    ]


def agreement(outputs):
    return {"agreement": float((outputs.predictions.argmax(-1) == outputs.label_ids).mean())}


@either_kind
def test_the_training_weights_are_evaluated_too(kind, tmp_path):
    def run(name, tail_average):
        model = tiny()
        options = {"compute_metrics": agreement, "eval_dataset": {"one": tokens(8, 2)}}
        args = arguments(tmp_path / name, eval_strategy="steps", eval_steps=4)
        if tail_average is None:
            trainer = Trainer(model=model, args=args, train_dataset=tokens(), **options)
        else:
            trainer = make(kind, model, args, tail_average, **options)
        trainer.train()
        return weights(model), evaluations(trainer), trainer

    plain_weights, plain, _ = run("plain", None)
    average_weights, averaged, _ = run("average", 0.5)
    both_weights, both, trainer = run("both", {"rule": 0.5, "evaluate_raw": True})
    assert same(plain_weights, both_weights)
    assert same(plain_weights, average_weights)
    for metrics, average, raw in zip(both, averaged, plain, strict=True):
        renamed = {name.replace("eval_one_", "eval_one_raw_"): raw[name] for name in raw}
        assert metrics == average | renamed
        assert metrics["eval_one_raw_loss"] != metrics["eval_one_loss"]
    predicted = trainer.predict(tokens(8, 2)).metrics
    assert predicted["test_raw_loss"] == plain[-1]["eval_one_loss"]


def test_averages_in_the_model_are_not_evaluated_as_training_weights(tmp_path):
    when = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    args = arguments(tmp_path, **when, load_best_model_at_end=True)
    options = {"rule": AnyTail(), "window": 0.5, "evaluate_raw": True}
    trainer = make("trainer", tiny(), args, options, eval_dataset=tokens(8, 2))
    trainer.train()
    assert all("eval_raw_loss" in each for each in evaluations(trainer))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == trainer.state.best_metric
    assert "eval_raw_loss" not in metrics
    trainer.train()
    assert "eval_raw_loss" in evaluations(trainer)[-1]
    with trainer.tail_average.average_parameters(1.0):
        assert "eval_raw_loss" not in trainer.evaluate()


def test_evaluate_raw_is_a_flag(tmp_path):
    with pytest.raises(TypeError, match=r"evaluate_raw: expected True or False, got 'yes'"):
        make("trainer", tiny(), arguments(tmp_path), {"rule": 0.5, "evaluate_raw": "yes"})


def test_a_loss_before_the_first_counted_step_is_that_of_the_training_weights(tmp_path):
    options = {"rule": 0.5, "evaluate_raw": True, "start_after": 8}
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=4)
    trainer = make("trainer", tiny(), args, options, eval_dataset=tokens(8, 2))
    trainer.train()
    assert ["eval_raw_loss" in each for each in evaluations(trainer)] == [False, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_decay_names_the_rule_to_pass(kind, tmp_path):
    with pytest.raises(TypeError, match=r"decay: pass a rule instead: .* Exponential\(1999\)"):
        make(kind, tiny(), arguments(tmp_path), {"decay": 0.999})
