# %% [markdown]
# # 15 · Many machines
#
# When one machine is not enough, gradients travel over a network, and sooner or later a machine
# fails. This chapter gets the training back, bit for bit.
#
# ## What you'll do
#
# Run LeNet under `torchrun`, kill a worker, and resume. Leave parts out of the checkpoint. Then use
# the older design, MXNet's parameter server: show that two workers compute what one would, measure
# how old gradients get, and kill workers and servers.
#
# ## What you'll learn
#
# - how processes on several machines find each other;
# - what a checkpoint must hold, how to write it, and how to test it;
# - how a parameter server works, and what each failure looks like;
# - when the network is the limit, and when memory is.
#
# ## What you need
#
# Chapters 03, 07 and 14. No GPU and no second machine: the machines are processes. Reading takes
# {reading time}, running about a minute and a quarter on two cores. PyTorch comes with
# `make setup TORCH=1`. Without it, skip the cells from *torchrun* to *Elastic*, the count of
# activations under *Memory*, and exercise 2.

# %%
from helpers import load_data
from helpers.cluster import SERVER, Cluster, Failed, run, torchrun
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

# %% [markdown]
# MXNet comes after `helpers`, as always.

# %%
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import mxnet as mx
import numpy as np
import psutil
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn as gnn

# %% [markdown]
# ## Scripts and data
#
# Workers are separate processes, so their code has to be in a file. We write the functions here and
# let `inspect` copy their source. The last function is the one that runs; its arguments come as
# JSON.

# %%
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)


def script(name, head, *functions):
    call = f"{functions[-1].__name__}(**json.loads(sys.argv[1]))\n"
    path = folder / f"{name}.py"
    path.write_text("\n\n".join([head, *map(inspect.getsource, functions), call]))
    return path


# %%
def job(name, **options):  # what `torchrun` and `run` get
    for this in (name, *options.get("before", ())):
        (folder / f"{this}.pt").unlink(missing_ok=True)  # a checkpoint of an earlier run
    return {"arguments": [json.dumps({"path": str(folder), "name": name, **options})], "log": None}


# %% [markdown]
# The helpers `torchrun` and `run` start such scripts, return what each worker printed, by rank, and
# have a deadline. We check that no process is left: all that we start inherits a variable by which
# we can find it.

# %%
os.environ["STARTED_IN"] = str(folder)


def still_running():
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended just now, or isn't ours
            if process.environ().get("STARTED_IN") == str(folder):
                found.append(process.pid)
    return found


child = subprocess.Popen(["sleep", "60"])
assert still_running() == [child.pid], "it finds what is there"
child.kill(), child.wait()
assert still_running() == []


# %%
def fails(action, kind):
    try:
        action()
    except kind as error:
        assert still_running() == [], "nobody is left"
        return f"{kind.__name__}: {error}"
    raise AssertionError(f"{kind.__name__} should have been raised")


# %% [markdown]
# Our shared disk is a pair of NumPy files, memory-mapped, so that a worker reads only the rows that
# it asks for.

# %% tags=["measured"]
IMAGES = 512
data = load_data("mnist", limit=IMAGES)
print(data)
np.save(folder / "images.npy", data.train_images - data.train_images.mean())
np.save(folder / "labels.npy", data.train_labels)


# %%
def read(path, rows):
    return [np.load(f"{path}/{name}.npy", mmap_mode="r")[rows] for name in ("images", "labels")]


def batches(epoch, images=512, size=32):
    order = np.random.default_rng([15, epoch]).permutation(images)
    return np.split(order, range(size, images, size))


# %% [markdown]
# The order depends on the epoch's number alone, so every worker can work it out. Worker $r$ of $k$
# takes `batch[r::k]` of each batch: no image is lost or doubled, and all take equally many steps.

# %%
for k in (1, 2, 3, 5):
    shares = [batch[r::k] for r in range(k) for batch in batches(epoch=0)]  # each draws its own
    assert (np.sort(np.concatenate(shares)) == np.arange(IMAGES)).all(), "each image once"
    assert min(map(len, shares)) > 0, "every worker has images in every step"
assert (batches(0)[0] != batches(1)[0]).any(), "another order in the next epoch"

# %% [markdown]
# ## torchrun: who am I?
#
# `torchrun` runs once on each machine and starts a process for each of its devices. The
# *rendezvous* is where the torchruns meet: a small store of keys and values at an address that all
# were told. When enough have registered there, they are put in order, and so are their processes
# (`dynamic_rendezvous.py` and `agent/server/api.py` in `torch/distributed/elastic`). A process
# reads the outcome from its environment:

# %% tags=["torch"]
try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError as error:
    raise ImportError("This part needs PyTorch: `make setup TORCH=1` installs it") from error


# %% tags=["torch"]
def who():
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    print(json.dumps({name: int(os.environ[name]) for name in names}))


# %% [markdown]
# `RANK` is unique in the whole job, `LOCAL_RANK` on this machine: it chooses the device.
# `GROUP_RANK` is the machine's number. **Predict** the five numbers of each of two workers on this
# one machine.

# %% tags=["torch"]
whoami = script("who", "import json, os, sys", who)
said = [json.loads(text) for text in torchrun(whoami, 2, arguments=["{}"], log=None)]
for numbers in said:
    print(", ".join(f"{name} {value}" for name, value in numbers.items()))
assert [numbers["RANK"] for numbers in said] == [0, 1]

# %% [markdown]
# With two machines of four devices, the last process has rank 7, local rank 3 and group rank 1.
#
# **Mind where it listens.** Two stores listen on every address of the machine, torchrun's and
# worker 0's, even when all workers are local (`tests/test_cluster.py` checks it). On a network that
# you don't trust, put a firewall in front of the whole machine.
#
# For two machines, the same line is run on each:
#
# ```
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=3 \
#     --rdzv-backend=c10d --rdzv-endpoint=192.0.2.11:9000 --rdzv-id=lenet train_lenet.py
# ```
#
# (192.0.2.11 stands for the machine that keeps the store.) If a worker fails, torchrun stops the
# others and starts *all* of them anew, up to `--max-restarts` times (`torch/distributed/run.py`).
# Bringing back the state is the script's part. If a whole machine is lost, whatever started the job
# has to replace it (`run.py`, "Failure Modes").
#
# ## A checkpoint that is complete
#
# A restarted process has its source, arguments and environment, and what it finds on the disk. So
# ask of everything that changes during training: would a new process have it? For our LeNet,
# trained with momentum and dropout, there are four such things, and a fifth inside DDP (after the
# restart, below):

