# %% [markdown]
# # Assignment 3: a training step on k devices
#
# **You will** write a training loop from its pieces: a loss, a replica of the parameters for each
# device, a step after which $k$ devices hold what one would hold, and an epoch that leaves no
# example out.
#
# **You need** chapters 01 to 04. **Time**: nearly two hours. **Points**: 12, of which 2 are for
# words.
#
# **You may use** anything in `mx.nd`, `mx.autograd` and NumPy, with one exception that exercise 1
# names, but neither Gluon nor a `kvstore`.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. None of the exercises needs the solution of another. Each is tested in the open, so that
# you can see how you are doing, and again, on other values, other sizes and other numbers of
# devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.

# %% tags=["given"]
from helpers import devices

import mxnet as mx
import numpy as np
from mxnet import autograd, nd

# %% [markdown]
# ## 1. A loss that can be learned from (2 points)
#
# A network gives example $i$ a score $z_{ij}$ for each class $j$; the example's class is $y_i$.
# Its loss, the cross-entropy of the softmax, is
#
# $$\ell_i = -\log \frac{e^{z_{iy_i}}}{\sum_j e^{z_{ij}}} = \log \sum_j e^{z_{ij}} - z_{iy_i}.$$
#
# Return a loss for each example, neither their sum nor their mean, in the scores' `dtype` and on
# their device. Labels are whole numbers on the same device, in an array that may have another
# `dtype`.
#
# Two things are easily missed. The loss is there to be differentiated, in a mean or in any other
# weighted sum, so the way from the scores to it must be one that autograd can follow: operators
# of `mx.nd`, not NumPy's. And $e^{1000}$ is infinite, even in float64, but scores must give the
# right loss however large they are. Subtracting one number from all scores of an example leaves
# its loss as it is, and its gradient too; whether autograd follows that number is up to you.
#
# Write it with `exp`, `log`, `max`, `sum`, `pick` and the like; don't call `softmax`,
# `log_softmax` or a finished loss. About two lines.


# %% nbgrader={"grade_id": "loss", "solution": true}
def cross_entropy(scores, labels):
    """The loss [n] of each of n examples with `scores` [n, classes] and `labels` [n]."""
    ### BEGIN SOLUTION
    scores = scores - scores.max(axis=1, keepdims=True)  # the largest is 0: exp can't overflow
    return scores.exp().sum(axis=1).log() - scores.pick(labels, axis=1)
    ### END SOLUTION


# %% [markdown]
# This one has autograd differentiate your loss. The gradient is `None` where there is none. With
# `weights`, it is that of the weighted sum.

# %% tags=["driver"]
def loss_and_gradient(scores, labels, weights=None):
    """What your loss gives, and the gradient of its sum with respect to `scores`."""
    scores.attach_grad()
    with autograd.record():
        losses = cross_entropy(scores, labels)
    try:
        losses.backward(weights)
    except mx.MXNetError:
        return losses, None
    return losses, scores.grad


# %% nbgrader={"grade_id": "loss-values", "points": 1}
scores = nd.array([[0, 0, 0, 0], [np.log(3), 0, 0, 0]], dtype="float64")
losses = cross_entropy(scores, nd.array([2, 0]))
assert losses.shape == (2,), f"two examples, and losses of shape {losses.shape}"
assert np.allclose(losses.asnumpy(), np.log([4, 2])), (
    f"losses {losses.asnumpy()}: of four equal scores it is log 4, and log 2 where one is log 3")

# %% nbgrader={"grade_id": "loss-gradient", "points": 1}
losses, gradient = loss_and_gradient(nd.array([[0, 0], [0, 0]]), nd.array([0, 1]))
assert gradient is not None, "autograd finds no way from the loss back to the scores"
assert np.allclose(gradient.asnumpy(), [[-0.5, 0.5], [0.5, -0.5]]), (
    f"of two equal scores, the right one has slope -1/2, the other 1/2; {gradient.asnumpy()}")
losses, _ = loss_and_gradient(nd.array([[1000, 0], [-1000, -2000]]), nd.array([0, 1]))
assert (losses.asnumpy() == [0, 1000]).all(), (
    "of scores 1000 and 0, and -1000 and -2000, the losses are 0 and 1000, not "
    f"{losses.asnumpy()}")

