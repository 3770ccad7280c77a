"""Messages bring over values and what is shared, and nothing else, whatever somebody sends."""

import io
import json
import struct

import pytest
import wire
import mxnet as mx
import numpy as np


def over(tree):
    stream = io.BytesIO()
    wire.write(stream, tree)
    stream.seek(0)
    return wire.read(stream)[0]


def message(text, body=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return io.BytesIO(struct.pack("<QQ", len(text), len(body)) + text + body)


def test_values_arrive_with_their_types_and_devices():
    tree = {"a": [1, 2.5, None, True, "é"], (1, 2): (mx.cpu(3), float("inf")), "n": np.float32(0.1)}
    assert over(tree) == tree
    assert type(over(np.int64(3))) is np.int64
    for kind in ("float64", "float32", "int32", "uint8"):
        values = np.arange(6).reshape(2, 3).astype(kind)
        array = over(mx.nd.array(values, mx.cpu(2), dtype=kind))
        assert (array.context, np.dtype(array.dtype)) == (mx.cpu(2), np.dtype(kind))
        assert (array.asnumpy() == values).all() and (over(values) == values).all()


def test_what_is_one_array_stays_one_and_a_window_stays_a_window():
    whole = mx.nd.arange(6)
    same, again, window, copy = over([whole, whole, whole[2:4], whole[2:4].copy()])
    assert same is again
    window[:] = -1
    assert same.asnumpy().tolist() == [0, 1, -1, -1, 4, 5]
    assert copy.asnumpy().tolist() == [2, 3]
    rows = np.arange(6.0).reshape(3, 2)
    same, window = over([rows, rows[1:]])
    window[:] = -1
    assert same.tolist() == [[0, 1], [-1, -1], [-1, -1]]


def test_known_arrays_take_the_new_values_in_place():
    mine, stream = [mx.nd.ones(3, mx.cpu(1)), np.zeros(2)], io.BytesIO()
    theirs = [mx.nd.array([1, 2, 3], mx.cpu(1)), np.array([4.0, 5.0])]
    wire.write(stream, theirs[0], theirs)
    stream.seek(0)
    back = wire.read(stream, mine)[0]
    assert back is mine[0]
    assert mine[0].asnumpy().tolist() == [1, 2, 3] and mine[1].tolist() == [4, 5]


class Equal:
    def __eq__(self, other):
        return True


@pytest.mark.parametrize("value", [Equal(), [Equal()], (x for x in []), print, np.array([print]),
                                   mx.np.ones(2), {1: Equal()}])
def test_nothing_else_can_be_sent(value):
    with pytest.raises(TypeError):
        wire.write(io.BytesIO(), value)


def array(**other):
    return {"tree": {"array": 0}, "arrays": [
        {"dtype": "<f8", "shape": [1], "device": None, "address": None, **other}]}


@pytest.mark.parametrize("sent", [
    message(b"{not json"), message([1]), message({"tree": 1}), message({"tree": [], "arrays": 3}),
    message({"tree": {"array": 5}, "arrays": []}), message({"tree": {"call": [1]}, "arrays": []}),
    message({"tree": {"list": 1, "tuple": 2}, "arrays": []}), message(b"[" * 100_000),
    message({"tree": {"dict": [[{"list": []}, 1]]}, "arrays": []}),
    message({"tree": {"device": ["cpu", 2**70]}, "arrays": []}),
    message({"tree": {"device": ["tpu", 0]}, "arrays": []}),
    message(array(), b"1234567"), message(array(), b"12345678" * 2),
    message(array(dtype="O"), b"8" * 8),
    message(array(shape=[2**62, 4]), b"12345678"), message(array(shape=[-1]), b"12345678"),
    message(array(shape=[10**30]), b"12345678"), message(array(device=["cpu", -1]), b"12345678"),
    message(array(dtype="S8"), b"12345678"), message(array(address="x", shape=[1]), b"12345678"),
    io.BytesIO(struct.pack("<QQ", 2**63, 0)), io.BytesIO(struct.pack("<QQ", 2**28, 1))])
def test_whatever_comes_is_read_or_refused(sent):
    with pytest.raises(wire.Unreadable):
        wire.read(sent)


def test_a_message_that_breaks_off_is_an_end():
    for content in (b"", b"123", message(array(), b"12345678").getvalue()[:-1]):
        with pytest.raises(EOFError):
            wire.read(io.BytesIO(content))
