# %% [markdown]
# # 12 · Unequal devices
#
# So far all devices were alike, and equal shards were right. Now one device is slower: an old GPU
# beside a new one, or a CPU that is to help a GPU. *Dive into Deep Learning* asks in an exercise
# how to divide the work, and whether that is worth the complexity.
#
# ## What you'll do
#
# Train on shards of unequal size and prove that the result is one device's. Make a device slower by
# a factor that you choose, divide batches in proportion to speed, and find out by a formula and by
# the clock when a slow device helps.
#
# ## What you'll learn
#
# - why sums need no weights on unequal shards and means do, and how that mistake stays hidden;
# - what to do with a device that gets no data;
# - what equal and proportional shards cost when speeds differ;
# - up to which factor a slower helper pays, and what that formula leaves out.
#
# ## What you need
#
# Chapters 02, 03, 05, 06 and 10, and two cores. No GPU. Reading takes {reading time}, running about
# a minute.

# %% tags=["measured"]
from helpers import allreduce, load_data
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show
from helpers.timing import Others

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

data = load_data("mnist", limit=10_240)
four = [mx.cpu(r) for r in range(4)]
print(data)

# %% [markdown]
# All of it runs on simulated devices: four for proofs, the first two for clocks. The network is
# chapter 06's LeNet, from the same weights each time.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def lenet(devices, dtype="float32"):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    net.cast(dtype)
    mx.random.seed(11)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype=dtype))
    return net


# %% [markdown]
# ## Unequal shards, the same gradient
#
# Start with one that you can do in your head. Four images have the gradients 1, 2, 3 and 10. One
# device has the first three, the other has the last. **Predict:** what is the mean over all four,
# and what is the mean of the two devices' means?

# %%
shards = [np.array([1, 2, 3]), np.array([10])]
print("sum of sums / 4:", sum(shard.sum() for shard in shards) / 4)
print("mean of means:  ", np.mean([shard.mean() for shard in shards]))

# %% [markdown]
# The batch's gradient is 4. In a mean of $k$ means, each image of a shard with $n_i$ images has
# weight $\frac{1}{k\,n_i}$; the right weight is $\frac 1n$. So the 10 counts three times as much as
# each of the others. There are two right ways:
#
# - *Sums:* each device sums over its shard, the all-reduce adds the sums, and one division by $n$
#   follows. It doesn't matter who summed which. Gluon's `step(n)` does this.
# - *Weighted means:* each device takes its mean $\bar g_i$, and the result is
#   $\sum_i \frac{n_i}{n}\,\bar g_i$.
#
# PyTorch's losses take means by default, and its `DistributedDataParallel` averages over processes,
# without weights (chapter 14). There the loss of a shard needs the factor $k\,n_i / n$ if it is a
# mean, or $k / n$ if it is a sum. We write both of the right ways and compare them with one device.
#
# `load` cuts a batch at the sizes it is given. A size of 0 makes no shard: chapter 02 showed that
# an empty array can't be copied to another device.

# %%
def load(batch, sizes, devices):
    ends = np.cumsum([0, *sizes]).tolist()
    return [batch[a:b].as_in_context(d) if a < b else None
            for a, b, d in zip(ends, ends[1:], devices)]


# %% [markdown]
# A device without a shard still holds the gradient of an earlier step, and the all-reduce would add
# it again (chapters 02 and 05). So we give it a loss whose gradient is zero. The backward pass then
# writes fresh zeros, and Trainer sees nothing stale.

# %%
def backward(net, xs, ys, loss_of):
    with autograd.record():
        losses = []
        for r, (x, y) in enumerate(zip(xs, ys)):
            if x is None:
                losses += [(p.data(four[r]) * 0).sum() for p in net.collect_params().values()
                           if p.grad_req != "null"]
            else:
                losses.append(loss_of(softmax(net(x), y)))
    autograd.backward(losses)


# %% [markdown]
# The first way, with sums:

# %% tags=["trains"]
def step_of_sums(net, trainer, x, y, sizes, batch_size=None):
    backward(net, load(x, sizes, four), load(y, sizes, four), lambda loss: loss.sum())
    trainer.step(batch_size or sum(sizes))


# %% [markdown]
# The second, with means. Here the all-reduce is chapter 03's, and each device updates its own
# replica, so nothing but `average` decides what the replicas get.

# %%
def average(gradients, sizes):
    for gradient, n in zip(gradients, sizes):
        gradient *= n / sum(sizes)  # in place
    allreduce(gradients)


def step_of_means(net, trainer, x, y, sizes, average=average):
    backward(net, load(x, sizes, four), load(y, sizes, four), lambda loss: loss.mean())
    for p in net.collect_params().values():
        average(p.list_grad(), sizes)
    trainer.update(1)


