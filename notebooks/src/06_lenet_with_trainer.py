# %% [markdown]
# # 06 · Training LeNet with Trainer
#
# Chapter 05 showed that Gluon on several devices computes what one device does. This chapter
# trains with it as a script would: images come from a loader, the last batch is smaller, a metric
# counts right answers, and somebody presses *stop*.
#
# ## What you'll do
#
# Train LeNet on two devices within ten cells, meet three traps that raise no error, measure
# whether the loader keeps up with training, and find out what batch size, learning rate and
# warm-up do, each alone and over nine seeds.
#
# ## What you'll learn
#
# - `DataLoader`, transforms, `metric.Accuracy` and `Trainer.step` in one loop for any number of
#   devices;
# - three traps that raise no error: a loss averaged twice, two meanings of the last batch's size,
#   rows counted twice;
# - how to tell whether the input pipeline is the bottleneck;
# - what a loop needs so that it can be stopped and continued;
# - why a higher rate can leave a network guessing for good, and what warm-up does about it.
#
# ## What you need
#
# Chapters 02, 04 and 05. No GPU. Reading takes {reading time}, running about a minute with MNIST.

# %% tags=["measured"]
import time

from helpers import devices, load_data

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

two = devices(2)
data = load_data("mnist")
print(data)

# %% [markdown]
# ## The input pipeline
#
# Image files hold bytes: height × width × channel, 0 to 255. Networks take channel × height ×
# width, as small floating-point numbers. `load_data` has converted ours already, so we turn them
# back into bytes, to load them as you would load your own. (`gluon.data.vision.MNIST`, which the
# tutorial uses, would download them.)

# %%
def as_bytes(images):  # [n, 1, 28, 28] floats -> [n, 28, 28, 1] bytes
    return nd.array((images * 255).round().transpose(0, 2, 3, 1), dtype="uint8")


pictures, labels = as_bytes(data.train_images), data.train_labels.astype("int32")

# %% [markdown]
# A *dataset* gives one example at a time. `transform_first` applies a function to the image and
# leaves the label alone. What `ToTensor` does, NumPy says in one line:

# %%
from mxnet.gluon.data import ArrayDataset, DataLoader
from mxnet.gluon.data.vision import transforms

dataset = ArrayDataset(pictures, labels).transform_first(transforms.ToTensor())
image, label = dataset[0]
expected = pictures[0].asnumpy().transpose(2, 0, 1).astype("float32") / np.float32(255)
assert (image.asnumpy() == expected).all() and label == labels[0], "channel first, divided by 255"

# %% [markdown]
# A `DataLoader` stacks examples to batches. With `shuffle=True` each epoch has a new order.
# **Predict:** 1,000 images in batches of 128. How many batches, and how large is the last one?

# %%
some = ArrayDataset(pictures[:1000], labels[:1000]).transform_first(transforms.ToTensor())
for last_batch in ("keep", "discard"):
    sizes = [len(x) for x, _ in DataLoader(some, 128, last_batch=last_batch)]
    print(f"{last_batch:8}{sizes}")
assert sizes == [128] * 7, "discard leaves out the 104 images that don't fill a batch"

# %% [markdown]
# By default the loader keeps the smaller batch, and so do we: it is data like any other.
#
# ## The network
#
# *The Straight Dope*'s LeNet, with max pooling where chapter 04 had average pooling. A
# `HybridSequential` works like a `Sequential`, and can also be compiled (chapter 08).

# %%
def lenet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net

# %% [markdown]
# Weights start by Xavier's rule: uniform numbers whose spread depends on how many numbers go into a
# layer and come out of it (Glorot and Bengio, 2010).

# %%
def start(places, network=lenet, seed=0, dtype="float32", init=None):
    net = network()
    net.cast(dtype)
    mx.random.seed(seed)
    net.initialize(init or mx.init.Xavier(), ctx=places)
    net(nd.zeros((1, 1, 28, 28), ctx=places[0], dtype=dtype))  # now all shapes are known
    return net

