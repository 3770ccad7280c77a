# %% [markdown]
# # 13 · The same in PyTorch
#
# Apache MXNet was retired in 2023. PyTorch has devices, shards and replicas too. Most words
# translate. Some look the same and mean something else.
#
# > **What you'll do:** train LeNet in both from the same weights. Rebuild PyTorch's
# > `nn.DataParallel`.
# >
# > **What you'll learn:** which word in PyTorch stands for which in MXNet, and where the meaning
# > differs; how one framework checks the other; what `DataParallel` does in each step.
# >
# > **What you need:** chapters 04 to 07, and PyTorch, which `make setup TORCH=1` installs. No GPU.
# > Reading takes {reading time}, running half a minute.
#
# `nd`, `gluon` and `gluon_lenet` are MXNet's; `nn`, `F` and, from here on, `lenet` are PyTorch's.

# %% tags=["torch"]
from helpers import load_data
from helpers.compare import largest_difference
from helpers.networks import lenet as gluon_lenet

import mxnet as mx
import numpy as np
import torch
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn
from torch.func import functional_call

torch.set_num_threads(1)  # PyTorch may use one core
pair = [mx.cpu(0), mx.cpu(1)]
four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]

# %% [markdown]
# ## The dictionary
#
# Which words don't mean the same?
#
# ### Device
#
# MXNet's *context* is PyTorch's *device*. **Predict:** on which device is a tensor made with
# `device="cpu:1"`?

# %%
a = nd.ones((2, 3), ctx=mx.cpu(1))
b = torch.ones((2, 3), device="cpu:1")
print("MXNet:  ", a.context)
print("PyTorch:", b.device)

# %% [markdown]
# PyTorch drops the number: its CPU is *one* device. So in this chapter MXNet trains on two devices,
# and PyTorch on one.
#
# To move an array, `as_in_context` becomes `to`. Neither copies an array that is there already.

# %% tags=["fold"]
# check: both return the array itself on its own device; PyTorch refuses to mix devices
b = torch.zeros(3)
moved = b.to("cpu")
cloned = b.clone()
moved[0] = 7  # writes into b too
a = nd.zeros(3, ctx=mx.cpu(1))
assert a.as_in_context(mx.cpu(1)) is a and a.as_in_context(mx.cpu(0)) is not a
assert b.to("cpu") is b and b.clone() is not b
assert b.to("meta") is not b, "`meta` is a device without memory: it knows shapes only"
assert b[0] == 7 and cloned[0] == 0
try:
    nn.Linear(3, 2)(torch.ones(1, 3, device="meta"))
except RuntimeError:
    pass
else:
    raise AssertionError("weights and data on two devices should be refused")

# %% [markdown]
# ### Splitting a batch
#
# `even_split=False` lets Gluon cut ten examples for four devices. PyTorch's `DataParallel` cuts by
# `chunk`. **Predict:** which sizes does that make of ten examples, and of five?

# %%
shards = gluon.utils.split_and_load(nd.arange(10), four, even_split=False)
print("split_and_load, 10:", [len(shard) for shard in shards])
print("chunk, 10:         ", [len(shard) for shard in torch.arange(10).chunk(4)])
print("chunk, 5:          ", [len(shard) for shard in torch.arange(5).chunk(4)])

# %% [markdown]
# `chunk` rounds the size up, and cuts until nothing is left. Of five examples the fourth device
# gets none. PyTorch's `tensor_split` cuts as Gluon does.

# %% tags=["fold"]
# check: tensor_split has Gluon's shards; Gluon refuses uneven ones by default, and too few examples
for n, even_split in [(10, True), (3, False)]:
    try:
        gluon.utils.split_and_load(nd.arange(n), four, even_split=even_split)
    except (ValueError, mx.base.MXNetError):
        pass
    else:
        raise AssertionError("it should refuse")
assert [len(shard) for shard in torch.arange(3).tensor_split(4)] == [1, 1, 1, 0]
for n in range(4, 30):
    shards = gluon.utils.split_and_load(nd.arange(n), four, even_split=False)
    for shard, twin in zip(shards, torch.arange(n).tensor_split(4), strict=True):
        assert shard.asnumpy().tolist() == twin.tolist()

# %% [markdown]
# ### Gradients
#
# $3^2$ has the gradient 6. **Predict:** what is stored after *two* backward passes?

# %%
w_mxnet = nd.array([3.0])
w_mxnet.attach_grad()
w_torch = torch.tensor([3.0], requires_grad=True)
for _ in range(2):
    with autograd.record():
        loss_mxnet = w_mxnet * w_mxnet
    loss_mxnet.backward()
    loss_torch = w_torch * w_torch
    loss_torch.backward()