# %% [markdown]
# The oracle is plain Gluon on one device: three steps in float64, the last of a smaller batch.
# (Batch sizes are powers of two, since the update gets $1/n$ in float32.) The other trainings make
# the same steps on shards that change each time; in the last step the third device gets nothing.

# %% tags=["trains"]
batches = [(nd.array(data.train_images[a:b], dtype="float64"),
            nd.array(data.train_labels[a:b])) for a, b in ((0, 64), (64, 128), (128, 160))]
net = lenet(four[:1], "float64")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
truths = []  # the weights after each step
for x, y in batches:
    with autograd.record():
        loss = softmax(net(x), y)
    loss.backward()
    trainer.step(len(x))
    truths.append([p.data().asnumpy() for p in net.collect_params().values()])

# %%
CUTS = [40, 16, 8], [8, 40, 16], [20, 12, 0]


def apart(step, cuts=CUTS, on_store=None):
    """The largest distance of any replica's weight from one device's, over the largest weight."""
    net = lenet(four[: len(cuts[0])], "float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2},
                            update_on_kvstore=on_store)
    for (x, y), sizes in zip(batches, cuts):
        step(net, trainer, x, y, sizes)
    return np.max([np.abs(w.asnumpy() - whole).max() / np.abs(whole).max()  # max() can drop a NaN
                   for p, whole in zip(net.collect_params().values(), truths[len(cuts) - 1])
                   for w in p.list_data()])


# %% [markdown]
# **Predict:** if the shards differ from step to step, does anything need another value: learning
# rate, batch size?

# %%
rng = np.random.default_rng(5)
some = [[rng.multinomial(len(x), [1 / k] * k).tolist() for x, _ in batches] for k in (1, 2, 4)]
for cuts in (CUTS, ([0, 40, 24], [40, 0, 24], [0, 0, 32]), *some):
    assert apart(step_of_sums, cuts) <= 1e-12, f"sums, cut {cuts}"
    assert apart(step_of_means, cuts, on_store=False) <= 1e-12, f"weighted means, cut {cuts}"
print("both ways, on 1 to 4 devices, with other shards at each step: one device's weights")

# %% [markdown]
# Nothing does. For this network a cut is a matter of speed alone, and you may change it in the
# middle of training. (BatchNorm is an exception, see below.)
#
# ### Would the check notice?
#
# A check is worth as much as the mistakes that it catches. Five wrong versions of `average`:

# %%
def mean_of_means(gradients, sizes):
    for gradient in gradients:
        gradient /= len(gradients)
    allreduce(gradients)


def averaged_again(gradients, sizes):  # right weights, then 1/k once more
    average(gradients, sizes)
    for gradient in gradients:
        gradient /= len(gradients)


def rebinding(gradients, sizes):  # Trainer now reads these; autograd still writes into the old
    total = sum(g.as_in_context(four[0]) * (n / sum(sizes)) for g, n in zip(gradients, sizes))
    gradients[:] = [total.as_in_context(g.context) for g in gradients]


def two_only(gradients, sizes):  # the third device keeps its own
    average(gradients[:2], sizes)


def zero_by_zero(gradients, sizes):  # NaN on a device without data, after the all-reduce
    average(gradients, sizes)
    for gradient, n in zip(gradients, sizes):
        gradient *= n
        gradient /= n


# %% [markdown]
# And four wrong steps with sums: one divides by the largest shard, one always by 64 (our last batch
# has 32), one takes labels in another order than images, one leaves a device without data out of
# the backward pass.

# %% tags=["trains"]
def largest_shard(net, trainer, x, y, sizes):
    step_of_sums(net, trainer, x, y, sizes, batch_size=max(sizes))


def fixed_divisor(net, trainer, x, y, sizes):
    step_of_sums(net, trainer, x, y, sizes, batch_size=64)


def labels_elsewhere(net, trainer, x, y, sizes):
    step_of_sums(net, trainer, x, nd.concat(y[1:], y[:1], dim=0), sizes)


def left_out(net, trainer, x, y, sizes):
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(load(x, sizes, four), load(y, sizes, four))
                  if a is not None]
    autograd.backward(losses)
    trainer.step(sum(sizes))


# %%
wrong = {f.__name__: apart(lambda *a, f=f: step_of_means(*a, average=f), on_store=False)
         for f in (mean_of_means, averaged_again, rebinding, two_only, zero_by_zero)}
wrong |= {f.__name__: apart(f) for f in (largest_shard, fixed_divisor, labels_elsewhere, left_out)}
for name, far in wrong.items():
    assert not far <= 1e-3, f"{name} was not noticed: {far:.0e}"
