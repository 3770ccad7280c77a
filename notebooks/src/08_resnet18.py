# %% [markdown]
# # 08 · ResNet-18
#
# ResNet-18 turns an image into ten scores, in four stages:
#
# ![One image, 28 by 28, passes through a convolution and four stages of two blocks. Stage 1 gives
# 64 channels of 28 by 28, stage 2 128 of 14 by 14, stage 3 256 of 7 by 7, stage 4 512 of 4 by 4;
# their means and a dense layer give ten scores.](src/drawings/resnet_stages.svg)
#
# *Dive into Deep Learning* (d2l) trains it on one GPU with batches of 256, and on two with batches
# of 512. What does the second device bring?
#
# > **What you'll do:** build the network, make it one graph, train a narrow version, and read
# > stored runs of the whole.
# >
# > **What you'll learn:** what a residual block computes, and which shapes pass through the
# > network; how to turn a network into one graph, and how to see that it happened; what d2l's
# > settings did on two devices, by time and by images, and two traps in its loop.
# >
# > **What you need:** chapter 06, no GPU, and 4 GB of free memory. Reading takes {reading time},
# > running about a minute on two idle cores.
#
# d2l works with MXNet's second kind of array, `mx.np`, which follows NumPy. So in this chapter and
# the next some names change, as the comments say; `.context`, `as_in_context` and `.asscalar()`
# become `.ctx`, `as_in_ctx` and `.item()`. `npx.set_np()` makes Gluon use such arrays.

# %%
import json

import helpers
from helpers import load_data
from helpers.compare import largest_difference
from helpers.training import Batches, accuracy

import mxnet as mx
import numpy as onp  # NumPy itself
from d2l import mxnet as d2l
from mxnet import autograd, gluon, init
from mxnet import np, npx  # arrays of MXNet's (so far: nd), and operators that NumPy lacks
from mxnet.gluon import nn

npx.set_np()

# %% tags=["fold"]
# check: what arrays of mx.np can do; they don't mix with those of mx.nd, the first kind
def refused(kind, action):
    try:
        action()
    except kind:
        return True
    return False


pair = [mx.cpu(0), mx.cpu(1)]  # for checks that must come out the same everywhere
a = np.ones((2, 3))
assert a.sum().shape == () and np.zeros((0, 3)).size == 0 and a[a > 0].shape == (6,)
assert np.array([1.0, 2.0]).dtype == np.arange(3).dtype == onp.float32
assert refused(TypeError, lambda: a + mx.nd.ones((2, 3))), "nd and np arrays must not mix"
a.as_nd_ndarray()[:] = 5
assert (a == 5).all(), "another name for the same memory, not a copy"

# %% [markdown]
# Images are centred, as in chapter 04. There are 9,633, so the last batch of 64 is smaller, and
# odd: two devices get 17 and 16.

# %% tags=["measured"]
two = helpers.devices(2)  # two GPUs, or else simulated devices

data = load_data("mnist", limit=9_633)
mean = data.train_images.mean()
train_images = data.train_images - mean  # [n, 1, 28, 28]
train_labels = data.train_labels
test_images = data.test_images[:2000] - mean  # 2,000 are enough here
test_labels = data.test_labels[:2000]
print(data)
print("the last batch of 64 has", len(train_images) % 64, "images")

# %% [markdown]
# ## A residual block
#
# A block adds a *change* to its input. Deep networks learn better that way (He et al., 2015,
# section 4).
#
# ![The input goes two ways. One way: convolution, norm, ReLU, convolution, norm; this is the
# change. Beside it: nothing, or a 1 by 1 convolution where shapes differ. Both are added, then
# ReLU.](src/drawings/residual_block.svg)
#
# Where a block halves the image and doubles the channels, a 1×1 convolution, its *projection*,
# does so to the input. *Norm* is BatchNorm. In training it brings each channel of the batch to mean
# 0 and variance 1, then scales and shifts it. Outside training, as here, it uses *running* means
# and variances of earlier batches. The first block of stage 2:

# %%
conv1 = nn.Conv2D(128, kernel_size=3, strides=2, padding=1)
conv2 = nn.Conv2D(128, kernel_size=3, padding=1)
projection = nn.Conv2D(128, kernel_size=1, strides=2)
norm1 = nn.BatchNorm()
norm2 = nn.BatchNorm()
for layer in [conv1, conv2, projection, norm1, norm2]:
    layer.initialize()

x = np.random.uniform(size=(2, 64, 28, 28))  # two images, as stage 1 leaves them
change = norm1(conv1(x))
change = npx.activation(change, act_type="relu")
change = norm2(conv2(change))
print("the change:          ", change.shape)
projected = projection(x)
print("the input, projected:", projected.shape)
by_hand = npx.activation(projected + change, act_type="relu")

# %% [markdown]
# A `HybridBlock` puts the same steps into a class. `hybrid_forward` also gets `F`, the module from
# which it takes operators: `npx.activation` becomes `F.npx.activation`. Here `F` is `mx.nd`, whose
# operators compute. In *One graph* it will be another.

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
        change = self.norm1(self.conv1(x))
        change = F.npx.activation(change, act_type="relu")
        change = self.norm2(self.conv2(change))
        if self.projection is not None:
            x = self.projection(x)
        return F.npx.activation(x + change, act_type="relu")

