# %% [markdown]
# # Deeper · A time budget that closes
#
# Chapter 10 draws what two devices do during a step. Here we add it up: how many milliseconds are
# compute, communication, update, Python and waiting? And do the five parts add up to what a clock
# says?
#
# ## What you'll do
#
# Split the time of a step into five parts, for three networks on one device and on two. Hold the
# sum against the clock. Then follow three of the losses: compute that takes longer, updates that
# are not divided, and sizes that the library has no fast program for.
#
# ## What you'll learn
#
# - how to split a lane into parts, and how to test that on a recording made by hand;
# - where two devices lose time, part by part;
# - how much the sizes of layers can matter, and how to find out.
#
# ## What you need
#
# Chapters 08 and 10, two cores, and 4 GB of free memory. No GPU and no data.
# Reading takes {reading time}, running about a minute.

# %%
import json
from functools import partial
from time import perf_counter

from helpers import split_and_load
from helpers.networks import lenet
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show
from helpers.timing import Others, in_turns, print_times, spread
from helpers.trace import Recording, read, record

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## The five parts of a lane
#
# We go through the events of one lane, from left to right. An event's time goes to its kind. The
# time between two events is idle. As long as Python was still handing out work, we count it as
# *Python*, and the rest as *waiting*.

# %%
PARTS = ["compute", "communication", "update", "Python", "waiting"]


def add_idle(spent, begin, end, handed_out):
    python = 0
    if begin < handed_out:
        python = min(end, handed_out) - begin
    spent["Python"] += python
    spent["waiting"] += end - begin - python


def lane_budget(events, recording):
    spent = dict.fromkeys(PARTS, 0.0)
    now = 0.0
    for event in events:
        add_idle(spent, now, event.start, recording.handed_out)
        spent[event.kind] += event.duration
        now = event.end
    add_idle(spent, now, recording.length, recording.handed_out)
    return spent

# %% [markdown]
# (Compute is time by the clock, so it includes moments in which another program had the core.) The
# budget of a step is the mean over its lanes:

# %%
def budget(recording):
    spent = dict.fromkeys(PARTS, 0.0)
    for events in recording.lanes.values():
        for part, milliseconds in lane_budget(events, recording).items():
            spent[part] += milliseconds / len(recording.lanes)
    return spent

# %% [markdown]
# ### A recording made by hand
#
# Is that right? We write a trace whose answer we know, as MXNet's profiler writes it: in
# microseconds, on a clock that began long ago. The recording begins at 100 seconds. Python has
# handed out all the work after 1.75 ms, and the step ends after 5 ms.

# %%
BEGIN = 100  # seconds
trace = [{"ph": "M", "pid": 0, "name": "", "args": {"name": "cpu/0"}},
         {"ph": "M", "pid": 1, "name": "", "args": {"name": "cpu/1"}}]


def note(device, name, start, end):  # ms after the beginning
    for phase, milliseconds in [("B", start), ("E", end)]:
        trace.append({"ph": phase, "pid": device, "tid": 70 + device, "name": name,
                      "ts": BEGIN * 1e6 + milliseconds * 1e3})


note(0, "dot", 1, 1.5)
note(0, "CopyCPU2CPU", 1.5, 2.5)
note(0, "sgd_mom_update", 2.5, 4)
note(1, "dot", 2, 4)
note(1, "ElementwiseSum", 4, 5)

by_hand = Recording(read(json.dumps({"traceEvents": trace}), BEGIN), handed_out=1.75, length=5)
for lane, events in by_hand.lanes.items():
    print(lane, lane_budget(events, by_hand))
print("mean  ", budget(by_hand))

# %% [markdown]
# `cpu(0)` is idle for 1 ms before its product, and at the end for 1 ms. `cpu(1)` is idle for 2 ms:
# 1.75 until Python was done, and 0.25 more.

# %% tags=["fold"]
# check: the budget by hand, part by part, and that it fills the step; the events are those noted
assert lane_budget(by_hand.lanes["cpu(0)"], by_hand) == {
    "compute": 0.5, "communication": 1, "update": 1.5, "Python": 1, "waiting": 1}
assert lane_budget(by_hand.lanes["cpu(1)"], by_hand) == {
    "compute": 2, "communication": 1, "update": 0, "Python": 1.75, "waiting": 0.25}
assert budget(by_hand) == {
    "compute": 1.25, "communication": 1, "update": 0.75, "Python": 1.375, "waiting": 0.625}