one_step = apart(lambda *a: step_of_means(*a, average=rebinding), CUTS[:1], on_store=False)
assert one_step <= 1e-12, "after one step rebinding can't be noticed"
print("noticed:", ", ".join(wrong))

# %% [markdown]
# `left_out` raised no error: where the store updates, the default, Trainer adds the idle device's
# old gradient again (chapter 05). `rebinding` makes the first step right and then repeats that
# gradient: a check of one step passes it. **Predict:** which of the five averages would pass if
# all shards had the same size?

# %%
equal = [[len(x) // 4] * 4 for x, _ in batches]
passed = [f.__name__ for f in (mean_of_means, averaged_again, rebinding, two_only, zero_by_zero)
          if apart(lambda *a, f=f: step_of_means(*a, average=f), equal, on_store=False) <= 1e-12]
print("pass on equal shards:", *passed)
assert passed == ["mean_of_means", "zero_by_zero"]

# %% [markdown]
# On equal shards the mean of means *is* the mean, and no shard is empty. Code that will meet
# unequal shards must be tested on them. In training they turn up in an epoch's last batch, if its
# size isn't divisible by $k$.
#
# ### What a mean of means does to training
#
# If the images are dealt at random, a mean of means is unbiased. Draw four images from three kinds,
# with the gradients 0, 1 and 5, and look at all $3^4 = 81$ draws, three images on one device and
# one on the other:

# %%
from itertools import product

kinds = np.array([0, 1, 5])
draws = np.array(list(product(kinds, repeat=4)))  # [81, 4]
estimates = (draws[:, :3].mean(axis=1) + draws[:, 3]) / 2
print(f"mean {estimates.mean():.1f} of {kinds.mean():.1f}; variance that of a mean of "
      f"{kinds.var() / estimates.var():.1f} images, not of {kinds.var() / draws.mean(1).var():.1f}")

# %% [markdown]
# Right on average, but noisier: as noisy as a batch of 3. For images drawn independently it is
# worth $k^2 / \sum_i \frac{1}{n_i}$ images, since the variance of device $i$'s mean is in
# proportion to $1/n_i$. If a device's images depend on *which device it is*, say because the data
# are sorted, the mean is biased towards the small shard's images.

# %%
def worth(sizes):
    return len(sizes) ** 2 / sum(1 / n for n in sizes)


three = (draws[:, :2].mean(axis=1) + draws[:, 2] + draws[:, 3]) / 3  # on three devices
for sizes, found in (([3, 1], estimates), ([2, 1, 1], three)):
    assert np.isclose(worth(sizes), kinds.var() / found.var()), "the 81 draws agree"
for sizes in ([128, 128], [192, 64], [240, 16]):
    print(sizes, f"is worth a batch of {worth(sizes):.0f}")

# %% [markdown]
# ## A device made slower
#
# Our devices are alike, so we make one slow. A `time.sleep` in Python would delay the handing out
# of work, and keep no device busy. A device with **handicap** $h$ gets a pass of $hn$ images in
# place of $n$: its own shard, then some of the same images again, with weights of 1 and of 0 in the
# loss. (`SoftmaxCrossEntropyLoss` takes them as `sample_weight`.)

# %%
def padded(x, y, handicap):
    """Images, labels and weights for one pass of `handicap` times the shard."""
    assert x is not None, "a device without images: leave it out"
    rows = np.arange(round(handicap * len(x)))
    chosen = nd.array(rows % len(x), ctx=x.context)
    weights = nd.array((rows < len(x))[:, None], ctx=x.context, dtype=x.dtype)
    return x.take(chosen), y.take(chosen), weights


# %% [markdown]
# `compute` hands out the passes of all devices, forward and backward.

# %%
def compute(net, jobs):
    with autograd.record():
        losses = [softmax(net(x), y, weights) for x, y, weights in jobs]
    autograd.backward(losses)
    return losses


# %% [markdown]
# An image of weight 0 takes part in both passes and adds zero to each gradient. Is the gradient
# still the shard's own, and would we notice if the weights were forgotten?

# %%
proof = lenet(four[:1], "float64")


def gradients(*job):
    compute(proof, [job])
    return [p.grad().asnumpy() for p in proof.collect_params().values()]


x, y = (a[:10] for a in batches[0])
own = gradients(x, y, nd.ones((10, 1), dtype="float64"))
for h in (1.5, 3):
    more, their_labels, weights = padded(x, y, h)
    found = gradients(more, their_labels, weights)
    forgotten = gradients(more, their_labels, nd.ones_like(weights))
    assert len(more) == h * len(x)
    assert all(np.abs(f - g).max() <= 1e-12 * np.abs(g).max() for f, g in zip(found, own))
    assert all(np.abs(f - g).max() > 0.1 * np.abs(g).max() for f, g in zip(forgotten, own))
    print(f"handicap {h}: {len(more)} images in one pass, the gradient of {len(x)}")

# %% [markdown]
# Is it $h$ times as slow? We measure all cases in turns, drop the first round, and take medians.

# %%
import time


def in_turns(actions, rounds, repeats=1):
    """{name: ms of each round}; the first round is warm-up"""
    found = {name: [] for name in actions}
    for _ in range(rounds + 1):
        for name, action in actions.items():
            nd.waitall()
            begin = time.perf_counter()
            for _ in range(repeats):
                action()
            nd.waitall()
            found[name].append(1e3 * (time.perf_counter() - begin) / repeats)
    return {name: np.array(ms[1:]) for name, ms in found.items()}


# %% [markdown]
# `jobs` cuts a batch and makes each device's pass.

# %%
images, labels = nd.array(data.train_images[:256]), nd.array(data.train_labels[:256])


def jobs(x, y, sizes, handicaps):
    return [padded(*shard) for shard in zip(load(x, sizes, four), load(y, sizes, four), handicaps)]


# %% tags=["measured", "few: 7=> 3"]
net = lenet(four[:1])
cases = {(n, h): jobs(images[:n], labels[:n], [n], [h]) for n in (8, 32, 128) for h in (1, 2, 3, 6)}
times = in_turns({case: lambda job=job: compute(net, job) for case, job in cases.items()}, 7, 2)
ms = {case: np.median(found) for case, found in times.items()}
for n in (8, 32, 128):
    print(f"{n:3} images: {ms[n, 1]:5.1f} ms; handicaps 2, 3, 6 take",
          ", ".join(f"{ms[n, h] / ms[n, 1]:.2f}" for h in (2, 3, 6)), "times as long")

# %% [markdown]
# For 32 images and more it nearly is: within a tenth, on a quiet machine. For eight it is well
# below. Judged by the time per image of the larger batches, passes of 24 and 48 images are about
# right, and the pass of 8 is too slow. So the ratios are small because their denominator is large:
# the device is slower *per image*, in passes that are long enough.
#
# ## Shares in proportion to speed
#
# If device $i$ computes $v_i$ images a second, a shard of $n_i$ takes it $n_i / v_i$ seconds, and a
# step takes as long as the slowest device. If one of two devices is late, the other waits. Nobody
# waits if all $n_i / v_i$ are equal, so $n_i = n\, v_i / \sum_j v_j$, and images per second are
#
# $$\text{equal shards: } k \min_j v_j, \qquad \text{in proportion: } \sum_j v_j.$$
#
# Images are whole. Chapter 02's third exercise rounded the *cuts*, the running totals of the
# shares. Then the sizes add up to $n$, and none is more than one image off; exercise 1 does better.

# %%
def share(n, speeds):
    return np.diff(np.rint(n * np.cumsum([0, *speeds]) / np.sum(speeds)).astype(int)).tolist()


for _ in range(1000):
    speeds = rng.uniform(0.1, 9, rng.integers(1, 9))
    off = np.array(share(256, speeds)) - 256 * speeds / speeds.sum()
    assert abs(off.sum()) < 1e-9 and np.abs(off).max() <= 1 + 1e-9, f"shares for {speeds}"
print(share(256, [3, 1]), share(256, [1, 1]), share(100, [2, 3, 4]), share(10, [1, 1, 1, 1]))

# %% [markdown]
# **Predict:** from which handicap on is the second device of no use, if shards are equal?

# %%
for h in (1, 1.5, 2, 3, 6, 30):
    print(f"handicap {h:3}: equal shards {2 / h:.2f} times the fast device alone, "
          f"in proportion {1 + 1 / h:.2f}")

# %% [markdown]
# From 2 on. By these formulas, proportional shares never do harm, but what they add goes to zero.
#
# ### Training
#
# We measure the speeds of both devices, each alone, the second with a handicap of 3. Measure yours
# with your own network, and with shards of about the size that you will use.

# %% tags=["measured"]
net, two = lenet(four[:2]), four[:2]
passes = {h: [tuple(a.as_in_context(d) for a in padded(images[:128], labels[:128], h))]
          for h, d in zip((1, 3), two)}
times = in_turns({h: lambda job=job: compute(net, job) for h, job in passes.items()}, 6, 2)
speeds = [128e3 / np.median(times[h]) for h in (1, 3)]
ratio = speeds[0] / speeds[1]
print(f"{speeds[0]:,.0f} and {speeds[1]:,.0f} images/s, {ratio:.2f} to 1")

# %% tags=["measured"]
if not 2.7 < ratio < 3.3:
    print("this is more than a tenth off the handicap: better measure again")
sizes = share(256, speeds)
print(f"so a batch of 256 is cut {sizes}")

# %% [markdown]
# Then we train in three ways, with the same batches and the same start. The shards are on their
# devices before the clock starts.

# %% tags=["trains", "few:steps=40=>steps=12"]
def train(sizes, handicaps, steps=40):
    net = lenet(four[: len(sizes)])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    work, losses, clock = [], [], []
    for t in range(steps):
        rows = np.arange(256 * t, 256 * (t + 1)) % len(data.train_labels)
        x, y = nd.array(data.train_images[rows]), nd.array(data.train_labels[rows])
        work.append(jobs(x, y, sizes, handicaps))
    nd.waitall()
    begin = time.perf_counter()
    for passes in work:
        parts = compute(net, passes)
        trainer.step(256)
        nd.waitall()
        clock.append(time.perf_counter() - begin)
        losses.append(sum(part.asnumpy().sum() for part in parts) / 256)  # the others weigh 0
    return np.array(losses), np.array(clock)


# %% tags=["measured", "trains", "few:40 * 256=>12 * 256"]
WAYS = {"fast device alone": ([256], [1]), "equal shards": ([128, 128], [1, 3]),
        "in proportion": (sizes, [1, 3])}
expected = speeds[0], 2 * min(speeds), sum(speeds)
for way in WAYS.values():
    train(*way, steps=2)
with Others() as others:
    runs = {name: train(*way) for name, way in WAYS.items()}
for (name, (losses, clock)), images_s in zip(runs.items(), expected):
    print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}; {40 * 256 / clock[-1]:,.0f} images/s,"
          f" predicted {images_s:,.0f}")
