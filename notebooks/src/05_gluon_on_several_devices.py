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
# gradients across devices, and train it on 1 to 4 of them with the same result. Then break it, in
# ways that MXNet reports too late or not at all.
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
# Chapters 01 to 04. No GPU. Reading takes {reading time}, running well under a minute.

# %%
from helpers import assert_replicas_equal, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# The devices are named directly: being right needs no GPU and no second core. An *array* lives on
# the one device on which it was made (chapter 01). A *parameter* is a set of arrays, one for each
# device on which it was initialised. Here is what becomes of chapter 04's pieces:
#
# | by hand, chapter 04 | in Gluon |
# | --- | --- |
# | `get_params` for each device | `net.initialize(ctx=[...])` |
# | the copies of one parameter, `zip(*replicas)` | `p.list_data()`, or `p.data(device)` for one |
# | their gradients, `p.grad` of each | `p.list_grad()`, or `p.grad(device)` |
# | `lenet(x, replica)` | `net(x)`, which finds the replica by where `x` is |
# | `split_and_load` | `gluon.utils.split_and_load`, and you still call it yourself |
# | `allreduce`, then the update | `trainer.step(n)` |
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
# name. A name is made of the network's prefix, the kind of layer, a number for each kind, and what
# the parameter is.
#
# There are several ways to one and the same parameter: by its full name, or through the layer,
# whose own dictionary adds the prefix for you.

# %%
weight = net.collect_params()["cnn_conv0_weight"]
assert net[0].params.get("weight") is weight is net[0].weight, "three ways to one parameter"

# %% [markdown]
# The published page asks for `cnn_conv2d0_weight`. **Predict:** is that the same?

# %%
assert "cnn_conv2d0_weight" not in net.collect_params(), "this MXNet counts it as conv, not conv2d"
print([p.name for p in (net[0].weight, net[2].weight)])

# %% [markdown]
# It isn't: in the MXNet that you are using, convolutions of all kinds count as `conv`. A program
# that needs a certain name gives it to the layer.

# %%
named = nn.Sequential(prefix="cnn_")
with named.name_scope():
    named.add(nn.Conv2D(20, kernel_size=3, prefix="conv2d0_"))
print(list(named.collect_params()))

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
# To look at errors without stopping for them: `attempt` prints an error's type and the first
# sentence of what it says.

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
# Another type, `DeferredInitializationError`, and the same for every device, be it one of the two
# or not. It is a kind of `RuntimeError`. So a program that catches `RuntimeError` and concludes
# "not on this device", as two published versions of this lesson do, may be looking at something
# else.

# %%
deferred = gluon.parameter.DeferredInitializationError
assert issubclass(deferred, RuntimeError), "who catches the one catches the other"

# %% [markdown]
# The first forward pass tells the shapes. *Dive into Deep Learning* says of this moment that
# parameters come into being on the devices that data passes through. **Predict:** we send images
# through device 1 *only*. Is there a weight on device 0?

# %%
scores = net(images.as_in_context(two[1]))
print(weight.shape, [a.context for a in weight.list_data()])

# %% [markdown]
# On both, though no data came through device 0. One forward pass anywhere makes *all* replicas, at
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
# one device, whichever it is, and breaks on two unless the current one is among them. Say
# `data(device)` or `list_data()`, and it works everywhere.
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
assert (single.weight.data().asnumpy() == before).all(), "the values have been overwritten"
assert single.weight.list_ctx() == [four[2]], "the parameter has moved"

# %% [markdown]
# With `force_reinit` it starts anew, on the new devices, and the old values are gone for good. To
# move a network to other devices and *keep* its values, there is `reset_ctx`.

# %%
single.initialize(mx.init.One(), ctx=two, force_reinit=True)
assert [a.asnumpy().min() for a in single.weight.list_data()] == [1, 1], "new values, on both"
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
# Two things about the network. The published listing ends in a layer of 128 numbers, for ten
# classes; we add the layer that is missing, and look further down at what happens without it. And
# `cast` makes all parameters float64. `ready` also sends one image through, so that all replicas
# exist.

# %%
def ready(net, places, seed=0):
    net.cast("float64")
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(x[:1].as_in_context(places[0]))
    return net


def lenet(places, seed=0):
    net = cnn()
    with net.name_scope():
        net.add(nn.Dense(10))
    return ready(net, places, seed)


