# %% [markdown]
# # 05 · Gluon on several devices
#
# In chapter 04 you made the replicas yourself, and summed their gradients. Gluon, MXNet's
# high-level interface, keeps the replicas for you. Here the same network is trained in Gluon, from
# the same weights, to the same result. Then we look at what Gluon holds on each device, and at
# mistakes that it reports late or not at all.
#
# ## What you'll do
#
# Take twenty steps in Gluon on 1 to 4 devices, equal to the loop by hand. Compare values and
# gradients across devices. Break the training in three ways; one raises no error.
#
# ## What you'll learn
#
# - `initialize` on a list of devices, `data`, `grad`, `list_data`, `list_grad`;
# - when parameters are created, and what happens if you ask too early or on another device;
# - what a `Trainer` does, and what remains your job;
# - what happens to a device that gets no data, or is named twice.
#
# ## What you need
#
# Chapters 01 to 04. No GPU. Reading takes {reading time}, running well under a minute.

# %%
from helpers import allreduce, assert_replicas_equal, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

four = [mx.cpu(r) for r in range(4)]
two = four[:2]

# %% [markdown]
# ## From chapter 04 to Gluon
#
# Here is chapter 04's network, and its training step without comments.

# %%
def pool(h):
    return nd.Pooling(nd.relu(h), pool_type="avg", kernel=(2, 2), stride=(2, 2))


def lenet(x, replica):  # x: [n, 1, 28, 28]
    w1, b1, w2, b2, w3, b3, w4, b4 = replica
    h = pool(nd.Convolution(x, w1, b1, kernel=(3, 3), num_filter=20))  # [n, 20, 13, 13]
    h = pool(nd.Convolution(h, w2, b2, kernel=(5, 5), num_filter=50))  # [n, 50, 4, 4]
    h = nd.relu(nd.dot(h.flatten(), w3) + b3)  # [n, 128]
    return nd.dot(h, w4) + b4  # [n, 10]

# %%
def loss_sum(x, y, replica):
    log_probabilities = nd.log_softmax(lenet(x, replica))
    return -log_probabilities.pick(y).sum()


def train_batch(x, y, replicas, devices, lr, reduce=allreduce):
    x_shards = split_and_load(x, devices, even=False)
    y_shards = split_and_load(y, devices, even=False)

    losses = []
    with autograd.record():
        for x_shard, y_shard, replica in zip(x_shards, y_shards, replicas):
            losses.append(loss_sum(x_shard, y_shard, replica))
    for loss in losses:
        loss.backward()

    for number in range(len(replicas[0])):
        reduce([replica[number].grad for replica in replicas])

    for replica in replicas:
        for param in replica:
            param -= lr / len(x) * param.grad

    total = 0
    for loss in losses:
        total = total + loss.as_in_context(devices[0])
    return total / len(x)

# %% [markdown]
# In Gluon the network is a list of layers. Gluon works out their input sizes from the first image.

# %%
def network():
    net = nn.Sequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.AvgPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.AvgPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net

# %% [markdown]
# | by hand | in Gluon |
# | --- | --- |
# | `get_params` for each device | `net.initialize(ctx=[...])` |
# | the copies of one parameter, `zip(*replicas)` | `p.list_data()`, or `p.data(device)` for one |
# | their gradients, `p.grad` of each | `p.list_grad()`, or `p.grad(device)` |
# | `lenet(x, replica)` | `net(x)`, which finds the replica by where `x` is |
# | `split_and_load` | `gluon.utils.split_and_load`; you still call it yourself |
# | `allreduce`, then the update | `trainer.step(n)` |
#
# ### The same weights
#
# A start for both, as chapter 04 makes it, in float64, so that rounding can't hide anything:

# %%
shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
rng = np.random.default_rng(0)
start = []
for shape, gain in zip(shapes[::2], (1.0, 1.5, 1.5, 0.5)):
    inputs = shape[0] if len(shape) == 2 else np.prod(shape[1:])
    start.append(gain * np.sqrt(2 / inputs) * rng.standard_normal(shape))
    start.append(np.zeros(shape[1] if len(shape) == 2 else shape[0]))  # a bias for each output

# %% [markdown]
# `set_data` gives a value to a parameter on all of its devices. One thing to know: Gluon's `Dense`
# keeps its weight as [outputs, inputs], the transpose of ours. `cast` makes all parameters
# float64.

