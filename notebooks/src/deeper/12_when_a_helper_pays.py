# %% [markdown]
# # Deeper · When a helper pays
#
# A helper, in chapter 12, is a slower device that shares the work of a fast one. A law says up to
# which handicap it pays. Its constants come from one handicap. How well does it predict the others?
#
# > **What you'll do:** check that a device with handicap $h$ is $h$ times as slow. Fit the law's
# > constants, and test it by the clock for twelve slower helpers. Then apply it to a CPU beside a
# > GPU.
# >
# > **What you'll learn:** how long a pass must be for a handicap to be true to its number; how far
# > the law can be trusted, and what it leaves out; what a CPU can bring to a GPU at most.
# >
# > **What you need:** chapter 12, and two cores that have nothing else to do. No GPU and no data:
# > we assume that random images take as long as others. Reading takes {reading time}, running about
# > a minute.

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
# The folded cell has chapter 12's functions. A device's *pass* is what it works through in a step:
# its shard, with each image repeated $h$ times. `passes_of` makes the passes of all devices,
# `run_passes` does forward and backward, `slowed_step` is a training step with them, and
# `shares_by_speed` cuts a batch by speeds.

# %% tags=["fold", "trains"]
# define: passes_of, run_passes, slowed_step and shares_by_speed, as in chapter 12
def split_by_sizes(batch, sizes):
    shards = []
    begin = 0
    for size, device in zip(sizes, pair):
        end = begin + size
        shards.append(batch[begin:end].as_in_context(device))
        begin = end
    return shards


def with_handicap(x, y, handicap):
    x_repeated = x.repeat(handicap, axis=0)
    y_repeated = y.repeat(handicap, axis=0)
    counts = nd.zeros(len(x_repeated), ctx=x.context)
    counts[::handicap] = 1  # the first time of each image
    return x_repeated, y_repeated, counts


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
passes = passes_of(images, labels, sizes=[192, 64], handicaps=[1, 3])
slowed_step(net, trainer, passes, n=256)
nd.waitall()
print("images in each pass:", [len(x) for x, _, _ in passes])
assert [len(x) for x, _, _ in passes] == [192, 3 * 64]

# %% [markdown]
# ## Is it h times as slow?
#
# We time one device, with handicaps 1 and 6, on 8, 32 and 128 images. **Predict:** for which of the
# three is a handicap of 6 least like six times the time? (`Others` measures what other programs
# take of the machine meanwhile.)

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9
contestants = {}
net, _ = lenet_with_trainer(pair[:1])
for n in [8, 32, 128]:
    for h in [1, 6]:
        passes = passes_of(images[:n], labels[:n], sizes=[n], handicaps=[h])
        contestants[n, h] = partial(run_passes, net, passes)
with Others() as others:
    times = in_turns(contestants, ROUNDS)

times_as_long = {}
for n in [8, 32, 128]:
    without = np.median(times[n, 1])
    with_6 = np.median(times[n, 6])
    times_as_long[n] = with_6 / without
    print(f"{n:3} images: handicap 6 takes {times_as_long[n]:.2f} times as long")
    print(f"    a pass of {n:3} images:  {1e6 * without / n:4.0f} µs for each")
    print(f"    a pass of {6 * n:3} images:  {1e6 * with_6 / (6 * n):4.0f} µs for each")

# %% tags=["fold"]
# check: a handicap of 6 makes passes of 32 and 128 images 5 to 6 times as long, and of 8 less
if ROUNDS == 9 and others.share <= 0.05:  # enough rounds on a quiet machine
    assert 4.5 < times_as_long[32] < 6.5 and 4.5 < times_as_long[128] < 6.5
    assert times_as_long[8] < min(times_as_long[32], times_as_long[128])

# %% [markdown]
# On a quiet machine 32 and 128 images take about 5 to 6 times as long with handicap 6, and 8 images
# clearly less. The time for each image says why: it is longest in a pass of 8, so what we
# compare with is slow. From some dozens of images on it changes much less. **A handicap of $h$
# makes a pass nearly $h$ times as long only if the pass without it has some dozens of images.**
#
# ## The law and its constants
#
# A step alone takes $T_\text{alone} = a + b\,n$: a fixed part, and $b$ for each of $n$ images. Of
# two devices, where the helper's handicap is $h$, the fast one gets $\frac{h}{h+1}$ of the images,
# and both are done at the same time:
#
# $$T_\text{both} = a + c + b\,n\,\frac{h}{h+1},$$
#
# where $c$ is what it costs to have a helper at all. The helper takes over $\frac{1}{h+1}$ of the
# images, and pays as long as $c$ is less than their time: $c < \frac{b\,n}{h+1}$, or
#
# $$h < \frac{b\,n}{c} - 1.$$
#
# The right side is the *limit*: it grows with the batch, and falls with the cost. We measure three
# batch sizes, each alone and with helpers of handicap 1, 3, 7, 15 and 31. With these all shares are
# whole. (The smallest is 2 images, but with handicap 31 its pass has 62, as many as the other's.)

