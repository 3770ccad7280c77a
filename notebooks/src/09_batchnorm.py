# %% [markdown]
# # 09 · BatchNorm on several devices
#
# LeNet on k devices computes what it computes on one (chapters 04 to 07). ResNet-18 does **not**.
# It has batch normalisation, which takes a mean over the images that it sees, and a device sees its
# shard.
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
# > **What you need:** chapter 08 and no GPU. Reading takes {reading time}, running ten seconds on
# > two cores.

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
pair = [mx.cpu(0), mx.cpu(1)]  # all devices here are simulated
one = [mx.cpu(0)]

# %% [markdown]
# ## A batch of four, by hand
#
# What does BatchNorm compute? From each channel it subtracts the batch's mean, and divides by the
# standard deviation (Ioffe and Szegedy, 2015). Here is a batch of four images with one number each.
# Two devices get two of them each.

# %%
x = onp.array([1.0, 3.0, 5.0, 7.0])
parts = {"whole batch": x, "shard 0": x[:2], "shard 1": x[2:]}
for name, values in parts.items():
    print(f"{name:11} {values}  mean {values.mean()}, variance {values.var()}")

# %% [markdown]
# A shard's mean isn't the whole batch's, nor is its variance. Each shard's variance, 1, is the
# variance *within* shards. The shards' means, 2 and 6, are each 2 away from the batch's, 4: the
# variance *between* shards is $2^2 = 4$. The whole batch has both: $1 + 4 = 5$.
#
# **Predict:** which outputs does a device compute for its two images?

# %%
for name, values in parts.items():
    normalised = (values - values.mean()) / values.std()
    print(f"{name:11} {values} becomes {normalised.round(2)}")

# %% [markdown]
# On one device 3 becomes −0.45 and 7 becomes 1.34. On two devices both become 1.
#
# Gluon's BatchNorm does the same. In `train_mode` it uses the batch's *statistics*, its mean and
# variance. An array goes through the copy of the norm that is on its own device.

# %%
# Four images, one channel.
batch = np.array([[1.0], [3.0], [5.0], [7.0]], ctx=pair[0])
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
with autograd.train_mode():
    print("whole batch:    ", norm(batch).asnumpy().ravel().round(2))
    for x_shard in split_and_load(batch, pair):
        print(f"shard on {x_shard.ctx}:", norm(x_shard).asnumpy().ravel().round(2))

# %% tags=["fold"]
# check: Gluon's outputs are those by hand; the batch's variance is within plus between
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
# than one, and other gradients.
#
# ## Is that the whole cause, in ResNet-18?
#
# We take a *thin* ResNet-18, with 4 to 8 channels, in float64, so that rounding errors are tiny.
# `norm_class` is the class of its norms; below we put another in its place. A first call draws the
# weights, the same on all devices.

# %%
def thin_resnet(devices, norm_class=nn.BatchNorm):
    mx.random.seed(8)  # the same weights each time
    net = hybrid_resnet18(10, channels=(4, 4, 8, 8), norm=norm_class)
    net.initialize(init.Xavier(), ctx=devices)
    # In float32: here initializers raise for float64.
    net(np.zeros((8, 1, 28, 28), ctx=devices[0]))
    net.cast("float64")
    return net

# %% [markdown]
# Three functions are folded: `batch_of(n)` returns n images and their labels;
# `all_weights(net, device)`, one long array of all trained weights; and `score_difference(net, x)`,
# by how much the devices' scores differ.

# %% tags=["fold", "measured"]
# define: batch_of, all_weights and score_difference; load the images
data = load_data("mnist", limit=4000)
print(data)
pixels = data.train_images - data.train_images.mean()


def batch_of(n, begin=0):
    x = np.array(pixels[begin : begin + n], dtype="float64")
    y = np.array(data.train_labels[begin : begin + n])
    return x, y


def all_weights(net, device):
    arrays = []
    for parameter in net.collect_params().values():
        if parameter.grad_req != "null":  # null: the norms' running mean and variance
            arrays.append(parameter.data(device).asnumpy().ravel())
    return onp.concatenate(arrays)


def score_difference(net, x):
    scores_of_0 = net(x.as_in_ctx(pair[0]))
    scores_of_1 = net(x.as_in_ctx(pair[1]))
    return largest_difference(scores_of_1, scores_of_0)

