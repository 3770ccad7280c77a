"""A student's notebook as it came back: which of its cells are whose.

nbgrader's metadata name the cells. Some editors lose them: then a solution cell is found by what it
defines, if only one cell defines it. Nothing else of a notebook is looked at: not its tests, not
its outputs.
"""

import json
import re
from typing import NamedTuple

from marking import harmless
from marking.assignment import PLACEHOLDER, UNWRITTEN, is_handed_out

LONGEST = 3 * 10**5   # characters of a solution cell: whatever they are, they fit into a message
FRESH = ("copy your solutions into a fresh {name}.ipynb of the hand-out, save it in JupyterLab, "
         "and hand that in")
JOIN = "join them into one (select them, then Shift+M), and hand in again"


class Refused(Exception):
    """A submission that can't be read, and why; nothing in it counts."""


class Found(NamedTuple):
    """What a notebook holds.

    answers: {grade_id: sources of the cells with that name, all different}. faults: {exercise: why
    its solution can't be judged}. others: sources of the code cells that aren't read. notes:
    sentences that its author should see.
    """

    answers: dict
    faults: dict
    others: list
    notes: list


class Cell(NamedTuple):
    kind: str          # code, markdown
    key: str | None    # nbgrader's name for it, its grade_id
    source: str


def read_notebook(assignment, text):
    """`Found` in a notebook's text. Raises Refused where it is no notebook."""
    cells = read_cells(text)
    names = [one.name for one in assignment.exercises] + [key for key, *_ in assignment.words]
    lost = not any(cell.key in names for cell in cells)
    answers, faults, guessed, notes = {}, {}, [], []
    for exercise in assignment.exercises:
        answers[exercise.name] = leave_out_stubs(
            list_sources(cells, exercise.name), exercise, notes)
        if answers[exercise.name]:
            if all(cell.kind != "code" for cell in cells if cell.key == exercise.name):
                notes.append(f"The solution cell {exercise.name!r} is no code cell (turned to "
                             "Markdown?). It was read as code all the same.")
        else:
            answers[exercise.name] = leave_out_stubs(
                find_definitions(cells, exercise), exercise, notes)
            if len(answers[exercise.name]) == 1:
                guessed.append(exercise.name)
            else:
                faults[exercise.name] = explain_missing(assignment, exercise, cells, lost)
                answers[exercise.name] = []
        if fault := find_fault(exercise, answers[exercise.name], cells):
            faults[exercise.name] = fault
    for key, _, heading in assignment.words:
        found = list_sources(cells, key) or (find_below(cells, heading) if lost else [])
        answers[key] = [source for source in found if source.strip() not in ("", PLACEHOLDER)]
    read = {source for sources in answers.values() for source in sources}
    others = [cell.source for cell in cells if cell.kind == "code" and cell.source not in read]
    return Found(answers, faults, others, explain_guesses(guessed, lost) + notes)


def is_untouched(assignment, text):
    """Whether a notebook is the hand-out, with no answer written into it."""
    try:
        sources = {cell.key: cell.source for cell in read_cells(text)}
    except Refused:
        return False
    stubs = [one.name in sources and is_handed_out(sources[one.name], one)
             for one in assignment.exercises]
    words = [sources.get(key, "").strip() in ("", PLACEHOLDER) for key, *_ in assignment.words]
    return all(stubs + words)


def leave_out_stubs(sources, exercise, notes):
    """Of several sources those that somebody wrote, and a sentence in `notes` if that is fewer."""
    written = [source for source in sources if not is_handed_out(source, exercise)]
    if not written:
        return sources[:1]
    if len(written) < len(sources):
        notes.append(f"There is another solution cell {exercise.name!r}, as it was handed out. It "
                     "was left out.")
    return written


def read_cells(text):
    """All cells, in order. What is wrong with a cell's metadata makes it a cell without a name."""
    if not text.strip():
        raise Refused("the file is empty")
    try:
        content = json.loads(text)
        if content.get("nbformat", 4) != 4:  # an old one: slower
            import nbformat
            content = nbformat.reads(text, as_version=4)
        cells = []
        for cell in map(take_dict, content["cells"]):
            key = take_dict(take_dict(cell.get("metadata")).get("nbgrader")).get("grade_id")
            source = cell.get("source", "")
            if not isinstance(source, str):
                source = "".join(source) if isinstance(source, list) else ""
            cells.append(Cell(str(cell.get("cell_type")), key if isinstance(key, str) else None,
                              source))
        return cells
    except Exception as error:  # whatever is wrong with it
        raise Refused(harmless.shorten(
            f"not a notebook as JupyterLab saves it: {type(error).__name__}: {error}")) from error


