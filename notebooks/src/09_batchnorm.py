# %% [markdown]
# # 09 · BatchNorm on several devices
#
# LeNet on k devices computes what it computes on one (chapters 04 to 07). ResNet-18 does **not**.
# It has batch normalisation, which takes a mean over the images that it sees, and a device sees
# only its shard. *What becomes of the training, and what makes k devices equal to one again?*
#
# ![One device sees the numbers 1, 3, 5 and 7, with the mean 4. Device 0 sees 1 and 3, with the mean
# 2, which is 2 less. Device 1 sees 5 and 7, with the mean 6, which is 2
# more.](src/drawings/shards_and_means.svg)
#
# > **What you'll do:** work out a batch of four, test the cause in ResNet-18, look at stored runs,
# > and write a BatchNorm for the batch of all devices.
# >
# > **What you'll learn:** why BatchNorm makes k devices differ from one; whether that hurt in our
# > runs; why to average the running statistics before you evaluate; what synchronised BatchNorm
# > sends.
# >
# > **What you need:** chapter 08 and no GPU. Reading takes {reading time}, running less than a
# > minute on two cores.

# %%
import json
import tempfile
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
# ## A batch of four, by hand
#
# What does BatchNorm compute? From each channel it subtracts the batch's mean, and divides by the
# standard deviation (Ioffe and Szegedy, 2015). Here is a batch of four images with one number each.
# Two devices get two of them each.

# %%
numbers = np.array([1.0, 3.0, 5.0, 7.0])
parts = {"whole batch": numbers, "shard 0": numbers[:2], "shard 1": numbers[2:]}
for name, values in parts.items():
    print(f"{name:11} {values}  mean {values.mean()}, variance {values.var()}")

# %% [markdown]
# A shard's mean isn't the whole batch's, and neither is its variance. Each shard's variance, 1, is
# the variance *within* shards. The shards' means, 2 and 6, are each 2 away from the batch's, 4, so
# the variance *between* shards is $2^2 = 4$. The whole batch has both: $1 + 4 = 5$.
#
# **Predict:** which numbers does each device compute from its two images, and which would one
# device compute?

