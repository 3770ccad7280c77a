# %% [markdown]
# # 08 · ResNet-18
#
# LeNet is small: much of its step is overhead. ResNet-18 has eleven million parameters and far more
# arithmetic for each image. This chapter builds it, trains it on one device and on two, and
# measures what the second device brings.
#
# ## What you'll do
#
# Build the ResNet-18 of *Dive into Deep Learning* (d2l) for 28×28 images, evaluate and train it on
# one and on two devices, hybridise it, and measure what each of the two brings.
#
# ## What you'll learn
#
# - what changes from `mx.nd` arrays to `mx.np` arrays;
# - which helpers d2l has for several devices, and where they go wrong without a word;
# - how to hybridise it, how to show that it is still the same network, and one way to break it;
# - what hybridising brings, on one device and on two.
#
# ## What you need
#
# Chapters 05 to 07, no GPU, and 4 GB of free memory. Reading takes {reading time}, running about
# two minutes on two cores that have nothing else to do.

# %%
from helpers import devices, load_data, split_and_load
from helpers.training import Batches, accuracy, assert_same_parameters, fit

# %% [markdown]
# Those first, as ever, since MXNet reads its settings once.

# %%
import mxnet as mx
import numpy as onp
from d2l import mxnet as d2l
from mxnet import autograd, gluon, init, np, npx
from mxnet.gluon import nn

# %% [markdown]
# ## From mx.nd to mx.np
#
# d2l works with MXNet's second kind of array, `mx.np`. It takes its names and rules from NumPy.
# One call switches Gluon over, and it has to come before any network is built. From here on `np` is
# `mx.np`; NumPy itself is called `onp`.

# %%
npx.set_np()
a = np.ones((2, 3))
assert a.sum().shape == () and np.zeros((0, 3)).size == 0, "scalars and empty arrays exist now"
assert a[a > 0].shape == (6,), "and so do masks"
assert np.array([1.0, 2.0]).dtype == np.arange(3).dtype == onp.float32, "float32 by default"

# %% [markdown]
# The two kinds don't mix: an operator of one refuses an array of the other. So this notebook stays
# with `np` throughout. First a small test for things that should be refused.

# %%
def raises(kind, action):
    try:
        action()
    except kind:
        return True


# %% [markdown]
# Where a bridge is needed, `as_nd_ndarray` and `as_np_ndarray` give the same memory under the other
# name.

# %%
assert raises(TypeError, lambda: a + mx.nd.ones((2, 3))), "nd and np arrays must not mix"
a.as_nd_ndarray()[:] = 5
assert (a == 5).all(), "another name for the same memory, not a copy"

# %% [markdown]
# ## What d2l calls a device
#
# `d2l.try_gpu(i)` gives GPU *i*, "otherwise `cpu()`". `d2l.try_all_gpus()` gives all GPUs. Its own
# documentation adds "or `[cpu()]` if no GPU exists". **Predict:** on a machine with no GPU, what
# are `[d2l.try_gpu(0), d2l.try_gpu(1)]` and `d2l.try_all_gpus()`?
#
# To get the same answer on every machine, we ask for GPUs far beyond those that exist.

# %%
beyond = [d2l.try_gpu(i) for i in (98, 99)]
print("two that don't exist:", beyond)
if mx.context.num_gpus() == 0:
    assert d2l.try_all_gpus() == [], "an empty list, whatever its documentation says"

# %% [markdown]
# Both are `cpu(0)`: a list of two that names one device twice. Nothing complains. The network below
# believes it has two replicas, and chapter 05 showed what that does: the second shard's gradient
# overwrites the first's.

# %%
layer = nn.Dense(2, in_units=2)
layer.initialize(ctx=beyond)
assert layer.weight.list_ctx() == [mx.cpu(0)] * 2, "one device, twice"

# %% [markdown]
# An empty list is no better: initialising on it raises nothing, and the parameters are nowhere.

# %%
layer.initialize(ctx=[], force_reinit=True)
assert layer.weight.list_ctx() == [], "initialised on no device at all"
assert raises(RuntimeError, layer.weight.data), "found only when the weights are needed"

# %% [markdown]
# So we keep our own `devices(2)`, for which devices always differ. What is asserted below runs on
# simulated devices that we name directly, which makes it come out the same on every machine.

# %% tags=["measured"]
two = devices(2)
data = load_data("mnist", limit=1280)
print(data)

# %% [markdown]
# The pair and the four for being right, and a small part of the images. d2l's
# `load_data_fashion_mnist` would download Fashion-MNIST; MNIST has the same shape, and you have it.

