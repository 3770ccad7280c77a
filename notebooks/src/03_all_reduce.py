# %% [markdown]
# # 03 · All-reduce
#
# After a backward pass each device has the gradient of its own shard, and every device needs the
# sum of all of them. An operation that leaves the sum on every device is called *all-reduce*.
#
# ## What you'll do
#
# Meet an all-reduce that a textbook printed for eleven months, and repair it. Write a judge that
# tells right from wrong. Then write a ring, and compare what a star, a tree and a ring send.
#
# ## What you'll learn
#
# - how to test an all-reduce so that the usual mistakes are caught;
# - how a ring all-reduce works, and what *reduce-scatter* and *all-gather* are;
# - how many rounds and bytes a star, a tree and a ring take.
#
# ## What you need
#
# Chapters 01 and 02. No GPU. Reading takes {reading time}, running less than one minute.

# %%
import helpers

import mxnet as mx
import numpy as np
from mxnet import nd

eight = [mx.cpu(number) for number in range(8)]  # we test results, not speed: any will do

# %% [markdown]
# ## A bug that was printed for eleven months
#
# In January 2021 the PyTorch edition of *Dive into Deep Learning* gained an all-reduce that adds
# up all arrays on the first device and puts the sum into a list. It stayed until December
# (d2l-ai/d2l-en, pull requests #1596 and #1978). Here it is with MXNet's arrays:

# %%
def rebinding(arrays):
    total = arrays[0]
    for rank in range(1, len(arrays)):
        total += arrays[rank].as_in_context(total.context)  # the sum, on the first device
    for rank in range(1, len(arrays)):
        arrays[rank] = total.as_in_context(arrays[rank].context)  # the sum, for all others

# %% [markdown]
# We try it on three devices. A parameter on each device has a gradient; `grads` is a list of the
# three. The book's page printed such a list before and after:

# %%
held_by_parameters = [
    nd.array([1], ctx=eight[0]),
    nd.array([2], ctx=eight[1]),
    nd.array([3], ctx=eight[2]),
]
grads = list(held_by_parameters)  # a list of the same three arrays

print("before:", [grad.asscalar() for grad in grads])
rebinding(grads)
print("after: ", [grad.asscalar() for grad in grads])

# %% [markdown]
# 1 + 2 + 3 = 6 on each device. It looks right. But the update of the weights reads the gradients
# that the parameters hold. **Predict:** what are they?

# %%
print("held by the parameters:", [grad.asscalar() for grad in held_by_parameters])

# %% [markdown]
# Only the first has the sum. `total += ...` writes into an array that is there. But
# `arrays[rank] = ...` puts a *new* array into the list, and the old one stays where it was, with
# its old value:
#
# ![Before, the list's three slots and three parameters point to the same arrays: 1, 2, 3. After,
# slots 1 and 2 point to new arrays that hold 6, while the parameters still hold 2 and 3; only the
# first array, now 6, is shared.](src/drawings/rebinding.svg)
#
# The bug is easy to miss: device 0 has the sum, and a test that looks at device 0 alone sees
# nothing wrong. This all-reduce returns nothing, so it must work **in place**: write into the
# arrays that were there.
#
# ## A star: the plainest all-reduce
#
# How is it done right? Nearly the same way, but the sum is copied *into* the arrays that are there:

# %%
def allreduce(arrays):
    total = arrays[0]
    for array in arrays[1:]:
        total += array.copyto(total.context)  # each device sends its array to the first one
    for array in arrays[1:]:
        total.copyto(array)  # the first one sends the sum to each, into its array


held_by_parameters = [
    nd.array([1], ctx=eight[0]),
    nd.array([2], ctx=eight[1]),
    nd.array([3], ctx=eight[2]),
]
grads = list(held_by_parameters)
allreduce(grads)
print("held by the parameters:", [grad.asscalar() for grad in held_by_parameters])

