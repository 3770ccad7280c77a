# %% [markdown]
# # 07 · KVStore: where the sum happens
#
# In chapter 06 one call, `trainer.step`, summed the gradients and updated every replica. Inside it
# works MXNet's *key-value store*, KVStore. Devices push arrays into it and pull arrays out of it:
#
# ![Left: cpu(0) pushes 1, cpu(1) pushes 20, and the store holds 1 + 20 = 21. Right: both devices
# pull 21 from the store.](src/drawings/push_pull.svg)
#
# ## What you'll do
#
# Push and pull by hand, let a store update weights, watch what `Trainer` does with a store, and
# find out which device adds up which parameter.
#
# ## What you'll learn
#
# - what `init`, `push` and `pull` do, and what an optimizer in the store changes;
# - the two ways in which `Trainer` can update, and what each leaves in `grad`;
# - which device owns which parameter;
# - why one big embedding fills one device before the others.
#
# ## What you need
#
# Chapters 03 to 06. No GPU. Reading takes {reading time}, running less than half a minute.

# %%
import helpers
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]  # simulated devices: we look at results, not at speed

# %% [markdown]
# ## Push and pull
#
# What does a store do with the arrays that it gets? It holds one array for each *key*, which is a
# string or a number. `init` gives a key its first array, here 7. Then two devices push theirs.
# (`device` is the kind of store that adds up on the devices.)

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
assert values_of(pulled) == [21, 21]
assert values_of(pushed) == [1, 20], "a push leaves the pushed arrays as they are"

# %% [markdown]
# `pushpull` does both in one call. It pulls into the arrays that were pushed, unless you name
# others. That is an all-reduce: each array becomes the sum of all, in place.

# %%
store.pushpull("sum", pushed)
print(values_of(pushed))

# %% [markdown]
# Is it right for float64, for matrices and on more devices? Chapter 03's judge knows.

# %% tags=["fold"]
# check: pushpull by `device` and by `local` passes the judge of chapter 03 on 1 to 8 devices
from helpers.schedules import wrong_devices


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
    print(f"{kind}: right on 1 to 8 devices")

# %% [markdown]
# The other kind, `local`, adds up in the *host's* memory: that of the computer, not of a device.
# (MXNet counts it apart even where the devices are simulated and use the same memory.) (Push to a
# key always from the same number of devices: a later push from more may end the process without an
# error. `CommDevice::Reduce` in `src/kvstore/comm.h`, MXNet 1.9.1.)
#
# **Keep this:** without an optimizer, a push stores the sum of the devices' arrays, and a pull
# copies it to all.
#
# ## A store that updates
#
# Can a store do more than add? It can have an *optimizer*. Then it holds a weight, and devices push
# gradients. Let the weight be 100, the learning rate 1, and the gradients 1 and 20. **Predict:**
# what do the devices pull?

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
# 100 − 21 = 79, and 79 − 21 = 58. With an optimizer, a push doesn't replace what is stored: it is
# one step of SGD with the *sum* of the gradients, and a pull gets the new weight. An optimizer
# with momentum keeps that in the store, too: its *state*.

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
# `Trainer` gives each parameter a key: its number in the list of parameters. At first it copies the
# first device's weights to all others. In each step it pushes the gradients. Who then updates the
# weights? There are two ways:
#
# ![Two panels. In both, cpu(0) pushes the gradient 1 and cpu(1) pushes 20. Left, the store
# computes 100 minus 21 = 79 and sends the weight 79 to both devices; their gradients stay 1 and 20.
# Right, the store sends the sum 21 to both; each device computes 100 minus 21 = 79 and holds 21 as
# its gradient.](src/drawings/two_updates.svg)
#
# `update_on_kvstore=True` is the way at the left, `False` that at the right. We run both, with the
# numbers of the drawing. The loss is 1 · weight on `cpu(0)` and 20 · weight on `cpu(1)`, so the
# gradients are 1 and 20.
#
# %% tags=["trains"]
def new_weight():
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(100))
    weight.initialize(ctx=pair)
    return weight


def differentiate(weight):
    with autograd.record():
        losses = [1 * weight.data(pair[0]), 20 * weight.data(pair[1])]
    autograd.backward(losses)


weight = new_weight()
differentiate(weight)
print("weights:", values_of(weight.list_data()))
print("grads:  ", values_of(weight.list_grad()))

