"""Source and notebook agree, each notebook keeps the rules of notebooks/src/README.md, and all
together are a course: every link leads somewhere, tables and figures are those of the notebooks.

That every cell runs and shows what is stored is nbval's part: see pyproject.toml.
"""

import ast
import base64
import io
import re
import sys
from pathlib import Path

import build
import course
import nbformat
import pytest
from matplotlib.image import imread

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {course.key(path): path for path in build.choose(build.sources(), [])}
BUILT = {course.key(path): path for folder in ("notebooks", "notebooks/deeper")
         for path in sorted(ROOT.glob(f"{folder}/[0-9][0-9]_*.ipynb"))}
CHAPTERS = {name: path for name, path in BUILT.items() if not name.startswith("deeper/")}

OPENING = ["What you'll do", "What you'll learn", "What you need"]
MACHINE_PATH = re.compile(r"/(?:work|root|home|Users|tmp/ipykernel)[\w-]*/[\w./-]*")


def tags(cell):
    return cell.metadata.get("tags", [])


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def without_code(text):
    """Markdown without what stands between ``` fences."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def prose(notebook):
    return without_code("\n\n".join(
        cell.source for cell in notebook.cells if cell.cell_type == "markdown"))


# --- the rules: each takes a notebook and returns complaints --------------------------------


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


def executed_without_errors(notebook):
    """Every code cell ran once, from top to bottom, and wrote nothing to stderr."""
    counts = [cell.execution_count for cell in code_cells(notebook)]
    complaints = []
    if counts != list(range(1, len(counts) + 1)):
        complaints.append(f"execution counts are {counts}")
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                complaints.append(f"code cell {cell.execution_count} shows an error")
    return complaints


def opening(notebook):
    """The first cell has the only title and a block: what one does, learns, needs."""
    first = notebook.cells[1].source  # before it are the links to the neighbours
    block = " ".join(re.findall(r"^> ?(.*)$", first, re.MULTILINE)).replace("\u2019", "'")
    complaints = []
    if re.findall(r"\*\*(What you[^*]*):\*\*", block) != OPENING:
        complaints.append(f"first cell has no quoted block with **{':** … **'.join(OPENING)}:**")
    titles = re.findall(r"^# .*", prose(notebook), re.MULTILINE)
    if len(titles) != 1 or not first.startswith(titles[0]):
        complaints.append(f"has the titles {titles}")
    return complaints


def ending(notebook):
    """A summary, then exercises with an answer to each; a deeper notebook may do without them."""
    headings = re.findall(r"^##+ +(.+?) *$", prose(notebook), re.MULTILINE)
    is_deeper = notebook.cells[1].source.startswith("# Deeper · ")
    if "Summary" not in headings:
        return ["has no summary"]
    if "Exercises" not in headings:
        return [] if is_deeper else ["has no exercises"]
    complaints = []
    if headings.index("Exercises") < headings.index("Summary"):
        complaints.append("has its exercises before its summary")
    (exercises,) = [cell.source for cell in notebook.cells
                    if re.search(r"^## Exercises", cell.source, re.MULTILINE)]
    asked = re.findall(r"^(\d+)\. ", exercises, re.MULTILINE)
    answered = [heading.removeprefix("Answer ") for heading in headings
                if re.match(r"Answer \d", heading)]
    if asked != answered:
        complaints.append(f"has the exercises {asked} and the answers {answered}")
    return complaints


def paragraphs_stay_whole(text):
    """No line within a paragraph begins as an item of a list does: Markdown begins a list there."""
    complaints = []
    inside = False  # of a paragraph
    for line in without_code(text).splitlines():
        is_item = re.match(r"\d+[.)]\s", line)
        if inside and is_item:
            complaints.append(f"begins a list with {line!r}")
        if not line.strip():
            inside = False
        elif not line.startswith((" ", "#")):
            inside = not is_item
    return complaints


def sections_are_markdown(notebook):
    """No code cell holds a section: the mark that begins a markdown cell was forgotten there."""
    return [f"code cell {cell.execution_count} has a heading" for cell in code_cells(notebook)
            if re.search(r"^# #+ ", cell.source, re.MULTILINE)]


def no_machine_paths(notebook):
    """Nothing says in whose folders the notebook was written or run."""
    complaints = []
    for number, cell in enumerate(notebook.cells):
        # Base64 has slashes too, and a picture can't be read here.
        text = re.sub(r"'image/png': '[^']*'", "", str(cell))
        complaints += [f"cell {number} has {path}" for path in MACHINE_PATH.findall(text)]
    return complaints


def pictures(notebook):
    """Every picture has a text for those who can't see it, and nothing of it is cut off."""
    complaints = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown" and re.search(r"!\[\s*\]\(", cell.source):
            complaints.append(f"cell {number} has an image without alternative text")
        for output in cell.get("outputs", []):
            for kind in output.get("data", {}):
                if kind.startswith("image/") and not output.metadata.get(kind, {}).get("alt"):
                    complaints.append(f"cell {number} shows a {kind} without alternative text")
            if "image/png" in output.get("data", {}):
                pixels = imread(io.BytesIO(base64.b64decode(output.data["image/png"])))[:, :, :3]
                edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
                if min(edge.min() for edge in edges) < 0.99:  # not white
                    complaints.append(f"cell {number}: a title or label is longer than its figure")
    return complaints


def checks_assert(notebook):
    """A folded cell that says that it checks something asserts it."""
    return [f"code cell {cell.execution_count} says that it checks, and asserts nothing"
            for cell in code_cells(notebook) if cell.source.startswith("# check: ")
            and not any(isinstance(node, ast.Assert | ast.Raise)
                        for node in ast.walk(ast.parse(cell.source)))]


def few_rounds_can_be_taken(notebook):
    """What a tag few:OLD=>NEW replaces is in its cell once, and differs in numbers only."""
    complaints = []
    for cell in code_cells(notebook):
        try:
            build.with_few(cell)
        except ValueError as error:
            complaints.append(f"code cell {cell.execution_count}: {error}")
    return complaints


RULES = [executed_without_errors, opening, ending, sections_are_markdown, no_machine_paths,
         pictures, checks_assert, few_rounds_can_be_taken]


@pytest.mark.parametrize("name", BUILT)
def test_a_notebook_is_its_source_and_keeps_the_rules(name):
    notebook = nbformat.read(BUILT[name], as_version=4)
    complaints = [f"{complaint}\n    make notebooks CH={name} ARGS=--prose, or without ARGS where "
                  "code has changed"
                  for complaint in same_as_source(notebook, build.read_source(SOURCES[name]))]
    for rule in RULES:
        complaints += [f"{complaint}\n    {rule.__doc__}" for complaint in rule(notebook)]
    complaints += paragraphs_stay_whole(prose(notebook))
    assert not complaints, "\n".join(["", *complaints])


# --- together they are a course -------------------------------------------------------------


def test_every_source_has_its_notebook_and_its_place_in_the_course():
    assert list(SOURCES) == list(BUILT), "make notebooks"
    listed = [chapter["file"] for part in course.PARTS for chapter in part["chapter"]]
    assert listed == list(CHAPTERS)
    assert [name[:2] for name in listed] == [f"{n:02}" for n in range(1, len(listed) + 1)]


def test_each_assignment_goes_with_the_chapter_that_its_page_says():
    text = (ROOT / "notebooks/assignments/README.md").read_text("utf-8")
    said = re.findall(r"^\| (ps\d+) \| \[\d\d\]\(\.\./(\w+)\.ipynb\)", text, re.MULTILINE)
    listed = {name: course.entry(name).get("assignment") for name in CHAPTERS}
    assert said == [(listed[name], name) for name in CHAPTERS if listed[name]]
    assert [name for name, _ in said] == [path.name for path in sorted(
        ROOT.glob("notebooks/assignments/source/ps*"))]


def test_each_deeper_notebook_is_listed_at_its_chapter_and_linked_from_it():
    listed = {}
    for part in course.PARTS:
        for chapter in part["chapter"]:
            for deeper in chapter.get("deeper", []):
                listed[f"deeper/{deeper['file']}"] = chapter["file"]
    assert sorted(listed) == sorted(set(BUILT) - set(CHAPTERS))
    for name, chapter in listed.items():
        assert Path(name).name[:2] == chapter[:2]
        linked = prose(nbformat.read(BUILT[chapter], as_version=4))
        assert f"]({name}.ipynb)" in linked, f"{chapter} never says that there is {name}"


def test_the_chapters_of_the_short_path_need_only_each_other():
    short = {row["file"][:2] for _, rows in course.chapters() for row in rows if row["short"]}
    for name, path in CHAPTERS.items():
        if name[:2] in short:
            opening_cell = nbformat.read(path, as_version=4).cells[1].source
            needed = opening_cell.split("What you need")[1].split("Reading takes")[0]
            numbers = set(re.findall(r"\[(?:chapter )?(\d\d)\]", needed))
            for first, last in re.findall(r"\[(\d\d)\]\S* to\s>? ?\[(\d\d)\]", needed):
                numbers |= {f"{number:02}" for number in range(int(first), int(last))}
            assert numbers <= short, f"{name} needs {sorted(numbers - short)}"


@pytest.mark.parametrize("page", course.pages(), ids=lambda page: page.name)
def test_tables_of_contents_are_those_that_the_build_makes(page):
    text = page.read_text("utf-8")
    assert text == course.with_contents(text, course.chapters(), *course.pages()[page]), (
        "make notebooks ARGS=--prose")


def test_figures_beside_the_notebooks_are_those_within():
    asked = {name: png for path in BUILT.values()
             for name, png in build.figures(nbformat.read(path, as_version=4))}
    found = {path.name: path.read_bytes() for path in ROOT.glob("notebooks/src/figures/*")}
    assert found == asked


def dead_links(text, folder):
    """The relative links in Markdown that lead to no file, or to no heading in one."""
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", without_code(text))):
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


def test_every_link_leads_somewhere():
    dead = {name: dead_links(prose(nbformat.read(path, as_version=4)), path.parent)
            for name, path in BUILT.items()}
    for page in [ROOT / "README.md", *ROOT.glob(".github/*.md"), *ROOT.glob("notebooks/**/*.md")]:
        if page.parent.name == ".ipynb_checkpoints":    # of who has opened the page in JupyterLab
            continue
        text = page.read_text("utf-8")
        dead[page] = dead_links(text, page.parent) + paragraphs_stay_whole(text)
    assert not {name: links for name, links in dead.items() if links}


PROGRAMS = {path.name: path for folder in ("notebooks", "notebooks/deeper")
            for path in sorted(ROOT.glob(f"{folder}/*.py")) if path.name != "conftest.py"}
# What the programs that readers keep import besides Python's own: PyTorch alone, but for these.
OTHER_IMPORTS = {"lenet_contestant.py": {"helpers", "mxnet"}, "ranks.py": {"joblib", "torch"},
                 "train_lenet.py": {"helpers", "mxnet"},
                 "train_transformer.py": {"torch", "transformer"}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_readers_keep_needs_nothing_else(name):
    imported = set()
    for node in ast.walk(ast.parse(PROGRAMS[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == OTHER_IMPORTS.get(name, {"torch"})
