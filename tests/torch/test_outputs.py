"""What is handed out: state dicts, files, models that save themselves."""

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnytimeWindow
from tests.support.torch_models import assert_averages, bits, small, snapshot, walked


def test_outputs_are_fresh_and_free_of_the_model():
    model = small()
    average, _, _ = walked(model, 10, 25)
    before, state = bits(model), snapshot(average.state_dict())
    for outputs in (
        average.averaged_state_dict(),
        average.full_state_dict(),
        average.averaged_state_dict(dtype=torch.float64),
        average.averaged_state_dict(dtype=torch.float32),
    ):
        for tensor in outputs.values():
            assert not tensor.requires_grad
            tensor.fill_(9)
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state
    average, _, _ = walked(model, AnytimeWindow(1), 1)  # where the read is one accumulator
    for tensor in average.averaged_state_dict().values():
        tensor.fill_(9)
    assert bits(average.averaged_state_dict()) == bits(model.state_dict())


def test_a_saved_file_is_whole_or_not_there(tmp_path, monkeypatch):
    model = small()
    average, _, _ = walked(model, 10, 25)
    path = tmp_path / "averaged.safetensors"
    average.save_averaged(str(path))
    expected = bits(average.averaged_state_dict())
    assert bits(safetensors.torch.load_file(path)) == expected
    other = small(seed=2)
    other.load_state_dict(safetensors.torch.load_file(path))
    old = path.read_bytes()

    def fail(*args, **options):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    average.update()
    with pytest.raises(OSError, match="disk full"):
        average.save_averaged(path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    average.save_averaged(path, dtype=torch.bfloat16)
    kinds = {name: x.dtype for name, x in safetensors.torch.load_file(path).items()}
    assert kinds.pop("1.num_batches_tracked") == torch.int64
    assert set(kinds.values()) == {torch.bfloat16}
    with pytest.raises(FileNotFoundError):
        average.save_averaged(tmp_path / "no such folder" / "averaged.safetensors")


def test_a_file_has_tied_and_transposed_tensors_too(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    model.to(memory_format=torch.channels_last)
    model[2].weight = nn.Parameter(torch.rand(2, 2).t())
    average, _, history = walked(model, 10, 25)
    average.save_averaged(tmp_path / "averaged.safetensors")
    on_disk = safetensors.torch.load_file(tmp_path / "averaged.safetensors")
    assert set(on_disk) == set(model.state_dict())
    assert_averages(on_disk, history.average(average.rule))


def test_a_state_dict_that_hands_out_other_tensors_is_averaged_all_the_same():
    """Hooks that detach, rename or add: what is exported is the average, by any name."""
    model = small()
    average, _, history = walked(model, 10, 25)
    expected = history.average(average.rule)
    handle = model._register_state_dict_hook(detached)
    assert_averages(average.averaged_state_dict(), expected)
    handle.remove()
    handle = model._register_state_dict_hook(renamed)  # the tensors themselves: by any name
    assert_averages(average.averaged_state_dict(), {f"x.{n}": x for n, x in expected.items()})
    handle.remove()
    handle = model._register_state_dict_hook(unknown)
    before = bits(model)
    for dtype in (None, torch.float64):
        got = average.averaged_state_dict(dtype)
        assert {x.dtype for x in got.values() if x.is_floating_point()} == {dtype or torch.float32}
        assert_averages(got, expected | {"unknown": 2 * expected["0.weight"]}, torch.float32)
        got["unknown"].fill_(9)
        got["0.weight"].fill_(9)
    assert bits(model) == before
    handle.remove()
    model.register_module("extra", WithExtraState())
    got = average.averaged_state_dict()
    assert got["extra._extra_state"] == {"seen": 3}
    assert_averages(got, expected)


def renamed(module, state, prefix, metadata):
    return {f"x.{name}": tensor for name, tensor in state.items()}


def unknown(module, state, prefix, metadata):
    return state | {"unknown": 2 * state["0.weight"]}


def detached(module, state, prefix, metadata):
    return {name: tensor.detach() for name, tensor in state.items()}


class WithExtraState(nn.Module):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


class Pretrained(nn.Module):
    """As in transformers: a model that saves itself."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.config = {"hidden": 3}

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        safetensors.torch.save_file(self.state_dict(), folder / "model.safetensors")


def test_a_model_that_saves_itself_does_so_inside_the_context_manager(tmp_path):
    model = Pretrained()
    average, _, _ = walked(model, 10, 25)
    with average.average_parameters():
        model.save_pretrained(tmp_path / "averaged")
    on_disk = safetensors.torch.load_file(tmp_path / "averaged" / "model.safetensors")
    assert bits(on_disk) == bits(average.averaged_state_dict())
