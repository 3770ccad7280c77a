# %% [markdown]
# # 03 · All-reduce
#
# After a backward pass each device has the gradient of its own shard, and every device needs the
# sum of all of them. An operation that leaves the sum on every device is called *all-reduce*.
#
# ## What you'll do
#
# Meet an all-reduce that a textbook printed for eleven months, and write a test that it fails.
# Write six that pass. Count their rounds and bytes, predict their times on three networks with up
# to 64 devices, and time four of them and KVStore here.
#
# ## What you'll learn
#
# - how to test an all-reduce so that the usual mistakes are caught;
# - five collectives and how they relate;
# - when rounds matter and when bytes, and why the best all-reduce depends on the network;
# - what NVIDIA's NCCL does.
#
# ## What you need
#
# Chapters 01 and 02. No GPU. Reading takes {reading time}, running less than one minute.

# %%
from helpers import devices

import mxnet as mx
import numpy as np
from mxnet import nd

eight = [mx.cpu(r) for r in range(8)]  # being right needs no speed, so we name them ourselves

# %% [markdown]
# ## A bug that was printed for eleven months
#
# In January 2021 the PyTorch edition of *Dive into Deep Learning* gained an all-reduce that adds
# up all arrays on the first device and puts the sum into a list. It printed the list before and
# after, and stayed until December (d2l-ai/d2l-en, pull requests #1596 and #1978). Here it is with
# MXNet's arrays:

# %%
def rebinding(arrays):
    for r in range(1, len(arrays)):
        arrays[0][:] += arrays[r].as_in_context(arrays[0].context)
    for r in range(1, len(arrays)):
        arrays[r] = arrays[0].as_in_context(arrays[r].context)


grads = [nd.ones(2, ctx=d) * (r + 1) for r, d in enumerate(eight[:3])]
print("before:", [g.asnumpy().tolist() for g in grads])
held = list(grads)  # who else holds these arrays: in training, the parameters
rebinding(grads)
print("after: ", [g.asnumpy().tolist() for g in grads])

# %% [markdown]
# 1 + 2 + 3 = 6 on each device. The page, with two devices, printed 3s, and it looks right.
# **Predict:** what is in the arrays that the parameters hold?

# %%
print("held:  ", [g.asnumpy().tolist() for g in held])

# %% [markdown]
# Only the first has changed. `arrays[r] = …` puts a *new* array into the list. The gradient that
# `attach_grad` made, which the update will read, is still the old one. `arrays[r][:] = …` would
# have written into it. It is easy to miss: device 0 gets the sum, and the page evaluates there. So
# ours works **in place**, and its test must look at the arrays that were there before the call.
#
# ## A judge
#
# Let device $r$ hold $3^r$ times the numbers 2001.5, 2002.5, …, 2012.5. Each device is one digit in
# base 3. So as long as no device is counted more than twice, only the right sum has the right
# value. No two entries are alike, so a shifted chunk shows. 2001.5 has more digits than float16
# keeps, and a fraction that an integer loses. A second case is a float64 matrix with four entries,
# and digits that float32 would lose. The right answer is $\frac{3^k - 1}{2}$ times device 0's
# array, and all of these numbers are exact in their type.

# %%
CASES = [((12,), "float32", 2000.5), ((2, 2), "float64", 2**25 + 0.5)]


def replicas(k, shape=(12,), dtype="float32", base=2000.5, order=eight):
    first = base + nd.arange(1, np.prod(shape) + 1, dtype=dtype).reshape(shape)
    return [(3**r * first).copyto(d) for r, d in enumerate(order[:k])]

# %% [markdown]
# `held` keeps the arrays; `all_reduce` gets a copy of the list. It is called twice more with other
# values: on the devices in reverse, in case it takes a device's number for its rank, and as at
# first, in case it remembers something.

# %%
def wrong_devices(all_reduce, k):
    """The ranks (places in the list) that don't hold the sum after `all_reduce` on k devices."""
    wrong = set()
    for shape, dtype, base in CASES:
        for call, order in enumerate((eight, eight[::-1], eight)):
            held = replicas(k, shape, dtype, base + call, order)
            answer = (3**k - 1) // 2 * held[0].asnumpy()
            all_reduce(list(held))
            wrong |= {r for r, a in enumerate(held) if not (a.asnumpy() == answer).all()}
    return sorted(wrong)


print("rebinding:", wrong_devices(rebinding, 4))

# %% [markdown]
# More mistakes:

# %%
def no_broadcast(arrays):
    for array in arrays[1:]:
        arrays[0] += array.copyto(arrays[0].context)


def first_only(arrays):
    for array in arrays[1:]:
        arrays[0].copyto(array)

# %%
def one_for_all(arrays):
    no_broadcast(arrays)
    arrays[:] = [arrays[0]] * len(arrays)


def counts_twice(arrays):
    no_broadcast(arrays)
    arrays[0] += arrays[-1].copyto(arrays[0].context)
    first_only(arrays)

# %% [markdown]
# Two more:

