"""A Keras callback that averages the weights of a model while `fit` trains it.

    end of a batch   takes one sample, if the optimizer has made a step
    validation       puts the averages into the model, and restores the training weights afterwards
    end of an epoch  writes the state; with `swap_on_epoch` the averages stay until the next epoch
    end of fit       leaves the averages in the model

On both backends, arrays stay on the device of the model, and all arithmetic uses operators that
torch and JAX share. On JAX, the variables are stale during `fit`; reading `Callback.model` updates
them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tailavg.core import profile as profiles
from tailavg.core.clock import SUM, Store, clock_for
from tailavg.core.readings import Reading
from tailavg.core.rules import (
    Rule,
    as_training_rule,
    check_window,
    refuses_decay,
    size_of,
)
from tailavg.core.windows import AnyWindow, Reals
from tailavg.extras import needs
from tailavg.io import state as layout
from tailavg.io.files import whole_folder
from tailavg.io.tensors import mapped, write_arrays

with needs("keras"):
    import keras
    from keras import ops

__all__ = ["TailAveraging"]

_GUARDED = "evaluate", "save", "save_weights"  # what fit and callbacks call while averages are in
_AVERAGE, _WEIGHTS = "average", "weights.safetensors"  # in a saved folder


class TailAveraging(keras.callbacks.Callback):  # type: ignore[misc]
    """Average the weights that `fit` trains: put this first in the list of callbacks.

    Each step of the optimizer is a sample. Validation sees the averages, and after `fit` the model
    holds them; `restore` brings the training weights back. Variables that are not trained, such as
    the moving statistics of BatchNorm, are not averaged: they stay as training left them.

    Args:
        rule: A number (an int n for the last n steps, a float in (0, 1] for the last fraction of
            them), a window or a rule.
        window: What to read an `AnyTail` with: a fraction, a `Freshest` or a `Decay`. Other rules
            have their own window.
        swap_on_epoch: Whether the averages stay in the model from the end of an epoch to the
            beginning of the next, as in `SwapEMAWeights`: then callbacks that come after this one,
            such as `ModelCheckpoint` and `EarlyStopping`, save what was validated.
        path: A folder for the state, written at the end of each epoch, to resume together with
            `BackupAndRestore`. Choose one outside the folder of the backup, which `fit` deletes at
            its end.
        moving_statistics: Whether to average floating point variables that are not trained, too.
        offload: `"cpu"` keeps the means in main memory, and only the sum, which every step
            changes, on the device. Results are bit-identical either way.

    Examples:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> tail = TailAveraging(0.25)  # the last quarter of the steps
        >>> x = np.arange(32.0)[:, None] / 32
        >>> _ = model.fit(x, 2 * x, batch_size=4, epochs=3, verbose=0, callbacks=[tail])
        >>> tail.count, tail.size
        (24, 6.0)
    """

    @refuses_decay
    def __init__(
        self,
        rule: AnyWindow | Rule,
        window: Reading | None = None,
        *,
        swap_on_epoch: bool = False,
        path: str | os.PathLike[str] | None = None,
        moving_statistics: bool = False,
        offload: Literal["cpu"] | None = None,
    ) -> None:
        super().__init__()
        if keras.backend.backend() not in ("torch", "jax"):
            raise RuntimeError(
                "keras: expected the torch or the jax backend, got "
                f"{keras.backend.backend()}; set KERAS_BACKEND before keras is imported"
            )
        self.rule = as_training_rule(rule)
        check_window(self.rule, window)
        if offload not in (None, "cpu"):
            raise ValueError(f"offload: expected 'cpu' or None, got {offload!r}")
        self.window = window
        self.swap_on_epoch = swap_on_epoch
        self.path = None if path is None else Path(path)
        self._moving_statistics = moving_statistics
        self._offload = offload == "cpu"
        self._average: _Accumulators | None = None
        self._variables: list[Any] = []
        self._seen = 0  # the optimizer's iterations at the last sample, or at the start
        self._begun = False  # whether this fit has reached its first epoch
        self._training_weights: list[Any] | None = None  # while the averages are in the model
        self._kept: list[Path] = []  # the states of this run on disk

    @property
    def count(self) -> int:
        """The number of samples so far, t."""
        return self._average.clock.count if self._average else 0

    @property
    def size(self) -> float:
        """The size of the window, k_t. `profile` has the effective size."""
        return size_of(self.rule, self.window, self.count)

    def weights(self, window: Reading | None = None) -> Reals:
        """Return the weight of each of the `count` samples, oldest first."""
        return profiles.dense_weights(self.rule, *self._blocks("weights", window))

    def profile(self, window: Reading | None = None) -> profiles.Profile:
        """Summarize the weights: effective size, mean age, oldest age."""
        return profiles.profile(self.rule, *self._blocks("profile", window))

    def _blocks(self, call: str, window: Reading | None) -> tuple[list[int], int, Reading | None]:
        clock = self._require_a_sample(call).clock
        return clock.starts, clock.count, self.window if window is None else window

    @contextmanager
    def average_parameters(self, window: Reading | None = None) -> Iterator[None]:
        """Put the averages into the model inside a context; an `AnyTail` takes any window.

        On exit, even after an exception, the weights of the model are restored bit-identically.
        """
        average, current = self._require_a_sample("average_parameters"), self._current_weights()
        try:
            self._assign(average.read(self.window if window is None else window))
            yield
        finally:
            self._assign(current)

    def restore(self) -> None:
        """Restore the training weights, if the model holds the averages."""
        if self._training_weights is not None:
            self._assign(self._training_weights)
            self._training_weights = None

    # The events of a callback

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Guard the model: an exception while it holds the averages restores its weights."""
        model = self.model
        guard: Any = getattr(vars(model).get(_GUARDED[0]), "guard", self)
        if guard is not self and guard.params is self.params is not None:
            raise ValueError(
                "callbacks: expected one TailAveraging, got two, which would take each other's "
                "averages for training weights; to read several windows, use one with an AnyTail"
            )
        _unguard(model)
        for name in _GUARDED:
            setattr(model, name, self._guarded(getattr(model, name)))
        self._begun = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Begin or resume, after `BackupAndRestore` has loaded its backup. End a swap."""
        if not self._begun:
            self._begin()
            self._begun = True
        self.restore()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Take the weights as a sample, unless the optimizer only accumulated, or skipped."""
        iterations = self._iterations()
        if iterations != self._seen and self._average is not None:
            self._average.add([variable.value for variable in self._variables])
            self._seen = iterations

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Swap the averages in, if there are any."""
        if self._begun:
            self._swap_in()

    def on_test_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Restore the training weights."""
        if self._begun:
            self.restore()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Write the state, before `BackupAndRestore` writes its own; swap with `swap_on_epoch`."""
        if self.path is not None and self.count:
            self._save(self.path)
        if self.swap_on_epoch:
            self._swap_in()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Leave the averages in the model."""
        _unguard(self.model)
        self._swap_in()
        self._begun = False

    # The start of a run, and states on disk

    def _begin(self) -> None:
        """Continue this average, resume one on disk, or begin a new one."""
        model = self.model
        variables = list(model.trainable_variables)
        if self._moving_statistics:
            variables += [v for v in model.non_trainable_variables if "float" in v.dtype]
        if not variables:
            raise ValueError("model: expected variables to train, got none; are all frozen?")
        iteration = self._iterations()
        same_variables = [*map(id, variables)] == [*map(id, self._variables)]
        if self.count and iteration == self._seen and same_variables:
            if self._training_weights is not None and not self._holds_averages():
                # the weights were changed since the last fit: train from the new ones
                self._training_weights = None
            return
        average = _Accumulators(self.rule, variables, self._offload)
        saved = {} if self.path is None else _saved_folders(self.path)
        if iteration in saved:
            average.load(layout.read(saved[iteration] / _AVERAGE))
            weights = mapped(saved[iteration] / _WEIGHTS)
        elif self.count:
            raise RuntimeError(
                f"fit: this average is at iteration {self._seen} of its optimizer, but the "
                f"optimizer is at {iteration}, or the model is another one; create a new "
                "TailAveraging for a new run"
            )
        elif iteration and saved:
            raise ValueError(
                f"path: the optimizer is at iteration {iteration}, but the states in {self.path} "
                f"are of {sorted(saved)}; put TailAveraging before BackupAndRestore, or choose "
                "another path to begin a new average"
            )
        self._average, self._variables, self._seen = average, variables, iteration
        self._training_weights, self._kept = None, []
        if iteration in saved:
            self._kept = [saved[iteration]]
            # a backup that was made during a swap holds the averages
            self._assign(np.array(weights[str(i)]) for i in range(len(variables)))

    def _save(self, path: Path) -> None:
        """Write the state atomically. Keep the one before, since a backup may be older."""
        folder = path / f"iteration-{self._seen}"
        if folder in self._kept or self._average is None:
            return
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)  # of another run, or of a killed one
        with whole_folder(folder) as inside:
            layout.write_folder(inside / _AVERAGE, self._average.state())
            weights = [array.astype(_wide_dtype(array)) for array in self._current_weights()]
            write_arrays(inside / _WEIGHTS, {str(i): array for i, array in enumerate(weights)})
        self._kept = [*self._kept[-1:], folder]
        for old_folder in _saved_folders(path).values():
            if old_folder not in self._kept:
                shutil.rmtree(old_folder, ignore_errors=True)

    # Swaps

    def _guarded(self, call: Any) -> Any:
        @functools.wraps(call)
        def guarded(*args: Any, **options: Any) -> Any:
            try:
                return call(*args, **options)
            except BaseException:
                self.restore()
                raise

        guarded.guard = self  # type: ignore[attr-defined]
        return guarded

    def _swap_in(self) -> None:
        """Put the averages into the model, if there are any, and save the training weights."""
        if self._training_weights is not None or self._average is None or not self.count:
            return
        self._training_weights = self._current_weights()
        try:
            self._assign(self._average.read(self.window))
        except BaseException:
            self.restore()
            raise

    def _current_weights(self) -> list[npt.NDArray[Any]]:
        """Return the weights in the model, in main memory."""
        _ = self.model  # on JAX, updates the variables
        return [_in_main_memory(variable.value) for variable in self._variables]

    def _assign(self, values: Iterable[Any]) -> None:
        _ = self.model
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(value)

    def _holds_averages(self) -> bool:
        current = self._current_weights()
        with self.average_parameters():
            pairs = zip(current, self._current_weights(), strict=True)
            return all(a.tobytes() == b.tobytes() for a, b in pairs)

    def _iterations(self) -> int:
        """Return the number of steps that the optimizer has made."""
        return int(ops.convert_to_tensor(self.model.optimizer.iterations))

    def _require_a_sample(self, call: str) -> _Accumulators:
        if self._average is None or not self.count:
            raise layout.no_samples_error(call, "; give this callback to fit() first")
        return self._average


