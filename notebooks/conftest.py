"""How the tests run the chapters.

Cells that need PyTorch are passed over where it isn't installed, and that is said.

COURSE_ROUNDS=few, the default here, runs each cell that has a tag `few:OLD=>NEW` with the text NEW
in place of OLD: fewer rounds of a measurement, fewer steps of a demonstration. COURSE_ROUNDS=all
runs what is stored, and what learners run.

COURSE_TWICE=training runs each cell with the tag `trains` twice in a row, as learners do;
COURSE_TWICE=all does it with every cell but those that only measure, which take most of a
chapter's time. The second run may print other things, and so may cells after it (counters go on),
but none may fail.
"""

import os
from importlib.util import find_spec

import pytest
from build import needs_torch, set_up_tests, with_few

set_up_tests()
ROUNDS = os.environ["COURSE_ROUNDS"]
if ROUNDS not in ("few", "all"):
    raise pytest.UsageError(f"COURSE_ROUNDS={ROUNDS}: must be few or all, or not be set")
TWICE = os.environ.get("COURSE_TWICE", "")
if TWICE not in ("", "training", "all"):
    raise pytest.UsageError(f"COURSE_TWICE={TWICE}: must be training or all, or not be set")


def pytest_collection_modifyitems(items):
    torch = find_spec("torch")
    for item in items:
        if not hasattr(item, "cell"):
            continue
        if not torch and item.cell in needs_torch(item.parent.nb):
            item.add_marker(pytest.mark.skip(
                reason="PyTorch is not installed: make setup TORCH=1"))
        if ROUNDS == "few":
            try:
                item.cell.source = with_few(item.cell)
            except ValueError as error:
                raise pytest.UsageError(f"{item.path.name}, {item.name}: {error}") from error


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