# %%
SIZES = [64, 128, 256]
HANDICAPS = [1, 3, 7, 15, 31]
net_alone, trainer_alone = lenet_with_trainer(pair[:1])
net_both, trainer_both = lenet_with_trainer(pair)
steps = {}  # by batch size, and "alone" or the helper's handicap
for n in SIZES:
    x = images[:n]
    y = labels[:n]
    passes = passes_of(x, y, sizes=[n], handicaps=[1])
    steps[n, "alone"] = partial(slowed_step, net_alone, trainer_alone, passes, n)
    for h in HANDICAPS:
        fast, slow = shares_by_speed(n, speeds=[h, 1])
        assert fast == h * slow, "both passes should have as many images"
        passes = passes_of(x, y, sizes=[fast, slow], handicaps=[1, h])
        steps[n, h] = partial(slowed_step, net_both, trainer_both, passes, n)

# %% tags=["few:ROUNDS = 16=>ROUNDS = 4"]
ROUNDS = 16
with Others() as others:
    times = in_turns(steps, ROUNDS)
for n in SIZES:
    print(f"batch {n:3}: alone {1000 * np.median(times[n, 'alone']):.1f} ms, "
          f"with an equal helper {1000 * np.median(times[n, 1]):.1f} ms, "
          f"with handicap 31 {1000 * np.median(times[n, 31]):.1f} ms")

# %% [markdown]
# A line through the three times alone has the height $a$ and the slope $b$. $c$ comes from helpers
# of handicap 1 only, that is from two equal devices: how much longer does their step take than $a +
# \frac{b\,n}{2}$? Of the three batches' answers we take the median.

# %%
def constants_of(times):
    alone = [np.median(times[n, "alone"]) for n in SIZES]
    slope, height = np.polyfit(SIZES, alone, 1)  # of the line
    b = slope
    a = max(height, 0)  # noise could make it negative
    costs = []  # what each batch by itself says of c
    for n in SIZES:
        costs.append(np.median(times[n, 1]) - (a + b * n / 2))
    return a, b, costs


a, b, costs = constants_of(times)
for n, cost in zip(SIZES, costs):
    print(f"batch {n:3} by itself says that c = {1000 * cost:.1f} ms")
c = max(np.median(costs), 1e-6)  # above 0: we shall divide by it
print(f"a = {1000 * a:.1f} ms, b = {1e6 * b:.0f} µs an image, c = {1000 * c:.1f} ms")

# %% [markdown]
# ## The test
#
# Does the law tell which helpers pay? It hasn't seen handicaps above 1. The *gain* is the time
# alone, divided by the time with the helper. The law says what it should be:

# %%
def law(n, h):
    alone = a + b * n
    both = a + c + b * n * h / (h + 1)
    return alone / both

# %% [markdown]
# We measure it round by round. `spread` gives its median, and the quarters `low` and `high` between
# which half of the rounds lie. We say that a helper *paid* if even `low` is above 1, and that it
# *did harm* if even `high` is below 1. The rest is too close to call. **Predict:** how many of the
# twelve helpers with handicaps above 1 will be too close to call?

# %% tags=["measured"]
def verdict_on(gain):
    if gain.low > 1:
        return "paid"
    if gain.high < 1:
        return "did harm"
    return "too close to call"


gains = {}
for n in SIZES:
    limit = b * n / c - 1
    print(f"batch {n:3}: by the law a helper pays up to handicap {limit:.1f}")
    for h in HANDICAPS:
        gain = spread(times[n, "alone"] / times[n, h])
        print(f"   handicap {h:2}: by the law {law(n, h):.2f}, measured {gain.median:.2f} "
              f"({gain.low:.2f} to {gain.high:.2f}): {verdict_on(gain)}")
        gains[n, h] = gain

# %% tags=["fold", "measured"]
# measure: how many slower helpers paid, within the law's limit and beyond it; how exact the law is
within = {"paid": 0, "too close to call": 0, "did harm": 0}
beyond = {"paid": 0, "too close to call": 0, "did harm": 0}
for (n, h), gain in gains.items():
    if h > 1:
        side = within if h < b * n / c - 1 else beyond
        side[verdict_on(gain)] += 1
