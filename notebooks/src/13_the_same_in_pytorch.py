# %% [markdown]
# # 13 · The same in PyTorch
#
# Apache MXNet was retired to the Apache Attic in 2023: no more releases. Devices, shards,
# all-reduce, replicas that must stay equal: PyTorch has them too, partly under other names. Here
# the two frameworks check each other.
#
# ## What you'll do
#
# Run MXNet's names and PyTorch's side by side. Build LeNet and ResNet-18 a second time, copy the
# weights over, and compare losses, gradients and steps. Then rebuild `nn.DataParallel` from its
# four pieces, and read a published comparison that uses it. An appendix finds out why float32
# compares badly.
#
# ## What you'll learn
#
# - which name in PyTorch stands for which in MXNet, and where the two are *not* the same;
# - how one framework becomes the oracle for another;
# - what `DataParallel` does in each step, and what that costs;
# - how a network can differ between two calls of one function.
#
# ## What you need
#
# Chapters 04 to 10 and 12, no GPU, 6 GB of free memory, and PyTorch. If the next cell can't find
# it, run `make setup TORCH=1` in a terminal and restart the kernel. Reading takes {reading time}
# with the appendix, running about a minute on two cores.

# %% tags=["torch"]
from helpers import load_data
from helpers.plotting import BLUE, ORANGE, figure, show

import torch

# %% [markdown]
# `nd` and `gluon` are MXNet's, `nn` and `F` PyTorch's (except the `F` that Gluon passes
# to `hybrid_forward`). Images are centred, in float64.

# %%
import copy
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import numpy as np
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn

torch.set_num_threads(1)  # one core is one device; helpers has already limited the other threads

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = (data.train_images - data.train_images.mean()).astype("float64")  # [640, 1, 28, 28]
labels = data.train_labels  # int32 [640]
pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# One oracle serves the whole chapter: the largest difference between two arrays as a share of the
# second's largest entry, and of several pairs the worst. It must notice NaN.

# %%
def apart(found, truth):
    pairs = zip(found, truth, strict=True)
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


right = [np.array([1.0, 2.0]), np.array([8.0])]
assert apart(right, right) == 0 and apart([np.array([1.0, 2.5]), right[1]], right) == 0.25
assert apart([np.array([1.0, 2.5]), np.array([4.0])], right) == 0.5, "of two pairs the worst"
assert np.isnan(apart([right[0], np.array([np.nan])], right)), "NaN must not pass"

# %% [markdown]
# ## A dictionary that runs
#
# ### Context and device
#
# MXNet's *context* is PyTorch's *device*. **Predict:** on which device is a tensor that was created
# with `device="cpu:1"`?

# %%
a = nd.ones((2, 3), ctx=mx.cpu(1))
b = torch.ones(2, 3, device="cpu:1")
print(a.context, "and", b.device)
assert (a.asnumpy() == b.numpy()).all()

# %% [markdown]
# To MXNet `cpu(1)` is a device with a thread of its own; to PyTorch the CPU is *one* device. So
# PyTorch can't simulate two devices in a process. It does have a device without memory, `meta`,
# which knows shapes only. Devices don't mix (a CPU's zero-dimensional tensors may):

# %%
try:
    nn.Linear(3, 2)(torch.ones(1, 3, device="meta"))
except RuntimeError as error:
    print(type(error).__name__)
else:
    raise AssertionError("weights and data on two devices should be refused")

# %% [markdown]
# `as_in_context` and `to` copy only what is elsewhere. An array that is already there is returned
# itself, not copied: writing into the result changes the original.

# %%
assert a.as_in_context(mx.cpu(1)) is a and a.as_in_context(mx.cpu(0)) is not a
assert b.to("cpu") is b and b.to("meta") is not b and b.clone() is not b

# %% [markdown]
# ### Splitting a batch
#
# Gluon's shards of ten examples for four devices differ by one at most. PyTorch has several cuts,
# and `chunk` is the one that `DataParallel` uses. **Predict** what it makes of ten examples, and of
# five.

# %%
four = [mx.cpu(r) for r in range(4)]
shards = gluon.utils.split_and_load(nd.arange(10), four, even_split=False)
print("split_and_load", [len(s) for s in shards])
print("chunk", *([len(s) for s in torch.arange(n).chunk(4)] for n in (10, 5)))
cut = torch.arange(10).tensor_split(4)
assert all((s.asnumpy() == t.numpy()).all() for s, t in zip(shards, cut, strict=True)), "as Gluon"

# %% [markdown]
# `chunk` rounds the size of a shard up and hands out shards of that size until the batch is used
# up. With five examples one of four devices gets none.
#
# ### Gradients
#
# A second backward pass in MXNet *replaces* the gradient, by default. And in PyTorch? **Predict.**

# %%
w, v = nd.array([3.0]), torch.tensor([3.0], requires_grad=True)
w.attach_grad()
for _ in range(2):
    with autograd.record():
        loss = w * w
    loss.backward()
    (v * v).sum().backward()
print("MXNet", w.grad.asscalar(), "PyTorch", v.grad.item())

# %% [markdown]
# PyTorch adds, as MXNet does with `grad_req="add"`; hence `zero_grad()` in PyTorch's loops. MXNet
# records inside `autograd.record()` only. PyTorch records what needs gradients, unless told not to,
# as by `torch.no_grad()`.
#
# `record()` also switches to training mode, by default. A PyTorch module has a mode of its own:
# training, until `eval()`.
#
# ### The loss
#
# Gluon's loss is a number for each example. PyTorch's is the mean over the batch, by default.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
scores, targets = np.random.RandomState(12).randn(8, 10), labels[:8]
each = softmax(nd.array(scores, dtype="float64"), nd.array(targets)).asnumpy()
t, target = torch.tensor(scores), torch.tensor(targets).long()
assert each.shape == (8,) and abs(F.cross_entropy(t, target).item() - each.mean()) < 1e-12
assert apart([F.cross_entropy(t, target, reduction="none").numpy()], [each]) < 1e-12

# %% [markdown]
# That decides who divides. Gluon adds gradients up, and `trainer.step(batch_size)` divides. In
# PyTorch the mean has divided already, and `optimizer.step()` takes the gradient as it is.
#
# ### Trainer and optimizer
#
# Three steps with momentum and weight decay on one weight whose gradient is always 1, each with its
# own learning rate.

