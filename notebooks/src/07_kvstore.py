# %% [markdown]
# # 07 · KVStore: where the sum happens
#
# In chapter 06 one call, `trainer.step`, summed the gradients and updated every replica. It uses
# MXNet's *key-value store*. This chapter opens it: who adds up, on which device, who updates the
# weights, and what that costs in memory.
#
# ## What you'll do
#
# Push and pull by hand, let a store train, watch what `Trainer` leaves to it, find out which device
# owns which parameter, and count the bytes.
#
# ## What you'll learn
#
# - `init`, `push`, `pull` and an optimizer in the store;
# - when the store updates the weights and when the devices do, and how to tell;
# - which device sums which parameter, and why one big embedding fills a device before the others;
# - what `device`, `local` and `nccl` take on each device, and when to leave the default.
#
# ## What you need
#
# Chapters 03 to 06. No GPU. Reading takes {reading time}, running 10 to 30 seconds.

# %% tags=["measured"]
import time

from helpers import allreduce, devices, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

two = devices(2)
data = load_data("mnist", limit=1280)
print(data)

# %% [markdown]
# ## Push and pull
#
# A store holds an array for each *key*. `init` gives a key its first value. `push` takes a list
# with an array from each device and stores their **sum**. `pull` copies what is stored into a list
# of arrays, wherever they are. As in chapter 03, device $r$ pushes $r + 1$ times the numbers 1 to
# 6.
#
# **Predict:** the key starts at 7, and two devices push twice before they pull. Do they get the sum
# of one push, of both, or of both and the 7?

# %%
four = [mx.cpu(r) for r in range(4)]
pair = four[:2]


def ranked(k):
    return [nd.arange(1, 7, ctx=d) * (r + 1) for r, d in enumerate(four[:k])]  # k × [6]

# %%
store, pushed = mx.kvstore.create("device"), ranked(2)
store.init(0, nd.full(6, 7))
pulled = [nd.zeros(6, ctx=d) for d in pair]
for _ in range(2):
    store.push(0, pushed)
store.pull(0, out=pulled)
print("pulled", *(a.asnumpy().tolist() for a in pulled))
print("pushed", *(a.asnumpy().tolist() for a in pushed))

# %% [markdown]
# A push *replaces* what was there. It leaves the pushed arrays alone, so push and pull are an
# all-reduce only if you pull into the same arrays. `pushpull` without `out` does that. Is it right
# on every device? As in chapter 03, we hold on to the arrays, so that a store that rebinds them
# fails the check, and push $3^r$ times 2000.5, 2001.5, …, so that no sum that misses an array or
# counts one twice gives the same numbers.

# %%
def assert_all(arrays, answer, rule, tolerance=0):
    assert arrays and all(a.shape == np.shape(answer) for a in arrays), rule
    for a in arrays:
        off = np.abs(a.asnumpy() - answer).max()
        assert off <= tolerance, f"{a.context} is off by {off}: {rule}"

# %%
for kind in ("local", "device"):
    for k in range(1, 5):
        store, first = mx.kvstore.create(kind), 2000.5 + np.arange(6)
        arrays = [nd.array(3**r * first, ctx=d) for r, d in enumerate(four[:k])]
        same = list(arrays)
        store.init("sum", arrays[0])
        for again in (1, k):  # the second time it sums the sums
            store.pushpull("sum", arrays)
            assert_all(same, again * (3**k - 1) / 2 * first, f"the sum of {k} arrays by {kind}")
print("local and device: the exact sum in every array, 1 to 4 devices, twice")

# %% [markdown]
# Each $k$ got a store of its own. A key's first push from several devices fixes how many buffers it
# has (`CommDevice::Reduce`, `src/kvstore/comm.h`). A later push from more devices runs past them,
# and may end the process without an error.
#
# ## A store that trains
#
# With an *optimizer* in the store, what is stored are weights and what is pushed are gradients: a
# push updates the weights once, with the sum. **Predict:** SGD with learning rate 0.5 and momentum
# 0.5, two pushes of gradients with the sum $g$ = 3, 6, …, 18, weights of zero to start with. How
# many $g$ are subtracted?

# %% tags=["trains"]
store, weights = mx.kvstore.create("device"), ranked(2)
store.init(0, nd.zeros(6))
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5))
for _ in range(2):
    store.pushpull(0, ranked(2), out=weights)
print(weights[1].asnumpy().tolist())

# %% [markdown]
# First $0.5 g$, then $0.5 g + 0.5 \cdot 0.5 g$:

# %%
assert_all(weights, -1.25 * 3 * np.arange(1, 7), "two steps of SGD with momentum")

