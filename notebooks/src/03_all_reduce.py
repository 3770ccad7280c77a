# %% [markdown]
# # 03 · All-reduce
#
# After a backward pass each device has the gradient of its own shard, and every device needs the
# sum of all of them. An operation that leaves the sum on every device is called *all-reduce*.
#
# > **What you'll do:** repair an all-reduce that a textbook printed for eleven months. Then write a
# > ring.
# >
# > **What you'll learn:** how to test an all-reduce; how a ring all-reduce works, and what
# > *reduce-scatter* and *all-gather* are; how many rounds and bytes a star, a tree and a ring take.
# >
# > **What you need:** chapters 01 and 02. No GPU. Reading takes {reading time}, running less than
# > one minute.

# %%
import helpers

import mxnet as mx
import numpy as np
from mxnet import nd

eight = [mx.cpu(number) for number in range(8)]  # simulated: we test results, not speed

# %% [markdown]
# ## A bug that was printed for eleven months
#
# In January 2021 the PyTorch edition of *Dive into Deep Learning* gained this all-reduce, here with
# MXNet's arrays. It adds up all arrays on the first device and puts the sum into a list. It stayed
# until December (d2l-ai/d2l-en, pull requests #1596 and #1978). A *rank* is an array's place in the
# list:

# %%
def rebinding(arrays):
    total = arrays[0]  # another name for the first array
    for rank in range(1, len(arrays)):
        total += arrays[rank].copyto(total.context)  # a copy on the first device is added
    for rank in range(1, len(arrays)):
        arrays[rank] = total.copyto(arrays[rank].context)  # a copy of the sum, for all others

# %% [markdown]
# We try it on three devices. In training each parameter keeps hold of its gradient; here a variable
# does. The book printed the list before and after:

# %%
first = nd.array([1], ctx=eight[0])
second = nd.array([2], ctx=eight[1])
third = nd.array([3], ctx=eight[2])
grads = [first, second, third]

print("before:", [grad.asscalar() for grad in grads])
rebinding(grads)
print("after: ", [grad.asscalar() for grad in grads])

# %% [markdown]
# It looks right. But the update of the weights reads the gradients that the
# parameters hold, not this list. **Predict:** what are they?

# %%
print(first.asscalar(), second.asscalar(), third.asscalar())

# %% [markdown]
# Only the first has the sum. `total += ...` writes into an existing array. But `arrays[rank] = ...`
# puts a *new* array into the list, and the old one keeps its old value:
#
# ![Before, the list's three slots and three parameters point to the same arrays: 1, 2, 3. After,
# slots 1 and 2 point to new arrays that hold 6, while the parameters still hold 2 and 3; only the
# first array, now 6, is shared.](src/drawings/rebinding.svg)
#
# So the list shows nothing wrong. An all-reduce that returns nothing must work **in place**: it
# must write into the existing arrays.
#
# ## A star: the plainest all-reduce
#
# Given a device, `copyto` makes a new array there. Given an array, it writes into that one. So one
# line changes:

# %%
def allreduce(arrays):
    total = arrays[0]
    for rank in range(1, len(arrays)):
        total += arrays[rank].copyto(total.context)
    for rank in range(1, len(arrays)):
        total.copyto(arrays[rank])  # NEW: into the array that the parameter holds


first = nd.array([1], ctx=eight[0])
second = nd.array([2], ctx=eight[1])
third = nd.array([3], ctx=eight[2])
allreduce([first, second, third])
print(first.asscalar(), second.asscalar(), third.asscalar())

# %% [markdown]
# All messages go to device 0 or come from it, like the rays of a star. The first half is called
# *reduce*: it leaves the sum on one device. The second is *broadcast*: one device's array goes to
# all. `helpers.allreduce` is this function.
#
# ## How to test an all-reduce
#
# How do we test an all-reduce? Give it arrays, keep hold of them, and compare each with NumPy's
# sum. The all-reduce gets a list of its own with the same arrays. If it got our list, `rebinding`
# would put its new arrays into it, and we would compare those. We return the ranks that are wrong.

# %%
def wrong_ranks(candidate, arrays):
    expected = 0  # the sum, before the candidate changes the arrays
    for array in arrays:
        expected = expected + array.asnumpy()

    candidate(list(arrays))  # a list of its own, with the same arrays

    wrong = []
    for rank, array in enumerate(arrays):
        if not np.array_equal(array.asnumpy(), expected):
            wrong.append(rank)
    return wrong

# %% [markdown]
# **Step 1: ones.** Each of four devices holds a 1.

