# %% [markdown]
# # 04 · LeNet from scratch on k devices
#
# A split batch (chapter 02) and an all-reduce (chapter 03) make a training step on any number of
# devices. It promises two things: *k* devices compute what one computes, and they are faster.
#
# ![The host sends a shard of the batch to each of two devices. Each finds the gradient of its
# shard's loss. An all-reduce gives both devices the sum of both gradients, and both make the same
# update.](src/drawings/lenet_step.svg)
#
# > **What you'll do:** make one step by hand, write it as a function, and train LeNet on two
# > devices. Compare its weights with one device's, and measure the speed-up.
# >
# > **What you'll learn:** the four parts of a data-parallel step; what "the same" means for
# > floating-point numbers; why a wrong all-reduce looks right; what a speed-up has to be compared
# > with.
# >
# > **What you need:** chapters 01 to 03. No GPU. Reading takes {reading time}. Running takes about
# > two minutes.

# %%
import helpers
from helpers import allreduce, assert_replicas_equal, load_data, split_and_load
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# %% [markdown]
# ## Data and network
#
# From each pixel we subtract the mean of all training pixels.

# %% tags=["measured"]
data = load_data("mnist")
print(data)

# %%
mean = data.train_images.mean()
train_set = (nd.array(data.train_images - mean), nd.array(data.train_labels))
test_set = (nd.array(data.test_images - mean), nd.array(data.test_labels))

# %% tags=["fold"]
# define: batches(): a data set in random order, a batch at a time
def batches(dataset, size, epochs=1, seed=0):
    images, labels = dataset
    rng = np.random.default_rng(seed)
    for epoch in range(epochs):
        order = nd.array(rng.permutation(len(labels)), dtype="int32")  # a new one each epoch
        for begin in range(0, len(labels), size):
            chosen = order[begin : begin + size]  # the last batch may be smaller
            yield images.take(chosen), labels.take(chosen)

# %% [markdown]
# LeNet has four layers here, each with a weight and a bias. `init_params` (folded) returns these
# eight as NumPy arrays: weights are random numbers, biases 0.

# %% tags=["fold"]
# define: init_params(): a random weight and a bias of zeros for each of four layers
layers = [  # the shape of the weight, the number of biases, the size of the random numbers
    ((20, 1, 3, 3), 20, 1.0 * np.sqrt(2 / 9)),  # convolution: [20 out, 1 in, 3, 3]
    ((50, 20, 5, 5), 50, 1.5 * np.sqrt(2 / 500)),  # convolution: [50 out, 20 in, 5, 5]
    ((800, 128), 128, 1.5 * np.sqrt(2 / 800)),  # dense: [800 in, 128 out]
    ((128, 10), 10, 0.5 * np.sqrt(2 / 128)),  # dense: [128 in, 10 out]
]


def init_params(seed=0):
    rng = np.random.default_rng(seed)
    params = []
    for shape, biases, size in layers:
        params.append(size * rng.standard_normal(shape))
        params.append(np.zeros(biases))
    return params

# %% [markdown]
# A *replica* is one device's copy of these NumPy arrays, with memory for gradients.

# %%
def get_params(params, device, dtype="float32"):
    replica = []
    for values in params:
        param = nd.array(values, ctx=device, dtype=dtype)
        param.attach_grad()  # backward overwrites the gradient: no zero_grad
        replica.append(param)
    return replica


for param in get_params(init_params(), mx.cpu(1)):
    print(param.context, param.shape)

# %% [markdown]
# The network names no device: an operator runs where its inputs are.

# %%
def pool(h):  # relu, then the mean of each 2 x 2 square
    return nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, replica):  # x: [n, 1, 28, 28]
    w1, b1, w2, b2, w3, b3, w4, b4 = replica
    h = nd.Convolution(x, w1, b1, kernel=(3, 3), num_filter=20)  # [n, 20, 26, 26]
    h = pool(h)  # relu and mean: [n, 20, 13, 13]
    h = nd.Convolution(h, w2, b2, kernel=(5, 5), num_filter=50)  # [n, 50, 9, 9]
    h = pool(h)  # [n, 50, 4, 4]: the ninth row and column are left out
    h = h.flatten()  # [n, 800]: MXNet's flatten keeps the first axis
    h = nd.relu(nd.dot(h, w3) + b3)  # [n, 128]
    return nd.dot(h, w4) + b4  # a score for each class: [n, 10]

