# %% [markdown]
# # 01 · Devices and arrays
#
# With a second device, training can take half the time, or longer than before. To find out which,
# you must know where each array is, when a computation has finished, and how long a copy takes.
# This chapter shows how.
#
# ## What you'll do
#
# Train a model with one weight on two devices. Compare three ways to divide a network's work. Move
# arrays, and measure what it costs.
#
# ## What you'll learn
#
# - how a *context* decides where computation happens;
# - what is held and sent when work is divided by layer, inside layers, or by data;
# - when `as_in_context` and `copyto` copy, and where gradients end up;
# - why you wait before you stop a clock, and what a copy costs.
#
# ## What you need
#
# Python, NumPy, and what a convolutional network is. **No GPU.** Reading takes {reading time},
# running less than a minute.

# %% [markdown]
# ## Training on two devices
#
# A *device* is something with memory and cores: a GPU, or a CPU. `devices(2)` returns two GPUs if
# MXNet can use two, and otherwise (or with `COURSE_SIMULATE=1`) two *simulated* devices. MXNet
# gives each of the names `cpu(0)`, `cpu(1)`, … a queue of work and a thread of its own, so on two
# cores two of them really compute at the same time. The difference from GPUs that matters most
# here: they share the host's memory. `helpers` is imported first because MXNet reads its settings
# while it loads.

# %% tags=["measured"]
from helpers import devices

import mxnet as mx
from mxnet import autograd, nd

two = devices(2)
a = nd.array([1, 2, 3], ctx=two[1])
a

# %% [markdown]
# The name of a device is a *context*, shown after the `@`. An operation runs on the device that
# holds its inputs and leaves its result there. So you place the data, and the computation follows.

# %%
b = nd.exp(a) * 2 + 1
assert b.context == two[1], "a result is where its inputs are"

# %% [markdown]
# Four examples of $y = 3x$, two on each device. The model is $y = wx$, and each device gets a copy
# of its one weight. `attach_grad` sets memory aside for the gradient, and `backward` fills it.

# %%
x = [nd.array([1, 2], ctx=two[0]), nd.array([3, 4], ctx=two[1])]
y = [3 * shard for shard in x]
w = [nd.zeros(1, ctx=device) for device in two]
for replica in w:
    replica.attach_grad()

# %% [markdown]
# **Predict:** at $w = 0$ the gradient of the squared error is $-2\sum x_i y_i$. What is it on each
# device?

# %%
def gradients():
    for r in range(2):
        with autograd.record():
            loss = ((w[r] * x[r] - y[r]) ** 2).sum()
        loss.backward()
    return w[0].grad, w[1].grad


print([g.asscalar() for g in gradients()])

# %% [markdown]
# Each device has the gradient of its own examples; the gradient of all four is the sum, −180.
# Twenty steps of gradient descent with that sum:

# %% tags=["trains"]
for replica in w:
    replica[:] = 0
for step in range(20):
    first, second = gradients()
    total = first + second.as_in_context(two[0])
    for replica in w:
        replica -= 0.01 * total.as_in_context(replica.context)
    assert step or abs(w[0].asscalar() - 1.8) < 1e-5, "the first step is 0.01 · 180"
assert [replica.context for replica in w] == two, "a replica on each device"
assert all(abs(replica.asscalar() - 3) < 1e-6 for replica in w), "both replicas must reach w = 3"

# %% [markdown]
# This is *data parallelism*. With $k$ devices, in each step:
#
# 1. each device holds a copy of the model, a *replica*;
# 2. the batch is cut into $k$ *shards*, one for each device (chapter 02);
# 3. each device computes the gradient of its shard, all at the same time;
# 4. every device receives the sum of these gradients (chapter 03);
# 5. every device makes the same update, so the replicas stay equal (chapter 04).

