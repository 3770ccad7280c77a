# %% [markdown]
# # Deeper · The parameter server
#
# In chapter 15 the ranks add up their gradients among themselves. In an older design *servers* do
# it (M. Li et al., OSDI 2014), and MXNet's key-value store (chapter 07) works that way across
# machines:
#
# ![Three workers have 1, 2 and 3. Solid arrows lead from them to the server, which adds them up to
# 6; dashed arrows lead back, and each gets 6. A scheduler stands beside the server; no arrow leads
# to it.](../src/drawings/parameter_server.svg)
#
# A **worker** computes gradients; it is your training script. A **server** adds up what workers
# push and hands out the result. The **scheduler** introduces them, and no gradient passes through
# it.
#
# ## What you'll do
#
# Start all three kinds by hand. Train LeNet on two workers. Fall into the trap of the sum. Measure
# how old gradients get. Kill workers and servers, and see who notices.
#
# ## What you'll learn
#
# - by which variables MXNet's processes find their roles;
# - what two workers must divide by, to equal one;
# - what `dist_async` does to a gradient;
# - that MXNet tells nobody of a death.
#
# ## What you need
#
# Chapters 07 and 15. No GPU, no PyTorch and no second machine. Reading takes {reading time},
# running about a minute.

# %%
from helpers import load_data
from helpers.cluster import SERVER, Cluster, Failed, run
from helpers.compare import largest_difference
from helpers.networks import lenet

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

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd, gluon, nd

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

# %% [markdown]
# ## Scripts from functions
#
# Workers are processes of their own, so their code must be in a file. `write_script` puts the
# source of our functions there. The last one is the one that runs; its arguments come as JSON.

# %%
HEAD = """
import json, os, sys, time
import helpers  # before MXNet
import mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from helpers.networks import lenet
"""


def write_script(*functions):
    parts = [HEAD]
    for function in functions:
        parts.append(inspect.getsource(function))
    main = functions[-1].__name__
    parts.append(f"{main}(**json.loads(sys.argv[1]))")
    path = folder / f"{main}.py"
    path.write_text("\n\n".join(parts))
    return path


def say_hello(name):
    print("hello,", name)


path = write_script(say_hello)
print(path.read_text())

# %% [markdown]
# ## Who am I?
#
# A process learns its role from its environment, when it imports MXNet:

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
# inside the import. **So never set a role in a notebook**, whose kernel would end there.
#
# We start one scheduler, one server and the workers by hand, on this machine:

# %%
def start_role(role, port, workers, command):
    settings = variables(role, "127.0.0.1", "127.0.0.1", port, workers, servers=1)
    return subprocess.Popen([sys.executable, *command], env={**os.environ, **settings}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def run_by_hand(script, workers):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # 0 means: any port that is free
        port = listener.getsockname()[1]
    processes = []
    for role in ["scheduler", "server"]:
        processes.append(start_role(role, port, workers, ["-c", "import mxnet"]))
    for _ in range(workers):
        processes.append(start_role("worker", port, workers, [str(script), "{}"]))
    printed = []
    try:
        for process in processes[2:]:
            printed.append(process.communicate(timeout=100)[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return sorted(printed)

# %% [markdown]
# The smallest worker pushes its own number of times 1 to 6. The store's kind is `dist_sync`: the
# server counts pushes. When as many have come for a key as there are workers, it answers all of
# them with the sum (`ApplyUpdates` in `src/kvstore/kvstore_dist_server.h`), and a worker's pull
# waits for its own push. Then worker 0 pushes three times alone.
#
# **Predict** what three workers pull, and what worker 0 gets after pushing 1, 10 and 100.

# %%
def push_and_pull():
    store = mx.kvstore.create("dist_sync")
    mine = nd.arange(1, 7) * (store.rank + 1)
    store.init(0, nd.zeros(6))
    store.push(0, mine)
    store.pull(0, out=mine)
    text = f"worker {store.rank} pulls {mine.asnumpy().tolist()}"
    store._barrier()
    if store.rank == 0:
        for number in [1, 10, 100]:
            store.push(0, number * nd.ones(6))
        store.pull(0, out=mine)
        text += f", then alone {mine[0].asscalar():.0f}"
    print(text)


printed = run_by_hand(write_script(push_and_pull), workers=3)
print("".join(printed), end="")

# %% tags=["fold"]
# check: (1 + 2 + 3) times 1 to 6; and 1 + 10 + 100, three pushes, whoever sent them
six = [6.0 * n for n in range(1, 7)]
assert printed == [f"worker 0 pulls {six}, then alone 111\n", f"worker 1 pulls {six}\n",
                   f"worker 2 pulls {six}\n"]

# %% [markdown]
# Three pushes make 111: the server doesn't check from whom they come. So push a key once, then pull
# it, in every step.
#
# **On GPUs:** worker 0 would hang. Its second push needs the key's buffer, in use until the server
# answers the first (`Push_` and `PushDefault` in `kvstore_dist.h`; read, not run).
#
# From here on `helpers.cluster.run` starts the processes, and returns what each worker printed. It
# leaves nothing running:

# %% tags=["fold"]
# check: processes that we start are found by a variable that they inherit; none is left
os.environ["STARTED_IN"] = str(folder)


def still_running():
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("STARTED_IN") == str(folder):
                found.append(process.pid)
        except psutil.Error:  # it ended just now, or isn't ours
            pass
    return found


child = subprocess.Popen(["sleep", "60"])
assert still_running() == [child.pid], "it finds what is there"
child.kill()
child.wait()
assert still_running() == []

# %% [markdown]
# ## LeNet on two workers
#
# The shared disk is a folder with 512 images. All workers draw the same order, and worker `rank` of
# `k` takes every `k`-th row of each batch.

# %% tags=["measured"]
data = load_data("mnist", limit=512)
np.save(folder / "images.npy", data.train_images - data.train_images.mean())
np.save(folder / "labels.npy", data.train_labels)
print(data)

# %%
def start_network():
    mx.random.seed(15)
    net = lenet()
    net.cast("float64")
    net.initialize(mx.init.Xavier())
    net(nd.zeros((1, 1, 28, 28), dtype="float64"))  # now it knows its shapes
    return net


def backward_of_sum(net, images, labels):
    x = nd.array(images, dtype="float64")
    y = nd.array(labels, dtype="float64")
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    return loss.sum().asscalar()

# %% [markdown]
# The gradient is the *sum* over a worker's images. The server adds the workers' sums, and `step`
# divides. By what? By the size of the whole batch, 32.

# %% tags=["trains"]
def train_worker(folder, name, kind="dist_sync", divide_by=32, lr=0.25, epochs=2):
    store = mx.kvstore.create(kind)
    images = np.load(f"{folder}/images.npy")
    labels = np.load(f"{folder}/labels.npy")
    net = start_network()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr}, kvstore=store)
    losses = []
    for epoch in range(epochs):
        begin = time.perf_counter()
        order = np.random.default_rng(epoch).permutation(512)
        for batch in np.split(order, 16):
            rows = batch[store.rank :: store.num_workers]
            losses.append(backward_of_sum(net, images[rows], labels[rows]))
            trainer.step(divide_by)
        if kind == "dist_sync":
            print(f"epoch {epoch} done")
    seconds = time.perf_counter() - begin  # of the last epoch
    weights = [parameter.data().asnumpy() for parameter in net.collect_params().values()]
    np.savez(f"{folder}/{name}-{store.rank}.npz", *weights, losses=losses, seconds=seconds)

# %% [markdown]
# `run_workers` trains on two workers, under a name. `load_run` reads what one worker left:

# %%
worker = write_script(start_network, backward_of_sum, train_worker)


def run_workers(name, **options):
    run(worker, 2, arguments=[json.dumps({"folder": str(folder), "name": name, **options})],
        log=None)


def load_run(name, rank):
    saved = np.load(folder / f"{name}-{rank}.npz")
    weights = [saved[f"arr_{i}"] for i in range(8)]
    return weights, saved["losses"]

# %% [markdown]
# The oracle is one worker that gets the whole batch, here in the notebook with a local store.
# **Predict:** how far from it will *each* of two workers be, after 32 steps?

# %% tags=["trains"]
train_worker(folder, "one", kind="local")
run_workers("two")
whole, whole_losses = load_run("one", 0)
for rank in range(2):
    weights, _ = load_run("two", rank)
    difference = largest_difference(weights, whole)
    print(f"worker {rank}: within 1e-12 of one worker: {difference < 1e-12}")
    assert difference < 1e-12

# %% tags=["fold"]
# check: it learns, so equal weights mean something
assert whole_losses[-8:].mean() < 0.7 * whole_losses[:8].mean()

# %% [markdown]
# **Two workers equal one, to 1e-12 of the largest weight.**
#
# ## The trap: a sum, not a mean
#
# Code that was right on one machine says `step(len(x))`, with the worker's own `x`, and nothing
# complains. **Predict:** what is that training equivalent to?

# %% tags=["trains"]
run_workers("wrong", divide_by=16, epochs=1)
train_worker(folder, "fast", kind="local", lr=0.5, epochs=1)
_, losses_of_0 = load_run("wrong", 0)
_, losses_of_1 = load_run("wrong", 1)
_, fast_losses = load_run("fast", 0)
wrong_losses = losses_of_0 + losses_of_1
print("equal to one worker at twice the learning rate:",
      np.allclose(wrong_losses[:8], fast_losses[:8], rtol=1e-8))
assert np.allclose(wrong_losses[:8], fast_losses[:8], rtol=1e-8)
assert not np.allclose(wrong_losses[:8], whole_losses[:8], rtol=1e-3)

# %% [markdown]
# For plain SGD, as here, sixteen workers would mean sixteen times the rate. DDP divides by the
# number of ranks for you (chapter 14).
#
# ## Who updates?
#
# Left to itself, `Trainer` under `dist_sync` sends the optimizer to the servers, and *they* update.
# What becomes of a learning rate that is set after the first step, of another batch size, and of
# saving the optimizer's state? The gradient of this weight is 1, and the rate 1:

# %% tags=["trains"]
def ask_trainer(folder):
    weight = gluon.Parameter("weight", shape=(1,), init="ones")
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore="dist_sync")

    def step(size):
        with autograd.record():
            total = weight.data().sum()
        total.backward()
        trainer.step(size)
        print(f"after step({size}) the weight is {weight.data().asscalar()}")

    step(64)
    trainer.set_learning_rate(0)
    print("learning rate 0")
    step(64)
    try:
        step(41)
    except UserWarning as error:
        print("step(41):", str(error)[:40])
    try:
        trainer.save_states(f"{folder}/states")
    except AssertionError as error:
        print("save_states:", str(error)[:50])


