# %% [markdown]
# # 04 · LeNet from scratch on k devices
#
# A split batch (chapter 02) and an all-reduce (chapter 03) make a training step on any number of
# devices. Two things are expected of it: that *k* devices compute what one device computes, and
# that they are faster. Are both true? And faster than *what*?
#
# > **What you'll do:** write a training step for *k* devices and train LeNet with it. Time it on
# > one device and on two, compare the weights with those of one device, and break the all-reduce.
# >
# > **What you'll learn:** the four parts of a data-parallel step; what a speed-up has to be
# > compared with; why only a comparison with one device shows a wrong all-reduce.
# >
# > **What you need:** chapters 01 to 03. No GPU. Reading takes {reading time}, running about a
# > minute.

# %%
import helpers
from helpers import allreduce, load_data, split_and_load, your_turn
from helpers.by_hand import init_params
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# Simulated devices, where we look at results and not at speed.
four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]

# %% [markdown]
# ## Data and network
#
# From each pixel we subtract the mean of all training pixels.

# %% tags=["measured"]
data = load_data("mnist")
print(data)

mean = data.train_images.mean()
train_set = (nd.array(data.train_images - mean), nd.array(data.train_labels))

# %% [markdown]
# Each epoch sees the images in a random order, a batch at a time:

# %%
def batches(dataset, size, seed=0):
    images, labels = dataset
    order = np.random.default_rng(seed).permutation(len(labels))
    for begin in range(0, len(labels), size):
        rows = order[begin : begin + size]  # the last batch may have fewer
        rows = nd.array(rows, dtype="int32")
        yield images.take(rows), labels.take(rows)  # the images and labels of these rows


x, y = next(batches(train_set, 8))  # the first batch
print(x.shape, y.shape)

# %% [markdown]
# LeNet has four layers here, each with a weight and a bias. `init_params`, a helper, returns these
# eight as NumPy arrays: random weights, and biases of 0. A **replica** is one device's copy of all
# eight, with buffers for their gradients:

# %%
def get_params(params, device, dtype="float32"):
    replica = []
    for values in params:
        param = nd.array(values, ctx=device, dtype=dtype)
        param.attach_grad()
        replica.append(param)
    return replica


replica = get_params(init_params(), four[1])
for param in replica:
    print(param.context, param.shape)
print("numbers in all:", sum(param.size for param in replica))

# %% [markdown]
# This is the LeNet-like network of *Dive into Deep Learning* ("Training on Multiple GPUs"). It
# mentions no device, because an operation runs where its inputs are (chapter 01):

# %%
def pool(h):  # the mean of each 2 x 2 square
    return nd.Pooling(h, pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, replica):
    w1, b1, w2, b2, w3, b3, w4, b4 = replica
    # x is [n, 1, 28, 28].
    h = nd.Convolution(x, w1, b1, kernel=(3, 3), num_filter=20)  # [n, 20, 26, 26]
    h = pool(nd.relu(h))  # [n, 20, 13, 13]
    h = nd.Convolution(h, w2, b2, kernel=(5, 5), num_filter=50)  # [n, 50, 9, 9]
    h = pool(nd.relu(h))  # [n, 50, 4, 4]: the ninth row and column are left out
    h = h.flatten()  # [n, 800]
    h = nd.relu(nd.dot(h, w3) + b3)  # [n, 128]
    return nd.dot(h, w4) + b4  # a score for each class: [n, 10]

# %% [markdown]
# The loss is the *sum* over the images, as in chapter 02, because sums of shards can simply be
# added, while means over unequal shards would have to be weighted.

# %%
def loss_sum(x, y, replica):
    log_probabilities = nd.log_softmax(lenet(x, replica))
    return -log_probabilities.pick(y).sum()

