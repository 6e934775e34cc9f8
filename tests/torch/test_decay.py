"""ParameterAverage read as a decay or as Freshest: every output against weights of samples."""

import numpy as np
import pytest
import safetensors.torch
import torch

from tailavg import AnyTail, AnytimeWindow, Decay, Freshest, TailAverage
from tailavg.torch import ParameterAverage
from tests.support.torch_models import bits, counted, outputs, tensors_of, walked, wide

DECAYS = [
    Decay(0.2, "cosine"),
    Decay(0.5, "1-sqrt"),
    Decay(1.0, "linear"),
    Decay(300, lambda u: (1 - u) ** 2),
    Freshest(0.3),
]
every_decay = pytest.mark.parametrize("decay", DECAYS, ids=lambda decay: str(decay.window))


@every_decay
@pytest.mark.parametrize("offload", [False, True])
def test_every_output_has_the_weights_of_the_decay(decay, offload, tmp_path):
    tensors, steps = tensors_of(), 600
    place = tmp_path / "place" if offload else None
    average = ParameterAverage(tensors, AnyTail(8), offload=place)
    random, rows, single = np.random.default_rng(0), [], TailAverage(AnyTail(8))
    for _ in range(steps):
        for tensor in tensors.values():
            tensor.copy_(torch.from_numpy(1 + random.random(3)))
        rows.append(wide(tensors["float64"]))
        single.update(rows[-1])
        average.update()
    weights = average.weights(decay)
    assert np.array_equal(weights, single.weights(decay))
    assert average.profile(decay) == single.profile(decay)
    expected, before = weights @ np.array(rows), bits(tensors)

    def check(found):
        np.testing.assert_allclose(wide(found["float64"]), expected, rtol=1e-12)

    with average.average_parameters(decay):
        swapped = bits(tensors)
        check(tensors)
    assert bits(tensors) == before
    state = average.averaged_state_dict(window=decay)
    assert bits(state) == bits(average.full_state_dict(window=decay)) == swapped
    average.save_averaged(tmp_path / "file", window=decay)
    assert bits(safetensors.torch.load_file(tmp_path / "file")) == swapped
    found = average.select_tail(lambda: float(tensors["float64"].sum()), [0.5, decay], max)
    assert found.scores[1] == (decay, pytest.approx(expected.sum(), rel=1e-12))
    other = tensors_of()
    average.copy_to(other, decay)
    assert bits(other) == swapped


def test_a_shape_may_be_selected():
    model = torch.nn.Linear(2, 1)
    average, *_ = walked(model, AnyTail(), 50)
    decays = [Decay(0.3, shape) for shape in ("linear", "cosine", "1-sqrt")]
    found = average.select_tail(lambda: model.weight.sum(), decays)
    assert found.window in decays
    assert found.score == min(score for _, score in found.scores)


@pytest.mark.parametrize("call", outputs(None, None))
def test_what_cannot_be_read_changes_nothing(call, tmp_path):
    weight, average = counted()
    with pytest.raises(ValueError, match=r"expected at least 0\.1 of the samples .* got Decay"):
        outputs(average, tmp_path)[call](Decay(0.05, "cosine"))
    weight, average = counted(AnytimeWindow(10))
    with pytest.raises(ValueError, match=r"has its own window, got"):
        outputs(average, tmp_path)[call](Decay(0.5, "cosine"))
    assert weight.tolist() == [99.0, 99.0]


def test_a_decay_is_no_rule():
    with pytest.raises(
        TypeError, match=r"average with AnyTail\(\), and read the average with value\(Decay"
    ):
        ParameterAverage(torch.nn.Linear(1, 1), Decay(0.2, "cosine"))