print("MXNet:  ", w_mxnet.grad.asscalar())
print("PyTorch:", w_torch.grad.item())

# %% [markdown]
# By default MXNet replaces the gradient. PyTorch adds to it, until `zero_grad()` clears it. PyTorch
# records without `record()`, unless `torch.no_grad()` forbids it.
#
# ### Loss
#
# Both compute the same cross-entropy. What do they return for three examples?

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
scores = np.array([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
answers = np.array([0, 1, 0])
losses = cross_entropy(nd.array(scores), nd.array(answers))
loss = F.cross_entropy(torch.tensor(scores), torch.tensor(answers))
print("Gluon:  ", losses.asnumpy().round(3))
print("PyTorch:", round(loss.item(), 3))

# %% [markdown]
# Gluon returns one number per example, PyTorch their mean. That decides who divides by the batch
# size: in Gluon `trainer.step(batch_size)`, in PyTorch the loss.

# %% tags=["fold"]
# check: PyTorch's loss is the mean of Gluon's, and without reduction it is Gluon's, to 1e-12
scores = np.random.RandomState(12).randn(8, 10)
answers = np.arange(8)
losses = cross_entropy(nd.array(scores, dtype="float64"), nd.array(answers)).asnumpy()
given = torch.tensor(scores), torch.tensor(answers)
assert losses.shape == (8,) and abs(F.cross_entropy(*given).item() - losses.mean()) < 1e-12
assert largest_difference(F.cross_entropy(*given, reduction="none"), losses) < 1e-12
w = nd.array([3.0])
w.attach_grad(grad_req="add")
for _ in range(2):
    with autograd.record():
        loss = w * w
    loss.backward()
assert w.grad.asscalar() == 12, "MXNet adds too, if told so"

# %% [markdown]
# ### Momentum
#
# SGD with momentum $m$ keeps a *velocity* $v$ for each weight $w$. With gradient $g$ and learning
# rate $\eta$, one step is:
#
# - MXNet: $v \leftarrow m v + \eta g$, then $w \leftarrow w - v$. The rate goes into the velocity.
# - PyTorch: $v \leftarrow m v + g$, then $w \leftarrow w - \eta v$. The rate comes afterwards.
#
# We take three steps from $w = 1$, with $m = 0.5$ and $g = 1$. **Predict:** do they agree if
# $\eta = 0.125$ in all of them? And if it is halved for the last?

# %% tags=["fold", "trains"]
# check: a table of three steps by these rules; both libraries follow them exactly
def mxnet_rule(rates, decay=0.0):
    w = 1.0
    v = 0.0
    velocities = []
    weights = []
    for rate in rates:
        v = 0.5 * v + rate * (1 + decay * w)  # the rate goes into the velocity
        w = w - v
        velocities.append(v)
        weights.append(w)
    return velocities, weights


def torch_rule(rates, decay=0.0):
    w = 1.0
    v = 0.0
    velocities = []
    weights = []
    for rate in rates:
        v = 0.5 * v + (1 + decay * w)
        w = w - rate * v  # the rate is applied afterwards
        velocities.append(v)
        weights.append(w)
    return velocities, weights


def by_mxnet(rates, decay):
    w = gluon.Parameter("w", shape=(1,), dtype="float64")
    w.initialize(mx.init.One())
    trainer = gluon.Trainer([w], "sgd", {"momentum": 0.5, "wd": decay})
    weights = []
    for rate in rates:
        with autograd.record():
            loss = w.data() * 1
        loss.backward()
        trainer.set_learning_rate(rate)
        trainer.step(1)
        weights.append(w.data().asscalar())
    return weights


def by_torch(rates, decay):
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5, weight_decay=decay)
    weights = []
    for rate in rates:
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        weights.append(w.item())
    return weights


constant = [0.125, 0.125, 0.125]
halved = [0.125, 0.125, 0.0625]
print(f"{'':21}MXNet{'':16}PyTorch")
print(f"{'':21}{'v':9}{'w':12}{'v':9}w")
for rates in [constant, halved]:
    our_velocities, our_weights = mxnet_rule(rates)
    their_velocities, their_weights = torch_rule(rates)
    for place, rate in enumerate(rates):
        if rates is halved and place < 2:
            continue  # these two steps are in the table already
        print(f"step {place + 1}, rate {rate:<6}  {our_velocities[place]:<8} "
              f"{our_weights[place]:<11} {their_velocities[place]:<8} {their_weights[place]}")
    for decay in [0.0, 0.25]:
        assert by_mxnet(rates, decay) == mxnet_rule(rates, decay)[1]
        assert by_torch(rates, decay) == torch_rule(rates, decay)[1]
assert mxnet_rule(constant)[1] == torch_rule(constant)[1]
assert mxnet_rule(halved)[1][-1] < torch_rule(halved)[1][-1] - 0.03
for ours, theirs in zip(mxnet_rule(constant)[0], torch_rule(constant)[0], strict=True):
    assert ours == 0.125 * theirs

# %% [markdown]
# With a constant rate, MXNet's velocity is $\eta$ times PyTorch's, and the weights agree. In the
# last row PyTorch halves the whole step. MXNet halves only what is new in $v$: earlier gradients
# keep their old rate. So a schedule of rates trains differently in the two.
#
# ### Waiting
#
# MXNet puts an operator into a queue and returns (chapter 01). And PyTorch, on a CPU? We time a
# matrix product: the call, then a look at its result.

# %% tags=["fold", "measured"]
# measure: which share of the time the call takes
import time

big = nd.random.uniform(shape=(1000, 1000))
twin = torch.tensor(big.asnumpy())
shares = {}
for name, multiply, look in [("MXNet", lambda: nd.dot(big, big), lambda c: c[0, 0].asscalar()),
                             ("PyTorch", lambda: twin @ twin, lambda c: c[0, 0].item())]:
    look(multiply())  # warms up
    found = []
    for _ in range(5):
        begin = time.perf_counter()
        product = multiply()
        asked = time.perf_counter()
        look(product)
        found.append((asked - begin) / (time.perf_counter() - begin))
    shares[name] = np.median(found)
    print(f"{name:7} the call takes {shares[name]:.0%} of the time, median of 5")
assert shares["MXNet"] < 0.5 < shares["PyTorch"], "MXNet hands the work out, PyTorch does it"
if not torch.accelerator.is_available():
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        pass
    else:
        raise AssertionError("synchronize should raise where there is no accelerator")

# %% [markdown]
# On a CPU, PyTorch computes before the call returns. **On GPUs** it queues, too: to multiply two
# matrices of 8,000 × 8,000 float32 numbers on an H200 (PyTorch 2.11), the call took 1 % of the
# time. `torch.accelerator.synchronize()` waits for one GPU (PyTorch's documentation).
#
# ### All in one picture
#
# ![A dictionary of six rows. The same in both: to move, as_in_context and to. Not the same: a
# second device, mx.cpu(1), where cpu:1 is cpu; ten rows cut for four devices, 3 3 2 2 and 3 3 3 1;
# a second backward replaces the gradient or adds to it; the loss is one number per image or their
# mean; in SGD with momentum the rate is in the velocity, or applied
# afterwards.](src/drawings/dictionary.svg)
#
# And more words:
#
# | MXNet | PyTorch |
# |---|---|
# | `gluon.Trainer`, `wd` | an optimizer, `weight_decay` |
# | `hybridize()` | `torch.compile` |
# | `record()` sets training mode | `train()`, `eval()` |
# | BatchNorm's `momentum=0.9`: the share kept | `momentum=0.1`: the share new |
#
# Running variances differ, too (deeper: ResNet twice, and why float32 disagrees).

# %% tags=["fold"]
# check: both networks are traced once into a graph; training modes; BatchNorm's 0.9 and 0.1
dense = gluon.nn.Dense(2, in_units=3)
dense.initialize()
dense.hybridize()
assert dense._cached_graph == ()
before = dense(nd.ones((1, 3))).asnumpy()
assert len(dense._cached_graph) == 2, "its inputs and its output, as symbols"
calls = []


def note_graph(graph, inputs):  # in place of a compiler
    calls.append(graph)
    return graph.forward


linear = nn.Linear(3, 2)
with torch.no_grad():
    compiled = torch.compile(linear, backend=note_graph)
    for _ in range(2):
        assert torch.equal(compiled(torch.ones(1, 3)), linear(torch.ones(1, 3)))
assert len(calls) == 1, "one graph for two calls"
with autograd.record():
    assert autograd.is_training()
assert not autograd.is_training() and linear.training and not linear.eval().training
numbers = np.array([[1.0], [3.0]], "float32")
norm = gluon.nn.BatchNorm(in_channels=1)
norm.initialize()
with autograd.record():
    out = norm(nd.array(numbers))
out.backward()
twin = nn.BatchNorm1d(1)
twin(torch.tensor(numbers))
assert norm._kwargs["momentum"] == 0.9 and twin.momentum == 0.1
for running_mean in [norm.running_mean.data().asscalar(), twin.running_mean.item()]:
    assert abs(running_mean - (0.9 * 0 + 0.1 * 2)) < 1e-6

# %% [markdown]
# **Keep:** a loop translated word by word runs. Ask what adds up, what is a mean, and where the
# rate goes.
#
# ## LeNet twice
#
# Do both compute the same numbers? Then each checks the other's loop. PyTorch's layers are told
# their input size: `nn.Conv2d(1, 20, 3)` makes 20 channels of 1, with 3×3 kernels.

# %%
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3),  # 28 x 28 pixels become 26 x 26
        nn.ReLU(),
        nn.MaxPool2d(2),  # 13 x 13
        nn.Conv2d(20, 50, 5),  # 9 x 9
        nn.ReLU(),
        nn.MaxPool2d(2),  # 4 x 4
        nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10))