# %% [markdown]
# A network is trained by `fit`, as in chapter 06, with one step for each batch in a list:

# %% tags=["trains"]
def trained_on(devices, batches, norm_class=nn.BatchNorm):
    net = thin_resnet(devices, norm_class)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    fit(net, trainer, batches, devices, progress=False)
    return net

# %% [markdown]
# In chapter 04 the weights of two devices and of one agreed to $10^{-12}$. Here is the same test
# after one step on eight images. The differences are divided by the largest weight:

# %% tags=["measured", "trains"]
batches = [batch_of(8)]
net_on_pair = trained_on(pair, batches)
weights_on_0 = all_weights(net_on_pair, pair[0])
weights_on_1 = all_weights(net_on_pair, pair[1])

net_on_one = trained_on(one, batches)
weights_alone = all_weights(net_on_one, one[0])
print(f"device 1 against device 0:   {largest_difference(weights_on_1, weights_on_0):.2g}")
print(f"device 0 against one device: {largest_difference(weights_on_0, weights_alone):.2g}")

# %% [markdown]
# The replicas are equal, since both got the sum of both gradients. But the second number (0.39 with
# MNIST, 39 % of the largest weight) is no rounding. Are such weights worse? See the next section.
#
# If the shards are the whole cause, then *one* device that normalises the halves of its batch
# separately must get what two devices get. `InHalves` does that, in place of every BatchNorm.
# (Since `npx.set_np()`, at the top, layers work with arrays of `mx.np`; `F.np` has what computes
# with them.)

# %% tags=["trains"]
class InHalves(nn.HybridBlock):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm()

    def hybrid_forward(self, F, x):
        first, second = F.np.split(x, 2)
        return F.np.concatenate([self.norm(first), self.norm(second)])


net_in_halves = trained_on(one, batches, norm_class=InHalves)
weights_in_halves = all_weights(net_in_halves, one[0])
print("equal:", largest_difference(weights_on_0, weights_in_halves) < 1e-12)

# %% tags=["fold"]
# check: equal weights to begin with; after a step one device's differ, those of InHalves don't
def weights_by_device(net):
    devices = next(iter(net.collect_params().values())).list_ctx()
    return [all_weights(net, device) for device in devices]


begin = weights_by_device(thin_resnet(pair))
for norm_class in [nn.BatchNorm, InHalves]:
    same = all_weights(thin_resnet(one, norm_class), one[0])
    assert largest_difference(begin, same) == 0, "another start"
moved = largest_difference(weights_alone, begin[0])
assert moved > 1e-3, "a step that moves nothing shows nothing"
assert largest_difference(weights_on_1, weights_on_0) == 0, "replicas have drifted apart"
from_one = largest_difference(weights_on_0, weights_alone)
assert from_one > 1e-3, "two devices should differ from one"
from_halves = largest_difference(weights_on_0, weights_in_halves)
assert from_halves < 1e-12, "the halves should be the whole cause"

# %% [markdown]
# **The shards' statistics are the whole cause.** Group norm, which takes mean and variance within
# one image, keeps k devices equal to one (deeper: The law of the difference).
#
# ## Does it hurt?
#
# Normalising each shard by itself is normal practice. ImageNet was trained so in an hour, with 32
# images on each of 256 GPUs (Goyal et al., 2017, section 2.3). With 2 images a GPU, though,
# BatchNorm's error on ImageNet was 10.6 points above group norm's (Wu and He, 2018).
#
# We stored runs of chapter 08's narrow ResNet-18 on MNIST: batch 64, five seeds. Only the number of
# simulated devices changes, 1, 2, 16 or 32, and so the images that each has. **Predict:** do small
# shards fall behind, after one epoch and after two?

# %% tags=["fold"]
# measure: from the stored runs, % of 10,000 test images right, and training loss
import json
from pathlib import Path

from helpers.plotting import BLUE, show

stored = json.loads(Path("src/results/norm.json").read_text())
labels = {"norm-batch-1x64": "64 images each", "norm-batch-2x32": "32 images each",
          "norm-batch-16x4": "4 images each", "norm-batch-32x2": "2 images each"}


