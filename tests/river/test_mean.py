"""`TailMean` as a statistic of river: its values, its names, and the places where it goes."""

import copy
import datetime as dt
import pickle
from fractions import Fraction

import numpy as np
import pytest
from river import datasets, feature_extraction, linear_model, preprocessing, stats, utils

from tailavg import AnyTail, AnytimeWindow, Exponential, Fixed, Growing, TailAverage
from tailavg.river import TailMean
from tests.support.cases import FLOAT, RULES, assert_close, bits, of_rules
from tests.support.model import averages, weight_matrix


def fed(mean, xs):
    for x in xs:
        mean.update(x)
    return mean


@of_rules(RULES)
def test_the_mean_after_each_sample(rule):
    xs = FLOAT.draw(300)
    mean, got = TailMean(rule), []
    for x in xs.tolist():
        mean.update(x)
        got.append(mean.get())
    assert {type(value) for value in got} == {float}
    assert_close(got, averages(weight_matrix(rule, 300), xs), 1e-12)


@pytest.mark.parametrize("rule", [1, 10, 0.25, 1.0, Fixed(7), Growing(0.5, at_most=20)])
def test_a_rule_is_what_tail_average_takes(rule):
    xs = FLOAT.draw(100).tolist()
    mean = fed(TailMean(rule), xs)
    average = fed(TailAverage(rule), xs)
    assert mean.get() == average.value()


def test_before_the_first_sample_it_is_what_means_of_river_are():
    rolling = utils.Rolling(stats.Mean, window_size=10)
    for mean in [stats.Mean(), stats.EWMean(), rolling, TailMean(10)]:
        assert mean.get() == 0.0
    assert repr(TailMean(10)) == repr(stats.Mean()).replace("Mean", "TailMean")


@pytest.mark.parametrize("rule", [AnytimeWindow(3), Exponential(3)])
def test_every_kind_of_number_counts_as_its_float(rule):
    xs = [True, 2, np.float32(0.5), np.int64(-4), np.bool_(True), Fraction(1, 4), np.float64(8.0)]
    mean = fed(TailMean(rule), xs)
    assert mean.get() == fed(TailMean(rule), map(float, xs)).get()
    assert type(mean.get()) is float


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("x", [None, "3", [1.0], np.array([1.0, 2.0]), np.array(1.0), 1j])
def test_what_is_not_a_number_is_refused_and_changes_nothing(x, before):
    mean = fed(TailMean(10), range(before))
    was = bits(mean)
    with pytest.raises(TypeError, match="x: expected a number, got"):
        mean.update(x)
    assert bits(mean) == was


def test_an_any_tail_is_refused():
    with pytest.raises(TypeError, match=r"rule: AnyTail has no window of its own.*such as 0\.25"):
        TailMean(AnyTail())


@pytest.mark.parametrize("rule", [0, -1, 1.5, "3", None])
def test_a_bad_rule_is_refused_as_by_tail_average(rule):
    message = "^period: expected text" if rule == "3" else "^rule: expected an int"
    with pytest.raises((TypeError, ValueError), match=message) as expected:
        TailAverage(rule)
    with pytest.raises(expected.type) as got:
        TailMean(rule)
    assert str(got.value) == str(expected.value)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (100, "tailmean_100"),
        (0.25, "tailmean_0.25"),
        (np.float64(0.25), "tailmean_0.25"),
        (Fixed(100), "tailmean_fixed_100"),
        (Exponential(100), "tailmean_exponential_fixed_100"),
        (AnytimeWindow(100, 5), "tailmean_anytimewindow_fixed_100_5_balanced"),
    ],
)
def test_the_name_tells_rules_apart_and_stays(rule, name):
    mean = TailMean(rule)
    assert mean.name == name
    assert fed(mean, range(500)).name == name


def test_names_of_all_rules_differ():
    assert len({TailMean(rule).name for rule in RULES}) == len(RULES)


def test_the_size_of_the_window_now():
    assert TailMean(100).window_size == fed(TailMean(100), range(3)).window_size == 100
    growing = TailMean(0.07)
    assert growing.window_size == 1
    assert fed(growing, range(100)).window_size == 7
    assert fed(growing, [1.0]).window_size == 8
    assert type(growing.window_size) is int


def test_text_and_order():
    small, large = fed(TailMean(2), [1000, 1000.5]), fed(TailMean(0.5), [2000])
    assert repr(small) == str(small) == "TailMean: 1,000.25"
    assert large > small
    assert not small > large
    assert large > fed(stats.Mean(), [3])


def test_a_clone_has_the_rule_and_no_samples():
    mean = fed(TailMean(Exponential(10)), range(20))
    clone = mean.clone()
    assert clone.rule == mean.rule == Exponential(10)
    assert clone.get() == 0.0
    assert fed(clone, range(20)).get() == mean.get()
    assert mean.clone({"rule": 0.5}).rule == 0.5
    assert mean.clone(include_attributes=True).get() == mean.get()