# %%
def ready(devices):
    net = network()
    net.cast("float64")
    net.initialize(ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype="float64"))  # now all shapes are known
    for p, value in zip(net.collect_params().values(), start, strict=True):
        p.set_data(nd.array(value.T if value.ndim == 2 else value, dtype="float64"))
    return net

# %% [markdown]
# 640 images, in twenty batches of 32:

# %% tags=["measured"]
data = load_data("mnist", limit=640)
pixels = data.train_images[:640].astype("float64")
x, y = nd.array(pixels - pixels.mean(), dtype="float64"), nd.array(data.train_labels[:640])
print(data)

# %% [markdown]
# ### The same training
#
# A `Trainer` gets the parameters and the optimizer. `step(n)` sums the gradients over the devices,
# divides by the number of examples `n` that you tell it, and updates all replicas. (The update
# gets the rate and 1/n in float32, where 0.25 and 1/32 are exact, and 0.2 and 1/30 are not.) By
# default the sum is formed in a store, and `p.list_grad()` still shows each device's own gradient
# (chapter 07).

# %% tags=["trains"]
softmax = gluon.loss.SoftmaxCrossEntropyLoss()  # a number for each image


def forward_backward(net, x, y, devices):
    xs = gluon.utils.split_and_load(x, devices, even_split=False)
    ys = gluon.utils.split_and_load(y, devices, even_split=False)
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(xs, ys)]
    for loss in losses:
        loss.backward()
    return sum(loss.asnumpy().sum() for loss in losses) / len(x)  # waits: right for a proof, slow


def train(net, devices, rate=0.25, **options):
    trainer, losses = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate}), []
    for i in range(0, len(x), 32):
        losses.append(forward_backward(net, x[i : i + 32], y[i : i + 32], devices))
        trainer.step(32, **options)
    return losses


# %% tags=["trains"]
net = ready(two)
losses = train(net, two)
assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5]), "the loss falls"

# %% [markdown]
# It trains. Is it chapter 04's training? The loop by hand on *one* device, with the same batches,
# is our oracle. The distance is the largest difference in any parameter on **any** device, as a
# share of that parameter's largest entry. (`np.max`, unlike Python's `max`, doesn't pass over a
# NaN.)

# %% tags=["trains"]
by_hand = [nd.array(value, dtype="float64") for value in start]
for p in by_hand:
    p.attach_grad()
told = []
for i in range(0, len(x), 32):
    loss = train_batch(x[i : i + 32], y[i : i + 32], [by_hand], four[:1], lr=0.25)
    told.append(loss.asscalar())
reference = [p.asnumpy().T if p.ndim == 2 else p.asnumpy() for p in by_hand]


def apart(net, reference):
    return np.max([np.abs(replica.asnumpy() - value).max() / np.abs(value).max()
                   for p, value in zip(net.collect_params().values(), reference, strict=True)
                   for replica in p.list_data()])

# %% [markdown]
# **Predict:** how far off are 1, 2 and 4 devices, and 3, whose shards are of 11, 11 and 10 images?

# %% tags=["trains"]
for k in (1, 2, 3, 4):
    net = ready(four[:k])
    assert np.allclose(train(net, four[:k]), told, rtol=1e-12, atol=0), "other losses"
    assert apart(net, reference) < 1e-12, f"{k} devices: {apart(net, reference)}"
print("Gluon on 1 to 4 devices = the loop by hand on one, to 1e-12, on every device")

# %% [markdown]
# Uneven shards are no problem, since `step` divides the sum once.
#
# ## What is on each device
#
# A *parameter* is a set of arrays, one for each device. **Predict:** after a backward pass on two
# devices, are the two *values* of a parameter equal? Are the two *gradients*?

# %%
net, alone = ready(two), ready(two[:1])
for trained, devices in ((net, two), (alone, two[:1])):
    forward_backward(trained, x[:64], y[:64], devices)
for p, q in zip(net.collect_params().values(), alone.collect_params().values()):
    assert_replicas_equal(p.list_data())
    a, b = (g.asnumpy() for g in p.list_grad())
    whole = q.grad().asnumpy()
    assert np.abs(a - b).max() > 0.01 * np.abs(a).max(), f"{p.name}: each saw another shard"
    assert np.abs(a + b - whole).max() < 1e-12 * np.abs(whole).max(), f"{p.name}: not the sum"
