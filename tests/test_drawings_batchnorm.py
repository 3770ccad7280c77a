"""The drawing of chapter 09: the file is what the program draws, and its means are those."""

import re
from pathlib import Path
from xml.etree import ElementTree

import draw_batchnorm
import numpy as np

FOLDER = Path(__file__).parents[1] / "notebooks/src/drawings"
SVG = "{http://www.w3.org/2000/svg}"


def read():
    """The root element of the drawing."""
    return ElementTree.parse(FOLDER / "shards_and_means.svg").getroot()


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in element.get("class", "").split()]


def test_the_file_is_what_the_program_draws(tmp_path):
    draw_batchnorm.main(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shards_and_means.svg"]
    drawn = (tmp_path / "shards_and_means.svg").read_bytes()
    assert drawn == (FOLDER / "shards_and_means.svg").read_bytes(), "run its program"


def test_it_has_words_and_needs_nothing_else():
    root = read()
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert len(title.text.split()) >= 4 and len(description.text.split()) >= 20
    allowed = {"svg", "title", "desc", "g", "rect", "line", "polygon", "circle", "text"}
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in allowed
        for key in element.attrib:
            assert not key.startswith("on") and "href" not in key
    assert not re.search(r"url\(|@import", (FOLDER / "shards_and_means.svg").read_text("utf-8"))


def test_it_is_white_behind_and_its_words_are_large_enough():
    root = read()
    width = int(root.get("viewBox").split()[2])
    assert root.find(SVG + "rect").get("fill") == "white"
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


def test_means_and_shifts_are_those_of_the_values():
    root = read()
    rows = with_class(root, "batch")
    batches = []
    for row in rows:
        values = [int(text.text) for text in with_class(row, "value")]
        (mark,) = with_class(row, "mean")
        assert float(mark.get("data-mean")) == np.mean(values)
        assert f"mean {np.mean(values):g}" in "".join(row.itertext())
        assert float(mark.get("x1")) == draw_batchnorm.place(np.mean(values))
        batches.append(values)
    whole, first, second = batches
    assert whole == first + second
    shifts = with_class(root, "shift")
    assert len(shifts) == 2
    for shift, shard in zip(shifts, (first, second)):
        delta = np.mean(shard) - np.mean(whole)
        assert float(shift.get("data-shift")) == delta
        assert shift.findtext(SVG + "text").replace("−", "-") == f"{delta:+g}"
    assert sum(float(shift.get("data-shift")) for shift in shifts) == 0
