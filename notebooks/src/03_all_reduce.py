# %% [markdown]
# # 03 · All-reduce
#
# After a backward pass each device has the gradient of its own shard, and every device needs the
# sum of all of them. An operation that leaves the sum on every device is called *all-reduce*.
#
# ## What you'll do
#
# Meet an all-reduce that a textbook printed for eleven months, and write a judge that it fails.
# Write three that pass: a star, a tree and a ring. Count what they send, and time them.
#
# ## What you'll learn
#
# - how to test an all-reduce so that the usual mistakes are caught;
# - how a ring all-reduce works, and what *reduce-scatter* and *all-gather* are;
# - how many rounds and bytes a star, a tree and a ring take;
# - what a time on simulated devices can tell, and what it can't.
#
# ## What you need
#
# Chapters 01 and 02. No GPU. Reading takes {reading time}, running less than one minute.

# %%
from helpers import devices

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
# `arrays[rank][:] = ...` would have written into the old one. The bug is easy to miss: device 0
# has the sum, and a test that looks at device 0 alone sees nothing wrong.
#
# This all-reduce returns nothing, so it must work **in place**: write into the arrays that were
# there.
#
# ## A judge, in three steps
#
# How do we find out that an all-reduce is right? Give it arrays, keep hold of them, and compare
# each with the sum that NumPy finds. The judge says which *ranks* are wrong; an array's rank is
# its place in the list.

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
# What remains is to choose the arrays. We do it in three steps. Each catches a mistake that slips
# through the one before.
#
# **Step 1: ones.** Each device holds a 1.

# %%
def ones(k):
    return [nd.ones(1, ctx=eight[rank]) for rank in range(k)]


print("rebinding is wrong on the ranks", wrong_ranks(rebinding, ones(4)))

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
# **Step 2: values that tell devices and entries apart.** Device 0 holds the numbers 65 to 76,
# device 1 three times these numbers, device 2 nine times, device 3 twenty-seven times. To each we
# add 1/32, which float16 and integers would lose.

# %%
def powers_of_three(k):
    arrays = []
    for rank in range(k):
        array = 3**rank * nd.arange(65, 77) + 1 / 32
        arrays.append(array.copyto(eight[rank]))
    return arrays


for array in powers_of_three(4):
    print(array.context, array[:3].asnumpy(), "... to", array[-1].asscalar())

print("multiply is wrong on the ranks", wrong_ranks(multiply, powers_of_three(4)))

# %% [markdown]
# The right sum is 1 + 3 + 9 + 27 = 40 times the numbers, plus 4/32. Without device 1 it would be
# 37 times the numbers, plus 3/32; with device 2 counted twice, 49 times, plus 5/32. And no two
# entries are alike, so an entry in the wrong place is seen, too.

# %% tags=["fold"]
# check: of the 81 ways to count four devices 0, 1 or 2 times, no two give the same sum anywhere
import itertools

values = np.stack([array.asnumpy() for array in powers_of_three(4)])  # [device, entry]
sums = [np.dot(counts, values) for counts in itertools.product([0, 1, 2], repeat=4)]
for entry in range(12):
    assert len({total[entry] for total in sums}) == 3**4, f"entry {entry}"
assert len(np.unique(values)) == values.size, "two entries are alike"

# %% tags=["fold"]
# check: float32 holds each sum exactly, so that another order of adding gives the same bits
for k in range(1, 9):
    in_32nds = sum((32 * array).asnumpy().astype(int) for array in powers_of_three(k))
    assert np.array_equal(in_32nds / 32, (in_32nds / 32).astype("float32")), f"{k} devices: rounded"
    assert np.all(in_32nds % 32 != 0), f"{k} devices: an integer would hold it"

# %% [markdown]
# Now a cleverer mistake: partners exchange their arrays, and each adds what it gets. At first the
# partners are neighbours, 0 and 1, 2 and 3; then devices two apart, 0 and 2, 1 and 3; then four
# apart. A device without a partner waits. **Predict:** for which numbers of devices does that work?