theirs = lenet().double()  # float64

# %% [markdown]
# Gluon's, `ours`, is chapter 06's LeNet, in float64, on two devices:

# %%
def start_gluon(devices):
    mx.random.seed(12)
    net = gluon_lenet()
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0]))  # makes the weights now, on all devices
    net.cast("float64")
    return net


ours = start_gluon(pair)

# %% [markdown]
# Do the parameters match?

# %% tags=["fold"]
# check: Gluon's LeNet and PyTorch's list parameters of the same shapes in the same order
for parameter, twin in zip(ours.collect_params().values(), theirs.parameters(), strict=True):
    print("Gluon:", parameter.shape, " PyTorch:", tuple(twin.shape))
    assert parameter.shape == tuple(twin.shape)

# %% [markdown]
# So weights can be copied one after the other:

# %%
def copy_weights(source, target):
    parameters = source.collect_params().values()
    for parameter, twin in zip(parameters, target.parameters()):
        values = parameter.data(mx.cpu(0)).asnumpy()
        with torch.no_grad():  # a copy, not a computation to record
            twin.copy_(torch.tensor(values))


copy_weights(ours, theirs)

# %% [markdown]
# Ten batches of 64 images, in float64:

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = data.train_images.astype("float64").reshape((10, 64, 1, 28, 28))
labels = data.train_labels.reshape((10, 64))
batches = list(zip(images, labels))

