# %% [markdown]
# # 13 · The same in PyTorch
#
# Apache MXNet was retired in 2023, so the next training loop that you write will probably be in
# PyTorch. Most calls have a direct counterpart. But some look the same and mean something else, and
# then no error says so. *How do you carry a training loop over, and how do you know that it is
# still the same training?*
#
# > **What you'll do:** translate a loop word by word, find what is wrong with that, fix it, and
# > train LeNet in both frameworks from the same weights.
# >
# > **What you'll learn:** which call of PyTorch stands for which of MXNet, and where the meaning
# > differs; how one framework checks the other; what PyTorch's `DataParallel` does.
# >
# > **What you need:** chapters 01 to 04, and PyTorch, which `make setup TORCH=1` installs. No GPU.
# > The little of Gluon (chapters 05 and 06) that we use is said where it comes. Only exercises 2
# > and 4 need more: chapters 07 and 09. Reading takes {reading time}, running about 15 seconds.
#
# `nd` and `gluon` are MXNet's; `nn`, `F` and everything that begins with `torch` are PyTorch's.

# %% tags=["torch"]
from helpers import load_data, torch_networks, your_turn
from helpers.compare import largest_difference
from helpers.networks import lenet as gluon_lenet

import mxnet as mx
import torch
import torch.nn.functional as F
from mxnet import autograd, gluon, nd
from torch import nn

# Limit PyTorch to one core, like each MXNet device.
torch.set_num_threads(1)

# %% [markdown]
# ## Word by word
#
# Chapter 01 trained one weight, with the model $wx$ and four examples in which $y = 3x$. Here is
# this training in Gluon, MXNet's library of layers, on one device. `Dense` is a fully connected
# layer. `initialize` fills its weights; each is a `Parameter`, which keeps a replica and a gradient
# for each device. The `Trainer` is the optimizer; its `step(n)` adds up the gradients of all
# devices, divides by `n` and updates every replica.

# %% tags=["your-turn", "trains"]
inputs = [[1.0], [2.0], [3.0], [4.0]]
targets = [[3.0], [6.0], [9.0], [12.0]]


def train_in_gluon(x, y, lr, steps):
    """Return the weight after each step, to three digits."""
    x = nd.array(x)
    y = nd.array(y)
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)  # one weight: net(x) is w times x
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})

    weights = []
    for _ in range(steps):
        with autograd.record():
            losses = (net(x) - y) ** 2  # [n, 1]
        losses.backward()
        trainer.step(len(x))  # is told the number of examples
        weight = float(net.weight.data().asscalar())  # data() is the array of a Parameter
        weights.append(round(weight, 3))
    return weights


print(train_in_gluon(inputs, targets, 0.04, 3))

# %% [markdown]
# The weight goes towards 3. Now we write the PyTorch call for each Gluon call. Three lines have no
# direct counterpart. `record()` is left out, because PyTorch records by itself. `backward` needs a
# scalar in PyTorch (documentation of `Tensor.backward`), so we write out the sum that MXNet takes
# by itself. And PyTorch's `step` takes no number of examples.

# %%
def word_by_word(x, y, lr, steps):
    x = torch.tensor(x)
    y = torch.tensor(y)
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)

    weights = []
    for _ in range(steps):
        losses = (net(x) - y) ** 2
        losses.sum().backward()
        optimizer.step()
        weights.append(round(net.weight.item(), 3))
    return weights

# %% [markdown]
# **Predict:** it runs without an error. What is its weight after the first step, where Gluon's is
# 1.8?

# %% tags=["predict", "trains"]
print(word_by_word(inputs, targets, 0.04, 3))

# %% [markdown]
# <details><summary>What came out</summary>
#
# 7.2: the first step is four times as long as Gluon's.
#
# </details>
#
# ## Your turn: the right translation
#
# Two things are wrong with `word_by_word`. Write `translated`, which returns what `train_in_gluon`
# returns, but computes it with PyTorch. Begin with a copy of `word_by_word`, and try it before you
# scroll on. If the checker still names a wrong weight, the next two sections tell why.

