"""The drawings of chapter 07: stores and gradients do what they show.

What a drawing says is read from the SVG itself and compared with MXNet's own stores.
"""

from ast import literal_eval

import draw_kvstore
import helpers  # noqa: F401 - its settings come before MXNet
import mxnet as mx
import numpy as np
import pytest
from helpers.device import cores
from helpers.stores import kilobytes
from mxnet import gluon, nd
from svg import SVG, read, texts, with_class

PAIR = [mx.cpu(0), mx.cpu(1)]


def vectors(root, name, key="data-value"):
    """What the elements with a class say, in order."""
    return [literal_eval(element.get(key)) for element in with_class(root, name)]


def plus(*several):
    return tuple(np.sum(several, axis=0))


def pushed_and_pulled(gradients, start=(0, 0), optimizer=None):
    store = mx.kvstore.create("device")
    if optimizer is not None:
        store.set_optimizer(optimizer)
    store.init(0, nd.array(start))
    pulled = [nd.zeros(2, ctx=device) for device in PAIR]
    store.pushpull(0, [nd.array(g, ctx=d) for g, d in zip(gradients, PAIR)], out=pulled)
    return [tuple(array.asnumpy()) for array in pulled]


def test_push_and_pull_as_drawn():
    root = read("push_pull")
    first, second = vectors(root, "push")
    total = plus(first, second)
    assert vectors(root, "pull") == pushed_and_pulled([first, second]) == [total] * 2
    assert vectors(root, "device") == [first, total, second, total]


def test_both_ways_end_at_the_same_weights():
    panels = {panel.get("data-name"): panel for panel in with_class(read("two_updates"), "panel")}
    assert list(panels) == ["store", "devices"]
    start = draw_kvstore.WEIGHT
    for name, panel in panels.items():
        gradients = vectors(panel, "push")
        total = plus(*gradients)
        by_store = pushed_and_pulled(gradients, start, mx.optimizer.SGD(learning_rate=1))
        assert vectors(panel, "pull", "data-weight") == by_store
        pulled = by_store if name == "store" else pushed_and_pulled(gradients)
        assert vectors(panel, "pull") == pulled
        assert f"sum {total[0]:.0f}" not in texts(panel) and len(with_class(panel, "update")) == (
            1 if name == "store" else 2)


def test_gradients_clipped_after_the_sum_and_before_it():
    root = read("clipping")
    (total,), (right,), (wrong,) = (vectors(root, name) for name in ("total", "right", "wrong"))
    assert total == plus(*draw_kvstore.GRADIENTS)
    arrays = [nd.array(total)]
    gluon.utils.clip_global_norm(arrays, draw_kvstore.LIMIT)
    assert np.allclose(arrays[0].asnumpy(), right)
    each = [nd.array(gradient) for gradient in draw_kvstore.GRADIENTS]
    for array in each:
        gluon.utils.clip_global_norm([array], draw_kvstore.LIMIT)
    assert np.allclose((each[0] + each[1]).asnumpy(), wrong)


@pytest.mark.skipif(cores() < 2, reason="the profiler has a counter for each core")
def test_buffers_are_as_large_as_those_of_a_store():
    drawn, heights = [], []
    for device in with_class(read("whose_memory"), "device"):
        blocks = with_class(device, "buffer")
        drawn.append(sum(float(block.get("data-mb")) for block in blocks))
        replicas = with_class(device, "replica")
        megabytes = 2 * 4 * sum(draw_kvstore.SIZES.values()) / 1e6  # weights and gradients
        assert [float(block.get("data-mb")) for block in replicas] == [round(megabytes, 3)]
        for block in blocks + replicas:
            height = float(block.find(SVG + "rect").get("height"))
            heights.append(height / float(block.get("data-mb")))
    assert np.allclose(heights, heights[0], rtol=0.02), "not to scale"
    assert np.allclose(kilobytes(list(draw_kvstore.SIZES.values())), np.multiply(drawn, 1000),
                       rtol=1e-3)
