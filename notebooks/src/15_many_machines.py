# %% [markdown]
# # 15 · Many machines
#
# When one machine is not enough, the devices that share a batch sit in different machines, and the
# gradients go over a network. MXNet's key-value store (chapter 07) does that too: MXNet's tutorial
# "Multiple GPUs training with Gluon API" calls it a virtual place for sharing data between devices
# *and machines*. Machines fail, though, and MXNet does not tell you. This chapter trains on several
# workers, breaks them in every way that we could think of, and gets the training back.
#
# ## What you'll do
#
# Start a cluster of processes by hand and then with a helper, train LeNet on two workers, prove
# that they compute what one would, walk into the trap of the sum, look at stale gradients, kill
# workers and servers, resume from checkpoints, and work out on paper where the network becomes the
# limit. At the end the same with PyTorch's `torchrun`.
#
# ## What you'll learn
#
# - scheduler, server, worker: who does what, and which variables each host needs;
# - dividing data so that no image is lost or doubled and nobody waits for good;
# - why `step` needs the size of the *whole* batch, and what `update_on_kvstore` decides;
# - what each fault looks like, how soon it shows, and how to resume without a trace;
# - parameter servers against all-reduce, in bytes for each link.
#
# ## What you need
#
# Chapters 03, 06, 07 and 11. No GPU and no second machine: the machines are processes. Reading
# takes {reading time}, running about two minutes on two cores with nothing else to do,
# most of it spent starting processes. The section on `torchrun` needs PyTorch; all else doesn't.

# %%
from helpers import load_data
from helpers.cluster import Cluster, Failed, run, torchrun
from helpers.timing import Others

# %% [markdown]
# Those first, since MXNet reads its settings once.

# %%
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# ## Three roles
#
# - A **worker** computes gradients. It is your training script.
# - A **server** holds the store's keys. It adds up what the workers push and hands out the result.
# - The **scheduler** introduces them to one another and gives each worker its rank. No gradient
#   passes through it.
#
# A process learns its role from variables in its environment, which MXNet reads when it is
# imported. These are all that it needs:

# %%
def variables(role, host, root, port, workers, servers):
    return {"DMLC_ROLE": role,  # scheduler, server or worker
            "DMLC_NODE_HOST": host,  # this machine's own address
            "DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": port,  # the scheduler's
            "DMLC_NUM_WORKER": workers, "DMLC_NUM_SERVER": servers}


# %% [markdown]
# Scheduler and server run no script of yours. `import mxnet` with their role is enough: it doesn't
# return until the last worker has left. **So never set a role in a notebook**, whose kernel would
# be gone. As one line for a shell:

# %%
def command(role, script="-c 'import mxnet'", python=sys.executable, **places):
    settings = " ".join(f"{k}={v}" for k, v in variables(role, **places).items())
    return f"env {settings} {python} {script}"


# %% [markdown]
# ### A script from functions
#
# Workers are scripts of their own. We write their functions here, where you can read and try them,
# and let Python's `inspect` copy the source to a file. All files go to a folder that ends with the
# kernel:

# %%
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

# %% [markdown]
# The last function is the one that runs; its arguments come in as JSON.

# %%
HEAD = """\
import json, os, signal, sys, time
from pathlib import Path
import helpers  # first, as always
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn
"""


def script(name, *functions, head=HEAD):
    call = f"{functions[-1].__name__}(**json.loads(sys.argv[1]))\n"
    path = folder / f"{name}.py"
    path.write_text("\n\n".join([head, *map(inspect.getsource, functions), call]))
    return path


# %% [markdown]
# The first script is the smallest that can prove something. As in chapters 03 and 07, worker $r$
# pushes $r + 1$ times the numbers 1 to 6. What it pulls must be the sum over workers. The store's
# kind is `dist_sync`: a pull waits until *all* workers have pushed.

# %%
def meet():
    store = mx.kvstore.create("dist_sync")
    mine = nd.arange(1, 7) * (store.rank + 1)
    store.init(0, nd.zeros(6))
    store.push(0, mine)
    store.pull(0, out=mine)
    print(json.dumps([store.rank, store.num_workers, mine.asnumpy().tolist()]))


# %% [markdown]
# By hand: five processes on this machine, with the loopback address 127.0.0.1 for every host. A
# free port is found by asking for port 0. **Predict** the sum with three workers.

# %%
import socket


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def by_hand(roles, what, arguments="{}", port=None):
    here = {"host": "127.0.0.1", "root": "127.0.0.1", "port": port or free_port(),
            "workers": roles.count("worker"), "servers": roles.count("server")}
    lines = [command(role, f"{what} '{arguments}'" if role == "worker" else "-c 'import mxnet'",
                     **here) for role in roles]
    return [subprocess.Popen(["sh", "-c", "exec " + line], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True) for line in lines]


# %% [markdown]
# Each prints a line at its end; all together are started, and then we wait.

# %%
crew = by_hand(["scheduler", "server", "worker", "worker", "worker"], script("meet", meet))
said = [json.loads(process.communicate(timeout=100)[0]) for process in crew[2:]]
for rank, workers, pulled in sorted(said):
    assert workers == 3 and pulled == [6.0 * n for n in range(1, 7)], "(1 + 2 + 3) times 1 to 6"
    print(f"worker {rank} of {workers} pulled {pulled}")

# %% [markdown]
# The sum $\frac{k(k+1)}{2} = 6$ times the numbers, on every worker. Ranks come from the scheduler;
# which process gets which is its business.
#
# `run` does the same with more care. It passes on what each process prints, has a deadline, notices
# when one dies, and leaves no process behind, whatever happens. It gives back what each worker
# printed; worker $r$ of its list has rank $r$. `log=None` keeps it quiet.

# %%
def answers(*arguments, log=None, **options):
    return [json.loads(text) for text in run(*arguments, log=log, **options)]


# %% [markdown]
# ## The data: none lost, none doubled
#
# Each worker reads its own images. It is tempting to give each a part of the data set, its own
# batches, and let it run. **Predict:** 1,001 images, two workers, batches of 32 of one's own.
# Worker 0 has 501 images, worker 1 has 500. Now say 1,025 images instead. What happens?

