# %% [markdown]
# # Deeper · MXNet's surprises
#
# Which lines of MXNet 1.9.1 run without an error, and do something else than they seem to say? Some
# are in published programs of 2017 and 2018. Each section is about one of them: what one expects,
# what happens, and the rule.
#
# > **What you'll do:** change an array without naming it, read an array that was never computed,
# > name a device twice, and overwrite weights while a store keeps its own.
# >
# > **What you'll learn:** when a moved array is the old one; who gets an error, and what the others
# > read; how to find the line that failed; which replica is used; what a second `initialize` does;
# > which lines of old programs stop, and what to write instead.
# >
# > **What you need:** chapters 01, 05 and 07. No GPU. Reading takes {reading time}, running a few
# > seconds. You can read each section by itself; to run one, run the first cell before it.

# %%
import helpers

import mxnet as mx
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## A move that moves nothing
#
# A program makes a replica of its `start` on each device, and trains. Here that is one weight, and
# a step that leaves 1.8 on both devices. Then the program wants to begin anew. One expects that
# `start` is still 0. **Predict:** what does it hold?

# %% tags=["predict"]
start = nd.zeros(1)
replicas = [start.as_in_context(pair[0]), start.as_in_context(pair[1])]
for replica in replicas:
    replica[:] = 1.8
print("start:", start.asscalar())

# %% [markdown]
# <details><summary>What came out</summary>
#
# It holds 1.8. `start` is on `cpu(0)`, where `as_in_context` has nothing to move, so that it
# returns `start` itself, and the step wrote into it.
#
# </details>
#
# Nothing says so: a second training would just begin elsewhere. On other devices the same lines are
# right, so a test there finds nothing:

# %%
start = nd.zeros(1)
elsewhere = [start.as_in_context(mx.cpu(1)), start.as_in_context(mx.cpu(2))]
for replica in elsewhere:
    replica[:] = 1.8
print("start:", start.asscalar())

# %% [markdown]
# `copyto` makes a new array on any device, also on the same one. But it doesn't take the gradient
# along:

# %%
start = nd.zeros(1)
start.attach_grad()
replicas = [start.copyto(pair[0]), start.copyto(pair[1])]
for replica in replicas:
    replica[:] = 1.8
print("start:", start.asscalar())
print("gradients of the replicas:", replicas[0].grad, replicas[1].grad)

# %% [markdown]
# **The rule:** `as_in_context` for what you only read, `copyto` for what you write into. For a
# replica, copy first and then call `attach_grad`.
#
# ## A copy that changes its device
#
# An array on `cpu(1)` is copied, pickled, and saved in a file. One expects that each copy is on
# `cpu(1)`. **Predict:** where is it?

# %% tags=["predict"]
import copy
import os
import pickle
import tempfile

