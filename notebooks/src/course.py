"""What ties the chapters together: parts, reading times, links to neighbours, tables of contents.

`course.toml` has the parts, what one is able to do after each chapter, and where the course is
published, if anywhere. Titles and reading times are the chapters' own, so the tables are made from
the built notebooks: those of README.md and start.md by `build.py`, and a test holds them; that of
the book's first page by `make book`.
"""

import re
import tomllib
from pathlib import Path

import nbformat

SRC = Path(__file__).resolve().parent
NOTEBOOKS = SRC.parent
COURSE = tomllib.loads((SRC / "course.toml").read_text("utf-8"))
PARTS = COURSE["part"]
NUMERALS = ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"]

ANSWER = "### Answer"       # begins a folded answer to an exercise
EXERCISES = "## Exercises"
# After that heading: a file has no mark by which GitHub, VS Code and Colab would fold a section.
ANSWERS_BELOW = ("*Answers are further down. JupyterLab and the book keep them folded; other "
                 "programs show them.*")
TIME = "{reading time}"     # stands in a source for what `minutes` finds
BEGIN, END = "<!-- chapters: made by notebooks/src/build.py -->", "<!-- end of chapters -->"
BEGIN_ADDRESS = "<!-- address: made by notebooks/src/build.py -->"
END_ADDRESS = "<!-- end of address -->"

# Chapters that have run with Colab's versions (helpers/newer_numpy.py), and what to run there
# first: a notebook that is opened there comes without helpers and without MXNet.
ON_COLAB = ("01", "02", "03", "04", "05", "06", "07", "08")
COLAB = """

<details><summary>On Colab (experimental)</summary>

[Open it there]({colab}), and run this in a new cell at the top:

```
!git clone -q --depth 1 {address} many-devices
%pip install -q --no-deps mxnet==1.9.1 d2l==1.0.3
%cd many-devices/notebooks
import os, sys
os.environ["PYTHONPATH"] = "/content/many-devices"
sys.path.insert(0, "/content/many-devices")
```

</details>"""

# "deeper: More all-reduces", up to what can't be in a title.
DEEPER = re.compile(r"\bdeeper:\s+([A-Z](?:(?!\bdeeper:)[\w\s,’'-])*)")
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
    repository at GitHub, which the links to Codespaces and the book need.
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
    place = address.removeprefix("https://github.com/")
    line = (f"*To run this notebook: `git clone {address}`, then `make lab` in its folder "
            f"([more]({page})); or [in a Codespace](https://codespaces.new/{place}).*")
    if name[:2] in ON_COLAB:
        colab = f"https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}.ipynb"
        line += COLAB.format(colab=colab, address=address)
    return line


def how_to_begin(address):
    """Markdown of README's first commands; with an address also badges and the line to clone."""
    commands = {"make lab": "sets everything up but PyTorch, then opens JupyterLab",
                "make setup TORCH=1": "adds PyTorch, for chapters 13 to 16",
                "make test": "runs every chapter as a test, in about eighteen minutes"}
    lines = [f"{command:18}  # {what}" for command, what in commands.items()]
    if not address:
        return "In a clone of the course:\n\n```\n" + "\n".join(lines) + "\n```"
    owner, name = address.removeprefix("https://github.com/").split("/")
    badges = [
        f"[![Open in a Codespace](https://github.com/codespaces/badge.svg)]"
        f"(https://codespaces.new/{owner}/{name})",
        f"[![Tests]({address}/actions/workflows/tests.yml/badge.svg)]"
        f"({address}/actions/workflows/tests.yml)",
        f"[Read it as a book](https://{owner}.github.io/{name}/)",
    ]
    lines = [f"git clone {address}", f"cd {name}", *lines]
    return " ".join(badges) + "\n\n```\n" + "\n".join(lines) + "\n```"


def with_beginning(text, address):
    """README's `text` with what stands between its two other marks made anew."""
    before, rest = text.split(BEGIN_ADDRESS)
    _, after = rest.split(END_ADDRESS)
    return f"{before}{BEGIN_ADDRESS}\n\n{how_to_begin(address)}\n\n{END_ADDRESS}{after}"


def with_repository(text, address):
    """CITATION.cff's `text` with the line of the repository, or without where there is none."""
    text = re.sub(r"^repository-code:.*\n", "", text, flags=re.MULTILINE)
    return text + (f"repository-code: {address}\n" if address else "")


# --- reading time ------------------------------------------------------------------------------

# The pace of a student who meets a chapter for the first time, in a second language, makes the
# predictions and looks at what cells print: much slower than the 238 words a minute at which adults
# read non-fiction (Brysbaert, 2019, doi:10.1016/j.jml.2019.104047). It is a rule and not a
# measurement of each chapter.
WORDS_A_MINUTE = 65
LINES_A_MINUTE = 6
MINUTES_A_PICTURE = 1


def key(path):
    """What a notebook or its source is called here: "03_all_reduce", "deeper/03_more"."""
    return f"deeper/{path.stem}" if path.parent.name == "deeper" else path.stem


def main_line(notebook):
    """The cells before the first answer, links to other chapters left out."""
    cells = [cell for cell in notebook.cells if "navigation" not in cell.metadata.get("tags", [])]
    for number, cell in enumerate(cells):
        if cell.source.startswith(ANSWER):
            return cells[:number]
    return cells


