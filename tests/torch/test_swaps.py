"""Averages swapped into a model or copied into another, and the training weights put back."""

import math

import pytest
import safetensors.torch
import torch
from torch import nn

from tailavg import AnytimeWindow, Exponential
from tailavg.torch import ParameterAverage
from tests.support.torch_models import (
    FailAt,
    History,
    Odd,
    Walk,
    assert_averages,
    bits,
    named,
    saved,
    small,
    snapshot,
    walked,
)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_whatever_is_raised_inside_the_training_weights_come_back(error):
    model = small()
    average, _, _ = walked(model, 10, 30)
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
        model[0].weight[0, 1] = -0.0
    before, state = bits(model), snapshot(average.state_dict())

    def evaluate():
        with average.average_parameters():
            assert bits(model) != before
            nn.init.zeros_(model[0].weight)
            raise error("inside")

    with pytest.raises(error, match="inside"):
        evaluate()
    assert bits(model) == before
    assert snapshot(average.state_dict()) == state
    average.update()


@pytest.mark.parametrize(
    ("error", "make"),
    [(RuntimeError, small), (KeyboardInterrupt, Odd)],
    ids=["out of memory", "^C"],
)
def test_an_error_while_swapping_in_leaves_the_training_weights(error, make):
    """Stopped at each operation on tensors in turn, until a swap comes through whole."""
    model = make()
    average, _, _ = walked(model, AnytimeWindow(10, 4), 35)
    before = bits(model)
    for n in range(1, 2000):
        swapping = average.average_parameters()
        try:
            with FailAt(n, error):
                swapping.__enter__()
        except error:
            assert bits(model) == before, n
            state = average.state_dict()  # not while swapped: so it is not
            assert state["count"] == 35
        else:
            assert bits(model) != before
            swapping.__exit__(None, None, None)
            break
    else:
        pytest.fail("a swap takes more than 2000 operations?")
    assert n > 3
    assert bits(model) == before


def test_an_interrupted_restore_can_be_taken_up_again():
    model = Odd()
    average, _, _ = walked(model, 10, 35)
    before = bits(model)
    for n in range(1, 2000):
        average.store()
        average.copy_to()
        try:
            with FailAt(n, KeyboardInterrupt):
                average.restore()
        except KeyboardInterrupt:
            average.restore()
            assert bits(model) == before, n
        else:
            break
    assert n > 1
    assert bits(model) == before


def test_a_generator_that_swaps_and_is_dropped_puts_the_weights_back():
    model = small()
    average, _, _ = walked(model, 10, 30)
    before = bits(model)

    def evaluate():
        with average.average_parameters():
            yield 1
            yield 2

    running = evaluate()
    assert next(running) == 1
    assert bits(model) != before
    running.close()
    assert bits(model) == before


def test_store_copy_and_restore_are_the_swap_in_parts():
    model = small()
    average, _, history = walked(model, 10, 30)
    before, expected = bits(model), history.average(average.rule)
    average.store()
    assert bits(model) == before
    average.copy_to()
    assert_averages(named(model), expected)
    average.restore()
    assert bits(model) == before
    with pytest.raises(RuntimeError, match="store"):
        average.restore()
    average.copy_to()  # for good: training goes on from the average
    assert_averages(named(model), expected)
    average.update()
    assert average.count == 31


def test_while_swapped_in_neither_updates_nor_states_nor_other_swaps_are_allowed():
    model = small()
    average, _, _ = walked(model, 10, 30)
    state = saved(average.state_dict())
    for swap in (average.average_parameters, stored_of(average)):
        with swap():
            inside = bits(model)
            forbidden = [
                average.update,
                average.state_dict,
                lambda: average.load_state_dict(state),
                average.store,
                lambda: average.average_parameters().__enter__(),
            ]
            for call in forbidden:
                with pytest.raises(RuntimeError, match=r"swap|restore|store"):
                    call()
                assert bits(model) == inside
            assert average.count == 30
        assert snapshot(average.state_dict()) == snapshot(state)


def stored_of(average):
    class Stored:
        def __enter__(self):
            average.store()
            average.copy_to()

        def __exit__(self, *error):
            average.restore()

    return Stored


def test_outputs_can_be_made_while_swapped_in(tmp_path):
    """Evaluation scripts save from inside; the averages are the same there."""
    model = small()
    average, _, _ = walked(model, 10, 30)
    outside = bits(average.averaged_state_dict())
    with average.average_parameters():
        assert bits(average.averaged_state_dict()) == outside
        average.save_averaged(tmp_path / "inside.safetensors")
        assert average.profile().count == average.count == 30
        assert bits(model.state_dict()) == outside
    assert bits(safetensors.torch.load_file(tmp_path / "inside.safetensors")) == outside