# %% tags=["fold"]
# check: an all-reduce by partners, with the arrays of step 2, on 2 to 8 devices
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
    wrong = wrong_ranks(powers_of_two, powers_of_three(k))
    print(k, "devices: wrong on the ranks", wrong)
    assert (wrong == []) == (k in [2, 4, 8])

# %% [markdown]
# On three devices, rank 1 has no partner in the second round, since there is no rank 3. So it never
# hears of rank 2.
#
# **Step 3: more cases.** So we must try every $k$. And an all-reduce may have other bad habits. It
# may be right only for float32, only if `cpu(0)` comes first in the list, or only the first time.
# To try that, the function of step 2 gets the numbers and the devices as arguments:

# %%
NUMBERS = nd.arange(65, 77)


def replicas(k, numbers=NUMBERS, order=eight):
    arrays = []
    for rank in range(k):
        array = 3**rank * numbers + 1 / 32
        arrays.append(array.copyto(order[rank]))
    return arrays

# %% [markdown]
# Our final judge tries six sets of arrays, one after the other:

# %%
BIG_NUMBERS = nd.arange(4, dtype="float64").reshape((2, 2)) + 2**25  # float32 can't hold them
backwards = list(reversed(eight))  # cpu(7), cpu(6), and so on


def wrong_devices(all_reduce, k):
    calls = [
        replicas(k, NUMBERS, eight),
        replicas(k, NUMBERS + 1, backwards),  # another device comes first
        replicas(k, NUMBERS + 2, eight),  # not the first time any more
        replicas(k, BIG_NUMBERS, eight),  # float64, and a matrix
        replicas(k, BIG_NUMBERS + 1, backwards),
        replicas(k, BIG_NUMBERS + 2, eight),
    ]
    wrong = set()
    for arrays in calls:
        wrong.update(wrong_ranks(all_reduce, arrays))
    return sorted(wrong)

# %% tags=["fold"]
# check: sixteen wrong all-reduces, those of the text among them, and which step catches them
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


def caught_or_not(all_reduce, arrays):
    remembered.clear()
    return "caught" if wrong_ranks(all_reduce, arrays) else "passes"


for all_reduce in [rebinding, no_broadcast, first_only, one_for_all, multiply, counts_twice,
                   all_but_the_first, never_adds, one_place_too_far, through("float16"),
                   through("int32"), vectors_only, through("float32"), by_device_number,
                   remembers, powers_of_two]:
    caught = [k for k in range(2, 9) if wrong_devices(all_reduce, k)]
    print(f"{all_reduce.__name__:17} step 1: {caught_or_not(all_reduce, ones(4))}, step 2: "
          f"{caught_or_not(all_reduce, replicas(4))}, step 3: caught on", *caught)
    assert caught == ([3, 5, 6, 7] if all_reduce is powers_of_two else list(range(2, 9)))
for k in range(1, 9):  # and what was said of step 2's arrays is true of the judge's
    for ours, shown in zip(replicas(k), powers_of_three(k), strict=True):
        assert np.array_equal(ours.asnumpy(), shown.asnumpy())

# %% [markdown]
# Five of the sixteen pass the arrays of step 2; the last of them is the exchange among partners.
# So a test of an all-reduce keeps the old arrays, looks at every one of them, uses values that
# tell devices apart, and tries many numbers of devices.
#
# ## A star
#
# What is the plainest all-reduce that passes? All devices send to device 0, which adds; then it
# sends the sum back to all. The lines of such messages form a star with device 0 in the middle.
# Whatever crosses between devices goes through one of two functions, which take notes.

# %%
log = []  # everything that was sent


def send(array, device):
    """A copy of the array on another device."""
    log.append({"sender": array.context, "receiver": device, "entries": array.size})
    return array.copyto(device)


