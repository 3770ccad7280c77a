# %% [markdown]
# # Deeper · Mistakes with unequal shards
#
# In chapter 12 every device had an image in each step. What if one has none? Which other mistakes
# are there? And how bad is a mean of means, the mistake that equal shards hide?
#
# ## What you'll do
#
# Train on up to four devices, some of which get no image in some steps. Run two mistakes that only
# such steps show, and six of other kinds. Then count out on paper what a mean of means does to a
# gradient.
#
# ## What you'll learn
#
# - how a device without images takes part in a step;
# - that Trainer adds its old gradient again if it doesn't;
# - why a test should take several steps;
# - that a mean of means is right on average, if images are dealt at random, but noisier.
#
# ## What you need
#
# Chapters 05 and 12. No GPU. Reading takes {reading time}, running a few seconds.

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
# no shard, but `None`.

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
# A device without a shard still holds the gradient of an earlier step, and the all-reduce would add
# it again (chapters 02 and 05). So we give it a loss whose gradient is zero: all its weights, times
# 0. The backward pass then writes fresh zeros.

# %%
def zero_loss(net, device):
    loss = 0
    for parameter in net.collect_params().values():
        loss = loss + (parameter.data(device) * 0).sum()
    return loss


def backward_or_zero(net, x, y, sizes, loss_of_shard):
    losses = []
    with autograd.record():
        for device, x_shard, y_shard in zip(four, split_or_none(x, sizes), split_or_none(y, sizes)):
            if x_shard is None:
                losses.append(zero_loss(net, device))
            else:
                losses.append(loss_of_shard(cross_entropy(net(x_shard), y_shard)))
    autograd.backward(losses)

# %% [markdown]
# With it, here are chapter 12's two ways, sums and weighted means:

# %%
def average(gradients, sizes):
    n = sum(sizes)
    for gradient, size in zip(gradients, sizes):
        gradient *= size / n  # in place
    allreduce(gradients)


def step_of_sums_or_zero(net, trainer, x, y, sizes):
    backward_or_zero(net, x, y, sizes, nd.sum)
    trainer.step(sum(sizes))


def step_of_means_or_zero(net, trainer, x, y, sizes, combine=average):
    backward_or_zero(net, x, y, sizes, nd.mean)
    for parameter in net.collect_params().values():
        combine(parameter.list_grad(), sizes)
    trainer.update(1)

# %% [markdown]
# `replicas_after` trains on as many devices as there are sizes. Its result is a list for each
# device. `on_store` says who updates: the store, as Trainer has it by default on several devices,
# or each device its own replica (chapter 07). Plain Gluon on one device says what is right.

# %% tags=["trains"]
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


[whole] = replicas_after(step_alone, [[64], [64], [32]], on_store=False)


def distance_to_one(step, cuts, on_store=False):
    return largest_difference(replicas_after(step, cuts, on_store), whole).value

# %% [markdown]
# Now the last step leaves the third device without images. **Predict:** are both ways still right?

# %% tags=["measured"]
CUTS = [[40, 16, 8], [8, 40, 16], [20, 12, 0]]
print(f"sums, the store updates: off by {distance_to_one(step_of_sums_or_zero, CUTS, True):.0e}")
print(f"sums, each updates:      off by {distance_to_one(step_of_sums_or_zero, CUTS):.0e}")
print(f"weighted means:          off by {distance_to_one(step_of_means_or_zero, CUTS):.0e}")

# %% tags=["fold"]
# check: all are right on 1 to 4 devices, for cuts with idle devices and for random ones
rng = np.random.default_rng(5)
cases = [CUTS, [[0, 40, 24], [40, 0, 24], [0, 0, 32]]]
for k in [1, 2, 4]:
    cuts = []
    for x, _ in batches:
        cuts.append(rng.multinomial(len(x), [1 / k] * k).tolist())
    cases.append(cuts)
for cuts in cases:
    if len(cuts[0]) > 1:
        assert distance_to_one(step_of_sums_or_zero, cuts, True) < 1e-12, f"store, cut {cuts}"
    assert distance_to_one(step_of_sums_or_zero, cuts) < 1e-12, f"sums, cut {cuts}"
    assert distance_to_one(step_of_means_or_zero, cuts) < 1e-12, f"means, cut {cuts}"

