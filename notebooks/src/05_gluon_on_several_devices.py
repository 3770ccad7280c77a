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
# A Gluon `Parameter` is not one array. It has a value and a gradient on each device.
#
# > **What you'll do:** follow one weight through a step on two devices, train chapter 04's network
# > to the same weights, and make two mistakes that `Trainer` notices late, or not at all.
# >
# > **What you'll learn:** what a `Parameter` holds on each device, and what a `Trainer` does; what
# > becomes of a device without images, and of one that is named twice.
# >
# > **What you need:** chapters 01 to 04. No GPU. Reading takes {reading time}, running half a
# > minute.

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
# What does Gluon put on each device? We take the smallest network: one input, one output, no bias,
# so one weight. It starts at 100. `initialize` gets a *list* of devices.

# %%
net = nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.Constant(100), ctx=pair)


def print_replicas(weight):
    for value, grad in zip(weight.list_data(), weight.list_grad()):
        print(value.context, "value", value[0, 0].asscalar(), "gradient", grad[0, 0].asscalar())


print_replicas(net.weight)

# %% [markdown]
# One Parameter, and on each device a value and a gradient, which is still 0. (Each is a matrix of
# one entry, hence `[0, 0]`.) The batch has two "images", the numbers 2 and 20.
# `gluon.utils.split_and_load` cuts it as ours does (chapter 02); our `even` is its `even_split`.

# %%
two_images = nd.array([[2], [20]])
x_shards = gluon.utils.split_and_load(two_images, pair)

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
# The values are equal; each gradient is that of the device's own shard.
#
# The sum and the update are left to a `Trainer`. It gets the parameters, the name of an optimizer
# and its settings. `step(n)` adds the gradients of all devices, and subtracts rate / `n` times the
# sum from each value. **Predict** the values, at rate 1.

# %%
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
trainer.step(2)  # two images

print_replicas(net.weight)

# %% [markdown]
# 100 − (2 + 20) / 2 = 89, on both devices:
#
# ![cpu(0) has the image 2, cpu(1) the image 20. One Parameter spans both devices: its values are
# 100 and 100, list_data(); its gradients 2 and 20, list_grad(). Below, step(2) makes both values
# 100 minus 22 / 2 = 89.](src/drawings/gluon_parameter.svg)
#
# The gradients are as they were. By default the Trainer gives them to a *store* (`kvstore`, chapter
# 07). The store adds them, updates the weight, and copies it to each device.
#
# **Keep this:** values are equal on all devices, gradients aren't. `step` divides their sum by the
# number that you tell it.
#
# The same lines as two functions:

# %%
def one_weight_net(devices):
    net = nn.Dense(1, in_units=1, use_bias=False, prefix="")  # so that errors call it "weight"
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
# Is this the training of chapter 04? Here is its network as a list of layers. No layer is told how
# many inputs it has. We print the first:

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


print(layers_of_lenet()[0])

# %% [markdown]
# Inputs are `None` as yet. Gluon finds them out from the first images, on *any* device, and then
# makes the replicas on *all*, with the same random values (*deferred initialization*).

# %% tags=["fold"]
# check: no array before the first image; then eight parameters on both devices, equal and random
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
# Chapter 04's loop on *one* device says what should come out. This cell runs it on twenty `batches`
# of 32 images. It keeps the parameters before training, `start`, and after it, `weights_by_hand`,
# in Gluon's shapes: a dense layer's weight is [outputs, inputs].

# %% tags=["fold", "measured", "trains"]
# measure: the training by hand (chapter 04): `batches`, `start`, `weights_by_hand`
data = helpers.load_data("mnist", limit=640)
images = nd.array(data.train_images - data.train_images.mean(), dtype="float64")
labels = nd.array(data.train_labels)
batches = []
for begin in range(0, 640, 32):
    batches.append((images[begin : begin + 32], labels[begin : begin + 32]))


