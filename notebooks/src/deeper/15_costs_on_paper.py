# %% [markdown]
# # Deeper · Costs on paper
#
# How long would gradients travel, over a link that you don't have? And how much memory does a
# model need on each device, before you buy one? Both can be estimated on paper. Nothing here is
# measured but one count of bytes; the assumptions are named.
#
# ## What you'll do
#
# Count what the busiest machine sends with servers and in a ring. Turn bytes into seconds for three
# models on three links. Count the memory of a billion parameters. Find how often to save.
#
# ## What you'll learn
#
# - when one server is the limit, and when as many servers as workers equal a ring;
# - why LeNet is hopeless on any link here, and a billion parameters may not be;
# - what every DDP worker holds, whatever the batch.
#
# ## What you need
#
# Chapters 03 and 15, and deeper: The parameter server. No GPU. Reading takes {reading time},
# running a few seconds. One cell needs PyTorch; without it, skip that.

# %%
import numpy as np
from helpers.plotting import BLUE, GREEN, ORANGE, curves, figure, show

# %% [markdown]
# ## Bytes
#
# There are $k$ workers, and the gradients have $S$ bytes. Each worker sends $S$ to the servers and
# gets $S$ back. What does the busiest machine send? We list all messages of a step, each as a
# sender, a receiver and a size. A message within a machine costs its link nothing.

# %%
def most_sent(messages):
    sent = {}
    for sender, receiver, size in messages:
        sent.setdefault(sender, 0)
        if sender != receiver:
            sent[sender] += size
    return max(sent.values())


print(most_sent([("a", "b", 1), ("a", "a", 5), ("b", "a", 2)]))

# %% [markdown]
# Each of several servers has an equal part of the keys. It stands on a machine of its own, or on a
# worker's machine. In a ring (chapter 03), each worker sends a $k$-th to the next, $2(k-1)$ times:

# %%
def server_messages(k, server_machines):
    part = 1 / len(server_machines)  # of S
    messages = []
    for worker in range(k):
        for server in server_machines:
            messages.append((worker, server, part))  # push
            messages.append((server, worker, part))  # pull
    return messages


def ring_messages(k):
    messages = []
    for _ in range(2 * (k - 1)):
        for rank in range(k):
            messages.append((rank, (rank + 1) % k, 1 / k))
    return messages

# %% [markdown]
# **Predict:** with 8 workers, what does a single server send? And each machine, if every worker's
# machine has a server as well?

# %%
k = 8
one_server = most_sent(server_messages(k, ["server"]))
eight_servers = most_sent(server_messages(k, range(k)))
ring = most_sent(ring_messages(k))
print(f"one server sends {one_server} S; with eight, each machine sends {eight_servers} S; "
      f"in a ring {ring} S")

# %% tags=["fold"]
# check: k S; and 2 (k - 1) / k S in both other cases, for 2 to 16 workers
for workers in range(2, 17):
    least = 2 * (workers - 1) / workers
    assert most_sent(server_messages(workers, ["server"])) == workers
    assert np.isclose(most_sent(server_messages(workers, range(workers))), least)
    assert np.isclose(most_sent(ring_messages(workers)), least)

# %% [markdown]
# One server sends $kS$ and receives as much. As many servers as workers, on the same machines, come
# to the same $2\frac{k-1}{k}S$ as a ring, if the keys can be divided equally.
#
# ## Seconds
#
# A message costs a latency, and a time for each byte. A push and a pull cost a latency each, if
# messages to several servers overlap; a ring has $2(k-1)$ messages in turn. We assume that no pull
# begins before the last push has arrived. (A server that answers each key as soon as it is complete
# could need half as long.)

# %%
def server_seconds(others, part, bandwidth, latency):
    """The busiest server: `part` bytes from each of the other machines' workers, and back."""
    one_way = latency + others * part / bandwidth
    return 2 * one_way


def ring_seconds(k, size, bandwidth, latency):
    one_message = latency + size / k / bandwidth
    return 2 * (k - 1) * one_message


print("one server for 8 workers, 1 byte at 1 byte/s: ", server_seconds(8, 1, 1, latency=0), "s")
print("ring of 8, the same:                          ", ring_seconds(8, 1, 1, latency=0), "s")
print("ring of 8, if each message takes 1 s to start:", ring_seconds(8, 1, 1, latency=1), "s")

# %% tags=["fold"]
# check: seconds follow from the counts of bytes; a ring of 8 has 14 latencies
assert server_seconds(8, 1, 1, 0) == 16, "it receives 8 S, then sends 8 S"
assert np.isclose(server_seconds(7, 1 / 8, 1, 0), eight_servers)
assert np.isclose(ring_seconds(8, 1, 1, 0), ring)
assert ring_seconds(8, 1, 1, 1) == 14 + 1.75

# %% [markdown]
# Now three models, 16 workers in a ring, and three links. The assumptions:
#
# - devices train at 5 TFLOP/s, links run at their full rate, a message's latency is 10 to 100 µs;
# - each worker's batch has 256 images, or 16 texts of 1,024 tokens;
# - operations for an image of 28×28 are from deeper: Counting operations, predicting GPUs; a dense
#   model takes 6 for each parameter and token, 2 forward and 4 backward;
# - nothing is overlapped (chapter 14).
#
# The table shows communication as a share of the computing, for the short and the long latency.

