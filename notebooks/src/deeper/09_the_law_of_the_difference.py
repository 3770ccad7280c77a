# %% [markdown]
# # Deeper · The law of the difference
#
# With BatchNorm, two devices are not one (chapter 09), since each normalises by its own shard. The
# larger the shard, the less that matters. By which law does the difference shrink?
#
# ## What you'll do
#
# Derive a law for the error of a device's gradient, measure it in several networks, and test where
# it stops. Then see what the backward pass of synchronised BatchNorm sends, what two other norms
# did, and how `SyncBatchNorm` hangs.
#
# ## What you'll learn
#
# - why one device's error goes with $1/\sqrt m$ and that of the sum with $1/m$, and where that
#   holds;
# - what ReLU does to that law;
# - that an all-reduce left out of the backward pass can't be seen in the outputs.
#
# ## What you need
#
# Chapter 09 and no GPU. Reading takes {reading time}, running about two minutes on two cores.

# %%
from helpers import load_data, split_and_load
from helpers.compare import largest_difference
from helpers.networks import hybrid_resnet18

import mxnet as mx
import numpy as onp
from mxnet import autograd, gluon, init, np, npx
from mxnet.gluon import nn

npx.set_np()

# %% tags=["measured"]
pair = [mx.cpu(0), mx.cpu(1)]
data = load_data("mnist", limit=12_800)
pixels = data.train_images - data.train_images.mean()
print(data)

# %% [markdown]
# ## The law
#
# What should a device's gradient be? That of its images' losses where *all* images are normalised
# together, as one device with the whole batch does it. The rest of what a device has is its
# *error*.
#
# Take two shards of $m$ images. Let $\delta$ be the distance, with its sign, from the whole batch's
# mean to the shard's. Chapter 09 had a batch of four: the shards' means were 2 and 6, the whole
# mean 4, so $\delta = -2$ on device 0 and $\delta = +2$ on device 1. In general:
#
# - $\delta$ is the error of a mean of $m$ values, so it goes with $1/\sqrt m$.
# - For a small $\delta$ a gradient changes in proportion to it. If $s_0$ and $s_1$ say how
#   strongly, the errors are $s_0\,\delta$ on device 0 and, since the other $\delta$ is opposite,
#   $-s_1\,\delta$ on device 1.
# - $s_0$ and $s_1$ are means of $m$ images each. So they are nearly equal, and their difference
#   also goes with $1/\sqrt m$.
#
# The *sum* of both errors is $(s_0 - s_1)\,\delta$, which goes with $1/\sqrt m \cdot 1/\sqrt m =
# 1/m$. Their *difference* is $(s_0 + s_1)\,\delta$, which goes with $1/\sqrt m$. Terms with
# $\delta^2$ go with $1/m$. (The variance has such an error as well, opposite on both devices but
# for terms with $\delta^2$.)
#
# So on logarithmic axes, against $m$, the sum should have the slope −1 and the difference −½. One
# device's error is half of both together, so its slope should be −½ as well, once the sum is small.
# The law assumes two things: that $\delta$ is *small*, and that gradients change *smoothly*.
#
# **Predict:** where do gradients jump in ResNet-18?
#
# ## The errors of one batch
#
# Two small networks with one norm each. Their activation is an argument: `softrelu`, $\ln(1 +
# e^x)$, is a smooth ReLU.

# %%
def dense_network(activation):
    net = nn.HybridSequential()
    net.add(nn.Dense(32))
    net.add(nn.BatchNorm())
    net.add(nn.Activation(activation))
    net.add(nn.Dense(10))
    return net


def conv_network(activation, norm=nn.BatchNorm):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, kernel_size=3, strides=2))
    net.add(norm())
    net.add(nn.Activation(activation))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(10))
    return net


def on_pair(net, seed):
    """The network with new weights on both devices, in float64."""
    mx.random.seed(seed)
    net.initialize(init.Xavier(), ctx=pair)
    net(np.zeros((2, 1, 28, 28), ctx=pair[0]))
    net.cast("float64")
    return net


def random_batch(n, seed):
    rows = onp.random.default_rng(seed).integers(0, len(pixels), size=n)
    return np.array(pixels[rows], dtype="float64"), np.array(data.train_labels[rows])

