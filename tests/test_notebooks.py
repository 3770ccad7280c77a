"""The chapters: source and notebook agree, and both keep the rules that all chapters share.

That every cell runs and shows what is stored is nbval's part: see pyproject.toml. A check here
takes a notebook and returns complaints, so that it can be tried on a notebook with a planted
fault: a check that finds nothing anywhere would look the same as a course without mistakes.
"""

import ast
import base64
import copy
import io
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import build
import course
import matplotlib.pyplot as plt
import nbformat
import pytest
from cells import is_open, tags, tree
from matplotlib.image import imread
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from nbval.plugin import get_sanitize_patterns

from helpers import plotting

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {course.key(path): path for path in build.choose(build.sources(), [])}
BUILT = {course.key(path): path for folder in ("notebooks", "notebooks/deeper")
         for path in sorted(ROOT.glob(f"{folder}/[0-9][0-9]_*.ipynb"))}
CHAPTERS = {name: path for name, path in BUILT.items() if not name.startswith("deeper/")}

OPENING = ["What you'll do", "What you'll learn", "What you need"]
ENDING = ["Summary", "Exercises"]
MACHINE_PATH = re.compile(r"/(?:work|root|home|Users|tmp/ipykernel)[\w-]*/[\w./-]*")


def test_figures_beside_the_notebooks_are_those_within():
    asked = {name: png for path in BUILT.values()
             for name, png in build.figures(nbformat.read(path, as_version=4))}
    found = {path.name: path.read_bytes() for path in ROOT.glob("notebooks/src/figures/*")}
    assert asked and found == asked


def ink_at_the_edge(png):
    """Whether a picture's outermost rows or columns are not all white: something was cut off."""
    pixels = imread(io.BytesIO(png))[:, :, :3]
    edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    return min(edge.min() for edge in edges) < 0.99


@pytest.mark.parametrize("name", BUILT)
def test_no_figure_is_cut_off(name):
    pictures = []
    for cell in nbformat.read(BUILT[name], as_version=4).cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                pictures.append(base64.b64decode(output.data["image/png"]))
    cut = [number for number, png in enumerate(pictures, 1) if ink_at_the_edge(png)]
    assert not cut, f"a title or label is longer than its figure: {cut}, counted from 1"


@pytest.mark.parametrize("part", ["title", "xlabel", "ylabel"])
def test_a_label_longer_than_its_figure_is_found(part):
    for letters, cut in [(9, False), (150, True)]:
        fig, _ = plotting.figure(**{"title": "", part: letters * "m"})
        png = io.BytesIO()
        fig.savefig(png, format="png", dpi=110)
        plt.close(fig)
        assert ink_at_the_edge(png.getvalue()) == cut


PROGRAMS = {path.name: path for folder in ("notebooks", "notebooks/deeper")
            for path in sorted(ROOT.glob(f"{folder}/*.py")) if path.name != "conftest.py"}
# What the programs made of cells import besides Python's own: PyTorch alone, but for these.
OTHER_IMPORTS = {"lenet_contestant.py": {"helpers", "mxnet"}, "ranks.py": {"joblib", "torch"},
                 "train_lenet.py": {"helpers", "mxnet"}}