# %% tags=["your-turn"]
def translated(x, y, lr, steps):
    """Return the weight after each step, to three digits, computed by PyTorch."""
    ...


two_inputs = [[1.0], [2.0]]
two_targets = [[5.0], [10.0]]
training_cases = [
    ((inputs, targets, 0.04, 1), train_in_gluon(inputs, targets, 0.04, 1)),
    ((inputs, targets, 0.04, 3), train_in_gluon(inputs, targets, 0.04, 3)),
    ((two_inputs, two_targets, 0.1, 4), train_in_gluon(two_inputs, two_targets, 0.1, 4)),
]
your_turn(translated, training_cases)

# %% [markdown]
# ## Losses
#
# Who divides by the number of examples? Both libraries provide cross-entropy. This is what they
# return for three images and two classes:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
scores = [[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]  # a row for each image
labels = [0, 1, 0]

losses = cross_entropy(nd.array(scores), nd.array(labels))
print("Gluon:           ", losses.asnumpy().round(3))
print("mean of Gluon's: ", losses.mean().asscalar().round(3))

loss = F.cross_entropy(torch.tensor(scores), torch.tensor(labels))
print("PyTorch:         ", round(loss.item(), 3))

# %% [markdown]
# **Gluon returns a loss for each image, PyTorch their mean.** (PyTorch's losses have the option
# `reduction`, which is `"mean"` unless you choose `"sum"` or `"none"`.) So in Gluon
# `trainer.step(n)` divides by the number of examples, and in PyTorch the loss does. This is the
# first step of our one weight:
#
# ![The first step in Gluon and in PyTorch, from w = 0 and the losses 9, 36, 81 and 144. Gluon: the
# gradient is −180, then step(4) divides by 4 and multiplies by 0.04. PyTorch: first the mean
# divides by 4 and is 67.5; the gradient is −45, and step() multiplies by 0.04. Both end with w =
# 1.8.](src/drawings/one_step_twice.svg)
#
# But `word_by_word` takes the sum of the losses, and its `step` doesn't divide either.
#
# ## Gradients
#
# The four losses together have the gradient −180 at $w = 0$, as in the drawing. We run the backward
# pass twice, without a step in between. (`requires_grad=True` is PyTorch's `attach_grad()`.)
# **Predict:** which gradient does each framework hold afterwards?

# %% tags=["predict"]
examples = nd.array([1, 2, 3, 4])
weight = nd.zeros(1)
weight.attach_grad()
for _ in range(2):
    with autograd.record():
        losses = (weight * examples - 3 * examples) ** 2
    losses.backward()
print("MXNet:  ", weight.grad.asscalar())

examples = torch.tensor([1.0, 2.0, 3.0, 4.0])
weight = torch.zeros(1, requires_grad=True)
for _ in range(2):
    losses = (weight * examples - 3 * examples) ** 2
    losses.sum().backward()
print("PyTorch:", weight.grad.item())

# %% [markdown]
# <details><summary>What came out</summary>
#
# −180 in MXNet, whose `backward` overwrites the gradient, and −360 in PyTorch, whose `backward`
# adds to it (as MXNet's does with `grad_req="add"`). So in `word_by_word` each step also took the
# gradients of all steps before it. **In PyTorch each step needs `optimizer.zero_grad()`.**
#
# </details>
#
# ## LeNet twice
#
# A real training has more places for such mistakes. How do you know that a translation is right?
# Let both frameworks train the same network, from the same weights, on the same batches, in
# float64. Then all losses and all weights must agree, up to rounding.
#
# Gluon's LeNet is chapter 06's: that of chapter 04, but each pooling takes the largest number and
# not the mean. In PyTorch each layer is told the size of its input, so we follow an image of 28×28
# pixels through the network. The last line compares it with the LeNet that `helpers` has:

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


assert str(lenet()) == str(torch_networks.lenet())

# %% [markdown]
# ### The same weights
#
# How does a layer initialize its weights by default? We look at the largest ones, for two numbers
# of inputs:

# %%
mx.random.seed(0)
torch.manual_seed(0)
for n in [25, 400]:
    dense = gluon.nn.Dense(1000, in_units=n)
    dense.initialize()
    linear = nn.Linear(n, 1000)
    print(f"{n} inputs: Gluon's weights up to {dense.weight.data().max().asscalar():.2f}, "
          f"PyTorch's up to {linear.weight.max().item():.2f}")

# %% [markdown]
# Gluon draws from −0.07 to 0.07, however many inputs there are (default of `mx.init.Uniform`), and
# its biases begin with 0. PyTorch draws both from $-1/\sqrt{n}$ to $1/\sqrt{n}$ for $n$ inputs
# (documentation of `nn.Linear`), so the same network begins differently. **Whoever compares two
# trainings must copy the weights.**
#
# Gluon gets two devices. In PyTorch all cores of a CPU are *one* device, so PyTorch trains on one.
# Both networks list their parameters in the same order: the weights of a layer, then its biases. So
# Gluon's arrays can be given PyTorch's names:

# %%
pair = [mx.cpu(0), mx.cpu(1)]


def gluon_weights(gluon_net, torch_net):
    """Gluon's weights on the first device, each under its name in PyTorch."""
    names = torch_net.state_dict().keys()
    parameters = gluon_net.collect_params().values()
    weights = {}
    # strict: an error, if one network has more parameters
    for name, parameter in zip(names, parameters, strict=True):
        replica = parameter.data(pair[0])  # the one on the first device
        weights[name] = torch.tensor(replica.asnumpy())
    return weights

# %% [markdown]
# Now we make both networks. (`load_state_dict` raises an error if a shape differs.)

# %%
def two_lenets():
    """LeNet in Gluon and in PyTorch, with the same weights, in float64."""
    mx.random.seed(12)
    gluon_net = gluon_lenet()
    gluon_net.cast("float64")
    gluon_net.initialize(mx.init.Xavier(), ctx=pair)  # random weights, the same on both devices
    # From a first image Gluon's layers learn the shapes of their weights.
    gluon_net(nd.zeros((1, 1, 28, 28), ctx=pair[0], dtype="float64"))

    torch_net = lenet().double()  # float64
    start = gluon_weights(gluon_net, torch_net)
    torch_net.load_state_dict(start)
    return gluon_net, torch_net

# %% [markdown]
# Do both give the same scores?

# %% tags=["measured"]
data = load_data("mnist", limit=320)
print(data)
images = data.train_images.astype("float64")
labels = data.train_labels

gluon_net, torch_net = two_lenets()
gluon_scores = gluon_net(nd.array(images[:64], ctx=pair[0], dtype="float64"))
torch_scores = torch_net(torch.tensor(images[:64]))
print("Gluon:  ", gluon_scores[0, :3].asnumpy())
print("PyTorch:", torch_scores[0, :3].detach().numpy())
assert largest_difference(torch_scores, gluon_scores) < 1e-12

# %% [markdown]
# They do. (`largest_difference` is chapter 04's: the largest difference, as a share of the array's
# largest number, and the name of the array where it is. A rounding error in float64 is about
# $10^{-16}$.)
#
# ### The same steps
#
# In Gluon a step uses both devices, because `net` computes with the replica on the device of its
# input. The shards are unequal, 48 images and 16, since equal ones would hide a mean of means
# (chapter 02):

# %%
def gluon_step(net, trainer, x, y):
    x_first = nd.array(x[:48], ctx=pair[0], dtype="float64")
    y_first = nd.array(y[:48], ctx=pair[0])
    x_second = nd.array(x[48:], ctx=pair[1], dtype="float64")
    y_second = nd.array(y[48:], ctx=pair[1])
    with autograd.record():
        first = cross_entropy(net(x_first), y_first)
        second = cross_entropy(net(x_second), y_second)
    first.backward()
    second.backward()
    trainer.step(len(x))
    total = first.sum().asscalar() + second.sum().asscalar()
    return total / len(x)

# %% [markdown]
# And in PyTorch, on one device, with labels as 64-bit integers:

# %%
def torch_step(net, optimizer, x, y):
    loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

# %% [markdown]
# `compare` makes five steps with both. It compares the losses, to which both of Gluon's devices
# contribute, and the weights of the first device. Gluon keeps the rate in float32 (chapter 05), so
# we take a rate that is exact there, and not 0.1:

# %%
def compare(step_in_torch):
    """Print losses and weights of both for five steps; return their differences, two lists."""
    gluon_net, torch_net = two_lenets()
    trainer = gluon.Trainer(gluon_net.collect_params(), "sgd", {"learning_rate": 0.125})
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.125)
    of_losses = []
    of_weights = []
    for step in range(5):
        begin = 64 * step
        x = images[begin : begin + 64]
        y = labels[begin : begin + 64]
        gluon_loss = gluon_step(gluon_net, trainer, x, y)
        torch_loss = step_in_torch(torch_net, optimizer, x, y)
        print(f"step {step + 1}: losses {gluon_loss:.10f} and {torch_loss:.10f}")
        of_losses.append(abs(gluon_loss - torch_loss))

        expected = gluon_weights(gluon_net, torch_net)
        difference = largest_difference(torch_net.state_dict(), expected)
        print(f"        then weights differ by {difference}")
        of_weights.append(difference)
    return of_losses, of_weights