# %% tags=["predict"]
for name, values in parts.items():
    normalised = (values - values.mean()) / values.std()
    print(f"{name:11} {values} becomes {normalised.round(2)}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# On two devices both shards become −1 and 1. On one device 3 becomes −0.45 and 7 becomes 1.34, but
# on two devices both become 1.
#
# </details>
#
# Gluon's BatchNorm does the same. In `train_mode` it uses the batch's *statistics*, which are its
# mean and its variance. An array goes through the copy of the norm that is on its own device.

# %%
# Four images, one channel.
batch = nd.array([[1], [3], [5], [7]], ctx=pair[0])
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
with autograd.train_mode():
    print("whole batch:    ", norm(batch).asnumpy().ravel().round(2))
    for x_shard in split_and_load(batch, pair):
        print(f"shard on {x_shard.context}:", norm(x_shard).asnumpy().ravel().round(2))

# %% [markdown]
# **A device normalises by its own shard.** So from the same weights two devices get different
# outputs from those of one device, and so different gradients.
#
# ## Is that the whole cause, in ResNet-18?
#
# We take a *thin* ResNet-18, with 4 to 8 channels, in float64, so that rounding errors are tiny.
# `norm` is the class of its norms, because below we put another in its place.

# %%
def thin_resnet(devices, norm=nn.BatchNorm):
    mx.random.seed(8)  # the same weights each time
    net = hybrid_resnet18(10, channels=(4, 4, 8, 8), norm=norm)
    net.initialize(init.Xavier(), ctx=devices)
    # The first call draws the weights. Then all become float64.
    net(nd.zeros((8, 1, 28, 28), ctx=devices[0]))
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
# A network is trained by `fit`, as in chapter 06, with one step for each batch in a list.
# `all_weights` gives all trained weights of one replica as one long array, so that we can compare
# them:

# %%
def train(net, devices, batches):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    fit(net, trainer, batches, devices, progress=False)


def all_weights(net, device):
    arrays = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # null: not trained
            arrays.append(parameter.data(device).asnumpy().ravel())
    return np.concatenate(arrays)

# %% [markdown]
# In chapter 04 the weights of two devices and of one agreed to $10^{-12}$. Here is the same test
# after one step on eight images. A difference is divided by the largest weight:

# %% tags=["measured", "trains"]
net_on_pair = thin_resnet(pair)
train(net_on_pair, pair, [batch_of(8)])
weights_on_0 = all_weights(net_on_pair, pair[0])
weights_on_1 = all_weights(net_on_pair, pair[1])

net_on_one = thin_resnet(one)
train(net_on_one, one, [batch_of(8)])
weights_alone = all_weights(net_on_one, one[0])

print(f"device 1 against device 0:   {largest_difference(weights_on_1, weights_on_0):.2g}")
print(f"device 0 against one device: {largest_difference(weights_on_0, weights_alone):.2g}")
assert largest_difference(weights_on_1, weights_on_0) == 0
assert largest_difference(weights_on_0, weights_alone) > 1e-3

# %% [markdown]
# The two replicas are equal, because the store updates the weights once, by the sum of both
# gradients, and copies them to both devices. But the difference from one device is far too large
# for a rounding error.
#
# If the shards are the whole cause, then *one* device that normalises the halves of its batch
# separately must get what two devices get. `InHalves` does that. We put it in the place of every
# BatchNorm:

# %% tags=["trains"]
class InHalves(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        first, second = F.split(x, num_outputs=2, axis=0)  # axis 0: images
        return F.concat(self.norm(first), self.norm(second), dim=0)


net_in_halves = thin_resnet(one, norm=InHalves)
train(net_in_halves, one, [batch_of(8)])
weights_in_halves = all_weights(net_in_halves, one[0])
difference = largest_difference(weights_on_0, weights_in_halves)
print("one device in halves equals two devices to 1e-12:", difference < 1e-12)
assert difference < 1e-12

# %% [markdown]
# **The shards' statistics are the whole cause.** Here is the opposite test. *Group norm* takes its
# mean and variance within one image (Wu and He, 2018), so it can't know about shards. With it two
# devices should be equal to one:

# %% tags=["trains"]
def group_norm():
    return nn.GroupNorm(num_groups=2)


grouped_on_pair = thin_resnet(pair, norm=group_norm)
train(grouped_on_pair, pair, [batch_of(8)])
grouped_on_one = thin_resnet(one, norm=group_norm)
train(grouped_on_one, one, [batch_of(8)])
difference = largest_difference(all_weights(grouped_on_pair, pair[0]),
                                all_weights(grouped_on_one, one[0]))
print("with group norm two devices equal one to 1e-12:", difference < 1e-12)
assert difference < 1e-12

# %% [markdown]
# ## Does it hurt?
#
# Different weights aren't necessarily worse. Normalising each shard by itself is normal practice.
# ImageNet was trained this way in an hour, with 32 images on each of 256 GPUs (Goyal et al., 2017,
# section 2.3). With 2 images on each GPU, though, BatchNorm's error on ImageNet was 10.6 points
# above group norm's (Wu and He, 2018).
#
# We stored runs of chapter 08's narrow ResNet-18 on MNIST: batch 64, two epochs, five seeds. Only
# the number of simulated devices changes, 1, 2, 16 or 32, and so the number of images that each
# device has. The accuracy is that of the network which is saved, with averaged statistics (see
# below).

# %%
stored = json.loads(Path("src/results/norm.json").read_text())["runs"]
# By the number of images on each device: five runs, one for each seed.
runs = {
    64: stored["norm-batch-1x64"],  # 1 device with 64 images
    32: stored["norm-batch-2x32"],
    4: stored["norm-batch-16x4"],
    2: stored["norm-batch-32x2"],
}
percent = {}  # of 10,000 test images that are right, for each seed
train_loss = {}  # the mean of the second epoch, for each seed
for images, five_runs in runs.items():
    second_epochs = [run[1] for run in five_runs]
    percent[images] = np.array([100 * epoch["accuracy"] for epoch in second_epochs])
    train_loss[images] = np.array([epoch["loss"] for epoch in second_epochs])

# %% [markdown]
# **Predict:** is the accuracy on test images lower with small shards? And is the training loss
# higher?

# %% tags=["predict"]
print("% of test images that are right: median, and range of five seeds")
for images, values in percent.items():
    print(f"{images:2} images a device: {np.median(values):.1f} "
          f"({values.min():.1f} to {values.max():.1f})")
print("training loss: median, and range of five seeds")
for images, values in train_loss.items():
    print(f"{images:2} images a device: {np.median(values):.3f} "
          f"({values.min():.3f} to {values.max():.3f})")

# %% tags=["fold"]
# check: what came out
small_shards = np.concatenate([train_loss[4], train_loss[2]])
large_shards = np.concatenate([train_loss[64], train_loss[32]])
assert small_shards.min() > large_shards.max()

highest_minimum = max(values.min() for values in percent.values())
lowest_maximum = min(values.max() for values in percent.values())
assert highest_minimum < lowest_maximum  # what lies between them is in all four ranges

# %% [markdown]
# <details><summary>What came out</summary>
#
# With 4 or 2 images the training loss was higher in every run. But the accuracies on test images
# overlap, so **in these runs we saw no harm to the final accuracy.**
#
# </details>
#
# Five seeds may miss a small difference in accuracy. And we didn't test why the training loss is
# higher.
#
# If your devices have few images each, as in the ImageNet runs with 2, try group norm, or
# statistics of the whole batch.
#
# ## The running statistics
#
# What does BatchNorm use in an evaluation, where there is no batch? It uses a running mean and a
# running variance, which begin at 0 and 1. In each training step a device keeps 0.9 of the old
# value, and adds 0.1 of its shard's. On a CPU MXNet does this in the backward pass, so the cell
# makes one. **Predict:** what are the running means of both devices after one step on the batch of
# four?

# %% tags=["predict"]
def one_step(devices):
    norm = nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=devices)
    outputs = []
    with autograd.record():
        for x_shard in split_and_load(batch, devices):
            outputs.append(norm(x_shard))
    for device in devices:
        assert norm.running_mean.data(device).asscalar() == 0  # not yet
    autograd.backward(outputs)

    for device in devices:
        mean = norm.running_mean.data(device).asscalar()
        variance = norm.running_var.data(device).asscalar()
        print(f"{device}: running mean {mean:.2f}, running variance {variance:.2f}")


print("two devices")
one_step(pair)
print("one device")
one_step(one)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Device 0 has a tenth of its mean 2, and device 1 has a tenth of 6. One device has a tenth of 4,
# which is the average of both.
#
# </details>
#
# On two devices both variances are $0.9 \cdot 1 + 0.1 \cdot 1 = 1.0$. One device's is larger, $0.9
# \cdot 1 + 0.1 \cdot 5 = 1.4$, because it also sees the variance *between* the shards.
#
# ### Is one replica as good as the other?
#
# In an evaluation a network uses its device's running statistics. We train the thin ResNet-18 for
# fifty steps, with 8 images on each of two devices, so that both replicas have equal weights.
# (Fifty steps are too few to train it well. Here only the difference between the replicas counts.)

# %% tags=["measured", "trains"]
net = thin_resnet(pair)
net.hybridize()
fifty_batches = []
for step in range(50):
    fifty_batches.append(batch_of(16, begin=16 * step))
train(net, pair, fifty_batches)

# %% [markdown]
# Now each replica classifies the *same* 1,000 test images. **Predict:** do both have the same
# accuracy?

# %% tags=["predict", "measured"]
test_labels = data.test_labels[:1000]
test_images = data.test_images[:1000] - data.train_images.mean()
test_x = nd.array(test_images, dtype="float64")


def right_answers(net, device):
    scores = net(test_x.as_in_context(device)).asnumpy()
    return scores.argmax(axis=1) == test_labels


for rank, device in enumerate(pair):
    right = right_answers(net, device)
    print(f"replica {rank}: {100 * right.mean():.1f} %")

# %% tags=["fold"]
# check: both replicas have the same weights
assert largest_difference(all_weights(net, pair[1]), all_weights(net, pair[0])) == 0

# %% [markdown]
# <details><summary>What came out</summary>
#
# They don't, although their weights are equal. So an image's answer may depend on the device that
# classifies it.
#
# </details>
#
# A remedy is to give every device the average of the running statistics. We write it into their
# arrays:

# %%
def average_statistics(net):
    for parameter in net.collect_params().values():
        is_statistic = parameter.grad_req == "null"  # a running mean or variance: not trained
        if is_statistic:
            replicas = parameter.list_data()  # one array a device
            copies = [array.as_in_context(mx.cpu(0)) for array in replicas]
            average = sum(copies) / len(copies)
            for array in replicas:
                array[:] = average  # copied to the array's device

# %% [markdown]
# And which statistics does `save_parameters` write, if replicas differ? To see that, we save the
# network *before* we average, and load the file into another one, `saved`. Below we compare its
# outputs with those of the averaged replicas:

# %%
with tempfile.TemporaryDirectory() as folder:
    net.save_parameters(f"{folder}/before.params")
    saved = thin_resnet(one)
    saved.load_parameters(f"{folder}/before.params", ctx=one)

# %% tags=["measured"]
average_statistics(net)
for device in pair:
    print(f"{device}: {100 * right_answers(net, device).mean():.1f} %")

for device in pair:
    scores = net(test_x.as_in_context(device))
    assert largest_difference(scores, saved(test_x)) < 1e-12

# %% [markdown]
# Now both replicas agree. And they agree with `saved`, so `save_parameters` had written the same
# average by itself. So **call `average_statistics` before you evaluate: then you measure the
# network that you save.** (The average variance still lacks the part between
# the shards.)
#
# ## Statistics of the whole batch, from scratch
#
# Can devices normalise by the whole batch, though each has only a shard? Each knows its shard's
# size, mean and variance, and these are enough.
#
# ### Your turn: from shards to the whole batch
#
# Write it, before you scroll on. There may be more than two shards, of different sizes. The first
# three inputs are the batch of four, cut in three ways, so they give 4 and 5.

# %% tags=["your-turn"]
def of_whole_batch(sizes, means, variances):
    """The mean and the variance of all examples, from those of the shards."""
    ...


two_and_two = (([2, 2], [2.0, 6.0], [1.0, 1.0]), (4.0, 5.0))
three_and_one = (([3, 1], [3.0, 7.0], [8 / 3, 0.0]), (4.0, 5.0))
one_two_one = (([1, 2, 1], [1.0, 4.0, 7.0], [0.0, 1.0, 0.0]), (4.0, 5.0))
one_and_three = (([1, 3], [10.0, 2.0], [0.0, 4.0]), (4.0, 15.0))
your_turn(of_whole_batch, [two_and_two, three_and_one, one_two_one, one_and_three])

# %% [markdown]
# For our devices we take *sums* instead, because sums can be all-reduced. Both statistics follow
# from them: $\mu = \sum x / n$ and $\sigma^2 = \sum x^2/n - \mu^2$. (Where $\mu$ is large, this
# loses digits: exercise 2.) In the batch of four:
#
# ![Device 0 has 1 and 3, whose sum is 4 and whose sum of squares is 10. Device 1 has 5 and 7, with
# 12 and 74. The all-reduce gives both devices 16 and 84, from which both find the mean 4 and the
# variance 5.](src/drawings/sums_of_all.svg)
#
# The sums are new arrays, not written in place as in chapter 03, so that `autograd` can follow
# them:

# %%
def all_sum(arrays):
    sums = []
    for receiver in arrays:
        copies = [array.as_in_context(receiver.context) for array in arrays]
        sums.append(sum(copies))
    return sums  # one on each device, all equal

# %% [markdown]
# Images have four axes, and a sum over all but the channels leaves a number for each channel.
# Devices exchange numbers in `all_sum` only. (One Python program knows all shards' sizes here. On
# separate processes they have to be sent, too, unless all are equal.)

# %%
# [images, channels, rows, columns] -> [1, channels, 1, 1].
def sum_by_channel(x):
    return x.sum(axis=(0, 2, 3), keepdims=True)


def statistics_of_all(x_shards):
    n = 0  # how many values each channel has, on all devices
    for x in x_shards:
        images, channels, rows, columns = x.shape
        n += images * rows * columns
    sums = all_sum([sum_by_channel(x) for x in x_shards])
    squares = all_sum([sum_by_channel(x * x) for x in x_shards])

    means = []  # one on each device, all equal
    variances = []
    for total, total_of_squares in zip(sums, squares):
        mean = total / n
        means.append(mean)
        variances.append(total_of_squares / n - mean * mean)
    return means, variances


# 4 images, 1 channel, 1 × 1.
x_shards = split_and_load(batch.reshape((4, 1, 1, 1)), pair)
means, variances = statistics_of_all(x_shards)
for mean, variance in zip(means, variances):
    print(mean.context, "mean", mean.asnumpy().ravel(), "variance", variance.asnumpy().ravel())

# %% [markdown]
# With these a device normalises its shard. As BatchNorm does, it then multiplies by a trained scale
# $\gamma$ and adds a trained shift $\beta$; the small `eps` keeps it from dividing by 0.

# %%
def norm_together(x_shards, gammas, betas, eps=1e-5):
    means, variances = statistics_of_all(x_shards)
    outputs = []
    for rank, x in enumerate(x_shards):  # on each device
        normalised = (x - means[rank]) / (variances[rank] + eps).sqrt()
        # A number for each channel: [channels] -> [1, channels, 1, 1], to fit the images.
        scale = gammas[rank].reshape((1, -1, 1, 1))
        shift = betas[rank].reshape((1, -1, 1, 1))
        outputs.append(scale * normalised + shift)
    return outputs


# The batch of four, with scale 1 and shift 0.
gammas = [nd.ones(1, ctx=device) for device in pair]
betas = [nd.zeros(1, ctx=device) for device in pair]
for output in norm_together(x_shards, gammas, betas):
    print(output.context, output.asnumpy().ravel().round(2))

# %% [markdown]
# These are one device's outputs for the batch of four. And the gradients? Device 0's sum is 4,
# device 1's is 12, and both devices get the total, 16. So the 4 goes two ways:
#
# ```
# 4 on device 0 ──┬──> total on device 0, whose gradient is  1
#                 └──> total on device 1, whose gradient is 10
# ```
#
# The gradients 1 and 10 are made up: we take the losses 1 · total and 10 · total. **Predict:**
# which gradient comes back to the 4?

# %% tags=["predict"]
shard_sums = [nd.array([4], ctx=pair[0]), nd.array([12], ctx=pair[1])]
for shard_sum in shard_sums:
    shard_sum.attach_grad()
with autograd.record():
    total_on_0, total_on_1 = all_sum(shard_sums)
    losses = [1 * total_on_0, 10 * total_on_1]
autograd.backward(losses)
for shard_sum in shard_sums:
    print(f"{shard_sum.context}: gradient {shard_sum.grad.asscalar()}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Its gradient is $1 + 10$, because the 4 is in both totals. So is the 12.
#
# </details>
#
# So the backward pass of an all-reduce is an all-reduce again, of the gradients, and `autograd`
# does it.
#
# ## A network that trains as on one device
#
# All shards go through the network together, layer by layer, because a norm needs all of them:

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
# (This shows the idea. It doesn't reach norms inside blocks, as ResNet-18 has them, and it keeps no
# running statistics. A full one puts the whole batch's into them, so that devices agree on these,
# too.) The training loop is chapter 06's, except for one line:

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
# A small network with two norms takes three steps. Does it get the weights that one device gets
# with Gluon's BatchNorm? A batch has ten images, so four devices have 3, 3, 2 and 2 of them.

# %% tags=["trains"]
def two_norms(devices):
    mx.random.seed(8)
    net = nn.HybridSequential()
    for channels in [4, 8]:
        net.add(nn.Conv2D(channels, kernel_size=3, strides=2))
        net.add(nn.BatchNorm())
        net.add(nn.Activation("relu"))
    net.add(nn.GlobalAvgPool2D())
    net.add(nn.Dense(10))
    net.initialize(init.Xavier(), ctx=devices)
    net(nd.zeros((2, 1, 28, 28), ctx=devices[0]))
    net.cast("float64")
    return net


batches = [batch_of(10), batch_of(10, begin=10), batch_of(10, begin=20)]
net = two_norms(one)
train(net, one, batches)
whole = all_weights(net, one[0])

net = two_norms(pair)
train(net, pair, batches)
by_shard = largest_difference(all_weights(net, pair[0]), whole)
print("Gluon's BatchNorm, 2 devices, equals one device to 1e-12:", by_shard < 1e-12)

for k in [2, 4]:
    devices = four[:k]
    net = two_norms(devices)
    train_together(net, devices, batches)
    for device in devices:
        difference = largest_difference(all_weights(net, device), whole)
        print(f"ours, {k} devices, {device} equals one device to 1e-12:   ", difference < 1e-12)
        assert difference < 1e-12
assert by_shard > 1e-4

# %% [markdown]
# **With all-reduced statistics, k devices train as one device.** This is *synchronised BatchNorm*.
# What would it send in a ResNet-18 of full width? Each channel has two sums forward, and their two
# gradients backward:

# %%
big = hybrid_resnet18(10)
big.initialize()
big(nd.zeros((1, 1, 28, 28)))
norms = 0
channels = 0
trained = 0
for name, parameter in big.collect_params().items():
    if parameter.grad_req != "null":
        trained += parameter.data().size
    if name.endswith("gamma"):
        norms += 1
        channels += parameter.data().size

print(f"{norms} norms with {channels:,} channels in all:")
print(f"{4 * channels:,} numbers a step, {4 * channels / trained:.2%} of the gradients,")
print(f"in {2 * norms} all-reduces, if a norm's two sums travel together")

# %% [markdown]
# The numbers are few. But at each all-reduce every device waits for all others, because a norm
# can't go on without its sums. (How long, we haven't measured.)
#
# Gluon has a synchronised norm, `mxnet.gluon.contrib.nn.SyncBatchNorm`. It needs shards of equal
# size, and it can hang (deeper: The law of the difference).
#
# ## What is different in PyTorch
#
# - **Momentum is the other way round.** Gluon's `momentum=0.9` is the part of the old statistic
#   that is kept. PyTorch's `momentum=0.1` is the part that the new one gets. Both are the defaults,
#   and mean the same.
# - **The running variance is over n − 1.** PyTorch normalises a batch by the variance over $n$, but
#   puts the one over $n - 1$ into the running variance. On a CPU Gluon uses $n$ for both, hence
#   the 1.4 above.
# - **Running statistics come from one device.** PyTorch's counterpart of several devices is DDP
#   (chapter 14), in which each device has a process, a *rank*. Before each forward pass DDP sends
#   rank 0's running statistics to all ranks (by default; `_sync_buffers` in
#   `torch/nn/parallel/distributed.py`), and then each rank adds its own shard's. So they differ
#   again after each step, and are never an average.
# - **SyncBatchNorm.** `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` replaces every
#   BatchNorm, before DDP gets the model. With several ranks it needs GPUs or other accelerators,
#   and raises an error for tensors on a CPU (`SyncBatchNorm.forward` in
#   `torch/nn/modules/batchnorm.py`).
#
# ## Summary
#
# - BatchNorm normalises by the device's shard. Two devices get the same trained weights as one
#   device that normalises the halves separately.
# - In our runs with 4 and 2 images a device the training loss was higher, but accuracies overlapped
#   with those of 64 and 32. On ImageNet, 2 images were too few.
# - Running statistics differ from device to device. Average them before you evaluate.
# - All-reduce two sums a channel, forward and backward, and k devices train as one; but each
#   all-reduce makes every device wait.
#
# **Further reading.** Ioffe and Szegedy, *Batch normalization*, arXiv:1502.03167; Goyal et al.,
# *Accurate, large minibatch SGD*, arXiv:1706.02677; Wu and He, *Group normalization*,
# arXiv:1803.08494.

# %% [markdown]
# ## Exercises
#
# 1. **The tail with BatchNorm.** A batch of nine goes to two devices as five and four. Change
#    `InHalves` so that one device computes the same, to $10^{-12}$.
# 2. **Large means.** In float32, add 10,000 to the batch of four and compute its variance as $\sum
#    x^2/n - \mu^2$. What is wrong? Does your `of_whole_batch` do better, from the means and
#    variances of the two shards?
# 3. **Where was it evaluated?** A script trains on all devices and evaluates on `devices[0]` only.
#    Let the fifty steps run on four devices, with 4 images each, and print the accuracy of each
#    replica, and the one after averaging. Which would the script report, and which has the network
#    that it saves?

# %% [markdown]
# ### Answer to *Your turn*
#
# Both sums weigh a shard by its size. Within a shard the variance is the shard's; between shards it
# is the squared distance of the shard's mean from the whole batch's.

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


your_turn(of_whole_batch, [two_and_two, three_and_one, one_two_one, one_and_three])

# %% [markdown]
# ### Answer 1
#
# The batch has to be cut where the shards are cut, at five. The loss is a mean over nine images
# either way, because `fit` tells `step` nine.

# %% tags=["solution", "trains"]
class InFiveAndFour(InHalves):
    def hybrid_forward(self, F, x):
        first = F.slice_axis(x, axis=0, begin=0, end=5)
        second = F.slice_axis(x, axis=0, begin=5, end=None)
        return F.concat(self.norm(first), self.norm(second), dim=0)


on_two = thin_resnet(pair)
train(on_two, pair, [batch_of(9)])
cut = thin_resnet(one, norm=InFiveAndFour)
train(cut, one, [batch_of(9)])
difference = largest_difference(all_weights(on_two, pair[0]), all_weights(cut, one[0]))
print("five and four, as on two devices, to 1e-12:", difference < 1e-12)
assert difference < 1e-12

# %% [markdown]
# ### Answer 2
#
# $x^2$ is about $10^8$, of which float32 keeps seven digits, so a variance of 5 is lost in
# rounding. From means and variances nothing is lost here, because each shard's mean is subtracted
# before anything is squared. By sums that takes two all-reduces, one after the other, because the
# part between the shards needs the whole batch's mean. If every device gets all the others' three
# numbers (an all-gather), one exchange is enough. PyTorch's SyncBatchNorm does that.

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

# %% [markdown]
# ### Answer 3
#
# The script reports replica 0's accuracy, with the statistics of the shards that came to
# `devices[0]`. The network that it saves has the average statistics, so its accuracy is the last
# one. The script also can't see when another replica goes wrong, and while it evaluates, the other
# devices are idle.

# %% tags=["solution", "measured", "trains"]
net = thin_resnet(four)
net.hybridize()
train(net, four, fifty_batches)
for device in four:
    print(f"replica on {device}: {100 * right_answers(net, device).mean():.1f} %")
average_statistics(net)
print(f"after averaging:   {100 * right_answers(net, four[0]).mean():.1f} %")
