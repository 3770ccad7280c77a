# %% [markdown]
# # 06 · Training LeNet with Trainer
#
# Chapter 05 put a Gluon network on several devices and made single steps with it. This one trains
# it: images arrive batch by batch from a loader, a metric counts what is right, the last batch of
# an epoch doesn't divide, and somebody presses the stop button in the middle. Everything that a
# real training script has, on one device and on two.
#
# ## What you'll do
#
# Build the input pipeline and the training loop of MXNet's own tutorial piece by piece, find the
# places where such loops go wrong in silence, then train LeNet on one device and on two, with
# batch size and learning rate changed one at a time.
#
# ## What you'll learn
#
# - `DataLoader`, `ToTensor`, `transform_first` and `NDArrayIter`, and what share of an epoch each
#   takes;
# - why `Trainer.step` wants the batch size, and which one for the last batch;
# - three silent faults: an idle device's old gradient, a loss reduced twice, rows counted twice;
# - what a metric costs, and what a training loop needs to be stopped safely;
# - what more devices, a larger batch and a larger rate each do.
#
# ## What you need
#
# Chapters 02, 04 and 05. No GPU. Reading takes {reading time}, running about a minute and a half
# with MNIST, half of it in one cell that says so.

# %%
import time

from helpers import devices, load_data

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# Two devices to be fast on: GPUs, if there are two. For being *right* we name simulated ones.

# %% tags=["measured"]
two = devices(2)
data = load_data("mnist")
print(data)

# %% [markdown]
# ## The input pipeline
#
# Image files hold bytes: height × width × channel, 0 to 255. Networks want channel × height ×
# width, as small floating-point numbers. Our data set comes ready made, so we turn it back into
# bytes first, to have something to load as you would load your own. (Gluon has
# `gluon.data.vision.MNIST` for this one data set. It downloads by itself where it doesn't find the
# very files that it knows, so we don't use it.)

# %%
def as_bytes(images):  # [n, 1, 28, 28] floats -> [n, 28, 28, 1] bytes
    return nd.array((images * 255).round().transpose(0, 2, 3, 1), dtype="uint8")


pictures, labels = as_bytes(data.train_images), data.train_labels.astype("int32")
assert pictures.shape[1:] == (28, 28, 1) and pictures.dtype == np.uint8

# %% [markdown]
# A *dataset* gives one example at a time. `transform_first` applies a function to the image and
# leaves the label alone; `ToTensor` is the function that does all of the above.

# %%
from mxnet.gluon.data import ArrayDataset, DataLoader
from mxnet.gluon.data.vision import transforms

dataset = ArrayDataset(pictures, labels).transform_first(transforms.ToTensor())
image, label = dataset[0]
print(image.shape, image.dtype)

# %% [markdown]
# **Predict:** what exactly does `ToTensor` do to a byte? We ask NumPy.

# %%
raw = pictures[0].asnumpy()
assert (image.asnumpy() == raw.transpose(2, 0, 1).astype("float32") / np.float32(255)).all()
assert label == labels[0], "transform_first leaves the label alone"
print("channel first, divided by 255, to the bit")

# %% [markdown]
# A `DataLoader` draws examples in a new random order each epoch and stacks them to batches. Its
# last batch has what is left over. **Predict:** how large is that for 60,000 images in batches of
# 128?

