# %% [markdown]
# # 12 · Unequal devices
#
# So far all devices were alike, and equal shards were right. Now one device is slower: an old GPU
# beside a new one, or a CPU that is to help a GPU.
#
# ![A slow device needs three times as long for an image. The fast one alone needs some time for 256
# images. On equal shards of 128, the fast one waits for the slow one, and both together take longer
# than the fast one alone. With 192 and 64 images they are done together, and
# sooner.](src/drawings/shares_by_speed.svg)
#
# Shares by speed seem best. Is the gradient still right then? And is a slow device
# worth having?
#
# ## What you'll do
#
# Train on shards of unequal size and hold the weights against one device's. See whether mistakes
# are noticed. Then make a device slow, cut batches by speed, and let the clock judge.
#
# ## What you'll learn
#
# - why sums need no weights on unequal shards and means do;
# - why a test on equal shards can't see that mistake;
# - what equal shards and shares by speed bring when speeds differ;
# - when a slower helper pays.
#
# ## What you need
#
# Chapters 02, 03 and 06, and two cores. No GPU. Reading takes {reading time}, running about a
# minute.

# %%
from functools import partial

from helpers import allreduce, load_data
from helpers.compare import largest_difference
from helpers.networks import lenet

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## Which mean is right?
#
# Start with numbers that you can add in your head. Four images have the gradients 1, 2, 3 and 10.
# One device has the first three, the other has the last. **Predict:** what is the mean of all four,
# and what is the mean of the two devices' means?

# %%
first = np.array([1, 2, 3])
second = np.array([10])
print("sum of both sums / 4:  ", (first.sum() + second.sum()) / 4)
print("mean of both means:    ", (first.mean() + second.mean()) / 2)

# %% [markdown]
# The batch's gradient is 4. The mean of means is 6, since in it the last image counts as much as
# the other three together. There are two right ways:
#
# - *Sums:* each device sums over its shard. Add the sums, and divide once by the batch size $n$.
# - *Weighted means:* each device takes the mean over its $n_i$ images. Multiply it by
#   $\frac{n_i}{n}$, and add.
#
# The second way, in place, with `allreduce` of chapter 03:

# %%
def average(gradients, sizes):
    n = sum(sizes)
    for gradient, size in zip(gradients, sizes):
        gradient *= size / n  # in place
    allreduce(gradients)


means = [nd.array([2], ctx=pair[0]), nd.array([10], ctx=pair[1])]
average(means, sizes=[3, 1])
print("weighted:", means[0].asscalar(), "and", means[1].asscalar())

# %% [markdown]
# Both devices have 4 now, from $\frac34 \cdot 2 + \frac14 \cdot 10$. **Means need weights, sums
# don't.** (PyTorch's `DistributedDataParallel` averages over $k$ processes, chapter 14. There a
# shard's mean needs the factor $k\,n_i / n$, a sum $k / n$.)

# %% tags=["fold"]
# check: averaged over k processes, means with the factor k n_i / n give 4, sums with k / n too
k = 2
n = 4
assert (first.mean() * k * 3 / n + second.mean() * k * 1 / n) / k == 4
assert (first.sum() * k / n + second.sum() * k / n) / k == 4

# %% [markdown]
#
# ## A network on unequal shards
#
# Does a real network learn the same on any shards? We train LeNet of chapter 06 for three steps, on
# one device and on two, and compare all weights. The last batch has only 32 images. float64 keeps
# rounding errors small.

# %% tags=["measured"]
data = load_data("mnist", limit=10_240)
print(data)
images = data.train_images
labels = data.train_labels
batches = []
for begin, end in [(0, 64), (64, 128), (128, 160)]:  # n is a power of 2: 1/n is exact
    x = nd.array(images[begin:end], dtype="float64")
    y = nd.array(labels[begin:end])
    batches.append((x, y))

# %% [markdown]
# The network begins with the same weights each time:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def same_lenet(devices, dtype="float32"):
    mx.random.seed(11)
    net = lenet()
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype=dtype))  # makes the weights now
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05},
                            update_on_kvstore=False)
    return net, trainer