def take_dict(value):
    return value if isinstance(value, dict) else {}


def list_sources(cells, key):
    """Sources of the cells with that name, each once."""
    return list(dict.fromkeys(cell.source for cell in cells if cell.key == key))


def defines(source, name):
    """Whether code has a line that begins to define the name. It may be no Python."""
    return bool(re.search(
        rf"^(async )?(def|class) +{name}\b|^{name} *(:[^=\n]+)?=(?!=)|^(from|import) .*\b{name}\b",
        source, re.MULTILINE))


def find_definitions(cells, exercise):
    """Sources of the code cells without a name that define what the exercise asks for."""
    return list(dict.fromkeys(
        cell.source for cell in cells if cell.kind == "code" and cell.key is None
        and any(defines(cell.source, name) for name in exercise.asked)))


def find_below(cells, heading):
    """The text cells of the section with that heading, for a question in words."""
    found, inside = [], False
    for cell in cells:
        if cell.kind == "markdown" and cell.source.startswith("## "):
            inside = cell.source.partition("\n")[0].lstrip("# ").strip() == heading.strip()
        elif inside and cell.kind != "code":
            found.append(cell.source)
    return found


def explain_missing(assignment, exercise, cells, lost):
    """Why there is no solution, where no cell has its name and not one alone defines it."""
    count = len(find_definitions(cells, exercise))
    what = " and ".join(exercise.asked)
    there = f"{count} cells define {what}" if count else f"no cell defines {what}"
    if not count and any(defines(cell.source, name) for cell in cells for name in exercise.asked
                         if cell.kind != "code"):
        there = f"only a text cell defines {what} (turned to Markdown?)"
    fresh = FRESH.format(name=assignment.name)
    if lost:
        return (f"the editor that saved this notebook has lost its cells' names (nbgrader's "
                f"metadata), and {there}: {fresh}")
    return f"the solution cell {exercise.name!r} is missing, and {there}: {fresh}"


def explain_guesses(guessed, lost):
    if not guessed:
        return []
    why = ("The editor that saved this notebook has lost its cells' names (nbgrader's metadata)."
           if lost else "The notebook has lost the names of some cells (nbgrader's metadata).")
    return [f"{why} Found by what they define: {', '.join(guessed)}. Other editors may keep less: "
            "work in JupyterLab."]


def find_fault(exercise, sources, cells):
    """Why the cells with an exercise's name can't be judged, or None."""
    name = exercise.name
    if len(sources) > 1:
        for function in exercise.asked:
            if sum(defines(source, function) for source in sources) > 1:
                return (f"there are {len(sources)} different solution cells {name!r}, which all "
                        f"define {function}: join them into one, with one {function} in it")
        return f"the solution cell {name!r} was split into {len(sources)} cells: {JOIN}"
    for source in sources:
        if len(source) > LONGEST:
            return f"the solution cell has more than {LONGEST:,} characters"
        place = next(i for i, cell in enumerate(cells) if cell.source == source)
        if is_torn(cells[place + 1:place + 2]):
            return (f"the solution cell {name!r} was split: the cell below it goes on inside of a "
                    f"function. There are two cells now: {JOIN}")
        unwritten = source.count(UNWRITTEN) >= exercise.answer.count("### BEGIN SOLUTION")
        for function in exercise.asked:
            if defines(source, function) and not unwritten:
                continue
            if any(cell.key is None and cell.source != source and cell.kind == "code"
                   and defines(cell.source, function) for cell in cells):
                return (f"{function} is in another cell than the solution cell {name!r}, the only "
                        f"one that is read for it: {JOIN}")
        if is_handed_out(source, exercise):
            return f"{name!r} is not written yet"
    return None


def is_torn(cells):
    """Whether the first of the cells, without a name, begins in the middle of something."""
    for cell in cells:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        return cell.kind == "code" and cell.key is None and bool(lines) and lines[0][0] in " \t"
    return False