# %% [markdown]
# ## Train it
#
# A step is chapter 05's: split, forward and loss under `record`, backward, `step`. `step` gets the
# number of images that the batch *has*.

# %% tags=["trains"]
softmax = gluon.loss.SoftmaxCrossEntropyLoss()  # a number for each image
split = gluon.utils.split_and_load


def forward_backward(net, x, y, places):
    xs, ys = (split(a, places, even_split=False) for a in (x, y))
    with autograd.record():
        outputs = [net(shard) for shard in xs]
        losses = [softmax(out, shard) for out, shard in zip(outputs, ys)]
    autograd.backward(losses)
    return outputs, ys, losses

# %% tags=["trains"]
def train_batch(net, trainer, x, y, places):
    outputs, ys, losses = forward_backward(net, x, y, places)
    trainer.step(len(x))
    return outputs, ys, losses

# %% [markdown]
# An epoch, and an evaluation. `metric.Accuracy` counts right answers and all answers; `update`
# takes lists with an entry for each device, and waits for the answers.

# %% tags=["trains"]
def epoch(net, trainer, batches, places):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        outputs, ys, _ = train_batch(net, trainer, x, y, places)
        metric.update(ys, outputs)
    return metric.get()[1]

# %%
def evaluate(net, batches, places):
    metric = mx.metric.Accuracy()
    for x, y in batches:
        xs, ys = (split(a, places, even_split=False) for a in (x, y))
        metric.update(ys, [net(shard) for shard in xs])
    return metric.get()[1]

# %% [markdown]
# Two epochs on two devices, with 12,800 images:

# %% tags=["measured", "trains"]
part, held_out = (ArrayDataset(as_bytes(images), numbers).transform_first(transforms.ToTensor())
                  for images, numbers in ((data.train_images[:12_800], labels[:12_800]),
                                          (data.test_images[:2000], data.test_labels[:2000])))
net = start(two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
for number in (1, 2):
    begin = time.perf_counter()
    seen = epoch(net, trainer, DataLoader(part, 64, shuffle=True), two)
    print(f"epoch {number}: {time.perf_counter() - begin:.1f} s, training {seen:.3f},",
          f"test {evaluate(net, DataLoader(held_out, 512), two):.3f} ({data.name})")

# %% [markdown]
# Training accuracy is counted while the weights change, test accuracy afterwards, on images that
# training hasn't seen. `metric.get()` counts everything since the last `reset`. A loop that reuses
# a metric has to call it, or an epoch's accuracy is the mean over all epochs so far.
#
# ### Does it compute what one device computes?
#
# Chapter 05 held ten lines of such a loop against chapter 04's. This one has a smaller last batch:
# batches of 130 images leave one of 120. Ten steps in float64, on 1 to 4 devices. Learning rates
# reach MXNet's update in float32; 0.25 is exact there, 1/130 isn't, but it is the same number on
# every device.

# %% tags=["trains"]
four = [mx.cpu(r) for r in range(4)]
pair = four[:2]
x = nd.array(data.train_images[:640], dtype="float64")
y = nd.array(data.train_labels[:640])

# %% tags=["trains"]
def ten_steps(k, size=len):
    net, losses = start(four[:k], dtype="float64"), []
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    for first in [*range(0, 640, 130)] * 2:
        batch = x[first : first + 130], y[first : first + 130]
        loss = forward_backward(net, *batch, four[:k])[2]
        trainer.step(size(batch[0]))
        losses.append(np.concatenate([part.asnumpy() for part in loss]).mean())
    return net, losses

# %% [markdown]
# The distance is chapter 05's: the largest difference in any parameter on any device, as a share of
# that parameter's largest entry.

# %%
def apart(net, reference):
    pairs = [(replica.asnumpy(), q.data().asnumpy())
             for p, q in zip(net.collect_params().values(), reference.collect_params().values())
             for replica in p.list_data()]
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])

