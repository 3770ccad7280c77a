# %% [markdown]
# # Assignment 6: unequal devices
#
# **You will** cut a batch in proportion to the devices' speeds, weigh gradients that come from
# unequal shards, and work out whether a slow device is worth having at all.
#
# **You need** chapter 12. **Time**: about an hour and a half. **Points**: 12, of which 2 are for
# words.
#
# **You may use** anything in Python, NumPy and `mx.nd`.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values, other sizes and other numbers of devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.

# %% tags=["given"]
from helpers import devices

import mxnet as mx
import numpy as np

# %% [markdown]
# Why rounding won't do: ten examples for devices whose speeds are as 3 to 1 to 1 to 1. Round each
# share for itself, and what do they add up to?

# %%
shares = [10 * v / 6 for v in (3, 1, 1, 1)]
print(shares, [round(share) for share in shares], sum(round(share) for share in shares))

# %% [markdown]
# ## 1. Shards in proportion (4 points)
#
# Share out $n$ examples among devices that do $v_0, v_1, \ldots$ examples a second, and return the
# sizes of the shards. These are the rules:
#
# 1. Device $i$ is due $n \, v_i / \sum_j v_j$ examples. It gets that number, rounded down.
# 2. The examples that are left over go, one each, to the devices with the largest remainders, that
#    is, to those who lost most by rounding. Of equal remainders the device with the lower number
#    comes first.
# 3. Devices that have nothing after rules 1 and 2 get one example each, all of them at the same
#    time, and are done. The others give back what they got, and begin again with the examples that
#    are left, one fewer for each device that is done, by rules 1 and 2 among themselves; and so on,
#    until nobody has nothing.
#
# Rules 1 and 2 are those of chapter 12's first exercise. Rule 3 is not: there a device that is due
# very little may get nothing. Remainders that are equal on paper may
# differ in floating point: no test of this assignment depends on last digits.
#
# Return a list; the sizes in it are integers, Python's or NumPy's. Raise `ValueError` where there
# are fewer examples than devices, and where a speed is not a positive, finite number. The list
# that you are given stays as it is.
#
# About sixteen lines.


# %% nbgrader={"grade_id": "cut", "solution": true}
def cut(n, speeds):
    """A list of k whole numbers for k speeds, in proportion, each at least 1; their sum is n."""
    ### BEGIN SOLUTION
    if n < len(speeds) or not all(0 < v < float("inf") for v in speeds):
        raise ValueError(f"{n} examples for speeds {speeds}")
    sizes, sharing = [1] * len(speeds), range(len(speeds))
    while True:
        left, total = n - len(speeds) + len(sharing), sum(speeds[i] for i in sharing)
        due = {i: left * speeds[i] / total for i in sharing}
        for i in sharing:
            sizes[i] = int(due[i])
        over = left - sum(sizes[i] for i in sharing)
        for i in sorted(sharing, key=lambda i: sizes[i] - due[i])[:over]:
            sizes[i] += 1
        if min(sizes) > 0:
            return sizes
        sharing, sizes = [i for i in sharing if sizes[i]], [max(s, 1) for s in sizes]
    ### END SOLUTION


# %% nbgrader={"grade_id": "cut-values", "points": 2}
for n, speeds, expected in (
        (256, [3, 1], [192, 64]),
        (10, [3, 1, 1, 1], [5, 2, 2, 1]),  # due 5, 1.67, 1.67 and 1.67; two are left over
        (100, [0.2, 0.3, 0.4], [22, 33, 45])):  # due 22.2, 33.3 and 44.4; one is left over
    sizes = cut(n, speeds)
    assert isinstance(sizes, list), f"a {type(sizes).__name__}, not a list"
    assert sum(sizes) == n, f"{n} examples, but {sizes} add up to {sum(sizes)}"
    assert sizes == expected, f"{n} examples, speeds {speeds}: {sizes}, not {expected}"