# %% tags=["torch"]
def snapshot(model, optimizer, epoch, step):
    random = [None] * dist.get_world_size()
    dist.all_gather_object(random, torch.get_rng_state())
    return {"model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),  # momentum
            "position": [epoch, step],  # in the data
            "random": random}  # of each rank: the next dropout mask


# %% [markdown]
# One rank writes it for all, to a disk that all can read. It may be killed while it writes, so it
# writes *another* file and renames it: whoever opens the name finds the old file or the new one,
# whole (POSIX, `rename`). (`fsync` is for a power failure, which we can't test.)

# %% tags=["torch"]
def save(state, file):
    if dist.get_rank() == 0:
        with open(f"{file}.new", "wb") as aside:
            torch.save(state, aside)
            aside.flush()
            os.fsync(aside.fileno())
        os.replace(f"{file}.new", file)


# %% [markdown]
# Back again; `without` leaves parts out, for later.

# %% tags=["torch"]
def restore(file, model, optimizer, without=()):
    if not os.path.exists(file):
        return [0, 0]
    saved = torch.load(file)
    if "model" not in without:
        model.module.load_state_dict(saved["model"])
    if "optimizer" not in without:
        optimizer.load_state_dict(saved["optimizer"])
    if "random" not in without:
        mine = 0 if "each rank's own" in without else dist.get_rank()
        torch.set_rng_state(saved["random"][mine])
    epoch, step = saved["position"]
    return [epoch, 0 if "step" in without else step]


# %% [markdown]
# The training begins at a position and saves every four steps. With `die=[r, e, s]` worker $r$
# kills itself in epoch $e$ before step $s$, but only at its first start.

# %% tags=["torch", "trains"]
def go_on(path, name, model, optimizer, position, epochs=3, die=None):
    rank, k, trace = dist.get_rank(), dist.get_world_size(), {}
    for epoch in range(position[0], epochs):
        for step, batch in enumerate(batches(epoch)):
            if [epoch, step] < position:
                continue
            if step % 4 == 0 and name:
                save(snapshot(model, optimizer, epoch, step), f"{path}/{name}.pt")
            if die == [rank, epoch, step] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = map(torch.tensor, read(path, batch[rank::k]))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y.long())
            loss.backward()
            optimizer.step()
            weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy().copy()
            trace[epoch, step] = loss.item(), weights
    return trace


# %% [markdown]
# How a new process begins: `TORCH` heads all our PyTorch scripts. Each rank's random numbers are
# its own, or all ranks would drop the same units; DDP sends rank 0's weights to all (chapter 14).

# %% tags=["torch"]
TORCH = """
import json, os, signal, sys, time, numpy as np, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
report = sys.excepthook

def end_later(*error):  # torchrun names the first that it finds dead: let that be the failed peer
    report(*error)
    time.sleep(2)

sys.excepthook = end_later
"""


def dropout_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))


def fresh():
    torch.manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(dropout_lenet())
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# %% [markdown]
# The program resumes if there is a checkpoint, and writes down how it went.

# %% tags=["torch"]
def train(path, name, before=(), die=None):
    for this in (*before, name):
        model, optimizer = fresh()
        position = restore(f"{path}/{this}.pt", model, optimizer)
        trace = go_on(path, this, model, optimizer, position, die=die if this == name else None)
        momentum = [optimizer.state[p]["momentum_buffer"].flatten() for p in model.parameters()]
        write(f"{path}/{this}-{dist.get_rank()}.npz", trace, momentum=torch.cat(momentum).numpy())
        print(f"began at epoch {position[0]}, step {position[1]}")
    dist.destroy_process_group()


def write(file, trace, **more):
    losses, weights = zip(*trace.values())
    np.savez(file, losses=losses, weights=weights, **more)


parts = [read, batches, snapshot, save, restore, go_on, dropout_lenet, fresh, write]
training = script("train_lenet", TORCH, *parts, train)


# %% [markdown]
# First a run without accident, for 48 steps. Then, in the same job, worker 1 is killed in the
# second epoch, before step 6, and torchrun may not restart:

# %% tags=["torch", "trains"]
both = job("dead", before=["whole"], die=[1, 1, 6])
said = fails(lambda: torchrun(training, 2, **both), Failed)
assert "worker 1 was killed by SIGKILL" in said
whole = [dict(np.load(folder / f"whole-{rank}.npz")) for rank in (0, 1)]
assert (whole[0]["weights"] == whole[1]["weights"]).all(), "replicas are equal"
assert whole[0]["losses"][-8:].mean() < 0.7 * whole[0]["losses"][:8].mean(), "it learns"
print(said.split(" after")[0], "| checkpoint at", torch.load(folder / "dead.pt")["position"])

# %% [markdown]
# The same death, and one restart allowed. **Predict:** where does the second start begin, and how
# far from the unbroken run do weights and momentum end?

# %% tags=["torch", "trains"]
texts = torchrun(training, 2, max_restarts=1, **job("again", die=[1, 1, 6]))
for rank in (0, 1):
    again = np.load(folder / f"again-{rank}.npz")
    for name in ("weights", "losses"):  # after each step
        assert (again[name] == whole[rank][name][16 + 4:]).all(), name
    assert (again["momentum"] == whole[rank]["momentum"]).all()
    print(f"worker {rank}: {texts[rank].strip()}; bit for bit the unbroken run")

# %% [markdown]
# Two steps' work was lost and done again. Bit for bit is possible since a sum of two gradients is
# the same in either order.
#
# With three workers the order matters. After its first step DDP reorders the gradients in a bucket
# (`should_rebuild_buckets` in c10d's `reducer.hpp`). A restarted process has not taken that step,
# so it sums in another order: the runs ended 1e-7 to 1e-4 apart. With `find_unused_parameters=True`
# nothing is reordered, and they resumed bit for bit (neither in this notebook).
#
# **On GPUs:** some operators give other last digits from run to run, unless you forbid it
# (`use_deterministic_algorithms` in `torch/__init__.py`).
#
# Without `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, which the helper sets, two of five restarts failed
# with gloo: torchrun then keeps one store over all restarts (`next_rendezvous` in
# `dynamic_rendezvous.py`), with dead workers' keys.
#
# How often should you save? Where saving costs $C$ seconds and failures come every $M$ seconds in
# the mean, about every $\sqrt{2CM}$ seconds (J. W. Young, CACM, 1974).
#
# ### What if a part is missing?
#
# A test should also fail when it must. So resume from the dead run's checkpoint again, each time
# without one part. Would you see it in the loss?