def in_gluons_shapes(params):
    turned = []
    for param in params:
        if param.ndim == 2:  # a dense layer's weight
            param = param.T
        turned.append(param)
    return turned


start = in_gluons_shapes(by_hand.init_params())
replica = by_hand.get_params(by_hand.init_params(), four[0], "float64")
losses_by_hand = []
for x, y in batches:  # changes the replica in place
    loss = by_hand.train_batch(x, y, [replica], [four[0]], lr=0.125)
    losses_by_hand.append(loss.asscalar())
weights_by_hand = in_gluons_shapes(replica)

print("one batch:", x.shape, "and", y.shape)
print("weights and biases:", *[param.shape for param in start])
print(f"mean loss of the first five steps {np.mean(losses_by_hand[:5]):.2f}, "
      f"of the last five {np.mean(losses_by_hand[-5:]):.2f}")

# %% [markdown]
# Now a network in Gluon that begins there. It first gets an image of zeros, so that Gluon finds the
# shapes. Then `set_data` writes each value into all replicas.

# %%
def lenet_on(devices, values):
    net = layers_of_lenet()
    net.cast("float64")  # so that rounding stays small
    net.initialize(ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype="float64"))  # now all shapes are known

    for param, value in zip(net.collect_params().values(), values):
        param.set_data(value)
    return net

# %% tags=["fold"]
# define: difference_from(): the largest difference over all parameters and all replicas
def difference_from(net, expected):
    differences = []
    for param, value in zip(net.collect_params().values(), expected):
        difference = largest_difference(param.list_data(), value)
        differences.append(float(difference))
    return max(differences)


print("before training, from start:", difference_from(lenet_on(pair, start), start))

# %% [markdown]
# ### The same training
#
# Does Gluon's training lead to `weights_by_hand`? `difference_from` (folded) will say how far it is
# from there. The loss function gives one number for each image:

# %%
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

net = lenet_on(pair, start)
x, y = batches[0]
loss = cross_entropy(net(x), y)  # the whole batch on cpu(0)
print(loss.shape)

# %% [markdown]
# `backward` takes the gradient of the *sum* of these numbers, and only `step(len(x))` divides. Here
# is the whole step:

# %% tags=["trains"]
def lenet_step(net, trainer, x, y, devices):
    x_shards = gluon.utils.split_and_load(x, devices, even_split=False)  # may differ in size
    y_shards = gluon.utils.split_and_load(y, devices, even_split=False)

    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    for loss in losses:
        loss.backward()

    trainer.step(len(x))
    return losses

# %% [markdown]
# Now twenty steps, on 1 to 4 devices. Three devices get 11, 11 and 10 images. **Predict:** do their
# weights differ from `weights_by_hand`?

# %% tags=["measured", "trains"]
for k in [1, 2, 3, 4]:
    devices = four[:k]
    net = lenet_on(devices, start)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for x, y in batches:
        lenet_step(net, trainer, x, y, devices)

    print(f"{k} devices: {difference_from(net, weights_by_hand):.1e}")
    assert difference_from(net, weights_by_hand) < 1e-12

# %% [markdown]
# No: all are within $10^{-12}$, which is rounding. Uneven shards do no harm, since gradients
# are added, and divided once, by 32.
#
# **Keep this:** the same weights and batches give the same training, by hand and in Gluon.

# %% tags=["fold", "trains"]
# check: losses agree too, and fall; a step with 16 images agrees; gradients are those of the shards
assert np.mean(losses_by_hand[-5:]) < 0.9 * np.mean(losses_by_hand[:5]), "the loss should fall"
for begun, ended in zip(start, weights_by_hand):
    assert largest_difference(ended, begun) > 0.01, "training by hand should move each parameter"
for k in [1, 2, 3, 4]:
    net = lenet_on(four[:k], start)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for step, (x, y) in enumerate(batches):
        losses = lenet_step(net, trainer, x, y, four[:k])
        total = sum(loss.asnumpy().sum() for loss in losses)
        assert np.isclose(total / 32, losses_by_hand[step], rtol=1e-12, atol=0), f"step {step}"
    for param in net.collect_params().values():
        helpers.assert_replicas_equal(param.list_data())

