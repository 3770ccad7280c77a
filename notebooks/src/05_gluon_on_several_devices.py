# %% [markdown]
# # 05 · Gluon on several devices
#
# In chapter 04 you made replicas, summed their gradients and updated them. Gluon, MXNet's
# high-level interface, does that for you. You still cut the batch:
#
# | by hand (chapter 04) | in Gluon |
# | --- | --- |
# | `get_params`, once for each device | `net.initialize(ctx=devices)` |
# | `split_and_load` | `gluon.utils.split_and_load` |
# | `lenet(x_shard, replica)` | `net(x_shard)`: the replica on the shard's device |
# | `loss.backward()` | `loss.backward()` |
# | `allreduce`, then the update of each replica | `trainer.step(n)`, `n` images in the batch |
#
# A Gluon `Parameter` is not one array. It has a value and a gradient on each device:
#
# ![cpu(0) has the image 2, cpu(1) the image 20. One Parameter spans both devices: its values are
# 100 and 100, list_data(); its gradients 2 and 20, list_grad(). Below, step(2) makes both values
# 100 minus 22 / 2 = 89.](src/drawings/gluon_parameter.svg)
#
# ## What you'll do
#
# Follow one weight through a step on two devices, train chapter 04's network to the same weights,
# and make two mistakes that `Trainer` notices late, or not at all.
#
# ## What you'll learn
#
# - what a `Parameter` holds on each device, and what a `Trainer` does;
# - what becomes of a device without images, and of one that is named twice.
#
# ## What you need
#
# Chapters 01 to 04. No GPU. Reading takes {reading time}, running half a minute.

# %%
import helpers
from helpers import by_hand
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]  # simulated: we test results, not speed
pair = four[:2]

# %% [markdown]
# ## One weight on two devices
#
# What does Gluon put on each device? We take the network of the picture: one input, one output,
# no bias, so one weight. It starts at 100. `initialize` gets a *list* of devices.

# %%
net = nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.Constant(100), ctx=pair)


def print_replicas(weight):
    for value, grad in zip(weight.list_data(), weight.list_grad()):
        print(value.context, "value", value[0, 0].asscalar(), "gradient", grad[0, 0].asscalar())


print_replicas(net.weight)

# %% [markdown]
# One Parameter, and on each device a value and a gradient, which is still 0. (Each is a matrix of
# one entry, hence `[0, 0]`.) The batch has two "images", the numbers 2 and 20. Gluon's
# `split_and_load` cuts it as ours does (chapter 02).

# %%
x = nd.array([[2], [20]])
x_shards = gluon.utils.split_and_load(x, pair)

for x_shard in x_shards:
    print(x_shard.context, "image", x_shard[0, 0].asscalar())

# %% [markdown]
# Now forward and backward. `net` is called for each shard, and finds the replica by the shard's
# device. Its output, weight · image, is our loss, so the gradient is the image itself.
# **Predict:** after `backward`, are the two values equal? Are the two gradients?

# %%
losses = []
with autograd.record():
    for x_shard in x_shards:
        losses.append(net(x_shard))
for loss in losses:
    loss.backward()

print_replicas(net.weight)

# %% [markdown]
# The values are equal. Each gradient is that of the device's own shard.
#
# The sum and the update are left to a `Trainer`. It gets the parameters, the name of an optimizer
# and its settings. `step(n)` adds the gradients of all devices, divides the sum by `n`, and updates
# every replica. **Predict** the new values at rate 1.

# %%
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
trainer.step(2)  # two images

print_replicas(net.weight)

# %% [markdown]
# 100 − (2 + 20) / 2 = 89, on both devices. The gradients are as they were: by default, the sum is
# made elsewhere, in a *store* (chapter 07).
#
# **Keep this:** values are equal on all devices, gradients are those of the shards after
# `backward`, and `step` divides their sum by the number that you tell it.
#
# We need these lines again, as two functions:

