# %% [markdown]
# # 06 · Training LeNet with Trainer
#
# The way of the images, from bytes to a step on two devices:
#
# ![Pictures of bytes, 28 by 28 by 1, become images of numbers from 0 to 1, 1 by 28 by 28. The
# DataLoader makes a batch of 64. It is split: 32 images for each of two devices. After the backward
# pass, step(64) gives both the same new weights.](src/drawings/pictures_to_step.svg)
#
# > **What you'll do:** write a training loop, keep it as a script for k devices, and see what
# > Dropout changes.
# >
# > **What you'll learn:** `DataLoader`, `metric.Accuracy` and `Trainer.step` in one loop; three
# > traps: a loss averaged twice, a last batch that is smaller, rows counted twice; whether the
# > input pipeline keeps up, and what can be compared when random numbers take part.
# >
# > **What you need:** chapters 02, 04 and 05. No GPU. Reading takes {reading time}, running under a
# > minute with MNIST.

# %% tags=["measured"]
import helpers

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
from mxnet.gluon.data import ArrayDataset, DataLoader
from mxnet.gluon.data.vision import transforms

two = helpers.devices(2)  # two GPUs, or else simulated devices
data = helpers.load_data("mnist", limit=12_800)
print(data)

# %% [markdown]
# ## The input pipeline
#
# How does a file get into a network? Decoded, it is a *picture*: bytes from 0 to 255, as height ×
# width × channel. Gluon's layers take *images*: numbers from 0 to 1, as channel × height × width.
# `ToTensor` makes one from the other. (The folded cell turns our images back into pictures, to show
# the way of your own files.)

# %% tags=["fold"]
# define: pictures and labels, what decoded files would give
pixels = data.train_images * 255  # [n, 1, 28, 28]
pixels = pixels.transpose(0, 2, 3, 1)  # [n, 28, 28, 1]: the channel goes last
pictures = nd.array(pixels.round(), dtype="uint8")
labels = data.train_labels.astype("int32")

# %% [markdown]
# A *dataset* gives one example at a time. `transform_first` applies a function to its picture, not
# to its label.

# %%
examples = ArrayDataset(pictures, labels)
dataset = examples.transform_first(transforms.ToTensor())
image, label = dataset[0]
print("a picture:", pictures[0].shape)
print("an image: ", image.shape)

# %% tags=["fold"]
# check: ToTensor puts the channel first and divides by 255; the label stays as it was
assert label == labels[0]
colours = nd.arange(18).reshape(2, 3, 3).astype("uint8")  # one channel can't show the order
for given, got in [(pictures[0], image), (colours, transforms.ToTensor()(colours))]:
    expected = given.asnumpy().transpose(2, 0, 1).astype("float32") / np.float32(255)
    assert np.array_equal(got.asnumpy(), expected), "not channel first, or not divided by 255"

# %% [markdown]
# A `DataLoader` stacks examples into batches. With `shuffle=True` each epoch has a new order.

# %%
loader = DataLoader(dataset, batch_size=64, shuffle=True)
x, y = next(iter(loader))  # the first batch
print(x.shape, y.shape)

# %% [markdown]
# ## The network
#
# LeNet again, with max pooling where chapter 04 had average pooling. A `HybridSequential` works
# like a `Sequential`, and can also be compiled (chapter 08).

# %%
def lenet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))  # the first Dense flattens its input
    return net

# %% [markdown]
# Weights start by Xavier's rule: uniform numbers, closer to 0 in larger layers.

