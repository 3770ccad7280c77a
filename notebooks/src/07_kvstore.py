# %% [markdown]
# # 07 · KVStore: where the sum happens
#
# In chapter 06 one call, `trainer.step`, added the gradients of all devices and updated every
# replica. But some training runs must do something in between, with the gradient of the whole
# batch. *Where is it, and how do we get hold of it?*
#
# > **What you'll do:** clip the gradient of a batch that two devices share, find out whose memory a
# > store takes, and resume a training run on other devices.
# >
# > **What you'll learn:** the two ways in which `Trainer` updates, and which of them gives you the
# > sum; which device makes it; what a resumed run must be told.
# >
# > **What you need:** chapters 03 to 06. No GPU. Reading takes {reading time}, running about
# > ten seconds.

# %%
import tempfile

from helpers import your_turn
from helpers.stores import kilobytes

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# Simulated devices: here we look at results, not at speed.
pair = [mx.cpu(0), mx.cpu(1)]

# %% [markdown]
# ## A need: clip the whole batch's gradient
#
# Sometimes a gradient is so large that a single step ruins the run, above all in recurrent networks
# (Pascanu et al., 2013). The usual remedy is **gradient clipping**: if the norm of the gradient is
# above a limit, the gradient is multiplied by limit / norm, which keeps its direction.
#
# Our example is one weight of two numbers, (10, 10), on two devices. The loss on `cpu(0)` is 6
# times the first number, the loss on `cpu(1)` 8 times the second. So the gradients are (6, 0) and
# (0, 8), whatever the weight is. (A `Parameter` needs no layer.)

# %%
slopes = [nd.array([6, 0], ctx=pair[0]), nd.array([0, 8], ctx=pair[1])]


def new_weight():
    weight = gluon.Parameter("weight", shape=(2,), init=mx.init.Constant(10))
    weight.initialize(ctx=pair)
    return weight


def differentiate(weight):
    losses = []
    with autograd.record():
        for slope, value in zip(slopes, weight.list_data()):
            losses.append((slope * value).sum())
    autograd.backward(losses)


def print_replicas(weight):
    for value, grad in zip(weight.list_data(), weight.list_grad()):
        print(value.context, "weight", value.asnumpy(), "gradient", grad.asnumpy())


weight = new_weight()
differentiate(weight)
print_replicas(weight)

# %% [markdown]
# The gradient of the whole batch is the sum, (6, 8), and its norm is $\sqrt{36 + 64} = 10$. Let the
# limit be 5. Then the clipped gradient is (3, 4), and a step at rate 1 should lead to (7, 6).
#
# But no device has the sum, only its own shard's gradient. **Predict:** where does the step lead if
# each device clips what it has, and `step` adds the results?

# %% tags=["predict", "trains"]
weight = new_weight()
differentiate(weight)
for grad in weight.list_grad():
    grad *= nd.minimum(1, 5 / grad.norm())

trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1})
trainer.step(1)  # divides by 1
print_replicas(weight)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The step leads to (5, 5), because the clipped gradients, (5, 0) and (0, 5), add up to (5, 5). That
# is longer than the limit, and it isn't the direction of (6, 8).
#
# </details>
#
# So one must clip *after* the sum:
#
# ![The sum of both gradients is the arrow (6, 8). Added and then clipped to 5 it is (3, 4), in the
# same direction. Clipped on each device and then added it is (5, 5), longer than the limit and in
# another direction.](src/drawings/clipping.svg)
#
# And one must clip *before* the update. But `step` does both, and even afterwards each device has
# only its own gradient. So where is the sum?
#
# ## Push and pull
#
# It is in a **key-value store**, KVStore for short, which holds one array for each **key**. Devices
# *push* arrays into it and *pull* arrays out of it:
#
# ![Left: cpu(0) pushes (6, 0), cpu(1) pushes (0, 8), and the store holds their sum, (6, 8). Right:
# both devices pull (6, 8) from the store.](src/drawings/push_pull.svg)
#
# `init` gives a key its first array, here (7, 7), and `"device"` is the kind of store that
# `Trainer` takes by default:

# %%
store = mx.kvstore.create("device")
store.init("gradient", nd.array([7, 7]))
store.push("gradient", slopes)

