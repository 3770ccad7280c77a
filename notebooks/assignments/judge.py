"""Judges solutions: runs an assignment's tests, hidden ones too, on what solutions return.

The tests run here and the solutions elsewhere (`sandbox.Solution`). To a test, a student's
function looks like any other: `split(batch, 3)` sends the arguments over and hands back what
comes, arrays on their devices, views of one another where they were, arguments changed where they
were changed. So the same cells are tests in a notebook too, where everything is in one process.

An assignment is a source in `source/`, with tags and a short form of nbgrader's metadata:

    tags=["given"]      code that both sides need: imports, data
    tags=["driver"]     functions that call the student's, given too; called in its process
    nbgrader={"grade_id": "shards", "solution": true}     one exercise: its solution cell
    nbgrader={"grade_id": "shards-even", "points": 2}     tests of the solution before it
    nbgrader={"grade_id": "why", "points": 2, "solution": true}   (Markdown) read by a teacher

Other code cells only show something, and are not run for marks.

    python judge.py ps1 some/ps1.ipynb      judges one submission and prints it all as JSON
"""

import ast
import contextlib
import ctypes
import functools
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jupytext
import nbformat
import psutil

import sandbox

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "source"
LARGEST = 20 * 2**20          # bytes of a submission
PR_SET_CHILD_SUBREAPER = 36   # linux/prctl.h


class Test(NamedTuple):
    grade_id: str
    points: float
    source: str


class Exercise(NamedTuple):
    """One solution cell: its grade_id, model answer, the functions it defines, its tests."""

    name: str
    answer: str
    functions: list
    tests: list


class Assignment(NamedTuple):
    name: str
    given: list        # sources of cells that both sides run
    driven: list       # the same, with the drivers: what the solution's side runs
    drivers: list      # names of functions
    exercises: list
    manual: list       # (grade_id, points)


class Mark(NamedTuple):
    exercise: str
    points: float
    of: float
    why: str           # "" where nothing is missing


def names():
    """The assignments that there are: ["ps1", ...]."""
    return sorted(path.stem for path in SOURCES.glob("*/*.py"))


def notebook(name):
    """An assignment's source as the notebook that nbgrader knows."""
    content = jupytext.read(SOURCES / name / f"{name}.py", fmt="py:percent")
    content.metadata = nbformat.from_dict({"kernelspec": {
        "display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}})
    content.nbformat, content.nbformat_minor = 4, 5
    for number, cell in enumerate(content.cells):
        cell.id = f"{name}-{number}"
        if "nbgrader" in cell.metadata:
            short = cell.metadata["nbgrader"]
            graded = "points" in short
            cell.metadata["nbgrader"] = {
                "schema_version": 3, "grade": graded, "solution": False, "task": False,
                "locked": graded and not short.get("solution", False),
                "cell_type": cell.cell_type, **short}
    return content


@functools.cache
def read(name):
    """The `Assignment` of that name."""
    given, driven, drivers, exercises, manual = [], [], [], [], []
    for cell in notebook(name).cells:
        tags, meta = cell.metadata.get("tags", []), cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown":
            if "points" in meta:
                manual.append((meta["grade_id"], meta["points"]))
        elif "given" in tags or "driver" in tags:
            driven.append(cell.source)
            if "driver" in tags:
                drivers += _functions(cell.source)
            else:
                given.append(cell.source)
        elif meta.get("solution"):
            exercises.append(Exercise(meta["grade_id"], cell.source, _functions(cell.source), []))
        elif "points" in meta:
            exercises[-1].tests.append(Test(meta["grade_id"], meta["points"], cell.source))
    return Assignment(name, given, driven, drivers, exercises, manual)


def _functions(source):
    return [node.name for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def judge(exercise, assignment, answer, stage):
    """Marks for one exercise, one a test cell, of the solution cell `answer`.

    answer: its source, or None where the submission has none. Raises RuntimeError where it
    can't be judged, which is no student's fault.
    """
    if answer is None:
        return [Mark(t.grade_id, 0, t.points, f"the solution cell {exercise.name!r} is missing")
                for t in exercise.tests]
    with sandbox.Solution(assignment.driven, answer, stage) as solution:
        return [_try(test, assignment, exercise, solution) for test in exercise.tests]


def _try(test, assignment, exercise, solution):
    namespace = {"__name__": "judge"}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in assignment.given:
            exec(compile(cell, "<given>", "exec"), namespace)
        for name in exercise.functions + assignment.drivers:
            namespace[name] = functools.partial(_call, solution, name)
        try:
            exec(compile(test.source, f"<{test.grade_id}>", "exec"), namespace)
        except Exception as error:
            return Mark(test.grade_id, 0, test.points, _why(error))
    return Mark(test.grade_id, test.points, test.points, "")


def _call(solution, name, /, *args, **kwargs):
    return solution.call(name, args, kwargs)


def _why(error):
    text = " ".join(str(error).split())
    if isinstance(error, AssertionError) and text:
        return text[:300]
    if isinstance(error, sandbox.Ended):
        return f"stopped: {text}"
    return f"{type(error).__name__}: {text}"[:300]


class Refused(Exception):
    """A submission that can't be read; nothing in it counts."""


def answers(path):
    """{grade_id: source} of the cells in a submission that students fill in.

    Nothing else of a submission is looked at: not its tests, not its other cells, not its
    outputs. Raises Refused where the file is no notebook.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise Refused(f"the file is larger than {LARGEST // 2**20} MiB")
        content = nbformat.read(path, as_version=4)
        found = {}
        for cell in content.cells:
            meta = cell.metadata.get("nbgrader", {})
            if meta.get("solution") and isinstance(meta.get("grade_id"), str):
                found.setdefault(meta["grade_id"], []).append(str(cell.source))
    except OSError as error:
        raise Refused(f"the file can't be read: {error.strerror}") from error
    except Refused:
        raise
    except Exception as error:  # whatever is wrong with it
        raise Refused(f"not a notebook: {type(error).__name__}: {error}"[:200]) from error
    doubled = [name for name, sources in found.items() if len(set(sources)) > 1]
    if doubled:
        raise Refused(f"there are two different solution cells {doubled[0]!r}; leave one")
    return {name: sources[0] for name, sources in found.items()}


def submission(name, path):
    """Judge one submission: {"answers": {grade_id: source}, "marks": [Mark, ...]}."""
    assignment = read(name)
    try:
        found, refused = answers(path), None
    except Refused as error:
        found, refused = {}, str(error)
    marks = []
    with tempfile.TemporaryDirectory(prefix="judge-") as folder:
        stage = sandbox.stage(Path(folder))
        for exercise in assignment.exercises:
            if refused:
                marks += [Mark(t.grade_id, 0, t.points, refused) for t in exercise.tests]
            else:
                marks += judge(exercise, assignment, found.get(exercise.name), stage)
    return {"answers": found, "marks": marks}


def main(name, path):
    # A process whose parent ends becomes this one's child, so that it can be found and ended.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    report = submission(name, Path(path))
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
