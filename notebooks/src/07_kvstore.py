# %% [markdown]
# # 07 · KVStore: where the sum happens
#
# Chapter 06 called `trainer.step` and the replicas stayed equal. Inside, MXNet's *key-value store*
# added up the gradients. But on which device? Who applies the update, and what do the gradients
# hold afterwards? This chapter opens the box. What you find decides how much memory each device
# needs, and what you can do between the sum and the update.
#
# ## What you'll do
#
# Push and pull by hand, take `step` apart to clip gradients, find out on which device each
# parameter is summed and what that costs in bytes, time the two kinds of store, and compress
# gradients to two bits an entry.
#
# ## What you'll learn
#
# - what `init`, `push`, `pull` and an updater do, and how a `Trainer` uses them;
# - `kvstore` and `update_on_kvstore`: which choices there are, and that the weights don't depend
#   on them;
# - why gradients are clipped *after* the sum, and how;
# - which device sums which parameter, why a big embedding fills one device before the others, and
#   when `local` is right;
# - what gradient compression does to the values, and its threshold to training.
#
# ## What you need
#
# Chapters 03 to 06. No GPU. Reading takes {reading time}, running less than one.

# %%
from helpers import allreduce, devices, load_data, split_and_load

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# ## Three verbs
#
# A key-value store holds one array for each *key*. `init` gives a key its first value. `push` takes
# a list of arrays, one a device, and stores their **sum**. `pull` copies what is stored to a list
# of arrays, wherever they are. So push and pull together are an all-reduce.
#
# Whether that is right needs no real devices, so we name four simulated ones. As in chapter 03,
# device $r$ holds $r + 1$ times the numbers 1 to 6, and the sum is $\frac{k(k+1)}{2}$ times them.

# %%
four = [mx.cpu(r) for r in range(4)]
pair = four[:2]


def ranked(k):
    return [nd.arange(1, 7, ctx=d) * (r + 1) for r, d in enumerate(four[:k])]  # k × [6]


# %% [markdown]
# A store of the kind `device`, and a key with the first value 7. Keys are whole numbers or strings.

# %%
store = mx.kvstore.create("device")
store.init(0, nd.full(6, 7))
pulled = [nd.zeros(6, ctx=d) for d in pair]
store.pull(0, out=pulled)
print([a.asnumpy().tolist() for a in pulled])

# %% [markdown]
# **Predict:** two devices push twice, one after the other, and then pull. Is the result the sum of
# one push, of both, or of both and the 7? And what do the pushed arrays hold?

# %%
pushed = ranked(2)
for _ in range(2):
    store.push(0, pushed)
store.pull(0, out=pulled)
print("pulled", pulled[1].asnumpy().tolist(), " pushed", pushed[1].asnumpy().tolist())

# %% [markdown]
# One push: a push *replaces* what was there. And it leaves the arrays on the devices alone, so the
# list that you pull into may be another one.
#
# Printing one device's array proves little (chapter 03). Our judge looks at *all* replicas, and
# wants exact equality unless told otherwise.

# %%
def assert_all(arrays, answer, rule, far=0):
    for a in arrays:
        off = np.abs(a.asnumpy() - answer).max()
        assert off <= far, f"{a.context} is off by {off}: {rule}"


assert_all(pulled, 3 * np.arange(1, 7), "a push replaces what was there by the sum")

# %% [markdown]
# Both kinds of store on 1 to 4 devices. `pushpull` is both verbs in one call; without `out` it
# overwrites what was pushed.
#
# Each number of devices gets a store of its own. **A key must never be pushed from more devices
# than the first time:** the buffers were made for those, and MXNet 1.9.1 does not raise an error
# then but ends the whole process.

# %%
for kind in ("local", "device"):
    for k in range(1, 5):
        store, arrays = mx.kvstore.create(kind), ranked(k)
        store.init("sum", arrays[0])
        store.pushpull("sum", arrays)
        assert_all(arrays, k * (k + 1) / 2 * np.arange(1, 7), f"all must hold the sum ({kind})")
print("local and device: right on every replica, 1 to 4 devices")

# %% [markdown]
# ## An updater
#
# A store can do more than replace. Give it an *updater*, a function of the key, the sum just pushed
# and the stored array. It runs once a push, and not once a device. Here it adds twice the sum.
#
# **Predict:** the stored value starts at 7, and two devices push three times. What is there then?

# %%
def add_twice(key, merged, stored):
    stored += 2 * merged


# %% [markdown]
# The three pushes, and a pull after each:

# %%
store = mx.kvstore.create("device")
store.init(0, nd.full(6, 7))
store._set_updater(add_twice)
for _ in range(3):
    store.pushpull(0, ranked(2), out=pulled)

# %% [markdown]
# Each push adds $2 \cdot \frac{k(k+1)}{2}$ times the numbers 1 to 6; for $k = 2$ that is 6 times.

# %%
answer = 7 + 3 * 2 * 3 * np.arange(1, 7)
assert_all(pulled, answer, "7, and three pushes that add twice the sum")
print(pulled[0].asnumpy().tolist())

# %% [markdown]
# `_set_updater` has the underscore of a function that one should not rely on. The public door is
# `set_optimizer`: an updater that treats what is stored as weights, and what is pushed as
# gradients. *This is training*: push gradients, pull weights.
#
# **Predict:** SGD with rate $\eta = 0.5$ and momentum $\mu = 0.5$, from weights of zero, two pushes
# of the same gradients with sum $g$. How many $g$ have been subtracted?

# %%
store, weights = mx.kvstore.create("device"), ranked(2)
store.init(0, nd.zeros(6))
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5))
for _ in range(2):
    store.pushpull(0, ranked(2), out=weights)

