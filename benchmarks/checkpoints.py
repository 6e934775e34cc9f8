"""`tailavg checkpoints` against reading and writing the files, and other tools: `make bench`.

    python benchmarks/checkpoints.py                # 1 GB a file, 5 rounds; about half an hour
    python benchmarks/checkpoints.py --quick        # 0.2 GB, one round; keeps no results

It needs `pip install "tailavg[bench]"`. Two tools are optional, and left out with a note if they
are missing: `pip install mergekit`, for its linear merge, and for Megatron's weighted merge, which
runs on a CPU, `pip install triton` and `--megatron` with the folder of a checkout of Megatron-LM
(June 2026 or later, with tools/checkpoint/weighted_merge.py).

Four checkpoints of a Llama are averaged. The least that this can take is to read them and to write
one: `cat` of all of them to /dev/null, and then a process that writes as many bytes as the output
has and syncs them. The loop is the one that many write: `safe_open` each file, add tensor after
tensor in double precision, `save_file`, sync. All are processes of their own, which take turns;
their time is that within the process, without imports and without the start of numba. Before a
round with a cold cache, the files are dropped from it. Ratios are to reading and writing, in the
same round; their medians are kept. "Without syncs" nothing waits for the disk. Other tools run in
the first round only. The rows go to results/checkpoints.csv, and as a table to
results/checkpoints.md.
"""

import argparse
import csv
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

import ml_dtypes
import numba
import numpy as np
import safetensors
import torch
import torch.distributed.checkpoint as dcp
from networks import processor
from safetensors.numpy import save_file

RESULTS = Path(__file__).parent / "results"
FILES = 4
BASE = "cat and write"

WRITE = """
import os, sys, time
size, sync = int(sys.argv[1]), sys.argv[2] == "sync"
data = os.urandom(2**24)
start = time.perf_counter()
with open("output", "wb", buffering=0) as file:
    while size:
        size -= file.write(data[:size])
    if sync:
        os.fsync(file.fileno())
print(time.perf_counter() - start)
"""

AVERAGE = """
import json, os, sys, time
from pathlib import Path
import ml_dtypes, safetensors, torch
if sys.argv[2] != "numba":
    sys.modules["numba"] = None
if sys.argv[1] != "sync":
    os.fsync = os.fdatasync = lambda file: None
import tailavg.checkpoints.distributed
from tailavg.checkpoints import average_checkpoints
paths = [Path(name) for name in sys.argv[3:]]
def memory(kind):
    return 1024 * int(Path("/proc/self/status").read_text().split(kind)[1].split()[0])
start = time.perf_counter()
if sys.argv[2] == "numba":
    import numba
    average_checkpoints(paths, 1.0, include=["*model.norm.weight"])  # loads the compiled loops
starting = time.perf_counter() - start
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = memory("VmRSS:")
start = time.perf_counter()
average_checkpoints(paths, {Path("output" + paths[0].suffix): 1.0})
took = time.perf_counter() - start
print(json.dumps({"starting": starting, "held": memory("VmHWM:") - before}), file=sys.stderr)
print(took)
"""

STRAIGHT = """
import os, sys, time
import torch
from safetensors import safe_open
from safetensors.torch import save_file
start = time.perf_counter()
files = [safe_open(name, "pt") for name in sys.argv[3:]]
averages = {}
for name in files[0].keys():
    total = sum(file.get_tensor(name).double() for file in files)
    averages[name] = (total / len(files)).to(files[0].get_tensor(name).dtype)
save_file(averages, "output.safetensors")
with open("output.safetensors", "rb") as file:
    os.fsync(file.fileno())
print(time.perf_counter() - start)
"""

MERGEKIT = """
import os, sys, time, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
folders = [str(Path(name).parent) for name in sys.argv[3:]]
models = [{"model": name, "parameters": {"weight": 1 / len(folders)}} for name in folders]
config = {"merge_method": "linear", "dtype": sys.argv[2], "models": models}
config = MergeConfiguration.model_validate(config)
options = MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
start = time.perf_counter()
run_merge(config, "output", options)
for path in Path("output").glob("*.safetensors"):
    with path.open("rb") as file:
        os.fsync(file.fileno())
print(time.perf_counter() - start)
"""

