"""What a test asks a solution for, and the one comparison that decides whether it came.

A test is a generator of cases, in an assignment's `tests.py`. A case is complete before anything
is sent: the arguments, what is to be returned, what may be changed and into what. The generator
never sees a reply, so nothing that a solution returns or changes can reach an expected value.

    def even_values():
        '''shards, in order, on their devices'''
        batch = rng.normal(size=(6, 2))
        yield Case("6 examples, 2 devices", "split_even", [mx(batch), [cpu(0), cpu(1)]],
                   returns=[mx(part, on=cpu(i)) for i, part in enumerate(np.split(batch, 2))])

What isn't named in `changes` has to come back as it went, lists and their lengths included, and
every array that is returned must have memory of its own. That is asked of every call, and costs the
exercise's last test.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from marking.channel import Array, Device, Other


FIRST = Device("cpu", 0)   # where a test doesn't say


class Wrong(Exception):
    """What a solution did is not what was asked for; the text is for its author."""


class Broke(Wrong):
    """It raised an exception that it shouldn't have."""


class Near(NamedTuple):
    """An expected number or array that may be off by `within` of its largest entry."""

    value: object
    within: float
    scale: float | None = None   # in place of the largest entry


class Whole(NamedTuple):
    """An expected integer: Python's or NumPy's, and no float."""

    value: int


class Anything(NamedTuple):
    """Expected where a test doesn't look."""


@dataclass
class Case:
    """One call. what: how the student is told which it is.

    returns: the expected value, or a function of what came that raises `Wrong`. changes:
    {parameter: the same for what becomes of it}. raises: the exception due, in place of a value.
    names: what entries of the result are called, level by level. A function among `args` stays
    with the judge: the solution gets one that calls it, with what has crossed. It may raise Wrong.
    typed: the call as a student can type it, where the arguments don't tell.
    """

    what: str
    function: str
    args: list
    returns: object = None
    changes: dict = field(default_factory=dict)
    raises: type | None = None
    names: tuple = ()
    typed: str = ""


@dataclass
class Ranks:
    """One call in several processes at a time, a `Case` for each rank.

    messages: a function of what every rank sent, a list of `exchange.Sent`, that raises `Wrong`.
    exchange: the `exchange.Exchange` while the call lasts.
    """

    what: str
    cases: list
    messages: object = None
    exchange: object = None


class Raised(NamedTuple):
    """An exception: its class, those of Python's own from which that comes, its text."""

    kind: str
    kinds: list
    why: str


class Reply(NamedTuple):
    """What came back of a call."""

    returned: object
    raised: Raised | None
    arguments: list
    objects: list            # the arrays that were sent, as they are now


def cpu(number):
    return Device("cpu", number)


def mx(values, on=FIRST, dtype=None, gradient=False):
    """An `mx.nd` array on a device."""
    return Array(_freeze(values, dtype), on, gradient=gradient)


def numpy(values, dtype=None):
    """A NumPy array."""
    return Array(_freeze(values, dtype))


def near(values, within=1e-12, on=FIRST, scale=None):
    """An `mx.nd` array whose entries may be off by `within` of the largest."""
    return Near(mx(values, on), within, scale)


def _freeze(values, dtype):
    values = np.array(values, dtype, order="C")
    values.flags.writeable = False
    return values


def find_fault(case, parameters, sent, reply):
    """Raises Wrong where `reply` isn't what `case` asks for: what is returned or raised, and what
    becomes of the arguments that are to be changed.

    parameters: the names of the function's arguments. sent: the arguments with identities.
    """
    if len(reply.arguments) != len(sent):
        raise Wrong("the arguments did not come back")
    if case.raises:
        _compare_raised(case, reply)
    elif reply.raised:
        raise Broke(f"{reply.raised.kind}: {reply.raised.why}")
    for name, before, after in zip(parameters, sent, reply.arguments):
        if name in case.changes:
            _compare_argument(name, before, after, reply.objects, True)
            expected = case.changes[name]
            if callable(expected):
                expected(after)
            else:
                compare(after, expected, f"`{name}` after the call", case.names)
    if case.raises:
        return
    if callable(case.returns):
        case.returns(reply.returned)
    else:
        compare(reply.returned, case.returns, "", case.names)


