# %% [markdown]
# # 14 · DDP from scratch
#
# PyTorch trains on several devices with `DistributedDataParallel`, **DDP** for short: one process
# for each device, and gradients that are averaged while the backward pass still runs. *Which line
# of such a script sends what, and when?*
#
# > **What you'll do:** run the usual script, find the two lines that do the work, and rebuild them,
# > until your class produces the same gradients as PyTorch's.
# >
# > **What you'll learn:** what DDP sends, when and in which order; why it uses buckets; how to tell
# > a correct DDP from a wrong one.
# >
# > **What you need:** chapters 03 and 04, no GPU, and PyTorch: `make setup TORCH=1` installs it.
# > Reading takes {reading time}, running half a minute on two cores.
#
# New to PyTorch? Chapter 13 translates MXNet's words. One thing differs here: PyTorch's losses are
# means by default, so ranks average their gradients; in chapter 04 losses were sums, and gradients
# were added up. (In PyTorch a method whose name ends in `_` writes in place.)

# %% tags=["torch"]
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_train
from helpers import your_turn
from helpers.cluster import torchrun
from helpers.compare import largest_difference
from ranks import ranks

# %% [markdown]
# ## The usual script
#
# Until now one Python process fed all devices. From here on each device has a process of its own,
# with one replica of the network and one shard of each batch, and all processes run the same
# script. A process's number is its **rank**. This cell writes the script into `first_ddp.py`,
# beside this notebook:

# %% tags=["measured"]
# %%writefile first_ddp.py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")  # connects the processes; on GPUs by "nccl"
rank = dist.get_rank()

torch.manual_seed(0)
x = torch.randn(640, 20)
y = (x.sum(dim=1) > 0).long()
data = TensorDataset(x, y)
sampler = DistributedSampler(data)  # a share of the data for each rank
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(rank)  # on purpose: each rank begins with different weights
net = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 2))
print(f"rank {rank} begins with the weight {net[0].weight[3, 0].item():.3f}")

model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(5):
    sampler.set_epoch(epoch)  # a different order each epoch, the same on all ranks
    for x_shard, y_shard in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x_shard), y_shard)
        loss.backward()
        optimizer.step()

print(f"rank {rank} ends with the weight {net[0].weight[3, 0].item():.3f}")
dist.destroy_process_group()

# %% [markdown]
# `torchrun` starts it once for each device. In a terminal, in this folder, that is
#
# ```
# torchrun --standalone --nproc-per-node=2 first_ddp.py
# ```
#
# Here `helpers.cluster.torchrun` does so, and returns what each rank printed. A step sees 64
# examples, 32 on each rank, and on each rank `loss` is the mean of its own 32.
#
# **Predict:** the ranks begin with different weights, and in each epoch see different examples.
# Which weights do they end with: one number, or two?

# %% tags=["predict", "trains"]
# log=None: don't show the lines while it runs.
printed = torchrun("first_ddp.py", nproc=2, log=None)
print("".join(printed))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both ranks end with the same weight, although they began with two and saw different examples. So
# something was sent.
#
# </details>
#
# None of the lines says that it sends, and apart from the sampler the loop is that for a single
# device. So the work must be done in two lines: `DistributedDataParallel(net)`, which has seen the
# network, and `loss.backward()`, after which `optimizer.step()` does the same on both ranks. We
# rebuild both.
#
# ## Several ranks in a notebook
#
# A notebook is one process. So `ranks(function, world=3)`, from [ranks.py](ranks.py), runs
# `function()` in three others, with this notebook's variables, and returns a list of what they
# returned. Without `world` it takes two. When one process fails or takes too long, all are ended.
# The function is the program of *one* rank, from top to bottom:

# %%
def hello():
    numbers = torch.ones(2) * (dist.get_rank() + 1)  # 1, 1 on rank 0; 2, 2 on rank 1; ...
    dist.all_reduce(numbers)  # adds up, in place
    return numbers


print(ranks(hello, world=3))