# %% tags=["torch"]
def leave_out(path, parts):
    for number, without in enumerate(parts):
        model, optimizer = fresh()
        position = restore(f"{path}/dead.pt", model, optimizer, without)
        trace = go_on(path, None, model, optimizer, position)
        write(f"{path}/without-{number}-{dist.get_rank()}.npz", trace)
    dist.destroy_process_group()


# %% [markdown]
# With all parts it must be the unbroken run.

# %% tags=["torch", "trains"]
PARTS = {"nothing": [], "optimizer": ["optimizer"], "step in the epoch": ["step"],
         "random state": ["random"], "rank 1's random state": ["each rank's own"]}
parts = [read, batches, restore, go_on, dropout_lenet, fresh, write]
arguments = [json.dumps({"path": str(folder), "parts": list(PARTS.values())})]
said = torchrun(script("leave_out", TORCH, *parts, leave_out), 2, arguments=arguments, log=None)

# %% tags=["torch"]
kept = {name: [np.load(folder / f"without-{i}-{rank}.npz") for rank in (0, 1)]
        for i, name in enumerate(PARTS)}
reference = whole[0]["weights"][16 + 4:]
assert (kept["nothing"][0]["weights"] == reference).all(), "with all parts: the unbroken run"

# %% [markdown]
# The distance is that of all weights, as a share of their length.

# %% tags=["torch", "measured"]
distances = {}
for name, ranks in kept.items():
    weights = ranks[0]["weights"][-len(reference):]  # without the step, four more at the beginning
    distances[name] = (np.linalg.norm(weights - reference, axis=1)
                       / np.linalg.norm(reference, axis=1))
    loss = np.mean([each["losses"][-8:] for each in ranks])
    assert (distances[name][-1] == 0) == (name == "nothing"), name
    assert loss < 0.7 * whole[0]["losses"][:8].mean(), "it learns, all the same"
    print(f"without {name:22} {len(ranks[0]['losses'])} steps, weights off by "
          f"{distances[name][-1]:6.2%}, mean loss of the last 8 steps {loss:.3f}")

# %% [markdown]
# Nothing raised, and all went on learning. With no unbroken run beside them, none of these losses
# would look wrong. The weights show it:

# %% tags=["torch", "measured"]
far = [100 * distances[name][-1] for name in PARTS if name != "nothing"]
fig, ax = figure(f"One part missing: the weights end {min(far):.0f} to {max(far):.0f} % off",
                 "steps of the unbroken run since the checkpoint", "distance of the weights (%)")
for (name, line), look, color in zip(list(distances.items())[1:], ("-", "--", "-.", ":"),
                                     (BLUE, ORANGE, GREEN, "black")):
    ax.plot(range(1, len(line) + 1), 100 * line, look, color=color, label=name)
ax.set(ylim=(0, None))
fig.legend(title="left out", loc="outside right center", fontsize=8)
show(fig, alt="How far the weights are from the unbroken run's over 28 steps after a resumption "
     "without optimizer state, step, random state, or rank 1's own: all drift away.")

# %% [markdown]
# What was wrong:
#
# - *Optimizer*: momentum starts from zero. (With Adam, its second moments and step count, too.)
# - *Step*: the epoch begins again, and its first four batches are trained on twice, before the
#   curve begins.
# - *Random state*: dropout draws the masks that a new process draws.
# - *Rank 1's*: rank 1 is given rank 0's state. From then on both drop the same units.
#
# NumPy's, Python's and a GPU's generators have states of their own.
#
# ### Killed while it writes
#
# Is the rename needed? We fork the worker twice and kill each fork with half of its file written:
# one in `save`, one in a version that writes in place.

# %% tags=["torch"]
def save_in_place(state, file):
    with open(file, "wb") as target:
        torch.save(state, target)
        target.flush()
        os.fsync(target.fileno())


