# %% [markdown]
# # Deeper · What DataParallel costs, and a listing that uses it
#
# Chapter 13 built `DataParallel` from its four pieces and named three costs of its design: copies
# in each forward pass, one device that gathers, one Python interpreter. Two things can be seen on a
# CPU: what the copies do to the order in which gradients become ready, and where threads help. And
# what does a well-known comparison of one GPU with two compare?
#
# > **What you'll do:** watch in which order gradients become ready. Time threads against a loop.
# > Then call a published function twice, and look at the weights that each training starts from.
# >
# > **What you'll learn:** why `DataParallel`'s sums can't overlap with the backward pass; where
# > threads help and where they don't; how one function can start from different weights in two
# > calls.
# >
# > **What you need:** chapter 13, PyTorch, and two cores that have nothing else to do. No GPU.
# > Reading takes {reading time}, running half a minute.

# %% tags=["torch"]
import copy
from concurrent.futures import ThreadPoolExecutor

from helpers import load_data
from helpers.compare import largest_difference
from helpers.timing import in_turns, spread
from helpers.torch_networks import Residual, lenet, resnet18

import mxnet as mx
import torch
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn
from torch.func import functional_call

torch.set_num_threads(1)  # one core is one device
torch.manual_seed(13)
ten = torch.randn((10, 1, 28, 28), dtype=torch.float64)  # noise will do as images
answers = torch.arange(10) % 3

# %% [markdown]
# The next cell has chapter 13's pieces, applied in threads, and a class that collects them.

# %% tags=["fold"]
# define: DataParallel from chapter 13's pieces
def scatter(x, k):
    return x.chunk(k)


def replicate(net, k):
    replicas = []
    for _ in range(k):
        replica = {name: parameter.clone() for name, parameter in net.named_parameters()}
        replicas.append(replica)
    return replicas


def parallel_apply(net, replicas, shards):
    modules = [copy.deepcopy(net) for _ in shards]
    with ThreadPoolExecutor(len(shards)) as threads:
        outputs = threads.map(functional_call, modules, replicas, shards)
    return list(outputs)


def gather(outputs):
    return torch.cat(outputs)


class DataParallel(nn.Module):
    def __init__(self, net, k):
        super().__init__()
        self.net = net
        self.k = k

    def replicate(self, k):
        return replicate(self.net, k)

    def gather(self, outputs):
        return gather(outputs)

    def forward(self, x):
        shards = scatter(x, self.k)
        replicas = self.replicate(len(shards))
        outputs = parallel_apply(self.net, replicas, shards)
        return self.gather(outputs)

# %% [markdown]
# ## Without a GPU
#
# What does PyTorch's own `nn.DataParallel` do if it is given two CPU "devices" and eight rows?
# **Predict:** how often does it call the network, and with how many rows?

# %% tags=["measured"]
linear = nn.Linear(28, 1)
calls = []
linear.register_forward_hook(lambda layer, inputs, output: calls.append(len(inputs[0])))
if not torch.accelerator.is_available():
    model = nn.DataParallel(linear, device_ids=["cpu", "cpu"])
    model(torch.ones(8, 28))
    print("rows in each call:", calls)
    assert calls == [8]

# %% [markdown]
# It calls the network once, as if the wrapper weren't there. So we go on with ours.
#
# ## When are gradients ready?
#
# Chapter 13 copied each parameter by a `clone` of its own. PyTorch copies *all* parameters by one
# recorded operation (`Broadcast` in `torch/nn/parallel/_functions.py`). In the same way:

# %%
class CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, *arrays):
        ctx.k = k
        copies = []
        for _ in range(k):
            for array in arrays:
                copies.append(array.clone())
        return tuple(copies)

    @staticmethod
    def backward(ctx, *gradients):  # one for each copy, in the order of `copies`
        n = len(gradients) // ctx.k
        sums = []
        for number in range(n):
            total = 0
            for rank in range(ctx.k):
                total = total + gradients[rank * n + number]
            sums.append(total)
        return None, *sums  # k has no gradient

