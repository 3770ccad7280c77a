"""Right solutions of every exercise get full marks, wrong ones lose what they should, and why.

A wrong one is here for a case of the hidden tests that no other one fails alone, or for a reason
that no other one is given. Behind walls, as `make grade` does it: `test_class` and `test_hostile`.
"""

import collections
import re

import book
import in_process
import pytest

SOLUTIONS = book.solutions()


def name(solution):
    return f"{solution.assignment}-{solution.exercise}-{solution.what}"


@pytest.fixture(scope="session")
def marks(request):
    """{solution: its marks} of those that this run asks for."""
    chosen = [item.callspec.params["solution"] for item in request.session.items
              if "marks" in getattr(item, "fixturenames", ())]
    return in_process.judge_all({s[:3]: (s.assignment, s.exercise, s.source) for s in chosen})


@pytest.mark.parametrize("solution", [pytest.param(s, marks=book.can_run(s.assignment))
                                      for s in SOLUTIONS], ids=name)
def test_a_solution_earns_what_the_text_says(solution, marks):
    found = marks[solution[:3]]
    assert found and all(mark.points in (0, mark.of) for mark in found), found
    lost = {mark.exercise: mark.why for mark in found if mark.points < mark.of}
    assert sorted(lost) == sorted(solution.loses), lost
    if solution.reason:
        assert re.search(solution.reason, lost[solution.loses[0]]), lost


def test_there_are_enough_of_them():
    from marking import assignment

    counts = collections.Counter((s.assignment, s.exercise, bool(s.loses)) for s in SOLUTIONS)
    exercises = [(name, e.name) for name in assignment.list_names()
                 for e in assignment.read_assignment(name).exercises]
    for exercise in exercises:
        assert counts[*exercise, False] >= 3, exercise
        assert counts[*exercise, True] >= 8, exercise
    assert set(key[:2] for key in counts) == set(exercises)
    names = [s[:3] for s in SOLUTIONS]
    assert len(set(names)) == len(names)