print("values equal, gradients different; their sum is the gradient of one device")

# %% [markdown]
# The scores, too, are where the shard is, and don't depend on the device. (With BatchNorm it
# matters which shard an image is in: chapter 09.)

# %%
shards = gluon.utils.split_and_load(x[:8], two)
scores = [net(shard) for shard in shards]
assert [s.context for s in scores] == two, "scores are where their images are"
together = net(x[:8].as_in_context(two[1])).asnumpy()
far = np.abs(np.concatenate([s.asnumpy() for s in scores]) - together).max()
assert far < 1e-12 * np.abs(together).max(), "an image's scores depend on where it was sent"

# %% [markdown]
# ## Before the first image
#
# `attempt` prints an error's type and first sentence, with `#` for numbers in names. Between
# `initialize` and the first forward pass, a parameter without a known shape has no arrays. Gluon
# *defers* its initialisation. **Predict:** which of these raise?

# %%
import re


def attempt(what):
    try:
        print("no error:", what())
    except Exception as error:
        said = re.sub(r"(conv|dense)\d+(?=_)", r"\1#", str(error)).split(". ")[0].rstrip(".")
        print(f"{type(error).__name__}: {said}")


net = network()
weight = net[0].weight
attempt(lambda: weight.data())
net.initialize(ctx=two)
attempt(lambda: weight.data(two[0]))
attempt(lambda: weight.data(four[3]))
attempt(lambda: (weight.shape, weight.list_ctx()))

# %% [markdown]
# All but the last. Before `initialize` it is a `RuntimeError`; afterwards, for any device, a
# `DeferredInitializationError`. The second is a kind of the first. *Dive into Deep Learning*
# catches `RuntimeError` and prints "not initialized on cpu". After a forward pass that message is
# right. Before one, they would print it even where the parameter is only deferred.
#
# The same page says that parameters are created on the devices that data passes through.
# **Predict:** we send images through device 1 only. Is there a weight on device 0?

# %%
net(nd.ones((4, 1, 28, 28), ctx=two[1]))
print(weight.shape, [a.context for a in weight.list_data()])
for p in net.collect_params().values():
    assert_replicas_equal(p.list_data())
assert weight.data(two[0]).asnumpy().std() > 0.01, "random, so equality proves something"

# %% [markdown]
# Yes: a forward pass on either device creates *both* replicas, with the same values. From now on
# asking for another device is an error of the first type.

# %%
attempt(lambda: weight.data(four[3]))
attempt(lambda: net(nd.ones((4, 1, 28, 28), ctx=four[3])))

# %% [markdown]
# **On GPUs:** the same. Python decides when to initialise and which replica to use
# (`gluon/parameter.py`); it infers each layer's shapes from the layer's symbol
# (`HybridBlock._infer_attrs` in `gluon/block.py`). The initial value is computed once, on the CPU,
# and copied to each device (`Parameter._finish_deferred_init` and `_init_impl`, MXNet 1.9.1).
#
# ## What remains your job
#
# An early edition of *Dive into Deep Learning* (2018, "Gluon Implementation for Multi-GPU
# Computation") says that the Trainer divides the batch. It can't: it sees parameters, not images.
# **Predict:** what happens if we give the whole batch to device 0, and call `step`?

# %% tags=["trains"]
net = ready(two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25},
                        update_on_kvstore=True)  # the default on several devices
forward_backward(net, x[:64], y[:64], two[:1])
attempt(lambda: trainer.step(64))

# %% [markdown]
# On `cpu(1)` no gradient has been computed, and the Trainer says so. (MXNet *raises* it, despite
# its name.) **Predict:** has the step been taken?

# %% tags=["trains"]
alone = ready(two[:1])
forward_backward(alone, x[:64], y[:64], two[:1])
gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 0.25}).step(64)
for p, q in zip(net.collect_params().values(), alone.collect_params().values()):
    assert_replicas_equal([*p.list_data(), q.data().copyto(four[3])])
assert net[0].bias.data(two[1]).asnumpy().any(), "biases start at 0, and have changed"
print("the step was taken, on both devices, and then the error was raised")

# %% [markdown]
# The gradients on `cpu(1)` were still the zeros of the beginning, so the sum was right by luck.
# The error comes as long as a parameter's replica has *never* received a gradient. **Predict:**
# both devices get data once, then only device 0. Does `step` complain? Is the result that of one
# device?

