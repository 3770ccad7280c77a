# %% [markdown]
# # Assignment 4: clipping between the sum and the update
#
# **You will** get each device's own gradients out of a Gluon network, find the norm of the whole
# batch's gradient from them, and take training steps that are clipped by that norm: the same steps
# on any number of devices.
#
# **You need** chapters 05 to 07. **Time**: about an hour and a half. **Points**: 12, of which 2
# are for words.
#
# **You may use** anything in MXNet and NumPy, but not `gluon.utils.clip_global_norm`: it works in
# float32 only, and everything here is in float64.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other sizes, other networks and other numbers of devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.

# %% tags=["given"]
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# The networks: dense layers with tanh between them and one output, from given weights. The loss is
# half the squared error, one number for each example, so `backward` gives the gradient of its *sum*
# over the examples.


# %% tags=["given"]
def network(weights, devices):
    """A network in float64 with these weights and biases [W, b, W, b, ...] on each device."""
    net = nn.Sequential()
    for w in weights[:-2:2]:
        net.add(nn.Dense(w.shape[0], activation="tanh", in_units=w.shape[1]))
    net.add(nn.Dense(1, in_units=weights[-2].shape[1]))
    net.cast("float64")
    net.initialize(ctx=devices)
    for p, value in zip(net.collect_params().values(), weights):
        p.set_data(nd.array(value, dtype="float64"))
    return net


squared = gluon.loss.L2Loss()
flat = [np.zeros((1, 2)), np.zeros(1)]

# %% [markdown]
# `flat` are the weights of the smallest network, one layer with two inputs, and all of them are
# zero. With targets of $-1$ its gradient is easy to follow: the sum of the inputs for the weights,
# and the number of examples for the bias.

# %%
net = network(flat, [mx.cpu(0)])
with autograd.record():
    loss = squared(net(nd.array([[8, 0], [0, 16]], dtype="float64")), -nd.ones(2, dtype="float64"))
loss.backward()
print([p.grad().asnumpy().tolist() for p in net.collect_params().values()])

# %% [markdown]
# ## 1. Each device's gradients (4 points)
#
# Cut the batch `x`, `y` into a shard for each device, in the order of `devices`; lengths differ by
# at most one, and the longer shards come first. (`gluon.utils.split_and_load` does that with
# `even_split=False`, if there is an example for each device; with fewer it ends in an error about
# shapes.) Run forward and backward on each device, and return its gradients of the *sum* of the
# losses (`squared`) in its shard: a list with an entry for each parameter, in the order of
# `net.collect_params()`; the entry is the list of its gradients on each device, in the order of
# `devices`.
#
# - `devices` are those on which `net` has been initialised, in any order. Raise `ValueError` if one
#   is named twice.
# - If there are fewer examples than devices, the devices at the end have no shard. Their gradients
#   are zeros, in what you return and in the network, whatever an earlier batch has left there.
# - Leave the gradients that you return in the network too; return copies of them, so that the next
#   call does not change what this one has returned.
# - The weights, `x` and `y` stay as they are. All parameters are trained; none is frozen.
#
# About eleven lines.