# %% tags=["trains"]
def mxnet_sgd(rates):
    w = gluon.Parameter("w", shape=(1,), dtype="float64")
    w.initialize(mx.init.One())
    trainer = gluon.Trainer([w], "sgd", {"momentum": 0.5, "wd": 0.25})
    for rate in rates:
        with autograd.record():
            loss = w.data() * 1
        loss.backward()
        trainer.set_learning_rate(rate)
        trainer.step(1)
    return w.data().asscalar()


# %% tags=["trains"]
def torch_sgd(rates):
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5, weight_decay=0.25)
    for rate in rates:
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return w.item()


# %% [markdown]
# **Predict:** do they agree while the rate is constant? And if it is halved for the last step?

# %%
schedules = [0.125] * 3, [0.125, 0.125, 0.0625]
for rates in schedules:
    print(rates, mxnet_sgd(rates), torch_sgd(rates))

# %% [markdown]
# MXNet puts the rate *into* the velocity, $v \leftarrow m v + \eta g$; PyTorch multiplies
# afterwards, $w \leftarrow w - \eta v$:

# %%
def by_hand(rates, rate_in_velocity):
    w, v = 1.0, 0.0
    for rate in rates:
        v = 0.5 * v + (1 + 0.25 * w) * (rate if rate_in_velocity else 1)
        w -= v * (1 if rate_in_velocity else rate)
    return w


for rates in schedules:
    assert mxnet_sgd(rates) == by_hand(rates, True) and torch_sgd(rates) == by_hand(rates, False)

# %% [markdown]
# While $\eta$ is constant that is the same. After a change MXNet's earlier gradients keep their old
# rate. With momentum, a schedule carried over from one to the other trains differently.
#
# ### Waiting
#
# MXNet's operators go into a queue, and `waitall` waits. **On GPUs:** PyTorch queues too, and
# `torch.accelerator.synchronize()` waits, for one device, by default the current one; without an
# accelerator it raises. On a CPU PyTorch computes before the call returns. We time a call, and then
# a look at the result:

# %%
def share_while_asking(ask, wait):
    start = time.perf_counter()
    ask()
    asked = time.perf_counter() - start
    wait()
    return asked / (time.perf_counter() - start)


# %% tags=["measured"]
big = nd.random.uniform(shape=(1000, 1000))
twin, products = torch.tensor(big.asnumpy()), []
in_call = [share_while_asking(ask, wait) for ask, wait in (
    (lambda: products.append(nd.dot(big, big)), lambda: products[-1].asnumpy()),
    (lambda: products.append(twin @ twin), lambda: products[-1][0, 0].item()))]
assert in_call[0] < 0.5 < in_call[1], "MXNet hands the work out, PyTorch does it"
print("the call takes {:.0%} of the time in MXNet, {:.0%} in PyTorch".format(*in_call))

# %% [markdown]
# So one Python thread can keep two of MXNet's simulated devices busy. PyTorch on a CPU needs a
# thread or a process for each.
#
# ## LeNet twice
#
# First in Gluon, as in chapter 06, then in PyTorch, which wants to know how many numbers go into a
# layer, and whose linear layer doesn't flatten. (Image sides: 28, 26, 13, 9, 4.)

# %%
def gluon_lenet():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(20, kernel_size=3, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Conv2D(50, kernel_size=5, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
    return net


# %%
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


# %% [markdown]
# Both list their parameters from input to output, in the same layout: output channels first.
# Biases, and BatchNorm's scales, get numbers instead of zeros and ones, since two zeros that are
# swapped look the same.

# %%
def start(make, places, dtype="float64"):
    net = make()
    mx.random.seed(12)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(nd.zeros((2, 1, 28, 28), ctx=places[0]))
    for p in net.collect_params(".*(bias|beta|gamma)").values():
        p.set_data(p.data(places[0]) + nd.random.normal(scale=0.1, shape=p.shape))
    net.cast(dtype)
    return net


ours, theirs = start(gluon_lenet, pair), lenet().double()
for p, (name, q) in zip(ours.collect_params().values(), theirs.named_parameters(), strict=True):
    print(f"{p.name.split('_')[-1]:8} {name:9} {tuple(p.shape)}")
    assert p.shape == q.shape

# %% [markdown]
# Weights can be copied in that order. A layer of BatchNorm has four arrays in Gluon and five in
# PyTorch:

# %%
norm = gluon.nn.BatchNorm(in_channels=3)
print([name.split("_", 1)[1] for name in norm.collect_params()])
print(list(nn.BatchNorm2d(3).state_dict()))

# %% [markdown]
# `gamma` is `weight`, and `beta` is `bias`. The fifth counts batches; PyTorch needs it only without
# a momentum, so we leave it out.

# %%
def values(net, device=0):  # of a Gluon network
    return [p.list_data()[device].asnumpy() for p in net.collect_params().values()]


def state(net):  # of a PyTorch network, in the same order
    return [v.numpy() for name, v in net.state_dict().items() if "tracked" not in name]


# %%
def carry_over(source, target):
    for value, place in zip(values(source), state(target), strict=True):
        np.copyto(place, value)  # shares its memory with the tensor
    assert all(map(np.array_equal, state(target), values(source))), "the same bits on both sides"
    return target


_ = carry_over(ours, theirs)

# %% [markdown]
# ### The same steps
#
# A step in Gluon, on one device or several, returns the mean loss and the mean gradients.

# %% tags=["trains"]
def gluon_step(net, x, y, rate=0.125):
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    trainer = gluon.Trainer(trained, "sgd", {"learning_rate": rate})
    arrays = nd.array(x, dtype=x.dtype), nd.array(y)
    shards = zip(*(gluon.utils.split_and_load(a, trained[0].list_ctx()) for a in arrays))
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in shards]
    autograd.backward(losses)
    gradients = [sum(g.asnumpy() for g in p.list_grad()) / len(x) for p in trained]
    trainer.step(len(x))
    return np.concatenate([loss.asnumpy() for loss in losses]).mean(), gradients


# %% tags=["trains"]
def torch_step(net, x, y, rate=0.125):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
    loss.backward()
    optimizer.step()
    return loss.item(), [p.grad.numpy() for p in net.parameters()]


# %% [markdown]
# Five steps, Gluon on two devices and PyTorch on one. To how many digits do they agree in float64?

# %%
first = values(ours)
for x, y in zip(images.reshape(10, 64, 1, 28, 28)[:5], labels.reshape(10, 64)):
    (loss_1, gradients_1), (loss_2, gradients_2) = gluon_step(ours, x, y), torch_step(theirs, x, y)
    assert abs(loss_1 - loss_2) < 1e-10 * loss_1, "the loss"
    assert apart(gradients_2, gradients_1) < 1e-10, "each gradient"
    for device in range(2):
        assert apart(state(theirs), values(ours, device)) < 1e-10, "the weights, on each device"
assert apart(values(ours), first) > 1e-2, "weights that don't move prove nothing"
print("5 steps: losses, gradients and weights agree to 1e-10")

# %% [markdown]
# To at least ten of about sixteen. A mistake in a convolution or the loss would have to be made on
# both sides; one in the all-reduce would show, since PyTorch needs none here. The learning rate is
# 0.125 for a reason. With 0.1 digits are lost:

# %%
def weights_apart(gluon_rate, torch_rate):
    ours = start(gluon_lenet, pair[:1])
    theirs = carry_over(ours, lenet().double())
    gluon_step(ours, x, y, gluon_rate), torch_step(theirs, x, y, torch_rate)
    return apart(state(theirs), values(ours))


assert weights_apart(0.1, np.float32(0.1).item()) < 1e-13 and weights_apart(0.1, 0.1) > 1e-11
print("0.1 is", float(np.float32(0.1)), "in MXNet's update")

# %% [markdown]
# The update operator keeps its settings in float32, whatever the arrays are. 0.125 is exact in
# binary, and so is 1/64, by which `step(64)` multiplies; 0.1 isn't. In float32 so small a
# difference would be lost: compare in float64 (appendix).
#
# ## ResNet-18 twice
#
# Chapter 08's network for 28×28 images. The residual block leaves the activation open, for the
# appendix.

# %%
class Residual(nn.Module):
    def __init__(self, before, after, stride=1, activate=torch.relu):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride) if stride > 1 else None
        self.activate = activate

    def forward(self, x):
        change = self.norm2(self.conv2(self.activate(self.norm1(self.conv1(x)))))
        return self.activate(change + (x if self.project is None else self.project(x)))