# %% [markdown]
# With two arrays and three copies of each, the gradients of the copies must add up:

# %%
v = torch.tensor(1.0, requires_grad=True)
w = torch.tensor(1.0, requires_grad=True)
v0, w0, v1, w1, v2, w2 = CopyAll.apply(3, v, w)
result = (v0 + 10 * v1 + 100 * v2) + 2 * (w0 + 10 * w1 + 100 * w2)
result.backward()
print(v.grad.item(), w.grad.item())

# %%
class DataParallelCopyAll(DataParallel):
    def replicate(self, k):
        names = [name for name, _ in self.net.named_parameters()]
        copies = CopyAll.apply(k, *self.net.parameters())
        n = len(names)
        replicas = []
        for rank in range(k):
            begin = rank * n
            replicas.append(dict(zip(names, copies[begin : begin + n])))
        return replicas

# %% [markdown]
# Sums that are ready early can be sent while the pass goes on (chapter 14). So we note two events
# of a backward pass: the gradient of the network's *last* layer is ready, and the pass reaches its
# *first* layer, once in each replica. **Predict** which event comes last: in the network alone,
# with our copies, and with `CopyAll`.

# %%
def order_of_events(wrap):
    events = []
    net = lenet().double()
    last = net[9].weight
    last.register_post_accumulate_grad_hook(lambda _: events.append("last is ready"))
    net[0].register_full_backward_pre_hook(lambda *_: events.append("first begins"))
    x = ten.clone().requires_grad_()  # so that the first layer has something to do
    F.cross_entropy(wrap(net)(x), answers).backward()
    return events


alone = order_of_events(lambda net: net)
by_clone = order_of_events(lambda net: DataParallel(net, 2))
by_copy_all = order_of_events(lambda net: DataParallelCopyAll(net, 2))
print("comes last, network alone:", alone[-1])
print("comes last, clone:        ", by_clone[-1])
print("comes last, CopyAll:      ", by_copy_all[-1])

# %% tags=["fold"]
# check: so it is in five runs; both ways to copy give the network's gradients; one thread works
import threading


def gradients_of(net, model):
    net.zero_grad()
    F.cross_entropy(model(ten), answers).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


net = lenet().double()
whole = gradients_of(net, net)
for kind in [DataParallel, DataParallelCopyAll]:
    for k in [2, 3, 4]:
        assert largest_difference(gradients_of(net, kind(net, k)), whole) < 1e-12
assert v.grad == 111 and w.grad == 222
assert order_of_events(lambda net: net) == ["last is ready", "first begins"]
begins = "first begins"
assert sorted(by_clone) == sorted(by_copy_all) == [begins, begins, "last is ready"]
for _ in range(5):
    assert order_of_events(lambda net: DataParallel(net, 2))[-1] == begins
    assert order_of_events(lambda net: DataParallelCopyAll(net, 2))[-1] == "last is ready"
workers = set()
net[0].register_full_backward_pre_hook(lambda *_: workers.add(threading.current_thread()))
F.cross_entropy(DataParallel(net, 2)(ten.clone().requires_grad_()), answers).backward()
assert workers == {threading.main_thread()}, "on a CPU one thread does all backward passes"

# %% [markdown]
# With `CopyAll` the last layer's gradient is ready only after both replicas have begun with their
# first layer. The backward pass of one operation waits for the gradients of *all* its copies. So no
# sum can overlap with the backward pass. With a clone for each parameter it is ready before the
# second replica begins there. Chapter 14 makes use of such a head start.
#
# **On GPUs:** NCCL, where it is used, broadcasts the parameters and reduces the gradients onto the
# first device (`_broadcast_out_impl` in `torch/csrc/cuda/comm.cpp`; `reduce_add` in
# `torch/nn/parallel/comm.py`).
#
# ## Threads
#
# One thread at a time runs Python: it holds the interpreter's lock. As a rule PyTorch's
# operators compute without it. **Predict:** which gains from two threads, LeNet or 500 tiny layers?
#
# We time two forward passes, one after the other and in two threads. Then the network alone and in
# `DataParallel`. A quotient of 1.5 means that the first takes 1.5 times as long. It is the median
# of all rounds; the middle half is in brackets.

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 25=>ROUNDS = 5"]
# measure: two forward passes in turn and in threads; forward and a step, alone and in DataParallel
import time

