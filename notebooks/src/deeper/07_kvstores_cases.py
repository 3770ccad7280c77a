# %% [markdown]
# # Deeper · KVStore's cases
#
# Chapter 07 showed two ways to update: either the store does it, or each device. Which one does
# `Trainer` take? Does training depend on it? And what happens to a program that does something
# between the sum and the update?
#
# > **What you'll do:** see who updates in eight cases, train one network in twelve ways, write to
# > weights, look into four stores, clip gradients, and compress them.
# >
# > **What you'll learn:** who updates, and whether training depends on it; what `set_data` does to
# > an optimizer's state; where each kind of store sums and keeps the weight; how to clip a whole
# > batch's gradient, and what 2-bit compression sends.
# >
# > **What you need:** chapter 07. No GPU. Reading takes {reading time}, running less than half a
# > minute.

# %% tags=["measured"]
import os

import helpers
from helpers.compare import largest_difference

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
# Folded is `who_updates(parameters, ...)`. It makes a `Trainer` and calls `allreduce_grads`, which
# is refused where the store updates.
#
# Below are eight cases. The first six: one device or two; a store of the kind `device` or `local`;
# few entries or more than $2^{24}$, about 17 million. The last two are embeddings. An embedding
# can have *sparse gradients*, which list only the rows of words that were seen. In
# `SparseEmbedding` the weights are sparse too. **Predict** the first three: one device; two with
# `device`; two with `local`.

# %% tags=["fold"]
# define: who_updates; dense and table make parameters
os.environ.pop("MXNET_UPDATE_ON_KVSTORE", None)  # 0 would turn the default off


def who_updates(parameters, **options):
    trainer = gluon.Trainer(parameters, "sgd", **options)
    try:
        trainer.allreduce_grads()
    except AssertionError as error:
        assert "updated on kvstore" in str(error)
        return "the store"
    nd.waitall()  # don't free a local store while its sum is pending (CommCPU::Reduce, comm.h)
    return "each device"


def dense(entries, devices=pair):
    parameter = gluon.Parameter("p", shape=(entries,), init="zeros", dtype="int8")  # small
    parameter.initialize(ctx=devices)
    return [parameter]


def table(layer):
    layer.initialize(ctx=pair)
    return layer.collect_params()

# %%
many = 2**24 + 1
one_row_each = nn.Embedding(9, 4, sparse_grad=True)
all_sparse = gluon.contrib.nn.SparseEmbedding(9, 4)

print("1 device:              ", who_updates(dense(2, devices=pair[:1]), kvstore="device"))
print("2 devices, device:     ", who_updates(dense(2), kvstore="device"))
print("2 devices, local:      ", who_updates(dense(2), kvstore="local"))
print("local, 2^24 entries:   ", who_updates(dense(2**24), kvstore="local"))
print("local, 2^24 + 1:       ", who_updates(dense(many), kvstore="local"))
print("device, 2^24 + 1:      ", who_updates(dense(many), kvstore="device"))
print("sparse gradients:      ", who_updates(table(one_row_each), kvstore="device"))
print("sparse weights:        ", who_updates(table(all_sparse), kvstore="device"))

# %% [markdown]
# The rules are in `Trainer._init_kvstore` (`gluon/trainer.py`) and `_create_kvstore` (`model.py`),
# for a store that is given by its name:
#
# - On one device with dense weights there is no store.
# - On several devices the store updates. But with `local`, one parameter of more than $2^{24}$
#   entries leaves *all* updates to the devices. Each then holds the whole optimizer state.
# - With dense weights and sparse gradients the devices update; sparse weights are always updated in
#   a store.
# - `MXNET_UPDATE_ON_KVSTORE=0` in the environment turns the default off, for dense weights and
#   gradients.
#
# If you ask for the update in a store where there is none, the error doesn't say so:

# %% tags=["fold"]
# check: the eight cases; update_on_kvstore=True on one device; the environment's 0
assert who_updates(dense(2, devices=pair[:1])) == "each device"
assert who_updates(dense(2)) == "the store", "the default kind is device"
assert who_updates(dense(2), kvstore="local") == "the store"
assert who_updates(dense(2**24), kvstore="local") == "the store"
assert who_updates(dense(many), kvstore="local") == "each device"
assert who_updates(dense(many)) == "the store"
assert who_updates(table(nn.Embedding(9, 4, sparse_grad=True))) == "each device"
assert who_updates(table(gluon.contrib.nn.SparseEmbedding(9, 4))) == "the store"
try:
    who_updates(dense(2, devices=pair[:1]), update_on_kvstore=True)
    raise RuntimeError("update_on_kvstore=True on one device should fail")
