# %% [markdown]
# # Deeper · When sharding pays
#
# Chapter 16 saved memory. What does that cost: how much does each stage send, what do PyTorch's own
# classes do, and what do published runs say?
#
# ## What you'll do
#
# Count messages with a ring of your own, time steps, compare with PyTorch's `fully_shard`, and hold
# formulas against runs on up to 1,536 GPUs.
#
# ## What you'll learn
#
# - what each stage sends, in one backward pass and in several;
# - what PyTorch calls each stage, and how it differs from ours;
# - why sharding cost almost nothing in one published run, and half of the speed in another.
#
# ## What you need
#
# Chapter 16, no GPU, and PyTorch. Reading takes {reading time}, running about 30 seconds.

# %% tags=["torch"]
import sys

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 16's sharded_train.py is, and chapter 14's ranks.py
from ranks import VARIABLES, ranks
from sharded_train import FSDP, Collectives, ShardedGradients, ShardedOptimizer

# %% [markdown]
# ## What each stage sends
#
# How many bytes does a rank send in a step? Our classes take any `collectives` with the two methods
# of chapter 16. So we hand them a ring that counts: each rank sends to the next and receives from
# the one before.

# %%
class Ring:
    def __init__(self):
        self.bytes = 0
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()

    def pass_on(self, piece):
        received = torch.empty_like(piece)
        sending = dist.isend(piece.contiguous(), (self.rank + 1) % self.world)
        dist.recv(received, (self.rank - 1) % self.world)
        sending.wait()
        self.bytes += piece.nbytes
        return received  # what the rank before has sent

    def reduce_scatter(self, whole):
        shards = whole.chunk(self.world)
        total = shards[self.rank - 1]
        for hop in range(2, self.world + 1):
            total = self.pass_on(total) + shards[(self.rank - hop) % self.world]
        return total, lambda: None  # nothing to wait for

    def all_gather(self, shard):
        shards = {self.rank: shard}
        for hop in range(1, self.world):
            shard = self.pass_on(shard)
            shards[(self.rank - hop) % self.world] = shard
        return torch.cat([shards[rank] for rank in range(self.world)]), lambda: None


# %% [markdown]
# **Predict:** among $k$ ranks, which share of the whole does each send in one half, and in both?

# %%
def count_halves():
    ring = Ring()
    whole = torch.arange(12.0 * ring.world) * (ring.rank + 1)
    shard, _ = ring.reduce_scatter(whole)
    half = ring.bytes / whole.nbytes
    gathered, _ = ring.all_gather(shard)
    total = torch.arange(12.0 * ring.world) * sum(range(ring.world + 1))
    assert torch.equal(gathered, total), "all shards of the sum, in order"
    return half, ring.bytes / whole.nbytes


for k in [2, 3, 4]:
    half, both = ranks(count_halves, world=k)[0]
    print(f"{k} ranks: {half:.3f} in one half, {both:.3f} in both")
    assert np.allclose(ranks(count_halves, world=k), np.array([1, 2]) * (k - 1) / k)

# %% [markdown]
# Each half sends $(k-1)/k$ of the whole, both as much as chapter 03's all-reduce. Now the stages,
# with a small *transformer*, as people shard in practice. It reads an image row by row.

# %%
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):  # [images, rows, width]
        parts = self.mix(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts  # each [images, 4 heads, rows, width / 4]
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.rows = nn.Linear(28, width)
        self.scores = nn.Linear(width, 10)
        self.place = nn.Parameter(torch.randn(28, width) / 50)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])

    def forward(self, x):  # [images, 28, 28]
        return self.scores(self.blocks(self.rows(x) + self.place).mean(1))


# %% tags=["trains"]
images = torch.randn(16, 28, 28, generator=torch.Generator().manual_seed(16))
labels = torch.arange(16) % 10


def messages(stage, passes):
    net = Reader(64, 2)
    size = 4 * sum(p.numel() for p in net.parameters())
    ring = Ring()
    if stage == 3:
        model = FSDP(net)
        model.collectives = ring
        optimizer = torch.optim.Adam(model.parameters())
    else:
        model = net
        kind = {1: ShardedOptimizer, 2: ShardedGradients}[stage]
        optimizer = kind(net.parameters(), torch.optim.Adam)
        optimizer.collectives = ring
    for _ in range(passes):
        F.cross_entropy(model(images[:2]), labels[:2]).backward()
        if stage == 3:
            model.finish_gradient_synchronization()
    optimizer.step()
    return ring.bytes / size


