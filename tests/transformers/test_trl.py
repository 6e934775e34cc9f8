"""Trainers of TRL with the mixin: SFT and DPO, with and without LoRA, on tiny models made here."""

import os
import warnings

import pytest
import torch
from safetensors.torch import load_file

from tailavg import AnytimeWindow
from tests.support import model as brute
from tests.support.effort import some
from tests.support.hugging_face_training import GPT2LMHeadModel, Steps, bits, same, tiny

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    from tailavg.transformers import TailAverageMixin

pytestmark = pytest.mark.filterwarnings("ignore")  # those of TRL and of what it calls

WORDS = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghij"])}
ROWS = {
    "text": ["a b c d", "b c d e", "c d e f", "d e f g"] * 3,
    "prompt": ["a b", "b c", "c d", "d e"] * 3,
    "chosen": ["c d", "d e", "e f", "f g"] * 3,
    "rejected": ["j i", "i h", "h g", "g f"] * 3,
}
COLUMNS = {"sft": ["text"], "dpo": ["prompt", "chosen", "rejected"]}


class AveragedSFT(TailAverageMixin, SFTTrainer):
    pass


class AveragedDPO(TailAverageMixin, DPOTrainer):
    pass


def make(kind, folder, lora, steps, **options):
    words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    rows = Dataset.from_dict({name: ROWS[name] for name in COLUMNS[kind]})
    arguments = {
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "learning_rate": 0.03,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    trainer, config = {
        "sft": (AveragedSFT, SFTConfig),
        "dpo": (AveragedDPO, DPOConfig),
    }[kind]
    adapter = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    return trainer(
        model=tiny(n_positions=32),
        args=config(str(folder), **arguments | options),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, **special),
        peft_config=adapter if lora else None,
        callbacks=[steps],
        tail_average={"rule": 0.5, "evaluate_raw": True},
        **({} if kind == "sft" or lora else {"ref_model": tiny(n_positions=32)}),
    )


@pytest.mark.parametrize(
    ("kind", "lora"),
    [("sft", True), ("dpo", False), *some([], [("sft", False), ("dpo", True)])],
)
def test_a_run_is_evaluated_saved_and_resumed(kind, lora, tmp_path):
    steps = Steps()
    trainer = make(kind, tmp_path / "a", lora, steps, load_best_model_at_end=True)
    trainer.train()
    best = trainer.state.best_global_step
    assert trainer.tail_average.count == best
    weights = brute.weight_matrix(AnytimeWindow(0.5), best)[-1]
    expected = steps.mean(weights)
    averaged = trainer.tail_average.averaged_state_dict(torch.float64)
    trained = [name for name, x in trainer.model.named_parameters() if x.requires_grad]
    assert trained
    for name in trained:
        torch.testing.assert_close(averaged[name], expected[name], rtol=0, atol=2e-7)
    losses = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert [log["step"] for log in losses][:2] == [3, 6]
    assert all(log["eval_raw_loss"] != log["eval_loss"] for log in losses[:2])
    assert trainer.evaluate()["eval_loss"] == trainer.state.best_metric

    trainer.save_model(str(tmp_path / "export"))
    if lora:
        saved = load_file(tmp_path / "export" / "adapter_model.safetensors")
        assert len(saved) == len(trained)
    else:
        saved = dict(GPT2LMHeadModel.from_pretrained(tmp_path / "export").named_parameters())
        assert same(saved, {name: averaged[name].float() for name in saved})

    resumed = make(kind, tmp_path / "b", lora, Steps())
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    whole = make(kind, tmp_path / "c", lora, Steps())
    whole.train()
    assert bits(resumed.tail_average.state_dict()) == bits(whole.tail_average.state_dict())