def of_seeds(name, epoch, key):
    return onp.array([run[epoch][key] for run in stored["runs"][name]])


def median_and_range(values, digits):
    return (f"{onp.median(values):.{digits}f} ({values.min():.{digits}f} to "
            f"{values.max():.{digits}f})")


print("median of five seeds (and their range)")
print("                % after 1 epoch      % after 2 epochs     training loss in epoch 2")
after_one, after_two, train_loss = {}, {}, {}
for name, label in labels.items():
    after_one[label] = 100 * of_seeds(name, 0, "accuracy")
    after_two[label] = 100 * of_seeds(name, 1, "accuracy")
    train_loss[label] = of_seeds(name, 1, "loss")
    print(f"{label:14}  {median_and_range(after_one[label], 1)}  "
          f"{median_and_range(after_two[label], 1)}  {median_and_range(train_loss[label], 3)}")
print(f"stored runs: {stored['date']}, {stored['machine']}")

# %% tags=["fold"]
# draw: accuracies after one epoch and after two, a point for each seed
import matplotlib.pyplot as plt

fig, axes = plt.subplots(1, 2, figsize=(7.0, 3.0), sharey=True, layout="constrained")
for ax, accuracies, when in zip(axes, [after_one, after_two], ["1 epoch", "2 epochs"]):
    for place, right in enumerate(accuracies.values()):
        ax.plot([place] * len(right), right, "o", color=BLUE, alpha=0.6)
        ax.plot([place - 0.3, place + 0.3], [onp.median(right)] * 2, color="black")
    ax.set_xticks(range(4), [label.split()[0] for label in accuracies])
    ax.set(title=f"after {when}", xlabel="images on each device")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("% of test images right")
axes[0].set_ylim(86, 100)
fig.suptitle("After two epochs all ranges overlap: no size of shard is ahead")
show(fig, alt="Test accuracies of five seeds each, with 64, 32, 4 and 2 images on a device, and "
              "medians as lines. After one epoch one run with 4 images is far below the others; "
              "after two epochs all ranges overlap.")

# %% tags=["fold"]
# check: medians within a point, ranges overlap; training loss is higher with 4 and 2 images
medians = [onp.median(right) for right in after_two.values()]
assert max(medians) - min(medians) < 1, "one falls behind"
highest_low = max(right.min() for right in after_two.values())
assert highest_low < min(right.max() for right in after_two.values()), "a winner"
for right in [*after_one.values(), *after_two.values()]:
    assert right.min() > 86, "a point is outside the figure"
loss_64, loss_32, loss_4, loss_2 = train_loss.values()
assert min(*loss_4, *loss_2) > max(*loss_64, *loss_32), "the loss of small shards should be higher"
first_64, first_32, first_4, first_2 = after_one.values()
assert max(first_4.min(), first_2.min()) < 95 < min(*first_64, *first_32), "after one epoch"
assert round(first_4.min(), 1) == 87.3

# %% [markdown]
# After two epochs all medians are within a point. (Five seeds may miss a smaller difference.) So
# **in these runs we saw no harm to the final accuracy.** But after one epoch a run with 4 images
# was at 87.3 %, all with 64 or 32 above 95 %; and with 4 or 2 images the *training* loss was higher
# in every run. (We didn't test why.) If your devices have few images each, as in the ImageNet runs
# with 2, try group norm (`nn.GroupNorm`), or statistics of the whole batch.
#
# ## The running statistics
#
# What does BatchNorm use in an evaluation, where there is no batch? A running mean and variance,
# which begin at 0 and 1. In each step a device keeps 0.9 of the old one, and adds 0.1 of its
# shard's. On a CPU MXNet does this in the backward pass (cuDNN, on GPUs, in the forward pass). So
# the cell makes one, and doesn't look at its gradients. **Predict** the running means of both
# devices.

# %%
norm = nn.BatchNorm(in_channels=1)
norm.initialize(ctx=pair)
outputs = []
with autograd.record():
    for x_shard in split_and_load(batch, pair):
        outputs.append(norm(x_shard))
autograd.backward(outputs)

for device in pair:
    mean = norm.running_mean.data(device).item()
    variance = norm.running_var.data(device).item()
    print(f"{device}: running mean {mean:.2f}, running variance {variance:.2f}")

