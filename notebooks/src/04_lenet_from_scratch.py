# %% [markdown]
# # 04 · LeNet from scratch on k devices
#
# A split batch (chapter 02) and an all-reduce (chapter 03) make a training step for any number of
# devices. It has to keep two promises: *k* devices compute what one computes, and they are faster.
#
# ![The host sends a shard of the batch to each of two devices. Each finds the gradient of its
# shard's loss. An all-reduce gives both devices the sum of both gradients, and both make the same
# update.](src/drawings/lenet_step.svg)
#
# ## What you'll do
#
# Make one step by hand, then write it as a function and train LeNet on two devices. Compare its
# weights with those of one device. Find out why that fails in float32. Measure the
# speed-up.
#
# ## What you'll learn
#
# - the four parts of a data-parallel step;
# - what "the same" means for floating-point numbers;
# - what a wrong all-reduce does to training, and why its accuracy looks right;
# - what a speed-up has to be compared with.
#
# ## What you need
#
# Chapters 01 to 03. No GPU. Reading takes {reading time}. Running takes about two minutes.

# %%
from helpers import allreduce, assert_replicas_equal, devices, load_data, split_and_load
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# %% [markdown]
# ## Data and network
#
# What is trained, and on what?

# %% tags=["measured"]
data = load_data("mnist")
print(data)

# %%
mean = data.train_images.mean()
train_set = (nd.array(data.train_images - mean), nd.array(data.train_labels))  # images, labels
test_set = (nd.array(data.test_images - mean), nd.array(data.test_labels))


def batches(dataset, size, epochs=1, seed=0):
    images, labels = dataset
    rng = np.random.default_rng(seed)
    for epoch in range(epochs):
        order = nd.array(rng.permutation(len(labels)), dtype="int32")  # a new one each epoch
        for begin in range(0, len(labels), size):
            chosen = order[begin : begin + size]  # the last batch may be smaller
            yield images.take(chosen), labels.take(chosen)  # whole images

# %% [markdown]
# Our LeNet has two convolutions and two dense layers, of the sizes in *The Straight Dope*. `p` is a
# list of eight arrays, a weight and a bias for each layer. No line names a device: an operator runs
# where its inputs are.

# %%
#    weight          inputs  outputs  gain
layers = [
    ((20, 1, 3, 3),       9,      20,  1.0),  # convolution: 1 x 3 x 3 inputs
    ((50, 20, 5, 5),    500,      50,  1.5),  # convolution: 20 x 5 x 5 inputs
    ((800, 128),        800,     128,  1.5),  # dense: 50 x 4 x 4 inputs
    ((128, 10),         128,      10,  0.5),  # dense
]


def pool(h):  # relu first
    return nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, p):  # x: [n, 1, 28, 28]
    h = pool(nd.Convolution(x, p[0], p[1], kernel=(3, 3), num_filter=20))  # [n, 20, 13, 13]
    h = pool(nd.Convolution(h, p[2], p[3], kernel=(5, 5), num_filter=50))  # [n, 50, 4, 4]
    h = nd.relu(nd.dot(h.flatten(), p[4]) + p[5])  # [n, 128]
    return nd.dot(h, p[6]) + p[7]  # [n, 10]


def loss_sum(x, y, p):
    return -nd.log_softmax(lenet(x, p)).pick(y).sum()  # pick: the entry of each label

# %% [markdown]
# The loss is the *sum* over the images, as in chapter 02. Weights start as random numbers of
# standard deviation gain · $\sqrt{2 / \text{inputs}}$. Gain 1 keeps values at about the same size
# from layer to layer (He et al., 2015). We let them grow a little, and make the first scores small.

# %%
def init_params(seed=0):
    rng = np.random.default_rng(seed)
    params = []
    for shape, inputs, outputs, gain in layers:
        weight = gain * np.sqrt(2 / inputs) * rng.standard_normal(shape)
        params.append(nd.array(weight, dtype="float64"))  # get_params will round it
        params.append(nd.zeros(outputs))  # the bias
    return params

# %% [markdown]
# A *replica* is one device's copy of all parameters. Each copy gets memory for its gradient.

# %%
def get_params(params, device, dtype="float32"):
    replica = []
    for param in params:
        param = param.astype(dtype).as_in_context(device)  # astype makes a copy
        param.attach_grad()  # backward overwrites it: no zero_grad
        replica.append(param)
    return replica

# %% tags=["fold"]
# check: the untrained network guesses: its mean loss is within 0.3 of ln 10; the gains
x, y = next(batches(train_set, 256))
replica = get_params(init_params(), mx.cpu(0))
loss = loss_sum(x, y, replica).asscalar() / len(x)
assert abs(loss - np.log(10)) < 0.3, f"{loss:.2f}: at the start the network should just guess"
for param, (shape, inputs, outputs, gain) in zip(replica[::2], layers, strict=True):
    inputs_of_one = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
    assert param.shape == shape and inputs == inputs_of_one, "the table's inputs"
sizes = []  # of the values before each relu, with the gain of `layers` and with 1
for gains in [(1.0, 1.5, 1.5), (1.0, 1.0, 1.0)]:
    p = [param * (gain / layer[3]) for param, layer, gain in zip(replica[::2], layers, gains)]
    zeros = replica[1::2]
    h = [nd.Convolution(x, p[0], zeros[0], kernel=(3, 3), num_filter=20)]
    h.append(nd.Convolution(pool(h[0]), p[1], zeros[1], kernel=(5, 5), num_filter=50))
    h.append(nd.dot(pool(h[1]).flatten(), p[2]))
    sizes.append([round(float(np.std(values.asnumpy())), 2) for values in h])
