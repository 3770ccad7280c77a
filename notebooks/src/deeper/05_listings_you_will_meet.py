# %% [markdown]
# # Deeper · Listings you will meet
#
# Much of what is published about Gluon on several devices was written from 2017 to 2022, and its
# code is copied to this day. Some of its lines fail with MXNet 1.9.1, or do something else
# than their authors wanted. Which, and what do you write in their place?
#
# | where you meet it | what it is |
# | --- | --- |
# | *The Straight Dope* | a book of notebooks about Gluon, 2017 |
# | *Dive into Deep Learning*, the draft of 2018 | came with a package `gluonbook` |
# | *Dive into Deep Learning* 1.0, d2l | comes with a package `d2l` |
# | MXNet's tutorial | *Multiple GPUs training with Gluon API* |
#
# The last three sections have no source: one writes such lines oneself.
#
# ## What you'll do
#
# Run each line, see what it does, and run the line that mends it.
#
# ## What you'll learn
#
# - which lines stop with an error, and what the error means;
# - which ones run to the end and do something else;
# - which replica `data()` gives you, and what a second `initialize` does.
#
# ## What you need
#
# Chapter 05. No GPU. Reading takes {reading time}, running a few seconds. The sections stand by
# themselves.

# %%
import warnings

import helpers

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]
pair = four[:2]

# %% [markdown]
# ## Lines that stop
#
# ### A package that is gone
#
# Programs of the draft of 2018 begin with this import:

# %%
try:
    import gluonbook as gb

    print(gb.__name__)
except ModuleNotFoundError as error:
    print(error)

# %% [markdown]
# The package has another name today, with an edition for MXNet in it. (*The Straight Dope* had
# `import utils`, a file that lay beside its notebooks. What it did is in `helpers` here.)

# %%
from d2l import mxnet as d2l

print(d2l.__name__)

# %% tags=["fold"]
# check: there is no module named utils, either
try:
    import utils  # noqa: F401
except ModuleNotFoundError as error:
    assert "utils" in str(error)
else:
    raise RuntimeError("a module named utils is installed here")

# %% [markdown]
# ### `gluon.autograd`
#
# Early revisions of *The Straight Dope*, and copies of them, reach `autograd` through Gluon:

# %%
try:
    gluon.autograd.record()
except AttributeError as error:
    print(error)

# %% [markdown]
# Import it from MXNet itself:

# %%
with autograd.record():
    print("recording:", autograd.is_recording())

# %% [markdown]
# ### A parameter by its name
#
# The same revisions fetch the first layer's weight as `"cnn_conv2d0_weight"`. `cnn_` was the
# network's prefix.

# %%
net = nn.Sequential(prefix="cnn_")
with net.name_scope():
    net.add(nn.Conv2D(20, kernel_size=3))

try:
    net.collect_params()["cnn_conv2d0_weight"]
except KeyError as error:
    print("KeyError:", error)

# %% [markdown]
# The name is made up by Gluon, and has changed since:

# %%
print(list(net.collect_params().keys()))

# %% [markdown]
# It can even change within a program: without a prefix, layers are counted as they are made.
# **Predict:** a cell that makes a layer is run twice. Are the names the same?

# %%
first = nn.Dense(3)
second = nn.Dense(3)
print("the same name:", first.weight.name == second.weight.name)

# %% [markdown]
# So don't use the name. Ask the layer:

# %%
print(net[0].weight.name)

# %% tags=["fold"]
# check: the numbers in two layers' names follow each other, and the layer's weight is that one
import re

numbers = [int(re.search(r"\d+", layer.name)[0]) for layer in [first, second]]
assert numbers[1] == numbers[0] + 1, "not numbered in the order in which they were made"
assert net[0].weight is net.collect_params()["cnn_conv0_weight"]

# %% [markdown]
# ### All GPUs of a machine that has none
#
# d2l's `try_all_gpus()` gives the list of GPUs. Without a GPU the list is empty. What does
# `split_and_load` do with an empty list?

# %%
try:
    gluon.utils.split_and_load(nd.arange(4), [])
except ZeroDivisionError as error:
    print("ZeroDivisionError:", error)

# %% [markdown]
# `helpers.devices(k)` gives k different devices, GPUs if there are so many, or else simulated ones:

# %% tags=["measured"]
for shard in gluon.utils.split_and_load(nd.arange(4), helpers.devices(2)):
    print(shard.context, shard.asnumpy())

# %% tags=["fold", "measured"]
# check: without a GPU d2l's list is empty; ours has different devices
if mx.context.num_gpus() == 0:
    assert d2l.try_all_gpus() == []
assert len(set(map(str, helpers.devices(2)))) == 2

