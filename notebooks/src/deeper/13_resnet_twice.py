# %% [markdown]
# # Deeper · ResNet twice, and why float32 disagrees
#
# Chapter 13 trained LeNet in Gluon and in PyTorch, and the numbers agreed. Does ResNet-18 agree
# too? In float64 it does, except for BatchNorm's running statistics. In float32 it doesn't, and we
# look for the cause.
#
# > **What you'll do:** build ResNet-18 in both, copy the weights, and compare losses, gradients and
# > running statistics. Then measure the errors of float32, and test what they come from.
# >
# > **What you'll learn:** how to compare gradients that should be zero; how BatchNorm differs
# > between MXNet and PyTorch; how imprecise statistics and ReLU together spoil gradients in
# > float32; whose running statistics survive a step on two devices.
# >
# > **What you need:** chapters 08, 09 and 13, PyTorch, and 6 GB of free memory. No GPU. Reading
# > takes {reading time}, running about a minute.

# %% tags=["torch"]
from functools import partial
from typing import NamedTuple

from helpers import load_data
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
import torch
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn

torch.set_num_threads(1)  # PyTorch may use one core
pair = [mx.cpu(0), mx.cpu(1)]

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = (data.train_images - data.train_images.mean()).astype("float64")  # [640, 1, 28, 28]
labels = data.train_labels

# %% [markdown]
# ## The network in both
#
# Chapter 08's network for 28×28 images, now in PyTorch. `activation` is ReLU until the last test.

# %%
class Residual(nn.Module):
    def __init__(self, before, after, stride=1, activation=nn.ReLU):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = None
        if stride > 1:
            self.project = nn.Conv2d(before, after, 1, stride)
        self.activation = activation()

    def forward(self, x):
        change = self.activation(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        if self.project is not None:
            x = self.project(x)
        return self.activation(change + x)


# 8 images of 28 x 28 with 64 channels become 14 x 14 with 128
print(Residual(64, 128, stride=2)(torch.zeros(8, 64, 28, 28)).shape)

# %% [markdown]
# Four stages of two blocks, between a first convolution and a last linear layer:

# %%
def resnet18(activation=nn.ReLU):
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), activation()]
    before = 64
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers.append(Residual(before, width, stride, activation))
        layers.append(Residual(width, width, 1, activation))
        before = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


theirs = resnet18().double()
sizes = [parameter.numel() for parameter in theirs.parameters()]
print(len(sizes), "parameters,", f"{sum(sizes):,} numbers")

# %% [markdown]
# Gluon's twin has the same children in the same order. `start_net` makes it and sets the seed, so
# each call gives the *same* weights. Biases and BatchNorm's scales get some noise, so that no two
# arrays are alike.

# %% tags=["fold"]
# check: ResNet-18 in Gluon, child for child as in PyTorch; start_net gives the same weights again
class GluonResidual(gluon.nn.HybridBlock):
    def __init__(self, channels, stride=1, norm=gluon.nn.BatchNorm, activation="relu"):
        super().__init__()
        self.conv1 = gluon.nn.Conv2D(channels, 3, stride, padding=1)
        self.norm1 = norm()
        self.conv2 = gluon.nn.Conv2D(channels, 3, padding=1)
        self.norm2 = norm()
        self.project = None
        if stride > 1:
            self.project = gluon.nn.Conv2D(channels, 1, stride)
        self.activation = gluon.nn.Activation(activation)

    def forward(self, x):
        change = self.activation(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        if self.project is not None:
            x = self.project(x)
        return self.activation(change + x)


def gluon_resnet18(norm=gluon.nn.BatchNorm, activation="relu"):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(64, 3, padding=1), norm(), gluon.nn.Activation(activation))
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        net.add(GluonResidual(width, stride, norm, activation))
        net.add(GluonResidual(width, 1, norm, activation))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10))
    return net


def start_net(make, devices, dtype="float64"):
    net = make()
    mx.random.seed(12)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((2, 1, 28, 28), ctx=devices[0]))  # makes the weights now, on all devices
    for parameter in net.collect_params(".*(bias|beta|gamma)").values():
        noise = nd.random.normal(scale=0.1, shape=parameter.shape).astype(parameter.dtype)
        parameter.set_data(parameter.data(devices[0]) + noise)  # on all devices
    net.cast(dtype)
    return net