# %%
loader = DataLoader(dataset, batch_size=128, shuffle=True)
print(60_000 // 128, "batches and", 60_000 % 128, "images")

# %% [markdown]
# The loader can drop that rest (`last_batch="discard"`) or keep it for the next epoch
# (`"rollover"`). By default it keeps it, and so shall we: it is data like any other.
#
# `num_workers=2` starts two more processes that prepare batches ahead. They are copies of this
# one, made by `fork`. That pays off where an example is expensive to prepare, such as a JPEG
# to decode, and cores are free. Here examples are cheap and every core is a device. We'll measure
# it below.
#
# ## Two LeNets
#
# `lenet` has the sizes of *The Straight Dope*, and `lenet_tutorial` those of MXNet's tutorial,
# which are closer to LeCun's of 1998.

# %%
def lenet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


# %% [markdown]
# The other one has fewer channels and one layer more. `HybridSequential` behaves as `Sequential`
# does, and can be compiled; chapter 08 makes use of that.

# %%
def lenet_tutorial():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(6, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(16, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(120, activation="relu"), nn.Dense(84, activation="relu"), nn.Dense(10))
    return net


# %% [markdown]
# Parameters start from Xavier's rule: uniform numbers whose spread is set by how many numbers go
# into a layer and come out of it (Glorot and Bengio, 2010). A first forward pass makes them.

# %%
def start(network, places, seed=0, dtype="float32"):
    net = network()
    net.cast(dtype)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(nd.zeros((1, 1, 28, 28), ctx=places[0], dtype=dtype))
    return net


# %% [markdown]
# **Predict** which of the two is larger.

# %%
for network in (lenet, lenet_tutorial):
    sizes = [p.data().size for p in start(network, [mx.cpu()]).collect_params().values()]
    print(f"{network.__name__}: {sum(sizes):,} parameters")

# %% [markdown]
# ## A training step
#
# Split, forward and loss inside `record`, backward, step: as in chapter 05. `even_split=False` lets
# Gluon's `split_and_load` cut a batch that doesn't divide, into shards that differ by one image, as
# yours does.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
split = gluon.utils.split_and_load


def forward_backward(net, x, y, places):
    xs, ys = (split(a, places, even_split=False) for a in (x, y))
    with autograd.record():
        outputs = [net(shard) for shard in xs]
        losses = [softmax(out, shard) for out, shard in zip(outputs, ys)]
    autograd.backward(losses)
    return outputs, ys, losses


# %% [markdown]
# `autograd.backward(losses)` starts all of them with one call; a loop of `loss.backward()` does the
# same. Then comes the step. The Trainer sums the gradients over devices and divides by the number
# that it is given.

# %% tags=["trains"]
def train_batch(net, trainer, x, y, places):
    outputs, ys, losses = forward_backward(net, x, y, places)
    trainer.step(len(x))
    return outputs, ys, losses


# %% [markdown]
# Something to try it on:

# %%
pair, four = [mx.cpu(r) for r in range(2)], [mx.cpu(r) for r in range(4)]
x, y = nd.array(data.train_images[:640]), nd.array(data.train_labels[:640])

# %% [markdown]
# One batch on two devices. **Predict:** what shape has a loss?

# %%
net = start(lenet, pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
outputs, ys, losses = train_batch(net, trainer, x[:128], y[:128], pair)
print([loss.shape for loss in losses])

# %% [markdown]
# One number for each image, and no mean. `backward` of such an array is that of its sum. That is
# why the batch size has to go into `step`: nobody has divided yet.
#
# ## Three ways to go wrong in silence
#
# To see what a step does we use the smallest model there is, two weights $w$, with output
# $w \cdot x$ as the loss. The gradient of an image is then the image itself, and a step at rate 1
# is minus the sum of the images, divided by what we say.

# %%
def tiny(places, **options):
    net = nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.Zero(), ctx=places)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, **options)


# %% [markdown]
# A list of images for each device, and nothing done to the losses unless we say so:

# %%
def backward(net, rows, reduce=lambda loss: loss):
    with autograd.record():
        losses = [reduce(net(nd.array(r, ctx=d))) for r, d in zip(rows, net.weight.list_ctx())]
    autograd.backward(losses)


# %% [markdown]
# All replicas at once, as plain lists, and as one where they agree:

# %%
def weights(net):
    found = [w.asnumpy().ravel().tolist() for w in net.weight.list_data()]
    return found[0] if all(w == found[0] for w in found) else found


# %% [markdown]
# Four images on two devices. **Predict** the weights after a step.

# %% tags=["trains"]
net, trainer = tiny(pair)
backward(net, ([[2, 0], [4, 0]], [[0, 2], [0, 8]]))
trainer.step(4)
assert weights(net) == [-1.5, -2.5], "minus the mean of four images"

# %% [markdown]
# ### 1. A loss reduced twice
#
# It is natural to take the mean of a loss. **Predict** the weights if each device does so, with
# everything else as it was.

# %% tags=["trains"]
net, trainer = tiny(pair)
backward(net, ([[2, 0], [4, 0]], [[0, 2], [0, 8]]), reduce=lambda loss: loss.mean())
trainer.step(4)
print(weights(net))

# %% [markdown]
# Half as long: divided by the size of the shard, and by the size of the batch again. With 64 images
# on each of two devices the step is 64 times too short, and training looks merely slow. Either
# leave the loss alone and tell `step` the batch size, or take means and tell it the number of
# devices. The second is right for equal shards only.

# %% tags=["trains"]
net, trainer = tiny(pair)
backward(net, ([[2, 0], [4, 0]], [[0, 2], [0, 8]]), reduce=lambda loss: loss.mean())
trainer.step(2)
assert weights(net) == [-1.5, -2.5], "the mean of two means, of shards of two"

# %% [markdown]
# ### 2. The size of the last batch
#
# `step(batch_size)` is what most listings have, with the *nominal* size, 128. The last batch of an
# epoch has 96. **Predict:** by which factor is that step off?
#
# The real network answers, in float64: a step from the same weights with either size.

# %% tags=["trains"]
x64 = nd.array(data.train_images[:640], dtype="float64")


def moved(size):
    net = start(lenet, pair, dtype="float64")
    before = net[0].weight.data(pair[1]).asnumpy()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    forward_backward(net, x64[:96], y[:96], pair)
    trainer.step(size)
    return net[0].weight.data(pair[1]).asnumpy() - before


assert np.allclose(moved(128), 96 / 128 * moved(96), rtol=1e-12), "shorter by 96/128"
print(f"the last step is {96 / 128:.0%} of its length")

# %% [markdown]
# Once an epoch the images of the last batch count for less. It is harmless for MNIST, and wrong all
# the same. `step(len(x))` costs nothing.
#
# Splitting it is the other matter. Without `even_split=False` Gluon refuses what doesn't divide, so
# at least nothing is lost:

# %%
try:
    split(x[:97], pair)
except ValueError as error:
    print(str(error).split(". ")[0])

# %% [markdown]
# ### 3. A device with nothing to do
#
# And if the last batch has *fewer images than there are devices*? Gluon's function fails then, with
# an error that speaks of `_copyto`. A loop that just leaves the last device out runs, and here is
# what it does. Step one: an image for each device. Step two: one image, for device 0 only.
#
# **Predict** the weights after step two, at rate 1.

# %% tags=["trains"]
net, trainer = tiny(pair)
backward(net, ([[1, 0]], [[0, 1]]))
trainer.step(2)
first = weights(net)
backward(net, ([[1, 0]],))
trainer.step(1)
print("after one step", first, " after two", weights(net))

# %% [markdown]
# Right would be $(-1.5, -0.5)$. Device 1 still had its gradient of step *one*, $(0, 1)$, and it was
# added again, as in chapter 05. No error, no warning: with the update in the store (chapter 07),
# MXNet never marks a gradient as used.
#
# With `update_on_kvstore=False` it does. **Predict:** what happens now, without and with
# `ignore_stale_grad=True`?

# %% tags=["trains"]
for ignore in (False, True):
    net, trainer = tiny(pair, update_on_kvstore=False)
    backward(net, ([[1, 0]], [[0, 1]]))
    trainer.step(2)
    backward(net, ([[1, 0]],))
    try:
        trainer.step(1, ignore_stale_grad=ignore)
    except UserWarning as error:
        print("UserWarning:", str(error).split(". ")[0].replace(net.weight.name, "w"))
    print(f"ignore_stale_grad={ignore}: {weights(net)}")

# %% [markdown]
# Without it, an error before anything was changed: good. With it the first device is updated and
# the second is not, so the replicas have *parted*, and what was added up still had the old
# gradient in it (its sum, even). So `ignore_stale_grad=True` is there for networks of which a part
# is unused in a step. To need it for a plain network is a sign that a device was left out.
#
# What is right? The idle device takes part with a gradient of zero:

# %% tags=["trains"]
net, trainer = tiny(pair)
backward(net, ([[1, 0]], [[0, 1]]))
trainer.step(2)
backward(net, ([[1, 0]],))
net.weight.grad(pair[1])[:] = 0
trainer.step(1)
assert weights(net) == [-1.5, -0.5], "the one image, and nothing else"

# %% [markdown]
# ## The same weights on 1, 2 and 4 devices
#
# Now all of it together. Batches of 130 images leave a last one of 120, which 4 devices split
# evenly; and 130 they don't. Ten steps in float64, the loss falling, any number of devices:

# %% tags=["trains"]
def ten_steps(k):
    net, seen = start(lenet, four[:k], dtype="float64"), []
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
    for _ in range(2):
        for first in range(0, 640, 130):
            x, y = x64[first : first + 130], nd.array(data.train_labels[:640])[first : first + 130]
            losses = train_batch(net, trainer, x, y, four[:k])[2]
            seen.append(np.concatenate([loss.asnumpy() for loss in losses]).mean())
    return net, seen


# %% [markdown]
# **Predict** how far apart they are.

# %% tags=["trains"]
reference, seen = ten_steps(1)
assert np.mean(seen[-3:]) < 0.95 * np.mean(seen[:3]), "compare only while the loss falls"
for k in (2, 4):
    net, _ = ten_steps(k)
    for p, q in zip(net.collect_params().values(), reference.collect_params().values()):
        truth = q.data().asnumpy()
        far = np.max([np.abs(a.asnumpy() - truth) for a in p.list_data()])
        assert far <= 1e-12 * np.abs(truth).max(), f"{p.name}, {k} devices: {far}"
print("1, 2 and 4 devices: the same to 1e-12 of each parameter's largest weight")

# %% [markdown]
# ## Counting what is right
#
# `metric.Accuracy` keeps two counts: right answers and all. `update` takes lists, one entry a
# device; `get` divides. **Predict:** three of four right, then none of four. And after `reset`?

# %%
metric = mx.metric.Accuracy()
sure = nd.array([[0, 1], [0, 1], [0, 1], [0, 1]])  # the answer is always class 1
metric.update([nd.array([1, 1, 1, 0])], [sure])
print(metric.get())

# %% [markdown]
# Four more, none of them right, and then the reset:

# %%
metric.update([nd.array([0, 0, 0, 0])], [sure])
print(metric.get())
metric.reset()
print(metric.get())

# %% [markdown]
# Without a `reset` at each epoch's start the second epoch's accuracy is the mean of both, and the
# curve lags behind. And what it counts on training batches is *not* what the network can do at the
# epoch's end: the weights were changing all the while, and these images were trained on.
# Validation accuracy is measured afterwards, on others, and all devices can share in it:

# %%
def valid_batch(net, metric, x, y, places):
    xs, ys = (split(a, places, even_split=False) for a in (x, y))
    metric.update(ys, [net(shard) for shard in xs])


# %% [markdown]
# NumPy must count the same.

# %%
metric.reset()
valid_batch(reference, metric, x64[:100], y[:100], four[:1])
share = (reference(x64[:100]).asnumpy().argmax(1) == y[:100].asnumpy()).mean()
assert metric.get() == ("accuracy", share), "NumPy counts the same"

# %% [markdown]
# ### What a metric costs
#
# To count, `update` needs the network's answers, so it *waits* for the devices (chapter 01). In the
# tutorial's loop it stands between `backward` and `step`. Meanwhile Python can't hand out new work.
# We time three loops in turn: without a metric, with it before `step`, and before `backward`.

# %% tags=["trains"]
def loop(where, steps=8):
    for _ in range(steps):
        xs, ys = split(x[:128], two), split(y[:128], two)
        with autograd.record():
            outputs = [net(shard) for shard in xs]
            losses = [softmax(out, shard) for out, shard in zip(outputs, ys)]
        if where == "before backward":
            metric.update(ys, outputs)
        autograd.backward(losses)
        if where == "before step":
            metric.update(ys, outputs)
        trainer.step(128)
    nd.waitall()


# %% [markdown]
# **Predict** which of them is slower than the first, and why.

# %% tags=["measured"]
net = start(lenet, two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
places = ("nowhere", "before step", "before backward")
times = {where: [] for where in places}
for _ in range(6):
    for where in places:
        begin = time.perf_counter()
        loop(where)
        times[where].append(time.perf_counter() - begin)
for where in places:
    ratio = np.median(np.divide(times[where][1:], times["nowhere"][1:]))
    print(f"metric {where}: {ratio:.2f} times as long")

# %% [markdown]
# Before `step` it waits for the forward pass while the backward pass is already queued behind it,
# so the devices have something to do meanwhile. Before `backward` they stand still until Python has
# counted. How much of that is to be seen depends on how long a step is beside the counting: if all
# three are about 1 on your machine, there is nothing to gain. On fast devices there may be.
#
# ## The loop, and what a long one needs
#
# An epoch with all of it:

# %%
def epoch(net, trainer, batches, places):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        outputs, ys, _ = train_batch(net, trainer, x, y, places)
        metric.update(ys, outputs)
    return metric.get()[1]


# %% [markdown]
# That is enough to train. From here on chapters use `helpers.training.fit`, which is this loop and
#
# - a progress bar, and a `History` of losses, accuracies and images/s;
# - **an idle device's gradients set to zero**, as above;
# - a look at each loss *two steps late or more*. Not at once, for that would be waiting; and not
#   never, for then Python runs ahead and fills the queue with minutes of work. It lets at most 32
#   steps or about a second of work pile up, then reads losses until two steps are left. A loss that
#   is not a number stops the run and names the step (chapter 04);
# - **an interrupt** waits for the end of the step that Python is in, then for the devices;
# - replicas compared at the end of each epoch.
#
# First: is it the same training? Two epochs of each, in float64. `Batches` is a loader for data in
# memory: a new order each epoch, the same in every run, or here none.

# %%
from helpers.training import Batches, assert_same_parameters, fit

batches = Batches(x64, y, 130, shuffle=False)


def double(places):
    net = start(lenet, places, dtype="float64")
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})


