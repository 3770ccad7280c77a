# %% [markdown]
# # Deeper · The law of the difference
#
# With BatchNorm, two devices are not one (chapter 09), because each normalises by its own shard.
# *How fast does the error of a step shrink, as shards grow? And what must devices exchange, so that
# there is none?*
#
# > **What you'll do:** derive a law and measure it; compute by hand what the backward pass of
# > synchronised BatchNorm sends, and leave some of it out; make Gluon's `SyncBatchNorm` hang.
# >
# > **What you'll learn:** why the error of a step shrinks with $1/m$, and that of one device only
# > with $1/\sqrt m$; that an all-reduce left out of the backward pass can't be seen in the outputs;
# > what `SyncBatchNorm` needs of a training loop.
# >
# > **What you need:** chapter 09 and no GPU. Reading takes {reading time}, running less than a
# > minute on two cores.

# %%
import os
import subprocess
import sys
import time

from helpers import load_data, split_and_load
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init, nd
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]  # simulated
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# ## The law
#
# What is wrong with a device's gradient? Two devices have $m$ images each. Device 0 gets the
# gradient $g_0$ of its losses, normalised by its own shard. It should be $h_0$: the gradient of the
# *same* losses where all $2m$ images are normalised together, as on one device. So the errors are
#
# $$e_0 = g_0 - h_0, \qquad e_1 = g_1 - h_1.$$
#
# The trainer adds the devices' gradients, so **the sum $e_0 + e_1$ is the error of the step.**
#
# Let $\delta$ be the distance of a shard's mean from the whole batch's, in one channel. In chapter
# 09's batch of four the shards' means were 2 and 6, and the whole mean was 4. So $\delta$ was −2 on
# device 0 and +2 on device 1. With two equal shards it is always opposite.
#
# - $\delta$ is the error of a mean of $m$ values, so it shrinks with $1/\sqrt m$.
# - For a small $\delta$ a device's error is proportional to it. Per image it is $s_0\,\delta$ on
#   device 0, and $-s_1\,\delta$ on device 1, because there $\delta$ is opposite. Here $s_0$ and
#   $s_1$ are the derivatives of the devices' gradients with respect to the means of the forward
#   pass.
# - $s_0$ and $s_1$ are averages over $m$ images. So they are nearly equal, and their difference
#   shrinks with $1/\sqrt m$, too.
#
# | per image | is | shrinks with |
# | --- | --- | --- |
# | device 0's error, over $m$ | $s_0\,\delta$ | $1/\sqrt m$ |
# | the step's error, the sum over $2m$ | $(s_0 - s_1)\,\delta / 2$ | $1/m$, both factors together |
#
# (The variances are opposite on both devices in the same way, except for terms in $\delta^2$. These
# don't cancel, but they shrink with $1/m$ as well.)
#
# $g_0$ and $h_0$ also differ in the backward pass, which has a mean of gradients $dy$, as we shall
# see. In $g_0$ this mean is subtracted from the $m$ images of the device, and in $h_0$ it is spread
# over all $2m$. Per image that makes an error of $-\delta_x \cdot \text{mean}(dy)$ in the weights
# before the norm, where $\delta_x$ is the shift of the mean of their inputs. It has the same form:
# $\delta_x$ is opposite on the devices, and their means of $dy$ are nearly equal. The backward
# pass's second mean, that of $dy\,\hat x$, does the same. So the law stands.
#
# ## One network, four sizes of shards
#
# We take a small network with one norm. The law assumes that gradients change smoothly, so its
# activation is `softrelu`, $\ln(1 + e^x)$, which is a smooth ReLU. Everything is in float64.

# %% tags=["measured"]
data = load_data("mnist", limit=12_800)
pixels = data.train_images - data.train_images.mean()
print(data)


def random_batch(n, seed):
    rows = np.random.default_rng(seed).integers(0, len(pixels), size=n)
    x = nd.array(pixels[rows], dtype="float64")
    return x, nd.array(data.train_labels[rows])


def dense_network(activation):
    mx.random.seed(1)
    net = nn.HybridSequential()
    net.add(nn.Dense(32))
    net.add(nn.BatchNorm())
    net.add(nn.Activation(activation))
    net.add(nn.Dense(10))
    net.initialize(init.Xavier(), ctx=pair)
    net(nd.zeros((2, 1, 28, 28), ctx=pair[0]))  # the first call draws the weights, as float32
    net.cast("float64")
    return net


