# %% [markdown]
# # 14 · DDP from scratch
#
# PyTorch trains on several devices with `DistributedDataParallel`, DDP for short: a process for
# each device, and gradients that are all-reduced while the backward pass goes on. In this chapter
# you write it. At the end you have a file of your own that trains under `torchrun`, and that
# agrees with PyTorch's DDP in this chapter's tests.
#
# ## What you'll do
#
# Write data parallelism in four steps: a message for each gradient, one message for all, messages
# during the backward pass, and buckets. Compare each with one process, and the last with PyTorch's
# own. Time them on two cores and a simulated link. Then accumulate gradients, spring eight traps,
# send half the bytes, and run the file.
#
# ## What you'll learn
#
# - how processes find each other, and how to end them when one fails;
# - what DDP sends, when, and in which order;
# - when overlap and buckets save time, and when they don't;
# - mistakes that raise no error, and mistakes that leave a rank waiting.
#
# ## What you need
#
# Chapters 03, 04, 10 and 13, no GPU, and PyTorch: `make setup TORCH=1` installs it. Reading takes
# {reading time}, running a bit over a minute on two cores.

# %% tags=["torch"]
import time

import psutil
from helpers import load_data
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

# %% [markdown]
# Cells like the next one, which begin with `# ddp_train.py`, also go into the file that you keep,
# [ddp_train.py](ddp_train.py). It imports nothing of this course.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
"""Trains LeNet, a process for each device: torchrun --nproc-per-node=2 ddp_train.py --help"""

import argparse
import contextlib
import gzip
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# %% [markdown]
# ## A process for each device
#
# Under DDP every process has its own Python, its own replica and its own share of the data. Its
# number is its *rank*, and the number of processes is the *world size*. Weights travel by broadcast
# and gradients by all-reduce, here with gloo, PyTorch's library for CPUs.
#
# A notebook is one process. We start the others with `loky`, which runs a notebook's function in
# another process. They communicate over the first network interface, on Linux the loopback, which
# no other machine can reach. (The file [ranks.py](ranks.py) keeps this for chapter 16.)

# %% tags=["file:ranks.py"]
# ranks.py
"""Runs a function in several processes of this machine, the ranks of torch.distributed."""

import signal
import socket
import tempfile
import warnings
from concurrent.futures import FIRST_EXCEPTION, wait
from importlib import import_module

import torch
from joblib.externals.loky import get_reusable_executor

warnings.filterwarnings("ignore", "A worker stopped")  # loky renews one whose memory has grown
VARIABLES = {"GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1], "TORCH_CPP_LOG_LEVEL": "ERROR"}


# %% [markdown]
# Each process meets the others in a file, and runs a `part`. The alarm ends it, whatever it is
# waiting for.

# %% tags=["file:ranks.py"]
# ranks.py
def on_rank(rank, world, folder, seconds, part, given):
    # Imported now: its functions take the current group as a default, and would keep it alive.
    import_module("torch.distributed.nn")
    signal.alarm(seconds + 5)
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    torch.distributed.barrier()  # all are connected: none fails because another has ended
    try:
        return part(*given)
    finally:
        torch.distributed.destroy_process_group()
        signal.alarm(0)


# %% [markdown]
# The next function starts the ranks and returns what each returned. If one fails or takes too
# long, it ends them all, since the others would wait.

# %% tags=["file:ranks.py"]
# ranks.py
def ranks(part, *given, world=2, seconds=60):
    """What `part(*given)` returned on each rank; a rank's error; TimeoutError after `seconds`."""
    pool = get_reusable_executor(4, timeout=600, env=VARIABLES)
    with tempfile.TemporaryDirectory() as folder:
        tasks = [pool.submit(on_rank, r, world, folder, seconds, part, given) for r in range(world)]
        try:
            done, running = wait(tasks, seconds, FIRST_EXCEPTION)
            # One rank's error makes the others' connections fail: prefer the first cause.
            if any(task.exception() for task in done):
                errors = [task.exception() for task in wait(tasks, 2).done if task.exception()]
                raise min(errors, key=lambda error: "gloo/transport" in str(error))
            if running:
                raise TimeoutError(f"{len(running)} of {world} ranks still ran after {seconds} s")
        except BaseException:
            pool.shutdown(kill_workers=True)
            raise
    return [task.result() for task in tasks]


# %% [markdown]
# **Predict:** each rank gives $r + 1$, and `all_reduce` adds, in place. What do four ranks have?

# %%
def hello():
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    return x


for world in (2, 4):
    assert all((x == sum(range(world + 1))).all() for x in ranks(hello, world=world))
print("the sum, on every rank:", ranks(hello, world=4)[3])

# %% [markdown]
# Does it end ranks that hang, and those that wait for them?

# %%
def outcome(function, *given, **options):  # what it returns, or its error
    try:
        return function(*given, **options)
    except Exception as error:
        return error.with_traceback(None)  # the traceback would keep the model alive


# %%
def wait_for_rank_1():
    if dist.get_rank() == 1:
        signal.pause()  # for ever
    dist.all_reduce(torch.zeros(3))


processes = ranks(os.getpid, world=4)
print(outcome(ranks, wait_for_rank_1, seconds=1))
assert not any(map(psutil.pid_exists, processes)), "all were ended"

# %% [markdown]
# ## What must come out
#
# The network is chapter 04's LeNet. The oracle is one process that trains on the whole batch.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


# %% [markdown]
# Images are centred, as in chapter 04.

# %% tags=["measured"]
data = load_data("mnist", limit=5120)
print(data)
mean = data.train_images.mean()
images, labels = torch.tensor(data.train_images - mean), torch.tensor(data.train_labels).long()
test = torch.tensor(data.test_images[:2000] - mean), torch.tensor(data.test_labels[:2000]).long()

# %% [markdown]
# Each rank takes its share of every batch. For one process the share is the batch.

# %%
def share(batch):
    if not dist.is_initialized():
        return batch
    return batch.tensor_split(dist.get_world_size())[dist.get_rank()]


# %% [markdown]
# A training step for whatever we wrap a network in. Ours have `finish_gradient_synchronization`, to
# be called after the backward pass; PyTorch's finishes by itself.

# %% tags=["trains"]
def take_steps(model, batches, rate=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), rate, **options)
    finish = getattr(model, "finish_gradient_synchronization", lambda: None)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(share(x)), share(y)).backward()
        finish()
        optimizer.step()
    return [value.detach().clone() for value in model.parameters()]


# %% [markdown]
# The oracle in float64, twenty batches of 12, and the largest difference, over all parameters of
# all ranks, as a share of the largest entry:

# %%
torch.manual_seed(14)
origin = lenet().double()
batches = [(images[i : i + 12].double(), labels[i : i + 12].clone())  # a view would be sent whole
           for i in range(0, 240, 12)]


