# %% [markdown]
# # 14 · DDP from scratch
#
# PyTorch trains on several devices with `DistributedDataParallel`, DDP for short: a process for
# each device, and gradients averaged while the backward pass still runs. Here we build it.
#
# > **What you'll do:** average gradients in four ways, make a class of the last, compare it with
# > PyTorch's, and time it.
# >
# > **What you'll learn:** what DDP sends, when, and in which order; when a second process pays; how
# > all replicas can be equal, and wrong.
# >
# > **What you need:** chapters 03 and 04, no GPU, and PyTorch: `make setup TORCH=1` installs it.
# > Reading takes {reading time}, running about a minute on two cores.
#
# New to PyTorch? Chapter 13 translates MXNet's words. Its `loss` is a mean by default, so here
# means are averaged, where chapter 04 added up sums.

# %% [markdown]
# Some folded cells make a program that you keep, [ddp_train.py](ddp_train.py). `dist` is
# `torch.distributed`, `F` is `torch.nn.functional`.

# %% tags=["torch", "fold", "file:ddp_train.py"]
# define: the program's imports; start it by torchrun --standalone --nproc-per-node=2 ddp_train.py
"""Trains LeNet, a process for each device. --help lists the options."""

import argparse
import contextlib
import gzip
import os
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# %% [markdown]
# ## A process for each device
#
# Until now one Python process fed all devices. From here on each device has a process of its own,
# with one replica of the network and one shard of the batch. All run the same code. A process's
# number is its *rank*. They call collectives (chapter 03), here those of gloo, PyTorch's library
# for CPUs.
#
# A notebook is one process. So `ranks(function, world=3)` runs `function()` in three others, with
# this notebook's variables, and lists what they returned. Without `world` it takes two.
# `ranks(function, 5)` calls `function(5)`.

# %% tags=["fold", "file:ranks.py"]
# define: `ranks` starts processes, and ends them all when one fails or takes too long
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
# The first network interface, on Linux the loopback, which no other machine can reach.
VARIABLES = {"GLOO_SOCKET_IFNAME": socket.if_nameindex()[0][1], "TORCH_CPP_LOG_LEVEL": "ERROR"}


def on_rank(rank, world, folder, seconds, part, given):
    """Meets the other ranks in a file and runs `part`; an alarm ends it, whatever it waits for."""
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


def first_cause(tasks):
    """The error of one rank; those that it caused, broken connections, come last."""
    errors = [task.exception() for task in wait(tasks, 2).done if task.exception()]
    for error in errors:
        if "gloo/transport" not in str(error):
            return error
    return errors[0]


def ranks(part, *given, world=2, seconds=60):
    """What `part(*given)` returned on each rank; a rank's error; TimeoutError after `seconds`."""
    pool = get_reusable_executor(4, timeout=600, env=VARIABLES)
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for rank in range(world):
            tasks.append(pool.submit(on_rank, rank, world, folder, seconds, part, given))
        try:
            done, running = wait(tasks, seconds, FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                raise first_cause(tasks)
            if running:
                raise TimeoutError(f"{len(running)} of {world} ranks still ran after {seconds} s")
        except BaseException:
            pool.shutdown(kill_workers=True)
            raise
    return [task.result() for task in tasks]

# %% [markdown]
# **Predict:** rank 0 holds ones, rank 1 twos, rank 2 threes. `all_reduce` adds in place. What does
# each of three ranks hold then?

# %%
def hello():
    numbers = torch.ones(2) * (dist.get_rank() + 1)
    dist.all_reduce(numbers)
    return numbers


print(ranks(hello, world=3))

# %% tags=["fold"]
# check: on 2 and 4 ranks all get the sum; if one waits for ever, a TimeoutError ends all
import os
import signal

import psutil


def outcome(function, *given, **options):
    """What a function returns, or its error."""
    try:
        return function(*given, **options)
    except Exception as error:
        return error.with_traceback(None)  # the traceback would keep the model alive


def wait_for_rank_1():
    if dist.get_rank() == 1:
        signal.pause()  # for ever
    dist.all_reduce(torch.zeros(3))


for world in (2, 4):
    for numbers in ranks(hello, world=world):
        assert torch.equal(numbers, torch.full((2,), world * (world + 1) / 2))
processes = ranks(os.getpid, world=4)
hung = outcome(ranks, wait_for_rank_1, seconds=1)
assert isinstance(hung, TimeoutError)
assert not any(map(psutil.pid_exists, processes)), "one was not ended"
print(hung)

# %% [markdown]
# ## What must come out
#
# All ranks must end with the gradients that one process finds from the whole batch. Our `SmallNet`
# has three dense layers, `first`, `second` and `last`. A network may have several types of numbers,
# so `last` has 8 bytes a number, the others 4.

# %% tags=["fold"]
# define: SmallNet, whose last layer is float64; own_replica; `gradients`, by parameters' names
class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2).double()  # 8 bytes a number; the others have 4

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return self.last(x.double())


def own_replica():
    torch.manual_seed(dist.get_rank())
    return SmallNet()


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}

# %% [markdown]
# The whole batch of 12:

# %%
torch.manual_seed(0)
net = SmallNet()
x = torch.randn(12, 4)
y = torch.arange(12) % 2
F.cross_entropy(net(x), y).backward()
whole = gradients(net)  # to be reached in every way
print(whole["last.bias"])

# %% [markdown]
# ## Replicas that begin equal
#
# Each process makes its own network. `own_replica()` takes the rank as its seed: rank 0 gets the
# weights of `net` above, rank 1 gets others. So rank 0 first sends its own to all. `p.detach()`
# shares the numbers of `p`, without autograd.

# %%
def begin_equal():
    net = own_replica()
    before = net.first.bias[0].item()
    for p in net.parameters():
        dist.broadcast(p.detach(), src=0)  # from rank 0 to all
    return before, net.first.bias[0].item()


for before, after in ranks(begin_equal):
    print(f"{before:.4f} -> {after:.4f}")

# %% [markdown]
# `broadcast_module` does so, and sends *buffers* too, such as BatchNorm's running statistics. Later
# each rank keeps its own.

# %% tags=["fold", "file:ddp_train.py"]
# define: broadcast_module, which gives every rank the parameters and buffers of rank 0
def broadcast_module(module):
    """Give every rank the parameters and buffers of rank 0."""
    for tensor in [*module.parameters(), *module.buffers()]:
        values = tensor.detach().contiguous()  # gloo sends only what is stored row by row
        dist.broadcast(values, src=0)
        tensor.detach().copy_(values)

# %% [markdown]
# ## Four ways to send
#
# When should gradients be sent, and in how many messages? For a network of four layers:
#
# ![Timelines of a backward pass of four layers. Naive: four messages after the pass. Flat: one
# message after the pass. Overlapped: four messages, beginning during the pass. Buckets: two
# messages, the first during the pass; it ends first.](src/drawings/ddp_ways.svg)
#
# A short message is mostly latency (chapter 03), so `all` takes little longer than `g1`. That is
# why four messages end later than one, even if they begin earlier.
#
# The fourth way will be a class, `SmallDDP`, after two sections on what it needs. In all,
# `equal_replica()` has rank 0's weights, and `shard_loss(net)` is the loss on the rank's
# shard, its rows of `x` and `y`.

