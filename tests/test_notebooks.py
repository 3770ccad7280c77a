"""The chapters: source and notebook agree, and both keep the rules that all chapters share.

That every cell runs and shows what is stored is nbval's part: see pyproject.toml. A check here
takes a notebook and returns complaints, so that it can be tried on a notebook with a planted
fault: a check that finds nothing anywhere would look the same as a course without mistakes.
"""

import copy
import re
import shutil
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import build
import jupytext
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {path.stem: path for path in sorted(ROOT.glob("notebooks/src/[0-9][0-9]_*.py"))}
BUILT = {path.stem: path for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))}

OPENING = ["What you'll do", "What you'll learn", "What you need"]
ENDING = ["Summary", "Exercises"]
MOST_LINES, MEDIAN_LINES = 15, 5
MACHINE_PATH = re.compile(r"/(?:work|root|home|Users|tmp/ipykernel)[\w-]*/[\w./-]*")


def test_figures_beside_the_notebooks_are_those_within():
    asked = {name: png for path in BUILT.values()
             for name, png in build.figures(nbformat.read(path, as_version=4))}
    found = {path.name: path.read_bytes() for path in ROOT.glob("notebooks/figures/*")}
    assert asked and found == asked


# --- the rules ------------------------------------------------------------------------------


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def headings(cell):
    """The headings in a markdown cell, without their #s; none in a code cell."""
    if cell.cell_type != "markdown":
        return []
    prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ +(.+?) *$", prose, re.MULTILINE)
    return [heading.replace("\u2019", "'") for heading in found]


def in_order(wanted, found):
    rest = iter(found)
    return all(any(heading == name for heading in rest) for name in wanted)


def same_as_source(notebook, source):
    """Cells, their order and their tags are those of `source`, as jupytext reads it."""
    if len(notebook.cells) != len(source.cells):
        return [f"has {len(notebook.cells)} cells, its source {len(source.cells)}"]
    complaints = []
    for number, (cell, original) in enumerate(zip(notebook.cells, source.cells, strict=True)):
        expected = tags(original) + ["nbval-ignore-output"] * ("measured" in tags(original))
        if (cell.cell_type, cell.source) != (original.cell_type, original.source):
            complaints.append(f"cell {number} is not its source's: {cell.source[:60]!r}")
        elif tags(cell) != expected:
            complaints.append(f"cell {number} has the tags {tags(cell)}, not {expected}")
    return complaints


def executed(notebook):
    """Every code cell was executed, once, from top to bottom."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    expected = list(range(1, len(counts) + 1))
    return [] if counts == expected else [f"execution counts are {counts}"]


def no_errors(notebook):
    """No cell shows an error, or anything on stderr."""
    return [
        f"cell {cell.execution_count} has {output.get('name', 'an error')}"
        for cell in code_cells(notebook) for output in cell.outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]


def opening(notebook):
    """The first cell has the title, and what one does, learns and needs, and how long it takes."""
    if not notebook.cells or notebook.cells[0].cell_type != "markdown":
        return ["does not begin with prose"]
    first = notebook.cells[0]
    complaints = []
    if not re.match(r"# \S", first.source):
        complaints.append("does not begin with a title")
    if not in_order(OPENING, headings(first)):
        complaints.append(f"first cell has not the headings {', '.join(OPENING)}, in this order")
    if not re.search(r"\bminutes?\b", first.source):
        complaints.append("first cell does not say how many minutes the chapter takes")
    return complaints


def one_title(notebook):
    """The title is the only heading of its rank: all others belong below it."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^# .*", prose, re.MULTILINE)
    return [] if len(titles) == 1 else [f"has the titles {titles}"]


