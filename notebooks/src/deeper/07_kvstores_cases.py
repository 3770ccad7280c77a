# %% [markdown]
# # Deeper · KVStore's cases
#
# Chapter 07 showed two ways to update. Either the store does it, or each device. Which one does
# `Trainer` take, and when? Does training depend on it? And what happens to a program that does
# something between the sum and the update?
#
# ## What you'll do
#
# Ask `Trainer` in eight cases, train one network in twelve ways, write to weights in two, see
# where each kind of store sums, time two of them, clip gradients, and compress them.
#
# ## What you'll learn
#
# - by which rules `Trainer` chooses;
# - that with SGD the trained weights don't depend on the store or on who updates;
# - what `set_data` does to an optimizer's state;
# - what `local`, `nccl`, `MXNET_KVSTORE_USETREE` and misspelt names stand for;
# - how to clip the gradient of a whole batch, and what 2-bit compression sends.
#
# ## What you need
#
# Chapter 07. No GPU. Reading takes {reading time}, running less than half a minute. The sections
# stand by themselves, except that clipping and the exercise use the network of *Does training
# depend on it?*, and compression the counter of *Memory, counted*.

# %% tags=["measured"]
import os

import helpers

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

four = [mx.cpu(rank) for rank in range(4)]
pair = four[:2]
data = helpers.load_data("mnist", limit=1280)
print(data)

# %% [markdown]
# ## Which way does Trainer choose?
#
# `allreduce_grads` is refused where the store updates, so we can ask it. A dense parameter, on two
# devices or on one:

# %%
def store_updates(parameters, **options):
    trainer = gluon.Trainer(parameters, "sgd", **options)
    try:
        trainer.allreduce_grads()
    except AssertionError:
        return True
    nd.waitall()  # a local store must not go with a sum pending (CommCPU::Reduce, comm.h)
    return False


def dense(entries, devices=pair):
    parameter = gluon.Parameter("p", shape=(entries,), init="zeros", dtype="int8")
    parameter.initialize(ctx=devices)
    return [parameter]

# %% [markdown]
# Embeddings can have *sparse* gradients, which list only the rows of words that were seen. In
# `SparseEmbedding` the weights are sparse too.

# %%
def table(layer):
    layer.initialize(ctx=pair)
    return layer.collect_params()


# %% [markdown]
# **Predict** the first three lines: who updates?

# %%
os.environ.pop("MXNET_UPDATE_ON_KVSTORE", None)  # 0 would turn the default off
cases = {
    "1 device": store_updates(dense(2, pair[:1])),
    "2 devices": store_updates(dense(2)),
    "local": store_updates(dense(2), kvstore="local"),
    "local, 2^24 entries": store_updates(dense(2**24), kvstore="local"),
    "local, more than 2^24 entries": store_updates(dense(2**24 + 1), kvstore="local"),
    "device, more than 2^24 entries": store_updates(dense(2**24 + 1)),
    "sparse gradients": store_updates(table(nn.Embedding(9, 4, sparse_grad=True))),
    "sparse weights": store_updates(table(gluon.contrib.nn.SparseEmbedding(9, 4))),
}
for case, in_store in cases.items():
    if in_store:
        print(f"{case:32}the store")
    else:
        print(f"{case:32}each device")
assert list(cases.values()) == [False, True, True, True, False, True, False, True]

# %% [markdown]
# The rules are in `Trainer._init_kvstore` (`gluon/trainer.py`) and `_create_kvstore` (`model.py`),
# for a store that is given by its name:
#
# - On one device with dense weights there is no store.
# - With the name `local`, one parameter of more than $2^{24}$ entries leaves *all* updates to the
#   devices. Then each device holds the whole optimizer state. If you take `local` to save memory on
#   the devices, say `update_on_kvstore=True`.
# - With dense weights and sparse gradients the devices update.
# - Sparse weights are always updated in a store.
# - `MXNET_UPDATE_ON_KVSTORE=0` in the environment turns the default off, for dense weights and
#   gradients.
#
# And where there is no store to update in, asking for it is answered late and badly:

# %% tags=["fold"]
# check: update_on_kvstore=True on one device is an AttributeError; the environment's 0 counts
try:
    store_updates(dense(2, pair[:1]), update_on_kvstore=True)
    raise RuntimeError("update_on_kvstore=True on one device should fail")
except AttributeError as error:
    print("on one device:", error)
os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
assert not store_updates(dense(2)), "0 in the environment leaves the update to the devices"
another = gluon.contrib.nn.SparseEmbedding(9, 4)
assert store_updates(table(another)), "but not of sparse weights"
del os.environ["MXNET_UPDATE_ON_KVSTORE"]

# %% [markdown]
# Ask for `update_on_kvstore=True` only with several devices. It also decides what happens to a
# device that has no new gradient. Where the devices update, this is an error, before a weight has
# changed. In a store it is one only if that device has never had a gradient, and then after the
# update (chapter 05).
#
# ## Does training depend on it?
#
# A small network, trained with momentum for twenty steps in float64. MXNet keeps learning rate and
# momentum in float32, so we take values that are exact there.

# %%
images = data.train_images[:1280].astype("float64")
images = images - images.mean()
labels = data.train_labels[:1280]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.0625, "momentum": 0.875}


def small_network(devices, dtype="float64"):
    net = nn.Sequential()
    net.add(nn.Dense(32, activation="relu", in_units=784))
    net.add(nn.Dense(10, in_units=32))
    net.cast(dtype)
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=devices)
    return net

# %% [markdown]
# One backward pass, of the batch with this number:

# %%
def backward_of_batch(net, number, devices, dtype="float64"):
    first = 64 * number % 1280
    x = nd.array(images[first : first + 64], dtype=dtype)
    y = nd.array(labels[first : first + 64])
    x_shards = helpers.split_and_load(x, devices)
    y_shards = helpers.split_and_load(y, devices)
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))  # a number for each image
    autograd.backward(losses)
    return np.mean([loss.mean().asscalar() for loss in losses])

# %% [markdown]
# And the training. The options are passed on to `Trainer`.

# %%
def train_small(devices, **options):
    net = small_network(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, **options)
    losses = []
    for number in range(20):
        losses.append(backward_of_batch(net, number, devices))
        trainer.step(64)
    nd.waitall()
    return net, losses, trainer


def replicas_of(net, devices):
    replicas = []
    for device in devices:
        replicas.append([parameter.data(device) for parameter in net.collect_params().values()])
    return replicas

# %% [markdown]
# The oracle is one device without a store. We compare all parameters on all devices with it, in
# twelve ways: two kinds of store, two ways to update, and 1, 2 or 4 devices. **Predict:** how large
# is the largest difference?

# %% tags=["trains", "measured"]
from helpers.compare import largest_difference

net, losses, _ = train_small(four[:1])
whole = replicas_of(net, four[:1])[0]
print(f"one device: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")

differences = []
for k in [1, 2, 4]:
    for kind in ["local", "device"]:
        for in_store in [True, False]:
            store = mx.kvstore.create(kind)  # by its name there would be none for k = 1
            net, _, trainer = train_small(four[:k], kvstore=store, update_on_kvstore=in_store)
            assert trainer._kvstore is store and store.type == kind, "another store"
            assert trainer._update_on_kvstore == in_store, "the other way to update"
            differences.append(largest_difference(replicas_of(net, four[:k]), whole))
            assert differences[-1] < 1e-12, f"{k} devices, {kind}, in the store: {in_store}"
print(f"{len(differences)} ways: the largest difference from one device is {max(differences)}")