# %% tags=["trains"]
reference, losses = ten_steps(1)
assert np.mean(losses[-3:]) < 0.95 * np.mean(losses[:3]), "compare while the loss falls"
for k in (2, 3, 4):
    net, same = ten_steps(k)
    assert apart(net, reference) < 1e-12 and np.allclose(same, losses, rtol=1e-12, atol=0)
print("1 to 4 devices: the same weights, on every device, to 1e-12")

# %% [markdown]
# ## Three traps that raise no error
#
# ### 1. A loss averaged twice
#
# For numbers that one can check by hand, take two weights $w$ and the loss $w \cdot x$. The
# gradient of an image is then the image itself, and a step at rate 1 subtracts the sum of the
# images, divided by what we tell `step`.

# %% tags=["trains"]
def tiny_step(rows, divisor, reduce=lambda loss: loss):
    net = nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.Zero(), ctx=pair)
    with autograd.record():
        losses = [reduce(net(nd.array(r, ctx=d))) for r, d in zip(rows, pair)]
    autograd.backward(losses)
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}).step(divisor)
    first, second = (w.asnumpy().ravel().tolist() for w in net.weight.list_data())
    assert first == second, "both replicas make the same step"
    return first

# %% tags=["trains"]
four_images = [[2, 0], [4, 0]], [[0, 2], [0, 8]]
assert tiny_step(four_images, 4) == [-1.5, -2.5], "minus the mean of the four"

# %% [markdown]
# It is natural to take the mean of a loss. **Predict** the weights if each device does so, and we
# still call `step(4)`.

# %% tags=["trains"]
print("mean of the loss, step(4):", tiny_step(four_images, 4, lambda loss: loss.mean()))
print("mean of the loss, step(2):", tiny_step(four_images, 2, lambda loss: loss.mean()))

# %% [markdown]
# `step(4)` after a mean is half as long as it should be: the sum was divided by the size of the
# shard, and by the size of the batch again. With 64 images on each device it is 64 times too short,
# and training looks merely slow. Either leave the loss alone and tell `step` the batch size, or
# take means and tell it the number of devices. The second is right for equal shards only (exercise
# 2).
#
# ### 2. The size of the last batch
#
# 60,000 images in batches of 128 leave a last batch of 96. MXNet's tutorial calls `step` with its
# *actual* size, and the step goes along the mean of 96 gradients. *Dive into Deep Learning* calls
# `step(batch_size)` with the *nominal* size, 128. **Predict:** how much shorter is its step? And
# would the check above notice a loop that uses the nominal size, with batches of 130 and a last one
# of 120?

# %% tags=["trains"]
nominal, _ = ten_steps(1, size=lambda batch: 130)
print(f"60,000 images in batches of 128: {60_000 % 128 / 128:.0%} of the length")
print(f"the check: {apart(nominal, reference):.0e} apart, with 1e-12 allowed")
assert apart(ten_steps(2, size=lambda batch: 130)[0], nominal) < 1e-12, "the same on two"

# %% [markdown]
# It notices because the reference uses the actual size. A loop with the nominal size agrees with
# itself on any number of devices. Neither is wrong. With the actual size all steps are means, and
# an image of the last batch counts 1/96 where others count 1/128. With the nominal size all images
# count the same, and the last step is shorter: as if batch and rate had both been reduced. But two
# programs that differ in it don't train the same network.
#
# A last batch with fewer images than devices is another matter: then a device gets no data, and its
# *old* gradient is summed once more (chapter 05).
#
# ### 3. Rows counted twice
#
# Before Gluon, MXNet had *iterators*, and *The Straight Dope* uses one. `NDArrayIter` slices arrays
# in memory. It doesn't shuffle unless asked, has to be `reset` before the next epoch, and fills the
# last batch up with rows from the beginning. **Predict** the three batches of ten rows, and what a
# second loop gives.

