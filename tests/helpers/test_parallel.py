"""Splitting a batch and the all-reduces, against NumPy, Gluon, MXNet's KVStore, closed forms."""

import math

from helpers import schedules  # first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import numpy as np
import pytest
from common import cpus, raises
from mxnet import gluon

from helpers.parallel import allreduce, assert_replicas_equal, split_and_load


def star(arrays):
    schedules.run(schedules.star(len(arrays)), arrays, num_chunks=1)


def tree(arrays):
    schedules.run(schedules.tree(len(arrays)), arrays, num_chunks=1)


def ring(arrays):
    schedules.run(schedules.ring(len(arrays)), arrays, num_chunks=len(arrays))


each_allreduce = pytest.mark.parametrize("reduce", [allreduce, star, tree, ring],
                                         ids=lambda f: f.__name__)


def nd(values, device=None, dtype="float32"):
    return mx.nd.array(np.asarray(values), ctx=device or mx.cpu(0), dtype=dtype)


def on_devices(*values, dtype="float32"):
    return [nd(v, d, dtype) for v, d in zip(values, cpus(len(values)), strict=True)]


# ---------------------------------------------------------------------- split_and_load


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("trailing", "dtype"), [((), "int64"), ((3, 2), "float16")])
def test_shards_are_numpys_and_gluons(k, trailing, dtype):
    for n in range(k, 3 * k + 1):
        batch = np.arange(n * math.prod(trailing)).reshape(n, *trailing).astype(dtype)
        for even in [False, True] if n % k == 0 else [False]:
            data = nd(batch, dtype=dtype)
            shards = split_and_load(data, cpus(k), even=even)
            theirs = gluon.utils.split_and_load(data, cpus(k), even_split=even)
            assert [s.context for s in shards] == cpus(k)
            for ours, numpys, gluons in zip(shards, np.array_split(batch, k), theirs, strict=True):
                assert np.dtype(ours.dtype) == dtype and ours.shape == numpys.shape
                assert (ours.asnumpy() == numpys).all() and (numpys == gluons.asnumpy()).all()
    if k == 3:
        shards = split_and_load(nd(np.arange(10)), cpus(3), even=False)
        assert [len(s) for s in shards] == [4, 3, 3], "the longer ones first"


def test_devices_in_the_order_given_and_what_stays_at_home_aliases_the_batch():
    data, order = nd(np.arange(6)), (mx.cpu(3), mx.cpu(0), mx.cpu(2))
    shards = split_and_load(data, order)
    assert [s.context for s in shards] == list(order)
    for shard in shards:
        shard[:] = -1
    assert data.asnumpy().tolist() == [0, 1, -1, -1, 4, 5]


def test_splits_mx_np_arrays_too():
    with mx.util.np_shape(True), mx.util.np_array(True):
        shards = split_and_load(mx.np.arange(10), cpus(3), even=False)
        assert [type(s) for s in shards] == [mx.np.ndarray] * 3
        assert [s.asnumpy().tolist() for s in shards] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]
        with raises(ValueError, "0 examples"):
            split_and_load(mx.np.zeros((0, 2)), cpus(1))


@pytest.mark.parametrize(("data", "ranks", "even", "error", "words"), [
    (nd([1, 2]), [0, 1, 2], False, ValueError, "2 examples are too few for 3 devices"),
    (nd(np.arange(7)), [0, 1, 2], True, ValueError, "7 examples don't divide by 3.*even=False"),
    (nd([1]), [], True, ValueError, "devices=\\[\\].*at least one"),
    (nd(np.arange(6)), [0, 1, 0], True, ValueError, "'cpu\\(0\\)'.*twice"),
    (np.arange(4), [0, 1], True, TypeError, "not ndarray; mx.nd.array\\(data\\)")])
def test_what_can_not_be_split_is_refused(data, ranks, even, error, words):
    with raises(error, "split_and_load", words):
        split_and_load(data, [mx.cpu(rank) for rank in ranks], even)


# ---------------------------------------------------------------------- all-reduce