# %% [markdown]
# All messages go to device 0 or come from it, like the rays of a star. The first half has a name:
# *reduce* leaves the sum on one device. So has the second: *broadcast* sends one device's array to
# all. `helpers.allreduce` is this function, with its arguments checked.
#
# ## A judge, in three steps
#
# It worked once, on three devices that held 1, 2 and 3. How do we find out that an all-reduce is
# right? Give it arrays, keep hold of them, and compare each with the sum that NumPy finds. The
# answer is a list of those *ranks* that are wrong; an array's rank is its place in the list.

# %%
def wrong_ranks(all_reduce, arrays):
    expected = 0
    for array in arrays:
        expected = expected + array.asnumpy()

    all_reduce(list(arrays))  # another list, with the same arrays in it

    wrong = []
    for rank, array in enumerate(arrays):
        if not np.array_equal(array.asnumpy(), expected):
            wrong.append(rank)
    return wrong

# %% [markdown]
# What remains is to choose the arrays. Each of three steps catches a mistake that slips through
# the one before.
#
# **Step 1: ones.** Each of four devices holds a 1.

# %%
def ones(k):
    return [nd.ones(1, ctx=eight[rank]) for rank in range(k)]


print("rebinding is wrong on the ranks", wrong_ranks(rebinding, ones(4)))
print("allreduce is wrong on the ranks", wrong_ranks(allreduce, ones(4)))

# %% [markdown]
# The book's bug is caught. Here is an all-reduce that sends nothing at all. **Predict:** is it
# caught, too?

# %%
def multiply(arrays):
    for array in arrays:
        array *= len(arrays)  # like +=, this writes into the array


print("multiply is wrong on the ranks", wrong_ranks(multiply, ones(4)))

# %% [markdown]
# It isn't. Four ones make 4, and so does four times a one.
#
# **Step 2: values that tell devices and entries apart.** Each device has a digit of its own:

# %%
def digits(k):
    arrays = []
    for rank in range(k):
        arrays.append(nd.array([1, 2], ctx=eight[rank]) * 10**rank)
    return arrays


for array in digits(4):
    print(array.context, array.asnumpy())
print("the sum:", sum(array.asnumpy() for array in digits(4)))

print("multiply is wrong on the ranks", wrong_ranks(multiply, digits(4)))

# %% [markdown]
# Now a sum shows what is in it. Without device 1 the first entry would be 1101, and with device 2
# counted twice 1211. And an entry in the wrong place is seen, since no two are alike.
#
# Next, a cleverer mistake: partners exchange their arrays, and each adds what it gets. At first
# the partners are neighbours, 0 and 1, 2 and 3; then devices two apart, 0 and 2, 1 and 3; then
# four apart. A device without a partner waits. **Predict:** for which numbers of devices does that
# work?

# %% tags=["fold"]
# check: an all-reduce by partners, on 2 to 8 devices
def partner_of(rank, gap):
    if rank % (2 * gap) < gap:
        return rank + gap
    else:
        return rank - gap


def powers_of_two(arrays):
    for gap in [1, 2, 4]:
        before = [array.copy() for array in arrays]  # what each sends in this round
        for rank, array in enumerate(arrays):
            partner = partner_of(rank, gap)
            if partner < len(arrays):  # or there is nobody to exchange with
                array += before[partner].as_in_context(array.context)


for k in range(2, 9):
    wrong = wrong_ranks(powers_of_two, digits(k))
    print(k, "devices: wrong on the ranks", wrong)
    assert (wrong == []) == (k in [2, 4, 8])

# %% [markdown]
# On three devices, rank 1 has no partner in the second round, since there is no rank 3. So it never
# hears of rank 2.
#
# **Step 3: more cases.** So we must try every $k$. And an all-reduce may have other bad habits: it
# may be right only the first time, only if `cpu(0)` comes first in the list, only for float32, or
# only for vectors. So the judge's arrays can have other numbers, in another type and shape, on
# devices in another order:

