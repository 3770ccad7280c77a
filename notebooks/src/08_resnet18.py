# %% [markdown]
# # 08 · ResNet-18
#
# *Dive into Deep Learning* (d2l) trains ResNet-18 on one GPU with batches of 256 images, and then
# on two GPUs with batches of 512 at twice the rate. So the batch has changed together with the
# number of devices. *Does a second device bring the same training sooner, or a different training?*
#
# > **What you'll do:** build a ResNet-18 as one graph, and train a narrow one on one device and on
# > two, with the same batch and with twice the batch.
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

import helpers
from helpers import networks, your_turn
from helpers.compare import largest_difference
from helpers.plotting import curves, show
from helpers.training import Batches, fit

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init, nd
from mxnet.gluon import nn

# %% [markdown]
# ## It trains
#
# The data are images of MNIST with their mean subtracted, as in chapter 04. We keep whole batches
# only, by chapter 06's rule.

# %% tags=["measured", "few:limit=4096=>limit=1024"]
two = helpers.devices(2)  # two GPUs, if there are
data = helpers.load_data("mnist", limit=4096)
print(data)

n = len(data.train_images) // 512 * 512  # whole batches of 64, and of 128
train_images = data.train_images[:n] - data.train_images.mean()
train_labels = data.train_labels[:n]
print("images:", train_images.shape)

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
# run. `fit` is chapter 06's loop: it splits each batch among the devices.

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
# convolution, its *projection*, gives it that. In Gluon a block is a class. Ours is a
# `HybridBlock`, that is, a `Block` that can be hybridised. Its forward pass is `hybrid_forward`,
# whose argument `F` isn't needed here.

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
        self.relu = nn.Activation("relu")

    def hybrid_forward(self, F, x):
        change = self.conv1(x)
        change = self.norm1(change)
        change = self.relu(change)
        change = self.conv2(change)
        change = self.norm2(change)
        if self.projection is not None:
            x = self.projection(x)
        return self.relu(x + change)

# %% [markdown]
# We try it with the shapes of the picture, those of the first block of stage 2:

# %%
block = HybridResidual(128, strides=2, project=True)
block.initialize()
two_images = nd.random.uniform(shape=(2, 64, 28, 28))
print("from", two_images.shape, "to", block(two_images).shape)

# %% [markdown]
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
    net.add(HybridResidual(channels[0], norm=norm))
    net.add(HybridResidual(channels[0], norm=norm))
    for width in channels[1:]:
        net.add(HybridResidual(width, strides=2, project=True, norm=norm))
        net.add(HybridResidual(width, norm=norm))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(num_classes))
    return net

# %% [markdown]
# Which shapes pass through it at full width? Eight images go through one layer after the other:

# %%
mx.random.seed(1)
full = hybrid_resnet18(10)
full.initialize(init.Xavier())

eight_images = nd.array(train_images[:8])
output = eight_images
for layer in full:
    output = layer(output)
    print(output.shape, type(layer).__name__)

# %% [markdown]
# These are the shapes of the first picture. Is it the network of `helpers`, which we trained above?
# And is it d2l's? With the same parameters all three must compute the same scores. The folded cell
# gives d2l's network our parameters. (d2l works with MXNet's other kind of array, `mx.np`.)

# %% tags=["fold"]
# define: d2l_scores(our_parameters, images), the scores of d2l's ResNet-18 with our parameters
from d2l import mxnet as d2l


@mx.util.use_np  # in this function Gluon works with mx.np's arrays
def d2l_scores(our_parameters, images):
    images = images.as_np_ndarray()
    theirs = d2l.resnet18(10)
    theirs.initialize()
    theirs(images)  # it makes its parameters, now that it knows the shapes
    their_parameters = theirs.collect_params().values()
    for ours, parameter in zip(our_parameters, their_parameters, strict=True):
        parameter.set_data(ours.data().as_np_ndarray())  # an error, if shapes differ
    return theirs(images)


# %%
scores = full(eight_images)

mx.random.seed(1)  # the same random numbers as ours
kept = networks.hybrid_resnet18(10)
kept.initialize(init.Xavier())
print("equal to helpers':", largest_difference(kept(eight_images), scores) == 0)

their_scores = d2l_scores(full.collect_params().values(), eight_images)
print("equal to d2l's, to 1e-5:", largest_difference(their_scores, scores) < 1e-5)

# %% [markdown]
# All three are the same network.
#
# One warning, if you run d2l's own code. It takes its devices by `try_gpu(i)`, which gives the CPU
# if there is no such GPU:

# %% tags=["measured"]
print(d2l.try_gpu(98), d2l.try_gpu(99))

# %% [markdown]
# So two missing GPUs are one device that is named twice. Nothing raises an error, but d2l's loop
# loses the first shard's gradient, as MXNet's tutorial does (deeper: MXNet's surprises). **Check
# that devices differ:** `len(set(devices)) == len(devices)`.
#
# ## One graph
#
# Without `hybridize`, Python runs each line of `hybrid_forward` in each call. `hybridize` changes
# that. To see how, we take a layer that prints what it is given:

# %%
class Telling(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        print("   hybrid_forward got:", type(x).__name__)
        return F.relu(x)


telling = Telling()
numbers = nd.array([-1, 2])
for call in [1, 2]:
    print("call", call)
    telling(numbers)

# %% [markdown]
# In each call it gets an `NDArray`, and `F` is the module `nd`. **Predict:** what does the layer
# print in three more calls, after `hybridize`?

# %% tags=["predict"]
telling.hybridize()
for call in [3, 4, 5]:
    print("call", call)
    telling(numbers)

# %% [markdown]
# <details><summary>What came out</summary>
#
# In call 3 the layer prints that it got a `Symbol`. In calls 4 and 5 it prints nothing, because
# they run no line of `hybrid_forward`.
#
# </details>
#
# In the first call after `hybridize` Gluon runs `hybrid_forward` with **symbols** instead of
# arrays, and `F` is `mx.sym`, whose operators compute nothing. They note what is to be computed
# from what. These notes are the **graph**, which from then on runs as a whole. (So a `print` or an
# `if` on values has no place in a network that is to be hybridised.)
#
# How can we see that a whole network has become one graph? We look at what `autograd` has recorded
# of a forward pass. It gives the record as text in JSON, with a list of nodes. Each node has the
# name of its operator:

# %%
def recorded_operators(net, x):
    with autograd.record():
        scores = net(x)
    record = json.loads(autograd.get_symbol(scores).tojson())
    operators = []
    for node in record["nodes"]:
        if node["op"] != "null":  # inputs and parameters are "null"
            operators.append(node["op"])
    return operators


print(recorded_operators(block, two_images))

# %% [markdown]
# These are the eight operators of the picture of a block: three convolutions, two norms, two ReLUs
# and the sum. And in a network that is hybridised?

# %%
block.hybridize()
print("block:         ", recorded_operators(block, two_images))

images = nd.array(train_images[:8], ctx=two[0])
print("narrow network:", recorded_operators(narrow, images))

# %% [markdown]
# One operator, the graph, which MXNet calls `_CachedOp`. **Check the recorded graph of a network
# that you hybridise: it should be one `_CachedOp`.** For that, every block must be a `HybridBlock`.
# d2l's blocks are plain `Block`s. There `hybridize` raises no error, but it only hybridises the
# layers within, each by itself (`Block.hybridize` in `gluon/block.py`).
#
# The narrow network has two options besides, for speed: `static_alloc` keeps the graph's memory
# from call to call, and `static_shape` prepares it for inputs of one shape. Another shape is
# allowed, but slower (docstring of `HybridBlock.hybridize`).
#
# ## The same batch, or twice the batch?
#
# Now to the chapter's question. Here are d2l's settings:
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
# number of devices alone.
#
# ### The same batch, without norms
#
# With the same batch it should be the same training, except for BatchNorm, which sees a shard
# instead of the batch. So we first leave the norms out: an empty `HybridSequential`, which returns
# what it gets, takes the place of each. We compute in float64, so that rounding is small, and with
# 4 to 8 channels.

# %%
def losses_without_norm(devices):
    mx.random.seed(0)
    net = hybrid_resnet18(10, channels=(4, 4, 8, 8), norm=nn.HybridSequential)
    net.cast("float64")
    net.initialize(init.Xavier(), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    batches = Batches(train_images[:128].astype("float64"), train_labels[:128], 32)
    history = fit(net, trainer, batches, devices, progress=False)
    return history.losses

# %% [markdown]
# It takes four steps with batches of 32 images. On one device and on two:

# %% tags=["measured", "trains"]
on_one = losses_without_norm(two[:1])
on_two = losses_without_norm(two)
for step in range(4):
    print(f"step {step}: loss {on_one[step]:.10f} on one device, {on_two[step]:.10f} on two")
assert np.allclose(on_one, on_two, rtol=1e-12)

# %% [markdown]
# The losses are the same. So two devices train like one, as long as no layer looks at the other
# images of its shard, or draws random numbers (Dropout, chapter 06).
#
# ### The experiment
#
# Now with BatchNorm, on the narrow network, in three settings. Compared with the first, the second
# changes only the number of devices. The third is d2l's way, with twice the batch and twice the
# rate.

# %%
def train_narrow(devices, size, rate, seed):
    """One epoch from a start of its own."""
    net = narrow_resnet18(devices, seed)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
    batches = Batches(train_images, train_labels, size)
    return fit(net, trainer, batches, devices, progress=False)

# %% [markdown]
# Each setting runs from three starts, so that we see how much runs differ by their start alone. All
# runs see the same images in the same order.

# %% tags=["measured", "trains"]
one_64 = []  # three runs with one device and batches of 64
two_64 = []
two_128 = []
for seed in [0, 1, 2]:
    one_64.append(train_narrow(two[:1], 64, 0.1, seed))
    two_64.append(train_narrow(two, 64, 0.1, seed))
    two_128.append(train_narrow(two, 128, 0.2, seed))

print("steps with batches of 64:", len(two_64[0].losses))
print("steps with batches of 128:", len(two_128[0].losses))

# %% [markdown]
# We look at speed and loss side by side. For each of the three runs we print the images per second,
# and the mean loss of the last 512 images. We name a winner only if all three runs of a setting are
# better than all three of another. **Predict:** which setting processes the most images per second,
# and which ends at the lowest loss?

# %% tags=["measured", "predict"]
def print_runs(name, runs, size):
    speeds = []
    losses = []
    steps = 512 // size  # for 512 images
    for history in runs:
        images_per_second = history.rate[0]  # in the first epoch
        speeds.append(images_per_second)
        losses.append(np.mean(history.losses[-steps:]))
    print(name)
    print("    images per second:", np.sort(speeds).round())
    print("    loss at the end:  ", np.sort(losses).round(2))


print_runs("one device, batch 64", one_64, 64)
print_runs("two devices, batch 64", two_64, 64)
print_runs("two devices, batch 128", two_128, 128)

# %% [markdown]
# <details><summary>What came out</summary>
#
# On two quiet cores two devices have more images per second than one, with either batch. With batch
# 64 the losses of one device and those of two overlap. In these runs all three losses with batch
# 128 are much higher, after half as many steps.
#
# </details>
#
# On two devices BatchNorm averages over 32 images instead of 64. That doesn't show here, because
# another start changes the loss as much. (Chapter 09 asks what BatchNorm does.)
#
# Here is the loss against the clock, for the first start, with a point for each 512 images. (A
# run's seconds are spread evenly over its steps.)

# %% tags=["fold", "measured"]
# draw: loss against seconds, a line for each setting
def per_512_images(history, size):
    steps = 512 // size
    means = np.reshape(history.losses, (-1, steps)).mean(axis=1)
    seconds = history.seconds[0] * np.arange(1, len(means) + 1) / len(means)
    return seconds, means


lines = {
    "one device, batch 64": per_512_images(one_64[0], 64),
    "two devices, batch 64": per_512_images(two_64[0], 64),
    "two devices, batch 128": per_512_images(two_128[0], 128),
}
fig, ax = curves("Loss against time in the three settings", "seconds",
                 "loss, mean of 512 images", lines)
show(fig, "Loss against seconds in three settings. Both runs with batch 64 end at a low loss; two "
     "devices with batch 128 end at a higher one.")

# %% [markdown]
# So **with the same batch the second device brought the same training sooner** (but for BatchNorm,
# whose effect is too small to be seen here). **With twice the batch it brought a different
# training**: after the same number of images its loss was higher.
#
# Why then does anybody take larger batches? Because with half of a small batch each device may
# spend more time on communication than on computing (chapter 11). And in a long training run the
# lost steps can be made up for: ImageNet was trained with batches of 8,192 to the accuracy of
# batches of 256 (Goyal et al., 2017). (These speeds are those of CPU cores. They don't say how much
# faster two GPUs are than one.)
#
# ### In full width
#
# And d2l's own settings? At full width an epoch takes minutes, so one run of each on MNIST is
# stored. We take their first epochs:

# %%
stored = json.loads(Path("src/results/resnet18.json").read_text())
runs = stored["runs"]  # for each setting a list of runs; a run is a list of epochs
run_of_one = runs["resnet18-1x256"][0]  # one device, batch 256, rate 0.1
run_of_two = runs["resnet18-2x512"][0]  # two devices, batch 512, rate 0.2
one_256 = run_of_one[0]  # the first epoch
two_512 = run_of_two[0]

print(stored["machine"])
print(f"one device, batch 256:  {one_256['seconds'] / 60:4.1f} minutes")
print(f"two devices, batch 512: {two_512['seconds'] / 60:4.1f} minutes")

# %% [markdown]
# Two devices were 1.8 times as fast. Did they also learn sooner? The losses of the epoch are
# stored, too, each as the mean of 1,536 images. So we can ask how many images a run took until its
# loss was low.
#
# ### Your turn: how many images?
#
# Write it before you scroll on. Each loss is the mean of `size` images. In the first case the third
# loss is the first below 1, and until then there were 3 · 64 = 192 images.

# %% tags=["your-turn"]
def images_until(losses, size, limit):
    """The number of images up to the first loss below `limit`, its own images included."""
    ...


cases = [
    (([2.3, 1.5, 0.9, 1.1, 0.8], 64, 1), 192),
    (([2.3, 1.5, 0.9, 1.1, 0.8], 128, 2), 256),
    (([0.5, 0.4], 10, 1), 10),
]
your_turn(images_until, cases)

# %% [markdown]
# Here is ours:

# %%
def count_images(losses, size, limit):
    images = 0
    for loss in losses:
        images += size
        if loss < limit:
            return images

# %% [markdown]
# We ask both stored runs for a loss below 0.1. (An epoch has 60,000 images, and we spread its
# minutes evenly over them.) **Predict:** which run is there first, by images and by minutes?

# %% tags=["predict"]
def print_first_below(limit, name, epoch):
    images = count_images(epoch["losses"], 1536, limit)
    minutes = epoch["seconds"] / 60 * images / 60_000
    print(f"{name} below {limit} after {images:,} images, {minutes:.1f} minutes")


print_first_below(0.1, "one device, batch 256: ", one_256)
print_first_below(0.1, "two devices, batch 512:", two_512)

# %% [markdown]
# <details><summary>What came out</summary>
#
# One device is there first, on both counts. Two devices needed three times as many images, and were
# only 1.8 times as fast.
#
# </details>
#
# Images per minute alone don't show this. (One run of each can't say how large the difference is in
# other runs.) Where a high rate fails at the start, the usual remedy is **warm-up**: the rate
# begins low, and rises in the first epoch or the first few (Goyal et al., 2017, section 2.2; see
# deeper: Batch, rate and warm-up).
#
# **When you compare device counts, keep the batch fixed, or compare loss curves rather than images
# per second.** (How much memory a training run takes: deeper: Where the memory goes.)

# %% [markdown]
# ## Summary
#
# - A residual block adds a change to its input.
# - A network of `HybridBlock`s becomes one graph by `hybridize`; the record shows whether it did.
# - With the same batch a second device brings the same training sooner (but for BatchNorm, chapter
#   09). With twice the batch and
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
#    128 at rate 0.1, and with batch 64 at rate 0.2. Predict first: which of the two ends behind
#    batch 64 at rate 0.1?
# 2. **Is it BatchNorm?** The narrow network starts from small weights, and yet learns at once.
#    Train it for 64 steps of 16 images at rate 0.1, with BatchNorm and without a norm.

# %% [markdown]
# ### Answer to *Your turn*
#
# Images are counted before the loss is looked at, because a loss's own images belong to it.

# %% tags=["solution", "your-turn"]
def images_until(losses, size, limit):
    images = 0
    for loss in losses:
        images += size
        if loss < limit:
            return images


your_turn(images_until, cases)

# %% [markdown]
# ### Answer 1
#
# Each of them alone ends behind batch 64 at rate 0.1. Which of the two costs more, three runs each
# don't say.

# %% tags=["solution", "trains", "measured"]
larger_batch = []
higher_rate = []
for seed in [0, 1, 2]:
    larger_batch.append(train_narrow(two, 128, 0.1, seed))
    higher_rate.append(train_narrow(two, 64, 0.2, seed))

print_runs("batch 128, rate 0.1", larger_batch, 128)
print_runs("batch 64, rate 0.2", higher_rate, 64)

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
    batches = Batches(train_images[:n], train_labels[:n], 16)
    history = fit(net, trainer, batches, two, progress=False)
    at_the_end = np.mean(history.losses[-10:])
    print(f"{norm.__name__:16} loss of the last ten batches {at_the_end:.2f}")
    assert (at_the_end < 2.2) == (norm is nn.BatchNorm)

# %% [markdown]
# In these two runs (one seed), yes: without a norm the loss stays where guessing has it, and with
# it the network learns.
