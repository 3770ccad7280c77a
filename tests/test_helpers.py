"""`helpers` holds nothing that only a test uses."""

import ast
from contextlib import suppress
from pathlib import Path

import helpers
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = {path.stem: path for path in sorted(ROOT.glob("helpers/*.py"))}
# Those for whom it is there: chapters and their build, assignments, the doctor, and the bench.
FOLDERS = ["notebooks/src", "notebooks/assignments", "requirements", "tests/bench"]
USERS = [path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.py")]


def defined(source):
    """The public functions and classes of a module."""
    return {node.name for node in ast.parse(source).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")}


def used(source):
    """What a file takes from helpers: `(module, name)`, and `("", name)` from `helpers` itself.

    Programs that it holds as text count too, as the doctor's.
    """
    nodes, found, modules = list(ast.walk(ast.parse(source))), set(), {"helpers": ""}
    for node in nodes:
        if isinstance(node, ast.Constant) and "helpers" in str(node.value):
            with suppress(SyntaxError):
                found |= used(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "helpers":
            module = node.module.removeprefix("helpers").lstrip(".")
            found |= {(module, alias.name) for alias in node.names}
            modules |= {alias.asname or alias.name: alias.name for alias in node.names}
    return found | {(modules[node.value.id], node.attr) for node in nodes
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    and node.value.id in modules}


def used_at_home(source):
    """The names that a module reads itself."""
    return {node.id for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


USED = set().union(*(used(path.read_text()) for path in USERS))


def test_every_name_that_helpers_shares_is_used():
    shared = set(helpers.__all__)
    assert {name for name in shared if ("", name) not in USED} == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_used(module):
    source = MODULES[module].read_text()
    others = set().union(*(used(path.read_text()) for name, path in MODULES.items()
                           if name != module))
    taken = {name for home, name in USED | others if home == module}
    taken |= {name for home, name in USED if home == "" and helpers._HOME.get(name) == module}
    assert defined(source) - taken - used_at_home(source) == set()


def test_what_use_is():
    assert used("from helpers import devices\nfrom helpers.data import load_data as load") == {
        ("", "devices"), ("data", "load_data")}
    assert used("import helpers\nfrom helpers import gpu\nhelpers.devices(2)\ngpu.cards()") == {
        ("", "devices"), ("", "gpu"), ("gpu", "cards")}
    assert used("PROGRAM = 'from helpers.data import load_data'\nWORDS = 'of helpers'") == {
        ("data", "load_data")}
    assert used("from other import devices\nmx.devices()\ndef devices(): pass") == set()
    assert defined("def f(): pass\ndef _g(): pass\nclass C: pass\nx = 1") == {"f", "C"}
    assert used_at_home("def f(): pass\ndef g(): return f()") == {"f"}