def die_in(path, saved):
    def killed(number):
        os.ftruncate(number, os.fstat(number).st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = killed
    state = torch.load(saved)
    for way in (save_in_place, save):
        if os.fork() == 0:
            way(state, f"{path}/{way.__name__}.pt")
            os._exit(0)
        assert os.wait()[1] == signal.SIGKILL, "it was killed"


# %% tags=["torch"]
dying, whole_after = script("die_in", TORCH, save, save_in_place, die_in), {}
for how in ("save_in_place", "save"):
    (folder / f"{how}.pt").write_bytes((folder / "dead.pt").read_bytes())
arguments = [json.dumps({"path": str(folder), "saved": str(folder / "dead.pt")})]
torchrun(dying, 1, arguments=arguments, log=None)
for how in ("save_in_place", "save"):
    try:
        whole_after[how] = torch.load(folder / f"{how}.pt")["position"] == [1, 4]
    except RuntimeError as error:
        whole_after[how] = False
        print(f"{how}: {type(error).__name__}:", str(error).split(":")[0])
assert whole_after == {"save_in_place": False, "save": True}

# %% [markdown]
# Written in place, the new checkpoint is torn *and the old one is gone*. With `save`, the old one
# is still there.
#
# ### Elastic
#
# With `--nnodes=1:4` torchrun accepts one to four machines, and starts all workers anew when one
# joins or leaves (`run.py`, "Membership Changes"). Then $k$ changes. Our position counts whole
# batches, so it stays valid. A mean over workers is only the batch's where $k$ divides it: see
# exercise 2. The random states, one for each rank, no longer fit: with new seeds training goes on,
# but not as the unbroken run.
#
# ## A parameter server
#
# Gradients can also be added up by *servers* (Li et al., 2014). MXNet's key-value store (chapter
# 07) works that way across machines:
#
# - A **worker** computes gradients. It is your training script.
# - A **server** holds the store's keys. It adds up what workers push and hands out the result.
# - The **scheduler** introduces them and gives out ranks: the rendezvous. No gradient passes
#   through it.
#
# A process learns its role from its environment when it imports MXNet:

# %%
def variables(role, host, root, port, workers, servers):
    return {"DMLC_ROLE": role,  # scheduler, server or worker
            "DMLC_NODE_HOST": host,  # where a server or worker listens
            "DMLC_PS_ROOT_URI": root, "DMLC_PS_ROOT_PORT": str(port),  # where the scheduler does
            "DMLC_NUM_WORKER": str(workers), "DMLC_NUM_SERVER": str(servers)}


# %% [markdown]
# For scheduler and server, `import mxnet` with their role is enough: the process serves, and exits
# inside the import. **So never set a role in a notebook**, whose kernel would end there. By hand,
# on this machine:

# %%
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# %%
@contextmanager
def by_hand(roles, path, arguments):
    here = {"host": "127.0.0.1", "root": "127.0.0.1", "port": free_port(),
            "workers": roles.count("worker"), "servers": roles.count("server")}
    what = {"worker": [path, json.dumps(arguments)]}
    crew = [subprocess.Popen([sys.executable, *what.get(role, ["-c", "import mxnet"])],
                             env={**os.environ, "PYTHONUNBUFFERED": "1", **variables(role, **here)},
                             text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            for role in roles]
    try:
        yield crew
    finally:
        for process in crew:
            process.kill()
            process.communicate()


# %% [markdown]
# The smallest script: worker $r$ pushes $r + 1$ times the numbers 1 to 6. The store's kind is
# `dist_sync`: the server counts pushes. When as many have come for a key as there are workers, it
# answers all of them with the sum applied (`ApplyUpdates` in `src/kvstore/kvstore_dist_server.h`),
# and a worker's pull waits for its own push. **Predict** what three workers pull, and what worker 0
# does after pushing 1, 10, 100 alone.

# %%
def meet():
    store = mx.kvstore.create("dist_sync")
    mine = nd.arange(1, 7) * (store.rank + 1)
    store.init(0, nd.zeros(6))
    store.push(0, mine)
    store.pull(0, out=mine)
    pulled = mine.asnumpy().tolist()
    store._barrier()
    if store.rank == 0:
        for n in (1, 10, 100):
            store.push(0, n * nd.ones(6))
        store.pull(0, out=mine)
    print(json.dumps([store.rank, pulled, mine[0].asscalar().item()]))


MXNET = """
import json, os, signal, sys, time
import helpers  # before MXNet
import mxnet as mx, numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn as gnn
"""

# %%
with by_hand(["scheduler", "server", *["worker"] * 3], script("meet", MXNET, meet), {}) as crew:
    said = sorted(json.loads(process.communicate(timeout=100)[0]) for process in crew[2:])
six = [6.0 * n for n in range(1, 7)]
assert [pulled for _, pulled, _ in said] == [six] * 3, "(1 + 2 + 3) times 1 to 6"
assert [last for *_, last in said] == [111, 6, 6], "1 + 10 + 100: three pushes, whoever sent them"
print("all three workers pulled", six, "| then worker 0 alone:", said[0][2])

# %% [markdown]
# The server doesn't check from whom pushes come: push a key once, then pull it, in every step.
#
# **On GPUs:** worker 0 would hang. Its second push needs the key's buffer, in use until the server
# answers the first (`Push_`, `PushDefault` in `kvstore_dist.h`; read, not run).
#
# ### LeNet on two workers
#
# The script, in Gluon and float64, for `run`. Its gradient is the *sum* over a worker's images, the
# server adds the workers' sums, and `step(n)` divides by $n$: so $n$ has to be the size of the
# whole batch.

# %%
def lenet(dtype):
    mx.random.seed(15)
    net = gnn.HybridSequential()
    net.add(gnn.Conv2D(20, 3, activation="relu"), gnn.MaxPool2D(2, 2),
            gnn.Conv2D(50, 5, activation="relu"), gnn.MaxPool2D(2, 2),
            gnn.Dense(128, activation="relu"), gnn.Dense(10))
    net.cast(dtype)
    net.initialize(mx.init.Xavier())
    net(nd.zeros((1, 1, 28, 28), dtype=dtype))
    return net


def backward(net, images, labels, dtype="float64"):
    x, y = nd.array(images, dtype=dtype), nd.array(labels, dtype=dtype)
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    return loss.sum()


# %% tags=["trains"]
def train_gluon(path, name, store="dist_sync", divide_by=32, rate=0.25, epochs=2):
    store = mx.kvstore.create(store)
    net, losses, rank, k = lenet("float64"), [], store.rank, store.num_workers
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate}, kvstore=store)
    for epoch in range(epochs):
        begin = time.perf_counter()
        for batch in batches(epoch):
            losses.append(backward(net, *read(path, batch[rank::k])).asscalar())
            trainer.step(divide_by)
        if k > 1:
            print(f"epoch {epoch} done")
    weights = [p.data().asnumpy().flatten() for p in net.collect_params().values()]
    np.savez(f"{path}/{name}-{rank}.npz", weights=np.concatenate(weights), losses=losses,
             seconds=time.perf_counter() - begin)  # of the last epoch


gluon_training = script("train_gluon", MXNET, read, batches, lenet, backward, train_gluon)

# %% [markdown]
# The oracle is one worker that gets the joined batch, here in the notebook with a local store.
# **Predict:** how far from it will *each* of two workers be, after 32 steps?

# %%
def trained(name, ranks=2):
    return [dict(np.load(folder / f"{name}-{rank}.npz")) for rank in range(ranks)]


def apart(mine, theirs):
    return np.abs(mine["weights"] - theirs["weights"]).max() / np.abs(theirs["weights"]).max()


# %% tags=["trains"]
train_gluon(str(folder), "one", store="local")
run(gluon_training, 2, **job("two"))
(one,), two = trained("one", 1), trained("two")
assert one["losses"][-8:].mean() < 0.7 * one["losses"][:8].mean(), "it learns"
assert np.max([apart(worker, one) for worker in two]) < 1e-12
print("both workers' weights equal one worker's, to 1e-12 of the largest")

# %% [markdown]
# ### The trap: a sum, not a mean
#
# Code that was right on one machine says `step(len(x))`, with the worker's own `x`, and nothing
# complains. **Predict:** what is that training equivalent to?

