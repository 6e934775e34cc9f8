"""The table of docs/choosing.md, tried: which rule works in which adapter."""

from pathlib import Path

import jax.numpy as jnp
import optax
import pandas as pd
import polars as pl
import pytest
import torch

import tailavg.jax
import tailavg.pandas
import tailavg.polars
from tailavg import (
    AnyTail,
    AnytimeWindow,
    ExactWindow,
    Exponential,
    RawTail,
    TailAverage,
    TailAverages,
)
from tailavg.keras import TailAveraging as KerasTailAveraging
from tailavg.lightning import TailAveraging as LightningTailAveraging
from tailavg.optax import with_tail_average
from tailavg.river import TailMean
from tailavg.torch import AveragedModel, ParameterAverage, convert_tail_batchnorm
from tailavg.transformers import TailAverageCallback

PAGE = (Path(__file__).parents[1] / "docs" / "choosing.md").read_text()
RULES = {
    "AnytimeWindow": AnytimeWindow(0.25, 5),
    "Exponential": Exponential(0.25),
    "AnyTail": AnyTail(),
    "ExactWindow": ExactWindow(0.25),
    "RawTail": RawTail(0.25, 100),
}


def options(rule):
    return {"window": 0.3} if isinstance(rule, AnyTail) else {}


def average(rule):
    one = TailAverage(rule)
    one.update(2.0)
    assert one.value(**options(rule)) == 2.0


def averages(rule):
    several = TailAverages(rule)
    several.update("a", 2.0)
    assert several.value("a", **options(rule)) == 2.0


def with_pandas(rule):
    assert tailavg.pandas.tail_mean(pd.Series([2.0]), rule, **options(rule)).item() == 2.0


def with_polars(rule):
    assert tailavg.polars.tail_mean(pl.Series([2.0]), rule, **options(rule)).item() == 2.0


def parameters(rule):
    mean = ParameterAverage(torch.nn.Linear(2, 2), rule)
    mean.update()
    mean.copy_to(**options(rule))


def with_jax(rule):
    mean = tailavg.jax.tail_average(rule)
    state = mean.update(mean.init(jnp.zeros(2)), jnp.full(2, 2.0))
    assert mean.value(state, **options(rule)).tolist() == [2.0, 2.0]


ADAPTERS = {
    "TailAverage, TailAverages": [average, averages],
    "tailavg.pandas, tailavg.polars": [with_pandas, with_polars],
    "tailavg.river": [TailMean],
    "ParameterAverage, Lightning, Hugging Face, Keras": [
        parameters,
        lambda rule: LightningTailAveraging(rule, **options(rule)),
        lambda rule: TailAverageCallback({"rule": rule, **options(rule)}),
        lambda rule: KerasTailAveraging(rule, **options(rule)),
    ],
    "AveragedModel": [lambda rule: AveragedModel(torch.nn.Linear(2, 2), rule)],
    "BatchNorm conversion": [
        lambda rule: convert_tail_batchnorm(torch.nn.Sequential(torch.nn.BatchNorm1d(2)), rule)
    ],
    "tailavg.jax, tailavg.optax": [
        with_jax,
        lambda rule: with_tail_average(optax.sgd(1.0), rule),
    ],
}
ROWS = {
    cells[0].strip(): [cell.strip() for cell in cells[1:]]
    for line in PAGE.partition("## Which rule works where")[2].partition("\n## ")[0].splitlines()
    if len(cells := line.strip("|").split("|")) == 6
}


def test_every_adapter_is_in_the_table():
    assert ROWS[""] == list(RULES)
    assert ADAPTERS.keys() <= ROWS.keys()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_works(adapter, name):
    cell = ROWS[adapter][list(RULES).index(name)]
    rule = 0.25 if cell.startswith("a number") else RULES[name]
    for build in ADAPTERS[adapter]:
        if cell == "no":
            with pytest.raises(TypeError, match="rule: "):
                build(rule)
        else:
            build(rule)