# %%
mx.random.seed(0)  # the same first weights in each run
net = lenet()
net.initialize(mx.init.Xavier(), ctx=two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# ## Train it
#
# A step is chapter 05's; `autograd.backward(losses)` is its loop over `loss.backward()` in one
# call. New is the `metric`. It counts right answers, and takes lists with an entry for each device,
# labels first. Here are three labels, and scores for two classes:

# %%
metric = mx.metric.Accuracy()
first_labels = nd.array([0, 1], ctx=two[0])
second_labels = nd.array([1], ctx=two[1])
first_scores = nd.array([[9, 2], [8, 3]], ctx=two[0])  # the answers are 0 and 0
second_scores = nd.array([[1, 7]], ctx=two[1])  # the answer is 1
metric.update([first_labels, second_labels], [first_scores, second_scores])
print(metric.get())

# %% [markdown]
# Two of three are right. A metric goes on counting, so each epoch gets a new one.
# It reads the scores, so it makes Python wait (chapter 01). It is called last: by then all work of
# the step is in the queues. `even_split=False` lets shards differ by one image; each device needs
# at least one.

# %% tags=["trains"]
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
        trainer.step(len(x))
        metric.update(y_shards, outputs)
    name, share_right = metric.get()
    return share_right

# %% tags=["measured", "trains"]
for epoch in [1, 2]:
    right = train_one_epoch(net, trainer, loader, two)
    print(f"epoch {epoch}: {right:.3f} of the answers were right")

# %% [markdown]
# It learns. Does it compute what it should? Two epochs of 640 images in batches of 130 (the last
# has 120), in float64: we compare the weights on 1, 2, 3 and 4 devices with each other, and with
# those of a plain loop without Trainer:

# %% tags=["fold", "trains"]
# check: the weights after ten steps on 1, 2, 3 and 4 devices, and by a plain loop
from helpers.compare import largest_difference

four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]
x640 = nd.array(data.train_images[:640], dtype="float64")
y640 = nd.array(data.train_labels[:640])
ten_batches = []
for epoch in [1, 2]:
    for first in range(0, 640, 130):
        ten_batches.append((x640[first : first + 130], y640[first : first + 130]))


def start_in_float64(devices):
    net = lenet()
    net.cast("float64")
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype="float64"))  # now all shapes are known
    return net


def by_device(net):
    """All parameters of each device, [device][parameter]."""
    arrays = [parameter.list_data() for parameter in net.collect_params().values()]
    return list(zip(*arrays))


def with_trainer(k, divisor=None):
    """The weights after ten steps on k devices; with a divisor, `step` gets that each time."""
    net = start_in_float64(four[:k])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    if divisor is not None:
        step = trainer.step
        trainer.step = lambda size: step(divisor)
    train_one_epoch(net, trainer, ten_batches, four[:k])
    return net


def plain_descent():
    net = start_in_float64(four[:1])
    mean_losses = []
    for x, y in ten_batches:
        with autograd.record():
            loss = cross_entropy(net(x), y).mean()
        loss.backward()
        mean_losses.append(loss.asscalar())
        for parameter in net.collect_params().values():
            parameter.data()[:] -= 0.125 * parameter.grad()
    return net, mean_losses


plain, mean_losses = plain_descent()
assert np.mean(mean_losses[-3:]) < 0.95 * np.mean(mean_losses[:3]), "compare while the loss falls"
on_one = with_trainer(1)
for k in [1, 2, 3, 4]:
    replicas = by_device(with_trainer(k))
    assert len(replicas) == k
    # The Trainer passes 1/130 in float32, rounded alike on every device. With batches of 128,
    # whose 1/128 has no rounding, the plain loop's weights were ours to the bit.
    assert largest_difference(replicas, by_device(plain)[0]) < 1e-6, "not plain descent"
    assert largest_difference(replicas, by_device(on_one)[0]) < 1e-12, "not one device's weights"
print("weights on 1, 2, 3 and 4 devices agree to 1e-12")
print("weights of our loop and of the plain one agree to 1e-6 (Trainer keeps 1/130 in float32)")

# %% [markdown]
# ## Three traps that raise no error
#
# ### 1. A loss averaged twice
#
# What if the loss is already a mean? We check by hand, with six "images" of two numbers each, three
# on each of two devices:

# %%
first_shard = [[2, 0], [4, 0], [6, 0]]
second_shard = [[0, 6], [0, 12], [0, 18]]
print("the sum of all six:", np.sum(first_shard + second_shard, axis=0))

# %% [markdown]
# The network has two weights $w$, both 0. Its output $w \cdot x$ is the loss, without labels. So
# the gradient of an image's loss is the image itself. `backward` adds gradients within a device,
# `step(divisor)` adds them over devices, and at rate 1 subtracts the sum, divided by the divisor.

# %% tags=["trains"]
pair = [mx.cpu(0), mx.cpu(1)]  # CPUs, where there are GPUs too: all get the same numbers


def weights_after_step(shards, divisor, mean=False):
    layer = nn.Dense(1, use_bias=False, in_units=2)
    layer.initialize(mx.init.Zero(), ctx=pair)
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 1})
    losses = []
    with autograd.record():
        for shard, device in zip(shards, pair):
            x = nd.array(shard, ctx=device)
            loss = layer(x)  # a number for each image
            if mean:
                loss = loss.mean()  # one number for the shard
            losses.append(loss)
    autograd.backward(losses)
    trainer.step(divisor)
    weights = layer.weight.data(pair[0])
    return weights.asnumpy().ravel()