# %% [markdown]
# The loss is the *sum* over the images, as in chapter 02. `pick(y)` takes the entry at each image's
# label.

# %%
def loss_sum(x, y, replica):
    log_probabilities = nd.log_softmax(lenet(x, replica))
    return -log_probabilities.pick(y).sum()

# %% tags=["fold"]
# check: the sizes of the weights fit their shapes, and the untrained network just guesses
# Each size is gain * sqrt(2 / inputs), inputs being how many numbers one output adds up. Gain 1 is
# that of K. He et al., Delving deep into rectifiers (2015), arXiv:1502.01852.
x, y = next(batches(train_set, 256))
replica = get_params(init_params(), mx.cpu(0))
loss = loss_sum(x, y, replica).asscalar() / len(x)
assert abs(loss - np.log(10)) < 0.3, f"{loss:.2f}: at the start the network should just guess"
gains = []
for param, (shape, biases, size) in zip(replica[::2], layers, strict=True):
    inputs = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
    gains.append(size / np.sqrt(2 / inputs))
    assert param.shape == shape
assert np.allclose(gains, [1, 1.5, 1.5, 0.5]), "the inputs of a layer"
sizes = []  # of the values before each relu, if all gains were 1
w1, w2, w3 = [param / gain for param, gain in zip(replica[:6:2], gains)]
b1, b2, b3 = replica[1:6:2]
h = nd.Convolution(x, w1, b1, kernel=(3, 3), num_filter=20)
sizes.append(float(np.std(h.asnumpy())))
h = nd.Convolution(pool(h), w2, b2, kernel=(5, 5), num_filter=50)
sizes.append(float(np.std(h.asnumpy())))
h = nd.dot(pool(h).flatten(), w3) + b3
sizes.append(float(np.std(h.asnumpy())))
assert max(sizes) < 1.5 * min(sizes), "with gain 1 they should keep their size"

# %% [markdown]
# ## One step by hand
#
# What happens on each device in one step? **First, the shards.** Each of two devices gets half of
# eight images. Both start from the same weights.

# %% tags=["measured"]
two = helpers.devices(2)
x, y = next(batches(train_set, size=8))
x_shards = split_and_load(x, two)
y_shards = split_and_load(y, two)
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]

for x_shard, y_shard in zip(x_shards, y_shards):
    print(x_shard.context, "images", x_shard.shape, "labels", y_shard.asnumpy())

# %% [markdown]
# **Second, the gradients.** Each device computes the loss of its shard, and the gradient. Python
# only *starts* the work (chapter 01), so both compute at the same time. We keep the losses in a
# list: to read one now would make Python wait, and the other device with it. (`backward` within the
# first loop, as in chapter 02, gives the same.) We look at the last bias: ten numbers, one for each
# class. **Predict:** is its gradient the same on both?

# %% tags=["measured", "trains"]
losses = []
with autograd.record():
    for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
        losses.append(loss_sum(x_shard, y_shard, replica))
for loss in losses:
    loss.backward()

for loss, replica in zip(losses, replicas):
    bias = replica[-1]
    print(loss.context, f"loss {loss.asscalar():.1f}, gradient", bias.grad.asnumpy().round(2))

# %% [markdown]
# It differs, since each device saw other images. (Each image adds its ten probabilities, less 1 at
# its label.)
#
# **Third, the sum.** An all-reduce replaces both gradients by their sum. `helpers` has chapter 03's
# star, the simplest.

# %% tags=["measured", "trains"]
grads = []
for replica in replicas:
    bias = replica[-1]
    grads.append(bias.grad.copy())  # a copy, so that this cell can run again
allreduce(grads)
for grad in grads:
    print(grad.context, "sum", grad.asnumpy().round(2))

# %% [markdown]
# (Only the print is rounded: the last digit may look wrong.)
#
# **Fourth, the update.** We subtract rate / $n$ times the sum. The rate is 0.2, and $n$ is 8, all
# images *in the batch*.