# %% [markdown]
# Splitting is Gluon's `split_and_load` from now on, which does what yours does (chapter 02):

# %%
shards = gluon.utils.split_and_load(x[:8], two)
for theirs, ours in zip(shards, split_and_load(x[:8], two)):
    assert theirs.context == ours.context, "a shard each, in the order of the devices"
    assert (theirs == ours).asnumpy().all(), "Gluon's cut must be ours"
print([(s.shape, s.context) for s in shards])

# %% [markdown]
# It has the same rule about batches that don't divide: uneven shards must be asked for, under the
# name `even_split`. And its error has the numbers in it.

# %%
attempt(lambda: gluon.utils.split_and_load(x[:5], two))
print([len(s) for s in gluon.utils.split_and_load(x[:5], two, even_split=False)])

# %% [markdown]
# The network finds the right replica by itself: an operator runs where its input lives, and Gluon
# passes it the parameters of that device. **Predict:** where will the scores of the two shards be,
# and are they what one device says of the whole batch?

# %%
net = lenet(two)
scores = [net(shard) for shard in shards]
whole = net(x[:8].as_in_context(two[1])).asnumpy()
far = np.abs(np.concatenate([s.asnumpy() for s in scores]) - whole).max()
assert far <= 1e-12 * np.abs(whole).max(), f"{far}: an image's scores depend on where it was sent"
print([(s.shape, s.context) for s in scores])

# %% [markdown]
# Each shard's scores are on the shard's device, and an image gets the same scores wherever it is
# sent, since replicas are equal. (That holds for this network. With BatchNorm it doesn't: chapter
# 09.) Next comes a backward on every device.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()  # a number for each image


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
    far = np.abs(total - truth).max() / np.abs(truth).max()
    assert far <= 1e-12, f"{p.name}: {far:.2g} between the shards' sum and the whole batch"
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
assert [n for n in same if same[n]] == [n for n in same if n.endswith("values")], "values only"

# %% [markdown]
# **Predict** which of the rows are equal on both devices.

# %%
from helpers.plotting import BLUE, ORANGE, figure, show

fig, ax = figure("Values are equal; gradients and images are not", size=(7, 4))
for row, (name, arrays) in enumerate(groups):
    for array in arrays:
        box = {"fc": "white", "ec": BLUE if same[name] else ORANGE, "boxstyle": "round,pad=0.4",
               "ls": "-" if same[name] else "--", "lw": 2}
        text = f"{array.size:,} entries, {'equal' if same[name] else 'different'}"
        ax.text(array.context.device_id, row, text, ha="center", va="center", bbox=box, fontsize=8)
ax.set_yticks(range(len(groups)), list(same))
ax.set_xticks([0, 1], [str(d) for d in two])
ax.set(xlim=(-0.6, 1.6), ylim=(len(groups) - 0.4, -0.6))
show(fig, alt="A map of arrays: on each of two devices, the values of four weights, equal; their "
     "gradients, and 32 images each, different.")

# %% [markdown]
# Nothing lives between the columns: each device has all that it needs for its forward and backward.
# Only to make the orange gradients equal does anything have to cross.
#
# ## What the Trainer does, and what not
#
# A `Trainer` adds the gradients up over devices and updates every replica: the last two steps of
# chapter 04's four. An early edition of *Dive into Deep Learning* has it divide the batch as well.
# It can't: it has no idea that there are images. **Predict:** what if we give the whole batch to
# device 0, and step?

# %% tags=["trains"]
def trainer_of(net, rate=0.2):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})


net = lenet(two)
trainer = trainer_of(net)
forward_backward(net, x[:64], y[:64], two[:1])
attempt(lambda: trainer.step(64))

# %% [markdown]
# A warning, raised as an error: on `cpu(1)` nothing has computed a gradient since the last step.
# The Trainer noticed that; it did not split anything. **Predict:** has the step been taken?

# %% tags=["trains"]
alone = lenet(two[:1])
forward_backward(alone, x[:64], y[:64], two[:1])
trainer_of(alone).step(64)
for p, q in zip(net.collect_params().values(), alone.collect_params().values()):
    assert_replicas_equal([*p.list_data(), q.data().copyto(four[3])])
print("the step was taken, then the error was raised")