# %% tags=["fold", "trains"]
# check: the oracle's loss falls; devices that don't sum, and one weight that differs, are noticed
assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), "compare while the loss falls"
net, _, _ = train_small(pair, kvstore=None)
assert largest_difference(replicas_of(net, pair), whole) > 0.01, "nothing was summed"
net, _, _ = train_small(pair)
last = list(net.collect_params().values())[-1].data(pair[1])
last += 1
assert largest_difference(replicas_of(net, pair), whole) > 0.01, "the second device isn't looked at"

# %% [markdown]
# Only rounding. With SGD, a new gradient on each device in each step, and nobody else writing to
# the weights, the choice doesn't change them.
#
# ## Writing to the weights
#
# In chapter 07 a weight that was written in place was lost where the store updates. `set_data`
# makes `Trainer` set up its store again (`Parameter.set_data` in `gluon/parameter.py`). Is all well
# then? We use momentum 0.5, so that the optimizer has a state. The weight is 100, its gradients are
# 1 and 20, and between two steps all weights become 1000.

# %% tags=["trains"]
def write_in_place(weight):
    for replica in weight.list_data():
        replica[:] = 1000


def write_by_set_data(weight):
    weight.set_data(nd.array([1000]))


def step_write_step(write, **options):
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
    weight.initialize(ctx=pair)
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1, "momentum": 0.5}, **options)
    for number in range(2):
        with autograd.record():
            losses = [1 * weight.data(pair[0]), 20 * weight.data(pair[1])]
        autograd.backward(losses)
        trainer.step(1)
        if number == 0:
            write(weight)
    return [replica.asscalar() for replica in weight.list_data()]

# %% [markdown]
# The second step subtracts 21, and half of what the first step subtracted: 31.5 in all. So it
# should end at 968.5. **Predict** the four results.

# %% tags=["trains"]
for in_store in [True, False]:
    for write in [write_in_place, write_by_set_data]:
        weights = step_write_step(write, update_on_kvstore=in_store)
        print(f"update_on_kvstore={in_store!s:5} {write.__name__:17} {weights}")

# %% tags=["fold", "trains"]
# check: the numbers above and in the text; a store object can't be set up a second time
assert step_write_step(write_in_place, update_on_kvstore=True) == [100 - 21 - 31.5] * 2, "lost"
assert step_write_step(write_by_set_data, update_on_kvstore=True) == [1000 - 21] * 2, "no momentum"
for write in [write_in_place, write_by_set_data]:
    assert step_write_step(write, update_on_kvstore=False) == [1000 - 31.5] * 2, "right"
try:
    step_write_step(write_by_set_data, kvstore=mx.kvstore.create("device"))
except mx.MXNetError as error:
    assert "duplicate init" in str(error), "its keys exist"
else:
    raise RuntimeError("a store object can't be set up twice")

# %% [markdown]
# Where the devices update, both are right. Where the store updates:
#
# - in place, what you wrote is lost: 100 − 21 − 31.5 = 47.5;
# - by `set_data`, the weight arrives, but the new store has lost the optimizer's state of *all*
#   parameters: 1000 − 21 = 979.
#
# If you gave `Trainer` a store *object*, the next step after `set_data` raises, since the keys
# exist. So a program that writes to its weights should say `update_on_kvstore=False`.
#
# ## Kinds of store
#
# Which device sums, and where is the stored weight? An optimizer is called with both, so we send a
# spy, as in chapter 07. A store's name decides. **Predict:** what are stores of the misspelt kinds
# `devise` and `devices`?

# %%
class SpyOnBoth(mx.optimizer.Optimizer):
    """Changes no weight. Notes where each key's sum and its stored weight are."""

    def __init__(self):
        super().__init__()
        self.sum_on = {}
        self.weight_on = {}

    def update(self, index, weight, grad, state):
        self.sum_on[index] = str(grad.context)
        self.weight_on[index] = str(weight.context)


def spy_on(kind):
    spy = SpyOnBoth()
    store = mx.kvstore.create(kind)
    store.set_optimizer(spy)
    for key in range(8):
        store.init(key, nd.zeros(10 + key))
    for key in range(8):
        store.push(key, [nd.zeros(10 + key, ctx=device) for device in four])
    nd.waitall()
    return spy