# %% [markdown]
# ## Three ways to divide the work
#
# A training step does some work for each layer and each example, so one can also cut *by layer*,
# giving whole layers to each device (pipeline parallelism), or *inside layers*, giving each device
# half of every layer's outputs (tensor parallelism). *Dive into Deep Learning* compares these
# three.
#
# What must each device hold? A training step needs memory for *weights*; for their *gradients*,
# just as large; for the *optimizer's state*, nothing for plain gradient descent and two numbers
# for each weight with Adam; and for *activations*, the outputs of all layers, kept for the
# backward pass. We count those of chapter 04's LeNet, as if the outputs of each layer, relu
# and pooling were kept; relu in place would save some.

# %%
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, GREY, ORANGE, show

import numpy as np

LAYERS = ["convolution 1", "convolution 2", "dense 1", "dense 2"]
weights = np.array([20 * 1 * 9 + 20, 50 * 20 * 25 + 50, 800 * 128 + 128, 128 * 10 + 10])
# Sides of the images: 28; 26 after a 3 × 3 convolution; halved, 13; 9 after 5 × 5; halved, 4.
passed = np.array([20 * 13 * 13, 50 * 4 * 4, 128, 10])  # per example, to the next layer
relus = np.array([20 * 26 * 26, 50 * 9 * 9, 128, 0])
layer = passed + relus * [2, 2, 1, 0]  # before and after relu; dense 1 passes on the second
print(f"{weights.sum():,} weights; {layer.sum():,} activations for each example, "
      f"{relus.sum() / layer.sum():.0%} less with relu in place")

# %% [markdown]
# Now batch 256 on two devices, in float32, 4 bytes a number. *By layer*, we cut after the first
# convolution, since a cut after the second would leave one device with 40.7 MB and the other with
# 2.8. Each step sends the activations at the cut forward, and their gradients back. *Inside
# layers*, each device needs the other half of each layer's input, and on the way back the same
# amounts cross again. *By data* sends each device's gradients. **Predict** which sends least.

# %%
n, MB = 256, 4 / 1e6


def accounts(weights, activations):  # MB of weights, gradients, Adam's state, activations
    return MB * np.array([weights, weights, 2 * weights, n * activations])


def by_layer(after):
    return [accounts(weights[:after].sum(), layer[:after].sum()),
            # its own layers, and the input that it received
            accounts(weights[after:].sum(), layer[after:].sum() + passed[after - 1])]


# half of what isn't passed on, every later layer's whole input, half of the ten outputs
all_of, sliced = weights.sum(), (layer - passed).sum() / 2 + passed[:-1].sum() + 5
held = {"by layer": by_layer(1), "inside layers": [accounts(all_of / 2, sliced)] * 2,
        "by data": [accounts(all_of, layer.sum() / 2)] * 2}
sent = MB * np.array([n * passed[0], n * passed[:-1].sum(), all_of])
assert sent.argmin() == 2, "by data sends least"
assert [round(part.sum(), 1) for part in by_layer(2)] == [40.7, 2.8], "cut one layer later"
assert held["by layer"][1][3] > MB * n * layer[1:].sum(), "and what it received"
print(f"one device alone holds {accounts(all_of, layer.sum()).sum():.1f} MB")
for (cut, (first, second)), crossing in zip(held.items(), sent):
    print(f"{cut:13} holds {first.sum():4.1f} and {second.sum():4.1f} MB, "
          f"each sends {crossing:.1f} MB")

# %% [markdown]
# With the memory on a logarithmic axis:

# %%
def draw_cut(ax, cut):
    for row, half, color in ((r, h, c) for r in range(4) for h, c in enumerate((BLUE, ORANGE))):
        place, wide, high, left = {"by layer": (row, 8 * (half == (row > 0)), 0.8, 0),
                                   "inside layers": (row - 0.2 + 0.4 * half, 8, 0.4, 0),
                                   "by data": (row, 4, 0.8, 4 * half)}[cut]
        ax.barh(place, wide, high, left, color=color)
    ax.set(title=cut, xlabel="examples", xlim=(0, 8), ylim=(3.5, -0.5), xticks=[0, 4, 8])


