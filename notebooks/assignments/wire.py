"""How the judge and a solution's process talk: calls one way, arrays and numbers the other.

A message is a length, a text (JSON), a length and the bytes of all arrays. Nothing in it can run
when it is read: what a solution sends may be anything, and the judge must not trust it. It holds
None, booleans, numbers, text, devices, `mx.nd` and NumPy arrays, and lists, tuples and dicts of
these. What is shared survives: an array that a function was given and hands back is the same
object on the other side, and one that lies in another's memory is a view of it there too.
"""

import ctypes
import json
import math
import struct

import helpers  # noqa: F401  before mxnet, which reads its settings once
import mxnet as mx
import numpy as np

LARGEST = 2**28  # bytes of one message
_LENGTHS = struct.Struct("<QQ")


class Unreadable(ValueError):
    """What came is no message as described above."""


def write(stream, tree, known=()):
    """Send a tree of values. known: arrays that the other side has already, in its order."""
    arrays = list(known)
    text = json.dumps({"tree": _flatten(tree, arrays), "arrays": [_describe(a) for a in arrays]})
    body = b"".join(_values(a).tobytes() for a in arrays)
    if len(text) + len(body) > LARGEST:
        raise TypeError(f"more than {LARGEST // 2**20} MiB of arrays")
    stream.write(_LENGTHS.pack(len(text), len(body)) + text.encode() + body)
    stream.flush()
    return arrays


def read(stream, known=()):
    """Receive a tree; (tree, all its arrays). Those in `known` take the values that come, in place.

    Raises EOFError where nothing more comes, Unreadable where it is no message.
    """
    lengths = _LENGTHS.unpack(_exactly(stream, _LENGTHS.size))
    if sum(lengths) > LARGEST:
        raise Unreadable(f"a message of {sum(lengths):,} bytes")
    text, body = (_exactly(stream, n) for n in lengths)
    try:
        message = json.loads(text)
        arrays = _rebuild(message["arrays"], body, list(known))
        return _unflatten(message["tree"], arrays), arrays
    except Exception as error:  # it may be anything: too large for an index, too deep, no text
        raise Unreadable(f"{type(error).__name__}: {error}") from error


def _exactly(stream, count):
    content = stream.read(count)
    if len(content) < count:
        raise EOFError
    return content


def _flatten(value, arrays):
    """The tree in terms that JSON has. Arrays go into the list `arrays`, once each."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (mx.nd.NDArray, np.ndarray)):
        if isinstance(value, mx.np.ndarray):
            raise TypeError("an mx.np array; mx.nd and NumPy arrays are what is used here")
        place = next((i for i, a in enumerate(arrays) if a is value), len(arrays))
        if place == len(arrays):
            arrays.append(value)
        return {"array": place}
    if isinstance(value, np.generic):
        return {"scalar": _flatten(np.asarray(value), arrays)}
    if isinstance(value, mx.Context):
        return {"device": [value.device_type, value.device_id]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_flatten(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_flatten(k, arrays), _flatten(v, arrays)] for k, v in value.items()]}
    raise TypeError(f"a {type(value).__name__}; arrays, numbers, text and lists, tuples and dicts "
                    "of them are what can be handed in")


def _unflatten(tree, arrays):
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "array":
        return arrays[content]
    if kind == "scalar":
        return _unflatten(content, arrays)[()]
    if kind == "device":
        return _device(*content)
    if kind == "dict":
        return {_unflatten(k, arrays): _unflatten(v, arrays) for k, v in content}
    return {"list": list, "tuple": tuple}[kind](_unflatten(item, arrays) for item in content)


def _device(kind, number):
    if kind not in ("cpu", "gpu") or type(number) is not int or not 0 <= number < 64:
        raise Unreadable(f"a device {kind}({number})")
    return mx.Context(kind, number)


def _values(array):
    return array.asnumpy() if isinstance(array, mx.nd.NDArray) else np.ascontiguousarray(array)


def _describe(array):
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "biuf":
        raise TypeError(f"an array of {dtype}; numbers are what is used here")
    device = None
    if isinstance(array, mx.nd.NDArray):
        device = [array.context.device_type, array.context.device_id]
    return {"dtype": dtype.str, "shape": list(array.shape), "device": device,
            "address": _address(array)}


def _address(array):
    """Where the first value lies, or None where the values don't lie in one row."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data if array.flags.c_contiguous else None
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value


def _rebuild(table, body, arrays):
    """`arrays`, with new values and those after them that the table describes."""
    if not table and not body:  # an answer without values, as when something was raised
        return arrays
    if len(table) < len(arrays):
        raise Unreadable("arrays are missing")
    place, known = 0, len(arrays)
    for i, entry in enumerate(table):
        dtype, shape = np.dtype(str(entry["dtype"])), tuple(entry["shape"])
        if dtype.kind not in "biuf" or any(type(n) is not int or n < 0 for n in shape):
            raise Unreadable(f"an array of {dtype}, {shape}")
        count = math.prod(shape)
        values = np.frombuffer(body, dtype, count, place).reshape(shape)
        place += values.nbytes
        if i < known:
            _overwrite(arrays[i], values)
            continue
        device = _device(*entry["device"]) if entry["device"] is not None else None
        view = _view(entry, values, device, table[:i], arrays)
        if view is None:
            view = values.copy() if device is None else mx.nd.array(values, device, dtype)
        arrays.append(view)
    if place != len(body):
        raise Unreadable(f"{len(body)} bytes for arrays of {place}")
    return arrays


def _overwrite(array, values):
    if tuple(array.shape) != values.shape or np.dtype(array.dtype) != values.dtype:
        raise Unreadable("an argument has changed its shape or type")
    if not np.array_equal(_values(array), values, equal_nan=True):
        array[...] = values if isinstance(array, np.ndarray) else mx.nd.array(
            values, array.context, values.dtype)


def _view(entry, values, device, earlier, arrays):
    """A part of an array that came before, if that is where the new one lies; else None."""
    begin, end = entry["address"], (entry["address"] or 0) + values.nbytes
    if begin is None or not values.nbytes:
        return None
    for other, array in zip(earlier, arrays):
        first = other["address"]
        if first is None or [other["dtype"], other["device"]] != [entry["dtype"], entry["device"]]:
            continue
        size = math.prod(other["shape"]) * values.itemsize
        if first <= begin and end <= first + size:
            a = (begin - first) // values.itemsize
            return array.reshape(-1)[a : a + values.size].reshape(values.shape)
    return None
