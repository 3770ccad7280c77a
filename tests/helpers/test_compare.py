"""`largest_difference`, against differences known by hand and against what it must not overlook."""

import math
import pickle

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


def test_it_is_a_share_of_the_arrays_largest_entry_and_the_worst_array_counts():
    assert largest_difference(RIGHT, RIGHT) == 0
    for name, place, by, share in [("weight", (0, 0), 1.0, 0.25), ("weight", (0, 1), 8.0, 2.0),
                                   ("bias", 1, -0.5, 0.05)]:
        found = largest_difference(changed(name, place, by), RIGHT)
        assert math.isclose(found, share) and found.where == name
    both = changed("weight", (0, 0), 0.1)
    both["bias"][0] += 5
    assert largest_difference(both, RIGHT) == 0.5
    assert largest_difference(np.array([0.0, 0.25]), np.zeros(2)) == 0.25, "of zeros: absolute"
    found = largest_difference([np.ones(2), np.ones(3) * 3], [np.ones(2), np.ones(3) * 2])
    assert found == 0.5 and found.where == "array 1"


@pytest.mark.parametrize("stale", [0, 1, 2])
def test_every_replica_is_looked_at(stale):
    replicas = [RIGHT] * 3
    replicas[stale] = changed("bias", 0, 1.0)
    found = largest_difference(replicas, RIGHT)
    assert math.isclose(found, 0.1) and found.where == f"bias of replica {stale}"


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_equals_nothing(bad):
    broken = changed("weight", (1, 0), bad)
    for found, expected in ((broken, RIGHT), (RIGHT, broken), (broken, broken)):
        difference = largest_difference(found, expected)
        assert difference == math.inf and difference.where == "weight"


def test_mxnets_and_pytorchs_arrays():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed: make setup TORCH=1")
    with mx.util.np_array(True):
        theirs = mx.np.array([[1, 2], [3, 5]], dtype="float64")
    for found in (mx.nd.array([[1, 2], [3, 5]], ctx=mx.cpu(1)), theirs,
                  torch.tensor([[1, 2], [3, 5.0]], dtype=torch.bfloat16, requires_grad=True)):
        assert largest_difference(found, np.array([[1.0, 2], [3, 4]])) == 0.25
    assert largest_difference([torch.ones(2), mx.nd.ones(2)], np.ones(2)) == 0


@pytest.mark.parametrize(("found", "expected", "error", "message"), [
    ({}, {}, ValueError, "nothing to compare"),
    ([RIGHT, {"bias": RIGHT["bias"]}], RIGHT, ValueError, "found has bias, expected weight, bias"),
    (np.ones((2, 1)), np.ones(2), ValueError, r"shape \(2, 1\), expected \(2,\)"),
    ([np.ones(2), np.ones(2)], [np.ones(2)], ValueError, "found has array 0, array 1, expected"),
    (np.array([1 + 2j]), np.array([1.0]), TypeError, "complex"),
])
def test_what_does_not_fit_is_refused(found, expected, error, message):
    with pytest.raises(error, match=message):
        largest_difference(found, expected)


def test_it_compares_like_a_number_and_prints_where_it_was_found():
    difference = largest_difference(changed("bias", 0, 1e-11), RIGHT)
    assert 1e-13 < difference < 1e-11 and max(difference, 0.0) is difference
    assert difference != None and not difference < math.nan  # noqa: E711
    assert f"{difference:.0e}" == "1e-12"
    for one in (difference, pickle.loads(pickle.dumps(difference))):
        assert str(one) == repr(one) == f"{one}" == "1.0e-12 (in bias)"