text = run(write_script(ask_trainer), 1, arguments=[json.dumps({"folder": str(folder)})], log=None)
print(text[0], end="")

# %% tags=["fold"]
# check: the server went on with learning rate 1; the other two raise
lines = text[0].splitlines()
assert lines[0].endswith(str(1 - 1 / 64)) and lines[2].endswith(str(1 - 2 / 64))
assert lines[3].startswith("step(41)") and lines[4].startswith("save_states")

# %% [markdown]
# The optimizer and the first batch's size went to the server. What you change afterwards changes
# only your copy, silently for the learning rate. (An `lr_scheduler` given to the optimizer before
# the first step runs on the server.) Momentum would live on the servers, from where `Trainer` can't
# save it. So there is no complete checkpoint, unless you train without momentum or pass
# `update_on_kvstore=False`, so that each worker updates.
#
# Mind whom you trust: the optimizer travels *pickled* (`kvstore_server.py`), and unpickling can run
# any code. Keep such a cluster in a network of its own.
#
# ## Without waiting: `dist_async`
#
# Under `dist_async` the server updates its weights with each push as it comes. Nobody waits for the
# slowest, but a gradient may be *stale*: computed for weights that have changed since.
#
# We stage it. One weight $w$ starts at 1; the loss is $w^2/2$, so the gradient is $w$; the rate is
# ¼. Both workers pull. Worker 0 takes three steps. Only then does worker 1 push the gradient that
# it has had all along. **Predict** the weight after that.

# %%
def push_stale():
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    store.init(0, nd.ones(1))
    w = nd.zeros(1)
    store.pull(0, out=w)
    w.wait_to_read()
    store._barrier()
    if store.rank == 0:
        for _ in range(3):
            store.push(0, w)  # the gradient for the weight that this worker knows
            store.pull(0, out=w)
            print(f"worker 0 steps to {w.asscalar()}")
    store._barrier()
    if store.rank == 1:
        store.push(0, w)
        store.pull(0, out=w)
        print(f"then worker 1 to  {w.asscalar()}")
    store._barrier()


text = run(write_script(push_stale), 2, arguments=["{}"], log=None)
print(text[0] + text[1], end="")

# %% tags=["fold"]
# check: worker 0 takes a quarter of what is left, three times; worker 1 a quarter of 1
steps = [float(line.split()[-1]) for line in (text[0] + text[1]).splitlines()]
assert steps == [0.75, 0.75**2, 0.75**3, 0.75**3 - 0.25]

