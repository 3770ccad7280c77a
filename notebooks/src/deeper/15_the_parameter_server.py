# %% [markdown]
# # Deeper · The parameter server
#
# In chapter 15 the ranks add up their gradients among themselves. In another design *servers* add
# them (M. Li et al., OSDI 2014). Across machines, MXNet's key-value store (chapter 07) has such
# servers. Who divides by the batch then, who updates the weights, and who notices a death?
#
# ![Three workers have 1, 2 and 3. Solid arrows lead from them to the server, which adds them up to
# 6; dashed arrows lead back, and each gets 6. A scheduler stands beside the server; no arrow leads
# to it.](../src/drawings/parameter_server.svg)
#
# A **worker** is your training script. A **server** is another process, which adds up the gradients
# that workers push. The **scheduler** introduces them; no gradient passes through it. In a worker,
# the object `store` speaks to the server.
#
# As drawn, sums come back. Once the server has an optimizer, it keeps the *weights*, updates them
# with each sum, and hands out weights.
#
# > **What you'll do:** train LeNet on two workers. Fall into the trap of the sum. Measure how old
# > gradients get. Kill workers and servers.
# >
# > **What you'll learn:** by which variables MXNet's processes find their roles; what two workers
# > must divide by, to equal one; what `dist_async` does to a gradient; what MXNet says when one of
# > its processes dies.
# >
# > **What you need:** chapters 07 and 15. No GPU, no PyTorch and no second machine. Reading takes
# > {reading time}, running about a minute.

# %% tags=["fold"]
# define: imports, and the folder in which all files go
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from helpers import load_data
from helpers.cluster import SERVER, Cluster, Failed, run
from helpers.compare import largest_difference
from helpers.networks import lenet

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd, gluon, nd

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
os.environ["STARTED_IN"] = str(folder)  # what we start inherits it: so `still_running` finds it

# %% [markdown]
# ## Who am I?
#
# How does a process learn its role? From its environment: a scheduler or server when it imports
# MXNet, a worker when it creates its store.

# %%
def variables(role, host, root, port, workers, servers):
    return {
        "DMLC_ROLE": role,  # scheduler, server or worker
        "DMLC_NODE_HOST": host,  # where a server or worker listens
        "DMLC_PS_ROOT_URI": root,  # where the scheduler listens
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }

# %% [markdown]
# For scheduler and server, `import mxnet` with their role is enough: the process serves, and exits
# inside the import. **So in a notebook, never set one of these two roles** before the import: its
# kernel would end there.
#
# A worker's code must be in a file. `write_script` writes our function into one. `run_by_hand`
# starts one scheduler, one server and the workers on this machine.

# %% tags=["fold"]
# define: write_script(*functions) and run_by_hand(script, workers); it returns what workers printed
HEAD = """
import json, os, sys, time
import helpers  # before MXNet: it sets variables that MXNet reads
import mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from helpers.networks import lenet
"""


def write_script(*functions):
    parts = [HEAD]
    for function in functions:
        parts.append(inspect.getsource(function))
    main = functions[-1].__name__
    parts.append(f"{main}(**json.loads(sys.argv[1]))")  # its arguments, by name
    path = folder / f"{main}.py"
    path.write_text("\n\n".join(parts))
    return path


