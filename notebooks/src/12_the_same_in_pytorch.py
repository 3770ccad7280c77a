# %% [markdown]
# # 12 · The same in PyTorch
#
# Apache MXNet was retired to the Apache Attic in 2023: no more releases. What you have learned with
# it hasn't retired. Devices, shards, all-reduce, replicas that must stay equal: every framework has
# them, under other names. This chapter carries the whole course over to PyTorch and lets the two
# frameworks check each other.
#
# ## What you'll do
#
# Put MXNet and PyTorch side by side, row by row, in cells that run. Build LeNet and ResNet-18 a
# second time, copy the weights over, and compare losses, gradients and steps. Rebuild
# `nn.DataParallel` from its four parts, then train with `DistributedDataParallel` (DDP) in two
# processes that this notebook starts, watches and reads back.
#
# ## What you'll learn
#
# - which name in PyTorch stands for which in MXNet, and where the two are *not* the same;
# - how one framework becomes the oracle for another, and how far apart float32 may leave them;
# - what `DataParallel` does in each step, and why DDP has replaced it;
# - how DDP starts, sends gradients in buckets, and computes what two Gluon devices compute;
# - four traps of DDP that raise nothing.
#
# ## What you need
#
# Chapters 04 to 08, no GPU, and PyTorch, which the rest of the course does without. If the next
# cell can't find it, run `make setup TORCH=1` in a terminal and restart the kernel. Reading takes
# about 70 minutes, running one to two on two cores.

# %% tags=["torch"]
from helpers import load_data

import torch

# %% [markdown]
# MXNet is imported by hand, so that it stays plain which of the two is speaking: `nd` and `gluon`
# are MXNet's, `torch`, `nn` and `F` PyTorch's. `helpers` told both of them to use one thread for
# each operator.

# %%
import mxnet as mx
import numpy as np
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn

# %% [markdown]
# Images for both, centred as in chapter 04, as float64; and two simulated devices, named directly.

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = (data.train_images - data.train_images.mean()).astype("float64")  # [640, 1, 28, 28]
labels = data.train_labels  # int32 [640]
pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# One oracle serves the whole chapter: the largest difference of any two arrays, as a share of the
# largest entry of the second. It must notice a single wrong entry, and a value that is no number.

# %%
def apart(found, truth):
    pairs = zip(found, truth, strict=True)
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])



# %% [markdown]
# Three cases, to try it on:

# %%
right = [np.array([1.0, 2.0]), np.array([8.0])]
assert apart(right, right) == 0 and apart([right[0], np.array([6.0])], right) == 0.25
assert np.isnan(apart([right[0], np.array([np.nan])], right)), "NaN must not pass"

# %% [markdown]
# ## A dictionary that runs
#
# Each row is two short pieces of code, MXNet's first, and an assertion where they agree. Rows that
# need several processes come later.
#
# ### Context and device
#
# MXNet names a place by a *context*.

# %%
a = nd.ones((2, 3), ctx=mx.cpu(1))
print(a.context)

# %% [markdown]
# PyTorch names it by a *device*. **Predict:** where does a tensor live that was asked for on
# `cpu:1`?

# %%
b = torch.ones(2, 3, device="cpu:1")
print(b.device)
assert (a.asnumpy() == b.numpy()).all()

# %% [markdown]
# On plain `cpu`. To MXNet `cpu(1)` is a device with a queue and a thread of its own; to PyTorch the
# CPU is *one* device. So it can't simulate two devices in one process. We'll use two processes
# instead. What PyTorch does have is a device without memory, `meta`, which knows shapes only. It is
# enough to see that devices don't mix:

# %%
try:
    nn.Linear(3, 2)(torch.ones(1, 3, device="meta"))
except RuntimeError as error:
    print(type(error).__name__)
else:
    raise AssertionError("weights and data on two devices should be refused")

# %% [markdown]
# ### Moving
#
# `as_in_context` copies only what is elsewhere.

# %%
here = a.as_in_context(mx.cpu(1))
away = a.as_in_context(mx.cpu(0))
away[:] = 7
assert here is a and a.asnumpy().max() == 1, "moved to where it is: no copy"

# %% [markdown]
# `to` does the same, and `clone` always copies, as `copy()` does in MXNet.

# %%
same, copied = b.to("cpu"), b.clone()
copied[:] = 7
assert same is b and b.max() == 1, "the same rule, and the same trap"

# %% [markdown]
# ### Splitting a batch
#
# Ten images for four devices: Gluon makes shards that differ by one.

# %%
four = [mx.cpu(r) for r in range(4)]
gluon_shards = gluon.utils.split_and_load(nd.arange(10), four, even_split=False)
print([len(s) for s in gluon_shards])

# %% [markdown]
# PyTorch has two cuts. `chunk` is the one that `DataParallel` uses. **Predict** what it makes of
# ten images for four devices, and of five.

# %%
print("chunk", [[len(s) for s in torch.arange(n).chunk(4)] for n in (10, 5)])
torch_shards = torch.arange(10).tensor_split(4)
assert all((a.asnumpy() == b.numpy()).all() for a, b in zip(gluon_shards, torch_shards))

# %% [markdown]
# `chunk` rounds the size of a shard up and deals until nothing is left: three images for most and
# one for the last, and with five images one of four devices gets no shard at all. The cut that
# equals Gluon's is `tensor_split`.
#
# ### Who reads which image
#
# In the course so far one process reads a batch and splits it. With a process per device each reads
# its own images, and a `DistributedSampler` says which. Gluon's split of eleven images for two:

# %%
shards = gluon.utils.split_and_load(nd.arange(11), pair, even_split=False)
print([s.asnumpy().astype(int).tolist() for s in shards])

# %% [markdown]
# The sampler deals them like cards. It needs no other process: it is told how many there are, and
# which one it is. **Predict:** eleven don't divide by two. What happens to the odd one?

# %%
from torch.utils.data import DistributedSampler

dealt = [list(DistributedSampler(range(11), 2, rank, shuffle=False)) for rank in range(2)]
print(dealt)
assert sorted(set(sum(dealt, []))) == list(range(11)), "every image is there, as with Gluon"

# %% [markdown]
# Image 0 comes twice, so that all processes have equally many: DDP needs that, since each backward
# pass waits for the others. In training it hardly matters. In an accuracy it is a wrong answer, if
# a small one: count what you divide by. (`drop_last=True` drops the odd one instead.)
#
# ### Gradients
#
# A second backward pass in MXNet *replaces* the gradient...

# %%
w = nd.array([3.0])
w.attach_grad()
for _ in range(2):
    with autograd.record():
        loss = w * w
    loss.backward()
print(w.grad.asscalar())

# %% [markdown]
# ...and in PyTorch? **Predict.**

# %%
v = torch.tensor([3.0], requires_grad=True)
for _ in range(2):
    (v * v).sum().backward()
print(v.grad.item())
v.grad = None  # what zero_grad() does
(v * v).sum().backward()
assert v.grad.item() == w.grad.asscalar(), "cleared first, it is MXNet's"

# %% [markdown]
# It adds up, as MXNet does with `grad_req="add"`. Hence `zero_grad()` in every PyTorch loop. Also,
# MXNet records only inside `autograd.record()`; PyTorch records always, except inside
# `torch.no_grad()`.
#
# ### The loss
#
# Gluon's loss is a number for each image.

# %%
scores = np.random.RandomState(12).randn(8, 10)
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
each = softmax(nd.array(scores, dtype="float64"), nd.array(labels[:8])).asnumpy()
print(each.shape)

# %% [markdown]
# PyTorch's is the mean over the batch, unless told otherwise.

# %%
t, target = torch.tensor(scores), torch.tensor(labels[:8], dtype=torch.int64)
assert abs(F.cross_entropy(t, target).item() - each.mean()) < 1e-12, "the mean"
assert apart([F.cross_entropy(t, target, reduction="none").numpy()], [each]) < 1e-12

# %% [markdown]
# That decides who divides. Gluon: sums, and `trainer.step(batch_size)` divides. PyTorch: a mean,
# and `optimizer.step()` takes the gradient as it is.
#
# ### Trainer and optimizer
#
# Three steps with momentum and weight decay on one weight whose gradient is always 1, with the
# learning rate given for each step:

# %%
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


# %% [markdown]
# The same in PyTorch:

# %%
def torch_sgd(rates):
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5, weight_decay=0.25)
    for rate in rates:
        optimizer.zero_grad()
        (w * 1).sum().backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return w.item()


# %% [markdown]
# **Predict:** do they agree with a constant rate? And if the rate is halved for the last step?

# %%
for rates in ([0.125] * 3, [0.125, 0.125, 0.0625]):
    print(rates, mxnet_sgd(rates), torch_sgd(rates))
assert mxnet_sgd([0.125] * 3) == torch_sgd([0.125] * 3), "equal while the rate is constant"
assert mxnet_sgd(rates) != torch_sgd(rates), "not when it changes"

# %% [markdown]
# Both are called SGD with momentum. MXNet puts the rate *into* the velocity, $v \leftarrow m v -
# \eta g$; PyTorch multiplies afterwards, $w \leftarrow w - \eta v$. While $\eta$ is constant that
# is the same. After a change MXNet's old pushes keep their old rate. A schedule carried over from
# one to the other trains differently, and nothing says so.
#
# ### Waiting
#
# MXNet's operators go into a queue, and `waitall` waits. PyTorch queues on a GPU too, and
# `torch.accelerator.synchronize()` waits. On a CPU it computes at once. How long until the call
# returns, and until the work is done? A product of two large matrices in each:

# %% tags=["measured"]
import time


def asked_and_done(ask, wait):
    start = time.perf_counter()
    ask()
    asked = time.perf_counter() - start
    wait()
    return f"{asked / (time.perf_counter() - start):.0%} of the time passed while asking"


big = nd.random.uniform(shape=(1000, 1000))
nd.waitall()
print("MXNet:  ", asked_and_done(lambda: nd.dot(big, big), nd.waitall))
twin = torch.tensor(big.asnumpy())
print("PyTorch:", asked_and_done(lambda: twin @ twin, lambda: None))

# %% [markdown]
# That is why MXNet drives two simulated devices from one Python thread, and PyTorch needs a thread
# or a process for each.
#
# ## The same network twice
#
# LeNet in Gluon, as in chapter 06:

# %%
def gluon_lenet():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(20, kernel_size=3, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Conv2D(50, kernel_size=5, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
    return net


# %% [markdown]
# PyTorch wants to know how many numbers go into a layer, while Gluon finds out from the first
# batch. And its linear layer doesn't flatten. Image sizes: 28, 26, 13, 9, 4.

# %%
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


# %% [markdown]
# Which parameter is which? Both list them from input to output. (Biases usually start from zero.
# Here they get numbers: two zeros that are swapped look the same.)

# %%
def start(make, places, dtype="float64"):
    net = make()
    mx.random.seed(12)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(nd.zeros((2, 1, 28, 28), ctx=places[0]))
    for p in net.collect_params(".*(bias|beta)").values():
        p.set_data(nd.random.normal(scale=0.1, shape=p.shape))
    net.cast(dtype)
    return net


ours, theirs = start(gluon_lenet, pair[:1]), lenet().double()
for p, (name, q) in zip(ours.collect_params().values(), theirs.named_parameters()):
    print(f"{p.name.split('_')[-1]:8} {name:9} {tuple(p.shape)}")
    assert p.shape == q.shape

# %% [markdown]
# Even the layouts agree: output channel first, and a dense weight is `[out, in]` in both. So
# weights can be copied in order. A layer of BatchNorm has four arrays here and five there:

# %%
norm = gluon.nn.BatchNorm(in_channels=3)
print([name.split("_", 1)[1] for name in norm.collect_params()])
print(list(nn.BatchNorm2d(3).state_dict()))

# %% [markdown]
# `gamma` is `weight` and `beta` is `bias`. The fifth is a counter that PyTorch uses only if no
# momentum is given. It is the one thing that we leave out. `copyto` raises where shapes don't
# fit, and `strict` where the count is off.

# %%
def values(net):  # of a Gluon network, on its first device
    return [p.data(p.list_ctx()[0]).asnumpy() for p in net.collect_params().values()]


def state(net):  # of a PyTorch network, in the same order
    return [v.numpy() for name, v in net.state_dict().items() if "tracked" not in name]


def carry_over(source, target):
    for value, place in zip(values(source), state(target), strict=True):
        np.copyto(place, value)  # shares its memory with the tensor
    return target


_ = carry_over(ours, theirs)
assert apart(state(theirs), values(ours)) == 0, "the same bits on both sides"

# %% [markdown]
# ### One step
#
# From here on the two must agree. A step in Gluon gives three things: the mean loss, the mean
# gradients, and the new weights. It works for one device or several.

# %%
def gluon_step(net, x, y, places, rate=0.125):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
    x, y = nd.array(x, dtype=x.dtype), nd.array(y)
    shards = zip(*(gluon.utils.split_and_load(a, places) for a in (x, y)))
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in shards]
    autograd.backward(losses)
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    gradients = [sum(g.asnumpy() for g in p.list_grad()) / len(x) for p in trained]
    trainer.step(len(x))
    return np.mean([loss.asnumpy() for loss in losses]), gradients


# %% [markdown]
# And in PyTorch:

# %%
def torch_step(net, x, y, rate=0.125):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y, dtype=torch.int64))
    loss.backward()
    optimizer.step()
    return loss.item(), [p.grad.numpy() for p in net.parameters()]


# %% [markdown]
# **Predict:** two frameworks, two sets of kernels, written by different people. To how many digits
# do they agree in float64?

# %%
x, y = images[:64], labels[:64]
before = values(ours)
(loss_1, gradients_1), (loss_2, gradients_2) = gluon_step(ours, x, y, pair[:1]), \
    torch_step(theirs, x, y)

# %% [markdown]
# In this order: loss, gradients, weights.

# %%
assert abs(loss_1 - loss_2) < 1e-10 * loss_1, "the loss"
assert apart(gradients_2, gradients_1) < 1e-10, "each gradient, as a share of its largest entry"
assert apart(state(theirs), values(ours)) < 1e-10, "the weights after the step"
assert apart(values(ours), before) > 1e-3, "a step that moves nothing proves nothing"

# %% [markdown]
# To at least ten of about sixteen. That is the strongest check in this course: nearly all mistakes
# that either side could make, in a convolution, a pooling, a loss, would show.
#
# Did you notice the odd learning rate, 0.125? **Predict:** what happens to the ten digits with 0.1?

# %%
def weights_apart(gluon_rate, torch_rate):
    ours, theirs = start(gluon_lenet, pair[:1]), lenet().double()
    carry_over(ours, theirs)
    gluon_step(ours, x, y, pair[:1], gluon_rate)
    torch_step(theirs, x, y, torch_rate)
    return apart(state(theirs), values(ours))


assert weights_apart(0.1, 0.1) > 1e-11 > 1e-13 > weights_apart(0.1, float(np.float32(0.1)))
print("0.1 is", float(np.float32(0.1)), "in MXNet")

# %% [markdown]
# MXNet keeps an operator's settings in float32, whatever the arrays are. 0.125 is exact in binary,
# 0.1 is not. Give PyTorch the rounded one and the digits come back. Nobody needs ten digits to
# train; you need them to tell a mistake from rounding.
#
# ### Float32
#
# In float32 an equality to ten digits is out of the question. But how far apart is still right?
# A single step says little. We train for 20, from the same weights, and look at the weights after
# each. **Predict** the shape of the two curves.

# %%
def distances(dtype, steps=20, size=32):
    ours = start(gluon_lenet, pair[:1], dtype)
    theirs = carry_over(ours, lenet().to(getattr(torch, dtype)))
    found = []
    for i in range(0, steps * size, size):
        x, y = images[i : i + size].astype(dtype), labels[i : i + size]
        gluon_step(ours, x, y, pair[:1])
        torch_step(theirs, x, y)
        found.append(apart(state(theirs), values(ours)))
    return found


drift = {dtype: distances(dtype) for dtype in ("float32", "float64")}
assert max(drift["float64"]) < 1e-10, "20 steps, and the frameworks still agree"
assert drift["float32"][-1] > 1000 * drift["float64"][-1], "float32 knows half as many digits"

# %% [markdown]
# On a logarithmic axis:

# %% tags=["measured"]
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

fig, ax = figure(f"Apart after 20 steps: {drift['float32'][-1]:.0e} in float32, "
                 f"{drift['float64'][-1]:.0e} in float64",
                 "step", "largest difference / largest entry")
