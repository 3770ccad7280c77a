"""The process in which one student's solution runs: it makes calls for the judge, and that is all.

    python solution.py SOCKETS FILE SPACE

SOCKETS are the numbers of open sockets to the judge, as 3,4: one for each rank. For each but the
first the process forks once more, before it has run anything of the solution's. FILE and SPACE
limit the bytes of a file and of addresses.

The judge sends the assignment's own cells first, then the student's solution cells, one after the
other up to the one that is judged, then calls of functions by name.
Back goes what a function returns or raises, and what has become of its arguments: the very objects
that it was given, in the lists in which it finds them, with their values and devices. Hidden tests,
expected values and model answers never come here. Nothing protects this process from the solution.
It may do with it what it likes, and all that the judge will believe are values.
"""

import contextlib
import ctypes
import os
import re
import resource
import socket
import symtable
import sys
import threading
import traceback
import types

import channel
import helpers  # noqa: F401  before mxnet, which reads its settings once
import numpy as np
from channel import Array, Device, Function, Other


SOLUTION = "<solution>"   # the cell that is judged, in tracebacks
MOST = 250                # characters of an error's text


def serve(lines, namespace):
    """Answer the judge at the other end of a line, until it hangs up, which raises EOFError.

    lines: one for each rank, of which all but the first are served by forks.

    The solution is run in `namespace`, with all that the assignment's own cells define. They have
    a namespace of their own, which gets from the solution only the functions that were asked for:
    no name that either side chooses is in the other's way.
    """
    line = lines[0]
    line.send("started")
    given, names = line.receive()
    course, bound = {"__name__": "course"}, []
    for number, cell in enumerate(given):
        exec(compile(cell, f"<given cell {number + 1}>", "exec"), course)
        bound.append({name: course[name] for name in find_bound(cell) if name in course})
        namespace.update(bound[-1])
    if len(lines) > 1:
        import backend  # noqa: F401  with PyTorch: once for all ranks
    line = fork_ranks(lines)
    line.send("given")
    passed, last = None, False
    while not last:
        label, source, place, last = line.receive()
        # In a notebook a given cell takes back a name that a solution cell above it had taken.
        for again in bound[passed:place] if passed is not None else ():
            namespace.update(again)
        passed, broke = place, None
        try:
            exec(compile(source, SOLUTION if last else f"<the cell {label!r}>", "exec"), namespace)
        except BaseException as error:
            if last and not isinstance(error, Exception):
                raise
            broke = error   # sys.exit() in an earlier cell: a notebook goes on too
        line.send("read" if broke is None else describe_broken(broke, source))
    course.update({name: namespace[name] for name in names if name in namespace})
    while True:
        name, args, *place = line.receive()
        marshaller = Marshaller(line)
        args = marshaller.unpack(args)
        try:
            if name not in course:
                raise NameError(f"{name} is not defined")
            with marshaller.join(*place) if place else contextlib.nullcontext():
                reply = {"returned": marshaller.pack(course[name](*args))}
        except Exception as error:
            reply = describe_error(error)
        reply["arguments"] = marshaller.pack(args)
        reply["objects"] = [marshaller.pack(value) for value in marshaller.received]
        line.send(reply)


def find_bound(cell):
    """The names that a cell defines at its top level."""
    return [one.get_name() for one in symtable.symtable(cell, "<given cell>", "exec").get_symbols()
            if one.is_assigned() or one.is_imported()]


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


class Marshaller:
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


def describe_broken(error, source):
    """What is said of a cell that could not be read to its end, and why not."""
    if isinstance(error, SyntaxError) and (magic := find_magic(source, error.lineno)):
        return {"broke": f"line {error.lineno} of it, `{magic}`, is a magic: Jupyter's, not "
                         "Python's, which is what is read here. Take it out"}
    said = describe_error(error)
    return {"broke": f"{said['raised']}: {said['why']}"}


def find_magic(source, number):
    """Line `number` of a cell, if it is an order to Jupyter: %timeit, %%time, !ls, x = !ls, f?."""
    lines = source.splitlines()
    line = lines[number - 1].strip() if number and number <= len(lines) else ""
    return line[:60] if re.match(r"(\w+\s*=\s*)?(%|!)|\?|.*\?$", line) else ""


def describe_error(error):
    """What is said of an exception: its kind, its text, and the solution's line."""
    where = [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        where.append((str(error.filename), error.lineno))
    where = [(file, line) for file, line in where
             if file == SOLUTION or file.startswith("<the cell ")]
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    try:   # of a SyntaxError without the file and line, which come below
        text = find_cause(str(getattr(error, "msg", error)))[:MOST]
    except Exception:
        text = ""
    if where:
        file, line = where[-1]
        text += f" (line {line} of {'the solution' if file == SOLUTION else file.strip('<>')})"
    return {"raised": type(error).__name__, "kinds": kinds, "why": text}


def find_cause(text):
    """An error's text without what MXNet puts around it: C++ files and a stack."""
    text = text.partition("Stack trace:")[0].strip()
    text = re.sub(r'^Traceback \(most recent call last\):\s*(File "[^"]*", line \d+\s*)*', "", text)
    text = text.removeprefix("MXNetError: ")
    return re.sub(r"^(\[\d\d:\d\d:\d\d\] )?\S+\.(cc|cpp|cu|h):\d+: ", "", text.strip())


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
