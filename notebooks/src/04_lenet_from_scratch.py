# %% [markdown]
# # 04 · LeNet from scratch on k devices
#
# Splitting a batch (chapter 02) and all-reduce (chapter 03) are all that data-parallel training
# needs. Here they come together in a training step of fifteen lines that runs on one device or on
# eight. Two promises have to be kept: *k* devices compute what one computes, and they do it faster.
# This chapter checks both, on your machine.
#
# ## What you'll do
#
# Write a convolutional network as plain functions, train it on one and on several devices, prove
# in double precision that the weights are the same, and measure the speed-up as one should.
#
# ## What you'll learn
#
# - one data-parallel step, on each device: shard → gradient → sum → update;
# - what "the same" means for floating-point numbers, and how a check can pass for a wrong reason;
# - how to measure a speed-up that you can trust, and what takes away the last part of 2;
# - what a larger batch and a larger learning rate each do to training, apart from the devices.
#
# ## What you need
#
# Chapters 01 to 03. No GPU. Reading takes {reading time}. Running takes up to four minutes with
# MNIST, most of it in two cells that say so, and less than one with the small digits.

# %%
import time

from helpers import allreduce, assert_replicas_equal, devices, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# %% [markdown]
# `split_and_load` and `allreduce` are the functions that you wrote, with checks of their arguments
# added.
#
# ## One step, before any code
#
# There are $k$ devices. Each holds a *replica*, a full copy of the parameters, and all replicas are
# equal. For a batch of $n$ examples:
#
# 1. split the batch into $k$ shards, and load shard $r$ on device $r$;
# 2. on each device at the same time: forward, loss, backward, which gives the gradient of the
#    *sum* of the losses of its own shard;
# 3. all-reduce: every device gets the sum of all gradients;
# 4. on each device at the same time: $w \leftarrow w - \frac{\eta}{n} \cdot$ that sum.
#
# Since all replicas were equal and all subtract the same, they are equal afterwards. Since the sum
# over shards is the sum over the batch, each equals what *one* device would have got.

# %%
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

fig, ax = figure("One step: only the third row crosses between devices", size=(7, 3.2))
rows = ["shard of the batch", "local gradient", "sum of gradients", "update own replica"]
for r, color in enumerate((BLUE, ORANGE)):
    for row, text in enumerate(rows):
        box = {"boxstyle": "round", "fc": "white", "ec": color}
        ax.text(r, -row, text, ha="center", va="center", bbox=box)
        if row:
            ax.annotate("", (r, 0.25 - row), (r, 0.75 - row), arrowprops={"arrowstyle": "->"})
    ax.text(r, 0.7, f"device {r}", ha="center", weight="bold", color=color)
ax.annotate("", (0.72, -2), (0.28, -2), arrowprops={"arrowstyle": "<->", "lw": 2, "color": GREEN})
ax.text(0.5, -1.85, "all-reduce", ha="center", color=GREEN)
ax.set(xlim=(-0.6, 1.6), ylim=(-3.5, 1)), ax.axis("off")
show(fig, alt="Two columns, a device each: shard, local gradient, sum, update. An arrow marked "
     "all-reduce joins the third boxes.")

# %% [markdown]
# ## Data
#
# The pictures are centred: their mean grey is taken away, so that the first layer sees numbers on
# both sides of zero. They stay in the host's memory; each step sends its shards to the devices.

# %% tags=["measured"]
data = load_data("mnist")
print(data)

# %% [markdown]
# A pair of arrays for training, one for testing.

# %%
mean = data.train_images.mean()
train_set = nd.array(data.train_images - mean), nd.array(data.train_labels)  # [n, 1, 28, 28], [n]
test_set = nd.array(data.test_images - mean), nd.array(data.test_labels)

# %% [markdown]
# Batches in a new random order each epoch. The last batch is smaller if the size doesn't divide; it
# is trained on like the others. The seed makes two runs see the same batches, which all our
# comparisons rest on.