# %% tags=["fold"]
# check: the same weights, bit for bit, and the same scores, to 1e-12
for parameter, twin in zip(ours.collect_params().values(), theirs.parameters(), strict=True):
    for device in pair:
        assert np.array_equal(parameter.data(device).asnumpy(), twin.detach().numpy())
x, y = batches[0]
our_scores = ours(nd.array(x, ctx=pair[0], dtype="float64"))
their_scores = theirs(torch.tensor(x))
assert our_scores.dtype == np.float64 and largest_difference(their_scores, our_scores) < 1e-12

# %% [markdown]
# ### Five steps
#
# A step in Gluon, on two devices, as in chapter 06. (`cross_entropy` is Gluon's: a loss for each
# image.)

# %% tags=["trains"]
def gluon_step(net, trainer, x, y):
    x_shards = gluon.utils.split_and_load(nd.array(x, dtype="float64"), pair)
    y_shards = gluon.utils.split_and_load(nd.array(y), pair)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    trainer.step(len(x))
    total = sum(loss.sum().asscalar() for loss in losses)
    return total / len(x)

# %% [markdown]
# And in PyTorch, on one:

# %% tags=["trains"]
def torch_step(net, optimizer, x, y):
    loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

# %% [markdown]
# After five steps we compare PyTorch's weights with those on *each* Gluon device.
# `largest_difference` compares two arrays, or two lists of them. It returns the largest difference
# between corresponding numbers, divided by the largest number in PyTorch's array. One rounding in
# float64 is about $10^{-16}$.

# %% tags=["trains", "measured"]
def weights_on(net, device):
    return [parameter.data(device) for parameter in net.collect_params().values()]


trainer = gluon.Trainer(ours.collect_params(), "sgd", {"learning_rate": 0.125})
optimizer = torch.optim.SGD(theirs.parameters(), lr=0.125)
for x, y in batches[:5]:
    our_loss = gluon_step(ours, trainer, x, y)
    their_loss = torch_step(theirs, optimizer, x, y)
    print(f"loss in Gluon {our_loss:.12f}, in PyTorch {their_loss:.12f}")
for device in pair:
    difference = largest_difference(weights_on(ours, device), list(theirs.parameters()))
    print(f"weights on {device} and PyTorch's differ by {difference:.0e}")

# %% [markdown]
# Losses agree in all printed digits, and weights almost to the last. A wrong sum of gradients over
# Gluon's two devices would show here: PyTorch's one device has no such sum.
#
# Why a rate of 0.125? MXNet's update keeps its settings in float32, whatever type the weights have.
# There 0.1 is another number. Float32 holds 0.125 exactly. It also holds $1/64$, the factor that
# `step(64)` applies.

