"""Resumed runs are the unbroken one to the bit."""

import shutil

import pytest

from tests.support.hugging_face_training import KINDS, RESUMED_RULE, left, resumable


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    whole = resumable("trainer", folder)
    whole.train()
    whole.save_model(str(folder / "export"))
    return folder, [log for log in whole.state.log_history if "eval_one_loss" in log]


def losses(logs):
    return [value for log in logs for name, value in log.items() if name.endswith("_loss")]


@pytest.mark.parametrize(
    ("kind", "offload"), list(zip(KINDS, [None, "files"], strict=True)), ids=KINDS
)
def test_from_any_folder(kind, offload, unbroken, tmp_path):
    folder, logs = unbroken
    shutil.copytree(folder / "checkpoint-8", tmp_path / "from")
    options = RESUMED_RULE | {"offload": offload and str(tmp_path / "means")}
    resumed = resumable(kind, tmp_path / "to", seed=5, tail_average=options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "from"))
    assert resumed.tail_average.count == 6
    resumed.save_model(str(tmp_path / "to" / "export"))
    expected, found = left(folder), left(tmp_path / "to")
    kept = {name for name in expected if name.startswith(("checkpoint-12", "export"))}
    assert kept == found.keys()
    assert "checkpoint-12/tail_average" in kept
    assert [name for name in kept if expected[name] != found[name]] == []
    again = [log for log in resumed.state.log_history if "eval_one_loss" in log]
    assert losses(again) == losses(logs)


def test_after_an_exception_in_an_evaluation(unbroken, tmp_path):
    run, fails = resumable("trainer", tmp_path), iter([False] * 5 + [True])
    handle = run.model.register_forward_pre_hook(
        lambda model, _: None if model.training or not next(fails, False) else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        run.train()
    assert run.state.global_step == 6
    handle.remove()
    run.train(resume_from_checkpoint=True)  # the same Trainer
    run.save_model(str(tmp_path / "export"))
    assert left(tmp_path) == left(unbroken[0])


def test_the_average_is_in_a_checkpoint_before_all_else(tmp_path):
    stopped = resumable("trainer", tmp_path)
    stopped.model.save_pretrained = lambda *_, **__: 1 / 0
    with pytest.raises(ZeroDivisionError):
        stopped.train()
    assert [path.name for path in (tmp_path / "checkpoint-4").iterdir()] == ["tail_average"]


def test_a_checkpoint_without_an_average(tmp_path, caplog):
    run = resumable("trainer", tmp_path, max_steps=4)
    run.train()
    shutil.rmtree(tmp_path / "checkpoint-4" / "tail_average")
    run = resumable("trainer", tmp_path, max_steps=8)
    run.train(resume_from_checkpoint=True)
    assert "not found: averaging starts here" in caplog.text
    assert run.tail_average.count == 2
    shutil.rmtree(tmp_path / "checkpoint-8" / "tail_average")
    run.state.best_model_checkpoint = str(tmp_path / "checkpoint-8")
    run._load_best_model()
    assert "not found: the best model is not averaged" in caplog.text
    assert run.tail_average is None


def test_a_damaged_or_a_different_average(tmp_path):
    resumable("trainer", tmp_path, max_steps=4).train()
    other = resumable("trainer", tmp_path, tail_average=0.5)
    with pytest.raises(ValueError, match="AnyTail"):
        other.train(resume_from_checkpoint=True)
    path = tmp_path / "checkpoint-4" / "tail_average" / "open.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"open\.safetensors"):
        resumable("trainer", tmp_path).train(resume_from_checkpoint=True)