MEGATRON = """
import os, sys, time
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/tools/checkpoint"]
import torch.distributed
import weighted_merge
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
folders = sys.argv[3:]
weights = [1 / len(folders)] * len(folders)
start = time.perf_counter()
weighted_merge.merge_same_layout_dcp_metadata_checkpoints(folders, weights, "output")
print(time.perf_counter() - start)
"""


class Candidate(NamedTuple):
    """A program that averages, and what it is told before the names of the checkpoints."""

    name: str
    program: str
    argument: str = ""


OURS = Candidate("tailavg checkpoints", AVERAGE, "numba")
WITHOUT = Candidate("tailavg checkpoints, without numba", AVERAGE)
LOOP = Candidate("a loop of safe_open in torch", STRAIGHT)


def llama(kind: np.dtype, gigabytes: float, seed: int) -> dict[str, np.ndarray]:
    """The tensors of a Llama with as many layers as the gigabytes hold."""
    width, inner, words = 2048, 5632, 256
    of_layer = {
        **{f"self_attn.{name}_proj.weight": (width, width) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")},
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    size = kind.itemsize * sum(int(np.prod(shape)) for shape in of_layer.values())
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (words, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (words, width),
    }
    for layer in range(max(1, round(gigabytes * 1e9 / size))):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape, np.float32).astype(kind)
        for name, shape in shapes.items()
    }


