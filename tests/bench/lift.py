"""Takes definitions out of a chapter's source, so that what is measured is what is taught."""

import ast
from pathlib import Path
from types import SimpleNamespace

SOURCES = Path(__file__).resolve().parents[2] / "notebooks" / "src"


def lift(chapter, *names):
    """The functions, classes and constants `names` of a chapter, as attributes.

    chapter: its file's name without the number, which may change: "lenet_from_scratch". A deeper
    notebook's too: "more_all_reduces".

    What runs is the chapter's top-level imports and the named statements, in their order, and
    nothing else of it. Raises LookupError where the chapter has no such name, or has it twice.
    """
    (path,) = [*SOURCES.glob(f"[0-9][0-9]_{chapter}.py"),
               *SOURCES.glob(f"deeper/[0-9][0-9]_{chapter}.py")]
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = [name for node in tree.body for name in _defines(node) if name in names]
    if sorted(found) != sorted(names):
        raise LookupError(f"{path.name} should define each of {names} once, but has {found}")
    wanted = set(names)
    tree.body = [node for node in tree.body
                 if isinstance(node, ast.Import | ast.ImportFrom) or wanted & set(_defines(node))]
    space = {"__name__": path.stem}
    exec(compile(tree, str(path), "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


def _defines(node):
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
