# %% [markdown]
# # 01 · Devices and arrays
#
# With a second device, training can take half the time, or exactly as long as before. Which of the
# two depends on plain questions: on which device is this array? Has this computation finished? How
# long does it take to copy that gradient? In this chapter you learn to ask them.
#
# ## What you'll do
#
# Train a model with one weight on two devices. Compare three ways to divide a network's work.
# Move arrays, and catch two of them sharing memory. Watch an operation return before it is done.
# Measure copies from 4 KB to 64 MB, and predict one that you haven't measured.
#
# ## What you'll learn
#
# - what a *context* is, and how it decides where computation happens;
# - what is held and what is sent when work is divided by layer, inside layers, or by data;
# - when `as_in_context` copies, when `copyto` does, and where gradients end up;
# - why you must wait before you stop a clock, and why errors come late;
# - what a copy costs, and what its constant part is made of.
#
# ## What you need
#
# Python, and arrays as in NumPy; deep learning as far as gradient descent. **No GPU.** Reading
# takes {reading time}, running less than a minute.

# %% [markdown]
# ## Training on two devices
#
# A *device* is something with memory and cores: a GPU, or a CPU. `devices(2)` returns two GPUs if
# the machine has them, and otherwise two *simulated* devices. MXNet gives each of the names
# `cpu(0)`, `cpu(1)`, … a queue of work and a thread of its own, so on two cores two of them really
# compute at the same time. They differ from GPUs in one way that matters: they share the host's
# memory. `helpers` is imported first because MXNet reads its settings while it loads.

# %% tags=["measured"]
from helpers import devices

import mxnet as mx
from mxnet import autograd, nd

two = devices(2)
a = nd.array([1, 2, 3], ctx=two[1])
a

# %% [markdown]
# The name of a device is a *context*, and each array has one, shown after the `@`. An operation
# runs on the device that holds its inputs and leaves its result there. So you place the data, and
# the computation follows.

# %%
b = nd.exp(a) * 2 + 1
assert b.context == two[1], "a result is where its inputs are"

# %% [markdown]
# That is enough to train with. Here are four examples of $y = 3x$, two on each device:

# %%
x = [nd.array([1, 2], ctx=two[0]), nd.array([3, 4], ctx=two[1])]
y = [3 * shard for shard in x]

# %% [markdown]
# The model is $y = wx$, and each device gets a copy of its one weight. `attach_grad` sets memory
# aside for the gradient, and `backward` fills it. **Predict:** at $w = 0$ the gradient of the
# squared error is $-2\sum x_i y_i$. What is it on each device?

# %%
w = [nd.zeros(1, ctx=device) for device in two]


def gradients():
    for r in range(2):
        w[r].attach_grad()
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
assert all(abs(replica.asscalar() - 3) < 1e-6 for replica in w), "both replicas must reach w = 3"

# %% [markdown]
# This is *data parallelism*. The rest of the course makes it fast, general and safe. With $k$
# devices, in each step:
#
# 1. each device holds a copy of the model, a *replica*;
# 2. the batch is cut into $k$ *shards*, one for each device (chapter 02);
# 3. each device computes the gradient of its shard, all at the same time;
# 4. every device receives the sum of these gradients (chapter 03);
# 5. every device makes the same update, so the replicas stay equal (chapter 04).

# %% [markdown]
# ## Three ways to divide the work
#
# Data isn't the only thing that can be cut. A training step does some work for each layer and each
# example, so one can also cut between the layers, or inside each layer. *Dive into Deep Learning*
# compares these three. Here they are for the LeNet of chapter 04:

# %%
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, ORANGE, show

LAYERS = ["convolution 1", "convolution 2", "dense 1", "dense 2"]
CUTS = ["by layer", "inside layers", "by data"]
fig, axes = plt.subplots(1, 3, figsize=(7, 2.4), sharey=True, layout="constrained")
for row in range(4):
    axes[0].barh(row, 8, 0.8, color=ORANGE if row else BLUE)
    for half, color in enumerate((BLUE, ORANGE)):
        axes[1].barh(row - 0.2 + 0.4 * half, 8, 0.4, color=color)
        axes[2].barh(row, 4, 0.8, left=4 * half, color=color)
for ax, cut in zip(axes, CUTS):
    ax.set(title=cut, xlabel="examples", xlim=(0, 8), ylim=(3.5, -0.5))