# %%
def batches(dataset, size, epochs=1, seed=0):
    images, labels = dataset
    rng = np.random.default_rng(seed)
    for _ in range(epochs):
        order = nd.array(rng.permutation(len(labels)), dtype="int32")
        for start in range(0, len(labels), size):
            chosen = order[start : start + size]
            yield images.take(chosen), labels.take(chosen)


# %% [markdown]
# `take` makes a new array of the chosen rows. One batch, to try things on:

# %%
x, y = next(batches(train_set, 256))
print(x.shape, y.shape)

# %% [markdown]
# ## The network
#
# LeNet in its plainest form: two convolutions, each followed by average pooling, and two dense
# layers. The parameters are a list of eight arrays. These are the sizes that *The Straight Dope*
# uses.

# %%
shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
print(sum(int(np.prod(shape)) for shape in shapes), "parameters")

# %% [markdown]
# The forward pass is a function of images and parameters. It names no device: an operator runs
# where its inputs live (chapter 01), so the same lines serve every device.

# %%
def pool(h):
    return nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, p):  # x: [n, 1, 28, 28]
    h = pool(nd.Convolution(x, p[0], p[1], kernel=(3, 3), num_filter=20))  # [n, 20, 13, 13]
    h = pool(nd.Convolution(h, p[2], p[3], kernel=(5, 5), num_filter=50))  # [n, 50, 4, 4]
    h = nd.relu(nd.dot(h.flatten(), p[4]) + p[5])  # [n, 128]
    return nd.dot(h, p[6]) + p[7]  # [n, 10]


# %% [markdown]
# The loss of an example is the negative logarithm of the probability that the network gives to the
# right class. We keep the *sum* over a shard, for the reason that chapter 02 gave.

# %%
def loss_sum(x, y, p):
    return -nd.log_softmax(lenet(x, p)).pick(y).sum()


# %% [markdown]
# ### How to begin
#
# Weights start as random numbers, and their size matters. He's rule takes a standard deviation of
# $\sqrt{2 / \text{inputs}}$, which keeps the size of what flows through relu layers (He et al.,
# 2015). Averaging four neighbours shrinks it again, so the two layers after a pooling get half as
# much again. The last layer gets half, so that at first the network is not too sure of anything.

# %%
def init_params(seed=0, scale=(1.0, 1.5, 1.5, 0.5)):
    rng, params = np.random.default_rng(seed), []
    for shape, gain in zip(shapes[::2], scale):
        inputs = shape[0] if len(shape) == 2 else np.prod(shape[1:])
        weight = gain * np.sqrt(2 / inputs) * rng.standard_normal(shape)
        params += [nd.array(weight, dtype="float64"), nd.zeros(shape[len(shape) == 2])]
    return params


# %% [markdown]
# Images go in, ten numbers each come out. They are made in float64, so that rounding them to
# float32 gives every experiment below the same start.

# %%
start = [p.astype("float32") for p in init_params()]
scores = lenet(x, start)
assert scores.shape == (256, 10), "one score for each image and class"

# %% [markdown]
# **Predict:** what is the mean loss of a network that has learned nothing and knows that there are
# ten classes?

# %%
loss = loss_sum(x, y, start).asscalar() / len(x)
assert abs(loss - np.log(10)) < 0.3, f"{loss:.2f}: at the start the network should just guess"
print(f"guessing: ln 10 = {np.log(10):.2f}, and the untrained network is within 0.3 of it")

# %% [markdown]
# ### A replica for each device
#
# Each device gets a copy, and `attach_grad` gives each copy a place for its own gradient. `copyto`
# copies even where the array already is, so that no two replicas ever share memory.

# %%
def get_params(params, device, dtype="float32"):
    replica = [p.astype(dtype).copyto(device) for p in params]
    for p in replica:
        p.attach_grad()
    return replica


# %% [markdown]
# On a tiny scale: a bias on one device, with its gradient beside it, zero so far.

# %%
two = devices(2)
bias = get_params(init_params(), two[1])[7]
print(bias.context == two[1], bias.grad.context == two[1], bias.grad.asnumpy())

# %% [markdown]
# ## The step
#
# Here are the four lines of the plan in code. The two marked lines are all that is new against a
# program for one device.
#
# Python only *starts* the work: each forward and backward is put into its device's queue and the
# loop goes on, so both devices compute at the same time although the code reads as if one came
# after the other.

