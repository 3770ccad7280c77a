# %% [markdown]
# # Deeper · The law of the difference
#
# With BatchNorm, two devices are not one (chapter 09), since each normalises by its own shard. The
# larger the shard, the less that matters. By which law does the difference shrink? And from which
# shard on is it small?
#
# > **What you'll do:** derive a law, measure it in 22 networks, and test where it stops. Then see
# > what the backward pass of synchronised BatchNorm sends, and how Gluon's `SyncBatchNorm` hangs.
# >
# > **What you'll learn:** why the error of a step shrinks with $1/m$, and one device's only with
# > $1/\sqrt m$; what ReLU does to that law, and when to synchronise; that an all-reduce left out of
# > the backward pass can't be seen in the outputs.
# >
# > **What you need:** chapter 09 and no GPU. Reading takes {reading time}, running about two
# > minutes on two cores.

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
# What is wrong with a device's gradient? Two devices have $m$ images each. Device 0 gets the
# gradient $g_0$ of its losses, normalised by its own shard. It should be $h_0$: the gradient of the
# *same* losses where all $2m$ images are normalised together, as on one device. So the errors are
#
# $$e_0 = g_0 - h_0, \qquad e_1 = g_1 - h_1.$$
#
# The trainer adds the devices' gradients. **So the sum $e_0 + e_1$ is the error of the step.** How
# fast does it shrink?
#
# Let $\delta$ be the distance from the whole batch's mean to the shard's, in one channel. Chapter
# 09 had a batch of four: the shards' means were 2 and 6, the whole mean 4. So $\delta$ was −2 on
# device 0 and +2 on device 1. With equal shards it is always opposite.
#
# - $\delta$ is the error of a mean of $m$ values. So it shrinks with $1/\sqrt m$: four times the
#   images, half of $\delta$.
# - For a small $\delta$ an error is proportional to it. Let $s_0$ and $s_1$ be the derivatives of
#   the devices' gradients, per image, with respect to their means. Then the errors per image are
#   $s_0\,\delta$ and, since the other $\delta$ is opposite, $-s_1\,\delta$.
# - $s_0$ and $s_1$ are averages over $m$ images. So they are nearly equal, and their difference
#   shrinks with $1/\sqrt m$, too.
#
# | per image | is | shrinks with | slope on log axes |
# | --- | --- | --- | --- |
# | the step's error: sum / $2m$ | $(s_0 - s_1)\,\delta / 2$ | $1/m$, the two together | −1 |
# | difference of the errors / $2m$ | $(s_0 + s_1)\,\delta / 2$ | $1/\sqrt m$ | −½ |
# | device 0's error / $m$: the rows above added | $s_0\,\delta$ | $1/\sqrt m$ | −½ |
#
# (All channels' errors add up. The variance, and the means that the backward pass takes, are
# opposite on both devices in the same way, except for terms in $\delta^2$. Those don't cancel, but
# they shrink with $1/m$ as well.)
#
# The law assumes that $\delta$ is *small* and that gradients change *smoothly*. ReLU's jump at 0.
# **Predict:** does the step's error shrink faster or more slowly with it?
#
# ## The errors of one batch
#
# How do we get $g$ and $h$? We take a small network with one norm. Its activation is an argument:
# `softrelu`, $\ln(1 + e^x)$, is a smooth ReLU.

# %%
def dense_network(activation):
    net = nn.HybridSequential()
    net.add(nn.Dense(32))
    net.add(nn.BatchNorm())
    net.add(nn.Activation(activation))
    net.add(nn.Dense(10))
    return net

# %% [markdown]
# Folded are `conv_network`, which has a convolution before the norm; `on_pair(net, seed)`, which
# gives a network new weights on both devices; `random_batch(n, seed)`; and `long_gradient(net,
# device)`, all gradients as one array. All is in float64, so that rounding doesn't count.