two_shards = [first_shard, second_shard]
print("step(6):", weights_after_step(two_shards, divisor=6))

# %% [markdown]
# Right: minus the sum of the six, $(12, 36)$, divided by 6. **Predict** the weights if each device
# takes the mean of its three losses, and we still call `step(6)`. Which `step` would be right?

# %% tags=["trains"]
print("means, step(6):", weights_after_step(two_shards, divisor=6, mean=True))
print("means, step(2):", weights_after_step(two_shards, divisor=2, mean=True))

# %% [markdown]
# With `step(6)` the weights change by a third of what they should: the sum was divided by 3, the
# size of a shard, and then by 6 again. With 32 images on each device the step is 32 times too
# short. In PyTorch a loss is a mean by default; here, leave it alone, and tell `step` the batch
# size. (Means need `step(2)`, the number of devices, and equal shards: exercise 2.)
#
# ### 2. Two meanings of the last batch's size
#
# 60,000 images in batches of 128 leave a last batch of 96. (`last_batch="discard"` would drop it.)
# MXNet's tutorial tells `step` the *actual* size, 96, as our loop does (`len(x)`); *Dive into Deep
# Learning* (Concise Implementation for Multiple GPUs) the *nominal* size, 128. A small example has
# batches of six and a last one of two:

# %% tags=["trains"]
last_shards = [[[3, 0]], [[0, 12]]]  # an image on each device
print("actual size: ", weights_after_step(last_shards, divisor=2))
print("nominal size:", weights_after_step(last_shards, divisor=6))

# %% [markdown]
# With the actual size each step is a mean; with the nominal size an image counts a sixth, as in a
# full batch. Where all batches are full, as in our trainings (12,800 images, 64 a batch), both are
# the same. **Where the last batch is much smaller, take the nominal size, or drop it:** in chapter
# 08 the actual size does harm.
#
# In the comparison above we meant the actual size, 120: the plain loop takes means. Suppose that
# our loop had passed 130 there by mistake. **Predict:** which would notice, comparing devices with
# each other, or our loop with the plain one?

# %% tags=["fold", "trains"]
# check: our loop with the nominal size 130: one device against two, and against the plain loop
def assert_weights(found, expected):
    assert np.allclose(found, expected, rtol=1e-6, atol=0), found


assert_weights(weights_after_step(two_shards, 6), [-2, -6])
assert_weights(weights_after_step(two_shards, 6, mean=True), [-2 / 3, -2])
assert_weights(weights_after_step(two_shards, 2, mean=True), [-2, -6])
assert_weights(weights_after_step(last_shards, 2), [-1.5, -6])
assert_weights(weights_after_step(last_shards, 6), [-0.5, -2])

nominal = by_device(with_trainer(1, divisor=130))
between_devices = largest_difference(by_device(with_trainer(2, divisor=130)), nominal[0])
from_plain = largest_difference(nominal, by_device(plain)[0])
print("nominal size: one device and two agree to 1e-12:        ", between_devices < 1e-12)
print("nominal size: our loop and the plain one agree to 1e-6: ", from_plain < 1e-6)
assert between_devices < 1e-12 and from_plain > 1e-4
assert 60_000 % 128 == 96
for last_batch, sizes in [("keep", [128] * 7 + [104]), ("discard", [128] * 7)]:
    thousand = DataLoader(ArrayDataset(nd.arange(1000)), batch_size=128, last_batch=last_batch)
    assert [len(batch) for batch in thousand] == sizes

# %% [markdown]
# Only the plain loop notices: all devices had the same divisor. **That devices agree doesn't show
# that a loop does what you meant.** Compare with something written independently.
#
# ### 3. Rows counted twice
#
# Older code uses MXNet's iterators. `NDArrayIter` fills the last batch up with rows from the
# beginning; `pad` says how many. **Predict** the three batches of four that ten rows give, and how
# many batches a second loop gets.

# %%
ten_rows = mx.io.NDArrayIter(np.arange(10), batch_size=4)
for batch in ten_rows:
    rows = batch.data[0]  # `data` is a list, since a batch may have several arrays
    print(rows.asnumpy(), "pad", batch.pad)
print("a second loop:", len(list(ten_rows)), "batches")
ten_rows.reset()
print("after reset:  ", len(list(ten_rows)), "batches")

# %% [markdown]
# A loop that ignores `pad` counts rows 0 and 1 twice. One that forgets `reset` trains for one
# epoch, then runs through empty ones.