def weights_on(net, device):
    return [parameter.data(device) for parameter in net.collect_params().values()]

# %% [markdown]
# With `update_on_kvstore=False` each device updates its own replica (chapter 07). What should come
# out is what plain Gluon does on one device:

# %% tags=["trains"]
def train_alone(batches):
    net, trainer = same_lenet(pair[:1], "float64")
    for x, y in batches:
        with autograd.record():
            loss = cross_entropy(net(x), y)
        loss.backward()
        trainer.step(len(x))
    return weights_on(net, pair[0])


whole = train_alone(batches)
print(len(whole), "arrays of weights, the first of shape", whole[0].shape)

# %% [markdown]
# `split_by_sizes` cuts a batch at the sizes that it is given. Every device must get an image here
# (deeper: Mistakes with unequal shards has devices that get none).

# %%
def split_by_sizes(batch, sizes):
    shards = []
    begin = 0
    for size, device in zip(sizes, pair):
        end = begin + size
        shards.append(batch[begin:end].as_in_context(device))
        begin = end
    return shards


for shard in split_by_sizes(nd.arange(8), [6, 2]):
    print(shard.context, shard.asnumpy())

# %% [markdown]
# A step begins with the losses of each shard, one for each image:

# %%
def shard_losses(net, x, y, sizes):
    losses = []
    for x_shard, y_shard in zip(split_by_sizes(x, sizes), split_by_sizes(y, sizes)):
        losses.append(cross_entropy(net(x_shard), y_shard))
    return losses

# %% [markdown]
# With sums, `trainer.step(n)` does the rest: it adds the gradients of both devices and divides
# once by $n$.

# %% tags=["trains"]
def step_of_sums(net, trainer, x, y, sizes):
    with autograd.record():
        sums = [loss.sum() for loss in shard_losses(net, x, y, sizes)]
    autograd.backward(sums)
    trainer.step(sum(sizes))

# %% [markdown]
# With means, `combine` makes the gradients of both devices right, parameter by parameter. It is our
# `average`, until we try others. `trainer.update(1)` then only updates.

# %%
def step_of_means(net, trainer, x, y, sizes, combine):
    with autograd.record():
        means = [loss.mean() for loss in shard_losses(net, x, y, sizes)]
    autograd.backward(means)
    for parameter in net.collect_params().values():
        combine(parameter.list_grad(), sizes)
    trainer.update(1)

# %% [markdown]
# `distance` trains with one of these steps and says how far the weights are from those of one
# device: the largest difference on any device, as a share of the array's largest weight. Each step
# has another cut. **Predict:** does the learning rate need another value for that?

# %% tags=["measured"]
def distance(step, cuts, **more):  # what `more` holds goes to the step
    net, trainer = same_lenet(pair, "float64")
    for (x, y), sizes in zip(batches, cuts):
        step(net, trainer, x, y, sizes, **more)
    replicas = [weights_on(net, device) for device in pair]
    expected = train_alone(batches[: len(cuts)])
    return float(largest_difference(replicas, expected))


UNEQUAL = [[40, 24], [8, 56], [20, 12]]  # sizes, in each of the three steps
sums = distance(step_of_sums, UNEQUAL)
means = distance(step_of_means, UNEQUAL, combine=average)
print(f"sums are off by {sums:.0e}, weighted means by {means:.0e}")

# %% [markdown]
# No: both are off by rounding only. For this network the cut is a matter of speed alone.
# (Not so with BatchNorm: each device takes statistics from its own shard, chapter 09.)

# %% tags=["fold"]
# check: both are within 1e-12, for twelve random cuts too; every weight was trained
assert sums < 1e-12
assert means < 1e-12
rng = np.random.default_rng(5)
for _ in range(12):
    cuts = []
    for x, _ in batches:
        size = int(rng.integers(1, len(x)))
        cuts.append([size, len(x) - size])
    assert distance(step_of_sums, cuts) < 1e-12, f"sums, cut {cuts}"
    assert distance(step_of_means, cuts, combine=average) < 1e-12, f"means, cut {cuts}"