def test_files_made_of_cells_are_those_cells():
    made = {name: text for path in BUILT.values()
            for name, text in build.files(nbformat.read(path, as_version=4)).items()}
    found = {name: path.read_text("utf-8") for name, path in PROGRAMS.items()}
    assert made and found == made, "make notebooks"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_readers_keep_needs_nothing_else(name):
    imported = set()
    for node in ast.walk(ast.parse(PROGRAMS[name].read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("." * node.level + (node.module or "").split(".")[0])
    assert imported - sys.stdlib_module_names == OTHER_IMPORTS.get(name, {"torch"})


# --- the rules ------------------------------------------------------------------------------


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


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


def in_the_box(cell):
    """What a quoted block says after each bold name, {"What you'll do": "train ..."}."""
    quoted = " ".join(re.findall(r"^> ?(.*)$", cell.source, re.MULTILINE)).replace("\u2019", "'")
    _, *pairs = re.split(r"\*\*(What you[^*]*):\*\*", quoted)
    return dict(zip(pairs[::2], pairs[1::2]))


def opening(notebook):
    """The first cell has the title and a block: what one does, learns, needs, how long it takes.

    A block and no headings, so that a picture or code is on the first screen.
    """
    first = content(notebook)[0]
    if first.cell_type != "markdown":
        return ["does not begin with prose"]
    complaints = []
    if not re.match(r"# \S", first.source):
        complaints.append("does not begin with a title")
    if list(in_the_box(first)) != OPENING:
        complaints.append(f"first cell has no quoted block with **{':** … **'.join(OPENING)}:**")
    time = f"Reading takes about {course.minutes(notebook)} minutes"
    if time not in " ".join(first.source.replace("\n>", "\n").split()):
        complaints.append(f"first cell does not say: {time}")
    return complaints


def needs(notebook):
    """Numbers of the chapters that it says it needs."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", in_the_box(content(notebook)[0])["What you need"])
    found = set()
    for mention in re.findall(r"\b[Cc]hapters?((?: \d\d\b|,| and| or| to)+)", text):
        for first, last in re.findall(r"(\d\d)(?: to (\d\d))?", mention):
            found |= {f"{number:02}" for number in range(int(first), int(last or first) + 1)}
    return found


def test_the_chapters_of_the_short_path_need_only_each_other():
    short = {row["file"][:2] for _, rows in course.chapters() for row in rows if row["short"]}
    assert short
    for path in CHAPTERS.values():
        if path.stem[:2] in short:
            assert needs(nbformat.read(path, as_version=4)) <= short, path.stem


def test_needs_reads_lists_and_ranges():
    cell = new_markdown_cell("> **What you need:** chapters [01](01_a.ipynb) to\n> [03](03_c.ipynb)"
                             " and [07](07_d.ipynb), 4 GB and PyTorch 2.13.")
    assert needs(new_notebook(cells=[cell])) == {"01", "02", "03", "07"}


def number(notebook):
    """A chapter's number, as "03"; of a deeper notebook nothing."""
    found = re.match(r"\d\d\b", course.title(notebook))
    return found[0] if found else ""


NUMBERED = re.compile(r"\d+[.)]\s")


def lists_in_paragraphs(text):
    """Numbered lines that stand within a paragraph: Markdown begins a list there."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    inside = False  # of a paragraph's text
    for line in prose.splitlines():
        if inside and NUMBERED.match(line):
            found.append(line)
        if not line.strip():
            inside = False
        elif not line.startswith((" ", "#")):
            inside = not NUMBERED.match(line)
    return found


def paragraphs_stay_whole(notebook):
    """No line of a paragraph begins as an item of a list does."""
    return [f"begins a list with {line!r}" for cell in content(notebook)
            if cell.cell_type == "markdown" for line in lists_in_paragraphs(cell.source)]


def one_title(notebook):
    """The title is the only heading of its rank: all others belong below it."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^# .*", prose, re.MULTILINE)
    return [] if len(titles) == 1 else [f"has the titles {titles}"]


def ending(notebook):
    """A summary, then exercises, then an answer to each, folded, with code in at least one.

    A deeper notebook may end with its summary.
    """
    where = {name: number for number, cell in enumerate(notebook.cells)
             for name in headings(cell)}
    is_deeper = content(notebook)[0].source.startswith("# Deeper · ")
    if is_deeper and "Summary" in where and not any(
            name == "Exercises" or name.startswith("Answer ") for name in where):
        return []
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


def prose_in_markdown(notebook):
    """No code cell holds a section: the mark that begins a markdown cell was forgotten there."""
    return [f"cell {number} is code with a heading" for number, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" and re.search(r"^# #+ ", cell.source, re.MULTILINE)]


def mostly_compared(notebook):
    """Few cells are exempt from having their output compared: a quarter, or three."""
    exempt = [cell for cell in code_cells(notebook)
              if {"measured", "nbval-ignore-output"} & set(tags(cell))]
    if len(exempt) <= max(3, len(code_cells(notebook)) / 4):
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


def checks_assert(notebook):
    """A folded cell that says that it checks something asserts it."""
    return [f"cell {number} says that it checks, and asserts nothing"
            for number, cell in enumerate(notebook.cells)
            if "fold" in tags(cell) and cell.source.startswith("# check: ")
            and not asserts(cell.source)]


def asserts(source):
    """Whether a cell asserts or raises something, and does more than define and import."""
    tree = ast.parse(source)
    found = any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree))
    return found and not all(isinstance(statement, DEFINITIONS) for statement in tree.body)