array = nd.array([1, 2], ctx=mx.cpu(1))
array.attach_grad()
file = os.path.join(tempfile.mkdtemp(), "array")
nd.save(file, [array])
copies = {
    "array.copy()": array.copy(),
    "copy.deepcopy(array)": copy.deepcopy(array),
    "pickle": pickle.loads(pickle.dumps(array)),
    "nd.save, nd.load": nd.load(file)[0],
}
for way, copied in copies.items():
    print(f"{way:20} {copied.context}  gradient {copied.grad}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only `array.copy()` stays on `cpu(1)`. The three others go through bytes, and come back on
# `cpu(0)`. None of them has a gradient.
#
# </details>
#
# That is so for each CPU device. **On GPUs** an array comes back on the GPU from which it was
# saved, if the machine has GPUs (`NDArray::Load` in `src/ndarray/ndarray.cc`, read and not run), so
# a file from `gpu(3)` is a surprise on a machine with two.
#
# **The rule:** after loading, name the device: `nd.load(file)[0].as_in_context(device)`, and for a
# network `load_parameters(file, ctx=devices)`.
#
# ## An error is shared
#
# An operation on `cpu(0)` fails, because a normal distribution can't have a negative width. A
# second operation needs its result. As chapter 01 shows, the error comes out where Python waits.

# %%
def fail():
    # A width of -1.
    noise = nd.random.normal(0, -1, shape=(2, 2), ctx=pair[0])
    shifted = noise + 1
    return noise, shifted


def read(name, array):
    try:
        array.asnumpy()
        print(name, "raises nothing")
    except mx.MXNetError as error:
        print(name, "raises", str(error).splitlines()[-1])

# %% [markdown]
# One expects an error from both, since `noise` was never made, and without it `shifted` can't have
# been computed. **Predict:** which of these four lines raise?

# %% tags=["predict"]
noise, shifted = fail()
read("noise", noise)
read("shifted", shifted)

noise, shifted = fail()
read("shifted", shifted)
read("noise", noise)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The first of each pair. Whoever waits first gets the error, and then the other array looks like a
# good one.
#
# </details>
#
# The engine, which runs the queues, marks what an operation would have written with the error. An
# operation that reads a marked array isn't run, and what it would have written gets the *same*
# mark: all of these arrays share one error (`OnStart` and `OnComplete` in
# `src/engine/threaded_engine.h` and `.cc`, MXNet 1.9.1). Whoever waits first takes the error away
# (`ThrowException`, same place), and with it the mark of all others. What does `shifted` hold,
# then?

# %% tags=["measured"]
noise, shifted = fail()
read("noise", noise)
print(shifted.asnumpy())

# %% [markdown]
# It holds garbage, namely what was in that memory before. If you run the cell again, it may be
# something else.
#
# **The rule:** after an `MXNetError`, use no array that was computed from what failed. Start over
# from data that you trust, such as a file that was saved before.
#
# ### Which line failed?
#
# The line with the mistake is above the one that raised. To find it, wait after each line above. Or
# leave the program as it is, and run it with another engine: `NaiveEngine` does the work within the
# call. It must be chosen before MXNet starts, so one types
# `MXNET_ENGINE_TYPE=NaiveEngine python train.py`. We run a program with the usual engine and with
# this one, and print the line at which it stops:

# %%
import re
import subprocess
import sys

PROGRAM = """
import helpers
from mxnet import nd

noise = nd.random.normal(0, -1, shape=(2, 2))
shifted = noise + 1
print(shifted.asnumpy())
"""

for engine in ["ThreadedEnginePerDevice", "NaiveEngine"]:
    environment = dict(os.environ)
    environment["MXNET_ENGINE_TYPE"] = engine
    # So that it finds helpers.
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    program = subprocess.run([sys.executable, "-c", PROGRAM], env=environment,
                             capture_output=True, text=True)
    line = int(re.search(r'File "<string>", line (\d+)', program.stderr)[1])
    print(f"{engine}: {PROGRAM.splitlines()[line - 1]}")

# %% [markdown]
# ## A device that is named twice
#
# MXNet's tutorial *Multiple GPUs training with Gluon API* names one device twice where there are
# fewer than two GPUs. One expects two replicas, each with the gradient of its own shard. We take
# chapter 05's one weight, 100, and its images 2 and 20, whose gradients are 2 and 20. **Predict:**
# what are the gradients of the two replicas?

# %% tags=["predict"]
def one_weight_net(devices):
    # With an empty prefix, errors call it "weight".
    net = nn.Dense(1, in_units=1, use_bias=False, prefix="")
    net.initialize(mx.init.Constant(100), ctx=devices)
    return net


def losses_of(net, x_shards):
    losses = []
    with autograd.record():
        for x_shard in x_shards:
            losses.append(net(x_shard))
    return losses


twice = [mx.cpu(0), mx.cpu(0)]
x_shards = gluon.utils.split_and_load(nd.array([[2], [20]]), twice)

net = one_weight_net(twice)
for loss in losses_of(net, x_shards):
    loss.backward()
for grad in net.weight.list_grad():
    print("gradient", grad[0, 0].asscalar())

# %% [markdown]
# <details><summary>What came out</summary>
#
# 0 and 20. Both shards used the second replica, and the second `backward` overwrote the 2 of the
# first.
#
# </details>
#
# `net(x_shard)` finds a replica by the shard's device. As in a dictionary with the device as key,
# the second replica on `cpu(0)` has taken the place of the first:
#
# ![Both shards, image 2 and image 20, are on cpu(0), and both use the second replica: its gradient
# 2 is overwritten by 20. The first replica has the gradient 0.](../src/drawings/named_twice.svg)
#
# Now `step(2)` would raise an error, since the first replica never had a gradient. But the
# tutorial's `step` has `ignore_stale_grad=True`, as the error's own text proposes, and that turns
# the error off. **Predict** the weight. (The right value is 100 − (2 + 20) / 2 = 89.)

# %% tags=["predict", "trains"]
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
trainer.step(2, ignore_stale_grad=True)
for value in net.weight.list_data():
    print("value", value[0, 0].asscalar())

# %% [markdown]
# <details><summary>What came out</summary>
#
# 100 − (0 + 20) / 2 = 90, on both replicas. The image 2 is lost, while `step` still counts it.
#
# </details>
#
# In a training that costs half of each batch, and no error says so. One call for both losses hides
# it even better. Within a call the gradients of both shards are added up on the one replica, so
# that the weight is right, but the other replica is never used:

# %% tags=["trains"]
net = one_weight_net(twice)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(net, x_shards))
trainer.step(2, ignore_stale_grad=True)
for value, grad in zip(net.weight.list_data(), net.weight.list_grad()):
    print("value", value[0, 0].asscalar(), "gradient", grad[0, 0].asscalar())

