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
# > compared with, and what simulated devices can't show; why only a comparison with one device
# > shows a wrong all-reduce.
# >
# > **What you need:** chapters 01 to 03. No GPU. Reading takes {reading time}, running about a
# > minute.

# %%
import helpers
from helpers import allreduce, load_data, split_and_load, your_turn
from helpers.by_hand import init_params
from helpers.compare import largest_difference
from helpers.trace import record

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# Simulated devices, where we look at results and not at speed.
four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]
pair = four[:2]

# %% [markdown]
# ## Data and network
#
# From each pixel we subtract the mean of all training pixels.

# %% tags=["measured"]
data = load_data("mnist")
print(data)

mean = data.train_images.mean()
train_set = (nd.array(data.train_images - mean), nd.array(data.train_labels))
test_set = (nd.array(data.test_images - mean), nd.array(data.test_labels))

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
# `lenet` mentions no device, because an operation runs where its inputs are (chapter 01). (It is
# the LeNet-like network of *Dive into Deep Learning*, "Training on Multiple GPUs".)

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
# shard's loss. An all-reduce gives both devices the sum of both gradients, and both make the same
# update.](src/drawings/lenet_step.svg)
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

# %% [markdown]
# One step with eight images. Each device sees different images, so it finds a different gradient.
# The last bias has ten numbers, one for each class, and we print three. **Predict:** after the
# step, are its gradient and its value the same on both?

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
# Both are the same. The all-reduce has replaced each device's gradient by the sum, so both devices
# have subtracted the same numbers from the same bias. That is why replicas stay equal, although
# nobody sends weights.
#
# </details>
#
# ## Training
#
# We read the loss every hundred steps only, because each read makes Python wait for the devices.

# %% tags=["measured", "trains", "few:else 10=>else 6"]
# scikit-learn's digits, where there is no MNIST, are few.
epochs = 1 if data.name == "mnist" else 10
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]

for epoch in range(epochs):
    for step, (x, y) in enumerate(batches(train_set, 128, seed=epoch)):
        loss = train_batch(x, y, replicas, two, lr=0.2)
        if step % 100 == 0:
            print(f"epoch {epoch}, step {step}: loss {loss.asscalar():.2f}")

# %% [markdown]
# The replicas are bit-identical, as `largest_difference` says, so one can answer for both:

# %% tags=["measured"]
assert largest_difference(replicas[0], replicas[1]) == 0

right = 0
for x, y in batches(test_set, 1000):
    guesses = lenet(x.as_in_context(two[0]), replicas[0]).argmax(axis=1)
    right += (guesses == y.as_in_context(two[0])).sum().asscalar()

share = right / len(data.test_labels)
print(f"{share:.2%} of the test images right ({data.name})")
assert share > 0.9

# %% [markdown]
# ## Is it faster?
#
# To time it, we run one step to warm up, wait for all work, and only then read the clock (chapter
# 01). The batch has 256 images on one device and on two, so each of two has half of the work
# (**strong scaling**; where each device keeps its 256, it is *weak scaling*: chapter 11).

# %% tags=["few:STEPS = 8=>STEPS = 1"]
from time import perf_counter

STEPS = 8


def seconds(devices, images=256):
    x, y = next(batches(train_set, images))
    replicas = [get_params(init_params(), device) for device in devices]
    train_batch(x, y, replicas, devices, lr=0.01)  # warms up
    nd.waitall()
    begin = perf_counter()
    for step in range(STEPS):
        train_batch(x, y, replicas, devices, lr=0.01)
    nd.waitall()
    return perf_counter() - begin

# %% [markdown]
# The ratio of the two times is the **speed-up**; divided by the number of devices it is the
# **scaling efficiency**. **Predict:** how large is the speed-up?

# %% tags=["measured", "predict", "few:ROUNDS = 5=>ROUNDS = 1"]
ROUNDS = 5
for round_ in range(ROUNDS):
    on_one = seconds(two[:1])
    on_two = seconds(two)
    print(f"one device {on_one:.2f} s, two devices {on_two:.2f} s: "
          f"{on_one / on_two:.2f} times as fast")

# %% [markdown]
# <details><summary>What came out</summary>
#
# If two cores are free, two devices are clearly faster. Rounds differ, so one of them alone would
# be no answer.
#
# </details>
#
# Does one device wait for the other? Here is what two simulated devices do in one such step, as
# MXNet's profiler recorded it:

# %% tags=["fold", "measured"]
# draw: who works when in one step of 256 images on two devices
from helpers.plotting import show, timeline

x, y = next(batches(train_set, 256))
replicas = [get_params(init_params(), device) for device in pair]
train_batch(x, y, replicas, pair, lr=0.01)  # warms up
recording = record(train_batch, x, y, replicas, pair, 0.01)

fig, axes = timeline("In a step of 256 images", {"": recording.rows})
show(fig, alt="A timeline of one step with a row for Python and one for each device. The bars of "
              "both devices overlap in time for most of the step; then the one that is ready "
              "first waits for the other.")