# %% tags=["fold", "trains"]
# check: losses, gradients, weights agree to 1e-10; with a rate of 0.1 or without a sum they don't
def fresh_twins(gluon_rate, torch_rate):
    ours = start_gluon(pair)
    theirs = lenet().double()
    copy_weights(ours, theirs)
    trainer = gluon.Trainer(ours.collect_params(), "sgd", {"learning_rate": gluon_rate},
                            update_on_kvstore=False)
    return ours, theirs, trainer, torch.optim.SGD(theirs.parameters(), lr=torch_rate)


ours, theirs, trainer, optimizer = fresh_twins(0.125, 0.125)
first = [weight.asnumpy() for weight in weights_on(ours, pair[0])]
for x, y in batches[:5]:
    our_loss = gluon_step(ours, trainer, x, y)
    their_loss = torch_step(theirs, optimizer, x, y)
    assert abs(our_loss - their_loss) < 1e-10 * their_loss, "the loss"
    gradients = [parameter.grad for parameter in theirs.parameters()]
    for device in pair:
        sums = [parameter.grad(device) / 64 for parameter in ours.collect_params().values()]
        assert largest_difference(sums, gradients) < 1e-10, "each gradient"
        found = weights_on(ours, device)
        assert largest_difference(found, list(theirs.parameters())) < 1e-10, "each weight"
assert largest_difference(weights_on(ours, pair[0]), first) > 1e-2, "steps that move nothing"
in_float32 = float(np.float32(0.1))
distances = {}
for rate in [0.1, in_float32]:
    ours, theirs, trainer, optimizer = fresh_twins(0.1, rate)
    gluon_step(ours, trainer, x, y)
    torch_step(theirs, optimizer, x, y)
    distances[rate] = largest_difference(weights_on(ours, pair[0]), list(theirs.parameters()))
print("0.1 in MXNet's update:", in_float32)
assert distances[in_float32] < 1e-13 and distances[0.1] > 1e-10
ours, theirs, trainer, optimizer = fresh_twins(0.125, 0.125)
trainer = gluon.Trainer(ours.collect_params(), "sgd", {"learning_rate": 0.125}, kvstore=None)
for x, y in batches[:5]:
    gluon_step(ours, trainer, x, y)  # each device with its own gradients: no sum
    torch_step(theirs, optimizer, x, y)
for device in pair:
    assert largest_difference(weights_on(ours, device), list(theirs.parameters())) > 1e-2

# %% [markdown]
# **Keep:** compare two implementations in float64, from the same weights, with numbers that are
# exact in both. In float32 LeNets differ about a billion times as much (deeper: ResNet twice, and
# why float32 disagrees).
#
# ## DataParallel, rebuilt
#
# PyTorch's `nn.DataParallel(net)` computes a batch on several GPUs. What does it do in each forward
# pass?
#
# ![One forward pass of DataParallel. 1: a batch of ten images is scattered into shards of 4, 4
# and 2. 2: the network is replicated, once for each shard. 3: the three replicas are applied to
# their shards in parallel. 4: ten scores are gathered. On the way back the gradients of the
# replicas add up in the network.](src/drawings/data_parallel.svg)
#
# We build the pieces for LeNet and ten images. *Scatter* is `chunk`:

# %%
torch.manual_seed(13)
net = lenet().double()
x = torch.randn((10, 1, 28, 28), dtype=torch.float64)  # noise will do as images
y = torch.arange(10)


def scatter(x, k):
    return x.chunk(k)


shards = scatter(x, 3)
print("images:", [len(shard) for shard in shards])

# %% [markdown]
# ### Replicate
#
# Each shard needs a replica of the network, and autograd records the copying. First, one weight.
# Its three copies get the factors 1, 10 and 100. **Predict:** what is the gradient of the original?

# %%
w = torch.tensor(2.0, requires_grad=True)
copies = [w.clone() for _ in range(3)]
result = 1 * copies[0] + 10 * copies[1] + 100 * copies[2]
result.backward()
print(w.grad.item())

# %% [markdown]
# The gradients of the copies *add up* in the original. So the all-reduce is in two halves: a reduce
# in the backward pass, and a broadcast, the copying, in the next forward pass. A replica of a
# network is a copy of each parameter, by name:

# %%
def replicate(net, k):
    replicas = []
    for _ in range(k):
        replica = {name: parameter.clone() for name, parameter in net.named_parameters()}
        replicas.append(replica)
    return replicas


replicas = replicate(net, 3)
print(len(replicas), "replicas of", len(replicas[0]), "arrays")

