# %% [markdown]
# # Deeper · Mistakes with unequal shards
#
# In chapter 12 every device had an image in each step. What if one has none? Which mistakes do
# equal shards hide? And how bad is one of them, the unweighted mean of the devices' means?
#
# > **What you'll do:** train on three devices, one of which gets no image in the last step. Run two
# > mistakes that only such a step shows, and eight of other kinds. Then count out what a mean of
# > means does to a gradient.
# >
# > **What you'll learn:** how a device without images takes part in a step; that Trainer adds its
# > old gradient again if it doesn't; why a test should take several steps; that a mean of means is
# > right on average, if images are dealt at random, but noisier.
# >
# > **What you need:** chapters 05 and 12. No GPU. Reading takes {reading time}, running a few
# > seconds.

# %% tags=["measured"]
from functools import partial

from helpers import allreduce, load_data
from helpers.compare import largest_difference
from helpers.networks import lenet

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

four = [mx.cpu(rank) for rank in range(4)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
data = load_data("mnist", limit=160)
print(data)

# %% [markdown]
# ## A device without images
#
# Chapter 02 showed that an empty array can't be copied to another device. So here a size of 0 makes
# no shard, but `None`. We call such a device *idle*.

# %%
def split_or_none(batch, sizes):
    shards = []
    begin = 0
    for size, device in zip(sizes, four):
        end = begin + size
        if size > 0:
            shards.append(batch[begin:end].as_in_context(device))
        else:
            shards.append(None)
        begin = end
    return shards


first, second, third = split_or_none(nd.arange(3), [1, 0, 2])
print(first.asnumpy(), second, third.asnumpy())

# %% [markdown]
# An idle device still holds the gradient of an earlier step, and a sum would add it again (chapters
# 02 and 05). So we give it a loss whose gradient is zero: all its weights, times 0. The backward
# pass then writes fresh zeros.

# %%
def zero_loss(net, device):
    loss = 0
    for parameter in net.collect_params().values():
        loss = loss + (parameter.data(device) * 0).sum()
    return loss


def backward_or_zero(net, x, y, sizes, sum_or_mean):
    x_shards = split_or_none(x, sizes)
    y_shards = split_or_none(y, sizes)
    losses = []
    with autograd.record():
        for device, x_shard, y_shard in zip(four, x_shards, y_shards):
            if x_shard is None:
                loss = zero_loss(net, device)
            else:
                loss = sum_or_mean(cross_entropy(net(x_shard), y_shard))
            losses.append(loss)
    autograd.backward(losses)

# %% [markdown]
# With it, here are chapter 12's two ways. After sums, `trainer.step` adds up and divides by the
# images. After means, a function `combine` changes the gradients of one parameter, a list with one
# for each device: `average` multiplies each by its share of the images, in place, and `allreduce`
# puts their sum into all. Then `trainer.update(1)` only updates, and divides by 1. (`average`
# multiplies an old gradient by 0 anyway. Here the zero loss is for Trainer, which refuses old
# gradients, as we'll see.)

# %%
def step_of_sums_or_zero(net, trainer, x, y, sizes):
    backward_or_zero(net, x, y, sizes, nd.sum)
    trainer.step(sum(sizes))


def average(gradients, sizes):
    n = sum(sizes)
    for gradient, size in zip(gradients, sizes):
        gradient *= size / n  # in place
    allreduce(gradients)


def step_of_means_or_zero(net, trainer, x, y, sizes, combine):
    backward_or_zero(net, x, y, sizes, nd.mean)
    for parameter in net.collect_params().values():
        # Returns nothing: it changes the gradients.
        combine(parameter.list_grad(), sizes)
    trainer.update(1)


weighted_means = partial(step_of_means_or_zero, combine=average)

# %% [markdown]
# The folded cell has three batches, of 64, 64 and 32 images, and `replicas_after(step, cuts,
# on_store)`. That trains LeNet, one step for each list of sizes in `cuts`, on as many devices as
# the list has sizes, and returns each device's weights. `on_store` says who updates: the store, as
# is the default on several devices, or each device its own replica (chapter 07).

# %% tags=["fold", "trains"]
# define: three batches; step_alone, for one device; replicas_after(step, cuts, on_store)
batches = []
for begin, end in [(0, 64), (64, 128), (128, 160)]:
    x = nd.array(data.train_images[begin:end], dtype="float64")
    batches.append((x, nd.array(data.train_labels[begin:end])))


def step_alone(net, trainer, x, y, sizes):
    with autograd.record():
        loss = cross_entropy(net(x), y)
    loss.backward()
    trainer.step(len(x))


def replicas_after(step, cuts, on_store):
    devices = four[: len(cuts[0])]
    mx.random.seed(11)
    net = lenet()
    net.cast("float64")
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), dtype="float64"))  # makes the weights now
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2},
                            update_on_kvstore=on_store)
    for (x, y), sizes in zip(batches, cuts):
        step(net, trainer, x, y, sizes)
    replicas = []
    for device in devices:
        replicas.append([weight.data(device) for weight in net.collect_params().values()])
    return replicas

