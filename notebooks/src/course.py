"""What ties the chapters together: parts, reading times, links to neighbours, tables of contents.

`course.toml` has the parts and what each chapter proves. Titles and reading times are the chapters'
own, so the tables are made from the built notebooks: those of README.md and start.md by `build.py`,
and a test holds them; that of the book's first page by `make book`.
"""

import re
import tomllib
from pathlib import Path

import nbformat

SRC = Path(__file__).resolve().parent
NOTEBOOKS = SRC.parent
PARTS = tomllib.loads((SRC / "course.toml").read_text("utf-8"))["part"]
NUMERALS = ["I", "II", "III", "IV"]

ANSWER = "### Answer"       # begins a folded answer to an exercise
TIME = "{reading time}"     # stands in a source for what `minutes` finds
BEGIN, END = "<!-- chapters: made by notebooks/src/build.py -->", "<!-- end of chapters -->"

# "chapter 03", "Chapters 01, 02 and 05", also where the line breaks in between.
MENTION = re.compile(r"\b[Cc]hapters?\s+\d\d(?:(?:,\s+|\s+(?:and|to|or)\s+)\d\d)*\b")
NOT_PROSE = re.compile(r"(```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)|\$\$.*?\$\$|\$[^$]*\$)", re.DOTALL)


# --- reading time ------------------------------------------------------------------------------


def main_line(notebook):
    """The cells before the first answer, links to other chapters left out."""
    cells = [cell for cell in notebook.cells if "navigation" not in cell.metadata.get("tags", [])]
    for number, cell in enumerate(cells):
        if cell.source.startswith(ANSWER):
            return cells[:number]
    return cells


def minutes(notebook):
    """Minutes to read a chapter, to the nearest five, without its exercises.

    200 words of prose a minute, 15 lines of code, one figure. That is a rule and not a measurement.
    It counts somewhat slower than the 238 words a minute at which adults read non-fiction
    (Brysbaert, 2019, doi:10.1016/j.jml.2019.104047), since there is something to check in each.
    """
    cells = main_line(notebook)
    prose = " ".join(c.source for c in cells if c.cell_type == "markdown")
    code = [c.source for c in cells if c.cell_type == "code"]
    words = len(re.findall(r"\w+(?:['’-]\w+)*", re.sub(r"```.*?```", "", prose, flags=re.DOTALL)))
    lines = sum(bool(line.strip()) for source in code for line in source.splitlines())
    figures = sum("show(" in source for source in code)
    return max(5, 5 * round((words / 200 + lines / 15 + figures) / 5))


def exercises(notebook):
    """How many exercises it has: each has one answer, and is counted as ten minutes."""
    return sum(cell.source.startswith(ANSWER) for cell in notebook.cells)


def as_hours(number):
    """90 -> "1 h 30 min"."""
    hours, rest = divmod(number, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{rest} min"] * bool(rest or not hours))


# --- links -------------------------------------------------------------------------------------


def title(notebook):
    """"03 All-reduce", of a notebook that begins with "# 03 · All-reduce"."""
    for cell in notebook.cells:
        if found := re.match(r"# (.+)", cell.source):
            return found[1].replace(" · ", " ")
    return "?"


def navigation(name, titles):
    """Markdown that leads from a chapter to its neighbours and to the start.

    `titles` has the title of each chapter by its file's name without suffix, in order.
    """
    names = list(titles)
    place = names.index(name)
    links = ["[Start](start.md)"]
    if place > 0:
        links.insert(0, f"[← {titles[names[place - 1]]}]({names[place - 1]}.ipynb)")
    if place + 1 < len(names):
        links.append(f"[{titles[names[place + 1]]} →]({names[place + 1]}.ipynb)")
    else:
        links.append("[The map →](map.md)")
    return " · ".join(links)


def link_mentions(text, name, names):
    """`text` with each "chapter 03" made a link to it, but for the chapter `name` itself.

    Raises ValueError for a number that no chapter of `names` has.
    """
    files = {each[:2]: f"{each}.ipynb" for each in names}

    def link(number, words):
        if number not in files:
            raise ValueError(f"{name} speaks of chapter {number}, which there is not")
        return words if number == name[:2] else f"[{words}]({files[number]})"

    def replace(found):
        numbers = re.findall(r"\d\d", found[0])
        if len(numbers) == 1:
            return link(numbers[0], found[0])
        return re.sub(r"\d\d", lambda number: link(number[0], number[0]), found[0])

    parts = NOT_PROSE.split(text)
    parts[::2] = [MENTION.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


# --- tables of contents ------------------------------------------------------------------------


def chapters(folder=NOTEBOOKS):
    """For each part its name and a list of chapters, each with what the tables need.

    Raises FileNotFoundError where a chapter of course.toml has not been built.
    """
    found = []
    for numeral, part in zip(NUMERALS, PARTS, strict=True):
        rows = []
        for chapter in part["chapter"]:
            notebook = nbformat.read(folder / f"{chapter['file']}.ipynb", as_version=4)
            rows.append(chapter | {"title": title(notebook), "minutes": minutes(notebook),
                                   "exercises": exercises(notebook)})
        found.append((f"{numeral}. {part['name']}", rows))
    return found


def short_path(parts):
    """One sentence with the chapters of the short path and the time that it takes."""
    short = [row for _, rows in parts for row in rows if row["short"]]
    numbers = [row["file"][:2] for row in short]
    time = as_hours(sum(row["minutes"] for row in short))
    everything = as_hours(sum(row["minutes"] for _, rows in parts for row in rows))
    return (f"The **short path** (●) is {', '.join(numbers[:-1])} and {numbers[-1]}: {time} of "
            f"reading, of {everything} for all.")


def table(parts, prefix, proves):
    """A Markdown table of all chapters; `prefix` leads from the page to the notebooks."""
    head = ["", "chapter", *["what it proves"] * proves, "reading", "exercises", "running"]
    lines = [head, ["---"] * len(head)]
    for name, rows in parts:
        lines.append(["", f"**{name}**", *[""] * (len(head) - 2)])
        for row in rows:
            lines.append(["●" if row["short"] else "",
                          f"[{row['title']}]({prefix}{row['file']}.ipynb)",
                          *[row["proves"]] * proves, f"{row['minutes']} min",
                          str(row["exercises"]), row["running"]])
    return "\n".join(re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines)


def pages():
    """Pages with a table: file -> what leads to the notebooks, whether it says what they prove."""
    return {NOTEBOOKS.parent / "README.md": ("notebooks/", False),
            NOTEBOOKS / "start.md": ("", True)}


def with_contents(text, parts, prefix, proves):
    """`text` with what stands between the two marks made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{table(parts, prefix, proves)}\n\n{short_path(parts)}"
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def write_contents():
    """Make the tables on all pages anew; nothing is written where nothing changes."""
    parts = chapters()
    for path, (prefix, proves) in pages().items():
        old = path.read_text("utf-8")
        new = with_contents(old, parts, prefix, proves)
        if new != old:
            path.write_text(new, "utf-8")
