# %% [markdown]
# # Deeper · ResNet twice, and why float32 disagrees
#
# Chapter 13 trained LeNet in Gluon and in PyTorch, and the numbers agreed. Does ResNet-18 agree
# too? In float64 it does, but for BatchNorm's running statistics. In float32 the frameworks part,
# and we look for the cause.
#
# ## What you'll do
#
# Build ResNet-18 in both, carry the weights over, and compare losses, gradients, steps and running
# statistics. Then measure the errors of float32, and test what they come from.
#
# ## What you'll learn
#
# - how to compare gradients that should be zero;
# - in what BatchNorm differs between MXNet and PyTorch;
# - whose running statistics survive a step on two devices;
# - how an imprecise mean and ReLU together spoil gradients in float32.
#
# ## What you need
#
# Chapters 08, 09 and 13, PyTorch, and 6 GB of free memory. No GPU. Reading takes {reading time},
# running about a minute.

# %% tags=["torch"]
from functools import partial
from typing import NamedTuple

from helpers import load_data
from helpers.compare import largest_difference
from helpers.networks import lenet as gluon_lenet
from helpers.torch_networks import lenet

import mxnet as mx
import numpy as np
import torch
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn
from torch.func import functional_call

torch.set_num_threads(1)  # one core is one device
pair = [mx.cpu(0), mx.cpu(1)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = (data.train_images - data.train_images.mean()).astype("float64")  # [640, 1, 28, 28]
labels = data.train_labels

# %% [markdown]
# ## ResNet-18 in PyTorch
#
# Chapter 08's network for 28×28 images. `activation` is a class of layers, ReLU until the last
# section.

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
# ## And in Gluon
#
# Its children stand in the same order. `norm` makes a BatchNorm, or something else later.

# %%
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
        self.activation = activation

    def hybrid_forward(self, F, x):
        change = F.Activation(self.norm1(self.conv1(x)), self.activation)
        change = self.norm2(self.conv2(change))
        if self.project is not None:
            x = self.project(x)
        return F.Activation(change + x, self.activation)


def gluon_resnet18(norm=gluon.nn.BatchNorm, activation="relu"):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(64, 3, padding=1), norm(), gluon.nn.Activation(activation))
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        net.add(GluonResidual(width, stride, norm, activation))
        net.add(GluonResidual(width, 1, norm, activation))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10))
    return net

# %% [markdown]
# Many arrays have the same shape here, so two that were swapped could hide. Biases begin as zeros,
# and BatchNorm's scales as ones. We add noise to them, so that no two are alike.

# %%
def start_net(make, devices, dtype="float64"):
    net = make()
    mx.random.seed(12)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((2, 1, 28, 28), ctx=devices[0]))  # makes the weights now
    for parameter in net.collect_params(".*(bias|beta|gamma)").values():
        noise = nd.random.normal(scale=0.1, shape=parameter.shape)
        parameter.set_data(parameter.data(devices[0]) + noise)
    net.cast(dtype)
    return net


ours = start_net(gluon_resnet18, pair[:1])

# %% [markdown]
# A BatchNorm has four arrays in Gluon and five in PyTorch:

# %%
norm = gluon.nn.BatchNorm(in_channels=3)
print("Gluon:  ", [name.split("_", 1)[1] for name in norm.collect_params()])
print("PyTorch:", list(nn.BatchNorm2d(3).state_dict()))

# %% [markdown]
# `gamma` is `weight`, `beta` is `bias`. The fifth counts batches. PyTorch needs it only without a
# momentum, so we leave it out. All others are copied in order. (What `state_dict` returns shares
# its memory with the network.)

# %%
def arrays_in(net):
    return [array for name, array in net.state_dict().items() if "num_batches" not in name]


def carry_over(source, target):
    parameters = source.collect_params().values()
    for parameter, array in zip(parameters, arrays_in(target), strict=True):
        values = parameter.list_data()[0].asnumpy()
        array.copy_(torch.tensor(values))
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
# A step in Gluon, on one device or several. It returns the mean loss and the mean gradients:

# %% tags=["trains"]
def step_in_gluon(net, x, y):
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    devices = trained[0].list_ctx()
    trainer = gluon.Trainer(trained, "sgd", {"learning_rate": 0.125}, update_on_kvstore=False)
    x_shards = gluon.utils.split_and_load(nd.array(x, dtype=x.dtype), devices)
    y_shards = gluon.utils.split_and_load(nd.array(y), devices)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    trainer.step(len(x))  # leaves the sums of all devices' gradients in place
    total = sum(loss.sum().asscalar() for loss in losses)
    gradients = [p.grad(devices[0]).asnumpy() / len(x) for p in trained]
    return total / len(x), gradients

