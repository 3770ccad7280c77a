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
# > a right DDP from a wrong one.
# >
# > **What you need:** chapters 03 and 04, no GPU, and PyTorch: `make setup TORCH=1` installs it.
# > Reading takes {reading time}, running half a minute on two cores.
#
# New to PyTorch? Chapter 13 translates MXNet's words. Three things differ here. PyTorch's losses
# are means by default, so ranks average their gradients; in chapter 04 losses were sums, and
# gradients were added up. `backward` adds to `p.grad`, so each step begins with `zero_grad`. And a
# method whose name ends in `_` writes in place.

# %% tags=["torch"]
import contextlib

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

dist.init_process_group("gloo")  # torchrun has said who is who; on GPUs: "nccl"
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
# examples, 32 on each rank, so on each rank `loss` is the mean of its own 32. (On GPUs a script
# also moves network and batches to its own GPU, whose number torchrun puts into `LOCAL_RANK`.)
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
# returned. Without `world` it takes two. Arguments after the function are passed on:
# `ranks(f, a, world=3)` runs `f(a)`. When one process fails or takes too long, all are ended. The
# function is the program of *one* rank, from top to bottom:

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
# **buffers**, arrays that aren't trained, such as the running means of BatchNorm. After each
# training pass, the next forward pass broadcasts the buffers again, even if it is an evaluation. So
# no rank may skip that evaluation.
#
# ## The second line: four ways to send
#
# When should gradients be sent, and in how many all-reduces? Our network has three layers with two
# gradients each, one of the bias and one of the weight:
#
# ![Timelines of a backward pass through three layers, with two gradients each. Naive: six
# all-reduces after the pass, of one gradient each. Flat: one of all six after the pass. Overlapped:
# six, beginning during the pass. Buckets: one of four during the pass and then one of two; it ends
# first.](src/drawings/ddp_ways.svg)
#
# The durations are invented, but as in chapter 03 an all-reduce of little data is mostly latency.
# So the six of *overlapped* end later than the one of *flat*, although they begin earlier.
#
# ### Naive: an all-reduce for each gradient
#
# Each rank takes its shard of the batch, and computes its own gradients. Then they are averaged,
# one after the other:

# %%
def own_shard():
    k = dist.get_world_size()
    rank = dist.get_rank()
    return x.chunk(k)[rank], y.chunk(k)[rank]


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
# limitation, and exercise 3 removes it. **Predict:** what do the ranks find if we forget to divide?

# %% tags=["predict"]
def without_division():
    net = equal_replica()
    x_shard, y_shard = own_shard()
    F.cross_entropy(net(x_shard), y_shard).backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    return gradients(net)


for found in ranks(without_division):
    print(found["last.bias"])
print("right:", whole["last.bias"])

# %% [markdown]
# <details><summary>What came out</summary>
#
# They agree, on twice the right gradient.
#
# </details>
#
# **Replicas can be equal and wrong.** That is why we compare with one process, and not the ranks
# with each other.
#
# ### Flat: one all-reduce
#
# Naive calls `all_reduce` six times, and each call costs latency. But one array can hold all
# gradients. To unpack it, we cut it into pieces of the parameters' sizes, and copy each piece into
# its gradient:

# %%
def pack(parameters):
    pieces = [p.grad.flatten() for p in parameters]
    return torch.cat(pieces)


def unpack(packed, parameters):
    sizes = [p.numel() for p in parameters]
    pieces = packed.split(sizes)  # one for each parameter
    for p, piece in zip(parameters, pieces):
        p.grad.copy_(piece.view_as(p))  # in the shape of p


def flat():
    net = equal_replica()
    x_shard, y_shard = own_shard()
    F.cross_entropy(net(x_shard), y_shard).backward()
    parameters = list(net.parameters())
    packed = pack(parameters)
    dist.all_reduce(packed)
    packed /= dist.get_world_size()
    unpack(packed, parameters)
    return gradients(net)