# %%
WIDTHS = 64, 128, 256, 512


def resnet18(first=nn.ReLU, activate=torch.relu):
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), first()]
    for before, after, stride in zip((64, *WIDTHS), WIDTHS, (1, 2, 2, 2)):
        layers += [Residual(before, after, stride, activate), Residual(after, after, 1, activate)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


# %% [markdown]
# Its twin in Gluon, with children in the same order:

# %%
class GluonResidual(gluon.nn.HybridBlock):
    def __init__(self, channels, stride=1, norm=gluon.nn.BatchNorm, activate="relu"):
        super().__init__()
        conv, self.activate = gluon.nn.Conv2D, activate
        self.conv1, self.norm1 = conv(channels, 3, stride, padding=1), norm()
        self.conv2, self.norm2 = conv(channels, 3, padding=1), norm()
        self.project = conv(channels, 1, stride) if stride > 1 else None

    def hybrid_forward(self, F, x):
        inner = F.Activation(self.norm1(self.conv1(x)), self.activate)
        skip = x if self.project is None else self.project(x)
        return F.Activation(self.norm2(self.conv2(inner)) + skip, self.activate)


def gluon_resnet18(norm=gluon.nn.BatchNorm, activate="relu"):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(64, 3, padding=1), norm(), gluon.nn.Activation(activate))
    for width, stride in zip(WIDTHS, (1, 2, 2, 2)):
        net.add(GluonResidual(width, stride, norm, activate),
                GluonResidual(width, 1, norm, activate))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10))
    return net


# %% [markdown]
# Three training steps on eight images each, all eleven million parameters in float64. For biases
# before a BatchNorm a relative error is meaningless. The norm subtracts them again, as part of the
# mean, so their true gradient is zero and what is computed is rounding. All convolutions but the
# three projections come right before a norm. We measure these gradients against the network's
# largest, and every other against its own largest entry.

# %%
ours = start(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
names = [name for name, _ in theirs.named_parameters()]
idle = [i for i, n in enumerate(names) if n == "0.bias" or ("conv" in n and "bias" in n)]
live = [i for i in range(len(names)) if i not in idle]


def pick(arrays, which=live):
    return [arrays[i] for i in which]


# %%
for i in range(0, 24, 8):
    x, y = images[i : i + 8], labels[i : i + 8]
    (loss_1, gradients_1), (loss_2, gradients_2) = gluon_step(ours, x, y), torch_step(theirs, x, y)
    assert abs(loss_1 - loss_2) < 1e-10 * loss_1 and len(idle) == 17
    assert apart(pick(gradients_2), pick(gradients_1)) < 1e-10, "gradients"
    largest = max(np.abs(g).max() for g in gradients_1)
    noise = max(np.abs(g[j]).max() for g in (gradients_1, gradients_2) for j in idle)
    assert noise < 1e-11 * largest, "zero but for rounding, in both"
    trained = [p.data().asnumpy() for p in ours.collect_params().values() if p.grad_req != "null"]
    assert apart([p.detach().numpy() for p in theirs.parameters()], trained) < 1e-10, "weights"
print(f"3 steps: {len(live)} gradients and all weights agree to 1e-10;",
      f"{len(idle)} are zero but for rounding")

# %% [markdown]
# ### Running statistics
#
# That comparison left out the running statistics. One small layer, a batch of four numbers. In
# MXNet BatchNorm uses the batch's statistics in training mode, which `record()` switches on by
# default; in PyTorch even under `no_grad`, until `eval()`:

# %%
numbers = np.array([[1.0], [2.0], [3.0], [6.0]], "float32")
norm, twin = gluon.nn.BatchNorm(in_channels=1), nn.BatchNorm1d(1)
norm.initialize()
with torch.no_grad():
    evaluated = twin.eval()(torch.tensor(numbers)).numpy()
    normalised = twin.train()(torch.tensor(numbers)).numpy()
assert apart([evaluated], [norm(nd.array(numbers)).asnumpy()]) < 1e-6, "eval(): as outside record()"
assert abs(normalised.mean()) < 1e-6 and twin.running_mean.item() > 0, "no_grad changes nothing"

# %% [markdown]
# *Momentum* is 0.9 in MXNet, for what is kept, and 0.1 in PyTorch, for what is new. Is that all
# that differs?

# %%
with autograd.record():
    out = norm(nd.array(numbers))
out.backward()  # on a CPU the statistics change in the backward pass (chapter 09)
print(f"variance {numbers.var()} or {numbers.var(ddof=1):.4f}: MXNet keeps",
      f"{(norm.running_var.data().asscalar() - 0.9) / 0.1:.3f}, PyTorch",
      f"{(twin.running_var.item() - 0.9) / 0.1:.3f}")

# %% [markdown]
# Both divide by $n$ to normalise the batch. For later, PyTorch keeps the estimate with $n - 1$, as
# MXNet does on GPUs with cuDNN (chapter 09). So in ResNet-18 the running statistics differ by two
# things: this factor, and 0.9 as float32 (appendix).
#
# ## DataParallel, rebuilt
#
# *Dive into Deep Learning* trains with `nn.DataParallel`: one process, one line, all GPUs. In each
# forward pass it does four things: **scatter** the batch, **replicate** the network on the devices
# that got a shard, apply the replicas **in parallel**, **gather** the outputs. We build the four on
# a CPU, where a replica is a copy.
#
# Replicating is a broadcast, and must be part of the recorded computation: gradients of the copies
# have to reach the original. Each copy was used, so their gradients *add up*. The backward pass of
# a broadcast is a reduce.

# %%
class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, *arrays):
        return tuple(a.clone() for _ in range(k) for a in arrays)

    @staticmethod
    def backward(ctx, *gradients):
        n = len(ctx.needs_input_grad) - 1
        return None, *(sum(gradients[i::n]) for i in range(n))


