# %% [markdown]
# # 07 · KVStore: where the sum happens
#
# In chapter 06 one call, `trainer.step`, summed the gradients and updated every replica. Inside it
# is MXNet's *key-value store*, KVStore. Devices push arrays into it and pull arrays out of it:
#
# ![Left: cpu(0) pushes 1, cpu(1) pushes 20, and the store holds 1 + 20 = 21. Right: both devices
# pull 21 from the store.](src/drawings/push_pull.svg)
#
# > **What you'll do:** push and pull by hand, let a store update weights, and spy on who adds up.
# >
# > **What you'll learn:** what `push` and `pull` do, with an optimizer in the store and without;
# > the two ways in which `Trainer` can update, and what each leaves in `grad`; which device adds up
# > which parameter, and what that costs in memory.
# >
# > **What you need:** chapters 03 to 06. No GPU. Reading takes {reading time}, running less than
# > half a minute.

# %%
import helpers
import mxnet as mx
from mxnet import autograd, gluon, nd

pair = [mx.cpu(0), mx.cpu(1)]  # simulated devices: we look at results, not at speed

# %% [markdown]
# ## Push and pull
#
# What does a store do with the arrays that it gets? It holds one array for each *key*, a string or
# a number. `init` gives a key its first array, here 7. Then two devices push theirs. `device` is
# the kind of store that adds up on the devices.

# %%
store = mx.kvstore.create("device")
store.init("sum", nd.array([7]))

pushed = [nd.array([1], ctx=pair[0]), nd.array([20], ctx=pair[1])]
store.push("sum", pushed)

# %% [markdown]
# `pull` copies what is stored into a list of arrays. Is the 7 that was there before still in it?

# %%
def values_of(arrays):
    return [array.asscalar() for array in arrays]


pulled = [nd.zeros(1, ctx=pair[0]), nd.zeros(1, ctx=pair[1])]
store.pull("sum", out=pulled)
print("pulled:", values_of(pulled))

# %% [markdown]
# It isn't: a push *replaces* what was there. So a second push gives 21 once more, not 42:

# %%
store.push("sum", pushed)
store.pull("sum", out=pulled)
print("pulled:", values_of(pulled))
print("pushed:", values_of(pushed))

# %% [markdown]
# The pushed arrays are as they were. `pushpull` does both in one call, and pulls into the arrays
# that were pushed. That is an all-reduce: each array becomes the sum of all, in place. (A star, in
# chapter 03's words, around the device that makes the sum.)

# %%
store.pushpull("sum", pushed)
print(values_of(pushed))

# %% [markdown]
# Is it right on more devices? Chapter 03's judge knows. It judges `local`, too, a kind of store
# that adds up in the *host's* memory: the computer's, not a device's.

# %% tags=["fold"]
# check: pushpull by `device` and by `local` passes the judge of chapter 03; the numbers above
from helpers.schedules import wrong_devices
from helpers.trace import record


def all_reduce_by(kind):
    stores = {}  # one for each kind of call, since a key keeps its shape, type and devices

    def all_reduce(arrays):
        case = arrays[0].shape, str(arrays[0].dtype), tuple(str(a.context) for a in arrays)
        if case not in stores:
            stores[case] = mx.kvstore.create(kind)
            stores[case].init("sum", arrays[0])
        stores[case].pushpull("sum", arrays)
        nd.waitall()  # a local store must not go with a sum pending (CommCPU::Reduce, comm.h)
    return all_reduce


for kind in ["device", "local"]:
    for k in range(1, 9):
        assert wrong_devices(all_reduce_by(kind), k) == [], f"{kind} is wrong on {k} devices"
    ones = [nd.ones(1, ctx=device) for device in pair]
    ran = [event.name for event in record(all_reduce_by(kind), ones).events]
    assert ("KVStoreReduce" in ran) == (kind == "local"), f"not a store of the kind {kind}"
    print(f"{kind}: right on 1 to 8 devices")
ours = [nd.array([1], ctx=pair[0]), nd.array([20], ctx=pair[1])]
for push in range(2):
    store.push("sum", ours)
    store.pull("sum", out=pulled)
    assert values_of(pulled) == [21, 21], "a second push replaces the first"
    assert values_of(ours) == [1, 20], "a push leaves the pushed arrays as they are"
