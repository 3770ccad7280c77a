# %% [markdown]
# # Assignment 1: splitting a batch
#
# **You will** write the functions that hand a batch of training examples to several devices:
# evenly, unevenly, and with the labels beside their images.
#
# **You need** chapters 01 and 02. **Time**: about an hour. **Points**: 12, of which 2 are for
# words.
#
# **You may use** anything in `mx.nd` and NumPy, but not `gluon.utils.split_and_load` or
# `split_data`: they are what you are asked to write.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other sizes and other numbers of devices, when it is marked.

# %% tags=["given"]
from helpers import devices

import mxnet as mx
import numpy as np

# %% [markdown]
# A batch of ten "images" of two pixels, in which image $i$ holds $10i$ and $10i + 1$, and its
# label is $i$. Wherever an image goes, you can tell where it came from.

# %%
labels = mx.nd.arange(10)
images = mx.nd.stack(10 * labels, 10 * labels + 1, axis=1)
print(images.asnumpy().T)

# %% [markdown]
# ## 1. Even shards (4 points)
#
# Cut `batch` along its first axis into as many shards of one size as there are devices: the
# first shard on the first device, and so on, in the batch's order.
#
# Each shard must be an array of its own: whoever writes into a shard must not change the batch.
# (On one machine `as_in_context` hands back the same array where there is nothing to move, and
# a slice is a window onto the batch. `copyto` always copies.) Raise `ValueError` where the
# examples can't be shared out evenly.
#
# About six lines.


# %% nbgrader={"grade_id": "even", "solution": true}
def split_even(batch, devices):
    """A list of len(devices) shards of `batch` [n, ...], of n / len(devices) examples each."""
    ### BEGIN SOLUTION
    if len(batch) % len(devices):
        raise ValueError(f"{len(batch)} examples for {len(devices)} devices")
    size = len(batch) // len(devices)
    return [batch[i * size : (i + 1) * size].copyto(d) for i, d in enumerate(devices)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "even-values", "points": 2}
batch = mx.nd.arange(12).reshape((6, 2))
shards = split_even(batch, devices(2))
assert len(shards) == 2, f"{len(shards)} shards for two devices"
assert all(isinstance(s, mx.nd.NDArray) for s in shards), f"a {type(shards[0]).__name__}, not mx.nd"
assert [s.context for s in shards] == devices(2), "a shard is not on its device"
np.testing.assert_array_equal(shards[1].asnumpy(), [[6, 7], [8, 9], [10, 11]])
### BEGIN HIDDEN TESTS
rng = np.random.default_rng(1)
for k in (1, 2, 3, 4):
    there = [mx.cpu(i + 1) for i in range(k)]
    values = rng.normal(size=(2 * k, 3, 2)).astype("float32")
    shards = split_even(mx.nd.array(values), there)
    assert isinstance(shards, list) and len(shards) == k, f"k={k}: not a list of {k} shards"
    for i, shard in enumerate(shards):
        assert isinstance(shard, mx.nd.NDArray), f"shard {i} is a {type(shard).__name__}"
        assert shard.context == there[i], f"k={k}: shard {i} is on {shard.context}"
        expected = values[2 * i : 2 * i + 2]
        assert shard.shape == expected.shape, f"k={k}: shard {i} has shape {shard.shape}"
        assert (shard.asnumpy() == expected).all(), f"k={k}: shard {i} has other examples"
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "even-care", "points": 2}
batch = mx.nd.arange(12).reshape((6, 2))
shard = split_even(batch, [mx.cpu(0), mx.cpu(1)])[0]
shard[:] = -1
assert batch[0, 0].asscalar() == 0, "writing into a shard changed the batch"
### BEGIN HIDDEN TESTS
for k, n in ((1, 3), (2, 4), (3, 6)):
    there = [mx.cpu(i) for i in range(k)]
    values = np.arange(2 * n).reshape(n, 2)
    batch = mx.nd.array(values)
    shards = split_even(batch, there)
    for i, shard in enumerate(shards):
        assert shard.size == 2 * n // k, f"{n} examples for {k} devices: a shard of {shard.shape}"
        shard[:] = -1 - i
    assert (batch.asnumpy() == values).all(), f"k={k}: writing into a shard changed the batch"
    for i, shard in enumerate(shards):
        assert (shard.asnumpy() == -1 - i).all(), f"k={k}: shards share memory"