# %% tags=["fold"]
# check: the rows and pads of trap 3, and what is left after a loop
ten_rows.reset()
found = [(batch.data[0].asnumpy().tolist(), batch.pad) for batch in ten_rows]
assert found == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 0), ([8, 9, 0, 1], 2)]
assert len(list(ten_rows)) == 0, "it needs a reset"
ten_rows.reset()
assert len(list(ten_rows)) == 3

# %% [markdown]
#
# ## The whole script
#
# Everything for k devices, to copy; it is also the file [train_lenet.py](train_lenet.py). The data
# are images, so it needs no `ToTensor`; `lenet` is the same, from `helpers`. New is the part that
# tests, without `record` and `step`.

# %% tags=["file:train_lenet.py", "measured", "trains"]
# train_lenet.py
import helpers  # first: it prepares simulated devices

import mxnet as mx
from helpers.networks import lenet
from mxnet import autograd, gluon
from mxnet.gluon.data import ArrayDataset, DataLoader

k = 2  # how many devices
data = helpers.load_data("mnist", limit=12_800)
dataset = ArrayDataset(data.train_images, data.train_labels)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
test_dataset = ArrayDataset(data.test_images, data.test_labels)
test_loader = DataLoader(test_dataset, batch_size=500)

devices = helpers.devices(k)
net = lenet()
net.initialize(mx.init.Xavier(), ctx=devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in [1, 2]:
    metric = mx.metric.Accuracy()
    for x, y in loader:
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
        trainer.step(len(x))
        metric.update(y_shards, outputs)
    name, share_right = metric.get()
    print(f"k = {k}, epoch {epoch}: training accuracy {share_right:.3f}")

    metric = mx.metric.Accuracy()  # NEW: test images
    for x, y in test_loader:
        x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
        y_shards = gluon.utils.split_and_load(y, devices, even_split=False)
        outputs = [net(x_shard) for x_shard in x_shards]
        metric.update(y_shards, outputs)
    name, share_right = metric.get()
    print(f"k = {k}, epoch {epoch}: test accuracy {share_right:.3f}")

# %% [markdown]
# After the first epoch test accuracy may well be higher: training accuracy is counted while the
# weights still change.
#
# ## fit: the same loop, safe to stop
#
# Later chapters train with `helpers.training.fit`: this loop, with this loss, a progress bar and a
# record of losses and accuracies. It, too, tells `step` the actual size. It allows fewer images
# than devices. JupyterLab's stop button takes effect between two steps. `Batches` cuts arrays into
# batches. We train the script's network further:

# %% tags=["measured", "trains"]
from helpers.training import Batches, fit

batches = Batches(data.train_images, data.train_labels, 64)
test_batches = Batches(data.test_images, data.test_labels, 500, shuffle=False)
history = fit(net, trainer, batches, devices, epochs=1, test=test_batches)
print(f"training {history.train_accuracy[0]:.3f}, test {history.test_accuracy[0]:.3f}")

# %% tags=["fold", "trains"]
# check: fit gives our loop's losses, weights and accuracies, a last batch of 120 included
# (and a device may lack images)
def prepared(devices):
    net = start_in_float64(devices)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})


uneven_batches = Batches(x640, y640, 130, shuffle=False)
tries = Batches(x640[:100], y640[:100], 30, shuffle=False)
net, trainer = prepared(four)
history = fit(net, trainer, uneven_batches, four, epochs=2, test=tries, progress=False)
assert np.allclose(history.losses, mean_losses, rtol=1e-5, atol=0), "the plain loop's losses"
assert largest_difference(by_device(net), by_device(on_one)[0]) < 1e-12, "our loop's weights"
share = (net(x640[:100]).asnumpy().argmax(axis=1) == y640[:100].asnumpy()).mean()
assert history.test_accuracy[-1] == share, "NumPy counts the same"
metric = mx.metric.Accuracy()
for x, y in tries:
    x_shards = gluon.utils.split_and_load(x, pair, even_split=False)
    y_shards = gluon.utils.split_and_load(y, pair, even_split=False)
    metric.update(y_shards, [net(x_shard) for x_shard in x_shards])
assert metric.get()[1] == share, "this way of counting is right"

again, trainer = prepared(pair)
counted = []
for epoch in [1, 2]:
    counted.append(train_one_epoch(again, trainer, uneven_batches, pair))
assert counted == history.train_accuracy, "our loop and fit count the same"