far = np.max([np.abs(losses - runs["fast device alone"][0]) for losses, _ in runs.values()])
assert far < 0.01, "three ways to cut the same batches must train alike"
print(f"losses at most {far:.1e} apart; other programs took {others.share:.0%} of the machine")

# %% [markdown]
# The losses stay that close for all 40 steps. What differs is when each is done:

# %% tags=["measured"]
totals = [clock[-1] for _, clock in runs.values()]
fig, ax = figure("40 steps take {:.1f} s alone, {:.1f} s on equal shards, {:.1f} s in proportion"
                 .format(*totals), "s since the start", "loss of the batch")
looks = (GREY, "-"), (ORANGE, ":"), (BLUE, "--")
for (name, (losses, clock)), (color, line) in zip(runs.items(), looks):
    ax.plot(clock, losses, line, color=color, lw=2, label=name)
fig.legend(loc="outside lower center", ncols=3, fontsize=8)
show(fig, alt="Loss against time for three ways to train. The curves have the same shape; "
     "how far each is stretched is its time, which the title gives.")

# %% [markdown]
# In our quiet runs equal shards were slower than the fast device by itself, and proportional ones
# faster, mostly by less than the third that the formula promised (each way timed once). It leaves
# out what a second device costs, and its speeds were measured with the other device idle.
#
# ## When does a slower device pay?
#
# The right comparison is with the fast device *alone*, which has no all-reduce and half of the
# operators to hand out. Let $a$ be a step's fixed cost, $b$ the time for an image on the fast
# device, and $c$ what the helper, as we call the slower device, costs extra in each step. In
# proportion, the fast device gets $n\,\frac{h}{h+1}$ images:
#
# $$T_{\text{alone}} = a + b\,n, \qquad T_{\text{both}} = a + c + b\,n\,\frac{h}{h+1}.$$
#
# The helper saves $\frac{b\,n}{h+1}$ and costs $c$, so it pays as long as
#
# $$h < \frac{b\,n}{c} - 1.$$
#
# The fixed cost $a$ is not in it, and a larger batch helps. **Predict** $h$ for $b\,n$ = 20 ms and
# $c$ = 4 ms.