# %% tags=["fold"]
# check: with the layers from above, the class gives the numbers that we got by hand
block = HybridResidual(128, strides=2, project=True)
block.conv1, block.conv2, block.projection = conv1, conv2, projection
block.norm1, block.norm2 = norm1, norm2
print("block:", block(x).shape)
print("class and by hand differ by", float(largest_difference(block(x), by_hand)))
assert largest_difference(block(x), by_hand) == 0
assert onp.abs(by_hand.asnumpy()).max() > 0.1, "all zeros would show nothing"
for norm in [norm1, norm2]:  # fresh ones are alike, so that nobody would see them swapped
    norm.gamma.set_data(np.random.uniform(0.5, 1.5, size=128))
    norm.beta.set_data(np.random.uniform(-0.5, 0.5, size=128))
with autograd.train_mode():
    change = norm2(conv2(npx.activation(norm1(conv1(x)), act_type="relu")))
    in_training = npx.activation(projection(x) + change, act_type="relu")
    assert largest_difference(block(x), in_training) == 0, "each norm in its place"
for norm in [norm1, norm2]:  # as they were, so that this cell can be run again
    norm.initialize(force_reinit=True)

# %% [markdown]
# ## The network
#
# The first block of stages 2, 3 and 4 has stride 2 and projects its input. The name's 18 are one
# convolution, sixteen in blocks, and one dense layer; the three projections aren't counted. (`norm`
# is a parameter for exercise 2 and chapter 09.)

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
# Which shapes pass through it? We count the trained parameters; running means and variances have
# the `grad_req` `"null"`. **Predict:** in which stage are most?

# %%
def count_trained(layer):
    count = 0
    for parameter in layer.collect_params().values():
        if parameter.grad_req != "null":
            count += int(onp.prod(parameter.shape))
    return count


net = hybrid_resnet18(10)
net.initialize(init.Xavier())
eight_images = np.array(train_images[:8])

output = eight_images
for layer in net:
    output = layer(output)  # its first call makes the layer's parameters
    name = type(layer).__name__
    shape = str(output.shape)
    print(f"{name:15} {shape:17} {count_trained(layer):10,}")
print(f"all parameters: {count_trained(net):,}")

# %% tags=["fold"]
# check: parameters by formula; three quarters of them are in stage 4
def block_size(a, c):
    """A block from a to c channels: convolutions with bias, scale and shift of two norms."""
    projection = a * c + c if a != c else 0
    return (9 * a * c + c) + (9 * c * c + c) + projection + 2 * (2 * c)


stage_sizes = []
for a, c in [(64, 64), (64, 128), (128, 256), (256, 512)]:
    stage_sizes.append(block_size(a, c) + block_size(c, c))
blocks = [layer for layer in net if isinstance(layer, HybridResidual)]
for stage, size in enumerate(stage_sizes):
    found = count_trained(blocks[2 * stage]) + count_trained(blocks[2 * stage + 1])
    assert found == size, f"stage {stage + 1}: {found} counted, {size} by formula"
stem, dense = (9 * 1 * 64 + 64) + 2 * 64, 512 * 10 + 10
assert count_trained(net) == stem + sum(stage_sizes) + dense == 11_175_818
assert 0.75 < stage_sizes[3] / count_trained(net) < 0.76

# d2l's text says that parameters are initialised only on devices that data passes through. Here
# all images go through cpu(0), and parameters are on both devices, with equal values.
on_pair = hybrid_resnet18(10)
on_pair.initialize(init.Xavier(), ctx=pair)
on_pair(eight_images)
for name, parameter in on_pair.collect_params().items():
    assert parameter.list_ctx() == pair, f"{name} should be on both devices"
    first, second = parameter.list_data()
    assert (first.asnumpy() == second.asnumpy()).all(), f"{name} should have equal replicas"

# %% [markdown]
# Stage 4, the last two blocks, has 8.4 of 11.2 million: with twice the channels a convolution has
# four times the weights. Is it d2l's network, `d2l.resnet18`? With our parameters d2l's (`theirs`)
# must give the same scores:

# %% tags=["fold", "measured"]
# check: with our parameters, d2l's network gives our scores
def copy_parameters(source, target):
    pairs = zip(source.collect_params().values(), target.collect_params().values(), strict=True)
    for parameter, its_copy in pairs:
        its_copy.set_data(parameter.list_data()[0])


theirs = d2l.resnet18(10)
theirs.initialize(ctx=pair)
theirs(eight_images)  # a first pass, so that its shapes are known
copy_parameters(net, theirs)

with autograd.train_mode():  # norms take mean and variance of this batch
    scores = net(eight_images)
    expected = theirs(eight_images)
print("scores:", scores.shape)
print("ours and d2l's differ by", float(largest_difference(scores, expected)))
assert largest_difference(scores, expected) < 1e-5, "not d2l's network"

# %% [markdown]
# ## One graph
#
# Python hands MXNet's engine one operator at a time. How many? The folded function lists what
# `autograd` recorded for the backward pass.

# %% tags=["fold"]
# define: recorded_operators(net, x), what autograd records in a forward pass
def recorded_operators(net, x):
    with autograd.record():
        scores = net(x)
    symbol = autograd.get_symbol(scores)
    nodes = json.loads(symbol.tojson())["nodes"]
    operators = []
    for node in nodes:
        if node["op"] != "null":  # inputs and parameters have no operator
            operators.append(node["op"])
    return operators

# %%
operators = recorded_operators(net, eight_images)
print(len(operators), "operators:", operators[:6], "...")

# %% [markdown]
# 20 convolutions, 17 norms, 17 ReLUs, 8 sums, a mean and a dense layer. After `hybridize`, the
# first pass calls each `hybrid_forward` with the other `F`, `mx.sym`. Its operators only note what
# is to be computed. That makes a graph, which then runs as a whole. (`static_alloc` keeps its
# memory from pass to pass.) **Predict:** how many operators are recorded now?

