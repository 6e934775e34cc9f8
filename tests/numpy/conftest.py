import pytest

from tailavg.numpy import kernel


@pytest.fixture
def without_numba(monkeypatch):
    """As if numba were not installed."""
    monkeypatch.setattr(kernel, "installed", lambda: False)


@pytest.fixture
def plain_loops(monkeypatch):
    """Scan with the loops that numba would compile, as plain Python."""
    monkeypatch.setattr(kernel, "installed", lambda: True)
    monkeypatch.setattr(kernel, "LONG", 10**18)
    monkeypatch.setattr(kernel, "SHORT", 10**18)


@pytest.fixture
def compiled(monkeypatch):
    """Scan with compiled loops from the first number on."""
    pytest.importorskip("numba", reason="numba is not installed: there are no compiled loops")
    monkeypatch.setattr(kernel, "LONG", 0)
    monkeypatch.setattr(kernel, "SHORT", 0)


@pytest.fixture(params=["compiled", "without_numba"])
def scanner(request):
    """How samples are scanned."""
    request.getfixturevalue(request.param)
    return request.param