assert sum(budget(by_hand).values()) == 5
assert [event.start for event in by_hand.events] == [1, 1.5, 2, 2.5, 4], "ms from the beginning"
none = Recording([event for event in by_hand.events if event.lane == "cpu(0)"][:1], 5, 5)
assert budget(none)["Python"] == 4.5, "still handing out at the end"

# %% [markdown]
# ## Three networks
#
# Three kinds of step: LeNet; Gluon's own ResNet-18 for small images, hybridised; and *wide*, dense
# layers with many weights and little work for each.

# %%
def resnet18_v1():
    net = gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=True)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def wide():
    net = nn.HybridSequential()
    for _ in range(4):
        net.add(nn.Dense(2048, activation="relu"))
    net.add(nn.Dense(10))
    return net

# %% [markdown]
# `training_step` prepares a network on some devices and returns a function that trains one step.
# The images are random, and are split once.

# %% tags=["trains"]
def training_step(net, used, n, update_on_kvstore=None):
    net.initialize(mx.init.Xavier(), ctx=used)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01},
                            update_on_kvstore=update_on_kvstore)
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    x_shards = split_and_load(nd.random.uniform(shape=(n, 1, 28, 28)), used)
    y_shards = split_and_load(nd.arange(n) % 10, used)

    def step():
        losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                losses.append(cross_entropy(net(x_shard), y_shard))
        autograd.backward(losses)
        trainer.step(n)

    for _ in range(2):
        step()  # warms up
    return step

# %% [markdown]
# Within a recording the parts fill the step by construction. Do they add up to a step that isn't
# recorded, too? So three steps go one after the other: one that nobody measures (straight after
# another network's, a step may take longer), one with a clock only, and one that is recorded.

# %% tags=["trains"]
def clock_and_budget(step):
    step()
    nd.waitall()
    begin = perf_counter()
    step()
    nd.waitall()
    milliseconds = 1e3 * (perf_counter() - begin)
    return milliseconds, budget(record(step))

# %% [markdown]
# One disturbed step shouldn't count. So we sort the rounds by length and average the middle third
# of them, or a little more.

# %%
def middle(rows):
    rows = sorted(rows, key=np.sum)
    left_out = len(rows) // 3
    return np.mean(rows[left_out:len(rows) - left_out], axis=0)

# %% [markdown]
# **Predict:** which part of LeNet's step on two devices is the largest after compute? And of the
# wide network's?

# %% tags=["fold", "measured", "trains", "few:LENET = 9=>LENET = 3", "few:REST = 6=>REST = 2"]
# measure: clock and budget of three networks on one device and on two, in turns
LENET = 9
REST = 6
clocks, budgets, lost, quiet = {}, {}, {}, {}
print(f"{'':20} devices  clock  = " + " + ".join(PARTS) + ";  clock − sum")
for name, make, n, count in [("LeNet, batch 256", lenet, 256, LENET),
                             ("ResNet-18, batch 32", resnet18_v1, 32, REST),
                             ("wide, batch 32", wide, 32, REST)]:
    steps = {1: training_step(make(), pair[:1], n), 2: training_step(make(), pair, n)}
    by_clock, by_part = {1: [], 2: []}, {1: [], 2: []}
    with Others() as others:
        for _ in range(count):
            for k, step in steps.items():
                milliseconds, spent = clock_and_budget(step)
                by_clock[k].append([milliseconds])
                by_part[k].append([spent[part] for part in PARTS])
    widths = []  # of the middle half of all lengths, as a share of the median
    for rows in [*by_clock.values(), *by_part.values()]:
        low, median, high = spread(np.sum(rows, axis=1))
        widths.append((high - low) / median)
    quiet[name] = others.share <= 0.02 and max(widths) <= 0.04
    lost[name] = np.array(by_part[2]) - np.array(by_part[1]) / 2
    for k in steps:
        clocks[name, k] = middle(by_clock[k])[0]
        budgets[name, k] = middle(by_part[k])
        print(f"{name:20}    {k}   {clocks[name, k]:6.1f}  = "
              + " + ".join(f"{ms:.1f}" for ms in budgets[name, k])
              + f";  {1 - budgets[name, k].sum() / clocks[name, k]:+.1%}"
              + ("" if quiet[name] else " (disturbed: not checked)"))
    print(f"{'':20} speed-up {clocks[name, 1] / clocks[name, 2]:.2f}")
for name, rows in lost.items():
    missing = clocks[name, 2] - clocks[name, 1] / 2
    print(f"\n{name}: {missing:.1f} ms longer than half of one device's time")
    for part, column in zip(PARTS, rows.T):
        low, median, high = spread(column)
        print(f"    {part:13} {median:6.1f} ms  ({low:.1f} to {high:.1f})")

