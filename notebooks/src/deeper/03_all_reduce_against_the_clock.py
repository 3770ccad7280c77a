# %% [markdown]
# # Deeper · All-reduce against the clock
#
# Chapter 03 counted what a star, a tree and a ring send. Which of them is the fastest on this
# machine, on two devices, and what does that say about others?
#
# ## What you'll do
#
# Time them for a small array and a large one, beside MXNet's own all-reduce. Find out what the time
# is made of.
#
# ## What you'll learn
#
# - what a time on simulated devices can tell, and what it can't;
# - how to tell the time of copying from the time of Python's calls.
#
# ## What you need
#
# Chapter 03, and the first section of deeper: More all-reduces. No GPU. Reading takes
# {reading time}, running less than a minute.

# %%
from helpers import allreduce, devices
from helpers.schedules import ring, run, star, tree, wrong_devices

import mxnet as mx
import numpy as np
from mxnet import nd

# %% [markdown]
# ## Which is the fastest?
#
# MXNet has an all-reduce of its own to compare with: the `pushpull` of its *key-value store*
# (KVStore), which chapter 07 takes apart. In it an array gets a name, its *key*:

# %%
store = mx.kvstore.create("device")
store.init("our sum", nd.zeros(1))  # a place in the store, with its shape and type

arrays = [nd.array([1], ctx=mx.cpu(0)), nd.array([2], ctx=mx.cpu(1))]
store.pushpull("our sum", arrays)
print([array.asscalar() for array in arrays])

# %% [markdown]
# Star, tree and ring are carried out by `run`. `allreduce` is a star, too, without a schedule.
# **Predict:** on two devices, which of the three schedules send the same messages?

# %%
print("star:", star(2))
print("tree:", tree(2))
for messages in ring(2):
    print("ring:", messages)
assert star(2) == tree(2)

# %% [markdown]
# So on two devices star and tree are one, and the ring sends twice as many messages, half as large.
#
# We measure fifteen rounds in each of five new processes, and take the median of each process. A
# row shows the middle one of these five, and in brackets the lowest and the highest. **Predict:**
# which is the fastest for 4 KB, and which for 16 MB?

# %% tags=["fold", "measured", "few:ROUNDS = 15=>ROUNDS = 3", "few:range(5)=>range(2)"]
# measure: times of five all-reduces on two devices, in five new processes
from helpers.timing import in_new_processes, in_turns

ROUNDS = 15
SMALL = 1_000  # entries of 4 bytes
LARGE = 4_096_000
BYTES = {SMALL: "4 KB", LARGE: "16.4 MB"}


stores = {}  # one a case: MXNet 1.9.1 may crash if later more devices push to a key than at first


def kvstore_allreduce(arrays):
    case = tuple(str(array.context) for array in arrays), arrays[0].shape, str(arrays[0].dtype)
    if case not in stores:
        stores[case] = mx.kvstore.create("device")
        stores[case].init("our sum", arrays[0])  # a place in the store, with its shape and type
    stores[case].pushpull("our sum", arrays)


def time_all_reduces(case):
    size, seed = case
    two = devices(2)
    arrays = [nd.zeros(size, ctx=two[0]), nd.zeros(size, ctx=two[1])]
    by_star, by_tree, by_ring = star(2), tree(2), ring(2)  # made once
    contestants = {
        "allreduce": lambda: allreduce(arrays),
        "star": lambda: run(by_star, arrays, num_chunks=1),
        "tree": lambda: run(by_tree, arrays, num_chunks=1),
        "ring": lambda: run(by_ring, arrays, num_chunks=2),
        "KVStore": lambda: kvstore_allreduce(arrays),
    }
    for name, all_reduce in contestants.items():  # what is timed is an all-reduce
        arrays[0][:] = 1
        arrays[1][:] = 2
        all_reduce()
        for array in arrays:
            assert array.min().asscalar() == array.max().asscalar() == 3, f"{name} is wrong"
    arrays[0][:] = 0  # or they would grow without end
    arrays[1][:] = 0
    return in_turns(contestants, rounds=ROUNDS, seed=seed)


medians = {}  # milliseconds, one a process
for size in [SMALL, LARGE]:
    runs = in_new_processes(time_all_reduces, [(size, seed) for seed in range(5)])
    print(BYTES[size])
    for name in runs[0]:
        found = [1e3 * np.median(times[name]) for times in runs]
        print(f"    {name:10} {np.median(found):6.3f} ms ({min(found):.3f} to {max(found):.3f})")
        medians[size, name] = found
for k in range(1, 9):  # only now: its stores can't be sent to other processes
    assert wrong_devices(kvstore_allreduce, k) == [], f"KVStore is wrong on {k} devices"

# %% [markdown]
# We call one all-reduce faster than another if it is so by more than a twentieth in all five
# processes:

# %% tags=["fold", "measured"]
# measure: which all-reduce is faster than which, by more than a twentieth in all five processes
NAMES = ["allreduce", "star", "tree", "ring", "KVStore"]
for size in [SMALL, LARGE]:
    print(BYTES[size])
    for name in NAMES:
        slower = []
        for other in NAMES:
            if np.all(np.less(1.05 * np.array(medians[size, name]), medians[size, other])):
                slower.append(other)
        if slower:
            print(f"    {name} is faster than", ", ".join(slower))

# %% [markdown]
# For 4 KB `allreduce` and KVStore are ahead of all that goes through `run`, the ring behind. For
# 16.4 MB none of star, tree and ring is faster than another. (KVStore makes four copies where
# `allreduce` makes two: chapter 07.)
#
# ## What is the time made of?
#
# For 4 KB `star` and `allreduce` send the same two messages, and `allreduce` takes less time. So
# the messages can't be the cause. What differs is what Python does: `run` reads a schedule and
# cuts windows. (This `allreduce` also checks its arguments, and is faster in spite of it. The ring
# has twice as many messages *and* twice as many windows; we haven't separated these two.)
#
# Python only hands out the work (chapter 01). Which share of the time has passed when the call
# returns?

# %% tags=["fold", "measured"]
# measure: the time until the call returns, as a share of the time until the sum is there
import time


def by_star(arrays):
    run(star(2), arrays, num_chunks=1)


def by_tree(arrays):
    run(tree(2), arrays, num_chunks=1)


def by_ring(arrays):
    run(ring(2), arrays, num_chunks=2)


two = devices(2)
for size in [SMALL, LARGE]:
    arrays = [nd.zeros(size, ctx=two[0]), nd.zeros(size, ctx=two[1])]
    for all_reduce in [allreduce, by_star, by_tree, by_ring]:
        shares = []
        for turn in range(30):
            nd.waitall()
            begin = time.perf_counter()
            all_reduce(arrays)
            returned = time.perf_counter() - begin
            nd.waitall()
            shares.append(returned / (time.perf_counter() - begin))
        print(f"{BYTES[size]:7} {all_reduce.__name__:9} {np.median(shares):4.0%}")

# %% [markdown]
# For 4 KB nearly all of it: these are times of calls. For 16.4 MB the smaller part: copying and
# adding take the rest.
#
# By chapter 03's table, a ring should take half of a star's time for large arrays on two devices.
# Here it doesn't. That is no surprise: the table is about links, and simulated devices have none,
# but a memory that both share.
#
# ## Summary
#
# - On two simulated devices, times for small arrays are mostly those of the calls. There a plain
#   loop beats one that reads a schedule.
# - For large arrays copying and adding take most of the time, and a ring isn't faster than a star.