# %% tags=["measured", "trains"]
of_losses, of_weights = compare(torch_step)
assert max(of_losses) < 1e-10
assert max(of_weights) < 1e-10

# %% [markdown]
# The losses agree in all printed digits, and the weights up to rounding. (`3.bias` is the bias of
# layer 3, counted from 0.) So this is the same training, as far as these steps go.
#
# ### Would a mistake be seen?
#
# We forget `zero_grad()`, and nothing else. **Predict:** in which step does PyTorch's loss differ
# for the first time?

# %% tags=["predict", "measured", "trains"]
def forgetful_step(net, optimizer, x, y):
    loss = F.cross_entropy(net(torch.tensor(x)), torch.tensor(y).long())
    loss.backward()
    optimizer.step()
    return loss.item()


of_losses, of_weights = compare(forgetful_step)
# %% tags=["fold"]
# check: what came out
assert max(of_losses[:2]) < 1e-10
assert of_losses[2] > 1e-3

# %% [markdown]
# <details><summary>What came out</summary>
#
# In the third. The first backward pass finds no old gradient, so the first update is right, and
# with it the second loss. The second update is wrong, and the third loss is the first to show it.
#
# </details>
#
# Try mistakes of your own in `forgetful_step`. **Compare two implementations in float64, from the
# same weights, over several steps, with settings that are exact in both.** In float32 rounding
# alone makes far larger differences (deeper: Why float32 jumps).
#
# LeNet with plain SGD doesn't show everything. Two more things differ: the *training mode*,
# in which for example dropout sets random numbers to zero, and *momentum*.
#
# ## Training mode
#
# In Gluon `record()` turns the training mode on, and without it the mode is off. In PyTorch the
# mode belongs to the module, and is on until somebody turns it off:

# %%
ones = gluon.nn.Dropout(0.5)(nd.ones(6))
print("Gluon, outside record():", ones.asnumpy())

torch.manual_seed(1)
dropout = nn.Dropout(0.5)
print("PyTorch, at first:      ", dropout(torch.ones(6)).numpy())
dropout.eval()
print("PyTorch, after eval():  ", dropout(torch.ones(6)).numpy())

# %% [markdown]
# `torch.no_grad()` doesn't do that: it only turns the recording off. So evaluate with both.
#
# ## Momentum
#
# SGD with momentum $m$ keeps a *velocity* $v$ for each weight $w$. With gradient $g$ and learning
# rate $\eta$, one step is:
#
# - MXNet: $v \leftarrow m v + \eta g$, then $w \leftarrow w - v$.
# - PyTorch: $v \leftarrow m v + g$, then $w \leftarrow w - \eta v$.
#
# With a constant rate both give the same weights. But many trainings change it. We take three steps
# from $w = 1$, with $m = 0.5$ and always the gradient 1, and halve the rate for the third. First
# MXNet:

# %% tags=["trains"]
rates = [0.125, 0.125, 0.0625]

net = gluon.nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.One())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.5})
for rate in rates:
    trainer.set_learning_rate(rate)
    with autograd.record():
        output = net(nd.ones((1, 1)))  # the weight itself
    output.backward()
    trainer.step(1)
    print(float(net.weight.data().asscalar()))