# %% tags=["fold"]
# define: conv_network, on_pair, random_batch and long_gradient
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
    net(np.zeros((2, 1, 28, 28), ctx=pair[0]))  # the first call draws them, as float32
    net.cast("float64")
    return net


def random_batch(n, seed):
    rows = onp.random.default_rng(seed).integers(0, len(pixels), size=n)
    return np.array(pixels[rows], dtype="float64"), np.array(data.train_labels[rows])


cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def long_gradient(net, device):
    grads = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # null: the norms' running mean and variance
            grads.append(parameter.grad(device).asnumpy().ravel())
    return onp.concatenate(grads)

# %% [markdown]
# First $g_0$ and $g_1$, as two devices get them:

# %%
def gradients_by_device(net, x, y):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(split_and_load(x, pair), split_and_load(y, pair)):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)
    return long_gradient(net, pair[0]), long_gradient(net, pair[1])

# %% [markdown]
# Then $h_0$ and $h_1$. One device takes *all* images forward, and only one half's losses backward.
# (That half's gradient also runs through the other half's images, since they are in the mean.)

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
# The size of an array is its norm, the root of its sum of squares. We divide by the number of
# images whose losses are in it: $m$ for one device, $2m$ for both.
#
# Is such an error large? A gradient of $2m$ random images has *noise*: other images would give
# another gradient. The halves $h_0$ and $h_1$ have no error of BatchNorm, only other images. So
# half the distance of their means per image, $(h_0 - h_1) / 2m$, says how large the noise is.

# %%
def error_sizes(net, x, y):
    m = len(x) // 2
    g0, g1 = gradients_by_device(net, x, y)
    h0, h1 = gradients_by_half(net, x, y)
    e0 = g0 - h0
    e1 = g1 - h1
    return {
        "one device": onp.linalg.norm(e0) / m,
        "difference": onp.linalg.norm(e0 - e1) / (2 * m),
        "sum": onp.linalg.norm(e0 + e1) / (2 * m),
        "noise": onp.linalg.norm(h0 - h1) / (2 * m),
    }

# %% tags=["measured"]
net = on_pair(dense_network("softrelu"), seed=1)
for m in [4, 64, 1024]:
    x, y = random_batch(2 * m, seed=0)
    print(m, "images per device")
    for kind, size in error_sizes(net, x, y).items():
        print(f"    {kind:10} {size:.3f}")

# %% [markdown]
# All fall, and the sum fastest: from the noise's size to a small part of it. But is that the error
# of BatchNorm, or of our code? A norm that looks at one image at a time can't know about shards.
# Group normalisation is such a norm (Wu and He, 2018). With it, $g$ and $h$ must be *equal*. And if
# our code compared each device with the *other* half, they must not be:

# %% tags=["fold"]
# measure: whether g and h are equal with group norm, and with the halves swapped
class GroupNorm(nn.GroupNorm):
    """Gluon's, which takes `mx.nd` arrays only, for `mx.np` arrays."""

    # It has a scale and a shift for each group; the paper and PyTorch have them for each channel.
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
print("equal:                  ", largest_difference(by_device, by_half) < 1e-12)
print("equal with halves swapped:", largest_difference(by_device, swapped) < 1e-12)