def copy_of_origin():
    net = lenet().double()
    net.load_state_dict(origin.state_dict())
    return net


def apart(found, truth):  # found: [ranks][parameters]
    assert all(len(each) == len(truth) for each in found)
    shares = [(a - b).abs().max() / b.abs().max() for each in found for a, b in zip(each, truth)]
    return torch.stack(shares).max().item()  # NaN if any is


truth = take_steps(copy_of_origin(), batches)
assert apart([truth], list(origin.parameters())) > 0.01, "the weights must move"

# %% [markdown]
# ## Step 1: a message for each gradient
#
# Data parallelism needs two things: replicas that begin equal, and equal gradients in every step.
# The first: rank 0 broadcasts its parameters, and its *buffers*, such as BatchNorm's running
# statistics.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
class Replicas(nn.Module):
    """Wraps `module`: all ranks begin with rank 0's parameters and buffers.

    Freeze, unfreeze or replace parameters before, not after, and on all ranks alike.
    """

    def __init__(self, module):
        super().__init__()
        self.module, self.world = module, dist.get_world_size()
        state = [*module.parameters(), *module.buffers()]
        kinds = [None] * self.world
        dist.all_gather_object(kinds, [(t.shape, t.dtype, t.requires_grad) for t in state])
        if any(each != kinds[0] for each in kinds):
            raise ValueError("the ranks' modules differ in their parameters or buffers")
        for tensor in state:
            whole = tensor.detach().contiguous()  # gloo takes memory as it lies
            dist.broadcast(whole, src=0)
            tensor.detach().copy_(whole)
        self.trained = [p for p in module.parameters() if p.requires_grad]

    def forward(self, *inputs, **options):
        return self.module(*inputs, **options)


# %% [markdown]
# The second: after the backward pass, every gradient is replaced by the mean over ranks.

# %%
class Naive(Replicas):
    def finish_gradient_synchronization(self):
        for p in self.trained:
            dist.all_reduce(p.grad)
            p.grad /= self.world


# %% [markdown]
# To test it, each rank makes a network from a seed of its own, except rank 0, which has the
# oracle's weights.

# %%
def train(wrap, batches):
    torch.manual_seed(dist.get_rank())
    net = copy_of_origin() if dist.get_rank() == 0 else lenet().double()
    return take_steps(wrap(net), batches)


for world in (2, 3):
    assert apart(ranks(train, Naive, batches, world=world), truth) < 1e-12
print("two ranks equal one process, and so do three, to 1e-12, after 20 steps")

# %% [markdown]
# Would the test see a mistake? One that forgets rank 0's weights, one that forgets the first
# layer's message, one that adds and doesn't divide:

# %%
class Unequal(Naive):
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.world, self.trained = module, 2, list(module.parameters())


class Forgetful(Naive):
    def __init__(self, module):
        super().__init__(module)
        self.trained = self.trained[2:]


class Adding(Naive):
    def finish_gradient_synchronization(self):
        self.world = 1
        super().finish_gradient_synchronization()


for wrong in (Unequal, Forgetful, Adding):
    assert apart(ranks(train, wrong, batches), truth) > 1e-3, wrong.__name__

# %% [markdown]
# It trains, too: three epochs, each rank with its half of every batch of 64.

# %% tags=["trains", "measured"]
def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).double().mean().item()


def learn(wrap, epochs=3, seed=14):
    torch.manual_seed(seed)
    model, found = wrap(lenet()), []
    for _ in range(epochs):
        order = torch.randperm(len(images))  # the same on all ranks
        take_steps(model, zip(images[order].split(64), labels[order].split(64)))
        found.append(accuracy(model, *test))
    return found


both = ranks(learn, Naive)
assert both[0] == both[1] and both[0][-1] > 0.5, "equal accuracies, and both have learned"
print("test accuracy after each epoch:", *(f"{each:.3f}" for each in both[0]))

# %% [markdown]
# ## Step 2: one message
#
# LeNet has eight parameters, so `Naive` sends eight messages a step, and each costs a latency
# (chapter 01). All gradients in one buffer cost one:

# %%
class Flat(Replicas):
    def finish_gradient_synchronization(self):
        buffer = torch.cat([p.grad.flatten() for p in self.trained])
        dist.all_reduce(buffer)
        means = (buffer / self.world).split([p.numel() for p in self.trained])
        for p, mean in zip(self.trained, means):
            p.grad.copy_(mean.view_as(p))

# %% [markdown]
# ## Step 3: during the backward pass
#
# Both wait until the backward pass has ended. But the last layer's gradient is ready long before
# (chapter 10). A *hook* on a parameter is called as soon as its gradient is complete, and
# `async_op=True` starts an all-reduce without waiting for it.

# %%
class Overlapped(Replicas):
    def __init__(self, module):
        super().__init__(module)
        self.sent = []
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        self.sent.append((p, dist.all_reduce(p.grad, async_op=True)))

    def finish_gradient_synchronization(self):
        for p, work in self.sent:
            work.wait()
            p.grad /= self.world
        self.sent.clear()


# %% [markdown]
# Both compute what one process does:

# %%
for wrap in (Flat, Overlapped):
    for world in (2, 3):
        assert apart(ranks(train, wrap, batches, world=world), truth) < 1e-12, wrap.__name__

# %% [markdown]
# **Predict:** in which order are LeNet's layers sent?

# %%
from unittest import mock


def watch(wrap):
    log, net = [], lenet()
    model, send = wrap(net), dist.all_reduce

    def note_and_send(gradient, **options):
        log.extend(f"{name} sent" for name, p in net.named_parameters() if p.grad is gradient)
        return send(gradient, **options)

    for name, layer in net.named_children():
        layer.register_full_backward_pre_hook(lambda *_, name=name: log.append(f"into {name}"))
    x = share(images[:16]).requires_grad_()  # so that the first layer's hook is called, too
    with mock.patch.object(dist, "all_reduce", note_and_send):
        F.cross_entropy(model(x), share(labels[:16])).backward()
        model.finish_gradient_synchronization()
    return log


# %% [markdown]
# Both ranks must send in the same order, or messages would be mixed up. `Naive`, for comparison,
# sends when the backward pass is done.

# %%
logs, late = ranks(watch, Overlapped), ranks(watch, Naive)[0]
assert logs[0] == logs[1] and sorted(logs[0]) == sorted(late)
assert all("into" in entry for entry in late[:10]), "Naive sends after the last of ten layers"
assert logs[0].index("9.weight sent") < logs[0].index("into 8"), "sent before the next layer"
print(*logs[0], sep=", ")

