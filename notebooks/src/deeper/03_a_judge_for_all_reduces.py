# %% [markdown]
# # Deeper · A judge for all-reduces
#
# `judge`, of chapter 03, says whether an all-reduce is right. What does it try, which mistakes
# does it find, and which can't it see?
#
# ## What you'll do
#
# Look at the arrays that it hands out and at the calls that it makes. Run eighteen wrong
# all-reduces past it. Compare results bit by bit.
#
# ## What you'll learn
#
# - how to choose values so that a sum says what is in it, without rounding;
# - which habits of a wrong all-reduce a test has to think of;
# - why devices agree to the bit although schemes don't.
#
# ## What you need
#
# Chapter 03. No GPU. Reading takes {reading time}, running less than a minute.

# %%
from functools import partial

from helpers import allreduce
from helpers.schedules import eight, ring, run, star, tree, wrong_ranks

import numpy as np
from mxnet import nd

# %% [markdown]
# ## The arrays
#
# What does the judge hand to an all-reduce? On each device some numbers, times 1, 3, 9,
# 27 and so on. As with 1, 10 and 100, a sum says what is in it. But powers of ten would be too
# long: with numbers of two digits on eight devices, float32 would have to round. Powers of three
# are short enough, so *any* order of adding gives the same bits, and the judge may ask for equal
# ones. The 1/32 would be lost by an all-reduce that computes in integers.

# %%
NUMBERS = nd.arange(65, 77)
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25  # too long for float32
backwards = list(reversed(eight))  # cpu(7), cpu(6), and so on


def replicas(k, numbers=NUMBERS, order=eight):
    arrays = []
    for rank in range(k):
        array = 3**rank * numbers + 1 / 32
        arrays.append(array.copyto(order[rank]))
    return arrays


for array in replicas(3, NUMBERS[:3]):
    print(array.context, array.asnumpy())

# %% tags=["fold"]
# check: each entry of the sum says how often each device was counted: never, once or twice
import itertools

for k in range(1, 9):
    values = np.stack([array.asnumpy() for array in replicas(k)])  # [device, entry]
    counts = np.array(list(itertools.product([0, 1, 2], repeat=k)))  # [way, device]
    sums = counts @ values.astype("float64")  # [way, entry]
    for entry in range(12):
        assert len(np.unique(sums[:, entry])) == 3**k, f"{k} devices, entry {entry}"
    assert len(np.unique(values)) == values.size, "two entries are alike"

# %% tags=["fold"]
# check: in 32nds, all sums are whole and short enough for their type, in any order of adding
for numbers, dtype in [(NUMBERS, "float32"), (BIG_NUMBERS, "float64")]:
    for call in range(3):
        for k in range(1, 9):
            in_32nds = 0
            for array in replicas(k, numbers + call):
                assert array.dtype == np.dtype(dtype)
                in_32nds = in_32nds + (32 * array.asnumpy().astype("float64")).astype("int64")
            assert in_32nds.max() < 2 ** {"float32": 24, "float64": 53}[dtype], f"{k}: rounded"
            assert np.all(in_32nds % 32 != 0), f"{k} devices: an integer would hold it"
assert not np.array_equal(BIG_NUMBERS.asnumpy(), BIG_NUMBERS.astype("float32").asnumpy())
total = NUMBERS.asnumpy().astype("int64") * 11_111_111  # with powers of ten, on eight devices
assert np.any(total != total.astype("float32")), "float32 would hold powers of ten, too"

# %% [markdown]
# ## The calls
#
# For each number of devices it makes eighteen. `+ call` gives each of them other numbers, so
# that an all-reduce that returns an old sum is caught:

# %%
def wrong_devices(candidate, k):
    wrong = set()
    for call in range(3):  # an all-reduce must work more than once
        for order in [eight, backwards]:  # whichever device comes first
            for numbers in [NUMBERS, NUMBERS.reshape((3, 4)), BIG_NUMBERS]:
                arrays = replicas(k, numbers + call, order)
                wrong.update(wrong_ranks(candidate, arrays))
    return sorted(wrong)


def judge(candidate):
    for k in range(1, 9):
        wrong = wrong_devices(candidate, k)
        assert wrong == [], f"wrong on {k} devices, ranks {wrong}"
    print(f"{candidate.__name__} passes on 1 to 8 devices")


judge(allreduce)

