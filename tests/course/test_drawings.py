"""Drawings are what their programs draw, can be read, and have the numbers that NumPy computes."""

from importlib import import_module

import draw_all_reduce
import elements
import numpy as np
import pytest
from svg import FOLDER, SVG, classes, read, with_class


PROGRAMS = sorted(path.stem for path in FOLDER.glob("draw_*.py"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))
EVERYONE = {0, 1, 2, 3}


def place_of(cell):
    """The device and the chunk of a cell."""
    return int(cell.get("data-device")), int(cell.get("data-chunk"))


def drawn_parts(root):
    """`{(device, chunk): parts}`, from what is written in each cell, and from its colour."""
    parts = {}
    for cell in with_class(root, "cell"):
        place = place_of(cell)
        fill = cell.find(SVG + "rect").get("fill")
        text = cell.findtext(SVG + "text")
        if text == "Σ":
            parts[place] = EVERYONE
        elif text is not None:
            parts[place] = {"abcd".index(text)}
            assert fill == draw_all_reduce.PARTS["abcd".index(text)]
        else:
            parts[place] = set()
            assert fill == "white"
    return parts


def parts_in(number):
    """The devices whose part is in a sum of powers of ten, each once."""
    digits = f"{number:04d}"[::-1]
    assert set(digits) <= {"0", "1"}, "a part was added twice"
    return {device for device, digit in enumerate(digits) if digit == "1"}


def place_of_arrow(state, arrow):
    """The cell that an arrow leads into, from where it is drawn."""
    for cell in with_class(state, "cell"):
        rect = cell.find(SVG + "rect")
        left, top, wide = (float(rect.get(key)) for key in ("x", "y", "width"))
        if left < float(arrow.get("x1")) < left + wide and 0 < top - float(arrow.get("y2")) < 20:
            return place_of(cell)
    raise AssertionError("an arrow leads nowhere")


def ring_by_numpy():
    """Arrays after the start and after each round, and who received which chunk in it."""
    arrays = np.array([[10**device] * 4 for device in range(4)])
    states, received = [arrays.copy()], [set()]
    for step in range(6):
        before = arrays.copy()
        places = set()
        for rank in range(4):
            right = (rank + 1) % 4
            if step < 3:
                chunk = (rank - step - 1) % 4
                arrays[right, chunk] += before[rank, chunk]
            else:
                chunk = (rank - (step - 3)) % 4
                arrays[right, chunk] = before[rank, chunk]
            places.add((right, chunk))
        states.append(arrays.copy())
        received.append(places)
    assert (arrays == 1111).all()
    return states, received


def assert_same_parts(drawn, arrays):
    """What is drawn is what the arrays hold."""
    assert len(drawn) == 16
    for (device, chunk), parts in drawn.items():
        assert parts == parts_in(arrays[device, chunk]), (device, chunk)


def test_the_files_are_what_the_programs_draw(tmp_path):
    for program in PROGRAMS:
        elements.write(import_module(program).DRAWINGS, tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == NAMES
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), f"{path.name}: draw it anew"


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_can_be_read_by_everybody_and_needs_nothing_else(name):
    """Words for those who can't see it, large letters on white, no script and nothing loaded."""
    root = read(name)
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert title.text.strip() and description.text.strip()
    width = int(root.get("viewBox").split()[2])
    assert 560 <= width <= 900
    assert root.find(SVG + "rect").get("fill") == "white"
    for element in root.iter():
        assert element.tag != SVG + "script"
        assert not any(key.startswith("on") or "href" in key for key in element.attrib)
        if element.tag == SVG + "text":
            assert float(element.get("font-size")) * 390 / width >= 10, element.text
    source = (FOLDER / f"{name}.svg").read_text("utf-8")
    assert "url(" not in source and "@import" not in source
    if "@keyframes" in source:
        assert "@media (prefers-reduced-motion: reduce)" in source


def drawn_messages(panel):
    """`[(sender, receiver, what, width)]`, from where the arrows begin and end."""
    circles = [complex(float(circle.get("cx")), float(circle.get("cy")))
               for circle in panel.iter(SVG + "circle")]
    messages = []
    elements = list(panel)
    for shaft, tip in zip(elements, elements[1:]):
        if "message" not in classes(shaft):
            continue
        begin = complex(float(shaft.get("x1")), float(shaft.get("y1")))
        end = complex(*map(float, tip.get("points").split()[0].split(",")))
        ends = [int(np.argmin(np.abs(np.array(circles) - place))) for place in (begin, end)]
        messages.append((*ends, classes(shaft)[1], float(shaft.get("stroke-width"))))
    return messages