# %% [markdown]
# ### Asking too early
#
# How do you see whether a parameter is there? d2l's page on several GPUs asks for it and catches a
# `RuntimeError`, which it reports as "not initialized on" that device. This does the same:

# %%
def say_whether_there(weight, device):
    try:
        weight.data(device)
        print(device, "there")
    except RuntimeError as error:
        print(device, "not initialized:", type(error).__name__)


net = nn.Dense(3)
say_whether_there(net.weight, pair[0])

# %% [markdown]
# That is right: nobody has called `initialize`. Now we do. **Predict** what it reports for `cpu(0)`
# and `cpu(3)`: before the first forward pass, and after one on `cpu(1)` only.

# %%
net.initialize(ctx=pair)
print("after initialize")
say_whether_there(net.weight, pair[0])
say_whether_there(net.weight, four[3])

net(nd.ones((1, 2), ctx=pair[1]))
print("after a forward pass on cpu(1)")
say_whether_there(net.weight, pair[0])
say_whether_there(net.weight, four[3])

# %% [markdown]
# A `DeferredInitializationError` is a kind of `RuntimeError`. So before the forward pass the report
# is the same for `cpu(0)`, which has been chosen, and for `cpu(3)`, which hasn't. `list_ctx` tells
# them apart at any time:

# %%
net = nn.Dense(3)
net.initialize(ctx=pair)
print("shape:", net.weight.shape, "devices:", net.weight.list_ctx())

# %% [markdown]
# The same page says that parameters are made on the devices which data passes through. You have
# seen that `cpu(0)` got its weight too. And a device that isn't in the list gets none, even if data
# is there:

# %%
net(nd.ones((1, 2), ctx=pair[1]))
try:
    net(nd.ones((1, 2), ctx=four[3]))
except RuntimeError as error:
    print(type(error).__name__)
print("devices:", net.weight.list_ctx())

# %% [markdown]
# **On GPUs:** the same. Python decides when parameters are made and which replica is used
# (`Parameter._check_and_get` in `gluon/parameter.py`). The start is computed once, on the host, and
# copied to each device (`_finish_deferred_init` and `_init_impl` there, MXNet 1.9.1).

# %% tags=["fold"]
# check: which errors; replicas on both devices, equal; none elsewhere
DeferredError = gluon.parameter.DeferredInitializationError
assert issubclass(DeferredError, RuntimeError)


def error_of(weight, device):
    try:
        weight.data(device)
    except RuntimeError as error:
        return type(error)
    return None


net = nn.Dense(3)
assert error_of(net.weight, pair[0]) is RuntimeError
net.initialize(ctx=pair)
for device in four:
    assert error_of(net.weight, device) is DeferredError
net(nd.ones((1, 2), ctx=pair[1]))
assert error_of(net.weight, pair[0]) is None
assert error_of(net.weight, four[3]) is RuntimeError
helpers.assert_replicas_equal(net.weight.list_data())
assert net.weight.data(pair[0]).asnumpy().std() > 0, "random, or equality shows nothing"
assert net.weight.list_ctx() == pair, "on other devices"

# %% [markdown]
# ## Lines that run, and do something else
#
# For these we use chapter 05's one weight and its images 2 and 20. The right weight after a step
# is 100 − (2 + 20) / 2 = 89.

# %%
def one_weight_net(devices):
    net = nn.Dense(1, in_units=1, use_bias=False, prefix="")  # errors then call it "weight"
    net.initialize(mx.init.Constant(100), ctx=devices)
    return net


def print_replicas(weight):
    for value, grad in zip(weight.list_data(), weight.list_grad()):
        print(value.context, "value", value[0, 0].asscalar(), "gradient", grad[0, 0].asscalar())


x = nd.array([[2], [20]])

# %% [markdown]
# ### "Trainer divides the batch"
#
# The draft of 2018 says that `Trainer` shares out a batch to the devices ("Gluon Implementation for
# Multi-GPU Computation"). It can't: a `Trainer` knows the parameters, and `step` gets a number. The
# draft's own program calls `split_and_load`, and so must yours. **Predict:** what happens without
# it, in a first step?

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
with autograd.record():
    loss = net(x)  # the whole batch, on cpu(0)
loss.backward()
try:
    trainer.step(2)
except UserWarning as error:
    print(error)
print_replicas(net.weight)

# %% [markdown]
# The weight is right, but `cpu(1)` has done nothing. `step` notices that, after the update, because
# `cpu(1)` has *never* had a gradient. Once it has had one, `step` adds that old gradient again,
# without an error, and the weight is wrong (chapter 05). The line that mends it:

# %% tags=["trains"]
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
x_shards = gluon.utils.split_and_load(x, pair)  # NEW
with autograd.record():
    losses = [net(x_shard) for x_shard in x_shards]  # NEW
for loss in losses:
    loss.backward()
trainer.step(2)
print_replicas(net.weight)

# %% tags=["fold", "trains"]
# check: uncut, 89 with an error, and the second device's gradient is 0; cut, 89 without one
net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
with autograd.record():
    loss = net(x)
loss.backward()
try:
    trainer.step(2)
except UserWarning as error:
    assert "on context cpu(1) has not been updated" in str(error)
else:
    raise RuntimeError("a device that never had a gradient should be noticed")
assert [value.asnumpy().item() for value in net.weight.list_data()] == [89, 89]
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [22, 0]

# %% [markdown]
# ### `step(n, ignore_stale_grad=True)`
#
# MXNet's tutorial has this `step`, and on a machine with fewer than two GPUs it names one device
# twice: `[mx.gpu(), mx.gpu()]` or `[mx.cpu(), mx.cpu()]`. Each shard's loss has its own `backward`.
# So the first image is lost, as in chapter 05:

# %% tags=["trains"]
twice = [mx.cpu(0), mx.cpu(0)]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

losses = []
with autograd.record():
    for x_shard in gluon.utils.split_and_load(x, twice):
        losses.append(net(x_shard))
for loss in losses:
    loss.backward()
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% [markdown]
# The option only hides it: without it `step` would complain, as above. With
# `update_on_kvstore=False` it is worse: the first replica isn't updated at all, so the two end
# at 100 and 90.
#
# There are two ways to mend it. One `backward` for all losses writes the sum of their gradients:

# %% tags=["trains"]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

losses = []
with autograd.record():
    for x_shard in gluon.utils.split_and_load(x, twice):
        losses.append(net(x_shard))
autograd.backward(losses)  # NEW
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% [markdown]
# 89, the right weight. But there is still one device to do all the work, and a replica that nobody
# uses. Better name two devices, and leave `ignore_stale_grad` out:

# %% tags=["trains"]
devices = [mx.cpu(0), mx.cpu(1)]  # NEW
net = one_weight_net(devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})

losses = []
with autograd.record():
    for x_shard in gluon.utils.split_and_load(x, devices):
        losses.append(net(x_shard))
for loss in losses:
    loss.backward()
trainer.step(2)  # NEW
print_replicas(net.weight)

# %% tags=["fold", "trains"]
# check: 90 with a backward for each loss, 89 with one for all or two devices; 100 and 90
def weight_after(devices, one_backward, **options):
    net = one_weight_net(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
    losses = []
    with autograd.record():
        for x_shard in gluon.utils.split_and_load(x, devices):
            losses.append(net(x_shard))
    if one_backward:
        autograd.backward(losses)
    else:
        for loss in losses:
            loss.backward()
    trainer.step(2, **options)
    return [value.asnumpy().item() for value in net.weight.list_data()]


assert weight_after(twice, one_backward=False, ignore_stale_grad=True) == [90, 90]
assert weight_after(twice, one_backward=True, ignore_stale_grad=True) == [89, 89]
for one_backward in [True, False]:
    assert weight_after(pair, one_backward) == [89, 89]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                        update_on_kvstore=False)
for x_shard in gluon.utils.split_and_load(x, twice):
    with autograd.record():
        loss = net(x_shard)
    loss.backward()
trainer.step(2, ignore_stale_grad=True)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [100, 90], "skipped"
try:
    weight_after(twice, one_backward=True)
except UserWarning as error:
    assert "has not been updated" in str(error), "the replica that nobody uses"
else:
    raise RuntimeError("without ignore_stale_grad it should complain")

# %% [markdown]
# ### `weight.data()` without a device
#
# Programs for one device write `weight.data()`. Which replica is that if there are two? We put one
# on `cpu(1)` and one on `cpu(2)`.

# %%
net = one_weight_net([four[1], four[2]])
try:
    net.weight.data()
except RuntimeError as error:
    print(error)

# %% [markdown]
# It looks on the *current context*, which is `cpu(0)` unless you say otherwise. So on a list that
# begins with `cpu(0)` the line works, and gives the first replica. Say which one you mean:

# %%
print(net.weight.data(four[2]).context)

# %% tags=["fold"]
# check: data() is the replica on the current context; a single replica is found anywhere
with four[2]:
    assert net.weight.data().context == four[2], "not the current context's"
assert one_weight_net(pair).weight.data().context == pair[0], "not the first"
single = one_weight_net(four[2])
assert single.weight.data().context == four[2], "not the only one"