# %% [markdown]
# ## What Trainer does with it
#
# `Trainer` gives each parameter a key, and at first broadcasts the first device's weights to the
# others. Then either the store updates, or the devices do:
#
# | | `update_on_kvstore=True` | `update_on_kvstore=False` |
# | --- | --- | --- |
# | pushed | gradients | gradients |
# | in the store | optimizer, weights | the sum |
# | pulled | **weights** | **sums of gradients** |
# | the update runs | once, on the stored weights | on each device, on its replica |
#
# To see it, take a parameter $w$ with two entries and on device $r$ the loss $c_r \cdot w$, so that
# the gradient there is $c_r$: $(6, 0)$ and $(0, 8)$. The learning rate is 1.

# %% tags=["trains"]
def differentiate(w):
    with autograd.record():
        losses = [(w.data(d) * nd.array(c, ctx=d)).sum() for d, c in zip(pair, ([6, 0], [0, 8]))]
    autograd.backward(losses)


def tiny(momentum=0, **options):
    w = gluon.Parameter("w", shape=(2,), init="zeros")
    w.initialize(ctx=pair)
    differentiate(w)
    return w, gluon.Trainer([w], "sgd", {"learning_rate": 1, "momentum": momentum}, **options)

# %% [markdown]
# **Predict:** after `step(1)`, what does each device hold as weight, and as *gradient*, in either
# mode?

# %% tags=["trains"]
def after_step(**options):
    w, trainer = tiny(**options)
    trainer.step(1)
    return [[a.asnumpy().astype(int).tolist() for a in f()] for f in (w.list_data, w.list_grad)]

# %% tags=["trains"]
for options in ({"update_on_kvstore": True}, {"update_on_kvstore": False}, {"kvstore": None}):
    weights, gradients = after_step(**options)
    print(f"{options}: weights {weights}, gradients {gradients}")

# %% [markdown]
# With the update in the store, `grad` stays local after `step`: if you log its norm, you log one
# shard's. And `kvstore=None` sums nothing: two replicas become two models, with no error.
#
# The two modes also differ if you write to the weights. **Predict:** after a step you set all
# weights to 100. Does the next step start from there? And does `set_data` do the same as writing in
# place? With a momentum of 0.5, the second step should subtract $1.5 \cdot (6, 8)$.

# %% tags=["trains"]
def second_step(choice, write, **options):
    w, trainer = tiny(momentum=0.5, update_on_kvstore=choice, **options)
    trainer.step(1)
    write(w)
    differentiate(w)
    trainer.step(1)
    return [a.asnumpy().astype(int).tolist() for a in w.list_data()]


def in_place(w):
    for a in w.list_data():
        a[:] = 100

# %% tags=["trains"]
for choice in (True, False):
    assert after_step(update_on_kvstore=choice)[0] == [[-6, -8]] * 2, "minus the sum, on both"
    print(f"update_on_kvstore={choice}: in place {second_step(choice, in_place)[0]},",
          f"set_data {second_step(choice, lambda w: w.set_data(nd.full(2, 100)))[0]}")

# %% [markdown]
# With `False` both are right: (91, 88). With the update in the store, the weights are the store's,
# and the next step overwrites what you wrote: it ends at $-2.5 \cdot (6, 8)$, as if nothing had
# been written. `set_data` makes the Trainer set up its store again (`gluon/parameter.py`). If you
# gave the store by name, it makes a new one, which gets the weights but has lost the optimizer's
# state of *all* parameters: (94, 92). With a store *object* the next step raises, since its keys
# exist.

# %% tags=["trains"]
def set_to_100(w):
    w.set_data(nd.full(2, 100))


assert second_step(False, in_place) == second_step(False, set_to_100) == [[91, 88]] * 2
assert second_step(True, in_place) == [[-15, -20]] * 2, "what was written is lost"
assert second_step(True, set_to_100) == [[94, 92]] * 2, "the momentum is lost"
try:
    second_step(True, set_to_100, kvstore=mx.kvstore.create("device"))
except mx.MXNetError as error:
    assert "duplicate init" in str(error), "its keys exist"
else:
    raise AssertionError("a store object can't be set up twice")

# %% [markdown]
# ### What is chosen for you
#
# The default is `kvstore="device"`, and `update_on_kvstore=None` means "you choose". Since
# `allreduce_grads` refuses where the store updates, we can ask. Embeddings can have *sparse*
# gradients, which list only the rows that were used; in `SparseEmbedding` the weights are sparse
# too.

# %%
def updates_in_store(parameters, **options):
    trainer = gluon.Trainer(parameters, "sgd", **options)
    try:
        trainer.allreduce_grads()
    except AssertionError:
        return True
    nd.waitall()  # a local store must not be deleted with a sum pending (CommCPU::Reduce, comm.h)
    return False