# %% tags=["trains"]
def two_steps(net, second, **options):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25}, **options)
    for devices in (net[0].weight.list_ctx(), second):
        forward_backward(net, x[:64], y[:64], devices)
        trainer.step(64)
    return net


stale = two_steps(ready(two), two[:1], update_on_kvstore=True)  # the default, again
one = two_steps(ready(two[:1]), two[:1])
values = [p.data().asnumpy() for p in one.collect_params().values()]
old = [p.grad(two[1]).asnumpy() for p in stale.collect_params().values()]  # from the first step
assert apart(stale, values) > 1e-3, "not what one device computes"
added = [v - 0.25 / 64 * g for v, g in zip(values, old)]
assert apart(stale, added) < 1e-12, "one device's weights, with cpu(1)'s old gradient added"
print("no error, and the old gradient was added once more")

# %% [markdown]
# The old gradient of `cpu(1)` was summed again, as in chapter 02. `backward` marks a replica as
# having a fresh gradient. If the devices update, `step` clears the mark. If the store updates, as
# is the default on several devices (except with sparse gradients or `MXNET_UPDATE_ON_KVSTORE=0`),
# nothing clears it (`Trainer._update` in `gluon/trainer.py`). So `update_on_kvstore=False`
# complains, and *before* it changes a weight:

# %% tags=["trains"]
net, first = ready(two), ready(two[:1])
attempt(lambda: two_steps(net, two[:1], update_on_kvstore=False))
forward_backward(first, x[:64], y[:64], two[:1])
gluon.Trainer(first.collect_params(), "sgd", {"learning_rate": 0.25}).step(64)
after_one = [p.data().asnumpy() for p in first.collect_params().values()]
assert apart(net, after_one) < 1e-12, "the weights of the first step, unchanged by the second"

# %% [markdown]
# Either way, every device needs a new gradient in every step; one without data needs zeros from
# `backward` (chapter 06).
#
# ### One device, named twice
#
# MXNet's tutorial names one device twice on a machine with fewer than two GPUs: `[gpu(), gpu()]`
# where there is one, `[cpu(), cpu()]` where there is none. To follow the numbers by hand: two
# weights $w = (0, 0)$, the images (1, 0) and (0, 1), and the output $w \cdot x$ as the loss, so
# that the gradient of an image is the image. On two devices, `step(2)` at rate 1 should give $w =
# -\frac12$ in both entries.

# %% tags=["trains"]
def tiny(devices, together=False, **options):
    net = nn.Dense(1, use_bias=False, in_units=2)
    net.initialize(mx.init.Zero(), ctx=devices)
    shards = gluon.utils.split_and_load(nd.array([[1, 0], [0, 1]]), devices)
    with autograd.record():
        losses = [net(shard).sum() for shard in shards]
    for some in [losses] if together else losses:
        autograd.backward(some)
    print([g.asnumpy().tolist() for g in net.weight.list_grad()])
    gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}).step(2, **options)
    return net


assert (tiny(two).weight.data().asnumpy() == -0.5).all(), "minus the mean of both images"

# %% [markdown]
# **Predict:** the same device twice. How many replicas are there, and what is in their gradients?
# Does `step` notice?

# %% tags=["trains"]
attempt(lambda: tiny([mx.cpu(), mx.cpu()]))
net = tiny([mx.cpu(), mx.cpu()], ignore_stale_grad=True)
print("with ignore_stale_grad=True:", net.weight.data().asnumpy().tolist())
assert (net.weight.data().asnumpy() == [[0, -0.5]]).all(), "the first image has been lost"

# %% [markdown]
# Two replicas on one device. But a shard finds its replica by its device, so both used the same
# one. Each loss had its own `backward`, and the second gradient overwrote the first; one
# `autograd.backward(losses)` writes their sum. The tutorial's loop calls `step` with
# `ignore_stale_grad=True`, which hides the error. With real images the loss falls all the same:

# %% tags=["trains"]
net = tiny([mx.cpu(), mx.cpu()], together=True, ignore_stale_grad=True)
assert (net.weight.data().asnumpy() == -0.5).all(), "one backward for both losses: their sum"
twice = ready([mx.cpu(), mx.cpu()])
losses = train(twice, [mx.cpu(), mx.cpu()], ignore_stale_grad=True)
assert np.mean(losses[-5:]) < np.mean(losses[:5]), "the loss falls"
assert apart(twice, reference) > 0.01, "but these are not one device's weights"
attempt(lambda: split_and_load(x[:8], [mx.cpu(), mx.cpu()]))