class _Accumulators(Store):
    """A sum and a few means of each variable. Variables are named by their index, from "0" on."""

    def __init__(self, rule: Rule, variables: Sequence[Any], offload: bool) -> None:
        self.clock = clock_for(rule)
        self._sums = {
            str(i): ops.zeros_like(variable.value, dtype=_wide_dtype(variable))
            for i, variable in enumerate(variables)
        }
        self._means: list[dict[str, Any]] = [{} for _ in self.clock.blocks]  # {}: an empty block
        self._to_storage: Any = _in_main_memory if offload else lambda array: array
        self._complete = True  # False while a sample is added, and after an interrupt

    def add(self, values: list[Any]) -> None:
        """Take one sample."""
        self._require_complete()
        self._complete = False
        self.clock.prepare(self)
        factor = self.clock.factor
        added = _add([*self._sums.values()], values, None if factor == 1.0 else factor)
        self._sums = dict(zip(self._sums, added, strict=True))
        self.clock.count += 1
        self._complete = True

    def fold(self, total: float, weight: float, carry: float) -> None:
        """See `Store`, and `tailavg.numpy.arithmetic.joined`."""
        for name, summed in self._sums.items():
            mean_of_sum, zeros = summed / total, ops.zeros_like(summed)
            joint, carried = mean_of_sum, zeros
            if weight != 1.0:
                mean = ops.convert_to_tensor(self._means[-1][name])
                step = (mean_of_sum - mean) * weight
                joint = mean + step
                carried = (step - (joint - mean)) * carry
                finite = ops.isfinite(carried)  # inf - inf is NaN
                joint = ops.where(finite, joint, mean * (1 - weight) + mean_of_sum * weight)
                carried = ops.where(finite, carried, zeros)
            self._means[-1][name], self._sums[name] = self._to_storage(joint), carried

    def turn(self, gone: int, weight: float) -> None:
        """See `Store`."""
        means = self._means.pop(gone)
        self._means.append({})
        if weight:
            older_means = self._means[gone - 1]
            for name, newer in means.items():
                older, newer = map(ops.convert_to_tensor, (older_means[name], newer))
                older_means[name] = self._to_storage(older * (1 - weight) + newer * weight)
        self._sums = {name: ops.zeros_like(summed) for name, summed in self._sums.items()}

    def read(self, window: Reading | None) -> Iterator[Any]:
        """Yield the average of each variable, always a new array."""
        self._require_complete()
        terms = self.clock.terms(window)
        for name, summed in self._sums.items():
            means = [means.get(name) for means in self._means]
            yield sum(
                weight * (summed if block == SUM else ops.convert_to_tensor(means[block]))
                for weight, block in terms
            )

    def state(self) -> dict[str, Any]:
        """Return the state in the layout of `tailavg.io.state`."""
        self._require_complete()
        partial, *blocks = (
            {name: _in_main_memory(array) for name, array in arrays.items()}
            for arrays in (self._sums, *self._means)
        )
        starts = self.clock.starts
        zeros = {name: np.zeros_like(summed) for name, summed in partial.items()}
        return layout.state(
            self.clock.rule,
            dtype="float32",
            count=self.clock.count,
            starts=starts,
            blocks=[block or zeros for block in blocks[len(blocks) - len(starts) :]],
            folded=self.clock.folded,
            partial=partial,
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from a state."""
        layout.check_model_state(state)
        rule = layout.rule_from(state["rule"])
        if rule != self.clock.rule or state["dtype"] != "float32":
            raise ValueError(
                f"state: expected {self.clock.rule} in float32, got {rule} in {state['dtype']}; "
                "create the TailAveraging with that rule, or choose another path"
            )
        count, starts, folded = state["count"], list(state["starts"]), state["folded"]
        layout.check_steps(count, starts, folded)
        shapes = {name: tuple(summed.shape) for name, summed in self._sums.items()}
        blocks, partial = layout.by_name(state, shapes)
        self.clock.restore(count, starts, folded)
        for index, block in enumerate(blocks, start=len(self._means) - len(blocks)):
            self._means[index] = {
                name: self._to_storage(_like(mean, self._sums[name]))
                for name, mean in block.items()
            }
        self._sums = {name: _like(partial[name], summed) for name, summed in self._sums.items()}

    def _require_complete(self) -> None:
        if not self._complete:
            raise RuntimeError(
                "the average is incomplete: an update was interrupted; resume from a backup with "
                "a new TailAveraging"
            )


def _add(sums: list[Any], values: list[Any], factor: float | None) -> list[Any]:
    """Add the values to the sums, in-place (JAX reuses the memory of donated sums)."""
    added = []
    for total, value in zip(sums, values, strict=True):
        wide = ops.cast(ops.stop_gradient(value), total.dtype)
        total += wide if factor is None else wide * factor
        added.append(total)
    return added


if keras.backend.backend() == "jax":
    import jax

    _add = jax.jit(_add, donate_argnums=0)  # one call for all variables


def _in_main_memory(array: Any) -> npt.NDArray[Any]:
    return np.array(ops.convert_to_numpy(array))  # always a copy


def _wide_dtype(array: Any) -> str:
    return "float64" if array.dtype == "float64" else "float32"


def _like(saved: npt.NDArray[Any], array: Any) -> Any:
    """Return a saved array in the dtype of `array`, on the device of the model."""
    return ops.convert_to_tensor(
        np.array(saved), dtype=keras.backend.standardize_dtype(array.dtype)
    )


def _saved_folders(path: Path) -> dict[int, Path]:
    """Return the folders of saved states by the optimizer's iteration."""
    folders = path.glob("iteration-*") if path.is_dir() else ()
    names = ((re.fullmatch(r"iteration-(\d+)", folder.name), folder) for folder in folders)
    return {int(name[1]): folder for name, folder in names if name}


def _unguard(model: Any) -> None:
    for name in _GUARDED:
        if hasattr(vars(model).get(name), "guard"):
            delattr(model, name)