# %% [markdown]
# ## 2. Replicas (2 points)
#
# Copy the parameters to each device. Every copy must have memory of its own, so that whoever
# writes into one changes neither another nor the caller's parameters, which stay as they are. That
# holds on the device where they already live, too. Each copy gets a place for its own gradient,
# which a backward pass overwrites: plain `attach_grad()`.
#
# Raise `ValueError` where one device is named twice: two replicas there would only take turns.
#
# About seven lines.


# %% nbgrader={"grade_id": "replicas", "solution": true}
def make_replicas(params, devices):
    """A list of len(devices) replicas, each a list of copies of all `params`, on its device."""
    ### BEGIN SOLUTION
    if len(set(devices)) < len(devices):
        raise ValueError(f"a device is named twice: {devices}")
    replicas = [[p.copyto(d) for p in params] for d in devices]
    for replica in replicas:
        for p in replica:
            p.attach_grad()
    return replicas
    ### END SOLUTION


# %% [markdown]
# To see your replicas' gradients at work: this runs two backward passes on each, through
# $\frac{r + 1}{2} \sum w^2$ on replica $r$. The gradient of that is $(r + 1)\,w$. The second
# function makes replicas of two models, one after the other.

# %% tags=["driver"]
def replica_gradients(params, devices):
    """The gradient of each parameter of each of your replicas, None where it has no place."""
    replicas = make_replicas(params, devices)
    for _ in range(2):
        for r, replica in enumerate(replicas):
            for p in replica:
                if p.grad is not None:
                    with autograd.record():
                        value = (r + 1) / 2 * (p * p).sum()
                    value.backward()
    return [[p.grad for p in replica] for replica in replicas]


def two_models(first, second, devices):
    return [make_replicas(params, list(devices)) for params in (first, second)]


# %% nbgrader={"grade_id": "replicas-values", "points": 1}
params = [nd.array([[1, 2], [3, 4]]), nd.array([5, 6])]
two = devices(2)
replicas = make_replicas(params, two)
assert len(replicas) == 2 and len(replicas[1]) == 2, "not two replicas of two parameters each"
assert replicas[1][0].context == two[1], "replica 1 is not on its device"
assert (replicas[1][0] == params[0].copyto(two[1])).asnumpy().all(), (
    "replica 1 has other values")
gradients = replica_gradients(params, two)
assert gradients[1][1] is not None, "a copy has no place for its gradient"
assert (gradients[1][1].asnumpy() == [10, 12]).all(), (
    f"after the second backward pass it is {gradients[1][1].asnumpy()}, not that pass's (10, 12)")

# %% nbgrader={"grade_id": "replicas-care", "points": 1}
params = [nd.array([1, 2, 3])]
replicas = make_replicas(params, [mx.cpu(0), mx.cpu(1)])
replicas[0][0][:] = -1
assert params[0][0].asscalar() == 1, "writing into replica 0 changed the caller's parameters"

# %% [markdown]
# ## 3. The step (4 points)
#
# Now the heart of it. The network is given, with a loss simpler than that of exercise 1: half the
# squared distance between what it says and what it should say, one value an example. And there is
# a function that makes start values, as NumPy arrays in float64.

# %% tags=["given"]
def net(x, p):
    """Two dense layers: [n, inputs] to [n, outputs], with the parameters `p`, a list of four."""
    hidden = nd.tanh(nd.dot(x, p[0]) + p[1])
    return nd.dot(hidden, p[2]) + p[3]


def loss(x, y, p):
    """The loss [n] of each of n examples."""
    return 0.5 * ((net(x, p) - y) ** 2).sum(axis=1)


def start(seed, inputs=4, hidden=6, outputs=2):
    """Start values of the four parameters."""
    rng = np.random.default_rng(seed)
    shapes = [(inputs, hidden), (hidden,), (hidden, outputs), (outputs,)]
    return [rng.normal(size=shape) / 2 for shape in shapes]


# %% [markdown]
# `replicas` holds a list of four parameters for each device, with their gradients attached. All
# replicas are equal. `xs` and `ys` are the shards of one batch: `xs[r]` and `ys[r]` lie on the
# device of `replicas[r]`. If $n$ examples are in the batch, all its shards together, and $\eta$ is
# the learning rate, one device would do
#
# $$w \leftarrow w - \frac{\eta}{n} \sum_{i=1}^{n} \frac{\partial \ell_i}{\partial w},$$
#
# and that is what shall become of every replica, in place. Return the mean loss of the batch
# before the update, as a Python number.
#
# Shards may have any sizes: 5, 2 and 1, say. There may also be fewer shards than replicas, as in
# the last batch of an epoch. Replicas without a shard take part in the update like all others, but
# what their gradients hold is left from an earlier step and must not be added. What gradients hold
# after the step is yours to choose. The test in the open has two equal shards on two replicas; a
# test of your own might have others, and compare one device with the formula. The shards stay as
# they are. "Equal" means: apart by at most $10^{-12}$ of the largest weight. (`nd.sgd_update`
# won't do: it takes its rate in float32.)
#
# About twelve lines.