# %%
NUMBERS = nd.arange(65, 77)
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25  # float32 can't hold them
backwards = list(reversed(eight))  # cpu(7), cpu(6), and so on


def replicas(k, numbers=NUMBERS, order=eight):
    arrays = []
    for rank in range(k):
        array = 3**rank * numbers + 1 / 32
        arrays.append(array.copyto(order[rank]))
    return arrays

# %% [markdown]
# (Why powers of three? With twelve numbers and eight devices, powers of ten make sums that float32
# must round. Powers of three are small enough, and tell as much. The 1/32 is lost by an all-reduce
# that computes in integers.)

# %% tags=["fold"]
# check: of all ways to count the devices 0, 1 or 2 times, no two give the same sum anywhere
import itertools

for k in range(1, 9):
    values = np.stack([array.asnumpy() for array in replicas(k)])  # [device, entry]
    counts = np.array(list(itertools.product([0, 1, 2], repeat=k)))  # [way, device]
    sums = counts @ values.astype("float64")  # [way, entry]
    for entry in range(12):
        assert len(np.unique(sums[:, entry])) == 3**k, f"{k} devices, entry {entry}"
    assert len(np.unique(values)) == values.size, "two entries are alike"

# %% tags=["fold"]
# check: the arrays' type holds each sum exactly, so that any order of adding gives the same bits
for numbers, dtype in [(NUMBERS, "float32"), (BIG_NUMBERS, "float64")]:
    for call in range(3):
        for k in range(1, 9):
            in_32nds = 0
            for array in replicas(k, numbers + call):
                assert array.dtype == np.dtype(dtype)
                in_32nds = in_32nds + (32 * array.asnumpy().astype("float64")).astype("int64")
            assert np.array_equal(in_32nds / 32, (in_32nds / 32).astype(dtype)), f"{k}: rounded"
            assert np.all(in_32nds % 32 != 0), f"{k} devices: an integer would hold it"
assert not np.array_equal(BIG_NUMBERS.asnumpy(), BIG_NUMBERS.astype("float32").asnumpy())
for numbers, exact in [(np.arange(1, 3), True), (np.arange(1, 13), False)]:
    digits_of_8 = numbers * 11_111_111
    assert np.array_equal(digits_of_8, digits_of_8.astype("float32")) == exact, "powers of ten"

# %% [markdown]
# The final judge calls the all-reduce twelve times:

# %%
def wrong_devices(all_reduce, k):
    wrong = set()
    for call in range(3):  # an all-reduce must work more than once
        for order in [eight, backwards]:  # whichever device comes first
            vectors = replicas(k, NUMBERS + call, order)
            wrong.update(wrong_ranks(all_reduce, vectors))
            matrices = replicas(k, BIG_NUMBERS + call, order)
            wrong.update(wrong_ranks(all_reduce, matrices))
    return sorted(wrong)


def judge(all_reduce):
    for k in range(1, 9):
        assert wrong_devices(all_reduce, k) == [], f"wrong on {k} devices"
    print(f"{all_reduce.__name__} is right on 1 to 8 devices")


judge(allreduce)

# %% tags=["fold"]
# check: the judge fails sixteen wrong all-reduces, those of the text among them
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


passed = {"ones": 0, "digits": 0}
WRONG = [rebinding, no_broadcast, first_only, one_for_all, multiply, counts_twice, powers_of_two,
         all_but_the_first, never_adds, one_place_too_far, through("float16"), through("int32"),
         vectors_only, through("float32"), by_device_number, remembers]
for all_reduce in WRONG:
    for name, make in [("ones", ones), ("digits", digits)]:
        remembered.clear()
        passed[name] += wrong_ranks(all_reduce, make(4)) == []
    caught = [k for k in range(2, 9) if wrong_devices(all_reduce, k)]
    assert caught == ([3, 5, 6, 7] if all_reduce is powers_of_two else list(range(2, 9)))