# %%
def train_batch(x, y, replicas, devices, lr, reduce=allreduce):
    xs, ys = (split_and_load(a, devices, even=False) for a in (x, y))  # NEW: shards
    with autograd.record():
        losses = [loss_sum(*shard) for shard in zip(xs, ys, replicas)]
    for loss in losses:
        loss.backward()
    for same in zip(*replicas):  # the k copies of one parameter
        reduce([p.grad for p in same])  # NEW: every device gets the sum
    for replica in replicas:
        for p in replica:
            p -= lr / len(x) * p.grad
    return sum(loss.as_in_context(devices[0]) for loss in losses) / len(x)


# %% [markdown]
# Try it: after a step from equal replicas on different shards, are they still equal?
# `assert_replicas_equal` compares the values on all devices, here to the bit.

# %%
replicas = [get_params(init_params(), d) for d in two]
train_batch(x, y, replicas, two, lr=0.3)
for same in zip(*replicas):
    assert_replicas_equal(same)

# %% [markdown]
# They are. But equal to each other is half of the promise: they must also be equal to what *one*
# device would have.
#
# One step on one device, one on two, from equal weights and on the same batch. **Predict:** how
# far apart will the weights be in float32? Exactly zero?

# %%
def one_step(contexts, dtype="float32", **options):
    x, y = next(batches(train_set, 256))
    replicas = [get_params(init_params(), d, dtype) for d in contexts]
    train_batch(x.astype(dtype), y, replicas, contexts, 0.3, **options)
    return replicas


# %% [markdown]
# To compare we take the largest difference between any two weights, over **all** replicas, as a
# share of the largest weight.

# %%
def apart(replicas, reference):
    pairs = [(p.asnumpy(), q.asnumpy()) for replica in replicas for p, q in zip(replica, reference)]
    # NumPy's max: Python's own would pass over a NaN
    return np.max([np.abs(p - q).max() for p, q in pairs]) / max(np.abs(q).max() for _, q in pairs)


difference = apart(one_step(two), one_step(two[:1])[0])
assert difference < 1e-6, f"{difference}: two devices must compute what one computes"
print("after one step in float32: equal to 1e-6 of the largest weight")

# %% [markdown]
# Not zero, but less than a millionth: the two sum the same 256 numbers in another order, and
# float32 keeps about seven digits (chapter 03). In float64, with sixteen, much less remains.

# %%
difference = apart(one_step(two, "float64"), one_step(two[:1], "float64")[0])
assert difference < 1e-14, f"{difference}: in float64 only rounding in the last digits is allowed"
print("after one step in float64: equal to 1e-14 of the largest weight")

# %% [markdown]
# ## The loop
#
# The loop is the same for any number of devices. Two things make it safe to leave alone. It looks
# at the loss of *two steps ago*: waiting for the newest would stop the queues from running ahead,
# and never waiting would let thousands of steps pile up. And it stops at the first loss that is
# not a number, and says at which step.

# %% tags=["trains"]
def check(losses, step):
    if step >= 0 and not np.isfinite(losses[step].asscalar()):
        raise FloatingPointError(f"the loss is {losses[step].asscalar()} at step {step}: "
                                 "broken data, or too high a learning rate?")


def train(replicas, devices, stream, lr, **options):
    losses = []
    for x, y in stream:
        losses.append(train_batch(x, y, replicas, devices, lr, **options))
        check(losses, len(losses) - 3)
    for step in range(len(losses)):
        check(losses, step)
    return [loss.asscalar() for loss in losses]


# %% [markdown]
# See it stop. In 1,280 images, twenty batches of 64, we spoil a single pixel of a single image.

# %%
small = train_set[0][:1280], train_set[1][:1280]
spoilt = small[0].copy()
spoilt[300, 0, 14, 14] = np.nan

# %% [markdown]
# **Predict:** the batches come in random order. How many batches give a loss that is a number?

# %% tags=["trains"]
try:
    train([get_params(init_params(), two[0])], two[:1], batches((spoilt, small[1]), 64), lr=0.3)
