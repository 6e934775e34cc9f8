"""Tail averages in Hugging Face's `Trainer`.

Trainer has no hook that runs before evaluation or saving, so a callback alone cannot swap weights.
`TailAverageMixin` overrides four methods instead: those that prepare training, evaluate, save, and
load the best model. `TailAverageCallback.attach` gives the mixin to an existing Trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.utils.hooks import RemovableHandle

from tailavg.core.readings import Reading
from tailavg.core.rules import Rule, as_training_rule, check_window, refuses_decay
from tailavg.core.windows import AnyWindow, positive_int
from tailavg.extras import needs
from tailavg.io.files import saved_folder
from tailavg.torch import ParameterAverage
from tailavg.torch.swap import forked_rng

with needs("transformers"):
    import transformers
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput

__all__ = ["TailAverageCallback", "TailAverageMixin", "TailAverageTrainer"]

FOLDER = "tail_average"
"""The folder of a checkpoint that holds the state of the average."""

TailAverageOption = AnyWindow | Rule | Mapping[str, Any]

_OVERRIDDEN = ("_prepare_for_training", "evaluation_loop", "save_model", "_load_best_model")
_REFUSED = {
    "is_fsdp_xla_enabled": "FSDP of XLA",
    "is_distributed_loading_by_transformers": "loading a model in shards",
}

logger = logging.getLogger(__name__)

for _name in _OVERRIDDEN:
    if not hasattr(Trainer, _name):
        raise ImportError(
            f"tailavg.transformers: Trainer has no method {_name} in transformers "
            f"{transformers.__version__}; install transformers 5.22, or use "
            "tailavg.torch.ParameterAverage"
        )


class _Options(NamedTuple):
    rule: Rule
    window: Reading | None
    evaluate_raw: bool
    others: dict[str, Any]
    """Further arguments of `ParameterAverage`."""

    @classmethod
    def of(cls, tail_average: TailAverageOption) -> _Options:
        others: dict[str, Any] = {"rule": tail_average}
        if isinstance(tail_average, Mapping):
            others = dict(tail_average)
        window, evaluate_raw = others.pop("window", None), others.pop("evaluate_raw", False)
        if not isinstance(evaluate_raw, bool):
            raise TypeError(f"evaluate_raw: expected True or False, got {evaluate_raw!r}")
        refuses_decay(dict)(**others)  # raises a TypeError if there is a decay
        try:
            signature(ParameterAverage).bind("model", **others)
        except TypeError as error:
            raise ValueError(
                'tail_average: expected a number, a rule, or a dict with a "rule", a "window", '
                f'"evaluate_raw" and options of ParameterAverage, got {tail_average!r}: {error}'
            ) from error
        rule = as_training_rule(others.pop("rule"))
        check_window(rule, window, steps=1)
        return cls(rule, window, evaluate_raw, others)

    def check(self, steps: int) -> None:
        """Raise if the window is too short for an `AnyTail` in a run of `steps` steps.

        `steps` is -1 if the Trainer does not know the number yet.
        """
        first = positive_int(self.others.get("start_after", 0), "start_after", least=0)
        counted = (steps - first) // positive_int(
            self.others.get("update_every", 1), "update_every"
        )
        check_window(self.rule, self.window, max(1, counted))


class _EngineSteps(TrainerCallback):
    """Update an average after each step of the DeepSpeed engine of a Trainer.

    A hook of the optimizer would run too early: it steps on a partition of float32 copies, and the
    engine changes the parameters of the model afterwards.
    """

    def __init__(self, trainer: Any, average: ParameterAverage) -> None:
        self._engine, self._average = trainer.deepspeed, average
        self._callbacks: list[Any] = trainer.callback_handler.callbacks
        self._callbacks.insert(0, self)  # other callbacks get the updated average, as with a hook

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._engine.was_step_applied():  # otherwise a gradient overflowed
            self._average.update()

    def remove(self) -> None:
        self._callbacks.remove(self)


class TailAverageMixin(Trainer):
    """Add a tail average to any kind of Trainer: `class MyTrainer(TailAverageMixin, SFTTrainer)`.

    Training does not change. Evaluations, predictions, `save_model()` and the best model use the
    averaged weights. A checkpoint holds the training weights as usual, and the state of the average
    in its folder `tail_average`; `resume_from_checkpoint` restores both. With FSDP2, each process
    averages its own shards, and all of them save the average. With DeepSpeed's ZeRO stages 1 and 2,
    each process averages all weights.

    Args:
        *args: Arguments of the Trainer.
        tail_average: A number, a window or a rule; or a dict with a `"rule"`, the `"window"` with
            which an `AnyTail` is read, and other options of `ParameterAverage`. With
            `"evaluate_raw": True`, each evaluation also evaluates the training weights and logs
            their metrics as `eval_raw_loss` and so on.
        **kwargs: Arguments of the Trainer.
    """

    tail_average: ParameterAverage | None = None
    """The average; None before training. Each `train()` starts a new one."""

    _tail_options: _Options
    _tail_handle: RemovableHandle | _EngineSteps | None = None
    _last_loaded_step: int  # of TRL's trainers that generate with vLLM
    _tail_is_loaded: bool = False  # whether the model has the averages of the best checkpoint

    def __init__(self, *args: Any, tail_average: TailAverageOption, **kwargs: Any) -> None:
        self._tail_options = _Options.of(tail_average)
        super().__init__(*args, **kwargs)
        self._tail_options.check(self.args.max_steps)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._stop_averaging()
        self._check_sharding()
        prepare: Any = super()._prepare_for_training
        prepared = prepare(max_steps, train_dataloader, resume_from_checkpoint)
        self._start_averaging(resume_from_checkpoint)
        return prepared

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate or predict with the averaged weights, once there are any."""
        arguments = dataloader, description, prediction_loss_only, ignore_keys
        average = self.tail_average
        raw_metrics: dict[str, float] = {}
        # in a swap, and once the best model is loaded, the model has averages already
        has_raw = average is not None and average.count and not average.swapped
        if self._tail_options.evaluate_raw and has_raw and not self._tail_is_loaded:
            with forked_rng(self.args.device):  # so that training does not change
                raw = super().evaluation_loop(*arguments, f"{metric_key_prefix}_raw")
            raw_metrics = raw.metrics or {}
        with self._averaged():
            output = super().evaluation_loop(*arguments, metric_key_prefix)
        return output._replace(metrics=raw_metrics | (output.metrics or {}))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the averaged model; in a checkpoint, save the training weights and the average."""
        # internal calls write checkpoints, but the call of push_to_hub, without a folder, does not
        if not (_internal_call and output_dir is not None):
            with self._averaged():
                plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
                if plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type):
                    # Trainer would save nothing; every process takes part in gathering
                    state = self.accelerator.get_state_dict(self.model)
                    if self.args.should_save:
                        self._save(output_dir, state_dict=state)
                super().save_model(output_dir, _internal_call)
            return
        self._save_average(Path(output_dir, FOLDER))  # first, so that no checkpoint lacks it
        super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        average = self.tail_average
        folder = Path(str(self.state.best_model_checkpoint), FOLDER)
        if average is None or not self._load_average(average, folder):
            logger.warning("%s not found: the best model is not averaged", folder)
            self._stop_averaging()
            return
        if average.count:
            average.copy_to(window=self._tail_options.window)
            self._tail_is_loaded = True

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        average = self.tail_average
        if average is None or not average.count:
            yield
            return
        window = self._tail_options.window
        with nullcontext() if average.swapped else average.average_parameters(window):
            self._forget_loaded_step()
            try:
                yield
            finally:
                self._forget_loaded_step()

    def _forget_loaded_step(self) -> None:
        """Make TRL send the weights to vLLM before it generates again, even in the same step."""
        if hasattr(self, "_last_loaded_step"):
            self._last_loaded_step = -1

    def _save_average(self, folder: Path) -> None:
        if self.tail_average is None:
            return
        if self.is_fsdp_enabled:
            from torch.distributed.checkpoint.state_dict_saver import save

            save({"average": self.tail_average}, checkpoint_id=folder)
        elif self.args.should_save:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self.tail_average.save(folder)

    def _load_average(self, average: ParameterAverage, folder: Path) -> bool:
        """Load what `_save_average` saved; return False if there is nothing."""
        if not saved_folder(folder).is_dir():
            return False
        if self.is_fsdp_enabled:
            from torch.distributed.checkpoint.api import CheckpointException
            from torch.distributed.checkpoint.state_dict_loader import load

            try:
                load({"average": average}, checkpoint_id=folder)
            except CheckpointException as error:
                raise ValueError(
                    f"{folder}: the average cannot be loaded: files are damaged, or the run had "
                    "another rule or model; resume with those of the run, or from another "
                    "checkpoint"
                ) from error
        else:
            average.load(folder)
        return True

    def _check_sharding(self) -> None:
        """Raise if parameters are split between processes in a way that is not supported."""
        for flag, name in _REFUSED.items():
            if getattr(self, flag, False):
                raise ValueError(
                    f"tail_average: {name} is not supported, since it splits parameters between "
                    "processes; use tailavg.torch.ParameterAverage in your own training loop"
                )
        if self.is_deepspeed_enabled:
            plugin = self.accelerator.state.deepspeed_plugin
            if plugin.zero_stage == 3:
                raise ValueError(
                    "tail_average: DeepSpeed's ZeRO stage 3 is not supported, since it partitions "
                    'the parameters; use stage 1 or 2, or FSDP2: fsdp_config={"version": 2}'
                )
            parallel = plugin.deepspeed_config.get("tensor_parallel", {})
            if parallel.get("autotp_size", 0) > 1:
                raise ValueError(
                    "tail_average: tensor parallelism of DeepSpeed is not supported, since each "
                    "process has other parameters; remove autotp_size, or use FSDP2"
                )
        if self.is_fsdp_enabled and not self.accelerator.is_fsdp2:
            raise ValueError(
                "tail_average: the original FSDP is not supported, since it replaces the "
                'parameters by flat tensors without names; use fsdp_config={"version": 2}'
            )

    def _stop_averaging(self) -> None:
        if self._tail_handle is not None:
            self._tail_handle.remove()
        self._tail_handle = self.tail_average = None
        self._tail_is_loaded = False

    def _start_averaging(self, checkpoint: str | None) -> None:
        options = self._tail_options
        model: Any = self.model
        optimizer: Any = self.optimizer
        options.check(self.state.max_steps)
        unwrapped = optimizer
        while hasattr(unwrapped, "optimizer"):  # accelerate's wrapper has an eval() of its own
            unwrapped = unwrapped.optimizer
        if callable(getattr(unwrapped, "eval", None)):
            raise ValueError(
                f"tail_average: {type(unwrapped).__name__} already averages: its eval() changes "
                "the weights; use another optimizer, or leave out tail_average"
            )
        average = ParameterAverage(model, options.rule, **options.others)
        if checkpoint is not None:
            folder = Path(checkpoint, FOLDER)
            if not self._load_average(average, folder):
                logger.warning("%s not found: averaging starts here", folder)
        self._tail_handle = (
            _EngineSteps(self, average) if self.is_deepspeed_enabled else average.attach(optimizer)
        )
        self.tail_average = average


class TailAverageTrainer(TailAverageMixin):
    """A `Trainer` that evaluates, selects and exports the tail average of its weights.

    See `TailAverageMixin`, which does the same for other kinds of Trainer.
    """


class TailAverageCallback(TrainerCallback):
    """Add `TailAverageMixin` to a Trainer whose class you cannot choose.

    Call `attach(trainer)` before `trainer.train()`. Passing the callback in `callbacks=[…]` is not
    enough: Trainer does not tell its callbacks which Trainer they belong to.

    Args:
        tail_average: As in `TailAverageMixin`.
    """

    def __init__(self, tail_average: TailAverageOption) -> None:
        self._options = _Options.of(tail_average)
        self._attached: WeakSet[Any] = WeakSet()

    def attach(self, trainer: Trainer) -> None:
        """Make this Trainer average its weights, from its next `train()` on.

        The Trainer gets a new class of the same name, derived from `TailAverageMixin` and the old
        class. It then has the attribute `tail_average`.
        """
        if isinstance(trainer, TailAverageMixin):
            raise ValueError("attach: this Trainer already averages its weights")
        replaced = [name for name in _OVERRIDDEN if name in vars(trainer)]
        if replaced:
            raise ValueError(
                f"attach: {', '.join(replaced)} was replaced on this instance of Trainer and would "
                "bypass the average; restore it, or use TailAverageMixin"
            )
        self._options.check(trainer.args.max_steps)
        kind = type(trainer)
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        trainer.__class__ = type(kind.__name__, (TailAverageMixin, kind), names)
        trainer._tail_options = self._options  # type: ignore[attr-defined]
        self._attached.add(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)  # its hook raises if training is already under way

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raise if the Trainer that calls this hook does not average."""
        for trainer in self._attached:
            if trainer.state is state and trainer.tail_average is not None:
                return
        raise RuntimeError(
            "TailAverageCallback: not attached to this Trainer when its training started; call "
            "attach(trainer) before trainer.train()"
        )

    on_step_begin = on_train_begin  # the callback may be added or attached later