@each_allreduce
@pytest.mark.parametrize("k", range(1, 9))
def test_each_replica_becomes_numpys_sum_in_its_own_memory(reduce, k):
    for shape, dtype in [((1,), "float32"), ((3, 5), "int32"), ((7,), "uint8"), ((840,), "float64"),
                         ((2, 2, 9), "float16")]:
        pattern = np.arange(math.prod(shape)).reshape(shape) % 7 + 1  # every sum is exact
        arrays = on_devices(*[(rank + 1) * pattern for rank in range(k)], dtype=dtype)
        views, given = [a.reshape(-1) for a in arrays], tuple(arrays)
        reduce(given)
        expected = k * (k + 1) // 2 * pattern
        for rank, (array, view) in enumerate(zip(arrays, views)):
            assert array.context == mx.cpu(rank) and np.dtype(array.dtype) == dtype
            np.testing.assert_array_equal(array.asnumpy(), expected, f"on device {rank}")
            np.testing.assert_array_equal(view.asnumpy(), expected.ravel(), "in place")
            array[:] = 0  # which the others must not see


@each_allreduce
def test_devices_in_any_order_and_what_is_not_finite_reaches_everyone(reduce):
    arrays = [nd([10**i, math.nan if i == 1 else 1], mx.cpu(d)) for i, d in enumerate([4, 1, 6, 0])]
    reduce(arrays)
    assert [a.context for a in arrays] == [mx.cpu(d) for d in [4, 1, 6, 0]]
    for array in arrays:
        np.testing.assert_array_equal(array.asnumpy(), [1111, math.nan])


@each_allreduce
def test_as_mxnets_kvstore_does(reduce):
    rng = np.random.default_rng(0)
    arrays = on_devices(*rng.normal(size=(5, 17, 5)))
    theirs = [a.zeros_like() for a in arrays]
    store = mx.kv.create("device")
    store.init("gradient", arrays[0].zeros_like())
    store.push("gradient", arrays)
    store.pull("gradient", out=theirs)
    reduce(arrays)
    for ours, other in zip(arrays, theirs, strict=True):
        np.testing.assert_allclose(ours.asnumpy(), other.asnumpy(), rtol=0, atol=2e-6)
    assert_replicas_equal(arrays)


# ---------------------------------------------------------------------- what travels


