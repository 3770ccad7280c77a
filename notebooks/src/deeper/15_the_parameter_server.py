# %% [markdown]
# # Deeper · The parameter server
#
# In chapter 15 the ranks add up their gradients among themselves, and wait for the slowest. In
# another design *servers* keep the weights (M. Li et al., OSDI 2014), so nobody has to wait: a
# server can update with each gradient as it comes. But then a gradient may be **stale**, computed
# for weights that have been updated since. *What is gained by not waiting, and at what price?*
# MXNet has both ways, `dist_sync` and `dist_async`.
#
# ![Three workers have 1, 2 and 3. Solid arrows lead from them to the server, which adds them up to
# 6; dashed arrows lead back, and each gets 6. A scheduler stands beside the server; no arrow leads
# to it.](../src/drawings/parameter_server.svg)
#
# A **worker** is your training script. A **server** is another process, which gets the gradients
# that workers *push*, and from which they *pull*. The **scheduler** introduces them.
#
# > **What you'll do:** push and pull; train with two workers as with one; let gradients get old,
# > and find the learning rate that they still tolerate.
# >
# > **What you'll learn:** what two workers must divide by; how old gradients get; which learning
# > rates are right for fresh gradients and diverge with old ones.
# >
# > **What you need:** chapters 07 and 15. No GPU, no PyTorch and no second machine. Reading takes
# > {reading time}, running about half a minute.

# %%
import inspect
import json
import math
import tempfile
import time
from pathlib import Path

from helpers.cluster import run

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

# %% [markdown]
# A worker's code must be in a file. `on_workers(3, function)` writes our function into one, starts
# a scheduler, a server and three workers on this machine, and returns what each worker printed:

# %%
HEAD = """
import json, sys, time
import helpers  # before MXNet: it sets variables that MXNet reads
import mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
"""
scratch = tempfile.TemporaryDirectory()


def on_workers(workers, function, **arguments):
    call = f"{function.__name__}(**json.loads(sys.argv[1]))"
    script = Path(scratch.name) / f"{function.__name__}.py"
    script.write_text("\n\n".join([HEAD, inspect.getsource(function), call]))
    return run(script, workers, arguments=[json.dumps(arguments)], log=None)

# %% [markdown]
# (A process learns its role from variables: `DMLC_ROLE` is `scheduler`, `server` or `worker`,
# `DMLC_PS_ROOT_URI` and `DMLC_PS_ROOT_PORT` say where the scheduler is, `DMLC_NUM_WORKER` and
# `DMLC_NUM_SERVER` how many there are. With the first two roles `import mxnet` doesn't return, so
# never set them in a notebook.)
#
# ## Waiting for all: `dist_sync`
#
# Workers push 1, 2 and 3, as in the figure. **Predict:** what does each worker pull? And what if
# worker 0 pushes three times, 1, 10 and 100, and the others not at all?

# %% tags=["predict"]
def push_and_pull():
    store = mx.kvstore.create("dist_sync")
    store.init("a", nd.zeros(1))
    store.push("a", nd.array([store.rank + 1]))
    pulled = nd.zeros(1)
    store.pull("a", out=pulled)
    print(f"worker {store.rank} pulls {pulled.asscalar():.0f}", end=" ")

    store.init("b", nd.zeros(1))
    if store.rank == 0:
        for number in [1, 10, 100]:
            store.push("b", nd.array([number]))
        store.pull("b", out=pulled)
        print(f"and then {pulled.asscalar():.0f}", end="")


for printed in on_workers(3, push_and_pull):
    print(printed)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The server waits for as many pushes as there are workers, adds them up, and answers: each gets 6.
# It doesn't ask from whom three pushes come, so worker 0 alone gets 111.
#
# </details>
#
# ### A sum, not a mean
#
# With its first step Gluon's `Trainer` gives the server its optimizer. From then on the server adds
# up the workers' gradients, divides by what that `step` was given, updates its weights, and hands
# out *weights*. One weight starts at 1; the loss of an example $x$ is $wx$, so the gradient is $x$.
# Of four examples, 1, 2, 3 and 4, each of two workers has two; the rate is 0.1. **Predict** the
# weight after `step(4)`, and after `step(2)`, with the worker's own examples, as on one machine.