# %%
four = [mx.cpu(r) for r in range(4)]
pair = four[:2]

# %% [markdown]
# Images are centred, as in chapter 04. A few hundred are enough for testing.

# %%
mean = data.train_images.mean()
train_set = data.train_images - mean, data.train_labels  # [n, 1, 28, 28], [n]
test_set = data.test_images[:300] - mean, data.test_labels[:300]

# %% [markdown]
# ## The network
#
# A *residual block* computes $\mathrm{relu}(x + f(x))$, where $f$ is convolution, batch norm, relu,
# convolution, batch norm (He et al., 2015). Where the number of channels or the size changes, $x$
# passes through a 1×1 convolution, so that the sum is possible. That is `d2l.Residual`:

# %%
block = d2l.Residual(6, use_1x1conv=True, strides=2)
block.initialize()
assert block(np.ones((4, 3, 28, 28))).shape == (4, 6, 14, 14), "half the size, twice the channels"

# %% [markdown]
# ResNet-18 proper is made for images of 224×224: it begins with a 7×7 convolution of stride 2 and a
# pooling, which would leave 7×7 of our 28×28 before the first block. The variant for small images
# begins with one 3×3 convolution of stride 1 and no pooling. Then there are four stages of two
# blocks; all but the first stage halve the size and double the channels.

# %%
def resnet18(num_classes, channels=(64, 128, 256, 512)):
    net = nn.Sequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1), nn.BatchNorm(),
            nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        stage = nn.Sequential()
        stage.add(d2l.Residual(width, use_1x1conv=stride > 1, strides=stride),
                  d2l.Residual(width))
        net.add(stage)
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net


# %% [markdown]
# Eighteen counts the layers on the longest way from image to answer: one convolution, sixteen in
# the blocks, one dense layer. Two images go in, to make all shapes known.

# %%
net = resnet18(10)
net.initialize(init.Xavier(), ctx=pair)
assert net(np.zeros((2, 1, 28, 28))).shape == (2, 10)

# %% [markdown]
# The oracle is d2l's own function, which 1.0.3 has under the same name.

# %%
theirs = d2l.resnet18(10)
theirs.initialize(init.Xavier())
theirs(np.zeros((2, 1, 28, 28)))
shapes = [[p.shape for p in each.collect_params().values()] for each in (net, theirs)]
assert shapes[0] == shapes[1], "the same parameters, in the same order, as d2l's own"
del theirs

# %% [markdown]
# ### How many parameters?
#
# **Predict:** each stage halves the image and doubles the channels. In which stage are most of the
# parameters? Count by formula: a 3×3 convolution from $a$ to $c$ channels has $9ac + c$ (d2l keeps
# the bias), a BatchNorm has a scale and a shift per channel, $2c$.

# %%
def block_size(a, c):
    shortcut = a * c + c if a != c else 0
    return (9 * a * c + c) + (9 * c * c + c) + shortcut + 2 * (2 * c)

# %% [markdown]
# A stage is a block that changes the width and one that keeps it.

# %%
widths = (64, 64, 128, 256, 512)
formula = {"stem": 9 * 1 * 64 + 64 + 2 * 64}
for i, (a, c) in enumerate(zip(widths, widths[1:]), 1):
    formula[f"stage {i}"] = block_size(a, c) + block_size(c, c)
formula["dense"] = 512 * 10 + 10

# %% [markdown]
# And count what is there. Only what is trained counts; BatchNorm's running statistics are not.

# %%
def count(block, trained=True):
    return sum(p.data(p.list_ctx()[0]).size for p in block.collect_params().values()
               if (p.grad_req != "null") == trained)


# %% [markdown]
# The network's parts, in the order of the formulas:

# %%
parts = [net[:3], *net[3:7], net[7:]]
for (name, size), part in zip(formula.items(), parts):
    assert count(part) == size, f"{name}: {count(part)} counted, {size} by formula"
    print(f"{name:8} {size:>10,}  {size / sum(formula.values()):6.1%}")

# %% [markdown]
# And the parts must make the whole.

# %%
assert count(net) == sum(formula.values()), "a part is missing, or counted twice"
print(f"{'all':8} {count(net):>10,}, and {count(net, trained=False):,} running statistics")

