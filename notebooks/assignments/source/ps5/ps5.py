# %% [markdown]
# # Assignment 5: measure, fit, predict
#
# **You will** write the three functions behind a claim about speed: one that takes the time of a
# training step, one that fits a law to such times, and one that predicts what more devices would
# bring.
#
# **You need** chapters 03, 10 and 11. **Time**: about an hour and a half. **Points**: 12, of which
# 2 are for words.
#
# **You may use** anything in NumPy, SciPy and Python's own library.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again, on
# other values, other sizes and other numbers of devices, when it is marked.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.
#
# No real clock is read here. Times come from formulas and from a machine that is simulated, so
# the right answer is known, and it is the same on every computer.

# %% tags=["given"]
import numpy as np

# %% [markdown]
# The machine is one device with a queue, and a clock. Python takes `handing` seconds to hand out a
# step, and the device then works on it for as long as `costs` says, one step after another. `left`
# seconds of somebody else's work are in the queue when the machine starts.


# %% tags=["given"]
class Machine:
    def __init__(self, costs, handing=0.0, left=0.0):
        self.costs, self.handing, self.pushed = list(costs), handing, 0
        self.now = 1000.0              # what the clock shows; it has run for a while
        self.done = self.now + left    # when the device will have finished what it has

    def push(self):
        """Hand out one step. Returns before the step has run."""
        self.now += self.handing
        cost = self.costs[min(self.pushed, len(self.costs) - 1)]
        self.done = max(self.done, self.now) + cost
        self.pushed += 1

    def wait(self):
        """Return when the queue is empty."""
        self.now = max(self.now, self.done)

    def clock(self):
        """Seconds, since some moment in the past."""
        return self.now


# %% [markdown]
# Three steps of 5, 4 and 4 seconds. Without `wait`, the clock shows only how long handing out
# takes:

# %%
machine = Machine([5, 4, 4], handing=0.1)
begin = machine.clock()
for _ in range(3):
    machine.push()
print(f"handed out after {machine.clock() - begin:.1f} s", end=", ")
machine.wait()
print(f"done after {machine.clock() - begin:.1f} s")

# %% [markdown]
# ## 1. The time of a step (4 points)
#
# `measure` gets three functions, `push`, `wait` and `clock`, which do what the machine's methods
# do. It returns the seconds that one step takes, found in this way and no other:
#
# - A *round* is `steps` steps, handed out one after another without waiting in between.
# - The first round warms up and isn't counted: the first steps of a program fetch memory. Then
#   come `rounds` rounds that are counted. That makes `(1 + rounds) * steps` steps in all.
# - The queue is empty when the clock starts for a round, and again when it stops.
# - A counted round's time, divided by `steps`, is its time of a step. The answer is the *median*
#   over the counted rounds, since other programs disturb some of them. Of an even number of rounds
#   it is the mean of the two in the middle, as `np.median` has it.
#
# Raise `ValueError` where `steps` or `rounds` is below 1, before a step is handed out.
#
# About eleven lines.


# %% nbgrader={"grade_id": "measure", "solution": true}
def measure(push, wait, clock, steps, rounds):
    """Seconds a step: the median over `rounds` rounds of `steps` steps, after one to warm up."""
    ### BEGIN SOLUTION
    if steps < 1 or rounds < 1:
        raise ValueError(f"{rounds} rounds of {steps} steps")
    taken = []
    for _ in range(1 + rounds):
        wait()
        begin = clock()
        for _ in range(steps):
            push()
        wait()
        taken.append((clock() - begin) / steps)
    return np.median(taken[1:])
    ### END SOLUTION


# %% [markdown]
# The tests below call your function through this one. `costs` has a row for each round, the one
# that warms up first.


# %%
def on_machine(costs, handing, left, steps, rounds):
    """What your `measure` returns on a new machine, and how many steps it has handed out."""
    machine = Machine(np.reshape(costs, -1), handing, left)
    seconds = measure(machine.push, machine.wait, machine.clock, steps, rounds)
    return seconds, machine.pushed


# %% nbgrader={"grade_id": "measure-values", "points": 2}
found, pushed = on_machine([[30, 20], [10, 12]], handing=1, left=5, steps=2, rounds=1)
mistakes = {1: "the clock stopped with work still in the queue",
            12: "each step was waited for",
            15.5: "one step has warmed up, not a whole round",
            18.5: "the round that warms up is one of those in the median",
            23: "the time of a whole round, not of a step",
            25.5: "the round that warms up was counted",
            37.5: "the queue wasn't empty when the clock started"}
assert isinstance(found, (int, float)), f"the answer is a {type(found).__name__}, not a number"
assert found not in mistakes, f"{found} s: {mistakes[found]}"
assert abs(found - 11.5) < 1e-9, f"{found} s: a round of 1 + 10 + 12 s has two steps of 11.5 s"
assert pushed == 4, f"{pushed} steps handed out; two rounds of two are four"