# %% [markdown]
# The first step has length $\eta g$; the second $\eta g + \mu \eta g$. Together
# $0.5 + 0.75 = 1.25$.

# %%
assert_all(weights, -1.25 * 3 * np.arange(1, 7), "two steps of SGD with momentum")
print(weights[1].asnumpy().tolist())

# %% [markdown]
# ## What a Trainer does with it
#
# `gluon.Trainer` gives each parameter a key, its position in the list of parameters, and pushes and
# pulls all of them in `step`. Two of its options choose how:
#
# | | `update_on_kvstore=True` | `update_on_kvstore=False` |
# | --- | --- | --- |
# | pushed | gradients | gradients |
# | in the store | optimiser, weights | only the sum |
# | pulled | **weights** | **sums of gradients** |
# | the update runs | once, on the store's own weights | on each device, on its own replica |
#
# The smallest case to watch it on is a parameter $w$ with two entries and the loss
# $c_r \cdot w$ on device $r$. Its gradient there is $c_r$: we choose $(6, 0)$ and $(0, 8)$. The
# learning rate is 1.

# %%
def tiny(**options):
    w = gluon.Parameter("w", shape=(2,), init="zeros")
    w.initialize(ctx=pair)
    trainer = gluon.Trainer([w], "sgd", {"learning_rate": 1}, **options)
    with autograd.record():
        losses = [(w.data(d) * nd.array(c, ctx=d)).sum() for d, c in zip(pair, ([6, 0], [0, 8]))]
    autograd.backward(losses)
    return w, trainer


# %% [markdown]
# **Predict:** after `step(1)`, what does each device hold as weight, and what as *gradient*, in
# either mode?

# %% tags=["trains"]
def show_step(**options):
    w, trainer = tiny(**options)
    trainer.step(1)
    both = [[a.asnumpy().astype(int).tolist() for a in f()] for f in (w.list_data, w.list_grad)]
    print(f"{options}\n    weights {both[0]}  gradients {both[1]}")
    return both


# %% [markdown]
# Both modes, device 0 first in each pair:

# %%
on_store, on_devices = (show_step(update_on_kvstore=choice) for choice in (True, False))
assert on_store[0] == on_devices[0] == [[-6, -8], [-6, -8]], "weights: minus the sum, everywhere"
assert on_store[1] == [[6, 0], [0, 8]], "weights were pulled; gradients stay what they were"
assert on_devices[1] == [[6, 8], [6, 8]], "sums were pulled into the gradients"

# %% [markdown]
# The weights are the same. The gradients are not: with the update in the store they stay *local*,
# each of its own shard, and whoever logs `grad` after `step` logs a part of the truth. Otherwise
# they hold the sum.
#
# ### What is chosen for you
#
# `Trainer` has the defaults `kvstore="device"` and `update_on_kvstore=None`, which means "you
# choose". `allreduce_grads` refuses to work where the update is in the store. So we can ask:

# %%
def updates_in_store(parameter, **options):
    trainer = gluon.Trainer([parameter], "sgd", **options)
    try:
        trainer.allreduce_grads()
    except AssertionError:
        return True
    return False


# %% [markdown]
# It takes a parameter with so many entries on so many devices:

# %%
def zeros(entries, places):
    parameter = gluon.Parameter("p", shape=(entries,), init="zeros", dtype="float16")
    parameter.initialize(ctx=places)
    return parameter


# %% [markdown]
# A small one on one device and on two, and one with more than $2^{24}$ (16,777,216) entries on two.
# **Predict** which of the five trainers update in the store.

# %%
print("default, 1 device:        ", updates_in_store(zeros(2, pair[:1])))
print("default, 2 devices:       ", updates_in_store(zeros(2, pair)))
print("local, 2 devices:         ", updates_in_store(zeros(2, pair), kvstore="local"))
print("device, 2 devices, large: ", updates_in_store(zeros(2**24 + 1, pair)))
print("local, 2 devices, large:  ", updates_in_store(zeros(2**24 + 1, pair), kvstore="local"))

# %% [markdown]
# On one device there is nothing to sum, so `Trainer` makes no store at all. On several the store
# updates, but for one exception: with `local`, the host's processor would do all the updating, and
# if any parameter is larger than $2^{24}$ entries MXNet leaves that to the devices.
#
# Hence a trap for code that is to run on any number of devices: asking for
# `update_on_kvstore=True` where no store was made.

# %%
try:
    updates_in_store(zeros(2, pair[:1]), update_on_kvstore=True)
except AttributeError as error:
    print("AttributeError:", error)

# %% [markdown]
# Not a helpful message. Leave it at `None`, or say `False`, which works everywhere.
#
# ### No store at all
#
# `kvstore=None` makes no store on several devices either. **Predict:** what are the weights after
# `step`? And will anything complain?

# %%
alone = show_step(kvstore=None)
assert alone[0] == [[-6, 0], [0, -8]], "each device used its own gradient and no other"

# %% [markdown]
# Nobody complains, and the two replicas are now two models. To see what that does to training we
# need a network that learns.
#
# ## Every choice gives the same weights
#
# A small network on 1,024 images, in float64, so that rounding can't hide a mistake (chapter 04).

# %% tags=["measured"]
data = load_data("mnist", limit=1024)
print(data)

# %% [markdown]
# The images are centred, as in chapter 04.

# %%
images, labels = data.train_images[:1024], data.train_labels[:1024]
images = images - images.mean()

# %% [markdown]
# The first layer flattens them. The same seed gives every network the same start.

