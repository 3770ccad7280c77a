"""A test's call as a student can type it: in short for a line, in full for the page of feedback.

    cut(10, [3, 1, 1, 1])                                   in short
    split_even(float32 array of shape (6, 2) on cpu(0), [cpu(1), cpu(0)])

What the judge holds itself (`step`, `push`, `clock`) goes by its parameter's name.
"""

import numpy as np

from marking.cases import Ranks
from marking.channel import Array, Device

LINE = 150      # characters of a call in short
FEW = 6         # numbers of an array that are shown in short
LARGEST = 2000  # numbers of an array that is shown in full
PAGE = 30_000   # characters of a call in full


def shorten_call(case, parameters):
    """One line: the function, and its arguments or what they are. Of ranks, that of rank 0."""
    rank = ""
    if isinstance(case, Ranks):
        case, rank = case.cases[0], " on rank 0"
    names = parameters[case.function]
    for room in (60, 30, 15, 0):
        given = [shorten_value(value, name, room) for value, name in zip(case.args, names)]
        line = f"{case.function}({', '.join(given)})"
        if len(line) <= LINE:
            break
    return line + rank


def shorten_value(value, name, room):
    """room: how many characters a list or text may have before it is told by its length."""
    match value:
        case Array():
            return shorten_array(value, room)
        case bool() | None | int() | Device():
            return str(value)
        case float() | np.floating():
            return f"{value:.6g}"
        case str():
            return repr(value)
        case list() | tuple() | range():
            text = f"[{', '.join(shorten_value(one, name, room) for one in value)}]"
            return text if len(text) <= room else f"a list of {len(value)}"
        case dict():
            pairs = [f"{key}={shorten_value(one, key, room)}" for key, one in value.items()]
            text = f"{{{', '.join(pairs)}}}"
            return text if len(text) <= max(room, 90) else f"a dict of {len(value)}"
    return name


def shorten_array(array, room):
    values, place = array.values, f" on {array.device}" if array.device else ""
    if values.size <= FEW:
        text = shorten_value(values.tolist(), "", LINE)
        if len(text) <= room:
            return f"{values.dtype} {text}{place}"
    return f"{values.dtype} array of shape {values.shape}{place}"


def write_call(case, parameters):
    """Lines of Python that make the call in the student's notebook.

    Where an array is too large to be typed, a remark: the case's name says how it was made.
    """
    cases = case.cases if isinstance(case, Ranks) else [case]
    if any(is_large(one.args) for one in cases):
        return f"# with arrays too large to be shown: {shorten_call(case, parameters)}"
    if isinstance(case, Ranks):
        first = case.cases[0]
        lines = [f"rank_{rank} = [{', '.join(write_given(one, parameters))}]"
                 for rank, one in enumerate(case.cases)]
        given = ", ".join(f"rank_{rank}" for rank in range(len(case.cases)))
        lines.append(f"on_each({first.function}, [{given}])")
    elif case.typed:
        first, lines = None, [case.typed]
    else:
        first, given, lines = case, write_given(case, parameters), []
        for place, (name, _) in enumerate(zip(parameters[case.function], case.args)):
            if len(given[place]) > 40:
                lines.append(f"{name} = {given[place]}")
                given[place] = name
        lines.append(f"{case.function}({', '.join(given)})")
    return "\n".join(write_remarks(first, parameters) + lines)[:PAGE]


def is_large(value):
    if isinstance(value, Array):
        return value.values.size > LARGEST
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return False
    return any(map(is_large, value))


def write_given(case, parameters):
    return [write_value(value, name)
            for value, name in zip(case.args, parameters[case.function])]


def write_remarks(case, parameters):
    """What the lines can't say."""
    if case is None:
        return []
    names = parameters[case.function]
    functions = [name for value, name in zip(case.args, names) if callable(value)]
    attached = [name for value, name in zip(case.args, names) if has_gradient(value)]
    return ([f"# {', '.join(functions)}: what your notebook has for it" for _ in functions[:1]]
            + [f"# attach_grad() was called on each array in {name}" for name in attached])


def has_gradient(value):
    if isinstance(value, Array):
        return value.gradient
    return isinstance(value, (list, tuple)) and any(map(has_gradient, value))


def write_value(value, name):
    match value:
        case Array():
            return write_array(value)
        case Device():
            return f"mx.{value}"
        case np.generic():
            return write_numbers(value.item())
        case float():
            return write_numbers(value)
        case bool() | None | int() | str():
            return repr(value)
        case list() | range():
            return f"[{', '.join(write_value(one, name) for one in value)}]"
        case tuple():
            inner = ", ".join(write_value(one, name) for one in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case dict():
            return f"{{{', '.join(f'{k!r}: {write_value(v, k)}' for k, v in value.items())}}}"
    return name


def write_array(array):
    values = array.values
    if values.dtype == np.float32:   # the shortest text that gives the same float32
        numbers = np.array([float(str(one)) for one in values.ravel()]).reshape(values.shape)
    else:
        numbers = values
    if values.size:
        text = write_numbers(numbers.tolist())
    else:
        text = f"np.zeros({values.shape})"
    if array.device:
        return f'mx.nd.array({text}, mx.{array.device}, "{values.dtype}")'
    return f'np.array({text}, "{values.dtype}")'


def write_numbers(value):
    """A number, or lists of them, as Python reads it."""
    if isinstance(value, list):
        return f"[{', '.join(map(write_numbers, value))}]"
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return f"np.{value}" if value != float("-inf") else "-np.inf"
    return repr(value)