assert max(sizes[1]) < 1.5 * min(sizes[1]), "with gain 1 they should keep their size"
assert sizes[0] == sorted(sizes[0]) and sizes[0][-1] < 5 * sizes[0][0], "ours should grow a little"

# %% [markdown]
# ## One step by hand
#
# What happens on each device in one step? We take eight images and two devices. **First, the
# shards.** The host cuts the batch and sends a half to each device. Both devices start from the
# same weights.

# %% tags=["measured"]
two = devices(2)
x, y = next(batches(train_set, 8))
x_shards = split_and_load(x, two)
y_shards = split_and_load(y, two)
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
for x_shard, y_shard in zip(x_shards, y_shards):
    print(x_shard.context, "images", x_shard.shape, "labels", y_shard.asnumpy())

# %% [markdown]
# **Second, the gradients.** Each device computes the loss of its shard with its replica. Then each
# goes back through its own loss. Python only *starts* the work, so the devices compute at the same
# time (chapter 01). We look at the gradient of the last bias, the ten numbers that are added to the
# scores. **Predict:** are they the same on both devices?

# %% tags=["measured", "trains"]
losses = []
with autograd.record():
    for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
        losses.append(loss_sum(x_shard, y_shard, replica))
for loss in losses:
    loss.backward()

for loss, replica in zip(losses, replicas):
    print(loss.context, f"loss {loss.asscalar():.1f}, gradient", replica[7].grad.asnumpy().round(2))

# %% [markdown]
# They differ, since each device saw other images. A class that is among a device's labels has a
# negative gradient there: its score should rise. **Third, the sum.** For each of the eight
# parameters, an all-reduce replaces the two gradients by their sum. **Fourth, the update.** Each
# parameter loses rate / $n$ times the sum. The rate is 0.2, and $n$ is 8, all images *in the
# batch*.

# %% tags=["measured", "trains"]
for number in range(8):
    allreduce([replicas[0][number].grad, replicas[1][number].grad])

for replica in replicas:
    for param in replica:
        param -= 0.2 / 8 * param.grad
    bias = replica[7]
    print(bias.context, "gradient", bias.grad.asnumpy().round(2))
    print("       bias    ", bias.asnumpy().round(2))

# %% tags=["fold"]
# check: both replicas are what a plain step on one device gives, and equal; the gradient's signs
alone = get_params(init_params(), two[0])
with autograd.record():
    loss = loss_sum(x, y, alone)
loss.backward()
for param in alone:
    param -= 0.2 / 8 * param.grad
assert largest_difference(replicas, alone) < 1e-3, "another step"
for number in range(8):
    assert_replicas_equal([replica[number] for replica in replicas])
for x_shard, y_shard, device in zip(x_shards, y_shards, two):
    alone = get_params(init_params(), device)
    with autograd.record():
        loss = loss_sum(x_shard, y_shard, alone)
    loss.backward()
    present = np.isin(np.arange(10), y_shard.asnumpy())
    assert ((alone[7].grad.asnumpy() < 0) == present).all(), "negative where a label is"

# %% [markdown]
# Both devices had the same weights and subtracted the same numbers. So the replicas stay equal.
#
# ## The step
#
# The same four parts, for any number of devices. `NEW` marks what a step on one device doesn't
# have.

# %%
def train_batch(x, y, replicas, devices, lr, reduce=allreduce):  # later: wrong ones
    x_shards = split_and_load(x, devices, even=False)  # NEW: shards, perhaps uneven
    y_shards = split_and_load(y, devices, even=False)  # NEW

    losses = []  # NEW
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):  # NEW: each device
            losses.append(loss_sum(x_shard, y_shard, replica))
    for loss in losses:  # NEW
        loss.backward()

    for number in range(len(replicas[0])):  # NEW: for each parameter,
        reduce([replica[number].grad for replica in replicas])  # every device gets the sum

    for replica in replicas:  # NEW
        for param in replica:
            param -= lr / len(x) * param.grad

    total = 0
    for loss in losses:
        total = total + loss.as_in_context(devices[0])  # NEW: to one device
    return total / len(x)

# %% [markdown]
# The loop around it looks at the loss of *two steps ago*. If it waited for the newest one, devices
# would be idle while Python prepares the next step. If it never waited, thousands of steps could
# pile up in the queues. A loss that isn't a finite number ends the training.

# %%
def finite(loss, step):
    value = loss.asscalar()  # waits until the loss is computed
    if not np.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}: broken data, or too high "
                                 "a learning rate?")
    return value


def train(replicas, devices, stream, lr, reduce=allreduce):
    losses = []  # those that we have looked at
    pending = []  # the latest two, which may still be in a queue
    for x, y in stream:
        pending.append(train_batch(x, y, replicas, devices, lr, reduce))
        if len(pending) > 2:
            losses.append(finite(pending.pop(0), step=len(losses)))
    for loss in pending:
        losses.append(finite(loss, step=len(losses)))
    return losses