axes[0].set_yticks(range(4), LAYERS)
fig.suptitle("Cut by data, each example needs only one of the two devices")
show(fig, alt="Three diagrams of layers against examples in the colours of two devices: cut into "
              "whole rows, into half rows, and into halves of the columns.")

# %% [markdown]
# What does each device have to hold? A training step needs memory for four things: *weights*; their
# *gradients*, just as large; the *optimizer's state*, which is nothing for plain gradient descent
# and two more numbers for each weight with Adam; and *activations*, the outputs of all layers, kept
# for the backward pass. The first three depend on the network only, activations also on the number
# of examples. We count LeNet's, as if every layer's output were kept; a framework may keep a bit
# more or less.

# %%
import numpy as np

weights = np.array([20 * 1 * 9 + 20, 50 * 20 * 25 + 50, 800 * 128 + 128, 128 * 10 + 10])
passed = np.array([20 * 13 * 13, 50 * 4 * 4, 128, 10])  # per example, to the next layer
inside = np.array([2 * 20 * 26 * 26, 2 * 50 * 9 * 9, 128, 0])  # before pooling and relu
activations = inside + passed
print(f"{weights.sum():,} weights; {activations.sum():,} activations for each example")

# %% [markdown]
# Now batch 256 with Adam on two devices, in float32, 4 bytes a number. In each step, *by layer*
# sends the activations at the cut forward and their gradients back. *Inside layers*, each device
# computes half of each layer's output and sends it to the other, which needs all of it as input; on
# the way back the same amounts cross again. *By data* sends each device's gradients. **Predict**
# which of the three sends least.

# %%
n, MB = 256, 4 / 1e6
held = {  # numbers on each of the two devices: weights with gradients and Adam's state, activations
    "by layer": [4 * weights[0] + n * activations[0],
                 4 * weights[1:].sum() + n * (activations[1:].sum() + passed[0])],
    "inside layers": [2 * weights.sum() + n * (inside.sum() / 2 + passed.sum())] * 2,
    "by data": [4 * weights.sum() + n / 2 * activations.sum()] * 2,
}
sent = {"by layer": n * passed[0], "inside layers": n * passed[:-1].sum(), "by data": weights.sum()}
print(f"one device alone holds {MB * (4 * weights.sum() + n * activations.sum()):.1f} MB")
for cut in CUTS:
    first, second = (MB * numbers for numbers in held[cut])
    print(f"{cut:13}  holds {first:4.1f} and {second:4.1f} MB, each sends {MB * sent[cut]:.1f} MB")

# %% [markdown]
# For this network and batch, data parallelism sends least, and gives both devices the same work. But it
# halves only the activations: every device holds all weights, gradients and optimizer state. For LeNet
# these take 2 MB; for a billion weights they would take 16 GB. *Sharded* data parallelism lifts that limit:
# each device keeps a part of the three, and gathers what it needs just in time (ZeRO, Rajbhandari et al.,
# 2020, arXiv:1910.02054). The other two cuts serve models that are too large for one device. Exercise 1
# cuts a network by layer; exercise 2 finds where the comparison turns.

# %% [markdown]
# ## What devices are made of
#
# ![A server: a CPU with host memory; below it a PCIe switch whose one uplink four GPUs share, each with a memory of its own; NVLink between the GPUs.](src/drawings/server.svg)
#
# A GPU's memory is fast, and its own. Everything else is reached through slower links, so data should
# stay where it is. GPUs behind one switch share its uplink: if four of them read from the host at the same
# time, each gets a quarter of it (*Dive into Deep Learning*, "Parameter Servers", does the sums).
#
# | GB/s | | source |
# | --- | --- | --- |
# | memory of a V100, A100 (40 GB), H200 | 900, 1,555, 4,800 | [1], [1], [3] |
# | PCI Express ×16, generation 3, 4, 5, in each direction | 15.75, 31.5, 63 | [1], [1], computed |
# | NVLink of V100, A100, H100, Blackwell, both directions together | 300, 600, 900, 1,800 | [1], [1], [2], [4] |
#
# [1] R. Krashinsky et al., "NVIDIA Ampere Architecture In-Depth", NVIDIA (2020). [2] "NVIDIA H100 Tensor
# Core GPU Architecture", NVIDIA (2023), section 4.7. [3] TensorRT-LLM, `docs/source/blogs/H200launch.md`.
# [4] "Topology-aware workload scheduling with NVIDIA Topograph", NVIDIA (2026). Computed: 16 lanes of 32
# billion transfers a second, 128 of 130 bits data; NVIDIA rounds it to 64 [2].
#
# Simulated devices have none of this: all their arrays are in the host's memory, and a "copy" from
# `cpu(0)` to `cpu(1)` goes from host memory to host memory. It is a real copy that takes real time.
# So what you learn here about *when* data is copied holds on GPUs. *How long* that takes does not
# carry over.