def long_gradient(net, device):
    grads = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # null: not trained
            grads.append(parameter.grad(device).asnumpy().ravel())
    return np.concatenate(grads)

# %% [markdown]
# $g_0$ and $g_1$ are what two devices get:

# %%
def gradients_by_device(net, x, y):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(split_and_load(x, pair), split_and_load(y, pair)):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    return long_gradient(net, pair[0]), long_gradient(net, pair[1])

# %% [markdown]
# For $h_0$ and $h_1$ one device takes *all* images forward, and only one half's losses backward.
# (That half's gradient also runs through the other half's images, because they are in the mean.)

# %% tags=["measured"]
def gradients_by_half(net, x, y):
    m = len(x) // 2
    gradients = []
    for half in [slice(0, m), slice(m, 2 * m)]:
        with autograd.record():
            losses = cross_entropy(net(x), y)
            half_loss = losses[half].sum()
        half_loss.backward()
        gradients.append(long_gradient(net, pair[0]))
    return gradients


net = dense_network("softrelu")
x, y = random_batch(8, seed=0)
h0, h1 = gradients_by_half(net, x, y)
with autograd.record():
    losses = cross_entropy(net(x), y)
losses.backward()
assert largest_difference(h0 + h1, long_gradient(net, pair[0])) < 1e-12
g0, _ = gradients_by_device(net, x, y)
assert np.linalg.norm(g0 - h0) < np.linalg.norm(g0 - h1)  # the halves aren't swapped

# %% [markdown]
# The halves add up to the gradient of the whole batch, as they should. The size of an error is the
# root of its sum of squares. We take medians over eight random batches. **Predict:** from 64 images
# on each device to 1,024, by which factor does device 0's error shrink, and by which the step's?

# %% tags=["predict", "measured"]
def median_errors(net, m):
    of_device_0 = []
    of_step = []
    for seed in range(8):
        x, y = random_batch(2 * m, seed=[seed, m])
        g0, g1 = gradients_by_device(net, x, y)
        h0, h1 = gradients_by_half(net, x, y)
        of_device_0.append(np.linalg.norm(g0 - h0) / m)
        of_step.append(np.linalg.norm((g0 - h0) + (g1 - h1)) / (2 * m))
    return np.median(of_device_0), np.median(of_step)


def print_errors(activation):
    net = dense_network(activation)
    print(f"{activation}: images each, device 0's error, the step's error (per image)")
    errors = {}
    for m in [4, 64, 256, 1024]:
        errors[m] = median_errors(net, m)
        print(f"{m:22,} {errors[m][0]:16.4f} {errors[m][1]:17.4f}")
    factors = []
    for number, what in enumerate(["device 0's error", "the step's error"]):
        factor = errors[64][number] / errors[1024][number]
        factors.append(factor)
        print(f"from 64 to 1,024 images {what} shrinks to 1/{factor:.0f}")
    return factors


smooth_of_device, smooth_of_step = print_errors("softrelu")

# %% tags=["fold"]
# check: what came out
assert 3 < smooth_of_device < 6  # 4 by the law
assert 12 < smooth_of_step < 22  # 16

# %% [markdown]
# <details><summary>What came out</summary>
#
# There are 16 times as many images. So by the law device 0's error shrinks to about
# $1/\sqrt{16} = 1/4$, and the step's error to about 1/16. Both came out near that.
#
# </details>
#
# ReLU isn't smooth: its derivative jumps at 0. Each input that $\delta$ moves across zero changes a
# gradient by a jump, and both devices have their own such inputs, so their jumps don't cancel.
# **Predict:** does the step's error shrink faster with ReLU, or more slowly?

# %% tags=["predict", "measured"]
relu_of_device, relu_of_step = print_errors("relu")

# %% tags=["fold"]
# check: what came out
assert 1.2 * relu_of_device < relu_of_step < 0.8 * smooth_of_step
assert 6 < relu_of_step < 12  # 8 by the estimate below