# %% tags=["fold"]
# define: equal_replica; own_shard; shard_loss; half_loss, of half a shard; largest_difference
from helpers.compare import largest_difference


def equal_replica():
    net = own_replica()
    broadcast_module(net)
    return net


def own_shard():
    k = dist.get_world_size()
    rank = dist.get_rank()
    return x.tensor_split(k)[rank], y.tensor_split(k)[rank]


def shard_loss(net):
    x_shard, y_shard = own_shard()
    return F.cross_entropy(net(x_shard), y_shard)


def half_loss(net, half):
    x_shard, y_shard = own_shard()
    return F.cross_entropy(net(x_shard.chunk(2)[half]), y_shard.chunk(2)[half])

# %% [markdown]
# ### Naive: a message for each gradient
#
# Each way is a function of a network and its loss, and runs the backward pass:

# %%
def naive(net, loss):
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

# %% [markdown]
# We look at one gradient, and `largest_difference` compares all:

# %%
def gradients_after(way):
    net = equal_replica()
    way(net, shard_loss(net))
    return gradients(net)


def on_two_ranks(way):
    for found in ranks(gradients_after, way):
        print(found["last.bias"])
        assert largest_difference(found, whole) < 1e-5


on_two_ranks(naive)

# %% [markdown]
# Both have what one process found: their shards are equally large, so the mean of their means is
# the batch's mean. (Unequal shards give the wrong mean of chapter 12, with PyTorch's DDP too;
# exercise 3 mends it.) **Predict:** if we forget to divide, do the ranks disagree?

# %%
def without_division(net, loss):
    loss.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)


on_rank_0, on_rank_1 = ranks(gradients_after, without_division)
print(on_rank_0["last.bias"])
print(on_rank_1["last.bias"])

# %% [markdown]
# They agree, on twice the right gradient. **Replicas can be equal and wrong.** So we compare with
# one process.

# %% tags=["fold"]
# check: right on three ranks too; we notice other weights, a missing layer, a missing division
def gradients_from_other_weights(way):
    net = own_replica()
    way(net, shard_loss(net))
    return gradients(net)


def without_first_layer(net, loss):
    naive(nn.ModuleList([net.second, net.last]), loss)


assert largest_difference(on_rank_0, on_rank_1) == 0
twice = {name: 2 * gradient for name, gradient in whole.items()}
assert largest_difference(ranks(gradients_after, without_division), twice) < 1e-5
assert largest_difference(ranks(gradients_after, naive, world=3), whole) < 1e-5
assert largest_difference(ranks(gradients_from_other_weights, naive), whole) > 1e-2
for wrong in (without_first_layer, without_division):
    assert largest_difference(ranks(gradients_after, wrong), whole) > 1e-2

# %% [markdown]
# ### Flat: one message
#
# Naive sends six messages, two a layer, and each costs a latency. One array can hold all gradients.
# To unpack it, we cut it into pieces of the parameters' sizes, and copy each into its gradient:

# %%
def pack(parameters):
    pieces = [p.grad.flatten() for p in parameters]
    return torch.cat(pieces)


def unpack(packed, parameters):
    sizes = [p.numel() for p in parameters]
    for p, piece in zip(parameters, packed.split(sizes)):
        p.grad.copy_(piece.view_as(p))

# %%
def flat(net, loss):
    loss.backward()
    parameters = list(net.parameters())
    packed = pack(parameters)
    dist.all_reduce(packed)
    packed /= dist.get_world_size()
    unpack(packed, parameters)


on_two_ranks(flat)

# %% [markdown]
# An array has one type. So `torch.cat` made 8-byte numbers of all, although most have 4.
#
# ### Overlapped: during the backward pass
#
# A *hook* is a function that PyTorch calls, here when a parameter's gradient is complete.
# **Predict:** in which order?

# %%
net = SmallNet()
name_of = {p: name for name, p in net.named_parameters()}


def print_name(p):
    print(name_of[p])


for p in net.parameters():
    p.register_post_accumulate_grad_hook(print_name)
F.cross_entropy(net(x), y).backward()

# %% [markdown]
# From the last layer to the first, each bias before its weight. So now the hook sends. With
# `async_op=True` `all_reduce` returns at once; what it returns can be waited for:

# %%
def overlapped(net, loss):
    sent = []

    def send(p):
        work = dist.all_reduce(p.grad, async_op=True)
        sent.append((p, work))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(send)
    loss.backward()  # calls send for each gradient
    for p, work in sent:
        work.wait()
        p.grad /= dist.get_world_size()


on_two_ranks(overlapped)

# %% tags=["fold"]
# check: overlapped sends a gradient before the pass comes to the next layer, naive after all
from unittest import mock


def what_happens(way):
    warnings.simplefilter("ignore")  # the first layer's input needs no gradient
    net = equal_replica()
    log = []
    all_reduce = dist.all_reduce

    def noted(gradient, **options):
        for name, p in net.named_parameters():
            if p.grad is gradient:
                log.append(f"    {name} sent")
        return all_reduce(gradient, **options)

    for name, layer in net.named_children():
        layer.register_full_backward_pre_hook(lambda *_, name=name: log.append(f"into {name}"))

    with mock.patch.object(dist, "all_reduce", noted):
        way(net, shard_loss(net))
    return log


early = ranks(what_happens, overlapped)
late = ranks(what_happens, naive)
assert early[0] == early[1] and sorted(early[0]) == sorted(late[0])
assert early[0].index("    last.weight sent") < early[0].index("into second")
assert late[0][:3] == ["into last", "into second", "into first"]
assert largest_difference(ranks(gradients_after, overlapped, world=3), whole) < 1e-5
assert largest_difference(ranks(gradients_after, flat, world=3), whole) < 1e-5
for line in early[0]:
    print(line)

# %% [markdown]
# In this log `last` is sent before the pass goes into `second`.
#
# ## Buckets
#
# Overlapped sends six messages again, flat one. DDP goes between: several gradients share a
# *bucket*, which leaves when its last gradient has come.
#
# ![Moving picture: a backward pass goes from layer 4 to layer 1. The gradients of layers 4 and 3
# fill bucket 1, which is sent while layers 2 and 1 are computed; theirs fill bucket
# 2.](src/drawings/ddp_buckets.svg)
#
# `fill_buckets` takes parameters as their gradients come. A bucket has one type of numbers and at
# most so many bytes. In `first` and `second` the bias has 16 bytes, the weight 64. **Predict:**
# which parameters fit into one bucket of 100 bytes?

# %% tags=["fold", "file:ddp_train.py"]
# define: fill_buckets, lists of parameters of one type with at most so many bytes
def fill_buckets(parameters, most):
    """Lists of parameters of one type: at most `most` bytes, or a single larger parameter."""
    buckets = []
    latest = {}  # for each type and device, the bucket that is being filled
    for p in parameters:
        kind = (p.dtype, p.device)
        filled = sum(other.nbytes for other in latest.get(kind, []))
        if kind not in latest or filled + p.nbytes > most:
            latest[kind] = []
            buckets.append(latest[kind])
        latest[kind].append(p)
    return buckets