print("slower helpers within the limit:", within)
print("slower helpers beyond the limit:", beyond)
errors = {}
for (n, h), gain in gains.items():
    errors[n, h] = gain.median / law(n, h) - 1
above = sum(error > 0 for error in errors.values())
worst_n, worst_h = max(errors, key=lambda point: abs(errors[point]))
print(f"all fifteen: measured above the law {above} times; farthest from it at batch {worst_n}, "
      f"handicap {worst_h}: {law(worst_n, worst_h):.2f} by the law, "
      f"{gains[worst_n, worst_h].median:.2f} measured")
print(f"other programs took {others.share:.0%} of the machine")
if ROUNDS == 16 and others.share <= 0.05:  # enough rounds on a quiet machine
    assert sum(beyond.values()) > 0, "no helper lies beyond the limit"
    assert beyond["paid"] == 0, "a helper beyond the limit paid"
    assert gains[64, 31].high < 1 < gains[256, 3].low, "what a large batch bears harms a small one"

# %% tags=["fold"]
# draw: gains against the handicap, by the law and by the clock
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

limits = [b * n / c - 1 for n in SIZES]
drawn = np.geomspace(1, 31, 300)
smallest, middle, largest = limits
fig, ax = figure(f"By the law helpers pay up to handicap {smallest:.1f}, {middle:.1f}, "
                 f"{largest:.1f} at batch 64, 128, 256",
                 "handicap of the helper", "gain over the\nfast device alone")
for n, limit, color, marker in zip(SIZES, limits, [ORANGE, GREEN, BLUE], ["o", "s", "D"]):
    ax.plot(drawn, law(n, drawn), "-", color=color, lw=1)
    if 1 <= limit <= 31:
        ax.plot(limit, 1, "v", color="black", ms=6)
        ax.text(limit, 1.03, f"{limit:.1f}", ha="center", va="bottom", fontsize=9)
    for h in HANDICAPS:
        low, median, high = gains[n, h]
        place = h * (n / 128) ** 0.06  # so that marks don't hide each other
        label = f"batch {n}" if h == 1 else None
        ax.errorbar(place, median, [[median - low], [high - median]], fmt=marker, color=color,
                    capsize=4, label=label)
ax.plot([], [], "-", color=GREY, lw=1, label="law")
ax.plot([], [], "v", color="black", label="its limits")
ax.axhline(1, color="black", lw=1)
ax.set(xscale="log", xticks=HANDICAPS, xticklabels=HANDICAPS)
ax.minorticks_off()
fig.legend(loc="outside lower center", ncols=5, fontsize=8)
show(fig, alt="Gain by a helper for five handicaps and three batch sizes, measured, with the "
              "middle half of the rounds. Lines show the law; each crosses 1 at its limit, which "
              "is marked. The larger the batch, the higher the limit.")

# %% [markdown]
# Beyond the limit no helper paid in our quiet runs. Within it, helpers paid whose gain is clearly
# more than a tenth by the law. Of the others some paid, some did harm, and some were too close to
# call: there only the clock decides. **The larger the batch, the slower a helper may be.** The law
# isn't exact ("farthest", above). It has one $c$ for all batches, and each batch by itself says
# another.
#
# ($c$ differs between runs, too. We haven't measured how much of that is noise,
# nor what $c$ is made of. Candidates: the all-reduce, the second device's operators, the update,
# which is the store's where there are two devices, and two busy cores that compete. That last cost
# would grow with the pass, so a $c$ from $h = 1$ would be too small for slower helpers.)

# %% [markdown]
# ## What the law leaves out
#
# - *BatchNorm* takes its statistics from the device's own shard (chapter 09). There the result does
#   depend on the cut, and a small shard's statistics are noisy.
# - *Memory:* a share has to fit.
# - *Speeds change*, for instance when another program starts. Then all wait for the device that is
#   late now (chapter 12, exercise 3).
# - *Cores:* where two simulated devices have a single core, one pass runs after the other. Both
#   have as many images, so the step takes $\frac{2h}{h+1}$ times as long as alone: no helper pays.
# - *Whole images:* of 128, a helper of handicap 16 should get 7.5. It gets 8, and takes as long for
#   them as the fast device for 128. A helper whose share is below one image is better left out.

