"""The drawing of chapter 12: the file is what the program draws, and its times are right."""

from pathlib import Path
from xml.etree import ElementTree

import draw_unequal
import pytest

FILE = Path(__file__).parents[1] / "notebooks/src/drawings/shares_by_speed.svg"
SVG = "{http://www.w3.org/2000/svg}"


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in element.get("class", "").split()]


@pytest.fixture
def root():
    return ElementTree.parse(FILE).getroot()


def test_the_file_is_what_the_program_draws(tmp_path):
    draw_unequal.main(tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == ["shares_by_speed"]
    assert (tmp_path / "shares_by_speed.svg").read_bytes() == FILE.read_bytes(), "run draw_unequal"


def test_it_can_be_read(root):
    """It has a title and a description, needs nothing else, and has a white ground, large words."""
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert len(title.text.split()) >= 4 and len(description.text.split()) >= 20
    allowed = {"svg", "title", "desc", "g", "rect", "line", "text"}
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in allowed
        assert not any(key.startswith("on") or "href" in key for key in element.attrib)
    left, top, width, height = map(int, root.get("viewBox").split())
    assert (left, top) == (0, 0) and 560 <= width <= 640
    background = root.find(SVG + "rect")
    assert (background.get("fill"), background.get("width")) == ("white", str(width))
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


def test_an_image_takes_the_slow_device_three_times_as_long(root):
    ends = {}
    for way in with_class(root, "way"):
        images = [int(way.get("data-fast")), int(way.get("data-slow"))]
        assert sum(images) == 256
        drawn = with_class(way, "shard")
        assert [int(shard.get("data-images")) for shard in drawn] == [n for n in images if n]
        for shard, times_as_long in zip(drawn, [1, 3]):
            expected = draw_unequal.UNIT * times_as_long * int(shard.get("data-images"))
            assert float(shard.get("width")) == pytest.approx(expected, abs=0.01)
        [done] = with_class(way, "done")
        last = max(float(shard.get("x")) + float(shard.get("width")) for shard in drawn)
        assert float(done.get("x1")) == pytest.approx(last, abs=0.02), "done when all are"
        ends[tuple(images)] = last
    assert ends[192, 64] < ends[256, 0] < ends[128, 128]