# %% [markdown]
# **The rule:** name each device once, and leave `ignore_stale_grad` alone. A program that takes a
# list of devices can check it by `len(set(devices)) == len(devices)`. (`helpers.split_and_load`
# refuses a list that names one twice.)

# %% [markdown]
# ## A batch that nobody cut
#
# The draft of *Dive into Deep Learning* of 2018 says that `Trainer` shares out a batch to the
# devices. So one expects that the whole batch can be given to the network. The right weight after
# one step is again 89. **Predict:** what comes in a first step, and what if `cpu(1)` had a gradient
# before?

# %% tags=["predict", "trains"]
x = nd.array([[2], [20]])


def step_with_the_whole_batch(net, trainer):
    with autograd.record():
        loss = net(x)  # all of it, on cpu(0)
    loss.backward()
    try:
        trainer.step(2)
    except UserWarning as error:
        print("an error:", str(error).split(",")[0].split(". ")[0])
    print("weights:", [value[0, 0].asscalar() for value in net.weight.list_data()])


net = one_weight_net(pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
step_with_the_whole_batch(net, trainer)

net = one_weight_net(pair)
autograd.backward(losses_of(net, gluon.utils.split_and_load(x, pair)))
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
step_with_the_whole_batch(net, trainer)

# %% [markdown]
# <details><summary>What came out</summary>
#
# In the first step the weight is right, but an error says that `cpu(1)` never had a gradient. In
# the second training `cpu(1)` had one, 20, and `step` adds this old gradient to the new sum 22,
# without an error: 100 − (22 + 20) / 2 = 79.
#
# </details>
#
# `Trainer` can't cut anything, because it knows the parameters only, and `step` is given a number.
#
# **The rule:** cut each batch by `split_and_load`, and give each device its shard.
#
# ## A second `initialize`
#
# An early version of a notebook of *The Straight Dope* (September 2017, corrected in that month)
# initializes a network on two devices, looks at its gradients, and initializes it again on one
# device, to train there. One expects a weight on one
# device, and 89 after the step. **Predict** the weight and its devices:

# %% tags=["predict", "trains"]
import warnings

net = one_weight_net(pair)
autograd.backward(losses_of(net, gluon.utils.split_and_load(x, pair)))
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    net.initialize(mx.init.Constant(100), ctx=[mx.cpu(0)])
print("a warning:", str(said[0].message).split(". ")[0])

trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1})
autograd.backward(losses_of(net, [x]))
trainer.step(2)
print("devices:", net.weight.list_ctx())
print("weights:", [value[0, 0].asscalar() for value in net.weight.list_data()])

