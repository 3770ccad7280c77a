# %% [markdown]
# # 05 · Gluon on several devices
#
# In chapter 04 you kept a list of replicas, made each one by hand and summed their gradients
# yourself. Gluon, MXNet's high-level interface, keeps the replicas for you: you name the devices
# once, when the network is initialised. This chapter looks into every corner of that: where each
# array lives, when it comes into being, what raises an error, and what ought to and doesn't.
#
# ## What you'll do
#
# Initialise a network on two devices, watch its parameters come into being, compare values and
# gradients across devices, and train it on 1, 2 and 4 of them with the same result. Then break it
# in two ways that MXNet does not report.
#
# ## What you'll learn
#
# - `initialize` on a list of devices, and why there may be nothing to see after it;
# - `data`, `grad`, `list_ctx`, `list_data`, `list_grad`: which device's array you get, and what
#   you get to read when there is none;
# - names and prefixes, and two ways to reach a parameter;
# - that replicas have equal values but different gradients, whose sum is the one-device gradient;
# - what a `Trainer` does for you, and that splitting the batch is not part of it;
# - what happens when a device is named twice.
#
# ## What you need
#
# Chapters 01 to 04. No GPU. Reading takes about 35 minutes, running well under a minute.

# %%
from helpers import assert_replicas_equal, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# The devices are named directly: being right needs no GPU and no second core.
#
# What this course is about is *data* parallelism: each device holds the whole network and a part of
# the data. A network too large for one device has to be cut into parts itself, *model*
# parallelism; MXNet leaves that to you, and so does this course.

# %%
four = [mx.cpu(r) for r in range(4)]
two = four[:2]

# %% [markdown]
# ## A network that is nowhere yet
#
# A convolutional network as *The Straight Dope* has it in "Training on multiple GPUs with gluon".
# Layers are listed without their input sizes: Gluon will find those out. `prefix` is a name that
# all of the network's parameters begin with, and `name_scope` hands it on to the layers made
# inside.