# %% [markdown]
# First the store updates. Do the devices hold after `step` what is drawn?

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=True)
trainer.step(1)
print("weights:", values_of(weight.list_data()))
print("grads:  ", values_of(weight.list_grad()))
assert values_of(weight.list_data()) == [79, 79]
assert values_of(weight.list_grad()) == [1, 20]

# %% [markdown]
# Gradients went in, weights came out. The sum never reached `grad`: each device still holds the
# gradient of its own shard. A program that logs the norm of `grad` logs that of one shard.
#
# Now the devices update. `step` then has two halves that can be called: `allreduce_grads` and
# `update`.

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=False)

trainer.allreduce_grads()
print("weights:", values_of(weight.list_data()))
print("grads:  ", values_of(weight.list_grad()))

trainer.update(1)
print("weights:", values_of(weight.list_data()))
assert values_of(weight.list_data()) == [79, 79]
assert values_of(weight.list_grad()) == [21, 21]

# %% [markdown]
# Gradients went in, sums came out, and each device made the same update. Between the halves each
# device has the whole batch's gradient, as a sum; `update(n)` divides by the batch size n. That is
# the place to look at its norm, or to clip it (deeper: KVStore's cases).
#
# And with no store at all?

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, kvstore=None)
trainer.step(1)
print("weights:", values_of(weight.list_data()))
assert values_of(weight.list_data()) == [99, 80]

# %% [markdown]
# Nothing is summed. One model has become two, with no error.
#
# Which way does Trainer take, if you don't say? On several devices the store updates, in a store
# of the kind `device`. (Exceptions, such as sparse gradients or a single device, are in deeper:
# KVStore's cases.)
#
# ### Whose weights are they?
#
# Suppose that a program writes to the weights between two steps. **Predict:** after a first step
# all weights are set to 1000, in place. What are they after a second step, if the store updates?
# And if the devices do?

# %% tags=["trains"]
def write_between_two_steps(update_on_kvstore):
    weight = new_weight()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1},
                            update_on_kvstore=update_on_kvstore)
    differentiate(weight)
    trainer.step(1)
    print("after step 1:", values_of(weight.list_data()))

    for replica in weight.list_data():
        replica[:] = 1000

    differentiate(weight)
    trainer.step(1)
    print("after step 2:", values_of(weight.list_data()))
    return values_of(weight.list_data())


print("the store updates")
by_store = write_between_two_steps(update_on_kvstore=True)
print("the devices update")
by_devices = write_between_two_steps(update_on_kvstore=False)

# %% [markdown]
# Where the store updates, the weights are the store's. It went on from its own 79 to 58, and the
# pull overwrote the 1000. Where the devices update, the weights are theirs: 1000 − 21. (Where the
# store updates, `set_data` makes Trainer set up a new store: the weights arrive, the optimizer's
# state is lost.)

# %% tags=["fold", "trains"]
# check: the numbers above, the default, and that at first the first device's weights go to all
assert by_store == [58, 58]
assert by_devices == [979, 979]
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
# **Keep this:** say `update_on_kvstore=False` if you do something between sum and update, write to
# the weights yourself, or want an error where a device has no new gradient (chapter 05).
# Otherwise, with SGD, both ways train
# like one device, to $10^{-12}$ (deeper: KVStore's
# cases).
#
# ## Who computes the sum?
#
# A network has many parameters, so there are many sums to make. Each of them is a star as in
# chapter 03, but not all with the same device in the middle. The one that sums a parameter is its
# *owner*. MXNet's tutorial says that a `device` store deals the network's blocks out in turn,
# "round-robin".
#
# To see it, we send a spy: an optimizer that changes nothing. After each push the store calls its
# `update`, and hands it the sum of the gradients as `grad`. Where that array is, the sum was made.

# %%
class Spy(mx.optimizer.Optimizer):
    """Changes no weight. Notes on which device each key's sum is."""

    def __init__(self):
        super().__init__()
        self.owner = {}

    def update(self, index, weight, grad, state):
        self.owner[index] = grad.context  # index is the key

# %% [markdown]
# The first push shares out all keys that the store has by then. So we make all keys first, and then
# push to each. `sizes` says how many entries each key has:

# %%
def find_owners(sizes, k):  # sizes: {key: entries}
    spy = Spy()
    store = mx.kvstore.create("device")
    store.set_optimizer(spy)
    for key in sizes:
        store.init(key, nd.zeros(sizes[key]))
    for key in sizes:
        arrays = [nd.zeros(sizes[key], ctx=mx.cpu(rank)) for rank in range(k)]
        store.push(key, arrays)
    nd.waitall()
    return spy.owner