def send_into(array, target):
    """Overwrite `target`, an array on another device."""
    log.append({"sender": array.context, "receiver": target.context, "entries": array.size})
    array.copyto(target)

# %%
def allreduce(arrays):
    total = arrays[0]
    for array in arrays[1:]:
        total += send(array, total.context)
    for array in arrays[1:]:
        send_into(total, array)

# %%
def judge(all_reduce):
    for k in range(1, 9):
        assert wrong_devices(all_reduce, k) == [], f"wrong on {k} devices"
    print(f"{all_reduce.__name__} is right on 1 to 8 devices")


judge(allreduce)

log.clear()
allreduce(replicas(3))
for sent in log:
    print(sent["sender"], "sends", sent["entries"], "entries to", sent["receiver"])

# %% [markdown]
# The first half has a name: *reduce* leaves the sum on one device. So has the second: *broadcast*
# sends one device's array to all. `helpers.allreduce` is this function, with its arguments checked.
#
# Our judge *can't* see one mistake, since simulated devices share memory: an all-reduce that
# forgets to send, and adds arrays of two devices as they are. On GPUs that may crash (chapter 01).
# The log shows it:

# %% tags=["fold"]
# check: an all-reduce without any send passes the judge, and its count of messages gives it away
def without_moves(arrays):
    for array in arrays[1:]:
        arrays[0] += array  # two devices meet
    for array in arrays[1:]:
        array[:] = arrays[0]  # moves, but not by `send_into`


judge(without_moves)
try:
    judge(powers_of_two)
    raise RuntimeError("the judge passes what is wrong on 3 devices")
except AssertionError as error:
    assert str(error).startswith("wrong on 3 devices")
for all_reduce, messages in [(allreduce, 6), (without_moves, 0)]:
    log.clear()
    all_reduce(replicas(4))
    print(f"{all_reduce.__name__} sends {len(log)} messages on 4 devices")
    assert len(log) == messages

# %% [markdown]
# ## Messages as data
#
# In this star, device 0 has all the work. Here are three ways on four devices. In a ring, each
# message is only a quarter of the array:
#
# ![Messages on four devices, round by round. A star takes 6 rounds of one whole array, a tree 4
# rounds of whole arrays, a ring 6 rounds in which every device sends a quarter; receivers add in
# the first half and overwrite in the second.](src/drawings/star_tree_ring.svg)
#
# An arrow is a message. Messages of one *round* go at the same time. Our rule: in a round a device
# sends one message at most and receives one at most, and it doesn't pass on what it receives in
# that round. To compare such ways, we write them down as data. A *schedule* is a list of rounds, a
# round a list of messages.

# %%
from typing import NamedTuple

ADD = "add"
COPY = "copy"


class Message(NamedTuple):
    sender: int  # a rank: a place in the list of arrays
    receiver: int
    chunk: int  # which piece of the array; 0 where arrays aren't cut
    what: str  # ADD: the receiver adds it to its own; COPY: it overwrites its own


def star(k):
    rounds = []
    for rank in range(1, k):
        rounds.append([Message(sender=rank, receiver=0, chunk=0, what=ADD)])
    for rank in range(1, k):
        rounds.append([Message(sender=0, receiver=rank, chunk=0, what=COPY)])
    return rounds


for messages in star(3):
    print(messages)

# %% [markdown]
# A message carries a chunk. `window` finds it in an array; chunks differ by one entry at most. As
# in chapter 02, a slice of consecutive entries of an `mx.nd` array shares its memory, and so does
# `reshape(-1)`, which makes one row of it: what we write into a window is in the array.

# %%
def window(array, chunk, num_chunks):
    flat = array.reshape(-1)
    begin = flat.size * chunk // num_chunks
    end = flat.size * (chunk + 1) // num_chunks
    return flat[begin:end]


ten = nd.arange(10)
for chunk in range(4):
    print("chunk", chunk, "of 4:", window(ten, chunk, num_chunks=4).asnumpy())