print(f"of {len(WRONG)} wrong all-reduces, {passed['ones']} pass four ones, {passed['digits']} "
      "pass four digits, and none passes the judge")
try:
    judge(powers_of_two)
    raise RuntimeError("the judge passes what is wrong on 3 devices")
except AssertionError as error:
    assert str(error).startswith("wrong on 3 devices")

# %% [markdown]
# So a test of an all-reduce keeps the old arrays, looks at every one of them, uses values that
# tell devices apart, and tries many numbers of devices.
#
# One mistake this judge *can't* see, since simulated devices share memory: an all-reduce that
# forgets to copy, and adds arrays of two devices as they are. On GPUs that may crash (chapter 01).

# %% tags=["fold"]
# check: an all-reduce that forgets to copy passes the judge
def without_moves(arrays):
    for array in arrays[1:]:
        arrays[0] += array  # two devices meet
    for array in arrays[1:]:
        arrays[0].copyto(array)


judge(without_moves)
judge(helpers.allreduce)

# %% [markdown]
# ## Three ways on four devices
#
# In a star, device 0 has all the work. How can it be shared? An arrow is a message; messages of one
# *round* go at the same time:
#
# ![Messages on four devices, round by round. A star takes 6 rounds of one whole array, a tree 4
# rounds of whole arrays, a ring 6 rounds in which every device sends a quarter; receivers add in
# the first half and overwrite in the second.](src/drawings/star_tree_ring.svg)
#
# Our rule: in a round a device sends one message at most and receives one at most, and it doesn't
# pass on what it receives in that round.
#
# In a *tree*, pairs add up at the same time, then pairs of pairs. That takes fewer rounds, but
# device 0 still sends the whole array in each round on the way down. (You write it in exercise 1.)
#
# ## A ring
#
# Can every device do the same work, all the time? Cut each array into $k$ chunks. In every round
# each device sends one chunk to the next device, and the last device sends to the first:
#
# ![Moving picture: four devices on a ring, each sending one chunk to the next in every round. For
# three rounds the receiver adds and the chunks fill; for three more it copies the finished sums,
# until all devices have them.](src/drawings/ring_moving.svg)
#
# First we need the chunks. `window` finds one in an array. As in chapter 02, a slice of consecutive
# entries of an `mx.nd` array shares its memory, and so does `reshape(-1)`, which makes one row of
# it: what we write into a window is in the array.

# %%
def window(array, chunk, num_chunks):
    flat = array.reshape(-1)
    begin = flat.size * chunk // num_chunks  # rounded down
    end = flat.size * (chunk + 1) // num_chunks  # where the next chunk begins
    return flat[begin:end]


ten = nd.arange(10)
for chunk in range(4):
    print("chunk", chunk, "of 4:", window(ten, chunk, num_chunks=4).asnumpy())

# %% [markdown]
# To see what goes where, give each device a digit again: device 0 holds ones, device 1 tens, and so
# on. These are the first three rounds:
#
# ![Four devices with four chunks each. In each of rounds 1 to 3 one number of each device grows by
# the number above it, until the diagonal holds 1111.](src/drawings/ring_rounds.svg)
#
# Follow chunk 0, the first column. It starts at device 1, goes to 2, to 3 and to 0, and each of
# them adds its own part. So it ends at device 0 as the whole sum. All chunks travel at the same
# time, each one place further: chunk 1 starts at device 2 and ends at device 1. One round of it:

# %%
def reduce_scatter_round(arrays, number):  # number 0 is the first round
    k = len(arrays)
    for chunk in range(k):
        sender = (chunk + 1 + number) % k  # % k: after the last device comes device 0
        receiver = (sender + 1) % k
        source = window(arrays[sender], chunk, k)
        target = window(arrays[receiver], chunk, k)
        if source.size > 0:  # it is 0 where there are more chunks than entries
            target += source.copyto(target.context)