# %% [markdown]
# In turn, `cpu(0)` would own *a* and *c*, and `cpu(1)` would own *b* and *d*:

# %%
sizes = {"a": 20, "b": 60, "c": 8, "d": 30}
owner = find_owners(sizes, k=2)
for key in sizes:
    print(f"{key}: {sizes[key]} entries, added up on {owner[key]}")

# %% [markdown]
# It isn't in turn. At the first push, the store takes the parameters from the largest to the
# smallest. Each goes to the device that has the fewest entries so far
# (`CommDevice::InitMergeBuffer` in `src/kvstore/comm.h`):
#
# ![Four parameters with 20, 60, 8 and 30 entries. cpu(0) gets the largest, b with 60. cpu(1) gets
# d, a and c, 58 entries in all.](src/drawings/owners.svg)
#
# In Python:

# %%
def largest_first(sizes, k):
    load = [0] * k  # entries of each device so far
    rank_of = {}
    for name in sorted(sizes, key=sizes.get, reverse=True):
        emptiest = load.index(min(load))
        rank_of[name] = emptiest
        load[emptiest] += sizes[name]
    return rank_of, load


rank_of, load = largest_first(sizes, k=2)
print("owners:", rank_of)
print("entries on each device:", load)

# %% tags=["fold"]
# check: who owns how much, in 40 random cases on 2 to 8 devices
def loads_found(sizes, owner, k):
    """How many entries each device owns, sorted: equal keys or devices may change places."""
    load = [0] * k
    for key, device in owner.items():
        load[device.device_id] += sizes[key]
    return sorted(load)


assert {key: device.device_id for key, device in owner.items()} == rank_of
rng = np.random.default_rng(0)
in_turn = 0
for case in range(40):
    k = int(rng.integers(2, 9))
    some = dict(enumerate(rng.integers(1, 30, size=rng.integers(k, 25)).tolist()))
    found = loads_found(some, find_owners(some, k), k)
    assert found == sorted(largest_first(some, k)[1]), f"{some} on {k} devices"
    in_turn += found == loads_found(some, {key: mx.cpu(key % k) for key in some}, k)
print(f"of 40 random cases, 40 are as `largest_first` says, and {in_turn} happen to be as in turn")

# %% [markdown]
# **Keep this:** the largest first, each to the emptiest device.
#
# **On GPUs** the owner does more, if the store updates: it also keeps the optimizer's state of
# *its* parameters, updates them, and sends the new weights to the others (`KVStoreLocal::PushImpl`
# in `src/kvstore/kvstore_local.h`, read, not run). To share out the state is the idea of *ZeRO
# stage 1*, which also cuts single parameters, and so
# shares evenly (chapter 16). On CPU contexts the
# stored weights stay in the host's memory.
#
# ## What it costs in memory
#
# What does an owner need for its sums? A `device` store makes *buffers* at the owner: one for the
# sum, which begins as a copy of the first device's array, and one for each other device's array.
# That makes $k$ arrays of the parameter's size (`CommDevice::Reduce`). **Predict:** keys of 1,000,
# 2,000 and 5,000 entries of 4 bytes, on two devices. How many kilobytes does the store take on
# each? MXNet's profiler counts them.

# %% tags=["fold", "measured"]
# measure: the kilobytes that a store takes on each of two devices, by MXNet's profiler
import json
import tempfile
import time

from helpers.device import cores

profile = tempfile.mkdtemp() + "/profile.json"
mx.profiler.set_config(profile_memory=True, aggregate_stats=True, filename=profile)


def counters(reset=False):
    """The least and the most kB that have been counted on each device of the pair."""
    memory = json.loads(mx.profiler.dumps(reset, "json"))["Memory"]["Device Storage"]
    found = []
    for device in pair:
        name = f"Memory: {device.device_type}/{device.device_id}"
        found.append(memory.get(name, {"Min": 0, "Max": 0}))
    return found


