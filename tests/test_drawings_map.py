"""The drawings of the map say what its tables say."""

import re
from pathlib import Path

import pytest
from map_numbers import bubble, bytes_of_two_matrices, idle, kept, simulate
from svg import SVG, read, with_class
from test_map import evaluate, rows

PAGE = Path(__file__).resolve().parents[1] / "notebooks/map.md"


def shape(rectangle):
    return tuple(float(rectangle.get(key)) for key in ("x", "y", "width", "height"))


def area(rectangles):
    """What rectangles cover together; where they overlap, once."""
    corners = [(x, y, x + width, y + height) for x, y, width, height in map(shape, rectangles)]
    xs = sorted({x for left, _, right, _ in corners for x in (left, right)})
    ys = sorted({y for _, top, _, bottom in corners for y in (top, bottom)})
    covered = 0
    for left, right in zip(xs, xs[1:]):
        for top, bottom in zip(ys, ys[1:]):
            if any(a <= left and right <= c and b <= top and bottom <= d for a, b, c, d in corners):
                covered += (right - left) * (bottom - top)
    return covered


def test_the_page_shows_them():
    text = PAGE.read_text("utf-8")
    for name in ("two_ways", "cuts", "pipeline"):
        assert f"](src/drawings/{name}.svg)" in text


# ---- Two ways ----


def test_in_two_ways_the_devices_have_different_halves_and_together_all():
    root = read("two_ways")
    matrices = with_class(root, "matrix")
    batches = with_class(root, "sequences")
    assert len(matrices) == 8 and len(batches) == 12
    for panel, way in enumerate(("data", "tensor")):
        of_matrices = matrices[4 * panel : 4 * panel + 4]
        for name in ("first", "second"):
            blue = []
            for matrix in of_matrices:
                if matrix.get("data-name") == name:
                    frame = list(matrix)[0]
                    (mine,) = with_class(matrix, "mine")
                    x, y, width, height = shape(mine)
                    left, top, side, _ = shape(frame)
                    blue.append((x - left, y - top, width / side, height / side))
            if way == "data":
                assert blue == [(0, 0, 1, 1)] * 2
            elif name == "first":  # columns
                assert blue == [(0, 0, 0.5, 1), (32, 0, 0.5, 1)]
            else:  # rows
                assert blue == [(0, 0, 1, 0.5), (0, 32, 1, 0.5)]
        of_batch = batches[6 * panel : 6 * panel + 6]
        drawn = [[shape(bar) for bar in with_class(each, "mine")] for each in of_batch]
        assert {len(bars) for bars in drawn} == {4 if way == "data" else 8}
        widths = [bars[0][2] for bars in drawn]
        assert widths == ([64] * 6 if way == "data" else [64, 32, 64] * 2)


def test_in_two_ways_what_is_summed_is_exchanged_and_its_bytes_are_told():
    root = read("two_ways")
    exchanged = [(each.get("data-way"), each.get("data-of"))
                 for each in with_class(root, "exchange")]
    assert exchanged == [("data", "first"), ("data", "second"), ("tensor", "batch"),
                         ("tensor", "result")]  # as test_map.py sums them
    told = re.findall(r"(\d+) MB", "|".join(text.text for text in root.iter(SVG + "text")))
    sent = [sent for sent, _ in bytes_of_two_matrices().values()]
    assert [int(number) for number in told] == [round(each / 1e6) for each in sent]
    description = root.find(SVG + "desc").text
    assert re.findall(r"(\d+) megabytes", description) == told


# ---- Seven ways ----


@pytest.mark.parametrize("name, weights", [(row[0], row[1]) for row in rows("weights held")])
def test_the_blue_part_of_the_weights_is_what_the_table_says(name, weights):
    (way,) = (each for each in with_class(read("cuts"), "way") if each.get("data-way") == name)
    squares = {each.get("data-of"): each for each in with_class(way, "square")}
    frame = area([list(squares["weights"])[0]])
    blue = area(with_class(squares["weights"], "always")) / frame
    if name == "expert":
        assert weights == "shared ones and $1/k$ of the others"
        share = 1 / 3 + 2 / 3 / 4  # attention is a third of a layer's weights
    else:
        share = evaluate(re.match(r"\$(.*?)\$", weights)[1], N=1, k=4)
    assert blue == pytest.approx(share, abs=1e-3)
    pale = area(with_class(squares["weights"], "at-times")) / frame if name == "sharded data" else 0
    assert bool(with_class(squares["weights"], "at-times")) == ("layers in use" in weights)
    if pale:
        assert pale + 1 / 16 == pytest.approx(1 / 4, abs=1e-3)  # with its blue part, one layer


@pytest.mark.parametrize("name, cut", [
    (row[0].split(" (")[0], row[1]) for row in rows("what is cut")])
def test_the_blue_part_of_the_batch_is_cut_as_the_table_says(name, cut):
    (way,) = (each for each in with_class(read("cuts"), "way") if each.get("data-way") == name)
    (square,) = (each for each in with_class(way, "square") if each.get("data-of") == "batch")
    _, _, side, _ = shape(list(square)[0])
    (blue,) = with_class(square, "always")
    _, _, width, height = shape(blue)
    assert (height < side) == ("sequences" in cut), "a sequence is a row"
    assert (width < side) == ("tokens" in cut), "a token is a column"
    assert area([blue]) / side**2 == (1 / 4 if "sequences" in cut or "tokens" in cut else 1)
    assert bool(with_class(square, "at-times")) == ("tokens outside attention and MLP" in cut)


# ---- Pipelines ----


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_the_timeline_is_the_simulations(name):
    (drawn,) = (each for each in with_class(read("pipeline"), "schedule")
                if each.get("data-name") == name)
    frame = shape(list(drawn)[0])
    events = simulate(name, 4, 8)
    last = max(end for *_, end in events)
    found = {}
    for each in with_class(drawn, "pass"):
        x, y, width, _ = shape(each)
        start = (x - frame[0]) * last / frame[2]
        key = (int(each.get("data-stage")), each.get("data-kind"), int(each.get("data-number")))
        assert int((y - frame[1]) // 32) == key[0]
        found[key] = (round(start, 2), round(start + width * last / frame[2], 2))
    assert found == {event[:3]: event[3:] for event in map(tuple, events)}
    texts = "|".join(text.text for text in read("pipeline").iter(SVG + "text"))
    assert re.search(rf"{name}, [^|]* up to {max(kept(events))}(\||$)", texts)
    assert f"idle, {100 * idle(events):.0f} % in both" in texts
    assert idle(events) == pytest.approx(bubble(4, 8))
