# %% [markdown]
# # 02 · Splitting a batch
#
# Data-parallel training begins with a cut: each device gets its own part of the batch, a *shard*.
#
# ![Ten images with their labels, 0 to 9, are cut after the fourth and the seventh row. cpu(0)
# gets rows 0 to 3, cpu(1) rows 4 to 6, cpu(2) rows 7 to 9, each image with its
# label.](src/drawings/batch_to_shards.svg)
#
# The cut takes a few lines of code, and it can go wrong without any error: the last examples are
# lost, labels are separated from their images, or a device is left without work.
#
# > **What you'll do:** write `split_and_load`, compare it with that of Gluon, MXNet's library of
# > layers (chapter 05), and make these mistakes on purpose.
# >
# > **What you'll learn:** how to cut a batch into nearly equal shards, with every example in
# > exactly one; how to see that labels have lost their images; what happens to the gradient of a
# > device that gets no data; why a mean of means is wrong when shards differ in size.
# >
# > **What you need:** chapter 01. No GPU. Reading takes {reading time}, running a few seconds.

# %%
import helpers
from helpers import devices

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

# %% [markdown]
# ## By hand
#
# How does a part of a batch get to a device? We take six examples with two features each, all
# numbers different, so that a row in the wrong place can be seen. Simulated devices are enough for
# that. A slice takes rows out of the batch, and `as_in_context` moves them to a device.

# %%
three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
x = nd.arange(12).reshape((6, 2))
print(x.asnumpy())

first = x[0:2].as_in_context(three[0])
second = x[2:4].as_in_context(three[1])
third = x[4:6].as_in_context(three[2])

for shard in [first, second, third]:
    print(shard.context, shard.asnumpy().tolist())

# %% [markdown]
# ## Where to cut
#
# Eleven examples don't divide by four devices. **Predict:** which sizes are the fairest, and
# which rows does each device get? (A device's *rank* is its place in the list, from 0.)

# %%
n = 11
k = 4
size = n // k  # every shard has at least 2 examples
longer = n % k  # and 3 are left: one more for each of the first 3 shards

begin = 0
for rank in range(k):
    end = begin + size
    if rank < longer:
        end += 1
    print(f"device {rank}: rows {begin} to {end - 1}, {end - begin} examples")
    begin = end

# %% [markdown]
# Sizes differ by one at most, and nothing is left out. What does a program lose that gives just
# `n // k` examples to each device? An epoch of MNIST with batch size 128 has 468 full batches and a
# last one of 96 examples.

# %%
for k in [2, 3, 5, 7]:
    lost_in_each = 128 % k  # of the 468 full batches
    lost_in_last = 96 % k
    lost = 468 * lost_in_each + lost_in_last
    print(f"{k} devices: {lost} of 60,000 images are left out in an epoch")

# %% [markdown]
# If the data is shuffled, other images are left out in each epoch, and you may never notice.
#
# ## The function
#
# `split_and_load` puts the two steps together: find the rows of a shard, move them to its device.
# Shards of different size must be asked for, by `even=False`, since a mean over them is easily
# wrong, as you will see.

# %%
def split_and_load(data, devices, even=True):
    n = len(data)
    k = len(devices)
    if even and n % k != 0:
        raise ValueError(f"{n} examples don't divide by {k} devices: pass even=False")
    size = n // k
    longer = n % k
    shards = []
    begin = 0
    for rank, device in enumerate(devices):
        end = begin + size
        if rank < longer:
            end += 1
        shards.append(data[begin:end].as_in_context(device))
        begin = end
    return shards


for shard in split_and_load(nd.arange(10), three, even=False):
    print(shard.context, shard.asnumpy())

try:
    split_and_load(nd.arange(10), three)
except ValueError as error:
    print("refused:", error)