for kind in ["device", "local", "devise", "devices"]:
    spy = spy_on(kind)
    print(f"{kind}: sums on {sorted(set(spy.sum_on.values()))}, "
          f"weights on {sorted(set(spy.weight_on.values()))}")

# %% tags=["fold"]
# check: the kinds' places; a GPU library's store isn't in the CPU build
everywhere = {"cpu(0)", "cpu(1)", "cpu(2)", "cpu(3)"}
on_the_host = {"cpu_pinned(0)"}
for kind, expected in [("device", everywhere), ("devices", everywhere),
                       ("local", on_the_host), ("devise", on_the_host)]:
    spy = spy_on(kind)
    assert set(spy.sum_on.values()) == expected, kind
    assert set(spy.weight_on.values()) == {"cpu_pinned(0)"}, kind
try:
    mx.kvstore.create("nccl")
except mx.MXNetError as error:
    assert "compile with USE_NCCL=1" in str(error)
else:
    raise RuntimeError("this build has nccl: say so in the text")

# %% [markdown]
# `cpu_pinned` is host memory; builds for GPUs lock its pages for copies. With `local` the host
# sums. No misspelt name is an error: MXNet looks for `dist`, `device` and `nccl` in it, so
# `devices` is a `device` store, and takes every other name as local, so `devise` is one of these
# (`KVStore::Create` in `src/kvstore/kvstore.cc`).
#
# On the GPUs of one machine there are two more. We have read them, not run them:
#
# **`nccl`** sums with NVIDIA's library, and its sums are always made on the first device
# (`KVStoreNCCL::InitMergeBuffer` in `src/kvstore/kvstore_nccl.h`). So if the store updates, the
# first GPU holds all stored weights and all optimizer state. It needs one buffer for a sum, and
# none for copies. MXNet's build for CPUs doesn't have it.
#
# **`MXNET_KVSTORE_USETREE=1`** in the environment makes a `device` store add along binary trees,
# chosen by how the GPUs are linked (`CommDeviceTree` in `src/kvstore/comm_tree.h`). The sums of
# all keys that aren't cut end on the first GPU, the root of the tree. So with the update in the
# store it holds their weights and the optimizer's state, as with `nccl`. The buffers are spread:
# each GPU has one for every key and, where it adds, another for a copy. That is up to two arrays
# of each key on each GPU, where `device` has $k$ arrays on one. So an embedding's buffers no
# longer fill one GPU, but the GPUs together hold up to half as much again. Keys above
# `MXNET_KVSTORE_TREE_ARRAY_BOUND` (10,000,000 entries), and with at least $2k$ rows, are cut by
# rows, and each piece has a tree of its own. By our reading, such a key is safe only with
# `update_on_kvstore=False`. `Reduce` gives the store's optimizer the first GPU's own gradient, and
# `Broadcast` hands out the sum of gradients, whatever is stored.
#
# A build for CPUs takes no notice of the variable (`KVStoreLocal` in `kvstore_local.h`):

# %% tags=["fold"]
# check: with MXNET_KVSTORE_USETREE=1 a CPU store has the same owners, and the sums are right
from helpers.schedules import wrong_ranks


def by_new_store(arrays):
    store = mx.kvstore.create("device")
    store.init("sum", arrays[0])
    store.pushpull("sum", arrays)


owners_before = spy_on("device").sum_on
os.environ["MXNET_KVSTORE_USETREE"] = "1"
owners_with_trees = spy_on("device").sum_on
assert wrong_ranks(by_new_store, [nd.arange(9, ctx=device) * 3**device.device_id
                                  for device in four]) == []
del os.environ["MXNET_KVSTORE_USETREE"]
print("the same owners:", owners_with_trees == owners_before)
assert owners_with_trees == owners_before