# %%
def limit(b, c, n):
    return b * n / c - 1


def step_ms(n, h, a, b, c):
    return a + c + b * n * h / (h + 1)


assert np.isclose(step_ms(256, limit(0.25, 4, 256), 2, 0.25, 4), 2 + 0.25 * 256), "as alone"
print(f"up to {limit(20, 4, 1):.0f}")

# %% [markdown]
# Now the clock: three batch sizes, each on the fast device alone and with a helper of five
# handicaps. All shares are whole here, so both devices finish together.

# %% tags=["trains"]
def prepare(devices):
    net = lenet(devices)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})


def full_step(model, passes, n):
    net, trainer = model
    compute(net, passes)
    trainer.step(n)


SIZES, HANDICAPS = (64, 128, 256), (1, 3, 7, 15, 31)
alone, both = prepare(four[:1]), prepare(two)
steps = {}
for n in SIZES:
    whole = images[:n], labels[:n]
    passes = jobs(*whole, [n], [1])
    steps[n, 0] = lambda j=passes, n=n: full_step(alone, j, n)
    for h in HANDICAPS:
        fast, slow = share(n, [h, 1])
        assert fast == h * slow, "both should have the same time"
        passes = jobs(*whole, [fast, slow], [1, h])
        steps[n, h] = lambda j=passes, n=n: full_step(both, j, n)