@pytest.mark.parametrize("k", range(1, 9))
def test_messages_and_rounds_have_their_closed_forms(k):
    size = 840  # which each k divides
    sent = {reduce: schedules.messages_sent(reduce, k, size) for reduce in
            (allreduce, star, tree, ring)}
    for messages in sent.values():
        assert sum(entries for *_, entries in messages) == 2 * (k - 1) * size
    for reduce in (allreduce, star):  # rank 0 receives from each, and sends to each
        assert sorted(sent[reduce]) == sorted([(0, rank, size) for rank in range(1, k)]
                                              + [(rank, 0, size) for rank in range(1, k)])
    steps = 2 * (k - 1)
    assert sorted(sent[ring]) == sorted((i, (i + 1) % k, size // k) for i in range(k)
                                        for _ in range(steps))
    assert len(schedules.ring(k)) == len(schedules.star(k)) == steps
    assert len(schedules.tree(k)) == 2 * math.ceil(math.log2(k))
    for messages in schedules.tree(k):  # a device takes part in one message of a round
        ranks = [rank for message in messages for rank in (message.sender, message.receiver)]
        assert len(ranks) == len(set(ranks))


# ---------------------------------------------------------------------- the judge of chapter 03


def sums_but_does_not_broadcast(arrays):  # d2l-en #1596: a year in print
    for array in arrays[1:]:
        arrays[0][:] += array.copyto(arrays[0].context)


def averages(arrays):
    allreduce(arrays)
    for array in arrays:
        array /= len(arrays)


def makes_new_arrays(arrays):
    total = sum(a.asnumpy() for a in arrays)
    arrays[:] = [nd(total, a.context, a.dtype) for a in arrays]


def counts_the_first_twice(arrays):
    first = arrays[0].copy()
    allreduce(arrays)
    for array in arrays:
        array += first.copyto(array.context)


def ring_without_its_last_round(arrays):
    schedules.run(schedules.ring(len(arrays))[:-1], arrays, num_chunks=len(arrays))


def ring_that_drops_the_rest(arrays):
    """Right where the number of devices divides the size."""
    size = arrays[0].size // len(arrays) * len(arrays)
    ring([a.reshape(-1)[:size] for a in arrays])


def tree_of_full_levels(arrays):
    """Right for 2, 4, 8 devices."""
    whole = 2 ** int(math.log2(len(arrays)))
    tree(arrays[:whole])
    for array in arrays[whole:]:
        arrays[0].copyto(array)


def test_the_judge_passes_what_is_right_and_only_that(capsys):
    for reduce in (allreduce, star, tree, ring):
        schedules.judge(reduce)
        assert capsys.readouterr().out == f"{reduce.__name__} passes on 1 to 8 devices\n"
    for wrong in (sums_but_does_not_broadcast, averages, makes_new_arrays, counts_the_first_twice,
                  ring_without_its_last_round, ring_that_drops_the_rest, tree_of_full_levels):
        with pytest.raises(AssertionError, match="wrong on"):
            schedules.judge(wrong)
    assert schedules.wrong_devices(tree_of_full_levels, 4) == []
    assert schedules.wrong_devices(sums_but_does_not_broadcast, 3) == [1, 2]


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize("function", [allreduce, assert_replicas_equal], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("arrays", "error", "words"), [
    ([], ValueError, "arrays=\\[\\]"),
    (on_devices([[1, 2]], [1, 2]), ValueError, "same shape.*\\(1, 2\\).*\\(2,\\)"),
    ([nd([1]), nd([1], mx.cpu(1), "float64")], ValueError, "same dtype.*float32.*float64"),
    ([nd([1]), nd([1], mx.cpu(1)), nd([1])], ValueError, "a device appears twice"),
    ([nd([1]), np.ones(1)], TypeError, "not ndarray"),
    ([mx.np.ones(3)], TypeError, "as_nd_ndarray\\(\\)"),
], ids=["none", "shape", "dtype", "device", "NumPy", "mx.np"])
def test_arrays_that_do_not_fit_are_refused(function, arrays, error, words):
    with raises(error, "arrays", words):
        function(arrays)


# ---------------------------------------------------------------------- assert_replicas_equal


@pytest.mark.parametrize("dtype", ["float16", "float64", "uint8"])
def test_equal_replicas_pass_and_a_stale_one_is_named(dtype):
    assert_replicas_equal(on_devices(*[[4, 5, 6]] * 3, dtype=dtype))
    for stale in (0, 1, 2):
        arrays = on_devices(*[[4, 5, 6]] * 3, dtype=dtype)
        arrays[stale][1] = 2
        with raises(AssertionError, "cpu\\(0\\)", f"cpu\\({stale or 1}\\)", "by up to 3 "):
            assert_replicas_equal(arrays)


def test_tolerance_is_a_share_of_the_first_arrays_largest_entry():
    arrays = on_devices([-100.0, 1.0], [-100.0, 1.0], [-100.0, 1.5])
    assert_replicas_equal(arrays, tolerance=0.0051)
    with pytest.raises(AssertionError, match="differ by up to 0.5 "):
        assert_replicas_equal(arrays, tolerance=0.0049)
    arrays = on_devices([-128, 0], [-128, 1], dtype="int8")  # NumPy's abs gives -128 there
    assert_replicas_equal(arrays, tolerance=0.01)
    with pytest.raises(AssertionError):
        assert_replicas_equal(arrays, tolerance=0.001)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [{0}, {2}, {0, 1, 2}])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf
def test_what_is_not_finite_equals_nothing(bad, where):
    arrays = on_devices(*([1.0, bad if rank in where else 2.0] for rank in range(3)))
    with pytest.raises(AssertionError, match="differ by up to"):
        assert_replicas_equal(arrays, tolerance=0.5)