# %% tags=["fold"]
# check: without shards no error; with swapped halves, or one half twice, there is one
assert largest_difference(by_device, by_half) < 1e-12, "an error that isn't BatchNorm's"
assert largest_difference(by_device, swapped) > 0.01, "swapped halves should be seen"
assert largest_difference(by_device, [by_half[0], by_half[0]]) > 0.01, "one half twice"
sizes = error_sizes(net, x, y)
assert max(sizes["one device"], sizes["difference"], sizes["sum"]) < 1e-12
assert sizes["noise"] > 0.01, "the halves have different images"
x_twice = np.concatenate([x[:16], x[:16]])
y_twice = np.concatenate([y[:16], y[:16]])
assert error_sizes(net, x_twice, y_twice)["noise"] < 1e-12, "equal halves have no noise"
begin = on_pair(conv_network("relu"), seed=1)
for m in [4, 64]:  # with BatchNorm the halves add up to the whole batch's gradient
    x, y = random_batch(2 * m, seed=0)
    with autograd.record():
        losses = cross_entropy(begin(x), y)
    losses.backward()
    whole = long_gradient(begin, pair[0])
    assert largest_difference(sum(gradients_by_half(begin, x, y)), whole) < 1e-10
    sizes = error_sizes(begin, x, y)
    assert sizes["sum"] > 1e-4
    # e_0 is half of the sum and half of the difference: no side of a triangle is longer than two
    most = 1.000001 * (sizes["sum"] + sizes["difference"])
    assert abs(sizes["sum"] - sizes["difference"]) < 1.000001 * sizes["one device"] < most
    # With the halves exchanged, "one device" is the other. |e_0|² + |e_1|² is half of
    # |e_0 + e_1|² + |e_0 - e_1|².
    x_exchanged = np.concatenate([x[m:], x[:m]])
    y_exchanged = np.concatenate([y[m:], y[:m]])
    other = error_sizes(begin, x_exchanged, y_exchanged)
    squares = sizes["one device"]**2 + other["one device"]**2
    assert onp.isclose(squares, 2 * (sizes["sum"]**2 + sizes["difference"]**2), rtol=1e-6)

# %% tags=["fold", "trains"]
# check: GroupNorm as in NumPy; with it, three steps of ResNet-18 agree on 1, 2 and 4 devices
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
# **Keep this:** what we measure is the error of BatchNorm.
#
# ## Slopes
#
# Does the law hold? We take both networks, each with the smooth activation and with ReLU, five
# times with different weights; and ResNet-18 with 4 to 8 channels and seventeen norms, twice. For
# each shard size we take the median over eight random batches (one for ResNet-18), and fit slopes
# to *large* shards, 64 to 1,024 images, and to *small* ones, 4 to 64.

# %% tags=["fold"]
# define: median_errors over random batches, and the slope of a line through them
SIZES = onp.array([4, 16, 64, 256, 1024])  # images per device
SMALL = slice(0, 3)
LARGE = slice(2, 5)


def median_errors(net, draws, seed):
    """`{kind of error: its median over the draws, for each of SIZES}`"""
    medians = {"one device": [], "difference": [], "sum": [], "noise": []}
    for m in SIZES:
        drawn = []
        for draw in range(draws):
            x, y = random_batch(2 * m, seed=[seed, draw, m])
            drawn.append(error_sizes(net, x, y))
        for kind in medians:
            medians[kind].append(onp.median([sizes[kind] for sizes in drawn]))
    return medians


def slope(medians, part):
    line = onp.polyfit(onp.log(SIZES[part]), onp.log(medians[part]), 1)
    return line[0]

# %% tags=["fold", "measured", "few:SEEDS = 5=>SEEDS = 2", "few:DRAWS = 8=>DRAWS = 4"]
# measure: all errors of 22 networks, in shards of 4 to 1,024 images
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
# measure: each slope's median over the networks
NETWORKS = ["dense, softrelu", "conv, softrelu", "dense, relu", "conv, relu", "ResNet-18, relu"]
KINDS = ["sum", "difference", "one device", "noise"]
slopes = {}  # (network, kind, "small" or "large"): one slope for each seed
for (name, _seed), medians in errors_of.items():
    for kind in KINDS:
        for part_name, part in [("small", SMALL), ("large", LARGE)]:
            found = slope(onp.array(medians[kind]), part)
            slopes.setdefault((name, kind, part_name), []).append(found)


def print_slopes(part_name, names):
    for name in names:
        row = [onp.median(slopes[name, kind, part_name]) for kind in KINDS]
        print(f"{name:16} {row[0]:5.2f} {row[1]:10.2f} {row[2]:12.2f} {row[3]:8.2f}")