# %% tags=["measured", "trains"]
updated = []
for replica, grad in zip(replicas, grads):
    bias = replica[-1] - 0.2 / 8 * grad
    updated.append(bias)
    print(bias.context, "bias", bias.asnumpy().round(2))

# %% tags=["fold"]
# check: both devices have the bias that one device alone would have
alone = get_params(init_params(), two[0])
with autograd.record():
    loss = loss_sum(x, y, alone)
loss.backward()
assert largest_difference(grads, alone[-1].grad) < 1e-4, "another sum"
assert largest_difference(updated, alone[-1] - 0.2 / 8 * alone[-1].grad) < 1e-4, "another step"
assert_replicas_equal(updated)
in_one_loop = []
for x_shard, y_shard, device in zip(x_shards, y_shards, two):
    replica = get_params(init_params(), device)
    with autograd.record():
        loss = loss_sum(x_shard, y_shard, replica)
    loss.backward()
    in_one_loop.append([param.grad for param in replica])
for gradients, replica in zip(in_one_loop, replicas, strict=True):
    in_two_loops = [param.grad for param in replica]
    assert largest_difference([gradients], in_two_loops) < 1e-4, "backward within the first loop"
for y_shard, replica in zip(y_shards, replicas, strict=True):
    present = np.isin(np.arange(10), y_shard.asnumpy())
    assert ((replica[-1].grad.asnumpy() < 0) == present).all(), "negative where a label is"

# %% [markdown]
# Both had the same bias and subtracted the same numbers. So replicas stay equal.
#
# ## The step
#
# The same four parts, for all parameters and any number of devices. `even=False` lets shards differ
# in size. The all-reduce is an argument, since we try wrong ones later. One buffer for all
# gradients would mean fewer messages, but longer code (exercise 3).

# %%
def train_batch(x, y, replicas, devices, lr, all_reduce=allreduce):
    # First, the shards.
    x_shards = split_and_load(x, devices, even=False)
    y_shards = split_and_load(y, devices, even=False)

    # Second, the gradients: a loss for each device.
    losses = []
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            losses.append(loss_sum(x_shard, y_shard, replica))
    for loss in losses:
        loss.backward()

    # Third, the sum: for each parameter, over all devices.
    for number in range(len(replicas[0])):
        grads = [replica[number].grad for replica in replicas]
        all_reduce(grads)  # in place: now each param.grad is the sum

    # Fourth, the update: on each device.
    for replica in replicas:
        for param in replica:
            param -= lr / len(x) * param.grad  # in place, too

    # For the caller, the mean loss. It isn't read here, so nothing waits.
    total = 0
    for loss in losses:
        total = total + loss.as_in_context(devices[0])
    return total / len(x)

# %% tags=["fold"]
# define: train(): train_batch for each batch; a loss that isn't a finite number ends it
def finite(loss, step):
    value = loss.asscalar()  # waits until this loss is computed
    if not np.isfinite(value):
        raise FloatingPointError(f"the loss is {value} at step {step}: broken data, or too high "
                                 "a learning rate?")
    return value


def train(replicas, devices, stream, lr, all_reduce=allreduce):
    losses = []
    for step, (x, y) in enumerate(stream):
        losses.append(train_batch(x, y, replicas, devices, lr, all_reduce))
        earlier = step - 2
        if earlier >= 0:
            finite(losses[earlier], earlier)
    return [finite(loss, step) for step, loss in enumerate(losses)]

# %% tags=["fold"]
# define: accuracy(): the share of images classified right; each device counts its shard
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
# `train` (folded) calls `train_batch` for each batch. An epoch of MNIST takes **about ten to forty
# seconds**.

# %% tags=["measured", "trains"]
epochs = 1 if data.name == "mnist" else 10  # the other data set is small
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
losses = train(replicas, two, batches(train_set, 128, epochs), lr=0.2)

reached = accuracy(replicas, two, test_set)
print(f"loss {losses[0]:.2f} in the first step, {losses[-1]:.2f} in the last of {len(losses)}")
print(f"{reached:.2%} of the test images right ({data.name})")
for param, its_copy in zip(replicas[0], replicas[1]):
    assert_replicas_equal([param, its_copy])