# %% [markdown]
# Three quarters are in the last stage. The arithmetic is elsewhere: a convolution does as many
# multiplications per weight as its output has pixels, which are a quarter as many in each new
# stage while the weights are four times as many. So the stages cost about the same to compute,
# while what has to be all-reduced is mostly the last.
#
# ## Initialised on every device
#
# We passed two images through the network on `cpu(0)` only. *Dive into Deep Learning* says that
# parameters are initialised only on the devices that data passes through. **Predict:** has `cpu(1)`
# any parameters yet?

# %%
for name, parameter in net.collect_params().items():
    assert parameter.list_ctx() == pair, f"{name} should be on both devices"
    first, second = (parameter.data(device).asnumpy() for device in pair)
    assert (first == second).all(), f"{name} should have equal replicas"
print(len(net.collect_params().keys()), "parameters, each on", *pair, "with equal values")

# %% [markdown]
# It has them all. Until some shard has shown the shapes, no device has a parameter (deferred
# initialisation, chapter 05); after it, every device in `ctx` has. What raises is asking for a
# device that was *not* in `ctx`.

# %%
weight = net[0].weight
assert raises(RuntimeError, lambda: weight.data(four[2])), "cpu(2) was not in ctx"

# %% [markdown]
# And `data()` with no argument asks for the *current* context. An older edition says that this is
# always the CPU.

# %%
with four[2]:
    assert raises(RuntimeError, weight.data), "data() means the current context"
with four[1]:
    assert weight.data().context == four[1], "cpu(1) was, and is the current one here"

# %% [markdown]
# Equal replicas must give equal answers, whichever device an image is sent to. d2l's `split_batch`
# is Gluon's `split_and_load`, called for images and labels.

# %%
x, y = (np.array(a[:8], dtype=a.dtype) for a in train_set)
(x0, x1), (y0, y1) = d2l.split_batch(x, y, pair)

# %% [markdown]
# Every shard is computed where it is, and side by side the shards' scores are the batch's.

# %%
whole = net(x).asnumpy()
halves = onp.concatenate([net(x0).asnumpy(), net(x1).asnumpy()])
assert x1.context == pair[1] and net(x1).context == pair[1], "computed where the shard is"
assert onp.abs(halves - whole).max() < 1e-5 * onp.abs(whole).max(), "two devices, the same scores"

# %% [markdown]
# (A comparison of scores that are all the same would show nothing. These differ from image to
# image.)

# %%
assert onp.ptp(whole, axis=0).max() > 1e-3, "the images must be told apart"

# %% [markdown]
# ## Accuracy on all devices
#
# An accuracy is two sums, right answers and answers, so every device can work on its shard. d2l
# keeps the sums in an `Accumulator`. Our version lets the last batch be uneven. All shards are
# started before the first answer is read, since reading waits.

# %%
def evaluate(net, batches, devices):
    sums = d2l.Accumulator(2)  # right answers, answers
    for x, y in batches:
        used = devices[: len(y)]
        shards = zip(*(split_and_load(a, used, even=False) for a in (x, y)))
        answers = [(net(x), y) for x, y in shards]
        sums.add(sum(d2l.accuracy(*answer) for answer in answers), len(y))
    return sums[0] / sums[1]


# %% [markdown]
# Held against d2l's own (for even batches), against one device, and against our helper from
# chapter 06. On 50 images in batches of 20, 20 and 10:

# %%
few = Batches(test_set[0][:50], test_set[1][:50], 20, shuffle=False)
found = {evaluate(net, few, pair), evaluate(net, few, pair[:1]), evaluate(net, few, pair[1:]),
         d2l.evaluate_accuracy_gpus(net, few), accuracy(net, few, pair)}
assert len(found) == 1, f"{found}: equal replicas must be right equally often"

# %% [markdown]
# This holds because the replicas are equal in *everything*, BatchNorm's running statistics
# included. After training these differ from device to device: that is chapter 09's subject.
#
# ## d2l's training loop, put right
#
# The loop as published is good to read. Five things in it deserve a look.
#
# **One: the tail.** `split_batch` wants shards of equal size. A batch that doesn't divide raises,
# in the last step of an epoch.

# %%
assert raises(ValueError, lambda: d2l.split_batch(x[:5], y[:5], pair)), "5 over 2 is refused"
uneven = gluon.utils.split_and_load(x[:5], pair, even_split=False)
assert sorted(len(shard) for shard in uneven) == [2, 3], "unless it may be uneven"
lonely = gluon.utils.split_and_load(x[:1], pair, even_split=False)
assert [len(shard) for shard in lonely] == [1, 0], "in np mode a device may get nothing"