# %% [markdown]
# ## What it finds
#
# Does the judge reject what is wrong? It should reject each of eighteen wrong all-reduces, on any
# number of devices:

# %% tags=["fold"]
# check: the judge rejects eighteen wrong all-reduces, chapter 03's among them
def rebinding(arrays):
    total = arrays[0]  # another name for the first array
    for rank in range(1, len(arrays)):
        total += arrays[rank].copyto(total.context)  # a copy on the first device is added
    for rank in range(1, len(arrays)):
        arrays[rank] = total.copyto(arrays[rank].context)  # a copy of the sum, for all others


def multiply(arrays):
    for array in arrays:
        array *= len(arrays)  # like +=, this writes into the array


def no_broadcast(arrays):  # the sum stays on the first device
    for array in arrays[1:]:
        arrays[0] += array.as_in_context(arrays[0].context)


def first_only(arrays):  # sends back without a sum
    for array in arrays[1:]:
        arrays[0].copyto(array)


def one_for_all(arrays):  # puts the first array into every place of the list
    no_broadcast(arrays)
    arrays[:] = [arrays[0]] * len(arrays)


def counts_twice(arrays):
    no_broadcast(arrays)
    arrays[0] += arrays[-1].as_in_context(arrays[0].context)
    first_only(arrays)


def through(dtype):  # computes in another type
    def all_reduce(arrays):
        low = [array.astype(dtype) for array in arrays]
        no_broadcast(low)
        for array in arrays:
            array[:] = low[0].astype(array.dtype).as_in_context(array.context)
    all_reduce.__name__ = f"through {dtype}"
    return all_reduce


def by_device_number(arrays):  # sums into place 0, sends from where the lowest number is
    numbers = [array.context.device_id for array in arrays]
    root = numbers.index(min(numbers))
    no_broadcast(arrays)
    for rank in range(1, len(arrays)):
        if rank != root:
            arrays[root].copyto(arrays[rank])


