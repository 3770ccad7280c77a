# %% [markdown]
# # 14 · DDP
#
# PyTorch trains on several devices with `DistributedDataParallel`, DDP for short: a process for
# each device, and an all-reduce of the gradients in each step. This chapter starts two such
# processes from the notebook, holds what they compute against two Gluon devices, and looks into its
# buckets.
#
# ## What you'll do
#
# Start, watch and end two processes that all-reduce; train LeNet and a thin ResNet-18 in them and
# compare every replica with Gluon's; log when DDP sends which gradients; and spring four traps that
# raise nothing.
#
# ## What you'll learn
#
# - how the processes of a training find each other, and how to end them;
# - how DDP starts, sends gradients in buckets, and computes what two Gluon devices compute;
# - what it divides by, and when that is wrong;
# - four traps of DDP that raise nothing.
#
# ## What you need
#
# Chapters 04 to 09 and 13, no GPU, and PyTorch: `make setup TORCH=1` installs it. Reading takes
# {reading time}, running about one on two cores.

# %% tags=["torch"]
from helpers import load_data

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from torch import nn

# %% [markdown]
# Images for both, centred as in chapter 04, as float64; and two simulated devices, named directly.

# %% tags=["measured"]
data = load_data("mnist", limit=640)
print(data)
images = (data.train_images - data.train_images.mean()).astype("float64")  # [640, 1, 28, 28]
labels = data.train_labels  # int32 [640]
pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## The networks of chapter 13
#
# The oracle: the largest difference of any two arrays, as a share of the largest entry of the
# second.

# %%
def apart(found, truth):
    pairs = zip(found, truth, strict=True)
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])


# %% [markdown]
# LeNet in both frameworks:

# %%
def gluon_lenet():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(20, kernel_size=3, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Conv2D(50, kernel_size=5, activation="relu"), gluon.nn.MaxPool2D(2, 2),
            gluon.nn.Dense(128, activation="relu"), gluon.nn.Dense(10))
    return net


# %%
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


# %% [markdown]
# ResNet-18's block and network in PyTorch,

# %%
class Residual(nn.Module):
    def __init__(self, before, after, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, stride) if stride > 1 else None

    def forward(self, x):
        change = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(change + (x if self.project is None else self.project(x)))


# %%
def resnet18(channels=(64, 128, 256, 512)):
    layers = [nn.Conv2d(1, channels[0], 3, padding=1), nn.BatchNorm2d(channels[0]), nn.ReLU()]
    for before, after, stride in zip((channels[0], *channels), channels, (1, 2, 2, 2)):
        layers += [Residual(before, after, stride), Residual(after, after)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(channels[-1], 10))


# %% [markdown]
# and in Gluon:

# %%
class GluonResidual(gluon.nn.HybridBlock):
    def __init__(self, channels, stride=1):
        super().__init__()
        conv, norm = gluon.nn.Conv2D, gluon.nn.BatchNorm
        self.conv1, self.norm1 = conv(channels, 3, stride, padding=1), norm()
        self.conv2, self.norm2 = conv(channels, 3, padding=1), norm()
        self.project = conv(channels, 1, stride) if stride > 1 else None

    def hybrid_forward(self, F, x):
        change = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(change + (x if self.project is None else self.project(x)))


# %%
def gluon_resnet18(channels=(64, 128, 256, 512)):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(channels[0], 3, padding=1), gluon.nn.BatchNorm(),
            gluon.nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(GluonResidual(width, stride), GluonResidual(width))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10))
    return net


# %% [markdown]
# Weights are made in Gluon and carried over, in order.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def start(make, places, dtype="float64"):
    net = make()
    mx.random.seed(12)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(nd.zeros((2, 1, 28, 28), ctx=places[0]))
    for p in net.collect_params(".*(bias|beta)").values():
        p.set_data(nd.random.normal(scale=0.1, shape=p.shape))
    net.cast(dtype)
    return net


# %% [markdown]
# On Gluon's side and on PyTorch's:

# %%
def values(net):  # of a Gluon network, on its first device
    return [p.data(p.list_ctx()[0]).asnumpy() for p in net.collect_params().values()]


def state(net):  # of a PyTorch network, in the same order
    return [v.numpy() for name, v in net.state_dict().items() if "tracked" not in name]