# %%
ten = mx.io.NDArrayIter(np.arange(10.0).reshape(10, 1), np.arange(10), batch_size=4)
for batch in ten:
    print(batch.data[0].asnumpy().ravel().astype(int).tolist(), "pad", batch.pad)
print("a second loop:", len(list(ten)), "batches")
ten.reset()
print("after reset:  ", len(list(ten)), "batches")

# %% [markdown]
# A loop that forgets `reset` trains for one epoch and then runs through empty ones. A loop that
# ignores `pad` counts rows twice. The published accuracies are of this kind: 10,000 test images in
# batches of 64 make 10,048 rows. How much does it matter? Our stored runs of that experiment
# (below) were counted both ways:

# %%
import json
from pathlib import Path

stored = json.loads(Path("src/results/trainer.json").read_text())
runs = {name.removeprefix("trainer-"): np.array(
    [[(e["accuracy"], e["padded_accuracy"], e["loss"]) for e in run] for run in seeds])
    for name, seeds in stored["runs"].items()}  # [seed, epoch, which of the three]
off = max(np.abs(run[..., 0] - run[..., 1]).max() for run in runs.values())
print(f"48 or 112 rows twice: {100 * off:.2f} points at most")
assert 48 == -10_000 % 64 and 112 == -10_000 % 128

# %% [markdown]
# That is little, since few rows are repeated. In a small test set it is more.
#
# ## fit: the same loop, safe to stop
#
# From here on chapters use `helpers.training.fit`. It is the loop above, with
#
# - a progress bar and a `History` of losses, accuracies and images/s;
# - zeros for the gradients of a device that gets no image;
# - losses read a few steps late, since reading the newest would make the devices wait for Python; a
#   loss that isn't a number ends the run and names the step;
# - at each epoch's end a check that weights are finite and replicas equal;
# - an interrupt that takes effect only after the current step.
#
# `Batches` gives batches of arrays in memory, in an order that depends on a seed. Is it the same
# training? Two epochs on four devices, against the ten steps above:

# %% tags=["trains"]
from helpers.training import Batches, assert_same_parameters, fit

net = start(four, dtype="float64")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
history = fit(net, trainer, Batches(x, y, 130, shuffle=False), four, epochs=2, progress=False)
assert np.allclose(history.losses, losses, rtol=1e-12, atol=0), "the losses of the loop above"
assert apart(net, reference) < 1e-12, "and its weights"

# %% [markdown]
# Seven images in batches of three: in the last step, one of the two devices has nothing to do.
# **Predict:** is the result still that of one device?

# %% tags=["trains"]
def seven_images(places):
    net = start(places, dtype="float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25})
    fit(net, trainer, Batches(x[:7], y[:7], 3, shuffle=False), places, progress=False)
    return net


assert apart(seven_images(pair), seven_images(pair[:1])) < 1e-12
print("yes: the idle device took part with a gradient of zero")

# %% [markdown]
# In JupyterLab the square button sends the kernel the signal of Ctrl-C, and Python raises
# `KeyboardInterrupt` wherever it is: perhaps after the backward pass of one device and before that
# of the other. A timer presses the button for us, in the middle of an endless training.

# %% tags=["trains"]
import os
import signal
import threading

net = start(pair, dtype="float64")
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})

# %% tags=["trains"]
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    fit(net, trainer, Batches(x, y, 64), pair, epochs=10**6, progress=False)
except KeyboardInterrupt:
    print("stopped")
assert_same_parameters(net)
history = fit(net, trainer, Batches(x, y, 64), pair, progress=False)
assert len(history.losses) == 10 and np.isfinite(history.losses).all(), "and it trains on"

