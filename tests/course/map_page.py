"""Reads `notebooks/map.md`, for tests of its numbers and of its drawings."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "notebooks/map.md").read_text(encoding="utf-8")


def rows(first):
    """The cells of the table whose head has the cell `first`, row by row."""
    lines = PAGE.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("|") and first in line)
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[start + 2 : end]]


def bullets():
    """What the page says of each way under the drawing of seven: `{way: text}`."""
    start = PAGE.index("## Seven ways to cut")
    text = " ".join(PAGE[start : PAGE.index("Of four devices", start)].split())
    found = re.findall(r"- \*\*([\w ]+):?\*\* (.*?)(?= - |$)", text)
    return {way.lower(): says for way, says in found}


def evaluate(formula, **values):
    """A formula of the page, in which what stands side by side is multiplied."""
    formula = formula.strip("$").replace(r"\cdot", "*").replace("^", "**")
    parts = re.findall(r"N_0|\d+|[a-zA-Z]|\*\*|[-+*/()]", formula)
    text = " ".join(parts)
    text = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", text)
    return eval(text, {"__builtins__": {}}, values)


def shown(text, value):
    """Is the number in `text` this value, rounded to as many places as it shows?"""
    number = re.search(r"[\d.]+", text)[0]
    return float(number) == round(value, len(number.partition(".")[2]))