# %% [markdown]
# One function carries out any schedule. It takes one message after the other. The result is the
# same as if all messages of a round went at once, if none of them reads what another one writes.

# %%
def run(rounds, arrays, num_chunks):
    for messages in rounds:
        for message in messages:
            source = window(arrays[message.sender], message.chunk, num_chunks)
            target = window(arrays[message.receiver], message.chunk, num_chunks)
            if source.size == 0:
                continue  # more chunks than entries
            if message.what == ADD:
                target += send(source, target.context)
            else:
                send_into(source, target)


def star_allreduce(arrays):
    run(star(len(arrays)), arrays, num_chunks=1)


judge(star_allreduce)

# %% tags=["fold"]
# check: carried out as a schedule, the star sends what allreduce sends, in the same order
for k in range(1, 9):
    log.clear()
    allreduce(replicas(k))
    expected = list(log)
    log.clear()
    star_allreduce(replicas(k))
    assert log == expected, f"other messages on {k} devices"

# %% [markdown]
# ## A tree
#
# Pairs of devices add up at the same time, then pairs of pairs: 1 sends to 0 while 3 sends to 2,
# then 2 sends to 0. The sum comes down the same way in reverse. **Predict:** how many rounds does
# a tree take on 8 devices? And on 5?

# %%
def tree_up(k):
    rounds = []
    gap = 1
    while gap < k:
        messages = []
        for rank in range(0, k, 2 * gap):  # these receive, each from the one that is `gap` further
            if rank + gap < k:
                messages.append(Message(sender=rank + gap, receiver=rank, chunk=0, what=ADD))
        rounds.append(messages)
        gap = 2 * gap
    return rounds


for messages in tree_up(5):
    print("up, in one round:", [f"{message.sender} to {message.receiver}" for message in messages])

# %%
def answer(message):
    """The message that goes back the same way, and overwrites."""
    return Message(sender=message.receiver, receiver=message.sender, chunk=message.chunk, what=COPY)


def tree(k):
    up = tree_up(k)
    down = []
    for messages in reversed(up):
        down.append([answer(message) for message in messages])
    return up + down


def tree_allreduce(arrays):
    run(tree(len(arrays)), arrays, num_chunks=1)


judge(tree_allreduce)
for k in [2, 3, 4, 5, 8]:
    print(f"{k} devices: {len(star(k))} rounds as a star, {len(tree(k))} as a tree")

# %% [markdown]
# A tree takes $2\lceil\log_2 k\rceil$ rounds, where a star takes $2(k-1)$. But device 0 still sends
# the whole array in each round on the way down.
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
# The same, round by round. Each row is a device, each column a chunk, and each colour is one
# device's part of the sum:
#
# ![Four devices with four chunks each. In rounds 1 to 3 one chunk of each device gains the parts of
# the device above, until device r has the whole sum of chunk r; after round 6 every device has all
# four sums.](src/drawings/ring_rounds.svg)
#
# We want rank $r$ to end up with the sum of chunk $r$. So chunk 0 begins at rank 1, goes to 2 and
# 3, and ends at rank 0. In the first round, then, rank $r$ sends chunk $r - 1$ (and rank 0 the
# last one). In the next round it passes on the chunk that it has just received and added to,
# $r - 2$, and so on.

# %%
def reduce_scatter(k):
    rounds = []
    for step in range(k - 1):
        messages = []
        for rank in range(k):
            following = (rank + 1) % k
            chunk = (rank - 1 - step) % k
            messages.append(Message(sender=rank, receiver=following, chunk=chunk, what=ADD))
        rounds.append(messages)
    return rounds

# %% [markdown]
# To watch it, device $r$ holds $10^r$ in each of four chunks. A sum then shows what is in it: 101
# is the part of device 0 and that of device 2.

# %%
arrays = []
for rank in range(4):
    arrays.append(nd.ones(4, ctx=eight[rank]) * 10**rank)