# %% [markdown]
# All ranks call `all_reduce`, chapter 03's collective, and each has the sum, 1 + 2 + 3. It is
# carried out by **gloo**, PyTorch's library for CPUs; for GPUs that is NCCL.
#
# ## What must come out
#
# All ranks must end with the gradients that one process finds from the whole batch. This is our
# network, in float64, so that only the last digits may differ, and the whole batch of 12 examples:

# %%
class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4).double()
        self.second = nn.Linear(4, 4).double()
        self.last = nn.Linear(4, 2).double()

    def forward(self, x):
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x))
        return self.last(x)


def gradients(net):
    return {name: p.grad for name, p in net.named_parameters()}


torch.manual_seed(0)
net = SmallNet()
x = torch.randn(12, 4).double()
y = torch.arange(12) % 2
F.cross_entropy(net(x), y).backward()
whole = gradients(net)  # what each rank should find
print(whole["last.bias"])

# %% [markdown]
# ## The first line that sends: replicas begin equal
#
# Each process makes a network of its own. Here rank 0 gets the weights of `net` above, because its
# seed is 0, and the others get other weights. So rank 0 sends its own to all, by a broadcast.
# (`p.detach()` shares the numbers of `p`, without autograd.)

# %%
def equal_replica():
    torch.manual_seed(dist.get_rank())
    net = SmallNet()
    for p in net.parameters():
        dist.broadcast(p.detach(), src=0)  # from rank 0 to all
    return net


def first_bias():
    return equal_replica().first.bias[0].item()


print("net:   ", round(net.first.bias[0].item(), 4))
for bias in ranks(first_bias, world=3):
    print("a rank:", round(bias, 4))
    assert bias == net.first.bias[0].item()

# %% [markdown]
# That is what `DistributedDataParallel(net)` does in its constructor. There it also broadcasts the
# **buffers**, arrays that aren't trained, such as the running means of BatchNorm. Later forward
# passes broadcast the buffers again. An evaluation is a forward pass, too, so all ranks must take
# part in an evaluation.
#
# ## The second line that sends: gradients become means
#
# ### Naive: an all-reduce for each gradient
#
# Each rank takes its shard of the batch, and computes its own gradients. Then they are averaged,
# one after the other:

# %%
def own_shard():
    k = dist.get_world_size()
    rank = dist.get_rank()
    x_shard = x.chunk(k)[rank]
    y_shard = y.chunk(k)[rank]
    return x_shard, y_shard


def naive():
    net = equal_replica()
    x_shard, y_shard = own_shard()
    F.cross_entropy(net(x_shard), y_shard).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)  # the sum over all ranks
        p.grad /= dist.get_world_size()
    return gradients(net)


for found in ranks(naive):
    print(found["last.bias"])
    assert largest_difference(found, whole) < 1e-12  # the largest of all six gradients

# %% [markdown]
# Both ranks have what one process found. Their shards are equally large, so the mean of their means
# is the mean of the batch. For unequal shards it isn't (chapter 02). PyTorch's DDP has the same
# limitation, and exercise 2 removes it.
#
# ### Overlapped: during the backward pass
#
# Must we wait for the whole pass? That depends on when gradients are ready. A **hook** is a
# function that PyTorch calls at a certain moment. Here it calls `is_ready(p)` as soon as the
# gradient of the parameter `p` is ready. **Predict:** in which order are the six names printed?

# %% tags=["predict"]
another = SmallNet()
for name, p in another.named_parameters():
    p.label = name  # so that a hook can print it


def is_ready(p):
    print(p.label)


for p in another.parameters():
    p.register_post_accumulate_grad_hook(is_ready)
F.cross_entropy(another(x), y).backward()
print("backward() returns")

# %% [markdown]
# <details><summary>What came out</summary>
#
# They come from the last layer to the first, each bias before its weight, and all of them before
# `backward()` returns.
#
# </details>
#
# So a gradient can be sent while the backward pass goes on with other layers:
#
# ![Timelines of a backward pass through the layers last, second and first. Naive: three all-reduces
# after the pass. Overlapped: three all-reduces, the first of which begins when the pass is done
# with last. Buckets: one all-reduce for last and second begins during the pass, and one for first
# follows.](src/drawings/ddp_ways.svg)
#
# (The durations are invented, and the two gradients of a layer are drawn as one.) In *overlapped*
# the hook sends. With `async_op=True` `all_reduce` returns at once, and gives a handle, whose
# `wait()` blocks until the sum is there. (With NCCL only the GPU waits, and Python goes on.)