for (dtype, found), color, mark in zip(drift.items(), (ORANGE, BLUE), "so"):
    ax.semilogy(range(1, 21), found, mark + "-", color=color, ms=4, label=dtype)
    ax.axhline(np.finfo(dtype).eps, color=color, ls=":", lw=1)
    ax.text(20.4, np.finfo(dtype).eps, "rounding", va="top", fontsize=8)
ax.set(xlim=(0, 23.5))
ax.legend()
show(fig, alt="Difference between the weights in MXNet and in PyTorch after each of 20 steps: "
     "float32 lies many powers of ten above float64; dotted lines mark one rounding.")

# %% [markdown]
# Both start near one rounding. From then on each step starts from weights that differ a little, and
# new roundings are added. Neither framework is wrong. Their sums are
# taken in another order, and in floating point $(a + b) + c$ isn't $a + (b + c)$. So a comparison
# in float32 needs a tolerance, and with a tolerance that wide it can't see small mistakes. Compare
# in float64, then train in float32.
#
# ## ResNet-18 twice
#
# Chapter 08's network for 28×28 images, with the residual block written out by us. (d2l's module
# for PyTorch needs torchvision; this needs nothing.)

# %%
class Residual(nn.Module):
    def __init__(self, before, after, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride) if stride > 1 else None

    def forward(self, x):
        change = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(change + (x if self.project is None else self.project(x)))


# %% [markdown]
# `AdaptiveAvgPool2d(1)` is PyTorch's name for `GlobalAvgPool2D`.

# %%
def resnet18(channels=(64, 128, 256, 512)):
    layers = [nn.Conv2d(1, channels[0], 3, padding=1), nn.BatchNorm2d(channels[0]), nn.ReLU()]
    for before, after, stride in zip((channels[0], *channels), channels, (1, 2, 2, 2)):
        layers += [Residual(before, after, stride), Residual(after, after)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(channels[-1], 10))


# %% [markdown]
# Its twin in Gluon, in `mx.nd` arrays, with children in the same order.

# %%
class GluonResidual(gluon.nn.HybridBlock):
    def __init__(self, channels, stride=1):
        super().__init__()
        conv, norm = gluon.nn.Conv2D, gluon.nn.BatchNorm
        self.conv1, self.norm1 = conv(channels, 3, stride, padding=1), norm()
        self.conv2, self.norm2 = conv(channels, 3, padding=1), norm()
        self.project = conv(channels, 1, stride) if stride > 1 else None

    def hybrid_forward(self, F, x):
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(change + (x if self.project is None else self.project(x)))


# %% [markdown]
# And the whole:

# %%
def gluon_resnet18(channels=(64, 128, 256, 512)):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(channels[0], 3, padding=1), gluon.nn.BatchNorm(),
            gluon.nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(GluonResidual(width, stride), GluonResidual(width))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10))
    return net


# %% [markdown]
# A training step on eight images, all eleven million parameters in float64, in both. **Predict:**
# is there a parameter for which "a share of its largest entry" will not do?

# %%
ours, theirs = start(gluon_resnet18, pair[:1]), resnet18().double()
assert sum(p.numel() for p in theirs.parameters()) == 11_175_818, "as in chapter 08"
_ = carry_over(ours, theirs)
x, y = images[:8], labels[:8]
(loss_1, gradients_1), (loss_2, gradients_2) = gluon_step(ours, x, y, pair[:1]), \
    torch_step(theirs, x, y)
assert abs(loss_1 - loss_2) < 1e-10 * loss_1, "the loss"
print(len(gradients_1), "gradients")

# %% [markdown]
# A bias that is added right before BatchNorm is taken away again with the mean. It has no effect,
# so its true gradient is zero and what is computed is rounding: a share of *that* is meaningless.
# All convolutions but the three projections come right before a norm.

# %%
names = [name for name, _ in theirs.named_parameters()]
idle = [i for i, name in enumerate(names)
        if name == "0.bias" or ("conv" in name and "bias" in name)]
live = [i for i in range(len(names)) if i not in idle]

# %% [markdown]
# Against the largest gradient of the network:

# %%
largest = max(np.abs(g).max() for g in gradients_1)
noise = max(np.abs(g[i]).max() for g in (gradients_1, gradients_2) for i in idle)
assert len(idle) == 17 and noise < 1e-11 * largest, "biases before a norm: rounding, in both"

# %% [markdown]
# All others, each against its own largest entry:

# %%
def pick(arrays, which):
    return [arrays[i] for i in which]



# %% [markdown]
# The steps are compared with all parameters, idle ones too:

# %%
assert apart(pick(gradients_2, live), pick(gradients_1, live)) < 1e-10, "gradients"
trained_1 = [p.data().asnumpy() for p in ours.collect_params().values() if p.grad_req != "null"]
trained_2 = [p.detach().numpy() for p in theirs.parameters()]
assert apart(trained_2, trained_1) < 1e-10, "weights after the step"
print(len(live), "gradients and all weights agree to 1e-10,", len(idle), "gradients are zero")

# %% [markdown]
# ### Running statistics
#
# Those we have kept apart. Both frameworks call a setting *momentum*: it is 0.9 in MXNet, for what
# is kept, and 0.1 in PyTorch, for what is new. Both add $10^{-5}$ to the variance. **Predict:** is
# that all that differs?

# %%
def statistics(net):  # of a Gluon network
    return [p.data().asnumpy() for p in net.collect_params(".*running.*").values()]



# %% [markdown]
# All means, then all variances, of either side:

# %%
means_1, vars_1 = statistics(ours)[::2], statistics(ours)[1::2]
buffers = [b.numpy() for name, b in theirs.named_buffers() if "running" in name]
means_2, vars_2 = buffers[::2], buffers[1::2]
print("means apart by", "less" if apart(means_2, means_1) < 1e-6 else "more", "than 1e-6,",
      "variances by", "less" if apart(vars_2, vars_1) < 1e-6 else "more")

# %% [markdown]
# The means agree as far as a float32 setting lets them (0.9 again). The variances don't. One small
# layer shows why: a batch of four numbers, with $n$ and with $n - 1$ in the denominator.

# %%
four_numbers = np.array([1.0, 2.0, 3.0, 6.0])
norm, twin = gluon.nn.BatchNorm(in_channels=1), nn.BatchNorm1d(1)
norm.initialize()
with autograd.record():
    out = norm(nd.array(four_numbers).reshape((4, 1)))
out.backward()
twin(torch.tensor(four_numbers, dtype=torch.float32).reshape(4, 1))
print(f"variance {four_numbers.var()} or {four_numbers.var(ddof=1):.4f}: MXNet keeps",
      f"{(norm.running_var.data().asscalar() - 0.9) / 0.1:.3f}, PyTorch",
      f"{(twin.running_var.item() - 0.9) / 0.1:.3f}")

# %% [markdown]
# MXNet keeps the batch's own variance; PyTorch keeps an estimate for the population, larger by
# $n / (n - 1)$. For training it changes nothing, since there both divide by $n$. At test time it
# does a little, most where $n$ is small: here, in the last stage, with 8 images of 4×4 pixels,
# $n = 128$. With the factor taken out, are they equal?

# %%
counts = [8 * side**2 for side in (28, *[28] * 4, *[14] * 4, *[7] * 4, *[4] * 4)]
new = 1 - float(np.float32(0.9))
expected = [1 - new + (v - 0.9) / 0.1 * (n - 1) / n * new for v, n in zip(vars_2, counts)]
assert apart(expected, vars_1) < 1e-10, "n - 1 for n, and 0.9 as float32: nothing else"
assert apart([(m / 0.1) * new for m in means_2], means_1) < 1e-10, "means: only the 0.9"
print("17 running means and 17 running variances explained to 1e-10")

# %% [markdown]
# ### And in float32?
#
# Same network, same batch. This time three distances: each framework to the float64 gradients, and
# the two to each other. **Predict** the order of magnitude. One rounding is $10^{-7}$.

# %% tags=["measured"]
narrow = start(gluon_resnet18, pair[:1], "float32")
small = carry_over(narrow, resnet18())
_, g1 = gluon_step(narrow, x.astype("float32"), y, pair[:1])
_, g2 = torch_step(small, x.astype("float32"), y)
g1, g2, truth = (pick(g, live) for g in (g1, g2, gradients_1))

# %% [markdown]
# In the same measure as before:

# %% tags=["measured"]
for name, distance in (("MXNet to float64", apart(g1, truth)),
                       ("PyTorch to float64", apart(g2, truth)),
                       ("one to the other", apart(g1, g2))):
    print(f"{name:18} {distance:.0e}")

# %% [markdown]
# With anything but the same function the gradients would not point the same way. They do:

# %%
def cosine(found, truth):
    a, b = (np.concatenate([g.ravel() for g in gradients]) for gradients in (found, truth))
    return a @ b / np.sqrt((a @ a) * (b @ b))


assert cosine(g1, truth) > 0.98 and cosine(g2, truth) > 0.98, "the same direction"

# %% [markdown]
# Yet the largest difference can be thousands of roundings. Two things come together. One is how
# exact a single layer is. We give both a BatchNorm whose input has a mean far from zero, and look
# at its output. **Predict** what a mean of 1,000 does.

# %% tags=["measured"]
def norm_error(mean):  # of MXNet and of PyTorch, in float32
    x = np.random.RandomState(12).randn(8, 1, 28, 28) + mean
    norm, twin = gluon.nn.BatchNorm(in_channels=1), nn.BatchNorm2d(1)
    norm.initialize()
    with autograd.record():
        out = norm(nd.array(x))
    exact = torch.nn.BatchNorm2d(1).double()(torch.tensor(x.astype("float32")).double())
    outputs = out.asnumpy(), twin(torch.tensor(x).float()).detach().numpy()
    return [apart([o], [exact.detach().numpy()]) for o in outputs]


for mean in (0, 10, 1000):
    print("mean {:5}: MXNet {:.0e}, PyTorch {:.0e}".format(mean, *norm_error(mean)))

# %% [markdown]
# The mean is taken away, and with it go the digits that were spent on it. How many depends on the
# framework's way to compute. The other thing is what the network makes of it. Of two numbers near
# zero, one may be a little above in one framework and a little below in the other. ReLU passes the
# first and stops the second, with all that depends on it. If that is the cause, it must show with
# no float32 at all: in *float64*, in PyTorch alone, with the first norm's output nudged.

# %%
def nudged(size):
    net = carry_over(origin, resnet18().double())
    noise = torch.randn(8, 64, 28, 28, generator=torch.Generator().manual_seed(12)).double()
    net[1].register_forward_hook(lambda module, inputs, out: out + size * out.std() * noise)
    return pick(torch_step(net, x, y)[1], live)



# %% [markdown]
# The gradients without a nudge, to compare with:

# %%
origin = start(gluon_resnet18, pair[:1])
calm = nudged(0)

# %% [markdown]
# **Predict:** ten times the nudge, ten times the difference?

# %% tags=["measured"]
nudges = [10.0**e for e in (-10, -8, -6, -4)]
effects = [apart(nudged(size), calm) for size in nudges]
for size, effect in zip(nudges, effects):
    print(f"nudge {size:.0e}: gradients {effect:.0e} apart")

# %% [markdown]
# For the smallest nudge, yes: it has no sign to change. From some size on, signs flip, and the
# difference jumps by orders of magnitude. So float32 on ResNet-18 isn't LeNet's rounding: its
# noise is large enough to flip a few of the network's many thousand ReLUs.

# %%
assert effects[0] < 1e-7, "too small to flip a sign: in proportion"
assert effects[-1] > 1e-3 > 100 * nudges[-1] * effects[0], "large enough: it jumps"
ours = theirs = narrow = small = truth = gradients_1 = gradients_2 = g1 = g2 = None

# %% [markdown]
# ## DataParallel, rebuilt
#
# *Dive into Deep Learning* trains with `nn.DataParallel`: one process, one line, all GPUs. What is
# in that line? In each step four things happen: **replicate** the network to all devices,
# **scatter** the batch, apply the replicas **in parallel**, **gather** the outputs. Then, in the
# backward pass, gradients are **reduced** to the first device. All of it can be built on a CPU,
# where a replica is just a copy.

# %%
import copy
from concurrent.futures import ThreadPoolExecutor

from torch.func import functional_call


def replicate(net, k):  # [(module, its parameters and statistics)], the first with the net's own
    replicas = []
    for r in range(k):
        arrays = {name: p.clone() for name, p in net.named_parameters()}
        arrays |= {name: b.clone() if r else b for name, b in net.named_buffers()}
        replicas.append((copy.deepcopy(net), arrays))
    return replicas


# %% [markdown]
# `clone` is recorded, like any operation. That is the whole trick: the gradient of a copy flows
# back to the original, and what flows back from $k$ copies is *added*. The reduce is the backward
# pass of the broadcast, and nobody has to write it.
#
# `functional_call` runs a module with other arrays in place of its parameters. One thread for each
# replica, and then all four together. (`chunk` may make fewer shards than were asked for.)

# %%
def parallel_apply(replicas, shards):
    def apply(replica, shard):
        module, arrays = replica
        return functional_call(module, arrays, (shard,))

    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(apply, replicas, shards))


def data_parallel(net, x, k):
    shards = x.chunk(k)  # scatter
    outputs = parallel_apply(replicate(net, len(shards)), shards)
    return torch.cat(outputs)  # gather


# %% [markdown]
# It must give the scores and gradients that the network itself gives. Ten images on one, two, three
# and four replicas:

# %%
net = lenet().double()
x, y = torch.tensor(images[:10]), torch.tensor(labels[:10], dtype=torch.int64)

# %% [markdown]
# The loss is taken once, of all gathered scores. So there are no weights to forget for unequal
# shards.

# %%
def scores_and_gradients(forward):
    net.zero_grad()
    scores = forward(x)
    F.cross_entropy(scores, y).backward()
    return [scores.detach().numpy(), *(p.grad.numpy().copy() for p in net.parameters())]


# %% [markdown]
# The oracle is the network itself:

# %%
alone = scores_and_gradients(net)
for k in (1, 2, 3, 4):
    found = scores_and_gradients(lambda x, k=k: data_parallel(net, x, k))
    assert apart(found, alone) < 1e-12, f"{k} replicas should compute what one network does"
print("1, 2, 3 and 4 replicas: equal to one network, to 1e-12")

# %% [markdown]
# ### With BatchNorm
#
# Each replica normalises its shard by itself, as a Gluon device does. **Predict:** whose running
# statistics survive the step?

# %%
norm = nn.Sequential(nn.BatchNorm2d(1, momentum=1.0)).double()
data_parallel(norm, x, 2)
kept = norm[0].running_mean.item()
shard_means = [shard.mean().item() for shard in x.chunk(2)]
assert abs(kept - shard_means[0]) < 1e-12 < abs(kept - shard_means[1]), "the first shard's"

# %% [markdown]
# The first's. The other replicas are thrown away after each step, with what they learned. So is
# everything else that a module writes down in its forward pass.
#
# ### The real one, on a CPU
#
# **Predict:** `nn.DataParallel` on a machine without a GPU, told to use two devices. How often is
# the network called, and with how many images?

# %%
has_gpu = torch.accelerator.is_available()
seen = []
counted = nn.Linear(28, 1)
counted.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
wrapped = nn.DataParallel(counted, device_ids=None if has_gpu else ["cpu", "cpu"])
if not has_gpu:
    wrapped(torch.ones(8, 28))
    assert seen == [8] and wrapped.device_ids == [], "one call, with everything"

# %% [markdown]
# Once, with all eight: it passes through and says nothing, whatever devices you name. A lesson on
# `DataParallel` that "works on CPU" has shown one device.
#
# ### Why it was replaced
#
# PyTorch's own documentation advises against `DataParallel`, even on one machine. Count what has to
# move in a step with $k$ devices and $S$ bytes of parameters. The first device sends the weights
# and receives the gradients of all others:

# %%
size = sum(p.numel() * 4 for p in lenet().parameters())  # bytes in float32
print("MB through one device per step:")
for k in (2, 4, 8):
    ring = 2 * (k - 1) / k * size
    print(f"{k} devices: DataParallel {2 * (k - 1) * size / 1e6:.1f}, ring {2 * ring / 1e6:.1f}")
    assert 2 * (k - 1) * size / (2 * ring) == k / 2, "and the ratio grows with k"

# %% [markdown]
# (A ring's devices each send and receive chapter 03's $2(k-1)/k \cdot S$; both directions are
# counted.) Besides, the first device holds all the scores and makes the whole update while the
# others wait. And it is one process: Python runs one thread at a time, and every replica needs it.
#
# On a CPU there is one thing more. **Predict:** the forward pass had a thread for each replica. How
# many has the backward pass?

