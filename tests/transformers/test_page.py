"""The code of docs/transformers.md, run as it is printed."""

import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tailavg.torch import ParameterAverage
from tests.support.hugging_face_training import (
    GPT2LMHeadModel,
    TailAverageTrainer,
    arguments,
    bits,
    same,
    tiny,
    tokens,
    weights,
)

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(number, names):
    exec(compile(BLOCKS[number], f"docs/transformers.md, block {number}", "exec"), names)
    return names


def test_all_blocks_are_run():
    assert len(BLOCKS) == 10


def test_trainers(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 8, "max_steps": 16}
    names = {
        "model": tiny(),
        "args": arguments(tmp_path, **saves),
        "data": tokens(),
        "test": tokens(8, 2),
        "folder": str(tmp_path),
        "AutoModelForCausalLM": GPT2LMHeadModel,
    }
    assert BLOCKS[0].count("\n") == 4
    assert run(0, names)["trainer"].tail_average.count == 16
    state = bits(names["trainer"].tail_average.state_dict())
    names["trainer"] = TailAverageTrainer(
        tiny(5), names["args"], train_dataset=tokens(), tail_average=0.25
    )
    shutil.rmtree(tmp_path / "checkpoint-16")
    run(6, names)
    assert bits(names["trainer"].tail_average.state_dict()) == state

    run(7, names)  # checkpoint 8
    assert names["average"].count == 8
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "averaged")
    assert same(weights(saved), weights(names["model"]))

    names["model"] = tiny()
    assert run(1, names)["Summarizer"].__mro__[1].__name__ == "TailAverageMixin"
    assert bits(run(2, names)["trainer"].tail_average.state_dict()) == state  # of the callback
    assert run(3, names)["trainer"].tail_average.count == 6
    assert any((tmp_path / "means").iterdir())
    run(4, names)
    average = names["trainer"].tail_average.averaged_state_dict(window=names["found"].window)
    saved = load_file(tmp_path / "best-tail" / "model.safetensors")
    assert all(torch.equal(saved[name], average[name]) for name in saved)
    metrics = run(5, names)["metrics"]
    assert metrics["eval_loss"] != metrics["eval_raw_loss"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_fsdp(tmp_path):
    model = tiny()
    average = ParameterAverage(model, 0.25)
    average.update()
    dcp.save({"average": average}, checkpoint_id=tmp_path / "checkpoint-8" / "tail_average")
    run(9, {"model": tiny(5), "folder": str(tmp_path)})
    assert same(weights(GPT2LMHeadModel.from_pretrained(tmp_path / "averaged")), weights(model))


def test_accelerate(tmp_path):
    def loop(folder, resume, batches):
        torch.manual_seed(0)
        model = tiny(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        data = tokens(48)[batches]
        return run(
            8,
            {
                "model": model,
                "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01),
                "loader": torch.utils.data.DataLoader(data, batch_size=4),
                "folder": folder,
                "resume": resume,
            },
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = loop(tmp_path / "whole", False, slice(0, 48))
        loop(tmp_path / "parts", False, slice(0, 32))
        parts = loop(tmp_path / "parts", True, slice(32, 48))
    assert whole["average"].count == parts["average"].count == 6  # of 12 batches
    assert bits(whole["average"].state_dict()) == bits(parts["average"].state_dict())
    saved = load_file(tmp_path / "parts" / "model" / "model.safetensors")
    average = whole["average"].averaged_state_dict()
    assert all(torch.equal(saved[name], average[name]) for name in saved)