# %%
def overlapped():
    net = equal_replica()
    x_shard, y_shard = own_shard()
    handles = []

    def send(p):
        handle = dist.all_reduce(p.grad, async_op=True)
        handles.append(handle)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(send)
    F.cross_entropy(net(x_shard), y_shard).backward()  # calls send for each gradient
    for handle in handles:
        handle.wait()
    for p in net.parameters():
        p.grad /= dist.get_world_size()
    return gradients(net)


for found in ranks(overlapped):
    print(found["last.bias"])
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# ### Buckets: fewer all-reduces
#
# Each all-reduce costs latency (chapter 03), and a large network has hundreds of gradients. So
# several gradients are packed into one array, a **bucket**, which is sent when its last gradient is
# ready:
#
# ![Moving picture: a backward pass goes through the layers last, second and first. The gradients of
# last and second, a bias and a weight each, fill bucket 1, which is sent while first is computed;
# the two gradients of first fill bucket 2.](src/drawings/ddp_buckets.svg)
#
# `pack` puts the gradients of some parameters into one array, one after the other. Later `unpack`
# cuts the array into pieces of the same sizes, and copies each piece into its gradient:

# %%
def pack(parameters):
    pieces = []
    for p in parameters:
        pieces.append(p.grad.flatten())
    return torch.cat(pieces)


def unpack(packed, parameters):
    begin = 0
    for p in parameters:
        end = begin + p.numel()  # p.numel(): how many numbers p has
        piece = packed[begin:end]
        p.grad.copy_(piece.view_as(p))  # in the shape of p
        begin = end


print(another.last.bias.shape, another.last.weight.shape)
print(pack([another.last.bias, another.last.weight]).shape)

# %% [markdown]
# Which gradients share a bucket? `fill_buckets` takes the parameters in the order in which their
# gradients come, and a limit in bytes. From `last.bias` and `last.weight` to
# `first.weight`, the gradients have 16, 64, 32, 128, 32 and 128 bytes. **Predict:** which
# parameters share the first bucket, if it holds at most 200 bytes?

# %% tags=["predict"]
def fill_buckets(parameters, cap_bytes):
    buckets = []
    bucket = []  # the one that is being filled
    filled = 0  # bytes in it
    for p in parameters:
        if bucket and filled + p.nbytes > cap_bytes:  # p doesn't fit
            buckets.append(bucket)
            bucket = []
            filled = 0
        bucket.append(p)
        filled += p.nbytes
    buckets.append(bucket)
    return buckets


backwards = list(another.parameters())
backwards.reverse()
for bucket in fill_buckets(backwards, 200):
    print([p.label for p in bucket])

# %% [markdown]
# <details><summary>What came out</summary>
#
# `last` and `second.bias` share the first bucket, with 16 + 64 + 32 bytes; the 128 of
# `second.weight` would be too much.
#
# </details>
#
# ## When is a bucket sent?
#
# A bucket is sent when all of its gradients are ready, *and* all buckets before it have been sent.
# Why does it wait for those? Because *all ranks must send in the same order*. Here rank 1 makes its
# two calls in the opposite order. The correct sums are 2 and 20. **Predict:** what comes out?

# %% tags=["predict"]
def in_another_order():
    ones = torch.ones(1)
    tens = torch.ones(1) * 10
    if dist.get_rank() == 0:
        dist.all_reduce(ones)
        dist.all_reduce(tens)
    else:
        dist.all_reduce(tens)
        dist.all_reduce(ones)
    return ones.item(), tens.item()