# %%
net.hybridize(static_alloc=True)
operators = recorded_operators(net, eight_images)
print(len(operators), "operator:", operators)

# %% [markdown]
# One, the graph, which MXNet calls `_CachedOp`. What does that save? We time a forward pass of the
# whole network, and one of a *thin* network, with 4 to 8 channels and a single image:

# %% tags=["fold", "measured"]
# measure: a forward pass, layer by layer and as one graph; the fastest of some tries
import time


def milliseconds(net, x, repeats):
    net(x)
    npx.waitall()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        net(x)
        npx.waitall()
        taken.append(1000 * (time.perf_counter() - begin))
    return min(taken)


forward_ms = {}
for name, channels, n, repeats in [("whole network, 8 images", (64, 128, 256, 512), 8, 4),
                                   ("thin network, 1 image", (4, 4, 8, 8), 1, 20)]:
    timed = hybrid_resnet18(10, channels)
    timed.initialize(init.Xavier())
    by_layer = milliseconds(timed, eight_images[:n], repeats)
    timed.hybridize(static_alloc=True)
    as_graph = milliseconds(timed, eight_images[:n], repeats)
    forward_ms[name] = by_layer, as_graph
    print(f"{name}: layer by layer {by_layer:6.2f} ms, one graph {as_graph:6.2f} ms")
by_layer, as_graph = forward_ms["thin network, 1 image"]
assert as_graph < 0.9 * by_layer, "one graph should save time where there is little to compute"

# %% [markdown]
# The thin network gains: handing over its short operators takes a good part of its time. The whole
# network spends far longer computing, and gains little, if anything.
#
# For one graph every block must be a `HybridBlock`. d2l's are plain `Block`s. Its network can be
# hybridised too, and nothing complains. **Predict:** how many operators are recorded then?

# %%
theirs.hybridize(static_alloc=True)
operators = recorded_operators(theirs, eight_images)
print(len(operators), "operators, of which", operators.count("_CachedOp"), "are graphs")

# %% [markdown]
# Still 64. 40 are graphs, but each of a single layer. The other 24 are ReLUs and sums, in d2l's
# Python code. **Look at the record: it should be one `_CachedOp`.**

# %% tags=["fold"]
# check: one graph for ours; not for d2l's, nor for layers in a plain Sequential; which F there is
import warnings
from collections import Counter


class NotesF(nn.HybridBlock):
    def hybrid_forward(self, F, x):
        modules.append(F)
        return F.npx.relu(x)


modules = []
noting = NotesF()
noting(eight_images)
assert modules == [mx.nd], "before hybridize: operators that compute"
noting.hybridize(static_alloc=True)
noting(eight_images)
noting(eight_images)
assert modules == [mx.nd, mx.sym], "after it: once, operators that note"
assert recorded_operators(net, eight_images) == ["_CachedOp"], "ours is not one graph"
assert len(operators) == 64 and operators.count("_CachedOp") == 40, "d2l's is not one graph"
assert operators.count("_npx_relu") == 16 and operators.count("_npi_add") == 8, "24 others"
loose = nn.Sequential()
for layer in hybrid_resnet18(10, (4, 4, 8, 8)):
    loose.add(layer)
loose.initialize()
recorded = recorded_operators(loose, eight_images)
assert len(recorded) == 64
assert sorted(Counter(recorded).values()) == [1, 1, 8, 17, 17, 20], Counter(recorded)
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    loose.hybridize(static_alloc=True, static_shape=True)
assert "Consider using HybridSequential" in str(warned[0].message), "where all layers could be"
recorded = recorded_operators(loose, eight_images)
assert recorded == ["_CachedOp"] * 13, "a graph for each of 13 layers"
assert refused(ValueError, lambda: nn.HybridSequential().add(d2l.Residual(64)))

# %% [markdown]
# ## Train it
#
# The step is chapter 06's, but `train` returns losses in place of an accuracy. And it tells `step`
# the nominal size, 64, also for the last batch, of 33 images: the last section says why.

# %% tags=["trains"]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def sgd(net, rate):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})


def train(net, trainer, batches, devices):
    """One epoch. Returns the mean loss of each batch."""
    losses = []
    for x, y in batches:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        shard_losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                shard_losses.append(cross_entropy(net(x_shard), y_shard))
        autograd.backward(shard_losses)
        trainer.step(batches.size)  # NEW: nominal, 64; chapter 06 has len(x)
        total = 0
        for shard_loss in shard_losses:  # NEW: a number for each image
            total += float(shard_loss.sum())  # waits, but all work of the step is in the queues
        losses.append(total / len(x))
    return losses

# %% tags=["fold"]
# check: who cuts uneven batches; `accuracy` counts right
x, y = np.zeros((5, 1, 28, 28)), np.zeros(5)
assert refused(ValueError, lambda: d2l.split_batch(x, y, pair)), "5 over 2"
uneven = gluon.utils.split_and_load(x, pair, even_split=False)
assert sorted(len(shard) for shard in uneven) == [2, 3], "unless it may be uneven"
lonely = gluon.utils.split_and_load(x[:1], pair, even_split=False)
assert [len(shard) for shard in lonely] == [1, 0], "in np mode a device may get nothing"

