"""One run at a constant learning rate, read with tails, against runs that know their end.

    python examples/anytime_lm.py [--quick] [--seeds 3] [--output build/anytime_lm.csv]
    python examples/anytime_lm.py --plot-only --output docs/figures/anytime_lm.csv

A small GPT reads the source of Python's standard library, byte by byte. Two kinds of runs:

- Runs that know their end, one for each of five horizons. *Cosine* falls to 0 over the whole run.
  *WSD* (warm-up, stable, decay) continues the constant-rate run from 80 % of the horizon, and falls
  to 0 as 1 - √ of the rest. Both use the last iterate.
- Runs that do not: one at a *constant* rate, and one whose rate falls as *1/√t*, by √(α / (t + α))
  as in "Anytime Pretraining" (Meterez et al., 2026). An `AnyTail` sees every step of a run, and at
  every horizon the script reads its tails, also as `Freshest`. Beside it: the last iterate, plain
  EMAs that start at the first iterate, EMAs whose decay warms up as in torch-ema, and the EMA whose
  half-life is 5 % of the run, as in torchtitan. *Schedule-Free* AdamW (the package schedulefree)
  needs no horizon either; it runs with two values of its β.

All have the same warm-up, and for one seed the same start and the same batches. Each schedule runs
with each of three rates, Schedule-Free also with a fourth, since its authors advise larger ones.
All settings were chosen before the results were seen. The losses are in nats per byte, on files
that no run trains on. The script prints tables, writes a CSV with every loss, and draws: hollow
points are rates that were not the best at their horizon, bands and bars the range of the seeds.

The model has 0.1 million parameters and sees 2 of 10 MB of text, and its small batches make noisy
gradients. Nothing here says what a large model does.
"""

import argparse
import csv
import math
import multiprocessing
import platform
import sysconfig
import time
from collections.abc import Callable
from copy import copy, deepcopy
from functools import cache, partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from schedulefree import AdamWScheduleFree
from style import ANYTIME, DARK, EXPONENTIAL, OTHERS, RAW, save
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_ema import ExponentialMovingAverage

from tailavg import AnyTail, Decay, Exponential, Freshest
from tailavg.torch import ParameterAverage

torch.set_num_threads(1)  # a model this small gains nothing from more; see `main` for the cores


class Plan(NamedTuple):
    """The sizes of an experiment."""

    horizons: tuple[int, ...] = (500, 1000, 2000, 4000, 8000)
    between: tuple[int, ...] = (700, 1400, 2800, 5600)  # more times to read the anytime runs
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    warmup: int = 100
    alpha: int = 500  # of the 1/√t rate
    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 32  # bytes
    batch: int = 8
    validation: int = 1024  # windows of `context` bytes
    seeds: int = 3


FULL = Plan()
QUICK = Plan(
    *((20, 40), (30,), (3e-3, 1e-2)),
    warmup=4, alpha=10, layers=1, width=16, heads=2, context=16, batch=4, validation=32, seeds=2,
)  # fmt: skip

TAILS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
SHAPED = (0.1, 0.2, 0.4)  # read also as other decays
HEADLINE = 0.2  # the tail of the table and the figure, chosen beforehand
DECAYS = (0.99, 0.999, 0.9999)  # of the EMAs
WARMED = (0.999, 0.9999)  # of the EMAs whose decay warms up
HALF_LIFE = Exponential(0.139)  # whose half-life is 5 % of the steps
BETAS = (0.9, 0.98)  # of Schedule-Free
FREE = "Schedule-Free β="
STABLE = 0.8  # of a WSD run

NOT_PROGRAMS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}


@cache
def read_library() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library's files; every tenth file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not NOT_PROGRAMS.intersection(path.relative_to(root).parts)
    )
    held_out = files[5::10]
    training = b"".join(path.read_bytes() for path in files if path not in set(held_out))
    validation = b"".join(path.read_bytes() for path in held_out)
    return tuple(torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in (training, validation))