# %% [markdown]
# A gradient as one long array, and the two ways to get it. First as two devices do, each with its
# shard:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def long_gradient(net, device):
    grads = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":
            grads.append(parameter.grad(device).asnumpy().ravel())
    return onp.concatenate(grads)


def gradients_by_device(net, x, y):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(split_and_load(x, pair), split_and_load(y, pair)):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    return [long_gradient(net, pair[0]), long_gradient(net, pair[1])]

# %% [markdown]
# Then as they should be: one device normalises the whole batch, and we take the gradient of the
# losses of one half, then of the other.

# %%
def gradients_by_half(net, x, y):
    m = len(x) // 2
    gradients = []
    for half in [slice(0, m), slice(m, 2 * m)]:
        with autograd.record():
            losses = cross_entropy(net(x), y)
            half_loss = losses[half].sum()
        half_loss.backward()
        gradients.append(long_gradient(net, pair[0]))
    return gradients

# %% [markdown]
# The sizes of three errors, per image. The size of an array is the root of its sum of squares.

# %%
def error_sizes(net, x, y):
    m = len(x) // 2
    by_device = gradients_by_device(net, x, y)
    by_half = gradients_by_half(net, x, y)
    first = by_device[0] - by_half[0]
    second = by_device[1] - by_half[1]
    return {
        "one device": onp.linalg.norm(first) / m,
        "difference": onp.linalg.norm(first - second) / (2 * m),
        "sum": onp.linalg.norm(first + second) / (2 * m),
    }

# %% tags=["measured"]
net = on_pair(dense_network("softrelu"), seed=1)
for m in [4, 64, 1024]:
    found = error_sizes(net, *random_batch(2 * m, seed=0))
    print(f"{m:4} images a device: one device {found['one device']:.3f}, "
          f"difference {found['difference']:.3f}, sum {found['sum']:.3f}")

# %% [markdown]
# All three fall, and the sum fastest. But is that the error of BatchNorm, or of our code? A norm
# that looks at one image at a time can't know about shards. With it, both ways must give the
# *same* gradients. Group normalisation is such a norm: it takes mean and variance over groups of
# channels of one image (Wu and He, 2018). Gluon's takes `mx.nd` arrays only, so ours has a bridge.
# (It has a scale and a shift for each *group*; in the paper and in PyTorch each *channel* has its
# own.)

# %%
class GroupNorm(nn.GroupNorm):
    def hybrid_forward(self, F, x, gamma, beta):
        old = [array.as_nd_ndarray() for array in (x, gamma, beta)]
        return super().hybrid_forward(F, *old).as_np_ndarray()


def two_groups():
    return GroupNorm(num_groups=2)


net = on_pair(conv_network("relu", two_groups), seed=1)
x, y = random_batch(32, seed=0)
by_device = gradients_by_device(net, x, y)
by_half = gradients_by_half(net, x, y)
swapped = [by_half[1], by_half[0]]
print("equal:                 ", largest_difference(by_device, by_half) < 1e-12)
print("equal with half swapped:", largest_difference(by_device, swapped) < 1e-12)

# %% [markdown]
# With group norm the errors are zero. And if we compared each device with the *other* half, which
# differs by chance and thus also with $1/\sqrt m$, this check would tell us.

# %% tags=["fold"]
# check: without shards no error; with swapped halves or a half too few there is one
assert largest_difference(by_device, by_half) < 1e-12, "an error that isn't BatchNorm's"
assert largest_difference(by_device, swapped) > 0.01, "swapped halves should be seen"
assert largest_difference(by_device, [by_half[0], by_half[0]]) > 0.01, "one half twice"
assert max(error_sizes(net, x, y).values()) < 1e-12
begin = on_pair(conv_network("relu"), seed=1)
for m in [4, 64]:  # with BatchNorm the halves add up to the whole batch's gradient
    x, y = random_batch(2 * m, seed=0)
    with autograd.record():
        losses = cross_entropy(begin(x), y)
    losses.backward()
    whole = long_gradient(begin, pair[0])
    assert largest_difference(sum(gradients_by_half(begin, x, y)), whole) < 1e-10
    assert error_sizes(begin, x, y)["sum"] > 1e-4