store.pushpull("sum", ours)
assert values_of(ours) == [21, 21]

# %% [markdown]
# **Keep this:** without an optimizer, a push stores the sum of the devices' arrays, and a pull
# copies it to all.
#
# ## A store that updates
#
# Can a store do more than add? It can have an *optimizer*. Then what it holds is a weight, and
# devices push gradients. The weight is 100, the learning rate 1. **Predict:** what do the devices
# pull?

# %%
store = mx.kvstore.create("device")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
store.init("weight", nd.array([100]))

gradients = [nd.array([1], ctx=pair[0]), nd.array([20], ctx=pair[1])]
store.push("weight", gradients)
store.pull("weight", out=pulled)
print("after one push: ", values_of(pulled))

store.push("weight", gradients)
store.pull("weight", out=pulled)
print("after two pushes:", values_of(pulled))

# %% [markdown]
# 100 − 21 = 79, and 79 − 21 = 58. **Keep this:** with an optimizer, a push doesn't replace what is
# stored. It is one step of SGD with the *sum* of the gradients, and a pull gets the new weight.
# With momentum, the optimizer has a *state*, the running sum; the store keeps that, too.

# %% tags=["fold"]
# check: the numbers above; and two steps with momentum, kept in the store
assert values_of(pulled) == [58, 58]
store = mx.kvstore.create("device")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1, momentum=0.5))
store.init("weight", nd.array([100]))
for expected in [100 - 21, 100 - 21 - (21 + 0.5 * 21)]:
    found = [nd.zeros(1, ctx=pair[0]), nd.zeros(1, ctx=pair[1])]
    store.pushpull("weight", gradients, out=found)
    assert values_of(found) == [expected, expected], "not SGD with momentum on the sum"

# %% [markdown]
# ## Two ways to update
#
# `Trainer` pushes the gradients in each step. Who then updates the weights? There are two ways:
#
# ![Two panels. In both, cpu(0) pushes the gradient 1 and cpu(1) pushes 20. Left, the store
# computes 100 minus 21 = 79 and sends the weight 79 to both devices; their gradients stay 1 and 20.
# Right, the store sends the sum 21 to both; each device computes 100 minus 21 = 79 and holds 21 as
# its gradient.](src/drawings/two_updates.svg)
#
# The left panel is `update_on_kvstore=True`, the right one `False`. We run both, with a
# parameter that is one weight, 100. The loss is 1 · weight on `cpu(0)` and 20 · weight on `cpu(1)`.
# So the gradients are 1 and 20, whatever the weight is.

# %% tags=["trains"]
def new_weight():
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
    weight.initialize(ctx=pair)
    return weight


def differentiate(weight):
    with autograd.record():
        first_loss = 1 * weight.data(pair[0])
        second_loss = 20 * weight.data(pair[1])
    autograd.backward([first_loss, second_loss])


weight = new_weight()
differentiate(weight)
print("weights:", values_of(weight.list_data()))
print("grads:  ", values_of(weight.list_grad()))

# %% [markdown]
# First the store updates. `step(n)` divides by the batch size n, and 1 changes nothing.

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=True)
trainer.step(1)
print("weights:", values_of(weight.list_data()))
print("grads:  ", values_of(weight.list_grad()))

# %% [markdown]
# Gradients went in, weights came out. The sum never reached `grad`: each device still holds the
# gradient of its own shard.
#
# Now the devices update. `step` then has two halves that we can call ourselves:

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=False)

trainer.allreduce_grads()
print("between the halves, weights:", values_of(weight.list_data()))
print("between the halves, grads:  ", values_of(weight.list_grad()))

trainer.update(1)
print("after update, weights:      ", values_of(weight.list_data()))

# %% [markdown]
# Gradients went in, sums came out, and each device made the same update. Between the halves each
# device has the whole batch's gradient, still as a sum. There you can look at its norm, or clip it
# (deeper: KVStore's cases).
#
# And with no store at all?

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore=None)
trainer.step(1)
print("weights:", values_of(weight.list_data()))

