# %% [markdown]
# # 09 · BatchNorm on several devices
#
# LeNet on k devices computes what LeNet on one device computes (chapters 04 to 07). ResNet-18 does
# **not**. It has batch normalisation, which takes a mean over the images that it sees, and a device
# sees its shard.
#
# ![One device sees the numbers 1, 3, 5 and 7, with the mean 4. Device 0 sees 1 and 3, with the mean
# 2, which is 2 less. Device 1 sees 5 and 7, with the mean 6, which is 2
# more.](src/drawings/shards_and_means.svg)
#
# ## What you'll do
#
# Work out a batch of four by hand, test the cause of the difference in ResNet-18, look at stored
# runs with small shards, and write a BatchNorm with which devices agree again.
#
# ## What you'll learn
#
# - why k devices and one differ with BatchNorm;
# - whether it hurt in our runs;
# - what becomes of the running statistics, and when to share them;
# - what synchronised BatchNorm computes, and what it sends.
#
# ## What you need
#
# Chapter 08 and no GPU. Reading takes {reading time}, running ten seconds on two cores.

# %%
from helpers import load_data, split_and_load
from helpers.compare import largest_difference
from helpers.networks import hybrid_resnet18
from helpers.training import fit

import mxnet as mx
import numpy as onp
from mxnet import autograd, gluon, init, np, npx
from mxnet.gluon import nn

npx.set_np()

# %% [markdown]
# Whether results are equal doesn't depend on the machine, so all devices here are simulated:

# %% tags=["measured"]
pair = [mx.cpu(0), mx.cpu(1)]
one = [mx.cpu(0)]
data = load_data("mnist", limit=4000)
print(data)


def batch_of(n, begin=0):  # n images and their labels
    x = data.train_images[begin : begin + n] - data.train_images.mean()
    y = data.train_labels[begin : begin + n]
    return np.array(x, dtype="float64"), np.array(y)

# %% [markdown]
# ## A batch of four, by hand
#
# What does BatchNorm compute? From each channel it subtracts the batch's mean, and divides by the
# standard deviation, the root of the variance (Ioffe and Szegedy, 2015). Here is a batch of four
# images with one number each. Two devices get two of them each.

# %%
x = onp.array([1.0, 3.0, 5.0, 7.0])
parts = {"whole batch": x, "shard 0": x[:2], "shard 1": x[2:]}
for name, values in parts.items():
    print(f"{name:11} {values}  mean {values.mean()}, variance {values.var()}")

# %% [markdown]
# Call $\delta$ how far a shard's mean is from the whole batch's. Shard 0 has $\delta = 2 - 4 =
# -2$, shard 1 has $\delta = 6 - 4 = +2$. Two equal shards always have opposite $\delta$: the whole
# mean is in the middle.
#
# The variance changes too. *Within* each shard it is 1. *Between* the shards' means 2 and 6 it is
# 4. The whole batch has both: $1 + 4 = 5$.
#
# **Predict:** which outputs does a device compute for its two images?

# %%
for name, values in parts.items():
    normalised = (values - values.mean()) / values.std()
    print(f"{name:11} {values} becomes {normalised.round(2)}")

# %% [markdown]
# On one device 3 becomes −0.45 and 7 becomes 1.34. On two devices both become 1. What becomes of an
# image depends on its shard. Gluon does the same; `train_mode` makes BatchNorm use the batch's
# statistics, its mean and variance:

# %%
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
batch = np.array(x, dtype="float32").reshape((4, 1))  # four images, one channel
with autograd.train_mode():
    print("one device:", norm(batch).asnumpy().ravel().round(2))
    for x_shard in split_and_load(batch, pair):
        print(x_shard.ctx, "of two:", norm(x_shard).asnumpy().ravel().round(2))

# %% tags=["fold"]
# check: Gluon's outputs are those by hand; variance within plus variance between is the whole's
with autograd.train_mode():
    whole_output = norm(batch).asnumpy().ravel()
    outputs = [norm(x_shard).asnumpy().ravel() for x_shard in split_and_load(batch, pair)]
