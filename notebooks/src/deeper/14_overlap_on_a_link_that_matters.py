# %% [markdown]
# # Deeper · Overlap on a link that matters
#
# In chapter 14 the cores that compute also carry the messages. What does overlap bring where
# something else moves the data, and how large should buckets be then?
#
# ## What you'll do
#
# Send the same buckets after the backward pass and during it, on gloo. Then simulate a link that
# needs no core, and measure six sizes of buckets on it.
#
# ## What you'll learn
#
# - what sending costs beyond the all-reduce itself;
# - why neither one large bucket nor many small ones are best;
# - which sizes PyTorch takes.
#
# ## What you need
#
# Chapter 14 and PyTorch. Reading takes {reading time}, running a bit over a minute on two cores.

# %% tags=["torch"]
import sys
import time
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.plotting import BLUE, GREY, ORANGE, figure, show
from helpers.timing import spread

sys.path.insert(0, "..")  # where chapter 14's files are
from ddp_train import DDP, fill_buckets, flatten
from ranks import ranks

# %% [markdown]
# The network of chapter 14's timings: much to send for little compute.

# %%
def deep():
    layers = [nn.Linear(512, 512), nn.ReLU()]
    for _ in range(20):
        layers += [nn.Linear(512, 512), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


parameters = list(deep().parameters())
BYTES = sum(p.nbytes for p in parameters)
print(f"{len(parameters)} parameters, {BYTES / 2**20:.1f} MB of 2**20 bytes")

# %% [markdown]
# ## The same buckets, at the end and during
#
# `AtEnd` is `DDP` without overlap: its hook only notes gradients, so all buckets are sent after the
# backward pass. The last class sends nothing.

# %%
class AtEnd(DDP):
    def mark_ready(self, p):
        self.ready.add(p)


class Local(AtEnd):
    def send(self, bucket):
        self.sent.append((flatten(bucket), Arrival(at=0)))


class Arrival:
    """What `wait` waits for: a moment."""

    def __init__(self, at):
        self.at = at

    def wait(self):
        time.sleep(max(0, self.at - perf_counter()))

# %% [markdown]
# One step on the clock, and all contestants in turns, in an order that both ranks share:

# %% tags=["trains"]
def clock(model, optimizer, n):
    images = torch.ones(n, 512)
    labels = torch.arange(n) % 10
    begin = perf_counter()
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return 1e3 * (perf_counter() - begin)  # ms


def race_in_turns(models, rounds, n, before_each):
    optimizers = {}
    found = {}
    for name, model in models.items():
        optimizers[name] = torch.optim.SGD(model.parameters(), 0.01)
        found[name] = []
    order = np.random.default_rng(0)
    for round_number in range(rounds + 2):
        for place in order.permutation(len(models)):
            name = list(models)[place]
            before_each(models[name])
            milliseconds = clock(models[name], optimizers[name], n)
            if round_number >= 2:  # the first two warm up
                found[name].append(milliseconds)
    return found

# %%
def race_on_gloo(rounds):
    models = {
        "local": Local(deep()),
        "0.01 MB, at the end": AtEnd(deep(), 0.01),
        "0.01 MB, during": DDP(deep(), 0.01),
        "5 MB, at the end": AtEnd(deep(), 5),
        "5 MB, during": DDP(deep(), 5),
    }
    return race_in_turns(models, rounds, n=32, before_each=lambda model: dist.barrier())

# %% tags=["measured", "trains", "few:ROUNDS = 11=>ROUNDS = 3"]
ROUNDS = 11
times = ranks(race_on_gloo, ROUNDS, seconds=120)[0]
for name, row in times.items():
    low, median, high = spread(row)
    print(f"{name:20} {median:6.1f} ms (half of the rounds: {low:.1f} to {high:.1f})")

# %% [markdown]
# What did overlap save? The difference within a round, for the same buckets. And what does an
# all-reduce of this size take with no computation beside it?

# %% tags=["fold", "measured"]
# measure: what overlap saves in a round, and an all-reduce of the same size alone
def all_reduce_alone(rounds):
    found = []
    for _ in range(rounds + 2):
        buffer = torch.zeros(BYTES // 4)
        dist.barrier()
        begin = perf_counter()
        dist.all_reduce(buffer)
        found.append(1e3 * (perf_counter() - begin))
    return found[2:]


for size in ("0.01 MB", "5 MB"):
    saved = np.subtract(times[f"{size}, at the end"], times[f"{size}, during"])
    low, median, high = np.percentile(saved, [25, 50, 75])
    print(f"{size:7}: overlap saves {median:+.1f} ms "
          f"(half of the rounds: {low:+.1f} to {high:+.1f})")
alone = spread(ranks(all_reduce_alone, ROUNDS)[0]).median
beyond = spread(times["5 MB, at the end"]).median - spread(times["local"]).median
print(f"an all-reduce alone: {alone:.1f} ms; what sending in buckets of 5 MB adds to a step: "
      f"{beyond:.1f} ms")

# %% [markdown]
# Where the middle half reaches over zero, overlap's gain can't be told from the noise. And a step
# pays for more than the all-reduce: buckets are filled and emptied, and each rank waits for the
# slower one.
#
# ## A link of its own
#
# Suppose that a network card moves the data by itself. We imitate that: a message is done after
# *latency + bytes / rate*, one after the other, and nobody's core is used. One process is enough,
# if the others do the same at the same time. It sends nothing: `wait` sleeps until the message
# would have arrived.

# %%
class Link:
    def __init__(self, latency, rate):  # ms, bytes a ms
        self.latency = latency
        self.rate = rate
        self.free = 0.0  # when the last message will have arrived

    def send(self, nbytes):
        took = (self.latency + nbytes / self.rate) / 1e3
        self.free = max(self.free, perf_counter()) + took
        return Arrival(self.free)


link = Link(latency=1, rate=1000)
begin = perf_counter() + 60
link.free = begin  # it has work until then
for nbytes in [4000, 0, 9000]:
    print(f"{1e3 * (link.send(nbytes).at - begin):.0f} ms")

# %% tags=["fold"]
# check: 1 + 4, then 1, then 1 + 9 ms; an idle link starts now; wait lasts until the arrival
link.free = begin
found = []
for nbytes in (4000, 0, 9000):
    found.append(round(1e3 * (link.send(nbytes).at - begin)))
assert found == [5, 6, 16]
begin = perf_counter()
arrival = Link(100, 1).send(0)
assert begin + 0.1 <= arrival.at <= perf_counter() + 0.1
arrival.wait()
assert perf_counter() >= arrival.at

# %% [markdown]
# `DDP` and `AtEnd` on this link: only `send` is replaced.

# %%
class Linked(DDP):
    def send(self, bucket):
        buffer = flatten(bucket)
        self.sent.append((buffer, self.link.send(buffer.nbytes)))


class LinkedAtEnd(AtEnd):
    def send(self, bucket):
        buffer = flatten(bucket)
        self.sent.append((buffer, self.link.send(buffer.nbytes)))

# %% [markdown]
# **Predict:** with a latency of half a millisecond and 1 GB/s, which limit is best: one bucket for
# each parameter (44), one for all, or something between?

# %%
SIZES = [0.01, 2, 4, 8, 16, 25]  # MB


def race_on_link(rounds):
    models = {"local": Local(deep())}
    for size in SIZES:
        models[f"{size} MB, at the end"] = LinkedAtEnd(deep(), size)
        models[f"{size} MB, during"] = Linked(deep(), size)

    def new_link(model):
        model.link = Link(latency=0.5, rate=1e6)

    return race_in_turns(models, rounds, n=64, before_each=new_link)

# %% tags=["trains", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9
(linked,) = ranks(race_on_link, ROUNDS, world=1, seconds=120)

# %% [markdown]
# Medians in ms. *hidden* is what overlap saves, as a share of the time that the link is busy.

# %% tags=["fold", "measured"]
# draw: ms a step against the limit of a bucket, at the end and during
for size in SIZES:
    messages = len(fill_buckets(parameters[::-1], size * 2**20))
    busy = messages * 0.5 + BYTES / 1e6  # ms of the link
    end = np.array(linked[f"{size} MB, at the end"])
    during = np.array(linked[f"{size} MB, during"])
    hidden = np.median((end - during) / busy)
    print(f"{size:5} MB: {messages:2} messages, {busy:4.1f} ms of the link; a step at the end "
          f"{np.median(end):5.1f} ms, during {np.median(during):5.1f}; hidden {hidden:4.0%}")
print(f"nothing sent: {np.median(linked['local']):.1f} ms")

fig, ax = figure("On a simulated link, for six limits of a bucket",
                 "limit of a bucket, MB", "ms a step")
for kind, color, style in (("at the end", ORANGE, "s--"), ("during", BLUE, "o-")):
    quartiles = []
    for size in SIZES:
        quartiles.append(spread(linked[f"{size} MB, {kind}"]))
    low, median, high = np.transpose(quartiles)
    ax.errorbar(range(len(SIZES)), median, (median - low, high - median), fmt=style, color=color,
                label=kind, capsize=3)
ax.axhline(np.median(linked["local"]), color=GREY, ls=":", label="nothing sent")
ax.set_xticks(range(len(SIZES)), [f"{size:g}" for size in SIZES])
ax.set_ylim(bottom=0)
ax.legend()
show(fig, alt="Step time against the limit of a bucket on a simulated link, with and without "
     "overlap: medians and middle halves.")

# %% [markdown]
# **Overlap pays where the link isn't the CPU, and buckets of middle size are best.** Many small
# messages pay the latency each time. One large bucket can't leave before the last gradient is
# there, nor be filled or emptied while another is on its way. With everything in one bucket nothing
# can be hidden, so what its row shows as hidden is measurement error. Which limit is best depends
# on the link and on the network.
#
# **On GPUs:** NCCL's kernels share the GPU with the backward pass (its user guide: CTA policy
# flags). We didn't measure what that costs.
#
# ## What PyTorch takes
#
# By default PyTorch puts all gradients of a type into one bucket for the first step
# (`compute_bucket_size_limits` in `torch/nn/parallel/distributed.py`). Then it fills buckets in the
# order in which gradients came: one of about 1 MB, the next of 25 (`rebuild_buckets` in
# `reducer.hpp`; chapter 14's first exercise). With `find_unused_parameters=True` both limits hold
# from the start, and buckets stay.
#
# ## Summary
#
# - Where cores carry the messages, overlap competes with the compute that it should hide behind.
# - On a link of its own, overlap hides a part of the link's time.
# - A bucket should be large against the latency, and small against all that is sent.
