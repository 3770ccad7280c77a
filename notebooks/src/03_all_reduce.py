# %% [markdown]
# # 03 · All-reduce
#
# After a backward pass each device has the gradient of its own shard, and every device needs the
# sum of all of them. An operation that leaves the sum on every device is called *all-reduce*. **How
# does it work, and which way is the fastest?**
#
# > **What you'll do:** find the bug in an all-reduce that a textbook had for eleven months, test
# > all-reduces, and build a ring, whose first half is yours to write.
# >
# > **What you'll learn:** how to test an all-reduce; how a ring all-reduce works, and what
# > *reduce-scatter* and *all-gather* are; how many rounds and bytes a star, a tree and a ring take.
# >
# > **What you need:** chapters 01 and 02. No GPU. Reading takes {reading time}, running about
# > ten seconds.

# %%
import helpers
from helpers import your_turn

import mxnet as mx
import numpy as np
from mxnet import nd

# Simulated devices: here we test results, not speed.
eight = [mx.cpu(number) for number in range(8)]

# %% [markdown]
# ## An all-reduce that was in a textbook for eleven months
#
# In January 2021 the PyTorch edition of *Dive into Deep Learning* gained this all-reduce, and it
# stayed until December (d2l-ai/d2l-en, pull requests #1596 and #1978). Here it is with MXNet's
# arrays. `arrays` is a list with one array for each device. The function adds up all arrays on the
# first device, and then gives the sum to the others:

# %%
def published(arrays):
    total = arrays[0]  # another name for the first array
    for rank in range(1, len(arrays)):
        # A copy on the first device is added.
        total += arrays[rank].copyto(total.context)
    for rank in range(1, len(arrays)):
        # All others get a copy of the sum.
        arrays[rank] = total.copyto(arrays[rank].context)

# %% [markdown]
# We try it on three devices. In training each parameter refers to its gradient; here the variables
# `first`, `second` and `third` do. Like the book we print the list before and after:

# %%
first = nd.array([1], ctx=eight[0])
second = nd.array([2], ctx=eight[1])
third = nd.array([3], ctx=eight[2])
grads = [first, second, third]

print("before:", [grad.asscalar() for grad in grads])
published(grads)
print("after: ", [grad.asscalar() for grad in grads])

# %% [markdown]
# It looks right. But the update of the weights reads the gradients that the
# parameters hold, not this list. **Predict:** what do `first`, `second` and `third` hold now?

# %% tags=["predict"]
print(first.asscalar(), second.asscalar(), third.asscalar())

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only `first` holds the sum. `second` and `third` still hold their old values, 2 and 3.
#
# </details>
#
# `total += ...` writes into an existing array. But `arrays[rank] = ...` puts a *new* array into the
# list, so the old one, which the parameter holds, keeps its value:
#
# ![Before, the list's three slots and three parameters point to the same arrays: 1, 2, 3. After,
# slots 1 and 2 point to new arrays that hold 6, while the parameters still hold 2 and 3; only the
# first array, now 6, is shared.](src/drawings/rebinding.svg)
#
# So an all-reduce that returns nothing must work **in place**: it must write into the existing
# arrays.
#
# ## A star: the simplest all-reduce
#
# If `copyto` is given a device, it makes a new array there. If it is given an array, it writes into
# that array. So one line changes:

# %%
def allreduce(arrays):
    total = arrays[0]
    for rank in range(1, len(arrays)):
        total += arrays[rank].copyto(total.context)
    for rank in range(1, len(arrays)):
        # NEW: into the array that the parameter holds
        total.copyto(arrays[rank])


first = nd.array([1], ctx=eight[0])
second = nd.array([2], ctx=eight[1])
third = nd.array([3], ctx=eight[2])
allreduce([first, second, third])
print(first.asscalar(), second.asscalar(), third.asscalar())

# %% [markdown]
# All messages go to device 0 or come from it, like the rays of a star. The first half is called
# *reduce*: it leaves the sum on one device. The second is *broadcast*: one device's array goes to
# all.

# %% [markdown]
# ## How to test an all-reduce
#
# We keep hold of the arrays, run the all-reduce, and compare each array with the sum that NumPy
# computes. This function returns the ranks whose arrays are wrong:

# %%
def wrong_ranks(candidate, arrays):
    # NumPy's sum, before the candidate changes the arrays
    expected = sum(array.asnumpy() for array in arrays)

    # A copy of the list, because `published` changes its list. The arrays in it are the same.
    candidate(list(arrays))

    wrong = []
    for rank in range(len(arrays)):
        if not np.array_equal(arrays[rank].asnumpy(), expected):
            wrong.append(rank)
    return wrong

# %% [markdown]
# Which values should the arrays have? We try ones first. Here is an all-reduce that sends nothing
# at all. **Predict:** each of four devices holds a 1; is the mistake found?

# %% tags=["predict"]
def multiply(arrays):
    for array in arrays:
        array *= len(arrays)  # like +=, this writes into the array


ones = [nd.ones(1, ctx=eight[rank]) for rank in range(4)]
print("multiply is wrong on the ranks", wrong_ranks(multiply, ones))

# %% [markdown]
# <details><summary>What came out</summary>
#
# It isn't found, because 1 + 1 + 1 + 1 and 4 × 1 are both 4.
#
# </details>
#
# So we need **values that tell devices and entries apart**. Let device 0 hold 1 and 2, device 1 ten
# times as much, and so on:

# %%
def digits():
    arrays = []
    for rank in range(4):
        arrays.append(nd.array([1, 2], ctx=eight[rank]) * 10**rank)
    return arrays


for array in digits():
    print(array.context, array.asnumpy())
print("multiply is wrong on the ranks", wrong_ranks(multiply, digits()))
print("published is wrong on the ranks", wrong_ranks(published, digits()))
print("allreduce is wrong on the ranks", wrong_ranks(allreduce, digits()))

# %% [markdown]
# Now both mistakes are found. The sum, 1111 and 2222, shows what is in it: without device 1 its
# first entry would be 1101, and with device 2 counted twice 1211.
#
# An all-reduce may also be wrong on three devices only, or only
# the second time it is called. So `judge`, a
# helper, calls `wrong_ranks` with many arrays on 1 to 8 devices, and raises an error where a rank
# is wrong. `helpers.allreduce`, which later chapters use, is our function plus checks of its
# arguments, and must pass, too:

# %%
from helpers.schedules import judge

judge(allreduce)
judge(helpers.allreduce)

# %% [markdown]
# (All numbers in these tests are chosen so that no sum is rounded. With random float32 numbers a
# right all-reduce may differ from NumPy in the last digits, because it adds in another order. See
# deeper: A judge for all-reduces.)

# %% [markdown]
# ## Three algorithms on four devices
#
# In a star, device 0 does all the adding and half of the sending. How can the work be shared?
#
# Messages go in *rounds*. In a round a device sends at most one message and receives at most one.
# So in a star device 0 receives from three others in three rounds, and sends to them in three more.
# In the picture an arrow is a message, and a thin arrow a quarter of an array:
#
# ![Four devices, round by round; a device that sends or receives is dark. Star: 6 rounds of one
# whole array, all through device 0: 6 × S. Tree: 4 rounds of whole arrays, in pairs: 4 × S. Ring:
# in all 6 rounds every device sends a quarter to the next: 6 × S/4 = 1.5
# S.](src/drawings/star_tree_ring.svg)
#
# In a *tree*, pairs add up in the same round, then pairs of pairs, and the sum goes back in the
# same way. Here is the picture's tree as code, message by message:

# %%
def add(arrays, sender, receiver):
    target = arrays[receiver]
    target += arrays[sender].copyto(target.context)


def tree_of_four(arrays):
    # Round 1: two pairs
    add(arrays, sender=1, receiver=0)
    add(arrays, sender=3, receiver=2)
    # Round 2: device 0 has the sum.
    add(arrays, sender=2, receiver=0)
    # Round 3, and back
    arrays[0].copyto(arrays[2])
    # Round 4
    arrays[0].copyto(arrays[1])
    arrays[2].copyto(arrays[3])


print("tree_of_four is wrong on the ranks", wrong_ranks(tree_of_four, digits()))