# %% [markdown]
# <details><summary>What came out</summary>
#
# The second `initialize` did nothing but warn. The weight is still on both devices, and `step` adds
# the gradient that `cpu(1)` had from before: 79 again.
#
# </details>
#
# With `force_reinit=True` the second call counts, and all that was learned is lost. There is an
# exception without a warning. While the inputs' number isn't known, `initialize` is *deferred*, and
# then the last call counts:

# %%
late = nn.Dense(1, use_bias=False)
late.initialize(mx.init.Constant(100), ctx=pair)
late.initialize(mx.init.Constant(7), ctx=[mx.cpu(2)])
late(nd.ones((1, 1), ctx=mx.cpu(2)))
print("devices:", late.weight.list_ctx(), "weight:", late.weight.data(mx.cpu(2))[0, 0].asscalar())

# %% [markdown]
# **The rule:** call `initialize` once. To move a trained network, use `reset_ctx`, which is next.
#
# ## `reset_ctx` hides that replicas differ
#
# `reset_ctx` moves a network to other devices and keeps its values. One expects the values of one
# replica, since all are equal. But an all-reduce that was forgotten might have left 2 and 6:

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
net.collect_params().reset_ctx([mx.cpu(2), mx.cpu(3)])
print("weights:", [value[0, 0].asscalar() for value in net.weight.list_data()])

# %% [markdown]
# It is the *mean* of the replicas. If they are equal, that is their value, up to rounding. If they
# aren't, the mean hides the mistake. Saving a network does the same (`Parameter._reduce` in
# `gluon/parameter.py`).
#
# **The rule:** before you move or save a network, call
# `helpers.assert_replicas_equal(net.weight.list_data())`:

# %%
net = one_weight_net(pair)
net.weight.data(pair[0])[:] = 2
net.weight.data(pair[1])[:] = 6
try:
    helpers.assert_replicas_equal(net.weight.list_data())
except AssertionError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## `weight.data()` without a device
#
# One expects the first replica. It is the one on the *current context*, which is `cpu(0)` unless
# one says otherwise. So the line works on a list with `cpu(0)`, and fails on any other, such as
# `[gpu(0), gpu(1)]`:

# %%
net = one_weight_net([mx.cpu(1), mx.cpu(2)])
try:
    net.weight.data()
except RuntimeError as error:
    print(str(error).split(". ")[0])
print("asked for cpu(2):", net.weight.data(mx.cpu(2)).context)

# %% [markdown]
# **The rule:** say which replica you mean, `weight.data(device)`.
#
# ## Weights that are written while a store keeps its own
#
# A program makes a step, overwrites the weight by 1000, for example with what it loaded, and makes
# another step. The gradients are 1 and 20, the learning rate is 1, the momentum 0.5. The first step
# subtracts 21. The second subtracts 21 and half of the first step, 31.5 together. So one expects
# 1000 − 31.5 = 968.5. There are two ways to write, in place and by `set_data`, and chapter 07's two
# ways to update. **Predict:** which of the four are right?

# %% tags=["predict", "trains"]
def step_on(weight, trainer):
    with autograd.record():
        losses = [1 * weight.data(pair[0]), 20 * weight.data(pair[1])]
    autograd.backward(losses)
    trainer.step(1)


