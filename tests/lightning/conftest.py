from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import python

FOLDER = Path(__file__).parent
WARNINGS = [  # Lightning's own
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:.*was called without a model. The last model of the previous `fit`",
    "ignore:.*there is no last checkpoint available",
]
PROGRAM = """
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
from tests.lightning import test_model_parallel, test_processes

test_processes.main(Path(sys.argv[1], "processes"))
test_model_parallel.main(Path(sys.argv[1], "sharded"))
"""


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    """What processes left that were all forked from a fresh one, which imports Lightning once."""
    folder = tmp_path_factory.mktemp("processes")
    for name in ("processes", "sharded"):
        (folder / name).mkdir()
    python("-W", "ignore", "-c", PROGRAM, folder, cwd=ROOT)
    return folder


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER in Path(item.path).parents:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)
