"""Settings of every test run: see CONTRIBUTING.md, "Tests"."""

import os
import signal

import pytest
from hypothesis import settings

from tests.support.effort import EVERYTHING

pytest_plugins = ["tests.support.durations"]

# Programs of the docs run without these: see tests/support/processes.py.
os.environ["XLA_FLAGS"] = (  # several devices, to shard arrays over
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "torch")  # tests/keras/test_jax.py has the other one

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


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Leave out exhaustive tests unless all are wanted; keep the tests of a file together."""
    if not EVERYTHING:
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.name + item.path.parent.name))
    # the tests of a slow group start first, so that no process works alone at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