# %% [markdown]
# ## The step
#
# A **data-parallel step** has four parts. All devices begin with the same weights:
#
# ![The host sends a shard of the batch to each of two devices. Each finds the gradient of its
# shard's loss. An all-reduce gives both devices the sum of both gradients, and each updates its
# weights.](src/drawings/lenet_step.svg)
#
# Here $n$ is the number of images in the whole batch, not in a shard.
#
# ### Your turn: sum and update
#
# Write the third and the fourth part, for any number of devices and parameters, before you scroll
# on. `replicas` has a list of parameters for each device, `grads` a list of their gradients.
# `helpers.allreduce` is chapter 03's star; it takes *one* parameter's gradients, one from each
# device. In the first case two devices have one weight, 1, and the gradients 2 and 6. At `lr` 0.5
# and with 4 images, both end at $1 - \frac{0.5}{4}\,(2 + 6) = 0$. The update is in place, so that
# a parameter keeps its gradient buffer.

# %% tags=["fold", "your-turn"]
# define: two cases for your function: replicas, gradients, lr and n, and the replicas that are due
def on_devices(table):
    """A row for each device, a number for each parameter."""
    lists = []
    for device, row in zip(four, table):
        lists.append([nd.array([number], ctx=device) for number in row])
    return lists


one_weight = (on_devices([[1], [1]]), on_devices([[2], [6]]), 0.5, 4)
two_weights = (on_devices([[1, 2], [1, 2], [1, 2]]),
               on_devices([[1, 10], [2, 20], [3, 30]]), 1, 6)
cases = [
    (one_weight, on_devices([[0], [0]])),
    (two_weights, on_devices([[0, -8], [0, -8], [0, -8]])),
]

# %% tags=["your-turn"]
def sum_and_update(replicas, grads, lr, n):
    """Update the replicas in place, by lr / n times the sum of the devices' gradients."""
    ...


your_turn(sum_and_update, cases, in_place=True)

# %% [markdown]
# Here are all four parts. `even=False` lets shards differ in size. The all-reduce is an argument,
# because we try wrong ones later.

# %%
def train_batch(x, y, replicas, devices, lr, all_reduce=allreduce):
    # First, the shards.
    x_shards = split_and_load(x, devices, even=False)
    y_shards = split_and_load(y, devices, even=False)

    # Second, the gradients: a loss for each device.
    losses = []
    with autograd.record():
        for rank in range(len(devices)):
            losses.append(loss_sum(x_shards[rank], y_shards[rank], replicas[rank]))
    for loss in losses:
        loss.backward()

    # Third, the sum: for each parameter, over all devices.
    for number in range(len(replicas[0])):
        grads = [replica[number].grad for replica in replicas]
        all_reduce(grads)  # in place

    # Fourth, the update: on each device.
    for replica in replicas:
        for param in replica:
            param -= lr / len(x) * param.grad  # in place, too

    # For the caller, the mean loss. It isn't read here, so nothing waits.
    total = 0
    for loss in losses:
        total = total + loss.as_in_context(devices[0])
    return total / len(x)

# %% [markdown]
# We take one step with the first batch, of eight images. Each device sees different images, so it
# finds a different gradient. The last bias has ten numbers, one for each class, and we print three.
# **Predict:** after the step, does `bias.grad` still hold the gradient of the device's own images?
# And is the bias the same on both?

# %% tags=["measured", "trains", "predict"]
two = helpers.devices(2)
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
x, y = next(batches(train_set, 8))
loss = train_batch(x, y, replicas, two, lr=0.2)

print(f"mean loss {loss.asscalar():.2f}")
for replica in replicas:
    bias = replica[-1]
    print(bias.context, "gradient", bias.grad[:3].asnumpy(), "bias", bias[:3].asnumpy())

# %% [markdown]
# <details><summary>What came out</summary>
#
# No: the all-reduce has replaced each device's gradient by the sum. So both devices have subtracted
# the same numbers from the same bias. That is why replicas stay equal, although nobody sends
# weights.
#
# </details>
#
# ## Training
#
# We train for one epoch. The loss is read every hundred steps only, because each read makes Python
# wait for the devices.

# %% tags=["measured", "trains", "few:epochs = 10=>epochs = 6"]
epochs = 1
if data.name != "mnist":
    epochs = 10  # scikit-learn's digits, which are few

replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
for epoch in range(epochs):
    step = 0
    for x, y in batches(train_set, 128, seed=epoch):
        loss = train_batch(x, y, replicas, two, lr=0.2)
        if step % 100 == 0:
            print(f"epoch {epoch}, step {step}: loss {loss.asscalar():.2f}")
        step += 1

# %% [markdown]
# The loss falls. Nobody has sent weights from one device to the other. Are the replicas still
# equal? `largest_difference`, a helper, compares all their parameters:

# %%
print(f"{largest_difference(replicas[0], replicas[1]):.1e}")

# %% [markdown]
# They are, to the last bit.
#
# ## Is it faster?
#
# To time steps, we run one step to warm up, wait for all work, and only then read the clock
# (chapter 01). One device gets a batch of 256 images. Two devices get the same batch, so each of
# them has half of the work:

# %% tags=["few:STEPS = 8=>STEPS = 1"]
from time import perf_counter

STEPS = 8
x_256, y_256 = next(batches(train_set, 256))


def seconds(devices):
    replicas = [get_params(init_params(), device) for device in devices]
    train_batch(x_256, y_256, replicas, devices, lr=0.01)  # warms up
    nd.waitall()
    begin = perf_counter()
    for step in range(STEPS):
        train_batch(x_256, y_256, replicas, devices, lr=0.01)
    nd.waitall()
    return perf_counter() - begin

# %% [markdown]
# The ratio of the two times is the **speed-up**. **Predict:** how large is it?

