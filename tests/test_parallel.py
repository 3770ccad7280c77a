"""Splitting a batch and the all-reduces, against NumPy, Gluon and MXNet's KVStore."""

import math
from collections import Counter, defaultdict

from helpers import schedules  # first, so that MXNet finds its settings

# isort: split
import mxnet as mx
import numpy as np
import pytest
from common import cpus, raises
from hypothesis import given, settings
from hypothesis import strategies as st
from lift import lift
from mxnet import gluon

from helpers.parallel import allreduce, assert_replicas_equal, split_and_load

# What chapter 03's deeper notebook teaches besides, from the notebook itself.
DEEPER = lift("more_all_reduces", "ADD", "COPY", "Message", "evenness", "edges", "tree_of_ranks",
              "in_rounds", "double_tree")


def tree_allreduce(arrays):
    schedules.run(schedules.tree(len(arrays)), arrays, num_chunks=1)


def ring_allreduce(arrays):
    schedules.run(schedules.ring(len(arrays)), arrays, num_chunks=len(arrays))


def double_tree_allreduce(arrays):
    schedules.run(DEEPER.double_tree(len(arrays), num_chunks=8), arrays, num_chunks=8)


FOUR = [allreduce, tree_allreduce, ring_allreduce, double_tree_allreduce]
DTYPES = ["float16", "float32", "float64", "int32", "int64", "uint8"]
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
each_allreduce = pytest.mark.parametrize("reduce", FOUR, ids=lambda f: f.__name__)


def nd(values, device=None, dtype="float32"):
    return mx.nd.array(np.asarray(values), ctx=device or mx.cpu(0), dtype=dtype)


# ---------------------------------------------------------------------- split_and_load


def counted(n, trailing, dtype):
    """A batch whose entries differ from their neighbours, and from example to example."""
    return (np.arange(n * math.prod(trailing)).reshape(n, *trailing) % 251).astype(dtype)


@st.composite
def batches(draw):
    k = draw(st.integers(1, 8))
    n = draw(st.integers(k, 40))
    trailing = draw(st.lists(st.integers(1, 4), max_size=3))
    return k, counted(n, trailing, draw(st.sampled_from(DTYPES)))


@given(batches())
@quick
def test_shards_are_numpys_and_gluons(case):
    k, batch = case
    data = nd(batch, dtype=batch.dtype)
    for even in [False, True] if len(batch) % k == 0 else [False]:
        shards = split_and_load(data, cpus(k), even=even)
        assert isinstance(shards, list)
        assert [s.context for s in shards] == cpus(k)
        assert all(s.dtype == batch.dtype for s in shards)
        expected = np.array_split(batch, k)
        assert [s.shape for s in shards] == [e.shape for e in expected]
        for shard, part in zip(shards, expected, strict=True):
            np.testing.assert_array_equal(shard.asnumpy(), part)
        whole = np.concatenate([s.asnumpy() for s in shards])
        np.testing.assert_array_equal(whole, batch)
        theirs = gluon.utils.split_and_load(data, cpus(k), even_split=even)
        assert [s.context for s in theirs] == [s.context for s in shards]
        for shard, other in zip(shards, theirs, strict=True):
            np.testing.assert_array_equal(shard.asnumpy(), other.asnumpy())
    np.testing.assert_array_equal(data.asnumpy(), batch)  # and the batch is as it was


@given(st.integers(1, 8), st.integers(0, 30), st.integers(1, 4))
@quick
def test_labels_stay_with_their_examples(k, more, width):
    n = k + more
    order = np.random.default_rng(n).permutation(n)
    examples = nd(np.repeat(order[:, None], width, axis=1))
    labels = nd(order, dtype="int32")
    shards = split_and_load(examples, cpus(k), even=False)
    for x, y in zip(shards, split_and_load(labels, cpus(k), even=False), strict=True):
        assert x.context == y.context
        np.testing.assert_array_equal(x.asnumpy(), np.repeat(y.asnumpy()[:, None], width, axis=1))


