# %% [markdown]
# # Deeper · Listings you will meet
#
# Much of what is published about Gluon on several devices is from 2017 and 2018, and its code is
# copied to this day. Some of its lines fail in MXNet 1.9.1; others run but don't do what their
# authors wanted. Which are they, and what should you write instead?
#
# | where you meet it | what it is |
# | --- | --- |
# | *The Straight Dope* | a book of notebooks about Gluon, 2017 |
# | *Dive into Deep Learning*, the draft of 2018 | came with a package `gluonbook` |
# | *Dive into Deep Learning* 1.0, d2l | comes with a package `d2l` |
# | MXNet 1.5.1's tutorial | *Multiple GPUs training with Gluon API* |
#
# > **What you'll do:** run each line, see what it does, and run what mends it.
# >
# > **What you'll learn:** which lines stop with an error, and what the error means; which ones run
# > to the end and do something else; which replica `data()` gives you, and what a second
# > `initialize` does.
# >
# > **What you need:** chapter 05. No GPU. Reading takes {reading time}, running a few seconds. You
# > can read each section by itself; to run one, run the cells above it first.

# %%
import warnings

import helpers

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

four = [mx.cpu(0), mx.cpu(1), mx.cpu(2), mx.cpu(3)]
pair = four[:2]

# %% tags=["fold"]
# define: stops, which prints the error of the lines under it and fails if there is none
from contextlib import contextmanager


@contextmanager
def stops(kind):
    try:
        yield
    except kind as error:
        if type(error) is not kind:
            raise
        print(f"{kind.__name__}: {error}")
    else:
        raise RuntimeError(f"no {kind.__name__}")

# %% [markdown]
# ## Lines that stop
#
# Under `with stops(kind):` stand lines that stop with an error of this kind. It is printed.
#
# ### A package that has another name now
#
# Programs of the draft of 2018 begin with this import:

# %%
with stops(ModuleNotFoundError):
    import gluonbook as gb  # noqa: F401

# %% [markdown]
# Its successor is the package `d2l`. **Predict:** does the draft's program run with it? The program
# builds its network from `gb.Residual`:

# %%
from d2l import mxnet as d2l

block = d2l.Residual(3)
block.initialize()
with stops(TypeError):
    block(nd.ones((1, 3, 6, 6)))

# %% [markdown]
# It works on another kind of array, `mx.np`'s, and some of its functions take other arguments. So
# don't rename the import. The old package isn't installed here, but Python's public package index
# still has it: in an environment of your own, `pip install --no-deps gluonbook`. We tried version
# 0.8.10 with MXNet 1.9.1: its `resnet18` trained on two devices, and `evaluate_accuracy` ran.
#
# (*The Straight Dope* had `import utils`, a file beside its notebooks. What it did is in `helpers`
# here.)

# %% tags=["fold"]
# check: other arguments, absent names; there is no module named utils, either
import inspect

# the draft's program calls evaluate_accuracy(test_iter, net, ctx[0])
assert list(inspect.signature(d2l.evaluate_accuracy).parameters) == ["net", "data_iter"]
assert not hasattr(d2l, "train_ch5"), "a function of the draft that d2l doesn't have"
assert block.conv1.weight.list_ctx() == [mx.cpu(0)], "initialised, so that isn't the error"
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
with stops(AttributeError):
    gluon.autograd.record()

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

with stops(KeyError):
    net.collect_params()["cnn_conv2d0_weight"]

# %% [markdown]
# The name is made up by Gluon, and has changed since:

# %%
print(list(net.collect_params().keys()))

# %% [markdown]
# It can even change within a program: without a prefix, layers are counted as they are made.
# **Predict:** we make two layers. Are the names the same?

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
with stops(ZeroDivisionError):
    gluon.utils.split_and_load(nd.arange(4), [])

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
# How do you see whether a parameter has been initialized? The draft's and d2l's pages call
# `weight.data()` after a forward pass, and print "not initialized on" the CPU at a `RuntimeError`.
# This is a general form of it:

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
# them apart, before and after:

