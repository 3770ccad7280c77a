"""What ties the chapters together: parts, links to neighbours, tables of contents.

`course.toml` has the parts, what one is able to do after each chapter, how long it takes, and where
the course is published, if anywhere. Titles and numbers of exercises are the chapters' own, so the
tables are made from the built notebooks: those of README.md and start.md by `build.py`, and a test
holds them; those of the book's first page by `make book`.
"""

import re
import tomllib
from pathlib import Path

import nbformat

SRC = Path(__file__).resolve().parent
NOTEBOOKS = SRC.parent
COURSE = tomllib.loads((SRC / "course.toml").read_text("utf-8"))
PARTS = COURSE["part"]
NUMERALS = ["", "I", "II", "III", "IV", "V", "VI"]

ANSWER = "### Answer"       # begins a folded answer, to an exercise or to *Your turn*
EXERCISES = "## Exercises"
# After that heading: a file has no mark by which GitHub, VS Code and Colab would fold a section.
ANSWERS_BELOW = ("*Answers are further down. JupyterLab and the book keep them folded; other "
                 "programs show them.*")
TIME = "{reading time}"     # stands in a source for what `reading` says
COLUMNS = ["reading", "exercises", "running"]
BEGIN, END = "<!-- chapters: made by notebooks/src/build.py -->", "<!-- end of chapters -->"

# "deeper: More all-reduces", up to what can't be in a title.
DEEPER = re.compile(r"\bdeeper:\s+([A-Za-z](?:(?!\bdeeper:)[\w\s,’'-])*)")
# "chapter 03", "Chapters 01, 02 and 05", also where the line breaks in between.
MENTION = re.compile(r"\b[Cc]hapters?\s+\d\d(?:(?:,\s+|\s+(?:and|to|or)\s+)\d\d)*\b")
PAPER = re.compile(r"\barXiv:(\d{4}\.\d{4,5})\b")
NOT_PROSE = re.compile(r"(```.*?```|`[^`]*`|\[[^\]]*\]\([^)]*\)|\$\$.*?\$\$|\$[^$]*\$)", re.DOTALL)


class Mistake(ValueError):
    """A source or course.toml says what can't be; the message is for whoever wrote it."""


# --- where the course is published --------------------------------------------------------------

def repository(address=None):
    """Where the course is published, as course.toml says it; "" where it is not.

    address: another than that of course.toml. Raises ValueError where it isn't the address of a
    repository at GitHub, which the notebooks and the book need.
    """
    if address is None:
        address = COURSE["repository"]
    if address and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]*[\w-]", address):
        raise ValueError(f"course.toml: repository = {address!r} must be like "
                         "https://github.com/owner/name, without a / at its end, or empty")
    return address


def how_to_run(name, address):
    """A line for those who come to a notebook from outside JupyterLab: how it is run.

    name: the notebook's `key`; address: the repository's, "" where there is none.
    """
    page = "../" * name.count("/") + "running.md"
    if not address:
        return f"*To run this notebook, type `make lab` in a clone of the course ([more]({page})).*"
    return (f"*To run this notebook: `git clone {address}`, then `make lab` in its folder "
            f"([more]({page})).*")


# --- what course.toml says of a notebook --------------------------------------------------------


def key(path):
    """What a notebook or its source is called here: "03_all_reduce", "deeper/03_more"."""
    return f"deeper/{path.stem}" if path.parent.name == "deeper" else path.stem


def entry(name):
    """What course.toml says of the notebook `name`, its `key`; nothing where it isn't listed."""
    for part in PARTS:
        for chapter in part["chapter"]:
            if chapter["file"] == name:
                return chapter
            for deeper in chapter.get("deeper", []):
                if f"deeper/{deeper['file']}" == name:
                    return deeper
    return {}


def reading(name):
    """How long it takes to read a notebook. Raises Mistake where course.toml doesn't say it."""
    if "reading" not in entry(name):
        raise Mistake(f"{name} says how long reading takes, and course.toml doesn't")
    return f"about {entry(name)['reading']} minutes"


def assignment(name):
    """A paragraph for a chapter's end that leads to its assignment; "" where it has none."""
    if "assignment" not in entry(name):
        return ""
    return (f"**Assignment:** {entry(name)['assignment']} goes with this chapter. Working alone? "
            "[The start page](start.md#alone) explains how to have it marked.\n\n")


