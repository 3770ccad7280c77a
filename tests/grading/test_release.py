"""Student versions hold what a student needs, and no solution and no hidden test."""

import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import nbformat
import pytest

import judge

REPOSITORY = Path(__file__).resolve().parents[2]
SECRET = re.compile(r"### BEGIN (SOLUTION|HIDDEN TESTS)\n(.*?)### END \1", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assignments")
    subprocess.run([sys.executable, REPOSITORY / "notebooks/assignments/release.py", folder],
                   check=True, capture_output=True)
    return folder


def cells(name, kind=None):
    return [c for c in judge.notebook(name).cells if kind in (None, c.cell_type)]


def secrets(name):
    """The lines of solutions, hidden tests and model answers that nobody could write by chance."""
    found = set()
    for cell in cells(name):
        hidden = [text for _, text in SECRET.findall(cell.source)]
        if cell.cell_type == "markdown" and cell.metadata.get("nbgrader"):
            hidden = [cell.source]
        kept = SECRET.sub("", cell.source) if cell.cell_type == "code" else ""
        found |= {line.strip() for text in hidden for line in text.splitlines()
                  if len(line.strip()) > 25 and line.strip() not in kept}
    return found


@pytest.mark.parametrize("name", judge.names())
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
        assert not re.search("(BEGIN|END) (SOLUTION|HIDDEN)", text), path
        if str(path).endswith(".ipynb"):
            text = "\n".join(c.source for c in nbformat.reads(text, 4).cells)
        told = [line for line in words if line in text and line not in visible]
        assert not told, path


@pytest.mark.parametrize("name", judge.names())
def test_a_student_gets_the_notebook_and_the_helpers_that_it_needs(folder, name):
    with zipfile.ZipFile(folder / f"{name}.zip") as packed:
        packed.extractall(folder / "unpacked")
    here = folder / "unpacked" / name
    notebook = nbformat.read(here / f"{name}.ipynb", 4)
    assert all(cell.source.strip() for cell in notebook.cells), "a cell with nothing in it puzzles"
    # The cells before the first exercise run with what is there, from its own folder.
    code = "\n".join(judge.read(name).driven + ["import helpers; print(helpers.__file__)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=here, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(here / "helpers/__init__.py")


@pytest.mark.parametrize("name", judge.names())
def test_points_and_lines_are_what_the_text_says(name):
    assignment = judge.read(name)
    total = sum(t.points for e in assignment.exercises for t in e.tests)
    words = sum(points for _, points in assignment.manual)
    opening = " ".join(cells(name)[0].source.split())
    assert f"**Points**: {total + words}" in opening and words == 2
    assert 2 <= len(assignment.exercises) <= 4
    for exercise in assignment.exercises:
        (place,) = (i for i, c in enumerate(cells(name)) if c.source == exercise.answer)
        section = ""
        for cell in reversed(cells(name)[:place]):  # from its heading to its solution cell
            if cell.cell_type == "markdown":
                section = cell.source + section
                if cell.source.startswith("## "):
                    break
        points = sum(t.points for t in exercise.tests)
        assert re.search(rf"\({points} points?\)", section), exercise.name
        said = re.search(r"[Aa]bout (\w+) lines", section)[1]
        numbers = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
                   "eleven", "twelve", "thirteen", "fourteen", "fifteen"]
        written = SECRET.search(exercise.answer)[2].strip().splitlines()
        assert abs(len([w for w in written if w.strip()]) - (numbers.index(said) + 2)) <= 2, (
            exercise.name)


@pytest.mark.parametrize("name", judge.names())
def test_the_source_runs_from_top_to_bottom(name):
    """As one program: what a teacher sees who opens it as a notebook and runs all of it."""
    code = "\n".join(cell.source for cell in cells(name, "code"))
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], cwd=REPOSITORY,
                          capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_a_folder_with_somebodys_own_assignments_is_left_alone(tmp_path):
    mine = tmp_path / "source/ps1/mine.ipynb"
    mine.parent.mkdir(parents=True)
    mine.write_text("my own")
    done = subprocess.run([sys.executable, REPOSITORY / "notebooks/assignments/release.py",
                           tmp_path], capture_output=True, text=True)
    assert done.returncode != 0 and "choose another folder" in done.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [mine]