print("both replicas are equal to the bit")

# %% tags=["fold"]
# check: it has learned, and `accuracy` counts right
x, y = test_set[0][:1000], test_set[1][:1000]
alone = (lenet(x, replicas[0]).argmax(axis=1) == y).mean().asscalar()
assert abs(accuracy(replicas, two, (x, y)) - alone) < 1e-6, "accuracy counts otherwise"
assert reached > (0.96 if data.name == "mnist" else 0.9), f"{reached:.2%}: it should have learned"

# %% [markdown]
# ## k devices compute what one computes
#
# Are the weights what *one* device would have? The reference is a plain loop, without shards and
# all-reduce: twenty steps in float64.

# %%
images, labels = train_set
small = (images[:1275].astype("float64"), labels[:1275])  # 19 batches of 64, and one of 59


def plain_steps(seed):
    params = get_params(init_params(seed), mx.cpu(0), "float64")
    for x, y in batches(small, 64, seed=seed):
        with autograd.record():
            loss = loss_sum(x, y, params)
        loss.backward()
        for param in params:
            param -= 0.2 / len(x) * param.grad
    return params

# %% [markdown]
# The same steps by `train_batch`, on up to four simulated devices:

# %%
four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]


def twenty_steps(k, seed, all_reduce=allreduce):
    used = four[:k]
    replicas = [get_params(init_params(seed), device, "float64") for device in used]
    for x, y in batches(small, 64, seed=seed):
        train_batch(x, y, replicas, used, lr=0.2, all_reduce=all_reduce)
    return replicas

# %% [markdown]
# `largest_difference` compares each parameter of each replica with that of one device. It returns
# the largest difference, divided by that parameter's largest entry.

# %% tags=["measured", "trains"]
one_device = plain_steps(seed=0)
for k in [1, 2, 3, 4]:
    replicas = twenty_steps(k, seed=0)
    difference = float(largest_difference(replicas, one_device))
    print(f"k = {k}: {difference:.1e}")
    assert difference < 1e-12

# %% tags=["fold", "trains", "few:range(3)=>range(1)"]
# check: the same from three seeds
for seed in range(3):
    one_device = plain_steps(seed)
    for k in [1, 2, 3, 4]:
        difference = largest_difference(twenty_steps(k, seed), one_device)
        assert difference < 1e-12, f"seed {seed}, {k} devices"

# %% tags=["fold", "trains"]
# check: the losses agree, too
labels = [y.asnumpy() for _, y in batches(small, 64, epochs=2)]
assert [len(y) for y in labels] == 2 * (19 * [64] + [59]) and (labels[0] != labels[20]).any()
once = np.concatenate(labels[:20])
assert (np.sort(once) == np.sort(small[1].asnumpy())).all(), "an epoch has each image once"
params = get_params(init_params(), four[0], "float64")
alone = []
for x, y in batches(small, 64):
    with autograd.record():
        loss = loss_sum(x, y, params)
    loss.backward()
    for param in params:
        param -= 0.2 / len(x) * param.grad
    alone.append(loss.asscalar() / len(x))
stream = list(batches(small, 64))
for k in [1, 2, 3, 4]:
    replicas = [get_params(init_params(), device, "float64") for device in four[:k]]
    losses = train(replicas, four[:k], stream, 0.2)
    assert np.allclose(losses, alone, rtol=1e-12, atol=0), f"{k} devices: other losses"
assert largest_difference(replicas, params) > 0, "the same order would hide all rounding"
assert alone[-1] < 0.9 * alone[0], "on a plateau any comparison passes"

# %% [markdown]
# All agree to $10^{-12}$: only rounding differs, since they add in another order.
#
# But *where* was the work done? Simulated devices can use each other's arrays (chapter 01), so
# device 0 could do all of it. We count places, with `split_and_load` and with all shards on
# device 0:

# %% tags=["fold", "trains"]
# check: where scores are computed
from collections import Counter


