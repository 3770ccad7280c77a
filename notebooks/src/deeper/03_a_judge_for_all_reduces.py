# %% [markdown]
# # Deeper · A judge for all-reduces
#
# `judge`, of chapter 03, says whether an all-reduce is right. What does it try, which mistakes
# does it find, and which can't it see?
#
# > **What you'll do:** look at the arrays that it hands out and at the calls that it makes. Run
# > twenty wrong all-reduces past it, and find out which part of it catches which. Compare results
# > bit by bit.
# >
# > **What you'll learn:** how to choose values so that a sum says what is in it, without rounding;
# > which habits of a wrong all-reduce a test has to think of; why devices agree to the bit although
# > schemes don't.
# >
# > **What you need:** chapter 03. No GPU. Reading takes {reading time}, running less than a minute.

# %%
from functools import partial

from helpers import allreduce
from helpers.schedules import eight, wrong_ranks

import numpy as np
from mxnet import nd

# %% [markdown]
# ## The arrays
#
# What does the judge hand to an all-reduce? Each device gets the same twelve numbers, times 1, 3,
# 9, 27 and so on, plus 1/32. Here are the first three numbers on three devices:

# %%
NUMBERS = nd.arange(65, 77)  # 65 to 76


def replicas(k, numbers=NUMBERS, order=eight):
    arrays = []
    for rank in range(k):
        array = 3**rank * numbers + 1 / 32
        # Rank 0 is on the first device of `order`.
        arrays.append(array.copyto(order[rank]))
    return arrays


for array in replicas(3, NUMBERS[:3]):
    print(array.context, array.asnumpy())

# %% [markdown]
# In chapter 03 device $r$ held $10^r$, and the digits of a sum said who was in it. Here the digits
# are those of base 3. We add up the first entries, once as it should be, once without device 1, and
# once with device 2 counted twice:

# %%
# How often devices 0, 1 and 2 are counted.
for counts in [[1, 1, 1], [1, 0, 1], [1, 1, 2]]:
    total = 0
    for count, array in zip(counts, replicas(3)):
        total += count * array[0].asscalar()
    weight = int(total // 65)
    print(f"{counts}: {total} is 65 × {weight} and a bit; {weight} in base 3:",
          np.base_repr(weight, base=3))

# %% [markdown]
# 111: each device once. 101: device 1 is missing. 211: device 2, the first digit, twice.
#
# **Why not base 10?** float32 holds all whole numbers up to $2^{24}$, about 16.8 million. With
# powers of ten, eight devices with numbers of two digits need more: 76 × 11,111,111. With powers of
# three even the 32nds fit: there are at most 8.2 million of them in a sum. So nothing is rounded,
# *any* order of adding gives the same bits, and the judge may ask for equal ones.
#
# **Why 1/32, and why from 65?** An all-reduce that computes in integers loses the 1/32. From 65 on,
# float16 fails in every float32 array, since its numbers are 1/16 apart there. (`BIG_NUMBERS`,
# below, would catch it anyway.)

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
print("it does, and no two entries are alike")

# %% [markdown]
# ## The calls
#
# For each number of devices, the judge varies three things:
#
# - the call: an all-reduce that remembers an old sum is wrong at the second. `numbers + call` gives
#   each call other numbers.
# - the order of the devices: from `cpu(0)` on, or backwards.
# - the array: a vector, a matrix, and one of float64, with numbers too long for float32:

# %%
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25
backwards = list(reversed(eight))  # cpu(7), cpu(6), and so on

print(BIG_NUMBERS.asnumpy().astype(int))
print("in float32:")
print(BIG_NUMBERS.astype("float32").asnumpy().astype(int))

# %% [markdown]
# Above $2^{24}$ float32 has no odd numbers. This is how the judge makes its calls:

# %%
def wrong_devices(candidate, k):
    wrong = set()
    for call in range(3):  # an all-reduce must work more than once
        # Whichever device comes first.
        for order in [eight, backwards]:
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

# %% tags=["fold"]
# check: in 32nds, all sums are whole and short enough for their type, in any order of adding
largest = 0
for numbers, dtype in [(NUMBERS, "float32"), (BIG_NUMBERS, "float64")]:
    for call in range(3):
        for k in range(1, 9):
            in_32nds = 0
            for array in replicas(k, numbers + call):
                assert array.dtype == np.dtype(dtype)
                in_32nds = in_32nds + (32 * array.asnumpy().astype("float64")).astype("int64")
            assert in_32nds.max() < 2 ** {"float32": 24, "float64": 53}[dtype], f"{k}: rounded"
            assert np.all(in_32nds % 32 != 0), f"{k} devices: an integer would hold it"
            if dtype == "float32":
                largest = max(largest, in_32nds.max())
print(f"at most {largest:,} in a float32, which holds {2**24:,}")
assert round(largest / 1e6, 1) == 8.2, "the text"
for number in NUMBERS.asnumpy():
    assert np.float16(number + 1 / 32) == np.float16(number), "float16 would hold it"
assert np.float32(2**24 + 1) == 2**24 and np.float32(2**24 - 1) == 2**24 - 1, "float32's limit"
assert not np.array_equal(BIG_NUMBERS.asnumpy(), BIG_NUMBERS.astype("float32").asnumpy())
total = NUMBERS.asnumpy().astype("int64") * 11_111_111  # with powers of ten, on eight devices
assert np.any(total != total.astype("float32")), "float32 would hold powers of ten, too"

# %% [markdown]
# ## What it finds
#
# Does the judge reject what is wrong? Here is an all-reduce that never adds. It knows what the
# judge's weights add up to:

# %%
def never_adds(arrays):
    total = arrays[0] * ((3 ** len(arrays) - 1) // 2)  # times 1 + 3 + 9 and so on
    for array in arrays:
        array[:] = total.as_in_context(array.context)


without_32nds = []
for rank in range(3):
    array = 3**rank * NUMBERS
    without_32nds.append(array.copyto(eight[rank]))
print("wrong ranks:", wrong_ranks(never_adds, replicas(3)))
print("without the 1/32:", wrong_ranks(never_adds, without_32nds))
assert wrong_ranks(never_adds, replicas(3)) == [0, 1, 2]

# %% [markdown]
# Only the 1/32 finds it: the sum of three devices has 3/32, and 13 times the first array has 13/32.
# We give the judge twenty wrong all-reduces, this one among them:

# %% tags=["fold"]
# check: the judge rejects twenty wrong all-reduces, chapter 03's among them, on 2 to 8 devices
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


def send_on(arrays, root):  # to all places but the first
    for rank in range(1, len(arrays)):
        if rank != root:
            arrays[root].copyto(arrays[rank])


def first_only(arrays):  # sends back without a sum
    send_on(arrays, root=0)


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
    no_broadcast(arrays)
    send_on(arrays, root=numbers.index(min(numbers)))


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


earlier = {}  # the two last sums, by kind of call


def two_buffers(arrays):  # takes them in turn; finds the first one filled at the third call
    key = len(arrays), arrays[0].shape, str(arrays[0].context)
    sums = earlier.setdefault(key, [])
    no_broadcast(arrays)
    if len(sums) < 2:
        sums.append(arrays[0].copy())
    else:
        sums[0].copyto(arrays[0])
    first_only(arrays)


def first_four(arrays):  # of the entries
    parts = [array.reshape(-1)[:4] for array in arrays]
    no_broadcast(parts)
    first_only(parts)


def by_highest_number(arrays):  # right only backwards
    numbers = [array.context.device_id for array in arrays]
    no_broadcast(arrays)
    send_on(arrays, root=numbers.index(max(numbers)))


def not_float32_matrices(arrays):
    if arrays[0].dtype != np.float32 or arrays[0].ndim == 1:
        no_broadcast(arrays)
        first_only(arrays)


def not_float32_vectors(arrays):
    if arrays[0].dtype != np.float32 or arrays[0].ndim > 1:
        no_broadcast(arrays)
        first_only(arrays)


WRONG = {  # what each does
    rebinding: "puts new arrays into the list",
    one_for_all: "puts one array into every place of the list",
    no_broadcast: "leaves the sum on the first device",
    all_but_the_first: "gives the sum to all but the first device",
    multiply: "multiplies by the number of devices",
    never_adds: "multiplies by 1 + 3 + 9 and so on",
    through("int32"): "computes in int32",
    through("float32"): "computes in float32",
    one_place_too_far: "puts each entry one place too far",
    first_four: "sums only the first four entries",
    vectors_only: "takes the first axis for all entries",
    not_float32_matrices: "leaves float32 matrices as they are",
    not_float32_vectors: "leaves float32 vectors as they are",
    by_device_number: "sends from the lowest device number",
    by_highest_number: "sends from the highest device number",
    remembers: "returns the sum of the first call",
    two_buffers: "returns an old sum from the third call on",
    first_only: "sends the first array, and no sum",
    counts_twice: "counts the last device twice",
    through("float16"): "computes in float16",
}
for all_reduce in WRONG:
    caught = [k for k in range(2, 9) if wrong_devices(all_reduce, k)]
    assert caught == list(range(2, 9)), all_reduce.__name__
assert len(WRONG) == 20
print("it rejects all", len(WRONG), "on any number of devices")


def right_but_on(bad):
    def all_reduce(arrays):
        if len(arrays) != bad:
            allreduce(arrays)
        else:
            arrays[-1][:] = 0
    return all_reduce


for bad in range(1, 9):
    try:
        judge(right_but_on(bad))
        raise RuntimeError(f"the judge passes what is wrong on {bad} devices")
    except AssertionError as error:
        assert str(error).startswith(f"wrong on {bad} devices"), error

# %% [markdown]
# Which part of the judge catches which mistake? We leave out one part at a time: `numbers + call`
# with only one call, say, or the powers of three. If the weaker judge passes an all-reduce on three
# devices, the part that is missing is what it takes to catch it:

# %% tags=["fold"]
# measure: which part of the judge catches which mistake, by leaving out one at a time
def with_changes(candidate, keep=True, ranks=(0, 1, 2), weight=3, rest=1 / 32, calls=3,
                 orders=(eight, backwards), numbers=None):
    """Whether a judge with these changes passes the candidate on three devices."""
    remembered.clear()
    earlier.clear()
    if numbers is None:
        numbers = [NUMBERS, NUMBERS.reshape((3, 4)), BIG_NUMBERS]
    for call in range(calls):
        for order in orders:
            for those in numbers:
                arrays = []
                for rank in range(3):
                    array = weight**rank * (those + call) + rest
                    arrays.append(array.copyto(order[rank]))
                expected = sum(array.asnumpy() for array in arrays)
                given = list(arrays)
                candidate(given)
                looked_at = arrays if keep else given
                for rank in ranks:
                    if not np.array_equal(looked_at[rank].asnumpy(), expected):
                        return False
    return True


BIG_ROW = BIG_NUMBERS.reshape(-1)
PARTS = {  # by name: how the judge looks without it; some can be left out in two ways
    "old arrays kept": [{"keep": False}],
    "all devices looked at": [{"ranks": [0]}, {"ranks": [2]}],
    "powers of 3": [{"weight": 1}],
    "the 1/32": [{"rest": 0}],
    "numbers too long for float32": [{"numbers": [NUMBERS, NUMBERS.reshape((3, 4))]}],
    "entries that differ": [{"numbers": [0 * NUMBERS + 65, 0 * NUMBERS.reshape((3, 4)) + 65,
                                         0 * BIG_NUMBERS + 2**25 + 1]}],
    "twelve entries": [{"numbers": [NUMBERS[:4], NUMBERS[:4].reshape((2, 2)), BIG_NUMBERS]}],
    "matrices": [{"numbers": [NUMBERS, BIG_ROW]}],
    "vectors": [{"numbers": [NUMBERS.reshape((3, 4)), BIG_NUMBERS]}],
    "both orders": [{"orders": [eight]}, {"orders": [backwards]}],
    "three calls": [{"calls": 1}, {"calls": 2}],
}
assert with_changes(allreduce)
needed = set()  # (part, way): without it a mistake would be missed
caught_anyway = 0
print(f"{'mistake':45}missed without")
for all_reduce, what in WRONG.items():
    assert not with_changes(all_reduce), what
    missed_without = []
    for part, ways in PARTS.items():
        for way, changes in enumerate(ways):
            if with_changes(all_reduce, **changes):
                needed.add((part, way))
                if part not in missed_without:
                    missed_without.append(part)
    if missed_without == []:
        caught_anyway += 1
    print(f"{what:45}{' or '.join(missed_without) or 'none: several parts catch it'}")
for part, ways in PARTS.items():
    for way, changes in enumerate(ways):
        assert (part, way) in needed, f"nothing needs {part}: {changes}"
assert caught_anyway == 3, "any of several"

# %% [markdown]
# Each part in the table is there for a mistake that nothing else catches. Where two parts stand in
# one row, it takes both: the bug of *Dive into Deep Learning*, the first row, is seen only on the
# other devices, and there only in the old arrays.
#
# ## What it can't see
#
# Here is one that it can't see: simulated devices share memory, so nothing is missing if an
# all-reduce forgets to copy. Counting messages would show it. Nor can it see devices that differ by
# rounding, since its sums are exact. And it hands out no arrays of three axes, of more than twelve
# entries, or with negative numbers. So it passes what is wrong only for these:

# %% tags=["fold"]
# check: all of these pass; the one that forgets to copy sends too few messages
from helpers.schedules import messages_sent


def without_moves(arrays):
    for array in arrays[1:]:
        arrays[0] += array  # two devices meet
    for array in arrays[1:]:
        arrays[0].copyto(array)


def first_twelve(arrays):  # of the entries
    parts = [array.reshape(-1)[:12] for array in arrays]
    no_broadcast(parts)
    first_only(parts)


def never_below_zero(arrays):
    allreduce(arrays)
    for array in arrays:
        array[:] = nd.maximum(array, 0)


def not_three_axes(arrays):
    if arrays[0].ndim < 3:
        allreduce(arrays)


judge(without_moves)
judge(first_twelve)
judge(never_below_zero)
judge(not_three_axes)
found = len(messages_sent(without_moves, 4, entries=12))
expected = len(messages_sent(allreduce, 4, entries=12))
print("messages on 4 devices:", found, "where the star sends", expected)
assert (found, expected) == (3, 6)

# %% [markdown]
# ## Order matters to the last bit
#
# In floating point $(a + b) + c$ need not be $a + (b + c)$. **Predict:** eight devices hold random
# float32 numbers. Do star, tree and ring give the same bits? Do all devices have the same?

# %% tags=["fold"]
# check: the bits of all three, on all devices; and of one in which each device adds for itself
from helpers.schedules import ring, run, star, tree

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
found = sums_of(each_adds_all)
apart = np.sum(np.any(found != found[0], axis=0))
print(f"each adds for itself: devices disagree about {apart} of 1000 sums")
assert apart > 0, "its devices should differ"

# %% [markdown]
# Other orders of adding, other roundings: on eight devices about half of the ring's sums differ
# from the star's. But within each scheme all devices agree to the bit, since each sum is finished
# on one device and then copied. So replicas that start equal, and make the same update, stay
# equal. (If each device adds up all arrays for itself, its own first, they don't.)
#
# ## Summary
#
# - In base 3 a sum tells which devices were counted never, once or twice, and is short enough for
#   float32. From three times on digits carry, and the 32nds have to tell.
# - A judge keeps the old arrays, looks at every device, and tries other values, types, shapes and
#   orders, and more than one call. Each of these catches a mistake that the others pass. It also
#   tries many numbers of devices.
# - It can't see a forgotten copy on simulated devices. Counting messages can. And it says nothing
#   about arrays that it doesn't hand out.
# - Star, tree and ring can differ by rounding; within each all devices agree to the bit.
