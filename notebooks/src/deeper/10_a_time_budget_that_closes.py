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
# sum against the clock. Then follow three losses of two devices: compute that isn't halved, updates
# that aren't divided, and sizes of layers that don't fit the library.
#
# ## What you'll learn
#
# - how to split a lane into parts, and how to test that on a recording made by hand;
# - where two devices lose time, part by part;
# - how much the sizes of layers can matter, and how to find out.
#
# ## What you need
#
# Chapters 07, 08 and 10, two cores, and 4 GB of free memory. No GPU and no data.
# Reading takes {reading time}, running about a minute.

# %%
from functools import partial
from time import perf_counter

from helpers import split_and_load
from helpers.networks import lenet
from helpers.timing import in_turns, print_times, spread
from helpers.trace import Event, Recording, record

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## The five parts of a lane
#
# How do we split the time of a lane? Here are chapter 10's lanes again:
#
# ![Two lanes from left to right. cpu(0): idle because of Python, compute, waiting, communication,
# update. cpu(1): idle because of Python, a longer compute, communication,
# waiting.](../src/drawings/lane_parts.svg)
#
# A lane does one thing at a time (chapter 10 checks it). So we go from event to event. An event's
# time goes to its kind. The time between two events is idle. As long as Python was still handing
# out work, we count it as *Python*, and the rest as *waiting*.

# %%
PARTS = ["compute", "communication", "update", "Python", "waiting"]


def add_idle(spent, begin, end, handed_out):
    python = 0
    if begin < handed_out:  # Python was still at work when the gap began
        python = min(end, handed_out) - begin
    spent["Python"] += python
    spent["waiting"] += end - begin - python


def lane_budget(events, recording):
    spent = dict.fromkeys(PARTS, 0.0)
    now = 0.0  # ms: up to here all time is counted
    for event in events:
        add_idle(spent, now, event.start, recording.handed_out)
        spent[event.kind] += event.duration
        now = event.end
    add_idle(spent, now, recording.length, recording.handed_out)
    return spent

# %% [markdown]
# The budget of a step is the mean over its lanes:

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
# Is that right? We make a recording whose answer we know. `dot` is compute, a copy and a sum are
# communication. Python has handed out all the work after 1.75 ms, and the step ends after 5 ms.

# %%
events = [
    Event("cpu(0)", "dot", start=1, duration=0.5),
    Event("cpu(0)", "CopyCPU2CPU", start=1.5, duration=1),
    Event("cpu(1)", "dot", start=2, duration=2),
    Event("cpu(0)", "sgd_mom_update", start=2.5, duration=1.5),
    Event("cpu(1)", "ElementwiseSum", start=4, duration=1),
]
by_hand = Recording(events, handed_out=1.75, length=5)
for lane, lane_events in by_hand.lanes.items():
    print(lane, lane_budget(lane_events, by_hand))
print("mean  ", budget(by_hand))

# %% [markdown]
# `cpu(0)` is idle for 1 ms before its product, and at the end for 1 ms. `cpu(1)` is idle for 2 ms:
# 1.75 until Python was done, and 0.25 more. The five means add up to the 5 ms of the step.

# %% tags=["fold"]
# check: the budget by hand, part by part; and the same events, read from a trace in MXNet's format
import json

from helpers.trace import read

assert lane_budget(by_hand.lanes["cpu(0)"], by_hand) == {
    "compute": 0.5, "communication": 1, "update": 1.5, "Python": 1, "waiting": 1}
assert lane_budget(by_hand.lanes["cpu(1)"], by_hand) == {
    "compute": 2, "communication": 1, "update": 0, "Python": 1.75, "waiting": 0.25}
assert budget(by_hand) == {
    "compute": 1.25, "communication": 1, "update": 0.75, "Python": 1.375, "waiting": 0.625}
assert sum(budget(by_hand).values()) == 5
none = Recording(events[:1], handed_out=5, length=5)
assert budget(none)["Python"] == 4.5, "still handing out at the end"

# The profiler writes microseconds, on a clock that began long ago: the recording begins at 100 s.
BEGIN = 100
trace = []
for device in [0, 1]:
    trace.append({"ph": "M", "pid": device, "name": "", "args": {"name": f"cpu/{device}"}})