net, trainer = double(pair)
ours = [epoch(net, trainer, batches, pair) for _ in range(2)]

# %% [markdown]
# `fit` on four devices against that on two, and against `ten_steps` on one, which took the same
# batches. **Predict:** are losses, accuracies and weights equal?

# %% tags=["trains"]
net, trainer = double(four)
history = fit(net, trainer, batches, four, epochs=2, progress=False)
assert history.train_accuracy == ours, "it counts what the metric counts"
assert np.allclose(history.losses, seen, rtol=1e-10), "the losses of the loop on one device"
for p, q in zip(net.collect_params().values(), reference.collect_params().values()):
    truth = q.data().asnumpy()
    far = np.max([np.abs(a.asnumpy() - truth) for a in p.list_data()])
    assert far <= 1e-12 * np.abs(truth).max(), "and the same weights"

# %% [markdown]
# Now batches of 3, 3 and 1 images for two devices, so that in the last step one has nothing to do.
# **Predict:** equal to one device?

# %% tags=["trains"]
def seven_images(places):
    net, trainer = double(places)
    fit(net, trainer, Batches(x64[:7], y[:7], 3, shuffle=False), places, progress=False)
    return net[0].weight.data(places[-1]).asnumpy()


assert np.allclose(seven_images(pair), seven_images(pair[:1]), rtol=0, atol=1e-14)
print("the last image was trained on once, and nothing else")