print(ranks(in_another_order))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both sums are 11 on both ranks, and there is no error. The first call on one rank is summed with
# the first call on the other, the second with the second.
#
# </details>
#
# So **ranks can agree and be wrong.** That is why we compare them with one process, and not with
# each other.
#
# ### Your turn: which buckets leave?
#
# Write the rule as a function without any sending. For each gradient that arrives, `departures`
# gives the numbers of the buckets that leave then, counted from 0. Letters stand for gradients. In
# the second case the second bucket, that of `a`, is complete first, and waits. Try it before you
# scroll on: `SmallDDP` has the same rule.

# %% tags=["your-turn"]
def departures(buckets, arriving):
    """For each gradient in `arriving` a list: the numbers of the buckets that leave then."""
    ...


two_buckets = [["c", "b"], ["a"]]
three_buckets = [["d"], ["c"], ["b", "a"]]
in_order = (two_buckets, ["c", "b", "a"])  # buckets, arriving
last_first = (two_buckets, ["a", "c", "b"])
mixed = (three_buckets, ["c", "b", "d", "a"])
cases = [
    (in_order, [[], [0], [1]]),
    (last_first, [[], [], [0, 1]]),
    (mixed, [[], [], [0, 1], [2]]),
]
your_turn(departures, cases)

# %% [markdown]
# ## SmallDDP, whole
#
# Buckets need a class, because the hooks are set once, before the first pass. Each hook is
# `mark_ready`, which has the rule of `departures`. The training loop calls
# `finish_gradient_synchronization` after `backward()`. It waits for the all-reduces, and writes the
# means into the gradients. (`sends` stays True until we come to *Gradient accumulation*.)

# %%
class SmallDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module = module
        self.sends = True
        backwards = list(module.parameters())
        backwards.reverse()
        self.buckets = fill_buckets(backwards, cap_bytes)
        for p in backwards:
            dist.broadcast(p.detach(), src=0)
            p.register_post_accumulate_grad_hook(self.mark_ready)
        self.begin_pass()

    def begin_pass(self):
        self.ready = set()  # parameters whose gradients are ready
        self.waiting = list(self.buckets)  # buckets that haven't been sent
        self.sent = []  # for each that has: the bucket, its packed gradients, and the handle

    def forward(self, x):
        return self.module(x)

    def mark_ready(self, p):
        if not self.sends:
            return
        self.ready.add(p)
        while self.waiting and self.is_complete(self.waiting[0]):
            bucket = self.waiting.pop(0)
            self.send(bucket)

    def is_complete(self, bucket):
        for p in bucket:
            if p not in self.ready:
                return False
        return True

    def send(self, bucket):
        packed = pack(bucket) / dist.get_world_size()  # before the sum, which could overflow
        handle = dist.all_reduce(packed, async_op=True)
        self.sent.append((bucket, packed, handle))

    def finish_gradient_synchronization(self):
        assert not self.waiting, "a gradient is missing"
        for bucket, packed, handle in self.sent:
            handle.wait()
            unpack(packed, bucket)
        self.begin_pass()

# %% [markdown]
# Is it right, and does it send during the pass? A second hook, `note`, is called for each gradient
# just after `mark_ready`, and notes how many buckets have been sent. The limit is 200 bytes again.
# **Predict:** which six numbers are noted?

# %% tags=["predict"]
def one_pass():
    torch.manual_seed(dist.get_rank())  # a different network on each rank
    model = SmallDDP(SmallNet(), 200)
    noted = []

    def note(p):
        noted.append(len(model.sent))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    model.finish_gradient_synchronization()
    return noted, gradients(model.module)


for noted, found in ranks(one_pass, world=3):
    print(noted, found["last.bias"])
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# <details><summary>What came out</summary>
#
# 0, 0, 1, 1, 2, 3: the first bucket left with the third gradient, and the pass went on to the other
# three. The gradients are those of one process.
#
# </details>
#
# PyTorch's DDP needs no such call. It asks autograd to do this work at the end of the pass
# (`queue_callback` in `reducer.cpp`), so that `backward()` itself waits.
#
# ### Gradient accumulation
#
# A batch that doesn't fit into memory is computed in parts. Their gradients add up in `.grad`, and
# then comes one update. So only the last part's pass must send, and before it `model.sends` is
# False. Here a rank's shard has two parts, and each loss is divided by 2:

# %%
def accumulated():
    model = SmallDDP(equal_replica(), 200)
    x_shard, y_shard = own_shard()
    x_parts = x_shard.chunk(2)
    y_parts = y_shard.chunk(2)

    model.sends = False
    loss = F.cross_entropy(model(x_parts[0]), y_parts[0]) / 2
    loss.backward()
    before = model.module.last.bias.grad.clone()

    model.sends = True
    loss = F.cross_entropy(model(x_parts[1]), y_parts[1]) / 2
    loss.backward()  # sends the sum of both parts
    model.finish_gradient_synchronization()
    return before, gradients(model.module)


for before, found in ranks(accumulated):
    print("before:", before, "after:", found["last.bias"])
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# Before the second pass each rank has a gradient of its own, because nothing was sent. After it
# both have that of the whole batch. So if you clip gradients (limit their size), do it after the
# last part, when the means are there. With PyTorch's DDP the first forward and backward pass go
# inside a `with model.no_sync():` block.
#
# ## What PyTorch's DDP sends
#
# What does `DistributedDataParallel` send? You can register a function that replaces its
# all-reduce, a **communication hook**. Ours notes the size of each bucket, and then does what
# PyTorch does by default. The network has 40 layers with 1 MiB of gradients each:

# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def bucket_sizes():
    net = nn.Sequential()
    for _ in range(40):
        net.append(nn.Linear(512, 512))
    model = DistributedDataParallel(net)
    sizes = []

    def note_size(group, bucket):
        packed = bucket.buffer()
        sizes.append(round(packed.nbytes / 2**20))
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, note_size)  # None: the group of all ranks
    for _ in range(2):
        sizes.append("pass:")
        model(torch.ones(8, 512)).sum().backward()
    return sizes


on_rank_0 = ranks(bucket_sizes)[0]
print("MiB:", on_rank_0)

# %% [markdown]
# So that is what the line `loss.backward()` sends. By default the first pass has a single bucket,
# so that nothing is overlapped. Afterwards the order is known, and PyTorch rebuilds the buckets in
# the order in which rank 0's gradients became ready (`rebuild_buckets` in `reducer.hpp`). By
# default the first bucket is now about 1 MiB, so that sending begins soon, and the others are about
# 25 MiB.
#
# And the gradients are ours:

# %%
def by_pytorch():
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(SmallNet())
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    return gradients(model.module)


for found in ranks(by_pytorch):
    print(found["last.bias"])
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# That is DDP: **each gradient becomes its mean over all ranks, in buckets that are sent while the
# pass goes on.** How much that saves depends on the link (deeper: What overlap is worth).
#
# In `SmallDDP` each rank must use every layer in each pass. If one rank skips a layer, a bucket is
# never complete there, and the assertion fails. What PyTorch's DDP does then is in deeper: DDP's
# cases.
#
# ## A complete program
#
# [ddp_train.py](ddp_train.py) trains LeNet, with `--data FOLDER` on MNIST, else on ten easy
# patterns plus noise:
#
# ```
# torchrun --standalone --nproc-per-node=2 ddp_train.py --snapshot lenet.pt
# ```
#
# Its class `DDP` is `SmallDDP` with what real networks need, for example frozen parameters and
# layers unused on some rank. A guard refuses mistakes such as a step before the gradients are
# averaged. It finds the same gradients:

# %%
def with_the_programs():
    model = ddp_train.DDP(equal_replica(), bucket_size_mb=0.0002)  # about 200 bytes
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


for found in ranks(with_the_programs):
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# After each epoch the program writes a snapshot, from which the same command with `--resume` goes
# on (chapter 15). We had only one GPU, so the program is untried between GPUs.
#
# ## Summary
#
# - A DDP script is the script for one device, with a process group, a sampler, and two lines that
#   do the work: `DistributedDataParallel(net)` broadcasts rank 0's weights, and `backward()`
#   averages the gradients, by hooks. In forward passes PyTorch's DDP also sends buffers.
# - A bucket is one all-reduce of several gradients. It is sent during the backward pass, when its
#   last gradient is ready. All ranks send their buckets in the same order. At the end of the pass
#   each rank waits for all of them.
# - Ranks can agree and be wrong. Compare with one process.
#
# The short path ends here. Next, chapter 15: what happens when a process dies, and which ranks
# processes get on several machines. (If you want large models, go straight to chapter 16.)
#
# **Further reading.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training* (2020), arXiv:2006.15704.