def with_spy(split):
    """Twenty steps whose shards are made by `split`: replicas, and how often scores were where."""
    places = Counter()

    def noted(x, replica):
        scores = plain_lenet(x, replica)
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
one_device = plain_steps(seed=0)
for name, split, expected in [
    ("split_and_load", split_and_load, {"cpu(0)": 20, "cpu(1)": 20}),
    ("all to device 0", all_to_the_first, {"cpu(0)": 40}),
]:
    replicas, places = with_spy(split)
    passes = bool(largest_difference(replicas, one_device) < 1e-12)
    where = ", ".join(f"{times} times on {place}" for place, times in sorted(places.items()))
    print(f"{name:15} agrees with one device: {passes}; scores computed", where)
    assert passes and places == expected, "the shards' work is elsewhere"

# %% [markdown]
# Both agree with one device; only the count differs.
#
# ### What a wrong all-reduce does
#
# Here are five mistakes, on two devices:
#
# - *no broadcast*: the sum stays on device 0, device 1 has its own gradient;
# - *first only*: device 1 gets device 0's gradient;
# - *counts twice*: device 1's gradient counts twice in the sum;
# - *mean*: both get half of the sum;
# - *nothing*: nothing is sent.
#
# After *one* step in float32, are the weights those of one device? (*Far*: `largest_difference` is
# above 0.1.) Are the replicas equal? **Predict:** which mistakes leave them equal? The last column
# is accuracy after an epoch of MNIST, in runs made before: the lowest and the highest of five seeds
# and both replicas.

# %% tags=["fold", "trains"]
# measure: five wrong all-reduces: weights and replicas after a step; accuracy in stored runs
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


wrong = {
    "no broadcast": no_broadcast,
    "first only": first_only,
    "counts twice": counts_twice,
    "mean": mean_of_shards,
    "nothing": nothing,
}
stored = json.loads(Path("src/results/lenet.json").read_text())


def first_epoch(name):
    """Accuracies after an epoch, in percent: [seed, replica]."""
    return 100 * np.array([run[0]["accuracies"] for run in stored["runs"][f"lenet-{name}"]])


x256, y256 = next(batches(train_set, 256))


def one_step(k, all_reduce=allreduce):
    replicas = [get_params(init_params(), device) for device in four[:k]]
    train_batch(x256, y256, replicas, four[:k], 0.2, all_reduce)
    return replicas


alone = one_step(1)[0]
accuracies = {}
print("mistake       weights   replicas  accuracy in %")
for mistake, all_reduce in [("none", allreduce), *wrong.items()]:
    replicas = one_step(2, all_reduce)
    difference = largest_difference(replicas, alone)
    far = difference > 0.1
    assert far or difference < 1e-3, "neither far nor the same"
    equal = largest_difference(replicas[:1], replicas[1]) == 0
    ends = first_epoch("128-0.2" if all_reduce is allreduce else all_reduce.__name__)
    accuracies[mistake] = ends
    weights = "far" if far else "the same"
    among = "equal" if equal else "differ"
    print(f"{mistake:14}{weights:10}{among:10}{ends.min():.1f} to {ends.max():.1f}")
    assert far == (all_reduce is not allreduce), f"{mistake}: must be seen, the right one pass"
    if mistake == "mean":
        for number in [1, 3, 5, 7]:  # biases, which started at 0
            twice = 2 * replicas[0][number]
            assert largest_difference(twice, alone[number]) < 1e-3, "half a step, half a bias"
print(f"accuracy: runs of {stored['date']}, {stored['machine']}")

# %% tags=["fold", "trains"]
# check: twenty steps in float64 show each mistake, too; accuracy alone shows none
one_device = plain_steps(seed=0)
for mistake, all_reduce in wrong.items():
    assert largest_difference(twenty_steps(2, 0, all_reduce), one_device) > 1e-3, mistake
right = accuracies["none"]
assert all(ends.max() > right.min() and ends.min() < right.max() for ends in accuracies.values())
assert min(ends.min() for ends in accuracies.values()) > 93
behind = {mistake: int((accuracies[mistake] < right).sum()) for mistake in wrong}
assert behind == {"no broadcast": 8, "first only": 8, "counts twice": 2, "mean": 8, "nothing": 9}
for mistake in wrong:
    assert (accuracies[mistake] != right).all(), "no ties"
