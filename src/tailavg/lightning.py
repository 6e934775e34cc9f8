"""`TailAveraging`: a Lightning callback that averages the weights of a module while it trains.

Its methods are hooks of the Trainer, in the order of a run: training, validation, checkpoints.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from tailavg.core.readings import Reading
from tailavg.core.rules import Rule, as_training_rule, check_window, refuses_decay
from tailavg.core.windows import AnyWindow, short_repr
from tailavg.extras import needs

with needs("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer, strategies
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities import rank_zero_warn
    from torch import Tensor

    from tailavg.torch.parameters import ParameterAverage
    from tailavg.torch.swap import forked_rng
    from tailavg.torch.tracking import local, outside_autograd
    from tailavg.torch.updates import has_trained

__all__ = ["TailAveraging"]

TRAINING = "current_model_state"  # the name that Lightning gives the training weights
AVERAGE = "tail_average"  # the state of the average, or None before the first step
REFUSED = {
    strategies.FSDPStrategy: "the original FSDP flattens several weights into one tensor",
    strategies.DeepSpeedStrategy: (
        "in every ZeRO stage, its checkpoints leave out the averages that callbacks put there"
    ),
}


class TailAveraging(Callback):
    """Average the weights of a `LightningModule` while it trains.

    During `fit`, validation uses the averages, and `state_dict` in every checkpoint holds them.
    Training does not change. After `fit`, the module has the averages. Each step of the optimizer
    counts; with several optimizers, each training step counts in which one of them stepped.

    With `ModelParallelStrategy` (FSDP2), each process averages its own shards. `FSDPStrategy` and
    `DeepSpeedStrategy` are refused.

    Args:
        rule: As in `ParameterAverage`: `0.25` is the last quarter of the steps so far.
        window: The window to read an `AnyTail` with: a fraction, a `Freshest` or a `Decay`.
        evaluate_raw: Also validate the training weights, and log their metrics as `raw_val_loss`
            and so on. Each validation then copies the module and takes twice as long. Not with
            `ModelParallelStrategy`.
        options: Options of `ParameterAverage`: `update_every`, `start_after`, `include`, …

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[TailAveraging(0.25)], logger=False)
    """

    @refuses_decay
    def __init__(
        self,
        rule: AnyWindow | Rule,
        *,
        window: Reading | None = None,
        evaluate_raw: bool = False,
        **options: Any,
    ) -> None:
        self.rule = as_training_rule(rule)
        self.window = window
        self.evaluate_raw = evaluate_raw
        check_window(self.rule, window)
        signature(ParameterAverage).bind(None, rule, **options)  # raises if there is no such option
        self._options = options
        self._forget(None)

    def _forget(self, module: LightningModule | None) -> None:
        self._module = module  # the module of this fit, while it has weights of the fit
        self._average: ParameterAverage | None = None
        self._state: Mapping[str, Any] | None = None  # loaded, before the average is created
        self._final: dict[str, Any] | None = None  # the training weights, after training
        self._tensors: dict[str, Any] = {}  # the same, by name, until the fit ends
        self._stepped = False  # whether an optimizer stepped in this training step
        self._handles: list[Any] = []  # of hooks on optimizers, while a fit runs
        self._raw: LightningModule | None = None  # a copy with the training weights, for validation

    @property
    def average(self) -> ParameterAverage:
        """The average of the current `fit`, or of the last one."""
        if self._average is None:
            raise RuntimeError(
                "average: expected a fit that has started in this process, got none; it is "
                "created when `fit` starts"
            )
        return self._average

    # The run.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last fit when a new fit begins."""
        if stage != TrainerFn.FITTING:
            return
        self._forget(pl_module)
        strategy: Any = trainer.strategy
        for refused, reason in REFUSED.items():
            if isinstance(strategy, refused):
                raise TypeError(
                    f"TailAveraging does not support {type(strategy).__name__}: {reason}; use "
                    "ModelParallelStrategy with fully_shard in configure_model, together with this "
                    "callback or with ParameterAverage in your module"
                )
        if _is_model_parallel(strategy) and not strategy._save_distributed_checkpoint:
            raise ValueError(
                "TailAveraging: each process has to save its shards of the average; use "
                "ModelParallelStrategy(save_distributed_checkpoint=True)"
            )
        if _is_model_parallel(strategy) and self.evaluate_raw:
            raise ValueError(
                "evaluate_raw: not possible with ModelParallelStrategy, since it copies the "
                "module, which FSDP2 does not allow; leave it out"
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Create the average, now that the weights have their device and precision."""
        self._average = average = ParameterAverage(pl_module, self.rule, **self._options)
        if self._state is not None:
            average.load_state_dict(self._state)
            self._state = None
        if len(trainer.optimizers) == 1:
            self._handles = [average.attach(trainer.optimizers[0])]
        else:
            self._handles = [
                optimizer.register_step_post_hook(self._after_step)
                for optimizer in trainer.optimizers
            ]
        save: Any = trainer.strategy.save_checkpoint
        if getattr(save, "func", None) != self._save:  # otherwise an earlier fit has wrapped it
            save = partial(self._save, trainer.strategy, save)
            trainer.strategy.save_checkpoint = save  # type: ignore[method-assign]

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        self._stepped |= has_trained(optimizer)

    def on_train_batch_end(self, *_: Any) -> None:
        """Count this training step if there are several optimizers and one of them stepped."""
        self._take()

    def _take(self) -> None:
        if self._stepped and self._average is not None:
            self._stepped = False
            self._average.update()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the module the averages. Keep the training weights for later checkpoints."""
        average = self._average
        if average is not None and average.count and self._final is None:
            state = trainer.strategy.lightning_module_state_dict()
            self._tensors, self._final = _copies(_tensors(pl_module), state)
            average.copy_to(window=self.window)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do the work of `on_train_end` if it did not run, as when a finished run is resumed."""
        TailAveraging.on_train_end(self, trainer, pl_module)
        self._detach()
        if self._final is None and self._average is not None:
            rank_zero_warn(
                "TailAveraging: expected at least one counted step, got none; the module keeps its "
                f"training weights: see update_every and start_after in {self._options}"
            )

    @outside_autograd
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the training weights, before other callbacks save a checkpoint."""
        if self._handles:  # otherwise no fit is running
            self._restore()
            for name, tensor in _tensors(pl_module).items():
                if name in self._tensors:
                    tensor.copy_(self._tensors[name])
            self._final = None
            self._detach()

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._tensors = [], {}

    # Validation.

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Store the training weights and give the module the averages, if this is a fit."""
        if trainer.state.fn == TrainerFn.FITTING and self._average and self._average.count:
            if self.evaluate_raw:
                self._raw = _raw_copy(pl_module)
                self._call_raw("on_validation_start")
            self._swap()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call this hook of the copy with the training weights, if `evaluate_raw` is set."""
        self._call_raw("on_validation_epoch_start")

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any
    ) -> None:
        """Call this hook of the copy with the training weights, if `evaluate_raw` is set."""
        self._call_raw("on_validation_batch_start", *batch)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *batch: Any
    ) -> None:
        """Validate the training weights on the same batch, if `evaluate_raw` is set."""
        if self._raw is not None:
            step: Any = self._raw.validation_step
            kinds = [parameter.kind for parameter in signature(step).parameters.values()]
            taken = len(batch) if Parameter.VAR_POSITIONAL in kinds else len(kinds)
            with trainer.precision_plugin.val_step_context():
                result = self._call_raw("validation_step", *batch[:taken])
            self._call_raw("on_validation_batch_end", result, *batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call this hook of the copy with the training weights, if `evaluate_raw` is set."""
        self._call_raw("on_validation_epoch_end")

    def _call_raw(self, hook: str, *args: Any) -> Any:
        """Call a hook of the copy with the training weights, if there is one."""
        if self._raw is None:
            return None
        with forked_rng(self._raw.device):  # so that training does not change
            return getattr(self._raw, hook)(*args)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the training weights, if this is a fit."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._restore()

    def _swap(self) -> None:
        assert self._average is not None
        self._average.store()
        self._average.copy_to(window=self.window)

    def _restore(self) -> None:
        self._raw = None
        if self._average is not None and self._average.swapped:
            self._average.restore()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Return the count, so that Lightning warns of a resume without this callback.

        `on_save_checkpoint` saves the average itself, since Lightning copies this state.
        """
        return {} if self._average is None else {"count": self._average.count}

    @outside_autograd
    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the averages as `state_dict`; add the training weights and the average's state."""
        if pl_module is not self._module:  # the module has had other weights since the fit
            return
        average = self._average
        if average is None and _is_model_parallel(trainer.strategy):  # there is nothing to save yet
            return
        training, state = checkpoint["state_dict"], self._state
        if average is not None and self._final is not None:
            training, state = self._final, average.state_dict()
        elif average is not None and average.swapped:  # these tensors change when the swap ends
            (checkpoint["state_dict"],) = _copies(training)
            buffers = [(buffer, buffer.clone()) for buffer in pl_module.buffers()]
            average.restore()
            (training,) = _copies(trainer.strategy.lightning_module_state_dict())
            state = average.state_dict()
            self._swap()
            for buffer, value in buffers:  # buffers as validation left them
                buffer.copy_(value)
        elif average is not None:
            checkpoint["state_dict"] = self._averaged(training)
            state = average.state_dict()
        checkpoint[TRAINING], checkpoint[AVERAGE] = training, state

    def _averaged(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict of the module with averages in place of weights, if there are any."""
        self._take()
        average = self._average
        if average is None or not average.count or average.swapped or self._final is not None:
            return given
        averaged = average.averaged_state_dict(window=self.window)
        # ModelParallelStrategy removes the name that torch.compile gives to a submodule
        averaged |= {name.replace("_orig_mod.", ""): x for name, x in averaged.items()}
        state = copy.copy(given)  # keeps the versions of modules, which are an attribute
        state.update((name, averaged.get(name, value)) for name, value in given.items())
        return state

    def _save(
        self,
        strategy: strategies.Strategy,
        save: Callable[..., None],
        checkpoint: dict[str, Any],
        filepath: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save a checkpoint with `save`, the strategy's own method.

        Weights-only checkpoints, for which Lightning calls no callback, get the averages here. For
        `ModelParallelStrategy`, all processes save the training weights and the average to a
        folder in the checkpoint, since Lightning would save only those of the first process.
        """
        if AVERAGE not in checkpoint and strategy.lightning_module is self._module:
            checkpoint = {**checkpoint, "state_dict": self._averaged(checkpoint["state_dict"])}
        if not _is_model_parallel(strategy) or TRAINING not in checkpoint:
            save(checkpoint, filepath, *args, **kwargs)
            return
        from torch.distributed.checkpoint.state_dict_saver import save as save_shards

        shards = {key: checkpoint.pop(key) for key in (TRAINING, AVERAGE)}
        checkpoint[AVERAGE] = _description(shards[AVERAGE])
        save(checkpoint, filepath, *args, **kwargs)
        save_shards(shards, checkpoint_id=_folder(strategy, filepath))

    def _load_shards(
        self, trainer: Trainer, module: LightningModule, saved: Mapping[str, Any]
    ) -> None:
        """Load what `_save` saved with this description. Each process loads its own shards."""
        from torch.distributed.checkpoint import state_dict
        from torch.distributed.checkpoint.state_dict_loader import load

        average = self.average
        shards = {TRAINING: state_dict.get_model_state_dict(module), AVERAGE: average.state_dict()}
        folder = _folder(trainer.strategy, trainer.ckpt_path)
        for key, own in _description(shards[AVERAGE]).items():
            if key != "count" and own != saved[key]:
                raise ValueError(
                    f"{folder}: {key}: expected {short_repr(own)}, got {short_repr(saved[key])}; "
                    "create TailAveraging with the options with which this average was saved"
                )
        complete = (folder / ".metadata").is_file()
        if complete:
            load(shards, checkpoint_id=folder)
        if not complete or _description(shards[AVERAGE]) != saved:
            raise ValueError(
                f"{folder}: not the average of this checkpoint, which was not saved completely; "
                "resume from another checkpoint"
            )
        options = state_dict.StateDictOptions(strict=module.strict_loading)
        state_dict.set_model_state_dict(module, shards[TRAINING], options=options)
        average.load_state_dict(shards[AVERAGE])

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Load the training weights and the average, if this is a fit."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._module = None  # the module now has the averages of that checkpoint
            return
        model_parallel = _is_model_parallel(trainer.strategy)
        if model_parallel and TRAINING in checkpoint:
            raise ValueError(
                f"{trainer.ckpt_path}: its training weights were not saved by TailAveraging with "
                "ModelParallelStrategy; resume with the strategy and callback of that run"
            )
        if model_parallel and AVERAGE in checkpoint:
            self._load_shards(trainer, pl_module, checkpoint[AVERAGE])
            return
        if TRAINING in checkpoint:
            trainer.strategy.load_model_state_dict(
                {"state_dict": checkpoint[TRAINING]}, strict=pl_module.strict_loading
            )
        if AVERAGE not in checkpoint:
            rank_zero_warn(
                "TailAveraging: the checkpoint was written without TailAveraging; its weights "
                "are loaded, and the average starts with the next step"
            )
        elif self._average is None:
            self._state = checkpoint[AVERAGE]
        elif checkpoint[AVERAGE] is not None:
            self._average.load_state_dict(checkpoint[AVERAGE])


def _is_model_parallel(strategy: Any) -> bool:
    return isinstance(strategy, strategies.ModelParallelStrategy)


def _description(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the metadata of a checkpoint says about the state of its average."""
    tensors = list(state["partial"])
    return {key: state[key] for key in ("rule", "dtype", "count")} | {"tensors": tensors}


def _folder(strategy: strategies.Strategy, checkpoint: Any) -> Path:
    """Return the folder in a checkpoint for what its processes save, the same in each of them."""
    return Path(strategy.broadcast(checkpoint)) / AVERAGE


def _raw_copy(module: LightningModule) -> LightningModule:
    """Return a copy of a module with its own metrics, which logs through the module as `raw_…`."""
    try:
        raw = copy.deepcopy(module)
    except Exception as error:  # of any kind: attributes may define how they are copied
        raise RuntimeError(
            "evaluate_raw: the module cannot be copied; detach tensors that it keeps, as in "
            f"self.loss = loss.detach(), or leave out evaluate_raw ({error})"
        ) from error
    raw.trainer, raw._metric_attributes = module.trainer, None

    def log(name: str, *args: Any, **kwargs: Any) -> None:
        name = f"raw_{name}"
        module.log(name, *args, **{"metric_attribute": name} | kwargs)

    raw.log = log  # type: ignore[method-assign]
    return raw


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@outside_autograd
def _copies(*states: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of state dicts in main memory. A tensor with several names is copied once."""
    copies: dict[Any, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        shard = local(value)
        place = value.device, shard.data_ptr(), value.shape, value.stride(), value.dtype
        if place not in copies:
            copies[place] = value.detach().to("cpu", copy=True)
        return copies[place]

    results = [copy.copy(state) for state in states]
    for state in results:
        state.update([(name, copied(value)) for name, value in state.items()])
    return results