# %%
backwards = list(net.parameters())
backwards.reverse()
for bucket in fill_buckets(backwards, 100):
    print([name_of[p] for p in bucket])

# %% [markdown]
# `second` and `first.bias` have 16 + 64 + 16 bytes; `first.weight` would be too much. `last` is
# apart for its type.
#
# ## Parameters that nobody used
#
# If a rank's forward pass leaves out a parameter, its gradient stays `None` and its hook isn't
# called. The other ranks wait for that bucket, so the rank must send zeros. But what *no* rank used
# should keep `None`: then an optimizer leaves it alone. (With zeros, weight decay would shrink it.)
#
# So a *flag* for each gradient travels with the message: 1 if it is there, 0 if not. **Where a
# flag's mean is 0, nobody had that gradient. Where it is more, all ranks take the mean.**

# %% tags=["fold", "file:ddp_train.py"]
# define: flatten and write_back, which are pack and unpack with a flag for each gradient
def flatten(bucket):
    """The gradients of a bucket in one array; then, for each, 1 if it is there and 0 if not."""
    pieces = []
    flags = []
    for p in bucket:
        if p.grad is None:
            pieces.append(torch.zeros_like(p).flatten())
            flags.append(0)
        else:
            pieces.append(p.grad.flatten())
            flags.append(1)
    pieces.append(torch.tensor(flags).to(pieces[0]))  # to the type and device of the gradients
    return torch.cat(pieces)


def write_back(bucket, packed):
    """Copy the means in `packed` into the gradients of a bucket."""
    sizes = [p.numel() for p in bucket]
    sizes.append(len(bucket))
    pieces = packed.split(sizes)
    flags = pieces[-1]
    for p, mean, flag in zip(bucket, pieces, flags):
        if p.grad is None and flag != 0:  # another rank has one
            p.grad = torch.zeros_like(p)
        if p.grad is not None:
            p.grad.copy_(mean.view_as(p))

# %% [markdown]
# In a bucket of three, both ranks use the first, rank 0 the second, nobody the third:

# %% tags=["fold"]
# check: what both ranks pack, its mean, and what each of them then has
def partly_used():
    by_both = nn.Parameter(torch.zeros(1))
    by_rank_0 = nn.Parameter(torch.zeros(1))
    by_nobody = nn.Parameter(torch.zeros(1))
    loss = 3 * by_both
    if dist.get_rank() == 0:
        loss = loss + 4 * by_rank_0
    loss.backward()
    bucket = [by_both, by_rank_0, by_nobody]
    packed = flatten(bucket)
    mean = packed / dist.get_world_size()
    dist.all_reduce(mean)
    write_back(bucket, mean)
    return packed.tolist(), mean.tolist(), [p.grad for p in bucket]


def print_row(name, values):
    texts = []
    for value in values:
        texts.append("None" if value is None else f"{float(value):g}")
    print(f"{name:20}" + "".join(f"{text:>8}" for text in texts))


on_ranks = ranks(partly_used)
print("                          gradients            their flags")
for rank, (packed, mean, grads) in enumerate(on_ranks):
    print_row(f"rank {rank} packs", packed)
print_row("the mean", on_ranks[0][1])
for rank, (packed, mean, grads) in enumerate(on_ranks):
    print_row(f"rank {rank} then has", grads)


expected = [[3, 4, 0, 1, 1, 0], [3, 0, 0, 1, 0, 0]]
for rank, (packed, mean, grads) in enumerate(on_ranks):
    assert packed == expected[rank]
    assert mean == [3, 2, 0, 1, 0.5, 0]
    assert grads == [torch.tensor([3.0]), torch.tensor([2.0]), None]

# %% [markdown]
# ## A small DDP
#
# When does a bucket leave? Once all of its gradients have come, and all buckets before it have
# left. We play a pass, and send nothing:

# %%
waiting = fill_buckets(backwards, 100)
ready = set()
for p in backwards:  # as their gradients come
    print(name_of[p])
    ready.add(p)
    while waiting and ready.issuperset(waiting[0]):  # the next bucket is complete
        bucket = waiting.pop(0)
        print("    a bucket of", len(bucket), "leaves")

# %% [markdown]
# Why wait for those before it? *All ranks must send in the same order.* Here rank 1 sends its two
# messages in another order than rank 0. Right would be 2 and 20. **Predict** what comes out.

# %%
def in_another_order():
    ones = torch.ones(1)
    tens = torch.full((1,), 10.0)
    messages = [ones, tens]
    if dist.get_rank() == 1:
        messages.reverse()
    for message in messages:
        dist.all_reduce(message)
    return ones.item(), tens.item()


on_two = ranks(in_another_order)
print(on_two[0])
assert on_two == [(11, 11), (11, 11)], "not 2 and 20"

# %% [markdown]
# First messages are added to first ones, and nobody complains. (It can happen: where the ranks'
# data take other ways through a network, gradients come in other orders.)
#
# Now the fourth way, a class, since its hook is set once, before the first pass. The hook is
# `mark_ready`:

# %%
class SmallDDP(nn.Module):
    def __init__(self, module, most):
        super().__init__()
        broadcast_module(module)
        self.module = module
        parameters = list(module.parameters())
        self.buckets = fill_buckets(reversed(parameters), most)
        for p in parameters:
            p.register_post_accumulate_grad_hook(self.mark_ready)
        self.begin_step()

    def begin_step(self):
        self.ready = set()  # parameters whose gradients have come
        self.waiting = list(self.buckets)  # those that haven't left
        self.sent = []  # buckets that have left, each packed, and what to wait for

    def forward(self, x):
        return self.module(x)

    def mark_ready(self, p):  # called when the gradient of p is complete
        self.ready.add(p)
        while self.waiting and self.ready.issuperset(self.waiting[0]):
            bucket = self.waiting.pop(0)
            self.send(bucket)

    def send(self, bucket):
        packed = flatten(bucket) / dist.get_world_size()  # before the sum, which could overflow
        work = dist.all_reduce(packed, async_op=True)
        self.sent.append((bucket, packed, work))

    def finish_gradient_synchronization(self):
        for bucket in self.waiting:  # those with a gradient that didn't come
            self.send(bucket)
        for bucket, packed, work in self.sent:
            work.wait()
            write_back(bucket, packed)
        self.begin_step()

# %%
def with_small_ddp(most):
    model = SmallDDP(own_replica(), most)
    shard_loss(model).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


for found in ranks(with_small_ddp, 100):
    print(found["last.bias"])
    assert largest_difference(found, whole) < 1e-5

# %% [markdown]
# And if rank 1 leaves out the layer `second`? With `overlapped` rank 0 waits for it in vain, until
# an error ends both. With `SmallDDP` both get the right gradients, `expected`:

# %% tags=["fold"]
# define: `with_second_left_out`, on rank 1; `expected`, its right gradients; `overlapped` fails
class LeftOut(SmallNet):
    def forward(self, x):
        x = torch.tanh(self.first(x))
        if dist.get_rank() == 0:
            x = torch.tanh(self.second(x))
        return self.last(x.double())


def with_second_left_out(wrap):
    torch.manual_seed(dist.get_rank())
    model = wrap(LeftOut(), 100)
    shard_loss(model).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


torch.manual_seed(0)
net = SmallNet()
outputs_of_rank_1 = net.last(torch.tanh(net.first(x[6:])).double())
loss = F.cross_entropy(net(x[:6]), y[:6]) + F.cross_entropy(outputs_of_rank_1, y[6:])
(loss / 2).backward()
expected = gradients(net)


def overlapped_with_second_left_out():
    net = LeftOut()
    overlapped(net, shard_loss(net))


error = outcome(ranks, overlapped_with_second_left_out, seconds=10)
assert isinstance(error, TimeoutError) or "gloo" in str(error), "rank 0 waits for rank 1"

# %%
for found in ranks(with_second_left_out, SmallDDP):
    print(found["second.bias"])
    assert largest_difference(found, expected) < 1e-5

# %% [markdown]
# Both ranks have the mean of rank 0's gradient of `second` and rank 1's zeros: half of rank 0's.
# That is DDP: **each gradient becomes its mean over ranks, in buckets that leave while the pass
# goes on.** *Somebody must wait at the end of the pass*, so you call
# `finish_gradient_synchronization`. (PyTorch's DDP waits within `backward()`.)

# %% tags=["fold"]
# check: buckets leave during the pass, in their order, and are right on 2 to 4 ranks
def how_many_leave(most):
    model = SmallDDP(own_replica(), most)
    found = []
    second = model.module.second
    second.register_full_backward_pre_hook(lambda *_: found.append(len(model.sent)))
    shard_loss(model).backward()
    found.append(len(model.sent))
    model.finish_gradient_synchronization()
    return found


class DefinedInAnotherOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.called_last = nn.Linear(4, 2)
        self.called_first = nn.Linear(4, 4)  # defined last, so its buckets are the first

    def forward(self, x):
        return self.called_last(self.called_first(x))


def too_early():
    warnings.simplefilter("ignore")  # the first layer's input needs no gradient
    model = SmallDDP(DefinedInAnotherOrder(), 1)
    found = []
    called_first = model.module.called_first
    called_first.register_full_backward_pre_hook(lambda *_: found.append(len(model.sent)))
    model(x).sum().backward()
    found.append(len(model.sent))
    model.finish_gradient_synchronization()
    return found


assert ranks(too_early) == [[0, 4]] * 2, "called_last's are complete, but must wait"
early, by_the_end = ranks(how_many_leave, 100)[0]
print("when the pass goes into `second`,", early, "of 3 buckets has left; at its end", by_the_end)
for world in (2, 3, 4):
    for most, early, of_how_many in ((1, 2, 6), (100, 1, 3), (1000, 1, 2)):
        assert ranks(how_many_leave, most, world=world) == [[early, of_how_many]] * world
        assert largest_difference(ranks(with_small_ddp, most, world=world), whole) < 1e-5

# %% [markdown]
# ## DDP, whole
#
# The program's class is folded. It is `SmallDDP`, with frozen parameters (`requires_grad=False`)
# left out, with `no_sync` (below), and with a guard, which refuses most of what would go wrong in
# silence. (What it can't notice is in deeper: DDP's cases.)

# %% tags=["fold", "file:ddp_train.py"]
# define: what DDP refuses, each with its reason and the way out
UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass; to "
              "add up several, run all but the last in no_sync(). (Two DDPs of one module, or a "
              "reentrant checkpoint of a layer used twice, end here too.)")
CHANGED = ("a gradient was changed or removed after the backward pass and before its mean was "
           "there: clip, scale or clear after finish_gradient_synchronization()")
NEW = ("a parameter was unfrozen, added or replaced after DDP was made: its gradient would stay "
       "this rank's own. Do it before, or make DDP(model.module) anew")
SPARSE = "a sparse gradient can't be averaged here: make it dense, Embedding(..., sparse=False)"
GRAPH = ("backward(create_graph=True) can't be averaged: for a derivative of a gradient call "
         "torch.autograd.grad(..., create_graph=True), then backward()")
COPIED = "a DDP can't be copied or saved, its module can: copy or save model.module"


def check_module(module, bucket_size_mb):
    """Raise ValueError unless all ranks can wrap their `module`."""
    if not bucket_size_mb > 0:
        raise ValueError(f"bucket_size_mb={bucket_size_mb}: should be more than 0")
    for part in module.modules():
        if isinstance(part, DDP | nn.parallel.DistributedDataParallel):
            raise ValueError("module is a DDP already, or has one in it: wrap its .module")
    kinds = [bucket_size_mb]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta or nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no values yet: initialise it before DDP is made")
        kinds.append((name, tensor.shape, tensor.dtype, tensor.requires_grad))
    on_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(on_ranks, kinds)
    if any(each != kinds for each in on_ranks):
        raise ValueError("the ranks' modules differ in their parameters or buffers, or the ranks "
                         "in bucket_size_mb")


def set_hooks(parameters, method):
    """Have `method(p)` called when the gradient of p is complete, as long as its object lives."""
    weak = weakref.WeakMethod(method)  # the method itself would keep its object alive for ever
    for p in parameters:
        hook = p.register_post_accumulate_grad_hook(lambda p: weak()(p))
        weakref.finalize(method.__self__, hook.remove)


class Guard:
    """Notices when gradients are used, changed or missed before all ranks have their mean."""

    def __init__(self, parameters):
        self.parameters = set(parameters)
        self.came = {}  # parameter: its gradient when it came, and how often changed by then
        before_step = weakref.WeakMethod(self.before_step)
        for register in register_optimizer_step_pre_hook, register_optimizer_step_post_hook:
            hook = register(lambda optimizer, *_: before_step()(optimizer))  # after, for a closure
            weakref.finalize(self, hook.remove)

    def note(self, p):
        if p.grad is None:
            raise RuntimeError(CHANGED)
        if p.grad.layout != torch.strided:
            raise TypeError(SPARSE)
        if p.grad.requires_grad:
            raise RuntimeError(GRAPH)
        self.came[p] = (p.grad, p.grad._version)

    def before_forward(self, module, ready):
        if not torch.is_grad_enabled():
            return
        if ready:
            raise RuntimeError(UNFINISHED)
        for p in module.parameters():
            if p.requires_grad and p not in self.parameters:
                raise RuntimeError(NEW)

    def before_averaging(self, ready):
        for p, (gradient, version) in self.came.items():
            if p.grad is None and p not in ready:
                continue  # dropped after no_sync, and nothing of it was sent
            if p.grad is not gradient or gradient._version != version:
                raise RuntimeError(CHANGED)
        self.came.clear()

    def before_step(self, optimizer):
        in_backward = torch._C._current_graph_task_id() != -1  # a hook that calls step()
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in self.parameters and in_backward or p in self.came and p.grad is not None:
                    raise RuntimeError(UNFINISHED)

