"""`largest_difference`, against differences known by hand and against what it must not overlook."""

import math

import helpers  # noqa: F401  (first, so that MXNet finds its settings)
import mxnet as mx
import numpy as np
import pytest

from helpers.compare import largest_difference

RIGHT = {"weight": np.array([[1.0, -2.0], [3.0, 4.0]]), "bias": np.array([10.0, 0.0])}


def changed(name, place, by):
    arrays = {key: array.copy() for key, array in RIGHT.items()}
    arrays[name][place] += by
    return arrays


def test_equal_arrays_are_not_apart():
    assert largest_difference(RIGHT, RIGHT) == 0
    assert largest_difference(RIGHT["bias"], RIGHT["bias"]) == 0
    assert largest_difference([RIGHT, RIGHT, RIGHT], RIGHT) == 0


@pytest.mark.parametrize(("name", "place", "by", "share"), [
    ("weight", (0, 0), 1.0, 0.25), ("weight", (1, 1), -1.0, 0.25), ("weight", (0, 1), 8.0, 2.0),
    ("bias", 0, 1e-12, 1e-13), ("bias", 1, -0.5, 0.05),
])
def test_it_is_a_share_of_the_arrays_largest_entry(name, place, by, share):
    found = largest_difference(changed(name, place, by), RIGHT)
    assert math.isclose(found.value, share, rel_tol=1e-3)
    assert found.where == name


def test_the_worst_array_counts():
    found = changed("weight", (0, 0), 0.1)
    found["bias"][0] += 5
    assert largest_difference(found, RIGHT) == 0.5
    assert largest_difference(found, RIGHT).where == "bias"


@pytest.mark.parametrize("stale", [0, 1, 2])
@pytest.mark.parametrize("kind", [list, tuple])
def test_every_replica_is_looked_at(stale, kind):
    replicas = [RIGHT] * 3
    replicas[stale] = changed("bias", 0, 1.0)
    found = largest_difference(kind(replicas), RIGHT)
    assert math.isclose(found.value, 0.1)
    assert found.where == f"bias of replica {stale}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["found", "expected", "both"])
def test_what_is_not_finite_equals_nothing(bad, side):
    broken = changed("weight", (1, 0), bad)
    found = broken if side != "expected" else RIGHT
    expected = broken if side != "found" else RIGHT
    difference = largest_difference(found, expected)
    assert difference == math.inf and not difference < 1e300
    assert difference.where == "weight"
    assert "weight of replica 1" in str(largest_difference([expected, found], expected)) or (
        side != "found")


def test_against_zeros_it_is_absolute():
    assert largest_difference(np.array([0.0, 0.25]), np.zeros(2)) == 0.25


def test_a_list_is_compared_place_by_place():
    found = largest_difference([np.ones(2), np.ones(3) * 3], [np.ones(2), np.ones(3) * 2])
    assert found == 0.5 and found.where == "array 1"


def test_mxnets_and_pytorchs_arrays():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    with mx.util.np_array(True):
        theirs = mx.np.array([[1, 2], [3, 5]], dtype="float64")
    for found in (mx.nd.array([[1, 2], [3, 5]], ctx=mx.cpu(1)), theirs,
                  torch.tensor([[1, 2], [3, 5.0]], dtype=torch.bfloat16, requires_grad=True)):
        assert largest_difference(found, np.array([[1.0, 2], [3, 4]])) == 0.25
    assert largest_difference([torch.ones(2), mx.nd.ones(2)], np.ones(2)) == 0


@pytest.mark.parametrize(("found", "expected", "message"), [
    ({}, {}, "nothing to compare"),
    ([], [], "nothing to compare"),
    ([RIGHT["bias"]], RIGHT, "found has array 0, expected weight, bias"),
    ({"bias": RIGHT["bias"]}, RIGHT, "found has bias, expected weight, bias"),
    ([RIGHT, {"bias": RIGHT["bias"]}], RIGHT, "found has bias, expected"),
    (np.ones((2, 1)), np.ones(2), r"shape \(2, 1\), expected \(2,\)"),
    ([np.ones(2), np.ones(3)], [np.ones(2), np.ones(2)], r"array 1 has the shape \(3,\)"),
    ([np.ones(2), np.ones(2)], [np.ones(2)], "found has array 0, array 1, expected array 0"),
])
def test_what_does_not_fit_is_refused(found, expected, message):
    with pytest.raises(ValueError, match=message):
        largest_difference(found, expected)


def test_it_compares_and_prints_like_a_number():
    difference = largest_difference(changed("bias", 0, 1e-11), RIGHT)
    assert difference < 1e-11 and difference <= 1e-11 and difference > 1e-13 and not difference > 1
    assert difference >= 1e-13 and not difference >= 1
    assert max(difference, 0.0) is difference
    assert f"{difference:.0e}" == "1e-12"
    assert str(difference) == f"{difference}" == "1.0e-12 (in bias)"


def test_no_comparison_with_nan_holds():
    difference = largest_difference(RIGHT, RIGHT)
    nan = math.nan
    assert not (difference < nan or difference <= nan or difference > nan or difference >= nan)
    assert difference != nan


@pytest.mark.parametrize("array", [np.array([1 + 2j]), {"a": np.ones(1)}.values()])
def test_what_is_no_array_of_real_numbers_is_refused(array):
    with pytest.raises(TypeError):
        largest_difference(array, np.array([1.0]))