# %% [markdown]
# How many GPUs can MXNet use here? NVIDIA's driver comes with `nvidia-smi`, which tells more: its columns
# `memory.used` and `utilization.gpu` show a GPU that was given nothing to do.

# %% tags=["measured"]
from shutil import which
from subprocess import run

print("GPUs that MXNet can use:", mx.context.num_gpus())
if which("nvidia-smi"):
    columns = "index,name,memory.used,memory.total,utilization.gpu"
    ask = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv"]
    print(run(ask, capture_output=True, text=True).stdout)
else:
    print("no nvidia-smi, so no NVIDIA driver")

# %% [markdown]
# ## Creating and moving arrays
#
# Where is an array if you don't say where? In host memory, also on a machine with GPUs. A script
# that forgets `ctx=` trains on the CPU. And a context is only a name: two names are the same device
# exactly if they compare equal.

# %%
assert nd.zeros(3).context == mx.cpu() == mx.cpu(0), "the default is the host, device 0"
assert two[0] != two[1], "devices(2) gives two different devices"

# %% [markdown]
# MXNet's tutorial on several GPUs falls back to `[mx.cpu(), mx.cpu()]` where there is none. That is one
# device named twice; chapter 05 shows what it does to training.
#
# An array never changes its context; to move it is to make another array elsewhere. There are two
# ways. **Predict:** in the second cell, what does `a` hold at the end?

# %%
a = nd.array([1, 2, 3], ctx=two[0])
there = a.as_in_context(two[1])
assert (a.context, there.context) == (two[0], two[1]), "the original stays where it was"

# %%
here = a.as_in_context(two[0])
here[0] = 100
print(a.asnumpy(), here is a)

# %% [markdown]
# `as_in_context` does nothing if there is nothing to move: `here` and `a` are two names for one array. A
# program that writes to the result changes the original on one device and a copy on the other. `copyto`
# always copies. Given a device, it makes a
# new array there; given an array, it fills it, which saves asking for memory again in every step.

# %%
a = nd.array([1, 2, 3], ctx=two[0])
copy = a.copyto(two[0])
copy[0] = 100
target = nd.zeros(3, ctx=two[1])
assert a.copyto(target) is target, "given an array, copyto fills it and returns it"
assert a[0].asscalar() == target[0].asscalar() == 1, "a has not changed"

# %% [markdown]
# So use `as_in_context` to *read* an array on some device, and `copyto` if either side will *write*.
# A moved array is a new one, and comes without gradient memory: for a replica, move first, then
# attach.

# %%
weight = nd.array([1, 2, 3], ctx=two[0])
weight.attach_grad()
replica = weight.copyto(two[1])
assert replica.grad is None, "a copy has the values, not the gradient"
replica.attach_grad()
assert replica.grad.context == two[1], "gradient memory is on the array's device"

# %% [markdown]
# ### When arrays on two devices meet
#
# What is `a + b` if `a` is on one device and `b` on the other? MXNet doesn't move an array on its
# own. We try it in a process of its own, for a reason that you'll see.

# %%
import sys

program = f"""
import helpers
import mxnet as mx
a = mx.nd.array([1, 2, 3], ctx=mx.{two[0]})
b = mx.nd.array([10, 20, 30], ctx=mx.{two[1]})
print((a + b).asnumpy())
"""
child = run([sys.executable, "-c", program], capture_output=True, text=True)
print(child.stdout if child.returncode == 0 else f"failed: {child.stderr[-300:]}")