def few_rounds_can_be_taken(notebook):
    """What a tag few:OLD=>NEW replaces is in its cell once, and differs in numbers only."""
    complaints = []
    for cell in code_cells(notebook):
        try:
            build.with_few(cell)
        except ValueError as error:
            complaints.append(f"cell {cell.execution_count}: {error}")
    return complaints


CHECKS = [executed, no_errors, opening, one_title, ending, prose_in_markdown, paragraphs_stay_whole,
          mostly_compared, training_tagged, no_machine_paths, alternative_texts, checks_assert,
          few_rounds_can_be_taken]


# --- the rules for code that is read once ---------------------------------------------------

# They hold for open cells. A cell that proves or draws is folded, and so is each answer.

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LOOPS = ast.For | ast.AsyncFor | ast.While | COMPREHENSIONS
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
DEFINITIONS = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
# They run through what they are given. Where nobody keeps the result, that is a loop in disguise.
RUN_THROUGH = {"all", "any", "deque", "dict", "list", "max", "min", "set", "sorted", "sum", "tuple"}


def in_open_cells(notebook, find):
    """Complaints with cell, line and text of each node that `find(code)` finds in an open cell."""
    complaints = []
    for number, cell in enumerate(notebook.cells):
        if is_open(cell):
            for node in find(tree(cell)):
                text = " ".join(ast.unparse(node).split())
                complaints.append(f"cell {number}, line {node.lineno}: {text[:70]}")
    return complaints


def dropped(code):
    """The values that `code` computes and doesn't keep: alone on a line, or assigned to `_`."""
    for node in ast.walk(code):
        if isinstance(node, ast.Expr):
            yield node.value
        elif isinstance(node, ast.Assign):
            if all(isinstance(name, ast.Name) and name.id == "_" for name in node.targets):
                yield node.value


def no_tuple_as_a_statement(notebook):
    """No line does two things by a comma: `ax.set_ylim(0), ax.legend()`."""
    def find(code):
        return [value for value in dropped(code) if isinstance(value, ast.Tuple)]
    return in_open_cells(notebook, find)


def no_nested_comprehension(notebook):
    """No comprehension has another one within it, or two `for`."""
    def find(code):
        for node in ast.walk(code):
            if isinstance(node, COMPREHENSIONS):
                inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
                if len(node.generators) > 1 or inner != [node]:
                    yield node
    return in_open_cells(notebook, find)


def name_called(node):
    """`"list"` where `node` is `list(...)` or `builtins.list(...)`; "" where it is no call."""
    function = getattr(node, "func", None)
    return getattr(function, "id", getattr(function, "attr", ""))


def is_loop_in_disguise(value):
    """Whether computing `value` runs a comprehension, or a `map`, and no more than that."""
    if isinstance(value, ast.BoolOp):
        return any(is_loop_in_disguise(part) for part in value.values)
    if name_called(value) in RUN_THROUGH:
        return any(isinstance(given, COMPREHENSIONS) or name_called(given) == "map"
                   for given in value.args)
    return isinstance(value, COMPREHENSIONS)


def no_comprehension_for_its_effects(notebook):
    """No comprehension stands where its value is dropped: there it is a loop."""
    def find(code):
        return [value for value in dropped(code) if is_loop_in_disguise(value)]
    return in_open_cells(notebook, find)


