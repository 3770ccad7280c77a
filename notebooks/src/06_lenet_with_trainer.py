# %% [markdown]
# # 06 · The training loop to copy
#
# A training run on several devices is a loop: take a batch, split it, make a step, count the
# correct predictions. *How is this loop written, and how do we know that it is right?*
#
# > **What you'll do:** write a step, check a whole training loop against a reference that has one
# > device and no `Trainer`, and keep it as a script.
# >
# > **What you'll learn:** `DataLoader`, `metric.Accuracy` and `Trainer` in one loop; one rule for
# > `step(n)`; how to test a loop with Dropout.
# >
# > **What you need:** chapters 02, 04 and 05. No GPU. Reading takes {reading time}, running under a
# > minute with MNIST.
#
# ![Images of bytes, 28 by 28 by 1, become numbers from 0 to 1, 1 by 28 by 28. The DataLoader makes
# a batch of 64. It is split: 32 images for each of two devices. After the backward pass, step(64)
# gives both devices the same new weights.](src/drawings/pictures_to_step.svg)

# %%
import helpers
from helpers import networks, your_turn
from helpers.compare import largest_difference
from helpers.training import fit

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.data import ArrayDataset, DataLoader

four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]  # simulated
pair = four[:2]

# %% [markdown]
# ## The input pipeline
#
# An image file, once decoded, is an array of bytes, height × width × channel. `ToTensor` (in
# `mxnet.gluon.data.vision.transforms`) makes it channel × height × width, with numbers from 0 to 1,
# as Gluon's convolutions expect; `dataset.transform_first(ToTensor())` does so with each image.
# `load_data` returns images already in this form.
#
# An `ArrayDataset` pairs each image with its label, and a `DataLoader` stacks such examples into
# batches. This one shuffles them anew in each epoch, and drops an incomplete last batch; the
# section on `step(n)` explains why.

# %% tags=["measured"]
data = helpers.load_data("mnist", limit=13_000)
dataset = ArrayDataset(data.train_images, data.train_labels)
loader = DataLoader(dataset, batch_size=64, shuffle=True, last_batch="discard")
print(f"{len(dataset):,} images, {len(loader)} batches")

x, y = next(iter(loader))  # the first batch
print("x", x.shape, "y", y.shape)

# %% [markdown]
# The 203 batches take 12,992 of the 13,000 images, so that 8 are left out in each epoch.
#
# The network is LeNet again, here with max pooling, and in a `HybridSequential`, which chapter 08
# explains. Later chapters take it from `helpers.networks`.

# %%
def lenet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


assert str(lenet()) == str(networks.lenet())

# %% [markdown]
# ## One step
#
# The middle of the loop is a step. We write it first for chapter 05's smallest network, where each
# number can be predicted: one weight, 100 at the start. An image is one number, and its loss is
# weight · image, so that its gradient is the image itself. The rate is 1.

# %% tags=["your-turn"]
def start(devices):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(100), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    return net, trainer


def weight_on_each_device(net):
    return [value[0, 0].asscalar() for value in net.weight.list_data()]

# %% [markdown]
# ### Your turn: a step
#
# Write it before you scroll on. The loss of a shard is `net(shard)`. Shards may be uneven, so split
# with `even_split=False`. With the images 2 and 20 the weight becomes 100 − (2 + 20) / 2 = 89 on
# both devices.

# %% tags=["your-turn"]
def take_step(images, devices):
    """Begin with `start(devices)`, make one step, and return `weight_on_each_device(net)`."""
    ...


step_cases = [
    ((nd.array([[2], [20]]), pair), [89, 89]),
    ((nd.array([[1], [2], [3], [4], [5]]), pair), [97, 97]),
    ((nd.array([[1], [3], [5], [7]]), four[:3]), [96, 96, 96]),
]
your_turn(take_step, step_cases)

# %% [markdown]
# Ours has two more arguments, for the next section: by which `n` the step divides, and whether a
# device takes the mean of its losses.