def write_model(folder: Path, tensors: dict[str, np.ndarray], dtype: str) -> Path:
    """A folder of a Llama, as `save_pretrained` would write it."""
    inner, width = tensors["model.layers.0.mlp.up_proj.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": sum("mlp.up" in name for name in tensors),
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": len(tensors["lm_head.weight"]),
        "tie_word_embeddings": False,
        "dtype": dtype,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def write_distributed(folder: Path, tensors: dict[str, np.ndarray], dtype: str) -> Path:
    """A folder of torch.distributed.checkpoint, with the two small files that Megatron adds."""
    codes = np.uint32 if dtype == "float32" else np.uint16
    state = {
        f"model.{name}": torch.from_numpy(tensor.view(codes)).view(getattr(torch, dtype))
        for name, tensor in tensors.items()
    }
    with warnings.catch_warnings(action="ignore"):  # there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    return folder


def python(program: str, folder: Path, *arguments: object) -> tuple[float, str]:
    """The seconds that a program counted, and what else it said."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout.split()[-1]), done.stderr


def files_of(paths: list[Path]) -> list[Path]:
    """The files that are read: those of tensors."""
    return [file for path in paths for file in (path.glob("*.distcp") if path.is_dir() else [path])]


def drop(paths: list[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_and_write(folder: Path, files: list[Path], sync: str) -> tuple[float, str]:
    """The seconds to read all files and to write one of them."""
    start = perf_counter()
    with Path("/dev/null").open("wb") as null:
        subprocess.run(["cat", *files], stdout=null, check=True)
    read = perf_counter() - start
    wrote, _ = python(WRITE, folder, sum(file.stat().st_size for file in files) // FILES, sync)
    return read + wrote, f"{read:.3g} {wrote:.3g}"


def clear(folder: Path) -> None:
    """Remove what a candidate wrote."""
    for output in folder.glob("output*"):
        shutil.rmtree(output) if output.is_dir() else output.unlink()


class Results:
    """The rows of the table, and what `tailavg` said of itself."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.memory, self.starting = 0, 0.0

    def group(
        self,
        title: str,
        folder: Path,
        paths: list[Path],
        candidates: list[Candidate],
        cache: str,
        sync: str,
        rounds: int,
    ) -> None:
        """Let candidates take turns on the same checkpoints."""
        files = files_of(paths)
        took: dict[str, list[float]] = {BASE: [], **{each.name: [] for each in candidates}}
        order: list[Candidate | None] = [None, *candidates]
        for turn in range(rounds):
            for each in order:
                if turn and each not in (None, OURS, WITHOUT):
                    continue  # it takes long
                os.sync()
                if cache == "cold":
                    drop(files)
                else:
                    subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
                if each is None:
                    name, (seconds, said) = BASE, read_and_write(folder, files, sync)
                else:
                    name = each.name
                    seconds, said = python(each.program, folder, sync, each.argument, *paths)
                if each in (OURS, WITHOUT):
                    told = json.loads(said.splitlines()[-1])
                    if not paths[0].is_dir():
                        self.memory = max(self.memory, told["held"])
                    self.starting = max(self.starting, told["starting"])
                took[name].append(seconds)
                last = said.strip().splitlines()[-1:] if each in (None, OURS, WITHOUT) else []
                print(title, name, f"{seconds:.3g}", *last, sep=" | ", flush=True)
                clear(folder)
            order = [*order[1:], order[0]]
        for name, times in took.items():
            ratio = median(a / b for a, b in zip(times, took[BASE], strict=False))
            numbers = median(times), min(times), ratio, min(times) / min(took[BASE])
            self.rows.append([title, name, *(f"{number:.3g}" for number in numbers)])
            print(*self.rows[-1], sep=" | ", flush=True)

    def keep(self, facts: str) -> None:
        RESULTS.mkdir(exist_ok=True)
        heads = ["group", "candidate", "median seconds", "best seconds", "ratio", "of the best"]
        with (RESULTS / "checkpoints.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(heads)
            writer.writerows(self.rows)
        table = [
            "| | median seconds | best | ratio, median | ratio of the best |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        seen = ""
        for title, *cells in self.rows:
            if title != seen:
                table.append(f"| **{title}** | | | | |")
                seen = title
            table.append(f"| {' | '.join(cells)} |")
        (RESULTS / "checkpoints.md").write_text("\n".join([facts, "", *table]) + "\n")
        print(f"\nkept in {RESULTS / 'checkpoints.csv'}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of a file (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each (%(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("build/checkpoints"))
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM")
    parser.add_argument("--quick", action="store_true", help="0.2 GB, one round, no results")
    options = parser.parse_args()
    if options.quick:
        options.gigabytes, options.rounds = 0.2, 1
    linear, megatron = find_spec("mergekit") is not None, options.megatron
    if not linear:
        print("mergekit is not installed: its merge is left out", file=sys.stderr)
    if megatron is None:
        print("no --megatron: Megatron's weighted_merge.py is left out", file=sys.stderr)
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    load, results, size = os.getloadavg()[0], Results(), 0

    def written(make: Callable[[Path, dict[str, np.ndarray], str], Path], dtype: str) -> list[Path]:
        kind = np.dtype(np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        return [
            make(folder / f"step-{step}", llama(kind, options.gigabytes, step), dtype)
            for step in range(FILES)
        ]

    try:
        for dtype in ("float32", "bfloat16"):
            others = [LOOP] + [Candidate("mergekit's linear merge", MERGEKIT, dtype)] * linear
            paths = written(write_model, dtype)
            size = paths[0].stat().st_size
            for cache, sync in (("warm", "sync"), ("cold", "sync"), ("warm", "")):
                title = f"{dtype}, {cache} cache" + ", without syncs" * (not sync)
                candidates = [OURS, WITHOUT, *(others if sync else [])]
                results.group(title, folder, paths, candidates, cache, sync, options.rounds)
            shutil.rmtree(folder)
            folder.mkdir()
            paths = written(write_distributed, dtype)
            candidates = [OURS, WITHOUT]
            if megatron is not None:
                name = "Megatron's weighted_merge.py"
                candidates.append(Candidate(name, MEGATRON, str(megatron.absolute())))
            title = f"{dtype}, torch.distributed.checkpoint, warm cache"
            results.group(title, folder, paths, candidates, "warm", "sync", options.rounds)
            shutil.rmtree(folder)
            folder.mkdir()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not options.quick:
        results.keep(
            f"Python {platform.python_version()}, NumPy {np.__version__}, torch "
            f"{torch.__version__}, numba {numba.__version__}, safetensors "
            f"{safetensors.__version__}; {processor()}, load {load:.1f} before; {FILES} files of "
            f"{size / 1e9:.2f} GB, {options.rounds} interleaved rounds. `tailavg` held at most "
            f"{results.memory / 1e6:.0f} MB for safetensors; numba started in "
            f"{results.starting:.1f} s."
        )


if __name__ == "__main__":
    main()
