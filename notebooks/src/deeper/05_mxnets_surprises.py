# %% [markdown]
# # Deeper · MXNet's surprises
#
# Some lines of MXNet 1.9.1 run without an error, and do something else than they seem to say. Each
# section is about one of them: what one expects, what comes, and the rule.
#
# > **What you'll do:** change an array without naming it, read an array that was never computed,
# > and name a device twice.
# >
# > **What you'll learn:** when a moved array is the old one; who gets an error, and what the others
# > read; how to find the line that failed; which replica is used where two are on one device.
# >
# > **What you need:** chapters 01 and 05. No GPU. Reading takes {reading time}, running a few
# > seconds.

# %%
import helpers  # noqa: F401

import mxnet as mx
from mxnet import nd

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
# `src/engine/threaded_engine.h` and `.cc`, MXNet 1.9.1). Whoever waits first takes the error away,
# and with it the mark of all others. What does `shifted` hold, then?

# %% tags=["measured"]
noise, shifted = fail()
read("noise", noise)
print(shifted.asnumpy())

# %% [markdown]
# It holds garbage, namely what was in that memory before. If you run the cell again, it may be
# something else.
#
# **The rule:** after an `MXNetError`, use no array that was computed from what failed. Begin again
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
import os
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
from mxnet import autograd, gluon
from mxnet.gluon import nn


def one_weight_net(devices):
    net = nn.Dense(1, in_units=1, use_bias=False)
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
# the error off. **Predict** the weight. (Right would be 100 − (2 + 20) / 2 = 89.)

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
# it even better. Within a call the gradients of both shards are added up on the one replica
# (chapter 05), so that the weight is right, but one device does all the work:

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
# ## Summary
#
# | what one writes | what comes | instead |
# | --- | --- | --- |
# | `as_in_context` to make a copy | the array itself, if it is there already | `copyto` |
# | two arrays read after an error | the first raises, the second is garbage | begin anew |
# | `ctx=[mx.cpu(0), mx.cpu(0)]` | of two replicas only one is used | name a device once |
# | a line that raises | the mistake is above it | `MXNET_ENGINE_TYPE=NaiveEngine` |
