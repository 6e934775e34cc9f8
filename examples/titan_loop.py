"""Average the weights in a loop of the shape of torchtitan's trainer, on two processes.

    torchrun --nproc-per-node 2 examples/titan_loop.py [--folder build/titan] [--steps 120]

A small Llama is split into two parts, as a pipeline schedule may leave on a rank, and sharded with
FSDP2. In its language four tokens can follow each token, so that the best loss is ln 4 = 1.386. The
program validates the training weights and their average, saves checkpoints, and exports the average
under the names of Hugging Face. Run again with more steps, it resumes from the last checkpoint.
"""

import argparse
import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from tailavg.torch import ParameterAverage

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 32, 2, 4
EVERY = 40  # steps between checkpoints
FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)
HF_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


def rotated(x: Tensor) -> Tensor:
    """Rotate pairs of numbers by angles that grow with the position."""
    first, second = x.chunk(2, dim=-1)
    rates = 10_000 ** -(torch.arange(first.shape[-1]) / first.shape[-1])
    angles = torch.arange(x.shape[-2])[:, None] * rates
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """A layer: attention and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention = nn.ModuleDict({f"w{x}": linear(WIDTH, WIDTH) for x in "qkvo"})
        self.feed_forward = nn.ModuleDict({f"w{i}": linear(WIDTH, WIDTH) for i in (1, 2, 3)})

    def forward(self, x: Tensor) -> Tensor:
        attention, feed, normed = self.attention, self.feed_forward, self.attention_norm(x)
        projected = [attention[f"w{x}"](normed).unflatten(-1, (HEADS, -1)) for x in "qkv"]
        q, k, v = (heads.transpose(1, 2) for heads in projected)
        mixed = scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + attention["wo"](mixed.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + feed["w2"](silu(feed["w1"](normed)) * feed["w3"](normed))


class Llama(nn.Module):
    """A model, or a part of one: what belongs to other parts is None."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


def split(model: Llama) -> list[Llama]:
    """Return the two halves of a model."""
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    first.norm = first.output = second.tok_embeddings = None
    for i in range(LAYERS):
        del (second if i < LAYERS / 2 else first).layers[str(i)]
    return [first, second]


class ModelWrapper:
    """The state of all parts as one, which dcp saves and loads."""

    def __init__(self, parts: list[Llama]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: x for part in self.parts for name, x in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part in self.parts:
            part.load_state_dict({name: state[name] for name in part.state_dict()})


class OptimizersContainer(torch.optim.Optimizer):
    """An optimizer for each part, which step together."""

    def __init__(self, parts: list[Llama]) -> None:
        self.pairs = [(part, torch.optim.AdamW(part.parameters(), lr=0.02)) for part in parts]
        self.optimizers = [optimizer for _, optimizer in self.pairs]
        super().__init__([weight for part in parts for weight in part.parameters()], {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        states = [dcp_state.get_optimizer_state_dict(*pair, options=FLAT) for pair in self.pairs]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in self.pairs:
            dcp_state.set_optimizer_state_dict(part, optimizer, state, options=FLAT)


class Trainer:
    """Trains, validates, saves and exports; its own state is the number of steps."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.folder, self.step = folder, 0
        self.followers = torch.rand(VOCABULARY, VOCABULARY).argsort()[:, :4]  # of each token
        self.model_parts = split(Llama())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for part in self.model_parts:
            for module in (*part.layers.values(), part):
                fully_shard(module, mesh=mesh)
        self.optimizers = OptimizersContainer(self.model_parts)
        self.average = ParameterAverage(self.model_parts, 0.25)  # the last quarter of the steps
        self.average.attach(self.optimizers)
        self.states = {
            "model": ModelWrapper(self.model_parts), "optimizer": self.optimizers,
            "train_state": self, "average": self.average,
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def loss(self, seed: int) -> Tensor:
        """Return the loss on a batch of this rank, which goes through one part after the other."""
        random = torch.Generator().manual_seed(seed * dist.get_world_size() + dist.get_rank())
        tokens = [torch.randint(VOCABULARY, (16,), generator=random)]
        for _ in range(32):
            choices = torch.randint(4, (16,), generator=random)
            tokens.append(self.followers[tokens[-1], choices])
        x = torch.stack(tokens[:-1], dim=1)
        for part in self.model_parts:
            x = part(x)
        return cross_entropy(x.flatten(0, 1), torch.stack(tokens[1:], dim=1).flatten())

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss on batches that no step uses, the mean over all ranks."""
        total = sum(self.loss(10_000 + i) for i in range(4)) / 4
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def train(self, steps: int) -> None:
        """Train to this step, from the last checkpoint if there is one, and export the average."""
        complete = self.folder.glob("step-*/.metadata")
        if last := max(
            (int(path.parent.name.removeprefix("step-")) for path in complete), default=0
        ):
            dcp.load(self.states, checkpoint_id=self.folder / f"step-{last}")
        while self.step < steps:
            self.step += 1
            self.optimizers.zero_grad()
            self.loss(self.step).backward()
            self.optimizers.step()  # which updates the average
            if self.step % EVERY == 0:
                dcp.save(self.states, checkpoint_id=self.folder / f"step-{self.step}")
                raw = self.validate()
                with self.average.average_parameters():
                    averaged = self.validate()
                if dist.get_rank() == 0:
                    print(f"step {self.step}: loss {raw:.4f}, of the average {averaged:.4f}")
        weights = {hf_name(name): x for name, x in self.average.full_state_dict().items()}
        if dist.get_rank() == 0:
            save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """Return model.layers.0.self_attn.q_proj.weight for layers.0.attention.wq.weight."""
    layer, module = re.fullmatch(r"(layers\.\d+\.)?(.*)\.weight", name).groups()
    return f"{f'model.{layer}' if layer else ''}{HF_NAMES[module]}.weight"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/titan"))
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)  # a model this small gains nothing from more
    options.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo")
    Trainer(options.folder).train(options.steps)
    dist.destroy_process_group()