# %% [markdown]
# **Two: the size of the last batch.** The published loop calls `trainer.step(batch_size)`, with the
# nominal size (chapter 06). 60,000 images leave a last batch of 96, for 256 and for 512 alike. By
# its actual size, its step is a mean of 96 gradients, at the full rate. Does that matter? Stored
# are 27 runs of a network with a quarter of the channels: two devices, 10,000 images in batches of
# 64, so that the last one has 16. **Predict:** how many points of accuracy does its step change?

# %%
import json
from pathlib import Path

stored = json.loads(Path("src/results/tail.json").read_text())
print("made by", stored["command"])
print("on", stored["machine"], stored["date"], "at commit", stored["commit"])

# %%
change = {}
for size in ("actual", "nominal"):
    around = 100 * onp.array([[part["accuracy"] for part in run[0]["parts"][-2:]]
                              for run in stored["runs"][f"tail-{size}"]])  # [seed, 2]
    change[size] = around[:, 1] - around[:, 0]
    print(f"{size:8} size:", *(f"{points:+5.1f}" for points in onp.sort(change[size])), "points")
assert (change["actual"] < -14).sum() == 8, "eight of nine runs lose more than 14 points"
assert abs(change["nominal"]).max() < 6, "with the nominal size no run changes by 6"

# %% [markdown]
# Those are the changes on 1,000 test images, from just before the last step of the first epoch to
# just after it, for nine seeds. A quarter as long, the same step does little. The mean of 16 images
# is noisier than that of 64, and BatchNorm takes its statistics from 8 images on each device; which
# of the two matters more we didn't find out. So we keep the nominal size here.
#
# **Three: counting in the labels' type.** `d2l.accuracy` adds up right answers in the type of the
# labels. MNIST's files hold labels as `uint8`. **Predict** the count for 300 answers, all right:

# %%
scores = np.zeros((300, 2))
scores[:, 1] = 1  # class 1 wins everywhere
counts = [d2l.accuracy(scores, np.ones(300, dtype=t)) for t in ("int32", "uint8")]
print("right answers of 300: {:.0f} with int32 labels, {:.0f} with uint8".format(*counts))
assert counts == [300, 300 % 256], "a uint8 goes back to 0 after 255"

# %% [markdown]
# `load_data` hands out `int32`. **Four: the clock.** `d2l.Timer` reads the clock, and the clock
# knows nothing of the engine's queue. The published loop does call `npx.waitall()` before
# `timer.stop()`, in the right place. See what happens without it: `started` is the time it took to
# put work into the queue, `done` the time until it was done.

# %% tags=["measured"]
timer, scores = d2l.Timer(), net(x)
started = timer.stop()
npx.waitall()
done = timer.stop()
print(f"without waitall {started:.3f} s, with it {done:.3f} s: {done / started:.0f} times as long")

# %% [markdown]
# **Five: the first epoch.** The published figure is `timer.avg()`, a mean over all epochs. In the
# first one memory is allocated and convolutions choose their algorithms. So leave it out, and
# quote the median of the rest. Chapter 10 looks closer at what happens in these seconds.
#
# With these changes, this is the loop. An older edition says that Trainer divides the batch and
# copies it to the devices. It doesn't: the shards are made here, and Trainer sums gradients and
# updates. Where the batch has fewer images than there are devices, use `helpers.training.fit`.

# %%
loss = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# One call sets up d2l's two tools and one line in each epoch feeds them; the rest is chapter 06's.

# %% tags=["trains"]
def train(net, batches, test, devices, lr, epochs):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    timer, animator = d2l.Timer(), d2l.Animator("epoch", "test accuracy", xlim=[1, epochs])
    for epoch in range(1, epochs + 1):
        timer.start()
        for x, y in batches:
            shards = zip(*(split_and_load(a, devices, even=False) for a in (x, y)))
            with autograd.record():
                losses = [loss(net(x), y) for x, y in shards]
            autograd.backward(losses)
            trainer.step(batches.size)
        npx.waitall()
        timer.stop()
        animator.add(epoch, evaluate(net, test, devices))
    return animator, timer.times


# %% [markdown]
# `d2l.Animator` redraws a figure after each epoch: it displays an SVG and clears it again. That is
# nice to watch in your own notebook. Here its drawing is caught by `capture_output`, and the figure
# shown once, at the end, with a text for those who can't see it. Three epochs of four batches of
# 16, the last one smaller, are no training yet; it is the loop that is tried.

# %% tags=["measured", "trains"]
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show
from IPython.utils.capture import capture_output

