"""The recipes of docs/decay-free.md for other trainers, run as they are printed."""

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tailavg import AnyTail, Decay
from tailavg.torch import ParameterAverage

PAGE = (Path(__file__).parents[1] / "docs" / "decay-free.md").read_text()


def recipe(heading):
    """The code of a section."""
    section = PAGE.split(f"### {heading}\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


def run(heading, **names):
    names |= {"AnyTail": AnyTail, "Decay": Decay, "ParameterAverage": ParameterAverage}
    exec(compile(recipe(heading), f"docs/decay-free.md, {heading}", "exec"), names)
    return names


def test_lightning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning = pytest.importorskip("lightning")

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(3, 1)

            def training_step(self, batch, _):
                return (self.layer(batch) - batch.sum(1, keepdim=True)).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        torch.manual_seed(0)
        module, data = Module(), torch.utils.data.DataLoader(torch.randn(64, 3), batch_size=4)
        trainer = lightning.Trainer(
            max_epochs=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        names = run(
            "Lightning",
            Callback=lightning.Callback,
            trainer=trainer,
            module=module,
            data=data,
            validation_loss=lambda module: (module.layer.weight - 1).square().sum().item(),
        )
    average, found = names["tails"].average, names["found"]
    assert average.count == 48
    assert len(found.scores) == 8
    expected = average.averaged_state_dict(window=found.window)["layer.weight"]
    assert torch.equal(module.layer.weight, expected)


def test_hugging_face(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        config = transformers.GPT2Config(
            n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8
        )
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        tokens = torch.randint(16, (40, 8))
        names = run(
            "Hugging Face",
            TrainerCallback=transformers.TrainerCallback,
            Trainer=transformers.Trainer,
            TrainingArguments=lambda **options: transformers.TrainingArguments(
                report_to="none", disable_tqdm=True, use_cpu=True, gradient_accumulation_steps=2,
                save_strategy="no", **options,
            ),
            model=model,
            folder=str(tmp_path),
            data=[{"input_ids": row, "labels": row} for row in tokens],
        )  # fmt: skip
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "averaged")
    average = names["tails"].average
    assert average.count == 40  # and not 80
    expected = average.averaged_state_dict(window=Decay(0.2, "cosine"))
    got = saved.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(got["lm_head.weight"], model.lm_head.weight)