# %%
fig, axes = plt.subplots(2, 3, figsize=(7, 4.4), sharey="row", layout="constrained")
for ax, below, cut in zip(*axes, held):
    draw_cut(ax, cut)
    below.semilogy(range(4), accounts(all_of, layer.sum()), "_", ms=28, color="black", zorder=3,
                   label="one device alone")
    for device, (marker, color) in enumerate((("o", BLUE), ("s", ORANGE))):
        places = np.arange(4) + 0.3 * device - 0.15
        below.semilogy(places, held[cut][device], marker, color=color, label=f"device {device}")
    below.set_xticks(range(4), ["weights", "grad", "Adam", "act."])
axes[0, 0].set_yticks(range(4), LAYERS)
ticks = [0.001, 0.01, 0.1, 1, 10]
axes[1, 0].set(ylabel="MB held", yticks=ticks, yticklabels=ticks)
fig.legend(*below.get_legend_handles_labels(), loc="outside lower center", ncols=3)
fig.suptitle("By data: each example on one device, activations halved, weights not")
show(fig, alt="Above, layers against examples in the colours of two devices: whole rows, half "
              "rows, halves of the columns. Below, MB of weights, gradients, Adam's state and "
              "activations on each device, and on one device alone.")

# %% [markdown]
# With this batch and this cut, data parallelism sends least. Its devices have equal work; by layer
# they take turns, unless the batch is cut into small ones that follow each other. But it halves
# only the activations. Weights, gradients and Adam's state take 2 MB on each device here; for a
# billion weights they would take 16 GB. *Sharded* data parallelism lifts that limit: each device
# keeps a part of the three, and gathers what it needs just in time (ZeRO: chapter 16). The other
# two cuts serve models that are too large for one device (exercise 1).

# %% [markdown]
# ## How devices are connected
#
# ![A server: a CPU with host memory; below it a PCIe switch whose one uplink four GPUs share, each
# with a memory of its own; NVLink between neighbouring GPUs.](src/drawings/server.svg)
#
# A GPU's memory is fast, and its own. Everything else is reached through slower links. GPUs behind
# one switch share its uplink: if four of them read from the host at the same time, each gets a
# quarter of it (*Dive into Deep Learning*, "Parameter Servers").
#
# | GB/s (links: in each direction) | | source |
# | --- | --- | --- |
# | memory of a V100, A100 (40 GB), H200 | 900, 1,555, 4,800 | [1], [1], [3] |
# | PCI Express ×16, generation 3, 4, 5 | 15.75, 31.5, 63 | [1], [1], computed |
# | NVLink, all links of a V100, A100, H100, Blackwell | 150, 300, 450, 900 | [1], [1], [2], [4] |
#
# NVIDIA: [1] "NVIDIA Ampere Architecture In-Depth" (2020); [2] "NVIDIA H100 Tensor Core GPU
# Architecture" (2023), section 4.7; [3] TensorRT-LLM, `docs/source/blogs/H200launch.md`; [4]
# "Topology-aware workload scheduling with NVIDIA Topograph" (2026). For NVLink they give both
# directions together; we halve. Computed: 16 lanes of 32 billion transfers a second, 128 of 130
# bits data.
#
# Simulated devices have none of this. What you learn here about *when* data is copied holds on
# GPUs; *how long* it takes does not carry over.

# %% [markdown]
# In `nvidia-smi`, a GPU that you forgot to use shows 0 % in `utilization.gpu`; `nvidia-smi topo
# -m` prints your machine's version of the drawing.

# %% tags=["measured"]
from shutil import which
from subprocess import run

print("GPUs that this build of MXNet sees:", mx.context.num_gpus())
if which("nvidia-smi"):
    columns = "index,name,memory.used,memory.total,utilization.gpu"
    ask = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv"]
    print(run(ask, capture_output=True, text=True).stdout)
else:
    print("no nvidia-smi here")

# %% [markdown]
# ## Creating and moving arrays
#
# Where is an array if you don't say where? In host memory, also on a machine with GPUs, unless a
# `with mx.gpu(0):` block says otherwise.

# %%
assert nd.zeros(3).context == mx.cpu() == mx.cpu(0), "the default is the host, device 0"
assert two[0] != two[1], "devices(2) gives two different devices"

# %% [markdown]
# An array never changes its context; to move it is to make another array elsewhere. **Predict:**
# in the second cell, what does `a` hold at the end?