# %% tags=["fold", "file:ddp_train.py"]
# define: DDP, whole
class DDP(nn.Module):
    """Averages gradients over all ranks, in buckets, during the backward pass.

    A step: forward, backward, finish_gradient_synchronization(); then unscale, clip, step. What
    one rank does, all must do: as many steps, load_state_dict(), a change of weights by hand.
    Gradients from torch.autograd.grad() stay the rank's own, and so do buffers after the start.
    Ranks count alike, however many examples each has. Send nothing else between the backward
    pass and its finish. All else that isn't refused is as in PyTorch's with
    find_unused_parameters=True and forward_sync_buffers=False, or right where PyTorch's isn't.
    """

    def __init__(self, module, bucket_size_mb=25):
        super().__init__()
        check_module(module, bucket_size_mb)
        broadcast_module(module)
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.buckets = fill_buckets(reversed(self.trained), bucket_size_mb * 2**20)
        self.ready = set()  # parameters whose gradients have come
        self.sent = []  # for each bucket that has left: its packed gradients, and what to wait for
        self.synchronizing = True  # False in no_sync()
        self.guard = Guard(self.trained)
        set_hooks(self.trained, self.mark_ready)

    def forward(self, *inputs, **options):
        self.guard.before_forward(self.module, self.ready)
        return self.module(*inputs, **options)

    def mark_ready(self, p):
        """Called when the gradient of `p` is complete."""
        if p in self.ready:
            raise RuntimeError(UNFINISHED)
        self.guard.note(p)
        if not self.synchronizing:
            return
        self.ready.add(p)
        while len(self.sent) < len(self.buckets):
            next_bucket = self.buckets[len(self.sent)]  # the first that hasn't left
            if not self.ready.issuperset(next_bucket):
                break  # a gradient of it is missing
            self.send(next_bucket)

    def send(self, bucket):
        packed = flatten(bucket) / dist.get_world_size()  # first: a sum could overflow
        work = dist.all_reduce(packed, async_op=True)
        self.sent.append((packed, work))

    def finish_gradient_synchronization(self):
        """Send what is left, wait, and put the means into the gradients."""
        self.guard.before_averaging(self.ready)
        while len(self.sent) < len(self.buckets):
            next_bucket = self.buckets[len(self.sent)]
            self.send(next_bucket)
        for bucket, (packed, work) in zip(self.buckets, self.sent):
            work.wait()
            write_back(bucket, packed)
        self.sent.clear()
        self.ready.clear()

    @contextlib.contextmanager
    def no_sync(self):
        """Backward passes in this block only add to the rank's own gradients."""
        before = self.synchronizing
        self.synchronizing = False
        try:
            yield
        finally:
            self.synchronizing = before

    def __getstate__(self):
        raise TypeError(COPIED)

# %% [markdown]
# Does it equal PyTorch's, for two types, a weight used twice, a frozen layer, an unused one, and
# BatchNorm? (PyTorch's gets `find_unused_parameters=True`, and `forward_sync_buffers=False`, by
# which buffers stay the rank's own.)

# %% tags=["fold", "trains"]
# check: 20 steps end with PyTorch's own weights; gradients are one process's, on 2 to 4 ranks
from functools import partial

from torch.nn.parallel import DistributedDataParallel


class HardNet(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.unused = nn.Linear(8, 8)  # defined first: the others' buckets don't wait for its own
        self.stem = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight  # tied
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.double()
        self.inner.to(inner)

    def forward(self, x):
        x = self.norm(self.stem(x))
        x = torch.relu(self.first(self.inner(x.to(self.inner.weight.dtype)).double()))
        return self.last(self.frozen(x))


def torch_ddp(net):
    return DistributedDataParallel(net, find_unused_parameters=True, forward_sync_buffers=False)


def train_hard_net(wrap, inner):
    torch.manual_seed(dist.get_rank())
    net = HardNet(inner)
    net.norm.running_mean.normal_()  # the rank's own, so that rank 0's must be sent
    model = wrap(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=0.1)
    torch.manual_seed(100 + dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(4, 6).double()).square().mean().backward()
        if isinstance(model, DDP):
            complete = 0  # buckets, up to the first that waits for a gradient
            for bucket in model.buckets:
                if any(p.grad is None for p in bucket):
                    break
                complete += 1
            assert len(model.sent) == complete, "each has been sent by now"
            model.finish_gradient_synchronization()
        optimizer.step()
    assert net.unused.weight.grad is None, "nobody used it, so nobody has a gradient"
    return list(net.state_dict().values())


def of_buckets(most, net):
    return DDP(net, most / 2**20)


for world in (2, 3):
    for inner, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        theirs = ranks(train_hard_net, torch_ddp, inner, world=world)
        for most in (1, 700, 10**6):
            ours = ranks(train_hard_net, partial(of_buckets, most), inner, world=world)
            for mine, reference in zip(ours, theirs):
                assert largest_difference(mine, reference) < tolerance, (world, inner, most)
print("2 and 3 ranks, three sizes of buckets: ours equals PyTorch's,")
print("to 1e-12 in float64, and to 1e-5 with a layer in float32")


def with_ddp(most):
    model = DDP(own_replica(), most / 2**20)
    shard_loss(model).backward()
    sent_early = len(model.sent)
    model.finish_gradient_synchronization()
    return sent_early, gradients(model.module)


for world in (2, 3, 4):
    for most, of_how_many in ((1, 6), (100, 3), (1000, 2)):
        for sent_early, found in ranks(with_ddp, most, world=world):
            assert largest_difference(found, whole) < 1e-5
            assert sent_early == of_how_many, "each bucket leaves when it is complete"
assert largest_difference(ranks(with_second_left_out, DDP), expected) < 1e-5

# %% [markdown]
# Three of the mistakes that the guard refuses:

# %% tags=["fold", "trains"]
# check: two backward passes, a step before the end and clipping before the end are all refused
def forgotten():
    model = DDP(own_replica())
    shard_loss(model).backward()
    shard_loss(model)


def stepped_too_early():
    model = DDP(own_replica())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shard_loss(model).backward()
    optimizer.step()


def clipped_too_early():
    model = DDP(own_replica())
    shard_loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.finish_gradient_synchronization()


refusals = {forgotten: UNFINISHED, stepped_too_early: UNFINISHED, clipped_too_early: CHANGED}
for mistake, refusal in refusals.items():
    for error in ranks(outcome, mistake):
        assert isinstance(error, RuntimeError) and str(error) == refusal
    print(f"{mistake.__name__}: {refusal.partition(';')[0]}")

# %% [markdown]
# ## Does it pay?
#
# In the drawing of the four ways a link carries the messages. Here the cores that compute do so,
# too. **Predict:** is any way faster than one process with the whole batch? We take 22 dense layers
# with 44 gradients, 22 MB in all: much to send for little compute. `alone` is one process with 64
# images. `local` is two with 32 each that send nothing. Each process has one thread.

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 15=>ROUNDS = 4"]
# measure: messages and ms a step in each way, in turns; what a second process gains and pays
from time import perf_counter

import numpy as np

from helpers.plotting import BLUE, GREY, figure, show
from helpers.timing import spread

ROUNDS = 15


def deep():
    layers = []
    for _ in range(21):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


class Way:
    """A network whose backward pass and messages are those of one of the ways."""

    def __init__(self, way):
        self.net = deep()
        self.way = way

    def __call__(self, x):
        return self.net(x)

    def parameters(self):
        return self.net.parameters()

    def backward(self, loss):
        self.way(self.net, loss)


class Overlapped(Way):
    """As the way of this name, its hooks made once."""

    def __init__(self):
        super().__init__(None)
        self.sent = []
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        self.sent.append((p, dist.all_reduce(p.grad, async_op=True)))

    def backward(self, loss):
        loss.backward()
        for p, work in self.sent:
            work.wait()
            p.grad /= dist.get_world_size()
        self.sent.clear()


def send_nothing(net, loss):
    loss.backward()


def a_step(model, optimizer, n):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.ones(n, 512)), torch.arange(n) % 10)
    if isinstance(model, Way):
        model.backward(loss)
    else:
        loss.backward()
    if isinstance(model, DDP):
        model.finish_gradient_synchronization()
    optimizer.step()