# %% [markdown]
# Nothing is summed. One model has become two, with no error.
#
# If you don't say which way, then on several devices a store of the kind `device` updates. For the
# exceptions see deeper: KVStore's cases.
#
# ### Whose weights are they?
#
# **Predict:** after a first step a program sets all weights to 1000, in place. What are they after
# a second step, if the store updates? And if the devices do? (The gradients are 1 and 20 again.)

# %% tags=["trains"]
def write_between_two_steps(update_on_kvstore):
    weight = new_weight()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1},
                            update_on_kvstore=update_on_kvstore)
    differentiate(weight)
    trainer.step(1)

    for replica in weight.list_data():
        replica[:] = 1000

    differentiate(weight)
    trainer.step(1)
    return values_of(weight.list_data())


print("the store updates: ", write_between_two_steps(update_on_kvstore=True))
print("the devices update:", write_between_two_steps(update_on_kvstore=False))

# %% [markdown]
# Where the store updates, the weights are the store's. It went on from its own 79 to 58, and the
# pull overwrote the 1000. Where the devices update, the weights are theirs: 1000 − 21. (Before the
# first step you may write: the store begins with the first device's weights.)
#
# How do you write weights, then? There is also `weight.set_data(...)`:
#
# | | written in place | by `set_data` |
# | --- | --- | --- |
# | the store updates | the weights are lost | they stay, but momentum begins again at 0 |
# | the devices update | they stay, and so does momentum | they stay, and so does momentum |
#
# (Where the store updates, `set_data` makes Trainer set up a new store. Deeper: KVStore's cases
# tries all four.)

# %% tags=["fold", "trains"]
# check: the numbers above; set_data's weights arrive both ways; what the default is
for in_store, grads in [(True, [1, 20]), (False, [21, 21])]:
    weight = new_weight()
    differentiate(weight)
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=in_store)
    trainer.step(1)
    assert values_of(weight.list_data()) == [79, 79]
    assert values_of(weight.list_grad()) == grads
    weight.set_data(nd.array([1000]))
    differentiate(weight)
    trainer.step(1)
    assert values_of(weight.list_data()) == [979, 979], "set_data's weights arrive"
assert write_between_two_steps(update_on_kvstore=True) == [58, 58]
assert write_between_two_steps(update_on_kvstore=False) == [979, 979]

weight = new_weight()
differentiate(weight)
gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore=None).step(1)
assert values_of(weight.list_data()) == [99, 80]

default = gluon.Trainer([new_weight()], "sgd", {"learning_rate": 1})
default._init_kvstore()
assert default._kvstore.type == "device"
try:
    default.allreduce_grads()
    raise RuntimeError("the default leaves the update to the devices")
except AssertionError as error:
    assert "updated on kvstore" in str(error)
for in_store in [True, False]:
    weight = new_weight()
    weight.data(pair[1])[:] = 500
    differentiate(weight)
    gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=in_store).step(1)
    assert values_of(weight.list_data()) == [79, 79], "the second device kept its own weight"

# %% [markdown]
# **Keep this:** say `update_on_kvstore=False` if you do something between sum and update, or write
# to the weights. Otherwise take either: with SGD both train the same weights, if each device has a
# new gradient in each step (deeper: KVStore's cases).
#
# ## Who computes the sum?
#
# A network has many parameters, so there are many sums to make. The device that makes a parameter's
# sum is its *owner*. MXNet's tutorial says that the work is shared "round-robin", in turn. Is it?
#
# We send a spy: an optimizer that changes nothing. At each push the store calls its `update`, with
# the key, the stored weight, the sum as `grad`, and the optimizer's state. The spy prints on which
# device the sum is.

# %%
class Spy(mx.optimizer.Optimizer):
    def update(self, key, weight, grad, state):
        print(f"{key}: the sum is on {grad.context}")


store = mx.kvstore.create("device")
store.set_optimizer(Spy())
store.init("one", nd.zeros(20))
store.push("one", [nd.zeros(20, ctx=pair[0]), nd.zeros(20, ctx=pair[1])])

# %% [markdown]
# Now four keys of different sizes. As in a network, all are there before the first push. In turn,
# `cpu(0)` would own *a* and *c*, and `cpu(1)` would own *b* and *d*:

# %%
sizes = {"a": 20, "b": 60, "c": 8, "d": 30}  # entries of each key