# %%
a = nd.array([1, 2, 3], ctx=two[0])
there = a.as_in_context(two[1])
assert (a.context, there.context) == (two[0], two[1]), "the original stays where it was"

# %%
here = a.as_in_context(two[0])
here[0] = 100
print(a.asnumpy(), here is a)

# %% [markdown]
# `as_in_context` does nothing if there is nothing to move: `here` and `a` are two names for one
# array. A program that writes to the result changes the original on one device and a copy on the
# other. `copyto` copies even on the same device. Given an array instead of a device, it fills that
# array, which saves asking for memory in every step.

# %%
a = nd.array([1, 2, 3], ctx=two[0])
copy = a.copyto(two[0])
copy[0] = 100
assert a[0].asscalar() == 1, "a has not changed"

# %%
target = nd.zeros(3, ctx=two[1])
assert a.copyto(target) is target, "given an array, copyto fills it and returns it"
assert (target.context, target[0].asscalar()) == (two[1], 1), "and it keeps its place"

# %% [markdown]
# So use `as_in_context` to *read*, and `copyto` if either side will *write*. A moved array comes
# without gradient memory: for a replica, move first, then attach.

# %%
weight = nd.array([1, 2, 3], ctx=two[0])
weight.attach_grad()
replica = weight.copyto(two[1])
assert replica.grad is None, "a copy has the values, not the gradient"
replica.attach_grad()
assert replica.grad.context == two[1] != weight.grad.context, "a gradient is with its array"

# %% [markdown]
# ### When arrays on two devices meet
#
# What is `a + b` if `a` is on one device and `b` on the other? Operators don't move their inputs.
# (Assignment does: `a[:] = b` copies `b` to `a`'s device.) We try the sum in a separate process,
# for a reason that you'll see.

# %%
import sys
from subprocess import TimeoutExpired

program = f"""
import helpers
import mxnet as mx
a = mx.nd.array([1, 2, 3], ctx=mx.{two[0]})
b = mx.nd.array([10, 20, 30], ctx=mx.{two[1]})
print((a + b).asnumpy())
"""
try:
    child = run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    answer = child.stdout if child.returncode == 0 else f"failed: {child.stderr[-300:]}"
    assert two[0].device_type == "gpu" or answer.split() == ["[11.", "22.", "33.]"], answer
except TimeoutExpired:
    answer = "no answer in five minutes"
print(answer)

# %% [markdown]
# Simulated devices share memory, so the operator finds its second input, and the sum is right. On
# them the training at the beginning works even without its two moves; no check of values can see
# that.
#
# **On GPUs:** before it starts an operator, MXNet 1.9.1 compares the *kind* of device only
# (`GetContext` in `src/imperative/imperative_utils.h`). A GPU and a CPU raise at once: "require
# all inputs live on the same context". Two GPUs pass, and the operator gets an address in the
# other GPU's memory. Depending on the pair of GPUs, users report a right sum, "an illegal memory
# access was encountered" where the result is read, or a crash (apache/mxnet 18265, 11275, 21119);
# hence the process of its own.
#
# So write `a + b.as_in_context(a.context)`, which works everywhere.

# %% [markdown]
# ## Work that isn't done yet
#
# When Python comes back from `nd.dot`, is the product there? We read the clock after the call, and
# after `wait_to_read`, which returns once the values exist. **Predict:** does the call take about
# as long as the product, about half, or hardly any time?

# %% tags=["measured"]
from time import perf_counter

A = nd.random.uniform(shape=(1500, 1500), ctx=two[0])
A.wait_to_read()
start = perf_counter()
product = nd.dot(A, A)
called = perf_counter() - start
product.wait_to_read()
done = perf_counter() - start
print(f"the call returned after {called * 1e3:.2f} ms, the product was there after "
      f"{done * 1e3:.2f} ms")

# %% [markdown]
# The call only puts the work into the device's queue; the device's thread takes it from there.
# This *asynchrony* lets one Python program keep many devices busy. The loop looks sequential; with
# two free cores, two products on two devices should take about half as long as on one.

