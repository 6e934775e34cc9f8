"""`TailAverager`: the model has Σ α_i w_i of the weights that the optimizer alone would train."""

import copy
import itertools
import pickle
import random

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from river import anomaly, datasets, facto, linear_model, optim, preprocessing, reco, utils

from tailavg import AnyTail, AnytimeWindow, Exponential
from tailavg.river import TailAverager
from tests.support.cases import RULES, of_rules, rules
from tests.support.model import weight_matrix

STEPS = 150

OPTIMIZERS = [
    optim.SGD(0.05),
    optim.SGD(optim.schedulers.InverseScaling(0.1)),
    optim.Momentum(0.02),
    optim.NesterovMomentum(0.02),
    optim.AdaBound(0.02),
    optim.AdaDelta(),
    optim.AdaGrad(0.1),
    optim.AdaMax(0.05),
    optim.Adam(0.05),
    optim.AMSGrad(0.05),
    optim.FTRLProximal(l1=0.01),
    optim.Nadam(0.05),
    optim.RMSProp(0.02),
]
of_optimizers = pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=[f"{n}-{type(o).__name__}" for n, o in enumerate(OPTIMIZERS)]
)


def scaled(dataset, steps=STEPS):
    scaler = preprocessing.StandardScaler()
    for x, y in itertools.islice(dataset, steps):
        scaler.learn_one(x)
        yield scaler.transform_one(x), y


def changing(dataset, steps=STEPS, seed=0):
    """Samples of some features each; new ones come until the last."""
    rng = random.Random(seed)
    for step, (x, y) in enumerate(scaled(dataset, steps)):
        named = {f"{name} {part}": value for name, value in x.items() for part in range(4)}
        there = list(named)[: 1 + len(named) * step // steps]
        yield {name: named[name] for name in rng.sample(there, rng.randint(0, len(there)))}, y


def learned(model, samples):
    """The weights after each step."""
    for x, y in samples:
        model.learn_one(x, y)
        yield dict(model.weights)


def expected(rule, iterates):
    """The averages after each step: a weight that is not there yet is 0."""
    iterates = list(iterates)
    names = list(iterates[-1])
    dense = np.array([[weights.get(name, 0.0) for name in names] for weights in iterates])
    rows = weight_matrix(rule, len(iterates)) @ dense
    for weights, row in zip(iterates, rows, strict=True):
        yield {name: value for name, value in zip(names, row, strict=True) if name in weights}


def assert_averages(model, alone, rule, samples):
    samples = list(samples)
    wanted = list(expected(rule, learned(alone, samples)))
    for got, want in zip(learned(model, samples), wanted, strict=True):
        assert got.keys() == want.keys()
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert model.intercept == alone.intercept  # which tells where gradients were taken, to the bit
    assert model.optimizer.n_iterations == alone.optimizer.n_iterations == len(samples)


@of_rules(RULES)
def test_a_linear_regression_has_the_averages(rule):
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.05), rule))
    alone = linear_model.LinearRegression(optim.SGD(0.05))
    assert_averages(model, alone, rule, scaled(datasets.TrumpApproval()))


@of_optimizers
def test_every_optimizer_trains_as_if_alone(optimizer):
    model = linear_model.LogisticRegression(TailAverager(optimizer.clone(), 0.25), l2=0.01)
    alone = linear_model.LogisticRegression(optimizer.clone(), l2=0.01)
    assert_averages(model, alone, AnytimeWindow(0.25), scaled(datasets.Phishing()))


@of_optimizers
def test_features_that_come_and_go(optimizer):
    model = linear_model.LogisticRegression(TailAverager(optimizer.clone(), 20))
    alone = linear_model.LogisticRegression(optimizer.clone())
    assert_averages(model, alone, AnytimeWindow(20), changing(datasets.Phishing()))


@given(rule=rules, seed=st.integers(0, 1000))
def test_features_that_come_and_go_under_any_rule(rule, seed):
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.01), rule))
    alone = linear_model.LinearRegression(optim.SGD(0.01))
    assert_averages(model, alone, rule, changing(datasets.TrumpApproval(), 60, seed))


def test_weights_that_do_not_begin_at_zero():
    def start():
        return optim.initializers.Normal(sigma=1.0, seed=3)

    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.05), 0.5), initializer=start())
    alone = linear_model.LinearRegression(optim.SGD(0.05), initializer=start())
    samples = scaled(datasets.TrumpApproval())
    assert_averages(model, alone, AnytimeWindow(0.5), samples)


