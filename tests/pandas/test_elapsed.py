"""Windows of time beside pandas' `rolling("10min")`, which keeps the window and is exact."""

import numpy as np
import pandas as pd
import pytest

from tailavg import AnytimeWindow, TailAverage

RUNS, STEPS, PERIOD = 40, 1500, 600.0


def _poisson(rng):
    return np.cumsum(rng.exponential(10, STEPS))


def _bursts(rng):
    starts = np.cumsum(rng.exponential(100, STEPS // 10))
    return np.sort(np.repeat(starts, 10) + rng.exponential(5, STEPS))


@pytest.mark.parametrize("draw", [_poisson, _bursts])
def test_no_bias_against_the_exact_window(draw):
    """The same number of samples and the same mean, up to noise; closer with more accumulators.

    At most 1/z of a period of samples is taken as evenly spaced.
    """
    rng, apart, sizes = np.random.default_rng(0), {3: [], 13: []}, {3: [], 13: []}
    for _ in range(RUNS):
        ts, xs = draw(rng), rng.normal(size=STEPS)
        rolling = pd.Series(xs, index=pd.to_datetime(ts, unit="s")).rolling("10min")
        means, counts = rolling.mean().to_numpy(), rolling.count().to_numpy()
        index = rolling.obj.index.to_numpy()
        for accumulators in apart:
            average, rule = [], AnytimeWindow("10min", accumulators)
            average = TailAverage(rule)
            got = average.scan(xs, index)
            apart[accumulators].append((got - means)[-500:])
            sizes[accumulators].append(average.size / counts[-1])
    for accumulators in apart:
        errors = np.concatenate(apart[accumulators])
        assert abs(errors.mean()) < 0.01  # the noise of a mean of 60 samples is 0.13
        assert abs(np.mean(sizes[accumulators]) - 1) < 0.05
    few, many = (np.concatenate(apart[n]).std() for n in (3, 13))
    assert many < 0.75 * few < 0.075


def test_times_of_pandas():
    index = pd.to_datetime([0.0, 1.5, 700.0], unit="s")
    expected = TailAverage("10min").scan([1.0, 2.0, 4.0], [0.0, 1.5, 700.0])
    for ts in (index, index.tz_localize("UTC"), index.tz_localize("CET").tz_convert("UTC")):
        shift = pd.Timedelta(0) if ts.tz is None else ts[0].tz_localize(None) - index[0]
        for each in (ts, pd.Series(ts), list(ts), ts.as_unit("us")):
            average = TailAverage("10min")
            np.testing.assert_array_equal(average.scan([1.0, 2.0, 4.0], each), expected)
        late = ts[-1] + pd.Timedelta("11min")
        assert np.isnan(average.value(at=late))
        assert shift <= pd.Timedelta(0)
    with pytest.raises(ValueError, match="NaT"):
        average.update(1.0, pd.NaT)
    with pytest.raises(ValueError, match="NaT"):
        average.scan([1.0, 2.0], pd.to_datetime([None, "2024-01-01"]))