# %%
def cnn(prefix="cnn_"):
    net = nn.Sequential(prefix=prefix)
    with net.name_scope():
        net.add(nn.Conv2D(channels=20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
                nn.Conv2D(channels=50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
                nn.Dense(128, activation="relu"))
    return net


net = cnn()
print(list(net.collect_params()))

# %% [markdown]
# `collect_params` gives all parameters of the network and of the layers in it: a dictionary by
# name. The names are `prefix`, layer, position, kind. (The published page asks for
# `cnn_conv2d0_weight`. In MXNet 1.9.1 that name is not there; layers of this kind count as `conv`.)
#
# There are two ways to one and the same parameter: by its full name, or through the layer, whose
# own dictionary adds the prefix for you.

# %%
weight = net.collect_params()["cnn_conv0_weight"]
assert net[0].params.get("weight") is weight is net[0].weight, "three ways to one parameter"

# %% [markdown]
# Without `prefix` and `name_scope` layers are numbered through *for the whole process*.
# **Predict:** what are the names in the second of two equal networks?

# %%
for _ in range(2):
    unnamed = nn.Sequential()
    unnamed.add(nn.Dense(3), nn.Dense(1))
    print(list(unnamed.collect_params(".*weight")))

# %% [markdown]
# Other numbers each time, so code that reaches for a parameter by a name such as `dense0_weight`
# breaks when a cell is run twice. `collect_params` takes a pattern, as here, or go through the
# layer: `net[0].weight`.
#
# ## What there is before and after
#
# A small judge for errors: it prints the error's type and the first sentence of what it says.

# %%
def attempt(what):
    try:
        what()
        print("no error")
    except Exception as error:
        print(f"{type(error).__name__}: {str(error).split('. ')[0].rstrip('.')}")


# %% [markdown]
# The network has been defined, not initialised. (The published page forgets to, and so its
# listing can't have made the output that it shows.) **Predict:** is asking for the weight an error
# already? Is using the network?

# %%
images = nd.ones((4, 1, 28, 28))
attempt(lambda: weight.data())
attempt(lambda: net(images))

# %% [markdown]
# Both are. Now initialise on two devices: a list instead of one context, nothing else changes.

# %%
net.initialize(mx.init.Xavier(), ctx=two)
print(weight.list_ctx(), weight.shape)

# %% [markdown]
# The parameter knows where it will live. But look at its shape: a 0 stands where the number of
# input channels should be. Gluon can't know it before it has seen an image, so it *defers*: it
# keeps the initialiser and the devices in mind, and makes no array.
#
# **Predict:** what does `data` raise now, on a device of the two, and on one that is not among
# them? The same as before?

# %%
attempt(lambda: weight.data(two[0]))
attempt(lambda: weight.data(four[3]))
attempt(lambda: weight.list_grad())

# %% [markdown]
# Another type, `DeferredInitializationError`, and for every device the same. Both types are
# `RuntimeError`s. So a program that catches `RuntimeError` and concludes "not on this device", as
# two published versions of this lesson do, may be looking at something else.

# %%
assert issubclass(gluon.parameter.DeferredInitializationError, RuntimeError)

# %% [markdown]
# The first forward pass tells the shapes. *Dive into Deep Learning* says of this moment that
# parameters come into being on the devices that data passes through. **Predict:** we send images
# through device 1 *only*. Is there a weight on device 0?

# %%
scores = net(images.as_in_context(two[1]))
print(weight.shape, [a.context for a in weight.list_data()])

# %% [markdown]
# On both, whatever device the data came through. One forward pass anywhere makes *all* replicas, at
# once and from the same random numbers:

# %%
for p in net.collect_params().values():
    assert_replicas_equal(p.list_data())
assert weight.data(two[0]).asnumpy().std() > 0.01, "zeros would be equal as well, and prove little"

# %% [markdown]
# So there is now an array on each device that the network was initialised on, and an error, of the
# first type, for any other, be it to read a parameter or to use it there:

# %%
attempt(lambda: weight.data(four[3]))
attempt(lambda: weight.grad(four[3]))
attempt(lambda: net(images.as_in_context(four[3])))

# %% [markdown]
# ### `data` without a device
#
# Both *Dive into Deep Learning* and an early edition of it tell us that `weight.data()`, with no
# device named, is the value on the CPU, and that it fails if the network is elsewhere. Ours is on
# `cpu(0)` and `cpu(1)`, which doesn't settle it. On `cpu(1)` and `cpu(2)` it does. **Predict**
# which of these three fail.

# %%
away = nn.Dense(3, in_units=2)  # with its input size known, nothing is deferred
away.initialize(ctx=four[1:3])
attempt(lambda: away.weight.data())
with four[2]:
    print(away.weight.data().context)
with four[3]:
    attempt(lambda: away.weight.data())

# %% [markdown]
# What counts is the *current context*: `cpu(0)` unless a `with` block says otherwise (chapter 01).
# If the parameter is there, that replica is what you get; if not, it is an error.
#
# But there is an exception. **Predict:** a parameter on *one* device, and not the current one.

# %%
single = nn.Dense(3, in_units=2)
single.initialize(ctx=four[2])
print("current:", mx.context.current_context(), " got:", single.weight.data().context)

# %% [markdown]
# With one replica there is no question which one is meant. Code that says `data()` hence works on
# one device, and breaks on the first machine with two. Say `data(device)` or `list_data()`, and it
# works everywhere.
#
# ### Once more, or somewhere else
#
# A second `initialize` does *nothing* but warn, so that training isn't lost by accident.

# %%
import warnings

before = single.weight.data().asnumpy()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    single.initialize(mx.init.One(), ctx=two)
print(str(said[0].message).split("'")[2].strip())
assert (single.weight.data().asnumpy() == before).all() and single.weight.list_ctx() == [four[2]]

# %% [markdown]
# With `force_reinit` it starts anew, on the new devices. Only the values that it has then are gone
# for good; `reset_ctx` moves a network to other devices and keeps them.

# %%
single.initialize(mx.init.One(), ctx=two, force_reinit=True)
single.collect_params().reset_ctx(four[1:])
assert single.weight.list_ctx() == four[1:]
assert all((a.asnumpy() == 1).all() for a in single.weight.list_data()), "values came along"

# %% [markdown]
# ## Values equal, gradients not
#
# Now real images, in float64, so that rounding can't hide anything.

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)

# %% [markdown]
# Centred, as in chapter 04, and with labels.

# %%
pixels = data.train_images[:640].astype("float64")
x, y = nd.array(pixels - pixels.mean(), dtype="float64"), nd.array(data.train_labels[:640])
print(x.shape, y.shape)

# %% [markdown]
# The published network ends in a layer of 128 numbers, for ten classes. Does that fail? The loss
# takes the right class's entry of a softmax; 128 entries serve it as well as ten. **Predict** the
# loss of a network that has learned nothing.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
loss = softmax(net(x[:64].astype("float32")), y[:64]).mean().asscalar()
print(f"ln 128 = {np.log(128):.1f}, ln 10 = {np.log(10):.1f}")
assert abs(loss - np.log(128)) < 0.5, f"{loss}: it guesses among 128 classes"

# %% [markdown]
# It trains, without complaint, a classifier of 128 classes, of which 118 never occur. We add the
# layer that is missing. `cast` makes all parameters float64.

# %%
def lenet(places, seed=0):
    net = cnn()
    with net.name_scope():
        net.add(nn.Dense(10))
    net.cast("float64")
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(x[:1].as_in_context(places[0]))  # a first forward: now all replicas exist
    return net


# %% [markdown]
# Splitting is Gluon's `split_and_load` from now on, which does what yours does (chapter 02):

# %%
shards = gluon.utils.split_and_load(x[:8], two)
for theirs, ours in zip(shards, split_and_load(x[:8], two)):
    assert theirs.context == ours.context and (theirs == ours).asnumpy().all()
print([(s.shape, s.context) for s in shards])

# %% [markdown]
# A forward and a backward on every device. The network finds the right replica by itself: an
# operator runs where its input lives, and Gluon passes it the parameters of that device.

# %%
def forward_backward(net, x, y, places):
    xs = gluon.utils.split_and_load(x, places, even_split=False)
    ys = gluon.utils.split_and_load(y, places, even_split=False)
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(xs, ys)]
    for loss in losses:
        loss.backward()
    return sum(loss.asnumpy().sum() for loss in losses) / len(x)