# %% [markdown]
# The replicas are equal to the last bit, and training goes on from there.
#
# ## Does the pipeline keep up?
#
# A pipeline delivers so many images a second, training uses so many. Here both run on the same
# cores. If neither waits for anything else, an epoch takes the sum of their times. We measure the
# two apart, then together. `num_workers=2` prepares batches in two more processes, copies of this
# one; with `thread_pool=True` in two threads.

# %% tags=["trains"]
def seconds(work, batches):
    nd.waitall()
    begin = time.perf_counter()
    work(batches)
    nd.waitall()
    return time.perf_counter() - begin


def train_on(batches):
    fit(net, trainer, batches, two, progress=False)

# %% tags=["trains"]
arrays = data.train_images[:6400], data.train_labels[:6400]
bytes_ = ArrayDataset(as_bytes(arrays[0]), arrays[1]).transform_first(transforms.ToTensor())
pipelines = {"DataLoader": DataLoader(bytes_, 128, shuffle=True),
             "DataLoader, 2 processes": DataLoader(bytes_, 128, shuffle=True, num_workers=2),
             "DataLoader, 2 threads": DataLoader(bytes_, 128, shuffle=True, num_workers=2,
                                                 thread_pool=True),
             "Batches": Batches(*arrays, 128)}
ready = list(Batches(*arrays, 128))
net = start(two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
train_on(ready)  # warms up

# %% [markdown]
# **Predict:** will two processes make the loader faster here, where both cores already train?

# %% tags=["trains"]
rows = {name: [] for name in pipelines}
for _ in range(5):
    for name, batches in pipelines.items():
        rows[name].append((seconds(train_on, ready), seconds(list, batches),
                           seconds(train_on, batches)))

# %% tags=["measured"]
images = sum(len(a) for a, _ in ready)
need = images / np.median([row[0] for each in rows.values() for row in each])
print(f"training alone: {need:,.0f} images/s")
for name, each in rows.items():
    training, alone, both = np.median(each, axis=0)
    print(f"{name:24} alone: {images / alone:9,.0f} images/s; epoch: {both:.2f} s, "
          f"the sum of both: {training + alone:.2f} s")

# %% [markdown]
# Compare the last two columns. Where they agree, pipeline and training share the cores. Where the
# epoch is shorter, part of the pipeline's work was done while training left a core idle; where it
# is longer, they got into each other's way. A pipeline ten times as fast as training adds a tenth.
#
# **On GPUs:** *The Straight Dope* reports 4.7 s for an epoch of 60,000 images on one GPU of 2017,
# and 2.8 s on two, at twice the batch. Against our two cores:

# %% tags=["measured"]
for k, epoch_seconds in ((1, 4.7), (2, 2.8)):
    print(f"{k} GPU{'s' * (k > 1)} of 2017: {60_000 / epoch_seconds:,.0f} images/s,",
          f"{60_000 / epoch_seconds / need:.1f} times our training")

# %% [markdown]
# A pipeline has to deliver at least that much. `NDArrayIter` and `Batches`, which slice arrays,
# need data that fits into memory.
#
# ## Batch, rate and warm-up
#
# *The Straight Dope* trains with (1 device, batch 64, rate 0.3), then with (2, 128, 0.6), and the
# second learns more slowly. Three things were changed at once. We changed one at a time, with nine
# seeds each, for the published five epochs (`make reproduce ARGS="--only trainer"`).
#
# The page doesn't say how its network starts. Its printed outputs fit Gluon's default, uniform
# numbers up to 0.07, and of the common starts only that one (`tests/bench/reproduce.py`).
#
# The last row adds *warm-up*: over the first epoch the rate rises to its value in equal steps.
# Goyal et al. (2017) use one, over five epochs, to make large batches train. In Gluon it is an
# option of the optimizer:

# %% tags=["trains"]
def warm_up(rate, steps):
    return mx.lr_scheduler.FactorScheduler(step=10**9, base_lr=rate, warmup_steps=steps)

# %% tags=["trains"]
weight = gluon.Parameter("w", shape=(1,), init="zeros")
weight.initialize(ctx=pair)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.6, "lr_scheduler": warm_up(0.6, 4)})
path = [0]
for _ in range(6):
    with autograd.record():
        losses = [weight.data(d).sum() for d in pair]
    autograd.backward(losses)
    trainer.step(2)
    path.append(weight.data(pair[1]).asscalar())