# %% tags=["fold", "trains"]
# check: GroupNorm is NumPy's; with it, three steps of ResNet-18 agree on 1, 2 and 4 devices
from helpers.training import fit

values = onp.random.default_rng(9).normal(3, 2, (4, 6, 5, 5))
norm = two_groups()
norm.initialize()
norm.cast("float64")
scale, shift = onp.array([2.0, -1.0]), onp.array([0.5, 3.0])  # one for each group
norm.gamma.set_data(np.array(scale, dtype="float64"))
norm.beta.set_data(np.array(shift, dtype="float64"))
groups = values.reshape(4, 2, -1)  # 4 images, 2 groups of 3 channels of 5 × 5
deviation = onp.sqrt(groups.var(2, keepdims=True) + 1e-5)
hat = (groups - groups.mean(2, keepdims=True)) / deviation
expected = (scale.reshape(2, 1) * hat + shift.reshape(2, 1)).reshape(values.shape)
assert largest_difference(norm(np.array(values, dtype="float64")), expected) < 1e-12


def thin_grouped(devices, steps):
    mx.random.seed(8)
    net = hybrid_resnet18(10, (4, 4, 8, 8), two_groups)
    net.initialize(init.Xavier(), ctx=devices)
    net(np.zeros((2, 1, 28, 28), ctx=devices[0]))
    net.cast("float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    batches = [random_batch(8, seed) for seed in range(steps)]
    fit(net, trainer, batches, devices, epochs=int(steps > 0), progress=False)
    arrays = []
    for device in devices:
        weights = [p.data(device).asnumpy().ravel() for p in net.collect_params().values()]
        arrays.append(onp.concatenate(weights))
    return arrays


cpus = [mx.cpu(rank) for rank in range(4)]
on_one = thin_grouped(cpus[:1], 3)[0]
assert largest_difference(on_one, thin_grouped(cpus[:1], 0)[0]) > 1e-3, "the weights must move"
for k in [2, 4]:
    assert largest_difference(thin_grouped(cpus[:k], 3), on_one) < 1e-12, f"{k} devices"

# %% [markdown]
# ## Slopes
#
# Now both networks, each with the smooth activation and with ReLU, five times with other weights;
# and ResNet-18 with 4 to 8 channels and seventeen norms, twice. For each shard size we take the
# median over some random batches (one for ResNet-18), and fit a slope to *small* shards (4 to 64
# images) and to *large* ones (64 to 1,024).

# %%
SIZES = onp.array([4, 16, 64, 256, 1024])  # images a device
SMALL = slice(0, 3)
LARGE = slice(2, 5)


def median_errors(net, draws, seed):
    """`{kind of error: its median over the draws, for each of SIZES}`"""
    medians = {"one device": [], "difference": [], "sum": []}
    for m in SIZES:
        drawn = []
        for draw in range(draws):
            x, y = random_batch(2 * m, seed=[seed, draw, m])
            drawn.append(error_sizes(net, x, y))
        for kind in medians:
            medians[kind].append(onp.median([sizes[kind] for sizes in drawn]))
    return medians


def slope(medians, part):
    return onp.polyfit(onp.log(SIZES[part]), onp.log(medians[part]), 1)[0]

# %% tags=["measured", "few:SEEDS = 5=>SEEDS = 2", "few:DRAWS = 8=>DRAWS = 4"]
SEEDS = 5
DRAWS = 8
errors_of = {}  # (network, seed): what median_errors returned
for seed in range(SEEDS):
    for activation in ["softrelu", "relu"]:
        net = on_pair(dense_network(activation), seed)
        errors_of[f"dense, {activation}", seed] = median_errors(net, DRAWS, seed)
        net = on_pair(conv_network(activation), seed)
        errors_of[f"conv, {activation}", seed] = median_errors(net, DRAWS, seed)
for seed in range(2):
    net = on_pair(hybrid_resnet18(10, (4, 4, 8, 8)), seed)
    errors_of["ResNet-18, relu", seed] = median_errors(net, 1, seed)

# %% tags=["fold", "measured"]
# measure: each slope's median over the networks, and its range
slopes = {}
print("slope of the error           small shards             large shards")
for kind in ["difference", "sum", "one device"]:
    for name in ["dense, softrelu", "conv, softrelu", "dense, relu", "conv, relu",
                 "ResNet-18, relu"]:
        columns = []
        for part_name, part in [("small", SMALL), ("large", LARGE)]:
            found = []
            for (other, seed), medians in errors_of.items():
                if other == name:
                    found.append(slope(onp.array(medians[kind]), part))
            slopes[name, kind, part_name] = found
            columns.append(f"{onp.median(found):6.2f} ({min(found):.2f} to {max(found):.2f})")
        print(f"{kind:10}  {name:15} {columns[0]}   {columns[1]}")

# %% tags=["fold"]
# draw: errors of the dense networks, smooth and with ReLU, medians over the networks
from helpers.plotting import curves, show

lines = {}
for activation in ["softrelu", "relu"]:
    for kind in ["difference", "sum"]:
        found = [errors_of[f"dense, {activation}", seed][kind] for seed in range(SEEDS)]
        lines[f"{activation}, {kind}"] = (SIZES, onp.median(found, axis=0))
fig, ax = curves("The sum of two errors falls faster than their difference", "images a device",
                 "error of the gradient, per image", lines, logx=True, logy=True)
ax.set_xticks(SIZES, SIZES)
ax.set_xticks([], minor=True)
show(fig, alt="Errors against images a device on logarithmic axes, for a dense network with a "
              "smooth activation and with ReLU: the sum falls more steeply than the difference.")

# %% tags=["fold"]
# check: over large shards the smooth dense network has slopes near −½ and −1; ReLU's sum is flatter
def median_slope(name, kind, part):
    return onp.median(slopes[name, kind, part])


assert -0.6 < median_slope("dense, softrelu", "difference", "large") < -0.45, "the difference: −½"
assert -1.1 < median_slope("dense, softrelu", "sum", "large") < -0.9, "the sum: −1"
assert -0.65 < median_slope("dense, softrelu", "one device", "large") < -0.45, "one device's: −½"
assert median_slope("dense, softrelu", "one device", "small") < -0.75, "steeper for small shards"
assert max(slopes["dense, softrelu", "sum", "large"]) < min(slopes["dense, relu", "sum", "large"])
assert min(slopes["dense, relu", "sum", "large"]) > -0.9, "ReLU's sum is flatter in every network"
relu_difference = median_slope("dense, relu", "difference", "large")
assert median_slope("dense, relu", "sum", "large") < relu_difference, "but it falls faster"
assert median_slope("dense, softrelu", "difference", "small") < -0.6, "not −½ over small shards"
smooth = on_pair(dense_network("softrelu"), seed=0)
kinked = on_pair(dense_network("relu"), seed=0)
for this, that in zip(smooth.collect_params().values(), kinked.collect_params().values()):
    assert largest_difference(this.data(pair[0]), that.data(pair[0])) == 0, "other weights"
for name in ["conv, softrelu", "conv, relu"]:  # more scatter
    assert -0.8 < median_slope(name, "difference", "large") < -0.2
    steeper = median_slope(name, "difference", "large") - median_slope(name, "sum", "large")
    assert steeper > 0.15, "the sum should fall faster"
assert -1.25 < median_slope("conv, softrelu", "sum", "large") < -0.75, "the sum: −1"
of_sum = slopes["ResNet-18, relu", "sum", "large"]
assert onp.median(of_sum) > -0.9, "not −1"

# %% [markdown]
# Read the columns of large shards first.
#
# - **With the smooth activation the law holds.** In the dense network the sum falls with a slope
#   near −1; the difference and one device's error are near −½. In the convolutional network the
#   medians are near these too, with more scatter.
# - **Over small shards it doesn't hold yet.** The difference and one device's error fall with far
#   more than −½ there.
# - **With ReLU the dense network's sum is flatter**, near −¾, in each of five networks. The
#   weights are the same; only the activation differs. An estimate: $\delta$ moves some inputs of
#   ReLU across zero, and each time the gradient jumps. About $m\,\delta$ images do, that is $\sqrt
#   m$. Their number varies by its own root, $m^{1/4}$, and differently on both devices. Per image
#   that adds $m^{1/4}/m = m^{-3/4}$ to the sum.
# - **In ResNet-18 the sum isn't near −1**, even over large shards. It has seventeen norms and as
#   many kinks, one after the other. Which of the two it is, we haven't separated.
#
# Is $\delta$ too large in small shards? We can test that: use statistics that lie only *half* as
# far from the whole batch's. An error of first order in $\delta$ is then one half, one of second
# order a quarter.

# %% tags=["fold", "measured"]
# measure: what remains of one device's error if its shard's statistics are moved half the way
def error_of_way(net, x, y, way):
    """The gradient of the first half's losses, where its norm goes that part of the way."""
    m = len(x) // 2
    with autograd.record():
        z = net[0](x)
        whole_mean = z.mean(axis=0)
        whole_variance = ((z - whole_mean) ** 2).mean(axis=0)
        shard = z[:m]
        own_mean = shard.mean(axis=0)
        own_variance = ((shard - own_mean) ** 2).mean(axis=0)
        mean = whole_mean + way * (own_mean - whole_mean)
        variance = whole_variance + way * (own_variance - whole_variance)
        normalised = (shard - mean) / np.sqrt(variance + 1e-5)
        output = net[1].gamma.data() * normalised + net[1].beta.data()
        losses = cross_entropy(net[3](net[2](output)), y[:m])
    losses.backward()
    return long_gradient(net, pair[0])


remaining = {}  # (activation, images a device): one share for each network
for activation in ["softrelu", "relu"]:
    for m in [4, 64, 1024]:
        shares = []
        for seed in range(5):
            net = on_pair(dense_network(activation), seed)
            x, y = random_batch(2 * m, seed=[seed, m])
            none, half, full = (error_of_way(net, x, y, way) for way in (0, 0.5, 1))
            shares.append(onp.linalg.norm(half - none) / onp.linalg.norm(full - none))
            assert largest_difference(none, gradients_by_half(net, x, y)[0]) < 1e-10
            assert largest_difference(full, gradients_by_device(net, x, y)[0]) < 1e-10
        remaining[activation, m] = shares
        print(f"dense, {activation:8} {m:4} images a device: {onp.median(shares):.2f} of the error "
              f"remains ({min(shares):.2f} to {max(shares):.2f})")

# %% tags=["fold"]
# check: half of it remains at 64 images and at 1,024, less with 4; with ReLU more than half
def median_remaining(activation, m):
    return onp.median(remaining[activation, m])


assert 0.25 < median_remaining("softrelu", 4) < 0.43, "between first and second order"
for m in [64, 1024]:
    assert 0.46 < median_remaining("softrelu", m) < 0.52, "first order"
    assert median_remaining("relu", m) > 0.52, "kinks"

# %% [markdown]
# With the smooth activation half of the error remains at 64 images and at 1,024: it is of **first
# order** there. With 4 images about a third remains in the median, between one quarter and one
# half: there **second order still counts**. With ReLU more than half remains, as the estimate has
# it: a part that varies by the root of $m\,\delta$ shrinks only to $\sqrt{1/2}$.
#
# So the law is one of large shards and smooth networks.
#
# ## What the backward pass sends
#
# In chapter 09 `autograd` did the backward pass of synchronised BatchNorm. What does it have to
# send? Let $g = \gamma\,\partial L/\partial y$ be what comes from above, times the scale, $\hat x$
# the normalised values, and $n$ the number of values of a channel on *all* devices. The chain rule
# gives
#
# $$\frac{\partial L}{\partial x} = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}
# \Big(g - \frac{1}{n}\sum g - \frac{\hat x}{n} \sum g\,\hat x\Big).$$
#
# The gradient of an image depends on all images of the batch, through two sums. So two numbers a
# channel are all-reduced backward, as two are forward. Here it is with NumPy, for six images on one
# device and four on the other:

# %%
rng = onp.random.default_rng(8)
x = rng.normal(size=(10, 3, 4, 4)) + onp.arange(10).reshape(-1, 1, 1, 1)
above = rng.normal(size=x.shape)  # the loss's gradient with respect to y
gamma = rng.normal(size=3)
axes = (0, 2, 3)
n = 10 * 4 * 4
deviation = onp.sqrt(x.var(axis=axes, keepdims=True) + 1e-5)
normalised = (x - x.mean(axis=axes, keepdims=True)) / deviation
g = gamma.reshape(1, -1, 1, 1) * above

first = slice(0, 6)  # the images of device 0
second = slice(6, 10)  # and of device 1


def channel_sum(values):
    return values.sum(axis=axes, keepdims=True)


def input_gradient(shard, sum_g, sum_gx):
    return (g[shard] - sum_g / n - normalised[shard] * sum_gx / n) / deviation

# %%
own_g = channel_sum(g[first]), channel_sum(g[second])
own_gx = channel_sum((g * normalised)[first]), channel_sum((g * normalised)[second])
sum_g = own_g[0] + own_g[1]  # all-reduce
sum_gx = own_gx[0] + own_gx[1]  # all-reduce
by_hand = [input_gradient(first, sum_g, sum_gx), input_gradient(second, sum_g, sum_gx)]

norm = nn.BatchNorm(in_channels=3)
norm.initialize()
norm.cast("float64")
norm.gamma.set_data(np.array(gamma, dtype="float64"))
whole = np.array(x, dtype="float64")
whole.attach_grad()
with autograd.record():
    total = (norm(whole) * np.array(above, dtype="float64")).sum()
total.backward()
print("as on one device:", largest_difference(onp.concatenate(by_hand), whole.grad) < 1e-12)

# %% [markdown]
# What if one of the two all-reduces were left out? The outputs come from the forward pass, so they
# would be right, and a test of outputs would pass. **Predict:** does the test of gradients see it?

# %%
without_g = [input_gradient(first, own_g[0], sum_gx), input_gradient(second, own_g[1], sum_gx)]
without_gx = [input_gradient(first, sum_g, own_gx[0]), input_gradient(second, sum_g, own_gx[1])]
for name, wrong in [("sum of g", without_g), ("sum of g times normalised", without_gx)]:
    difference = largest_difference(onp.concatenate(wrong), whole.grad)
    print(f"without the all-reduce of the {name}: wrong by {float(difference):.3f} of the largest")

# %% tags=["fold"]
# check: by hand it is BatchNorm's gradient; each missing all-reduce is seen
assert largest_difference(onp.concatenate(by_hand), whole.grad) < 1e-12
assert largest_difference(onp.concatenate(without_g), whole.grad) > 1e-3
assert largest_difference(onp.concatenate(without_gx), whole.grad) > 1e-3

# %% [markdown]
# It does. **Test gradients, not only outputs.**
#
# ## Group norm and frozen statistics, in stored runs
#
# Where memory allows few images a device, two other ways are usual. One is group norm. The other is
# to *freeze* BatchNorm: it normalises by statistics that were computed before (He et al., 2015,
# appendix A). Chapter 09's stored runs have both: group norm of eight groups, with three seeds; and
# runs whose second epoch has frozen statistics, averaged over the devices. Those need a lower rate
# (with 0.1 and with 0.01 the loss rose or became NaN in our trials), so there are runs of BatchNorm
# whose second epoch has that lower rate, 0.001, as well.

# %% tags=["fold"]
# measure: accuracy and training loss after two epochs; what freezing changes, seed by seed
import json
from pathlib import Path

runs = json.loads(Path("../src/results/norm.json").read_text())["runs"]
labels = {"norm-batch-1x64": "64 images, BatchNorm", "norm-group-1x64": "64 images, group norm",
          "norm-later-1x64": "64 images, BatchNorm, low rate",
          "norm-frozen-1x64": "64 images, frozen, low rate",
          "norm-later-32x2": "2 images, BatchNorm, low rate",
          "norm-frozen-32x2": "2 images, frozen, low rate"}
percent, train_loss = {}, {}
for name, label in labels.items():
    right = onp.array([100 * run[1]["accuracy"] for run in runs[name]])
    losses = onp.array([run[1]["loss"] for run in runs[name]])
    percent[name], train_loss[name] = right, losses
    print(f"{label:31}{onp.median(right):.1f} % ({right.min():.1f} to {right.max():.1f}), loss "
          f"{onp.median(losses):.3f} ({losses.min():.3f} to {losses.max():.3f})")
for images in ["1x64", "32x2"]:
    change = percent[f"norm-frozen-{images}"] - percent[f"norm-later-{images}"]  # same seeds
    print(f"{images.split('x')[1]} images: freezing changes it by {change.min():+.2f} to "
          f"{change.max():+.2f} points")
    assert abs(change).max() < 0.25, "a quarter of a point or more"
assert percent["norm-group-1x64"].max() < percent["norm-batch-1x64"].min(), "group norm is behind"


def gap_of(way):
    few, many = train_loss[f"norm-{way}-32x2"], train_loss[f"norm-{way}-1x64"]
    return onp.median(few) - onp.median(many)


print(f"the loss with 2 images is above that with 64 by {gap_of('later'):.2f} with BatchNorm, "
      f"{gap_of('frozen'):.2f} frozen")
assert gap_of("later") > 3 * gap_of("frozen")

# %% [markdown]
# Freezing changed no run's accuracy by a quarter of a point. With frozen statistics 2 images have
# nearly the training loss of 64, with BatchNorm they don't. That *suggests* that most of the gap
# comes from *normalising* by two images; at the rate 0.1 we haven't tested it. MXNet's variant of
# group norm was behind after two epochs, at BatchNorm's learning rate; we tuned nothing for it.
#
# ## SyncBatchNorm, and how it hangs
#
# Gluon's `mxnet.gluon.contrib.nn.SyncBatchNorm` has synchronised statistics ready, for `mx.nd`
# arrays. It takes the plain mean of the devices' means, so it is right for equal shards only
# (`sync_batch_norm-inl.h` at 1.9.1). In training it waits *inside an operator* until `num_devices`
# devices have arrived. If one doesn't come, the program hangs. So here is
# a program to run in processes of their own, under a deadline. Its argument says how many devices
# take part. First two networks with equal weights, one with BatchNorm on one device, one with
# SyncBatchNorm on two:

# %%
START = """
import sys
import mxnet as mx
from mxnet.gluon import nn
from mxnet.gluon.contrib.nn import SyncBatchNorm

cpus = [mx.cpu(0), mx.cpu(1)]
x = mx.nd.random.normal(shape=(8, 3, 12, 12)) + mx.nd.arange(8).reshape((8, 1, 1, 1))

def network(make_norm, devices):
    net = nn.HybridSequential()
    for width in (4, 8, 8):
        net.add(nn.Conv2D(width, kernel_size=3))
        net.add(make_norm())
        net.add(nn.Activation("relu"))
    net.add(nn.Dense(2))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(x)  # outside autograd.record() a norm waits for nobody
    return net

one = network(nn.BatchNorm, cpus[:1])
sync = network(lambda: SyncBatchNorm(num_devices=2), cpus)
for source, target in zip(one.collect_params().values(), sync.collect_params().values()):
    target.set_data(source.data())
"""

# %% [markdown]
# Then a step. The shards are cut *before* any device enters a norm: a cut on `cpu(0)` would queue
# behind the norm, which waits for that very shard.

# %%
STEP = """
shards = [x[0:4].copyto(cpus[0]), x[4:8].copyto(cpus[1])]
for array in [x, *shards]:
    array.attach_grad()
mx.nd.waitall()
print("ready", flush=True)

taking_part = int(sys.argv[1])
with mx.autograd.record():
    outputs = [one(x)]
    for shard in shards[:taking_part]:
        outputs.append(sync(shard))
    losses = [(output ** 2).sum() for output in outputs]
mx.autograd.backward(losses)

for rank, shard in enumerate(shards):
    rows = slice(4 * rank, 4 * rank + 4)
    for whole, part in [(outputs[0], outputs[1 + rank]), (x.grad, shard.grad)]:
        apart = abs(part.asnumpy() - whole.asnumpy()[rows]).max()
        assert apart < 1e-4 * abs(whole.asnumpy()).max(), apart
print("outputs and gradients of the images as on one device, to 1e-4", flush=True)
"""

# %% tags=["fold"]
# measure: how such a process ends: what it says, or that at the deadline it waits without CPU time
import os
import select
import subprocess
import sys
import time

import psutil


def start_child(active, copies):
    environment = os.environ | {"MXNET_CPU_TEMP_COPY": str(copies)}
    return subprocess.Popen([sys.executable, "-c", START + STEP, str(active)], env=environment,
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def cpu_seconds(child):
    times = psutil.Process(child.pid).cpu_times()
    return times.user + times.system


def end_of(child, deadline):
    """What it says and its seconds; or its CPU time in the second after the deadline."""
    with child:
        try:
            assert select.select([child.stdout], [], [], 60)[0], "not ready after a minute"
            assert child.stdout.readline() == "ready\n", child.stderr.read()
            begin = time.perf_counter()
            child.wait(deadline)
            return child.stdout.read().strip() or child.stderr.read(), time.perf_counter() - begin
        except subprocess.TimeoutExpired:
            before = cpu_seconds(child)
            time.sleep(1)
            used = cpu_seconds(child) - before
            assert child.poll() is None, "it was only slow: it has finished"
            return f"not finished at the deadline; CPU time in the next second: {used:.2f} s", used
        finally:
            child.kill()  # or the end of `with` would wait for it

# %% [markdown]
# Operators borrow scratch space, and the norm's backward pass holds one while it waits
# (`sync_batch_norm-inl.h` at 1.9.1). `helpers` sets 64 of them, MXNet's default is 4
# (`MXNET_CPU_TEMP_COPY`). Three cases: both devices with 64 spaces; one device sits out; both
# devices with 4 spaces. **Predict** which finish.

# %% tags=["measured", "few:shortest = 3=>shortest = 1"]
shortest = 3
said, seconds = end_of(start_child(active=2, copies=64), deadline=60)
print(f"both devices, 64 spaces: {said}, in {seconds:.2f} s")
assert said.startswith("outputs and gradients"), said

deadline = max(shortest, 10 * seconds)  # ten times what is enough when all goes well
for name, active, copies in [("one sits out, 64 spaces", 1, 64), ("both devices, 4 spaces", 2, 4)]:
    said, used = end_of(start_child(active, copies), deadline)
    print(f"{name}: {said}")
    assert said.startswith("not finished") and used < 0.02, "it should wait, and compute nothing"

# %% [markdown]
# Two of three hang. They use no CPU time, so they are not slow: they wait. In the last case both
# devices are there, and yet nothing moves. We take it that one holds the scratch space that the
# other needs to get to the norm, since all CPU devices draw on the same ones. In our trials 17
# norms, as many as ResNet-18 has, hung with 64 spaces and finished with 128; each takes memory
# (deeper: What the second device brings). **On GPUs** each device has its own (`src/resource.cc`
# at 1.9.1), so this should not happen there; we haven't tested it. Where it finds such a
# layer, `helpers.training.fit` refuses a batch that doesn't divide.

# %% tags=["fold"]
# check: SyncBatchNorm takes no mx.np arrays
from mxnet.gluon.contrib.nn import SyncBatchNorm

sync = SyncBatchNorm(in_channels=3, num_devices=1)
sync.initialize()
try:
    sync(np.ones((2, 3, 4, 4)))
    refused = False
except TypeError:
    refused = True
assert refused

# %% [markdown]
# ## Summary
#
# - Two shards have opposite $\delta$. So errors of first order cancel in the sum of the gradients:
#   it falls with $1/m$, one device's with $1/\sqrt m$.
# - That held in two smooth networks with 64 to 1,024 images a device. With 4 images, second order
#   still counts; with ReLU a dense network's sum falls more slowly; ResNet-18's sum didn't reach
#   −1.
# - Synchronised BatchNorm all-reduces two sums a channel forward and two backward. Without those of
#   the backward pass, outputs are right and gradients wrong.
# - `SyncBatchNorm` waits inside an operator. It hangs if a device stays away, or for want of
#   scratch space.
#
# **Further reading.** Y. Wu and K. He, *Group normalization* (2018), arXiv:1803.08494; K. He et
# al., *Deep residual learning* (2015), arXiv:1512.03385, for frozen statistics.