untrained, _ = same_lenet(pair[:1], "float64")
for old, new in zip(weights_on(untrained, pair[0]), whole, strict=True):
    assert largest_difference(new, old) > 1e-6, "a step that moves nothing shows nothing"

# %% [markdown]
# ## Would we notice a mistake?
#
# A check is worth as much as the mistakes that it finds. Here are three wrong versions of
# `average`. `gradients` is the list that `list_grad()` gave, and it is the parameter's own: what we
# put into it, Trainer reads.

# %%
def mean_of_means(gradients, sizes):  # no weights
    for gradient in gradients:
        gradient /= len(gradients)
    allreduce(gradients)


def one_left_out(gradients, sizes):  # the first has its part only, the second its own mean
    average(gradients[:1], sizes)


def into_new_arrays(gradients, sizes):  # the right sum, but in new arrays
    n = sum(sizes)
    second = gradients[1].as_in_context(pair[0])
    total = gradients[0] * (sizes[0] / n) + second * (sizes[1] / n)
    gradients[0] = total
    gradients[1] = total.as_in_context(pair[1])

# %% [markdown]
# Each is tried on unequal shards and on equal ones. **Predict:** which of them is right on equal
# shards?

# %% tags=["measured"]
EQUAL = [[32, 32], [32, 32], [16, 16]]
for combine in [average, mean_of_means, one_left_out, into_new_arrays]:
    unequal = distance(step_of_means, UNEQUAL, combine=combine)
    equal = distance(step_of_means, EQUAL, combine=combine)
    print(f"{combine.__name__:15} is off by {unequal:.0e} on unequal shards, {equal:.0e} on equal")

# %% tags=["fold"]
# check: all are noticed on unequal shards; on equal ones a mean of means passes, no other
for combine in [mean_of_means, one_left_out, into_new_arrays]:
    unequal = distance(step_of_means, UNEQUAL, combine=combine)
    assert unequal > 1e-3, f"{combine.__name__} is not noticed"
    passes = distance(step_of_means, EQUAL, combine=combine) < 1e-12
    assert passes == (combine is mean_of_means), f"{combine.__name__} on equal shards"
one_step = distance(step_of_means, UNEQUAL[:1], combine=into_new_arrays)
assert one_step < 1e-12, "the first step is right"

# %% [markdown]
# All three are found on unequal shards. On equal ones the mean of means *is* the mean. So **code
# that will meet unequal shards must be tested on them.** In training they come up at the end of an
# epoch, if the last batch can't be divided by the number of devices.
#
# `into_new_arrays` needs more than one step to be found: its first step is right. Then Trainer
# reads the new arrays, and `backward` goes on writing into the old ones. So each later step repeats
# the first gradient.
#
# Four more mistakes, by name. The second divides the sums by *twice* the larger shard, the third
# by 64 even when the batch has 32 images:

# %% tags=["fold", "measured", "trains"]
# check: four more mistakes, how far off they are, and that each is noticed
def averaged_twice(gradients, sizes):
    average(gradients, sizes)
    for gradient in gradients:
        gradient /= len(gradients)


def step_averaged_twice(net, trainer, x, y, sizes):
    step_of_means(net, trainer, x, y, sizes, averaged_twice)


def by_twice_the_larger(net, trainer, x, y, sizes):
    with autograd.record():
        sums = [loss.sum() for loss in shard_losses(net, x, y, sizes)]
    autograd.backward(sums)
    trainer.step(2 * max(sizes))


def by_64_always(net, trainer, x, y, sizes):
    with autograd.record():
        sums = [loss.sum() for loss in shard_losses(net, x, y, sizes)]
    autograd.backward(sums)
    trainer.step(64)


def labels_elsewhere(net, trainer, x, y, sizes):
    moved = nd.concat(y[1:], y[:1], dim=0)
    step_of_sums(net, trainer, x, moved, sizes)


for step in [step_averaged_twice, by_twice_the_larger, by_64_always, labels_elsewhere]:
    off = distance(step, UNEQUAL)
    print(f"{step.__name__:19} is off by {off:.0e} on unequal shards, "
          f"by {distance(step, EQUAL):.0e} on equal ones")
    assert off > 1e-3, f"{step.__name__} is not noticed"