# %%
def network(places, dtype="float64"):
    net = nn.Sequential()
    net.add(nn.Dense(32, activation="relu", in_units=784), nn.Dense(10, in_units=32))
    net.cast(dtype)
    mx.random.seed(7)
    net.initialize(mx.init.Xavier(), ctx=places)
    return net


# %% [markdown]
# Forward and backward on all devices, as in chapter 06; what comes back is the mean loss.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def backward(net, x, y, places):
    x, y = (split_and_load(nd.array(a, dtype=a.dtype), places) for a in (x, y))
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(x, y)]
    autograd.backward(losses)
    return np.concatenate([loss.asnumpy() for loss in losses]).mean()


# %% [markdown]
# Twenty steps of 64 images, with momentum, so that the optimiser has a memory that could go wrong
# as well. `rows` takes a part of each batch only, and `step` may be replaced: both will be needed
# soon.

# %% tags=["trains"]
def train(places, rows=slice(0, 64), step=lambda net, trainer, n: trainer.step(n), steps=20,
          dtype="float64", rate=1 / 16, momentum=0.9, **options):
    net, losses = network(places, dtype), []
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": rate, "momentum": momentum}, **options)
    for start in range(0, 64 * steps, 64):
        x, y = (a[start % 1024 :][:64][rows] for a in (images.astype(dtype), labels))
        losses.append(backward(net, x, y, places))
        step(net, trainer, 64)
    return net, losses


# %% [markdown]
# The reference: one device, no store. Its loss must fall, or equality would mean little.

# %% tags=["trains"]
reference, losses = train(four[:1])
assert np.mean(losses[-5:]) < 0.7 * np.mean(losses[:5]), "compare only while the loss falls"

# %% [markdown]
# The largest difference between any two weights, over all replicas, as a share of the largest
# weight. (NumPy's `max`, since Python's can overlook a NaN.)

# %%
def apart(net, other):
    far, largest = 0, 0
    for mine, theirs in zip(net.collect_params().values(), other.collect_params().values()):
        truth = theirs.list_data()[0].asnumpy()
        largest = np.maximum(largest, np.abs(truth).max())
        far = np.max([far, *(np.abs(a.asnumpy() - truth).max() for a in mine.list_data())])
    return far / largest


# %% [markdown]
# **Predict:** kind of store, place of the update, number of devices: which of them change the
# weights by more than $10^{-12}$ after twenty steps? (On one device a store has to be passed as an
# object, or none is made.)

# %% tags=["trains"]
for k in (1, 2, 4):
    for kind in ("local", "device"):
        for choice in (True, False):
            kvstore = mx.kvstore.create(kind) if k == 1 else kind
            net, _ = train(four[:k], kvstore=kvstore, update_on_kvstore=choice)
            far = apart(net, reference)
            assert far < 1e-12, f"{k} devices, {kind}, {choice}: {far} from one device"
print("twelve ways, one result: equal to 1e-12 of the largest weight")

# %% [markdown]
# None of them. They are choices of time and memory only.
#
# And `kvstore=None`? The claim was that it trains two models. Then replica 0 must be what a
# *single* device learns that only ever sees the first half of each batch, and replica 1 likewise.
# That we can check.

# %% tags=["trains"]
parted, _ = train(pair, kvstore=None)
for r, rows in enumerate((slice(0, 32), slice(32, 64))):
    half, _ = train(four[:1], rows=rows)
    for mine, theirs in zip(parted.collect_params().values(), half.collect_params().values()):
        assert_all([mine.data(pair[r])], theirs.data().asnumpy(), "its half teaches this", 1e-12)

# %% [markdown]
# And how far are the two from each other? `apart` compares all replicas with the first one.

# %%
assert apart(parted, parted) > 0.01, "the replicas of one network should have parted"
print("two models: each learned from its own half, and they are more than 1% apart")

# %% [markdown]
# ## Between the sum and the update
#
# A long gradient can throw training off, so people *clip* it: if the norm of all gradients
# together is larger than some $c$, they are all multiplied by $c / \text{norm}$. The direction
# stays, the length becomes $c$. It is the gradient of the *whole batch* that has to be clipped, and
# that exists only after the sum. `step` sums and updates in one go and leaves no room between, so
# here it won't do. `allreduce_grads` and `update` are its two halves, for
# `update_on_kvstore=False`.
#
# The first half, on the tiny parameter:

# %%
w, trainer = tiny(update_on_kvstore=False)
trainer.allreduce_grads()
assert_all(w.list_grad(), [6, 8], "the sum is on every device")
assert_all(w.list_data(), [0, 0], "and no weight has moved")

# %% [markdown]
# The sum has the length 10. **Predict** the weights if it is clipped to 5 before the second half.
# From the start, with the clipping in the middle:

# %%
w, trainer = tiny(update_on_kvstore=False)
trainer.allreduce_grads()
for grad in w.list_grad():
    grad *= min(1, 5 / grad.norm().asscalar())
trainer.update(1)
assert_all(w.list_data(), [-3, -4], "half as long, same direction", 1e-6)
print([a.asnumpy().tolist() for a in w.list_data()])

# %% [markdown]
# And if each device clips its own gradient, before the sum? $(6, 0)$ becomes $(5, 0)$ and $(0, 8)$
# becomes $(0, 5)$.

# %% tags=["trains"]
w, trainer = tiny()
for grad in w.list_grad():
    grad *= min(1, 5 / grad.norm().asscalar())
trainer.step(1)
assert_all(w.list_data(), [-5, -5], "the sum of two clipped gradients", 1e-6)
print("length", round(w.data(pair[0]).norm().asscalar(), 2), "and not 5")