# %%
def one_weight_net(devices):
    net = nn.Dense(1, in_units=1, use_bias=False, prefix="")  # so the weight's name is "weight"
    net.initialize(mx.init.Constant(100), ctx=devices)
    return net


def backward_on_each(net, x_shards):
    losses = []
    with autograd.record():
        for x_shard in x_shards:
            losses.append(net(x_shard))
    for loss in losses:
        loss.backward()

# %% tags=["fold", "trains"]
# check: the numbers of the picture, before and after the step, made by the functions
net = one_weight_net(pair)
backward_on_each(net, x_shards)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [100, 100], "values before"
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [2, 20], "gradients before"
gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}).step(2)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [89, 89], "values after"
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [2, 20], "gradients after"

# %% [markdown]
# ## LeNet in Gluon
#
# Is this the training of chapter 04? Here is its network as a list of layers. Each is told only how
# many outputs or channels it makes.

# %%
def layers_of_lenet():
    net = nn.Sequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"))  # [n, 20, 26, 26]
    net.add(nn.AvgPool2D(pool_size=2, strides=2))  # [n, 20, 13, 13]
    net.add(nn.Conv2D(50, kernel_size=5, activation="relu"))  # [n, 50, 9, 9]
    net.add(nn.AvgPool2D(pool_size=2, strides=2))  # [n, 50, 4, 4]
    net.add(nn.Dense(128, activation="relu"))  # flattens to [n, 800], then [n, 128]
    net.add(nn.Dense(10))  # [n, 10]
    return net

# %% [markdown]
# How many inputs does a layer have? Gluon finds out from the first images. One image passes through
# `cpu(1)`. A size that isn't known yet is shown as 0. **Predict:** is there a weight on `cpu(0)`
# afterwards?

# %%
net = layers_of_lenet()
net.initialize(ctx=pair)
weight = net[4].weight  # of the first dense layer
print("before:", weight.shape)

net(nd.ones((1, 1, 28, 28), ctx=pair[1]))
for value in weight.list_data():
    print("after: ", value.shape, value.context)

# %% [markdown]
# Before, there were no arrays yet. A forward pass on *any* device makes the replicas
# on *all* of them, with the same random values.

# %% tags=["fold"]
# check: no array before; then all eight parameters are on both devices, equal and random
for device in pair:
    net = layers_of_lenet()
    net.initialize(ctx=pair)
    try:
        net[4].weight.data(device)
    except gluon.parameter.DeferredInitializationError:
        net(nd.ones((1, 1, 28, 28), ctx=device))
    else:
        raise RuntimeError("there should be no array before the first image")
    params = list(net.collect_params().values())
    assert len(params) == 8
    for param in params:
        assert param.list_ctx() == pair, "not on both devices"
        helpers.assert_replicas_equal(param.list_data())
    assert net[4].weight.data(pair[0]).asnumpy().std() > 0.01, "random, or equality shows nothing"

# %% [markdown]
# ### From the same weights
#
# Now the network gets the weights with which chapter 04 began. `set_data` writes a value into all
# replicas of a parameter. Gluon has the same eight arrays in the same order. One thing differs: its
# dense layers keep their weights as [outputs, inputs], the transpose of ours. `cast` makes all
# parameters float64, so that rounding stays small.

# %%
def lenet_on(devices):
    net = layers_of_lenet()
    net.cast("float64")
    net.initialize(ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype="float64"))  # now all shapes are known

    for param, value in zip(net.collect_params().values(), by_hand.init_params()):
        if value.ndim == 2:  # the weight of a dense layer
            value = value.T
        param.set_data(value)
    return net


net = lenet_on(pair)
print("the first dense layer's weight:", net[4].weight.shape)

# %% [markdown]
# By hand it is [800, 128]. The data: 640 images, in twenty batches of 32.

