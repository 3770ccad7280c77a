# %% [markdown]
# # Deeper · When a helper pays
#
# A helper, in chapter 12, is a slower device that shares the work of a fast one. By a law it pays
# as long as $h < \frac{b\,n}{c} - 1$. How well does the law do, on other batch sizes and handicaps
# than those that its constants come from?
#
# ## What you'll do
#
# Check that a device with handicap $h$ is $h$ times as slow. Fit the law's constants, and hold it
# against the clock for twelve slow helpers. Then apply it to a CPU beside a GPU.
#
# ## What you'll learn
#
# - from which shard size on a handicap is what its name says;
# - how far the law can be trusted, and what it leaves out;
# - what a CPU can bring to a GPU at most, and where MXNet makes sums and updates then.
#
# ## What you need
#
# Chapter 12, and two cores that have nothing else to do. No GPU and no data: random images will do,
# if the operators' time doesn't depend on the pictures, as we assume. Reading takes
# {reading time}, running about a minute.

# %%
from functools import partial

from helpers.networks import lenet
from helpers.timing import Others, in_turns, spread

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

pair = [mx.cpu(0), mx.cpu(1)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
images = nd.random.uniform(shape=(256, 1, 28, 28))
labels = nd.arange(256) % 10

# %% [markdown]
# The next cell has chapter 12's functions: `passes_of` gives each device its shard, each image
# repeated $h$ times, and `run_passes` works through them. A training step adds the update.

# %% tags=["fold", "trains"]
# measure: devices with a handicap, as in chapter 12
def split_by_sizes(batch, sizes):
    shards = []
    begin = 0
    for size, device in zip(sizes, pair):
        end = begin + size
        shards.append(batch[begin:end].as_in_context(device))
        begin = end
    return shards


def with_handicap(x, y, handicap):
    counts = nd.zeros((len(x), handicap), ctx=x.context)  # a row for each image
    counts[:, 0] = 1  # only its first time counts
    return x.repeat(handicap, axis=0), y.repeat(handicap, axis=0), counts.reshape(-1)


def passes_of(x, y, sizes, handicaps):
    """The pass of each device, for its shard and its handicap."""
    x_shards = split_by_sizes(x, sizes)
    y_shards = split_by_sizes(y, sizes)
    passes = []
    for x_shard, y_shard, handicap in zip(x_shards, y_shards, handicaps):
        passes.append(with_handicap(x_shard, y_shard, handicap))
    return passes


def run_passes(net, passes):
    sums = []
    with autograd.record():
        for x, y, counts in passes:
            losses = cross_entropy(net(x), y)
            sums.append((losses * counts).sum())
    autograd.backward(sums)
    return sums


def slowed_step(net, trainer, passes, n):
    run_passes(net, passes)
    trainer.step(n)


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

# %%
def lenet_with_trainer(devices):
    net = lenet()
    net.initialize(mx.init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, trainer


net, trainer = lenet_with_trainer(pair)
slowed_step(net, trainer, passes_of(images, labels, sizes=[192, 64], handicaps=[1, 3]), n=256)
nd.waitall()
print("a step on two devices, the second with handicap 3: done")

# %% [markdown]
# ## Is it h times as slow?
#
# We time one device, with handicaps 1, 2, 3 and 6, on 8, 32 and 128 images. **Predict:** for which
# of the three is a handicap of 6 least like six times the time?

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9
contestants = {}
net, _ = lenet_with_trainer(pair[:1])
for n in [8, 32, 128]:
    for h in [1, 2, 3, 6]:
        passes = passes_of(images[:n], labels[:n], [n], [h])
        contestants[n, h] = partial(run_passes, net, passes)
times = in_turns(contestants, ROUNDS)

for n, h in contestants:
    seconds = np.median(times[n, h])
    print(f"{n:3} images, handicap {h}: {seconds / np.median(times[n, 1]):4.2f} times as long; "
          f"{1e6 * seconds / (h * n):4.0f} µs for each of {h * n:3} images in the pass")

# %% [markdown]
# For 128 images it is, within a tenth on a quiet machine. For eight it is well below, and for 32
# in between. The last column shows why: a pass of 8 images takes longest *per image*, so it is a
# slow one to compare with. **In passes that are long enough a handicap is what its name says.**
#
# ## The law and its constants
#
# A step alone takes $a + b\,n$: a fixed part, and $b$ for each of $n$ images. With a helper, and
# shares by speed, it takes
#
# $$T_\text{both} = a + c + b\,n\,\frac{h}{h+1},$$
#
# where $c$ is what the helper costs. We measure three batch sizes, each alone and with helpers of
# handicap 1, 3, 7, 15 and 31. With these all shares are whole, so both devices finish at the same
# time.

# %%
SIZES = [64, 128, 256]
HANDICAPS = [1, 3, 7, 15, 31]
net_alone, trainer_alone = lenet_with_trainer(pair[:1])
net, trainer = lenet_with_trainer(pair)
steps = {}
for n in SIZES:
    x = images[:n]
    y = labels[:n]
    passes = passes_of(x, y, [n], [1])
    steps[n, "alone"] = partial(slowed_step, net_alone, trainer_alone, passes, n)
    for h in HANDICAPS:
        fast, slow = shares_by_speed(n, [h, 1])
        assert fast == h * slow, "both should take the same time"
        passes = passes_of(x, y, [fast, slow], [1, h])
        steps[n, h] = partial(slowed_step, net, trainer, passes, n)

# %% tags=["few:ROUNDS = 16=>ROUNDS = 4"]
ROUNDS = 16
with Others() as others:
    times = in_turns(steps, ROUNDS)
for n in SIZES:
    print(f"batch {n:3}: alone {1000 * np.median(times[n, 'alone']):.1f} ms, "
          f"with an equal helper {1000 * np.median(times[n, 1]):.1f} ms, "
          f"with handicap 31 {1000 * np.median(times[n, 31]):.1f} ms")

# %% [markdown]
# $a$ and $b$ are those of a line through the three times alone. $c$ comes from helpers of handicap
# 1, two *equal* devices: it is what their step takes longer than $a + \frac{b\,n}{2}$, the median
# of three.

# %%
alone = [np.median(times[n, "alone"]) for n in SIZES]
b, a = np.polyfit(SIZES, alone, 1)  # slope and height at 0
costs = []
for n in SIZES:
    costs.append(np.median(times[n, 1]) - (a + b * n / 2))
c = max(np.median(costs), 1e-6)  # noise could make it negative
print(f"b = {1e6 * b:.0f} µs an image, c = {1000 * c:.1f} ms")

# %% [markdown]
# ## The test
#
# The law hasn't seen the other handicaps. For each we divide the time alone by the time with the
# helper, round by round: that is the *gain*. We say that a helper *paid* if at least three
# quarters of its rounds have a gain above 1, and that it *did harm* if three quarters are below 1.
# The rest is too close to call.

# %% tags=["measured"]
gains = {}
for n in SIZES:
    limit = b * n / c - 1
    print(f"batch {n:3}: by the law a helper pays up to handicap {limit:.1f}")
    for h in HANDICAPS:
        gains[n, h] = spread(times[n, "alone"] / times[n, h])
        if gains[n, h].low > 1:
            verdict = "paid"
        elif gains[n, h].high < 1:
            verdict = "did harm"
        else:
            verdict = "too close to call"
        print(f"   handicap {h:2}: gain {gains[n, h].median:.2f}, {verdict}")

# %% tags=["fold", "measured"]
# measure: how many slower helpers paid, within the law's limit and beyond it
within = {"helpers": 0, "paid": 0}
beyond = {"helpers": 0, "paid": 0}
for (n, h), gain in gains.items():
    if h > 1:
        side = within if h < b * n / c - 1 else beyond
        side["helpers"] += 1
        side["paid"] += int(gain.low > 1)
print(f"of {within['helpers']} slower helpers within the limit {within['paid']} paid")
print(f"of {beyond['helpers']} slower helpers beyond the limit {beyond['paid']} paid")
for n, cost in zip(SIZES, costs):
    print(f"batch {n:3} by itself says that c = {1000 * cost:.1f} ms")
print(f"other programs took {others.share:.0%} of the machine")

# %% [markdown]
# How large should the gains be? We count whole images: of 128, a helper of handicap 16 is due 7.5.
# It gets 8, which takes it as long as 128 images take the fast device. So here is the law with
# whole images and the constants above. **Predict:** what does rounding do to its curve?

# %%
def law(n, h):
    fast, slow = shares_by_speed(n, [h, 1])
    slower = max(fast, h * slow)  # images' times until both are done
    return (a + b * n) / (a + c + b * slower)

# %% tags=["fold"]
# draw: gains against the handicap, by the law and by the clock
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

off = []
for n in SIZES:
    for h in HANDICAPS[1:]:
        off.append(abs(law(n, h) / gains[n, h].median - 1))
drawn = np.geomspace(1, 31, 300)
fig, ax = figure(f"With c from handicap 1, the law is up to {max(off):.0%} off at 3 to 31",
                 "handicap of the helper", "gain over the\nfast device alone")
for n, color, marker in zip(SIZES, [ORANGE, GREEN, BLUE], ["o", "s", "D"]):
    ax.plot(drawn, [law(n, h) for h in drawn], "-", color=color, lw=1)
    for h in HANDICAPS:
        low, median, high = gains[n, h]
        place = h * (n / 128) ** 0.06  # so that marks don't hide each other
        label = f"batch {n}" if h == 1 else None
        ax.errorbar(place, median, [[median - low], [high - median]], fmt=marker, color=color,
                    capsize=4, label=label)
ax.plot([], [], "-", color=GREY, lw=1, label="law (lines)")
ax.plot(drawn, (drawn + 1) / (2 * drawn), ":", color=GREY, label="both on one core")
ax.axhline(1, color="black", lw=1)
ax.set(xscale="log", xticks=HANDICAPS, xticklabels=HANDICAPS)
ax.minorticks_off()
fig.legend(loc="outside lower center", ncols=5, fontsize=8)
show(fig, alt="Gain by a helper for five handicaps and three batch sizes, measured, with the "
              "middle half of the rounds. Solid, jagged lines show the law, and a dotted one below "
              "1 what two devices on one core would reach.")

# %% [markdown]
# At each jump of a line, rounding takes one image from the helper. In our quiet runs most helpers
# within the limit paid, and hardly any beyond it. Near the limit the law's error can be as large as
# the gain: **there only the clock decides.**
#
# $c$ differed between batch sizes and between runs; we haven't measured how much of that is noise,
# nor what $c$ is made of. Candidates are the all-reduce, the second device's operators, two busy
# cores that compete, and the update, which the store makes when there are two devices.
#
# The dotted line is for one core. If another program keeps the other core to itself, two simulated
# devices share what is left, and their work adds up: $2\,n\,\frac{h}{h+1}$ images in place of $n$,
# so no helper pays.

# %% tags=["fold"]
# check: the law at its limit, its jump at 16 of 128, and two devices on one core
def no_rounding(n, h, a, b, c):
    return (a + b * n) / (a + c + b * n * h / (h + 1))


assert np.isclose(no_rounding(256, 0.25 * 256 / 4 - 1, a=2, b=0.25, c=4), 1), "at the limit: 1"
assert no_rounding(256, 10, a=2, b=0.25, c=4) > 1 > no_rounding(256, 20, a=2, b=0.25, c=4)
assert shares_by_speed(128, [16, 1]) == [120, 8] and 8 * 16 == 128
assert all(2 * h / (h + 1) >= 1 for h in HANDICAPS), "on one core no helper pays"

# %% [markdown]
# ## What the law leaves out
#
# - *BatchNorm* takes its statistics from the device's own shard (chapter 09). There the result does
#   depend on the cut, and a small shard's statistics are noisy.
# - *Memory:* a share has to fit.
# - *Speeds change*, for instance when another program starts. Then all wait for the device that is
#   late now (chapter 12, exercise 3).
# - *Whole images:* a device that is due less than one image may get none. Leave it out altogether.
#
# ## A CPU beside a GPU
#
# Gluon's `initialize` should take a list that mixes GPUs and CPUs, such as `[mx.gpu(0),
# mx.cpu(1)]`. That list would take the place of `pair`. Is it a good idea? The law needs two
# numbers: $h$, and $c$ as a share of $b\,n$, the GPU's own computing time. **Predict** for a GPU
# that is 10, 30 or 100 times as fast as the CPU: the gain if $c$ were zero, and the largest $c$
# that pays.

# %%
for h in [10, 30, 100]:
    largest_cost = 1 / (h + 1)  # as a share of b n: then the limit, b n / c - 1, is h
    print(f"GPU {h:3} times as fast: at most {1 / h:.0%} more; pays if c is below "
          f"{largest_cost:.1%} of b n; it gets {shares_by_speed(256, [h, 1])[1]} of 256 images")

# %% tags=["fold"]
# check: without cost the gain is 1 / h; at the largest cost none; rounding down is better at 100
for h in [10, 30, 100]:
    assert np.isclose(no_rounding(256, h, a=0, b=1, c=0), 1 + 1 / h)
    assert np.isclose(no_rounding(256, h, a=0, b=1, c=256 / (h + 1)), 1)
assert shares_by_speed(256, [100, 1]) == [253, 3]
assert max(253, 100 * 3) > 256 > max(254, 100 * 2), "3 images are too many, 2 are not"

# %% [markdown]
# Round down here: at $h = 100$ the CPU takes as long for 3 images as the GPU for 300.
#
# **On GPUs** we have run none of this. By `CommDevice` in `src/kvstore/comm.h` (1.9.1), each
# parameter crosses between one GPU and the host twice in a step: as a gradient to its owner, and as
# a sum or a weight back. That is in $c$, and the CPU also runs Python and the loader. So expect
# little. Two GPUs of different models are another matter: with $h$ between 1.5 and 3, up to 67 or
# 33 % more, if $c$ is small.
#
# Where are sums and updates made? By our reading of `InitMergeBuffer` there, the store looks only
# at a device's *number* when it chooses a place for a sum and, by default, for the update
# (`PushImpl` in `kvstore_local.h`). `gpu(0)` and `cpu(0)` count as one place, the one listed last.
# So with `[mx.cpu(0), mx.gpu(0)]` all sums and updates are made on the GPU, and in the opposite
# order all on the CPU. With `cpu(1)` the arrays are divided between the two by size, whatever
# their speeds. The results should agree up to rounding.
#
# The other way out is not to wait at all: with `dist_async` each worker updates when it is ready
# (deeper: The parameter server). Then the steps are no longer one device's.
#
# ## Summary
#
# - A handicap of $h$ makes a pass $h$ times as long if it isn't short.
# - With $c$ from two equal devices, the law tells most helpers that pay from those that don't, on a
#   quiet machine. Near its limit only the clock decides.
# - A CPU that is $h$ times slower than a GPU brings at most $1/h$ more, and only if $c$ is below
#   $\frac{1}{h+1}$ of the GPU's computing time.
#
# **Further reading.** *Dive into Deep Learning*'s first edition asks in "Gluon Implementation for
# Multi-GPU Computation" what a GPU and a CPU can do together.