pulled = [nd.zeros(2, ctx=pair[0]), nd.zeros(2, ctx=pair[1])]
store.pull("gradient", out=pulled)
print("pulled:", pulled[0].asnumpy(), pulled[1].asnumpy())

# %% [markdown]
# The 7 isn't in the sum: a push *replaces* what was there by the sum of the pushed arrays, and a
# pull copies it to all devices. Together they are an all-reduce.
#
# A store can do more than add. If it is given an *optimizer*, then what it holds is a weight,
# and what the devices push are gradients. **Predict:** the weight is (10, 10), the rate 1. What do
# the devices pull after one push, and what after two?

# %% tags=["predict"]
store = mx.kvstore.create("device")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
store.init("weight", nd.array([10, 10]))

for number in [1, 2]:
    store.push("weight", slopes)
    store.pull("weight", out=pulled)
    print(f"pulled after push {number}:", pulled[0].asnumpy(), pulled[1].asnumpy())

# %% [markdown]
# <details><summary>What came out</summary>
#
# They pull (4, 2), and then (−2, −6). With an optimizer a push doesn't replace the weight. It is
# one step with the sum of the gradients, and the second push is a second step.
#
# </details>
#
# ## Two ways to update
#
# A `Trainer` uses a store in one of these two ways:
#
# ![Two panels. In both, cpu(0) has the gradient (6, 0) and cpu(1) has (0, 8), and the store adds
# them to (6, 8). Left, the store also computes (10, 10) minus (6, 8) = (4, 2), once, and sends this
# weight to both devices. Right, the store sends the sum to both, and each device computes
# (4, 2).](src/drawings/two_updates.svg)
#
# By default, on several devices, it takes the left one: gradients go in and weights come out, so no
# device gets the sum. On the right, with `update_on_kvstore=False`, sums come out. Then you can
# call the two parts of `step(n)` yourself, `allreduce_grads()` and `update(n)`:

# %% tags=["trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=False)

trainer.allreduce_grads()
print("after allreduce_grads:")
print_replicas(weight)

for grad in weight.list_grad():
    grad *= nd.minimum(1, 5 / grad.norm())
trainer.update(1)
print("after update:")
print_replicas(weight)

for value in weight.list_data():
    assert np.array_equal(value.asnumpy(), [7, 6])

# %% [markdown]
# The weight is (7, 6), as it should be. Both devices had the same sum, so both clipped by the same
# factor, and the replicas are still equal. **Clip between the sum and the update, with
# `update_on_kvstore=False`.** It has a price: each device keeps an optimizer state of its own and
# repeats the update, which the store does once. (With the default `Trainer`, `allreduce_grads`
# raises an error, which names this setting.)
#
# ## One norm for all parameters
#
# In a network, the gradients of all parameters must be multiplied by *one* factor, to keep the
# direction. So the norm is that of all of them together, the root of the sum of the squares of all
# entries (the **global norm**).
#
# ### Your turn: clip by the global norm
#
# Write it for one device, before you scroll on. `grads` has an array for each parameter. The first
# case is our weight; in the second the norm is $\sqrt{4 + 9 + 36} = 7$.

# %% tags=["your-turn"]
def clipped(grads, limit):
    """Return the arrays, all times one factor: their joint norm is at most `limit`."""
    ...


our_weight = ([nd.array([6, 8])], 5)  # grads, limit
two_arrays = ([nd.array([2, 3]), nd.array([6])], 3.5)
below_the_limit = ([nd.array([3, 4])], 10)
only_zeros = ([nd.array([0, 0])], 1)
clip_cases = [
    (our_weight, [[3, 4]]),
    (two_arrays, [[1, 1.5], [3]]),
    (below_the_limit, [[3, 4]]),
    (only_zeros, [[0, 0]]),
]
your_turn(clipped, clip_cases)

# %% [markdown]
# Gluon has this, too: `clip_global_norm` writes into the arrays, and returns the norm. In a step
# each device clips its own copy of the sums, all parameters together:

# %%
def clipped_step(net, trainer, devices, n, limit):
    trainer.allreduce_grads()
    for device in devices:
        grads = [parameter.grad(device) for parameter in net.collect_params().values()]
        gluon.utils.clip_global_norm(grads, limit, check_isfinite=False)
    trainer.update(n)

