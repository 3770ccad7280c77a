"""All drawings keep the rules; those of chapters 02 to 04 and 06 tell the truth.

What a drawing says is read from the SVG itself and compared with what NumPy computes.
"""

import re
from importlib import import_module

import draw_all_reduce
import elements
import numpy as np
import pytest
from svg import FOLDER, SVG, classes, read, with_class

from helpers import plotting

BY_HAND = ["server"]
PROGRAMS = sorted(path.stem for path in FOLDER.glob("draw_*.py"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.svg"))
EVERYONE = {0, 1, 2, 3}


def place_of(cell):
    """The device and the chunk of a cell."""
    return int(cell.get("data-device")), int(cell.get("data-chunk"))


def drawn_parts(root):
    """`{(device, chunk): parts}`, from the colour of each cell and from what is written in it."""
    parts = {}
    for cell in with_class(root, "cell"):
        place = place_of(cell)
        fill = cell.find(SVG + "rect").get("fill")
        if "Σ" in "".join(cell.itertext()):
            parts[place] = EVERYONE
        elif fill in draw_all_reduce.PARTS:
            parts[place] = {draw_all_reduce.PARTS.index(fill)}
        else:
            parts[place] = set()
    return parts


def parts_in(number):
    """The devices whose part is in a sum of powers of ten, each once."""
    digits = f"{number:04d}"[::-1]
    assert set(digits) <= {"0", "1"}, "a part was added twice"
    return {device for device, digit in enumerate(digits) if digit == "1"}


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
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted({*NAMES} - {*BY_HAND})
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), f"{path.name}: draw it anew"


def test_drawings_have_the_colours_of_figures():
    for color in ("BLUE", "ORANGE", "GREEN", "GREY"):
        assert getattr(elements, color) == getattr(plotting, color)


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_has_words_for_those_who_cannot_see_it(name):
    title, description = list(read(name))[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert title.text.strip() and description.text.strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_needs_nothing_else(name):
    """No script, nothing loaded from elsewhere, no movement that a style sheet can't stop."""
    allowed = {"svg", "title", "desc", "style", "g", "rect", "line", "polygon", "circle", "path",
               "text"}
    for element in read(name).iter():
        assert element.tag.removeprefix(SVG) in allowed
        for key in element.attrib:
            assert not key.startswith("on") and "href" not in key
    assert not re.search(r"url\(|@import", (FOLDER / f"{name}.svg").read_text("utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_white_behind_and_its_words_are_large_enough(name):
    root = read(name)
    left, top, width, height = map(int, root.get("viewBox").split())
    assert (left, top) == (0, 0) and 560 <= width <= 640
    background = root.find(SVG + "rect")
    assert background.get("fill") == "white"
    assert (background.get("width"), background.get("height")) == (str(width), str(height))
    texts = list(root.iter(SVG + "text"))
    assert texts
    for text in texts:
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


def test_rows_and_labels_are_cut_alike():
    shards = with_class(read("batch_to_shards"), "shard")
    expected = np.array_split(np.arange(10), 3)
    assert len(shards) == 3
    pictures = set()
    for device, (shard, rows) in enumerate(zip(shards, expected)):
        drawn = with_class(shard, "row")
        labels = [int(row.findtext(SVG + "text")) for row in drawn]
        assert labels == [int(row.get("data-row")) for row in drawn] == rows.tolist()
        assert f"cpu({device})" in "".join(shard.itertext())
        for row in drawn:
            image = list(row.find(SVG + "g"))
            corner = float(image[0].get("x")), float(image[0].get("y"))
            lit = []
            for pixel in image[1:]:
                right = round(float(pixel.get("x")) - corner[0])
                down = round(float(pixel.get("y")) - corner[1])
                lit.append((right, down))
            pictures.add(tuple(lit))
    assert len(pictures) == 10, "two digits look the same"


def test_pictures_are_what_the_loader_makes_of_them():
    root = read("pictures_to_step")
    shapes = [element.get("data-shape") for element in with_class(root, "row")]
    assert shapes == ["28 × 28 × 1", "1 × 28 × 28"], "height, width, channel; then channel first"
    text = "".join(root.itertext())
    for shape in shapes:
        assert shape in text
    shards = [int(shard.get("data-images")) for shard in with_class(root, "shard")]
    assert shards == [32, 32]
    assert f"a batch: {sum(shards)} × {shapes[1]}" in text
    assert f"trainer.step({sum(shards)})" in text


def test_the_bug_does_what_is_drawn():
    arrays = [np.array(1), np.array(2), np.array(3)]
    before = [array.item() for array in arrays]
    held = list(arrays)  # by the parameters
    arrays[0][...] = sum(before)
    for slot in (1, 2):
        arrays[slot] = arrays[0].copy()
    new = [array.item() for array, old in zip(arrays, held) if array is not old]
    after = [array.item() for array in held]

    drawn = {"old": [], "new": []}
    for array in with_class(read("rebinding"), "array"):
        age = "new" if array.get("data-new") == "yes" else "old"
        assert array.findtext(SVG + "text") == array.get("data-value")
        drawn[age].append(int(array.get("data-value")))
    assert drawn == {"old": before + after, "new": new}


def drawn_messages(panel, rows):
    """`[(round, sender, receiver, what, width)]`, from where the arrows are."""
    columns = {}
    for text in panel.iter(SVG + "text"):
        if text.text.isdigit():
            columns[float(text.get("x"))] = int(text.text)
    messages = []
    elements = list(panel)
    for shaft, tip in zip(elements, elements[1:]):
        if "message" not in classes(shaft):
            continue
        end = float(tip.get("points").split(",")[0])
        y = float(shaft.get("y1"))
        row = min(rows, key=lambda number: abs(rows[number] - y))
        what = "add" if "add" in classes(shaft) else "copy"
        assert (shaft.get("stroke-dasharray") is None) == (what == "add")
        messages.append((row, columns[float(shaft.get("x1"))], columns[end], what,
                         float(shaft.get("stroke-width"))))
    return messages


def test_star_tree_and_ring_are_all_reduces_as_drawn():
    root = read("star_tree_ring")
    rows = {}
    for text in root.findall(SVG + "text"):
        if text.text.isdigit():
            rows[int(text.text)] = float(text.get("y"))
    panels = {panel.get("data-name"): panel for panel in with_class(root, "panel")}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6] and list(panels) == ["star", "tree", "ring"]

    for name, count in (("star", 6), ("tree", 4)):
        messages = drawn_messages(panels[name], rows)
        assert {message[0] for message in messages} == set(range(1, count + 1))
        values = np.array([1, 10, 100, 1000])
        for number in range(1, count + 1):
            before = values.copy()
            now = [message for message in messages if message[0] == number]
            busy = [end for message in now for end in message[1:3]]
            assert len(busy) == len(set(busy)), "one message at a time for a device"
            for _, sender, receiver, what, width in now:
                assert width == 8
                values[receiver] = before[sender] + (before[receiver] if what == "add" else 0)
        assert (values == 1111).all(), name

    ring = drawn_messages(panels["ring"], rows)
    expected = set()
    for number in range(1, 7):
        for rank in range(4):
            what = "add" if number <= 3 else "copy"
            expected.add((number, rank, (rank + 1) % 4, what, 8 / 4))  # a quarter of the width
    assert len(ring) == 24 and set(ring) == expected


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
        assert coloured == marked == received[number]


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
        cells = with_class(state, "cell")
        assert len(cells) == 16
        for cell in cells:
            place, fill = place_of(cell), cell.find(SVG + "rect").get("fill")
            assert int(cell.findtext(SVG + "text")) == states[number][place]
            assert (cell.get("data-received") == "yes") == (place in received[number])
            assert (fill == elements.PALE_BLUE) == (place in received[number])
            assert (cell.get("data-kept") == "yes") == (place in keeps[number])
            assert (fill == elements.PALE_GREY) == (place not in keeps[number])


def test_the_moving_ring_is_what_numpy_computes():
    states, received = ring_by_numpy()
    root = read("ring_moving")
    cells = with_class(root, "cell")
    assert len(cells) == 16
    for number in range(7):
        for cell in cells:
            parts = set()
            for mark in cell.iter(SVG + "rect"):
                if mark.get("data-part") and int(mark.get("data-round")) <= number:
                    parts.add(int(mark.get("data-part")))
            device, chunk = place_of(cell)
            assert parts == parts_in(states[number][device, chunk])
    for mark in root.iter(SVG + "rect"):  # the style follows the data
        if mark.get("data-part") and mark.get("data-round"):
            number = mark.get("data-round")
            look = [] if number == "0" else ["moves", "later", f"fill{number}"]
            assert classes(mark) == look
    for number in range(1, 7):
        travelling = with_class(root, f"go{number}")
        places = set()
        for message in travelling:
            sender, chunk = int(message.get("data-sender")), int(message.get("data-chunk"))
            assert f"from{sender}" in classes(message)
            marks = [int(mark.get("data-part")) for mark in message.iter() if
                     mark.get("data-part")]
            assert set(marks) == parts_in(states[number - 1][sender, chunk])
            places.add(((sender + 1) % 4, chunk))
        assert len(travelling) == 4 and places == received[number]


def test_chunks_travel_from_their_cell_to_the_next_devices():
    root = read("ring_moving")
    corners = {}
    for cell in with_class(root, "cell"):
        corners[place_of(cell)] = np.array([float(cell[0].get("x")), float(cell[0].get("y"))])
    steps = {}
    for sender, right, down in re.findall(r"\.from(\d) \{ --dx: (-?\d+)px; --dy: (-?\d+)px; \}",
                                          root.findtext(SVG + "style")):
        steps[int(sender)] = np.array([float(right), float(down)])
    for number in range(1, 7):
        for message in with_class(root, f"go{number}"):
            sender, chunk = int(message.get("data-sender")), int(message.get("data-chunk"))
            start = np.array([float(message[0].get("x")), float(message[0].get("y"))])
            assert (start == corners[sender, chunk]).all()
            assert (start + steps[sender] == corners[(sender + 1) % 4, chunk]).all()


def test_the_moving_ring_stops_for_those_who_ask():
    root = read("ring_moving")
    style = root.findtext(SVG + "style")
    rule = "@media (prefers-reduced-motion: reduce) { .moves { animation: none; } }"
    assert style.rstrip().endswith(rule)  # the last rule of equal weight wins
    animated = set(re.findall(r"\.(\w+) \{ animation-name: (?:\w+); \}", style))
    assert set(re.findall(r"@keyframes (\w+)", style)) == animated
    moving = [element for element in root.iter() if animated & set(classes(element))]
    assert len(moving) > 80
    for element in moving:
        assert "moves" in classes(element), "the rule doesn't reach it"
    for frames in re.findall(r"@keyframes \w+ \{(.*)\}", style):
        times = [float(time) for time in re.findall(r"([\d.]+)% \{", frames)]
        assert times == sorted(times) and times[0] == 0 and times[-1] == 100


def test_the_first_frame_of_the_moving_ring_tells_the_story():
    """Without movement one sees the devices, their chunks, what leaves first, and the captions."""
    root = read("ring_moving")
    later = set()
    for element in with_class(root, "later"):
        later |= set(element.iter())
    seen = [element for element in root.iter() if element not in later]
    words = [element.text for element in seen if element.tag == SVG + "text"]
    assert words == [draw_all_reduce.CHUNK_TITLE, "device 0", "device 1", "device 2", "device 3",
                     "start", "rounds 1 to 3: add", "rounds 4 to 6: overwrite", "framed: is sent",
                     "colour: a device's part"]
    assert len([element for element in seen if element.tag == SVG + "polygon"]) == 4
    assert len([element for element in seen if "go1" in classes(element)]) == 4
    style = root.findtext(SVG + "style")
    assert ".later { opacity: 0; }" in style


def test_collectives_do_what_their_names_say():
    own = np.array([[10**device] * 4 for device in range(4)])
    total = own.sum(axis=0)
    nothing = np.zeros((4, 4), int)
    first, diagonal = nothing.copy(), np.diag(total)
    first[0] = total
    everywhere = np.broadcast_to(total, (4, 4))
    expected = {"reduce": (own, first), "broadcast": (first, everywhere),
                "reduce-scatter": (own, diagonal), "all-gather": (diagonal, everywhere),
                "all-reduce": (own, everywhere)}
    drawn = with_class(read("collectives"), "collective")
    assert [collective.get("data-name") for collective in drawn] == list(expected)
    for collective in drawn:
        name = collective.get("data-name")
        assert name == collective.findtext(SVG + "text")
        for when, arrays in zip(("before", "after"), expected[name]):
            grid, = with_class(collective, when)
            assert_same_parts(drawn_parts(grid), arrays)


def drawn_tree(tree):
    """`{rank: its parent}` from where nodes and edges are; the parent stands higher."""
    nodes = {}
    for node in with_class(tree, "node"):
        circle = node.find(SVG + "circle")
        assert node.findtext(SVG + "text") == node.get("data-rank")
        nodes[float(circle.get("cx")), float(circle.get("cy"))] = int(node.get("data-rank"))
    assert [nodes[at] for at in sorted(nodes)] == [0, 1, 2, 3, 4, 5, 6], "ranks in one row order"
    parents = {}
    for edge in with_class(tree, "edge"):
        if edge.tag == SVG + "line":
            ends = [(float(edge.get("x1")), float(edge.get("y1"))),
                    (float(edge.get("x2")), float(edge.get("y2")))]
        else:  # M x y V … H x V y
            x1, y1, _, x2, y2 = map(float, re.findall(r"[\d.]+", edge.get("d")))
            ends = [(x1, y1), (x2, y2)]
        parent, child = sorted(ends, key=lambda end: end[1])
        parents[nodes[child]] = nodes[parent]
    return parents


def test_the_leaves_of_one_tree_are_inside_the_other():
    root = read("two_trees")
    one, two = with_class(root, "tree")
    first, second = drawn_tree(one), drawn_tree(two)
    assert first == {0: 1, 1: 3, 2: 1, 4: 5, 5: 3, 6: 5}
    assert second == {(child + 1) % 7: (parent + 1) % 7 for child, parent in first.items()}
    inside_first, inside_second = set(first.values()), set(second.values())
    assert inside_first & inside_second == set()
    assert set(range(7)) - inside_first - inside_second == {0}
    for node in with_class(root, "node"):
        rank = int(node.get("data-rank"))
        color = "white"
        if rank in inside_first:
            color = elements.BLUE
        elif rank in inside_second:
            color = elements.ORANGE
        assert node.find(SVG + "circle").get("fill") == color


def test_the_step_sends_shards_out_and_both_gradients_to_both_devices():
    root = read("lenet_step")
    stages = {}
    for stage in with_class(root, "stage"):
        words = " ".join(text.text for text in stage.iter(SVG + "text"))
        stages[int(stage.get("data-row")), int(stage.get("data-device"))] = words
    for device in (0, 1):
        assert stages[0, device] == f"shard {device}"
        assert stages[1, device] == f"gradient of shard {device}'s loss"
    for row in (2, 3):  # the same on both devices
        assert stages[row, 0] == stages[row, 1]
    sent = set()
    for shaft in with_class(root, "exchange"):
        if shaft.get("data-row") == "2":
            sent.add((shaft.get("data-sender"), shaft.get("data-receiver")))
    assert sent == {("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")}