def carry_over(source, target):
    for value, place in zip(values(source), state(target), strict=True):
        np.copyto(place, value)  # shares its memory with the tensor
    return target


# %% [markdown]
# ## A process for each device
#
# In chapter 13's `DataParallel` one process serves all devices. Under DDP every process has its own
# Python, its own replica, its own share of the data. They talk only to all-reduce. There is no
# first device.
#
# A notebook can't *become* two processes, and `fork` would break MXNet's threads. So it writes a
# script and starts that. The script consists of cells of this very notebook, so what you see is
# what runs:

# %%
import linecache


def cell_of(thing):
    function = getattr(thing, "forward", thing)  # of a module, its method
    return "".join(linecache.getlines(function.__code__.co_filename))


assert cell_of(lenet).startswith("def lenet")

# %% [markdown]
# The first cell of the script has the imports, and the shard that is this process's, cut as Gluon
# cuts it.

# %%
import os
import signal
import sys
from datetime import timedelta
from time import perf_counter

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def mine(batch):
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


# %% [markdown]
# Each *part* of the script is a function that takes what the notebook gave and returns what it
# found. The first part is the smallest: each rank gives $r + 1$, and all-reduce adds. It also looks
# up on which addresses it listens, and on which the process that started it does.

# %%
def hello(given):
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    listens = [[c.laddr.ip for c in psutil.Process(pid).net_connections() if c.status == "LISTEN"]
               for pid in (os.getpid(), os.getppid())]
    return {"sum": x, "listens": listens[0], "starter": listens[1]}


# %% [markdown]
# Ranks must find each other. `init_process_group` takes a *meeting place*: a file, or an address
# and port. Everything has a deadline. After `alarm` the process ends, whatever it is doing, even if
# the notebook is no longer there to end it.

