# %% [markdown]
# # 13 · The same in PyTorch
#
# Apache MXNet was retired in 2023. PyTorch has devices, shards and replicas too. Most words
# translate, but some don't mean the same:
#
# ![A dictionary of six rows. The same in both: the device, ctx=mx.cpu(0) and device="cpu"; to
# move, as_in_context and to. Not the same: ten rows cut for four devices, 3 3 2 2 and 3 3 3 1; a
# second backward replaces the gradient or adds to it; the loss is one number an image or their
# mean; in SGD with momentum the velocity has the rate in it, or not.](src/drawings/dictionary.svg)
#
# ## What you'll do
#
# Run both side by side. Train LeNet in both from the same weights, and compare. Rebuild PyTorch's
# `nn.DataParallel` from its four pieces.
#
# ## What you'll learn
#
# - which word in PyTorch stands for which in MXNet, and where the meaning differs;
# - how one framework checks the other;
# - what `DataParallel` does in each step.
#
# ## What you need
#
# Chapters 04 to 07, and PyTorch, which `make setup TORCH=1` installs. No GPU. Reading takes
# {reading time}, running half a minute.
#
# `nd` and `gluon` are MXNet's; `nn` and `F` are PyTorch's.

# %% tags=["torch"]
import copy
from concurrent.futures import ThreadPoolExecutor

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

torch.set_num_threads(1)  # one core is one device
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
# PyTorch drops the number: its CPU is *one* device. So PyTorch's CPU backend can't simulate two
# devices in a process, and below it trains on one, MXNet on two.
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
# PyTorch's `chunk` is the cut that `DataParallel` uses. **Predict:** which sizes does it give ten
# examples on four devices, and five?

# %%
shards = gluon.utils.split_and_load(nd.arange(10), four, even_split=False)
print("split_and_load, 10:", [len(shard) for shard in shards])
print("chunk, 10:         ", [len(shard) for shard in torch.arange(10).chunk(4)])
print("chunk, 5:          ", [len(shard) for shard in torch.arange(5).chunk(4)])

# %% [markdown]
# `chunk` rounds the size up and cuts until nothing is left. Of five examples one device gets none.
# `tensor_split` cuts as Gluon does.

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
# $w = 3$, so the gradient of $w^2$ is 6. **Predict:** what is stored after *two* backward passes?

# %%
w = nd.array([3.0])
w.attach_grad()
v = torch.tensor([3.0], requires_grad=True)
for _ in range(2):
    with autograd.record():
        loss = w * w
    loss.backward()
    loss = v * v
    loss.backward()
print("MXNet:  ", w.grad.asscalar())
print("PyTorch:", v.grad.item())

# %% [markdown]
# MXNet replaces the gradient, PyTorch adds to it. That is why a loop in PyTorch calls
# `zero_grad()`. It has no `record()`: what needs gradients is recorded, unless `torch.no_grad()`
# forbids it.
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
# Gluon returns one number an example, PyTorch their mean. That decides who divides by the batch
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
# check: MXNet's "sgd" and PyTorch's SGD follow these rules, bit for bit
def mxnet_rule(rates, decay=0.0):
    w = 1.0
    v = 0.0
    for rate in rates:
        v = 0.5 * v + rate * (1 + decay * w)  # the rate goes into the velocity
        w = w - v
    return w


def torch_rule(rates, decay=0.0):
    w = 1.0
    v = 0.0
    for rate in rates:
        v = 0.5 * v + (1 + decay * w)
        w = w - rate * v  # the rate is applied afterwards
    return w


def by_mxnet(rates, decay=0.0):
    w = gluon.Parameter("w", shape=(1,), dtype="float64")
    w.initialize(mx.init.One())
    trainer = gluon.Trainer([w], "sgd", {"momentum": 0.5, "wd": decay})
    for rate in rates:
        with autograd.record():
            loss = w.data() * 1
        loss.backward()
        trainer.set_learning_rate(rate)
        trainer.step(1)
    return w.data().asscalar()


def by_torch(rates, decay=0.0):
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.5, weight_decay=decay)
    for rate in rates:
        optimizer.zero_grad()
        w.sum().backward()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    return w.item()