# %% tags=["fold"]
# check: in a quiet run the five parts add up to the clock, within 5 %
for (name, k), parts in budgets.items():
    if quiet[name]:
        assert abs(1 - parts.sum() / clocks[name, k]) <= 0.05, "recorded steps differ"
for name in quiet:
    assert budgets[name, 1][PARTS.index("communication")] < 0.02 * clocks[name, 1], "no store"
    assert budgets[name, 2][PARTS.index("communication")] > 0

# %% [markdown]
# All times are in ms. In the table, the last number says by how much the clock of an unrecorded
# step differs from the sum of a recorded one's parts. It is checked where the machine was quiet:
# other programs took at most 2 % of it, and the middle half of all times is no wider than 4 %.
#
# ### Where the time is lost
#
# With a speed-up of 2, a step on two devices would take half of one device's time. The rest is
# lost. The last lines have it for each part: its mean over both lanes, minus half of its time on
# one device; medians over the rounds, and the range of the middle half.

# %% tags=["fold"]
# draw: half of one device's step, and two devices' step, in five parts
import matplotlib.pyplot as plt

LOOKS = {"compute": (BLUE, ""), "communication": (ORANGE, "//"), "update": (GREEN, "xx"),
         "Python": (GREY, ""), "waiting": ("white", "")}
times_half = [f"{2 * clocks[name, 2] / clocks[name, 1]:.2f}" for name in quiet]
fig, ax = figure(f"Two devices take {', '.join(times_half)} times half of one's time",
                 "step time / half of one device's (thick line: the clock)", size=(7.0, 3.6))
labels = []
for row, name in enumerate(quiet):
    half = clocks[name, 1] / 2
    labels.append(f"{name}\nhalf of one,\ntwo devices")
    for place, parts in [(row - 0.2, budgets[name, 1] / 2), (row + 0.2, budgets[name, 2])]:
        left = 0
        for part, milliseconds in zip(PARTS, parts):
            color, hatch = LOOKS[part]
            ax.barh(place, milliseconds / half, 0.36, left=left, color=color, hatch=hatch,
                    edgecolor="black", lw=0.5)
            left += milliseconds / half
    ax.plot([clocks[name, 2] / half] * 2, [row, row + 0.4], color="black", lw=3)
ax.axvline(1, color="black", ls=":", lw=1)
ax.set_yticks(range(len(labels)), labels, fontsize=8)
ax.invert_yaxis()
patches = [plt.Rectangle((0, 0), 1, 1, fc=color, hatch=hatch, ec="black", lw=0.5)
           for color, hatch in LOOKS.values()]
fig.legend(patches, PARTS, loc="outside lower right", ncols=5, fontsize=8)
show(fig, alt="Three pairs of bars, each split into five parts. The upper bar of a pair is half of "
              "one device's step, the lower one two devices' step. A thick line marks what the "
              "clock said.")

# %% [markdown]
# In our quiet runs:
#
# - *LeNet* misses half of one device's time by a few ms, partly in Python and waiting.
# - *ResNet-18* loses most to communication, then to waiting and to compute.
# - *The wide network* is slower on two devices. Communication takes about as long as compute. Its
#   updates are not divided: each step updates every weight, here on one lane, and meanwhile the
#   other waits. (One device has no store, and updates several arrays at a time.)
#
# ## Why does compute take longer?
#
# On two devices, ResNet-18's compute is more than half of one device's. Two things are different.
# The shard is smaller, and both devices compute at once. Which one is it? We measure three steps in
# turns: one device with all 32 images, one device with 16, and both devices.

# %% tags=["measured", "trains", "few:ROUNDS = 4=>ROUNDS = 1"]
ROUNDS = 4
whole_batch = training_step(resnet18_v1(), pair[:1], 32)
shard_alone = training_step(resnet18_v1(), pair[:1], 16)
both_devices = training_step(resnet18_v1(), pair, 32)
alone = []
beside = []
for _ in range(ROUNDS):
    half = budget(record(whole_batch))["compute"] / 2
    alone.append(budget(record(shard_alone))["compute"] / half)
    beside.append(budget(record(both_devices))["compute"] / half)

print("compute / half of the whole batch's: median (middle half)")
for name, ratios in [("the shard alone", alone), ("beside the other", beside)]:
    low, median, high = spread(ratios)
    print(f"{name:16} {median:.2f} ({low:.2f} to {high:.2f})")