# %% tags=["trains"]
run(gluon_training, 2, **job("wrong", divide_by=16, epochs=1))
train_gluon(str(folder), "fast", store="local", rate=0.5, epochs=1)
wrong, (fast,) = trained("wrong"), trained("fast", 1)
both = wrong[0]["losses"] + wrong[1]["losses"]
assert np.allclose(both[:8], fast["losses"][:8], rtol=1e-8)
assert not np.allclose(both[:8], one["losses"][:8], rtol=1e-3)
print("divided by the worker's share: as one worker at twice the learning rate")

# %% [markdown]
# For plain SGD, as here, sixteen workers would mean sixteen times the rate. DDP divides by $k$ for
# you (chapter 14).
#
# ### Who updates?
#
# Left to itself, `Trainer` under `dist_sync` sends the optimizer to the servers, and *they* update.
# What becomes of a learning rate set after the first step, of another batch size, and of saving the
# optimizer's state?

# %% tags=["trains"]
def rules(path):
    w = gluon.Parameter("w", shape=(2,), init="ones")
    w.initialize()
    trainer = gluon.Trainer([w], "sgd", {"learning_rate": 1}, kvstore="dist_sync")
    for action in (lambda: trainer.step(64), lambda: trainer.set_learning_rate(0),
                   lambda: trainer.step(64), lambda: trainer.step(41),
                   lambda: trainer.save_states(f"{path}/states")):
        with autograd.record():
            w.data().sum().backward()
        try:
            action()
            print("the weight is now", w.data()[0].asscalar())
        except Exception as error:
            print(f"{type(error).__name__}: {error}"[:72])


# %%
arguments = [json.dumps({"path": str(folder)})]
(lines,) = run(script("rules", MXNET, rules), 1, arguments=arguments, log=None)
print(lines, end="")
*weights, batch, states = [re.split("[ :]", line) for line in lines.splitlines()]
assert [float(words[-1]) for words in weights] == [1 - 1 / 64, 1 - 1 / 64, 1 - 2 / 64], \
    "the server went on with learning rate 1"
assert [batch[0], states[0]] == ["UserWarning", "AssertionError"]

# %% [markdown]
# The optimizer and the first batch's size went to the server: what you change afterwards changes
# only your copy, silently for the learning rate. Give the optimizer an `lr_scheduler` before the
# first step, and it runs on the server. Momentum would live on the servers, from where `Trainer`
# can't save it: so no complete checkpoint, unless you train without it or pass
# `update_on_kvstore=False`, so that each worker updates.
#
# Mind whom you trust: the optimizer travels *pickled* (`kvstore_server.py`), and
# unpickling can run any code. Keep such a cluster in a network of its own.
#
# ## Without waiting: `dist_async`
#
# Under `dist_async` the server updates its weights with each push as it comes. Nobody waits for the
# slowest, but a gradient may be *stale*: computed for weights that have changed since.
#
# We stage it. One weight, loss $w^2/2$, so the gradient is $w$; it starts at 1, and the rate is
# 1/4. All workers pull. Worker 0 takes three steps. Only then does worker 1 push the gradient that
# it has had all along.

# %%
def stale(store):
    store.init(0, nd.ones(1))
    w, seen = nd.zeros(1), []
    store.pull(0, out=w)
    for turn, steps in ((0, 3), (1, 1)):
        w.wait_to_read()
        store._barrier()
        for _ in range(steps if store.rank == turn else 0):
            store.push(0, w)  # the gradient for the weight that this worker knows
            store.pull(0, out=w)
            seen.append(w.asscalar().item())
        store._barrier()
    return seen


# %% [markdown]
# And we measure it. A weight on the server counts updates: each push adds 1. A worker pulls the
# counter, "computes" for a while (it sleeps), pulls again, and pushes. What has been added in the
# meantime is the age of its gradient, in updates.

# %%
def ages(store, key, pause, seconds=0.8):
    counter, found = nd.zeros(1), []

    def look():
        store.pull(key, out=counter)
        return counter.asscalar()

    store.init(key, counter)
    store._barrier()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun_with = look()
        time.sleep(pause * np.random.uniform(0.5, 1.5))  # or they would keep in step
        found.append(look() - begun_with)
        store.push(key, nd.array([-4]))  # at rate 1/4 this adds 1
    store._barrier()
    return float(np.mean(found))


# %% [markdown]
# Three workers of equal speed, then with worker 2 five times as slow. **Predict** the weight after
# worker 1's push, and for each worker the mean age of its gradients.

# %%
def asynchronous():
    store = mx.kvstore.create("dist_async")
    store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
    slow = 5 if store.rank == 2 else 1
    found = [stale(store), ages(store, 1, 0.02), ages(store, 2, 0.02 * slow)]
    print(json.dumps(found))


# %% tags=["measured"]
texts = run(script("asynchronous", MXNET, stale, ages, asynchronous), 3, arguments=["{}"], log=None)
(first, *_), (second, *_), _ = found = [json.loads(text) for text in texts]
assert first == [0.75, 0.75**2, 0.75**3], "each step takes a quarter of what is left"
assert second == [0.75**3 - 0.25], "worker 1 subtracts a quarter of the weight as it was, 1"
print("worker 0:", first, "then worker 1:", second)
for name, i in (("equal speeds", 1), ("worker 2 slow", 2)):
    print(f"{name:13}: mean age of workers 0, 1, 2:", *(f"{each[i]:.1f}" for each in found))
assert found[2][2] > max(found[0][2], found[1][2]), "the slow worker's gradients are the oldest"

# %% [markdown]
# A fresh gradient would have led to $0.75^4 = 0.316$; the stale one led to 0.172, too far. While a
# worker computes once, each equally fast one updates once in the mean: ideally an age of $k - 1 =
# 2$ with equal workers, 10 for the slow one, since two others are five times as fast, and $1 + 1/5$
# for these. Time for pushes and pulls lowers ages, and so does the end, where the others stop
# first. The slow worker's few samples scatter more: 6.5 to 11.1 in nine runs.
#
# ## What fails, and who notices
#
# `run` watches: as soon as a process fails, it ends the others and raises. `Cluster` is `run` in
# steps, and watches only in `wait`. Two epochs are left when we kill a worker, or the server.
# By the run above they take `rest` seconds. We wait half a second longer. **Predict:** how
# many of the four processes (scheduler, server, two workers) are still alive then?

# %%
rest = 2 * max(worker["seconds"] for worker in two)