# %% [markdown]
# The last line is ours: our functions refuse such a list.

# %% [markdown]
# ## Appendix: more quirks, and listings that no longer run
#
# | you write | what happens in MXNet 1.9.1 |
# | --- | --- |
# | `weight.data()`, several replicas | the one on the *current context*, or an error |
# | `weight.data()`, one replica | that one, wherever it is |
# | `initialize` a second time | a warning and nothing else |
# | the same while deferred | takes the new devices, without a word |
# | `initialize(…, force_reinit=True)` | starts anew, on the new devices |
# | `reset_ctx(devices)` | puts the *mean* of the replicas on each new device |
# | `nn.Dense(3)` twice | `dense0_weight`, then `dense1_weight`: use `layer.weight` |

# %%
import warnings

away = nn.Dense(3, in_units=2)  # with its input size known, nothing is deferred
away.initialize(ctx=four[1:3])
attempt(lambda: away.weight.data())
with four[2]:
    assert away.weight.data().context == four[2], "the current context's"
single = nn.Dense(3, in_units=2)
single.initialize(mx.init.Zero(), ctx=four[2])
assert single.weight.data().context == four[2], "the only one"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    single.initialize(mx.init.One(), ctx=two)
assert said and single.weight.data().asnumpy().max() == 0, "a warning, no new values"
assert single.weight.list_ctx() == [four[2]], "and no new devices"
single.initialize(mx.init.One(), ctx=two, force_reinit=True)
assert single.weight.list_ctx() == two and single.weight.data().asnumpy().min() == 1, "anew"

# %%
late = nn.Dense(3, use_bias=False)  # its input size is open, so it is deferred
late.initialize(ctx=two)
with warnings.catch_warnings():
    warnings.simplefilter("error")  # without a word
    late.initialize(ctx=four)
assert late.weight.list_ctx() == four, "the new devices"
single.weight.data(two[0])[:] = nd.array([[1, 2], [3, 4], [5, 6]])
single.weight.data(two[1])[:] = 3 * nd.array([[1, 2], [3, 4], [5, 6]], ctx=two[1])
single.collect_params().reset_ctx(four[1:])
for a in single.weight.list_data():
    assert a.asnumpy().ravel().tolist() == [2, 4, 6, 8, 10, 12], "the mean of the two replicas"
numbers = [int(re.search(r"\d+", layer.name)[0]) for layer in (away, single)]
assert numbers[1] == numbers[0] + 1, "names are numbered in the order of creation"

# %% [markdown]
# The lessons on which this course builds are from 2017 to 2022. What breaks when copies of them
# are pasted:
#
# | in the listing | what you get | instead |
# | --- | --- | --- |
# | `import utils` (2017) | no such module | chapter 04's own functions |
# | `import gluonbook as gb` (2018) | no such module | `from d2l import mxnet as d2l` |
# | `gluon.autograd.record()` (2017) | no such attribute | `from mxnet import autograd` |
# | `"cnn_conv2d0_weight"` (2017) | no such parameter | `net[0].weight` |
# | `d2l.try_all_gpus()` (1.0, no GPU) | `[]`, a division by zero | `helpers.devices()` |

# %%
attempt(lambda: gluon.autograd)
prefixed = nn.Sequential(prefix="cnn_")
with prefixed.name_scope():
    prefixed.add(nn.Conv2D(20, kernel_size=3))
attempt(lambda: prefixed.collect_params()["cnn_conv2d0_weight"])
assert prefixed[0].weight.name == "cnn_conv0_weight", "the line that mends it"
attempt(lambda: gluon.utils.split_and_load(x[:4], []))