# %% [markdown]
# If the first number is above 1, the smaller shard costs something by itself. If the second is
# above the first, so does the company. In our runs neither was stable: one printed 0.98 and 1.13,
# another 1.05 and 1.05. So we can't say which it is.
#
# ## Updates on each device
#
# With `update_on_kvstore=False` the store only sums, and each device updates its own replica. Then
# no lane waits for the other's updates. Does the wide network's step get shorter? **Predict** first
# what happens to the time of updates.

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
in_store = training_step(wide(), pair, 32)
on_each = training_step(wide(), pair, 32, update_on_kvstore=False)
times = in_turns({"updates in the store": in_store, "on each device": on_each}, ROUNDS)
print_times(times)

for name, step in [("in the store", in_store), ("on each device", on_each)]:
    rows = []
    for _ in range(ROUNDS):
        rows.append(list(budget(record(step)).values()))
    print(f"{name:14}", ", ".join(f"{part} {ms:.1f} ms" for part, ms in zip(PARTS, middle(rows))))

# %% [markdown]
# The lanes wait less, but each weight is updated twice, and the lanes' mean of updates grows. In
# our runs the step was from a seventh shorter to a little longer. (The parts are of other steps
# than the times.)
#
# ## Sizes that fit
#
# Compute is the largest part of LeNet's step. Must it be? In MXNet's CPU build, convolutions run in
# oneDNN, which has several programs for them and chooses by the sizes. LeNet has 20 and 50
# channels. What if it had 16 and 48?

# %%
def lenet_of(first, second):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(first, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(second, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


def multiplications(first, second):  # of the two convolutions and two dense layers, an image
    return first * 9 * 26**2 + first * second * 25 * 9**2 + second * 16 * 128 + 128 * 10


share = multiplications(16, 48) / multiplications(20, 50)
print(f"16 and 48 channels have {share:.2f} times the multiplications of 20 and 50")

# %% [markdown]
# oneDNN says which program it takes, if `DNNL_VERBOSE=1` is set when a process starts. So we run a
# forward and a backward pass in a process of its own and read what it prints: fields between
# commas, the fourth the operator, the fifth the program.

# %%
import os
import subprocess
import sys

PROGRAM = """
import sys
from mxnet import autograd, nd
from mxnet.gluon import nn
net = nn.HybridSequential()
net.add(nn.Conv2D(int(sys.argv[1]), 3, activation="relu"), nn.MaxPool2D(2, 2),
        nn.Conv2D(int(sys.argv[2]), 5))
net.initialize()
with autograd.record():
    out = net(nd.ones((64, 1, 28, 28)))
out.backward()
nd.waitall()
"""


def programs(first, second):
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(first), str(second)], check=True,
                          capture_output=True, text=True, env={**os.environ, "DNNL_VERBOSE": "1"})
    found = {}
    for line in done.stdout.splitlines():
        fields = line.split(",")
        if "exec" in fields and fields[3] == "convolution":
            found[fields[4]] = found.get(fields[4], 0) + 1
    return found

# %% [markdown]
# We ask for both networks, then time them on one device and on two. **Predict:** which has the
# larger speed-up?

# %% tags=["measured", "trains", "few:ROUNDS = 6=>ROUNDS = 2"]
ROUNDS = 6


def three_steps_of(step):
    for _ in range(3):
        step()


ways = {}
for channels in [(20, 50), (16, 48)]:
    for used in [pair[:1], pair]:
        step = training_step(lenet_of(*channels), used, 256)
        ways[channels, len(used)] = partial(three_steps_of, step)
times = in_turns(ways, ROUNDS)

for channels in [(20, 50), (16, 48)]:
    one = 3 * 256 / spread(times[channels, 1]).median
    two = 3 * 256 / spread(times[channels, 2]).median
    low, median, high = spread(times[channels, 1] / times[channels, 2])
    print(channels, programs(*channels))
    print(f"{channels}: {one:,.0f} images/s on one device, {two:,.0f} on two; "
          f"speed-up {median:.2f} ({low:.2f} to {high:.2f})")

# %% [markdown]
# On machines with AVX-512, the convolutions with 16 and 48 channels get a program of their own,
# `jit:avx512_common`, and those with 20 and 50 a general matrix product, `x64:gemm:jit`. There the
# first network was more than twice as fast on one device: faster than the other on two. In most of
# our runs its speed-up was smaller. *A better speed-up is not a faster program*, so look at images
# per second too.
#
# ## Summary
#
# - A lane's time is compute, communication, update, Python and waiting. On a quiet machine the five
#   add up to what the clock says of a step that isn't recorded.
# - Communication, waiting and updates that are not divided are what two devices lose to. Which of
#   them is largest depends on the network.
# - A recording made by hand, which doesn't begin at zero, tests the sum.
# - Sizes that fit the library's programs can matter more than a second device.