# %% [markdown]
# Chapter 04 spoilt one pixel, and its loop stopped at that very step, since the loss was no number.
# The same here, in one of 640 images. **Predict:** will the loss tell us again?

# %%
spoilt = x.copy()
spoilt[300, 0, 14, 14] = np.nan
net = start(lenet, pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})

# %% [markdown]
# An epoch of ten steps, one of which has the spoilt image:

# %% tags=["trains"]
try:
    fit(net, trainer, Batches(spoilt, y, 64), pair, progress=False)
except FloatingPointError as error:
    print(str(error).replace(net[0].name, "conv0"))

# %% [markdown]
# It doesn't. Chapter 04 wrote `nd.relu`; Gluon's layers use `nd.Activation`, and that is another
# piece of code:

# %%
no_number = nd.array([np.nan, 3])
print(nd.relu(no_number).asnumpy(), nd.Activation(no_number, act_type="relu").asnumpy())

# %% [markdown]
# It makes 0 of a NaN (as max pooling does too, on CPUs). So the forward pass looks healthy, while
# the gradient of the first layer, which multiplies by the image, is NaN. From then on that layer
# is dead, and the loss is a number all the same. That is why `fit` looks at the weights too, at
# each epoch's end.

# %% [markdown]
# ### Stop
#
# In JupyterLab you stop a cell with the square button, which sends the kernel the same signal as
# Ctrl-C. Python raises `KeyboardInterrupt` wherever it happens to be: perhaps with the gradient of
# the first device computed and the second not, or with half of the parameters updated. `fit` holds
# the signal back until the step is whole. We let a timer press the button in the middle of an
# endless training. **Predict:** are the replicas equal, and how many steps have been done?