seven_images = Batches(x640[:7], y640[:7], 3, shuffle=False)  # 3, 3, 1: cpu(1) gets no image
alone, trainer = prepared(pair[:1])
fit(alone, trainer, seven_images, pair[:1], progress=False)
together, trainer = prepared(pair)
fit(together, trainer, seven_images, pair, progress=False)
assert largest_difference(by_device(together), by_device(alone)[0]) < 1e-12, "an idle device"
print("fit ends with our loop's weights, losses and accuracies")

# %% tags=["fold", "trains"]
# check: stopped within step 6, fit ends that step, and can go on from there
import signal

from helpers.training import assert_same_parameters


class PressStop:
    """A loss that presses the stop button when it is called for the n-th time."""

    def __init__(self, at):
        self.at, self.calls = at, 0

    def __call__(self, output, y):
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        return cross_entropy(output, y)


def after_whole_steps(number):
    net, trainer = prepared(pair)
    fit(net, trainer, ten_batches[:number], pair, progress=False)
    return by_device(net)[0]


stopped, trainer = prepared(pair)
was_stopped = False
try:
    fit(stopped, trainer, ten_batches, pair, loss=PressStop(at=2 * 5 + 1), progress=False)
except KeyboardInterrupt:
    was_stopped = True
assert was_stopped
assert_same_parameters(stopped)
assert largest_difference(by_device(stopped), after_whole_steps(6)) == 0, "not six whole steps"
fit(stopped, trainer, ten_batches[6:], pair, progress=False)
assert largest_difference(by_device(stopped), after_whole_steps(10)) == 0, "not ten"

# %% [markdown]
# ## Does the pipeline keep up?
#
# Images that come too late leave devices idle. So we measure training on batches that are ready,
# a loader alone, and both together. One of three loaders has two processes (`num_workers=2`):

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 3=>ROUNDS = 1"]
# measure: loaders alone, and epochs with them; medians of three rounds
from functools import partial

from helpers.timing import in_turns, spread

ROUNDS = 3
n = 1920 if len(labels) >= 1920 else len(labels) // 128 * 128
bytes_set = ArrayDataset(pictures[:n], labels[:n]).transform_first(transforms.ToTensor())
loaders = {
    "DataLoader": DataLoader(bytes_set, 128, shuffle=True),
    "DataLoader, 2 processes": DataLoader(bytes_set, 128, shuffle=True, num_workers=2),
    "Batches": Batches(data.train_images[:n], labels[:n], 128),
}
ready = list(loaders["Batches"])
net = lenet()
net.initialize(mx.init.Xavier(), ctx=two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})


def in_ms(seconds):
    return round(1000 * seconds)


def train_on(batches):
    fit(net, trainer, batches, two, progress=False)


contestants = {"training alone": partial(train_on, ready)}
for name, each in loaders.items():
    contestants[f"{name} alone"] = partial(list, each)
    contestants[f"{name}, epoch"] = partial(train_on, each)
times = in_turns(contestants, ROUNDS, warm_up=1)
training = spread(times["training alone"]).median
print(f"{n:,} images; training on batches that are ready takes {in_ms(training)} ms")
for name in loaders:
    alone = spread(times[f"{name} alone"]).median
    together = spread(times[f"{name}, epoch"]).median
    print(f"{name:23}  alone {in_ms(alone):3} ms, training with it {in_ms(together):3} ms "
          f"({in_ms(together) - in_ms(training):+} ms)")

# %% [markdown]
# In brackets is how much longer an epoch takes with the loader. A loader that kept up would add
# nothing. `Batches`, which only cuts arrays, adds the least. A `DataLoader` makes each batch when
# the loop asks for it. Processes can load meanwhile, if cores are idle; our two train. So measure,
# and where a loader adds much, give it processes up to the number of idle cores.
#
# ## Dropout: random numbers on k devices
#
# Do k devices compute what one does with random numbers, too? In training, `nn.Dropout(0.5)` sets
# each number to 0 with probability one half, and doubles the rest. Given ones, it returns its
# *mask*. (Dropout works only under `record` or, as here, in `train_mode`.)

# %%
dropout = nn.Dropout(0.5)


def draw_mask(n, device):
    ones = nd.ones(n, ctx=device)
    with autograd.train_mode():
        return dropout(ones).asnumpy()


mx.random.seed(7)
print("a mask:", draw_mask(8, pair[0]))

# %% [markdown]
# Where do random numbers come from? MXNet has many *generators*, each with a sequence of its own,
# and simulated devices share them. (**On GPUs** each device has its own: documentation of
# `mx.random.seed`.) A call for 64 numbers takes the next 64 of generator 1, a call for 128 also 64
# of generator 2.
#
# Two devices draw 64 each; then, from the same seed, one draws 128 at once. **Predict:** are its
# halves the two devices' masks?

