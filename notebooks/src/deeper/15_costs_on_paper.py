# %% [markdown]
# # Deeper · Costs on paper
#
# How long would gradients travel over a link that you don't have? And how much memory would a model
# need on each device? Such times and bytes can be estimated on paper. Nothing here is timed; the
# assumptions are named.
#
# > **What you'll do:** count what the busiest machine sends. Turn bytes into seconds, for three
# > models on three links. Count the memory of a billion parameters. Find how often to save.
# >
# > **What you'll learn:** when one server is the limit, and what several change; on what the price
# > of communication depends; what every DDP worker holds, whatever the batch.
# >
# > **What you need:** chapters 03 and 15, and deeper: The parameter server. No GPU. Reading takes
# > {reading time}, running a few seconds. Three cells need PyTorch, those on activations; without
# > it, skip them.

# %%
import numpy as np
from helpers.plotting import BLUE, GREEN, ORANGE, curves, figure, show

# %% [markdown]
# ## Bytes
#
# What does the busiest machine send? There are $k$ workers, and the gradients have $S$ bytes. We
# list all messages of a step, each as a sender, a receiver and a size. A message from a machine to
# itself costs nothing.

# %%
def most_sent(messages):
    sent = {}
    for sender, receiver, size in messages:
        if sender != receiver:
            sent[sender] = sent.get(sender, 0) + size
    return max(sent.values())


print(most_sent([("a", "b", 1), ("a", "a", 5), ("b", "a", 2)]))

# %% [markdown]
# The workers' machines are called 0 to $k-1$. With servers, each worker sends them its gradients (a
# *push*) and gets $S$ back (a *pull*); each of several servers has an equal part. In a ring
# (chapter 03), each worker sends $S/k$ to the next, $2(k-1)$ times:

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
# Now 8 workers. A single server is on a machine of its own; eight servers are on the workers'
# machines. **Predict:** what does the single server send? And each machine with a worker and a
# server?

# %%
one_server = most_sent(server_messages(8, ["its own machine"]))
eight_servers = most_sent(server_messages(8, [0, 1, 2, 3, 4, 5, 6, 7]))
ring = most_sent(ring_messages(8))
print("one server sends", one_server, "S")
print("a machine with a worker and one of eight servers sends", eight_servers, "S")
print("a machine in a ring sends", ring, "S")

# %% tags=["fold"]
# check: k S; and 2 (k - 1) / k S in both other cases, for 2 to 16 workers
for workers in range(2, 17):
    least = 2 * (workers - 1) / workers
    assert most_sent(server_messages(workers, ["server"])) == workers
    assert np.isclose(most_sent(server_messages(workers, range(workers))), least)
    assert np.isclose(most_sent(ring_messages(workers)), least)

# %% [markdown]
# One server sends $kS$ and receives as much. **As many servers as workers, on the same machines,
# send the same $2\frac{k-1}{k}S$ as a ring**, if the keys can be divided equally.
#
# ## Seconds
#
# How long does that take? A message costs a latency, and a time for each byte.
#
# - **A server** receives all pushes, *then* answers all pulls. Messages to and from several
#   machines overlap, so it has two latencies. (MXNet's server answers each key as soon as its
#   pushes are complete, so it sends while it receives. At best its step takes half as long.)
# - **In a ring**, each machine sends and receives at once, and has $2(k-1)$ messages in turn.

# %%
def server_seconds(others, size, bandwidth, latency):
    """Each of the workers on `others` machines sends `size` bytes, and gets as many."""
    one_way = latency + others * size / bandwidth
    return 2 * one_way


def ring_seconds(k, size, bandwidth, latency):
    one_message = latency + size / k / bandwidth
    return 2 * (k - 1) * one_message


server_8 = server_seconds(others=8, size=1, bandwidth=1, latency=0)
ring_8 = ring_seconds(k=8, size=1, bandwidth=1, latency=0)
ring_8_slow = ring_seconds(k=8, size=1, bandwidth=1, latency=1)
print("8 workers, gradients of 1 byte, links of 1 byte/s")
print("    one server:               ", server_8, "s, 8 to receive and 8 to send")
print("    ring:                     ", ring_8, "s, 14 messages of 1/8 byte")
print("    ring, each message + 1 s: ", ring_8_slow, "s, 14 more")

# %% tags=["fold"]
# check: these seconds by the bytes counted above; a ring of 8 has 14 latencies
assert server_8 == 16, "it receives 8 S, then sends 8 S"
assert np.isclose(server_seconds(7, 1 / 8, 1, 0), eight_servers)
assert np.isclose(ring_8, ring)
assert ring_8_slow == 14 + 1.75
assert server_seconds(others=8, size=1, bandwidth=1, latency=1) == 18, "two latencies"

