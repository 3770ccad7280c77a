# %% [markdown]
# # 08 · ResNet-18
#
# *Dive into Deep Learning* (d2l) trains ResNet-18 on one GPU with batches of 256 images, and then
# on two GPUs with batches of 512 at twice the rate. So the batch has changed together with the
# number of devices. *Does a second device bring the same training sooner, or a different training?*
#
# > **What you'll do:** build a ResNet-18 as one graph, train a narrow one on one device and on two,
# > with the same batch and with twice the batch, and compare the graph with d2l's.
# >
# > **What you'll learn:** what a residual block computes; how to see that a network is one graph;
# > how to compare training runs on different numbers of devices.
# >
# > **What you need:** chapters 04 to 06. No GPU. Reading takes {reading time}, running about two
# > minutes on two idle cores.
#
# ![One image, 28 by 28, passes through a convolution and four stages of two blocks. Stage 1 gives
# 64 channels of 28 by 28, stage 2 128 of 14 by 14, stage 3 256 of 7 by 7, stage 4 512 of 4 by 4;
# their means and a dense layer give ten scores.](src/drawings/resnet_stages.svg)

# %%
import json
from pathlib import Path
from time import perf_counter

import helpers
from helpers import networks, your_turn
from helpers.compare import largest_difference
from helpers.timing import in_turns, print_times, spread
from helpers.training import Batches, fit

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init, nd
from mxnet.gluon import nn

three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]  # simulated
pair = three[:2]

# %% [markdown]
# ## It trains
#
# The data are images of MNIST with their mean subtracted, as in chapter 04. We keep whole batches
# only, by chapter 06's rule.

# %% tags=["measured", "few:limit=4096=>limit=1024"]
two = helpers.devices(2)  # two GPUs, if there are
data = helpers.load_data("mnist", limit=4096)
print(data)

n = len(data.train_images) // 512 * 512
train_images = data.train_images[:n] - data.train_images.mean()  # [n, 1, 28, 28]
train_labels = data.train_labels[:n]

# %% [markdown]
# With a quarter of the channels ResNet-18 trains while you wait. We call this network *narrow*, and
# take it from `helpers` for now. Only one line is new, `hybridize`.

# %%
def narrow_resnet18(devices, seed):
    mx.random.seed(seed)  # the same seed, the same start
    net = networks.hybrid_resnet18(10, channels=(16, 32, 64, 128))
    net.initialize(init.Normal(0.01), ctx=devices)
    net.hybridize(static_alloc=True, static_shape=True)  # NEW
    return net

# %% [markdown]
# `Batches`, a helper, gives one batch after the other, in a random order that is the same in each
# run. `fit` is chapter 06's loop.

# %% tags=["measured", "trains"]
narrow = narrow_resnet18(two, seed=0)
trainer = gluon.Trainer(narrow.collect_params(), "sgd", {"learning_rate": 0.1})
history = fit(narrow, trainer, Batches(train_images, train_labels, 64), two, title="narrow")

print(f"loss, first ten batches: {np.mean(history.losses[:10]):.2f}")
print(f"loss, last ten batches:  {np.mean(history.losses[-10:]):.2f}")

# %% [markdown]
# The loss falls.
#
# ## A residual block
#
# What is in this network? A block adds a *change* to its input. Deep networks learn better that way
# (He et al., 2015, section 4). Its norms are **batch normalisation** (*BatchNorm*). In training
# this brings each channel to mean 0 and variance 1, by the mean and the variance of the *batch*,
# and then scales and shifts it by numbers that are learned.
#
# ![The input goes two ways. One way: convolution, norm, ReLU, convolution, norm; this is the
# change. Beside it: nothing, or a 1 by 1 convolution where shapes differ. Both are added, then
# ReLU.](src/drawings/residual_block.svg)
#
# Where a block halves the image and doubles the channels, the input needs the new shape, too. A 1×1
# convolution, its *projection*, gives it that. (The shapes in the picture are those of the first
# block of stage 2.) In Gluon a block is a class:

# %%
class HybridResidual(nn.HybridBlock):
    def __init__(self, channels, strides=1, project=False, norm=nn.BatchNorm):
        super().__init__()
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=strides, padding=1)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.projection = None
        if project:
            self.projection = nn.Conv2D(channels, kernel_size=1, strides=strides)
        self.norm1 = norm()
        self.norm2 = norm()

    def hybrid_forward(self, F, x):
        change = F.relu(self.norm1(self.conv1(x)))
        change = self.norm2(self.conv2(change))
        if self.projection is not None:
            x = self.projection(x)
        return F.relu(x + change)


block = HybridResidual(128, strides=2, project=True)
block.initialize()
two_images = nd.random.uniform(shape=(2, 64, 28, 28))  # as stage 1 leaves them
print("from", two_images.shape, "to", block(two_images).shape)

# %% [markdown]
# A `HybridBlock` is a `Block` that can be hybridised. Its `hybrid_forward` has one more argument,
# `F`, the module from which it takes operators. Here `F` is `nd`. In a network that is
# hybridised it is another, as *One graph* shows.
#
# ## The network
#
# The first block of stages 2, 3 and 4 has stride 2 and a projection. The name's 18 are one
# convolution, sixteen in blocks, and one dense layer; the three projections aren't counted. (`norm`
# is an argument so that we can leave the norms out.) The standard ResNet-18 begins with a 7×7
# convolution of stride 2 and max pooling; ours begins with a 3×3 convolution of stride 1 and no
# pooling, because the images are small.

# %%
def hybrid_resnet18(num_classes, channels=(64, 128, 256, 512), norm=nn.BatchNorm):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1))
    net.add(norm())
    net.add(nn.Activation("relu"))
    for width, strides in zip(channels, [1, 2, 2, 2]):
        net.add(HybridResidual(width, strides, project=strides > 1, norm=norm))
        net.add(HybridResidual(width, norm=norm))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(num_classes))
    return net

# %% [markdown]
# Which shapes pass through it at full width? And how many numbers are trained?

# %%
mx.random.seed(1)
full = hybrid_resnet18(10)
full.initialize(init.Xavier())
eight_images = nd.array(train_images[:8])

output = eight_images
for layer in full:
    output = layer(output)
    print(f"{type(layer).__name__:15} {output.shape}")

trained = 0
for parameter in full.collect_params().values():
    if parameter.grad_req != "null":  # BatchNorm keeps some numbers that aren't trained
        trained += parameter.data().size
print(f"{trained:,} numbers are trained")

# %% [markdown]
# From the same random numbers the helper's network computes the same:

# %%
mx.random.seed(1)
kept = networks.hybrid_resnet18(10)
kept.initialize(init.Xavier())
print("equal:", largest_difference(kept(eight_images), full(eight_images)) == 0)

# %% [markdown]
# ## One graph
#
# Without `hybridize`, Python runs each line of `hybrid_forward` in each call, and hands MXNet's
# engine one operator at a time. `hybridize`, which we called on the narrow network above, changes
# that.
#
# This layer prints what it is given. **Predict:** what does it print in two calls before
# `hybridize`, and in three after it?

