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
# In January 2021 the PyTorch edition of *Dive into Deep Learning* gained this all-reduce, here with
# MXNet's arrays. It adds up all arrays on the first device and puts the sum into a list. It stayed
# until December (d2l-ai/d2l-en, pull requests #1596 and #1978). Each device's array stands at its
# rank in the list:

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
# We try it on three devices. In training each parameter refers to its gradient; here a variable
# does. The book printed the list before and after:

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
# Is the second array of the list still the parameter's?

# %%
print(grads[0] is first, grads[1] is second, grads[2] is third)

# %% [markdown]
# It isn't. `total += ...` writes into an existing array. But `arrays[rank] = ...` puts a *new*
# array into the list, so the old one keeps what it held:
#
# ![Before, the list's three slots and three parameters point to the same arrays: 1, 2, 3. After,
# slots 1 and 2 point to new arrays that hold 6, while the parameters still hold 2 and 3; only the
# first array, now 6, is shared.](src/drawings/rebinding.svg)
#
# So the list shows nothing wrong, although two of the three parameters don't have the sum. An
# all-reduce that returns nothing must work **in place**: it must write into the existing arrays.
#
# ## A star: the simplest all-reduce
#
# Given a device, `copyto` makes a new array there. Given an array, it writes into that one. So one
# line changes:

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
# Give it arrays, keep hold of them, and compare each with NumPy's sum. This function returns the
# ranks that are wrong. (The comparison is exact, so it needs numbers whose sums are exact, such as
# whole numbers. With random ones a right all-reduce may differ from NumPy's sum in the last digits,
# as we will see.)

# %%
def wrong_ranks(candidate, arrays):
    # NumPy's sum, before the candidate changes the arrays.
    expected = 0
    for array in arrays:
        expected = expected + array.asnumpy()

    # `published` changes the list that it gets, so the candidate gets a copy of the list.
    # The arrays in it are the same, and our list still has them afterwards.
    candidate(list(arrays))

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


print("published is wrong on the ranks", wrong_ranks(published, ones(4)))
print("allreduce is wrong on the ranks", wrong_ranks(allreduce, ones(4)))

# %% [markdown]
# The book's bug is caught. Here is an all-reduce that sends nothing at all. **Predict:** is it
# caught, too?

# %% tags=["predict"]
def multiply(arrays):
    for array in arrays:
        array *= len(arrays)  # like +=, this writes into the array


print("multiply is wrong on the ranks", wrong_ranks(multiply, ones(4)))

# %% [markdown]
# <details><summary>What came out</summary>
#
# It isn't caught, because 1 + 1 + 1 + 1 and 4 × 1 are both 4.
#
# </details>
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
# an error where a rank is wrong. `helpers.allreduce`, which later chapters use, is our function
# plus checks of its arguments, and must pass, too:

# %%
from helpers.schedules import judge

judge(allreduce)
judge(helpers.allreduce)

try:
    judge(multiply)
except AssertionError as error:
    print("multiply:", error)

# %% [markdown]
# What the judge can't see is a missing copy, since simulated devices share memory (deeper: A judge
# for all-reduces; there are also twenty wrong all-reduces that it rejects).

# %% [markdown]
# ## Three algorithms on four devices
#
# In a star, device 0 does all the adding and half of the sending. How can the work be shared?
#
# Messages go in *rounds*. In a round a device sends at most one message and receives at most one.
# It can pass on what it has received only in a later round. So in a star device 0 receives from
# three others in three rounds, and sends to them in three more. In the picture an arrow is a
# message, and a thin arrow a quarter of an array:
#
# ![Four devices, round by round; a device that sends or receives is dark. Star: 6 rounds of one
# whole array, all through device 0: 6 × S. Tree: 4 rounds of whole arrays, in pairs: 4 × S. Ring: 6
# rounds in which every device sends a quarter: 6 × S/4 = 1.5 S.](src/drawings/star_tree_ring.svg)
#
# In a *tree*, pairs add up at the same time, then pairs of pairs, and the sum goes back in the same
# way. (A device without a partner waits.) `gap` is the distance between the two of a pair; each
# pass of a `while` loop is one round:

# %%
def tree_allreduce(arrays):
    k = len(arrays)
    gap = 1
    while gap < k:  # of four devices 1 sends to 0, and 3 to 2; then 2 to 0
        for receiver in range(0, k - gap, 2 * gap):
            sender = receiver + gap
            target = arrays[receiver]
            target += arrays[sender].copyto(target.context)
        gap = 2 * gap
    while gap > 1:  # and back: 0 to 2; then 0 to 1, and 2 to 3
        gap = gap // 2
        for sender in range(0, k - gap, 2 * gap):
            receiver = sender + gap
            arrays[sender].copyto(arrays[receiver])


judge(tree_allreduce)

# %% [markdown]
# A tree takes fewer rounds than a star, as soon as there are four devices. But device 0 still sends
# the whole array in each round on the way back.
#
# ## A ring
#
# Can all devices share the work equally? They can, if each of them sums a different piece of the
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
# Seen from one device, the same rule is: **"I am rank $r$. In round $n$ I send chunk
# $(r - n) \bmod k$ to the next rank."** Device 2, for example, sends the chunks 1, 0 and 3, as in
# the table.
#
# Between machines each rank would run a program of its own, with this rule in it. In our notebook
# one Python loop moves all messages. `window`, a helper, finds a chunk in an array, and cuts by
# chapter 02's rule: if chunks can't be equal, the first ones have one entry more.

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
# Now write it, before you scroll on: $k - 1$ rounds, in each of which every device sends one chunk
# to the next, and the receiver adds it to its own, in place. (So it returns nothing. Copy the chunk
# to the receiver's device first, as in the tree.) The picture is the first case.

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
# Here is ours. This function does one round, chunk by chunk. (If all messages of a round went at
# once, the result would be the same, since no two messages of a round touch the same chunk.)

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
# Does it do what is drawn?

# %%
arrays = [nd.ones(4, ctx=eight[rank]) * 10**rank for rank in range(4)]

for round_number in [1, 2, 3]:
    reduce_scatter_round(arrays, round_number)
    print("after round", round_number)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

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
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))

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
# A ring adds most chunks in another order than a star does. With numbers whose sums are exact, as
# in our tests, that makes no difference. But each addition of float32 numbers is rounded, so that
# in general **the order matters to the last digits**:

# %%
rng = np.random.default_rng(0)
by_star = []
by_ring = []
for rank in range(4):
    numbers = rng.normal(size=1000)
    by_star.append(nd.array(numbers, ctx=eight[rank]))
    by_ring.append(nd.array(numbers, ctx=eight[rank]))
allreduce(by_star)
ring_allreduce(by_ring)

apart = np.abs(by_star[0].asnumpy() - by_ring[0].asnumpy())
print(np.sum(apart > 0), "of 1000 sums differ, by", apart.max(), "at most")
for array in by_ring:
    assert np.array_equal(array.asnumpy(), by_ring[0].asnumpy())

# %% [markdown]
# Two correct all-reduces can differ in the last digits. But that is no reason for replicas to
# differ: each chunk is summed only once, and all devices get that sum, as the assertion says.
#
# Operations in which all devices take part are called *collectives*; if one device doesn't come,
# the others wait for it (chapter 15). You have now met five:
#
# ![Five collectives on four devices, before and after. Reduce and then broadcast leave all sums on
# all devices, as all-reduce does; so do reduce-scatter and then
# all-gather.](src/drawings/collectives.svg)
#
# **All-reduce = reduce + broadcast = reduce-scatter + all-gather.** PyTorch's `torch.distributed`
# has functions of these names (chapters 14 and 16), and the library below it is **NCCL** for GPUs.
#
# ## Rounds and bytes
#
# Which of the three is the fastest? First we count what each device sends. `messages_sent`, a
# helper, logs each `copyto` to another device while an all-reduce runs: who sends, who receives,
# and how many entries. **Predict:** each of 8 devices has an array of size $S$. How many times $S$
# does device 0 send in a star, how many does device 5 send, and how many does each send in a ring?

# %% tags=["predict"]
from helpers.schedules import messages_sent


def sent_by_each(all_reduce, k):
    """What each of k devices sends, in units of the whole array."""
    size = 60 * k  # entries of the array, so that all chunks are equal
    messages = messages_sent(all_reduce, k, size)
    sent = [0] * k
    for sender, receiver, entries in messages:
        sent[sender] += entries / size
    return sent