# %% [markdown]
# ## Memory, counted
#
# Chapter 07 said that a `device` store holds $k$ arrays of each key on its owner. With MXNet's
# profiler we count for two, three and four. (It has a counter for each CPU core, so we stay on two
# devices, and arrays beyond two are on them as well.)

# %% tags=["fold", "measured"]
# measure: the kilobytes that a store takes on each of two devices, for 2, 3 and 4 arrays a key
from helpers.device import cores
from helpers.stores import kilobytes

SIZES = [1000, 2000, 5000]  # the largest on one device, the two others on the other
if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host
    for arrays_a_key in [2, 3, 4]:
        by_device = kilobytes(SIZES, "device", arrays_a_key)
        by_local = kilobytes(SIZES, "local", arrays_a_key)
        print(f"{arrays_a_key} arrays a key: device {by_device} kB, local {by_local} kB")
        expected = [arrays_a_key * 4 * 5000 / 1000, arrays_a_key * 4 * 3000 / 1000]
        assert by_device == expected, "as many arrays of each key on its owner"
        assert by_local == [0, 0], "local takes nothing on the devices"

# %% [markdown]
# (The host's memory is counted apart, though here it is the same memory.)
#
# For each array a key that is 20 kB on one device, for 5,000 entries, and 12 kB on the other, for
# 1,000 + 2,000; and nothing on the devices with `local`.
# The buffers are made at the first push of a key, one for the sum and one for each further array
# (`CommDevice::Reduce` in `src/kvstore/comm.h`). So push to a key always from the same number of
# devices: a later push from more may end the process without an error.
#
# ## `local` against `device`, in seconds
#
# Which one is faster on simulated devices? We time both for seven sizes, beside `allreduce` of
# chapter 03. That one makes two copies and a sum; the stores make four copies and a sum. Each is
# called once a round, in a random order. We put one *before* another if it was faster, and the
# middle halves of their times don't overlap.
#
# %% tags=["fold", "measured", "few:ROUNDS = 16=>ROUNDS = 4"]
# measure: milliseconds of device, local and allreduce on two devices, for 4 KB to 17 MB
from functools import partial

from helpers.timing import in_turns, spread

ROUNDS = 16
two = helpers.devices(2)


def store_for(kind, array):
    store = mx.kvstore.create(kind)
    store.init(0, array)
    return store


spreads = {}  # by name and megabytes, in milliseconds
for entries in [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]:
    arrays = [nd.zeros(entries, ctx=device) for device in two]
    contestants = {"allreduce": partial(helpers.allreduce, arrays)}
    for kind in ["device", "local"]:
        contestants[kind] = partial(store_for(kind, arrays[0]).pushpull, 0, arrays)
    times = in_turns(contestants, rounds=ROUNDS)
    for name, seconds in times.items():
        spreads[name, 4 * entries / 1e6] = spread(1e3 * seconds)

# %% tags=["fold", "measured"]
# measure: medians, and which is faster than which, by middle halves that don't overlap
NAMES = ["device", "local", "allreduce"]
sizes_mb = sorted({size for _, size in spreads})


def who_is_faster(size):
    parts = []
    for other in NAMES:
        faster = [name for name in NAMES if spreads[name, size].high < spreads[other, size].low]
        if faster:
            parts.append(f"{' and '.join(faster)} before {other}")
    return ", ".join(parts) or "spreads overlap"


for size in sizes_mb:
    medians = ", ".join(f"{name} {spreads[name, size].median:5.2f} ms" for name in NAMES)
    print(f"{size:6.3f} MB: {medians}; {who_is_faster(size)}")

# %% tags=["fold", "measured"]
# draw: milliseconds against megabytes
from helpers.plotting import curves, show

title = (f"{1e3 * sizes_mb[0]:.0f} KB: {who_is_faster(sizes_mb[0])}; "
         f"{sizes_mb[-1]:.0f} MB: {who_is_faster(sizes_mb[-1])}")
lines = {}
for name in NAMES:
    rows = [spreads[name, size] for size in sizes_mb]
    lines[name] = (sizes_mb, [row.low for row in rows], [row.median for row in rows],
                   [row.high for row in rows])
