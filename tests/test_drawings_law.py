"""The drawing of chapter 11: the file is what the program draws, and its bars follow its law."""

from pathlib import Path
from xml.etree import ElementTree

import draw_law
import pytest

FILE = Path(__file__).parents[1] / "notebooks/src/drawings/step_law.svg"
SVG = "{http://www.w3.org/2000/svg}"


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in element.get("class", "").split()]


@pytest.fixture
def root():
    return ElementTree.parse(FILE).getroot()


def test_the_file_is_what_the_program_draws(tmp_path):
    draw_law.main(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == ["step_law"]
    assert (tmp_path / "step_law.svg").read_bytes() == FILE.read_bytes(), "run draw_law.py"


def test_it_can_be_read(root):
    """It has a title and a description, needs nothing else, and has a white ground, large words."""
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert len(title.text.split()) >= 4 and len(description.text.split()) >= 20
    allowed = {"svg", "title", "desc", "g", "rect", "text"}
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in allowed
        assert not any(key.startswith("on") or "href" in key for key in element.attrib)
    left, top, width, height = map(int, root.get("viewBox").split())
    assert (left, top) == (0, 0) and 560 <= width <= 640
    background = root.find(SVG + "rect")
    assert (background.get("fill"), background.get("width")) == ("white", str(width))
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


def test_compute_halves_and_all_reduce_doubles(root):
    lengths = {}
    for bar in with_class(root, "bar"):
        k = int(bar.get("data-devices"))
        assert str(k) in bar.findtext(SVG + "text").split()
        for part in with_class(bar, "part"):
            lengths[part.get("data-part"), k] = float(part.get("width"))
    totals = {}
    for k in [1, 2, 4, 8, 16]:
        assert lengths["fixed", k] == lengths["fixed", 1]
        assert lengths["compute", k] == pytest.approx(lengths["compute", 1] / k)
        all_reduce = lengths.get(("all-reduce", k), 0)
        assert all_reduce == (0 if k == 1 else pytest.approx(lengths["all-reduce", 2] * k / 2))
        totals[k] = lengths["fixed", k] + lengths["compute", k] + all_reduce
    shortest = sorted(totals, key=totals.get)[:2]
    assert sorted(shortest) == [4, 8]
    assert totals[4] == totals[8], "as drawn: equal"