# %% [markdown]
# ## Summary
#
# - The same weights and batches give the same training in Gluon and by hand: twenty steps on 1 to
#   4 devices agree with one device to $10^{-12}$ in float64.
# - `initialize(ctx=[...])` makes one replica for each device, all equal, at the first forward pass
#   if shapes are open. Values are equal on all devices; gradients are those of each shard, and
#   their sum is the gradient of the batch.
# - You split the batch. The Trainer sums the gradients and updates all replicas.
# - On several devices, the default Trainer notices only a replica that has *never* received a
#   gradient, and raises after the update. Later, a device without data adds its old gradient in
#   silence.
# - A device named twice uses one replica only; with a `backward` for each loss, only its last shard
#   counts. `ignore_stale_grad=True` hides it.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*; *The Straight
# Dope*, "Training on multiple GPUs with gluon"; *Dive into Deep Learning*, "Concise Implementation
# for Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **Frozen.** Set `grad_req = "null"` for the first layer's parameters. What does `list_grad`
#    say, and does a step on two devices still work?
# 2. **Adding up.** `grad_req = "add"` adds the gradients of several `backward` calls. Would it
#    give the right weights when a device is named twice? Try two steps with `tiny`'s numbers.
# 3. **A check of your own.** Write two functions, one called before the backward pass and one
#    before `step`, that notice a device without data in *this* step. What is no fault?

# %% [markdown]
# ### Answer 1
#
# A frozen parameter has no gradient on any device, and `list_grad` raises. The Trainer leaves it
# alone; the others train.

# %% tags=["solution", "trains"]
net = ready(two)
net[0].collect_params().setattr("grad_req", "null")
attempt(lambda: net[0].weight.list_grad())
old = [p.data(two[1]).asnumpy() for p in net.collect_params().values()]
train(net, two)
same = [(p.data(two[1]).asnumpy() == q).all() for p, q in zip(net.collect_params().values(), old)]
assert same == [True] * 2 + [False] * 6, "the first layer is frozen, the others train"
assert_replicas_equal(net[2].weight.list_data())

# %% [markdown]
# ### Answer 2
#
# In the first step, yes: the replica that both shards use holds the sum of their gradients, the
# other adds its zeros. In the second step the old gradients count again, unless they are set to
# zero by hand. And there is still only one device to do the work.

# %% tags=["solution", "trains"]
net = nn.Dense(1, use_bias=False, in_units=2)
net.collect_params().setattr("grad_req", "add")
net.initialize(mx.init.Zero(), ctx=[mx.cpu(), mx.cpu()])
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}, update_on_kvstore=True)
for weights in ([[-0.5, -0.5]], [[-1.5, -1.5]]):  # right would be -0.5, then -1
    with autograd.record():
        losses = [net(nd.array([row])).sum() for row in ([1, 0], [0, 1])]
    for loss in losses:
        loss.backward()
    trainer.step(2, ignore_stale_grad=True)
    assert (net.weight.data().asnumpy() == weights).all(), "both images, and the old ones again"

# %% [markdown]
# ### Answer 3
#
# Clear the marks before the backward pass and look at them before `step`. A device without data,
# and a branch of the network that this batch didn't take, keep an old gradient, which the default
# Trainer adds again: both are faults. An uneven shard, a frozen parameter, which has no gradient,
# and an embedding's unreached rows, which are written as zeros, are not.

# %% tags=["solution"]
def marked(net):  # the replicas that get a gradient
    return [a for p in net.collect_params().values() if p.grad_req != "null" for a in p.list_data()]


def forget(net):
    for a in marked(net):
        a._fresh_grad = False


def check(net):
    assert all(a._fresh_grad for a in marked(net)), "a replica without a new gradient"

# %% tags=["solution"]
class Branches(nn.Block):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 2)
        self.left, self.right = (nn.Dense(1, in_units=2) for _ in range(2))

    def forward(self, x, both):
        return self.right(self.words(x)) + (self.left(self.words(x)) if both else 0)


def is_noticed(sizes, both=True, word=0):  # images for each device, all of them this word
    forget(net)
    with autograd.record():
        losses = [net(nd.full(n, word, ctx=d), both).sum() for n, d in zip(sizes, two) if n]
    autograd.backward(losses)
    try:
        check(net)
    except AssertionError:
        return True
    return False


net = Branches()
net.initialize(ctx=two)
assert not is_noticed((2, 1), word=1) and not is_noticed((2, 1)), "an uneven shard, unreached rows"
rows = net.words.weight.grad(two[0]).asnumpy().any(axis=1)
assert rows.tolist() == [True] + 8 * [False], "row 1, reached before, was written as zeros"
assert is_noticed((2, 0)) and is_noticed((0, 2)), "no data"
assert is_noticed((2, 2), both=False), "a branch not taken"
net.left.collect_params().setattr("grad_req", "null")
assert not is_noticed((2, 2)), "a frozen parameter"