# %% [markdown]
# <details><summary>What came out</summary>
#
# It shrinks more slowly than with the smooth activation, but still faster than one device's error.
# Of $m$ inputs about $\sqrt m$ are moved across zero. If their jumps are independent, the sum of
# these grows with $m^{1/4}$, so per image it shrinks with $m^{-3/4}$. From 64 to 1,024 images that
# is 1/8; here it came out at 1/10.
#
# </details>
#
# **Remember:** large errors of single devices nearly cancel in the step, and the larger the
# shards, the better. With 4 images they are not small, and the law says nothing of such shards.
#
# ## What the backward pass sends
#
# In chapter 09 `autograd` did the backward pass of synchronised BatchNorm. What has to be sent in
# it? $x$ is in its channel's mean and in its variance, so the chain rule has two sums, one for
# each:
#
# $$\frac{\partial L}{\partial x} = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}
# \Big(dy - \frac{1}{n}\sum dy - \frac{\hat x}{n} \sum dy\,\hat x\Big).$$
#
# Here $dy = \gamma\,\partial L/\partial y$ is the gradient from above, times the scale; $\hat x$
# are the normalised values, and $n$ is their number in a channel, on *all* devices. So two numbers
# for each channel are all-reduced backward, as two are forward. Here are six images on one device
# and four on the other, with NumPy:

# %%
rng = np.random.default_rng(8)
x = rng.normal(size=(10, 3, 4, 4))  # 10 images, 3 channels, 4 × 4
# Image by image larger, so the shards differ.
x = x + np.arange(10).reshape(-1, 1, 1, 1)
above = rng.normal(size=x.shape)  # the gradient of the loss with respect to y
gamma = rng.normal(size=3)

n = 10 * 4 * 4
deviation = np.sqrt(x.var(axis=(0, 2, 3), keepdims=True) + 1e-5)
normalised = (x - x.mean(axis=(0, 2, 3), keepdims=True)) / deviation


def channel_sum(values):
    return values.sum(axis=(0, 2, 3), keepdims=True)


def input_gradients(above, forgotten=""):
    dy = gamma.reshape(1, -1, 1, 1) * above
    images = [slice(0, 6), slice(6, 10)]  # of each rank
    own = []
    own_x = []
    for rank in [0, 1]:
        own.append(channel_sum(dy[images[rank]]))
        own_x.append(channel_sum(dy[images[rank]] * normalised[images[rank]]))

    grads = []
    for rank in [0, 1]:
        sum_dy = own[0] + own[1]  # all-reduce
        sum_dy_x = own_x[0] + own_x[1]  # all-reduce
        if forgotten == "dy":
            sum_dy = own[rank]
        if forgotten == "dy times normalised":
            sum_dy_x = own_x[rank]
        mine = images[rank]
        grads.append((dy[mine] - sum_dy / n - normalised[mine] * sum_dy_x / n) / deviation)
    return np.concatenate(grads)

# %% [markdown]
# Is that the gradient of Gluon's BatchNorm on one device? And what if one all-reduce were
# forgotten, so that each device used its own sum? The outputs would be right, because they come
# from the forward pass. The gradients from above are random, with mean 0. **Predict:** are the
# gradients more wrong, or less, if their mean is 1?

# %% tags=["predict"]
norm = nn.BatchNorm(in_channels=3)
norm.initialize()
norm.cast("float64")
norm.gamma.set_data(nd.array(gamma, dtype="float64"))

largest = {}  # error, by the mean of the gradients from above
for mean in [0, 1]:
    whole = nd.array(x, dtype="float64")
    whole.attach_grad()
    with autograd.record():
        y = norm(whole)
    y.backward(nd.array(above + mean, dtype="float64"))

    largest[mean] = 0
    print(f"gradients from above with mean {mean}")
    difference = largest_difference(input_gradients(above + mean), whole.grad)
    print("    with both all-reduces: equal to 1e-12:", difference < 1e-12)
    assert difference < 1e-12
    for forgotten in ["dy", "dy times normalised"]:
        wrong = input_gradients(above + mean, forgotten)
        difference = largest_difference(wrong, whole.grad)
        largest[mean] = max(largest[mean], difference)
        print(f"    without that of {forgotten}: {difference:.1%} off")