# %% nbgrader={"grade_id": "cut-few", "points": 1}
for n, speeds, expected in (
        (3, [90, 5, 5], [1, 1, 1]),
        (4, [1, 4, 4], [1, 2, 1]),   # one for the first; the others share three, due 1.5 each
        (11, [3, 74, 40], [1, 6, 4]),  # one for the first; the others share ten as 74 to 40
        # one for each of two, at the same time; the others share seven as 7 to 3 to 5
        (9, [1, 1, 7, 3, 5], [1, 1, 3, 2, 2])):
    sizes = cut(n, speeds)
    assert min(sizes) > 0, f"{n} examples, speeds {speeds}: {sizes}, so a device has nothing"
    assert sum(sizes) == n, f"{n} examples, but {sizes} add up to {sum(sizes)}"
    assert sizes == expected, f"{n} examples, speeds {speeds}: {sizes}, not {expected}"

# %% nbgrader={"grade_id": "cut-care", "points": 1}
for n, speeds in ((2, [1, 1, 1]), (8, [1, 0])):
    try:
        cut(n, speeds)
    except ValueError as error:
        print("As it should be, ValueError:", error)
    else:
        raise AssertionError(f"{n} examples, speeds {speeds}: no ValueError")

# %% [markdown]
# ## 2. Weighted gradients (3 points)
#
# Each of $k$ devices has computed the *mean* gradient $\bar g_i$ of its own shard of $n_i$
# examples. Replace each of them, in place and on its device, by the mean over the whole batch:
#
# $$\bar g = \frac{1}{n} \sum_i n_i \, \bar g_i, \qquad n = \sum_i n_i.$$
#
# A size may be 0: that device had no examples this time. Its array holds whatever was left in it
# from earlier, which may be NaN, and that must not count; but the device receives $\bar g$ like
# the others. At least one size is above 0.
#
# The course's `allreduce` isn't in this folder: copy to one device, add, and copy back. Raise
# `ValueError`, and write nothing, where there isn't one size for each gradient. `sizes` stays as
# it is. The means of float64 gradients are to be right to rounding in float64. The function
# returns nothing.
#
# About six lines.


# %% nbgrader={"grade_id": "average", "solution": true}
def average(gradients, sizes):
    """Each of k gradients, one a device, the mean over sizes[i] examples, becomes that over all."""
    ### BEGIN SOLUTION
    if len(gradients) != len(sizes):
        raise ValueError(f"{len(gradients)} gradients and {len(sizes)} sizes")
    total = sum(g.asnumpy() * (size / sum(sizes)) for g, size in zip(gradients, sizes) if size)
    for g in gradients:
        g[:] = total
    ### END SOLUTION


# %% [markdown]
# The gradients of four examples are 1, 2, 3 and 10, and the first device has three of them.

# %% nbgrader={"grade_id": "average-values", "points": 2}
first, second = (mx.nd.array([g], d) for g, d in zip([(1 + 2 + 3) / 3, 10], devices(2)))
average([first, second], [3, 1])
for array in (first, second):
    assert np.isclose(array.asscalar(), (1 + 2 + 3 + 10) / 4), (
        f"{array.context} holds {array.asscalar():.3g}, not 4 (before, the two held 2 and 10; 6 is "
        "the mean of these, and 12 their sum)")

# %% nbgrader={"grade_id": "average-care", "points": 1}
first, second = mx.nd.array([5], mx.cpu(0)), mx.nd.array([float("nan")], mx.cpu(1))
average([first, second], [4, 0])
found = [first.asscalar(), second.asscalar()]
assert np.allclose(found, 5), f"four examples here, none there: {found}, not 5 and 5"
try:
    average([first, second], [4])
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("two gradients and one size: no ValueError")

# %% [markdown]
# ## 3. Does the slow one pay? (3 points)
#
# A step ends when the slowest device has ended, and then the all-reduce takes its time. A device
# alone has no all-reduce. Here a share need not be a whole number of examples.
#
# `step_seconds(n, speeds, cost)` returns a tuple or list of three numbers for a batch of $n$: the
# seconds of a step on the fastest device alone, on all devices with equal shares, and on all
# devices with shares in proportion to `speeds`. `cost` is what the all-reduce takes, in seconds.
# With one entry in `speeds` all three are the same.
#
# `whom(n, speeds, costs)` decides which devices should train, with shares in proportion. Now the
# time of the all-reduce was measured for each number of devices: among $k$ it takes `costs[k-1]`
# seconds, and `costs[0]` is 0. Expect nothing else of these: they may grow with $k$, stay the same,
# or go up and down. Return two things, in a tuple or list: the numbers of the chosen devices, as an
# ascending list of integers, and the seconds that their step takes. If several choices are equally
# fast on paper, take the one with the fewest devices; of devices of one speed, take those with
# the lower numbers. Both functions leave their lists as they are.
#
# About four lines each.