# %% tags=["measured", "predict", "few:ROUNDS = 5=>ROUNDS = 1"]
ROUNDS = 5
for number in range(ROUNDS):
    on_one = seconds(two[:1])
    on_two = seconds(two)
    print(f"one device {on_one:.2f} s, two devices {on_two:.2f} s, speed-up {on_one / on_two:.2f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# If two cores are free, two devices are clearly faster. Rounds differ, so a single round
# would be no answer.
#
# </details>
#
# ### Faster than what?
#
# That speed-up has *one device with one core* as its **baseline**. But one device can use both
# cores, too, because MXNet can spread an operator over several threads. `helpers` has forbidden
# that since the course's first cell (it sets `OMP_NUM_THREADS=1`), so that a simulated device is
# one core. So is *one device with both cores* any slower than two devices?
#
# MXNet reads that setting on import, so each configuration needs a process of its own. `race`, a
# helper, starts the program [lenet_contestant.py](lenet_contestant.py) three times. It makes our
# training step on random images. In each round all three run `STEPS` steps, one program after the
# other, and `race` returns their seconds:

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1"]
from helpers.timing import race, spread

ROUNDS = 9
programs = {
    "one device, one core": "lenet_contestant.py --devices 0",
    "one device, both cores": "lenet_contestant.py --devices 0 --threads 2",
    "two devices, one core each": "lenet_contestant.py --devices 0 1",
}
times = race(programs, STEPS, ROUNDS)
print("baseline, seconds of each round:", times["one device, one core"].round(2))

# %% [markdown]
# In each round we divide the baseline's seconds by those of each program. We print the median of
# these speed-ups, and in brackets the middle half of them (the interquartile range). Our rule: we
# name a winner only if the brackets don't overlap. **Predict:** which is faster, one device with
# both cores or two devices?

# %% tags=["measured", "predict"]
for name in programs:
    speed_ups = times["one device, one core"] / times[name]  # one for each round
    low, median, high = spread(speed_ups)
    print(f"{name:26}  {median:.2f} times as fast ({low:.2f} to {high:.2f})")

# %% [markdown]
# <details><summary>What came out</summary>
#
# On quiet cores, one device that uses both cores gains most of what two devices gain. The brackets
# say whether there is a winner in this run.
#
# </details>
#
# So what are simulated devices for? **A CPU device can be made larger, by more threads; a GPU can't
# be.** To use more than one GPU you need what `train_batch` does, and with simulated devices you
# can write it and test it. They can't show what messages cost between GPUs, because they share one
# memory.
#
# There are more ways to measure a speed-up wrongly: see deeper: How the speed-up was measured.
#
# ## Is it the same?
#
# Are the weights what *one* device would have? The reference is a plain loop without shards and
# all-reduce, twenty steps in float64:

# %% tags=["trains", "few:SMALL = 1275=>SMALL = 315"]
SMALL = 1275  # images: 19 batches of 64, and one of 59
images, labels = train_set
small = (images[:SMALL].astype("float64"), labels[:SMALL])

whole = get_params(init_params(), four[0], "float64")
for x, y in batches(small, 64):
    with autograd.record():
        loss = loss_sum(x, y, whole)
    loss.backward()
    for param in whole:
        param -= 0.2 / len(x) * param.grad

# %% [markdown]
# The same steps by `train_batch`:

# %%
def twenty_steps(k, all_reduce=allreduce):
    used = four[:k]
    replicas = [get_params(init_params(), device, "float64") for device in used]
    for x, y in batches(small, 64):
        loss = train_batch(x, y, replicas, used, 0.2, all_reduce)
    return replicas, loss.asscalar()  # of the last step

# %% [markdown]
# `largest_difference` compares each parameter of each replica with that of one device. It returns
# the largest difference, as a share of the parameter's largest entry. Three devices get shards of
# 22, 21 and 21 images. **Predict:** are their weights those of one device?

# %% tags=["measured", "trains", "predict"]
for k in [1, 2, 3, 4]:
    replicas, loss = twenty_steps(k)
    difference = largest_difference(replicas, whole)
    print(f"k = {k}: {difference:.1e}")
    assert difference < 1e-12

# %% [markdown]
# <details><summary>What came out</summary>
#
# All agree with one device to $10^{-12}$, also with uneven shards, because the shards' sums are
# added, and divided by $n$ once. What is left is rounding, since the order of the additions depends
# on $k$.
#
# </details>
#
# Why float64? In float32 one step agrees to about $10^{-5}$. But rounding can put a number on the
# other side of zero, where ReLU has a *kink*: its derivative jumps from 1 to 0. After sixty steps
# the weights of three of five seeds were about a tenth of the largest entry apart, or more (deeper:
# Why float32 jumps). So in float32 claim equality for one step only, and test longer runs in
# float64.
#
# Later chapters and [lenet_contestant.py](lenet_contestant.py) use this chapter's functions from
# `helpers.by_hand`. With the same input they give the same weights:

# %% tags=["trains"]
from helpers import by_hand

ours = [get_params(init_params(), device) for device in four]
theirs = [by_hand.get_params(init_params(), device) for device in four]
x, y = next(batches(train_set, 7))
train_batch(x, y, ours, four, lr=0.2)
by_hand.train_batch(x, y, theirs, four, lr=0.2)
assert largest_difference(ours[0], theirs[0]) == 0

# %% [markdown]
# ## What a wrong all-reduce does
#
# Here are three mistakes. In the first the sum stays on the first device, as in the textbook of
# chapter 03. In the second all devices get the first device's gradient, without a sum. The third
# takes the mean of the gradients instead of the sum.

# %%
def no_broadcast(grads):
    total = grads[0]
    for rank in range(1, len(grads)):
        total += grads[rank].copyto(total.context)


def first_only(grads):
    for rank in range(1, len(grads)):
        grads[0].copyto(grads[rank])


def mean_of_shards(grads):
    allreduce(grads)
    for grad in grads:
        grad /= len(grads)

# %% [markdown]
# We train twenty steps with each of them, and print the last loss. (A network that guesses
# uniformly has a loss of $\ln 10 \approx 2.3$.) Then we compare the two replicas with each other,
# and both with one device. **Predict:** with which mistakes does the loss fall, and which
# comparison shows which mistake?

# %% tags=["measured", "trains", "predict"]
for all_reduce in [allreduce, no_broadcast, first_only, mean_of_shards]:
    replicas, loss = twenty_steps(2, all_reduce)
    apart = largest_difference(replicas[0], replicas[1])
    from_one = largest_difference(replicas, whole)
    print(f"{all_reduce.__name__:14}  loss {loss:.2f}, between replicas {apart:.1e}, "
          f"from one device {from_one:.1e}")
    if all_reduce is not allreduce:
        assert from_one > 0.1

# %% [markdown]
# <details><summary>What came out</summary>
#
# The loss falls with all of them. Comparing the replicas shows only *no broadcast*; the other two
# leave them equal, and wrong. The comparison with one device shows all three.
#
# </details>
#
# So **compare the weights with one device's.** (Where the loss is a mean over the shard, as in
# PyTorch, the mean of the gradients is right, if the shards are equal: chapter 02.)
#
# ## Summary
#
# - A data-parallel step has four parts: shards, gradients of the loss *sum*, all-reduce, and an
#   update by rate / $n$ times the sum.
# - *k* devices compute what one computes: to $10^{-12}$ in float64, without BatchNorm or Dropout
#   (chapters 06 and 09). Equal replicas and a falling loss don't show that; a comparison with one
#   device does.
# - A speed-up needs a baseline. Ours is one device with one core; one device with both cores gains
#   most of what two devices gain. A CPU device can be made larger, a GPU can't.
#
# Next, chapter 05: the same step in Gluon. (To large models: go on with chapter 13.)

# %% [markdown]
# ## Exercises
#
# 1. **All work on one device.** Simulated devices can use each other's arrays (chapter 01). Define
#    a `split_and_load` that leaves *all* shards on the first device; `train_batch` will call it.
#    Which of the chapter's experiments notices: twenty steps against one device, or the speed-up by
#    `seconds`? (Run `from helpers import split_and_load` afterwards.)
# 2. **Momentum.** Each device keeps a *velocity* $v$ for each of its parameters:
#    $v \leftarrow 0.9\,v + \text{sum} / n$, and then $w \leftarrow w - \text{rate} \cdot v$. What
#    must devices send for it? Train twenty steps on two devices and on one, and compare.
#    (`train_batch` with a rate of 0 leaves the sums in the gradients, and the weights as they are.)

# %% [markdown]
# ### Answer to *Your turn*
#
# For each parameter, an all-reduce of its gradients; then each device updates its own parameters.

# %% tags=["solution", "your-turn"]
def sum_and_update(replicas, grads, lr, n):
    for number in range(len(replicas[0])):
        same_parameter = [its_grads[number] for its_grads in grads]
        allreduce(same_parameter)
    for replica, its_grads in zip(replicas, grads):
        for param, grad in zip(replica, its_grads):
            param -= lr / n * grad


your_turn(sum_and_update, cases, in_place=True)

# %% [markdown]
# ### Answer 1
#
# The weights are those of one device, so the comparison passes. The speed-up notices: two devices
# are no longer faster, because the first does all the work. Equal weights don't say *where* they
# were computed.

# %% tags=["solution", "measured", "trains"]
def split_and_load(data, devices, even=True):
    shards = helpers.split_and_load(data, devices, even)
    return [shard.as_in_context(devices[0]) for shard in shards]


replicas, loss = twenty_steps(2)
print("agrees with one device:", largest_difference(replicas, whole) < 1e-12)
assert largest_difference(replicas, whole) < 1e-12

for number in range(3):
    print(f"speed-up of two devices: {seconds(four[:1]) / seconds(four[:2]):.2f}")

from helpers import split_and_load

# %% [markdown]
# ### Answer 2
#
# Nothing. Every device has the same sum, so it computes the same velocity by itself.

# %% tags=["solution", "trains"]
def with_momentum(k):
    used = four[:k]
    replicas = [get_params(init_params(), device, "float64") for device in used]
    velocities = []
    for replica in replicas:
        velocities.append([nd.zeros_like(param) for param in replica])
    for x, y in batches(small, 64):
        # Leaves the sums in the gradients.
        train_batch(x, y, replicas, used, lr=0)
        for replica, its_velocities in zip(replicas, velocities):
            for param, velocity in zip(replica, its_velocities):
                velocity[:] = 0.9 * velocity + param.grad / len(x)
                param -= 0.05 * velocity
    return replicas


difference = largest_difference(with_momentum(2), with_momentum(1)[0])
print("two devices agree with one to 1e-12:", difference < 1e-12)
assert difference < 1e-12