sent = {}
for stage in [1, 2, 3]:
    for k in [2, 4]:
        sent[stage, k] = max(ranks(messages, stage, 1, world=k))
        print(f"stage {stage} on {k} ranks sends {sent[stage, k]:.2f} times the weights")

# %% [markdown]
# Stages 1 and 2 send $2(k-1)/k$, as data parallelism does. Stage 3 sends up to $3(k-1)/k$ (section
# 7.2.2 of ZeRO's paper), here a little less: the backward pass needs neither the linear layers'
# biases nor `place`, and `rows.weight` only for the images' gradient, which isn't computed.
#
# With $m$ backward passes a step, whose gradients add up, stage 1 still reduces once, stage 2
# after each pass, and stage 3 gathers in each, too:

# %%
for stage in [1, 2, 3]:
    print(f"stage {stage}, three backward passes: {max(ranks(messages, stage, 3)):.2f}")

# %% [markdown]
# With many micro-batches take stage 1, if it fits.

# %% tags=["fold"]
# check: the formulas, with the share of the weights that the backward pass doesn't gather
sizes = {name: p.numel() for name, p in Reader(64, 2).named_parameters()}
once = 0
for name, size in sizes.items():
    if name in ("place", "rows.weight") or "bias" in name and "norm" not in name:
        once += size / sum(sizes.values())
for k in [2, 4]:
    expected = {1: 2 * (k - 1) / k, 2: 2 * (k - 1) / k, 3: (3 - once) * (k - 1) / k}
    for stage in [1, 2, 3]:
        assert np.isclose(sent[stage, k], expected[stage], rtol=0.01), (stage, k)
for stage, expected in {1: 1, 2: 2, 3: 1.5 * (3 - once)}.items():
    assert np.isclose(max(ranks(messages, stage, 3)), expected, rtol=0.01), stage
print("they hold")

# %% [markdown]
# What does gloo send? The operating system counts the bytes that pass through the interface.

# %% tags=["measured"]
def sent_by_gloo():
    x = torch.ones(2_000_000)
    interface = VARIABLES["GLOO_SOCKET_IFNAME"]

    def reduce_scatter():
        shard, wait = Collectives().reduce_scatter(x)
        wait()

    def all_gather():
        whole, wait = Collectives().all_gather(x.chunk(2)[0])
        wait()

    shares = []
    for operation in [lambda: dist.all_reduce(x), reduce_scatter, all_gather]:
        dist.barrier()
        before = psutil.net_io_counters(pernic=True)[interface].bytes_sent
        dist.barrier()  # all have read: nobody sends before
        operation()
        dist.barrier()
        after = psutil.net_io_counters(pernic=True)[interface].bytes_sent
        shares.append((after - before) / 2 / x.nbytes)  # of two ranks
    return shares


all_reduce, reduce_scatter, all_gather = ranks(sent_by_gloo)[0]
print(f"all_reduce {all_reduce:.2f}, reduce_scatter {reduce_scatter:.2f}, all_gather "
      f"{all_gather:.2f} of the whole from each of two ranks")

# %% [markdown]
# By the formula it should be 1, ½ and ½. Gloo's reduce-scatter sends twice that: it is an
# all-reduce of which each rank keeps its shard (`reduce_scatter_tensor_coalesced` in PyTorch's
# `ProcessGroupGloo.cpp`, read in a version before 2.13; 2.13's profiler still shows an all-reduce).
# So when we speak of bytes sent we mean a ring's.
#
# ## What it costs in time
#
# How long does a step take? Data parallelism and the three stages take turns on two ranks.

# %% tags=["fold", "trains", "few:rounds=12=>rounds=3"]
# measure: ms of a step of each, in turns, 16 images a rank
import time