# %% tags=["measured"]
data = helpers.load_data("mnist", limit=640)
print(data)
images = nd.array(data.train_images - data.train_images.mean(), dtype="float64")
labels = nd.array(data.train_labels)

batches = []
for begin in range(0, 640, 32):
    batches.append((images[begin : begin + 32], labels[begin : begin + 32]))

# %% [markdown]
# ### The same training
#
# What should come out? The weights of chapter 04's loop by hand, on *one* device.
# (`helpers.by_hand` has its functions.)

# %% tags=["measured", "trains"]
weights_by_hand = by_hand.get_params(by_hand.init_params(), four[0], "float64")
losses_by_hand = []
for x, y in batches:  # changes weights_by_hand in place
    loss = by_hand.train_batch(x, y, [weights_by_hand], [four[0]], lr=0.125)
    losses_by_hand.append(loss.asscalar())

print(f"mean loss of the first five steps {np.mean(losses_by_hand[:5]):.2f}, "
      f"of the last five {np.mean(losses_by_hand[-5:]):.2f}")

# %% [markdown]
# Here is the same step in Gluon. The loss function gives a number for each image, and `backward`
# takes the gradient of their sum. We try it with the first batch.

# %% tags=["trains"]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def lenet_step(net, trainer, x, y, devices):
    x_shards = gluon.utils.split_and_load(x, devices, even_split=False)  # perhaps uneven
    y_shards = gluon.utils.split_and_load(y, devices, even_split=False)

    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    for loss in losses:
        loss.backward()

    trainer.step(len(x))
    return losses


