# %% [markdown]
# # 09 · BatchNorm on several devices
#
# LeNet on k devices computes what it computes on one (chapters 04 to 07). A network with batch
# normalisation, such as ResNet-18, does **not**. BatchNorm takes a mean over the images that it
# sees, and a device sees only its shard. *What does that change in the training, and what makes k
# devices equal to one again?*
#
# ![One device sees the numbers 1, 3, 5 and 7, with the mean 4. Device 0 sees 1 and 3, with the mean
# 2, which is 2 less. Device 1 sees 5 and 7, with the mean 6, which is 2
# more.](src/drawings/shards_and_means.svg)
#
# > **What you'll do:** follow four numbers through BatchNorm on two devices, look at stored runs,
# > and write a BatchNorm for the batch of all devices.
# >
# > **What you'll learn:** why BatchNorm makes k devices differ from one; what to do with running
# > statistics before you evaluate; whether small shards hurt in our runs; what synchronised
# > BatchNorm sends.
# >
# > **What you need:** chapter 08 and no GPU. Reading takes {reading time}, running less than a
# > minute on two cores.

# %%
import json
from pathlib import Path

from helpers import load_data, split_and_load, your_turn
from helpers.compare import largest_difference
from helpers.networks import hybrid_resnet18
from helpers.training import fit

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, init, nd
from mxnet.gluon import nn

four = [mx.cpu(rank) for rank in range(4)]  # all devices here are simulated
pair = four[:2]
one = four[:1]

# %% [markdown]
# ## A batch of four
#
# What does BatchNorm compute? It subtracts the batch's mean from each channel, and divides the
# result by the standard deviation, which is the root of the variance (Ioffe and Szegedy, 2015).
# Here is a batch of four images with one number each. Two devices get two of them each.

# %%
numbers = np.array([1.0, 3.0, 5.0, 7.0])
for values in [numbers, numbers[:2], numbers[2:]]:
    print(values, "has the mean", values.mean(), "and the variance", values.var())

# %% [markdown]
# A shard's mean isn't the whole batch's, and neither is its variance.
#
# In training (`train_mode`) Gluon's BatchNorm uses the mean and variance of what it gets. An array
# goes through the copy of the norm that is on its own device. **Predict:** what becomes of the four
# numbers on one device, and what on two?

# %% tags=["predict"]
x = nd.array(numbers).reshape((4, 1, 1, 1))  # 4 images, 1 channel, 1 × 1
x_shards = split_and_load(x, pair)

norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
with autograd.train_mode():
    print("one device:", norm(x).reshape(-1).asnumpy().round(2))
    for x_shard in x_shards:
        print(x_shard.context, "of two:", norm(x_shard).reshape(-1).asnumpy().round(2))

# %% [markdown]
# <details><summary>What came out</summary>
#
# On two devices both shards become −1 and 1. On one device 3 becomes −0.45 and 7 becomes 1.34, but
# on two devices both become 1.
#
# </details>
#
# **A device normalises by its own shard.** So from the same weights two devices get different
# outputs from those of one device, and so different gradients.
#
# ## Two devices train differently from one
#
# How much do the weights differ after a few steps? We take a small network with two norms. It is in
# float64, so that rounding errors are tiny. Our norms have no trained scale and shift, because
# these are the same wherever the batch is cut.

# %%
def small_net(devices):
    mx.random.seed(8)  # the same weights each time
    net = nn.Sequential()
    for channels in [4, 8]:
        net.add(nn.Conv2D(channels, kernel_size=3, strides=2, use_bias=False))
        net.add(nn.BatchNorm(scale=False, center=False))
        net.add(nn.Activation("relu"))
    net.add(nn.Dense(10))
    net.initialize(init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0]))  # the first call draws the weights
    net.cast("float64")
    return net

# %% tags=["measured"]
data = load_data("mnist", limit=4000)
print(data)
pixels = data.train_images - data.train_images.mean()


def batch_of(n, begin=0):
    x = nd.array(pixels[begin : begin + n], dtype="float64")
    y = nd.array(data.train_labels[begin : begin + n])
    return x, y

# %% [markdown]
# `fit` trains a network, as in chapter 06, with one step for each batch in a list:

# %%
def train(net, devices, batches):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    fit(net, trainer, batches, devices, progress=False)


def weights_of(net, device):
    weights = []
    for parameter in net.collect_params(".*weight|.*bias").values():
        weights.append(parameter.data(device))
    return weights

# %% [markdown]
# In chapter 04 the weights of two devices and of one agreed to $10^{-12}$. Here is the same test
# after three steps of ten images. (`largest_difference` divides a difference by the largest entry
# of the array.)

