"""Judges solution cells as `make grade` does, each behind walls, two at a time.

For worker processes: the judge ends whatever came of its own process, so it must not be pytest's.
"""

import concurrent.futures
import multiprocessing
import tempfile
from pathlib import Path

import conftest  # noqa: F401  where the marking lies


def judge_cell(name, exercise, answer, limits=None, bare=False, earlier=()):
    """The marks of one solution cell. bare: as on a machine without bubblewrap. earlier: pairs
    (exercise, source) of the student's cells above it."""
    from marking import assignment, judge, process

    process.adopt_orphans()
    if bare:
        process.find_bubblewrap = lambda: None
    read = assignment.read_assignment(name)
    exercises = {e.name: e for e in read.exercises}
    cells = [judge.Cell(key, source, exercises[key].given)
             for key, source in (*earlier, (exercise, answer))]
    if limits:
        process.Process.__init__.__defaults__ = (), process.Limits(**limits), 1
    with tempfile.TemporaryDirectory() as folder:
        work_folder = process.make_work_folder(Path(folder), judge.HANDED_OUT)
        marks = judge.judge_answer(read, exercises[exercise], cells, [],
                                   assignment.load_tests(name), work_folder, [process.REPOSITORY])
    return marks, len(process.find_children())


def start(workers=2):
    return concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"))