# %% [markdown]
# (With `check_isfinite=True`, the default, Python would wait for each device in turn, to warn of a
# norm that isn't finite.)
#
# We try it with a layer that has a weight, (10, 10), and a bias, 0. One device has the image (4,
# 0), the other (0, 4), and the output is the loss. So the sums are (4, 4) for the weight and 2 for
# the bias, and their norm is $\sqrt{16 + 16 + 4} = 6$. **Predict:** where does a step with `n=2`
# and `limit=3` lead, at rate 1?

# %% tags=["predict", "trains"]
net = nn.Dense(1, in_units=2)
net.initialize(mx.init.Constant(10), ctx=pair)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1},
                        update_on_kvstore=False)

losses = []
with autograd.record():
    for x_shard in gluon.utils.split_and_load(nd.array([[4, 0], [0, 4]]), pair):
        losses.append(net(x_shard))
autograd.backward(losses)
clipped_step(net, trainer, pair, n=2, limit=3)

for device in pair:
    print(device, "weight", net.weight.data(device).asnumpy(),
          "bias", net.bias.data(device).asnumpy())

# %% [markdown]
# <details><summary>What came out</summary>
#
# The weight is (9, 9) and the bias −0.5. All sums are halved, to (2, 2) and 1, and then `update`
# divides by 2.
#
# </details>
#
# The sums are clipped before `update` divides them by `n`. PyTorch clips means, so to clip as
# PyTorch does with `max_norm=1`, take `limit=n` here.
#
# ## Whose memory?
#
# To add up, a store needs arrays of its own, its **buffers**, on some device. On which? Take a text
# model: an embedding, with 64 numbers for each of 20,000 words, and two dense layers, with 512 ×
# 256 and 256 × 10 weights. At 4 bytes an entry they take 5.12, 0.52 and 0.01 MB. `kilobytes`, a
# helper, makes a store, lets both devices push a gradient for each parameter, and returns how many
# kB the store took on each of them. (It asks MXNet's profiler, which can't tell the devices apart
# on a machine with one core.)
#
# On two devices a parameter needs two buffers of its own size, one for the sum and one for the
# other device's gradient. **Predict:** how many MB does the store take on each device? And a store
# of the kind `local`, which adds up in the host's memory?

# %% tags=["predict", "measured"]
embedding = 20_000 * 64
first_dense = 512 * 256
second_dense = 256 * 10
sizes = [embedding, first_dense, second_dense]

for kind in ["device", "local"]:
    on_first, on_second = kilobytes(sizes, kind)
    print(f"{kind:6}  {on_first / 1000:5.2f} MB on cpu(0)  {on_second / 1000:5.2f} MB on cpu(1)")

# %% [markdown]
# <details><summary>What came out</summary>
#
# `cpu(0)` has 10.24 MB, twice the embedding's 5.12. `cpu(1)` has 1.07 MB, twice what both dense
# layers have. A `local` store takes nothing on the devices.
#
# </details>
#
# So the gradients of a parameter are added up on one device, its **owner** (the *root* of this
# reduce). The owner has a buffer for the sum and one for each further gradient, $k$ buffers on $k$
# devices (`CommDevice::Reduce` in MXNet 1.9.1's `src/kvstore/comm.h`).
#
# ![Two columns, to scale. Both devices hold weights and gradients. On cpu(0) two more blocks, as
# large as the embedding, are buffers: for the sum and for cpu(1)'s gradient. On cpu(1) the buffers
# are a thin block.](src/drawings/whose_memory.svg)
#
# Owners are chosen at the first push: from the largest parameter to the smallest, each goes to the
# device that has the fewest entries so far (`CommDevice::InitMergeBuffer`, same file). So one very
# large parameter makes the shares unequal. MXNet's tutorial warns that one GPU may then use 90 % of
# its memory and the others 50 %, and the GPU that is full first limits the batch for all of them.
# Two things help: `kvstore="local"`, which takes the host's memory instead, but is often slower,
# says the tutorial; or several small embeddings instead of a large one (exercise 3).
#
# **On GPUs** there is a third kind, `kvstore="nccl"`, which uses NVIDIA's library. It makes its
# sums on the first GPU (`KVStoreNCCL::InitMergeBuffer` in `src/kvstore/kvstore_nccl.h`, MXNet
# 1.9.1), so a store that updates holds all of the optimizer's state there. A CPU build doesn't have
# it.
#
# ## Resume on other devices
#
# With `update_on_kvstore=False` each device has an optimizer state of its own.
# `trainer.save_states` saves one of these, which are equal, and `load_states` gives it to all. Is
# that enough to resume a training run on other devices? We try Adam at rate 1. If the gradient is
# the same in each step, a step of Adam is as long as the rate. Our weight is one number, 10, and it
# is also the loss. We make four steps on `cpu(0)`, and save after two:

# %% tags=["trains"]
def weight_and_trainer(devices):
    weight = gluon.Parameter("weight", shape=(1,), init=mx.init.Constant(10))
    weight.initialize(ctx=devices)
    trainer = gluon.Trainer([weight], "adam", {"learning_rate": 1}, update_on_kvstore=False)
    return weight, trainer


def take_step(weight, trainer):
    losses = []
    with autograd.record():
        for value in weight.list_data():
            losses.append(value.sum())
    autograd.backward(losses)
    trainer.step(len(losses))


folder = tempfile.TemporaryDirectory()
states_file = folder.name + "/states"

weight, trainer = weight_and_trainer([mx.cpu(0)])
for step in [1, 2, 3, 4]:
    take_step(weight, trainer)
    print(f"step {step}: weight {weight.data().asscalar():.3f}")
    if step == 2:
        saved_weight = weight.data().copy()
        trainer.save_states(states_file)

# %% [markdown]
# Four steps lead from 10 to 6. Now we resume after the second, and make two more: on the same
# device, on another one, and on both. **Predict:** which of the three end at 6?

# %% tags=["predict", "trains"]
def resume(devices):
    weight, trainer = weight_and_trainer(devices)
    weight.set_data(saved_weight)
    trainer.load_states(states_file)
    return weight, trainer


def two_steps(weight, trainer):
    """Make two steps, and return the weight on each device."""
    take_step(weight, trainer)
    take_step(weight, trainer)
    return [round(float(value.asscalar()), 3) for value in weight.list_data()]


for devices in [[mx.cpu(0)], [mx.cpu(1)], pair]:
    weight, trainer = resume(devices)
    print(f"resumed on {devices}:", two_steps(weight, trainer))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only the run on `cpu(0)`, where the states were saved. On `cpu(1)` the steps are too long, and on
# both devices the replicas have diverged. There is no error.
#
# </details>
#
# The cause is a count. Adam's averages begin at 0, so it scales them up in its first steps (its
# **bias correction**), by a factor that depends on the number of steps. MXNet counts these by
# *device number* (`_set_current_context` in `optimizer/optimizer.py`). The file has the count, but
# only for number 0, which saved it. Number 1 begins at `begin_num_update`, which is 0, and scales
# the old averages up again. So we let every device that has no count begin at the largest saved
# count, `num_update`:

# %% tags=["trains"]
for devices in [[mx.cpu(0)], [mx.cpu(1)], pair]:
    weight, trainer = resume(devices)
    trainer.optimizer.begin_num_update = trainer.optimizer.num_update  # NEW
    found = two_steps(weight, trainer)
    print(f"resumed on {devices}:", found)
    assert found == [6] * len(devices)

# %% [markdown]
# All three end at 6. **`load_states` brings the count of steps only for the device numbers that
# saved it. With Adam, set `begin_num_update` as well**, and also if the rate has a schedule, which
# goes by the same counts (`_update_count`, same file). SGD with a constant rate needs no count.
# (`helpers.training.fit` sets it by itself.)
#
# ## Summary
#
# - The sum is made in a store. By default the store updates, too, and `grad` stays each device's
#   own.
# - With `update_on_kvstore=False` the sum comes out. Between `allreduce_grads()` and `update(n)`
#   each device can clip its own copy, all parameters by one factor.
# - Each parameter has an owner, which makes its sum in $k$ buffers; with `local` it is the host.
# - The saved count of steps is filed under the device numbers that saved it. To resume with Adam on
#   other devices, set `begin_num_update`.
#
# Next, chapter 08: ResNet-18. What becomes of weights that are written while a store keeps its own
# is in deeper: MXNet's surprises.
#
# **Further reading.** R. Pascanu, T. Mikolov and Y. Bengio, *On the difficulty of training
# recurrent neural networks* (ICML 2013); GluonNLP's `clip_grad_global_norm`
# (`src/gluonnlp/utils/parameter.py`); MXNet's tutorial *Multiple GPUs training with Gluon API*
# (`docs/tutorials/gluon/multi_gpu.md` at 1.5.1).