for number, messages in enumerate(reduce_scatter(4), 1):
    run([messages], arrays, num_chunks=4)  # a schedule of this one round
    print("after round", number)
    print(np.stack([array.asnumpy() for array in arrays]).astype(int))  # a row is a device

# %% [markdown]
# After $k - 1$ rounds rank $r$ has the whole sum of chunk $r$: the 1111 on the diagonal. This is
# half of the way, and it has a name, *reduce-scatter*. For $k - 1$ more rounds the finished chunks
# go round the ring and overwrite what is there. That is an *all-gather*.

# %%
def all_gather(k):
    rounds = []
    for step in range(k - 1):
        messages = []
        for rank in range(k):
            following = (rank + 1) % k
            chunk = (rank - step) % k  # at first its own, then the one that it has just got
            messages.append(Message(sender=rank, receiver=following, chunk=chunk, what=COPY))
        rounds.append(messages)
    return rounds


run(all_gather(4), arrays, num_chunks=4)
print(np.stack([array.asnumpy() for array in arrays]).astype(int))

# %%
def ring(k):
    return reduce_scatter(k) + all_gather(k)


def ring_allreduce(arrays):
    run(ring(len(arrays)), arrays, num_chunks=len(arrays))


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
# **Predict:** each of 8 devices has an array of $S$ bytes. How many bytes does the *busiest* device
# send in a star, a tree and a ring? We run each and add up what the log says:

# %% tags=["fold"]
# measure: what each of 8 devices sends, in units of the whole array
def shares_sent(rounds, k, num_chunks):
    entries = 840  # a multiple of 1 to 8, so that all chunks are equal
    log.clear()
    run(rounds, [nd.ones(entries, ctx=device) for device in eight[:k]], num_chunks)
    shares = np.zeros(k)
    for sent in log:
        shares[sent["sender"].device_id] += sent["entries"] / entries
    return shares


for name, rounds, num_chunks in [("star", star(8), 1), ("tree", tree(8), 1), ("ring", ring(8), 8)]:
    shares = shares_sent(rounds, 8, num_chunks)
    print(f"{name}: {len(rounds):2} rounds; sent by devices 0 to 7:", *shares)

# %% [markdown]
# All three send $2(k-1)S$ in all. They differ in who sends it, and when. The last column has the
# bytes that go one after the other: the number of rounds times the bytes of one message.
#
# | | rounds | the busiest device sends | bytes one after the other |
# | --- | --- | --- | --- |
# | star | $2(k-1)$ | $(k-1)\,S$ | $2(k-1)\,S$ |
# | tree | $2\lceil\log_2 k\rceil$ | $\lceil\log_2 k\rceil\,S$ | $2\lceil\log_2 k\rceil\,S$ |
# | ring | $2(k-1)$ | $2\frac{k-1}{k}\,S$ | $2\frac{k-1}{k}\,S$ |
#
# In the usual model, each round costs a *latency*, even if its messages are small, and each byte
# costs time, since a link carries only so many a second, its *bandwidth*. So for small arrays the
# number of rounds decides, which speaks for a tree. For large arrays the bytes that go one after
# the other decide, which speaks for a ring: they are less than $2S$, however many devices there
# are. If all the adding is done by the devices, the busiest one can't send less (Patarasuk and
# Yuan, 2009).

# %% tags=["fold"]
# check: rounds, the busiest device's bytes and all bytes follow the table on 2 to 8 devices
for k in range(2, 9):
    doublings = (k - 1).bit_length()  # log2 of k, rounded up
    table = {
        "star": (star(k), 1, 2 * (k - 1), k - 1),
        "tree": (tree(k), 1, 2 * doublings, doublings),
        "ring": (ring(k), k, 2 * (k - 1), 2 * (k - 1) / k),
    }
    for name, (rounds, num_chunks, number, busiest) in table.items():
        shares = shares_sent(rounds, k, num_chunks)
        assert len(rounds) == number, f"{name} on {k} devices: {len(rounds)} rounds"
        assert np.isclose(max(shares), busiest), f"{name} on {k} devices: busiest {max(shares)}"
        assert np.isclose(sum(shares), 2 * (k - 1)), f"{name} on {k} devices: {sum(shares)} in all"
        assert name == "ring" or k == 2 or busiest > 2 * (k - 1) / k, "more than in a ring"
        in_turn = len(rounds) / num_chunks  # all messages of a round are one chunk long
        assert np.isclose(in_turn, 2 * (k - 1) / k if name == "ring" else number), "in turn"