# %% [markdown]
# **Predict:** after two steps PyTorch has the same weight. Is its third step longer or shorter than
# MXNet's?

# %% tags=["predict", "trains"]
net = nn.Linear(1, 1, bias=False)
nn.init.ones_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), momentum=0.5)
for rate in rates:
    optimizer.param_groups[0]["lr"] = rate  # how a rate is set in PyTorch
    optimizer.zero_grad()
    output = net(torch.ones(1, 1))
    output.backward()
    optimizer.step()
    print(net.weight.item())

# %% [markdown]
# <details><summary>What came out</summary>
#
# Shorter: 0.109375 against 0.15625. In PyTorch a new learning rate rescales the whole velocity.
# MXNet scales only the newest gradient by the new rate, and earlier gradients keep the rate of
# their own step.
#
# </details>
#
# So a schedule that changes the rate trains differently in the two, unless the velocity is changed
# with it (exercise 3).
#
# ## DataParallel
#
# PyTorch has a wrapper that trains on several GPUs from one process, as Gluon does:
# `model = nn.DataParallel(net)`. In each forward pass it copies the network to the other GPUs, and
# each computes with its own shard. But the optimizer updates only the original. Does the original
# get the gradients of the copies? We try that with one weight and three copies of it, on the CPU.
# The gradients of the copies are 1, 10 and 100. **Predict:** what is the gradient of the original?

# %% tags=["predict"]
weight = torch.tensor(2.0, requires_grad=True)
copies = [weight.clone(), weight.clone(), weight.clone()]  # one for each GPU, so to say
result = 1 * copies[0] + 10 * copies[1] + 100 * copies[2]
result.backward()
print(weight.grad.item())

