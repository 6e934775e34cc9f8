"""Tail averages in river: statistics of a stream, and the weights that an optimizer produces.

TailMean(0.25)                                      # the mean of the last quarter of a stream
TailVar(0.25)                                       # its variance
TailMean(timedelta(minutes=10))                     # the mean of the last ten minutes
TailAverager(optim.SGD(0.01), 0.25)                 # a model with the average of its last weights
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any, ClassVar, Self

import numpy as np

from tailavg.extras import needs

with needs("river"):
    from river import optim, stats
    from river.utils import VectorDict

from tailavg.core.rules import AnyRule, AnyTail, Rule, is_timed
from tailavg.core.windows import AnyWindow
from tailavg.numpy import TailAverage
from tailavg.numpy.arithmetic import Statistic

__all__ = ["TailAverager", "TailMean", "TailVar"]

_NUMBERS = (int, float, Real, np.bool_)  # the usual ones first, as Real takes long


class _TailStatistic(stats.base.RollingUnivariate):
    """What `TailMean` and `TailVar` share: a `TailAverage`, its samples and its state."""

    _needs_variance: ClassVar[bool]

    def __init__(self, rule: AnyRule) -> None:
        self.rule = rule
        self._average = _average(rule, variance=self._needs_variance)

    def update(self, x: float, t: Any = None) -> None:
        """Take one sample. With a period of time, `t` is its time, as in `TailAverage.update`."""
        self._average.update(x if x.__class__ is float else _number(x), t)

    @property
    def window_size(self) -> int:
        """The number of samples in the window; with a fraction or a period of time, it changes."""
        return math.ceil(self._average.size)

    @property
    def name(self) -> str:
        """A name that stays the same as the window grows: `tailmean_100`, `tailvar_0.25`."""
        fields = re.sub(r"\w+=", "", str(self.rule))
        return "_".join([self.__class__.__name__, *re.findall(r"[\w.]+", fields)]).lower()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, which `TailAverage` reads too."""
        return self._average.state_dict()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], **options: Any) -> Self:
        """Return a statistic that resumes from a state of numbers, of river or a `TailAverage`.

        The options are those of the class, without the rule: `ddof` of a `TailVar`, which needs the
        state of a `TailAverage` with `variance=True`.

        Examples:
            >>> average = TailAverage(100)
            >>> average.update_many(range(1000))
            >>> TailMean.from_state_dict(average.state_dict())
            TailMean: 949.5
        """
        average = TailAverage.from_state_dict(state)
        statistic = cls(average.rule, **options)
        if average.count and not isinstance(value := average.value(), float):
            raise ValueError(
                f"state: expected an average of real numbers, got {type(value).__name__}s of shape "
                f"{np.shape(value)}; load it with TailAverage.from_state_dict"
            )
        if cls._needs_variance and "variances" not in state:
            raise ValueError(
                "state: it was saved without variance=True, so the variance is unknown"
            )
        statistic._average = average
        return statistic

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {"rule": 10}
        yield {"rule": 0.25}


class TailMean(_TailStatistic):
    """The mean of the last samples, or of the last fraction of all samples, in constant memory.

    Use it where river takes a statistic, in place of `utils.Rolling(stats.Mean, k)`, which keeps
    k samples, or of `utils.TimeRolling`. Before the first sample, it is 0 like river's own means.

    Args:
        rule: As in `TailAverage`: `100` is the last hundred samples, `0.25` the last quarter of
            all samples, `Exponential(100)` an exponential mean of the same variance as `100`, and
            `timedelta(minutes=10)` the last ten minutes, for `update(x, t)`.

    Examples:
        >>> mean = TailMean(0.5)
        >>> for x in [1, 2, 3, 4]:
        ...     mean.update(x)
        >>> mean
        TailMean: 3.5

        The mean of the last two temperatures of each place:

        >>> from river import feature_extraction
        >>> agg = feature_extraction.Agg(on="temperature", by="place", how=TailMean(2))
        >>> for temperature in [10, 14, 16]:
        ...     agg.learn_one({"place": "Oslo", "temperature": temperature})
        >>> agg.transform_one({"place": "Oslo"})
        {'temperature_tailmean_2_by_place': 15.0}
    """

    _needs_variance = False

    def get(self) -> float:
        """Return the mean; 0 before the first sample."""
        mean: float = self._average.value() if self._average.count else 0.0
        return mean