# %% [markdown]
# Does it do what is drawn? A row is a device, a column a chunk:

# %%
arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]

for number in range(3):
    reduce_scatter_round(arrays, number)
    print("after round", number + 1)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %% [markdown]
# After $k - 1$ rounds device $r$ has the whole sum of chunk $r$: the 1111 on the diagonal. This is
# half of the way, and it has a name, *reduce-scatter*.
#
# For $k - 1$ more rounds the finished chunks go on round the ring. Chunk 0 starts at device 0 now,
# and a chunk that arrives *overwrites* what is there. That is an *all-gather*.

# %%
def all_gather_round(arrays, number):
    k = len(arrays)
    for chunk in range(k):
        sender = (chunk + number) % k
        receiver = (sender + 1) % k
        source = window(arrays[sender], chunk, k)
        target = window(arrays[receiver], chunk, k)
        if source.size > 0:
            source.copyto(target)


for number in range(3):
    all_gather_round(arrays, number)
    print("after round", number + 4)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %% [markdown]
# The two together are a ring all-reduce:

# %%
def ring_allreduce(arrays):
    k = len(arrays)
    for number in range(k - 1):
        reduce_scatter_round(arrays, number)
    for number in range(k - 1):
        all_gather_round(arrays, number)


judge(ring_allreduce)

# %% [markdown]
# Operations in which all devices take part are called *collectives*. You have now met five, and two
# ways to put an all-reduce together:
#
# ![Five collectives on four devices, before and after. Reduce and then broadcast leave all sums on
# all devices, as all-reduce does; so do reduce-scatter and then
# all-gather.](src/drawings/collectives.svg)
#
# **All-reduce = reduce + broadcast = reduce-scatter + all-gather.** PyTorch's `torch.distributed`
# has functions of these names (chapters 14 and 16).
#
# ## Rounds and bytes
#
# **Predict:** each of 8 devices has an array of $S$ bytes. How many bytes does each device send in
# a star, a tree and a ring? We run each, and count what is copied to another device:

# %% tags=["fold"]
# measure: what each of 8 devices sends, in units of the whole array
from unittest import mock

from helpers.schedules import run, tree

copyto = nd.NDArray.copyto


def tree_allreduce(arrays):
    run(tree(len(arrays)), arrays, num_chunks=1)


def messages_sent(all_reduce, k, entries):
    """(sender, receiver, entries) of each copy to another device."""
    messages = []

    def noted(array, other):
        device = getattr(other, "context", other)  # of an array, or a device itself
        assert device != array.context, "a copy to itself is no message"
        messages.append((array.context.device_id, device.device_id, array.size))
        return copyto(array, other)

    arrays = [nd.ones(entries, ctx=device) for device in eight[:k]]
    with mock.patch.object(nd.NDArray, "copyto", noted):
        all_reduce(arrays)
    return messages


def shares_sent(all_reduce, k):
    entries = 840  # a multiple of 1 to 8, so that all chunks are equal
    shares = np.zeros(k)
    for sender, receiver, size in messages_sent(all_reduce, k, entries):
        shares[sender] += size / entries
    return shares


for name, all_reduce in [("star", allreduce), ("tree", tree_allreduce), ("ring", ring_allreduce)]:
    print(f"{name}: sent by devices 0 to 7:", *shares_sent(all_reduce, 8))
assert len(messages_sent(allreduce, 4, 840)) == 6
assert len(messages_sent(without_moves, 4, 840)) == 3

