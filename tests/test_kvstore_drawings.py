"""The drawings of chapter 07: files are what the program draws, and stores do what they show.

What a drawing says is read from the SVG itself and compared with MXNet's own stores.
"""

import re
from pathlib import Path
from xml.etree import ElementTree

import draw_kvstore
import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import pytest
from mxnet import nd

FOLDER = Path(__file__).parents[1] / "notebooks/src/drawings"
NAMES = ["owners", "push_pull", "two_updates"]
SVG = "{http://www.w3.org/2000/svg}"
PAIR = [mx.cpu(0), mx.cpu(1)]


def read(name):
    """The root element of a drawing."""
    return ElementTree.parse(FOLDER / f"{name}.svg").getroot()


def with_class(root, name):
    """All elements below `root` that have a class."""
    return [element for element in root.iter() if name in element.get("class", "").split()]


def numbers(root, name, key="data-value"):
    """What the elements with a class say, in order."""
    return [int(element.get(key)) for element in with_class(root, name)]


def texts(element):
    return [text.text for text in element.iter(SVG + "text")]


def pushed_and_pulled(gradients, start=0, optimizer=None):
    store = mx.kvstore.create("device")
    if optimizer is not None:
        store.set_optimizer(optimizer)
    store.init(0, nd.array([start]))
    pulled = [nd.zeros(1, ctx=device) for device in PAIR]
    store.pushpull(0, [nd.array([g], ctx=d) for g, d in zip(gradients, PAIR)], out=pulled)
    return [array.asscalar() for array in pulled]


def test_the_files_are_what_the_program_draws(tmp_path):
    draw_kvstore.main(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == NAMES
    for name in NAMES:
        drawn = (tmp_path / f"{name}.svg").read_bytes()
        assert drawn == (FOLDER / f"{name}.svg").read_bytes(), f"{name}: run draw_kvstore.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_drawing_is_for_everybody_and_needs_nothing_else(name):
    root = read(name)
    title, description = list(root)[:2]
    assert (title.tag, description.tag) == (SVG + "title", SVG + "desc")
    assert len(title.text.split()) >= 4 and len(description.text.split()) >= 20
    allowed = {"svg", "title", "desc", "g", "rect", "line", "polygon", "text"}
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in allowed
    assert not re.search(r"url\(|@import|href", (FOLDER / f"{name}.svg").read_text("utf-8"))
    _, _, width, height = map(int, root.get("viewBox").split())
    background = root.find(SVG + "rect")
    assert background.get("fill") == "white"
    assert (background.get("width"), background.get("height")) == (str(width), str(height))
    for text in root.iter(SVG + "text"):
        assert float(text.get("font-size")) * 390 / width >= 10, text.text


def test_push_and_pull_as_drawn():
    root = read("push_pull")
    gradients = numbers(root, "push")
    assert numbers(root, "pull") == pushed_and_pulled(gradients) == [sum(gradients)] * 2
    assert numbers(root, "device") == [gradients[0], sum(gradients), gradients[1], sum(gradients)]


def test_both_ways_end_at_the_same_weights():
    panels = {panel.get("data-name"): panel for panel in with_class(read("two_updates"), "panel")}
    assert list(panels) == ["store", "devices"]
    for name, panel in panels.items():
        store, = with_class(panel, "store")
        gradients = numbers(panel, "push")
        total = sum(gradients)
        start = draw_kvstore.WEIGHT
        weights = numbers(panel, "device", "data-weight")
        assert weights == [start - total] * 2
        if name == "store":
            by_store = pushed_and_pulled(gradients, start, mx.optimizer.SGD(learning_rate=1))
            assert numbers(panel, "pull") == by_store == weights
            assert numbers(panel, "device", "data-grad") == gradients, "each keeps its own"
            assert f"{start} − {total} = {start - total}" in texts(store)
        else:
            assert numbers(panel, "pull") == pushed_and_pulled(gradients) == [total] * 2
            assert numbers(panel, "device", "data-grad") == [total] * 2
            for device in with_class(panel, "device"):
                assert f"{start} − {total}" in texts(device)


class Spy(mx.optimizer.Optimizer):
    """Changes no weight. Notes on which device each key's sum is."""

    def __init__(self):
        super().__init__()
        self.owner = {}

    def update(self, index, weight, grad, state):
        self.owner[index] = grad.context.device_id


def test_owners_are_those_of_a_store():
    spy = Spy()
    store = mx.kvstore.create("device")
    store.set_optimizer(spy)
    for name, size in draw_kvstore.SIZES.items():
        store.init(name, nd.zeros(size))
    for name, size in draw_kvstore.SIZES.items():
        store.push(name, [nd.zeros(size, ctx=device) for device in PAIR])
    nd.waitall()
    drawn = {}
    for owner in with_class(read("owners"), "owner"):
        rank = int(owner.get("data-device"))
        held = [block.get("data-name") for block in with_class(owner, "block")]
        drawn.update({name: rank for name in held})
        total = sum(draw_kvstore.SIZES[name] for name in held)
        assert int(owner.get("data-total")) == total
        assert f"{total} entries" in texts(owner)
        for block in with_class(owner, "block"):
            size = draw_kvstore.SIZES[block.get("data-name")]
            assert float(block.find(SVG + "rect").get("height")) == draw_kvstore.SCALE * size
    assert drawn == spy.owner