store = mx.kvstore.create("device")
store.set_optimizer(Spy())
for key in sizes:
    store.init(key, nd.zeros(sizes[key]))
for key in sizes:
    store.push(key, [nd.zeros(sizes[key], ctx=pair[0]), nd.zeros(sizes[key], ctx=pair[1])])

# %% [markdown]
# It isn't in turn. At the first push, the store takes the parameters from the largest to the
# smallest. Each goes to the device that has the fewest entries so far:
#
# ![Four parameters with 20, 60, 8 and 30 entries. cpu(0) gets the largest, b with 60. cpu(1) gets
# d, a and c, 58 entries in all.](src/drawings/owners.svg)
#
# In Python:

# %%
def largest_first(sizes, k):
    load = [0] * k  # entries of each device so far
    owner = {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        emptiest = load.index(min(load))
        owner[name] = emptiest
        load[emptiest] += sizes[name]
    return owner, load


owner, load = largest_first(sizes, k=2)
print("owners:", owner)
print("entries on each device:", load)

# %% tags=["fold"]
# check: who owns how much, in 40 random cases on 2 to 8 devices
# (In MXNet 1.9.1 it is CommDevice::InitMergeBuffer, in src/kvstore/comm.h.)
import numpy as np


class Notes(mx.optimizer.Optimizer):
    """Changes no weight. Notes where each key's sum and stored weight are."""

    def __init__(self):
        super().__init__()
        self.owner = {}
        self.weight_on = {}

    def update(self, key, weight, grad, state):
        self.owner[key] = grad.context.device_id
        self.weight_on[key] = weight.context


def notes_on(sizes, k):  # sizes: {key: entries}
    notes = Notes()
    store = mx.kvstore.create("device")
    store.set_optimizer(notes)
    for key in sizes:
        store.init(key, nd.zeros(sizes[key]))
    for key in sizes:
        store.push(key, [nd.zeros(sizes[key], ctx=mx.cpu(rank)) for rank in range(k)])
    nd.waitall()
    assert set(notes.owner) == set(sizes), "an error in `update` is swallowed"
    return notes


def loads_of(owner, sizes, k):
    """How many entries each device owns, sorted: equal keys or devices may change places."""
    load = [0] * k
    for key, rank in owner.items():
        load[rank] += sizes[key]
    return sorted(load)


assert notes_on(sizes, k=2).owner == owner
rng = np.random.default_rng(0)
by_turns = 0
for case in range(40):
    k = int(rng.integers(2, 9))
    some = dict(enumerate(rng.integers(1, 30, size=rng.integers(k, 25)).tolist()))
    found = loads_of(notes_on(some, k).owner, some, k)
    assert found == sorted(largest_first(some, k)[1]), f"{some} on {k} devices"
    in_turn = {key: key % k for key in some}
    by_turns += found == loads_of(in_turn, some, k)
print("40 random cases, loads as `largest_first` says: all 40")
print(f"40 random cases, loads as if in turn: {by_turns}")

# %% [markdown]
# **Keep this:** the largest first, each to the emptiest device.
#
# **On GPUs** the owner also keeps the stored weight and the optimizer's state of its parameters,
# and computes their update (`KVStoreLocal::PushImpl` and `Updater`, MXNet 1.9.1; read, not run).
# Simulated devices differ here: weight and state are on `cpu_pinned(0)`, which is the host's
# memory and no device:

# %% tags=["fold"]
# check: where sums, stored weights and states are, on simulated devices
notes = notes_on(sizes, k=2)
assert notes.owner == owner
assert notes.weight_on == {key: mx.cpu_pinned(0) for key in sizes}

store = mx.kvstore.create("device")
store.set_optimizer(mx.optimizer.SGD(momentum=0.9))
for key in sizes:
    store.init(key, nd.zeros(sizes[key]))
    store.push(key, [nd.zeros(sizes[key], ctx=device) for device in pair])
momenta = store._updater.states
assert {key: momenta[key].context for key in momenta} == notes.weight_on
print(f"d: the sum is on cpu({notes.owner['d']}), the stored weight on {notes.weight_on['d']}, "
      f"its momentum on {momenta['d'].context}")

# %% [markdown]
# ## What it costs in memory
#
# To make a sum, an owner needs *buffers*: arrays of its own, each as large as the parameter.
#
# - One is for the sum. It begins as a copy of `cpu(0)`'s array, so that no pushed array changes.
# - The other $k - 1$ are for copies of the arrays of `cpu(1)`, `cpu(2)` and so on. Even an owner's
#   own array is copied.
#
# That makes $k$ buffers. **Predict:** two devices push a key of 5,000 entries, 4 bytes each. How
# many kilobytes does its owner need? MXNet's profiler counts them.

# %% tags=["fold", "measured"]
# measure: the kilobytes that a store takes on each of two devices, by MXNet's profiler
# (In MXNet 1.9.1 the buffers are those of CommDevice::Reduce, in src/kvstore/comm.h.)
from helpers.device import cores
from helpers.stores import kilobytes

some = {"1,000 entries": 1000, "2,000": 2000, "5,000": 5000}
if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host
    owners = largest_first(some, k=2)[0]
    expected = [0, 0]
    for name in some:
        expected[owners[name]] += 2 * 4 * some[name] / 1000  # two arrays, 4 bytes an entry
    found = kilobytes([5000])
    print(f"5,000 entries: {found[0]:.0f} kB on the owner, cpu(0), {found[1]:.0f} kB on cpu(1)")
    assert found == [40, 0] and largest_first({"5,000": 5000}, k=2)[0] == {"5,000": 0}
    found = kilobytes(list(some.values()))
    print(f"with keys of 1,000 and 2,000 entries, too: {found[0]:.0f} kB and {found[1]:.0f} kB")
    assert found == expected, "two arrays of each key, on its owner"

    momentum = mx.optimizer.SGD(momentum=0.9)
    updating = kilobytes(list(some.values()), prepare=lambda store: store.set_optimizer(momentum))
    assert updating == expected, "the same where the store updates"
    by_local = kilobytes(list(some.values()), "local")
    print(f"the same with a `local` store: {by_local[0]:.0f} kB and {by_local[1]:.0f} kB")
    assert by_local == [0, 0], "local takes nothing on the devices"

# %% [markdown]
# $k$ · 4 · 5,000 bytes are 40 kB for $k = 2$.
#
# ### One big embedding
#
# A store doesn't cut a parameter. So what if one is very large? Take a model for texts of 8 words.
# Its embedding has 64 numbers for each of 20,000 words. Two dense layers follow, with 256 and 10
# units. **Predict:** on four devices, what else does the embedding's owner own?

# %%
sizes = {
    "embedding": 20_000 * 64,
    "dense 1": 8 * 64 * 256,  # from 8 words, 64 numbers each, to 256 units
    "bias 1": 256,
    "dense 2": 256 * 10,
    "bias 2": 10,
}
owner, load = largest_first(sizes, k=4)
for name in sizes:
    print(f"{name}: {sizes[name]} entries, summed on cpu({owner[name]})")
print("entries on each device:", load)

# %% tags=["fold", "trains"]
# check: Trainer has these owners, too; on eight devices the embedding is alone, too
from mxnet.gluon import nn

four = [mx.cpu(rank) for rank in range(4)]
reader = nn.Sequential()
reader.add(nn.Embedding(20_000, 64))
reader.add(nn.Dense(256, in_units=8 * 64, activation="relu"))  # it makes (n, 8, 64) to (n, 512)
reader.add(nn.Dense(10, in_units=256))
reader.initialize(ctx=four)
losses = []
with autograd.record():
    for device in four:
        losses.append(reader(nd.ones((1, 8), ctx=device)).sum())
autograd.backward(losses)
parameters = list(reader.collect_params().values())
assert [parameter.data(four[0]).size for parameter in parameters] == list(sizes.values())

notes = Notes()
trainer = gluon.Trainer(parameters, notes)
trainer.step(4)
nd.waitall()
by_name = {name: notes.owner[key] for key, name in enumerate(sizes)}
assert by_name == owner, "Trainer's owners aren't these"
assert notes_on(sizes, k=4).owner == owner
for k in [4, 8]:
    there = list(notes_on(sizes, k).owner.values())
    assert there.count(there[0]) == 1, f"the embedding isn't alone on {k} devices"
assert sizes["embedding"] > sum(sizes.values()) - sizes["embedding"]

# %% [markdown]
# Nothing else. How much does each device hold, with $k$ buffers of each parameter on its owner? (We
# leave activations out.)

# %%
k = 4
bytes_each = 4  # of a float32
MB = 1e6

weights_mb = sum(sizes.values()) * bytes_each / MB
print(f"weights and gradients: {2 * weights_mb:.3f} MB on each device")

buffers_mb = []
for rank in range(k):
    owned_mb = load[rank] * bytes_each / MB  # of all parameters that this device owns
    buffers_mb.append(k * owned_mb)
    print(f"buffers on cpu({rank}): {buffers_mb[rank]:.3f} MB")

# %% tags=["fold"]
# draw: megabytes on each of four devices
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

replica = 2 * weights_mb
ratio = (replica + max(buffers_mb)) / (replica + min(buffers_mb))
title = f"The embedding's owner holds {ratio:.1f} times as much as cpu(3)"
fig, ax = figure(title, "device", "MB (computed, without activations)")
ax.bar(range(4), [replica] * 4, color=GREY, label="weights and gradients")
ax.bar(range(4), buffers_mb, bottom=replica, color=ORANGE, hatch="//", edgecolor="white",
       label="buffers of the store")
ax.axhline(replica + np.mean(buffers_mb), color=BLUE, ls="--",
           label="all, if buffers were shared evenly")
ax.set_xticks(range(4), [f"cpu({rank})" for rank in range(4)])
ax.legend()
show(fig, alt="Bars for four devices: weights and gradients are equal, most of the buffers are on "
     "cpu(0), far above the dashed line of even shares.")

# %% tags=["fold"]
# check: the largest and the smallest bar are cpu(0)'s and cpu(3)'s; the embedding's bytes, counted
assert max(buffers_mb) == buffers_mb[0] and min(buffers_mb) == buffers_mb[3]
assert sum(load) == 20_000 * 64 + 512 * 256 + 256 + 256 * 10 + 10
if cores() >= 2:
    four_arrays = kilobytes([20_000 * 64], arrays_a_key=4)
    assert sum(four_arrays) / 1e3 == buffers_mb[0], "four arrays of the embedding, as counted"

# %% [markdown]
# Shards are equal, so the fullest device limits the batch for all. (If the store updates on GPUs,
# the owner holds even more: the stored weight and the state.) **Keep this:** by this count,
# the owner of one big parameter is the first to run out of memory. What can you do?
#
# - Make the batch smaller. That frees activations, on every device.
# - Cut the embedding into several parameters (exercise 3).
# - Say `kvstore="local", update_on_kvstore=True`. The store takes nothing on the devices, as
#   counted above, but all gradients travel to the host.
#
# ## Summary
#
# - A push stores the sum of the devices' arrays, a pull copies it to all: an all-reduce.
# - With an optimizer in the store, `Trainer`'s default on several devices, gradients go in and
#   weights come out. `grad` stays each device's own, and weights written in place after the first
#   step are lost.
# - With `update_on_kvstore=False`, sums come out, and each device updates.
# - With `kvstore=None`, nothing is summed, and there is no error.
# - Each parameter has an owner: the largest first, each to the emptiest device. The owner needs $k$
#   arrays of the parameter's size.
#
# Next, chapter 08: ResNet-18.
#
# Deeper: KVStore's cases has clipping, 2-bit compression, other kinds of store, and their speed.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*
# (`docs/tutorials/gluon/multi_gpu.md` at 1.5.1).

# %% [markdown]
# ## Exercises
#
# 1. **A log that misleads.** A program prints the norm of `grad` on `cpu(0)` after each `step`,
#    with a default trainer. What does it print for `weight`, and what is the whole batch's norm?
#    Mend the program in two ways: the devices update, or the store does.
# 2. **Stop and go on.** Train `weight` with momentum 0.5 for four steps. Then train another for two
#    steps and save the weight and, by `trainer.save_states`, the state. Load both into a new
#    parameter and trainer, and train two more. Are the weights equal? And without the state?
# 3. **Cut the embedding.** Write a block with four embeddings of 5,000 words that computes what one
#    of 20,000 does, gradients included. What share of all entries does the busiest of four devices
#    own now? Check with a store and a spy.

# %% [markdown]
# ### Answer 1
#
# The log has 1, the gradient of `cpu(0)`'s own shard; the whole batch's is 21. Either let the
# devices update and look between the two halves, or leave the update to the store and add up for
# the log yourself.

# %% tags=["solution", "trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1})
trainer.step(1)
print("logged:", weight.grad(pair[0]).norm().asscalar())
assert weight.grad(pair[0]).norm().asscalar() == 1

weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=False)
trainer.allreduce_grads()
print("between the halves:", weight.grad(pair[0]).norm().asscalar())
assert weight.grad(pair[0]).norm().asscalar() == 21
trainer.update(1)