def test_predictions_are_those_of_the_averages():
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.05), 0.25))
    for x, y in scaled(datasets.TrumpApproval()):
        model.learn_one(x, y)
        dot = sum(model.weights[name] * value for name, value in x.items())
        assert model.predict_one(x) == pytest.approx(dot + model.intercept, rel=1e-12)


def test_mini_batches_are_one_step_each():
    model = linear_model.LinearRegression(TailAverager(optim.Adam(0.05), 5))
    alone = linear_model.LinearRegression(optim.Adam(0.05))
    samples, iterates, got = list(scaled(datasets.TrumpApproval())), [], []
    for start in range(0, STEPS, 10):
        xs, ys = zip(*samples[start : start + 10], strict=True)
        frame = pd.DataFrame(xs).iloc[:, : 2 + start // 30]
        for learner, weights in ((alone, iterates), (model, got)):
            learner.learn_many(frame, pd.Series(ys))
            weights.append(dict(learner.weights))
    for averages, want in zip(got, expected(AnytimeWindow(5), iterates), strict=True):
        assert averages == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert model.intercept == alone.intercept


@pytest.mark.parametrize("optimizer", [optim.SGD(0.05), optim.NesterovMomentum(0.02)])
def test_softmax_averages_each_label_from_its_first_step(optimizer):
    rule = Exponential(0.3)
    model = linear_model.SoftmaxRegression(TailAverager(optimizer.clone(), rule))
    alone = linear_model.SoftmaxRegression(optimizer.clone())
    samples = list(scaled(datasets.ImageSegments(), 60))
    iterates, got = {}, {}
    for x, y in samples:
        for learner, found in ((alone, iterates), (model, got)):
            learner.learn_one(x, y)
            for label, weights in learner.weights.items():
                found.setdefault(label, []).append(dict(weights))
    assert len(got) > 3
    for label, found in got.items():
        for averages, want in zip(found, expected(rule, iterates[label]), strict=True):
            assert averages == pytest.approx(want, rel=1e-9, abs=1e-12)


def test_a_one_class_svm_has_the_averages():
    class Unsupervised(anomaly.OneClassSVM):
        def learn_one(self, x, y):
            super().learn_one(x)

    model = Unsupervised(optimizer=TailAverager(optim.SGD(0.01), 0.25))
    alone = Unsupervised(optimizer=optim.SGD(0.01))
    assert_averages(model, alone, AnytimeWindow(0.25), scaled(datasets.Phishing()))


# Weights that a user steps by hand.


def as_dict():
    return {0: 1.0, 1: -2.0, 2: 0.5}


def as_array():
    return np.array(list(as_dict().values()))


def as_vector():
    return utils.VectorDict(as_dict())


@pytest.mark.parametrize("make", [as_dict, as_array, as_vector])
@pytest.mark.parametrize("optimizer", [optim.SGD(0.3), optim.NesterovMomentum(0.1)])
def test_dicts_arrays_and_vectors_are_changed_in_place(make, optimizer):
    averager, alone = TailAverager(optimizer.clone(), 4), optimizer.clone()
    w, v, iterates = make(), make(), []
    for step in range(20):
        for trainer, weights in ((averager, w), (alone, v)):
            trainer.look_ahead(weights)
            g = {i: weights[i] - np.sin(step + i) for i in range(3)}
            g = utils.VectorDict(g) if make is as_vector else g
            assert trainer.step(weights, g) is weights
        iterates.append([v[i] for i in range(3)])
        want = weight_matrix(AnytimeWindow(4), step + 1)[step] @ np.array(iterates)
        assert [w[i] for i in range(3)] == pytest.approx(list(want), rel=1e-12)


def test_weights_of_a_model_that_was_trained_before_are_part_of_the_first_iterate():
    alone = linear_model.LinearRegression(optim.SGD(0.1))
    alone.learn_one({"a": 1.0, "b": 1.0}, 1.0)
    model = copy.deepcopy(alone)
    model.mutate({"optimizer": TailAverager(optim.SGD(0.1), 0.5)})
    samples = [({"a": 1.0}, 1.0)] * 10 + [({"a": 1.0, "b": 2.0}, 3.0)] * 5
    wanted = expected(AnytimeWindow(0.5), learned(alone, samples))
    for got, want in zip(learned(model, samples), wanted, strict=True):
        assert got == pytest.approx(want, rel=1e-12)


def test_a_sample_without_features_is_a_step():
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.5), 2), intercept_lr=0)
    for x in [{}, {"a": 1.0}, {}]:
        model.learn_one(x, 1.0)
    assert model.weights == {"a": 1.0}
    assert model.optimizer.n_iterations == 3


# Copies.