# %%
def ones(k):
    return [nd.ones(1, ctx=eight[rank]) for rank in range(k)]


print("rebinding is wrong on the ranks", wrong_ranks(rebinding, ones(4)))
print("allreduce is wrong on the ranks", wrong_ranks(allreduce, ones(4)))

# %% [markdown]
# The book's bug is caught. Here is an all-reduce that sends nothing at all:

# %%
def multiply(arrays):
    for array in arrays:
        array *= len(arrays)  # like +=, this writes into the array

# %% [markdown]
# **Predict:** is it caught, too?

# %%
print("multiply is wrong on the ranks", wrong_ranks(multiply, ones(4)))

# %% [markdown]
# It isn't. Four ones make 4, and so does four times a one.
#
# **Step 2: values that tell devices and entries apart.** Device 0 holds 1 and 2, device 1 ten times
# as much, and so on. So each device has a decimal place of its own:

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
# counted twice 1211. An entry in the wrong place is seen, too.
#
# **Step 3: more cases.** An all-reduce may be wrong on 3 devices only, or the second time, or for
# float64. So `judge`, a helper, calls `wrong_ranks` with many arrays on 1 to 8 devices, and raises
# an error where a rank is wrong:

# %%
from helpers.schedules import judge

judge(allreduce)

try:
    judge(multiply)
except AssertionError as error:
    print("multiply:", error)

# %% [markdown]
# Eighteen wrong all-reduces that it rejects, and one that it can't see, are in deeper: A judge for
# all-reduces.

# %% [markdown]
# ## Three ways on four devices
#
# In a star, device 0 does all the adding and half of the sending. How can the work be shared?
#
# Messages go in *rounds*. In a round a device sends one message at most and receives one at most,
# and what it receives it can pass on only in a later round. So a star on four devices takes three
# rounds there and three back. An arrow is a message, a thin one a quarter of an array.
#
# ![Messages on four devices, round by round. A star takes 6 rounds of one whole array, a tree 4
# rounds of whole arrays, a ring 6 rounds in which every device sends a quarter; receivers add in
# the first half and overwrite in the second.](src/drawings/star_tree_ring.svg)
#
# In a *tree*, pairs add up at the same time, then pairs of pairs, and the sum goes back in the same
# way. (A device without a partner waits.) That takes fewer rounds, but
# device 0 still sends the whole array in each round on the way back.
#
# ## A ring
#
# Can every device do the same work, all the time? It can, if each sums a different piece of the
# array. In a *ring* of $k$ devices arrays are cut into $k$ chunks. In every round each device sends
# one chunk to the next, the last one to the first. After half of the rounds device
# 0 should have the whole sum of chunk 0, device 1 that of chunk 1, and so on.
#
# Let each of device 0's four chunks hold 1, device 1's 10, device 2's 100, and device 3's 1000:
#
# ![Four devices with four chunks each. In each of rounds 1 to 3 one number of each device grows by
# the number above it, until the diagonal holds 1111.](src/drawings/ring_rounds.svg)
#
# Follow chunk 0, the first column. Its sum should end at device 0, so it starts at device 1, as 10.
# It goes to device 2, where it becomes 110, to device 3 (1110), and to device 0 (1111). Chunk 1
# does the same one device further. Which device sends each chunk:
#
# | | in round 1 | in round 2 | in round 3 |
# | --- | --- | --- | --- |
# | chunk 0 | 1 | 2 | 3 |
# | chunk 1 | 2 | 3 | 0 |
# | chunk 2 | 3 | 0 | 1 |
# | chunk 3 | 0 | 1 | 2 |
#
# Chunk $c$ starts at device $c + 1$, and each round takes it one device further. So **in round $n$
# device $(c + n) \bmod k$ sends chunk $c$**; the mod says that device 0 comes after the last one.
#
# In our program one Python loop moves all messages; between machines each would run its own.
# `window`, a helper, finds a chunk in an array (if chunks can't be equal, their sizes differ by
# one):

# %%
from helpers.schedules import window

numbers = nd.arange(8)
for chunk in range(4):
    print("chunk", chunk, "of 4:", window(numbers, chunk, 4).asnumpy())

# %% [markdown]
# What it returns shares the array's memory, as slices did in chapter 02:

# %%
first_chunk = window(numbers, 0, 4)
first_chunk[:] = 99
print(numbers.asnumpy())

# %% [markdown]
# This function does one round, chunk by chunk. (If all messages of a round went at once, the result
# would be the same, since each has a chunk of its own.)