assert right.max() - right.min() > 2, "seeds differ by less"

# %% [markdown]
# Weights show each mistake, and one step is enough: biases start at 0, so after half a step
# (*mean*) a bias is half of what it should be. Three mistakes leave replicas equal. Accuracy alone
# shows none: all ranges overlap with the right one's, whose seeds alone differ by more than 2
# points.
#
# Keep this: compare *weights* with one device's.

# %% [markdown]
# ## And in float32?
#
# Float64 is for tests; one trains in float32. How nearly do one device and two agree there, after a
# step?

# %% tags=["trains"]
x, y = next(batches(train_set, 256))
alone = get_params(init_params(), four[0])
train_batch(x, y, [alone], four[:1], lr=0.2)
replicas = [get_params(init_params(), four[0]), get_params(init_params(), four[1])]
train_batch(x, y, replicas, four[:2], lr=0.2)

difference = float(largest_difference(replicas, alone))
print("they agree to 1e-4: ", difference < 1e-4)
print("they agree to 1e-12:", difference < 1e-12)
assert 1e-12 < difference < 1e-4

# %% [markdown]
# To $10^{-4}$: float32 keeps fewer digits. **Predict:** after sixty steps, is the difference sixty
# times as large, less, or more?
#
# First, a relu. Rounding can turn the first of these inputs into the second:

# %%
for value in [1e-7, -1e-7]:
    h = nd.array([value])
    h.attach_grad()
    with autograd.record():
        output = nd.relu(h)
    output.backward()
    print(f"relu gives {output.asscalar():.7f}, its derivative is {h.grad.asscalar():.0f}")

# %% [markdown]
# The outputs are nearly equal, the derivatives aren't: at zero relu has a *kink*. If rounding puts
# a number on the other side of zero in one of two trainings, it *flips*: its part of the gradient
# is missing in one of them, which is more than rounding. Now sixty steps, from five seeds, with
# batches of 32:
#
# ![Difference against steps, a line a seed. With relu it stays small until a dot, the first flip;
# there it jumps, and goes on to grow. One seed has no flip and stays small. Where flips are
# impossible, and in float64, all stay small.](src/figures/float32.png)
#
# First less: until the first flip (the dot) the difference hardly grows. Then far more: it jumps,
# and some ten steps later it is thousands of times as large. Four of the five seeds flip. Where
# flips are made impossible (deeper: Why float32 jumps), nothing jumps.
#
# Keep this: in float32, claim *equality* with one device for one step only. For more steps test in
# float64.

# %% [markdown]
# ## The speed-up
#
# Is it faster, and faster than *what*? Five programs train on 256 images a step, in turns. The last
# three each answer a doubt:
#
# - *one device*: one core.
# - *two devices*: `train_batch`.
# - *never communicate*: two trainings in one program, each on half of the batch. What does the
#   all-reduce cost?
# - *two processes*: the same as two programs. Does it cost time to run both in one program?
# - *stock MXNet*: one device without what `helpers` sets for threads and memory (deeper: How the
#   speed-up was measured). Is our *one device* slow, so that two look fast?
#
# The table has the median of how many times as fast as *one device* they are, and the middle half
# of the rounds in brackets. **Predict** the three after *one device*.

# %% tags=["fold", "file:lenet_contestant.py"]
# measure: lenet_contestant.py, the program that each contestant runs
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


def prepare():
    """Do what helpers does before MXNet loads, all but its settings, without importing it."""
    folder = Path(find_spec("helpers").origin).parent
    gpu = runpy.run_path(folder / "gpu.py")
    if gpu["is_cuda_build"]():
        gpu["preload"]()
    runpy.run_path(folder / "newer_numpy.py")["prepare"]()


def contend(kind, numbers, images, apart):
    """Train on the devices `numbers` together, or each `apart` on its part of the images."""
    prepare()
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
# measure: five contestants in turns, 256 images a step; a minute or more, until rounds are quiet
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

