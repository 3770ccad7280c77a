# %% [markdown]
# # Deeper · Batch, rate and warm-up
#
# More devices can mean a larger batch, and a larger batch is another training. How do batch and
# learning rate go together?
#
# ## What you'll do
#
# Compare five trainings of chapter 04's LeNet, in pairs that differ in devices, batch, learning
# rate, or the last two. Each ran from five seeds. Then look at another start.
#
# ## What you'll learn
#
# - strong and weak scaling, and which of them changes the training;
# - what twice the batch does at the same rate, and at twice the rate;
# - why devices, batch and rate must be changed one at a time.
#
# ## What you need
#
# Chapter 04. No GPU. Reading takes {reading time}, running a few seconds.

# %%
import json
from pathlib import Path

import numpy as np

# %% [markdown]
# ## Batch and learning rate, one at a time
#
# There are two ways to use $k$ devices. *Strong scaling* keeps the batch: each device gets
# $\frac1k$ of it, and the training is the same, only faster. *Weak scaling* keeps each device's
# shard: the batch grows with $k$, there are fewer steps in an epoch, and it is another training.
#
# Devices, batch and rate are three things. *The Straight Dope* first changed all three together,
# from `run(1, 64, .3)` to `run(2, 128, .6)`, and later left the rate at 0.3. We change one at a
# time: two devices, three epochs of MNIST, five seeds. These runs take about an hour, so they were
# made beforehand.

# %%
stored = json.loads(Path("../src/results/lenet.json").read_text())
print("made by", stored["command"])
print("on", stored["machine"], stored["date"], "at commit", stored["commit"])


def accuracy_after(name, epoch):
    """Test accuracy of the first replica after an epoch, in percent, one number a seed."""
    accuracies = []
    for run in stored["runs"][name]:
        accuracies.append(100 * run[epoch - 1]["accuracies"][0])
    return np.array(accuracies)

# %% [markdown]
# **Predict:** after one epoch, which is behind: twice the batch at the same rate, or twice the
# batch at twice the rate?

# %%
names = ["lenet-128-0.2", "lenet-128-0.4", "lenet-256-0.2", "lenet-256-0.4"]
print("batch and rate   epoch   median (five seeds, from lowest to highest)")
for name in names:
    for epoch in [1, 3]:
        ends = accuracy_after(name, epoch)
        print(f"{name:16} {epoch:3}     {np.median(ends):.1f} % "
              f"({ends.min():.1f} to {ends.max():.1f})")

# %% tags=["fold"]
# draw: loss against images seen, median and range of five seeds
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

fig, ax = figure("After 8,000 images, batch 256 at rate 0.2 has the highest median loss",
                 "images seen (thousands)", f"loss, mean of 1,536 images ({stored['data']})")
styles = {"lenet-128-0.2": ("-", BLUE), "lenet-256-0.2": ("--", ORANGE),
          "lenet-128-0.4": (":", GREEN), "lenet-256-0.4": ("-.", GREY)}
medians = {}
for name, (style, color) in styles.items():
    losses = []
    for run in stored["runs"][name]:
        losses.append(np.concatenate([epoch["losses"][:39] for epoch in run]))
    losses = np.array(losses)  # [seed, point]
    seen = np.concatenate([60 * epoch + 1.536 * np.arange(1, 40) for epoch in range(3)])
    medians[name] = np.median(losses, axis=0)
    label = "batch {}, rate {}".format(*name.split("-")[1:])
    ax.plot(seen, medians[name], style, color=color, label=label)
    ax.fill_between(seen, losses.min(axis=0), losses.max(axis=0), color=color, alpha=0.15, lw=0)
ax.set_yscale("log")
ax.legend(fontsize=8, title="median and range of five seeds", title_fontsize=8)
show(fig, alt="Loss against images seen for four combinations of batch and rate, the median of "
              "five seeds with a band from the lowest to the highest.")

# %% [markdown]
# Ranges of seeds overlap. But the runs of one seed start from the same weights, so we can compare
# them seed by seed: from each accuracy we subtract that of batch 128 at rate 0.2. The last row of
# each epoch compares the two batches at rate 0.4.

# %%
pairs = [("lenet-one-device", "lenet-128-0.2"), ("lenet-128-0.4", "lenet-128-0.2"),
         ("lenet-256-0.2", "lenet-128-0.2"), ("lenet-256-0.4", "lenet-128-0.2"),
         ("lenet-256-0.4", "lenet-128-0.4")]