# %% [markdown]
# **Predict:** after this, are the *values* on both devices still equal? Are the *gradients*?

# %%
net = lenet(two)
forward_backward(net, x[:64], y[:64], two)
for p in net.collect_params().values():
    assert_replicas_equal(p.list_data())
    a, b = (g.asnumpy() for g in p.list_grad())
    assert np.abs(a - b).max() > 0.01 * np.abs(a).max(), f"{p.name}: each saw another shard"
print("values equal, gradients different, for every parameter")

# %% [markdown]
# Each device saw other images, so each has its own gradient. Nobody has added them up yet. Their
# sum should be what one device gets for the whole batch:

# %%
alone = lenet(two[:1])
forward_backward(alone, x[:64], y[:64], two[:1])
for p, q in zip(net.collect_params().values(), alone.collect_params().values()):
    total, truth = sum(g.asnumpy() for g in p.list_grad()), q.grad(two[0]).asnumpy()
    assert np.abs(total - truth).max() <= 1e-12 * np.abs(truth).max(), f"{p.name} by one device"
print("sum of gradients = gradient of the whole batch, to 1e-12 of its largest entry")

# %% [markdown]
# ### Where everything is
#
# Every array knows its device, so the arrays themselves can draw the map: for each parameter its
# values and its gradient, and the shards of the batch. `same` is asked of the numbers.

# %%
groups = [(f"{p.name.removeprefix('cnn_')}, {kind}", arrays)
          for p in net.collect_params().values() if p.name.endswith("weight")
          for kind, arrays in (("values", p.list_data()), ("gradient", p.list_grad()))]
groups.append(("images", gluon.utils.split_and_load(x[:64], two)))
same = {name: (a.asnumpy() == b.asnumpy()).all() for name, (a, b) in groups}

# %% [markdown]
# **Predict** which of the rows are equal on both devices.

# %%
from helpers.plotting import BLUE, ORANGE, figure, show

fig, ax = figure("Values are equal, gradients and images each its own",
                 size=(7, 4))
for row, (name, arrays) in enumerate(groups):
    for array in arrays:
        box = {"fc": "white", "ec": BLUE if same[name] else ORANGE, "boxstyle": "round,pad=0.4",
               "ls": "-" if same[name] else "--", "lw": 2}
        text = f"{array.size:,} entries, {'equal' if same[name] else 'its own'}"
        ax.text(array.context.device_id, row, text, ha="center", va="center", bbox=box, fontsize=8)
