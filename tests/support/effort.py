"""How much to try. `make test` takes a sample; `make test-all` sets TAILAVG_TEST_ALL and tries all.

Mark a test that is too slow for `make test` with `exhaustive("why")`. Where a test has a number of
cases to choose, write `some(5, 300)`.
"""

import os

import pytest

EVERYTHING = os.environ.get("TAILAVG_TEST_ALL", "0") != "0"


def some(few, every):
    """Return `few` in `make test`, and `every` in `make test-all`."""
    return every if EVERYTHING else few


def exhaustive(reason: str):
    """Leave a test to `make test-all`, for this reason."""
    return pytest.mark.exhaustive(reason=reason)