# %%
def dense(entries, places=pair):
    parameter = gluon.Parameter("p", shape=(entries,), init="zeros", dtype="int8")
    parameter.initialize(ctx=places)
    return [parameter]


def table(layer):
    layer.initialize(ctx=pair)
    return layer.collect_params()

# %% [markdown]
# **Predict** the first three lines: does the store update?

# %%
import os

os.environ.pop("MXNET_UPDATE_ON_KVSTORE", None)  # 0 would turn it off
found = {
    "1 device": updates_in_store(dense(2, pair[:1])),
    "2 devices": updates_in_store(dense(2)),
    "local": updates_in_store(dense(2), kvstore="local"),
    "local, 2^24 entries": updates_in_store(dense(2**24), kvstore="local"),
    "local, more than 2^24 entries": updates_in_store(dense(2**24 + 1), kvstore="local"),
    "device, more than 2^24 entries": updates_in_store(dense(2**24 + 1)),
    "sparse gradients": updates_in_store(table(nn.Embedding(9, 4, sparse_grad=True))),
    "sparse weights": updates_in_store(table(gluon.contrib.nn.SparseEmbedding(9, 4))),
}
for case, in_store in found.items():
    print(f"{case:32}{'the store' if in_store else 'each device'}")
assert [*found.values()] == [0, 1, 1, 1, 0, 1, 0, 1], "as MXNet 1.9.1 chooses"

# %% [markdown]
# The rules, in `_init_kvstore` (`gluon/trainer.py`) and `_create_kvstore` (`model.py`), for a store
# given by its name: on one device and with dense weights, none is made. With the name `local`, one
# parameter of more than $2^{24}$ entries leaves *all* updates to the devices. With dense weights
# and sparse gradients the devices update. Sparse weights are always updated in a store. Where
# weights and gradients are dense, `update_on_kvstore=True` on *one* device ends in an
# `AttributeError`; ask for it only with several.
#
# ### The weights don't depend on it
#
# A small network with momentum, in float64. We take twenty steps on one device with no store, and
# compare them with twelve other ways, and with `kvstore=None` on two devices.

# %% tags=["trains"]
images, labels = data.train_images[:1280], data.train_labels[:1280]
images = (images - images.mean()).astype("float64")
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def network(places, dtype="float64"):
    net = nn.Sequential()
    net.add(nn.Dense(32, activation="relu", in_units=784), nn.Dense(10, in_units=32))
    net.cast(dtype)
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=places)
    return net

# %% tags=["trains"]
def backward(net, x, y, places):
    shards = zip(*(split_and_load(nd.array(a, dtype=a.dtype), places) for a in (x, y)))
    with autograd.record():
        losses = [softmax(net(x), y) for x, y in shards]
    autograd.backward(losses)
    return np.concatenate([loss.asnumpy() for loss in losses]).mean()

# %% [markdown]
# The appendix passes its own `step`. MXNet keeps learning rate and momentum in float32; these
# values are exact there.

# %% tags=["trains"]
used = []  # the store of each training, and whether it updated


def train(places, step=lambda net, trainer: trainer.step(64), steps=20, dtype="float64",
          momentum=0.875, **options):
    net, losses = network(places, dtype), []
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.0625, "momentum": momentum}, **options)
    for first in range(0, 64 * steps, 64):
        x, y = (a[first % 1280 :][:64] for a in (images.astype(dtype), labels))
        losses.append(backward(net, x, y, places))
        step(net, trainer)
    nd.waitall()  # before the store goes
    used.append((trainer._kvstore, trainer._update_on_kvstore))
    return net, losses

# %%
def apart(net, reference):
    pairs = [(replica.asnumpy(), q.list_data()[0].asnumpy())
             for p, q in zip(net.collect_params().values(), reference.collect_params().values())
             for replica in p.list_data()]
    return np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs])

# %% [markdown]
# Twelve of the thirteen should agree with one device:

# %% tags=["trains"]
reference, losses = train(four[:1])
assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), "compare while the loss falls"
for k in (1, 2, 4):
    for kind in ("local", "device"):
        for choice in (True, False):
            store = mx.kvstore.create(kind)  # by name there would be none for k = 1
            net, _ = train(four[:k], kvstore=store, update_on_kvstore=choice)
            far = apart(net, reference)
            assert far < 1e-12, f"{k} devices, {kind}, {choice}: {far} from one device"
            assert used[-1] == (store, choice), "the options must be those that were used"

# %% tags=["measured", "trains"]
lost = apart(train(pair, kvstore=None)[0], reference)
print(f"twelve ways: equal to 1e-12. kvstore=None: {lost:.2f} apart")
assert lost > 0.01, "the check must notice devices that don't communicate"