COPIES = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cut", [0, 1, 70])
@of_rules(RULES[::4])
def test_a_copy_goes_on_to_the_bit_and_alone(rule, way, cut):
    samples = list(changing(datasets.Phishing()))
    model = linear_model.LogisticRegression(TailAverager(optim.Adam(0.05), rule))
    for x, y in samples[:cut]:
        model.learn_one(x, y)
    other = COPIES[way](model)
    was = dict(other.weights)
    rest = list(learned(model, samples[cut:]))
    assert other.weights == was
    assert list(learned(other, samples[cut:])) == rest


def test_a_clone_begins_anew():
    samples = list(scaled(datasets.Phishing()))
    model = linear_model.LogisticRegression(TailAverager(optim.SGD(0.05), Exponential(10)))
    found = list(learned(model, samples))
    clone = model.clone()
    assert clone.weights == {}
    assert clone.optimizer.rule == Exponential(10)
    assert clone.optimizer.optimizer is not model.optimizer.optimizer
    assert list(learned(clone, samples)) == found


def test_the_learning_rate_can_be_changed_on_the_way():
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.5), 1), intercept_lr=0)
    model.learn_one({"a": 1.0}, 1.0)
    model.mutate({"optimizer": {"optimizer": {"lr": optim.schedulers.Constant(0.0)}}})
    model.learn_one({"a": 1.0}, 5.0)
    assert model.weights == {"a": 1.0}


def test_text():
    averager = TailAverager(optim.FTRLProximal(), 0.25)
    assert repr(averager).startswith("TailAverager(FTRLProximal(")
    assert repr(averager).endswith(", 0.25)")
    model = linear_model.LinearRegression(averager)
    assert "optimizer=TailAverager" in repr(model).replace(" ", "").replace("\n", "")


# What is refused.


def rated(model):
    model.learn_one("Alice", "Superman", 8.0)


def featured(model):
    model.learn_one({"a": 1.0, "b": 2.0}, 1.0)


@pytest.mark.parametrize(
    ("model", "learn"),
    [
        (lambda o: facto.FMRegressor(weight_optimizer=o, seed=1), featured),
        (lambda o: facto.FMRegressor(latent_optimizer=o, seed=1), featured),
        (lambda o: facto.HOFMRegressor(weight_optimizer=o, seed=1), featured),
        (lambda o: reco.Baseline(optimizer=o), rated),
        (lambda o: reco.FunkMF(optimizer=o, seed=1), rated),
        (lambda o: reco.BiasedMF(bias_optimizer=o, seed=1), rated),
    ],
)
def test_models_that_take_gradients_where_they_predict_are_refused_at_once(model, learn):
    model = model(TailAverager(optim.SGD(0.01), 0.25))
    with pytest.raises(ValueError, match=r"step: look_ahead.*linear model of river"):
        learn(model)


def test_a_step_that_is_refused_changes_nothing():
    averager, w = TailAverager(optim.SGD(0.5), 2), {"a": 1.0}
    averager.look_ahead(w)
    averager.step(w, {"a": 1.0})
    was = pickle.dumps(averager)
    with pytest.raises(ValueError, match=r"step: look_ahead\(w\) was not called"):
        averager.step(w, {"a": 1.0})
    assert w == {"a": 0.5}
    assert pickle.dumps(averager) == was


def test_l1_of_a_model_is_refused():
    model = linear_model.LinearRegression(TailAverager(optim.SGD(0.1), 0.25), l1=0.1)
    with pytest.raises(AttributeError, match=r"l1 would change the averages.*FTRLProximal"):
        model.learn_one({"a": 1.0}, 1.0)


def test_weights_that_are_arrays_are_refused():
    averager, w = TailAverager(optim.SGD(0.1), 0.25), {"a": np.ones(3)}
    averager.look_ahead(w)
    with pytest.raises(TypeError, match="weights: expected a number for each feature, got"):
        averager.step(w, {"a": np.ones(3)})


def test_what_is_no_optimizer_and_what_has_no_window_is_refused():
    with pytest.raises(TypeError, match=r"optimizer: expected an optimizer of river.*got 0.25"):
        TailAverager(0.25, optim.SGD())
    with pytest.raises(TypeError, match="rule: AnyTail has no window of its own"):
        TailAverager(optim.SGD(), AnyTail())


def test_a_sample_that_fails_is_no_step():
    samples = list(scaled(datasets.TrumpApproval()))
    model = linear_model.LinearRegression(TailAverager(optim.NesterovMomentum(0.01), 0.25))
    other = model.clone()
    for step, (x, y) in enumerate(samples):
        if step % 10 == 5:
            with pytest.raises(TypeError):
                model.learn_one(x, "much")
        model.learn_one(x, y)
        other.learn_one(x, y)
        assert model.weights == other.weights
