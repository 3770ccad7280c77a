"""Turns notebooks/src/NN_*.py into executed notebooks, notebooks/NN_*.ipynb.

    python notebooks/src/build.py [01 03 ...]

The sources (jupytext, py:percent) are all that an author edits. What is written depends on the
source and on what its cells print, and on nothing else, so a rebuild changes no line without
cause. Tags that a cell can have:

    measured    what it shows differs from run to run; tests run it, but don't compare its output
    solution    the answer to an exercise, folded away with `jupyter={"source_hidden": true}`
    torch       needs PyTorch; where that isn't installed, tests and `make run` pass the cell over,
                and the whole chapter if its first code cell is tagged so
    figure:NAME the figure that it shows is also written to notebooks/figures/NAME.png
"""

import argparse
import base64
import hashlib
import os
import re
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError

NOTEBOOKS = Path(__file__).resolve().parents[1]
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


class CellFailed(Exception):
    """A cell raised, took too long or took the kernel with it."""

    def __init__(self, number, reason):
        super().__init__(f"cell {number}")
        self.number, self.reason = number, reason


def absolute_course_data():
    """Make $COURSE_DATA absolute: a notebook runs in a folder of its own."""
    if folder := os.environ.get("COURSE_DATA"):
        os.environ["COURSE_DATA"] = os.path.abspath(os.path.expanduser(folder))


def choose(files, numbers):
    """Those of `files` whose names begin with one of `numbers` ("3" is "03"); all if none given."""
    wanted = [number.zfill(2) for number in numbers]
    if unknown := set(wanted) - {file.name[:2] for file in files}:
        sys.exit(f"There is no chapter {', '.join(sorted(unknown))}.")
    chosen = [file for file in sorted(files) if not wanted or file.name[:2] in wanted]
    return chosen or sys.exit("There are no chapters.")


def read_source(path):
    """The notebook that a source describes, not yet executed, without what jupytext adds."""
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    seen = {}
    for cell in notebook.cells:
        # An id says what the cell contains, not where it is, so a new cell changes no other's.
        digest = hashlib.sha1(cell.source.encode()).hexdigest()[:8]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"

        kept = {key: cell.metadata[key] for key in ("tags", "jupyter") if key in cell.metadata}
        if "measured" in kept.get("tags", []):
            kept["tags"] = [*kept["tags"], "nbval-ignore-output"]  # the tag that nbval knows
        cell.metadata = nbformat.from_dict(kept)
    return notebook


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


def build(source, target):
    """Write the executed notebook of `source` to `target`, or leave `target` as it was."""
    notebook = read_source(source)
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
    for name, png in figures(notebook):
        (target.parent / "figures").mkdir(exist_ok=True)
        (target.parent / "figures" / name).write_bytes(png)


def figures(notebook):
    """File name and content of each figure that a tag `figure:NAME` asks for."""
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("figure:"):
                (png,) = (o.data["image/png"] for o in cell.outputs if "data" in o)
                yield f"{tag.removeprefix('figure:')}.png", base64.b64decode(png)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Build the notebooks from their sources.")
    parser.add_argument("chapters", nargs="*", help="numbers, such as 01 03; none means all")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS, help="folder that has src/")
    options = parser.parse_args(arguments)

    absolute_course_data()
    failed = False
    for source in choose(list(options.notebooks.glob("src/[0-9][0-9]_*.py")), options.chapters):
        start = time.perf_counter()
        try:
            build(source, options.notebooks / f"{source.stem}.ipynb")
        except CellFailed as error:
            failed = True
            print(f"{source.stem}: FAILED in code cell {error.number}\n{error.reason}", flush=True)
        else:
            print(f"{source.stem}: built in {time.perf_counter() - start:.1f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