COPIES = {
    "pickle": lambda mean: pickle.loads(pickle.dumps(mean)),
    "deepcopy": copy.deepcopy,
    "state": lambda mean: TailMean.from_state_dict(mean.state_dict()),
}


@of_rules(RULES[::3])
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cut", [0, 1, 123])
def test_a_copy_goes_on_to_the_bit_and_alone(rule, way, cut):
    xs = FLOAT.draw(300).tolist()
    mean = fed(TailMean(rule), xs[:cut])
    other = COPIES[way](mean)
    was = bits(other)
    fed(mean, xs[cut:])
    assert bits(other) == was
    assert bits(fed(other, xs[cut:])) == bits(mean)


def test_a_state_moves_to_and_from_tail_average():
    xs = FLOAT.draw(200).tolist()
    average = fed(TailAverage(0.25), xs[:100])
    mean = fed(TailMean.from_state_dict(average.state_dict()), xs[100:])
    assert bits(TailAverage.from_state_dict(mean.state_dict())) == bits(fed(average, xs[100:]))


@pytest.mark.parametrize("sample", [[1.0, 2.0], np.array(1.0), 1j])
def test_a_state_that_is_not_of_real_numbers_is_refused(sample):
    average = TailAverage(10)
    average.update(sample)
    with pytest.raises(ValueError, match="state: expected an average of real numbers, got"):
        TailMean.from_state_dict(average.state_dict())


def test_a_state_of_an_any_tail_is_refused():
    average = fed(TailAverage(AnyTail()), range(100))
    with pytest.raises(TypeError, match="rule: AnyTail has no window of its own"):
        TailMean.from_state_dict(average.state_dict())


# Where river takes a statistic.


def sales(steps):
    rng = np.random.default_rng(0)
    shops = rng.choice(["Ikea", "Lidl", "Muji"], steps)
    return [
        {"shop": str(shop), "sales": value}
        for shop, value in zip(shops, rng.random(steps).tolist(), strict=True)
    ]


def test_agg_keeps_a_mean_for_each_group():
    agg = feature_extraction.Agg(on="sales", by="shop", how=TailMean(0.3))
    seen = {}
    for x in sales(300):
        agg.learn_one(x)
        seen.setdefault(x["shop"], []).append(x["sales"])
        expected = fed(TailMean(0.3), seen[x["shop"]]).get()
        assert agg.transform_one(x) == {"sales_tailmean_0.3_by_shop": expected}
    assert agg.state.to_dict() == {shop: fed(TailMean(0.3), xs).get() for shop, xs in seen.items()}


def test_target_agg_begins_with_a_number():
    agg = feature_extraction.TargetAgg(by="shop", how=TailMean(2))
    assert agg.transform_one({"shop": "Ikea"}) == {"y_tailmean_2_by_shop": 0.0}
    for y in [1, 2, 4]:
        agg.learn_one({"shop": "Ikea"}, y)
    assert agg.transform_one({"shop": "Ikea"}) == {"y_tailmean_2_by_shop": 3.0}


def test_links():
    shifted = stats.Shift(1) | TailMean(2)
    assert shifted.name == "tailmean_2_of_shift_1"
    got = []
    for x in [1, 3, 5, 7]:
        shifted.update(x)
        got.append(shifted.get())
    assert got == [0.0, 1.0, 2.0, 4.0]
    smooth = fed(TailMean(2) | stats.Max(), [1, 9, 2, 3])
    assert smooth.get() == 5.5
    assert copy.deepcopy(shifted).get() == pickle.loads(pickle.dumps(shifted)).get() == 4.0


@pytest.mark.parametrize(
    "rolling",
    [
        lambda: utils.Rolling(TailMean, window_size=3, rule=3),
        lambda: utils.TimeRolling(TailMean, period=dt.timedelta(days=1), rule=3),
    ],
)
def test_it_cannot_be_rolled_since_it_keeps_no_samples(rolling):
    with pytest.raises(ValueError, match="does not satisfy the necessary protocol"):
        rolling()


def pipeline():
    features = preprocessing.StandardScaler()
    features += feature_extraction.TargetAgg(by=None, how=stats.Shift(1) | TailMean(0.25))
    features += feature_extraction.Agg(on="gallup", by=None, how=TailMean(50))
    return features | linear_model.LinearRegression()


def test_a_pipeline_learns_and_can_be_copied():
    model, errors = pipeline(), []
    for x, y in datasets.TrumpApproval().take(300):
        errors.append(abs(model.predict_one(x) - y))
        model.learn_one(x, y)
    assert np.mean(errors[-50:]) < np.mean(errors[:50])
    x, _ = next(iter(datasets.TrumpApproval()))
    expected = model.predict_one(x)
    assert pickle.loads(pickle.dumps(model)).predict_one(x) == expected
    fresh = model.clone()
    for x, y in datasets.TrumpApproval().take(300):
        fresh.learn_one(x, y)
    x, _ = next(iter(datasets.TrumpApproval()))
    assert fresh.predict_one(x) == expected
