"""Each extra at work, in a small computation compared with a direct one.

`python smoke.py core cli …` needs those extras and no pytest. `make release` runs it in empty
environments. The last line that it prints is where the package is that it has imported.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import tailavg
from tailavg import ExactWindow, TailAverage, TailAverages

K = 4
XS = np.random.default_rng(0).normal(size=37).cumsum()


def anytime(xs, k=K):
    """The average of an anytime window of three accumulators over the last k, from all samples."""
    blocks = [xs[start : start + k // 2] for start in range(0, len(xs), k // 2)][-3:]
    mean, newer = np.mean(blocks[-1], axis=0), len(blocks[-1])
    for block in blocks[-2::-1]:
        old = len(block)
        size = min(k, old + newer)
        weight = old - math.sqrt(old * newer * (old + newer - size) / size)
        weight = max(0.0, weight / (old + newer))
        mean = weight * np.mean(block, axis=0) + (1 - weight) * mean
        newer += old
    return mean


EACH = np.array([anytime(XS[: t + 1]) for t in range(len(XS))])


def close(found, wanted, tolerance=1e-12):
    np.testing.assert_allclose(np.asarray(found, dtype=float), wanted, tolerance, tolerance)


def command(*arguments, **options):
    """What a command of `tailavg` prints. The script is where Python is."""
    script = Path(sys.executable).with_name("tailavg")
    ran = subprocess.run([script, *arguments], capture_output=True, text=True, **options)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def core_works():
    average = TailAverage(K)
    for x, wanted in zip(XS, EACH, strict=True):
        average.update(x)
        close(average.value(), wanted)
    close(1 / (average.weights() ** 2).sum(), K)
    close(average.profile().effective_size, K)
    close(TailAverage(K).scan(XS), EACH)
    close(TailAverage(ExactWindow(K)).scan(XS)[-1], XS[-K:].mean())
    close(TailAverages(K).scan(["a"] * 37, XS), EACH)

    with TemporaryDirectory() as folder:
        half = TailAverage(K)
        half.update_many(np.outer(XS[:20], [1.0, -1.0]))
        half.save(Path(folder, "half.npz"))
        whole = TailAverage.load(Path(folder, "half.npz"))
    whole.update_many(np.outer(XS[20:], [1.0, -1.0]))
    close(whole.value(), anytime(XS) * np.array([1.0, -1.0]))


def cli_works():
    from safetensors.numpy import load_file, save_file

    assert command("--version").split() == ["tailavg", tailavg.__version__]
    lines = command("stream", "--window", str(K), input="\n".join(map(repr, XS.tolist())))
    close([float(line) for line in lines.split()], EACH, 1e-5)
    chart = command("plot", "-w", "1", input="3\n5\n", env=os.environ | {"PYTHONUTF8": "1"})
    assert "the last 1 5" in chart, chart
    profile = command("profile", "--window", "4", "--count", "37", "--format", "json")
    close([method["effective_size"] for method in json.loads(profile)], K)
    with TemporaryDirectory() as folder:
        for step, x in enumerate(XS[:6]):
            save_file({"x": np.array([x])}, Path(folder, f"{step}.safetensors"))
        files = [f"{step}.safetensors" for step in range(6)]
        command("checkpoints", *files, "--window", "3", "-o", "mean.safetensors", cwd=folder)
        mean = load_file(Path(folder, "mean.safetensors"))["x"]
    close(mean, [XS[3:6].mean()])


def plot_works():
    with TemporaryDirectory() as folder:
        command("profile", "--window", "4", "--count", "37", "--plot", "a.svg", cwd=folder)
        assert Path(folder, "a.svg").stat().st_size > 1000
        numbers = "\n".join(map(repr, XS.tolist()))
        for kind in ("svg", "png", "pdf", "html"):
            command("plot", "--window", "4", "-o", f"b.{kind}", cwd=folder, input=numbers)
            assert Path(folder, f"b.{kind}").stat().st_size > 3000


def tensorboard_works():
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    with TemporaryDirectory() as folder:
        log = EventFileWriter(folder)
        for step, x in enumerate([3.0, 5.0]):
            value = Summary.Value(tag="loss", simple_value=x)
            log.add_event(Event(step=step, summary=Summary(value=[value])))
        log.close()
        chart = command(
            "plot", folder, "-c", "loss", "-w", "1", env=os.environ | {"PYTHONUTF8": "1"}
        )
    assert "the last 1 5" in chart, chart


def fast_works():
    from tailavg.numpy.kernel import installed, kernel

    assert installed()
    xs = np.tile(XS, 300)  # long enough to be compiled
    found = TailAverage(K).scan(xs)
    assert kernel(10**9) is not None  # it was imported, and works
    for t in (0, 3, 37, 5000, len(xs) - 1):
        close(found[t], anytime(xs[: t + 1]))
    keys = np.arange(len(xs)) % 3
    found = TailAverages(K).scan(keys, xs)
    close(found[-1], anytime(xs[keys == keys[-1]]))


def pandas_works():
    import pandas as pd

    from tailavg.pandas import tail_mean

    close(tail_mean(pd.Series(XS), K), EACH)
    frame = pd.DataFrame({"run": list("ab") * 37, "loss": np.repeat(XS, 2)})
    close(tail_mean(frame, K, by="run")["loss"], np.repeat(EACH, 2))


def polars_works():
    import polars as pl

    from tailavg.polars import tail_mean

    close(tail_mean(pl.Series(XS), K), EACH)
    frame = pl.DataFrame({"run": list("ab") * 37, "loss": np.repeat(XS, 2)})
    close(frame.select(tail_mean(pl.col("loss"), K).over("run"))["loss"], np.repeat(EACH, 2))
    close(frame.select(tail_mean(pl.col("loss"), K, by="run"))["loss"], np.repeat(EACH, 2))


def river_works():
    from river import linear_model, optim

    from tailavg.river import TailAverager, TailMean

    mean = TailMean(K)
    for x, wanted in zip(XS, EACH, strict=True):
        mean.update(x)
        close(mean.get(), wanted)
    plain, averaged = (
        linear_model.LinearRegression(optimizer)
        for optimizer in (optim.SGD(0.01), TailAverager(optim.SGD(0.01), K))
    )
    weights = []
    for x in XS:
        plain.learn_one({"x": x}, 2 * x)
        averaged.learn_one({"x": x}, 2 * x)
        weights.append(plain.weights["x"])
    close(averaged.weights["x"], anytime(np.array(weights)))


def spark_works():
    from pyspark.sql import SparkSession

    from tailavg.spark import tail_mean

    os.environ["PYSPARK_PYTHON"] = sys.executable
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", False).getOrCreate()
    rows = [(run, step, float(x)) for step, x in enumerate(XS) for run in "ab"]
    table = spark.createDataFrame(rows, "run string, step long, loss double")
    found = tail_mean(table, "loss", K, by="run", order_by="step").orderBy("step").collect()
    for run in "ab":
        close([row.loss_tail for row in found if row.run == run], EACH)
    spark.stop()


def jax_works():
    import jax
    import jax.numpy as jnp

    from tailavg.jax import tail_average

    average = tail_average(K)
    update, value = jax.jit(average.update), jax.jit(average.value)
    state = average.init({"x": jnp.zeros(2)})
    for x, wanted in zip(XS, EACH, strict=True):
        state = update(state, {"x": jnp.array([x, -x])})
        close(value(state)["x"], [wanted, -wanted], 1e-5)


def optax_works():
    import jax
    import jax.numpy as jnp
    import optax

    from tailavg.optax import averaged_params, with_tail_average

    tx = with_tail_average(optax.adam(0.1), K)
    params = {"x": jnp.array([1.0, -2.0])}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(lambda p: (p["x"] ** 2).sum())(params), state, params)
        return optax.apply_updates(params, updates), state

    seen = []
    for _ in range(11):
        params, state = step(params, state)
        seen.append(params["x"])
        close(averaged_params(state, params)["x"], anytime(np.array(seen)), 1e-5)


def keras_works():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    from tailavg.keras import TailAveraging

    seen = []

    class Weights(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(np.array(self.model.get_weights()[0]))

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = XS[:, None]
    model.fit(x, 2 * x, batch_size=4, epochs=2, verbose=0, callbacks=[TailAveraging(K), Weights()])
    close(model.get_weights()[0], anytime(np.array(seen)), 1e-5)


def torch_works():
    import torch

    from tailavg.torch import AveragedModel, ParameterAverage

    model = torch.nn.Linear(2, 1)
    average, other = ParameterAverage(model, K), AveragedModel(model, K)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    average.attach(optimizer)
    seen = []
    for x in XS:
        model(torch.full((1, 2), x)).square().sum().backward()
        optimizer.step()
        other.update_parameters(model)
        seen.append(model.weight.detach().numpy().copy())
    with average.average_parameters():
        close(model.weight.detach().numpy(), anytime(np.array(seen)), 1e-5)
    close(model.weight.detach().numpy(), seen[-1])
    close(other.module.weight.detach().numpy(), anytime(np.array(seen)), 1e-5)
    with TemporaryDirectory() as folder:
        average.save(Path(folder, "average"))
        again = ParameterAverage(model, K)
        again.load(Path(folder, "average"))
    again.copy_to()
    close(model.weight.detach().numpy(), anytime(np.array(seen)), 1e-5)


def lightning_works():
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from tailavg.lightning import TailAveraging

    class Line(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _):
            return (self.layer(batch) - 2 * batch).square().mean()

        def on_train_batch_end(self, *_):
            self.seen.append(self.layer.weight.detach().numpy().copy())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    model = Line()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[TailAveraging(K)],
        **dict.fromkeys(quiet, False),
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.tensor(XS, dtype=torch.float32)[:, None]))
    close(model.layer.weight.detach().numpy(), anytime(np.array(model.seen)), 1e-5)


def transformers_works():
    import torch
    from transformers import TrainerCallback, TrainingArguments

    from tailavg.transformers import TailAverageTrainer

    class Line(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, x):
            return {"loss": (self.layer(x) - 2 * x).square().mean()}

    seen = []

    class Weights(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            seen.append(model.layer.weight.detach().numpy().copy())

    rows = [{"x": torch.tensor([x], dtype=torch.float32)} for x in XS]
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True
        )
        trainer = TailAverageTrainer(
            Line(), arguments, train_dataset=rows, callbacks=[Weights()], tail_average=K
        )
        trainer.train()
    with trainer.tail_average.average_parameters():
        found = trainer.model.layer.weight.detach().numpy().copy()
    close(found, anytime(np.array(seen)), 1e-5)


if __name__ == "__main__":
    for extra in sys.argv[1:]:
        globals()[f"{extra}_works"]()
    print(tailavg.__file__)
