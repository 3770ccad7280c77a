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
# ## What you'll do
#
# Write `split_and_load`, train on shards whose labels were cut in another way, and compare your
# function with Gluon's.
#
# ## What you'll learn
#
# - how to cut a batch into nearly equal shards, with every example in exactly one;
# - how to see that labels have lost their images, before training and during it;
# - what happens to the gradient of a device that gets no data;
# - why a mean of means is wrong when shards differ in size.
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
# ## By hand
#
# How does a part of a batch get to a device? We take six examples with two features each. Every
# number is different, so that a row in the wrong place can be seen.

# %%
x = nd.arange(12).reshape((6, 2))
print(x.asnumpy())

# %% [markdown]
# Whether a cut is *right* doesn't depend on cores or GPUs. So we name three simulated devices
# ourselves. A slice takes rows out of the batch, and `as_in_context` moves them to a device.

# %%
three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]

first = x[0:2].as_in_context(three[0])
second = x[2:4].as_in_context(three[1])
third = x[4:6].as_in_context(three[2])

for shard in [first, second, third]:
    print(shard.context, shard.asnumpy().tolist())

# %% [markdown]
# A shard is a slice of the batch, moved to its device.
#
# ## Where to cut
#
# Ten examples don't divide by three devices. **Predict:** which sizes are the fairest, and before
# which rows must we cut?

# %%
n = 10
k = 3
size = n // k  # every shard has at least 3 examples
longer = n % k  # and 1 example is left: the first shard gets it

begin = 0
for rank in range(k):
    end = begin + size
    if rank < longer:
        end += 1
    print(f"device {rank}: rows {begin} to {end - 1}, {end - begin} examples")
    begin = end

# %% [markdown]
# The first `longer` shards have one example more than the others. So sizes differ by one at most,
# and the last cut is at $n$: nothing is left out.
#
# What does a program lose that gives `n // k` examples to each device, and no more? An epoch of
# MNIST with batch size 128 has 468 full batches and a last one of 96 examples.

# %%
for k in [2, 3, 5, 7]:
    left_out = 468 * (128 % k) + 96 % k
    print(f"{k} devices: {left_out} of 60,000 images are left out in an epoch")

# %% [markdown]
# If the data is shuffled, other images are left out in each epoch, and you may never notice. In an
# evaluation these images are not judged at all.
#
# ## The function
#
# `split_and_load` puts the two steps together: find the rows of a shard, move them to its device.
# Shards of different size must be asked for, by `even=False`; you will see below why.

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

# %%
for shard in split_and_load(nd.arange(10), three, even=False):
    print(shard.context, shard.asnumpy().tolist())

# %% [markdown]
# Without `even=False` it refuses the same batch:

# %%
try:
    split_and_load(nd.arange(10), three)
except ValueError as error:
    print("refused:", error)

