"""Modes and devices: inference, defaults set elsewhere, accumulators' own place."""

import torch

from tailavg.torch import ParameterAverage
from tests.support.torch_models import (
    Walk,
    assert_averages,
    batches,
    bits,
    flat_tensors,
    named,
    saved,
    small,
    snapshot,
    walked,
)


def test_any_call_may_be_made_in_inference_mode():
    model, reference = small(), small()
    with torch.inference_mode():
        average = ParameterAverage(model, 10)
        average.update()
        for _ in batches(model, 2):
            pass
    expected = ParameterAverage(reference, 10)
    expected.update()
    list(batches(reference, 2))
    for turn in range(40):
        for net, one, mode in ((model, average, True), (reference, expected, False)):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(0.1 * turn)
            with torch.inference_mode(mode and turn % 2 == 0):
                one.update()
                with one.average_parameters():
                    net.eval()(torch.ones(2, 3))
                    net.train()
                one.store()
                one.copy_to()
                one.restore()
                got = one.averaged_state_dict()
                one.load_state_dict(saved(one.state_dict()))
                one.to("cpu")
        assert not any(p.is_inference() for p in model.parameters())
        model(torch.rand(6, 3)).sum().backward()
        reference(torch.rand(6, 3)).sum().backward()
    assert snapshot(average.state_dict()) == snapshot(expected.state_dict())
    assert bits(named(model)) == bits(named(reference))
    assert got.keys() == model.state_dict().keys()


def test_defaults_that_are_set_elsewhere_do_not_matter():
    model = small()
    expected, _, _ = walked(small(), 10, 30)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu"), torch.enable_grad():
            average = ParameterAverage(model, 10)
            walk = Walk(model)
            for _ in range(30):
                with torch.device("cpu"):
                    walk.step()
                average.update()
            got = average.averaged_state_dict()
            with average.average_parameters():
                inside = bits(named(model))
            average.load_state_dict(average.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(x.device.type == "cpu" and not x.requires_grad for x in got.values())
    reference = expected.averaged_state_dict()
    assert bits({n: got[n] for n in named(model)}) == bits({n: reference[n] for n in named(model)})
    assert inside.items() <= bits(got).items()


def test_an_average_leaves_random_numbers_and_gradients_alone():
    model = small()
    model(torch.rand(6, 3)).sum().backward()
    grads = {name: p.grad.clone() for name, p in named(model).items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    average = ParameterAverage(model, 3)
    for _ in range(300):
        average.update()
    with average.average_parameters():
        pass
    average.averaged_state_dict()
    average.load_state_dict(saved(average.state_dict()))
    assert torch.equal(torch.get_rng_state(), before)
    assert bits({name: p.grad for name, p in named(model).items()}) == bits(grads)
    assert not any(x.requires_grad for x in flat_tensors(average.state_dict()))


def test_accumulators_may_be_kept_on_a_device_of_their_own():
    model = small()
    average, walk, history = walked(model, 10, 15, device="cpu")
    assert average.to("cpu") is average or average.to("cpu") is None
    average.to(torch.device("cpu"))
    for _ in range(15):
        walk.step()
        average.update()
        history.record()
    assert_averages(average.averaged_state_dict(), history.average(average.rule))
    assert {x.device.type for x in flat_tensors(average.state_dict())} == {"cpu"}


def test_an_average_updates_next_to_a_graph_that_is_not_yet_walked_back():
    """Forward, update, backward: an update only reads the weights."""
    model = small(norm=False)
    average = ParameterAverage(model, 10)
    loss = model(torch.rand(6, 3)).square().mean()
    average.update()
    average.averaged_state_dict()
    loss.backward()