# %% [markdown]
# All three send $2(k-1)S$ in all. They differ in who sends it, and when: in a ring all devices send
# at the same time, and each message is a $k$-th of the array. For $k$ devices:
#
# | | rounds | bytes of a message | bytes one after the other |
# | --- | --- | --- | --- |
# | star | $2(k-1)$ | $S$ | $2(k-1)\,S$ |
# | tree | $2\lceil\log_2 k\rceil$ | $S$ | $2\lceil\log_2 k\rceil\,S$ |
# | ring | $2(k-1)$ | $S/k$ | $2\frac{k-1}{k}\,S$ |
#
# The last column is the product of the two before it. In the usual model, each round costs a
# *latency*, even if its messages are small, and each byte costs time, since a link carries only so
# many a second, its *bandwidth*. So for small arrays the number of rounds decides, which speaks for
# a tree. For large arrays the bytes that go one after the other decide, which speaks for a ring:
# they are less than $2S$, however many devices there are. If all the adding is done by the devices,
# the busiest one can't send less (Patarasuk and Yuan, 2009).

# %% tags=["fold"]
# check: rounds and bytes follow the table on 2 to 8 devices
from functools import partial


def rounds_needed(messages):
    """The fewest rounds for whole arrays: a device sends once, receives once, then passes on."""
    busy = {}  # device: the last round in which it sent or received
    for sender, receiver, size in messages:
        this = 1 + max(busy.get(("sends", sender), 0), busy.get(("receives", sender), 0),
                       busy.get(("receives", receiver), 0))
        busy["sends", sender] = this
        busy["receives", receiver] = this
    return max(busy.values())


for k in range(2, 9):
    doublings = (k - 1).bit_length()  # log2 of k, rounded up
    table = {  # rounds, a message, what the busiest device sends
        "star": (allreduce, 2 * (k - 1), 1, k - 1),
        "tree": (tree_allreduce, 2 * doublings, 1, doublings),
        "ring": (ring_allreduce, 2 * (k - 1), 1 / k, 2 * (k - 1) / k),
    }
    for name, (all_reduce, rounds, message, busiest) in table.items():
        shares = shares_sent(all_reduce, k)
        messages = messages_sent(all_reduce, k, entries=840)
        assert {size for _, _, size in messages} == {840 * message}, f"{name} on {k}: a message"
        assert np.isclose(max(shares), busiest), f"{name} on {k} devices: busiest {max(shares)}"
        assert np.isclose(sum(shares), 2 * (k - 1)), f"{name} on {k} devices: {sum(shares)} in all"
        assert name == "ring" or k == 2 or busiest > 2 * (k - 1) / k, "more than in a ring"
        if name != "ring":
            assert rounds_needed(messages) == rounds, f"{name} on {k} devices: rounds"
    for number in range(k - 1):
        for round_ in [reduce_scatter_round, all_gather_round]:
            messages = messages_sent(partial(round_, number=number), k, entries=840)
            assert sorted(sender for sender, _, _ in messages) == list(range(k)), "each sends once"
            assert sorted(receiver for _, receiver, _ in messages) == list(range(k)), "and receives"

# %% [markdown]
# Is there a way with few rounds *and* few bytes? There is, and there are networks on which yet
# other ways win, or on which a switch adds: deeper: More all-reduces. And which is the fastest on
# this machine? deeper: All-reduce against the clock.

# %% [markdown]
# ## Order matters to the last bit
#
# In floating point $(a + b) + c$ need not be $a + (b + c)$. **Predict:** eight devices hold 1,000
# random float32 numbers each. Do star, tree and ring give the same bits? And do all devices have
# the same bits?

# %% tags=["fold"]
# check: the bits of star, tree and ring, on all devices; none is far from the float64 sum
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


assert wrong_devices(each_adds_all, 8) == [], "it is an all-reduce"
by_star = None
for all_reduce in [allreduce, tree_allreduce, ring_allreduce, each_adds_all]:
    arrays = [nd.array(row, ctx=device) for row, device in zip(values, eight)]
    all_reduce(arrays)
    found = arrays[0].asnumpy()
    by_star = found if by_star is None else by_star
    others = np.sum(found != by_star)
    same = all(np.array_equal(array.asnumpy(), found) for array in arrays)
    assert np.all(np.abs(found - exact) <= bound), "too far away"
    assert same == (all_reduce is not each_adds_all), "the same bits on all devices"
    if all_reduce in [tree_allreduce, ring_allreduce]:
        assert 400 < others < 600, "about half"
        name = all_reduce.__name__
        print(f"{name}: {others} of 1000 sums differ from the star's; all devices agree: {same}")

