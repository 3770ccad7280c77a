"""The process in which one student's solution runs: it makes calls for the judge, and that is all.

    python solution.py READ WRITE FILE SPACE

READ and WRITE are open file descriptors, from and to the judge; FILE and SPACE limit the bytes of
a file and of addresses.

The judge sends the assignment's own cells and the solution first, then calls of functions by
name; what they return, what they raise, and what became of their arguments goes back. Hidden
tests and model answers never come here. Nothing here protects this process from the solution:
it may do with it what it likes, and all the judge will see are values.
"""

import inspect
import os
import resource
import sys
import traceback
import types

import helpers  # noqa: F401  before mxnet, which reads its settings once
import wire


def serve(read, write, namespace):
    """Answer the judge in `namespace` until it hangs up, which raises EOFError."""
    wire.write(write, "started")
    given, answer = wire.read(read)[0]
    for number, cell in enumerate(given):
        exec(compile(cell, f"<given cell {number + 1}>", "exec"), namespace)
    functions = {name: value for name, value in namespace.items() if inspect.isfunction(value)}
    failed = None
    try:
        exec(compile(answer, "<solution>", "exec"), namespace)
    except Exception as error:
        failed = error
    namespace.update(functions)  # what is given stays given, also under a solution's own names
    wire.write(write, "ready")
    while True:
        (name, args, kwargs), known = wire.read(read)
        try:
            if failed:
                raise failed
            result = namespace[name](*args, **kwargs)
            wire.write(write, {"returned": result, "arguments": [args, kwargs]}, known)
        except Exception as error:
            told = _told(error)
            if isinstance(error, KeyError) and name not in namespace:
                told = {"raised": "NameError", "why": f"{name} is not defined"}
            try:  # whoever raises may have changed its arguments before
                wire.write(write, {**told, "arguments": [args, kwargs]}, known)
            except TypeError:
                wire.write(write, told)


def _told(error):
    """What is said of an exception: its kind, its text, and the solution's line."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
             if f.filename == "<solution>"]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" (line {lines[-1]} of the solution)" if lines else ""
    return {"raised": type(error).__name__, "why": f"{error}"[:2000] + where}


if __name__ == "__main__":
    reading, writing, file, space = (int(number) for number in sys.argv[1:])
    # Here rather than by the parent between fork and exec, where MXNet's threads don't allow it.
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, file),
                        (resource.RLIMIT_AS, space)):
        resource.setrlimit(limit, (most, most))
    # A module of its own, so that no name of this file is in the solution's way.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        serve(os.fdopen(reading, "rb"), os.fdopen(writing, "wb"), module.__dict__)
    except EOFError:  # the judge has heard enough
        os._exit(0)