some = test_images[:51]
judge = hybrid_resnet18(10, (4, 4, 8, 8))
mx.random.seed(1)
judge.initialize(init.Xavier(), ctx=pair)
bias = judge(np.array(some)).asnumpy().mean(axis=0)
judge[-1].bias.set_data(judge[-1].bias.data(pair[0]) - np.array(bias))  # no favourite class
labels = judge(np.array(some)).asnumpy().argmax(axis=1).astype("int32")
assert len(set(labels)) > 4, "several classes, or this shows nothing"
labels[:17] = (labels[:17] + 1) % 10  # the first 17 of 51 are wrong now
odd, even = Batches(some, labels, 25, shuffle=False), Batches(some[:50], labels[:50], 10)
assert accuracy(judge, odd, pair) == 34 / 51
assert accuracy(judge, even, pair) == d2l.evaluate_accuracy_gpus(judge, even) == 33 / 50

# %% [markdown]
# With a quarter of the channels, the *narrow* network trains while you wait. The second epoch has a
# lower rate.

# %% tags=["trains"]
mx.random.seed(0)
narrow = hybrid_resnet18(10, channels=(16, 32, 64, 128))
narrow.initialize(init.Normal(0.01), ctx=two)
narrow.hybridize(static_alloc=True)

batches = Batches(train_images, train_labels, 64)
test = Batches(test_images, test_labels, 200, shuffle=False)
trainer = sgd(narrow, rate=0.05)
losses = []

# %% tags=["measured", "trains"]
for epoch in [1, 2]:
    if epoch == 2:
        trainer.set_learning_rate(0.01)
    losses += train(narrow, trainer, batches, two)
    right = accuracy(narrow, test, two)
    print(f"epoch {epoch}: mean loss of the last 20 batches {onp.mean(losses[-20:]):.2f}, "
          f"{right:.1%} of the test images right")

# %% tags=["fold"]
# check: replicas are equal to the bit, the loss has fallen, unseen images are classified
# (by then: a small data set is first trained on further)
from helpers.training import assert_same_parameters

if len(train_images) < 5_000:  # a smaller data set, where MNIST isn't to be had: it needs more
    for rate in [0.05, 0.05, 0.05, 0.05, 0.05, 0.01]:
        trainer.set_learning_rate(rate)
        losses += train(narrow, trainer, batches, two)
assert_same_parameters(narrow)
assert onp.mean(losses[-10:]) < 0.5 * onp.mean(losses[:10]), "the loss should fall"
assert accuracy(narrow, test, two) > 0.8, "hardly trained"

# %% [markdown]
# It learns. (Epoch 1 looks worse than it is: tests use running means and variances, which lag
# behind the weights. With those of each test batch, 96 % were right in a trial.)
#
# Are the steps right? A device's BatchNorm sees only its own shard (chapter 09). So the plain loop
# on one device takes the two shards one after the other:

# %% tags=["fold", "trains"]
# check: `train` gives the weights of a plain loop (a thin network, in float64)
# (and our hybridised blocks train as d2l's)
def thin_of_d2l():
    thin = nn.Sequential()
    thin.add(nn.Conv2D(4, kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    for width, strides in zip([4, 4, 8, 8], [1, 2, 2, 2]):
        thin.add(d2l.Residual(width, use_1x1conv=strides > 1, strides=strides))
        thin.add(d2l.Residual(width))
    thin.add(nn.GlobalAvgPool2D(), nn.Dense(10))
    return thin


def in_float64(net, places, like=None):
    """In float64; initialised in float32 and cast, since Xavier refuses float64 in np mode."""
    net.initialize(init.Xavier(), ctx=places)
    net(np.zeros((8, 1, 28, 28), ctx=places[0]))
    net.cast("float64")
    if like is not None:
        copy_parameters(like, net)
    return net


def weights_of(net, trained_only=True):
    """The parameters of each replica."""
    kept = [p for p in net.collect_params().values() if p.grad_req != "null" or not trained_only]
    by_parameter = [p.list_data() for p in kept]
    replicas = []
    for replica in zip(*by_parameter):
        replicas.append([array.asnumpy() for array in replica])
    return replicas


def plain_loop(net, batches, size, lr, cuts):
    """No Trainer, one device: gradients of the parts of each batch, added, over the nominal size.

    The parts go through the network one by one, since each BatchNorm sees its own shard only.
    Returns the mean loss of each batch.
    """
    mean_losses = []
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    for (x, y), parts in zip(batches, cuts, strict=True):
        totals = [0 for _ in trained]
        batch_loss = 0
        for rows in parts:
            with autograd.record():
                loss = cross_entropy(net(x[rows]), y[rows]).sum()
            loss.backward()
            batch_loss += float(loss)
            totals = [total + p.grad() for total, p in zip(totals, trained)]
        for parameter, total in zip(trained, totals):
            parameter.data()[:] -= lr / size * total
        mean_losses.append(batch_loss / len(y))
    return mean_losses


# 37 images make batches of 16, 16 and 5; the last has shards of 3 and 2.
mx.random.seed(8)
x37, y37 = train_images[:37].astype("float64"), train_labels[:37]
few = Batches(x37, y37, 16, shuffle=False)
origin = in_float64(thin_of_d2l(), pair)
blocks_of_d2l = in_float64(thin_of_d2l(), pair, origin)
hybrid = in_float64(hybrid_resnet18(10, (4, 4, 8, 8)), pair, origin)
alone = in_float64(thin_of_d2l(), pair[:1], origin)
hybrid.hybridize(static_alloc=True, static_shape=True)
returned = [train(each, sgd(each, 0.125), few, pair) for each in (blocks_of_d2l, hybrid)]
mean_losses = plain_loop(alone, few, 16, 0.125, cuts=[
    [slice(0, 8), slice(8, 16)], [slice(0, 8), slice(8, 16)], [slice(0, 3), slice(3, 5)]])
assert recorded_operators(hybrid, few.images[:8].as_np_ndarray()) == ["_CachedOp"], "no graph"
moved = largest_difference(weights_of(origin), weights_of(alone)[0])
assert moved > 1e-3, "the steps must move weights"
in_train = largest_difference(weights_of(blocks_of_d2l), weights_of(alone)[0])
in_blocks = largest_difference(weights_of(hybrid), weights_of(blocks_of_d2l)[0])
assert in_train < 1e-12, "not the plain loop"
for found in returned:
    assert len(found) == 3
    assert largest_difference(onp.array(found), onp.array(mean_losses)) < 1e-12, "other losses"
assert in_blocks < 1e-12, "our block must train as d2l's does"
print("`train` and a plain loop agree to 1e-12:", in_train < 1e-12)

# In predict mode, too, they answer alike: before training, and after three steps.
assert largest_difference(net(eight_images), theirs(eight_images)) < 1e-5, "in predict mode"
assert onp.ptp(net(eight_images).asnumpy(), axis=0).max() > 1e-3, "all the same would show nothing"

# Without `waitall` the running statistics sometimes differed: a Trainer's first step copies them
# from the first device to the others. They are inputs of BatchNorm's backward pass, which changes
# them. With static_shape the engine is told that inputs are only read (CreateEngineOp in
# src/imperative/imperative_utils.h), so the copy may come first. `train` does without: each step
# takes a tenth of the old statistics away, and some dozens of steps later that copy is forgotten.
blocks_of_d2l = in_float64(thin_of_d2l(), pair, origin)
hybrid = in_float64(hybrid_resnet18(10, (4, 4, 8, 8)), pair, origin)
hybrid.hybridize(static_alloc=True, static_shape=True)
for each in (blocks_of_d2l, hybrid):
    trainer = sgd(each, 0.125)
    for x, y in few:
        with autograd.record():
            parts = [cross_entropy(each(a), b) for a, b in zip(
                gluon.utils.split_and_load(x, pair, even_split=False),
                gluon.utils.split_and_load(y, pair, even_split=False))]
        autograd.backward(parts)
        npx.waitall()
        trainer.step(16)
everything, of_d2l = weights_of(hybrid, False), weights_of(blocks_of_d2l, False)
for device, replica, other in zip(pair, everything, of_d2l):
    assert largest_difference(replica, other) < 1e-12, f"running statistics on {device}"
    x = np.array(x37, ctx=device)
    assert largest_difference(hybrid(x), blocks_of_d2l(x)) < 1e-12, f"answers on {device}"

# %% [markdown]
# ## What does the second device bring?
#
# **First, with the same batch:** each device gets half of it. By the check above that is one
# device's training, except that each BatchNorm sees half of the batch. So what should change is the
# time. Here is a step of the whole network with 32 images. **Predict:** how many times as fast are
# two devices?

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 5=>ROUNDS = 1"]
# measure: a step of the whole network with the same 32 images, on one device and on two
from helpers.device import cores
from helpers.timing import Others, in_turns, spread

ROUNDS = 5


def step_of_32(devices):
    whole_net = hybrid_resnet18(10)
    whole_net.initialize(init.Xavier(), ctx=devices)
    whole_net.hybridize(static_alloc=True, static_shape=True)
    trainer = sgd(whole_net, 0.01)
    batch = Batches(train_images[:32], train_labels[:32], 32)
    return lambda: train(whole_net, trainer, batch, devices)


def seconds_of_steps():  # the networks are freed with this function's variables
    contestants = {"one device": step_of_32(two[:1]), "two devices": step_of_32(two)}
    return in_turns(contestants, ROUNDS, quiet=0.05)


with Others() as others:
    times = seconds_of_steps()
for name, seconds in times.items():
    print(f"{name:11}  {1000 * onp.median(seconds):4.0f} ms a step")
same_batch = spread(times["one device"] / times["two devices"])
if same_batch.low > 1.1:
    verdict = "the second device saves time with the same batch"
else:
    verdict = "this run doesn't show that time is saved"
print(f"{same_batch.median:.2f} times as fast (middle half {same_batch.low:.2f} to "
      f"{same_batch.high:.2f}): {verdict}")
if two[0].device_type == "cpu" and cores() >= 2 and ROUNDS > 1 and others.share <= 0.05:
    assert same_batch.low > 1.1, "two devices should be faster with the same batch"

# %% [markdown]
# Devices are CPU cores here; **on GPUs** numbers will differ. (Why not 2? See deeper: What the
# second device brings.)
#
# **Second, with twice the batch,** as in d2l: one device gets batches of 256 and rate 0.1, two get
# 512 and rate 0.2. Each device has 256 images a step in both, but this is *another training*: half
# as many steps, and a higher rate. One run of each, two epochs of MNIST from the same start, is
# stored.

# %% tags=["fold"]
# measure: how long the stored runs took
from pathlib import Path


def load_results(name):
    """What `make reproduce` has stored. It says on what machine, and at which commit."""
    stored = json.loads(Path(f"src/results/{name}.json").read_text())
    print(f"stored runs: {stored['date']}, {stored['machine']}")
    return stored["runs"]


full = load_results("resnet18")
names = {"resnet18-1x256": "1 device, batch 256", "resnet18-2x512": "2 devices, batch 512"}
minutes = {}
for name, label in names.items():
    (epochs,) = full[name]  # one run
    minutes[name] = sum(epoch["seconds"] for epoch in epochs) / 60
    print(f"{label}: two epochs took {minutes[name]:.1f} min")
    assert max(epoch["others"] for epoch in epochs) < 0.05, "other programs took much of the time"
ratio = minutes["resnet18-1x256"] / minutes["resnet18-2x512"]
assert round(ratio, 1) == 1.8

# %% [markdown]
# Two devices get through the images 1.8 times as fast. Both runs were tested after the same numbers
# of images. **Predict:** which has fewer wrong answers after the same number of images? And after
# the same number of minutes?

# %% tags=["fold"]
# draw: wrong answers on 1,000 test images, against minutes and against images
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, ORANGE, show


def course(epochs):
    """Images seen, minutes, and % of 1,000 test images right, at each stored check.

    The last two of an epoch are before and after its last small batch: the first is left out.
    """
    images, minutes_so_far, right, seconds = [], [], [], 0
    for number, epoch in enumerate(epochs):
        for part in epoch["parts"]:
            seconds += part["seconds"]
            if part["images"] != 59_904:
                images.append(60_000 * number + part["images"])
                minutes_so_far.append(seconds / 60)
                right.append(100 * part["accuracy"])
    return onp.array(images), onp.array(minutes_so_far), onp.array(right)


fig, axes = plt.subplots(1, 2, figsize=(7.0, 3.4), sharey=True, layout="constrained")
for (name, label), color, style in zip(names.items(), [BLUE, ORANGE], ["o-", "s--"]):
    images, minutes_so_far, right = course(full[name][0])
    axes[0].plot(minutes_so_far, 100 - right, style, color=color, ms=4, label=label)
    axes[1].plot(images / 1000, 100 - right, style, color=color, ms=4, label=label)
axes[0].set(yscale="log", ylim=(0.5, 100), xlim=(0, 16), ylabel="% of 1,000 test images wrong")
axes[0].set_xlabel("minutes (one device goes on to 28)")
axes[0].set_yticks([1, 2, 5, 10, 20, 50, 100], ["1", "2", "5", "10", "20", "50", "100"])
axes[1].set(xlabel="thousand images", xlim=(0, 122))
axes[0].legend(frameon=False, fontsize=9)
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
fig.suptitle("One run each: two devices with batch 512 were accurate later")
show(fig, alt="Wrong test images on a logarithmic axis. By minutes, one device with batch 256 "
     "falls below ten percent after four minutes, two with batch 512 after six; from minute 12 on "
     "they are close. By images, one device is below two at every check but the first.")

# %% tags=["fold"]
# check: when each run first has 10, 5 and 2 % wrong; who is ahead, and when
def reach(epochs, percent):
    images, minutes_so_far, right = course(epochs)
    assert right.max() >= percent, f"{percent} % was never reached"
    first = onp.argmax(right >= percent)
    return images[first], minutes_so_far[first]


one_device, two_devices = full["resnet18-1x256"][0], full["resnet18-2x512"][0]
earlier = set()
print("first reached     by one device                by two")
for percent in (90, 95, 98):
    (few_images, soon), (many_images, late) = (reach(one_device, percent),
                                               reach(two_devices, percent))
    print(f"{100 - percent:2} % wrong   {few_images:7,.0f} images, {soon:4.1f} min   "
          f"{many_images:7,.0f} images, {late:4.1f} min")
    assert few_images < many_images and soon < late, "one device should be first"
    assert few_images not in earlier, "three levels are three checks"
    earlier.add(few_images)
for name, label in names.items():
    (first, second) = full[name][0]
    print(f"{label}: of all 10,000 test images {first['accuracy']:.2%} right after epoch 1, "
          f"{second['accuracy']:.2%} after epoch 2")
# By images: both were checked at the same counts.
images_one, times_one, right_one = course(one_device)
images_two, times_two, right_two = course(two_devices)
assert (images_one == images_two).all() and right_one[0] == right_two[0]
assert (right_one[1:] > right_two[1:]).all(), "by images one device is ahead, but at first"
# By minutes: at the times of two devices' checks, is one device ahead?
ahead = onp.interp(times_two, times_one, right_one) > right_two
assert ahead[(times_two > 2) & (times_two < 11)].all(), "one device is ahead until minute 11"
assert len(set(ahead[times_two > 11])) == 2, "the curves don't cross after minute 11"

# %% [markdown]
# A point is a test. By images, batch 256 was ahead at every point but the first. By minutes, it was
# ahead until minute 11; then the curves cross, and one run each names no winner. Batch 512 lost its
# time at the start: for 18,000 images its loss stayed near that of guessing (same deeper notebook).
# **With the same batch a second device does the same training sooner, where it has a core of its
# own. A larger batch and rate make another training, which may need more images.**
#
# ## Two traps
#
# ### GPUs that aren't there
#
# `d2l.try_gpu(i)` gives GPU *i* if there is one. **Predict:** what does it give if there isn't?

# %%
beyond = [d2l.try_gpu(98), d2l.try_gpu(99)]
print(beyond)

# %% [markdown]
# One device, twice, and no error. What follows is in chapter 05 (*One device, named twice*): the
# first shard's gradient is lost. `step` would raise an error, but d2l's loop (`train_batch_ch13`)
# turns it off by `ignore_stale_grad=True`.
#
# **Check that devices differ:** `len(set(devices)) == len(devices)`.

# %% tags=["fold", "trains"]
# check: the gradient that is lost; the step is refused, but done; d2l's loop hushes the complaint
import inspect

# One weight w and the loss wx, whose gradient is x: 1 on one "device", 2 on the other. Which
# replica a device finds: Parameter._init_impl in gluon/parameter.py at 1.9.1. When gradients are
# looked at: Trainer.step and _update in gluon/trainer.py.
assert beyond == [mx.cpu(0), mx.cpu(0)]
layer = nn.Dense(1, use_bias=False, in_units=1)
layer.initialize(init.Zero(), ctx=beyond)
trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1})