# %% [markdown]
# PyTorch's first replica shares the network's memory: it is on the same device (docstring of
# `nn.DataParallel`; so it was on an H200 that we named twice). Ours are all copies, which is
# simpler. (LeNet has no *buffers*, as PyTorch calls running statistics: with BatchNorm each of our
# replicas would write into the network's own.)
#
# ### Apply, and gather
#
# `functional_call(net, replica, shard)` is `net(shard)` with the parameters in `replica`. We call
# one replica after the other. *Gather* puts the scores together.

# %%
def apply_each(net, replicas, shards):
    outputs = []
    for replica, shard in zip(replicas, shards):
        outputs.append(functional_call(net, replica, shard))
    return outputs


def gather(outputs):
    return torch.cat(outputs)


outputs = apply_each(net, replicas, shards)
print("scores:  ", [tuple(output.shape) for output in outputs])
print("gathered:", tuple(gather(outputs).shape))

# %% [markdown]
# PyTorch makes these calls in *threads*, so that no device waits until Python has queued the work
# of the others. That changes no number.
#
# ### All four
#
# A whole forward pass:

# %%
def parallel_forward(net, x, k):
    shards = scatter(x, k)
    replicas = replicate(net, len(shards))
    outputs = apply_each(net, replicas, shards)
    return gather(outputs)

# %% [markdown]
# It must give the scores *and the gradients* that the network has alone. The loss is the mean over
# all ten gathered scores, so the smaller shard needs no correction.

# %%
def gradients_from(net, scores, y):
    net.zero_grad()
    F.cross_entropy(scores, y).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


whole_scores = net(x)
whole_gradients = gradients_from(net, whole_scores, y)
scores = parallel_forward(net, x, 3)
gradients = gradients_from(net, scores, y)
print("the same scores:   ", largest_difference(scores, whole_scores) < 1e-12)
print("the same gradients:", largest_difference(gradients, whole_gradients) < 1e-12)

# %% [markdown]
# Is that what PyTorch does? Its own pieces need GPUs, but its `nn.DataParallel.forward` doesn't. We
# give that our pieces, in threads. It calls them in our order, and the numbers are the same. (That
# its own pieces do what ours do, we have read, not run.)

# %% tags=["fold"]
# check: nn.DataParallel's own forward, with our pieces, equals the network to 1e-12
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial


def parallel_apply(net, replicas, shards):
    modules = [copy.deepcopy(net) for _ in shards]
    with ThreadPoolExecutor(len(shards)) as threads:
        outputs = threads.map(functional_call, modules, replicas, shards)
    return list(outputs)


class Theirs(nn.DataParallel):  # PyTorch's class and its forward(), with our pieces
    def __init__(self, net, k):
        nn.Module.__init__(self)
        self.module = net
        self.device_ids = list(range(k))
        self.output_device = 0
        self.src_device_obj = torch.device("cpu")
        self.called = []

    def scatter(self, inputs, kwargs, device_ids):
        assert not kwargs and len(inputs) == 1
        self.called.append("scatter")
        shards = scatter(inputs[0], len(device_ids))
        return shards, [{}] * len(shards)

    def replicate(self, module, device_ids):
        self.called.append("replicate")
        return replicate(module, len(device_ids))

    def parallel_apply(self, replicas, shards, kwargs):
        self.called.append("parallel_apply")
        return parallel_apply(self.module, replicas, shards)

    def gather(self, outputs, output_device):
        self.called.append("gather")
        return gather(outputs)


def check_threads():
    seen = []
    barrier = threading.Barrier(4)

    def wait_for_all(module, inputs):
        seen.append(len(inputs[0]))
        barrier.wait(timeout=10)  # raises unless four threads get here

    hook = net.register_forward_pre_hook(wait_for_all)
    Theirs(net, 4)(x)
    hook.remove()
    assert sorted(seen) == [1, 3, 3, 3], "by chunk"


check_threads()
for k in [2, 3, 4]:
    model = Theirs(net, k)
    for forward in [model, partial(parallel_forward, net, k=k)]:
        scores = forward(x)
        gradients = gradients_from(net, scores, y)
        assert largest_difference(scores, whole_scores) < 1e-12, f"{k} replicas"
        assert largest_difference(gradients, whole_gradients) < 1e-12, f"{k} replicas"
print("called:", ", ".join(model.called))
assert model.called == ["scatter", "replicate", "parallel_apply", "gather"]
assert len(scatter(x[:5], 4)) == 3 and len(parallel_forward(net, x[:5], 4)) == 5, "one is left out"
with_norm = nn.Sequential(nn.BatchNorm2d(1)).double()
parallel_forward(with_norm, x, 3)
assert not list(net.buffers()) and with_norm[0].num_batches_tracked == 3, "written three times"
wrapped = nn.DataParallel(lenet())
assert list(wrapped.state_dict()) == [f"module.{name}" for name in lenet().state_dict()]

