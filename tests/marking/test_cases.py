"""The comparison that decides is closed: nothing but what is expected passes."""

import numpy as np
import pytest
from marking import cases
from marking.cases import Case, Near, Reply, Whole, Wrong, compare, cpu, mx, near, numpy
from marking.channel import Array, Other

NAN = float("nan")


def came(values, on=cases.FIRST, **said):
    return Array(np.asarray(values), on, **said)


@pytest.mark.parametrize("found, expected", [
    (1, 1.0), (1.0, 1), (np.float32(0.5), 0.5), (1.0000001, Near(1.0, 1e-6)), (3, Whole(3)),
    (np.int32(3), Whole(3)), ([1, 2], [1, 2]), ([1, 2], (1, 2)), ((1, 2), (1, 2)), (None, None),
    (cpu(1), cpu(1)), (came([1.0, NAN]), mx([1.0, NAN])),
    (came([1.0, 2.0 + 1e-9]), near([1, 2.0], 1e-8)),
    (came([1], None), numpy([1])), (came(np.zeros((0, 2))), mx(np.zeros((0, 2)))), (True, True),
    (float("inf"), float("inf")), (came([5e-13, 1.0]), near([0.0, 1.0]))])
def test_what_is_right_passes(found, expected):
    compare(found, expected)


@pytest.mark.parametrize("found, expected", [
    (NAN, 1.0), (NAN, Near(1.0, 1e9)), ([NAN], [1.0]), (came([NAN]), near([1.0], 1e9)),
    (came([NAN]), mx([1.0])), (came([1.0]), mx([NAN])), (float("inf"), Near(1.0, 0.5)),
    (True, 1), (1, True), (1, None), (None, 1), ("1", 1), (10**400, 1.0), (10**400, Whole(1)),
    (3.0, Whole(3)), (True, Whole(1)), (NAN, Whole(3)), (np.float64(3), Whole(3)),
    ((1, 2), [1, 2]), ([1], [1, 2]), ([1, 2, 3], [1, 2]), ({0: 1, 1: 2}, [1, 2]),
    ("ab", ["a", "b"]),
    (came([1.0, 2.0]), [1.0, 2.0]), ([1.0], mx([1.0])), (1.0, mx([1.0])), (came([1.0]), 1.0),
    (came([1.0]), numpy([1.0])), (came([1.0], None), mx([1.0])), (came([1.0], cpu(1)), mx([1.0])),
    (came([[1.0]]), mx([1.0])), (came(np.float32([1])), mx([1.0])), (came([1]), mx([1.0])),
    (came([1.0 + 1e-9]), mx([1.0])), (came([1.0, 2.0 + 3e-8]), near([1, 2.0], 1e-8)),
    (came([2**24]), mx([2**24 + 1])), (Other("Yes"), 1), (Other("Yes"), [1]),
    (Other("Yes"), mx([1.0])), (cpu(0), cpu(1)), (("cpu", 0), cpu(0)), (1.0 + 1e-9, 1.0),
    (came([2e-12, 1.0]), near([0.0, 1.0]))])
def test_what_is_not_does_not(found, expected):
    with pytest.raises(Wrong):
        compare(found, expected)


def test_a_case_s_values_are_its_own():
    values = np.zeros(3)
    array = mx(values)
    values[:] = 1
    assert array.values.tolist() == [0, 0, 0]
    with pytest.raises(ValueError):
        array.values[0] = 1


# One call f(xs, n), xs being a list of two arrays.
SENT = [[mx([1.0, 2.0])._replace(identity=0), mx([3.0], on=cpu(1))._replace(identity=1)], 7]


def reply(returned=None, arguments=None, objects=None):
    objects = SENT[0] if objects is None else objects
    return Reply(returned, None, [list(SENT[0]), 7] if arguments is None else arguments, objects)


def find(one, **changes):
    case = Case("", "f", [], returns=cases.Anything(), changes=changes)
    cases.find_fault(case, ["xs", "n"], SENT, one)
    cases.find_carelessness(case, ["xs", "n"], SENT, one)


def swap(place, **said):
    arrays = list(SENT[0])
    arrays[place] = arrays[place]._replace(**said)
    return arrays


def test_arguments_that_came_back_as_they_went():
    find(reply())


@pytest.mark.parametrize("arguments, objects", [
    ([[SENT[0][0]], 7], None), ([[], 7], None), ([SENT[0][::-1], 7], None),
    ([[*SENT[0], SENT[0][0]], 7], None), ([tuple(SENT[0]), 7], None), ([list(SENT[0]), 8], None),
    ([list(SENT[0]), 7.0], None), ([None, 7], None), ([list(SENT[0])], None),
    ([[SENT[0][0], SENT[0][0]], 7], None),
    ([swap(0, identity=2), 7], None),                                   # another object
    ([swap(0, identity=None), 7], None),
    (None, swap(0, values=np.array([1.0, 2.5]))), (None, swap(0, values=np.array([1.0, NAN]))),
    (None, swap(0, device=cpu(3))), (None, swap(0, values=np.float32([1, 2]))),
    (None, swap(0, values=np.array([[1.0, 2.0]]))), (None, swap(1, gradient=True)),
    (None, [Other("int"), SENT[0][1]]), ([Other("list"), 7], None)])
def test_arguments_that_did_not(arguments, objects):
    with pytest.raises(Wrong):
        find(reply(arguments=arguments, objects=objects))


def test_what_is_to_be_changed_is_judged_on_the_original_objects():
    now = swap(1, values=np.array([4.0]))
    expected = [mx([1.0, 2.0]), mx([4.0], on=cpu(1))]
    find(reply(arguments=[now, 7], objects=now), xs=expected)
    with pytest.raises(Wrong):                       # not changed
        find(reply(), xs=expected)
    rebound = swap(1, values=np.array([4.0]), identity=5)
    with pytest.raises(Wrong, match="another array"):
        find(reply(arguments=[rebound, 7]), xs=expected)
    moved = swap(1, values=np.array([4.0]), device=cpu(0))
    with pytest.raises(Wrong):
        find(reply(arguments=[moved, 7], objects=moved), xs=expected)


def test_memory_that_is_shared_is_seen():
    whole = swap(0, memory=(100, 116))
    for memory, fine in (((84, 100), True), ((116, 132), True), ((92, 101), False),
                         ((115, 116), False), ((100, 116), False), ((90, 120), False)):
        returned = {"a": [came([1.0, 2.0], memory=memory)]}
        if fine:
            find(reply(returned, objects=whole))
        else:
            with pytest.raises(Wrong, match="shares memory"):
                find(reply(returned, objects=whole))
    two = [came([1.0, 2.0], memory=(0, 16)), came([1.0], memory=(8, 16))]
    with pytest.raises(Wrong, match="share memory"):
        find(reply(two))


def test_an_error_is_that_which_is_due():
    case = Case("", "f", [], raises=ValueError)
    for kinds, right in ((["ValueError", "Exception"], True), (["Mine", "ValueError"], True),
                         (["TypeError"], False)):
        one = Reply(None, cases.Raised(kinds[0], kinds, "why"), [], [])
        if right:
            cases.find_fault(case, [], [], one)
        else:
            with pytest.raises(Wrong):
                cases.find_fault(case, [], [], one)
    with pytest.raises(Wrong, match="no ValueError"):
        cases.find_fault(case, [], [], Reply(None, None, [], []))
    with pytest.raises(cases.Broke):
        cases.find_fault(Case("", "f", []), [], [], Reply(
            None, cases.Raised("KeyError", ["KeyError"], "x"), [], []))