# %% [markdown]
# And in PyTorch. `model` is the network, or a function that calls it:

# %% tags=["trains"]
def step_in_torch(net, x, y, model=None):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    scores = (model or net)(torch.tensor(x))
    loss = F.cross_entropy(scores, torch.tensor(y).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), [p.grad.numpy().copy() for p in net.parameters()]

# %% [markdown]
# All eleven million parameters get one step on eight images. How far are the gradients apart? The
# three largest differences, each as a share of the gradient's largest entry:

# %% tags=["measured", "trains"]
x = images[:8]
y = labels[:8]
our_loss, our_gradients = step_in_gluon(ours, x, y)
their_loss, their_gradients = step_in_torch(theirs, x, y)
print(f"losses {our_loss:.12f} and {their_loss:.12f}")

names = [name for name, _ in theirs.named_parameters()]
differences = {}
for name, found, expected in zip(names, our_gradients, their_gradients, strict=True):
    differences[name] = float(largest_difference(found, expected))
for name in sorted(names, key=differences.get, reverse=True)[:3]:
    print(f"{name:14} {differences[name]:.0e}")

# %% [markdown]
# The losses agree, and some gradients differ by as much as they are large. All three are biases of
# convolutions. **Predict:** what is the true gradient of a bias right before a BatchNorm?
#
# It is zero. The norm subtracts the mean, and a bias is part of the mean. What is computed there is
# rounding, and two roundings have no digits in common. All convolutions but the three projections
# come right before a norm. We measure these *idle* gradients against the network's largest, and
# every other against its own largest entry.

# %%
idle = [name for name in names if name == "0.bias" or ("conv" in name and "bias" in name)]
live = [name for name in names if name not in idle]
print(len(idle), "idle gradients:", *idle[:3], "...")
print(len(live), "others:", *live[:3], "...")

# %% tags=["fold", "trains"]
# check: three steps: losses, gradients and weights agree to 1e-10; idle gradients are rounding
def live_only(gradients):
    return {name: gradients[names.index(name)] for name in live}