def test_the_longer_shards_come_first():
    shards = split_and_load(nd(np.arange(10)), cpus(3), even=False)
    assert [s.asnumpy().tolist() for s in shards] == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_devices_in_the_order_given():
    order = [mx.cpu(3), mx.cpu(0), mx.cpu(2)]
    for given_as in (order, tuple(order)):
        shards = split_and_load(nd(np.arange(6)), given_as)
        assert [s.context for s in shards] == order
        assert [s.asnumpy().tolist() for s in shards] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("home", [0, 1])
def test_a_shard_that_stays_at_home_aliases_the_batch(home):
    data = nd(np.arange(6), device=mx.cpu(home))
    shards = split_and_load(data, cpus(2))
    shards[home][:] = -1
    shards[1 - home][:] = -2  # moved, so the batch doesn't see this
    expected = np.arange(6)
    expected[3 * home : 3 * home + 3] = -1
    assert data.asnumpy().tolist() == expected.tolist()
    data[:] = 9
    assert shards[home].asnumpy().tolist() == [9] * 3
    assert shards[1 - home].asnumpy().tolist() == [-2] * 3


@pytest.mark.parametrize("np_mode", [False, True])
def test_splits_mx_np_arrays_too(np_mode):
    batch = counted(10, [2], "float32")
    with mx.util.np_shape(np_mode), mx.util.np_array(np_mode):
        shards = split_and_load(mx.np.array(batch), cpus(3), even=False)
        assert all(type(s) is mx.np.ndarray for s in shards)
        assert [s.ctx for s in shards] == cpus(3)
        for shard, part in zip(shards, np.array_split(batch, 3), strict=True):
            np.testing.assert_array_equal(shard.asnumpy(), part)


def test_too_few_examples_where_gluon_fails_later_or_elsewhere():
    few = "split_and_load\\(data\\)", "2 examples", "3 devices", "at least one"
    with pytest.raises(mx.MXNetError):
        gluon.utils.split_and_load(nd([1, 2]), cpus(3), even_split=False)
    with raises(ValueError, *few):
        split_and_load(nd([1, 2]), cpus(3), even=False)
    with mx.util.np_shape(True), mx.util.np_array(True):
        data = mx.np.array([1, 2])
        lengths = [len(s) for s in gluon.utils.split_and_load(data, cpus(3), even_split=False)]
        assert lengths == [1, 1, 0]
        with raises(ValueError, *few):
            split_and_load(data, cpus(3), even=False)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("k", [1, 2])
def test_an_empty_batch(even, k):
    with mx.util.np_shape(True):
        for data in (mx.np.zeros((0, 2)), mx.np.zeros((0, 2)).as_nd_ndarray()):
            with raises(ValueError, "split_and_load\\(data\\)", "0 examples", f"{k} device"):
                split_and_load(data, cpus(k), even=even)


def test_a_single_number():
    with mx.util.np_shape(True), raises(TypeError, "split_and_load\\(data\\)", "first axis"):
        split_and_load(mx.np.array(3.0), cpus(1))


def test_an_uneven_batch_where_even_is_asked_for():
    for k, n in [(3, 7), (2, 5), (4, 6)]:
        parts = "even=True", f"{n} examples", f"{k} devices", "even=False"
        with raises(ValueError, *parts):
            split_and_load(nd(np.arange(n)), cpus(k))
        with raises(ValueError, *parts):
            split_and_load(nd(np.arange(n)), cpus(k), even=True)


@pytest.mark.parametrize("none", [[], ()])
def test_no_devices(none):
    with raises(ValueError, "devices=\\[\\]", "at least one device"):
        split_and_load(nd(np.arange(4)), none)


@pytest.mark.parametrize("order", [[0, 0], [0, 1, 0], [1, 2, 2]])
def test_a_device_twice(order):
    chosen = [mx.cpu(i) for i in order]
    named = ", ".join(f"'cpu\\({i}\\)'" for i in order)
    with raises(ValueError, f"devices=\\[{named}\\]", "twice", "different"):
        split_and_load(nd(np.arange(6)), chosen)