def minutes(notebook):
    """Minutes to read a chapter, to the nearest five, without its exercises.

    Prose, open code, and pictures at the pace of the constants above. Folded cells don't count,
    but for what they draw.
    """
    cells = main_line(notebook)
    prose = " ".join(c.source for c in cells if c.cell_type == "markdown")
    prose = prose.replace(ANSWERS_BELOW, "")
    prose = re.sub(r"```.*?```", "", prose, flags=re.DOTALL)
    drawings = len(re.findall(r"!\[[^\]]*\]\([^)]*\)", prose))
    prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", lambda m: "" if m[0][0] == "!" else m[1], prose)
    code = [c.source for c in cells if c.cell_type == "code"]
    is_open = [c.source for c in cells
               if c.cell_type == "code" and "fold" not in c.metadata.get("tags", [])]
    words = len(re.findall(r"\w+(?:['’-]\w+)*", prose))
    lines = sum(bool(line.strip()) for source in is_open for line in source.splitlines())
    pictures = drawings + sum("show(" in source for source in code)
    time = words / WORDS_A_MINUTE + lines / LINES_A_MINUTE + pictures * MINUTES_A_PICTURE
    return max(5, 5 * round(time / 5))


def exercises(notebook):
    """How many exercises it has: each has one answer, and is counted as ten minutes."""
    return sum(cell.source.startswith(ANSWER) for cell in notebook.cells)


def as_hours(number):
    """90 -> "1 h 30 min"."""
    hours, rest = divmod(number, 60)
    return " ".join([f"{hours} h"] * bool(hours) + [f"{rest} min"] * bool(rest or not hours))


# --- links -------------------------------------------------------------------------------------


def title(notebook):
    """"03 All-reduce", of a notebook that begins with "# 03 · All-reduce".

    Of a deeper one it is the title alone: "More all-reduces".
    """
    for cell in notebook.cells:
        if found := re.match(r"# (.+)", cell.source):
            return found[1].removeprefix("Deeper · ").replace(" · ", " ")
    return "?"


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
    else:
        links.append("[The map →](map.md)")
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
        numeral = "X" * (number // 10) + NUMERALS[number % 10]
        found.append((f"{numeral}. {part['name']}", rows))
    return found


def row(folder, listed):
    """What course.toml says of a notebook, and what the notebook says of itself."""
    if missing := [key for key in ("able", "running") if key not in listed]:
        raise Mistake(f"course.toml: the entry of {listed['file']} lacks {' and '.join(missing)}")
    notebook = nbformat.read(folder / f"{listed['file']}.ipynb", as_version=4)
    return listed | {"title": title(notebook), "minutes": minutes(notebook),
                     "exercises": exercises(notebook)}


def short_path(parts):
    """What the short path is, and how long it, the chapters and the deeper notebooks take."""
    main = [row for _, rows in parts for row in rows if not row["deeper"]]
    short = [row for row in main if row["short"]]
    numbers = [row["file"][:2] for row in short]
    time = as_hours(sum(row["minutes"] for row in short))
    everything = as_hours(sum(row["minutes"] for row in main))
    deeper = as_hours(sum(row["minutes"] for _, rows in parts for row in rows if row["deeper"]))
    tasks = sum(row["exercises"] for row in short)
    all_tasks = sum(row["exercises"] for row in main)
    count = sum(row["deeper"] for _, rows in parts for row in rows)
    return (f"The **short path** (●) is {', '.join(numbers[:-1])} and {numbers[-1]}: {time} of "
            f"reading and {tasks} exercises, of {everything} and {all_tasks} for all chapters. "
            f"{count} *optional* notebooks go deeper, {deeper} of reading; no chapter needs one.")


def table(parts, prefix, able):
    """A Markdown table of all chapters; `prefix` leads from the page to the notebooks.

    able: whether it says what one is able to do after each, and lists the deeper notebooks too.
    """
    head = ["", "chapter", *["after it you can"] * able, "reading", "exercises", "running"]
    lines = [head, ["---"] * len(head)]
    for name, rows in parts:
        lines.append(["", f"**{name}**", *[""] * (len(head) - 2)])
        for row in rows:
            if row["deeper"] and not able:
                continue
            link = f"[{row['title']}]({prefix}{row['file']}.ipynb)"
            lines.append(["●" if row["short"] else "",
                          f"↳ *optional:* {link}" if row["deeper"] else link,
                          *[row["able"]] * able, f"{row['minutes']} min",
                          str(row["exercises"]), row["running"]])
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
    """Make the tables, README's first commands and the citation anew, where something changes."""
    parts = chapters()
    made = {path: with_contents(path.read_text("utf-8"), parts, prefix, able)
            for path, (prefix, able) in pages().items()}
    readme, citation = NOTEBOOKS.parent / "README.md", NOTEBOOKS.parent / "CITATION.cff"
    made[readme] = with_beginning(made[readme], repository())
    made[citation] = with_repository(citation.read_text("utf-8"), repository())
    for path, text in made.items():
        if text != path.read_text("utf-8"):
            path.write_text(text, "utf-8")