# %% [markdown]
# **A ring sends few bytes, and pays many latencies.** Now three models, 16 workers in a ring, and
# three links. The assumptions:
#
# - a message's latency is 10 µs, and links run at their full rate;
# - each worker's batch has 256 images of 28×28, or 16 texts of 1,024 tokens;
# - training takes three forward passes; those of LeNet and ResNet-18 were counted in deeper:
#   Counting operations, predicting GPUs. A language model takes 2 operations forward for each
#   parameter and token, a multiplication and an addition;
# - devices train at 5 TFLOP/s. On a device ten times as fast, each share below is ten times as
#   large;
# - nothing is overlapped (chapter 14).
#
# The table shows communication as a share of the computing: at 100 % it takes as long. **Predict:**
# for which model is it largest, and for which smallest?

# %%
parameters = {"LeNet": 129_068, "ResNet-18": 11_175_818, "language model": 1e9}
images = 256
tokens = 16 * 1024
passes = 3  # as long as three forward passes
flops = 5e12  # operations in a second
computing = {  # seconds in a step
    "LeNet": images * passes * 4_500_720 / flops,
    "ResNet-18": images * passes * 911_601_664 / flops,
    "language model": tokens * passes * 2 * 1e9 / flops,
}
# Bytes/s.
bandwidths = {"1 Gbit/s": 1e9 / 8, "10 Gbit/s": 10e9 / 8, "100 Gbit/s": 100e9 / 8}

share = {}
header = f"{'':14}   computing"
for link in bandwidths:
    header += f"{link:>12}"
print(header)
for model in parameters:
    row = f"{model:14} {1000 * computing[model]:8,.1f} ms"
    for link, bandwidth in bandwidths.items():
        size = 4 * parameters[model]  # bytes
        seconds = ring_seconds(k=16, size=size, bandwidth=bandwidth, latency=10e-6)
        share[model, link] = seconds / computing[model]
        row += f"{share[model, link]:12.0%}"
    print(row)

# %% tags=["fold"]
# check: what the next paragraph says of these shares; and what a latency of 100 µs changes
latencies_of_lenet = 30 * 10e-6 / computing["LeNet"]
more_gradients = parameters["language model"] / parameters["ResNet-18"]
more_work = computing["language model"] / computing["ResNet-18"]
print(f"30 latencies: {latencies_of_lenet:.0%} of LeNet's computing; "
      f"the language model has {more_gradients:.0f} times ResNet-18's gradients, "
      f"and {more_work:.0f} times its work")
assert 0.4 < latencies_of_lenet < 0.45
assert 30 * 2e-6 / computing["LeNet"] < 0.1, "a shorter latency gets below that"
assert (round(more_gradients), round(more_work)) == (89, 140)
for link, bandwidth in bandwidths.items():
    assert share["LeNet", link] > 0.4
    assert share["language model", link] < share["ResNet-18", link] < share["LeNet", link]
    for model in parameters:
        slower = ring_seconds(16, 4 * parameters[model], bandwidth, 100e-6) / computing[model]
        added = slower - share[model, link]
        assert 3.8 < added < 4 if model == "LeNet" else added < 0.02
    of_8_texts = 2 * share["language model", link]
    assert of_8_texts > share["ResNet-18", link]

# %% [markdown]
# LeNet's step is so short that a ring's $2 (16 - 1) = 30$ latencies alone take two fifths of it: no
# bandwidth gets below that; a shorter latency does. The language model has 89 times ResNet-18's
# gradients, but 140 times its work: so it pays less. With 8 texts it would have 70 times the work,
# and pay more. **Apart from latencies, the work for each byte decides, and that grows with each
# worker's batch.**
#
# ### More workers, and more servers
#
# How do servers do, with more workers? MXNet cuts only arrays of a million entries or more into
# equal parts, one for each server. Any other goes whole to server `key * 9973 % k` (deeper: The
# parameter server). `in_cut` lists the sizes of ResNet-18's arrays that are cut; `in_whole` has
# those of the others, by key.

# %% tags=["fold"]
# measure: ResNet-18's arrays, those that MXNet cuts and those that it doesn't
from helpers.networks import hybrid_resnet18
import mxnet as mx
from mxnet import npx