# %% [markdown]
# ## Exercises
#
# Both change `SmallDDP`. Begin with `class InHalves(SmallDDP):` or the like, and override only the
# methods that change.
#
# 1. **Two halves of an all-reduce.** In `send`, replace it by `dist.reduce_scatter_single(part,
#    padded)`, which leaves each rank its part of the sum, and `dist.all_gather_single(padded,
#    part)`. (Before PyTorch 2.13 they are called `reduce_scatter_tensor` and
#    `all_gather_into_tensor`.) All parts must be equally long, so pad with zeros. Show that the
#    gradients are the same. What could a rank do between the two?
# 2. **Uneven shards.** Make the gradients those of the mean over all examples, whatever the sizes
#    of the shards, with one pass a step.

# %% [markdown]
# ### Answer to *Your turn*
#
# `while`, and not `if`: one gradient may let several buckets go.

# %% tags=["solution", "your-turn"]
def departures(buckets, arriving):
    ready = set()
    next_bucket = 0
    leaving = []
    for gradient in arriving:
        ready.add(gradient)
        now = []
        while next_bucket < len(buckets) and ready.issuperset(buckets[next_bucket]):
            now.append(next_bucket)
            next_bucket += 1
        leaving.append(now)
    return leaving


your_turn(departures, cases)

# %% [markdown]
# ### Answer 1
#
# Between the two each rank has the mean of its part only. So it could update just these parameters,
# with the optimizer's state for just these, and then gather *weights*. That is stage 1 of ZeRO
# (chapter 16). (`reduce_scatter_single` waits within the hook here, so less is overlapped.)

# %% tags=["solution"]
class InHalves(SmallDDP):
    def send(self, bucket):
        packed = pack(bucket) / dist.get_world_size()
        k = dist.get_world_size()
        padded = F.pad(packed, (0, -len(packed) % k))  # k parts of equal size
        part = torch.empty_like(padded[: len(padded) // k])
        dist.reduce_scatter_single(part, padded)
        handle = dist.all_gather_single(padded, part, async_op=True)
        self.sent.append((bucket, padded[: len(packed)], handle))


def in_halves():
    model = InHalves(equal_replica(), 200)
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


assert largest_difference(ranks(in_halves, world=3), whole) < 1e-12

# %% [markdown]
# ### Answer 2
#
# The gradient of a shard's mean is weighted by $k\,n_r/n$, with $n_r$ examples of $n$ on one of $k$
# ranks. It is easiest to weight what the forward pass returns, by a hook on its gradient. Eleven
# examples on three ranks: four, four and three. (What stands after the function, `ranks` passes on
# to it.)

# %% tags=["solution"]
class Weighted(SmallDDP):
    def forward(self, x):
        examples = torch.tensor(float(len(x)))
        dist.all_reduce(examples)
        weight = dist.get_world_size() * len(x) / examples.item()
        outputs = super().forward(x)
        outputs.register_hook(lambda gradient: weight * gradient)
        return outputs


def eleven(wrap):
    model = wrap(equal_replica(), 200)
    x_shard = x[:11].tensor_split(3)[dist.get_rank()]
    y_shard = y[:11].tensor_split(3)[dist.get_rank()]
    F.cross_entropy(model(x_shard), y_shard).backward()
    model.finish_gradient_synchronization()
    return gradients(model.module)


torch.manual_seed(0)
net = SmallNet()
F.cross_entropy(net(x[:11]), y[:11]).backward()
print("weighted:    ", largest_difference(ranks(eleven, Weighted, world=3), gradients(net)) < 1e-12)
print("not weighted:", largest_difference(ranks(eleven, SmallDDP, world=3), gradients(net)) < 1e-12)
