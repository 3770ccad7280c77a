# %% [markdown]
# # Deeper · Three ways to divide a network
#
# Chapter 01 gave each device a copy of the model and a part of the data. That is one of three cuts.
#
# ![Four layers by eight examples, three times, in the colours of two devices. By layer: the first
# row is device 0's, the others are device 1's. Inside layers: half of each row. By data: half of
# the columns.](../src/drawings/three_cuts.svg)
#
# Each square is one layer's work on one example, more in some layers than in others. *By layer*
# gives whole layers to each device (pipeline parallelism). *Inside layers* gives each device half
# of every layer's outputs (tensor parallelism). *By data* gives each device half of the examples.
#
# > **What you'll do:** count what each of two devices holds and sends, for three cuts of LeNet.
# > Look up what a link between two GPUs carries.
# >
# > **What you'll learn:** what a training step keeps in memory; which cuts divide the weights, and
# > what each sends; which links connect GPUs, and at how many GB/s.
# >
# > **What you need:** chapter 01, and what a convolutional network is. No GPU. Reading takes
# > {reading time}, running a few seconds.

# %%
from helpers import devices
from helpers.networks import lenet
from helpers.plotting import BLUE, ORANGE, show

import mxnet as mx
from mxnet import autograd, nd

# %% [markdown]
# ## A network in numbers
#
# What must a device hold? A training step needs memory for
#
# - the *weights*;
# - their *gradients*, just as many numbers;
# - the *optimizer's state*: none for plain gradient descent, two numbers a weight for Adam;
# - the *activations*: the outputs of all layers, kept for the backward pass.
#
# We count those of chapter 04's LeNet, which has four layers. For each we write down its weights
# with their biases, the activations that are kept for one example, and how many of them the next
# layer reads. We count a convolution's outputs as if they were kept before relu, after relu and
# after pooling. (Relu in place would save some of that.) The images themselves, 784 numbers each,
# we leave out.

# %%
from typing import NamedTuple


class Layer(NamedTuple):
    name: str
    weights: int  # with biases
    kept: int  # activations of one example
    passed: int  # those that the next layer reads


# A 3 x 3 convolution makes 20 images of 26 x 26 from one of 28 x 28; pooling halves them to 13.
conv1 = Layer(
    name="conv 1",
    weights=20 * 1 * 3 * 3 + 20,
    kept=2 * (20 * 26 * 26) + 20 * 13 * 13,  # before relu, after it, after pooling
    passed=20 * 13 * 13,
)
# A 5 x 5 convolution makes 50 images of 9 x 9; pooling halves them to 4, without the last row.
conv2 = Layer(
    name="conv 2",
    weights=50 * 20 * 5 * 5 + 50,
    kept=2 * (50 * 9 * 9) + 50 * 4 * 4,
    passed=50 * 4 * 4,  # 800 numbers
)
dense1 = Layer(
    name="dense 1",
    weights=800 * 128 + 128,
    kept=2 * 128,  # before relu and after it
    passed=128,
)
dense2 = Layer(name="dense 2", weights=128 * 10 + 10, kept=10, passed=10)
LAYERS = [conv1, conv2, dense1, dense2]

for layer in LAYERS:
    print(f"{layer.name:8} {layer.weights:8,} weights {layer.kept:7,} activations kept, "
          f"{layer.passed:5,} passed on")

# %% [markdown]
# The first layer has three quarters of the activations and few weights; the third has most of the
# weights.
# Many convolutional networks are like that: large images at the front, large matrices at the end.

# %% tags=["fold"]
# check: the numbers are those of the network itself
net = lenet()
net.initialize()
activation = nd.zeros((1, 1, 28, 28))
blocks = list(net)
rows = []
for layer, block, pool in zip(LAYERS, [blocks[0], blocks[2], blocks[4], blocks[5]],
                              [blocks[1], blocks[3], None, None]):
    output = block(activation)
    after_relu = output.size if layer is not dense2 else 0
    activation = pool(output) if pool else output
    rows.append(Layer(layer.name, sum(p.data().size for p in block.collect_params().values()),
                      output.size + after_relu + (activation.size if pool else 0), activation.size))
assert rows == LAYERS, rows
assert conv1.kept > 0.75 * sum(layer.kept for layer in LAYERS), "three quarters of the activations"
assert dense1.weights > 0.75 * sum(layer.weights for layer in LAYERS), "most of the weights"

# %% [markdown]
# ## What each device holds
#
# Batch 256 on two devices, in float32, 4 bytes a number. First one device alone:

# %%
BATCH = 256


class Account(NamedTuple):
    weights: float  # all in MB
    gradients: float
    adam: float
    activations: float


def account(weights, activations):
    """What a device holds that has so many weights, and keeps so many activations in all."""
    megabytes = 4 * weights / 1e6
    return Account(weights=megabytes, gradients=megabytes, adam=2 * megabytes,
                   activations=4 * activations / 1e6)


all_weights = sum(layer.weights for layer in LAYERS)
all_kept = sum(layer.kept for layer in LAYERS)
alone = account(all_weights, BATCH * all_kept)
print(f"{all_weights:,} weights, {all_kept:,} activations for each example")
print(f"one device alone holds {sum(alone):.1f} MB, {alone.activations:.1f} of it activations")

# %% [markdown]
# **By data**: all weights, and half of the examples.

# %%
by_data = account(all_weights, BATCH / 2 * all_kept)
print(f"each of two holds {sum(by_data):.1f} MB, {by_data.activations:.1f} of it activations")

# %% [markdown]
# **By layer**: we cut after the first layer. The second device holds the other three, and the
# activations that it received. **Predict:** would a cut one layer later be more even?

# %%
def cut_after(number):
    """The accounts of two devices, the first with so many of the layers."""
    front = LAYERS[:number]
    back = LAYERS[number:]
    received = front[-1].passed
    first = account(sum(layer.weights for layer in front),
                    BATCH * sum(layer.kept for layer in front))
    second = account(sum(layer.weights for layer in back),
                     BATCH * (received + sum(layer.kept for layer in back)))
    return first, second


for number in [1, 2, 3]:
    first, second = cut_after(number)
    print(f"cut after layer {number}: {sum(first):4.1f} and {sum(second):4.1f} MB")
by_layer = cut_after(1)

# %% [markdown]
# No: in memory the cut after the first layer is the most even, and leaves two thirds with one
# device. In work none is even: conv 2 alone does nine tenths of the multiplications.
#
# **Inside layers**: each device holds half of every layer's weights, and computes half of its
# outputs. But the next layer reads all of them. So what is passed on is held whole on both, and the
# rest is halved.

# %%
kept_by_each = 0
for layer in LAYERS:
    if layer is dense2:
        whole = 0  # no layer reads its outputs
    else:
        whole = layer.passed  # the next layer reads all of these
    kept_by_each += whole + (layer.kept - whole) / 2
inside_layers = account(all_weights / 2, BATCH * kept_by_each)
print(f"each of two holds {sum(inside_layers):.1f} MB, "
      f"{inside_layers.activations:.1f} of it activations")

# %% tags=["fold"]
# check: the accounts, held against sums made in another way; what conv 2 multiplies
held = {"by layer": by_layer, "inside layers": (inside_layers, inside_layers),
        "by data": (by_data, by_data)}
for name, (first, second) in held.items():
    together = first.weights + second.weights
    assert abs(together - alone.weights * (2 if name == "by data" else 1)) < 1e-9, name
assert abs(2 * by_data.activations - alone.activations) < 1e-9, "by data halves activations"
assert alone.gradients == alone.weights, "as many gradients as weights"
assert alone.adam == 2 * alone.weights, "Adam keeps two numbers a weight"
received = 4 * BATCH * conv1.passed / 1e6
assert abs(sum(part.activations for part in by_layer) - alone.activations - received) < 1e-9
inputs = 4 * BATCH * (conv1.passed + conv2.passed + dense1.passed) / 1e6  # held whole by both
assert abs(2 * inside_layers.activations - alone.activations - inputs) < 1e-9
shares = []
for number in [1, 2, 3]:
    first, second = cut_after(number)
    shares.append(max(sum(first), sum(second)) / (sum(first) + sum(second)))
assert shares[0] == min(shares) and 0.65 < shares[0] < 0.7, "two thirds"
assert inside_layers.weights == alone.weights / 2 and by_data.weights == alone.weights, "the figure"
assert max(part.weights for part in by_layer) > 0.99 * alone.weights, "the figure"
assert [round(sum(part), 1) for part in cut_after(2)] == [40.7, 2.8]
multiplications = [  # each weight, but not a bias, once for each pixel of the output
    (conv1.weights - 20) * 26 * 26,
    (conv2.weights - 50) * 9 * 9,
    dense1.weights - 128,
    dense2.weights - 10,
]
assert 0.89 < multiplications[1] / sum(multiplications) < 0.91, "nine tenths in conv 2"
assert sum(multiplications[:3]) > 0.99 * sum(multiplications), "nearly everything"

