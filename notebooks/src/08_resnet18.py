# %% [markdown]
# # 08 · ResNet-18
#
# LeNet is small: much of its step is overhead. ResNet-18 has eleven million parameters and far more
# arithmetic for each image, so two devices should pay off. It also brings the first layer for which
# *k* devices do **not** compute what one device computes: batch normalisation. This chapter
# measures the first and takes the second apart.
#
# ## What you'll do
#
# Build the ResNet-18 of *Dive into Deep Learning* (d2l) for 28×28 images, evaluate and train it on
# one and on two devices, hybridise it, and find out by how much and why batch normalisation makes
# two devices differ from one. Then you try four remedies, one of them from scratch.
#
# ## What you'll learn
#
# - what changes from `mx.nd` arrays to `mx.np` arrays;
# - which helpers d2l has for several devices, and where they go wrong without a word;
# - what hybridising brings, on one device and on two;
# - why equality of k devices and one fails with BatchNorm, what restores it, and what that costs;
# - what is in a file of parameters that was saved on several devices.
#
# ## What you need
#
# Chapters 05 to 07, no GPU, and 4 GB of free memory. Reading takes about 50 minutes, running about
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
# This holds because the replicas are equal in *everything*, running statistics included. Remember
# that: after training it will no longer be so.
#
# ## d2l's training loop, put right
#
# The loop as published is good to read and has five weak spots. Try each before you mend it.
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
# **Two: the size of the tail.** The published loop calls `trainer.step(batch_size)` for every
# batch. **Predict:** with `batch_size` 256, by what factor is the update wrong for a last batch of
# 96?

# %%
assert 60_000 % 256 == 96, "the last batch of an epoch of 60,000"
def moved(divisor):  # by how much one weight moves, where each of 96 images pulls it by 1
    layer = nn.Dense(1, in_units=1, use_bias=False)
    layer.initialize(init.One())
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1.0})
    with autograd.record():
        total = layer(np.ones((96, 1))).sum()
    total.backward()
    trainer.step(divisor)
    return 1 - float(layer.weight.data())


# %% [markdown]
# Divided by 96 the weight moves by the mean of the gradients, which is 1.

# %%
assert 60_000 % 256 == 96, "the last batch of an epoch of 60,000"
print(f"step(96): {moved(96):.3f}, step(256): {moved(256):.3f} of the mean gradient")
assert abs(moved(256) / moved(96) - 96 / 256) < 1e-6, "divided by images that were not there"

# %% [markdown]
# The tail's images count for less than half. `trainer.step(len(y))` is right for all batches.
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
# quote the median of the rest. Chapter 09 looks closer at what happens in these seconds.
#
# With these changes, this is the loop. An older edition says that Trainer divides the batch and
# copies it to the devices. It doesn't: the shards are made here, and Trainer sums gradients and
# updates. Where the batch has fewer images than there are devices, use `helpers.training.fit`.

# %%
loss = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# One call sets up d2l's two tools and one line in each epoch feeds them; the rest is chapter 06's.

# %%
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
            trainer.step(len(y))
        npx.waitall()
        timer.stop()
        animator.add(epoch, evaluate(net, test, devices))
    return animator, timer.times


# %% [markdown]
# `d2l.Animator` redraws a figure after each epoch: it displays an SVG and clears it again. That is
# nice to watch in your own notebook. Here its drawing is caught by `capture_output`, and the figure
# shown once, at the end, with a text for those who can't see it. Three epochs of four batches of
# 16, the last one smaller, are no training yet; it is the loop that is tried.

# %% tags=["measured"]
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
# All replicas have seen the same updates, so all weights are equal. Are the *answers*? The same
# eight images, on each device:

# %%
def gap(net, x, devices):  # the largest difference between two devices' scores, as a share
    scores = [net(x.as_in_ctx(device)).asnumpy() for device in devices]
    return onp.max([onp.abs(s - scores[0]) for s in scores]) / onp.abs(scores[0]).max()


# %% [markdown]
# The weights are compared by the helper from chapter 06, to the bit.

# %%
assert_same_parameters(net)
assert gap(net, x, two) > 1e-3, "expected: the answers depend on the device"

# %% [markdown]
# They are not: the same image with the same weights gets other scores on the other device. What
# differs is what `assert_same_parameters` leaves out: BatchNorm's running statistics. Each device
# has collected those of its own shards. Evaluation uses them, so now an accuracy depends on which
# device gets which image.
#
# A remedy for evaluation: give every device the mean of all devices' statistics.