for event in events:
    device = int(event.lane[4])
    for phase, milliseconds in [("B", event.start), ("E", event.end)]:
        trace.append({"ph": phase, "pid": device, "tid": 70 + device, "name": event.name,
                      "ts": BEGIN * 1e6 + milliseconds * 1e3})
assert read(json.dumps({"traceEvents": trace}), BEGIN) == events

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
# Within a recording the parts fill the step by construction. Do they also add up to a step that
# isn't recorded? Three steps go one after the other: one that nobody measures, since another
# network ran before it; one with a clock only; and one that is recorded.

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
# **Predict:** which part of LeNet's step on two devices is the largest after compute? And of the
# wide network's?
#
# The table has a line for each network on one device and on two. Its columns are the five parts in
# ms, their sum, the clock of the unrecorded steps, and by how much the clock differs from the sum.
# One disturbed step shouldn't count: we average the middle third of the rounds.
#
# Below that is what two devices *lose*. Twice as fast would be half of one device's time. So a
# part's loss is its time on two devices, minus half of its time on one: medians, and in brackets
# the middle half of the rounds.

# %% tags=["fold", "measured", "trains", "few:LENET = 9=>LENET = 3", "few:REST = 6=>REST = 2"]
# measure: clock and budget of three networks on one device and on two, in turns
import numpy as np
from helpers.timing import Others

LENET = 9
REST = 6
NETWORKS = {"LeNet": (lenet, 256, LENET), "ResNet-18": (resnet18_v1, 32, REST),
            "wide": (wide, 32, REST)}  # how to make it, images, rounds


def middle(rows):
    """The mean of the middle third of the rows by sum, or of a little more."""
    rows = sorted(rows, key=np.sum)
    left_out = len(rows) // 3
    return np.mean(rows[left_out:len(rows) - left_out], axis=0)


def clocked_round(steps):
    """Clock and parts for 1 and 2 devices, and what share of the machine others used."""
    found = {}
    with Others() as others:
        for k, step in steps.items():
            milliseconds, spent = clock_and_budget(step)
            found[k] = [milliseconds], [spent[part] for part in PARTS]
    return found, others.share


clocks, budgets, lost, quiet = {}, {}, {}, {}
print(f"{'ms':20}" + "".join(f"{part:>{len(part) + 2}}" for part in PARTS)
      + "     sum   clock  differ")
for name, (make, n, count) in NETWORKS.items():
    steps = {1: training_step(make(), pair[:1], n), 2: training_step(make(), pair, n)}
    rounds = [clocked_round(steps) for _ in range(count)]
    while sum(share <= 0.05 for _, share in rounds) < count and len(rounds) < count + 3:
        rounds.append(clocked_round(steps))  # in place of a disturbed one
    rounds.sort(key=lambda each: each[1])
    kept = [found for found, _ in rounds[:count]]  # those that others disturbed least
    widths = []  # of the middle half of all lengths, as a share of the median
    by_part = {}
    for k in steps:
        by_clock = [found[k][0] for found in kept]
        by_part[k] = [found[k][1] for found in kept]
        for rows in [by_clock, by_part[k]]:
            low, median, high = spread(np.sum(rows, axis=1))
            widths.append((high - low) / median)
        clocks[name, k] = middle(by_clock)[0]
        budgets[name, k] = middle(by_part[k])
        total = budgets[name, k].sum()
        print(f"{name:10} {k} {'devices' if k > 1 else 'device ':8}"
              + "".join(f"{ms:{len(part) + 2}.1f}" for part, ms in zip(PARTS, budgets[name, k]))
              + f" {total:7.1f} {clocks[name, k]:7.1f} {clocks[name, k] / total - 1:+7.1%}")
    quiet[name] = rounds[count - 1][1] <= 0.05 and max(widths) <= 0.04
    lost[name] = np.array(by_part[2]) - np.array(by_part[1]) / 2
for name in quiet:
    if not quiet[name]:
        print(f"{name}: disturbed. Its sums aren't checked, and its losses are not the text's.")

print("\nlost, ms     " + "".join(f"{name:>26}" for name in lost))
for place, part in enumerate(PARTS):
    line = f"{part:13}"
    for rows in lost.values():
        low, median, high = spread(rows[:, place])
        line += f"{f'{median:.1f} ({low:.1f} to {high:.1f})':>26}"
    print(line)
speed_ups = {name: budgets[name, 1].sum() / budgets[name, 2].sum() for name in lost}
print("speed-up     " + "".join(f"{each:26.2f}" for each in speed_ups.values()))

