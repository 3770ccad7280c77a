"""The drawings of the map say what its tables say."""

import re

import pytest
from map_numbers import bubble, idle, kept, simulate
from map_page import bullets, evaluate, rows
from svg import SVG, read, with_class


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


def test_in_two_ways_what_is_summed_is_exchanged_forward_or_backward():
    root = read("two_ways")
    exchanged = [(each.get("data-way"), each.get("data-of"), each.findtext(SVG + "text"))
                 for each in with_class(root, "exchange")]
    assert exchanged == [  # as test_map.py sums them
        ("data", "first", "backward"), ("data", "second", "backward"),
        ("tensor", "batch", "backward"), ("tensor", "result", "forward")]


# ---- Seven ways ----


def square_of(name, what):
    """The square of a way to cut: of its "weights" or of its "batch"."""
    (way,) = (each for each in with_class(read("cuts"), "way") if each.get("data-way") == name)
    (square,) = (each for each in with_class(way, "square") if each.get("data-of") == what)
    return square


@pytest.mark.parametrize("name, weights", [(row[0], row[1]) for row in rows("weights held")])
def test_the_blue_part_of_the_weights_is_what_the_table_says(name, weights):
    square = square_of(name, "weights")
    frame = area([list(square)[0]])
    blue = area(with_class(square, "always")) / frame
    if name == "expert":
        assert weights == "shared ones and $1/k$ of the others"
        share = (4 + 8 * 4 / 4) / (4 + 8 * 4)  # matrices: attention's, and one MLP of four
    else:
        share = evaluate(re.match(r"\$(.*?)\$", weights)[1], N=1, k=4)
    assert blue == pytest.approx(share, abs=1e-3)
    pale = area(with_class(square, "at-times")) / frame if name == "sharded data" else 0
    assert bool(with_class(square, "at-times")) == ("layers in use" in weights)
    if pale:
        assert pale + 1 / 16 == pytest.approx(1 / 4, abs=1e-3)  # with its blue part, one layer


@pytest.mark.parametrize("name, text", bullets().items())
def test_the_blue_part_of_the_batch_is_cut_as_the_text_says(name, text):
    by_sequences = bool(re.search("cuts the sequences", text))
    by_tokens = bool(re.search("cuts the tokens|cut by tokens", text))
    square = square_of(name, "batch")
    _, _, side, _ = shape(list(square)[0])
    (blue,) = with_class(square, "always")
    _, _, width, height = shape(blue)
    assert (height < side) == by_sequences, "a sequence is a row"
    assert (width < side) == by_tokens, "a token is a column"
    assert area([blue]) / side**2 == (1 / 4 if by_sequences or by_tokens else 1)
    assert bool(with_class(square, "at-times")) == ("are gathered" in text and by_tokens)


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
    assert texts.split("|").count(f"keeps {max(kept(events))} micro-batches") == 1
    keeps = [text for text in texts.split("|") if re.match("GPipe:|1F1B:|keeps", text)]
    assert keeps[keeps.index(next(text for text in keeps if text.startswith(name))) + 1] == (
        f"keeps {max(kept(events))} micro-batches")
    assert f"idle, {100 * idle(events):.0f} % in both" in texts
    assert idle(events) == pytest.approx(bubble(4, 8))
    for tick in with_class(read("pipeline"), "time"):
        place = (float(tick.get("x")) - frame[0]) * last / frame[2]
        assert place == pytest.approx(float(tick.text), abs=0.4)  # the last is moved inwards
    assert max(int(tick.text) for tick in with_class(read("pipeline"), "time")) == last