# %% tags=["fold"]
# measure: accuracy(): the share of images classified right; each device counts its shard
def accuracy(replicas, devices, dataset):
    images, labels = dataset
    right = 0
    for begin in range(0, len(labels), 500):
        x_shards = split_and_load(images[begin : begin + 500], devices, even=False)
        y_shards = split_and_load(labels[begin : begin + 500], devices, even=False)
        counts = []
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            guesses = lenet(x_shard, replica).argmax(axis=1)
            counts.append((guesses == y_shard).sum())
        for count in counts:
            right += count.asscalar()
    return right / len(labels)

# %% [markdown]
# We train on two devices: an epoch of MNIST, or ten epochs of a smaller data set. With MNIST it
# takes **ten to forty seconds**.

# %% tags=["measured", "trains"]
epochs = 1 if data.name == "mnist" else 10
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
losses = train(replicas, two, batches(train_set, 128, epochs), lr=0.2)

reached = accuracy(replicas, two, test_set)
print(f"loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} in the last of {len(losses)}")
print(f"{reached:.2%} of the test images right ({data.name})")
for number in range(8):
    assert_replicas_equal([replicas[0][number], replicas[1][number]])
print("both replicas are equal to the bit")

# %% tags=["fold"]
# check: it has learned, which equal replicas alone wouldn't show; one device counts as many right
x, y = test_set[0][:1000], test_set[1][:1000]
alone = (lenet(x, replicas[0]).argmax(axis=1) == y).mean().asscalar()
assert abs(accuracy(replicas, two, (x, y)) - alone) < 1e-6, "accuracy counts otherwise"
assert reached > (0.96 if data.name == "mnist" else 0.9), f"{reached:.2%}: it should have learned"

# %% [markdown]
# It learns. But are the replicas what *one* device would have?
#
# ## k devices compute what one computes
#
# The oracle is the plain loop, with no shards, no replicas and no all-reduce. Both sides take
# twenty steps in float64. The last batch makes uneven shards.

# %%
small = (train_set[0][:1275], train_set[1][:1275])  # 19 batches of 64, and one of 59
four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]  # right results don't need four cores


def plain_steps(seed):
    params = get_params(init_params(seed), four[0], "float64")
    for x, y in batches(small, 64, seed=seed):
        with autograd.record():
            loss = loss_sum(x.astype("float64"), y, params)
        loss.backward()
        for param in params:
            param -= 0.2 / len(x) * param.grad
    return params


def twenty_steps(k, seed, reduce=allreduce):
    replicas = [get_params(init_params(seed), device, "float64") for device in four[:k]]
    for x, y in batches(small, 64, seed=seed):
        train_batch(x.astype("float64"), y, replicas, four[:k], 0.2, reduce)
    return replicas

# %% [markdown]
# `largest_difference` looks at all parameters of all replicas. It returns the largest difference as
# a share of that parameter's largest entry, and prints where it is.

# %% tags=["measured", "trains"]
whole = plain_steps(seed=0)
for k in [1, 2, 3, 4]:
    difference = largest_difference(twenty_steps(k, seed=0), whole)
    print(f"{k} devices: {difference}")
    assert difference < 1e-12

# %% tags=["fold", "trains", "few:range(3)=>range(1)"]
# check: the same from three seeds
for seed in range(3):
    whole = plain_steps(seed)
    for k in [1, 2, 3, 4]:
        assert largest_difference(twenty_steps(k, seed), whole) < 1e-12, f"seed {seed}, {k} devices"

# %% [markdown]
# All agree to $10^{-12}$, but only one device to the last bit: several add the same numbers in
# another order, and each addition rounds. In float64 that is far below what a mistake causes.
#
# This check sees *arithmetic*. It can't see *where* the work was done. If every shard were sent to
# device 0, the sum on simulated devices would be as right as before. A second check looks at the
# place:

# %% tags=["fold", "trains"]
# check: where the scores are computed, and that all shards on device 0 would pass the first check
from collections import Counter


def with_spy(split):
    """Twenty steps whose shards are made by `split`: replicas, and how often scores were where."""
    places = Counter()

    def noted(x, p):
        scores = plain_lenet(x, p)
        places[str(scores.context)] += 1
        return scores

    plain_lenet, plain_split = lenet, split_and_load
    try:
        globals().update(lenet=noted, split_and_load=split)  # for this check only
        return twenty_steps(2, seed=0), places
    finally:
        globals().update(lenet=plain_lenet, split_and_load=plain_split)


def all_to_the_first(data, devices, even):
    return [shard.as_in_context(devices[0]) for shard in helpers_split(data, devices, even=even)]


helpers_split = split_and_load
whole = plain_steps(seed=0)
for name, split, expected in [
    ("split_and_load", split_and_load, {"cpu(0)": 20, "cpu(1)": 20}),
    ("all to device 0", all_to_the_first, {"cpu(0)": 40}),
]:
    replicas, places = with_spy(split)
    passes = bool(largest_difference(replicas, whole) < 1e-12)
    where = ", ".join(f"{times} times on {place}" for place, times in sorted(places.items()))
    print(f"{name:15} agrees with one device: {passes}; scores computed", where)
    assert passes and places == expected, "the shards' work is elsewhere"