def kilobytes(sizes, kind="device", arrays_a_key=2, prepare=None):
    """What a store takes on each device of the pair; more arrays than two take turns on them."""
    places = [pair[rank % 2] for rank in range(arrays_a_key)]
    keys = list(range(len(sizes)))
    grads = []
    for size in sizes:
        grads.append([nd.ones(size, ctx=device) for device in places])
    nd.waitall()
    mx.profiler.set_state("run")
    store = mx.kvstore.create(kind)
    if prepare is not None:
        prepare(store)
    store.init(keys, [arrays[0] for arrays in grads])
    store.push(keys, grads)
    nd.waitall()
    del store  # freed while the profiler counts, so that the next count begins at zero
    deadline = time.monotonic() + 30
    while any(device["Min"] for device in counters()) and time.monotonic() < deadline:
        time.sleep(0.01)  # not back at zero: the engine frees arrays a little later
    mx.profiler.set_state("stop")
    return [device["Max"] for device in counters(reset=True)]


if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host
    _, load = largest_first({"a": 1000, "b": 2000, "c": 5000}, k=2)
    expected = [2 * 4 * entries / 1000 for entries in load]  # two arrays of 4 bytes an entry
    found = kilobytes([1000, 2000, 5000])
    by_local = kilobytes([1000, 2000, 5000], "local")
    momentum = mx.optimizer.SGD(momentum=0.9)
    updating = kilobytes([1000, 2000, 5000], prepare=lambda store: store.set_optimizer(momentum))
    assert sorted(updating) == sorted(expected), "the same where the store updates"
    print(f"expected: {expected} kB; counted with device: {found} kB, with local: {by_local} kB")
    assert sorted(found) == sorted(expected), "two arrays of each key, on its owner"
    assert by_local == [0, 0], "local takes nothing on the devices"

# %% [markdown]
# Two arrays of each key, on its owner: 2 · 4 · 5,000 bytes are 40 kB, and the two other keys take
# 24 kB. (With an optimizer in the store the same was counted, so owners have these buffers in both
# ways of updating.) In all these are $k$ copies of the model. Spread evenly over $k$ devices, each
# would hold one more copy.
#
# ### One big embedding
#
# But the store doesn't cut a parameter. We take a model for texts of 8 words. It knows 20,000
# words, has 64 numbers for each, and three dense layers. (The first has 8 · 64 = 512 inputs.)

# %%
four = [mx.cpu(rank) for rank in range(4)]
text = nn.Sequential()
text.add(nn.Embedding(20_000, 64))
text.add(nn.Dense(512, in_units=8 * 64, activation="relu"))
text.add(nn.Dense(512, in_units=512, activation="relu"))
text.add(nn.Dense(10, in_units=512))
text.initialize(ctx=four)

# %% [markdown]
# A real `Trainer` gets the spy as its optimizer. `step` needs gradients, so each device makes some,
# from a text in which all words are word 1:

# %% tags=["trains"]
losses = []
with autograd.record():
    for device in four:
        words = nd.ones((1, 8), ctx=device)
        losses.append(text(words).sum())
autograd.backward(losses)

parameters = list(text.collect_params().values())
spy = Spy()
gluon.Trainer(parameters, spy).step(4)
nd.waitall()

# %% [markdown]
# **Predict:** what else does the embedding's owner own?

# %%
names = ["embedding", "dense 1", "bias 1", "dense 2", "bias 2", "dense 3", "bias 3"]
sizes = {}
for key, parameter in enumerate(parameters):
    sizes[key] = parameter.data(four[0]).size
    print(names[key], parameter.shape, "has", sizes[key], "entries, summed on", spy.owner[key])

# %% tags=["fold"]
# check: it owns nothing else, on four devices and on eight
rank_of, load = largest_first(sizes, k=4)
assert loads_found(sizes, spy.owner, 4) == sorted(load), "Trainer's owners aren't by size"
for k in [4, 8]:
    owners_now = spy.owner if k == 4 else find_owners(sizes, k)
    assert list(owners_now.values()).count(owners_now[0]) == 1, f"not alone on {k} devices"
    assert largest_first(sizes, k)[0][0] == 0, "the embedding comes first"

# %% [markdown]
# Nothing: the embedding has more entries than all other parameters together. With $k$ buffers for
# each parameter, on its owner:

# %%
BYTES = 4  # of a float32
MB = 1e6
k = 4

all_entries = sum(sizes.values())
print(f"weights and gradients: {2 * all_entries * BYTES / MB:.1f} MB on each device")

load = [0] * k  # entries that each device owns
for key, device in spy.owner.items():
    load[device.device_id] += sizes[key]

buffers = []
for rank in range(k):
    buffers.append(k * load[rank] * BYTES / MB)
    print(f"buffers of the store on cpu({rank}): {buffers[rank]:5.2f} MB")

