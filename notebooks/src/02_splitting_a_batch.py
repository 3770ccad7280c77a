# %% [markdown]
# # 02 · Splitting a batch
#
# Data-parallel training begins with a cut: each device gets its part of the batch, a *shard*. It
# is four lines of code, and easily wrong without any error: the last examples can be lost, labels
# separated from their images, or a device left without work.
#
# ## What you'll do
#
# Write `split_and_load` and compare it with Gluon's. See what happens to the gradient of a device
# that gets no data.
#
# ## What you'll learn
#
# - how to cut a batch into nearly equal shards, with every example in exactly one;
# - why images and labels stay together, and how to see it if they don't;
# - why the mean of the shards' means is not the batch's mean if shards differ in size;
# - when a shard shares the batch's memory.
#
# ## What you need
#
# Chapter 01. No GPU. Reading takes {reading time}, running a few seconds.

# %%
import helpers
from helpers import devices

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

# %% [markdown]
# Whether a cut is *right* doesn't depend on cores or GPUs, so we name three
# simulated devices ourselves. The batch has six examples with two features each, and every number
# in it is different: a row that turns up in the wrong place, or twice, or not at all, can be seen.

# %%
three = [mx.cpu(i) for i in range(3)]
batch = nd.arange(12).reshape((6, 2))  # [6, 2]
shards = [batch[0:3].as_in_context(three[0]), batch[3:6].as_in_context(three[1])]
for shard in shards:
    print(shard.context, shard[:, 0].asnumpy())

# %% [markdown]
# Slicing picks the rows, and the slice is where the batch is; `as_in_context` then moves it.
#
# ## Where to cut
#
# **Predict:** ten examples on three devices. Which sizes are fairest, and at which positions must
# we cut?

# %%
size, longer = divmod(10, 3)
ends = [size * i + min(i, longer) for i in range(3 + 1)]
print("cut at", ends, "-> sizes", [b - a for a, b in zip(ends, ends[1:])])

# %% [markdown]
# With $n = qk + r$ examples on $k$ devices, the first $r$ shards have one example more than the
# others. Cut number $i$ is at $qi$, plus one for each longer shard before it: $qi + \min(i, r)$.
#
# A program that gives `n // k` examples to each device leaves out the rest. In an epoch of MNIST
# with batch size 128, that is 468 batches and a last one of 96 examples:

# %%
for k in (2, 3, 5, 7):
    print(f"{k} devices: n // k leaves out {468 * (128 % k) + 96 % k} of 60,000 images in an epoch")

# %% [markdown]
# With reshuffling, different images are left out in each epoch, so you may not notice. In an
# evaluation they are not judged, or count as errors, depending on what the program divides by.
#
# ## The function

