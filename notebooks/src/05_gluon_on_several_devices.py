# %% [markdown]
# # 05 · Gluon on several devices
#
# In chapter 04 you wrote each part of a training step on several devices. Gluon, MXNet's high-level
# interface, provides all of them, so its loop is a dozen lines long. What do these lines do on each
# device?
#
# > **What you'll do:** train LeNet on two devices with Gluon, follow one weight through a step, and
# > explain what happens to a device that gets no images.
# >
# > **What you'll learn:** what a `Parameter` holds on each device; what `Trainer.step` adds,
# > divides and updates; how closely Gluon's training matches the loop by hand.
# >
# > **What you need:** chapters 01 to 04. No GPU. Reading takes {reading time}, running about
# > fifteen seconds.

# %%
import helpers
from helpers import by_hand, devices, your_turn
from helpers.compare import largest_difference

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# ## The whole loop
#
# We train chapter 04's network on images of MNIST:

# %% tags=["measured"]
two = devices(2)
data = helpers.load_data("mnist", limit=4000)
print(data)

# %% [markdown]
# Our network is a list of layers, `nn.Sequential`. No layer is told how many inputs it has.

# %%
def lenet():
    net = nn.Sequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"))
    net.add(nn.AvgPool2D(pool_size=2, strides=2))
    net.add(nn.Conv2D(50, kernel_size=5, activation="relu"))
    net.add(nn.AvgPool2D(pool_size=2, strides=2))
    net.add(nn.Dense(128, activation="relu"))
    net.add(nn.Dense(10))
    return net

# %% [markdown]
# `initialize` gets a *list* of devices. (Xavier's rule draws smaller random numbers for larger
# layers.) A `Trainer` gets the parameters, the name of an optimizer and its settings.

# %%
mx.random.seed(0)
net = lenet()
net.initialize(mx.init.Xavier(), ctx=two)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# In a step you still cut the batch. (With `even_split=False` shards may differ by one image.) The
# loss function gives a number for each image, and `backward` takes the gradient of their *sum*. One
# call of `autograd.backward` takes the losses of all devices, which chapter 04 did in a loop.

# %%
def train_step(net, trainer, x, y, devices):
    x_shards = gluon.utils.split_and_load(x, devices, even_split=False)
    y_shards = gluon.utils.split_and_load(y, devices, even_split=False)

    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)

    trainer.step(len(x))
    return losses

# %% [markdown]
# And the training, with 64 random images a step:

# %% tags=["measured", "trains", "few:STEPS = 101=>STEPS = 21"]
STEPS = 101

rng = np.random.default_rng(0)
for step in range(STEPS):
    rows = rng.integers(0, len(data.train_images), size=64)
    x = nd.array(data.train_images[rows])
    y = nd.array(data.train_labels[rows])
    losses = train_step(net, trainer, x, y, two)

    if step % 20 == 0:
        total = 0
        for loss in losses:
            total += loss.sum().asscalar()
        print(f"step {step:3}: loss {total / 64:.2f}")

# %% [markdown]
# The loss falls. Each line of the loop stands for something that you wrote in chapter 04:
#
# | by hand (chapter 04) | in Gluon |
# | --- | --- |
# | `get_params`, once for each device | `net.initialize(ctx=devices)` |
# | `split_and_load` | `gluon.utils.split_and_load` |
# | `lenet(x_shard, replica)` | `net(x_shard)` |
# | `loss.backward()`, once for each device | `autograd.backward(losses)` |
# | `allreduce` and the update | `trainer.step(n)`, for `n` images in the batch |
#
# Three of Gluon's lines hide most of the work: `initialize`, `net(x_shard)` and `step`.
#
# ## What `initialize` makes
#
# `initialize` is told the devices, but not the shapes, since no layer knows its number of inputs.
# So what is there before the first image? We ask the first layer's weight, on two simulated
# devices:

# %%
pair = [mx.cpu(0), mx.cpu(1)]
net = lenet()
net.initialize(ctx=pair)

weight = net[0].weight
print("devices:", weight.list_ctx())
print("shape:  ", weight.shape)
try:
    weight.list_data()
except gluon.parameter.DeferredInitializationError:
    print("no values yet")

