"""What pytest does with a notebook: pyproject.toml and notebooks/conftest.py, on one made here."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[2]


def test_notebook(folder, *cells):
    """What pytest says of a notebook with these cells, under the course's settings."""
    nbformat.write(new_notebook(cells=cells), folder / "01_scratch.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", folder)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-v", "-p", "no:cacheprovider",
         "-c", ROOT / "pyproject.toml", folder / "01_scratch.ipynb"],
        cwd=ROOT, capture_output=True, text=True)


test_notebook.__test__ = False


def shows(text, code="print('as it is')", tags=()):
    """A cell that was executed and shows `text`."""
    output = new_output("stream", name="stdout", text=text)
    return new_code_cell(code, execution_count=1, outputs=[output], metadata={"tags": [*tags]})


def test_a_changed_output_is_found_but_not_of_what_was_measured(tmp_path):
    tested = test_notebook(tmp_path, shows("as it is\n"), shows("as it was\n"),
                           shows("as it was\n", tags=["measured", "nbval-ignore-output"]))
    outcomes = re.findall(r"::Cell \d (PASSED|FAILED)", tested.stdout)
    assert outcomes == ["PASSED", "FAILED", "PASSED"], tested.stdout


@pytest.mark.parametrize("rounds, twice, seen", [
    ("few", "", "3 measured trains"), ("all", "training", "15 measured trains trains"),
    ("all", "all", "15 measured trains trains")])
def test_rounds_and_repetitions_are_those_asked_for(tmp_path, monkeypatch, rounds, twice, seen):
    monkeypatch.setenv("COURSE_ROUNDS", rounds)
    monkeypatch.setenv("COURSE_TWICE", twice)
    cells = [new_code_cell("ROUNDS = 15\nseen = [str(ROUNDS)]",
                           metadata={"tags": ["few:ROUNDS = 15=>ROUNDS = 3"]})]
    for tag in ("measured", "trains"):
        cells.append(new_code_cell(f"seen.append({tag!r})", metadata={"tags": [tag]}))
    cells.append(new_code_cell("_ = open('seen', 'w').write(' '.join(seen))"))
    tested = test_notebook(tmp_path, *cells)
    assert tested.returncode == 0, tested.stdout
    assert (tmp_path / "seen").read_text() == seen


def test_few_rounds_of_what_is_not_in_the_cell_are_refused(tmp_path):
    tested = test_notebook(tmp_path, new_code_cell(
        "steps = 15", metadata={"tags": ["few:ROUNDS = 15=>ROUNDS = 3"]}))
    assert "'ROUNDS = 15' is 0 times" in tested.stdout + tested.stderr


@pytest.mark.parametrize(("one", "other", "same"), [
    ("took 1.25 s, copied in 35 ms", "took 11.5 s, copied in 4 ms", True),
    ("7.1 µs a call", "3e-05 s a call", True),
    ("waiting        9.99 ms", "waiting       10.01 ms", True),
    ("-3 shards", "3 shards", False),
    ("5000 images", "5001 images", False),
    ("loss 0.25", "loss 0.26", False),
])
def test_the_sanitizer_hides_times_only(one, other, same):
    for pattern, substitute in get_sanitize_patterns(
            (ROOT / "tests/nbval_sanitize.cfg").read_text()):
        one, other = re.sub(pattern, substitute, one), re.sub(pattern, substitute, other)
    assert (one == other) == same