# %%
def weight_after(images, n, mean=False):
    """The weight after one step on two devices."""
    net, trainer = start(pair)
    shards = gluon.utils.split_and_load(nd.array(images), pair, even_split=False)
    losses = []
    with autograd.record():
        for shard in shards:
            loss = net(shard)  # a number for each image
            if mean:
                loss = loss.mean()  # one number
            losses.append(loss)
    autograd.backward(losses)
    trainer.step(n)
    return weight_on_each_device(net)[0]


print(weight_after([[2], [20]], n=2))

# %% [markdown]
# ## One rule for step(n)
#
# `step(n)` adds up the gradients of all devices and divides by the number that it is told.
# **`n` is the number of images whose losses were added up in this step, on all devices together:
# `step(len(x))`.** Then each step follows the mean gradient of its batch, on any number of devices.
#
# This rule is easily broken: PyTorch's losses are means by default. Suppose that here, too, each of
# two devices takes the mean of its losses, while the loop says `step(6)`. The mean of the images 2
# to 12 is 7, so 93 would be right. **Predict:** which weight comes out?

# %% tags=["predict"]
six = [[2], [4], [6], [8], [10], [12]]
print(f"a number for each image: {weight_after(six, n=6):.2f}")
print(f"the mean on each device: {weight_after(six, n=6, mean=True):.2f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# 97.67, which is a third of the right step, and no error. The devices' means are 4 and 10, and
# their sum, 14, was divided by 6 once more.
#
# </details>
#
# So leave Gluon's losses as they are, a number for each image. (PyTorch's DDP divides the sum of
# the gradients by the number of devices. So there the mean on each device is right, if the shards
# are equal: chapter 14.)
#
# And the last 8 images of an epoch? By the rule they would make a full-length step whose direction
# rests on only 8 images. Such a step can do harm. With a small ResNet-18 (chapter 08) the median
# accuracy after one epoch was 74 % with a last batch of 16 images, and 87 % without it, although
# after three epochs it was 97 % either way (`notebooks/src/bench/README.md`). So **let the loader
# leave a smaller last batch out**, by `last_batch="discard"` (in PyTorch `drop_last=True`), or
# divide by the usual size, here 64.
#
# ## The loop
#
# `metric.Accuracy` counts correct predictions. It takes two lists with an entry for each device,
# labels first. It accumulates, so each epoch creates a new one, or calls `reset()`. It comes last
# in the step, because it calls `asnumpy`, so that Python waits for the devices (chapter 01).

# %% tags=["trains"]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def train_one_epoch(net, trainer, batches, devices):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = []
        losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                output = net(x_shard)
                outputs.append(output)
                losses.append(cross_entropy(output, y_shard))
        autograd.backward(losses)
        trainer.step(len(x))  # all images of this batch, on all devices
        metric.update(y_shards, outputs)
    name, accuracy = metric.get()
    return accuracy

# %% tags=["measured", "trains"]
two = helpers.devices(2)  # two GPUs, if available
net = lenet()
net.initialize(mx.init.Xavier(), ctx=two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})

accuracy = train_one_epoch(net, trainer, loader, two)
print(f"training accuracy {accuracy:.3f}")

# %% [markdown]
# An evaluation is the same loop without `record`, `backward` and `step`:

# %% tags=["measured"]
def evaluate(net, batches, devices):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = [net(x_shard) for x_shard in x_shards]
        metric.update(y_shards, outputs)
    name, accuracy = metric.get()
    return accuracy


test_set = ArrayDataset(data.test_images, data.test_labels)
test_loader = DataLoader(test_set, batch_size=500)
print(f"test accuracy {evaluate(net, test_loader, two):.3f}")