# %% [markdown]
# ### Would it see a mistake?
#
# Two wrong versions, each with one piece changed:

# %%
def forgets_a_replica(net, x, k):
    shards = scatter(x, k)
    replicas = replicate(net, len(shards))
    for name, parameter in net.named_parameters():
        replicas[0][name] = parameter.detach()  # its gradient doesn't come back
    return gather(apply_each(net, replicas, shards))


def gathers_backwards(net, x, k):
    shards = scatter(x, k)
    outputs = apply_each(net, replicate(net, len(shards)), shards)
    outputs.reverse()  # the last shard first
    return gather(outputs)

# %% [markdown]
# **Predict:** which has right scores, and which right gradients?

# %%
for version in [forgets_a_replica, gathers_backwards]:
    scores = version(net, x, 3)
    gradients = gradients_from(net, scores, y)
    print(version.__name__)
    print("    the same scores:   ", largest_difference(scores, whole_scores) < 1e-12)
    print("    the same gradients:", largest_difference(gradients, whole_gradients) < 1e-12)

# %% [markdown]
# With a forgotten replica the scores are right: only gradients show the mistake. Gathered
# backwards, each score meets another image's label, so its gradients are wrong, too.
#
# Even the gradients can't tell us whether the replicas are copies at all. A third version, in the
# next cell, uses the network itself three times, and still gets the right numbers. On GPUs it would
# fail: images on the second need weights there. So we count arrays at different addresses:

# %% tags=["fold"]
# check: three replicas have arrays of their own; each mistake is seen
def makes_no_copies(net, x, k):
    shards = scatter(x, k)
    own = dict(net.named_parameters())
    replicas = [own for _ in shards]  # the network's parameters themselves
    return gather(apply_each(net, replicas, shards))


def copies_all_but_the_first(net, x, k):  # as PyTorch on GPUs
    shards = scatter(x, k)
    replicas = replicate(net, len(shards))
    for name, parameter in net.named_parameters():
        replicas[0][name] = parameter.view_as(parameter)  # the same memory
    return gather(apply_each(net, replicas, shards))


def takes_the_mean(net, x, k):  # of the replicas' gradients, not their sum
    shards = scatter(x, k)
    replicas = replicate(net, len(shards))
    for replica in replicas:
        for array in replica.values():
            array.register_hook(lambda gradient: gradient / k)
    return gather(apply_each(net, replicas, shards))


def addresses(replicas):
    found = set()
    for replica in replicas:
        for array in replica.values():
            found.add(array.data_ptr())  # where in memory the array begins
    return found


def replicas_used_by(version):
    used = []

    def note(module, inputs):
        used.append({name: array.detach() for name, array in module.named_parameters()})

    hook = net.register_forward_pre_hook(note)
    version(net, x, 3)
    hook.remove()
    return used


def distances_of(version):
    scores = version(net, x, 3)
    gradients = gradients_from(net, scores, y)
    return (float(largest_difference(scores, whole_scores)),
            float(largest_difference(gradients, whole_gradients)))


for version in [parallel_forward, makes_no_copies]:
    found = addresses(replicas_used_by(version))
    print(f"{version.__name__:16} {len(found)} arrays in 3 replicas of 8")
for version in [forgets_a_replica, takes_the_mean]:
    in_scores, in_gradients = distances_of(version)
    assert in_scores < 1e-12 and in_gradients > 1e-2, version
assert min(distances_of(gathers_backwards)) > 1e-2
for version in [parallel_forward, copies_all_but_the_first, makes_no_copies]:
    assert max(distances_of(version)) < 1e-12, version
own = addresses([dict(net.named_parameters())])
assert len(own) == 8 and addresses(replicas_used_by(makes_no_copies)) == own
for version, shared in [(parallel_forward, set()), (copies_all_but_the_first, own)]:
    found = addresses(replicas_used_by(version))
    assert len(found) == 24 and found & own == shared, version

# %% [markdown]
# ## What it costs
#
# PyTorch recommends `DistributedDataParallel` (DDP) instead, even on one machine (docstring of
# `nn.DataParallel`). Why? Three costs are in the design:
#
# 1. It copies the network to all *other* devices in each forward pass. DDP sends the parameters
#    once, at the start.
# 2. It gathers on one device, which computes the loss, holds the sums of gradients, and updates all
#    weights. The others wait.
# 3. Its threads share one interpreter: one at a time runs Python. Only operators overlap.
#
# More in deeper: What DataParallel costs, and a listing that uses it. When you save: in its
# `state_dict` each name begins with `module.`
#
# **Keep:** `DataParallel` is scatter, replicate, parallel apply, gather. The gradients of the
# replicas add up in the network.
#
# ## Summary
#
# - PyTorch adds gradients up, takes the mean of the loss, multiplies the velocity by the rate, and
#   has one CPU device.
# - LeNet in Gluon on two devices and in PyTorch on one agree for five steps, to $10^{-10}$ in
#   float64: losses, gradients and weights.
# - `DataParallel` copies the network in each forward pass. The replicas' gradients add up in the
#   original; right scores don't show that.
#
# Next, chapter 14: a process for each device, and `DistributedDataParallel`, written by you.