# %% [markdown]
# It has, and on *both* devices: the gradients on `cpu(1)` were zero, so the sum was that of the
# whole batch, and the weights are those of one device to the bit. It is just that one device did
# all the work. Splitting is your line.
#
# The whole of a training step then is: split, forward and backward on each device, `step`. It
# divides by the number of examples that you tell it, here 64.

# %% tags=["trains"]
def train(places, net=None, seen=slice(None), **options):
    net, losses = net or lenet(places), []
    trainer = trainer_of(net)
    for start in range(0, len(x), 32):
        batch = [a[start : start + 32][seen] for a in (x, y)]
        losses.append(forward_backward(net, *batch, places))
        trainer.step(32, **options)
    return net, losses


# %% [markdown]
# (`net`, `seen` and `options` are for later: another network, a part of each batch, arguments for
# `step`.) The oracle of chapter 04 again: twenty steps on one device, while the loss falls.

# %% tags=["trains"]
def falls(losses, to=1.0):
    return np.mean(losses[-5:]) < to * np.mean(losses[:5])


reference, losses = train(four[:1])
assert len(losses) == 20 and falls(losses, to=0.9), "compare only while the loss falls"

# %% [markdown]
# As in chapter 04, the distance is the largest difference in any parameter on **any** device, as a
# share of that parameter's largest entry. (`np.max` rather than Python's `max`: a weight that is
# not a number makes the distance not a number, and then it is below no limit.)

# %%
def apart(net, reference):
    pairs = [(replica.asnumpy(), q.data().asnumpy())
             for p, q in zip(net.collect_params().values(), reference.collect_params().values())
             for replica in p.list_data()]
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


# %% [markdown]
# **Predict:** how far off are 2 and 4 devices, and 3, whose shards are of 11, 11 and 10 images?

# %% tags=["trains"]
for k in (2, 3, 4):
    far = apart(train(four[:k])[0], reference)
    assert far < 1e-12, f"{far}: {k} devices must compute what one computes"
print("1, 2, 3 and 4 devices: the same weights to 1e-12 of the largest, on every device")

# %% [markdown]
# That is what chapter 04 took a page of code for. Uneven shards are no problem either: the loss is
# one number for each image, `backward` adds them up, and `step` divides the whole sum once.
#
# ### 128 outputs for ten classes
#
# Back to the layer that the published listing lacks. Does a loss for ten classes fail on 128
# scores? It takes the right class's entry of a softmax; 128 entries serve it as well as ten.
# **Predict** the loss of such a network before it has learned anything, and whether it falls.

# %% tags=["trains"]
published, losses = train(two, ready(cnn(), two))
print(f"ln 128 = {np.log(128):.2f}, ln 10 = {np.log(10):.2f}")
assert abs(losses[0] - np.log(128)) < 0.3, f"{losses[0]:.2f}: it guesses among 128 classes"
assert falls(losses) and np.mean(losses[-5:]) > np.log(10), "it learns, from far behind"

# %% [markdown]
# It trains without complaint, as a classifier of 128 classes of which 118 never occur, and after
# twenty steps it is not yet where the ten-class network *began*. How much does it still believe in
# digits that don't exist?

# %%
beliefs = nd.softmax(published(x[:200].as_in_context(two[0]))).asnumpy()  # [200, 128]
unreal = beliefs[:, 10:].sum(axis=1).mean()  # 118/128 at first, 0 with ten outputs
assert 0.1 < unreal < 118 / 128, f"{unreal:.2f}: less than at first, but still a good part"
print("over a tenth of the probability is still on classes that never occur")

# %% [markdown]
# A loss that falls says that something is learned, not that it is the right thing. The number to
# compare the first loss with, $\ln$ of the number of classes, costs nothing and would have told.
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

# %% tags=["trains"]
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

# %% tags=["trains"]
attempt(lambda: trainer.step(2))
print([w.asnumpy().tolist() for w in net.weight.list_data()])

# %% [markdown]
# It notices, and too late: the weights *have* been changed, by the second image alone. The default
# Trainer updates first, while it sums, and looks for stale gradients afterwards.
#
# And the published loop calls `step` with `ignore_stale_grad=True`, which takes even this error
# away. **Predict** the weights.