class GPT(nn.Module):
    """Bytes to the loss of the next byte, for one model of each seed.

    The models are trained side by side: a tensor has one slice for each seed, and one product
    serves them all. Nothing else mixes them, so an average of the weights is one for each seed too.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.layers, self.heads, width = plan.layers, plan.heads, plan.width
        shapes = {"bytes": (256, width), "places": (plan.context, width)}
        for i in range(plan.layers):
            shapes |= {f"qkv{i}": (width, 3 * width), f"mix{i}": (width, width)}
            shapes |= {f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
        random = [torch.Generator().manual_seed(seed) for seed in range(plan.seeds)]
        for name, (rows, columns) in shapes.items():
            scale = 0.05 if name in ("bytes", "places") else 1 / math.sqrt(rows)
            each = [scale * torch.randn(rows, columns, generator=one) for one in random]
            self.register_parameter(name, nn.Parameter(torch.stack(each)))

    def forward(self, text: Tensor) -> Tensor:
        """Windows (seeds, batch, context + 1) to the mean loss of each seed."""
        seeds, batch, length = text.shape
        tensors = dict(self.named_parameters())
        width = self.bytes.shape[2]
        which = text[..., :-1] + 256 * torch.arange(seeds)[:, None, None]
        x = functional.embedding(which, self.bytes.flatten(0, 1)) + self.places[:, None]
        x = x.flatten(1, 2)

        def normal(x: Tensor) -> Tensor:
            return functional.layer_norm(x, (width,))

        for i in range(self.layers):
            qkv = torch.bmm(normal(x), tensors[f"qkv{i}"])
            qkv = qkv.view(seeds * batch, length - 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
            seen = seen.transpose(1, 2).reshape(seeds, -1, width)
            x = x + torch.bmm(seen, tensors[f"mix{i}"])
            up = functional.relu(torch.bmm(normal(x), tensors[f"up{i}"]))
            x = x + torch.bmm(up, tensors[f"down{i}"])
        logits = torch.bmm(normal(x), self.bytes.mT)  # the embedding is the output layer too
        losses = functional.cross_entropy(
            logits.flatten(0, 1), text[..., 1:].flatten(), reduction="none"
        )
        return losses.view(seeds, -1).mean(1)


def make_optimizer(model: nn.Module, job: "Job", plan: Plan) -> torch.optim.Optimizer:
    """AdamW, whose rate is set at each step; or Schedule-Free AdamW."""
    if job.schedule.startswith(FREE):
        beta = float(job.schedule.removeprefix(FREE))
        options = {"lr": job.rate, "warmup_steps": plan.warmup, "weight_decay": 0.1}
        return AdamWScheduleFree(model.parameters(), betas=(beta, 0.95), **options)
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Job(NamedTuple):
    """Runs to train, one for each seed; those at a constant rate branch into the WSD runs."""

    schedule: str
    rate: float
    steps: int


class Run:
    """The models of a job, and their data."""

    def __init__(self, job: Job, plan: Plan) -> None:
        self.job, self.plan = job, plan
        self.training, validation = read_library()
        self.inside = torch.arange(plan.context + 1)
        shape = max(plan.horizons), plan.batch
        random = [torch.Generator().manual_seed(seed) for seed in range(plan.seeds)]
        starts = [
            torch.randint(len(self.training) - plan.context, shape, generator=one) for one in random
        ]
        self.starts = torch.stack(starts, 1)  # step i of a seed has the same batch in every run
        places = torch.linspace(0, len(validation) - plan.context - 1, plan.validation).long()
        self.validation = validation[places[:, None] + self.inside].long()
        self.model = GPT(plan)
        self.optimizer = make_optimizer(self.model, job, plan)

    def train(self, first: int, last: int, factor: Callable[[int], float] | None) -> None:
        """Make steps number `first` to `last` - 1, at the job's rate times a factor.

        Without a factor, the optimizer sets the rate.
        """
        for step in range(first, last):
            if factor is not None:
                warm = min(1.0, (step + 1) / self.plan.warmup)
                self.optimizer.param_groups[0]["lr"] = self.job.rate * warm * factor(step)
            self.optimizer.zero_grad()
            text = self.training[self.starts[step][..., None] + self.inside].long()
            self.model(text).sum().backward()
            self.optimizer.step()

    @torch.no_grad()
    def losses(self, model: nn.Module | None = None) -> list[float]:
        """The validation loss of each seed."""
        parts = self.validation.split(32)
        each = [(model or self.model)(part.expand(self.plan.seeds, -1, -1)) for part in parts]
        return torch.stack(each).double().mean(0).tolist()

    def branch(self) -> "Run":
        """A copy that trains on by itself."""
        twin = copy(self)
        twin.model = deepcopy(self.model)
        twin.optimizer = make_optimizer(twin.model, self.job, self.plan)
        twin.optimizer.load_state_dict(deepcopy(self.optimizer.state_dict()))
        return twin


FIELDS = ("seed", "schedule", "rate", "step", "read", "window", "shape", "loss")
"""Of the CSV. The window is the fraction of a tail or the decay of an EMA; the shape is that of the
learning-rate decay that a tail stands for."""


def train(job: Job, plan: Plan) -> tuple[Job, list[tuple]]:
    """Train a job, and return the rows of the CSV."""
    run, rows = Run(job, plan), []

    def note(step: int, losses: list[float], *read: float | str, schedule: str = "") -> None:
        where = schedule or job.schedule, job.rate, step, *(read or ("last", "", ""))
        rows.extend((seed, *where, round(loss, 5)) for seed, loss in enumerate(losses))

    if job.schedule == "cosine":
        run.train(0, job.steps, lambda step: (1 + math.cos(math.pi * step / job.steps)) / 2)
        note(job.steps, run.losses())
        return job, rows

    if job.schedule.startswith(FREE):
        now = 0
        run.optimizer.train()
        for step in sorted({*plan.horizons, *plan.between}):
            run.train(now, step, None)
            now = step
            run.optimizer.eval()  # puts its average into the model
            note(step, run.losses())
            run.optimizer.train()
        return job, rows

    def factor(step: int) -> float:
        return 1.0 if job.schedule == "constant" else math.sqrt(plan.alpha / (step + plan.alpha))

    # One average for all tails: a window is named when it is read.
    average = ParameterAverage(run.model, AnyTail(12, shortest=min(TAILS)))
    average.attach(run.optimizer)
    emas = {
        decay: AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        for decay in DECAYS
    }
    half_life = ParameterAverage(run.model, HALF_LIFE)
    half_life.attach(run.optimizer)
    warmed = {decay: ExponentialMovingAverage(run.model.parameters(), decay) for decay in WARMED}

    def update_emas(*_: object) -> None:
        for ema in emas.values():
            ema.update_parameters(run.model)
        for ema in warmed.values():
            ema.update()

    run.optimizer.register_step_post_hook(update_emas)
    branches = {round(STABLE * horizon): horizon for horizon in plan.horizons}
    now = 0
    for step in sorted({*plan.horizons, *plan.between, *branches}):
        run.train(now, step, factor)
        now = step
        if step in branches and job.schedule == "constant":
            twin, end = run.branch(), branches[step]
            twin.train(step, end, lambda i, s=step, e=end: 1 - math.sqrt((i - s) / (e - s)))
            note(end, twin.losses(), schedule="WSD")
        if step not in plan.horizons and step not in plan.between:
            continue
        everything = step in plan.horizons
        note(step, run.losses())
        for decay in DECAYS if everything else DECAYS[1:2]:
            note(step, run.losses(emas[decay]), "EMA", decay, "")
        for decay, ema in warmed.items():
            with ema.average_parameters():
                note(step, run.losses(), "warmed-up EMA", decay, "")
        with half_life.average_parameters():
            note(step, run.losses(), "EMA with a half-life of", 0.05, "")
        for window in (0.1, 0.2, 0.4) if everything else (HEADLINE,):
            with average.average_parameters(Freshest(window)):
                note(step, run.losses(), "freshest", window, "")
        for window in TAILS if everything else (HEADLINE,):
            with average.average_parameters(window):  # the weights of any tail, at any time
                note(step, run.losses(), "tail", window, "linear")
        for window, shape in product(SHAPED if everything else (), ("cosine", "1-sqrt")):
            if job.schedule == "constant":
                with average.average_parameters(Decay(window, shape)):  # not a linear decay
                    note(step, run.losses(), "tail", window, shape)
    return job, rows


def train_all(plan: Plan, path: Path, processes: int) -> None:
    """Train every job, the longest first, and save the losses after each."""
    training, validation = map(len, read_library())
    size = sum(tensor.numel() for tensor in GPT(plan).parameters()) // plan.seeds
    print(
        f"Python {platform.python_version()}: {training:,} bytes to train on, {validation:,} held "
        f"out; {size:,} parameters, torch {torch.__version__}, {plan.seeds} seeds",
        flush=True,
    )
    longest = [max(plan.horizons)]
    anytime = product(("constant", "1/√t"), plan.rates, longest)
    free = product([f"{FREE}{beta}" for beta in BETAS], (*plan.rates, 2 * plan.rates[-1]), longest)
    cosine = product(["cosine"], plan.rates, plan.horizons)
    jobs = [Job(*job) for job in (*anytime, *free, *cosine)]
    jobs.sort(key=lambda job: -job.steps)
    rows: list[tuple] = []
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for job, found in pool.imap_unordered(partial(train, plan=plan), jobs):
            rows = sorted([*rows, *found])
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([FIELDS, *rows])
            minutes = (time.perf_counter() - started) / 60
            print(f"{minutes:5.1f} min: {job.schedule}, {job.rate}, {job.steps} steps", flush=True)


class Method(NamedTuple):
    """How weights came about, but for the rate."""

    schedule: str
    read: str = "last"
    window: str = ""
    shape: str = ""

    def __str__(self) -> str:
        if self.read == "tail":
            shape = "" if self.shape == "linear" else f" as {self.shape}"
            return f"{self.schedule}, last {float(self.window):.0%}{shape}"
        if self.read == "freshest" or "half-life" in self.read:
            return f"{self.schedule}, {self.read} {float(self.window):.0%}"
        if self.schedule.startswith(FREE):
            return self.schedule
        return f"{self.schedule}, {self.read} {self.window or 'iterate'}"


def tail(schedule: str) -> Method:
    """The headline's tail."""
    return Method(schedule, "tail", str(HEADLINE), "linear")


