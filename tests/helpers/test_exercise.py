"""your_turn: one line, of the first input that fails, and nothing that stops a notebook."""

import numpy as np
import pytest
from helpers import your_turn

import mxnet as mx
from mxnet import nd

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")


def said(capsys, function, cases):
    your_turn(function, cases)
    return capsys.readouterr().out.strip()


def test_what_is_not_written_is_told_from_what_is_wrong(capsys):
    def half(n): ...

    assert said(capsys, half, [((4,), 2)]) == "half: not written yet"
    half = lambda n: n // 2  # noqa: E731
    half.__name__ = "half"
    assert said(capsys, half, [((4,), 2), ((6,), 3)]) == "half: right on 2 of 2 inputs"
    assert said(capsys, half, [((4,), 2), ((5,), 2.5)]) == "half(5) returned 2, expected 2.5"


def test_an_error_is_printed_with_its_line(capsys):
    def first(items):
        return items[0]

    line = first.__code__.co_firstlineno + 1
    assert said(capsys, first, [(([],), 1)]) == (
        f"first([]) raised IndexError: list index out of range (line {line} of its cell)")


def test_what_was_written_is_named_where_a_given_function_only_tries_it(capsys):
    def stub(number): ...

    def right(number):
        return [number]

    def wrong(number):
        return [0]

    def failing(number):
        raise ValueError("too much\nto be read")

    line = failing.__code__.co_firstlineno + 1
    for keep, due in [
            (stub, "stub: not written yet"), (right, "right: right on 1 of 1 inputs"),
            (wrong, "there_and_back(4) returned 0, expected 4"),
            (failing, f"there_and_back(4) raised ValueError: too much (line {line} of its cell)")]:
        def there_and_back(number, keep=keep):
            return keep(number)[0]

        your_turn(there_and_back, [((4,), 4)], stubs=[keep])
        assert capsys.readouterr().out.strip() == due


@pytest.mark.parametrize("array", [np.array, lambda x: nd.array(x, ctx=mx.cpu(1)), torch.tensor])
def test_arrays_are_copied_compared_and_shown(capsys, array):
    def double(arrays):
        for one in arrays:
            one *= 2
        return arrays

    cases = [(([array([1.0, 2.0])],), [array([2.0, 4.0])])]
    for _ in range(2):    # a second run finds the arguments as they were
        assert said(capsys, double, cases) == "double: right on 1 of 1 inputs"
    wrong = [(([array([1.0, 2.0])],), [array([2.0, 4.5])])]
    assert said(capsys, double, wrong) == (
        "double([[1, 2]]) returned [[2, 4]], expected [[2, 4.5]]")


def test_in_place_it_is_the_argument_that_counts(capsys):
    def in_place(arrays):
        arrays[0] += 1

    def rebinding(arrays):
        return [array + 1 for array in arrays]

    def wrong(arrays):
        arrays[0] += 2

    cases = [(([np.array([1.0])],), [[2.0]])]
    def stub(arrays):
        """What is due."""
        ...

    for function, due in [(in_place, "in_place: right on 1 of 1 inputs"),
                          (stub, "stub: not written yet"),
                          (rebinding, "rebinding([[1]]) left [[1]], expected [[2]]"),
                          (wrong, "wrong([[1]]) left [[3]], expected [[2]]")]:
        your_turn(function, cases, in_place=True)
        assert capsys.readouterr().out.strip() == due


def test_in_place_a_new_array_in_the_list_is_not_the_old_one(capsys):
    def rebinding(arrays):
        arrays[1] = arrays[0].copyto(arrays[1].context)

    arrays = [nd.array([1], ctx=mx.cpu(0)), nd.array([2], ctx=mx.cpu(1))]
    your_turn(rebinding, [((arrays,), [[1], [1]])], in_place=True)
    assert capsys.readouterr().out.strip() == (
        "rebinding([[1], [2]]) left [[1], [2]], expected [[1], [1]]")


def test_arrays_of_two_devices_may_not_meet_and_must_be_where_they_are_due(capsys):
    def without_a_move(first, second):
        return first + second

    def elsewhere(first, second):
        return first + second.as_in_context(first.context)

    def right(first, second):
        return elsewhere(first, second).copyto(second.context)

    arguments = nd.array([1], ctx=mx.cpu(0)), nd.array([2], ctx=mx.cpu(1))
    cases = [(arguments, nd.array([3], ctx=mx.cpu(1)))]
    assert "an operation on arrays of cpu(0) and cpu(1)" in said(capsys, without_a_move, cases)
    assert said(capsys, elsewhere, cases) == (
        "elsewhere([1], [2]) returned the right numbers on cpu(0); expected on cpu(1)")
    assert said(capsys, right, cases) == "right: right on 1 of 1 inputs"
    assert (arguments[0] + arguments[1]).asscalar() == 3, "only there"


@pytest.mark.parametrize(("found", "due", "same"), [
    ((1, 2), [1, 2], True), ([1], [1, 2], False), ({"a": 1}, {"a": 1.0}, True),
    ({"a": 1}, {"b": 1}, False), (0.1 + 0.2, 0.3, True), (True, 1, False), ("1", 1, False),
    (np.ones((2, 1)), np.ones(2), False), ([1, 2], np.array([1, 2]), True),
    ([np.array([1, 2])], [[1, 2]], True), ([1, [2, 3]], [1, 2], False),
    (float("nan"), 1.0, False), (1.001, 1.0, False), (1, "1", False), (object(), 1, False)])
def test_what_counts_as_the_same(capsys, found, due, same):
    said_ = said(capsys, lambda: found, [((), due)])
    assert said_.endswith("right on 1 of 1 inputs") == same, said_