# %% [markdown]
# They are. **A device without images takes part with a gradient of zero.**
#
# ## Two mistakes
#
# The first one leaves the idle device out of the backward pass. The second one makes a mistake
# after the all-reduce: for instance, to get sums back, it multiplies and divides by the shard's
# size. That changes nothing where the size isn't 0.

# %% tags=["trains"]
def idle_left_out(net, trainer, x, y, sizes):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(split_or_none(x, sizes), split_or_none(y, sizes)):
            if x_shard is not None:
                losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    trainer.step(sum(sizes))


def zero_by_zero(gradients, sizes):
    average(gradients, sizes)
    for gradient, size in zip(gradients, sizes):
        gradient *= size
        gradient /= size

# %% tags=["measured"]
ALL_BUSY = [[16, 16, 16, 16], [16, 16, 16, 16], [8, 8, 8, 8]]
of_means = partial(step_of_means_or_zero, combine=zero_by_zero)
print(f"idle_left_out: off by {distance_to_one(idle_left_out, CUTS, True):.0e}, "
      f"with all devices busy by {distance_to_one(idle_left_out, ALL_BUSY, True):.0e}")
print(f"zero_by_zero:  off by {distance_to_one(of_means, CUTS):.0e}, "
      f"with all devices busy by {distance_to_one(of_means, ALL_BUSY):.0e}")

# %% tags=["fold"]
# check: both are noticed in the step with an idle device, and pass where all are busy
assert distance_to_one(idle_left_out, CUTS, True) > 1e-3
assert distance_to_one(of_means, CUTS) == np.inf
assert distance_to_one(idle_left_out, ALL_BUSY, True) < 1e-12
assert distance_to_one(of_means, ALL_BUSY) < 1e-12
for found in replicas_after(of_means, CUTS, False)[:2]:
    assert largest_difference(found, whole) < 1e-12, "only the idle device is broken"
try:
    replicas_after(idle_left_out, CUTS, False)
except UserWarning as error:
    assert "has not been updated by backward" in str(error), error
else:
    raise AssertionError("where each device updates, Trainer should refuse an old gradient")

# %% [markdown]
# `idle_left_out` raised no error: where the store updates, Trainer adds the idle device's old
# gradient again. (With `update_on_kvstore=False` it does raise.) In `zero_by_zero`, $0/0$ is NaN,
# on the idle device only, so its distance is infinite. A test that looks at one device, or whose
# devices are always busy, passes both.
#
# ## Right for one step
#
# This version of `average` puts the right sum into new arrays. `gradients` is what `list_grad()`
# gave, and that is the parameter's own list: what we put into it, Trainer reads. **Predict:** is
# the first step right? And the second?

# %% tags=["trains"]
def into_new_arrays(gradients, sizes):
    n = sum(sizes)
    second = gradients[1].as_in_context(four[0])
    total = gradients[0] * (sizes[0] / n) + second * (sizes[1] / n)
    gradients[0] = total
    gradients[1] = total.as_in_context(four[1])


ALONE = [[64], [64], [32]]
UNEQUAL = [[40, 24], [8, 56], [20, 12]]
EQUAL = [[32, 32], [32, 32], [16, 16]]
in_new_arrays = partial(step_of_means_or_zero, combine=into_new_arrays)
for steps in [1, 2]:
    [expected] = replicas_after(step_alone, ALONE[:steps], on_store=False)
    found = replicas_after(in_new_arrays, UNEQUAL[:steps], on_store=False)
    print(f"after {steps} step(s), right:", largest_difference(found, expected) < 1e-12)

# %% [markdown]
# Only the first. In it Trainer reads the new arrays, and all is well. Then `backward` goes on
# writing into the old ones, which Trainer no longer sees. It reads the first step's sum again,
# twice the same, and a weighted mean of the two is that sum. So each later step repeats the first
# gradient. **A test should take several steps, on different batches.**
#
# Five more mistakes, on two devices: the second gradient isn't added; weighted means are averaged
# once more; sums are divided by twice the larger shard; by 64, though the last batch has 32 images;
# and labels are those of the next image.

# %% tags=["fold", "trains"]
# check: the second step repeats the first gradient; of six mistakes equal shards hide one
def no_step(net, trainer, x, y, sizes):
    pass


