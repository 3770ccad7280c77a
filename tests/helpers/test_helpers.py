"""`helpers` holds nothing that only a test uses."""

import ast
import re
from pathlib import Path

import helpers
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(ROOT.glob("helpers/*.py"))
# Those for whom it is there: chapters, their build and bench, assignments, programs, the doctor.
USERS = [*ROOT.glob("notebooks/**/*.py"), *ROOT.glob("requirements/*.py")]


def names_used(path):
    """The names that a Python file uses, also in programs that it holds as text."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                names.add(name)
            case ast.Constant(value=str(text)) if "import" in text or text.isidentifier():
                names |= set(re.findall(r"\w+", text))
    return names


def test_every_public_function_and_class_is_used():
    used = set().union(*(names_used(path) for path in [*MODULES, *USERS]
                         if path in MODULES or "helpers" in path.read_text()))
    unused = [f"{path.stem}.{node.name}" for path in MODULES
              for node in ast.parse(path.read_text()).body
              if isinstance(node, ast.FunctionDef | ast.ClassDef)
              and not node.name.startswith("_") and node.name not in used]
    assert unused == [], "delete what nobody uses"


def test_the_names_of_the_package_are_found_and_another_says_what_there_is():
    for name in helpers.__all__:
        assert getattr(helpers, name).__name__ == name and name in dir(helpers)
    with pytest.raises(AttributeError, match="no 'all_reduce'.*devices.*allreduce"):
        _ = helpers.all_reduce
