"""Messages between the judge and a solution: values cross, and nothing that can run.

A message is a tree of None, booleans, numbers, text, `Device`, `Array`, `Function`, lists, tuples
and dicts. It travels as two lengths, a text (JSON), and the arrays in NumPy's own format. Whatever
the other side sends is read as data or refused: nothing is unpickled, no name is looked up.
"""

import io
import json
import math
import socket
import struct
import time
from typing import NamedTuple

import numpy as np

LARGEST = 64 * 2**20   # bytes of one message
LONGEST = 4 * 2**20    # bytes of its text
MOST = 10_000          # arrays in it
DEEPEST = 20           # lists in lists
_LENGTHS = struct.Struct("<QQ")


class Device(NamedTuple):
    kind: str        # "cpu" or "gpu"
    number: int

    def __str__(self):
        return f"{self.kind}({self.number})"


class Array(NamedTuple):
    """An array's values, and what the process that holds it says of it.

    values: never changed here. device: None for NumPy's. identity: the same number for the same
    object; those that a call was given keep theirs. memory: where its bytes begin and end.
    gradient: whether autograd is to fill a gradient for it.
    """

    values: np.ndarray
    device: Device | None = None
    identity: int | None = None
    memory: tuple | None = None
    gradient: bool = False


class Function(NamedTuple):
    """A function of the judge's: the other side gets one that calls back."""

    number: int


class Other(NamedTuple):
    """Something that can't cross, by the name of its type."""

    kind: str


class Unreadable(ValueError):
    """What came is no message."""


class Late(Exception):
    """The other side did not answer within the time that it had."""


class Channel:
    """One end of a socket. `left` are the seconds for which `receive` and `send` will yet wait;
    None: for as long as it takes. Only they use them up, so it is the other side's time."""

    def __init__(self, connection, left=None):
        self.socket, self.left = connection, left

    def send(self, tree):
        """Raises TypeError where the tree can't cross, OSError where nobody listens, Late."""
        text, body = encode(tree)
        if len(text) + len(body) > LARGEST or len(text) > LONGEST:
            raise TypeError("more than fits into a message")
        with self._clock():
            self.socket.sendall(_LENGTHS.pack(len(text), len(body)) + text + body)

    def receive(self):
        """The next tree. Raises EOFError where there will be none, Unreadable, Late."""
        lengths = _LENGTHS.unpack(self._take(_LENGTHS.size))
        if sum(lengths) > LARGEST or lengths[0] > LONGEST:
            raise Unreadable(f"a message of {sum(lengths):,} bytes")
        text, body = (self._take(count) for count in lengths)
        with self._clock():   # who sends much has its reading on its own time
            return decode(text, body)

    def close(self):
        self.socket.close()

    def _take(self, count):
        content = bytearray()
        while len(content) < count:
            with self._clock():
                try:
                    piece = self.socket.recv(min(count - len(content), 2**20))
                except ConnectionError:
                    piece = b""
            if not piece:
                raise EOFError
            content += piece
        return bytes(content)

    def _clock(self):
        return _Clock(self)


class _Clock:
    def __init__(self, channel):
        self.channel = channel

    def __enter__(self):
        self.begin = time.monotonic()
        left = self.channel.left
        if left is not None and left <= 0:
            raise Late
        self.channel.socket.settimeout(left)

    def __exit__(self, kind, error, _):
        if self.channel.left is not None:
            self.channel.left -= time.monotonic() - self.begin
        if isinstance(error, socket.timeout):
            raise Late from None


def encode(tree):
    """(text, body) of a tree."""
    body = io.BytesIO()
    text = json.dumps(_flatten(tree, body, {}))
    return text.encode(), body.getvalue()


def _flatten(value, body, places):
    match value:
        case np.generic():  # before Python's: some are floats
            return _flatten(Array(np.asarray(value)), body, places) | {"scalar": True}
        case None | bool() | int() | float() | str():
            return value
        case Device():
            return {"device": list(value)}
        case Function():
            return {"function": value.number}
        case Other():
            return {"other": value.kind}
        case Array():
            key = id(value.values)
            if key not in places:
                places[key] = (len(places), value.values)  # kept, so that no id comes twice
                _write_array(body, value.values)
            return {"array": [places[key][0], *map(_plain, value[1:])]}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_flatten(item, body, places) for item in value]}
        case dict():
            if not all(isinstance(key, str) for key in value):
                raise TypeError("keys other than text can't be sent")
            return {"dict": [[k, _flatten(v, body, places)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__} can't be sent")


def _plain(value):
    return list(value) if isinstance(value, tuple) else value


def _write_array(body, values):
    if values.dtype.kind not in "biuf":
        raise TypeError(f"an array of {values.dtype}; numbers are what is used here")
    np.lib.format.write_array(body, np.asarray(values, order="C"), (1, 0), allow_pickle=False)


def decode(text, body):
    """The tree of a text and a body. Raises Unreadable where they are none."""
    try:
        return _build(json.loads(text), _read_arrays(body), 0)
    except Exception as error:  # it may be anything: too deep, too long a number, no text
        raise Unreadable(f"{type(error).__name__}: {error}"[:200]) from None


def _read_arrays(body):
    """All arrays in `body`, read-only. Each is checked before memory is taken for it."""
    arrays, stream = [], io.BytesIO(body)
    while stream.tell() < len(body):
        if len(arrays) == MOST:
            raise Unreadable("too many arrays")
        if np.lib.format.read_magic(stream) != (1, 0):
            raise Unreadable("another version of NumPy's format")
        shape, columns_first, dtype = np.lib.format.read_array_header_1_0(stream)
        if dtype.kind not in "biuf" or columns_first or any(n < 0 for n in shape):
            raise Unreadable(f"an array of {dtype}")
        begin, count = stream.tell(), math.prod(shape)
        arrays.append(np.frombuffer(body, dtype, count, begin).reshape(shape))
        stream.seek(begin + count * dtype.itemsize)
    return arrays


def _build(tree, arrays, depth):
    if depth > 2 * DEEPEST:
        raise Unreadable("lists in lists in lists")
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    match tree:
        case {"array": [int(place), device, identity, memory, bool(gradient)], **rest}:
            values = arrays[place]
            if rest == {"scalar": True} and values.ndim == 0:
                return values[()]
            match identity, memory:
                case (int() | None), ([int(), int()] | None):
                    return Array(values, device and _read_device(device), identity,
                                 memory and tuple(memory), gradient)
        case {"device": device}:
            return _read_device(device)
        case {"function": int(number)}:
            return Function(number)
        case {"other": str(kind)}:
            return Other(kind)
        case {"list": list(items)}:
            return [_build(item, arrays, depth + 1) for item in items]
        case {"tuple": list(items)}:
            return tuple(_build(item, arrays, depth + 1) for item in items)
        case {"dict": list(items)}:
            # Keys of text only: others can be chosen so that a dict of them takes for ever.
            return {_read_key(k): _build(v, arrays, depth + 1) for k, v in items}
    raise Unreadable("no such value")


def _read_key(key):
    if not isinstance(key, str):
        raise Unreadable("a key that is no text")
    return key


def is_device(kind, number):
    return kind in ("cpu", "gpu") and type(number) is int and 0 <= number < 64


def _read_device(device):
    if not is_device(*device):
        raise Unreadable("no such device")
    return Device(*device)
