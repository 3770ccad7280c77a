"""Passes over the cells that need PyTorch where it isn't installed, and says so.

COURSE_TWICE=training runs each cell with the tag `trains` twice in a row, as learners do;
COURSE_TWICE=all does it with every cell but those that only measure, which take most of a
chapter's time. The second run may print other things, and so may cells after it (counters go on),
but none may fail.
"""

import os
from importlib.util import find_spec

import pytest
from build import needs_torch

TWICE = os.environ.get("COURSE_TWICE", "")
if TWICE not in ("", "training", "all"):
    raise pytest.UsageError(f"COURSE_TWICE={TWICE}: must be training or all, or not be set")


def pytest_collection_modifyitems(items):
    if find_spec("torch"):
        return
    for item in items:
        if hasattr(item, "cell") and item.cell in needs_torch(item.parent.nb):
            item.add_marker(pytest.mark.skip(
                reason="PyTorch is not installed: make setup TORCH=1"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    cell = getattr(item, "cell", None)
    if TWICE and cell:
        item.options["check"] = False
    result = yield
    tags = cell.metadata.get("tags", []) if cell else []
    if TWICE and cell and ("trains" in tags or TWICE == "all" and "measured" not in tags):
        item.runtest()
    return result
