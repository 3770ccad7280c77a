# %% [markdown]
# # Deeper · The parameter server
#
# In chapter 15 the ranks add up their gradients among themselves. In another design *servers* add
# them (M. Li et al., OSDI 2014). Across machines, MXNet's key-value store (chapter 07) has such
# servers. Who
# divides by the batch then, who updates the weights, and who notices a death?
#
# ![Three workers have 1, 2 and 3. Solid arrows lead from them to the server, which adds them up to
# 6; dashed arrows lead back, and each gets 6. A scheduler stands beside the server; no arrow leads
# to it.](../src/drawings/parameter_server.svg)
#
# A **worker** is your training script. A **server** adds up the gradients that workers push. The
# **scheduler** introduces them; no gradient passes through it.
#
# As drawn, sums come back: this store has no optimizer. Once it has one, the server keeps the
# *weights*, updates them with each sum, and hands out weights.
#
# ## What you'll do
#
# Train LeNet on two workers. Fall into the trap of the sum. Measure how old gradients get. Kill
# workers and servers.
#
# ## What you'll learn
#
# - by which variables MXNet's processes find their roles;
# - what two workers must divide by, to equal one;
# - what `dist_async` does to a gradient;
# - that from Python, MXNet reports no death.
#
# ## What you need
#
# Chapters 07 and 15. No GPU, no PyTorch and no second machine. Reading takes {reading time},
# running about a minute.

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

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd, gluon, nd

from helpers import load_data
from helpers.cluster import SERVER, Cluster, Failed, run
from helpers.compare import largest_difference
from helpers.networks import lenet

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

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
# The shortest worker program pushes 1 to 6, times its rank + 1, to key 0. The store's kind is
# `dist_sync`: when as many pushes of a key have come as there are workers, the server answers all
# of them. Without an optimizer, their sum *replaces* what it had (`ApplyUpdates` in
# `src/kvstore/kvstore_dist_server.h`). A worker's pull waits for its own push.
#
# **Predict** what three workers pull, and what worker 0 gets when it then pushes 1, 10 and 100
# alone.

# %%
def push_and_pull():
    store = mx.kvstore.create("dist_sync")
    mine = nd.arange(1, 7) * (store.rank + 1)
    store.init(0, nd.zeros(6))
    store.push(0, mine)
    store.pull(0, out=mine)
    text = f"worker {store.rank} pulls {mine.asnumpy().tolist()}"
    store._barrier()  # until all workers are here
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
# On GPUs worker 0 would hang: its second push needs the key's buffer, which is in use until the
# server answers the first (`Push_` and `PushDefault` in `kvstore_dist.h`; read, not run).

# %% [markdown]
# Three pushes make 111: the server doesn't check from whom they come. **So in every step, push a
# key once, then pull it.**
#
# From here on, `on_workers(2, function, ...)` runs a function on two workers and returns what each
# printed. It calls `helpers.cluster.run`, which leaves no process running.

# %% tags=["fold"]
# define: on_workers(workers, *functions, timeout, **arguments); of several, the last one runs
def on_workers(workers, *functions, timeout=120, **arguments):
    script = write_script(*functions)
    return run(script, workers, arguments=[json.dumps(arguments)], timeout=timeout, log=None)

# %% tags=["fold"]
# check: what we start inherits the variable STARTED_IN; by it we find a process, and now none
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
# Do two workers compute what one does? All draw the same order of batches. Worker `rank` of `k`
# takes every `k`-th of a batch's 32 images. Its gradient is the *sum* over them:

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
            rows = batch[store.rank :: store.num_workers]
            losses.append(backward_of_sum(net, images[rows], labels[rows]))
            trainer.step(divide_by)
    net.save_parameters(f"{folder}/{name}-{store.rank}.params")
    np.save(f"{folder}/{name}-{store.rank}.npy", losses)

# %% [markdown]
# The oracle is one worker that gets whole batches, here in the notebook, with a local store.
# **Predict:** how far from it will *each* of two workers be, after 32 steps?

# %% tags=["trains"]
train_worker(str(folder), "one", kind="local")
on_workers(2, start_network, backward_of_sum, train_worker, folder=str(folder), name="two")

one = nd.load(f"{folder}/one-0.params")  # arrays by name
for rank in range(2):
    weights = nd.load(f"{folder}/two-{rank}.params")
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
# A batch's loss is the sum over the two workers' halves. We compare the first 8 steps, before
# rounding errors grow.

# %% tags=["trains"]
on_workers(2, start_network, backward_of_sum, train_worker, folder=str(folder), name="wrong",
           divide_by=16)
train_worker(str(folder), "fast", kind="local", lr=0.5)  # twice the rate

wrong_losses = np.load(folder / "wrong-0.npy") + np.load(folder / "wrong-1.npy")
fast_losses = np.load(folder / "fast-0.npy")
difference = largest_difference(wrong_losses[:8], fast_losses[:8])
print(f"within 1e-8 of one worker at twice the learning rate: {difference < 1e-8}")
assert difference < 1e-8

# %% tags=["fold"]
# check: it differs from the right training, each of the losses by itself
assert np.allclose(wrong_losses[:8], fast_losses[:8], rtol=1e-8)
assert not np.allclose(wrong_losses[:8], whole_losses[:8], rtol=1e-3)