except FloatingPointError as error:
    print(error)

# %% [markdown]
# Steps 0 to 14 were fine, then the spoilt image came up, and the run stopped there. Without the
# check it would go on: one such loss makes every weight "not a number" for good, and what is
# printed in the end is an accuracy of about 0.1, as if it were just a bad model.
#
# ## The oracle: twenty steps in float64
#
# A single step could be right by luck. So: twenty steps, while the loss falls, from three random
# seeds, on 1, 2 and 4 devices, in float64. The claim is that all weights on all devices agree to
# $10^{-12}$ of the largest. Four devices are named directly, since being right needs no four cores.

# %% tags=["trains"]
four = [mx.cpu(r) for r in range(4)]


def twenty_steps(k, seed, dtype="float64"):
    stream = ((x.astype(dtype), y) for x, y in batches(small, 64, seed=seed))
    replicas = [get_params(init_params(seed), d, dtype) for d in four[:k]]
    return replicas, train(replicas, four[:k], stream, lr=0.3)


# %% [markdown]
# The loss must fall, or the comparison would be worth little: you'll see below why.

# %% tags=["trains"]
curves = {}
for seed in range(3):
    (reference,), curves[1, seed] = twenty_steps(1, seed)
    losses = curves[1, seed]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5]), "compare only while the loss falls"
    for k in (2, 4):
        replicas, curves[k, seed] = twenty_steps(k, seed)
        difference = apart(replicas, reference)
        assert difference < 1e-12, f"{k} devices, seed {seed}: {difference} apart"
print("20 steps, 3 seeds: 1, 2 and 4 devices agree to 1e-12 of the largest weight")

# %% [markdown]
# That is the first promise kept. The losses of those runs, drawn over each other:

# %%
fig, ax = figure("On 1, 2 and 4 devices the loss is one curve", "step", "loss on the batch")
for seed, color in enumerate((BLUE, ORANGE, GREEN)):
    for k, width, style in ((1, 6, "-"), (2, 3, "--"), (4, 1, "-")):
        ax.plot(curves[k, seed], style, lw=width, color=color if k > 1 else GREY,
                label=f"k = {k}" if seed == 0 else None)
ax.legend(title="a colour for each seed")
show(fig, alt="Three loss curves, one a seed; in each, the lines of 1, 2 and 4 devices coincide.")

# %% [markdown]
# It was not to be had by looking at the replicas among
# themselves only: those are equal to the bit, whatever they have learned.

# %% tags=["trains"]
replicas, _ = twenty_steps(4, seed=0, dtype="float32")
for same in zip(*replicas):
    assert_replicas_equal(same)

# %% [markdown]
# ### And in float32?
#
# **Predict:** one step in float32 left a difference below $10^{-6}$. After twenty steps: twenty
# times that, less, or more?

# %%
def drift(dtype, seed):
    runs = [[get_params(init_params(seed), d, dtype) for d in four[:k]] for k in (1, 2)]
    rows = []
    for x, y in batches(small, 64, seed=seed):
        for replicas in runs:
            train_batch(x.astype(dtype), y, replicas, four[: len(replicas)], lr=0.3)
        rows.append(apart(runs[1], runs[0][0]))
    return rows


grown = {dtype: [drift(dtype, seed) for seed in range(3)] for dtype in ("float32", "float64")}

# %% [markdown]
# Three seeds, each step's difference after the last one's, on a logarithmic axis:

# %% tags=["measured"]
ratio = np.median([rows[-1] / rows[0] for rows in grown["float32"]])
fig, ax = figure(f"Rounding grows from step to step: {ratio:,.0f} times in 20 steps of float32",
                 "step", "largest difference / largest weight")
for (dtype, runs), style, color in zip(grown.items(), ("-", "--"), (ORANGE, BLUE)):
    for rows in runs:
        label = dtype if rows is runs[0] else None
        ax.semilogy(range(1, 21), rows, style, color=color, label=label)
ax.axhline(1e-12, color=GREY, lw=0.8)
ax.text(1, 1.6e-12, "the bound that we assert in float64", color=GREY, fontsize=8)
ax.legend()
show(fig, alt="Difference between one and two devices against steps: float32 starts near one in "
     "ten million and grows; float64 stays far below 1e-12.")

