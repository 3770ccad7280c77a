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
import course
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {path.stem: path for path in sorted(ROOT.glob("notebooks/src/[0-9][0-9]_*.py"))}
BUILT = {path.stem: path for path in sorted(ROOT.glob("notebooks/[0-9][0-9]_*.ipynb"))}

OPENING = ["What you'll do", "What you'll learn", "What you need"]
ENDING = ["Summary", "Exercises"]
MOST_LINES, MOST_LINES_OF_A_CLASS, MEDIAN_LINES = 20, 30, 7
MOST_CODE_IN_A_ROW = 2
MACHINE_PATH = re.compile(r"/(?:work|root|home|Users|tmp/ipykernel)[\w-]*/[\w./-]*")


def test_figures_beside_the_notebooks_are_those_within():
    asked = {name: png for path in BUILT.values()
             for name, png in build.figures(nbformat.read(path, as_version=4))}
    found = {path.name: path.read_bytes() for path in ROOT.glob("notebooks/src/figures/*")}
    assert asked and found == asked


def test_files_made_of_cells_are_those_cells():
    made = {name: text for path in BUILT.values()
            for name, text in build.files(nbformat.read(path, as_version=4)).items()}
    found = {path.name: path.read_text() for path in ROOT.glob("notebooks/*.py")
             if path.name != "conftest.py"}
    assert made and found == made, "make notebooks"


# --- the rules ------------------------------------------------------------------------------


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell):
    return cell.metadata.get("tags", [])


def content(notebook):
    """The cells that an author wrote: all but the links to the neighbours."""
    return [cell for cell in notebook.cells if "navigation" not in tags(cell)]


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
    """Cells, their order and their metadata are those of `source`, as the build reads it."""
    if len(notebook.cells) != len(source.cells):
        return [f"has {len(notebook.cells)} cells, its source {len(source.cells)}"]
    complaints = [] if notebook.metadata == source.metadata else ["has other metadata"]
    for number, (cell, original) in enumerate(zip(notebook.cells, source.cells, strict=True)):
        if (cell.cell_type, cell.source) != (original.cell_type, original.source):
            complaints.append(f"cell {number} is not its source's: {cell.source[:60]!r}")
        elif cell.metadata != original.metadata:
            complaints.append(f"cell {number} has {cell.metadata}, not {original.metadata}")
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
    first = content(notebook)[0]
    if first.cell_type != "markdown":
        return ["does not begin with prose"]
    complaints = []
    if not re.match(r"# \S", first.source):
        complaints.append("does not begin with a title")
    if not in_order(OPENING, headings(first)):
        complaints.append(f"first cell has not the headings {', '.join(OPENING)}, in this order")
    time = f"Reading takes about {course.minutes(notebook)} minutes"
    if time not in " ".join(first.source.split()):
        complaints.append(f"first cell does not say: {time}")
    return complaints


def navigation(notebook):
    """It begins and ends with links; the last ones stand below no answer that may be folded."""
    where = [number for number, cell in enumerate(notebook.cells) if "navigation" in tags(cell)]
    if where != [0, len(notebook.cells) - 1]:
        return [f"has links to its neighbours in the cells {where}"]
    return [] if headings(notebook.cells[-1]) == ["Next"] else ["its last links have no heading"]


def mentions_are_links(notebook):
    """Where another chapter is named, there is a link to it."""
    cells = [cell.source for cell in content(notebook) if cell.cell_type == "markdown"]
    own = course.title(notebook)[:2]
    plain = [found for source in cells for found in re.findall(
        r"(?:^|[^\[])\b([Cc]hapters?\s+\d\d)\b", re.sub(r"`[^`]*`", "", source))]
    return [f"names {found!r}" for found in plain if found[-2:] != own]