# %% nbgrader={"grade_id": "time", "solution": true}
def step_seconds(n, speeds, cost):
    """(alone, equal, proportional): the seconds of a step on n examples, done in three ways."""
    ### BEGIN SOLUTION
    k = len(speeds)
    together = cost if k > 1 else 0
    alone, equal, proportional = n / max(speeds), n / k / min(speeds), n / sum(speeds)
    return alone, equal + together, proportional + together
    ### END SOLUTION


def whom(n, speeds, costs):
    """(chosen, seconds): the numbers of the devices that make the fastest step, and its time."""
    ### BEGIN SOLUTION
    ranked = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    times = [n / sum(speeds[i] for i in ranked[: k + 1]) + cost for k, cost in enumerate(costs)]
    best = times.index(min(times))
    return sorted(ranked[: best + 1]), times[best]
    ### END SOLUTION


# %% [markdown]
# Three devices, of which the first is four times as fast as each of the others. With equal shares
# it had better work alone.

# %% nbgrader={"grade_id": "time-seconds", "points": 1}
alone, equal, proportional = step_seconds(240, [1600, 400, 400], 0.01)
assert np.isclose(alone, 0.15), f"240 examples at 1600 a second take 0.15 s, not {alone:.3g}"
assert np.isclose(equal, 0.21), f"80 at 400 a second, and the all-reduce: 0.21 s, not {equal:.3g}"
assert np.isclose(proportional, 0.11), f"160 and twice 40: 0.11 s, all-reduce too, not {proportional:.3g}"
assert np.allclose(step_seconds(240, [1600], 0.01), 0.15), "a device alone has no all-reduce"

# %% nbgrader={"grade_id": "time-whom", "points": 2}
chosen, seconds = whom(256, [1600, 400], [0, 0.01])
assert isinstance(chosen, list), f"the numbers are in a {type(chosen).__name__}, not a list"
assert chosen == [0, 1], f"device 0 alone takes 0.160 s, both 0.128 + 0.010 s: not {chosen}"
assert np.isclose(seconds, 0.138), f"both take 0.138 s, not {seconds:.3g}"
chosen, seconds = whom(256, [400, 1600], [0, 0.05])
assert chosen == [1], f"device 1 alone takes 0.160 s, both 0.128 + 0.050 s: not {chosen}"
assert np.isclose(seconds, 0.160), f"alone it takes 0.160 s, not {seconds:.3g}"

# %% [markdown]
# ## 4. In your words (2 points)
#
# A GPU does 3,000 images a second, the CPU beside it 100; the batch is 256, and the all-reduce
# takes 2 ms. What does `step_seconds` say: how many ms alone, and how many together, with shares
# in proportion? Would you use the CPU? Say when a slow device is better left out, and name at
# least two things that the formula doesn't know.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# One point for the formula: alone 85.3 ms, together 82.6 + 2 = 84.6 ms. The CPU pays, by less than
# one per cent: it saves 2.8 ms of computing, and the all-reduce costs 2. A slow device is better
# left out where it saves less than the all-reduce costs: when it is very slow, the batch is small
# or the all-reduce takes long.
#
# One point for two things that the formula doesn't know, and a decision that fits them. Such as:
# the CPU has other work (Python, the loader, starting the GPU's operators); its speed changes, and
# everybody waits for it when it is late; it gets whole images, and at least one, even if a
# hundredth is due; BatchNorm's statistics from its eight images are noisy; its memory may be too
# small; somebody has to measure speeds, and to test unequal shards and weights. For less than one
# per cent the answer is no.
