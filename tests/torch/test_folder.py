"""A state as a folder: complete, linked where it can be, replaced in one step, read by all."""

import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential, TailAverage
from tailavg.io import state as layout
from tailavg.jax import tail_average
from tailavg.torch import ParameterAverage
from tests.support.cases import short
from tests.support.torch_models import Odd, Walk, bits, comparable, small, walked

offloads = pytest.mark.parametrize("offload", [False, True])


def names(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("rule", "offload"),
    [
        (AnytimeWindow(20), False),
        (AnytimeWindow(20), True),
        (AnytimeWindow(0.25, 5), False),
        (AnyTail(6), True),
        (Exponential(10), False),
    ],
    ids=short,
)
def test_a_saved_average_goes_on_as_if_it_had_never_stopped(rule, offload, tmp_path):
    options = {"offload": tmp_path / "cold"} if offload else {}
    average, walk, _ = walked(Odd(compiled=False), rule, 0, update_every=2, **options)
    for count in (0, 3, 44, 270):
        while average.count < count:
            walk.step()
            average.update()
        folder = tmp_path / f"step-{count}"
        average.save(folder)
        for where in (None, tmp_path / f"cold-{count}"):
            model = Odd(compiled=False)
            resumed = ParameterAverage(model, rule, update_every=2, offload=where)
            resumed.load(folder)
            assert comparable(resumed) == comparable(average)
            expected = ParameterAverage(walk.model, rule, update_every=2)
            expected.load(folder)
            for run, trained in ((resumed, model), (expected, walk.model)):
                steps = Walk(trained, seed=count)
                for _ in range(30):
                    steps.step()
                    run.update()
            assert comparable(resumed) == comparable(expected)


@offloads
def test_the_files_are_those_of_the_layout(offload, tmp_path):
    options = {"offload": tmp_path / "cold"} if offload else {}
    average, _, history = walked(small(), AnytimeWindow(600), 900, **options)
    average.save(tmp_path / "state")
    saved = average.state_dict()
    assert saved["starts"] == [0, 300, 600]
    assert names(tmp_path / "state") == [
        "block-0-300.safetensors",
        "block-300-600.safetensors",
        "open.safetensors",
        "state.json",
    ]
    scalars = json.loads((tmp_path / "state" / "state.json").read_text())
    assert scalars == {k: v for k, v in saved.items() if k not in ("blocks", "partial")}
    block = safetensors.torch.load_file(tmp_path / "state" / "block-300-600.safetensors")
    assert bits(block) == bits(saved["blocks"][1])
    for name, values in history.samples.items():
        mean = torch.tensor(np.mean(values[300:600], axis=0))
        torch.testing.assert_close(block[name].double(), mean, rtol=1e-6, atol=0)
    rest = safetensors.torch.load_file(tmp_path / "state" / "open.safetensors")
    expected = {f"mean.{name}": x for name, x in saved["blocks"][2].items()}
    assert bits(rest) == bits(expected | {f"sum.{n}": x for n, x in saved["partial"].items()})


def test_closed_blocks_are_linked_and_folders_do_not_depend_on_each_other(tmp_path):
    average, walk, _ = walked(small(), AnyTail(6), 70, offload=tmp_path / "cold")
    states = {}
    for step in (70, 71, 90, 140, 141):
        while average.count < step:
            walk.step()
            average.update()
        average.save(tmp_path / f"step-{step}")
        states[step] = comparable(average)
        blocks = list((tmp_path / f"step-{step}").glob("block-*"))
        assert len(blocks) == 5
        assert all(block.stat().st_nlink > 1 for block in blocks)
    shared = (tmp_path / "step-70", tmp_path / "step-71")
    assert {file.stat().st_ino for file in shared[0].glob("block-*")} == {
        file.stat().st_ino for file in shared[1].glob("block-*")
    }
    while average.count < 400:  # the files of the average are written again, those saved are not
        walk.step()
        average.update()
    del average
    shutil.rmtree(tmp_path / "cold")
    shutil.rmtree(shared[0])
    for step in (71, 90, 140, 141):
        resumed = ParameterAverage(small(), AnyTail(6))
        resumed.load(tmp_path / f"step-{step}")
        assert comparable(resumed) == states[step]


def test_without_links_blocks_are_written(tmp_path, monkeypatch):
    average, _, _ = walked(small(), AnytimeWindow(20), 45, offload=tmp_path / "cold")

    def link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    average.save(tmp_path / "state")
    assert {file.stat().st_nlink for file in (tmp_path / "state").iterdir()} == {1}
    resumed = ParameterAverage(small(), AnytimeWindow(20))
    resumed.load(tmp_path / "state")
    assert comparable(resumed) == comparable(average)


