"""Right solutions of every exercise get full marks, wrong ones lose what they should, and why."""

import collections
import re

import book
import in_process
import pytest
import sandboxed

SOLUTIONS = book.solutions()


def some(wrong):
    return [pytest.param(s, marks=book.can_run(s.assignment))
            for s in SOLUTIONS if bool(s.loses) == wrong]


def name(solution):
    return f"{solution.assignment}-{solution.exercise}-{solution.what}"


def chosen(request, fixture):
    """The solutions that the tests of this run ask for, of those that use `fixture`."""
    return [item.callspec.params["solution"] for item in request.session.items
            if fixture in getattr(item, "fixturenames", ())]


@pytest.fixture(scope="session")
def real(request):
    """Marks of right solutions, each behind walls as a student's."""
    with sandboxed.start() as pool:
        yield {s[:3]: pool.submit(sandboxed.judge_cell, s.assignment, s.exercise, s.source)
               for s in chosen(request, "real")}
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def close(request):
    """Marks of wrong ones, which do no harm."""
    return in_process.judge_all({s[:3]: (s.assignment, s.exercise, s.source)
                           for s in chosen(request, "close")})


@pytest.mark.parametrize("solution", some(wrong=False), ids=name)
def test_a_right_solution_gets_full_marks(solution, real):
    marks, left = real[solution[:3]].result()
    assert [(m.exercise, m.points, m.why) for m in marks] == [
        (m.exercise, m.of, "") for m in marks]
    assert left == 0


@pytest.mark.parametrize("solution", some(wrong=True), ids=name)
def test_a_wrong_solution_loses_what_it_should(solution, close):
    marks = close[solution[:3]]
    assert marks and all(mark.points in (0, mark.of) for mark in marks), marks
    lost = {mark.exercise: mark.why for mark in marks if mark.points < mark.of}
    assert sorted(lost) == sorted(solution.loses), lost
    assert re.search(solution.reason, lost[solution.loses[0]]), lost


def test_there_are_enough_of_them(capsys):
    from marking import assignment

    counts = collections.Counter((s.assignment, s.exercise, bool(s.loses)) for s in SOLUTIONS)
    exercises = [(name, e.name) for name in assignment.list_names()
                 for e in assignment.read_assignment(name).exercises]
    for exercise in exercises:
        assert counts[*exercise, False] >= 3, exercise
        assert counts[*exercise, True] >= 8, exercise
    assert set(key[:2] for key in counts) == set(exercises)
    with capsys.disabled():
        print(f"\n{len(exercises)} exercises: {len(some(wrong=False))} right solutions, "
              f"{len(some(wrong=True))} wrong ones")


def test_descriptions_tell_solutions_apart():
    names = [s[:3] for s in SOLUTIONS]
    assert len(set(names)) == len(names)