def test_star_tree_and_ring_are_all_reduces_as_drawn():
    ways = {way.get("data-name"): way for way in with_class(read("star_tree_ring"), "way")}
    sizes = {"star": 1, "tree": 1, "ring": 1 / 4}
    assert list(ways) == list(sizes)
    drawn = {}
    for name, way in ways.items():
        drawn[name] = []
        for panel in with_class(way, "round"):
            messages = drawn_messages(panel)
            assert {message[3] for message in messages} == {8 * sizes[name]}
            messages = [message[:3] for message in messages]
            drawn[name].append(messages)
            dark = {int(words.text) for words in panel.iter(SVG + "text")
                    if words.get("fill") == "white"}
            assert dark == {device for message in messages for device in message[:2]}
        cost = [words.text for words in with_class(way, "cost")]
        repeated = [words.text for words in with_class(way, "repeated")]
        if name == "ring":
            assert len(drawn[name]) == 1 and repeated == ["the same in all 6 rounds"]
            assert cost == ["6 rounds", "× S/4", f"= {6 / 4} S"]
        else:
            assert repeated == []
            assert cost == [f"{len(drawn[name])} rounds", "× S"]

    for name, count in (("star", 6), ("tree", 4)):
        assert len(drawn[name]) == count
        values = np.array([1, 10, 100, 1000])
        for messages in drawn[name]:
            before = values.copy()
            busy = [device for message in messages for device in message[:2]]
            assert len(busy) == len(set(busy)), "one message at a time for a device"
            for sender, receiver, what in messages:
                values[receiver] = before[sender] + (before[receiver] if what == "add" else 0)
        assert (values == 1111).all(), name
    neighbours = [(rank, (rank + 1) % 4) for rank in range(4)]
    assert drawn["ring"] == [[(*pair, "add") for pair in neighbours]]
    rounds = draw_all_reduce.ring_rounds()
    assert [{message.what for message in messages} for messages in rounds] == (
        3 * [{"add"}] + 3 * [{"copy"}])
    assert all([message[:2] for message in messages] == neighbours for messages in rounds)


def test_the_ring_round_by_round_is_what_numpy_computes():
    states, received = ring_by_numpy()
    drawn = {int(state.get("data-round")): state for state in with_class(read("ring_rounds"),
                                                                         "state")}
    assert list(drawn) == [0, 1, 2, 3]
    for number, state in drawn.items():
        cells = with_class(state, "cell")
        assert len(cells) == 16
        coloured, marked = set(), set()
        for cell in cells:
            assert int(cell.findtext(SVG + "text")) == states[number][place_of(cell)]
            if cell.find(SVG + "rect").get("fill") != "white":
                coloured.add(place_of(cell))
            if cell.get("data-received") != "no":
                marked.add(place_of(cell))
        arrows = {place_of_arrow(state, arrow) for arrow in with_class(state, "message")}
        assert coloured == marked == arrows == received[number]


def test_halving_and_doubling_round_by_round_is_what_numpy_computes():
    arrays = np.array([[10**device] * 4 for device in range(4)])
    kept = {device: [0, 1, 2, 3] for device in range(4)}
    states, keeps, received = [arrays.copy()], [set(np.ndindex(4, 4))], [set()]
    for gap in (1, 2):  # partners keep every second one of what both have: the lower rank begins
        before, new = arrays.copy(), {}
        for rank in range(4):
            partner = rank - gap if rank // gap % 2 else rank + gap
            new[rank] = kept[rank][int(rank > partner)::2]
            arrays[rank, new[rank]] += before[partner, new[rank]]
        kept = new
        states.append(arrays.copy())
        received.append({(rank, chunk) for rank in range(4) for chunk in kept[rank]})
        keeps.append(received[-1])
    for gap in (2, 1):
        before, new = arrays.copy(), {}
        for rank in range(4):
            partner = rank - gap if rank // gap % 2 else rank + gap
            arrays[rank, kept[partner]] = before[partner, kept[partner]]
            new[rank] = sorted(kept[rank] + kept[partner])
        received.append({(rank, chunk) for rank in range(4) for chunk in new[rank]
                         if chunk not in kept[rank]})
        kept = new
        states.append(arrays.copy())
        keeps.append({(rank, chunk) for rank in range(4) for chunk in kept[rank]})
    assert np.all(arrays == 1111)
    drawn = with_class(read("halving_doubling"), "state")
    assert [int(state.get("data-round")) for state in drawn] == [0, 1, 2, 3, 4]
    for number, state in enumerate(drawn):
        gap = [0, 1, 2, 2, 1][number]
        pairs = {f"{rank} {rank + gap}" for rank in range(4) if gap and rank // gap % 2 == 0}
        assert {each.get("data-partners") for each in with_class(state, "bracket")} == pairs
        cells = with_class(state, "cell")
        assert len(cells) == 16
        for cell in cells:
            place, fill = place_of(cell), cell.find(SVG + "rect").get("fill")
            written = cell.findtext(SVG + "text")  # nothing in a cell that was given away
            assert written == (str(states[number][place]) if place in keeps[number] else None)
            assert (cell.get("data-received") == "yes") == (place in received[number])
            assert (fill == elements.PALE_BLUE) == (place in received[number])
            assert (cell.get("data-kept") == "yes") == (place in keeps[number])
            assert (fill == elements.PALE_GREY) == (place not in keeps[number])


def test_collectives_do_what_their_names_say():
    own = np.array([[10**device] * 4 for device in range(4)])
    total = own.sum(axis=0)
    nothing = np.zeros((4, 4), int)
    first, diagonal = nothing.copy(), np.diag(total)
    first[0] = total
    everywhere = np.broadcast_to(total, (4, 4))
    expected = {"all-reduce": (own, everywhere),
                "reduce": (own, first), "broadcast": (first, everywhere),
                "reduce-scatter": (own, diagonal), "all-gather": (diagonal, everywhere)}
    drawn = {}
    for chain in with_class(read("collectives"), "chain"):
        names = [text.text for text in with_class(chain, "name")]
        grids = with_class(chain, "grid")
        assert len(grids) == len(names) + 1
        drawn.update(zip(names, zip(grids, grids[1:])))
    assert list(drawn) == list(expected)
    for name, pair in drawn.items():
        for grid, arrays in zip(pair, expected[name]):
            assert_same_parts(drawn_parts(grid), arrays)
