# %% [markdown]
# # 13 · The same in PyTorch
#
# Apache MXNet was retired to the Apache Attic in 2023: no more releases. What you have learned with
# it hasn't retired. Devices, shards, all-reduce, replicas that must stay equal: every framework has
# them, under other names. This chapter carries the course over to PyTorch and lets the two
# frameworks check each other.
#
# ## What you'll do
#
# Put MXNet and PyTorch side by side, row by row, in cells that run. Build LeNet and ResNet-18 a
# second time, copy the weights over, and compare losses, gradients and steps. Then rebuild
# `nn.DataParallel` from its four parts.
#
# ## What you'll learn
#
# - which name in PyTorch stands for which in MXNet, and where the two are *not* the same;
# - how one framework becomes the oracle for another, and how far apart float32 may leave them;
# - what `DataParallel` does in each step, and why it was replaced.
#
# ## What you need
#
# Chapters 04 to 09, no GPU, and PyTorch, which all chapters before this one do without. If the next
# cell can't find it, run `make setup TORCH=1` in a terminal and restart the kernel. Reading takes
# {reading time}, running one to two on two cores.

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
# Each row is two short pieces of code, MXNet's first, and an assertion where they agree. What needs
# several processes is in chapter 14.
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


# %% [markdown]
# The same in PyTorch:

# %% tags=["trains"]
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

# %% tags=["trains"]
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

# %% tags=["trains"]
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
from helpers.plotting import BLUE, ORANGE, figure, show

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
# `backward`. What do two threads bring, then? The network itself on 256 images, and the rebuilt
# `DataParallel` on two replicas, taking turns four times; the first turn is a warm-up.

# %%
class Threaded(nn.Module):
    def __init__(self, net, k):
        super().__init__()
        self.net, self.k = net, k

    def forward(self, x):
        return data_parallel(self.net, x, self.k)


def seconds(model, x, y, steps=2):
    begin = time.perf_counter()
    for _ in range(steps):
        torch_step(model, x, y, 0.05)
    return time.perf_counter() - begin


# %% [markdown]
# Images per second, by their medians:

# %% tags=["measured"]
torch.set_num_threads(1)
x256, y256 = images[:256].astype("float32"), labels[:256]
models = lenet(), Threaded(lenet(), 2)
turns = [[2 * 256 / seconds(model, x256, y256) for model in models] for _ in range(4)]
print("one thread {:,.0f} images/s, two replicas with a thread each {:,.0f}".format(
    *np.median(turns[1:], axis=0)))

# %% [markdown]
# Two threads have the forward pass only, and the replicas are made anew for each step. Chapter 14
# takes the other way: a process for each device.
#
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
#
# - The same weights and batch give the same loss, gradients and step in both, to $10^{-10}$ in
#   float64, for LeNet and for ResNet-18.
# - In float32 the two are not equal. Compare in float64.
# - `DataParallel` is replicate, scatter, apply, gather; its reduce is the backward pass of a copy.
#   On CPUs it passes through.
#
# Next, chapter 14: `DistributedDataParallel`, with a process for each device.
#
# **Further reading.** *Dive into Deep Learning*, Concise Implementation for Multiple GPUs.

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
# ### Answer 1
#
# The function as described, and a network as d2l makes it. `LazyConv2d` is a class
# of its own and becomes a `Conv2d` only in the first forward pass, so a comparison of types passes
# it over.

# %% tags=["solution"]
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

# %% tags=["solution"]
torch.manual_seed(12)
lazy, reached = lazy_network(), []
lazy(torch.ones(1, 1, 28, 28))
before = lazy[1].weight.std().item()
lazy.apply(set_weights)
assert len(reached) == 3 and lazy[1].weight.std() < 0.012, "all layers, and small"
assert before > 3 * 0.01, "what the published initialisation left in place"

# %% [markdown]
# ### Answer 2
#
# Everything but the weights of convolutions and linear layers: their biases,
# BatchNorm's scale and shift, and its running statistics. Every layer of PyTorch has a
# `reset_parameters`.

# %% tags=["solution"]
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
# ### Answer 3
#
# On GPUs, `DataParallel` raises at the first forward pass, since the listing never
# moves the network: `net.to(devices[0])` is missing. `meta` serves as the other device here.

# %% tags=["solution"]
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
# ### Answer 4
#
# Without waiting, the timer measures how long it takes to queue the last steps'
# work. Wait before each reading; without an accelerator there is nothing to wait for.

# %% tags=["solution"]
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
    torch.tensor(x256).flatten(1) @ torch.tensor(x256).flatten(1).T
assert timer.seconds > 0