constant = [0.125, 0.125, 0.125]
halved = [0.125, 0.125, 0.0625]
for name, rates in [("constant:", constant), ("halved:", halved)]:
    print(f"{name:9} w = {by_mxnet(rates)} in MXNet, {by_torch(rates)} in PyTorch")
    for decay in [0.0, 0.25]:
        assert by_mxnet(rates, decay) == mxnet_rule(rates, decay)
        assert by_torch(rates, decay) == torch_rule(rates, decay)
assert mxnet_rule(constant) == torch_rule(constant)
assert mxnet_rule(halved) < torch_rule(halved) - 0.03

# %% [markdown]
# After a change, MXNet's earlier gradients keep their old rate. With momentum, a schedule of rates
# trains differently in the two.
#
# ### Waiting
#
# MXNet puts an operator into a queue and returns (chapter 01). And PyTorch, on a CPU? We time a
# matrix product: the call, then a look at its result.

# %% tags=["fold", "measured"]
# measure: which share of the time the call takes, before anybody looks at the result
import time

big = nd.random.uniform(shape=(1000, 1000))
twin = torch.tensor(big.asnumpy())
shares = {}
for name, multiply, look in [("MXNet", lambda: nd.dot(big, big), lambda c: c[0, 0].asscalar()),
                             ("PyTorch", lambda: twin @ twin, lambda c: c[0, 0].item())]:
    look(multiply())  # warms up
    begin = time.perf_counter()
    product = multiply()
    asked = time.perf_counter()
    look(product)
    shares[name] = (asked - begin) / (time.perf_counter() - begin)
    print(f"{name:7} the call takes {shares[name]:.0%} of the time")
assert shares["MXNet"] < 0.5 < shares["PyTorch"], "MXNet hands the work out, PyTorch does it"

# %% [markdown]
# On a CPU, PyTorch computes before the call returns. **On GPUs:** it queues too, and
# `torch.accelerator.synchronize()` waits for a device (PyTorch's documentation).
#
# ### All in one table
#
# | MXNet | PyTorch | what differs |
# | --- | --- | --- |
# | `ctx=mx.cpu(1)` | `device="cpu:1"` | PyTorch's CPU is one device |
# | `as_in_context` | `to` | |
# | `split_and_load` | `chunk` | refuses uneven shards; `chunk` may use fewer devices |
# | `even_split=False` | `tensor_split` | too few examples: an error, or empty shards |
# | `record()` records | what needs gradients | PyTorch adds gradients up: `zero_grad` |
# | `record()`: training mode | `train()`, `eval()` | the mode is the module's |
# | one loss an example, `step(n)` | mean loss, `step()` | who divides |
# | `"sgd"` with momentum | `SGD` with momentum | where the rate goes |
# | `waitall` | `torch.accelerator.synchronize` | one device; raises without an accelerator |
# | `BatchNorm` | `BatchNorm2d` | deeper: ResNet twice, and why float32 disagrees |
#
# **Keep:** a loop translated word by word runs. Ask what adds up, what is a mean, and where the
# rate goes.

# %% tags=["fold"]
# check: torch.accelerator.synchronize() raises where there is no accelerator
if not torch.accelerator.is_available():
    try:
        torch.accelerator.synchronize()
    except RuntimeError:
        pass
    else:
        raise AssertionError("it should raise")

# %% [markdown]
# ## LeNet twice
#
# Do both compute the same numbers? Then each checks the other: a mistake would have to be made
# twice. Gluon's LeNet is chapter 06's. PyTorch wants to know how many numbers go into a layer, and
# its linear layer doesn't flatten:

# %%
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


theirs = lenet().double()  # float64

# %% [markdown]
# Gluon's twin, on two devices. Both list their parameters from input to output:

# %%
def start_gluon(devices):
    mx.random.seed(12)
    net = gluon_lenet()
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0]))  # makes the weights now
    net.cast("float64")
    return net


ours = start_gluon(pair)
for parameter, twin in zip(ours.collect_params().values(), theirs.parameters(), strict=True):
    print("Gluon:", parameter.shape, " PyTorch:", tuple(twin.shape))

# %% [markdown]
# The same shapes in the same order. So weights can be copied one after the other:

# %%
def copy_weights(source, target):
    pairs = zip(source.collect_params().values(), target.parameters(), strict=True)
    for parameter, twin in pairs:
        values = parameter.data(pair[0]).asnumpy()
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

# %% [markdown]
# To how many digits do the scores agree?

