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


@pytest.fixture(autouse=True)
def others_may_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_lightning(tmp_path):
    import lightning

    from tailavg.lightning import TailAveraging

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
    options = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    names = run(
        "Lightning",
        Trainer=lightning.Trainer,
        TailAveraging=TailAveraging,
        options=options,
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
    import transformers

    from tailavg.transformers import TailAverageTrainer

    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=16, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(16, (40, 8))
    names = run(
        "Hugging Face",
        TailAverageTrainer=TailAverageTrainer,
        TrainingArguments=lambda folder, **options: transformers.TrainingArguments(
            folder, report_to="none", disable_tqdm=True, use_cpu=True, save_strategy="no",
            gradient_accumulation_steps=2, **options,
        ),
        model=model,
        folder=str(tmp_path),
        data=[{"input_ids": row, "labels": row} for row in tokens],
    )  # fmt: skip
    average = names["trainer"].tail_average
    assert average.count == 40  # and not 80
    got = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "averaged").state_dict()
    expected = average.averaged_state_dict(window=Decay(0.2, "cosine"))
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(got["lm_head.weight"], model.lm_head.weight)
