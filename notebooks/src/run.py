"""Runs the chapters from top to bottom, without a browser, and shows how long each takes.

    python notebooks/src/run.py [01 deeper/03 ...]

What is run is notebooks/NN_*.ipynb and notebooks/deeper/NN_*.ipynb, as a learner has it; nothing in
notebooks/ is written. Exit status 1 says that a cell failed.
"""

import argparse
import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import course
import nbformat
from build import (
    NOTEBOOKS,
    CellFailed,
    absolute_course_data,
    choose,
    data_used,
    execute,
    needs_torch,
)

ROW = "{:<32} {:>8} {:>6}  {}"
TRACEBACK_LINES = 12


def run(path):
    """Run one chapter in memory; returns its row of the table."""
    notebook = nbformat.read(path, as_version=4)
    skipped = [] if find_spec("torch") else needs_torch(notebook)
    notebook.cells = [cell for cell in notebook.cells if cell not in skipped]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell in code:
        cell.outputs = []  # so that no stored line is taken for one of this run
    error = None
    start = time.perf_counter()
    try:
        if code:
            execute(notebook, path.parent)
    except CellFailed as failure:
        error = {"cell": failure.number, "reason": failure.reason}
    return {
        "chapter": course.key(path),
        "seconds": round(time.perf_counter() - start, 1),
        "cells": len(code),
        "skipped": len(skipped),
        "data": data_used(notebook),
        "error": error,
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Run the chapters and time them.")
    parser.add_argument("chapters", nargs="*",
                        help="such as 01 03, or deeper/03_more_all_reduces; none means all")
    parser.add_argument("--notebooks", type=Path, default=NOTEBOOKS)
    parser.add_argument("--json", type=Path, help="file that gets the table too")
    options = parser.parse_args(arguments)

    absolute_course_data()
    paths = choose([*options.notebooks.glob("[0-9][0-9]_*.ipynb"),
                    *options.notebooks.glob("deeper/[0-9][0-9]_*.ipynb")], options.chapters)
    rows = []
    print(ROW.format("chapter", "seconds", "cells", "data"), flush=True)
    for path in paths:
        row = run(path)
        rows.append(row)
        print(ROW.format(row["chapter"], row["seconds"], row["cells"], row["data"]), flush=True)
        if row["skipped"]:
            print(f"  {row['skipped']} cells passed over, PyTorch is not installed: "
                  "make setup TORCH=1", flush=True)
        if row["error"]:
            last = "\n".join(row["error"]["reason"].splitlines()[-TRACEBACK_LINES:])
            print(f"FAILED in code cell {row['error']['cell']}:\n{last}", flush=True)

    if os.environ.get("COURSE_DATA") and any(row["data"] != "-" for row in rows):
        from helpers.data import load_data

        load_data("mnist", limit=1)  # says why, if COURSE_DATA wasn't used

    if options.json:
        options.json.write_text(json.dumps({"chapters": rows}, indent=2) + "\n")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