# %% [markdown]
# ## Step 4: buckets
#
# Now many messages overlap, and each still costs its latency. DDP's answer is between steps 2 and
# 3: *buckets*. Parameters are taken from the last to the first, roughly the order in which their
# gradients come, and joined until a bucket is full. A bucket is sent when its last gradient is
# there. Numbers of different types, or on different devices, can't share a buffer.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def fill_buckets(parameters, most):
    """Lists of parameters of at most `most` bytes each, or of a single larger one."""
    buckets, latest, sizes = [], {}, {}
    for p in parameters:
        kind, size = (p.dtype, p.device), p.numel() * p.element_size()
        if kind not in latest or sizes[kind] + size > most:
            latest[kind], sizes[kind] = [], 0
            buckets.append(latest[kind])
        latest[kind].append(p)
        sizes[kind] += size
    return buckets


# %%
def numbers(buckets):
    return [sum(p.numel() for p in bucket) for bucket in buckets]


parameters = list(lenet().parameters())[::-1]
for most in (1, 0.1 * 2**20, 25 * 2**20):
    print(f"at most {most:>10,.0f} bytes:", numbers(fill_buckets(parameters, most)))
assert numbers(fill_buckets(parameters, 1e9)) == [129_068], "all in one"

# %% [markdown]
# What about a parameter that got no gradient, because the forward pass didn't use it? If one rank
# used it and another didn't, the second has to send zeros, or the first waits in vain (trap 5). If
# *no* rank used it, its gradient should stay `None`: with zeros, weight decay would shrink the
# parameter, and momentum move it. So a bucket carries, behind its gradients, a number for each
# parameter: 1 if this rank has a gradient, else 0. If they add up to 0, nobody has.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def flatten(bucket):
    """The gradients of a bucket in one array, then 1 for each that is there, 0 for None."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
    used = torch.tensor([p.grad is not None for p in bucket]).to(parts[0])
    return torch.cat([*(part.flatten() for part in parts), used])


def write_back(bucket, buffer):
    """Replace the gradients of a bucket by what `buffer` has, where any rank had one."""
    *means, used = buffer.split([*(p.numel() for p in bucket), len(bucket)])
    for p, mean, users in zip(bucket, means, used):
        if p.grad is None and users != 0:
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p))


# %% [markdown]
# The class sends bucket after bucket. What a message is, and what sends it, are methods of their
# own, since we'll replace them below.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
class Bucketed(Replicas):
    """Averages dense gradients in buckets of `bucket_size_mb` MB (of 2**20 bytes)."""

    def __init__(self, module, bucket_size_mb=25):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb={bucket_size_mb}: should be more than 0")
        super().__init__(module)
        self.buckets = fill_buckets(reversed(self.trained), bucket_size_mb * 2**20)
        self.sent = []  # (buffer, its all-reduce) for each bucket sent, in order

    def message(self, bucket):
        return flatten(bucket)

    def all_reduce(self, buffer):
        return dist.all_reduce(buffer, async_op=True)

    def send_next(self):
        buffer = self.message(self.buckets[len(self.sent)]) / self.world  # before: no overflow
        self.sent.append((buffer, self.all_reduce(buffer)))

    def finish_gradient_synchronization(self):
        """To be called after the last backward pass of a step, before other messages."""
        while len(self.sent) < len(self.buckets):
            self.send_next()
        for bucket, (buffer, work) in zip(self.buckets, self.sent):
            work.wait()
            write_back(bucket, buffer)
        self.sent.clear()


# %% [markdown]
# That sends all buckets at the end. The next class adds the overlap: a hook notes each gradient,
# and sends buckets as long as the next one is complete. All ranks must send in the same order (trap
# 5), so a bucket that is complete waits for those before it.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
class BucketedOverlapped(Bucketed):
    """Sends buckets while the backward pass goes on."""

    def __init__(self, module, bucket_size_mb=25):
        super().__init__(module, bucket_size_mb)
        self.ready = set()
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.mark_ready)

    def mark_ready(self, p):
        self.ready.add(p)
        while len(self.sent) < len(self.buckets) and self.ready.issuperset(
                self.buckets[len(self.sent)]):
            self.send_next()

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.ready.clear()


# %% [markdown]
# Two things are missing. Sometimes gradients should only add up, without being sent: `no_sync`,
# which we'll need below. And a forgotten `finish_gradient_synchronization` should be noticed: at
# the next forward pass that records gradients, unless all backward passes ran in `no_sync`.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass; to "
              "add up several, run all but the last in no_sync()")


class DDP(BucketedOverlapped):
    """As DistributedDataParallel with find_unused_parameters=True, forward_sync_buffers=False."""

    synchronizing = True

    def forward(self, *inputs, **options):
        if self.ready and torch.is_grad_enabled():
            raise RuntimeError(UNFINISHED)
        return super().forward(*inputs, **options)

    def mark_ready(self, p):
        if p in self.ready:
            raise RuntimeError(UNFINISHED)
        if self.synchronizing:
            super().mark_ready(p)

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in this block only add to the local gradients."""
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before


# %% [markdown]
# Buckets of one parameter: how many are sent when each gradient comes? (A convolution's weight
# waits for its bias.)

# %%
def how_many_sent():
    model, counts = DDP(copy_of_origin(), 1e-6), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: counts.append(len(model.sent)))
    take_steps(model, batches[:1])
    return counts


assert ranks(how_many_sent) == 2 * [[1, 2, 3, 4, 4, 6, 6, 8]], "each as soon as its turn comes"

# %%
found = ranks(train, lambda net: DDP(net, 1e-6), batches, world=3)
assert apart(found, truth) < 1e-12, "what one process does"

# %% [markdown]
# ## Is it PyTorch's?
#
# LeNet is too kind a test. Here is what DDP has to cope with: a weight used twice, a frozen layer,
# one that is never used, and BatchNorm, whose statistics are buffers and whose normalisation sees
# the rank's shard only (chapter 09).

# %%
class Awkward(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(32, 32)  # defined first: the others' buckets don't wait for its own
        self.stem, self.norm = nn.Linear(784, 32), nn.BatchNorm1d(32)
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight  # tied
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, x):
        x = self.norm(self.stem(x.flatten(1)))
        return self.last(torch.relu(self.frozen(torch.relu(self.first(x)))))


# %% [markdown]
# Each rank starts from a seed of its own; momentum and weight decay are on. **Predict:** which of
# `Naive`, `Flat` and `Overlapped` can't train this network, and why?

# %%
def train_awkward(wrap):
    torch.manual_seed(dist.get_rank())
    net = Awkward().double()
    net.norm.running_mean.normal_()  # the seed's, so that rank 0's must be sent
    take_steps(wrap(net), batches, rate=0.01, momentum=0.9, weight_decay=0.1)
    assert net.unused.weight.grad is None, "nobody used it, so nobody has a gradient"
    return [*net.parameters(), *net.buffers()]


# %% [markdown]
# PyTorch's DDP has to be told that a parameter may be unused. By default it also broadcasts rank
# 0's buffers before forward passes. Ours broadcasts them once, at the start, so we turn that off in
# PyTorch's.