for on_kvstore in [True, False]:
    for way in ["in place", "set_data"]:
        weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
        weight.initialize(ctx=pair)
        trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1, "momentum": 0.5},
                                update_on_kvstore=on_kvstore)
        step_on(weight, trainer)
        if way == "in place":
            for replica in weight.list_data():
                replica[:] = 1000
        else:
            weight.set_data(nd.array([1000]))
        step_on(weight, trainer)
        values = [replica.asscalar() for replica in weight.list_data()]
        print(f"update_on_kvstore={on_kvstore!s:5}  {way:8}  {values}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Where the devices update, both are right. Where the store updates, both are wrong. What was
# written in place is lost, because the store goes on with its own weight: 100 − 21 − 31.5 = 47.5.
# After `set_data` the Trainer makes a new store (`Parameter.set_data` in `gluon/parameter.py`). The
# weight arrives there, but the momentum is gone: 1000 − 21 = 979.
#
# </details>
#
# `load_parameters` calls `set_data`, too. So where a store updates, load the weights first and the
# trainer's states afterwards.
#
# **The rule:** a program that writes to its weights says `update_on_kvstore=False`.
#
# ## A kind of store that doesn't exist
#
# One expects an error for a name that is misspelt:

# %%
for kind in ["device", "devices", "devise", "Device", "horovod"]:
    store = mx.kvstore.create(kind)
    print(f"{kind:8} makes a store that says it is {store.type!r}")

# %% [markdown]
# MXNet turns the name into lower case, and looks for `dist`, `device` and `nccl` in it. Other names
# make a `local` store (`KVStore::Create` in `src/kvstore/kvstore.cc`), unless Python knows a store
# of this name (`kv_registry` in `kvstore/base.py`). So `devices` adds up on the devices, and
# `devise` on the host. Even `horovod`, which MXNet's documentation names, makes a `local` store
# where Horovod isn't installed.
#
# **The rule:** copy the name.
#
# ## Lines that stop
#
# Some lines of old programs do raise an error:

# %%
def draft_of_2018():
    import gluonbook as gb  # noqa: F401


def straight_dope():
    gluon.autograd.record()


def layer_by_name():
    net = nn.Sequential(prefix="cnn_")
    with net.name_scope():
        net.add(nn.Conv2D(20, kernel_size=3))
    net.collect_params()["cnn_conv2d0_weight"]


def no_gpu():
    gluon.utils.split_and_load(nd.arange(4), [])


for line in [draft_of_2018, straight_dope, layer_by_name, no_gpu]:
    try:
        line()
    except Exception as error:
        print(f"{line.__name__}: {type(error).__name__}")

# %% [markdown]
# | line | why it stops | instead |
# | --- | --- | --- |
# | `import gluonbook as gb` | the draft's package | `pip install --no-deps gluonbook` |
# | `gluon.autograd` | Gluon no longer imports it | `from mxnet import autograd` |
# | `"cnn_conv2d0_weight"` | Gluon has changed the names it makes | `net[0].weight` |
# | `split_and_load(x, [])` | `try_all_gpus()` of d2l 1.0 without a GPU | `helpers.devices(2)` |
#
# (Install `gluonbook` in an environment of its own: it is for older versions of other packages.)

# %% [markdown]
# ## Summary
#
# | what one writes | what comes | instead |
# | --- | --- | --- |
# | `as_in_context` to make a copy | the array itself, if it is there already | `copyto` |
# | `copy.deepcopy`, `pickle`, `nd.load` | an array on `cpu(0)` | name the device |
# | two arrays read after an error | the first raises, the second is garbage | start over |
# | a line that raises | the mistake is above it | `MXNET_ENGINE_TYPE=NaiveEngine` |
# | `ctx=[mx.cpu(0), mx.cpu(0)]` | of two replicas only one is used | name a device once |
# | a batch that isn't cut | an error, or an old gradient | `split_and_load` |
# | `initialize` a second time | a warning; old devices, old gradients | `initialize` once |
# | `reset_ctx`, `save_parameters` | the mean of the replicas | `assert_replicas_equal` before |
# | `weight.data()` | the current context's replica | `weight.data(device)` |
# | weights written between two steps | lost, or the momentum is | `update_on_kvstore=False` |
# | `kvstore="devise"` | a `local` store | copy the name |
