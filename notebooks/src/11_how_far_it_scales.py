# %% [markdown]
# # 11 · How far it scales
#
# *How many devices are worth using?* More devices compute more at the same time, but they also have
# to exchange gradients. So the answer is a comparison of two times: **communication** against
# **computing**. Here are both, for a network that needs 1 ms an image:
#
# ![Bars for the time of a step on 1, 2, 4 and 8 devices. Strong scaling, the same 32 images for
# all: 32, 20, 14 and 11 ms, since computing halves and communication grows. Weak scaling, 32 images
# for each device: 32, 36, 38 and 39 ms.](src/drawings/strong_and_weak.svg)
#
# > **What you'll do:** compute both times for a transformer on H100 GPUs, fit two terms to a
# > published table, and predict a step on your own machine before you measure it.
# >
# > **What you'll learn:** what scaling efficiency is, strong and weak; what decides how far a
# > transformer scales; how to judge a fit.
# >
# > **What you need:** chapters 03, 04 and 10. No GPU. Reading takes {reading time}, running less
# > than a minute on two idle cores.

# %%
import helpers
from helpers import allreduce, your_turn
from helpers.by_hand import init_params
from helpers.plotting import curves, show
from helpers.timing import in_turns, print_times, race

import numpy as np
from mxnet import nd

# %% [markdown]
# ## Scaling efficiency
#
# There are two ways to use more devices. **Strong scaling** divides the same batch among them, so
# that each computes less. **Weak scaling** gives each device a batch of its own, so that together
# they process more images per step. Communication is the same in both, since the gradients are as
# large as the weights, whatever the batch. In a ring of $k$ devices each sends $2(k-1)/k$ times
# their size (chapter 03). In the picture the gradients take 4 ms to send once:

# %%
def milliseconds(images_each, k):
    computing = 1 * images_each  # 1 ms an image
    communication = 4 * 2 * (k - 1) / k
    return computing + communication


for k in [1, 2, 4, 8, 1000]:
    strong = milliseconds(32 / k, k)
    weak = milliseconds(32, k)
    print(f"k = {k}: strong {strong:.0f} ms, weak {weak:.0f} ms")

# %% [markdown]
# **Scaling efficiency** is the fraction of the ideal speed-up that is reached. In strong scaling,
# $k$ devices should ideally take a $k$-th of the time. In weak scaling they should take the same
# time for $k$ times the images. **Predict:** what are the two efficiencies of eight devices?