net = lenet_on(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
x, y = batches[0]
losses = lenet_step(net, trainer, x, y, pair)
for loss in losses:
    print(loss.context, "losses of", len(loss), "images")

# %% [markdown]
# To compare weights, we bring Gluon's parameters into chapter 04's form: for each device a list of
# eight arrays. `param.data(device)` is the value on one device.

# %%
def as_by_hand(net, devices):
    replicas = []
    for device in devices:
        replica = []
        for param in net.collect_params().values():
            value = param.data(device)
            if value.ndim == 2:
                value = value.T  # as by hand: [inputs, outputs]
            replica.append(value)
        replicas.append(replica)
    return replicas

# %% [markdown]
# Now twenty steps, on 1 to 4 devices. `largest_difference` compares each replica with the weights
# by hand, and says where they differ most. **Predict:** are 3 devices further off than 2? Their
# shards have 11, 11 and 10 images.

# %% tags=["measured", "trains"]
def train_in_gluon(devices):
    net = lenet_on(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for x, y in batches:
        lenet_step(net, trainer, x, y, devices)
    return net


for k in [1, 2, 3, 4]:
    net = train_in_gluon(four[:k])
    difference = largest_difference(as_by_hand(net, four[:k]), weights_by_hand)
    print(f"{k} devices: {difference}")
    assert difference < 1e-12

# %% [markdown]
# All are within $10^{-12}$, uneven shards or not: `step` divides the *sum* over all devices once,
# by
# 32. (`Trainer` hands the rate and 1/32 on in float32. Both are exact there; 0.2 wouldn't be.)
#
# **Keep this:** the same weights and batches give the same training, by hand and in Gluon.

# %% tags=["fold", "trains"]
# check: the losses agree to 1e-12, too, and they fall (while nothing changes, anything agrees)
assert np.mean(losses_by_hand[-5:]) < 0.9 * np.mean(losses_by_hand[:5]), "the loss should fall"
for k in [1, 2, 3, 4]:
    net = lenet_on(four[:k])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for step, (x, y) in enumerate(batches):
        losses = lenet_step(net, trainer, x, y, four[:k])
        total = sum(loss.asnumpy().sum() for loss in losses)
        assert np.isclose(total / 32, losses_by_hand[step], rtol=1e-12, atol=0), f"step {step}"
    for param in net.collect_params().values():
        helpers.assert_replicas_equal(param.list_data())

# %% tags=["fold", "trains"]
# check: LeNet's gradients differ from device to device, and their sum is one device's gradient
trained = lenet_on(pair)
alone = lenet_on(pair[:1])
x, y = batches[0]
for net, devices in [(trained, pair), (alone, pair[:1])]:
    x_shards_here = gluon.utils.split_and_load(x, devices)
    y_shards_here = gluon.utils.split_and_load(y, devices)
    for x_shard, y_shard in zip(x_shards_here, y_shards_here):
        with autograd.record():
            loss = cross_entropy(net(x_shard), y_shard)
        loss.backward()
for param, whole in zip(trained.collect_params().values(), alone.collect_params().values()):
    first, second = param.list_grad()
    assert largest_difference(first, second.asnumpy()) > 0.01, f"{param.name}: the same shard?"
    total = first.asnumpy() + second.asnumpy()
    assert largest_difference(total, whole.grad()) < 1e-12, f"{param.name}: not the sum"

# scores are where the images are, and don't depend on the device
shards = gluon.utils.split_and_load(x[:8], pair)
scores = [trained(shard) for shard in shards]
assert [score.context for score in scores] == pair, "the scores are elsewhere"
together = trained(x[:8].as_in_context(pair[1]))
in_parts = np.concatenate([score.asnumpy() for score in scores])
assert largest_difference(in_parts, together) < 1e-12, "scores depend on the device"

# %% [markdown]
# ## A device without images
#
# What if a device gets none? `Trainer` never sees an image. We take the one weight again, and
# forget to cut the batch. **Predict** the weight on each device. (89 would be right.)

# %% tags=["trains"]
x = nd.array([[2], [20]], ctx=pair[0])
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

backward_on_each(net, [x])  # both images on cpu(0), none on cpu(1)
try:
    trainer.step(2)
except UserWarning as error:
    print("a UserWarning, raised as an error:", error)
print_replicas(net.weight)

# %% [markdown]
# `step` raises an error, but *after* the update. The weight is right by luck: the gradient on
# `cpu(1)` was still the 0 of the beginning. Now both devices get an image in the first step, and
# `cpu(1)` none in the second. **Predict** the weight. (89 − 11 = 78 would be right.)

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

backward_on_each(net, gluon.utils.split_and_load(x, pair))
trainer.step(2)
backward_on_each(net, [x])  # none on cpu(1)
trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# 89 − (22 + 20) / 2 = 68, and no error. The *old* gradient of `cpu(1)`, 20, was added once more, as
# in chapter 02:
#
# ![Step 1: cpu(0) has image 2 and gradient 2, cpu(1) image 20 and gradient 20; the sum is 22. Step
# 2: cpu(0) has images 2 and 20 and gradient 22; cpu(1) has no image and its old gradient 20; the
# sum is 42 in place of 22.](src/drawings/old_gradient.svg)
#
# Why no error this time? `backward` marks a gradient as fresh, and `step` raises the error where
# the mark is missing. But on several devices, by default, nobody takes the mark away. So `step`
# finds only a gradient that was *never* written. With `update_on_kvstore=False` each device
# updates its own replica, and takes the mark away:

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                        update_on_kvstore=False)  # NEW

backward_on_each(net, gluon.utils.split_and_load(x, pair))
trainer.step(2)
backward_on_each(net, [x])  # none on cpu(1)
try:
    trainer.step(2)
except UserWarning:
    print("the same error in step 2")
for value in net.weight.list_data():
    print(value.context, "value", value[0, 0].asscalar())

# %% [markdown]
# An error, *before* a weight has changed: 89 is the result of step 1. (`Trainer._update` in
# `gluon/trainer.py` at 1.9.1; why there are two ways to update, chapter 07 tells.)
#
# **Keep this:** every device needs a new gradient in every step, and the default `Trainer` checks
# only that it has ever had one. Chapter 06 has a loop that gives an idle device zeros.

# %% tags=["fold", "trains"]
# check: 68 by default, 89 where the devices update; 78 where both have images
def weights_after(second_step, update_on_kvstore):
    """One weight's values after a step on both devices, then one with these shards."""
    net = one_weight_net(pair)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                            update_on_kvstore=update_on_kvstore)
    backward_on_each(net, gluon.utils.split_and_load(x, pair))
    trainer.step(2)
    backward_on_each(net, second_step)
    try:
        trainer.step(2)
    except UserWarning:
        assert update_on_kvstore is False, "only there the mark is removed"
    return [value.asnumpy().item() for value in net.weight.list_data()]


