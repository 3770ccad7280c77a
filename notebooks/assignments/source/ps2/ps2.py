# %% [markdown]
# # Assignment 2: all-reduce
#
# **You will** write a tree and a ring that replace the array on each device by the sum of all of
# them, and work out how many bytes the busiest device has to send.
#
# **You need** chapter 03. **Time**: about an hour and a half. **Points**: 12, of which 2 are for
# words.
#
# **You may use** anything in `mx.nd` and NumPy, but no KVStore. Whatever crosses from one device
# to another goes through the function `send` that you are given, and through nothing else:
# simulated devices can read each other's memory, which not all GPUs can.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other sizes and other devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.

# %% tags=["given"]
from helpers import devices

import mxnet as mx
import numpy as np

# %% [markdown]
# Device $r$ (its *rank*, its place in the list) holds $r + 1$ times the numbers 1 to $n$: no two
# devices are alike, no two entries are alike, none is zero. The sum is $\frac{k(k+1)}{2}$ times
# the numbers 1 to $n$.


# %% tags=["given"]
def replicas(k, n=12):
    return [mx.nd.arange(1, n + 1, ctx=mx.cpu(r)) * (r + 1) for r in range(k)]  # k × [n]


# %% [markdown]
# Your functions get `arrays`, one on each device, and `send`:
#
# - `send(array, device)` returns a copy of `array` on that device;
# - `send(array, other)` writes `array` into `other`, an array of the same shape, and returns
#   `other`.
#
# Go on with what `send` returns or has filled. It notes every message. `run_tree` and `run_ring`
# call your functions with it, and return the messages in the order of sending: the rank from
# which, the rank to which, and a copy of what was sent. An array without entries can't be sent.
# When your work is marked, a test changes messages on their way, to see that you use what has
# arrived.
#
# The arrays are in float32 or in float64, and so must be what you send and add up. You need not
# read the next two cells.


# %% tags=["driver"]
def counted(all_reduce, arrays, note=None):
    where, messages = [a.context for a in arrays], []

    def keep(array, end):
        for place in (array.context, end):
            if place not in where:
                raise ValueError(
                    f"send: from {array.context} to {end}, but {place} is not one of {where}")
        if not array.size:
            raise ValueError(f"send: an array without entries, from {array.context} to {end}")
        messages.append((where.index(array.context), where.index(end), array.asnumpy()))
        return array.copyto(end)

    def send(array, to):
        # What arrives is what `note` hands on: the program that marks brings one of its own.
        come = (note or keep)(array, getattr(to, "context", to))
        return come.copyto(to) if isinstance(to, mx.nd.NDArray) else come

    all_reduce(arrays, send)
    return messages


def run_tree(arrays, note=None):
    return counted(tree_allreduce, arrays, note)


def run_ring(arrays, note=None):
    return counted(ring_allreduce, arrays, note)


# With another list of the same arrays, for a test that looks at messages only.
def log_tree(arrays, note):
    return run_tree(list(arrays), note)


def log_ring(arrays, note):
    return run_ring(list(arrays), note)


# %% [markdown]
# What the tests use. `summed` looks at *every* replica, and at the very arrays that were handed
# in: whoever holds a gradient must see the sum in it.


# %% tags=["given"]
def sent(run, arrays):
    """The messages of one run on `arrays`."""
    case = f"{len(arrays)} device(s), arrays of shape {arrays[0].shape}"
    try:
        return run(arrays)
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


def summed(run, arrays):
    """Run on `arrays` and check that each of them, in place, has become the sum."""
    held, before = list(arrays), [a.asnumpy() for a in arrays]
    k, total = len(held), sum(before)
    sent(run, arrays)
    scale = np.abs(total).max()
    exact = (1e-12 if total.dtype == np.float64 else 1e-5) * scale
    assert len(arrays) == k, f"the list had {k} arrays and now has {len(arrays)}"
    for r, (array, old) in enumerate(zip(held, before)):
        who = f"device {r} of {k}, arrays of shape {old.shape}"
        place = getattr(arrays[r], "context", None)
        assert place == array.context, f"{who}: the list has an array on {place} in its place"
        assert arrays[r] is array, f"{who}: the list has a new array; write into the old one"
        new = array.asnumpy()
        apart, stale, mean = (np.abs(new - x).max() for x in (total, old, total / k))
        if not apart <= exact:
            raise AssertionError(f"{who}: " + (
                "still has what it had" if stale <= exact
                else "has the mean, not the sum" if mean <= exact
                else "has lost digits on the way" if apart <= 1e-5 * scale
                else "does not have the sum, first at entry "
                     f"{np.argmin(np.abs(new - total) <= exact)} of {new.size}"))