# %% tags=["fold"]
# check: 3 to 39 examples: each shard begins where it should, no row is lost, devices in their order
for n in range(3, 40):
    shards = split_and_load(nd.arange(n), three, even=False)
    for i, shard in enumerate(shards):
        first_row = i * (n // 3) + min(i, n % 3)
        assert shard[0].asscalar() == first_row, f"{n} examples: shard {i} begins elsewhere"
    assert np.array_equal(np.concatenate([s.asnumpy() for s in shards]), np.arange(n)), "every row"
backwards = [three[2], three[1], three[0]]
assert [s.context for s in split_and_load(nd.arange(6), backwards)] == backwards, "another order"

# %% [markdown]
# ## Labels stay with their images
#
# Images and labels are split by two calls. Does each image still have its own label afterwards?
# Shapes can't tell. Values can: let every pixel of image $i$ be $i$, which is also its label.

# %%
labels = nd.arange(10)
images = nd.zeros((10, 1, 28, 28))
for i in range(10):
    images[i] = i

x_shards = split_and_load(images, three, even=False)
y_shards = split_and_load(labels, three, even=False)
for x_shard, y_shard in zip(x_shards, y_shards):
    pixel = x_shard[:, 0, 0, 0]  # one pixel of each image
    print(x_shard.context, "images", pixel.asnumpy(), "labels", y_shard.asnumpy())
    assert np.array_equal(pixel.asnumpy(), y_shard.asnumpy()), "a label lost its image"

# %% [markdown]
# The rows of a shard depend only on the length of the batch and on the number of devices. Images
# and labels have the same length, so they are cut in the same places.
#
# Another good way to cut is to *deal*, like cards: one example to each device in turn.

# %%
def deal(data, devices):
    k = len(devices)
    shards = []
    for rank, device in enumerate(devices):
        shards.append(data[rank::k].as_in_context(device))  # rows rank, rank + k, rank + 2k, ...
    return shards


for shard in deal(labels, three):
    print(shard.context, shard.asnumpy())

# %% tags=["fold"]
# check: dealing gives each example to one device, in turn, and images and labels come in pairs
assert len(x_shards) == len(y_shards) == len(deal(labels, three)) == 3
for rank, shard in enumerate(deal(labels, three)):
    assert shard.context == three[rank], "on another device"
    assert np.array_equal(shard.asnumpy(), np.arange(rank, 10, 3)), "not in turn"

# %% [markdown]
# It is right if images and labels are *both* dealt. Now suppose that a program cuts the images
# into blocks and deals the labels. **Predict:** how many of the ten images get another's label?

# %%
wrong = 0
for x_shard, y_shard in zip(x_shards, deal(labels, three)):
    pixels = x_shard[:, 0, 0, 0].asnumpy()
    their_labels = y_shard.asnumpy()
    print(x_shard.context, "images", pixels, "labels", their_labels)
    wrong += np.sum(pixels != their_labels)
print("images with another image's label:", wrong)

# %% [markdown]
# Only image 0 keeps its own label. All shapes are right, and there is no error. Does training
# notice?
#
# We try it with real images, on two devices: GPUs if there are two, or else simulated ones.
# `load_data` finds MNIST, or says that there is none and takes scikit-learn's handwritten digits.

# %% tags=["measured"]
data = helpers.load_data("mnist", limit=4000)
two = devices(2)
print(data)

# %% tags=["fold"]
# check: one image kept its label; two shards of real images have their order and their labels
assert wrong == 9
x_shards = split_and_load(nd.array(data.train_images[:16]), two)
y_shards = split_and_load(nd.array(data.train_labels[:16]), two)
for rank, (x_shard, y_shard) in enumerate(zip(x_shards, y_shards, strict=True)):
    rows = slice(8 * rank, 8 * rank + 8)
    assert x_shard.context == y_shard.context == two[rank], "a shard is on another device"
    assert np.array_equal(x_shard.asnumpy(), data.train_images[rows]), "other images"
    assert np.array_equal(y_shard.asnumpy(), data.train_labels[rows]), "a label lost its image"

# %% [markdown]
# The model is the simplest one that reads digits: one matrix turns 784 pixels into 10 scores, and
# the loss is the cross-entropy. `log_softmax` turns scores into log-probabilities, and `pick`
# chooses the one of the right label. We take the sum over the shard, not the mean; you will see
# why.

# %%
def loss_of(x, y, weight):
    scores = nd.dot(x.reshape((len(x), 784)), weight)  # [n, 10]
    log_probability = nd.pick(nd.log_softmax(scores), y)  # [n]
    return -log_probability.sum()

# %% [markdown]
# Each device has its own copy of the matrix, with a gradient attached, and finds the gradient of
# its shard. The two are added (chapter 01): the step is that of one device with the whole batch.

# %%
def step_on_two(x_shards, y_shards, weights, lr=0.1):
    losses = []
    for x_shard, y_shard, weight in zip(x_shards, y_shards, weights):  # each device, its shard
        with autograd.record():
            loss = loss_of(x_shard, y_shard, weight)
        loss.backward()
        losses.append(loss)  # no asscalar here: it would wait, so that devices took turns

    gradient = weights[0].grad
    other_gradient = weights[1].grad.as_in_context(gradient.context)
    total = gradient + other_gradient
    n = len(x_shards[0]) + len(x_shards[1])
    mean_gradient = total / n  # the mean over all n examples

    for weight in weights:  # the same update on both devices
        weight[:] = weight - lr * mean_gradient.as_in_context(weight.context)
    return (losses[0].asscalar() + losses[1].asscalar()) / n

# %% tags=["fold"]
# check: a step on two devices is that of one device with the whole batch
x = nd.array(data.train_images[:64])
y = nd.array(data.train_labels[:64])
begin = nd.array(0.01 * np.random.default_rng(0).standard_normal((784, 10)))
weights = [begin.copyto(two[0]), begin.copyto(two[1])]
alone = begin.copyto(two[0])
for weight in [*weights, alone]:
    weight.attach_grad()
loss = step_on_two(split_and_load(x, two), split_and_load(y, two), weights, lr=0.5)
with autograd.record():
    whole_loss = loss_of(x.as_in_context(two[0]), y.as_in_context(two[0]), alone)
whole_loss.backward()
expected = (alone - 0.5 / 64 * alone.grad).asnumpy()
assert np.isclose(loss, whole_loss.asscalar() / 64, rtol=1e-5), "another loss"
assert np.abs(expected - begin.asnumpy()).max() > 1e-3, "a step that moves nothing shows nothing"
for weight in weights:
    assert np.abs(weight.asnumpy() - expected).max() < 1e-6, "another step"

# %% [markdown]
# How images are cut is one argument of the training, how labels are cut another.

# %%
def train_two(cut_images, cut_labels, seed=0):
    rng = np.random.default_rng(seed)
    weights = [nd.zeros((784, 10), ctx=two[0]), nd.zeros((784, 10), ctx=two[1])]
    for weight in weights:
        weight.attach_grad()
    losses = []
    for step in range(120):
        rows = rng.integers(0, len(data.train_images), size=64)  # a random batch
        x_shards = cut_images(nd.array(data.train_images[rows]), two)
        y_shards = cut_labels(nd.array(data.train_labels[rows]), two)
        losses.append(step_on_two(x_shards, y_shards, weights))
    return losses

# %% tags=["measured", "trains"]
own_labels = train_two(split_and_load, split_and_load)
dealt_labels = train_two(split_and_load, deal)
print(f"last loss with their own labels: {own_labels[-1]:.2f}")
print(f"last loss with dealt labels:     {dealt_labels[-1]:.2f}")

# %% tags=["fold", "measured"]
# draw: the loss, with each image's own label and with dealt labels
from helpers.plotting import curves, show

steps = range(120)
lines = {
    "their own labels": (steps, own_labels),
    "dealt labels": (steps, dealt_labels),
    "guessing: ln 10": (steps, [np.log(10)] * 120),
}
title = "With dealt labels the loss stays near that of guessing"
fig, ax = curves(title, "step", "loss of a batch", lines)
ax.set_ylim(bottom=0)
show(fig, alt="Loss against the training step: with their own labels it falls, with dealt labels "
              "it stays at 2.3.")

# %% tags=["fold", "measured"]
# check: in five runs, the last 20 losses are below 1 with own labels, near ln 10 with dealt ones
for seed in range(5):
    blocks = train_two(split_and_load, split_and_load, seed=seed)
    own = np.mean(blocks[-20:])
    others = np.mean(train_two(split_and_load, deal, seed=seed)[-20:])
    print(f"seed {seed}: {own:.2f} with their own labels, {others:.2f} with dealt labels")
    assert own < 1 and 2.2 < others < 2.6, "own labels are learnt, dealt ones are not"
    both_dealt = train_two(deal, deal, seed=seed)  # the same sums, over the same 64 examples
    assert np.allclose(blocks, both_dealt, rtol=1e-4), "a device's gradient is not in the sum"

# %% [markdown]
# A model that gives each of the ten classes the same probability has the loss $\ln 10 \approx
# 2.3$. With dealt labels the loss stays near there, in each of five runs. So a loss that stays at
# $\ln(\text{classes})$ says, among other things: look at the labels. But the loss may hide the
# mistake, for instance where only a part of the labels is wrong. Comparing values that tell
# examples apart, as above, is quicker, and says what is wrong.

# %% [markdown]
# ## Against Gluon
#
# `gluon.utils.split_and_load` has the same job; its option is called `even_split`. Does it do the
# same? We compare devices, types and values of all shards, for 1 to 24 examples on 1 to 4 devices.
# And what do both do with 2 examples on 3 devices?

# %% tags=["fold"]
# check: ours and Gluon's give the same shards, or refuse, in 192 cases
def ours(batch, places, even):
    return split_and_load(batch, places, even=even)


def by_gluon(batch, places, even):
    return gluon.utils.split_and_load(batch, places, even_split=even)


def result_of(split, n, k, even):
    batch = nd.arange(2 * n, dtype="int32").reshape((n, 2))
    places = [mx.cpu(rank) for rank in range(k)]
    result = []
    try:
        for shard in split(batch, places, even):
            result.append((str(shard.context), shard.dtype, shard.asnumpy().tolist()))
    except (ValueError, mx.base.MXNetError):
        return "refused"
    return result


cases = 0
for n in range(1, 25):
    for k in [1, 2, 3, 4]:
        for even in [True, False]:
            result = result_of(ours, n, k, even)
            assert result == result_of(by_gluon, n, k, even), f"{n} on {k} devices, even={even}"
            cases += 1
assert cases == 192
print("the same in", cases, "cases")
print("2 examples on 3 devices:", result_of(ours, n=2, k=3, even=False))

# %% [markdown]
# Both raise, but only because MXNet can't copy an empty slice to another device. A batch that is on
# `cpu(2)` already gives an empty third shard, without an error:

# %% tags=["fold"]
# check: a batch on cpu(2) gives an empty third shard; so do arrays of `mx.np`, on any device
too_few = [(1, 2), (1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
for n in range(1, 25):
    for k in [1, 2, 3, 4]:
        assert (result_of(ours, n, k, even=False) == "refused") == ((n, k) in too_few), (n, k)

on_the_third = nd.arange(4, ctx=three[2]).reshape((2, 2))  # where the empty shard will be
for shards in [split_and_load(on_the_third, three, even=False),
               gluon.utils.split_and_load(on_the_third, three, even_split=False)]:
    assert [len(shard) for shard in shards] == [1, 1, 0], "not an empty third shard"

for n, k in too_few:
    places = [mx.cpu(rank) for rank in range(k)]
    with mx.util.np_shape(True), mx.util.np_array(True):
        few = mx.np.arange(n)
        for shards in [split_and_load(few, places, even=False),
                       gluon.utils.split_and_load(few, places, even_split=False)]:
            assert [len(shard) for shard in shards] == n * [1] + (k - n) * [0], "other lengths"

# %% [markdown]
# ## A device without data
#
# What is wrong with a device that gets nothing? Let the model be $wx$, and the loss on a device the
# sum of $wx$ over its examples. Its gradient is the sum of the inputs $x$. The first step has the
# six examples 1 to 6: two for each device.

# %%
replicas = [nd.ones(1, ctx=device) for device in three]
for weight in replicas:
    weight.attach_grad()


def backward_on(shards):
    for shard, weight in zip(shards, replicas):
        with autograd.record():
            loss = (weight * shard).sum()
        loss.backward()
    print("gradients:", [weight.grad.asscalar() for weight in replicas])


backward_on(split_and_load(nd.arange(1, 7), three))

# %% [markdown]
# 1 + 2, 3 + 4 and 5 + 6. The next batch has only two examples, 1 and 2. We cut it for the first two
# devices, so `zip` stops after them. **Predict** the three gradients.

# %%
two_shards = split_and_load(nd.arange(1, 3), three[:2])  # nothing for the third device
backward_on(two_shards)
assert [weight.grad.asscalar() for weight in replicas] == [1, 2, 11]

# %% [markdown]
# `backward` overwrote the first two. The third device still has 11, the gradient of the step
# *before*. The sum over the devices is 14, and the gradient of this batch is 3. There is no error.
#
# Would an empty shard help? Not always: MXNet 1.9.1 skips the backward pass of `w * x` if `x` is
# empty, and the old gradient stays.

# %% tags=["fold"]
# check: with an empty x, (w * x).sum() keeps the old gradient; another order of work doesn't
def gradient_of_nothing(loss_of):
    with mx.util.np_shape(True), mx.util.np_array(True):
        weight = mx.np.array([7.0])
        weight.attach_grad()
        for n in [6, 0]:  # six examples, then none
            with autograd.record():
                loss = loss_of(weight, mx.np.ones((n, 1)))
            loss.backward()
        return weight.grad.item()


# The pass is skipped by BinaryBroadcastBackwardUseIn in elemwise_binary_broadcast_op.h.
product_first = gradient_of_nothing(lambda w, x: (w * x).sum())
sum_first = gradient_of_nothing(lambda w, x: (x.sum() * w).sum())
print("gradient after six examples and then none, w * x first:", product_first)
print("gradient after six examples and then none, sum first:  ", sum_first)
assert product_first == 6, "the old gradient should have stayed"
assert sum_first == 0, "the right one"

# %% [markdown]
# So each device must get at least one example, or its old gradient must be kept out of the sum.
# `helpers.split_and_load`, which later chapters use, is yours with its arguments checked.

# %% tags=["fold"]
# check: helpers.split_and_load says that examples are too few
try:
    helpers.split_and_load(nd.arange(2), three, even=False)
except ValueError as error:
    print(error)
    assert "2 examples are too few for 3 devices" in str(error)
else:
    raise AssertionError("it should refuse")

# %% [markdown]
# ## Uneven shards and the mean
#
# Let ten examples have the losses 0 to 9. **Predict:** is the mean of the three shards' means the
# mean of all ten?

# %%
losses = nd.arange(10)
shards = split_and_load(losses, three, even=False)
means = []
for shard in shards:
    means.append(float(shard.mean().asscalar()))
    print(shard.context, shard.asnumpy(), "mean", means[-1])

print("mean of the three means:", sum(means) / 3)
print("mean of all ten:        ", losses.mean().asscalar())

# %% [markdown]
# It isn't. The mean of four examples counts as much as a mean of three, and there is no error. Sums
# don't have this trouble:

# %%
total = 0
for shard in shards:
    total += shard.sum().asscalar()
print("sum of the three sums, divided by 10:", total / 10)
assert total / 10 == losses.mean().asscalar()

# %% [markdown]
# So **sum on the devices, add the sums, and divide once by the number of examples.**
#
# ## Copy or alias?
#
# Is a shard a copy of its rows? `as_in_context` returns the same array if it is already on that
# device. A slice of consecutive rows of an `mx.nd` array is an *alias* of its memory (in NumPy, a
# view). **Predict:** the batch is on `cpu(0)`. What is in it after we write 100 into each shard?

# %%
x = nd.zeros((4, 2), ctx=three[0])
for shard in split_and_load(x, three[:2]):
    shard[:] = 100
print(x.asnumpy())

# %% tags=["fold"]
# check: a slice with a step is a copy, even on the batch's own device
x = nd.zeros((4, 2), ctx=three[0])
for shard in deal(x, three[:1]) + [x[0::2]]:
    shard[:] = 100
assert x[1].asnumpy().tolist() == [100, 100], "one device: the slice has step 1, an alias"
x = nd.zeros((4, 2), ctx=three[0])
for shard in deal(x, three[:2]):
    shard[:] = 100
assert not x.asnumpy().any(), "two devices: step 2, a copy"

# %% [markdown]
# The shard on `cpu(0)` *is* the batch's memory; the shard on `cpu(1)` is a copy. Training only
# reads its input, so this does no harm. A program that changes shards in place should split
# `x.copy()`. **On GPUs**, shards of a batch in host memory are always copies.

# %% [markdown]
# ## Summary
#
# - Each of $k$ devices gets $\lfloor n/k \rfloor$ of $n$ examples, and the first $n \bmod k$ one
#   more. No example is lost.
# - Equal lengths give equal cuts, so labels stay with their images. Check it with values that tell
#   examples apart.
# - A device that takes no part in a step keeps the gradient of an earlier one.
# - With uneven shards, add sums and divide once.
# - A shard that is already in place is an alias of the batch.
#
# **Further reading.** `split_data` and `split_and_load` in MXNet 1.9.1's `gluon/utils.py`.

# %% [markdown]
# ## Exercises
#
# 1. **Undo it.** Write `gather(shards, device)`, which puts the batch together again on one
#    device. Show it on uneven shards.
# 2. **Dealing cards.** Deal images *and* labels with `deal`. Show that they stay aligned, and that
#    the model learns. When is dealing better than blocks?
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
    moved = []
    for shard in shards:
        moved.append(shard.as_in_context(device))
    return nd.concat(*moved, dim=0)


x = nd.arange(20).reshape((10, 2))
again = gather(split_and_load(x, three, even=False), three[2])
print(again.context, again[:, 0].asnumpy())
assert again.context == three[2], "on the device that was asked for"
assert np.array_equal(again.asnumpy(), x.asnumpy()), "gather must undo the split"

# %% [markdown]
# ### Answer 2
#
# Both are dealt, so image and label meet on the same device, at the same place. If the data is
# sorted, by class or by length, blocks give the devices different kinds of examples, and dealing
# gives each nearly the same mix. That matters for BatchNorm, whose statistics are those of one
# device (chapter 09), and for balanced work.

# %% tags=["solution", "measured"]
for x_shard, y_shard in zip(deal(images, three), deal(labels, three)):
    print(x_shard.context, "images", x_shard[:, 0, 0, 0].asnumpy(), "labels", y_shard.asnumpy())
    assert np.array_equal(x_shard[:, 0, 0, 0].asnumpy(), y_shard.asnumpy()), "another's label"

both_dealt = train_two(deal, deal)
print(f"both dealt: loss {both_dealt[0]:.2f} at first, {both_dealt[-1]:.2f} in the end")
assert np.mean(both_dealt[-20:]) < 1, "the model should learn"

# %% [markdown]
# ### Answer 3
#
# Cut at the rounded running total of the shares. The sizes must add up to $n$; rounding the *cuts*
# and not the sizes ensures that, since the last cut is $n$ itself. Every share must be positive,
# and large enough to give its device at least one example. Chapter 12 builds on this.

# %% tags=["solution"]
def split_by_share(data, devices, shares):
    assert len(devices) == len(shares), "one share a device"
    assert min(shares) > 0, "every share must be positive"
    shards = []
    begin = 0
    so_far = 0  # the running total of the shares
    for device, share in zip(devices, shares):
        so_far += share
        end = round(len(data) * so_far / sum(shares))
        assert end > begin, f"{device} would get nothing"
        shards.append(data[begin:end].as_in_context(device))
        begin = end
    return shards


shards = split_by_share(nd.arange(8), three[1:], [3, 1])
for shard in shards:
    print(shard.context, shard.asnumpy())
assert [shard.asnumpy().tolist() for shard in shards] == [[0, 1, 2, 3, 4, 5], [6, 7]], "6 and 2"
assert [shard.context for shard in shards] == three[1:], "each on its device"

parts = split_by_share(nd.arange(100), three, [0.2, 0.3, 0.4])
assert [len(part) for part in parts] == [22, 34, 44], "in proportion"
for shares in [[3, 1, 1], [3, 0], [1000, 1]]:
    try:
        split_by_share(nd.arange(8), three[1:], shares)
    except AssertionError as error:
        print("refused:", error)
    else:
        raise RuntimeError(f"{shares} should be refused")
assert np.array_equal(gather(parts, three[0]).asnumpy(), np.arange(100)), "every example once"

# %% [markdown]
# ### Answer 4
#
# A good answer shows numbers for each policy. Dropping loses three examples in each epoch, and in
# an evaluation judges fewer. Filling up counts one example twice, in the gradient and in the
# accuracy. Resting is exact if the resting device's old gradient is left out of the sum, it still
# gets the sum, and the divisor is 3.
