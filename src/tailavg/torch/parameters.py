"""`ParameterAverage`: the average of a model's weights during training.

It combines `Tracking` (which tensors are averaged), `Accumulators` (their sums and means) and
`SavedWeights` (the training weights during a swap).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from tailavg.core.profile import effective_size
from tailavg.core.readings import Reading
from tailavg.core.rules import AnyTail, Rule, as_training_rule, refuses_decay
from tailavg.core.windows import AnyWindow
from tailavg.io.state import read, write_folder
from tailavg.torch.accumulators import Accumulators, Offload, Terms
from tailavg.torch.export import write_safetensors
from tailavg.torch.spread import SpreadAccumulators
from tailavg.torch.swap import SavedWeights
from tailavg.torch.tracking import (
    Buffers,
    Choice,
    Source,
    Tracking,
    is_sharded,
    local,
    outside_autograd,
    shard_of,
    sharded_like,
)
from tailavg.torch.updates import CountedUpdates, has_trained

__all__ = ["ParameterAverage", "Selection"]


class Selection(NamedTuple):
    """The result of `ParameterAverage.select_tail`."""

    window: Reading
    """The best window."""
    score: float
    """Its score."""
    scores: list[tuple[Reading, float]]
    """All windows tried, with their scores."""


def default_windows(shortest: float) -> list[float]:
    """Return eight fractions from the shortest to 1, evenly spaced on a log scale, to two digits.

    Examples:
        >>> default_windows(0.1)
        [0.1, 0.14, 0.19, 0.27, 0.37, 0.52, 0.72, 1.0]
    """
    inner = [float(f"{shortest ** (1 - i / 7):.2g}") for i in range(1, 7)]
    return sorted({shortest, *(fraction for fraction in inner if shortest < fraction < 1), 1.0})


class ParameterAverage(CountedUpdates):
    """The tail average of a model's parameters.

    Call `update()` after each step of the optimizer, or `attach` the average to the optimizer once.
    Evaluate inside `average_parameters()`. The model is not copied. The average holds one sum and
    the accumulators of the rule (three for an `AnytimeWindow`), and during a swap a copy of the
    weights.

    Args:
        model: A module, a list of modules such as the `model_parts` of a pipeline, pairs of names
            and tensors, or tensors alone, which are told apart by their order. The names are those
            of `state_dict()`, of a list those of each part's. The wrappers of DDP, `torch.compile`
            and activation checkpointing do not change them. Tied parameters, by name or by memory,
            are kept once.
        rule: A number (an int n for the last n updates, a float in (0, 1] for the last fraction of
            them), a window or a rule.
        dtype: The lowest precision of the accumulators; those of float64 parameters are float64.
        device: Where to keep the accumulators; by default with their parameters.
        include: The names to average: a glob pattern, several, or a function of the name.
        exclude: The names not to average. Outputs take these tensors from the model.
        buffers: `"copy"`: outputs have the model's buffers, and a swap restores them afterwards;
            `"average"`: floating point buffers are averaged like parameters; `"skip"`: swaps and
            `copy_to` leave buffers alone.
        trainable_only: Whether to leave out parameters that are frozen (`requires_grad` is False)
            when the average is created. Outputs take them from the model. If one is trained later,
            the next update raises an error.
        update_every: Count only every n-th call of `update`. The window is in counted updates.
        start_after: Ignore this many calls of `update` at first; `update_every` applies to the
            later ones.
        offload: Where to keep the means, and the training weights during a swap: `"cpu"` for main
            memory, or a folder for files in it. Results are bit-identical either way.
        variance: Whether to keep the variance of each weight as well, for `variance` and
            `sample_parameters`. This doubles the memory of the accumulators.

    Examples:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> average = ParameterAverage(model, 0.5)
        >>> for step in range(10):
        ...     _ = torch.nn.init.constant_(model.weight, step)  # stands for optimizer.step()
        ...     average.update()
        >>> with average.average_parameters():
        ...     model.weight.item()
        7.0
        >>> model.weight.item()
        9.0
    """

    _update_call = "update() after the optimizer's step"

    @refuses_decay
    @outside_autograd
    def __init__(
        self,
        model: Source,
        rule: AnyWindow | Rule,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int | None = None,
        include: Choice = None,
        exclude: Choice = None,
        buffers: Buffers = "copy",
        trainable_only: bool = True,
        update_every: int = 1,
        start_after: int = 0,
        offload: Offload = None,
        variance: bool = False,
    ) -> None:
        rule = as_training_rule(rule, stacklevel=6)
        self._count_calls(update_every, start_after)
        self._tracking = Tracking(
            model, include=include, exclude=exclude, buffers=buffers, trainable_only=trainable_only
        )
        if not self._tracking.averaged:
            raise ValueError(
                "model: no floating point tensor to average; check include and exclude, or pass "
                "trainable_only=False to average frozen parameters too"
            )
        kind = SpreadAccumulators if variance else Accumulators
        self._accumulators = kind(rule, self._tracking.locals, dtype, device, offload)
        self._saved: SavedWeights | None = None  # the training weights, during a swap
        self._handle: RemovableHandle | None = None
        self._has_stepped = False  # whether the attached optimizer has

    def update(self) -> None:
        """Take the current parameters as one sample; call this after the optimizer's step.

        A parameter that was replaced since the last update is found by its name.

        Raises:
            RuntimeError: If the average is attached to an optimizer, which already updates it.
        """
        if self._attached:
            raise RuntimeError(
                "update: the average is attached to an optimizer, so this step would count twice; "
                "remove this call, or call remove() on the handle that attach() returned"
            )
        self._update()

    def _update(self) -> None:
        self._require_training_weights("update")
        if not self._skips_call():
            self._add()

    @outside_autograd
    def _add(self) -> None:
        self._tracking.refresh(self._accumulators.bind)
        self._accumulators.add()

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Update after every step of the optimizer from now on.

        Batches whose gradients only accumulate do not count, nor do steps that a gradient scaler
        skips, nor steps in which every learning rate and every gradient is 0.

        Args:
            optimizer: An optimizer of torch, a wrapper of one, as from `accelerator.prepare`, or
                a container of several, such as torchtitan's, which counts as one. It must have at
                least one of the averaged parameters.

        Returns:
            A handle; its `remove()` detaches the average.

        Examples:
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> average = ParameterAverage(model, 100)
            >>> handle = average.attach(optimizer)
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> optimizer.step()
            >>> average.count
            1
        """
        if self._attached:
            raise RuntimeError(
                "attach: the average is attached already, so every step would count twice; call "
                "remove() on its handle first"
            )
        inner: Any = optimizer
        while inner is not None:
            try:
                handle: RemovableHandle = inner.register_step_post_hook(self._after_step)
            except AttributeError:  # a wrapper, such as accelerate's
                inner = getattr(inner, "optimizer", None)
            else:
                try:
                    self._require_trained_by(inner)
                except ValueError:
                    handle.remove()
                    raise
                self._handle, self._has_stepped = handle, False
                return handle
        raise TypeError(
            "attach: expected an optimizer of torch, or a wrapper that has one as its `optimizer`, "
            f"got {type(optimizer).__name__}; call update() after each step"
        )

    @property
    def _attached(self) -> bool:
        handle = self._handle
        return handle is not None and handle.id in (handle.hooks_dict_ref() or ())

    def _require_trained_by(self, optimizer: Optimizer) -> None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        if not self._tracking.averages_any(trained):
            raise ValueError(
                f"attach: this {type(optimizer).__name__} has none of the averaged parameters; "
                "attach the optimizer that trains them, or with DeepSpeed, whose optimizers train "
                "copies, call update() after each engine.step()"
            )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._has_stepped:  # deepspeed.initialize may have replaced its parameters
            self._require_trained_by(optimizer)
            self._has_stepped = True
        if has_trained(optimizer):
            self._update()

    @property
    def swapped(self) -> bool:
        """Whether the training weights are saved, and the model may hold the averages."""
        return self._saved is not None

    # Evaluation.

    @contextmanager
    def average_parameters(self, window: Reading | None = None) -> Iterator[None]:
        """Put the averages into the model inside a context; an `AnyTail` needs a window.

        On exit, even after an exception, the model's own parameters and buffers are restored
        bit-identically. So BatchNorm statistics may be recomputed inside.
        """
        self._require_an_update("average_parameters")
        self._require_training_weights("average_parameters")
        terms = self._accumulators.clock.terms(window)
        with self._swap(lambda: self._write(terms)):
            yield

    @contextmanager
    def sample_parameters(
        self,
        scale: float = 1.0,
        generator: torch.Generator | None = None,
        window: Reading | None = None,
    ) -> Iterator[None]:
        """Put a random sample of the weights into the model inside a context.

        Each weight gets its average plus `scale` times its standard deviation (`variance` with
        `ddof=0`) times normal noise. Averaged buffers get no noise. Everything else is as in
        `average_parameters`. With `scale=1.0`, these are the samples of SWAG-Diagonal (Maddox et
        al., 2019). SWAG itself also has a low-rank part, and halves the variance of this one.

        Args:
            scale: Multiplies the standard deviations. (By default, the `scale` of the authors' code
                multiplies the variances.)
            generator: The source of the noise; by default torch's own. If several processes have
                the model, pass one that all of them have seeded alike: every process then draws
                the noise of all weights, and uses that of its shards.
            window: As in `average_parameters`.

        Examples:
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> average = ParameterAverage(model, 1.0, variance=True)
            >>> for step in range(100):
            ...     _ = torch.nn.init.constant_(model.weight, step % 2)
            ...     average.update()
            >>> samples, generator = [], torch.Generator().manual_seed(0)
            >>> for _ in range(400):
            ...     with average.sample_parameters(generator=generator):
            ...         samples.append(model.weight.item())
            >>> mean = sum(samples) / 400
            >>> spread = (sum((x - mean) ** 2 for x in samples) / 400) ** 0.5
            >>> round(mean, 1), round(spread, 1)
            (0.5, 0.5)
        """
        self._require_an_update("sample_parameters")
        self._require_training_weights("sample_parameters")
        accumulators = self._spread("sample_parameters")
        if not (math.isfinite(scale) and scale >= 0):
            raise ValueError(f"scale: expected a number of at least 0, got {scale!r}")
        terms = accumulators.clock.terms(window)
        if generator is None and any(map(is_sharded, self._tracking.averaged.values())):
            raise ValueError(
                "sample_parameters: the model is sharded; pass a generator that every process has "
                "seeded alike, as in torch.Generator().manual_seed(0)"
            )
        with self._swap(lambda: self._write_sample(accumulators, terms, scale, generator)):
            yield

    @contextmanager
    def _swap(self, write: Callable[[], None]) -> Iterator[None]:
        """Save the training weights, write others into the model, and restore on exit."""
        try:
            self.store()
            write()
            yield
        finally:
            if self._saved is not None:
                self.restore()

    @outside_autograd
    def _write_sample(
        self,
        accumulators: SpreadAccumulators,
        terms: Terms,
        scale: float,
        generator: torch.Generator | None,
    ) -> None:
        tracking = self._tracking

        def noise(name: str, dtype: torch.dtype) -> Tensor | None:
            if name in tracking.averaged_buffers:
                return None
            like = tracking.averaged[name]
            device = like.device if generator is None else generator.device
            drawn = torch.randn(like.shape, dtype=dtype, device=device, generator=generator)
            return shard_of(drawn, like)

        accumulators.write_samples(terms, scale, noise, tracking.locals, tracking.frozen())

    @outside_autograd
    def variance(self, window: Reading | None = None, ddof: int = 1) -> dict[str, Tensor]:
        """Return the variance of each averaged tensor around its average, by name.

        With the weights α of the updates, this is Σ α (x - average)². With `ddof=1`, it is divided
        by 1 - Σ α², which makes it unbiased for independent samples; that of one sample is NaN.
        A standard deviation below 1.5e-5 of the average in float32 is 0, since rounding could cause
        as much. The tensors have the dtypes of the accumulators, and are sharded like the model.

        Examples:
            >>> weight = torch.zeros(1)
            >>> average = ParameterAverage({"weight": weight}, 1.0, variance=True)
            >>> for step in range(10):
            ...     average.update()
            ...     weight += 1
            >>> average.variance(), average.variance(ddof=0)
            ({'weight': tensor([9.1667])}, {'weight': tensor([8.2500])})
        """
        self._require_an_update("variance")
        accumulators = self._spread("variance")
        if ddof not in (0, 1):
            raise ValueError(f"ddof: expected 0 or 1, got {ddof!r}")
        terms = accumulators.clock.terms(window)
        self._tracking.refresh(accumulators.bind)
        clock = accumulators.clock
        size = effective_size(self.rule, clock.starts, self.count, window)
        divisor = 1.0 - ddof / size
        shards = accumulators.variances(terms, divisor, self._tracking.locals)
        return {name: sharded_like(shards[name], x) for name, x in self._tracking.averaged.items()}

    def _spread(self, call: str) -> SpreadAccumulators:
        if not isinstance(self._accumulators, SpreadAccumulators):
            raise ValueError(f"{call}: create the average with variance=True")
        return self._accumulators

    def select_tail(
        self,
        evaluate: Callable[[], Any],
        windows: Iterable[Reading] | None = None,
        best: Callable[[Iterable[float]], float] = min,
    ) -> Selection:
        """Find the window of an `AnyTail` that makes the best model.

        The training weights are restored, even after an exception.

        Args:
            evaluate: A function that returns a score. It is called once for each window, while the
                model holds the averages over that window.
            windows: The windows to try; by default eight fractions from the shortest to 1.
            best: A function that picks the best score: `min` for a loss, `max` for an accuracy.

        Examples:
            >>> from tailavg import AnyTail
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> average = ParameterAverage(model, AnyTail(8))
            >>> for step in range(100):
            ...     _ = torch.nn.init.constant_(model.weight, min(step, 60))
            ...     average.update()
            >>> best = average.select_tail(lambda: abs(60 - model.weight.item()), [0.2, 0.4, 0.8])
            >>> best.window, round(best.score, 3)
            (0.2, 0.0)
        """
        self._require_an_update("select_tail")
        if windows is None:
            if not isinstance(self.rule, AnyTail):
                raise ValueError(
                    f"select_tail: {self.rule} has only one window; average with AnyTail()"
                )
            windows = default_windows(self.rule.shortest)
        candidates = list(windows)
        if not candidates:
            raise ValueError("select_tail: expected at least one window, got none")
        for window in candidates:  # check all of them before the first evaluation
            self._accumulators.clock.terms(window)
        scores: list[tuple[Reading, float]] = []
        for window in candidates:
            with self.average_parameters(window):
                score = evaluate()
                scores.append(
                    (window, float(score.detach() if isinstance(score, Tensor) else score))
                )
        numbers = [score for _, score in scores if not math.isnan(score)]
        if not numbers:
            raise ValueError(
                f"select_tail: evaluate() returned NaN for each of {candidates}; it has to return "
                "a number for at least one"
            )
        best_score = best(numbers)
        for window, score in scores:
            if score == best_score:
                return Selection(window, best_score, scores)
        raise ValueError(
            f"best: expected a function that returns one of {numbers}, got {best_score!r}"
        )

    @outside_autograd
    def store(self) -> None:
        """Save the parameters until `restore`, so that `copy_to()` may overwrite them."""
        self._require_training_weights("store")
        self._tracking.refresh(self._accumulators.bind)
        tensors = self._tracking.averaged | self._tracking.output_buffers
        self._saved = SavedWeights(self._tracking, tensors, self._accumulators.storage)

    @outside_autograd
    def restore(self) -> None:
        """Restore the parameters that `store` saved."""
        if self._saved is None:
            raise RuntimeError("restore: nothing is stored; call store() first")
        self._saved.restore()
        self._saved = None

    @outside_autograd
    def _write(self, terms: Terms) -> None:
        """Write the average with these terms into the model."""
        self._accumulators.write(terms, self._tracking.locals, self._tracking.frozen())

    @outside_autograd
    def copy_to(self, model: Source | None = None, window: Reading | None = None) -> None:
        """Write the averages into the averaged model, permanently, or into another model.

        The other model needs tensors of the same names and shapes. It also gets everything that is
        not averaged, including buffers unless they are skipped. If the average was made from
        tensors without names, the tensors of the other model are matched by their order.
        """
        self._require_an_update("copy_to")
        terms = self._accumulators.clock.terms(window)
        self._tracking.refresh(self._accumulators.bind)
        if model is None:
            self._write(terms)
            return
        source, target = self._tracking, self._tracking.of(model)
        copied = source.parameters | source.output_buffers
        into = {name: target.tensors[name] for name in (*source.averaged, *copied)}
        untied = [(name, tensor) for _, name, tensor in target.untied if name in into]
        names: dict[int, str] = {}
        for name, tensor in (*into.items(), *untied):
            first = names.setdefault(id(tensor), name)
            if first != name:
                raise ValueError(
                    f"model: {first} and {name} are one tensor in this model, but not in the "
                    "averaged one, so it cannot hold both averages; clone() one of them"
                )
        self._accumulators.write(terms, target.locals, source.frozen())
        for name, tensor in copied.items():
            local(into[name]).copy_(local(tensor))
        for name, tensor in untied:
            local(tensor).copy_(local(into[name]))

    # Export.

    @outside_autograd
    def averaged_state_dict(
        self, dtype: torch.dtype | None = None, window: Reading | None = None
    ) -> dict[str, Any]:
        """Return the state dict of the averaged model, with the keys of `model.state_dict()`.

        The tensors are new. They have `dtype`, or by default the dtypes of the parameters, and are
        sharded like the parameters. If hooks of the model compute tensors for its state dict, the
        averages are swapped in for that time.
        """
        self._require_an_update("averaged_state_dict")
        terms = self._accumulators.clock.terms(window)
        self._tracking.refresh(self._accumulators.bind)
        tracking = self._tracking

        def output_dtype(tensor: Tensor) -> torch.dtype:
            return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype

        outputs: dict[int, Tensor] = {}  # by the id of the tensor in the model

        def output(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in outputs:
                outputs[id(value)] = value.detach().to(output_dtype(value), copy=True)
            return outputs[id(value)]

        state = tracking.state_dict()
        if any(tracking.is_computed(key, value) for key, value in state.items()):
            with self.average_parameters(window):
                state = tracking.state_dict()
                return {key: output(value) for key, value in state.items()}
        shards = {
            name: torch.empty_like(tensor, dtype=output_dtype(tensor), requires_grad=False)
            for name, tensor in tracking.locals.items()
        }
        self._accumulators.write(terms, shards, tracking.frozen())
        averages = {name: sharded_like(shards[name], x) for name, x in tracking.averaged.items()}
        for name, average in averages.items():
            outputs |= {id(tensor): average for tensor in tracking.objects[name]}
        for key, value in state.items():
            name = tracking.aliases.get(key, "")
            if isinstance(value, Tensor) and id(value) not in outputs and name in averages:
                state[key] = averages[name]  # a hook returned another tensor
            else:
                state[key] = output(value)
        return state

    def full_state_dict(
        self, dtype: torch.dtype | None = None, window: Reading | None = None
    ) -> dict[str, Any]:
        """Return `averaged_state_dict` with unsharded tensors in main memory, for export.

        The tensors of a sharded model are gathered one by one: every process must call this.
        """
        state = self.averaged_state_dict(dtype, window)
        for key, value in state.items():
            if isinstance(value, Tensor):
                gathered = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
                state[key] = gathered.cpu()
        return state

    def save_averaged(
        self,
        path: str | os.PathLike[str],
        dtype: torch.dtype | None = None,
        window: Reading | None = None,
    ) -> None:
        """Write the averaged model to a `.safetensors` file, atomically.

        If the model is sharded, every process must call this, and the first of them writes: rank 0,
        or in a pipeline the first rank of each stage, which needs a path of its own.
        """
        tensors = self.full_state_dict(dtype, window)
        sharded: Any = filter(is_sharded, self._tracking.averaged.values())
        ranks = [int(tensor.device_mesh.mesh.min()) for tensor in sharded]
        if not ranks or torch.distributed.get_rank() == min(ranks):
            write_safetensors(path, tensors)

    # State.

    @outside_autograd
    def state_dict(self) -> dict[str, Any]:
        """Return the complete state, in the layout of `tailavg.io.state`.

        As in torch, its tensors are not copies: save them before the next update. The state works
        with `torch.save`, `torch.load(weights_only=True)` and, for sharded models,
        `torch.distributed.checkpoint`.
        """
        self._require_training_weights("state_dict")
        self._tracking.refresh(self._accumulators.bind)
        return self._accumulators.state_dict(self._tracking.averaged)

    @outside_autograd
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that `state_dict` returned, as if the run had never stopped.

        Raises:
            ValueError: If the rule, the dtype, or the names or shapes of tensors differ; it says
                which, and the average does not change.
        """
        self._require_training_weights("load_state_dict")
        self._tracking.refresh(self._accumulators.bind)
        self._accumulators.loaded(state, self._tracking)()

    @outside_autograd
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the complete state to a folder, atomically.

        The folder has `state.json`, a safetensors file for each closed block, and
        `open.safetensors` for the open block and the sum. With `offload` to a folder on the same
        file system, the files of closed blocks, which never change, are hard-linked instead of
        written. Each saved folder is self-contained; an older one at `path` is replaced.

        Raises:
            TypeError: If the model is sharded; `torch.distributed.checkpoint` saves `state_dict()`.
        """

        def as_array(tensor: Tensor) -> npt.NDArray[Any]:
            array: npt.NDArray[Any] = tensor.detach().cpu().numpy()
            return array

        if any(map(is_sharded, self._tracking.averaged.values())):
            raise TypeError(
                "save: the model is sharded; save state_dict() with torch.distributed.checkpoint"
            )
        write_folder(path, self.state_dict(), as_array, self._accumulators.files())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Resume from a folder of `save`, or from a file of NumPy's `TailAverage.save`.

        Raises:
            ValueError: As `load_state_dict`, or if a file is missing or damaged.
        """
        self.load_state_dict(read(path))

    @outside_autograd
    def to(
        self,
        device: torch.device | str | int | torch.dtype | None = None,
        dtype: torch.dtype | None = None,
    ) -> ParameterAverage:
        """Move the accumulators to a device, another dtype, or both, in-place.

        As in torch, a dtype may be the first argument.
        """
        self._require_training_weights("to")
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        device = self._accumulators.device if device is None else device
        self._accumulators = self._accumulators.to(device, self._tracking.locals, dtype)
        return self

    def __repr__(self) -> str:
        tensors = len(self._tracking.averaged)
        return f"<ParameterAverage({self.rule}): {self.count} updates of {tensors} tensors>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, but not during a swap."""
        self._require_training_weights("copy")
        return self.__dict__

    def _require_training_weights(self, call: str) -> None:
        if self._saved is not None:
            raise RuntimeError(
                f"{call}: not possible during a swap; leave average_parameters() or call restore() "
                "first"
            )