# %% [markdown]
# Device 0 has a tenth of its mean 2, device 1 a tenth of 6. One device would have their average,
# 0.4. Both variances are $0.9 \cdot 1 + 0.1 \cdot 1 = 1.0$, one device's would be $0.9 \cdot 1 +
# 0.1 \cdot 5 = 1.4$: no device sees the variance *between* the shards.

# %% tags=["fold"]
# check: running statistics change in the backward pass only, by a tenth; in ResNet-18, too
for used, means, variances in [(pair, [0.2, 0.6], [1.0, 1.0]), (one, [0.4], [1.4])]:
    norm = nn.BatchNorm(in_channels=1)
    norm.initialize(ctx=used)
    with autograd.record():
        outputs = [norm(x_shard) for x_shard in split_and_load(batch, used)]
    for device in used:
        assert (norm.running_mean.data(device), norm.running_var.data(device)) == (0, 1), "forward"
    # On GPUs cuDNN changes them in the forward pass, and its variance is over n - 1, not n
    # (cudnn_batch_norm-inl.h at MXNet 1.9.1).
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
# ### Do both devices give the same scores?
#
# Outside `record` and `train_mode` a network uses its device's running statistics. We train the
# thin ResNet-18 for two steps, and give the same images to both replicas, whose weights are equal.
# (One step wouldn't show it: before its first update Trainer copies all that device 0 has to the
# others, running statistics too.)

# %% tags=["measured", "trains"]
trained = trained_on(pair, [batch_of(8), batch_of(8, begin=8)])
x, y = batch_of(8)
print(f"scores differ by {score_difference(trained, x):.1g} of the largest score")

# %% [markdown]
# So accuracy would depend on which device gets which image. A remedy, for shards of equal size:
# give every device the average of the running statistics. We write it into their arrays. (Chapter
# 07 warned of that for *weights*, which the store replaces. After the first step it leaves running
# statistics alone, since they aren't trained.)

# %% tags=["measured"]
def share_statistics(net):
    for parameter in net.collect_params().values():
        # Not trained: a running mean or variance.
        if parameter.grad_req == "null":
            replicas = parameter.list_data()  # one array a device
            copies = [array.as_in_ctx(mx.cpu(0)) for array in replicas]
            average = sum(copies) / len(copies)
            for array in replicas:
                array[:] = average  # copied to the array's device


share_statistics(trained)
print(f"scores differ by {score_difference(trained, x):.1g} of the largest score")

# %% [markdown]
# Now they agree. And `save_parameters` writes the same averages. So **call `share_statistics`
# before you evaluate: then you measure the network that you save.** The average variance still
# lacks the part between the shards. (Don't share by Gluon's `set_data`: it makes Trainer set up a
# new store, so a training with momentum would lose it.)

# %% tags=["fold", "trains"]
# check: sharing makes scores agree, changes no training (set_data does), gives what is saved
import os
import tempfile


def running_of(net):
    return [p for p in net.collect_params().values() if p.grad_req == "null"]


def device_arrays(parameter):
    return onp.stack([array.asnumpy() for array in parameter.list_data()])


# Of each running statistic every device gets the mean, and the scores agree.
net = trained_on(pair, [batch_of(8), batch_of(8, begin=8)])
weights = weights_by_device(net)
assert len(running_of(net)) == 2 * 17, "mean and variance of each norm"
assert largest_difference(weights[1], weights[0]) == 0 and score_difference(net, x) > 1e-3
wanted = [device_arrays(p).mean(axis=0) for p in running_of(net)]
assert max(onp.ptp(device_arrays(p), axis=0).max() for p in running_of(net)) > 1e-4
share_statistics(net)
for parameter, mean in zip(running_of(net), wanted):
    assert onp.abs(device_arrays(parameter) - mean).max() < 1e-15
assert largest_difference(weights_by_device(net), weights[0]) == 0, "weights stay as they are"
assert score_difference(net, x) < 1e-12


# Training with momentum goes on as without it. (With Gluon's set_data it doesn't.)
def by_set_data(net):
    net[1].running_mean.set_data(net[1].running_mean.data(pair[0]))