# %%
import threading

backward_threads, passed = set(), []


def note(module, inputs, output):
    passed.append(len(output))
    output.register_hook(lambda gradient: backward_threads.add(threading.get_ident()))


hook = net.register_forward_hook(note)
scores_and_gradients(lambda x: data_parallel(net, x, 4))
hook.remove()
assert sorted(passed) == [1, 3, 3, 3], "four replicas went forward"
print("threads in the backward pass:", len(backward_threads))

# %% [markdown]
# One. On GPUs PyTorch keeps a thread for each device; for the CPU it uses the thread that calls
# `backward`.
#
# ## A process for each device
#
# DDP takes the other way. Every process has its own Python, its own replica, its own share of the
# data. They talk only to all-reduce. There is no first device.
#
# A notebook can't *become* two processes, and `fork` would break MXNet's threads. So it writes a
# script and starts that. The script consists of cells of this very notebook, so what you see is
# what runs:

# %%
import linecache


def cell_of(thing):
    function = getattr(thing, "forward", thing)  # of a module, its method
    return "".join(linecache.getlines(function.__code__.co_filename))


assert cell_of(lenet).startswith("def lenet")

# %% [markdown]
# The first cell of the script has the imports, and the shard that is this process's, cut as Gluon
# cuts it.

# %%
import os
import signal
import sys
from datetime import timedelta
from time import perf_counter

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mine(batch):
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


# %% [markdown]
# Each *part* of the script is a function that takes what the notebook gave and returns what it
# found. The first part is the smallest: each rank gives $r + 1$, and all-reduce adds. It also looks
# up on which addresses it listens, and on which the process that started it does.

# %%
def hello(given):
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    listens = [[c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
               for pid in (os.getpid(), os.getppid())]
    return {"sum": x, "listens": listens[0], "starter": listens[1]}


# %% [markdown]
# Ranks must find each other. `init_process_group` takes a *meeting place*: a file, or an address
# and port. Everything has a deadline. After `alarm` the process ends, whatever it is doing, even if
# the notebook is no longer there to end it.

# %%
def main(folder, *parts):
    signal.alarm(150)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", os.environ.get("MEETING", "env://"),
                            timedelta(seconds=60), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    given = torch.load(f"{folder}/given.pt") if os.path.exists(f"{folder}/given.pt") else {}
    for part in parts:
        torch.save(globals()[part](given), f"{folder}/{part}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# The script is cells, and a call.

# %%
def write_script(path, *things):
    cells = [cell_of(thing) for thing in (mine, *things, main)]
    path.write_text("\n\n".join([*cells, "main(*sys.argv[1:])\n"]))


# %% [markdown]
# ### Starting, watching, ending
#
# Started processes are our responsibility. Three rules: there is a deadline; when one fails, all
# are ended, since the others would wait for it; and however the cell ends, by the stop button too,
# no process is left.

# %%
import contextlib
import subprocess

# %% [markdown]
# The third rule is the `finally` below.

# %%
@contextlib.contextmanager
def started(commands, logs):  # [(arguments, variables)] -> processes
    running = []
    try:
        for (arguments, variables), log in zip(commands, logs):
            running.append(subprocess.Popen([sys.executable, *arguments], stdout=log,
                                            stderr=log, env={**os.environ, **variables}))
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


# %% [markdown]
# `terminate` asks and `kill` doesn't. Between them there is time for a process to end those that it
# started itself. Watching means to look at all of them several times a second:

# %%
import tempfile


def run(commands, seconds=120):
    logs = [tempfile.TemporaryFile() for _ in commands]
    deadline = time.monotonic() + seconds
    with started(commands, logs) as running:
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            assert time.monotonic() < deadline, f"not done after {seconds} seconds"
            time.sleep(0.05)
        codes = [p.poll() for p in running]
    for log in logs:
        log.seek(0)
    said = [log.read().decode() for log in logs]
    assert set(codes) == {0}, f"exit codes {codes}: {''.join(said)[-1500:]}"
    return said


# %% [markdown]
# Does it keep its rules? One process fails, the other would sleep for an hour.

# %%
sleeper, failer = ["-c", "import time; time.sleep(3600)"], ["-c", "raise SystemExit('no luck')"]
try:
    run([(sleeper, {}), (failer, {})])
except AssertionError as error:
    print(error)

# %% [markdown]
# `None` is the one that still ran; it was ended. Now the two ranks. The file where they meet must
# be new each time. Gloo, the library that all-reduces on CPUs, opens a port for its neighbours;
# `GLOO_SOCKET_IFNAME` keeps it on the loopback, where no other machine can reach it.

# %%
from pathlib import Path

home = tempfile.TemporaryDirectory()
folder = Path(home.name)
loopback = next(name for name, addresses in psutil.net_if_addrs().items()
                if "127.0.0.1" in [a.address for a in addresses])

# %% [markdown]
# `ranks` starts one process a rank for some parts of the script, and returns what each rank found.

# %%
def ranks(world, *parts):
    place = f"file://{tempfile.mkdtemp(dir=folder)}/meeting"
    shared = {"MEETING": place, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": loopback}
    run([([str(folder / "ddp.py"), str(folder), *parts], {**shared, "RANK": str(rank)})
         for rank in range(world)])
    return {part: read_back(part, world) for part in parts}


def read_back(part, world=2):  # what they found, in the order of ranks
    return [torch.load(folder / f"{part}-{rank}.pt") for rank in range(world)]


# %% [markdown]
# ### All-reduce
#
# In MXNet a KVStore sums over devices (chapter 07):

# %%
store = mx.kv.create("device")
store.init(0, nd.zeros(3))
arrays = [nd.full(3, rank + 1, ctx=device) for rank, device in enumerate(pair)]
store.pushpull(0, arrays, out=arrays)
print(*(a.asnumpy() for a in arrays))

# %% [markdown]
# In PyTorch `all_reduce` sums over processes. **Predict** both replicas, and the addresses.

# %%
write_script(folder / "ddp.py", hello)
found = ranks(2, "hello")["hello"]
for array, rank in zip(arrays, found):
    assert (array.asnumpy() == rank["sum"].numpy()).all(), "the same sum, on every rank"
    assert set(rank["listens"]) <= {"127.0.0.1"}, "reachable from this machine only"
print(found[1]["sum"], set(found[1]["listens"]))

# %% [markdown]
# ### dist_sync and torchrun
#
# Across machines MXNet starts a scheduler, servers and workers. Here they are, on one machine, in
# four processes. The workers push $r + 1$ and print what they pull. (Chapter 13 goes into it.)

# %%
import socket

WORKER = """import mxnet as mx
store = mx.kv.create("dist_sync")
store.init(0, mx.nd.zeros(3))
total = mx.nd.zeros(3)
store.push(0, mx.nd.full(3, store.rank + 1))
store.pull(0, out=total)
print(total.asnumpy())"""
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]  # free a moment ago
cluster = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
           "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "2"}

# %% [markdown]
# Scheduler and server need no program: `import mxnet` in that role is one.

# %%
roles = [("scheduler", "import mxnet"), ("server", "import mxnet"),
         ("worker", WORKER), ("worker", WORKER)]
said = run([(["-c", code], {**cluster, "DMLC_ROLE": role}) for role, code in roles])
print(said[2].strip(), said[3].strip())

# %% [markdown]
# PyTorch's is `torchrun`, here by its module's name, with the script from above as it is. It starts
# the processes, gives each its `RANK`, and an address to meet at (`env://`).

# %%
arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             str(folder / "ddp.py"), str(folder), "hello"]
run([(arguments, {"GLOO_SOCKET_IFNAME": loopback})])
for rank in read_back("hello"):
    assert rank["sum"].tolist() == [3, 3, 3], "as the two workers of dist_sync"
    assert set(rank["starter"]) - {"127.0.0.1", "::1"}, "torchrun listens on every address"

# %% [markdown]
# The last line is a warning. While `torchrun` runs, its store listens on *all* addresses of the
# machine, not only on the loopback, and has no password. On your own laptop in a café that is not
# nice. So for two processes on one machine this chapter meets in a file, which needs no port, and
# leaves `torchrun` to chapter 13.
#
# ## DDP, and whether it is the same
#
# Wrapping a network in `DistributedDataParallel` does two things: at the start it sends rank 0's
# parameters to everybody, and in each backward pass it all-reduces gradients and divides by the
# number of ranks. These are the steps.

# %%
def ddp_steps(net, given):  # three steps from `start`; x: [3, n, 1, 28, 28], y: [3, n]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for x, y in zip(given["x"], given["y"]):
        optimizer.zero_grad()
        F.cross_entropy(model(mine(x)), mine(y)).backward()
        optimizer.step()
    return net.state_dict()


# %% [markdown]
# Two parts: LeNet, and a thin ResNet-18 with BatchNorm, whose layers see the rank's shard only,
# just like a Gluon device's. Only rank 0 loads the weights.

# %%
def from_weights(net, weights):
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        net.load_state_dict(weights)
    return net


def lenet_steps(given):
    return ddp_steps(from_weights(lenet().double(), given["lenet"]), given)


def thin_steps(given):
    net = resnet18((4, 4, 8, 8)).double()
    return ddp_steps(from_weights(net, given["thin"]), given)


# %% [markdown]
# What the ranks are given: weights that come from Gluon, three batches of 16 images.

# %%
def thin():
    return gluon_resnet18((4, 4, 8, 8))



# %% [markdown]
# Both networks begin from what Gluon made:

# %%
x, y = images[:48].reshape(3, 16, 1, 28, 28), labels[:48].reshape(3, 16)
given = {"x": torch.tensor(x), "y": torch.tensor(y, dtype=torch.int64),
         "lenet": carry_over(start(gluon_lenet, pair), lenet().double()).state_dict(),
         "thin": carry_over(start(thin, pair), resnet18((4, 4, 8, 8)).double()).state_dict()}
torch.save(given, folder / "given.pt")

# %% [markdown]
# The same three steps on two simulated devices of MXNet. The trainer stays the same over the steps.

# %%
def gluon_steps(make, places):
    net = start(make, places)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for batch in zip(x, y):
        shards = zip(*(gluon.utils.split_and_load(nd.array(a, dtype=a.dtype), places)
                       for a in batch))
        with autograd.record():
            losses = [softmax(net(a), b) for a, b in shards]
        autograd.backward(losses)
        trainer.step(16)
    return net


# %% [markdown]
# All trained parameters, replica by replica, on either side:

# %%
def trained(net):  # [devices][parameters]
    lists = [p.list_data() for p in net.collect_params().values() if p.grad_req != "null"]
    return [[a.asnumpy() for a in replica] for replica in zip(*lists)]



# %% [markdown]
# Of a state that came back from a rank:

# %%
def trained_torch(state):
    return [v.numpy() for name, v in state.items() if "running" not in name
            and "tracked" not in name]


# %% [markdown]
# **Predict:** for which of the two networks are two processes of PyTorch equal to two devices of
# MXNet? And to *one* device of MXNet?

# %%
write_script(folder / "ddp.py", Residual, resnet18, lenet, ddp_steps, from_weights)
found = ranks(2, "lenet_steps", "thin_steps")
for part, make in (("lenet_steps", gluon_lenet), ("thin_steps", thin)):
    two, one = gluon_steps(make, pair), gluon_steps(make, pair[:1])
    for device, rank in zip(trained(two), found[part]):
        assert apart(trained_torch(rank), device) < 1e-10, f"{part}: replica by replica"
    print(part, "equal one device:", apart(trained(two)[1], trained(one)[0]) < 1e-10)

# %% [markdown]
# Two processes equal two devices for both, to $10^{-10}$, in every replica. That holds two entirely
# different implementations of data parallelism against each other: shards, all-reduce, division.
# Neither equals one device where there is BatchNorm, for chapter 08's reason, and both in the same
# way.
#
# What about running statistics? By default DDP sends rank 0's to all others before each forward
# pass, so what the others gather is overwritten, and only the last step's remains.

# %%
means = [rank["1.running_mean"].numpy() for rank in found["thin_steps"]]
own = [a.asnumpy() for a in gluon_steps(thin, pair)[1].running_mean.list_data()]
assert np.abs(means[0] - means[1]).max() > 1e-6, "apart by the last step"
assert apart([means[0]], [own[0]]) < 1e-6, "rank 0 has gathered what cpu(0) has"
print("rank 0's running means are cpu(0)'s; rank 1's differ")

# %% [markdown]
# Save rank 0's checkpoint, as everybody does, and you keep what one shard of each batch said.
# `nn.SyncBatchNorm.convert_sync_batchnorm` is the remedy of chapter 08, on GPUs only.
#
# ### Buckets
#
# A message for each parameter would be slow (chapter 01: latency). One message for all would have
# to wait for the last gradient. DDP fills *buckets*, and sends each one as soon as it is full,
# while the backward pass goes on. A hook lets us look. It has to do the work itself: divide, and
# start the all-reduce without waiting for it.

# %%
def send(log, bucket):
    log.append(f"sends {bucket.buffer().numel()} gradients")
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# %% [markdown]
# A backward pass of LeNet, in buckets that are sent once they hold 0.1 MB (25 by default):

# %%
def buckets(given):
    net, log = lenet(), []
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    model.register_comm_hook(None, lambda state, bucket: send(log, bucket))
    for name, layer in net.named_children():
        layer.register_full_backward_pre_hook(
            lambda layer, gradient, name=name: log.append(f"backward of {name}"))
    for _ in range(2):  # after the first, buckets are in the order in which gradients came
        log.clear()
        F.cross_entropy(model(mine(given["x"][0].float())), mine(given["y"][0])).backward()
    return {"log": log}

# %% [markdown]
# We'll start this together with the parts that follow, since starting takes the longest.
#
# ## Four traps
#
# ### 1. Replicas that start apart
#
# Nobody set a seed, or everybody set another. Each rank makes two LeNets. One is trained with DDP.
# The other does by hand what DDP does in the backward pass, and only that.

# %%
def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])