def test_reading_or_swapping_before_the_first_update_is_an_error(tmp_path):
    model = small()
    average, before = ParameterAverage(model, 10), bits(model)
    for call in (
        average.averaged_state_dict,
        average.full_state_dict,
        average.copy_to,
        lambda: average.copy_to(small(seed=2)),
        lambda: average.average_parameters().__enter__(),
        lambda: average.save_averaged(tmp_path / "none.safetensors"),
        average.profile,
    ):
        with pytest.raises(ValueError, match="update"):
            call()
        assert bits(model) == before
    with pytest.raises(RuntimeError):
        average.restore()
    assert list(tmp_path.iterdir()) == []
    assert average.count == 0
    average.update()
    assert bits(average.averaged_state_dict()) == bits(model.state_dict())


def test_a_swap_keeps_the_objects_gradients_and_the_graph_to_come():
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.rand(6, 3)).square().mean().backward()
    optimizer.step()
    average, _, _ = walked(model, 10, 30)
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters]
    with average.average_parameters():
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert all(p.requires_grad and p.is_leaf for p in parameters)
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    model(torch.rand(6, 3)).square().mean().backward()
    optimizer.step()


def test_two_averages_over_one_model_swap_inside_each_other():
    model = small()
    short_average, long_average = (
        ParameterAverage(model, 3),
        ParameterAverage(model, Exponential(50)),
    )
    walk, history = Walk(model), History(model)
    for _ in range(60):
        walk.step()
        short_average.update()
        long_average.update()
        history.record()
    before = bits(model)
    with short_average.average_parameters():
        outer = bits(model)
        assert_averages(named(model), history.average(short_average.rule))
        with long_average.average_parameters():
            assert_averages(named(model), history.average(long_average.rule))
        assert bits(model) == outer
    assert bits(model) == before


def test_copies_go_by_name_into_a_model_with_its_modules_in_another_order():
    class Net(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(2, 2))

    average, _, _ = walked(Net(["a", "b", "c"]), 10, 20)
    other = Net(["c", "a", "b"])
    average.copy_to(other)
    assert bits(other.state_dict()) == bits(average.averaged_state_dict())
    resumed = ParameterAverage(other, 10)
    resumed.load_state_dict(saved(average.state_dict()))
    assert bits(resumed.averaged_state_dict()) == bits(average.averaged_state_dict())


def test_a_copy_into_a_model_that_does_not_match_names_it_and_writes_nothing():
    average, _, _ = walked(small(), 10, 20)
    smaller = small()[:2]
    misshapen = small(seed=1)
    misshapen[3] = nn.Linear(4, 7)
    for other, name in ((smaller, "3.weight"), (misshapen, "3.weight")):
        before = bits(other)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            average.copy_to(other)
        assert bits(other) == before


class Pair(nn.Module):
    """Two layers, or one under two names."""

    def __init__(self, tied):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = self.a if tied else nn.Linear(2, 2)


def test_a_copy_into_a_model_with_more_ties_is_refused_by_name():
    """One tensor cannot hold two averages."""
    average, _, _ = walked(Pair(tied=False), 10, 25)
    other = Pair(tied=True)
    before = bits(other)
    with pytest.raises(ValueError, match=r"[ab]\.weight"):
        average.copy_to(other)
    assert bits(other) == before


def test_a_copy_into_a_model_with_fewer_ties_leaves_none_of_two_tensors_out():
    average, _, _ = walked(Pair(tied=True), 10, 25)
    other = Pair(tied=False)
    average.copy_to(other)
    assert bits(other.state_dict()) == bits(average.averaged_state_dict())
    other.b = nn.Linear(2, 3)
    before = bits(other)
    with pytest.raises(ValueError, match=r"b\.weight"):
        average.copy_to(other)
    assert bits(other) == before


def test_a_copy_into_a_model_with_its_ties_elsewhere_is_refused_by_name():
    tensors = [torch.ones(2), torch.full((2,), 2.0)]
    average = ParameterAverage(
        dict(zip("abcd", [tensors[i] for i in (0, 0, 1, 1)], strict=True)), 5
    )
    average.update()
    tensors = [torch.zeros(2) for _ in range(3)]
    other = dict(zip("abcd", [tensors[i] for i in (0, 1, 2, 1)], strict=True))
    with pytest.raises(ValueError, match="a and c"):
        average.copy_to(other)
    assert not any(tensor.any() for tensor in tensors)


def test_a_copy_into_a_model_of_another_type_is_rounded_to_it():
    average, _, history = walked(small(), 10, 20)
    other = small(seed=2).to(torch.bfloat16)
    average.copy_to(other)
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    assert_averages(named(other), history.average(average.rule))
    other = small(seed=2).double()
    average.copy_to(other)
    assert {p.dtype for p in other.parameters()} == {torch.float64}
