"""Turns notebooks/src/NN_*.py into executed notebooks, notebooks/NN_*.ipynb.

    python notebooks/src/build.py [01 deeper/03 ...] [--prose] [--data digits]

Deeper notebooks are made in the same way, from notebooks/src/deeper/ into notebooks/deeper/.

The sources (jupytext, py:percent) are all that an author edits. What is written depends on the
source, on course.toml, on the titles of its neighbours and on what its cells print, and on nothing
else, so a rebuild changes no line without cause. On the way each chapter gets its links: a cell at
its beginning and one at its end that lead to its neighbours, and one wherever it says "chapter 03".
The first also says how it is run, the last which assignment goes with the chapter. `{reading time}`
becomes that of course.toml, and a heading "Answer" is folded, which the exercises say. README.md
and start.md get their tables. Tags that a cell can have:

    measured    what it shows differs from run to run; tests run it, but don't compare its output
    trains      takes training steps; CI runs it twice in a row, as learners do
    solution    the code of an answer, below a heading "### Answer 1"
    fold        proves the prose, draws, measures or defines what isn't taught: the code is folded
                wherever that can be, and its first line, "# check: ...", "# draw: ...",
                "# measure: ..." or "# define: ...", is its label
    few:OLD=>NEW  where COURSE_ROUNDS=few, tests run the cell with the text NEW in place of OLD;
                the two differ in numbers only (notebooks/conftest.py)
    predict     answers a question "**Predict:** ..." in the prose before it: its output is hidden
                until the cell is run, wherever that can be
    your-turn   the stub that the reader fills, with what `helpers.your_turn` needs; and its answer
    torch       needs PyTorch; where that isn't installed, tests and `make run` pass the cell over,
                and the whole chapter if its first code cell is tagged so
    figure:NAME the figure that it shows is also written to notebooks/src/figures/NAME.png
"""

import argparse
import base64
import hashlib
import os
import re
import sys
import time
from pathlib import Path

import course
import jupytext
import nbformat
from course import NOTEBOOKS
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from nbformat.v4 import new_markdown_cell