def one_title(notebook):
    """The title is the only heading of its rank: all others belong below it."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^# .*", prose, re.MULTILINE)
    return [] if len(titles) == 1 else [f"has the titles {titles}"]


def ending(notebook):
    """A summary, then exercises, then an answer to each, folded, with code in at least one."""
    where = {name: number for number, cell in enumerate(notebook.cells)
             for name in headings(cell)}
    if not all(name in where for name in ENDING):
        return [f"has not the headings {' and '.join(ENDING)}"]
    complaints = []
    if not in_order(ENDING, [name for cell in notebook.cells for name in headings(cell)]):
        complaints.append("has its exercises before its summary")
    asked = re.findall(r"^\d+(?=\. )", notebook.cells[where["Exercises"]].source, re.MULTILINE)
    answered = [name.removeprefix("Answer ") for name in where if name.startswith("Answer ")]
    if not asked or answered != asked:
        complaints.append(f"has the exercises {asked} and the answers {answered}")
    for name in answered:
        cell = notebook.cells[where[f"Answer {name}"]]
        if cell.source != f"{course.ANSWER} {name}" or not cell.metadata.get(
                "jp-MarkdownHeadingCollapsed"):
            complaints.append(f"answer {name} is not folded")
    solutions = [number for number, cell in enumerate(notebook.cells) if "solution" in tags(cell)]
    if not solutions:
        complaints.append("has no cell tagged solution")
    first = min([where[f"Answer {name}"] for name in answered], default=0)
    if any(number < first for number in solutions):
        complaints.append("has a solution before the answers")
    return complaints


def lines_of(cell):
    return len([line for line in cell.source.splitlines() if line.strip()])


def short_cells(notebook):
    """A cell holds one idea: few lines, blank ones not counted; a class may take some more."""
    complaints = []
    for number, cell in enumerate(code_cells(notebook), 1):
        most = MOST_LINES_OF_A_CLASS if re.search("^class ", cell.source, re.M) else MOST_LINES
        if lines_of(cell) > most:
            complaints.append(f"code cell {number} has {lines_of(cell)} lines, more than {most}")
    median = statistics.median(map(lines_of, code_cells(notebook)))
    return complaints + [f"median cell has {median} lines"] * (median > MEDIAN_LINES)


def prose_between(notebook):
    """There are at most two code cells in a row."""
    runs = "".join(cell.cell_type[0] for cell in notebook.cells)
    return ["more than two code cells in a row"] * ("c" * (MOST_CODE_IN_A_ROW + 1) in runs)


def prose_in_markdown(notebook):
    """No code cell holds a section: the mark that begins a markdown cell was forgotten there."""
    return [f"cell {number} is code with a heading" for number, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" and re.search(r"^# #+ ", cell.source, re.MULTILINE)]


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


CHECKS = [executed, no_errors, opening, navigation, mentions_are_links, one_title, ending,
          short_cells, prose_between, prose_in_markdown, mostly_compared, training_tagged,
          no_machine_paths, alternative_texts]


# --- the chapters keep them -----------------------------------------------------------------


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert list(SOURCES) == list(BUILT) != [], "make notebooks"


def test_every_chapter_but_two_has_cells_that_train():
    """Splitting a batch and summing gradients are what comes before."""
    without = {chapter[3:] for chapter, path in BUILT.items() if not any(
        "trains" in tags(cell) for cell in nbformat.read(path, as_version=4).cells)}
    assert without == {"splitting_a_batch", "all_reduce"}


@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_is_what_its_source_says(chapter):
    notebook = nbformat.read(BUILT[chapter], as_version=4)
    source = build.read_source(SOURCES[chapter])
    assert not same_as_source(notebook, source), f"make notebooks CH={chapter[:2]}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_keeps_the_rule(chapter, check):
    assert not check(nbformat.read(BUILT[chapter], as_version=4)), check.__doc__


# --- and together they are a course ---------------------------------------------------------

PAGES = [path for path in subprocess.run(
    ["git", "ls-files", "*.md", "notebooks/*.ipynb"], cwd=ROOT, capture_output=True, text=True,
    check=True).stdout.splitlines()]


def dead_links(text, folder):
    """The relative links in Markdown that lead to no file, or to no heading in one."""
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.MULTILINE | re.DOTALL)
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)|<img [^>]*src=[\"']([^\"']+)", prose):
        target = "".join(target)
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else None
        if file and not file.exists():
            dead.append(target)
        elif anchor and anchor not in anchors(file.read_text("utf-8") if file else text):
            dead.append(target)
    return dead


def anchors(text):
    """What GitHub names the headings of a page."""
    names = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in names]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    path = ROOT / page
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = nbformat.reads(text, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert not dead_links(text, path.parent)


@pytest.mark.parametrize(("text", "dead"), [
    ("[a](README.md) and [b](README.md#data), [c](https://example.org/x)", []),
    ("[a](READYOU.md)", ["READYOU.md"]),
    ("[a](README.md#nowhere)", ["README.md#nowhere"]),
    ("# One thing\n[a](#one-thing) [b](#another)", ["#another"]),
    ("<img src='no.png' alt=''>", ["no.png"]),
    ("```\n[a](no.md)\n```\n`[b](no.md)`", []),
])
def test_a_dead_link_is_found(text, dead):
    assert dead_links(text, ROOT) == dead


def test_the_course_has_each_chapter_once_and_in_order():
    listed = [chapter["file"] for part in course.PARTS for chapter in part["chapter"]]
    assert listed == list(BUILT)
    titles = [course.title(nbformat.read(path, as_version=4)) for path in BUILT.values()]
    assert [title[:2] for title in titles] == [f"{n:02}" for n in range(1, len(BUILT) + 1)]


@pytest.mark.parametrize("page", course.pages(), ids=lambda page: page.name)
def test_tables_of_contents_are_those_that_the_build_makes(page):
    text = page.read_text("utf-8")
    assert text == course.with_contents(text, course.chapters(), *course.pages()[page]), (
        "make notebooks, or: make notebooks ARGS=--prose")


def test_readme_is_short_enough_to_be_read():
    words = [word for word in (ROOT / "README.md").read_text("utf-8").split()
             if re.search(r"\w", word)]
    assert len(words) <= 1300


# --- and each check finds its fault ---------------------------------------------------------


def good_notebook():
    """A notebook that has no fault; in the cells that are its content, code in 1, 3, 5, 7, 10."""
    picture = new_output("display_data", {"image/png": "iVBO/root/Rw0K", "text/plain": "a line"},
                         metadata={"image/png": {"alt": "A line that rises."}})
    cells = [
        new_markdown_cell("# 01 · Title\n\n## What you\u2019ll do\n\n## What you'll learn\n\n"
                          "## What you need\n\n[Chapter 02](02_b.ipynb). Reading takes about 5\n"
                          "minutes.\n\n![a batch](batch.png)"),
        new_code_cell("1 + 1"),
        new_markdown_cell("And now:"),
        new_code_cell("2 + 2", metadata={"tags": ["measured", "nbval-ignore-output"]}),
        new_markdown_cell("And then:\n\n```\n# Exercises\n```\n\n<img src='a.svg' alt='two'>"),
        new_code_cell("plot()", outputs=[picture]),
        new_markdown_cell("And last:"),
        new_code_cell("3 + 3", outputs=[new_output("stream", name="stdout", text="6\n")]),
        new_markdown_cell("## Summary"),
        new_markdown_cell("## Exercises\n\n1. What is 4 + 4?"),
        new_markdown_cell("### Answer 1", metadata={"jp-MarkdownHeadingCollapsed": True}),
        new_code_cell("4 + 4", metadata={"tags": ["solution"]}),
    ]
    links = [new_markdown_cell(source, metadata={"tags": ["navigation", "remove-cell"]})
             for source in ("[Start](start.md)", "## Next\n\n[Start](start.md)")]
    cells = [links[0], *cells, links[1]]
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    return new_notebook(cells=cells)


# In the following, cells are counted as in `content`: the links before them are number -1.


def change(number, **values):
    """A fault: these fields of cell `number` get these values."""
    return lambda notebook: notebook.cells[number + 1].update(nbformat.from_dict(values))


def replace(number, old, new):
    """A fault: cell `number` says `new` where it said `old`."""
    def plant(notebook):
        cell = notebook.cells[number + 1]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)
    return plant


def move(number, to):
    """A fault: a cell is elsewhere."""
    return lambda notebook: notebook.cells.insert(to + 1, notebook.cells.pop(number + 1))


def show(number, *output, **values):
    """A fault: cell `number` has this output besides."""
    return lambda notebook: notebook.cells[number + 1].outputs.append(new_output(*output, **values))


def lengthen(*numbers, lines, first="x = 1"):
    """A fault: these cells have that many lines."""
    def plant(notebook):
        for number in numbers:
            notebook.cells[number + 1].source = "\n\n".join([first] + ["x = 1"] * (lines - 1))
    return plant


FAULTS = [
    (executed, change(3, execution_count=None)),
    (executed, change(3, execution_count=7)),
    (no_errors, show(3, "error", ename="ValueError", evalue="", traceback=[])),
    (no_errors, show(3, "stream", name="stderr", text="a warning")),
    (opening, move(0, 1)),
    (opening, replace(0, "# 01 · Title", "Title")),
    (opening, replace(0, "## What you'll learn", "What you'll learn")),
    (opening, replace(0, "What you need", "What you want")),
    (opening, replace(0, "about 5\nminutes", "a while")),
    (opening, replace(0, "about 5\nminutes", "about 10 minutes")),
    (opening, lengthen(3, lines=200)),
    (navigation, lambda notebook: notebook.cells.pop(0)),
    (navigation, lambda notebook: notebook.cells.pop()),
    (navigation, change(12, source="[Start](start.md)")),
    (mentions_are_links, replace(2, "And now:", "And now, as in chapter 03:")),
    (mentions_are_links, replace(0, "[Chapter 02](02_b.ipynb)", "Chapters 02\nand 03")),
    (one_title, replace(2, "And now:", "# And now:")),
    (one_title, replace(0, "# 01 · Title", "## Title")),
    (ending, replace(8, "Summary", "Afterword")),
    (ending, replace(9, "## Exercises", "Exercises")),
    (ending, move(9, 8)),
    (ending, change(11, metadata={})),
    (ending, change(1, metadata={"tags": ["solution"]})),
    (ending, change(10, metadata={})),
    (ending, replace(10, "### Answer 1", "Of course:\n\n### Answer 1")),
    (ending, replace(10, "### Answer 1", "### Answer 1\n\nEight, and this would not be folded.")),
    (ending, replace(10, "### Answer 1", "### Answer 2")),
    (ending, replace(9, "1. What is 4 + 4?", "1. What is 4 + 4?\n2. And 5 + 5?")),
    (short_cells, lengthen(3, lines=21)),
    (short_cells, lengthen(3, lines=31, first="class A:")),
    (short_cells, lengthen(1, 3, 5, lines=8)),
    (prose_between, lambda notebook: [notebook.cells.pop(number) for number in (5, 3)]),
    (prose_in_markdown, replace(3, "2 + 2", "2 + 2\n\n# ## Sums\n# These are sums.")),
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
    change(10, metadata={}),
    lambda notebook: notebook.metadata.update(language_info={"name": "R"}),
    lambda notebook: notebook.cells.pop(),
])
def test_a_notebook_that_is_not_its_source_is_found(plant):
    notebook = good_notebook()
    source = copy.deepcopy(notebook)
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
    cells = code_cells(notebook)
    for number in (1, 2):
        cells[number].outputs[0].text += "changed"
    cells[3].outputs[0].data["text/plain"] += "changed"
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