# %% [markdown]
# So with SGD, a new gradient on each device in each step, and nobody else writing to the weights,
# the choice doesn't change them. Say `False` if you do something between the sum and the
# update, such as clipping by the norm (appendix), write to the weights yourself, or want an error
# where a device has no new gradient (chapter 05).
#
# ## Which device owns which parameter?
#
# The device that adds up a key's arrays is its *owner*. MXNet's tutorial says that `device` hands
# the network's blocks to the devices round-robin. We can watch: an optimizer is called with the
# sum, and an array knows its context.

# %%
where = {}  # key -> (where the stored weight is, where the sum is)


class Spy(mx.optimizer.Optimizer):
    def update(self, index, weight, grad, state):
        where[index] = weight.context, grad.context

# %%
def owners(sizes, k, kind="device"):
    where.clear()
    store = mx.kvstore.create(kind)
    store.set_optimizer(Spy())
    for key, size in enumerate(sizes):
        store.init(key, nd.zeros(size))
    for key, size in enumerate(sizes):
        store.push(key, [nd.zeros(size, ctx=mx.cpu(r)) for r in range(k)])
    nd.waitall()
    return [where[key][1] for key in range(len(sizes))]

# %% [markdown]
# Eight keys on four devices. **Predict**, with round-robin, which device sums which.

# %%
sizes = [5, 100, 30, 60, 10, 50, 7, 9]
print("device:", *owners(sizes, 4))
print("local: ", *sorted({str(place) for place in owners(sizes, 4, "local")}))
print("devise:", *sorted({str(place) for place in owners(sizes, 4, "devise")}))

# %% [markdown]
# With `local` the host sums; `cpu_pinned` is host memory, page-locked for copies to GPUs. The
# misspelt `devise` is a `local` store too, with no error: MXNet looks for `device`, `dist` and
# `nccl` in the name, and takes everything else as local (`src/kvstore/kvstore.cc`).
#
# `device` isn't round-robin. At the first push it goes through the keys from the largest to the
# smallest and gives each to the device that has the fewest entries so far
# (`CommDevice::InitMergeBuffer`, `src/kvstore/comm.h`). In Python:

# %%
def largest_first(sizes, k):
    load, owner = [0] * k, {}
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        owner[key] = load.index(min(load))
        load[owner[key]] += sizes[key]
    return [owner[key] for key in range(len(sizes))], load

# %% [markdown]
# Between keys of equal size, and between devices with equal loads, the source leaves the order
# open. That changes who owns what, but not how large the loads are. So we compare those, in 40
# random cases with up to eight devices.

# %%
def loads(owner, sizes, k):  # entries of each device, sorted
    return sorted(sum(n for n, d in zip(sizes, owner) if d == mx.cpu(r)) for r in range(k))


rng, round_robin = np.random.default_rng(0), 0
for _ in range(40):
    k = int(rng.integers(2, 9))
    chosen = rng.integers(1, 30, size=rng.integers(k, 25)).tolist()
    found = loads(owners(chosen, k), chosen, k)
    assert found == sorted(largest_first(chosen, k)[1]), f"{chosen} on {k} devices"
    round_robin += found == loads([mx.cpu(key % k) for key in range(len(chosen))], chosen, k)
assert loads(owners(sizes, 4), sizes, 4) == sorted(largest_first(sizes, 4)[1])
print("loads as predicted in 40 of 40 cases; round-robin would have them in", round_robin)

# %% [markdown]
# ### Where the update runs
#
# `where` also has the place of the stored weights, here always the host:

# %%
owners(sizes, 4)
assert {place for place, _ in where.values()} == {mx.Context("cpu_pinned", 0)}
print("stored weights:", *{str(place) for place, _ in where.values()})

# %% [markdown]
# **On GPUs** the first push copies a key's weights to its owner, and the optimizer makes its state
# there (`KVStoreLocal::PushImpl`, `src/kvstore/kvstore_local.h`). So with the update in the store,
# each GPU keeps the optimizer state of *its* parameters only, updates these, and sends the new
# weights to the others. That is the idea of *ZeRO stage 1* (chapter 16), which
# divides optimizer state by entries, and so evenly. PyTorch's `ZeroRedundancyOptimizer` gives whole
# parameters to ranks, as MXNet does, also the largest first.
#
# The `nccl` store sums with NVIDIA's library, and its owner is always the first device
# (`KVStoreNCCL::InitMergeBuffer`, `src/kvstore/kvstore_nccl.h`). So there the first GPU holds all
# stored weights and optimizer state, if the store updates. MXNet's build for CPUs doesn't have it:
# `create("nccl")` raises.
#
# ## What it costs in memory
#
# A `device` store first copies all devices' arrays to the owner, and adds them there. It holds a
# buffer for the sum and $k - 1$ for the copies (`CommDevice::Reduce`; the `nccl` store only has the
# first). MXNet's profiler counts each device's bytes, with one CPU counter for each core. So we
# stay on two devices, and name them twice for more arrays.