# %% tags=["predict"]
class Telling(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        print("   hybrid_forward got:", type(x).__name__)
        return F.relu(x)


telling = Telling()
print("before:")
for call in range(2):
    telling(two_images)

telling.hybridize()
print("after:")
for call in range(3):
    telling(two_images)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Before, an `NDArray` in each call. After, a `Symbol`, once: the other two calls ran no line of
# `hybrid_forward`.
#
# </details>
#
# In the first call after `hybridize` Gluon runs `hybrid_forward` with **symbols** instead of
# arrays, and `F` is `mx.sym`, whose operators compute nothing. They note what is to be computed
# from what. These notes are the **graph**, which from then on runs as a whole. (So a `print` or an
# `if` on values has no place in a network that is to be hybridised.)
#
# How can we see that a whole network has become one graph? We look at what `autograd` has recorded
# of a forward pass. It gives the record as text in JSON, with a list of nodes:

# %%
def recorded_operators(net, x):
    with autograd.record():
        scores = net(x)
    record = json.loads(autograd.get_symbol(scores).tojson())
    operators = []
    for node in record["nodes"]:
        operator = node["op"]
        if operator != "null":  # inputs and parameters are "null"
            operators.append(operator)
    return operators


operators = recorded_operators(full, eight_images)
print(len(operators), "operators:", operators[:6], "...")

# %% [markdown]
# These are 20 convolutions, 17 norms, 17 ReLUs, 8 sums, a mean and a dense layer. And now?

# %%
full.hybridize(static_alloc=True, static_shape=True)
print(recorded_operators(full, eight_images))

# %% [markdown]
# One operator, the graph, which MXNet calls `_CachedOp`. **Check the recorded graph of a network
# that you hybridise: it should be one `_CachedOp`.** `static_alloc` keeps its memory from call to
# call. `static_shape` prepares it for inputs whose shape stays the same; another shape is allowed,
# but slower (docstring of `HybridBlock.hybridize`).
#
# What does one graph save? We let 64 images go through the narrow network, one by one:

# %% tags=["fold", "measured", "few:ROUNDS = 9=>ROUNDS = 1"]
# measure: 64 single images, layer by layer, by one graph, and by a static graph
ROUNDS = 9
images = nd.array(train_images[:64], ctx=two[0])

by_layers = narrow_resnet18(two[:1], seed=0)
by_layers.hybridize(False)
one_graph = narrow_resnet18(two[:1], seed=0)
one_graph.hybridize()
static_graph = narrow_resnet18(two[:1], seed=0)


def one_by_one(net):
    for number in range(64):
        net(images[number : number + 1])


contestants = {
    "layer by layer": lambda: one_by_one(by_layers),
    "one graph": lambda: one_by_one(one_graph),
    "one graph, static": lambda: one_by_one(static_graph),
}
print_times(in_turns(contestants, ROUNDS, warm_up=1))

# %% [markdown]
# For single images the graph saves a large part of the time. (These are medians, and in brackets
# the middle half of nine rounds.)
#
# ## The same batch, or twice the batch?
#
# Now to the chapter's question. Here are d2l's settings, for ten epochs of Fashion-MNIST. We take
# MNIST instead, and our runs in full width, below, have two epochs.
#
# | devices | batch | images a device | rate | steps an epoch |
# | --- | --- | --- | --- | --- |
# | 1 | 256 | 256 | 0.1 | 235 |
# | 2 | 512 | 256 | 0.2 | 118 |
#
# With the *same* batch, each of two devices has half as many images (**strong scaling**). d2l keeps
# the number of images per device instead, so that the batch grows with the devices (**weak
# scaling**). Then an epoch has half as many steps, and a higher rate is meant to make up for that
# (the **linear scaling rule**: Goyal et al., 2017).
#
# So d2l's runs differ in three things: the devices, the batch and the rate. We first change the
# number of devices alone, in a quarter of the width and with a quarter of the batch. For that we
# need a loop that does the same on any number of devices.
#
# ### Your turn: the same batch on k devices
#
# Write it before you scroll on, for chapter 06's smallest network: one weight, 100 at the start,
# with the loss weight · image and rate 1. The images of the first batch are 2, 20 and 8, with the
# mean 10, so that its mean loss is 1000 and its step leads to the weight 90. The second batch has
# the mean 3, so its loss is 270, and the weight becomes 87. That must come out on any number of
# devices.

# %% tags=["fold", "your-turn"]
# define: start and weight_on_each_device, as in chapter 06, and the cases for your loop
def start(devices):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(100), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    return net, trainer


def weight_on_each_device(net):
    return [value[0, 0].asscalar() for value in net.weight.list_data()]


some_batches = [nd.array([[2], [20], [8]]), nd.array([[1], [2], [3], [6], [3]])]
cases = [
    ((some_batches, three[:1]), ([1000, 270], [87])),
    ((some_batches, pair), ([1000, 270], [87, 87])),
    ((some_batches, three), ([1000, 270], [87, 87, 87])),
]

# %% tags=["your-turn"]
def train_weight(batches, devices):
    """Begin with `net, trainer = start(devices)`, and make a step with each batch.

    Return a list of the batches' mean losses, and `weight_on_each_device(net)`.
    """
    ...


your_turn(train_weight, cases)

# %% [markdown]
# Ours takes the time of each step, too, and waits for its end:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def train(net, trainer, batches, devices):
    """One epoch. Returns the mean loss and the seconds of each step."""
    losses = []
    seconds = []
    for x, y in batches:
        begin = perf_counter()
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        shard_losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                shard_losses.append(cross_entropy(net(x_shard), y_shard))
        autograd.backward(shard_losses)
        trainer.step(len(x))

        total = 0
        for shard_loss in shard_losses:
            total += shard_loss.sum().asscalar()
        nd.waitall()  # for the update, too
        losses.append(total / len(x))
        seconds.append(perf_counter() - begin)
    return np.array(losses), np.array(seconds)

# %% [markdown]
# With the same batch it should be the same training, except for BatchNorm, which sees a shard
# instead of the batch. Without norms we can test that, in float64 and with 4 to 8 channels. The
# reference is `fit` on one device. The last of three batches is smaller, so that a wrong number in
# `trainer.step` is noticed. Instead of a norm we put an empty `HybridSequential`, which returns
# what it gets.

# %% tags=["fold", "trains"]
# check: without norms, one, two and three devices have the losses and weights of fit
def net_without_norm(devices):
    mx.random.seed(0)
    net = hybrid_resnet18(10, channels=(4, 4, 8, 8), norm=nn.HybridSequential)
    net.cast("float64")
    net.initialize(init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    return net, trainer


# Batches of 32, 32 and 16 images
images = train_images[:80].astype("float64")
batches = Batches(images, train_labels[:80], 32, shuffle=False)

reference, trainer = net_without_norm(three[:1])
history = fit(reference, trainer, batches, three[:1], progress=False)
expected = [param.data() for param in reference.collect_params().values()]

for devices in [three[:1], pair, three]:
    net, trainer = net_without_norm(devices)
    losses, seconds = train(net, trainer, batches, devices)
    assert largest_difference(losses, np.array(history.losses)) < 1e-12
    for device in devices:
        found = [param.data(device) for param in net.collect_params().values()]
        assert largest_difference(found, expected) < 1e-12
    print(f"k = {len(devices)}: the same losses and weights as by fit")

# %% [markdown]
# ### The experiment
#
# Now with BatchNorm, in three settings. The second changes only the number of devices; the third is
# d2l's way, with twice the batch and twice the rate. Each runs from three starts, so that we see
# how much runs differ by their start alone. All see the same images in the same order.

# %% tags=["measured", "trains", "few:IMAGES = 4096=>IMAGES = 512"]
IMAGES = 4096
settings = [
    ("one device, batch 64", two[:1], 64, 0.1),
    ("two devices, batch 64", two, 64, 0.1),
    ("two devices, batch 128", two, 128, 0.2),
]
losses = {}  # of each setting three runs, and of each run one number a step
seconds = {}
for name, devices, size, rate in settings:
    losses[name] = []
    seconds[name] = []
    for seed in [0, 1, 2]:
        net = narrow_resnet18(devices, seed)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
        batches = Batches(train_images[:IMAGES], train_labels[:IMAGES], size)
        run_losses, run_seconds = train(net, trainer, batches, devices)
        losses[name].append(run_losses)
        seconds[name].append(run_seconds)
    print(f"{name}: {len(run_losses)} steps in each run")

# %% [markdown]
# Speed and loss side by side: images a second, their median over the steps and in brackets the
# middle half, and for each run the mean loss of the last 512 images. As in chapter 04, we name a
# winner only if the brackets don't overlap. **Predict:** which setting processes the most images
# per second, and which ends at the lowest loss?

# %% tags=["measured", "predict"]
for name, devices, size, rate in settings:
    # Two steps of each run warm up.
    speeds = np.concatenate([size / run[2:] for run in seconds[name]])
    low, median, high = spread(speeds)
    print(f"{name}: {median:.0f} images/s ({low:.0f} to {high:.0f})")

    steps = 512 // size
    at_the_end = [run[-steps:].mean() for run in losses[name]]
    print("    loss in the end:", np.sort(at_the_end).round(2))

# %% [markdown]
# <details><summary>What came out</summary>
#
# On two quiet cores two devices have more images a second than one, with either batch. With batch
# 64 the losses of one device and those of two overlap. With batch 128 all three are much higher,
# after half as many steps.
#
# </details>
#
# On two devices BatchNorm averages over 32 images instead of 64. That doesn't show here, because
# another start changes the loss as much. (Chapter 09 asks what BatchNorm does.) Here is the loss
# against the clock, for the first start, a point for each 512 images:

# %% tags=["fold", "measured"]
# draw: loss against seconds, a line for each setting
from helpers.plotting import curves, show

lines = {}
for name, devices, size, rate in settings:
    steps = 512 // size
    # A row for each 512 images
    means = losses[name][0].reshape(-1, steps).mean(axis=1)
    # The seconds that have passed at each row's end
    times = seconds[name][0].reshape(-1, steps).sum(axis=1).cumsum()
    lines[name] = (times, means)

fig, ax = curves("Twice the batch and rate end at a higher loss", "seconds",
                 "loss, mean of 512 images", lines)
show(fig, "Loss against seconds in three settings. Both runs with batch 64 end at a low loss; two "
     "devices with batch 128 end at a higher one.")

# %% [markdown]
# So **with the same batch the second device brought the same training sooner. With twice the batch
# it brought a different training**: after the same number of images its loss was higher.
#
# Why then does anybody take larger batches? Because half of a small batch may be too little work to
# keep a device busy (chapter 11). And in a long training run the lost steps can be made up for:
# ImageNet was trained with batches of 8,192 to the accuracy of batches of 256 (Goyal et al., 2017).
#
# We compared with one device that has *one* core. At full width, one device with *both* cores was
# at least as fast as two devices with one core each (`notebooks/src/bench/README.md`). As in
# chapter 04, a CPU device can be made larger, and a GPU can't be. These figures don't say how much
# faster two GPUs are.
#
# ### In full width
#
# At full width an epoch takes minutes, so these two runs, one of each of d2l's settings, are
# stored. Each loss is the mean of 1,536 images, 39 of them an epoch (we leave out the last 96
# images). Only the minutes of whole epochs are stored, so we spread them evenly over the losses.

# %% tags=["fold"]
# define: `lines`, the minutes and losses of both stored runs
stored = json.loads(Path("src/results/resnet18.json").read_text())
print(f"stored runs: {stored['date']}, {stored['machine']}")
labels = {
    "resnet18-1x256": "1 device, batch 256, rate 0.1",
    "resnet18-2x512": "2 devices, batch 512, rate 0.2",
}
lines = {}
for name, label in labels.items():
    first, second = stored["runs"][name][0]  # the two epochs
    means = first["losses"][:39] + second["losses"][:39]
    minutes_of_first = first["seconds"] / 60
    minutes_of_both = minutes_of_first + second["seconds"] / 60
    lines[label] = (np.linspace(0, minutes_of_both, 79)[1:], means)
    print(label)
    print(f"    epoch 1: {first['accuracy']:.1%} of 10,000 test images right, "
          f"after {minutes_of_first:.1f} minutes")
    print(f"    epoch 2: {second['accuracy']:.1%}, after {minutes_of_both:.1f} minutes")

# %% [markdown]
# Two devices had 1.8 times the images a minute. `lines` has each run's minutes and losses.
# **Predict:** which run's loss is below 0.1 first, by images and by minutes?

# %% tags=["predict"]
for label, (minutes, means) in lines.items():
    place = 0
    while means[place] >= 0.1:
        place += 1
    print(f"{label}: below 0.1 first after {(place + 1) * 1536:,} images, "
          f"{minutes[place]:.1f} minutes")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The one-device run, on both counts. The other needed three times as many images, and was only 1.8
# times as fast.
#
# </details>
#
# Here are both curves:

# %% tags=["fold"]
# draw: loss against minutes, a line for each of the stored runs
fig, ax = curves("In full width twice the batch comes down later, and draws level", "minutes",
                 "loss", lines, logy=True)
ticks = [2, 1, 0.5, 0.2, 0.1, 0.05, 0.02]
ax.set_yticks(ticks, ticks)
show(fig, "Loss against minutes, with a logarithmic axis. One device with batch 256 falls at once, "
     "to 0.1 in four minutes. Two devices with batch 512 stay near 2.3 for two minutes, come down "
     "to 0.1 after seven, and from then on the curves are close. Two devices end after 16 minutes, "
     "one device after 28.")

# %% [markdown]
# Batch 512 stalled at the start: for two minutes its loss stayed near 2.3, that of guessing. Later
# the curves cross, and one run of each isn't enough to name a winner. But after one epoch, in 14.2
# minutes, one device had more test images right than two devices after both epochs, in 15.7. Images
# a minute don't show that.
#
# Where a high rate fails at the start, the usual remedy is **warm-up**: the rate begins low, and
# rises in the first epoch or the first few (Goyal et al., 2017, section 2.2). We haven't tried it
# on this network; on LeNet it helped (deeper: Batch, rate and warm-up).
#
# **When you compare device counts, keep the batch fixed, or compare loss curves rather than images
# per second.** (What a training run takes of memory: deeper: Where the memory goes.)

# %% [markdown]
# ## d2l's network
#
# Is `full` d2l's network? With the same parameters, d2l's must give the same scores. It works with
# MXNet's other kind of array, `mx.np`. The folded cell makes d2l's network from our parameters:

# %% tags=["fold"]
# define: d2l_network(our_parameters, images) returns d2l's ResNet-18 and its scores of the images
from d2l import mxnet as d2l


@mx.util.use_np  # in this function Gluon works with mx.np's arrays
def d2l_network(our_parameters, images):
    theirs = d2l.resnet18(10)
    theirs.initialize()
    theirs(images)  # it makes its parameters, now that it knows the shapes
    their_parameters = theirs.collect_params().values()
    for ours, parameter in zip(our_parameters, their_parameters, strict=True):
        parameter.set_data(ours.data().as_np_ndarray())  # an error, if shapes differ
    return theirs, theirs(images)


# %%
np_images = eight_images.as_np_ndarray()
theirs, their_scores = d2l_network(full.collect_params().values(), np_images)
print("scores:", their_scores.shape)
print("equal to 1e-5:", largest_difference(their_scores, full(eight_images)) < 1e-5)

# %% [markdown]
# It is the same network, but d2l's blocks are plain `Block`s, not `HybridBlock`s. We hybridise it,
# too. **Predict:** how many operators are recorded then?

# %% tags=["predict"]
theirs.hybridize(static_alloc=True)
recorded_operators_np = mx.util.use_np(recorded_operators)  # the same, with mx.np's arrays
operators = recorded_operators_np(theirs, np_images)
print(len(operators), "operators, of which", operators.count("_CachedOp"), "are graphs")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Still 64. 40 of them are graphs, but each of a single layer. The other 24 are ReLUs and sums,
# which stand in d2l's Python code.
#
# </details>
#
# No error tells us so: for one graph, every block must be a `HybridBlock`.
#
# d2l takes its devices by `try_gpu(i)` or `try_all_gpus()`. If there are no such GPUs, the first
# gives the CPU, without an error, and the second an empty list:

# %% tags=["measured"]
print(d2l.try_gpu(98), d2l.try_gpu(99), d2l.try_all_gpus())

# %% [markdown]
# So two missing GPUs are one device that is named twice, and d2l's loop loses the first shard's
# gradient (see deeper: MXNet's surprises). **Check that devices differ:**
# `len(set(devices)) == len(devices)`.

# %% [markdown]
# ## Summary
#
# - A residual block adds a change to its input.
# - A network of `HybridBlock`s becomes one graph by `hybridize`; the record shows whether it did.
# - With the same batch a second device brings the same training sooner. With twice the batch and
#   rate it brings a different one, with half as many steps.
# - `d2l.try_gpu(i)` gives `cpu(0)` for each missing GPU: check that devices differ.
#
# Next, chapter 09: why BatchNorm makes two devices differ from one. (The short path goes on with
# chapter 14, in PyTorch: `make setup TORCH=1`.)
#
# **Further reading.** K. He et al., *Deep residual learning* (2015), arXiv:1512.03385; P. Goyal et
# al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677; *Dive into Deep Learning*, Concise
# Implementation for Multiple GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **Batch or rate?** d2l's second run changes both. Run the experiment on two devices with batch
#    128 at rate 0.1, and with batch 64 at rate 0.2. Predict first: which of them is behind?
# 2. **Is it BatchNorm?** The narrow network starts from small weights, and yet learns at once.
#    Train it for 64 steps of 16 images at rate 0.1, with BatchNorm and without a norm.
# 3. **Starting anew.** d2l's loop begins with `net.initialize(..., force_reinit=True)`. Hybridise a
#    small layer with `static_alloc=True` and `static_shape=True`, compute a gradient, start anew,
#    compute it again. What is in it?

# %% [markdown]
# ### Answer to *Your turn*
#
# Shards may be uneven, so each device's losses are added up, and the batch's number of images
# divides once.

# %% tags=["solution", "your-turn"]
def train_weight(batches, devices):
    net, trainer = start(devices)
    means = []
    for x in batches:
        losses = []
        with autograd.record():
            for x_shard in gluon.utils.split_and_load(x, devices, even_split=False):
                losses.append(net(x_shard))
        autograd.backward(losses)
        trainer.step(len(x))
        total = 0
        for loss in losses:
            total += loss.sum().asscalar()
        means.append(total / len(x))
    return means, weight_on_each_device(net)


your_turn(train_weight, cases)

# %% [markdown]
# ### Answer 1
#
# Each of them alone ends behind batch 64 at rate 0.1. Which of the two costs more, three runs each
# don't say.

# %% tags=["solution", "trains", "measured"]
for size, rate in [(128, 0.1), (64, 0.2)]:
    at_the_end = []
    for seed in [0, 1, 2]:
        net = narrow_resnet18(two, seed)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
        batches = Batches(train_images[:IMAGES], train_labels[:IMAGES], size)
        found, _ = train(net, trainer, batches, two)
        at_the_end.append(found[-512 // size :].mean())
    print(f"batch {size:3}, rate {rate}: losses in the end {np.sort(at_the_end).round(2)}")

# %% [markdown]
# ### Answer 2

# %% tags=["solution", "trains", "measured", "few:n = 1024=>n = 640"]
n = 1024
for norm in [nn.BatchNorm, nn.HybridSequential]:
    mx.random.seed(0)
    net = hybrid_resnet18(10, (16, 32, 64, 128), norm)
    net.initialize(init.Normal(0.01), ctx=two)
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    found, _ = train(net, trainer, Batches(train_images[:n], train_labels[:n], 16), two)
    at_the_end = found[-10:].mean()
    print(f"{norm.__name__:16} loss of the last ten batches {at_the_end:.2f}")
    assert (at_the_end < 2.2) == (norm is nn.BatchNorm)

# %% [markdown]
# In these two runs (one seed), yes: without a norm the loss stays where guessing has it, and with
# it the network learns.

# %% [markdown]
# ### Answer 3
#
# `static_shape` also keeps the places of the gradients, and `force_reinit` makes new ones. The
# second gradient goes to the old place, and the new one holds zeros. Nothing raises an error. Each
# weight's gradient is the sum of four ones:

# %% tags=["solution"]
def gradient_after_new_start(layer):
    layer.initialize(init.One(), force_reinit=True)
    with autograd.record():
        total = layer(nd.ones((4, 2))).sum()
    total.backward()
    return layer.weight.grad().max().asscalar()


layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True, static_shape=True)
print("first and second start:", gradient_after_new_start(layer), gradient_after_new_start(layer))

layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True)
print("without static_shape:  ", gradient_after_new_start(layer), gradient_after_new_start(layer))

# %% [markdown]
# So hybridise once more after each `force_reinit`, or make a new network, as `narrow_resnet18`
# does.