# %% tags=["measured", "trains"]
batches = [batch_of(10), batch_of(10, begin=10), batch_of(10, begin=20)]

net = small_net(one)
train(net, one, batches)
weights_on_one = weights_of(net, one[0])

net = small_net(pair)
train(net, pair, batches)
weights_on_0 = weights_of(net, pair[0])
weights_on_1 = weights_of(net, pair[1])

replicas_differ = largest_difference(weights_on_1, weights_on_0)
two_differ = largest_difference(weights_on_0, weights_on_one)
print(f"device 1 from device 0:   {replicas_differ:.2g}")
print(f"device 0 from one device: {two_differ:.2g}")
assert replicas_differ == 0
assert two_differ > 1e-3

# %% [markdown]
# The two replicas are equal, because both get the same update, by the sum of both gradients. But
# the difference from one device is far too large for a rounding error.
#
# Are the norms the whole cause? If so, the difference must go away when we change nothing but the
# norms. We do that in the last experiment of this chapter. But first: what else do the shards'
# means and variances change, besides the weights?
#
# ## The running statistics
#
# What does BatchNorm use in an evaluation, where there is no batch? It uses a running mean and a
# running variance, its **running statistics**, which begin at 0 and 1. In each training step a
# device keeps 0.9 of the old value, and adds 0.1 of its shard's. **Predict:** what are the running
# means of both devices after one step on the batch of four?

# %% tags=["predict"]
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)

outputs = []
with autograd.record():
    for x_shard in x_shards:
        outputs.append(norm(x_shard))
autograd.backward(outputs)

