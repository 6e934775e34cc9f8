import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

SUPPORT = Path(__file__).parent / "support"  # what the tests share
sys.path.insert(0, str(SUPPORT))
pytest.register_assert_rewrite(*(path.stem for path in SUPPORT.glob("*.py")))

# before JAX starts: several devices, to shard arrays over
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "torch")  # tests/keras/test_jax.py has the other one

settings.register_profile(
    "tailavg", derandomize=True, database=None, deadline=None, max_examples=50, print_blob=False
)
settings.load_profile("tailavg")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job
    signal.signal(signal.SIGINT, signal.default_int_handler)