# %% [markdown]
# Plain Gluon on one device says what is right. `largest_difference` compares each replica with it,
# and the worst one counts.

# %% tags=["trains"]
ALONE = [[64], [64], [32]]
replicas = replicas_after(step_alone, ALONE, on_store=False)
whole = replicas[0]  # the weights of the only device


def distance_to_one(step, cuts, on_store):
    replicas = replicas_after(step, cuts, on_store)
    # Each replica against whole.
    return largest_difference(replicas, whole)

# %% [markdown]
# Now the last step leaves the third device without images, and who updates differs too.
# **Predict:** how far off are the three ways?

# %% tags=["measured"]
ONE_IDLE = [[40, 16, 8], [8, 40, 16], [20, 12, 0]]
by_store = distance_to_one(step_of_sums_or_zero, ONE_IDLE, on_store=True)
by_each = distance_to_one(step_of_sums_or_zero, ONE_IDLE, on_store=False)
by_means = distance_to_one(weighted_means, ONE_IDLE, on_store=False)
print(f"sums, the store updates:    off by {by_store:.0e}")
print(f"sums, each device updates:  off by {by_each:.0e}")
print(f"means, each device updates: off by {by_means:.0e}")

# %% tags=["fold"]
# check: all are right on 1 to 4 devices, for cuts with idle devices and for random ones
rng = np.random.default_rng(5)
cases = [ONE_IDLE, [[0, 40, 24], [40, 0, 24], [0, 0, 32]]]
for k in [1, 2, 4]:
    cuts = []
    for x, _ in batches:
        cuts.append(rng.multinomial(len(x), [1 / k] * k).tolist())
    cases.append(cuts)
for cuts in cases:
    if len(cuts[0]) > 1:
        assert distance_to_one(step_of_sums_or_zero, cuts, True) < 1e-12, f"store, cut {cuts}"
    assert distance_to_one(step_of_sums_or_zero, cuts, False) < 1e-12, f"sums, cut {cuts}"
    assert distance_to_one(weighted_means, cuts, False) < 1e-12, f"means, cut {cuts}"

# %% [markdown]
# All are off only by rounding. **An idle device takes part with a gradient of zero.**
#
# ## Two mistakes
#
# What if one forgets the idle device? Two ways to do so. The first leaves it out of the backward
# pass. The second leaves it out of the all-reduce, because it has nothing to add.

# %% tags=["trains"]
def without_backward(net, trainer, x, y, sizes):
    x_shards = split_or_none(x, sizes)
    y_shards = split_or_none(y, sizes)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            if x_shard is not None:
                losses.append(nd.sum(cross_entropy(net(x_shard), y_shard)))
            # no else: an idle device has no loss
    autograd.backward(losses)
    trainer.step(sum(sizes))


def average_of_busy(gradients, sizes):
    busy = []
    for gradient, size in zip(gradients, sizes):
        if size > 0:
            gradient *= size / sum(sizes)
            busy.append(gradient)
    allreduce(busy)  # without the idle device


without_allreduce = partial(step_of_means_or_zero, combine=average_of_busy)

# %% [markdown]
# We run both on the same cuts, and on cuts that differ only in the last step, where all devices are
# busy. **Predict:** which of the four distances are more than rounding?

# %% tags=["measured"]
ALL_BUSY = [[40, 16, 8], [8, 40, 16], [20, 8, 4]]
backward_idle = distance_to_one(without_backward, ONE_IDLE, on_store=True)
backward_busy = distance_to_one(without_backward, ALL_BUSY, on_store=True)
allreduce_idle = distance_to_one(without_allreduce, ONE_IDLE, on_store=False)
allreduce_busy = distance_to_one(without_allreduce, ALL_BUSY, on_store=False)
print(f"without backward:   one idle: off by {backward_idle:.0e}, all busy: {backward_busy:.0e}")
print(f"without all-reduce: one idle: off by {allreduce_idle:.0e}, all busy: {allreduce_busy:.0e}")