for kind in ("float64", "int32", "uint8"):
    shards = split_even(mx.nd.array([[1], [2]], dtype=kind), [mx.cpu(0), mx.cpu(1)])
    assert all(s.dtype == np.dtype(kind) for s in shards), f"{kind} became {shards[0].dtype}"
for n, k in ((7, 2), (2, 3), (10, 4)):
    try:
        split_even(mx.nd.ones((n, 2)), [mx.cpu(i) for i in range(k)])
    except ValueError:
        continue
    raise AssertionError(f"{n} examples for {k} devices: no ValueError")
### END HIDDEN TESTS

# %% [markdown]
# ## 2. Uneven shards (3 points)
#
# The last batch of an epoch is whatever is left. Now the shards may differ by one example, and
# the longer ones come first: ten examples for three devices make shards of 4, 3 and 3. Nobody's
# example may be lost. Raise `ValueError` where there are fewer examples than devices.
#
# About seven lines.


# %% nbgrader={"grade_id": "uneven", "solution": true}
def split_uneven(batch, devices):
    """A list of len(devices) shards of `batch` [n, ...], whose lengths differ by at most one."""
    ### BEGIN SOLUTION
    n, k = len(batch), len(devices)
    if n < k:
        raise ValueError(f"{n} examples are too few for {k} devices")
    ends = [i * (n // k) + min(i, n % k) for i in range(k + 1)]
    return [batch[a:b].copyto(d) for a, b, d in zip(ends, ends[1:], devices)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "uneven-values", "points": 2}
shards = split_uneven(mx.nd.arange(10), [mx.cpu(0), mx.cpu(1), mx.cpu(2)])
assert [len(s) for s in shards] == [4, 3, 3], f"lengths {[len(s) for s in shards]}"
np.testing.assert_array_equal(shards[1].asnumpy(), [4, 5, 6])
### BEGIN HIDDEN TESTS
rng = np.random.default_rng(2)
for n, k in ((1, 1), (5, 2), (8, 3), (11, 4), (7, 5), (6, 6), (23, 6)):
    there = [mx.cpu(i) for i in range(k)][::-1]
    values = rng.normal(size=(n, 2)).astype("float32")
    shards = split_uneven(mx.nd.array(values), there)
    assert isinstance(shards, list) and len(shards) == k, f"{n} for {k}: not {k} shards"
    for i, (shard, part) in enumerate(zip(shards, np.array_split(values, k))):
        assert shard.shape == part.shape, f"{n} for {k}: shard {i} has shape {shard.shape}"
        assert (shard.asnumpy() == part).all(), f"{n} for {k}: shard {i} has other examples"
        assert shard.context == there[i], f"{n} for {k}: shard {i} is on {shard.context}"
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "uneven-care", "points": 1}
try:
    split_uneven(mx.nd.arange(2), [mx.cpu(0), mx.cpu(1), mx.cpu(2)])
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("two examples for three devices: no ValueError")
### BEGIN HIDDEN TESTS
for n, k in ((1, 2), (3, 4)):
    try:
        split_uneven(mx.nd.ones((n, 2)), [mx.cpu(i) for i in range(k)])
    except ValueError:
        continue
    raise AssertionError(f"{n} examples for {k} devices: no ValueError")
batch = mx.nd.array(np.arange(5), dtype="int32")
shards = split_uneven(batch, [mx.cpu(0), mx.cpu(1)])
assert shards[0].dtype == np.int32, f"int32 became {np.dtype(shards[0].dtype).name}"
for shard in shards:
    shard[:] = -1
assert (batch.asnumpy() == np.arange(5)).all(), "writing into a shard changed the batch"
### END HIDDEN TESTS

# %% [markdown]
# ## 3. Labels beside their images (3 points)
#
# Training takes the examples in a new order each epoch. Given images, labels and an `order` (a
# NumPy array of example numbers), hand each device its pair of shards: example `order[0]` comes
# first on the first device. `order` may leave examples out, and it may name one twice; the
# shards are as long as in exercise 2, and the caller's arrays stay as they are.
#
# Shuffle the images one way and the labels another, and the network still trains, on noise, and
# nothing says so.
#
# About five lines. You may call your `split_uneven` if you copy it into this cell too: each cell
# is read alone.


# %% nbgrader={"grade_id": "pairs", "solution": true}
def split_pairs(images, labels, order, devices):
    """A list of (images, labels), one pair of shards a device, of the examples in `order`."""
    ### BEGIN SOLUTION
    parts = np.array_split(order, len(devices))
    pairs = zip([images.asnumpy()[p] for p in parts], [labels.asnumpy()[p] for p in parts])
    return [(mx.nd.array(x, d, dtype=images.dtype), mx.nd.array(y, d, dtype=labels.dtype))
            for (x, y), d in zip(pairs, devices)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "pairs-values", "points": 2}
labels = mx.nd.arange(10)
images = mx.nd.stack(10 * labels, 10 * labels + 1, axis=1)
order = np.array([3, 1, 4, 0, 5, 9, 2])
pairs = split_pairs(images, labels, order, [mx.cpu(0), mx.cpu(1)])
np.testing.assert_array_equal(pairs[0][1].asnumpy(), [3, 1, 4, 0])
for x, y in pairs:
    assert (x.asnumpy()[:, 0] == 10 * y.asnumpy()).all(), "labels beside other images"
### BEGIN HIDDEN TESTS
rng = np.random.default_rng(3)
for n, m, k in ((9, 9, 2), (9, 7, 3), (6, 11, 4), (5, 3, 1)):
    x, y = rng.normal(size=(n, 2, 2)).astype("float32"), rng.permutation(n).astype("float32")
    order = rng.permutation(n)[:m] if m <= n else rng.integers(0, n, m)
    there = [mx.cpu(k - i) for i in range(k)]
    pairs = split_pairs(mx.nd.array(x), mx.nd.array(y), order.copy(), there)
    assert len(pairs) == k, f"{len(pairs)} pairs for {k} devices"
    for i, part in enumerate(np.array_split(order, k)):
        (images, labels), d = pairs[i], there[i]
        assert images.context == labels.context == d, f"pair {i} of {k} is not on {d}"
        assert images.shape == (len(part), 2, 2), f"pair {i} of {k}: images {images.shape}"
        assert (images.asnumpy() == x[part]).all(), f"pair {i} of {k}: other images"
        assert labels.shape == (len(part),), f"pair {i} of {k}: labels {labels.shape}"
        assert (labels.asnumpy() == y[part]).all(), f"pair {i} of {k}: labels of other images"
### END HIDDEN TESTS

# %% nbgrader={"grade_id": "pairs-care", "points": 1}
# More tests of this exercise run when it is marked.
### BEGIN HIDDEN TESTS
x = mx.nd.array(np.arange(12).reshape(6, 2), dtype="uint8")
y = mx.nd.array(np.arange(6), dtype="int32")
order = np.array([5, 0, 2, 1, 4])
pairs = split_pairs(x, y, order, [mx.cpu(0), mx.cpu(1)])
assert pairs[0][0].dtype == np.uint8 and pairs[0][1].dtype == np.int32, "another type of number"
for images, labels in pairs:
    images[:], labels[:] = 99, 99
assert (order == [5, 0, 2, 1, 4]).all(), "the caller's order was changed"
assert (y.asnumpy() == np.arange(6)).all(), "the caller's labels were changed"
assert (x.asnumpy() == np.arange(12).reshape(6, 2)).all(), "the caller's images were changed"
whole = split_pairs(x, y, np.arange(6), [mx.cpu(0)])[0]
whole[0][:] = 99
assert x.asnumpy().max() == 11, "with one device, writing into a shard changed the batch"
### END HIDDEN TESTS

# %% [markdown]
# ## 4. In your words (2 points)
#
# The last batch of an epoch has three examples, and there are four devices. A library could
# raise an error, leave a device without data, or give the three to three devices only. Which
# would you choose for training, and what must the step that follows take care of? A few
# sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# Any choice that is argued for earns the points; full points say what becomes of the gradient.
# Without data a device has no gradient of this step: its replica must still receive the sum, and
# must not add the gradient it has left from the step before. Whatever the shards are, the sum is
# divided by the three examples that there were, not by four times a shard's size.
