"""Reads `solutions/psN.py`: right and wrong solutions of each exercise, and what each must earn.

    # %% right even: slices of NumPy
    # %% wrong even loses even-care: shards are windows onto the batch | changed the batch

After the colon a description; after the bar, where it matters, a regular expression for the reason
that a student is shown. The code up to the next such line is the solution cell. What differs by a
line or two is told by these lines, beside another solution of the exercise that stands above it:

    # %% wrong even loses even-values: the last example is lost | has shape
    # from slices of NumPy
    #= the line above the change, where the lines that go don't say the place or there are none
    #- a line that goes
    #+ a line that comes

Empty lines and comments of that other solution are left out first. A change stands at the first
such place below the one before.
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
    reason: str      # "" where any will do


def change(base, lines):
    """The source `base` with the changes that `lines` tell. Raises ValueError where it can't be."""
    base = [line for line in base.splitlines() if line.strip() and line.strip()[0] != "#"]
    result, place = [], 0
    for told in re.findall(r"((?:^#=.*\n)*)((?:^#-.*\n)*)((?:^#\+.*\n)*)", lines, re.MULTILINE):
        stay, go, come = ([line[3:] for line in part.splitlines()] for part in told)
        block = stay + go
        while block and base[place:place + len(block)] != block:
            if place >= len(base):
                raise ValueError(f"not there: {block}")
            result.append(base[place])
            place += 1
        result += stay + come
        place += len(block)
    return "\n".join(result + base[place:]) + "\n"


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
            if not match or (match["kind"] == "wrong") != bool(match["loses"]):
                raise ValueError(f"{path.name}: {header}")
            if source.startswith("# from "):
                name, _, lines = source.removeprefix("# from ").partition("\n")
                (source,) = [change(one.source, lines) for one in found
                             if one[:3] == (path.stem, match["exercise"], name)]
            loses = match["loses"].split(", ") if match["loses"] else []
            found.append(Solution(path.stem, match["exercise"], match["what"], source, loses,
                                  match["reason"] or ""))
    return found