# %%
def through(dtype):
    def all_reduce(arrays):
        low = [array.astype(dtype) for array in arrays]
        no_broadcast(low)
        for array in arrays:
            low[0].astype(array.dtype).copyto(array)
    all_reduce.__name__ = f"through {dtype}"
    return all_reduce

# %%
def powers_of_two(arrays):
    for gap in (1, 2, 4):
        old = [array.copy() for array in arrays]
        for r, array in enumerate(arrays):
            if r ^ gap < len(arrays):  # r ^ gap is the partner: 0 and 1, then 0 and 2, ...
                array += old[r ^ gap].copyto(array.context)

# %% [markdown]
# **Predict:** for which $k$ is the last one right?

# %%
wrong = [rebinding, no_broadcast, first_only, one_for_all, counts_twice, through("float16"),
         through("float32"), through("int32"), powers_of_two]
for all_reduce in wrong:
    found = [k for k in range(2, 9) if wrong_devices(all_reduce, k)]
    expected = [3, 5, 6, 7] if all_reduce is powers_of_two else list(range(2, 9))
    assert found == expected, f"{all_reduce.__name__} fails for k = {found}"
    print(f"{all_reduce.__name__:15} fails for k =", found)

# %% [markdown]
# Only `powers_of_two` passes anywhere, for 2, 4 and 8. So we try every $k$.
#
# ## Sum, then broadcast
#
# Whatever crosses between devices goes through one function, so that we can count it. `to` is a
# device, or an array there that is overwritten.

# %%
log = []  # (from device, to device, bytes) for every message


def send(array, to):
    size = array.size * np.dtype(array.dtype).itemsize
    log.append((array.context.device_id, getattr(to, "context", to).device_id, size))
    return array.copyto(to)

# %% [markdown]
# The plainest all-reduce: all devices send to device 0, which adds, and it sends the sum back to
# all. `+=` and `send(total, array)` write into arrays that are there already.

# %%
def allreduce(arrays):
    total = arrays[0]
    for array in arrays[1:]:
        total += send(array, total.context)
    for array in arrays[1:]:
        send(total, array)

# %%
def without_moves(arrays):
    for array in arrays[1:]:
        arrays[0] += array  # two devices meet
    for array in arrays[1:]:
        array[:] = arrays[0]  # moves, but not by `send`


for all_reduce in (allreduce, without_moves):
    for k in range(1, 9):
        assert wrong_devices(all_reduce, k) == [], f"wrong on {k} devices"
    log.clear()
    all_reduce(replicas(3))
    print(f"{all_reduce.__name__:13} is right on 1 to 8 devices, {len(log)} messages on 3")

# %% [markdown]
# The judge can't see a missing move, since simulated devices share memory. On GPUs `without_moves`
# may crash (chapter 01). Read the code, or count messages.
#
# The first half of `allreduce` has a name, *reduce*: one device gets the sum. So has the second,
# *broadcast*: one device's array goes to all. `helpers.allreduce` is this function, with its
# arguments checked.
#
# ## Schedules
#
# Device 0 has all the work here. To compare other ways of sending, we write each down as data: a
# list of *rounds*, each a list of messages that can be sent at the same time. A message says from
# which rank, to which rank, which *chunk* of the array, and whether the receiver adds it or
# overwrites. One function carries out any schedule. (`reshape(-1)` of an `mx.nd` array is a window
# on its memory; a chunk may be empty.)

# %%
ADD = "add"
COPY = "copy"