# %% tags=["trains"]
net, trainer = tiny([mx.cpu(), mx.cpu()])
trainer.step(2, ignore_stale_grad=True)
assert (net.weight.data().asnumpy() == [[0, -0.5]]).all(), "the first image has vanished"
print(net.weight.data().asnumpy().tolist())

# %% [markdown]
# Half of the data has vanished, without a word. And with real images? If the reasoning is right,
# training on a repeated device must give *exactly* what one device learns from the second half of
# each batch, with its sum divided by the whole batch's 32. **Predict:** does the loss fall?

# %% tags=["trains"]
doubled, losses = train([mx.cpu(), mx.cpu()], ignore_stale_grad=True)
half, _ = train(four[:1], seen=slice(16, None))
assert apart(doubled, half) < 1e-12, "only the last shard of each batch has been learned from"
assert apart(doubled, reference) > 0.01, "and that is not what one device learns from all of it"
assert falls(losses), "nothing in the loss gives it away"
print("a repeated device = the second half of each batch, at half the learning rate")

# %% [markdown]
# It falls. The loop computes all images, learns from half of them, with half the step, and looks
# like a training that is merely slow. This is also the proof that our check can fail: `apart` sees
# what the loss doesn't show.
#
# That is why `helpers.devices` never gives the same device twice, and why our functions refuse such
# a list:

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
# - You split the batch. The Trainer sums gradients, and updates all replicas. Its complaint about
#   an old gradient comes *after* the update.
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
# 1. **Frozen.** Set `grad_req = "null"` for the first layer's parameters. What is there to see in
#    `list_grad`, and does a step on two devices still work?
# 2. **From two to one.** `save_parameters` on two devices, and load on one. Is anything lost? Why
#    not?
# 3. **Adding up.** `grad_req = "add"` adds gradients of several `backward` calls instead of
#    overwriting. Would it cure the repeated device? Try it with `tiny`'s numbers before you look.

# %% [markdown]
# ### Answer 1
#
# A parameter without gradient has none on any device, and `list_grad` raises. The
# Trainer leaves it alone, and the others train as before.

# %% tags=["solution", "trains"]
net = lenet(two)
net[0].collect_params().setattr("grad_req", "null")
attempt(lambda: net[0].weight.list_grad())
trainer, old = trainer_of(net), net[0].weight.data(two[1]).asnumpy()
forward_backward(net, x[:64], y[:64], two)
trainer.step(64)
assert (net[0].weight.data(two[1]).asnumpy() == old).all(), "frozen on every device"
assert_replicas_equal(net[2].weight.list_data())

# %% [markdown]
# ### Answer 2
#
# Replicas are equal, so one of them is all there is to save. (Chapter 09 has layers
# for which that isn't so.)

# %% tags=["solution"]
import os
import tempfile


def identical():
    pairs = zip(net.collect_params().values(), other.collect_params().values())
    return all((p.data(two[1]).asnumpy() == q.data().asnumpy()).all() for p, q in pairs)


other = lenet(four[3:], seed=1)
assert not identical(), "another seed makes other weights"
with tempfile.TemporaryDirectory() as folder:
    net.save_parameters(os.path.join(folder, "lenet.params"))
    other.load_parameters(os.path.join(folder, "lenet.params"), ctx=four[3:])
assert identical(), "one replica is all there is to save"

# %% [markdown]
# ### Answer 3
#
# The replica that both shards use then holds the sum of their gradients, and the
# other one adds its zeros, so the step is right. But only the first: gradients must now be set to
# zero by hand before each step, or the old ones count again. The Trainer still has to be told to
# ignore the replica that is never used. And there is still only one device to do the work.

# %% tags=["solution", "trains"]
net = nn.Dense(1, use_bias=False, in_units=2)
net.collect_params().setattr("grad_req", "add")
net.initialize(mx.init.Zero(), ctx=[mx.cpu(), mx.cpu()])
trainer = trainer_of(net, rate=1)
for weights in ([[-0.5, -0.5]], [[-1.5, -1.5]]):  # right would be -0.5, then -1
    with autograd.record():
        losses = [net(nd.array([row])).sum() for row in ([1, 0], [0, 1])]
    for loss in losses:
        loss.backward()
    trainer.step(2, ignore_stale_grad=True)
    assert (net.weight.data().asnumpy() == weights).all(), "both images, but the old ones again"
