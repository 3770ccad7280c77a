"""Notebooks as students hand them in, and `make grade` on a folder of them."""

import json
import os
import subprocess
from pathlib import Path

from marking import assignment

REPOSITORY = Path(__file__).resolve().parents[2]


def make_source(name="ps1", **answers):
    """The source version, model answers in all solution cells, but for `answers`."""
    content = assignment.make_notebook(name)
    for cell in content.cells:
        key = cell.metadata.get("nbgrader", {}).get("grade_id")
        cell.source = answers.get(key, cell.source)
    return content


def plain(content):
    """A notebook as the lists and dicts of its file, to be changed as nbformat wouldn't."""
    return json.loads(json.dumps(content))


def find_cell(content, key):
    return next(cell for cell in content["cells"]
                if (cell.get("metadata") or {}).get("nbgrader", {}).get("grade_id") == key)


def strip(content):
    """All of nbgrader's metadata taken out, as some editors do."""
    content = plain(content)
    for cell in content["cells"]:
        cell["metadata"] = {}
    return content


def put(folder, student, content, name="ps1.ipynb"):
    path = folder / student / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_text(json.dumps(content))   # nbformat would mind what is wrong with it
    return path


def run_make(folder, *more, **environment):
    return subprocess.run(["make", "grade", f"SUBMISSIONS={folder}", *more], cwd=REPOSITORY,
                          text=True, capture_output=True, env={**os.environ, **environment})