# %% [markdown]
# <details><summary>What came out</summary>
#
# 111. Autograd adds up what comes back from all uses of a tensor, and each copy is one use.
#
# </details>
#
# In `DataParallel` the batch is cut into shards (*scatter*), the network is copied (*replicate*),
# all GPUs compute, and the first one collects their scores (*gather*). The loss is computed there,
# once, over the whole batch. This is what happens to one weight:
#
# ![Three GPUs, twice. Forward, a broadcast: GPU 0 uses the weight w itself, GPUs 1 and 2 use
# copies. Backward, a reduce: the gradients 1, 10 and 100 of the three uses go to GPU 0 and add up
# to 111.](src/drawings/data_parallel.svg)
#
# **A broadcast, backwards, is a reduce.** Our cell has shown that for copies on one CPU. Between
# GPUs PyTorch copies by `Broadcast`, whose `backward` adds the gradients up on the first GPU
# (`torch/nn/parallel/_functions.py` in PyTorch 2.13). So the gradients are reduced on the first
# GPU, and in the next forward pass the new weights are broadcast.
#
# `DataParallel` has drawbacks. One `Broadcast` copies all parameters (`replicate` in
# `torch/nn/parallel/replicate.py`). So its `backward` must wait for the gradients of all
# parameters, and nothing is sent while the GPUs still compute. And only the first GPU computes the
# loss and the update. So PyTorch recommends `DistributedDataParallel`, even on one machine
# (documentation of `nn.DataParallel`). Chapter 14 builds it.
#
# ## For reference: what else differs
#
# Nobody remembers all of this. Come back to it when a translation of yours disagrees.
#
# | MXNet | PyTorch |
# | --- | --- |
# | *context*: `a.as_in_context(mx.gpu(1))` | *device*: `a.to("cuda:1")` |
# | `mx.cpu(0)`, `mx.cpu(1)`: two devices | `"cpu"`: one device |
# | `a.asscalar()` | `a.item()` |
# | `a.asnumpy()`: a copy | `a.detach().cpu().numpy()`: shares the memory of a tensor on a CPU |
# | records only within `autograd.record()` | records, but not within `torch.no_grad()` |
# | `net.collect_params()` | `net.parameters()`; with BatchNorm's statistics `net.state_dict()` |
# | `net.cast("float64")` | `net.double()` |
# | `Dense` flattens what it gets | `nn.Linear` takes the last axis: `nn.Flatten()` goes before it |
# | `gluon.loss.L2Loss`: half the square, per example | `nn.MSELoss`: mean of the squares |
# | labels may be floats | `F.cross_entropy` needs classes as int64: `y.long()` |
# | BatchNorm's `momentum=0.9`: the share that is kept | `momentum=0.1`: the share that is new |
# | the running variance divides by $n$ (on a CPU) | by $n - 1$ |
# | `split_and_load(…, even_split=False)` | `x.tensor_split(k)`; `x.chunk(k)` cuts differently |
# | `nd.waitall()` | nearest is `torch.accelerator.synchronize()`, which waits for one GPU only |
#
# The last row is for the clock: on GPUs PyTorch queues operations, as MXNet does (chapter 01; *CUDA
# semantics* in PyTorch's documentation), so synchronize before you read it.
#
# ## Summary
#
# - Most calls of MXNet have a direct counterpart in PyTorch. But PyTorch's loss is a mean, its
#   gradients add up until `zero_grad()`, its layers begin with other weights and biases, and a new
#   learning rate rescales the whole velocity. No error says so.
# - A translation is tested by training the same network twice, from the same weights, in float64.
#   LeNet in Gluon on two devices and in PyTorch on one agree for five steps of plain SGD, to
#   $10^{-10}$, in losses and weights. A forgotten `zero_grad` shows in the third loss.
# - `DataParallel` copies the network in each forward pass. Autograd adds the gradients of the
#   copies up in the original: a broadcast, backwards, is a reduce.
#
# Next, chapter 14: a process for each device, and `DistributedDataParallel`, written by you.

# %% [markdown]
# ## Exercises
#
# 1. **The other way round.** Somebody who knows PyTorch takes the mean in `train_in_gluon`, with
#    `loss = (...).mean()` inside `record()`, and leaves `trainer.step(len(x))` as it is. Which
#    weights come out? Fix it without going back to the sum.
# 2. **Without the sum.** Give the `Trainer` in `compare` the option `kvstore=None`. Then Gluon's
#    two devices don't add up their gradients (chapter 07). In which step do the losses show that?
# 3. **A change of rate.** Write `set_rate(optimizer, rate)` for PyTorch's `SGD`, so that it goes on
#    as MXNet's would. Try it on the three steps above.
# 4. **BatchNorm.** Give one batch of the numbers 1, 2, 3 and 6 to BatchNorm in both frameworks. How
#    do you get Gluon's running variance from PyTorch's?

# %% [markdown]
# ### Answer to *Your turn*
#
# Two lines of `word_by_word` change: `zero_grad` comes in, and the mean replaces the sum.

# %% tags=["solution", "your-turn", "trains"]
def translated(x, y, lr, steps):
    x = torch.tensor(x)
    y = torch.tensor(y)
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)

    weights = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = (net(x) - y) ** 2
        losses.mean().backward()
        optimizer.step()
        weights.append(round(net.weight.item(), 3))
    return weights


your_turn(translated, training_cases)