assert np.allclose(-np.diff(path), [0.15, 0.3, 0.45, 0.6, 0.6, 0.6]), "four steps of warm-up"

# %% [markdown]
# **Predict:** at batch 128, does rate 0.6 end higher or lower than 0.3? What does warm-up change?

# %%
for name, run in runs.items():
    ends = np.sort(100 * run[:, -1, 0])
    print(f"{name:20}", *(f"{end:5.2f}" for end in ends))
print("test accuracy after five epochs, %, each row sorted; names are devices x batch - rate")

# %%
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, ORANGE, show

guessing = {name: int((run[:, -1, 0] < 0.12).sum()) for name, run in runs.items()}
assert [*guessing.values()] == [0, 0, 0, 4, 0, 3], guessing
panels = {"2x128-0.6": "Gluon's start", "2x128-0.6-xavier": "Xavier's start",
          "2x128-0.6-warm": "Gluon's, warm-up"}
fig, axes = plt.subplots(1, 3, figsize=(7, 3.2), sharey=True, layout="constrained")
fig.suptitle("Batch 128, rate 0.6, nine seeds: warm-up leaves none guessing")
for ax, (name, title) in zip(axes, panels.items()):
    ax.plot(range(1, 6), 100 * runs[name][..., 0].T, color=BLUE, lw=1, alpha=0.6)
    ax.set_title(f"{title}: {guessing[name]} guess", fontsize=10)
    ax.set(xlabel="epoch", ylim=(0, 103), xticks=range(1, 6))
axes[0].plot(range(1, 6), [89.51, 96.87, 97.59, 97.85, 98.13], "s--", color=ORANGE, ms=4,
             label="published")
axes[0].set_ylabel(f"test accuracy, % ({stored['data']})")
axes[0].legend(loc="center right", fontsize=8)
show(fig, alt="Test accuracy over five epochs at batch 128 and rate 0.6, nine seeds in each of "
              "three panels: some runs stay at 10 % without warm-up, none does with it.")

# %% [markdown]
# What the runs show:
#
# - *Devices.* At batch 64, one device and two end between 98.4 % and 98.9 %. It is the same
#   training; the differences are float32's (chapter 04).
# - *Batch.* At the same rate, batch 128 is behind batch 64 after one epoch for each seed. After
#   five, the difference is at most 0.7 points.
# - *Rate.* With 0.6, four of nine runs still guess after five epochs, with a loss near $\log 10$;
#   from Xavier's start, three. The others learn. The published run is below them after one epoch,
#   and among them after five.
# - *Warm-up.* All nine learn. They are behind after one epoch, in which the rate was lower, and
#   end as high as batch 64.

# %%
def after(name, epochs):
    return 100 * runs[name][:, epochs - 1, 0]

# %%
same = np.concatenate([after("1x64", 5), after("2x64", 5)])
assert (round(same.min(), 1), round(same.max(), 1)) == (98.4, 98.9), "devices"
assert (after("2x128-0.3", 1) < after("2x64", 1)).all(), "batch, after one epoch"
assert abs(after("2x128-0.3", 5) - after("2x64", 5)).max() < 0.7, "batch, after five"
learned = after("2x128-0.6", 5) > 90
assert np.allclose(runs["2x128-0.6"][~learned, -1, 2], np.log(10), atol=0.02), "a loss of guessing"
assert after("2x128-0.6", 1)[learned].min() > 89.51, "published, after one epoch"
assert after("2x128-0.6", 5)[learned].min() < 98.13 < after("2x128-0.6", 5).max(), "after five"
assert (after("2x128-0.6-warm", 1) < after("2x64", 1)).all(), "behind after one"
assert after("2x128-0.6-warm", 5).min() > after("2x64", 5).min() - 0.1, "and not at the end"