net.initialize(init.Xavier(), ctx=two, force_reinit=True)
handful = Batches(train_set[0][:57], train_set[1][:57], 16)
with capture_output():
    animator, seconds = train(net, handful, few, two, lr=0.05, epochs=3)
print("seconds an epoch:", *(f"{s:.1f}" for s in seconds),
      f"; median without the first: {onp.median(seconds[1:]):.1f}")
animator.fig.set(size_inches=(5, 2.8), layout_engine="constrained")
animator.axes[0].set_title(f"d2l.Animator: {animator.Y[0][-1]:.0%} of 50 test images", fontsize=10)
show(animator.fig, alt="Test accuracy after each of three short epochs, as d2l.Animator draws it.")

# %% [markdown]
# All replicas have seen the same updates, so all weights must be equal, to the bit. The helper from
# chapter 06 compares them, and leaves out BatchNorm's running statistics: each device has collected
# those of its own shards.

# %%
assert_same_parameters(net)

# %% [markdown]
# ## Hybridise
#
# So far Python runs the network line by line, and the engine gets one operator at a time.
# `hybridize` records the operators once as a graph, and then hands over the graph. But it works
# only from top to bottom of `HybridBlock`s, and `d2l.Residual` is a plain `Block`. So here is ours.
# Operators come from `F`, which is `mx.np`'s world when run as is and a symbol's when recorded. The
# kind of norm is an argument, since chapter 09 will want others. And relu is `npx.activation`, not
# d2l's `npx.relu`: the values are the same, but on a CPU the former takes arrays in the layout in
# which convolutions leave them, while the latter has them rewritten first.

# %%
class HybridResidual(nn.HybridBlock):
    def __init__(self, channels, strides=1, project=False, norm=nn.BatchNorm, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=strides, padding=1)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.project = nn.Conv2D(channels, kernel_size=1, strides=strides) if project else None
        self.norm1, self.norm2 = norm(), norm()

    def hybrid_forward(self, F, x):
        change = F.npx.activation(self.norm1(self.conv1(x)), act_type="relu")
        change = self.norm2(self.conv2(change)) + (self.project(x) if self.project else x)
        return F.npx.activation(change, act_type="relu")


# %% [markdown]
# The network around it has the same stages; `HybridSequential` takes the place of `Sequential`.

# %%
def hybrid_resnet18(num_classes, channels=(64, 128, 256, 512), norm=nn.BatchNorm):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1), norm(), nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(HybridResidual(width, stride, project=stride > 1, norm=norm),
                HybridResidual(width, norm=norm))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(num_classes))
    return net


# %% [markdown]
# Is it the same network? The oracle is d2l's: equal weights must give equal answers and equal
# training. Weights are copied in order; the children are registered in the same order on both
# sides, and a wrong order would not fit the shapes.

# %%
def copy_parameters(source, target):
    ours, theirs = (list(net.collect_params().values()) for net in (source, target))
    assert len(ours) == len(theirs), "as many parameters on both sides"
    for p, q in zip(ours, theirs):
        assert p.shape == q.shape, f"{p.name} doesn't fit {q.name}"
        q.set_data(p.data(p.list_ctx()[0]))


# %% [markdown]
# For equality we want float64, and a *thin* network of 4 to 8 channels is enough: it has every kind
# of layer. Its layers make their first values in float32 and are cast afterwards: in `np` mode,
# initialising in float64 raises. `thin` gives every network the same values to start with.

# %%
thin_channels = (4, 4, 8, 8)


def thin(contexts, make=hybrid_resnet18, like=None, **options):
    net = make(10, thin_channels, **options)
    net.initialize(init.Xavier(), ctx=contexts)
    net(np.zeros((8, 1, 28, 28), ctx=contexts[0]))
    net.cast("float64")
    if like is not None:
        copy_parameters(like, net)
    return net


# %% [markdown]
# The values that most comparisons below start from, of d2l's blocks:

# %%
mx.random.seed(8), onp.random.seed(8)
origin = thin(pair, make=resnet18)

# %% [markdown]
# Some images in float64:

# %%
def images(n, start=0):
    return (np.array(train_set[0][start : start + n], dtype="float64"),
            np.array(train_set[1][start : start + n], dtype="int32"))


# %% [markdown]
# And a step in two halves, for we'll want to look at the network between them.

# %%
def backward(net, x, y, contexts):
    with autograd.record():
        losses = [loss(net(a), b) for a, b in zip(*d2l.split_batch(x, y, contexts))]
    autograd.backward(losses)