assert onp.abs(whole_output - (x - 4) / onp.sqrt(5)).max() < 1e-4
assert onp.abs(onp.concatenate(outputs) - [-1, 1, -1, 1]).max() < 1e-4
for shards in [onp.split(x, 2), onp.split(onp.random.default_rng(9).normal(size=20), 4)]:
    within = onp.mean([shard.var() for shard in shards])
    between = onp.var([shard.mean() for shard in shards])
    whole = onp.concatenate(shards)
    assert abs(within + between - whole.var()) < 1e-12, "not the variance of the whole batch"
    assert abs(sum(shard.mean() - whole.mean() for shard in shards)) < 1e-12, "deltas add to zero"

# %% [markdown]
# **A device normalises by its own shard.** So from the same weights two devices get other outputs
# than one, and with them another loss and other gradients.
#
# ## Is that the whole cause, in ResNet-18?
#
# We take a *thin* ResNet-18, with 4 to 8 channels, in float64, so that rounding errors are tiny.
# `norm` is the class that it takes for each of its norms; below we put another in its place. The
# seed gives each network the same weights at the start.

# %%
def thin_resnet(devices, norm=nn.BatchNorm):
    mx.random.seed(8)
    net = hybrid_resnet18(10, channels=(4, 4, 8, 8), norm=norm)
    net.initialize(init.Xavier(), ctx=devices)
    net(np.zeros((8, 1, 28, 28), ctx=devices[0]))  # now all weights are drawn, in float32
    net.cast("float64")
    return net

# %% [markdown]
# `fit` is chapter 06's loop, which takes one step for each batch:

# %% tags=["trains"]
def trained_on(devices, batches, norm=nn.BatchNorm):
    net = thin_resnet(devices, norm)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    fit(net, trainer, batches, devices, progress=False)
    return net

# %% [markdown]
# To compare networks, we join all trained weights of a device to one long array:

# %%
def long_array(net, device):
    weights = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # not the norms' running mean and variance
            weights.append(parameter.data(device).asnumpy().ravel())
    return onp.concatenate(weights)

# %% [markdown]
# In chapter 04 the weights of two devices and of one agreed to $10^{-12}$. Here is the same test,
# one step on eight images. The difference is a share of the largest weight. **Predict:** is it
# rounding, or more?

# %% tags=["measured", "trains"]
one_device = long_array(trained_on(one, [batch_of(8)]), one[0])
trained = trained_on(pair, [batch_of(8)])
device_0 = long_array(trained, pair[0])
device_1 = long_array(trained, pair[1])
print("device 1 against device 0:  ", float(largest_difference(device_1, device_0)))
print(f"device 0 against one device: {float(largest_difference(device_0, one_device)):.2f}")

# %% [markdown]
# The replicas are equal, but they are far from what one device has. (This network is tiny, and a
# shard of four images estimates a variance badly.) If BatchNorm's shards are the whole cause, then
# *one* device that normalises the halves of its batch apart must get what two devices get.
# `InHalves` does that, in place of every BatchNorm of the network:

# %% tags=["trains"]
class InHalves(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        first, second = F.np.split(x, 2)
        return F.np.concatenate([self.norm(first), self.norm(second)])


halved = long_array(trained_on(one, [batch_of(8)], norm=InHalves), one[0])
print("two devices equal one that halves:", largest_difference(device_0, halved) < 1e-12)

# %% tags=["fold"]
# check: equal starts; weights move; two devices differ from one, and equal one that halves
def long_arrays(net):
    """Of all the network's devices."""
    devices = next(iter(net.collect_params().values())).list_ctx()
    return [long_array(net, device) for device in devices]


begin = long_arrays(thin_resnet(pair))
for norm_kind in [nn.BatchNorm, InHalves]:
    same = long_arrays(thin_resnet(one, norm_kind))
    assert largest_difference(begin, same[0]) == 0, "another start"
assert largest_difference(one_device, begin[0]) > 1e-3, "a step that moves nothing shows nothing"
assert largest_difference(device_1, device_0) == 0, "replicas have drifted apart"
assert largest_difference(device_0, one_device) > 1e-3, "two devices should differ from one"
assert largest_difference(device_0, halved) < 1e-12, "the halves should be the whole cause"

# %% [markdown]
# To $10^{-12}$ they are equal: **the shards' statistics are the whole cause.** A norm that looks at
# one image at a time, such as group norm, keeps k devices equal to one. That, and how fast the
# difference shrinks as shards grow, is in deeper: The law of the difference.
#
# ## Does it hurt?
#
# It is normal practice that each device uses its own statistics. The first training of ImageNet in
# an hour did so, with 32 images on each of 256 GPUs (Goyal et al., 2017, section 2.3). With 2
# images a GPU, though, BatchNorm's error on ImageNet was 10.6 points above group norm's (Wu and
# He, 2018).
#
# We stored runs of chapter 08's narrow network on MNIST: 20,480 images, two epochs, batch 64, five
# seeds. Only the number of devices changes, and so the images that each of them has. **Predict**
# which fall behind.

# %% tags=["fold"]
# measure: accuracy on 10,000 test images and training loss, after two epochs; five seeds each
import json
from pathlib import Path

from helpers.plotting import bars, show

stored = json.loads(Path("src/results/norm.json").read_text())
print("made by", stored["command"])
print("on", stored["machine"], stored["date"], "at commit", stored["commit"])
labels = {"norm-batch-1x64": "64 images,\n1 device", "norm-batch-2x32": "32 images,\n2 devices",
          "norm-batch-16x4": "4 images,\n16 devices", "norm-batch-32x2": "2 images,\n32 devices"}
percent, train_loss = {}, {}
for name, label in labels.items():
    last_epochs = [run[1] for run in stored["runs"][name]]
    right = onp.array([100 * epoch["accuracy"] for epoch in last_epochs])
    losses = onp.array([epoch["loss"] for epoch in last_epochs])
    percent[label] = right
    train_loss[label] = losses
    print(f"{label.split(',')[0]:9}  median {onp.median(right):.1f} % right ({right.min():.1f} to "
          f"{right.max():.1f}), training loss {onp.median(losses):.3f} ({losses.min():.3f} to "
          f"{losses.max():.3f})")

# %% tags=["fold"]
# draw: accuracies of five seeds each
title = "Five seeds each: accuracies overlap, from 64 images down to 2"
fig, ax = bars(title, "% of test images right", percent)
ax.set_ylim(94, 100)
show(fig, alt="Test accuracy of five seeds each, where BatchNorm sees 64, 32, 4 and 2 images, with "
              "medians; the ranges overlap.")

# %% tags=["fold"]
# check: medians within a point, ranges overlap; training loss is higher with 4 and 2 images
medians = [onp.median(right) for right in percent.values()]
assert max(medians) - min(medians) < 1, "one falls behind"
highest_low = max(right.min() for right in percent.values())
assert highest_low < min(right.max() for right in percent.values()), "a winner"
with_64, with_32, with_4, with_2 = train_loss.values()
assert min(*with_4, *with_2) > max(*with_64, *with_32), "the loss of small shards should be higher"
assert min(right.min() for right in percent.values()) > 94, "a point is outside the figure"

# %% [markdown]
# In the median none falls behind by a point. (Five seeds may well not show a difference of less
# than a point.) The *training* loss, which is computed with the shard's statistics, is higher with
# 4 and 2 images in every run. So **in these runs we saw no harm to accuracy.** MNIST is easy; the
# result on ImageNet says: with few images a device, don't rely on it.
#
# ## The running statistics
#
# What does BatchNorm use in an evaluation, where there is no batch? A running mean and variance.
# In training each device keeps $r \leftarrow 0.9\,r + 0.1\,s$, where $s$ is the mean or the
# variance of its shard, beginning with mean 0 and variance 1. (On a CPU MXNet does this in the
# backward pass, so the cell has one. On GPUs cuDNN does it in the forward pass, and keeps the
# variance with $n - 1$ in place of $n$.) The batch of four again. **Predict** the running means of
# both devices.

# %%
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
with autograd.record():
    outputs = [norm(x_shard) for x_shard in split_and_load(batch, pair)]
autograd.backward(outputs)
for device in pair:
    mean = norm.running_mean.data(device).item()
    variance = norm.running_var.data(device).item()
    print(f"{device}: running mean {mean:.2f}, running variance {variance:.2f}")

# %% [markdown]
# Device 0 has a tenth of its mean 2, device 1 a tenth of 6. Their average, 0.4, is what one device
# would have. Both variances are $0.9 \cdot 1 + 0.1 \cdot 1 = 1.0$, which happens to be where they
# began. One device would have $0.9 \cdot 1 + 0.1 \cdot 5 = 1.4$: no device sees the variance
# *between* the shards.

# %% tags=["fold"]
# check: running statistics change in the backward pass only, by a tenth of the shard's own
# (On GPUs cuDNN changes them in the forward pass: cudnn_batch_norm-inl.h in src/operator/nn/cudnn.)
for used, means, variances in [(pair, [0.2, 0.6], [1.0, 1.0]), (one, [0.4], [1.4])]:
    norm = nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=used)
    with autograd.record():
        outputs = [norm(x_shard) for x_shard in split_and_load(batch, used)]
    for device in used:
        assert (norm.running_mean.data(device), norm.running_var.data(device)) == (0, 1), "forward"
    autograd.backward(outputs)
    for device, mean, variance in zip(used, means, variances):
        assert abs(norm.running_mean.data(device).item() - mean) < 1e-6
        assert abs(norm.running_var.data(device).item() - variance) < 1e-6


