"""Right solutions of every exercise get full marks, wrong ones lose what they should, and why."""

import collections
import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import tempfile
import threading
from pathlib import Path

import book
import pytest

SOLUTIONS = book.solutions()


def near():
    """`sandbox.Solution` for solutions that are known to do no harm: a thread, and no walls.

    It starts two seconds sooner, and every value crosses as it does between processes.
    """
    import sandbox
    import solution

    class Near(sandbox.Solution):
        def __init__(self, given, answer, folder):
            (read, self._write), (self._read, write) = (
                [os.fdopen(end, mode) for end, mode in zip(os.pipe(), ("rb", "wb"))]
                for _ in range(2))
            self._thread = threading.Thread(target=self._serve, args=(read, write), daemon=True)
            self._thread.start()
            self._receive()
            self._send([given, answer])
            self._receive()

        def _serve(self, read, write):
            with read, write, contextlib.suppress(EOFError):
                solution.serve(read, write, {"__name__": "__main__"})

        def _gone(self):
            return sandbox.Ended("the thread has ended")

        def _kill(self, why):
            self.ended = why

        def close(self):
            self._write.close()
            self._thread.join(60)
            self._read.close()

    return Near


def marks(solution):
    """The judge's marks for one solution; runs in a worker process. Right ones run as students' do,
    each in its own sandbox."""
    os.environ["COURSE_SIMULATE"] = "1"
    import judge
    import sandbox

    assignment = judge.read(solution.assignment)
    (exercise,) = (e for e in assignment.exercises if e.name == solution.exercise)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if solution.loses:
            patch.setattr(sandbox, "Solution", near())
        stage = sandbox.stage(Path(folder))
        return judge.judge(exercise, assignment, solution.source, stage)


@pytest.fixture(scope="session")
def judged(request):
    """Marks of every solution that is tested in this run, worked out by two processes."""
    chosen = [item.callspec.params["solution"] for item in request.session.items
              if "judged" in getattr(item, "fixturenames", ())]
    with concurrent.futures.ProcessPoolExecutor(
            2, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield {s[:3]: pool.submit(marks, s) for s in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("solution", SOLUTIONS,
                         ids=lambda s: f"{s.assignment}-{s.exercise}-{s.what}")
def test_a_solution_earns_what_it_should(solution, judged):
    found = judged[solution[:3]].result()
    lost = {mark.exercise: mark.why for mark in found if mark.points < mark.of}
    assert sorted(lost) == sorted(solution.loses), lost
    assert all(mark.points in (0, mark.of) for mark in found)
    if solution.loses:
        assert re.search(solution.reason, lost[solution.loses[0]]), lost


def test_there_are_enough_of_them(capsys):
    import judge

    counts = collections.Counter((s.assignment, s.exercise, bool(s.loses)) for s in SOLUTIONS)
    exercises = [(name, e.name) for name in judge.names() for e in judge.read(name).exercises]
    for exercise in exercises:
        assert counts[*exercise, False] >= 3, exercise
        assert counts[*exercise, True] >= 8, exercise
    right, wrong = (sum(n for key, n in counts.items() if key[2] == bad) for bad in (False, True))
    assert set(key[:2] for key in counts) == set(exercises)
    assert wrong >= 100
    with capsys.disabled():
        print(f"\n{len(exercises)} exercises: {right} right solutions, {wrong} wrong ones")


def test_descriptions_tell_solutions_apart():
    names = [s[:3] for s in SOLUTIONS]
    assert len(set(names)) == len(names)