# %%
from torch.nn.parallel import DistributedDataParallel


def torch_ddp(net, **options):
    return DistributedDataParallel(net, find_unused_parameters=True, forward_sync_buffers=False,
                                   **options)


# %% [markdown]
# Two and three ranks, buckets for each parameter, of 0.01 MB, and for all. `Naive` and `Flat` read
# the unused layer's gradient, which is `None`. `Overlapped` sends what gets a gradient, and here
# the ranks agree on what that is.

# %%
class Punctual(DDP):
    def finish_gradient_synchronization(self):  # to be called when the backward pass has ended
        complete = [all(p.grad is not None for p in bucket) for bucket in self.buckets]
        assert len(self.sent) == sum(complete), "by now each complete bucket has been sent"
        super().finish_gradient_synchronization()


for world in (2, 3):
    theirs = ranks(train_awkward, torch_ddp, world=world)
    ways = [Overlapped, *(lambda net, size=size: Punctual(net, size) for size in (1e-6, 0.01, 25))]
    for way in ways:
        for mine, reference in zip(ranks(train_awkward, way, world=world), theirs):
            assert apart([mine], reference) < 1e-12, f"{world} ranks"
    assert not torch.equal(theirs[0][-3], theirs[1][-3]), "running means are the rank's own"
for wrap in (Naive, Flat):
    for each in ranks(outcome, train_awkward, wrap):
        assert isinstance(each, (TypeError, AttributeError))
print("2 and 3 ranks, three sizes of buckets: ours equals torch's on every rank, to 1e-12")

# %% [markdown]
# ## What overlap and buckets bring
#
# It matters where there is much to send for the computing that is done. Here are 22 dense layers
# with 5.7 million weights and biases.

# %%
def deep(width=512, layers=20):
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), *hidden,
                         nn.Linear(width, 10))


BYTES = 4 * sum(p.numel() for p in deep().parameters())  # an MB is 2**20, as in the limits
print(f"{len(list(deep().parameters()))} parameters, {BYTES / 2**20:.1f} MB")

# %% [markdown]
# One step on the clock. PyTorch's DDP sends within `backward()`:

# %% tags=["trains"]
from time import perf_counter

import numpy as np


def clock(model, x, y, optimizer):
    begin = perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()
    optimizer.step()
    return 1e3 * (perf_counter() - begin)  # ms


# %% [markdown]
# The contestants take turns. Rank 0 alone has the whole batch of 64 (for strong scaling) or 32
# images, as many as each rank has (for weak scaling). `local` computes on both ranks and sends
# nothing.

# %%
def contestants():
    return {"alone, 64": deep(), "alone, 32": deep(), "local": deep(), "naive": Naive(deep()),
            "overlapped": Overlapped(deep()), "0.01 MB": Bucketed(deep(), 0.01),
            "DDP, 0.01 MB": DDP(deep(), 0.01), "5 MB": Bucketed(deep(), 5),
            "DDP, 5 MB": DDP(deep(), 5), "flat": Flat(deep()),
            "torch": DistributedDataParallel(deep())}


# %% tags=["few:def race(rounds=9)=>def race(rounds=3)"]
def race(rounds=9):
    models, found = contestants(), {}
    optimizers = {name: torch.optim.SGD(m.parameters(), 0.01) for name, m in models.items()}
    for _ in range(rounds):
        for name, model in models.items():
            n = 64 if name == "alone, 64" else 32
            dist.barrier()
            if dist.get_rank() == 0 or "alone" not in name:
                ms = clock(model, images[:n], labels[:n], optimizers[name])
                found.setdefault(name, []).append(ms)
    return {name: row[2:] for name, row in found.items()}  # the first two warm up


# %% [markdown]
# Medians of seven rounds, and their range:

# %% tags=["measured"]
from helpers.timing import Others

with Others() as others:
    times, _ = ranks(race)
middle = {name: np.median(row) for name, row in times.items()}
for name, row in times.items():
    print(f"{name:13} {middle[name]:6.1f} ms ({min(row):.1f} to {max(row):.1f})", end="")
    # Strong: 64 images alone against 32 on each. Weak: twice the time of 32 alone. 2 is perfect.
    print("" if "alone" in name else f"; speed-up {middle['alone, 64'] / middle[name]:.2f} strong, "
          f"{2 * middle['alone, 32'] / middle[name]:.2f} weak")
print(f"other programs had {others.share:.0%} of the CPU")

# %% [markdown]
# On these two cores it doesn't pay to send this network's gradients: in our runs every way's median
# was slower than one process with the whole batch. Computing isn't why, since `local` is faster
# than that. Most ranges overlap, so we name no winner.
#
# How much does overlap hide? To see that, compare the same buckets sent at the end and during the
# backward pass. What sending costs is the time beyond `local`. For comparison, an all-reduce of the
# same size with no computation beside it:

# %%
import timeit


def message(buffer):
    return 1e3 * np.median(timeit.repeat(lambda: dist.all_reduce(buffer), setup=dist.barrier,
                                         repeat=13, number=1))


# %% tags=["measured"]
print(f"alone {max(ranks(message, torch.zeros(BYTES // 4))):.1f} ms; "
      f"in a step of `flat` {middle['flat'] - middle['local']:.1f} ms")
for end, during in (("0.01 MB", "DDP, 0.01 MB"), ("5 MB", "DDP, 5 MB")):
    apart_ms = np.subtract(times[end], times[during])  # round by round
    low, half, high = np.percentile(apart_ms, [25, 50, 75])
    print(f"{end} minus {during}: {half:+.1f} ms (middle half {low:+.1f} to {high:+.1f}); "
          f"sending costs {end} {middle[end] - middle['local']:.1f} ms")

# %% [markdown]
# When we repeated this, both medians changed sign: we saw no gain beyond the noise. Here the
# messages are carried by the cores that compute, as in chapter 10. And a step pays for more than
# the all-reduce itself: buffers are filled and emptied, and each rank waits for the slower one.
#
# ### A link of its own
#
# Suppose that something else moved the data, say a network card that reads memory by itself. We can
# imitate that: a message is done after $\alpha + \beta \cdot \text{bytes}$, one after the other,
# and nobody's core is used. One process is enough, if we assume that the others do the same at the
# same time. It sends nothing: `wait` sleeps until the message would have arrived.
#
# **On GPUs:** NCCL's kernels share the GPU with the backward pass (its user guide: CTA policy
# flags). We didn't measure what that costs.

# %%
class Link:
    def __init__(self, latency, rate):  # ms, bytes a ms
        self.latency, self.rate, self.free = latency, rate, 0.0

    def send(self, nbytes):
        took = (self.latency + nbytes / self.rate) / 1e3
        self.free = max(self.free, perf_counter()) + took
        return Arrival(self.free)


class Arrival:
    def __init__(self, at):
        self.at = at

    def wait(self):
        time.sleep(max(0, self.at - perf_counter()))


