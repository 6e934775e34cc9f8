"""A client of the public API: what each call returns, for mypy and pyright. It is not run.

Some lines are wrong. Both checkers say so, or complain of an ignore that is not needed.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, assert_type

import jax
import keras
import numpy as np
import numpy.typing as npt
import optax
import pandas as pd
import polars as pl
import torch
from lightning.pytorch import Callback
from pyspark.sql import DataFrame, SparkSession
from river import optim
from transformers import Trainer

import tailavg.jax
import tailavg.keras
import tailavg.lightning
import tailavg.optax
import tailavg.pandas
import tailavg.polars
import tailavg.river
import tailavg.spark
import tailavg.torch
import tailavg.transformers
from tailavg import (
    AnyTail,
    AnytimeWindow,
    Decay,
    ExactWindow,
    Exponential,
    Freshest,
    Growing,
    Profile,
    RawTail,
    TailAverage,
    TailAverages,
)
from tailavg.checkpoints import average_checkpoints
from tailavg.core.readings import Reading

Reals = npt.NDArray[np.float64]


def core(path: Path) -> None:
    average = TailAverage(0.25, dtype=np.float32, nan_policy="omit")
    average.update(1.0)
    average.update_many(np.ones(3))
    assert_type(average.value(), Any)  # a float or an array, as the samples are
    assert_type(average.scan([1.0, 2.0]), npt.NDArray[Any])
    assert_type(average.count, int)
    assert_type(average.size, float)
    assert_type(average.weights(), Reals)
    assert_type(average.profile(), Profile)
    assert_type(average.profile().effective_size, float)
    assert_type(average.profile().oldest_age, int)
    assert_type(average.state_dict(), dict[str, Any])
    assert_type(average.copy(), TailAverage)
    average.save(path)
    assert_type(TailAverage.load(path), TailAverage)
    assert_type(TailAverage.from_state_dict(average.state_dict()), TailAverage)

    TailAverage(AnytimeWindow(Growing(0.25, at_most=1000), accumulators=5))
    TailAverage(Exponential(100))
    TailAverage(Exponential.from_decay(0.999))
    TailAverage(ExactWindow(3))
    TailAverage(RawTail(0.25, total=100))
    any_tail = TailAverage(AnyTail(8, shortest=0.2))
    any_tail.value(Decay(0.2, "cosine"))
    any_tail.value(Freshest(0.2))
    any_tail.scan([1.0], [0.25, 100])

    TailAverage([3])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    TailAverage(3, nan_policy="skip")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    average.count = 3  # type: ignore[misc] # pyright: ignore[reportAttributeAccessIssue]
    Decay(0.2, "cubic")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def keyed(path: Path) -> None:
    averages = TailAverages(0.25)
    averages.update("a", 1.0)
    averages.update_many(["a", "b"], [1.0, 2.0])
    assert_type(averages.value("a"), float)
    assert_type(averages["a"], TailAverage)
    assert_type(averages.scan(["a"], [1.0]), npt.NDArray[Any])
    assert_type(TailAverages.load(path), TailAverages)
    averages.value(["a"])  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def with_torch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    average = tailavg.torch.ParameterAverage(model, AnyTail(), offload="cpu", update_every=2)
    average.attach(optimizer).remove()
    average.update()
    with average.average_parameters(0.5) as nothing:
        assert_type(nothing, None)
    found = average.select_tail(lambda: 1.0)
    assert_type(found, tailavg.torch.Selection)
    assert_type(found.score, float)
    assert_type(found.window, Reading)
    assert_type(average.averaged_state_dict(), dict[str, Any])
    assert_type(average.variance(0.5, ddof=0), dict[str, torch.Tensor])
    with average.sample_parameters(0.5, torch.Generator(), window=0.5) as nothing:
        assert_type(nothing, None)
    assert_type(average.state_dict(), dict[str, Any])
    assert_type(average.to("cpu"), tailavg.torch.ParameterAverage)
    average.save(path)
    average.load(path)
    tailavg.torch.ParameterAverage(dict(model.named_parameters()), 100)
    tailavg.torch.ParameterAverage(model)  # type: ignore[call-arg] # pyright: ignore[reportCallIssue]
    tailavg.torch.ParameterAverage(model, 3, buffers="all")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    averaged = tailavg.torch.AveragedModel(model, 0.25)
    averaged.update_parameters(model)
    assert_type(averaged.profile(), Profile)
    assert_type(averaged.count, int)
    assert_type(tailavg.torch.convert_tail_batchnorm(model, 0.25), torch.nn.Module)
    tailavg.torch.recompute_batchnorm(model, [torch.ones(2)])


def with_jax(params: dict[str, jax.Array]) -> None:
    average = tailavg.jax.tail_average(0.25)
    state = average.init(params)
    assert_type(state, tailavg.jax.TreeState)
    assert_type(average.update(state, params), tailavg.jax.TreeState)
    assert_type(average.value(state, like=params), dict[str, jax.Array])
    assert_type(tailavg.jax.value(state, params), dict[str, jax.Array])
    assert_type(average.value(state), Any)  # a tree
    assert_type(average.count(state), jax.Array)
    assert_type(average.profile(state), Profile)
    average.update(params, state)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]

    tx = tailavg.optax.with_tail_average(optax.adam(1e-3), 0.25)
    assert_type(tx, optax.GradientTransformationExtraArgs)
    opt_state = tx.init(params)
    assert_type(tailavg.optax.averaged_params(opt_state, params), dict[str, jax.Array])
    assert_type(tailavg.optax.averaged_params(opt_state), Any)
    tailavg.optax.tail_average(0.25, offload="disk")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def with_trainers(model: torch.nn.Module) -> list[object]:
    callback: Callback = tailavg.lightning.TailAveraging(0.25, update_every=2)
    assert_type(tailavg.lightning.TailAveraging(0.25).average, tailavg.torch.ParameterAverage)
    trainer = tailavg.transformers.TailAverageTrainer(model, tail_average=0.25)
    assert_type(trainer.tail_average, tailavg.torch.ParameterAverage | None)
    hugging_face: Trainer = trainer
    tailavg.transformers.TailAverageCallback({"rule": 0.25, "update_every": 2})
    tail = tailavg.keras.TailAveraging(AnyTail(), Decay(0.2, "linear"), offload="cpu")
    keras_callback: keras.callbacks.Callback = tail
    assert_type(tail.count, int)
    assert_type(tail.weights(), Reals)
    assert_type(tail.profile(), Profile)
    return [callback, hugging_face, keras_callback]


def with_frames(series: pl.Series, frame: pl.DataFrame, table: DataFrame, s: SparkSession) -> None:
    assert_type(tailavg.polars.tail_mean(series, 0.25), pl.Series)
    assert_type(tailavg.polars.tail_mean(frame, 0.25, by="run"), pl.DataFrame)
    assert_type(tailavg.polars.tail_mean(pl.col("loss"), rule=0.25), pl.Expr)
    assert_type(tailavg.polars.tail_mean(series, AnyTail(), window=0.25), pl.Series)
    assert_type(tailavg.polars.tail_std(series, 0.25, ddof=0), pl.Series)
    assert_type(tailavg.polars.tail_var(pl.col("loss"), 0.25, by="run"), pl.Expr)
    assert_type(tailavg.polars.tail_mean(pl.col("loss"), "10min", on="time"), pl.Expr)
    tailavg.polars.tail_mean([1.0], 0.25)  # type: ignore[type-var] # pyright: ignore[reportArgumentType]
    assert_type(tailavg.spark.tail_mean(table, "loss", [0.1, 0.25], by="run"), DataFrame)
    assert_type(tailavg.spark.saved_states(s, "checkpoint"), DataFrame)
    tailavg.spark.tail_mean(table, "loss", 3, late="later")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]


def with_pandas(series: pd.Series, frame: pd.DataFrame, state: TailAverages) -> None:
    assert_type(tailavg.pandas.tail_mean(series, 0.25, state=state), pd.Series)
    assert_type(tailavg.pandas.tail_mean(frame, rule=0.25, by="run"), pd.DataFrame)
    assert_type(tailavg.pandas.tail_mean(frame, AnyTail(), window=0.25), pd.DataFrame)
    assert_type(tailavg.pandas.tail_std(series, 0.25, ddof=0), pd.Series)
    assert_type(tailavg.pandas.tail_var(frame, rule=0.25, by="run"), pd.DataFrame)
    assert_type(tailavg.pandas.tail_mean(series, timedelta(minutes=10)), pd.Series)
    assert_type(tailavg.pandas.tail_std(frame, "10min", on="time", by="run"), pd.DataFrame)
    tailavg.pandas.tail_mean(series, by="run")  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]


def with_river() -> None:
    mean = tailavg.river.TailMean(rule=0.25)
    mean.update(1.0)
    assert_type(mean.get(), float)
    assert_type(mean.window_size, int)
    tailavg.river.TailAverager(optim.SGD(0.01), 100)


def with_checkpoints(paths: list[Path], progress: Callable[[int, int], None]) -> None:
    used = average_checkpoints(paths, {Path("out"): AnytimeWindow(0.25)}, progress, dtype="float32")
    assert_type(used, list[list[Path]])
    assert_type(average_checkpoints(["a.pt", "b.pt"], {"out.pt": 0.25}), list[list[Path]])
    assert_type(average_checkpoints(paths, 0.25), dict[str, Any])
    assert_type(average_checkpoints(paths, [0.5, 0.5], dtype="float32"), dict[str, Any])
    assert_type(average_checkpoints(paths, window=0.25, lazy=True), Iterator[tuple[str, Any]])
    average_checkpoints(paths, 0.25, rule=3)  # type: ignore[call-overload] # pyright: ignore[reportCallIssue]