# %% [markdown]
# Each step rounds anew, and then passes the difference through relus and a softmax: an activation
# that is just above zero on one side and just below on the other takes another road. In float64 it
# would have to lie ten million times closer to zero for that. Training amplifies small
# differences, on one device as on many; with another order of the batch it would do the same. So
# *equality* is a claim for float64, or for one step. In float32 the claim is that it trains as
# well, which comes next.
#
# ### A comparison that always passes
#
# *The Straight Dope* starts its weights as normal numbers times 0.01. Let us take twenty steps like
# that, once with an all-reduce and once with none at all.

# %% tags=["trains"]
def plateau(**options):
    rng = np.random.default_rng(0)
    params = [nd.array(0.01 * rng.standard_normal(s) * (len(s) > 1)) for s in shapes]
    replicas = [get_params(params, d) for d in two]
    return np.array(train(replicas, two, batches(small, 64), 0.3, **options))


# %% [markdown]
# **Predict:** how large is the difference between the losses of the right and the broken training?

# %%
right, broken = plateau(), plateau(reduce=lambda arrays: None)
assert np.abs(right - broken).max() < 0.05 and min(right) > 2.2, "still on the plateau?"
print(f"loss of guessing among ten classes: {np.log(10):.2f}; it has not moved from there")

# %% [markdown]
# Devices that never talk to each other pass this comparison too, since nothing is learned yet: the
# loss sits on a plateau at $\ln 10$, where gradients are close to zero and any two programs agree.
# The same two programs from our start, where the loss falls from the first step, and judged by
# their weights:

# %%
reference = one_step(two[:1], "float64")[0]
ours = apart(one_step(two, "float64"), reference)
silent = apart(one_step(two, "float64", reduce=lambda arrays: None), reference)
assert ours < 1e-14 < 1e-4 < silent, "a missing all-reduce must be seen"
print("a missing all-reduce is seen after a single step")

# %% [markdown]
# ## Training for real
#
# How well does it do on images that it has not seen? All devices share in answering: each
# classifies its shard, and the counts are added.

# %%
def accuracy(replicas, devices, dataset, size=500):
    right = 0
    for start in range(0, len(dataset[1]), size):
        batch = (split_and_load(a[start : start + size], devices, even=False) for a in dataset)
        shards = list(zip(*batch, replicas))
        hits = [(lenet(x, p).argmax(axis=1) == y).sum() for x, y, p in shards]
        right += sum(hit.asscalar() for hit in hits)
    return right / len(dataset[1])


# %% [markdown]
# An untrained network should be right about one time in ten, give or take.

# %%
untrained = accuracy([get_params(init_params(), d) for d in two], two, test_set)
assert 0 < untrained < 0.4, f"{untrained}: better than an untrained network can be"

# %% [markdown]
# A run: an epoch and a half of MNIST, or as many of a smaller set as make sixty steps of 256. It
# keeps the loss of each step, shows a bar, and ends with one line where you stop it.

# %% tags=["trains"]
import sys
from itertools import islice
from math import ceil

from tqdm import tqdm