def start_role(role, port, workers, command):
    here = "127.0.0.1"
    settings = variables(role, host=here, root=here, port=port, workers=workers, servers=1)
    environment = {**os.environ, **settings}
    return subprocess.Popen([sys.executable, *command], env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def run_by_hand(script, workers):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # 0 means: any port that is free
        port = listener.getsockname()[1]
    services = []
    for role in ["scheduler", "server"]:
        services.append(start_role(role, port, workers, ["-c", "import mxnet"]))
    started = []
    for _ in range(workers):
        started.append(start_role("worker", port, workers, [str(script), "{}"]))  # no arguments
    printed = []
    try:
        for process in started:
            text, _ = process.communicate(timeout=100)
            printed.append(text)
    finally:
        for process in services + started:
            process.kill()
            process.communicate()
    return sorted(printed)

# %% [markdown]
# The store's kind is `dist_sync`, and workers push 1, 2 and 3, as in the figure. For each key, the
# server
#
# 1. waits for as many pushes as there are workers, here three;
# 2. adds them up, $1 + 2 + 3 = 6$; without an optimizer, the sum *replaces* what it had;
# 3. confirms the three pushes, and begins to wait anew.
#
# A worker's pull waits until its own push is confirmed. **Predict** what each worker pulls.

# %%
def push_and_pull():
    store = mx.kvstore.create("dist_sync")
    store.init(0, nd.zeros(1))  # key 0
    store.push(0, nd.array([store.rank + 1]))
    total = nd.zeros(1)
    store.pull(0, out=total)
    print(f"worker {store.rank} pulls {total.asscalar():.0f}")


printed = run_by_hand(write_script(push_and_pull), workers=3)
print("".join(printed), end="")

# %% [markdown]
# And if worker 0 pushes three times, and the others not at all? **Predict** what it pulls.

# %%
def push_alone():
    store = mx.kvstore.create("dist_sync")
    store.init(0, nd.zeros(1))
    if store.rank == 0:
        for number in [1, 10, 100]:
            store.push(0, nd.array([number]))
        total = nd.zeros(1)
        store.pull(0, out=total)
        print(f"worker 0 pulls {total.asscalar():.0f}")


printed_alone = run_by_hand(write_script(push_alone), workers=3)
print("".join(printed_alone), end="")

# %% tags=["fold"]
# check: 1 + 2 + 3 for each; and 1 + 10 + 100, three pushes, whoever sent them
assert printed == ["worker 0 pulls 6\n", "worker 1 pulls 6\n", "worker 2 pulls 6\n"]
assert printed_alone == ["", "", "worker 0 pulls 111\n"]
# The server's part is `ApplyUpdates` in `src/kvstore/kvstore_dist_server.h`. On GPUs worker 0 would
# hang: its second push needs the key's buffer, which is in use until the server answers the first
# (`Push_` and `PushDefault` in `kvstore_dist.h`; read, not run).

# %% [markdown]
# 111: the server doesn't ask from whom three pushes come. **So in every step, push a key once, then
# pull it.**
#
# From here on, `on_workers(2, function)` runs a function on two workers and returns what each
# printed. If it gets several, it runs the last; the others are what that one calls. It uses
# `helpers.cluster.run`, which leaves no process running.

# %% tags=["fold"]
# define: on_workers(workers, *functions, timeout, **arguments); the arguments are the last one's
def on_workers(workers, *functions, timeout=120, **arguments):
    script = write_script(*functions)
    given = json.dumps(arguments, default=str)  # a path becomes a string
    return run(script, workers, arguments=[given], timeout=timeout, log=None)

# %% [markdown]
# ## LeNet on two workers
#
# Do two workers compute what one does? All draw the same order of batches. Worker `rank` of `k`
# takes every `k`-th of a batch's 32 images.

# %% tags=["measured", "fold"]
# define: 512 images and labels, in our folder, which stands for a disk that all machines see
data = load_data("mnist", limit=512)
np.save(folder / "images.npy", data.train_images - data.train_images.mean())
np.save(folder / "labels.npy", data.train_labels)
print(data)

# %% tags=["fold"]
# define: start_network(), LeNet in float64 (so that 1e-12 means something), always the same weights
def start_network():
    mx.random.seed(15)
    net = lenet()
    net.cast("float64")
    net.initialize(mx.init.Xavier())
    net(nd.zeros((1, 1, 28, 28), dtype="float64"))  # now it knows its shapes
    return net

# %% [markdown]
# A worker's gradient is the *sum* over its images:

# %%
def backward_of_sum(net, images, labels):
    x = nd.array(images, dtype="float64")
    y = nd.array(labels, dtype="float64")
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    return loss.sum().asscalar()

# %% [markdown]
# With its first step, `Trainer` gives the store its optimizer. From then on the server adds up the
# workers' gradients, divides, updates its weights, and hands out *weights*. The first `step` has
# told it what to divide by: 32, the whole batch.

# %% tags=["trains"]
def train_worker(folder, name, kind="dist_sync", divide_by=32, lr=0.25):
    store = mx.kvstore.create(kind)
    images = np.load(f"{folder}/images.npy")
    labels = np.load(f"{folder}/labels.npy")
    net = start_network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr}, kvstore=store)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(512)
        for batch in np.split(order, 16):
            # A local store: rank 0 of 1, so all.
            rows = batch[store.rank :: store.num_workers]
            losses.append(backward_of_sum(net, images[rows], labels[rows]))
            trainer.step(divide_by)
    net.save_parameters(f"{folder}/{name}-{store.rank}.params")
    np.save(f"{folder}/{name}-{store.rank}.npy", losses)