for found in ranks(flat):
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# The array takes as much memory as all gradients, and each is copied twice. PyTorch's DDP can avoid
# both with `gradient_as_bucket_view=True`: then each gradient *is* a piece of the array, a view.
#
# ### Overlapped: during the backward pass
#
# Must we wait for the whole pass? A **hook** is a function that PyTorch calls at a certain moment.
# Here `is_ready` is called when the gradient of a parameter is ready, and `is_reached` when the
# backward pass reaches the layer `second`. **Predict:** in which order do the six gradients become
# ready, and which of them before the pass reaches `second`?

# %% tags=["predict"]
def names_of_parameters(net):
    return {p: name for name, p in net.named_parameters()}


def order_of_gradients():
    net = SmallNet()
    names = names_of_parameters(net)

    def is_ready(p):
        print(names[p])

    def is_reached(layer, grad_outputs):
        print("    the pass reaches second")

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(is_ready)
    net.second.register_full_backward_pre_hook(is_reached)
    F.cross_entropy(net(x), y).backward()


order_of_gradients()

# %% [markdown]
# <details><summary>What came out</summary>
#
# They come from the last layer to the first, each bias before its weight. Both of `last` are ready
# before the pass reaches `second`.
#
# </details>
#
# So the hook can send. With `async_op=True` `all_reduce` returns at once, and gives a handle, whose
# `wait()` blocks until the sum is there:

# %%
def overlapped():
    net = equal_replica()
    x_shard, y_shard = own_shard()
    sent = []

    def send(p):
        work = dist.all_reduce(p.grad, async_op=True)
        sent.append((p, work))

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(send)
    F.cross_entropy(net(x_shard), y_shard).backward()  # calls send for each gradient
    for p, work in sent:
        work.wait()
        p.grad /= dist.get_world_size()
    return gradients(net)


for found in ranks(overlapped):
    assert largest_difference(found, whole) < 1e-12

# %% [markdown]
# ### Buckets: a few all-reduces during the pass
#
# DDP goes between flat and overlapped: several gradients share a **bucket**, which is sent when its
# last gradient is ready.
#
# ![Moving picture: a backward pass goes through the layers last, second and first. The gradients of
# last and second, a bias and a weight each, fill bucket 1, which is sent while first is computed;
# the two gradients of first fill bucket 2.](src/drawings/ddp_buckets.svg)
#
# `fill_buckets` takes the parameters in the order in which their gradients come, and a limit in
# bytes (in the picture 250). From `last.bias` and `last.weight` to `first.weight`, the gradients
# have 16, 64, 32, 128, 32 and 128 bytes. **Predict:** which parameters share the first bucket, if
# it holds at most 200 bytes?

# %% tags=["predict"]
def fill_buckets(parameters, cap_bytes):
    buckets = [[]]
    filled = 0  # bytes in the last bucket
    for p in parameters:
        too_large = filled + p.nbytes > cap_bytes
        if too_large and buckets[-1]:  # an empty bucket takes a gradient of any size
            buckets.append([])
            filled = 0
        buckets[-1].append(p)
        filled += p.nbytes
    return buckets


backwards = list(net.parameters())
backwards.reverse()
names = names_of_parameters(net)
for bucket in fill_buckets(backwards, 200):
    print([names[p] for p in bucket])

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
# When all of its gradients are ready, *and* all buckets before it have been sent. Why does it wait
# for those? Because *all ranks must send in the same order*: collectives are matched by the order
# of the calls, so the first call on one rank is summed with the first on the other. Here rank 1
# makes its two calls in the opposite order. The correct result is 2 and 20 on both. **Predict:**
# what comes out?

# %% tags=["predict"]
def in_another_order():
    ones = torch.ones(1)
    tens = torch.full((1,), 10.0)
    tensors = [ones, tens]
    if dist.get_rank() == 1:
        tensors.reverse()
    for tensor in tensors:
        dist.all_reduce(tensor)
    return ones.item(), tens.item()


