"""`make test-grading`: do marks say what they should? Apart from `make test`, for its length."""

import sys
from pathlib import Path

ASSIGNMENTS = Path(__file__).resolve().parents[2] / "notebooks/assignments"
sys.path[:0] = [str(ASSIGNMENTS), str(ASSIGNMENTS / "marking")]  # solution.py finds `channel`