# %% tags=["measured", "few: 16)=> 5)"]
with Others() as others:
    times = in_turns(steps, 16)
ms = {case: np.median(found) for case, found in times.items()}
b, a = np.polyfit(SIZES, [ms[n, 0] for n in SIZES], 1)  # a line through three medians
costs = [ms[n, 1] - (a + b * n / 2) for n in SIZES]  # from handicap 1 only
c = np.median(costs)
print(f"a = {a:.1f} ms, b = {1e3 * b:.0f} us an image; c = {c:.1f} ms, the median of",
      ", ".join(f"{cost:.1f}" for cost in costs))
print(f"other programs took {others.share:.0%} of the machine")

# %% [markdown]
# $a$ and $b$ come from one device, and $c$ from two *equal* devices. The other handicaps are the
# test: the law hasn't seen them.

# %% tags=["measured"]
gains = {(n, h): np.percentile(times[n, 0] / times[n, h], [25, 50, 75])
         for n in SIZES for h in HANDICAPS}
within, beyond = [], []  # which slower helpers paid?
for n in SIZES:
    pays = [h for h in HANDICAPS if gains[n, h][0] > 1]
    harms = [h for h in HANDICAPS if gains[n, h][2] < 1]
    for h in HANDICAPS[1:]:
        (within if h < limit(b, c, n) else beyond).append(h in pays)
    print(f"batch {n:3}: by the law h < {limit(b, c, n):.1f}; the helper paid at {pays}, "
          f"did harm at {harms}")
print(f"of {len(within)} slower helpers within the limit {sum(within)} paid, "
      f"of {len(beyond)} beyond it {sum(beyond)}")

# %% [markdown]
# "Paid" means that at least three quarters of the rounds were faster than alone, "did harm" that
# three quarters were slower; a handicap in neither list is too close to call. For the predicted
# gains we count whole images:

# %%
def law(n, h):
    fast, slow = share(n, [h, 1])
    return (a + b * n) / (a + c + b * max(fast, h * slow))


# %% [markdown]
# Of 128 images, a helper of handicap 16 is due 7.5 and gets 8, which takes it as long as 128 take
# the fast device. **Predict:** what does that do to the curve of the law? (Marks are medians, with
# the middle half of the rounds.)

# %% tags=["measured"]
off = [law(n, h) / gains[n, h][1] - 1 for n in SIZES for h in HANDICAPS[1:]]  # of the median
drawn = np.geomspace(1, 31, 300)
worst = max(map(abs, off))
fig, ax = figure(f"With c from handicap 1, the law is up to {worst:.0%} off at 3 to 31",
                 "handicap of the helper", "images/s over\nthe fast device alone")
for n, color, mark in zip(SIZES, (ORANGE, GREEN, BLUE), "osD"):
    low, middle, high = np.transpose([gains[n, h] for h in HANDICAPS])
    ax.plot(drawn, [law(n, h) for h in drawn], "-", color=color, lw=1)
    shifted = np.array(HANDICAPS) * (n / 128) ** 0.06  # so that marks don't hide each other
    ax.errorbar(shifted, middle, (middle - low, high - middle), fmt=mark, color=color, capsize=4,
                label=f"batch {n}")
ax.plot([], [], "-", color=GREY, lw=1, label="law (lines)")
ax.plot(drawn, (drawn + 1) / (2 * drawn), ":", color=GREY, label="both on one core")
ax.axhline(1, color="black", lw=1)
ax.set(xscale="log", xticks=HANDICAPS, xticklabels=HANDICAPS)
ax.minorticks_off()
fig.legend(loc="outside lower center", ncols=5, fontsize=8)
show(fig, alt="Throughput with a helper over that of the fast device alone, for five handicaps and "
     "three batch sizes, measured with the middle half. Solid, jagged curves show the law, and a "
     "dotted one below 1 what two devices on one core would reach.")