print(ranks(in_another_order))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both have 11 and 11, and nobody complains. The ranks even agree.
#
# </details>
#
# ### Your turn: which buckets leave?
#
# Write the rule as a function without any sending. For each gradient that arrives, `departures`
# gives the numbers of the buckets that leave then, counted from 0. Letters stand for gradients. In
# the second case the second bucket, that of `a`, is complete first, and waits. Try it before you
# scroll on: `SmallDDP` has the same rule.

# %% tags=["your-turn"]
def departures(buckets, arriving):
    """[numbers of the buckets that leave], for each gradient in `arriving`."""
    ...


cases = [
    (([["c", "b"], ["a"]], ["c", "b", "a"]), [[], [0], [1]]),
    (([["c", "b"], ["a"]], ["a", "c", "b"]), [[], [], [0, 1]]),
    (([["d"], ["c"], ["b", "a"]], ["c", "b", "d", "a"]), [[], [], [0, 1], [2]]),
]
your_turn(departures, cases)

# %% [markdown]
# ## And who waits?
#
# `overlapped` waits for its all-reduces after `backward()`. But the usual script calls nothing
# after `backward()`, so DDP must wait within it. In a hook one can ask PyTorch's engine, which runs
# backward passes, to call a function when the pass has ended:

# %%
def call_at_the_end(function):
    torch.autograd.Variable._execution_engine.queue_callback(function)


def end_of_the_pass():
    net = SmallNet()
    names = names_of_parameters(net)

    def pass_has_ended():
        print("the pass has ended")

    def is_ready(p):
        print("   ", names[p])
        if p is net.last.bias:  # the first one
            call_at_the_end(pass_has_ended)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(is_ready)
    F.cross_entropy(net(x), y).backward()
    print("backward() returns")


end_of_the_pass()

# %% [markdown]
# The underscore says that `_execution_engine` may change, but PyTorch's own sharded training
# (chapter 16) uses it, too. On GPUs `wait()` doesn't block Python, but the GPU's later work, for
# example the optimizer's step (documentation of `torch.distributed`).
#
# ## SmallDDP, whole
#
# The fourth way is a class, because its hooks are set once, before the first pass. Each hook is
# `mark_ready`, which has the rule of `departures`. `finish` is called when the pass has ended:

# %%
class SmallDDP(nn.Module):
    def __init__(self, module, cap_bytes):
        super().__init__()
        self.module = module
        parameters = list(module.parameters())
        self.buckets = fill_buckets(reversed(parameters), cap_bytes)
        for p in parameters:
            dist.broadcast(p.detach(), src=0)
            p.register_post_accumulate_grad_hook(self.mark_ready)
        self.begin_pass()

    def begin_pass(self):
        self.ready = set()  # parameters whose gradients are ready
        self.waiting = list(self.buckets)  # buckets that haven't been sent
        self.sent = []  # for each that has: the bucket, its packed gradients, and the handle

    def forward(self, x):
        assert not self.ready, "the last backward pass broke off"
        return self.module(x)

    def mark_ready(self, p):
        if not self.ready:  # p is the first of this pass
            call_at_the_end(self.finish)
        self.ready.add(p)
        while self.waiting and self.ready.issuperset(self.waiting[0]):
            bucket = self.waiting.pop(0)
            self.send(bucket)

    def send(self, bucket):
        packed = pack(bucket) / dist.get_world_size()  # before the sum, which could overflow
        work = dist.all_reduce(packed, async_op=True)
        self.sent.append((bucket, packed, work))

    def finish(self):
        assert not self.waiting, "a gradient is missing"
        for bucket, packed, work in self.sent:
            work.wait()
            unpack(packed, bucket)
        self.begin_pass()

# %% [markdown]
# Is it right? On two ranks, on three and on four it must find what one process finds from the whole
# batch, even if gradients arrive in another order on each rank. So the network has two branches,
# which rank 0 computes in another order than the others. And each gradient has a bucket of its own:

# %%
class Branches(nn.Module):
    def __init__(self, left_first):
        super().__init__()
        self.left_first = left_first
        self.stem = nn.Linear(4, 4).double()
        self.left = nn.Linear(4, 2).double()
        self.right = nn.Linear(4, 2).double()

    def forward(self, x):
        x = self.stem(x)
        # The result is the same, but not the order in which the gradients come.
        if self.left_first:
            left = self.left(x)
            right = self.right(x)
        else:
            right = self.right(x)
            left = self.left(x)
        return left - right


def with_branches():
    torch.manual_seed(dist.get_rank())
    net = Branches(left_first=dist.get_rank() == 0)
    model = SmallDDP(net, 1)  # so low a limit that no two gradients share a bucket
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    return gradients(net)


torch.manual_seed(0)
branches = Branches(left_first=True)
F.cross_entropy(branches(x), y).backward()
expected = gradients(branches)
print("one process:", expected["left.bias"])
for world in [2, 3, 4]:
    for found in ranks(with_branches, world=world):
        assert largest_difference(found, expected) < 1e-12
    print(f"{world} ranks:    ", found["left.bias"])

# %% [markdown]
# And does the pass go on while an all-reduce is under way? In the next cell rank 0 sends a message
# when its backward pass reaches `second`, and rank 1 begins its own pass only then. Until then rank
# 1 has called no all-reduce, so none of rank 0's can be complete:

# %% tags=["fold"]
# check: rank 0's backward pass reaches `second` before its first all-reduces are complete
def rank_1_begins_late():
    net = equal_replica()
    model = SmallDDP(net, 1)
    complete = []

    def is_reached(layer, grad_outputs):
        for bucket, packed, work in model.sent:
            complete.append(work.is_completed())
        dist.send(torch.ones(1), dst=1)

    if dist.get_rank() == 0:
        net.second.register_full_backward_pre_hook(is_reached)
    x_shard, y_shard = own_shard()
    loss = F.cross_entropy(model(x_shard), y_shard)
    if dist.get_rank() == 1:
        dist.recv(torch.ones(1), src=0)  # waits
    loss.backward()
    return complete


on_rank_0, on_rank_1 = ranks(rank_1_begins_late)
print("rank 0's all-reduces before `second`, is each complete?", on_rank_0)
assert on_rank_0 == [False, False]

# %% [markdown]
# Rank 0 has sent the gradients of `last`, and its pass goes on although neither all-reduce is
# complete. If `send` waited, the two ranks would wait for each other, until `ranks` ends them.
#
# ### Gradient accumulation
#
# A batch that doesn't fit into memory is computed in parts. Their gradients add up in `.grad`, and
# then comes one update. So only the last pass must send. The others run inside
# `with model.no_sync():`, as with PyTorch's DDP:

# %%
class AccumulatingDDP(SmallDDP):
    synchronizing = True

    def mark_ready(self, p):
        if self.synchronizing:
            super().mark_ready(p)

    @contextlib.contextmanager
    def no_sync(self):
        self.synchronizing = False
        try:
            yield  # here the block runs
        finally:
            self.synchronizing = True

# %% [markdown]
# With two parts each loss is divided by 2. We also look at `last.bias` before the second pass:

# %%
def accumulated():
    model = AccumulatingDDP(equal_replica(), 200)
    x_shard, y_shard = own_shard()
    x_0, x_1 = x_shard.chunk(2)
    y_0, y_1 = y_shard.chunk(2)
    with model.no_sync():  # PyTorch's needs the forward pass in it, too
        loss = F.cross_entropy(model(x_0), y_0) / 2
        loss.backward()  # sends nothing
    own = model.module.last.bias.grad.clone()
    loss = F.cross_entropy(model(x_1), y_1) / 2
    loss.backward()  # sends the sum of both parts
    return own, gradients(model.module)


on_rank_0, on_rank_1 = ranks(accumulated)
for own, found in [on_rank_0, on_rank_1]:
    print("before:", own, "after:", found["last.bias"])
    assert largest_difference(found, whole) < 1e-12
assert not torch.equal(on_rank_0[0], on_rank_1[0])