def run(rounds, arrays, parts):
    cuts = [arrays[0].size * c // parts for c in range(parts + 1)]
    for messages in rounds:
        for a, b, c, what in messages:
            if cuts[c] == cuts[c + 1]:
                continue
            mine, theirs = (arrays[r].reshape(-1)[cuts[c] : cuts[c + 1]] for r in (a, b))
            if what == ADD:
                theirs += send(mine, theirs.context)
            else:
                send(mine, theirs)

# %% [markdown]
# ### A tree
#
# Pairs of devices add up at the same time, then pairs of pairs: 1 sends to 0 while 3 sends to 2;
# then 2 sends to 0. The sum comes down the same way in reverse. **Predict:** how many rounds does
# it take on 8 devices? And on 5?

# %%
def tree(k):
    gaps = [2**i for i in range((k - 1).bit_length())]
    up = [[(r + gap, r, 0, ADD) for r in range(0, k - gap, 2 * gap)] for gap in gaps]
    down = [[(b, a, 0, COPY) for a, b, _, _ in messages] for messages in reversed(up)]
    return up + down

# %%
def tree_allreduce(arrays):
    run(tree(len(arrays)), arrays, parts=1)


print([len(tree(k)) for k in range(1, 9)], "rounds on 1 to 8 devices")

# %% [markdown]
# $2\lceil\log_2 k\rceil$ rounds, where sum-then-broadcast needs $2(k-1)$ if device 0 takes one
# message at a time. But device 0 still sends the whole array several times.
#
# ### A ring
#
# Cut each array into $k$ chunks, and let every device send one chunk to its right neighbour in
# every round. To watch it, device $r$ holds $10^r$ in each chunk, so that a sum shows what is in
# it: 101 is device 0's and device 2's.

# %%
def reduce_scatter(k):
    return [[(r, (r + 1) % k, (r - s - 1) % k, ADD) for r in range(k)] for s in range(k - 1)]

# %%
arrays = [nd.ones(4, ctx=d) * 10**r for r, d in enumerate(eight[:4])]  # one entry a chunk
for messages in reduce_scatter(4):
    run([messages], arrays, parts=4)
    print(*[a.asnumpy().astype(int).tolist() for a in arrays])

# %% [markdown]
# In round $s$ (from 0) rank $r$ sends chunk $r - s - 1$; from round 1 on that is the chunk to
# which it has just added its own part. After $k - 1$ rounds rank $r$ has the sum of chunk $r$, the
# 1111 on the diagonal. This is a collective of its own, *reduce-scatter*. For $k - 1$ more rounds
# the finished chunks go round and overwrite: *all-gather*.

# %%
def all_gather(k):
    return [[(r, (r + 1) % k, (r - s) % k, COPY) for r in range(k)] for s in range(k - 1)]


def ring(k):
    return reduce_scatter(k) + all_gather(k)

# %%
def ring_allreduce(arrays):
    run(ring(len(arrays)), arrays, parts=len(arrays))


run(all_gather(4), arrays, parts=4)
print(*[a.asnumpy().astype(int).tolist() for a in arrays])

# %% [markdown]
# So all-reduce = reduce-scatter + all-gather.
#
# | collective | before | after |
# | --- | --- | --- |
# | broadcast | rank 0 has an array | all have it |
# | reduce | each has an array | rank 0 has the sum |
# | reduce-scatter | each has an array | rank $r$ has chunk $r$ of the sum |
# | all-gather | rank $r$ has chunk $r$ | all have all chunks |
# | all-reduce | each has an array | all have the sum |
#
# ### Halving and doubling
#
# `powers_of_two` above exchanged whole arrays. Done with chunks, it is a reduce-scatter in $\log_2
# k$ rounds: send half of your chunks to a partner, then half of the rest to the next one. The
# all-gather runs it backwards.

# %%
def halving_doubling(k):  # k a power of two
    gaps = [2**i for i in range((k - 1).bit_length())]
    halving = [[(r, r ^ gap, c, ADD) for r in range(k) for c in range(k)
                if c % (2 * gap) == (r ^ gap) % (2 * gap)] for gap in gaps]
    return halving + [[(b, a, c, COPY) for a, b, c, _ in m] for m in reversed(halving)]

# %% [markdown]
# ### Two trees
#
# A tree takes few rounds, a ring sends few bytes. Two trees send little more than a ring, in a
# number of rounds that grows with $\log k$ and the number of chunks. Each tree carries half of the
# chunks. A leaf sends each chunk only once; the leaves of one tree are inner nodes of the other
# (for odd $k$, all but one). With several chunks, one can leave a device while another arrives
# (Sanders, Speck and Träff, 2009). `edges` builds a binary tree over the places 1 to $k$, with
# inner nodes at even places only; the second tree is the same, moved by one place.

# %%
def edges(first, last, parent=None):
    if first > last:
        return []
    root = max(range(first, last + 1), key=lambda place: place & -place)  # the "most even" one
    below = edges(first, root - 1, root) + edges(root + 1, last, root)
    return below + ([(root, parent)] if parent else [])


print("tree 1 (child, parent):", edges(1, 7))

# %% [markdown]
# `in_rounds` puts each message into the first round that is free for it. In a round a device sends
# to at most `ports` others and receives from as many. `due` holds the (device, chunk) pairs that an
# earlier message in the list still has to reach; such a chunk can't be sent on yet.

# %%
from collections import Counter


def in_rounds(messages, ports=1):
    rounds, waiting = [], list(messages)
    while waiting:
        now, later, due, busy = [], [], set(), Counter()
        for a, b, c, what in waiting:
            if busy["from", a] < ports and busy["to", b] < ports and (a, c) not in due:
                now.append((a, b, c, what))
                busy.update([("from", a), ("to", b)])
            else:
                later.append((a, b, c, what))
            due.add((b, c))
        rounds.append(now)
        waiting = later
    return rounds

# %% [markdown]
# *Star* is sum-then-broadcast; in *direct* every device sends each chunk straight to the rank that
# sums it, and gets the sum from there.

# %%
def double_tree(k, parts):
    ups, downs = [], []
    for c in range(parts):  # even chunks through one tree, odd ones through the other
        pairs = [((i - 1 - c % 2) % k, (j - 1 - c % 2) % k) for i, j in edges(1, k)]
        ups += [(a, b, c, ADD) for a, b in pairs]
        downs += [(b, a, c, COPY) for a, b in reversed(pairs)]
    return in_rounds(ups + downs)

# %%
def star(k, ports=1):
    up = [(r, 0, 0, ADD) for r in range(1, k)]
    return in_rounds(up + [(0, r, 0, COPY) for r in range(1, k)], ports)


def direct(k, ports=1):
    pairs = [(r, (r + s) % k) for s in range(1, k) for r in range(k)]
    out, back = [(a, b, b, ADD) for a, b in pairs], [(a, b, a, COPY) for a, b in pairs]
    return in_rounds(out + back, ports)


def double_tree_allreduce(arrays):
    run(double_tree(len(arrays), parts=8), arrays, parts=8)

# %% [markdown]
# A schedule must be *independent*, too: in a round nobody reads a chunk that is written, no chunk
# is overwritten twice (several may be added to one), and no device sends to, or receives from,
# more others than it has ports.

# %%
def independent(rounds, ports=1):
    for messages in rounds:
        read = {(a, c) for a, _, c, _ in messages}
        written = Counter((b, c) for _, b, c, _ in messages)
        pairs = {m[:2] for m in messages}
        busy = Counter(end for a, b in pairs for end in (("from", a), ("to", b)))
        twice = any(written[b, c] > 1 for _, b, c, what in messages if what == COPY)
        if read & set(written) or twice or max(busy.values(), default=0) > ports:
            return False
    return True

# %%
from functools import partial


def schedules(k):
    all_ = {"star": (star(k), 1), "tree": (tree(k), 1), "double tree": (double_tree(k, 8), 8),
            "ring": (ring(k), k), "direct": (direct(k), k)}
    return all_ | ({"halving": (halving_doubling(k), k)} if k & (k - 1) == 0 else {})


for k in range(1, 9):
    for name, (rounds, parts) in schedules(k).items():
        assert independent(rounds), f"{name} on {k} devices"
        all_reduce = partial(run, rounds, parts=parts)
        assert wrong_devices(all_reduce, k) == [], f"{name} on {k}"
print("right on 1 to 8 devices, halving on powers of two")

# %% [markdown]
# ## Who sends what, and when
#
# Solid blue: the receiver adds; dashed orange: it overwrites. An arrow's width is the size of its
# message.

# %%
import matplotlib.pyplot as plt
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

panels = {"star": (star(4), 1), "tree": (tree(4), 1), "ring": (ring(4), 4)}
fig, axes = plt.subplots(1, 3, figsize=(7, 3.4), sharey=True, layout="constrained")
for ax, (name, (rounds, parts)) in zip(axes, panels.items()):
    for row, messages in enumerate(rounds, 1):
        for a, b, _, what in messages:
            style = "-" if what == ADD else "--"
            arrow = {"arrowstyle": "->", "lw": 3 / parts, "ls": style, "shrinkA": 0, "shrinkB": 0,
                     "color": BLUE if what == ADD else ORANGE, "connectionstyle": "arc3,rad=-0.2"}
            ax.annotate("", (b, row), (a, row), arrowprops=arrow)
    ax.set(title=name, xlabel="rank", xlim=(-0.3, 3.3), ylim=(6.7, 0.3), xticks=range(4))
axes[0].set(ylabel="round", yticks=range(1, 7))
fig.suptitle("4 devices: a star takes 6 rounds of whole arrays, a tree 4, a ring 6 of quarters")
show(fig, alt="Arrows between four ranks, one line a round, solid where the receiver adds, "
              "dashed where it overwrites: star 6 rounds, tree 4, ring 6 with thin arrows.")

# %% [markdown]
# **Predict:** with arrays of $S$ bytes on $k$ devices, how many bytes does the *busiest* device
# send in a star, a tree and a ring?

# %%
def counted(rounds, parts, k, entries=840):  # a multiple of 1 to 8
    log.clear()
    run(rounds, [nd.ones(entries, ctx=d) for d in eight[:k]], parts)
    sent = [sum(size for a, _, size in log if a == r) / (4 * entries) for r in range(k)]
    return len(rounds), max(sent), sum(sent)

# %%
for name, (rounds, parts) in schedules(8).items():
    print("{:12} {:2} rounds, busiest sends {:.2f} S, all together {:.0f} S".format(
        name, *counted(rounds, parts, 8)))

# %% [markdown]
# With one message at a time per device, and for the double tree in all cases tried:
#
# | | rounds | busiest device sends |
# | --- | --- | --- |
# | star | $2(k-1)$ | $(k-1)\,S$ |
# | tree | $2\lceil\log_2 k\rceil$ | $\lceil\log_2 k\rceil\,S$ |
# | ring, direct | $2(k-1)$ | $2\frac{k-1}{k}\,S$ |
# | halving and doubling, $k$ a power of two | $2\log_2 k$ | $2\frac{k-1}{k}\,S$ |
# | double tree, $m$ (even) chunks, $k \ge 4$ | $2m$ to $3m + 4\lceil\log_2 k\rceil$ | $2\,S$ |

# %%
for k in range(2, 9):
    up, both = int(np.ceil(np.log2(k))), 2 * (k - 1)
    formula = {"star": (both, k - 1), "tree": (2 * up, up), "ring": (both, both / k),
               "direct": (both, both / k), "halving": (2 * up, both / k)}
    for name, (rounds, parts) in schedules(k).items():
        number, busiest, total = counted(rounds, parts, k)
        assert np.isclose(total, both), f"{name}: all together send 2(k - 1) S"
        if name in formula:
            assert np.allclose((number, busiest), formula[name]), f"{name} on {k} devices"
        elif k >= 4:
            assert 2 * parts <= number <= 3 * parts + 4 * up and busiest == 2, "double tree"
for k in (4, 16, 64):
    for m in (2, 16, 32):
        number, most = len(double_tree(k, m)), 3 * m + 4 * int(np.log2(k))
        assert 2 * m <= number <= most, f"double tree of {m} chunks on {k} devices"

# %% [markdown]
# As long as the devices do all the adding, the busiest must send at least $2\frac{k-1}{k}S$
# (Patarasuk and Yuan, 2009). Ring, direct, and halving and doubling reach it. (nccl-tests reports
# this number over the time as *bus bandwidth*.)
#
# ## Predicted times on three networks
#
# From a schedule we can compute a time. In the usual model a round takes a latency $\alpha$, plus
# its bytes over the bandwidth of the busiest link. Three networks, each as the links that a
# message passes:
#
# - *one switch*: each device has a link to it in each direction, PCIe 4.0 ×16 with 31.5 GB/s
#   (chapter 01). An A100 server with NVSwitch is like this, with about ten times the bandwidth;
# - *two switches*: half of the devices on each, and one such link between the two;
# - *all-to-all*, an assumption for any $k$: a link between every two devices. A device's 300 GB/s
#   in each direction, as the A100's NVLink has, are shared by its $k - 1$ links, and it can use
#   all of them at once.
#
# The latencies, 5.7 and 3.4 µs, are NCCL's for a step of a ring over PCIe and NVLink
# (`src/graph/tuning.cc` at 2.30.7, "Simple" protocol); we charge them to every scheme.

# %%
def one_switch(a, b, k):
    return {("up", a): 31.5e9, ("down", b): 31.5e9}  # bytes per second


def two_switches(a, b, k):
    sides = 2 * a // k, 2 * b // k
    between = {} if sides[0] == sides[1] else {("between", sides): 31.5e9}
    return one_switch(a, b, k) | between


def all_to_all(a, b, k):
    return {(a, b): 300e9 / (k - 1)}


ALPHA = {one_switch: 5.7e-6, two_switches: 5.7e-6, all_to_all: 3.4e-6}  # seconds a round

# %% [markdown]
# A schedule's time is the sum over its rounds.

# %%
def predicted(rounds, chunk, network, k):
    total = 0
    for messages in rounds:
        busy = Counter()  # link: seconds
        for a, b, _, _ in messages:
            for link, bandwidth in network(a, b, k).items():
                busy[link] += chunk / bandwidth
        total += ALPHA[network] + max(busy.values())
    return total

# %%
S, alpha, beta = 1e6, 5.7e-6, 1 / 31.5e9
for k in (2, 8, 64):
    formula = 2 * (k - 1) * (alpha + S / k * beta)
    assert np.isclose(predicted(ring(k), S / k, one_switch, k), formula), "a ring on one switch"

# %% [markdown]
# Schedules for 64 devices are checked with symbols: how often does a chunk contain each rank's
# part?

# %%
def complete(rounds, parts, k):
    contains = np.zeros((k, parts, k), dtype=int)  # [device, chunk, whose part]
    contains[range(k), :, range(k)] = 1
    for messages in rounds:
        for a, b, c, what in messages:
            contains[b, c] = contains[a, c] + (contains[b, c] if what == ADD else 0)
    return (contains == 1).all()

# %%
def predict_all(size, network, k):
    ports = k - 1 if network is all_to_all else 1
    candidates = [("star", star(k, ports), 1), ("tree", tree(k), 1), ("ring", ring(k), k),
                  ("halving", halving_doubling(k), k), ("direct", direct(k, ports), k),
                  *(("double tree", double_tree(k, parts), parts) for parts in (2, 4, 8, 16, 32))]
    assert all(complete(rounds, parts, k) for _, rounds, parts in candidates), "not the sum"
    assert all(independent(rounds, ports) for _, rounds, _ in candidates), "not at the same time"
    times = {}
    for name, rounds, parts in candidates:
        time = predicted(rounds, size / parts, network, k)
        times[name] = min(time, times.get(name, time))
    return times

# %% [markdown]
# **Predict:** on one switch, which is faster for 4 KB on 64 devices, the tree or the ring? And for
# 16 MB? What does the link between two switches change for *direct*?

# %%
MANY = [2, 4, 8, 16, 32, 64]
table = {(size, network): [predict_all(size, network, k) for k in MANY]
         for size in (4e3, 16e6) for network in ALPHA}
for (size, network), rows in table.items():
    best = [" = ".join(sorted(name for name in row if row[name] < 1.0001 * min(row.values())))
            for row in rows]
    print(f"{size / 1e3:6,.0f} KB, {network.__name__:12} best for k = 8: {best[2]}; 64: {best[5]}")
for size in (4e3, 16e6):
    times = table[size, one_switch][-1]
    print(f"{size / 1e3:6,.0f} KB, 64 devices, one switch: the tree takes "
          f"{times['tree'] / times['ring']:.2f} times as long as the ring")

# %%
fig, axes = plt.subplots(1, 3, figsize=(7, 3.4), sharey=True, layout="constrained")
looks = {"star": (GREY, "s-"), "tree": (ORANGE, "^--"), "double tree": (ORANGE, "v-"),
         "ring": (BLUE, "o-"), "halving": (BLUE, "d:"), "direct": (GREEN, "x-.")}
for ax, network in zip(axes, ALPHA):
    for name, (color, style) in looks.items():
        times = [1e3 * row[name] for row in table[16e6, network]]
        wide = {"lw": 4, "alpha": 0.5} if name == "ring" else {"lw": 1.5}
        ax.loglog(MANY, times, style, color=color, label=name, markersize=5, **wide)
    ax.set(title=network.__name__.replace("_", " "), xlabel="devices")
    ax.set_xticks(MANY, MANY)
    ax.minorticks_off()
axes[0].set_ylabel("predicted time (ms)")
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
fig.suptitle("16 MB: halving leads on one switch, a ring on two (up to 32), direct on all-to-all")
show(fig, alt="Predicted time against the number of devices for six schemes on three networks, on "
              "logarithmic axes.")

# %% [markdown]
# Small arrays pay for rounds: at 4 KB behind switches, the tree and halving take a tenth of the
# ring's time on 64 devices. Large ones pay for bytes:
#
# *One switch*: the tree takes 2.6 to 5.8 times as long as halving from 4 devices on.
#
# *Two switches*: more than half of *direct*'s messages (17 ms on 64 devices, not 1.7) and all of
# halving's two middle rounds share one link; in each round the ring sends one message over it in
# each direction, and it leads from 4 to 32 devices.
#
# *All-to-all*: one ring uses one of a device's links; several could use more, in $2(k-1)$ rounds
# where *direct* takes 2. Star, ring and halving lie within 12 % from 8 devices on.
#
# On 4 to 64 devices, powers of two, the double tree never leads at these two sizes; on 48, on one
# switch, it takes 0.6 of the ring's time for 2 MB. The model leaves out the time to add, and any
# overlap with computation.

# %%
def leads(name, network, size=16e6, ks=MANY[1:]):
    rows = dict(zip(MANY, table[size, network]))
    return all(rows[k][name] < 1.0001 * min(rows[k].values()) for k in ks)


assert leads("halving", one_switch) and leads("direct", all_to_all), "the title"
assert leads("ring", two_switches, ks=[4, 8, 16, 32]), "the title"
assert not leads("ring", two_switches, ks=[64]), "the title"
ratio = [row["tree"] / row["halving"] for row in table[16e6, one_switch][1:]]
assert (round(min(ratio), 1), round(max(ratio), 1)) == (2.6, 5.8), "the tree against halving"
assert all(10 < table[4e3, network][-1]["ring"] / table[4e3, network][-1][name] < 11
           for network in (one_switch, two_switches) for name in ("tree", "halving")), "a tenth"
assert [round(1e3 * table[16e6, network][-1]["direct"], 1)
        for network in (two_switches, one_switch)] == [17.0, 1.7], "direct, 64 devices"
near = [[row[name] for name in ("star", "ring", "halving")] for row in table[16e6, all_to_all][2:]]
assert all(max(times) < 1.12 * min(times) for times in near), "within 12 %"
assert not any(leads("double tree", n, s, [k]) for s, n in table for k in MANY[1:]), "never"
both = [min(predicted(double_tree(48, m), 2e6 / m, one_switch, 48) for m in (4, 8, 16)),
        predicted(ring(48), 2e6 / 48, one_switch, 48)]
assert round(both[0] / both[1], 1) == 0.6, "double tree, 48 devices"

# %% [markdown]
# **NCCL**, NVIDIA's library under PyTorch's DDP, chooses between schemes by a model like this one
# (`src/graph/tuning.cc`). Its all-reduce has rings, several at once on different links, and since
# version 2.4 double binary trees between machines, with a chain of GPUs inside each (Jeaugey,
# 2019; `src/graph/connect.cc`). It can also let the network add: between machines by SHARP, if
# `NCCL_COLLNET_ENABLE=1`, and since 2.17 in NVLink switches from Hopper on. There a device sends
# $(1 + \frac1k)S$ (NVIDIA/nccl #1083), less than the bound above from $k = 4$ on.

# %% [markdown]
# ## On this machine
#
# Now we measure, on two devices, and compare with MXNet's own all-reduce: a *key-value store*
# (KVStore), in which `push` adds up a list of arrays and `pull` hands the sum to every device;
# `pushpull` does both. Chapter 07 takes it apart.

# %%
stores = {}  # one a case: MXNet 1.9.1 may crash if later more devices push to a key than at first


def kvstore_allreduce(arrays):
    case = tuple(str(a.context) for a in arrays), arrays[0].shape, np.dtype(arrays[0].dtype).name
    if case not in stores:
        stores[case] = mx.kvstore.create("device")
        stores[case].init("sum", arrays[0].zeros_like())
    stores[case].pushpull("sum", arrays)

# %%
for k in range(1, 9):
    assert wrong_devices(kvstore_allreduce, k) == [], f"KVStore, on {k} devices"

# %% [markdown]
# Four of ours and KVStore, fifteen times in random order, with arrays from 4 KB to 16.4 MB.
# **Predict:** on two devices, which of ours sends the same messages as sum-then-broadcast?

# %% tags=["measured"]
import time
from functools import cache

tree, ring, double_tree = map(cache, (tree, ring, double_tree))  # built once, in the warm-up
two, order = devices(2), np.random.default_rng(0)
schemes = [allreduce, tree_allreduce, ring_allreduce, double_tree_allreduce, kvstore_allreduce]
sizes = [1000 * 4**i for i in range(7)]  # entries of 4 bytes
times = np.zeros((15, len(schemes), len(sizes)))
for n, entries in enumerate(sizes):
    arrays = [nd.zeros(entries, ctx=d) for d in two]
    for turn in range(-2, 15):  # the first two warm up
        for s in order.permutation(len(schemes)):
            nd.waitall()
            start = time.perf_counter()
            schemes[s](arrays)
            nd.waitall()
            times[max(turn, 0), s, n] = time.perf_counter() - start

# %% [markdown]
# Two medians differ *beyond the noise*, we say, if the middle halves of their repetitions don't
# overlap.

# %% tags=["measured"]
low, middle, high = np.percentile(times, (25, 50, 75), axis=0)  # [scheme, size] each


def fastest(n):
    near = low[:, n] <= high[middle[:, n].argmin(), n]
    return ", ".join(f.__name__.replace("_allreduce", "") for f, x in zip(schemes, near) if x)


for f, row in zip(schemes, middle):
    print(f"{f.__name__:22} 4 KB {row[0] * 1e6:4.0f} µs    16.4 MB {row[-1] * 1e3:5.2f} ms")
print(f"fastest, or slower only within the noise:\n4 KB: {fastest(0)}\n16.4 MB: {fastest(-1)}")

# %% tags=["measured"]
kind = "GPUs" if two[0].device_type == "gpu" else "simulated devices"
fig, ax = figure(f"Fastest within the noise at 4 KB: {fastest(0)};\nat 16.4 MB: {fastest(-1)}",
                 f"size of each array (bytes), two {kind}", "median and middle half (ms)")
styles = ["o-", "s--", "^:", "v-.", "x-"]
for s, (f, style, color) in enumerate(zip(schemes, styles, (BLUE, ORANGE, GREEN, ORANGE, GREY))):
    spread = 1e3 * np.array([middle[s] - low[s], high[s] - middle[s]])
    ax.errorbar(4 * np.array(sizes), 1e3 * middle[s], spread, fmt=style, color=color,
                label=f.__name__, capsize=3)
ax.set(xscale="log", yscale="log")
fig.legend(loc="outside lower center", ncols=3, fontsize=8)
show(fig, alt="Time of an all-reduce against array size on logarithmic axes for five schemes, with "
              "bars from the first to the third quartile.")

# %% [markdown]
# The tree sends the same two messages, but through `run`, in more lines of Python. The ring sends
# four halves, the double tree sixteen eighths: for small arrays, more messages take longer. We
# haven't separated calls from waiting. Simulated devices share one memory, so this shows nothing
# about separate links.
#
# ## Order matters to the last bit
#
# In floating point $(a + b) + c$ need not be $a + (b + c)$. **Predict:** for random float32
# numbers, do our schemes give the same bits? And within one scheme, do all devices?

# %%
values = np.random.default_rng(0).standard_normal((8, 1000)).astype("float32")
results = {}
for all_reduce in schemes[:-1]:
    arrays = [nd.array(v, ctx=d) for v, d in zip(values, eight)]
    all_reduce(arrays)
    results[all_reduce.__name__] = first = arrays[0].asnumpy()
    assert all((a.asnumpy() == first).all() for a in arrays), "replicas differ"
for name, result in results.items():
    away = np.abs(result / results["allreduce"] - 1)
    print(f"{name:22} differs from allreduce in {(away > 0).sum():3} of 1000, "
          f"by up to {away.max():.0e}")

# %% [markdown]
# Schemes add in different orders, and round differently in hundreds of entries. Within each of
# ours all devices agree to the bit, because each number is summed in one place and then copied. So
# replicas that start equal and make the same update stay equal.
#
# **On GPUs:** KVStore `device` is a sum-then-broadcast, with different keys on different GPUs
# (`CommDevice` in `src/kvstore/comm.h`, MXNet 1.9.1). `MXNET_KVSTORE_USETREE=1` asks for trees
# (`comm_tree.h`), which the CPU build lacks. The `nccl` store calls `ncclReduce` and then
# `ncclBcast` (`kvstore_nccl.h`).

# %% [markdown]
# ## Summary
#
# - All-reduce leaves the sum on every device, in the arrays that were there. A test holds on to
#   those arrays, looks at every rank for many $k$, and uses values that tell ranks and entries
#   apart.
# - All-reduce = reduce + broadcast = reduce-scatter + all-gather.
# - With one message at a time per device, star and ring take $2(k-1)$ rounds; tree and
#   halving-doubling take $2\lceil\log_2 k\rceil$. From 3 devices on, star, tree and double tree
#   send more than $2\frac{k-1}{k}S$ from the busiest one.
# - In the model, small arrays pay for rounds and large ones for bytes; which scheme is best
#   depends on the network and on $k$.
# - Schemes differ by rounding; within each of ours the devices agree.
#
# **Further reading.** P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full
# bandwidth broadcast, reduction and scan", *Parallel Computing* 35 (2009); P. Patarasuk and X.
# Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", *JPDC* 69 (2009);
# S. Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4", NVIDIA (2019).

# %% [markdown]
# ## Exercises
#
# 1. **Mean instead of sum.** A colleague's all-reduce returns the mean, so that "the learning rate
#    need not change". Write `mean_allreduce` from `ring_allreduce`. Which learning rate gives the
#    same update as the sum? What does `wrong_devices` say of it?
# 2. **One buffer.** A network has many small gradients. Write `fused_allreduce(groups,
#    all_reduce)`, which takes a list of arrays for each device and calls `all_reduce` once. How
#    many messages does it save for 8 arrays on 2 devices with the ring?
# 3. **Your own scheme (open).** Six devices, three on each of two switches, with one link between
#    the switches. Write a schedule that takes fewer rounds than the ring. Let the judge and
#    `independent` pass it, and say for which sizes `predicted` finds it faster than the others.

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
    for a in arrays:
        a /= len(arrays)


for k in range(2, 9):
    held = replicas(k)
    mean_allreduce(list(held))  # a copy of the list: rebinding its entries must not pass
    total = (3**k - 1) // 2 * replicas(1)[0].asnumpy()
    assert all(np.allclose(k * a.asnumpy(), total) for a in held), "the mean"
    assert wrong_devices(mean_allreduce, k) == list(range(k)), "a mean is not a sum"

# %% [markdown]
# ### Answer 2
#
# Flatten and join what each device has, all-reduce once, and write the pieces back. Eight rings of
# 4 messages become one: 28 messages fewer. PyTorch's DDP calls such a buffer a *bucket* (chapter
# 14). In the check, `list` sums nothing: then each device must get its own buffer back.

# %% tags=["solution"]
def fused_allreduce(groups, all_reduce):
    buffers = [nd.concat(*[a.reshape(-1) for a in group], dim=0) for group in groups]
    all_reduce(buffers)
    for group, buffer in zip(groups, buffers):
        start = 0
        for a in group:
            a[:] = buffer[start : start + a.size].reshape(a.shape)
            start += a.size


base = [(10 * n + nd.arange(2 * n)).reshape((2, n)) for n in range(1, 9)]
log.clear()
_ = [ring_allreduce([a.copyto(d) for d in eight[:2]]) for a in base]
assert len(log) == 32, "eight rings of four messages"
for all_reduce, factors, messages in ((list, [1, 2], 0), (ring_allreduce, [3, 3], 4),
                                      (list, [1, 2, 3], 0), (ring_allreduce, [6, 6, 6], 12)):
    groups = [[(r + 1) * a.copyto(eight[r]) for a in base] for r in range(len(factors))]
    log.clear()
    fused_allreduce([list(group) for group in groups], all_reduce)  # copies, as above
    assert all((a.asnumpy() == factor * b.asnumpy()).all()
               for group, factor in zip(groups, factors) for a, b in zip(group, base)), "values"
    assert len(log) == messages, "one ring, whatever the number of arrays"

# %% [markdown]
# ### Answer 3
#
# A good answer passes both checks, and gives the sizes for which it is faster than ring and tree,
# and by how much. One scheme: reduce-scatter within each switch, exchange each chunk with the
# partner on the other one, all-gather within each switch. It takes 6 rounds, where the ring takes
# 10, and is the fastest up to 430 KB, but not from 440 KB on.

# %% tags=["solution"]
def two_levels():
    def around(step, what):
        return [[(g + r, g + (r + 1) % 3, (r - s - step) % 3, what)
                 for g in (0, 3) for r in range(3)] for s in range(2)]

    exchange = [[(r + 3, r, r, ADD) for r in range(3)], [(r, r + 3, r, COPY) for r in range(3)]]
    return around(1, ADD) + exchange + around(0, COPY)


assert wrong_devices(lambda arrays: run(two_levels(), arrays, 3), 6) == [], "not the sum"
def ahead(size):
    others = [predicted(rounds, size / parts, two_switches, 6)
              for rounds, parts in schedules(6).values()]
    return predicted(two_levels(), size / 3, two_switches, 6) < min(others)


assert independent(two_levels()) and len(two_levels()) == 6 < len(ring(6)) == 10, "six rounds"
assert all(map(ahead, (1e3, 64e3, 430e3))) and not ahead(440e3), "where it is faster"