# %% tags=["fold", "trains"]
# check: which distances are rounding, which replicas are wrong, which old gradient is added
assert backward_idle > 1e-3 and allreduce_idle > 1e-3
assert backward_busy < 1e-12 and allreduce_busy < 1e-12
found = replicas_after(without_allreduce, ONE_IDLE, on_store=False)
for replica in found[:2]:
    assert largest_difference(replica, whole) < 1e-12, "busy devices are right"
assert largest_difference(found[2], whole) > 1e-3, "only the idle one is wrong"
IDLE_BEFORE = [[40, 16, 8], [40, 24, 0], [16, 8, 8]]  # in the step before the last
for replica in replicas_after(without_allreduce, IDLE_BEFORE, on_store=False):
    assert largest_difference(replica, whole) > 1e-3, "one step later all are wrong"
for replica in replicas_after(without_backward, ONE_IDLE, on_store=True):
    assert largest_difference(replica, whole) > 1e-3, "all are wrong"
try:
    replicas_after(without_backward, ONE_IDLE, on_store=False)
except UserWarning as error:
    message = str(error)
    assert "has not been updated by backward" in message, message
    begin = message.index("on context")
    end = message.index(".", begin)
    print(f'each device updates: Trainer refuses: "... {message[begin:end]}"')
else:
    raise AssertionError("where each device updates, Trainer should refuse an old gradient")
try:
    replicas_after(without_backward, [[40, 24, 0], [8, 40, 16], [20, 8, 4]], on_store=True)
except UserWarning as error:
    assert "has not been updated by backward" in str(error), error
else:
    raise AssertionError("a device that is idle in its first step has no old gradient")

last_shard = []  # the gradient of the third device's 16 images, one step ago


def with_old_gradient(net, trainer, x, y, sizes):
    """On one device what without_backward does on three."""
    parameters = list(net.collect_params().values())
    with autograd.record():
        loss = cross_entropy(net(x[-16:]), y[-16:])
    loss.backward()
    of_third_device = [parameter.grad().copy() for parameter in parameters]
    with autograd.record():
        loss = cross_entropy(net(x), y)
    loss.backward()
    if len(x) == 32:
        for parameter, old in zip(parameters, last_shard, strict=True):
            gradient = parameter.grad()
            gradient += old
    last_shard[:] = of_third_device
    trainer.step(len(x))


expected = replicas_after(with_old_gradient, ALONE, on_store=False)[0]
found = replicas_after(without_backward, ONE_IDLE, on_store=True)
assert largest_difference(found, expected) < 1e-12, "not the old gradient of its own shard"

# %% [markdown]
# `without_backward` adds the idle device's gradient of the step before, and all replicas are wrong.
# No error was raised. Trainer does refuse old gradients where each device updates: that is the
# message above. But where the store updates, Trainer never marks a gradient as used (`_update` in
# `gluon/trainer.py`, 1.9.1), so after a device's first step it takes any.
#
# In `without_allreduce` only the idle device, which gets no sum, goes wrong in this step. So a test
# that ends here and looks at the first device passes it. One step later its wrong weights are in
# everybody's gradient. **Test with an idle device, go on for a step, and look at all replicas.**
#
# ## A sum in new arrays
#
# May `combine` put its result into new arrays? `average` changed the arrays, by `gradient *= ...`.
# Here `gradients[0] = total` puts *another array* into the list. The list is the parameter's own,
# so Trainer reads that array. But `backward` writes into the arrays that it has always written
# into. **Predict:** is the first step right? And the second?

# %% tags=["trains"]
def into_new_arrays(gradients, sizes):
    n = sum(sizes)
    second = gradients[1].as_in_context(four[0])
    total = gradients[0] * (sizes[0] / n) + second * (sizes[1] / n)
    # Another array, not `gradients[0][:] = total`.
    gradients[0] = total
    gradients[1] = total.as_in_context(four[1])


in_new_arrays = partial(step_of_means_or_zero, combine=into_new_arrays)
UNEQUAL = [[40, 24], [8, 56], [20, 12]]
for steps in [1, 2]:
    expected = replicas_after(step_alone, ALONE[:steps], on_store=False)[0]
    found = replicas_after(in_new_arrays, UNEQUAL[:steps], on_store=False)
    print(f"after {steps} step(s), right:", largest_difference(found, expected) < 1e-12)

# %% tags=["fold", "trains"]
# check: the second step repeats the first gradient
def no_step(net, trainer, x, y, sizes):
    pass