# %% [markdown]
# A fresh gradient would have led to $0.75^4 = 0.316$. The stale one led to 0.172, too far.
#
# And how old do gradients get? A weight on the server counts updates: each push adds 1. A worker
# pulls the counter, "computes" for a while (it sleeps), and pulls again. What has been added in the
# meantime is the age of its gradient, in updates.

# %%
def mean_age(store, key, pause):
    counter = nd.zeros(1)
    store.init(key, counter)
    store._barrier()
    found = []
    end = time.perf_counter() + 0.8
    while time.perf_counter() < end:
        store.pull(key, out=counter)
        before = counter.asscalar()
        time.sleep(pause * np.random.uniform(0.5, 1.5))  # or they would keep in step
        store.pull(key, out=counter)
        found.append(counter.asscalar() - before)
        store.push(key, nd.array([-4]))  # at rate 1/4 this adds 1
    store._barrier()
    return float(np.mean(found))


def measure_ages():
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    equal = mean_age(store, 1, pause=0.02)
    pause = 0.1 if store.rank == 2 else 0.02
    slow = mean_age(store, 2, pause)
    print(json.dumps([equal, slow]))

# %% [markdown]
# Three workers of equal speed, then with worker 2 five times as slow. **Predict** the mean age for
# each worker.

# %% tags=["measured"]
text = run(write_script(mean_age, measure_ages), 3, arguments=["{}"], log=None)
for rank in range(3):
    equal, slow = json.loads(text[rank])
    print(f"worker {rank}: mean age {equal:.1f} at equal speeds, {slow:.1f} with worker 2 slow")

# %% tags=["fold"]
# check: the slow worker's gradients are the oldest
slow_ages = [json.loads(line)[1] for line in text]
assert slow_ages[2] > max(slow_ages[0], slow_ages[1])

# %% [markdown]
# While a worker computes once, each equally fast one updates once on average: ideally an age of 2
# with three equal workers. It is 10 for the slow one, since two others are five times as fast, and
# $1 + 1/5$ for these. Time for pushes and pulls lowers ages, and so does the end, where the others
# stop first.
#
# ## What fails, and who notices
#
# `run` watches: as soon as a process fails, it ends the others and raises. `Cluster` is `run` in
# steps, and watches only in `wait`. We kill a worker, or the server, when two epochs are left. By
# the run above they take `rest` seconds. We wait half a second longer. **Predict:** how many of the
# four processes are still there then?

# %%
def still_there(cluster):
    found = []
    for name, number in cluster.processes.items():
        if psutil.pid_exists(number):
            found.append(name)
    return found

# %% tags=["trains"]
seconds = [float(np.load(folder / f"two-{rank}.npz")["seconds"]) for rank in range(2)]
rest = 2 * max(seconds)


def kill(victim):
    options = {"folder": str(folder), "name": "unseen", "epochs": 3}
    with Cluster(worker, 2, arguments=[json.dumps(options)], log=None) as cluster:
        cluster.wait(until="epoch 0 done")
        os.kill(cluster.processes[victim], signal.SIGKILL)
        time.sleep(rest + 0.5)
        there = still_there(cluster)
        print(f"{victim} killed; still there:", ", ".join(there))
        try:
            cluster.wait()
        except Failed as error:
            print("  Failed:", str(error).split(" after")[0])
    return there


left_of_worker = kill("worker 1")
left_of_server = kill("server 0")

# %% tags=["fold"]
# check: all but the dead one were there, nobody had finished, and now nobody is left
assert left_of_worker == ["scheduler", "server 0", "worker 0"]
assert left_of_server == ["scheduler", "worker 0", "worker 1"]
assert not list(folder.glob("unseen-*.npz")), "nobody has finished"
assert still_running() == [], "a process is left"

# %% [markdown]
# All but the dead one. A worker waits for a sum that will never be complete, or for a server. And
# if a worker takes one step more than the other?

# %%
def one_step_more():
    store = mx.kvstore.create("dist_sync")
    store.init(0, nd.zeros(1))
    for step in range(3 + store.rank):
        out = nd.zeros(1)
        store.push(0, nd.ones(1))
        store.pull(0, out=out)
        out.wait_to_read()
        print(f"step {step} done")


with Cluster(write_script(one_step_more), 2, arguments=["{}"], log=None) as cluster:
    for _ in range(2):  # each worker says so
        cluster.wait(until="step 2 done")
    time.sleep(1)
    there = still_there(cluster)
    os.kill(cluster.processes["worker 1"], signal.SIGKILL)
    try:
        cluster.wait()  # reads the lines that came meanwhile
    except Failed:
        pass