# %% tags=["fold", "trains"]
# check: the losses agree too; batches differ from epoch to epoch; four devices add in another order
labels = [y.asnumpy() for _, y in batches(small, 64, epochs=2)]
assert [len(y) for y in labels] == 2 * (19 * [64] + [59]) and (labels[0] != labels[20]).any()
once = np.concatenate(labels[:20])
assert (np.sort(once) == np.sort(small[1].asnumpy())).all(), "an epoch has each image once"
params = get_params(init_params(), four[0], "float64")
alone = []
for x, y in batches(small, 64):
    with autograd.record():
        loss = loss_sum(x.astype("float64"), y, params)
    loss.backward()
    for param in params:
        param -= 0.2 / len(x) * param.grad
    alone.append(loss.asscalar() / len(x))
stream = [(x.astype("float64"), y) for x, y in batches(small, 64)]
for k in [1, 2, 3, 4]:
    replicas = [get_params(init_params(), device, "float64") for device in four[:k]]
    losses = train(replicas, four[:k], stream, 0.2)
    assert np.allclose(losses, alone, rtol=1e-12, atol=0), f"{k} devices: other losses"
assert largest_difference(replicas, params) > 0, "the same order would hide all rounding"
assert alone[-1] < 0.9 * alone[0], "on a plateau any comparison passes"

# %% [markdown]
# ### What a wrong all-reduce does
#
# Five mistakes in the all-reduce, on two devices: the sum stays on device 0; device 1 gets device
# 0's gradient; device 1's gradient counts twice; both get half of the sum; nothing is sent.
# **Predict:** which leave the replicas equal to each other? Which does accuracy show? The last
# columns have the accuracy of each replica after an epoch of MNIST, from five seeds. These runs
# take minutes, so they were made beforehand.

# %% tags=["fold", "trains"]
# measure: five wrong all-reduces: weights after 20 steps, and accuracy from stored runs
import json
from pathlib import Path


def no_broadcast(grads):
    """the sum stays on device 0"""
    grads[0][:] += grads[1].as_in_context(grads[0].context)


def first_only(grads):
    """device 1 gets device 0's gradient"""
    grads[0].copyto(grads[1])


def counts_twice(grads):
    """device 1's gradient counts twice"""
    grads[0][:] += grads[1].as_in_context(grads[0].context)
    allreduce(grads)


def mean_of_shards(grads):
    """half of the sum, on both"""
    allreduce(grads)
    for grad in grads:
        grad /= len(grads)


def nothing(grads):
    """nothing is sent"""


wrong = [no_broadcast, first_only, counts_twice, mean_of_shards, nothing]
stored = json.loads(Path("src/results/lenet.json").read_text())


def first_epoch(name):
    """Accuracies after an epoch, in percent: [seed, replica]."""
    return 100 * np.array([run[0]["accuracies"] for run in stored["runs"][f"lenet-{name}"]])


whole = plain_steps(seed=0)
print("                                    far from               accuracy in %, five seeds:")
print("what it does                        one device?  replicas  medians         low to high")
for reduce in [allreduce, *wrong]:
    replicas = twenty_steps(2, 0, reduce)
    far = largest_difference(replicas, whole) > 1e-3
    among = "differ" if largest_difference(replicas[:1], replicas[1]) > 0 else "equal"
    name = "128-0.2" if reduce is allreduce else reduce.__name__
    ends = first_epoch(name)
    medians = np.median(ends, axis=0)
    words = "right" if reduce is allreduce else reduce.__doc__
    print(f"{words:36}{'yes' if far else 'no':13}{among:10}{medians[0]:.1f} and {medians[1]:.1f}   "
          f"{ends.min():.1f} to {ends.max():.1f}")
    assert far == (reduce in wrong), f"{reduce.__name__} must be seen, and the right one pass"

# %% [markdown]
# Each mistake is far from one device's weights: more than a thousandth. Three of them leave the
# replicas equal, so comparing replicas with each other can't show those. Accuracy shows little: the
# ranges overlap, and *counts twice* even has the best median. For each mistake still steps
# downhill, with half of the gradient or with one shard weighted twice. Without a right run beside
# it, none looks wrong. One step compared with one device is enough, even in float32: the right one
# differs by less than 0.001, each wrong one by more than 0.1.

# %% tags=["fold", "trains"]
# check: one step in float32: the right all-reduce is within 1e-3 of one device, wrong ones over 0.1
x, y = next(batches(train_set, 256))


def one_step(k, reduce=allreduce):
    replicas = [get_params(init_params(), device) for device in four[:k]]
    train_batch(x, y, replicas, four[:k], 0.2, reduce)
    return replicas


alone = one_step(1)[0]
assert largest_difference(one_step(2), alone) < 1e-3, "the right one"
for reduce in wrong:
    assert largest_difference(one_step(2, reduce), alone) > 0.1, reduce.__name__

# %% tags=["fold"]
# check: stored accuracies: ranges overlap, and how many seeds end behind their right run
print("made by", stored["command"], "on", stored["machine"], stored["date"], "at commit",
      stored["commit"])
right = first_epoch("128-0.2")
one_and_two = np.abs(first_epoch("one-device") - right).max()
print(f"one device and two: at most {one_and_two:.2f} points apart, seed by seed")
assert one_and_two < 0.3, "one device and two, for each seed"
behind = {}
for reduce in wrong:
    ends = first_epoch(reduce.__name__)
    overlap = (ends.max(0) > right.min()) & (ends.min(0) < right.max())  # of each replica
    assert overlap.all() and ends.min() > 93 and (ends != right).all(), "overlap, and no ties"
    behind[reduce.__name__] = (ends < right).sum(0).tolist()  # how many of five seeds, by replica
    print(f"{reduce.__doc__}: of five seeds, {behind[reduce.__name__]} end behind the right run, "
          "by replica")