# %% [markdown]
# Too long, and in another direction: device 1, whose gradient was the longer, has lost more of its
# say. It *is* an algorithm, but one whose result depends on the number of devices.
#
# With the update in the store the halves can't be had, and both say so:

# %%
w, trainer = tiny(update_on_kvstore=True)
for half in (trainer.allreduce_grads, lambda: trainer.update(1)):
    try:
        half()
    except AssertionError as error:
        print("AssertionError:", str(error).split(".")[0])

# %% [markdown]
# ### For a whole network
#
# The norm is over *all* parameters of a device: the root of the sum of all squares. The factor
# stays an array on the device, so that Python does not have to wait for it.

# %%
def clip(grads, most):
    norm = sum((grad * grad).sum() for grad in grads).sqrt()
    factor = nd.minimum(most / norm, 1)
    for grad in grads:
        grad *= factor
    return norm


# %% [markdown]
# Gluon has the same as `gluon.utils.clip_global_norm`. It makes a good oracle, on random gradients
# of two shapes. (It works in float32 only, and waits for the norm unless
# `check_isfinite=False`.)

# %%
rng = np.random.default_rng(0)
grads = [nd.array(rng.standard_normal(shape)) for shape in ((3, 4), (5,))]
theirs = [grad.copy() for grad in grads]
assert np.isclose(clip(grads, 1).asscalar(), gluon.utils.clip_global_norm(theirs, 1))
for mine, other in zip(grads, theirs):
    assert_all([mine], other.asnumpy(), "Gluon's gradients, up to rounding", 1e-6)

# %% [markdown]
# Now a training step. After `allreduce_grads` all devices hold the same sums, so each clips *its
# own* replica by the same factor. `zip` turns a list of gradients for each parameter into one for
# each device.

# %%
def of_each_device(net):
    return zip(*(p.list_grad() for p in net.collect_params().values()))


# %% [markdown]
# The limit of 20 is one for the gradient of the *sum* over the batch; in terms of the mean it is
# $20 / n$.

# %%
def clipped_step(net, trainer, n):
    trainer.allreduce_grads()
    for grads in of_each_device(net):
        clip(grads, 20)
    trainer.update(n)


# %% [markdown]
# Is the result right? We do the first step in NumPy: sum over devices, norm, factor, update.
# (MXNet's SGD keeps its rate in float32, also for float64 weights. We chose 1/16, which is
# exact there; with 0.05 the two would part in the tenth digit.)

# %%
net = network(four)
old = [p.list_data()[0].asnumpy() for p in net.collect_params().values()]
backward(net, images[:64].astype("float64"), labels[:64], four)
total = [sum(g.asnumpy() for g in p.list_grad()) for p in net.collect_params().values()]
norm = np.sqrt(sum((g**2).sum() for g in total))
expected = [w - 1 / 16 / 64 * g * min(1, 20 / norm) for w, g in zip(old, total)]

# %% [markdown]
# On all four replicas:

# %% tags=["trains"]
assert norm > 20, "a gradient shorter than the limit would test nothing"
net, _ = train(four, step=clipped_step, steps=1, update_on_kvstore=False)
for p, truth in zip(net.collect_params().values(), expected):
    assert_all(p.list_data(), truth, f"{p.name} by NumPy", 1e-12 * np.abs(truth).max())
print("one clipped step on four devices is NumPy's")

# %% [markdown]
# Twenty steps now, on 1, 2 and 4 devices. And twenty with the wrong order on two:

# %% tags=["trains"]
def clip_before_sum(net, trainer, n):
    for grads in of_each_device(net):
        clip(grads, 20)
    trainer.step(n)


# %% [markdown]
# **Predict:** by how much will those be off, of the largest weight?

# %% tags=["trains"]
one, losses = train(four[:1], step=clipped_step, update_on_kvstore=False)
assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5]), "compare only while the loss falls"
for k in (2, 4):
    net, _ = train(four[:k], step=clipped_step, update_on_kvstore=False)
    assert apart(net, one) < 1e-12, "clipping after the sum doesn't depend on the devices"
assert apart(train(pair, step=clip_before_sum)[0], one) > 1e-3, "a wrong order must be seen"
print("clipped after the sum: equal to 1e-12. Before it: off by more than a thousandth")

# %% [markdown]
# One more trap, a quiet one: to clip the gradients of *all* devices in one list. **Predict:** what
# norm does it see on two devices, each with $(6, 8)$?

# %%
w, trainer = tiny(update_on_kvstore=False)
trainer.allreduce_grads()
norm = clip(w.list_grad(), 5).asscalar()
assert_all(w.list_grad(), np.array([3, 4]) / np.sqrt(2), "each of the 2 copies was counted", 1e-6)
print(f"norm {norm:.2f}, clipped to {w.grad(pair[0]).norm().asscalar():.2f}")

# %% [markdown]
# Every copy is counted, so the norm is $\sqrt{k}$ times too large and the gradient is cut shorter
# than asked. The replicas stay equal, so no comparison among them finds it.
#
# ## Which device does the summing?
#
# Now to *where*. MXNet's tutorial on several GPUs says that the store of kind `device`, the
# default, keeps its data on the devices, handing out the network's blocks round-robin; and that
# `local` keeps it in the host's memory. We don't have to believe it: an optimiser is called with
# the sum, and an array knows its context. So here is one that updates nothing and writes down
# where it was called.

# %%
where = {}  # key -> device


class Spy(mx.optimizer.Optimizer):
    def update(self, index, weight, grad, state):
        where[index] = grad.context


