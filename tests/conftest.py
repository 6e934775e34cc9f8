import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # for `model` and `cases`

settings.register_profile(
    "tailavg", derandomize=True, database=None, deadline=None, max_examples=50, print_blob=False
)
settings.load_profile("tailavg")