assert weights_after([x], None) == weights_after([x], True) == [68, 68], "the old gradient again"
assert weights_after([x], False) == [89, 89], "unchanged by the second step"
for way in [None, False]:
    both = gluon.utils.split_and_load(x, pair)
    assert weights_after(both, way) == [78, 78], "images on both devices: no error"

# %% tags=["fold", "trains"]
# check: the three cases with LeNet: an error after the step, none, an error before the step
def lenet_backward(net, devices):
    x, y = batches[0]
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(gluon.utils.split_and_load(x, devices),
                                    gluon.utils.split_and_load(y, devices)):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


def start_lenet(devices, update_on_kvstore=None):
    net = lenet_on(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125},
                            update_on_kvstore=update_on_kvstore)
    return net, trainer


def is_refused(trainer):
    try:
        trainer.step(32)
    except UserWarning:
        return True
    return False


one, trainer = start_lenet(pair[:1])
expected = []  # one device's weights, after one step and after two
for step in [1, 2]:
    lenet_backward(one, pair[:1])
    trainer.step(32)
    expected.append([value.asnumpy() for value in as_by_hand(one, pair[:1])[0]])

net, trainer = start_lenet(pair)
lenet_backward(net, pair[:1])
assert is_refused(trainer), "the second device never had a gradient"
assert largest_difference(as_by_hand(net, pair), expected[0]) < 1e-12, "the step wasn't taken"

net, trainer = start_lenet(pair)
lenet_backward(net, pair)
trainer.step(32)
lenet_backward(net, pair[:1])
old = [param.grad(pair[1]).asnumpy() for param in net.collect_params().values()]
assert not is_refused(trainer), "an old gradient isn't noticed"
assert largest_difference(as_by_hand(net, pair), expected[1]) > 1e-3, "one device's weights"
added = []
for value, grad in zip(expected[1], old):
    added.append(value - 0.125 / 32 * (grad.T if grad.ndim == 2 else grad))
assert largest_difference(as_by_hand(net, pair), added) < 1e-12, "not the old gradient again"

net, trainer = start_lenet(pair, update_on_kvstore=False)
lenet_backward(net, pair)
trainer.step(32)
lenet_backward(net, pair[:1])
assert is_refused(trainer), "the mark wasn't removed"
assert largest_difference(as_by_hand(net, pair), expected[0]) < 1e-12, "changed by the second"

# %% [markdown]
# ## One device, named twice
#
# On a machine with fewer than two GPUs, MXNet's tutorial *Multiple GPUs training with Gluon API*
# names one device twice. **Predict:** how many replicas are there, and what are their gradients?

# %%
twice = [mx.cpu(0), mx.cpu(0)]
net = one_weight_net(twice)
backward_on_each(net, gluon.utils.split_and_load(x, twice))
print_replicas(net.weight)

# %% [markdown]
# Two replicas, both on `cpu(0)`. Gluon looks for a replica by its device, and of two on the same
# device it finds the last. So both shards used that one, and the second `backward` overwrote the
# gradient of the first:
#
# ![Both shards, image 2 and image 20, are on cpu(0), and both use the second replica: its gradient
# 2 is overwritten by 20. The first replica has the gradient 0.](src/drawings/named_twice.svg)
#
# `step(2)` would raise the error that you know, since the first replica never had a gradient. The
# tutorial's `step` has `ignore_stale_grad=True`, as the error's own text proposes; that turns it
# off. **Predict** the weight. (89 would be right.)