# %% [markdown]
# ### Answer 1
#
# It divides by 4 twice, so the weight moves a quarter as far in the first step. There is no error.
# With the mean as loss, `step` must be called with 1.

# %% tags=["solution", "trains"]
def with_the_mean(step_size):
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.04})
    x = nd.array(inputs)
    y = nd.array(targets)
    weights = []
    for _ in range(3):
        with autograd.record():
            loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        trainer.step(step_size)
        weights.append(round(float(net.weight.data().asscalar()), 3))
    return weights


print("step(4):", with_the_mean(4))
print("step(1):", with_the_mean(1))
assert with_the_mean(1) == train_in_gluon(inputs, targets, 0.04, 3)

# %% [markdown]
# ### Answer 2
#
# In the second: after the first update each device has weights from its own shard only. PyTorch has
# no sum over devices, so it is an independent reference for Gluon's.

# %% tags=["solution", "measured", "trains"]
for kvstore in ["device", None]:
    gluon_net, torch_net = two_lenets()
    params = gluon_net.collect_params()
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 0.125}, kvstore=kvstore)
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.125)
    of_losses = []
    for begin in [0, 64]:
        x = images[begin : begin + 64]
        y = labels[begin : begin + 64]
        gluon_loss = gluon_step(gluon_net, trainer, x, y)
        torch_loss = torch_step(torch_net, optimizer, x, y)
        print(f"kvstore={kvstore}: losses {gluon_loss:.6f} and {torch_loss:.6f}")
        of_losses.append(abs(gluon_loss - torch_loss))
    assert of_losses[0] < 1e-10
    assert (of_losses[1] > 1e-3) == (kvstore is None)

# %% [markdown]
# ### Answer 3
#
# MXNet's velocity is the rate times PyTorch's. At a change of rate MXNet's stays as it is, so
# PyTorch's must be multiplied by the old rate and divided by the new one.

# %% tags=["solution", "trains"]
def set_rate(optimizer, rate):
    for settings in optimizer.param_groups:
        for p in settings["params"]:
            state = optimizer.state[p]
            if "momentum_buffer" in state:  # not before the first step
                state["momentum_buffer"] *= settings["lr"] / rate
        settings["lr"] = rate


net = nn.Linear(1, 1, bias=False)
nn.init.ones_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), momentum=0.5)
for rate in rates:
    set_rate(optimizer, rate)
    optimizer.zero_grad()
    output = net(torch.ones(1, 1))
    output.backward()
    optimizer.step()
    print(net.weight.item())
assert net.weight.item() == 0.53125  # as in MXNet

# %% [markdown]
# ### Answer 4
#
# The mean is 3, so the variance is 14/4 = 3.5 over $n$, and 14/3 over $n - 1$. Both keep nine
# tenths of the running variance, which begins with 1. So take what is new in PyTorch's, and
# multiply it by $(n-1)/n$. (On GPUs MXNet's is over $n - 1$, too.)

# %% tags=["solution"]
numbers = [[1.0], [2.0], [3.0], [6.0]]
gluon_norm = gluon.nn.BatchNorm(in_channels=1, momentum=0.9)
gluon_norm.initialize()
with autograd.record():
    outputs = gluon_norm(nd.array(numbers))
outputs.backward()
torch_norm = nn.BatchNorm1d(1, momentum=0.1)
torch_norm(torch.tensor(numbers))

gluon_variance = gluon_norm.running_var.data().asscalar()
torch_variance = torch_norm.running_var.item()
print(f"running mean:     Gluon {gluon_norm.running_mean.data().asscalar():.4f}, "
      f"PyTorch {torch_norm.running_mean.item():.4f}")
print(f"running variance: Gluon {gluon_variance:.4f}, PyTorch {torch_variance:.4f}")

new = torch_variance - 0.9 * 1
print(f"from PyTorch's:   Gluon {0.9 * 1 + new * 3 / 4:.4f}")
assert abs(0.9 + new * 3 / 4 - gluon_variance) < 1e-6