assert distance(by_twice_the_larger, EQUAL) < 1e-12, "on equal shards that is the batch"

# %% [markdown]
# Again one of them is right on equal shards. What a mean of means does to training, and what a
# device without any image does, is in deeper: Mistakes with unequal shards.
#
# ## A device made slow
#
# Our two devices are alike, so we make one slow. A device with the *handicap* $h$ works through its
# shard $h$ times. To keep the gradient, only the first time counts: the other losses are multiplied
# by 0. (Python's `sleep` would keep no device busy, only delay the handing out of work.)

# %%
def with_handicap(x, y, handicap):
    n = len(x)
    rows = nd.arange(handicap * n, ctx=x.context)
    counts = rows < n  # 1 for the first n rows, then 0
    return x.take(rows % n), y.take(rows % n), counts


shard = nd.array([5, 6, 7])  # stands for three images, and for their labels
repeated, _, counts = with_handicap(shard, shard, handicap=2)
print("images:", repeated.asnumpy())
print("counts:", counts.asnumpy())

# %% [markdown]
# An image that counts 0 should be as much work as any other; we will measure that. A *pass* is
# what one device works through in a step: images, labels and counts.

# %%
def run_passes(net, passes):
    sums = []
    with autograd.record():
        for x, y, counts in passes:
            losses = cross_entropy(net(x), y)
            sums.append((losses * counts).sum())
    autograd.backward(sums)
    return sums

# %% tags=["fold"]
# check: with handicaps, still one device's weights; if the repeated images counted, others
def passes_of(x, y, sizes, handicaps):
    """The pass of each device, for its shard and its handicap."""
    passes = []
    for x_shard, y_shard, handicap in zip(split_by_sizes(x, sizes), split_by_sizes(y, sizes),
                                          handicaps):
        passes.append(with_handicap(x_shard, y_shard, handicap))
    return passes


def step_with_handicaps(net, trainer, x, y, sizes, all_count=False):
    passes = []
    for shard_x, shard_y, counts in passes_of(x, y, sizes, handicaps=[1, 3]):
        counts = counts.astype("float64")
        passes.append((shard_x, shard_y, nd.ones_like(counts) if all_count else counts))
    assert [len(x) for x, _, _ in passes] == [sizes[0], 3 * sizes[1]], "other passes"
    run_passes(net, passes)
    trainer.step(sum(sizes))


assert distance(step_with_handicaps, UNEQUAL) < 1e-12
assert distance(partial(step_with_handicaps, all_count=True), UNEQUAL) > 1e-3

# %% [markdown]
# How fast are the two devices now? We time each by itself on 128 images, in turns. `cpu(1)` has
# handicap 3.

# %% tags=["fold", "measured", "few:ROUNDS = 9=>ROUNDS = 3"]
# measure: the fast device's speed and the slow one's
from helpers.timing import Others, in_turns

ROUNDS = 9
net, _ = same_lenet(pair)
x = nd.array(images[:256])
y = nd.array(labels[:256])
fast, slow = passes_of(x, y, sizes=[128, 128], handicaps=[1, 3])
times = in_turns({"fast": partial(run_passes, net, [fast]),
                  "slow": partial(run_passes, net, [slow])}, ROUNDS)
fast_speed = 128 / np.median(times["fast"])
slow_speed = 128 / np.median(times["slow"])
print(f"fast: {fast_speed:,.0f} images/s, slow: {slow_speed:,.0f} images/s")
print(f"{fast_speed / slow_speed:.2f} to 1")

# %% [markdown]
# On a quiet machine the ratio is within a tenth of 3, the handicap.
#
# ## Shares by speed
#
# How should a batch be cut? If device $i$ computes $v_i$ images a second, it takes $n_i / v_i$
# seconds for $n_i$ images. A step takes as long as the slowest device. Nobody waits if these times
# are equal, so $n_i$ should be in proportion to $v_i$.
#
# Images are whole. So we round the *ends* of the shards, as in chapter 02's third exercise. Then
# the sizes add up to $n$.