# %% [markdown]
# A store with a key for each of some sizes, and the place where each is summed:

# %%
def places(sizes, k, kind="device"):
    where.clear()
    store = mx.kvstore.create(kind)
    store.set_optimizer(Spy())
    for key, size in enumerate(sizes):
        store.init(key, nd.zeros(size))
    for key, size in enumerate(sizes):
        store.push(key, [nd.zeros(size, ctx=d) for d in four[:k]])
    nd.waitall()
    return [where[key] for key in range(len(sizes))]


# %% [markdown]
# Eight keys on four devices. **Predict**, with round-robin: key 0 on device 0, key 1 on device 1,
# and so on. Then run it.

# %%
sizes = [5, 100, 30, 60, 10, 50, 7, 9]
print(places(sizes, 4))
print(set(places(sizes, 4, kind="local")))

# %% [markdown]
# The second line is as the tutorial says: with `local` all sums are made in the host's memory;
# `cpu_pinned` is MXNet's name for the part of it that GPUs can copy from at full speed. The first
# line is on the devices, as it says, but not round-robin. Device 0 has only key 1, the largest;
# device 3 has four keys.
#
# MXNet's source says what happens (`CommDevice::InitMergeBuffer` in `src/kvstore/comm.h`): at the
# first push, go through the keys from the largest to the smallest, and give each to the device
# that has the fewest entries so far. As a model in Python:

# %%
def largest_first(sizes, k):
    load, owner = [0] * k, {}
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        device = load.index(min(load))  # of equal ones the first
        owner[key] = device
        load[device] += sizes[key]
    return [owner[key] for key in range(len(sizes))], load


# %% [markdown]
# By hand: 100, 60, 50 and 30 go to devices 0 to 3. Then 10 goes to device 3, which has the fewest,
# and so does 9 (40), and 7 (49). Now device 2 has the fewest with 50, and gets the 5.

# %%
owner, load = largest_first(sizes, 4)
assert places(sizes, 4) == [four[r] for r in owner], "the model should say what the store does"
assert owner != [key % 4 for key in range(8)], "round-robin would be another order"
print("owners", owner, " entries a device", load)

# %% [markdown]
# One case proves little. Thirty random ones, of 2 to 4 devices and up to 12 keys of different
# sizes:

# %%
rng = np.random.default_rng(0)
for _ in range(30):
    k = int(rng.integers(2, 5))
    chosen = rng.choice(np.arange(1, 500), size=rng.integers(1, 13), replace=False).tolist()
    owner, _ = largest_first(chosen, k)
    assert places(chosen, k) == [four[r] for r in owner], f"{chosen} on {k} devices"
print("the model is right in 30 of 30")

# %% [markdown]
# (Between keys of equal size, and between devices with equally many entries, the source leaves the
# order open.)
#
# A `Trainer` does the same, since it uses the same store. That it has *one key for each parameter*
# is of use besides: the sum of a late layer can begin while earlier layers are still in their
# backward pass. And `Trainer` pushes key $i$ with `priority=-i`, so that where several wait, the
# first parameters go first, which are as a rule what the next forward pass needs first.
#
# ### A word about spelling
#
# **Predict:** what does `create("devise")` raise?

# %%
print(mx.kvstore.create("devise").type, set(places(sizes, 4, kind="devise")))

# %% [markdown]
# Nothing. MXNet looks for `device`, `dist` and `nccl` in the name, and whatever has none of them
# is a `local` store. A misspelt option costs time and no one says so.
#
# ## What it costs in memory
#
# To add up $k$ arrays in one place, they have to be in one place. The source says that a key's
# owner holds a *merge buffer* and $k - 1$ copies of the same size: $k$ arrays. The others hold
# nothing more. MXNet's profiler counts bytes for each device, so this can be measured without a
# GPU. (Only inside `run` to `stop`; the gradients exist before, so what is counted is the
# store's.)

# %%
import json
import tempfile
import time

from helpers.device import cores

where_to = tempfile.mkdtemp() + "/profile.json"
mx.profiler.set_config(profile_memory=True, aggregate_stats=True, filename=where_to)

# %% [markdown]
# Two devices here, since the profiler keeps apart only as many CPU devices as there are cores.

# %%
def kilobytes(sizes, kind, prepare=lambda store: None):
    keys, grads = list(range(len(sizes))), [[nd.ones(n, ctx=d) for d in pair] for n in sizes]
    nd.waitall()
    mx.profiler.set_state("run")
    store = mx.kvstore.create(kind)
    prepare(store)
    store.init(keys, [grad[0] for grad in grads])
    store.push(keys, grads)
    nd.waitall()
    del store  # freed while the profiler counts, so that the next count begins at zero
    nd.waitall()
    time.sleep(0.1)  # the engine calls an operation done just before it lets go of its arrays
    mx.profiler.set_state("stop")
    found = json.loads(mx.profiler.dumps(reset=True, format="json"))["Memory"]["Device Storage"]
    return [found.get(f"Memory: {d.device_type}/{d.device_id}", {"Max": 0})["Max"] for d in pair]


# %% [markdown]
# **Predict:** keys of 1,000, 5,000 and 2,000 entries of 4 bytes. Who owns which, and how many
# kilobytes (of 1,000 bytes) does the store take on each device?

