# %% [markdown]
# # 02 · Splitting a batch
#
# Data-parallel training begins with a cut: a batch of examples becomes one *shard* for each
# device. It is four lines of code, and there are three ways to get them wrong without any error:
# to lose the last examples, to separate images from their labels, and to give a device nothing to
# do. Here you write those lines and check them against MXNet's own.
#
# ## What you'll do
#
# Write `split_and_load`, hold it against `gluon.utils.split_and_load` on every batch size from 1
# to 24 and up to four devices, find the one case in which Gluon itself fails, and cut a real
# batch of images.
#
# ## What you'll learn
#
# - how to cut a batch into shards that are as equal as can be, with every example in exactly one;
# - why images and labels stay together, and how to see it if they don't;
# - why the mean of the shards' means is not the batch's mean once shards differ;
# - when a shard is a copy of the batch's memory, and when it *is* the batch's memory.
#
# ## What you need
#
# Chapter 01: contexts, `as_in_context`, `copyto`. No GPU. Reading takes {reading time}, running
# a few seconds.

# %% [markdown]
# We ask for two devices. On a machine with two GPUs you get those; on any other, two CPU cores
# that MXNet treats as devices. `helpers` comes first, since it makes settings that MXNet reads
# while it loads.

# %%
from helpers import devices

import mxnet as mx
from mxnet import gluon, nd

two = devices(2)

# %% [markdown]
# ## By hand first
#
# Take a batch of six examples with two features each. The values tell us which example we look
# at: example $i$ holds $2i$ and $2i+1$, so a row that turns up in the wrong place, or twice, or not
# at all, can be seen.

# %%
batch = nd.arange(12).reshape((6, 2))  # [6, 2]
batch

# %% [markdown]
# Two devices, six examples: the first three go to one, the last three to the other. Slicing picks
# the rows and `as_in_context` moves them.
#
# **Before you run this:** on which device will `batch[0:3]` be *before* `as_in_context` is called?

# %%
shards = [batch[0:3].as_in_context(two[0]), batch[3:6].as_in_context(two[1])]
for shard in shards:
    print(shard.context.device_id, shard[:, 0].asnumpy())

# %% [markdown]
# A slice lives where the array lives that it was cut from, here the CPU's memory; the move is a
# second step. The first column reads 0, 2, 4 on one device and 6, 8, 10 on the other: no example
# is lost or doubled, and their order is kept.

# %% [markdown]
# ## Where to cut when it doesn't divide
#
# **Predict:** ten examples on three devices. Which sizes are fairest, and which ends (the
# positions at which we cut) give them?

# %%
size, longer = divmod(10, 3)
print("each device gets", size, "and the first", longer, "get one more")

# %% [markdown]
# Sizes 4, 3, 3 then. Device $i$'s shard ends where $i+1$ full shards do, plus one for each of the
# longer shards before it. With $n$ examples on $k$ devices, $n = qk + r$, the $i$-th cut is at
# $qi + \min(i, r)$: as long as we are among the first $r$ devices, every shard has brought one
# extra.

# %%
ends = [size * i + min(i, longer) for i in range(3 + 1)]
print("cut at", ends, "-> sizes", [b - a for a, b in zip(ends, ends[1:])])

# %% [markdown]
# The alternative that many programs have is `m = n // k` examples for each device. For ten examples
# on three devices that is 9 of 10: the tenth is silently never trained on. Let us see whom it
# hits when such a loop meets the last batch of MNIST, 96 examples, on several device counts.

# %%
for k in (2, 3, 5, 7):
    print(f"{k} devices: {96 - 96 // k * k} of 96 examples lost by n // k")

# %% [markdown]
# ## The function
#
# All of it in four lines. Uneven shards are something to ask for, as in Gluon: they change how
# gradients have to be weighted, as you will see below, so they should not happen unnoticed.