def fit(k, size, lr, images=max(3 * len(train_set[1]) // 2, 60 * 256)):
    stream = islice(batches(train_set, size, epochs=99), ceil(images / size))
    bar = tqdm(stream, f"batch {size} on {k}", ceil(images / size), False, sys.stdout, ncols=79)
    replicas = [get_params(init_params(), d) for d in two[:k]]
    try:
        losses = train(replicas, two[:k], bar, lr)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("training stopped; run the cell again to start anew") from None
    return losses, accuracy(replicas, two[:k], test_set)


# %% [markdown]
# First one device; then two with everything else the same; then two with batch *and* learning rate
# doubled, as *The Straight Dope* does to keep each device's shard as large as before. This cell
# takes **about two minutes with MNIST** on slow cores.

# %% tags=["measured", "trains"]
runs = {}
for setting in [(1, 256, 0.3), (2, 256, 0.3), (2, 512, 0.6)]:
    runs[setting] = fit(*setting)
    print("devices {}, batch {}, learning rate {}:".format(*setting),
          f"{runs[setting][1]:.2%} of test images right ({data.name})")

# %% [markdown]
# What should hold on any data: both of the first two learn, and as well as each other.

# %%
one, both = runs[1, 256, 0.3][1], runs[2, 256, 0.3][1]
assert min(one, both) > 0.85, f"accuracies {one:.3f}, {both:.3f}: they should have learned"
assert abs(one - both) < 0.02, "with the same batches two devices learn what one learns"

# %% [markdown]
# Their losses, step by step, and in float32. They coincide until rounding has grown, may then part
# for a few steps, and meet again: the same training, in other last digits.

# %% tags=["measured"]
gaps = np.abs(np.subtract(runs[1, 256, 0.3][0], runs[2, 256, 0.3][0])[:60])
together = int(np.argmax(np.append(gaps, 1) > 0.01))
fig, ax = figure(f"In float32 the losses agree to 0.01 for the first {together} steps",
                 "step", f"loss on the batch ({data.name})")
ax.plot(runs[1, 256, 0.3][0][:60], color=GREY, lw=5, alpha=0.5, label="1 device")
ax.plot(runs[2, 256, 0.3][0][:60], color=BLUE, lw=1, label="2 devices")
ax.legend()
show(fig, alt="Two falling loss curves, for one and two devices, that coincide at first.")

# %% [markdown]
# ## The speed-up
#
# The second promise. A speed-up is easily measured wrong: on a cold start, with work still in the
# queue, once, or while somebody else uses the machine. So we
#
# - train a few steps first, unmeasured;
# - call `waitall` before reading the clock (chapter 01);
# - measure one and two devices *in turn*, so that a machine that gets slower is so for both;
# - do it until nine rounds are kept, and discard any in which other programs took more than
#   2% of the CPU's time: how many is part of the result;
# - quote the median, and show the spread.

# %%
replicas = [get_params(init_params(), d) for d in two]


def throughput(k, steps=12):
    train_batch(x, y, replicas[:k], two[:k], 0.01)
    nd.waitall()
    start = time.perf_counter()
    for _ in range(steps):
        train_batch(x, y, replicas[:k], two[:k], 0.01)
    nd.waitall()
    return steps * len(x) / (time.perf_counter() - start)  # images/s


# %% [markdown]
# There is a third number to have: how fast would two devices be if they *never* talked to each
# other? Each trains a replica of its own on half of the batch, with no all-reduce. No program can
# beat that on this machine. What it falls short of 2 is the machine's doing: cores that share a
# cache, memory and their power. What we fall short of *it* is the price of all-reduce and of
# waiting for the slower one.

# %%
halves = [(x[:128], y[:128]), (x[128:], y[128:])]


def apart_throughput(steps=12):
    nd.waitall()
    start = time.perf_counter()
    for _ in range(steps):
        for r in range(2):
            train_batch(*halves[r], replicas[r : r + 1], two[r : r + 1], 0.01)
    nd.waitall()
    return steps * len(x) / (time.perf_counter() - start)  # images/s


# %% [markdown]
# **Predict** the three medians, as multiples of the first. This takes about a minute.
#
# If nine rounds have been discarded before three could be kept, the numbers are of *all* rounds:
# read them with care. An open browser can be enough for that; leave it alone while this runs.

# %% tags=["measured"]
from helpers.timing import Others

kept, discarded = [], []
while len(kept) < 9 and len(discarded) < 9:
    with Others() as others:
        row = throughput(1), throughput(2), apart_throughput()
    (kept if others.share <= 0.02 else discarded).append(row)
rates = np.array(kept if len(kept) > 2 else kept + discarded)  # [rounds, 3]
ratios = rates[:, 1:] / rates[:, :1]
print(f"rounds kept {len(kept)}, discarded {len(discarded)}; {data.name}, batch 256")
print("images/s, median: 1 device {:,.0f}, 2 devices {:,.0f}".format(*np.median(rates, axis=0)))
print("speed-up of 2 devices: median {:.2f}, from {:.2f} to {:.2f}".format(
    np.median(ratios[:, 0]), ratios[:, 0].min(), ratios[:, 0].max()))
print("speed-up if they never talked: median {:.2f}".format(np.median(ratios[:, 1])))

# %% [markdown]
# All rounds, not only their median:

# %% tags=["measured", "figure:speedup"]
speedup, ideal = np.median(ratios, axis=0)
fig, ax = figure(f"Two devices train {speedup:.2f} times as fast as one", "", "images per second")
for i, (column, color) in enumerate(zip(rates.T, (GREY, BLUE, GREEN))):
    ax.plot(i + np.linspace(-0.15, 0.15, len(column)), column, "o", color=color, alpha=0.6)
    ax.plot([i - 0.25, i + 0.25], [np.median(column)] * 2, color=color, lw=3)
ax.axhline(2 * np.median(rates[:, 0]), color="black", lw=1, ls="--")
ax.text(-0.4, 2.03 * np.median(rates[:, 0]), "ideal: twice one device", va="bottom", fontsize=9)
ax.set_xticks(range(3), ["1 device", "2 devices", "2 devices that\nnever talk"])
ax.set(ylim=(0, 2.4 * np.median(rates[:, 0])), xlim=(-0.5, 2.5))
show(fig, alt="Images per second of each round for one device, two devices and two devices that "
     "never talk, with medians and a dashed line at twice one device.")

# %% [markdown]
# If that is not what your machine shows, the next cell says what to look at.

# %% tags=["measured"]
if speedup >= 1.3:
    print(f"{speedup:.2f}: the second device is worth having")
elif ideal < 1.3:
    print("two trainings that never talk gain little either: are there two free cores?",
          f"Discarded rounds: {len(discarded)}. Close other programs and run the cells again.")
else:
    print("the devices wait for each other: was helpers imported before mxnet? Restart the kernel,",
          "and see that MXNET_CPU_TEMP_COPY and OMP_NUM_THREADS were not set otherwise.")

# %% [markdown]
# Why do the settings in `helpers.engine` matter? As MXNet comes, all CPU devices share four
# scratch spaces, and a convolution that needs one waits for whoever has it; and each operator
# spreads over all cores, so that one "device" already uses the whole machine. The first exercise
# takes the settings away.
#
# ## Batch and learning rate, one at a time
#
# The third run above changed three things at once: devices, batch and learning rate. Whatever came
# out could not be explained by any one of them. A published lesson did just this: its two devices
# learned more slowly, and the page could not say why (*The Straight Dope*, chapter 7). We take two
# more runs, of 15,360 images each, and change one thing at a time.

# %% tags=["measured", "trains"]
for setting in [(2, 512, 0.3), (2, 256, 0.6)]:
    runs[setting] = fit(*setting, images=60 * 256)
for setting, (losses, _) in runs.items():
    seen = losses[: 60 * 256 // setting[1]]
    late = np.mean(seen[-len(seen) // 4 :])
    print(setting, f"loss over the last quarter {late:.3f} ({data.name})")

# %% [markdown]
# **Predict** before you look at the figure: with twice the batch and the same learning rate, is a
# network that has seen as many images further or less far?

# %% tags=["measured"]
last = min((np.mean(runs[s][0][: 60 * 256 // s[1]][-10:]), s) for s in runs)[1]
fig, ax = figure("After as many images, batch {1} at rate {2} has the lowest loss".format(*last),
                 "images seen", f"loss, mean of 1,536 images ({data.name})")
styles = {(2, 256, 0.3): ("-", BLUE), (2, 512, 0.3): ("--", ORANGE),
          (2, 256, 0.6): (":", GREEN), (2, 512, 0.6): ("-.", GREY)}
for setting, (style, color) in styles.items():
    width = 1536 // setting[1]
    losses = np.array(runs[setting][0][: 60 * 256 // setting[1]]).reshape(-1, width).mean(axis=1)
    ax.plot(1536 * np.arange(1, len(losses) + 1), losses, style, color=color, lw=2,
            label="{} devices, batch {}, rate {}".format(*setting))
fig.legend(fontsize=8, loc="outside lower center", ncols=2)
show(fig, alt="Loss against images seen for four combinations of batch size and learning rate on "
     "two devices.")

# %% [markdown]
# The devices play no part in these differences: that was settled above. What you see is batch and
# rate alone. A batch of 512 at the same rate takes half as many steps as 256, each of about the
# same length, so it tends to be behind after as many images. A rate of 0.6 makes each step twice
# as long. That could make up for it, and late in training it often does; but in the first steps
# gradients are large, and a long step may overshoot. Look at where each curve is in the beginning
# and at the end. Doubling both together is a first guess and no law; warming the rate up over the
# first steps is the usual remedy (Goyal et al., 2017). Chapter 11 maps batch against rate.

# %% [markdown]
# ## Summary
#
# - A data-parallel step: split, gradient of the *sum* on each device, all-reduce, update with the
#   sum over $n$. Two lines more than for one device.
# - In float64, 20 steps on 1, 2 and 4 devices agree to $10^{-12}$; in float32 rounding grows from
#   step to step, so there equality is for one step, and learning as well is for the run.
# - Compare weights, on all replicas, while the loss falls. On a plateau everything agrees.
# - Measure speed alternately, warmed up, waited for, several times, and against what the machine
#   could do at best.
# - Devices, batch size and learning rate are three things. Change one at a time.
#
# Next, chapter 05: Gluon keeps the replicas for you.
#
# **Further reading.** *The Straight Dope*, multiple GPUs from scratch; K. He et al., *Delving deep
# into rectifiers* (2015), arXiv:1502.01852; P. Goyal et al., *Accurate, large minibatch SGD*
# (2017), arXiv:1706.02677, for the rule of growing the rate with the batch.

# %% [markdown]
# ## Exercises
#
# 1. **As MXNet comes.** Start a fresh kernel, import `mxnet` *before* `helpers`, and run this
#    chapter's speed-up cells. What is the speed-up now? Which of the settings in `helpers.engine`
#    brings most of it back?
# 2. **The mean of means.** Change the loss to the *mean* over each shard and the update to
#    $\eta / k$. For which batches is the result the same, and for which not? Show one of each.
# 3. **Who is wrong?** A colleague updates with `lr / len(xs[0])`, the size of a shard. By what
#    factor is the update off, and why might nobody notice for a while?

# %% [markdown]
# ### Answer 1
#
# The settings are environment variables that count only before MXNet loads, so a
# new process is needed for each try. Here we check that they are in place in this one; how much
# each brings is yours to measure: expect the scratch spaces (`MXNET_CPU_TEMP_COPY`) to matter
# most.

# %% tags=["solution"]
import os

from helpers.engine import SETTINGS

assert all(name in os.environ for name in SETTINGS), "set by importing helpers before mxnet"
print("in place:", ", ".join(SETTINGS))

# %% [markdown]
# ### Answer 2
#
# With equal shards the mean of the $k$ means is the mean of the batch, so nothing
# changes. With uneven ones, such as 5 and 4, each example of the smaller shard weighs more.

# %% tags=["solution"]
def mean_of_means(n):
    x, y, p = small[0][:n], small[1][:n], get_params(init_params(), two[0])
    shards = zip(split_and_load(x, two, False), split_and_load(y, two, False))
    means = [loss_sum(*(a.as_in_context(two[0]) for a in shard), p) / len(shard[0])
             for shard in shards]
    return abs(sum(means) / 2 - loss_sum(x.as_in_context(two[0]), y, p) / n).asscalar()


assert mean_of_means(8) < 1e-6 < mean_of_means(9), "equal only for equal shards"

# %% [markdown]
# ### Answer 3
#
# The sum over $n$ examples is divided by $n/k$, so the update is $k$ times too
# long: as if the learning rate had been multiplied by $k$. With one device it is right, with two
# and a careful rate it may even train faster; with many it may diverge. A check against one device
# finds it after one step.

# %% tags=["solution"]
def short_batch(arrays):
    allreduce(arrays)
    for a in arrays:
        a *= len(arrays)  # the same as dividing by the size of a shard


assert apart(one_step(two, "float64", reduce=short_batch), reference) > 1e-4