# %% tags=["trains"]
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% [markdown]
# 100 − 20 / 2 = 90: the image 2 is lost, without an error. Would training show it? LeNet:

# %% tags=["fold", "measured", "trains"]
# measure: LeNet on a device named twice, with ignore_stale_grad=True
net = lenet_on(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
losses = []
for batch_x, batch_y in batches:
    parts = []
    for x_shard, y_shard in zip(gluon.utils.split_and_load(batch_x, twice),
                                gluon.utils.split_and_load(batch_y, twice)):
        with autograd.record():
            loss = cross_entropy(net(x_shard), y_shard)
        loss.backward()
        parts.append(loss.sum().asscalar())
    trainer.step(32, ignore_stale_grad=True)
    losses.append(sum(parts) / 32)
for name, found in [("named twice", losses), ("by hand", losses_by_hand)]:
    print(f"{name}: mean loss of the first five steps {np.mean(found[:5]):.2f}, "
          f"of the last five {np.mean(found[-5:]):.2f}")
difference = largest_difference(as_by_hand(net, twice[:1]), weights_by_hand)
print(f"weights differ by {difference}")
assert np.mean(losses[-5:]) < np.mean(losses[:5]), "the loss should fall"
assert difference > 0.01, "these should not be one device's weights"

# %% [markdown]
# The loss falls, and nothing looks wrong. But half of each batch isn't used, and the weights
# differ. (`helpers.split_and_load` refuses such a list.)

# %% tags=["fold", "trains"]
# check: named twice: gradients 0 and 20, an error without ignore_stale_grad, and else 90
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
backward_on_each(net, gluon.utils.split_and_load(x, twice))
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [0, 20], "other gradients"
try:
    trainer.step(2)
except UserWarning as error:
    assert "has not been updated" in str(error)
else:
    raise RuntimeError("without ignore_stale_grad it should complain")
net = one_weight_net(twice)
backward_on_each(net, gluon.utils.split_and_load(x, twice))
gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}).step(2, ignore_stale_grad=True)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [90, 90], "other weights"
try:
    helpers.split_and_load(x, twice)
except ValueError as error:
    assert "a device appears twice" in str(error)
else:
    raise RuntimeError("our split_and_load should refuse the list")

# %% [markdown]
# **Keep this:** name each device once, and leave `ignore_stale_grad` alone. More lines of old
# programs, and what mends them, are in deeper: Listings you will meet.
#
# ## Summary
#
# - Gluon trains as the loop by hand does: twenty steps on 1 to 4 devices agree with one device to
#   $10^{-12}$ in float64.
# - A `Parameter` has a value and a gradient on each device. Values are equal; each gradient is that
#   of the device's shard.
# - You cut the batch. `step(n)` adds the gradients, divides by `n` and updates all replicas.
# - A device without images adds its old gradient again, without an error.
# - Of a device named twice, only the last shard counts. `ignore_stale_grad=True` hides it.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **Frozen.** Set `grad_req = "null"` for the parameters of LeNet's first layer. What does
#    `list_grad` say, and does a step on two devices still work?
# 2. **Adding up.** With `grad_req = "add"`, `backward` adds to a gradient in place of overwriting
#    it. Does that give the right weight when a device is named twice? Try two steps with the images
#    2 and 20.
# 3. **A check of your own.** Gluon keeps its mark in the attribute `_fresh_grad` of each value.
#    Write `forget(net)`, called before the backward pass, and `check(net)`, called before `step`,
#    that notice a device without images in *this* step.

# %% [markdown]
# ### Answer 1
#
# A frozen parameter has no gradient on any device, and `list_grad` raises an error. The Trainer
# leaves it alone; the others train.