def two_steps(momentum, after_step):
    net = thin_resnet(pair)
    settings = {"learning_rate": 0.1, "momentum": momentum}
    trainer = gluon.Trainer(net.collect_params(), "sgd", settings)
    for begin in [0, 8]:
        one_backward(net, batch_of(8, begin), pair)
        trainer.step(8)
        after_step(net)
    return weights_by_device(net)


plain = two_steps(0.9, after_step=lambda net: None)
assert largest_difference(two_steps(0.9, share_statistics), plain[0]) < 1e-12
assert largest_difference(two_steps(0.9, by_set_data), plain[0]) > 1e-3, "set_data keeps momentum"

# Why the chapter takes two steps: Trainer's first one copies all of device 0 to the others.
differ = []


def note_difference(net):
    means = device_arrays(net[1].running_mean)
    differ.append(onp.ptp(means, axis=0).max())


two_steps(0, note_difference)
assert differ[0] == 0 and differ[1] > 1e-4

# A saved network is the average, gives the same scores on 1 and 4 devices, and those of a network
# whose statistics were averaged; not those of one device before.
four = [mx.cpu(rank) for rank in range(4)]
one_backward(net, batch_of(8, 16), pair)  # from here on each device has statistics of its own
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "resnet.params")
    net.save_parameters(path)
    saved = npx.load(path)
    loaded = {}
    for k in [1, 4]:
        loaded[k] = hybrid_resnet18(10, (4, 4, 8, 8))
        loaded[k].cast("float64")
        loaded[k].load_parameters(path, ctx=four[:k])
        assert largest_difference(weights_by_device(loaded[k]), weights[0]) == 0
apart_most = 0
for name, parameter in net._collect_params_with_prefix().items():
    values = device_arrays(parameter)
    assert (saved[name].asnumpy() == values.mean(axis=0)).all(), f"{name}: not the mean"
    apart_most = max(apart_most, onp.ptp(values, axis=0).max())
assert apart_most > 1e-6, "the devices must differ, or this shows nothing"
wanted = loaded[1](x).asnumpy()
for device in pair:
    own = net(x.as_in_ctx(device)).asnumpy()
    assert onp.abs(own - wanted).max() > 1e-6, "before the average: neither device's"
share_statistics(net)
for network, devices in [(net, pair), (loaded[4], four)]:
    for device in devices:
        assert onp.abs(network(x.as_in_ctx(device)).asnumpy() - wanted).max() < 1e-12, "all alike"

# %% tags=["fold"]
# measure: stored runs, each device judging its part of the test images by its own statistics,
# all parts together, against the same with the average's
for epoch in [0, 1]:
    points = []
    for name in labels:
        change = of_seeds(name, epoch, "accuracy") - of_seeds(name, epoch, "own_accuracy")
        points.append(100 * onp.abs(change).max())
    print(f"after epoch {epoch + 1}: all devices together at most {max(points):.2f} points apart")
    assert max(points) < 0.215

# %% [markdown]
# In the stored runs the accuracy of all devices together hardly depended on it, by 0.21 points at
# most. (A single device can be further off; what each would score alone isn't stored.)
#
# ## Statistics of the whole batch, from scratch
#
# Can devices normalise by the whole batch, though each has only a shard? They need its mean and
# variance, and both follow from sums: $\mu = \sum x / n$ and $\sigma^2 = \sum x^2/n - \mu^2$.
# (Where $\mu$ is large, this loses digits: exercise 2.) Sums can be all-reduced. What we write
# shows the idea: it keeps no running statistics, and doesn't reach norms inside blocks, as
# ResNet-18 has them. The sums are new arrays, not written in place as in chapter 03, so that
# `autograd` can follow them:

# %%
def all_sum(arrays):
    sums = []
    for receiver in arrays:
        copies = [array.as_in_ctx(receiver.ctx) for array in arrays]
        sums.append(sum(copies))
    return sums  # one on each device, all equal

# %% [markdown]
# In the batch of four the shards' sums are $1 + 3 = 4$ and $5 + 7 = 12$, their sums of squares $1 +
# 9 = 10$ and $25 + 49 = 74$. Images have four axes, and a sum over all but the channels leaves a
# number for each channel. Devices exchange numbers in `all_sum` only:

# %%
# [images, channels, rows, columns] -> [1, channels, 1, 1].
def sum_by_channel(x):
    return x.sum(axis=(0, 2, 3), keepdims=True)