# %% nbgrader={"grade_id": "gradients", "solution": true}
def device_gradients(net, x, y, devices):
    """Gradients [parameter][device] of the shards of x [n, inputs], y [n], as NDArrays."""
    ### BEGIN SOLUTION
    if len(set(devices)) < len(devices):
        raise ValueError(f"a device appears twice: {devices}")
    parameters = net.collect_params().values()
    for p in parameters:
        p.zero_grad()
    busy = devices[: len(x)]
    xs, ys = (gluon.utils.split_and_load(a, busy, even_split=False) for a in (x, y))
    with autograd.record():
        losses = [squared(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    return [[p.grad(d).copy() for d in devices] for p in parameters]
    ### END SOLUTION


# %% [markdown]
# Your function needs a network, so the tests call this one, which makes it, hands it several
# batches in turn, and says what there is afterwards. Before the first of them, all gradients hold
# 7, as if left from an earlier batch.


# %% tags=["driver"]
def batch_by_batch(weights, batches, devices):
    """What device_gradients returned for each (x, y); the network's gradients; its weights."""
    there = list(devices)
    net = network(weights, sorted(set(there), key=lambda d: d.device_id))
    for p in net.collect_params().values():
        for g in p.list_grad():
            g[:] = 7
    returned = [device_gradients(net, x, y, devices) for x, y in batches]
    parameters = net.collect_params().values()
    return (returned, [[p.grad(d) for d in there] for p in parameters],
            [[p.data(d) for d in there] for p in parameters])


# %% nbgrader={"grade_id": "gradients-values", "points": 2}
x = nd.array([[8, 0], [0, 16], [1, 1]], dtype="float64")
y = -nd.ones(3, dtype="float64")
(gradients,), _, _ = batch_by_batch(flat, [(x, y)], [mx.cpu(0), mx.cpu(1)])
assert isinstance(gradients, list), f"a {type(gradients).__name__}, not a list"
assert len(gradients) == 2, f"{len(gradients)} entries for a weight and a bias"
assert isinstance(gradients[0], list), f"an entry is a {type(gradients[0]).__name__}, not a list"
assert len(gradients[0]) == 2, f"{len(gradients[0])} gradients of the weight for two devices"
assert all(isinstance(g, nd.NDArray) for replicas in gradients for g in replicas), "not NDArrays"
where = [g.context for g in gradients[0]]
assert where == [mx.cpu(0), mx.cpu(1)], f"the weight's gradients are on {where}"
assert gradients[0][0].asnumpy().tolist() == [[8, 16]], (
    f"device 0: {gradients[0][0].asnumpy()}, not [[8, 16]], the sum of its two examples")
assert gradients[0][1].asnumpy().tolist() == [[1, 1]], (
    f"device 1: {gradients[0][1].asnumpy()}, not [[1, 1]], its one example's")
assert [g.asscalar() for g in gradients[1]] == [2, 1], "the bias's: examples in each shard"

# %% nbgrader={"grade_id": "gradients-care", "points": 2}
x = nd.array([[8, 0], [0, 16], [1, 1]], dtype="float64")
y = -nd.ones(3, dtype="float64")
batches = [(x, y), (x[2:], y[2:])]
(first, second), held, _ = batch_by_batch(flat, batches, [mx.cpu(0), mx.cpu(1)])
assert first[0][0].asnumpy().tolist() == [[8, 16]], (
    f"device 0's gradient of the first batch is {first[0][0].asnumpy()}, not [[8, 16]]; if it was "
    "right above, the second call has changed it")
assert second[0][1].asnumpy().tolist() == [[0, 0]], "device 1 had no example the second time"
assert held[0][1].asnumpy().tolist() == [[0, 0]], "the network still has an old gradient"

# %% [markdown]
# ## 2. The norm of the batch's gradient (3 points)
#
# What training follows is the gradient of the *mean* loss over the whole batch. Let $g_{p,i}$ be
# the gradient of parameter $p$ that device $i$ has found for its own shard, by exercise 1: a sum
# over examples. Then the norm over all parameters, and all $n$ examples, is
#
# $$\frac{1}{n} \sqrt{\sum_p \Big\| \sum_i g_{p,i} \Big\|^2}$$
#
# where $\|\cdot\|^2$ is the sum of the squares of all entries. Gradients on two devices point in
# different ways, and partly cancel: so the sum over devices comes *before* the squares.
#
# Return a float, not an array, and leave the gradients as they are. Work in float64 from the first
# sum on, whatever the gradients are in: a float32 of $10^{25}$ is fine, but its square is not.
#
# About two lines.


# %% nbgrader={"grade_id": "norm", "solution": true}
def mean_norm(gradients, n):
    """Norm of the mean gradient of n examples, a float, from sums [parameter][device]."""
    ### BEGIN SOLUTION
    totals = [sum(g.asnumpy().astype("float64") for g in replicas) for replicas in gradients]
    return float(np.sqrt(sum((total**2).sum() for total in totals)) / n)
    ### END SOLUTION


# %% nbgrader={"grade_id": "norm-values", "points": 2}
# Sums over devices: 8, 16 and 2. Means over two examples: 4, 8 and 1, and 16 + 64 + 1 = 81.
gradients = [[nd.array([[12, -16]], mx.cpu(0)), nd.array([[-4, 32]], mx.cpu(1))],
             [nd.array([1], mx.cpu(0)), nd.array([1], mx.cpu(1))]]
norm = mean_norm(gradients, 2)
assert isinstance(norm, float), f"a {type(norm).__name__}, not a float"
assert abs(norm - 9) < 1e-12, f"{norm}, not 9"

# %% nbgrader={"grade_id": "norm-care", "points": 1}
huge = [[nd.array([3e25], mx.cpu(0))], [nd.array([4e25], mx.cpu(0))]]
assert abs(mean_norm(huge, 1) / 5e25 - 1) < 1e-6, "squares of 1e25 need float64"

# %% [markdown]
# ## 3. A clipped step (3 points)
#
# Each device has run its backward. Now take the step, clipped: let $N$ be the norm of the gradient
# of the mean loss over the whole batch of $n$ examples, as in exercise 2. Multiply the gradients of
# all parameters by
#
# $$\min(1, \theta / N)$$
#
# between the two halves of `trainer.step`, and return $N$, the norm *before* clipping, as a
# number. The trainer was made with `update_on_kvstore=False`, so the halves can be had:
# `trainer.allreduce_grads()` puts the sums over all devices into the gradients of every device,
# and `trainer.update(n)` divides by $n$ and updates each replica with *its own* copy of the
# gradients. The division comes after your turn, while $N$ and $\theta$ are those of the mean. And
# $N$ may be 0: then there is nothing to clip. (To scale each device's gradients before the sum,
# all by this one factor, comes to the same, and is right too.)
#
# The weights must be those of one device that is given the whole batch, to $10^{-12}$, on every
# device. (Don't clip by giving `update` another number: it multiplies by the number's inverse,
# rounded to float32. For 2, 4, 8 and 16, the batches in the tests, that is exact.) `p.list_grad()`
# gives the network's own arrays.
#
# About nine lines. If you call your `mean_norm`, mind that it expects gradients that have not been
# summed yet.


# %% nbgrader={"grade_id": "step", "solution": true}
def clipped_step(net, trainer, n, theta):
    """Update net by its gradients, clipped to theta; returns the norm before, a float."""
    ### BEGIN SOLUTION
    trainer.allreduce_grads()
    sums = [p.list_grad() for p in net.collect_params().values()]
    norm = float(np.sqrt(sum((replicas[0].asnumpy() ** 2).sum() for replicas in sums)) / n)
    if norm > theta:
        for replicas in sums:
            for g in replicas:
                g *= theta / norm
    trainer.update(n)
    return norm
    ### END SOLUTION


# %% [markdown]
# The tests call this one. It trains a network, with momentum, and keeps the weights of every
# device after every step.


# %% tags=["driver"]
def train(weights, batches, devices, theta):
    """([norm after norm], [weights [parameter][device] after each step]) for batches of x, y.

    theta: one limit, or a list of one for each batch.
    """
    limits = theta if isinstance(theta, list) else [theta] * len(batches)
    net = network(weights, devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.25, "momentum": 0.5},
                            update_on_kvstore=False)
    norms, after = [], []
    for (x, y), limit in zip(batches, limits):
        xs, ys = (gluon.utils.split_and_load(nd.array(a, dtype="float64"), devices,
                                             even_split=False) for a in (x, y))
        with autograd.record():
            losses = [squared(net(a), b) for a, b in zip(xs, ys)]
        autograd.backward(losses)
        norms.append(clipped_step(net, trainer, len(x), limit))
        after.append([[w.copy() for w in p.list_data()] for p in net.collect_params().values()])
    return norms, after


# %% nbgrader={"grade_id": "step-values", "points": 2}
# The mean gradient is (4, 8) for the weights and 1 for the bias. Its norm is 9, so it is halved.
batch = np.array([[8, 0], [0, 16]]), np.array([-1, -1])
(norm,), ((weight, bias),) = train(flat, [batch], [mx.cpu(0), mx.cpu(1)], 4.5)
assert isinstance(norm, float), f"the norm is a {type(norm).__name__}, not a number"
assert abs(norm - 9) < 1e-12, f"the norm is {norm}, not 9"
for i in range(2):
    w, b = weight[i].asnumpy(), bias[i].asnumpy()
    assert abs(w - [[-0.5, -1]]).max() < 1e-12, f"device {i}: weights {w.tolist()}, not [[-0.5, -1]]"
    assert abs(b - [-0.125]).max() < 1e-12, f"device {i}: bias {b.tolist()}, not [-0.125]"

# %% nbgrader={"grade_id": "step-care", "points": 1}
# The same gradient, of norm 9, and a limit that it doesn't reach.
batch = np.array([[8, 0], [0, 16]]), np.array([-1, -1])
(norm,), ((weight, bias),) = train(flat, [batch], [mx.cpu(0), mx.cpu(1)], 10)
w = weight[1].asnumpy().tolist()
assert w == [[-1, -2]], f"below the limit: weights {w}, not [[-1, -2]]"

# %% [markdown]
# ## 4. In your words (2 points)
#
# A colleague's code is a line shorter: right after its backward each device clips its own
# gradient, a sum over its shard, to the norm $n\,\theta$, where $n$ is the number of examples in
# the whole batch. Then `trainer.step(n)` sums. Why is that something else? Say what may change,
# and name two cases in which both agree. A few sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for the difference: a sum of clipped gradients is not the clipped sum. Devices with a
# long gradient lose more of their say than others, so the direction changes too, and not only the
# length; gradients that would have cancelled are cut though the batch's is short; and $k$ of them
# at the limit may add up to $k$ times the limit. The result depends on how many devices there are
# and on who got which examples, so it is no longer one device's.
#
# One point for two of these cases: one device; no device's gradient reaches the limit and neither
# does the batch's, so that nothing is clipped; all devices but one have a gradient of zero, such
# as those without a shard. All gradients equal is a case only if each device clips to a $k$-th,
# $n\,\theta / k$.