assert list(behind.values()) == [[3, 5], [4, 4], [1, 1], [4, 4], [4, 5]], behind
best = max([right, *(first_epoch(reduce.__name__) for reduce in wrong)], key=np.median)
assert (best == first_epoch("counts_twice")).all(), "counts_twice should have the best median"

# %% [markdown]
# ## Why float32 jumps
#
# Few people train in float64. **Predict:** one step in float32 leaves a difference of about
# $10^{-6}$ between one device and two. After sixty steps, is it sixty times that, less, or more?
#
# Here is something that rounding could make large. Two numbers that differ by rounding only, one
# just above zero and one just below, go through relu:

# %%
for value in [1e-7, -1e-7]:
    h = nd.array([value])
    h.attach_grad()
    with autograd.record():
        output = nd.relu(h)
    output.backward()
    print(f"relu({value}) = {output.asscalar():.7f}, derivative {h.grad.asscalar():.0f}")

# %% [markdown]
# The outputs agree to $10^{-7}$, but one derivative is 1 and the other is 0. A number that goes
# into a relu is a *unit*. It is *on* where it is positive, else off. If it is on in one training
# and off in the other, it has *flipped*: its part of the gradient is missing in one of them. Does
# that happen? A batch of 32 images has 539,136 units that reach the scores. In each of sixty steps
# we count those that have flipped.
#
# And is it the cause? We repeat the training on two devices with a *borrowed pattern*: a unit
# counts as on where it was on in the training on one device, even if it is $-10^{-7}$ now. So
# nothing can flip, and nothing else changes. We also train with a smooth function, $h \cdot
# \text{sigmoid}(h)$, in place of relu.

# %% tags=["measured", "fold", "trains", "few:FIRST = 0=>FIRST = 1", "few:LAST = 4=>LAST = 1"]
# measure: one device and two for sixty steps, and how many units have flipped
STEPS = 60
FIRST = 0
LAST = 4
SEEDS = range(FIRST, LAST + 1)
UNITS = 539_136  # of 32 images, without those that the second pooling leaves out


class Relu:
    """relu, which notes what it gets, and may borrow the pattern of on and off."""

    def __init__(self, borrowed=None):
        self.inputs = []
        self.borrowed = borrowed

    def __call__(self, h):
        on = h > 0 if self.borrowed is None else self.borrowed[len(self.inputs)]
        self.inputs.append(h)
        return h * nd.stop_gradient(on)

    def pattern(self):
        return [h > 0 for h in self.inputs]


class Smooth(Relu):
    def __call__(self, h):
        self.inputs.append(h)
        return h * nd.sigmoid(h)


def lenet_with(relu, x, p):
    mean4 = {"pool_type": "avg", "kernel": (2, 2), "stride": (2, 2)}
    h = nd.Pooling(relu(nd.Convolution(x, p[0], p[1], kernel=(3, 3), num_filter=20)), **mean4)
    h = nd.Pooling(relu(nd.Convolution(h, p[2], p[3], kernel=(5, 5), num_filter=50)), **mean4)
    return nd.dot(relu(nd.dot(h.flatten(), p[4]) + p[5]), p[6]) + p[7]


def step_with(relus, x, y, replicas):
    """`train_batch` at rate 0.2, with a relu for each device. Returns the batch's mean loss."""
    places = four[: len(replicas)]
    shards = zip(split_and_load(x, places), split_and_load(y, places), replicas, relus)
    losses = []
    with autograd.record():
        for x_shard, y_shard, replica, relu in shards:
            scores = lenet_with(relu, x_shard, replica)
            losses.append(-nd.log_softmax(scores).pick(y_shard).sum())
    for loss in losses:
        loss.backward()
    for number in range(8):
        allreduce([replica[number].grad for replica in replicas])
    for replica in replicas:
        for param in replica:
            param -= 0.2 / len(x) * param.grad
    return sum(loss.asscalar() for loss in losses) / len(x)


def one_and_two(seed, kind=Relu, borrow=False, dtype="float32"):
    """For each step: one device against two, flipped units, the loss on two."""
    alone = [get_params(init_params(seed), four[0], dtype)]
    pair = [get_params(init_params(seed), device, dtype) for device in four[:2]]
    rows = []
    for x, y in batches(small, 32, epochs=2, seed=seed):
        if len(rows) == STEPS or len(x) < 32:
            continue
        x = x.astype(dtype)
        first = kind()
        step_with([first], x, y, alone)
        borrowed = [None, None]
        if borrow:
            borrowed = [[on[:16].as_in_context(four[0]) for on in first.pattern()],
                        [on[16:].as_in_context(four[1]) for on in first.pattern()]]
        relus = [kind(borrowed[0]), kind(borrowed[1])]
        loss = step_with(relus, x, y, pair)
        units, flips = 0, 0
        for here, on_0, on_1 in zip(first.pattern(), relus[0].pattern(), relus[1].pattern()):
            here = here.asnumpy()
            there = np.concatenate([on_0.asnumpy(), on_1.asnumpy()])
            if here.shape[2:] == (9, 9):  # pooled to 4 x 4: the ninth row and column aren't used
                here, there = here[:, :, :8, :8], there[:, :, :8, :8]
            flips += int((here != there).sum())
            units += there.size
        assert units == UNITS
        rows.append((float(largest_difference(pair, alone[0])), flips, loss))
    return np.array(rows)  # [step, 3]