# %% [markdown]
# Checked on three messages: 1 ms and 1,000 bytes a millisecond.

# %%
link = Link(1, 1000)  # 1 ms a message, and 1 for each 1,000 bytes: 1 + 4, then 1, then 1 + 9
link.free = begin = perf_counter() + 60  # it has work until then
assert [round(1e3 * (link.send(size).at - begin)) for size in (4000, 0, 9000)] == [5, 6, 16]
begin, arrival = perf_counter(), Link(100, 1).send(0)
assert begin + 0.1 <= arrival.at <= perf_counter() + 0.1, "an idle link starts now"
arrival.wait()
assert perf_counter() >= arrival.at

# %% [markdown]
# The same classes on the link. Only what sends is replaced. **Predict:** with a latency of half a
# millisecond and 1 GB/s, which size of buckets is best: one for each parameter (44), one for all,
# or something between?

# %%
class Linked(DDP):
    link = None

    def all_reduce(self, buffer):
        return self.link.send(buffer.nbytes)


class LinkedAtEnd(Linked):
    def mark_ready(self, p):  # all is sent after the backward pass
        pass


# %% tags=["few:rounds=8)=>rounds=3)"]
import random

SIZES = (0.01, 2, 4, 8, 16, 25)


def race_on_link(latency, rate, rounds=8):
    ways = {("local", 0): deep()}
    for kind in (Linked, LinkedAtEnd):
        ways |= {(kind.__name__, size): kind(deep(), size) for size in SIZES}
    found = {way: [] for way in ways}
    optimizers = {way: torch.optim.SGD(m.parameters(), 0.01) for way, m in ways.items()}
    for _ in range(rounds):
        for way, model in random.sample([*ways.items()], len(ways)):
            model.link = Link(latency, rate)
            found[way].append(clock(model, images[:64], labels[:64], optimizers[way]))
    return {way: row[2:] for way, row in found.items()}


# %% [markdown]
# Medians of six rounds, in random order. What is hidden is the difference within a round, as a
# share of the link's time, with its middle half:

# %% tags=["measured"]
(linked,) = ranks(race_on_link, 0.5, 1e6, world=1)
half = {way: np.percentile(row, [25, 50, 75]) for way, row in linked.items()}
# Most weights are 1 MB and have a bias: a limit of 2 MB holds one, not two.
messages = [len(fill_buckets(list(deep().parameters())[::-1], size * 2**20)) for size in SIZES]
for size, count in zip(SIZES, messages):
    end, during = (linked[kind, size] for kind in ("LinkedAtEnd", "Linked"))
    sent = count * 0.5 + BYTES / 1e6
    hidden = np.percentile(np.subtract(end, during) / sent, [25, 50, 75])
    print(f"{size:5} MB: {count:2} messages, {sent:4.1f} ms of the link; a step "
          f"{np.median(end):5.1f} ms, overlapped {np.median(during):5.1f}; hidden "
          "{1:4.0%} ({0:.0%} to {2:.0%})".format(*hidden))
print(f"nothing sent: {half['local', 0][1]:.1f} ms")

# %% tags=["measured"]
best = min((half["Linked", size] for size in SIZES), key=lambda quartiles: quartiles[1])
good = [f"{size:g}" for size in SIZES if half["Linked", size][0] <= best[2]]
fig, ax = figure(f"Simulated link: overlapped steps are shortest at {', '.join(good)} MB",
                 "limit of a bucket, MB (messages)", "ms a step")
for kind, label, color, style in (("LinkedAtEnd", "sent at the end", ORANGE, "s--"),
                                  ("Linked", "sent during the backward pass", BLUE, "o-")):
    low, middle_, high = np.transpose([half[kind, size] for size in SIZES])
    ax.errorbar(range(len(SIZES)), middle_, (middle_ - low, high - middle_), fmt=style,
                color=color, label=label, capsize=3)
ax.axhline(half["local", 0][1], color=GREY, ls=":", label="nothing sent")
ax.set_xticks(range(len(SIZES)), [f"{size:g}\n({m})" for size, m in zip(SIZES, messages)])
ax.set_ylim(0), ax.legend()
show(fig, alt="Step time against the limit of a bucket on a simulated link, with and without "
     "overlap: medians and middle halves.")

# %% [markdown]
# Many small messages pay the latency each time. A single large one can't leave before the last
# gradient is there, nor be filled or emptied while another is on its way. Which limit is best
# depends on the link and on the network. With everything in one bucket nothing can be hidden, so
# what the 25 MB row shows is measurement error. The title also names limits whose middle half
# overlaps the best one's.
#
# By default PyTorch puts all gradients of a type into one bucket for the first step
# (`compute_bucket_size_limits` in `torch/nn/parallel/distributed.py`), then fills buckets in the
# order in which gradients came: one of about 1 MB, the next of 25 (`rebuild_buckets` in
# `reducer.hpp`; exercise 1). With `find_unused_parameters=True` both limits hold from the start,
# and buckets stay.

# %% [markdown]
# ## Gradient accumulation
#
# A batch that doesn't fit is computed in parts: several backward passes add to `.grad`, then one
# step. Between the parts nothing needs to be sent, and `no_sync()` says so. Three parts: how many
# all-reduces?

# %%
class Counted(DDP):
    count = 0

    def all_reduce(self, buffer):
        self.count += 1
        return super().all_reduce(buffer)


# %% tags=["trains"]
def accumulate():
    model, (x, y) = Counted(copy_of_origin()), (share(a).chunk(3) for a in batches[0])
    for i in range(3):
        with model.no_sync() if i < 2 else contextlib.nullcontext():
            (F.cross_entropy(model(x[i]), y[i]) / 3).backward()
    model.finish_gradient_synchronization()
    return model.count, [p.grad for p in model.parameters()]


# %% [markdown]
# The loss of each part is a mean over its images, hence the `/ 3`. The oracle is one backward pass
# over the whole batch in one process.

# %%
whole = copy_of_origin()
F.cross_entropy(whole(batches[0][0]), batches[0][1]).backward()
for count, gradients in ranks(accumulate):
    assert count == 1, "LeNet is one bucket of 25 MB, sent once for all three parts"
    assert apart([gradients], [p.grad for p in whole.parameters()]) < 1e-12
print("three parts, one all-reduce, the gradient of the whole batch to 1e-12")

# %% [markdown]
# Without `no_sync`, ours refuses the next forward pass. PyTorch's would send during every backward
# pass. Its `no_sync` has to enclose the forward pass, too.

# %%
def accumulate_carelessly():
    model = DDP(copy_of_origin())
    for x, y in batches[:2]:
        F.cross_entropy(model(share(x)), share(y)).backward()


print(ranks(outcome, accumulate_carelessly)[0])