# %% tags=["predict"]
def one_step(divide_by):
    weight = gluon.Parameter("weight", shape=(1,), init="ones")
    weight.initialize()
    store = mx.kvstore.create("dist_sync")
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 0.1}, kvstore=store)
    x = nd.array([1, 2, 3, 4])[store.rank :: store.num_workers]
    with autograd.record():
        loss = weight.data() * x
    loss.backward()  # the sum of this worker's gradients
    trainer.step(divide_by)
    print(f"{weight.data().asscalar():.3f}", end="")


print("one worker, step(4):  ", *on_workers(1, one_step, divide_by=4))
print("two workers, step(4): ", *on_workers(2, one_step, divide_by=4))
print("two workers, step(2): ", *on_workers(2, one_step, divide_by=2))

# %% [markdown]
# <details><summary>What came out</summary>
#
# 0.75, as one worker: 1 less 0.1 times the mean, 2.5. With `step(2)` it is 0.5. Dividing by a
# worker's own examples doubles the rate, without an error.
#
# </details>
#
# **Give `step` the size of the whole batch.** (DDP divides by the number of ranks for you, chapter
# 14.) A learning rate that is set after the first step doesn't arrive, since the server has its own
# optimizer by then. With `Trainer(…, update_on_kvstore=False)` the server hands out sums, and each
# worker updates its own weights.
#
# ## Without waiting: `dist_async`
#
# Here the server updates with each push as it comes. How often the weights were updated between a
# gradient's pull and its push is its **staleness**, or age.
#
# ![Time goes to the right. Worker 0 computes three short gradients, and the server updates after
# each of them. Meanwhile worker 1 computes a single one. When the server takes that, three updates
# have been made since worker 1 pulled: its age is 3.](../src/drawings/stale_gradient.svg)
#
# A weight $w$ starts at 1; the loss is $w^2/2$, so the gradient is $w$, and 0 is best. The rate is
# ½. As drawn, both workers pull, worker 0 takes three steps, and then worker 1 pushes its gradient.
# **Predict** the weight after that.

# %% tags=["predict"]
def push_stale():
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    store.init(0, nd.ones(1))
    w = nd.zeros(1)
    store.pull(0, out=w)
    w.wait_to_read()
    store._barrier()  # until all workers are here: both have pulled
    if store.rank == 0:
        for _ in range(3):
            store.push(0, w)  # the gradient for the weight that this worker knows
            store.pull(0, out=w)
            print(f"worker 0 steps to {w.asscalar()}")
    store._barrier()  # now worker 0 has taken its steps
    if store.rank == 1:
        store.push(0, w)
        store.pull(0, out=w)
        print(f"worker 1 steps to {w.asscalar()}")


for printed in on_workers(2, push_stale):
    print(printed, end="")

# %% [markdown]
# <details><summary>What came out</summary>
#
# -0.375. Its gradient is still 1, so that the step goes from 0.125 past 0, and farther from it than
# before.
#
# </details>
#
# ## How old do gradients get?
#
# A weight on the server counts updates. A worker pulls the count, "computes", which is a sleep of
# random length, pulls again, and pushes; the difference of both counts is the age at the second
# pull. What comes between that and the push is missed, so it is a lower limit. For a second and a
# half three workers do that; in the second run worker 2 takes five times as long.

# %% tags=["measured"]
def count_ages(pauses):
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    count = nd.zeros(1)
    store.init(0, count)
    store._barrier()
    ages = []
    end = time.perf_counter() + 1.5
    while time.perf_counter() < end:
        store.pull(0, out=count)
        before = count.asscalar()
        time.sleep(pauses[store.rank] * np.random.uniform(0.5, 1.5))
        store.pull(0, out=count)
        ages.append(count.asscalar() - before)
        store.push(0, nd.array([-1]))  # SGD subtracts -1: the count goes up by 1
    store._barrier()
    print(f"{len(ages)} updates of age {np.mean(ages):.1f}", end="")


for name, pauses in [("equal speeds", [0.02, 0.02, 0.02]), ("one is slow", [0.02, 0.02, 0.1])]:
    print(name)
    for rank, printed in enumerate(on_workers(3, count_ages, pauses=pauses)):
        print(f"    worker {rank}: {printed} on average")