def ms_a_step():
    models = {"alone": Way(send_nothing), "local": Way(send_nothing), "naive": Way(naive),
              "flat": Way(flat), "overlapped": Overlapped(),
              "DDP": DDP(deep(), 5),
              "PyTorch's": DistributedDataParallel(deep(), bucket_cap_mb=5)}
    optimizers = {name: torch.optim.SGD(each.parameters(), 0.01) for name, each in models.items()}
    sent = {}
    for name, model in models.items():
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
            a_step(model, optimizers[name], 32)
        sent[name] = all_reduce.call_count
    found = {name: [] for name in models}
    order = np.random.default_rng(0)  # the same on both ranks
    for round_number in range(ROUNDS + 2):
        for name in order.permutation(list(models)):
            dist.barrier()
            if name == "alone" and dist.get_rank() == 1:
                continue
            begin = perf_counter()
            a_step(models[name], optimizers[name], 64 if name == "alone" else 32)
            if round_number >= 2:  # the first two warm up
                found[name].append(1e3 * (perf_counter() - begin))
    return found, sent


def faster(times, one, other):
    """Whether the middle half of one's rounds lies wholly below the other's."""
    return spread(times[one]).high < spread(times[other]).low


def compared(times, one, other):
    if faster(times, one, other):
        return f"{one} is faster"
    if faster(times, other, one):
        return f"{other} is faster"
    return "no winner"


made_up = {"low": [1, 2, 3], "high": [7, 8, 9], "wide": [1, 8, 9]}
assert compared(made_up, "low", "high") == "low is faster"
assert compared(made_up, "high", "low") == "low is faster"
assert compared(made_up, "wide", "high") == "no winner"

times, sent = ranks(ms_a_step, seconds=120)[0]
assert (sent["local"], sent["naive"], sent["flat"], sent["overlapped"]) == (0, 44, 1, 44)
assert 1 < sent["DDP"] < 10
sent["PyTorch's"] = "-"
print("way         messages  ms a step  middle half of the rounds")
median = {}
for name, row in times.items():
    low, median[name], high = spread(row)
    print(f"{name:11} {sent[name]:>8}  {median[name]:9.1f}  {low:.1f} to {high:.1f}")
print("(DDP and PyTorch's: buckets of 5 MB. -: sent by C++, not counted. Of two ways one is faster")
print(" if the middle half of its rounds lies wholly below the other's.)")
print()
pairs = [("flat", "naive"), ("overlapped", "naive"), ("DDP", "flat"), ("DDP", "overlapped"),
         ("DDP", "PyTorch's")]
for one, other in pairs:
    print(f"{one} or {other}? {compared(times, one, other)}")
ways = list(times)[2:]
winners = [name for name in ways if faster(times, name, "alone")]
losers = [name for name in ways if faster(times, "alone", name)]
gain = f"gains {median['alone'] - median['local']:.1f} ms a step"
if not faster(times, "local", "alone"):
    gain = "gains nothing that is clear"
print()
print(f"The second process {gain} (alone - local),")
print(f"and DDP's packing, sending and waiting cost {median['DDP'] - median['local']:.1f} ms "
      "(DDP - local).")
print("faster than alone:", ", ".join(winners) or "none")
print("slower than alone:", ", ".join(losers) or "none")

if winners:
    title = "Some ways that send are faster than one process"
elif len(losers) == len(ways):
    title = "Each way that sends is slower than one process"
else:
    title = "None of the ways that send is clearly faster than one process"
fig, ax = figure(title, ylabel="ms a step (lines: medians)", size=(8.0, 3.4))
labels = {"alone": "sends nothing", "naive": "sends gradients"}  # the first of each colour
for column, (name, row) in enumerate(times.items()):
    color = BLUE if name in ways else GREY
    places = column + np.linspace(-0.15, 0.15, len(row))
    ax.plot(places, row, "o", color=color, alpha=0.6)
    ax.hlines(np.median(row), column - 0.25, column + 0.25, color=color, lw=3,
              label=labels.get(name))
ax.set_xticks(range(len(times)), list(times))
ax.set_ylim(bottom=0)
ax.legend()
show(fig, alt=f"{title}. Milliseconds a step: points are rounds, lines medians. Grey: the two "
              "baselines. Blue: ways that send.")

# %% [markdown]
# **A second process pays if it gains more than its messages cost.** Its gain needs a core that is
# free, and grows with the compute; the messages' cost grows with the bytes. (Chapter 04's two
# devices send half a megabyte for 256 images, these 22 for 64.) Without a link of their own,
# buckets needn't win. A link that isn't the CPU is in deeper: Overlap on a link that matters.
#
# ## Gradient accumulation
#
# A batch that doesn't fit into memory is computed in parts. Their gradients add up in `.grad`, then
# comes one update. Only the last pass must send, so the others run in `model.no_sync()`. With two
# parts each loss is divided by 2 (`half_loss(net, 0)` is that of the shard's first half):

# %%
def accumulated():
    model = DDP(own_replica())
    with model.no_sync():  # PyTorch's DDP needs the forward pass in it, too
        loss = half_loss(model, 0) / 2
        loss.backward()  # sends nothing
    loss = half_loss(model, 1) / 2
    loss.backward()  # sends both parts' sum
    model.finish_gradient_synchronization()
    return gradients(model.module)


for found in ranks(accumulated):
    print(found["last.bias"])
    assert largest_difference(found, whole) < 1e-5

# %% tags=["fold"]
# check: only the second of two passes sends; the same part twice gives the same, too
def of_two_parts(x_parts, y_parts):
    model = DDP(own_replica())
    with model.no_sync():
        (F.cross_entropy(model(x_parts[0]), y_parts[0]) / 2).backward()
    assert not model.sent
    (F.cross_entropy(model(x_parts[1]), y_parts[1]) / 2).backward()
    assert len(model.sent) == len(model.buckets) == 2
    model.finish_gradient_synchronization()
    return gradients(model.module)