SECONDS_PER_CELL = 600
METADATA = {
    "kernelspec": {
        "display_name": "Python 3 (ipykernel)",
        "language": "python",
        "name": "python3",
    },
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"
LABEL = re.compile(r"# ((?:check|define|draw|measure): \S.*)")


class Refused(Exception):
    """Building would replace what a chapter shows by something that nobody asked for."""


class CellFailed(Exception):
    """A cell raised, took too long or took the kernel with it."""

    def __init__(self, number, reason):
        super().__init__(f"cell {number}")
        self.number, self.reason = number, reason


def absolute_course_data():
    """Make $COURSE_DATA absolute: a notebook runs in a folder of its own."""
    if folder := os.environ.get("COURSE_DATA"):
        os.environ["COURSE_DATA"] = os.path.abspath(os.path.expanduser(folder))


def set_up_tests():
    """Set what tests run with where nothing else is asked for: offline, and few rounds.

    Kernels and other processes that tests start inherit it.
    """
    absolute_course_data()
    os.environ.setdefault("COURSE_OFFLINE", "1")
    os.environ.setdefault("COURSE_ROUNDS", "few")
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"  # no kernel of the same name in the reader's home


def choose(files, names):
    """Those of `files` that `names` name, chapters before deeper notebooks; all if none given.

    A name is a path, or its end without suffix, or the number that it begins with: "03" and
    "notebooks/src/03_all_reduce.py" are a chapter, "deeper/03" is all deeper notebooks of 03.
    """
    def order(file):
        return course.key(file).startswith("deeper/"), file.name

    def is_meant(file, name):
        folder, _, short = name.removesuffix(".py").removesuffix(".ipynb").rpartition("/")
        is_deeper = folder.endswith("deeper")
        if is_deeper != course.key(file).startswith("deeper/"):
            return False
        return file.stem == short or file.stem.startswith(f"{short.zfill(2)}_")

    chosen = []
    for name in names:
        found = [file for file in files if is_meant(file, name)]
        if not found:
            known = ", ".join(course.key(file) for file in sorted(files, key=order))
            sys.exit(f"There is no notebook {name}; there are {known}.")
        chosen += found
    return sorted(chosen or files, key=order) or sys.exit("There are no chapters.")


def sources(notebooks=NOTEBOOKS):
    """All sources in the folder that has src/, chapters and deeper notebooks."""
    return [*notebooks.glob("src/[0-9][0-9]_*.py"), *notebooks.glob("src/deeper/[0-9][0-9]_*.py")]


def read_source(path):
    """The notebook that a source describes, not yet executed, without what jupytext adds."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    name = course.key(path)
    src = path.parent.parent if name.startswith("deeper/") else path.parent
    titles = {course.key(source): course.title(source.read_text("utf-8"))
              for source in sorted(sources(src.parent))}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = course.link_mentions(cell.source, name, titles)
            if course.TIME in cell.source:
                cell.source = cell.source.replace(course.TIME, course.reading(name))
            cell.source = cell.source.replace(
                f"{course.EXERCISES}\n", f"{course.EXERCISES}\n\n{course.ANSWERS_BELOW}\n")
    notebook.cells = [part for cell in notebook.cells for part in split_answer(cell)]
    # The second begins with a heading, or it would belong to the folded answer before it.
    links = course.navigation(name, titles)
    above = f"{links}\n\n{course.how_to_run(name, course.repository())}"
    below = f"## Next\n\n{course.assignment(name)}{links}"
    for place, source in ((0, above), (len(notebook.cells) + 1, below)):
        cell = new_markdown_cell(source, metadata={"tags": ["navigation", "remove-cell"]})
        notebook.cells.insert(place, cell)
    seen = {}
    for cell in notebook.cells:
        # An id says what the cell contains, not where it is, so a new cell changes no other's.
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"

        kept = {key: cell.metadata[key] for key in ("tags",) if key in cell.metadata}
        if cell.source.startswith(course.ANSWER):
            kept["jp-MarkdownHeadingCollapsed"] = True
        if "measured" in kept.get("tags", []):
            kept["tags"] = [*kept["tags"], "nbval-ignore-output"]  # the tag that nbval knows
        if "fold" in kept.get("tags", []):
            kept |= folded(cell.source, kept["tags"])
        if "predict" in kept.get("tags", []):
            kept["jupyter"] = {"outputs_hidden": True}          # JupyterLab, VS Code
            kept["tags"] = [*kept["tags"], "hide-output"]       # the book
        cell.metadata = nbformat.from_dict(kept)
    return notebook


def folded(source, tags):
    """The metadata by which each place folds a cell's code, and shows its label instead.

    Raises Refused where the first line is no label.
    """
    label = LABEL.match(source)
    if not label:
        raise Refused("a folded cell begins with a label, # check: ..., # define: ..., # draw: ... "
                      f"or # measure: ..., and not with {source.partition(chr(10))[0]!r}")
    return {
        "jupyter": {"source_hidden": True},                         # JupyterLab, VS Code
        "cellView": "form",                                         # Colab
        "tags": [*tags, "hide-input"],                              # the book, by MyST-NB,
        "mystnb": {"code_prompt_show": label[1], "code_prompt_hide": label[1]},   # with a label
    }


def split_answer(cell):
    """An answer's heading gets a cell of its own: what is in its cell, JupyterLab doesn't fold."""
    heading, _, text = cell.source.partition("\n")
    if cell.cell_type == "markdown" and heading.startswith(course.ANSWER) and text.strip():
        return [new_markdown_cell(heading), new_markdown_cell(text.strip())]
    return [cell]


def with_few(cell):
    """A code cell's source with the few rounds that its tags `few:OLD=>NEW` ask for.

    Raises ValueError where OLD isn't there once, or where the two differ in more than numbers.
    """
    source = cell.source
    for tag in cell.metadata.get("tags", []):
        if tag.startswith("few:"):
            old, arrow, new = tag.removeprefix("few:").partition("=>")
            without = [re.sub(r"\d[\d_.]*", "0", text) for text in (old, new)]
            if not arrow or without[0] != without[1]:
                raise ValueError(f"the tag {tag!r} is not few:OLD=>NEW with two texts that differ "
                                 "in their numbers only")
            if source.count(old) != 1:
                raise ValueError(f"the tag {tag!r}: {old!r} is {source.count(old)} times in the "
                                 "cell, and must be there once")
            source = source.replace(old, new)
    return source


def needs_torch(notebook):
    """The code cells that can't run without PyTorch."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    tagged = ["torch" in cell.metadata.get("tags", []) for cell in code]
    return [cell for cell, tag in zip(code, tagged) if tag or tagged[0]]


def execute(notebook, folder):
    """Run every cell of `notebook`, in place, in a new kernel that works in `folder`."""
    running = 0

    def note_cell(cell, cell_index):
        nonlocal running
        running = cell_index

    client = NotebookClient(
        notebook,
        timeout=SECONDS_PER_CELL,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=note_cell,
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],  # no word on how Jupyter talks to the kernel
    )
    try:
        client.execute()
    except (CellControlSignal, DeadKernelError) as error:
        number = sum(cell.cell_type == "code" for cell in notebook.cells[: running + 1])
        raise CellFailed(number, without_colours(str(error)).strip()) from error


