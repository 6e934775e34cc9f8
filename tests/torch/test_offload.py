"""Offload: the same bits with means in main memory or in files, which nothing damages unseen."""

import copy
import errno
import os
import pickle
import resource
import signal
from contextlib import contextmanager
from shutil import rmtree

import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential, Growing, RawTail
from tailavg.io.files import InUseError
from tailavg.torch import AveragedModel, ParameterAverage
from tests.support.cases import short
from tests.support.processes import python
from tests.support.torch_models import (
    Walk,
    bits,
    comparable,
    saved,
    small,
    snapshot,
    walked,
)
from tests.support.torch_processes import exit_code

RULES = [
    AnytimeWindow(40, 2),
    AnytimeWindow(0.25, 5, turns="paper"),
    AnytimeWindow(Growing(0.5, at_most=300), 4),
    Exponential(10),
    Exponential(0.25),
    RawTail(100, total=300),
    AnyTail(12),
    AnyTail(6, shortest=0.5),
]
PLACES = ["cpu", "folder"]
every_place = pytest.mark.parametrize("place", PLACES)


def model() -> nn.Module:
    """Tensors of several dtypes, orders, sizes and kinds, with gaps between them."""
    torch.manual_seed(0)
    made = nn.Sequential(
        nn.Conv2d(3, 40, 5).to(memory_format=torch.channels_last),
        nn.Linear(130, 127),
        nn.BatchNorm1d(5),
        nn.Linear(2, 3).double(),
        nn.Linear(3, 1).to(torch.bfloat16),
        nn.Embedding(1, 0),
    )
    made.register_parameter("complex", nn.Parameter(torch.randn(3, dtype=torch.complex64)))
    made.register_parameter("turned", nn.Parameter(torch.randn(90, 100).T))
    return made


@pytest.fixture
def make(tmp_path):
    """Makes a model, unless one is given, its walk and its average in a place."""
    places = iter(range(100))

    def made(rule, place, kind=ParameterAverage, net=None, **options):
        offload = tmp_path / str(next(places)) if place == "folder" else place
        net = net or model()
        return net, Walk(net), kind(net, rule, offload=offload, **options)

    return made


@pytest.mark.parametrize("rule", RULES, ids=short)
def test_everything_is_the_same_to_the_bit(rule, make):
    net, walk, memory = make(rule, None)
    offloaded = {place: make(rule, place, net=net)[2] for place in PLACES}
    window = 0.7 if isinstance(rule, AnyTail) else None
    for t in range(1, 520):
        walk.step()
        for average in (memory, *offloaded.values()):
            average.update()
        if t in (1, 2, 20, 41, 255, 256, 257, 300, 511, 513, 519):
            state, averages, before = comparable(memory), averaged(memory, window), bits(net)
            with memory.average_parameters(window):
                swapped = bits(net)
            for place, average in offloaded.items():
                assert comparable(average) == state, (place, t)
                assert averaged(average, window) == averages, (place, t)
                with average.average_parameters(window):
                    assert bits(net) == swapped, (place, t)
                assert bits(net) == before, (place, t)


def averaged(average, window):
    return bits(average.averaged_state_dict(window=window))


def test_infinities_and_nan_are_the_same(make):
    net, walk, memory = make(AnytimeWindow(300), None)
    offloaded = {place: make(AnytimeWindow(300), place, net=net)[2] for place in PLACES}
    for t in range(520):
        walk.step()
        with torch.no_grad():
            if t == 100:
                net[1].weight[3] = torch.inf
            if t == 120:
                net[1].bias[0] = torch.nan
        for average in (memory, *offloaded.values()):
            average.update()
        if t in (110, 130, 300, 519):
            for place, average in offloaded.items():
                assert comparable(average) == comparable(memory), (place, t)


@every_place
@pytest.mark.parametrize("rule", [AnytimeWindow(20), AnyTail(6), Exponential(30), RawTail(9, 20)])
def test_a_state_resumes_in_any_place(rule, place, make):
    _, walk, average = make(rule, None)
    _, other_walk, offloaded = make(rule, place)
    for _ in range(70):
        walk.step()
        average.update()
    offloaded.load_state_dict(saved(average.state_dict()))
    other_walk.random.set_state(walk.random.get_state())
    _, third_walk, third = make(rule, None)
    third.load_state_dict(saved(offloaded.state_dict()))
    third_walk.random.set_state(walk.random.get_state())
    for _ in range(40):
        for steps in (walk, other_walk, third_walk):
            steps.step()
        for resumed in (average, offloaded, third):
            resumed.update()
    assert comparable(average) == comparable(offloaded)
    assert comparable(average) == comparable(third)