# %% [markdown]
# Later chapters train with `helpers.training.fit`. It takes the same steps, as we test below, but
# reads losses and predictions only some steps later, so that the devices need not wait.
#
# ## Does it do what we mean?
#
# The network learns, but is it the training that we mean? To find out, we need a **reference**: the
# same training, written in another way. Ours has one device, no `Trainer` and the mean loss, and it
# counts correct predictions with NumPy. With our loop it shares the network, the loss function and
# five batches, of which the last has only 32 images, so that a wrong `n` is noticed. We test in
# float64. Batches and rate are powers of two, because Gluon keeps the rate and 1 / `n` in float32
# (chapter 05).

# %%
five_batches = []
for begin in range(0, 288, 64):
    end = min(begin + 64, 288)
    x = nd.array(data.train_images[begin:end], dtype="float64")
    y = nd.array(data.train_labels[begin:end])
    five_batches.append((x, y))


def new_lenet(devices):
    net = lenet()
    net.cast("float64")
    mx.random.seed(0)  # so that the first forward pass draws the same weights each time
    net.initialize(mx.init.Xavier(), ctx=devices)
    return net

# %% tags=["trains"]
def reference_step(net, x, y):
    with autograd.record():
        output = net(x)
        loss = cross_entropy(output, y).mean()
    loss.backward()
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() - 0.125 * parameter.grad())
    return output


reference = new_lenet(pair[:1])
correct = 0
for x, y in five_batches:
    output = reference_step(reference, x, y)
    correct += (output.asnumpy().argmax(axis=1) == y.asnumpy()).sum()
reference_accuracy = correct / 288

# %% [markdown]
# And our loop, on one to four devices, whose shards are uneven on three. They are simulated, so
# that the results are the same on every machine.

# %% tags=["trains"]
def same_weights(net, expected):
    """Whether each replica of `net` has the weights of `expected`, to 1e-12."""
    parameters = list(net.collect_params().values())
    expected_values = [parameter.data() for parameter in expected.collect_params().values()]
    for device in parameters[0].list_ctx():
        values = [parameter.data(device) for parameter in parameters]
        if largest_difference(values, expected_values) > 1e-12:
            return False
    return True


def sgd(net):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})


for k in [1, 2, 3, 4]:
    devices = four[:k]
    ours = new_lenet(devices)
    accuracy = train_one_epoch(ours, sgd(ours), five_batches, devices)
    assert same_weights(ours, reference)
    assert accuracy == reference_accuracy
    print(f"k = {k}: weights and accuracy of the reference")

# %% [markdown]
# `fit` has a loop of its own, so we test it as well.

# %% tags=["trains"]
ours = new_lenet(four[:3])
history = fit(ours, sgd(ours), five_batches, four[:3], progress=False)
accuracy = history.train_accuracy[0]
assert same_weights(ours, reference) and accuracy == reference_accuracy
print("fit: weights and accuracy of the reference")

# %% [markdown]
# Would we have noticed a mistake? Here is a Trainer that divides by 64 in each step, also in the
# last. **Predict:** which comparison notices it: two devices with one device, or two devices with
# the reference?

# %% tags=["predict", "trains"]
class Always64(gluon.Trainer):
    """Gluon's Trainer, but for one line."""

    def step(self, n):
        super().step(64)  # instead of n


def train_by_64(devices):
    net = new_lenet(devices)
    trainer = Always64(net.collect_params(), "sgd", {"learning_rate": 0.125})
    train_one_epoch(net, trainer, five_batches, devices)
    return net


on_one = train_by_64(pair[:1])
on_two = train_by_64(pair)
print("two devices, equal to one device:   ", same_weights(on_two, on_one))
print("two devices, equal to the reference:", same_weights(on_two, reference))
# %% tags=["fold"]
# check: what came out
assert same_weights(on_two, on_one)
assert not same_weights(on_two, reference)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only the reference notices it. One device makes the same mistake as two, so these agree.
#
# </details>
#
# **Agreement between devices doesn't prove that the loop is right.** Compare it with a reference
# that doesn't use what you test. For a loop of your own take the same: float64, powers of two for
# batch and rate, a few batches with a smaller last one, and a step that is written anew.
#
# ## Dropout: a mask on each device
#
# So far no step drew random numbers. **Dropout** does: in training, with `p=0.5`, it sets each
# number to 0 with probability 0.5, and doubles the others. The factors, 0 and 2, are its **mask**.
# We see it if we feed Dropout an array of ones. From the same seed, one device draws a mask for 64
# images, then two devices draw a mask for 32 images each:

# %%
def draw_mask(images, device):
    with autograd.train_mode():  # elsewhere Dropout does nothing
        return nd.Dropout(nd.ones((images, 1, 28, 28), ctx=device, dtype="float64"), p=0.5)


mx.random.seed(7)
one_mask = draw_mask(64, pair[0])

mx.random.seed(7)
first_mask = draw_mask(32, pair[0])
second_mask = draw_mask(32, pair[1])
joined = nd.concat(first_mask, second_mask.as_in_context(pair[0]), dim=0)

print("image 32, one device: ", one_mask[32, 0, 0, :8].asnumpy())
print("image 32, two devices:", joined[32, 0, 0, :8].asnumpy())

# %% [markdown]
# On two devices image 32 gets another mask, because it is the first image of the second draw. So
# **with Dropout $k$ devices and one give different weights, and that is not a bug.** How can such a
# loop be tested? By a reference that has no Dropout, but multiplies by the same masks. Each mask
# must be drawn on its own device, because each GPU has its own generator (`src/resource.cc` of
# MXNet), and in the loop's order, because simulated devices share one.
#
# First our loop. It makes one step from the same seed. Its network is one layer behind a Dropout of
# pixels, and we return the layer.

# %% tags=["trains"]
def new_layer(devices):
    layer = nn.Dense(10, in_units=28 * 28)
    layer.cast("float64")
    mx.random.seed(0)
    layer.initialize(mx.init.Xavier(), ctx=devices)
    return layer


def step_with_dropout(devices):
    layer = new_layer(devices)
    net = nn.Sequential()
    net.add(nn.Dropout(0.5))
    net.add(layer)
    mx.random.seed(7)
    train_one_epoch(net, sgd(net), five_batches[:1], devices)
    return layer

# %% [markdown]
# Now the reference, which gets the images times a mask. **Predict:** which mask gives the weights
# of our loop on one device, and which those of our loop on two?

# %% tags=["predict", "trains"]
on_one = step_with_dropout(pair[:1])
on_two = step_with_dropout(pair)

x, y = five_batches[0]
for name, mask in [("one_mask", one_mask), ("joined", joined)]:
    expected = new_layer(pair[:1])
    reference_step(expected, x * mask, y)
    print(f"{name:8}  weights of one device:", same_weights(on_one, expected))
    print(f"{name:8}  weights of two devices:", same_weights(on_two, expected))

# %% [markdown]
# <details><summary>What came out</summary>
#
# The loop on one device equals the reference with `one_mask`, and the loop on two devices equals
# the reference with both masks joined. So the loop is right on both, and only the masks differ.
#
# </details>
#
# ## The script
#
# The file [train_lenet.py](train_lenet.py) is yours to copy. (It takes data, devices and network
# from `helpers`; put your own there.) It contains our two functions verbatim, and a `main` that
# makes loaders, network and Trainer and calls both. In a terminal you start it by
# `python train_lenet.py`, in a notebook by `%run`:

# %% tags=["measured", "trains"]
# %run train_lenet.py

# %% tags=["fold"]
# check: the script's train_one_epoch and evaluate are ours
import inspect

import train_lenet

for function in [train_one_epoch, evaluate]:
    kept = getattr(train_lenet, function.__name__)
    assert inspect.getsource(function) == inspect.getsource(kept)