def find_carelessness(case, parameters, sent, reply):
    """Raises Wrong where a call did something that no case allows: it changed an argument that
    isn't named in `changes`, or returned an array that lies in another one's memory."""
    _compare_memory(reply)
    for name, before, after in zip(parameters, sent, reply.arguments):
        if name not in case.changes:
            _compare_argument(name, before, after, reply.objects, False)
        for one in _collect(before):
            if reply.objects[one.identity].gradient != one.gradient:
                raise Wrong(f"a gradient was attached to the caller's `{name}`")


def compare(found, expected, where="", names=()):
    """Raises Wrong unless `found` is `expected`: same types, lengths, devices, shapes, values.

    Nothing of `found` is asked to compare itself: it is plain data, and each kind is looked at by
    its exact type. A list is a list, where a tuple is expected a list will do too.
    """
    within, scale = 0.0, None
    if isinstance(expected, Near):
        expected, within, scale = expected
    at = where or "what is returned"
    match expected:
        case Anything():
            return
        case Array():
            _compare_array(found, expected, within, scale, at)
        case Whole():
            if not isinstance(found, (int, np.integer)) or isinstance(found, bool):
                raise Wrong(f"{at} is {describe(found)}, not an int")
            if int(found) != expected.value:
                raise Wrong(f"{at} is {read_number(found, at):.15g}, which is not right")
        case bool() | None | str() | Device():
            if type(found) is not type(expected) or found != expected:
                raise Wrong(f"{at} is {describe(found)}, not {describe(expected)}")
        case list() | tuple():  # after the others, some of which are tuples
            kinds = (list,) if isinstance(expected, list) else (list, tuple)
            if type(found) not in kinds:
                raise Wrong(f"{at} is {describe(found)}, not a {kinds[-1].__name__}")
            if len(found) != len(expected):
                raise Wrong(f"{at} has {_count(found)}, not {len(expected)}")
            for i, (one, due) in enumerate(zip(found, expected)):
                label = f"{names[0]} {i}" if names else f"entry {i}"
                compare(one, due, f"{label} of {where}" if where else label, names[1:])
        case int() | float() | np.generic():
            number = read_number(found, at)
            room = within * (abs(expected) if scale is None else scale)
            if not (number == expected or abs(number - expected) <= room):
                raise Wrong(f"{at} is {number:.6g}, which is not right")
        case _:
            raise TypeError(f"nothing is known of an expected {type(expected).__name__}")


def _compare_array(found, expected, within, scale, at):
    kind = "NumPy array" if expected.device is None else "mx.nd array"
    if not isinstance(found, Array) or (found.device is None) != (expected.device is None):
        raise Wrong(f"{at} is {describe(found)}, not an {kind}".replace("an N", "a N"))
    values, due = found.values, expected.values
    if found.device != expected.device:
        raise Wrong(f"{at} is on {found.device}, not on {expected.device}")
    if values.shape != due.shape:
        raise Wrong(f"{at} has shape {values.shape}, not {due.shape}")
    if values.dtype != due.dtype:
        raise Wrong(f"{at} is in {values.dtype}, not in {due.dtype}")
    right = (values == due) | ((values != values) & (due != due))
    if within and due.size:
        most = within * (np.nanmax(np.abs(due)) if scale is None else scale)
        with np.errstate(invalid="ignore", over="ignore"):
            right |= np.abs(values - due) <= most
    if due.size and not right.all():
        wrong = int(np.argmin(right))
        raise Wrong(f"{at} has other values, at {due.size - int(right.sum())} of {due.size} "
                    f"places, first at {_name_place(wrong, due.shape)}")


