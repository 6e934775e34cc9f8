import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small gain nothing from more, and the bits of sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