# %%
def main(folder, *parts):
    signal.alarm(150)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", os.environ.get("MEETING", "env://"),
                            timedelta(seconds=60), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]))
    given = torch.load(f"{folder}/given.pt") if os.path.exists(f"{folder}/given.pt") else {}
    for part in parts:
        torch.save(globals()[part](given), f"{folder}/{part}-{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


# %% [markdown]
# The script is cells, and a call.

# %%
def write_script(path, *things):
    cells = [cell_of(thing) for thing in (mine, *things, main)]
    path.write_text("\n\n".join([*cells, "main(*sys.argv[1:])\n"]))


# %% [markdown]
# ### Starting, watching, ending
#
# Started processes are our responsibility. Three rules: there is a deadline; when one fails, all
# are ended, since the others would wait for it; and however the cell ends, by the stop button too,
# no process is left.

# %%
import contextlib
import subprocess
import time

# %% [markdown]
# The third rule is the `finally` below.

# %%
@contextlib.contextmanager
def started(commands, logs):  # [(arguments, variables)] -> processes
    running = []
    try:
        for (arguments, variables), log in zip(commands, logs):
            running.append(subprocess.Popen([sys.executable, *arguments], stdout=log,
                                            stderr=log, env={**os.environ, **variables}))
        yield running
    finally:
        for process in running:
            process.terminate()
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            process.kill()


# %% [markdown]
# `terminate` asks and `kill` doesn't. Between them there is time for a process to end those that it
# started itself. Watching means to look at all of them several times a second:

# %%
import tempfile


def run(commands, seconds=120):
    logs = [tempfile.TemporaryFile() for _ in commands]
    deadline = time.monotonic() + seconds
    with started(commands, logs) as running:
        while any(p.poll() is None for p in running) and not any(p.poll() for p in running):
            assert time.monotonic() < deadline, f"not done after {seconds} seconds"
            time.sleep(0.05)
        codes = [p.poll() for p in running]
    for log in logs:
        log.seek(0)
    said = [log.read().decode() for log in logs]
    assert set(codes) == {0}, f"exit codes {codes}: {''.join(said)[-1500:]}"
    return said


# %% [markdown]
# Does it keep its rules? One process fails, the other would sleep for an hour.

# %%
sleeper, failer = ["-c", "import time; time.sleep(3600)"], ["-c", "raise SystemExit('no luck')"]
try:
    run([(sleeper, {}), (failer, {})])
except AssertionError as error:
    print(error)

# %% [markdown]
# `None` is the one that still ran; it was ended. Now the two ranks. The file where they meet must
# be new each time. Gloo, the library that all-reduces on CPUs, opens a port for its neighbours;
# `GLOO_SOCKET_IFNAME` keeps it on the loopback, where no other machine can reach it.

# %%
from pathlib import Path

home = tempfile.TemporaryDirectory()
folder = Path(home.name)
loopback = next(name for name, addresses in psutil.net_if_addrs().items()
                if "127.0.0.1" in [a.address for a in addresses])

# %% [markdown]
# `ranks` starts one process a rank for some parts of the script, and returns what each rank found.

# %%
def ranks(world, *parts):
    place = f"file://{tempfile.mkdtemp(dir=folder)}/meeting"
    shared = {"MEETING": place, "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": loopback}
    run([([str(folder / "ddp.py"), str(folder), *parts], {**shared, "RANK": str(rank)})
         for rank in range(world)])
    return {part: read_back(part, world) for part in parts}


def read_back(part, world=2):  # what they found, in the order of ranks
    return [torch.load(folder / f"{part}-{rank}.pt") for rank in range(world)]


# %% [markdown]
# ### All-reduce
#
# In MXNet a KVStore sums over devices (chapter 07):

# %%
store = mx.kv.create("device")
store.init(0, nd.zeros(3))
arrays = [nd.full(3, rank + 1, ctx=device) for rank, device in enumerate(pair)]
store.pushpull(0, arrays, out=arrays)
print(*(a.asnumpy() for a in arrays))

# %% [markdown]
# In PyTorch `all_reduce` sums over processes. **Predict** both replicas, and the addresses.

# %%
write_script(folder / "ddp.py", hello)
found = ranks(2, "hello")["hello"]
for array, rank in zip(arrays, found):
    assert (array.asnumpy() == rank["sum"].numpy()).all(), "the same sum, on every rank"
    assert set(rank["listens"]) <= {"127.0.0.1"}, "reachable from this machine only"
print(found[1]["sum"], set(found[1]["listens"]))

# %% [markdown]
# ### dist_sync and torchrun
#
# Across machines MXNet starts a scheduler, servers and workers. Here they are, on one machine, in
# four processes. The workers push $r + 1$ and print what they pull. (Chapter 15 goes into it.)

# %%
import socket

WORKER = """import mxnet as mx
store = mx.kv.create("dist_sync")
store.init(0, mx.nd.zeros(3))
total = mx.nd.zeros(3)
store.push(0, mx.nd.full(3, store.rank + 1))
store.pull(0, out=total)
print(total.asnumpy())"""
with socket.create_server(("127.0.0.1", 0)) as probe:
    port = probe.getsockname()[1]  # free a moment ago
cluster = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
           "DMLC_NODE_HOST": "127.0.0.1", "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": "2"}

# %% [markdown]
# Scheduler and server need no program: `import mxnet` in that role is one.

# %%
roles = [("scheduler", "import mxnet"), ("server", "import mxnet"),
         ("worker", WORKER), ("worker", WORKER)]
said = run([(["-c", code], {**cluster, "DMLC_ROLE": role}) for role, code in roles])
print(said[2].strip(), said[3].strip())

# %% [markdown]
# PyTorch's is `torchrun`, here by its module's name, with the script from above as it is. It starts
# the processes, gives each its `RANK`, and an address to meet at (`env://`).

# %%
arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             str(folder / "ddp.py"), str(folder), "hello"]
run([(arguments, {"GLOO_SOCKET_IFNAME": loopback})])
for rank in read_back("hello"):
    assert rank["sum"].tolist() == [3, 3, 3], "as the two workers of dist_sync"
    assert set(rank["starter"]) - {"127.0.0.1", "::1"}, "torchrun listens on every address"

# %% [markdown]
# The last line is a warning. While `torchrun` runs, its store listens on *all* addresses of the
# machine, not only on the loopback, and has no password. On your own laptop in a café that is not
# nice. So for two processes on one machine this chapter meets in a file, which needs no port, and
# leaves `torchrun` to chapter 15.
#
# ## Is it the same training?
#
# Wrapping a network in `DistributedDataParallel` does two things: at the start it sends rank 0's
# parameters to everybody, and in each backward pass it all-reduces gradients and divides by the
# number of ranks. These are the steps.