# %% [markdown]
# The oracle is one worker that gets whole batches, here in the notebook, with a local store.
# **Predict:** how far from it will *each* of two workers be, after 32 steps?

# %% tags=["trains"]
train_worker(folder, "one", kind="local")
on_workers(2, start_network, backward_of_sum, train_worker, folder=folder, name="two")

one = nd.load(f"{folder}/one-0.params")  # arrays by name
for rank in range(2):
    weights = nd.load(f"{folder}/two-{rank}.params")
    # As a part of the largest weight.
    difference = largest_difference(weights, one)
    print(f"worker {rank}: within 1e-12 of one worker: {difference < 1e-12}")
    assert difference < 1e-12

# %% tags=["fold"]
# check: it learns, so equal weights mean something
whole_losses = np.load(folder / "one-0.npy")
assert len(one) == 8 and len(whole_losses) == 32
assert whole_losses[-8:].mean() < 0.7 * whole_losses[:8].mean()

# %% [markdown]
# **Two workers equal one, to 1e-12 of the largest weight.**
#
# ## The trap: a sum, not a mean
#
# Code that was right on one machine says `step(len(x))`, with the worker's own `x`, here 16 images.
# Nothing complains. **Predict:** what is that training equivalent to?
#
# A batch's loss is the sum over the two workers' halves. We compare those of all 32 steps:

# %% tags=["trains"]
on_workers(2, start_network, backward_of_sum, train_worker, folder=folder, name="wrong",
           divide_by=16)
train_worker(folder, "fast", kind="local", lr=0.5)  # twice the rate

wrong_losses = np.load(folder / "wrong-0.npy") + np.load(folder / "wrong-1.npy")
fast_losses = np.load(folder / "fast-0.npy")
difference = largest_difference(wrong_losses, fast_losses)
print(f"within 1e-9 of one worker at twice the learning rate: {difference < 1e-9}")
assert difference < 1e-9

# %% tags=["fold"]
# check: so it is loss for loss; and the right training's losses are others
assert len(wrong_losses) == 32
assert np.allclose(wrong_losses, fast_losses, rtol=1e-8)
assert not np.allclose(wrong_losses[:8], whole_losses[:8], rtol=1e-3)

# %% [markdown]
# **Dividing by a worker's own images multiplies the learning rate by the number of workers**, for
# plain SGD as here. DDP divides by the number of ranks for you (chapter 14).
#
# ## Who updates?
#
# The optimizer is now on the server. What becomes of a learning rate that you set afterwards? On
# one worker, one weight starts at 1. Its gradient is 1, and so is the learning rate; `step(4)`
# divides by 4. **Predict** the weight after each step.

# %% tags=["trains"]
def set_rate_afterwards():
    weight = gluon.Parameter("weight", shape=(1,), init="ones")
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore="dist_sync")
    for rate in [1, 0]:
        trainer.set_learning_rate(rate)
        with autograd.record():
            total = weight.data().sum()
        total.backward()
        trainer.step(4)
        print(f"learning rate {rate}: the weight becomes {weight.data().asscalar()}")