# %% tags=["fold"]
# draw: MB of weights, gradients, Adam's state and activations on each device, for each cut
import matplotlib.pyplot as plt
import numpy as np

fig, axes = plt.subplots(1, 3, figsize=(7, 3.3), sharey=True, layout="constrained")
for ax, (name, accounts) in zip(axes, held.items()):
    ax.semilogy(range(4), alone, "_", ms=28, color="black", zorder=3, label="one device alone")
    for rank, (marker, color) in enumerate([("o", BLUE), ("s", ORANGE)]):
        places = np.arange(4) + 0.3 * rank - 0.15
        ax.semilogy(places, accounts[rank], marker, color=color, label=f"device {rank}")
    ax.set_title(name)
    ax.set_xticks(range(4), ["weights", "grad", "Adam", "act."])
    ax.text(0.35, 0.02, f"weights:\n{accounts[0].weights:.2g} and {accounts[1].weights:.2g} MB\n"
            f"of {alone.weights:.2g}", fontsize="small")
ticks = [0.001, 0.01, 0.1, 1, 10]
axes[0].set(ylabel="MB held", yticks=ticks, yticklabels=ticks)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
fig.suptitle("Only the cut inside layers halves the weights on both devices")
show(fig, alt="Three panels, one a cut, with MB on a logarithmic axis: by layer the two "
              "devices hold different amounts; inside layers half of the weights each; by data all "
              "weights and half of the activations.")

# %% [markdown]
# ## What each device sends
#
# *By layer*, the activations at the cut go forward, and their gradients come back: each device
# sends as many numbers as the first layer passes on. *Inside layers*, in this simplest form, a
# device needs the other half of each later layer's input. So it sends half of that input, and on
# the way back half of its gradient. *By data*, each sends its gradients once. **Predict:** which
# sends least?

# %%
sent = {
    "by layer": BATCH * conv1.passed,
    "inside layers": BATCH * (conv1.passed + conv2.passed + dense1.passed),
    "by data": all_weights,
}
for name, numbers in sent.items():
    print(f"{name:13} each device sends {4 * numbers / 1e6:.1f} MB a step")

for number in [2, 3]:
    numbers = BATCH * LAYERS[number - 1].passed
    print(f"by layer, cut after layer {number}: {4 * numbers / 1e6:.2f} MB")

# %% tags=["fold"]
# check: what crosses, counted in the network itself with a batch of two
net.hybridize(False)
crossing = [nd.zeros((2, 1, 28, 28))]
for block in blocks:
    crossing.append(block(crossing[-1]))
h1, h2, h3 = crossing[2].size, crossing[4].size, crossing[5].size  # into conv 2, dense 1, dense 2
half_there_half_back = 0
for size in [h1, h2, h3]:
    half_there_half_back += size / 2 + size / 2
counted = {"by layer": h1, "inside layers": half_there_half_back,
           "by data": sum(p.data().size for p in net.collect_params().values())}
for name in ["by layer", "inside layers"]:
    assert sent[name] == counted[name] * BATCH / 2, name
assert sent["by data"] == counted["by data"]
assert min(sent, key=sent.get) == "by data"
assert [round(4 * numbers / 1e6, 1) for numbers in sent.values()] == [3.5, 4.4, 0.5], "by hand"
assert BATCH * dense1.passed < all_weights < BATCH * conv2.passed, "the text on other cuts"

# %% [markdown]
# Of these three, by data sends least. Its devices also have equal work. By layer they take turns,
# unless the batch is cut into small ones that follow each other. (A cut after the third layer would
# send less, but its first device would hold, and do, nearly everything.)
#
# But by data halves only the activations. Weights, gradients and Adam's state take 2 MB on each
# device here. For a billion weights they would take 16 GB. *Sharded* data parallelism lifts that
# limit: each device keeps a part of the three, and gathers what it needs just in time (ZeRO:
# chapter 16). The other two cuts serve models that are too large for one device.

# %% tags=["fold"]
# check: 2 MB here, 16 GB for a billion weights; a batch so small that by data sends most
assert round(by_data.weights + by_data.gradients + by_data.adam) == 2
assert round(sum(account(1e9, 0)) / 1e3) == 16
assert 16 * (conv1.passed + conv2.passed + dense1.passed) < all_weights, "with batch 16"