# %% tags=["measured"]
x, y = batches[0]
our_scores = ours(nd.array(x, ctx=pair[0], dtype="float64"))
their_scores = theirs(torch.tensor(x))
print("Gluon:  ", our_scores[0, :3].asnumpy())
print("PyTorch:", their_scores[0, :3].detach().numpy())
print("largest difference:", largest_difference(their_scores, our_scores))

# %% tags=["fold"]
# check: the same weights, bit for bit, and the same scores, to 1e-12
for parameter, twin in zip(ours.collect_params().values(), theirs.parameters(), strict=True):
    for device in pair:
        assert np.array_equal(parameter.data(device).asnumpy(), twin.detach().numpy())
assert our_scores.dtype == np.float64 and largest_difference(their_scores, our_scores) < 1e-12

# %% [markdown]
# `largest_difference` compares whole arrays, as a share of the largest entry. A rounding in float64
# is about $10^{-16}$.
#
# ### Five steps
#
# A step in Gluon, on two devices, as in chapter 06:

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
# After each step we compare the losses, and PyTorch's weights with those on *each* Gluon device.

# %% tags=["trains", "measured"]
def weights_on(net, device):
    return [parameter.data(device) for parameter in net.collect_params().values()]


trainer = gluon.Trainer(ours.collect_params(), "sgd", {"learning_rate": 0.125})
optimizer = torch.optim.SGD(theirs.parameters(), lr=0.125)
for number, (x, y) in enumerate(batches[:5], start=1):
    our_loss = gluon_step(ours, trainer, x, y)
    their_loss = torch_step(theirs, optimizer, x, y)
    replicas = [weights_on(ours, device) for device in pair]
    difference = largest_difference(replicas, list(theirs.parameters()))
    print(f"step {number}: loss {our_loss:.12f} and {their_loss:.12f}, "
          f"weights differ by {difference:.0e}")

# %% [markdown]
# All agree to twelve digits. A wrong all-reduce on Gluon's side would show: PyTorch needs none.

# %% tags=["fold", "trains"]
# check: five steps: losses, gradients, and weights on each device agree to 1e-10; 0.1 would not do
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
distances = {}
for rate in [0.1, float(np.float32(0.1))]:
    ours, theirs, trainer, optimizer = fresh_twins(0.1, rate)
    gluon_step(ours, trainer, x, y)
    torch_step(theirs, optimizer, x, y)
    distances[rate] = largest_difference(weights_on(ours, pair[0]), list(theirs.parameters()))
print("in MXNet's update a rate of 0.1 is", float(np.float32(0.1)))
assert distances[float(np.float32(0.1))] < 1e-13 and distances[0.1] > 1e-11

# %% [markdown]
# Why 0.125? MXNet's update keeps its settings in float32, whatever type the weights have. There 0.1
# is another number. 0.125 is exact, and so is $1/64$, by which `step(64)` multiplies.
#
# **Keep:** compare two implementations in float64, from the same weights, with numbers that are
# exact in both. In float32 they part much sooner (deeper: ResNet twice, and why float32 disagrees).
#
# ## DataParallel, rebuilt
#
# `nn.DataParallel(net)` uses several GPUs with one line more in a program. What does it do in each
# forward pass?
#
# ![One forward pass of DataParallel. 1: a batch of ten images is scattered into shards of 4, 4 and
# 2. 2: the network is replicated, once for each shard. 3: the three replicas are applied to their
# shards in parallel. 4: ten scores are gathered. On the way back the gradients of the replicas add
# up in the network.](src/drawings/data_parallel.svg)
#
# We build the pieces for LeNet and ten images. On one CPU device, replicas are copies in the same
# memory. The first piece, *scatter*, is `chunk`:

# %%
torch.manual_seed(13)
net = lenet().double()
ten = torch.randn((10, 1, 28, 28), dtype=torch.float64)  # noise will do as images
answers = torch.arange(10) % 3


def scatter(x, k):
    return x.chunk(k)


shards = scatter(ten, 3)
for shard in shards:
    print("shard:", tuple(shard.shape))

# %% [markdown]
# ### Replicate
#
# Each shard needs a copy of the network, and autograd records how it was copied. Look at one weight
# first. Its three copies get the factors 1, 10 and 100. **Predict:** what is the gradient of the
# original?

# %%
w = torch.tensor(2.0, requires_grad=True)
copies = [w.clone() for _ in range(3)]
result = 1 * copies[0] + 10 * copies[1] + 100 * copies[2]
result.backward()
print(w.grad.item())