except AttributeError as error:
    print("on one device:", error)
os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
assert who_updates(dense(2)) == "each device"
assert who_updates(table(gluon.contrib.nn.SparseEmbedding(9, 4))) == "the store"
del os.environ["MXNET_UPDATE_ON_KVSTORE"]

# %% [markdown]
# **Keep this:** on several devices the store updates, unless gradients are sparse and weights
# dense, or a `local` store meets a very large parameter.
#
# ## Does training depend on it?
#
# We train a small network for twenty steps in float64, by SGD with momentum. Folded are:
#
# - `small_network(devices)`, with the same weights each time;
# - `backward_of_batch(net, number, devices)`, the backward pass for batch 0, 1, …; it returns the
#   mean loss;
# - `replicas_of(net, devices)`, each device's list of weights.

# %% tags=["fold"]
# define: small_network, backward_of_batch and replicas_of
images = data.train_images.astype("float64")
images = images - images.mean()
labels = data.train_labels
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
SGD = {"learning_rate": 0.0625, "momentum": 0.875}  # MXNet's float32 holds these exactly


def small_network(devices, dtype="float64"):
    net = nn.Sequential()
    net.add(nn.Dense(32, activation="relu", in_units=784))
    net.add(nn.Dense(10, in_units=32))
    net.cast(dtype)
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=devices)
    return net


def backward_of_batch(net, number, devices, dtype="float64"):
    first = (64 * number) % 1280  # after 20 batches from the start again
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


def replicas_of(net, devices):
    replicas = []
    for device in devices:
        replicas.append([parameter.data(device) for parameter in net.collect_params().values()])
    return replicas

# %%
def train_small(devices, **options):
    net = small_network(devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, **options)
    losses = []
    for number in range(20):
        losses.append(backward_of_batch(net, number, devices))
        trainer.step(64)
    nd.waitall()
    return replicas_of(net, devices), losses, trainer

# %% [markdown]
# The oracle is one device without a store. We compare all weights on all devices with it, in
# twelve ways: two kinds of store, two ways to update, 1, 2 or 4 devices. **Predict:** how large
# is the largest difference, divided by the largest weight?

# %% tags=["trains", "measured"]
replicas, losses, _ = train_small(four[:1])
whole = replicas[0]
print(f"one device: the loss falls from {losses[0]:.2f} to {losses[-1]:.2f}")

differences = {}
trainers = {}
for k in [1, 2, 4]:
    for kind in ["local", "device"]:
        for in_store in [True, False]:
            # With only its name, one device would have no store.
            store = mx.kvstore.create(kind)
            options = {"kvstore": store, "update_on_kvstore": in_store}
            replicas, _, trainer = train_small(four[:k], **options)
            differences[k, kind, in_store] = largest_difference(replicas, whole)
            trainers[k, kind, in_store] = trainer
print(f"{len(differences)} ways: the largest difference is {max(differences.values()):.1e}")

# %% tags=["fold", "trains"]
# check: each way is what it says and equals one device; not summing and one other weight are seen
from helpers.trace import record

assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), "compare while the loss falls"
assert len(differences) == 12
for (k, kind, in_store), difference in differences.items():
    trainer = trainers[k, kind, in_store]
    if k > 1:  # one more step, to see who adds up; with one device nobody has to
        ran = [event.name for event in record(trainer.step, 64, True).events]
        assert ("KVStoreReduce" in ran) == (kind == "local"), f"{k} devices: not {kind}"
    assert trainer._update_on_kvstore == in_store, "the other way to update"
    assert difference < 1e-12, f"{k} devices, {kind}, in the store: {in_store}"
replicas, _, _ = train_small(pair, kvstore=None)
assert largest_difference(replicas, whole) > 0.01, "nothing was summed"
replicas, _, _ = train_small(pair)
on_second_device = replicas[1]
last_parameter = on_second_device[-1]
last_parameter += 1
assert largest_difference(replicas, whole) > 0.01, "the second device isn't looked at"