def ending(notebook):
    """A summary, exercises and, after those, at least one solution."""
    where = {name: number for number, cell in enumerate(notebook.cells)
             for name in headings(cell)}
    solutions = [number for number, cell in enumerate(notebook.cells) if "solution" in tags(cell)]
    if not all(name in where for name in ENDING):
        return [f"has not the headings {' and '.join(ENDING)}"]
    complaints = []
    if not in_order(ENDING, [name for cell in notebook.cells for name in headings(cell)]):
        complaints.append("has its exercises before its summary")
    if not solutions:
        complaints.append("has no cell tagged solution")
    if any(number <= where["Exercises"] for number in solutions):
        complaints.append("has a solution before the exercises")
    return complaints


def short_cells(notebook):
    """A cell holds one idea: few lines, blank ones not counted."""
    lengths = [len([line for line in cell.source.splitlines() if line.strip()])
               for cell in code_cells(notebook)]
    complaints = [f"code cell {number} has {length} lines, more than {MOST_LINES}"
                  for number, length in enumerate(lengths, 1) if length > MOST_LINES]
    if lengths and statistics.median(lengths) > MEDIAN_LINES:
        complaints.append(f"median cell has {statistics.median(lengths)} lines")
    return complaints


def prose_between(notebook):
    """There is prose between any two code cells."""
    return [
        f"no prose before the cell that begins {second.source[:40]!r}"
        for first, second in zip(notebook.cells, notebook.cells[1:], strict=False)
        if first.cell_type == second.cell_type == "code"
    ]


def mostly_compared(notebook):
    """Few cells are exempt from having their output compared."""
    exempt = [cell for cell in code_cells(notebook)
              if {"measured", "nbval-ignore-output"} & set(tags(cell))]
    if 4 * len(exempt) <= len(code_cells(notebook)):
        return []
    return [f"{len(exempt)} of {len(code_cells(notebook))} code cells are tagged measured"]


def training_tagged(notebook):
    """A cell that takes a training step has the tag by which CI runs it twice."""
    return [f"cell {number} trains, and lacks the tag"
            for number, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" and "trains" not in tags(cell)
            and ("autograd.record()" in cell.source or ".backward()" in cell.source)
            and ".step(" in cell.source]


def no_machine_paths(notebook):
    """Nothing says in whose folders the notebook was written or run."""
    return [
        f"cell {number} has {path}"
        for number, cell in enumerate(notebook.cells)
        # Base64 has slashes too, and a picture can't be read here.
        for path in MACHINE_PATH.findall(re.sub(r"'image/png': '[^']*'", "", str(cell)))
    ]


def alternative_texts(notebook):
    """Every picture has a text for those who can't see it."""
    complaints = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            if re.search(r"!\[\s*\]\(", cell.source):
                complaints.append(f"cell {number} has an image without alternative text")
            images = re.findall(r"<img\b[^>]*>", cell.source)
            if not all(re.search(r"""\balt=(["'])\s*[^"'\s]""", image) for image in images):
                complaints.append(f"cell {number} has an <img> without alternative text")
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                text = output.metadata.get(kind, {}).get("alt", "")
                if kind.startswith("image/") and not text.strip():
                    complaints.append(f"cell {number} shows a {kind} without alternative text")
    return complaints


CHECKS = [executed, no_errors, opening, one_title, ending, short_cells, prose_between,
          mostly_compared, training_tagged, no_machine_paths, alternative_texts]


# --- the chapters keep them -----------------------------------------------------------------


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert list(SOURCES) == list(BUILT) != [], "make notebooks"


def test_every_chapter_but_one_has_cells_that_train():
    """Splitting a batch is what comes before."""
    without = {chapter[3:] for chapter, path in BUILT.items() if not any(
        "trains" in tags(cell) for cell in nbformat.read(path, as_version=4).cells)}
    assert without == {"splitting_a_batch"}


@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_is_what_its_source_says(chapter):
    notebook = nbformat.read(BUILT[chapter], as_version=4)
    source = jupytext.read(SOURCES[chapter], fmt="py:percent")
    assert not same_as_source(notebook, source), f"make notebooks CH={chapter[:2]}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_keeps_the_rule(chapter, check):
    assert not check(nbformat.read(BUILT[chapter], as_version=4)), check.__doc__