def same_shard_twice():
    x_shard, y_shard = own_shard()
    return of_two_parts([x_shard, x_shard], [y_shard, y_shard])


def each_half():
    x_shard, y_shard = own_shard()
    return of_two_parts(x_shard.chunk(2), y_shard.chunk(2))


for parts in (same_shard_twice, each_half):
    assert largest_difference(ranks(parts), whole) < 1e-5

# %% [markdown]
# ## The program
#
# [ddp_train.py](ddp_train.py) trains LeNet, with `--data FOLDER` on MNIST, else on ten easy
# patterns under noise. `torchrun` starts a process for each device, `--standalone` all on this
# machine:
#
# ```
# torchrun --standalone --nproc-per-node=2 ddp_train.py --snapshot lenet.pt
# ```
#
# PyTorch's `DistributedSampler` shares out the images: each rank gets every $k$-th of a shuffled
# list, and all get equally many, if need be by taking a few images twice.
#
# After each epoch the program writes a snapshot. If the run is killed later, the same command with
# `--resume` goes on. With two processes on CPU cores it ends with the same weights, bit for bit.
# (On GPUs that takes more: chapter 15.)
#
# Its training loop is the usual one, with two lines for our DDP. With PyTorch's,
# `nn.parallel.DistributedDataParallel(net)`, it needs neither:

# %% tags=["file:ddp_train.py", "trains"]
def train_epoch(model, optimizer, loader, device):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        if isinstance(model, DDP):  # PyTorch's has finished within backward()
            model.finish_gradient_synchronization()
        optimizer.step()

# %% [markdown]
# For the accuracy each rank counts hits among its own images. **Add up counts, then divide.** Of
# 100 images 80 are recognised:

# %% tags=["fold"]
# check: one rank's hits divided by everybody's images, and the sum of hits
recognised = torch.arange(100) < 80


def accuracies():
    hits = recognised[dist.get_rank()::2].sum()
    alone = hits / 100  # the trap: one rank's hits, everybody's images
    dist.all_reduce(hits)
    return alone, hits / 100


for rank, (alone, together) in enumerate(ranks(accuracies)):
    print(f"rank {rank}: alone {alone:.0%}, after all_reduce {together:.0%}")
    assert abs(alone - 0.4) < 1e-6 and abs(together - 0.8) < 1e-6

# %% tags=["fold", "file:ddp_train.py", "trains"]
# define: the rest of the program: LeNet, data, test, snapshots and options
def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))


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


def load(folder):
    """A dataset to train on, and images and labels to test on."""
    if folder is None:
        train = make_data(6400, seed=1)
        test = make_data(1000, seed=2)
    else:
        train = read_mnist(folder, "train")
        test = read_mnist(folder, "t10k")
    return torch.utils.data.TensorDataset(*train), test


# --- Meeting the other processes, on GPUs if there is one for each, else on CPU cores
def join_processes():
    """Meets the other processes; returns this one's device."""
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    if torch.cuda.device_count() >= here:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl")
        return torch.device("cuda", local)
    dist.init_process_group("gloo")
    return torch.device("cpu")


@torch.no_grad()
def count_right(model, images, labels, device):
    """How many of these images the model gets right, as a tensor."""
    model.eval()
    right = torch.zeros((), device=device)
    for x, y in zip(images.split(500), labels.split(500)):
        right += (model(x.to(device)).argmax(1) == y.to(device)).sum()
    return right


def test_accuracy(model, images, labels, device):
    """Each rank takes every k-th image, each image once, and the counts are added."""
    rank = dist.get_rank()
    k = dist.get_world_size()
    right = count_right(model, images[rank::k], labels[rank::k], device)
    dist.all_reduce(right)
    return right.item() / len(images)


# --- A snapshot after each epoch, from which a run goes on
def save_snapshot(path, snapshot):
    """Rank 0 writes it beside `path` and then renames it: whoever kills us, `path` is whole."""
    if dist.get_rank() == 0:
        torch.save(snapshot, f"{path}.part")
        os.replace(f"{path}.part", path)


def read_snapshot(path, device):
    """What rank 0 reads from its disk, on all ranks."""
    box = [None]
    if dist.get_rank() == 0:
        box = [torch.load(path, map_location="cpu")]
    dist.broadcast_object_list(box, device=device)
    return box[0]


# --- The program
def main(data, epochs, batch_size, lr, snapshot, resume):
    device = join_processes()
    rank = dist.get_rank()
    a_step = batch_size * dist.get_world_size()  # images
    train, test = load(data)
    sampler = torch.utils.data.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size, sampler=sampler)
    torch.manual_seed(rank)
    net = lenet().to(device)
    first = 0
    if resume:
        saved = read_snapshot(snapshot, device)
        if saved["a step"] != a_step:
            raise SystemExit(f"{snapshot}: its steps had {saved['a step']} images, these have "
                             f"{a_step}; choose --batch-size for as many processes")
        first = saved["epochs"]
        net.load_state_dict(saved["net"])
    model = DDP(net)  # or PyTorch's own: nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    if resume:
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.param_groups[0]["lr"] = lr  # the command line's, not the snapshot's
    if first >= epochs and rank == 0:
        print(f"{snapshot} has {first} epochs already: --epochs {epochs} adds none")
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        # A seed for each epoch and rank: a resumed run needs no state of random numbers.
        torch.manual_seed(1000 * epoch + rank)
        train_epoch(model, optimizer, loader, device)
        right = test_accuracy(model, *test, device)
        if snapshot is not None:
            save_snapshot(snapshot, {"epochs": epoch + 1, "net": net.state_dict(), "a step": a_step,
                                     "optimizer": optimizer.state_dict()})
        if rank == 0:
            print(f"epoch {epoch + 1}: {right:.1%} right, {dist.get_world_size()} x {device.type}",
                  flush=True)
    dist.destroy_process_group()


# --- The command line
def read_arguments():
    parser = argparse.ArgumentParser(description="Trains LeNet, a process for each device.")
    parser.add_argument("--data", help="folder with MNIST's four files; else data is made")
    parser.add_argument("--epochs", type=int, default=3, help="in all, resumed ones too")
    parser.add_argument("--batch-size", type=int, default=64, help="images on each process")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    parser.add_argument("--snapshot", metavar="FILE", help="written after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from --snapshot's FILE")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --standalone --nproc-per-node=2 ddp_train.py")
    for name in ("epochs", "batch_size"):
        value = getattr(options, name)
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: should be 1 or more")
    if not options.lr > 0:
        parser.error(f"--lr {options.lr}: should be more than 0")
    if options.resume and options.snapshot is None:
        parser.error("--resume: say from where, by --snapshot FILE")
    if options.resume and os.environ["RANK"] == "0" and not os.path.exists(options.snapshot):
        parser.error(f"--resume: there is no {options.snapshot}; start without --resume")
    return options


if __name__ == "__main__" and "__file__" in globals():  # a notebook is __main__, and no file
    main(**vars(read_arguments()))