def make_wide(width=512):
    torch.manual_seed(16)
    layers = [nn.Linear(784, width)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(nn.Flatten(), *layers, nn.ReLU(), nn.Linear(width, 10))


def make_stage(name):
    net = make_wide()
    if name == "stage 1":
        return net, ShardedOptimizer(net.parameters(), torch.optim.Adam)
    if name == "stage 2":
        return net, ShardedGradients(net.parameters(), torch.optim.Adam)
    model = FSDP(net) if name == "stage 3" else net
    optimizer = torch.optim.Adam(model.parameters())
    if name == "data parallel":
        def average(*_):
            for p in net.parameters():
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        optimizer.register_step_pre_hook(average)
    return model, optimizer


def take_turns(names, rounds=12):
    pairs = {name: make_stage(name) for name in names}
    times = {name: [] for name in names}
    for _ in range(rounds):
        for name, (model, optimizer) in pairs.items():
            dist.barrier()
            begin = time.perf_counter()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            if name == "stage 3":
                model.finish_gradient_synchronization()
            optimizer.step()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: each[2:] for name, each in times.items()}  # the first two warm up


times = ranks(take_turns, ["data parallel", "stage 1", "stage 2", "stage 3"])[0]

# %% tags=["fold", "measured"]
# measure: the middle half (from 25 to 75 %) of a step's times; does it overlap data parallel's?
their_low, their_median, their_high = np.percentile(times["data parallel"], [25, 50, 75])
print(f"data parallel: {their_median:.0f} ms a step, middle half {their_low:.0f} to "
      f"{their_high:.0f}")
for name in ["stage 1", "stage 2", "stage 3"]:
    low, median, high = np.percentile(times[name], [25, 50, 75])
    if low > their_high:
        verdict = f"{median / their_median:.1f} times as long as data parallel's"
    elif high < their_low:
        verdict = f"shorter, {median / their_median:.1f} times data parallel's"
    else:
        verdict = "overlaps data parallel's: no winner"
    print(f"{name}: {median:.0f} ms, middle half {low:.0f} to {high:.0f}; {verdict}")

# %% [markdown]
# Such times are of one run, on two cores that compute and send. What is held and what is sent is
# the same on any machine.
#
# ## With MXNet's arrays
#
# Chapter 07's `device` store had one owner for each parameter. Cut every parameter instead, and
# that is stage 1. On four simulated devices, with momentum; the oracle updates in one place:

# %%
import mxnet as mx
from mxnet import nd


def update(weight, gradient, momentum):  # both in place
    nd.sgd_mom_update(weight, gradient, momentum, lr=0.1, momentum=0.9, out=weight)