print("large shards       sum  difference  one device   noise")
print("the law          -1         -0.5         -0.5     -0.5")
print_slopes("large", NETWORKS)
print("small shards")
print_slopes("small", ["dense, softrelu", "dense, relu"])

# %% tags=["fold"]
# draw: errors of the dense networks, smooth and with ReLU, medians over the networks
from helpers.plotting import curves, show

lines = {}
for activation in ["softrelu", "relu"]:
    for kind in ["difference", "sum"]:
        found = [errors_of[f"dense, {activation}", seed][kind] for seed in range(SEEDS)]
        lines[f"{activation}, {kind}"] = (SIZES, onp.median(found, axis=0))
fig, ax = curves("The step's error (sum) falls fastest, with ReLU more slowly", "images per device",
                 "error of the gradient, per image", lines, logx=True, logy=True)
ax.set_xticks(SIZES, SIZES)
ax.set_xticks([], minor=True)
large = SIZES[LARGE]
above_all = 1.6 * lines["relu, difference"][1][2]
below_all = 0.55 * lines["softrelu, sum"][1][2]
ax.plot(large, above_all * (large / 64) ** -0.5, color="black", lw=1)
ax.plot(large, below_all * (large / 64) ** -1.0, color="black", lw=1)
ax.text(256, 1.15 * above_all * 0.5, "slope −½", ha="left", va="bottom")
ax.text(256, 0.8 * below_all * 0.25, "slope −1", ha="right", va="top")
ax.legend(frameon=False, loc="lower left")
show(fig, alt="Errors against images per device on logarithmic axes, for a dense network with a "
              "smooth activation and with ReLU, beside lines of slope −½ and −1: the sum falls "
              "more steeply than the difference, and with ReLU less steeply than −1.")

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
for name in ["dense, softrelu", "dense, relu"]:
    for kind in ["difference", "one device"]:
        assert median_slope(name, kind, "small") < -0.6, "steeper than −½ over small shards"
for name in NETWORKS:
    assert -0.7 < median_slope(name, "noise", "large") < -0.3, "the noise: −½"
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
# - **With the smooth activation the law holds over large shards.** In the dense network the sum's
#   slope is near −1, the others are near −½. (Convolutional networks scatter more widely.)
# - **With ReLU the dense network's sum is flatter**: near −¾ in the median, and above −0.9 in each
#   of five networks with the same weights. (The convolutional network's lies between.) An estimate:
#   $\delta$ moves inputs of ReLU across zero, and each time a gradient jumps. That happens in about
#   $m\,\delta$ images, so in about $\sqrt m$. Such a count varies by its own root, $m^{1/4}$, and
#   differently on both devices. Per image that adds $m^{1/4}/m = m^{-3/4}$ to the sum.
# - **In ResNet-18 the sum isn't near −1**, even over large shards. It has many norms and many
#   kinks; which of the two it is, we haven't separated.
# - **Over small shards** the dense networks' difference and one device's error are steeper than −½.
#   (The sum's slope may well be near −1 there: terms with $\delta^2$ shrink with $1/m$, too.)
#
# Is $\delta$ too large in small shards? To test that, we normalise by statistics halfway between
# the whole batch's and the shard's. An error of first order in $\delta$ is then one half, one of
# second order one quarter.

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


remaining = {}  # (activation, images per device): one share for each network
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
        print(f"dense, {activation:8} {m:4} images per device: {onp.median(shares):.2f} of the "
              f"error remains ({min(shares):.2f} to {max(shares):.2f})")

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
# order** there. With 4 images about a third remains, so **second order still counts**. With ReLU
# more than half remains at 64 and at 1,024, as the estimate has it: a part that goes with the root
# of $m\,\delta$ shrinks only to $\sqrt{1/2}$.
#
# So the law is one of large shards and smooth networks. And when does it matter? Here is the error
# of the step, divided by the noise that the step has anyway. (Noise averages out over steps. The
# part of the error that doesn't change its sign won't.)