# %% tags=["fold"]
# check: in a quiet run the five parts add up to the clock, within 5 %
for (name, k), parts in budgets.items():
    if quiet[name]:
        assert abs(1 - parts.sum() / clocks[name, k]) <= 0.05, "recorded steps differ"
for name in quiet:
    assert budgets[name, 1][PARTS.index("communication")] < 0.02 * clocks[name, 1], "no store"
    assert budgets[name, 2][PARTS.index("communication")] > 0

# %% [markdown]
# On a quiet machine the clock and the sum differ by at most 5 %: the budget closes. In a disturbed
# run the clock may catch something that the recorded steps don't, or the other way round; a line
# below the table says so. From here on we read the parts and their sums.
#
# ### Where the time is lost

# %% tags=["fold"]
# draw: half of one device's step, and two devices' step, in five parts
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

LOOKS = {"compute": (BLUE, ""), "communication": (ORANGE, "//"), "update": (GREEN, "xx"),
         "Python": (GREY, ""), "waiting": ("white", "..")}
fig, ax = figure("What two devices lose lies right of the dotted line",
                 "step time / half of one device's", size=(7.0, 3.6))
labels = []
for row, name in enumerate(lost):
    half = budgets[name, 1].sum() / 2
    labels.append(f"{name}\nhalf of one,\ntwo devices")
    for place, parts in [(row - 0.2, budgets[name, 1] / 2), (row + 0.2, budgets[name, 2])]:
        left = 0
        for part, milliseconds in zip(PARTS, parts):
            color, hatch = LOOKS[part]
            ax.barh(place, milliseconds / half, 0.36, left=left, color=color, hatch=hatch,
                    edgecolor="black", lw=0.5)
            left += milliseconds / half
ax.axvline(1, color="black", ls=":", lw=1.5)
ax.set_yticks(range(len(labels)), labels, fontsize=8)
ax.invert_yaxis()
patches = [plt.Rectangle((0, 0), 1, 1, fc=color, hatch=hatch, ec="black", lw=0.5)
           for color, hatch in LOOKS.values()]
fig.legend(patches, PARTS, loc="outside lower right", ncols=5, fontsize=8)
show(fig, alt="Three pairs of bars, each split into five parts. The upper bar of a pair is half of "
              "one device's step, the lower one two devices' step, which is longer.")

# %% [markdown]
# In our quiet runs:
#
# - *LeNet* loses a few ms, most of them to waiting and Python.
# - *ResNet-18* loses to compute, communication and waiting. Which of them was largest changed from
#   run to run.
# - *The wide network* loses so much that two devices are about as slow as one. Much of it is
#   communication and waiting. Its compute isn't halved. Only update seems to be a gain.
#
# The wide network raises two questions. We take them in turn.
#
# ## Half of the batch, half of the compute?
#
# Its compute on two devices is more than half of one device's. Two things are different. The shard
# is smaller, and both devices compute at once. Which one is it? We record three steps in turns: one
# device with all 32 images, one device with 16, and both devices.

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 1"]
ROUNDS = 9
whole_batch = training_step(wide(), pair[:1], 32)
shard_alone = training_step(wide(), pair[:1], 16)
both_devices = training_step(wide(), pair, 32)
alone = []
beside = []
for _ in range(ROUNDS):
    half = budget(record(whole_batch))["compute"] / 2
    alone.append(budget(record(shard_alone))["compute"] / half)
    beside.append(budget(record(both_devices))["compute"] / half)

print(f"16 images, one device:   {spread(alone).median:.2f} times half of 32 images' compute")
print(f"16 and 16, both devices: {spread(beside).median:.2f} times")

# %% [markdown]
# If the first number is above 1, the smaller shard costs something by itself. It was, in all our
# runs: 16 images take clearly more than half the time of 32. What the second number has on top is
# the price of company. (A guess at the cause: each shard has few images, and yet all 12 million
# weights must be read.) **Keep:** half of a batch need not be half of the compute.
#
# ## Where are the updates?
#
# Why does update look like a gain? The store updates every weight on `cpu(0)` (chapter 10), and
# `cpu(1)` waits meanwhile. So the mean over both lanes has only half of the updates, and the other
# half is in *waiting*. With `update_on_kvstore=False` the store only sums, and each device updates
# its own replica.
#
# **Predict:** what becomes of update and waiting on each lane? Does the step get shorter?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
in_store = training_step(wide(), pair, 32)
on_each = training_step(wide(), pair, 32, update_on_kvstore=False)