# %%
net = nn.Dense(3, prefix="layer_")
net.initialize(ctx=pair)
print("shape:", net.weight.shape, "devices:", net.weight.list_ctx())

# %% [markdown]
# d2l's page says that parameters are initialized "on the device the data passed through". You have
# seen that `cpu(0)` got its weight too. But it is right that other devices than those chosen get
# none, even if data is there:

# %%
net(nd.ones((1, 2), ctx=pair[1]))
with stops(RuntimeError):
    net(nd.ones((1, 2), ctx=four[3]))
print("devices:", net.weight.list_ctx())

# %% [markdown]
# **On GPUs:** the same. Python decides when parameters are made and which replica is used
# (`Parameter._check_and_get` in `gluon/parameter.py`). The start is computed once, on the host, and
# copied to each device (`_finish_deferred_init` and `_init_impl` there, MXNet 1.9.1).

# %% tags=["fold"]
# check: which errors; replicas on both devices, equal; none elsewhere
assert net.weight.list_ctx() == pair
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
# ## Lines that run, or run only sometimes
#
# For these we use chapter 05's one weight and its images 2 and 20. The right weight after a step
# is 100 − (2 + 20) / 2 = 89.

# %%
def one_weight_net(devices):
    # Errors then call it "weight".
    net = nn.Dense(1, in_units=1, use_bias=False, prefix="")
    net.initialize(mx.init.Constant(100), ctx=devices)
    return net


def print_replicas(weight):
    for value, grad in zip(weight.list_data(), weight.list_grad()):
        print(value.context, "value", value[0, 0].asscalar(), "gradient", grad[0, 0].asscalar())


x = nd.array([[2], [20]])

# %% tags=["fold"]
# define: assert_weight, which holds each replica to a number and to the devices it should be on
def assert_weight(net, number, devices):
    assert net.weight.list_ctx() == devices, f"on {net.weight.list_ctx()}"
    held = [value.asnumpy().item() for value in net.weight.list_data()]
    assert held == [number] * len(devices), f"{held} where {number} was expected"

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
with stops(UserWarning):
    trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# The weight is right, but `cpu(1)` has done nothing. By default `step` notices that after the
# update, because `cpu(1)` has *never* had a gradient. Once `cpu(1)` has had one, a later `step`
# adds that old one again, without an error, and the weight is wrong (chapter 05). With
# `update_on_kvstore=False` the error comes each time, before the update. The lines that mend it:

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
# check: cut, 89 and no error; uncut, 89 with one; then an old gradient, or each time an error
assert_weight(net, 89, pair)
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [2, 20], "not one image each"


def step_uncut(net, trainer):
    with autograd.record():
        loss = net(x)
    loss.backward()
    try:
        trainer.step(2)
    except UserWarning as error:
        assert "on context cpu(1) has not been updated" in str(error)
        return "error"
    return "no error"


uncut = one_weight_net(pair)
plain = gluon.Trainer(uncut.collect_params(), "sgd", {"learning_rate": 1})
assert step_uncut(uncut, plain) == "error", "a device that never had a gradient"
assert_weight(uncut, 89, pair)
assert [grad.asnumpy().item() for grad in uncut.weight.list_grad()] == [22, 0]
for on_kvstore, said, weight in [(None, "no error", 89 - (22 + 20) / 2), (False, "error", 89)]:
    later = one_weight_net(pair)
    plain = gluon.Trainer(later.collect_params(), "sgd", {"learning_rate": 1},
                          update_on_kvstore=on_kvstore)
    for x_shard in gluon.utils.split_and_load(x, pair):  # a step as it should be: 89
        with autograd.record():
            loss = later(x_shard)
        loss.backward()
    plain.step(2)
    for _ in range(2 if on_kvstore is False else 1):
        assert step_uncut(later, plain) == said
        assert_weight(later, weight, pair)

# %% [markdown]
# ### `step(n, ignore_stale_grad=True)`
#
# MXNet's tutorial names one device twice on a machine with fewer than two GPUs: `[mx.gpu(),
# mx.gpu()]` or `[mx.cpu(), mx.cpu()]`. It got this option to "fix warning with 1 gpu" (commit
# 9fd3a816ee). Each loss has its own `backward`. So the first image is lost, as in chapter 05:

# %% tags=["trains"]
def losses_of(net, devices):
    losses = []
    with autograd.record():
        for x_shard in gluon.utils.split_and_load(x, devices):
            losses.append(net(x_shard))
    return losses


twice = [mx.cpu(0), mx.cpu(0)]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
for loss in losses_of(net, twice):
    loss.backward()
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% tags=["fold"]
# check: 90 on both replicas, and the first has no gradient
assert_weight(net, 90, twice)
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [0, 20]

# %% [markdown]
# The option only hides it. With `update_on_kvstore=False` as well, the first replica isn't updated
# at all, so the two end at 100 and 90.
#
# There are two ways to mend it. One `backward` for all losses writes the sum of their gradients:

# %% tags=["trains"]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(net, twice))  # NEW
trainer.step(2, ignore_stale_grad=True)
print_replicas(net.weight)

# %% tags=["fold"]
# check: 89 on both replicas, and the sum of both gradients
assert_weight(net, 89, twice)
assert [grad.asnumpy().item() for grad in net.weight.list_grad()] == [0, 22]

# %% [markdown]
# 89, the right weight. But there is still one device to do all the work, and a replica that nobody
# uses. It is better to name two devices and drop `ignore_stale_grad`:

# %% tags=["trains"]
net = one_weight_net(pair)  # NEW
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
for loss in losses_of(net, pair):
    loss.backward()
trainer.step(2)  # NEW
print_replicas(net.weight)

# %% tags=["fold", "trains"]
# check: 89 on two devices; one device twice: an error without the option; 100 and 90
assert_weight(net, 89, pair)
alone = one_weight_net(twice)
plain = gluon.Trainer(alone.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(alone, twice))
try:
    plain.step(2)
except UserWarning as error:
    assert "has not been updated" in str(error), "the replica that nobody uses"
else:
    raise RuntimeError("without ignore_stale_grad it should complain")
skipped = one_weight_net(twice)
plain = gluon.Trainer(skipped.collect_params(), "sgd", {"learning_rate": 1},
                      update_on_kvstore=False)
for loss in losses_of(skipped, twice):
    loss.backward()
plain.step(2, ignore_stale_grad=True)
assert [value.asnumpy().item() for value in skipped.weight.list_data()] == [100, 90], "skipped"

# %% [markdown]
# ### `weight.data()` without a device
#
# Which replica is `weight.data()`, the draft's and d2l's line, if there are two? We put one on
# `cpu(1)` and one on `cpu(2)`.

# %%
net = one_weight_net([four[1], four[2]])
with stops(RuntimeError):
    net.weight.data()

# %% [markdown]
# It looks on the *current context*, which is `cpu(0)` unless you say otherwise. So the line works
# on a list with `cpu(0)`, such as our simulated devices. **On GPUs:** it fails on
# `[gpu(0), gpu(1)]` (`Parameter._check_and_get`). Say which one you mean:

# %%
print(net.weight.data(four[2]).context)

# %% tags=["fold"]
# check: data() is the replica on the current context; a single replica is found anywhere
assert net.weight.list_ctx() == [four[1], four[2]] and mx.context.current_context() == four[0]
with four[2]:
    assert net.weight.data().context == four[2], "not the current context's"
with four[3]:
    try:
        net.weight.data()
    except RuntimeError as error:
        assert "was not initialized on context cpu(3)" in str(error)
    else:
        raise RuntimeError("no replica on the current context: it should fail")
assert one_weight_net([four[1], four[0]]).weight.data().context == four[0], "not cpu(0)"
single = one_weight_net(four[2])
assert single.weight.data().context == four[2], "not the only one"

# %% [markdown]
# ### `initialize` again
#
# *The Straight Dope*'s page initializes a network on two GPUs and looks at its gradients. Then it
# initializes the network again, on one GPU, and trains (commit 72a83ca). **Predict** the weight and
# its devices, if one device takes both images:

# %% tags=["trains"]
net = one_weight_net(pair)
autograd.backward(losses_of(net, pair))  # to look at the gradients
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    # The second time.
    net.initialize(mx.init.Constant(100), ctx=[mx.cpu(0)])
print("a warning:", said[0].message)

trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(net, [mx.cpu(0)]))
trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# The second `initialize` did nothing. So the weight is still on both devices, and `step` adds the
# gradient which `cpu(1)` had before: 100 − (22 + 20) / 2 = 79, without an error. The warning names
# the option that mends it:

# %% tags=["trains"]
# NEW.
net.initialize(mx.init.Constant(100), ctx=[mx.cpu(0)], force_reinit=True)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(net, [mx.cpu(0)]))
trainer.step(2)
print_replicas(net.weight)

# %% [markdown]
# Now the weight is on one device, and begins anew: what was learned is lost. There is an exception:
# while the initialization is *deferred*, a second `initialize` counts, without any warning.

# %%
# Its inputs aren't known, so it is deferred.
late = nn.Dense(1, use_bias=False)
late.initialize(mx.init.Constant(100), ctx=pair)
late.initialize(mx.init.Constant(7), ctx=four)
late(nd.ones((1, 1)))
print_replicas(late.weight)

# %% tags=["fold", "trains"]
# check: a warning, no change and 79; with force_reinit 89 on one; while deferred, no warning
assert_weight(net, 89, [mx.cpu(0)])
assert len(said) == 1 and "already initialized, ignoring" in str(said[0].message)
again = one_weight_net(pair)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    again.initialize(mx.init.Constant(7), ctx=[mx.cpu(0)])
assert_weight(again, 100, pair)
autograd.backward(losses_of(again, pair))
plain = gluon.Trainer(again.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(again, [mx.cpu(0)]))
plain.step(2)
assert_weight(again, 79, pair)
assert_weight(late, 7, four)
with warnings.catch_warnings():
    warnings.simplefilter("error")
    silent = nn.Dense(1, use_bias=False)
    silent.initialize(ctx=pair)
    silent.initialize(ctx=four)

# %% [markdown]
# ### `reset_ctx`: to other devices, with what was learned
#
# `reset_ctx`, which all three books use for fine-tuning, moves a network to other devices and keeps
# its values. But which, if the replicas differ? We set them to 2 and 6, as an all-reduce that was
# forgotten might leave them.

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
net.collect_params().reset_ctx(four)
print_replicas(net.weight)

# %% [markdown]
# It is the *mean* of the replicas, on each new device. If they were equal, the mean is their value,
# up to rounding. If they weren't, the mean hides it. So check before:

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
with stops(AssertionError):
    helpers.assert_replicas_equal(net.weight.list_data())

# %% tags=["fold"]
# check: the mean, on each new device, rounded for three
moved = one_weight_net(pair)
moved.weight.data(pair[0])[:] = 2
moved.weight.data(pair[1])[:] = 6
moved.collect_params().reset_ctx(four)
assert_weight(moved, 4, four)
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
# | `import gluonbook as gb` (2018) | not installed; `d2l` differs | install it, as above |
# | `import utils` (2017) | no such module | chapter 04's own functions, `helpers` |
# | `gluon.autograd.record()` (2017) | no such attribute | `from mxnet import autograd` |
# | `"cnn_conv2d0_weight"` (2017) | no such parameter | `net[0].weight` |
# | `d2l.try_all_gpus()` (1.0, no GPU) | `[]`, then a division by zero | `helpers.devices(2)` |
# | `except RuntimeError` (2018, 1.0) | too early: catches "deferred" | `weight.list_ctx()` |
# | a batch that isn't cut | an error after the update, or an old gradient | `split_and_load` |
# | one device twice, a `backward` for each loss | the last shard only | two devices |
# | `weight.data()`, several replicas | the current context's, or an error | `weight.data(device)` |
# | `initialize` a second time | a warning; old devices, old gradients | `force_reinit=True` |
# | the same while deferred | the new start and devices, without a word | `initialize` once |
# | `reset_ctx(devices)` | the mean of the replicas | `assert_replicas_equal` before |