# %%
def batches_of_its_own(images, rank, workers, size):
    return -(-len(range(rank, images, workers)) // size)


for images in (1001, 1025):
    print(images, "images:", [batches_of_its_own(images, r, 2, 32) for r in (0, 1)], "batches")

# %% [markdown]
# With 1,025, worker 0 has a batch more than worker 1. It pushes, and the server waits for worker
# 1's push, which never comes: under `dist_sync`, everybody must take equally many steps, or the
# last one waits for good.
#
# So we divide *each batch*, as in chapter 02, not the data set. All workers draw the same order
# from the same seed, and worker $r$ reads images $r$, $r + k$, $r + 2k$, … of each batch.

# %%
IMAGES, BATCH = 1001, 64


def batches(epoch, images=1001, size=64):
    order = np.random.default_rng([13, epoch]).permutation(images)
    return np.split(order, range(size, images, size))


# %% [markdown]
# Nothing lost, nothing doubled, equally many steps, also where it doesn't divide. A last batch
# smaller than $k$ would leave somebody with nothing; we assert that there is none (third exercise).

# %%
for k in (1, 2, 3, 5):
    shards = [[batch[r::k] for batch in batches(epoch=0)] for r in range(k)]
    assert len({len(of_one) for of_one in shards}) == 1, "equally many steps, or one waits forever"
    assert min(len(rows) for of_one in shards for rows in of_one) > 0, "everybody has an image"
    seen = np.sort(np.concatenate([rows for of_one in shards for rows in of_one]))
    assert (seen == np.arange(IMAGES)).all(), "each image exactly once"
print(f"{len(batches(0))} batches, the last of {len(batches(0)[-1])}, in two workers' shards of",
      [len(batches(0)[-1][r::2]) for r in (0, 1)])

# %% [markdown]
# On a real cluster each host has the files, or reads them from a shared disk. Here files of NumPy's
# are the shared disk, *memory-mapped*: only the rows that a worker asks for are read.

# %% tags=["measured"]
data = load_data("mnist", limit=IMAGES)
print(data)

# %% [markdown]
# The images are centred, as in chapter 04.

# %%
centred = data.train_images[:IMAGES] - data.train_images[:IMAGES].mean()
np.save(folder / "images.npy", centred)
np.save(folder / "labels.npy", data.train_labels[:IMAGES])

# %% [markdown]
# Any type of number; float64 where equality is to be seen.

# %%
def read(path, rows, dtype):
    images, labels = (np.load(f"{path}/{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return nd.array(images[rows], dtype=dtype), nd.array(labels[rows], dtype=dtype)


# %% [markdown]
# ## LeNet on two workers
#
# The network of chapter 06, from the same weights each time.

# %%
def lenet(dtype):
    mx.random.seed(13)
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    net.cast(dtype)
    net.initialize(mx.init.Xavier())
    net(nd.zeros((1, 1, 28, 28), dtype=dtype))
    return net


# %% [markdown]
# Forward and backward on this worker's rows. Its gradient is the *sum* over its images.

# %%
def backward(net, x, y):
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    return loss.sum()


# %% [markdown]
# ### A checkpoint
#
# At the end of each epoch the state goes to a file: weights and the number of the next epoch. (SGD
# without momentum has no memory of its own.) A process can be killed while it writes. So we write
# another file and rename it: `os.replace` puts the new one in place of the old in one go, and
# whoever reads finds one of the two whole.

# %%
def weights(net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def save(path, net, epoch):
    with open(f"{path}.new", "wb") as file:
        np.savez(file, *weights(net), epoch=epoch)
        file.flush()
        os.fsync(file.fileno())  # on the disk, should the power fail as well
    os.replace(f"{path}.new", path)


# %% [markdown]
# And back, into a network; gives the epoch to go on with, 0 if there is no file.

# %%
def restore(path, net):
    if not os.path.exists(path):
        return 0
    with np.load(path) as saved:
        for i, p in enumerate(net.collect_params().values()):
            p.set_data(nd.array(saved[f"arr_{i}"], dtype=p.dtype))
        return int(saved["epoch"])


# %% [markdown]
# ### The training script
#
# `divide_by` says what `step` is told: `"all"`, 64, the size of the whole batch, or `"own"`, that
# of the worker's own shard. (The last batch of an epoch is smaller; you'll see why `step` is told
# 64 there, too.) With `die=[r, e, s]` worker $r$ kills itself in epoch $e$ before step $s$, with
# the signal that leaves a process no last word.

# %% tags=["trains"]
def train(path, name, epochs, store="dist_sync", divide_by="all", die=None, rate=0.25):
    store = mx.kvstore.create(store)
    net, losses, rank, k = lenet("float64"), [], store.rank, store.num_workers
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate}, kvstore=store)
    for epoch in range(restore(f"{path}/{name}.npz", net), epochs):
        for step, batch in enumerate(batches(epoch)):
            if die == [rank, epoch, step]:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(backward(net, *read(path, batch[rank::k], "float64")).asscalar())
            trainer.step(64 if divide_by == "all" else 64 // k)
        if rank == 0:
            save(f"{path}/{name}.npz", net, epoch + 1)
        print(f"epoch {epoch} done")
    np.savez(f"{path}/{name}-{rank}-of-{k}.npz", *weights(net), losses=losses)


# %% [markdown]
# All its functions go into the script. A notebook may call `train` as well, as *one* worker with a
# local store. That is our oracle: one worker that gets the joined batch.

# %%
training = script("train", batches, read, lenet, backward, weights, save, restore, train)


# %% [markdown]
# Its arguments. Unless we resume, a checkpoint from an earlier run is removed.

# %%
def task(name, resume=False, **options):
    if not resume:
        (folder / f"{name}.npz").unlink(missing_ok=True)
    return {"path": str(folder), "name": name, "epochs": 2, **options}


# %% [markdown]
# The one worker, two epochs:

# %% tags=["trains"]
train(store="local", **task("one"))

# %% [markdown]
# Two workers for the same two epochs, 32 steps with batches that don't divide by two. **Predict:**
# how far will the weights of *each* worker be from those of the one, in float64?

# %%
printed = run(training, workers=2, arguments=[json.dumps(task("two"))], log=None)


# %% [markdown]
# Weights and losses come back in files, one for each worker.

# %%
def outcome(name, rank=0, of=2):
    with np.load(folder / f"{name}-{rank}-of-{of}.npz") as file:
        return [file[f"arr_{i}"] for i in range(8)], file["losses"]


# %% [markdown]
# The largest difference, as a share of the largest weight:

# %%
def apart(mine, theirs):
    far = np.max([np.abs(a - b).max() for a, b in zip(mine, theirs)])
    return far / np.max([np.abs(b).max() for b in theirs])


# %% [markdown]
# Both workers against the one:

# %%
one, losses = outcome("one", of=1)
assert losses[-5:-1].mean() < 0.7 * losses[:4].mean(), "compare only while the loss falls"
for rank in (0, 1):
    far = apart(outcome("two", rank)[0], one)
    assert far < 1e-12, f"worker {rank} is {far} from one worker on the joined batch"
print("two workers, 32 steps: weights equal one worker's to 1e-12 of the largest")

# %% [markdown]
# To the last digits, but not without help. While this chapter was made, the same script agreed to
# $10^{-16}$ on one day and to $10^{-7}$ on the next, depending on such things as the length of a
# variable in the environment. MXNet 1.9.1's server decides by memory that nobody has set whether it
# keeps float64 weights as float32: started with memory full of ones it always does, with zeros
# never. So `run` starts servers with `GLIBC_TUNABLES`, which asks the C library for zeros. Weights
# in float32, as in nearly all training, are never touched by this.
#
# ### The trap: a sum, not a mean
#
# The server adds up; it doesn't know how many images there were. `step(n)` divides by $n$, and
# under `dist_sync` that has to be the size of the whole batch, **your worker's share times the
# number of workers**. Code that was right on one machine says `step(len(x))`, with the worker's
# own `x`, and nothing complains. **Predict:** what does the training below do, with two workers?

# %% tags=["trains"]
run(training, arguments=[json.dumps(task("wrong", divide_by="own"))], log=None)
train(store="local", **task("fast", rate=0.5))

# %% [markdown]
# If steps are twice as long, it must be what one worker does at *twice the rate*.

# %%
wrong = sum(outcome("wrong", rank)[1] for rank in (0, 1))
fast = outcome("fast", of=1)[1]
assert np.allclose(wrong[:16], fast[:16], rtol=1e-8), "two workers at n: one at twice the rate"
print("wrong: as one worker at twice the learning rate")

# %% [markdown]
# Right and wrong, with the same learning rate in the script:

# %%
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

sizes = np.array([len(batch) for epoch in (0, 1) for batch in batches(epoch)])
right = sum(outcome("two", rank)[1] for rank in (0, 1))
ends = [(curve / sizes)[-5:].mean() for curve in (right, wrong)]
fig, ax = figure(f"Final loss: {ends[0]:.2f} with the batch's size, "
                 f"{ends[1]:.2f} with the share's", "step", "mean loss of the batch")
ax.plot(right / sizes, "o-", color=BLUE, ms=3, label="divided by all workers' images")
ax.plot(wrong / sizes, "s--", color=ORANGE, ms=3, label="divided by this worker's images")
ax.axhline(np.log(10), color=GREY, lw=1, ls=":", label="guessing, ln 10")
ax.set(ylim=(0, 4))
ax.legend(fontsize=8)
show(fig, alt="Loss over 32 steps on two workers, once with sums divided by the size of the whole "
     "batch and once by a worker's share. They begin alike and then part.")

# %% [markdown]
# With two workers the rate is double; with sixteen it would be sixteen times what you wrote.
#
# ### Who updates?
#
# Left to itself, `Trainer` under `dist` sends the optimiser to the servers, and they update:
# `update_on_kvstore=True`. It has three consequences. One worker and one server will show two.

# %% tags=["trains"]
def rules(path):
    w = gluon.Parameter("w", shape=(2,), init="ones")
    w.initialize()
    trainer = gluon.Trainer([w], "sgd", {"learning_rate": 1}, kvstore="dist_sync")
    for action in (lambda: trainer.step(64), lambda: trainer.step(41),
                   lambda: trainer.save_states(f"{path}/states")):
        with autograd.record():
            w.data().sum().backward()
        try:
            action()
            print("fine")
        except Exception as error:
            print(f"{type(error).__name__}: {error}"[:72])


# %% [markdown]
# **Predict** which of the three lines are "fine": a step, a step with another batch size, saving
# the optimiser's state.

# %%
(lines,) = run(script("rules", rules), 1, arguments=[json.dumps({"path": str(folder)})], log=None)
print(lines)
assert [line.split(":")[0] for line in lines.splitlines()] == [
    "fine", "UserWarning", "AssertionError"], "a step; no other size; no states"

# %% [markdown]
# The size of the first batch went to the server along with the optimiser and stays there, so
# another one is refused: hence the 64 for every batch, which makes the smaller last batch count for
# less, on one worker as on two. And momentum would be on the servers, from where it can't be saved:
# hence SGD without, or a run that resumes would not be the run that broke.
#
# The third consequence is about trust. The optimiser travels *pickled*, and unpickling can run any
# code. Nobody has to log in: whoever reaches a server's port can have it do what they like. So keep
# such clusters in a network of their own, or on the loopback address, as here.
#
# ## How fast?
#
# One worker alone, without any store, against two together, with the same 256 images for *each*
# worker: weak scaling (chapter 11). Both in the same processes, in turn, so that a machine that
# slows down does so for both. `_barrier` waits until all workers have reached it.

# %% tags=["trains"]
def race(store, path, rounds=5, steps=5, n=256):
    nets = [lenet("float32") for _ in range(2)]
    trainers = [gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=s)
                for net, s in zip(nets, (None, store))]
    x, y = read(path, slice(store.rank * n, store.rank * n + n), "float32")
    seconds = [[], []]
    for way in [0, 1] * rounds:
        store._barrier()
        begin = time.perf_counter()
        for _ in range(steps if way or store.rank == 0 else 0):
            backward(nets[way], x, y)
            trainers[way].step(n * (store.num_workers if way else 1))
        nd.waitall()
        seconds[way].append((time.perf_counter() - begin) / steps)
    return seconds


# %% [markdown]
# In the same run: what does one push and pull cost, for arrays of 4 KB to 4 MB?

# %%
def talk(store, repeats=9):
    medians = []
    for key, entries in enumerate(4 ** np.arange(5, 11), 100):
        array, seconds = nd.ones(int(entries)), []
        store.init(key, array)
        for _ in range(repeats):
            store._barrier()
            begin = time.perf_counter()
            store.push(key, array)
            store.pull(key, out=array)
            array.wait_to_read()
            seconds.append(time.perf_counter() - begin)
        medians.append(np.median(seconds[1:]))
    return medians


# %% [markdown]
# And a **straggler**: worker 1 sleeps for 50 ms before each of ten pushes. How long do the ten
# take on each worker?

# %%
def laps(store, pause=0.05):
    array = nd.ones(2)
    store.init(99, array)
    store._barrier()
    begin = time.perf_counter()
    for _ in range(10):
        time.sleep(pause if store.rank == 1 else 0)
        store.push(99, array)
        store.pull(99, out=array)
        array.wait_to_read()
    return time.perf_counter() - begin


# %% [markdown]
# One script for the three:

# %%
def measure(path):
    store = mx.kvstore.create("dist_sync")
    print(json.dumps([race(store, path), talk(store), laps(store)]))


measuring = script("measure", read, lenet, backward, race, talk, laps, measure)

# %% [markdown]
# **Predict:** on a machine with two cores, how many times one worker's images per second do two
# workers get? Server and scheduler need a core now and then, too.

# %% tags=["measured"]
with Others() as others:
    found = answers(measuring, arguments=[json.dumps({"path": str(folder)})])
(times, costs, lap_sync) = found[0]
alone, together = (np.median(seconds[1:]) for seconds in times)
print(f"one worker {256 / alone:,.0f}, two {512 / together:,.0f} images/s: "
      f"{2 * alone / together:.2f} times as many")
print(f"{os.cpu_count()} cores, of which others took {others.share:.0%}")

# %% [markdown]
# Two is the limit, and cores that share their memory keep two *independent* processes below it,
# too (chapter 11). What others took, you lack.
#
# The cost of a push and a pull, as a start and a time for each byte, by chapter 11's fit:

# %% tags=["measured"]
from scipy.optimize import nnls

size = 4.0 * 4 ** np.arange(5, 11)
rows = np.stack([np.ones(6), size], axis=1) / np.array(costs)[:, None]
scale = np.linalg.norm(rows, axis=0)
alpha, beta = nnls(rows / scale, np.ones(6))[0] / scale
off = np.abs(rows @ [alpha, beta] - 1).max()
print(f"push and pull: start {1e6 * alpha:.0f} µs, {1e-9 / max(beta, 1e-15):.2f} GB/s, "
      f"largest residual {off:.0%}")

# %% [markdown]
# That is on one machine, where a "network" is the kernel copying memory. A start is still dear:
# two messages through sockets and the threads of three processes.
#
# ## Without waiting: `dist_async`
#
# Under `dist_sync` all wait for the slowest. Under `dist_async` nobody waits: the server updates
# its weights with each push as it comes. So the update must be on the server here, and a gradient
# may be *stale*: worked out for weights that are no longer there.
#
# We stage that. One weight, loss $w^2/2$, so that the gradient is $w$; it starts at 1, the rate is
# 1/4. Both workers pull. Worker 0 takes three steps. Only then does worker 1 push the gradient it
# has had all along.

# %%
def stale():
    store = mx.kvstore.create("dist_async")
    store.init(0, nd.ones(1))
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    w, seen = nd.zeros(1), []
    store.pull(0, out=w)
    for turn, steps in ((0, 3), (1, 1)):
        w.wait_to_read()
        store._barrier()
        for _ in range(steps if store.rank == turn else 0):
            store.push(0, w)  # the gradient of the weight that this worker knows
            store.pull(0, out=w)
            seen.append(w.asscalar().item())
        store._barrier()
    print(json.dumps([seen, laps(store)]))


# %% [markdown]
# **Predict:** the weight after each of worker 0's steps, and after worker 1's. And the straggler's
# ten laps: what do they do to worker 0 now?

# %%
(first, lap_async), (second, _) = answers(script("stale", laps, stale), arguments=["{}"])
assert first == [0.75, 0.75**2, 0.75**3], "each step takes a quarter of what is left"
assert second == [0.75**3 - 0.25], "worker 1 subtracts a quarter of the weight as it *was*, 1"
print("worker 0:", first, " then worker 1:", second)

# %% [markdown]
# With a fresh gradient the last step would have led to $0.75^4 = 0.316$. The stale one went to
# 0.172. Here it went the right way, and too far.
#
# And the time:

# %% tags=["measured"]
print(f"ten laps of worker 0 beside a straggler: dist_sync {lap_sync:.2f} s, "
      f"dist_async {lap_async:.3f} s")

# %% [markdown]
# That is the bargain: speed for freshness. How stale may it be? With every gradient $\tau$ steps
# old, $w_{t+1} = w_t - \eta\, w_{t-\tau}$, and this shrinks only if
# $\eta < 2 \sin \frac{\pi}{2(2\tau + 1)}$. (For $\tau = 0$ that is 2, as you know it.)
# **Predict:** with $\eta = 1/2$, which is the first delay at which it grows?

# %%
def descend(delay, rate, steps=400):
    w = [1.0] * (delay + 1)
    for _ in range(steps):
        w.append(w[-1] - rate * w[-1 - delay])
    return np.array(w[delay:])


# %% [markdown]
# The limit:

# %%
def limit(delay):
    return 2 * np.sin(np.pi / 2 / (2 * delay + 1))


# %% [markdown]
# The formula against the recursion itself, just below and just above the limit:

# %%
for delay in range(6):
    below, above = (np.abs(descend(delay, limit(delay) * f, 4000)) for f in (0.98, 1.02))
    assert below[-20:].max() < 1e-3 and above[-20:].max() > 1e3, f"delay {delay}"
print("the highest rate for delays 0 to 5:", *(f"{limit(delay):.3f}" for delay in range(6)))

# %% [markdown]
# At 1/2 a delay of 3 is too much:

# %%
grows = next(delay for delay in range(9) if limit(delay) < 0.5)
fig, ax = figure(f"At rate 0.5 a gradient may be {grows - 1} steps old, but not {grows}",
                 "step", "weight (best: 0)")
for delay, look, color in zip((0, 1, 2, 3), ("-", "--", "-.", ":"), (BLUE, GREEN, GREY, ORANGE)):
    ax.plot(descend(delay, 0.5, 40), look, color=color, label=f"delay {delay}")
ax.legend(fontsize=8)
show(fig, alt="The weight over 40 steps for gradients that are 0 to 3 steps old: with 0 it falls "
     "smoothly, with 1 and 2 it swings and settles, with 3 the swings grow.")

# %% [markdown]
# With $k$ workers of equal speed a gradient is about $k - 1$ updates old, so the more workers, the
# lower the rate must be; a straggler's are older still. And a result can't be repeated: it depends
# on who came when. That is why `dist_sync` is where one begins.

# %% [markdown]
# ## What it costs on paper
#
# $k$ workers, gradients of $S$ bytes. With a parameter server each worker sends $S$ bytes and gets
# $S$ back. **Predict:** what crosses the link of the *server*? Count, message by message, the most
# bytes that leave any one machine. A message within a machine costs its link nothing.

# %%
def most_sent(messages):  # (from, to, bytes)
    sent = {}
    for source, target, size in messages:
        sent[source] = sent.get(source, 0) + (size if source != target else 0)
    return max(sent.values())


# %% [markdown]
# Each server has its part of the keys, an $s$-th of the bytes. A push goes from worker to server,
# a pull comes back. `where` says on which machine a server lives.

# %%
def server_messages(k, where, size):
    part = size // len(where)
    pushes = [(worker, server, part) for worker in range(k) for server in where]
    return pushes + [(server, worker, part) for worker, server, _ in pushes]


# %% [markdown]
# A ring, as in chapter 03: each worker sends a $k$-th to the next, $2(k-1)$ times.

# %%
def ring_messages(k, size):
    return [(r, (r + 1) % k, size // k) for _ in range(2 * (k - 1)) for r in range(k)]


# %% [markdown]
# One server on its own machine; $k$ servers on theirs; $k$ servers, one on each worker's machine;
# and no server at all but a ring. For 8 workers and 840 bytes (it divides nicely):

# %%
k, S = 8, 840
ways = {"one server": server_messages(k, ["server"], S),
        f"{k} servers of their own": server_messages(k, [f"server {i}" for i in range(k)], S),
        f"{k} servers on the workers": server_messages(k, range(k), S),
        "ring": ring_messages(k, S)}


# %% [markdown]
# The most that any machine sends:

# %%
for name, messages in ways.items():
    print(f"{name:25} busiest machine sends {most_sent(messages) / S:.2f} S")

# %% [markdown]
# One server sends $k S$, and receives as much: the bottleneck that gave parameter servers a bad
# name. Divided over as many servers as workers, it is as little as can be: servers *on* the
# workers' machines and a ring come to the very same $2\frac{k-1}{k}S$. In general:

# %%
for k in (2, 3, 4, 5, 6, 7):
    assert most_sent(server_messages(k, ["server"], S)) == k * S, "one server: k S"
    assert most_sent(server_messages(k, range(k), S)) == 2 * (k - 1) * S // k, "k servers: a ring's"
    assert most_sent(ring_messages(k, S)) == 2 * (k - 1) * S // k, "chapter 03's byte count"
print("2 to 7 workers: k S with one server; 2(k-1)/k S with k servers on them, or a ring")

# %% [markdown]
# The model with chapter 11's two constants, a start and a bandwidth. A ring has $2(k-1)$ starts one
# after the other; a push and a pull are two, however many workers there are. (Bytes in and out of a
# server go at the same time, but the pull comes after the push.)

# %%
START = 50e-6  # assumed: a message between two hosts by TCP, seconds


def server_seconds(k, servers, size, bandwidth, start=START):
    return 2 * (start + max(1, k / servers) * size / bandwidth)


def ring_seconds(k, size, bandwidth, start=START):
    return 2 * (k - 1) * (start + size / k / bandwidth)


# %% [markdown]
# With starts free and one byte a second for each, these are the counts of above.

# %%
assert server_seconds(8, 1, 1e9, 1e9, 0) == 16 and ring_seconds(8, 1e9, 1e9, 0) == 14 / 8

# %% [markdown]
# Three models. Operations of LeNet and ResNet-18 for an image are chapter 11's. The third has a
# billion parameters; a transformer's training takes about 6 operations for each parameter and token
# (Kaplan et al., 2020). Each worker is chapter 11's V100 at 30% of its peak, with 256 images, or,
# as we assume, 16 texts of 1,024 tokens.

# %%
RATE = 0.3 * 15.7e12  # operations a second
models = {"LeNet": (129_068, 256 * 13_502_160),
          "ResNet-18": (11_175_818, 256 * 202.5 * 13_502_160),
          "a billion": (1e9, 16 * 1024 * 6 * 1e9)}
assert sum(p.size for p in weights(lenet("float32"))) == 129_068, "LeNet's parameters"

# %% [markdown]
# The links are Ethernet's (IEEE 802.3: 1000BASE-T, and its 10 and 100 Gbit/s kinds) at their full
# rate.

# %%
ethernet = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}  # bytes/s

# %% [markdown]
# **Predict:** for which of the nine pairs of model and link does a ring of 16 workers take
# longer than computing?

# %%
print("16 workers          computing     talk over a ring, of one step's computing")
for name, (parameters, work) in models.items():
    talks = [ring_seconds(16, 4 * parameters, rate) / (work / RATE) for rate in ethernet.values()]
    cells = "  ".join(f"{link} {t:7.0%}" for link, t in zip(ethernet, talks))
    print(f"{name:10} {1e3 * work / RATE:14,.1f} ms    {cells}")

# %% [markdown]
# LeNet's step is so short that the starts alone are longer; no link saves it. ResNet-18 needs
# 10 Gbit/s to get below its computing, and 100 to make talk small. The billion may surprise you.
# Beside its 4 GB of gradients stand 16,384 tokens' worth of work, so it needs the fast link, but
# no faster than ResNet-18 does. What decides is operations for each *byte*, and that is the batch
# of each worker: 256 images for ResNet-18, 16,384 tokens for the billion.
#
# And with servers?

# %%
work, bytes_, rate = models["ResNet-18"][1] / RATE, 4 * 11_175_818, ethernet["10 Gbit/s"]
ks = 2 ** np.arange(1, 8)
single = np.array([server_seconds(k, 1, bytes_, rate) for k in ks])
limit_at = next(k for k in range(1, 200) if server_seconds(k, 1, bytes_, rate) > work)
fig, ax = figure(f"One server at 10 Gbit/s: ResNet-18 is held up from {limit_at} workers on",
                 "workers", "s in each step")
ax.loglog(ks, single, "o-", base=2, color=ORANGE, label="one server")
ax.loglog(ks, [server_seconds(k, k, bytes_, rate) for k in ks], "s-", base=2, color=BLUE,
          label="as many servers as workers")
ax.loglog(ks, [ring_seconds(k, bytes_, rate) for k in ks], "^--", base=2, color=GREEN, label="ring")
ax.axhline(work, color=GREY, ls=":", label="computing, 256 images each")
ax.set(xticks=ks, xticklabels=ks)
ax.legend(fontsize=8)
show(fig, alt="Seconds of communication in a step for 2 to 128 workers: with one server it grows "
     "in proportion, with as many servers as workers and with a ring it stays level.")

# %% [markdown]
# As many servers as workers, and the server is no bottleneck; then it is a matter of starts. A
# ring's grow with $k$, a server's don't. But *equal parts* is what we assumed. MXNet cuts only
# arrays of a million entries or more in equal parts; a smaller one goes whole to server
# `key * 9973 % servers` (`EncodeDefaultKey` in `src/kvstore/kvstore_dist.h`). The second exercise
# works out what that means for LeNet.
#
# ## What fails
#
# ### MXNet itself says nothing
#
# By hand again, without anybody who watches. Worker 1 dies in the second epoch. Beside it, a worker
# all by itself, whose scheduler isn't there: it has the right host and a port at which nobody
# listens. **Predict:** five seconds after the death, which of the five other processes are still
# there?

# %%
dying = json.dumps(task("unseen", die=[1, 1, 3]))
crew = by_hand(["scheduler", "server", "worker", "worker"], training, dying)
lonely, = by_hand(["worker"], script("meet", meet))
names = dict(zip(crew + [lonely], ["scheduler", "server", "worker", "worker", "lonely worker"]))
while all(process.poll() is None for process in names):
    time.sleep(0.1)
time.sleep(5)
ended = [process for process in names if process.poll() is not None]

# %% [markdown]
# A negative status is the number of the signal that ended a process.

# %%
assert [p.returncode for p in ended] == [-signal.SIGKILL], "one worker was killed, nobody noticed"
print("ended:", [names[p] for p in ended], " still there:",
      [name for p, name in names.items() if p not in ended])

# %% [markdown]
# So we have to end them ourselves.

# %%
for process in names:
    process.kill()
    process.wait()

# %% [markdown]
# All of them were there, and nobody had raised anything. The other worker waits for a sum that will
# never be complete, the lonely one for a scheduler that may yet come. Nothing would ever tell them
# to stop waiting.
#
# ### Somebody who watches
#
# `run` has an eye on each process. As soon as one ends in any way but well, it ends the others and
# raises `Failed`. The same death again:

# %%
def fails(action, kind):
    try:
        action()
    except kind as error:
        return f"{kind.__name__}: {error}"
    raise AssertionError(f"{kind.__name__} should have been raised")


# %% [markdown]
# In the second epoch, before its eighth step:

# %%
dying = [json.dumps(task("killed", die=[1, 1, 7]))]
said = fails(lambda: run(training, arguments=dying, log=None), Failed)
assert "worker 1 was killed by SIGKILL" in said, "the error names who died, and how"
print(said.split(" after")[0])

# %% [markdown]
# ### Resuming
#
# The checkpoint of the first epoch is there, whole. The same script again, without the death, goes
# on from it. **Predict:** how far will the weights be from those of the unbroken run?

# %%
with np.load(folder / "killed.npz") as saved:
    assert saved["epoch"] == 1, "the first epoch was done"

# %% [markdown]
# So the first of two epochs is there, and the second begins anew.

# %%
run(training, arguments=[json.dumps(task("killed", resume=True))], log=None)
for rank in (0, 1):
    resumed, unbroken = outcome("killed", rank)[0], outcome("two", rank)[0]
    assert apart(resumed, unbroken) == 0, f"worker {rank}: a resumed run must end the same"
print("resumed: the same weights on both workers, bit for bit")

# %% [markdown]
# Bit for bit, since two things came back: the weights, and the order of the images, which
# depends on nothing but seed and epoch. Two summands give the same sum in either order; with three
# workers, the order of arrival would show in the last digits. At most an epoch's work is lost.
#
# ### A server dies
#
# `Cluster` is `run` for those who want to meddle: `wait(until=…)` comes back when any process
# prints that text, and `processes` has everybody's process id. While we are there, we look at
# which addresses they listen.

# %%
import psutil


def listening(pids):
    sockets = [c for pid in pids for c in psutil.Process(pid).net_connections("tcp")]
    return {c.laddr.ip for c in sockets if c.status == "LISTEN"}


# %% [markdown]
# After the first epoch, somebody kills the server:

# %%
def kill_server():
    with Cluster(training, arguments=[json.dumps(task("serverless"))], log=None) as cluster:
        cluster.wait(until="epoch 0 done")
        assert listening(cluster.processes.values()) == {"127.0.0.1"}, "loopback, all of them"
        os.kill(cluster.processes["server 0"], signal.SIGKILL)
        cluster.wait()


said = fails(kill_server, Failed)
assert "server 0 was killed by SIGKILL" in said, "a server is watched as well"
print(said.split(" after")[0])

# %% [markdown]
# A server that dies takes its weights with it. The remedy is the same: start again from the
# checkpoint.
#
# ### A port in use
#
# The scheduler's port must be free. Let somebody else have it.

# %%
with socket.socket() as other:
    other.bind(("127.0.0.1", 0))
    other.listen()
    port = other.getsockname()[1]
    said = fails(lambda: run(training, address=f"127.0.0.1:{port}"), OSError)
assert f"127.0.0.1:{port}" in said, "the error names the port"
print(said.replace(str(port), "PORT").split("] ")[1])

# %% [markdown]
# That is known before anything is started. By hand, the scheduler ends with `bind failed` in a long
# traceback of its own, and everybody else waits for good.
#
# | what fails | MXNet alone | with `run` |
# | --- | --- | --- |
# | a worker, a server | the others wait for good | `Failed` names it, at once |
# | the scheduler isn't there | workers wait for good | `TimeoutError` at the deadline |
# | its port is in use | `bind failed` in its output; the others wait | `OSError` names the port |
# | a straggler | `dist_sync`: all are as slow as it is | the same: it is no failure |
# | workers with unequal steps | the last step waits for good | `TimeoutError` at the deadline |
#
# So give `timeout` a value that is a little more than the whole training should take.
#
# ## Several hosts
#
# Nothing of the training script changes. What changes is the addresses: each process needs its own
# host's, and all need the scheduler's. Here for three hosts with addresses from the block that is
# reserved for examples, 192.0.2.0/24. The course lies in the same folder on each, set up by
# `make setup`.

# %%
places = {"root": "192.0.2.10", "port": 9000, "workers": 2, "servers": 2}
plan = [("192.0.2.10", "scheduler"), ("192.0.2.11", "server"), ("192.0.2.12", "server"),
        ("192.0.2.11", "worker"), ("192.0.2.12", "worker")]

# %% [markdown]
# A line for each process:

# %%
for host, role in plan:
    what = "train.py \"$ARGUMENTS\"" if role == "worker" else "-c \"import mxnet\""
    line = command(role, what, python=".venv/bin/python", host=host, **places)
    print(f"ssh {host} 'cd course && {line}' &")

# %% [markdown]
# They are the lines that we started by hand above, with other addresses.
#
# | variable | scheduler | servers | workers |
# | --- | --- | --- | --- |
# | `DMLC_ROLE` | `scheduler` | `server` | `worker` |
# | `DMLC_NODE_HOST` | its own address | its own address | its own address |
# | `DMLC_PS_ROOT_URI`, `_PORT` | the scheduler's | the scheduler's | the scheduler's |
# | `DMLC_NUM_WORKER`, `_SERVER` | the same numbers | the same | the same |
# | `GLIBC_TUNABLES`, for float64 | | `glibc.malloc.perturb=255:glibc.malloc.tcache_count=0` | |
#
# `train.py` is the script, `$ARGUMENTS` its JSON. Four more things must hold. Every host reaches
# every other at *any* port, since only the scheduler's is fixed. The network is one you trust (see
# *Who updates?*). All have the same version of the code. The checkpoint is on a disk that all can
# read. And `kill` on your own machine ends an `ssh`, not what it started: somebody has to watch.

# %% [markdown]
# ## The same with torchrun
#
# PyTorch has no servers: its workers all-reduce among themselves (chapter 14), and `torchrun`
# starts them. It does two things that MXNet leaves to you: it notices a death, and it starts *all*
# workers anew, up to `--max-restarts` times. The next cells need PyTorch.

# %% tags=["torch"]
try:
    import psutil
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise ImportError("This section needs PyTorch: `make setup TORCH=1` installs it") from error

# %% [markdown]
# One layer is enough to show it: softmax regression in float64. `DistributedDataParallel`
# *averages* the workers' gradients, where MXNet's store adds them up: so here a worker's sum over
# its own images has to be divided by the size of the whole batch and multiplied by $k$. With
# `die=[r, e, s]` worker $r$ kills itself, but only at the first start.

# %% tags=["torch", "trains"]
def ddp(path, name, epochs, die=None):
    dist.init_process_group("gloo")
    rank, k = dist.get_rank(), dist.get_world_size()
    net, begin = resume(f"{path}/{name}.pt")
    net = torch.nn.parallel.DistributedDataParallel(net)
    sgd = torch.optim.SGD(net.parameters(), lr=1 / 16)
    for epoch in range(begin, epochs):
        for step, batch in enumerate(batches(epoch)):
            if die == [rank, epoch, step] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            sgd.zero_grad()
            (error(net, path, batch[rank::k]) * k / len(batch)).backward()
            sgd.step()
        keep(f"{path}/{name}.pt", net.module, epoch + 1, rank)
    report(path, name, rank, net.module, begin)


# %% [markdown]
# The loss of a worker's rows, and what is needed to read them:

# %% tags=["torch"]
def error(net, path, rows):
    x, y = (np.load(f"{path}/{name}.npy", mmap_mode="r")[rows] for name in ("images", "labels"))
    x, y = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.int64)
    return torch.nn.functional.cross_entropy(net(x.flatten(1)), y, reduction="sum")


# %% [markdown]
# Checkpoints as before, with the same rename. Plain SGD has no memory that one would have to save.

# %% tags=["torch"]
def resume(file):
    net, begin = torch.nn.Linear(784, 10, dtype=torch.float64), 0
    torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
    if os.path.exists(file):
        saved = torch.load(file)
        net.load_state_dict(saved["net"])
        begin = saved["epoch"]
    return net, begin


def keep(file, net, epoch, rank):
    if rank == 0:
        torch.save({"net": net.state_dict(), "epoch": epoch}, f"{file}.new")
        os.replace(f"{file}.new", file)


# %% [markdown]
# At the end each worker reports its weights, the epoch at which its last start began, and where
# its parent, torchrun, listens.

# %% tags=["torch"]
def report(path, name, rank, net, begin):
    torchrun = psutil.Process(os.getppid())
    listens = {c.laddr.ip for c in torchrun.net_connections("tcp") if c.status == "LISTEN"}
    weight, bias = (p.detach().numpy() for p in net.parameters())
    np.savez(f"{path}/{name}-{rank}.npz", weight=weight, bias=bias, begin=begin,
             listens=sorted(listens))
    dist.destroy_process_group()


TORCH = "import os, json, signal, sys\nimport numpy as np, psutil, torch\n" \
        "import torch.distributed as dist\n"
elastic = script("ddp", batches, error, resume, keep, report, ddp, head=TORCH)

# %% [markdown]
# The oracle is NumPy, in one process, with no library for training at all.

# %% tags=["torch"]
def softmax_regression(epochs):
    w, b, x, y = np.zeros((10, 784)), np.zeros(10), centred.reshape(IMAGES, -1), np.eye(10)
    x, y = x.astype("float64"), y[data.train_labels[:IMAGES]]
    for epoch in range(epochs):
        for rows in batches(epoch):
            out = np.exp(x[rows] @ w.T + b)
            g = (out / out.sum(axis=1, keepdims=True) - y[rows]) / len(rows)
            w, b = w - g.T @ x[rows] / 16, b - g.sum(axis=0) / 16
    return [w, b]


# %% [markdown]
# Without restarts first: worker 1 dies in the second of three epochs. Then the same with one
# restart. **Predict:** at which epoch does the second start begin? And do the weights match?

# %% tags=["torch"]
def job(name):
    (folder / f"{name}.pt").unlink(missing_ok=True)
    dying = {"path": str(folder), "name": name, "epochs": 3, "die": [1, 1, 5]}
    return {"arguments": [json.dumps(dying)], "log": None}


# %% [markdown]
# No restarts:

# %% tags=["torch"]
said = fails(lambda: torchrun(elastic, nproc=2, **job("once")), Failed)
assert "SIGKILL" in said or "Signal 9" in said, "torchrun tells what its worker died of"
print("no restarts:", said.split(" after")[0])

# %% [markdown]
# The same death, and one restart. The variable is for PyTorch 2.13: without it, torchrun keeps one
# store for all starts, and the new workers look for one another at the old ones' ports.

# %% tags=["torch"]
own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
torchrun(elastic, nproc=2, max_restarts=1, env=own_store, **job("again"))
for rank in (0, 1):
    with np.load(folder / f"again-{rank}.npz") as file:
        assert file["begin"] == 1, "the second start goes on after the first epoch"
        far = apart([file["weight"], file["bias"]], softmax_regression(3))
        assert far < 1e-12, f"worker {rank} is {far} from NumPy"
        print(f"worker {rank}: resumed at epoch {file['begin']}; torchrun listens at",
              "every address" if {"::", "0.0.0.0"} & set(file["listens"]) else file["listens"])

# %% [markdown]
# It starts all of them, the survivor too, and they go on from the checkpoint: a restart resumes
# nothing by itself. Without `resume` in the script, training would begin from zero, and nobody
# would say so.
#
# **Mind where it listens.** torchrun's store, through which the workers meet, listens on every
# address of the machine, also where all workers are local, and so does a second one that worker 0
# keeps. MXNet's processes listen only at the address in `DMLC_NODE_HOST`. On a network that you
# don't trust, have a firewall before them.
#
# For two hosts, the same line is run on each: `torchrun --nnodes=2 --nproc-per-node=1
# --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=192.0.2.11:9000 --rdzv-id=lenet train.py`.
# There is no scheduler to start: the endpoint's host keeps the store.

# %% [markdown]
# ## Summary
#
# - A scheduler introduces, servers add up, workers compute. Six variables say who is who, and they
#   must be set before MXNet is imported.
# - Divide each *batch* among the workers, not the data set: no image is lost or doubled, and all
#   take equally many steps.
# - `dist_sync` adds up over workers: `step` takes the size of the whole batch. Two workers then end
#   where one does on the joined batch, to 1e-12 in float64.
# - The servers update: `step` takes the same size each time, and momentum can't be saved.
# - `dist_async` waits for nobody and pays with stale gradients: a delay $\tau$ limits the rate.
# - MXNet reports no death: somebody has to watch. A checkpoint, renamed into place each epoch,
#   brings back the very weights of an unbroken run.
# - One server sends $kS$ bytes; as many servers as workers, or a ring, $2\frac{k-1}{k}S$. What
#   decides is how many operations each worker does for a byte.
#
# This is the last chapter. The way from one array on one device to many machines is behind you;
# the next step is a model of your own.
#
# **Further reading.** MXNet's tutorials, "Multiple GPUs training with Gluon API" and "Distributed
# Training in MXNet"; M. Li et al., *Scaling distributed machine learning with the parameter server*
# (OSDI 2014); J. Kaplan et al., *Scaling laws for neural language models* (2020), arXiv:2001.08361;
# PyTorch's documentation, "torchrun (Elastic Launch)"; IEEE Std 802.3, *Ethernet*.

# %% [markdown]
# ## Exercises
#
# 1. **Three kinds of seed.** Give each worker a seed of its own in `batches`, its rank say. Show
#    for two workers that images are lost and doubled, and count them in an epoch.
# 2. **Whose keys?** A store has LeNet's eight arrays as keys 0 to 7, in the order of
#    `net.collect_params()`. By MXNet's rule, what share of the bytes does each of *two* servers
#    get? And of three? Which number would you take?
# 3. **A worker with nothing.** Choose a number of images for which the last batch is smaller than
#    the number of workers. What must the worker without an image do, and why?

# %% [markdown]
# ### Answer 1
#
# With different orders the shards no longer fit together: what one worker takes,
# another may take as well.

# %% tags=["solution"]
orders = [np.random.default_rng([13, 0, rank]).permutation(IMAGES) for rank in (0, 1)]
taken = np.concatenate([np.concatenate([batch[rank::2] for batch in np.split(
    orders[rank], range(BATCH, IMAGES, BATCH))]) for rank in (0, 1)])
times_seen = np.bincount(taken, minlength=IMAGES)
assert len(taken) == IMAGES and times_seen.max() == 2, "as many, but not the same ones"
assert (times_seen == 0).sum() == (times_seen == 2).sum(), "one is lost for each one doubled"
print(f"{(times_seen == 0).sum()} of {IMAGES} images are lost, as many are doubled")

# %% [markdown]
# ### Answer 2
#
# 9973 is odd, so with two servers even keys go to server 0, odd ones to server 1:
# all weights to one, all biases to the other. One server does all the work. With three, 9973 leaves
# 1, and keys go round.

# %% tags=["solution"]
entries = [array.size for array in weights(lenet("float32"))]
shares = {}
for servers in (1, 2, 3, 4, 5):
    load = np.bincount([key * 9973 % servers for key in range(8)], entries, minlength=servers)
    shares[servers] = load / sum(entries)
    print(servers, "servers:", *(f"{share:.1%}" for share in shares[servers]))
assert shares[2][0] > 0.99, "the weights are keys 0, 2, 4, 6"
assert all(share.max() > 0.75 for share in shares.values()), "one array is most of LeNet"

# %% [markdown]
# No number helps LeNet: its largest array has four fifths of the entries and is too small to be
# cut. The variable `MXNET_KVSTORE_BIGARRAY_BOUND` lowers the million from which on it is.

# %% [markdown]
# ### Answer 3
#
# It must push all the same, zeros, or the others wait for its part of the sum.

# %% tags=["solution"]
def backward_or_zero(net, x, y):
    if len(y):
        return backward(net, nd.array(x), nd.array(y))
    for p in net.collect_params().values():
        p.grad()[:] = 0
    return nd.zeros(1)


net, sums = lenet("float32"), []
for rows in (batches(0, images=65)[-1][r::2] for r in (0, 1)):  # 64 and 1: none for worker 1
    backward_or_zero(net, centred[rows], data.train_labels[rows])
    sums.append([p.grad().asnumpy().copy() for p in net.collect_params().values()])
assert len(rows) == 0 and max(np.abs(a).max() for a in sums[0]) > 0, "one image, and none"
assert all((a == 0).all() for a in sums[1]), "not the gradients of the batch before"