gaps = {}
for epoch in [1, 3]:
    for name, base in pairs:
        gap = np.sort(accuracy_after(name, epoch) - accuracy_after(base, epoch))
        gaps[name, base, epoch] = gap
        print(f"epoch {epoch}, {name:16} against {base}:", gap.round(2), "points")

# %% [markdown]
# - *One device* in place of two, at the same batch and rate, changes up to about 0.3 points.
#   Nothing but rounding differs, so less than that says nothing.
# - *Twice the rate* at the same batch is ahead after one epoch, for each seed.
# - *Twice the batch* at the same rate takes half as many steps. After one epoch it is behind for
#   each seed, at rate 0.2 and at 0.4.
# - *Both* follow a rule of Goyal et al. (2017): rate in proportion to batch. After one epoch four
#   seeds are within 0.2 points, the fifth is 1.5 behind. After three epochs all five are behind,
#   three of them by 0.5 or more. But a run of that setting also loses up to 1.3 points from one
#   epoch to the next, so five seeds don't say how much is due to both.
#
# Goyal et al. also *warm up*: the rate begins low and rises over the first epochs. Chapter 06 shows
# what that does where a high rate fails, and chapter 11 maps batch against rate.

# %% tags=["fold"]
# check: what the text says of each setting, and the figure's title
base = "lenet-128-0.2"
assert gaps["lenet-128-0.4", base, 1].min() > 0, "twice the rate: ahead for each seed"
assert gaps["lenet-256-0.2", base, 1].max() < 0, "twice the batch: behind for each seed"
assert gaps["lenet-256-0.4", "lenet-128-0.4", 1].max() < 0, "at rate 0.4 too"
once, thrice = gaps["lenet-256-0.4", base, 1], gaps["lenet-256-0.4", base, 3]
assert round(once[0], 1) == -1.5 and abs(once[1:]).max() < 0.2, "four of five within 0.2 points"
assert thrice.max() < 0 and (thrice.round(1) <= -0.5).sum() == 3, "behind, three by 0.5 or more"
doubled = np.array([accuracy_after("lenet-256-0.4", epoch) for epoch in (1, 2, 3)])
assert round(np.diff(doubled, axis=0).min(), 1) == -1.3, "what a run loses between epochs"
largest = max(abs(gaps["lenet-one-device", base, epoch]).max() for epoch in (1, 3))
assert round(largest, 1) == 0.3, "one device and two"
assert min(accuracy_after(name, 1).min() for name in names) > 93, "from chapter 04's start"
highest = medians["lenet-256-0.2"]
assert all((highest[5:] >= other[5:]).all() for other in medians.values()), "the title"

# %% [markdown]
# ## A start from which the first epoch teaches nothing
#
# A copy of *The Straight Dope*'s page, titled in Chinese, still says batch size 64 and MNIST, but
# trains with batch size 256 on Fashion-MNIST (`train(1, 256, 0.3)`, `load_data_fashion_mnist`). Its
# weights start as normal numbers times 0.01. We trained from that start on MNIST, at batch 256 and
# rate 0.3. **Predict** the accuracy after one epoch.

# %%
for epoch in [1, 2, 3, 4, 5]:
    ends = accuracy_after("lenet-original", epoch)
    print(f"after epoch {epoch}: {np.median(ends):.1f} % ({ends.min():.1f} to {ends.max():.1f})")
assert accuracy_after("lenet-original", 1).max() < 12, "it should still guess"
assert accuracy_after("lenet-original", 5).min() > 96, "it should have learned"

# %% [markdown]
# After one epoch all five seeds still guess, and after five they reach 96 % to 98 %. The rows
# above, from another start, had more than 93 % in each run after one epoch. Batch and rate differ
# too, so start alone isn't shown to be the cause. Compare settings from the same start, and not
# after the first epoch alone.
#
# ## Summary
#
# - Strong scaling keeps the batch, and so the training. Weak scaling keeps the shard and changes
#   the batch.
# - Twice the batch at the same rate was behind after an epoch, for each of five seeds. At twice the
#   rate as well, four of the five were about even. After three epochs all five were behind, three
#   of them by 0.5 points or more.
# - Twice the rate alone was ahead after an epoch, for each of five seeds.
# - Devices, batch and rate are three things, and the start is a fourth. Change one at a time.
#
# **Further reading.** P. Goyal et al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677,
# section 2.