npx.set_np()
net = hybrid_resnet18(10)
net.initialize()
net(mx.np.zeros((1, 1, 28, 28)))  # now it knows its shapes
net_parameters = net.collect_params()
in_cut = []
in_whole = {}  # entries by key
for key, name in enumerate(sorted(net_parameters.keys())):  # keys as in `Trainer`
    if net_parameters[name].grad_req != "null":
        entries = int(np.prod(net_parameters[name].shape))
        if entries >= 1_000_000:
            in_cut.append(entries)
        else:
            in_whole[key] = entries
print(f"cut:   {len(in_cut):2} arrays, {sum(in_cut):,} entries together")
print(f"whole: {len(in_whole):2} arrays, {sum(in_whole.values()):,} entries")
assert sum(in_cut) + sum(in_whole.values()) == parameters["ResNet-18"]

# %% [markdown]
# So each server gets a $k$-th of the cut arrays, and the whole ones whose keys lead to it. The step
# waits for the server with the most bytes. A message's latency is now ten times as long, 100 µs.

# %%
bandwidth = bandwidths["10 Gbit/s"]
latency = 100e-6
size = 4 * parameters["ResNet-18"]  # bytes of all gradients


def most_by_rule(k):
    load = np.full(k, 4 * sum(in_cut) / k)  # bytes on each server
    for key, entries in in_whole.items():
        server = key * 9973 % k
        load[server] += 4 * entries
    return max(load)


def seconds_by_way(k):
    by_rule = most_by_rule(k)
    others = k - 1  # a server's own worker is on the same machine
    return {
        "one server": server_seconds(k, size, bandwidth, latency),
        "k servers, MXNet's rule": server_seconds(others, by_rule, bandwidth, latency),
        "k servers, equal parts": server_seconds(others, size / k, bandwidth, latency),
        "ring": ring_seconds(k, size, bandwidth, latency),
    }


for k in [2, 128]:
    print(k, "workers")
    for way, seconds in seconds_by_way(k).items():
        print(f"    {way:24} {1000 * seconds:6,.0f} ms")

# %% tags=["fold"]
# draw: predicted milliseconds of communication against the number of workers
assert most_by_rule(1) == size
for k in [2, 3, 128]:
    least = 4 * sum(in_cut) / k + 4 * max(in_whole.values())
    assert least <= most_by_rule(k) < size, "at least its part and the largest whole array"
numbers = [2, 4, 8, 16, 32, 64, 128]
limit = computing["ResNet-18"]
lines = {}
for way in seconds_by_way(2):
    seconds = np.array([seconds_by_way(k)[way] for k in numbers])
    lines[way] = (numbers, 1000 * seconds)
    stays_below = way in ["k servers, equal parts", "ring"]
    assert (max(seconds) < limit) == stays_below, way
    if not stays_below:
        assert max(seconds) / 2 > limit, "nor would it if the server sent while it receives"
title = ("Predicted, ResNet-18, 10 Gbit/s, 100 µs: only equal parts and a ring\nstay below the "
         "computing up to 128 workers")
fig, ax = curves(title, "workers", "milliseconds in a step", lines, logx=True, logy=True)
ax.axhline(1000 * limit, color="black", label="computing")
ax.legend(frameon=False)
ax.set_xticks(numbers, numbers)
ax.minorticks_off()
show(fig, alt="Milliseconds of communication in a step for 2 to 128 workers. One server: in "
              "proportion. As many servers as workers: with equal parts it levels off, by MXNet's "
              "rule it goes on rising, and so does a ring, more slowly.")

# %% [markdown]
# Above the black line, a step communicates longer than it computes. **Only equal parts and a ring
# stay below it up to 128 workers**, even if servers took half as long. By MXNet's rule, an array
# that isn't cut stays on one server, to which all workers send it. A ring's latencies grow with the
# workers; a server's overlap, or so we assumed.
#
# ## Memory
#
# What does each device hold? A billion parameters in float32 are 4 GB, and their gradients 4 GB.
# Momentum would be 4 GB; Adam has two moments in its place, 8 GB. With Adam that makes 16 GB, and
# *every* DDP worker holds all of it. DDP's buckets take another 4 GB, unless you pass
# `gradient_as_bucket_view=True`.
#
# Activations come on top: what the forward pass keeps for the backward pass. For LeNet we count
# them:

# %% tags=["torch", "fold"]
# define: activation_bytes(net, images), the bytes kept for the backward pass, without weights
import torch
from helpers.torch_networks import lenet