# %% [markdown]
# So whatever a page says of two GPUs that learn more slowly than one, look at batch and rate first.
# Here a rate that was doubled along with the batch, as Goyal et al. do, needed the warm-up that
# they use with it.
#
# ## How much faster?
#
# One device and two at the same batch, in turns, as in chapter 04, for three batch sizes.

# %% tags=["trains"]
from helpers.timing import Others

jobs = {}
for batch in (64, 128, 256):
    for k in (1, 2):
        net = start(two[:k])
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
        batches = list(Batches(*(a[:2560] for a in arrays), batch))
        jobs[batch, k] = net, trainer, batches, two[:k]
        fit(*jobs[batch, k], progress=False)  # warms up

# %% tags=["trains"]
kept, discarded = [], []
while len(kept) < 5 and len(discarded) < 5:
    with Others() as others:
        row = [fit(*job, progress=False).rate[0] for job in jobs.values()]
    (kept if others.share <= 0.02 else discarded).append(row)

# %% [markdown]
# Five rounds are kept in which other programs took less than 2 % of the CPU's time. If there were
# fewer than three of those, all are used.

# %% tags=["measured"]
rounds = np.array(kept if len(kept) > 2 else kept + discarded).reshape(-1, 3, 2)
print(f"rounds kept {len(kept)}, discarded {len(discarded)}", "and used" * (len(kept) < 3))
for batch, each in zip((64, 128, 256), rounds.transpose(1, 2, 0)):
    ratio = each[1] / each[0]
    print("batch {}: {:,.0f} and {:,.0f} images/s, ".format(batch, *np.median(each, axis=1)) +
          f"times {np.median(ratio):.2f} ({ratio.min():.2f} to {ratio.max():.2f})")

# %% [markdown]
# The work of a step that doesn't depend on the batch, such as Python's, weighs less in a larger
# one. Chapter 10 takes the rest apart.

# %% [markdown]
# ## Summary
#
# - A dataset gives examples, a transform prepares them, a loader stacks them to batches. Measure
#   pipeline and training apart and together.
# - The loss has a number for each image. `step` divides by what you tell it. For the last batch,
#   decide whether that is its own size or the nominal one.
# - Agreement between numbers of devices doesn't show that the loop is right. Compare with
#   something written independently.
# - Reset metrics and iterators in each epoch, and don't count padding.
# - `fit` is this chapter's loop, safe to stop.
# - Batch 128 at rate 0.6 left four of nine runs guessing, and none with warm-up.
#
# Next, chapter 07: what `step` does between the gradients and the weights, and where.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*; *The Straight
# Dope*, "Training on multiple GPUs with gluon"; X. Glorot and Y. Bengio, *Understanding the
# difficulty of training deep feedforward neural networks* (2010); P. Goyal et al., *Accurate, large
# minibatch SGD* (2017), arXiv:1706.02677.

# %% [markdown]
# ## Exercises
#
# 1. **The tutorial's LeNet.** MXNet's tutorial has 6 and 16 channels in convolutions of 5×5 and
#    3×3, each with relu and max pooling, and dense layers of 120, 84 and 10. How many parameters
#    has it, before you count? Train it for two epochs on 12,800 images at the tutorial's rate, 0.04
#    with batch 128, and at 0.3.
# 2. **The mean of three shards.** Five images on two devices, the loss taken as the mean over each
#    shard, and `step(2)`. Which images count too much?
# 3. **One bad pixel.** Put a NaN into one of 640 images, in float32 and in float64, and call `fit`.
#    When does it stop? Compare `nd.relu` with `nd.Activation(..., act_type="relu")` in both types.
# 4. **Why do runs stall?** Start LeNet from `mx.init.Uniform(0.07)` with a few seeds and train 150
#    steps of 128 images at rate 0.6. For those that still guess and those that don't, which share
#    of the outputs of each relu is above zero on test images? What follows for the gradients?

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