# %% tags=["trains"]
def ddp_steps(net, given):  # three steps from `start`; x: [3, n, 1, 28, 28], y: [3, n]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for x, y in zip(given["x"], given["y"]):
        optimizer.zero_grad()
        F.cross_entropy(model(mine(x)), mine(y)).backward()
        optimizer.step()
    return net.state_dict()


# %% [markdown]
# Two parts: LeNet, and a thin ResNet-18 with BatchNorm, whose layers see the rank's shard only,
# just like a Gluon device's. Only rank 0 loads the weights.

# %%
def from_weights(net, weights):
    torch.manual_seed(dist.get_rank())
    if dist.get_rank() == 0:
        net.load_state_dict(weights)
    return net


def lenet_steps(given):
    return ddp_steps(from_weights(lenet().double(), given["lenet"]), given)


def thin_steps(given):
    net = resnet18((4, 4, 8, 8)).double()
    return ddp_steps(from_weights(net, given["thin"]), given)


# %% [markdown]
# What the ranks are given: weights that come from Gluon, three batches of 16 images.

# %%
def thin():
    return gluon_resnet18((4, 4, 8, 8))



# %% [markdown]
# Both networks begin from what Gluon made:

# %%
x, y = images[:48].reshape(3, 16, 1, 28, 28), labels[:48].reshape(3, 16)
given = {"x": torch.tensor(x), "y": torch.tensor(y, dtype=torch.int64),
         "lenet": carry_over(start(gluon_lenet, pair), lenet().double()).state_dict(),
         "thin": carry_over(start(thin, pair), resnet18((4, 4, 8, 8)).double()).state_dict()}
torch.save(given, folder / "given.pt")

# %% [markdown]
# The same three steps on two simulated devices of MXNet. The trainer stays the same over the steps.

# %% tags=["trains"]
def gluon_steps(make, places):
    net = start(make, places)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.125})
    for batch in zip(x, y):
        shards = zip(*(gluon.utils.split_and_load(nd.array(a, dtype=a.dtype), places)
                       for a in batch))
        with autograd.record():
            losses = [softmax(net(a), b) for a, b in shards]
        autograd.backward(losses)
        trainer.step(16)
    return net


# %% [markdown]
# All trained parameters, replica by replica, on either side:

# %%
def trained(net):  # [devices][parameters]
    lists = [p.list_data() for p in net.collect_params().values() if p.grad_req != "null"]
    return [[a.asnumpy() for a in replica] for replica in zip(*lists)]



# %% [markdown]
# Of a state that came back from a rank:

# %%
def trained_torch(state):
    return [v.numpy() for name, v in state.items() if "running" not in name
            and "tracked" not in name]


# %% [markdown]
# **Predict:** for which of the two networks are two processes of PyTorch equal to two devices of
# MXNet? And to *one* device of MXNet?

# %%
write_script(folder / "ddp.py", Residual, resnet18, lenet, ddp_steps, from_weights)
found = ranks(2, "lenet_steps", "thin_steps")
for part, make in (("lenet_steps", gluon_lenet), ("thin_steps", thin)):
    two, one = gluon_steps(make, pair), gluon_steps(make, pair[:1])
    for device, rank in zip(trained(two), found[part]):
        assert apart(trained_torch(rank), device) < 1e-10, f"{part}: replica by replica"
    print(part, "equal one device:", apart(trained(two)[1], trained(one)[0]) < 1e-10)

# %% [markdown]
# Two processes equal two devices for both, to $10^{-10}$, in every replica. That holds two entirely
# different implementations of data parallelism against each other: shards, all-reduce, division.
# Neither equals one device where there is BatchNorm, for chapter 09's reason, and both in the same
# way.
#
# What about running statistics? By default DDP sends rank 0's to all others before each forward
# pass, so what the others gather is overwritten, and only the last step's remains.

# %%
means = [rank["1.running_mean"].numpy() for rank in found["thin_steps"]]
own = [a.asnumpy() for a in gluon_steps(thin, pair)[1].running_mean.list_data()]
assert np.abs(means[0] - means[1]).max() > 1e-6, "apart by the last step"
assert apart([means[0]], [own[0]]) < 1e-6, "rank 0 has gathered what cpu(0) has"
print("rank 0's running means are cpu(0)'s; rank 1's differ")