ours = start_net(gluon_resnet18, pair[:1])
again = start_net(gluon_resnet18, pair[:1])
for parameter, other in zip(ours.collect_params().values(), again.collect_params().values()):
    assert np.array_equal(parameter.data().asnumpy(), other.data().asnumpy())

# %% [markdown]
# Which arrays does a BatchNorm have in each framework?

# %%
norm = gluon.nn.BatchNorm(in_channels=3)
print("Gluon:  ", [name.split("_", 1)[1] for name in norm.collect_params()])
print("PyTorch:", list(nn.BatchNorm2d(3).state_dict()))

# %% [markdown]
# `gamma` is `weight`, `beta` is `bias`. The fifth counts batches, and we leave it out. All other
# arrays are copied in order. `copy_` writes into the network's own array.

# %%
def arrays_in(net):
    return [array for name, array in net.state_dict().items() if "num_batches" not in name]


def carry_over(source, target):
    parameters = source.collect_params().values()
    for parameter, array in zip(parameters, arrays_in(target), strict=True):
        on_first_device = parameter.list_data()[0]
        array.copy_(torch.tensor(on_first_device.asnumpy()))
    return target


carry_over(ours, theirs)
print(len(arrays_in(theirs)), "arrays copied")

# %% tags=["fold"]
# check: the same bits on both sides, and no two arrays of trained parameters are alike
kept = [parameter.list_data()[0].asnumpy() for parameter in ours.collect_params().values()]
for values, array in zip(kept, arrays_in(theirs), strict=True):
    assert np.array_equal(values, array.numpy())
trained = [parameter.detach().numpy().tobytes() for parameter in theirs.parameters()]
assert len(set(trained)) == len(trained) == 76

# %% [markdown]
# ## Three steps in float64
#
# `step_in_gluon` and `step_in_torch` are chapter 13's steps. Both return the mean loss and the mean
# gradient of each parameter, by PyTorch's names.

# %% tags=["fold", "trains"]
# define: one step in each framework, which returns the loss and the gradients
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def trained_in(net):
    return [p for p in net.collect_params().values() if p.grad_req != "null"]


def step_in_gluon(net, names, x, y):
    trained = trained_in(net)
    devices = trained[0].list_ctx()
    trainer = gluon.Trainer(trained, "sgd", {"learning_rate": 0.125}, update_on_kvstore=False)
    x_shards = gluon.utils.split_and_load(nd.array(x, dtype=x.dtype), devices)
    y_shards = gluon.utils.split_and_load(nd.array(y), devices)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    trainer.step(len(x))  # leaves the sums of all devices' gradients on each device
    total = sum(loss.sum().asscalar() for loss in losses)
    gradients = {}
    for name, parameter in zip(names, trained, strict=True):
        gradients[name] = parameter.grad(devices[0]).asnumpy() / len(x)
    return total / len(x), gradients


def step_in_torch(net, x, y, forward=None):
    if forward is None:
        forward = net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    loss = F.cross_entropy(forward(torch.tensor(x)), torch.tensor(y).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), {name: p.grad.numpy().copy() for name, p in net.named_parameters()}

# %% [markdown]
# All eleven million parameters get one step on eight images. Which gradients differ? We measure
# each difference as a share of the largest entry of PyTorch's gradient.

# %% tags=["trains"]
x = images[:8]
y = labels[:8]
names = [name for name, _ in theirs.named_parameters()]
our_loss, our_gradients = step_in_gluon(ours, names, x, y)
their_loss, their_gradients = step_in_torch(theirs, x, y)
print("losses agree to 1e-10:", abs(our_loss - their_loss) < 1e-10 * their_loss)

idle = []
live = []
for name in names:
    difference = largest_difference(our_gradients[name], their_gradients[name])
    if difference < 1e-10:
        live.append(name)
    else:
        idle.append(name)
print(len(live), "gradients agree to 1e-10")
print(len(idle), "don't:", *idle[:5], "...")

# %% [markdown]
# All seventeen are biases of convolutions. Some differ by as much as their own size. **Predict:**
# what is the true gradient of a bias right before a BatchNorm?
#
# It is zero. The norm subtracts the mean, and a bias is part of the mean. What is computed there is
# rounding, and two roundings have no digits in common. We call these gradients *idle*, and measure
# them against the network's largest. The other 59 are *live*. We take three steps from the start:

# %% tags=["fold", "trains"]
# check: three steps: losses, live gradients and weights agree to 1e-10; idle gradients are rounding
def only(wanted, gradients):
    return {name: gradients[name] for name in wanted}


