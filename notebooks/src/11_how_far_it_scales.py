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
# > **What you'll do:** compute both times for three networks on an H100 GPU, fit two terms to a
# > published table, and predict a step on your own machine before you measure it.
# >
# > **What you'll learn:** what scaling efficiency is, strong and weak; why a transformer's size
# > doesn't decide how far it scales; how a fit fails beyond where it was fitted.
# >
# > **What you need:** chapters 03, 04 and 10. No GPU. Reading takes {reading time}, running less
# > than a minute on two idle cores.

# %%
import helpers
from helpers import your_turn

import numpy as np

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


on_one = milliseconds(32, 1)
for k in [1, 2, 4, 8]:
    strong = milliseconds(32 / k, k)
    weak = milliseconds(32, k)
    print(f"k = {k}: strong {strong:.0f} ms, weak {weak:.0f} ms")

# %% [markdown]
# **Scaling efficiency** is the fraction of the ideal speed-up that is reached. In strong scaling,
# $k$ devices should ideally take a $k$-th of the time. In weak scaling they should take the same
# time for $k$ times the images. **Predict:** what are the two efficiencies of eight devices?

# %% tags=["predict"]
for k in [1, 2, 4, 8]:
    strong_efficiency = on_one / (k * milliseconds(32 / k, k))
    weak_efficiency = on_one / milliseconds(32, k)
    print(f"k = {k}: strong {strong_efficiency:.0%}, weak {weak_efficiency:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Eight devices reach 36 % in strong scaling, because 32 / (8 · 11) = 0.36. In weak scaling they
# reach 82 %, because 32 / 39 = 0.82.
#
# </details>
#
# And with even more devices? A ring's communication stays below 8 ms, however many devices there
# are. So in this model a weak step never takes longer than 40 ms, and its efficiency never falls
# below 80 %. But a strong step never takes less than 8 ms, so that it is never more than four times
# as fast as on one device (**Amdahl's law**).
#
# Both efficiencies are the same fraction of the step of *one* device: the time in which it
# computes, divided by all its time, computing / (computing + communication). In strong scaling
# eight devices compute for 4 of 11 ms, in weak scaling for 32 of 39. How large is it for real
# networks?
#
# ## On paper: bytes against operations
#
# Computing takes *operations* divided by operations a second. Communication takes *bytes* divided
# by bytes a second, the **bandwidth**. Besides our two networks we look at a *transformer*, the
# kind of network behind language models. Its batch consists of *tokens*, which are pieces of words.
# Here are our assumptions:
#
# - **The device** is an NVIDIA H100. Its peak is 989 · 10¹² operations a second in bfloat16, a
#   format of 2 bytes a number.
# - **Training reaches 40 %** of the peak. That is about what *Llama 3*, a transformer, reached on
#   up to 16,384 H100s (38 to 43 %: arXiv:2407.21783, table 4). Small networks reach far less. So
#   for LeNet and ResNet-18 only the comparison of bytes and operations counts.
# - **Links**: a machine has eight devices (NVIDIA's DGX H100). Each device sends 450 · 10⁹ bytes a
#   second to the others in its machine, and 50 · 10⁹ to other machines.
# - **The all-reduce** first adds up inside each machine, so that each device has the sum of an
#   eighth (a reduce-scatter, chapter 03). Only this eighth goes round a ring through all machines.
#   Then an all-gather inside gives each device the whole sum (deeper: More all-reduces). Latencies
#   are left out (exercise 1), and communication begins when computing is done.
# - **A device's share** of the batch is 256 images, or 8,192 tokens.
# - **Operations**: a forward pass takes 4.5 million an image for LeNet, and 912 million for
#   ResNet-18 on 28 × 28 pixels. The backward pass takes twice as many (deeper: Costs on paper
#   counts them). A transformer takes 2 for each weight and token forward and 4 backward, six
#   together. We leave out its attention, about a sixth more with sequences of 4,096 tokens.

# %%
reached = 0.4 * 989e12  # operations a second


def all_reduce_seconds(nbytes):
    """A reduce-scatter sends about all bytes once, and so does an all-gather."""
    inside = 2 * nbytes / 450e9  # to be exact, 7/8 of it with eight devices
    eighth = nbytes / 8
    between_machines = 2 * eighth / 50e9
    return inside + between_machines


images = 256  # of each device
tokens = 8192
parameters = {"LeNet": 129_068, "ResNet-18": 11_175_818, "transformer": 7e9}
operations = {  # of a step, on each device
    "LeNet": 3 * 4.5e6 * images,  # forward and backward are 3 times forward
    "ResNet-18": 3 * 912e6 * images,
    "transformer": 6 * 7e9 * tokens,
}
for name in parameters:
    nbytes = 2 * parameters[name]  # 2 bytes a gradient
    print(f"{name:11} has {nbytes / 1e6:8,.1f} MB of gradients")

# %% [markdown]
# The transformer has 54,000 times as many bytes to send as LeNet. **Predict:** which of the three
# networks has the best efficiency (weak scaling, many devices), and which has the worst?

# %% tags=["predict"]
for name in parameters:
    nbytes = 2 * parameters[name]
    computing = operations[name] / reached
    communication = all_reduce_seconds(nbytes)
    efficiency = computing / (computing + communication)
    print(f"{name:11} computing {1000 * computing:7.3f} ms, "
          f"communication {1000 * communication:7.3f} ms, efficiency {efficiency:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# ResNet-18 has the best efficiency, 89 %, and LeNet the worst, 78 %. The transformer is between
# them, with 87 %: it sends far more, but it also computes far more. That is without latencies,
# which leave LeNet 3 % on 64 devices, so that the transformer is the best (exercise 1).
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
def transformer(tokens):
    """Seconds of computing and of communication, with 7 billion parameters."""
    computing = 6 * 7e9 * tokens / reached
    communication = all_reduce_seconds(2 * 7e9)
    return computing, communication


computing_one_token, communication = transformer(1)
print(f"{communication / computing_one_token:,.0f} tokens a device")

# %% [markdown]
# With fewer tokens a device communicates for longer than it computes. (It may add up the gradients
# of several small batches before it sends them, which is **gradient accumulation**. That makes the
# batch larger.) Strong scaling makes it happen sooner or later. *Llama 2*, for example, is trained
# with batches of 4 million tokens (arXiv:2307.09288, section 2.2), and its smallest network has 7
# billion parameters.
#
# Gradients can be sent during the backward pass, which is two thirds of computing. Only the part of
# communication that outlasts the backward pass lengthens the step, the **exposed communication**
# (chapter 10). That is the best case, since at the beginning of the backward pass there is nothing
# to send yet. **Predict:** among how many H100s can this batch be divided before the efficiency is
# below a half? Is it about 400, 4,000 or 40,000?

# %% tags=["predict"]
for k in [64, 512, 4096, 32_768]:
    computing, communication = transformer(4e6 / k)
    step = computing + communication
    print(f"{k:5} devices: step {step:.2f} s, efficiency {computing / step:.0%}")

    backward = 2 / 3 * computing
    exposed = max(0, communication - backward)
    step = computing + exposed
    print(f"      overlapped: step {step:.2f} s, efficiency {computing / step:.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# It is about 4,000. With 4,096 devices it is 44 %, or 62 % in the best case of overlap. With eight
# times as many it is a tenth at most in both cases.
#
# </details>
#
# That is an answer on paper: **by data parallelism, a batch of 4 million tokens keeps hundreds of
# such devices busy.** A few thousand would wait for half of the time, and there wouldn't be enough
# sequences for them: of 4,096 tokens each, as in *Llama 2*, the batch has only about a thousand.
# For more devices one cuts the model as well (chapters 18 to 20).
#
# (Such a network doesn't even fit into an H100's 80 GB: weights, gradients and what the optimizer
# keeps take 112 GB. Chapter 16 divides them among the devices.)
#
# ## A published table
#
# Do measurements agree? MXNet's examples have a table of images a second in weak
# scaling. The GPUs are K80s, 16 in a machine:

# %%
counts = np.array([1, 2, 4, 8, 16])  # of GPUs
images_a_second = {
    "AlexNet": [457.07, 870.43, 1514.8, 2852.5, 4244.18],
    "Inception-v3": [30.4, 59.61, 117.9, 233.39, 447.61],
    "ResNet-152": [20.08, 38.76, 77.01, 153.07, 298.03],
}
images_each = {"AlexNet": 512, "Inception-v3": 32, "ResNet-152": 32}
megabytes = {"AlexNet": 203, "Inception-v3": 95, "ResNet-152": 240}  # 4 bytes a weight

seconds = {}  # of a step
for name in images_a_second:
    seconds[name] = images_each[name] * counts / np.array(images_a_second[name])
    on_one = seconds[name][0]
    on_16 = seconds[name][-1]
    megabytes_a_second = megabytes[name] / on_one
    print(f"{name:12} step on one {on_one:.2f} s, on 16 {on_16:.2f} s, efficiency "
          f"{on_one / on_16:.0%}; {megabytes_a_second:.0f} MB for each second of computing")

# %% [markdown]
# By the last column Inception-v3 should scale best, and AlexNet a little worse than ResNet-152. But
# Inception-v3 is no better than ResNet-152, and AlexNet is far worse. So there is more to it than
# bytes against operations (deeper: Costs on paper looks for the reason with AlexNet).
#
# Here are the steps' times, as a share of the time on one GPU:

# %%
from helpers.plotting import curves, show

lines = {}
for name in seconds:
    lines[name] = (counts, seconds[name] / seconds[name][0])
fig, ax = curves("AlexNet's step takes 1.7 times as long on 16 GPUs", "GPUs (K80)",
                 "time of a step, one GPU = 1", lines)
ax.set_ylim(0, 1.9)
ax.set_xticks(counts)
show(fig, "Time of a step against the number of GPUs, from 1 to 16. It rises, for "
     "AlexNet to 1.7 times that on one GPU, for the two others to 1.1 times.")

# %% [markdown]
# A ring's communication saturates, as $(k-1)/k$ does. The points of AlexNet and Inception-v3 lie
# nearer to a line. (Those of ResNet-152 level off up to 8 and rise again at 16; exercise 3 tries a
# ring's term.) So we describe a step by **two terms**, $t = a + b\,k$: the first is what a step
# takes anyway, and $b$ is what each GPU adds. Which line is the best? *Least squares* takes the one
# for which the sum of the squared distances in $t$ is the smallest. It has a formula, with means
# $\bar k$ and $\bar t$:
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


for name in seconds:
    a, b = fit_two_terms(counts, seconds[name])
    farthest = np.max(np.abs(a + b * counts - seconds[name]) / seconds[name])
    print(f"{name:12} t = {a:.2f} s + {1000 * b:4.1f} ms · k, at most {farthest:.1%} off")
    assert np.allclose([b, a], np.polyfit(counts, seconds[name], 1))

# %% [markdown]
# Two terms describe fifteen steps to within 5 %, though two of the networks hardly rise at all. Are
# they a law, then? **A law is judged by what it wasn't fitted to.** The table goes on, to 32 GPUs
# in two machines. **Predict:** will the lines be right there, or will they predict too long or too
# short a step?

# %% tags=["predict"]
beyond = {  # images a second on 32, 64, 128 and 256 GPUs
    "AlexNet": [7945.57, 15840.52, 31334.88, 61938.36],
    "Inception-v3": [882.57, 1761.24, 3416.2, 6660.98],
    "ResNet-152": [595.53, 1179.86, 2333.47, 4630.42],
}
for name in seconds:
    a, b = fit_two_terms(counts, seconds[name])
    line = a + b * 32
    on_32 = images_each[name] * 32 / beyond[name][0]
    print(f"{name:12} 32 GPUs: the line says {line:.2f} s, published {on_32:.2f} s, "
          f"off by {line / on_32 - 1:+.0%}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# All three lines predict too long a step: by 33 % for AlexNet and by 6 % for the two others. From
# 16 to 32 GPUs a step gets at most 7 % longer.
#
# </details>
#
# What is different there? Up to 16 GPUs are one machine, and 32 are two machines with 16 each. And
# `benchmark.py`, in the table's folder, uses another store for several machines
# (`dist_sync_device` instead of `device`). So what grew with the GPUs of one machine may grow no
# further, and something else begins. That is a guess, which the table can't test. But it does show
# that **a line that fits says little beyond where it was fitted.**
#
# How far did it scale, in the end? The whole table:

# %%
all_counts = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256])
published = {}  # efficiency in %
by_the_line = {}
for name in images_a_second:
    rates = np.array(images_a_second[name] + beyond[name])
    ideal = all_counts * rates[0]
    published[name] = 100 * rates / ideal

    a, b = fit_two_terms(counts, seconds[name])
    steps = a + b * all_counts
    by_the_line[name] = 100 * seconds[name][0] / steps
    print(f"{name:12} efficiency on 256 GPUs: {published[name][-1]:.0f} %, by the line "
          f"{by_the_line[name][-1]:.0f} %")

# %% [markdown]
# On 256 GPUs the lines are off by much more than on 32. Here are all numbers of GPUs:

# %%
lines = {}
for name in published:
    lines[name] = (all_counts, published[name])
lines["AlexNet by the line"] = (all_counts, by_the_line["AlexNet"])
fig, ax = curves("AlexNet's efficiency falls by 42 points up to 16 GPUs, then by 5", "GPUs (K80)",
                 "weak-scaling efficiency, %", lines, logx=True)
ax.set_xticks(all_counts, all_counts)  # places, labels
ax.minorticks_off()
ax.set_ylim(0, 105)
show(fig, "Weak-scaling efficiency against the number of GPUs, from 1 to 256. Published: AlexNet "
     "falls to 58 % on 16 GPUs and then stays above 50 %; the two others stay above 85 %. By the "
     "line that was fitted up to 16, AlexNet falls to 8 % on 256.")

# %% [markdown]
# ## Your machine: predict, then measure
#
# Now a prediction of your own, before the measurement. We take the two terms of the first section
# and measure each *alone*: a step of 128 images on one device, and an all-reduce of LeNet's eight
# arrays between two. By the picture, a step of two devices with 128 images each takes both terms
# together.
#
# `race`, a helper, times chapter 04's training step in processes of their own, in rounds of 16
# steps each (deeper: How the speed-up was measured). It measures the steps of one device and of two
# in turns, so that whatever disturbs the machine hits both. We look at the second only when we
# have predicted it.

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1"]
from helpers.timing import in_turns, race, spread

ROUNDS = 9
STEPS = 16
two = helpers.devices(2)
program = f"lenet_contestant.py --kind {two[0].device_type}"
programs = {
    "one device": f"{program} --devices 0 --images 128",
    "two devices": f"{program} --devices 0 1 --images 256",
}
times = race(programs, STEPS, ROUNDS)

# %% [markdown]
# For the all-reduce we use `in_turns`, which does the same for functions. A round has 16 of them,
# too. The arrays are as large as the gradients, but all zeros, because they are summed in place
# again and again:

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1"]
from helpers import allreduce
from helpers.by_hand import init_params

from mxnet import nd

ROUNDS = 9
gradients = []
for weight in init_params():
    gradients.append([nd.zeros(weight.shape, ctx=device) for device in two])


def all_reduces():
    for step in range(STEPS):
        for arrays in gradients:
            allreduce(arrays)


all_reduce_alone = in_turns({"all-reduce": all_reduces}, ROUNDS)["all-reduce"]

# %% [markdown]
# The prediction adds the median all-reduce to each round of the step:

# %% tags=["measured"]
step_alone = times["one device"]
predicted = step_alone + np.median(all_reduce_alone)

for name, taken in [("step on one device", step_alone), ("all-reduce", all_reduce_alone),
                    ("predicted for two", predicted)]:
    low, median, high = spread(1000 * taken / STEPS)
    print(f"{name:18}  {median:6.2f} ms  ({low:.2f} to {high:.2f})")

# %% [markdown]
# These are medians, and in brackets the **interquartile range**, the middle half of the rounds. If
# the all-reduce is short beside the step, as it is on simulated devices, then we test above all
# whether two devices that compute at the same time disturb each other.
#
# Our rule is that of chapter 04: if the brackets of two times overlap, neither is shorter. So the
# prediction is *hit* if its brackets overlap with those of the measurement, and otherwise *missed*.
# **Predict:** will it be hit? If not, will the step of two devices be longer or shorter than
# predicted?

# %% tags=["measured", "predict"]
for name, taken in [("predicted", predicted), ("measured", times["two devices"])]:
    low, median, high = spread(1000 * taken / STEPS)
    efficiency = np.median(step_alone) / np.median(taken)
    print(f"{name}  {median:6.2f} ms  ({low:.2f} to {high:.2f}), efficiency {efficiency:.0%}")

expected = spread(predicted)
measured = spread(times["two devices"])
if expected.high < measured.low:
    print("missed: the step is longer than predicted")
elif measured.high < expected.low:
    print("missed: the step is shorter than predicted")
else:
    print("hit")

# %% [markdown]
# <details><summary>What came out</summary>
#
# If the step is longer than predicted, then a step on two devices costs something that neither of
# the two terms has. Two simulated devices share the memory's bandwidth, for example, and one Python
# pushes the operators of both. Which of these it is, this experiment can't say. (Other programs
# disturb the measurement. `race` says so if there were any; then run the section again.)
#
# </details>
#
# ## So, how far?
#
# - **About until a device communicates for as long as it computes**, because then half of the time
#   is lost where nothing overlaps. Both times can be estimated before
#   anything is bought. For a transformer on our H100s that is where a device has fewer than about
#   1,200 tokens, whatever the transformer's size.
# - **In weak scaling each device keeps its share.** In MXNet's table efficiency falls little for
#   two of three networks: 256 GPUs kept 86 and 90 %, and 53 % for AlexNet. But a batch that grows
#   with the devices changes the training (deeper: Batch, rate and warm-up). So in the end the limit
#   is the batch that still trains well.
# - **Measure before you believe it.** A line that fits up to 16 devices was up to 33 % off on 32.
#
# ## Summary
#
# - Strong scaling divides the same batch, and its efficiency is $t_1 / (k\,t_k)$. Weak scaling
#   keeps each device's share, and its efficiency is $t_1 / t_k$.
# - Efficiency depends on communication against computing: bytes over bandwidth against operations
#   over operations a second. For a transformer the operations for each byte of gradients are about
#   three times the tokens of a device, whatever its size.
# - Least squares fits two terms to any points. Judge them by what they weren't fitted to.
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
#    and 2 · 7 between machines. Let each round cost 10 µs besides its bytes. For which of the three
#    networks does that change the efficiency, and why?
# 2. **A faster device.** A new device computes twice as fast on the same link. How does the
#    efficiency of the transformer change, with 8,192 tokens a device? And how many tokens does it
#    need for the efficiency of before?
# 3. **Another term.** In a ring the second term isn't $b\,k$ but $b\,(k-1)/k$. Fit it to the
#    published steps from 1 to 16, and ask it for 32. For which networks does it come closer than
#    the line?

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
# Most of all for LeNet: the latencies take 0.28 ms, more than thirty times its computing, leaving
# an efficiency of 3 %. ResNet-18 falls from 89 to 78 %. For the transformer they are nothing beside
# 870 ms of computing. So for small networks the number of rounds decides, as in chapter 03.

# %% tags=["solution"]
latencies = (2 * 7 + 2 * 7) * 10e-6
found = {}
for name in parameters:
    computing = operations[name] / reached
    communication = all_reduce_seconds(2 * parameters[name])
    before = computing / (computing + communication)
    found[name] = computing / (computing + communication + latencies)
    print(f"{name:11} efficiency {before:.1%}, with latencies {found[name]:.1%}")
assert found["LeNet"] < 0.04 and found["ResNet-18"] < 0.8 and found["transformer"] > 0.86

# %% [markdown]
# ### Answer 2
#
# It falls from 87 to 77 %, because computing halves and communication doesn't. With twice the
# tokens it is 87 % again. So **a faster device scales worse**, unless its link gets faster, too, or
# its share of the batch larger.

# %% tags=["solution"]
for speed, tokens in [(1, 8192), (2, 8192), (2, 16384)]:
    computing, communication = transformer(tokens)
    computing = computing / speed
    efficiency = computing / (computing + communication)
    print(f"{speed} times as fast, {tokens:6,} tokens: {efficiency:.0%}")

# %% [markdown]
# ### Answer 3
#
# The fit is the same, with $(k-1)/k$ as the number on the horizontal axis. It is closer for all
# three at 32, and for ResNet-152 it is 1 % off. For AlexNet it is 21 % too short, since it can't
# grow from 8 to 16 GPUs as the published step does.

# %% tags=["solution"]
ring_share = (counts - 1) / counts
for name in seconds:
    on_32 = images_each[name] * 32 / beyond[name][0]
    a, b = fit_two_terms(counts, seconds[name])
    line_off = (a + b * 32) / on_32 - 1
    a, b = fit_two_terms(ring_share, seconds[name])
    ring_off = (a + b * 31 / 32) / on_32 - 1
    print(f"{name:12} the line is off by {line_off:+.0%}, the ring's term by {ring_off:+.0%}")
    assert abs(ring_off) < abs(line_off)