# %% tags=["fold"]
# check: what came out
assert largest[0] < 0.06
assert largest[1] > 5 * largest[0]

# %% [markdown]
# <details><summary>What came out</summary>
#
# They are far more wrong. With mean 0 the sums nearly cancel, so the largest error is only a few
# percent of the largest gradient.
#
# </details>
#
# **Remember:** test gradients, not only outputs, with gradients from above whose mean isn't 0.
#
# ## How Gluon's SyncBatchNorm hangs
#
# Gluon's `mxnet.gluon.contrib.nn.SyncBatchNorm` has synchronised statistics ready. It averages the
# devices' means, so it is right for equal shards only. In training it waits *inside an operator*
# until `num_devices` devices have arrived (`sync_batch_norm-inl.h` at MXNet 1.9.1).
#
# What if a device gets no images, say in the last batch of an epoch? And what if Python reads
# device 0's loss at once, as many training loops do, *before* device 1 is given its images? A
# program that hangs needs a process of its own:

# %%
PROGRAM = """
import sys
import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm

case = sys.argv[1]
pair = [mx.cpu(0), mx.cpu(1)]
net = nn.HybridSequential()
for channels in [4, 8, 8]:
    net.add(nn.Conv2D(channels, kernel_size=3))
    net.add(SyncBatchNorm(num_devices=2))
net.initialize(ctx=pair)
x = mx.nd.random.normal(shape=(8, 3, 12, 12))
net(x)  # outside autograd.record() a norm waits for nobody
shards = [x[0:4].copyto(pair[0]), x[4:8].copyto(pair[1])]
mx.nd.waitall()
print("ready", flush=True)

losses = []
with mx.autograd.record():
    for rank in [0, 1]:
        if case == "device 1 stays away" and rank == 1:
            break
        losses.append((net(shards[rank]) ** 2).sum())
        if case == "loss is read early":
            losses[rank].asscalar()
mx.autograd.backward(losses)
mx.nd.waitall()
"""

# %% [markdown]
# A fourth case is a danger on CPUs only. Operators borrow *scratch space*, memory for intermediate
# results. All CPU devices share it, and stock MXNet has 4 such spaces (`MXNET_CPU_TEMP_COPY`);
# `helpers` makes it 64. **Predict:** which of the four cases finish?

# %% tags=["predict"]
def ending(case, seconds, spaces=64):
    """How it ended, and after how many seconds."""
    environment = os.environ | {"MXNET_CPU_TEMP_COPY": str(spaces)}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, case], env=environment,
                             stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    begin = time.perf_counter()
    try:
        status = child.wait(seconds)
        how = "finished" if status == 0 else "raised an error"
    except subprocess.TimeoutExpired:
        how = "still waiting"
    finally:
        child.kill()
        child.wait()
    return how, time.perf_counter() - begin


how, took = ending("both devices", seconds=60)
print("both devices:       ", how)
print("The others may take five times as long.")
print("device 1 stays away:", ending("device 1 stays away", 5 * took)[0])
print("loss is read early: ", ending("loss is read early", 5 * took)[0])
print("both, with 4 spaces:", ending("both devices", 5 * took, spaces=4)[0])

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only the first one finishes. Without device 1, device 0 waits inside its first norm. A loss that
# is read early waits for device 0, device 0 waits for device 1, and that waits for Python, which
# waits for the loss.
#
# </details>
#
# With 4 spaces we take it that one device's norm holds the space that the other needs to get to
# that norm; we haven't traced it. GPUs each have a space of their own (`src/resource.cc` at 1.9.1).
#
# **Remember:** with `SyncBatchNorm` give every device images in every step, equally many, and read
# nothing before every device has its images.
#
# ## Summary
#
# - The trainer adds gradients, so the sum of the devices' errors is the error of the step. In it
#   errors of first order nearly cancel: it shrinks with $1/m$, one device's error with $1/\sqrt m$.
#   With ReLU it shrinks more slowly, here roughly with $m^{-3/4}$.
# - Synchronised BatchNorm all-reduces two sums for each channel forward and two backward. Without
#   those of the backward pass, outputs are right and gradients are wrong.
# - `SyncBatchNorm` waits inside an operator. It hangs if a device stays away, or if a result is
#   read before all devices have their images.