# %%
mx.random.seed(7)
first_mask = draw_mask(64, pair[0])
second_mask = draw_mask(64, pair[1])
mx.random.seed(7)
whole_mask = draw_mask(128, pair[0])

print("first device: ", first_mask[:8])
print("first half:   ", whole_mask[:8])
print("second device:", second_mask[:8])
print("second half:  ", whole_mask[64:72])  # begins at 64

# %% [markdown]
# Only the first half is. The second device got the next 64 of generator 1; the second half is
# generator 2's. **Predict:** with Dropout before LeNet's last layer, are two devices equal to one
# after ten steps? Are two runs on two devices, with the same seed?

# %% tags=["fold", "measured", "trains"]
# measure: how far weights are apart after ten steps, with Dropout and without it
def train_with_dropout(k, rate):
    layers = list(lenet())
    net = nn.HybridSequential()
    net.add(*layers[:-1], nn.Dropout(rate), layers[-1])
    net.cast("float64")
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=four[:k])
    net(nd.zeros((1, 1, 28, 28), dtype="float64"))  # all weights are drawn before the first mask
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    train_one_epoch(net, trainer, ten_batches, four[:k])
    return by_device(net)


one_device = train_with_dropout(1, rate=0.5)
two_devices = train_with_dropout(2, rate=0.5)
again = train_with_dropout(2, rate=0.5)
one_without = train_with_dropout(1, rate=0)
two_without = train_with_dropout(2, rate=0)
differences = {
    "Dropout, two runs on two devices": largest_difference(again, two_devices[0]),
    "Dropout, one device and two": largest_difference(two_devices, one_device[0]),
    "no Dropout, one device and two": largest_difference(two_without, one_without[0]),
}
print("largest difference of the weights")
for name, difference in differences.items():
    print(f"{name:33} {float(difference):.0e}")
assert largest_difference(again, two_devices[0]) == 0
assert largest_difference(two_devices, one_device[0]) > 1e-2
assert largest_difference(two_without, one_without[0]) < 1e-12
# Which generator a draw takes (kMinNumRandomPerThread in include/mxnet/random_generator.h, 1.9.1):
mx.random.seed(7)
first_again, second_again = draw_mask(64, pair[0]), draw_mask(64, pair[1])
assert np.array_equal(first_again, first_mask) and np.array_equal(second_again, second_mask)
assert set(first_mask) == {0, 2}
for n in [64, 4096]:  # numbers by two calls, and at once: which generator makes them
    mx.random.seed(7)
    first_half, second_half = draw_mask(n, pair[0]), draw_mask(n, pair[1])
    mx.random.seed(7)
    both_halves = draw_mask(2 * n, pair[0])
    assert np.array_equal(both_halves[:n], first_half), "the first half is the first mask"
    assert 0.3 < np.mean(both_halves[n:] == second_half) < 0.7, "alike as by chance"
    assert 0.3 < np.mean(first_half == second_half) < 0.7, "the devices' masks differ"
mx.random.seed(7)
parts = np.concatenate([draw_mask(32, pair[0]), draw_mask(32, pair[1])])
assert np.array_equal(parts, first_mask), "up to 64 numbers are the first generator's, in turn"
mx.random.seed(7)
draw_mask(128, pair[0])
assert np.array_equal(draw_mask(64, pair[1]), second_mask), "128 took 64 of the first generator"
mx.random.seed(7)
draw_mask(64, pair[0])
after_64 = draw_mask(128, pair[0])
assert np.array_equal(after_64[:64], second_mask), "64 took 64 of the first"
assert np.array_equal(after_64[64:], whole_mask[64:]), "and none of the second"

# %% [markdown]
# A run on two devices repeats itself, to the bit. Without Dropout two devices equal one up to
# rounding. **With Dropout they don't, and nothing is wrong.** So what can be compared?
#
# | question | compare | in float64 here |
# | --- | --- | --- |
# | is the loop right? | two devices and one, with `Dropout(0)` | equal to $10^{-12}$ |
# | is the loop right with masks? | their gradients, with the same masks | equal to $10^{-12}$ |
# | does a run repeat itself? | two runs, same seed, same k | equal to the bit |
#
# For the second row, multiply by masks drawn before, in place of the Dropout layer: two devices get
# one each, and one device gets both, joined.