# %%
_, load = largest_first([1000, 5000, 2000], 2)
model = [2 * 4 * entries // 1000 for entries in load]
if cores() >= 2:  # on one core the profiler can't tell cpu(1) from the host's memory
    assert kilobytes([1000, 5000, 2000], "device") == model, "k arrays for each key, on its owner"
    assert kilobytes([1000, 5000, 2000], "local") == [0, 0], "local takes nothing on the devices"
print("device:", model, "kB on the two devices; local: none there")

# %% [markdown]
# So the price of `device` is $k$ times the whole model, spread over $k$ devices: on average as
# much as the model itself, on each. Spread *evenly* it would be no more than one more set of
# gradients. But a parameter is never cut in pieces, so whoever owns the largest has at least $k$
# times that one.
#
# ### One big embedding
#
# A text model: 20,000 words, each with 64 numbers, then three dense layers. Most of its weights are
# one parameter. We let a real `Trainer` take a step on four devices, with all its defaults but the
# optimiser, which is the spy.

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

# %% [markdown]
# **Predict:** which share of all entries does the busiest of the four own, when 25% would be fair?

# %%
sizes = [int(np.prod(p.shape)) for p in parameters]
owner, load = largest_first(sizes, 4)
assert [where[key] for key in range(len(sizes))] == [four[r] for r in owner]
for p, size, r in zip(parameters, sizes, owner):
    print(f"{str(p.shape):12} {size:9,} entries, summed on device {r}")
print("share of each device:", [f"{entries / sum(sizes):.1%}" for entries in load])

# %% [markdown]
# The first device owns the embedding and nothing else, and the last has next to nothing to do. Nor
# is it by block, as the tutorial says: a layer's weight and its bias are summed on different
# devices. More devices would not help: the embedding stays whole, and of *its* size each further
# device adds a copy.
#
# In megabytes: each device holds weights and gradients, and the store's buffers besides.

# %%
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

MB = 4 / 1e6  # an entry of float32
model, buffers = 2 * sum(sizes) * MB, 4 * np.array(load) * MB
ratio = (model + buffers.max()) / (model + buffers.min())
fig, ax = figure(f"The embedding's owner needs {ratio:.1f} times what the last device needs",
                 "device", "MB (4 devices, one big embedding)")
ax.bar(range(4), [model] * 4, color=GREY, label="weights and gradients")
ax.bar(range(4), buffers, bottom=model, color=ORANGE, hatch="//", edgecolor="white",
       label="buffers of the store")
ax.axhline(model + buffers.mean(), color=BLUE, ls="--", label="buffers in even shares")
ax.set_xticks(range(4))
ax.legend()
show(fig, alt="Bars for four devices: weights and gradients are equal, buffers are almost all on "
     "device 0, far above the dashed line of even shares.")

# %% [markdown]
# That is how the tutorial's example comes about, a first GPU at 90% of its memory while the others
# are at about half. Ours, in the same terms:

# %%
filled = 0.9 * (model + buffers) / (model + buffers.max())
print("if device 0 is 90% full, the four are at", [f"{share:.0%}" for share in filled])

# %% [markdown]
# Batches are split evenly, so the fullest device sets the size for all. If memory runs out there,
# and the batch can't be smaller, `kvstore="local"` is right: it takes these buffers to the host,
# and the grey bars are all that is left on the devices. What it costs is time: each gradient
# travels to the host and each sum or weight back. (Exercise 1 has another way out.)
#
# Two things we have read in the source and *can't* see on simulated devices. On GPUs, with the
# update in the store, the stored weights and the optimiser's memory, such as momentum, move to the
# key's owner as well, so it holds one or two arrays more. And all our devices share the host's
# memory, so here `local` saves nothing in truth. With two GPUs the next cell asks them.

# %%
def taken(store, grads):
    nd.waitall()
    before = [mx.context.gpu_memory_info(g.context.device_id)[0] for g in grads]
    store.init(0, grads[0])
    store.push(0, grads)
    nd.waitall()
    return [b - mx.context.gpu_memory_info(g.context.device_id)[0] for b, g in zip(before, grads)]


# %% [markdown]
# A small push goes first, for what a GPU sets up only once.

# %% tags=["measured"]
if mx.context.num_gpus() < 2:
    print("fewer than two GPUs here, so there is no memory of their own to ask about")
else:
    for entries in (1000, 2**26):
        grads = [nd.ones(entries, ctx=mx.gpu(r)) for r in range(2)]
        bytes_ = taken(mx.kvstore.create("device"), grads)
    print("MB taken on each GPU:", [b // 10**6 for b in bytes_])
    assert abs(bytes_[0] - 2 * 4 * entries) < 0.1 * entries * 4, "2 arrays on the owner"
    assert abs(bytes_[1]) < 0.1 * entries * 4, "nothing on the other"

# %% [markdown]
# ## `local` against `device`, in seconds
#
# Both against the sum-then-broadcast that you wrote in chapter 03. For each size we take turns, so
# that a slow moment hits all three, and quote medians.

# %%
stores = {}


def through(kind):
    def reduce(arrays):
        case = kind, arrays[0].size
        if case not in stores:
            stores[case] = mx.kvstore.create(kind)
            stores[case].init(0, arrays[0])
        stores[case].pushpull(0, arrays)

    return reduce


# %% [markdown]
# **Predict:** on GPUs `device` has the shorter way. On simulated devices there is no way at all:
# host and devices are the same memory. Who wins there?

# %% tags=["measured"]
two = devices(2)
schemes = {"local": through("local"), "device": through("device"), "ours (chapter 03)": allreduce}
entries = [2**p for p in range(10, 23, 2)]
times = {name: [] for name in schemes}
for size in entries:
    arrays, rounds = [nd.zeros(size, ctx=d) for d in two], []
    for _ in range(11):
        for reduce in schemes.values():
            nd.waitall()
            start = time.perf_counter()
            reduce(arrays)
            nd.waitall()
            rounds.append(time.perf_counter() - start)
    for column, name in enumerate(schemes):
        times[name].append(np.median(rounds[3 * 2 + column :: 3]))  # the first two warm up

# %% [markdown]
# All three on logarithmic axes:

# %% tags=["measured"]
ratio = times["local"][-1] / times["device"][-1]
fig, ax = figure(f"At {entries[-1] * MB:.0f} MB, local takes {ratio:.2f} times as long as device",
                 f"MB on each of {two[0]} and {two[1]}", "milliseconds, median of 9")
for (name, row), color, style in zip(times.items(), (ORANGE, BLUE, GREY), ("o--", "s-", "^:")):
    ax.loglog(np.array(entries) * MB, np.array(row) * 1e3, style, color=color, label=name)
ax.legend()
show(fig, alt="Milliseconds against megabytes for local, device and our own all-reduce.")

# %% [markdown]
# Small arrays take as long as starting the work takes: one call for a store, several operations for
# our lines of Python. For large ones it is the copying that counts. On simulated devices the two
# kinds copy as much, through the same memory, so don't expect a clear winner there, and draw no
# conclusions for GPUs: run it on those.
#
# ## Gradient compression
#
# Where the way between devices is slow, send less. With `2bit`, every entry travels as one of
# three values, $-t$, $0$ or $+t$, for a threshold $t$: two bits for 32. What is not sent is not
# lost. Each device keeps it in a *residual*, which is added to its next gradient:
#
# 1. residual += gradient;
# 2. send $+t$ where the residual is at least $t$, $-t$ where it is at most $-t$, else 0;
# 3. residual −= what was sent.
#
# In NumPy, for one device:

# %%
def two_bits(grad, residual, threshold):
    residual += grad
    sent = threshold * ((residual >= threshold) * 1.0 - (residual <= -threshold) * 1.0)
    residual -= sent
    return sent


# %% [markdown]
# It is an option of the store, or of `Trainer` (`compression_params`). Not every kind has it:

# %%
compression = {"type": "2bit", "threshold": 0.5}
try:
    mx.kvstore.create("local").set_gradient_compression(compression)
except Exception as error:
    print(type(error).__name__ + ":", error)

# %% [markdown]
# Two devices push the same gradients eight times, with a threshold of 0.5. The numbers are sums of
# powers of two, so nothing is rounded, and each device has its own. **Predict** the first two
# results of the first entry, 0.375 on device 0 and 0.25 on device 1.

# %%
grads = np.array([[0.375, 0.5, -0.125, 1.25], [0.25, -0.375, -0.125, 0]], dtype="float32")
store = mx.kvstore.create("device")
store.set_gradient_compression(compression)
store.init(0, nd.zeros(4))

# %% [markdown]
# Each result, on both devices, must be what two copies of the model send together.

# %%
results, residual, pulled = [], np.zeros_like(grads), [nd.zeros(4, ctx=d) for d in pair]
for _ in range(8):
    store.pushpull(0, [nd.array(g, ctx=d) for g, d in zip(grads, pair)], out=pulled)
    results.append(sum(two_bits(g, res, 0.5) for g, res in zip(grads, residual)))
    assert_all(pulled, results[-1], "three values a device, and a residual")

# %% [markdown]
# The store did what the model says, in all eight pushes and on both replicas. The results, a row
# for each entry:

# %%
results = np.array(results)
for i in range(4):
    print(f"true {grads[:, i].sum():6.3f}: got {results[:, i].tolist()},",
          f"mean {results[:, i].mean():.3f}")

# %% [markdown]
# A single result can be far off: 0 where 0.625 was true. But the third entry, too small to be sent
# at once, comes through every fourth time, and the means are close to the truth, since what is
# missing is in the residuals. The last entry is another matter: 1.25 is pushed and 0.5 arrives,
# every time.

# %%
assert (np.abs(residual[:, :3]) < 0.5).all(), "less than a threshold is owed for small entries"
assert residual[0, 3] == 8 * (1.25 - 0.5), "a large entry falls behind by the same with each push"
missing = 8 * grads.sum(axis=0) - results.sum(axis=0)
assert (missing == residual.sum(axis=0)).all(), "what has not arrived is in the residuals, exactly"
print("residuals after eight pushes:", residual.tolist())

# %% [markdown]
# A threshold is thus also a speed limit: no device moves an entry by more than $t$ a push. Too
# small a one starves training, too large a one lets gradients wait for a long time. And mind the
# scale: what is pushed is the gradient of the *sum* over a shard; the division by $n$ comes later,
# in the update.
#
# ### What it does to training
#
# The same network in float32, which is all that compression works with, at plain SGD. **Predict:**
# which of the thresholds 0.01, 1 and 10 comes closest to training without compression?

# %% tags=["trains"]
curves = {None: train(pair, steps=64, dtype="float32", rate=0.1, momentum=0)[1]}
for threshold in (0.01, 1, 10):
    curves[threshold] = train(pair, steps=64, dtype="float32", rate=0.1, momentum=0,
                              compression_params={"type": "2bit", "threshold": threshold})[1]
late = {threshold: np.mean(losses[-16:]) for threshold, losses in curves.items()}
assert late[1] < late[None] + 0.2, "a fitting threshold costs little"
assert late[0.01] > late[10] > late[1] + 0.05, "too small and too large ones cost much"
assert late[0.01] > 0.7 * curves[0.01][0], "0.01 a step is too slow to learn in 64 steps"

# %% [markdown]
# In a figure:

# %% tags=["measured"]
fig, ax = figure(f"Two bits cost {late[1] - late[None]:+.2f} in loss with a threshold that fits",
                 "step", f"loss on the batch ({data.name})")
looks = {None: ("-", GREY, 4), 1: ("-", BLUE, 1.5), 10: ("--", ORANGE, 1.5), 0.01: (":", GREEN, 2)}
for threshold, (style, color, width) in looks.items():
    name = "without compression" if threshold is None else f"threshold {threshold}"
    ax.plot(curves[threshold], style, color=color, lw=width, label=name)
ax.set(ylim=(0, None))
ax.legend()
show(fig, alt="Loss over 64 steps. With threshold 1 it follows the curve without compression; with "
     "10 it is later and with 0.01 it hardly falls.")

# %% [markdown]
# Between simulated devices nothing travels far, so there is nothing to save. Between machines there
# is: there the store has the kind `dist_sync`, and chapter 15 starts the servers and workers that
# it takes.

# %% [markdown]
# ## Summary
#
# - Push sums over devices and *replaces*; pull copies to all. With an optimiser in the store,
#   gradients go in and weights come out.
# - `Trainer` has `device` and, on several devices, the update in the store. Any other choice of the
#   two gives the same weights, except `kvstore=None`, which trains as many models as there are
#   devices.
# - After `step` the gradients are local ones, unless `update_on_kvstore=False`: then they are sums.
# - To clip, use `update_on_kvstore=False`: `allreduce_grads`, clip each device's replica of the
#   sum, `update`. Not before the sum, and not all devices' in one list.
# - `device` gives each parameter to one device, largest first, to whoever has the fewest entries.
#   The owner holds $k$ arrays of its size. One big embedding makes that very uneven; when memory
#   runs out, `local` takes it off the devices.
# - Two-bit compression sends $\pm t$ or nothing and keeps the rest for later. The threshold is a
#   speed limit.
#
# Next, chapter 08: a ResNet-18, which is large enough to keep two devices busy.
#
# **Further reading.** MXNet's tutorial *Multiple GPUs training with Gluon API*, section "Advanced
# topic"; its source, `src/kvstore/comm.h`; R. Pascanu et al., *On the difficulty of training
# recurrent neural networks* (2013), arXiv:1211.5063, for clipping by the norm; F. Seide et al.,
# *1-bit stochastic gradient descent* (Interspeech 2014), for the residual; R. Graham, *Bounds on
# multiprocessing timing anomalies* (1969), for how far from even "largest first" can get.

# %% [markdown]
# ## Exercises
#
# 1. **Cut the embedding.** Replace the embedding of 20,000 words by four of 5,000. Which share of
#    the entries does the busiest of four devices own now? Ask the store, and not only the model.
# 2. **Stop and go on.** Train ten steps on two devices with momentum, save the parameters and, with
#    `trainer.save_states`, the optimiser's memory. Load both into a new network with a new trainer
#    and train ten steps more. Are the weights those of twenty steps in one go? And if you forget
#    the states?
# 3. **What compression costs.** It saves bytes on the way. What does it cost in memory, on a
#    key's owner and on the other device? Use `kilobytes` with one key of 16,000 entries.

# %% [markdown]
# ### Answer 1
#
# Four keys of 320,000 entries go to four devices, and the dense layers after them:
# the busiest has less than a third. In a real model the words have to be sorted by the table that
# they are in, for instance by `word // 5000`.

# %% tags=["solution"]
cut = [5_000 * 64] * 4 + sizes[1:]
owner, load = largest_first(cut, 4)
assert places(cut, 4) == [four[r] for r in owner]
assert max(load) / sum(load) < 1 / 3, "much closer to a quarter than before"
print("share of each device:", [f"{entries / sum(load):.1%}" for entries in load])

# %% [markdown]
# ### Answer 2
#
# With the states they are, to the last digits. Without them momentum starts from
# zero again, and the weights differ. `start` begins anew or from what was saved:

# %% tags=["solution"]
folder = tempfile.mkdtemp()


def start(weights=False, states=False):
    net = network(pair)
    if weights:
        net.load_parameters(folder + "/weights", ctx=pair)
    trainer = gluon.Trainer(net.collect_params(), "sgd",
                            {"learning_rate": 1 / 16, "momentum": 0.9})
    if states:
        trainer.load_states(folder + "/states")
    return net, trainer


# %% [markdown]
# Ten steps, from the batch where the others stopped:

# %% tags=["solution", "trains"]
def ten_steps(net, trainer, first):
    for batch in range(first, first + 10):
        x, y = (a[64 * batch % 1024 :][:64] for a in (images.astype("float64"), labels))
        backward(net, x, y, pair)
        trainer.step(64)
    return net


net, trainer = start()
ten_steps(net, trainer, 0).save_parameters(folder + "/weights")
trainer.save_states(folder + "/states")
assert apart(ten_steps(*start(weights=True, states=True), 10), reference) < 1e-12
assert apart(ten_steps(*start(weights=True), 10), reference) > 1e-3, "momentum was forgotten"

# %% [markdown]
# ### Answer 3
#
# Without compression: two arrays of 64 kB on the owner, nothing on the other. With
# it each device needs a residual and what it sends, a sixteenth: 68 kB. The owner keeps a copy for
# *each* device, its own too, beside the sum, and what it receives.

# %% tags=["solution"]
plain = kilobytes([16_000], "device")
packed = kilobytes([16_000], "device", lambda store: store.set_gradient_compression(compression))
if cores() >= 2:
    expected = [2 * 64, 0], [64 + 2 * 64 + 64 + 2 * 4, 64 + 4]
    assert (plain, packed) == expected, (plain, packed)