# %% [markdown]
# The gradients of the copies *add up*: the backward pass of a broadcast is a sum. So `DataParallel`
# needs no all-reduce. A replica of a whole network is a copy of each parameter, by name:

# %%
def replicate(net, k):
    replicas = []
    for _ in range(k):
        replica = {}
        for name, parameter in net.named_parameters():
            replica[name] = parameter.clone()
        replicas.append(replica)
    return replicas


replicas = replicate(net, 3)
print(len(replicas), "replicas of", len(replicas[0]), "arrays")

# %% [markdown]
# ### Apply in parallel, and gather
#
# `functional_call(net, replica, x)` is `net(x)` with the parameters in `replica`:

# %%
output = functional_call(net, replicas[2], shards[2])
print(len(shards[2]), "images, scores", tuple(output.shape))

# %% [markdown]
# Now all three at the same time, in threads. `functional_call` puts the parameters into the module
# while it runs, so each thread gets a module of its own. `threads.map` makes one call with the
# first of each list, one with the second, and so on.

# %%
def parallel_apply(net, replicas, shards):
    modules = [copy.deepcopy(net) for _ in shards]
    with ThreadPoolExecutor(len(shards)) as threads:
        outputs = threads.map(functional_call, modules, replicas, shards)
    return list(outputs)


outputs = parallel_apply(net, replicas, shards)
for output in outputs:
    print("scores", tuple(output.shape))

# %% [markdown]
# The last piece, *gather*, puts the scores together:

# %%
def gather(outputs):
    return torch.cat(outputs)


print("scores", tuple(gather(outputs).shape))

# %% [markdown]
# ### The class
#
# It only collects the four pieces:

# %%
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
# It must give the scores *and the gradients* that the network has alone. The loss is taken once,
# from the gathered scores. So shards of different size need no weights.

# %%
def scores_and_gradients(model):
    net.zero_grad()
    scores = model(ten)
    F.cross_entropy(scores, answers).backward()
    gradients = [parameter.grad.clone() for parameter in net.parameters()]
    return scores.detach(), gradients


whole_scores, whole_gradients = scores_and_gradients(net)
scores, gradients = scores_and_gradients(DataParallel(net, 3))
print(f"scores differ by    {largest_difference(scores, whole_scores):.3f}")
print(f"gradients differ by {largest_difference(gradients, whole_gradients):.3f}")

# %% tags=["fold"]
# check: 2, 3 and 4 replicas equal the network, to 1e-12; PyTorch's own forward calls our pieces
import threading


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


def check_threads(make):
    seen = []
    barrier = threading.Barrier(4)

    def wait_for_all(module, inputs):
        seen.append(len(inputs[0]))
        barrier.wait(timeout=10)  # raises unless four threads get here

    hook = net.register_forward_pre_hook(wait_for_all)
    make(net, 4)(ten)
    hook.remove()
    assert sorted(seen) == [1, 3, 3, 3], "by chunk"


for make in [DataParallel, Theirs]:
    check_threads(make)
    for k in [2, 3, 4]:
        model = make(net, k)
        scores, gradients = scores_and_gradients(model)
        assert largest_difference(scores, whole_scores) < 1e-12, f"{k} replicas"
        assert largest_difference(gradients, whole_gradients) < 1e-12, f"{k} replicas"
assert model.called == ["scatter", "replicate", "parallel_apply", "gather"]
assert len(scatter(ten[:5], 4)) == 3 and len(DataParallel(net, 4)(ten[:5])) == 5, "one is left out"

# %% [markdown]
# ### Would it see a mistake?
#
# Three wrong versions, each with one piece changed:

# %%
class ForgetsAReplica(DataParallel):
    def replicate(self, k):
        replicas = replicate(self.net, k)
        for name, array in replicas[0].items():
            replicas[0][name] = array.detach()  # its gradient doesn't come back
        return replicas


class GathersBackwards(DataParallel):
    def gather(self, outputs):
        return torch.cat(outputs[::-1])  # the last shard first


class MakesNoCopies(DataParallel):
    def replicate(self, k):
        own = dict(self.net.named_parameters())
        return [own] * k  # the same parameters, k times

# %% [markdown]
# **Predict:** which has right scores, and which right gradients?