def names_stored(code):
    """The names that get a value anywhere in `code`."""
    return {node.id for node in ast.walk(code)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def names_read(code):
    return {node.id for node in ast.walk(code) if isinstance(node, ast.Name)}


def defaults(function):
    """Pairs of a parameter's name and its default, of a function or a lambda."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    pairs = list(zip(reversed(positional), reversed(given.defaults)))  # only the last have one
    pairs += zip(given.kwonlyargs, given.kw_defaults)
    return [(parameter.arg, default) for parameter, default in pairs if default is not None]


def no_default_that_binds_a_loop(notebook):
    """No lambda or function in a loop keeps the loop's variable by a default: `lambda x=x: ...`."""
    def find(code):
        found = []
        for loop in ast.walk(code):
            if not isinstance(loop, LOOPS):
                continue
            variables = names_stored(loop)
            for function in ast.walk(loop):
                if isinstance(function, FUNCTIONS) and function not in found:
                    read = [names_read(default) & {name, *variables}
                            for name, default in defaults(function)]
                    if any(read):
                        found.append(function)
        return found
    return in_open_cells(notebook, find)


PLAIN = [no_tuple_as_a_statement, no_nested_comprehension, no_comprehension_for_its_effects,
         no_default_that_binds_a_loop]


# --- the chapters keep them -----------------------------------------------------------------


def test_every_source_has_its_notebook_and_every_notebook_its_source():
    assert list(SOURCES) == list(BUILT) != [], "make notebooks"


@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_is_what_its_source_says(chapter):
    notebook = nbformat.read(BUILT[chapter], as_version=4)
    source = build.read_source(SOURCES[chapter])
    assert not same_as_source(notebook, source), (
        f"make notebooks CH={chapter} ARGS=--prose, or without ARGS where code has changed")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("chapter", BUILT)
def test_chapter_keeps_the_rule(chapter, check):
    assert not check(nbformat.read(BUILT[chapter], as_version=4)), check.__doc__


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("check", PLAIN, ids=lambda check: check.__name__)
def test_what_is_written_out_can_be_read_once(name, check):
    assert not check(nbformat.read(BUILT[name], as_version=4)), check.__doc__


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


@pytest.mark.parametrize("page", [page for page in PAGES if page.endswith(".md")])
def test_no_paragraph_of_a_page_becomes_a_list(page):
    assert lists_in_paragraphs((ROOT / page).read_text("utf-8")) == []


@pytest.mark.parametrize(("text", "found"), [
    ("It is\n1. Next", ["1. Next"]),
    ("It is\n4) of them", ["4) of them"]),
    ("It is\n\n1. Next\n2. Last", []),
    ("# It is\n1. Next\n   is\n2. Last", []),
    ("It is\n1.5 or\n1990", []),
    ("```\nIt is\n1. Next\n```", []),
])
def test_a_list_within_a_paragraph_is_found(text, found):
    assert lists_in_paragraphs(text) == found


@pytest.mark.parametrize(("text", "dead"), [
    ("[a](README.md) and [b](README.md#chapters), [c](https://example.org/x)", []),
    ("[a](READYOU.md)", ["READYOU.md"]),
    ("[a](README.md#nowhere)", ["README.md#nowhere"]),
    ("# One thing\n[a](#one-thing) [b](#another)", ["#another"]),
    ("<img src='no.png' alt=''>", ["no.png"]),
    ("```\n[a](no.md)\n```\n`[b](no.md)`", []),
])
def test_a_dead_link_is_found(text, dead):
    assert dead_links(text, ROOT) == dead


def test_the_course_has_each_chapter_once_and_in_order():
    chapters = [chapter for part in course.PARTS for chapter in part["chapter"]]
    assert [chapter["file"] for chapter in chapters] == list(CHAPTERS)
    numbers = [number(nbformat.read(path, as_version=4)) for path in CHAPTERS.values()]
    assert numbers == [f"{n:02}" for n in range(1, len(CHAPTERS) + 1)]


def test_each_deeper_notebook_is_listed_at_its_chapter_and_linked_from_it():
    listed = {}
    for part in course.PARTS:
        for chapter in part["chapter"]:
            for deeper in chapter.get("deeper", []):
                listed[f"deeper/{deeper['file']}"] = chapter["file"]
    assert sorted(listed) == sorted(set(BUILT) - set(CHAPTERS)) != []
    for name, chapter in listed.items():
        assert Path(name).name[:2] == chapter[:2]
        notebook = nbformat.read(BUILT[name], as_version=4)
        assert notebook.cells[1].source.startswith("# Deeper · ")
        prose = [cell.source for cell in nbformat.read(BUILT[chapter], as_version=4).cells]
        assert any(f"]({name}.ipynb)" in source for source in prose), f"{chapter} never says so"


@pytest.mark.parametrize("page", course.pages(), ids=lambda page: page.name)
def test_tables_of_contents_are_those_that_the_build_makes(page):
    text = page.read_text("utf-8")
    assert text == course.with_contents(text, course.chapters(), *course.pages()[page]), (
        "make notebooks ARGS=--prose")


def test_the_skeleton_of_a_chapter_builds_and_keeps_the_rules(tmp_path):
    text = (ROOT / "notebooks/src/README.md").read_text("utf-8")
    (skeleton,) = [block for block in re.findall(r"```\n(.*?)```", text, re.DOTALL)
                   if block.startswith("# %% [markdown]\n# # 17 ")]
    (tmp_path / "src").mkdir()
    (tmp_path / "src/14_ddp.py").write_text("# %% [markdown]\n# # 14 · DDP\n")
    source = tmp_path / "src/17_its_title.py"
    source.write_text(skeleton)
    build.build(source, tmp_path / "17_its_title.ipynb")
    notebook = nbformat.read(tmp_path / "17_its_title.ipynb", as_version=4)
    assert [complaint for check in CHECKS for complaint in check(notebook)] == []


def test_what_depends_on_the_address_is_what_the_build_makes():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert readme == course.with_beginning(readme, course.repository()), (
        "make notebooks ARGS=--prose")
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert citation == course.with_repository(citation, course.repository()), (
        "make notebooks ARGS=--prose")


@pytest.mark.parametrize("address", ["", "https://github.com/an-owner/a.name"])
def test_readme_and_citation_name_the_address_or_nothing(address):
    readme = course.with_beginning((ROOT / "README.md").read_text("utf-8"), address)
    begin = readme[readme.index(course.BEGIN_ADDRESS):readme.index(course.END_ADDRESS)]
    found = set(re.findall(r"https://[^\s)\]]+", begin))
    other = "title: A\nrepository-code: https://github.com/b/c\n"
    citation = course.with_repository(other, address)
    if address:
        assert f"git clone {address}\ncd a.name\nmake lab" in begin
        assert "https://codespaces.new/an-owner/a.name" in found
        assert "https://an-owner.github.io/a.name/" in found
        workflow = f"{address}/actions/workflows/tests.yml"
        assert workflow in found and f"{workflow}/badge.svg" in found
        assert (ROOT / ".github/workflows/tests.yml").exists()
        assert citation == f"title: A\nrepository-code: {address}\n"
    else:
        assert not found and "git clone" not in begin and "make lab" in begin
        assert citation == "title: A\n"


# --- and each check finds its fault ---------------------------------------------------------


def good_notebook():
    """A notebook that has no fault; in the cells that are its content, code in 1, 3, 5, 7, 10."""
    picture = new_output("display_data", {"image/png": "iVBO/root/Rw0K", "text/plain": "a line"},
                         metadata={"image/png": {"alt": "A line that rises."}})
    cells = [
        new_markdown_cell("# 01 · Title\n\n> **What you\u2019ll do:** add.\n>\n"
                          "> **What you'll learn:** sums.\n>\n> **What you need:** [chapter 02]"
                          "(02_b.ipynb). Reading takes about 5\n> minutes.\n\n![a](batch.png)"),
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


def lengthen(number, lines):
    """A fault: cell `number` has that many lines."""
    return change(number, source="\n\n".join(["x = 1"] * lines))


def repeat(number, times, labels):
    """A fault: cell `number`, with these tags, is there so many times more."""
    def plant(notebook):
        cell = nbformat.from_dict({**notebook.cells[number + 1], "metadata": {"tags": labels}})
        notebook.cells[number + 1 : number + 1] = [cell] * times
    return plant


FAULTS = [
    (executed, change(3, execution_count=None)),
    (executed, change(3, execution_count=7)),
    (no_errors, show(3, "error", ename="ValueError", evalue="", traceback=[])),
    (no_errors, show(3, "stream", name="stderr", text="a warning")),
    (opening, move(0, 1)),
    (opening, replace(0, "# 01 · Title", "Title")),
    (opening, replace(0, "> **What you'll learn:**", "**What you'll learn:**")),
    (opening, replace(0, "What you need", "What you want")),
    (opening, replace(0, "about 5\n> minutes", "a while")),
    (opening, replace(0, "about 5\n> minutes", "about 10 minutes")),
    (opening, lengthen(3, lines=200)),
    (paragraphs_stay_whole, replace(2, "And now:", "And now it is\n1. And then:")),
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
    (checks_assert, change(3, source="# check: sums\n2 + 2", metadata={"tags": ["fold"]})),
    (checks_assert, change(3, metadata={"tags": ["fold"]}, source=(
        "# check: sums\ndef add(a, b):\n    assert a != b\n    return a + b"))),
    (few_rounds_can_be_taken, change(3, metadata={"tags": ["few:ROUNDS = 15=>ROUNDS = 3"]})),
    (few_rounds_can_be_taken, change(3, metadata={"tags": ["few:2=>1"]})),
    (few_rounds_can_be_taken, change(3, metadata={"tags": ["few:2 + 2=>2 - 1"]})),
    (few_rounds_can_be_taken, change(3, metadata={"tags": ["few:2 + 2"]})),
    (prose_in_markdown, replace(3, "2 + 2", "2 + 2\n\n# ## Sums\n# These are sums.")),
    (mostly_compared, repeat(5, 4, ["measured", "nbval-ignore-output"])),
    (mostly_compared, repeat(5, 4, ["nbval-ignore-output"])),
    (training_tagged, replace(1, "1 + 1", "with autograd.record():\n    f(x)\ntrainer.step(1)")),
    (training_tagged, replace(3, "2 + 2", "loss.backward()\nsgd.step()")),
    (no_machine_paths, replace(0, "batch.png", "/home/ann/batch.png")),
    (no_machine_paths, replace(1, "1 + 1", "open('/home/ann/course/x')")),
    (no_machine_paths, show(3, "stream", name="stdout", text="/tmp/ipykernel_123/456.py:1: oh")),
    (no_machine_paths, show(3, "display_data", {"text/plain": "at /Users/ann/data/mnist"})),
    (alternative_texts, replace(0, "![a]", "![]")),
    (alternative_texts, replace(4, "alt='two'", "alt=''")),
    (alternative_texts, replace(4, "alt='two'", "")),
    (alternative_texts, show(3, "display_data", {"image/png": "iVBORw0K"})),
    (alternative_texts, show(3, "display_data", {"image/png": "iVBORw0K"},
                             metadata={"image/png": {"alt": " "}})),
    (alternative_texts, show(3, "display_data", {"image/svg+xml": "<svg/>"})),
]

# For the rules of plain code, a fault is the code of a cell.
TUPLES = [
    "ax.set_ylim(0), ax.legend()",
    "(child.kill(), child.wait())",
    "net.initialize(),",
    "for net in nets:\n    net.initialize(), net.hybridize()",
    "def stop(child):\n    child.kill(), child.wait()\n    return child",
    "x.shape, y.shape",
    "_ = ax.set_ylim(0), ax.legend()",
    "%matplotlib inline\nax.set_ylim(0), ax.legend()",
    "%%time\nx = 1\nax.set_ylim(0), ax.legend()",
]
NESTED = [
    "[[0 for _ in range(k)] for _ in range(k)]",
    "rows = [x for shard in shards for x in shard]",
    "most = max(max(abs(g) for g in grads) for grads in replicas)",
    "pairs = {a: [b for b in range(a)] for a in range(4)}",
    "sizes = [n for n in sorted(len(x) for x in shards)]",
    "good = [x for x in xs if all(x > y for y in ys)]",
    "texts = {f\"{', '.join(str(x) for x in row)}\" for row in rows}",
    "calls = [lambda: [x for x in xs] for xs in rows]",
    "print(*(x for x in xs if x in {y for y in ys}))",
]
FOR_EFFECTS = [
    "[loss.backward() for loss in losses]",
    "{loss.backward() for loss in losses}",
    "(loss.backward() for loss in losses)",
    "{loss: loss.backward() for loss in losses}",
    "_ = [loss.backward() for loss in losses]",
    "list(loss.backward() for loss in losses)",
    "all([thread.join() for thread in threads])",
    "collections.deque((thread.join() for thread in threads), maxlen=0)",
    "_ = list(map(wait, threads))",
    "quiet or [print(loss) for loss in losses]",
    "if quiet:\n    [loss.backward() for loss in losses]",
    "def run():\n    [loss.backward() for loss in losses]",
    "with autograd.record():\n    x = 1; [loss.backward() for loss in losses]",
]
BOUND = [
    "for x in xs:\n    calls.append(lambda x=x: run(x))",
    "calls = [lambda x=x: run(x) for x in xs]",
    "calls = {name: (lambda one=net: run(one)) for name, net in nets.items()}",
    "calls = [lambda some=shards[:k]: run(some) for k in range(4)]",
    "for x in xs:\n    calls.append(lambda y, *, now=x: run(now))",
    "for x in xs:\n    def call(y, x=x):\n        return run(x, y)\n    calls.append(call)",
    "for x in xs:\n    net = build(x)\n    calls.append(lambda n=net: n.run())",
    "for x in xs:\n    if x:\n        calls.append(lambda given=x, /: run(given))",
    "for x in xs:\n    def step():\n        run()\n    calls.append(lambda step=step: step())",
    "while xs:\n    x = xs.pop()\n    calls.append(lambda given=x: run(given))",
    "for name, net in nets:\n    hook(lambda *_, name=name: log.append(name))",
    "def make():\n    for x in xs:\n        yield lambda x=x: run(x)",
]
NOT_PLAIN = {
    no_tuple_as_a_statement: TUPLES,
    no_nested_comprehension: NESTED,
    no_comprehension_for_its_effects: FOR_EFFECTS,
    no_default_that_binds_a_loop: BOUND,
}
for rule, sources in NOT_PLAIN.items():
    FAULTS += [(rule, change(5, source=source)) for source in sources]

# And this is plain.
FINE = [
    "x, y = batch",
    "low, high = min(times), max(times)",
    "shapes = x.shape, y.shape",
    "_, y = batch",
    "def ends(x):\n    return x[0], x[-1]",
    "for x, y in zip(xs, ys):\n    print(x, y)",
    "sizes = [len(shard) for shard in shards if len(shard) > 1]",
    "sizes = sorted(len(shard) for shard in shards)\ntotal = sum(size for size in sizes)",
    "both = [x for x in xs] + [y for y in ys]",
    "for row in rows:\n    shown = [str(x) for x in row]\n    print(', '.join(shown))",
    "table = [[0] * 3, [1] * 3]",
    "_ = [0, 1]",
    "total = _ = sum(x for x in xs)",
    "print(*[len(shard) for shard in shards])",
    "print(sum(len(shard) for shard in shards))",
    "assert all(x > 0 for x in xs)",
    "'A text.'",
    "list(devices)",
    "handles.extend(x.hook() for x in xs)",
    "def train(net, steps=10, devices=devices):\n    for step in range(steps):\n        net(step)",
    "calls = {'one': lambda: run(1), 'two': lambda x=3: run(x)}",
    "for x in xs:\n    calls.append(functools.partial(run, x))",
    "for x in xs:\n    later = lambda y, scale=two: scale * y",
    "ordered = sorted(names, key=lambda name: sizes[name])",
    "calls = [lambda size=3: run(size) for _ in range(4)]",
    "!ls -l",
    "%timeit -n 1 x, y",
    "%%bash\nfor x in a b; do echo $x; done",
    "files = !ls\n%env COURSE_DATA\nx?",
    "await run()",
]


@pytest.mark.parametrize("check", CHECKS + PLAIN, ids=lambda check: check.__name__)
def test_check_is_content_with_a_good_notebook(check):
    assert check(good_notebook()) == []


@pytest.mark.parametrize(("check", "plant"), FAULTS)
def test_check_finds_a_planted_fault(check, plant):
    notebook = good_notebook()
    plant(notebook)
    assert check(notebook)


def test_a_deeper_notebook_may_end_with_its_summary():
    notebook = good_notebook()
    notebook.cells[10:13] = []
    assert ending(notebook), "a chapter may not"
    replace(0, "# 01 · Title", "# Deeper · Title")(notebook)
    assert ending(notebook) == []
    replace(8, "Summary", "Afterword")(notebook)
    assert ending(notebook)


def test_every_check_has_a_planted_fault():
    assert {check for check, _ in FAULTS} == {*CHECKS, *PLAIN}


@pytest.mark.parametrize("source", FINE)
@pytest.mark.parametrize("check", PLAIN, ids=lambda check: check.__name__)
def test_plain_code_is_fine(check, source):
    notebook = good_notebook()
    change(5, source=source)(notebook)
    assert check(notebook) == []


@pytest.mark.parametrize("check", PLAIN, ids=lambda check: check.__name__)
@pytest.mark.parametrize("tag", ["fold", "solution"])
def test_code_that_is_folded_need_not_be_plain(check, tag):
    for source in NOT_PLAIN[check]:
        notebook = good_notebook()
        change(5, source=source, metadata={"tags": ["measured", tag]})(notebook)
        assert check(notebook) == []


@pytest.mark.parametrize("tag", ["measured", "trains", "torch", "figure:a", "file:a.py"])
def test_code_with_another_tag_has_to_be_plain(tag):
    notebook = good_notebook()
    change(5, source=TUPLES[0], metadata={"tags": [tag]})(notebook)
    assert no_tuple_as_a_statement(notebook)


def test_a_complaint_says_where_and_what():
    notebook = good_notebook()
    change(5, source="x = 1\n\nax.set_ylim(0), ax.legend()")(notebook)
    assert no_tuple_as_a_statement(notebook) == [
        "cell 6, line 3: (ax.set_ylim(0), ax.legend())"]


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
import time

print(f"{time.perf_counter()} s")
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


@pytest.mark.parametrize("rounds, seen", [("all", "15"), ("few", "3")])
def test_nbval_takes_as_many_rounds_as_are_asked_for(tmp_path, monkeypatch, rounds, seen):
    cells = [new_code_cell("ROUNDS = 15", metadata={"tags": ["few:ROUNDS = 15=>ROUNDS = 3"]}),
             new_code_cell("_ = open('seen', 'w').write(str(ROUNDS))")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_scratch.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    monkeypatch.setenv("COURSE_ROUNDS", rounds)
    tested = run_pytest(tmp_path / "01_scratch.ipynb")
    assert tested.returncode == 0, tested.stdout
    assert (tmp_path / "seen").read_text() == seen


def test_few_rounds_of_what_is_not_in_the_cell_are_refused_by_its_name(tmp_path, monkeypatch):
    cells = [new_code_cell("1 + 1"),
             new_code_cell("steps = 15", metadata={"tags": ["few:ROUNDS = 15=>ROUNDS = 3"]})]
    nbformat.write(new_notebook(cells=cells), tmp_path / "01_scratch.ipynb")
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    monkeypatch.setenv("COURSE_ROUNDS", "few")
    tested = run_pytest(tmp_path / "01_scratch.ipynb")
    assert tested.returncode == pytest.ExitCode.USAGE_ERROR
    said = tested.stdout + tested.stderr
    assert "01_scratch.ipynb, Cell 1: " in said and "'ROUNDS = 15' is 0 times" in said


@pytest.mark.parametrize("name, value, words", [
    ("COURSE_TWICE", "yes", "training or all"), ("COURSE_ROUNDS", "3", "few or all")])
def test_another_word_is_refused(tmp_path, monkeypatch, name, value, words):
    shutil.copy(ROOT / "notebooks/conftest.py", tmp_path)
    monkeypatch.setenv(name, value)
    tested = run_pytest(tmp_path)
    assert tested.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{name}={value}: must be {words}" in tested.stdout + tested.stderr


def test_nbval_takes_the_chapters_and_no_other_notebooks(tmp_path):
    for folder in ("notebooks", "notebooks/.ipynb_checkpoints", "tests/fixtures/marks",
                   "notebooks/assignments/source/ps1", "build/book"):
        (tmp_path / folder).mkdir(parents=True)
        nbformat.write(good_notebook(), tmp_path / folder / "01_good.ipynb")
    listed = run_pytest("--collect-only", "-q", tmp_path).stdout
    assert set(re.findall(r"(\S+)::Cell", listed)) == {"notebooks/01_good.ipynb"}


@pytest.mark.parametrize(("one", "other", "same"), [
    ("<object object at 0x7f12ab34cd56>", "<object object at 0x7fffffffffff>", False),
    ("took 1.25 s, copied in 35 ms", "took 11.5 s, copied in 4 ms", True),
    ("7.1 µs a call", "3e-05 s a call", True),
    ("3 seconds", "4.5 seconds", True),
    ("so c = -0.3 ms", "so c = 0.5 ms", True),
    ("+5.0 ms saved", "-1.2 ms saved", True),
    ("waiting        9.99 ms", "waiting       10.01 ms", True),
    ("-3 shards", "3 shards", False),
    ("3 shards", "4 shards", False),
    ("5000 images", "5001 images", False),
    ("loss 0.25", "loss 0.26", False),
    ("shape (2, 3)", "shape (3, 2)", False),
])
def test_the_sanitizer_hides_times_only(one, other, same):
    for pattern, substitute in get_sanitize_patterns(
            (ROOT / "tests/nbval_sanitize.cfg").read_text()):
        one, other = re.sub(pattern, substitute, one), re.sub(pattern, substitute, other)
    assert (one == other) == same