# %% [markdown]
# The second network averages its gradients with these three lines:

# %%
def average_gradients(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# %% [markdown]
# One step of each, and the weights before and after:

# %%
def unseeded(given):
    torch.manual_seed(dist.get_rank())
    found = {}
    for name, wrap in (("bare", lambda net: net), ("ddp", DistributedDataParallel)):
        net = lenet().double()
        found[f"{name}: as made"] = flat(net)
        model = wrap(net)
        found[f"{name}: wrapped"] = flat(net)
        F.cross_entropy(model(mine(given["x"][0])), mine(given["y"][0])).backward()
        if name == "bare":
            average_gradients(net)
        torch.optim.SGD(net.parameters(), lr=0.125).step()
        found[f"{name}: after a step"] = flat(net)
    return found


# %% [markdown]
# ### 2. A loss that can't tell
#
# A published DDP example took `cross_entropy` of a network with *one* output. **Predict** its
# gradient.

# %%
toy, x20 = nn.Linear(20, 1), torch.rand(8, 20)
F.cross_entropy(toy(x20), torch.rand(8, 1)).backward()
assert (toy.weight.grad == 0).all(), "softmax of one number is 1, whatever the number"

# %% [markdown]
# Softmax of a single number is always 1, so nothing can be learned. The example trains without a
# complaint. Worse, it can't notice a *missing* all-reduce: here are two ranks that don't talk at
# all, with this loss and with one that works. Starts are equal, data differ.

# %%
def silent(given):
    found = {}
    for name, loss in (("one class", F.cross_entropy), ("mse", F.mse_loss)):
        torch.manual_seed(12)
        net = nn.Linear(20, 1)
        torch.manual_seed(dist.get_rank())
        for _ in range(5):
            net.zero_grad()
            loss(net(torch.rand(8, 20)), torch.rand(8, 1)).backward()
            torch.optim.SGD(net.parameters(), lr=0.125).step()
        found[name] = flat(net)
    return found


# %% [markdown]
# ### 3. Sum and mean
#
# DDP divides the summed gradients by the number of ranks, never by the number of images. So what it
# computes depends on the loss and on the shards: equal ones of 4 and 4, or 5 and 3.

# %%
def reductions(given):
    found, rank = {}, dist.get_rank()
    cases = {"mean, 4 and 4": (4, 1 / 4), "sum, 4 and 4": (4, 1),
             "mean, 5 and 3": (5, 1 / (5, 3)[rank]), "weighted, 5 and 3": (5, 2 / 8)}
    for name, (cut, factor) in cases.items():
        net = lenet().double()
        net.load_state_dict(given["lenet"])
        x, y = (given[a][0][:8].split([cut, 8 - cut])[rank] for a in "xy")
        model = DistributedDataParallel(net)
        (F.cross_entropy(model(x), y, reduction="sum") * factor).backward()
        found[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    return found


# %% [markdown]
# In the last case the factor is $k/n$ for everybody: the sum over the shard, divided by all $n$
# images and multiplied by the $k$ that DDP will divide by. Off they go, all four parts in one
# start:

# %%
write_script(folder / "ddp.py", lenet, send, flat, average_gradients, buckets, unseeded,
             silent, reductions)
found = ranks(2, "buckets", "unseeded", "silent", "reductions")

# %% [markdown]
# **Buckets.** What rank 1 wrote down, layers by their number:

# %%
log = found["buckets"][1]["log"]
print("\n".join(log))
sent = [int(line.split()[1]) for line in log if "sends" in line]
assert sum(sent) == sum(p.numel() for p in lenet().parameters()), "each gradient once"
first_send = next(i for i, line in enumerate(log) if "sends" in line)
assert first_send < log.index("backward of 0"), "sent before the pass has reached layer 0"
assert log == found["buckets"][0]["log"], "both ranks in the same order, or they'd wait forever"

# %% [markdown]
# The gradients of the last layers are on their way before the backward pass of the first
# convolution has begun. That is the overlap of chapter 09, and here nobody had to ask for it.
#
# **Trap 1.** **Predict:** six pairs of weights. Which are equal on both ranks?

# %%
first, second = found["unseeded"]
for name in first:
    print(f"{name:20} {'equal' if torch.equal(first[name], second[name]) else 'apart'}")
assert torch.equal(second["ddp: wrapped"], first["ddp: as made"]), "rank 0's, on all ranks"

# %% [markdown]
# DDP sends rank 0's weights to everybody when you wrap the network, not later: a weight that you
# change on one rank after that stays changed. Without DDP they stay apart. And how far?

# %%
gap = first["bare: as made"] - second["bare: as made"]
later = first["bare: after a step"] - second["bare: after a step"]
assert (gap - later).abs().max() < 1e-12 * gap.abs().max(), "exactly as far as before"

# %% [markdown]
# Exactly as far as before, since both add the same step. Averaging gradients never brings replicas
# together. That is why this course compares *weights*.
#
# **Trap 2.** Two ranks that don't talk at all:

# %%
first, second = found["silent"]
assert torch.equal(first["one class"], second["one class"]), "this test lets it pass"
assert not torch.equal(first["mse"], second["mse"]), "this one catches it"

# %% [markdown]
# With the loss that has no gradient, replicas that never talked are equal, and a test of equal
# replicas is content. **A test needs a gradient that differs from rank to rank.**
#
# **Trap 3.** Against one network and the mean over all eight images. **Predict** which of the four
# are right, and the factor of those that are wrong.

# %%
net = lenet().double()
net.load_state_dict(given["lenet"])
F.cross_entropy(net(given["x"][0][:8]), given["y"][0][:8]).backward()
truth = torch.cat([p.grad.flatten() for p in net.parameters()])

# %% [markdown]
# The factor is that of the closest multiple of the truth:

# %%
for name in found["reductions"][0]:
    for rank in found["reductions"]:
        factor = (rank[name] @ truth / (truth @ truth)).item()
        off = (rank[name] - factor * truth).abs().max() / truth.abs().max()
    print(f"{name:18}", f"{factor:.2f} times" if off < 1e-10 else "no multiple of", "the right one")

# %% [markdown]
# Both ranks, to be sure:

# %%
for rank in found["reductions"]:
    for name, wanted in (("mean, 4 and 4", truth), ("sum, 4 and 4", 4 * truth),
                         ("weighted, 5 and 3", truth)):
        assert apart([rank[name].numpy()], [wanted.numpy()]) < 1e-10, name
    assert apart([rank["mean, 5 and 3"].numpy()], [truth.numpy()]) > 1e-3, "means of unequal shards"

# %% [markdown]
# A sum comes out at 4 times the mean here: at $n/k$ times, so that the step grows with the *shard*,
# not with the batch. Means of unequal shards give a direction of their own, and all replicas agree
# on it. Weighted as in chapter 11 it is right.
#
# ### 4. A sampler without set_epoch
#
# `DistributedSampler` shuffles, from a seed that all ranks share, so that they take different
# images of *one* order. **Predict** the orders of two epochs.

# %%
sampler = DistributedSampler(range(8), 2, rank=1, shuffle=True)
print("the same order twice:", list(sampler) == list(sampler))

# %% [markdown]
# The same images, in the same order, in every epoch, and rank 1 will never see the others. The
# sampler doesn't know that an epoch has ended; somebody has to tell it.

# %%
orders = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    orders.append(list(sampler))
assert len({tuple(order) for order in orders}) > 1, "another order now"
assert set(sum(orders, [])) > set(orders[0]), "and other images"

# %% [markdown]
# ## Training, and what it brings
#
# Now for speed. Two ranks, one thread each. First rank 0 works alone while rank 1 waits; then both
# work, each on as many images as rank 0 had alone. In turn, four times, and the first time doesn't
# count.

# %%
def seconds(model, x, y, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return perf_counter() - begin


# %% [markdown]
# `barrier` lets all ranks start together.

# %%
def rates(given, rounds=4):
    found = {}
    for make, size, steps in ((lenet, 128, 4), (resnet18, 16, 1)):
        x, y = given["images"][:size], given["labels"][:size]
        plain, model = make(), DistributedDataParallel(make())
        for _ in range(rounds):
            dist.barrier()
            alone = seconds(plain, x, y, steps) if dist.get_rank() == 0 else float("inf")
            dist.barrier()
            both = seconds(model, x, y, steps)
            found.setdefault(make.__name__, []).append(
                [steps * size / alone, 2 * steps * size / both])
    return found


# %% [markdown]
# And an epoch of real training: all 640 images, dealt by a sampler, in batches of 32 a rank, three
# times over.

# %%
def training(given):
    data = torch.utils.data.TensorDataset(given["images"], given["labels"])
    sampler = torch.utils.data.DistributedSampler(data, seed=12)
    loader = torch.utils.data.DataLoader(data, 32, sampler=sampler)
    torch.manual_seed(12)
    model, losses = DistributedDataParallel(lenet()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "net": model.module.state_dict()}


# %% [markdown]
# **Predict** the speed-up of LeNet and of ResNet-18 on two cores. And: which of the two ways to
# train LeNet with two threads, the rebuilt `DataParallel` or DDP, is faster?

# %% tags=["measured"]
from helpers.timing import Others

torch.save({"images": torch.tensor(images, dtype=torch.float32),
            "labels": torch.tensor(labels, dtype=torch.int64)}, folder / "given.pt")
write_script(folder / "ddp.py", Residual, resnet18, lenet, seconds, rates, training)
with Others() as others:
    found = ranks(2, "rates", "training")
for name, rounds in found["rates"][0].items():
    alone, both = np.median(rounds[1:], axis=0)
    print(f"{name:9} one process {alone:5,.0f} images/s, two {both:5,.0f}: "
          f"{both / alone:.2f} times")
print(f"other programs had {others.share:.0%} of the CPU")

# %% [markdown]
# Nothing above is asserted: it is this machine's. What must hold on any machine is that training
# worked: the loss falls, and all weights of both ranks are equal to the bit.

# %%
first, second = found["training"]
assert all(torch.equal(v, second["net"][name]) for name, v in first["net"].items()), "to the bit"
for rank in found["training"]:
    assert np.mean(rank["losses"][-5:]) < 0.7 * np.mean(rank["losses"][:5]), "the loss should fall"
assert first["losses"] != second["losses"], "each rank had its own images"

# %% [markdown]
# Now the rebuilt `DataParallel`, in this process, on 256 images with two threads, against the same
# without threads:

# %% tags=["measured"]
x256, y256 = torch.tensor(images[:256], dtype=torch.float32), torch.tensor(labels[:256]).long()
torch.set_num_threads(1)


class Threaded(nn.Module):
    def __init__(self, net, k):
        super().__init__()
        self.net, self.k = net, k

    def forward(self, x):
        return data_parallel(self.net, x, self.k)


threaded = [[256 * 2 / seconds(model, x256, y256, 2) for model in models]
            for models in [(lenet(), Threaded(lenet(), 2))] for _ in range(4)]
print("one thread {:,.0f} images/s, DataParallel with two {:,.0f}".format(
    *np.median(threaded[1:], axis=0)))

# %% [markdown]
# Each as a multiple of what one core does alone:

# %% tags=["measured"]
groups = {"rebuilt DataParallel\nLeNet, 2 threads": threaded,
          "DDP, LeNet\n2 processes": found["rates"][0]["lenet"],
          "DDP, ResNet-18\n2 processes": found["rates"][0]["resnet18"]}
ratios = [both / alone for alone, both in (np.transpose(rounds[1:]) for rounds in groups.values())]

# %% [markdown]
# A mark for each round, a line for the median:

# %% tags=["measured"]
fig, ax = figure(f"Two cores, DDP: {np.median(ratios[1]):.2f} times one with LeNet, "
                 f"{np.median(ratios[2]):.2f} with ResNet-18", "", "speed-up over one core")
for i, (each, color, mark) in enumerate(zip(ratios, (GREY, ORANGE, BLUE), "so^")):
    ax.plot(i + np.linspace(-0.12, 0.12, len(each)), each, mark, color=color)
    ax.plot([i - 0.22, i + 0.22], [np.median(each)] * 2, color=color, lw=3)
    ax.text(i + 0.26, np.median(each), f"{np.median(each):.2f}", va="center", fontsize=9)
ax.axhline(1, color="black", lw=0.7)
ax.axhline(2, color="black", lw=0.7, ls=":")
ax.set_xticks(range(3), groups)
ax.set(ylim=(0, max(2.2, 1.1 * np.max(ratios))), xlim=(-0.5, 2.6))
show(fig, alt="Speed-up of two threads or processes over one, in three rounds: the rebuilt "
     "DataParallel, DDP with LeNet, DDP with ResNet-18; lines mark one and two.")

# %% [markdown]
# The rebuilt `DataParallel` has two threads in the forward pass only, and makes its replicas anew
# for each step. DDP's processes share nothing but the machine and the all-reduce.
#
# Nothing is left behind: no process, and the folder goes too.

# %%
home.cleanup()
assert not psutil.Process().children(recursive=True), "every process that was started has ended"

# %% [markdown]
# ## Summary
#
# | MXNet | PyTorch | what differs |
# | --- | --- | --- |
# | `ctx=mx.cpu(1)` | `device="cpu:1"` | PyTorch's CPU is one device |
# | `as_in_context` | `to` | |
# | `split_and_load` | `tensor_split`; `chunk` in `DataParallel` | `chunk` may leave devices out |
# | one batch, split | `DistributedSampler` | pads; needs `set_epoch` |
# | `autograd.record()` | always, but in `no_grad` | gradients add up: `zero_grad` |
# | loss per image, `step(n)` | mean loss, `step()` | who divides |
# | `"sgd"` with momentum | `SGD` with momentum | when the rate changes |
# | `waitall` | `torch.accelerator.synchronize` | nothing to wait for on a CPU |
# | `BatchNorm` | `BatchNorm2d` | momentum 0.9 or 0.1; $n$ or $n - 1$ in running variances |
# | `KVStore.pushpull` | `all_reduce` | processes instead of devices |
# | `Trainer` | DDP and an optimizer | sums, or means over ranks |
# | `dist_sync`, `DMLC_…` | `torchrun` | servers, or all-reduce |
#
# - The same weights and batch give the same loss, gradients and step in both, to $10^{-10}$ in
#   float64, for LeNet and for ResNet-18; two DDP processes equal two Gluon devices.
# - In float32 both are right and not equal. Compare in float64.
# - `DataParallel` is replicate, scatter, apply, gather; its reduce is the backward pass of a copy.
#   On CPUs it passes through.
# - DDP broadcasts once, all-reduces in buckets while the backward pass goes on, and divides by the
#   number of ranks.
#
# Next, chapter 13: the same across machines, and what happens when one of them dies.
#
# **Further reading.** *Dive into Deep Learning*, Concise Implementation for Multiple GPUs; S. Li et
# al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training* (2020).

# %% [markdown]
# ## Exercises
#
# The PyTorch listing of *Dive into Deep Learning*, Concise Implementation for Multiple GPUs, makes
# the network once. Its `train` function sets the weights of every module whose type is `nn.Linear`
# or `nn.Conv2d` to normal numbers with a standard deviation of 0.01, wraps the network in
# `DataParallel` on a list of devices, starts a timer, trains, and stops the timer. It is called
# once for one GPU and once for two, with the same network. Four things go wrong, and none of them
# raises on a CPU.
#
# 1. **Lazy layers.** d2l's residual block is made of `nn.LazyConv2d`, which finds its input
#    channels in the first forward pass. Which layers does the initialisation reach? Repair it.
# 2. **The second call.** Which numbers survive from the first training into the second? Write
#    `start_over(net)`, after which nothing does.
# 3. **Where is the network?** `DataParallel` expects it on `device_ids[0]`. Write
#    `assert_on(net, device)`, whose message names the first parameter or statistic elsewhere.
# 4. **The clock.** What does the timer measure on a GPU? Write one that can't be fooled, and that
#    works on a CPU too.

# %% [markdown]
# **Solution 1.** The function as described, and a network as d2l makes it. `LazyConv2d` is a class
# of its own and becomes a `Conv2d` only in the first forward pass, so a comparison of types passes
# it over.

# %% tags=["solution"] jupyter={"source_hidden": true}
def set_weights(module):
    if type(module) in [nn.Linear, nn.Conv2d]:
        nn.init.normal_(module.weight, std=0.01)
        reached.append(module)


def lazy_network():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10))


lazy, reached = lazy_network(), []
lazy.apply(set_weights)
assert reached == [lazy[0]], "one of three layers"

# %% [markdown]
# A forward pass before the initialisation repairs it.

# %% tags=["solution"] jupyter={"source_hidden": true}
torch.manual_seed(12)
lazy, reached = lazy_network(), []
lazy(torch.ones(1, 1, 28, 28))
before = lazy[1].weight.std().item()
lazy.apply(set_weights)
assert len(reached) == 3 and lazy[1].weight.std() < 0.012, "all layers, and small"
assert before > 3 * 0.01, "what the published initialisation left in place"

# %% [markdown]
# **Solution 2.** Everything but the weights of convolutions and linear layers: their biases,
# BatchNorm's scale and shift, and its running statistics. Every layer of PyTorch has a
# `reset_parameters`.

# %% tags=["solution"] jupyter={"source_hidden": true}
def start_over(net):
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


net, reached = resnet18((4, 4, 8, 8)), []
torch_step(net, images[:8].astype("float32"), labels[:8])
kept = net.state_dict()["1.running_mean"].clone()
net.apply(set_weights)
assert kept.abs().max() > 0 and torch.equal(net[1].running_mean, kept), "survives"
start_over(net)
assert not net[1].running_mean.any() and (net[1].running_var == 1).all() and not net[1].bias.any()

# %% [markdown]
# **Solution 3.** On GPUs, `DataParallel` raises at the first forward pass, since the listing never
# moves the network: `net.to(devices[0])` is missing. `meta` serves as the other device here.

# %% tags=["solution"] jupyter={"source_hidden": true}
def assert_on(net, device):
    for name, array in [*net.named_parameters(), *net.named_buffers()]:
        assert array.device == torch.device(device), (
            f"{name} is on {array.device}, not {device}: call net.to({device!r}) first")


assert_on(net, "cpu")
parted = copy.deepcopy(net)
parted[1].to("meta")
try:
    assert_on(parted, "cpu")
except AssertionError as error:
    assert "1.weight is on meta" in str(error)
else:
    raise AssertionError("should have been found")

# %% [markdown]
# **Solution 4.** Without waiting, the timer measures how long it takes to queue the last steps'
# work. Wait before each reading; without an accelerator there is nothing to wait for.

# %% tags=["solution"] jupyter={"source_hidden": true}
class Timer:
    def __enter__(self):
        self.start = self.now()
        return self

    def __exit__(self, *error):
        self.seconds = self.now() - self.start

    @staticmethod
    def now():
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter()


with Timer() as timer:
    x256.flatten(1) @ x256.flatten(1).T
assert timer.seconds > 0