def kill(victim):
    with Cluster(gluon_training, 2, **job("unseen", epochs=3)) as cluster:
        cluster.wait(until="epoch 0 done")
        os.kill(cluster.processes[victim], signal.SIGKILL)
        time.sleep(rest + 0.5)
        there = {name for name, number in cluster.processes.items() if psutil.pid_exists(number)}
        assert there == set(cluster.processes) - {victim}
        assert not list(folder.glob("unseen-*.npz")), "nobody has finished"
        print(f"{victim} killed: the other {len(there)} are still there;", end=" ")
        cluster.wait()


# %%
for victim in ("worker 1", "server 0"):
    print(fails(lambda name=victim: kill(name), Failed).split(" after")[0])

# %% [markdown]
# All but the dead one. A worker waits for a sum that will never be complete, or for a server. And
# if a worker takes one step more than the other?

# %%
def uneven():
    store = mx.kvstore.create("dist_sync")
    store.init(0, nd.zeros(1))
    for step in range(3 + store.rank):
        out = nd.zeros(1)
        store.push(0, nd.ones(1))
        store.pull(0, out=out)
        out.wait_to_read()
        print(f"step {step} done")


with Cluster(script("uneven", MXNET, uneven), 2, arguments=["{}"], log=None) as cluster:
    for _ in range(2):  # each worker says so
        cluster.wait(until="step 2 done")
    time.sleep(1)
    there = [name for name, number in cluster.processes.items() if psutil.pid_exists(number)]
    assert there == list(cluster.processes)
    os.kill(cluster.processes["worker 1"], signal.SIGKILL)
    with suppress(Failed):
        cluster.wait()  # reads the lines that came meanwhile
assert [str(cluster.printed).count(f"step {step} done") for step in range(4)] == [2, 2, 2, 0]
print("step 3 isn't done; a second later still there:", ", ".join(there))

# %% [markdown]
# Worker 0 has taken all its steps: at exit its store waits for all workers (`~KVStoreDist` in
# `kvstore_dist.h`).
#
# | what fails | MXNet alone, `dist_sync` | `run`, `Cluster` | torchrun |
# | --- | --- | --- | --- |
# | a worker | the others hang | `Failed` names it | restarts all, or ends all |
# | a server | workers hang | `Failed` names it | has none |
# | unequal steps | the last step hangs | `TimeoutError` | chapter 14: `join` |
#
# ## What it costs on paper
#
# ### Bytes
#
# $k$ workers, gradients of $S$ bytes. With a parameter server each worker sends $S$ and gets $S$
# back. We count, message by message, what the busiest machine sends. A message within a machine
# costs its link nothing.

# %%
def most_sent(messages):  # (from, to, bytes)
    sent = {}
    for source, target, size in messages:
        sent[source] = sent.get(source, 0) + (size if source != target else 0)
    return max(sent.values())


# %% [markdown]
# Each of several servers has an equal part of the keys. **Predict:** with 8 workers, what does a
# single server send? And 8 servers, one on each worker's machine?

# %%
def server_messages(k, where, size):
    pushes = [(worker, server, size / len(where)) for worker in range(k) for server in where]
    return pushes + [(server, worker, part) for worker, server, part in pushes]


def ring_messages(k, size):
    return [(r, (r + 1) % k, size / k) for _ in range(2 * (k - 1)) for r in range(k)]


# %%
for k in range(2, 17):
    least = 2 * (k - 1) / k
    assert most_sent(server_messages(k, ["server"], 1)) == k
    assert np.isclose(most_sent(server_messages(k, range(k), 1)), least)
    assert np.isclose(most_sent(ring_messages(k, 1)), least)
print("8 workers: one server sends 8 S; 8 equal ones beside them, or a ring:",
      f"{most_sent(ring_messages(8, 1)):.2f} S a machine")

# %% [markdown]
# One server sends $kS$ and receives as much. As many servers as workers, on the same machines, come
# to the same $2\frac{k-1}{k}S$ as a ring (chapter 03), if the keys can be divided equally.
#
# ### Seconds, predicted
#
# A message costs a latency and a time for each byte. A push and a pull cost a latency each, if
# messages to several servers overlap; a ring has $2(k-1)$. We assume that no pull begins before the
# last push has arrived. A server that answers each key as soon as it is complete could need half as
# long.

# %%
def server_seconds(others, part, bandwidth, start):  # the busiest server's `part` of the bytes
    return 2 * (start + others * part / bandwidth)  # from and to all workers on other machines


def ring_seconds(k, size, bandwidth, start):
    return 2 * (k - 1) * (start + size / k / bandwidth)


for way in (server_seconds(7, 1 / 8, 1, 0), ring_seconds(8, 1, 1, 0)):
    assert np.isclose(way, most_sent(ring_messages(8, 1))), "the counts above"
assert server_seconds(8, 1, 1, 0) == 16, "it receives 8 S, then sends 8 S"
assert ring_seconds(8, 1, 1, 1) == 14 + 1.75, "14 latencies"

# %% [markdown]
# Three models and 16 workers. More assumptions: devices that train at 5 TFLOP/s; batches of 256
# images, or of 16 texts of 1,024 tokens, for each; links at their full rate. Operations for an
# image of 28×28 are from deeper: Counting operations, predicting GPUs; for the billion we take 6
# for each parameter and token, as in dense layers: 2 forward, 4 backward. A message's latency is
# 10 to 100 µs.

# %%
models = {"LeNet": (129_068, 256 * 13_502_160),
          "ResNet-18": (11_175_818, 256 * 202.5 * 13_502_160),
          "a billion": (1e9, 16 * 1024 * 6 * 1e9)}
links = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}  # bytes/s
starts = [10e-6, 100e-6]  # seconds for a message
print("ring of 16:", "computing", *(f"{link:>14}" for link in links))
for name, (parameters, work) in models.items():
    cells = ["{:.0%} to {:.0%}".format(*(ring_seconds(16, 4 * parameters, rate, start) * 5e12 / work
                                         for start in starts)) for rate in links.values()]
    print(f"{name:10} {1e3 * work / 5e12:10,.1f} ms", *(f"{cell:>14}" for cell in cells))
print("communication, as a share of the computing")