# %% [markdown]
# ## Summary
#
# - The loop: split, `record`, `autograd.backward(losses)`, `step(len(x))`, and the metric last.
# - `n` in `step(n)` is the number of images whose losses were added up, on all devices together. A
#   loss is a number for each image, and the loader leaves a smaller last batch out.
# - Agreement between devices doesn't prove that a loop is right. Compare it with a reference that
#   doesn't use what you test, and give the reference the same masks where there is Dropout.
#
# What a larger batch does: deeper: Batch, rate and warm-up. Next, chapter 07: what `step` does.
# (The short path goes on with chapter 08.)
#
# **Further reading.** MXNet 1.5.1's tutorial (`docs/tutorials/gluon/multi_gpu.md`); N. Srivastava
# et al., *Dropout* (2014).

# %% [markdown]
# ## Exercises
#
# 1. **Labels to ignore.** Of the six images 2 to 12 the last two have no label, and must not count.
#    A colleague divides the sum of each device's losses by the number of its own labels, and calls
#    `step(2)`. Change `weight_after` so. Which weight comes out, and which by the rule?
# 2. **A run that repeats itself.** Train a network with Dropout twice, with a loader that shuffles.
#    Which of `mx.random.seed` and `np.random.seed` must be called before each training run, so that
#    the weights come out equal?

# %% [markdown]
# ### Answer to *Your turn*
#
# All shards together have `len(images)` images, so this is `n`.

# %% tags=["solution", "your-turn"]
def take_step(images, devices):
    net, trainer = start(devices)
    shards = gluon.utils.split_and_load(images, devices, even_split=False)
    losses = []
    with autograd.record():
        for shard in shards:
            losses.append(net(shard))
    autograd.backward(losses)
    trainer.step(len(images))
    return weight_on_each_device(net)


your_turn(take_step, step_cases)

# %% [markdown]
# ### Answer 1
#
# The losses of four images are added up, so the rule says `step(4)`: their mean is 5, and the
# weight 95. The colleague's devices find the means of 2, 4 and 6, and of 8 alone: 4 and 8. So the
# weight is 94, since image 8 counts as much as three others.

# %% tags=["solution", "trains"]
labelled = [[1], [1], [1], [1], [0], [0]]


def weight_with_ignored(images, n, mean=False):
    net, trainer = start(pair)
    x_shards = gluon.utils.split_and_load(nd.array(images), pair)
    labelled_shards = gluon.utils.split_and_load(nd.array(labelled), pair)
    losses = []
    with autograd.record():
        for x_shard, labelled_shard in zip(x_shards, labelled_shards):
            loss = net(x_shard) * labelled_shard  # 0 where there is no label
            if mean:
                loss = loss.sum() / labelled_shard.sum()
            losses.append(loss)
    autograd.backward(losses)
    trainer.step(n)
    return weight_on_each_device(net)[0]


print("the colleague's:", weight_with_ignored(six, n=2, mean=True))
print("by the rule:    ", weight_with_ignored(six, n=4))

# %% [markdown]
# ### Answer 2
#
# Both. MXNet draws the first weights and the masks, but `DataLoader` takes its order from NumPy.

# %% tags=["solution", "trains"]
def train_with_dropout():
    net = nn.Sequential()
    net.add(nn.Dense(128, activation="relu"), nn.Dropout(0.5), nn.Dense(10))
    net.initialize(mx.init.Xavier(), ctx=pair)
    some = ArrayDataset(data.train_images[:320], data.train_labels[:320])
    train_one_epoch(net, sgd(net), DataLoader(some, batch_size=64, shuffle=True), pair)
    return net


def two_runs_are_equal(seed_mxnet, seed_numpy):
    runs = []
    for run in [1, 2]:
        if seed_mxnet:
            mx.random.seed(3)
        if seed_numpy:
            np.random.seed(3)
        runs.append(train_with_dropout())
    return same_weights(runs[0], runs[1])


print("mx.random.seed alone:", two_runs_are_equal(True, False))
print("np.random.seed alone:", two_runs_are_equal(False, True))
print("both:                ", two_runs_are_equal(True, True))