start = replicas_after(no_step, UNEQUAL[:1], on_store=False)[0]
after_one = replicas_after(in_new_arrays, UNEQUAL[:1], on_store=False)[0]
after_two = replicas_after(in_new_arrays, UNEQUAL[:2], on_store=False)[0]
for old, middle, new in zip(start, after_one, after_two, strict=True):
    assert largest_difference(new - middle, middle - old) < 1e-9, "not the first gradient again"


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
    "one_left_out": partial(step_of_means_or_zero, combine=one_left_out),
    "averaged_twice": partial(step_of_means_or_zero, combine=averaged_twice),
    "by_twice_the_larger": by_twice_the_larger,
    "by_64_always": by_64_always,
    "labels_elsewhere": labels_elsewhere,
}
for name, step in mistakes.items():
    noticed = distance_to_one(step, UNEQUAL) > 1e-3
    hidden = distance_to_one(step, EQUAL) < 1e-12
    print(f"{name:19} noticed on unequal shards: {noticed}, hidden by equal ones: {hidden}")
    assert noticed, f"{name} is not noticed"
    assert hidden == (step is by_twice_the_larger), f"{name} on equal shards"
assert distance_to_one(step_of_sums_or_zero, UNEQUAL) < 1e-12, "the right way passes"

# %% [markdown]
# Unequal shards find all of them. Equal ones hide one, as they hide the mean of means.
#
# ## What a mean of means does
#
# Suppose a program takes the mean of two means, on shards of three images and one. How wrong is
# that in training? If the images are dealt at random, it is right *on average*. Let there be three
# kinds of images, with the gradients 0, 1 and 5. There are $3^4 = 81$ ways to draw four of them:

# %%
from itertools import product

kinds = np.array([0, 1, 5])
draws = np.array(list(product(kinds, repeat=4)))  # [81, 4]
print("the first two draws:", draws[0], draws[1])

mean_of_all = draws.mean(axis=1)
mean_of_means = (draws[:, :3].mean(axis=1) + draws[:, 3]) / 2  # shards of 3 and 1
print(f"mean of all kinds: {kinds.mean():.1f}")
print(f"mean of all four images:  {mean_of_all.mean():.1f} on average, "
      f"variance {mean_of_all.var():.2f}")
print(f"mean of both means:       {mean_of_means.mean():.1f} on average, "
      f"variance {mean_of_means.var():.2f}")

# %% [markdown]
# Right on average, but its variance is larger. A mean of $m$ independent images has $\frac1m$ of
# one image's variance. So we can say how many images a mean of means is *worth*:

# %%
print(f"mean of all four images: worth {kinds.var() / mean_of_all.var():.1f} images")
print(f"mean of both means:      worth {kinds.var() / mean_of_means.var():.1f} images")

# %% [markdown]
# Device $i$'s mean has $\frac{1}{n_i}$ of one image's variance. The mean of $k$ such means has the
# sum of these, divided by $k^2$. So it is worth $k^2 / \sum_i \frac{1}{n_i}$ images:

# %%
def worth(sizes):
    k = len(sizes)
    return k**2 / sum(1 / n for n in sizes)


for sizes in [[3, 1], [128, 128], [192, 64], [240, 16]]:
    print(f"shards of {sizes[0]:3} and {sizes[1]:3}: worth {worth(sizes):.0f} images")

# %% tags=["fold"]
# check: the formula agrees with the 81 draws, on two devices and on three
three_means = (draws[:, :2].mean(axis=1) + draws[:, 2] + draws[:, 3]) / 3
for sizes, estimates in [([3, 1], mean_of_means), ([2, 1, 1], three_means)]:
    assert np.isclose(estimates.mean(), kinds.mean()), "right on average"
    assert np.isclose(worth(sizes), kinds.var() / estimates.var()), "the 81 draws agree"
assert np.isclose(worth([128, 128]), 256) and np.isclose(worth([192, 64]), 192)

# %% [markdown]
# A batch of 256 that is cut 240 to 16 is worth 60 images: most of the work is for nothing. And if
# a device's images depend on *which device it is*, say because the data are sorted, the mean of
# means is wrong on average, too: it leans towards the small shard's images.
#
# ## Summary
#
# - A device without images takes part in the backward pass with a loss whose gradient is zero.
# - Left out, its old gradient is added again where the store updates, and nothing raises.
# - A mistake can be right for one step, or on equal shards: test with several unequal steps.
# - A mean of means on shards $n_i$, dealt at random, is right on average, and as noisy as a batch
#   of $k^2 / \sum_i \frac{1}{n_i}$ images.
