"""One name, one meaning: what a chapter calls `lenet` or `apart` is no other thing in the next.

Functions and classes count, where a chapter's cells define them; the answers to its exercises
don't. The same meaning is the same code: so a name that several chapters define otherwise stands
in `KNOWN`, until one of them calls it something else or takes it from `helpers`. Both tables are
exact. The names themselves, and what each means, are in notebooks/src/README.md.
"""

import ast
from pathlib import Path

import jupytext
import pytest
from cells import tags, tree

SRC = Path(__file__).resolve().parents[1] / "notebooks/src"

# Names that these chapters still give to different code. The aim is an empty table.
KNOWN = {
    "counts_twice": ("04", "deeper/03"),
    "first_only": ("04", "deeper/03"),
    "lenet": ("04", "06", "13", "14"),
    "no_broadcast": ("04", "deeper/03"),
    "train": ("04", "08", "16"),
}

# Names that these chapters give to the same code, on purpose: they tell the same story twice. A
# chapter and its own deeper notebooks may always do so.
REPEATED = {
    "usual_size": ("11", "12"),
    "weights_on": ("12", "13"),
}


# --- what is defined where ---------------------------------------------------------------------


def chapter_sources():
    """The chapters and deeper notebooks as `{"03": its cells, "deeper/03": ...}`."""
    found = {}
    for folder in ("", "deeper/"):
        for path in sorted((SRC / folder).glob("[0-9][0-9]_*.py")):
            cells = jupytext.read(path, fmt="py:percent").cells
            found.setdefault(f"{folder}{path.name[:2]}", []).extend(cells)
    return found


def without_docstring(definition):
    """A function or a class as text: comments, layout and docstrings make no difference."""
    for node in ast.walk(definition):
        kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(definition)


def definitions(statements):
    """The functions and classes among `statements`, also below an `if`, a `with` or a `try`."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from definitions(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from definitions(handler.body)


def definitions_by_name(sources):
    """`{name: {chapter: [code, ...]}}`, for all names that two chapters or more define."""
    found = {}
    for chapter, cells in sources.items():
        for cell in cells:
            if cell.cell_type != "code" or "solution" in tags(cell):
                continue
            for node in definitions(tree(cell).body):
                places = found.setdefault(node.name, {})
                places.setdefault(chapter, []).append(without_docstring(node))
    return {name: places for name, places in found.items() if len(places) > 1}


def is_same(places):
    """Whether all chapters give a name to the same code."""
    codes = set()
    for chapter in places:
        codes.update(places[chapter])
    return len(codes) == 1


def is_of_one_chapter(places):
    """Whether only a chapter and its own deeper notebooks define a name."""
    return len({place.removeprefix("deeper/") for place in places}) == 1


def describe(name, places):
    """Some lines that say which chapters define `name`, and how each definition begins."""
    lines = [f"{name}, in chapters {', '.join(places)}:"]
    for chapter, codes in places.items():
        for code in codes:
            begin = [line.strip() for line in code.splitlines() if line.strip()][:2]
            lines.append(f"    {chapter}: {' '.join(begin)}")
    return "\n".join(lines)


# --- the tables --------------------------------------------------------------------------------


def complaints(sources, known, repeated):
    """What the two tables don't say, and what they say that is no longer so."""
    found = []
    shared = definitions_by_name(sources)
    for name, places in shared.items():
        same = is_same(places)
        if same and is_of_one_chapter(places):
            continue
        listed = repeated if same else known
        if listed.get(name) != tuple(places):
            what = "one name for the same code" if same else "one name for different code"
            table = "REPEATED" if same else "KNOWN"
            said = listed.get(name, "nothing")
            found.append(f"{what}; {table} has {said}: {describe(name, places)}")
    for table, entries, same in (("KNOWN", known, False), ("REPEATED", repeated, True)):
        for name in entries:
            if name not in shared or is_same(shared[name]) != same:
                found.append(f"{name} is no longer so: take it out of {table}")
    return found


def test_a_name_means_one_thing_in_all_chapters():
    found = complaints(chapter_sources(), KNOWN, REPEATED)
    assert not found, "\n".join(["", *found])


# --- and a fault is found ----------------------------------------------------------------------

ONE = "def apart(x, y):\n    '''How far.'''\n    return abs(x - y)\n"
SAME = "def apart(x, y):  # how far\n    return abs(x - y)\n"
OTHER = "def apart(x, y):\n    return max(x, y)\n"


