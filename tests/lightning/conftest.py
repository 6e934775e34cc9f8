from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
WARNINGS = [  # Lightning's own
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:.*does not have many workers",
    "ignore:You defined a `validation_step` but have no `val_dataloader`",
    "ignore:Checkpoint directory .* exists and is not empty",
    "ignore:.*was called without a model. The last model of the previous `fit`",
    "ignore:.*there is no last checkpoint available",
]


def pytest_collection_modifyitems(items):
    for item in items:
        if FOLDER in Path(item.path).parents:
            for warning in WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)