# %% [markdown]
# Only rounding. **Keep this:** with SGD, a new gradient on each device in each step, and nobody
# else writing to the weights, it doesn't matter who updates. (Other optimizers we haven't tried.)
#
# ## Writing to the weights
#
# In chapter 07 a weight that was written *in place* was lost where the store updates. `set_data`
# makes `Trainer` set up a new store then (`Parameter.set_data` in `gluon/parameter.py`). Is the
# training then the one we want?
#
# The weight is 100, and its gradients are 1 and 20. The learning rate is 1, the momentum 0.5.
# Between two steps all weights become 1000.

# %% tags=["trains"]
def write_in_place(weight):
    for replica in weight.list_data():
        replica[:] = 1000


def write_by_set_data(weight):
    weight.set_data(nd.array([1000]))


def step_weight(weight, trainer):
    with autograd.record():
        losses = [1 * weight.data(pair[0]), 20 * weight.data(pair[1])]
    autograd.backward(losses)
    trainer.step(1)


def step_write_step(write, **options):
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
    weight.initialize(ctx=pair)
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1, "momentum": 0.5}, **options)
    step_weight(weight, trainer)
    write(weight)
    step_weight(weight, trainer)
    return [replica.asscalar() for replica in weight.list_data()]

# %% [markdown]
# The second step subtracts 21, and half of the first's 21: 21 + 10.5 = 31.5. So it should end at
# 968.5. **Predict** the four results.

# %% tags=["trains"]
print("the store updates")
print("    in place:   ", step_write_step(write_in_place, update_on_kvstore=True))
print("    by set_data:", step_write_step(write_by_set_data, update_on_kvstore=True))
print("the devices update")
print("    in place:   ", step_write_step(write_in_place, update_on_kvstore=False))
print("    by set_data:", step_write_step(write_by_set_data, update_on_kvstore=False))

# %% tags=["fold", "trains"]
# check: the four results; after set_data a store object fails in the store, not on the devices
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
store = mx.kvstore.create("device")
by_object = step_write_step(write_by_set_data, kvstore=store, update_on_kvstore=False)
assert by_object == [1000 - 31.5] * 2, "without the update in it, a store object goes on"

# %% [markdown]
# Where the devices update, both are right. Where the store updates:
#
# - in place, what you wrote is lost: 100 − 21 − 31.5 = 47.5;
# - by `set_data`, the weight arrives, but the new store has lost the optimizer's state of *all*
#   parameters: 1000 − 21 = 979.
#
# Three more results:

# %% tags=["fold", "trains"]
# measure: what a store holds where the devices update; Adam after set_data; loading in both orders
import tempfile


def weight_and_trainer(name, settings, **options):
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
    weight.initialize(ctx=pair)
    return weight, gluon.Trainer([weight], name, settings, **options)


with_momentum = {"learning_rate": 1, "momentum": 0.5}
weight, trainer = weight_and_trainer("sgd", with_momentum, update_on_kvstore=False)
step_weight(weight, trainer)
held = nd.zeros(1)
trainer._kvstore.pull(0, out=held)
print("the devices update: their weight is", weight.data(pair[0]).asscalar(),
      "and the store holds", held.asscalar())
assert weight.data(pair[0]).asscalar() == 79
assert held.asscalar() == 21, "the sum of the gradients"

step_of_adam = {}
for in_store in [True, False]:
    weight, trainer = weight_and_trainer("adam", {"learning_rate": 0.01},
                                         update_on_kvstore=in_store)
    for _ in range(1000):
        step_weight(weight, trainer)
    weight.set_data(nd.array([100]))
    step_weight(weight, trainer)
    step_of_adam[in_store] = 100 - weight.data(pair[0]).asscalar()
print(f"Adam's step after set_data: {step_of_adam[True]:.3f} in the store, "
      f"{step_of_adam[False]:.3f} on the devices")
assert abs(step_of_adam[False] - 0.01) < 1e-4
without_state = 0.01 * 0.1 / np.sqrt(0.001 / (1 - 0.999**1001))  # both averages new, step 1,001
assert abs(step_of_adam[True] - without_state) < 1e-4