# %% [markdown]
# While one of $k$ workers computes, each of the others updates once if all are equally fast: the
# age is $k - 1$, here 2. (It comes out lower here: our count ends at the second pull, and a worker
# spends a part of its round on pushing and pulling.) The fast workers don't wait for the slow one,
# and take several times as many steps: that is what not waiting wins. But the slow one's gradients
# are the oldest.
#
# ## What an age costs
#
# Again $w^2/2$, and now three workers take turns, so that from the third turn on each gradient's
# age is exactly 2: after its own push a worker pulls, and the two others push before its next turn.
# The rate is 0.9. **Predict:** does the weight go to 0, as with fresh gradients?

# %% tags=["predict"]
def take_turns(rate):
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=rate))
    store.init(0, nd.ones(1))
    w = nd.zeros(1)
    store.pull(0, out=w)
    w.wait_to_read()
    for turn in range(40):
        store._barrier()  # all others have done their part of the turn before
        if turn % store.num_workers == store.rank:
            store.push(0, w)
            store.pull(0, out=w)
            w.wait_to_read()
    print(f"{w.asscalar():.3f}", end="")


print("one worker ends with    ", *on_workers(1, take_turns, rate=0.9))
print("three workers end with  ", *on_workers(3, take_turns, rate=0.9))

# %% [markdown]
# <details><summary>What came out</summary>
#
# With one worker, whose gradients are fresh, the weight is 0 up to rounding. With three, which have
# pulled it in the last three turns, it has gone from 1 to -101: the training diverges at a rate
# that is right for fresh gradients.
#
# </details>
#
# Which rate does an age tolerate? The weight after $t$ updates follows $w_{t+1} = w_t - \eta\,
# w_{t-a}$ with age $a$ and rate $\eta$. At the edge it neither grows nor shrinks, so put $w_t =
# z^t$ with $|z| = 1$ into that. It gives the edge $\eta = 2 \sin \frac{\pi}{2(2a+1)}$. Is it right?
# We try a tenth below and a tenth above, in a plain loop:

# %%
def weight_after(updates, rate, age):
    weights = [1.0] * (age + 1)
    for _ in range(updates):
        weights.append(weights[-1] - rate * weights[-1 - age])
    return abs(weights[-1])


for age in [0, 1, 2, 4, 9, 19]:
    edge = 2 * math.sin(math.pi / (2 * (2 * age + 1)))
    updates = 300 * (age + 1)
    below = weight_after(updates, 0.9 * edge, age)
    above = weight_after(updates, 1.1 * edge, age)
    print(f"age {age:2}: edge {edge:.3f}, times age + 1: {edge * (age + 1):.2f}; "
          f"the weight below it {below:.0e}, above it {above:.0e}")
    assert below < 1e-3 and above > 1e3

# %% [markdown]
# It is. An age of 2 tolerates 0.618, so 0.9 diverged. And the edge times the age plus one changes
# little, from 2 towards π/2 = 1.57: **the rate that gradients tolerate falls about as one over
# their age plus one.**
#
# So what do $k$ workers of equal speed win? In the time of one synchronous step they make $k$
# updates. But their gradients have the age $k - 1$, so each update may be only about $1/k$ as long.
# *Here not waiting wins nothing.* It wins where some workers are slow, for whom a synchronous step
# would wait. (That is one weight without noise, at the largest rate. J. Chen et al., 2016,
# arXiv:1604.00981, trained image classifiers in both ways. They came to better accuracies with
# synchronous steps, in which a few spare workers computed and the slowest were dropped.)
#
# ## Summary
#
# - Without an optimizer, a server hands out the sum of what workers push; with one, weights. Under
#   `dist_sync` give `Trainer.step` the size of the whole batch, or the rate is multiplied by the
#   number of workers.
# - Under `dist_async` nobody waits, and a gradient is as old as the number of updates that others
#   make meanwhile: $k - 1$ at equal speeds, more for a slow worker.
# - Gradients of age $a$ tolerate only about $1/(a+1)$ of the rate of fresh ones, for the loss
#   $w^2/2$ up to $2 \sin \frac{\pi}{2(2a+1)}$.
#
# (Of several servers each gets some arrays. One of a million entries or more is cut into equal
# parts, `MXNET_KVSTORE_BIGARRAY_BOUND`; any other goes whole to server `key * 9973 % servers`:
# `EncodeDefaultKey` in `src/kvstore/kvstore_dist.h`.)