# %% [markdown]
# They compute side by side. Near the end the one that is ready first waits for the other, because
# the sum needs both gradients. (On a machine with one core the bars would overlap, too. That two
# cores worked is shown by the seconds above, not by the bars.)
#
# ### Faster than what?
#
# That speed-up has *one device with one core* as its **baseline**. But one device can use both
# cores, too, because MXNet can spread an operator over several threads. The course has forbidden
# that since its first cell (`helpers` sets `OMP_NUM_THREADS=1`), so that a simulated device is one
# core. So an expert asks first: is *one device with both cores* any slower than two devices?
#
# MXNet reads that setting on import. So each configuration runs in a process of its own, by the
# program [lenet_contestant.py](lenet_contestant.py), which makes our step on random images. `race`,
# a helper, starts all three and lets each in turn run `STEPS` steps, for several rounds. (Rounds in
# which other programs used more than 2 % of the machine are taken again, up to `ROUNDS` more in
# all. If only a few rounds are left, don't trust the brackets.) It returns each one's seconds.

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1"]
from helpers.timing import race, spread

ROUNDS = 9
times = race({
    "one device, one core": "lenet_contestant.py --devices 0",
    "one device, both cores": "lenet_contestant.py --devices 0 --threads 2",
    "two devices, one core each": "lenet_contestant.py --devices 0 1",
}, STEPS, ROUNDS)

# %% [markdown]
# We print the median of the ratios to *one device, one core*, and in brackets the middle half of
# them (the interquartile range). Our rule: we name a winner only if the brackets don't overlap.
# **Predict:** which is faster, one device with both cores or two devices?

# %% tags=["measured", "predict"]
for name in times:
    ratios = times["one device, one core"] / times[name]  # one for each round
    low, median, high = spread(ratios)
    print(f"{name:26}  {median:.2f} times as fast ({low:.2f} to {high:.2f})")

# %% [markdown]
# <details><summary>What came out</summary>
#
# On quiet cores one device with both of them gains most of what two devices gain. The brackets say
# whether there is a winner in this run.
#
# </details>
#
# So what are simulated devices for? **A CPU device can be made larger, by more threads; a GPU can't
# be.** To use more than one GPU you need what `train_batch` does, and simulated devices let you
# write it, watch it and test it. They can't show what messages cost between GPUs, because they
# share one memory. The speed-up of this course is that of *devices*, each with one core.
#
# What do the eight small all-reduces cost? And is our baseline a straw man? See deeper: How the
# speed-up was measured.
#
# ## Is it the same?
#
# Are the weights what *one* device would have? The reference is a plain loop without shards and
# all-reduce: twenty steps in float64.

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
# `largest_difference` looks at each parameter of each replica, and returns the largest difference
# from one device as a share of that parameter's largest entry. Three devices get shards of 22, 21
# and 21 images. **Predict:** are their weights those of one device?

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
# two of five seeds had weights more than a tenth of the largest entry apart (deeper: Why float32
# jumps). So in float32 claim equality for one step only, and test longer runs in float64.
#
# `helpers.by_hand` keeps the chapter's functions, for later chapters and for
# [lenet_contestant.py](lenet_contestant.py). With the same input they give the same weights:

# %% tags=["trains"]
from helpers import by_hand

x, y = next(batches(train_set, 7))
ours = [get_params(init_params(), device) for device in four]
theirs = [by_hand.get_params(init_params(), device) for device in four]
train_batch(x, y, ours, four, lr=0.2)
by_hand.train_batch(x, y, theirs, four, lr=0.2)
for our_replica, their_replica in zip(ours, theirs):
    assert largest_difference(our_replica, their_replica) == 0

# %% [markdown]
# ## What a wrong all-reduce does
#
# Here are four mistakes. In the first the sum stays on the first device, as in the textbook of
# chapter 03.

# %%
def no_broadcast(grads):
    total = grads[0]
    for rank in range(1, len(grads)):
        total += grads[rank].copyto(total.context)


def first_only(grads):  # all get the first device's gradient
    for rank in range(1, len(grads)):
        grads[0].copyto(grads[rank])


def counts_twice(grads):  # the last device's gradient
    grads[-1] *= 2
    allreduce(grads)


def mean_of_shards(grads):  # instead of the sum
    allreduce(grads)
    for grad in grads:
        grad /= len(grads)

# %% [markdown]
# A network that guesses uniformly has a loss of $\ln 10 \approx 2.3$. **Predict:** with which of
# them does the loss fall, and which leave the replicas equal?

# %% tags=["measured", "trains", "predict"]
for all_reduce in [allreduce, no_broadcast, first_only, counts_twice, mean_of_shards]:
    replicas, loss = twenty_steps(2, all_reduce)
    equal = largest_difference(replicas[0], replicas[1]) == 0
    same = largest_difference(replicas, whole) < 1e-12
    print(f"{all_reduce.__name__:14} loss {loss:.2f}, replicas equal: {equal}, "
          f"weights of one device: {same}")
    assert same == (all_reduce is allreduce)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The loss falls with all of them. Comparing the replicas shows only *no broadcast*; the other three