folder = tempfile.mkdtemp()
weight, trainer = weight_and_trainer("sgd", with_momentum)
step_weight(weight, trainer)
saved = weight.data(pair[0]).copy()
trainer.save_states(folder + "/states")
step_weight(weight, trainer)
in_one_go = weight.data(pair[0]).asscalar()

weight, trainer = weight_and_trainer("sgd", with_momentum)
weight.set_data(saved)
trainer.load_states(folder + "/states")
step_weight(weight, trainer)
weights_first = weight.data(pair[0]).asscalar()

weight, trainer = weight_and_trainer("sgd", with_momentum)
trainer.load_states(folder + "/states")
weight.set_data(saved)
step_weight(weight, trainer)
states_first = weight.data(pair[0]).asscalar()
print("in one go:", in_one_go, " weights loaded first:", weights_first,
      " states loaded first:", states_first)
assert weights_first == in_one_go == 47.5
assert states_first == 79 - 21, "the states were lost"

# %% [markdown]
# - Where the devices update, the store has no copy of the weight that could be out of date. It
#   holds the last sum, 21.
# - Adam should step by 0.01 here. After `set_data` in the store its averages begin at 0, but its
#   step count goes on. So it doesn't correct for young averages, and its first step is 2.5 times
#   too long.
# - `load_parameters` calls `set_data`. So load the weights first, then the states.
#
# **Keep this:** a program that writes to its weights says `update_on_kvstore=False`. (A store
# *object* that updates even raises an error after `set_data`.)
#
# ## Kinds of store
#
# Which device sums, and where is the stored weight? An optimizer gets both, so we send a spy that
# only notes where they are. Four devices push eight keys. **Predict:** what are stores of the
# misspelt kinds `devise` and `devices`?

# %% tags=["fold"]
# define: spy_on(kind), an optimizer that notes places, and places, their names
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
        size = 10 + key  # unequal, so that the owners don't depend on chance
        store.init(key, nd.zeros(size))
    for key in range(8):
        size = 10 + key
        store.push(key, [nd.zeros(size, ctx=device) for device in four])
    nd.waitall()
    return spy


def places(found):
    return ", ".join(sorted(set(found.values())))

# %%
for kind in ["device", "local", "devise", "devices"]:
    spy = spy_on(kind)
    print(f"{kind:7} weights: {places(spy.weight_on)}  sums: {places(spy.sum_on)}")

# %% tags=["fold"]
# check: the kinds' places; the CPU build has no nccl; MXNET_KVSTORE_USETREE changes nothing here
from helpers.schedules import wrong_ranks

everywhere = "cpu(0), cpu(1), cpu(2), cpu(3)"
for kind, expected in [("device", everywhere), ("devices", everywhere),
                       ("local", "cpu_pinned(0)"), ("devise", "cpu_pinned(0)")]:
    spy = spy_on(kind)
    assert places(spy.sum_on) == expected, kind
    assert places(spy.weight_on) == "cpu_pinned(0)", kind
try:
    mx.kvstore.create("nccl")
except mx.MXNetError as error:
    assert "compile with USE_NCCL=1" in str(error)
else:
    raise RuntimeError("this build has nccl: say so in the text")
for misspelt in ["nccls", "dist_synk"]:
    try:
        mx.kvstore.create(misspelt)
    except mx.MXNetError:
        pass
    else:
        raise RuntimeError(f"{misspelt} should be an error here")


def by_new_store(arrays):
    store = mx.kvstore.create("device")
    store.init("sum", arrays[0])
    store.pushpull("sum", arrays)


owners_before = spy_on("device").sum_on
os.environ["MXNET_KVSTORE_USETREE"] = "1"
owners_with_trees = spy_on("device").sum_on
unequal = [nd.arange(9, ctx=device) * 3**device.device_id for device in four]
assert wrong_ranks(by_new_store, unequal) == []
del os.environ["MXNET_KVSTORE_USETREE"]
assert owners_with_trees == owners_before