runs = {}
for seed in SEEDS:
    runs["own", seed] = one_and_two(seed)
    runs["borrowed", seed] = one_and_two(seed, borrow=True)
    runs["smooth", seed] = one_and_two(seed, Smooth)
runs["float64", SEEDS[0]] = one_and_two(SEEDS[0], dtype="float64")


def first_flip(rows):
    """The first step in which units have flipped, and what it did, in words."""
    flipped = np.flatnonzero(rows[:, 1])
    if len(flipped) == 0:
        return "none"
    step = flipped[0]
    before = rows[step - 1, 0] if step > 0 else 0
    return f"step {step + 1:2}, {rows[step, 1]:.0f} unit: {before:.0e} -> {rows[step, 0]:.0e}"


print("      first flip, and the difference    flipped     difference after step 60 with")
print("seed  before -> after that step         in step 60  relu   borrowed  smooth")
for seed in SEEDS:
    own = runs["own", seed]
    ends = [runs[kind, seed][-1, 0] for kind in ("own", "borrowed", "smooth")]
    print(f"{seed:4}  {first_flip(own):34}{own[-1, 1]:10,.0f}  {ends[0]:.0e}  {ends[1]:.0e}     "
          f"{ends[2]:.0e}")

# %% tags=["fold"]
# draw: the difference between one device and two, step by step; a dot at the first flip
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

fig, ax = figure("In float32, a jump comes only after a unit has flipped", "step",
                 "difference between one and two devices")
looks = {"own": (ORANGE, "-", "relu"), "borrowed": (BLUE, "--", "relu, pattern of one device"),
         "float64": (GREY, ":", "relu in float64")}
marked = False
for (kind, seed), rows in runs.items():
    if kind in looks:
        color, dashes, label = looks[kind]
        ax.semilogy(range(1, STEPS + 1), rows[:, 0], dashes, color=color, lw=1.5,
                    label=label if seed == SEEDS[0] else None)
    flipped = np.flatnonzero(rows[:, 1])
    if kind == "own" and len(flipped):
        dot, = ax.plot(flipped[0] + 1, rows[flipped[0], 0], "o", color="black", ms=6)
        dot.set_label("" if marked else "the first flip")
        marked = True
ax.set_ylim(1e-17, 1e1)
ax.legend(fontsize=9, loc="center left", bbox_to_anchor=(0, 0.4), frameon=False)
show(fig, alt="Difference against steps on a logarithmic axis, a line a seed: float32 with relu, "
              "with a dot at the first flip; relu with the pattern of one device; and one seed in "
              "float64.")

# %% [markdown]
# In our run, the seed without a flip stayed near $10^{-5}$: less than sixty times a step's
# difference. The other four jumped. Each jump began in a step in which *one* unit had flipped: the
# difference grew from about $10^{-6}$ to $10^{-4}$, and then to more than $10^{-2}$, while more
# units flipped. With a borrowed pattern no seed jumped, nor with the smooth function. So relu's
# kink is what makes float32 jump here.
#
# Keep this: *equality* with one device is a claim for one step, or for float64 in as many steps as
# we tried. In float32 the claim is that the network learns as well. One device and two were at most
# 0.3 points apart after an epoch of MNIST, for each of five seeds.

# %% tags=["fold", "trains"]
# check: no jump before a flip, or without flips; float64 stays small; the network learns
for (kind, seed), rows in runs.items():
    differences, flips, losses = rows.T
    assert losses[-10:].mean() < 0.9 * losses[:10].mean(), "on a plateau any comparison passes"
    assert 0 < differences.max(), "two devices add in another order, so rounding should show"
    if kind == "own":
        end = np.flatnonzero(flips)[0] if flips.any() else STEPS
        assert differences[:end].max(initial=0) < 1e-4, f"seed {seed}: a jump without a flip"
        assert end == STEPS or flips[end] < UNITS / 1000, "so many at once: they are miscounted"
    elif kind == "float64":
        assert differences.max() < 1e-9, "in float64 too"
    else:
        assert differences.max() < 1e-3, f"seed {seed}: {kind} jumps"
if data.name == "mnist" and len(SEEDS) == 5:
    assert max(runs["own", seed][-1, 0] for seed in SEEDS) > 1e-2, "none jumped: nothing is shown"
alone = [get_params(init_params(), four[0])]
ours = [get_params(init_params(), four[0])]
x, y = next(batches(small, 32))
loss = train_batch(x, y, alone, four[:1], 0.2).asscalar()
assert abs(step_with([Relu()], x, y, ours) - loss) < 1e-5 * loss, "another loss"
assert largest_difference(ours, alone[0]) < 1e-3, "not train_batch's step"