# %% [markdown]
# They add in different orders, so about half of the sums differ from the star's by rounding. But
# within a star, a tree or a ring all devices agree to the bit: a number is summed in one place and
# then copied. So replicas that start equal, and make the same update, stay equal. (If each device
# added up all arrays by itself, its own first, the devices would differ.)
#
# ## Summary
#
# - All-reduce leaves the sum on every device, in the arrays that were there. A test keeps hold of
#   those arrays, looks at every one, uses values that tell devices and entries apart, and tries
#   many numbers of devices.
# - All-reduce = reduce + broadcast = reduce-scatter + all-gather.
# - A tree takes $2\lceil\log_2 k\rceil$ rounds of whole arrays, a star and a ring $2(k-1)$. But the
#   ring's messages are a $k$-th of the array: each device sends $2\frac{k-1}{k}S$, and the busiest
#   one can't send less where only the devices add.
# - Star, tree and ring differ by rounding; within each the devices agree to the bit.
#
# **Further reading.** P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations", *JPDC* 69 (2009).

# %% [markdown]
# ## Exercises
#
# 1. **A tree.** Write `tree_allreduce(arrays)` by the drawing. First pairs add, 1 sends to 0 and 3
#    to 2; then pairs of pairs, 2 sends to 0; the sum comes down the same way in reverse. How many
#    rounds does it take on 5 devices? Let `judge` pass it.
# 2. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `wrong_devices` say of it?
# 3. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, which takes a list of arrays for each device and calls `all_reduce` once. How
#    many messages does it save for 8 arrays on 2 devices with the ring?
# 4. **Fool the judge (open).** Write a wrong all-reduce that `wrong_devices` passes for all $k$
#    from 2 to 8. What must a judge do to catch it? Can there be a judge that nothing fools?

# %% [markdown]
# ### Answer 1
#
# On 5 devices it takes three rounds up and three down: 0 gets the sum of 4 in a round of its own.
# `target` is a name for an array that is there, so `+=` writes into it. (`arrays[receiver] += ...`
# would do, too: after adding in place, it puts the same array into the list again.)

# %% tags=["solution"]
def tree_by_hand(arrays):
    k = len(arrays)
    gaps = []
    gap = 1
    while gap < k:
        gaps.append(gap)
        gap = 2 * gap

    for gap in gaps:  # up: 1, 2, 4, ...
        for receiver in range(0, k, 2 * gap):
            sender = receiver + gap
            if sender < k:
                target = arrays[receiver]
                target += arrays[sender].copyto(target.context)

    for gap in reversed(gaps):  # down: ..., 4, 2, 1
        for sender in range(0, k, 2 * gap):
            receiver = sender + gap
            if receiver < k:
                arrays[sender].copyto(arrays[receiver])


judge(tree_by_hand)
for k in range(2, 9):
    assert messages_sent(tree_by_hand, k, 840) == messages_sent(tree_allreduce, k, 840)
print(rounds_needed(messages_sent(tree_by_hand, 5, 840)), "rounds on 5 devices")

# %% [markdown]
# ### Answer 2
#
# Divide every replica by $k$ afterwards. (PyTorch's DDP averages too, but divides first, so that
# float16 doesn't overflow.) The update is $\eta$ times the gradient, so $k\eta$ with the mean
# equals $\eta$ with the sum. The judge rejects it for every $k$ above 1, as it should: it isn't
# the sum.

# %% tags=["solution"]
def mean_allreduce(arrays):
    ring_allreduce(arrays)
    for array in arrays:
        array /= len(arrays)


