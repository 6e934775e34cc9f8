"""Kill a training run, resume it in a fresh process, and compare with an unbroken run.

    python examples/resume.py [--folder build/resume] [--forget PART]

The network has BatchNorm and Dropout, the optimizer has momentum, and there are two averages. Every
100 steps, everything goes into one file. The broken run dies without warning at step 250, so the
steps after 200 are lost; the process that resumes it repeats them. At the end, every tensor must be
the same to the bit. `--forget` leaves one part out of the resume, to see the check fail.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tailavg.torch import ParameterAverage

torch.set_num_threads(1)  # a network this small gains nothing from more

STEPS, EVERY, DEATH = 400, 100, 250
PARTS = ("model", "optimizer", "quarter", "window", "random")


def train(
    path: Path, *, resume: bool = False, forget: str | None = None, die: bool = False
) -> None:
    """Train up to STEPS, from the start or from the checkpoint; with `die`, stop half-way."""
    torch.manual_seed(0)
    inputs = torch.randn(1000, 20)
    labels = (inputs @ torch.randn(20, 5)).argmax(dim=1)

    model = nn.Sequential(
        *(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    averages = {
        "quarter": ParameterAverage(model, 0.25),
        "window": ParameterAverage(model, 20, update_every=3),  # 20 of every third step
    }
    for average in averages.values():
        average.attach(optimizer)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, **averages}

    done = 0
    if resume:
        checkpoint = torch.load(path, weights_only=True)
        done = checkpoint["step"]
        print(f"is resumed from step {done}" + (f", without its {forget}" if forget else ""))
        for name, part in parts.items():
            if name != forget:
                part.load_state_dict(checkpoint[name])
        if forget != "random":
            torch.set_rng_state(checkpoint["random"])

    for step in range(done + 1, STEPS + 1):
        batch = torch.randint(len(labels), (32,))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()
        if step % EVERY == 0:
            checkpoint = {name: part.state_dict() for name, part in parts.items()}
            checkpoint |= {"random": torch.get_rng_state(), "step": step}
            if step == STEPS:  # compare the averaged weights too
                for name, average in averages.items():
                    checkpoint[f"weights of {name}"] = average.averaged_state_dict()
            save(checkpoint, path)
        if die and step == DEATH:
            print(f"dies at step {step}", flush=True)
            os._exit(1)  # nothing is flushed, closed or cleaned up


def save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_suffix(".tmp")
    torch.save(checkpoint, unfinished)
    unfinished.replace(path)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """The values in nested dicts and lists, by path; a tensor as its dtype, shape and bytes."""
    if isinstance(tree, torch.Tensor):
        return {path: (tree.dtype, tree.shape, tree.numpy().tobytes())}
    if isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        found = [leaves(value, f"{path}/{key}") for key, value in items]
        return {key: value for one in found for key, value in one.items()}
    return {path: tree}


def compare(unbroken: Path, broken: Path) -> bool:
    """Print which parts of two checkpoints are equal; return whether all are."""
    same = True
    one, other = (torch.load(path, weights_only=True) for path in (unbroken, broken))
    for name in one:
        expected, found = leaves(one[name]), leaves(other[name])
        equal = sum(expected[key] == found.get(key) for key in expected)
        verdict = "equal to the bit" if expected == found else "DIFFERENT"
        print(f"{name:20}{verdict:18}{equal} of {len(expected)} tensors and numbers")
        same &= expected == found
    return same


def main() -> None:
    """Train both ways, compare, and fail on any difference."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("build/resume"))
    parser.add_argument("--forget", choices=PARTS, help="do not restore this part")
    parser.add_argument("--only", choices=("dying", "resumed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    broken, unbroken = (options.folder / f"{name}.pt" for name in ("broken", "unbroken"))

    if options.only:  # a process of its own, started below
        resume = options.only == "resumed"
        train(broken, resume=resume, forget=options.forget, die=not resume)
        return

    options.folder.mkdir(parents=True, exist_ok=True)
    for path in (broken, unbroken):
        path.unlink(missing_ok=True)
    train(unbroken)
    print(f"one run does its {STEPS} steps; the other", flush=True)
    again = [sys.executable, __file__, "--folder", options.folder, "--only"]
    forget = ["--forget", options.forget] if options.forget else []
    subprocess.run([*again, "dying"])
    subprocess.run([*again, "resumed", *forget], check=True)
    print()
    if not compare(unbroken, broken):
        sys.exit("The resumed run is not the unbroken one.")


if __name__ == "__main__":
    main()