# %% tags=["measured"]
local = [A.as_in_context(device) for device in two]
for places in ([0, 0], [0, 1]):
    nd.waitall()
    start = perf_counter()
    products = [nd.dot(local[r], local[r]) for r in places]
    nd.waitall()
    print(f"two products on the devices {places}: {(perf_counter() - start) * 1e3:.0f} ms")

# %% [markdown]
# `nd.waitall()` waits for everything, on all devices. Calls that need values wait for them:
# `x.asnumpy()`, `x.asscalar()`, `print(x)`, `if x:`. Calls that fill an array from Python or
# NumPy, such as `nd.array(list)`, wait until it is filled. Most operators don't wait, nor do
# `as_in_context`, `copyto` and `backward()`. (On simulated devices `wait_to_read` and `nd.array`
# may also wait for other work on `cpu(0)`: MXNet 1.9.1 queues the wait there, `WaitForVar` in
# `src/engine/threaded_engine.cc`.) So a clock that is stopped without waiting measures how fast
# Python fills the queue, and a stray `print(loss)` in a training loop makes Python wait before it
# gives any device the next step.
#
# If work happens later, so do some errors. Wrong shapes raise at the call; errors that depend on
# *values* come later. A normal distribution can't have a negative width. **Predict:** which line
# raises, the one that asks for the numbers, the one that adds 1, or the one that waits?

# %%
noise = nd.random.normal(0, -1, shape=(2, 2), ctx=two[0])
shifted = noise + 1
try:
    shifted.wait_to_read()
    raised = False
except mx.MXNetError as error:
    raised = True
    print(str(error).splitlines()[-1].split(" : ")[-1])
assert raised, "the error of the first line should come out where we wait"
assert shifted.asnumpy().shape == (2, 2), "and only once: this read raises nothing"

# %% [markdown]
# The first two lines only queued work. So when a message points at an innocent line, look *above*
# it; `nd.waitall()` after each suspect line finds the culprit. MXNet 1.9.1 raises such an error
# once. Read `shifted` or `noise` again, or compute with them, and you get whatever is in their
# memory. After an `MXNetError`, start again from data that you trust.

# %% [markdown]
# ## What a copy costs
#
# We copy 16 stretches of a large array, which overlap for the largest sizes. A slice of
# consecutive rows of an `mx.nd` array is a window on its memory, so the copies ask for no new
# memory.