# %% nbgrader={"grade_id": "measure-rounds", "points": 2}
costs = [[30, 20], [10, 12], [90, 12], [9, 11], [10, 8], [45, 46]]
found, _ = on_machine(costs, handing=0, left=0, steps=2, rounds=5)
mistakes = {9: "the quickest round, not the median",
            11.5: "the median over single steps, not over rounds",
            18: "the round that warms up is one of those in the median",
            25.3: "the mean over the rounds, not the median"}
assert isinstance(found, (int, float)), f"the answer is a {type(found).__name__}, not a number"
assert round(found, 9) not in mistakes, f"{found} s: {mistakes[round(found, 9)]}"
assert abs(found - 11) < 1e-9, f"{found} s: steps took 11, 51, 10, 9, 45.5 s, so the median is 11"

# %% [markdown]
# ## 2. Latency and bandwidth (3 points)
#
# A message of $b$ bytes takes $t = \alpha + b / B$ seconds: a latency of $\alpha$ seconds, then
# bytes at a bandwidth of $B$ bytes per second. You have measured messages of several sizes. Fit
# the two terms to them, as chapter 11 did, but weighted: these times scatter by a few per cent,
# whatever the size, so take *relative* residuals: find the $\alpha$ and $B$ for which
#
# $$\sum_i \left(\frac{\alpha + b_i / B - t_i}{t_i}\right)^2$$
#
# is smallest. Hint: it is linear in $\alpha$ and $\beta = 1/B$. Your two numbers must be right to
# $10^{-8}$ of themselves: solve the linear problem. A fit that improves a first guess step by
# step, such as `curve_fit`, may stop too early.
#
# The measurements come in any order, and a size may be there more than once: then each of its
# times counts, equal ones too. Sizes may be whole numbers of up to 10 GB (int64, which can't hold
# their squares), and the caller's
# arrays stay as they are. In all data that you are given, the best $\alpha$ and $B$ are above
# zero. Raise `ValueError` where there are fewer than two different sizes, since nothing could tell
# $\alpha$ from $\beta$ there.
#
# About seven lines.


# %% nbgrader={"grade_id": "line", "solution": true}
def fit_line(sizes, seconds):
    """(alpha, bandwidth), in s and bytes/s, from the arrays `sizes` [n] and `seconds` [n]."""
    ### BEGIN SOLUTION
    if len(np.unique(sizes)) < 2:
        raise ValueError("a line takes two sizes")
    rows = np.stack([1 / seconds, sizes / seconds], axis=1)
    alpha, beta = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
    return alpha, 1 / beta
    ### END SOLUTION


# %% nbgrader={"grade_id": "line-values", "points": 2}
sizes = np.array([1e3, 1e4, 1e5, 1e6, 1e7])
alpha, bandwidth = fit_line(sizes, 2e-4 + sizes / 5e8)
assert np.ndim(alpha) == np.ndim(bandwidth) == 0, "two numbers are asked for, not arrays"
assert abs(alpha / 2e-4 - 1) < 1e-8, f"alpha: {alpha:.10g} s, but their latency is 2e-4 s"
assert abs(bandwidth / 5e8 - 1) < 1e-8, (
    f"bandwidth: {bandwidth:.10g}, but these go at 5e8 bytes/s")

# %% nbgrader={"grade_id": "line-care", "points": 1}
sizes, seconds = np.array([4000, 1000, 2000]), np.array([5.0, 2.0, 3.0])
alpha, bandwidth = fit_line(sizes, seconds)
assert np.allclose([alpha, bandwidth], [1, 1000]), f"{alpha}, {bandwidth}, not 1 s, 1000 bytes/s"
assert list(sizes) == [4000, 1000, 2000], "the caller's sizes were changed"
assert list(seconds) == [5, 2, 3], "the caller's times were changed"
# The line through 2.4 s and 3.4 s. At 2.4 s the residuals are 1/5 and -3/5; divided by the times, 2
# and 6, once more, they cancel.
alpha, bandwidth = fit_line(np.array([1000, 1000, 2000]), np.array([2.0, 6.0, 3.4]))
assert np.allclose([alpha, bandwidth], [1.4, 1000]), (
    f"{alpha}, {bandwidth}: of relative residuals 2 and 6 have the mean 2.4, not 4")