# %% [markdown]
# Save rank 0's checkpoint, as everybody does, and you keep what one shard of each batch said.
# `nn.SyncBatchNorm.convert_sync_batchnorm` is the remedy of chapter 09, on GPUs only.
#
# ### Buckets
#
# A message for each parameter would be slow (chapter 01: latency). One message for all would have
# to wait for the last gradient. DDP fills *buckets*, and sends each one as soon as it is full,
# while the backward pass goes on. A hook lets us look. It has to do the work itself: divide, and
# start the all-reduce without waiting for it.

# %%
def send(log, bucket):
    log.append(f"sends {bucket.buffer().numel()} gradients")
    work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


# %% [markdown]
# A backward pass of LeNet, in buckets that are sent once they hold 0.1 MB (25 by default):

# %%
def buckets(given):
    net, log = lenet(), []
    model = DistributedDataParallel(net, bucket_cap_mb=0.1)
    model.register_comm_hook(None, lambda state, bucket: send(log, bucket))
    for name, layer in net.named_children():
        layer.register_full_backward_pre_hook(
            lambda layer, gradient, name=name: log.append(f"backward of {name}"))
    for _ in range(2):  # after the first, buckets are in the order in which gradients came
        log.clear()
        F.cross_entropy(model(mine(given["x"][0].float())), mine(given["y"][0])).backward()
    return {"log": log}

# %% [markdown]
# We'll start this together with the parts that follow, since starting takes the longest.
#
# ## Four traps
#
# ### 1. Replicas that start apart
#
# Nobody set a seed, or everybody set another. Each rank makes two LeNets. One is trained with DDP.
# The other does by hand what DDP does in the backward pass, and only that.

# %%
def flat(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])



# %% [markdown]
# The second network averages its gradients with these three lines:

# %%
def average_gradients(net):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# %% [markdown]
# One step of each, and the weights before and after:

# %% tags=["trains"]
def unseeded(given):
    torch.manual_seed(dist.get_rank())
    found = {}
    for name, wrap in (("bare", lambda net: net), ("ddp", DistributedDataParallel)):
        net = lenet().double()
        found[f"{name}: as made"] = flat(net)
        model = wrap(net)
        found[f"{name}: wrapped"] = flat(net)
        F.cross_entropy(model(mine(given["x"][0])), mine(given["y"][0])).backward()
        if name == "bare":
            average_gradients(net)
        torch.optim.SGD(net.parameters(), lr=0.125).step()
        found[f"{name}: after a step"] = flat(net)
    return found


# %% [markdown]
# ### 2. A loss that can't tell
#
# A published DDP example took `cross_entropy` of a network with *one* output. **Predict** its
# gradient.

# %%
toy, x20 = nn.Linear(20, 1), torch.rand(8, 20)
F.cross_entropy(toy(x20), torch.rand(8, 1)).backward()
assert (toy.weight.grad == 0).all(), "softmax of one number is 1, whatever the number"

# %% [markdown]
# Softmax of a single number is always 1, so nothing can be learned. The example trains without a
# complaint. Worse, it can't notice a *missing* all-reduce: here are two ranks that don't talk at
# all, with this loss and with one that works. Starts are equal, data differ.

# %% tags=["trains"]
def silent(given):
    found = {}
    for name, loss in (("one class", F.cross_entropy), ("mse", F.mse_loss)):
        torch.manual_seed(12)
        net = nn.Linear(20, 1)
        torch.manual_seed(dist.get_rank())
        for _ in range(5):
            net.zero_grad()
            loss(net(torch.rand(8, 20)), torch.rand(8, 1)).backward()
            torch.optim.SGD(net.parameters(), lr=0.125).step()
        found[name] = flat(net)
    return found


# %% [markdown]
# ### 3. Sum and mean
#
# DDP divides the summed gradients by the number of ranks, never by the number of images. So what it
# computes depends on the loss and on the shards: equal ones of 4 and 4, or 5 and 3.

# %%
def reductions(given):
    found, rank = {}, dist.get_rank()
    cases = {"mean, 4 and 4": (4, 1 / 4), "sum, 4 and 4": (4, 1),
             "mean, 5 and 3": (5, 1 / (5, 3)[rank]), "weighted, 5 and 3": (5, 2 / 8)}
    for name, (cut, factor) in cases.items():
        net = lenet().double()
        net.load_state_dict(given["lenet"])
        x, y = (given[a][0][:8].split([cut, 8 - cut])[rank] for a in "xy")
        model = DistributedDataParallel(net)
        (F.cross_entropy(model(x), y, reduction="sum") * factor).backward()
        found[name] = torch.cat([p.grad.flatten() for p in net.parameters()])
    return found


