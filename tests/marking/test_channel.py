"""Messages bring over values and nothing else, whatever somebody sends."""

import io
import json
import socket
import struct
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from marking import channel
from marking.channel import Array, Channel, Device, Function, Late, Other, Unreadable


def over(tree):
    return channel.decode(*channel.encode(tree))


def npy(array, **options):
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, **options)
    return stream.getvalue()


@pytest.mark.parametrize("tree", [
    [1, 2.5, None, True, "é\ud800"], (1, (2, [])), {"a": Device("cpu", 3), "b": float("inf")},
    Function(4), Other("generator"), 10**400, [], {}])
def test_values_arrive_as_they_were(tree):
    assert over(tree) == tree
    assert type(over(tree)) is type(tree)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "int64", "uint8", "bool"])
def test_arrays_arrive_with_type_shape_and_what_is_said_of_them(kind):
    for values in (np.arange(6).reshape(2, 3), np.array(7), np.zeros((0, 2)),
                   np.asfortranarray(np.arange(6).reshape(2, 3))):
        sent = Array(values.astype(kind), Device("cpu", 2), 5, (16, 64), True)
        came = over(sent)
        assert came.values.dtype == sent.values.dtype and came.values.shape == values.shape
        assert (came.values == sent.values).all() and came[1:] == sent[1:]
        with pytest.raises(ValueError):   # read-only: nobody changes what came
            came.values[...] = 0
    assert type(over(np.dtype(kind).type(1))) is np.dtype(kind).type


def test_one_array_twice_is_sent_once():
    array = Array(np.zeros(1000))
    assert len(channel.encode([array, array])[1]) < 9000


@pytest.mark.parametrize("value", [object(), {1, 2}, {1: 2}, 1j, Array(np.array([object()])),
                                   Array(np.array(["text"])), [lambda: 0]])
def test_nothing_else_can_be_sent(value):
    with pytest.raises(TypeError):
        channel.encode(value)


ONE = npy(np.array([1.0]))


def header(text):
    text = text.ljust(118) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


@pytest.mark.parametrize("text, body", [
    (b"{not json", b""), (b"", b""), (b"\xff", b""), (b"[1]", b""), (b"[" * 100_000, b""),
    (b'{"list": ' * 60 + b"1" + b"}" * 60, b""), (b'{"call": [1]}', b""), (b"{}", b""),
    (b'{"list": 1}', b""), (b'{"dict": [[{"list": []}, 1]]}', b""), (b'{"dict": [[1]]}', b""),
    (b'{"dict": [[1, 1]]}', b""), (b"1", ONE * 10_001),
    (b'{"device": ["cpu", -1]}', b""), (b'{"device": ["tpu", 0]}', b""), (b'{"device": 3}', b""),
    (b'{"device": ["cpu", true]}', b""), (b"1" * 5000, b""), (b'{"other": 3}', b""),
    (b'{"array": [0, null, null, null, false]}', b""),
    (b'{"array": [1, null, null, null, false]}', ONE),
    (b'{"array": [0, null, "x", null, false]}', ONE),
    (b'{"array": [0, null, 1, [1], false]}', ONE),
    (b'{"array": [0, null, 1, null]}', ONE), (b"1", ONE[:-1]), (b"1", ONE + b"x"),
    (b"1", b"\x80\x04" * 40), (b"1", npy(np.array([1.0]), version=(2, 0))),
    (b"1", npy(np.array([{}], dtype=object))), (b"1", npy(np.array(["x"]))),
    (b"1", npy(np.array([1j]))), (b"1", npy(np.zeros(2, [("a", "f8")]))),
    (b"1", npy(np.asfortranarray(np.ones((2, 3))))),
    (b"1", header("{'descr': '<f8', 'fortran_order': False, 'shape': (10**9,)}")),
    (b"1", header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,)}")),
    (b"1", header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}")),
    (b"1", header("__import__('os').abort()")), (b"1", header("[" * 100)),
])
def test_whatever_comes_is_read_or_refused(text, body):
    with pytest.raises(Unreadable):
        channel.decode(text, body)


@pytest.fixture
def ends():
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def test_a_message_that_breaks_off_is_an_end(ends):
    ends[0].sendall(struct.pack("<QQ", 3, 0) + b"12")
    ends[0].close()
    with pytest.raises(EOFError):
        Channel(ends[1]).receive()


def test_a_message_that_claims_too_much_is_refused_before_it_is_read(ends):
    ends[0].sendall(struct.pack("<QQ", 2**62, 2**62))
    with pytest.raises(Unreadable):
        Channel(ends[1]).receive()


class Slow:
    """A socket on which every piece comes after two seconds by `Slow.now`, the clock."""

    now = 0

    def __init__(self, connection):
        self.connection, self.allowed = connection, []

    def settimeout(self, seconds):
        self.allowed.append(seconds)

    def recv(self, count):
        Slow.now += 2
        return self.connection.recv(count)


def test_only_waiting_uses_up_the_time(ends, monkeypatch):
    monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    slow = Slow(ends[1])
    line = Channel(slow, 10)
    Channel(ends[0]).send("here")
    Slow.now += 100                      # the judge's own time
    assert line.receive() == "here"
    assert line.left == 6, "two pieces: the lengths, the text"
    Slow.now += 100
    Channel(ends[0]).send("late")
    assert line.receive() == "late" and line.left == 2
    assert slow.allowed == [10, 8, 6, 6, 4, 2], "at each step, what is left"
    Channel(ends[0]).send("too late")
    with pytest.raises(Late):
        line.receive()


def test_a_trickle_is_late_too(ends):
    """Whoever sends a byte now and then does not start the clock anew."""
    def trickle():
        with ends[0]:
            for byte in struct.pack("<QQ", 1000, 0):
                ends[0].send(bytes([byte]))
                time.sleep(0.05)
    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    with pytest.raises(Late):
        Channel(ends[1], 0.3).receive()
    thread.join()


def test_whoever_does_not_listen_is_late(ends):
    with pytest.raises(Late):
        Channel(ends[1], 0.2).send(json.dumps([0] * 10**6))