# %%
def shares_by_speed(n, speeds):
    sizes = []
    begin = 0
    so_far = 0  # the sum of the speeds until here
    for speed in speeds:
        so_far += speed
        end = round(n * so_far / sum(speeds))
        sizes.append(end - begin)
        begin = end
    return sizes


print("speeds 3 and 1:   ", shares_by_speed(256, [3, 1]))
print("speeds 2, 3 and 4:", shares_by_speed(100, [2, 3, 4]))

# %% tags=["fold"]
# check: for 1,000 random speeds the sizes add up, and none is more than one image off
for _ in range(1000):
    speeds = rng.uniform(0.1, 9, rng.integers(1, 9))
    sizes = np.array(shares_by_speed(256, speeds))
    off = sizes - 256 * speeds / speeds.sum()
    assert sizes.sum() == 256, "an image is lost"
    assert np.abs(off).max() <= 1 + 1e-9, f"shares for {speeds}"

# %% [markdown]
# With two devices, equal shards finish $2\,v_\text{slow}$ images a second, shares by speed
# $v_\text{fast} + v_\text{slow}$. **Predict:** from which handicap on is the second device of no
# use, if shards are equal?

# %%
for h in [1, 1.5, 2, 3, 6, 30]:
    equal = 2 / h  # v_fast is 1, v_slow is 1 / h
    by_speed = 1 + 1 / h
    print(f"handicap {h:3}: equal shards {equal:.2f} times the fast device alone, "
          f"by speed {by_speed:.2f}")

# %% [markdown]
# From 2 on. By these formulas shares by speed never do harm, but for large $h$ they add little.
#
# ## Three trainings
#
# What does the clock say? We train 40 steps in three ways, with the same batches of 256 images and
# the same start. A step is `run_passes`, then `trainer.step(256)`.

# %% tags=["fold", "measured", "trains", "few:STEPS = 40=>STEPS = 12"]
# measure: the loss of each step, and when it was done, in three ways
import time

STEPS = 40


def train_by_the_clock(sizes, handicaps, steps):
    net, trainer = same_lenet(pair[: len(sizes)])
    losses = []
    seconds = []
    for step in range(steps):
        rows = np.arange(256 * step, 256 * (step + 1)) % len(images)
        passes = passes_of(nd.array(images[rows]), nd.array(labels[rows]), sizes, handicaps)
        nd.waitall()  # the shards are on their devices
        begin = time.perf_counter()
        sums = run_passes(net, passes)
        trainer.step(256)
        nd.waitall()
        seconds.append(time.perf_counter() - begin)
        losses.append(sum(loss.asscalar() for loss in sums) / 256)
    return np.array(losses), np.cumsum(seconds)


sizes = shares_by_speed(256, [fast_speed, slow_speed])
ways = {
    "fast device alone": ([256], [1]),
    "equal shards": ([128, 128], [1, 3]),
    "shares by speed": (sizes, [1, 3]),
}
for cut, handicaps in ways.values():
    train_by_the_clock(cut, handicaps, steps=2)  # warms up
trained = {}
with Others() as others:
    for name, (cut, handicaps) in ways.items():
        trained[name] = train_by_the_clock(cut, handicaps, STEPS)
for name, (losses, done) in trained.items():
    print(f"{name:17} {ways[name][0]}: loss {losses[0]:.2f} to {losses[-1]:.2f}, "
          f"{STEPS * 256 / done[-1]:,.0f} images/s")
expected, _ = trained["fast device alone"]
apart = max(np.abs(losses - expected).max() for losses, _ in trained.values())
print(f"losses at most {apart:.0e} apart; other programs took {others.share:.0%} of the machine")

# %% tags=["fold", "measured"]
# draw: the loss against time, in three ways
from helpers.plotting import curves, show

lines = {}
for name, (losses, done) in trained.items():
    lines[name] = (done, losses)
alone, equal, by_speed = [done[-1] for _, done in trained.values()]
title = f"{STEPS} steps: {alone:.1f} s alone, {equal:.1f} s equal shards, {by_speed:.1f} s by speed"
fig, ax = curves(title, "seconds", "loss of a batch", lines)
show(fig, alt="Loss against time for three ways to train. The curves have the same shape; how far "
              "each is stretched is its time, which the title gives.")