# %% tags=["fold"]
# check: cut i is at i * size + min(i, longer), and shards come in the order of the devices
for n in range(3, 40):
    shards = split_and_load(nd.arange(n), three, even=False)
    for i, shard in enumerate(shards):
        first_row = i * (n // 3) + min(i, n % 3)
        assert shard[0].asscalar() == first_row, f"{n} examples: shard {i} begins elsewhere"
    assert np.array_equal(np.concatenate([s.asnumpy() for s in shards]), np.arange(n)), "every row"
backwards = [three[2], three[1], three[0]]
assert [shard.context for shard in split_and_load(x, backwards)] == backwards, "another order"

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
# There are other good ways to cut. One is to *deal*, like cards: one example to each device in
# turn.

# %%
def deal(data, devices):
    k = len(devices)
    shards = []
    for rank, device in enumerate(devices):
        shards.append(data[rank::k].as_in_context(device))  # rows rank, rank + k, rank + 2k, ...
    return shards


for shard in deal(labels, three):
    print(shard.context, shard.asnumpy())

# %% [markdown]
# It is right if images and labels are *both* dealt. Now suppose that a program cuts the images
# into blocks and deals the labels. **Predict:** how many of the ten images keep their label?

# %%
wrong = 0
for x_shard, y_shard in zip(x_shards, deal(labels, three)):
    pixel = x_shard[:, 0, 0, 0]
    print(x_shard.context, "images", pixel.asnumpy(), "labels", y_shard.asnumpy())
    wrong += int((pixel != y_shard).sum().asscalar())
print("images with the label of another:", wrong)
assert wrong == 9

# %% [markdown]
# Only image 0 has its own label. All shapes are right, and nothing raises. Does training notice?
# We try it, with real images. `load_data` looks for MNIST in the folder that `$COURSE_DATA`
# names, among its downloads, and on the network. If there is none, it says so and uses
# scikit-learn's handwritten digits. It returns NumPy arrays.

# %% tags=["measured"]
data = helpers.load_data("mnist", limit=4000)
two = devices(2)
print(data)

# %% [markdown]
# The model is the simplest one that reads digits: one matrix turns 784 pixels into 10 scores, and
# the loss is the cross-entropy. Each device has its own copy of the matrix and finds the gradient
# of its shard. The two gradients are added, as in chapter 01. How images are cut, and how labels
# are, are arguments.

# %%
def loss_of(x, y, weight):
    scores = nd.dot(x.reshape((len(x), 784)), weight)  # [n, 10]
    return -nd.pick(nd.log_softmax(scores), y).sum()  # cross-entropy, summed over the shard


def train_two(split_images, split_labels, steps=120, lr=0.1, seed=0):
    rng = np.random.default_rng(seed)
    replicas = [nd.zeros((784, 10), ctx=device) for device in two]
    for weight in replicas:
        weight.attach_grad()
    losses = []
    for step in range(steps):
        rows = rng.integers(0, len(data.train_images), size=64)  # a random batch
        x_shards = split_images(nd.array(data.train_images[rows]), two)
        y_shards = split_labels(nd.array(data.train_labels[rows]), two)

        batch_loss = 0
        for x_shard, y_shard, weight in zip(x_shards, y_shards, replicas):
            with autograd.record():
                loss = loss_of(x_shard, y_shard, weight)
            loss.backward()
            batch_loss += loss.asscalar()

        total = replicas[0].grad + replicas[1].grad.as_in_context(two[0])
        for weight in replicas:
            weight -= lr / 64 * total.as_in_context(weight.context)
        losses.append(batch_loss / 64)
    return losses

# %% tags=["measured", "trains"]
in_blocks = train_two(split_and_load, split_and_load)
dealt = train_two(split_and_load, deal)
for step in [0, 30, 60, 90, 119]:
    print(f"step {step:3}: loss {in_blocks[step]:.2f} with its own labels, "
          f"{dealt[step]:.2f} with dealt labels")
print(f"ln 10 = {np.log(10):.2f}")

# %% tags=["fold", "measured"]
# draw: the loss, with each image's own label and with dealt labels
from helpers.plotting import curves, show

steps = range(120)
fig, ax = curves("With dealt labels the loss stays where it begins", "step", "loss of a batch", {
    "labels cut like images": (steps, in_blocks),
    "labels dealt": (steps, dealt),
})
ax.axhline(np.log(10), color="#888888", lw=0.8)
ax.set_ylim(bottom=0)
show(fig, alt="Loss against the training step: with the right labels it falls, with dealt labels "
              "it stays at 2.3.")

# %% [markdown]
# A model that gives each of ten classes the same probability has the loss $\ln 10 \approx 2.3$.
# With dealt labels ours stays there: it is shown images with the labels of others, and there is
# nothing to learn. So this mistake shows in the loss, if you know where the loss of guessing is.
# A loss that stays at $\ln(\text{classes})$ says: look at the labels. And it's quicker to compare
# values that tell examples apart, as above, before any training.

# %% tags=["fold", "measured"]
# check: five seeds: the mean of the last 20 losses is below 1 with own labels, above 2.2 with dealt
for seed in range(5):
    own = np.mean(train_two(split_and_load, split_and_load, seed=seed)[-20:])
    others = np.mean(train_two(split_and_load, deal, seed=seed)[-20:])
    print(f"seed {seed}: {own:.2f} with its own labels, {others:.2f} with dealt labels")
    assert own < 1 and 2.2 < others < 2.6, "own labels are learnt, dealt ones are not"

# %% [markdown]
# ## Against Gluon
#
# `gluon.utils.split_and_load` has the same job; its option is called `even_split`. Does it do the
# same? We ask both for 24 batch sizes, 1 to 4 devices, even and uneven. What a function does with
# a case is either the list of its shards (device, type, values), or a refusal.

# %%
def shards_or_refusal(split, n, k, **even):
    batch = nd.arange(2 * n, dtype="int32").reshape((n, 2))
    places = [mx.cpu(rank) for rank in range(k)]
    found = []
    try:
        for shard in split(batch, places, **even):
            found.append((str(shard.context), shard.dtype, shard.asnumpy().tolist()))
    except (ValueError, mx.base.MXNetError):
        return "refused"
    return found


print(shards_or_refusal(split_and_load, n=3, k=2, even=False))
print(shards_or_refusal(split_and_load, n=3, k=2, even=True))

# %% [markdown]
# **Predict:** with `even=False`, what happens to 2 examples on 3 devices?

# %%
cases = 0
too_few = []  # refused although uneven shards are allowed
for n in range(1, 25):
    for k in range(1, 5):
        for even in [True, False]:
            ours = shards_or_refusal(split_and_load, n, k, even=even)
            theirs = shards_or_refusal(gluon.utils.split_and_load, n, k, even_split=even)
            assert ours == theirs, f"{n} examples on {k} devices, even={even}"
            cases += 1
            if ours == "refused" and not even:
                too_few.append((n, k))
print(f"the same in {cases} cases")
print("refused with even=False, (examples, devices):", too_few)

# %% [markdown]
# Ours does what Gluon's does. Both refuse a batch with fewer examples than devices, but neither
# looks for it: `mx.nd` can't *copy* the empty slice that the last device would get. Where no copy
# is needed, or where empty arrays are allowed, an empty shard comes back, and no error.

# %% tags=["fold"]
# check: an empty shard comes back where it needs no copy, and in MXNet's NumPy mode (chapter 08)
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
# What is wrong with a device that gets nothing? Take the model $wx$, and its output as the loss.
# The gradient on a device is then the sum of its inputs. The first step has the six examples 1 to
# 6: two for each device.

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
# 1 + 2, 3 + 4 and 5 + 6. The next batch has only two examples, 1 and 2, so the third device gets
# nothing. **Predict** the three gradients.

# %%
backward_on(split_and_load(nd.arange(1, 3), three[:2]))
assert [weight.grad.asscalar() for weight in replicas] == [1, 2, 11]

# %% [markdown]
# `backward` overwrote the first two. The third device still has 11, the gradient of the step
# *before*. The sum over the devices is 14, where the gradient of this batch is 3, and nothing
# raises. An empty shard is no cure. Whether it overwrites the gradient depends on how the loss is
# written:

# %% tags=["fold"]
# check: with an empty shard (w * x).sum() keeps the old gradient, (x.sum() * w).sum() makes it 0
def gradient_of_nothing(loss_of):
    with mx.util.np_shape(True), mx.util.np_array(True):
        weight = mx.np.array([7.0])
        weight.attach_grad()
        for n in [6, 0]:  # six examples, then none
            with autograd.record():
                loss = loss_of(weight, mx.np.ones((n, 1)))
            loss.backward()
        return weight.grad.item()


product_first = gradient_of_nothing(lambda w, x: (w * x).sum())
sum_first = gradient_of_nothing(lambda w, x: (x.sum() * w).sum())
print("after six examples and then none:", product_first, "and", sum_first)
assert product_first == 6, "the old gradient should have stayed"
assert sum_first == 0, "the right one"

# %% [markdown]
# In the first, `w` meets an empty array, and MXNet 1.9.1 skips the backward pass of that product
# (`BinaryBroadcastBackwardUseIn` in `elemwise_binary_broadcast_op.h`). In the second, `x.sum()` is
# already a number, 0.
#
# So each device must get at least one example, or be left out of the sum as well.
# `helpers.split_and_load` is the function that you wrote, with its arguments checked:

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
# Why should uneven shards be asked for? Let ten examples have the losses 0 to 9. **Predict:** is
# the mean of the three shards' means the mean of all ten?

# %%
losses = nd.arange(10)
shards = split_and_load(losses, three, even=False)
means = []
for shard in shards:
    means.append(shard.mean().asscalar())
    print(shard.context, shard.asnumpy(), "mean", means[-1])

print("mean of the three means:", sum(means) / 3)
print("mean of all ten:        ", losses.mean().asscalar())

# %% [markdown]
# It isn't. The mean of four examples counts as much as a mean of three. Sums don't have this
# trouble:

# %%
total = 0
for shard in shards:
    total += shard.sum().asscalar()
print("sum of the three sums, divided by 10:", total / 10)
assert total / 10 == losses.mean().asscalar()

# %% [markdown]
# So our own programs, and Gluon's, follow one rule: **sum on the devices, add the sums, divide
# once by the number of examples.** (Rounding aside: chapter 04. PyTorch does it in another way:
# chapters 13 and 14.)
#
# ## Copy or alias?
#
# Is a shard a copy of its rows? `as_in_context` returns the same array if it is already on that
# device. A slice of consecutive rows of an `mx.nd` array is a window on its memory. **Predict:**
# the batch is on `cpu(0)`. What is in it after we write 100 into each shard?

# %%
x = nd.zeros((4, 2), ctx=three[0])
for shard in split_and_load(x, three[:2]):
    shard[:] = 100
print(x.asnumpy())

# %% [markdown]
# The shard on `cpu(0)` *is* the batch's memory; the shard on `cpu(1)` is a copy. Training reads
# its input and doesn't write to it, so this does no harm and saves a copy. A program that changes
# shards in place, say to add noise, should split `x.copy()`.
#
# **On GPUs:** the batch is usually in host memory, and the devices are GPUs. Then every shard is a
# copy. It crosses the link between host and GPU, on threads and streams that MXNet 1.9.1 keeps for
# copies (`src/engine/threaded_engine_perdevice.cc`).
#
# ## A real batch
#
# At last, sixteen real images on two devices. To draw a shard, `asnumpy` brings it back to the
# host.

# %%
x_shards = split_and_load(nd.array(data.train_images[:16]), two)
y_shards = split_and_load(nd.array(data.train_labels[:16]), two)
for x_shard, y_shard in zip(x_shards, y_shards):
    print("images", x_shard.shape, "labels", y_shard.shape)

# %% tags=["fold", "measured"]
# draw: sixteen images in two shards, each below its label
import matplotlib.pyplot as plt

fig, axes = plt.subplots(2, 8, figsize=(7, 2.3), layout="constrained")
for row, x_shard, y_shard in zip(axes, x_shards, y_shards):
    row[0].set_ylabel(x_shard.context)
    for ax, image, label in zip(row, x_shard.asnumpy(), y_shard.asnumpy()):
        ax.imshow(image[0], cmap="gray_r")
        ax.set(title=int(label), xticks=[], yticks=[])
fig.suptitle(f"16 images ({data.name}) in two shards of 8, each below its label")
show(fig, alt="Two rows of eight handwritten digits, one row for each device, each digit below its "
              "label.")

# %% tags=["fold"]
# check: each shard is on its device, with eight images in their order and their labels
for rank, (x_shard, y_shard) in enumerate(zip(x_shards, y_shards, strict=True)):
    rows = slice(8 * rank, 8 * rank + 8)
    assert x_shard.context == y_shard.context == two[rank], "a shard is on another device"
    assert np.array_equal(x_shard.asnumpy(), data.train_images[rows]), "other images"
    assert np.array_equal(y_shard.asnumpy(), data.train_labels[rows]), "a label lost its image"

# %% [markdown]
# ## Summary
#
# - A batch of $n$ examples gives each of $k$ devices $\lfloor n/k \rfloor$ rows, and the first
#   $n \bmod k$ devices one row more. No example is lost.
# - Equal lengths give equal cuts, so labels stay with their images. Check it with values that tell
#   examples apart. In training, labels that lost their images show as a loss that stays at
#   $\ln 10$ for ten classes.
# - For batches of 1 to 24 examples on `cpu(0)`, and 1 to 4 devices, our function does what Gluon's
#   does.
# - A device that gets no data keeps the gradient of an earlier step, and a sum over the devices
#   would count it again.
# - With uneven shards, add sums and divide once.
# - In `mx.nd`, a shard of consecutive rows that is already in place is a window on the batch.
#
# **Further reading.** `split_data` and `split_and_load` in MXNet 1.9.1's `gluon/utils.py`.

# %% [markdown]
# ## Exercises
#
# 1. **Undo it.** Write `gather(shards, device)`, which puts the batch together again on one
#    device. Prove it on uneven shards.
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
print(f"both dealt: loss {both_dealt[0]:.2f} at first, {both_dealt[-1]:.2f} at last")
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
assert np.array_equal(gather(parts, three[0]).asnumpy(), np.arange(100)), "every example once"

# %% [markdown]
# ### Answer 4
#
# A good answer shows numbers for each policy. Dropping loses three examples in each epoch, and in
# an evaluation judges fewer. Filling up counts one example twice, in the gradient and in the
# accuracy. Resting is exact if the resting device's old gradient is left out of the sum, it still
# gets the sum, and the divisor is 3.
