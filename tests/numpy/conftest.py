import pytest

from tailavg.numpy import loops


@pytest.fixture
def without_numba(monkeypatch):
    """As if numba were not installed."""
    monkeypatch.setattr(loops, "installed", lambda: False)