def _count(items):
    return f"{len(items)} {'entry' if len(items) == 1 else 'entries'}"


def _name_place(index, shape):
    return f"[{', '.join(str(int(i)) for i in np.unravel_index(index, shape))}]"


def read_number(found, at="what is returned"):
    """One number, Python's or NumPy's, as a float. Raises Wrong for anything else: an array, a
    truth value, a complex number."""
    if not isinstance(found, (int, float, np.integer, np.floating)) or isinstance(found, bool):
        raise Wrong(f"{at} is {describe(found)}, not a number")
    try:
        return float(found)
    except OverflowError:
        raise Wrong(f"{at} is larger than any float") from None


def describe(value):
    """A few words for whatever came."""
    match value:
        case Array():
            kind = "NumPy array" if value.device is None else "mx.nd array"
            return f"a{'' if value.device is None else 'n'} {kind} of shape {value.values.shape}"
        case Other():
            return f"a {value.kind}"
        case None | bool() | int() | float() | Device():
            return str(value)[:50]
        case str():
            return repr(value)[:50]
    return f"a {type(value).__name__}"


def _compare_raised(case, reply):
    due = case.raises.__name__
    if not reply.raised:
        raise Wrong(f"no {due}")
    if due not in reply.raised.kinds:
        raise Broke(f"{reply.raised.kind}, not {due}: {reply.raised.why}")


def _compare_argument(name, before, after, objects, may_change):
    """Raises Wrong unless the argument came back as it went: lists of the same length that hold
    the same objects, on their devices; unless they may change, with the same values."""
    changed = Wrong(f"the call changed the caller's `{name}`")
    match before:
        case Array():
            if not isinstance(after, Array) or after.identity != before.identity:
                raise Wrong(f"the caller's `{name}` holds another array than before: write into "
                            "the one that is there" if may_change else str(changed))
            now = objects[before.identity]
            if not isinstance(now, Array) or now.device != before.device:
                raise Wrong(f"the caller's `{name}` is on another device than before")
            if (now.values.shape, now.values.dtype) != (before.values.shape, before.values.dtype):
                raise Wrong(f"the caller's `{name}` has another shape or type than before")
            if not may_change:
                same = (now.values == before.values) | (
                    (now.values != now.values) & (before.values != before.values))
                if not same.all():
                    raise changed
        case list() | tuple():
            if type(after) is not type(before) or len(after) != len(before):
                now = f" of {_count(after)}" if type(after) in (list, tuple, dict) else ""
                raise Wrong(f"the caller's list `{name}` had {_count(before)} and is now "
                            f"{describe(after)}{now}")
            for one, other in zip(before, after):
                _compare_argument(name, one, other, objects, may_change)
        case dict():
            if type(after) is not dict or list(after) != list(before):
                raise changed
            for key in before:
                _compare_argument(name, before[key], after[key], objects, may_change)
        case float() if before != before:
            if not (isinstance(after, float) and after != after):
                raise changed
        case _:
            if callable(before):  # one of the judge's functions
                return
            if type(after) is not type(before) or after != before:
                raise changed


def _collect(value):
    """All arrays in a tree."""
    if isinstance(value, Array):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for item in value for array in _collect(item)] if isinstance(
        value, (list, tuple)) else []


def _compare_memory(reply):
    """Raises Wrong where an array that was returned lies in another one's memory."""
    found = [(*array.memory, returned)
             for returned, tree in ((True, reply.returned), (False, reply.objects))
             for array in _collect(tree) if array.memory and array.values.size]
    reach = {True: -1, False: -1}   # where the arrays so far end, of each kind
    for begin, end, returned in sorted(found):
        if begin < reach[True] and returned:
            raise Wrong("two of the arrays that are returned share memory")
        if begin < reach[not returned]:
            raise Wrong("an array that is returned shares memory with one that was passed in: "
                        "writing into one changes the other")
        reach[returned] = max(reach[returned], end)
