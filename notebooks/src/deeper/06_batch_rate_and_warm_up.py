# %% [markdown]
# # Deeper · Batch, rate and warm-up
#
# More devices often mean a larger batch. Which learning rate goes with it, and up to which batch
# does it pay?
#
# ![One device takes a batch of 32 images. Strong scaling: two devices take 16 each of the same 32.
# Weak scaling: two devices take 32 each, a batch of 64.](../src/drawings/two_scalings.svg)
#
# > **What you'll do:** compare stored trainings at two batches and two rates, see where a high rate
# > fails, and measure from the shards' gradients how large a batch is useful.
# >
# > **What you'll learn:** what twice the batch does at the same rate, and at twice the rate; when
# > warm-up helps; what the *critical batch size* is, and how devices can measure it.
# >
# > **What you need:** chapters 04 and 06. No GPU. Reading takes {reading time}, running half a
# > minute.

# %%
import json

import helpers
from helpers.networks import lenet
from helpers.plotting import BLUE, GREY, ORANGE, figure, show
from helpers.training import Batches, fit

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

# %% [markdown]
# *Strong scaling* keeps the batch, and each device gets $\frac1k$ of it. Except for rounding,
# Dropout (chapter 06) and BatchNorm (chapter 09) the training stays the same. *Weak scaling* keeps
# the shard. Then the batch grows with $k$, an epoch has fewer steps, and the training changes.
#
# *Devices*, *batch* and *rate* are three things. *The Straight Dope*'s page on two GPUs at first
# changed all three together, from one device, batch 64 and rate 0.3 to two, 128 and 0.6 (in
# September 2017; in October it kept the rate). We change one at a time.
#
# ## Twice the batch, twice the rate
#
# Chapter 04's LeNet was trained on two devices for three epochs of MNIST, with five seeds for each
# setting. `make reproduce` makes these runs, and this reads them:

# %%
def read_runs(name):
    with open(f"../src/results/{name}.json") as file:
        return json.load(file)["runs"]


runs = read_runs("lenet")


def percent_right(name, epoch):
    """Test accuracy after an epoch, in percent, one number a seed."""
    percent = []
    for run in runs[name]:
        result = run[epoch - 1]
        if "accuracies" in result:  # one for each replica; they are equal
            percent.append(100 * result["accuracies"][0])
        else:
            percent.append(100 * result["accuracy"])
    return np.array(percent)


base = "lenet-128-0.2"
print("batch 128, rate 0.2, after one epoch:", percent_right(base, 1).round(1))

# %% [markdown]
# Runs of one seed start from the same weights, so we compare seed by seed: a negative number is
# behind. Goyal et al. (2017) propose the **linear scaling rule**: if the batch grows, let the rate
# grow in proportion. **Predict:** after one epoch, is a run with twice the batch behind? Does twice
# the rate close the gap?

# %% tags=["predict"]
changes = {"twice the rate": "lenet-128-0.4",
           "twice the batch": "lenet-256-0.2",
           "both": "lenet-256-0.4"}
for epoch in [1, 3]:
    print(f"percentage points ahead of batch 128, rate 0.2 after epoch {epoch}, each seed")
    for change, name in changes.items():
        ahead = percent_right(name, epoch) - percent_right(base, epoch)
        print(f"    {change:16}", *(f"{points:6.2f}" for points in ahead))

# %% [markdown]
# <details><summary>What came out</summary>
#
# After one epoch twice the rate is ahead for each seed, and twice the batch is behind for each
# seed, since it made half as many steps. With both, four seeds are about even, as the rule says,
# and the fifth is 1.5 points behind. After three epochs all five are behind.
#
# </details>
#
# The rule takes one large step instead of two small ones, as if the gradient didn't change in
# between. At the beginning it changes fast (Goyal et al., section 2.2), and that can be seen
# in the first quarter of the epoch:

# %% tags=["fold"]
# draw: loss against images seen, median and range of five seeds
fig, ax = figure("Twice the batch at twice the rate begins behind, and catches up",
                 "images seen (thousands)", "loss, mean of 1,536 images (mnist)")
styles = {"lenet-128-0.2": ("-", BLUE), "lenet-256-0.2": ("--", ORANGE),
          "lenet-256-0.4": ("-.", GREY)}
for name, (style, color) in styles.items():
    losses = []
    for run in runs[name]:
        losses.append(run[0]["losses"][:39])
    losses = np.array(losses)  # [seed, point]
    seen = 1.536 * np.arange(1, 40)
    label = "batch {}, rate {}".format(*name.split("-")[1:])
    ax.plot(seen, np.median(losses, axis=0), style, color=color, label=label)
    ax.fill_between(seen, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.15, lw=0)
ax.set_yscale("log")
ax.legend(fontsize=8, title="median and range of five seeds", title_fontsize=8)
show(fig, alt="Loss against images seen in the first epoch for three combinations of batch and "
              "rate. Batch 256 at rate 0.4 begins above batch 128 at 0.2, and joins it.")

# %% [markdown]
# The rule is one of SGD. Adam divides each gradient by its usual size. For Adam one lets the rate
# grow with the *square root* of the batch (Malladi et al., 2022).
#
# ## Where a high rate fails
#
# What stops one from raising the rate further? We ran these settings of September 2017 for five
# epochs, with nine seeds each, and changed one thing at a time. With **warm-up** the rate rises to
# its value in equal steps, here over the first epoch. A Gluon `Trainer` takes it as
# `{"learning_rate": 0.6, "lr_scheduler": warm_up(0.6, steps)}`:

# %%
def warm_up(rate, steps):
    # `step` has to be given; with the default factor of 1 it changes nothing.
    return mx.lr_scheduler.FactorScheduler(step=10**9, base_lr=rate, warmup_steps=steps)


schedule = warm_up(0.6, steps=4)
for number in range(1, 7):
    print(f"step {number}: rate {schedule(number):.2f}")

# %% [markdown]
# **Predict:** two devices, batch 128, rate 0.6: do all nine runs learn? And with warm-up?

# %% tags=["predict"]
runs = read_runs("trainer")
for name in ["1x64", "2x64", "2x128-0.3", "2x128-0.6", "2x128-0.6-warm"]:
    ends = np.sort(percent_right(f"trainer-{name}", 5))
    print(f"{name:15}", *(f"{end:5.1f}" for end in ends))

# %% [markdown]
# <details><summary>What came out</summary>
#
# (`2x128-0.6` is two devices, batch 128, rate 0.6; the first two rows have rate 0.3.) Four of nine
# runs stay at chance at rate 0.6, with an accuracy of 10 or 11 %. With warm-up all nine learn,
# and end at 98.5 % or better. At rate 0.3 all learn, too, and one device and two end alike.
#
# </details>
#
# Four of nine against none of nine is a hint, and no proof. But it agrees with what others report:
# Goyal et al. needed warm-up for their largest batches.
#
# ## Up to which batch?
#
# A larger batch gives a better estimate of the gradient. Once the estimate is good, a still larger
# batch only repeats it. McCandlish et al. (2018) say where that is. The gradient of one image is
# the true gradient $G$ plus noise. Let $S$ be the noise's expected squared length. Then the
# gradient of a batch of $B$ images has the squared length $|G|^2 + S/B$ on average. The two parts
# are equal where $B = S / |G|^2$. This **noise scale** is about the **critical batch size**: far
# below it, twice the batch needs half as many steps; far above it, it needs as many as before.
#
# How can one measure $S$ and $|G|^2$? One needs the squared length at two batch sizes, and a
# training on several devices has both: before the all-reduce each device holds the gradient of its
# shard of $b$ images, and afterwards that of all $B$. Two equations, two unknowns:

# %%
def noise_and_signal(small, b, large, B):
    """S and |G|^2 from the mean squared lengths of gradients of b and of B images."""
    noise = (small - large) / (1 / b - 1 / B)
    signal = (B * large - b * small) / (B - b)
    return noise, signal


# If |G|^2 = 4 and S = 96: 4 + 96/8 = 16 with 8 images, 4 + 96/32 = 7 with 32.
print(noise_and_signal(small=16, b=8, large=7, B=32))

# %% [markdown]
# Now LeNet on four simulated devices with 32 images each. `squared_lengths` makes a backward
# pass and no update:

# %%
four = [mx.cpu(rank) for rank in range(4)]  # the lengths need no speed
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def squared_lengths(net, x, y):
    """Mean squared length of a shard's mean gradient, and that of the batch's."""
    x_shards = gluon.utils.split_and_load(x, four)
    y_shards = gluon.utils.split_and_load(y, four)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard).mean())
    autograd.backward(losses)

    of_devices = []
    for device in four:
        pieces = []
        for parameter in net.collect_params().values():
            pieces.append(parameter.grad(device).asnumpy().ravel())
        of_devices.append(np.concatenate(pieces))
    small = np.mean([np.sum(gradient**2) for gradient in of_devices])
    large = np.sum(np.mean(of_devices, axis=0) ** 2)
    return small, large

# %% [markdown]
# One batch would give a poor estimate, so we take the mean over all batches of the data, thirty
# with MNIST. **Predict:** will the noise scale grow or shrink while the network learns?

# %% tags=["predict", "measured", "trains"]
data = helpers.load_data("mnist", limit=3840)
mx.random.seed(0)
net = lenet()
net.initialize(mx.init.Xavier(), ctx=four)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
batches = [(x, y) for x, y in Batches(data.train_images, data.train_labels, 128) if len(x) == 128]
for epoch in range(6):
    lengths = []
    for x, y in batches:
        lengths.append(squared_lengths(net, nd.array(x), nd.array(y)))
    small, large = np.mean(lengths, axis=0)
    noise, signal = noise_and_signal(small, 32, large, 128)
    print(f"after {epoch * len(batches):3} steps: |G|^2 {signal:7.3f}   S {noise:7.1f}   "
          f"noise scale {noise / signal:6.0f} images")
    fit(net, trainer, batches, four, progress=False)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both terms change by an order of magnitude. Where $|G|^2$ is largest, the images agree on where to
# go, and the noise scale is smallest. Later $|G|^2$ is smaller, while most of the noise stays,
# so that the noise scale is several times as large. This is one seed, and twice the batches would
# change the numbers by a tenth or two; but McCandlish et al. report that it grows in their tasks,
# too. So one can let the batch grow during a training.
#
# </details>
#
# These are numbers of a small network and an easy task. McCandlish et al. find thousands of images
# for a ResNet on ImageNet, and millions of positions for a game; Kaplan et al. (2020) find one to
# two million tokens for large language models at the end of their training. So these can use many
# devices.
#
# ## Summary
#
# - Strong scaling keeps the batch, weak scaling the shard.
# - Twice the batch at the same rate is behind after an epoch. With SGD at twice the rate it is
#   about even after one epoch, and slightly behind after three.
# - A rate that is too high leaves some runs guessing. Warm-up over an epoch prevented that here.
# - The noise scale, measured from the shards' gradients, says up to which batch more devices save
#   steps. Late in the training it was several times as large as early.
# - When two GPUs learn more slowly than one, check first whether batch and rate changed too.
#
# **Further reading.** P. Goyal et al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677; S.
# McCandlish, J. Kaplan, D. Amodei et al., *An empirical model of large-batch training* (2018),
# arXiv:1812.06162, appendix A; S. Malladi et al., *On the SDEs and scaling rules for adaptive
# gradient algorithms* (2022), arXiv:2205.10287; J. Kaplan et al., *Scaling laws for neural language
# models* (2020), arXiv:2001.08361, section 5.
