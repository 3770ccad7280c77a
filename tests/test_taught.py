"""`helpers` holds what the chapters teach: the same code, or the course would be lying."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TAUGHT = {  # by name: the module in helpers, and the chapter
    "split_and_load": ("parallel", "02_splitting_a_batch"),
    "allreduce": ("parallel", "03_all_reduce"),
    "Message": ("schedules", "deeper/03_more_all_reduces"),
    "window": ("schedules", "deeper/03_more_all_reduces"),
    "run": ("schedules", "deeper/03_more_all_reduces"),
    "tree_up": ("schedules", "deeper/03_more_all_reduces"),
    "answer": ("schedules", "deeper/03_more_all_reduces"),
    "star": ("schedules", "deeper/03_more_all_reduces"),
    "tree": ("schedules", "deeper/03_more_all_reduces"),
    "ring": ("schedules", "deeper/03_more_all_reduces"),
    "lenet": ("networks", "06_lenet_with_trainer"),
    "HybridResidual": ("networks", "08_resnet18"),
    "hybrid_resnet18": ("networks", "08_resnet18"),
    "wrong_ranks": ("schedules", "03_all_reduce"),
    "messages_sent": ("schedules", "03_all_reduce"),
    "replicas": ("schedules", "deeper/03_a_judge_for_all_reduces"),
    "wrong_devices": ("schedules", "deeper/03_a_judge_for_all_reduces"),
    "judge": ("schedules", "deeper/03_a_judge_for_all_reduces"),
}


def is_check(statement):
    """What checks arguments: an assertion, an `if` that raises, or a call of a `check_...`."""
    if isinstance(statement, ast.Assert):
        return True
    if isinstance(statement, ast.If):
        return isinstance(statement.body[0], ast.Raise) and not statement.orelse
    call = getattr(statement, "value", None)
    name = getattr(getattr(call, "func", None), "id", "")
    return isinstance(statement, ast.Expr) and name.startswith("check_")


def definition(source, name):
    """The function or class `name` in `source`, without docstring and argument checks, as text."""
    found = [node for node in ast.parse(source).body
             if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
    assert len(found) == 1, f"{name} is defined {len(found)} times"
    function = found[0]
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    function.body = [statement for statement in function.body if not is_check(statement)]
    return ast.unparse(function)


@pytest.mark.parametrize("name", TAUGHT)
def test_a_helper_is_the_function_that_its_chapter_teaches(name):
    module, chapter = TAUGHT[name]
    chapter = (ROOT / f"notebooks/src/{chapter}.py").read_text()
    helper = (ROOT / f"helpers/{module}.py").read_text()
    assert definition(helper, name) == definition(chapter, name)


BY_HAND = ["pool", "lenet", "loss_sum", "init_params", "get_params", "train_batch"]


@pytest.mark.parametrize("name", BY_HAND)
def test_lenet_by_hand_is_chapter_04s(name):
    chapter = (ROOT / "notebooks/src/04_lenet_from_scratch.py").read_text()
    helper = (ROOT / "helpers/by_hand.py").read_text()
    assert definition(helper, name) == definition(chapter, name)
    assert assigned(helper, "layers") == assigned(chapter, "layers")


def test_all_that_is_by_hand_is_compared():
    helper = ast.parse((ROOT / "helpers/by_hand.py").read_text())
    assert [node.name for node in helper.body if isinstance(node, ast.FunctionDef)] == BY_HAND


def loops(source):
    """Each loop over batches in a program or in a function of it: the text of its body."""
    return [ast.unparse(ast.Module(node.body, [])) for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.For) and ast.unparse(node.target) == "(x, y)"]


def test_the_script_to_copy_is_chapter_06s_loop():
    chapter = (ROOT / "notebooks/src/06_lenet_with_trainer.py").read_text()
    training, _ = loops((ROOT / "notebooks/train_lenet.py").read_text())
    assert loops(definition(chapter, "train_one_epoch")) == [training]


@pytest.mark.parametrize("name, chapter", [
    ("lenet", "13_the_same_in_pytorch"), ("Residual", "deeper/13_resnet_twice"),
    ("resnet18", "deeper/13_resnet_twice")])
def test_pytorchs_networks_are_those_of_chapter_13(name, chapter):
    chapter = (ROOT / f"notebooks/src/{chapter}.py").read_text()
    helper = (ROOT / "helpers/torch_networks.py").read_text()
    assert definition(helper, name) == definition(chapter, name)


def test_every_function_that_a_chapter_teaches_is_compared():
    names = set()
    for module in ("parallel", "schedules", "networks"):
        helper = ast.parse((ROOT / f"helpers/{module}.py").read_text())
        names |= {node.name for node in helper.body
                  if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    beside = {"assert_replicas_equal", "check_batch", "check_devices",
              "check_replicas"}
    assert names - beside == set(TAUGHT)


def assigned(source, name):
    """What the variable `name` is set to in `source`, as text."""
    (found,) = [node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name]
    return ast.unparse(found)


@pytest.mark.parametrize("name, notebook", [
    ("ADD", "more_all_reduces"), ("COPY", "more_all_reduces"),
    ("NUMBERS", "a_judge_for_all_reduces"), ("BIG_NUMBERS", "a_judge_for_all_reduces"),
    ("backwards", "a_judge_for_all_reduces")])
def test_what_the_judge_and_the_schedules_use_is_what_is_taught(name, notebook):
    chapter = (ROOT / f"notebooks/src/deeper/03_{notebook}.py").read_text()
    helper = (ROOT / "helpers/schedules.py").read_text()
    assert assigned(helper, name) == assigned(chapter, name)


def test_a_changed_line_is_noticed():
    one = "def f(x):\n    '''Doc.'''\n    check_x(x)\n    return x + 1\n"
    checked = "def f(x):\n    if x < 0:\n        raise ValueError(x)\n    return x + 1\n"
    assert definition(checked, "f") == definition(one, "f")
    assert definition(one, "f") == definition("def f(x):\n    return x + 1\n", "f")
    assert definition(one, "f") != definition("def f(x):\n    return x + 2\n", "f")