# %% [markdown]
# The other half is Trainer's.

# %% tags=["trains"]
def step(net, x, y, contexts):
    backward(net, x, y, contexts)
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}).step(len(y))


# %% [markdown]
# To compare: the trained parameters of each replica,

# %%
def trained(net):  # [replicas, one for each trained parameter]
    found = [p.list_data() for p in net.collect_params().values() if p.grad_req != "null"]
    return [[a.asnumpy() for a in replica] for replica in zip(*found)]


# %% [markdown]
# and a measure: the largest difference over *all* replicas, as a share of the largest entry.

# %%
def apart(net, reference):
    theirs = trained(reference)[0]
    pairs = [(p, q) for replica in trained(net) for p, q in zip(replica, theirs)]
    far = onp.max([onp.abs(p - q).max() for p, q in pairs])
    return far / onp.max([onp.abs(q).max() for q in theirs])


# %% [markdown]
# Now the oracle: d2l's blocks against ours, hybridised, on two devices, after three steps. The
# options allocate all memory once (`static_alloc`) and keep the plan while shapes stay the same
# (`static_shape`).

# %%
plain, hybrid = thin(pair, make=resnet18, like=origin), thin(pair, like=origin)
hybrid.hybridize(static_alloc=True, static_shape=True)
for i in range(3):
    for each in (plain, hybrid):
        step(each, *images(8, 8 * i), pair)

# %% [markdown]
# They must have moved, and both to the same place.

# %%
assert apart(plain, origin) > 1e-3, "three steps must move the weights, or this shows nothing"
assert apart(hybrid, plain) < 1e-12, "our block must be d2l's"
print("after three steps, d2l's blocks and ours agree to 1e-12 on both devices")

# %% [markdown]
# ### A trap: starting anew
#
# d2l's loop begins with `initialize(..., force_reinit=True)`, so that it can be called twice.
# `static_shape` keeps the places of gradients, too. `force_reinit` makes new places. **Predict:**
# what is in them after a backward pass?

# %%
def gradient_after_new_start(layer):
    layer.initialize(init.One(), force_reinit=True)
    with autograd.record():
        total = layer(np.ones((4, 2))).sum()
    total.backward()
    return float(layer.weight.grad().max())


# %% [markdown]
# Each weight's gradient is the sum of four ones.

# %%
layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True, static_shape=True)
largest = [gradient_after_new_start(layer) for _ in range(2)]
print("gradient: first", largest[0], "and after force_reinit", largest[1])
assert largest == [4, 0], "the second should have gone to the old place"

# %% [markdown]
# It went to the old place, and the new one holds zeros. Nothing raises, the replicas stay equal,
# and the network never learns: a loss that doesn't move is all you see of it. The remedy is to
# hybridise once more after every `force_reinit` (or to do without `static_shape`).

# %%
layer.initialize(init.One(), force_reinit=True)
layer.hybridize(static_alloc=True, static_shape=True)
with autograd.record():
    total = layer(np.ones((4, 2))).sum()
total.backward()
assert (layer.weight.grad() == 4).all(), "hybridised again, the gradient arrives"

# %% [markdown]
# ### What it brings
#
# Each device gets 8 images in all four settings, so that it has the same work in each. (More
# images take more memory: what every operator has computed is kept for the backward pass, and each
# of the 64 scratch spaces grows to the largest shard that it has met.) One network for one device
# and one for two, since all devices that a network was initialised on have to take part.
#
# The network of before has done its work, and gives its memory back; blocks refer to each other in
# circles, so Python's collector has to be asked.

# %%
import gc

net = None
_ = gc.collect()

# %% [markdown]
# The four, and how they are trained:

# %%
def contestant(make, devices):
    net = make(10)
    net.initialize(init.Xavier(), ctx=devices)
    if isinstance(net, nn.HybridBlock):
        net.hybridize(static_alloc=True, static_shape=True)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})


# %% [markdown]
# Images a second, from three steps:

# %% tags=["trains"]
def rate(net, trainer, devices, size=8):
    x, y = (np.array(a[: size * len(devices)], dtype=a.dtype) for a in train_set)
    npx.waitall()
    timer = d2l.Timer()
    for _ in range(3):
        backward(net, x, y, devices)
        trainer.step(len(y))
    npx.waitall()
    return 3 * len(y) / timer.stop()