(text,) = on_workers(1, set_rate_afterwards)
print(text, end="")

# %% tags=["fold"]
# check: the server went on with learning rate 1
assert text.splitlines() == [f"learning rate 1: the weight becomes {1 - 1 / 4}",
                             f"learning rate 0: the weight becomes {1 - 2 / 4}"]

# %% [markdown]
# **A learning rate that is set after the first step changes only your copy**, without a word. (An
# `lr_scheduler` that the optimizer had before goes with it to the server.) Another batch size and
# saving the optimizer's state fail aloud:

# %% tags=["trains", "fold"]
# check: after a first step, step(5) and save_states raise; not so with update_on_kvstore=False
def ask_more(update_on_kvstore):
    import pickle

    weight = gluon.Parameter("weight", shape=(1,), init="ones")
    weight.initialize()
    options = {"learning_rate": 1, "momentum": 0.5}
    trainer = gluon.Trainer([weight], "sgd", options, kvstore="dist_sync",
                            update_on_kvstore=update_on_kvstore)
    for size, rate in [(4, 1), (5, 0.5)]:
        trainer.set_learning_rate(rate)
        with autograd.record():
            total = weight.data().sum()
        total.backward()
        try:
            trainer.step(size)
        except UserWarning as error:  # MXNet raises it like any error
            print(f"step({size}):", str(error).split(".")[0])
    path = f"states-{os.getpid()}"
    try:
        trainer.save_states(path)
        with open(path, "rb") as file:
            states, _ = pickle.load(file)
        os.remove(path)
        print(f"{weight.data().asscalar():.3f} {states[0].asscalar():.3f}")
    except AssertionError as error:
        print("save_states:", str(error).split(".")[0])


(text,) = on_workers(1, ask_more, update_on_kvstore=None)
print(text, end="")
lines = text.splitlines()
assert lines[0].startswith("step(5): Possible change in the `batch_size`")
assert lines[1].startswith("save_states: Cannot save states for distributed training")

(text,) = on_workers(1, ask_more, update_on_kvstore=False)
momentum = 0.5 * (-1 / 4) - 0.5 * 1 / 5  # both the new rate, 0.5, and the new size, 5, count
assert text == f"{1 - 1 / 4 + momentum:.3f} {momentum:.3f}\n"

# %% [markdown]
# **With `Trainer(..., update_on_kvstore=False)`, all three work under `dist_sync`.** Then the
# server hands out sums, as in the figure, and each worker updates its own weights.
#
# The optimizer travels *pickled* (`kvstore_server.py`), and unpickling can run any code. **Keep
# such a cluster in a network of its own.**
#
# ## Without waiting: `dist_async`
#
# What if nobody waits for the slowest? Under `dist_async` the server updates its weights with each
# push as it comes. But a gradient may be *stale*: computed for weights that others have updated
# since. How often they did is its *age*.
#
# ![Time goes to the right. Worker 0 computes three short gradients, and the server updates after
# each of them. Meanwhile worker 1 computes a single one. When the server takes that, three updates
# have been made since worker 1 pulled: its age is 3.](../src/drawings/stale_gradient.svg)
#
# A weight $w$ starts at 1; the loss is $w^2/2$, so the gradient is $w$, and 0 is best. The rate is
# ½. As drawn, both workers pull, worker 0 takes three steps, and only then does worker 1 push its
# gradient. **Predict** the weight after that.

# %%
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
            # The gradient for the weight that this worker knows.
            store.push(0, w)
            store.pull(0, out=w)
            print(f"worker 0 steps to {w.asscalar()}")
    store._barrier()  # now worker 0 has taken its steps
    if store.rank == 1:
        store.push(0, w)
        store.pull(0, out=w)
        print(f"then worker 1 to  {w.asscalar()}")


text = on_workers(2, push_stale)
print(text[0] + text[1], end="")