def rounds(messages, k):
    """How many rounds they take if a device sends or receives one message in each."""
    busy = [0] * k
    for a, b, _ in messages:
        busy[a] = busy[b] = 1 + max(busy[a], busy[b])
    return max(busy)


def bytes_sent(messages, k):
    """How many bytes each device has sent."""
    return [sum(values.nbytes for a, _, values in messages if a == r) for r in range(k)]


# %% [markdown]
# ## 1. A tree (4 points)
#
# Replace each array by the sum of all, in place. Pairs of devices add up at the same time, then
# pairs of pairs, until one device has the sum; it comes down the same way. A round is a set of
# messages that can be sent at the same time. In your tree a device does one thing in a round: it
# sends a message, or receives one, or rests. (In chapter 03 it may send and receive at once, as
# in a ring.) Rounds are counted from the order in which each single device sends and receives;
# apart from that the order is yours. Your tree takes at most $\lceil \log_2 k \rceil$ rounds up
# and as many down, with $2(k-1)$ messages in all, each of a whole array.
#
# It must work for every $k$, not for powers of two only, and for $k = 1$ it sends nothing. The
# list `arrays` stays as it is, with the same arrays in it.
#
# About eight lines.


# %% nbgrader={"grade_id": "tree", "solution": true}
def tree_allreduce(arrays, send):
    """Replace each of k arrays [...], one a device, by the sum of all, in place."""
    ### BEGIN SOLUTION
    pairs, gap = [], 1
    while gap < len(arrays):
        pairs += [(i, i + gap) for i in range(0, len(arrays) - gap, 2 * gap)]
        gap *= 2
    for low, high in pairs:
        arrays[low] += send(arrays[high], arrays[low].context)
    for low, high in reversed(pairs):
        send(arrays[low], arrays[high])
    ### END SOLUTION


# %% nbgrader={"grade_id": "tree-values", "points": 2}
for k in (1, 2, 3, 4):
    summed(run_tree, replicas(k))
summed(run_tree, [mx.nd.ones(3, ctx=d) * 10**r for r, d in enumerate(devices(2))])

# %% nbgrader={"grade_id": "tree-rounds", "points": 2}
messages = sent(run_tree, replicas(4))
print("from, to:", [(a, b) for a, b, _ in messages])
assert len(messages) == 6, f"{len(messages)} messages on four devices, not 6"
assert rounds(messages, 4) <= 4, f"{rounds(messages, 4)} rounds on four devices: two up, two down"

# %% [markdown]
# ## 2. A ring (4 points)
#
# The same by a ring. Cut each array, whatever its shape, into $k$ chunks of entries, whose lengths
# differ by one at most; which are the longer ones, and which device begins with which, is yours to
# choose. In each step every device sends one chunk to the next device in the list, and the last
# device to the first. For $k - 1$ steps the receiver adds what arrives to its own copy of the same
# chunk; for $k - 1$ more steps finished chunks go round, and overwrite the receiver's.
#
# It must work for every $k$ and every size. Where there are fewer entries than devices some chunks
# are empty: then nothing is sent. For $k = 1$ nothing is sent at all. (`array.reshape(-1)` is a
# window onto the same memory, and so is a slice of it.)
#
# About thirteen lines.