first_shard = np.array([[1.0]], ctx=beyond[0])
second_shard = np.array([[2.0]], ctx=beyond[1])
with autograd.record():
    first_loss = layer(first_shard)  # w x
    second_loss = layer(second_shard)
first_loss.backward()  # one by one, as in d2l's loop
second_loss.backward()
assert refused(UserWarning, lambda: trainer.step(2)), "the first replica never had a gradient"
assert [weight.item() for weight in layer.weight.list_data()] == [-1, -1], "not -1.5, by the mean"
of_d2l, _ = d2l.split_batch(np.array([[1.0], [2.0]]), np.zeros(2), beyond)
assert [shard.item() for shard in of_d2l] == [1, 2], "d2l's shards are those above"
assert [grad.item() for grad in layer.weight.list_grad()] == [0, 2]
assert len(set(beyond)) == 1 and len(set(pair)) == 2, "a set tells whether devices differ"
before = layer.weight.data().item()
assert refused(UserWarning, lambda: trainer.step(2)), "a complaint each time"
assert layer.weight.data().item() == before - 1, "moved by 2/2, though it was refused"
trainer.step(2, ignore_stale_grad=True)
assert layer.weight.data().item() == before - 2, "no complaint"
of_d2l = inspect.getsource(d2l.train_batch_ch13)
assert "step(labels.shape[0], ignore_stale_grad=True)" in of_d2l
assert "for l in ls:\n        l.backward()" in of_d2l, "one by one"
apart = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1}, update_on_kvstore=False)
before = layer.weight.data().item()
assert refused(UserWarning, lambda: apart.step(2))
assert layer.weight.data().item() == before, "where Trainer itself updates, it looks first"
for grad, as_it_was in zip(layer.weight.list_grad(), [0, 2]):  # both have the sum now
    grad[:] = as_it_was