# %% tags=["fold"]
# check: the three ways have the same losses at each step, and the loss falls
assert apart < 1e-3, "the same batches should train alike"
assert expected[-1] < expected[0] - 0.1, "it learns"

# %% [markdown]
# The losses are the same but for rounding, step by step; only the clock differs. In our quiet runs
# equal shards were slower than the fast device by itself, and shares by speed were faster, mostly
# by less than the third that the formula promised. It leaves out what a second device costs.
#
# ## When does a helper pay?
#
# Call the slower device a *helper*. The right comparison is with the fast device **alone**: it has
# no all-reduce, and half as many operators to hand out. The letters:
#
# - $a$: what a step costs, whatever the batch; $b$: computing one of the $n$ images on the fast
#   device;
# - $c$: what the helper costs in each step;
# - $h$: how many times as long the helper needs.
#
# With shares by speed the fast device gets $n\,\frac{h}{h+1}$ images and the helper the rest:
#
# $$T_\text{alone} = a + b\,n \qquad\qquad T_\text{both} = a + c + b\,n\,\frac{h}{h+1}$$
#
# So the helper saves $\frac{b\,n}{h+1}$ and costs $c$. It pays as long as
#
# $$h < \frac{b\,n}{c} - 1.$$
#
# A larger batch helps, and $a$ is not in it. **Predict** up to which $h$ a helper pays if $b\,n$ is
# 20 ms and $c$ is 4 ms.

# %%
print("up to handicap", 20 / 4 - 1)

# %% tags=["fold"]
# check: at the limit, both take as long as one alone
def limit(bn, c):
    return bn / c - 1


def step_time(n, h, a, b, c):
    return a + c + b * n * h / (h + 1)


alone = 2 + 0.25 * 256
assert np.isclose(step_time(256, limit(0.25 * 256, 4), a=2, b=0.25, c=4), alone)
assert step_time(256, 0.9 * limit(0.25 * 256, 4), a=2, b=0.25, c=4) < alone, "below it pays"
assert limit(bn=20, c=4) == 4

# %% [markdown]
# Now the clock, at $n = 256$. First without a slow helper: 256 images alone take $\frac{b\,n}{2}$
# longer than 128 alone. And two *equal* devices, with 128 images each, take $c$ longer than one
# with
# 128. From these two numbers the law says what each slower helper should save.

# %% tags=["fold", "measured", "few:ROUNDS = 15=>ROUNDS = 3"]
# measure: the step alone, and what helpers of handicap 3, 7, 15 and 31 save
ROUNDS = 15


def slowed_step(net, trainer, passes, n):
    run_passes(net, passes)
    trainer.step(n)


contestants = {}
x = nd.array(images[:256])
y = nd.array(labels[:256])
net, trainer = same_lenet(pair[:1])
for n in [128, 256]:
    contestants["alone", n] = partial(slowed_step, net, trainer, passes_of(x, y, [n], [1]), n)
net, trainer = same_lenet(pair)
for h in [1, 3, 7, 15, 31]:
    cut = shares_by_speed(256, [h, 1])  # whole: both are done at the same time
    contestants["helper", h] = partial(slowed_step, net, trainer, passes_of(x, y, cut, [1, h]), 256)

with Others() as others:
    times = in_turns(contestants, ROUNDS)
milliseconds = {name: 1000 * np.median(seconds) for name, seconds in times.items()}
bn = 2 * (milliseconds["alone", 256] - milliseconds["alone", 128])
c = milliseconds["helper", 1] - milliseconds["alone", 128]
print(f"a step alone takes {milliseconds['alone', 256]:.1f} ms, of it bn = {bn:.1f} ms; "
      f"a helper costs c = {c:.1f} ms")
for h in [3, 7, 15, 31]:
    low, median, high = np.percentile(times["alone", 256] - times["helper", h], (25, 50, 75)) * 1000
    print(f"handicap {h:2}: the law says {bn / (h + 1) - c:+5.1f} ms saved; "
          f"measured {median:+5.1f} ms (half the rounds: {low:+.1f} to {high:+.1f})")
