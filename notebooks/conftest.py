"""Passes over the cells that need PyTorch where it isn't installed, and says so.

COURSE_TWICE=1 runs cells twice in a row, as learners do; then the second run may print other
things, but must not fail. What only measures is run once: it takes most of a chapter's time.
"""

import os
import re
from importlib.util import find_spec

import pytest
from build import needs_torch

TRAINS = re.compile(r"\b(fit|train)\(|\.step\(")


def pytest_collection_modifyitems(items):
    if find_spec("torch"):
        return
    for item in items:
        if hasattr(item, "cell") and item.cell in needs_torch(item.parent.nb):
            item.add_marker(pytest.mark.skip(
                reason="PyTorch is not installed: make setup TORCH=1"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    result = yield
    cell = getattr(item, "cell", None)
    if cell and os.environ.get("COURSE_TWICE") == "1" and (
            "measured" not in cell.metadata.get("tags", []) or TRAINS.search(cell.source)):
        item.options["check"] = False
        item.runtest()
    return result