# %% [markdown]
# In the last case the factor is $k/n$ for everybody: the sum over the shard, divided by all $n$
# images and multiplied by the $k$ that DDP will divide by. Off they go, all four parts in one
# start:

# %%
write_script(folder / "ddp.py", lenet, send, flat, average_gradients, buckets, unseeded,
             silent, reductions)
found = ranks(2, "buckets", "unseeded", "silent", "reductions")

# %% [markdown]
# **Buckets.** What rank 1 wrote down, layers by their number:

# %%
log = found["buckets"][1]["log"]
print("\n".join(log))
sent = [int(line.split()[1]) for line in log if "sends" in line]
assert sum(sent) == sum(p.numel() for p in lenet().parameters()), "each gradient once"
first_send = next(i for i, line in enumerate(log) if "sends" in line)
assert first_send < log.index("backward of 0"), "sent before the pass has reached layer 0"
assert log == found["buckets"][0]["log"], "both ranks in the same order, or they'd wait forever"

# %% [markdown]
# The gradients of the last layers are on their way before the backward pass of the first
# convolution has begun. That is the overlap of chapter 10, and here nobody had to ask for it.
#
# **Trap 1.** **Predict:** six pairs of weights. Which are equal on both ranks?

# %%
first, second = found["unseeded"]
for name in first:
    print(f"{name:20} {'equal' if torch.equal(first[name], second[name]) else 'apart'}")
assert torch.equal(second["ddp: wrapped"], first["ddp: as made"]), "rank 0's, on all ranks"

# %% [markdown]
# DDP sends rank 0's weights to everybody when you wrap the network, not later: a weight that you
# change on one rank after that stays changed. Without DDP they stay apart. And how far?

# %%
gap = first["bare: as made"] - second["bare: as made"]
later = first["bare: after a step"] - second["bare: after a step"]
assert (gap - later).abs().max() < 1e-12 * gap.abs().max(), "exactly as far as before"

# %% [markdown]
# Exactly as far as before, since both add the same step. Averaging gradients never brings replicas
# together. That is why this course compares *weights*.
#
# **Trap 2.** Two ranks that don't talk at all:

# %%
first, second = found["silent"]
assert torch.equal(first["one class"], second["one class"]), "this test lets it pass"
assert not torch.equal(first["mse"], second["mse"]), "this one catches it"

# %% [markdown]
# With the loss that has no gradient, replicas that never talked are equal, and a test of equal
# replicas is content. **A test needs a gradient that differs from rank to rank.**
#
# **Trap 3.** Against one network and the mean over all eight images. **Predict** which of the four
# are right, and the factor of those that are wrong.

# %%
net = lenet().double()
net.load_state_dict(given["lenet"])
F.cross_entropy(net(given["x"][0][:8]), given["y"][0][:8]).backward()
truth = torch.cat([p.grad.flatten() for p in net.parameters()])

# %% [markdown]
# The factor is that of the closest multiple of the truth:

# %%
for name in found["reductions"][0]:
    for rank in found["reductions"]:
        factor = (rank[name] @ truth / (truth @ truth)).item()
        off = (rank[name] - factor * truth).abs().max() / truth.abs().max()
    print(f"{name:18}", f"{factor:.2f} times" if off < 1e-10 else "no multiple of", "the right one")

# %% [markdown]
# Both ranks, to be sure:

# %%
for rank in found["reductions"]:
    for name, wanted in (("mean, 4 and 4", truth), ("sum, 4 and 4", 4 * truth),
                         ("weighted, 5 and 3", truth)):
        assert apart([rank[name].numpy()], [wanted.numpy()]) < 1e-10, name
    assert apart([rank["mean, 5 and 3"].numpy()], [truth.numpy()]) > 1e-3, "means of unequal shards"

# %% [markdown]
# A sum comes out at 4 times the mean here: at $n/k$ times, so that the step grows with the *shard*,
# not with the batch. Means of unequal shards give a direction of their own, and all replicas agree
# on it. Weighted as in chapter 12 it is right.
#
# ### 4. A sampler without set_epoch
#
# `DistributedSampler` shuffles, from a seed that all ranks share, so that they take different
# images of *one* order. **Predict** the orders of two epochs.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(8), 2, rank=1, shuffle=True)
print("the same order twice:", list(sampler) == list(sampler))

