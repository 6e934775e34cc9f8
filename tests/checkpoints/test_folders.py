"""Folders that `save_pretrained` wrote, against averages in float64 computed by hand."""

import json
import os
import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

from tailavg import ExactWindow
from tailavg.checkpoints import CheckpointError, average_checkpoints
from tests.support import commands

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

STATE = ["optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_1.pth"]
STATE += ["trainer_state.json", "training_args.bin", "latest", "zero_to_fp32.py", ".hidden"]
STATE += ["global_step500/mp_rank_00_model_states.pt", "tail_average/blocks.safetensors"]
KEPT = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "merges.txt"]
KEPT += ["tokenizer.model", "chat_template.jinja", "modeling_own.py", "README.md"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def gpt2(seed, **options):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=100, n_positions=32, bos_token_id=1, **options
    )
    config.eos_token_id = 1
    return GPT2LMHeadModel(config)


def llama(seed, dtype):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=50,
        dtype=dtype,
    )
    return LlamaForCausalLM(config).to(dtype)


def trained(folder, steps, make=gpt2, shards=("5GB",)):
    """Folders as a trainer leaves them, and their weights."""
    paths, states = [], []
    for i, step in enumerate(steps):
        path = folder / f"checkpoint-{step}"
        model = make(i)
        model.save_pretrained(path, max_shard_size=shards[i % len(shards)])
        for name in STATE + KEPT:
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(f"{name} of {step}")
        paths.append(path)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return paths, states


def mean(states, weights):
    return {
        name: sum(w * state[name].double() for w, state in zip(weights, states, strict=True))
        for name in states[0]
    }


def assert_close(got, expected, unit):
    assert got.keys() == expected.keys()
    for name, wide in expected.items():
        off = (got[name].double() - wide).abs()
        assert (off <= 0.51 * unit * wide.abs() + 1e-12).all(), name