# %% [markdown]
# On more devices the two of a pair are 1, 2, 4, 8 and so on apart, from round to round. A device
# without a partner waits.
#
# From four devices on, a tree takes fewer rounds than a star. But device 0 still sends the whole
# array in each round on the way back.
#
# ## A ring
#
# Can all devices share the work equally? They can, if each of them sums a different piece of the
# array. In a *ring* of $k$ devices arrays are cut into $k$ chunks. In every round each device sends
# one chunk to the next device, and the last device sends to the first. After half of the rounds
# device 0 should have the whole sum of chunk 0, device 1 that of chunk 1, and so on.
#
# Let each of device 0's four chunks hold 1, device 1's 10, device 2's 100, and device 3's 1000:
#
# ![Four devices with four chunks each. In each of rounds 1 to 3 an arrow leads from one number of
# each device to the one below it, which grows by it; device 3's goes to device 0. After round 3 the
# diagonal holds 1111.](src/drawings/ring_rounds.svg)
#
# Follow chunk 0, the first column. Its sum should end at device 0, so it starts at device 1, as 10.
# It goes to device 2, where it becomes 110, to device 3 (1110), and to device 0 (1111). Chunk 1
# does the same one device further. This table says which device sends each chunk:
#
# | | in round 1 | in round 2 | in round 3 |
# | --- | --- | --- | --- |
# | chunk 0 | 1 | 2 | 3 |
# | chunk 1 | 2 | 3 | 0 |
# | chunk 2 | 3 | 0 | 1 |
# | chunk 3 | 0 | 1 | 2 |
#
# So **in round $n$ device $(c + n) \bmod k$ sends chunk $c$** to the next device. The mod says that
# device 0 comes after the last one.
#
# Seen from one device, the same rule is: "I am rank $r$. In round $n$ I send chunk
# $(r - n) \bmod k$." Here one Python loop moves the messages of all devices.
#
# `window`, a helper, finds a chunk in an array. It cuts as chapter 02 cuts a batch, so the first
# chunks may have one entry more than the others:

# %% tags=["your-turn"]
from helpers.schedules import window

numbers = nd.arange(8)
for chunk in range(4):
    print("chunk", chunk, "of 4:", window(numbers, chunk, 4).asnumpy())

# %% [markdown]
# It returns a view, so `target += ...` writes into the array itself.
#
# ### Your turn: the first half of a ring
#
# Now write it, before you scroll on. There are $k - 1$ rounds. In each of them every device sends
# one chunk to the next, and the receiver adds it to its own chunk, in place. (Copy the chunk to the
# receiver's device first, as `add` does.) The picture is the first case.

# %% tags=["fold", "your-turn"]
# define: cases for your half of a ring: arrays of four devices and of three, and what is due
def filled(k, entries):
    return [nd.ones(entries, ctx=eight[rank]) * 10**rank for rank in range(k)]


# What is due, a row for each device: as in the picture.
four_chunks = [[1111, 1101, 1001, 1],
               [10, 1111, 1011, 11],
               [110, 100, 1111, 111],
               [1110, 1100, 1000, 1111]]
# Five entries on three devices: chunks 0 and 1 are two entries each, chunk 2 is one.
three_chunks = [[111, 111, 101, 101, 1],
                [10, 10, 111, 111, 11],
                [110, 110, 100, 100, 111]]
four_devices = ((filled(4, 4),), four_chunks)
three_devices = ((filled(3, 5),), three_chunks)

# %% tags=["your-turn"]
def first_half(arrays):
    """In round n, from 1 on, device (c + n) mod k sends chunk c to the next, which adds it."""
    ...


your_turn(first_half, [four_devices, three_devices], in_place=True)

# %% [markdown]
# Here is ours. This function does one round, chunk by chunk. (The order of the messages within a
# round makes no difference, because each of them is about another chunk.)

# %%
def reduce_scatter_round(arrays, round_number):
    """One of the rounds 1 to k - 1."""
    k = len(arrays)
    for chunk in range(k):
        # As in the table: in round 1 chunk 0 goes from device 1.
        sender = (chunk + round_number) % k
        receiver = (sender + 1) % k
        source = window(arrays[sender], chunk, k)
        target = window(arrays[receiver], chunk, k)
        # Into the receiver's array
        target += source.copyto(target.context)

# %% [markdown]
# Does it do what the drawing shows? We print a row for each device:

# %%
def print_rows(arrays):
    rows = [array.asnumpy() for array in arrays]
    print(np.array(rows, dtype=int))


arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]
for round_number in [1, 2, 3]:
    reduce_scatter_round(arrays, round_number)
    print("after round", round_number)
    print_rows(arrays)