def freshest(schedule: str) -> Method:
    """The freshest read of the headline's window."""
    return Method(schedule, "freshest", str(HEADLINE))


class Losses(dict[Method, dict[float, dict[int, np.ndarray]]]):
    """By method, rate and step: the loss of each seed."""

    def __init__(self, path: Path) -> None:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):  # sorted by seed
                method = Method(*(row[field] for field in Method._fields))
                at = self.setdefault(method, {}).setdefault(float(row["rate"]), {})
                step = int(row["step"])
                at[step] = np.append(at.get(step, []), float(row["loss"]))
        self.horizons = sorted({step for at in self[Method("WSD")].values() for step in at})

    def best(self, method: Method, step: int) -> tuple[float, np.ndarray]:
        """The rate with the lowest mean loss at a step, and its losses."""
        found = {rate: at[step] for rate, at in self[method].items() if step in at}
        return min(found.items(), key=lambda item: item[1].mean())

    def one_rate(self, method: Method) -> tuple[float, float]:
        """The rate for all times, whose mean loss over them is the lowest; and that loss."""
        rates = self[method]
        means = {rate: np.mean([at[step] for step in self.horizons]) for rate, at in rates.items()}
        return min(means.items(), key=itemgetter(1))

    def best_free(self) -> Method:
        """Schedule-Free with the better β for all times."""
        return min((Method(f"{FREE}{beta}") for beta in BETAS), key=lambda m: self.one_rate(m)[1])