weight = new_weight()
differentiate(weight)
copies = [grad.copy() for grad in weight.list_grad()]
helpers.allreduce(copies)
print("by hand:", copies[0].norm().asscalar())
assert copies[0].norm().asscalar() == 21
assert values_of(weight.list_grad()) == [1, 20], "the gradients themselves are untouched"

# %% [markdown]
# ### Answer 2
#
# With the states they are equal. Without them momentum starts from zero again.

# %% tags=["solution", "trains"]
import tempfile

folder = tempfile.mkdtemp()
with_momentum = {"learning_rate": 1, "momentum": 0.5}


def take_steps(weight, trainer, steps):
    for _ in range(steps):
        differentiate(weight)
        trainer.step(1)


weight = new_weight()
trainer = gluon.Trainer([weight], "sgd", with_momentum)
take_steps(weight, trainer, 4)
in_one_go = values_of(weight.list_data())

weight = new_weight()
trainer = gluon.Trainer([weight], "sgd", with_momentum)
take_steps(weight, trainer, 2)
nd.save(folder + "/weight", weight.data(pair[0]))
trainer.save_states(folder + "/states")

found = {}
for states in ["with states", "without"]:
    again = new_weight()
    again.set_data(nd.load(folder + "/weight")[0])
    trainer = gluon.Trainer([again], "sgd", with_momentum)
    if states == "with states":
        trainer.load_states(folder + "/states")
    take_steps(again, trainer, 2)
    found[states] = values_of(again.list_data())