@every_place
def test_a_tail_is_selected_and_stored_the_same(place, make):
    runs = [make(AnyTail(6), None), make(AnyTail(6), place)]
    outcomes = []
    for net, walk, average in runs:
        for _ in range(90):
            walk.step()
            average.update()
        score = average.select_tail(lambda net=net: net[1].weight.double().sum())
        average.store()
        average.copy_to(window=0.3)
        copied = bits(net)
        average.restore()
        outcomes.append((score, copied, bits(net)))
    assert outcomes[0] == outcomes[1]


@every_place
@pytest.mark.parametrize("rule", [AnytimeWindow(20), Exponential(30)])
def test_an_averaged_model_is_the_same(rule, place, make):
    runs = [make(rule, where, AveragedModel, buffers="average") for where in (None, place)]
    for _ in range(100):
        for net, walk, average in runs:
            walk.step()
            average.update_parameters(net)
    assert bits(runs[0][2].module) == bits(runs[1][2].module)
    runs[1][2].double()
    assert runs[1][2].module[1].weight.dtype is torch.float64


@every_place
def test_an_average_moves_to_another_precision(place, make):
    _, walk, average = make(AnytimeWindow(20), None)
    _, other, offloaded = make(AnytimeWindow(20), place)
    for _ in range(50):
        walk.step()
        other.step()
        average.update()
        offloaded.update()
    average.to(torch.float32)
    offloaded.to(torch.float32)
    assert comparable(average) == comparable(offloaded)


def test_a_compiled_model_and_a_device_of_its_own_offload(tmp_path):
    net = small()
    compiled = torch.compile(net, backend="eager")
    average = ParameterAverage(compiled, 10, device="cpu", offload=tmp_path)
    plain, walk = ParameterAverage(net, 10), Walk(net)
    for _ in range(40):
        walk.step()
        average.update()
        plain.update()
    assert bits(average.averaged_state_dict()) == bits(plain.averaged_state_dict())
    assert comparable(average) == comparable(plain)


# Files