fig, ax = curves(title, "MB on each device", "milliseconds (median, middle half)", lines,
                 logx=True, logy=True)
show(fig, alt="Milliseconds against megabytes for the two stores and chapter 03's allreduce.")

# %% [markdown]
# In our runs both stores were faster than `allreduce` for small arrays, and close to each other.
# Calls from Python may be why: `allreduce` makes three, a store one. It also checks its arguments,
# and makes a new array each time. We haven't tested which counts. For the largest arrays the order
# changed from run to run. (In five new processes `allreduce` was the faster one for 16 MB: deeper:
# All-reduce against the clock.)
#
# Everything here goes through the same host memory, so this says nothing about GPUs.
#
# ## Clipping between the sum and the update
#
# If the norm of all gradients together is above a limit, *clipping* multiplies them by limit /
# norm. What has to be clipped is the gradient of the whole batch, and that exists only after the
# sum. So it belongs between the halves of `step`, with `update_on_kvstore=False`.
#
# Our example has one parameter with two numbers, and the gradients (6, 0) on one device and (0, 8)
# on the other. The sum (6, 8) has the norm 10. Clipped to 5 it is (3, 4).

# %% tags=["trains"]
def two_numbers(**options):
    weight = gluon.Parameter("weight", shape=(2,), init="zeros")
    weight.initialize(ctx=pair)
    with autograd.record():
        first = (weight.data(pair[0]) * nd.array([6, 0], ctx=pair[0])).sum()
        second = (weight.data(pair[1]) * nd.array([0, 8], ctx=pair[1])).sum()
    autograd.backward([first, second])
    return weight, gluon.Trainer([weight], "sgd", {"learning_rate": 1}, **options)


def clip_by_norm(grads, limit):
    """Multiply arrays of one device by one factor, so that their norm is at most `limit`."""
    squares = 0
    for grad in grads:
        squares = squares + (grad * grad).sum()
    norm = squares.sqrt()
    factor = nd.minimum(limit / norm, 1)
    for grad in grads:
        grad *= factor

# %% tags=["trains"]
weight, trainer = two_numbers(update_on_kvstore=False)
trainer.allreduce_grads()
for grad in weight.list_grad():
    print("sum:    ", grad.asnumpy(), "on", grad.context)
    clip_by_norm([grad], limit=5)
    print("clipped:", grad.asnumpy(), "on", grad.context)
trainer.update(1)
print("weights:", weight.data(pair[0]).asnumpy())

# %% [markdown]
# **Predict:** what if each device clips its own gradient, before the sum?

# %% tags=["trains"]
weight, trainer = two_numbers()
for grad in weight.list_grad():
    clip_by_norm([grad], limit=5)
    print("clipped:", grad.asnumpy(), "on", grad.context)
trainer.step(1)
print("weights:", weight.data(pair[0]).asnumpy())

# %% [markdown]
# Too long, and in another direction. (5, 5) isn't a multiple of (6, 8).
#
# What is clipped is a *sum* over images, and `update(n)` divides it by n afterwards. For a limit
# $c$ on the mean's gradient, clip at $c \cdot n$. In a network, each device clips its own copy of
# *all* sums by one factor:

# %%
def clipped_step(net, trainer, devices):
    trainer.allreduce_grads()
    for device in devices:
        grads = [parameter.grad(device) for parameter in net.collect_params().values()]
        clip_by_norm(grads, limit=20)
    trainer.update(64)

# %% [markdown]
# (With all devices' copies in one list, the norm would come out $\sqrt k$ times too large.) Four
# devices, twenty steps, against one device, which clips by Gluon's own `clip_global_norm`:

# %% tags=["trains"]
def train_clipped(devices, dtype):
    net = small_network(devices, dtype)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, update_on_kvstore=False)
    for number in range(20):
        backward_of_batch(net, number, devices, dtype)
        clipped_step(net, trainer, devices)
    nd.waitall()
    return replicas_of(net, devices)