# %%
def share_statistics(net):
    for parameter in net.collect_params(".*running.*").values():
        values = [value.as_in_ctx(mx.cpu(0)) for value in parameter.list_data()]
        parameter.set_data(sum(values) / len(values))


# %% [markdown]
# The same question once more:

# %%
share_statistics(net)
assert gap(net, x, two) < 1e-5, "equal weights and equal statistics give equal answers"

# %% [markdown]
# That makes answers the same everywhere. It doesn't make *training* the same as on one device: for
# that see below.
#
# ## Hybridise
#
# So far Python runs the network line by line, and the engine gets one operator at a time.
# `hybridize` records the operators once as a graph, and then hands over the graph. But it works
# only from top to bottom of `HybridBlock`s, and `d2l.Residual` is a plain `Block`. So here is ours.
# Operators come from `F`, which is `mx.np`'s world when run as is and a symbol's when recorded.
# The kind of norm is an argument, since we'll want others. And relu is `npx.activation`, not d2l's
# `npx.relu`: the values are the same, but on a CPU the former takes arrays in the layout in which
# convolutions leave them, while the latter has them rewritten first.

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

# %%
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

# %%
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

# %% tags=["measured"]
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
# works on either kind of array): 1,280 images, once, in batches of 24. It takes **about
# half a minute** on slow cores. For the published lengths there is `make reproduce`, which trains
# on all 60,000 images for as long as you let it.

# %% tags=["measured"]
big.initialize(init.Xavier(), ctx=two, force_reinit=True)
big.hybridize(static_alloc=True, static_shape=True)  # again, see above
trainer = gluon.Trainer(big.collect_params(), "sgd", {"learning_rate": 0.1})
test = Batches(*test_set, 24, shuffle=False)
history = fit(big, trainer, Batches(*train_set, 24), two, test=test, title="ResNet-18")
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
# ## Why two devices are not one here
#
# In chapter 04 the weights of two devices and of one agreed to $10^{-12}$. Same test, ResNet, thin,
# float64, one step on eight images. **Predict** the difference: none, rounding, or more?

# %%
def after_one_step(contexts, size=8, **options):
    net = thin(contexts, like=origin, **options)
    step(net, *images(size), contexts)
    return net


# %% [markdown]
# In chapter 04 this came out below $10^{-14}$.

# %%
alone, both = after_one_step(pair[:1]), after_one_step(pair)
assert_same_parameters(both)
assert apart(both, alone) > 1e-4, "with BatchNorm two devices should not equal one"
print("equal among themselves, but more than 1e-4 away from one device")

# %% [markdown]
# Nothing was lost and no gradient is missing: the replicas are equal to each other. The cause is in
# the definition. Batch normalisation replaces each activation of a channel by
#
# $$\hat{x} = \frac{x - \mu}{\sqrt{\sigma^2 + \varepsilon}}, \qquad y = \gamma \hat{x} + \beta,$$
#
# where $\mu$ and $\sigma^2$ are taken over the batch *that the layer sees* (Ioffe and Szegedy,
# 2015). A device sees its shard. So the output for an image depends on which other images are in
# its shard: two devices train on another function than one device does.
#
# A cause can be tested. If that is all, then *one* device that normalises the two halves of the
# batch apart must equal two devices, to rounding.

# %%
class InHalves(nn.HybridBlock):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        return F.np.concatenate([self.norm(half) for half in F.np.split(x, 2)])


# %% [markdown]
# In place of every BatchNorm:

# %%
halved = after_one_step(pair[:1], norm=InHalves)
assert apart(both, halved) < 1e-12, "two devices = one that normalises each half by itself"
print("two devices equal one that normalises in halves, to 1e-12")

# %% [markdown]
# That is the whole cause. The test from the other side: a layer that normalises each image by
# itself can't know what else is in the shard. LayerNorm over the channels is one.

# %%
def layer_norm():
    return nn.LayerNorm(axis=1)


start = thin(pair[:1], norm=layer_norm)

# %% [markdown]
# Three steps from that start, on one device, on two and on four:

# %%
def three_steps(contexts, norm=layer_norm):
    net = thin(contexts, like=start, norm=norm)
    for i in range(3):
        step(net, *images(8, 8 * i), contexts)
    return net


# %% [markdown]
# **Predict** which of these hold.

# %%
on_one, on_two, on_four = (three_steps(four[:k]) for k in (1, 2, 4))
assert apart(on_one, start) > 1e-3, "three steps must move the weights, or this shows nothing"
assert apart(on_two, on_one) < 1e-12 and apart(on_four, on_one) < 1e-12, "equal without BatchNorm"
print("with LayerNorm, after three steps: 1, 2 and 4 devices agree to 1e-12")