def without_colours(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def normalise(notebook):
    """Take out of an executed notebook, in place, all that is not source or result."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:
                # A widget is nothing without its kernel; its text stands for it.
                output.get("data", {}).pop(WIDGET, None)


def merge_streams(outputs):
    """Join what came in pieces to the same stream, and keep the last state of progress bars."""
    merged = []
    for output in outputs:
        last = merged[-1] if merged else None
        if output.output_type == "stream" and last and last.get("name") == output.name:
            last.text += output.text
        else:
            merged.append(output)
    for output in merged:
        if output.output_type == "stream":
            # As nbval does it: a carriage return drops what the line held before it.
            output.text = re.sub(r"^.*\r(?=[^\n])", "", output.text, flags=re.MULTILINE)
    return merged


def data_used(notebook):
    """What the chapter's line "Data: NAME, ..." names, or "-" where no cell prints one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if match := re.search(r"^Data: ([^,\n]+)", output.get("text", ""), re.MULTILINE):
                return match[1].strip()
    return "-"


def check_data(shown, asked):
    """Refuse to run a chapter on other data than its outputs show, unless asked for by name."""
    from helpers.data import load_data

    found = load_data("mnist", limit=1).name
    wanted = asked or shown
    if found != wanted:
        other_ways = ("fetch MNIST by `COURSE_OFFLINE=0 make notebooks CH=...`, or let COURSE_DATA "
                      "name the folder that has mnist/, or " if wanted == "mnist" else "")
        raise Refused(f"{'asked for' if asked else 'its outputs show'} {wanted}, and a run here "
                      f"would show {found}: {other_ways}ask for {found} by --data {found}")


def take_outputs(notebook, old):
    """Put the outputs of `old` into `notebook`, whose code must be the same, cell by cell."""
    ours, theirs = ([c for c in each.cells if c.cell_type == "code"] if each else []
                    for each in (notebook, old))
    if [cell.source for cell in ours] != [cell.source for cell in theirs]:
        raise Refused("not only its prose has changed: build it without --prose")
    for cell, before in zip(ours, theirs):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count


def read_old(target):
    """The notebook that is there, or None where it is missing or torn, as by a merge."""
    try:
        return nbformat.read(target, as_version=4)
    except (FileNotFoundError, nbformat.reader.NotJSONError):
        return None


def build(source, target, prose=False, data=None):
    """Write the executed notebook of `source` to `target`, or leave `target` as it was.

    With `prose` no cell is run: the outputs are those of `target`. `data` names the data set that
    it should show, where that is another than before. Raises Refused, CellFailed or course.Mistake.
    """
    notebook = read_source(source)
    old = read_old(target)
    if prose:
        take_outputs(notebook, old)
    else:
        if data or (old and data_used(old) != "-"):
            check_data(data_used(old) if old else data, data)
        target.parent.mkdir(exist_ok=True)
        execute(notebook, target.parent)
    normalise(notebook)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                print(f"  warning: cell {cell.execution_count} wrote to stderr: {output.text!r}")
    part = target.with_suffix(".part")
    nbformat.write(notebook, part)
    os.replace(part, target)
    src = source.parent.parent if source.parent.name == "deeper" else source.parent
    for name, png in figures(notebook):
        (src / "figures").mkdir(exist_ok=True)
        (src / "figures" / name).write_bytes(png)


def figures(notebook):
    """File name and content of each figure that a tag `figure:NAME` asks for."""
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("figure:"):
                (png,) = (o.data["image/png"] for o in cell.outputs if "data" in o)
                yield f"{tag.removeprefix('figure:')}.png", base64.b64decode(png)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Build the notebooks from their sources.")
    parser.add_argument("chapters", nargs="*",
                        help="such as 01 03, or deeper/03_more_all_reduces; none means all")
    parser.add_argument("--prose", action="store_true",
                        help="run nothing: only prose has changed, outputs stay")
    parser.add_argument("--data", help="the data set to show, if another than before: digits")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="folder that has src/")
    options = parser.parse_args(arguments)

    absolute_course_data()
    failed = False
    for source in choose(sources(options.notebooks), options.chapters):
        name = course.key(source)
        start = time.perf_counter()
        try:
            build(source, options.notebooks / f"{name}.ipynb", options.prose, options.data)
        except CellFailed as error:
            failed = True
            print(f"{name}: FAILED in code cell {error.number}\n{error.reason}", flush=True)
        except (Refused, course.Mistake) as error:
            failed = True
            print(f"{name}: not built; {error}", flush=True)
        else:
            print(f"{name}: built in {time.perf_counter() - start:.1f} s", flush=True)
    if options.notebooks == NOTEBOOKS:
        try:
            course.write_contents()
        except (FileNotFoundError, course.Mistake) as error:
            failed = True
            print(f"README.md and start.md: not made anew; {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