# %% [markdown]
# At each jump rounding takes one image from the helper. In our quiet runs most helpers within the
# limit paid, and hardly any beyond it. Near the limit the law's error can be as large as the gain:
# only the clock decides. $c$ differed between batch sizes and between runs; we haven't measured how
# much of that is noise. So measure it where you train. We haven't taken it apart. Candidates are
# all-reduce, the second device's operators, two busy cores competing, and the update, which the
# store makes when there are two devices.
#
# The dotted line is for one core. If a different program keeps the other to itself, two simulated
# devices share what is left, and their work adds up: $2\,n\,\frac{h}{h+1}$ images instead of $n$,
# so no helper pays.
#
# ### What the law leaves out
#
# - *BatchNorm* takes its statistics from the device's own shard (chapter 09), so there the result
#   does depend on the cut, and a small shard's statistics are noisy.
# - *Memory:* a share has to fit.
# - *Speeds change*, for instance when another program starts. Then all wait for the device that is
#   late now (exercise 3).
# - *Whole images:* a device that is due less than one image may get none from `share`. Leave it
#   out altogether.
#
# ## A CPU beside a GPU
#
# Gluon's `initialize` should take a list that mixes GPUs and CPUs, such as `[mx.gpu(0),
# mx.cpu(1)]`. In `backward` and the two steps that list takes the place of `four`. Is it a good
# idea? The law needs two numbers: $h$, and $c$ divided by $b\,n$. **Predict** for a GPU that is 10,
# 30 or 100 times as fast as the CPU: the gain over the GPU alone if $c$ were zero, and the largest
# $c$ that pays, as a share of $b\,n$, the GPU's own computing time.

# %%
for h in (10, 30, 100):
    assert np.isclose(limit(1, 1 / (h + 1), 1), h), "at this c the limit is h itself"
    best = min(range(257), key=lambda n, h=h: max(256 - n, h * n))
    print(f"GPU {h:3} times as fast: at most {1 / h:.0%} faster; pays if c is below "
          f"{1 / (h + 1):.1%}; of 256 images the CPU gets {best}, rounded {share(256, [h, 1])[1]}")

# %% [markdown]
# Round down here: at $h = 100$ the CPU takes as long for 3 images as the GPU for 300.
#
# **On GPUs:** we have run none of this. By `CommDevice` in `src/kvstore/comm.h` (1.9.1), each
# parameter crosses between one GPU and the host twice in a step: as a gradient to its owner, and as
# a sum or a weight back. That is in $c$, and the CPU also runs Python and the loader. So expect
# little. Two GPUs of different models are another matter: with $h$ between 1.5 and 3, up to 67 or
# 33 % more, if $c$ is small.
#
# By our reading of `InitMergeBuffer` there, the store looks only at a device's *number* when it
# chooses where to make a sum and, by default, the update (`PushImpl` in `kvstore_local.h`).
# `gpu(0)` and `cpu(0)` count as one place, the one listed last. So with `[mx.cpu(0), mx.gpu(0)]`
# all sums and updates are made on the GPU, in the opposite order all on the CPU. With `cpu(1)` the
# arrays are divided between the two by size, whatever their speeds. The results
# should agree up to rounding.
#
# Is the complexity worth it? The code is short; measuring speeds and testing gradients is the
# effort. In this order:
#
# 1. Compare with the fast device *alone*. If $1/h$ more isn't worth having, leave the slow one out.
# 2. Or give it work that nobody waits for: evaluation, preparing images, another experiment.
# 3. With speeds nearly equal, keep equal shards. At $h = 1.1$ they lose at most 5 %.
# 4. Else cut in proportion, keep sums, and assert the gradient.
#
# The other way out is not to wait at all: with `dist_async` each worker updates when it is ready
# (chapter 15). Then the steps are no longer one device's.
#
# ## Summary
#
# - Sums, divided once by $n$, are right for every cut. Means need the weights $n_i / n$. On equal
#   shards nobody notices that the weights are missing.
# - A device without data needs its old gradient set to zero, or the default Trainer adds it again.
# - With speeds $v_i$, equal shards give at most $k \min v$, proportional ones at most $\sum v$.
# - By our law, a helper that is $h$ times slower pays while $h < b\,n / c - 1$. In our quiet runs
#   most within that limit paid, and hardly any beyond. Compare with the fast device alone, not with
#   equal shards.
#
# Next, chapter 13: the same in PyTorch.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs",
# exercise 2, and "Gluon Implementation for Multi-GPU Computation" in its first edition.