# %% tags=["fold"]
# check: messages of one round can go at the same time, in star, tree and ring on 2 to 8 devices
for k in range(2, 9):
    for messages in star(k) + tree(k) + ring(k):
        assert len({message.sender for message in messages}) == len(messages), "one sends twice"
        assert len({message.receiver for message in messages}) == len(messages), "one gets two"
        read = {(message.sender, message.chunk) for message in messages}
        written = {(message.receiver, message.chunk) for message in messages}
        assert not read & written, "a chunk is sent while it changes"

# %% [markdown]
# Is there a way with few rounds *and* few bytes? There is, and there are networks on which yet
# other ways win, or on which a switch adds. The notebook deeper: More all-reduces is about them.
#
# ## On this machine
#
# Which is the fastest here, on two devices? MXNet has an all-reduce of its own to compare with: the
# `pushpull` of its *key-value store* (KVStore), which chapter 07 takes apart. **Predict:** with two
# devices, which of star, tree and ring send the same messages?
#
# We measure fifteen rounds in each of five new processes, and take the median of each process. A
# row shows the middle one of these five, and in brackets the lowest and the highest. We call one
# all-reduce faster than another if it is so by more than a twentieth in all five processes.

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
judge(kvstore_allreduce)  # only now: its stores can't be sent to other processes

# %% [markdown]
# **For 4 KB** `star` and `tree` send the same two messages. `allreduce` sends these two messages
# as well, and takes about half of their time, or less. What differs is what Python does: `run`
# reads a schedule and cuts windows. The ring has twice as many messages *and* twice as many
# windows; we haven't separated these two. Which share of the time does it take to hand out the
# work, until the call returns?

# %% tags=["fold", "measured"]
# measure: the time until the call returns, as a share of the time until the sum is there
import time

two = devices(2)
for size in [SMALL, LARGE]:
    arrays = [nd.zeros(size, ctx=two[0]), nd.zeros(size, ctx=two[1])]
    for all_reduce in [allreduce, star_allreduce, tree_allreduce, ring_allreduce]:
        shares = []
        for turn in range(30):
            nd.waitall()
            begin = time.perf_counter()
            all_reduce(arrays)
            returned = time.perf_counter() - begin
            nd.waitall()
            shares.append(returned / (time.perf_counter() - begin))
        print(f"{BYTES[size]:7} {all_reduce.__name__:15} {np.median(shares):4.0%}")

# %% [markdown]
# For 4 KB nearly all of it: these are times of calls. **For 16.4 MB** hardly any: copying and
# adding take the time. KVStore makes four copies where `allreduce` makes two (chapter 07), and
# takes longer.

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
# For 4 KB `allreduce` and KVStore are ahead of all that goes through `run`; which of the two is
# faster changed from run to run. For 16.4 MB none of ours is faster than another in this run. By
# the table above, a ring should take half of a star's time for large arrays on two devices. Here
# it doesn't. The table is about links, and simulated devices have none.

# %% [markdown]
# ## Order matters to the last bit
#
# In floating point $(a + b) + c$ need not be $a + (b + c)$. **Predict:** eight devices hold 1,000
# random float32 numbers each. Do star, tree and ring give the same bits? And within one of them, do
# all devices have the same bits?

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