# %% [markdown]
# ### The running statistics
#
# While it trains, BatchNorm keeps $r \leftarrow 0.9\, r + 0.1\, s$ of each statistic $s$, on each
# device of its shards. MXNet does this in the *backward* pass: a forward pass alone, even a
# recorded one, leaves them. The statistic here is the mean of 1 and 3.

# %%
norm = nn.BatchNorm(in_channels=1)
norm.initialize()
with autograd.record():
    out = norm(np.array([[1.0], [3.0]]))
assert float(norm.running_mean.data()) == 0, "forward: unchanged"
out.backward()
assert abs(float(norm.running_mean.data()) - 0.1 * 2) < 1e-6, "backward: a tenth of the mean, 2"

# %% [markdown]
# The first norm of the network sees the same convolution's output everywhere, so for it we can say
# just what each device knows after a backward pass.

# %%
def statistics(contexts):  # of the first norm: means, variances, each [devices, channels]
    net = thin(contexts, like=origin)
    backward(net, *images(8), contexts)
    return [onp.stack([a.asnumpy() for a in p.list_data()])
            for p in (net[1].running_mean, net[1].running_var)]


# %% [markdown]
# **Predict:** two devices, equal shards. Is the mean of their running means what one device has?

# %%
(mean_1,), (var_1,) = statistics(pair[:1])
means, variances = statistics(pair)
assert onp.abs(means[0] - means[1]).max() > 1e-4, "each device has its own"
assert onp.abs(means.mean(axis=0) - mean_1).max() < 1e-12, "their mean is one device's"

# %% [markdown]
# And the mean of their running variances? (MXNet keeps 0.9 as a float32, so to twelve digits the
# share of the new is not 0.1.)

# %%
new = 1 - float(onp.float32(0.9))
between = ((means - mean_1) / new).var(axis=0)  # how far the shards' means lie apart
assert between.max() > 1e-7, "the shards must differ, or this shows nothing"
assert onp.abs(variances.mean(axis=0) + new * between - var_1).max() < 1e-12, "lacks this part"

# %% [markdown]
# The variance of a batch is the mean variance *within* its shards plus the variance *between* their
# means. A device can't see the second part. So with small shards averaged variances are too small.
#
# There is one more thing to know. `Trainer` sets up its key-value store when `step` is called for
# the first time, and then copies *every* parameter from the first device to the others, running
# statistics too. **Predict:** are the devices' statistics different after the first whole step?
# After the second?

# %%
probe = thin(pair, like=origin)
trainer = gluon.Trainer(probe.collect_params(), "sgd", {"learning_rate": 0.1})
differ = []
for i in range(2):
    backward(probe, *images(8, 8 * i), pair)
    trainer.step(8)
    first, second = (a.asnumpy() for a in probe[1].running_mean.list_data())
    differ.append(onp.abs(first - second).max())
assert differ[0] == 0 < 1e-4 < differ[1], f"{differ}: equal after the first, not after the second"
print("after the first step: equal; after the second: each device has its own")

# %% [markdown]
# A test that looks after a single step would see equal statistics and be content. (What the other
# devices gathered in the first backward pass is overwritten. In a long training it fades away
# anyway: each later step keeps nine tenths of what was before.)
#
# ## Four remedies, and what each costs
#
# ### Larger shards
#
# The statistics of a shard are an estimate from $m$ images, so the difference should shrink as $m$
# grows. Before you look: **predict** the slope on two logarithmic axes, if the error of a mean of
# $m$ images is proportional to $1/\sqrt{m}$.

# %%
sizes = (2, 4, 8, 16, 32)  # images a device


def drift(size, start):
    nets = []
    for contexts in (pair[:1], pair):
        nets.append(thin(contexts, like=origin))
        step(nets[-1], *images(2 * size, start), contexts)
    return apart(nets[1], nets[0])


# %% [markdown]
# On three different sets of images:

# %%
drifts = onp.array([[drift(size, start) for size in sizes] for start in (0, 100, 200)])
middle = onp.median(drifts, axis=0)
assert middle[-1] < middle[0], "larger shards should bring two devices nearer to one"

# %% [markdown]
# Their median, and a line of slope −½ through the first:

# %% tags=["measured"]
slope = onp.polyfit(onp.log(sizes), onp.log(middle), 1)[0]
fig, ax = figure(f"The difference shrinks with the shard: fitted slope {slope:.2f}",
                 "images a device", "largest difference / largest weight")