def one_backward(net, batch, devices):
    x, y = batch
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(split_and_load(x, devices), split_and_load(y, devices)):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


# In ResNet-18, the first norm. MXNet stores 0.9 as a float32, so the new share isn't quite 0.1.
def first_norm(devices):
    net = thin_resnet(devices)
    one_backward(net, batch_of(8), devices)
    means = onp.stack([a.asnumpy() for a in net[1].running_mean.list_data()])
    variances = onp.stack([a.asnumpy() for a in net[1].running_var.list_data()])
    return means, variances


new = 1 - float(onp.float32(0.9))
whole_mean, whole_variance = first_norm(one)
means, variances = first_norm(pair)
between = ((means - whole_mean) / new).var(axis=0)
assert onp.abs(means[0] - means[1]).max() > 1e-4 and between.max() > 1e-7, "the same shards"
assert onp.abs(means.mean(axis=0) - whole_mean).max() < 1e-12, "the average of the means"
assert onp.abs(variances.mean(axis=0) + new * between - whole_variance).max() < 1e-12, "lacks it"

# %% [markdown]
# ### What that does to answers
#
# After two steps on two devices, both replicas have equal weights. **Predict:** do they give the
# same scores to the same image?

# %% tags=["trains"]
def score_difference(net, x):
    first = net(x.as_in_ctx(pair[0])).asnumpy()
    second = net(x.as_in_ctx(pair[1])).asnumpy()
    return largest_difference(second, first)


trained = trained_on(pair, [batch_of(8), batch_of(8, begin=8)])
first = long_array(trained, pair[0])
second = long_array(trained, pair[1])
x, y = batch_of(8)
print("weights are equal:               ", largest_difference(second, first) == 0)
print("scores differ by more than 0.001:", score_difference(trained, x) > 1e-3)

# %% [markdown]
# They don't: each replica has its own running statistics. An accuracy would depend on which device
# gets which image. (After one step they would agree: Trainer's first step copies *everything* of
# the first device.) The usual remedy, for shards of equal size, is that every device gets the
# average. Its variance lacks the part between the shards, so it is too small, the more so the
# smaller the shards. But all devices answer alike.

# %%
def share_statistics(net):
    for parameter in net.collect_params(".*running.*").values():  # of each norm: mean, variance
        replicas = parameter.list_data()
        total = 0
        for array in replicas:
            total = total + array.as_in_ctx(mx.cpu(0))
        for array in replicas:
            array[:] = total / len(replicas)  # writes to the array's device


share_statistics(trained)
print("after sharing, scores agree to 1e-12:", score_difference(trained, x) < 1e-12)

# %% [markdown]
# **Call `share_statistics` before you evaluate.** `save_parameters` writes this average, so then
# what you measure is what you save. In the stored runs, evaluated after sharing, it changed an
# accuracy by at most 0.21 points.

# %% tags=["fold", "trains"]
# check: sharing gives the mean, and keeps momentum, which set_data loses
net = thin_resnet(pair)
for begin in [0, 8]:
    one_backward(net, batch_of(8, begin), pair)
running = net.collect_params(".*running.*").values()
wanted = [onp.mean([a.asnumpy() for a in p.list_data()], axis=0) for p in running]
assert max(onp.ptp([a.asnumpy() for a in p.list_data()], axis=0).max() for p in running) > 1e-4
share_statistics(net)
for parameter, mean in zip(running, wanted):
    for array in parameter.list_data():
        assert onp.abs(array.asnumpy() - mean).max() < 1e-15


