"""Settings of every test run: see CONTRIBUTING.md, "Tests"."""

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.effort import EVERYTHING, some
from tests.support.model import weight_matrix

pytest_plugins = ["tests.support.durations"]

# Programs of the docs run without these: see tests/support/processes.py.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8",  # several devices, to shard arrays over
    # The older code generator takes a third less CPU time, and modules in one piece a seventh less.
    # `make test-all` compiles as users do.
    some("--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1", ""),
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *XLA_FLAGS))
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "torch")  # tests/keras/test_jax.py has the other one

# These have one Spark, one browser, one fresh process with Keras or with Lightning.
TOGETHER = ("tests/spark", "tests/site", "tests/keras", "tests/lightning")

MEMORY = 1.2e9  # bytes; a process that has imported every framework takes 1 GB


@pytest.fixture(scope="module", autouse=True)
def release_memory():
    """Give memory back after a file: the compiled programs of JAX, and what glibc keeps."""
    yield
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MEMORY:
        if "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        weight_matrix.cache_clear()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)


settings.register_profile(
    "tailavg",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=200 if EVERYTHING else 30,
    print_blob=False,
)
settings.load_profile("tailavg")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    """Leave out exhaustive tests, unless all are wanted."""
    if not EVERYTHING:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    # slow tests start first, so that no process works alone at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run the tests of a file, or of a folder in `TOGETHER`, in one process and in order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            path = nodeid.partition("::")[0]
            folder = path.rpartition("/")[0]
            return folder if folder in TOGETHER else path

    return ByFile(config, log)
