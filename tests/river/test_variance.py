"""`TailVar` as a statistic of river, against the definition and river's own `Var`."""

import copy
import pickle

import numpy as np
import pytest
from river import feature_extraction, stats, utils

from tailavg import AnyTail, ExactWindow, Exponential, TailAverage
from tailavg.river import TailMean, TailVar
from tests.support.cases import FLOAT, RULES, assert_close, of_rules
from tests.support.model import variances, weight_matrix


def fed(stat, xs):
    for x in xs:
        stat.update(x)
    return stat


def after_each(stat, xs):
    got = []
    for x in xs:
        stat.update(x)
        got.append(stat.get())
    return got


@of_rules(RULES)
@pytest.mark.parametrize("ddof", [0, 1])
def test_the_variance_after_each_sample(rule, ddof):
    xs = FLOAT.draw(300)
    got = after_each(TailVar(rule, ddof), xs.tolist())
    assert {type(value) for value in got} == {float}
    expected = variances(weight_matrix(rule, 300), xs, ddof)
    assert_close(got, np.nan_to_num(expected), 1e-11)  # 0 for one sample


@pytest.mark.parametrize("ddof", [0, 1])
def test_a_window_is_rivers_rolling_variance(ddof):
    xs = FLOAT.draw(50).tolist()
    for rule, river in (
        (ExactWindow(7), utils.Rolling(stats.Var, window_size=7, ddof=ddof)),
        (1.0, stats.Var(ddof)),
    ):
        assert_close(after_each(TailVar(rule, ddof), xs), after_each(river, xs), 1e-9)


@pytest.mark.parametrize("ddof", [0, 1])
def test_before_the_second_sample_it_is_what_rivers_variance_is(ddof):
    ours, rivers = TailVar(10, ddof), stats.Var(ddof)
    assert ours.get() == rivers.get() == 0.0
    assert fed(ours, [3.0]).get() == fed(rivers, [3.0]).get() == 0.0
    assert repr(ours) == repr(rivers).replace("Var", "TailVar") == "TailVar: 0."


def test_constants_have_no_variance_and_a_nan_is_not_hidden():
    assert fed(TailVar(0.25), [0.1] * 1000).get() == 0.0
    assert np.isnan(fed(TailVar(10), [1.0, float("nan"), 2.0]).get())


@pytest.mark.parametrize("ddof", [-1, 2, 0.5, None, True, "1"])
def test_a_bad_ddof_is_refused(ddof):
    with pytest.raises(ValueError, match=rf"^ddof: expected 0 or 1, got {ddof!r}$"):
        TailVar(10, ddof)


def test_what_tail_mean_refuses():
    with pytest.raises(TypeError, match=r"rule: AnyTail has no window of its own"):
        TailVar(AnyTail())
    variance = fed(TailVar(10), [1, 2])
    with pytest.raises(TypeError, match="x: expected a number, got"):
        variance.update("3")
    assert variance.get() == 0.5


def test_names_and_clones():
    variance = fed(TailVar(Exponential(100), ddof=0), range(5))
    assert variance.name == "tailvar_exponential_fixed_100"
    clone = variance.clone()
    assert (clone.rule, clone.ddof, clone.get()) == (Exponential(100), 0, 0.0)
    assert variance.clone({"ddof": 1}).ddof == 1


COPIES = {
    "pickle": lambda stat: pickle.loads(pickle.dumps(stat)),
    "deepcopy": copy.deepcopy,
    "state": lambda stat: TailVar.from_state_dict(stat.state_dict(), ddof=0),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("cut", [0, 1, 123])
def test_a_copy_goes_on_to_the_bit_and_alone(way, cut):
    xs = FLOAT.draw(300).tolist()
    stat = fed(TailVar(0.25, ddof=0), xs[:cut])
    other = COPIES[way](stat)
    was = other.get()
    fed(stat, xs[cut:])
    assert other.get() == was
    assert fed(other, xs[cut:]).get() == stat.get()


def test_states_of_averages():
    average = fed(TailAverage(10, variance=True), range(20))
    variance = TailVar.from_state_dict(average.state_dict())
    assert variance.get() == average.variance()
    assert TailMean.from_state_dict(variance.state_dict()).get() == average.value()
    with pytest.raises(ValueError, match=r"^state: it was saved without variance=True"):
        TailVar.from_state_dict(fed(TailAverage(10), range(20)).state_dict())


def test_agg_and_links():
    agg = feature_extraction.Agg(on="sales", by="shop", how=stats.Shift(1) | TailVar(2))
    for sales in [1, 3, 7, 9]:
        agg.learn_one({"shop": "Oslo", "sales": sales})
    features = agg.transform_one({"shop": "Oslo"})
    assert features == {"sales_tailvar_2_of_shift_1_by_shop": 8.0}