# %% nbgrader={"grade_id": "step", "solution": true}
def train_step(xs, ys, replicas, lr):
    """Update all replicas in place with one batch's shards; the batch's mean loss, a float."""
    ### BEGIN SOLUTION
    n = sum(len(x) for x in xs)
    with autograd.record():
        losses = [loss(*shard).sum() for shard in zip(xs, ys, replicas)]
    for value in losses:
        value.backward()
    for same in zip(*replicas):
        total = same[0].grad.copy()
        for p in same[1 : len(xs)]:  # those with a shard
            total += p.grad.copyto(total.context)
        for p in same:
            p -= lr / n * total.copyto(p.context)
    return sum(value.asscalar() for value in losses) / n
    ### END SOLUTION


# %% [markdown]
# This one takes several steps of yours, one after the other. Before the first, all gradients hold
# 7, as if left from an earlier step.

# %% tags=["driver"]
def run_steps(replicas, batches, lr):
    """One step for each (xs, ys) in `batches`; the list of losses that they return.

    lr: one rate, or a list of one for each step.
    """
    rates = lr if isinstance(lr, list) else [lr] * len(batches)
    for replica in replicas:
        for p in replica:
            p.attach_grad()
            p.grad[:] = 7
    return [train_step(xs, ys, replicas, rate) for (xs, ys), rate in zip(batches, rates)]


# %% nbgrader={"grade_id": "step-values", "points": 2}
rng = np.random.default_rng(0)
x, y = rng.normal(size=(8, 4)), rng.normal(size=(8, 2))
weights = {}
for k in (1, 2):
    there = [mx.cpu(i) for i in range(k)]
    shards = [[nd.array(part, d, dtype="float64") for part, d in zip(np.split(a, k), there)]
              for a in (x, y)]
    replicas = [[nd.array(w, d, dtype="float64") for w in start(0)] for d in there]
    (loss_before,) = run_steps(replicas, [shards], lr=0.3)
    assert isinstance(loss_before, float), f"a loss of type {type(loss_before).__name__}, not float"
    whole = loss(nd.array(x, dtype="float64"), nd.array(y, dtype="float64"),
                 [nd.array(w, dtype="float64") for w in start(0)])
    mean = whole.mean().asscalar()
    assert abs(loss_before - mean) < 1e-12, f"the loss before the step is {mean}, not {loss_before}"
    weights[k] = [np.concatenate([p.asnumpy().ravel() for p in replica]) for replica in replicas]
old = np.concatenate([w.ravel() for w in start(0)])
one, first, second = weights[1] + weights[2]
assert all((w != old).any() for w in (one, first, second)), "a replica has not changed"
assert np.abs(first - second).max() < 1e-12, "replicas 0 and 1 have drifted apart"
length = np.linalg.norm(first - old) / np.linalg.norm(one - old)
assert abs(length - 1) < 0.005, f"the step of two is {length:.2f} times as long as that of one"
assert np.abs(first - one).max() < 1e-12, "the two agree, but not with one device"

# %% nbgrader={"grade_id": "step-care", "points": 2}
# More tests of this exercise run when it is marked.

# %% [markdown]
# ## 4. An epoch (2 points)
#
# The step takes one batch; an epoch takes all examples. `order` is a NumPy array that says which
# examples, and in which order: the first batch are examples `order[0]` to `order[size - 1]`, and
# so on. `order` may leave examples out, and it may name one twice: then this one counts twice. It
# names at least one. If the batches don't come out even, the last one is what is left, and never
# an empty one. An image may have any shape.
#
# `images` and `labels` are `mx.nd` arrays. Hand each batch to `step(images, labels, n)`, which
# `train_epoch` is given; it isn't exercise 3's. It updates the network with the gradient of the
# *sum* of the losses, divided by `n`, and returns the sum of the losses, a Python number. Say the
# right `n` for each batch, so that each makes a step with the mean of its own gradients. Return
# the mean loss over all examples of the epoch. Types of numbers and the caller's arrays stay as
# they are.
#
# About six lines.