# %% tags=["solution", "trains"]
net = lenet_on(pair)
net[0].collect_params().setattr("grad_req", "null")
try:
    net[0].weight.list_grad()
except RuntimeError:
    print("list_grad: no gradients")

before = [param.data(pair[1]).asnumpy() for param in net.collect_params().values()]
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
lenet_step(net, trainer, *batches[0], pair)

changed = []
for param, old_value in zip(net.collect_params().values(), before):
    helpers.assert_replicas_equal(param.list_data())
    changed.append(bool((param.data(pair[1]).asnumpy() != old_value).any()))
print("changed:", changed)
assert changed == [False, False, True, True, True, True, True, True]

# %% [markdown]
# ### Answer 2
#
# In the first step, yes: the replica that both shards use holds 2 + 20, the other one 0. In the
# second step the gradients of the first are still there, so 44 / 2 is subtracted where 22 / 2 is
# right. They would have to be set to zero after each step. And there is still one device to do all
# the work.

# %% tags=["solution", "trains"]
net = one_weight_net(twice)
net.weight.grad_req = "add"
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
found = []
for step in [1, 2]:
    backward_on_each(net, gluon.utils.split_and_load(x, twice))
    trainer.step(2, ignore_stale_grad=True)
    print("after step", step)
    print_replicas(net.weight)
    found.append(net.weight.list_data()[0].asnumpy().item())
assert found == [89, 67], "right would be 89, then 78"

# %% [markdown]
# ### Answer 3
#
# Clear the marks first, and look at them before `step`. Parameters that are frozen have no
# gradient, and are passed over. An uneven shard is no fault. A part of the network that this batch
# didn't use is one: it keeps an old gradient, which the default Trainer adds again. The rows of an
# embedding that no word has reached are none: `backward` writes zeros there.

# %% tags=["solution", "trains"]
def marked(net):  # the values of all parameters that get a gradient, on all devices
    values = []
    for param in net.collect_params().values():
        if param.grad_req != "null":
            values.extend(param.list_data())
    return values


def forget(net):
    for value in marked(net):
        value._fresh_grad = False


def check(net):
    for value in marked(net):
        assert value._fresh_grad, f"no new gradient on {value.context}"


def is_noticed(net, shards):
    forget(net)
    backward_on_each(net, shards)
    try:
        check(net)
    except AssertionError as error:
        print(error)
        return True
    return False


net = one_weight_net(pair)
assert not is_noticed(net, gluon.utils.split_and_load(x, pair)), "images on both devices"
assert is_noticed(net, [x]), "none on cpu(1)"
three_images = gluon.utils.split_and_load(nd.array([[1], [2], [3]]), pair, even_split=False)
assert not is_noticed(net, three_images), "uneven shards"

# %% tags=["solution", "trains"]
class Branches(nn.Block):
    """An embedding, and two layers of which a batch may use one or both."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 2)
        self.left = nn.Dense(1, in_units=2)
        self.right = nn.Dense(1, in_units=2)
        self.both = True

    def forward(self, word):
        inputs = self.words(word)
        if self.both:
            return self.left(inputs) + self.right(inputs)
        return self.right(inputs)


net = Branches()
net.initialize(ctx=pair)
assert not is_noticed(net, gluon.utils.split_and_load(nd.array([1, 1]), pair)), "word 1"
assert not is_noticed(net, gluon.utils.split_and_load(nd.array([0, 0]), pair)), "other rows"
rows = net.words.weight.grad(pair[0]).asnumpy().any(axis=1)
assert rows.tolist() == [True] + 8 * [False], "row 1, reached before, was written as zeros"

net.both = False
assert is_noticed(net, gluon.utils.split_and_load(nd.array([0, 0]), pair)), "left not used"
net.left.collect_params().setattr("grad_req", "null")
assert not is_noticed(net, gluon.utils.split_and_load(nd.array([0, 0]), pair)), "left is frozen"