for all_reduce in [allreduce, tree_allreduce, ring_allreduce]:
    print(f"{all_reduce.__name__:15} sent by devices 0 to 7:", sent_by_each(all_reduce, 8))

# %% [markdown]
# <details><summary>What came out</summary>
#
# In each of the three algorithms all devices together send $14S$. But in a star device 0 sends $7S$
# of them, and device 5 sends $1S$. In a ring each device sends the same, $1.75S$.
#
# </details>
#
# How long does that take? Rounds come one after the other. In a star device 0 takes part in every
# message, so there are $k - 1$ rounds to it and $k - 1$ back. In a tree each pass of a `while` loop
# is a round, and in a ring each half has $k - 1$ rounds. For $k$ devices:
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


for name, size in [("4 KB", 4_000), ("100 MB", 100_000_000)]:
    print(name)
    print(f"    star {microseconds(14, size):9.0f} µs")
    print(f"    tree {microseconds(6, size):9.0f} µs")
    print(f"    ring {microseconds(14, size / 8):9.0f} µs")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The tree is the fastest for 4 KB, since it has the fewest rounds. The ring is the fastest for
# 100 MB, since its messages are an eighth as large.
#
# </details>
#
# And for all sizes in between? **Predict:** where do the lines of tree and ring cross?

# %% tags=["predict"]
from helpers.plotting import curves, show

sizes = np.logspace(3, 8, 50)  # bytes
lines = {
    "star": (sizes, microseconds(14, sizes)),
    "tree": (sizes, microseconds(6, sizes)),
    "ring": (sizes, microseconds(14, sizes / 8)),
}
fig, ax = curves("Star, tree and ring on 8 devices, in the model",
                 "bytes of the array", "µs", lines, logx=True, logy=True)
show(fig, "Time against the array's size for 8 devices: a line each for star, tree and ring.")

# %% [markdown]
# <details><summary>What came out</summary>
#
# At 188 KB, where $6\,(10 + s/10{,}000)$, the tree's time for $s$ bytes, is equal to the ring's,
# $14\,(10 + s/80{,}000)$.
#
# </details>
#
# **For small arrays the number of rounds decides, for large arrays rounds × size.** In a ring this
# product stays below $2S$, however many devices there are. (On two or three devices a tree has no
# fewer rounds than a ring, so the ring is never slower there. And all this is the model: nothing
# was measured here.)
#
# Is there a way with few rounds *and* few bytes? There is: see deeper: More all-reduces. NCCL
# chooses among rings, trees and others by the array's size, the links and the number of machines
# (`src/graph/tuning.cc`).

# %% [markdown]
# ## Summary
#
# - All-reduce leaves the sum on every device; ours, which returns nothing, in the existing arrays.
#   A test keeps hold of them, and uses values that tell devices and entries apart.
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
# 1. **A tree.** On paper: draw the tree's rounds for 5 devices, as above for 4. How many are there,
#    and what does each device send? Which of the three algorithms would you choose for arrays of 1
#    MB on 6 devices, with a latency of 1 ms and 1 GB/s?
# 2. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `judge` say of it?
# 3. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, where `groups[rank]` is the list of a device's arrays, and call `all_reduce`
#    exactly once. (`nd.concat(*arrays, dim=0)` joins arrays.) How many messages does it save for 8
#    arrays on 2 devices with the ring?
# 4. **Fool the judge (open).** Write a wrong all-reduce that `judge` passes. What must a judge do
#    to catch it? Can there be a judge that nothing fools?

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
# sends its sum three times, device 2 sends twice, the others once. On 6 devices a star takes 10
# rounds of 1 MB, each of 1 + 1 ms: 20 ms. A tree takes 6: 12 ms. A ring takes 10 rounds of a sixth:
# 11.7 ms. So tree and ring are about equal.

# %% tags=["solution"]
print("each device sends, in whole arrays:", sent_by_each(tree_allreduce, 5))
assert sent_by_each(tree_allreduce, 5) == [3, 1, 2, 1, 1]

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


for k in range(2, 9):
    arrays = digits(k)
    total = sum(array.asnumpy() for array in arrays)
    mean_allreduce(arrays)
    for array in arrays:
        assert np.allclose(k * array.asnumpy(), total, rtol=1e-6), "not the mean"
try:
    judge(mean_allreduce)
except AssertionError as error:
    print("mean_allreduce:", error)

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