# %%
def reduce_scatter_round(arrays, round_number):  # in rounds 1 to k - 1
    k = len(arrays)
    for chunk in range(k):  # as in the table: in round 1 chunk 0 goes from device 1
        sender = (chunk + round_number) % k
        receiver = (sender + 1) % k
        source = window(arrays[sender], chunk, k)
        target = window(arrays[receiver], chunk, k)
        target += source.copyto(target.context)  # into the receiver's array

# %% [markdown]
# Does it do what is drawn? A row is a device, a column a chunk:

# %%
arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]

for round_number in [1, 2, 3]:
    reduce_scatter_round(arrays, round_number)
    print("after round", round_number)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %% [markdown]
# After $k - 1$ rounds the sum is there, but scattered: device $r$ has chunk $r$ of it, the 1111 on
# the diagonal. This half is called *reduce-scatter*.
#
# For $k - 1$ more rounds the finished chunks go on round the ring, and *overwrite* what is there.
# That is an *all-gather*. The rule goes on: in round 4 device 0 sends chunk 0. The function differs
# in one line. We go on with the arrays as round 3 left them:

# %%
def all_gather_round(arrays, round_number):  # in rounds k to 2k - 2
    k = len(arrays)
    for chunk in range(k):
        sender = (chunk + round_number) % k
        receiver = (sender + 1) % k
        source = window(arrays[sender], chunk, k)
        target = window(arrays[receiver], chunk, k)
        source.copyto(target)  # NEW: overwrite


for round_number in [4, 5, 6]:
    all_gather_round(arrays, round_number)
    print("after round", round_number)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %% [markdown]
# All six rounds in motion. A chunk is a square with four corners, one for each device's part:
#
# ![Moving picture: four devices on a ring, each sending one chunk to the next in every round. For
# three rounds the receiver adds and the chunks fill; for three more it overwrites its own with the
# finished sums, until all devices have them.](src/drawings/ring_moving.svg)
#
# The two functions together are a ring all-reduce:

# %%
def ring_allreduce(arrays):
    k = len(arrays)
    if arrays[0].size < k:  # too short to be cut
        allreduce(arrays)
        return
    for round_number in range(1, k):
        reduce_scatter_round(arrays, round_number)
    for round_number in range(k, 2 * k - 1):
        all_gather_round(arrays, round_number)


judge(ring_allreduce)

# %% [markdown]
# Operations in which all devices take part are called *collectives*. You have now met five:
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
# **Predict:** each of 8 devices has an array of $S$ bytes. How many bytes does each send in a star,
# and how many in a ring? We run both, and count what is copied to another device:

# %% tags=["fold"]
# measure: what each of 8 devices sends, in units of the whole array
from unittest import mock

from helpers.schedules import run, tree, wrong_devices

copyto = nd.NDArray.copyto


def tree_allreduce(arrays):
    run(tree(len(arrays)), arrays, num_chunks=1)


def messages_sent(all_reduce, k, entries):
    """(sender, receiver, entries) of each copy to another device."""
    messages = []

    def noted(array, other):
        device = getattr(other, "context", other)  # of an array, or a device itself
        if device != array.context:  # a copy to itself is no message
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


for name, all_reduce in [("star", allreduce), ("ring", ring_allreduce)]:
    print(f"{name}: sent by devices 0 to 7:", *shares_sent(all_reduce, 8))

# %% [markdown]
# Both send $14S$ in all. In a star device 0 sends half of that, in a ring every device the same,
# $1.75S$.
#
# How long does that take? Rounds come one after the other. For $k$ devices:
#
# | | rounds | message size | rounds × size |
# | --- | --- | --- | --- |
# | star | $2(k-1)$ | $S$ | $2(k-1)\,S$ |
# | tree | $2\lceil\log_2 k\rceil$ | $S$ | $2\lceil\log_2 k\rceil\,S$ |
# | ring, equal chunks | $2(k-1)$ | $S/k$ | $2\frac{k-1}{k}\,S$ |
#
# In the usual model a message takes a *latency*, however small it is, and then its size divided by
# the link's *bandwidth*:
#
# $$\text{time} = \text{rounds} \times (\text{latency} + \text{size} / \text{bandwidth})$$
#
# Take 8 devices, a latency of 10 µs, and 10 GB/s, which is 10,000 bytes a µs:
#
# | | 4 KB | 100 MB |
# | --- | --- | --- |
# | star | 14 × (10 + 0.4) = 146 µs | 14 × (10 + 10,000) = 140,140 µs |
# | tree | 6 × (10 + 0.4) = 62 µs | 6 × (10 + 10,000) = 60,060 µs |
# | ring | 14 × (10 + 0.05) = 141 µs | 14 × (10 + 1,250) = 17,640 µs |
#
# **For small arrays the number of rounds decides, for large arrays rounds × size.** In a ring this
# product stays below $2S$, however many devices there are.