# %% tags=["trains"]
def train_by_gluons_clipping():
    net = small_network(four[:1], "float32")  # clip_global_norm works in float32 only
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD)
    norms = []
    for number in range(20):
        backward_of_batch(net, number, four[:1], "float32")
        grads = [parameter.grad() for parameter in net.collect_params().values()]
        norms.append(gluon.utils.clip_global_norm(grads, 20))
        trainer.step(64)
    return replicas_of(net, four[:1])[0], norms

# %% tags=["trains", "measured"]
theirs, norms = train_by_gluons_clipping()
print(f"norms before clipping: {min(norms):.0f} to {max(norms):.0f}; the limit is 20")
difference = largest_difference(train_clipped(four, "float32"), theirs)
print(f"four devices against Gluon's on one, float32: {difference}")

# %% tags=["fold", "trains"]
# check: four devices clip as one does, in float64 to 1e-12; wrong clipping is another training
assert min(norms) > 20, "gradients below the limit would test nothing"
assert difference < 1e-4
one = train_clipped(four[:1], "float64")[0]
assert largest_difference(train_clipped(four, "float64"), one) < 1e-12
assert largest_difference([one], whole) > 0.01, "without clipping it is another training"
weight, trainer = two_numbers(update_on_kvstore=False)
trainer.allreduce_grads()
clip_by_norm([weight.grad(pair[0])], limit=5)
assert np.abs(weight.grad(pair[0]).asnumpy() - [3, 4]).max() < 1e-6
short = nd.array([3, 4])
clip_by_norm([short], limit=10)
assert short.asnumpy().tolist() == [3, 4], "a short gradient stays"

# %% [markdown]
# ## Compression
#
# A `device` store can send less. With `{"type": "2bit", "threshold": t}` each entry goes to the
# owner as $-t$, 0 or $+t$: two bits in place of 32. Each device keeps what it didn't send, the
# *residual*, and adds it to its next gradient. (Seide et al., 2014, do so with one bit.) What comes
# back from the owner is not compressed. For one device, in NumPy:

# %%
def two_bits(grad, residual, threshold):
    """What a device sends; what it doesn't send stays in its residual."""
    residual += grad
    sent = np.zeros_like(grad)
    sent[residual >= threshold] = threshold
    sent[residual <= -threshold] = -threshold
    residual -= sent
    return sent


residual = np.zeros(1)
for push in range(4):
    print("has 0.25, sends", two_bits(np.array([0.25]), residual, threshold=0.5), "keeps", residual)

# %% [markdown]
# Does MXNet do the same? Two devices push the same gradients eight times, four entries each.
# **Predict:** which entry of the sum does not arrive, even on average?

# %%
compression = {"type": "2bit", "threshold": 0.5}
grads = np.array([[0.375, 0.5, -0.125, 1.25],
                  [0.25, -0.375, -0.125, 0.0]], dtype="float32")  # [device, entry]
store = mx.kvstore.create("device")
store.set_gradient_compression(compression)
store.init(0, nd.zeros(4))

residuals = np.zeros_like(grads)
pulled = [nd.zeros(4, ctx=device) for device in pair]
arrived = []
for push in range(8):
    pushed = [nd.array(grads[rank], ctx=pair[rank]) for rank in range(2)]
    store.pushpull(0, pushed, out=pulled)
    arrived.append(pulled[1].asnumpy())

    ours = np.zeros(4)
    for rank in range(2):
        ours += two_bits(grads[rank], residuals[rank], 0.5)
    for array in pulled:
        assert np.array_equal(array.asnumpy(), ours), "not what two_bits sends"

arrived = np.array(arrived)  # [push, entry]
for entry in range(4):
    print(f"entry {entry}: the sum is {grads[:, entry].sum():6.3f}; arrived on average "
          f"{arrived[:, entry].mean():6.3f}, in turn {arrived[:, entry].tolist()}")