def listed(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


done = partial(commands.done, "checkpoints")


def failed(folder, *arguments, code=1):
    """What is said of a failure, which leaves no file behind."""
    before = listed(folder)
    _, told = commands.failed("checkpoints", *arguments, code=code)
    assert listed(folder) == before
    return told


def test_folders_that_are_cut_differently(tmp_path):
    paths, states = trained(tmp_path, [100, 200, 300, 1000], shards=["20KB", "5GB", "40KB", "30KB"])
    names = {tuple(sorted(path.glob("*.safetensors"))) for path in paths}
    assert len({len(each) for each in names}) == 4  # 7, 1, 4 and 5 files
    said = done(*paths, "--window", "0.75", "-o", tmp_path / "averaged")
    assert f"the average of 3 of 4 checkpoints, {paths[1]} to {paths[3]}" in said
    newest, averaged = paths[-1], tmp_path / "averaged"
    expected = sorted(
        {path.name for path in newest.iterdir()} - {name.split("/")[0] for name in STATE}
    )
    assert listed(averaged) == expected
    for name in ["config.json", "generation_config.json", "model.safetensors.index.json", *KEPT]:
        assert (averaged / name).read_bytes() == (newest / name).read_bytes()
    for shard in newest.glob("*.safetensors"):
        assert load_file(averaged / shard.name).keys() == load_file(shard).keys()
    model = type(gpt2(0)).from_pretrained(averaged)
    assert_close(model.state_dict(), mean(states[1:], [1 / 3] * 3), 2.0**-23)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


def test_several_windows_of_folders(tmp_path):
    paths, states = trained(tmp_path, [1, 2, 3], shards=["30KB"])
    done(*paths, "--windows", "2,1.0", "-o", tmp_path / "averaged-{window}")
    for window, used in ("2", states[1:]), ("1.0", states):
        model = type(gpt2(0)).from_pretrained(tmp_path / f"averaged-{window}")
        assert_close(model.state_dict(), mean(used, [1 / len(used)] * len(used)), 2.0**-23)
    (tmp_path / "again-1.0").mkdir()
    (tmp_path / "again-1.0" / "mine").touch()
    said = failed(tmp_path, *paths, "--windows", "2,1.0", "-o", tmp_path / "again-{window}")
    assert "again-1.0: exists and holds other files" in said


def test_a_model_in_bfloat16(tmp_path):
    paths, states = trained(tmp_path, [1, 2], lambda seed: llama(seed, torch.bfloat16), ["2KB"])
    averaged = tmp_path / "averaged"
    done(*paths, "--window", "2", "-o", averaged)
    model = type(llama(0, None)).from_pretrained(averaged)
    assert model.dtype == torch.bfloat16
    assert_close(model.state_dict(), mean(states, [0.5, 0.5]), 2.0**-7)

    done(*paths, "--window", "2", "--dtype", "float32", "-o", tmp_path / "wide")
    model = type(llama(0, None)).from_pretrained(tmp_path / "wide")
    assert model.dtype == torch.float32
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
    assert_close(model.state_dict(), mean(states, [0.5, 0.5]), 2.0**-23)
    sizes = [
        json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
        for folder in (averaged, tmp_path / "wide")
    ]
    assert sizes[1] == 2 * sizes[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_folders_of_torch_files(tmp_path, sharded):
    paths, states = trained(tmp_path, [1, 2])
    for path, state in zip(paths, states, strict=True):
        (path / "model.safetensors").unlink()
        if not sharded:
            torch.save(state, path / "pytorch_model.bin")
            continue
        names = sorted(state)
        middle = len(names) // 2 if path == paths[0] else 3  # they are cut differently
        shards = {
            f"pytorch_model-0000{i}-of-00002.bin": {name: state[name] for name in some}
            for i, some in ((1, names[:middle]), (2, names[middle:]))
        }
        for shard, tensors in shards.items():
            torch.save(tensors, path / shard)
        weight_map = {name: shard for shard, tensors in shards.items() for name in tensors}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    done(*paths, "--window", "2", "-o", tmp_path / "averaged")
    files = [path.name for path in (tmp_path / "averaged").glob("*.bin")]
    assert len(files) == 1 + sharded
    model = gpt2(0)
    for file in files:
        model.load_state_dict(torch.load(tmp_path / "averaged" / file), strict=False)
    assert_close(model.state_dict(), mean(states, [0.5, 0.5]), 2.0**-23)


def test_adapters_and_folders_within(tmp_path):
    paths = [tmp_path / f"checkpoint-{step}" for step in (5, 10)]
    for step, path in enumerate(paths):
        for name in ("", "1_Pooling", "2_Dense", "scheduler"):
            (path / name).mkdir(parents=True)
            (path / name / "config.json").write_text("{}")
        (path / "adapter_config.json").write_text('{"r": 8}')
        (path / "optimizer.bin").write_bytes(b"")
        save_file({"lora_A": torch.full((2, 2), 1.0 * step)}, path / "adapter_model.safetensors")
        save_file({"lora_A": torch.full((3,), 5.0 * step)}, path / "2_Dense" / "model.safetensors")
    done(*paths, "--window", "2", "-o", tmp_path / "averaged")
    assert listed(tmp_path / "averaged") == [
        "1_Pooling",
        "1_Pooling/config.json",
        "2_Dense",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "scheduler",
        "scheduler/config.json",
    ]
    averaged = load_file(tmp_path / "averaged" / "adapter_model.safetensors")
    assert averaged["lora_A"].tolist() == [[0.5, 0.5]] * 2
    dense = load_file(tmp_path / "averaged" / "2_Dense" / "model.safetensors")
    assert dense["lora_A"].tolist() == [2.5] * 3
    done(*paths, "--window", "2", "--exclude", "2_Dense/*", "-o", tmp_path / "partly")
    dense = load_file(tmp_path / "partly" / "2_Dense" / "model.safetensors")
    assert dense["lora_A"].tolist() == [5.0] * 3


def plain(folder, step, **tensors):
    """A folder of a model, in two shards."""
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    state = {"a": torch.full((4,), 1.0 * step), "b": torch.full((2, 3), 2.0 * step), **tensors}
    weight_map = {}
    for i, (name, tensor) in enumerate(state.items(), 1):
        shard = f"model-{i:05}-of-{len(state):05}.safetensors"
        save_file({name: tensor}, path / shard)
        weight_map[name] = shard
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def lose_a_shard(path):
    (path / "model-00001-of-00002.safetensors").unlink()


def lose_the_index(path):
    (path / "model.safetensors.index.json").unlink()


def write_index(path, text):
    (path / "model.safetensors.index.json").write_text(text)


def add_a_model(path):
    save_file({"a": torch.ones(4)}, path / "model.safetensors")


def add_an_adapter(path):
    save_file({"lora_A": torch.ones(4)}, path / "adapter_model.safetensors")


def quantize(path):
    (path / "config.json").write_text('{"quantization_config": {"bits": 4}}')


def shard_with_fsdp(path):
    for file in path.iterdir():
        file.unlink()
    (path / "pytorch_model_fsdp_0").mkdir()
    (path / "pytorch_model_fsdp_0" / ".metadata").touch()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lose_a_shard, "the file 'model-00001-of-00002.safetensors' with tensor 'a' is missing"),
        (lose_the_index, "a shard without its index"),
        (lambda path: (lose_the_index(path), add_an_adapter(path)), "a shard without its index"),
        (lambda path: write_index(path, "{"), "index.json: not a JSON object"),
        (lambda path: write_index(path, '{"weight_map": 3}'), "not an index: expected"),
        (lambda path: write_index(path, '{"weight_map": {"a": "../b"}}'), "the file '../b'"),
        (add_a_model, "model.safetensors and an index with shards; remove the older"),
        (quantize, "the model is quantized"),
        (shard_with_fsdp, "average its folder pytorch_model_fsdp_0 instead"),
        (
            lambda path: (path / "own.bin").touch(),
            "the other weights in this folder are .safetensors files",
        ),
        (
            lambda path: [file.unlink() for file in path.iterdir()],
            "no model.safetensors, no shards",
        ),
    ],
)
def test_folders_that_are_refused(tmp_path, damage, said):
    paths = [plain(tmp_path, step) for step in (1, 2)]
    damage(paths[1])
    error = failed(tmp_path, *paths, "--window", "2", "-o", tmp_path / "averaged")
    assert "checkpoint-2" in error
    assert said in error
    assert "Nothing was written" in error