@contextmanager
def full_disk():
    """No file may grow beyond its first bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def vanish(folder):
    rmtree(folder)


def change(folder):
    for file in folder.glob("mean-*"):
        with file.open("r+b") as opened:
            opened.seek(-1, os.SEEK_END)
            opened.write(b"x")
        os.utime(file, (0, 0))


def cut(folder):
    for file in folder.glob("mean-*"):
        os.truncate(file, file.stat().st_size // 2)


def files(folder):
    return sorted(file.name for file in folder.iterdir())


FOLDS = [AnytimeWindow(20), AnyTail(6), Exponential(3)]


@pytest.mark.parametrize("rule", FOLDS, ids=short)
def test_a_full_disk_stops_an_update_and_harms_nothing(rule, tmp_path):
    runs = [walked(small(), rule, 0, offload=where)[:2] for where in (None, tmp_path)]
    (memory, walk), (offloaded, other) = runs
    window = 0.5 if isinstance(rule, AnyTail) else None
    refused = 0
    for count in range(90):
        walk.step()
        other.step()
        memory.update()
        clock = offloaded._accumulators.clock
        if clock.count >= clock.next:
            with full_disk(), pytest.raises(OSError, match=f"{tmp_path}/mean-") as raised:
                offloaded.update()
            assert raised.value.errno == errno.EFBIG
            assert offloaded.count == count
            offloaded.averaged_state_dict(window=window)
            refused += 1
        offloaded.update()
    assert refused > 3
    assert comparable(memory) == comparable(offloaded)


def test_a_full_disk_stops_a_swap_before_it_begins(tmp_path):
    average, _, _ = walked(small(), 10, 30, offload=tmp_path)
    model = average._tracking.modules[0]
    before = bits(model)
    with full_disk(), pytest.raises(OSError, match="no room"), average.average_parameters():
        raise AssertionError
    assert bits(model) == before
    with average.average_parameters():
        assert bits(model) != before
    assert bits(model) == before


@pytest.mark.parametrize("harm", [vanish, change, cut])
@pytest.mark.parametrize("rule", FOLDS, ids=short)
def test_a_file_that_was_harmed_is_named_and_the_sum_stays_good(rule, harm, tmp_path):
    average, walk, _ = walked(small(), rule, 33, offload=tmp_path)
    good, other, _ = walked(small(), rule, 33)
    model, window = average._tracking.modules[0], 1.0 if isinstance(rule, AnyTail) else None
    before = bits(model)

    def sums(of):
        return snapshot(of._accumulators._sums())

    harm(tmp_path)
    for read in (
        lambda: average.averaged_state_dict(window=window),
        lambda: average.state_dict(),
        lambda: average.save(tmp_path.parent / "state"),
        lambda: average.average_parameters(window).__enter__(),
    ):
        with pytest.raises(OSError, match=f"{tmp_path}/(mean|saved)-"):
            read()
        assert bits(model) == before
    assert not (tmp_path.parent / "state").exists()
    assert sums(average) == sums(good)
    if harm is vanish or not isinstance(rule, AnytimeWindow):
        for _ in range(100):
            walk.step()
            try:
                average.update()
            except OSError:
                break
        else:
            raise AssertionError("what is gone was not missed")
        average._accumulators.require_complete()
        tmp_path.mkdir(exist_ok=True)
        average.load_state_dict(saved(good.state_dict()))
        walk.random.set_state(other.random.get_state())
    for _ in range(50):  # the harmed blocks leave the window
        walk.step()
        other.step()
        average.update()
        good.update()
    assert comparable(average) == comparable(good)


def refused_another(folder):
    with pytest.raises(InUseError, match="another average uses this folder"):
        ParameterAverage({"w": torch.zeros(3)}, 10, offload=folder)


def test_a_folder_belongs_to_one_average(tmp_path):
    average, _, _ = walked(small(), 10, 30, offload=tmp_path)
    with pytest.raises(InUseError, match="another average uses this folder"):
        ParameterAverage(small(), 10, offload=tmp_path)
    assert exit_code(refused_another, tmp_path) == 0
    assert average.averaged_state_dict()
    del average
    assert files(tmp_path) == []
    ParameterAverage(small(), 10, offload=tmp_path).update()


def killed_after_updates(folder):
    average = ParameterAverage({"w": torch.zeros(3)}, 10, offload=folder)
    for _ in range(30):
        average.update()
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    assert exit_code(killed_after_updates, tmp_path) == -signal.SIGKILL
    (tmp_path / "mine.txt").write_text("mine")
    left = set(files(tmp_path))
    assert len(left) >= 4
    average = ParameterAverage({"w": torch.zeros(5)}, 10, offload=tmp_path)
    assert set(files(tmp_path)) & left <= {"mine.txt", ".offload.lock"}
    average.update()
    del average
    assert files(tmp_path) == ["mine.txt"]


FORKS = """
import os, sys
import torch
from tailavg.torch import ParameterAverage

average = ParameterAverage({"w": torch.zeros(3)}, 10, offload=sys.argv[1])
for _ in range(30):
    average.update()
before = average.averaged_state_dict()["w"].tolist()
if not os.fork():
    try:
        for _ in range(30):
            average.update()
    except RuntimeError as error:
        os._exit("belong to the process that made the average" in str(error))
    os._exit(2)
print("one that writes:", os.waitstatus_to_exitcode(os.wait()[1]))
if not os.fork():
    del average
    sys.exit()