before_a_norm = [name for name in names if name == "0.bias" or ("conv" in name and "bias" in name)]
assert idle == before_a_norm and len(idle) == 17 and len(live) == 59
assert largest_difference(only(idle, our_gradients), only(idle, their_gradients)) > 0.5
ours = start_net(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
first = [parameter.detach().numpy().copy() for parameter in theirs.parameters()]
for begin in [0, 8, 16]:
    x = images[begin : begin + 8]
    y = labels[begin : begin + 8]
    our_loss, our_gradients = step_in_gluon(ours, names, x, y)
    their_loss, their_gradients = step_in_torch(theirs, x, y)
    assert abs(our_loss - their_loss) < 1e-10 * their_loss
    assert largest_difference(only(live, our_gradients), only(live, their_gradients)) < 1e-10
    largest = max(np.abs(gradient).max() for gradient in their_gradients.values())
    for name in idle:
        assert np.abs(our_gradients[name]).max() < 1e-11 * largest
        assert np.abs(their_gradients[name]).max() < 1e-11 * largest
    trained = [parameter.data() for parameter in trained_in(ours)]
    assert largest_difference(trained, list(theirs.parameters())) < 1e-10
assert largest_difference(list(theirs.parameters()), first) > 1e-2, "steps that move nothing"
print("3 steps: losses, 59 live gradients and all weights agree to 1e-10;")
print("17 idle gradients are less than 1e-11 of the largest one, in both")

# %% [markdown]
# **Keep:** before you compare by shares, ask which values should be zero.
#
# ## Running statistics
#
# Do BatchNorm's running mean and variance agree too? Both frameworks mix old and new:
#
# - MXNet, with a *momentum* of 0.9: running $\leftarrow$ 0.9 · running + 0.1 · new;
# - PyTorch, with a *momentum* of 0.1: the same.
#
# In MXNet momentum is the share that is kept, in PyTorch the share that is new. The running
# variance begins at 1, so (running − 0.9) / 0.1 is what was new. We take a batch of four numbers.

# %%
numbers = np.array([[1.0], [2.0], [3.0], [6.0]], "float32")
norm = gluon.nn.BatchNorm(in_channels=1)
norm.initialize()
with autograd.record():
    out = norm(nd.array(numbers))
out.backward()  # on a CPU MXNet's statistics change in the backward pass (chapter 09)
twin = nn.BatchNorm1d(1)
twin(torch.tensor(numbers))

ours_new = (norm.running_var.data().asscalar() - 0.9) / 0.1
theirs_new = (twin.running_var.item() - 0.9) / 0.1
print(f"new in MXNet   {ours_new:.3f}, variance with n     {numbers.var():.3f}")
print(f"new in PyTorch {theirs_new:.3f}, variance with n - 1 {numbers.var(ddof=1):.3f}")

# %% [markdown]
# Both divide by $n$ to normalise the batch. In its running variance PyTorch divides by $n - 1$. (So
# does MXNet on GPUs with cuDNN: chapter 09.) Apart from *when* they change, and from MXNet's 0.9 in
# float32, that is all: from PyTorch's statistics of the whole ResNet-18 we can compute MXNet's.

# %% tags=["fold", "trains"]
# check: both normalise alike; PyTorch's running statistics, variances times (n - 1)/n, are MXNet's
assert abs(ours_new - 3.5) < 1e-3 and abs(theirs_new - 14 / 3) < 1e-3
assert largest_difference(twin(torch.tensor(numbers)), out) < 1e-6
norm = gluon.nn.BatchNorm(in_channels=1)
norm.initialize()
twin = nn.BatchNorm1d(1)
with torch.no_grad():
    evaluated = twin.eval()(torch.tensor(numbers))
    normalised = twin.train()(torch.tensor(numbers))
assert largest_difference(evaluated, norm(nd.array(numbers))) < 1e-6, "eval(): as outside record()"
assert abs(normalised.mean()) < 1e-6 and twin.running_mean.item() > 0, "no_grad changes nothing"

# MXNet keeps its 0.9 in float32. In a comparison to 1e-10 that shows.
NEW = 1 - float(np.float32(0.9))
# 17 norms in the order of the network: 5 see 28 x 28 pixels, then 4 each see 14 x 14, 7 x 7, 4 x 4.
SIDES = [28] * 5 + [14] * 4 + [7] * 4 + [4] * 4


def as_mxnets(net, n_images):
    buffers = dict(net.named_buffers())
    norms = [name.removesuffix(".running_mean") for name in buffers if "running_mean" in name]
    expected = []
    for norm, side in zip(norms, SIDES, strict=True):
        n = n_images * side**2
        new_mean = buffers[f"{norm}.running_mean"] / 0.1  # the running mean began at 0
        new_variance = (buffers[f"{norm}.running_var"] - 0.9) / 0.1  # this began at 1
        new_variance = new_variance * (n - 1) / n
        expected.append(NEW * new_mean)
        expected.append((1 - NEW) + NEW * new_variance)
    return expected


def running_in(net, device):
    parameters = net.collect_params(".*running.*").values()
    return [parameter.data(device) for parameter in parameters]


x = images[:8]
y = labels[:8]
ours = start_net(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
step_in_gluon(ours, names, x, y)
step_in_torch(theirs, x, y)
expected = as_mxnets(theirs, 8)
assert largest_difference(running_in(ours, pair[0]), expected) < 1e-10
print(len(expected), "running means and variances agree to 1e-10")

# %% [markdown]
# **Keep:** a network that is carried over while it trains needs BatchNorm's momentum translated,
# and each new variance differs by $(n-1)/n$.
#
# ## float32: LeNet
#
# Now the numbers are shorter: one rounding is about $10^{-7}$ of a number. How far apart are
# chapter 13's two LeNets after 20 steps, in float32 and in float64?

# %% tags=["fold", "measured"]
# draw: how far MXNet's weights are from PyTorch's after each of 20 steps, in float32 and float64
from helpers.networks import lenet as gluon_lenet
from helpers.plotting import BLUE, GREEN, ORANGE, curves, figure, show
from helpers.torch_networks import lenet


def drift_of(ours, theirs, dtype, steps=20, size=32):
    lenets_names = [name for name, _ in theirs.named_parameters()]
    found = []
    for begin in range(0, steps * size, size):
        x = images[begin : begin + size].astype(dtype)
        y = labels[begin : begin + size]
        step_in_gluon(ours, lenets_names, x, y)
        step_in_torch(theirs, x, y)
        weights = [parameter.data() for parameter in ours.collect_params().values()]
        found.append(float(largest_difference(weights, list(theirs.parameters()))))
    return found


ours = start_net(gluon_lenet, pair[:1], "float32")
in_float32 = drift_of(ours, carry_over(ours, lenet()), "float32")
ours = start_net(gluon_lenet, pair[:1], "float64")
in_float64 = drift_of(ours, carry_over(ours, lenet().double()), "float64")
steps = range(1, 21)
lines = {"float32": (steps, in_float32), "float64": (steps, in_float64)}
fig, ax = curves("In float32 the LeNets differ some billion times as much as in float64", "step",
                 "MXNet's weights against PyTorch's:\nlargest difference, as a share",
                 lines, logy=True)
ax.set_xticks([1, 5, 10, 15, 20])
show(fig, alt="Difference between the weights in MXNet and in PyTorch after each of 20 steps: "
              "float32 lies far above float64.")
assert max(in_float64) < 1e-10
for step in [0, 9, 19]:
    assert 1e8 < in_float32[step] / in_float64[step] < 1e10, "some billion times"
assert in_float32[-1] < 1e-5
assert torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps == 2**29

# %% [markdown]
# Float32 has 29 bits fewer, and $2^{29}$ is half a billion. A mistake of one part in ten million
# would be lost there. Still, LeNet's weights agree to five digits. And ResNet-18?
#
# ## float32: ResNet-18
#
# Which of the two is right, MXNet or PyTorch? Both agree in float64, so float64 is the *truth* for
# both. We take one step in float32 on eight images. The *error* of a gradient is its difference
# from the truth, as a share of the largest entry.

# %%
def errors_of(gradients, truth):
    errors = []
    for name in live:
        difference = largest_difference(gradients[name], truth[name])
        errors.append(float(difference))
    return errors

# %% [markdown]
# We also look at *signs*. ReLU lets a positive input pass, with its gradient, and stops a negative
# one. An input close to zero may get the other sign in float32. Then its gradient is switched on or
# off. So we note which inputs of ReLU are positive. A *hook* is a function that a layer calls with
# its inputs; both frameworks have it.

# %%
def note_signs(net):
    signs = []

    def hook(layer, inputs):
        values = inputs[0]
        if isinstance(values, torch.Tensor):
            signs.append(values.detach().numpy() > 0)
        else:
            signs.append(values.asnumpy() > 0)

    net[2].register_forward_pre_hook(hook)  # the first ReLU
    for block in list(net)[3:11]:  # the eight blocks
        block.activation.register_forward_pre_hook(hook)
    return signs


def count_changed(signs, true_signs):
    changed = 0
    for found, expected in zip(signs, true_signs, strict=True):
        changed += int(np.sum(found != expected))
    return changed

# %% [markdown]
# `compare_float32` takes the same step in MXNet, in PyTorch, and in PyTorch with float64. For the
# first two it returns the errors, one for each live gradient, and how many signs have changed.

# %% tags=["fold"]
# define: one step in MXNet and in PyTorch, its errors and changed signs against float64
class Found(NamedTuple):
    errors: list  # one for each live gradient
    changed: int  # how many signs differ from float64's


def compare_float32(x, y, make_gluon=gluon_resnet18, make_torch=resnet18):
    ours = start_net(make_gluon, pair[:1], "float32")
    theirs = carry_over(ours, make_torch())
    exact = carry_over(ours, make_torch().double())
    our_signs = note_signs(ours)
    their_signs = note_signs(theirs)
    true_signs = note_signs(exact)
    _, our_gradients = step_in_gluon(ours, names, x.astype("float32"), y)
    _, their_gradients = step_in_torch(theirs, x.astype("float32"), y)
    _, truth = step_in_torch(exact, x, y)
    by_mxnet = Found(errors_of(our_gradients, truth), count_changed(our_signs, true_signs))
    by_torch = Found(errors_of(their_gradients, truth), count_changed(their_signs, true_signs))
    return by_mxnet, by_torch

# %% [markdown]
# Three batches:

# %% tags=["measured", "few:LAST = 24=>LAST = 8"]
def print_found(name, found):
    median = np.median(found.errors)
    worst = max(found.errors)
    print(f"{name:8} changed signs {found.changed:2}, error median {median:.0e}, worst {worst:.0e}")


LAST = 24  # images
batches = []
with_relu = {"MXNet": [], "PyTorch": []}
for begin in range(0, LAST, 8):
    x = images[begin : begin + 8]
    y = labels[begin : begin + 8]
    batches.append((x, y))
    by_mxnet, by_torch = compare_float32(x, y)
    with_relu["MXNet"].append(by_mxnet)
    with_relu["PyTorch"].append(by_torch)
    print_found("MXNet", by_mxnet)
    print_found("PyTorch", by_torch)

# %% [markdown]
# There are 3.5 million signs. In MXNet more than three change in each batch, in PyTorch hardly any.
# Where none changes, errors are small.
#
# Can a single sign matter so much? We try it in float64. In one block, the smallest input of the
# first ReLU gets the other sign: the input nearest to 0. The hook returns the changed array, which
# replaces the output. The change is a constant to the backward pass, so only ReLU's side is
# another:

# %%
def change_a_sign(layer, inputs, output):
    values = output.detach().view(-1)
    smallest = values.abs().argmin()
    changed = output.clone()
    changed.view(-1)[smallest] -= 2 * values[smallest]  # a constant: its gradient isn't changed
    return changed

# %% tags=["fold", "measured", "trains"]
# measure: the gradients' errors after one sign was changed on purpose, in each of eight blocks
class Changed(NamedTuple):
    count: int  # how many inputs of ReLU have another sign
    size: float  # the largest of these, as a share of the largest input


def change_and_note(layer, inputs, output):
    changed = change_a_sign(layer, inputs, output)
    other_sign = (changed > 0) != (output > 0)
    values = output.detach()
    size = values[other_sign].abs().max() / values.abs().max()
    changed_inputs.append(Changed(int(other_sign.sum()), float(size)))
    return changed


x, y = batches[0]
source = start_net(gluon_resnet18, pair[:1])
_, truth = step_in_torch(carry_over(source, resnet18().double()), x, y)
after_one_sign = []
changed_inputs = []
for number in range(1, 9):
    exact = carry_over(source, resnet18().double())
    block = exact[number + 2]
    block.norm1.register_forward_hook(change_and_note)  # its output goes into ReLU
    _, gradients = step_in_torch(exact, x, y)
    errors = errors_of(gradients, truth)
    after_one_sign.append(max(errors))
    print(f"block {number}, errors: median {np.median(errors):.0e}, worst {max(errors):.0e}")
assert min(after_one_sign) > 1e-4 and 1e-3 < max(after_one_sign) < 0.2
assert len(changed_inputs) == 8
for changed in changed_inputs:
    assert changed.count == 1 and changed.size < 1e-4, "not a single sign, or not one near 0"

# %% [markdown]
# One sign of one input is enough: in each block the worst error is at least a thousand times a
# rounding of float32. In the later blocks even the median moves: the backward pass goes on through
# all layers before them.
#
# ### A suspect
#
# Why more in MXNet? The first BatchNorm takes the mean of 6,272 numbers in each channel, 8 images
# of 28×28 pixels. A mean is only as precise as its sum. We read the means and variances that the
# 17 norms of both networks compute in the first batch's step. NumPy computes them from the same
# inputs in float64. Below are the largest errors of all channels. A mean's error is divided by the
# standard deviation, a variance's by the variance:

# %% tags=["fold", "measured", "trains"]
# measure: errors of the norms' means and variances, which are the running ones if no old is kept
def norms_in(net):
    norms = [net[1]]
    for block in list(net)[3:11]:
        norms.append(block.norm1)
        norms.append(block.norm2)
    return norms


def note_inputs(net):
    noted = []
    for norm in norms_in(net):
        norm.register_forward_pre_hook(lambda layer, inputs: noted.append(inputs[0]))
    return noted


def errors_of_statistics(mean, variance, inputs):
    columns = inputs.astype("float64").transpose(1, 0, 2, 3).reshape(inputs.shape[1], -1)
    true_variance = columns.var(axis=1)
    of_mean = np.abs(mean - columns.mean(axis=1)) / np.sqrt(true_variance)
    of_variance = np.abs(variance / true_variance - 1)
    return of_mean.max(), of_variance.max()


x, y = batches[0]
ours = start_net(gluon_resnet18, pair[:1], "float32")
theirs = carry_over(ours, resnet18())
our_inputs = note_inputs(ours)
their_inputs = note_inputs(theirs)
for norm in norms_in(ours):
    norm._kwargs["momentum"] = 0.0
for norm in norms_in(theirs):
    norm.momentum = 1.0
step_in_gluon(ours, names, x.astype("float32"), y)
step_in_torch(theirs, x.astype("float32"), y)
in_mxnet = []
in_torch = []
for norm, twin, noted, twins in zip(norms_in(ours), norms_in(theirs), our_inputs, their_inputs):
    mean = norm.running_mean.data().asnumpy()
    variance = norm.running_var.data().asnumpy()
    in_mxnet.append(errors_of_statistics(mean, variance, noted.asnumpy()))
    inputs = twins.detach().numpy()
    n = inputs.size // inputs.shape[1]
    variance = twin.running_var.numpy() * (n - 1) / n
    in_torch.append(errors_of_statistics(twin.running_mean.numpy(), variance, inputs))
print(f"{'':24}mean    variance")
for name, errors in [("MXNet", in_mxnet), ("PyTorch", in_torch)]:
    print(f"{name:9} first norm    {errors[0][0]:.0e}   {errors[0][1]:.0e}")
    largest_mean, largest_variance = np.max(errors[1:], axis=0)
    print(f"{name:9} other norms   {largest_mean:.0e}   {largest_variance:.0e}")
assert len(in_mxnet) == len(our_inputs) == 17 and our_inputs[0].shape == (8, 64, 28, 28)
for place in [0, 1]:
    largest_in_mxnet = np.max(np.array(in_mxnet)[:, place])
    largest_in_torch = np.max(np.array(in_torch)[:, place])
    assert 10 * largest_in_torch < largest_in_mxnet < 1e-3 and largest_in_torch < 1e-5

# %% [markdown]
# PyTorch's are more than ten times as precise. (On a CPU it adds float32 numbers in float64:
# `acc_type` in `ATen/AccumulateType.h`. MXNet hands them to the library oneDNN, whose code we
# haven't read.)
#
# ### Two tests
#
# First, are these statistics the cause? In a network of float32 *only* they, and the normalising,
# are computed in float64. MXNet's own norm scales and shifts:

# %%
class ExactStatistics(gluon.nn.BatchNorm):
    def __init__(self):
        # it takes its running mean and variance, 0 and 1, for the batch's
        super().__init__(use_global_stats=True, epsilon=0)

    def statistics(self, x):
        mean = x.mean(axis=(0, 2, 3), keepdims=True)
        variance = nd.broadcast_sub(x, mean).square().mean(axis=(0, 2, 3), keepdims=True)
        return mean, variance

    def forward(self, x):
        mean, variance = self.statistics(x.astype("float64"))
        centred = nd.broadcast_sub(x.astype("float64"), mean)
        normalised = nd.broadcast_div(centred, nd.sqrt(variance + 1e-5))
        return super().forward(normalised.astype("float32"))

# %% [markdown]
# Second, is ReLU the amplifier? Softplus, $\ln(1 + e^x)$, is smooth: a change of sign changes its
# gradient only a little. **Predict** for each test: what happens to the number of changed signs,
# and what to the worst error?

# %%
with_exact_statistics = []
with_softplus = {"MXNet": [], "PyTorch": []}
for x, y in batches:
    by_mxnet, _ = compare_float32(x, y, make_gluon=partial(gluon_resnet18, norm=ExactStatistics))
    with_exact_statistics.append(by_mxnet)
    by_mxnet, by_torch = compare_float32(
        x, y,
        make_gluon=partial(gluon_resnet18, activation="softrelu"),  # Gluon's name of softplus
        make_torch=partial(resnet18, activation=nn.Softplus))
    with_softplus["MXNet"].append(by_mxnet)
    with_softplus["PyTorch"].append(by_torch)

# %% tags=["fold"]
# measure: a control: MXNet's errors are put back into the exact statistics
class ErrorsPutBack(ExactStatistics):
    def forward(self, x):
        self.in_float32 = x
        return super().forward(x)

    def statistics(self, x):
        mean, variance = super().statistics(x)
        zeros = nd.zeros(x.shape[1])
        ones = nd.ones(x.shape[1])
        with autograd.pause(train_mode=True):  # the errors are constants to the backward pass
            _, found, inverse = nd.BatchNorm(self.in_float32, ones, zeros, zeros, ones, eps=1e-5,
                                             output_mean_var=True)
            found_mean = found.astype("float64").reshape((1, -1, 1, 1))
            found_variance = inverse.astype("float64").reshape((1, -1, 1, 1)) ** -2 - 1e-5
            error_of_mean = found_mean - mean
            error_of_variance = found_variance - variance
        return mean + error_of_mean, variance + error_of_variance


with_errors_put_back = []
for x, y in batches:
    by_mxnet, _ = compare_float32(x, y, make_gluon=partial(gluon_resnet18, norm=ErrorsPutBack))
    with_errors_put_back.append(by_mxnet)

# %% tags=["fold", "measured"]
# draw: the worst error of each batch against its changed signs
rows = {
    "MXNet": with_relu["MXNet"],
    "MXNet, exact statistics": with_exact_statistics,
    "MXNet's errors put back": with_errors_put_back,
    "PyTorch": with_relu["PyTorch"],
    "MXNet, softplus": with_softplus["MXNet"],
    "PyTorch, softplus": with_softplus["PyTorch"],
}
print("changed signs and worst error, batch after batch:")
for name, row in rows.items():
    cells = [f"{found.changed:2}, {max(found.errors):.0e}" for found in row]
    print(f"{name:24}", "   ".join(cells))
fig, ax = figure("Large errors take both: a changed sign, and ReLU",
                 "changed signs in a batch", "worst error of a gradient in float32")
series = [
    ("MXNet", "o", BLUE, BLUE),
    ("MXNet, exact statistics", "s", GREEN, GREEN),
    ("PyTorch", "^", ORANGE, ORANGE),
    ("MXNet, softplus", "o", BLUE, "white"),
    ("PyTorch, softplus", "^", ORANGE, "white"),
]
for name, marker, edge, fill in series:
    changed = [found.changed for found in rows[name]]
    worst = [max(found.errors) for found in rows[name]]
    label = name.replace(", ", ",\n")
    ax.semilogy(changed, worst, marker, color=edge, markerfacecolor=fill, markersize=8, label=label)
fig.legend(loc="outside right upper", fontsize=8)
show(fig, alt="Worst error of a gradient against the number of changed signs, a point for each "
              "batch: with ReLU, only batches with a changed sign have large errors; with softplus "
              "all errors are small.")

# %% tags=["fold"]
# check: signs change by MXNet's statistics; with exact ones few do; softplus has no large error
changed = {}
for name, row in rows.items():
    changed[name] = sum(found.changed for found in row)
on_one_cpu = "not so on this CPU: three batches were tried, on one"
assert changed["MXNet"] > 3 * changed["PyTorch"], on_one_cpu
assert changed["MXNet"] > 3 * changed["MXNet, exact statistics"], on_one_cpu
assert changed["MXNet's errors put back"] > 3 * changed["MXNet, exact statistics"], on_one_cpu
assert changed["MXNet, softplus"] > 0, on_one_cpu
for name in ["MXNet, softplus", "PyTorch, softplus"]:
    for found in rows[name]:
        assert max(found.errors) < 1e-4, name
for row in rows.values():
    for found in row:
        if found.changed == 0:
            assert max(found.errors) < 1e-4, "large errors without a change of sign"
for found in rows["MXNet"]:
    assert found.changed > 3 and max(found.errors) > 1e-4
signs = note_signs(theirs)
theirs(torch.tensor(images[:8]).float())
assert len(signs) == 17 and sum(each.size for each in signs) == 3_473_408

# %% [markdown]
# With exact statistics (squares) hardly any sign changes in MXNet, as in PyTorch. With MXNet's
# errors put back into them, as many change as before. So MXNet's signs change by the errors of its
# statistics. The *worst* error can stay at percents: one changed sign can do it, in PyTorch too.
# With softplus signs change, and no large error is left. So a large error needs two things:
# rounding that moves an input across zero, and ReLU's kink there.
#
# **Keep:** in float32 two right implementations can differ by percents. Look for mistakes in
# float64.
#
# ## Two replicas, two devices
#
# One question is left. With BatchNorm each device normalises its own shard (chapter 09). So two
# replicas of `DataParallel` (chapter 13) compute what Gluon does on two devices, not what one
# network does. After the step the replicas are thrown away. **Predict:** whose running statistics
# does the network have, those that Gluon has on `cpu(0)` or on `cpu(1)`?

# %% tags=["fold", "trains"]
# check: two replicas and two devices agree to 1e-10, but not with one network; whose statistics?
from torch.func import functional_call


def in_two_replicas(net, x):
    first = {name: parameter.clone() for name, parameter in net.named_parameters()}
    second = {name: parameter.clone() for name, parameter in net.named_parameters()}
    for name, buffer in net.named_buffers():
        second[name] = buffer.clone()
    x_first, x_second = x.chunk(2)
    scores_first = functional_call(net, first, x_first)  # buffers: those of net
    scores_second = functional_call(net, second, x_second)
    return torch.cat([scores_first, scores_second])


x = images[:8]
y = labels[:8]
ours = start_net(gluon_resnet18, pair)
theirs = carry_over(ours, resnet18().double())
our_loss, our_gradients = step_in_gluon(ours, names, x, y)
their_loss, their_gradients = step_in_torch(theirs, x, y, partial(in_two_replicas, theirs))
expected = as_mxnets(theirs, 4)  # four images for each device
for device in pair:
    the_same = largest_difference(running_in(ours, device), expected) < 1e-10
    print(f"those on {device}:", the_same)
assert abs(our_loss - their_loss) < 1e-10 * their_loss
assert largest_difference(only(live, our_gradients), only(live, their_gradients)) < 1e-10
for device in pair:
    trained = [parameter.data(device) for parameter in trained_in(ours)]
    assert largest_difference(trained, list(theirs.parameters())) < 1e-10
assert largest_difference(running_in(ours, pair[0]), expected) < 1e-10
assert largest_difference(running_in(ours, pair[1]), expected) > 1e-3
alone = carry_over(start_net(gluon_resnet18, pair[:1]), resnet18().double())
_, whole_gradients = step_in_torch(alone, x, y)
assert largest_difference(only(live, their_gradients), only(live, whole_gradients)) > 1e-2

# %% [markdown]
# Only the first's. PyTorch's first replica shares the network's *buffers*, its running statistics;
# the others get copies (docstring of `nn.DataParallel`), and our two follow it. What the second saw
# is lost. Losses, gradients and weights agree with Gluon's two devices.
#
# ## Summary
#
# - ResNet-18 agrees in float64 to $10^{-10}$: losses, gradients and weights over three steps. The
#   gradient of a bias before a BatchNorm should be zero; what is computed is rounding.
# - Running statistics differ: by what momentum means, and by $n$ or $n - 1$ in each new variance.
# - In float32 some inputs of ReLU change their sign, and one can make an error of percents, in
#   PyTorch too. On a CPU the statistics of MXNet's BatchNorm are less precise, and so change more
#   signs.
# - Two replicas agree with Gluon's two devices. Only the first replica's running statistics
#   survive.