def exercises(notebook):
    """How many exercises it has: each has one answer."""
    return sum(bool(re.match(rf"{ANSWER} \d", cell.source)) for cell in notebook.cells)


def as_hours(number):
    """90 -> "1 h 30 min"."""
    hours, rest = divmod(number, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{rest} min"] * bool(rest or not hours))


# --- links -------------------------------------------------------------------------------------


def title(text):
    """"03 All-reduce", of a notebook or a source in which the first heading is "# 03 · All-reduce".

    text: its Markdown, or the source's lines. Of a deeper notebook it is the title alone: "More
    all-reduces". "?" where there is no heading.
    """
    found = (re.search(r"^# # (.+)", text, re.MULTILINE)  # in a source each line begins with #
             or re.search(r"^# (.+)", text, re.MULTILINE))
    return found[1].removeprefix("Deeper · ").replace(" · ", " ") if found else "?"


def navigation(name, titles):
    """Markdown that leads from a chapter to its neighbours and to the start.

    `titles` has the title of each notebook by its `key`, in order. A deeper notebook leads to its
    chapter and to the start. Raises Mistake where there is no such chapter, or several.
    """
    names = [each for each in titles if not each.startswith("deeper/")]
    if name not in names:
        number = Path(name).name[:2]
        found = [each for each in names if each[:2] == number]
        if len(found) != 1:
            raise Mistake(f"{name} belongs to chapter {number}, of which there are {len(found)} "
                          f"sources, {number}_*.py, and must be one")
        (chapter,) = found
        return (f"*Optional: no chapter needs this.* [← {titles[chapter]}](../{chapter}.ipynb) · "
                "[Start](../start.md)")
    place = names.index(name)
    links = ["[Start](start.md)"]
    if place > 0:
        links.insert(0, f"[← {titles[names[place - 1]]}]({names[place - 1]}.ipynb)")
    if place + 1 < len(names):
        links.append(f"[{titles[names[place + 1]]} →]({names[place + 1]}.ipynb)")
    return " · ".join(links)


def link_mentions(text, name, titles):
    """`text` with each "chapter 03", "deeper: Its title" and "arXiv:1512.03385" made a link.

    Not what names `name` itself, the `key` of the notebook that has the text; titles: the title of
    each notebook by its key. Raises Mistake for a chapter or a title that there is not.
    """
    up = "../" if name.startswith("deeper/") else ""
    files = {each[:2]: each for each in titles if not each.startswith("deeper/")}
    deeper = {words: each for each, words in titles.items() if each.startswith("deeper/")}

    def link(number, words):
        if number not in files:
            raise Mistake(f"{name} speaks of chapter {number}, which there is not")
        return words if files[number] == name else f"[{words}]({up}{files[number]}.ipynb)"

    def link_deeper(found):
        # The sentence may go on: the longest title that it begins with.
        for words in sorted(deeper, key=len, reverse=True):
            title_here = r"\s+".join(map(re.escape, words.split()))
            if mention := re.match(rf"deeper:\s+{title_here}\b", found[0]):
                if deeper[words] == name:
                    return found[0]
                rest = found[0][mention.end():]
                return f"[{mention[0]}]({up}{deeper[words]}.ipynb){rest}"
        said = " ".join(found[1].split())
        raise Mistake(f"{name} speaks of the deeper notebook {said!r}, which there is not")

    def replace(found):
        numbers = re.findall(r"\d\d", found[0])
        if len(numbers) == 1:
            return link(numbers[0], found[0])
        return re.sub(r"\d\d", lambda number: link(number[0], number[0]), found[0])

    paper = r"[\g<0>](https://arxiv.org/abs/\1)"
    for mention, by in ((DEEPER, link_deeper), (MENTION, replace), (PAPER, paper)):
        parts = NOT_PROSE.split(text)
        parts[::2] = [mention.sub(by, part) for part in parts[::2]]
        text = "".join(parts)
    return text


# --- tables of contents ------------------------------------------------------------------------


def chapters(folder=NOTEBOOKS):
    """For each part its name and a list of chapters, each with what the tables need.

    A deeper notebook stands after its chapter, with "deeper" True. Raises FileNotFoundError where
    a notebook of course.toml has not been built, Mistake where an entry lacks something.
    """
    found = []
    for number, part in enumerate(PARTS, 1):
        rows = []
        for chapter in part["chapter"]:
            rows.append(row(folder, {"short": False} | chapter | {"deeper": False}))
            for deeper in chapter.get("deeper", []):
                file = f"deeper/{deeper['file']}"
                rows.append(row(folder, deeper | {"file": file, "deeper": True, "short": False}))
        found.append((f"{NUMERALS[number]}. {part['name']}", rows))
    return found


def row(folder, listed):
    """What course.toml says of a notebook, and what the notebook says of itself."""
    if missing := [key for key in ("able", "reading", "running") if key not in listed]:
        raise Mistake(f"course.toml: the entry of {listed['file']} lacks {' and '.join(missing)}")
    notebook = nbformat.read(folder / f"{listed['file']}.ipynb", as_version=4)
    return listed | {"title": title(notebook.cells[1].source), "exercises": exercises(notebook)}


def short_path(parts):
    """What the short path is, and how long it, the chapters and the deeper notebooks take."""
    main = [row for _, rows in parts for row in rows if not row["deeper"]]
    short = [row for row in main if row["short"]]
    numbers = [row["file"][:2] for row in short]
    time = as_hours(sum(row["reading"] for row in short))
    everything = as_hours(sum(row["reading"] for row in main))
    deeper = as_hours(sum(row["reading"] for _, rows in parts for row in rows if row["deeper"]))
    tasks = sum(row["exercises"] for row in short)
    all_tasks = sum(row["exercises"] for row in main)
    count = sum(row["deeper"] for _, rows in parts for row in rows)
    return (f"The **short path** (●), enough to train on several devices, is "
            f"{', '.join(numbers[:-1])} and {numbers[-1]}: {time} of reading and {tasks} "
            f"exercises. All chapters take {everything} and have {all_tasks} exercises. "
            f"{count} *optional* notebooks go deeper, {deeper} of reading; no chapter needs one.")


def table(parts, prefix, able):
    """Markdown tables of the chapters; `prefix` leads from the page to the notebooks.

    able: whether they say what one is able to do after each. Then each part has a table of its own,
    with another one below it, folded, of its deeper notebooks; else one table has all chapters.
    """
    if not able:
        lines = []
        for name, rows in parts:
            lines.append(["", f"**{name}**", "", "", ""])
            lines += [line(row, prefix, able) for row in rows if not row["deeper"]]
        return as_table(["", "chapter", *COLUMNS], lines)
    made = []
    for name, rows in parts:
        main = [line(row, prefix, able) for row in rows if not row["deeper"]]
        made.append(as_table(["", name, "after it you can", *COLUMNS], main))
        if deeper := [line(row, prefix, able) for row in rows if row["deeper"]]:
            count = f"{len(deeper)} notebook{'s' * (len(deeper) > 1)}"
            made += [f"<details>\n<summary>Optional: {count}</summary>",
                     as_table(["", "optional", "after it you can", *COLUMNS], deeper), "</details>"]
    return "\n\n".join(made)


def line(row, prefix, able):
    """A notebook's cells in a table."""
    number = f"{Path(row['file']).name[:2]} " * row["deeper"]    # a chapter's title has it
    return ["●" if row["short"] else "", f"[{number}{row['title']}]({prefix}{row['file']}.ipynb)",
            *[row["able"]] * able, f"{row['reading']} min", str(row["exercises"]), row["running"]]


def as_table(head, lines):
    """A Markdown table."""
    lines = [head, [":---" if each else "---" for each in head], *lines]
    return "\n".join(re.sub(" +", " ", f"| {' | '.join(line)} |") for line in lines)


def pages():
    """Pages with a table: file -> what leads to the notebooks, whether it says what one can do."""
    return {NOTEBOOKS.parent / "README.md": ("notebooks/", False),
            NOTEBOOKS / "start.md": ("", True)}


def with_contents(text, parts, prefix, able):
    """`text` with what stands between the two marks made anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    made = f"{short_path(parts)}\n\n{table(parts, prefix, able)}"
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def write_contents():
    """Make the tables anew, where something changes."""
    parts = chapters()
    for path, (prefix, able) in pages().items():
        text = path.read_text("utf-8")
        made = with_contents(text, parts, prefix, able)
        if made != text:
            path.write_text(made, "utf-8")