# one step with 16 images, from biases that aren't 0, by hand and in Gluon
params = [value + 0.01 for value in by_hand.init_params()]
replica = by_hand.get_params(params, four[0], "float64")
x, y = batches[0]
by_hand.train_batch(x[:16], y[:16], [replica], [four[0]], lr=0.125)
net = lenet_on(four[:3], in_gluons_shapes(params))
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
lenet_step(net, trainer, x[:16], y[:16], four[:3])
assert difference_from(net, in_gluons_shapes(replica)) < 1e-12, "another divisor, or biases"

# `difference_from` looks at each replica
net = lenet_on(pair, start)
net[4].weight.data(pair[1])[0, 0] += 1
assert difference_from(net, start) > 0.1, "the second replica isn't compared"

# gradients differ from device to device, and their sum is one device's gradient
split = lenet_on(pair, start)
alone = lenet_on(pair[:1], start)
for net, devices in [(split, pair), (alone, pair[:1])]:
    x_shards_here = gluon.utils.split_and_load(x, devices)
    y_shards_here = gluon.utils.split_and_load(y, devices)
    for x_shard, y_shard in zip(x_shards_here, y_shards_here):
        with autograd.record():
            loss = cross_entropy(net(x_shard), y_shard)
        loss.backward()
for param, whole in zip(split.collect_params().values(), alone.collect_params().values()):
    first, second = param.list_grad()
    assert largest_difference(first, second.asnumpy()) > 0.01, f"{param.name}: the same shard?"
    total = first.asnumpy() + second.asnumpy()
    assert largest_difference(total, whole.grad()) < 1e-12, f"{param.name}: not the sum"

# scores are where the images are, and don't depend on the device
shards = gluon.utils.split_and_load(x[:8], pair)
scores = [split(shard) for shard in shards]
assert [score.context for score in scores] == pair, "the scores are elsewhere"
together = split(x[:8].as_in_context(pair[1]))
in_parts = np.concatenate([score.asnumpy() for score in scores])
assert largest_difference(in_parts, together) < 1e-12, "scores depend on the device"

# %% [markdown]
# ## A device without images
#
# What if a device gets no image in a step? A `Trainer` sees gradients, not images. We take the one
# weight again and forget to cut the batch, so that both images are on `cpu(0)`. **Predict:** what
# is the weight after `step(2)`? Does `step` notice?

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

backward_on_each(net, [two_images])  # one shard, on cpu(0); none on cpu(1)
try:
    trainer.step(2)
except UserWarning as error:
    print("UserWarning:", error)
print_replicas(net.weight)

# %% [markdown]
# `step` raises this `UserWarning` as an error, so a program stops; but *after* the update. The
# weight is right by luck: `cpu(0)` had 2 + 20, and `cpu(1)` still the 0 of the beginning.
#
# Now both devices get an image in the first step, and `cpu(1)` none in the second. **Predict** the
# weight. (Right would be 89 − 22 / 2 = 78.)

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

backward_on_each(net, gluon.utils.split_and_load(two_images, pair))
trainer.step(2)
backward_on_each(net, [two_images])  # none on cpu(1)
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
# Why no error this time? `backward` marks a gradient as fresh, and `step` raises the error if a
# mark is missing. But by default, on several devices, this mark is never removed. So only a
# gradient that was *never* written is found, whatever the message says. There is another way:
#
# | `step` by default | `step` with `update_on_kvstore=False` |
# | --- | --- |
# | 1. The store adds and updates. | 1. The store adds, and writes the sum into each gradient. |
# | 2. Is a mark missing? An error. | 2. Is a mark missing? An error. |
# | | 3. Each device updates, and removes its mark. |

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                        update_on_kvstore=False)  # NEW