# %% tags=["fold"]
# check: worker 0 takes half of what is left, three times; worker 1 takes half of 1
steps = [float(line.split()[-1]) for line in (text[0] + text[1]).splitlines()]
assert steps == [0.5, 0.5**2, 0.5**3, 0.5**3 - 0.5]
assert abs(steps[3]) > steps[2] > 0.5**4

# %% [markdown]
# A fresh gradient would have led from 0.125 to 0.0625. The stale one leads to -0.375, past 0 and
# farther from it than before.
#
# And how old do gradients get? We let a weight on the server count updates. A worker pulls the
# count, "computes" (it sleeps), and pulls again: the difference is its gradient's age. Then it
# pushes.

# %%
def mean_age(pauses):
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    count = nd.zeros(1)
    store.init(0, count)
    store._barrier()
    ages = []
    end = time.perf_counter() + 1.5
    while time.perf_counter() < end:
        # The worker's own last push is counted in it.
        store.pull(0, out=count)
        before = count.asscalar()
        # Random: not in lockstep.
        pause = pauses[store.rank] * np.random.uniform(0.5, 1.5)
        time.sleep(pause)
        store.pull(0, out=count)
        ages.append(count.asscalar() - before)
        # SGD subtracts -1: the count goes up by 1.
        store.push(0, nd.array([-1]))
    store._barrier()
    print(np.mean(ages))

# %% [markdown]
# Three workers of equal speed; then worker 2 is five times as slow. **Predict** each worker's mean
# age.

# %% tags=["measured"]
equal = on_workers(3, mean_age, pauses=[0.02, 0.02, 0.02])
slow = on_workers(3, mean_age, pauses=[0.02, 0.02, 0.1])
for rank in range(3):
    print(f"worker {rank}: mean age {float(equal[rank]):.1f} at equal speeds, "
          f"{float(slow[rank]):.1f} with worker 2 slow")

# %% tags=["fold"]
# check: the slow worker's gradients are the oldest; and no worker counts its own updates
assert float(slow[2]) > max(float(slow[0]), float(slow[1]))
(alone,) = on_workers(1, mean_age, pauses=[0.02])
assert float(alone) == 0

# %% [markdown]
# Ideally the age is 2 at equal speeds: while one computes, each of the two others updates once.
# While the slow one computes, they update five times each: 10. While a fast one computes, the other
# updates once and the slow one a fifth of a time: 1.2. The others' pushes and pulls take time, so
# they update less often during one sleep. That probably lowers ages.
#
# ## What fails, and who notices
#
# Two workers push and pull, with a pause in each step:

# %%
def take_steps(steps):
    store = mx.kvstore.create("dist_sync")
    store.init(0, nd.zeros(1))
    total = nd.zeros(1)
    for step in range(steps[store.rank]):
        store.push(0, nd.ones(1))
        store.pull(0, out=total)
        total.wait_to_read()
        print(f"step {step} done")
        time.sleep(0.1)


begin = time.perf_counter()
unharmed = on_workers(2, take_steps, steps=[10, 10])
seconds_whole = time.perf_counter() - begin
print("worker 1 has done", unharmed[1].count("done"), "steps")

# %% [markdown]
# `on_workers` watches: when a process fails, it ends the others and raises `Failed`.
# `start_workers` only starts the processes; until we call `watch_over`, MXNet is alone with them.
#
# Now we kill one process after step 3, and wait as long as that whole run took: time enough for all
# to finish. **Predict:** how many of the four processes are still there then?

# %% tags=["fold"]
# define: start_workers, watch_over, still_there(cluster); and still_running(), to check at the end
def start_workers(workers, function, **arguments):
    return Cluster(write_script(function), workers, arguments=[json.dumps(arguments)], log=None)


def watch_over(cluster):
    try:
        cluster.wait()
    except Failed as error:
        print("  Failed:", str(error).split(" after")[0])