print("in one go:", in_one_go, *found.items())
assert found["with states"] == in_one_go
assert found["without"] != in_one_go, "momentum was lost"

# %% [markdown]
# ### Answer 3
#
# Word $w$ is in row $w \bmod 5000$ of table $\lfloor w / 5000 \rfloor$. Each table looks up every
# word, and a mask keeps only the words that are its own.

# %% tags=["solution"]
class FourTables(nn.Block):
    def __init__(self):
        super().__init__()
        self.tables = nn.Sequential()
        for _ in range(4):
            self.tables.add(nn.Embedding(5000, 64))

    def forward(self, words):
        table_of = nd.floor(words / 5000)
        row = words % 5000
        total = 0
        for number, table in enumerate(self.tables):
            mine = table_of == number
            total = total + table(row) * mine.expand_dims(-1)
        return total


whole = nn.Embedding(20_000, 64)
parts = FourTables()
whole.initialize(mx.init.Normal())
parts.initialize()
for number, table in enumerate(parts.tables):
    table.weight.set_data(whole.weight.data()[5000 * number : 5000 * (number + 1)])

# %% tags=["solution"]
words = nd.array([0, 4999, 5000, 12_345, 12_345, 19_999])
for net in [whole, parts]:
    with autograd.record():
        loss = (net(words) * nd.arange(6).expand_dims(1)).sum()
    loss.backward()
assert (parts(words) == whole(words)).asnumpy().all(), "the same rows"
grads = nd.concat(*[table.weight.grad() for table in parts.tables], dim=0)
assert (grads == whole.weight.grad()).asnumpy().all(), "and the same gradients"

cut = sizes.copy()
del cut["embedding"]
for number in range(4):
    cut[f"table {number}"] = 5000 * 64
load_now = loads_of(notes_on(cut, 4).owner, cut, 4)
before = sizes["embedding"] / sum(sizes.values())
assert load_now == sorted(largest_first(cut, 4)[1])
print(f"the busiest device owns {max(load_now) / sum(load_now):.1%}; before {before:.1%}")