# %%
def split_and_load(data, devices, even=True):
    assert not even or len(data) % len(devices) == 0, "uneven shards: pass even=False"
    size, longer = divmod(len(data), len(devices))
    ends = [size * i + min(i, longer) for i in range(len(devices) + 1)]
    return [data[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]


# %% [markdown]
# Try it at once on the batch whose answer we know.

# %%
for shard in split_and_load(batch, two):
    print(shard.context.device_id, shard[:, 0].asnumpy())

# %% [markdown]
# And on one that doesn't divide. Five rows over two devices, once without and once with leave to
# be uneven.

# %%
try:
    split_and_load(batch[:5], two)
except AssertionError as error:
    print("refused:", error)
print([len(shard) for shard in split_and_load(batch[:5], two, even=False)])

# %% [markdown]
# ## Labels stay with their images
#
# Images and labels are split by two separate calls. What keeps them together is that the cuts
# depend on nothing but the batch's length and the device list, so equal lengths give equal cuts.
# To *check* it we build images that know their label: every pixel of image $i$ is $i$, and so is
# its label.

# %%
labels = nd.arange(10)
images = labels.reshape((10, 1, 1, 1)) * nd.ones((10, 1, 28, 28))  # [10, 1, 28, 28]
print(images.shape, labels.shape)

# %% [markdown]
# One function compares them on every device, and it would notice a single example out of place.

# %%
def aligned(image_shards, label_shards):
    return all(
        (x[:, 0, 0, 0] == y.as_in_context(x.context)).min().asscalar() == 1
        for x, y in zip(image_shards, label_shards)
    )


three = [mx.cpu(i) for i in range(3)]
x_shards = split_and_load(images, three, even=False)
assert aligned(x_shards, split_and_load(labels, three, even=False)), "a label lost its image"

# %% [markdown]
# We named the three devices ourselves, `cpu(0)` to `cpu(2)`: whether a cut is *right* has nothing
# to do with how many cores there are, so this runs the same on every machine.
#
# A check is worth something only if it can fail. Here is a cut that looks just as reasonable, one
# example to each device in turn, like dealing cards. Used for images *and* labels it would do.
# Used for one of them only, it would not.

# %%
dealt = [labels[i::3].as_in_context(d) for i, d in enumerate(three)]
assert not aligned(x_shards, dealt), "the check should have noticed"
print("dealt labels:", [y.asnumpy().astype(int).tolist() for y in dealt])

# %% [markdown]
# A network trained on such pairs still trains, towards the wrong labels for most examples. Nothing
# raises and no shape is wrong. That is why alignment is checked with values that tell examples
# apart rather than by looking at shapes.

# %% [markdown]
# ## Against the engine's own
#
# Gluon has the same function under the same name. If ours is right, the two must agree on every
# batch and device count for which Gluon gives an answer. **Predict:** for 24 batch sizes, four
# device counts, even and uneven, how many of the 192 cases will Gluon refuse?

# %%
def outcome(split, n, k, **even):
    try:
        shards = split(nd.arange(2 * n).reshape((n, 2)), [mx.cpu(i) for i in range(k)], **even)
        return [(str(s.context), s.asnumpy().tolist()) for s in shards]
    except (AssertionError, ValueError, mx.base.MXNetError):
        return "refused"


# %% [markdown]
# An outcome holds each shard's device and values, or says that the case was refused. Gluon calls
# its argument `even_split` where we say `even`.

# %%
cases = [(n, k, even) for n in range(1, 25) for k in range(1, 5) for even in (True, False)]
ours = [outcome(split_and_load, n, k, even=even) for n, k, even in cases]
theirs = [outcome(gluon.utils.split_and_load, n, k, even_split=even) for n, k, even in cases]
agree = [a == b for a, b in zip(ours, theirs) if b != "refused"]
assert all(agree), "ours differs from Gluon's"
print(f"Gluon answers {len(agree)} of {len(cases)} cases; ours agrees in {sum(agree)} of them")

# %% [markdown]
# Most refusals are uneven batches for which nobody allowed uneven shards. But a few are not. Which?

# %%
print([(n, k) for (n, k, even), b in zip(cases, theirs) if b == "refused" and not even])

# %% [markdown]
# ## Fewer examples than devices
#
# All of these have $n < k$: the batch is too small to give each device one example. `mx.nd` has no
# arrays of size zero, so Gluon's uneven split stops there with an error from deep inside the
# engine. In MXNet's NumPy mode, which chapter 08 uses, such arrays exist, and the same call returns
# one:

# %%
with mx.util.np_shape(True), mx.util.np_array(True):
    shards = gluon.utils.split_and_load(mx.np.arange(2), three, even_split=False)
    print([shard.shape for shard in shards])

# %% [markdown]
# An empty shard is worse than an error. The mean of its loss is 0/0, and a device that computes
# nothing keeps the gradient of its *last* batch, which is then added again. So our contract, which
# `helpers.split_and_load` keeps in both modes, is: **every device gets at least one example, or you
# get an error that says so.**

# %%
import helpers

try:
    helpers.split_and_load(nd.arange(2), three, even=False)
except ValueError as error:
    print(error)

# %% [markdown]
# That is the function you wrote, with one line before it that checks its arguments. It also refuses
# a device that is named twice:

# %%
try:
    helpers.split_and_load(batch, [mx.cpu(0), mx.cpu(0)])
except ValueError as error:
    print(error)

# %% [markdown]
# MXNet itself would accept such a list. There is only one replica on a device, so both shards
# would write their gradients to one place, and the second would overwrite the first. Chapter 05
# shows half of a batch vanish that way.

# %% [markdown]
# ## Uneven shards and the mean
#
# Here is why uneven shards have to be asked for. Ten examples, each with a "loss" of its own
# number. **Predict:** is the mean of the three shards' means equal to the mean of all ten?

# %%
losses = split_and_load(nd.arange(10), three, even=False)  # 0 1 2 3 | 4 5 6 | 7 8 9
means = [shard.mean().asscalar() for shard in losses]
print("shard means", means, "-> their mean", sum(means) / 3)
print("mean of all", nd.arange(10).mean().asscalar())

# %% [markdown]
# It is not. The first shard has four examples, and its mean counts as much as that of three. A sum
# doesn't care how the examples were divided, so the safe rule for the rest of the course is: **sum
# on the devices, add the sums, divide once by the number of examples.**

# %%
total = sum(shard.sum().asscalar() for shard in losses)
assert total / 10 == nd.arange(10).mean().asscalar(), "sums don't depend on how a batch is cut"
print("sum of sums / 10 =", total / 10)

# %% [markdown]
# ## Copy or alias?
#
# `as_in_context` returns the very same array where it already is, and a slice of an `mx.nd` array
# is a window on its memory. **Predict:** the batch lives on `cpu(0)`. After we write 100 into each
# shard, what has become of the batch?

# %%
batch = nd.zeros((4, 2), ctx=mx.cpu(0))
for shard in split_and_load(batch, [mx.cpu(0), mx.cpu(1)]):
    shard[:] = 100
print(batch[:, 0].asnumpy())

# %% [markdown]
# The first half changed and the second did not: the shard on `cpu(0)` *is* the batch's memory, the
# other is a copy. Nothing in training writes to its input, so the alias saves a copy and does no
# harm. But if you change a shard in place, say to add noise to the images, you change data that
# somebody else may still need, on the first device only. Then copy first.

# %%
batch = nd.zeros((4, 2), ctx=mx.cpu(0))
for shard in split_and_load(batch.copy(), [mx.cpu(0), mx.cpu(1)]):
    shard[:] = 100
assert batch.sum().asscalar() == 0, "the batch was written to through a shard"

# %% [markdown]
# ## A real batch
#
# Now images. `load_data` looks for MNIST in the folder that `$COURSE_DATA` names, then among its
# earlier downloads, then on the network, and checks what it finds by its published sum. On a
# machine without any of these it says so and uses scikit-learn's handwritten digits. The images are
# NumPy arrays, and `nd.array` makes MXNet's of them.

# %% tags=["measured"]
from helpers import load_data

mnist = load_data("mnist", limit=16)
print(mnist)

# %% [markdown]
# The cut is the same for 16 real images as for six rows of numbers. In the figure each half of the
# batch is drawn beside its device, with the labels that went along.

# %%
from helpers.plotting import BLUE, ORANGE, figure, show

x_shards = split_and_load(nd.array(mnist.train_images), two)
y_shards = split_and_load(nd.array(mnist.train_labels), two)
assert [len(x) for x in x_shards] == [len(y) for y in y_shards] == [8, 8]

# %% [markdown]
# To look at a shard we bring it back to NumPy with `asnumpy`, which copies it from whatever device
# it is on.

# %% tags=["measured"]
title = f"One batch of {mnist.name}, two shards: every image keeps its label"
fig, ax = figure(title, size=(7, 2.6))
ax.axis("off")
for row, (x, y, color) in enumerate(zip(x_shards, y_shards, (BLUE, ORANGE))):
    ax.text(-4, 34 * row + 12, str(x.context), color=color, ha="right", va="center", weight="bold")
    for i, (image, label) in enumerate(zip(x.asnumpy(), y.asnumpy())):
        ax.imshow(image[0], cmap="gray_r", extent=(31 * i, 31 * i + 28, 34 * row + 28, 34 * row))
        ax.text(31 * i + 14, 34 * row + 31, int(label), color=color, ha="center", va="center")
ax.set(xlim=(-32, 250), ylim=(66, -1))
show(fig, alt="Two rows of eight handwritten digits, a row a device, each digit above its label.")

# %% [markdown]
# ## Summary
#
# - A batch of $n = qk + r$ examples is cut at $qi + \min(i, r)$: the first $r$ shards have one
#   more.
# - Equal lengths give equal cuts, so labels stay with their images; values that tell examples apart
#   are what proves it.
# - Ours equals `gluon.utils.split_and_load` wherever that gives an answer. With fewer examples than
#   devices, Gluon fails in `mx.nd` and makes empty shards in `mx.np`; ours says what is wrong.
# - With uneven shards, add sums and divide once. Means of means are wrong.
# - In `mx.nd` the shard that is already in place is the batch's own memory.
#
# Next, [chapter 03](03_all_reduce.ipynb): the devices have each computed something, and all of them
# need the sum.
#
# **Further reading.** `gluon.utils.split_and_load` in the MXNet API reference; *The Straight Dope*
# and *Dive into Deep Learning* on training with several GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **Undo it.** Write `gather(shards, device)`, which puts the batch together again on one device.
#    Prove it on uneven shards.
# 2. **Dealing cards.** Write `deal_and_load(data, devices)`, which gives device $i$ the examples
#    $i$, $i + k$, $i + 2k$, … Show that images and labels stay aligned if both are dealt. When is
#    it better than cutting into blocks?
# 3. **In proportion.** One device is three times as fast as the other. Write `split_by_share(data,
#    devices, shares)` so that 8 examples with shares 3 and 1 give 6 and 2. Which property should
#    the sizes of *any* shares have?
#
# The answers are folded: try first, then open them.

# %% [markdown]
# ### Answer 1
#
# Move every shard to the device, then join along the first axis. Order matters; the
# device list gave it.

# %% tags=["solution"]
def gather(shards, device):
    return nd.concat(*[shard.as_in_context(device) for shard in shards], dim=0)


whole = nd.arange(20).reshape((10, 2))
again = gather(split_and_load(whole, three, even=False), mx.cpu(0))
assert (again == whole).min().asscalar() == 1, "gather must undo the split"

# %% [markdown]
# ### Answer 2
#
# A slice with a step does it. If the data come sorted, by class or by length,
# blocks give each device a different kind of example and dealing gives each the same mix. That
# matters to BatchNorm, whose statistics are per device (chapter 09), and to load balance.

# %% tags=["solution"]
def deal_and_load(data, devices):
    return [data[i :: len(devices)].as_in_context(d) for i, d in enumerate(devices)]


assert aligned(deal_and_load(images, three), deal_and_load(labels, three))
print([y.asnumpy().astype(int).tolist() for y in deal_and_load(labels, three)])

# %% [markdown]
# ### Answer 3
#
# Cut at the rounded running total of the shares. Whatever the shares, the sizes
# must add up to $n$, and rounding the *cuts* instead of the sizes guarantees it, since the last
# cut is exactly $n$. Chapter 12 builds on this.

# %% tags=["solution"]
def split_by_share(data, devices, shares):
    parts = [sum(shares[:i]) / sum(shares) for i in range(len(shares) + 1)]
    ends = [round(len(data) * part) for part in parts]
    return [data[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], devices)]


sizes = [len(shard) for shard in split_by_share(nd.arange(8), three[:2], [3, 1])]
assert sizes == [6, 2], "shares of 3 and 1 cut eight examples into six and two"
assert sum(len(s) for s in split_by_share(nd.arange(100), three, [0.2, 0.3, 0.4])) == 100