# %% [markdown]
# **Dividing by a worker's own images multiplies the learning rate by the number of workers**, for
# plain SGD as here. DDP divides by the number of ranks for you (chapter 14).
#
# ## Who updates?
#
# The optimizer is now on the server. What becomes of a learning rate that you set afterwards? One
# weight starts at 1. Its gradient is 1, and so is the learning rate; `step(4)` divides by 4.
# **Predict** the weight after each step.

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
# check: after a first step, step(5) and save_states raise; this is what they say
def ask_more():
    weight = gluon.Parameter("weight", shape=(1,), init="ones")
    weight.initialize()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore="dist_sync")
    for size in [4, 5]:
        with autograd.record():
            total = weight.data().sum()
        total.backward()
        try:
            trainer.step(size)
        except UserWarning as error:  # MXNet raises it like any error
            print(f"step({size}):", str(error).split(".")[0])
    try:
        trainer.save_states("states")
    except AssertionError as error:
        print("save_states:", str(error).split(".")[0])


(text,) = on_workers(1, ask_more)
print(text, end="")
lines = text.splitlines()
assert lines[0].startswith("step(5): Possible change in the `batch_size`")
assert lines[1].startswith("save_states: Cannot save states for distributed training")

# %% [markdown]
# Momentum would be on the servers. With momentum, a complete checkpoint needs
# `Trainer(..., update_on_kvstore=False)`: then each worker updates its own weights.
#
# The optimizer travels *pickled* (`kvstore_server.py`), and unpickling can run any code. **Keep
# such a cluster in a network of its own.**
#
# ## Without waiting: `dist_async`
#
# What if nobody waits for the slowest? Under `dist_async` the server updates its weights with each
# push as it comes. But a gradient may be *stale*: computed for weights that have changed since.
#
# A weight $w$ starts at 1; the loss is $w^2/2$, so the gradient is $w$, and 0 is best. The rate is
# ½. Both workers pull. Worker 0 takes three steps. Only then does worker 1 push the gradient that
# it has had all along. **Predict** the weight after that.

# %%
def push_stale():
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
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
# And how old do gradients get? A weight on the server counts updates. A worker pulls the count,
# "computes" (it sleeps), and pulls again. What others have added meanwhile is its gradient's age.

# %%
def mean_age(pauses):
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
    count = nd.zeros(1)
    store.init(0, count)
    store._barrier()
    ages = []
    end = time.perf_counter() + 0.8
    while time.perf_counter() < end:
        store.pull(0, out=count)  # waits for this worker's last push, so it is counted here
        before = count.asscalar()
        time.sleep(pauses[store.rank] * np.random.uniform(0.5, 1.5))  # or they keep in step
        store.pull(0, out=count)
        ages.append(count.asscalar() - before)
        store.push(0, nd.array([-1]))  # SGD subtracts it: adds 1
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
# updates once and the slow one a fifth of a time: 1.2. Pushes and pulls take time too, which
# probably lowers ages.
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
print(unharmed[1], end="")

# %% [markdown]
# Now we kill one process after step 3, and wait as long as that whole run took: time enough for all
# to finish. **Predict:** how many of the four processes are still there then?
#
# `run` watches: when a process fails, it ends the others and raises `Failed`. `Cluster` does so
# only inside its `wait`; until we call that, MXNet is alone.

# %% tags=["fold"]
# define: still_there(cluster), the names of its processes that still exist
def still_there(cluster):
    found = []
    for name, pid in cluster.processes.items():
        if psutil.pid_exists(pid):
            found.append(name)
    return found

# %%
def kill(victim):
    options = json.dumps({"steps": [10, 10]})
    with Cluster(folder / "take_steps.py", 2, arguments=[options], log=None) as cluster:
        cluster.wait(until="step 3 done")
        os.kill(cluster.processes[victim], signal.SIGKILL)
        time.sleep(seconds_whole)
        there = still_there(cluster)
        print(f"{victim} killed; still there:", ", ".join(there))
        try:
            cluster.wait()
        except Failed as error:
            print("  Failed:", str(error).split(" after")[0])
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
print(message)

# %% tags=["fold"]
# check: both took three steps, nobody a fourth, and all four processes were still there
assert "scheduler, server 0, worker 0, worker 1;" in message
for rank in range(2):
    assert f"worker {rank}: step 2 done" in message
assert "step 3 done" not in message
assert still_running() == []

# %% [markdown]
# None. Worker 1 waits for worker 0's push. Worker 0 has taken all its steps, and waits too: at exit
# its store waits for all workers (`~KVStoreDist` in `kvstore_dist.h`).
#
# | what fails | MXNet alone, `dist_sync` | `run`, `Cluster` | torchrun |
# | --- | --- | --- | --- |
# | a worker | the others hang | `Failed` names it | restarts all, or ends all |
# | a server | workers hang | `Failed` names it | has none |
# | unequal steps | the last step hangs | `TimeoutError` | deeper: DDP's cases: `join` |
#
# **From Python, MXNet reports no death. Somebody has to watch.**
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
# In float64, use `run`. A server that is started otherwise may keep weights as float32:

# %% tags=["fold"]
# check: a server whose new memory is all ones returns 1/3 as float32, one started by `run` whole
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
print(f"1/3 comes back off by {abs(ones):.0e} with ones, by {abs(zeros):.0f} with zeros")
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
# - From Python, MXNet reports no death: somebody has to watch.
# - Arrays of less than a million entries aren't divided among servers (exercise 1).
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
