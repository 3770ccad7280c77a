"""The process in which one student's solution runs: it makes calls for the judge, and that is all.

    python solution.py SOCKETS FILE SPACE

SOCKETS are the numbers of open sockets to the judge, as 3,4: one for each rank. For each but the
first the process forks once more, before it has run anything of the solution's. FILE and SPACE
limit the bytes of a file and of addresses.

The judge sends the assignment's own cells and the solution first, then calls of functions by name.
Back goes what a function returns or raises, and what has become of its arguments: the very objects
that it was given, in the lists in which it finds them, with their values and devices. Hidden tests,
expected values and model answers never come here. Nothing protects this process from the solution.
It may do with it what it likes, and all that the judge will believe are values.
"""

import contextlib
import ctypes
import os
import resource
import socket
import sys
import threading
import traceback
import types

import channel
import helpers  # noqa: F401  before mxnet, which reads its settings once
import numpy as np
from channel import Array, Device, Function, Other


def serve(lines, namespace):
    """Answer the judge at the other end of a line, until it hangs up, which raises EOFError.

    lines: one for each rank, of which all but the first are served by forks.

    The solution is run in `namespace`, with all that the assignment's own cells define. They have
    a namespace of their own, which gets from the solution only the functions that were asked for:
    no name that either side chooses is in the other's way.
    """
    line = lines[0]
    line.send("started")
    given, answer, names = line.receive()
    course = {"__name__": "course"}
    for number, cell in enumerate(given):
        exec(compile(cell, f"<given cell {number + 1}>", "exec"), course)
    namespace.update({name: value for name, value in course.items() if name[:2] != "__"})
    if len(lines) > 1:
        import backend  # noqa: F401  with PyTorch: once for all ranks
    line.send("given")
    line = fork_ranks(lines)
    failed = None
    try:
        exec(compile(answer, "<solution>", "exec"), namespace)
    except Exception as error:
        failed = error
    course.update({name: namespace[name] for name in names if name in namespace})
    line.send("ready")
    while True:
        name, args, *place = line.receive()
        desk = Desk(line)
        args = desk.unpack(args)
        try:
            if failed:
                raise failed
            if name not in course:
                raise NameError(f"{name} is not defined")
            with desk.join(*place) if place else contextlib.nullcontext():
                reply = {"returned": desk.pack(course[name](*args))}
        except Exception as error:
            reply = describe_error(error)
        reply["arguments"] = desk.pack(args)
        reply["objects"] = [desk.pack(value) for value in desk.received]
        line.send(reply)


def fork_ranks(lines):
    """Become one process for each line; returns this one's."""
    mine = lines[0]
    for line in lines[1:]:
        if os.fork() == 0:
            mine = line
            break
    for line in lines:
        if line is not mine:
            line.close()
    return mine


class Desk:
    """Turns what the judge sends for one call into MXNet's and NumPy's objects, and back.

    received: the arrays that came, in order; their places are their identities.
    """

    def __init__(self, line):
        self.line, self.received, self.made = line, [], []
        self.turn = threading.RLock()

    def unpack(self, value):
        """The value with arrays of this process in the place of `Array`."""
        match value:
            case Array():
                if value.identity is not None and value.identity < len(self.received):
                    return self.received[value.identity]
                made = self.make(value)
                if value.identity is not None:
                    self.received.append(made)
                return made
            case Device():
                return _mxnet().Context(*value)
            case Function():
                return self.stub(value.number)
            case list():
                return [self.unpack(item) for item in value]
            case tuple():
                return tuple(self.unpack(item) for item in value)
            case dict():
                return {key: self.unpack(item) for key, item in value.items()}
        return value

    def make(self, array):
        if array.device is None:
            return array.values.copy()
        mx = _mxnet()
        made = mx.nd.array(array.values, mx.Context(*array.device), array.values.dtype)
        if array.gradient:
            made.attach_grad()
        return made

    def stub(self, number):
        """A function that lets the judge's function of that number do the work."""
        def call_back(*args, **named):
            with self.turn:
                return self.unpack(self.ask({"call": number, "arguments": self.pack(args),
                                             "named": self.pack(named)}))
        return call_back

    def join(self, rank, world):
        """A context in which torch.distributed's messages go over the judge."""
        import backend

        def start(kind, arrays, detail):
            number = self.ask({"start": kind, "arrays": [Array(a) for a in arrays],
                               "detail": detail})
            return lambda: [array.values for array in self.ask({"finish": number})]
        return backend.joined(rank, world, start)

    def ask(self, question):
        """What the judge answers. Raises what it says."""
        with self.turn:
            self.line.send(question)
            reply = self.line.receive()
        if "raised" in reply:
            raise ERRORS[reply["raised"]](reply["why"])
        return reply["returned"]

    def pack(self, value, depth=0):
        """The value as what can cross; what can't is `Other`."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if depth > channel.DEEPEST:
            return Other("list of lists of lists")
        if isinstance(value, np.generic) and value.dtype.kind in "biuf":
            return value
        mx = sys.modules.get("mxnet")
        if mx and type(value) is mx.nd.NDArray or type(value) is np.ndarray:
            return self.pack_array(value)
        if mx and isinstance(value, mx.Context):
            return pack_device(value)
        if type(value) in (list, tuple):
            return type(value)(self.pack(item, depth + 1) for item in value)
        if type(value) is dict:
            if all(type(key) is str for key in value):
                return {key: self.pack(item, depth + 1) for key, item in value.items()}
        return Other(type(value).__name__)

    def pack_array(self, value):
        known = [*self.received, *self.made]
        identity = next((i for i, one in enumerate(known) if one is value), len(known))
        if identity == len(known):
            self.made.append(value)
        if isinstance(value, np.ndarray):
            if value.dtype.kind not in "biuf":
                return Other(f"NumPy array of {value.dtype}")
            device, gradient, values = None, False, value.copy()
            begin, end = np.byte_bounds(value)
        else:
            device = pack_device(value.context)
            if isinstance(device, Other):
                return Other(f"mx.nd array on {device.kind}")
            gradient, values = value.grad is not None, value.asnumpy()
            begin = _find_address(value)
            end = begin + values.nbytes
        return Array(values, device, identity, (begin, end), gradient)


def pack_device(context):
    """A context as what can cross; those that no test uses can't."""
    device = Device(context.device_type, context.device_id)
    return device if channel.is_device(*device) else Other(f"device {device}")


def describe_error(error):
    """What is said of an exception: its kind, its text, and the solution's line."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
             if f.filename == "<solution>"]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:
        text = str(error)[:2000]
    except Exception:
        text = ""
    where = f" (line {lines[-1]} of the solution)" if lines else ""
    return {"raised": type(error).__name__, "kinds": kinds, "why": text + where}


# What the judge's functions and messages raise.
ERRORS = {kind.__name__: kind for kind in (TypeError, ValueError, RuntimeError)}


def _mxnet():
    import mxnet
    return mxnet


def _find_address(array):
    import mxnet as mx
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value or 0


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[1].split(",")]
    file, space = (int(text) for text in sys.argv[2:])
    # Here rather than by the parent between fork and exec, where threads don't allow it.
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file),
                        (resource.RLIMIT_AS, space)):
        resource.setrlimit(limit, (most, most))
    # A module of its own, so that no name of this file is in the solution's way.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        serve([channel.Channel(socket.socket(fileno=number)) for number in numbers],
              module.__dict__)
    except EOFError:  # the judge has heard enough
        os._exit(0)