start = replicas_after(no_step, UNEQUAL[:1], on_store=False)[0]
after_one = replicas_after(in_new_arrays, UNEQUAL[:1], on_store=False)[0]
after_two = replicas_after(in_new_arrays, UNEQUAL[:2], on_store=False)[0]
for old, middle, new in zip(start, after_one, after_two, strict=True):
    assert largest_difference(new - middle, middle - old) < 1e-9, "not the first gradient again"

# %% [markdown]
# Only the first. In the second, `backward` writes into the old arrays, which are no longer in the
# list. `combine` gets the first step's result, on both devices, and a weighted mean of two equal
# arrays changes nothing. So each later step repeats the first gradient. (Trainer doesn't refuse:
# `backward` did run.) **A test should take several steps, on different batches.**
#
# ## Equal shards hide mistakes
#
# Must a test have unequal shards? Here are seven more mistakes, on two devices. The first two
# combine means:

# %%
def unweighted_means(gradients, sizes):
    allreduce(gradients)
    for gradient in gradients:
        gradient /= len(gradients)


def weights_swapped(gradients, sizes):
    size_0, size_1 = sizes
    average(gradients, [size_1, size_0])

# %% [markdown]
# The others:
#
# - `averaged_twice`: weighted means are divided by the number of devices once more;
# - `one_left_out`: no all-reduce at all, and the second device doesn't even weight its mean;
# - `by_twice_the_larger`: sums are divided by twice the size of the larger shard;
# - `by_64_always`: sums are divided by 64, though the last batch has 32 images;
# - `labels_elsewhere`: each image has the label of the next.
#
# **Predict:** which three do equal shards hide?

# %% tags=["fold", "trains"]
# check: which of these mistakes, and of `into_new_arrays`, equal shards hide
def one_left_out(gradients, sizes):
    gradients[0] *= sizes[0] / sum(sizes)


def averaged_twice(gradients, sizes):
    average(gradients, sizes)
    for gradient in gradients:
        gradient /= len(gradients)


def by_twice_the_larger(net, trainer, x, y, sizes):
    backward_or_zero(net, x, y, sizes, nd.sum)
    trainer.step(2 * max(sizes))


def by_64_always(net, trainer, x, y, sizes):
    backward_or_zero(net, x, y, sizes, nd.sum)
    trainer.step(64)


def labels_elsewhere(net, trainer, x, y, sizes):
    moved = nd.concat(y[1:], y[:1], dim=0)
    step_of_sums_or_zero(net, trainer, x, moved, sizes)


mistakes = {
    "into_new_arrays": in_new_arrays,
    "unweighted_means": partial(step_of_means_or_zero, combine=unweighted_means),
    "weights_swapped": partial(step_of_means_or_zero, combine=weights_swapped),
    "one_left_out": partial(step_of_means_or_zero, combine=one_left_out),
    "averaged_twice": partial(step_of_means_or_zero, combine=averaged_twice),
    "by_twice_the_larger": by_twice_the_larger,
    "by_64_always": by_64_always,
    "labels_elsewhere": labels_elsewhere,
}
EQUAL = [[32, 32], [32, 32], [16, 16]]
print("                    unequal shards  equal shards")
for name, step in mistakes.items():
    words = []
    for cuts in [UNEQUAL, EQUAL]:
        far = distance_to_one(step, cuts, on_store=False)
        assert far > 1e-3 or far < 1e-12, f"{name}: neither clearly wrong nor right"
        words.append("show it" if far > 1e-3 else "hide it")
    print(f"{name:19} {words[0]:>14} {words[1]:>13}")
    hidden = name in ["unweighted_means", "weights_swapped", "by_twice_the_larger"]
    assert words == ["show it", "hide it" if hidden else "show it"], name
assert distance_to_one(weighted_means, EQUAL, on_store=False) < 1e-12, "the right way passes"
assert distance_to_one(step_of_sums_or_zero, UNEQUAL, on_store=False) < 1e-12, "and here"

# %% [markdown]
# Where both shards are equal, so are both weights, and twice the larger shard is the batch. **Test
# on unequal shards.**
#
# ## What a mean of means does
#
# Suppose a program takes the mean of two means, on shards of three images and one. How wrong is
# that gradient? If the images are dealt at random, it is right *on average*. Let there be three
# kinds of images, with the gradients 0, 1 and 5. There are $3^4 = 81$ ways to draw four of them:

# %%
from itertools import product