ax.loglog(sizes, drifts.T, "o", color=GREY, alpha=0.7)
ax.loglog(sizes, middle, "-", color=BLUE, lw=2, label="two devices against one, median")
ax.loglog(sizes, middle[0] * onp.sqrt(sizes[0] / onp.array(sizes)), "--", color=ORANGE,
          label="slope −1/2")
ax.set_xticks(sizes, sizes), ax.set_xticks([], minor=True), ax.legend()
show(fig, alt="Difference in weights after one step against images a device, on logarithmic axes: "
     "it falls, beside a dashed line of slope minus one half.")

# %% [markdown]
# (The law is for the mean of independent values. A gradient that has come through seventeen norms
# need not keep to it; what is asserted is that the difference falls.)
#
# It costs memory, which grows with the shard, and it shrinks the difference without removing it. It
# matters most where memory allows only a few images a device, as in detection and segmentation.
#
# ### Another norm
#
# LayerNorm gave equality for nothing in communication. It costs another network: other weights,
# other accuracy, and its own time. (`GroupNorm` would be the usual choice for convolutions; in
# MXNet 1.9.1 it takes `mx.nd` arrays only.)

# %%
group = nn.GroupNorm(num_groups=2)
group.initialize()
assert raises(TypeError, lambda: group(np.ones((2, 4, 3, 3)))), "GroupNorm takes mx.nd only"

# %% [markdown]
# What LayerNorm's own time is on your machine, for a step of the whole network with eight images on
# one device:

# %% tags=["measured"]
for name, norm in (("BatchNorm", nn.BatchNorm), ("LayerNorm", layer_norm)):
    racer = contestant(lambda n, norm=norm: hybrid_resnet18(n, norm=norm), two[:1])
    rate(*racer, two[:1], size=8)
    seconds = [8 / rate(*racer, two[:1], size=8) for _ in range(3)]
    print(f"{name}: {onp.median(seconds):.2f} s a step")

# %% [markdown]
# ### Statistics of the whole batch, from scratch
#
# What one device knows and a shard doesn't are two numbers a channel: $\mu$ and $\sigma^2$. Both
# follow from sums: $\sum x$ and $\sum x^2$. Sums can be all-reduced. `as_in_ctx` is an operation
# like others to `autograd`, so a sum over devices can be differentiated.

# %%
def all_sum(arrays):  # to each device the sum of all, for autograd to see
    return [sum(a.as_in_ctx(b.context) for a in arrays) for b in arrays]


# %% [markdown]
# The norm itself, over a list of shards, one a device. Compare with the formula: only the two sums
# are new.

# %%
def per_channel(a):
    return a.reshape(1, -1, 1, 1)