# %% [markdown]
# As in chapter 04: one round as a warm-up, then rounds in which the four take turns, until five are
# kept, or five discarded because other programs took more than 2% of the CPU's time. If that comes
# before three are kept, the numbers are of all rounds: read them with care. **Predict:** what
# brings more, the second device or hybridising? And does hybridising help one device as much as
# two?

# %% tags=["measured"]
from helpers.timing import Others

settings = [(make, two[:k]) for k in (1, 2) for make in (resnet18, hybrid_resnet18)]
ready = [(*contestant(make, devices), devices) for make, devices in settings]
[rate(*each) for each in ready]  # the warm-up

kept, discarded = [], []
while len(kept) < 5 and len(discarded) < 5:
    with Others() as others:
        row = [rate(*each) for each in ready]
    (kept if others.share <= 0.02 else discarded).append(row)
rates = onp.array(kept if len(kept) > 2 else kept + discarded)  # [rounds, 4]

# %% [markdown]
# The medians:

# %% tags=["measured"]
median = onp.median(rates, axis=0)
for (make, used), images_s in zip(settings, median):
    print(f"{len(used)} device(s), {make.__name__:16} {images_s:6.1f} images/s")
print(f"rounds kept {len(kept)}, discarded {len(discarded)}; speed-up of 2 devices:")
for name, ratios in zip(("plain", "hybridised"), (rates[:, 2:] / rates[:, :2]).T):
    print(f"{name:10} {onp.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}")

# %% [markdown]
# All rounds, and what each step from left to right brought:

# %% tags=["measured", "figure:resnet18"]
fig, ax = figure(f"Two devices, hybridised: {median[3] / median[0]:.2f} times one device, plain",
                 "", "images per second")
for i, (column, color) in enumerate(zip(rates.T, (GREY, ORANGE, GREEN, BLUE))):
    ax.plot(i + onp.linspace(-0.15, 0.15, len(column)), column, "o", color=color, alpha=0.7)
    ax.plot([i - 0.25, i + 0.25], [median[i]] * 2, color=color, lw=3)
    ax.text(i + 0.3, median[i], f"{median[i] / median[0]:.2f} ×", va="center", fontsize=9)
ax.set_xticks(range(4), ["1 device\nplain", "1 device\nhybridised", "2 devices\nplain",
                         "2 devices\nhybridised"])
ax.set(ylim=(0, 1.25 * rates.max()), xlim=(-0.5, 3.7))
show(fig, alt="Images per second in each round for one and two devices, plain and hybridised, "
     "with medians, each as a multiple of one plain device.")

# %% [markdown]
# One of the four is kept, the last: it will be trained. The others give their memory back.

# %%
ready = ready[-1:]
big = ready[0][0]
_ = gc.collect()

# %% [markdown]
# Why does it help two devices more than one, where it does? On one device Python is ahead of the
# engine either way: the convolutions take far longer than it takes to ask for them. With two,
# operators of both devices ask for memory and scratch space at the same time and wait for each
# other; a graph with its memory planned beforehand asks for none.
#
# ## Training for real
#
# The published setting starts from normal numbers with a standard deviation of 0.01, at learning
# rate 0.1. In a network without BatchNorm that could not work: the signal would shrink a little
# more in each layer (chapter 04 sat on a plateau for less). BatchNorm rescales it. **Predict:** so
# does the start matter here? A thinner network, 40 steps of 24 images, once from each:

# %% tags=["measured", "trains"]
starts = {"Normal(0.01)": init.Normal(sigma=0.01), "Xavier": init.Xavier()}
curves = {}
for name, start in starts.items():
    slim = hybrid_resnet18(10, (16, 32, 64, 128))
    slim.initialize(start, ctx=two)
    slim.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(slim.collect_params(), "sgd", {"learning_rate": 0.1})
    part = Batches(train_set[0][:960], train_set[1][:960], 24)
    curves[name] = fit(slim, trainer, part, two, progress=False).losses
    print(f"{name:12} mean loss of the last ten steps: {onp.mean(curves[name][-10:]):.2f}")

# %% [markdown]
# We go on with Xavier. The whole network on two devices, with the loop of chapter 06 (`fit`, which
# works on either kind of array): 1,272 images, once, in 53 batches of 24. It takes **about
# half a minute** on slow cores. For the published lengths there is `make reproduce`, which trains
# on all 60,000 images for as long as you let it.