# %% [markdown]
# `copy.deepcopy(net, memo)` looks up `id(object)` in `memo` first. With our broadcast copies
# there, the replica is built around them and autograd's graph stays connected. The first replica's
# buffers stay themselves.

# %%
def replicate(net, k):
    arrays = list(net.parameters())
    copies = Broadcast.apply(k, *arrays)
    replicas = []
    for r in range(k):
        memo = dict(zip(map(id, arrays), copies[r * len(arrays):]))
        if r == 0:
            memo |= {id(b): b for b in net.buffers()}
        replicas.append(copy.deepcopy(net, memo))
    return replicas


# %% [markdown]
# The replicas run in worker threads. Scatter is `chunk`, gather is `cat`. We take PyTorch's class,
# with its `forward`, and replace the four pieces:

# %%
def parallel_apply(replicas, shards):
    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(lambda replica, shard: replica(*shard), replicas, shards))


# %%
class DataParallel(nn.DataParallel):
    def __init__(self, module, k):
        nn.Module.__init__(self)
        self.module, self.device_ids, self.output_device = module, list(range(k)), 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs, kwargs, device_ids):
        assert not kwargs, "ours scatters positional arguments only"
        shards = list(zip(*(a.chunk(len(device_ids)) for a in inputs)))
        return shards, [{}] * len(shards)

    def replicate(self, module, device_ids):
        return replicate(module, len(device_ids))

    def parallel_apply(self, replicas, shards, kwargs):
        return parallel_apply(replicas, shards)

    def gather(self, outputs, output_device):
        return torch.cat(outputs)


# %% [markdown]
# It must give the scores and gradients of the network itself. The loss is taken once, of all
# gathered scores, so no shard has to be weighted. Ten images, so three or four shards are unequal:

# %%
net = lenet().double()
ten, truth = torch.tensor(images[:10]), torch.tensor(labels[:10]).long()


def scores_and_gradients(model):
    net.zero_grad()
    scores = model(ten)
    F.cross_entropy(scores, truth).backward()
    return [scores.detach().numpy(), *(p.grad.numpy().copy() for p in net.parameters())]


# %%
alone = scores_and_gradients(net)
for k in (2, 3, 4):
    found = scores_and_gradients(DataParallel(net, k))
    assert apart(found, alone) < 1e-12, f"{k} replicas should compute what one network does"
calls, barrier = [], threading.Barrier(4)


def meet(module, given):
    calls.append(len(given[0]))
    barrier.wait(timeout=10)  # raises unless four threads get here


hook = net.register_forward_pre_hook(meet)
_ = DataParallel(net, 4)(ten)
hook.remove()
assert sorted(calls) == [1, 3, 3, 3], "by chunk"
print("2, 3 and 4 replicas equal one network, to 1e-12")

# %% [markdown]
# Would that see a mistake? A reduce that forgets a replica, one that takes the mean, a gather in
# the wrong order, and no replicas at all:

# %%
def backward_of(combine):
    def backward(ctx, *gradients):
        n = len(ctx.needs_input_grad) - 1
        return None, *(combine(gradients[i::n]) for i in range(n))
    return staticmethod(backward)


def owners(k):  # different arrays among the network's and its replicas'
    copies = [net, *DataParallel(net, k).replicate(net, range(k))]
    return len({p.data_ptr() for one in copies for p in one.parameters()})


# %%
correct, gather = Broadcast.backward, DataParallel.gather
for combine in (lambda all: all[0], lambda all: sum(all) / len(all)):
    Broadcast.backward = backward_of(combine)
    assert apart(scores_and_gradients(DataParallel(net, 2)), alone) > 1e-2
Broadcast.backward = staticmethod(correct)
DataParallel.gather = lambda self, outputs, place: torch.cat(outputs[::-1])
assert apart(scores_and_gradients(DataParallel(net, 2)), alone) > 1e-2
DataParallel.gather, replicas_of = gather, DataParallel.replicate
DataParallel.replicate = lambda self, module, device_ids: [module] * len(device_ids)
assert apart(scores_and_gradients(DataParallel(net, 2)), alone) < 1e-12, "this one passes"
assert owners(3) == 8, "the count sees that there are no copies"
DataParallel.replicate = replicas_of
assert owners(3) == 4 * 8, "memory of its own"

# %% [markdown]
# The last one passes, since the sums are the same; so we count the copies in memory. (PyTorch's
# first replica shares the network's memory: the class's docstring.) With BatchNorm, each replica
# normalises its shard by itself, as a Gluon device does. So two replicas of ResNet-18 don't compute
# what one network does (chapter 09), but they should compute what Gluon does on two devices.
# **Predict:** whose running statistics survive the step?

# %%
ours = start(gluon_resnet18, pair)
theirs = carry_over(ours, resnet18().double())
(loss_1, gradients_1), (loss_2, gradients_2) = (
    gluon_step(ours, x, y), torch_step(DataParallel(theirs, 2), x, y))