# %% tags=["fold"]
# check: rounds, sizes and times in these tables, and which device sends which chunk
from functools import partial


def rounds_needed(messages):
    """How many rounds, if each whole array is sent as early as our rule and this order allow."""
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
        in_turn = {"star": 2 * (k - 1), "tree": 2 * doublings, "ring": 2 * (k - 1) / k}
        assert np.isclose(rounds * message, in_turn[name]), f"{name} on {k} devices: in turn"
        assert name == "ring" or k == 2 or busiest > 2 * (k - 1) / k, "more than in a ring"
        seconds = {size: rounds * (10e-6 + message * size / 10e9) for size in [4e3, 100e6]}
        if k == 8:
            assert (round(1e6 * seconds[4e3]), round(1e6 * seconds[100e6])) == {
                "star": (146, 140_140), "tree": (62, 60_060), "ring": (141, 17_640)}[name]
        if name != "ring":
            assert rounds_needed(messages) == rounds, f"{name} on {k} devices: rounds"
    in_order = []
    senders = []  # [round][chunk]
    arrays = [nd.ones(k, ctx=eight[rank], dtype="float64") * 10**rank for rank in range(k)]
    for number in range(1, 2 * k - 1):
        one_round = reduce_scatter_round if number < k else all_gather_round
        messages = messages_sent(partial(one_round, round_number=number), k, entries=840)
        assert sorted(sender for sender, _, _ in messages) == list(range(k)), "each sends once"
        assert sorted(receiver for _, receiver, _ in messages) == list(range(k)), "and receives"
        in_order += messages
        if k == 4:
            senders.append([sender for sender, _, _ in messages])
        one_round(arrays, number)
        found = np.stack([array.asnumpy() for array in arrays]).astype(int)  # [device, chunk]
        if number < k:
            parts = max(sum(map(int, str(total))) for total in found.ravel())
            assert parts == number + 1, "a chunk was passed on in the same round"
        else:
            whole_sum = sum(10**rank for rank in range(k))
            copies = (found == whole_sum).sum(axis=0)
            assert np.all(copies == number + 2 - k), "a sum was passed on in the same round"
    assert messages_sent(ring_allreduce, k, entries=840) == in_order, "a ring has other rounds"
    if k == 4:  # the table of who sends which chunk
        assert np.transpose(senders).tolist() == [[1, 2, 3, 0, 1, 2], [2, 3, 0, 1, 2, 3],
                                                  [3, 0, 1, 2, 3, 0], [0, 1, 2, 3, 0, 1]]
for k in range(1, 9):
    assert wrong_devices(helpers.allreduce, k) == wrong_devices(tree_allreduce, k) == []
print("all tables hold")

# %% [markdown]
# Is there a way with few rounds *and* few bytes? See deeper: More all-reduces. (The tree's code is
# there, too.) Which is the fastest on this machine? See deeper: All-reduce against the clock.

# %% [markdown]
# ## Summary
#
# - All-reduce leaves the sum on every device, in the existing arrays. A test keeps hold of them,
#   and uses values that tell devices and entries apart.
# - All-reduce = reduce + broadcast = reduce-scatter + all-gather.
# - For small arrays the number of rounds decides, and a tree has few. For large ones rounds × size
#   decides, which in a ring stays below $2S$.
#
# **Further reading.** P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations", *JPDC* 69 (2009): as long as the devices do the adding, and not the
# network between them, the busiest device can't send less than in a ring.

# %% [markdown]
# ## Exercises
#
# 1. **A tree.** On paper: draw the tree's rounds for 5 devices, as above for 4. How many are there,
#    and what does each device send? Which of the three ways would you take for arrays of 1 MB on 6
#    devices, with a latency of 1 ms and 1 GB/s?
# 2. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `judge` say of it?
# 3. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, where `groups[rank]` is the list of a device's arrays, and which calls
#    `all_reduce` once. (`nd.concat(*arrays, dim=0)` joins arrays.) How many messages does it save
#    for 8 arrays on 2 devices with the ring?
# 4. **Fool the judge (open).** Write a wrong all-reduce that `judge` passes. What must a judge do
#    to catch it? Can there be a judge that nothing fools?