# %% [markdown]
# A misspelt name need not be an error. MXNet looks for `dist`, `device` and `nccl` in it, so
# `devices` is a `device` store; every other name is taken as local, so `devise` is a `local` store
# (`KVStore::Create` in `src/kvstore/kvstore.cc`). In this build `nccls` and `dist_synk` are errors,
# as `nccl` is.
#
# `cpu_pinned(0)` is the host's memory: `init` puts every weight there. **On GPUs** the first push
# moves it, if the sum is on a GPU: to that GPU (`KVStoreLocal::PushImpl` in `kvstore_local.h`;
# read, not run). Our simulated devices are CPUs, so here it stays.
#
# | kind | who sums | stored weight here (measured) | on GPUs (read) |
# | --- | --- | --- | --- |
# | `device` | each key's owner | host | the key's owner |
# | `local` | host | host | host |
# | `nccl` | first GPU | not in CPU builds | first GPU |
#
# `nccl` is NVIDIA's library (`KVStoreNCCL::InitMergeBuffer` in `kvstore_nccl.h`). If that store
# updates, the first GPU holds all stored weights and all optimizer state.
#
# `MXNET_KVSTORE_USETREE=1` in the environment lets a `device` store on GPUs add along trees
# (`comm_tree.h`; CPU builds ignore it). The trees end on the first GPU. Keys above 10,000,000
# entries may be cut; for these say `update_on_kvstore=False`, since by our reading the store's
# optimizer gets the first GPU's own gradient in place of the sum.
#
# **Keep this:** spell kinds right: most misspellings raise no error. And push to a key always from
# as many devices as the first time: its buffers are made then (`CommDevice::Reduce` in `comm.h`),
# and a push from more may crash.
#
# ## `local` against `device`, in seconds
#
# Which one is faster on simulated devices? Both make four copies, two into buffers and two back,
# and a sum. We time `pushpull` on two devices. One is *faster* where the middle halves of their
# times don't overlap.

# %% tags=["fold", "measured", "few:ROUNDS = 16=>ROUNDS = 4"]
# measure: milliseconds of device and local on two devices, for 4 KB to 17 MB; who is faster
from functools import partial

from helpers.timing import in_turns, spread

ROUNDS = 16
two = helpers.devices(2)


def store_for(kind, array):
    store = mx.kvstore.create(kind)
    store.init(0, array)
    return store


spreads = {"device": [], "local": []}  # a spread for each size, in milliseconds
sizes_mb = []
device_ahead = []
local_ahead = []
for entries in [2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22]:
    size = 4 * entries / 1e6
    sizes_mb.append(size)
    arrays = [nd.zeros(entries, ctx=device) for device in two]
    contestants = {}
    for kind in ["device", "local"]:
        contestants[kind] = partial(store_for(kind, arrays[0]).pushpull, 0, arrays)
    times = in_turns(contestants, rounds=ROUNDS)
    device, local = spread(1e3 * times["device"]), spread(1e3 * times["local"])
    spreads["device"].append(device)
    spreads["local"].append(local)
    verdict = "overlap"
    if device.high < local.low:
        device_ahead.append(size)
        verdict = "device is faster"
    if local.high < device.low:
        local_ahead.append(size)
        verdict = "local is faster"
    print(f"{size:6.3f} MB: device {device.median:5.2f} ms, local {local.median:5.2f} ms; "
          f"{verdict}")
for kind, ahead in [("device", device_ahead), ("local", local_ahead)]:
    print(f"{kind} is faster at", ", ".join(f"{size:.3f} MB" for size in ahead) or "no size")

# %% tags=["fold", "measured"]
# draw: milliseconds against megabytes
from helpers.plotting import curves, show

if device_ahead or local_ahead:
    title = (f"device is faster at {len(device_ahead)} of {len(sizes_mb)} sizes, "
             f"local at {len(local_ahead)}")
else:
    title = "No size at which one kind is faster in this run"
lines = {}
for kind, rows in spreads.items():
    low = [row.low for row in rows]
    median = [row.median for row in rows]
    high = [row.high for row in rows]
    lines[kind] = (sizes_mb, low, median, high)
fig, ax = curves(title, "MB on each device", "milliseconds (median, middle half)", lines,
                 logx=True, logy=True)
show(fig, alt="Milliseconds against megabytes for the two kinds of store.")

# %% [markdown]
# The last two lines answer it for this run. In twelve earlier ones `local` was never the faster,
# at any size; `device` was in some, mostly at 1 to 4 MB. Beside other programs the spreads overlap.
# Here all goes through the host's memory, so this says nothing about GPUs.
#
# ## Clipping between the sum and the update
#
# If the norm of all gradients together is above a limit, *clipping* multiplies them by limit /
# norm. It is meant for the gradient of the whole batch. When does a device have that? Between the
# halves of `step`, with `update_on_kvstore=False`.
#
# Let one parameter of two numbers have the gradients (6, 0) on one device and (0, 8) on the other.
# The sum (6, 8) has the norm 10. Clipped to 5 it is (3, 4). The learning rate is 1.