ax.set_yticks(range(len(groups)), list(same))
ax.set_xticks([0, 1], [str(d) for d in two])
ax.set(xlim=(-0.6, 1.6), ylim=(len(groups) - 0.4, -0.6))
show(fig, alt="A map of arrays: on each of two devices, the values of four weights, equal; their "
     "gradients, and 32 images each, different.")

# %% [markdown]
# ## What the Trainer does, and what not
#
# A `Trainer` adds the gradients up over devices and updates every replica: the last two steps of
# chapter 04's four. It is sometimes said to split the batch as well. It can't: it has no idea that
# there are images. **Predict:** what if we give the whole batch to device 0, and step?

# %%
def trainer_of(net, rate=0.2):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})


net = lenet(two)
trainer = trainer_of(net)
forward_backward(net, x[:64], y[:64], two[:1])
attempt(lambda: trainer.step(64))

# %% [markdown]
# A warning, raised as an error: on `cpu(1)` nothing has computed a gradient since the last step.
# So the Trainer found that out; it did not split anything. Splitting is your line.
#
# The whole of a training step then is: split, forward and backward on each device, `step`. It
# divides by the number of examples that you tell it, here 64.

# %%
def train(k, steps=20):
    net, losses = lenet(four[:k]), []
    trainer = trainer_of(net)
    for start in range(0, 32 * steps, 32):
        batch = x[start : start + 32], y[start : start + 32]
        losses.append(forward_backward(net, *batch, four[:k]))
        trainer.step(32)
    return net, losses


# %% [markdown]
# The oracle of chapter 04 again: twenty steps on one device, while the loss falls.

# %%
reference, losses = train(1)
assert np.mean(losses[-5:]) < 0.85 * np.mean(losses[:5]), "compare only while the loss falls"

# %% [markdown]
# **Predict:** how far off are 2 and 4 devices, and 3, whose shards are of 11, 11 and 10 images?

# %%
for k in (2, 3, 4):
    net, _ = train(k)
    for p, q in zip(net.collect_params().values(), reference.collect_params().values()):
        truth = q.data().asnumpy()
        for replica in p.list_data():
            far = np.abs(replica.asnumpy() - truth).max() / np.abs(truth).max()
            assert far < 1e-12, f"{p.name} on {replica.context} of {k}: {far:.2g} from one device"
print("1, 2, 3 and 4 devices: the same weights to 1e-12 of the largest, on every device")

# %% [markdown]
# That is what chapter 04 took a page of code for. Uneven shards are no problem either: the loss is
# one number for each image, `backward` adds them up, and `step` divides the whole sum once.
#
# ## One device, named twice
#
# MXNet's own tutorial begins with a choice of devices that falls back to `[cpu(), cpu()]` on a
# machine without GPUs, or to one GPU twice, so that "the example will work". MXNet accepts it.
# To see what then happens we need numbers that can be followed by hand: two weights $w = (0, 0)$,
# the images $(1, 0)$ and $(0, 1)$, and as loss the output $w \cdot x$. The gradient of an image is
# the image.

# %%
def tiny(places):
    net = nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.Zero(), ctx=places)
    shards = gluon.utils.split_and_load(nd.array([[1, 0], [0, 1]]), places)
    with autograd.record():
        losses = [net(shard).sum() for shard in shards]
    for loss in losses:
        loss.backward()
    return net, trainer_of(net, rate=1)


# %% [markdown]
# On two different devices, after `step(2)` at rate 1, both weights are $-1/2$, everywhere:

# %%
net, trainer = tiny(two)
trainer.step(2)
for replica in net.weight.list_data():
    assert (replica.asnumpy() == [[-0.5, -0.5]]).all(), "minus the mean of both images"
print([w.asnumpy().tolist() for w in net.weight.list_data()])

# %% [markdown]
# Now the same device twice. **Predict:** how many replicas are there, and what does each hold as
# its gradient?

# %%
net, trainer = tiny([mx.cpu(), mx.cpu()])
print(net.weight.list_ctx(), [g.asnumpy().tolist() for g in net.weight.list_grad()])

# %% [markdown]
# Two replicas on one device, and nothing says so. But both shards found the *same* replica, since a
# replica is looked up by the device. The second `backward` overwrote the first one's gradient; the
# other replica was never used, and has the zeros that it began with. **Predict:** does `step`
# notice? And what are the weights afterwards?

# %%
attempt(lambda: trainer.step(2))
print([w.asnumpy().tolist() for w in net.weight.list_data()])

