"""`make test-grading`: do marks say what they should? Apart from `make test`, for its length."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "notebooks/assignments"))
