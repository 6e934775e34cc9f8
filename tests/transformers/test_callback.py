"""The callback gives its mixin to the Trainer that it is attached to, or says why it cannot."""

import pytest

from tailavg import AnyTail
from tests.support.hugging_face_training import (
    TailAverageCallback,
    TailAverageTrainer,
    Trainer,
    TrainerCallback,
    arguments,
    tiny,
    tokens,
)


class Late(TrainerCallback):
    """Calls a function with the Trainer after the first step."""

    def __init__(self, call):
        self.call = call

    def on_step_end(self, *_, **__):
        self.call(self.trainer)


def plain(folder, *callbacks, kind=Trainer, **options):
    args = arguments(folder, max_steps=2)
    return kind(model=tiny(), args=args, train_dataset=tokens(), callbacks=[*callbacks], **options)


def assert_refuses_to_train(trainer, steps=0):
    with pytest.raises(RuntimeError, match=r"not attached .* call attach\(trainer\) before"):
        trainer.train()
    assert trainer.state.global_step == steps


def test_the_class_keeps_its_name(tmp_path):
    class Mine(Trainer):
        """Mine."""

    trainer = plain(tmp_path, kind=Mine)
    TailAverageCallback(0.5).attach(trainer)
    assert isinstance(trainer, Mine)
    kind = type(trainer)
    assert (kind.__name__, kind.__doc__, kind.__module__) == ("Mine", "Mine.", __name__)
    assert trainer.tail_average is None
    trainer.train()
    assert trainer.tail_average.count == 2


def test_a_callback_that_is_not_attached(tmp_path):
    assert_refuses_to_train(plain(tmp_path, TailAverageCallback(0.5)))
    trainer = plain(tmp_path)
    trainer.add_callback(TailAverageCallback(0.5))
    assert_refuses_to_train(trainer)
    mixed = plain(tmp_path, TailAverageCallback(0.5), kind=TailAverageTrainer, tail_average=0.5)
    assert_refuses_to_train(mixed)


def test_one_average_for_each_trainer(tmp_path):
    trainer = plain(tmp_path)
    TailAverageCallback(0.5).attach(trainer)
    for averaging in (trainer, plain(tmp_path, kind=TailAverageTrainer, tail_average=0.5)):
        with pytest.raises(ValueError, match="already averages"):
            TailAverageCallback(0.5).attach(averaging)


def test_a_window_that_is_too_short_for_the_run_is_refused_and_nothing_changes(tmp_path):
    trainer = plain(tmp_path)
    kind = type(trainer)
    with pytest.raises(ValueError, match="window: 1 is too short for the 2 counted steps"):
        TailAverageCallback({"rule": AnyTail(6, 0.9), "window": 1}).attach(trainer)
    assert type(trainer) is kind


def test_one_callback_for_two_trainers(tmp_path):
    callback = TailAverageCallback(0.5)
    one, other, third = (plain(tmp_path, callback) for _ in range(3))
    callback.attach(one)
    callback.attach(other)
    for trainer in (one, other):
        trainer.train()
        assert trainer.tail_average.count == 2
        assert trainer.callback_handler.callbacks.count(callback) == 1
    assert one.tail_average is not other.tail_average
    assert_refuses_to_train(third)


def test_methods_of_the_instance_would_come_first(tmp_path):
    trainer = plain(tmp_path)
    trainer.evaluation_loop = trainer.evaluation_loop
    with pytest.raises(ValueError, match="evaluation_loop was replaced on this instance"):
        TailAverageCallback(0.5).attach(trainer)


@pytest.mark.parametrize("add", [Trainer.add_callback, lambda trainer, c: c.attach(trainer)])
def test_in_the_middle_it_is_too_late(add, tmp_path):
    late = Late(lambda trainer: add(trainer, TailAverageCallback(0.5)))
    late.trainer = plain(tmp_path, late)
    assert_refuses_to_train(late.trainer, steps=1)