# %% nbgrader={"grade_id": "epoch", "solution": true}
def train_epoch(images, labels, order, size, step):
    """One call of `step` for each batch of at most `size` examples; the mean loss, a float."""
    ### BEGIN SOLUTION
    total = 0.0
    for begin in range(0, len(order), size):
        chosen = nd.array(order[begin : begin + size], dtype="int32")
        x, y = images.take(chosen), labels.take(chosen)
        total += step(x, y, len(chosen))
    return total / len(order)
    ### END SOLUTION


# %% [markdown]
# A step to try it with: a linear model on one device, in NumPy, which writes down what it is given.

# %% tags=["driver"]
def run_epoch(images, labels, order, size, weight, lr):
    """Your epoch: the loss it returns, the weight after it, and all (images, labels, n) seen."""
    weight, seen = weight.copy(), []

    def step(images, labels, n):
        if n == 0:
            raise ValueError("a step with n = 0")
        x, y = images.asnumpy(), labels.asnumpy()
        seen.append((x, y, n))
        errors = x @ weight - y
        weight[:] -= lr / n * (errors @ x)
        return float((errors**2).sum() / 2)

    return train_epoch(images, labels, order, size, step), weight, seen


# %% nbgrader={"grade_id": "epoch-values", "points": 1}
labels = nd.arange(7)
images = nd.stack(10 * labels, 10 * labels + 1, axis=1)
order = np.array([3, 1, 4, 0, 5, 2, 6])
_, _, seen = run_epoch(images, labels, order, 3, np.zeros(2), 0.001)
assert [len(x) for x, _, _ in seen] == [3, 3, 1], f"batches of {[len(x) for x, _, _ in seen]}"
assert seen[1][1].tolist() == [0, 5, 2], f"the second batch has labels {seen[1][1]}"
for x, y, _ in seen:
    assert (x[:, 0] == 10 * y).all(), "labels beside other images"

# %% nbgrader={"grade_id": "epoch-care", "points": 1}
images, labels = nd.array([[1], [1], [1]]), nd.array([0, 0, 2])
mean, weight, _ = run_epoch(images, labels, np.arange(3), 2, np.zeros(1), 0.5)
assert weight == [1], \
    f"the weight is {weight[0]}, not 1: the last batch has one example, so its n is 1"
assert abs(mean - 2 / 3) < 1e-6, f"losses of 0, 0 and 2, and a mean of {mean}"

# %% [markdown]
# ## 5. In your words (2 points)
#
# The tests of exercise 3 train in float64 and ask for equality to $10^{-12}$. Nobody trains in
# float64. Why is it used here? In float32, chapter 04's LeNet can end far from one device within
# sixty steps; in each of them half a million numbers go into its relus. What do you expect of
# exercise 3's network in float32, with batches of eight: after one step, after a thousand, and
# after a thousand with relu in place of tanh? What does that depend on? Reasons count here, but
# you may try it. A few sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for the cause: $k$ devices add the same numbers in another order, and each addition
# rounds, so even a right program doesn't give the same bits. In float64 rounding is near
# $10^{-16}$, and a real mistake, such as a wrong divisor, is larger by many powers of ten: one
# bound tells them apart.
#
# One point for float32, with reasons. After one step the weights differ by $10^{-7}$ of the
# largest or so. With tanh, which has no kink, rounding adds up, and that is all: in 150 trainings
# of a thousand steps, at rate 0.3 and with new random examples in each step, the difference was
# near $10^{-6}$ of the largest weight, at most $5 \cdot 10^{-5}$. With relu a jump *may* come,
# once a number is so near to zero that rounding puts it on the other side (chapter 04). But six
# hidden units and eight examples are 48 numbers a step, 48,000 in a thousand steps, and the two
# trainings differ in them by a few times $10^{-7}$: so about one training in a hundred. Of 150
# trainings one jumped, to $5 \cdot 10^{-2}$, and no other went above $4 \cdot 10^{-5}$. With 200
# hidden units, at rate 0.01, 4 of 40 jumped. So it depends on how many numbers go into relus:
# units, examples and steps. "It jumps", without a word of that, earns half of this point. After a
# jump a right program can be as far from one device as a wrong one, and one can only ask whether
# it learns as well.