k = 4
n = 1000
four = [mx.cpu(rank) for rank in range(k)]
begin = nd.random.normal(shape=n)
step_gradients = nd.random.normal(shape=(20, k, n))  # of each step and device
shards = [slice(rank * n // k, (rank + 1) * n // k) for rank in range(k)]

whole = begin.copy()
momentum = nd.zeros(n)
for gradients in step_gradients:
    update(whole, gradients.mean(0), momentum)

# %%
replicas = [begin.copyto(device) for device in four]
momenta = [nd.zeros(n // k, ctx=device) for device in four]
for gradients in step_gradients:
    updated = []
    for rank, device in enumerate(four):
        parts = [gradients[other, shards[rank]].as_in_context(device) for other in range(k)]
        shard = replicas[rank][shards[rank]].copy()
        update(shard, sum(parts) / k, momenta[rank])  # after a reduce-scatter
        updated.append(shard)
    for device, replica in zip(four, replicas):  # all-gather
        replica[:] = nd.concat(*[shard.as_in_context(device) for shard in updated], dim=0)

assert largest_difference([[replica] for replica in replicas], [whole]) < 1e-5
print(f"equal to 1e-5 after 20 steps; momenta on each device: {momenta[0].size} of {n}")

# %% [markdown]
# ## PyTorch's own
#
# PyTorch's FSDP is `fully_shard`, to be called on each layer and then on the whole. It cuts along
# the first dimension and gathers a layer's parameters in one message. Scalars it refuses
# (`_fsdp_init.py`).

# %% tags=["trains"]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def their_five_steps(compute):
    torch.manual_seed(16)
    net = Reader(32, 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=compute)
    for part in [*net.blocks, net]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(net(images.chunk(2)[dist.get_rank()]),
                        labels.chunk(2)[dist.get_rank()]).backward()
        optimizer.step()
    return {name: value.full_tensor() for name, value in net.state_dict().items()}


# %% tags=["trains"]
def our_five_steps(compute):
    torch.manual_seed(16)
    model = FSDP(Reader(32, 2), compute)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(images.chunk(2)[dist.get_rank()]),
                        labels.chunk(2)[dist.get_rank()]).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return model.gather_full_params()


# %% [markdown]
# With `compute` bfloat16, weights and gradients are sent and used in two bytes, while each rank
# updates its shard in float32, the *master weights*. Without these small updates are lost: in
# bfloat16 1 + 0.001 is 1. Five steps with AdamW on two ranks:

# %% tags=["measured"]
assert torch.tensor(1.0, dtype=torch.bfloat16) + 0.001 == 1, "rounded away"
for compute, name, most in [(None, "float32", 1e-5), (torch.bfloat16, "bfloat16", 0.02)]:
    ours = ranks(our_five_steps, compute)[0]
    theirs = ranks(their_five_steps, compute)[0]
    difference = largest_difference(ours, theirs)
    print(f"{name}: ours and theirs differ by {float(difference):.0e}")
    assert difference < most

# %% [markdown]
# For stage 1 there is `ZeroRedundancyOptimizer`. It doesn't cut parameters: each belongs to one
# rank as a whole, which broadcasts it after the update (`zero_redundancy_optimizer.py`). And it
# expects gradients that are reduced already, so it sends $3 (k-1)/k$ on average. What each is
# called:
#
# | sharded | ZeRO's paper | ours | PyTorch |
# | --- | --- | --- | --- |
# | state | $P_{os}$, stage 1 | `ShardedOptimizer` | `ZeroRedundancyOptimizer` |
# | state, gradients | $P_{os+g}$, stage 2 | `ShardedGradients` | (see below) |
# | all | $P_{os+g+p}$, stage 3 | `FSDP` | `fully_shard` |
#
# Nearest to stage 2 is `fully_shard` with `reshard_after_forward=False`, which gathers once for
# both passes. Our `FSDP` builds the whole network on each rank first. `fully_shard` takes one on
# the *meta* device (shapes, no values); then `to_empty` allocates the shards, to be filled
# (`_fsdp_param_group.py` in `torch/distributed/fsdp/_fully_shard`).
#
# ### An optimizer made before
#
# `fully_shard` puts new parameters in the place of the old ones. An optimizer made before still
# holds the old ones. They get no more gradients, and no error says so. Ours keeps the parameters
# and changes what is in them:

# %% tags=["trains"]
def has_learned(kind, optimizer_is_made):
    net = Reader(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    if kind == "theirs":
        model = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = FSDP(net)
    if optimizer_is_made == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    F.cross_entropy(model(images), labels).backward()
    if kind == "ours":
        model.finish_gradient_synchronization()
    optimizer.step()
    return not all(torch.equal(a, p) for a, p in zip(before, model.parameters()))


learned = {}
for kind in ["theirs", "ours"]:
    for made in ["before", "after"]:
        learned[kind, made] = ranks(has_learned, kind, made)[0]
        print(f"{kind}, optimizer made {made}: has learned {learned[kind, made]}")
assert not learned["theirs", "before"] and sum(learned.values()) == 3

# %% [markdown]
# ## On many GPUs
#
# Torchtitan trained Llama 3.1 8B with FSDP and
# selective activation checkpointing on machines of 8 H100s, two sequences a GPU
# (`benchmarks/llama3_h100_202412_torchtitan.md`). It needed 82.4 GiB a GPU on 8 GPUs and 67.0 on
# 128; with `torch.compile` 77.0 and 62.0. From 8 to 128 GPUs only what is sharded shrinks: by the
# formula, 16 bytes a parameter (AdamW and float32 master weights are torchtitan's defaults).

# %%
numbers = 8_030_261_248
formula = 16 * numbers * (1 / 8 - 1 / 128) / 2**30
print(f"saved on each GPU: {formula:.1f} GiB by the formula; published {82.4 - 67.0:.1f} and "
      f"{77.0 - 62.0:.1f}")
assert 0.85 < formula / (82.4 - 67.0) < 1

# %% [markdown]
# The formula misses by 7 to 9 %; we don't know why. And time? On 8 GPUs nothing leaves the machine.
# On 128, a ring that goes from machine to machine carries each byte into every machine once, and
# each machine has eight adapters of 400 Gbit/s to share that work. Weights are gathered twice in
# bfloat16, gradients reduced in float32 (defaults again); sequences had 8,192 tokens (its
# `train_configs/llama3_8b.toml`).

# %%
seconds = numbers * (2 + 2 + 4) * (127 / 128) / (8 * 400e9 / 8)
for tokens8, tokens128 in ((5762, 5605), (6667, 6514)):  # a second, on each GPU
    more = 2 * 8192 / tokens128 - 2 * 8192 / tokens8
    print(f"messages {seconds:.2f} s, if nothing hides them; published: {more:.2f} s longer than "
          f"{2 * 8192 / tokens8:.2f} s")
    assert 0 < more < seconds

# %% [markdown]
# The step became 2 to 3 % longer, by less than the messages take, as if some were hidden; but these
# are single readings of throughput, so it may be noise. With a fixed batch, more GPUs compute less
# each, and send as much. D. Narayanan et al. (2021, arXiv:2104.04473, table 2) give ZeRO's stage 3
# with 174.6 billion parameters and always 1,536 sequences of 2,048 tokens, on 384, 768 and 1,536
# A100s, eight to a machine with eight adapters of 200 Gbit/s. From their days for 300 billion
# tokens, a projection from throughput:

# %%
steps = 300e9 / (1536 * 2048)
published = {}  # seconds a step, by GPUs
for gpus, days in [(384, 90), (768, 74), (1536, 74)]:
    published[gpus] = days * 86_400 / steps
link = 174.6e9 * (2 + 2 + 2) / (8 * 200e9 / 8)
counts = np.array([384, 768, 1536])
expected = published[384] * 384 / counts + link
for gpus, seconds in zip(counts, expected):
    print(f"{gpus} GPUs: {seconds:.0f} s scaled from 384, plus all messages; "
          f"{published[gpus]:.0f} s published")
assert 25 < expected[2] < 27 and 66 < published[1536] < 68

# %% tags=["fold"]
# draw: seconds a step against the number of GPUs
from helpers.plotting import curves, show

lines = {"from the published days": (counts, list(published.values())),
         "scaled from 384, plus all messages": (counts, expected)}
fig, ax = curves("ZeRO's stage 3, fixed batch: 1,536 GPUs step no faster than 768", "GPUs",
                 "seconds a step", lines)
ax.set_xscale("log", base=2)
ax.set_xticks(counts, counts)
ax.set_ylim(0, 100)
show(fig, alt="Seconds a step against the number of GPUs: the published times of 768 and of 1,536 "
     "are equal; on 1,536 scaling and messages together would give less than half.")

# %% [markdown]
# Even if no message were hidden, 1,536 GPUs should need 26 s, not 67. Each GPU then has one
# sequence in place of four, which may make computing less efficient too; the paper blames
# communication between machines. We can't separate the two. With tensor and pipeline parallelism,
# which gather no weights, it estimates 23 days in place of 74 (see [the map](../map.md)).
#
# ## Summary
#
# - With one backward pass a step, stages 1 and 2 send as much as data parallelism, stage 3 half as
#   much again. With $m$ passes stage 1 still sends $2 (k-1)/k$, stage 2 $(m+1) (k-1)/k$ and stage 3
#   almost $3 m (k-1)/k$.
# - In float32 our FSDP agrees with `fully_shard` to $10^{-5}$.
# - Published: with a growing batch FSDP's step on 128 H100s was 2 to 3 % longer than on 8 (single
#   readings); a projected step of a fixed batch took 82 s on 384 A100s, 67 on 768 and on 1,536.
# - Where the replica doesn't fit, take the first stage with which it does, and measure: what
#   bandwidths alone predict may be far too good.