# %% tags=["fold"]
# check: what hasn't arrived is in the residuals, exactly; local has no compression
missing = 8 * grads.sum(axis=0) - arrived.sum(axis=0)
assert np.array_equal(missing, residuals.sum(axis=0))
assert residuals[0, 3] == 8 * (1.25 - 0.5), "the last entry's residual grows with each push"
try:
    mx.kvstore.create("local").set_gradient_compression(compression)
except Exception as error:  # MXNet raises no narrower one
    print("local:", error)
    assert "not supported for this type of kvstore" in str(error)
else:
    raise RuntimeError("local should have no compression")

# %% [markdown]
# A device can send at most $t$ of an entry in each push. The last entry, 1.25, needs more, and its
# residual grows with each push. What is pushed is the gradient of a shard's *summed* loss, so $t$
# has to fit that. `local` has no compression and raises an error.
#
# It costs memory: on each device a residual as large as the model, and on the owner one more
# buffer of each key (`CommDevice::ReduceCompressed` in `src/kvstore/comm.h`), beside small ones for
# what is sent.

# %% tags=["fold"]
# check: what compression adds on each device: a residual of all keys, a buffer of its own, a little
def compressed(store):
    store.set_gradient_compression(compression)


if cores() >= 2:
    without = kilobytes(SIZES, "device")
    with_compression = kilobytes(SIZES, "device", prepare=compressed)
    for before, after in zip(without, with_compression):
        residual_kb = 4 * sum(SIZES) / 1000
        one_more_buffer = before / 2  # without compression there are two of each key
        assert 0 <= after - before - residual_kb - one_more_buffer < 5, "a residual, a buffer"

# %% [markdown]
# ## Summary
#
# - Where weights and gradients are dense, several devices let the store update, unless a `local`
#   store meets a parameter of more than $2^{24}$ entries. With sparse gradients the devices update,
#   with sparse weights the store.
# - With SGD, twelve ways to sum and update train the same weights.
# - Weights that you write in place after the first step are lost where the store updates.
#   `set_data` keeps them and loses the optimizer's state. With `update_on_kvstore=False` both
#   work.
# - A misspelt kind is no error: `devise` is a `local` store. `nccl` sums on the first GPU.
#   `MXNET_KVSTORE_USETREE=1` asks for trees on GPUs, rooted at the first; a build for CPUs ignores
#   it.
# - Clip after the sum, each device its own copy of all sums.
# - 2-bit compression sends $-t$, 0 or $t$ and keeps the rest. A gradient that stays larger than $t$
#   falls further behind with each push.
#
# **Further reading.** MXNet's list of environment variables (`env_var.md` at 1.9.1); F. Seide et
# al., *1-bit stochastic gradient descent* (Interspeech 2014).

# %% [markdown]
# ## Exercises
#
# 1. **The threshold.** Train the small network in float32 without momentum for 64 steps: without
#    compression, and with thresholds of 0.01, 1 and 10. Which comes closest, and why?

# %% [markdown]
# ### Answer 1
#
# Threshold 1. With 0.01 each of two devices sends at most 0.01 of an entry in a step. After 64
# steps no weight has moved by more than 64 · 2 · 0.01 / 64 · 0.0625 = 0.00125. With 10, we guess,
# most entries wait in the residual for many steps.

# %% tags=["solution", "measured", "trains"]
late = {}
for threshold in [None, 0.01, 1, 10]:
    options = {}
    if threshold is not None:
        options["compression_params"] = {"type": "2bit", "threshold": threshold}
    net = small_network(pair, "float32")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0625}, **options)
    losses = []
    for number in range(64):
        losses.append(backward_of_batch(net, number, pair, "float32"))
        trainer.step(64)
    late[threshold] = np.mean(losses[-16:])
    print(f"threshold {threshold}: mean loss of the last 16 steps {late[threshold]:.2f}")
assert late[None] < late[1] < min(late[10], late[0.01]), late