# %% [markdown]
# The 0 in the shape is a number of inputs that isn't known yet. Gluon learns it from the first
# images, and only then makes the values (**deferred initialization**). **Predict:** we give one
# image to `cpu(1)`, and none to `cpu(0)`. Which of the two has values then?

# %% tags=["predict"]
mx.random.seed(0)
net(nd.ones((1, 1, 28, 28), ctx=pair[1]))

print("shape:", weight.shape)
for value in weight.list_data():
    first_three = value.reshape(-1)[:3].asnumpy()
    print(value.context, "has", first_three.round(3), "...")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both have values, and the same ones. Gluon draws the random numbers once and copies them to all
# devices of the list, wherever the image is.
#
# </details>
#
# ## One weight on two devices
#
# Now a step under the microscope. The smallest network has one input, one output and no bias, so
# that it has one weight, a 1 × 1 matrix. Ours starts at 100.

# %%
def one_weight_net(devices):
    net = nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(100), ctx=devices)
    return net


def print_replicas(weight):
    for device in weight.list_ctx():
        value = weight.data(device)[0, 0].asscalar()
        gradient = weight.grad(device)[0, 0].asscalar()
        print(device, "value", value, "gradient", gradient)


net = one_weight_net(pair)
print_replicas(net.weight)

# %% [markdown]
# So a Gluon `Parameter` is not one array. On each device it has a value, `weight.data(device)`, and
# room for a gradient, `weight.grad(device)`, which is still 0. The values begin equal.
#
# The batch has two images of one pixel each, 2 and 20. `net` is called once for each shard, and
# takes the replica on the shard's device. Its output, weight · image, is our loss, because then the
# gradient is the image itself. After `backward`, are the two values still equal? And the two
# gradients?

# %%
two_images = nd.array([[2], [20]])
x_shards = gluon.utils.split_and_load(two_images, pair)


def forward_and_backward(net, x_shards):
    losses = []
    with autograd.record():
        for x_shard in x_shards:
            losses.append(net(x_shard))
    autograd.backward(losses)


forward_and_backward(net, x_shards)
print_replicas(net.weight)

# %% [markdown]
# The values are equal. The gradients aren't, because each device holds the gradient of its own
# shard.
#
# **Predict:** we do the same once more, without a `step`. What are the gradients now?

# %% tags=["predict"]
forward_and_backward(net, x_shards)
print_replicas(net.weight)

# %% [markdown]
# <details><summary>What came out</summary>
#
# They are still 2 and 20. The new gradients took the place of the old ones. (In PyTorch they would
# be added, which gives 4 and 40.)
#
# </details>
#
# **By default each call of `backward` overwrites the gradients that it reaches, and no others.**
#
# ## What `step` does
#
# The sum and the update are still missing. `step(n)` does both, with the plain update of chapter
# 04. **Predict:** what are the values after `step(2)`, at rate 1?

# %% tags=["predict", "trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

forward_and_backward(net, x_shards)
trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# <details><summary>What came out</summary>
#
# 100 − (2 + 20) / 2 = 89 on both devices. The gradients are added once, divided once by `n`, and
# multiplied by the rate.
#
# </details>
#
# `step` has to be told `n`, since it never sees an image. It is the number of images in the whole
# batch, not in a shard. So it is right for shards of any sizes.
#
# ### Who updates?
#
# `step` has left both gradients as they were, 2 and 20, so the sum is elsewhere. By default, on
# several devices, it is in a **store**, which keeps one more copy of the weight (`KVStore`, chapter
# 07). The store adds the gradients, updates its weight, and copies it to each device:
#
# ![cpu(0) has the image 2, cpu(1) the image 20. One Parameter spans both devices: its values are
# 100 and 100, its gradients 2 and 20. Both gradients go to the store, whose weight becomes 100
# minus 22 / 2 = 89; from there 89 goes to both devices.](src/drawings/gluon_parameter.svg)
#
# ## The same training as by hand
#
# Does Gluon's training end with the weights of chapter 04's loop? Both start from the same weights
# and get the same twenty batches, in float64, where rounding is small. The last batch has only 16
# images, so that a wrong `n` in `step(n)` would be noticed. By hand we train on one device, in
# Gluon on three, whose shards are uneven.