# %% tags=["fold", "measured"]
# measure: the error of the step over the noise, medians over the networks
over_noise = {}  # (network, images per device)
print("images per device    4     64   1,024")
for name in NETWORKS:
    found = []
    for (other, _seed), medians in errors_of.items():
        if other == name:
            found.append(onp.divide(medians["sum"], medians["noise"]))
    row = dict(zip(SIZES.tolist(), onp.median(found, axis=0)))
    for m in [4, 64, 1024]:
        over_noise[name, m] = row[m]
    largest_share = max(shares[-1] for shares in found)  # with 1,024 images
    assert largest_share < 0.33 or DRAWS < 8, name
    print(f"{name:16} {row[4]:6.2f} {row[64]:6.2f} {row[1024]:6.2f}")

# %% tags=["fold"]
# check: more than half of the noise with 4 images in three networks, under a third with 1,024
for name in NETWORKS:
    assert over_noise[name, 1024] < 0.33, name
    assert over_noise[name, 1024] < over_noise[name, 4], name
for name in ["dense, softrelu", "dense, relu", "ResNet-18, relu"]:
    assert over_noise[name, 4] > 0.5, name
    assert over_noise[name, 4] > over_noise[name, 64] > over_noise[name, 1024], name

# %% [markdown]
# The noise shrinks with $1/\sqrt m$, the error of the step faster. **Keep this:** with a thousand
# images per device the error of BatchNorm was under a third of the noise. (By the medians above.
# ResNet-18's is of two networks with one batch each; others may have more.) With a few images it
# can be as large as the noise: then compare with synchronised statistics. (It needn't hurt: in
# chapter 09's runs accuracies overlapped in the end.)
#
# ## What the backward pass sends
#
# In chapter 09 `autograd` did the backward pass of synchronised BatchNorm. What has to be sent in
# it? $x$ is in its channel's mean and in its variance, so the chain rule has two sums, one for
# each:
#
# $$\frac{\partial L}{\partial x} = \frac{1}{\sqrt{\sigma^2 + \varepsilon}}
# \Big(dy - \frac{1}{n}\sum dy - \frac{\hat x}{n} \sum dy\,\hat x\Big).$$
#
# Here $dy = \gamma\,\partial L/\partial y$ is the gradient from above, times the scale; $\hat x$
# are the normalised values (`normalised`), and $n$ is their number in a channel, on *all* devices.
# So two numbers per channel are all-reduced backward, as two are forward. With NumPy, for six
# images on one device and four on the other:

# %%
rng = onp.random.default_rng(8)
x = rng.normal(size=(10, 3, 4, 4))  # 10 images, 3 channels, 4 × 4
# Image by image larger, so the shards differ.
x = x + onp.arange(10).reshape(-1, 1, 1, 1)
# The gradient from above, of the loss with respect to y.
above = rng.normal(size=x.shape)
gamma = rng.normal(size=3)

axes = (0, 2, 3)
n = 10 * 4 * 4
deviation = onp.sqrt(x.var(axis=axes, keepdims=True) + 1e-5)
normalised = (x - x.mean(axis=axes, keepdims=True)) / deviation
dy = gamma.reshape(1, -1, 1, 1) * above

images_of_0 = slice(0, 6)
images_of_1 = slice(6, 10)


def channel_sum(values):
    return values.sum(axis=axes, keepdims=True)


def input_gradient(dy, images, sum_dy, sum_dy_x):
    return (dy[images] - sum_dy / n - normalised[images] * sum_dy_x / n) / deviation

# %% [markdown]
# Each device makes both sums of its own images, then they are all-reduced:

# %%
dy_of_0 = channel_sum(dy[images_of_0])
dy_of_1 = channel_sum(dy[images_of_1])
dy_x_of_0 = channel_sum(dy[images_of_0] * normalised[images_of_0])
dy_x_of_1 = channel_sum(dy[images_of_1] * normalised[images_of_1])

sum_dy = dy_of_0 + dy_of_1  # all-reduce
sum_dy_x = dy_x_of_0 + dy_x_of_1  # all-reduce
grad_of_0 = input_gradient(dy, images_of_0, sum_dy, sum_dy_x)
grad_of_1 = input_gradient(dy, images_of_1, sum_dy, sum_dy_x)

# %% [markdown]
# Is that the gradient of Gluon's BatchNorm on one device? And what if one all-reduce were
# forgotten, so that each device uses its own sum? The outputs come from the forward pass, so they
# would be right. The gradients from above are random, with mean 0. **Predict:** are the gradients
# more wrong, or less, if their mean is 1?

# %% tags=["fold"]
# measure: the largest difference from BatchNorm's gradient, divided by the largest gradient
norm = nn.BatchNorm(in_channels=3)
norm.initialize()
norm.cast("float64")
norm.gamma.set_data(np.array(gamma, dtype="float64"))


def largest_errors(above):
    """With both all-reduces; without that of dy; without that of dy times normalised."""
    whole = np.array(x, dtype="float64")
    whole.attach_grad()
    with autograd.record():  # the gradient of this sum with respect to the output is `above`
        total = (norm(whole) * np.array(above, dtype="float64")).sum()
    total.backward()

    dy = gamma.reshape(1, -1, 1, 1) * above
    shards = [images_of_0, images_of_1]
    own = [channel_sum(dy[images]) for images in shards]
    own_x = [channel_sum(dy[images] * normalised[images]) for images in shards]
    both = [sum(own), sum(own)]
    both_x = [sum(own_x), sum(own_x)]
    errors = []
    for used, used_x in [(both, both_x), (own, both_x), (both, own_x)]:
        parts = []
        for rank, images in enumerate(shards):
            parts.append(input_gradient(dy, images, used[rank], used_x[rank]))
        errors.append(float(largest_difference(onp.concatenate(parts), whole.grad)))
    return errors, whole.grad.asnumpy()


for mean in [0, 1]:
    (with_both, without_dy, without_dy_x), whole_grad = largest_errors(above + mean)
    print(f"gradients from above with mean {mean}")
    print("    with both all-reduces: equal to 1e-12:", with_both < 1e-12)
    print(f"    without that of dy:                  {without_dy:.1%}")
    print(f"    without that of dy times normalised: {without_dy_x:.1%}")
    assert with_both < 1e-12
    if mean == 0:
        assert 1e-3 < without_dy < 0.05 and 1e-3 < without_dy_x < 0.05, "a few percent"
        ours = onp.concatenate([grad_of_0, grad_of_1])
        assert largest_difference(ours, whole_grad) < 1e-12, "the open cell's"
    else:
        assert without_dy > 0.15 and without_dy_x > 0.15, "far more"

# %% [markdown]
# Far more. With mean 0 their sums nearly cancel, and the largest error is only a few percent of the
# largest gradient. **Keep this:** test gradients, not only
# outputs, and in float64 to $10^{-12}$.
#
# ## Gluon's SyncBatchNorm
#
# Gluon's `mxnet.gluon.contrib.nn.SyncBatchNorm` has synchronised statistics ready, for `mx.nd`
# arrays. It averages the devices' means, so it is right for equal shards only. In training it waits
# *inside an operator* until `num_devices` devices have arrived (`sync_batch_norm-inl.h` at 1.9.1).
# What if one gets no images, say in the last batch of an epoch?
#
# A program that hangs needs a process of its own, with a deadline. Ours makes a step with BatchNorm
# on one device and with SyncBatchNorm on two, from equal weights, and compares outputs and
# gradients. Folded is `end_of(devices, spaces, deadline, read_early)`: it runs that program with
# this many devices taking part, and returns what it `said` and its `seconds`. With `read_early` it
# does what many training loops do: it reads device 0's loss at once, *before* device 1 is given its
# images.
#
# `spaces` is a second danger. Operators borrow *scratch space*, memory for intermediate results.
# All CPU devices share 4 of them (`MXNET_CPU_TEMP_COPY`); `helpers` makes it 64.