# %% [markdown]
# ## 3. What more devices would bring (3 points)
#
# Training on $k$ devices, with gradients that are all-reduced in one piece by a ring (chapter 03).
# A step takes
#
# $$T_k = \varphi + \gamma\, m + 2(k-1)\left(\alpha + \frac{S/k}{B}\right)$$
#
# - $\varphi$, `costs["fixed"]`: seconds that a step takes whatever the batch;
# - $\gamma$, `costs["image"]`: seconds of computing for one image;
# - $m$: the images of the device that has *most* of them. A step is done when the last device is;
#   shards differ by at most one image;
# - $\alpha$ and $B$, `costs["alpha"]` and `costs["bandwidth"]`: latency (s) and bandwidth (bytes/s)
#   of a message, of which a ring sends $2(k-1)$ one after another;
# - $S$, `costs["bytes"]`: the gradients' bytes. A message is a $k$-th of them.
#
# `predict` returns the seconds of a step, the speed-up and the efficiency. For strong scaling
# (`weak=False`), `images` is the whole batch, on one device as on $k$. For weak scaling
# (`weak=True`), `images` is the batch *of each device*, so that $k$ devices have $k$ times as many.
#
# The speed-up is the images per second of $k$ devices, over those of one device with a batch of
# `images`. The efficiency is the speed-up as a share of the ideal, which is $k$.
#
# Raise `ValueError` where $k$ is below 1, or where the batch of $k$ devices has fewer images than
# $k$. With `weak=True`, that is where `images` is below 1.
#
# About eight lines. `COSTS` is an example that you can work out by hand; your function is to use
# the `costs` that it is given.

# %% tags=["given"]
COSTS = {"fixed": 2.0, "image": 0.5, "alpha": 1.0, "bandwidth": 10.0, "bytes": 40.0}


# %% nbgrader={"grade_id": "predict", "solution": true}
def predict(k, images, weak, costs):
    """(seconds of a step on k devices, speed-up over one, efficiency). `costs`: five numbers."""
    ### BEGIN SOLUTION
    if k < 1 or images < (1 if weak else k):
        raise ValueError(f"{images} images for {k} devices")

    def seconds(k, largest):
        message = costs["alpha"] + costs["bytes"] / k / costs["bandwidth"]
        return costs["fixed"] + costs["image"] * largest + 2 * (k - 1) * message

    step = seconds(k, images if weak else -(-images // k))
    speedup = (k if weak else 1) * seconds(1, images) / step
    return step, speedup, speedup / k
    ### END SOLUTION


# %% nbgrader={"grade_id": "predict-values", "points": 2}
found = predict(2, 48, False, COSTS)                        # strong: 24 images each
assert found is not None and len(found) == 3, f"three numbers are asked for, not {found}"
seconds, speedup, efficiency = found
assert abs(seconds - 20) < 1e-9, f"{seconds} s: 2 + 12 for computing, and two messages of 1 + 2"
assert abs(speedup - 1.3) < 1e-9, f"speed-up {speedup}: one device takes 26 s for the same images"
assert abs(efficiency - 0.65) < 1e-9, f"efficiency {efficiency}: 1.3 of 2"
seconds, speedup, efficiency = predict(2, 48, True, COSTS)  # weak: 48 images each
assert abs(seconds - 32) < 1e-9, f"{seconds} s: 2 + 24 for computing, and two messages of 1 + 2"
assert abs(speedup - 1.625) < 1e-9, f"speed-up {speedup}: 96 images in 32 s, and 48 in 26 s"
assert abs(efficiency - 0.8125) < 1e-9, f"efficiency {efficiency}: 1.625 of 2"

# %% nbgrader={"grade_id": "predict-care", "points": 1}
free = {"fixed": 0.0, "image": 1.0, "alpha": 0.0, "bandwidth": 1.0, "bytes": 0.0}
longest = predict(3, 10, False, free)[0]
assert abs(longest - 4) < 1e-9, f"{longest} s: of ten images for three devices, one has four"

# %% [markdown]
# ## 4. In your words (2 points)
#
# A colleague reports a speed-up of 2.6 on two devices, and is pleased. Which questions would you
# ask? Name three, and say for each what in the measurement could have made the figure too high. A
# few sentences.

# %% [markdown] nbgrader={"grade_id": "why", "points": 2, "solution": true}
# Two devices can share the work, not do less of it, so more than 2 needs an explanation. Three
# questions with a cause each earn the points; a list without causes earns one. For example:
#
# - Was the queue empty when the clock stopped? If work was left in it, the time on two devices is
#   too short. Without any wait it is Python that was timed.
# - Did the run on one device include the warm-up, perhaps because it came first? That makes the
#   time on one device too long.
# - Is it the same batch and the same work? With the batch doubled too, an epoch has half as many
#   steps: seconds of epochs and of steps must not be compared with each other.
# - Is the time on one device a fair one: the same code, the same number of threads, a median of
#   several rounds in turn, nothing else running at that time?
# - If all that is in order: do half the data perhaps fit into a device's cache or memory where the
#   whole did not? Then 2.6 can be true, for this batch, and should go away with a smaller one.