# --- and each check finds its fault ---------------------------------------------------------


def good_notebook():
    """A notebook that has no fault: code in cells 1, 3, 5, 7, 10, a measured one and a picture."""
    picture = new_output("display_data", {"image/png": "iVBO/root/Rw0K", "text/plain": "a line"},
                         metadata={"image/png": {"alt": "A line that rises."}})
    cells = [
        new_markdown_cell("# Title\n\n## What you\u2019ll do\n\n## What you'll learn\n\n"
                          "## What you need\n\nAbout 20 minutes.\n\n![a batch](batch.png)"),
        new_code_cell("1 + 1"),
        new_markdown_cell("And now:"),
        new_code_cell("2 + 2", metadata={"tags": ["measured", "nbval-ignore-output"]}),
        new_markdown_cell("And then:\n\n```\n# Exercises\n```\n\n<img src='a.svg' alt='two'>"),
        new_code_cell("plot()", outputs=[picture]),
        new_markdown_cell("And last:"),
        new_code_cell("3 + 3", outputs=[new_output("stream", name="stdout", text="6\n")]),
        new_markdown_cell("## Summary"),
        new_markdown_cell("## Exercises\n\n1. What is 4 + 4?"),
        new_code_cell("4 + 4", metadata={"tags": ["solution"]}),
    ]
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    return new_notebook(cells=cells)


def change(number, **values):
    """A fault: these fields of cell `number` get these values."""
    return lambda notebook: notebook.cells[number].update(nbformat.from_dict(values))


def replace(number, old, new):
    """A fault: cell `number` says `new` where it said `old`."""
    def plant(notebook):
        cell = notebook.cells[number]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)
    return plant


def move(number, to):
    """A fault: a cell is elsewhere."""
    return lambda notebook: notebook.cells.insert(to, notebook.cells.pop(number))


def show(number, *output, **values):
    """A fault: cell `number` has this output besides."""
    return lambda notebook: notebook.cells[number].outputs.append(new_output(*output, **values))


def lengthen(*numbers, lines):
    """A fault: these cells have that many lines."""
    def plant(notebook):
        for number in numbers:
            notebook.cells[number].source = "\n\n".join(["x = 1"] * lines)
    return plant