def still_running():
    """What this notebook has started, also indirectly, and nobody has ended."""
    found = []
    for process in psutil.process_iter():
        try:
            started_here = process.environ().get("STARTED_IN") == str(folder)
            if started_here and process.pid != os.getpid():
                found.append(process.pid)
        except psutil.Error:  # it ended just now, or isn't ours
            pass
    return found


child = subprocess.Popen(["sleep", "60"])
assert still_running() == [child.pid], "it finds what is there"
child.kill()
child.wait()
assert still_running() == []


def still_there(cluster):
    found = []
    for name, pid in cluster.processes.items():
        if psutil.pid_exists(pid):
            found.append(name)
    return found

# %%
def kill(victim):
    with start_workers(2, take_steps, steps=[10, 10]) as cluster:
        cluster.wait(until="step 3 done")
        os.kill(cluster.processes[victim], signal.SIGKILL)
        time.sleep(seconds_whole)
        there = still_there(cluster)
        print(f"{victim} killed; still there:", ", ".join(there))
        watch_over(cluster)
    return there, str(cluster.printed)


left_of_worker, printed_1 = kill("worker 1")
left_of_server, printed_2 = kill("server 0")

# %% tags=["fold"]
# check: all but the dead one were there, nobody had finished, and now nobody is left
assert unharmed[0].count("done") == unharmed[1].count("done") == 10
assert left_of_worker == ["scheduler", "server 0", "worker 0"]
assert left_of_server == ["scheduler", "worker 0", "worker 1"]
assert "step 3 done" in printed_1 and "step 9 done" not in printed_1
assert "step 3 done" in printed_2 and "step 9 done" not in printed_2
assert still_running() == [], "a process is left"

# %% [markdown]
# Three: all but the dead one. A worker waits for a push that never comes, or for a server.
#
# And if worker 1 takes four steps, and worker 0 only three? **Predict** which processes end.

# %% tags=["measured"]
try:
    on_workers(2, take_steps, steps=[3, 4], timeout=3 * seconds_whole)
except TimeoutError as error:
    message = str(error)
print(message.split(" Last lines")[0])

# %% tags=["fold"]
# check: both took three steps, nobody a fourth, and all four processes were still there
assert "scheduler, server 0, worker 0, worker 1;" in message
for rank in range(2):
    assert f"worker {rank}: step 2 done" in message
assert "step 3 done" not in message
assert still_running() == []
# At exit a store waits for all workers: `~KVStoreDist` in `kvstore_dist.h`. MXNet's C library has
# `MXKVStoreGetNumDeadNode`, but nothing in Python calls it; from a worker it looks at the scheduler
# only (`GetDeadNodes` in ps-lite's `postoffice.cc`; read, not run).
for name in dir(mx.kvstore.KVStore):
    assert "dead" not in name.lower()

# %% [markdown]
# None ends. Worker 1 waits for worker 0's push. Worker 0 has taken all its steps, and waits too: at
# exit its store waits for all workers. ("Hang", below: we saw it for as long as a whole run takes.)
#
# | what fails | MXNet alone, `dist_sync` | `run`, `Cluster` | torchrun |
# | --- | --- | --- | --- |
# | a worker | the others hang | `Failed` names it | restarts all, or ends all |
# | a server | workers hang | `Failed` names it | has no server |
# | unequal steps | the last step hangs | `TimeoutError` | `join` helps (deeper: DDP's cases) |
#
# **MXNet's Python has no call that tells of a death. Somebody has to watch.**
#
# ## On a cluster
#
# On real machines, only the variables change. The scheduler is on 192.0.2.10, a server and a worker
# on .11, a second worker on .12. That one is started so:

# %%
values = variables("worker", host="192.0.2.12", root="192.0.2.10", port=9000, workers=2, servers=1)
print("env")
for name, value in values.items():
    print(f"    {name}={value}")
print("    python train_worker.py ARGUMENTS")