# %% [markdown]
# ## How devices are connected
#
# ![A server: a CPU with host memory; below it a PCIe switch whose one uplink four GPUs share, each
# with a memory of its own; NVLink between neighbouring GPUs.](../src/drawings/server.svg)
#
# A GPU's memory is fast, and its own. Everything else is reached through slower links. GPUs behind
# one switch share its uplink: if four of them read from the host at the same time, each gets a
# quarter of it (*Dive into Deep Learning*, "Parameter Servers").
#
# | GB/s | its memory | NVLink, all links, in each direction | source |
# | --- | --- | --- | --- |
# | V100 | 900 | 150 | [1] |
# | A100 (40 GB) | 1,555 | 300 | [1] |
# | H100 | – | 450 | [2] |
# | H200 | 4,800 | – | [3] |
# | Blackwell | – | 900 | [4] |
#
# (–: not looked up.) PCI Express ×16 carries 15.75 GB/s in each direction in generation 3, 31.5 in
# generation 4 [1], and 63 in generation 5 (computed).
#
# NVIDIA: [1] "NVIDIA Ampere Architecture In-Depth" (2020); [2] "NVIDIA H100 Tensor Core GPU
# Architecture" (2023), section 4.7; [3] TensorRT-LLM, `docs/source/blogs/H200launch.md`; [4]
# "Topology-aware workload scheduling with NVIDIA Topograph" (2026). For NVLink they give both
# directions together; we halve. Computed: 16 lanes of 32 billion transfers a second, 128 of 130
# bits data.
#
# Simulated devices have none of this: how long a copy takes on them does not carry over to GPUs.
#
# In `nvidia-smi`, a GPU that you forgot to use shows 0 % in `utilization.gpu`; `nvidia-smi topo -m`
# prints your machine's version of the drawing.

# %% tags=["fold", "measured"]
# measure: the GPUs of this machine
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
# ## Summary
#
# - A training step holds weights, gradients, the optimizer's state and activations.
# - All three divide the activations. By layer and inside layers divide the weights, too, and send
#   activations; by data sends gradients.
# - For LeNet with batch 256, by data sends least of our three. A cut by layer is uneven there.
# - A GPU's memory is much faster than any link to it.
#
# **Further reading.** A. Zhang et al., *Dive into Deep Learning*, "Training on Multiple GPUs",
# which compares the three cuts, and "Parameter Servers". More cuts, with what they send: the
# course's [map](../map.md).

# %% [markdown]
# ## Exercises
#
# 1. **Cut by layer.** A network has two layers, $W_1 = \binom{1\ -1}{-1\ 1}$ on device 0 and $W_2
#    = \binom{3}{5}$ on device 1, with a ReLU between them. Compute both gradients of the sum of
#    its outputs for the examples (1, 2) and (3, 1), on two devices, and show that they equal one
#    device's. On which device is the gradient of $W_1$, and who sent it there?
# 2. **When by data sends most.** With which batch does the cut by layer send as much as the cut by
#    data? What does each send with batch 16?

# %% [markdown]
# ### Answer 1
#
# `W1`'s gradient is on device 0. The crossing is recorded like any other operation; the derivative
# of a copy to device 1 is a copy back to device 0, so autograd sent it.

# %% tags=["solution"]
def two_layers(first, second):
    W1 = nd.array([[1, -1], [-1, 1]], ctx=first)
    W2 = nd.array([[3], [5]], ctx=second)
    W1.attach_grad()
    W2.attach_grad()
    x = nd.array([[1, 2], [3, 1]], ctx=first)
    with autograd.record():
        h = nd.relu(nd.dot(x, W1))
        received = h.as_in_context(second)
        loss = nd.dot(received, W2).sum()
    assert (h.context, loss.context) == (first, second), "each layer on its device"
    loss.backward()
    return W1.grad, W2.grad


two = devices(2)
for places in ([two[0], two[0]], two):
    found = two_layers(*places)
    assert [grad.context for grad in found] == places, "a gradient is where its weights are"
    assert found[0].asnumpy().tolist() == [[9, 5], [3, 10]], "by hand"
    assert found[1].asnumpy().tolist() == [[2], [1]], "by hand"

# %% [markdown]
# ### Answer 2
#
# The cut by data sends all weights, whatever the batch. The cut by layer sends 3,380 numbers an
# example, so both send nearly the same at batch 38. With batch 16 the cut by layer sends 0.2 MB,
# and the cut by data 0.5.

# %% tags=["solution"]
assert round(all_weights / conv1.passed) == 38
assert round(4 * 16 * conv1.passed / 1e6, 1) == 0.2
assert round(4 * all_weights / 1e6, 1) == 0.5