assert abs(loss_1 - loss_2) < 1e-10 * loss_1
assert apart(pick(gradients_2), pick(gradients_1)) < 1e-10, "two devices, two frameworks"
trained = [p for p in ours.collect_params().values() if p.grad_req != "null"]
for device in range(2):
    after = [p.list_data()[device].asnumpy() for p in trained]
    assert apart([p.detach().numpy() for p in theirs.parameters()], after) < 1e-10, "weights"
means = [[p.list_data()[device].asnumpy() for p in ours.collect_params(".*running_mean").values()]
         for device in range(2)]
new = 1 - float(np.float32(0.9))  # the share of the new mean in MXNet
kept = [b.numpy() / 0.1 * new for name, b in theirs.named_buffers() if "running_mean" in name]
print("those of device 0, of device 1:", *(apart(kept, mean) < 1e-10 for mean in means))

# %% [markdown]
# The first's, since its buffers are the original's. All replicas are thrown away after the forward
# pass.
#
# ### The real one
#
# What does `nn.DataParallel` do on a CPU when told to use two devices? **Predict** how often it
# calls the network, and with how many of eight rows.

# %% tags=["measured"]
linear, seen = nn.Linear(28, 1), []
linear.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
if not torch.accelerator.is_available():
    wrapped = nn.DataParallel(linear, device_ids=["cpu", "cpu"])
    wrapped(torch.ones(8, 28))
    print(len(seen), "call, with", *seen, "rows; devices:", wrapped.device_ids)

# %% [markdown]
# Without a GPU it passes through, whatever devices it was given.
#
# ### What it costs
#
# PyTorch's documentation recommends `DistributedDataParallel` instead, even on one machine (the
# class's docstring). Three costs are in the design. The first: it *replicates in each forward
# pass*. DDP sends the parameters once, at the start.
#
# **On GPUs:** the copies cross the links, with NCCL by its broadcast, and the gradients by its
# reduce onto the first device (`_broadcast_out_impl` in `torch/csrc/cuda/comm.cpp`; `reduce_add` in
# `torch/nn/parallel/comm.py`). The reduce can't overlap with the backward pass: all copies come
# from *one* recorded operation, as ours do, and its backward pass waits for the gradients of all
# copies. In a plain network, the last layer has its gradient before the backward pass reaches
# the first. And here?

# %%
def order(wrap):
    log, net = [], lenet().double()
    net[9].weight.register_post_accumulate_grad_hook(lambda p: log.append("last is ready"))
    net[0].register_full_backward_pre_hook(lambda *_: log.append(
        f"first begins, in {threading.current_thread().name}"))
    F.cross_entropy(wrap(net)(ten.clone().requires_grad_()), truth).backward()
    return log


assert order(lambda net: net) == ["last is ready", "first begins, in MainThread"]
print(*order(lambda net: DataParallel(net, 2)), sep="; ")

# %% [markdown]
# The last layer's gradient is ready only after both replicas have started on their first layer. The
# second cost: outputs are *gathered* on one device, where the loss is computed and all weights are
# updated, while the others wait. The third is *Python's interpreter lock*: one thread at a time
# runs Python. Large operators compute without the lock, so it should matter where operators are
# small. Two networks, forward only: their two shards one after the other, or in two threads.

# %%
def ratios(one, two, turns=25):  # how many times as fast the second is
    found, seconds = [], {}
    for turn in range(turns):
        for work in (one, two) if turn % 2 else (two, one):
            begin = time.perf_counter()
            work()
            seconds[work] = time.perf_counter() - begin
        found.append(seconds[one] / seconds[two])
    low, median, high = np.percentile(found[1:], [25, 50, 75])  # the first warms up
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


def forward(net, shards):
    replicas = [net, copy.deepcopy(net)]
    return (lambda: [replica(*shard) for replica, shard in zip(replicas, shards)],
            lambda: parallel_apply(replicas, shards))


# %% tags=["measured"]
x256, y256 = images[:256].astype("float32"), labels[:256]
halves = [(half,) for half in torch.tensor(x256).chunk(2)]
deep = nn.Sequential(*(nn.Linear(8, 8) for _ in range(500)))
print("LeNet:", ratios(*forward(lenet(), halves)))
print("500 layers of 8 units:", ratios(*forward(deep, [(torch.ones(4, 8),)] * 2)))

# %% [markdown]
# Medians, with the middle half in brackets: if that contains 1, no gain is larger than the noise.
# In our quiet runs LeNet's median was above 1.4, though in half of them its middle half contained
# 1, and the tiny layers were slower. The interpreter lock would explain that; we haven't tested it.
# And a whole training step?

# %% tags=["measured", "trains"]
models = lenet(), DataParallel(lenet(), 2)
print("LeNet, batch 256:", ratios(*(lambda model=model: torch_step(model, x256, y256, 0.05)
                                    for model in models)))

# %% [markdown]
# In our runs its median was nearer 1. One reason may be what `order` printed: on a CPU both
# replicas' backward passes run in the one thread that called `backward`.
# **On GPUs:** each device has its own thread
# (`torch.autograd.grad_mode.set_multithreading_enabled`, PyTorch's documentation).
#
# ## A published comparison
#
# *Dive into Deep Learning* compares one GPU with two (section "Concise Implementation for Multiple
# GPUs", the PyTorch tab). Its function `train` sets the weights of all modules of type `nn.Linear`
# or `nn.Conv2d` to normal numbers with a standard deviation of 0.01, wraps the network in
# `DataParallel`, and trains. It is called with one GPU and batch 256, then with two and batch 512,
# each time with the same ResNet-18.
#
# There the residual block is made of *lazy* layers (`Residual` in `d2l/torch.py`, 1.0.3). Like
# Gluon's, they learn their input size in the first forward pass. **Predict:** how many of the 21
# convolutions and linear layers does the initialisation reach in the first call?

# %%
class LazyResidual(Residual):
    def __init__(self, after, stride=1):
        nn.Module.__init__(self)
        self.conv1 = nn.LazyConv2d(after, 3, stride, padding=1)
        self.conv2 = nn.LazyConv2d(after, 3, padding=1)
        self.norm1, self.norm2 = nn.LazyBatchNorm2d(), nn.LazyBatchNorm2d()
        self.project = nn.LazyConv2d(after, 1, stride) if stride > 1 else None
        self.activate = torch.relu