# %% [markdown]
# ## The speed-up
#
# The second promise: is it faster? And faster than *what*? All contestants train on 256 images a
# step, in turns, until nine rounds were undisturbed by other programs, or eighteen taken:
#
# - *one device*: one core, with this course's settings;
# - *two devices*: `train_batch`, as above;
# - *never communicate*: two trainings in one process, each on half of the batch: about
#   what `train_batch` would reach if its all-reduce cost nothing;
# - *two processes*: the same as two programs. They share neither Python nor MXNet's engine, only
#   the machine;
# - *stock MXNet*: one context, without our settings. On x86 an operator then gets half of the
#   logical processors (`src/engine/openmp.cc`, MXNet 1.9.1): one of two.
#
# **Predict** the other four speeds, as multiples of the first. A contestant is a program of its
# own, `lenet_contestant.py` beside this notebook. More on fair rounds and the settings is in
# deeper: How the speed-up was measured.

# %% tags=["fold", "file:lenet_contestant.py"]
# measure: the program of a contestant, lenet_contestant.py
"""Trains LeNet on random images, for as many steps as each line that it reads says.

    echo 6 | python lenet_contestant.py --devices 0 1

It prints "ready" and the settings that it found, and after each line how many images it has trained
on, and where replicas have changed. It has MXNet's settings from its environment alone: MXNet is
imported first, so helpers comes too late to make its own.
"""

import argparse
import os
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path


def prepare_gpus():
    """Load CUDA's libraries where MXNet is the build for GPUs, without importing helpers."""
    gpu = runpy.run_path(Path(find_spec("helpers").origin).with_name("gpu.py"))
    if gpu["is_cuda_build"]():
        gpu["preload"]()