# %%
import json
import tempfile

from helpers.device import cores

folder = tempfile.mkdtemp()
mx.profiler.set_config(profile_memory=True, aggregate_stats=True, filename=folder + "/p.json")

# %%
def counters(reset=False):  # the least and the most that each device has counted, in kB
    found = json.loads(mx.profiler.dumps(reset, "json"))["Memory"]["Device Storage"]
    return [found.get(f"Memory: {d.device_type}/{d.device_id}", {"Min": 0, "Max": 0}) for d in pair]


def kilobytes(sizes, kind, k=2, prepare=lambda store: None):
    places = [pair[r % 2] for r in range(k)]
    keys, grads = list(range(len(sizes))), [[nd.ones(n, ctx=d) for d in places] for n in sizes]
    nd.waitall()
    mx.profiler.set_state("run")
    store = mx.kvstore.create(kind)
    prepare(store)
    store.init(keys, [grad[0] for grad in grads])
    store.push(keys, grads)
    nd.waitall()
    del store  # freed while the profiler counts, so that the next count begins at zero
    deadline = time.monotonic() + 30
    while any(device["Min"] for device in counters()) and time.monotonic() < deadline:
        time.sleep(0.01)  # not back at zero: the engine frees arrays a little later
    mx.profiler.set_state("stop")
    return [device["Max"] for device in counters(reset=True)]

# %% [markdown]
# **Predict:** keys of 1,000, 2,000 and 5,000 entries of 4 bytes on two devices. How many kilobytes
# does the store take on each?

