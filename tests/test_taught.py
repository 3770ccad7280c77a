"""`helpers.parallel` holds what the chapters teach: the same code, or the course would be lying."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TAUGHT = {
    "split_and_load": "02_splitting_a_batch",
    "allreduce": "03_all_reduce",
}


def is_check(statement):
    """A line that checks arguments: an assertion, or a call of a `check_...` function."""
    if isinstance(statement, ast.Assert):
        return True
    call = getattr(statement, "value", None)
    name = getattr(getattr(call, "func", None), "id", "")
    return isinstance(statement, ast.Expr) and name.startswith("check_")


def definition(source, name):
    """The function `name` in `source`, without docstring and argument checks, as text."""
    found = [node for node in ast.parse(source).body
             if isinstance(node, ast.FunctionDef) and node.name == name]
    assert len(found) == 1, f"{name} is defined {len(found)} times"
    function = found[0]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    function.body = [statement for statement in function.body if not is_check(statement)]
    return ast.unparse(function)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_helper_is_the_function_that_its_chapter_teaches(name):
    chapter = (ROOT / f"notebooks/src/{TAUGHT[name]}.py").read_text()
    helper = (ROOT / "helpers/parallel.py").read_text()
    assert definition(helper, name) == definition(chapter, name)


@pytest.mark.parametrize("name", ["pool", "lenet", "loss_sum", "train_batch"])
def test_chapter_05_compares_gluon_with_chapter_04(name):
    by_hand, again = ((ROOT / f"notebooks/src/{chapter}.py").read_text() for chapter in (
        "04_lenet_from_scratch", "05_gluon_on_several_devices"))
    assert definition(by_hand, name) == definition(again, name)


def test_every_function_that_works_on_devices_is_compared():
    helper = ast.parse((ROOT / "helpers/parallel.py").read_text())
    names = {node.name for node in helper.body if isinstance(node, ast.FunctionDef)}
    beside = {"send", "assert_replicas_equal", "check_batch", "check_devices", "check_replicas"}
    assert names - beside == set(TAUGHT)


def test_a_changed_line_is_noticed():
    one = "def f(x):\n    '''Doc.'''\n    check_x(x)\n    return x + 1\n"
    assert definition(one, "f") == definition("def f(x):\n    return x + 1\n", "f")
    assert definition(one, "f") != definition("def f(x):\n    return x + 2\n", "f")