def test_folders_that_differ(tmp_path):
    newest = plain(tmp_path, 3)
    for step, tensors, said in (
        (0, {"c": torch.ones(1)}, "tensor 'c' is not in the newest"),
        (1, {"a": torch.ones(5)}, "tensor 'a': expected shape (4,), got (5,)"),
        (2, {"a": torch.ones(4).half()}, "tensor 'a': expected dtype float32, got float16"),
    ):
        path = plain(tmp_path, step, **tensors)
        error = failed(tmp_path, path, newest, "--window", "2", "-o", tmp_path / "averaged")
        assert f"checkpoint-{step}: differs from the newest" in error
        assert said in error


def test_wrong_command_lines(tmp_path):
    paths = [plain(tmp_path, step) for step in (1, 2)]
    save_file({"a": torch.ones(4)}, tmp_path / "checkpoint-3")
    every = ["--window", "2", "-o"]
    for arguments, said in (
        (
            [*paths, tmp_path / "checkpoint-3", *every, tmp_path / "x"],
            "files or folders, not both",
        ),
        ([*paths, *every, paths[0]], "is one of the checkpoints, or inside one"),
        ([*paths, *every, paths[0] / "averaged"], "or inside one"),
        ([*paths, *every, tmp_path / "no" / "averaged"], "no does not exist"),
    ):
        assert said in failed(tmp_path, *arguments, code=2)
    (tmp_path / "averaged").mkdir()
    done(*paths, *every, tmp_path / "averaged")  # it was empty
    assert "averaged: exists and holds other files" in failed(
        tmp_path, *paths, *every, tmp_path / "averaged"
    )


def test_a_folder_that_changes_meanwhile(tmp_path):
    paths = [plain(tmp_path, step) for step in (1, 2)]
    shard = paths[0] / "model-00002-of-00002.safetensors"
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors: the file changed"
    ):
        average_checkpoints(
            paths, {tmp_path / "averaged": ExactWindow(2)}, lambda *_: os.utime(shard, ns=(1, 1))
        )
    assert sorted(tmp_path.iterdir()) == paths


def test_a_link_is_followed(tmp_path):
    """As in the cache of the hub, where a snapshot holds links to files."""
    paths = [plain(tmp_path, step) for step in (1, 2)]
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(paths[1].iterdir())):
        shutil.move(file, tmp_path / "blobs" / str(i))
        file.symlink_to(tmp_path / "blobs" / str(i))
    done(*paths, "--window", "2", "-o", tmp_path / "averaged")
    files = list((tmp_path / "averaged").iterdir())
    assert len(files) == 3
    assert not any(file.is_symlink() for file in files)