# %%
three = [1000, 2000, 5000]
print("predicted:", [2 * 4 * entries // 1000 for entries in largest_first(three, 2)[1]], "kB")
if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host
    for k in (2, 3, 4):
        expected = sorted(k * 4 * entries // 1000 for entries in largest_first(three, 2)[1])
        assert sorted(kilobytes(three, "device", k)) == expected, "k arrays on each key's owner"
        assert kilobytes(three, "local", k) == [0, 0], "local takes nothing on the devices"

# %% [markdown]
# In all, `device` takes $k$ times the model. On $k$ devices, an even split would put one more model
# on each. But this store doesn't cut a parameter. A text model
# with 20,000 words of 64 numbers and three dense layers, and a real `Trainer` with the spy as its
# optimizer:

# %% tags=["trains"]
text = nn.Sequential()
text.add(nn.Embedding(20_000, 64), nn.Dense(512, activation="relu"),
         nn.Dense(512, activation="relu"), nn.Dense(10))
text.initialize(ctx=four)
with autograd.record():
    losses = [text(nd.ones((2, 8), ctx=d)).sum() for d in four]
autograd.backward(losses)
where.clear()
parameters = list(text.collect_params().values())
gluon.Trainer(parameters, Spy()).step(8)
nd.waitall()

# %%
sizes = [int(np.prod(p.shape)) for p in parameters]
owner, load = largest_first(sizes, 4)
seen = [where[key][1] for key in range(len(sizes))]
assert loads(seen, sizes, 4) == sorted(load) and seen.count(seen[0]) == 1, "the embedding's alone"
for p, size, place in zip(parameters, sizes, seen):
    print(f"{str(p.shape):12} {size:9,} entries, {place}")

# %% [markdown]
# With $k$ arrays of each key on its owner, as measured:

# %%
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

MB = 4 / 1e6  # an entry of float32
replica, buffers = 2 * sum(sizes) * MB, 4 * np.array(load) * MB
ratio = (replica + buffers.max()) / (replica + buffers.min())
fig, ax = figure(f"The embedding's owner holds {ratio:.1f} times what the last device holds",
                 "device", "MB on each device (computed)")
ax.bar(range(4), [replica] * 4, color=GREY, label="weights and gradients")
ax.bar(range(4), buffers, bottom=replica, color=ORANGE, hatch="//", edgecolor="white",
       label="buffers of the store")
ax.axhline(replica + buffers.mean(), color=BLUE, ls="--",
           label="total per device, if buffers were even")
ax.set_xticks(range(4))
ax.legend()
show(fig, alt="Bars for four devices: weights and gradients are equal, most of the buffers are on "
     "device 0, far above the dashed line of even shares.")

# %% [markdown]
# **Predict:** with eight devices, does the embedding's owner hold less, as much, or more?

# %%
alone = owners(sizes, 8)
assert alone.count(alone[0]) == 1, "it still owns the embedding and nothing else"
print(f"buffers of the owner: {4 * sizes[0] * MB:.1f} MB with four devices, "
      f"{8 * sizes[0] * MB:.1f} with eight")

# %% [markdown]
# More: an array for each device. Activations are not in the figure. **On GPUs**, with the update in
# the store, the owner also holds the stored weights, and the optimizer's state. The tutorial warns
# of a first GPU with 90 % of its memory in use where the others use 50 %. Shards are equal, so the
# fullest device limits the batch for all. If you can't make the batch smaller, `kvstore="local"`
# moves the buffers to the host: gradients travel there, and weights back. (For a parameter above
# $2^{24}$ entries add `update_on_kvstore=True`, or each device updates, and holds all optimizer
# state.) Exercise 1 has another way. (Simulated devices share the host's memory; on them `local`
# saves nothing.)
#
# ## `local` against `device`, in seconds
#
# Both, and chapter 03's all-reduce. That one makes two copies and a sum; the stores make four
# copies and a sum. We call one scheme slower than another if the middle halves of their times don't
# overlap.

# %% tags=["measured"]
def through(kind):
    stores = {}

    def reduce(arrays):
        size = arrays[0].size
        if size not in stores:
            stores[size] = mx.kvstore.create(kind)
            stores[size].init(0, arrays[0])
        stores[size].pushpull(0, arrays)
    return reduce

# %% tags=["measured"]
schemes = {"device": through("device"), "local": through("local"), "chapter 03": allreduce}
entries = [2**p for p in range(10, 23, 2)]
times, order = np.zeros((len(schemes), len(entries), 16)), np.random.default_rng(0)
for column, size in enumerate(entries):
    arrays = [nd.zeros(size, ctx=d) for d in two]
    for turn in range(-2, 16):  # the first two warm up
        for row in order.permutation(len(schemes)):
            nd.waitall()
            begin = time.perf_counter()
            [*schemes.values()][row](arrays)
            nd.waitall()
            if turn >= 0:
                times[row, column, turn] = 1e3 * (time.perf_counter() - begin)

# %% [markdown]
# Both axes are logarithmic:

# %% tags=["measured"]
low, middle, high = np.percentile(times, (25, 50, 75), axis=-1)  # [scheme, size]
limits = high[middle.argmin(axis=0), range(len(entries))]  # of the fastest scheme
fastest = [[name for name, least in zip(schemes, column) if least <= limit]
           for column, limit in zip(low.T, limits)]
small, large = (f"{names[0]} is fastest" if len(names) == 1 else "no clear winner"
                for names in (fastest[0], fastest[-1]))
fig, ax = figure(f"At {1e3 * entries[0] * MB:.0f} KB {small}; at {entries[-1] * MB:.0f} MB {large}",
                 "MB on each device", "milliseconds (median, middle half)")
for row, (name, color, style) in enumerate(zip(schemes, (BLUE, ORANGE, GREY), ("s-", "o--", "^:"))):
    spread = [middle[row] - low[row], high[row] - middle[row]]
    ax.errorbar(np.array(entries) * MB, middle[row], spread, fmt=style, color=color, label=name,
                capsize=3)
ax.set(xscale="log", yscale="log")
fig.legend(loc="outside lower center", ncols=3)
show(fig, alt="Milliseconds against megabytes for the two stores and chapter 03's all-reduce.")

# %% tags=["measured"]
for size, names in zip(entries, fastest):
    print(f"{size * MB:7.3f} MB: fastest, or not slower beyond the noise: {', '.join(names)}")

# %% [markdown]
# In our runs chapter 03 is slower than `device` for small arrays. Calls from Python may be why;
# but `local` needs no more calls than `device` and can be slower too. Here everything goes through
# the same host memory, so this says nothing about GPUs.

# %% [markdown]
# ## Appendix: between the sum and the update
#
# ### Clipping
#
# If the norm of all gradients together is above $c$, *clipping* multiplies them by $c /
# \text{norm}$. What has to be clipped is the gradient of the whole batch, and that exists only
# after the sum. `allreduce_grads` and `update` are the two halves of `step`, for
# `update_on_kvstore=False`. The sum of `tiny`, $(6, 8)$, has length 10; clipped to 5, it should
# give the weights $(-3, -4)$.

# %% tags=["trains"]
def clip(grads, most):
    norm = sum((grad * grad).sum() for grad in grads).sqrt()
    for grad in grads:
        grad *= nd.minimum(most / norm, 1)
    return norm

# %% tags=["trains"]
w, trainer = tiny(update_on_kvstore=False)
trainer.allreduce_grads()
for grad in w.list_grad():
    clip([grad], 5)
trainer.update(1)
assert_all(w.list_data(), [-3, -4], "half as long, the same direction", 1e-6)
short = nd.array([3, 4])
clip([short], 10)
assert_all([short], [3, 4], "a short gradient stays")

# %% [markdown]
# If each device clips its own gradient before the sum:

# %% tags=["trains"]
w, trainer = tiny()
for grad in w.list_grad():
    clip([grad], 5)
trainer.step(1)
print("clipped before the sum:", w.data(pair[1]).asnumpy().tolist())

# %% [markdown]
# Too long, and in another direction. What is clipped is a *sum* over images, which `update(n)` then
# divides by n: for a limit c on the mean's gradient, clip at c·n. For a network, each device clips
# its own copy of *all* sums by one factor. (With all devices' copies in one list, the norm comes
# out $\sqrt k$ times too large.) The oracle is Gluon's `clip_global_norm` on one device:

# %% tags=["trains"]
def clipped(net, trainer):
    trainer.allreduce_grads()
    for grads in zip(*(p.list_grad() for p in net.collect_params().values())):
        clip(grads, 20)
    trainer.update(64)


def gluons(net, trainer):
    grads = [p.grad() for p in net.collect_params().values()]
    norms.append(gluon.utils.clip_global_norm(grads, 20, check_isfinite=False).asscalar())
    trainer.step(64)

# %% tags=["trains"]
norms = []
one, _ = train(four[:1], step=gluons, dtype="float32")
assert min(norms) > 20, "gradients below the limit would test nothing"
assert apart(train(four, step=clipped, dtype="float32", update_on_kvstore=False)[0], one) < 1e-4
net, _ = train(four, step=clipped, update_on_kvstore=False)
assert apart(net, train(four[:1], step=clipped, update_on_kvstore=False)[0]) < 1e-12
assert apart(net, reference) > 0.01, "without clipping it is another training"

# %% [markdown]
# ### Compression
#
# With `{"type": "2bit", "threshold": t}` each entry goes to the owner as $-t$, 0 or $+t$: two bits
# for 32. What comes back is not compressed. Each device keeps the rest in a *residual*, and adds it
# to its next gradient (Seide et al., 2014, do so with one bit). In NumPy:

# %%
def two_bits(grad, residual, threshold):
    residual += grad
    sent = threshold * ((residual >= threshold) * 1.0 - (residual <= -threshold) * 1.0)
    residual -= sent
    return sent

# %%
compression = {"type": "2bit", "threshold": 0.5}
grads = np.array([[0.375, 0.5, -0.125, 1.25], [0.25, -0.375, -0.125, 0]], dtype="float32")
store = mx.kvstore.create("device")
store.set_gradient_compression(compression)
store.init(0, nd.zeros(4))
results, residual, pulled = [], np.zeros_like(grads), [nd.zeros(4, ctx=d) for d in pair]
for _ in range(8):
    store.pushpull(0, [nd.array(g, ctx=d) for g, d in zip(grads, pair)], out=pulled)
    results.append(sum(two_bits(g, res, 0.5) for g, res in zip(grads, residual)))
    assert_all(pulled, results[-1], "three values for each device, and a residual")
for i, row in enumerate(np.transpose(results)):
    print(f"true {grads[:, i].sum():6.3f}: got {row.tolist()}, mean {row.mean():.3f}")
missing = 8 * grads.sum(axis=0) - np.sum(results, axis=0)
assert (missing == residual.sum(axis=0)).all(), "what has not arrived is in the residuals, exactly"

# %% [markdown]
# A device can send at most $t$ of an entry in each push. The last one, 1.25, needs more, and its
# residual grows. What is pushed is the gradient of a shard's *summed* loss, so $t$ has to fit that.
# It costs memory: on each device a residual as large as the model, and on the owner one more
# buffer of each key (`CommDevice::ReduceCompressed`), beside small ones for what is sent.

# %%
if cores() >= 2:
    more = kilobytes(three, "device", prepare=lambda s: s.set_gradient_compression(compression))
    plain = kilobytes(three, "device")
    extra = [b - a - 4 * sum(three) / 1000 - a / 2 for a, b in zip(plain, more)]
    assert all(0 <= kilo < 5 for kilo in extra), "a residual, a buffer, and a little"

# %% [markdown]
# `local` has no compression and raises an error. Exercise 3 trains with compression.

# %% [markdown]
# ## Summary
#
# - Push stores the sum over devices, pull copies to all. With an optimizer in the store, gradients
#   go in and weights come out.
# - On several devices `Trainer` lets a `device` store update: gradients stay local, and weights
#   that you write in place are lost. Where weights are dense and gradients sparse, the devices
#   update.
# - Eight ways to sum and update on two and four devices train the weights of one device;
#   `kvstore=None` doesn't sum.
# - `device` gives each parameter an owner, the largest first. The owner holds $k$ buffers of its
#   size, and on GPUs also stored weights and optimizer state. One big embedding makes that uneven;
#   `local` takes it off the devices.
# - Clip after the sum, each device its own copy.
#
# Next, chapter 08: ResNet-18.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*, "Advanced topic";
# S. Rajbhandari et al., *ZeRO: memory optimizations toward training trillion parameter models*
# (2020), arXiv:1910.02054; F. Seide et al., *1-bit stochastic gradient descent* (Interspeech
# 2014).

# %% [markdown]
# ## Exercises
#
# 1. **Cut the embedding.** Write a block with four embeddings of 5,000 words that computes what one
#    of 20,000 does, gradients included. What share of the entries does the busiest of four devices
#    own now? Check with `owners`.
# 2. **Stop and go on.** Train ten steps on two devices with momentum, save the parameters and, with
#    `trainer.save_states`, the optimizer's. Load both into a new network and trainer and train ten
#    more. Are the weights those of twenty steps in one go? And without the states?
# 3. **The threshold.** Train the small network in float32 without momentum, without compression and
#    with thresholds of 0.01, 1 and 10, for 64 steps. Which comes closest, and why?

# %% [markdown]
# ### Answer 1
#
# Word $w$ is in row $w \bmod 5000$ of table $\lfloor w / 5000 \rfloor$. Each table looks all words
# up, and counts only for its own.

# %% tags=["solution"]
class FourTables(nn.Block):
    def __init__(self):
        super().__init__()
        self.tables = nn.Sequential()
        self.tables.add(*(nn.Embedding(5000, 64) for _ in range(4)))

    def forward(self, words):
        table, row = nd.floor(words / 5000), words % 5000
        return sum(t(row) * (table == i).expand_dims(-1) for i, t in enumerate(self.tables))


whole, parts = nn.Embedding(20_000, 64), FourTables()
whole.initialize(mx.init.Normal())
parts.initialize()
for i, part in enumerate(parts.tables):
    part.weight.set_data(whole.weight.data()[5000 * i : 5000 * (i + 1)])

# %% tags=["solution"]
words = nd.array([0, 4999, 5000, 12_345, 12_345, 19_999])
for net in (whole, parts):
    with autograd.record():
        out = net(words)
        loss = (out * nd.arange(6).expand_dims(1)).sum()
    loss.backward()
assert (parts(words) == whole(words)).asnumpy().all(), "the same rows"
grads = nd.concat(*(part.weight.grad() for part in parts.tables), dim=0)
assert (grads == whole.weight.grad()).asnumpy().all(), "and the same gradients"
cut = [5000 * 64] * 4 + sizes[1:]
load = loads(owners(cut, 4), cut, 4)
print("share of the busiest:", f"{max(load) / sum(load):.1%}, before: {sizes[0] / sum(sizes):.1%}")

# %% [markdown]
# ### Answer 2
#
# With the states they are equal. Without them momentum starts from zero again.

# %% tags=["solution", "trains"]
def resume(steps, weights=False, states=False):
    net = network(pair)
    if weights:
        net.load_parameters(folder + "/weights", ctx=pair)
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 0.0625, "momentum": 0.875})
    if states:
        trainer.load_states(folder + "/states")
    for step in steps:
        backward(net, images[64 * step :][:64], labels[64 * step :][:64], pair)
        trainer.step(64)
    return net, trainer

# %% tags=["solution", "trains"]
net, trainer = resume(range(10))
net.save_parameters(folder + "/weights")
trainer.save_states(folder + "/states")
assert apart(resume(range(10, 20), weights=True, states=True)[0], reference) < 1e-12
assert apart(resume(range(10, 20), weights=True)[0], reference) > 1e-3, "momentum was lost"

# %% [markdown]
# ### Answer 3
#
# Threshold 1. With 0.01 each of two devices sends at most 0.01 of an entry. After 64 steps no
# weight has moved by more than 64 · 2 · 0.01 / 64 · 0.0625 = 0.00125. With 10, we guess, most
# entries wait in the residual for many steps.

# %% tags=["solution", "measured", "trains"]
late = {}
for threshold in (None, 0.01, 1, 10):
    options = {"compression_params": {"type": "2bit", "threshold": threshold}} if threshold else {}
    _, losses = train(pair, steps=64, dtype="float32", momentum=0, **options)
    late[threshold] = np.mean(losses[-16:])
print("mean loss of the last 16 steps:", *(f"{name}: {loss:.2f};" for name, loss in late.items()))
assert late[None] < late[1] < min(late[10], late[0.01]), late