# %% nbgrader={"grade_id": "ring", "solution": true}
def ring_allreduce(arrays, send):
    """Replace each of k arrays [...], one a device, by the sum of all, in place."""
    ### BEGIN SOLUTION
    k, n = len(arrays), arrays[0].size
    ends = [n * c // k for c in range(k + 1)]
    for step in range(2 * k - 2):
        for i in range(k):
            c = (i - step) % k
            if ends[c] < ends[c + 1]:
                here, there = (arrays[j % k].reshape(-1)[ends[c] : ends[c + 1]] for j in (i, i + 1))
                if step < k - 1:
                    there += send(here, there.context)
                else:
                    send(here, there)
    ### END SOLUTION


# %% nbgrader={"grade_id": "ring-values", "points": 2}
for k in (1, 2, 3, 4):
    summed(run_ring, replicas(k))
summed(run_ring, replicas(3, n=2))   # fewer entries than devices
summed(run_ring, replicas(3, n=10))  # 10 is not a multiple of 3

# %% nbgrader={"grade_id": "ring-bytes", "points": 2}
messages = sent(run_ring, replicas(4))  # 12 entries of 4 bytes
print("bytes sent by each device:", bytes_sent(messages, 4))
assert bytes_sent(messages, 4) == [2 * 3 * 12] * 4, "2(k - 1) chunks of 12 bytes from each device"

# %% [markdown]
# ## 3. The busiest device (2 points)
#
# How many bytes does the device that sends most send in one all-reduce? Count what is *sent*, not
# what is received, in both halves together: summing and handing on. `scheme` is one of these:
#
# - `"first"`, by way of the first device, the chapter's star: every other device sends its array
#   to device 0, which adds them up and sends the sum to each of the others, one after the other;
# - `"tree"`: the tree of chapter 03. In round 1 device 1 sends to 0, 3 to 2, 5 to 4 and so on; in
#   each round up, senders are twice as far from receivers as in the round before; whoever has no
#   partner rests. The sum comes down by the same pairs in reverse;
# - `"ring"`: that of exercise 2.
#
# `size` is how many bytes *one* array has. It is a multiple of $k$, so all chunks have the same
# length. $k$ is 1 or more, and need not be a power of two. Return an `int`. Raise
# `ValueError` for any other scheme.
#
# Don't count with arrays, but think. Which device sends most, and when does it send? How many
# messages are these, and how long is each? Check your answers with three and with five devices on
# paper: the tests in the open have only two and four. You don't need exercises 1 and 2 for this.
#
# About seven lines.


# %% nbgrader={"grade_id": "busiest", "solution": true}
def busiest(scheme, k, size):
    """Bytes sent by the device that sends most; k devices, arrays of `size` bytes. An int."""
    ### BEGIN SOLUTION
    if scheme == "first":
        return (k - 1) * size
    if scheme == "tree":
        return (k - 1).bit_length() * size  # one message for each power of two below k
    if scheme == "ring":
        return 2 * (k - 1) * (size // k)
    raise ValueError(f"scheme {scheme!r}: there are first, tree and ring")
    ### END SOLUTION


# %% nbgrader={"grade_id": "busiest-values", "points": 1}
for scheme in ("first", "tree", "ring"):
    assert busiest(scheme, 2, 80) == 80, f"{scheme}: each of two devices sends 80 bytes"
assert busiest("tree", 4, 80) == 160, "tree: device 0 sends to 2, then to 1"

# %% nbgrader={"grade_id": "busiest-care", "points": 1}
try:
    busiest("butterfly", 2, 80)
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("there is no scheme butterfly: no ValueError")

# %% [markdown]
# ## 4. In your words (2 points)
#
# Four machines have four GPUs each. Within a machine any two GPUs talk at full speed. Each
# machine has one link to the others, which its four GPUs share; it is ten times as slow, and a
# message over it takes ten times as long to begin. Your ring runs over all sixteen. In which
# order do you list them? For an array of $S$ bytes, how many bytes does each machine then send
# over its link, and how many in the worst order? In the order that you have chosen, how many
# rounds do your ring and your tree take, and in how many of them does somebody wait for a link?
# So which of the two is for an array of a hundred numbers? A few sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for the order and its bytes: machine by machine, so that of a machine's four GPUs only
# the last one sends over the link. In each of 30 rounds that is a sixteenth of the array, so
# $30/16\,S = 1.875\,S$ in all. In the worst order each GPU is followed by one of another machine:
# then all four send over the link in every round, $7.5\,S$, and a large array takes four times as
# long. (The fast links wait for the slow ones in every round, so their speed hardly counts.)
#
# One point for the rounds: the ring takes 30, and in each of them some chunk crosses a link. A
# tree whose first pairs are within a machine takes 8, and only 4 of them cross: two on the way up
# and two down. For a hundred numbers the time goes into beginning messages, 4 slow ones against
# 30: the tree. More than is asked for, and as good: the ring within each machine, then over the
# machines, then back; or many small arrays joined into one.