def norm_together(xs, gammas, betas, eps=1e-5):
    n = sum(x.size // x.shape[1] for x in xs)
    sums = all_sum([x.sum(axis=(0, 2, 3)) for x in xs])  # NEW: over all devices
    squares = all_sum([(x * x).sum(axis=(0, 2, 3)) for x in xs])  # NEW
    outputs = []
    for x, s, q, gamma, beta in zip(xs, sums, squares, gammas, betas):
        mu = s / n
        hat = (x - per_channel(mu)) / np.sqrt(per_channel(q / n - mu * mu + eps))
        outputs.append(per_channel(gamma) * hat + per_channel(beta))
    return outputs


# %% [markdown]
# The oracle: `nn.BatchNorm` on one device, with the whole batch. Values that tell devices apart:
# each shard has a mean of its own, and shards are uneven. `weights` stand for the gradient that
# comes from above.

# %%
rng = onp.random.default_rng(8)
batch = rng.normal(size=(10, 3, 4, 4)) + onp.arange(10).reshape(-1, 1, 1, 1)
weights = rng.normal(size=batch.shape)
scale, shift = rng.normal(size=3), rng.normal(size=3)


def f64(a, device):
    return np.array(a, dtype="float64", ctx=device)


# %% [markdown]
# Gluon's answer, on one device:

# %%
one = nn.BatchNorm(in_channels=3)
one.initialize(), one.cast("float64")
one.gamma.set_data(f64(scale, pair[0])), one.beta.set_data(f64(shift, pair[0]))
x_all = f64(batch, pair[0])
x_all.attach_grad()
with autograd.record():
    y_all = one(x_all)
    total = (y_all * f64(weights, pair[0])).sum()
total.backward()

# %% [markdown]
# And ours, with six images on one device and four on the other.

# %%
uneven = (slice(0, 6), slice(6, 10))
xs = [f64(batch[cut], device) for cut, device in zip(uneven, pair)]
gammas, betas = ([f64(a, device) for device in pair] for a in (scale, shift))
for a in [*xs, *gammas, *betas]:
    a.attach_grad()

# %% [markdown]
# Forward and backward, all devices in one go:

# %%
with autograd.record():
    ys = norm_together(xs, gammas, betas)
    parts = [(y * f64(weights[cut], y.context)).sum() for y, cut in zip(ys, uneven)]
autograd.backward(parts)

# %% [markdown]
# First the outputs, then the gradients.

# %%
def joined(arrays):
    return onp.concatenate([a.asnumpy() for a in arrays])


def close(a, b, what):
    assert onp.abs(a - b).max() < 1e-12 * onp.abs(b).max(), f"{what}: not what one device has"


# %% [markdown]
# As for scale and shift: Trainer would add up their gradients, so we do.

# %%
close(joined(ys), y_all.asnumpy(), "outputs")
close(joined(x.grad for x in xs), x_all.grad.asnumpy(), "gradient of the images")
for ours, theirs in ((gammas, one.gamma), (betas, one.beta)):
    close(sum(a.grad.asnumpy() for a in ours), theirs.grad().asnumpy(), theirs.name)
print("outputs and gradients of one device, to 1e-12, from uneven shards on two")

# %% [markdown]
# ### The backward pass by hand
#
# `autograd` did the backward pass. What does it have to send? With $g = \gamma\,\partial L/\partial
# y$ and $n$ values a channel over *all* devices, the chain rule gives
#
# $$\frac{\partial L}{\partial x} = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}
# \Big(g - \frac{1}{n}\sum g - \frac{\hat x}{n} \sum g\,\hat x\Big).$$
#
# The gradient of an image depends on all images of the batch, through two sums: so there are two
# all-reduces backward as well. With plain NumPy, shard by shard:

# %%
axes, n = (0, 2, 3), 10 * 4 * 4
mu, variance = (getattr(batch, s)(axis=axes, keepdims=True) for s in ("mean", "var"))
deviation = onp.sqrt(variance + 1e-5)
hats = [(batch[cut] - mu) / deviation for cut in uneven]
gs = [scale.reshape(1, -1, 1, 1) * weights[cut] for cut in uneven]
sum_g = sum(g.sum(axis=axes, keepdims=True) for g in gs)  # all-reduce
sum_gh = sum((g * hat).sum(axis=axes, keepdims=True) for g, hat in zip(gs, hats))  # all-reduce
by_hand = [(g - sum_g / n - hat * sum_gh / n) / deviation for g, hat in zip(gs, hats)]
close(onp.concatenate(by_hand), joined(x.grad for x in xs), "by hand")

# %% [markdown]
# What if the sums were left out of the backward pass only? The outputs would be right, the loss
# would fall, and the gradients would be wrong. Only a check of gradients finds that.

# %%
forgot = [(g - g.sum(axis=axes, keepdims=True) / n - hat * sum_gh / n) / deviation
          for g, hat in zip(gs, hats)]
assert raises(AssertionError, lambda: close(onp.concatenate(forgot), joined(
    x.grad for x in xs), "without one all-reduce")), "the check must see a missing all-reduce"

# %% [markdown]
# Does a whole network train so as one device does? Here all shards go through the network together,
# layer by layer, since a norm needs all of them.

# %%
def forward_together(net, xs):
    for layer in net:
        if isinstance(layer, nn.BatchNorm):
            xs = norm_together(xs, layer.gamma.list_data(), layer.beta.list_data())
        else:
            xs = [layer(x) for x in xs]
    return xs


# %% [markdown]
# A small one, with two norms:

# %%
def small(classes, channels):
    net = nn.HybridSequential()
    for width in channels[::2]:
        net.add(nn.Conv2D(width, kernel_size=3, strides=2), nn.BatchNorm(), nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


small_start = thin(pair[:1], make=small)

# %% [markdown]
# Three steps as above, with the forward pass to be chosen.

# %%
def small_steps(contexts, forward):
    net = thin(contexts, make=small, like=small_start)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for i in range(3):
        xs, ys = d2l.split_batch(*images(8, 8 * i), contexts)
        with autograd.record():
            losses = [loss(s, y) for s, y in zip(forward(net, xs), ys)]
        autograd.backward(losses)
        trainer.step(8)
    return net


def forward_apart(net, xs):
    return [net(x) for x in xs]


# %% [markdown]
# The reference is Gluon's own BatchNorm on one device; with it, two devices go astray:

# %%
reference = small_steps(pair[:1], forward_apart)
assert apart(reference, small_start) > 1e-3, "the weights must have moved"
assert apart(small_steps(pair, forward_apart), reference) > 1e-4, "BatchNorm a shard"

# %% [markdown]
# and with ours, on 1, 2 and 4 devices:

# %%
for k in (1, 2, 4):
    difference = apart(small_steps(four[:k], forward_together), reference)
    assert difference < 1e-12, f"{k} devices: {difference}"
print("statistics all-reduced: 1, 2 and 4 devices agree with one to 1e-12, after three steps")

# %% [markdown]
# That is the remedy in full. What does it cost in ResNet-18? Two sums a channel forward and two
# backward. **Predict:** is that much beside the gradients?

# %%
norms = {name: p for name, p in big.collect_params().items() if name.endswith("gamma")}
channels = sum(p.shape[0] for p in norms.values())
assert channels == 5 * 64 + 4 * (128 + 256 + 512), "one norm in the stem, two in each block"
print(f"{len(norms)} norms of {channels:,} channels: {4 * channels:,} numbers a step,",
      f"{4 * channels / count(big):.2%} of the gradients,")
print(f"in {2 * len(norms)} places where every device waits for all, against 1 for the gradients")

# %% [markdown]
# The numbers are nothing; the waiting is the price. A gradient may travel while the next one is
# computed. A norm can't go on before the slowest device has sent its sums, 34 times a step. (Our
# version is exact in float64. In float32, $\sum x^2/n - \mu^2$ takes the difference of two large
# numbers where $\mu$ is large; the second exercise does it better.)
#
# ### SyncBatchNorm
#
# Gluon has this ready, `mxnet.gluon.contrib.nn.SyncBatchNorm`. It takes `mx.nd` arrays only, so
# here it would raise:

# %%
from mxnet.gluon.contrib.nn import SyncBatchNorm

sync = SyncBatchNorm(in_channels=3, num_devices=1)
sync.initialize()
assert raises(TypeError, lambda: sync(np.ones((2, 3, 4, 4)))), "SyncBatchNorm takes mx.nd only"

# %% [markdown]
# And it waits inside an operator until `num_devices` devices have arrived. If one doesn't come, it
# waits for good, and no interrupt helps. So we try it in processes of their own, under a deadline.
# This is the program. Its argument will say how many of the two devices take part. All shards are
# in place before the norm is called: a shard cut on `cpu(0)` after that would be behind the waiting
# norm in `cpu(0)`'s queue, and never reach the other device.

# %%
NETWORK = """\
import sys
import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm

def network(norm, devices, x):
    net = nn.HybridSequential()
    for width in (4, 8, 8):
        net.add(nn.Conv2D(width, kernel_size=3), norm(), nn.Activation("relu"))
    net.add(nn.Dense(2))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(x)
    return net
"""

# %% [markdown]
# Two such networks with equal weights: on one device with BatchNorm, on both with SyncBatchNorm.

# %%
START = """
cpus = [mx.cpu(r) for r in range(2)]
x = mx.nd.random.normal(shape=(8, 3, 12, 12)) + mx.nd.arange(8).reshape((8, 1, 1, 1))
one = network(nn.BatchNorm, cpus[:1], x)
sync = network(lambda: SyncBatchNorm(num_devices=2), cpus, x)
for p, q in zip(one.collect_params().values(), sync.collect_params().values()):
    q.set_data(p.data())
shards = [x[4 * r : 4 * r + 4].copyto(cpus[r]) for r in range(2)]  # before any device waits
for a in [x, *shards]:
    a.attach_grad()
mx.nd.waitall()
print("ready", flush=True)
"""

# %% [markdown]
# Then the shards go in. Outputs and gradients are held against the one device with the whole batch.

# %%
STEP = """
with mx.autograd.record():
    outputs = [one(x)] + [sync(shard) for shard in shards[: int(sys.argv[1])]]
    losses = [(y ** 2).sum() for y in outputs]
mx.autograd.backward(losses)
for r, shard in enumerate(shards):
    for whole, part in ((outputs[0], outputs[1 + r]), (x.grad, shard.grad)):
        apart = abs(part.asnumpy() - whole.asnumpy()[4 * r : 4 * r + 4]).max()
        assert apart < 1e-4 * abs(whole.asnumpy()).max(), apart
print("outputs and gradients as on one device, to 1e-4", flush=True)
"""

# %% [markdown]
# A process is started with the number of scratch spaces that MXNet should have, since the norm
# holds one while it waits; the deadline counts from "ready".

# %%
import os
import subprocess
import sys


def start_child(active, copies):
    environment = os.environ | {"MXNET_CPU_TEMP_COPY": str(copies)}
    program = NETWORK + START + STEP
    return subprocess.Popen([sys.executable, "-c", program, str(active)], env=environment,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


# %% [markdown]
# It is waited for until the deadline, and then ended, whatever it does.

# %%
def outcome(child, deadline):
    with child:
        assert child.stdout.readline() == "ready\n", child.stderr.read()
        try:
            child.wait(deadline)
        except subprocess.TimeoutExpired:
            child.kill()
            return "not finished at the deadline"
        return child.stdout.read().strip() or child.stderr.read()


# %% [markdown]
# One after the other: both devices with plenty of scratch space; one device sitting out; both
# devices with the four scratch spaces that MXNet has by default. **Predict** which finish.

# %%
trials = ((2, 64, 60), (1, 64, 3), (2, 4, 3))  # devices, scratch spaces, seconds
good, idle, default = (outcome(start_child(k, copies), s) for k, copies, s in trials)
print("both devices:    ", good)
print("one sits out:    ", idle)
assert good.startswith("outputs and gradients as on one device"), good
assert "not finished" in idle, "a device that is waited for never came"

# %% [markdown]
# And as MXNet comes?

# %% tags=["measured"]
print("both devices, 4 scratch spaces:", default)

# %% [markdown]
# Where it isn't finished either, both devices are there and yet wait for each other: one is inside
# the norm and holds the scratch space that the other needs to get there. With 64 spaces they hardly
# ever meet. So for SyncBatchNorm the settings in `helpers.engine` decide not about speed but about
# finishing.
#
# ## Saving and loading on another number of devices
#
# Training runs on two devices; next week's machine has one, or four. `save_parameters` writes *one*
# value for each parameter. **Predict:** of which device, for the running statistics, which differ?

# %%
import tempfile

backward(both, *images(8, 8), pair)  # from here on each device has statistics of its own
folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "resnet.params")
both.save_parameters(path)

# %% [markdown]
# What is in the file, beside what is on the devices:

# %%
saved = npx.load(path)
for name, parameter in both._collect_params_with_prefix().items():
    values = onp.stack([a.asnumpy() for a in parameter.list_data()])
    assert (saved[name].asnumpy() == values.mean(axis=0)).all(), f"{name}: not the mean"

# %% [markdown]
# Of none: it writes the mean over devices, of everything. For weights that is the weight, since
# replicas are equal. For running means it is what one device would have; for running variances it
# lacks the part between the shards, as shown above. Nobody has evaluated this network before it
# was saved: each device has had other statistics.
#
# `ctx=` says where to load to; one device and four work from the same file.

# %%
loaded = []
for contexts in (four[:1], four):
    other = hybrid_resnet18(10, thin_channels)
    other.cast("float64")
    other.load_parameters(path, ctx=contexts)
    assert_same_parameters(other)
    assert apart(other, both) == 0, "the weights that were saved, on every device"
    loaded.append(other)

# %% [markdown]
# Is it the network that was saved? All loaded replicas answer alike, on one device as on four. The
# two that were trained answer otherwise, each in its own way.

# %%
x, _ = images(8)
answers = [loaded[0](x).asnumpy()] + [loaded[1](x.as_in_ctx(c)).asnumpy() for c in four]
assert onp.max([onp.abs(a - answers[0]) for a in answers]) < 1e-12, "loaded: all alike"

# %% [markdown]
# Now those that were trained:

# %%
before = [both(x.as_in_ctx(c)).asnumpy() for c in pair]
assert min(onp.abs(a - answers[0]).max() for a in before) > 1e-6, "before: neither of them"

# %% [markdown]
# And once they have shared their statistics:

# %%
share_statistics(both)
after = [both(x.as_in_ctx(c)).asnumpy() for c in pair]
assert onp.max([onp.abs(a - answers[0]) for a in after]) < 1e-12, "shared first: no surprise"
folder.cleanup()

# %% [markdown]
# So: call `share_statistics` at the end of an epoch, before you evaluate. Then what you measure is
# what you save, whichever device an image is sent to.
#
# ## Summary
#
# - `npx.set_np()` first; after it, `mx.np` arrays only. `d2l.try_gpu(i)` gives `cpu(0)` for every
#   *i* that doesn't exist, so a list of two may be one device twice.
# - d2l's loop is right in its core: shards, backward, step, `waitall` before the clock is read.
#   Mind the tail, `step(len(y))`, the type in which is counted, and the first epoch.
# - Hybridising takes memory requests out of the devices' way. Measure what it brings on yours.
# - BatchNorm normalises by the shard's statistics, so *k* devices are not one device: equal to one
#   that normalises the parts by themselves, to $10^{-12}$, and to nothing else.
# - Equality comes back with a norm that looks at one image only, or with sums over all devices,
#   forward and backward. Larger shards bring it nearer.
# - Running statistics differ by device. Files hold their mean. Share them before you evaluate.
#
# Next, chapter 09: asynchrony and overlap, or what the engine does while Python has gone on.
#
# **Further reading.** K. He et al., *Deep residual learning* (2015), arXiv:1512.03385; S. Ioffe and
# C. Szegedy, *Batch normalization* (2015), arXiv:1502.03167; *Dive into Deep Learning*, Concise
# Implementation for Multiple GPUs, and its early edition, Gluon Implementation for Multi-GPU
# Computation.

# %% [markdown]
# ## Exercises
#
# 1. **The tail with BatchNorm.** A batch of nine goes to two devices as five and four. Which single
#    device computes the same? Change `InHalves` so that it does, and show it to $10^{-12}$.
# 2. **Large means.** In float32, add 10,000 to `batch` and compute its variance as
#    $\sum x^2/n - \mu^2$. What is wrong? Find a way to all-reduce counts, means and *centred* sums
#    of squares instead that gives the variance of all from those of the shards.
# 3. **Where was it evaluated?** An old edition trains on all devices and then evaluates on the
#    first, `ctx[0]`. Is that wrong with BatchNorm? What does it cost, and what else does it hide?

# %% [markdown]
# **Solution 1.** The device that cuts the batch as the shards are cut, at five. `F.np.split` takes
# places to cut at as well. The loss is a mean over nine images either way, as long as `step` is
# told nine.

# %% tags=["solution"] jupyter={"source_hidden": true}
class InFiveAndFour(InHalves):
    def hybrid_forward(self, F, x):
        return F.np.concatenate([self.norm(part) for part in F.np.split(x, [5])])


def nine(contexts, cuts, **options):
    net = thin(contexts, like=origin, **options)
    (x, y), trainer = images(9), gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with autograd.record():
        losses = [loss(net(x[a:b].as_in_ctx(c)), y[a:b].as_in_ctx(c)) for a, b, c in cuts]
    autograd.backward(losses)
    trainer.step(9)
    return net


cut = nine(pair, [(0, 5, pair[0]), (5, 9, pair[1])])
assert apart(cut, nine(pair[:1], [(0, 9, pair[0])], norm=InFiveAndFour)) < 1e-12

# %% [markdown]
# **Solution 2.** $x^2$ is about $10^8$, of which float32 keeps seven digits, so a variance of a few
# units is lost in rounding. With counts $n_r$, means $\mu_r$ and centred sums $M_r$ of each shard:
# $\mu = \sum n_r \mu_r / n$ and $M = \sum M_r + \sum n_r (\mu_r - \mu)^2$ (Chan et al., 1979).
# These are sums over devices too: first $n_r \mu_r$, then the rest. It takes two rounds, not one.

# %% tags=["solution"] jupyter={"source_hidden": true}
far = (batch + 10_000).astype("float32")
truth = far.astype("float64").var()
naive = (far * far).sum(dtype="float32") / far.size - far.mean(dtype="float32") ** 2
parts = [far[cut] for cut in ((slice(0, 6), slice(6, 10)))]
n_r, mu_r = onp.array([p.size for p in parts]), onp.array([p.mean(dtype="float64") for p in parts])
centred = sum(((p - m) ** 2).sum() for p, m in zip(parts, mu_r))
mu = (n_r * mu_r).sum() / n_r.sum()
merged = (centred + (n_r * (mu_r - mu) ** 2).sum()) / n_r.sum()
assert abs(naive - truth) > 0.1 * truth, "the difference of two large numbers"
assert abs(merged - truth) < 1e-4 * truth, "centred first, nothing is lost"

# %% [markdown]
# **Solution 3.** Not wrong, but it is the accuracy of *one* replica, with the statistics of the
# shards that came to `ctx[0]`. It uses one device while the others idle, so it takes about $k$
# times as long. And it can't see that another replica has gone astray: if all-reduce failed, the
# first device would still be evaluated as if nothing had happened.

# %% tags=["solution"] jupyter={"source_hidden": true}
astray = thin(pair, like=origin)
astray[0].weight.data(pair[1])[:] = 0  # as if an update had gone wrong on cpu(1)
x, y = images(8)
assert (astray(x).asnumpy() == thin(pair, like=origin)(x).asnumpy()).all(), "cpu(0) sees nothing"
assert raises(AssertionError, lambda: assert_same_parameters(astray)), "comparing replicas does"