def show(values: np.ndarray, sign: str = "") -> str:
    """The mean and half of its 95 % interval, by Student's t."""
    student = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}.get(len(values), 2.5)
    half = student * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{values.mean():{sign}.3f} ±{half:.3f}"


def print_tables(losses: Losses) -> None:
    """Every method at its best rates; then one run against the runs that know their end."""
    heads = " " * 42 + "".join(f"{f'{step:,} steps':>24}" for step in losses.horizons)
    print(f"\nValidation loss: mean ± 95 % interval (the best rate of each horizon)\n{heads}")
    for method in sorted(losses):
        best = [losses.best(method, step) for step in losses.horizons]
        print(f"{method!s:42}", *(f"{f'{show(x)} ({rate:g})':>23}" for rate, x in best))
    for schedule in ("constant", "1/√t"):
        rate, _ = losses.one_rate(tail(schedule))
        free = losses.best_free()
        print(f"\nOne run at {rate:g}, minus the best of each horizon, seed by seed\n{heads}")
        mine = (tail(schedule), freshest(schedule), Method(schedule))
        for method, other in product(mine, (Method("cosine"), Method("WSD"), free)):
            ours, best = losses[method][rate], partial(losses.best, other)
            gaps = [ours[step] - best(step)[1] for step in losses.horizons]
            name = str(other).removesuffix(", last iterate")
            print(f"{f'{method!s} - {name}':42}", *(f"{show(gap, '+'):>23}" for gap in gaps))


COSINE, WSD = (OTHERS[1], "o"), (OTHERS[0], "s")  # colour and marker of runs that know their end