# %% [markdown]
# ## Exercises
#
# 1. **The loss in the replicas.** To gather less, let each replica compute its loss, and take the
#    mean of these losses, for ten images on four replicas. Why are the gradients wrong? Repair it.
# 2. **The clock.** On a GPU, what does a clock measure that is stopped right after the last step?
#    Write one that waits, and that works on a CPU too.
# 3. **A change of rate.** Write `set_rate(optimizer, rate)` for PyTorch's `SGD` and rates above 0,
#    so that it goes on as MXNet's would.

# %% [markdown]
# ### Answer 1
#
# `chunk` makes shards of 3, 3, 3 and 1, and the mean of their means isn't the batch's mean
# (chapter 12). Sums can be added, and are divided once.

# %% tags=["solution"]
def losses_in_replicas(net, x, y, k, reduction):
    x_shards = scatter(x, k)
    y_shards = scatter(y, k)
    replicas = replicate(net, len(x_shards))
    losses = []
    for replica, x_shard, y_shard in zip(replicas, x_shards, y_shards):
        scores = functional_call(net, replica, x_shard)
        losses.append(F.cross_entropy(scores, y_shard, reduction=reduction))
    return torch.stack(losses)


for reduction, divisor in [("mean", 4), ("sum", 10)]:
    net.zero_grad()
    losses = losses_in_replicas(net, x, y, 4, reduction)
    loss = losses.sum() / divisor
    loss.backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    difference = largest_difference(gradients, whole_gradients)
    print(f"{reduction:4} gradients differ by {difference:.3f}")
    if reduction == "sum":
        assert difference < 1e-12
    else:
        assert difference > 1e-2

# %% [markdown]
# ### Answer 2
#
# It measures how long Python took to queue all steps. Work that isn't done when the clock stops
# isn't counted. So wait for each device before each look at the clock.

# %% tags=["solution"]
def wait_for_devices():
    for device in range(torch.accelerator.device_count()):  # none on a CPU
        torch.accelerator.synchronize(device)


def seconds_of(work):
    wait_for_devices()
    begin = time.perf_counter()
    work()
    wait_for_devices()
    return time.perf_counter() - begin


seconds = seconds_of(lambda: time.sleep(0.01))
print(f"{seconds:.2f} s")
assert seconds >= 0.01

# %% [markdown]
# Does it wait for all of them? We give PyTorch two devices that only note the call, and a clock
# that notes when it is read:

# %% tags=["solution"]
from unittest import mock

log = []
readings = [3.0, 5.0]


def clock():
    log.append("clock")
    return readings[log.count("clock") - 1]


with (mock.patch("torch.accelerator.device_count", lambda: 2),
      mock.patch("torch.accelerator.synchronize", log.append),
      mock.patch("time.perf_counter", clock)):
    seconds = seconds_of(lambda: log.append("work"))
print(log, seconds)
assert log == [0, 1, "clock", "work", 0, 1, "clock"], "first wait, then look at the clock"
assert seconds == 2, "from 3 s to 5 s"

# %% [markdown]
# ### Answer 3
#
# MXNet's velocity is the rate times PyTorch's. At a change of rate MXNet's stays as it is, so
# PyTorch's must be multiplied by the old rate over the new one.

# %% tags=["solution", "trains"]
def set_rate(optimizer, rate):
    for settings in optimizer.param_groups:
        for parameter in settings["params"]:
            state = optimizer.state[parameter]
            if "momentum_buffer" in state:
                state["momentum_buffer"] *= settings["lr"] / rate
        settings["lr"] = rate


three = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(3)]
groups = [{"params": three[:2]}, {"params": three[2:]}]
optimizer = torch.optim.SGD(groups, lr=halved[0], momentum=0.5)
for rate in halved:
    set_rate(optimizer, rate)
    optimizer.zero_grad()
    torch.cat(three).sum().backward()
    optimizer.step()
_, weights = mxnet_rule(halved)
print([w.item() for w in three], "as MXNet's", weights[-1])
for w in three:
    assert w.item() == weights[-1]
