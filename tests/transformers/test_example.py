"""The example runs, in its reduced form, and shows what it claims to show."""

import re

import pytest

from tests.support.programs import example


@pytest.mark.filterwarnings("ignore")  # the packages of others
def test_hugging_face(tmp_path):
    printed = example("hugging_face.py", "--quick", "--folder", tmp_path / "new")
    perfect = float(re.search(r"the chain itself has (.*)", printed)[1])
    rows = re.findall(r"^step +(\d+)   (\S+)   (\S+)$", printed, re.MULTILINE)
    assert [int(step) for step, *_ in rows] == [50, 100, 150, 200, 150, 200]
    assert rows[4:] == rows[2:4]  # the resumed run is the same
    _, raw, averaged = rows[-1]
    assert perfect - 0.01 < float(averaged) < float(raw)
    assert f"averaged has a loss of {averaged}\n" in printed
    assert "the averaged models are equal to the bit" in printed