with autograd.record():
    two_losses = [layer(np.array([[1.0]])), layer(np.array([[2.0]]))]
autograd.backward(two_losses)
assert [grad.item() for grad in layer.weight.list_grad()] == [0, 3], "one backward adds them"
for grad, as_it_was in zip(layer.weight.list_grad(), [0, 2]):
    grad[:] = as_it_was
if mx.context.num_gpus() == 0:
    assert d2l.try_all_gpus() == [], "an empty list; its documentation says [cpu(),]"

# %% [markdown]
# ### A last batch that doesn't divide
#
# 10,000 images in batches of 64 leave a last one of 16. By which *n* should `step(n)` divide? (It
# is chapter 06's second trap.)
#
# - **actual**, 16: the mean of 16 gradients, a step of full length. So do chapter 06's loop and
#   `fit`, and d2l's `train_batch_ch13`.
# - **nominal**, 64: a quarter as long, so that each image counts as much as in a full batch. So do
#   this chapter's `train`, and d2l's *Concise Implementation*.
# - Or these 16 images are **dropped**.
#
# Nine runs of each, with the narrow network, rate 0.1 and three epochs:

# %% tags=["fold"]
# measure: accuracy before and after a last step, on 1,000 test images; in the end, on all 10,000
tails = load_results("tail")
change = {}
print("accuracy changed by the last step of epoch 1, nine runs:")
for size in ("actual", "nominal"):
    points = []
    for run in tails[f"tail-{size}"]:
        before, after = run[0]["parts"][-2:]  # of the first epoch
        points.append(100 * (after["accuracy"] - before["accuracy"]))
    change[size] = onp.sort(points)
    print(f"    {size:7}  from {change[size][0]:+5.1f} to {change[size][-1]:+4.1f} points, "
          f"median {onp.median(points):+5.1f}")
final = {}
for size in ("actual", "nominal", "dropped"):
    final[size] = onp.sort([100 * run[-1]["accuracy"] for run in tails[f"tail-{size}"]])
large_losses = (change["actual"] < -14).sum()
print(f"actual: {large_losses} of 9 runs lost more than 14 points by it")
assert large_losses == 8
assert abs(change["nominal"]).max() < 6, "with the nominal size no run changes by 6"
# Before and after the last step of the last epoch.
ends = []
for run in tails["tail-actual"]:
    before, after = run[-1]["parts"][-2:]
    ends.append((100 * before["accuracy"], 100 * after["accuracy"]))
assert min(before for before, after in ends) > 94, "they had recovered"
lost = sorted((before - after for before, after in ends), reverse=True)
print(f"actual: the last step of epoch 3 cost two runs {lost[0]:.0f} and {lost[1]:.0f} points")
print("% right after three epochs, median:", ", ".join(
    f"{size} {onp.median(final[size]):.1f}" for size in final))
assert [round(points) for points in lost[:2]] == [16, 10]
inside = (final["actual"] >= final["nominal"][0]) & (final["actual"] <= final["nominal"][-1])
assert inside.sum() == 5, "five of the nine are within the nominal runs' range"
assert final["dropped"][0] < final["nominal"][-1] and final["nominal"][0] < final["dropped"][-1]

# %% [markdown]
# By that one step, eight of nine runs with the actual size lost more than 14 points; with the
# nominal size, none lost 6. The cause, we guess: a full step in a direction from 16 images. The
# runs recovered, but two lost 16 and 10 points again by the very last step. Nominal and dropped
# ended about equal. So **where the last batch is much smaller, tell `step` the nominal size, or
# drop that batch**. `fit` does neither: give it no such batch.

