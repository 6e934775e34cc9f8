"""The tests of this folder, on the JAX backend: Keras has one backend in a process."""

import os
from pathlib import Path

from tests.support.effort import exhaustive
from tests.support.paths import ROOT
from tests.support.processes import python

DEPEND_ON_THE_BACKEND = [  # on its arrays, or on when `fit` hands the weights over
    "test_fit.py::test_weights_are_those_of_the_paper[None-AnytimeWindow(0.25, 3)]",
    "test_fit.py::test_weights_are_those_of_the_paper[cpu-Exponential(0.3)]",
    "test_fit.py::test_any_tail_is_read_with_a_window_and_with_a_decay",
    "test_fit.py::test_nothing_depends_on_offload",
    "test_fit.py::test_validation_and_the_model_after_fit_have_the_averages[0.25]",
    "test_fit.py::test_accumulated_batches_are_not_samples",
    "test_fit.py::test_steps_that_are_executed_together_are_one_sample",
    "test_fit.py::test_moving_statistics",
    "test_fit.py::test_whatever_validation_raises_the_training_weights_are_back",
    "test_fit.py::test_a_second_fit_goes_on_from_the_training_weights",
    "test_checkpoints.py::test_a_checkpoint_has_what_was_validated",
    "test_checkpoints.py::test_early_stopping_brings_back_the_best_averages",
    "test_checkpoints.py::test_a_broken_run_goes_on_to_the_bit[train-True-last]",
    "test_checkpoints.py::test_a_broken_run_goes_on_to_the_bit[epoch end-False-first]",
]


def run_on_jax(tests, cache):
    environment = os.environ | {
        "KERAS_BACKEND": "jax",
        # each model compiles the same programs: once is enough
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    return python("-m", "pytest", *options, *tests, cwd=ROOT, env=environment).stdout


def test_what_depends_on_the_backend(tmp_path):
    tests = [Path(__file__).with_name(test) for test in DEPEND_ON_THE_BACKEND]
    assert "\n16 passed" in run_on_jax(tests, tmp_path)


@exhaustive("half a minute")
def test_all_of_it(tmp_path):
    others = sorted(set(Path(__file__).parent.glob("test_*.py")) - {Path(__file__)})
    assert "skipped" not in run_on_jax(others, tmp_path)