def contend(kind, numbers, images, apart):
    """Train on the devices `numbers` together, or each `apart` on its part of the images."""
    prepare_gpus()
    assert "helpers" not in sys.modules, "its settings would replace those of the environment"
    prefixes = ("OMP_", "OPENBLAS_", "MXNET_", "MALLOC_")
    settings = [f"{name}={os.environ[name]}" for name in os.environ if name.startswith(prefixes)]
    import mxnet as mx

    warnings.filterwarnings("ignore", "mxnet was imported before helpers")
    from helpers.by_hand import get_params, init_params, train_batch

    contexts = [mx.Context(kind, number) for number in numbers]
    groups = [[context] for context in contexts] if apart else [contexts]
    trainings = []
    for group in groups:
        x = mx.nd.random.uniform(shape=(images // len(groups), 1, 28, 28))
        y = mx.nd.zeros(len(x))
        replicas = [get_params(init_params(), context) for context in group]
        trainings.append((x, y, replicas, group))
    mx.nd.waitall()
    print("ready", *settings, flush=True)
    for line in sys.stdin:
        trained = 0
        for _ in range(int(line)):
            for x, y, replicas, group in trainings:
                train_batch(x, y, replicas, group, lr=0.01)
                trained += len(x)
        mx.nd.waitall()
        places = []
        for _, _, replicas, _ in trainings:
            for replica in replicas:
                changed = replica[-1].asnumpy().any()  # the last bias was 0 at the start
                places.append(str(replica[-1].context) if changed else "unchanged")
        print(trained, "images,", len(trainings), "trainings:", *places, flush=True)


if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", default="cpu", help="cpu or gpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[0], help="their numbers")
    parser.add_argument("--images", type=int, default=256, help="a step, on all devices together")
    parser.add_argument("--apart", action="store_true", help="a training for each device")
    options = parser.parse_args()
    contend(options.kind, options.devices, options.images, options.apart)

# %% tags=["measured", "fold", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: five contestants in turns, 256 images a step; this takes about a minute
import os

from helpers.engine import ALLOCATOR, SETTINGS
from helpers.timing import Team, in_turns, spread

ROUNDS = 9
ALL = SETTINGS | {variable: str(value) for number, value, variable in ALLOCATOR}
STOCK = {name: value for name, value in os.environ.items() if name not in ALL}
first, second = (str(device.device_id) for device in two)


CONTESTANT = "lenet_contestant.py"


def program(*arguments):
    return [sys.executable, CONTESTANT, "--kind", two[0].device_type, *arguments]


def compete(teams, rounds):
    contestants = {}
    try:
        for name, (commands, environment) in teams.items():
            contestants[name] = Team(commands, order="6", environment=environment)
        return in_turns(contestants, rounds, quiet=0.02)  # seconds of each, [rounds]
    finally:
        for team in contestants.values():
            team.close()


times = compete({
    "one device": ([program("--devices", first)], STOCK | ALL),
    "two devices": ([program("--devices", first, second)], STOCK | ALL),
    "never communicate": ([program("--devices", first, second, "--apart")], STOCK | ALL),
    "two processes": ([program("--devices", first, "--images", "128"),
                       program("--devices", second, "--images", "128")], STOCK | ALL),
    "stock MXNet": ([program("--devices", first)], STOCK),
}, ROUNDS)
speeds = {name: 6 * 256 / seconds for name, seconds in times.items()}

print("                   images/s   times one device: median (half of the rounds)")
for name, speed in speeds.items():
    low, median, high = spread(speed / speeds["one device"])
    print(f"{name:18} {np.median(speed):8,.0f}   {median:.2f} ({low:.2f} to {high:.2f})")

# %% tags=["fold", "figure:speedup"]
# draw: images per second of each contestant, a dot a round
from helpers.plotting import bars

speedup = np.median(speeds["two devices"] / speeds["one device"])
columns = {name.replace(" ", "\n", 1): speed for name, speed in speeds.items()}
fig, ax = bars(f"Two devices train {speedup:.2f} times as fast as one (median)",
               "images per second", columns)
twice = 2 * np.median(speeds["one device"])
ax.set_ylim(0, 1.15 * max(twice, *map(np.max, speeds.values())))  # room for the line
ax.axhline(twice, color="black", lw=1, ls="--")
ax.text(-0.4, 1.01 * twice, "twice one device", va="bottom", fontsize=9)
show(fig, alt="Images per second of each round for one device, two devices, two trainings that "
              "never communicate, two processes and stock MXNet, with medians and a line at twice "
              "one device.")

# %% [markdown]
# *Two devices* against *one device* is the speed-up. *Two processes* show what this machine gives
# to two unrelated trainings: compare with them, not with the number 2. In our runs two devices
# came within 5 % of them. Most of what is missing to 2 is missing there, too. Where their range
# overlaps with that of *never communicate*, the run can't tell what the all-reduce costs. On our
# two cores *stock MXNet* was slower than *one device*: it also had one core, but not our settings.
# With more cores it may win.
#
# **On GPUs:** an operator runs on one GPU, so *stock MXNet* is one device. Our settings for scratch
# space and memory are for CPUs: each GPU has scratch space and a pool of memory of its own
# (`src/resource.cc`, `src/storage/storage.cc`, MXNet 1.9.1).
#
# ## A larger batch is another training
#
# We kept the batch of 256 and gave each device a half: *strong scaling*. The training is the same,
# only faster. In *weak scaling* each device keeps 256 images, and the batch grows with $k$. An
# epoch has fewer steps, so it is another training: deeper: Batch, rate and warm-up.

# %% [markdown]
# ## Summary
#
# - A data-parallel step: shards, the gradient of the loss *sum* on each device, all-reduce, update
#   by rate / $n$ times the gradients' sum.
# - In float64, twenty steps on 1 to 4 devices agree with the plain loop to $10^{-12}$. That shows
#   right arithmetic, not the place of the work.
# - In float32 the difference can jump, when rounding flips a unit at relu's kink.
# - Compare weights with one device's, on all replicas. Replicas that agree with each other prove
#   little, and so does accuracy without a right run beside it.
# - Measure speed in turns, warmed up, several times, and beside what two unrelated
#   trainings reach.
#
# **Further reading.** K. He et al., *Delving deep into rectifiers* (2015), arXiv:1502.01852.

# %% [markdown]
# ## Exercises
#
# 1. **Broken data.** Set a single pixel of image 300 in `small` to NaN, and train on it in batches
#    of 64. At which step does `train` stop, and why not earlier? What would a loop without `finite`
#    report as accuracy?
# 2. **The mean of means.** Change the loss to the *mean* over each shard and the update to $\eta /
#    k$. For which batches is the result the same, and for which not? Show one of each.
# 3. **Why less than 2? (open)** Find out what takes the most from your speed-up. Add teams to
#    `compete`, or change `lenet_contestant.py`. Vary one thing at a time: the number of images, the
#    network's width, one buffer for all gradients (chapter 03, exercise 3), `OMP_NUM_THREADS` of
#    *one device*.

# %% [markdown]
# ### Answer 1
#
# The message names the step whose batch has image 300 in seed 0's order: step 15 of 0 to 19.
# `train` stops two steps later, when it looks at that loss. Without `finite` the accuracy would be
# the share of zeros among the labels, about 10 %, since `argmax` of NaN is 0.

# %% tags=["solution", "trains"]
spoilt = small[0].copy()
spoilt[300, 0, 14, 14] = np.nan
order = np.random.default_rng(0).permutation(1275)
stream = batches((spoilt, small[1]), 64)
message = ""
try:
    train([get_params(init_params(), two[0])], two[:1], stream, lr=0.2)
except FloatingPointError as error:
    message = str(error)
assert np.flatnonzero(order == 300) // 64 == 15 and "at step 15:" in message, message
assert len(list(stream)) == 2, "of 20 batches, the last two were not asked for: stopped in step 17"

# %% [markdown]
# ### Answer 2
#
# With equal shards the mean of the $k$ means is the mean of the batch. With uneven ones, such as 5
# and 4, each example of the smaller shard weighs more.

# %% tags=["solution", "trains"]
def one_step_of_means(n):
    x, y = small[0][:n], small[1][:n]
    x_shards = split_and_load(x, two, even=False)
    y_shards = split_and_load(y, two, even=False)
    replicas = [get_params(init_params(), device) for device in two]
    losses = []
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            losses.append(loss_sum(x_shard, y_shard, replica) / len(x_shard))
    for loss in losses:
        loss.backward()
    for number in range(8):
        allreduce([replica[number].grad for replica in replicas])
    for replica in replicas:
        for param in replica:
            param -= 0.2 / 2 * param.grad
    alone = get_params(init_params(), two[0])
    train_batch(x, y, [alone], two[:1], 0.2)
    return largest_difference(replicas, alone)


assert one_step_of_means(8) < 1e-3, "equal shards"
assert one_step_of_means(9) > 1e-2, "uneven shards"

# %% [markdown]
# ### Answer 3
#
# A good answer changes one thing at a time, in turns, with at least five rounds, names its
# baseline, and says which changes are larger than the noise. It doesn't stop at "communication
# costs little here": that leaves open what costs the most.