# %% tags=["predict"]
on_one = milliseconds(32, 1)
for k in [1, 2, 4, 8, 1000]:
    strong_efficiency = on_one / (k * milliseconds(32 / k, k))
    weak_efficiency = on_one / milliseconds(32, k)
    print(f"k = {k}: strong {strong_efficiency:.1%}, weak {weak_efficiency:.1%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Eight devices reach 36 % in strong scaling, because 32 / (8 · 11) = 0.36. In weak scaling they
# reach 82 %, because 32 / 39 = 0.82.
#
# </details>
#
# A ring's communication stays below 8 ms, however many devices there are. So in this model the
# efficiency of weak scaling never falls below 80 %. But a strong step never takes less than 8 ms,
# so that it is never more than four times as fast as on one device (**Amdahl's law**).
#
# Both efficiencies are the same fraction: computing / (computing + communication). In strong
# scaling eight devices compute for 4 of 11 ms, in weak scaling for 32 of 39. How large is it for a
# real network?
#
# ## On paper: bytes against operations
#
# Computing takes *operations* divided by operations a second. Communication takes *bytes* divided
# by bytes a second, the **bandwidth**. We look at a *transformer*, the kind of network behind
# language models. Its batch consists of *tokens*, which are pieces of words. Here are our
# assumptions:
#
# - **The device** is an NVIDIA H100. Its peak is 989 · 10¹² operations a second in bfloat16, a
#   format of 2 bytes a number. Training reaches 40 % of that, about what *Llama 3* reached on up to
#   16,384 H100s (38 to 43 %: arXiv:2407.21783, table 4).
# - **Operations**: a transformer takes six for each weight and token, 2 forward and 4 backward. (We
#   leave out its attention, with sequences of 4,096 tokens about a sixth more for 7 billion
#   parameters.)
# - **Links**: a machine has eight devices (NVIDIA's DGX H100). Each device sends 450 · 10⁹ bytes a
#   second to the others in its machine, and 50 · 10⁹ to other machines.
# - **The all-reduce** first adds up inside each machine, so that each device has the sum of an
#   eighth (a reduce-scatter, chapter 03). Only this eighth goes round a ring through all machines.
#   Then an all-gather inside gives each device the whole sum (deeper: More all-reduces). Latencies
#   are left out (exercise 1), and communication begins when computing is done.

# %%
def all_reduce_seconds(nbytes):
    """A reduce-scatter sends about all bytes once, and so does an all-gather."""
    inside = 2 * nbytes / 450e9  # to be exact, 7/8 of it with eight devices
    eighth = nbytes / 8  # each device sends another eighth, over its own link
    between_machines = 2 * eighth / 50e9
    return inside + between_machines


print(f"the all-reduce of 14 GB takes {all_reduce_seconds(14e9):.2f} s")

# %% [markdown]
# 14 GB are the gradients of a transformer of 7 billion parameters, with 2 bytes each. Let each of
# many devices have 8,192 tokens:

# %%
reached = 0.4 * 989e12  # operations a second


def transformer(parameters, tokens):
    """Seconds of computing and of communication in a step, with so many tokens a device."""
    computing = 6 * parameters * tokens / reached
    communication = all_reduce_seconds(2 * parameters)  # 2 bytes a gradient
    return computing, communication


computing, communication = transformer(7e9, 8192)
efficiency = computing / (computing + communication)
print(f"computing {computing:.2f} s, communication {communication:.2f} s")
print(f"efficiency {efficiency:.0%}")

# %% [markdown]
# A transformer of 70 billion parameters has ten times as many bytes to send. **Predict:** is its
# efficiency lower, the same or higher?

# %% tags=["predict"]
computing, communication = transformer(70e9, 8192)
efficiency = computing / (computing + communication)
print(f"computing {computing:.2f} s, communication {communication:.2f} s")
print(f"efficiency {efficiency:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The efficiency is the same, 87 %. The larger transformer sends ten times as much, but it also
# computes ten times as much.
#
# </details>
#
# What counts is the **arithmetic intensity** of the step, here the number of operations for each
# byte of gradients. For a transformer of $N$ parameters with $T$ tokens a device, it is $6NT / 2N =
# 3T$. The size $N$ cancels (attention, which we left out, makes that inexact). So **how far a
# transformer scales doesn't depend on its size, but on how many tokens each device has.**
#
# With how many tokens do both times take equally long? Computing grows in proportion to them, and
# communication doesn't depend on them. So we divide:

# %%
computing_one_token, communication = transformer(7e9, 1)
print(f"{communication / computing_one_token:,.0f} tokens a device")

# %% [markdown]
# With fewer tokens a device communicates for longer than it computes. Strong scaling makes that
# happen sooner or later. *Llama 2*, for example, is trained with batches of 4 million tokens
# (arXiv:2307.09288, section 2.2), and its smallest network has 7 billion parameters. **Predict:**
# among how many H100s can this batch be divided before the efficiency is below a half? Is it about
# 400, 4,000 or 40,000?

# %% tags=["predict"]
for k in [64, 512, 4096, 32_768]:
    computing, communication = transformer(7e9, 4e6 / k)
    step = computing + communication
    print(f"{k:5} devices: step {step:.2f} s, efficiency {computing / step:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# It is about 4,000. With 4,096 devices the efficiency is 44 %, and with 512 it is 86 %.
#
# </details>
#
# That is an answer on paper: **by data parallelism, a batch of 4 million tokens keeps hundreds of
# such devices busy.** A few thousand would wait for half of the time. (If communication overlaps
# with the backward pass, as in chapter 10, they wait less.) For more devices one cuts the model as
# well (chapters 18 to 20).
#
# ## A published table
#
# Do measurements agree? MXNet's examples have a table of images a second in weak scaling. Here is
# AlexNet, a network of 2012, with 512 images for each GPU. The GPUs are K80s, 16 in a machine:

# %%
counts = np.array([1, 2, 4, 8, 16])  # of GPUs
images_a_second = np.array([457.07, 870.43, 1514.8, 2852.5, 4244.18])

seconds = 512 * counts / images_a_second  # of a step
efficiency = seconds[0] / seconds
print("GPUs:      ", counts)
print("step in s: ", seconds.round(2))
print("efficiency:", efficiency.round(2))

# %% [markdown]
# A ring's communication would hardly grow from 8 to 16 GPUs, but this step gets much longer. So we
# describe it by **two terms**, $t = a + b\,k$: the first is what a step takes anyway, and $b$ is
# what each GPU adds. Which line is the best? *Least squares* takes the one for which the sum of the
# squared distances in $t$ is the smallest. It has a formula, with means $\bar k$ and $\bar t$:
#
# $$b = \frac{\sum (k - \bar k)(t - \bar t)}{\sum (k - \bar k)^2}, \qquad a = \bar t - b\,\bar k$$
#
# ### Your turn: fit two terms
#
# Write it, before you scroll on. The first case lies on a line, the second doesn't.

# %% tags=["your-turn"]
def fit_line(counts, seconds):
    """a and b of the line a + b · counts that is closest to the seconds."""
    ...


on_a_line = ((np.array([1, 2, 4]), np.array([3.0, 5.0, 9.0])), (1, 2))
not_on_a_line = ((np.array([1, 2, 3, 6]), np.array([3.0, 0.0, 5.0, 9.0])), (-0.25, 1.5))
your_turn(fit_line, [on_a_line, not_on_a_line])

# %% [markdown]
# Here is ours, and what it finds:

# %%
def fit_two_terms(counts, seconds):
    k_mean = np.mean(counts)
    t_mean = np.mean(seconds)
    k_away = counts - k_mean
    t_away = seconds - t_mean
    b = np.sum(k_away * t_away) / np.sum(k_away ** 2)
    a = t_mean - b * k_mean
    return a, b


a, b = fit_two_terms(counts, seconds)
line = a + b * counts
print(f"a = {a:.2f} s, b = {b:.3f} s")
print("published:", seconds.round(2))
print("the line: ", line.round(2))
assert np.allclose(line, seconds, rtol=0.05)
assert np.allclose([b, a], np.polyfit(counts, seconds, 1))  # NumPy's least squares

# %% [markdown]
# Two terms describe the five steps to within 5 %. Are they a law, then? **A law is judged by what
# it wasn't fitted to.** The table goes on, to 32 GPUs in two machines. **Predict:** will the line
# be right there, or will it predict too long or too short a step?

# %% tags=["predict"]
on_32 = 512 * 32 / 7945.57  # published images a second
line_on_32 = a + b * 32
print(f"published {on_32:.2f} s, the line {line_on_32:.2f} s")
print(f"the line is off by {line_on_32 / on_32 - 1:+.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The line predicts a step that is too long, by 33 %. From 16 to 32 GPUs the published step gets
# only 7 % longer.
#
# </details>
#
# What is different there? Up to 16 GPUs are one machine, and 32 are two machines with 16 each. The
# table's text names one store for all runs, `dist_device_sync`, while `benchmark.py`, beside it,
# takes `device` on one machine and `dist_sync_device` on several. If the table was made by that
# program, what grew with the GPUs of one machine may grow no further. That is a guess, which the
# table can't test. But it does show that **a line that fits
# says little beyond where it was fitted.**
#
# How far did it scale, in the end? Here is the whole table, with two more networks:

# %%
all_counts = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
published = {  # images a second
    "AlexNet": [457.07, 870.43, 1514.8, 2852.5, 4244.18, 7945.57, 15840.52, 31334.88, 61938.36],
    "Inception-v3": [30.4, 59.61, 117.9, 233.39, 447.61, 882.57, 1761.24, 3416.2, 6660.98],
    "ResNet-152": [20.08, 38.76, 77.01, 153.07, 298.03, 595.53, 1179.86, 2333.47, 4630.42],
}
lines = {}
for name in published:
    rates = np.array(published[name])
    efficiency = 100 * rates / (all_counts * rates[0])
    lines[name] = (all_counts, efficiency)
    print(f"{name:12} efficiency on 256 GPUs: {efficiency[-1]:.0f} %")

by_the_line = 100 * seconds[0] / (a + b * all_counts)
lines["AlexNet by the line"] = (all_counts, by_the_line)

# %% tags=["fold"]
# draw: efficiency against the number of GPUs, for three networks and for AlexNet's line
fig, ax = curves("Efficiency up to 256 GPUs, and what AlexNet's line says", "GPUs (K80)",
                 "weak-scaling efficiency, %", lines, logx=True)
ax.set_xticks(all_counts, all_counts)  # places, labels
ax.minorticks_off()
ax.set_ylim(0, 105)
show(fig, "Weak-scaling efficiency against the number of GPUs, from 1 to 256. Published: AlexNet "
     "falls to 58 % on 16 GPUs and then stays above 50 %; the two others stay above 85 %. By the "
     "line that was fitted up to 16, AlexNet falls to 8 % on 256.")

# %% [markdown]
# AlexNet's published efficiency falls up to 16 GPUs, and then stays above a half, far from the
# line. The two others lose much less. (For a reason with AlexNet see deeper: Costs on paper.)
#
# ## Your machine: predict, then measure
#
# Now a prediction of your own, before the measurement. We take the two times of the first section
# and measure each *alone*: a step of 128 images on one device, and an all-reduce of LeNet's eight
# arrays between two. Their sum is our prediction for a step of two devices with 128 images each.
#
# `race`, a helper, times chapter 04's training step in processes of their own, in rounds of 16
# steps each (deeper: How the speed-up was measured). It measures the steps of one device and of two
# in turns, so that whatever disturbs the machine hits both. We look at the times of two devices
# only when we have predicted them.

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1"]
ROUNDS = 9
STEPS = 16
two = helpers.devices(2)
kind = two[0].device_type  # "cpu", or "gpu" where there are two GPUs
programs = {
    "one device": f"lenet_contestant.py --kind {kind} --devices 0 --images 128",
    "two devices": f"lenet_contestant.py --kind {kind} --devices 0 1 --images 256",
}
times = race(programs, STEPS, ROUNDS)
step_on_one = times["one device"] / STEPS

# %% [markdown]
# For the all-reduce we use `in_turns`, which does the same for functions. The arrays are as large
# as the gradients, but all zeros, because they are summed in place again and again:

# %% tags=["measured", "few:ROUNDS = 100=>ROUNDS = 3"]
ROUNDS = 100
gradients = []
for weight in init_params():
    gradients.append([nd.zeros(weight.shape, ctx=device) for device in two])


def all_reduce():
    for arrays in gradients:
        allreduce(arrays)


times_of_all_reduce = in_turns({"all-reduce": all_reduce}, ROUNDS)
all_reduce_alone = times_of_all_reduce["all-reduce"]

# %% [markdown]
# The prediction adds the median all-reduce to each round of the step:

# %% tags=["measured"]
predicted = step_on_one + np.median(all_reduce_alone)
print_times({
    "step on one device": step_on_one,
    "all-reduce": all_reduce_alone,
    "predicted for two": predicted,
})

# %% [markdown]
# These are medians, and in brackets the **interquartile range**, the middle half of the rounds.
#
# Our rule is that of chapter 04: if the brackets of two times overlap, neither is shorter.
# **Predict:** will the brackets of the measured step overlap with those of the prediction? If not,
# will the step be longer or shorter than predicted?

# %% tags=["measured", "predict"]
measured = times["two devices"] / STEPS
print_times({"predicted for two": predicted, "measured": measured})
efficiency = np.median(step_on_one) / np.median(measured)
print(f"efficiency {efficiency:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# If the step is longer than predicted, then a step on two devices costs something that neither of
# the two times has. Two simulated devices share the memory's bandwidth, for example, and one Python
# dispatches the work of both. Which of these it is, this experiment can't say. (Other programs
# disturb the measurement. `race` says so if there were any; then run the section again.)
#
# </details>
#
# ## Summary
#
# - Adding devices pays until, roughly, a device communicates for as long as it computes, because
#   then half of the time is lost where nothing overlaps. For a transformer, by our assumptions on
#   H100s, that is where a device has fewer than about 1,200 tokens, whatever the transformer's
#   size.
# - Strong scaling divides the same batch, and its efficiency is $t_1 / (k\,t_k)$. Weak scaling
#   keeps each device's share, and its efficiency is $t_1 / t_k$. It scales further, but its batch
#   grows with the devices, which changes the training (deeper: Batch, rate and warm-up).
# - A fit is judged by what it wasn't fitted to. A line that fits up to 16 devices was 33 % off on
#   32.
#
# Next, chapter 12: devices that are not equal.
#
# **Sources.** MXNet 1.9.1, `example/image-classification/`: `README.md` (*Scalability Results*),
# `benchmark.py`. NVIDIA, *H100 Tensor Core GPU* (data sheet) and *DGX H100* (data sheet). G.
# Amdahl, *AFIPS* 30 (1967).

# %% [markdown]
# ## Exercises
#
# 1. **Latency.** On 64 devices in eight machines the all-reduce takes 2 · 7 rounds inside a machine
#    and 2 · 7 between machines. Let each round cost 10 µs besides its bytes. How does that change
#    the efficiency of the transformer with 7 billion parameters? And that of LeNet, which has
#    129,068 parameters and 3 · 4.5 million operations an image, with 256 images a device? (A small
#    network reaches far less than 40 % of the peak. Take it nevertheless.)
# 2. **A faster device.** A new device computes twice as fast on the same link. How does the
#    efficiency of the transformer change, with 8,192 tokens a device? And how many tokens does it
#    need for the efficiency of before?
# 3. **Another term.** In a ring the second term isn't $b\,k$ but $b\,(k-1)/k$. Fit it to AlexNet's
#    steps from 1 to 16, and ask it for 32. Does it come closer than the line?

# %% [markdown]
# ### Answer to *Your turn*
#
# The formula, with sums over all entries.

# %% tags=["solution", "your-turn"]
def fit_line(counts, seconds):
    k_away = counts - counts.mean()
    t_away = seconds - seconds.mean()
    b = (k_away * t_away).sum() / (k_away * k_away).sum()
    a = seconds.mean() - b * counts.mean()
    return a, b


your_turn(fit_line, [on_a_line, not_on_a_line])

# %% [markdown]
# ### Answer 1
#
# For the transformer the latencies are nothing beside 870 ms of computing. For LeNet they take 0.28
# ms, more than thirty times its computing, so that its efficiency falls from 78 to 3 %. So for
# small networks the number of rounds decides, as in chapter 03.

# %% tags=["solution"]
latencies = (2 * 7 + 2 * 7) * 10e-6

computing, communication = transformer(7e9, 8192)
before = computing / (computing + communication)
after = computing / (computing + communication + latencies)
print(f"transformer: efficiency {before:.1%}, with latencies {after:.1%}")
assert after > 0.86

computing = 3 * 4.5e6 * 256 / reached
communication = all_reduce_seconds(2 * 129_068)
before = computing / (computing + communication)
after = computing / (computing + communication + latencies)
print(f"LeNet: efficiency {before:.1%}, with latencies {after:.1%}")
assert after < 0.04

# %% [markdown]
# ### Answer 2
#
# It falls from 87 to 77 %, because computing halves and communication doesn't. With twice the
# tokens it is 87 % again. So **a faster device scales worse**, unless its link gets faster, too, or
# its share of the batch larger.

# %% tags=["solution"]
for speed, tokens in [(1, 8192), (2, 8192), (2, 16384)]:
    computing, communication = transformer(7e9, tokens)
    computing = computing / speed
    efficiency = computing / (computing + communication)
    print(f"{speed} times as fast, {tokens:6,} tokens: {efficiency:.0%}")

# %% [markdown]
# ### Answer 3
#
# The fit is the same, with $(k-1)/k$ as the number on the horizontal axis. It is a little closer at
# 32, but 21 % too short, since it can't grow from 8 to 16 GPUs as the published step does.

# %% tags=["solution"]
ring_share = (counts - 1) / counts
ring_a, ring_b = fit_two_terms(ring_share, seconds)
ring_on_32 = ring_a + ring_b * 31 / 32
print(f"the line is off by {line_on_32 / on_32 - 1:+.0%}, "
      f"the ring's term by {ring_on_32 / on_32 - 1:+.0%}")
assert abs(ring_on_32 / on_32 - 1) < abs(line_on_32 / on_32 - 1)