# %% [markdown]
# ## Exercises
#
# 1. **The closest whole shares.** Write `cut(n, speeds)` by the method of the *largest remainder*:
#    round each exact share down, then give one image each to the devices that lost most, the lower
#    number first if two lost the same. Show by trying all ways, for small $n$, that none is closer
#    to the exact shares in the sum of squares. Is `share` as close?
# 2. **Whom to leave out.** Each device beyond the first adds $c$ seconds to a step. Given $n$, the
#    speeds, $c$, and shares in proportion to speed, which devices should train? Check your function
#    against all subsets.
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
    lost = np.argsort(sizes - exact, kind="stable")  # the largest remainder first
    sizes[lost[: n - sizes.sum()]] += 1
    return sizes.tolist()


def squares(ways, n, speeds):
    return ((np.array(ways) - n * np.array(speeds) / np.sum(speeds)) ** 2).sum(axis=-1)


# %% tags=["solution"]
assert cut(256, [3, 1]) == [192, 64] and cut(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
farther = 0
for _ in range(500):
    n, k = rng.integers(1, 10), rng.integers(1, 4)
    speeds = rng.uniform(0.1, 5, k)
    ways = [way for way in product(range(n + 1), repeat=k) if sum(way) == n]
    best = squares(ways, n, speeds).min()
    assert squares(cut(n, speeds), n, speeds) <= best + 1e-9, "no way is closer"
    farther += squares(share(n, speeds), n, speeds) > best + 1e-9
assert farther > 0, "rounding the cuts isn't always closest"

# %% [markdown]
# MXNet's `Module`, the interface before Gluon, rounds each share, and the last device gets what is
# left over, or too little. Its function is still there:

# %% tags=["solution"]
from mxnet.executor_manager import _split_input_slice

print("Module:", [part.stop - part.start for part in _split_input_slice(10, [1, 1, 1, 1])],
      " largest remainder:", cut(10, [1, 1, 1, 1]), " share:", share(10, [1, 1, 1, 1]))

# %% [markdown]
# ### Answer 2
#
# For a given number of devices the fastest are best, since only the sum of their speeds counts. So
# try the fastest one, the fastest two, and so on.

# %% tags=["solution"]
from itertools import combinations


def step_time(n, chosen, cost):
    return n / sum(chosen) + cost * (len(chosen) - 1)


def who_trains(n, speeds, cost):
    ranked = sorted(speeds, reverse=True)
    return min((ranked[:k] for k in range(1, len(ranked) + 1)),
               key=lambda chosen: step_time(n, chosen, cost))


# %% tags=["solution"]
assert who_trains(256, [1600, 1600, 800, 100], 0.005) == [1600, 1600, 800], "100 is left out"
for _ in range(200):
    some, cost = rng.uniform(50, 2000, 5).tolist(), 10 ** rng.uniform(-4, -1)
    subsets = [s for k in range(1, 6) for s in combinations(some, k)]
    assert np.isclose(min(step_time(256, s, cost) for s in subsets),
                      step_time(256, who_trains(256, some, cost), cost)), "no subset is faster"

# %% [markdown]
# ### Answer 3
#
# Shares stop changing when every device that still has images takes equally long. A device whose
# fixed cost alone exceeds the other's time for the whole batch can't get there: its share goes to
# zero. Two devices that compute 1,600 images a
# second, the second with 60 ms of fixed cost:

# %% tags=["solution"]
def follow(fixed, exact, steps=400):
    sizes = np.array([128, 128])
    for _ in range(steps):
        times = fixed + sizes / 1600
        speeds = sizes / times
        sizes = 256 * speeds / speeds.sum() if exact else np.array(share(256, speeds))
    return sizes, np.ptp(fixed + sizes / 1600)  # and how far apart the times end


for fixed in ([0, 0.060], [1, 1.060]):
    (exact, none), (whole, gap) = (follow(np.array(fixed), each) for each in (True, False))
    assert none < 1e-3, "exact shares end at equal times"
    print(f"{fixed}: {exact.round(1)}; in whole images {whole}, times {1e3 * gap:.1f} ms apart")
assert follow(np.array([0, 0.3]), True)[0][1] < 1e-3, "0.3 s is more than 256 / 1600 s"
assert gap > 5 / 1600, "whole images can stop it early"

# %% [markdown]
# With large fixed costs the next change is soon below half an image, and whole images stop there:
# keep exact shares from step to step, and round only to cut.
#
# A step ends with the all-reduce, in which all wait for each other. So the times of whole steps are
# equal, and the rule stays wherever it is. Measure each device by itself, before the all-reduce: a
# program that waits for one device, then the other, records at least the first's time for the
# second.

# %% tags=["solution"]
waited = np.full(2, max(np.array([0, 0.060]) + np.array([100, 156]) / 1600))
assert share(256, np.array([100, 156]) / waited) == [100, 156], "far from balanced, and it stays"