def draw(losses: Losses, path: Path) -> None:
    """Save the picture: losses by step on the left, by the length of the tail on the right."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.6, 5.8), width_ratios=(1.6, 1), layout="constrained"
    )
    horizons = losses.horizons
    rate, falling = (losses.one_rate(tail(schedule))[0] for schedule in ("constant", "1/√t"))
    free = losses.best_free()

    def curve(method: Method, rate: float, **style: object) -> None:
        steps, each = zip(*sorted(losses[method][rate].items()), strict=True)
        low, mean, high = (f(each, axis=1) for f in (np.min, np.mean, np.max))
        left.plot(steps, mean, **style)
        left.fill_between(steps, low, high, color=style["color"], alpha=0.15, lw=0)

    for schedule, colour, marker, aside in (("cosine", *COSINE, 0.98), ("WSD", *WSD, 1.02)):
        runs = losses[Method(schedule)]
        best = [losses.best(Method(schedule), step) for step in horizons]
        places = [step * aside for step in horizons]  # beside each other
        for step, x, (chosen, values) in zip(horizons, places, best, strict=True):
            left.plot([x] * 2, [values.min(), values.max()], color=colour, lw=1)
            others = [at[step].mean() for rate, at in runs.items() if rate != chosen]
            left.plot([x] * len(others), others, marker, mfc="none", mec=colour, alpha=0.5, ms=5)
        means = [values.mean() for _, values in best]
        label = f"{schedule}: a run for each horizon"
        left.plot(places, means, marker, color=colour, ms=6, zorder=4, label=label)
    name = f"constant {rate:g}"
    ema = Method("constant", "EMA", str(DECAYS[1]))
    curve(tail("constant"), rate, color=ANYTIME, lw=2.5, label=f"{name}: last {HEADLINE:.0%}")
    label = f"1/√t from {falling:g}: last {HEADLINE:.0%}"
    curve(tail("1/√t"), falling, color=DARK[ANYTIME], lw=1.5, ls="-.", label=label)
    label = f"{name}: freshest {HEADLINE:.0%}"
    curve(freshest("constant"), rate, color=ANYTIME, lw=1.2, ls=":", label=label)
    curve(ema, rate, color=EXPONENTIAL, lw=1.5, ls="--", label=f"{name}: EMA {DECAYS[1]}")
    warmed = Method("constant", "warmed-up EMA", str(WARMED[1]))
    label = f"{name}: EMA {WARMED[1]}, warmed up"
    curve(warmed, rate, color=DARK[EXPONENTIAL], lw=1.2, ls=":", label=label)
    half_life = Method("constant", "EMA with a half-life of", "0.05")
    curve(half_life, rate, color=EXPONENTIAL, lw=1.2, label=f"{name}: EMA, half-life 5%")
    free_rate, _ = losses.one_rate(free)
    curve(free, free_rate, color=OTHERS[2], lw=1.5, label=f"{free}, {free_rate:g}")
    curve(Method("constant"), rate, color=RAW, lw=1.2, label=f"{name}: last iterate")
    left.set(xscale="log", xlabel="steps", ylabel="validation loss, nats per byte")
    left.set_xticks(horizons, [f"{step:,}" for step in horizons])
    ends = [losses.best(Method(end), step)[1] for end in ("cosine", "WSD") for step in horizons]
    left.set_ylim(np.min(ends) - 0.04, np.max(ends) + 0.06)
    left.set_title("One run, read at any time, and runs that know their end")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)

    shades = plt.colormaps["viridis_r"](np.linspace(0.15, 1, len(horizons)))
    for step, colour in zip(horizons, shades, strict=True):
        each = [losses[tail("constant")._replace(window=str(w))][rate][step] for w in TAILS]
        above = np.mean(each, axis=1)
        above -= above.min()
        right.plot(TAILS, above, "o-", color=colour, ms=4, label=f"{step:,}")
    right.set(xscale="log", xlabel="tail, as a part of the steps so far", ylim=(-0.003, 0.1))
    ticks = (0.05, 0.1, 0.2, 0.5, 1.0)
    right.set_xticks(ticks, [f"{window:.0%}" for window in ticks])
    right.set_ylabel("loss above that of the best tail")
    right.set_title("The constant-rate run, by tail")
    right.legend(title="after steps", loc="upper left")
    for panel in (left, right):
        panel.minorticks_off()
    for kind in (".svg", ".png"):
        save(figure, path.with_suffix(kind))


def main() -> None:
    """Train everything, print the tables and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=FULL.seeds, help="runs of each kind")
    parser.add_argument("--processes", type=int, default=2, help="one core each")
    parser.add_argument("--output", type=Path, default=Path("build/anytime_lm.csv"))
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--plot-only", action="store_true", help="draw an existing CSV anew")
    options = parser.parse_args()
    plan = QUICK if options.quick else FULL._replace(seeds=options.seeds)
    if not options.plot_only:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        train_all(plan, options.output, options.processes)
    losses = Losses(options.output)
    print_tables(losses)
    draw(losses, options.output)
    print(f"\nThe losses and the pictures are in {options.output.resolve().parent}")


if __name__ == "__main__":
    main()