backward_on_each(net, gluon.utils.split_and_load(two_images, pair))
trainer.step(2)
backward_on_each(net, [two_images])  # none on cpu(1)
try:
    trainer.step(2)
except UserWarning:
    print("the same error in step 2")
for value in net.weight.list_data():  # values only: each gradient is a sum now, see the table
    print(value.context, "value", value[0, 0].asscalar())

# %% [markdown]
# An error, *before* a weight has changed: 89 is the result of step 1. So set
# `update_on_kvstore=False` if you suspect a device without images (chapter 07 has more).
#
# **Keep this:** every device needs a new gradient in every step. The default `Trainer` checks only
# that it has ever had one. (`helpers.training.fit`, which later chapters train with, gives an idle
# device a gradient of zeros.)

# %% tags=["fold", "trains"]
# check: step 2 without images on `cpu(1)`: the weight is 68, or stays at 89; LeNet does the same
def after_two_steps(second_step, update_on_kvstore):
    """One weight's values and gradients after a step on both devices and one with these shards."""
    net = one_weight_net(pair)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                            update_on_kvstore=update_on_kvstore)
    backward_on_each(net, gluon.utils.split_and_load(two_images, pair))
    trainer.step(2)
    backward_on_each(net, second_step)
    try:
        trainer.step(2)
    except UserWarning:
        assert update_on_kvstore is False, "only there the mark is removed"
    values = [value.asnumpy().item() for value in net.weight.list_data()]
    gradients = [grad.asnumpy().item() for grad in net.weight.list_grad()]
    return values, gradients


for way in [None, True]:
    assert after_two_steps([two_images], way) == ([68, 68], [22, 20]), "the old gradient again"
values, gradients = after_two_steps([two_images], False)
assert values == [89, 89], "unchanged by the second step"
assert gradients == [44, 44], "22, the sum of step 1, and 22 again"
for way in [None, False]:
    both = gluon.utils.split_and_load(two_images, pair)
    values, _ = after_two_steps(both, way)
    assert values == [78, 78], "images on both devices: no error"


def train_lenet(devices_of_each_step, update_on_kvstore=None):
    """LeNet on `pair`, a step on these devices each; the network, and whether `step` complained."""
    net = lenet_on(pair, start)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125},
                            update_on_kvstore=update_on_kvstore)
    complained = []
    for devices in devices_of_each_step:
        try:
            lenet_step(net, trainer, *batches[0], devices)
            complained.append(False)
        except UserWarning:
            complained.append(True)
    return net, complained


def lenet_values(net):
    return [param.data(pair[0]).asnumpy() for param in net.collect_params().values()]


right, complained = train_lenet([pair])
after_one = lenet_values(right)
assert complained == [False]
right, complained = train_lenet([pair, pair])
after_two = lenet_values(right)
assert complained == [False, False]

net, complained = train_lenet([pair[:1]])
assert complained == [True], "the second device never had a gradient"
assert difference_from(net, after_one) < 1e-12, "the step wasn't taken"

net, complained = train_lenet([pair, pair[:1]])
assert complained == [False, False], "an old gradient isn't noticed"
assert difference_from(net, after_two) > 1e-3, "one device's weights"
added = []
for value, param in zip(after_two, net.collect_params().values()):
    added.append(value - 0.125 / 32 * param.grad(pair[1]).asnumpy())
assert difference_from(net, added) < 1e-12, "not the old gradient again"

net, complained = train_lenet([pair, pair[:1]], update_on_kvstore=False)
assert complained == [False, True], "the mark wasn't removed"
assert difference_from(net, after_one) < 1e-12, "changed by the second"

# %% [markdown]
# ## One device, named twice
#
# On a machine with fewer than two GPUs, MXNet's tutorial *Multiple GPUs training with Gluon API*
# names one device twice. Gluon then makes two replicas. But `net(x_shard)` finds a replica by the
# shard's device. **Predict:** what are the gradients of the two?