# %% [markdown]
# After $k - 1$ rounds the sum is there, but scattered: device $r$ holds chunk $r$ of the sum, the
# 1111 on the diagonal. This half is called *reduce-scatter*.
#
# For $k - 1$ more rounds the finished chunks go on round the ring, and *overwrite* what is there.
# That is an *all-gather*. The rule is the same: in round 4 chunk 0 leaves device
# $(0 + 4) \bmod 4 = 0$. The function differs in one line. We go on with the arrays as round 3 left
# them:

# %%
def all_gather_round(arrays, round_number):
    """One of the rounds k to 2k - 2."""
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
    print_rows(arrays)

# %% [markdown]
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
# ![Three chains on four devices, from each device's own a, b, c and d to the sums on all devices:
# all-reduce; reduce and then broadcast; reduce-scatter and then
# all-gather.](src/drawings/collectives.svg)
#
# **All-reduce = reduce + broadcast = reduce-scatter + all-gather.** PyTorch's `torch.distributed`
# has functions of these names (chapters 14 and 16), and the library below it is **NCCL** for GPUs.
#
# ## Rounds and bytes
#
# Which of the three is the fastest? First we count what each device sends. `messages_sent`, a
# helper, logs each `copyto` to another device while an all-reduce runs: who sends, who receives,
# and how many entries. We divide by the entries of a whole array, so that 1.0 is one array, $S$.
# **Predict:** there are 8 devices. How many times $S$ does device 0 send in a star, how many does
# device 5 send, and how many does each send in a ring?

# %% tags=["predict"]
from helpers.schedules import messages_sent

for all_reduce in [allreduce, ring_allreduce]:
    sent = [0] * 8  # by each device
    for sender, receiver, count in messages_sent(all_reduce, k=8, entries=80):
        sent[sender] += count / 80
    print(f"{all_reduce.__name__}: devices 0 to 7 send {sent}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# In both algorithms all devices together send $14S$. But in a star device 0 sends $7S$ of them, and
# device 5 sends $1S$. In a ring each device sends the same, $1.75S$.
#
# </details>
#
# How long does that take? Rounds come one after the other, so we count rounds, too. In a star
# device 0 takes part in every message, so there are $k - 1$ rounds to it and $k - 1$ back. In a
# ring each half has $k - 1$ rounds. In a tree each round halves the number of devices that still
# have something to be added: from 8 to 4, to 2, to 1. So there are $\log_2 k$ rounds to device 0,
# rounded up, and as many back:
#
# | | rounds | message size | rounds × size |
# | --- | --- | --- | --- |
# | star | $2(k-1)$ | $S$ | $2(k-1)\,S$ |
# | tree | $2\lceil\log_2 k\rceil$ | $S$ | $2\lceil\log_2 k\rceil\,S$ |
# | ring, equal chunks | $2(k-1)$ | $S/k$ | $2\frac{k-1}{k}\,S$ |
#
# In the usual model (the **alpha–beta model**) a message takes a **latency**, however small it is,
# and then its size divided by the link's **bandwidth**. The time to add is left out:
#
# $$\text{time} = \text{rounds} \times (\text{latency} + \text{size} / \text{bandwidth})$$
#
# Take 8 devices, a latency of 10 µs, and 10 GB/s, which is 10,000 bytes a µs. **Predict:** which of
# the three is the fastest for an array of 4 KB, and which for 100 MB?

# %% tags=["predict"]
def microseconds(rounds, size):
    return rounds * (10 + size / 10_000)


for size in [4_000, 40_000, 400_000, 100_000_000]:
    star = microseconds(14, size)
    tree = microseconds(6, size)
    ring = microseconds(14, size / 8)
    print(f"{size:11,} bytes: star {star:6.0f}, tree {tree:6.0f}, ring {ring:6.0f} µs")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The tree is the fastest for 4 KB, since it has the fewest rounds. The ring is the fastest for
# 100 MB, since its messages are an eighth as large. Between 40 KB and 400 KB they change places.
#
# </details>
#
# **For small arrays the number of rounds decides, for large arrays rounds × size.** In a ring this
# product stays below $2S$, however many devices there are. (All this is the model: nothing was
# measured here.)
#
# Is there a way with few rounds *and* few bytes? There is: see deeper: More all-reduces.

# %% [markdown]
# ## Summary
#
# - All-reduce leaves the sum on every device. Ours returns nothing, so it must write into the
#   existing arrays. A test keeps hold of them, and uses values that tell devices and entries apart.
# - All-reduce = reduce + broadcast = reduce-scatter + all-gather.
# - In the alpha–beta model the number of rounds decides for small arrays, and a tree has few. For
#   large ones rounds × size decides, which in a ring stays below $2S$.
#
# **Further reading.** P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations", *JPDC* 69 (2009): as long as the devices do the adding, and not the
# network between them, the busiest device can't send less than in a ring.

# %% [markdown]
# ## Exercises
#
# 1. **A tree.** On paper: draw the tree's rounds for 5 devices, as in the picture for 4. How many
#    are there, and what does each device send? Which of the three algorithms would you choose for
#    arrays of 1 MB on 6 devices, with a latency of 1 ms and 1 GB/s?
# 2. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `judge` say of it?
# 3. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, where `groups[rank]` is the list of a device's arrays, and call `all_reduce`
#    exactly once. (`nd.concat(*arrays, dim=0)` joins arrays.) How many messages does it save for 8
#    arrays on 2 devices with the ring?

# %% [markdown]
# ### Answer to *Your turn*
#
# A loop over the rounds, and in each a loop over the chunks. The rule says who sends which.

# %% tags=["solution", "your-turn"]
def first_half(arrays):
    k = len(arrays)
    for round_number in range(1, k):
        for chunk in range(k):
            sender = (chunk + round_number) % k
            receiver = (sender + 1) % k
            target = window(arrays[receiver], chunk, k)
            target += window(arrays[sender], chunk, k).copyto(target.context)


your_turn(first_half, [four_devices, three_devices], in_place=True)

# %% [markdown]
# ### Answer 1
#
# Three rounds there and three back: 1 sends to 0 and 3 to 2, then 2 to 0, then 4 to 0. Device 0
# sends its sum three times, device 2 sends twice, the others once. (`tree` in `helpers.schedules`
# returns the rounds of a tree for any number of devices, and `run` carries them out.)
#
# On 6 devices a star takes 10 rounds of 1 MB, each of 1 + 1 ms: 20 ms. A tree takes 6: 12 ms. A
# ring takes 10 rounds of a sixth: 11.7 ms. So tree and ring are about equal.

# %% tags=["solution"]
from helpers.schedules import run, tree


def tree_allreduce(arrays):
    run(tree(len(arrays)), arrays, num_chunks=1)


judge(tree_allreduce)
sent = [0] * 5
for sender, receiver, entries in messages_sent(tree_allreduce, k=5, entries=100):
    sent[sender] += entries / 100
print("each device sends, in whole arrays:", sent)
assert len(tree(5)) == 6 and sent == [3, 1, 2, 1, 1]

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
# equals $\eta$ with the sum. The judge rejects it, as it should: it isn't the sum.

# %% tags=["solution"]
def mean_allreduce(arrays):
    ring_allreduce(arrays)
    for array in arrays:
        array /= len(arrays)


arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]
total = sum(array.asnumpy() for array in arrays)
mean_allreduce(arrays)
for array in arrays:
    assert np.allclose(4 * array.asnumpy(), total, rtol=1e-6), "not the mean"