# %%
# 19 batches of 32 images, and one of 16
batches = []
for begin in range(0, 624, 32):
    end = min(begin + 32, 624)
    x = nd.array(data.train_images[begin:end], dtype="float64")
    y = nd.array(data.train_labels[begin:end])
    batches.append((x, y))

# %% [markdown]
# The learning rate is 1/8, and not 0.1, because MXNet keeps two numbers in *float32*: the rate, and
# the 1/$n$ of `step(n)` (`MultiSGDParam` in MXNet's `src/operator/optimizer_op-inl.h`). float32 has
# 1/8, 1/16 and 1/32 exactly, since they are powers of two, but it has to round 0.1.
#
# By hand, with chapter 04's `get_params` and `train_batch`:

# %% tags=["trains"]
one = [mx.cpu(0)]
start = by_hand.init_params()

replica = by_hand.get_params(start, one[0], "float64")
for x, y in batches:
    by_hand.train_batch(x, y, [replica], one, lr=0.125)

# %% [markdown]
# In Gluon a dense layer's weight is [outputs, inputs], so we transpose it:

# %%
def in_gluons_shapes(params):
    shaped = []
    for param in params:
        if param.ndim == 2:  # a dense layer's weight
            param = param.T
        shaped.append(param)
    return shaped

# %% [markdown]
# Now Gluon's network, on three devices:

# %%
three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
net = lenet()
net.cast("float64")
net.initialize(ctx=three)
# An image of zeros shows Gluon the shapes.
net(nd.zeros((1, 1, 28, 28), ctx=three[0], dtype="float64"))
print("the first layer's weight:", net[0].weight.shape)

# %% [markdown]
# It gets the same start: `set_data` writes a value into the replicas of all devices. Then it trains
# on the same batches. `largest_difference` returns the largest difference, as a share of the
# array's largest entry.

# %% tags=["trains"]
params = net.collect_params().values()
for param, value in zip(params, in_gluons_shapes(start)):
    param.set_data(value)

trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
for x, y in batches:
    train_step(net, trainer, x, y, three)

expected = in_gluons_shapes(replica)  # the weights that were trained by hand
for device in three:
    found = [param.data(device) for param in params]
    difference = largest_difference(found, expected)
    print(f"the weights on {device} are those by hand, to 1e-12:", difference < 1e-12)
    assert difference < 1e-12

# %% [markdown]
# **Gluon on three devices trains as one device does by hand.**
#
# ## A device without images
#
# A `Trainer` sees gradients and no images. So what does it do if a device gets no image? In our
# first step each device has one; in the second we forget to cut, so that both images are on
# `cpu(0)`. **Predict:** what is the weight after both steps? (After the first step it is 89.)

# %% tags=["predict", "trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

forward_and_backward(net, x_shards)  # one image on each device
trainer.step(2)
forward_and_backward(net, [two_images])  # both images on cpu(0)
trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# <details><summary>What came out</summary>
#
# 89 − (22 + 20) / 2 = 68, on both devices and without an error. No `backward` reached `cpu(1)` in
# the second step, so its *old* gradient, 20, was added once more. Such a leftover gradient is
# called **stale**; chapter 02 had one, too.
#
# ![Step 1: cpu(0) has image 2 and gradient 2, cpu(1) image 20 and gradient 20; the sum is 22. Step
# 2: cpu(0) has images 2 and 20 and gradient 22; cpu(1) has no image and its old gradient 20; the
# sum is 42 instead of 22.](src/drawings/old_gradient.svg)
#
# </details>
#
# **Every device needs a new gradient in every step.** So cut each batch, and give each device at
# least one image.
#
# If a device has *never* had a gradient, `step` raises an error, but only after the store has
# changed the weights. Leave `ignore_stale_grad=True` alone, although the error message proposes it,
# because it turns this check off. (deeper: MXNet's surprises shows that error, and lines of
# published programs that don't do what they seem to say.)
#
# ### Your turn: what does an idle device end with?
#
# You can now say what the weight will be, without Gluon. Write `value_after`. A step is a list with
# the images of each device: above, the first step was `[[2], [20]]`, the second `[[2, 20], []]`. In
# the first step no device is idle.

# %% tags=["your-turn"]
def value_after(steps):
    """Return the weight after the last step, from 100 at rate 1, by the default Trainer."""
    ...