# %% [markdown]
# ### `initialize` again
#
# A cell that initialises a network is run a second time, with another start and other devices.
# **Predict** the weight and its devices.

# %%
net = one_weight_net(pair[0])
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    net.initialize(mx.init.Constant(7), ctx=pair)  # the second time

print("a warning:", said[0].message)
print_replicas(net.weight)

# %% [markdown]
# Nothing has changed: neither the value nor the devices. The warning names the option that mends
# it:

# %%
net.initialize(mx.init.Constant(7), ctx=pair, force_reinit=True)
print_replicas(net.weight)

# %% [markdown]
# Now the weight is on both devices and begins anew, so what was learned is lost. There is an
# exception: while the initialisation is *deferred*, a second `initialize` counts, without any
# warning.

# %%
late = nn.Dense(3, use_bias=False)  # its inputs aren't known, so it is deferred
late.initialize(ctx=pair)
late.initialize(ctx=four)
print("devices:", late.weight.list_ctx())

# %% tags=["fold"]
# check: a warning and no change; with force_reinit all anew; while deferred, no warning
again = one_weight_net(pair[0])
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    again.initialize(mx.init.Constant(7), ctx=pair)
assert len(heard) == 1 and again.weight.list_ctx() == [pair[0]]
assert again.weight.data().asnumpy().item() == 100, "another value"
again.initialize(mx.init.Constant(7), ctx=pair, force_reinit=True)
assert again.weight.list_ctx() == pair
assert [value.asnumpy().item() for value in again.weight.list_data()] == [7, 7]
with warnings.catch_warnings():
    warnings.simplefilter("error")
    late = nn.Dense(3, use_bias=False)
    late.initialize(ctx=pair)
    late.initialize(ctx=four)
assert late.weight.list_ctx() == four

# %% [markdown]
# ### `reset_ctx`: to other devices, with what was learned
#
# `reset_ctx` moves a network to other devices and keeps its values. But which, if the replicas
# differ? We set them to 2 and 6, as an all-reduce that was forgotten might leave them.

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
net.collect_params().reset_ctx(four)
print_replicas(net.weight)

# %% [markdown]
# It is the *mean* of the replicas, on each new device. If all replicas were equal, it is what they
# held, but for rounding. If they weren't, the mean hides it. So check before:

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
try:
    helpers.assert_replicas_equal(net.weight.list_data())
except AssertionError as error:
    print(error)

# %% tags=["fold"]
# check: the mean, on each new device, rounded for three; the check before it notices 2 and 6
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
try:
    helpers.assert_replicas_equal(net.weight.list_data())
except AssertionError as error:
    assert "differ" in str(error)
else:
    raise RuntimeError("2 and 6 should not be equal")
net.collect_params().reset_ctx(four)
assert [value.asnumpy().item() for value in net.weight.list_data()] == [4, 4, 4, 4]
assert net.weight.list_ctx() == four
for k in [2, 3]:  # equal replicas: the mean of two is exact, that of three is rounded
    net = nn.Dense(100, in_units=100)
    net.initialize(mx.init.Uniform(1), ctx=four[:k])
    held = net.weight.data(four[0]).asnumpy()
    net.collect_params().reset_ctx(four)
    change = abs(net.weight.data(four[3]).asnumpy() - held).max()
    assert change == 0 if k == 2 else 0 < change < 1e-6, f"changed by {change}"

# %% [markdown]
# ## Summary
#
# | in the listing | what you get in MXNet 1.9.1 | instead |
# | --- | --- | --- |
# | `import gluonbook as gb` (2018) | no such module | `from d2l import mxnet as d2l` |
# | `import utils` (2017) | no such module | chapter 04's own functions, `helpers` |
# | `gluon.autograd.record()` (2017) | no such attribute | `from mxnet import autograd` |
# | `"cnn_conv2d0_weight"` (2017) | no such parameter | `net[0].weight` |
# | `d2l.try_all_gpus()` (1.0, no GPU) | `[]`, then a division by zero | `helpers.devices(2)` |
# | `except RuntimeError` (1.0) | also catches "deferred" | `weight.list_ctx()` |
# | a batch that isn't cut | an error that comes late, or an old gradient | `split_and_load` |
# | one device twice, `ignore_stale_grad=True` | shards are lost | two devices, plain `step(n)` |
# | `weight.data()`, several replicas | the current context's, or an error | `weight.data(device)` |
# | `initialize` a second time | a warning and nothing else | `force_reinit=True` |
# | the same while deferred | the new devices, without a word | `initialize` once |
# | `reset_ctx(devices)` | the mean of the replicas | `assert_replicas_equal` before |