lines = str(cluster.printed)
print("step 3 done:", lines.count("step 3 done"), "times; a second later still there:", len(there))
assert [lines.count(f"step {step} done") for step in range(4)] == [2, 2, 2, 0]
assert len(there) == 4

# %% [markdown]
# Worker 1 waits for worker 0's push. Worker 0 has taken all its steps, and waits too: at exit its
# store waits for all workers (`~KVStoreDist` in `kvstore_dist.h`).
#
# | what fails | MXNet alone, `dist_sync` | `run`, `Cluster` | torchrun |
# | --- | --- | --- | --- |
# | a worker | the others hang | `Failed` names it | restarts all, or ends all |
# | a server | workers hang | `Failed` names it | has none |
# | unequal steps | the last step hangs | `TimeoutError` | chapter 14: `join` |
#
# **MXNet reports no death. Somebody has to watch.**
#
# ## On a cluster
#
# On real machines the variables change, and every host needs the script, `helpers` and the data.
# One line for each process (`SERVER` is explained below):

# %%
places = {
    "192.0.2.10": ["scheduler"],
    "192.0.2.11": ["server", "worker"],
    "192.0.2.12": ["worker"],
}
for host, roles in places.items():
    for role in roles:
        values = variables(role, host, root="192.0.2.10", port=9000, workers=2, servers=1)
        command = "-c 'import mxnet'"
        if role == "server":
            values.update(SERVER)
        if role == "worker":
            command = "train_worker.py \"$ARGUMENTS\""
        settings = " ".join(f"{name}={value}" for name, value in values.items())
        print(f"env {settings} python {command}")

# %% [markdown]
# Servers and workers take a free port each, unless the variable `PORT` names one; hosts must reach
# each other there. They listen only at `DMLC_NODE_HOST`, the scheduler only at `DMLC_PS_ROOT_URI`
# (`ZMQVan::Bind` in ps-lite's `zmq_van.h`).
#
# **Placing of keys.** Only arrays of a million entries or more are cut into equal parts
# (`MXNET_KVSTORE_BIGARRAY_BOUND`); a smaller one goes whole to server `key * 9973 % servers`
# (`EncodeDefaultKey` in `src/kvstore/kvstore_dist.h`).
#
# **float64.** The server's field `multi_precision_` (`kvstore_dist_server.h`) is never given a
# first value. If its memory happens not to be zero, weights of other types are kept *as float32*.
# So `run` starts servers with glibc's setting `glibc.malloc.perturb=255`, which fills new memory
# with zeros. With 254 each byte is 1. Does a third come back whole?

# %%
def third():
    store = mx.kvstore.create("dist_sync")
    out = nd.zeros(1, dtype="float64")
    store.init(0, out)
    store.push(0, nd.ones(1, dtype="float64") / 3)
    store.pull(0, out=out)
    print(out.asscalar() - 1 / 3)


script = write_script(third)
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.perturb=254:glibc.malloc.tcache_count=0"
ones = float(run_by_hand(script, workers=1)[0])
del os.environ["GLIBC_TUNABLES"]
zeros = float(run(script, 1, arguments=["{}"], log=None)[0])
print(f"1/3 comes back off by {abs(ones):.0e} with ones, by {abs(zeros):.0f} with zeros")
assert zeros == 0
assert 1e-9 < abs(ones) < 1e-7, "what float32 makes of 1/3"

# %% [markdown]
# Training in float32 isn't touched by this (`has_multi_precision_copy`).

# %% [markdown]
# ## Summary
#
# - A server adds up what workers push. `step` takes the size of the whole batch: then two workers
#   equal one to 1e-12 under `dist_sync`.
# - `Trainer` sends the optimizer to the server at the first step; later changes stay behind.
# - Under `dist_async` a gradient is as old as the number of updates that others make meanwhile.
# - From Python MXNet reports no death: somebody has to watch.
# - Most arrays are not divided among servers: one server may get nearly all bytes.
#
# **Further reading.** *Distributed Training in MXNet*
# (`docs/static_site/src/pages/api/faq/distributed_training.md`); M. Li et al., *Scaling distributed
# machine learning with the parameter server* (OSDI 2014).

# %% [markdown]
# ## Exercises
#
# 1. **Whose keys?** A store has LeNet's eight arrays, sorted by name as in `Trainer`, as keys 0 to
#    7. By MXNet's rule, what share of the bytes does each of two servers get? And of three? Which
#    number would you take?

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
