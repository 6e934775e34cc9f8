"""Tail averages in Hugging Face's `Trainer`.

No event of a Trainer comes before it evaluates or saves, so a callback cannot swap weights in time.
Four methods are overridden instead: the one that prepares training, and those that evaluate, save
and load the best model. The mixin has them; the callback gives them to a Trainer that exists.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.hooks import RemovableHandle

from tailavg.core.decay import Reading
from tailavg.core.extras import needs
from tailavg.core.rules import Rule, as_rule, window_of
from tailavg.core.windows import AnyWindow
from tailavg.torch import ParameterAverage

with needs("transformers"):
    import transformers
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import EvalLoopOutput

__all__ = ["FOLDER", "TailAverageCallback", "TailAverageMixin", "TailAverageTrainer"]

FOLDER = "tail_average"
"""Where the average is in a checkpoint."""

TailAverageOption = AnyWindow | Rule | Mapping[str, Any]

_OVERRIDDEN = ("_prepare_for_training", "evaluation_loop", "save_model", "_load_best_model")
_REFUSED = {
    "is_deepspeed_enabled": "DeepSpeed",
    "is_fsdp_enabled": "FSDP",
    "is_fsdp_xla_enabled": "FSDP",
    "is_distributed_loading_by_transformers": "a model that is sharded when it is loaded",
}

logger = logging.getLogger(__name__)

for _name in _OVERRIDDEN:
    if not hasattr(Trainer, _name):
        raise ImportError(
            f"tailavg.transformers: expected a Trainer with the method {_name}, which transformers "
            f"5.22 has, got transformers {transformers.__version__}; install another version, or "
            "use tailavg.torch.ParameterAverage"
        )


class _Options(NamedTuple):
    rule: Rule
    window: Reading | None
    others: dict[str, Any]

    @classmethod
    def of(cls, tail_average: TailAverageOption) -> _Options:
        if not isinstance(tail_average, Mapping):
            tail_average = {"rule": tail_average}
        others = dict(tail_average)
        known = [*inspect.signature(ParameterAverage).parameters, "window"]
        known.remove("model")  # the Trainer has it
        if "rule" not in others or not set(others) <= set(known):
            raise ValueError(
                'tail_average: expected a number, a rule, or a dict with a "rule" and any of '
                f"{known[1:]}, got {tail_average!r}"
            )
        found = cls(as_rule(others.pop("rule")), others.pop("window", None), others)
        window_of(found.rule, found.window, 1)
        return found

    def check(self, steps: int) -> None:
        """Raise now what a read after so many steps would raise: an `AnyTail` has a shortest."""
        counted = (steps - self.others.get("start_after", 0)) // self.others.get("update_every", 1)
        window_of(self.rule, self.window, max(1, counted))


class TailAverageMixin(Trainer):
    """A tail average for any kind of Trainer: `class MyTrainer(TailAverageMixin, SFTTrainer)`.

    Training goes on as ever. Evaluations, predictions, `save_model()` and the best model have the
    averaged weights. A checkpoint has the training weights where they always are, and the state of
    the average in its folder `tail_average`, from which `resume_from_checkpoint` goes on.

    Args:
        *args: Those of the Trainer.
        tail_average: A number, a window or a rule; or a dict with a `"rule"`, the `"window"` with
            which an `AnyTail` is read, and other options of `ParameterAverage`.
        **kwargs: Those of the Trainer.
    """

    tail_average: ParameterAverage | None = None
    """The average; None before training. Each `train()` makes a new one."""

    _tail_options: _Options
    _tail_handle: RemovableHandle | None = None

    def __init__(self, *args: Any, tail_average: TailAverageOption, **kwargs: Any) -> None:
        self._tail_options = _Options.of(tail_average)
        super().__init__(*args, **kwargs)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        self._stop_averaging()
        prepare: Any = super()._prepare_for_training
        prepared = prepare(max_steps, train_dataloader, resume_from_checkpoint)
        self._start_averaging(resume_from_checkpoint)
        return prepared

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate or predict with the averaged weights, or before the first update as they are."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the averaged model. A checkpoint gets the training weights, and the average."""
        # the Trainer's own calls are of checkpoints, but for that of push_to_hub, without a folder
        if not (_internal_call and output_dir is not None):
            with self._averaged():
                super().save_model(output_dir, _internal_call)
            return
        if self.tail_average is not None and self.args.should_save:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            self.tail_average.save(Path(output_dir, FOLDER))  # first: no checkpoint is without it
        super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        average = self.tail_average
        folder = Path(str(self.state.best_model_checkpoint), FOLDER)
        if average is None or not folder.is_dir():
            logger.warning("%s: no average there, so the best model is not averaged", folder)
            self._stop_averaging()
            return
        average.load(folder)
        if average.count:
            average.copy_to(window=self._tail_options.window)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        average = self.tail_average
        if average is None or not average.count or average.swapped:
            yield
            return
        with average.average_parameters(self._tail_options.window):
            yield

    def _stop_averaging(self) -> None:
        if self._tail_handle is not None:
            self._tail_handle.remove()
        self._tail_handle = self.tail_average = None

    def _start_averaging(self, checkpoint: str | None) -> None:
        for flag, name in _REFUSED.items():
            if getattr(self, flag, False):
                raise ValueError(
                    f"tail_average: expected whole parameters in each process, got {name}; "
                    "average with tailavg.torch.ParameterAverage in a loop of your own"
                )
        options = self._tail_options
        model: Any = self.model
        optimizer: Any = self.optimizer
        options.check(self.state.max_steps)
        inner = optimizer
        while hasattr(inner, "optimizer"):  # accelerate's wrapper, which has an eval() of its own
            inner = inner.optimizer
        if callable(getattr(inner, "eval", None)):
            raise ValueError(
                "tail_average: expected an optimizer that leaves the weights alone in evaluations, "
                f"got {type(inner).__name__}, whose eval() changes them; it averages by itself"
            )
        average = ParameterAverage(model, options.rule, **options.others)
        if checkpoint is not None:
            folder = Path(checkpoint, FOLDER)
            if folder.is_dir():
                average.load(folder)
            else:
                logger.warning("%s: no average there, so averaging starts here", folder)
        self._tail_handle = average.attach(optimizer)
        self.tail_average = average