# %%
for kind in [DataParallel, ForgetsAReplica, GathersBackwards, MakesNoCopies]:
    scores, gradients = scores_and_gradients(kind(net, 3))
    in_scores = largest_difference(scores, whole_scores)
    in_gradients = largest_difference(gradients, whole_gradients)
    print(f"{kind.__name__:16} scores differ by {in_scores:.3f}, gradients by {in_gradients:.3f}")

# %% [markdown]
# A forgotten replica has right scores: only gradients show it. `MakesNoCopies` has right numbers
# throughout: where all replicas *are* the network, their gradients add up too. Only memory tells
# the two apart. We count arrays at different addresses:

# %% tags=["fold"]
# check: three replicas are copies; each mistake is seen, a mean of gradients too
class TakesTheMean(DataParallel):  # of the replicas' gradients, not their sum
    def replicate(self, k):
        replicas = replicate(self.net, k)
        for replica in replicas:
            for array in replica.values():
                array.register_hook(lambda gradient: gradient / k)
        return replicas


def addresses(model):
    found = set()
    for replica in model.replicate(3):
        for array in replica.values():
            found.add(array.data_ptr())  # where in memory the array begins
    return found


def distances_of(model):
    scores, gradients = scores_and_gradients(model)
    return (float(largest_difference(scores, whole_scores)),
            float(largest_difference(gradients, whole_gradients)))


for kind in [DataParallel, MakesNoCopies]:
    print(f"{kind.__name__:13} {len(addresses(kind(net, 3)))} arrays in 3 replicas of 8")
for kind in [ForgetsAReplica, TakesTheMean]:
    in_scores, in_gradients = distances_of(kind(net, 3))
    assert in_scores < 1e-12 and in_gradients > 1e-2, kind
assert min(distances_of(GathersBackwards(net, 3))) > 1e-2
for kind in [DataParallel, MakesNoCopies]:
    assert max(distances_of(kind(net, 3))) < 1e-12, kind
own = {parameter.data_ptr() for parameter in net.parameters()}
assert len(addresses(DataParallel(net, 3))) == 24 and len(own) == 8
assert not addresses(DataParallel(net, 3)) & own, "copies, not the network's own"
assert addresses(MakesNoCopies(net, 3)) == own

# %% [markdown]
# ## What it costs
#
# PyTorch recommends `DistributedDataParallel` (DDP) instead, even on one machine (docstring of
# `nn.DataParallel`). Why? Three costs are in the design:
#
# 1. It copies the network in *each* forward pass. DDP sends the parameters once, at the start.
# 2. It gathers on one device, which computes the loss and updates all weights. The others wait.
# 3. Its threads share one Python interpreter, whose lock lets one of them run at a time.
#
# More in deeper: What DataParallel costs, and a listing that uses it.
#
# **Keep:** `DataParallel` is scatter, replicate, parallel apply, gather. Its reduce is the backward
# pass of a copy.
#
# ## Summary
#
# - PyTorch adds gradients up, takes the mean of the loss, multiplies the velocity by the rate, and
#   has one CPU device.
# - LeNet in Gluon on two devices and in PyTorch on one agree for five steps, to $10^{-10}$ in
#   float64: losses, gradients and weights.
# - `DataParallel` copies the network in each forward pass. The copies' gradients add up in the
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
# 3. **A change of rate.** Write `set_rate(optimizer, rate)` for PyTorch's `SGD`, so that it goes on
#    as MXNet's would.

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
    losses = losses_in_replicas(net, ten, answers, 4, reduction)
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
# The time until the last step is queued: whatever of it is unfinished when the clock stops is left
# out. Wait for each device before each look at the clock. The check gives PyTorch two devices that
# only note the call.

# %% tags=["solution"]
from unittest import mock


def wait_for_devices():
    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)


def seconds_of(work):
    wait_for_devices()
    begin = time.perf_counter()
    work()
    wait_for_devices()
    return time.perf_counter() - begin


assert seconds_of(lambda: time.sleep(0.01)) >= 0.01

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


w = nn.Parameter(torch.ones(1, dtype=torch.float64))
optimizer = torch.optim.SGD([w], lr=halved[0], momentum=0.5)
for rate in halved:
    set_rate(optimizer, rate)
    optimizer.zero_grad()
    w.sum().backward()
    optimizer.step()
print(w.item(), "as MXNet's", mxnet_rule(halved))
assert w.item() == mxnet_rule(halved)