# %% tags=["fold"]
# define: the program, and end_of, which runs it under a deadline
import os
import select
import subprocess
import sys
import time
from collections import namedtuple

import psutil

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

def synchronised():
    return SyncBatchNorm(num_devices=2)

one = network(nn.BatchNorm, cpus[:1])
sync = network(synchronised, cpus)
for source, target in zip(one.collect_params().values(), sync.collect_params().values()):
    target.set_data(source.data())
"""

# The shards are cut before any device enters a norm: a cut on cpu(0) would queue behind the norm,
# which waits for that very shard.
STEP = """
shards = [x[0:4].copyto(cpus[0]), x[4:8].copyto(cpus[1])]
for array in [x, *shards]:
    array.attach_grad()
mx.nd.waitall()
print("ready", flush=True)

taking_part = int(sys.argv[1])
read_early = sys.argv[2] == "True"
outputs = []
with mx.autograd.record():
    whole_output = one(x)
    losses = [(whole_output ** 2).sum()]
    for shard in shards[:taking_part]:
        output = sync(shard)
        outputs.append(output)
        losses.append((output ** 2).sum())
        if read_early:
            losses[-1].asscalar()
mx.autograd.backward(losses)

def compare(part, whole, rows):
    difference = abs(part.asnumpy() - whole.asnumpy()[rows]).max()
    assert difference < 1e-4 * abs(whole.asnumpy()).max(), difference

