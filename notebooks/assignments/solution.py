"""The process in which one student's solution runs: it makes calls for the judge, and that is all.

    python solution.py READ WRITE       two open file descriptors to the judge

The judge sends the assignment's own cells and the solution first, then calls of functions by
name; what they return, what they raise, and what became of their arguments goes back. Hidden
tests and model answers never come here. Nothing here protects this process from the solution:
it may do with it what it likes, and all the judge will see are values.
"""

import os
import sys
import traceback
import types

import helpers  # noqa: F401  before mxnet, which reads its settings once
import wire


def serve(read, write):
    wire.write(write, "started")
    given, answer = wire.read(read)[0]
    # A module of its own, so that no name of this file is in the solution's way.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    namespace = module.__dict__
    for number, cell in enumerate(given):
        exec(compile(cell, f"<given cell {number + 1}>", "exec"), namespace)
    failed = None
    try:
        exec(compile(answer, "<solution>", "exec"), namespace)
    except Exception as error:
        failed = error
    wire.write(write, "ready")
    while True:
        (name, args, kwargs), known = wire.read(read)
        try:
            if failed:
                raise failed
            result = namespace[name](*args, **kwargs)
            wire.write(write, {"returned": result, "arguments": [args, kwargs]}, known)
        except KeyError as error:
            if name in namespace:
                wire.write(write, _told(error))
            else:
                wire.write(write, {"raised": "NameError", "why": f"{name} is not defined"})
        except Exception as error:
            wire.write(write, _told(error))


def _told(error):
    """What is said of an exception: its kind, its text, and the solution's line."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__)
             if f.filename == "<solution>"]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" (line {lines[-1]} of the solution)" if lines else ""
    return {"raised": type(error).__name__, "why": f"{error}"[:2000] + where}


if __name__ == "__main__":
    reading, writing = (int(number) for number in sys.argv[1:])
    try:
        serve(os.fdopen(reading, "rb"), os.fdopen(writing, "wb"))
    except EOFError:  # the judge has heard enough
        os._exit(0)