# %% tags=["fold"]
# draw: megabytes on each of four devices
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

replica = 2 * all_entries * BYTES / MB
ratio = (replica + max(buffers)) / (replica + min(buffers))
fig, ax = figure(f"The embedding's owner holds {ratio:.1f} times what the last device holds",
                 "device", "MB on each device (computed)")
ax.bar(range(4), [replica] * 4, color=GREY, label="weights and gradients")
ax.bar(range(4), buffers, bottom=replica, color=ORANGE, hatch="//", edgecolor="white",
       label="buffers of the store")
ax.axhline(replica + np.mean(buffers), color=BLUE, ls="--",
           label="total, if buffers were even")
ax.set_xticks(range(4), [f"cpu({rank})" for rank in range(4)])
ax.legend()
show(fig, alt="Bars for four devices: weights and gradients are equal, most of the buffers are on "
     "cpu(0), far above the dashed line of even shares.")

# %% tags=["fold"]
# check: what the text says of the figure
assert sizes[0] > sum(load) - load[0], "the embedding has more entries than the others own together"
assert max(buffers) == buffers[0], "most buffers are on cpu(0)"
assert all_entries == 20_000 * 64 + 2 * (512 * 512 + 512) + 512 * 10 + 10, "by hand"
if cores() >= 2:
    four_arrays = kilobytes([20_000 * 64], arrays_a_key=4)
    assert sum(four_arrays) / 1e3 == buffers[0], "four arrays of the embedding, as counted"

# %% [markdown]
# Shards are equal, so the fullest device limits the batch for all. With more devices the
# embedding's owner needs more: a buffer for each of them. **Keep this:** the owner of one big
# parameter is the first to run out of memory. What can you do?
#
# - Make the batch smaller. That frees activations, on every device.
# - Cut the embedding into several parameters (exercise 3).
# - Take `kvstore="local"`, which takes nothing on the devices, as counted above. The price: all
#   gradients travel to the host, and weights back. (Above $2^{24}$ entries add
#   `update_on_kvstore=True`, or each device holds the whole optimizer state. On a machine without
#   GPUs nothing is saved: simulated devices use the host's memory.)
#
# ## Summary
#
# - A push stores the sum of the devices' arrays, a pull copies it to all. Together they are an
#   all-reduce.
# - With an optimizer in the store, gradients go in and weights come out. `grad` stays each
#   device's own, and weights that you write in place are lost. `Trainer` does this by default on
#   several devices.
# - With `update_on_kvstore=False`, sums come out, and each device updates. Between
#   `allreduce_grads` and `update` every device has the whole batch's gradient.
# - `kvstore=None` on several devices sums nothing, without an error.
# - A `device` store gives each parameter an owner: the largest first, each to the device with the
#   fewest entries. The owner needs $k$ arrays of the parameter's size, so one big embedding fills
#   one device.
#
# Next, chapter 08: ResNet-18.
#
# Deeper: clipping, 2-bit compression, `nccl` and trees, `local` against `device` in seconds, all in
# deeper: KVStore's cases.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*
# (`docs/tutorials/gluon/multi_gpu.md` at 1.5.1); S. Rajbhandari et al., *ZeRO: memory optimizations
# toward training trillion parameter models* (2020), arXiv:1910.02054.

# %% [markdown]
# ## Exercises
#
# 1. **A log that misleads.** A program prints the norm of `grad` on `cpu(0)` after each `step`,
#    with a default trainer. What does it print for `weight`, and what is the whole batch's norm?
#    Mend the program in two ways: the devices update, or the store does.
# 2. **Stop and go on.** Train `weight` with momentum 0.5 for four steps. Then once more for two,
#    save the weight and, with `trainer.save_states`, the optimizer's state, load both into a new
#    parameter and trainer, and train two more. Are the weights equal? And without the states?
# 3. **Cut the embedding.** Write a block with four embeddings of 5,000 words that computes what one
#    of 20,000 does, gradients included. What share of all entries does the busiest of four devices
#    own now? Check with `find_owners`.

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
# Word $w$ is in row $w \bmod 5000$ of table $\lfloor w / 5000 \rfloor$. Each table looks all words
# up, and counts only for its own.

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

cut = dict(enumerate([5000 * 64] * 4 + list(sizes.values())[1:]))
load = loads_found(cut, find_owners(cut, 4), 4)
print(f"the busiest device owns {max(load) / sum(load):.1%}; before {sizes[0] / all_entries:.1%}")