def by_set_data(net):
    net[1].running_mean.set_data(net[1].running_mean.data(pair[0]))


def two_with_momentum(share=None):
    net = thin_resnet(pair)
    settings = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings)
    for begin in [0, 8]:
        one_backward(net, batch_of(8, begin), pair)
        trainer.step(8)
        if share is not None:
            share(net)
    return long_arrays(net)


plain = two_with_momentum()
assert largest_difference(two_with_momentum(share_statistics), plain[0]) < 1e-12
assert largest_difference(two_with_momentum(by_set_data), plain[0]) > 1e-3, "set_data keeps it"

# %% tags=["fold", "trains"]
# check: the first step of a Trainer gives every device device 0's statistics; the second doesn't
net = thin_resnet(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
differ = []
for begin in [0, 8]:
    one_backward(net, batch_of(8, begin), pair)
    trainer.step(8)
    first, second = (a.asnumpy() for a in net[1].running_mean.list_data())
    differ.append(onp.abs(first - second).max())
assert differ[0] == 0 and differ[1] > 1e-4, "the store copies all parameters when it is set up"

# %% tags=["fold"]
# check: a saved network is the average of the devices, and gives one answer on 1 and 4 devices
import os
import tempfile

four = [mx.cpu(rank) for rank in range(4)]
one_backward(trained, batch_of(8, 16), pair)  # from here on each device has statistics of its own
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "resnet.params")
    trained.save_parameters(path)
    saved = npx.load(path)
    loaded = {}
    for k in [1, 4]:
        loaded[k] = hybrid_resnet18(10, (4, 4, 8, 8))
        loaded[k].cast("float64")
        loaded[k].load_parameters(path, ctx=four[:k])
        assert largest_difference(long_arrays(loaded[k]), long_arrays(trained)[0]) == 0
apart_most = 0
for name, parameter in trained._collect_params_with_prefix().items():
    values = onp.stack([a.asnumpy() for a in parameter.list_data()])
    assert (saved[name].asnumpy() == values.mean(axis=0)).all(), f"{name}: not the mean"
    apart_most = max(apart_most, onp.ptp(values, axis=0).max())
assert apart_most > 1e-6, "the devices must differ, or this shows nothing"
x, y = batch_of(8)
wanted = loaded[1](x).asnumpy()
for device in pair:
    own = trained(x.as_in_ctx(device)).asnumpy()
    assert onp.abs(own - wanted).max() > 1e-6, "before sharing: neither device's"
share_statistics(trained)
for net, devices in [(trained, pair), (loaded[4], four)]:
    for device in devices:
        assert onp.abs(net(x.as_in_ctx(device)).asnumpy() - wanted).max() < 1e-12, "all alike"

# %% tags=["fold"]
# check: by how many points sharing changed a stored accuracy
for epoch in [0, 1]:
    points = []
    for name in labels:
        for run in stored["runs"][name]:
            points.append(100 * (run[epoch]["accuracy"] - run[epoch]["own_accuracy"]))
    print(f"after epoch {epoch + 1}: sharing changed an accuracy by at most "
          f"{onp.abs(points).max():.2f} points")
    assert onp.abs(points).max() < 0.215

# %% [markdown]
# ## Statistics of the whole batch, from scratch
#
# Can devices normalise by the whole batch, though each has only a shard? They need its mean and
# variance, and both follow from sums: $\mu = \sum x / n$ and $\sigma^2 = \sum x^2/n - \mu^2$. Sums
# can be all-reduced. `autograd` treats `as_in_ctx` as an operation like others, so it can
# differentiate this all-reduce:

# %%
def all_sum(arrays):
    """For each device the sum of all arrays, on that device."""
    sums = []
    for receiver in arrays:
        total = 0
        for array in arrays:
            total = total + array.as_in_ctx(receiver.ctx)
        sums.append(total)
    return sums

# %% [markdown]
# For images, sums go over all images, rows and columns (axes 0, 2 and 3), and leave one number for
# each channel. `n` counts the values of a channel on all devices.

# %%
def statistics_of_all(x_shards):
    n = 0
    sums = []
    squares = []
    for x in x_shards:
        images, channels, rows, columns = x.shape
        n += images * rows * columns
        sums.append(x.sum(axis=(0, 2, 3), keepdims=True))
        squares.append((x * x).sum(axis=(0, 2, 3), keepdims=True))

    means = []
    variances = []
    for total, total_square in zip(all_sum(sums), all_sum(squares)):
        mean = total / n
        means.append(mean)
        variances.append(total_square / n - mean * mean)
    return means, variances