# %% [markdown]
# ## Eight traps
#
# ### 1. Replicas that start apart
#
# Averaging gradients doesn't bring replicas together: with plain SGD both make the same step.
# `Unequal` from above leaves out the broadcast.

# %% tags=["trains"]
def gap(wrap):
    torch.manual_seed(dist.get_rank())
    net = lenet().double()
    model = wrap(net)
    start = [p.detach().clone() for p in net.parameters()]
    return start, take_steps(model, batches[:5])


# %%
for wrap in (Unequal, DDP):
    (start0, end0), (start1, end1) = ranks(gap, wrap)
    before, after = ([a - b for a, b in zip(*each)] for each in ((start0, start1), (end0, end1)))
    print(wrap.__name__, "largest gap at first and after five steps:",
          *(f"{max(g.abs().max().item() for g in gaps):.3f}" for gaps in (before, after)))
    drift = max((a - b).abs().max().item() for a, b in zip(before, after))
    assert drift < 1e-12, "the gap stays what it was"

# %% [markdown]
# ### 2. A loss that can't tell
#
# PyTorch's example `ddp-tutorial-series` (`multigpu.py` at commit 1e81da3 of pytorch/examples)
# takes `cross_entropy` of a network with *one* output. Softmax of a single number is always 1, so
# its gradient is zero. **Predict:** does a comparison of replicas notice that they never
# communicate?

# %%
def silent(loss):
    weight = nn.Parameter(torch.zeros(20, 1))
    torch.manual_seed(dist.get_rank())
    for _ in range(5):
        gradient, = torch.autograd.grad(loss(torch.rand(8, 20) @ weight, torch.rand(8, 1)), weight)
        weight.data -= 0.1 * gradient
    return weight.detach()


# %%
for loss in (F.cross_entropy, F.mse_loss):
    print(loss.__name__, "weights equal:", torch.equal(*ranks(silent, loss)))

# %% [markdown]
# A test of data parallelism needs gradients that differ from rank to rank.
#
# ### 3. Sum and mean
#
# DDP divides the sum of the gradients by the number of ranks, never by the number of images. What
# that means depends on the loss and on the shards: means or sums over shards of 4 and 4 images;
# means over 5 and 3, or sums times 2/8. **Predict** which give a multiple of the gradient of the
# mean over all eight, and which multiple.

# %%
def reduced(sizes, factor):
    model, rank = DDP(copy_of_origin()), dist.get_rank()
    x, y = (a[:8].split(sizes)[rank] for a in batches[0])
    (F.cross_entropy(model(x), y, reduction="sum") * factor[rank]).backward()
    model.finish_gradient_synchronization()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
eight = copy_of_origin()
F.cross_entropy(*(f(a[:8]) for f, a in zip((eight, lambda y: y), batches[0]))).backward()
right = torch.cat([p.grad.flatten() for p in eight.parameters()])
CASES = {"means of 4 and 4": ([4, 4], [1 / 4, 1 / 4]), "sums of 4 and 4": ([4, 4], [1, 1]),
         "means of 5 and 3": ([5, 3], [1 / 5, 1 / 3]),
         "sums of 5 and 3, times 2/8": ([5, 3], [2 / 8, 2 / 8])}
for name, (sizes, factor) in CASES.items():
    found, other = ranks(reduced, sizes, factor)
    assert torch.equal(found, other), "the replicas agree, right or wrong"
    times_right = (found @ right / (right @ right)).item()
    multiple = (found - times_right * right).abs().max() < 1e-12 * right.abs().max()
    print(f"{name:27}", f"{times_right:.2f} times the mean" if multiple else "another direction")

# %% [markdown]
# Means of unequal shards point in another direction, and all replicas agree on it. Weighted by
# $k/n$, ranks over images, it is right (chapter 12).
#
# ### 4. A sampler without set_epoch
#
# `DistributedSampler` gives each rank its share of one random order, which it draws from a seed
# that all ranks share.

# %%
from torch.utils.data import DistributedSampler

sampler = DistributedSampler(range(8), 2, rank=1, shuffle=True)
print("two epochs:", list(sampler), list(sampler))
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(f"after set_epoch({epoch}):", list(sampler))

# %% [markdown]
# Without `set_epoch` every epoch has the same order, and rank 1 never sees the other half.
#
# ### 5. A parameter unused on one rank
#
# Rank 1 leaves out a layer, as a network with branches might. **Predict** what `Overlapped`, our
# DDP and PyTorch's do when it is the first.

# %%
class Branch(nn.Module):
    def __init__(self, left_out):
        super().__init__()
        self.first, self.second = nn.Linear(784, 10), nn.Linear(10, 10)
        self.left_out = left_out if dist.get_rank() == 1 else None

    def forward(self, x):
        x = x.flatten(1)
        x = x[:, :10] if self.left_out == "first" else self.first(x)
        return x if self.left_out == "second" else self.second(x)


def branch(wrap, left_out="first"):
    torch.manual_seed(14)
    steps = 1 if wrap is Overlapped else 2  # in a second, gloo aborts: messages of different sizes
    return take_steps(wrap(Branch(left_out).double()), batches[:steps])


# %%
def ending(result):  # of a rank's work, without the paths and ports in gloo's messages
    text = str(result) if isinstance(result, Exception) else "finished"
    return text.split(".")[0] if text[0].isalpha() else type(result).__name__


found = {wrap: ranks(outcome, branch, wrap)
         for wrap in (Overlapped, DDP, DistributedDataParallel, torch_ddp)}
for wrap, (rank0, rank1) in found.items():
    print(f"{wrap.__name__}: rank 0: {ending(rank0)}, rank 1: {ending(rank1)}")

# %% [markdown]
# `Overlapped`'s rank 0 waits for a message that rank 1 never sends, and gets an error once rank 1
# has ended. With PyTorch's DDP rank 1 raises an error in its next forward pass, while rank 0 still
# waits in the backward pass before. `find_unused_parameters=True`, which `torch_ddp` sets, prevents
# that: then, like ours, it counts a missing gradient as zero.
#
# Now rank 1 leaves out the *second* layer, whose buckets are sent first. The first layer's must
# wait: sent at once, they would be paired with rank 0's second.

# %%
assert apart(found[DDP], found[torch_ddp][0]) < 1e-12, "a missing gradient counts as zero"
mine = ranks(branch, lambda net: DDP(net, 1e-6), "second")
theirs = ranks(branch, torch_ddp, "second")
assert apart(mine, theirs[0]) < 1e-12, "a bucket that is complete waits for those before it"

# %% [markdown]
# ### 6. Uneven inputs
#
# One rank has a batch less than the other. In the last step it doesn't come to the all-reduce. For
# PyTorch's DDP there is `join`: a rank that has no more data answers the others' all-reduces with
# zeros until all are done. (By default the sum is still divided by 2,
# `divide_by_initial_world_size`, so the last gradient is half as large.) That rank makes no steps
# meanwhile; at the end it gets the weights, and not the optimizer's state.