try:
    judge(mean_allreduce)
except AssertionError as error:
    print("mean_allreduce:", error)
else:
    raise AssertionError("the judge accepted a mean")

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


# Device 1 has ten times what device 0 has; all entries of a device differ.
groups = []
for rank in range(2):
    arrays = []
    for size in [1, 2, 3, 4, 4, 6, 7, 8]:
        numbers = nd.arange(2 * size, ctx=eight[rank]) + 100 * len(arrays)
        arrays.append(numbers.reshape((2, size)) * 10**rank)
    groups.append(arrays)
before = [array.asnumpy() for array in groups[0]]

fused_allreduce(groups, ring_allreduce)
print(groups[0][1].asnumpy(), groups[1][1].asnumpy())
for group in groups:
    for found, own in zip(group, before):
        assert np.array_equal(found.asnumpy(), 11 * own), "not the sum"

# %% [markdown]
# The sum is 11 times the first device's arrays. And the messages, of one array and of the buffer?

# %% tags=["solution"]
of_one_array = len(messages_sent(ring_allreduce, k=2, entries=16))


def fuse(buffers):
    fused_allreduce(groups, ring_allreduce)


of_the_buffer = len(messages_sent(fuse, k=2, entries=1))
print(8 * of_one_array, "messages for eight arrays,", of_the_buffer, "for one buffer")
assert (8 * of_one_array, of_the_buffer) == (32, 4)