# %% [markdown]
# ## Exercises
#
# 1. **Whose weights?** After a first step a program writes (1000, 1000) into both replicas of
#    `weight`, in place. What are they after a second step, if the store updates? If the devices do?
#    And with `kvstore=None`, so that there is no store? Say it first, then run all three.
# 2. **One list.** A colleague, between `allreduce_grads` and `update`, calls `clip_global_norm`
#    once, with the gradients of *all* devices in one list. What becomes of (6, 8) and the limit 5?
#    And on $k$ devices?
# 3. **Cut the embedding.** Instead of one embedding for 20,000 words let there be four for 5,000
#    words each. How many MB of buffers does each of two devices have now? Which parameters are
#    they?

# %% [markdown]
# ### Answer to *Your turn*
#
# First the norm over all arrays, then one factor for all. `nd.minimum` keeps short gradients as
# they are, also a gradient of zeros, for which the quotient is infinite. An infinite entry makes
# the factor 0, and 0 times infinity is NaN.

# %% tags=["solution", "your-turn"]
def clipped(grads, limit):
    squares = 0
    for grad in grads:
        squares = squares + (grad * grad).sum()
    factor = nd.minimum(1, limit / squares.sqrt())
    return [grad * factor for grad in grads]


your_turn(clipped, clip_cases)
print("infinite:", clipped([nd.array([np.inf, 1])], 5)[0].asnumpy())

# %% [markdown]
# ### Answer 1
#
# Where the store updates, the weights are the store's: it goes on from its own (4, 2) to (−2, −6),
# and the pull overwrites what the program wrote. Where the devices update, the weights are theirs:
# (1000, 1000) − (6, 8). Without a store nothing is summed. So one model becomes two, and there is
# no error.

# %% tags=["solution", "trains"]
for options in [{"update_on_kvstore": True}, {"update_on_kvstore": False}, {"kvstore": None}]:
    weight = new_weight()
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, **options)
    differentiate(weight)
    trainer.step(1)
    for value in weight.list_data():
        value[:] = 1000
    differentiate(weight)
    trainer.step(1)
    print(options)
    print_replicas(weight)

# %% [markdown]
# ### Answer 2
#
# The list has the same sum twice, so that the norm of all its entries is $\sqrt 2$ times too large,
# and the gradient becomes $\sqrt 2$ times too short: its norm is 3.54. On $k$ devices it is
# $\sqrt k$ times too short.

# %% tags=["solution", "trains"]
weight = new_weight()
differentiate(weight)
trainer = gluon.Trainer([weight], "sgd", {"learning_rate": 1}, update_on_kvstore=False)
trainer.allreduce_grads()

norm = gluon.utils.clip_global_norm(weight.list_grad(), 5)
print(f"norm of all that is in the list: {norm:.2f}")
for grad in weight.list_grad():
    print(grad.context, grad.asnumpy().round(2), f"norm {grad.norm().asscalar():.2f}")

# %% [markdown]
# ### Answer 3
#
# Both have nearly as much. By the rule each device owns two of the four tables, and one of the
# dense layers: 2 × (2 × 1.28 + 0.52) = 6.17 MB, and 2 × (2 × 1.28 + 0.01) = 5.14 MB.

# %% tags=["solution", "measured"]
four_tables = [5000 * 64, 5000 * 64, 5000 * 64, 5000 * 64]
on_first, on_second = kilobytes([*four_tables, first_dense, second_dense])
print(f"{on_first / 1000:.2f} MB on cpu(0), {on_second / 1000:.2f} MB on cpu(1)")