compare(outputs[0], whole_output, slice(0, 4))  # if device 1 stays away, it waits here
compare(outputs[1], whole_output, slice(4, 8))
compare(shards[0].grad, x.grad, slice(0, 4))
compare(shards[1].grad, x.grad, slice(4, 8))
print("outputs and gradients of the images as on one device, to 1e-4", flush=True)
"""

Ending = namedtuple("Ending", ["said", "seconds"])  # seconds: None if it didn't end


def cpu_seconds(child):
    times = psutil.Process(child.pid).cpu_times()
    return times.user + times.system


def end_of(devices, spaces, deadline, read_early):
    environment = os.environ | {"MXNET_CPU_TEMP_COPY": str(spaces)}
    command = [sys.executable, "-c", START + STEP, str(devices), str(read_early)]
    child = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)
    with child:
        try:
            assert select.select([child.stdout], [], [], 60)[0], "not ready after a minute"
            assert child.stdout.readline() == "ready\n", child.stderr.read()
            begin = time.perf_counter()
            child.wait(deadline)
            seconds = time.perf_counter() - begin
            return Ending(child.stdout.read().strip() or child.stderr.read(), seconds)
        except subprocess.TimeoutExpired:
            before = cpu_seconds(child)
            time.sleep(1)
            used = cpu_seconds(child) - before
            assert child.poll() is None, "it was only slow: it has finished"
            assert used < 0.02, "it should wait, and compute nothing"
            return Ending(f"not finished; CPU time in the next second: {used:.2f} s", None)
        finally:
            child.kill()  # or the end of `with` would wait for it

# %% [markdown]
# **Predict** which of four cases finish: both devices with 64 spaces; one sits out; device 0's loss
# is read early; both devices with 4 spaces.

# %% tags=["measured", "few:shortest = 3=>shortest = 1"]
shortest = 3
both = end_of(devices=2, spaces=64, deadline=60, read_early=False)
print(f"both devices, 64 spaces: {both.said}, in {both.seconds:.2f} s")

# Seven times what is enough when all goes well.
deadline = max(shortest, 7 * both.seconds)
one_sits_out = end_of(devices=1, spaces=64, deadline=deadline, read_early=False)
print("one sits out, 64 spaces:", one_sits_out.said)
early = end_of(devices=2, spaces=64, deadline=deadline, read_early=True)
print("loss of 0 is read early:", early.said)
four_spaces = end_of(devices=2, spaces=4, deadline=deadline, read_early=False)
print("both devices, 4 spaces: ", four_spaces.said)

# %% tags=["fold"]
# check: with both devices and 64 spaces it is right; the three others hang
assert both.said.startswith("outputs and gradients"), both.said
for ending in [one_sits_out, early, four_spaces]:
    assert ending.said.startswith("not finished") and ending.seconds is None, ending.said

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
# Three of four hang. They use no CPU time: they wait. A loss that is read early waits for device 0,
# device 0 for device 1, and that for Python, which waits for the loss. (MXNet's issue 12001 has an
# `asnumpy()` that fails.) In the last case we take it that one holds the scratch space that the
# other needs to get to the norm. In our trials 17 norms, as in ResNet-18, hung with 64 spaces and
# finished with 128. **On GPUs** each device has its own (`src/resource.cc` at 1.9.1), so that
# should not happen there; we haven't tested it.
#
# **Keep this:** with `SyncBatchNorm` give every device images in every step, equally many, and read
# nothing before all have got theirs.
#
# ## Summary
#
# - The trainer adds gradients, so the sum of the devices' errors is the error of the step. In it
#   errors of first order nearly cancel: it shrinks with $1/m$, one device's error with $1/\sqrt m$.
# - That held in two smooth networks with 64 to 1,024 images per device. With 4, second order still
#   counts. With ReLU a dense network's sum shrinks more slowly; ResNet-18's wasn't near −1, either.
# - A step's noise shrinks with $1/\sqrt m$. With 1,024 images per device the step's error was under
#   a third of it (medians of our networks), with 4 more than half of it in three kinds of five.
# - Synchronised BatchNorm all-reduces two sums per channel forward and two backward. Without those
#   of the backward pass, outputs are right and gradients wrong.
# - `SyncBatchNorm` waits inside an operator. It hangs if a device stays away, if a result is read
#   before all devices have their images, or if scratch spaces are too few.
#
# **Further reading.** Y. Wu and K. He, *Group normalization* (2018), arXiv:1803.08494; K. He et
# al., *Deep residual learning* (2015), arXiv:1512.03385, for frozen statistics.

# %% [markdown]
# ## Exercises
#
# 1. **Frozen statistics.** BatchNorm can be *frozen*: it normalises by statistics that were
#    computed before (He et al., 2015, appendix A). Chapter 09's stored runs, `results/norm.json`,
#    have it in their second epoch (`norm-frozen-1x64`: 64 images per device, `norm-frozen-32x2`:
#    2). Compare with BatchNorm at the same low rate (`norm-later-…`): accuracy and training loss.
#    What does that suggest? And where is group norm (`norm-group-1x64`) after two epochs?

# %% [markdown]
# ### Answer 1
#
# Freezing changed no run's accuracy by a quarter of a point. With frozen statistics 2 images have
# nearly the training loss of 64, with BatchNorm they don't. That *suggests* that most of the gap
# comes from *normalising* by two images. But the loss is taken in training mode, so part of the gap
# is how it is measured; accuracies, measured alike, hardly differ. The rate is low, 0.001, since
# with 0.1 and with 0.01 the loss rose or became NaN in our trials with frozen statistics; at 0.1 we
# haven't tested it. Group norm, of eight groups, three seeds, was behind after two epochs, at
# BatchNorm's learning rate; we tuned nothing for it.

# %% tags=["solution"]
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
    # Same seeds.
    change = percent[f"norm-frozen-{images}"] - percent[f"norm-later-{images}"]
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
