"""An interrupt at any instruction leaves the state before or after a call, or one that says so."""

import copy
import tempfile
from contextlib import suppress

import pytest
import torch
from torch import nn

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.torch import AveragedModel, ParameterAverage, convert_tail_batchnorm
from tests.support.interrupts import interrupted
from tests.support.torch_models import bits, saved, snapshot


class Run:
    """A model that trains, one number a step, and its average."""

    def __init__(self, make, steps: int):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1, bias=False).double())
        self.average = make(self.model)
        self.step = 0
        for _ in range(steps):
            self.train()
            self.update()

    def train(self) -> None:
        self.step += 1
        with torch.no_grad():
            for i, tensor in enumerate((*self.model.parameters(), *self.model.buffers())):
                tensor.copy_(torch.tensor(self.step * 0.37 + i))

    def replace(self) -> None:
        """Let the model have other tensors, with the same values."""
        self.model.load_state_dict(copy.deepcopy(self.model.state_dict()), assign=True)

    def update(self) -> None:
        if isinstance(self.average, AveragedModel):
            self.average.update_parameters(self.model)
        else:
            self.average.update()

    def state(self):
        """All that there is to see; None if the average says that it is incomplete."""
        try:
            if isinstance(self.average, AveragedModel):
                state = self.average.state_dict()
                return snapshot(dict(state)), bits(self.average.module), self.average.count
            return snapshot(self.average.state_dict()), self.average.count
        except RuntimeError as error:
            if "incomplete" in str(error):
                return None
            raise


def parameters(rule=10, **options):
    return lambda model: ParameterAverage(model, rule, **options)


def in_files(rule, **options):
    return lambda model: ParameterAverage(model, rule, offload=tempfile.mkdtemp(), **options)


def module(**options):
    return lambda model: AveragedModel(model, 10, **options)


def ready(make, steps, prepare=Run.train):
    """Runs that are alike, each about to do something."""

    def new() -> Run:
        run = Run(make, steps)
        prepare(run)
        return run

    return new


def replaced(run):
    run.train()
    run.replace()


CASES = {
    "update": (ready(parameters(), 3), Run.update),
    "update that folds and turns": (ready(parameters(), 5), Run.update),
    "update that begins a block": (ready(parameters(AnytimeWindow(4, 2)), 12), Run.update),
    "update that merges": (ready(parameters(AnyTail(6, 0.5)), 8), Run.update),
    "update that folds and turns in files": (ready(in_files(AnytimeWindow(10)), 5), Run.update),
    "update that merges in files": (ready(in_files(AnyTail(6, 0.5)), 8), Run.update),
    "update of an exponential": (ready(parameters(Exponential(3)), 9), Run.update),
    "update with variances": (ready(parameters(variance=True), 5), Run.update),
    "update with variances in files": (
        ready(in_files(AnyTail(6, 0.5), variance=True), 8),
        Run.update,
    ),
    "update that counts": (ready(parameters(update_every=3), 8), Run.update),
    "update that does not count": (ready(parameters(update_every=3), 7), Run.update),
    "update of other tensors": (ready(parameters(), 3, replaced), Run.update),
    "move": (ready(parameters(), 3), lambda run: run.average.to("cpu")),
    "read": (ready(parameters(), 3), lambda run: run.average.averaged_state_dict()),
    "state": (ready(parameters(), 3), lambda run: run.average.state_dict()),
    "module's update": (ready(module(), 3), Run.update),
    "module's update of other tensors": (ready(module(use_buffers=True), 3, replaced), Run.update),
    "module's read": (ready(module(), 3), lambda run: run.average.module),
    "module's state": (ready(module(use_buffers=True), 3), lambda run: run.average.state_dict()),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # a file is closed later, if by no `with`
@pytest.mark.parametrize(("make", "call"), CASES.values(), ids=CASES)
def test_a_call_is_done_or_not_or_the_average_is_not_whole(make, call):
    before, after = make(), make()
    count = before.average.count
    call(after)
    expected = before.state(), after.state()
    # what would come next, whether the call was done or is done again
    for run in (before, after):
        run.train()
        run.update()
    further = before.state(), after.state()
    seen = set()
    for n, run in interrupted(make, call):
        state = run.state()
        done = state == expected[1] != expected[0]
        seen.add(None if state is None else int(done))
        if state is not None:
            # or what was due is done, and the sample is not taken
            assert state in expected or run.average.count == count, n
            run.train()
            run.update()
            assert run.state() == further[done], n
    assert 0 in seen


def loading(make, **options):
    """A run that is to load the state of another, and that state."""
    other = Run(make, 8)
    state = saved(other.average.state_dict())
    return ready(make, 3), lambda run: run.average.load_state_dict(state, **options)


LOADS = {
    "parameters": loading(parameters(update_every=3)),
    "exponential": loading(parameters(Exponential(3))),
    "variances": loading(parameters(variance=True)),
    "module": loading(module()),
    "module, assigned": loading(module(use_buffers=True), assign=True),
}


@pytest.mark.parametrize(("make", "call"), LOADS.values(), ids=LOADS)
def test_a_state_is_loaded_or_not_or_the_average_is_not_whole(make, call):
    test_a_call_is_done_or_not_or_the_average_is_not_whole(make, call)
    whole = make()
    call(whole)
    for n, run in interrupted(make, call):
        call(run)  # another attempt makes all of it good
        assert run.state() == whole.state(), n


def test_a_conversion_can_be_taken_up_again():
    make = ready(module(), 3)
    after = make()
    after.average.double()
    expected = after.state()
    after.update()
    for n, run in interrupted(make, lambda run: run.average.double()):
        run.average.double()
        assert run.state() == expected, n
        run.update()
        assert run.state() == after.state(), n


def swap(run):
    with run.average.average_parameters():
        pass


def swap_by_hand(run):
    run.average.store()
    run.average.copy_to()
    run.average.restore()


@pytest.mark.parametrize("call", [swap, swap_by_hand])
@pytest.mark.parametrize("prepare", [Run.train, replaced])
def test_training_weights_are_there_or_can_be_restored(call, prepare):
    make = ready(parameters(), 12, prepare)
    before = make()
    weights, state = bits(before.model), before.state()
    before.train()
    before.update()
    for n, run in interrupted(make, call):
        if bits(run.model) != weights:
            run.average.restore()
            assert bits(run.model) == weights, n
        with suppress(RuntimeError):  # there may be nothing to restore
            run.average.restore()
        assert bits(run.model) == weights, n
        assert run.state() == state, n
        run.train()
        run.update()
        assert run.state() == before.state(), n


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_statistics_of_a_batch_are_there_or_not(kind):
    batch = torch.arange(12.0).view(4, 3).square()

    def make():
        norm = convert_tail_batchnorm(kind(3), 0.5)
        for i in range(3):
            norm(batch + i)
        return norm

    before, after = make(), make()
    after(batch)
    expected = [bits(before), bits(after)]
    assert expected[0] != expected[1]
    for n, norm in interrupted(make, lambda norm: norm(batch)):
        assert bits(norm) in expected, n
        assert norm.momentum == 0.1