# %% tags=["trains"]
def uneven(join):
    model = DistributedDataParallel(copy_of_origin())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with model.join() if join else contextlib.nullcontext():
        for x, y in batches[: 3 - dist.get_rank()]:
            optimizer.zero_grad()
            F.cross_entropy(model(share(x)), share(y)).backward()
            optimizer.step()
    momentum = [each["momentum_buffer"] for each in optimizer.state_dict()["state"].values()]
    return list(model.state_dict().values()), momentum


(weights0, momentum0), (weights1, momentum1) = ranks(uneven, True)
print("with join: weights equal:", all(map(torch.equal, weights0, weights1)),
      "momentum equal:", all(map(torch.equal, momentum0, momentum1)))
rank0, rank1 = ranks(outcome, uneven, False)
print(f"without: rank 0: {ending(rank0)}, rank 1: {ending(rank1)}")

# %% [markdown]
# Without `join` rank 0 waits until rank 1 has ended, and then gets an error. Had rank 1 gone on
# without communicating, rank 0 would wait until a deadline, by default half an hour with gloo and
# ten minutes with NCCL (`default_pg_timeout` and `default_pg_nccl_timeout`). Another all-reduce
# would be paired with rank 0's. If the sizes differ, gloo aborts or a rank waits; if they are
# equal, in our trials there was no error.
#
# ### 7. Clipping before the all-reduce
#
# Clipping by the norm is not linear: the mean of clipped gradients is not the clipped mean.
# **Predict:** can you see the mistake by comparing replicas?

# %%
def clipped(before):
    model = DDP(copy_of_origin())
    with model.no_sync() if before else contextlib.nullcontext():
        F.cross_entropy(model(share(batches[0][0])), share(batches[0][1])).backward()
    parameters = list(model.parameters())
    if before:
        nn.utils.clip_grad_norm_(parameters, 0.1)
    model.finish_gradient_synchronization()
    if not before:
        nn.utils.clip_grad_norm_(parameters, 0.1)
    return [p.grad for p in parameters]


# %%
exact = [p.grad.clone() for p in whole.parameters()]  # of the whole batch
scale = 0.1 / torch.cat([g.flatten() for g in exact]).norm()
for before in (False, True):
    found = ranks(clipped, before)
    print("clipped", "before" if before else "after", "the all-reduce: replicas equal:",
          all(map(torch.equal, *found)), "right:",
          apart(found, [g * scale for g in exact]) < 1e-4)

# %% [markdown]
# The replicas are equal either way. Clip after `finish_gradient_synchronization()`.
#
# ### 8. A checkpoint without the optimizer's state
#
# Momentum is state too. Ten steps without a break, against five, a new optimizer, and five more,
# with and without the old one's state. (One process is enough to show it. Under DDP one rank writes
# the checkpoint, from `model.module`: the wrapper's own `state_dict` has `module.` before every
# name.)

# %% tags=["trains"]
def resume(keep):
    net, optimizer = copy_of_origin(), None
    for half in (batches[:5], batches[5:10]):
        state = optimizer and optimizer.state_dict()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        if keep and state:
            optimizer.load_state_dict(state)
        for x, y in half:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return list(net.parameters())


# %%
ten = take_steps(copy_of_origin(), batches[:10], momentum=0.9)
for keep in (True, False):
    print("with it:" if keep else "without it:", "as if never interrupted:",
          apart([resume(keep)], ten) == 0)

# %% [markdown]
# ## Half the bytes
#
# Gradients can be sent as bfloat16: 8 bits of exponent as in float32, and 8 bits of precision
# instead of 24. The messages are added up in bfloat16, too; `write_back` then copies the result
# into float32 gradients. (PyTorch's DDP does this with `register_comm_hook(None,
# bf16_compress_hook)`, from `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`.) What does
# it cost? One epoch from each of three seeds:

# %% tags=["trains", "measured", "few:range(3)=>range(1)"]
class BFloat16(DDP):
    def message(self, bucket):
        return flatten(bucket).bfloat16()


assert 2 * BFloat16.message(None, parameters).nbytes == DDP.message(None, parameters).nbytes
for wrap in (DDP, BFloat16):
    print(f"{wrap.__name__:8}", *(f"{ranks(learn, wrap, 1, seed)[0][0]:.1%}" for seed in range(3)),
          "of the test images right")

# %% [markdown]
# In these runs the accuracies differ by less than from seed to seed (one small network, one epoch).
#
# ## The file
#
# The data are MNIST, or else ten noisy patterns.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def read_mnist(folder, part):
    """Images [n, 1, 28, 28] and labels [n] from MNIST's own files, `part` "train" or "t10k"."""
    arrays = []
    for name, header in (("images-idx3", 16), ("labels-idx1", 8)):
        with gzip.open(os.path.join(folder, f"{part}-{name}-ubyte.gz")) as file:
            arrays.append(torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)[header:])
    return arrays[0].view(-1, 1, 28, 28) / 255 - 0.13, arrays[1].long()


def make_data(n, seed):
    """The same shapes without files: ten patterns under noise."""
    patterns = torch.randn(10, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=source)
    return patterns[labels] + torch.randn(n, 1, 28, 28, generator=source), labels


# %% tags=["file:ddp_train.py"]
# ddp_train.py
def load(folder):
    """A dataset to train on, and images and labels to test on."""
    train, test = ([read_mnist(folder, part) for part in ("train", "t10k")] if folder is not None
                   else (make_data(6400, seed=1), make_data(1000, seed=2)))
    return torch.utils.data.TensorDataset(*train), test


# %% [markdown]
# `torchrun` starts the processes and sets variables that tell each its rank. GPUs are used if there
# is one for each process of this machine, with NCCL; else CPU cores, with gloo.
#
# **On GPUs:** it has run on one only.

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def join():
    """Meets the other processes; returns this one's device."""
    here, local = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


# %% [markdown]
# The loop, and an accuracy of which each rank computes a share:

# %% tags=["file:ddp_train.py", "trains"]
# ddp_train.py
def train_epoch(model, optimizer, loader, device):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()


@torch.no_grad()
def test_accuracy(model, images, labels, device):
    # Each image once: DistributedSampler would repeat some to make the shares equal.
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    counts = torch.zeros(2, device=device)  # right answers, answers
    for x, y in zip(images[mine].split(500), labels[mine].split(500)):
        right = model(x.to(device)).argmax(1) == y.to(device)
        counts += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


# %% [markdown]
# And the program itself. (A notebook is `__main__` too, but no file.)

