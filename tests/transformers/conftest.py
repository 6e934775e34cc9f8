from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    """Run these tests in one process, which imports transformers once."""
    for item in items:
        if FOLDER in Path(item.path).parents:
            item.add_marker(pytest.mark.xdist_group("transformers"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Models this small gain nothing from more, and the bits of sums depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
