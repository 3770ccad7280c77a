"""What a chapter's cell *Your turn* says of the function that a reader wrote there."""

import dis
import sys
import traceback
from contextlib import contextmanager
from unittest import mock

import numpy as np

_LONGEST = 200  # characters of a value that are shown


def your_turn(function, cases, in_place=False, stubs=()):
    """Run `function` on each case, and print the first that is wrong, or that all are right.

    function: what the reader wrote. While it does nothing, or returns `...`, it isn't written yet.
    cases: a list of pairs, a tuple of arguments and what is due for them: a number, a text, an
    array of NumPy, MXNet or PyTorch, or a list, tuple or dictionary of these. Arrays among the
    arguments are copied first, so that the cell can be run again. Numbers may differ by rounding
    in float32; arrays of MXNet must be on the devices where they are due, and those of different
    devices may not meet in an operation, which simulated devices would allow.

    in_place: `function` changes its first argument, and that is compared, whatever it returns: the
    arrays that it got, not those that it may have put into their list.

    Whatever `function` raises is printed, not raised, so that *Run All* goes on.

    stubs: what the reader wrote, where `function` is given, and only tries it.
    """
    for stub in stubs:
        if _does_nothing(stub):
            print(f"{stub.__name__}: not written yet")
            return
    name = " and ".join(written.__name__ for written in stubs or [function])
    files = {written.__code__.co_filename for written in [function, *stubs]}
    for arguments, expected in cases:
        call = f"{function.__name__}({', '.join(map(_text, arguments))})"
        copies = [_copy(argument) for argument in arguments]
        kept = _hold(copies[0]) if in_place else None
        try:
            with _devices_apart():
                found = function(*copies)
        except Exception as error:
            line = traceback.extract_tb(error.__traceback__)[-1].lineno
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename in files:
                    line = frame.lineno
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{call} raised {said} (line {line} of its cell)")
            return
        if found is ... or found is None and _does_nothing(function):
            print(f"{name}: not written yet")
            return
        did = "left" if in_place else "returned"
        if in_place:
            found = kept
        if not _same(found, expected):
            line = f"{call} {did} {_text(found)}, expected {_text(expected)}"
            if len(line) > 100:
                line = (f"{name} is wrong on this input:\n    given    {_text(arguments)[1:-1]}\n"
                        f"    {did:8} {_text(found)}\n    expected {_text(expected)}")
            print(line)
            return
        places, due = _places(found), _places(expected)
        if len(places) == len(due) and places != due:
            print(f"{call} {did} the right numbers on {', '.join(places)}; "
                  f"expected on {', '.join(due)}")
            return
    print(f"{name}: right on {len(cases)} of {len(cases)} inputs")


def _does_nothing(function):
    return {step.opname for step in dis.get_instructions(function)} <= {
        "RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST"}


@contextmanager
def _devices_apart():
    """MXNet's operators raise where their inputs lie on different devices."""
    if "mxnet" not in sys.modules:
        yield
        return
    from mxnet.ndarray import register
    invoke = register._imperative_invoke

    def checked(handle, arrays, *rest):
        contexts = {array.context for array in arrays}
        # "cpu_pinned" is host memory, where a KVStore updates.
        places = sorted(str(place) for place in contexts if place.device_type != "cpu_pinned")
        if len(places) > 1:
            raise ValueError(f"an operation on arrays of {' and '.join(places)}: move one first")
        return invoke(handle, arrays, *rest)

    with mock.patch.object(register, "_imperative_invoke", checked):
        yield


def _hold(value):
    """Lists of our own, with the same arrays in them."""
    return type(value)(map(_hold, value)) if isinstance(value, list | tuple) else value


def _places(value):
    """The devices of MXNet's arrays in `value`, one after the other."""
    if isinstance(value, list | tuple):
        return [place for part in value for place in _places(part)]
    return [str(value.context)] if hasattr(value, "context") else []


def _plain(value):
    """`value` with NumPy's arrays in place of MXNet's and PyTorch's."""
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if hasattr(value, "asnumpy"):
        return value.asnumpy()
    if hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return value


def _text(value):
    text = repr(_as_lists(_plain(value)))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _as_lists(value):
    if isinstance(value, list):
        return [_as_lists(part) for part in value]
    if isinstance(value, dict):
        return {key: _as_lists(part) for key, part in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return _as_lists(value.tolist())
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _copy(value):
    """A copy of `value`, into which a function may write."""
    if isinstance(value, list | tuple):
        return type(value)(map(_copy, value))
    if hasattr(value, "clone"):  # PyTorch
        return value.detach().clone()
    return value.copy() if hasattr(value, "copy") else value


def _same(found, expected):
    found, expected = _plain(found), _plain(expected)
    if isinstance(expected, list) and isinstance(found, list):
        return len(found) == len(expected) and all(map(_same, found, expected))
    if isinstance(expected, dict) and isinstance(found, dict):
        return (found.keys() == expected.keys()
                and all(_same(found[key], expected[key]) for key in expected))
    if isinstance(expected, str | bool | dict) or isinstance(found, str | bool | dict):
        return type(found) is type(expected) and found == expected
    try:
        found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    except (TypeError, ValueError):
        return found == expected
    return found.shape == expected.shape and np.allclose(found, expected, rtol=1e-5, atol=1e-7)