# %% [markdown]
# Simulated devices share memory, so the operator finds its second input, and the sum is right.
#
# **On GPUs:** before it starts an operator, MXNet 1.9.1 compares the *kind* of device only (`GetContext` in
# `src/imperative/imperative_utils.h`). A GPU and a CPU raise at once: "require all inputs live on the same
# context". Two GPUs pass, and the operator gets an address in the other GPU's memory. Users report what
# follows as "an illegal memory access was encountered" where the result is read, or as a crash
# (apache/mxnet 18265, 11275, 21119); hence the process of its own.
#
# So write `a + b.as_in_context(a.context)`: it works everywhere, and says where the sum will be.

# %% [markdown]
# ## Work that isn't done yet
#
# When Python comes back from `nd.dot`, is the product there? We read the clock after the call, and
# again after `wait_to_read`, which returns when the values exist. **Predict:** the product of two
# matrices of side 1,500 takes 1,500³ multiplications. What fraction of the time does the call take:
# all of it, half, a hundredth?

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
# The call only puts the work into the device's queue; the device's thread takes it from there. This
# *asynchrony* lets one Python program keep many devices busy. The loop below looks sequential, and
# both devices compute.

# %%
products = []
for device in two:
    local = A.as_in_context(device)
    products.append(nd.dot(local, local))
nd.waitall()

# %% [markdown]
# `nd.waitall()` waits for everything, on all devices. Calls that need values wait for them:
# `x.asnumpy()`, `x.asscalar()`, `float(x)`, `print(x)`, `if x:`. Operators, `as_in_context`, `copyto`,
# `backward()`, `x.shape` and `x.context` don't. Two things follow. A clock that is stopped without
# waiting measures how fast Python fills the queue. And a stray `print(loss)` in a training loop makes
# Python wait before it can give any device the next step.
#
# If work happens later, so do its errors. A normal distribution can't have a negative width.
# **Predict:** which line raises, the one that asks for the numbers, the one that adds 1, or the one
# that waits?

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

# %% [markdown]
# The first two lines only queued work. So when a message points at an innocent line, look *above* it;
# `nd.waitall()` after each suspect line finds the culprit. MXNet 1.9.1 raises such an error once.
# Read `shifted` again and you get no error:

# %% tags=["measured"]
print("what is in its memory:", shifted.asnumpy().ravel())

# %% [markdown]
# Those numbers mean nothing. After an `MXNetError`, start again from data that you trust.

# %% [markdown]
# ## What a copy costs
#
# We copy a different stretch of a large array each time, since the same few bytes would stay in the
# processor's caches. A slice of an `mx.nd` array is a window on its memory, so the copies go into
# `target` and ask for no new memory.