kinds = np.array([0, 1, 5])
draws = np.array(list(product(kinds, repeat=4)))  # [81, 4]
print("the first two draws:", draws[0], draws[1])

mean_of_all = draws.mean(axis=1)
# Shards of 3 and 1.
mean_of_means = (draws[:, :3].mean(axis=1) + draws[:, 3]) / 2
print(f"one image:                {kinds.mean():.1f} on average, variance {kinds.var():.2f}")
print(f"mean of all four images:  {mean_of_all.mean():.1f} on average, "
      f"variance {mean_of_all.var():.2f}")
print(f"mean of both means:       {mean_of_means.mean():.1f} on average, "
      f"variance {mean_of_means.var():.2f}")

# %% [markdown]
# Right on average, but its variance is larger. The mean of $m$ independent images' gradients has
# $\frac1m$ of one image's variance. So we can say how many images a mean of means is *worth*:

# %%
print(f"mean of all four images: worth {kinds.var() / mean_of_all.var():.1f} images")
print(f"mean of both means:      worth {kinds.var() / mean_of_means.var():.1f} images")

# %% [markdown]
# Why 3? The two means have $\frac13$ and $\frac11$ of one image's variance. Half of their sum has
# $(\frac13 + 1) / 2^2 = \frac13$ of it, as a mean of 3 images has. In general, device $i$'s mean
# has $\frac{1}{n_i}$, the mean of $k$ such means the sum of these, divided by $k^2$. So it is worth
# $k^2 / \sum_i \frac{1}{n_i}$ images:

# %%
def worth(sizes):
    k = len(sizes)
    return k**2 / sum(1 / n for n in sizes)


for sizes in [[3, 1], [128, 128], [192, 64], [240, 16]]:
    print(f"shards of {sizes[0]:3} and {sizes[1]:3}: worth {worth(sizes):.0f} images")

# %% tags=["fold"]
# draw: what a mean of means is worth, by the smaller shard of a batch of 256
from helpers.plotting import curves, show

small = np.arange(1, 129)
of_means = np.array([worth([256 - size, size]) for size in small])
fig, ax = curves("Cut 240 to 16, the mean of both means is worth 60 images, not 256",
                 "images in the smaller shard", "worth, in images",
                 {"mean of both means": (small, of_means),
                  "mean of all images": (small, np.full(128, 256))})
ax.plot(16, worth([240, 16]), "o", color="black")
ax.text(19, 55, "240 and 16", va="center")
ax.set_ylim(0, 280)
show(fig, alt="What a mean of means of a batch of 256 is worth rises from 4 images, with one image "
     "in the smaller shard, to all 256 with equal shards.")
assert (np.diff(of_means) > 0).all() and round(of_means[0]) == 4 and of_means[-1] == 256

# %% tags=["fold"]
# check: the formula agrees with the 81 draws, on two devices and on three; sorted images
three_means = (draws[:, :2].mean(axis=1) + draws[:, 2] + draws[:, 3]) / 3
for sizes, estimates in [([3, 1], mean_of_means), ([2, 1, 1], three_means)]:
    assert np.isclose(estimates.mean(), kinds.mean()), "right on average"
    assert np.isclose(worth(sizes), kinds.var() / estimates.var()), "the 81 draws agree"
assert np.isclose(worth([128, 128]), 256) and np.isclose(worth([192, 64]), 192)
last_is_5 = draws[draws[:, 3] == 5]
of_means = (last_is_5[:, :3].mean(axis=1) + last_is_5[:, 3]) / 2
assert np.isclose(last_is_5.mean(), 2.75) and np.isclose(of_means.mean(), 3.5)

# %% [markdown]
# Of a batch of 256 that is cut 240 to 16, the mean of both means is worth 60 images, by its
# variance. It is worse if a device's images depend on *which device it is*, say because the data
# are sorted. If the small
# shard's image always has the gradient 5, the right mean, of all four, is 2.75 on average, and the
# mean of both means 3.5. **Weight each mean by its images.**
#
# ## Summary
#
# - A device without images takes part in the backward pass with a loss whose gradient is zero.
# - If it is left out of the backward pass after its first step, its old gradient is added again
#   where the store updates, and nothing raises. If it is left out of the all-reduce, its own
#   replica goes wrong, and from the next step on all do.
# - A mistake can be right for one step, on equal shards or on the first device. So a test takes
#   several steps, on unequal shards, and looks at all replicas.
# - A mean of means on shards $n_i$, dealt at random, is right on average, and as noisy as a batch
#   of $k^2 / \sum_i \frac{1}{n_i}$ images.