@pytest.mark.parametrize(
    "data, named", [(np.arange(4), "ndarray"), ([1, 2, 3, 4], "list"), (None, "NoneType")]
)
def test_no_ndarray(data, named):
    with raises(TypeError, "split_and_load\\(data\\)", f"not {named}", "mx.nd.array\\(data\\)"):
        split_and_load(data, cpus(2))


# ---------------------------------------------------------------------- all-reduce


def replicas(k, shape, dtype):
    """Device r holds r+1 times a pattern, in numbers so small that every sum is exact."""
    most = {"int8": 127, "uint8": 255, "float16": 2048}.get(dtype, 9999) // 36  # 1 + ... + 8
    pattern = np.arange(math.prod(shape)).reshape(shape) % most + 1
    return [nd((r + 1) * pattern, d, dtype) for r, d in enumerate(cpus(k))], pattern


def check(reduce, k, shape, dtype="float32", given_as=list):
    """What an all-reduce promises; AssertionError where `reduce` doesn't keep it."""
    arrays, pattern = replicas(k, shape, dtype)
    expected = np.sum([a.asnumpy() for a in arrays], axis=0)
    np.testing.assert_array_equal(expected, k * (k + 1) // 2 * pattern)
    argument = given_as(arrays)
    try:
        reduce(argument)
    except TypeError as error:  # a tuple takes no assignment
        raise AssertionError("another object in its place") from error
    for r, array in enumerate(arrays):
        assert argument[r] is array, f"another object in its place on device {r}"
    values = [a.asnumpy() for a in arrays]
    for r, array in enumerate(arrays):  # a write to one leaves the others as they are
        array[:] = 100 + r  # never a sum's first entry, which is at most 36
        for other, a in enumerate(arrays):
            left = values[other] if other > r else 100 + other
            assert (a.asnumpy() == left).all(), f"replicas {r} and {other} share memory"
    for r, array in enumerate(arrays):
        assert array.context == mx.cpu(r), f"replica {r} moved to {array.context}"
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        np.testing.assert_array_equal(values[r], expected, err_msg=f"wrong values on device {r}")


shapes = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    st.integers(1, 40).map(lambda n: (n,)),
)


@each_allreduce
@given(
    st.integers(1, 8), shapes, st.sampled_from([*DTYPES, "int8"]), st.sampled_from([list, tuple])
)
@quick
def test_every_replica_is_numpys_sum(reduce, k, shape, dtype, given_as):
    check(reduce, k, shape, dtype, given_as)


@each_allreduce
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("shape", [(1,), (1, 1), (7,), (8, 3), (840,)])
def test_each_number_of_devices(reduce, k, shape):
    check(reduce, k, shape)
    check(reduce, k, shape, "float64", tuple)


@each_allreduce
def test_one_device_keeps_its_values(reduce):
    values = np.random.default_rng(0).normal(size=(3, 5))
    array = nd(values, dtype="float64")
    assert reduce([array]) is None
    np.testing.assert_array_equal(array.asnumpy(), values)


@each_allreduce
def test_views_made_before_see_the_sum(reduce):
    """In place: in the memory that a parameter's gradient already has."""
    arrays = [nd([[r, 2], [3, 4]], d) for r, d in enumerate(cpus(3))]
    views = [a.reshape(-1) for a in arrays]
    reduce(arrays)
    assert [v.asnumpy().tolist() for v in views] == [[3, 6, 9, 12]] * 3


@each_allreduce
def test_gradients_are_summed_where_parameters_keep_them(reduce):
    weights = [nd([1, 2, 3], d) for d in cpus(3)]
    for w in weights:
        w.attach_grad()
    with mx.autograd.record():
        losses = [(w * w * (r + 1)).sum() for r, w in enumerate(weights)]
    mx.autograd.backward(losses)
    reduce([w.grad for w in weights])  # 2w(1 + 2 + 3)
    assert [w.grad.asnumpy().tolist() for w in weights] == [[12, 24, 36]] * 3