net = start(pair, lenet_tutorial)
count = sum(p.data(pair[0]).size for p in net.collect_params().values())
assert count == 6 * 26 + 16 * (6 * 9 + 1) + 120 * (16 * 25 + 1) + 84 * 121 + 10 * 85
print(f"{count:,} parameters, half of what our LeNet has")

# %% tags=["solution", "measured", "trains"]
for rate in (0.04, 0.3):
    net = start(two, lenet_tutorial)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
    test = Batches(data.test_images[:2000], data.test_labels[:2000], 500, shuffle=False)
    seen = fit(net, trainer, Batches(*arrays, 128), two, epochs=2, test=test, progress=False)
    print(f"rate {rate}: test accuracy", *(f"{share:.3f}" for share in seen.test_accuracy))

# %% [markdown]
# ### Answer 2
#
# The shards have 3 and 2 images. Each mean has the weight ½, so an image of the shorter shard
# counts ¼ and one of the longer ⅙, where ⅕ would be right.

# %% tags=["solution", "trains"]
shards = [len(shard) for shard in split(nd.zeros((5, 2)), pair, even_split=False)]
unequal = [[1, 0]] * shards[0], [[0, 1]] * shards[1]
step = tiny_step(unequal, 2, lambda loss: loss.mean())
assert np.allclose(step, [-0.5, -0.5]), "half for each shard, whoever is in it"
print("shards", shards, "so an image counts", [f"1/{2 * n}" for n in shards], "instead of 1/5")

# %% [markdown]
# ### Answer 3
#
# In float64 at the step that has the image: the loss is NaN. In float32 at the end of the epoch:
# `nd.Activation`, which Gluon's layers use, then makes 0 of a NaN on CPUs. The loss stays a number,
# while the gradient of the first layer, which multiplies by the image, is NaN. `fit` finds it when
# it looks at the weights.

# %% tags=["solution"]
for dtype, activated in (("float64", [True, False]), ("float32", [False, False])):
    bad = nd.array([np.nan, 3], dtype=dtype)
    assert np.isnan(nd.relu(bad).asnumpy()).tolist() == [True, False], "nd.relu keeps it"
    kept = np.isnan(nd.Activation(bad, act_type="relu").asnumpy()).tolist()
    assert kept == activated, f"{dtype}: {kept}"

# %% tags=["solution", "trains"]
for dtype in ("float64", "float32"):
    spoilt = x.astype(dtype)
    spoilt[300, 0, 14, 14] = np.nan
    net = start(pair, dtype=dtype)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    try:
        fit(net, trainer, Batches(spoilt, y, 64), pair, progress=False)
    except FloatingPointError as error:
        print(f"{dtype}: {error}".replace(net[0].name, "conv0"))

# %% [markdown]
# ### Answer 4
#
# Where (almost) no output of a convolution's relu is above zero, no gradient passes it: relu's
# derivative is 0 there. Then the convolutions before it no longer change, whatever the images.

# %% tags=["solution", "measured", "trains"]
looked_at = nd.array(data.test_images[:500], ctx=two[0])
for seed in range(4):
    net = start(two, seed=seed, init=mx.init.Uniform(0.07))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.6})
    losses, out, shares = [], looked_at, []
    while len(losses) < 150:
        losses += fit(net, trainer, Batches(*arrays, 128), two, progress=False).losses
    for layer in net[:5]:
        out = layer(out)
        shares += [f"{(out.asnumpy() > 0).mean():.1%}"] * ("pool" not in layer.name)
    print(f"seed {seed}: loss {np.mean(losses[-10:]):.2f}, above zero after each relu: {shares}")