# leave them equal, and wrong. The comparison with one device shows all four.
#
# </details>
#
# Would accuracy show them? With each mistake we trained an epoch of MNIST from five seeds. These
# are the stored accuracies of both replicas, a number for each seed.

# %%
import json
from pathlib import Path

stored = json.loads(Path("src/results/lenet.json").read_text())
print("trained on", stored["date"], "on", stored["machine"])

names = {
    "allreduce": "lenet-128-0.2",  # batch 128 and rate 0.2
    "no_broadcast": "lenet-no_broadcast",
    "first_only": "lenet-first_only",
    "counts_twice": "lenet-counts_twice",
    "mean_of_shards": "lenet-mean_of_shards",
}
for name, stored_name in names.items():
    print(name)
    for rank in [0, 1]:
        accuracies = []
        for run in stored["runs"][stored_name]:
            first_epoch = run[0]
            accuracies.append(first_epoch["accuracies"][rank])
        print(f"    replica {rank}: {accuracies}")

# %% [markdown]
# Accuracy is no test. With the right all-reduce the five seeds differ by more than two points. From
# the same seed *counts twice* is at most 1.2 points away from it, and in four of five above it.
# (*No broadcast* shows here, but in the second replica only. And where the loss is a mean over the
# shard, as in PyTorch, the mean of the gradients is right: chapter 02.)
#
# **Compare weights with one device's.** Each of the four mistakes shows there.
#
# ## Summary
#
# - A data-parallel step has four parts: shards, gradients of the loss *sum*, all-reduce, and an
#   update by rate / $n$ times the sum.
# - *k* devices compute what one computes: to $10^{-12}$ in float64, without BatchNorm or Dropout
#   (chapters 06 and 09). Equal replicas, a falling loss and a good accuracy don't show that; a
#   comparison with one device does.
# - A speed-up needs a baseline. Ours is one device with one core; one device with both cores gains
#   most of what two devices gain. A CPU device can be made larger, a GPU can't.
#
# Next, chapter 05: the same step in Gluon. (To large models: go on with chapter 13.)

# %% [markdown]
# ## Exercises
#
# 1. **All work on one device.** Simulated devices can use each other's arrays (chapter 01). Define
#    a `split_and_load` that leaves *all* shards on the first device; `train_batch` will call it.
#    Which of the chapter's experiments notices: twenty steps against one device, or the timeline,
#    for which `record` ran a step on `pair`? (Run `from helpers import split_and_load` afterwards.)
# 2. **Momentum.** Each device keeps a *velocity* $v$ for each of its parameters:
#    $v \leftarrow 0.9\,v + \text{sum} / n$, and then $w \leftarrow w - \text{rate} \cdot v$. What
#    must devices send for it? Train twenty steps on two devices and on one, and compare.
#    (`train_batch` with a rate of 0 leaves the sums in the gradients, and the weights as they are.)
# 3. **Small batches (open).** Measure the speed-up by `seconds` with 16, 64 and 256 images. Predict
#    first: with which is it largest?

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
# The weights are those of one device, so the comparison passes. The timeline notices: the second
# device has hardly anything to do. Equal weights don't say *where* they were computed.

# %% tags=["solution", "measured", "trains"]
def split_and_load(data, devices, even=True):
    shards = helpers.split_and_load(data, devices, even)
    return [shard.as_in_context(devices[0]) for shard in shards]


replicas, loss = twenty_steps(2)
print("agrees with one device:", largest_difference(replicas, whole) < 1e-12)
assert largest_difference(replicas, whole) < 1e-12

x, y = next(batches(train_set, 256))
replicas = [get_params(init_params(), device) for device in pair]
recording = record(train_batch, x, y, replicas, pair, 0.01)
for lane, events in recording.lanes.items():
    print(f"{lane} works for {sum(event.duration for event in events):.0f} ms")

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

# %% [markdown]
# ### Answer 3
#
# A good answer lets the cases take turns, has several rounds and says by the rule above whether two
# batch sizes differ. It looks for what doesn't become shorter on two devices. Python's calls are a
# part of it, because they hand out the work of both devices one after the other. What share of a
# step do they take?

# %% tags=["solution", "measured", "few:TRIES = 3=>TRIES = 1"]
TRIES = 3
for number in range(TRIES):
    for images in [16, 64, 256]:
        ratio = seconds(two[:1], images) / seconds(two, images)
        print(f"{images:3} images: two devices are {ratio:.2f} times as fast as one")

replicas = [get_params(init_params(), device) for device in pair]
for images in [16, 64, 256]:
    x, y = next(batches(train_set, images))
    train_batch(x, y, replicas, pair, lr=0.01)  # warms up
    for number in range(TRIES):
        recording = record(train_batch, x, y, replicas, pair, 0.01)
        share = recording.handed_out / recording.length
        print(f"{images:3} images: Python hands out work for {share:.0%} of a step")