def never_adds(arrays):  # knows what the judge's weights add up to
    total = arrays[0] * ((3 ** len(arrays) - 1) // 2)
    for array in arrays:
        array[:] = total.as_in_context(array.context)


def all_but_the_first(arrays):
    first = arrays[0].copy()
    no_broadcast(arrays)
    first_only(arrays)
    arrays[0][:] = first


def vectors_only(arrays):  # takes the first axis for all entries
    parts = [array.reshape(-1)[: array.shape[0]] for array in arrays]
    no_broadcast(parts)
    first_only(parts)


def one_place_too_far(arrays):
    no_broadcast(arrays)
    shifted = nd.array(np.roll(arrays[0].asnumpy(), 1), dtype=arrays[0].dtype)
    for array in arrays:
        array[:] = shifted.as_in_context(array.context)


remembered = {}


def remembers(arrays):  # a second call with as many devices and entries gets the old sum
    key = len(arrays), arrays[0].shape, str(arrays[0].context)
    if key not in remembered:
        no_broadcast(arrays)
        remembered[key] = arrays[0].copy()
    for array in arrays:
        remembered[key].copyto(array)


def first_four(arrays):  # of the entries
    parts = [array.reshape(-1)[:4] for array in arrays]
    no_broadcast(parts)
    first_only(parts)


def by_highest_number(arrays):  # right only backwards
    numbers = [array.context.device_id for array in arrays]
    root = numbers.index(max(numbers))
    no_broadcast(arrays)
    for rank in range(1, len(arrays)):
        if rank != root:
            arrays[root].copyto(arrays[rank])


def not_float32_matrices(arrays):
    if arrays[0].dtype != np.float32 or arrays[0].ndim == 1:
        no_broadcast(arrays)
        first_only(arrays)


def right_but_on(bad):
    def all_reduce(arrays):
        if len(arrays) != bad:
            allreduce(arrays)
        else:
            arrays[-1][:] = 0
    return all_reduce


WRONG = [rebinding, no_broadcast, first_only, one_for_all, multiply, counts_twice,
         all_but_the_first, never_adds, one_place_too_far, through("float16"), through("int32"),
         vectors_only, through("float32"), by_device_number, remembers, first_four,
         by_highest_number, not_float32_matrices]
for all_reduce in WRONG:
    caught = [k for k in range(2, 9) if wrong_devices(all_reduce, k)]
    assert caught == list(range(2, 9)), all_reduce.__name__
print(len(WRONG), "wrong all-reduces, and the judge rejects all:")
print(*[all_reduce.__name__ for all_reduce in WRONG], sep=", ")
assert len(WRONG) == 18
for bad in range(1, 9):
    try:
        judge(right_but_on(bad))
        raise RuntimeError(f"the judge passes what is wrong on {bad} devices")
    except AssertionError as error:
        assert str(error).startswith(f"wrong on {bad} devices"), error

# %% [markdown]
# ## What it can't see
#
# Here is one that it can't see: simulated devices share memory, so nothing is missing if an
# all-reduce forgets to copy. Counting messages would show it.

# %% tags=["fold"]
# check: an all-reduce that forgets to copy passes, though it is wrong; it sends too few messages
from unittest import mock

copyto = nd.NDArray.copyto


def copied(all_reduce, k):
    """(sender, receiver, entries) of each copy to another device."""
    messages = []

    def noted(array, other):
        device = getattr(other, "context", other)  # of an array, or a device itself
        messages.append((array.context.device_id, device.device_id, array.size))
        return copyto(array, other)

    arrays = [nd.ones(840, ctx=device) for device in eight[:k]]
    with mock.patch.object(nd.NDArray, "copyto", noted):
        all_reduce(arrays)
    return messages


def without_moves(arrays):
    for array in arrays[1:]:
        arrays[0] += array  # two devices meet
    for array in arrays[1:]:
        arrays[0].copyto(array)


judge(without_moves)
print("messages on 4 devices:", len(copied(without_moves, 4)), "where the star sends",
      len(copied(allreduce, 4)))
assert (len(copied(without_moves, 4)), len(copied(allreduce, 4))) == (3, 6)

# %% [markdown]
# ## Order matters to the last bit
#
# In floating point $(a + b) + c$ need not be $a + (b + c)$. **Predict:** eight devices hold random
# float32 numbers. Do star, tree and ring give the same bits? Do all devices have the same?

# %% tags=["fold"]
# check: the bits of all three, on all devices; and of one in which each device adds for itself
values = np.random.default_rng(0).standard_normal((8, 1000)).astype("float32")  # [device, entry]
exact = values.astype("float64").sum(axis=0)
half_a_step = np.finfo("float32").eps / 2  # what one rounding does at most, as a share
bound = 7 * half_a_step * np.abs(values).astype("float64").sum(axis=0)  # seven additions


def each_adds_all(arrays):
    before = [array.copy() for array in arrays]
    for rank, array in enumerate(arrays):
        for other in range(len(arrays)):
            if other != rank:
                array += before[other].as_in_context(array.context)


def sums_of(all_reduce):  # [device, entry]
    arrays = [nd.array(row, ctx=device) for row, device in zip(values, eight)]
    all_reduce(arrays)
    found = np.stack([array.asnumpy() for array in arrays])
    assert np.all(np.abs(found - exact) <= bound), "too far away"
    return found


by_star = sums_of(partial(run, star(8), num_chunks=1))
for name, rounds, num_chunks in [("star", star(8), 1), ("tree", tree(8), 1), ("ring", ring(8), 8)]:
    found = sums_of(partial(run, rounds, num_chunks=num_chunks))
    assert np.all(found == found[0]), f"{name}: other bits on other devices"
    print(f"{name} {np.sum(found[0] != by_star[0]):3} of 1000 sums differ from the star's; "
          "all devices agree")
assert 400 < np.sum(sums_of(partial(run, ring(8), num_chunks=8))[0] != by_star[0]) < 600
assert wrong_devices(each_adds_all, 8) == [], "it is an all-reduce"
assert np.any(sums_of(each_adds_all) != sums_of(each_adds_all)[0]), "its devices should differ"

# %% [markdown]
# Other orders of adding, other roundings: on eight devices about half of the ring's sums differ
# from the star's. But within each scheme all devices agree to the bit, since each sum is finished
# on one device and then copied. So replicas that start equal, and make the same update, stay
# equal. (If each device added up all arrays for itself, its own first, they would differ.)
#
# ## Summary
#
# - Powers of three tell how often each device was counted, and are short enough for float32.
# - A judge keeps the old arrays, tries other values, types, shapes and orders, many numbers of
#   devices, and more than one call.
# - It can't see a forgotten copy on simulated devices. Counting messages can.
# - Star, tree and ring can differ by rounding; within each all devices agree to the bit.