@each_allreduce
def test_devices_in_any_order(reduce):
    arrays = [nd([10**i] * 5, mx.cpu(d)) for i, d in enumerate([4, 1, 6, 0])]
    reduce(arrays)
    assert [a.context for a in arrays] == [mx.cpu(d) for d in [4, 1, 6, 0]]
    assert all(a.asnumpy().tolist() == [1111] * 5 for a in arrays)


@each_allreduce
@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_as_mxnets_kvstore_does(reduce, kind, k):
    rng = np.random.default_rng(k)
    arrays = [nd(rng.normal(size=(17, 5)), d) for d in cpus(k)]
    exact = np.sum([a.asnumpy().astype("float64") for a in arrays], axis=0)
    theirs = [a.zeros_like() for a in arrays]
    store = mx.kv.create(kind)
    store.init("gradient", arrays[0].zeros_like())
    store.push("gradient", arrays)
    store.pull("gradient", out=theirs)
    reduce(arrays)
    for ours, other in zip(arrays, theirs, strict=True):
        np.testing.assert_allclose(ours.asnumpy(), other.asnumpy(), rtol=0, atol=2e-6)
        np.testing.assert_allclose(ours.asnumpy(), exact, rtol=0, atol=2e-6)
    assert_replicas_equal(arrays)


@each_allreduce
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_everyone(reduce, bad):
    arrays = [nd([1, bad if r == 1 else 1, 1], d) for r, d in enumerate(cpus(3))]
    reduce(arrays)
    for array in arrays:
        np.testing.assert_array_equal(array.asnumpy(), [3, bad, 3])


# A check that nothing fails shows nothing. These all fail; most were published by someone.


def sums_but_does_not_broadcast(arrays):  # d2l-en #1596: a year in print
    for array in arrays[1:]:
        arrays[0][:] += array.copyto(arrays[0].context)


def averages(arrays):
    allreduce(arrays)
    for array in arrays:
        array[:] = (array / len(arrays)).astype(array.dtype)


def puts_one_array_everywhere(arrays):
    sums_but_does_not_broadcast(arrays)
    for r in range(1, len(arrays)):
        arrays[r] = arrays[0]


def makes_new_arrays(arrays):
    total = sum(a.asnumpy() for a in arrays)
    arrays[:] = [nd(total, a.context, a.dtype) for a in arrays]


def returns_the_sum(arrays):
    total = sum(a.asnumpy() for a in arrays)
    return [nd(total, a.context, a.dtype) for a in arrays]


def shares_memory_behind_the_objects(arrays):
    allreduce(arrays)
    for array in arrays[1:]:
        view = arrays[0].reshape(array.shape)
        view.handle, array.handle = array.handle, view.handle


def moves_to_the_first_device(arrays):
    allreduce(arrays)
    for array in arrays[1:]:
        copy = array.copyto(arrays[0].context)
        copy.handle, array.handle = array.handle, copy.handle


def broadcasts_without_a_sum(arrays):
    for array in arrays[1:]:
        array[:] = arrays[0].copyto(array.context)


def forgets_the_last(arrays):
    allreduce(arrays[:-1])
    arrays[-1][:] = arrays[0].copyto(arrays[-1].context)


def counts_the_first_twice(arrays):
    first = arrays[0].copy()
    allreduce(arrays)
    for array in arrays:
        array += first.copyto(array.context)


def adds_sums_to_sums(arrays):
    """Each device adds all the others, of which the earlier ones hold sums by then."""
    for array in arrays:
        for other in arrays:
            if other is not array:
                array += other.copyto(array.context)