# %% [markdown]
# Try it on the batch of four. The shards' sums are $1 + 3 = 4$ and $5 + 7 = 12$, their sums of
# squares $1 + 9 = 10$ and $25 + 49 = 74$. **Predict** what both devices find.

# %%
image_shards = split_and_load(batch.reshape((4, 1, 1, 1)), pair)  # 4 images of 1 channel, 1 × 1
means, variances = statistics_of_all(image_shards)
for mean, variance in zip(means, variances):
    print(f"{mean.ctx}: mean {mean.item()}, variance {variance.item()}")

# %% [markdown]
# $16/4 = 4$ and $84/4 - 4^2 = 5$: mean and variance of the whole batch, on each device. With
# these, each device normalises its shard. As BatchNorm does, it then multiplies by a trained scale
# $\gamma$ and adds a trained shift $\beta$; the small `eps` keeps it from dividing by 0.

# %%
def norm_together(x_shards, gammas, betas, eps=1e-5):
    means, variances = statistics_of_all(x_shards)
    outputs = []
    for rank, x in enumerate(x_shards):
        normalised = (x - means[rank]) / np.sqrt(variances[rank] + eps)
        scale = gammas[rank].reshape((1, -1, 1, 1))  # one for each channel
        shift = betas[rank].reshape((1, -1, 1, 1))
        outputs.append(scale * normalised + shift)
    return outputs


gammas = [np.ones(1, ctx=device) for device in pair]
betas = [np.zeros(1, ctx=device) for device in pair]
for output in norm_together(image_shards, gammas, betas):
    print(output.ctx, output.asnumpy().ravel().round(2))

# %% [markdown]
# These are one device's outputs from above. The gradients are one device's too, even with uneven
# shards.

# %% tags=["fold"]
# check: outputs and gradients of norm_together are BatchNorm's, from six images and four
rng = onp.random.default_rng(8)
values = rng.normal(size=(10, 3, 4, 4)) + onp.arange(10).reshape(-1, 1, 1, 1)
above = rng.normal(size=values.shape)  # the gradient that comes from above
scale, shift = rng.normal(size=3), rng.normal(size=3)


def f64(a, device):
    return np.array(a, dtype="float64", ctx=device)


def close(found, expected, what):
    assert largest_difference(found, expected) < 1e-12, f"{what}: not what one device has"


one_norm = nn.BatchNorm(in_channels=3)
one_norm.initialize()
one_norm.cast("float64")
one_norm.gamma.set_data(f64(scale, pair[0]))
one_norm.beta.set_data(f64(shift, pair[0]))
whole_x = f64(values, pair[0])
whole_x.attach_grad()
with autograd.record():
    whole_y = one_norm(whole_x)
    total = (whole_y * f64(above, pair[0])).sum()
total.backward()

cuts = [slice(0, 6), slice(6, 10)]
uneven = [f64(values[cut], device) for cut, device in zip(cuts, pair)]
gammas = [f64(scale, device) for device in pair]
betas = [f64(shift, device) for device in pair]
for array in [*uneven, *gammas, *betas]:
    array.attach_grad()
with autograd.record():
    outputs = norm_together(uneven, gammas, betas)
    totals = [(y * f64(above[cut], y.ctx)).sum() for y, cut in zip(outputs, cuts)]
autograd.backward(totals)
close(onp.concatenate([y.asnumpy() for y in outputs]), whole_y, "outputs")
close(onp.concatenate([x.grad.asnumpy() for x in uneven]), whole_x.grad, "gradient of images")
close(sum(a.grad.asnumpy() for a in gammas), one_norm.gamma.grad(), "gradient of the scale")
close(sum(a.grad.asnumpy() for a in betas), one_norm.beta.grad(), "gradient of the shift")

# %% [markdown]
# ## A network that trains as on one device
#
# Does a network with such a norm train as on one device? All shards have to go through it together,
# layer by layer, since a norm needs all of them:

# %%
def forward_together(net, x_shards):
    for layer in net:
        if isinstance(layer, nn.BatchNorm):
            gammas = layer.gamma.list_data()
            betas = layer.beta.list_data()
            x_shards = norm_together(x_shards, gammas, betas)
        else:
            x_shards = [layer(x_shard) for x_shard in x_shards]
    return x_shards