# %%
import os
import signal
import threading

net = start(lenet, pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})

# %% [markdown]
# A million epochs, and the button after a second:

# %% tags=["trains"]
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    fit(net, trainer, Batches(x, y, 64), pair, epochs=10**6, progress=False)
except KeyboardInterrupt:
    print("stopped")
assert_same_parameters(net)

# %% [markdown]
# Equal, on both devices, to the bit. How many steps depends on your machine, and it makes no
# difference: all of them are whole. So you can look at the network now, save it, or just run the
# cell again and train on:

# %% tags=["trains"]
history = fit(net, trainer, Batches(x, y, 64), pair, epochs=2, progress=False)
assert np.isfinite(history.losses).all() and len(history.losses) == 20

# %% [markdown]
# Worker processes of a `DataLoader` get the signal too, since it goes to the whole process group.
# Here nothing waits for them for good: the interrupt ends the loop, and with the loader they go.
#
# ## NDArrayIter, and rows that count twice
#
# Before there was Gluon, MXNet had *iterators*, and you'll meet them in older code such as *The
# Straight Dope*'s. `NDArrayIter` slices arrays in memory. It does not shuffle unless asked, has to
# be `reset` before each further epoch, and fills its last batch up with rows from the beginning.
# **Predict** the rows of the three batches, and what a second loop over it gives.