def chapters(*sources):
    """Chapters 01, 02, ... with these sources."""
    return {f"{number:02}": jupytext.reads(source, fmt="py:percent").cells
            for number, source in enumerate(sources, 1)}


@pytest.mark.parametrize(("sources", "known", "repeated"), [
    ([ONE, "x = 1"], {}, {}),
    ([ONE, OTHER], {"apart": ("01", "02")}, {}),
    ([ONE, SAME], {}, {"apart": ("01", "02")}),
    ([ONE, f'# %% tags=["solution"]\n{OTHER}'], {}, {}),
    ([ONE, f"def f():\n    {OTHER.strip().replace(chr(10), chr(10) + '    ')}\n"], {}, {}),
    ([ONE, "from helpers import apart\napart(1, 2)"], {}, {}),
    ([f"{ONE}\n\n# %%\n{OTHER}", "x = 1"], {}, {}),
    ([f"%matplotlib inline\n{ONE}", "!ls\n"], {}, {}),
])
def test_exact_tables_are_fine(sources, known, repeated):
    assert complaints(chapters(*sources), known, repeated) == []


@pytest.mark.parametrize(("places", "codes", "fine"), [
    (("01", "deeper/01"), (ONE, SAME), True),
    (("01", "deeper/01"), (ONE, OTHER), False),
    (("01", "deeper/02"), (ONE, SAME), False),
    (("deeper/01", "deeper/02"), (ONE, SAME), False),
    (("01", "deeper/01", "02"), (ONE, SAME, SAME), False),
])
def test_a_chapter_and_its_own_deeper_notebook_may_repeat_code(places, codes, fine):
    cells = chapters(*codes).values()
    assert (complaints(dict(zip(places, cells, strict=True)), {}, {}) == []) == fine


@pytest.mark.parametrize(("sources", "known", "repeated", "words"), [
    # A new clash.
    ([ONE, OTHER], {}, {}, ["apart, in chapters 01, 02", "01: def apart(x, y): return abs(x - y)",
                            "02: def apart(x, y): return max(x, y)", "KNOWN has nothing"]),
    ([ONE, "class apart:\n    pass"], {}, {}, ["02: class apart: pass"]),
    ([ONE, "if True:\n    def apart():\n        return 0"], {}, {}, ["02: def apart(): return 0"]),
    ([ONE, f"try:\n    f()\nexcept ValueError:\n    {'def apart(): pass'}"], {}, {}, ["02: def"]),
    ([ONE, f'# %% tags=["fold"]\n# check: so\n{OTHER}'], {}, {}, ["different code"]),
    ([ONE, f"{SAME}\n\n# %%\n{OTHER}"], {}, {}, ["02: def apart(x, y): return max(x, y)"]),
    ([ONE, ONE.replace("(x, y):", "(x, y=0):")], {}, {}, ["different code"]),
    # One chapter more than was known, and one fewer.
    ([ONE, OTHER, OTHER], {"apart": ("01", "02")}, {}, ["KNOWN has ('01', '02')", "03: def"]),
    ([ONE, OTHER], {"apart": ("01", "02", "03")}, {}, ["KNOWN has ('01', '02', '03')"]),
    # The same code twice, and nobody said so.
    ([ONE, SAME], {}, {}, ["same code", "REPEATED has nothing"]),
    # What is gone.
    ([ONE, "x = 1"], {"apart": ("01", "02")}, {}, ["take it out of KNOWN"]),
    ([ONE, "x = 1"], {}, {"apart": ("01", "02")}, ["take it out of REPEATED"]),
    ([ONE, SAME], {"apart": ("01", "02")}, {"apart": ("01", "02")}, ["take it out of KNOWN"]),
    ([ONE, OTHER], {"apart": ("01", "02")}, {"apart": ("01", "02")}, ["out of REPEATED"]),
])
def test_a_table_that_is_not_exact_is_found(sources, known, repeated, words):
    found = "\n".join(complaints(chapters(*sources), known, repeated))
    for each in words:
        assert each in found


def test_an_entry_has_two_chapters_or_more_that_there_are():
    there = list(chapter_sources())
    for entries in (KNOWN, REPEATED):
        for name, places in entries.items():
            assert len(places) > 1 and set(places) <= set(there), name