ours = start_net(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
first = [parameter.detach().numpy().copy() for parameter in theirs.parameters()]
for begin in [0, 8, 16]:
    x = images[begin : begin + 8]
    y = labels[begin : begin + 8]
    our_loss, our_gradients = step_in_gluon(ours, x, y)
    their_loss, their_gradients = step_in_torch(theirs, x, y)
    assert abs(our_loss - their_loss) < 1e-10 * their_loss
    assert largest_difference(live_only(our_gradients), live_only(their_gradients)) < 1e-10
    largest = max(np.abs(gradient).max() for gradient in their_gradients)
    for name in idle:
        place = names.index(name)
        assert np.abs(our_gradients[place]).max() < 1e-11 * largest
        assert np.abs(their_gradients[place]).max() < 1e-11 * largest
    trained = [p.data() for p in ours.collect_params().values() if p.grad_req != "null"]
    assert largest_difference(trained, list(theirs.parameters())) < 1e-10
assert len(idle) == 17 and len(live) == 59
assert largest_difference(list(theirs.parameters()), first) > 1e-2, "steps that move nothing"
print("3 steps: losses, 59 gradients and all weights agree to 1e-10;")
print("17 idle gradients are less than 1e-11 of the largest one, in both")

# %% [markdown]
# **Keep:** before you compare by shares, ask which values should be zero.
#
# ## Running statistics
#
# We left out BatchNorm's running mean and variance. One small layer and a batch of four numbers
# show how they differ. *Momentum* is 0.9 in MXNet, for what is kept, and 0.1 in PyTorch, for what
# is new. Is that all?

# %%
numbers = np.array([[1.0], [2.0], [3.0], [6.0]], "float32")
norm = gluon.nn.BatchNorm(in_channels=1)
norm.initialize()
with autograd.record():
    out = norm(nd.array(numbers))
out.backward()  # on a CPU MXNet's statistics change in the backward pass (chapter 09)
twin = nn.BatchNorm1d(1)
twin(torch.tensor(numbers))

print("variance with n:    ", numbers.var())
print("variance with n - 1:", numbers.var(ddof=1).round(3))
ours_new = (norm.running_var.data().asscalar() - 0.9) / 0.1  # it was 1, and 0.9 of that is kept
theirs_new = (twin.running_var.item() - 0.9) / 0.1
print(f"new in the running variance: MXNet {ours_new:.3f}, PyTorch {theirs_new:.3f}")

# %% [markdown]
# Both divide by $n$ to normalise the batch. For later, PyTorch keeps the estimate with $n - 1$. (So
# does MXNet on GPUs with cuDNN: chapter 09.)

# %% tags=["fold"]
# check: both normalise alike; no_grad leaves PyTorch in training mode, eval() doesn't
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

# %% [markdown]
# Is that all that differs in ResNet-18? From PyTorch's running statistics after one step we compute
# what MXNet's should be: undo the momentum, correct the variance by $(n - 1)/n$, and mix old and
# new again. $n$ is the batch size times the pixels of an image. MXNet's 0.9 is a float32.

# %%
NEW = 1 - float(np.float32(0.9))  # MXNet's share of the new batch
SIDES = [28] * 5 + [14] * 4 + [7] * 4 + [4] * 4  # of the images that each of 17 norms sees


def as_mxnets(buffers, n_images):
    expected = {}
    norms = [name.removesuffix(".running_mean") for name in buffers if "running_mean" in name]
    for norm, side in zip(norms, SIDES, strict=True):
        n = n_images * side**2
        new_mean = buffers[f"{norm}.running_mean"] / 0.1  # it began at 0
        new_variance = (buffers[f"{norm}.running_var"] - 0.9) / 0.1 * (n - 1) / n  # at 1
        expected[f"{norm}.running_mean"] = NEW * new_mean
        expected[f"{norm}.running_var"] = (1 - NEW) + NEW * new_variance
    return expected


def running_in(net, device):
    parameters = net.collect_params(".*running.*").values()
    return [parameter.data(device) for parameter in parameters]

# %% tags=["trains"]
x = images[:8]
y = labels[:8]
ours = start_net(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
step_in_gluon(ours, x, y)
step_in_torch(theirs, x, y)
expected = list(as_mxnets(dict(theirs.named_buffers()), 8).values())
difference = largest_difference(running_in(ours, pair[0]), expected)
assert difference < 1e-10
print(len(expected), "running means and variances agree to 1e-10")

# %% [markdown]
# **Keep:** a network carried over while it trains needs its momentum translated, and its running
# variances differ by $(n-1)/n$.
#
# ## Two replicas, two devices
#
# With BatchNorm each device normalises its own shard (chapter 09). So two replicas don't compute
# what one network does. They should compute what Gluon does on two devices. As in `DataParallel` of
# chapter 13, each replica has copies of the parameters. The first keeps the network's own
# *buffers*, its running statistics; the second gets copies of those too.

# %% tags=["trains"]
def in_two_replicas(net, x):
    first = {name: parameter.clone() for name, parameter in net.named_parameters()}
    second = {name: parameter.clone() for name, parameter in net.named_parameters()}
    for name, buffer in net.named_buffers():
        second[name] = buffer.clone()
    x_first, x_second = x.chunk(2)
    scores_first = functional_call(net, first, x_first)
    scores_second = functional_call(net, second, x_second)
    return torch.cat([scores_first, scores_second])


ours = start_net(gluon_resnet18, pair)
theirs = carry_over(ours, resnet18().double())
our_loss, our_gradients = step_in_gluon(ours, x, y)
their_loss, their_gradients = step_in_torch(theirs, x, y, partial(in_two_replicas, theirs))

# %% [markdown]
# Losses, gradients and weights agree. Afterwards the replicas are thrown away. **Predict:** whose
# running statistics does the network have?

# %%
expected = list(as_mxnets(dict(theirs.named_buffers()), 4).values())
for device in pair:
    difference = largest_difference(running_in(ours, device), expected)
    print(f"those of {device}:", bool(difference < 1e-10))

# %% tags=["fold"]
# check: two replicas and two devices agree to 1e-10, but not with one network
assert abs(our_loss - their_loss) < 1e-10 * their_loss
assert largest_difference(live_only(our_gradients), live_only(their_gradients)) < 1e-10
for device in pair:
    trained = [p.data(device) for p in ours.collect_params().values() if p.grad_req != "null"]
    assert largest_difference(trained, list(theirs.parameters())) < 1e-10
assert largest_difference(running_in(ours, pair[0]), expected) < 1e-10
assert largest_difference(running_in(ours, pair[1]), expected) > 1e-3
alone = carry_over(start_net(gluon_resnet18, pair[:1]), resnet18().double())
_, whole_gradients = step_in_torch(alone, x, y)
assert largest_difference(live_only(their_gradients), live_only(whole_gradients)) > 1e-2

# %% [markdown]
# Only the first's. What the second replica saw is lost. (PyTorch's first replica shares the
# network's buffers: docstring of `nn.DataParallel`.)
#
# ## float32: LeNet
#
# Now the numbers are shorter. How far apart are the two LeNets after 20 steps, in float32 and in
# float64?

# %%
def distances(dtype, steps=20, size=32):
    ours = start_net(gluon_lenet, pair[:1], dtype)
    theirs = carry_over(ours, lenet().to(getattr(torch, dtype)))
    found = []
    for begin in range(0, steps * size, size):
        x = images[begin : begin + size].astype(dtype)
        y = labels[begin : begin + size]
        step_in_gluon(ours, x, y)
        step_in_torch(theirs, x, y)
        weights = [parameter.data() for parameter in ours.collect_params().values()]
        found.append(float(largest_difference(weights, list(theirs.parameters()))))
    return found


drift = {"float32": distances("float32"), "float64": distances("float64")}

# %% tags=["fold", "measured"]
# draw: the difference after each step
from helpers.plotting import curves, show

steps = range(1, 21)
lines = {dtype: (steps, found) for dtype, found in drift.items()}
fig, ax = curves(f"After 20 steps: {drift['float32'][-1]:.0e} in float32, "
                 f"{drift['float64'][-1]:.0e} in float64", "step",
                 "largest difference of the weights", lines, logy=True)
ax.set_xticks([1, 5, 10, 15, 20])
show(fig, alt="Difference between the weights in MXNet and in PyTorch after each of 20 steps: "
              "float32 lies far above float64.")

# %% tags=["fold"]
# check: float64 stays below 1e-10, and float32 ends a thousand times as high
assert max(drift["float64"]) < 1e-10
assert drift["float32"][-1] > 1000 * drift["float64"][-1]

# %% [markdown]
# In float32 the same networks are more than a thousand times as far apart. A mistake of one part in
# ten million would be lost there.
#
# ## float32: ResNet-18
#
# Which of the two is right? PyTorch in float64 is the truth for both. We take one step in float32
# on eight images, and compare each parameter's gradient with the truth. One rounding is about
# $10^{-7}$.
#
# We also look at *signs*. ReLU lets a positive input pass, with its gradient, and stops a negative
# one. An input close to zero may get the other sign in float32. Then its gradient is switched on or
# off. So we note where the inputs of ReLU are positive. A *hook* is a function that a layer calls
# with its output. (After ReLU a block's output is positive where ReLU's input was.)

# %%
def note_signs(net):
    signs = []

    def hook(layer, inputs, output):
        values = output.asnumpy() if hasattr(output, "asnumpy") else output.detach().numpy()
        signs.append(values > 0)

    net[1].register_forward_hook(hook)  # the first BatchNorm
    for place in range(3, 11):  # the eight blocks
        net[place].norm1.register_forward_hook(hook)
        net[place].register_forward_hook(hook)
    return signs

# %% [markdown]
# `compare_float32` takes the step in MXNet, in PyTorch, and in PyTorch with float64. For the first
# two it returns the gradients' errors, and how many signs differ from float64's.

# %%
class Found(NamedTuple):
    errors: list  # one for each live gradient
    changed: int  # signs


def compare_float32(x, y, norm=gluon.nn.BatchNorm, activation=nn.ReLU):
    gluons_name = {nn.ReLU: "relu", nn.Softplus: "softrelu"}[activation]
    ours = start_net(partial(gluon_resnet18, norm, gluons_name), pair[:1], "float32")
    theirs = carry_over(ours, resnet18(activation))
    exact = carry_over(ours, resnet18(activation).double())

    true_signs = note_signs(exact)
    _, truth = step_in_torch(exact, x, y)
    results = []
    for net, step in [(ours, step_in_gluon), (theirs, step_in_torch)]:
        signs = note_signs(net)
        _, gradients = step(net, x.astype("float32"), y)
        errors = []
        for name in live:
            place = names.index(name)
            errors.append(float(largest_difference(gradients[place], truth[place])))
        changed = 0
        for found, expected in zip(signs, true_signs, strict=True):
            changed += np.sum(found != expected)
        results.append(Found(errors, int(changed)))
    return results

# %% tags=["measured", "few:LAST = 24=>LAST = 8"]
LAST = 24
eights = [(images[begin : begin + 8], labels[begin : begin + 8]) for begin in range(0, LAST, 8)]
with_relu = {"MXNet": [], "PyTorch": []}
for x, y in eights:
    by_mxnet, by_torch = compare_float32(x, y)
    with_relu["MXNet"].append(by_mxnet)
    with_relu["PyTorch"].append(by_torch)

print("          errors: median   worst   changed signs")
for name, batches in with_relu.items():
    for found in batches:
        print(f"{name:8} {np.median(found.errors):16.0e} {max(found.errors):7.0e} "
              f"{found.changed:15,}")

# %% [markdown]
# A row is a batch. In MXNet a dozen signs change or more, in PyTorch hardly any, of more than a
# million. Where none changes, errors are small.
#
# Can a single sign matter so much? We try it in float64. In one block, the smallest input of the
# first ReLU gets the other sign, and nothing else changes.

# %% tags=["fold", "measured", "trains"]
# measure: the gradients' errors after one sign was changed on purpose, in each of eight blocks
def change_a_sign(layer, inputs, output):
    changed = output.clone()
    smallest = changed.detach().abs().flatten().argmin()
    changed.view(-1)[smallest] *= -1
    return changed


x, y = eights[0]
source = start_net(gluon_resnet18, pair[:1])
_, truth = step_in_torch(carry_over(source, resnet18().double()), x, y)
after_one_sign = []
for place in range(3, 11):
    exact = carry_over(source, resnet18().double())
    exact[place].norm1.register_forward_hook(change_a_sign)
    _, gradients = step_in_torch(exact, x, y)
    found = [float(largest_difference(gradients[names.index(name)], truth[names.index(name)]))
             for name in live]
    after_one_sign.append(max(found))
    print(f"block {place - 2}: median {np.median(found):.0e}, worst {max(found):.0e}")
assert max(after_one_sign) > 1e-3

# %% [markdown]
# One sign of one input is enough for an error of some percent. In the later blocks it moves even
# the median: the backward pass goes on through all layers before them.
#
# ### A suspect
#
# Why more in MXNet? The first BatchNorm takes the mean of 6,272 numbers in each channel, 8 images
# of 28×28 pixels. A mean is only as precise as its sum. We give both frameworks what the first
# convolution makes of our images. With a momentum of 0 (in PyTorch 1) the running mean is the
# batch's mean.

# %%
theirs = carry_over(start_net(gluon_resnet18, pair[:1]), resnet18().double())
inputs = theirs[0](torch.tensor(images[:8])).detach().float().numpy()  # [8, 64, 28, 28]
norm = gluon.nn.BatchNorm(momentum=0.0, in_channels=64)
norm.initialize()
with autograd.record():
    out = norm(nd.array(inputs))
out.backward()
twin = nn.BatchNorm2d(64, momentum=1.0)
twin(torch.tensor(inputs))
print(norm.running_mean.data().shape, tuple(twin.running_mean.shape))

# %% [markdown]
# Beside them, NumPy adds up each channel's numbers one after the other in float32. The largest
# error of a channel's mean, as a share of its standard deviation:

# %% tags=["measured"]
columns = inputs.transpose(1, 0, 2, 3).reshape(64, -1)  # [64, 6272]
mean = columns.mean(axis=1, dtype="float64")
deviation = columns.std(axis=1, dtype="float64")
running_sums = np.add.accumulate(columns, axis=1, dtype="float32")
means = {
    "MXNet": norm.running_mean.data().asnumpy(),
    "PyTorch": twin.running_mean.numpy(),
    "one after the other": running_sums[:, -1] / 6272,
}
for name, found in means.items():
    print(f"{name:20} {np.max(np.abs(found - mean) / deviation):.0e}")

# %% [markdown]
# MXNet's means are as imprecise as those of the plain sum. PyTorch's are a thousand times better.
# On a CPU PyTorch adds a channel's float32 numbers in float64, for contiguous tensors as here
# (`acc_type` in `ATen/AccumulateType.h`, used by `native/cpu/batch_norm_kernel.cpp`). MXNet's own
# code adds them one after the other in float32 (`BatchNormForwardImpl` in
# `src/operator/nn/batch_norm.cc`). By default it hands float32 to the library oneDNN, whose code we
# haven't read.
#
# ### Two tests
#
# First, are the norms the cause? Then few signs should change in MXNet if *only* the norms compute
# in float64. (That is MXNet's own code then: `SupportMKLDNNBN`.)

# %%
class Float64Norm(gluon.nn.BatchNorm):
    def cast(self, dtype):
        super().cast("float64")  # also in a network of float32

    def forward(self, x):
        normalised = super().forward(x.astype(self.gamma.dtype))
        return normalised.astype("float32")

# %% [markdown]
# Second, is ReLU the amplifier? Then a *smooth* activation should have small errors, with the norms
# as they were. Softplus, $\ln(1 + e^x)$, is smooth: a change of sign changes its gradient only a
# little. **Predict** both outcomes.

# %% tags=["measured"]
rows = {
    "MXNet": with_relu["MXNet"],
    "MXNet, norms in float64": [],
    "PyTorch": with_relu["PyTorch"],
    "MXNet, softplus": [],
    "PyTorch, softplus": [],
}
for x, y in eights:
    by_mxnet, _ = compare_float32(x, y, norm=Float64Norm)
    rows["MXNet, norms in float64"].append(by_mxnet)
    by_mxnet, by_torch = compare_float32(x, y, activation=nn.Softplus)
    rows["MXNet, softplus"].append(by_mxnet)
    rows["PyTorch, softplus"].append(by_torch)

for name, batches in rows.items():
    worst = max(max(found.errors) for found in batches)
    changed = [found.changed for found in batches]
    print(f"{name:24} worst error {worst:.0e}, changed signs {changed}")

# %% tags=["fold", "measured"]
# draw: median and worst errors, for each batch
from helpers.plotting import BLUE, ORANGE, figure

fig, ax = figure("With a smooth activation no large error is left",
                 "", "error of gradients in float32")
for place, batches in enumerate(rows.values()):
    worst = [max(found.errors) for found in batches]
    medians = [np.median(found.errors) for found in batches]
    ax.semilogy([place - 0.1] * len(worst), worst, "o", color=ORANGE)
    ax.semilogy([place + 0.1] * len(medians), medians, "s", color=BLUE)
ax.plot([], [], "o", color=ORANGE, label="worst gradient of a batch")
ax.plot([], [], "s", color=BLUE, label="median")
ax.set_xticks(range(len(rows)), [name.replace(", ", ",\n") for name in rows])
fig.legend(loc="outside lower right", ncols=2, fontsize=8)
show(fig, alt="Errors of gradients in float32 on a logarithmic axis, worst and median of each "
              "batch, for MXNet, MXNet with norms in float64, PyTorch, and both with softplus.")

# %% tags=["fold"]
# check: signs change in MXNet's norms; precise norms keep nearly all; softplus has no large error
changed = {name: sum(found.changed for found in batches) for name, batches in rows.items()}
assert changed["MXNet"] > 3 * changed["PyTorch"]
assert changed["MXNet"] > 3 * changed["MXNet, norms in float64"]
for name in ["MXNet, softplus", "PyTorch, softplus"]:
    assert max(max(found.errors) for found in rows[name]) < 1e-4
for batches in rows.values():
    for found in batches:
        if found.changed == 0:
            assert max(found.errors) < 1e-4, "large errors without a change of sign"
for found in rows["MXNet"]:
    assert found.changed > 3 and max(found.errors) > 1e-4
signs = note_signs(theirs)
theirs(torch.tensor(images[:8]))
assert sum(each.size for each in signs) > 1e6, "so many signs are compared"

# %% [markdown]
# With precise norms hardly any sign changes in MXNet, as in PyTorch. With softplus signs still
# change, and no large error is left. So a large error takes *both*: something imprecise that moves
# an input across zero, and a ReLU, which has a kink there. In MXNet it is BatchNorm's sums.
#
# ## Summary
#
# - ResNet-18 agrees in float64 to $10^{-10}$: losses, gradients and weights over three steps.
#   Biases before a BatchNorm have a gradient of zero but for rounding, in both.
# - Running statistics differ: by what momentum means, and by $n$ or $n - 1$ in the variance.
# - Two replicas agree with Gluon's two devices. Only the first replica's running statistics
#   survive.
# - In float32 MXNet's BatchNorm is less precise on a CPU. So inputs of ReLU change their sign, and
#   gradients get large errors. Check an implementation in float64.