class TailVar(_TailStatistic):
    """The variance of the last samples, or of the last fraction of all samples.

    Use it where river takes a statistic, in place of `utils.Rolling(stats.Var, k)`, which keeps k
    samples. Like river's own variance, it is 0 before the second sample.

    Args:
        rule: As in `TailMean`.
        ddof: 1 divides by 1 - Σ α², where α are the weights of the samples, so that the variance is
            unbiased for independent samples; 0 does not. For a window of k samples, this is river's
            divisor k - ddof.

    Examples:
        >>> variance = TailVar(2)
        >>> for x in [1, 3, 3, 7]:
        ...     variance.update(x)
        >>> variance
        TailVar: 8.
    """

    _needs_variance = True

    def __init__(self, rule: AnyRule, ddof: int = 1) -> None:
        Statistic.named("variance", ddof)  # raises unless ddof is 0 or 1
        super().__init__(rule)
        self.ddof = ddof

    def get(self) -> float:
        """Return the variance; 0 while the window has one sample."""
        average = self._average
        if not average.count or average.variance(ddof=0) == 0.0:
            return 0.0
        variance: float = average.variance(ddof=self.ddof)
        return variance

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {"rule": 10}
        yield {"rule": 0.25, "ddof": 0}


class TailAverager(optim.base.Optimizer):
    """An optimizer whose model has the average of the weights over the last steps.

    The model predicts with the averages, and `model.weights` are the averages. Training is the same
    as with `optimizer` alone: gradients and steps use the optimizer's own weights. Before a feature
    is first seen, its weight counts as 0.

    This works with `LinearRegression`, `LogisticRegression`, `SoftmaxRegression` and `OneClassSVM`,
    which call `look_ahead` before each gradient. Other models raise an error, since they have no
    place for a second set of weights. The time of a step is proportional to the number of weights
    so far, since each step changes all averages. The intercept is not averaged, since the model
    updates it without the optimizer: to average it, add a feature that is always 1 and pass
    `intercept_lr=0`.

    Args:
        optimizer: The optimizer that trains. Each model needs a `TailAverager` of its own.
        rule: As in `TailAverage`: `0.25` is the last quarter of the steps so far.

    Examples:
        >>> from river import linear_model, optim
        >>> model = linear_model.LinearRegression(TailAverager(optim.SGD(0.5), 2), intercept_lr=0)
        >>> alone = linear_model.LinearRegression(optim.SGD(0.5), intercept_lr=0)
        >>> for y in [1.0, 3.0, 2.0]:
        ...     model.learn_one({"x": 1.0}, y)
        ...     alone.learn_one({"x": 1.0}, y)
        ...     print(alone.weights, model.weights)
        {'x': 1.0} {'x': 1.0}
        {'x': 3.0} {'x': 2.0}
        {'x': 2.0} {'x': 2.5}
    """

    def __init__(self, optimizer: optim.base.Optimizer, rule: AnyWindow | Rule) -> None:
        if not isinstance(optimizer, optim.base.Optimizer):
            raise TypeError(
                "optimizer: expected an optimizer of river, such as optim.SGD(0.01), got "
                f"{optimizer!r}"
            )
        self.optimizer = optimizer
        self.rule = rule
        self.n_iterations = 0
        self._average = _average(rule)  # of vectors: the weights, then zeros as room for more
        if is_timed(self._average.rule):
            raise TypeError(
                f"rule: {rule!r} is a period of time, but steps have no times; pass a number of "
                "steps or a fraction"
            )
        self._room = 0  # the length of these vectors
        self._iterate: dict[Any, float] = {}  # the weights that the optimizer trains
        self._is_ahead = False  # whether the model has the iterate, for its gradient

    def look_ahead(self, w: Any) -> Any:
        """Put the training weights into the model, which then takes its gradient there."""
        for key, _ in list(_items(w)):
            if key in self._iterate:
                w[key] = self._iterate[key]
        self._is_ahead = True
        return self.optimizer.look_ahead(w)

    def step(self, w: Any, g: Any) -> Any:
        """Make a step from the training weights, and put the averages into the model."""
        if not self._is_ahead and len(w):
            raise ValueError(
                "step: look_ahead(w) was not called, so the gradient was taken at the averages; "
                "use a linear model of river, or call look_ahead(w) before the gradient"
            )
        w = super().step(w, g)
        self._is_ahead = False
        return w

    def _step_with_dict(self, w: Any, g: Any) -> Any:
        self.optimizer.step(w, g)
        # A linear model passes only the features of its sample; other weights did not change.
        unmasked = w.with_mask(None) if isinstance(w, VectorDict) else w
        iterate = self._iterate | dict(_items(w if self._average.count else unmasked))
        values = self._averaged(list(iterate.values()))
        self._iterate = iterate
        if isinstance(w, np.ndarray):
            w[:] = values
        else:
            unmasked.update(dict(zip(iterate, values, strict=True)))
        return w

    def _averaged(self, weights: list[float]) -> list[float]:
        """Take the weights after a step, and return their averages."""
        average, room, size = self._average, self._room, len(weights)
        if size > room:  # double it, so that few new features need more room
            average, room = _widened(average, 2 * size - room), 2 * size
        sample = np.zeros(room)
        try:
            sample[:size] = weights
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"weights: expected a number for each feature, got {weights!r:.80}; average arrays "
                "with TailAverage"
            ) from error
        average.update(sample)
        self._average, self._room = average, room
        values: list[float] = average.value()[:size].tolist()
        return values

    @property
    def learning_rate(self) -> float:
        """Raise: linear models read this to apply `l1`, but would apply it to the averages."""
        raise AttributeError(
            "learning_rate: read averager.optimizer.learning_rate; if a model with l1 reads it, "
            "l1 would change the averages instead of the training weights: use l2, or "
            "optim.FTRLProximal(l1=...)"
        )

    @property
    def _mutable_attributes(self) -> set[str]:
        return {"optimizer"}

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.optimizer!r}, {self.rule!r})"

    @classmethod
    def _unit_test_params(cls) -> Iterator[dict[str, Any]]:
        yield {"optimizer": optim.SGD(), "rule": 0.25}


def _average(rule: AnyRule, variance: bool = False) -> TailAverage:
    if isinstance(rule, AnyTail):
        raise TypeError(
            "rule: AnyTail has no window of its own, and river cannot pass one when it reads; pass "
            "a number, a window or another rule, such as 0.25"
        )
    return TailAverage(rule, variance=variance)


def _number(x: Any) -> float:
    if not isinstance(x, _NUMBERS):
        raise TypeError(f"x: expected a number, got {x!r}; leave such samples out")
    return float(x)


def _items(w: Any) -> Any:
    """Return pairs of names and weights; the names of an array are its indices."""
    return enumerate(w) if isinstance(w, np.ndarray) else w.items()


def _widened(average: TailAverage, more: int) -> TailAverage:
    """Return an average with `more` further elements, which were 0 in all samples."""
    if not average.count:
        return average
    state = average.state_dict()
    state["blocks"] = np.pad(state["blocks"], ((0, 0), (0, more)))
    state["partial"] = np.pad(state["partial"], (0, more))
    return TailAverage.from_state_dict(state)