# %% [markdown]
# Scheduler and server run `python -c 'import mxnet'`. Each host needs the script, `helpers` and the
# data. All listen only at the addresses given (`ZMQVan::Bind` in ps-lite's `zmq_van.h`), servers
# and workers at any free port unless `PORT` names one.
#
# Weights in float64, as in our LeNet, need one more variable: without it a server may keep them as
# float32. `run` sets it for its servers; on your cluster do the same (`helpers.cluster.SERVER`).

# %% tags=["fold"]
# check: the worst that a server may do to 1/3 without that variable, and what it does with it
def third():
    store = mx.kvstore.create("dist_sync")
    out = nd.zeros(1, dtype="float64")
    store.init(0, out)
    store.push(0, nd.ones(1, dtype="float64") / 3)
    store.pull(0, out=out)
    print(out.asscalar() - 1 / 3)


# The server's field `multi_precision_` (`kvstore_dist_server.h`) is never given a first value. If
# its memory happens not to be zero, weights of other types are kept as float32. Training in float32
# isn't touched (`has_multi_precision_copy`). glibc fills each byte of new memory with the inverse
# of the setting `perturb`: 254 gives 1, and 255, which `run` sets (SERVER), gives 0. It doesn't
# fill memory from its thread cache, so we switch that off.
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.perturb=254:glibc.malloc.tcache_count=0"
ones = float(run_by_hand(write_script(third), workers=1)[0])
del os.environ["GLIBC_TUNABLES"]
zeros = float(on_workers(1, third)[0])
print(f"1/3 comes back off by {abs(ones):.0e} without it, by {abs(zeros):.0f} with it")
assert SERVER["GLIBC_TUNABLES"].startswith("glibc.malloc.perturb=255:")
assert zeros == 0
assert 1e-9 < abs(ones) < 1e-7, "what float32 makes of 1/3"

# %% [markdown]
# ## Summary
#
# - Without an optimizer, a server hands out the sum of what workers push; with one, weights.
# - With `Trainer` the server divides and updates. Give `step` the size of the whole batch: then two
#   workers equal one to 1e-12 under `dist_sync`.
# - A learning rate that is set after the first step doesn't reach the server.
# - Under `dist_async` a gradient is as old as the number of updates that others make meanwhile.
# - MXNet's Python has no call that tells of a death: somebody has to watch.
#
# **Further reading.** *Distributed Training in MXNet*
# (`docs/static_site/src/pages/api/faq/distributed_training.md`); M. Li et al., *Scaling distributed
# machine learning with the parameter server* (OSDI 2014).

# %% [markdown]
# ## Exercises
#
# 1. **Whose keys?** Of several servers, each gets some arrays. Only an array of a million entries
#    or more is cut, into equal parts (`MXNET_KVSTORE_BIGARRAY_BOUND`). A smaller one goes whole to
#    server `key * 9973 % servers` (`EncodeDefaultKey` in `src/kvstore/kvstore_dist.h`). A store has
#    LeNet's eight arrays, sorted by name as in `Trainer`, as keys 0 to 7. What share of the bytes
#    does each of two servers get? And of three? Which number would you take?

# %% [markdown]
# ### Answer 1
#
# 9973 is odd, so with two servers even keys go to server 0 and odd keys to server 1: all biases to
# one, all weights to the other. With three, 9973 leaves 1, and keys go round.

# %% tags=["solution"]
parameters = start_network().collect_params()
sizes = [parameters[name].data().size for name in sorted(parameters.keys())]
for servers in range(1, 6):
    load_of = np.zeros(servers)
    for key in range(8):
        load_of[key * 9973 % servers] += sizes[key]
    shares = load_of / sum(sizes)
    print(servers, "servers:", ", ".join(f"{share:.1%}" for share in shares))
    assert shares.max() > (0.99 if servers == 2 else 0.75)

# %% [markdown]
# Three: the busiest server's share falls from 99.8 % to 79.4 %. More don't help: the largest array
# alone has 79.3 % of the entries, and is too small to be cut, unless you lower
# `MXNET_KVSTORE_BIGARRAY_BOUND`.