def count_by_channel(x):  # how many values each channel has
    images, channels, rows, columns = x.shape
    return images * rows * columns


def statistics_of_all(x_shards):
    n = sum(count_by_channel(x) for x in x_shards)
    sums = all_sum([sum_by_channel(x) for x in x_shards])
    squares = all_sum([sum_by_channel(x * x) for x in x_shards])
    means = []  # one on each device, all equal
    variances = []
    for total, total_of_squares in zip(sums, squares):
        mean = total / n
        means.append(mean)
        variances.append(total_of_squares / n - mean * mean)
    return means, variances

# %% [markdown]
# **Predict** what both devices find in the batch of four.

# %%
# 4 images, 1 channel, 1 × 1.
x_shards = split_and_load(batch.reshape((4, 1, 1, 1)), pair)
means, variances = statistics_of_all(x_shards)
for mean, variance in zip(means, variances):
    print(f"{mean.ctx}: mean {mean.item()}, variance {variance.item()}")

# %% [markdown]
# $16/4 = 4$ and $84/4 - 4^2 = 5$: the whole batch's. With them a device normalises its shard. As
# BatchNorm does, it then multiplies by a trained scale $\gamma$ and adds a trained shift $\beta$;
# the small `eps` keeps it from dividing by 0.

# %%
def norm_together(x_shards, gammas, betas, eps=1e-5):
    means, variances = statistics_of_all(x_shards)
    outputs = []
    for rank, x in enumerate(x_shards):  # on each device
        normalised = (x - means[rank]) / np.sqrt(variances[rank] + eps)
        # One number for each channel.
        scale = gammas[rank].reshape((1, -1, 1, 1))
        shift = betas[rank].reshape((1, -1, 1, 1))
        outputs.append(scale * normalised + shift)
    return outputs

# %% tags=["fold"]
# measure: its outputs for the batch of four, with scale 1 and shift 0
gammas = [np.ones(1, ctx=device) for device in pair]
betas = [np.zeros(1, ctx=device) for device in pair]
for output in norm_together(x_shards, gammas, betas):
    print(output.ctx, output.asnumpy().ravel().round(2))

# %% [markdown]
# These are one device's outputs from above. And the gradients? Device 0's sum is 4, device 1's is
# 12, and both devices get the total, 16. So the 4 goes two ways:
#
# ```
# 4 on device 0 ──┬──> total on device 0, whose gradient is  1
#                 └──> total on device 1, whose gradient is 10
# ```
#
# The gradients 1 and 10 are made up: we take the losses 1 · total and 10 · total. **Predict:**
# which gradient comes back to the 4?

# %%
shard_sums = [np.array([4.0], ctx=pair[0]), np.array([12.0], ctx=pair[1])]
for shard_sum in shard_sums:
    shard_sum.attach_grad()
with autograd.record():
    total_on_0, total_on_1 = all_sum(shard_sums)
    losses = [1 * total_on_0, 10 * total_on_1]
autograd.backward(losses)
for shard_sum in shard_sums:
    print(f"{shard_sum.ctx}: gradient {shard_sum.grad.item()}")

# %% [markdown]
# $1 + 10$, since the 4 is in both totals; and so is the 12. So the backward pass of an all-reduce
# is an all-reduce again, and `autograd` does it. Is all of `norm_together` right, on shards of six
# images and four?

# %% tags=["fold"]
# measure: whether outputs and gradients are those of BatchNorm on one device, in float64
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
print("shards of 6 and 4 images: outputs and all gradients as on one device, to 1e-12")

# %% [markdown]
# ## A network that trains as on one device
#
# All shards go through the network together, layer by layer, since a norm needs all of them:

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
# A small network with two norms takes three steps. Does it get the weights that one device gets
# with Gluon's BatchNorm? We try that on two devices, and ours on 1, 2 and 4:

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


def forward_separately(net, x_shards):
    return [net(x_shard) for x_shard in x_shards]


def after_three_steps(devices, forward):
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
    return weights_by_device(net)