# %%
LARGEST, COPIES = 64_000_000, 16  # bytes, and how many copies we average over
source = nd.ones(LARGEST // 4, ctx=two[0])  # a float32 has 4 bytes
target = nd.zeros(LARGEST // 4, ctx=two[1])


def windows(size):
    n = size // 4
    starts = [i * n % (len(source) - n + 1) for i in range(COPIES)]
    pairs = [(source[at : at + n], target[at : at + n]) for at in starts]
    nd.waitall()
    return pairs

# %% [markdown]
# Three clocks. *Alone*: copy, wait, and only then the next. *Queued*: all 16 copies, then wait. *Call*:
# how long the bare calls take, before anything is waited for. Each is the time of one copy.

# %%
def three_clocks(size):
    pairs, start = windows(size), perf_counter()
    for here, there in pairs:
        here.copyto(there).wait_to_read()
    alone, start = perf_counter() - start, perf_counter()
    for here, there in pairs:
        here.copyto(there)
    call = perf_counter() - start
    nd.waitall()
    return np.array([alone, perf_counter() - start, call]) / COPIES

# %% [markdown]
# Ten sizes, evenly spaced on a logarithmic axis, and for each the median of five rounds. (1 KB is
# $10^3$ bytes, 1 MB $10^6$.) **Predict:** from the first size to the last is a factor of 16,000. By
# what factor will the time grow: by 16,000, more, or much less?

# %% tags=["measured"]
sizes = np.geomspace(4e3, LARGEST, 10)
rounds = [[three_clocks(int(size)) for size in sizes] for _ in range(5)]
alone, queued, call = np.median(rounds, axis=0).T  # seconds, [10] each
print(f"4 KB {alone[0] * 1e6:.0f} µs, 64 MB {alone[-1] * 1e6:,.0f} µs: {alone[-1] / alone[0]:.0f} times")

# %% [markdown]
# Our model has two parts: a *latency* $L$, paid for each copy however small, and the size divided by
# the *bandwidth* $B$: $t(s) = L + s/B$. We fit it so that each size counts the same, by its *relative*
# error: that is what `sigma=times` asks of SciPy's `curve_fit`.

# %% tags=["measured"]
from scipy.optimize import curve_fit


def model(size, latency, per_byte):
    return latency + size * per_byte


fits = {}
for name, times in (("alone", alone), ("queued", queued)):
    (L, per_byte), _ = curve_fit(model, sizes, times, p0=(1e-5, 1e-10), sigma=times)
    worst = np.abs(model(sizes, L, per_byte) / times - 1).max()
    fits[name] = L, per_byte
    print(f"{name:6}: L = {L * 1e6:3.0f} µs, B = {1e-9 / per_byte:4.1f} GB/s, off by up to {worst:.0%}")
print(f"bare call: {np.median(call) * 1e6:.0f} µs")

# %% tags=["measured"]
from helpers.plotting import GREEN, figure

fig, ax = figure(f"Small copies cost {alone[0] * 1e6:.0f} µs alone, {queued[0] * 1e6:.0f} µs queued",
                 "size of the copy (MB)", "time of one copy (µs)")
looks = {"alone": ("o", BLUE, alone), "queued": ("s", ORANGE, queued)}
for name, (marker, color, times) in looks.items():
    ax.loglog(sizes / 1e6, 1e6 * times, marker, color=color, label=f"{name}, measured")
    ax.loglog(sizes / 1e6, 1e6 * model(sizes, *fits[name]), color=color, label=f"{name}, L + s/B")
ax.loglog(sizes / 1e6, 1e6 * call, "^:", color=GREEN, label="bare call")
ax.legend(frameon=False)
show(fig, alt="Copy time against size on logarithmic axes: two curves, level for small sizes and "
              "proportional for large ones, the queued copies below; the bare call is level.")

# %% [markdown]
# Compare the constants. The bare call is Python and the engine's bookkeeping. Queued copies can't be faster
# than the calls that queue them, so for small copies that is most of what they cost. A copy *alone* pays in
# addition for waking the device's thread, and then ours. So $L$ is not the latency of a link: here there is
# none. And it isn't a price for each copy either, since queued copies escape a part of it.
#
# **On GPUs:** a copy runs on a thread that its GPU keeps for copies, which then waits for the GPU (`CopyFromTo`
# in `src/ndarray/ndarray.cc`, MXNet 1.9.1). So $L$ contains the same call and wake-ups, and the driver's part
# besides: 6 to 7 µs for a `cudaMemcpy`, says NVIDIA (gdrcopy's README).
#
# ### A prediction
#
# Chapter 04's LeNet has eight arrays of gradients, 129,068 numbers in all, that must travel in every
# step. **Before you run this:** from your own numbers, how long do eight arrays take if each is waited
# for, if all eight are queued, and if they are packed into one?

# %% tags=["measured"]
shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
lengths = [int(np.prod(shape)) for shape in shapes]
eight = [(nd.ones(n, ctx=two[0]), nd.ones(n, ctx=two[1])) for n in lengths]
packed = [(nd.ones(sum(lengths), ctx=two[0]), nd.ones(sum(lengths), ctx=two[1]))]


def seconds(pairs, wait):
    nd.waitall()
    start = perf_counter()
    for here, there in pairs:
        here.copyto(there)
        if wait:
            there.wait_to_read()
    nd.waitall()
    return perf_counter() - start

# %% tags=["measured"]
def predict(pairs, latency, per_byte):
    return sum(latency + 4 * here.size * per_byte for here, _ in pairs)


for name, pairs, wait in (("eight, waited for", eight, True), ("eight, queued", eight, False),
                          ("one", packed, True)):
    expected = predict(pairs, *fits["alone" if wait else "queued"])
    times = [seconds(pairs, wait) for _ in range(21)]
    print(f"{name:18} predicted {expected * 1e6:3.0f} µs, measured {np.median(times) * 1e6:3.0f} µs")

# %% [markdown]
# @@PREDICTION@@

# %% [markdown]
# ## Summary
#
# - Data parallelism: each device has a replica of the model and a shard of the batch; gradients are
#   summed, and every replica makes the same update. It sends gradients; cuts by layer or inside
#   layers send activations, and hold fewer weights.
# - A context names a device. Arrays are made with `ctx=` and stay there; an operation runs where its
#   inputs are.
# - `as_in_context` returns the same object if nothing needs to move; `copyto` always copies. Write
#   only to what you know to be a copy.
# - Don't let arrays from two devices meet: `b.as_in_context(a.context)`.
# - Operators return before they are done. Wait before you stop a clock. An error comes out where you
#   wait, once.
# - A copy takes latency + size / bandwidth. Most of the latency is waiting for the answer, so queue
#   copies, or pack small arrays into one.
#
# **Further reading.** A. Zhang et al., *Dive into Deep Learning*, "Training on Multiple GPUs";
# *Deep Learning: The Straight Dope*, chapters on NDArray and on multiple GPUs; Apache MXNet's
# tutorial *Multiple GPUs training with Gluon API*.

# %% [markdown]
# ## Exercises
#
# 1. **Cut by layer.** A network has two layers, $W_1 = \binom{1\ -1}{-1\ 1}$ on device 0 and
#    $W_2 = \binom{3}{5}$ on device 1, with a ReLU between them. Compute both gradients of the sum of
#    its outputs for the examples (1, 2) and (3, 1), on two devices, and show that they equal one
#    device's. On which device is the gradient of $W_1$, and who sent it there?
# 2. **When does the comparison turn?** From which batch size on does LeNet's cut by layer send more
#    than data parallelism? And for a dense layer of 4,096 × 4,096 alone, cut inside or by data?
# 3. **A lost gradient.** Move an array with an attached gradient to the other device *before*
#    `record()`, and compute a loss from it there. Where does the gradient end up?
# 4. **Your own machine (open).** Fit $L$ and $B$ once more while another program keeps a core busy,
#    and once for copies within one device. Which of the two numbers changes, and why?

# %% [markdown]
# ### Answer 1
#
# `W1`'s gradient is on device 0. The crossing is recorded like any other operation; the derivative of a copy
# to device 1 is a copy back to device 0, so autograd sent it.

# %% tags=["solution"]
def by_layer(first, second):
    W1, W2 = nd.array([[1, -1], [-1, 1]], ctx=first), nd.array([[3], [5]], ctx=second)
    W1.attach_grad()
    W2.attach_grad()
    with autograd.record():
        h = nd.relu(nd.dot(nd.array([[1, 2], [3, 1]], ctx=first), W1))
        loss = nd.dot(h.as_in_context(second), W2).sum()
    loss.backward()
    return W1.grad, W2.grad


for one, other, device in zip(by_layer(two[0], two[0]), by_layer(*two), two):
    assert other.context == device, "a gradient lives where its weights live"
    assert (one.asnumpy() == other.asnumpy()).all(), "moving h must not change the values"

# %% [markdown]
# ### Answer 2
#
# By layer, each device sends 3,380 numbers for each example, by data 129,068 for each step: the two are equal
# at 38.2 examples. The dense layer has 16.8 million weights, and passes on 4,096 numbers for each example: by
# data sends more until the batch has 4,096 examples. Where weights outnumber activations, as in large language
# models with short batches, cuts inside the layers pay.

# %% tags=["solution"]
turn = weights.sum() / passed[0]
assert 38 < turn < 39, "129,068 / 3,380"
assert 4096**2 / 4096 == 4096, "weights / numbers passed on"

# %% [markdown]
# ### Answer 3
#
# With the moved array. To autograd that is where everything began, since the move was not recorded; it
# needs an `attach_grad` of its own. The original's gradient stays 0, and nothing is said.

# %% tags=["solution"]
v = nd.array([1, 2], ctx=two[0])
v.attach_grad()
moved = v.copyto(two[1])
moved.attach_grad()
with autograd.record():
    loss = (moved * moved).sum()
loss.backward()
assert moved.grad.asnumpy().tolist() == [2, 4], "the derivative of the sum of v² is 2v"
assert v.grad.asnumpy().tolist() == [0, 0], "the move was not recorded"

# %% [markdown]
# ### Answer 4
#
# A good answer alternates the cases, gives medians with their spread, and says which differences are larger
# than it. It separates what each clock contains: the bare call is Python and the engine's queue; the wait adds
# waking two threads, which a busy core delays. And it checks whether the model's largest error grew, since then
# $L$ and $B$ mean less.