ROUNDS = 25


def cpu_times(net, x):  # of this thread, and of the process
    own = time.thread_time()
    process = time.process_time()
    net(x)
    return time.thread_time() - own, time.process_time() - process


def share_of_own_thread():
    net = lenet()
    x = torch.rand(128, 1, 28, 28)
    net(x)
    total = torch.zeros(2)
    for _ in range(20):
        with ThreadPoolExecutor(1) as threads:  # a new thread each time, as below
            total += torch.tensor(threads.submit(cpu_times, net, x).result())
    return float(total[0] / total[1])


# `helpers` sets OMP_NUM_THREADS for new threads
assert share_of_own_thread() > 0.9, "a new thread takes more cores"


def both_ways(net, shard):
    modules = [net, copy.deepcopy(net)]
    shards = [shard, shard]

    def in_turn():
        for module, each in zip(modules, shards):
            module(each)

    def in_threads():
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda module, each: module(each), modules, shards))

    return in_turn, in_threads


def forward_of(model):
    x = torch.rand(256, 1, 28, 28)
    return lambda: model(x)


def step_of(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.rand(256, 1, 28, 28)
    y = torch.arange(256) % 10

    def step():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


tiny = nn.Sequential(*[nn.Linear(8, 8) for _ in range(500)])
measured = {
    "LeNet, forward, 128 images each": both_ways(lenet(), torch.rand(128, 1, 28, 28)),
    "500 tiny layers, forward": both_ways(tiny, torch.ones(4, 8)),
    "LeNet, forward, 256 images": (forward_of(lenet()), forward_of(DataParallel(lenet(), 2))),
    "LeNet, a step with 256 images": (step_of(lenet()), step_of(DataParallel(lenet(), 2))),
}
for name, (one, two) in measured.items():
    times = in_turns({"one": one, "two": two}, ROUNDS, wait=lambda: None)
    low, median, high = spread(times["one"] / times["two"])
    print(f"{name:32} {median:.2f} ({low:.2f} to {high:.2f})")

# %% [markdown]
# Where the middle half contains 1, no gain is larger than the noise. Where nobody else used the
# machine, threads helped LeNet, and slowed the tiny layers down. The interpreter's lock would
# explain the second, and so would the threads that each call starts; we have tested neither. Where
# a whole step gains less than the forward pass in the same wrapper (the last two lines), this may
# be why: on a CPU both backward passes run in the *one* thread that called `backward`. **On GPUs:**
# each device has a thread of its own (`torch.autograd.grad_mode.set_multithreading_enabled`,
# PyTorch's documentation).
#
# ## A function that is called twice
#
# *Dive into Deep Learning* compares one GPU with two (section "Concise Implementation for Multiple
# GPUs", the PyTorch tab). Its function `train` sets the weights of all modules of type `nn.Linear`
# or `nn.Conv2d` to normal numbers with a standard deviation of 0.01, wraps the network in
# `DataParallel`, and trains. It is called twice with the *same* ResNet-18: with one GPU and batch
# 256, then with two and batch 512.
#
# There the residual block is made of *lazy* layers (`Residual` in `d2l/torch.py`, 1.0.3). Like
# Gluon's, they learn their input size in the first forward pass:

# %%
class LazyResidual(Residual):
    def __init__(self, after, stride=1):
        nn.Module.__init__(self)
        self.conv1 = nn.LazyConv2d(after, 3, stride, padding=1)
        self.norm1 = nn.LazyBatchNorm2d()
        self.conv2 = nn.LazyConv2d(after, 3, padding=1)
        self.norm2 = nn.LazyBatchNorm2d()
        self.project = None
        if stride > 1:
            self.project = nn.LazyConv2d(after, 1, stride)
        self.activation = nn.ReLU()


block = LazyResidual(128, stride=2)
print("before:", type(block.conv1).__name__)
block(torch.zeros(8, 64, 28, 28))
print("after: ", type(block.conv1).__name__, tuple(block.conv1.weight.shape))

# %% [markdown]
# A lazy layer even changes its type. The whole network, and the listing's way to set its weights:

# %%
def lazy_resnet18():
    layers = [nn.Conv2d(1, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    for width, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers.append(LazyResidual(width, stride))
        layers.append(LazyResidual(width))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)


def set_weights(net):
    reached = 0
    for module in net.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.01)
            reached += 1
    return reached

# %% [markdown]
# On a CPU the wrapper passes through, so we leave it out. One step stands for the training. We keep
# the standard deviation of each layer's weights at its beginning.

# %%
def weights_in(net):
    return [m.weight for m in net.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]

# %% tags=["trains"]
def train_briefly(net, x, y):
    reached = set_weights(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loss = F.cross_entropy(net(x), y)
    spreads = [weight.std().item() for weight in weights_in(net)]  # no lazy layer is left now
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return reached, spreads

# %% [markdown]
# Sixteen images will do:

# %% tags=["measured"]
data = load_data("mnist", limit=16)
print(data)
images = torch.tensor(data.train_images - data.train_images.mean())
labels = torch.tensor(data.train_labels).long()

# %% [markdown]
# **Predict:** how many of the 21 layers with weights does the first call reach?

# %% tags=["trains"]
torch.manual_seed(13)
net = lazy_resnet18()
first_reached, first_spreads = train_briefly(net, images[:8], labels[:8])
second_reached, second_spreads = train_briefly(net, images, labels)
print("layers with weights:     ", len(weights_in(net)))
print("reached by the first call:", first_reached, " by the second:", second_reached)

# %% [markdown]
# In the first call a `LazyConv2d` isn't of type `nn.Conv2d` yet. So only the first convolution and
# the last layer are set. The other 19 keep PyTorch's default, a standard deviation of
# $1 / \sqrt{3n}$ for $n$ inputs. In the second call nothing is lazy any more, and all 21 are set:

# %% tags=["fold"]
# draw: what each layer starts from, in the first call and in the second
from helpers.plotting import curves, show

layers = range(1, 22)
lines = {"first call": (layers, first_spreads), "second call": (layers, second_spreads)}
others = sum(abs(a / b - 1) > 0.1 for a, b in zip(first_spreads, second_spreads))
fig, ax = curves(f"{others} of 21 layers start with another standard deviation in the first call",
                 "layer with weights, from input to output", "standard deviation at the start",
                 lines)
for line in ax.get_lines():
    line.set_linestyle("none")  # points only: nothing lies between two layers
ax.legend(frameon=False)
ax.set_xticks(range(1, 22, 2))
show(fig, alt="Standard deviation of the initial weights of 21 layers: in the second call 0.01 "
              "everywhere; in the first 0.01 in the first and the last layer, elsewhere 0.008 to "
              "0.07.")

# %% tags=["fold"]
# check: 2 layers in the first call, 21 in the second, the others as PyTorch makes them
assert (first_reached, second_reached, len(weights_in(net))) == (2, 21, 21)
for number, weight in enumerate(weights_in(net)):
    default = 1 / (3 * weight[0].numel()) ** 0.5
    assert abs(second_spreads[number] / 0.01 - 1) < 0.1
    if 0 < number < 20:
        assert abs(first_spreads[number] / default - 1) < 0.05
    else:
        assert abs(first_spreads[number] / 0.01 - 1) < 0.1
shapes = [parameter.shape for parameter in resnet18().parameters()]
assert [parameter.shape for parameter in net.parameters()] == shapes, "the same network, not lazy"

# %% [markdown]
# Biases and BatchNorm's arrays aren't set at all. What the first training left in them is what the
# second starts from. How many arrays is that?

# %%
before = copy.deepcopy(net.state_dict())
set_weights(net)
after = net.state_dict()
kept = [name for name in before if torch.equal(before[name], after[name])]
print(len(kept), "of", len(before), "arrays survive")

# %% [markdown]
# MXNet's version of the listing calls `initialize` with `force_reinit=True`, which resets them all.
#
# So the published comparison varies more than batch sizes and learning rates. The second run starts
# from other weights, and partly from trained values. Whether that helps or hurts we haven't tested.

# %% tags=["fold", "trains"]
# check: what survives was trained; MXNet's force_reinit resets biases and BatchNorm's arrays
for name in before:
    is_weight = name.endswith("weight") and before[name].dim() > 1
    assert (name in kept) != is_weight, name
assert not (before["1.weight"] == 1).all() and before["1.running_mean"].any(), "trained values"

small = gluon.nn.HybridSequential()
small.add(gluon.nn.Conv2D(4, 3), gluon.nn.BatchNorm(), gluon.nn.Dense(10))
small.initialize()
trainer = gluon.Trainer(small.collect_params(), "sgd", {"learning_rate": 0.1})
with autograd.record():
    scores = small(nd.array(data.train_images))
    loss = gluon.loss.SoftmaxCrossEntropyLoss()(scores, nd.array(data.train_labels))
loss.backward()
trainer.step(16)
begins = {"bias": 0, "beta": 0, "running_mean": 0, "gamma": 1, "running_var": 1}


def at_the_begin(net):
    found = {}  # by name: does an array that isn't a weight have its first value?
    for name, parameter in net.collect_params().items():
        for kind, value in begins.items():
            if name.endswith(kind):
                found[name] = (parameter.data().asnumpy() == value).all()
    return found


after_training = at_the_begin(small)
for name, is_reset in after_training.items():
    if "conv" in name:  # a bias before a norm: no gradient to speak of
        continue
    assert not is_reset, name
small.initialize(mx.init.Normal(0.01), force_reinit=True)
after_reset = at_the_begin(small)
assert len(after_reset) == len(after_training) == 6 and all(after_reset.values())

# %% [markdown]
# **On GPUs:** the listing never calls `net.to`. For one device, `DataParallel.__init__` moves the
# module there itself. For several it doesn't, and the forward pass raises unless the network is on
# the first (`data_parallel.py`, PyTorch 2.13). So the listing runs only because the one-GPU call
# comes first. With `net.to`, two GPUs first would still fail: lazy layers can't be replicated
# (`torch/nn/modules/lazy.py`).
#
# ## Summary
#
# - `DataParallel` copies all parameters by one operation, whose backward pass waits for all copies.
#   So no sum overlaps with the backward pass.
# - Threads share an interpreter. Where nobody else used the machine, they helped LeNet's forward
#   pass, and slowed tiny layers down.
# - A function that is called twice with one network can start from two different states: here 2 of
#   21 layers are set in the first call, all in the second, and other arrays keep trained values.
#
# **Further reading.** *Dive into Deep Learning*, Concise Implementation for Multiple GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **A fair comparison.** Write `fresh(net, seed)`, to be called at the beginning of `train`.
#    After it, a lazy network and one that has been trained are in the same state, bit for bit, with
#    all 21 weights normal with a standard deviation of 0.01.

# %% [markdown]
# ### Answer 1
#
# A forward pass first, so that no layer is lazy. In this network every module with parameters has
# `reset_parameters`, which also resets running statistics.

# %% tags=["solution"]
def fresh(net, seed):
    device = next(net.parameters()).device
    with torch.no_grad():
        net(torch.zeros((2, 1, 28, 28), device=device))
    torch.manual_seed(seed)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return set_weights(net)


new_one = lazy_resnet18()
assert fresh(new_one, 1) == 21
assert fresh(net, 1) == 21
for name, array in net.state_dict().items():
    assert torch.equal(array, new_one.state_dict()[name]), name
for weight in weights_in(net):
    assert abs(weight.std().item() - 0.01) < 0.002
fresh(new_one, 2)
for weight, other in zip(weights_in(net), weights_in(new_one)):
    assert not torch.equal(weight, other), "another seed, other weights"
print("the same state, whatever came before")