# %%
def split_and_load(data, devices, even=True):
    assert not even or len(data) % len(devices) == 0, "uneven shards: pass even=False"
    size, longer = divmod(len(data), len(devices))
    ends = [size * i + min(i, longer) for i in range(len(devices) + 1)]
    return [data[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]


# %% [markdown]
# Uneven shards must be asked for, as in Gluon; you will see below why.

# %%
try:
    split_and_load(batch[:5], three[:2])
except AssertionError as error:
    print("refused:", error)
print([len(shard) for shard in split_and_load(batch[:5], three[:2], even=False)])
assert [s.context for s in split_and_load(batch, three[::-1])] == three[::-1], "in their order"

# %% [markdown]
# ## Labels stay with their images
#
# Images and labels are split by two calls. The cuts depend only on the batch's length and the
# number of devices, so equal lengths give equal cuts. To check that, every pixel of image $i$ is
# $i$, its label.

# %%
labels = nd.arange(10)
images = labels.reshape((10, 1, 1, 1)) * nd.ones((10, 1, 28, 28))  # [10, 1, 28, 28]


def aligned(image_shards, label_shards):
    pairs = zip(image_shards, label_shards, strict=True)
    return all(x.context == y.context and np.array_equal(x[:, 0, 0, 0].asnumpy(), y.asnumpy())
               for x, y in pairs)


x_shards = split_and_load(images, three, even=False)
seen = np.concatenate([x[:, 0, 0, 0].asnumpy() for x in x_shards])
assert seen.tolist() == list(range(10)), "every image once, in order"
assert aligned(x_shards, split_and_load(labels, three, even=False)), "a label lost its image"

# %% [markdown]
# A check is worth something only if it can fail. Here is another cut: one example to each device
# in turn, like dealing cards. For images *and* labels that would be fine.

# %%
dealt = [labels[i::3].as_in_context(d) for i, d in enumerate(three)]
print("dealt labels:", [y.asnumpy().astype(int).tolist() for y in dealt])
assert not aligned(x_shards, dealt), "the check should notice"
wrong = sum((x[:, 0, 0, 0].asnumpy() != y.asnumpy()).sum() for x, y in zip(x_shards, dealt))
assert wrong == 9, f"{wrong} images with another one's label"

# %% [markdown]
# With images in blocks and labels dealt, nine of the ten images have another one's label. Nothing
# raises, all shapes are right, and a network trains on it. So check alignment by values that tell
# examples apart, not by shapes.
#
# ## Against Gluon
#
# `gluon.utils.split_and_load` has the same job; its option is called `even_split`. We compare the
# two on 24 batch sizes, four numbers of devices, even and uneven. An outcome holds each shard's
# device, type and values, or says that the case was refused.

# %%
def outcome(split, n, k, **even):
    try:
        data = nd.arange(2 * n, dtype="int32").reshape((n, 2))
        shards = split(data, [mx.cpu(i) for i in range(k)], **even)
        return [(str(s.context), s.dtype, s.asnumpy().tolist()) for s in shards]
    except (AssertionError, ValueError, mx.base.MXNetError):
        return "refused"


# %% [markdown]
# **Predict:** with `even=False`, what should happen to 2 examples on 3 devices?

# %%
cases = [(n, k, even) for n in range(1, 25) for k in range(1, 5) for even in (True, False)]
ours = [outcome(split_and_load, n, k, even=even) for n, k, even in cases]
theirs = [outcome(gluon.utils.split_and_load, n, k, even_split=even) for n, k, even in cases]
assert ours == theirs, "ours differs from Gluon's"
print(f"the same outcome in {len(cases)} cases, {theirs.count('refused')} of them refused;")
refused = [(n, k) for (n, k, even), b in zip(cases, theirs) if b == "refused" and not even]
print("of these with even=False, (n, k):", refused)
there = nd.arange(4, ctx=three[2]).reshape((2, 2))
for empty in (split_and_load(there, three, even=False),
              gluon.utils.split_and_load(there, three, even_split=False)):
    assert [len(s) for s in empty] == [1, 1, 0], "an empty shard, and no error"

# %% [markdown]
# With `even=False` both still refuse a batch with fewer examples than devices, but by accident:
# `mx.nd` can make an empty slice but can't *copy* it. An empty shard that needs no copy, because
# its device already holds the batch, comes back without an error. In MXNet's NumPy mode (chapter
# 08) neither refuses any of these:

# %%
for n, k in refused:
    with mx.util.np_shape(True), mx.util.np_array(True):
        few, places = mx.np.arange(n), [mx.cpu(i) for i in range(k)]
        both = [split_and_load(few, places, even=False),
                gluon.utils.split_and_load(few, places, even_split=False)]
        lengths = [[len(shard) for shard in shards] for shards in both]
    assert lengths == 2 * [n * [1] + (k - n) * [0]], "one each for the first, then empty shards"

# %% [markdown]
# ## A device without data
#
# What is wrong with a device that gets nothing? Take the model $y = wx$ with the output as its
# loss, so that the gradient on each device is the sum of its inputs. The first step has six
# examples, 1 to 6. The next has only two, 1 and 2, so the third device gets nothing. **Predict**
# the three gradients after the second step.

# %%
w = [nd.ones(1, ctx=d) for d in three]
for replica in w:
    replica.attach_grad()
for n in (6, 2):
    shards = split_and_load(nd.arange(1, n + 1), three[: min(n, 3)])
    with autograd.record():
        losses = [(replica * shard).sum() for replica, shard in zip(w, shards)]
    for loss in losses:
        loss.backward()
    print("gradients", [replica.grad.asscalar() for replica in w])
assert [replica.grad.asscalar() for replica in w] == [1, 2, 11], "11 = 5 + 6, from the step before"

# %% [markdown]
# `backward` overwrote the first two. The third device still has 11, the gradient of the *previous*
# step. The sum over the devices is 14 where the batch's gradient is 3, and nothing raises. An
# *empty* shard in NumPy mode is no cure:

# %%
def gradient_of_nothing(loss_of):
    with mx.util.np_shape(True), mx.util.np_array(True):
        weight = mx.np.array([7.0])
        weight.attach_grad()
        for n in (6, 0):  # six examples, then none
            with autograd.record():
                loss = loss_of(weight, mx.np.ones((n, 1)))
            loss.backward()
        return weight.grad.item()


assert gradient_of_nothing(lambda w, x: (w * x).sum()) == 6, "the old gradient has stayed"
assert gradient_of_nothing(lambda w, x: (x.sum() * w).sum()) == 0, "the right one"

# %% [markdown]
# In the first, `w` meets an empty array, and MXNet 1.9.1 skips that product's backward pass
# (`BinaryBroadcastBackwardUseIn` in `elemwise_binary_broadcast_op.h`). In the second, `x.sum()` is
# a number already, 0, and the gradient is written.
#
# `helpers.split_and_load` is the function that you wrote, with its arguments checked. Every device
# gets at least one example, or you get an error that says why not:

# %%
try:
    helpers.split_and_load(nd.arange(2), three, even=False)
except ValueError as error:
    print(error)

# %% [markdown]
# It also refuses a device that is named twice; chapter 05 shows what Gluon does with one.
#
# ## Uneven shards and the mean
#
# Why should uneven shards be asked for? Ten examples, each with its own number as its "loss".
# **Predict:** is the mean of the three shards' means the mean of all ten?

# %%
losses = split_and_load(nd.arange(10), three, even=False)  # 0 1 2 3 | 4 5 6 | 7 8 9
means = [shard.mean().asscalar() for shard in losses]
print("shard means", means, "-> their mean", sum(means) / 3)
print("mean of all", nd.arange(10).mean().asscalar())

# %% [markdown]
# It isn't: the mean of four examples counts as much as that of three. Apart from rounding (chapter
# 04), a sum doesn't depend on how the examples were divided. So the rule for our own programs and
# for Gluon is: **sum on the devices, add the sums, divide once by the number of examples.** PyTorch
# differs (chapters 13 and 14).

# %%
total = sum(shard.sum().asscalar() for shard in losses)
assert total / 10 == nd.arange(10).mean().asscalar(), "these integers are exact, so the sum is too"

# %% [markdown]
# ## Copy or alias?
#
# `as_in_context` returns the same array if it is already there, and a slice of consecutive rows of
# an `mx.nd` array is a window on its memory. (A slice that isn't one stretch of memory is a copy.)
# **Predict:** the batch is on `cpu(0)`. What is left of it after we write 100 into each shard?

# %%
batch = nd.zeros((4, 2), ctx=mx.cpu(0))
for shard in split_and_load(batch, three[:2]):
    shard[:] = 100
print(batch[:, 0].asnumpy())

# %% [markdown]
# The shard on `cpu(0)` *is* the batch's memory; the other is a copy. Training reads its input and
# doesn't write to it, so the alias saves a copy and does no harm. A program that changes a shard
# in place, say to add noise, changes the batch as well, on the batch's device only. Give it
# `batch.copy()`.
#
# **On GPUs:** the same rule gives another result if the batch is in host memory, as it usually is.
# Then every shard is a copy, and it crosses the link between host and GPU, on threads and streams
# that MXNet 1.9.1 keeps for copies (`src/engine/threaded_engine_perdevice.cc`).
#
# ## A real batch
#
# `load_data` looks for MNIST in the folder that `$COURSE_DATA` names, among its downloads, and on
# the network. If there is none, it says so and uses scikit-learn's handwritten digits. It returns
# NumPy arrays.

# %% tags=["measured"]
mnist = helpers.load_data("mnist", limit=16)
two = devices(2)
print(mnist)

# %%
x_shards = split_and_load(nd.array(mnist.train_images), two)
y_shards = split_and_load(nd.array(mnist.train_labels), two)
for r, (x, y) in enumerate(zip(x_shards, y_shards, strict=True)):
    rows = slice(8 * r, 8 * r + 8)
    assert x.context == y.context == two[r], "a shard is on another device"
    assert (x.asnumpy() == mnist.train_images[rows]).all(), "other images"
    assert (y.asnumpy() == mnist.train_labels[rows]).all(), "a label lost its image"

# %% [markdown]
# To draw a shard, `asnumpy` brings it back to the host.

# %% tags=["measured"]
import matplotlib.pyplot as plt
from helpers.plotting import show

fig, axes = plt.subplots(2, 8, figsize=(7, 2.3), layout="constrained")
for row, x, y in zip(axes, x_shards, y_shards):
    row[0].set_ylabel(x.context)
    for ax, image, label in zip(row, x.asnumpy(), y.asnumpy()):
        ax.imshow(image[0], cmap="gray_r")
        ax.set(title=int(label), xticks=[], yticks=[])
fig.suptitle(f"16 images ({mnist.name}) in two shards of 8, each below its label")
show(fig, alt="Two rows of eight handwritten digits, one row for each device, each digit below its "
              "label.")

# %% [markdown]
# ## Summary
#
# - A batch of $n = qk + r$ examples is cut at $qi + \min(i, r)$: the first $r$ shards have one
#   more.
# - Equal lengths give equal cuts, so labels stay with their images. Check it with values that tell
#   examples apart.
# - For batches of 1 to 24 examples on `cpu(0)`, and 1 to 4 devices, our function and Gluon's have
#   the same outcome.
# - A device that is left out of a step keeps the gradient of an earlier one, and an all-reduce
#   would add it again.
# - With uneven shards, add sums and divide once.
# - In `mx.nd`, a shard of consecutive rows that is already in place is a window on the batch.
#
# **Further reading.** `split_data` and `split_and_load` in MXNet 1.9.1's `gluon/utils.py`.

# %% [markdown]
# ## Exercises
#
# 1. **Undo it.** Write `gather(shards, device)`, which puts the batch together again on one
#    device. Prove it on uneven shards.
# 2. **Dealing cards.** Write `deal_and_load(data, devices)`, which gives device $i$ the examples
#    $i$, $i + k$, $i + 2k$, … Show that images and labels stay aligned if both are dealt. When is
#    it better than blocks?
# 3. **In proportion.** One device is three times as fast as the other. Write `split_by_share(data,
#    devices, shares)` so that 8 examples with shares 3 and 1 give 6 and 2. What must hold for
#    *any* shares?
# 4. **What should a library do? (open)** The last batch of an epoch has three examples, and there
#    are four devices. Gluon's `DataLoader` can `keep` it, `discard` it, or `rollover` it into the
#    next epoch; PyTorch's `DistributedSampler` repeats examples to fill it up. Compare dropping,
#    filling up and letting one device rest on a small problem. What does each do to the gradient,
#    and to the reported accuracy?

# %% [markdown]
# ### Answer 1
#
# Move every shard to the device, then join along the first axis. (Joining before the move
# works here too; two GPUs may crash: chapter 01.)

# %% tags=["solution"]
def gather(shards, device):
    return nd.concat(*[shard.as_in_context(device) for shard in shards], dim=0)


whole = nd.arange(20).reshape((10, 2))
again = gather(split_and_load(whole, three, even=False), three[2])
assert again.context == three[2], "on the device that was asked for"
assert (again.asnumpy() == whole.asnumpy()).all(), "gather must undo the split"

# %% [markdown]
# ### Answer 2
#
# A slice with a step does it. If the data is sorted, by class or by length, blocks give the
# devices different kinds of examples, and dealing gives each nearly the same mix. That matters for
# BatchNorm, whose statistics are those of one device (chapter 09), and for balanced work.

# %% tags=["solution"]
def deal_and_load(data, devices):
    return [data[i :: len(devices)].as_in_context(d) for i, d in enumerate(devices)]


dealt = deal_and_load(labels, three[::-1])
assert [y.context for y in dealt] == three[::-1], "each on its device"
assert [y.asnumpy().tolist() for y in dealt] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]], "in turn"
assert aligned(deal_and_load(images, three), deal_and_load(labels, three)), "both are dealt"