# %% [markdown]
# The same images, in the same order, in every epoch, and rank 1 will never see the others. The
# sampler doesn't know that an epoch has ended; somebody has to tell it.

# %%
orders = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    orders.append(list(sampler))
assert len({tuple(order) for order in orders}) > 1, "another order now"
assert set(sum(orders, [])) > set(orders[0]), "and other images"

# %% [markdown]
# ## Training, and what it brings
#
# Now for speed. Two ranks, one thread each. First rank 0 works alone while rank 1 waits; then both
# work, each on as many images as rank 0 had alone. In turn, four times, and the first time doesn't
# count.

# %% tags=["trains"]
def seconds(model, x, y, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    begin = perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return perf_counter() - begin


# %% [markdown]
# `barrier` lets all ranks start together.

# %%
def rates(given, rounds=4):
    found = {}
    for make, size, steps in ((lenet, 128, 4), (resnet18, 16, 1)):
        x, y = given["images"][:size], given["labels"][:size]
        plain, model = make(), DistributedDataParallel(make())
        for _ in range(rounds):
            dist.barrier()
            alone = seconds(plain, x, y, steps) if dist.get_rank() == 0 else float("inf")
            dist.barrier()
            both = seconds(model, x, y, steps)
            found.setdefault(make.__name__, []).append(
                [steps * size / alone, 2 * steps * size / both])
    return found


# %% [markdown]
# And an epoch of real training: all 640 images, dealt by a sampler, in batches of 32 a rank, three
# times over.

# %% tags=["trains"]
def training(given):
    data = torch.utils.data.TensorDataset(given["images"], given["labels"])
    sampler = torch.utils.data.DistributedSampler(data, seed=12)
    loader = torch.utils.data.DataLoader(data, 32, sampler=sampler)
    torch.manual_seed(12)
    model, losses = DistributedDataParallel(lenet()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(), loss.backward(), optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "net": model.module.state_dict()}


# %% [markdown]
# **Predict** the speed-up of LeNet and of ResNet-18 on two cores.

# %% tags=["measured"]
from helpers.timing import Others

torch.save({"images": torch.tensor(images, dtype=torch.float32),
            "labels": torch.tensor(labels, dtype=torch.int64)}, folder / "given.pt")
write_script(folder / "ddp.py", Residual, resnet18, lenet, seconds, rates, training)
with Others() as others:
    found = ranks(2, "rates", "training")
for name, rounds in found["rates"][0].items():
    alone, both = np.median(rounds[1:], axis=0)
    print(f"{name:9} one process {alone:5,.0f} images/s, two {both:5,.0f}: "
          f"{both / alone:.2f} times")
print(f"other programs had {others.share:.0%} of the CPU")

# %% [markdown]
# Nothing above is asserted: it is this machine's. What must hold on any machine is that training
# worked: the loss falls, and all weights of both ranks are equal to the bit.

# %%
first, second = found["training"]
assert all(torch.equal(v, second["net"][name]) for name, v in first["net"].items()), "to the bit"
for rank in found["training"]:
    assert np.mean(rank["losses"][-5:]) < 0.7 * np.mean(rank["losses"][:5]), "the loss should fall"
assert first["losses"] != second["losses"], "each rank had its own images"

# %% [markdown]
# Each as a multiple of what one process does alone:

# %% tags=["measured"]
groups = {"LeNet": found["rates"][0]["lenet"],
          "ResNet-18": found["rates"][0]["resnet18"]}
ratios = [both / alone for alone, both in (np.transpose(rounds[1:]) for rounds in groups.values())]

# %% [markdown]
# A mark for each round, a line for the median:

# %% tags=["measured"]
from helpers.plotting import BLUE, ORANGE, figure, show

fig, ax = figure(f"Two cores, DDP: {np.median(ratios[0]):.2f} times one with LeNet, "
                 f"{np.median(ratios[1]):.2f} with ResNet-18", "", "speed-up over one process")
for i, (each, color, mark) in enumerate(zip(ratios, (ORANGE, BLUE), "so")):
    ax.plot(i + np.linspace(-0.12, 0.12, len(each)), each, mark, color=color)
    ax.plot([i - 0.22, i + 0.22], [np.median(each)] * 2, color=color, lw=3)
    ax.text(i + 0.26, np.median(each), f"{np.median(each):.2f}", va="center", fontsize=9)
ax.axhline(1, color="black", lw=0.7)
ax.axhline(2, color="black", lw=0.7, ls=":")
ax.set_xticks(range(2), groups)
ax.set(ylim=(0, max(2.2, 1.1 * np.max(ratios))), xlim=(-0.5, 1.6))
show(fig, alt="Speed-up of two DDP processes over one process, in three rounds, for LeNet and for "
     "ResNet-18; lines mark one and two.")

# %% [markdown]
# The figure compares two processes that train twice the images with one that trains them alone:
# that is weak scaling, as chapter 11 calls it. Nothing is left behind: no process, and the folder
# goes too.

# %%
home.cleanup()
assert not psutil.Process().children(recursive=True), "every process that was started has ended"

# %% [markdown]
# ## Summary
#
# | MXNet | PyTorch | what differs |
# | --- | --- | --- |
# | `KVStore.pushpull` | `all_reduce` | processes instead of devices |
# | `Trainer` | DDP and an optimizer | sums, or means over ranks |
# | `dist_sync`, `DMLC_…` | `torchrun` | servers, or all-reduce |
#
# - Two DDP processes equal two Gluon devices, replica by replica, to $10^{-10}$ in float64.
# - DDP broadcasts once, all-reduces in buckets while the backward pass goes on, and divides by the
#   number of ranks.
# - Compare weights, with a loss whose gradient differs from rank to rank: other tests let replicas
#   pass that never talked.
#
# Next, chapter 15: the same across machines, and what happens when one of them dies.
#
# **Further reading.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training* (2020).

# %% [markdown]
# ## Exercises
#
# 1. **Fill the buckets.** DDP puts gradients into a bucket in the order in which they come, and
#    closes it once it holds `bucket_cap_mb` or more (1 MB is $2^{20}$ bytes here). Write
#    `fill(sizes, cap)`, and compare with what the log above says was sent.
# 2. **Accumulate.** A batch that doesn't fit is trained in halves: two backward passes, one step.
#    Inside `with model.no_sync():` DDP doesn't send. Write a part of the script that trains so, and
#    show that the gradients are those of the whole batch. How many all-reduces did it take?

# %% [markdown]
# ### Answer 1
#
# LeNet's parameters from the last to the first, four bytes each:

# %% tags=["solution"]
def fill(sizes, cap):
    buckets = [[]]
    for size in sizes:
        if 4 * sum(buckets[-1]) >= cap * 2**20:
            buckets.append([])
        buckets[-1].append(size)
    return [sum(bucket) for bucket in buckets]


assert fill([p.numel() for p in reversed(list(lenet().parameters()))], 0.1) == sent

# %% [markdown]
# ### Answer 2
#
# The loss of each half is a mean over its images, so each is divided by two.

# %% tags=["solution"]
def accumulated(given):
    net, log = from_weights(lenet().double(), given["lenet"]), []
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, lambda state, bucket: send(log, bucket))
    halves = list(zip(mine(given["x"][0]).chunk(2), mine(given["y"][0]).chunk(2)))
    with model.no_sync():
        (F.cross_entropy(model(halves[0][0]), halves[0][1]) / 2).backward()
    silent_so_far = len(log)
    (F.cross_entropy(model(halves[1][0]), halves[1][1]) / 2).backward()
    gradients = [p.grad for p in net.parameters()]
    return {"sent": (silent_so_far, len(log)), "gradients": gradients}


# %% [markdown]
# Nothing is sent in the first half. The second half sends the sum of both, once.

# %% tags=["solution"]
home = tempfile.TemporaryDirectory()
folder = Path(home.name)
torch.save(given, folder / "given.pt")
write_script(folder / "ddp.py", lenet, from_weights, send, accumulated)
net = lenet().double()
net.load_state_dict(given["lenet"])
F.cross_entropy(net(given["x"][0]), given["y"][0]).backward()
for rank in ranks(2, "accumulated")["accumulated"]:
    assert rank["sent"] == (0, 1), "one all-reduce for both halves"
    pairs = zip(rank["gradients"], net.parameters(), strict=True)
    assert all(apart([g.numpy()], [p.grad.numpy()]) < 1e-12 for g, p in pairs)
home.cleanup()