# %% tags=["file:ddp_train.py"]
# ddp_train.py
def main(data, epochs):
    device = join()
    torch.manual_seed(dist.get_rank())
    train, test = load(data)
    sampler = torch.utils.data.DistributedSampler(train)
    # 64 images on each rank: with more ranks, a step has more images.
    loader = torch.utils.data.DataLoader(train, batch_size=64, sampler=sampler)
    model = DDP(lenet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        train_epoch(model, optimizer, loader, device)
        right = test_accuracy(model, *test, device)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: {right:.1%} right, {dist.get_world_size()} x {device.type}")
    dist.destroy_process_group()


# %% tags=["file:ddp_train.py"]
# ddp_train.py
if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="folder with MNIST's four files; else data is made")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --nproc-per-node=2 ddp_train.py")
    if options.epochs < 1:
        parser.error(f"--epochs {options.epochs}: should be 1 or more")
    main(options.data, options.epochs)

# %% [markdown]
# In a terminal: `torchrun --nproc-per-node=2 notebooks/ddp_train.py`. Here the course's helper
# starts `torchrun`, so that nothing is left running.

# %% tags=["measured"]
from helpers.cluster import torchrun

print(torchrun("ddp_train.py", nproc=2, arguments=["--epochs", "1"], log=None)[0])

# %% [markdown]
# ## Summary
#
# | MXNet | PyTorch | what differs |
# | --- | --- | --- |
# | `KVStore.pushpull` | `all_reduce` | processes in place of devices |
# | `Trainer` | DDP and an optimizer | sums, or means over ranks |
# | `kvstore.create("dist_sync")` (chapter 15) | `init_process_group` | servers, or all-reduce |
#
# - A process for each device. Replicas begin equal by a broadcast of parameters and buffers.
#   Parameters stay equal because all ranks apply the same mean gradient; buffers, such as
#   BatchNorm's, don't unless they are sent again.
# - `Naive` sends a message for each parameter, `Flat` one for all, `Overlapped` while the backward
#   pass goes on. `DDP` joins parameters to buckets and sends those in a fixed order.
# - A parameter without a gradient needs a message too, if another rank has one.
# - Where the computing cores carry the messages, we measured no gain from overlapping buckets
#   beyond the noise. On a simulated link that needs no core, overlap shortened steps in our runs at
#   every limit but 25 MB, and 4 MB was mostly best: smaller buckets pay latency, larger ones leave
#   late.
# - Replicas can agree and be wrong: with a loss that has no gradient, with means of unequal shards,
#   with gradients clipped before they are averaged. Compare with one process.
#
# Next, chapter 15: the same across machines, and what happens when one of them dies.
#
# **Further reading.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training* (2020), arXiv:2006.15704.

# %% [markdown]
# ## Exercises
#
# 1. **In the order of arrival.** If a network calls its layers in another order than it defines
#    them, buckets in reverse order fill badly. Note the order in which gradients arrive in a step,
#    and fill the buckets anew. Why must all ranks take the same order?
# 2. **Two halves of an all-reduce.** Replace the all-reduce of a bucket by `reduce_scatter_single`,
#    after which each rank has a part of the result, and `all_gather_single`. Show that the weights
#    are the same. What could a rank do between the two? (Chapter 07 has a hint.)
# 3. **Uneven shards.** Make `DDP` compute the mean over all images, whatever the sizes of the
#    shards, with one pass a step. Let each forward pass find out how many images there are in all.

# %% [markdown]
# ### Answer 1
#
# Ranks may see different orders, and messages must match, so rank 0 broadcasts its own. Parameters
# that didn't arrive come last.

# %% tags=["solution"]
class Reordered(DDP):
    def __init__(self, module, bucket_size_mb=25):
        super().__init__(module, bucket_size_mb)
        self.place = {p: i for i, p in enumerate(self.trained)}
        self.size, self.order, self.early = bucket_size_mb * 2**20, {}, 0

    def mark_ready(self, p):
        self.order.setdefault(self.place[p])  # in the first pass of a step
        self.early = len(self.sent)  # in the end: those sent before the last gradient came
        super().mark_ready(p)

    def fill_anew(self):
        order = torch.tensor([*(self.order | dict.fromkeys(self.place.values()))])
        dist.broadcast(order, src=0)
        self.buckets = fill_buckets([self.trained[i] for i in order], self.size)
        self.order.clear()


# %% [markdown]
# Each rank calls the layers in an order of its own; buckets of one parameter, two passes a step:

# %% tags=["solution"]
class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.second, self.third, self.first = (nn.Linear(9, 9) for _ in range(3))

    def forward(self, x):
        branches = [self.second, self.third][:: 1 - 2 * dist.get_rank()]
        return sum(layer(self.first(x)) for layer in branches)


def sent_early():
    model, found = Reordered(Permuted(), 1e-6), []
    for _ in range(3):
        with model.no_sync():
            model(torch.ones(2, 9)).sum().backward()
        model(torch.ones(2, 9)).sum().backward()
        model.finish_gradient_synchronization()
        found.append(model.early)
        model.fill_anew()
    return found, [model.place[p] for (p,) in model.buckets]


mine, other = ranks(sent_early)
assert mine == other and len(mine[1]) == 6, "the same buckets, each parameter once"
assert mine[0] == [1, 5, 5], "one of six before the last gradient, then five"

# %% [markdown]
# ### Answer 2
#
# Between the two each rank has the mean of its part only: it could update just these parameters,
# with the optimizer's state for just these, and then gather *weights*. That is stage 1 of ZeRO.

# %% tags=["solution"]
class InHalves(DDP):
    def all_reduce(self, buffer):
        whole = F.pad(buffer, (0, -len(buffer) % self.world))  # parts of equal size
        part = torch.empty_like(whole[: len(whole) // self.world])
        dist.reduce_scatter_single(part, whole)
        dist.all_gather_single(whole, part)
        buffer.copy_(whole[: len(buffer)])
        return Arrival(at=0)  # has arrived


assert apart(ranks(train, lambda net: InHalves(net, 1e-6), batches, world=3), truth) < 1e-12

# %% [markdown]
# ### Answer 3
#
# The gradient of a shard's mean is weighted by $k\,n_r/n$, with $n_r$ images of $n$ on one of $k$
# ranks.

# %% tags=["solution"]
class Weighted(DDP):
    def forward(self, x):
        images = torch.tensor(float(len(x)))
        dist.all_reduce(images)
        self.factor = self.world * len(x) / images.item()
        return super().forward(x)

    def message(self, bucket):
        buffer = flatten(bucket)
        buffer[: -len(bucket)] *= self.factor  # not what says who has a gradient
        return buffer


# %% [markdown]
# Batches of five on three ranks: two images, two and one.

# %% tags=["solution"]
fives = [(x[:5], y[:5]) for x, y in batches]
whole = take_steps(copy_of_origin(), fives)
assert apart(ranks(train, Weighted, fives, world=3), whole) < 1e-12, "the mean over all images"
assert apart(ranks(train, DDP, fives, world=3), whole) > 1e-3, "the mean of the ranks' means isn't"
