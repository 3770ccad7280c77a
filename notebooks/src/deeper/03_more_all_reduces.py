# %% [markdown]
# # Deeper · More all-reduces
#
# In chapter 03 a tree took few rounds, and a ring sent few bytes. Is there an all-reduce that does
# both? And which one is best where the devices are in several machines?
#
# > **What you'll do:** write *halving and doubling* and a *hierarchical* all-reduce, let the judge
# > try them, count what they send, and compute how long each takes on a network of your choice.
# >
# > **What you'll learn:** how to take few rounds *and* send few bytes, and on what condition; why
# > small arrays pay for rounds and large ones for bytes; why one adds up inside each machine first;
# > what NCCL, NVIDIA's library, chooses from.
# >
# > **What you need:** chapter 03. No GPU. Reading takes {reading time}, running a few seconds.

# %%
from helpers import schedules
# `eight` are the eight devices of chapter 03; `window` finds a chunk in an array's own memory.
from helpers.schedules import eight, messages_sent, window, wrong_devices

import numpy as np
from mxnet import nd

# %% [markdown]
# ## Exchange
#
# We begin with a simple idea: partners exchange whole arrays, and each adds what it gets. At first
# the partners are neighbours, then two apart, then four. So the first half of each group of two, of
# four, of eight exchanges with the second half:

# %%
def partner_of(rank, gap):
    # In the first half of its group of 2 * gap.
    if rank % (2 * gap) < gap:
        return rank + gap
    else:
        return rank - gap


for gap in [1, 2, 4]:
    print("gap", gap, "- partners of 0 to 7:", [partner_of(rank, gap) for rank in range(8)])

# %% [markdown]
# A device without a partner waits. After $\log_2 k$ rounds each device has heard of all others,
# because in each round it hears of twice as many. **Predict:** for which numbers of devices $k$
# does that work? (`wrong_devices`, a part of chapter 03's `judge`, returns the ranks that are
# wrong.)

# %% tags=["predict"]
def exchange(arrays):
    for gap in [1, 2, 4]:
        # What each sends in this round.
        before = [array.copy() for array in arrays]
        for rank, array in enumerate(arrays):
            partner = partner_of(rank, gap)
            # Or there is nobody to exchange with.
            if partner < len(arrays):
                array += before[partner].as_in_context(array.context)


for k in range(2, 9):
    print(k, "devices: wrong on the ranks", wrong_devices(exchange, k))

# %% [markdown]
# <details><summary>What came out</summary>
#
# For 2, 4 and 8 only, the powers of two. On three devices rank 1 has no partner in the second
# round, since there is no rank 3, so it never hears of rank 2. No error says so.
#
# </details>
#
# Its rounds are few, but in each of them every device sends its whole array: $S \log_2 k$ bytes for
# an array of $S$ bytes, where a ring sends less than $2S$.
#
# ## Halving and doubling
#
# How can a device send less? It sends its partner half of its chunks, and keeps the other half. In
# the next round it does the same with what it kept, and another partner:
#
# ![Four devices with four chunks each, after each of four rounds; brackets join partners, first 0
# and 1, 2 and 3, then 0 and 2, 1 and 3. Cells with a number are kept, empty ones given away: four
# a device, then two, then one, which holds 1111; then two and four
# again.](../src/drawings/halving_doubling.svg)
#
# After two rounds each device has one chunk of the whole sum, the 1111 on the diagonal. That is a
# *reduce-scatter*, for which the ring takes three rounds. Rounds 3 and 4 are rounds 2 and 1
# backwards, with copies: an *all-gather*.
#
# Which chunks does a rank have before each round? Rank 5 of 8 has all at gap 1, and the odd ones at
# gap 2, since 5 is odd. At gap 4 it has chunks 1 and 5, because divided by 4 both leave 1, as 5
# does.

# %%
def has(rank, chunk, gap):  # before the round with this gap
    return chunk % gap == rank % gap


for gap in [1, 2, 4, 8]:
    chunks = [chunk for chunk in range(8) if has(5, chunk, gap)]
    print("gap", gap, "- rank 5 of 8 has the chunks", chunks)

# %% [markdown]
# A rank sends the chunks that it has, and that its partner still has before the next round, in
# which the gap is twice as large:

# %%
def halving_round(arrays, gap):
    k = len(arrays)
    for rank in range(k):
        partner = partner_of(rank, gap)
        for chunk in range(k):
            partner_keeps_it = has(partner, chunk, 2 * gap)
            if has(rank, chunk, gap) and partner_keeps_it:
                source = window(arrays[rank], chunk, k)
                target = window(arrays[partner], chunk, k)
                target += source.copyto(target.context)


def doubling_round(arrays, gap):
    k = len(arrays)
    for rank in range(k):
        partner = partner_of(rank, gap)
        for chunk in range(k):
            # What it kept in the round of the same gap, and has finished since.
            if has(rank, chunk, 2 * gap):
                source = window(arrays[rank], chunk, k)
                target = window(arrays[partner], chunk, k)
                source.copyto(target)  # overwrites


arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]
for one_round, gap in [(halving_round, 1), (halving_round, 2),
                       (doubling_round, 2), (doubling_round, 1)]:
    one_round(arrays, gap)
    print("after", one_round.__name__, "with gap", gap)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %% [markdown]
# These are the numbers of the drawing. Unlike `exchange`, the whole function says what it needs:

# %%
def halving_doubling(arrays):
    k = len(arrays)
    gaps = []
    gap = 1
    while gap < k:
        gaps.append(gap)
        gap = 2 * gap
    if gap != k:  # 1, 2, 4, ... has gone past k
        raise ValueError(f"halving and doubling needs a power of two, not {k} devices")
    if arrays[0].size < k:  # too short to be cut
        schedules.run(schedules.star(k), arrays, num_chunks=1)
        return
    for gap in gaps:
        halving_round(arrays, gap)
    for gap in reversed(gaps):
        doubling_round(arrays, gap)


for k in [1, 2, 4, 8]:
    print(k, "devices: wrong on the ranks", wrong_devices(halving_doubling, k))
try:
    wrong_devices(halving_doubling, 6)
except ValueError as error:
    print("refused:", error)

# %% [markdown]
# What does it send? We count the entries that each of 8 devices sends, of arrays with 840 entries,
# and divide by 840. `ring` is chapter 03's, and so is `tree`:

# %%
def ring(arrays):
    k = len(arrays)
    schedules.run(schedules.ring(k), arrays, num_chunks=k)


def tree(arrays):
    schedules.run(schedules.tree(len(arrays)), arrays, num_chunks=1)


def sent_by_the_busiest(all_reduce, k):
    entries_of = [0] * k
    for sender, receiver, entries in messages_sent(all_reduce, k, entries=840):
        entries_of[sender] += entries
    return max(entries_of) / 840


for all_reduce in [tree, ring, halving_doubling]:
    print(f"{all_reduce.__name__:17} the busiest sends {sent_by_the_busiest(all_reduce, 8):.2f} S")
assert sent_by_the_busiest(halving_doubling, 8) == sent_by_the_busiest(ring, 8) == 2 * 7 / 8

# %% [markdown]
# **Halving and doubling takes as few rounds as the tree, $2\log_2 k$, and sends as little as the
# ring, $2\frac{k-1}{k}S$ from each device.** As long as the devices do all the adding, the busiest
# one can't send less (Patarasuk and Yuan, chapter 03). It is also called *Rabenseifner's
# algorithm*. Thakur et al. (2005) tell how it is done on other numbers of devices.
#
# ## Rounds against bytes
#
# How long does it take? As in chapter 03, a round takes a **latency** and its bytes over the
# **bandwidth**. We take 64 GPUs behind one switch with PCIe 4.0 ×16, 31.5 GB/s in each direction.
#
# NCCL has three *protocols* to send the same bytes, and its table of latencies has a number for
# each (`src/graph/tuning.cc` at 2.30.7). *Simple* waits for a whole piece, and takes 5.7 µs a round
# of a ring on PCIe. *LL*, low latency, sends a flag beside each four bytes, so that the receiver
# needn't wait: 1.0 µs a round, but half of what is sent are flags. (*LL128* lies between: 120 of
# 128 bytes are data.) We take the ring's numbers for all three ways, and leave out what NCCL adds
# once for each call:

# %%
BANDWIDTH = 31.5e9  # bytes a second


def seconds_simple(rounds, size):
    return rounds * 5.7e-6 + size / BANDWIDTH


def seconds_ll(rounds, size):
    return rounds * 1.0e-6 + 2 * size / BANDWIDTH


k = 64
log2_k = 6
# Rounds, and arrays sent one after the other.
ways = {"tree": (2 * log2_k, 2 * log2_k),
        "ring": (2 * (k - 1), 2 * (k - 1) / k),
        "halving": (2 * log2_k, 2 * (k - 1) / k)}

# %% [markdown]
# **Predict:** for an array of 4 KB, and for one of 100 MB, which way is the fastest, and with which
# protocol?

# %% tags=["predict"]
for size in [4e3, 100e6]:
    print(f"{size / 1e3:,.0f} KB")
    for name, (rounds, sent) in ways.items():
        simple = 1e3 * seconds_simple(rounds, sent * size)
        ll = 1e3 * seconds_ll(rounds, sent * size)
        print(f"    {name:8} Simple {simple:8.3f} ms   LL {ll:8.3f} ms")

# %% [markdown]
# <details><summary>What came out</summary>
#
# For 4 KB halving leads, then the tree, and the ring is ten times slower than they are; LL is
# quicker than Simple for all three. For 100 MB halving leads again, with the ring close behind, and
# the tree is six times slower; there Simple is quicker. **Small arrays pay for rounds, large ones
# for bytes.**
#
# </details>
#
# The figure shows all sizes, each way with its quicker protocol:

# %% tags=["fold"]
# draw: milliseconds of tree, ring and halving against the size of the array, 64 devices
from helpers.plotting import curves, show

sizes = np.logspace(3, 9, 13)
lines = {}
for name, (rounds, sent) in ways.items():
    milliseconds = []
    for size in sizes:
        simple = seconds_simple(rounds, sent * size)
        ll = seconds_ll(rounds, sent * size)
        milliseconds.append(1e3 * min(simple, ll))
    lines[name] = (sizes / 1e6, milliseconds, milliseconds, milliseconds)
fig, ax = curves("Halving has the tree's few rounds and the ring's few bytes",
                 "MB on each of 64 devices", "computed milliseconds", lines, logx=True, logy=True)
show(fig, alt="Three curves. For small arrays tree and halving take equally long and the ring ten "
              "times as long; for large ones ring and halving, and the tree six times as long.")

# %% [markdown]
# Is halving the best, then? On one switch, in this model. The model leaves out the time to add, and
# says nothing about links that several messages share. Those we look at now.
#
# ## Inside a machine, then between machines
#
# GPUs stand in machines. Inside, NVLink gives each A100 300 GB/s in each direction, and NVSwitch
# lets any two of them talk at this rate. To the other machines there may be a single network card
# with 25 GB/s (200 Gb/s). So what counts are the bytes that cross between machines.
#
# A **hierarchical** all-reduce has three parts. Ranks 0 to 3 are in one machine, ranks 4 to 7 in
# the other:
#
# - *Reduce-scatter in each machine.* The four cut their arrays into four chunks, and each adds up
#   one of them.
# - *All-reduce between machines.* Each rank has a partner that holds the same chunk in the other
#   machine. They exchange that chunk only, and each adds what it gets.
# - *All-gather in each machine.* Each hands its finished chunk to its three neighbours.

# %%
def reduce_scatter(machine):
    """Array r gets the sum of all in its chunk r."""
    for place, array in enumerate(machine):
        mine = window(array, place, len(machine))
        for other in machine:
            if other is not array:
                mine += window(other, place, len(machine)).copyto(array.context)


def exchange_chunks(first, second):
    for place in range(len(first)):
        ours = window(first[place], place, len(first))
        theirs = window(second[place], place, len(second))
        to_them = ours.copyto(theirs.context)  # both leave before either is added
        to_us = theirs.copyto(ours.context)
        theirs += to_them
        ours += to_us


def all_gather(machine):
    for place, array in enumerate(machine):
        mine = window(array, place, len(machine))
        for other in machine:
            if other is not array:
                mine.copyto(window(other, place, len(machine)))