whole = after_three_steps(one, forward_separately)[0]
by_shard = after_three_steps(pair, forward_separately)
print("Gluon's, 2 devices:", largest_difference(by_shard, whole) < 1e-12)
four = [mx.cpu(rank) for rank in range(4)]
for k in [1, 2, 4]:
    together = after_three_steps(four[:k], forward_together)
    print(f"ours, k = {k}:         ", largest_difference(together, whole) < 1e-12)

# %% tags=["fold"]
# check: three steps move the weights; with ours they are one device's, with Gluon's they aren't
assert largest_difference(whole, weights_by_device(two_norms_on(one))[0]) > 1e-3
assert largest_difference(by_shard, whole) > 1e-4, "BatchNorm by shard should differ"
for k in [1, 2, 4]:
    together = after_three_steps(four[:k], forward_together)
    assert largest_difference(together, whole) < 1e-12, f"{k} devices"
inside = hybrid_resnet18(10, (4, 4, 8, 8))
hidden = [layer for layer in inside if not isinstance(layer, nn.BatchNorm)]
assert any(layer.collect_params(".*running.*") for layer in hidden), "these it wouldn't reach"

# %% [markdown]
# **With all-reduced statistics, k devices are one device again.** What would it cost in ResNet-18,
# with two sums a channel forward, and their two gradients backward?

# %% tags=["fold"]
# measure: numbers that ResNet-18's norms would send in a step, and in how many all-reduces
big = hybrid_resnet18(10)
big.infer_shape(np.zeros((1, 1, 28, 28)))
sizes = {}
for parameter in big.collect_params().values():
    if parameter.grad_req != "null":
        sizes[parameter.name] = int(onp.prod(parameter.shape))
norms = [size for name, size in sizes.items() if name.endswith("gamma")]
sent = 4 * sum(norms)
assert sum(norms) == 5 * 64 + 4 * (128 + 256 + 512), "one norm in the stem, two in each block"
print(f"{len(norms)} norms with {sum(norms):,} channels in all:")
print(f"{sent:,} numbers a step, {sent / sum(sizes.values()):.2%} of the gradients,")
print(f"in {2 * len(norms)} all-reduces, if a norm's two sums travel together")

# %% [markdown]
# The numbers are few. But at each all-reduce every device waits for all others: a norm can't go on
# without its sums. (How long, we haven't measured.)
#
# Gluon has one, `mxnet.gluon.contrib.nn.SyncBatchNorm`, for `mx.nd` arrays only, so not for chapter
# 08's network. It needs shards of equal size, and can hang (deeper: The law of the difference). In
# PyTorch, `torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)` puts one in place of every
# BatchNorm.
#
# ## Summary
#
# - BatchNorm normalises by the device's shard. So two devices equal one that normalises the halves
#   separately.
# - In our runs, shards of 64 to 2 images ended with overlapping accuracies; on ImageNet, 2 images
#   were too few.
# - Running statistics differ from device to device. Average them before you evaluate.
# - All-reduce two sums a channel, forward and backward, and k devices are one again; but each
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
#    x^2/n - \mu^2$. What is wrong? Find it from the counts, means and *centred* sums of
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


on_two = all_weights(trained_on(pair, [batch_of(9)]), pair[0])
cut = all_weights(trained_on(one, [batch_of(9)], InFiveAndFour), one[0])
print("five and four, as on two devices:", largest_difference(on_two, cut) < 1e-12)
assert largest_difference(on_two, cut) < 1e-12

# %% [markdown]
# ### Answer 2
#
# $x^2$ is about $10^8$, of which float32 keeps seven digits, so a variance of 5 is lost in
# rounding. With the counts $n_r$, means $\mu_r$ and centred sums $M_r$ of the shards: $\mu = \sum
# n_r \mu_r / n$ and $M = \sum M_r + \sum n_r (\mu_r - \mu)^2$ (Chan et al., 1979). By sums alone
# that takes two rounds of waiting in place of one, since the second needs the result of the first.
# If every device gets all the others' three numbers (an all-gather), one is enough.

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
# `devices[0]`. `save_parameters` writes another network, the average over the devices. The others
# idle, so it takes up to $k$ times as long. And it can't see that another replica has gone astray.

# %% tags=["solution"]
from helpers.training import assert_same_parameters

astray = thin_resnet(pair)
# As if an update had gone wrong on cpu(1)
astray[0].weight.data(pair[1])[:] = 0
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