# %% [markdown]
# Before the second pass each rank has a gradient of its own, because nothing was sent. After it
# both have that of the whole batch. So if you clip gradients (limit their size), do it after the
# last `backward()`, when the means are there.
#
# ## What PyTorch's DDP sends
#
# Does `DistributedDataParallel` find the same gradients, and what does it send? You can register a
# function that replaces its all-reduce, a **communication hook**. Ours notes the bucket's size, and
# then does what PyTorch does by default. The network has 40 layers with 1 MiB of gradients each:

# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def bucket_sizes():
    net = nn.Sequential()
    for _ in range(40):
        net.append(nn.Linear(512, 512))
    model = DistributedDataParallel(net)
    sizes = []

    def note_size(state, bucket):  # state is the None below
        packed = bucket.buffer()
        sizes.append(round(packed.nbytes / 2**20))
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, note_size)
    model(torch.ones(8, 512)).sum().backward()
    in_first_pass = len(sizes)  # so many buckets
    model(torch.ones(8, 512)).sum().backward()
    return sizes[:in_first_pass], sizes[in_first_pass:]


in_first_pass, in_second_pass = ranks(bucket_sizes)[0]
print("MiB in the first pass: ", in_first_pass)
print("MiB in the second pass:", in_second_pass)

# %% [markdown]
# So that is what the line `loss.backward()` sends. In this first pass everything is in one bucket,
# so that nothing is overlapped. Then PyTorch rebuilds the buckets in the order in which the
# gradients became ready. All ranks take rank 0's order, which it broadcasts in the next forward
# pass (`rebuild_buckets` in `reducer.hpp`). By default the first bucket is now about 1 MiB, so that
# sending begins soon, and the others are about 25 MiB.
#
# And the gradients are ours:

# %%
def after_two_passes(model):
    x_shard, y_shard = own_shard()
    for _ in range(2):  # the second time PyTorch has rebuilt its buckets
        model.zero_grad()
        F.cross_entropy(model(x_shard), y_shard).backward()
    return gradients(model.module)


def with_both():
    torch.manual_seed(dist.get_rank())
    ours = after_two_passes(SmallDDP(SmallNet(), 200))
    torch.manual_seed(dist.get_rank())
    pytorchs = after_two_passes(DistributedDataParallel(SmallNet()))
    return ours, pytorchs


for ours, pytorchs in ranks(with_both):
    print(ours["last.bias"], pytorchs["last.bias"])
    assert largest_difference(pytorchs, whole) < 1e-12
    assert largest_difference(ours, whole) < 1e-12

# %% [markdown]
# That is DDP: **each gradient becomes its mean over all ranks, in buckets that are sent while the
# pass goes on.** How much that saves depends on the link (deeper: What overlap is worth).
#
# `SmallDDP` has no room for frozen parameters, several dtypes or buffers. And each rank must use
# every layer in each pass: if one rank skips a layer, a bucket is never complete there, and the
# assertion in `finish` fails. What PyTorch's DDP does then is in deeper: DDP's cases.
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
# Its class `DDP` is `SmallDDP` with `no_sync`, several dtypes, frozen parameters, layers unused on
# some rank, and a guard that refuses, for example, a step before the gradients are averaged. Its
# `backward()` doesn't wait: you call `finish_gradient_synchronization()` after it. It finds the
# same gradients:

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
# on (chapter 15). On GPUs each process takes one, if there are enough, and sends by NCCL. We had
# only one GPU, so between GPUs it is untried.
#
# ## Summary
#
# - A DDP script is the script for one device, with a process group, a sampler, and two lines that
#   do the work: `DistributedDataParallel(net)` broadcasts rank 0's weights, and `backward()`
#   averages the gradients, by hooks. In forward passes PyTorch's DDP also sends buffers, and one
#   time the order in which rank 0's gradients became ready.
# - A bucket is one all-reduce of several gradients. All ranks send theirs in the same order, and
#   the pass goes on meanwhile. At its end `backward()` waits (on GPUs, the GPU does).
# - Replicas can agree and be wrong. Compare with one process.
#
# The short path ends here. Next, chapter 15: the same across machines, and what happens when one of
# them dies. (To large models: go on with chapter 16.)
#
# **Further reading.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training* (2020), arXiv:2006.15704.

