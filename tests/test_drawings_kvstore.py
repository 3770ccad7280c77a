"""The drawings of chapter 07: stores do what they show.

What a drawing says is read from the SVG itself and compared with MXNet's own stores.
"""

import draw_kvstore
import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
from mxnet import nd
from svg import SVG, read, texts, with_class

PAIR = [mx.cpu(0), mx.cpu(1)]


def numbers(root, name, key="data-value"):
    """What the elements with a class say, in order."""
    return [int(element.get(key)) for element in with_class(root, name)]


def pushed_and_pulled(gradients, start=0, optimizer=None):
    store = mx.kvstore.create("device")
    if optimizer is not None:
        store.set_optimizer(optimizer)
    store.init(0, nd.array([start]))
    pulled = [nd.zeros(1, ctx=device) for device in PAIR]
    store.pushpull(0, [nd.array([g], ctx=d) for g, d in zip(gradients, PAIR)], out=pulled)
    return [array.asscalar() for array in pulled]


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