FAULTS = [
    (executed, change(3, execution_count=None)),
    (executed, change(3, execution_count=7)),
    (no_errors, show(3, "error", ename="ValueError", evalue="", traceback=[])),
    (no_errors, show(3, "stream", name="stderr", text="a warning")),
    (opening, move(0, 1)),
    (opening, replace(0, "# Title", "Title")),
    (opening, replace(0, "## What you'll learn", "What you'll learn")),
    (opening, replace(0, "What you need", "What you want")),
    (opening, replace(0, "20 minutes", "a while")),
    (opening, lambda notebook: notebook.cells.clear()),
    (one_title, replace(2, "And now:", "# And now:")),
    (one_title, replace(0, "# Title", "## Title")),
    (ending, replace(8, "Summary", "Afterword")),
    (ending, replace(9, "## Exercises", "Exercises")),
    (ending, move(9, 8)),
    (ending, change(10, metadata={})),
    (ending, change(1, metadata={"tags": ["solution"]})),
    (short_cells, lengthen(3, lines=16)),
    (short_cells, lengthen(1, 3, 5, lines=6)),
    (prose_between, move(2, 0)),
    (mostly_compared, change(5, metadata={"tags": ["measured", "nbval-ignore-output"]})),
    (mostly_compared, change(5, metadata={"tags": ["nbval-ignore-output"]})),
    (training_tagged, replace(1, "1 + 1", "with autograd.record():\n    f(x)\ntrainer.step(1)")),
    (training_tagged, replace(3, "2 + 2", "loss.backward()\nsgd.step()")),
    (no_machine_paths, replace(0, "batch.png", "/home/ann/batch.png")),
    (no_machine_paths, replace(1, "1 + 1", "open('/home/ann/course/x')")),
    (no_machine_paths, show(3, "stream", name="stdout", text="/tmp/ipykernel_123/456.py:1: oh")),
    (no_machine_paths, show(3, "display_data", {"text/plain": "at /Users/ann/data/mnist"})),
    (alternative_texts, replace(0, "![a batch]", "![]")),
    (alternative_texts, replace(4, "alt='two'", "alt=''")),
    (alternative_texts, replace(4, "alt='two'", "")),
    (alternative_texts, show(3, "display_data", {"image/png": "iVBORw0K"})),
    (alternative_texts, show(3, "display_data", {"image/png": "iVBORw0K"},
                             metadata={"image/png": {"alt": " "}})),
    (alternative_texts, show(3, "display_data", {"image/svg+xml": "<svg/>"})),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_check_is_content_with_a_good_notebook(check):
    assert check(good_notebook()) == []


@pytest.mark.parametrize(("check", "plant"), FAULTS)
def test_check_finds_a_planted_fault(check, plant):
    notebook = good_notebook()
    plant(notebook)
    assert check(notebook)


def test_every_check_has_a_planted_fault():
    assert {check for check, _ in FAULTS} == set(CHECKS)


@pytest.mark.parametrize("plant", [
    move(2, 0),
    replace(1, "1 + 1", "1 + 2"),
    change(2, cell_type="raw"),
    change(1, metadata={"tags": ["solution"]}),
    change(3, metadata={"tags": ["measured"]}),
    change(3, metadata={"tags": []}),
    lambda notebook: notebook.cells.pop(),
])
def test_a_notebook_that_is_not_its_source_is_found(plant):
    notebook = good_notebook()
    source = copy.deepcopy(notebook)
    source.cells[3].metadata.tags = ["measured"]
    assert same_as_source(notebook, source) == []
    plant(notebook)
    assert same_as_source(notebook, source)


# --- nbval, as set up here, compares what it should -----------------------------------------


SCRATCH = """\
# %%
print("unchanged")

# %%
print("this text is changed in what is stored")

# %% tags=["measured"]
print("so is this, but it was measured")

# %%
"a value is changed too"

# %%
import os

os.mkdir("works only the first time")

# %%
print(object())
"""


def run_pytest(*arguments):
    """pytest with this project's settings, on notebooks that are elsewhere."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider",
         "-c", ROOT / "pyproject.toml", *arguments],
        cwd=ROOT, capture_output=True, text=True)


def test_nbval_finds_what_is_no_longer_true(tmp_path):
    source = tmp_path / "src/01_scratch.py"
    source.parent.mkdir()
    source.write_text(SCRATCH)
    target = tmp_path / "01_scratch.ipynb"
    build.build(source, target)
    notebook = nbformat.read(target, as_version=4)
    for number in (1, 2):
        notebook.cells[number].outputs[0].text += "changed"
    notebook.cells[3].outputs[0].data["text/plain"] += "changed"
    nbformat.write(notebook, target)

    tested = run_pytest("-v", target)
    assert tested.returncode == 1
    outcomes = re.findall(r"::Cell (\d) (PASSED|FAILED)", tested.stdout)
    assert [number for number, _ in outcomes] == list("012345")
    assert [number for number, outcome in outcomes if outcome == "FAILED"] == ["1", "3", "4"]


@pytest.mark.parametrize("whole", [True, False])
def test_nbval_passes_over_what_needs_pytorch_where_it_is_not_there(tmp_path, whole):
    cells = [new_code_cell("import math", metadata={"tags": ["torch"] * whole}),
             new_code_cell("import torch", metadata={"tags": ["torch"]}),
             new_code_cell("assert math.pi > 3")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_scratch.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    tested = run_pytest("-v", tmp_path / "01_scratch.ipynb")
    outcomes = re.findall(r"::Cell \d (PASSED|SKIPPED)", tested.stdout)
    if find_spec("torch"):
        assert outcomes == ["PASSED"] * 3
    else:
        assert outcomes == (["SKIPPED"] * 3 if whole else ["PASSED", "SKIPPED", "PASSED"])
        assert "make setup TORCH=1" in tested.stdout


@pytest.mark.parametrize("twice, seen", [
    ("", "trains, trains and measures, measures, neither"),
    ("training", "trains, trains, trains and measures, trains and measures, measures, neither"),
    ("all", "trains, trains, trains and measures, trains and measures, measures, neither, "
            "neither")])
def test_nbval_runs_cells_twice_where_that_is_asked(tmp_path, monkeypatch, twice, seen):
    cells = [new_code_cell("seen = []", metadata={"tags": ["measured"]})]
    for name in ("trains", "trains and measures", "measures", "neither"):
        tags = ["trains"] * ("trains" in name) + ["measured"] * ("measures" in name)
        cells.append(new_code_cell(f"seen.append({name!r})", metadata={"tags": tags}))
    cells.append(new_code_cell("_ = open('seen', 'w').write(', '.join(seen))"))
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_scratch.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    monkeypatch.setenv("COURSE_TWICE", twice)
    tested = run_pytest(tmp_path / "01_scratch.ipynb")
    assert tested.returncode == 0, tested.stdout
    assert (tmp_path / "seen").read_text() == seen


def test_another_word_for_twice_is_refused(tmp_path, monkeypatch):
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    monkeypatch.setenv("COURSE_TWICE", "yes")
    tested = run_pytest(tmp_path)
    assert tested.returncode == pytest.ExitCode.USAGE_ERROR
    assert "COURSE_TWICE=yes: must be training or all" in tested.stdout + tested.stderr


def test_nbval_takes_the_chapters_and_no_other_notebooks(tmp_path):
    for folder in ("notebooks", "notebooks/.ipynb_checkpoints", "tests/fixtures/marks",
                   "notebooks/assignments/source/ps1", "build/book"):
        (tmp_path / folder).mkdir(parents=True)
        nbformat.write(good_notebook(), tmp_path / folder / "01_good.ipynb")
    listed = run_pytest("--collect-only", "-q", tmp_path).stdout
    assert set(re.findall(r"(\S+)::Cell", listed)) == {"notebooks/01_good.ipynb"}


@pytest.mark.parametrize(("one", "other", "same"), [
    ("<object object at 0x7f12ab34cd56>", "<object object at 0x7fffffffffff>", True),
    ("took 1.25 s, copied in 35 ms", "took 11.5 s, copied in 4 ms", True),
    ("7.1 µs a call", "3e-05 s a call", True),
    ("3 seconds", "4.5 seconds", True),
    ("100%|####| 5/5 [00:00<00:00, 123.45it/s]", "100%|####| 5/5 [00:01<00:00,  3.10it/s]", True),
    ("100%|####| 5/5 [00:00<00:00, 123.45it/s]", "100%|####| 6/6 [00:00<00:00, 123.45it/s]", False),
    ("/tmp/ipykernel_12/34.py:1: oh", "/var/tmp/ipykernel_56/78.py:1: oh", True),
    ("3 shards", "4 shards", False),
    ("5000 images", "5001 images", False),
    ("loss 0.25", "loss 0.26", False),
    ("shape (2, 3)", "shape (3, 2)", False),
])
def test_the_sanitizer_hides_times_and_addresses_only(one, other, same):
    for pattern, substitute in get_sanitize_patterns(
            (ROOT / "tests/nbval_sanitize.cfg").read_text()):
        one, other = re.sub(pattern, substitute, one), re.sub(pattern, substitute, other)
    assert (one == other) == same