# %% [markdown]
# ## Exercises
#
# All three change `SmallDDP`. Begin with `class Reordered(SmallDDP):` or the like, and override
# only the methods that change.
#
# 1. **In the order of arrival.** Note in which order the gradients arrive, and rebuild the buckets
#    in that order. Why must all ranks take the same one?
# 2. **Two halves of an all-reduce.** In `send`, replace it by `dist.reduce_scatter_single(part,
#    padded)`, which leaves each rank its part of the sum, and `dist.all_gather_single(padded,
#    part)`. (Before PyTorch 2.13 they are called `reduce_scatter_tensor` and
#    `all_gather_into_tensor`.) All parts must be equally long, so pad with zeros. Show that the
#    gradients are the same. What could a rank do between the two?
# 3. **Uneven shards.** Make the gradients those of the mean over all examples, whatever the sizes
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
# The ranks may see different orders, and their all-reduces must match, so rank 0 broadcasts its own
# order. The test takes `Branches`, with `stem` as its last layer. So at first the buckets that come
# first are complete last.

# %% tags=["solution"]
class Reordered(SmallDDP):
    def __init__(self, module, cap_bytes):
        self.order = []  # numbers of parameters, as their gradients came
        self.early = 0  # buckets sent before the last gradient was ready
        super().__init__(module, cap_bytes)
        self.parameters_in_order = list(module.parameters())
        self.number = {p: number for number, p in enumerate(self.parameters_in_order)}
        self.cap_bytes = cap_bytes

    def mark_ready(self, p):
        self.order.append(self.number[p])
        self.early = len(self.sent)
        super().mark_ready(p)

    def rebuild(self):
        order = torch.tensor(self.order)
        dist.broadcast(order, src=0)
        parameters = [self.parameters_in_order[number] for number in order]
        self.buckets = fill_buckets(parameters, self.cap_bytes)
        self.order.clear()
        self.begin_pass()


def sent_early():
    torch.manual_seed(0)
    net = Branches(left_first=dist.get_rank() == 0)
    stem = net.stem
    del net.stem
    net.stem = stem  # now the last in net.parameters()
    model = Reordered(net, 1)
    x_shard, y_shard = own_shard()
    early = []
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(x_shard), y_shard).backward()
        early.append(model.early)
        model.rebuild()
    order = [model.number[bucket[0]] for bucket in model.buckets]
    return early, order, gradients(net)


(early, order, found_0), (_, other_order, found_1) = ranks(sent_early)
print("sent before the last gradient was ready, in the first pass and in the second:", early)
assert order == other_order
assert early[0] < early[1]
assert largest_difference(found_0, expected) < 1e-12
assert largest_difference(found_1, expected) < 1e-12

# %% [markdown]
# ### Answer 2
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
        work = dist.all_gather_single(padded, part, async_op=True)
        self.sent.append((bucket, padded[: len(packed)], work))


def in_halves():
    model = InHalves(equal_replica(), 200)
    x_shard, y_shard = own_shard()
    F.cross_entropy(model(x_shard), y_shard).backward()
    return gradients(model.module)


assert largest_difference(ranks(in_halves, world=3), whole) < 1e-12

# %% [markdown]
# ### Answer 3
#
# The gradient of a shard's mean is weighted by $k\,n_r/n$, with $n_r$ examples of $n$ on one of $k$
# ranks. It is easiest to weight what the forward pass returns, by a hook on its gradient. Eleven
# examples on three ranks: four, four and three.

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
    return gradients(model.module)


torch.manual_seed(0)
net = SmallNet()
F.cross_entropy(net(x[:11]), y[:11]).backward()
print("weighted:    ", largest_difference(ranks(eleven, Weighted, world=3), gradients(net)) < 1e-12)
print("not weighted:", largest_difference(ranks(eleven, SmallDDP, world=3), gradients(net)) < 1e-12)