# %% tags=["fold", "trains"]
# define: two_numbers(...) makes a weight with these gradients, and its trainer
def two_numbers(**options):
    weight = gluon.Parameter("weight", shape=(2,), init="zeros")
    weight.initialize(ctx=pair)
    with autograd.record():
        first = (weight.data(pair[0]) * nd.array([6, 0], ctx=pair[0])).sum()
        second = (weight.data(pair[1]) * nd.array([0, 8], ctx=pair[1])).sum()
    autograd.backward([first, second])
    return weight, gluon.Trainer([weight], "sgd", {"learning_rate": 1}, **options)

# %% tags=["trains"]
def clip_by_norm(grads, limit):
    """Multiply arrays of one device by one factor, so that their norm is at most `limit`."""
    squares = 0
    for grad in grads:
        squares = squares + (grad * grad).sum()
    norm = squares.sqrt()
    factor = nd.minimum(limit / norm, 1)
    for grad in grads:
        grad *= factor


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
weight, trainer = two_numbers(update_on_kvstore=False)
for grad in weight.list_grad():
    clip_by_norm([grad], limit=5)
    print("clipped:", grad.asnumpy(), "on", grad.context)
trainer.step(1)
print("weights:", weight.data(pair[0]).asnumpy())

# %% [markdown]
# Too long, and in another direction: (5, 5) isn't a multiple of (6, 8).
#
# In a network, each device clips its own copy of *all* sums by one factor. (With all devices'
# copies in one list, the norm would be $\sqrt k$ times too large.) These are sums over 64 images,
# and `update(64)` divides by 64 later. So a limit of 20 is 20 / 64, about 0.31, for the mean.

# %%
def clipped_step(net, trainer, devices):
    trainer.allreduce_grads()
    for device in devices:
        grads = [parameter.grad(device) for parameter in net.collect_params().values()]
        clip_by_norm(grads, limit=20)
    trainer.update(64)

# %% [markdown]
# Twenty such steps on four devices, against twenty on one device, which clips by Gluon's own
# `clip_global_norm`:

# %% tags=["fold", "trains", "measured"]
# measure: the norms before clipping, and how far four devices are from Gluon's clipping on one
def train_clipped(devices, dtype):
    net = small_network(devices, dtype)
    trainer = gluon.Trainer(net.collect_params(), "sgd", SGD, update_on_kvstore=False)
    for number in range(20):
        backward_of_batch(net, number, devices, dtype)
        clipped_step(net, trainer, devices)
    nd.waitall()
    return replicas_of(net, devices)


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


theirs, norms = train_by_gluons_clipping()
print(f"norms before clipping: {min(norms):.0f} to {max(norms):.0f}; the limit is 20")
difference = largest_difference(train_clipped(four, "float32"), theirs)
print(f"four devices against Gluon's on one, float32: {difference:.1e}")

# %% tags=["fold", "trains"]
# check: four devices clip as one does, in float64 to 1e-12; without clipping it's another training
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
# Only rounding. **Keep this:** clip after the sum, each device its own copy.
#
# ## Compression
#
# Can a store send less? With `Trainer(..., compression_params={"type": "2bit", "threshold": t})`
# each device sends $-t$, 0 or $+t$ for an entry: two bits in place of 32. (What comes back isn't
# compressed.) It keeps what it didn't send, the *residual*, and adds it to its next gradient. Seide
# et al. (2014) do so with one bit. In NumPy:

# %%
def two_bits(grad, residual, threshold):
    """What a device sends, and its new residual."""
    wanted = residual + grad
    sent = np.zeros_like(wanted)
    sent[wanted >= threshold] = threshold
    sent[wanted <= -threshold] = -threshold
    return sent, wanted - sent


residual = np.zeros(1)
for push in range(4):
    sent, residual = two_bits(np.array([0.25]), residual, threshold=0.5)
    print("gradient 0.25: sends", sent, "keeps", residual)

