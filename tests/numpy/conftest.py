import pytest

from tailavg.numpy import compiling


@pytest.fixture
def without_numba(monkeypatch):
    """As if numba were not installed."""
    monkeypatch.setattr(compiling, "installed", lambda: False)
