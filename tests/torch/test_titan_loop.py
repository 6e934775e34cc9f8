"""`examples/titan_loop.py` on two processes: it resumes bit-identically and exports a Llama."""

import re
import runpy

import numpy as np
import safetensors.torch
import torch

from tests.support.effort import exhaustive
from tests.support.paths import EXAMPLES
from tests.support.processes import python, user_environment
from tests.support.torch_models import bits, snapshot

STEPS = 9
TOKENS = torch.arange(12).view(2, 6)


def trainer_in(folder):
    """A trainer of the example, which saves every three steps."""
    trainer = runpy.run_path(EXAMPLES / "titan_loop.py")["Trainer"]
    trainer.train.__globals__["EVERY"] = 3
    folder.mkdir(exist_ok=True)
    return trainer(folder)


def states(trainer):
    def local(value):
        if isinstance(value, dict):
            return {key: local(item) for key, item in value.items()}
        if isinstance(value, list):
            return list(map(local, value))
        return value.to_local() if hasattr(value, "to_local") else value

    return snapshot({name: local(part.state_dict()) for name, part in trainer.states.items()})


def resumed_rank(folder):
    unbroken = trainer_in(folder / "unbroken")
    unbroken.train(STEPS)
    assert (unbroken.step, unbroken.average.count) == (STEPS, STEPS)
    trainer_in(folder / "broken").train(STEPS - 2)  # its last checkpoint is older
    resumed, loaded = trainer_in(folder / "broken"), []
    resumed.load_state_dict = lambda state: loaded.append(state) or vars(resumed).update(state)
    resumed.train(STEPS)
    assert loaded == [{"step": 6}]
    assert states(resumed) == states(unbroken)
    x = TOKENS
    with torch.no_grad(), resumed.average.average_parameters():
        for part in resumed.model_parts:
            x = part(x)
    return x.numpy()


def test_a_resumed_run_is_bit_identical_and_hugging_face_loads_the_average(tmp_path, on_ranks):
    expected, _ = on_ranks(2, resumed_rank, tmp_path)
    files = [tmp_path / name / "model.safetensors" for name in ("unbroken", "broken")]
    weights, resumed = map(safetensors.torch.load_file, files)
    assert bits(resumed) == bits(weights)
    import transformers  # here, since each rank imports this file

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights)
    with torch.no_grad():
        np.testing.assert_allclose(model(TOKENS).logits.numpy(), expected, rtol=1e-4, atol=1e-4)


@exhaustive("torch sometimes aborts when processes with gloo exit on CPUs")
def test_the_average_has_a_lower_loss(tmp_path):
    printed = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *(EXAMPLES / "titan_loop.py", "--folder", tmp_path / "new", "--steps", 40),
        env=user_environment(OMP_NUM_THREADS="1"),
    ).stdout
    rows = re.findall(
        r"^step (\d+): loss ([\d.]+), of the average ([\d.]+)$", printed, re.MULTILINE
    )
    assert [int(step) for step, _, _ in rows] == [40]
    assert all(1.38 < float(average) < float(raw) < 1.6 for _, raw, average in rows)