for device in pair:
    running_mean = norm.running_mean.data(device).asscalar()
    print(f"{device}: running mean {running_mean:.2f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Device 0 has a tenth of its mean 2, and device 1 has a tenth of 6. On one device it would be a
# tenth of 4, which is the average of both.
#
# </details>
#
# In an evaluation a network uses the running statistics of the device that it is on. We train the
# small network for fifty steps, with 2 images on each of two devices. Both replicas have equal
# weights then.

# %% tags=["measured", "trains"]
fifty_batches = []
for step in range(50):
    fifty_batches.append(batch_of(4, begin=4 * step))

net = small_net(pair)
train(net, pair, fifty_batches)
difference = largest_difference(weights_of(net, pair[1]), weights_of(net, pair[0]))
print("the weights differ by", float(difference))

# %% [markdown]
# Now each replica classifies the *same* test images. **Predict:** do both give every image the same
# class?

# %% tags=["predict", "measured"]
test_images = data.test_images[:1000] - data.train_images.mean()
test_x = nd.array(test_images, dtype="float64")


def predicted_classes(net, device):
    scores = net(test_x.as_in_context(device)).asnumpy()
    return scores.argmax(axis=1)


differ = predicted_classes(net, pair[0]) != predicted_classes(net, pair[1])
print(f"{differ.sum()} of {len(test_x)} images get another class on device 1")

# %% [markdown]
# <details><summary>What came out</summary>
#
# They don't, although their weights are equal. For some images the class depends on the device that
# classifies them.
#
# </details>
#
# A remedy is to give every device the average of the running statistics:

# %%
def average_statistics(net):
    for parameter in net.collect_params(".*running.*").values():
        total = 0
        for array in parameter.list_data():  # one array a device
            total = total + array.as_in_context(mx.cpu(0))
        average = total / len(parameter.list_data())
        parameter.set_data(average)  # on every device

# %% tags=["measured"]
average_statistics(net)
differ = predicted_classes(net, pair[0]) != predicted_classes(net, pair[1])
print(f"{differ.sum()} of {len(test_x)} images get another class on device 1")
assert differ.sum() == 0

# %% [markdown]
# Now both replicas agree. Gluon's `save_parameters` writes the same average into its file
# (`Parameter._reduce` in MXNet's `gluon/parameter.py`). So **call `average_statistics` before you
# evaluate: then you measure the network that you save.**
#
# ## Does it hurt?
#
# Different weights aren't necessarily worse. Normalising each shard by itself is common practice.
# ImageNet was trained this way in an hour, with 32 images on each of 256 GPUs (Goyal et al., 2017,
# section 2.3). With 2 images on each GPU, though, BatchNorm's error on ImageNet was 10.6 points
# above that of *group norm*, which takes its mean and variance within one image (Wu and He, 2018).
#
# And with us? We stored runs of chapter 08's narrow ResNet-18 on 20,480 images of MNIST: batch 64,
# two epochs, five seeds. Only the number of simulated devices changes, from 1 to 32, and so the
# number of images that each device has. The accuracy is measured on test images, with averaged
# statistics.

# %%
stored = json.loads(Path("src/results/norm.json").read_text())["runs"]


def second_epochs(name, key):
    numbers = []
    for run in stored[name]:  # five runs, one for each seed
        second_epoch = run[1]
        numbers.append(second_epoch[key])
    return np.sort(numbers).round(3)


print("five accuracies on one device:", second_epochs("norm-batch-1x64", "accuracy"))

# %% [markdown]
# **Predict:** is the accuracy on test images lower with small shards? And is the training loss
# higher?

# %% tags=["predict"]
names = ["norm-batch-1x64", "norm-batch-2x32", "norm-batch-16x4", "norm-batch-32x2"]
print("accuracy on test images (2x32: 2 devices with 32 images each)")
for name in names:
    print(f"{name:16}", second_epochs(name, "accuracy"))
print("training loss")
for name in names:
    print(f"{name:16}", second_epochs(name, "loss"))

# %% [markdown]
# <details><summary>What came out</summary>
#
# With 4 or 2 images the training loss was higher in every run. But the accuracies on test images
# overlap, so **in these runs we saw no harm to the final accuracy.**
#
# </details>
#
# Five seeds may miss a small difference in accuracy, and we didn't test why the training loss is
# higher. If your devices have few images each, as in the ImageNet runs with 2, take
# statistics of the whole batch, or try group norm. (At our learning rate group norm trained this
# network worse: after two epochs three stored runs have accuracies of 0.82 to 0.94.) We write
# statistics of the whole batch now.
#
# ## Statistics of the whole batch, from scratch
#
# Can devices normalise by the whole batch, though each has only a shard? Each knows its shard's
# size, mean and variance, and these are enough. In the batch of four the variance *within* both
# shards is 1. *Between* the shards it is $2^2 = 4$, because their means, 2 and 6, are each 2 away
# from the batch's mean, 4. The whole batch has both: $1 + 4 = 5$.
#
# ### Your turn: from shards to the whole batch
#
# Write it, before you scroll on. There may be more than two shards, of different sizes. The first
# three inputs are the batch of four, cut in three ways, so they give 4 and 5.

# %% tags=["your-turn"]
def of_whole_batch(sizes, means, variances):
    """The mean and the variance of all examples, from those of the shards."""
    ...


two_and_two = ([2, 2], [2.0, 6.0], [1.0, 1.0])  # sizes, means, variances
three_and_one = ([3, 1], [3.0, 7.0], [8 / 3, 0.0])
one_two_one = ([1, 2, 1], [1.0, 4.0, 7.0], [0.0, 1.0, 0.0])
another_batch = ([1, 3], [10.0, 2.0], [0.0, 4.0])
cases = [
    (two_and_two, (4.0, 5.0)),
    (three_and_one, (4.0, 5.0)),
    (one_two_one, (4.0, 5.0)),
    (another_batch, (4.0, 15.0)),
]
your_turn(of_whole_batch, cases)

# %% [markdown]
# For our devices we take *sums* instead, because sums can be all-reduced. Both statistics follow
# from them: $\mu = \sum x / n$ and $\sigma^2 = \sum x^2/n - \mu^2$. (Where $\mu$ is large, this
# loses digits: exercise 2.) In the batch of four:
#
# ![Device 0 has 1 and 3, whose sum is 4 and whose sum of squares is 10. Device 1 has 5 and 7, with
# 12 and 74. The all-reduce gives both devices 16 and 84, from which both find the mean 4 and the
# variance 5.](src/drawings/sums_of_all.svg)
#
# The totals are new arrays, not written in place as in chapter 03, so that `autograd` can follow
# them. We try it with the sums 4 and 12 of the picture:

# %%
def all_sum(arrays):
    totals = []
    for receiver in arrays:
        total = 0
        for array in arrays:
            total = total + array.as_in_context(receiver.context)
        totals.append(total)
    return totals  # one on each device, all equal


own_sums = [nd.array([4], ctx=pair[0]), nd.array([12], ctx=pair[1])]
for total in all_sum(own_sums):
    print(total.context, "has the total", total.asscalar())

# %% [markdown]
# And the gradients? The 4 of device 0 goes into both totals. Let us say that in the backward pass
# the total on device 0 has the gradient 1, and the one on device 1 has the gradient 10:
#
# ```
# 4 on device 0 ──┬──> total on device 0, whose gradient is  1
#                 └──> total on device 1, whose gradient is 10
# ```
#
# The losses 1 · total and 10 · total give these two gradients. **Predict:** which gradient comes
# back to the 4, and which to the 12?

# %% tags=["predict"]
own_sums[0].attach_grad()
own_sums[1].attach_grad()
with autograd.record():
    totals = all_sum(own_sums)
    losses = [1 * totals[0], 10 * totals[1]]
autograd.backward(losses)
print("gradient of the 4: ", own_sums[0].grad.asscalar())
print("gradient of the 12:", own_sums[1].grad.asscalar())

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both get $1 + 10$, because each is in both totals.
#
# </details>
#
# So the backward pass of an all-reduce is an all-reduce again, of the gradients, and `autograd`
# does it.
#
# Images have four axes. A sum over all axes but the channels' leaves one number for each channel:

# %%
def sum_by_channel(x):
    # [images, channels, rows, columns] -> [1, channels, 1, 1]
    return x.sum(axis=(0, 2, 3), keepdims=True)


three_channels = nd.ones((2, 3, 5, 5))
print(sum_by_channel(three_channels).shape)

# %% [markdown]
# The next function does what the picture shows, in three steps. Only the second one sends numbers
# between devices.

# %%
def statistics_of_all(x_shards):
    # 1. Each device adds up its own numbers.
    n = 0  # how many numbers each channel has, on all devices
    own_sums = []
    own_squares = []
    for x in x_shards:
        images, channels, rows, columns = x.shape
        n += images * rows * columns
        own_sums.append(sum_by_channel(x))
        own_squares.append(sum_by_channel(x * x))

    # 2. The all-reduce.
    sums = all_sum(own_sums)
    squares = all_sum(own_squares)

    # 3. Each device computes the mean and the variance, which are equal on all.
    means = []
    variances = []
    for rank in range(len(x_shards)):
        mean = sums[rank] / n
        means.append(mean)
        variances.append(squares[rank] / n - mean * mean)
    return means, variances

# %% [markdown]
# Do both devices find the mean 4 and the variance 5?

# %%
means, variances = statistics_of_all(x_shards)
for rank in [0, 1]:
    mean = means[rank].reshape(-1).asscalar()
    variance = variances[rank].reshape(-1).asscalar()
    print(f"device {rank}: mean {mean}, variance {variance}")

# %% [markdown]
# With these a device normalises its shard. (As in Gluon's BatchNorm, $10^{-5}$ keeps it from
# dividing by 0.)

# %%
def norm_together(x_shards):
    means, variances = statistics_of_all(x_shards)
    outputs = []
    for rank, x in enumerate(x_shards):  # on each device
        deviation = (variances[rank] + 1e-5).sqrt()
        outputs.append((x - means[rank]) / deviation)
    return outputs


for output in norm_together(x_shards):
    print(output.context, output.reshape(-1).asnumpy().round(2))

# %% [markdown]
# These are one device's outputs for the batch of four.
#
# ## A network that trains as on one device
#
# All shards go through the network together, layer by layer, because a norm needs all of them:

# %%
def forward_together(net, x_shards):
    for layer in net:
        if isinstance(layer, nn.BatchNorm):
            x_shards = norm_together(x_shards)
        else:
            x_shards = [layer(x_shard) for x_shard in x_shards]
    return x_shards

# %% [markdown]
# The training loop is chapter 06's, except for one line:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def train_together(net, devices, batches):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    for x, y in batches:
        x_shards = split_and_load(x, devices, even=False)
        y_shards = split_and_load(y, devices, even=False)
        losses = []
        with autograd.record():
            outputs = forward_together(net, x_shards)  # NEW: all shards together
            for output, y_shard in zip(outputs, y_shards):
                losses.append(cross_entropy(output, y_shard))
        autograd.backward(losses)
        trainer.step(len(x))

# %% [markdown]
# Now the experiment that we announced: the small network, the same three batches, and nothing new
# but the norms. Does each device get the weights that one device got with Gluon's BatchNorm? Four
# devices have 3, 3, 2 and 2 of the ten images.

# %% tags=["trains"]
for k in [2, 4]:
    devices = four[:k]
    net = small_net(devices)
    train_together(net, devices, batches)
    for device in devices:
        difference = largest_difference(weights_of(net, device), weights_on_one)
        print(f"{k} devices: {device} equals one device to 1e-12:", difference < 1e-12)
        assert difference < 1e-12

# %% [markdown]
# **With all-reduced statistics, k devices train as one device.** So the norms were the whole cause.
# This is *synchronised BatchNorm*. (A full one also puts the whole batch's statistics into the
# running ones, so that devices agree on these, too.)
#
# What would it send in chapter 08's ResNet-18 of full width? Each channel has two sums forward, and
# their two gradients backward:

# %%
resnet = hybrid_resnet18(10)
resnet.initialize()
resnet(nd.zeros((1, 1, 28, 28)))

norms = 0
channels = 0
for scale in resnet.collect_params(".*gamma").values():  # each norm's trained scale
    norms += 1
    channels += scale.data().size
print(f"{norms} norms with {channels:,} channels in all: {4 * channels:,} numbers a step")

# %% [markdown]
# These are few beside the 11 million gradients of a step (deeper: Where the memory goes). But at
# each norm every device waits for all others, forward and backward, because it can't go on without
# the sums. (How long, we haven't measured.)
#
# Gluon has a synchronised norm, `mxnet.gluon.contrib.nn.SyncBatchNorm`. It needs shards of equal
# size, and it can hang (deeper: The law of the difference). In PyTorch
# `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` replaces every BatchNorm. On CPUs it can't
# train once a process group exists: it raises an error then (`SyncBatchNorm.forward` in
# `torch/nn/modules/batchnorm.py`).
#
# ## Summary
#
# - BatchNorm normalises by the device's shard, so k devices train differently from one.
# - Running statistics differ from device to device. Average them before you evaluate.
# - In our runs with 4 and 2 images a device the training loss was higher, but accuracies overlapped
#   with those of 64 and 32. On ImageNet, 2 images were too few.
# - All-reduce two sums a channel, forward and backward, and k devices train as one. But each
#   all-reduce makes every device wait.
#
# **Further reading.** Ioffe and Szegedy, *Batch normalization*, arXiv:1502.03167; Goyal et al.,
# *Accurate, large minibatch SGD*, arXiv:1706.02677; Wu and He, *Group normalization*,
# arXiv:1803.08494.

# %% [markdown]
# ## Exercises
#
# 1. **One device like two.** With Gluon's BatchNorm two devices got other weights than one. Write a
#    training loop in which *one* device gets the weights of two, to $10^{-12}$.
# 2. **Large means.** In float32, add 10,000 to the batch of four and compute its variance as $\sum
#    x^2/n - \mu^2$. What is wrong? Does your `of_whole_batch` do better, from the means and
#    variances of the two shards?

# %% [markdown]
# ### Answer to *Your turn*
#
# Both sums weight each shard by its size. Within a shard the variance is the shard's; between
# shards it is the squared distance of the shard's mean from the whole batch's.

# %% tags=["solution", "your-turn"]
def of_whole_batch(sizes, means, variances):
    n = sum(sizes)
    mean = 0
    for size, shard_mean in zip(sizes, means):
        mean += size * shard_mean / n
    variance = 0
    for size, shard_mean, shard_variance in zip(sizes, means, variances):
        variance += size * shard_variance / n  # within
        variance += size * (shard_mean - mean) ** 2 / n  # between
    return mean, variance


your_turn(of_whole_batch, cases)

# %% [markdown]
# ### Answer 1
#
# The device calls the network twice a step, once for each half of the batch. So a norm sees only
# one half at a time.

# %% tags=["solution", "trains"]
net = small_net(one)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
for x, y in batches:
    losses = []
    with autograd.record():
        losses.append(cross_entropy(net(x[:5]), y[:5]))
        losses.append(cross_entropy(net(x[5:]), y[5:]))
    autograd.backward(losses)  # one call, which adds both gradients
    trainer.step(10)
difference = largest_difference(weights_of(net, one[0]), weights_on_0)
print("one device equals two to 1e-12:", difference < 1e-12)
assert difference < 1e-12

# %% [markdown]
# ### Answer 2
#
# $x^2$ is about $10^8$, of which float32 keeps seven digits, so a variance of 5 is lost in
# rounding. From means and variances nothing is lost here, because each shard's mean is subtracted
# before anything is squared. By sums that takes two all-reduces, one after the other, because the
# part between the shards needs the whole batch's mean. If every device gets all the others' three
# numbers (an all-gather), one exchange is enough. PyTorch's SyncBatchNorm does that, with
# $1/\sigma$ in place of the variance.

# %% tags=["solution"]
far = np.array([10_001, 10_003, 10_005, 10_007], dtype="float32")
mean = far.sum() / 4
naive = (far * far).sum() / 4 - mean * mean
print("from sums of squares:", naive)

means = [far[:2].mean(), far[2:].mean()]
variances = [far[:2].var(), far[2:].var()]
mean, variance = of_whole_batch([2, 2], means, variances)
print("from the shards:     ", variance)
assert abs(naive - 5) > 0.5
assert variance == 5