# %% [markdown]
# It notices, and too late: the weights *have* been changed, by the second image alone. The default
# Trainer updates first, while it sums, and looks for stale gradients afterwards.
#
# And the published loop calls `step` with `ignore_stale_grad=True`, which takes even this error
# away. **Predict** the weights after one step and two.

# %%
net, trainer = tiny([mx.cpu(), mx.cpu()])
trainer.step(2, ignore_stale_grad=True)
assert (net.weight.data().asnumpy() == [[0, -0.5]]).all(), "the first image has vanished"
print(net.weight.data().asnumpy().tolist())

# %% [markdown]
# Half of the data has vanished, without a word. The loop prints an accuracy that rises, on a
# machine that does twice the work for half the images. That is why `helpers.devices` never gives
# the same device twice, and why our functions refuse such a list:

# %%
attempt(lambda: split_and_load(x[:8], [mx.cpu(), mx.cpu()]))

# %% [markdown]
# ## Summary
#
# - `initialize(ctx=[...])` makes one replica a device, all equal. With input sizes unknown that
#   waits for the first forward pass, on whichever device; then *all* replicas are made.
# - `data()` means the current context's replica, or the only one there is. `data(device)` and
#   `list_data()` say what they mean.
# - Values are equal on all devices, gradients are each shard's own, and their sum is the gradient
#   of the batch.
# - You split the batch. The Trainer sums gradients, and updates all replicas.
# - In float64, twenty steps on 1 to 4 devices agree to $10^{-12}$.
# - A device named twice loses all shards but the last, and `ignore_stale_grad=True` hides it.
#
# Next, chapter 06: real data, batch by batch, with everything that a long training needs.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*; *The Straight
# Dope*, "Training on multiple GPUs with gluon"; A. Zhang et al., *Dive into Deep Learning*,
# "Concise Implementation for Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **Frozen.** Set `grad_req = "null"` for the first layer's parameters *before* `initialize`.
#    What is there to see in `list_grad`, and does a step on two devices still work?
# 2. **From two to one.** `save_parameters` on two devices, and load on one. Is anything lost? Why
#    not?
# 3. **Adding up.** `grad_req = "add"` adds gradients of several `backward` calls instead of
#    overwriting. Would it cure the repeated device? Try it with `tiny`'s numbers before you look.

# %% [markdown]
# **Solution 1.** A parameter without gradient has none on any device, and `list_grad` raises. The
# Trainer leaves it alone, and the others train as before.

# %% tags=["solution"] jupyter={"source_hidden": true}
net = lenet(two)
net[0].collect_params().setattr("grad_req", "null")
attempt(lambda: net[0].weight.list_grad())
trainer, old = trainer_of(net), net[0].weight.data(two[1]).asnumpy()
forward_backward(net, x[:64], y[:64], two)
trainer.step(64)
assert (net[0].weight.data(two[1]).asnumpy() == old).all(), "frozen on every device"
assert_replicas_equal(net[2].weight.list_data())

# %% [markdown]
# **Solution 2.** Replicas are equal, so one of them is all there is to save. (Chapter 08 has layers
# for which that isn't so.)

# %% tags=["solution"] jupyter={"source_hidden": true}
import tempfile

path = tempfile.mkdtemp() + "/lenet.params"
net.save_parameters(path)
other = lenet(four[3:], seed=1)
other.load_parameters(path, ctx=four[3:])
for p, q in zip(net.collect_params().values(), other.collect_params().values()):
    assert (p.data(two[1]).asnumpy() == q.data().asnumpy()).all(), "the same on one device"

# %% [markdown]
# **Solution 3.** The replica that both shards use then has the sum of their gradients, so nothing
# is lost on the way to `step`. But gradients must be set to zero by hand before each step, and the
# other replica still takes part with its own, which is zero only as long as it is. And there is
# still only one device: two shards one after the other, at twice the memory.

# %% tags=["solution"] jupyter={"source_hidden": true}
net = nn.Dense(1, use_bias=False, in_units=2)
net.collect_params().setattr("grad_req", "add")
net.initialize(mx.init.Zero(), ctx=[mx.cpu(), mx.cpu()])
with autograd.record():
    losses = [net(nd.array([row])).sum() for row in ([1, 0], [0, 1])]
for loss in losses:
    loss.backward()
assert (net.weight.grad(mx.cpu()).asnumpy() == [[1, 1]]).all(), "both images are in it"
