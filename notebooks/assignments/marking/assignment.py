"""What an assignment is: its cells, exercises, tests and points, read from `source/psN/`.

`psN.py` is a notebook as text, with tags and a short form of nbgrader's metadata:

    tags=["given"]      code that students get and that their solutions find: imports, data
    tags=["driver"]     the same, for functions that call the student's
    nbgrader={"grade_id": "shards", "solution": true}     one exercise: its solution cell
        with tags=["ranks"]: it runs in four processes, the ranks of torch.distributed
    nbgrader={"grade_id": "shards-even", "points": 2}     tests of the solution before it
    nbgrader={"grade_id": "why", "points": 2, "solution": true}   (Markdown) read by a teacher

The cells with points are tests for students to run. What they are marked by is in `tests.py`: for
each of these cells a function of its name, `shards_even`, that yields cases (see `cases`); its
docstring tells students what is tested. Other code cells only show something.
"""

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parents[1] / "source"
RANKS = 4   # most processes of a call
UNWRITTEN = 'raise NotImplementedError("not written yet")'   # what students find for their code
STUB = f"# Your code goes here, in place of the next line.\n{UNWRITTEN}"
PLACEHOLDER = "YOUR ANSWER HERE"   # what students find where their words go


class Test(NamedTuple):
    grade_id: str
    points: float
    title: str           # what it tests, for the student


class Exercise(NamedTuple):
    """One solution cell: its grade_id, heading, model answer, the functions and classes in it,
    tests, and the number of processes that it runs in.

    asked: those functions and classes that the handed-out cell has, so that students keep them.
    given: how many of the assignment's given cells stand before it.
    """

    name: str
    title: str
    answer: str
    functions: list
    tests: list
    ranks: int
    asked: list
    given: int


class Assignment(NamedTuple):
    name: str
    given: list          # sources of the cells that a solution finds, drivers among them
    parameters: dict     # function: names of its arguments
    exercises: list
    words: list          # (grade_id, points, heading)


def list_names():
    """The assignments that there are: ["ps1", ...]."""
    return sorted(path.stem for path in SOURCES.glob("*/ps*.py"))


def make_notebook(name):
    """An assignment's source as the notebook that nbgrader knows, model answers included."""
    import jupytext
    import nbformat

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
def read_assignment(name):
    """The `Assignment` of that name."""
    given, parameters, exercises, words, heading = [], {}, [], [], ""
    titles = {node.name.replace("_", "-"): (ast.get_docstring(node) or "").partition("\n")[0]
              for node in _find_functions((SOURCES / name / "tests.py").read_text())}
    for cell in make_notebook(name).cells:
        tags, meta = cell.metadata.get("tags", []), cell.metadata.get("nbgrader", {})
        if cell.cell_type == "markdown":
            if cell.source.startswith("## "):
                heading = cell.source.partition("\n")[0].lstrip("# ")
            if "points" in meta:
                words.append((meta["grade_id"], meta["points"], heading))
            continue
        if "given" in tags or "driver" in tags:
            given.append(cell.source)
        if meta.get("solution"):
            names = [node.name for node in _find_functions(cell.source, ast.ClassDef)]
            exercises.append(Exercise(meta["grade_id"], heading, cell.source, names, [],
                                      RANKS if "ranks" in tags else 1,
                                      find_asked(cell.source), len(given)))
        elif "points" in meta:
            exercises[-1].tests.append(
                Test(meta["grade_id"], meta["points"], titles[meta["grade_id"]]))
        parameters |= {node.name: [a.arg for a in node.args.args]
                       for node in _find_functions(cell.source)}
    return Assignment(name, given, parameters, exercises, words)


def load_tests(name):
    """{grade_id: generator function of cases} from an assignment's `tests.py`."""
    spec = importlib.util.spec_from_file_location(f"tests_of_{name}", SOURCES / name / "tests.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {key.replace("_", "-"): value for key, value in vars(module).items()}


def find_missing(assignment):
    """Why it can't be judged here: it needs PyTorch, which isn't installed. "" where it can."""
    needs = any(exercise.ranks > 1 for exercise in assignment.exercises)
    if needs and importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed here: make setup TORCH=1"
    return ""


def find_asked(source):
    """The functions and classes of a solution cell that stand outside its model answer."""
    handed_out = re.sub("### BEGIN SOLUTION.*?### END SOLUTION", "", source, flags=re.DOTALL)
    return re.findall(r"^(?:def|class) (\w+)", handed_out, flags=re.MULTILINE)


def make_stub(answer):
    """A solution cell as students find it, but for a comment, from the one with its answer."""
    return re.sub("### BEGIN SOLUTION.*?### END SOLUTION", UNWRITTEN, answer, flags=re.DOTALL)


def is_handed_out(source, exercise):
    """Whether a solution cell is as students find it, but for comments and empty lines."""
    lines, stub = ([line.rstrip() for line in text.splitlines()
                    if line.strip() and not line.strip().startswith("#")]
                   for text in (source, make_stub(exercise.answer)))
    return lines == stub


def _find_functions(source, *kinds):
    return [node for node in ast.parse(source).body
            if isinstance(node, (ast.FunctionDef, *kinds))]