# %% [markdown]
# LeNet's step is so short that 30 latencies alone take from two fifths of it to four times as long:
# no link gets below that. The billion has 90 times ResNet-18's gradients, but 140 times its work:
# what decides is the work for each *byte*, and that grows with each worker's batch. Nothing is
# overlapped here (chapter 14).
#
# The same for servers, and more workers. MXNet sends each of ResNet-18's arrays of 589,824 entries
# whole to one server (appendix):

# %%
work, ks, link = models["ResNet-18"][1] / 5e12, 2 ** np.arange(1, 8), (links["10 Gbit/s"], 100e-6)
size, cut, whole = 4 * 11_175_818, 4 * 9 * 512 * (256 + 3 * 512), 4 * 9 * 256 * 256  # 3×3 kernels
part = np.maximum(size / ks, cut / ks + whole)  # at least, for the busiest server by MXNet's rule
fig, ax = figure("Predicted, ResNet-18, 10 Gbit/s, 100 µs: only equal parts and a ring\nstay "
                 "below the computing up to 128 workers", "workers", "communication in a step (ms)")
ways = {"one server": (server_seconds(ks, size, *link), "o-", ORANGE, 1),
        "k servers by MXNet's\nrule, at least":
        (server_seconds(ks - 1, part, *link), "v-.", "black", 1),
        "k servers, equal parts": (server_seconds(ks - 1, size / ks, *link), "s-", BLUE, (0, 2)),
        "ring": (ring_seconds(ks, size, *link), "^--", GREEN, (1, 2))}
for name, (seconds, look, color, every) in ways.items():
    assert (max(seconds) < work) == (name in ("k servers, equal parts", "ring")), name
    ax.loglog(ks, 1e3 * seconds, look, color=color, markevery=every, label=name)
ax.axhline(1e3 * work, color=GREY, ls=":", label="computing")
ax.set_xticks(ks, ks), ax.minorticks_off()
ax.set_yticks([30, 100, 300, 1000, 3000, 10_000], ["30", "100", "300", "1,000", "3,000", "10,000"])
fig.legend(loc="outside right center", fontsize=8)
show(fig, alt="Milliseconds of communication in a step for 2 to 128 workers. One server: in "
     "proportion. As many servers as workers: with equal parts it levels off, by MXNet's rule it "
     "goes on rising, and so does a ring, more slowly.")

# %% [markdown]
# ### Memory
#
# A billion parameters in float32 are 4 GB, their gradients 4 GB, momentum 4 GB, Adam's two moments
# 8. *Every* DDP worker holds all of it, and its buckets take another 4 unless you pass
# `gradient_as_bucket_view=True` (`torch/nn/parallel/distributed.py`). Add activations, which the
# forward pass keeps for the backward pass. For LeNet we count them:

# %% tags=["torch"]
def kept_for_backward(net, images):
    kept, own = {}, {p.data_ptr() for p in net.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        net(images).sum()
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in own)


# %% tags=["torch"]
at_64, at_128 = (kept_for_backward(dropout_lenet(), torch.zeros(n, 1, 28, 28)) for n in (64, 128))
assert at_128 == 2 * at_64, "in proportion to the batch"
print(f"LeNet: weights, gradients, momentum {12 * 129_068 / 1e6:.1f} MB; "
      f"activations of 64 images {at_64 / 1e6:.1f} MB")

# %% [markdown]
# Activations grow with the batch, so a smaller one, or several accumulated (chapter 14), helps.
# Weights, gradients and optimizer state don't shrink with the batch, nor with more workers.
#
# Of $k$ servers, each holds weights, sums of gradients (`store_` and `update_buf_` in
# `src/kvstore/kvstore_dist_server.h`) and optimizer state for its keys only: a $k$-th, if divided
# equally. Bytes for each parameter, with 16 workers:

# %%
GB = {"every DDP worker\n(without buckets)": [4, 4, 8],
      "on CPUs, a worker with one\nof 16 servers beside it": [4 + 4 / 16, 4 + 4 / 16, 8 / 16],
      "if each held a 16th\nof everything": [4 / 16, 4 / 16, 8 / 16]}
totals = [sum(each) for each in GB.values()]
assert totals == [16, 9, 1]
fig, ax = figure("Adam, a billion parameters: {} GB on a DDP worker, {:.0f} with 16\nservers, "
                 "{:.0f} if all were divided".format(*totals), "GB")
for i, (part, color) in enumerate(zip(("weights", "gradients", "Adam's moments"),
                                      (BLUE, ORANGE, GREEN))):
    left = [sum(each[:i]) for each in GB.values()]
    ax.barh(list(GB), [each[i] for each in GB.values()], left=left, color=color, label=part,
            edgecolor="black", hatch=("", "//", "..")[i])
ax.set_xticks(range(0, 17, 4))
ax.invert_yaxis()
fig.legend(loc="outside right center", fontsize=8)
show(fig, alt="Bars of memory for a billion parameters in float32 with Adam, without activations: "
     "16 GB on a DDP worker, 9 GB with servers, 1 GB if everything were divided by 16.")

# %% [markdown]
# **On GPUs:** the servers' part lies in host memory, and gradients pass a pinned host buffer
# (`comm_buf_` in `kvstore_dist.h`): the device keeps 8 GB, the host has 1 + 4.
#
# Data parallelism divides the batch and copies everything else. When that no longer fits on one
# device, it can be *sharded* (ZeRO, FSDP, chapter 16): each worker keeps a part, and gathers the
# rest when it needs it.
#
# ## Appendix: MXNet 1.9.1 on a cluster
#
# The variables change, and every host needs the script, `helpers` and the data. A line for each
# process (`SERVER` is explained below):

# %%
places = {"root": "192.0.2.10", "port": 9000, "workers": 2, "servers": 1}
for host, role in (("192.0.2.10", "scheduler"), ("192.0.2.11", "server"), ("192.0.2.11", "worker"),
                   ("192.0.2.12", "worker")):
    what = "train_gluon.py \"$ARGUMENTS\"" if role == "worker" else "-c 'import mxnet'"
    values = variables(role, host, **places) | (SERVER if role == "server" else {})
    settings = " ".join(f"{name}={value}" for name, value in values.items())
    print(f"env {settings} python {what}")

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
# with zeros. With 254 each byte is 1:

# %%
def third():
    store = mx.kvstore.create("dist_sync")
    out = nd.zeros(1, dtype="float64")
    store.init(0, out)
    store.push(0, nd.ones(1, dtype="float64") / 3)
    store.pull(0, out=out)
    print(out.asscalar() - 1 / 3)


