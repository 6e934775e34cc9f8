"""What several files of tests of `tailavg.torch` need."""

from contextlib import closing

import pytest

from tests.support.torch_processes import Groups


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory):
    """Call a function on every rank of a group of processes, which serves all tests of a file."""
    with closing(Groups(tmp_path_factory.mktemp("groups"))) as groups:
        yield groups