def test_a_state_is_replaced_and_nothing_else_is(tmp_path):
    average, walk, _ = walked(small(), 10, 33)
    (tmp_path / "empty").mkdir()
    average.save(tmp_path / "empty")
    walk.step()
    average.update()
    average.save(tmp_path / "empty")
    resumed = ParameterAverage(small(), 10)
    resumed.load(tmp_path / "empty")
    assert resumed.count == 34
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError, match=name):
            average.save(tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "mine"
    assert names(tmp_path) == ["empty", "file", "mine"]


@pytest.mark.parametrize("text", ['{"format": "other"}', "[]", "x"])
def test_a_folder_with_anything_else_in_it_is_kept(text, tmp_path):
    average, _, _ = walked(small(), 10, 33)
    average.save(tmp_path / "state")
    (tmp_path / "state" / "model.pt").write_text("mine")
    with pytest.raises(FileExistsError, match="state"):
        average.save(tmp_path / "state")
    assert (tmp_path / "state" / "model.pt").read_text() == "mine"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "state.json").write_text(text)
    with pytest.raises(FileExistsError, match="other"):
        average.save(tmp_path / "other")
    assert (tmp_path / "other" / "state.json").read_text() == text
    assert names(tmp_path) == ["other", "state"]


def test_a_folder_that_is_missing_is_named(tmp_path):
    average, _, _ = walked(small(), 10, 33)
    with pytest.raises(FileNotFoundError, match=f"'{tmp_path}/none'"):
        average.save(tmp_path / "none" / "state")


def test_a_swap_and_an_average_without_updates_are_told(tmp_path):
    average, _, _ = walked(small(), 10, 33)
    with (
        average.average_parameters(),
        pytest.raises(RuntimeError, match="not possible during a swap"),
    ):
        average.save(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def cut(file):
    os.truncate(file, file.stat().st_size - 1)


def longer(file):
    with file.open("ab") as opened:
        opened.write(b"x")


def other_text(file):
    file.write_bytes(b"\x00" * 50)


def gone(file):
    file.unlink()


@pytest.mark.parametrize("harm", [cut, longer, other_text, gone])
@pytest.mark.parametrize("name", ["state.json", "block-20-30.safetensors", "open.safetensors"])
def test_a_damaged_folder_is_refused_by_the_name_of_the_file(name, harm, tmp_path):
    average, _, _ = walked(small(), AnytimeWindow(20), 45)
    average.save(tmp_path / "state")
    harm(tmp_path / "state" / name)
    before = comparable(average)
    for load in (average.load, TailAverage.load):
        with pytest.raises(ValueError, match=name):
            load(tmp_path / "state")
    assert comparable(average) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": ["../../x", "y"]}, "starts: expected a list of ints"),
        ({"starts": [0, 10**9]}, "no file .*block-0-1000000000"),
        ({"format": "x"}, "format"),
        ({"version": 2}, "version"),
        ({"rule": {}}, "rule"),
        ({"extra": 1}, "unexpected 'extra'"),
    ],
)
def test_a_crafted_folder_is_refused(change, message, tmp_path):
    average, _, _ = walked(small(), AnytimeWindow(20), 45)
    average.save(tmp_path / "state")
    file = tmp_path / "state" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        average.load(tmp_path / "state")


def test_another_rule_or_model_is_refused(tmp_path):
    average, _, _ = walked(small(), AnytimeWindow(20), 45)
    average.save(tmp_path / "state")
    with pytest.raises(ValueError, match="create the average with the rule"):
        ParameterAverage(small(), 10).load(tmp_path / "state")
    with pytest.raises(ValueError, match="missing weight, bias"):
        ParameterAverage(nn.Linear(2, 2), AnytimeWindow(20)).load(tmp_path / "state")


# Between frameworks


@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(10)], ids=short)
def test_numpy_and_jax_read_a_folder_and_torch_reads_theirs(rule, tmp_path):
    weight = nn.Parameter(torch.randn(40, 30).T)  # in another order
    average = ParameterAverage({"w": weight}, rule, offload=tmp_path / "cold")
    walk = Walk(nn.ParameterList([weight]))
    for _ in range(45):
        walk.step()
        average.update()
    average.save(tmp_path / "state")
    expected = average.averaged_state_dict()["w"].numpy()
    in_numpy = TailAverage.load(tmp_path / "state")
    np.testing.assert_allclose(in_numpy.value(), expected, rtol=1e-6)
    made = tail_average(rule)
    in_jax = made.from_state_dict(tmp_path / "state", {"w": jnp.zeros((30, 40))})
    np.testing.assert_allclose(np.array(made.value(in_jax)["w"]), expected, rtol=1e-6)
    in_numpy.save(tmp_path / "numpy.npz")
    again = ParameterAverage({"w": weight}, rule)
    again.load(tmp_path / "numpy.npz")
    assert comparable(again) == comparable(average)
    layout.write_folder(tmp_path / "jax", made.state_dict(in_jax))
    again.load(tmp_path / "jax")
    assert comparable(again) == comparable(average)


def test_numpy_takes_one_tensor_only(tmp_path):
    average, _, _ = walked(small(), 10, 33)
    average.save(tmp_path / "state")
    with pytest.raises(ValueError, match="takes a single array"):
        TailAverage.load(tmp_path / "state")