# %% [markdown]
# ### Answer 3
#
# Cut at the rounded running total of the shares. The sizes must add up to $n$; rounding the *cuts*
# and not the sizes ensures that, since the last cut is $n$ itself. Every share must be positive,
# and large enough to give its device at least one example. Chapter 12 builds on this.

# %% tags=["solution"]
def split_by_share(data, devices, shares):
    assert len(devices) == len(shares) and min(shares) > 0, "one positive share a device"
    parts = [sum(shares[:i]) / sum(shares) for i in range(len(shares) + 1)]
    ends = [round(len(data) * part) for part in parts]
    assert all(a < b for a, b in zip(ends, ends[1:])), "a device would get nothing"
    return [data[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]


shards = split_by_share(nd.arange(8), three[1:], [3, 1])
assert [shard.asnumpy().tolist() for shard in shards] == [[0, 1, 2, 3, 4, 5], [6, 7]], "6 and 2"
assert [shard.context for shard in shards] == three[1:], "each on its device"
parts = split_by_share(nd.arange(100), three, [0.2, 0.3, 0.4])
assert [len(part) for part in parts] == [22, 34, 44], "in proportion"
assert (gather(parts, three[0]).asnumpy() == np.arange(100)).all(), "every example once, in order"

# %% [markdown]
# ### Answer 4
#
# A good answer shows numbers for each policy. Dropping loses three examples in each epoch, and in
# an evaluation judges fewer. Filling up counts one example twice, in the gradient and in the
# accuracy. Resting is exact if the resting device's old gradient is left out of the sum, it still
# gets the sum, and the divisor is 3.