for k in range(2, 9):
    held = replicas(k)
    total = sum(array.asnumpy() for array in held)
    mean_allreduce(list(held))  # a copy of the list: rebinding its entries must not pass
    for array in held:
        assert np.allclose(k * array.asnumpy(), total, rtol=1e-6), "not the mean"
    assert wrong_devices(mean_allreduce, k) == list(range(k)), "a mean is not a sum"
print("the mean on 2 to 8 devices, and the judge says that it isn't the sum")

# %% [markdown]
# ### Answer 3
#
# Flatten and join what each device has, all-reduce once, and write the pieces back. Eight rings of
# 4 messages become one: 28 messages fewer. PyTorch's DDP calls such a buffer a *bucket* (chapter
# 14).

# %% tags=["solution"]
def fused_allreduce(groups, all_reduce):
    buffers = []
    for group in groups:
        flat = [array.reshape(-1) for array in group]
        buffers.append(nd.concat(*flat, dim=0))
    all_reduce(buffers)
    for group, buffer in zip(groups, buffers):
        begin = 0
        for array in group:
            end = begin + array.size
            array[:] = buffer[begin:end].reshape(array.shape)
            begin = end


base = []
for place, n in enumerate([1, 2, 3, 4, 4, 6, 7, 8]):  # two of one shape
    base.append((10 * place + nd.arange(2 * n)).reshape((2, n)))

by_one = 0
for array in base:
    by_one += len(messages_sent(ring_allreduce, 2, array.size))
print(by_one, "messages for eight arrays, one after the other")
assert by_one == 32

# %% [markdown]
# In the check, rank $r$ holds $r + 1$ times each array, so the sum on two devices is three times
# the array, on three devices six times. `list` is an all-reduce that does nothing: then each device
# must get its own buffer back.

# %% tags=["solution"]
def check_fused(all_reduce, expected_factors):
    calls = []

    def counted(arrays):
        calls.append(len(arrays))
        all_reduce(arrays)

    groups = []
    for rank in range(len(expected_factors)):
        groups.append([(rank + 1) * array.copyto(eight[rank]) for array in base])
    fused_allreduce([list(group) for group in groups], counted)  # copies of the lists, as above
    for group, factor in zip(groups, expected_factors):
        for found, array in zip(group, base):
            assert np.array_equal(found.asnumpy(), factor * array.asnumpy()), "other values"
    assert len(calls) == 1, f"{len(calls)} calls"


check_fused(list, expected_factors=[1, 2])
check_fused(list, expected_factors=[1, 2, 3])
check_fused(ring_allreduce, expected_factors=[3, 3])
check_fused(ring_allreduce, expected_factors=[6, 6, 6])
entries = sum(array.size for array in base)
print(len(messages_sent(ring_allreduce, 2, entries)), "messages for all eight arrays")

# %% [markdown]
# ### Answer 4
#
# Whatever the judge doesn't try can be wrong: arrays of more than twelve entries,
# three-dimensional ones, int8, nine devices, a seventh call on as many devices. Here is one that
# forgets what comes after the twelfth entry. A judge that tries more sizes catches it, and there
# is always a next one: a test can only look at finitely many cases. So cases are chosen where
# mistakes are likely (ends, remainders, odd numbers, reversed orders), and the code is read.

# %% tags=["solution"]
def twelve_entries(arrays):
    parts = [array.reshape(-1)[:12] for array in arrays]
    allreduce(parts)


for k in range(2, 9):
    assert wrong_devices(twelve_entries, k) == [], "the judge sees it"

thirteen = replicas(2, nd.arange(13))
twelve_entries(thirteen)
print(thirteen[1].asnumpy())
assert thirteen[1][11].asscalar() == 4 * 11 + 2 / 32, "the twelfth is summed"
assert thirteen[1][12].asscalar() == 3 * 12 + 1 / 32, "the thirteenth is not"