# %% [markdown]
# ### Answer 1
#
# Three rounds there and three back: 1 sends to 0 and 3 to 2, then 2 to 0, then 4 to 0. Device 0
# sends its sum three times, device 2 sends twice, the others once. On 6 devices a star takes 10
# rounds of 1 MB, each of 1 + 1 ms: 20 ms. A tree takes 6: 12 ms. A ring takes 10 rounds of a sixth:
# 11.7 ms. So tree and ring are as good as equal.

# %% tags=["solution"]
# The folded cells above have these functions: they run the tree and note its messages.
messages = messages_sent(tree_allreduce, 5, entries=840)
print("rounds:", rounds_needed(messages))
print("each device sends, in whole arrays:", shares_sent(tree_allreduce, 5))
assert rounds_needed(messages) == 6
assert shares_sent(tree_allreduce, 5).tolist() == [3, 1, 2, 1, 1]

latency = 1  # ms, and 1 MB takes 1 ms, too
of_star = 10 * (latency + 1)
of_tree = 6 * (latency + 1)
of_ring = 10 * (latency + 1 / 6)
print(f"6 devices: star {of_star} ms, tree {of_tree} ms, ring {of_ring:.1f} ms")
assert of_tree == 12 and round(of_ring, 1) == 11.7

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
    arrays = digits(k)
    total = sum(array.asnumpy() for array in arrays)
    mean_allreduce(arrays)
    for array in arrays:
        assert np.allclose(k * array.asnumpy(), total, rtol=1e-6), "not the mean"
    assert wrong_devices(mean_allreduce, k) == list(range(k)), "the judge: a mean is not a sum"
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


sizes = [1, 2, 3, 4, 4, 6, 7, 8]  # of eight arrays; two have one shape


def arrays_of(rank):
    arrays = []
    for place, size in enumerate(sizes):
        array = 100 * place + nd.arange(2 * size, ctx=eight[rank])  # all entries differ
        arrays.append(array.reshape((2, size)) * 10**rank)
    return arrays


groups = [arrays_of(0), arrays_of(1)]  # device 1 has ten times what device 0 has
fused_allreduce(groups, ring_allreduce)
print(groups[0][1].asnumpy(), groups[1][1].asnumpy())

# %% [markdown]
# So the sum is 11 times the first device's arrays. How many messages is that?

# %% tags=["solution"]
one_by_one = 0
for size in sizes:
    one_by_one += len(messages_sent(ring_allreduce, 2, 2 * size))


def fused_on(k):
    groups = [arrays_of(rank) for rank in range(k)]

    def fused(_):  # messages_sent makes arrays; ours are in `groups`
        fused_allreduce([list(group) for group in groups], ring_allreduce)  # copies of the lists

    messages = messages_sent(fused, k, entries=1)
    for group in groups:
        for found, array in zip(group, arrays_of(0)):
            times = sum(10**rank for rank in range(k))  # 11 on two devices, 111 on three
            assert np.array_equal(found.asnumpy(), times * array.asnumpy()), "not the sum"
    return len(messages)


print(one_by_one, "messages for eight arrays, one after the other;", fused_on(2), "for one buffer")
assert (one_by_one, fused_on(2), fused_on(3)) == (32, 4, 12)


def nothing(buffers):
    calls.append(len(buffers))


calls = []
groups = [arrays_of(0), arrays_of(1), arrays_of(2)]
fused_allreduce(groups, nothing)
assert calls == [3], "one call, with one buffer a device"
for rank, group in enumerate(groups):
    for found, array in zip(group, arrays_of(rank)):
        assert np.array_equal(found.asnumpy(), array.asnumpy()), "not the device's own buffer"

# %% [markdown]
# ### Answer 4
#
# Whatever the judge doesn't try can be wrong: arrays of more than twelve entries,
# three-dimensional ones, int8, nine devices, a nineteenth call on as many devices. Here is one that
# forgets what comes after the twelfth entry. (`reshape(-1)` gives the same entries in one row, and
# a slice of it shares their memory.) A judge that tries more sizes catches it, and there
# is always a next one: a test can only look at finitely many cases. So cases are chosen where
# mistakes are likely (ends, remainders, odd numbers, reversed orders), and the code is read.

# %% tags=["solution"]
def twelve_entries(arrays):
    parts = [array.reshape(-1)[:12] for array in arrays]
    allreduce(parts)


judge(twelve_entries)  # and no error

thirteen = [nd.ones(13, ctx=eight[0]), 10 * nd.ones(13, ctx=eight[1])]
twelve_entries(thirteen)
print(thirteen[1].asnumpy())
assert thirteen[1][11].asscalar() == 11, "the twelfth is summed"
assert thirteen[1][12].asscalar() == 10, "the thirteenth is not"