print(f"other programs took {others.share:.0%} of the machine")

# %% [markdown]
# A minus means that the helper did harm. (If other programs keep a core to themselves, all do: both
# devices share the core that is left.) If both quartiles have one sign, the clock has decided; if
# not, it is too close to call. The law is tested further in deeper: When a helper pays, on three
# batch sizes.
#
# **On GPUs** we have run none of this. By the formula, a CPU beside a GPU that is 30 times as fast
# brings at most 3 % more. Two GPUs of different models, with $h$ between 1.5 and 3, are another
# matter: up to 67 or 33 % more, if $c$ is small.
#
# So what should you do with a slow device?
#
# 1. If $1/h$ more isn't worth having, leave it out, or give it work that nobody waits for, such as
#    evaluation.
# 2. With speeds nearly equal, keep equal shards: at $h = 1.1$ they lose less than 5 %.
# 3. Else cut by speed, keep sums, and assert the gradient.
#
# ## Summary
#
# - Sums, divided once by $n$, are right for every cut that gives each device an image. Means need
#   the weights $n_i / n$. On equal shards nobody notices that the weights are missing.
# - With speeds $v_i$, $k$ equal shards give at most $k \min v_i$ images a second, shares by speed
#   at most $\sum v_i$.
# - By our law a helper pays while $h < b\,n / c - 1$. Compare with the fast device alone.
#
# Next, chapter 13: the same in PyTorch.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs",
# exercise 2, asks how to divide work between unequal devices.

# %% [markdown]
# ## Exercises
#
# 1. **The closest whole shares.** Write `cut(n, speeds)` by the method of the *largest remainder*:
#    round each exact share down, then give one image each to the devices that lost most, the lower
#    number first if two lost the same. Show by trying all ways, for small $n$, that none is closer
#    to the exact shares in the sum of squares. Is `shares_by_speed` as close?
# 2. **Whom to leave out.** Each device beyond the first adds $c$ seconds to a step. Given $n$, the
#    speeds, $c$, and shares by speed, which devices should train? Check your function against all
#    subsets.
# 3. **Follow the speed.** Divide each batch by the speeds just seen, $n_i / t_i$, where $t_i$ is
#    device $i$'s time for its shard. Show on paper or by simulation where that ends if devices have
#    fixed costs that you don't know. What happens if $t_i$ is the time of the device's whole step?

# %% [markdown]
# ### Answer 1
#
# One image more for a device with remainder $r$ lowers the sum of squares by
# $r^2 - (1-r)^2 = 2r - 1$, so the largest remainders go first. A device that is due little may get
# nothing. Then all ways to divide up to nine images among up to three devices:

# %% tags=["solution"]
def cut(n, speeds):
    exact = n * np.array(speeds) / np.sum(speeds)
    sizes = np.floor(exact).astype(int)
    left_over = n - sizes.sum()
    remainders = exact - sizes
    largest_first = np.argsort(-remainders, kind="stable")  # of equal ones, the lower number
    for rank in largest_first[:left_over]:
        sizes[rank] += 1
    return sizes.tolist()


print(cut(256, [3, 1]), cut(10, [1, 1, 1, 1]))
assert cut(256, [3, 1]) == [192, 64]
assert cut(10, [1, 1, 1, 1]) == [3, 3, 2, 2]

# %% tags=["solution"]
from itertools import product


def squares(sizes, n, speeds):
    exact = n * np.array(speeds) / np.sum(speeds)
    return np.sum((np.array(sizes) - exact) ** 2)


farther = 0
for _ in range(500):
    n = int(rng.integers(1, 10))
    k = int(rng.integers(1, 4))
    speeds = rng.uniform(0.1, 5, k)
    best = np.inf
    for way in product(range(n + 1), repeat=k):
        if sum(way) == n:
            best = min(best, squares(way, n, speeds))
    assert squares(cut(n, speeds), n, speeds) <= best + 1e-9, "a way is closer"
    if squares(shares_by_speed(n, speeds), n, speeds) > best + 1e-9:
        farther += 1
assert farther > 0, "rounding the ends isn't always closest"