path = script("third", MXNET, third)
os.environ["GLIBC_TUNABLES"] = "glibc.malloc.perturb=254:glibc.malloc.tcache_count=0"
with by_hand(["scheduler", "server", "worker"], path, {}) as crew:
    ones = crew[2].communicate(timeout=100)[0]
del os.environ["GLIBC_TUNABLES"]
assert 1e-9 < abs(float(ones)) < 1e-7, "what float32 makes of 1/3"
print(f"1/3 comes back off by {abs(float(ones)):.0e}")

# %% [markdown]
# Training in float32 isn't touched by this (`has_multi_precision_copy`).

# %% [markdown]
# ## Summary
#
# - torchruns meet at a rendezvous and give each process a rank, a local rank and the world size.
#   After a worker's failure they end the rest and, if `--max-restarts` (default 0) allows, start
#   all anew. They bring back no state.
# - A checkpoint holds model, optimizer, position in the data, and each rank's random state. Resumed
#   from it, LeNet on two workers ended bit for bit like the unbroken run; without optimizer, step
#   or random states it did not, and no error said so.
# - Write aside, fsync, rename. Test a checkpoint by resuming, not by the loss.
# - A parameter server adds up: `step` takes the size of the whole batch. Under `dist_sync` two
#   workers equal one to 1e-12; under `dist_async` a gradient is as old as the number of updates
#   that others make meanwhile.
# - From Python MXNet reports no death: somebody has to watch.
# - One server sends $kS$ bytes; in a ring, or with $k$ equal servers beside the workers, a machine
#   sends $2\frac{k-1}{k}S$.
# - A billion parameters with Adam take 16 GB on every DDP worker, 20 with DDP's default buckets,
#   before activations.
#
# **Further reading.** *Distributed Training in MXNet*
# (`docs/static_site/src/pages/api/faq/distributed_training.md`); M. Li et al.,
# *Scaling distributed machine learning with the parameter server* (OSDI 2014).

# %% [markdown]
# ## Exercises
#
# 1. **Seeds that differ.** Suppose `batches` were seeded with the rank as well. Show for two
#    workers that images are lost and doubled, and count them in an epoch.
# 2. **Three workers come back.** Resume the dead run's checkpoint with three workers in place of
#    two, without dropout (`model.eval()`) and the two random states, and finish the second epoch.
#    Compare with one process. Mind that 32 is not divisible by 3.
# 3. **Whose keys?** A store has LeNet's eight arrays, sorted by name as in `Trainer`, as keys 0 to
#    7. By MXNet's rule (appendix), what share of the bytes does each of two servers get? And of
#    three? Which number would you take?

# %% [markdown]
# ### Answer 1
#
# Each worker misses an image with probability ½, so both miss it with ¼.

# %% tags=["solution"]
orders = [np.random.default_rng([15, 0, rank]).permutation(IMAGES) for rank in (0, 1)]
times_seen = np.bincount(np.concatenate([order.reshape(-1, 32)[:, rank::2].ravel()
                                         for rank, order in enumerate(orders)]), minlength=IMAGES)
lost, doubled = (times_seen == 0).sum(), (times_seen == 2).sum()
assert times_seen.sum() == IMAGES and lost == doubled > IMAGES / 5
print(f"{lost} of {IMAGES} images are lost, as many are doubled: about a quarter")

# %% [markdown]
# ### Answer 2
#
# Shares are 11, 11 and 10. DDP divides the sum of the gradients by $k$. So each worker's loss is
# $k$ · (sum over its share) / (size of the whole batch): $k$ cancels, and every image has weight
# 1/32.

# %% tags=["solution", "torch", "trains"]
def finish_epoch(path, model, optimizer, rank, k):
    for batch in batches(1)[4:]:
        x, y = map(torch.tensor, read(path, batch[rank::k]))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y.long(), reduction="sum")
        (loss * k / len(batch)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


# %% [markdown]
# The oracle, on rank 0: one process, from the same checkpoint, without DDP.

# %% tags=["solution", "torch"]
def finish_alone(path):
    net, saved = dropout_lenet(), torch.load(f"{path}/dead.pt")
    net.load_state_dict(saved["model"])
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    sgd.load_state_dict(saved["optimizer"])
    np.save(f"{path}/alone.npy", finish_epoch(path, net.eval(), sgd, 0, 1))


def three(path):
    model, optimizer = fresh()
    assert restore(f"{path}/dead.pt", model, optimizer, ["random"]) == [1, 4]
    weights = finish_epoch(path, model.eval(), optimizer, dist.get_rank(), dist.get_world_size())
    np.save(f"{path}/three-{dist.get_rank()}.npy", weights)
    if dist.get_rank() == 0:
        finish_alone(path)
    dist.destroy_process_group()


# %% tags=["solution", "torch", "trains"]
parts = [read, batches, restore, dropout_lenet, fresh, finish_epoch, finish_alone]
torchrun(script("three", TORCH, *parts, three), 3, log=None,
         arguments=[json.dumps({"path": str(folder)})])
alone = np.load(folder / "alone.npy")
for rank in range(3):
    off = np.abs(np.load(folder / f"three-{rank}.npy") - alone).max() / np.abs(alone).max()
    assert off < 1e-4, f"rank {rank} is {off} off"
print("three workers, resumed from two, equal one process to 1e-4 of the largest weight (float32)")

# %% [markdown]
# ### Answer 3
#
# 9973 is odd, so with two servers even keys go to server 0 and odd keys to server 1: all biases to
# one, all weights to the other. With three, 9973 leaves 1, and keys go round.

# %% tags=["solution"]
parameters = lenet("float32").collect_params()
arrays = [parameters[name].data().size for name in sorted(parameters.keys())]
for servers in (1, 2, 3, 4, 5):
    load = np.bincount([key * 9973 % servers for key in range(8)], arrays, minlength=servers)
    print(servers, "servers:", *(f"{share:.1%}" for share in load / sum(arrays)))
    assert load.max() / sum(arrays) > (0.99 if servers == 2 else 0.75)

# %% [markdown]
# Three: the busiest server's share falls from 99.8 % to 79.4 %. More don't help: the largest array
# alone has 79.3 % of the entries, and is too small to be cut, unless you lower
# `MXNET_KVSTORE_BIGARRAY_BOUND`.