# %% [markdown]
# A small network with two norms takes three steps on 2 devices, each with Gluon's BatchNorm for its
# *shard*, and three on 1, 2 and 4 devices, *together*. We compare the weights with those of one
# device and Gluon's BatchNorm:

# %% tags=["fold", "trains"]
# measure: whether three steps give the weights of one device with Gluon's BatchNorm
def two_norms_on(devices):
    mx.random.seed(8)
    net = nn.HybridSequential()
    for channels in [4, 8]:
        net.add(nn.Conv2D(channels, kernel_size=3, strides=2))
        net.add(nn.BatchNorm())
        net.add(nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(10))
    net.initialize(init.Xavier(), ctx=devices)
    net(np.zeros((2, 1, 28, 28), ctx=devices[0]))
    net.cast("float64")
    return net


def forward_apart(net, x_shards):
    return [net(x_shard) for x_shard in x_shards]


def three_steps(devices, forward):
    net = two_norms_on(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    for begin in [0, 8, 16]:
        x, y = batch_of(8, begin)
        losses = []
        with autograd.record():
            outputs = forward(net, split_and_load(x, devices))
            for output, y_shard in zip(outputs, split_and_load(y, devices)):
                losses.append(cross_entropy(output, y_shard))
        autograd.backward(losses)
        trainer.step(8)
    return long_arrays(net)


whole = three_steps(one, forward_apart)[0]
apart = three_steps(pair, forward_apart)
print("by shard, 2 devices equal one:     ", largest_difference(apart, whole) < 1e-12)
four = [mx.cpu(rank) for rank in range(4)]
for k in [1, 2, 4]:
    together = three_steps(four[:k], forward_together)
    print(f"together, k = {k}, equal one:         ", largest_difference(together, whole) < 1e-12)

# %% tags=["fold"]
# check: three steps move the weights; all-reduced statistics give one device's, others don't
assert largest_difference(whole, long_arrays(two_norms_on(one))[0]) > 1e-3
assert largest_difference(apart, whole) > 1e-4, "BatchNorm by shard should differ"
for k in [1, 2, 4]:
    together = three_steps(four[:k], forward_together)
    assert largest_difference(together, whole) < 1e-12, f"{k} devices"
inside = hybrid_resnet18(10, (4, 4, 8, 8))
hidden = [layer for layer in inside if not isinstance(layer, nn.BatchNorm)]
assert any(layer.collect_params(".*running.*") for layer in hidden), "these it wouldn't reach"

# %% [markdown]
# **With all-reduced statistics, k devices are one device again.** Ours is for learning: it doesn't
# reach norms inside blocks, as ResNet-18's are, and keeps no running statistics, so it can't
# evaluate. What would it cost in ResNet-18? Each norm sends two sums a channel in the forward
# pass. A device's sum goes into the outputs of *all* devices, so in the backward pass its gradient
# is a sum over all devices: two more (deeper: The law of the difference).

# %% tags=["fold"]
# measure: numbers that ResNet-18's norms send in a step, and in how many all-reduces
big = hybrid_resnet18(10)
big.infer_shape(np.zeros((1, 1, 28, 28)))
sizes = {}
for parameter in big.collect_params().values():
    if parameter.grad_req != "null":
        sizes[parameter.name] = int(onp.prod(parameter.shape))
norms = [size for name, size in sizes.items() if name.endswith("gamma")]
sent = 4 * sum(norms)
assert sum(norms) == 5 * 64 + 4 * (128 + 256 + 512), "one norm in the stem, two in each block"
print(f"{len(norms)} norms of {sum(norms):,} channels in all: {sent:,} numbers a step,",
      f"{sent / sum(sizes.values()):.2%} of the gradients,")
print(f"in {2 * len(norms)} all-reduces, if a norm's two sums travel together")

# %% [markdown]
# The numbers are few. But at each of these all-reduces every device waits for all others. A
# gradient can travel while the next one is computed (chapter 10); a norm can't go on without its
# sums.
#
# Gluon has a `SyncBatchNorm`, too, in `mxnet.gluon.contrib.nn`. It takes only `mx.nd` arrays, is
# right only for equal shards, and can hang (deeper: The law of the difference). In PyTorch,
# `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` replaces every BatchNorm of a model that
# you then train with DDP on GPUs.
#
# ## Summary
#
# - BatchNorm normalises by the device's shard. So k devices equal one that normalises the shards
#   apart, to $10^{-12}$, and not one that normalises the batch.
# - That is normal practice. In our runs, shards of 64 to 2 images ended with overlapping
#   accuracies.
# - Running statistics, and so scores, differ from device to device. Share them before you evaluate.
# - All-reduce two sums a channel, in the forward pass and in the backward pass, and k devices are
#   one device again; but each all-reduce makes every device wait.
#
# Next, chapter 10: asynchrony and overlap, or what the engine does while Python has gone on.
#
# **Further reading.** S. Ioffe and C. Szegedy, *Batch normalization* (2015), arXiv:1502.03167; P.
# Goyal et al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677; Y. Wu and K. He, *Group
# normalization* (2018), arXiv:1803.08494.

# %% [markdown]
# ## Exercises
#
# 1. **The tail with BatchNorm.** A batch of nine goes to two devices as five and four. How must one
#    device cut it to compute the same? Change `InHalves` so that it does, and show it to
#    $10^{-12}$.
# 2. **Large means.** In float32, add 10,000 to the batch of four and compute its variance as $\sum
#    x^2/n - \mu^2$. What is wrong? Find the variance from the counts, means and *centred* sums of
#    squares $\sum (x - \mu)^2$ of the two shards instead.
# 3. **Where was it evaluated?** A script trains on all devices and evaluates on `devices[0]` only.
#    Is that wrong with BatchNorm? What does it cost, and what else does it hide?

# %% [markdown]
# ### Answer 1
#
# As the shards are cut, at five. `F.np.split` takes places to cut at as well. The loss is a mean
# over nine images either way, since `fit` tells `step` nine.

# %% tags=["solution", "trains"]
class InFiveAndFour(InHalves):
    def hybrid_forward(self, F, x):
        first, second = F.np.split(x, [5])
        return F.np.concatenate([self.norm(first), self.norm(second)])


on_two = long_arrays(trained_on(pair, [batch_of(9)]))
cut = long_arrays(trained_on(one, [batch_of(9)], InFiveAndFour))
print("five and four, as on two devices:", largest_difference(on_two, cut[0]) < 1e-12)
assert largest_difference(on_two, cut[0]) < 1e-12

# %% [markdown]
# ### Answer 2
#
# $x^2$ is about $10^8$, of which float32 keeps seven digits, so a variance of 5 is lost in
# rounding. With the counts $n_r$, means $\mu_r$ and centred sums $M_r$ of the shards: $\mu = \sum
# n_r \mu_r / n$ and $M = \sum M_r + \sum n_r (\mu_r - \mu)^2$ (Chan et al., 1979). These are sums
# over devices too.

# %% tags=["solution"]
far = np.array([10_001, 10_003, 10_005, 10_007], dtype="float32")
mean = far.sum() / 4
naive = (far * far).sum() / 4 - mean * mean
print("from sums of squares:", naive)

shards = [far[:2], far[2:]]
mean = sum(len(shard) * shard.mean() for shard in shards) / 4
centred = 0
for shard in shards:
    within = ((shard - shard.mean()) ** 2).sum()
    between = len(shard) * (shard.mean() - mean) ** 2
    centred = centred + within + between
print("from centred sums:   ", centred / 4)
assert abs(naive - 5) > 0.5, "the difference of two large numbers"
assert centred / 4 == 5, "centred first, nothing is lost here"

# %% [markdown]
# ### Answer 3
#
# Not wrong, but it is the accuracy of *one* replica, with the statistics of the shards that came to
# `devices[0]`. The others idle, so it takes up to $k$ times as long. And it can't see that another
# replica has gone astray.

# %% tags=["solution"]
from helpers.training import assert_same_parameters

astray = thin_resnet(pair)
astray[0].weight.data(pair[1])[:] = 0  # as if an update had gone wrong on cpu(1)
x, y = batch_of(8)
healthy = thin_resnet(pair)
assert (astray(x).asnumpy() == healthy(x).asnumpy()).all(), "cpu(0) sees nothing"
try:
    assert_same_parameters(astray)
    seen = False
except AssertionError:
    seen = True
    print("comparing replicas sees it")
assert seen