# %% [markdown]
# So `shares_by_speed` is not always as close. MXNet's `Module`, the interface before Gluon, rounds
# each share, and the last device gets what is left over, or too little. Its function is still
# there:

# %% tags=["solution"]
from mxnet.executor_manager import _split_input_slice

by_module = [part.stop - part.start for part in _split_input_slice(10, [1, 1, 1, 1])]
print("Module:           ", by_module)
print("largest remainder:", cut(10, [1, 1, 1, 1]))
print("shares_by_speed:  ", shares_by_speed(10, [1, 1, 1, 1]))

# %% [markdown]
# ### Answer 2
#
# For a given number of devices the fastest are best, since only the sum of their speeds counts. So
# try the fastest one, the fastest two, and so on.

# %% tags=["solution"]
from itertools import combinations


def time_of_team(n, team, cost):
    return n / sum(team) + cost * (len(team) - 1)


def who_trains(n, speeds, cost):
    fastest_first = sorted(speeds, reverse=True)
    best = fastest_first[:1]
    for k in range(2, len(speeds) + 1):
        team = fastest_first[:k]
        if time_of_team(n, team, cost) < time_of_team(n, best, cost):
            best = team
    return best


print(who_trains(256, [1600, 1600, 800, 100], cost=0.005))
assert who_trains(256, [1600, 1600, 800, 100], cost=0.005) == [1600, 1600, 800], "100 is left out"

# %% tags=["solution"]
for _ in range(200):
    speeds = rng.uniform(50, 2000, 5).tolist()
    cost = 10 ** rng.uniform(-4, -1)
    shortest = np.inf
    for k in range(1, 6):
        for team in combinations(speeds, k):
            shortest = min(shortest, time_of_team(256, team, cost))
    ours = time_of_team(256, who_trains(256, speeds, cost), cost)
    assert np.isclose(ours, shortest), "a subset is faster"

# %% [markdown]
# ### Answer 3
#
# Shares stop changing when every device that still has images takes equally long. A device whose
# fixed cost alone exceeds the other's time for the whole batch can't get there: its share goes to
# zero. Two devices that compute 1,600 images a second, the second with 60 ms of fixed cost:

# %% tags=["solution"]
def follow(fixed, whole_images, steps=400):
    fixed = np.array(fixed)
    sizes = np.array([128.0, 128.0])
    for _ in range(steps):
        seconds = fixed + sizes / 1600
        speeds = sizes / seconds
        if whole_images:
            sizes = np.array(shares_by_speed(256, speeds))
        else:
            sizes = 256 * speeds / speeds.sum()
    seconds = fixed + sizes / 1600
    return sizes, 1000 * (seconds.max() - seconds.min())


for fixed in [[0, 0.060], [1, 1.060]]:
    exact, exact_apart = follow(fixed, whole_images=False)
    rounded, rounded_apart = follow(fixed, whole_images=True)
    print(f"fixed costs {fixed} s: exact shares {exact.round(1)}; in whole images {rounded}, "
          f"with times {rounded_apart:.1f} ms apart")
    assert exact_apart < 1, "exact shares end at equal times"

# %% tags=["solution"]
# check: a device with too large a fixed cost ends without images; whole images can stop early
sizes, _ = follow([0, 0.3], whole_images=False)
assert sizes[1] < 1e-3, "0.3 s is more than 256 / 1600 s"
assert rounded_apart > 1000 * 5 / 1600, "more than five images' time apart"

# %% [markdown]
# With large fixed costs the next change is soon below half an image, and whole images stop there:
# keep exact shares from step to step, and round only to cut.
#
# A step ends with the all-reduce, in which all wait for each other. So the times of whole steps are
# equal, and the rule stays wherever it is. Measure each device by itself, before the all-reduce: a
# program that waits for one device, then the other, records at least the first's time for the
# second.

# %% tags=["solution"]
seconds = np.array([0, 0.060]) + np.array([100, 156]) / 1600  # far from balanced
step_seconds = seconds.max()
speeds = np.array([100, 156]) / step_seconds
assert shares_by_speed(256, speeds) == [100, 156], "it should stay where it is"