class TailAverageTrainer(TailAverageMixin):
    """A `Trainer` that evaluates, selects and exports the tail average of its weights.

    See `TailAverageMixin`, which is the same for other kinds of Trainer.
    """


class TailAverageCallback(TrainerCallback):
    """`TailAverageMixin` for a Trainer whose class you cannot choose.

    Pass it in `callbacks=[…]`, or call `attach(trainer)`, or `trainer.add_callback`. The Trainer is
    then as if its class had the mixin, with a `trainer.tail_average`.

    Args:
        tail_average: As in `TailAverageMixin`.
    """

    def __init__(self, tail_average: TailAverageOption) -> None:
        self._options = _Options.of(tail_average)
        self._attached = False

    def attach(self, trainer: Trainer) -> None:
        """Let this Trainer average; before it trains."""
        if isinstance(trainer, TailAverageMixin):
            raise ValueError("attach: expected a Trainer without an average, got one that has one")
        own = [name for name in _OVERRIDDEN if name in vars(trainer)]
        if own:
            raise ValueError(
                f"attach: expected a Trainer whose methods are those of its class, got one with "
                f"its own {', '.join(own)}; remove them, or use TailAverageMixin"
            )
        kind = type(trainer)
        names = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        trainer.__class__ = type(kind.__name__, (TailAverageMixin, kind), names)
        trainer._tail_options = self._options  # type: ignore[attr-defined]
        self._attached = True

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Attach to the Trainer that has this among its `callbacks`."""
        self.attach(self._caller()[0])

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Attach to the Trainer to which this was added later."""
        trainer, names = self._caller()
        if isinstance(trainer, TailAverageMixin) and trainer._tail_options is self._options:
            return
        self.attach(trainer)
        if "resume_from_checkpoint" not in names:
            raise RuntimeError(
                "TailAverageCallback: expected a Trainer whose training loop knows whether it "
                "resumes, got one that does not; call attach(trainer) before training"
            )
        trainer._start_averaging(names["resume_from_checkpoint"])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Refuse to begin in the middle."""
        if not self._attached:
            raise RuntimeError(
                "TailAverageCallback: expected to be added before training, got a Trainer that "
                "trains; pass it in callbacks=[…] or call attach(trainer)"
            )

    def _caller(self) -> tuple[Any, Mapping[str, Any]]:
        """The Trainer whose event this is, which events are not told, and its local names."""
        frame = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, Trainer) and self in found.callback_handler.callbacks:
                return found, frame.f_locals
            frame = frame.f_back  # type: ignore[assignment]
        raise RuntimeError(
            "TailAverageCallback: expected a Trainer that calls it, got none; call attach(trainer)"
        )