print("one that ends:", os.waitstatus_to_exitcode(os.wait()[1]))
assert average.averaged_state_dict()["w"].tolist() == before
average.update()
"""


def test_a_forked_process_may_not_write_and_leaves_the_files_alone(tmp_path):
    done = python("-u", "-c", FORKS, tmp_path)
    assert done.stdout.splitlines() == ["one that writes: 1", "one that ends: 0"]
    assert files(tmp_path) == []


def test_a_file_is_a_safetensors_file_with_the_names_of_the_model(tmp_path):
    average, _, history = walked(small(), AnytimeWindow(20), 45, offload=tmp_path)
    starts, held = average._accumulators.clock.starts, average._accumulators.files()
    assert starts == [20, 30, 40]
    for i, file in held.items():
        found = safetensors.torch.load_file(file)
        for name, values in history.samples.items():
            mean = sum(values[starts[i] : starts[i + 1]]) / 10
            torch.testing.assert_close(found[name].double(), torch.tensor(mean), rtol=1e-6, atol=0)


def test_files_are_few_however_long_it_runs(tmp_path):
    average, walk, _ = walked(small(), AnyTail(6), 50, offload=tmp_path)
    most = 0
    for _ in range(300):
        walk.step()
        average.update()
        most = max(most, len(files(tmp_path)))
    assert most <= 6 + 1  # blocks, the lock


def test_an_average_in_files_is_not_copied(tmp_path):
    average, _, _ = walked(small(), 10, 30, offload=tmp_path)
    for call in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"copy: .*cannot be copied; save its state"):
            call(average)
    averaged = AveragedModel(small(), 10, offload=tmp_path / "model")
    with pytest.raises(TypeError, match=r"copy: .*cannot be copied"):
        copy.deepcopy(averaged)


def test_a_folder_that_is_made_anew_belongs_to_the_new_average(tmp_path):
    """The average of before goes, and leaves alone what is not its own."""
    cold = tmp_path / "cold"
    average, _, _ = walked(small(), 10, 30, offload=cold)
    rmtree(cold)
    new, _, _ = walked(small(), 10, 30, offload=cold)
    expected, before = comparable(new), files(cold)
    del average
    assert files(cold) == before
    assert comparable(new) == expected
    with pytest.raises(InUseError):
        ParameterAverage(small(), 10, offload=cold)


def test_a_symlink_may_point_elsewhere_later(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    average, _, _ = walked(small(), 10, 30, offload=tmp_path / "link")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("two")
    other, _, _ = walked(small(), 10, 30, offload=tmp_path / "two")
    before = comparable(other)
    assert comparable(average) == before
    del average
    assert comparable(other) == before
    assert files(tmp_path / "one") == []


def test_a_move_that_is_interrupted_is_not_read(tmp_path, monkeypatch):
    average, _, _ = walked(small(), 10, 33, offload=tmp_path)
    block = type(average._accumulators._blocks[0])
    old = block.clear

    def clear(self):
        if not average._accumulators.complete:
            raise KeyboardInterrupt
        old(self)

    monkeypatch.setattr(block, "clear", clear)
    with pytest.raises(KeyboardInterrupt):
        average.to(torch.float64)
    with pytest.raises(RuntimeError, match="incomplete"):
        average.averaged_state_dict()


def test_an_averaged_model_loads_all_or_nothing(tmp_path):
    model, walk = small(), None
    averaged = AveragedModel(model, 10, offload=tmp_path / "cold")
    walk = Walk(model)
    for _ in range(12):
        walk.step()
        averaged.update_parameters(model)
    state = saved(averaged.state_dict())
    for _ in range(3):
        walk.step()
        averaged.update_parameters(model)
    before = bits(averaged.module)
    with full_disk(), pytest.raises(OSError, match="mean-"):
        averaged.load_state_dict(state)
    assert averaged.count == averaged.n_averaged == 15
    assert bits(averaged.module) == before
    averaged.load_state_dict(state)
    assert averaged.count == averaged.n_averaged == 12


@pytest.mark.parametrize("offload", ["", "CPU", "cuda", "cuda:0", "meta"])
def test_a_device_is_no_folder(offload):
    with pytest.raises(ValueError, match=f'a folder of that name is "./{offload}"'):
        ParameterAverage(small(), 10, offload=offload)


@pytest.mark.parametrize("offload", [3, True, ["a"]])
def test_another_place_is_refused(offload):
    with pytest.raises(TypeError, match='offload: expected None, "cpu" or a folder'):
        ParameterAverage(small(), 10, offload=offload)


def test_what_files_cannot_hold_is_refused(tmp_path):
    tensors = {"w": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(TypeError, match="does not support accumulators of complex128"):
        ParameterAverage(tensors, 10, offload=tmp_path)
    assert files(tmp_path) == []
