"""A call that is shown is the call that was made: typed in a notebook, it makes the same again."""

import math

import book
import in_process
import numpy as np
import pytest
from marking import assignment, calls
from marking.cases import Case, Ranks, cpu
from marking.cases import mx as array
from marking.channel import Array, Device

mx = in_process.mxnet    # loaded after helpers


def list_cases(name):
    read, tests = assignment.read_assignment(name), assignment.load_tests(name)
    return read.parameters, [case for exercise in read.exercises for test in exercise.tests
                             for case in tests[test.grade_id]()]


def check_same(found, sent):
    """Raises AssertionError unless a value that was typed is the one that was sent."""
    if callable(sent):
        assert isinstance(found, str)    # a name
    elif isinstance(sent, Array):
        values, due = found if sent.device is None else found.asnumpy(), sent.values
        assert values.dtype == due.dtype and np.array_equal(values, due, equal_nan=True)
        if sent.device:
            assert str(found.context) == str(sent.device)
    elif isinstance(sent, Device):
        assert str(found) == str(sent)
    elif isinstance(sent, dict):
        assert list(found) == list(sent)
        for key in sent:
            check_same(found[key], sent[key])
    elif isinstance(sent, (list, tuple)):
        assert type(found) is type(sent) and len(found) == len(sent)
        for one, other in zip(found, sent):
            check_same(one, other)
    elif isinstance(sent, float) and math.isnan(sent):
        assert math.isnan(found)
    else:
        assert found == sent


def note_calls(name, made):
    """What stands for a function and for `on_each`: they note with what they are called."""
    return {name: lambda *args: made.append(list(args)),
            "on_each": lambda function, given: made.extend(given)}


@pytest.mark.parametrize("name", book.names())
def test_what_is_shown_makes_the_call_again(name):
    parameters, found = list_cases(name)
    typed = 0
    for case in found:
        text, made = calls.write_call(case, parameters), []
        if text.startswith("# with arrays too large to be shown"):
            first = case.cases[0] if isinstance(case, Ranks) else case
            assert calls.is_large(first.args) and "array of shape" in text
            typed += 1
            continue
        if not isinstance(case, Ranks) and case.typed:
            compile(text, "typed", "exec")
            typed += 1
            continue
        first = case.cases[0] if isinstance(case, Ranks) else case
        names = {"mx": mx, "np": np, **{one: one for one in parameters[first.function]},
                 **note_calls(first.function, made)}
        if isinstance(case, Ranks):
            names[first.function] = first.function
        exec(text, names)
        sent = [one.args for one in case.cases] if isinstance(case, Ranks) else [case.args]
        assert len(text) < calls.PAGE
        check_same(made, [list(args) for args in sent])
    assert typed < len(found)


@pytest.mark.parametrize("name", book.names())
def test_a_call_in_short_is_a_line_with_its_numbers(name):
    parameters, found = list_cases(name)
    for case in found:
        line = calls.shorten_call(case, parameters)
        first = case.cases[0] if isinstance(case, Ranks) else case
        assert line.startswith(f"{first.function}(") and "\n" not in line
        assert len(line) <= calls.LINE + len(" on rank 0"), line
        for value in first.args:
            if isinstance(value, int):
                assert str(value) in line


def test_speeds_n_and_costs_are_there():
    case = Case("", "whom", [256, [1600.5, 400], [0, 1 / 3]])
    assert calls.shorten_call(case, {"whom": ["n", "speeds", "costs"]}) == (
        "whom(256, [1600.5, 400], [0, 0.333333])")
    case = Case("", "f", [array(np.zeros((9, 2)), cpu(3)), array([1.5, 2]), [cpu(0)], print])
    assert calls.shorten_call(case, {"f": ["x", "y", "there", "step"]}) == (
        "f(float64 array of shape (9, 2) on cpu(3), float64 [1.5, 2] on cpu(0), [cpu(0)], step)")


def test_what_is_too_long_is_told_by_its_length():
    case = Case("", "f", [list(range(500)), "x", {"a": list(range(99))}])
    assert calls.shorten_call(case, {"f": ["a", "b", "c"]}) == (
        "f(a list of 500, 'x', {a=a list of 99})")
    huge = Case("", "f", [array(np.zeros(calls.LARGEST + 1))])
    text = calls.write_call(huge, {"f": ["x"]})
    assert text == ("# with arrays too large to be shown: "
                    f"f(float64 array of shape ({calls.LARGEST + 1},) on cpu(0))")
