"""docs/from-ema.md: its programs run, before and after; windows are those of the real classes."""

import math
import re
import warnings

import jax.numpy as jnp
import keras
import lightning
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn

from tailavg import Exponential, Growing, TailAverage
from tests.support.paths import DOCS
from tests.support.programs import blocks, example, run

PROGRAMS = {}  # by section: before and after
for found in blocks("from-ema.md"):
    if found.options.startswith("title="):
        for heading in re.findall(r"^### (.*)$", found.before, re.MULTILINE):
            name = heading
        PROGRAMS.setdefault(name, {})[found.options] = found.text

TORCH = ("torch, EMA", "torch, SWA", "ema-pytorch", "ema-pytorch, post hoc", "torch-ema", "timm",
         "diffusers")  # fmt: skip
WHEN = ("before", "after")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A folder and random numbers of its own; what warns are the packages of others."""
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def program(section, when, **names):
    """Run a program of the page, and return its names."""
    where = f"from-ema.md, {section}, {when}"
    try:
        run(PROGRAMS[section][f'title="{when}"'], names, where)
    except ModuleNotFoundError as error:
        if when == "after" or section not in ("timm", "diffusers"):  # these come with `bench`
            raise
        pytest.skip(str(error))
    return names


def test_every_section_has_both():
    assert list(PROGRAMS) == [*TORCH, "Lightning", "Keras", "optax", "flax"]
    assert all(len(both) == 2 for both in PROGRAMS.values())


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("section", TORCH)
def test_torch(section, when):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    validated = []

    def train_step(batch):
        optimizer.zero_grad()
        (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()

    def validate(tested):
        tested = getattr(tested, "ema_model", tested)
        validated.append([weight.detach().clone() for weight in tested.parameters()])

    names = program(
        section, when, model=model, optimizer=optimizer, validate=validate, train_step=train_step,
        loader=[torch.randn(8, 3) for _ in range(200)],
    )  # fmt: skip
    ((*averaged,),) = validated
    assert not torch.equal(averaged[0], model[0].weight)
    if when == "after":
        average = names.get("average") or names.get("averaged") or names["ema"]
        count = int(getattr(average, "count", 0) or average.n_averaged)
        assert count == (10 if section == "ema-pytorch" else 200)


class Module(lightning.LightningModule):
    def __init__(self, size=3):
        super().__init__()
        self.layer = nn.Linear(size, 1)

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("when", WHEN)
def test_lightning(when):
    loader = torch.utils.data.DataLoader(torch.randn(64, 3), batch_size=8)
    names = program("Lightning", when, module=Module(), loader=loader)
    if when == "after":
        assert names["averaging"].average.count == 16


@pytest.mark.parametrize("when", WHEN)
def test_keras(when):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    x = np.ones((64, 3), "float32")
    model_fit = model.fit
    given = []

    def fit(*args, callbacks):
        given.extend(callbacks)
        return model_fit(*args, callbacks=callbacks, verbose=0, batch_size=4)

    model.fit = fit
    program("Keras", when, keras=keras, model=model, x=x, y=x[:, :1])
    if when == "after":
        assert given[0].count == 16


@pytest.mark.parametrize("when", WHEN)
def test_optax(when):
    validated, names = [], {}

    def step(params, opt_state, batch):
        updates, opt_state = names["tx"].update(params - batch, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    tx, params = optax.sgd(0.5), jnp.zeros(2)
    names |= {"tx": tx, "params": params, "opt_state": tx.init(params), "optax": optax}
    names |= {"step": step, "validate": validated.append}
    names["loader"] = [jnp.full(2, float(i)) for i in range(100)]
    run(PROGRAMS["optax"][f'title="{when}"'], names, "from-ema.md, optax")
    (averaged,) = validated
    if when == "after":  # the iterates lag by one; their last quarter by half of that, too
        assert averaged[0] == pytest.approx(98 - 12, abs=1.5)


@pytest.mark.parametrize("when", WHEN)
def test_flax(when):
    validated = []
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    program(
        "flax", when, model=model, tx=optax.sgd(0.01), validate=validated.append,
        grads=nnx.grad(lambda model, batch: (model(batch) ** 2).mean()),
        loader=[jnp.ones((1, 2))] * 20,
    )  # fmt: skip
    assert not jnp.array_equal(validated[0].kernel[...], model.kernel[...])


# Windows: feed unit vectors, and read the weight of each step


def size(weights):
    return 1 / np.square(np.asarray(weights, dtype=float)).sum()


STEPS, DECAY = 300, 0.9
UNIT = np.eye(STEPS, dtype="float32")


def by_optax():
    ema = jnp.zeros(STEPS)
    for row in UNIT:
        ema = optax.incremental_update(row, ema, step_size=1 - DECAY)
    return ema


def by_optax_of_updates():
    tx = optax.ema(DECAY)
    state = tx.init(jnp.zeros(STEPS))
    for row in UNIT:
        ema, state = tx.update(row, state)
    return ema


def by_flax():
    model = nnx.Linear(STEPS, 1, use_bias=False, rngs=nnx.Rngs(0))
    ema = nnx.EMA(model, decay=DECAY)
    for row in UNIT:
        model.kernel[...] = row[:, None]
        ema.update(model)
    return ema.apply_to(model).kernel[...][:, 0]


def by_keras():
    weights = keras.Variable(np.zeros(STEPS, "float32"))
    optimizer = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=DECAY)
    optimizer.build([weights])
    for row in UNIT:
        optimizer.apply([weights - row], [weights])
    optimizer.finalize_variable_values([weights])
    return keras.ops.convert_to_numpy(weights)


def by_lightning():
    class Units(Module):
        def on_train_batch_start(self, batch, index):
            with torch.no_grad():
                self.layer.weight.copy_(torch.from_numpy(UNIT[index]))

        def training_step(self, batch, _):
            return 0 * self.layer(batch).sum()

    module = Units(STEPS)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[EMAWeightAveraging(decay=DECAY)],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(STEPS, STEPS)))
    return module.layer.weight.detach().flatten()


@pytest.mark.parametrize("peer", [by_optax, by_optax_of_updates, by_flax, by_keras, by_lightning])
def test_the_window_of_a_decay(peer):
    weights = peer()
    assert np.sum(np.asarray(weights)) == pytest.approx(1, abs=1e-4)
    assert size(weights) == pytest.approx((1 + DECAY) / (1 - DECAY), rel=1e-3)


def test_the_table_of_windows():
    (table,) = (block.text for block in blocks("from-ema.md") if block.language == "text")
    printed = example("ema_windows.py").splitlines()
    assert set(printed) <= set(table.splitlines())
    assert len(printed) >= 9  # without diffusers and timm, which come with `bench`


def warmed(decay, steps):
    """The weights of an EMA whose decay follows the step; the first step has decay 0."""
    decays = np.array([decay(t) for t in range(1, steps)])
    return np.concatenate([[1], 1 - decays]) * np.append(np.cumprod(decays[::-1])[::-1], 1)


def test_what_is_said_of_schedules():
    page = (DOCS / "from-ema.md").read_text()
    assert f"{0.999**999:.0%}".replace("%", " %") in page  # of the first weights
    for steps, part in ((1000, 0.20), (10_000, 0.09), (100_000, 0.04)):
        weights = warmed(lambda t: 1 - (1 + t) ** (-2 / 3), steps)
        assert size(weights) == pytest.approx(2 * steps ** (2 / 3), rel=0.05)
        assert f"{part:.0%} of {steps:,}".replace("%", " %") in page
        assert size(weights) / steps == pytest.approx(part, abs=0.01)
    at = [(1 + steps) ** (-2 / 3) for steps in (990_000, 1_000_000)]  # 1 - decay
    assert at[0] > 1e-4 > at[1]

    for half_life in (0.01, 0.05, 0.2, 0.5):  # of torchtitan
        fraction = 1 - (1 - half_life / math.log(2)) ** 2
        back = fraction * math.log(2) / (1 + math.sqrt(1 - fraction))
        assert back == pytest.approx(half_life)
        steps = 10_000
        ours = TailAverage(Exponential(fraction))
        ours.update_many(np.zeros(steps))
        theirs = warmed(lambda t, h=half_life: 2 ** (-1 / (h * (t + 1))), steps)
        assert np.abs(theirs - ours.weights()).sum() < 1e-4  # of 2
        assert size(theirs) / steps == pytest.approx(fraction, rel=1e-4)
        # at this decay, a weight halves in the fraction h of the steps
        halves = 0.5 ** (1 / (half_life * steps))
        assert Exponential(fraction).decay(steps) == pytest.approx(halves, abs=1e-6)
    assert "Exponential(0.139)" in page
    assert 1 - (1 - 0.05 / math.log(2)) ** 2 == pytest.approx(0.139, abs=1e-4)

    def capped(t, highest=0.999):
        return min(highest, (1 + t) / (10 + t))

    for steps in (1000, 5000, 20_000):
        rule = Exponential(Growing(17 / 81, at_most=1999))
        ours = TailAverage(rule)
        ours.update_many(np.zeros(steps))
        theirs = warmed(capped, steps)
        assert size(theirs) == pytest.approx(ours.size, rel=0.02)
        assert np.abs(theirs - ours.weights()).sum() < 0.1  # of 2