# %% tags=["measured", "trains"]
big.initialize(init.Xavier(), ctx=two, force_reinit=True)
big.hybridize(static_alloc=True, static_shape=True)  # again, see above
trainer = gluon.Trainer(big.collect_params(), "sgd", {"learning_rate": 0.1})
test = Batches(*test_set, 24, shuffle=False)
whole = Batches(*(a[:1272] for a in train_set), 24)  # `fit` steps by the actual size
history = fit(big, trainer, whole, two, test=test, title="ResNet-18")
print(f"{history.rate[0]:.0f} images/s; {history.test_accuracy[0]:.0%} of {len(test_set[1])} test "
      f"images right ({data.name})")

# %% [markdown]
# What should hold on any data: the loss falls, and images that it has not seen are told apart
# better than by chance, which would be one in ten.

# %%
assert_same_parameters(big)
assert onp.mean(history.losses[-10:]) < 0.6 * onp.mean(history.losses[:10]), "the loss should fall"
assert history.test_accuracy[0] > 0.2, f"{history.test_accuracy}: hardly better than chance"

# %% [markdown]
# The losses of that run, and of the two starts before it:

# %% tags=["measured"]
fig, ax = figure(f"{len(history.losses)} steps: loss from {onp.mean(history.losses[:5]):.1f} to "
                 f"{onp.mean(history.losses[-5:]):.1f}, {history.test_accuracy[0]:.0%} of test "
                 "images right", "step (24 images)", f"loss on the batch ({data.name})")
ax.plot(history.losses, color=BLUE, lw=2, label="ResNet-18, Xavier")
for (name, losses), style, color in zip(curves.items(), ("--", ":"), (GREY, ORANGE)):
    ax.plot(losses, style, color=color, label=f"a quarter of the channels, {name}")
ax.axhline(onp.log(10), color="black", lw=0.7)
ax.text(len(history.losses), onp.log(10), "guessing", ha="right", va="bottom", fontsize=8)
ax.legend()
show(fig, alt="Loss against steps for ResNet-18 from Xavier, and for a thinner one from both "
     "starts, with a line at the loss of guessing.")

# %% [markdown]
# ## Summary
#
# - `npx.set_np()` first; after it, `mx.np` arrays only. `d2l.try_gpu(i)` gives `cpu(0)` for every
#   *i* that doesn't exist, so a list of two may be one device twice.
# - d2l's loop is right in its core: shards, backward, step, `waitall` before the clock is read.
#   Mind the last batch, the type in which is counted, and the first epoch.
# - Hybridising needs `HybridBlock`s from top to bottom. Hold the result against the network that it
#   came from, and hybridise again after every `force_reinit`.
# - What hybridising and the second device bring is a question to your machine. Measure both.
#
# Next, chapter 09: the layer that makes two devices differ from one, and what to do about it.
#
# **Further reading.** K. He et al., *Deep residual learning* (2015), arXiv:1512.03385; *Dive into
# Deep Learning*, Concise Implementation for Multiple GPUs, and its early edition, Gluon
# Implementation for Multi-GPU Computation.

# %% [markdown]
# ## Exercises
#
# 1. **Where is the arithmetic?** "The stages cost about the same to compute." Count the
#    multiplications of each stage for one image, and check the sentence.
# 2. **Half the plan.** Hybridise a layer with `static_alloc` and without `static_shape`. Does its
#    gradient arrive after `force_reinit`?

# %% [markdown]
# ### Answer 1
#
# An output pixel of a convolution from $a$ to $c$ channels takes $9ac$ multiplications, and the
# image has 28, 14, 7 and 4 pixels a side in the four stages. Within a stage the first convolution
# of the first block and the 1×1 convolution beside it take fewer channels in.

# %% tags=["solution"]
def multiplications(a, c, side):
    first = 9 * a * c + (a * c if a != c else 0)
    return side**2 * (first + 3 * 9 * c * c)


stages = [multiplications(a, c, side)
          for a, c, side in zip(widths, widths[1:], (28, 14, 7, 4))]
print(*(f"stage {i}: {n / 1e6:.0f} million" for i, n in enumerate(stages, 1)), sep="; ")
assert stages[3] == max(stages) and 1.3 < max(stages) / min(stages) < 1.4

# %% [markdown]
# The last stage has a third more than the smallest: half of seven pixels is rounded up to four, and
# $(4/3.5)^2$ is 1.31.

# %% [markdown]
# ### Answer 2
#
# It does: without `static_shape` the place of the gradient is looked up at each backward pass.

# %% tags=["solution"]
layer = nn.Dense(1, in_units=2)
layer.hybridize(static_alloc=True)
assert [gradient_after_new_start(layer) for _ in range(2)] == [4, 4]