def ring(arrays, off=0, steps=None, drop=False):
    """A ring in NumPy, with the mistakes that rings have had (pytorch #31572 is one)."""
    k, size = len(arrays), arrays[0].size
    data = [a.asnumpy().reshape(-1).copy() for a in arrays]
    cuts = [size // k * c if drop else size * c // k for c in range(k + 1)]
    for step in range(2 * (k - 1) if steps is None else steps):
        chunks = [(i - step + (off if step >= k - 1 else 0)) % k for i in range(k)]
        sent = [data[i][cuts[c] : cuts[c + 1]].copy() for i, c in enumerate(chunks)]
        for i, c in enumerate(chunks):
            mine = data[(i + 1) % k][cuts[c] : cuts[c + 1]]
            mine[:] = sent[i] + (mine if step < k - 1 else 0)
    for array, values in zip(arrays, data, strict=True):
        array[:] = nd(values.reshape(array.shape), array.context, array.dtype)


def ring_off_by_one_chunk(arrays):
    ring(arrays, off=1)


def ring_one_step_short(arrays):
    ring(arrays, steps=2 * (len(arrays) - 1) - 1)


def ring_without_its_second_half(arrays):
    ring(arrays, steps=len(arrays) - 1)


def ring_that_drops_the_rest(arrays):
    """Right where the number of devices divides the size."""
    ring(arrays, drop=True)


def tree_of_full_levels(arrays):
    """Right for 2, 4, 8 devices."""
    whole = 2 ** int(math.log2(len(arrays)))
    tree_allreduce(arrays[:whole])
    for array in arrays[whole:]:
        array[:] = arrays[0].copyto(array.context)


WRONG = {
    sums_but_does_not_broadcast: "wrong values",
    averages: "wrong values",
    puts_one_array_everywhere: "another object",
    makes_new_arrays: "another object",
    returns_the_sum: "wrong values",
    shares_memory_behind_the_objects: "share memory",
    moves_to_the_first_device: "moved to",
    broadcasts_without_a_sum: "wrong values",
    forgets_the_last: "wrong values",
    counts_the_first_twice: "wrong values",
    adds_sums_to_sums: "wrong values",
    ring_off_by_one_chunk: "wrong values",
    ring_one_step_short: "wrong values",
    ring_without_its_second_half: "wrong values",
}


@pytest.mark.parametrize("given_as", [list, tuple])
@pytest.mark.parametrize("k, dtype", [(2, "float32"), (3, "int32"), (4, "float16"), (8, "uint8")])
@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_the_check_rejects(wrong, k, dtype, given_as):
    with pytest.raises(AssertionError, match=WRONG[wrong]):
        check(wrong, k, (2, 12), dtype, given_as)


@pytest.mark.parametrize(
    "wrong, right_for, wrong_for",
    [
        (ring_that_drops_the_rest, [(2, (8,)), (4, (8,))], [(3, (8,)), (5, (2, 4)), (2, (1,))]),
        (tree_of_full_levels, [(1, (8,)), (4, (8,))], [(3, (8,)), (5, (2, 4)), (7, (1,))]),
    ],
)
def test_the_check_rejects_what_is_right_sometimes(wrong, right_for, wrong_for):
    for k, shape in right_for:
        check(wrong, k, shape)
    for k, shape in wrong_for:
        with pytest.raises(AssertionError, match="wrong values"):
            check(wrong, k, shape)


def test_the_check_accepts_a_ring_without_mistakes():
    for k in range(1, 9):
        check(ring, k, (3, 5))
        check(ring, k, (1,))


# ---------------------------------------------------------------------- what travels


@pytest.fixture
def journal(monkeypatch):
    """Every message, in order: sender's device, receiver's, bytes."""
    sent = []

    def note(array, receiver):
        size = array.size * np.dtype(array.dtype).itemsize
        sent.append((array.context.device_id, receiver.device_id, size))

    copyto = mx.nd.NDArray.copyto

    def noting(array, other):
        note(array, getattr(other, "context", other))  # of an array, or a device itself
        return copyto(array, other)

    monkeypatch.setattr(mx.nd.NDArray, "copyto", noting)
    return sent


def totals(journal, end):
    count = Counter()
    for message in journal:
        count[message[end]] += message[2]
    return count


def rounds(journal):
    """Time until all is there, if a device takes part in one message of one round at a time."""
    free = defaultdict(int)
    for sender, receiver, _ in journal:
        free[sender] = free[receiver] = max(free[sender], free[receiver]) + 1
    return max(free.values(), default=0)


@pytest.mark.parametrize("dtype, width", [("float32", 4), ("float64", 8), ("uint8", 1)])
@pytest.mark.parametrize("k", range(1, 9))
def test_bytes_of_the_ring(journal, k, dtype, width):
    size = 840  # which each k divides
    check(ring_allreduce, k, (size,), dtype)
    least = 2 * (k - 1) * size * width // k
    for end in (0, 1):
        assert totals(journal, end) == {r: least for r in range(k) if k > 1}
    assert {(s, r) for s, r, _ in journal} == {(i, (i + 1) % k) for i in range(k) if k > 1}
    assert len(journal) == 2 * (k - 1) * k


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("size", [1, 3, 7, 100])
def test_bytes_of_the_ring_where_chunks_differ(journal, k, size):
    check(ring_allreduce, k, (size,))
    assert sum(totals(journal, 0).values()) == 2 * (k - 1) * size * 4
    assert max(totals(journal, 0).values(), default=0) <= 2 * (k - 1) * math.ceil(size / k) * 4


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("size", [1, 840])
def test_bytes_of_sum_and_broadcast(journal, k, size):
    check(allreduce, k, (size,))
    expected = {0: (k - 1) * size * 4} | {r: size * 4 for r in range(1, k)} if k > 1 else {}
    assert totals(journal, 0) == expected
    assert totals(journal, 1) == expected
    assert rounds(journal) == 2 * (k - 1)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("size", [1, 840])
def test_bytes_and_rounds_of_the_tree(journal, k, size):
    check(tree_allreduce, k, (size,))
    assert sum(totals(journal, 0).values()) == 2 * (k - 1) * size * 4
    assert all(bytes_ == size * 4 for _, _, bytes_ in journal)
    assert rounds(journal) == 2 * math.ceil(math.log2(k))


# ---------------------------------------------------------------------- bad input

each_checked = pytest.mark.parametrize(
    "function", [allreduce, assert_replicas_equal], ids=lambda f: f.__name__
)


@each_checked
@pytest.mark.parametrize("none", [[], ()])
def test_no_arrays(function, none):
    with raises(ValueError, "arrays=\\[\\]", "at least one array"):
        function(none)


@each_checked
@pytest.mark.parametrize(
    "make, parts",
    [
        (lambda a, b: [nd([1, 2], a), nd([1], b)], ["same shape", "\\(2,\\)", "\\(1,\\)"]),
        (lambda a, b: [nd([[1, 2]], a), nd([1, 2], b)], ["same shape", "\\(1, 2\\)", "\\(2,\\)"]),
        (
            lambda a, b: [nd([1], a), nd([1], b, "float64")],
            ["same dtype", "'float32'", "'float64'"],
        ),
        (lambda a, b: [nd([1], b), nd([2], b)], ["'cpu\\(1\\)', 'cpu\\(1\\)'", "appears twice"]),
        (
            lambda a, b: [nd([1], a), nd([1], b), nd([1], a)],
            ["'cpu\\(0\\)', 'cpu\\(1\\)', 'cpu\\(0\\)'", "a device appears twice"],
        ),
    ],
    ids=["size", "shape", "dtype", "device", "device-of-three"],
)
def test_arrays_that_do_not_fit(function, make, parts):
    arrays = make(mx.cpu(0), mx.cpu(1))
    before = [a.asnumpy() for a in arrays]
    with raises(ValueError, "arrays", *parts):
        function(arrays)
    for array, values in zip(arrays, before, strict=True):  # refused before anything changed
        np.testing.assert_array_equal(array.asnumpy(), values)


@each_checked
@pytest.mark.parametrize(
    "arrays, named",
    [
        ([np.ones(3), np.ones(3)], "ndarray"),
        ([nd([1]), np.ones(1)], "ndarray"),
        ([[1, 2], [1, 2]], "list"),
        ([None], "NoneType"),
        ([3.0], "float"),
    ],
)
def test_no_ndarrays(function, arrays, named):
    with raises(TypeError, "arrays", "needs NDArrays", f"not {named}"):
        function(arrays)


def test_mx_np_arrays_are_told_what_to_do():
    arrays = [mx.np.full((2, 3), r + 1, ctx=d) for r, d in enumerate(cpus(3))]
    with raises(TypeError, "arrays", "mx.nd arrays", "as_nd_ndarray\\(\\)"):
        allreduce(arrays)
    allreduce([a.as_nd_ndarray() for a in arrays])  # which does help: they share memory
    assert all((a.asnumpy() == 6).all() for a in arrays)


# ---------------------------------------------------------------------- assert_replicas_equal


def on_devices(*values, dtype="float32"):
    return [nd(v, d, dtype) for v, d in zip(values, cpus(len(values)), strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_equal_replicas_pass(dtype, k):
    values = counted(3, [4], dtype)
    assert_replicas_equal(on_devices(*[values] * k, dtype=dtype))
    assert_replicas_equal(tuple(on_devices(*[values] * k, dtype=dtype)), tolerance=1e-6)
    assert_replicas_equal(on_devices(*[values * 0] * k, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stale", [0, 1, 2])
def test_one_stale_replica_is_named(dtype, stale):
    arrays = on_devices([4, 5, 6], [4, 5, 6], [4, 5, 6], dtype=dtype)
    arrays[stale][1] = 2
    named = f"cpu\\({stale or 1}\\)"
    with raises(AssertionError, "cpu\\(0\\)", named, "by up to 3 ", "largest entry is 6:"):
        assert_replicas_equal(arrays)


@pytest.mark.parametrize("scale", [1.0, 1e6, 2.0**-20, -1.0])
def test_tolerance_is_a_share_of_the_largest_entry(scale):
    first, second = np.array([-100.0, 1.0]) * scale, np.array([-100.0, 1.5]) * scale
    for arrays in (on_devices(first, second, dtype="float64"), on_devices(first, first, second)):
        assert_replicas_equal(arrays, tolerance=0.0051)
        for tolerance in (0.0049, 0.0):
            with pytest.raises(AssertionError, match="differ by up to"):
                assert_replicas_equal(arrays, tolerance)


def test_tolerance_is_a_share_of_the_first_arrays_entries():
    assert_replicas_equal(on_devices([100.0], [1.0]), tolerance=0.995)
    with pytest.raises(AssertionError):
        assert_replicas_equal(on_devices([1.0], [100.0]), tolerance=0.995)
    with pytest.raises(AssertionError):  # no share of nothing is large enough
        assert_replicas_equal(on_devices([0.0], [1e-30]), tolerance=0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [{0}, {1}, {2}, {0, 1, 2}])
@pytest.mark.parametrize("tolerance", [0.0, 0.5])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf
def test_what_is_not_finite_equals_nothing(bad, where, tolerance):
    arrays = on_devices(*([1.0, bad if r in where else 2.0, 3.0] for r in range(3)))
    with pytest.raises(AssertionError, match="differ by up to"):
        assert_replicas_equal(arrays, tolerance)


def test_arrays_without_entries_are_equal():
    with mx.util.np_shape(True):
        assert_replicas_equal([mx.np.ones((0, 2), ctx=d).as_nd_ndarray() for d in cpus(2)])


def test_the_smallest_int8_has_a_size():
    """Its absolute value is no int8: NumPy's abs gives -128 there."""
    arrays = on_devices([-128, 0], [-128, 1], dtype="int8")
    assert_replicas_equal(arrays, tolerance=0.01)
    with raises(AssertionError, "by up to 1 ", "largest entry is 128:"):
        assert_replicas_equal(arrays, tolerance=0.001)
