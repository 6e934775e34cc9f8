"""What river asks of its own statistics, optimizers and models, asked of ours."""

import copy
import inspect
import math
import pickle
import random

import numpy as np
import pytest
import river.api
from river import base, checks, linear_model, optim, preprocessing, stats, utils
from river.checks import common

from tailavg import Exponential
from tailavg.river import TailAverager, TailMean, TailVar
from tests.support.cases import FLOAT

STATISTICS = [cls(**params) for cls in (TailMean, TailVar) for params in cls._unit_test_params()]
OURS = [*STATISTICS, *(TailAverager(**params) for params in TailAverager._unit_test_params())]
of_ours = pytest.mark.parametrize("thing", OURS, ids=repr)

GENERAL = [
    common.check_repr,
    common.check_str,
    common.check_clone_same_class,
    common.check_clone_is_idempotent,
    common.check_init_has_default_params_for_tests,
    common.check_init_default_params_are_not_mutable,
    common.check_doc,
    common.check_clone_changes_memory_addresses,
    common.check_mutate_can_be_idempotent,
    common.check_pickling_supports_roundtrip,
    common.check_repr_roundtrips_clone,
    common.check_clone_with_new_params_applies,
    common.check_get_params_matches_signature,
]


@of_ours
@pytest.mark.parametrize("check", GENERAL, ids=lambda check: check.__name__)
def test_rivers_general_checks(thing, check):
    check(thing.clone())


@of_ours
def test_parameters_can_be_changed_in_place(thing):
    for name in thing._mutable_attributes:
        assert hasattr(thing, name)


def test_a_statistic_is_copied_and_named():
    for stat in STATISTICS:
        for other in (pickle.loads(pickle.dumps(stat)), copy.deepcopy(stat), stat.clone()):
            assert isinstance(other, stats.base.RollingUnivariate)
            assert isinstance(other.name, str)
            assert isinstance(other.window_size, int)
            assert str(other) == str(stat)
            assert other._raw_memory_usage > 0


@pytest.mark.parametrize("kind", [TailMean, TailVar])
def test_the_memory_of_a_statistic_does_not_grow_with_the_stream(kind):
    stat, sizes = kind(0.25), []
    for xs in FLOAT.draw(8192).reshape(8, 1024).tolist():
        for x in xs:
            stat.update(x)
        sizes.append(stat._raw_memory_usage)
    assert max(sizes[1:]) < sizes[0] + 1024


# river has a generated check for each kind of model; these have our optimizer.

MODELS = {
    "linear": linear_model.LinearRegression(TailAverager(optim.SGD(0.01), 0.25)),
    "logistic": linear_model.LogisticRegression(TailAverager(optim.Adam(0.01), 100)),
    "softmax": linear_model.SoftmaxRegression(TailAverager(optim.SGD(0.01), Exponential(0.5))),
    "pipeline": preprocessing.StandardScaler()
    | linear_model.LogisticRegression(TailAverager(optim.SGD(0.01), 0.25)),
}


def model_checks():
    for name, model in MODELS.items():
        for number, check in enumerate(checks.yield_checks(model)):
            if check.__name__ not in model._unit_test_skips():
                yield pytest.param(model, check, id=f"{name}-{check.__name__}-{number}")


@pytest.mark.parametrize(("model", "check"), list(model_checks()))
def test_rivers_checks_of_models_with_our_optimizer(model, check):
    check(model.clone())


# What river asks of an optimizer.


@pytest.mark.parametrize("kind", [utils.VectorDict, lambda w: np.array(list(w.values()))])
def test_a_step_is_the_same_for_dicts_vectors_and_arrays(kind):
    rng = random.Random(0)
    w = {i: rng.uniform(-5, 5) for i in range(10)}
    g = {i: rng.uniform(-5, 5) for i in range(10)}
    other, averager = kind(w), TailAverager(optim.SGD(0.1), 0.25)
    stepped = averager.clone()._step_with_dict(other, kind(g))
    expected = averager._step_with_dict(w, g)
    assert all(math.isclose(stepped[i], value) for i, value in expected.items())


def estimators():
    """Every estimator of river that takes an optimizer."""
    for module in river.api.__all__:
        for name, cls in inspect.getmembers(getattr(river.api, module), inspect.isclass):
            if not issubclass(cls, base.Estimator) or inspect.isabstract(cls):
                continue
            parameters = inspect.signature(cls).parameters
            if names := [name for name in parameters if name.endswith("optimizer")]:
                yield pytest.param(module, cls, names, id=f"{module}.{name}")


@pytest.mark.parametrize(("module", "cls", "names"), list(estimators()))
def test_every_estimator_with_an_optimizer_works_or_is_refused(module, cls, names):
    model, rng = (
        cls(**{name: TailAverager(optim.SGD(0.01), 0.25) for name in names}),
        random.Random(0),
    )

    def learn():
        if module == "reco":
            model.learn_one(rng.choice("ABC"), rng.choice("xyz"), rng.uniform(0, 5))
            return
        x = {f"f{j}": rng.uniform(-1, 1) for j in range(5)}
        y = rng.random() < 0.5 if isinstance(model, base.Classifier) else rng.uniform(-1, 1)
        model.learn_one(x, y) if model._supervised else model.learn_one(x)

    if module in ("linear_model", "anomaly"):
        for _ in range(20):
            learn()
    else:
        with pytest.raises(ValueError, match=r"step: look_ahead\(w\) was not called"):
            learn()