print("                   images/s   times one device, round by round: median (middle half)")
for name, speed in speeds.items():
    low, median, high = spread(speed / speeds["one device"])
    ratio = "1" if name == "one device" else f"{median:.2f} ({low:.2f} to {high:.2f})"
    print(f"{name:18} {np.median(speed):8,.0f}   {ratio}")


def which_is_faster(name, other):
    """Which of two contestants is faster, if the middle halves of their ratios don't overlap."""
    ours = spread(speeds[name] / speeds["one device"])
    theirs = spread(speeds[other] / speeds["one device"])
    if ours.high < theirs.low:
        return f"{name} is slower than {other}"
    if theirs.high < ours.low:
        return f"{name} is faster than {other}"
    return f"{name} and {other} overlap: no difference is seen"


print()
print("the all-reduce:", which_is_faster("two devices", "never communicate"))
print("one program:   ", which_is_faster("never communicate", "two processes"))
print("our settings:  ", which_is_faster("one device", "stock MXNet"))

# %% tags=["fold", "figure:speedup"]
# draw: images per second of each contestant, a dot a round
from helpers.plotting import bars, show

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
# The speed-up is that of *two devices*. What *never communicate* lacks to 2 can't be the
# all-reduce: it has none. (We haven't tested what it is.) Only a gap between *two devices* and
# *never communicate* can be the all-reduce. The lines below the table say whether one is seen, and
# answer the other two doubts.
#
# Keep this: two unrelated trainings are the measure of a speed-up, not 2.
#
# ## Summary
#
# - A data-parallel step: shards, gradients of the loss *sum*, all-reduce, update by rate / $n$
#   times the sum.
# - Compare weights with one device's, in float64 or after one step. Equal replicas prove little,
#   and so does accuracy. None shows where the work was done.
# - In float32 the difference can jump, when rounding puts a number on the other side of relu's
#   kink.
# - Compare a speed-up with what two unrelated trainings reach, not with 2.

# %% [markdown]
# ## Exercises
#
# 1. **Broken data.** Set one pixel of image 300 in `small` to NaN and train on it by `train` (open
#    its cell), in batches of 64 and in float64. Which step does the error name, and in which does
#    `train` stop? What would a loop without `finite` report as accuracy?
# 2. **The mean of means.** Change the loss to the *mean* over each shard and the update to rate /
#    $k$. For which batches is the result the same? Show one that is and one that isn't.
# 3. **Why less than 2? (open)** What takes the most from your speed-up? Open the folded cell that
#    calls `compete`. `([program("--devices", first, "--images", "32")], STOCK | ALL)` is a
#    contestant with 32 images a step; compare seconds, since its images/s are computed for 256. For
#    other changes (the network's width, one buffer for all gradients) edit `helpers/by_hand.py`,
#    from which contestants have network and step, and undo it afterwards. Vary one thing at a time.

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
    train([get_params(init_params(), two[0], "float64")], two[:1], stream, lr=0.2)
except FloatingPointError as error:
    message = str(error)
print(message)
place = int(np.flatnonzero(order == 300)[0])  # of image 300 in the shuffled order
assert place // 64 == 15, "another batch"
assert "at step 15:" in message, message

left = len(list(stream))  # batches that train has not asked for
print(f"{left} of 20 batches are left, so it stopped in step {19 - left}")
assert left == 2

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
    replicas = [get_params(init_params(), device, "float64") for device in two]
    losses = []
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            losses.append(loss_sum(x_shard, y_shard, replica) / len(x_shard))
    for loss in losses:
        loss.backward()
    for number in range(len(replicas[0])):
        allreduce([replica[number].grad for replica in replicas])
    for replica in replicas:
        for param in replica:
            param -= 0.2 / 2 * param.grad
    alone = get_params(init_params(), two[0], "float64")
    train_batch(x, y, [alone], two[:1], 0.2)
    return largest_difference(replicas, alone)


assert one_step_of_means(8) < 1e-12, "equal shards"
assert one_step_of_means(9) > 1e-2, "uneven shards"

# %% [markdown]
# ### Answer 3
#
# A good answer changes one thing at a time, in turns, with at least five rounds, names its
# baseline, and says which changes are larger than the noise. It doesn't stop at "communication
# costs little here": that leaves open what costs the most.
