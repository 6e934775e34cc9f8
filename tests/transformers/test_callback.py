"""The callback becomes part of the Trainer that it is added to, or says why it cannot."""

import pytest

from tests.support.hugging_face_training import (
    TailAverageCallback,
    TailAverageTrainer,
    Trainer,
    TrainerCallback,
    arguments,
    make,
    tiny,
    tokens,
)


class Late(TrainerCallback):
    """Adds a callback in the middle of the training."""

    def on_step_end(self, *_, **__):
        self.trainer.add_callback(TailAverageCallback(0.5))


def plain(folder, *callbacks, kind=Trainer, **options):
    args = arguments(folder, max_steps=2)
    return kind(model=tiny(), args=args, train_dataset=tokens(), callbacks=[*callbacks], **options)


def test_the_class_keeps_its_name(tmp_path):
    class Mine(Trainer):
        """Mine."""

    trainer = plain(tmp_path, kind=Mine)
    TailAverageCallback(0.5).attach(trainer)
    assert isinstance(trainer, Mine)
    kind = type(trainer)
    assert (kind.__name__, kind.__doc__, kind.__module__) == ("Mine", "Mine.", __name__)
    trainer.train()
    assert trainer.tail_average.count == 2


def test_one_average_for_each_trainer(tmp_path):
    with pytest.raises(ValueError, match="without an average, got one that has one"):
        plain(tmp_path, TailAverageCallback(0.5), TailAverageCallback(0.5))
    with pytest.raises(ValueError, match="without an average, got one that has one"):
        plain(tmp_path, TailAverageCallback(0.5), kind=TailAverageTrainer, tail_average=0.5)
    trainer = plain(tmp_path, TailAverageCallback(0.5))
    trainer.add_callback(TailAverageCallback(0.5))
    with pytest.raises(ValueError, match="without an average, got one that has one"):
        trainer.train()


def test_one_callback_for_two_trainers(tmp_path):
    callback = TailAverageCallback(0.5)
    one, other = (plain(tmp_path, callback) for _ in range(2))
    one.train()
    other.train()
    assert one.tail_average.count == other.tail_average.count == 2
    assert one.tail_average is not other.tail_average


def test_methods_of_the_instance_would_come_first(tmp_path):
    trainer = plain(tmp_path)
    trainer.evaluation_loop = trainer.evaluation_loop
    with pytest.raises(ValueError, match="with its own evaluation_loop"):
        TailAverageCallback(0.5).attach(trainer)


def test_in_the_middle_it_is_too_late(tmp_path):
    late = Late()
    late.trainer = trainer = plain(tmp_path, late)
    with pytest.raises(RuntimeError, match="expected to be added before training"):
        trainer.train()


def test_without_a_trainer(tmp_path):
    with pytest.raises(RuntimeError, match="expected a Trainer that calls it, got none"):
        TailAverageCallback(0.5).on_train_begin(None, None, None)


def test_another_loop_must_say_whether_it_resumes(tmp_path):
    class Other(Trainer):
        def begin(self):
            self.callback_handler.on_train_begin(self.args, self.state, self.control)

    trainer = plain(tmp_path, kind=Other)
    trainer.add_callback(TailAverageCallback(0.5))
    with pytest.raises(RuntimeError, match="call attach\\(trainer\\) before training"):
        trainer.begin()
    assert make("callback", tiny(), arguments(tmp_path), 0.5).tail_average is None