# %% tags=["fold"]
# check: the constants from made-up times; a gain of 1 at the limit; 8 of 128 images; one core
made_up = {}
for n in SIZES:
    made_up[n, "alone"] = [2 + 0.25 * n]
    made_up[n, 1] = [2 + 4 + 0.25 * n / 2]
found_a, found_b, found_costs = constants_of(made_up)
assert np.allclose([found_a, found_b, *found_costs], [2, 0.25, 4, 4, 4])


def no_rounding(n, h, a, b, c):
    return (a + b * n) / (a + c + b * n * h / (h + 1))


assert np.isclose(no_rounding(256, 0.25 * 256 / 4 - 1, a=2, b=0.25, c=4), 1), "at the limit: 1"
assert no_rounding(256, 10, a=2, b=0.25, c=4) > 1 > no_rounding(256, 20, a=2, b=0.25, c=4)
assert shares_by_speed(128, [16, 1]) == [120, 8] and 8 * 16 == 128
for h in HANDICAPS:
    fast, slow = shares_by_speed(128, [h, 1])
    on_one_core = fast + h * slow  # images, one pass after the other
    assert on_one_core == 2 * 128 * h / (h + 1) and on_one_core >= 128, "no helper pays"
assert np.isclose(law(64, 3), no_rounding(64, 3, a, b, c))

# %% [markdown]
# ## A CPU beside a GPU
#
# Is a CPU a good helper for a GPU? Gluon's `initialize` should take a list that mixes them, such as
# `[mx.cpu(0), mx.gpu(0)]`. The law needs two numbers: $h$, and $c$ as a share of $b\,n$, the GPU's
# own computing time. From the law above, with a small $a$:
#
# - If $c$ were zero, the gain would be $\frac{h+1}{h}$, that is $\frac1h$ more.
# - The helper pays only if $c$ is below $\frac{1}{h+1}$ of $b\,n$.
#
# **Predict** for a GPU 100 times as fast: how many of 256 images does the CPU get, and does it
# help?

# %%
for h in [10, 30, 100]:
    most_gained = 1 / h
    largest_cost = 1 / (h + 1)
    of_gpu, of_cpu = shares_by_speed(256, speeds=[h, 1])
    print(f"GPU {h:3} times as fast: at most {most_gained:.0%} more; pays if c is below "
          f"{largest_cost:.1%} of b n; the CPU gets {of_cpu} of 256 images")

# %% tags=["fold"]
# check: without cost 1 / h is gained; at the largest cost nothing; at 100 two images are better
for h in [10, 30, 100]:
    assert np.isclose(no_rounding(256, h, a=0, b=1, c=0), 1 + 1 / h)
    assert np.isclose(no_rounding(256, h, a=0, b=1, c=256 / (h + 1)), 1)
    assert no_rounding(256, h, a=1, b=1, c=0) <= 1.1, "a tenth at best"
assert shares_by_speed(256, [100, 1]) == [253, 3]
assert max(253, 100 * 3) > 256 > max(254, 100 * 2), "3 images are too many, 2 are not"

# %% [markdown]
# At $h = 100$ even 3 images are too many: the CPU takes as long for them as the GPU for 300.
# **Beside a GPU that is ten or more times as fast, a CPU brings a tenth at best.**
#
# **On GPUs** we have run none of this. In each step every gradient goes from one device to the
# other, and a sum or a weight comes back (`CommDevice` in `src/kvstore/comm.h`, 1.9.1). That is in
# $c$, and the CPU also runs Python and the loader. So expect little. Two GPUs of different models
# are another matter: with $h$ between 1.5 and 3, up to 67 or 33 % more, if $c$ is small.
#
# If you try it, list the CPU first. By our reading, `cpu(0)` and `gpu(0)` count as one place to the
# store, and sums are made on the one listed last (`InitMergeBuffer` in `comm.h`).
#
# ## Summary
#
# - A handicap of $h$ makes a pass nearly $h$ times as long if it has some dozens of images.
# - By the law, a helper pays up to a limit that grows with the batch and falls with its cost $c$.
#   With $c$ from two equal devices, no helper beyond the limit paid on a quiet machine, and those
#   within it did whose gain is clear by the law. For the others only the clock decides.
# - A CPU that is $h$ times slower than a GPU brings at most $1/h$ more, and only if $c$ is below
#   $\frac{1}{h+1}$ of the GPU's computing time.
#
# **Further reading.** *Dive into Deep Learning*'s first edition asks in "Gluon Implementation for
# Multi-GPU Computation" what a GPU and a CPU can do together.