# %%
numbers = np.arange(10, dtype="float32").reshape(10, 1)
ten = mx.io.NDArrayIter(numbers, np.arange(10), batch_size=4)
for batch in ten:
    print(batch.data[0].asnumpy().ravel().astype(int).tolist(), "pad", batch.pad)

# %% [markdown]
# And the second loop:

# %%
print("second time:", len(list(ten)), "batches")
ten.reset()
print("after reset:", len(list(ten)), "batches")

# %% [markdown]
# A loop that forgets `reset` trains one epoch and then counts empty ones, at great speed. And a
# loop that ignores `pad` counts rows twice. *The Straight Dope*'s accuracies are of this kind, over
# 10,048 rows for 10,000 test images in batches of 64, and training uses 32 images twice an epoch:

# %%
for images in (10_000, 60_000):
    rows = -(-images // 64) * 64
    print(f"{images:,} images in batches of 64: {rows:,} rows, {rows - images} of them twice")

# %% [markdown]
# **Predict:** is the padded accuracy too high or too low? It depends on which rows come first. With
# a made-up case, ten images of which only the first two are recognised, in batches of four:

# %%
right = np.array([1, 1] + [0] * 8)
ten.reset()
rows = np.concatenate([right[batch.data[0].asnumpy().ravel().astype(int)] for batch in ten])

# %% [markdown]
# The true count leaves the last `pad` rows of a batch out.

# %%
ten.reset()
kept = np.concatenate([right[b.data[0].asnumpy().ravel().astype(int)][: 4 - b.pad] for b in ten])
print(f"padded {rows.sum()}/{len(rows)} = {rows.mean():.3f}, true {kept.mean():.3f}")

# %% [markdown]
# ## How fast is a pipeline?
#
# Training needs so many images a second. Can the loader deliver? Each of five on 4,000 images, and
# without any training; those with workers twice, since they start slowly the first time.

# %%
def from_iter(iterator):
    iterator.reset()
    return ((batch.data[0], batch.label[0]) for batch in iterator)


def rate(batches):
    nd.waitall()
    begin, count = time.perf_counter(), 0
    for x, _ in batches:
        count += len(x)
    nd.waitall()
    return count / (time.perf_counter() - begin)  # images/s


# %% [markdown]
# And training itself, on batches that are there already, on two devices.

# %% tags=["measured", "trains"]
few = ArrayDataset(pictures[:4000], labels[:4000]).transform_first(transforms.ToTensor())
images = data.train_images[:4000], data.train_labels[:4000]
iterator = mx.io.NDArrayIter(*images, 128, shuffle=True)
loaders = {f"DataLoader, {name}": DataLoader(few, 128, shuffle=True, **options)
           for name, options in {"no workers": {}, "2 processes": {"num_workers": 2},
                                 "2 threads": {"num_workers": 2, "thread_pool": True}}.items()}
rates = {name: max(rate(loader) for _ in range(2)) for name, loader in loaders.items()}
rates["NDArrayIter"] = max(rate(from_iter(iterator)) for _ in range(2))
rates["helpers' Batches"] = max(rate(Batches(*images, 128)) for _ in range(2))
net = start(lenet, two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
ready = list(Batches(*images, 128))
need = fit(net, trainer, ready, two, progress=False).rate[0]

# %% [markdown]
# **Predict:** which share of an epoch goes into each pipeline, if it and the training have to share
# the same cores?

# %% tags=["measured"]
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

slowest = min(rates, key=rates.get)
share = need / (need + rates[slowest])
fig, ax = figure(f"The slowest pipeline would take {share:.0%} of an epoch", "images per second")
ax.barh(list(rates), list(rates.values()), color=BLUE)
ax.axvline(need, color=ORANGE, lw=2, ls="--", label=f"training on two devices: {need:,.0f}")
for row, value in enumerate(rates.values()):
    ax.text(value, row, f" {value:,.0f}", va="center", fontsize=9)
ax.set(xscale="log", xlim=(need / 2, 8 * max(rates.values())))
ax.invert_yaxis()
ax.legend(fontsize=8, loc="upper right")
show(fig, alt="Bars of images per second for five pipelines, on a logarithmic axis, and a dashed "
     "line for what training on two devices needs.")

# %% [markdown]
# A pipeline that delivers ten times what training needs takes about a tenth of the time if it
# shares cores with it. On GPUs need grows by a factor of a hundred, and the same pipeline becomes
# the bottleneck: then processes, or a faster format, are worth their trouble. For data that fits
# into memory, slicing an array is hard to beat.
#
# ## More devices, larger batches, larger rates
#
# *The Straight Dope* trains (1 device, batch 64, rate 0.3) and then (2, 128, 0.6), and the second
# learns more slowly at first. Three things were changed at once. One at a time, then:
#
# 1. two devices instead of one, nothing else;
# 2. and the batch doubled;
# 3. and the rate doubled as well.
#
# 15,360 images each, or about as many from a smaller set. This cell takes **about half a minute
# with MNIST** on slow cores.

# %% tags=["measured", "trains"]
settings = [(1, 64, 0.3), (2, 64, 0.3), (2, 128, 0.3), (2, 128, 0.6)]
size = min(15_360, len(labels) // 128 * 128)
test = Batches(data.test_images[:2000], data.test_labels[:2000], 500, shuffle=False)
runs = {}
for k, batch, lr in settings:
    net = start(lenet, two[:k])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    stream = Batches(data.train_images[:size], data.train_labels[:size], batch)
    runs[k, batch, lr] = fit(net, trainer, stream, two[:k], epochs=15_360 // size, test=test)
    print((k, batch, lr), f"training {runs[k, batch, lr].train_accuracy[-1]:.3f},",
          f"test {runs[k, batch, lr].test_accuracy[-1]:.3f} ({data.name})")

# %% [markdown]
# What should hold on any data: two devices at the same batch learn as one does, since it is the
# same training.

# %%
one, both = (runs[k, 64, 0.3].test_accuracy[-1] for k in (1, 2))
assert min(one, both) > 0.75, f"{one}, {both}: they should have learned by now"
assert abs(one - both) < 0.05, f"{one}, {both}: the same training in other last digits"

# %% [markdown]
# **Predict** before you look: for the same number of images seen, does a batch of 128 at the same
# rate have a higher loss than one of 64, or a lower one? And with the rate doubled?

# %% tags=["measured"]
def smooth(setting, width=1280):
    losses = np.array(runs[setting].losses)
    per = width // setting[1]
    return losses[: len(losses) // per * per].reshape(-1, per).mean(axis=1)


best = min(settings, key=lambda setting: smooth(setting)[-3:].mean())
fig, ax = figure("Lowest at the end: k = {}, batch {}, rate {}".format(*best),
                 "images seen", f"loss, mean of 1,280 images ({data.name})")
looks = ((GREY, "-", 5), (BLUE, "-", 1.5), (ORANGE, "--", 2), (GREEN, ":", 2))
for setting, (color, style, width) in zip(settings, looks):
    ax.plot(1280 * np.arange(1, len(smooth(setting)) + 1), smooth(setting), style, color=color,
            lw=width, label="k = {}, batch {}, rate {}".format(*setting))
ax.legend(fontsize=8)
show(fig, alt="Loss against images seen for four settings; the curves of one and two devices at "
     "batch 64 lie close together.")

# %% [markdown]
# The grey and the blue curve are the same training; where they differ, float32 has rounded
# differently (chapter 04). Between blue and orange only the batch has changed: half as many steps
# of the same length. Between orange and green only the rate. So whatever a page reports of "two
# GPUs" that learn more slowly than one, look at the batch and the rate first.
#
# These are first thousands of images. `make reproduce` trains the published settings at full
# length, several times from different seeds, and puts the published accuracies beside ours.
#
# *Warm-up*, a rate that rises step by step to its value, is an option of the optimizer:

# %%
def warm_up(rate, steps):
    return mx.lr_scheduler.FactorScheduler(step=10**9, base_lr=rate, warmup_steps=steps)

# %% [markdown]
# ## How much faster?
#
# As in chapter 04: the same batch on one and on two devices in turn, waited for, rounds with other
# programs' work discarded, medians.

# %% tags=["trains"]
from helpers.timing import Others

trainings = []
for k in (1, 2):
    net = start(lenet, two[:k])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    trainings.append((net, trainer, list(Batches(x, y, 256))[:2] * 4, two[:k]))
    fit(*trainings[-1], progress=False)

# %% [markdown]
# **Predict** the ratio. It takes about ten seconds.

# %% tags=["measured", "trains"]
kept, discarded = [], []
while len(kept) < 5 and len(discarded) < 5:
    with Others() as others:
        row = [fit(*training, progress=False).rate[0] for training in trainings]
    (kept if others.share <= 0.02 else discarded).append(row)
rounds = np.array(kept if len(kept) > 2 else kept + discarded)
ratios = rounds[:, 1] / rounds[:, 0]
print(f"rounds kept {len(kept)}, discarded {len(discarded)}; batch 256")
print("images/s, median: 1 device {:,.0f}, 2 devices {:,.0f}".format(*np.median(rounds, axis=0)))
print(f"speed-up {np.median(ratios):.2f}, from {ratios.min():.2f} to {ratios.max():.2f}")

# %% [markdown]
# If that is well below what chapter 04 found on your machine, another program has a core, or
# `mxnet` was imported before `helpers`.

# %% [markdown]
# ## Summary
#
# - A dataset gives examples, a transform prepares them, a loader stacks them. Measure it: a
#   pipeline is good enough when training needs far less than it delivers.
# - The loss has one number an image; `step` divides, by the size that the batch *has*.
# - A device left out of a step adds its old gradient again. Zero it, or never leave it out. A plain
#   network that needs `ignore_stale_grad` has a bug.
# - `reset` metrics and iterators at each epoch, and don't count padding.
# - `helpers.training.fit` is this chapter's loop, made safe to stop.
# - In float64, 1, 2 and 4 devices train the same network to $10^{-12}$. Differences between
#   "devices" come from batch and rate.
#
# Next, chapter 07: what `step` does between the gradients and the weights, and where.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*; *The Straight
# Dope*, "Training on multiple GPUs with gluon"; X. Glorot and Y. Bengio, *Understanding the
# difficulty of training deep feedforward neural networks* (2010); P. Goyal et al., *Accurate,
# large minibatch SGD* (2017), arXiv:1706.02677.

# %% [markdown]
# ## Exercises
#
# 1. **The lagging metric.** Three epochs with the true accuracies 0.5, 0.7 and 0.9, on as many
#    images each. What does a loop print that never calls `reset`?
# 2. **Discard.** With `last_batch="discard"` and 60,000 images in batches of 512 on 8 devices, how
#    many images does an epoch leave out? Is any image left out for good?
# 3. **The mean of three shards.** Five images on two devices, the loss taken as the mean over each
#    shard, and `step(2)`. By how much is the update of `tiny` off, and for which images?

# %% [markdown]
# ### Answer 1
#
# The mean over all epochs so far.

# %% tags=["solution"]
metric, printed = mx.metric.Accuracy(), []
for right in (5, 7, 9):
    answers = nd.array([[0, 1]] * right + [[1, 0]] * (10 - right))
    metric.update([nd.ones(10)], [answers])
    printed.append(round(metric.get()[1], 3))
assert printed == [0.5, 0.6, 0.7], "instead of 0.5, 0.7, 0.9"

# %% [markdown]
# ### Answer 2
#
# 96 of them, whatever the number of devices. With `shuffle=True` they are others in
# each epoch, so none is left out for good. Without, they are always the last 96.

# %% tags=["solution"]
shuffled = DataLoader(ArrayDataset(np.arange(70)), 16, shuffle=True, last_batch="discard")
epochs = [np.concatenate([batch.asnumpy() for batch in shuffled]) for _ in range(40)]
assert 60_000 % 512 == 96 and all(len(set(seen)) == 64 for seen in epochs)
assert set(np.concatenate(epochs)) == set(range(70)), "each one is seen sooner or later"

# %% [markdown]
# ### Answer 3
#
# The shards are of 3 and 2 images. Each mean gets weight 1/2, so an image of
# the shorter shard counts 1/4 and one of the longer 1/6, where 1/5 would be right.

# %% tags=["solution", "trains"]
net, trainer = tiny(pair)
shards = [len(shard) for shard in split(nd.zeros((5, 2)), pair, even_split=False)]
backward(net, [[[1, 0]] * shards[0], [[0, 1]] * shards[1]], reduce=lambda loss: loss.mean())
trainer.step(2)
assert np.allclose(weights(net), [-0.5, -0.5]), "two halves, whoever is in them"
print("shards", shards, "so an image counts", [f"1/{2 * n}" for n in shards], "instead of 1/5")