def lazy_resnet18():
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for width, stride in zip(WIDTHS, (1, 2, 2, 2)):
        layers += [LazyResidual(width, stride), LazyResidual(width)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


# %%
def weights(net):
    return [m.weight for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def initialise(net):
    reached = [m for m in net.modules() if type(m) in (nn.Linear, nn.Conv2d)]
    for module in reached:
        nn.init.normal_(module.weight, std=0.01)
    return len(reached)


# %% [markdown]
# On a CPU the wrapper passes through, so we can leave it out. One step stands for the training:

# %% tags=["trains"]
def train(net, x, y):
    reached = initialise(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = F.cross_entropy(net(torch.tensor(x).float()), torch.tensor(y).long())
    spreads = [w.std().item() for w in weights(net)]  # what it starts from
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return reached, spreads


# %%
torch.manual_seed(13)
net = lazy_resnet18()
reached, spreads = zip(*(train(net, images[:n], labels[:n]) for n in (8, 16)))
print(f"of {len(weights(net))} layers: {reached[0]} in the first call, {reached[1]} in the second")

# %% [markdown]
# A `LazyConv2d` isn't of type `nn.Conv2d`; the first forward pass turns it into one. So only the
# first convolution and the last layer are set. The other 19 keep PyTorch's default, a standard
# deviation of $1 / \sqrt{3n}$ for $n$ inputs. In the second call nothing is lazy any more, and all
# 21 are set:

# %% tags=["measured"]
default = [s * (3 * w[0].numel()) ** 0.5 for s, w in zip(spreads[0], weights(net))]
assert all(abs(share - 1) < 0.05 for share in default[1:-1]), "19 layers as PyTorch makes them"
assert all(abs(s - 0.01) < 0.001 for s in spreads[1]), "21 layers as the listing wants them"
others = sum(abs(a / b - 1) > 0.1 for a, b in zip(*spreads))
fig, ax = figure(f"{others} of 21 layers start with another standard deviation in the first call",
                 "layer with weights, from input to output",
                 "standard deviation at the start\n(logarithmic axis)")
for found, color, mark, fill, name in zip(spreads, (ORANGE, BLUE), "os", (ORANGE, "none"),
                                          ("first call", "second call")):
    ax.semilogy(range(1, 22), found, mark, color=color, markerfacecolor=fill, ms=7, label=name)
ax.set(xticks=range(1, 22, 2), yticks=(0.01, 0.02, 0.05), yticklabels=("0.01", "0.02", "0.05"))
ax.minorticks_off()
fig.legend(loc="outside lower right", ncols=2, fontsize=8)
show(fig, alt="Standard deviation of the initial weights of 21 layers: in the second call 0.01 "
     "everywhere; in the first 0.01 in the first and the last layer, elsewhere 0.008 to 0.07.")

# %% [markdown]
# Biases and BatchNorm's arrays aren't initialised again: they go from the first training into the
# second. MXNet's version of the listing calls `initialize` with `force_reinit=True`, which resets
# them:

# %%
def left_over(before, after):
    return [name for name in before if torch.equal(before[name], after[name])]


before = copy.deepcopy(net.state_dict())
initialise(net)
survivors = left_over(before, net.state_dict())
print(len(survivors), "of", len(before), "arrays survive a new initialisation")
assert set(before) - set(survivors) == {
    name for name in before if name.endswith("weight") and before[name].dim() > 1}
assert not (before["1.weight"] == 1).all() and before["1.running_mean"].any(), "trained values"

# %%
ours = start(gluon_resnet18, pair[:1], "float32")
gluon_step(ours, x.astype("float32"), y)
assert all(p.data().asnumpy().any() for p in ours.collect_params(".*(bias|beta|mean)").values())
ours.initialize(mx.init.Normal(0.01), force_reinit=True)
for p in ours.collect_params(".*(bias|beta|mean)").values():
    assert not p.data().asnumpy().any(), p.name
for p in ours.collect_params(".*(gamma|var)").values():
    assert (p.data().asnumpy() == 1).all(), p.name

# %% [markdown]
# So the published comparison varies more than batch sizes and learning rates: the second run starts
# from other weights, and partly from trained values. Whether that helps or hurts we haven't tested.
#
# **On GPUs:** the listing never calls `net.to`. For one device, `DataParallel.__init__` moves the
# module there itself; for several it doesn't, and the forward pass raises unless the network is on
# the first (`data_parallel.py`, PyTorch 2.13). So the listing runs only because the one-GPU call
# comes first. With `net.to`, two GPUs first would still fail: lazy layers can't be replicated
# (`torch/nn/modules/lazy.py`).
#
# ## Appendix: float32, and running statistics
#
# How far apart are the two LeNets after 20 steps?

# %%
def distances(dtype, steps=20, size=32):
    ours = start(gluon_lenet, pair[:1], dtype)
    theirs = carry_over(ours, lenet().to(getattr(torch, dtype)))
    found = []
    for i in range(0, steps * size, size):
        x, y = images[i : i + size].astype(dtype), labels[i : i + size]
        gluon_step(ours, x, y), torch_step(theirs, x, y)
        found.append(apart(state(theirs), values(ours)))
    return found


drift = {dtype: distances(dtype) for dtype in ("float32", "float64")}
assert max(drift["float64"]) < 1e-10, "20 steps, and the frameworks still agree"
assert drift["float32"][-1] > 1000 * drift["float64"][-1]

# %% tags=["measured"]
fig, ax = figure(f"After 20 steps: relative difference {drift['float32'][-1]:.0e} in float32, "
                 f"{drift['float64'][-1]:.0e} in float64",
                 "step", "largest difference / largest entry")
for (dtype, found), color, mark in zip(drift.items(), (ORANGE, BLUE), "so"):
    ax.semilogy(range(1, 21), found, mark + "-", color=color, ms=4, label=dtype)
    ax.axhline(np.finfo(dtype).eps, color=color, ls=":", lw=1)
    ax.text(20.3, np.finfo(dtype).eps * 0.8, f"{dtype}: spacing of numbers at 1", ha="right",
            va="top", fontsize=8)
ax.set(xlim=(0, 20.5), ylim=(2e-17, 1e-5), xticks=range(0, 21, 5))
fig.legend(loc="outside lower right", ncols=2, fontsize=8)
show(fig, alt="Difference between the weights in MXNet and in PyTorch after each of 20 steps: "
     "float32 lies far above float64; dotted lines mark the spacing of numbers at 1.")

# %% [markdown]
# ResNet-18: one step in float32 on each of three batches of eight, against the gradients in
# float64, parameter by parameter. One rounding is about $10^{-7}$.

# %%
def errors(i, norm=gluon.nn.BatchNorm, smooth=False):  # of MXNet and of PyTorch, per parameter
    x, y = images[i : i + 8], labels[i : i + 8]
    ours = start(lambda: gluon_resnet18(norm, "softrelu" if smooth else "relu"), pair[:1],
                 "float32")
    kinds = (nn.Softplus, F.softplus) if smooth else (nn.ReLU, torch.relu)
    theirs, exact = (carry_over(ours, resnet18(*kinds).to(dtype))
                     for dtype in (torch.float32, torch.float64))
    _, truth = torch_step(exact, x, y)
    single = x.astype("float32")
    both = gluon_step(ours, single, y)[1], torch_step(theirs, single, y)[1]
    return [[apart([a], [b]) for a, b in zip(pick(g), pick(truth))] for g in both]


# %% tags=["measured", "few: 24=> 8"]
starts = range(0, 24, 8)
single = np.array([errors(i) for i in starts])  # [batches, 2, gradients]
for name, row in zip(("MXNet", "PyTorch"), single.transpose(1, 0, 2)):
    print(f"{name:8} worst gradient of each batch:", *(f"{e:.0e}" for e in row.max(axis=1)),
          " median:", *(f"{e:.0e}" for e in np.median(row, axis=1)))

# %% [markdown]
# In the median MXNet is far worse. The first BatchNorm is a suspect: a mean is only as precise as
# its sum. Both frameworks get what the first convolution makes of our images. With a momentum of 0
# (in PyTorch 1) the batch's mean is the running mean.

# %%
inputs = theirs[0](torch.tensor(images[:8])).detach().float().numpy()  # [8, 64, 28, 28]
norm, twin = gluon.nn.BatchNorm(momentum=0.0, in_channels=64), nn.BatchNorm2d(64, momentum=1.0)
norm.initialize()
with autograd.record():
    out = norm(nd.array(inputs))
out.backward()
_ = twin(torch.tensor(inputs))

# %% [markdown]
# Beside them, NumPy adds up each channel's 6,272 numbers one after the other in float32. The
# largest error of a mean, as a share of the standard deviation:

# %% tags=["measured"]
columns = inputs.transpose(1, 0, 2, 3).reshape(64, -1)  # [64, 6272]
mean, deviation = columns.mean(1, dtype="float64"), columns.std(1, dtype="float64")
for name, found in {"MXNet": norm.running_mean.data().asnumpy(),
                    "PyTorch": twin.running_mean.numpy(),
                    "NumPy": np.add.accumulate(columns, 1, "float32")[:, -1] / 6272}.items():
    print(f"{name:8} {np.max(np.abs(found - mean) / deviation):.0e}")

# %% [markdown]
# PyTorch's BatchNorm on a CPU adds a channel's float32 numbers up in float64, for contiguous
# tensors as here (`acc_type` in `ATen/AccumulateType.h`, used by
# `native/cpu/batch_norm_kernel.cpp`). MXNet's own code adds them one after the other in float32
# (`BatchNormForwardImpl` in `src/operator/nn/batch_norm.cc`). By default it hands float32 to the
# library oneDNN, whose code we haven't read. To test whether BatchNorm is the cause, we let MXNet
# do *only* its norms in float64, and so in its own code (`SupportMKLDNNBN`):

# %%
class Float64Norm(gluon.nn.BatchNorm):
    def cast(self, dtype):
        super().cast("float64" if dtype == "float32" else dtype)

    def forward(self, x):
        return super().forward(x.astype(self.gamma.dtype)).astype("float32")


# %% [markdown]
# Imprecise statistics alone shift a channel's outputs only slightly. ReLU may amplify the shift: an
# input close to zero gets the other sign, and the gradient through that unit is switched on or off.
# If so, the large error should disappear with a smooth activation, softplus, with the norms as they
# were. **Predict** both outcomes.

# %% tags=["measured", "few:[i - 0.1] * 3=>[i - 0.1] * 1", "few:[i + 0.1] * 3=>[i + 0.1] * 1"]
smooth = np.array([errors(i, smooth=True) for i in starts])
rows = {"MXNet": single[:, 0],
        "MXNet, norms\nin float64": np.array([errors(i, Float64Norm)[0] for i in starts]),
        "PyTorch": single[:, 1],
        "MXNet,\nsoftplus": smooth[:, 0], "PyTorch,\nsoftplus": smooth[:, 1]}
assert smooth.max() < 1e-4 < single[:, 0].max(axis=1).min(), "softplus: both below MXNet with ReLU"
for name, both in (("relu", single), ("softplus", smooth)):
    ratio = np.divide(*np.median(both, axis=2).T)
    print(f"{name:8} MXNet's median error over PyTorch's:", *(f"{r:,.0f}" for r in ratio))
worst = [f"{row.max():.0e}" for row in rows.values()]
fig, ax = figure(f"MXNet: relative errors up to {worst[0]}; norms in float64 {worst[1]}, softplus "
                 f"{worst[3]}", "", "largest error / largest entry")
for i, row in enumerate(rows.values()):
    ax.semilogy([i - 0.1] * 3, row.max(axis=1), "o", color=ORANGE,
                label="worst gradient of a batch" * (not i))
    ax.semilogy([i + 0.1] * 3, np.median(row, axis=1), "s", color=BLUE, label="median" * (not i))
ax.set_xticks(range(5), rows)
fig.legend(loc="outside lower right", ncols=2, fontsize=8)
show(fig, alt="Errors of gradients in float32 on a logarithmic axis, worst and median of three "
     "batches, for MXNet, MXNet with norms in float64, PyTorch, and both with softplus.")

# %% [markdown]
# Norms in float64 bring MXNet's median down to PyTorch's. With softplus MXNet's own norms cost
# a few times PyTorch's median error, not thousands of times. So most of MXNet's error takes both,
# imprecise statistics and ReLU, probably because many units change sign (we haven't counted them).
# With precise statistics a few large errors remain; PyTorch's vanish with softplus.
#
# ### ResNet-18's running statistics
#
# In PyTorch's running statistics we undo its momentum, apply MXNet's, and multiply variances by
# $(n - 1)/n$. That should give MXNet's:

# %%
ours = start(gluon_resnet18, pair[:1])
theirs = carry_over(ours, resnet18().double())
gluon_step(ours, x, y), torch_step(theirs, x, y)
found = [p.data().asnumpy() for p in ours.collect_params(".*running.*").values()]
kept = [b.numpy() for name, b in theirs.named_buffers() if "running" in name]

# %%
counts = [8 * side**2 for side in (28, *[28] * 4, *[14] * 4, *[7] * 4, *[4] * 4)]
new = 1 - float(np.float32(0.9))
means = [mean / 0.1 * new for mean in kept[::2]]
variances = [1 - new + (v - 0.9) / 0.1 * (n - 1) / n * new for v, n in zip(kept[1::2], counts)]
assert apart(means, found[::2]) < 1e-10 and apart(variances, found[1::2]) < 1e-10
print(len(means), "running means and", len(variances), "running variances agree to 1e-10")

# %% [markdown]
# ## Summary
#
# | MXNet | PyTorch | what differs |
# | --- | --- | --- |
# | `ctx=mx.cpu(1)` | `device="cpu:1"` | PyTorch's CPU is one device |
# | `as_in_context` | `to` | |
# | `split_and_load` | `chunk` | by default refuses uneven shards; `chunk` may use fewer devices |
# | `even_split=False` | `tensor_split` | empty shards: mostly an error (chapter 02), or allowed |
# | `record()` records | what needs gradients, unless in `no_grad` | gradients add up: `zero_grad` |
# | `record()` switches to training by default | `train()`, `eval()` | `no_grad` doesn't switch |
# | loss per example, `step(n)` | mean loss, `step()` | who divides |
# | `"sgd"` with momentum | `SGD` with momentum | learning rate: inside the velocity, or outside |
# | `waitall` | `torch.accelerator.synchronize` | one device; raises where there is no accelerator |
# | `BatchNorm` | `BatchNorm2d` | momentum 0.9 or 0.1; $n$ or $n - 1$ in running variances (CPU) |
# | deferred shapes | lazy modules | their type changes in the first forward pass |
#
# - The same weights and batches give the same losses, gradients and steps in both, to $10^{-10}$ in
#   float64, with a learning rate that float32 holds exactly and a batch size that is a power of
#   two: for LeNet with Gluon on two devices (on one, the weights), for ResNet-18 on one. On two it
#   agrees with two replicas of `DataParallel`. (Gradients of biases before a BatchNorm are zero but
#   for rounding, in both.)
# - In float32 MXNet's BatchNorm is less precise on a CPU. The largest errors of ResNet-18's
#   gradients went away with a smooth activation: MXNet's in all three batches, PyTorch's in
#   the one batch that had one (appendix).
# - `DataParallel` is scatter, replicate, parallel apply, gather; its reduce is the backward pass of
#   a broadcast. It replicates in each forward pass, reduces at the end of the backward pass,
#   gathers on one device, and shares one interpreter.
# - A function that is called twice with one network can start from two different states.
#
# Next, chapter 14: a process for each device, and `DistributedDataParallel`, written by you.
#
# **Further reading.** *Dive into Deep Learning*, Concise Implementation for Multiple GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **A fair comparison.** Write `fresh(net, seed)`, to be called at the beginning of `train`.
#    After it, a lazy network and one that has been trained are in the same state, bit for bit, with
#    all 21 weights normal with a standard deviation of 0.01.
# 2. **The loss in the replicas.** Gathered scores all go to one device. To gather less, let each
#    replica return its loss. Write a module that does, and average what comes back, for ten images
#    on four replicas. Why are the gradients wrong? Repair it, so that `chunk` may cut as it likes.
# 3. **The clock.** On a GPU, what does a timer measure that is stopped right after the last step?
#    Write one that waits, and that works on a CPU too.

# %% [markdown]
# ### Answer 1
#
# A forward pass first, so that no layer is lazy. In this network every module with parameters has
# `reset_parameters`, which also resets running statistics.

# %% tags=["solution"]
def fresh(net, seed):
    with torch.no_grad():
        net(torch.zeros(2, 1, 28, 28, device=next(net.parameters()).device))
    torch.manual_seed(seed)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return initialise(net)


# %% tags=["solution"]
new_one = lazy_resnet18()
assert fresh(new_one, 1) == fresh(net, 1) == 21
assert left_over(net.state_dict(), new_one.state_dict()) == list(net.state_dict())
assert all(abs(w.std().item() - 0.01) < 0.002 for w in weights(net))
fresh(new_one, 2)
assert not any(map(torch.equal, weights(new_one), weights(net))), "another seed, other weights"

# %% [markdown]
# ### Answer 2
#
# `chunk` makes shards of 3, 3, 3 and 1, and the mean of their means isn't the batch's mean
# (chapter 12). Sums can be added, and are divided once.

# %% tags=["solution"]
class WithLoss(nn.Module):
    def __init__(self, net, reduction):
        super().__init__()
        self.net, self.reduction = net, reduction

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y, reduction=self.reduction).reshape(1)


net = lenet().double()
alone = scores_and_gradients(net)[1:]
for reduction, divisor in (("mean", 4), ("sum", 10)):
    net.zero_grad()
    losses = DataParallel(WithLoss(net, reduction), 4)(ten, truth)
    (losses.sum() / divisor).backward()
    off = apart([p.grad.numpy() for p in net.parameters()], alone)
    assert off < 1e-12 if reduction == "sum" else off > 1e-2

# %% [markdown]
# ### Answer 3
#
# The time until the last step is queued: whatever of it is still unfinished when the clock stops is
# left out. Wait for each device before each reading. The check gives PyTorch two devices that only
# log the call.

# %% tags=["solution"]
from unittest import mock


class Timer:
    def __enter__(self):
        self.begin = self.now()
        return self

    def __exit__(self, *error):
        self.seconds = self.now() - self.begin

    @staticmethod
    def now():
        for device in range(torch.accelerator.device_count()):
            torch.accelerator.synchronize(device)
        return time.perf_counter()


with Timer() as timer:
    time.sleep(0.01)
assert timer.seconds >= 0.01
log, clock = [], iter([3.0, 5.0])
with (mock.patch("torch.accelerator.device_count", lambda: 2),
      mock.patch("torch.accelerator.synchronize", log.append),
      mock.patch("time.perf_counter", lambda: log.append("clock") or next(clock)),
      Timer() as timer):
    log.append("work")
assert log == [0, 1, "clock", "work", 0, 1, "clock"], "first wait, then read the clock"
assert timer.seconds == 2, "from 3 s to 5 s"