both = [[2], [20]]
idle = [[2, 20], []]
first_idle = [[], [2, 20]]
uneven = [[6, 9], [15]]
one_step = [both]
value_cases = [
    ((one_step,), 89),
    (([both, idle],), 68),
    (([both, idle, idle],), 47),
    (([both, idle, both],), 57),
    (([both, first_idle],), 77),
    (([uneven, idle],), 71.5),
]
your_turn(value_after, value_cases)

# %% [markdown]
# ## Summary
#
# - A Gluon `Parameter` has a value and a gradient on each device. The values are made on all
#   devices, as soon as the first image shows the shapes. Each gradient is that of the device's own
#   shard.
# - By default each call of `backward` overwrites the gradients that it reaches, and no others.
# - `step(n)` adds the gradients of all devices once, and divides once by `n`, the number of images
#   in the whole batch. By default a store updates the weight and copies it to each device.
# - Gluon on three devices trains as the loop by hand does on one: to $10^{-12}$ in float64, if the
#   rate and 1/`n` are exact in float32.
# - A device without images adds its stale gradient again, by default without an error.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **Frozen.** Set `grad_req = "null"` for the parameters of LeNet's first layer. What does
#    `list_grad` say, and does a step on two devices still work?
# 2. **Accumulate.** A batch may be too large for the devices' memory. With `grad_req = "add"`,
#    `backward` adds to a gradient instead of overwriting it. So let each device work through its
#    shard in two parts, and call `step` once. Try two such steps with the one weight. What goes
#    wrong in the second, and which method of `net.collect_params()` helps?

# %% [markdown]
# ### Answer to *Your turn*
#
# Gradients stay from step to step, as in Gluon. A device writes a new one only if it has images.

# %% tags=["solution", "your-turn"]
def value_after(steps):
    value = 100
    gradients = [0, 0]
    for shards in steps:
        n = 0
        for rank, images in enumerate(shards):
            n = n + len(images)
            if len(images) > 0:
                gradients[rank] = sum(images)
        value = value - sum(gradients) / n
    return value


your_turn(value_after, value_cases)

# %% [markdown]
# And Gluon itself, for the last case:

# %% tags=["solution", "trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
uneven_shards = [nd.array([[6], [9]], ctx=pair[0]), nd.array([[15]], ctx=pair[1])]

forward_and_backward(net, uneven_shards)
trainer.step(3)
forward_and_backward(net, [two_images])
trainer.step(2)
print_replicas(net.weight)
assert net.weight.data(pair[1])[0, 0].asscalar() == 71.5

# %% [markdown]
# ### Answer 1
#
# A frozen parameter has no gradient on any device, and `list_grad` raises an error. The Trainer
# leaves it alone and trains the other parameters.

# %% tags=["solution", "trains"]
net = lenet()
net.initialize(ctx=pair)
net(nd.zeros((1, 1, 28, 28)))
net[0].collect_params().setattr("grad_req", "null")
try:
    net[0].weight.list_grad()
except RuntimeError:
    print("list_grad: no gradients")

before = [param.data(pair[1]).asnumpy() for param in net.collect_params().values()]
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
x, y = batches[0]
train_step(net, trainer, x.astype("float32"), y, pair)

changed = []
for param, old_value in zip(net.collect_params().values(), before):
    changed.append(not np.array_equal(param.data(pair[1]).asnumpy(), old_value))
print("changed:", changed)
assert changed == [False, False, True, True, True, True, True, True]

# %% [markdown]
# ### Answer 2
#
# This is **gradient accumulation**. Each device adds up the gradients of its parts, and `step` gets
# the number of all images. Then `zero_grad` must set all gradients to 0, or the next step adds them
# again. With the images 2 and 6 on one device and 20 and 4 on the other, each step subtracts 32 / 4
# = 8.

# %% tags=["solution", "trains"]
net = one_weight_net(pair)
net.weight.grad_req = "add"
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
parts = [nd.array([[2], [20]]), nd.array([[6], [4]])]

for step in [1, 2]:
    for part in parts:
        part_shards = gluon.utils.split_and_load(part, pair)
        forward_and_backward(net, part_shards)
    trainer.step(4)
    print("after step", step)
    print_replicas(net.weight)
    net.collect_params().zero_grad()

assert net.weight.data(pair[0])[0, 0].asscalar() == 100 - 8 - 8
