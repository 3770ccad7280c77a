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
# **In all exercises** a shard keeps its examples' `dtype` and their exact values. Each call
# returns new arrays: whoever writes into a shard changes neither the batch nor any other shard,
# not even one that an earlier call returned. Whatever you are given stays as it is: arrays, and
# lists too. There is at least one example, and at least one device; devices come in any order,
# each named once.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other sizes and other numbers of devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.

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
# Tests that run when it is marked call a function of yours several times, through this one. You
# need not read it.

# %% tags=["driver"]
def in_turn(name, calls):
    """What your function of that name returns for each of `calls`, which are lists of arguments."""
    return [globals()[name](*arguments) for arguments in calls]


# %% [markdown]
# ## 1. Even shards (4 points)
#
# Cut `batch` along its first axis into as many shards of one size as there are devices: the
# first shard on the first device, and so on, in the batch's order.
#
# Where there is nothing to move, `as_in_context` hands back the same array, and a slice is a window
# onto the batch; `copyto` always copies. Raise `ValueError` where the examples
# can't be shared out evenly.
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
batch = mx.nd.arange(12, dtype="int32").reshape((6, 2))
shards = split_even(batch, devices(2))
assert len(shards) == 2, f"{len(shards)} shards for two devices"
assert all(isinstance(s, mx.nd.NDArray) for s in shards), f"a {type(shards[0]).__name__}, not mx.nd"
assert [s.context for s in shards] == devices(2), "a shard is not on its device"
assert shards[0].dtype == batch.dtype, f"shards in {shards[0].dtype}, the batch is in {batch.dtype}"
np.testing.assert_array_equal(shards[1].asnumpy(), [[6, 7], [8, 9], [10, 11]])

# %% nbgrader={"grade_id": "even-care", "points": 2}
batch = mx.nd.arange(12).reshape((6, 2))
shard = split_even(batch, [mx.cpu(0), mx.cpu(1)])[0]
shard[:] = -1
assert batch[0, 0].asscalar() == 0, "writing into a shard changed the batch"
try:
    split_even(mx.nd.arange(5), [mx.cpu(0), mx.cpu(1)])
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("five examples for two devices: no ValueError")

# %% [markdown]
# ## 2. Uneven shards (3 points)
#
# The last batch of an epoch is whatever is left. Now the shards may differ by one example, and
# the longer ones come first: ten examples for three devices make shards of 4, 3 and 3. No
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

# %% nbgrader={"grade_id": "uneven-care", "points": 1}
try:
    split_uneven(mx.nd.arange(2), [mx.cpu(0), mx.cpu(1), mx.cpu(2)])
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("two examples for three devices: no ValueError")

# %% [markdown]
# ## 3. Labels beside their images (3 points)
#
# Training takes the examples in a new order each epoch. Given images, labels and an `order` (a
# NumPy array of example numbers), hand each device its pair of shards: example `order[0]` comes
# first on the first device. A pair is a tuple or a list of two, in a list of all pairs. `order`
# may leave examples out, and it may name one twice, but it names at least one for each device. The
# shards are as long as in exercise 2. (`take` wants `order` as an `mx.nd` array on the images'
# device. Give it an integer type: float32 can't tell large numbers apart.)
#
# Shuffle the images one way and the labels another, and the network still trains, on noise, and
# nothing says so.
#
# About five lines. You may call your `split_uneven`.


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
shapes = [[array.shape for array in pair] for pair in pairs]
assert shapes == [[(4, 2), (4,)], [(3, 2), (3,)]], (
    f"not a pair for each device, of its images and their labels: arrays of shapes {shapes}")
np.testing.assert_array_equal(pairs[0][1].asnumpy(), [3, 1, 4, 0])
for x, y in pairs:
    assert (x.asnumpy()[:, 0] == 10 * y.asnumpy()).all(), "labels beside other images"

# %% nbgrader={"grade_id": "pairs-care", "points": 1}
# More tests of this exercise run when it is marked.

# %% [markdown]
# ## 4. In your words (2 points)
#
# A colleague cuts the training set only once. Before training, each of four devices gets 15,000
# of the 60,000 examples, in the order of the file, and keeps them. In each epoch every device
# takes its own examples in a new order, 25 in a step. Gradients are added up and divided by 100.
# What does that save? What do a step and an epoch still have in common with those that
# `split_pairs` gives you, and what not? For which files is that bad, and how would you cut the
# training set then? A few sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for what is saved and what is the same: no batch is copied to devices during training,
# and each device needs room for a quarter of the examples only. A step's gradient is still the
# mean over 100 different examples, and in an epoch each example is in one batch.
#
# One point for what differs, and a cut: a batch is no longer any 100 of the 60,000, as there are
# always 25 of each part, and a device never sees an example of another part. In a file that is
# sorted, by class or by source, each device then has only some of the classes. The sum over all
# devices doesn't mind. What is found from one device's shard alone does: a loss or an accuracy
# that it reports, or BatchNorm's statistics (chapter 09); and if a device drops out, its classes
# are gone. So shuffle once before the cut, or deal. Other remarks earn this point, too: parts of
# unequal length, which end at different times; all to be cut anew where a device is added.