# %% [markdown]
# Does MXNet do the same? Two devices push these gradients eight times, with $t = 0.5$:
#
# | | entry 0 | entry 1 | entry 2 | entry 3 |
# | --- | --- | --- | --- | --- |
# | device 0 | 0.375 | 0.5 | −0.125 | 1.25 |
# | device 1 | 0.25 | −0.375 | −0.125 | 0 |
# | sum | 0.625 | 0.125 | −0.25 | 1.25 |
#
# **Predict:** which entry of the sum doesn't arrive, even on average?

# %%
grad_of_0 = np.array([0.375, 0.5, -0.125, 1.25], dtype="float32")
grad_of_1 = np.array([0.25, -0.375, -0.125, 0.0], dtype="float32")
store = mx.kvstore.create("device")
store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
store.init(0, nd.zeros(4))

arrived = []
for push in range(8):
    arrays = [nd.array(grad_of_0, ctx=pair[0]), nd.array(grad_of_1, ctx=pair[1])]
    # The arrays become the sum of what was sent.
    store.pushpull(0, arrays)
    arrived.append(arrays[1].asnumpy())
    print("arrives:", arrived[push])
print("on average:", np.mean(arrived, axis=0))

# %% tags=["fold"]
# check: two_bits says each push; the rest is in the residuals; local has no compression
residual_of_0 = np.zeros(4)
residual_of_1 = np.zeros(4)
for array in arrived:
    sent_by_0, residual_of_0 = two_bits(grad_of_0, residual_of_0, 0.5)
    sent_by_1, residual_of_1 = two_bits(grad_of_1, residual_of_1, 0.5)
    assert np.array_equal(array, sent_by_0 + sent_by_1), "not what two_bits sends"
missing = 8 * (grad_of_0 + grad_of_1) - np.sum(arrived, axis=0)
assert np.array_equal(missing, residual_of_0 + residual_of_1)
assert np.array_equal(arrays[0].asnumpy(), arrays[1].asnumpy()), "the devices have one sum"
assert residual_of_0[3] == 8 * (1.25 - 0.5), "the last entry's residual grows with each push"
assert np.abs(missing[:3]).max() < 1, "the others' don't: less than one threshold a device"
try:
    mx.kvstore.create("local").set_gradient_compression({"type": "2bit", "threshold": 0.5})
except Exception as error:  # MXNet raises no narrower one
    assert "not supported for this type of kvstore" in str(error)
else:
    raise RuntimeError("local should have no compression")

# %% [markdown]
# MXNet sends what `two_bits` says. Entries 0 to 2 come out right on average. Entry 3 doesn't: a
# device sends at most $t$ of an entry in a push, 1.25 is more, and the residual grows each time.
#
# **Keep this:** an entry that stays above $t$ falls behind. Mind that `Trainer` pushes gradients of
# *summed* losses, which grow with the shard. (`local` has no compression and raises an error.)
#
# It costs each device a residual as large as the model, and the owner one more buffer of each key
# (`CommDevice::ReduceCompressed` in `comm.h`).

# %% tags=["fold"]
# check: what compression adds on each device: a residual of all keys, a buffer of its own keys
from helpers.device import cores
from helpers.stores import kilobytes


def compressed(store):
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})


SIZES = [1000, 2000, 5000]  # entries; the largest key on one device, the two others on the other
if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host
    without = kilobytes(SIZES, "device")
    with_compression = kilobytes(SIZES, "device", prepare=compressed)
    for before, after in zip(without, with_compression):
        residual_kb = 4 * sum(SIZES) / 1000
        one_more_buffer = before / 2  # without compression there are two of each key
        rest = after - before - residual_kb - one_more_buffer  # small buffers for what is sent
        assert 0 <= rest < 5, "a residual, a buffer"

# %% [markdown]
# ## Summary
#
# - On several devices the store updates, unless gradients are sparse or a `local` store meets a
#   parameter of more than $2^{24}$ entries. Sparse weights are updated in a store.
# - With SGD, twelve ways to sum and update train the same weights.
# - A program that does something between sum and update, or writes to the weights, says
#   `update_on_kvstore=False`. Where the store updates, weights written in place are lost, and
#   `set_data` loses the optimizer's state.
# - A misspelt kind may raise no error. Clip after the sum, each device its own copy of all sums.
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