# %%
LARGEST, COPIES = 64_000_000, 16  # bytes, copies that are averaged
source = nd.ones(LARGEST // 4, ctx=two[0])  # a float32 has 4 bytes
target = nd.zeros(LARGEST // 4, ctx=two[1])

# %%
def windows(size):
    n = size // 4
    starts = [i * n % (len(source) - n + 1) for i in range(COPIES)]
    return [(source[at : at + n], target[at : at + n]) for at in starts]

# %% [markdown]
# Three clocks, each for one copy. *Alone*: copy, wait, then the next. *Queued*: all 16 copies,
# then wait. *Call*: the time until Python has made *queued*'s calls, without the wait. Whichever
# runs first finds the memory cold, so we copy once beforehand and let the two take turns at going
# first.

# %%
def copy_all(pairs, wait):
    nd.waitall()
    start = perf_counter()
    for here, there in pairs:
        here.copyto(there)
        if wait:
            there.wait_to_read()
    call = perf_counter() - start
    nd.waitall()
    return (perf_counter() - start) / COPIES, call / COPIES

# %%
def three_clocks(size, turn):
    pairs, times = windows(size), {}
    copy_all(pairs, wait=False)
    for wait in ((True, False), (False, True))[turn % 2]:
        times[wait] = copy_all(pairs, wait)
    return times[True][0], times[False][0], times[False][1]

# %% [markdown]
# Ten sizes, evenly spaced on a logarithmic axis, in eight rounds. (1 KB is $10^3$ bytes, 1 MB
# $10^6$.) **Predict:** from the first size to the last is a factor of 16,000. By what factor will
# the time grow?
#
# Our model: a *latency* $L$, paid for each copy however small, and the size over the *bandwidth*
# $B$, $t(s) = L + s/B$. `w=1 / alone` makes `polyfit` minimise relative errors; otherwise
# the largest sizes alone would decide.

# %% tags=["measured", "few:for turn in range(8)=>for turn in range(3)"]
sizes = np.geomspace(4e3, LARGEST, 10)
rounds = np.array([[three_clocks(int(size), turn) for size in sizes] for turn in range(8)])
low, middle, high = np.percentile(rounds, (10, 50, 90), axis=0)  # [10, 3] each, seconds
for c, name in enumerate(("alone", "queued", "call")):
    small = 1e6 * np.array([middle, low, high])[:, 0, c]
    print("{:6} 4 KB: {:5.1f} µs ({:.1f} to {:.1f})   ".format(name, *small) +
          f"64 MB: {middle[-1, c] * 1e6:6,.0f} µs")
alone = middle[:, 0]
per_byte, L = np.polyfit(sizes, alone, 1, w=1 / alone)
worst = np.abs((L + sizes * per_byte) / alone - 1).max()
print(f"L = {L * 1e6:.0f} µs, B = {1e-9 / per_byte:.1f} GB/s, off by up to {worst:.0%}")
print(f"alone, 64 MB take {alone[-1] / alone[0]:,.0f} times as long as 4 KB")
print(f"of the {alone[0] * 1e6:.0f} µs for 4 KB, copying at B takes {4e9 * per_byte:.1f}")

# %% tags=["measured"]
from helpers.plotting import GREEN, figure

speed = 1e-9 / per_byte
fig, ax = figure(f"A copy alone: about {L * 1e6:.0f} µs, plus its size at {speed:.1f} GB/s",
                 "size of the copy (MB)", "time of one copy (µs)")
ax.loglog(sizes / 1e6, 1e6 * (L + sizes * per_byte), color=GREY, lw=5, alpha=0.5, label="L + s/B")
looks = {"alone": ("o-", BLUE), "queued": ("s--", ORANGE), "call": ("^:", GREEN)}
for c, (name, (style, color)) in enumerate(looks.items()):
    spread = 1e6 * np.array([middle - low, high - middle])[:, :, c]
    ax.errorbar(sizes / 1e6, 1e6 * middle[:, c], spread, fmt=style, color=color, label=name)
ax.legend(frameon=False)
show(fig, alt="Time of one copy against its size on logarithmic axes: waited for one by one, "
              "queued, and the bare call, with bars from the 10th to the 90th percentile, and the "
              "fitted curve.")

# %% [markdown]
# At 4 KB, *queued* was not above *call* beyond the spread in our runs: Python needs that long to
# ask for a copy. *Alone* waits after every copy as well; we guess that the extra time goes into
# waking threads. Copying at $B$ takes little of it (last line above); simulated devices have no
# link. $L$ may change while other programs run (exercise 3).
#
# **On GPUs:** a copy runs on one of two threads that a GPU keeps for copies, which waits for the
# GPU after each (`CopyFromTo` in `src/ndarray/ndarray.cc`, `PushToExecute` in
# `src/engine/threaded_engine_perdevice.cc`, MXNet 1.9.1). So queued copies pay for that wait too.
#
# ### A prediction
#
# Chapter 04's LeNet has eight arrays of gradients, 129,068 numbers in all, that must travel in
# every step. **Before you run this:** what does your model say for eight copies, and for one of
# the same bytes?

# %% tags=["measured"]
shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
eight = [int(np.prod(shape)) for shape in shapes]


def seconds(lengths, place):
    ends = np.cumsum([place * sum(lengths), *lengths])  # a stretch of its own
    pairs = [(source[a:b], target[a:b]) for a, b in zip(ends, ends[1:])]
    return copy_all(pairs, wait=True)[0] * COPIES


ways = {"eight copies": eight, "one copy": [sum(eight)]}
times = np.array([[seconds(lengths, 2 * turn + way) for way, lengths in enumerate(ways.values())]
                  for turn in range(30)])
for (name, lengths), column in zip(ways.items(), times.T):
    expected = sum(L + 4 * n * per_byte for n in lengths)
    least, mid, most = 1e6 * np.percentile(column, (10, 50, 90))
    print(f"{name:12} predicted {expected * 1e6:3.0f} µs, "
          f"measured {mid:3.0f} µs ({least:.0f} to {most:.0f}), "
          f"{mid / expected / 1e6:.1f} times as much")

# %% [markdown]
# Where that is far from 1, the model has missed. The ratio doesn't say which of its assumptions
# failed: that $L$ is constant is only one.

# %% [markdown]
# ## Summary
#
# - Data parallelism: each device has a replica of the model and a shard of the batch; gradients
#   are summed, and every replica makes the same update. Cuts by layer or inside layers send
#   activations, and divide the weights, here very unevenly by layer.
# - Arrays are made with `ctx=` and stay there; an operation runs where its inputs are.
# - `as_in_context` returns the same object if nothing needs to move. Write only to what you know
#   to be a copy.
# - Don't let arrays from two devices meet.
# - Most operators return before they are done. Wait before you stop a clock. An error that depends
#   on values comes out where you wait, once.
# - A copy takes roughly latency + size / bandwidth. Measure both where you use them.
#
# **Further reading.** A. Zhang et al., *Dive into Deep Learning*, "Training on Multiple GPUs";
# *Deep Learning: The Straight Dope*, on NDArray and multiple GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **Cut by layer.** A network has two layers, $W_1 = \binom{1\ -1}{-1\ 1}$ on device 0 and $W_2
#    = \binom{3}{5}$ on device 1, with a ReLU between them. Compute both gradients of the sum of
#    its outputs for the examples (1, 2) and (3, 1), on two devices, and show that they equal one
#    device's. On which device is the gradient of $W_1$, and who sent it there?
# 2. **A lost gradient.** Move an array with a gradient to the other device *before* `record()`,
#    and compute a loss from it there. Where does its gradient end up?
# 3. **Your own machine (open).** Measure $L$ and $B$ again while another program keeps a core
#    busy, and for copies within one device. Then time eight gradients copied into one flat array,
#    sent, and copied out again.

# %% [markdown]
# ### Answer 1
#
# `W1`'s gradient is on device 0. The crossing is recorded like any other operation; the derivative
# of a copy to device 1 is a copy back to device 0, so autograd sent it.

# %% tags=["solution"]
def by_layer(first, second):
    W1, W2 = nd.array([[1, -1], [-1, 1]], ctx=first), nd.array([[3], [5]], ctx=second)
    W1.attach_grad()
    W2.attach_grad()
    with autograd.record():
        h = nd.relu(nd.dot(nd.array([[1, 2], [3, 1]], ctx=first), W1))
        received = h.as_in_context(second)
        loss = nd.dot(received, W2).sum()
    assert (h.context, loss.context) == (first, second), "each layer on its device"
    loss.backward()
    return W1.grad, W2.grad


for places in ([two[0], two[0]], two):
    found = by_layer(*places)
    assert [g.context for g in found] == places, "a gradient is where its weights are"
    assert [g.asnumpy().tolist() for g in found] == [[[9, 5], [3, 10]], [[2], [1]]], "by hand"

# %% [markdown]
# ### Answer 2
#
# Nowhere: `backward` raises, since nothing in the loss has a gradient attached; the move was not
# recorded. Give the moved array one, and the error is gone. The original's gradient is still 0,
# and nothing is said.

# %% tags=["solution"]
v = nd.array([1, 2], ctx=two[0])
v.attach_grad()
moved = v.copyto(two[1])
for raises in (True, False):
    with autograd.record():
        loss = (moved * moved).sum()
    try:
        loss.backward()
        assert not raises, "backward should find nothing to differentiate"
    except mx.MXNetError:
        assert raises, "with a gradient attached there is something to differentiate"
        moved.attach_grad()
assert moved.grad.asnumpy().tolist() == [2, 4], "the derivative of the sum of v² is 2v"
assert v.grad.asnumpy().tolist() == [0, 0], "the move was not recorded"

# %% [markdown]
# ### Answer 3
#
# A good answer lets the cases take turns, gives medians with their spread, and says which
# differences are larger than it. It says what each clock contains. For the flat array it counts
# the copies in and out, which can cost more than they save.