# %% tags=["fold", "trains"]
# check: gradients of two devices with a mask each, and of one with both masks joined
def sums_of_gradients(devices, masks):
    """The gradients of 130 images with these masks before the last layer, added over devices."""
    net = start_in_float64(devices)
    body, last = net[:-1], net[-1]
    x, y = ten_batches[0]
    losses = []
    with autograd.record():
        x_shards = gluon.utils.split_and_load(x, devices)
        y_shards = gluon.utils.split_and_load(y, devices)
        for x_shard, y_shard, mask in zip(x_shards, y_shards, masks):
            mask = nd.array(mask, ctx=x_shard.context, dtype="float64")
            losses.append(cross_entropy(last(body(x_shard) * mask), y_shard))
    autograd.backward(losses)
    sums = []
    for parameter in net.collect_params().values():
        sums.append(sum(gradient.asnumpy() for gradient in parameter.list_grad()))
    return sums


mx.random.seed(7)
masks = [draw_mask((65, 128), pair[0]), draw_mask((65, 128), pair[1])]
joined = sums_of_gradients(pair[:1], [np.concatenate(masks)])
split = sums_of_gradients(pair, masks)
print("the gradients of one device and of two agree to 1e-12:",
      largest_difference(split, joined) < 1e-12)
assert largest_difference(split, joined) < 1e-12
swapped = sums_of_gradients(pair, masks[::-1])
assert largest_difference(swapped, joined) > 1e-2, "the wrong masks would not be noticed"
values = nd.random.uniform(shape=(65, 128))
mx.random.seed(7)
with autograd.train_mode():
    dropped = dropout(values)
assert np.array_equal(dropped.asnumpy(), values.asnumpy() * masks[0]), "Dropout is x times mask"

# %% [markdown]
# To repeat a run, also seed the loader: `DataLoader` takes its order from NumPy
# (`np.random.seed`), `Batches` from an argument, `seed`.

# %% tags=["fold"]
# check: which seed repeats the loader's order; that simulated devices share generators
def first_labels(batches):
    for x, y in batches:
        return y.asnumpy()


shuffled = DataLoader(ArrayDataset(np.arange(1000), np.arange(1000)), 100, shuffle=True)
orders = {}
for name, seed in [("mx", mx.random.seed), ("np", np.random.seed)]:
    seed(3)
    orders[name, 1] = first_labels(shuffled)
    seed(3)
    orders[name, 2] = first_labels(shuffled)
print("the loader's order, after mx.random.seed again:", (orders["mx", 1] == orders["mx", 2]).all())
print("the loader's order, after np.random.seed again:", (orders["np", 1] == orders["np", 2]).all())
assert not (orders["mx", 1] == orders["mx", 2]).all() and (orders["np", 1] == orders["np", 2]).all()
mx.random.seed(3)
mine = first_labels(Batches(np.arange(1000), np.arange(1000), 100, seed=5))
assert (mine == first_labels(Batches(np.arange(1000), np.arange(1000), 100, seed=5))).all()
assert (mine != first_labels(Batches(np.arange(1000), np.arange(1000), 100, seed=6))).any()

mx.random.seed(7)
assert np.array_equal(draw_mask(64, pair[1]), first_mask), "CPUs share generators: who is first"
assert np.array_equal(draw_mask(64, pair[0]), second_mask)
mx.random.seed(8)
mx.random.seed(7, ctx=pair[1])
seven = draw_mask(64, pair[0])
mx.random.seed(7, ctx=pair[0])
assert np.array_equal(draw_mask(64, pair[0]), seven), "seeding cpu(1) seeds cpu(0) as well"

# %% [markdown]
# ## Summary
#
# - The loss has a number for each image; `step` divides by what you tell it. Our loop and `fit`
#   tell it the actual size. Where the last batch is much smaller, tell it the nominal size, or drop
#   that batch (chapter 08).
# - That devices agree doesn't show that a loop is right. Compare with something independent.
# - Make or reset metrics and iterators in each epoch, and don't count padding.
# - With Dropout, k devices are not one. Compare without it, or with the same masks.
#
# What a larger batch does: deeper: Batch, rate and warm-up. Next, chapter 07: what `step` does.
#
# **Further reading.** MXNet 1.5.1's tutorial (`docs/tutorials/gluon/multi_gpu.md`); X. Glorot and
# Y. Bengio (2010), for Xavier's rule; N. Srivastava et al., *Dropout* (2014).