def hierarchical(arrays):
    if len(arrays) != 8:
        raise ValueError(f"two machines of four devices, not {len(arrays)} devices")
    if arrays[0].size < 4:  # too short to be cut
        schedules.run(schedules.star(8), arrays, num_chunks=1)
        return
    first = arrays[:4]
    second = arrays[4:]
    reduce_scatter(first)
    reduce_scatter(second)
    exchange_chunks(first, second)
    all_gather(first)
    all_gather(second)


print("wrong on the ranks", wrong_devices(hierarchical, 8))

# %% [markdown]
# Chapter 03's ring sends from rank 3 to rank 4, and from rank 7 back to rank 0, in each of its 14
# rounds. **Predict:** how much crosses from the first machine to the second, in the ring and here?

# %% tags=["predict"]
def sent_to_the_other_machine(all_reduce):
    total = 0
    for sender, receiver, entries in messages_sent(all_reduce, 8, entries=840):
        if sender < 4 and receiver >= 4:
            total += entries
    return total / 840


print("ring:        ", sent_to_the_other_machine(ring), "S")
print("hierarchical:", sent_to_the_other_machine(hierarchical), "S")
print("halving:     ", sent_to_the_other_machine(halving_doubling), "S")

# %% [markdown]
# <details><summary>What came out</summary>
#
# 1.75 arrays in the ring and one in the hierarchical way: each of four ranks sends its partner a
# quarter. Halving sends one array, too, because its far partners, which are in the other machine,
# come last, when each rank has only a quarter left and sends half of it. Begun with the far
# partners it would send four.
#
# </details>
#
# How much time is that, for 100 MB? We take latencies as nothing here, and all four places of a
# machine share its one network card:

# %%
S = 100e6
NVLINK = 300e9
NETWORK = 25e9
flat_ring = 1.75 * S / NETWORK
inside = 2 * (3 / 4) * S / NVLINK
between = 1 * S / NETWORK
print(f"ring         {1e3 * flat_ring:.1f} ms")
print(f"hierarchical {1e3 * inside:.1f} + {1e3 * between:.1f} ms")
print(f"with a network card for each GPU: {1e3 * inside:.1f} + {1e3 * between / 4:.1f} ms")

# %% [markdown]
# The last line is why a machine such as NVIDIA's DGX A100 has a network card for each of its eight
# GPUs: all partners then send at the same time, each on its own card, while a single ring would use
# one card in each direction only. On many machines the saving in bytes shrinks, because each
# chunk then needs almost two crossings of each card, as in a ring. What stays is that all cards are
# used, and that a chunk makes few hops inside a machine: on its way round a single ring of $m$
# machines with eight GPUs it makes about $2m$ slow hops and $14m$ fast ones.
#
# ## What NCCL does
#
# NCCL, under PyTorch's DDP, doesn't halve and double. It has rings, several at once, each on other
# links and cards. Since version 2.4 it also has trees between machines: *two* of them, so that each
# carries half of the array and a device that is a leaf in one is inside the other. They send little
# more than a ring, in $\log$ many rounds, on any number of machines (Sanders, Speck and Träff,
# 2009; Jeaugey, 2019). And where a switch can add, the devices send their arrays only once
# (NVIDIA/nccl #1083). For each call it chooses way and protocol by a model like ours, with
# corrections fitted to measurements (`src/graph/tuning.cc`). The variables `NCCL_DEBUG=INFO`,
# `NCCL_ALGO`, and `NCCL_PROTO` in the environment show and fix the choice.
#
# ## Summary
#
# - Halving and doubling takes $2\log_2 k$ rounds and sends $2\frac{k-1}{k}S$ from each device. It
#   needs a power of two, and says so.
# - Small arrays pay for rounds, large ones for bytes; a protocol with flags buys latency by bytes.
# - A hierarchical all-reduce adds up inside each machine first, so that only one array in all, a
#   chunk from each rank, crosses to the other machine.
#
# **Further reading.** R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective
# communication operations in MPICH", *IJHPCA* 19 (2005); P. Sanders, J. Speck and J. L. Träff,
# "Two-tree algorithms for full bandwidth broadcast, reduction and scan", *Parallel Computing* 35
# (2009); S. Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4", NVIDIA (2019).