for name, step in [("in the store", in_store), ("on each device", on_each)]:
    print(f"updates {name}:")
    recording = record(step)
    for lane, lane_events in recording.lanes.items():
        spent = lane_budget(lane_events, recording)
        print(f"    {lane} update {spent['update']:5.1f} ms, waiting {spent['waiting']:5.1f} ms")

times = in_turns({"in the store": in_store, "on each device": on_each}, ROUNDS)
print_times(times)

# %% tags=["fold", "trains"]
# check: the store's updates are all on cpu(0); with update_on_kvstore=False each lane has some
for step, expected in [(in_store, ["cpu(0)"]), (on_each, ["cpu(0)", "cpu(1)"])]:
    lanes = {event.lane for event in record(step).events if event.kind == "update"}
    assert sorted(lanes) == expected

# %% [markdown]
# On each device, both lanes update every weight, as one device does alone, and wait less. The work
# is done twice, at the same time. There is no winner here: in our quiet runs the step was from a
# seventh shorter to a twelfth longer. **Keep:** two devices don't divide updates.
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


def multiplications(first, second):  # of an image's forward pass
    convolution_1 = first * 3 * 3 * 26 * 26  # 28 - 3 + 1 = 26
    convolution_2 = second * first * 5 * 5 * 9 * 9  # 26 / 2 - 5 + 1 = 9
    dense_1 = 128 * second * 4 * 4  # 9 / 2, rounded down
    dense_2 = 10 * 128
    return convolution_1 + convolution_2 + dense_1 + dense_2


share = multiplications(16, 48) / multiplications(20, 50)
print(f"16 and 48 channels have {share:.2f} times the multiplications of 20 and 50")

# %% [markdown]
# oneDNN says which program it takes, if `DNNL_VERBOSE=1` is set when a process starts: its lines
# begin like `dnnl_verbose,exec,cpu,convolution,x64:gemm:jit`. `programs` runs a forward and a
# backward pass in a process of its own, and counts the programs of the convolutions.

# %% tags=["fold"]
# measure: `programs`, which reads what oneDNN prints
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
# We ask for both networks, and time them on one device and on two. **Predict:** which has the
# larger speed-up?

# %% tags=["measured", "trains", "few:ROUNDS = 6=>ROUNDS = 2"]
ROUNDS = 6
print("20 and 50 channels:", programs(20, 50))
print("16 and 48 channels:", programs(16, 48))


def three_steps_of(step):  # a longer turn is easier to time
    for _ in range(3):
        step()


ways = {}
for first, second in [(20, 50), (16, 48)]:
    on_one = training_step(lenet_of(first, second), pair[:1], 256)
    on_two = training_step(lenet_of(first, second), pair, 256)
    ways[f"{first} and {second}, one device"] = partial(three_steps_of, on_one)
    ways[f"{first} and {second}, two devices"] = partial(three_steps_of, on_two)
times = in_turns(ways, ROUNDS)

for name, seconds in times.items():
    print(f"{name:22} {3 * 256 / spread(seconds).median:7,.0f} images/s")
for channels in ["20 and 50", "16 and 48"]:
    ratios = times[f"{channels}, one device"] / times[f"{channels}, two devices"]
    low, median, high = spread(ratios)
    print(f"{channels}: speed-up {median:.2f} (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# On machines with AVX-512, the convolutions with 16 and 48 channels get a program of their own,
# `jit:avx512_common`, and those with 20 and 50 a general matrix product, `x64:gemm:jit`. There the
# first network was more than twice as fast on one device: faster than the other on two. In most of
# our runs its speed-up was smaller. **Keep:** a better speed-up is not a faster program. Look at
# images per second too.
#
# ## Summary
#
# - A lane's time is compute, communication, update, Python and waiting. On a quiet machine the five
#   add up, within 5 %, to what the clock says of a step that isn't recorded.
# - A recording made by hand tests how the parts are counted.
# - Two devices lose to communication, to waiting, to updates that aren't divided, and to compute
#   that isn't halved. Which is largest depends on the network.
# - Sizes that fit the library's programs can matter more than a second device.