# %%
parameters = {"LeNet": 129_068, "ResNet-18": 11_175_818, "a billion": 1e9}
operations = {
    "LeNet": 256 * 13_502_160,
    "ResNet-18": 256 * 202.5 * 13_502_160,
    "a billion": 16 * 1024 * 6 * 1e9,
}
bandwidths = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}  # bytes/s

print("             computing      1 Gbit/s        10 Gbit/s       100 Gbit/s")
share = {}
for model in parameters:
    computing = operations[model] / 5e12
    line = f"{model:10} {1000 * computing:8,.1f} ms"
    for link, bandwidth in bandwidths.items():
        size = 4 * parameters[model]
        short = ring_seconds(16, size, bandwidth, 10e-6) / computing
        long = ring_seconds(16, size, bandwidth, 100e-6) / computing
        share[model, link] = short, long
        line += f"{short:8.0%} to{long:5.0%}"
    print(line)

# %% tags=["fold"]
# check: the sentences below, from the numbers above
computing = operations["LeNet"] / 5e12
print(f"30 latencies: {30 * 10e-6 / computing:.0%} to {30 * 100e-6 / computing:.0%} of LeNet's "
      f"computing; the billion has {1e9 / parameters['ResNet-18']:.0f} times ResNet-18's "
      f"gradients, and {operations['a billion'] / operations['ResNet-18']:.0f} times its work")
assert 0.4 < 30 * 10e-6 / computing < 0.45 and 4 < 30 * 100e-6 / computing < 4.5
for link in bandwidths:
    assert min(share["LeNet", link]) > 0.4
    assert max(share["a billion", link]) < min(share["ResNet-18", link])

# %% [markdown]
# LeNet's step is so short that 30 latencies alone take from two fifths of it to four times as long:
# no link gets below that. The billion has 89 times ResNet-18's gradients, but 140 times its work.
# **What decides is the work for each byte, and that grows with each worker's batch.**
#
# How do servers do, with more workers? MXNet sends an array of less than a million entries whole to
# one server, and many of ResNet-18's have 589,824 (deeper: The parameter server). So its busiest
# server gets at least one of those, beside its part of the larger ones.

# %%
computing = operations["ResNet-18"] / 5e12
bandwidth = bandwidths["10 Gbit/s"]
latency = 100e-6
size = 4 * parameters["ResNet-18"]
large = 4 * 9 * 512 * (256 + 3 * 512)  # bytes of the arrays that are cut: 3×3 kernels, 512 wide
small = 4 * 9 * 256 * 256  # of the largest array that isn't

ways = ["one server", "k servers, MXNet's rule", "k servers, equal parts", "ring"]
seconds = {way: [] for way in ways}
numbers = [2, 4, 8, 16, 32, 64, 128]
for k in numbers:
    by_rule = max(size / k, large / k + small)  # at least, for the busiest server
    found = {
        "one server": server_seconds(k, size, bandwidth, latency),
        "k servers, MXNet's rule": server_seconds(k - 1, by_rule, bandwidth, latency),
        "k servers, equal parts": server_seconds(k - 1, size / k, bandwidth, latency),
        "ring": ring_seconds(k, size, bandwidth, latency),
    }
    for way in ways:
        seconds[way].append(found[way])

for way in ways:
    print(f"{way:24} {1000 * seconds[way][0]:4.0f} ms with 2 workers, "
          f"{1000 * seconds[way][-1]:6,.0f} ms with 128")
print(f"computing                {1000 * computing:4.0f} ms")

# %% tags=["fold"]
# draw: predicted milliseconds of communication against the number of workers
lines = {}
for way in ways:
    lines[way] = (numbers, 1000 * np.array(seconds[way]))
    stays_below = max(seconds[way]) < computing
    assert stays_below == (way in ["k servers, equal parts", "ring"]), way
lines["computing"] = ([2, 128], [1000 * computing, 1000 * computing])
title = ("Predicted, ResNet-18, 10 Gbit/s, 100 µs: only equal parts and a ring\nstay below the "
         "computing up to 128 workers")
fig, ax = curves(title, "workers", "communication in a step (ms)", lines, logx=True, logy=True)
ax.set_xticks(numbers, numbers)
ax.minorticks_off()
show(fig, alt="Milliseconds of communication in a step for 2 to 128 workers. One server: in "
              "proportion. As many servers as workers: with equal parts it levels off, by MXNet's "
              "rule it goes on rising, and so does a ring, more slowly.")

# %% [markdown]
# **Only equal parts and a ring stay below the computing up to 128 workers.** A ring's latencies
# grow with the workers; a server's messages to many workers overlap, or so we assumed.
#
# ## Memory
#
# A billion parameters in float32 are 4 GB, their gradients 4 GB, momentum 4 GB, Adam's two moments
# 8 GB. *Every* DDP worker holds all of it, and its buckets take another 4 GB unless you pass
# `gradient_as_bucket_view=True` (`torch/nn/parallel/distributed.py`).
#
# Activations come on top: what the forward pass keeps for the backward pass. For LeNet we count
# them. `saved_tensors_hooks` calls our function with each tensor that is kept:

# %% tags=["torch"]
import torch
from helpers.torch_networks import lenet


def activation_bytes(net, images):
    weights = set()
    for parameter in net.parameters():
        weights.add(parameter.data_ptr())
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def give_back(tensor):
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        loss = net(images).sum()
    assert loss.requires_grad, "or nothing would be kept"
    return sum(kept.values())


net = lenet()
for_64 = activation_bytes(net, torch.zeros(64, 1, 28, 28))
for_128 = activation_bytes(net, torch.zeros(128, 1, 28, 28))
print(f"weights, gradients, momentum {12 * 129_068 / 1e6:.1f} MB")
print(f"activations of 64 images {for_64 / 1e6:.1f} MB, of 128 images {for_128 / 1e6:.1f} MB")
assert for_128 == 2 * for_64, "in proportion to the batch"

# %% [markdown]
# Activations grow with the batch, so a smaller one, or several accumulated (chapter 14), helps.
# Weights, gradients and optimizer state don't shrink with the batch, nor with more workers.
#
# Of $k$ servers, each holds weights, sums of gradients (`store_` and `update_buf_` in
# `src/kvstore/kvstore_dist_server.h`) and optimizer state for its keys only: a $k$-th, if divided
# equally. Bytes for each parameter with Adam and 16 workers:

# %%
memory = {
    "every DDP worker": {"weights": 4, "gradients": 4, "moments": 8},
    "worker and server": {"weights": 4 + 4 / 16, "gradients": 4 + 4 / 16, "moments": 8 / 16},
    "all divided by 16": {"weights": 4 / 16, "gradients": 4 / 16, "moments": 8 / 16},
}
for who, parts in memory.items():
    total = sum(parts.values())
    print(f"{who:18} {total:4.0f} bytes a parameter: {total:3.0f} GB for a billion")

# %% tags=["fold"]
# draw: GB for a billion parameters with Adam, by what holds them
totals = [sum(parts.values()) for parts in memory.values()]
assert totals == [16, 9, 1]
fig, ax = figure("Adam, a billion parameters: 16 GB on a DDP worker, 9 GB with 16\nservers, "
                 "1 GB if all were divided", "GB")
begin = np.zeros(3)
looks = {"weights": (BLUE, ""), "gradients": (ORANGE, "//"), "moments": (GREEN, "..")}
for part, (color, hatch) in looks.items():
    widths = [parts[part] for parts in memory.values()]
    ax.barh(list(memory), widths, left=begin, color=color, hatch=hatch, edgecolor="black",
            label=part)
    begin += widths
ax.invert_yaxis()
fig.legend(loc="outside right center", fontsize=8)
show(fig, alt="Bars of memory for a billion parameters in float32 with Adam, without activations: "
              "16 GB on a DDP worker, 9 GB on a machine with a worker and one of 16 servers, 1 GB "
              "if everything were divided by 16.")

# %% [markdown]
# "Worker and server" is a machine that has a worker and one of 16 servers, on CPUs. **On GPUs:**
# the servers' part lies in host memory, and gradients pass a pinned host buffer (`comm_buf_` in
# `kvstore_dist.h`): the device keeps 8 GB, the host has 1 + 4.
#
# **Data parallelism divides the batch and copies everything else.** When that no longer fits on one
# device, it can be *sharded* (ZeRO, FSDP, chapter 16): each worker keeps a part, and gathers the
# rest when it needs it.

# %% [markdown]
# ## How often to save
#
# A checkpoint costs time, and so does the work that is lost since the last one. If saving costs
# $C$ seconds, and failures come every $M$ seconds on average, save about every $\sqrt{2CM}$
# seconds (J. W. Young, CACM, 1974). We find the best interval by trying: in an interval of $T$
# seconds of work, saving costs $C$, and a failure, which comes with probability $T/M$, loses half
# of it.

# %%
def lost_share(interval, saving, between_failures):
    return saving / interval + interval / 2 / between_failures


saving = 30  # seconds
between_failures = 24 * 3600  # one failure a day
intervals = np.arange(60, 7200, 10)
best = intervals[np.argmin(lost_share(intervals, saving, between_failures))]
by_formula = np.sqrt(2 * saving * between_failures)
print(f"best of those tried: every {best} s; by the formula: {by_formula:.0f} s")
print(f"lost: {lost_share(by_formula, saving, between_failures):.1%} of the time")
assert abs(best - by_formula) <= 10

# %% [markdown]
# ## Summary
#
# - One server sends $kS$ bytes; in a ring, or with $k$ equal servers beside the workers, a machine
#   sends $2\frac{k-1}{k}S$.
# - A ring costs $2(k-1)$ latencies, whatever the link's rate.
# - What decides is the work for each byte of gradients. It grows with each worker's batch.
# - A billion parameters with Adam take 16 GB on every DDP worker, 20 GB with DDP's default buckets,
#   before activations.
# - Save about every $\sqrt{2CM}$ seconds.