# %% [markdown]
# ## Summary
#
# - A residual block adds a change to its input. Three quarters of the parameters are in stage 4.
# - One graph needs `HybridBlock`s from top to bottom, and saves time where operators are short.
# - With the same batch, two devices do the same training (but for BatchNorm), here in less time.
#   With twice the batch and rate it is another: in one run each, 1.8 times the images a second, and
#   10, 5 and 2 % wrong reached later.
# - `d2l.try_gpu(i)` gives `cpu(0)` for each missing GPU: check that devices differ.
# - Where the last batch is much smaller, tell `step` the nominal size, or drop that batch.
#
# Next, chapter 09: why BatchNorm makes two devices differ from one.
#
# **Further reading.** K. He et al., *Deep residual learning* (2015), arXiv:1512.03385; *Dive into
# Deep Learning*, Concise Implementation for Multiple GPUs.

# %% [markdown]
# ## Exercises
#
# 1. **Where is the arithmetic?** In which stage are most multiplications, for one image?
# 2. **Is it BatchNorm?** The narrow network starts from small weights, and yet learns at once.
#    Train it for 32 steps of 64 images at rate 0.1, with BatchNorm and without (`norm` then makes a
#    block that passes its input through).
# 3. **Counting in a byte.** `d2l.accuracy` counts in the type of the labels. Ours are `int32`,
#    MNIST's files hold `uint8`. What is the count for 300 answers, all right?
# 4. **Starting anew.** d2l's loop begins with `initialize(..., force_reinit=True)`. Hybridise a
#    small layer with `static_alloc=True` and `static_shape=True`, compute a gradient, start anew,
#    compute it again. What is in it?

# %% [markdown]
# ### Answer 1
#
# An output pixel of a convolution from $a$ to $c$ channels takes $9ac$ multiplications, and the
# image has 28, 14, 7 and 4 pixels a side in the four stages. Within a stage the first convolution
# of the first block and the 1×1 convolution beside it take fewer channels in.

# %% tags=["solution"]
def multiplications(a, c, side):
    first = 9 * a * c
    if a != c:
        first += a * c
    others = 3 * 9 * c * c
    return side**2 * (first + others)


by_stage = []
for a, c, side in [(64, 64, 28), (64, 128, 14), (128, 256, 7), (256, 512, 4)]:
    by_stage.append(multiplications(a, c, side))
    print(f"stage {len(by_stage)}: {by_stage[-1] / 1e6:.0f} million")
assert by_stage[3] == max(by_stage)
assert 1.3 < max(by_stage) / min(by_stage) < 1.4

# %% [markdown]
# The last stage has a third more than the smallest: half of seven pixels is rounded up to four, and
# $(4/3.5)^2$ is 1.31.

# %% [markdown]
# ### Answer 2

# %% tags=["solution", "trains", "measured"]
def identity():
    return nn.HybridLambda(lambda F, x: F.np.copy(x))


for norm in [nn.BatchNorm, identity]:
    mx.random.seed(0)
    net = hybrid_resnet18(10, (16, 32, 64, 128), norm)
    net.initialize(init.Normal(0.01), ctx=two)
    part = Batches(train_images[:2048], train_labels[:2048], 64)
    trainer = sgd(net, 0.1)
    losses = train(net, trainer, part, two)
    if len(losses) < 32:  # the digits have fewer images
        losses += train(net, trainer, part, two)
    print(f"{norm.__name__:10} {onp.mean(losses[-10:]):.2f}")
    assert (onp.mean(losses[-10:]) < 2) == (norm is nn.BatchNorm)

# %% [markdown]
# In these two runs (one seed), yes: without a norm the loss stays where guessing has it, and with
# it the network learns.

# %% [markdown]
# ### Answer 3

# %% tags=["solution"]
scores = np.zeros((300, 2))
scores[:, 1] = 1  # class 1 wins everywhere
for kind in ["int32", "uint8"]:
    labels = np.ones(300, dtype=kind)
    print(f"{kind:5} labels: {d2l.accuracy(scores, labels):.0f} of 300")
assert d2l.accuracy(scores, np.ones(300, dtype="int32")) == 300
assert d2l.accuracy(scores, np.ones(300, dtype="uint8")) == 300 - 256

# %% [markdown]
# A `uint8` goes back to 0 after 255. d2l's own loop is safe, since Gluon's data sets give `int32`,
# and so does `load_data`.

# %% [markdown]
# ### Answer 4
#
# `static_shape` also keeps the gradients' buffers, and `force_reinit` allocates new ones. The
# second gradient goes to the old place, and the new one holds zeros. Nothing raises an error. Each
# weight's gradient is the sum of four ones:

# %% tags=["solution"]
def gradient_after_new_start(layer):
    layer.initialize(init.One(), force_reinit=True)
    with autograd.record():
        total = layer(np.ones((4, 2))).sum()
    total.backward()
    return float(layer.weight.grad().max())


layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True, static_shape=True)
found = [gradient_after_new_start(layer), gradient_after_new_start(layer)]
print("the largest entry, first and after a new start:", found)
assert found == [4, 0], "to the old place"

# %% [markdown]
# Hybridise once more after each `force_reinit`, or do without `static_shape`: then the place is
# looked up at each backward pass.

# %% tags=["solution"]
layer.initialize(init.One(), force_reinit=True)
layer.hybridize(static_alloc=True, static_shape=True)
with autograd.record():
    total = layer(np.ones((4, 2))).sum()
total.backward()
assert (layer.weight.grad() == 4).all(), "hybridised again, the gradient arrives"

layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True)
found = [gradient_after_new_start(layer), gradient_after_new_start(layer)]
print("without static_shape:", found)
assert found == [4, 4]