# %% tags=["fold", "measured"]
# check: the program's test_accuracy adds up counts; then its two epochs on two processes
from helpers.cluster import torchrun


def accuracy_of_80_in_100():
    labels = torch.arange(100) % 10
    scores = F.one_hot(labels, 10)
    scores[80:] = scores[80:].roll(1, dims=1)  # the next class wins
    return test_accuracy(nn.Identity(), scores, labels, "cpu")


for world in (1, 2, 3):
    assert ranks(accuracy_of_80_in_100, world=world) == [0.8] * world, world

printed = torchrun("ddp_train.py", nproc=2, arguments=["--epochs", "2"], log=None)
print(printed[0])  # by rank 0

# %% [markdown]
# **On GPUs:** each process takes one, if there are enough, and sends by NCCL; else all take CPU
# cores. We had only one GPU (an H200, PyTorch 2.11), so between GPUs this is untried. On it the
# program trained, as one process. In a test two processes shared it, and `DDP` sent by gloo: after
# ten steps in float64, weights differed from one process's by $10^{-16}$ at most.
#
# ## Summary
#
# - Replicas begin equal by a broadcast, and stay equal by the same mean gradients.
# - Buckets are few messages, sent during the pass, in the same order by all ranks.
# - Replicas can agree and be wrong. Compare with one process.
#
# Next, chapter 15: the same across machines, and what happens when one of them dies.
#
# **Further reading.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training* (2020), arXiv:2006.15704.

# %% [markdown]
# ## Exercises
#
# All three change the class `DDP`, so open its cell first.
#
# 1. **In the order of arrival.** Note in which order gradients arrive, and fill the buckets anew in
#    it. Why must all ranks take the same one?
# 2. **Two halves of an all-reduce.** Replace it by `dist.reduce_scatter_single(part, whole)`, which
#    leaves each rank its part of the sum, and `dist.all_gather_single(whole, part)`. All parts must
#    be equally long, so fill `whole` up with zeros. Show that the gradients are the same. What
#    could a rank do between the two?
# 3. **Uneven shards.** Make `DDP` compute the mean over all examples, whatever the sizes of the
#    shards, with one pass a step.

# %% [markdown]
# ### Answer 1
#
# Ranks may see different orders, and messages must match, so rank 0 broadcasts its own. Parameters
# that didn't arrive come last. In the test each rank calls the layers in an order of its own.

# %% tags=["solution"]
class Reordered(DDP):
    def __init__(self, module, bucket_size_mb=25):
        super().__init__(module, bucket_size_mb)
        self.place = {p: number for number, p in enumerate(self.trained)}
        self.most = bucket_size_mb * 2**20
        self.order = []
        self.early = 0  # buckets sent before the last gradient came

    def mark_ready(self, p):
        if self.place[p] not in self.order:
            self.order.append(self.place[p])
        self.early = len(self.sent)
        super().mark_ready(p)

    def fill_anew(self):
        for number in range(len(self.trained)):
            if number not in self.order:
                self.order.append(number)
        order = torch.tensor(self.order)
        dist.broadcast(order, src=0)
        self.buckets = fill_buckets([self.trained[number] for number in order], self.most)
        self.order.clear()


class Permuted(nn.Module):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(9, 9)
        self.third = nn.Linear(9, 9)
        self.first = nn.Linear(9, 9)
        self.unused = nn.Linear(9, 9)

    def forward(self, x):
        x = self.first(x)
        if dist.get_rank() == 0:
            return self.second(x) + self.third(x)
        return self.third(x) + self.second(x)


def own_loss(net):
    rows = torch.arange(36.0).reshape(4, 9).cos()
    part = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    return net(part).square().mean()


def used_gradients(net):
    found = gradients(net)
    assert found.pop("unused.weight") is None and found.pop("unused.bias") is None
    return found


def whole_gradients():
    torch.manual_seed(0)
    net = Permuted()
    own_loss(net).backward()
    return used_gradients(net)


def sent_early():
    torch.manual_seed(0)
    model = Reordered(Permuted(), 1e-6)
    early = []
    for _ in range(3):
        model.zero_grad()
        own_loss(model).backward()
        model.finish_gradient_synchronization()
        early.append(model.early)
        model.fill_anew()
    order = [model.place[bucket[0]] for bucket in model.buckets]
    return early, order, used_gradients(model.module)


(early, order, found_0), (_, other_order, found_1) = ranks(sent_early)
print("sent before the last gradient came, in three steps:", early)
assert order == other_order and sorted(order[:6]) == [0, 1, 2, 3, 4, 5], "the unused come last"
assert sorted(order[6:]) == [6, 7]
assert early[0] < early[1], "more are sent early"
assert largest_difference([found_0, found_1], ranks(whole_gradients, world=1)[0]) < 1e-5

# %% [markdown]
# ### Answer 2
#
# Between the two each rank has the mean of its part only: it could update just these parameters,
# with the optimizer's state for just these, and then gather *weights*. That is stage 1 of ZeRO
# (chapter 16).

# %% tags=["solution"]
class InHalves(DDP):
    def send(self, bucket):
        buffer = flatten(bucket) / dist.get_world_size()
        k = dist.get_world_size()
        padded = F.pad(buffer, (0, -len(buffer) % k))  # k parts of equal size
        part = torch.empty_like(padded[: len(padded) // k])
        dist.reduce_scatter_single(part, padded)
        work = dist.all_gather_single(padded, part, async_op=True)
        self.sent.append((padded[: len(buffer)], work))


def in_halves():
    model = InHalves(own_replica(), 1e-6)
    shard_loss(model).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


assert largest_difference(ranks(in_halves, world=3), whole) < 1e-5

# %% [markdown]
# ### Answer 3
#
# The gradient of a shard's mean is weighted by $k\,n_r/n$, with $n_r$ examples of $n$ on one of $k$
# ranks. It is easiest to weight what the forward pass returns, by a hook on its gradient. Eleven
# examples on three ranks: four, four and three.

# %% tags=["solution"]
class Weighted(DDP):
    def forward(self, x):
        if not torch.is_grad_enabled():  # nothing to weight
            return super().forward(x)
        examples = torch.tensor(float(len(x)))
        dist.all_reduce(examples)
        weight = dist.get_world_size() * len(x) / examples.item()
        outputs = super().forward(x)
        outputs.register_hook(lambda gradient: weight * gradient)
        return outputs


def eleven(wrap):
    model = wrap(own_replica())
    x_shard = x[:11].tensor_split(3)[dist.get_rank()]
    y_shard = y[:11].tensor_split(3)[dist.get_rank()]
    F.cross_entropy(model(x_shard), y_shard).backward()
    model.finish_gradient_synchronization()
    with torch.no_grad():
        assert torch.equal(model(x_shard), model.module(x_shard)), "evaluation works as before"
    return gradients(model.module)


torch.manual_seed(0)
net = SmallNet()
F.cross_entropy(net(x[:11]), y[:11]).backward()
assert largest_difference(ranks(eleven, Weighted, world=3), gradients(net)) < 1e-5
assert largest_difference(ranks(eleven, DDP, world=3), gradients(net)) > 1e-3