# %% [markdown]
# ## Exercises
#
# 1. **The tutorial's LeNet.** It has 6 and 16 channels in convolutions of 5×5 and 3×3, each with
#    relu and max pooling, and dense layers of 120, 84 and 10. Count its parameters. Train it from
#    three seeds, two epochs of 3,200 images, batch 128, at the tutorial's rate 0.04 and at 0.3.
# 2. **The mean of unequal shards.** Five images on two devices, the loss taken as the mean over
#    each shard, and `step(2)`. Which images count too much?
# 3. **One mask for all.** Before each forward pass, each device gets the same seed, the number of
#    the step, by `mx.random.seed(step, ctx=device)`. Is the gradient right on average? What is
#    lost? And what if the seed were 7 in every step?

# %% [markdown]
# ### Answer 1
#
# A convolution has a weight for each input channel and pixel of its kernel, and a bias, for each
# channel that comes out. The images have 28, 24, 12, 10 and 5 pixels a side on their way.

# %% tags=["solution", "trains"]
def lenet_tutorial():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(6, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(16, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(120, activation="relu"), nn.Dense(84, activation="relu"), nn.Dense(10))
    return net


net = lenet_tutorial()
net.initialize()
net(nd.zeros((1, 1, 28, 28)))
count = sum(parameter.data().size for parameter in net.collect_params().values())
convolutions = 6 * (25 + 1) + 16 * (6 * 9 + 1)
dense = 120 * (16 * 25 + 1) + 84 * (120 + 1) + 10 * (84 + 1)
assert count == convolutions + dense
print(f"{count:,} parameters; our LeNet has 129,068")
assert sum(array.size for array in by_device(plain)[0]) == 129_068

# %% tags=["solution", "measured", "trains"]
some = Batches(data.train_images[:3200], labels[:3200], 128)
for rate in [0.04, 0.3]:
    for seed in [0, 1, 2]:
        mx.random.seed(seed)
        net = lenet_tutorial()
        net.initialize(mx.init.Xavier(), ctx=two)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
        history = fit(net, trainer, some, two, epochs=2, test=test_batches, progress=False)
        first, second = history.test_accuracy
        print(f"rate {rate}, seed {seed}: {first:.3f} after one epoch, {second:.3f} after two")

# %% [markdown]
# In our run 0.3 ends ahead for two seeds, and behind for the third, which still guesses after its
# first epoch. Three seeds don't answer the question.

# %% [markdown]
# ### Answer 2
#
# The shards have 3 and 2 images. Each mean has the weight ½, so an image of the shorter shard
# counts ¼ and one of the longer ⅙, where ⅕ would be right.

# %% tags=["solution", "trains"]
shards = gluon.utils.split_and_load(nd.zeros((5, 2)), pair, even_split=False)
longer = max(len(shard) for shard in shards)
shorter = min(len(shard) for shard in shards)
assert [longer, shorter] == [3, 2]
unequal = [[[60, 0]] * longer, [[0, 60]] * shorter]
step = weights_after_step(unequal, 2, mean=True)
print("three images of (60, 0) and two of (0, 60):", step, "in place of [-36. -24.]")
assert_weights(step, [-30, -30])  # half for each shard, whoever is in it
assert_weights(weights_after_step(unequal, 5), [-36, -24])  # right: the mean of five

# %% [markdown]
# ### Answer 3
#
# On average it is right: each entry of a mask is 0 or 2, mean 1, whoever shares it. But the noise
# of the masks averages out less. With k masks that are drawn apart, the variance of their
# mean is a k-th of one mask's. With k equal ones it stays that of one.
#
# With 7 in every step all steps have one and the same mask: each of its entries is 0 always, or 2
# always. So over the steps that isn't right on average either.

# %% tags=["solution"]
def mean_of_two_masks(same):
    masks = []
    mx.random.seed(7)
    for device in pair:
        if same:
            mx.random.seed(7, ctx=device)
        masks.append(draw_mask(100_000, device))
    return (masks[0] + masks[1]) / 2


for same in [False, True]:
    mean = mean_of_two_masks(same)
    print(f"same masks: {same!s:5}  mean {mean.mean():.2f}, variance {mean.var():.2f}")
    assert abs(mean.mean() - 1) < 0.02, "right on average"
    assert abs(mean.var() - (1 if same else 0.5)) < 0.02, "half the variance, if drawn apart"

masks = []
for step in range(3):
    mx.random.seed(7, ctx=pair[0])
    masks.append(draw_mask(8, pair[0]))
print("seed 7 in each step:", *masks)
assert np.array_equal(masks[0], masks[1]) and np.array_equal(masks[0], masks[2])