def activation_bytes(net, images):
    weights = set()  # their addresses
    for parameter in net.parameters():
        weights.add(parameter.data_ptr())
    kept = {}  # bytes by address, so that a tensor kept twice counts once

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def give_back(tensor):
        return tensor

    # `keep` is called with each tensor that is kept
    with torch.autograd.graph.saved_tensors_hooks(keep, give_back):
        loss = net(images).sum()
    assert loss.requires_grad, "or nothing would be kept"
    return sum(kept.values())

# %% tags=["torch"]
net = lenet()
for_64 = activation_bytes(net, torch.zeros(64, 1, 28, 28))
for_128 = activation_bytes(net, torch.zeros(128, 1, 28, 28))
state = (4 + 4 + 4) * 129_068  # weights, gradients, momentum
print(f"weights, gradients, momentum: {state / 1e6:5.1f} MB")
print(f"activations of 64 images:     {for_64 / 1e6:5.1f} MB")
print(f"activations of 128 images:    {for_128 / 1e6:5.1f} MB")
assert for_128 == 2 * for_64, "in proportion to the batch"

# %% tags=["torch", "fold"]
# check: by hand: 4 bytes for each input and output of a layer, 8 for where max pooling's maxima are
floats = 784 + 20 * 26 * 26 + 20 * 13 * 13 + 50 * 9 * 9 + 50 * 4 * 4 + 128
indices = 20 * 13 * 13 + 50 * 4 * 4
assert for_64 == 64 * (4 * floats + 8 * indices)

# %% [markdown]
# Activations grow with the batch, so a smaller one, or several accumulated (chapter 14), helps.
# Weights, gradients and optimizer state don't shrink with the batch, nor with more workers.
#
# What if they are divided? Let each of 16 machines have a worker and a server, in the same memory
# (no GPUs). The worker has all weights and gradients. The server has weights, sums of gradients and
# moments, for a 16th of the keys. When everything is *sharded* (chapter 16), each worker holds a
# 16th of all, between steps. **Predict** the bytes for each parameter, with Adam.

# %%
memory = {
    "every DDP worker": {"weights": 4, "gradients": 4, "moments": 8},
    "worker and server": {"weights": 4 + 4 / 16, "gradients": 4 + 4 / 16, "moments": 8 / 16},
    "sharded over 16": {"weights": 4 / 16, "gradients": 4 / 16, "moments": 8 / 16},
}
for who, parts in memory.items():
    total = sum(parts.values())
    print(f"{who:17} {total:2.0f} B for a parameter, {total:2.0f} GB for a billion")

# %% tags=["fold"]
# draw: GB for a billion parameters with Adam, three times
totals = [sum(parts.values()) for parts in memory.values()]
assert totals == [16, 9, 1]
# What the server has: `store_` and `update_buf_` in `src/kvstore/kvstore_dist_server.h`. DDP's
# buckets: `torch/nn/parallel/distributed.py`.
# On GPUs, the server's part lies in host memory, and gradients pass a pinned host buffer
# (`comm_buf_` in `kvstore_dist.h`): the device keeps 8 GB, the host has the server's 1 and 4.
fig, ax = figure("A billion parameters with Adam: only what is divided takes less", "GB")
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
              "if everything is sharded over 16.")

# %% [markdown]
# **Data parallelism divides the batch and copies everything else.** When that no longer fits on one
# device, shard it: each worker keeps a part, and gathers the rest when it needs it.
#
# ## How often to save
#
# A checkpoint costs time, and so does the work that is lost since the last one. How often is best?
# Saving takes $C$ seconds, and failures come every $M$ seconds on average. In an interval of $T$
# seconds of work,
#
# - saving costs $C$ of $T$ seconds: a share of $C/T$;
# - a failure comes with probability $T/M$ and loses half the interval, $T/2$: on average
#   $T^2/2M$ of $T$ seconds, a share of $T/2M$.
#
# Their product doesn't depend on $T$. So their sum is least where the two are equal, at
# $T = \sqrt{2CM}$ (J. W. Young, CACM, 1974). The time to restart is left out. We try:

# %%
def lost_share(interval, saving, between_failures):
    return saving / interval + interval / (2 * between_failures)


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
# - One server sends $kS$ bytes and becomes the limit; in a ring, or with $k$ equal servers beside
#   the workers, a machine sends $2\frac{k-1}{k}S$.
# - A ring costs $2(k-1)$ latencies, whatever the link's rate.
# - Apart from latencies, what share communication takes depends on the work for each byte of
#   gradients, which grows with each worker's batch.
# - A billion parameters with Adam take 16 GB on every DDP worker, 20 GB with DDP's default buckets,
#   before activations.
# - Save about every $\sqrt{2CM}$ seconds.
