"""Student versions hold what a student needs, and no solution and no hidden test."""

import ast
import os
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import nbformat
import pytest
from marking import assignment, judge

import book

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "notebooks/assignments"
SECRET = re.compile(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assignments")
    subprocess.run([sys.executable, "-m", "marking", "release", folder], check=True,
                   capture_output=True, cwd=PROGRAM)
    return folder


def cells(name, kind=None):
    return [c for c in assignment.make_notebook(name).cells if kind in (None, c.cell_type)]


def secrets(name):
    """The lines of solutions, hidden tests and model answers that nobody could write by chance."""
    tests = (assignment.SOURCES / name / "tests.py").read_text().splitlines()
    shown = "\n".join(SECRET.sub("", c.source) for c in cells(name))
    found = {line.strip() for line in tests if len(line.strip()) > 25 and line.strip() not in shown}
    for cell in cells(name):
        hidden = SECRET.findall(cell.source)
        if cell.cell_type == "markdown" and cell.metadata.get("nbgrader"):
            hidden = [cell.source]
        kept = SECRET.sub("", cell.source) if cell.cell_type == "code" else ""
        found |= {line.strip() for text in hidden for line in text.splitlines()
                  if len(line.strip()) > 25 and line.strip() not in kept}
    return found


@pytest.mark.parametrize("name", assignment.list_names())
def test_no_solution_and_no_hidden_test_is_released(folder, name):
    words = secrets(name)
    assert len(words) > 20
    texts = {path: path.read_text() for path in (folder / "release" / name).rglob("*")
             if path.is_file()}
    with zipfile.ZipFile(folder / f"{name}.zip") as packed:
        texts |= {f"zip: {n}": packed.read(n).decode() for n in packed.namelist()}
    assert any(str(path).endswith(".ipynb") for path in texts)
    visible = "\n".join(SECRET.sub("", c.source) for c in cells(name, "code"))
    for path, text in texts.items():
        assert not re.search("(BEGIN|END) SOLUTION", text), path
        if str(path).endswith(".ipynb"):
            text = "\n".join(c.source for c in nbformat.reads(text, 4).cells)
        told = [line for line in words if line in text and line not in visible]
        assert not told, path


def test_a_helper_that_a_helper_imports_is_handed_out_too(tmp_path):
    for name, text in {
            "__init__": "import os\nfrom helpers import first, second", "first": "", "second": "",
            "device": "from helpers.third import f\nfrom elsewhere import other",
            "third": "def f():\n    from helpers.fourth import g",
            "fourth": "from helpers import device", "other": "", "fifth": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert sorted(judge.find_helpers(tmp_path)) == [
        "__init__.py", "device.py", "first.py", "fourth.py", "second.py", "third.py"]


@pytest.mark.parametrize("name", book.names())
def test_a_student_gets_the_notebook_and_the_helpers_that_it_needs(folder, name):
    with zipfile.ZipFile(folder / f"{name}.zip") as packed:
        packed.extractall(folder / "unpacked")
    here = folder / "unpacked" / name
    notebook = nbformat.read(here / f"{name}.ipynb", 4)
    assert all(cell.source.strip() for cell in notebook.cells), "a cell with nothing in it puzzles"
    # The cells before the first exercise run with what is there, from its own folder.
    read = assignment.read_assignment(name)
    needs = "ranks" if any(exercise.ranks > 1 for exercise in read.exercises) else "helpers"
    code = "\n".join([*read.given, f"import {needs}; print({needs}.__file__)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    there = here / {"ranks": "ranks.py", "helpers": "helpers/__init__.py"}[needs]
    assert done.stdout.splitlines()[-1] == str(there)


@pytest.mark.parametrize("name", assignment.list_names())
def test_points_and_lines_are_what_the_text_says(name):
    read = assignment.read_assignment(name)
    total = sum(t.points for e in read.exercises for t in e.tests)
    words = sum(points for _, points, _ in read.words)
    opening = " ".join(cells(name)[0].source.split())
    assert f"**Points**: {total + words}" in opening and words == 2
    for exercise in read.exercises:
        (place,) = (i for i, c in enumerate(cells(name)) if c.source == exercise.answer)
        section = ""
        for cell in reversed(cells(name)[:place]):  # from its heading to its solution cell
            if cell.cell_type == "markdown":
                section = cell.source + section
                if cell.source.startswith("## "):
                    break
        points = sum(t.points for t in exercise.tests)
        assert re.search(rf"\({points} points?\)", section), exercise.name
        said = re.search(r"[Aa]bout ([\w-]+) lines", section)[1]
        numbers = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
                   "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
                   "eighteen", "nineteen", "twenty", *(f"twenty-{one}" for one in (
                       "one two three four five six seven eight nine".split())), "thirty",
                   *(f"thirty-{one}" for one in "one two three four five".split())]
        written = [len([line for line in text.splitlines() if line.strip()])
                   for text in SECRET.findall(exercise.answer)]
        count = written[0] if f"{said} lines each" in section else sum(written)
        assert abs(count - (numbers.index(said) + 2)) <= 2, (exercise.name, written)


def run_program(code):
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": f"{REPOSITORY}/notebooks"})


@pytest.mark.parametrize("name", book.names())
def test_the_source_runs_from_top_to_bottom(name):
    """As one program: what a teacher sees who opens it as a notebook and runs all of it."""
    code = "\n".join(cell.source for cell in cells(name, "code"))
    done = run_program(textwrap.dedent(code))
    assert done.returncode == 0 and not done.stderr, done.stderr


def names_in(code, context):
    """Names that are read (`ast.Load`) or made (`ast.Store`: functions' arguments, too)."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            found.add(node.id)
        elif isinstance(node, ast.arg) and context is ast.Store:
            found.add(node.arg)
    return found


@pytest.mark.parametrize("name", assignment.list_names())
def test_a_test_cell_needs_no_name_that_another_one_makes(name):
    """If that one fails before it makes it, a right solution ends in a NameError in this one."""
    tests = [c.source for c in cells(name, "code") if c.metadata.get("nbgrader", {}).get("points")]
    others = [c.source for c in cells(name, "code") if c.source not in tests]
    shown = names_in("\n".join(others), ast.Store)
    made = {code: names_in(code, ast.Store) for code in tests}
    for code in tests:
        elsewhere = set().union(*made.values()) - made[code] - shown
        missing = names_in(code, ast.Load) & elsewhere
        assert not missing, missing


@pytest.mark.parametrize("name", book.names())
def test_every_test_cell_has_tests_and_says_what_it_tests(name):
    read, tests = assignment.read_assignment(name), assignment.load_tests(name)
    titles = [test.title for exercise in read.exercises for test in exercise.tests]
    assert all(len(title) > 10 and not title.endswith(".") for title in titles), titles
    assert len(set(titles)) == len(titles)
    for exercise in read.exercises:
        for test in exercise.tests:
            found = list(tests[test.grade_id]())
            calls = [call for one in found for call in getattr(one, "cases", [one])]
            assert len(found) >= 2 and all(call.function in read.parameters for call in calls)


@pytest.mark.parametrize("name", book.names())
def test_right_solutions_pass_the_tests_that_students_run(name):
    """Another style than the model answer, put into the notebook and run from top to bottom."""
    styles = {}
    for one in book.solutions():
        if one.assignment == name and not one.loses:
            styles.setdefault(one.exercise, []).append(one.source)
    code = "\n".join(styles[key][1] if (key := cell.metadata.get(
        "nbgrader", {}).get("grade_id")) in styles else cell.source for cell in cells(name, "code"))
    done = run_program(code)
    assert done.returncode == 0, done.stderr


def test_a_folder_with_somebodys_own_assignments_is_left_alone(tmp_path):
    mine = tmp_path / "source/ps1/mine.ipynb"
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    done = subprocess.run([sys.executable, "-m", "marking", "release", tmp_path], cwd=PROGRAM,
                          capture_output=True, text=True)
    assert done.returncode != 0 and "choose another folder" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]


@pytest.mark.parametrize("name", assignment.list_names())
def test_students_are_told_that_a_cell_may_call_those_above_it(name):
    text = " ".join(cells(name)[0].source.split())
    assert "It may call what your solution cells above it define" in text