# %%
twice = [mx.cpu(0), mx.cpu(0)]
net = one_weight_net(twice)
backward_on_each(net, gluon.utils.split_and_load(two_images, twice))
print_replicas(net.weight)

# %% [markdown]
# As in a dict with the device as key, the second replica on `cpu(0)` has replaced the first. So
# both shards used the second, and its gradient 20 overwrote the 2:
#
# ![Both shards, image 2 and image 20, are on cpu(0), and both use the second replica: its gradient
# 2 is overwritten by 20. The first replica has the gradient 0.](src/drawings/named_twice.svg)
#
# `step(2)` would raise the error, since the first replica never had a gradient. The tutorial's
# `step` has `ignore_stale_grad=True`, as the error's own text proposes. That turns the error off.
# The text says that such parameters are then skipped; the store doesn't skip them. **Predict** the
# weight. (Right would be 89.)

# %% tags=["trains"]
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% [markdown]
# 100 − 20 / 2 = 90: the image 2 is lost, without an error. Would training show it? LeNet:

# %% tags=["fold", "measured", "trains"]
# measure: LeNet on a device named twice, with ignore_stale_grad=True
net = lenet_on(twice, start)
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
assert np.mean(losses[-5:]) < np.mean(losses[:5]), "the loss should fall"
assert difference_from(net, weights_by_hand) > 0.01, "these should not be one device's weights"

# %% [markdown]
# The loss falls. Without the second line of the output, nothing would look wrong. But half of each
# batch is lost, while the divisor still counts it.

# %% tags=["fold", "trains"]
# check: named twice: gradients 0 and 20; an error without `ignore_stale_grad`, 90 with it
# (and `helpers.split_and_load` refuses such a list)
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
backward_on_each(net, gluon.utils.split_and_load(two_images, twice))
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [0, 20], "other gradients"
try:
    trainer.step(2)
except UserWarning as error:
    assert "has not been updated" in str(error)
else:
    raise RuntimeError("without ignore_stale_grad it should complain")
net = one_weight_net(twice)
backward_on_each(net, gluon.utils.split_and_load(two_images, twice))
gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1}).step(2, ignore_stale_grad=True)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [90, 90], "other weights"
try:
    helpers.split_and_load(two_images, twice)
except ValueError as error:
    assert "a device appears twice" in str(error)
else:
    raise RuntimeError("our split_and_load should refuse the list")

# %% [markdown]
# **Keep this:** name each device once, and leave `ignore_stale_grad` alone.
#
# Other lines of published programs that no longer work are in deeper: Listings you will meet.
#
# ## Summary
#
# - Gluon trains as the loop by hand does, on 1 to 4 devices, to $10^{-12}$ in float64.
# - A `Parameter` has a value and a gradient on each device. Each gradient is that of the device's
#   shard. `step(n)` adds them, divides by `n` and updates all replicas.
# - A device that had images before, and has none now, adds its old gradient again. There is no
#   error, unless `update_on_kvstore=False`.
# - Of a device named twice, only the last shard counted: its `backward` overwrote the gradient.
#   `ignore_stale_grad=True` hides it.
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
net = lenet_on(pair, start)
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
    backward_on_each(net, gluon.utils.split_and_load(two_images, twice))
    trainer.step(2, ignore_stale_grad=True)
    print("after step", step)
    print_replicas(net.weight)
    found.append(net.weight.list_data()[0].asnumpy().item())
assert found == [89, 67], "right would be 89, then 78"

# %% [markdown]
# ### Answer 3
#
# Clear the marks first, and look at them before `step`. Parameters that are frozen have no
# gradient, and are passed over. An uneven shard is no fault. An unused part of the network is a
# fault: it keeps an old gradient, which the default Trainer adds again. Embedding rows that no word
# has reached are no fault: `backward` writes zeros there.

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
assert not is_noticed(net, gluon.utils.split_and_load(two_images, pair)), "images on both devices"
assert is_noticed(net, [two_images]), "none on cpu(1)"
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
