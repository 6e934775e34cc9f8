"""A fraction that looks like the decay of an EMA, in every place that averages weights."""

import pytest
import torch
from torch import nn

from tailavg import Exponential, Growing
from tailavg.torch import AveragedModel, ParameterAverage


def makers():
    model = nn.Linear(2, 2)
    yield "ParameterAverage", lambda *a, **k: ParameterAverage(model, *a, **k)
    yield "AveragedModel", lambda *a, **k: AveragedModel(model, *a, **k)
    jax = pytest.importorskip("tailavg.jax")
    yield "jax", jax.tail_average
    optax = pytest.importorskip("optax")
    ours = pytest.importorskip("tailavg.optax")
    yield "optax", lambda *a, **k: ours.with_tail_average(optax.sgd(0.1), *a, **k)
    yield "Lightning", pytest.importorskip("tailavg.lightning").TailAveraging
    yield "Hugging Face", pytest.importorskip("tailavg.transformers").TailAverageCallback


MAKERS = dict(makers())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(("fraction", "k"), [(0.9, 19), (0.93, 28), (0.999, 1999)])
def test_a_fraction_that_looks_like_a_decay_warns(make, fraction, k):
    with pytest.warns(
        UserWarning, match=rf"not a decay; .* is Exponential\({k}\); pass Growing"
    ) as seen:
        make(fraction)
    assert len(seen) == 1


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("rule", [0.25, 0.89, 1.0, Growing(0.999), Exponential(1999), 1999])
def test_what_cannot_be_meant_as_a_decay_does_not(make, rule):
    make(rule)  # warnings are errors here


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "Hugging Face"])
def test_a_decay_by_name_is_refused(name):
    with pytest.raises(TypeError, match=r"decay: pass a rule instead: .* is Exponential\(1999\)"):
        MAKERS[name](decay=0.999)


def test_the_warning_points_at_the_line_that_made_the_average():
    with pytest.warns(UserWarning, match="not a decay") as seen:
        ParameterAverage({"w": torch.zeros(2)}, 0.99)
    with pytest.warns(UserWarning, match="not a decay") as also_seen:
        AveragedModel(nn.Linear(2, 2), 0.99)
    assert {warning.filename for warning in (*seen, *also_seen)} == {__file__}
