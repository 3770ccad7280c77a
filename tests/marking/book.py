"""Reads `solutions/psN.py`: right and wrong solutions of each exercise, and what each must earn.

    # %% right even: slices of NumPy
    # %% wrong even loses even-care: shards are windows onto the batch | changed the batch

After the colon a description; after the bar, for wrong ones, a regular expression for the reason
that a student is shown. The code up to the next such line is the solution cell.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from marking import assignment

HEADER = re.compile(
    r"# %% (?P<kind>right|wrong) (?P<exercise>[\w-]+)(?: loses (?P<loses>[\w-]+(?:, [\w-]+)*))?: "
    r"(?P<what>[^|]*?)(?: \| (?P<reason>.*))?")


class Solution(NamedTuple):
    assignment: str
    exercise: str
    what: str
    source: str
    loses: list      # grade_ids of the tests that it must fail; it passes all others
    reason: str      # None where nothing is lost


def can_run(name):
    """What skips a test of an assignment whose packages are missing here."""
    missing = assignment.find_missing(assignment.read_assignment(name))
    return [pytest.mark.skip(reason=f"{name}: {missing}")] if missing else []


def names():
    """All assignments, for `pytest.mark.parametrize`."""
    return [pytest.param(name, marks=can_run(name)) for name in assignment.list_names()]


def solutions():
    """All of them, in order. Raises ValueError where a header isn't as above."""
    found = []
    for path in sorted((Path(__file__).parent / "solutions").glob("*.py")):
        for piece in re.split(r"^(?=# %%)", path.read_text(), flags=re.MULTILINE)[1:]:
            header, _, source = piece.partition("\n")
            match = HEADER.fullmatch(header)
            if not match or (match["kind"] == "wrong") != bool(match["loses"] and match["reason"]):
                raise ValueError(f"{path.name}: {header}")
            loses = match["loses"].split(", ") if match["loses"] else []
            found.append(Solution(path.stem, match["exercise"], match["what"], source, loses,
                                  match["reason"]))
    return found