judge(each_adds_all)
by_star = None
for all_reduce in [star_allreduce, tree_allreduce, ring_allreduce, each_adds_all]:
    arrays = [nd.array(row, ctx=device) for row, device in zip(values, eight)]
    all_reduce(arrays)
    found = arrays[0].asnumpy()
    by_star = found if by_star is None else by_star
    same = all(np.array_equal(array.asnumpy(), found) for array in arrays)
    print(f"{all_reduce.__name__}: all devices the same: {same}; on the first, "
          f"{np.sum(found != by_star)} of 1000 sums differ in a bit from the star's")
    assert same == (all_reduce is not each_adds_all), "the same bits on all devices"
    if all_reduce in [tree_allreduce, ring_allreduce]:
        assert 400 < np.sum(found != by_star) < 600, "about half"
    assert np.all(np.abs(found - exact) <= bound), "too far away"

# %% [markdown]
# Star, tree and ring add in different orders: about half of the tree's and of the ring's sums
# differ in a bit from the star's. But within each of them all devices agree to the bit: a number
# is summed in one place and then copied. So replicas that start equal, and make the same update,
# stay equal. (In the last row each device adds up all arrays itself, its own first. The judge
# passes that, but the bits differ.)
#
# ## Summary
#
# - All-reduce leaves the sum on every device, in the arrays that were there. A test keeps hold of
#   those arrays, looks at every one, uses values that tell devices and entries apart, and tries
#   many numbers of devices.
# - All-reduce = reduce + broadcast = reduce-scatter + all-gather.
# - A star takes $2(k-1)$ rounds, and its busiest device sends $(k-1)S$. A tree takes
#   $2\lceil\log_2 k\rceil$ rounds. A ring takes $2(k-1)$ rounds, and with equal chunks each device
#   sends $2\frac{k-1}{k}S$. The busiest one can't send less where only the devices add.
# - On two simulated devices, times for small arrays are mostly those of the calls.
# - Star, tree and ring differ by rounding; within each the devices agree to the bit.
#
# **Further reading.** P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for
# clusters of workstations", *JPDC* 69 (2009).

# %% [markdown]
# ## Exercises
#
# 1. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `wrong_devices` say of it?
# 2. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, which takes a list of arrays for each device and calls `all_reduce` once. How
#    many messages does it save for 8 arrays on 2 devices with the ring?
# 3. **Fool the judge (open).** Write a wrong all-reduce that `wrong_devices` passes for all $k$
#    from 2 to 8. What must a judge do to catch it? Can there be a judge that nothing fools?

# %% [markdown]
# ### Answer 1
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
# ### Answer 2
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

log.clear()
for array in base:
    ring_allreduce([array.copyto(eight[0]), array.copyto(eight[1])])
print(len(log), "messages for eight arrays, one after the other")
assert len(log) == 32

# %% [markdown]
# In the check, rank $r$ holds $r + 1$ times each array, so the sum on two devices is three times
# the array, on three devices six times. `list` is an all-reduce that does nothing: then each device
# must get its own buffer back.

# %% tags=["solution"]
def check_fused(all_reduce, expected_factors, expected_messages):
    groups = []
    for rank in range(len(expected_factors)):
        groups.append([(rank + 1) * array.copyto(eight[rank]) for array in base])
    log.clear()
    fused_allreduce([list(group) for group in groups], all_reduce)  # copies of the lists, as above
    for group, factor in zip(groups, expected_factors):
        for found, array in zip(group, base):
            assert np.array_equal(found.asnumpy(), factor * array.asnumpy()), "other values"
    assert len(log) == expected_messages, f"{len(log)} messages"


check_fused(list, expected_factors=[1, 2], expected_messages=0)
check_fused(list, expected_factors=[1, 2, 3], expected_messages=0)
check_fused(ring_allreduce, expected_factors=[3, 3], expected_messages=4)
check_fused(ring_allreduce, expected_factors=[6, 6, 6], expected_messages=12)
print("4 messages for all eight arrays")

# %% [markdown]
# ### Answer 3
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
