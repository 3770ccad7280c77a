# %% [markdown]
# # 11 · How far it scales
#
# So far two devices have mostly done more images a second than one. Would sixteen be faster still?
# A model can answer: a formula with a few constants, fitted to measurements. A model can also be
# wrong, so this chapter checks its laws, says which of them fail, and holds its predictions for
# GPUs against published measurements.
#
# ## What you'll do
#
# Train LeNet on 1, 2 and 4 devices, fit two laws and judge them. Measure latency and
# bandwidth of all-reduce with Trainer's own call. Count the operations of LeNet and ResNet-18.
# Predict scaling on up to 16 GPUs, compare with thirteen published figures, and map batch size
# against learning rate.
#
# ## What you'll learn
#
# - strong and weak scaling, and which of them a published figure shows;
# - fitting a law, and four checks: rank, degrees of freedom, the residuals' size, and their signs;
# - why a constant measured in one way may not predict another situation;
# - a range of predictions, with its assumptions varied one at a time;
# - how far the learning rate can grow with the batch.
#
# ## What you need
#
# Chapters 01, 03, 04 and 06 to 10. No GPU, and 3 GB of free memory.
# Reading takes {reading time}, running about a minute on two cores.

# %%
import time

from helpers import load_data
from helpers.device import cores
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show
from helpers.timing import Others

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# ## What we measure on
#
# Up to four GPUs where MXNet sees two or more, else four simulated devices. A core works for one
# simulated device at a time, so $k$ of them on $c$ cores compute $p = \min(k, c)$ at once. The
# images are MNIST's, or digits where it can't be had.

# %% tags=["measured"]
gpus = mx.context.num_gpus()
real = gpus > 1
places = [mx.gpu(r) if real else mx.cpu(r) for r in range(min(4, gpus) if real else 4)]
counts = [k for k in (1, 2, 4) if k <= len(places)]
at_once = {k: k if real else min(k, cores()) for k in counts}
data = load_data("mnist", limit=3840)
print(f"{cores()} cores; devices that compute at once: {at_once}\n{data}")

# %% [markdown]
# **Predict:** if four devices work as two at once, is training on four as fast as on two, faster,
# or slower?
#
# ## Speed-up and efficiency
#
# $T_k(n)$ is the time of a step on $k$ devices with a batch of $n$ images.
#
# - **Strong scaling**: the same batch on more devices. Speed-up $T_1(n) / T_k(n)$, ideally $k$.
# - **Weak scaling**: as many images *for each device*, so the batch grows with $k$. Efficiency
#   $T_1(n) / T_k(kn)$, ideally 1.
#
# With images per second in place of times, one definition of efficiency covers both: the speed-up
# as a share of $k$.

# %%
def efficiency(throughput, of_one, k):
    return throughput / (k * of_one)


assert efficiency(throughput=1500, of_one=1000, k=2) == 0.75

# %% [markdown]
# *The Straight Dope*, "Training on multiple GPUs with gluon" (September 2017, commit 72a83ca),
# prints the seconds of five epochs of MNIST, for `run(1, 64, .3)`, then for `run(2, 128, .6)`:
# devices, batch size, learning rate. **Predict:** is that strong or weak scaling? Does a *step*
# take longer on two GPUs?

# %%
one, two = np.median([[4.9, 4.7, 4.6, 4.7, 4.7], [2.8, 2.8, 2.8, 2.8, 2.9]], axis=1)
on_one, on_two = one / -(-60_000 // 64), two / -(-60_000 // 128)  # seconds of a step
print(f"speed-up {one / two:.2f}, efficiency {efficiency(60_000 / two, 60_000 / one, 2):.0%}; "
      f"a step: {1e3 * on_one:.2f} ms, then {1e3 * on_two:.2f} ms")

# %% [markdown]
# Each GPU has 64 images in both runs, so it is weak scaling. There are half as many steps, and each
# takes a fifth longer. (The next commit's times are no evidence: chapter 06.)
# We return to the 84 %.
#
# ## Measuring
#
# The width of LeNet's hidden layer is an argument: that layer has most of the
# parameters and little of the arithmetic, so it changes the bytes more than the compute.

# %%
def lenet(width=128):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(width, activation="relu"), nn.Dense(10))
    return net


# %%
def start(net, contexts):
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(nd.zeros((2, 1, 28, 28), ctx=contexts[0]))  # makes the parameters
    return net


# %% [markdown]
# Only trained parameters have gradients. Float32 takes four bytes. **Predict:** by what factor do
# the bytes grow when the hidden layer goes from 128 to 2,048 units?

# %%
def gradients(net):  # one shape for each array of gradients
    return [p.shape for p in net.collect_params().values() if p.grad_req != "null"]


def gradient_bytes(net):
    return sum(4 * int(np.prod(shape)) for shape in gradients(net))


# %%
widths = (128, 2048)
sizes = {width: gradient_bytes(start(lenet(width), [mx.cpu()])) for width in widths}
assert sizes[128] == 4 * 129_068, "the LeNet of chapters 04 to 07"
print(f"{sizes[128]:,} and {sizes[2048]:,} bytes: {sizes[2048] / sizes[128]:.1f} times as many")

# %% [markdown]
# A step is chapter 06's, without a look at the loss:

# %% tags=["trains"]
softmax, split = gluon.loss.SoftmaxCrossEntropyLoss(), gluon.utils.split_and_load


def train_step(net, trainer, x, y, contexts):
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(split(x, contexts), split(y, contexts))]
    autograd.backward(losses)
    trainer.step(len(x))


# %% [markdown]
# The clock is read when the queues are empty, before and after.

# %%
def seconds(action, repeats):
    nd.waitall()
    begin = time.perf_counter()
    for _ in range(repeats):
        action()
    nd.waitall()
    return (time.perf_counter() - begin) / repeats


# %% [markdown]
# A grid of two widths, three batch sizes, and 1, 2 and 4 devices serves both kinds of scaling. Each
# device updates its own replica (chapter 07), so that one device and several take the same path.
# Each round visits all points, so that a machine that slows down does so for all. The first
# round warms up and isn't kept. About **15 seconds**.

# %%
batch_sizes = (64, 128, 256)
grid = [(w, n, k) for w in widths for n in batch_sizes for k in counts]
nets = {(w, k): start(lenet(w), places[:k]) for w in widths for k in counts}
trainers = {key: gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01},
                               update_on_kvstore=False) for key, net in nets.items()}
x, y = nd.array(data.train_images[:256]), nd.array(data.train_labels[:256])


# %%
def one_point(w, n, k, repeats=2):
    job = nets[w, k], trainers[w, k], x[:n], y[:n], places[:k]
    return seconds(lambda: train_step(*job), repeats)


# %% [markdown]
# A point's time is the median of its rounds. Its *noise* is the standard error of that median, as
# a share of it: $1.25\,\sigma/\sqrt{r}$ for $r$ rounds of normally distributed times, where the
# quartiles lie $1.35\,\sigma$ apart.

# %%
def median_and_noise(rounds):
    low, middle, high = np.percentile(rounds, [25, 50, 75], axis=0)
    return middle, 1.25 * (high - low) / 1.35 / np.sqrt(len(rounds)) / middle


# %% tags=["measured", "few:grid] for _ in range(10)]=>grid] for _ in range(4)]"]
with Others() as others:
    rounds = [[one_point(*point) for point in grid] for _ in range(10)]
measured, noise = median_and_noise(rounds[1:])
times = dict(zip(grid, measured))
print(f"other programs took {others.share:.0%} of the machine's time; a point's noise is "
      f"{np.median(noise):.1%} in the median\nbatch  devices  ms/step  images/s  speed-up")
for n in batch_sizes:
    for k in counts:
        t = times[128, n, k]
        print(f"{n:5}  {k:7}  {1e3 * t:7.1f}  {n / t:8,.0f}  {times[128, n, 1] / t:8.2f}")
weak = {k: 64 * k / times[128, 64 * k, k] for k in counts}
print("weak, 64 images a device:", ", ".join(
    f"k = {k}: efficiency {efficiency(images, weak[1], k):.0%}" for k, images in weak.items()))

# %% [markdown]
# If others took more than a few per cent, close them and run the cell again.

# %% tags=["measured"]
best, which = max((times[w, n, 1] / times[w, n, k], (n, k)) for w, n, k in grid if w == 128)
fig, ax = figure(f"Best speed-up {best:.2f}: batch {which[0]} on {which[1]} devices "
                 f"({max(at_once.values())} compute at once)", "devices",
                 "images/s over those of one device")
ax.plot(counts, [at_once[k] for k in counts], "--", color="black", label="devices at once")
for n, look, color in zip(batch_sizes, ("o-", "s-.", "^:"), (BLUE, ORANGE, GREEN)):
    ax.plot(counts, [times[128, n, 1] / times[128, n, k] for k in counts], look, color=color,
            label=f"strong, batch {n}")
ax.plot(counts, [weak[k] / weak[1] for k in counts], "D-", color=GREY,
        label="weak, 64 images a device")
ax.set(xticks=counts, ylim=(0, None))
ax.legend(fontsize=8, loc="lower right")
show(fig, alt="Throughput on 1, 2 and 4 devices as a multiple of one device's, for three batch "
     "sizes and for 64 images a device, below a dashed line for the devices at once.")

# %% [markdown]
# In our quiet runs, with the same batch, four devices on two cores are slower than two. Where the
# dashed line is flat, more devices add work (smaller shards, more messages, more operators to
# start) and no core to do it. (With 64 images each, the ideal for four on two cores is 50 %.)
#
# ## Fitting, with the answer known
#
# Least squares on *relative* residuals, or the longest times would be all that counts. No constant
# may be negative, since no part of a step takes negative time: that is `nnls`. `columns` has a row
# for each measurement and a column for each constant, brought to equal length first.

# %%
from scipy.optimize import nnls


def fit_law(columns, times):  # constants >= 0, and residuals as shares of the times
    rows = columns / times[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scaled, _ = nnls(rows / scale, np.ones(len(times)))
    return scaled / scale, columns @ (scaled / scale) / times - 1


# %% [markdown]
# **Amdahl's law** (1967): a part $s$ of the work stays as it is, the rest is shared by $p$
# workers: $T = T_1 \left(s + \frac{1-s}{p}\right)$. It is linear in two constants, $T = a + b/p$,
# with $s = a/(a+b)$. However many workers there are, the speed-up stays below $1/s$.

# %%
def amdahl(workers, times):
    p = np.array(workers, dtype=float)
    (a, b), residuals = fit_law(np.stack([np.ones_like(p), 1 / p], axis=1), np.array(times))
    return a / (a + b), residuals


# %%
s, residuals = amdahl([1, 2, 4, 8], [3 * (0.1 + 0.9 / p) for p in (1, 2, 4, 8)])
assert abs(s - 0.1) < 1e-9 and np.abs(residuals).max() < 1e-9, "exact data, exact constants"
s, residuals = amdahl([1, 2, 4], [1, 0.5, 0.2])  # faster than 1/p: a would be below zero
assert s == 0 and np.allclose(residuals, [-5 / 57, -5 / 57, 8 / 57]), "a = 0, and b fitted alone"

# %% [markdown]
# **Predict:** how large are the residuals for *The Straight Dope*'s two times? And what does the
# law find for a machine of two cores with *no* serial part, measured on 1, 2 and 4 devices, if you
# put $k$ for $p$?

# %%
for name, workers, values in (("two points", [1, 2], [4.7, 2.8]),
                              ("two cores, p = k", [1, 2, 4], [1, 0.5, 0.5]),
                              ("two cores, p at once", [1, 2, 2], [1, 0.5, 0.5])):
    s, residuals = amdahl(workers, values)
    print(f"{name:20} s = {s:.2f}, largest residual {np.abs(residuals).max():.0%}, "
          f"degrees of freedom {len(values) - 2}")

# %% [markdown]
# Two points usually fit a law of two constants: points minus constants, the *degrees of freedom*,
# is zero, and a perfect fit means nothing. With three points one degree is left, enough to show
# that the second line is wrong: it blames the missing cores on a serial part. So $p$ has to be the
# number of devices that compute at once. Your machine, where the law has **missed** if the last two
# residuals differ by more than twice the sum of their noises:

# %% tags=["measured"]
enough = len(counts) > 2 and len(set(at_once.values())) > 1  # a degree of freedom, two values of p
for n in batch_sizes:
    s, residuals = amdahl([at_once[k] for k in counts], [times[128, n, k] for k in counts])
    noises = [noise[grid.index((128, n, k))] for k in counts]
    missed = abs(residuals[-1] - residuals[-2]) > 2 * sum(noises[-2:])
    print(f"batch {n:3}: s = {s:.2f}, residuals and noise",
          *(f"{r:+.1%} ± {e:.1%} " for r, e in zip(residuals, noises)),
          ("missed" if missed else "not missed") if enough else "too few points to tell")

# %% [markdown]
# In our quiet runs $s$ falls as the batch grows: the "serial part" is no constant of the program.
# What doesn't grow with the batch is a smaller share of a larger step. John Gustafson (1988) made
# that the way out: grow the work with the machine, which is weak scaling. And where two and four
# devices have the same $p$, the law gives them the same time: in some rows of our runs it missed.
#
# ## A law with reasons in it
#
# A step of network $w$ with $n$ images on $k$ devices, with $A$ arrays of $S_w$ bytes in all:
#
# $$T = \varphi_w + \gamma_w \frac{n}{p} + \alpha \cdot 2kA + \beta \cdot 2kS_w \quad (k > 1)$$
#
# - $\varphi_w$: what a step costs whatever $n$ and $k$;
# - $\gamma_w$: computing one image, shared by $p$ devices;
# - $\alpha$: a copy's latency. With updates on each device, the store copies each of $A$ arrays
#   $2k$ times (chapter 10, answer 3);
# - $\beta$: a byte of a copy. All copies cross the same host memory here.

# %%
def terms(w, n, k, p, arrays=8):
    """One row of the law: what each of the constants is multiplied by."""
    own = [value if w == width else 0 for width in widths for value in (1, n / p)]
    copies = 2 * k * (k > 1)
    return [*own, copies * arrays, copies * sizes[w]]


# %% [markdown]
# **Check 1, rank:** how many constants can the plan tell apart? **Predict:** with the narrow
# network only, can it tell α from β?

# %%
def rank(columns):
    columns = columns[:, columns.any(axis=0)]
    return np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0)), columns.shape[1]


# %%
plan = [(w, n, k) for w in widths for n in (64, 128, 256) for k in (1, 2, 4)]
planned = np.array([terms(w, n, k, min(k, 2)) for w, n, k in plan], dtype=float)
print("one network:  rank {} of {}".format(*rank(planned[:9])))
print("two networks: rank {} of {}".format(*rank(planned)))

# %% [markdown]
# In one network arrays and bytes are always in the same proportion. A fit would have given *some*
# answer. Now test the fit on times whose constants are known:

# %%
known = np.array([2e-3, 2e-4, 6e-3, 3e-4, 50e-6, 0.1e-9])  # φ, γ of each network, then α, β
truth = planned @ known
found, residuals = fit_law(planned, truth)
assert np.allclose(found, known, rtol=1e-6, atol=0) and np.abs(residuals).max() < 1e-9, "exact data"
assert terms(2048, 64, 4, 2)[2:] == [1, 32, 64, 8 * sizes[2048]], "a row by hand"
assert terms(128, 64, 1, 1) == [1, 64, 0, 0, 0, 0], "and one device copies nothing"
(slope,), low = fit_law(np.array([[1.0], [1.0]]), np.array([1.0, 2.0]))
assert np.isclose(slope, 1.2) and np.allclose(low, [0.2, -0.4]), "below zero: slower than the law"

# %% [markdown]
# **Check 2, degrees of freedom:** 18 − 6 = 12 with four devices. **Check 3, size:** the square root
# of (sum of squared residuals / degrees of freedom) should be about the noise (its root mean
# square); above 1.5 times, the law has missed. **Check 4, signs:** it has also missed if all
# residuals of one $k$ have the same sign, however small.

# %%
def one_sided(residuals, groups):
    """The groups whose residuals all have one sign, and that sign: {group: "+" or "−"}."""
    signs = {g: {r > 0 for r, other in zip(residuals, groups) if other == g} for g in groups}
    return {g: "+" if True in sides else "−" for g, sides in signs.items() if len(sides) == 1}


def verdict(residuals, groups, noise, constants):
    ratio = np.sqrt(np.sum(np.square(residuals)) / (len(residuals) - constants))
    ratio /= np.sqrt(np.mean(np.square(noise)))
    summary = f"residuals {ratio:.1f} × noise"
    faults = [summary] * bool(ratio > 1.5)
    faults += [f"{g} all {side}" for g, side in one_sided(residuals, groups).items()]
    return ", ".join(["missed", *faults] if faults else ["not missed", summary])


# %%
assert one_sided([1, 2, -1, -3, 1, -1], [1, 1, 2, 2, 4, 4]) == {1: "+", 2: "−"}
assert verdict([2, -2] * 2, [1, 1, 2, 2], [1, 1, 1, 3], 2) == "missed, residuals 1.6 × noise"

# %% [markdown]
# How good are checks 3 and 4? Fit the law to made-up times, nine rounds for each point, whose
# spread differs from point to point. Some come from the law itself, others have something that it
# doesn't know: compute 10 % slower on more than one device, or 2 ms more.

# %%
rng, ks = np.random.default_rng(11), np.array([k for *_, k in plan])
compute = planned[:, :4] @ known[:4]
cases = {"the law itself": truth, "10 % slower": truth + 0.1 * compute * (ks > 1),
         "2e-3 s more": truth + 2e-3 * (ks > 1)}
for name, exact in cases.items():
    fired = []
    for _ in range(400):
        spread = rng.uniform(0.02, 0.1, 18) * rng.standard_normal((9, 18))
        middle, noise_of = median_and_noise(exact * (1 + spread))
        fired.append(verdict(fit_law(planned, middle)[1], ks, noise_of, 6))
    missed = np.mean([v.startswith("missed") for v in fired])
    print(f"{name:15} found missed in {missed:.0%}, by check 4 in "
          f"{np.mean(['all' in v for v in fired]):.0%}")
    assert missed < 0.1 if name == "the law itself" else missed > 0.5, name

# %% [markdown]
# Few false alarms, but a third of one kind of fault passes: "not missed" doesn't mean right. Now
# your times.

# %% tags=["measured"]
columns = np.array([terms(w, n, k, at_once[k]) for w, n, k in grid], dtype=float)
ks = [f"k = {k}" for *_, k in grid]
law, misfit = fit_law(columns, measured)
print("φ {:.2f} and {:.2f} ms a step, γ {:.0f} and {:.0f} µs an image, α {:.0f} µs a copy, "
      "β {:.2f} ns a byte".format(*law[[0, 2, 1, 3, 4, 5]] * [1e3, 1e3, 1e6, 1e6, 1e6, 1e9]))
judged = verdict(misfit, ks, noise, constants=6)
print(f"largest residual {np.abs(misfit).max():.1%}; {judged}")

# %% tags=["measured"]
far = int(np.abs(misfit).argmax())
fig, ax = figure(f"The law of the step: {judged}\nlargest residual {100 * misfit[far]:+.0f} % at "
                 "n {1}, w {0}, k = {2}".format(*grid[far]), "batch n, width w of hidden layer",
                 "(law − measured) / measured, %")
labels = [f"n {n}\nw {w}" for w in widths for n in batch_sizes]
for k, marker, color in zip(counts, "osD", (BLUE, ORANGE, GREEN)):
    mine = [i for i, point in enumerate(grid) if point[2] == k]
    ax.errorbar(np.arange(len(labels)) + 0.12 * np.log2(2 * k) - 0.24, 100 * misfit[mine],
                100 * noise[mine], fmt=marker, color=color, capsize=3, label=f"k = {k}")
ax.axhline(0, color=GREY, lw=1)
ax.set_xticks(range(len(labels)), labels)
fig.legend(ncols=3, fontsize=8, loc="outside lower center")
show(fig, alt="Relative residuals of the fitted law with the noise of each point, for each batch "
     "size, width and number of devices, around a line at zero.")

# %% [markdown]
# A residual below zero means slower than the law says. In some of our runs the law is missed. But
# even where it isn't, are its constants what they are named after? What stands for communication, α
# and β, must vanish without all-reduce. So we time forward and backward passes only, of one shard
# on one device, and of two equal shards on two; then the wide network's updates.

# %%
def passes(shards, net=nets[128, 2]):
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in shards]
    autograd.backward(losses)


def update_after_passes(w, k):
    passes(list(zip(*(split(a[: 32 * k], places[:k]) for a in (x, y)))), nets[w, k])
    return seconds(lambda: trainers[w, k].update(32 * k), 1)


# %% tags=["measured", "few:range(20)=>range(5)", "few:range(11)=>range(4)"]
for m in (32, 64, 128):
    shards = list(zip(*(split(a[: 2 * m], places[:2]) for a in (x, y))))
    gaps = [[seconds(lambda some=shards[:k]: passes(some), 3) for k in (1, 2)]
            for _ in range(20)]
    low, middle, high = 1e3 * np.percentile(np.diff(gaps[1:]), [25, 50, 75])
    print(f"{m:3} images each: two devices take {middle:.1f} ms longer than one "
          f"(middle half {low:.1f} to {high:.1f})")
print(f"the law charges two devices {1e3 * law[4:] @ [4 * 8, 4 * sizes[128]]:.1f} ms for copies")
updates = [[update_after_passes(2048, k) for k in counts] for _ in range(11)]
print("updates of the wide network, ms:", ", ".join(
    f"k = {k}: {1e3 * t:.1f}" for k, t in zip(counts, np.median(updates[1:], axis=0))))

# %% [markdown]
# With no all-reduce at all, two devices at once take longer than one. So a good part of what the
# law charges for copies needn't be communication. Python hands out work on the same cores, and the
# cores share a memory; whether it is one of these, we haven't tested. The wide network's updates
# take several milliseconds longer on four devices than on one: the law has no column for that, so β
# can carry it. **On GPUs:** Python and the devices don't share cores, and each GPU has its own
# memory (deeper: Three ways to divide a network).
#
# ## All-reduce by itself
#
# Can we measure α and β directly, with the call that Trainer makes? `Trainer._allreduce_grads`
# calls `pushpull(i, gradients, priority=-i)` for each dense parameter in turn, and waits for none
# (`gluon/trainer.py` at 1.9.1, with `update_on_kvstore=False`).

# %%
def all_reducer(entries, contexts):  # entries: one number for each array
    store = mx.kvstore.create("device")
    arrays = [[nd.full(int(n), 10**r, ctx=d) for r, d in enumerate(contexts)] for n in entries]
    for i, replicas in enumerate(arrays):
        store.init(i, replicas[0])

    def reduce():
        for i, replicas in enumerate(arrays):
            store.pushpull(i, replicas, priority=-i)
    return reduce, arrays


# %%
reduce, arrays = all_reducer([5, 7], places[:2])
reduce()
assert all((a == 11).asnumpy().all() for replicas in arrays for a in replicas), "1 + 10, everywhere"

# %% [markdown]
# If an array of $b$ bytes takes $a + b/B$, then $a$ seems easy: time one small array. **Predict:**
# does it matter what ran just before it? We time a kilobyte, right after itself, after 16 MB, and
# after a pause; then eight of them.

# %%
one, eight, much = (all_reducer(n, places[:2])[0] for n in ([256], [256] * 8, [2**22]))
befores = {"itself": None, "16 MB": much, "a pause": lambda: time.sleep(5e-3)}


def after(before, action):
    (before or action)()
    return seconds(action, 1)


# %% tags=["measured"]
orders = [(name, count, action) for name in befores
          for count, action in ((1, one), (8, eight))]
found = [[after(befores[name], action) for name, _, action in orders] for _ in range(41)]
found = dict(zip([order[:2] for order in orders], 1e6 * median_and_noise(found[1:])[0]))
for name in befores:
    print(f"after {name:8} one array {found[name, 1]:4.0f} µs, eight {found[name, 8]:4.0f}")
print(f"after 16 MB, one takes {found['16 MB', 1] / found['itself', 1]:.1f} times as long")

# %% [markdown]
# In our quiet runs the same call takes two or three times as long after a large array, and
# longer after a pause too. So measure a constant as it will be used. We come closer with lists of
# arrays, $t = \tau + a A + S/B$, numbers and sizes varied independently. In the same rounds, and
# not in the fit: `trainer.allreduce_grads()` (chapter 07) of our two networks, after itself and
# after a backward pass has finished. (In a step, one device's copies can begin while the other
# still computes.)

# %%
lists = [(A, n) for A in (1, 4, 16, 64) for n in (2**8, 2**12, 2**15, 2**17)]
lists += [(A, 2**20) for A in (1, 2, 4)] + [(1, 2**21)]
actions = [all_reducer([n] * A, places[:2])[0] for A, n in lists]
actions += [trainers[w, 2].allreduce_grads for w in widths]


def after_passes(w):
    return after(lambda: passes(halves, nets[w, 2]), trainers[w, 2].allreduce_grads)


halves = list(zip(*(split(a[:64], places[:2]) for a in (x, y))))

# %% tags=["measured", "few:for _ in range(25)]=>for _ in range(6)]"]
found = [[*(after(None, a) for a in actions), *map(after_passes, widths)] for _ in range(25)]
reduced, spread = median_and_noise(found[1:])
plain = np.array([(1, A, 4 * A * n) for A, n in lists], dtype=float)
link, off = fit_law(plain, reduced[:-4])
large = ["arrays from 4 MB" if n >= 2**20 else "small arrays" for _, n in lists]
print(f"τ {1e6 * link[0]:.0f} µs, a {1e6 * link[1]:.0f} µs an array, B {1e-9 / link[2]:.1f} GB/s; "
      f"largest residual {np.abs(off).max():.0%}; {verdict(off, large, spread[:-4], 3)}")

# %% [markdown]
# In our runs this law is missed. Can it still predict networks that it wasn't fitted to, within a
# factor of two? **Predict:** for which of the two widths is all-reduce mostly bytes?

# %% tags=["measured"]
for i, w in enumerate(widths):
    parts = link * [1, 8, sizes[w]]
    step_law = law[4:] @ [4 * 8, 4 * sizes[w]]
    alone, later = (f"{1e3 * t:.2f} ± {1e3 * t * share:.2f}"
                    for t, share in zip(reduced[i - 4 :: 2], spread[i - 4 :: 2]))
    print(f"width {w:4}: predicted {1e3 * parts.sum():.2f} ms, {sum(parts[:2]) / sum(parts):.0%} "
          f"of it τ and a; measured {alone} after itself, {later} after a backward pass; "
          f"the step's law says {1e3 * step_law:.2f}")

# %% [markdown]
# In our runs it can, when the call follows itself. By this law the wide network's time is mostly
# bytes, the narrow one's mostly τ and $a$. After a backward pass the narrow network's call takes
# longer; for the wide one, compare the difference with the noise. And the law of the step charges
# more than twice what all-reduce takes by itself: its α and β are *not* what they are named after.
# So measure a part by itself before you believe a constant.
#
# ## Counting operations
#
# *Dive into Deep Learning* trains ResNet-18 on two GPUs because its computation takes long beside
# the communication. That can be counted. Chapter 08's network, for `mx.nd` arrays:

# %%
class Residual(nn.HybridBlock):
    def __init__(self, channels, stride=1, project=False, **kwargs):
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2D(channels, kernel_size=3, strides=stride, padding=1)
        self.conv2 = nn.Conv2D(channels, kernel_size=3, padding=1)
        self.project = nn.Conv2D(channels, kernel_size=1, strides=stride) if project else None
        self.norm1, self.norm2 = nn.BatchNorm(), nn.BatchNorm()

    def hybrid_forward(self, F, x):
        change = F.Activation(self.norm1(self.conv1(x)), act_type="relu")
        change = self.norm2(self.conv2(change)) + (self.project(x) if self.project else x)
        return F.Activation(change, act_type="relu")


# %%
def resnet18(classes=10, channels=(64, 128, 256, 512)):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1), nn.BatchNorm(), nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(Residual(width, stride, project=stride > 1), Residual(width))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


# %% [markdown]
# Every number that leaves a convolution or dense layer is a sum of products, one for each weight of
# its channel or unit. With multiplication and addition counted as two operations, an image costs a
# layer $2 \cdot \text{numbers out} \cdot \text{weights of one channel}$. Biases, norms, pooling and
# relu are left out. A *forward hook*, which Gluon calls after a layer has computed, sees the real
# output.

# %%
def operations(net, shape):
    """Floating-point operations of a forward pass for one image of `shape`, {layer: number}."""
    counted, hooks = {}, []

    def note(layer, inputs, output):
        per_number = 2 * int(np.prod(layer.weight.shape[1:]))
        counted[layer.name] = counted.get(layer.name, 0) + per_number * output[0].size

    net.apply(lambda layer: hooks.append(layer.register_forward_hook(note))
              if isinstance(layer, (nn.Conv2D, nn.Dense)) else None)
    net(nd.zeros((1, *shape), ctx=next(iter(net.collect_params().values())).list_ctx()[0]))
    for hook in hooks:
        hook.detach()
    return counted


# %% [markdown]
# Both networks by hand. A convolution of $f \times f$ from $c$ to $d$ channels that gives
# $h \times h$ pixels costs $2 f^2 c d h^2$. In ResNet-18, each stage after the first halves $h$
# (28, 14, 7, 4), doubles the channels, and has a 1×1 shortcut.

# %%
def conv(f, c, d, h):
    return 2 * f * f * c * d * h * h


by_hand = {"LeNet": [conv(3, 1, 20, 26), conv(5, 20, 50, 9), 2 * 800 * 128, 2 * 128 * 10],
           "ResNet-18": [conv(3, 1, 64, 28), 4 * conv(3, 64, 64, 28), 2 * 512 * 10]}
for c, h in ((64, 14), (128, 7), (256, 4)):
    by_hand["ResNet-18"] += [conv(3, c, 2 * c, h) + 3 * conv(3, 2 * c, 2 * c, h),
                             conv(1, c, 2 * c, h)]
both = {"LeNet": start(lenet(), [mx.cpu()]), "ResNet-18": start(resnet18(), [mx.cpu()])}
for name, net in both.items():
    assert sum(operations(net, (1, 28, 28)).values()) == sum(by_hand[name]), name

# %% [markdown]
# Training counts as three forward passes: going backward, a layer computes the gradients of its
# weights and of its inputs, each a product of the same size as the forward one. (The first layer
# skips the second, so three is up to 2 % too many here.) **Predict:** by what factor does ResNet-18
# have more operations *for each byte* of gradients: 2, 20 or 200?

# %%
work = {name: 3 * sum(layers) for name, layers in by_hand.items()}
traffic = {name: gradient_bytes(net) for name, net in both.items()}
arrays = {name: len(gradients(net)) for name, net in both.items()}
assert traffic["ResNet-18"] == 4 * 11_175_818, "chapter 08 counted 11,175,818 parameters"
for name in both:
    print(f"{name:9} {work[name] / 1e6:7,.1f} million operations an image, "
          f"{traffic[name] / 1e6:5.1f} MB in {arrays[name]} arrays")
more = [of["ResNet-18"] / of["LeNet"] for of in (work, traffic, arrays)]
print(f"ResNet-18 has {more[0] / more[1]:.1f} times the operations for each byte, "
      f"{more[0] / more[2]:.0f} for each array")

# %% [markdown]
# For each byte the two are close. For each array they are far apart: if latency matters, LeNet
# suffers more. On our cores ResNet-18 spent the *larger* share on communication (deeper: What the
# second device brings). And on GPUs?
#
# ## Predicting GPUs
#
# One GPU computes a step in $T_1$. On $k$ GPUs with equal shards, how long is communication
# *exposed*, that is, not hidden behind compute? By a ring (chapter 03) an array of $b$ bytes takes
# $2(k-1)(\alpha + b/(kB))$. Four structures:
#
# - **per array**: after the backward pass, one array after the other;
# - **one bucket**: after it, all gradients joined to one array;
# - **full overlap**: per array, but hidden behind the backward pass, two thirds of a GPU's own
#   compute;
# - **by key**: MXNet's `device` store is no ring. Each array goes whole to one GPU, and the arrays
#   are dealt out by size (`InitMergeBuffer` in `src/kvstore/comm.h`). The busiest GPU holds at
#   least a $k$-th of the bytes, and at least the largest array.

# %%
def exposed(k, compute, arrays, size, largest, alpha, bandwidth):
    def ring(count):
        return 2 * (k - 1) * (count * alpha + size / k / bandwidth)

    by_key = 2 * (k - 1) * (arrays / k * alpha + max(size / k, largest) / bandwidth)
    return {"per array": ring(arrays), "one bucket": ring(1), "by key": by_key,
            "full overlap": max(0, ring(arrays) - 2 / 3 * compute)}


one, four = (list(exposed(k, 0.03, 8, 8e6, 4e6, 1e-3, 1e9).values()) for k in (1, 4))
assert one == [0] * 4, "one GPU has nothing to send"
assert np.allclose(four, [0.060, 0.018, 0.036, 0.040]), "6·10, 6·3, 6·(2 + 4), 60 − 20 ms"
assert np.isclose(exposed(4, 0.03, 8, 8e6, 1e6, 1e-3, 1e9)["by key"], 0.024), "a 4th is the larger"


# %% [markdown]
# **Assumptions**: α = 5.7 µs (NCCL's for PCIe, deeper: More all-reduces) and $B$ = 15.75 GB/s
# (PCIe 3.0 ×16, deeper: Three ways to divide a network) for each GPU; loading data, Python and the
# update cost nothing.
#
# What can we check it against? MXNet's `example/image-classification/README.md` (at 1.9.1)
# tabulates images per second on AWS P2.16xlarge machines of 16 K80 GPUs, with a fixed batch for
# each GPU (weak scaling) and the store `dist_device_sync`. We take its rows up to 16 GPUs, assuming
# that they ran on one machine. It gives the size of each model and the speed of one GPU, our $T_1$.
# The numbers of arrays are those of Gluon's versions, the largest arrays those of the networks
# (AlexNet's from `symbols/alexnet.py`). And there are *The Straight Dope*'s two GPUs, with chapter
# 06's LeNet.

# %%
from mxnet.gluon.model_zoo import vision

Published = {  # bytes, those of the largest array, images for each GPU, {GPUs: images/s}
    "AlexNet": (203e6, 4 * 6400 * 4096, vision.alexnet(), 512,
                {1: 457.07, 2: 870.43, 4: 1514.8, 8: 2852.5, 16: 4244.18}),
    "Inception-v3": (95e6, 4 * 2048 * 1000, vision.inception_v3(), 32,
                     {1: 30.4, 2: 59.61, 4: 117.9, 8: 233.39, 16: 447.61}),
    "ResNet-152": (240e6, 4 * 9 * 512 * 512, vision.resnet152_v2(), 32,
                   {1: 20.08, 2: 38.76, 4: 77.01, 8: 153.07, 16: 298.03}),
    "LeNet": (traffic["LeNet"], 4 * 800 * 128, both["LeNet"], 64,
              {1: 64 / on_one, 2: 128 / on_two})}
published = {name: (size, top, len(gradients(net)), n, throughput)
             for name, (size, top, net, n, throughput) in Published.items()}

# %%
def predicted(name, k, alpha=5.7e-6, bandwidth=15.75e9):
    size, top, count, n, throughput = published[name]
    one = n / throughput[1]
    return {way: one / (one + extra) for way, extra in
            exposed(k, one, count, size, top, alpha, bandwidth).items()}


points = [(name, k) for name, (*_, throughput) in published.items() for k in throughput if k > 1]
truths = {(name, k): efficiency(published[name][-1][k], published[name][-1][1], k)
          for name, k in points}
print("efficiency        published   predicted, four structures")
for name, k in points:
    print(f"{name:12} k ={k:3} {truths[name, k]:9.0%}  ",
          *(f"{way} {share:.0%}" for way, share in predicted(name, k).items()))

# %% [markdown]
# How many published figures lie between the lowest and the highest structure? And if one
# assumption is changed at a time? Up to four GPUs may share one link (deeper: Three ways to
# divide a network), which leaves each $B / \min(k, 4)$. A message may take ten times the latency,
# since the `device` store isn't NCCL. A wide range hits more, so we print its width.

# %%
def ends(name, k, on_link=1, alpha=5.7e-6):
    shares = predicted(name, k, alpha, 15.75e9 / min(k, on_link)).values()
    return min(shares), max(shares)


for label, change in (("as assumed", {}), ("B shared", {"on_link": 4}),
                      ("α × 10", {"alpha": 57e-6})):
    ranges = {point: ends(*point, **change) for point in points}
    inside = [point for point, (low, high) in ranges.items() if low <= truths[point] <= high]
    width = np.median([high - low for low, high in ranges.values()])
    print(f"{label:10} {len(inside):2} of {len(points)} within, median width {100 * width:.0f} "
          f"points:", ", ".join(sorted({name for name, _ in inside})))

# %% [markdown]
# As assumed, the model **misses**: it is too optimistic. What would α or $B$ have to be to meet the
# 84 % of *The Straight Dope*, if nothing overlaps?

# %%
size, _, count, *_ = published["LeNet"]
extra = on_two - on_one
print(f"{1e3 * extra:.2f} ms longer. Per array that needs "
      f"α = {1e6 * (extra - size / 15.75e9) / 2 / count:.0f} µs, "
      f"or B = {1e-9 * size / (extra - 2 * count * 5.7e-6):.2f} GB/s; "
      f"one GPU does {64 * work['LeNet'] / on_one / 1e9:.0f} GFLOP/s")

# %% [markdown]
# If communication is all of it (the model counts no Python, loading or update), either α is ten
# times ours, or $B$ 4 % of the link's. 172 GFLOP/s would be 1 % of a V100's peak of 15.7 TFLOP/s in
# float32 (NVIDIA, *Tesla V100 GPU Architecture*, 2017). The page doesn't name its GPU; a sister
# page (`multiple-gpus-scratch`) shows Tesla M60s.
#
# For the K80s we can *fit* one constant, the effective bandwidth, to one published point,
# ResNet-152 on two GPUs, without latency and overlap, and predict the other eleven: by a ring, and
# by key. The baseline: "all have ResNet-152's efficiency on two GPUs".

# %%
size, _, _, n, throughput = published["ResNet-152"]
fitted, low, high = (size / (2 * n / (throughput[2] * f) - n / throughput[1])
                     for f in (1, 0.99, 1.01))
rest = [(name, k) for name, k in points if name != "LeNet" and (name, k) != ("ResNet-152", 2)]
error = {way: {point: predicted(*point, alpha=0, bandwidth=fitted)[way] - truths[point]
               for point in rest} for way in ("one bucket", "by key")}
error["baseline"] = {point: truths["ResNet-152", 2] - truths[point] for point in rest}
print(f"effective bandwidth {fitted / 1e9:.1f} GB/s ({low / 1e9:.1f} to {high / 1e9:.1f} if the "
      "point is 1 % off)\npredicted minus published, in points:")
for way, row in error.items():
    for name in ("ResNet-152", "Inception-v3", "AlexNet"):
        print(f"{way:11} {name:12}", *(f"k = {k}: {100 * e:+.1f}  "
                                       for (m, k), e in row.items() if m == name))
most = [100 * max(abs(predicted(*point, 0, b)["by key"] - truths[point]) for point in rest)
        for b in (fitted, low, high)]
print("by key at most {:.1f} points off, {:.1f} or {:.1f} at the ends".format(*most))

# %%
end = predicted("AlexNet", 16, 0, fitted)
fig, ax = figure(f"AlexNet on 16 K80s: {truths['AlexNet', 16]:.0%} published, {end['by key']:.0%} "
                 f"predicted by key, {end['one bucket']:.0%} by a ring\n(bandwidth fitted to "
                 "ResNet-152 on two; bands: that point ± 1 %)", "GPUs (K80)",
                 "weak-scaling efficiency, %", size=(7, 3.8))
ks = [2, 4, 8, 16]
ax.plot(ks, [100 * truths["AlexNet", k] for k in ks], "^", color=ORANGE, ms=8, label="published")
for way, line, color in (("by key", "-", BLUE), ("one bucket", ":", GREEN)):
    middle, lower, upper = ([100 * predicted("AlexNet", k, 0, b)[way] for k in ks]
                            for b in (fitted, low, high))
    ax.plot(ks, middle, line, color=color, lw=2,
            label="ring" if way == "one bucket" else way)
    ax.fill_between(ks, lower, upper, color=color, alpha=0.15, lw=0)
ax.set_xscale("log", base=2)
ax.set(xticks=ks, xticklabels=ks, ylim=(50, 101))
ax.legend(fontsize=8, loc="lower left")
show(fig, alt="AlexNet's published efficiency on 2 to 16 GPUs as points, falling. By key the "
     "predicted line falls with them, by a ring it stays above 90 %.")

# %% [markdown]
# For the two deep networks the baseline is on average off by about twice as much as by key, but by
# less than 5 points. AlexNet tells the laws apart: half of its bytes are in one array, which a ring
# would cut and the `device` store doesn't. By key comes much closer, with no new constant. But it
# ignores the server that `dist_device_sync` also uses, and we can't exclude another limit, such as
# reading images. Networks with wide dense layers can scale badly with a ring too: on 512 GPUs
# Horovod, which uses rings (arXiv:1802.05799), reports 68 % for VGG-16 against 90 % for Inception
# V3 (`docs/benchmarks.rst`). So AlexNet's fall doesn't prove that whole arrays are the cause.
#
# ### ResNet-18 on eight GPUs
#
# Strong scaling, batch 256 in all on eight V100s. $T_1$ isn't published for this network, so it
# takes one assumption more: the share of the peak that is reached, 30 %.

# %%
def speedups(name="ResNet-18", k=8, n=256, share=0.3, alpha=5.7e-6, bandwidth=15.75e9):
    one = n * work[name] / (share * 15.7e12)
    return {way: one / (one / k + extra) for way, extra in
            exposed(k, one / k, arrays[name], traffic[name], tops[name], alpha, bandwidth).items()}


tops = {"LeNet": 4 * 800 * 128, "ResNet-18": 4 * 9 * 512 * 512}
changes = {"as assumed": {}, "share 10 %": {"share": 0.1}, "share 60 %": {"share": 0.6},
           "B / 4": {"bandwidth": 15.75e9 / 4}, "NVLink, 150 GB/s": {"bandwidth": 150e9},
           "α × 10": {"alpha": 57e-6}, "batch 2,048": {"n": 2048}, "LeNet": {"name": "LeNet"},
           "LeNet, share 1 %": {"name": "LeNet", "share": 0.01}}
for label, change in changes.items():
    print(f"{label:17}", *(f"{way} {value:5.2f}  " for way, value in speedups(**change).items()))

# %% [markdown]
# As assumed, structure moves the speed-up from 5.0 to 8.0; within one structure, ResNet-18's lowest
# and highest differ by four to six. At equal shares of the peak LeNet gains less, which is d2l's
# claim. If LeNet reaches only 1 % of the peak, its speed-up is above ResNet-18's in three
# structures and equal in the fourth. Which scales better depends on shares that we haven't
# measured. Buckets *and* overlap, as in DDP, are chapter 14's.
#
# ## Batch size against learning rate
#
# More devices want larger batches. Which learning rate goes with them? Without BatchNorm (chapter
# 09) the devices have no say: on any number of them the same batch gives the same step (chapter
# 04), so one device will do. The rule of Goyal et al. (2017) is to multiply the learning rate by
# the same factor as the batch, so that each image moves the weights equally far, while the gradient
# changes little.
#
# A small network, five seeds a cell, 3,840 images a training.

# %%
def small():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(8, kernel_size=3, strides=2, activation="relu"),
            nn.Conv2D(16, kernel_size=3, strides=2, activation="relu"), nn.Dense(10))
    return net


used = min(3840, len(data.train_labels) // 256 * 256)
images, answers = nd.array(data.train_images[:used]), nd.array(data.train_labels[:used])
test, truth = nd.array(data.test_images[:1000]), data.test_labels[:1000]

# %% tags=["trains"]
def trained_accuracy(batch, lr, seed):
    mx.random.seed(seed)
    rng, net = np.random.default_rng(seed), small()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    for _ in range(3840 // used):
        order = nd.array(rng.permutation(used), dtype="int32")
        a, b = images.take(order), answers.take(order)
        for i in range(0, used, batch):
            with autograd.record():
                loss = softmax(net(a[i : i + batch]), b[i : i + batch])
            loss.backward()
            trainer.step(batch)
    return np.mean(net(test).asnumpy().argmax(axis=1) == truth)


# %% [markdown]
# The map takes about **15 seconds**. Its title names the learning rates whose mean plus standard
# deviation reaches the best mean.

# %% tags=["measured", "few:range(5)=>range(2)"]
batches, lrs, seeds = [16, 32, 64, 128, 256], [0.025, 0.05, 0.1, 0.2, 0.4, 0.8], range(5)
maps = np.array([[[trained_accuracy(batch, lr, seed) for batch in batches] for lr in lrs]
                 for seed in seeds])  # [seed, learning rate, batch]
heat, deviation = 100 * maps.mean(axis=0), 100 * maps.std(axis=0, ddof=1)
good = [" or ".join(f"{lr:g}" for lr, mean, sd in zip(lrs, heat[:, i], deviation[:, i])
                    if mean + sd >= heat[:, i].max()) for i in (0, -1)]
fig, ax = figure(f"Best within the spread: batch 16 at {good[0]}, 256 at {good[1]}\n"
                 f"({data.name}, mean ± standard deviation of 5 seeds)", "batch size",
                 "learning rate", size=(7, 4))
picture = ax.imshow(heat, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=100)
for (i, j), value in np.ndenumerate(heat):
    ax.text(j, i, f"{value:.0f} ± {deviation[i, j]:.0f}", ha="center", va="center", fontsize=9,
            color="black" if value > 60 else "white")
ax.set_xticks(range(len(batches)), batches)
ax.set_yticks(range(len(lrs)), lrs)
fig.colorbar(picture, label="test accuracy, %")
show(fig, alt="Heat map of test accuracy for five batch sizes and six learning rates.")

# %% [markdown]
# Two questions over seeds. When the batch doubles, does doubling the learning rate change accuracy
# less than keeping it? And does the best one grow with the batch?

# %% tags=["measured"]
kept, scaled = (100 * np.abs(maps[:, rows, 1:] - maps[:, :-1, :-1]).mean(axis=2)
                for rows in (slice(None, -1), slice(1, None)))
print("learning rate: change of accuracy, mean over batches (lowest to highest seed), in points")
for i, lr in enumerate(lrs[:-1]):
    row = [f"{c[:, i].mean():5.1f} ({c[:, i].min():.1f} to {c[:, i].max():.1f})"
           for c in (kept, scaled)]
    wins = int((scaled[:, i] < kept[:, i]).sum())
    print(f"{lr:<5}  kept {row[0]}, doubled {row[1]}: rule better for {wins} of 5 seeds")
best = np.array(lrs)[maps.argmax(axis=1)]  # [seed, batch]
print("best, lowest to highest seed:", ", ".join(
    f"batch {n}: {low:g} to {high:g}" for n, low, high in zip(batches, best.min(0), best.max(0))))

# %% [markdown]
# On MNIST doubling the learning rate changes accuracy less than keeping it, except from 0.4. From
# 0.025 the change is about a point; the higher the learning rate, the larger. For each seed and
# batch the best one is 0.2 or 0.4. The rule would ask for 3.2 or 6.4 at batch 256; the map ends at
# 0.8, where training already often fails. More images, or Goyal et al.'s warm-up (chapter 06),
# might change that.
#
# ## Summary
#
# - Strong scaling keeps the batch, weak scaling the batch of each device. $k$ simulated devices on
#   $c$ cores are $\min(k, c)$ at once.
# - Judge a law by rank, degrees of freedom, the size of residuals against noise, and their signs.
#   In our runs the law of the step charged more than twice what all-reduce takes by itself: a
#   fitted constant collects everything that grows with its column, not only what it is named after.
# - The same all-reduce takes longer after a large one: measure a constant as it will be used.
# - ResNet-18 has 2.3 times LeNet's operations for each byte of gradients, and 21 times for each
#   array.
# - With a link's nominal figures the model was too optimistic for thirteen published ones. With one
#   fitted bandwidth it came within 6 points of eleven others by key (within 10 if the fitted point
#   is 1 % off); by a ring it missed AlexNet by up to 34.
# - On our map of MNIST the best learning rate doesn't grow in proportion to the batch.
#
# Next, chapter 12: devices that are not equal.
#
# **Further reading.** G. Amdahl, *Validity of the single processor approach* (1967); J. Gustafson,
# *Reevaluating Amdahl's law* (1988); *Dive into Deep Learning*, "Concise Implementation for
# Multiple GPUs", exercise 1; P. Goyal et al., *Accurate, large minibatch SGD* (2017),
# arXiv:1706.02677.

# %% [markdown]
# ## Exercises
#
# 1. **Half the efficiency.** By Amdahl's law with a serial part of 5 %, from which number of
#    workers on is the efficiency below one half? Find the formula for any $s$.
# 2. **A third count.** Called with a symbol, `net(mx.sym.var("data"))` gives its graph, from which
#    `get_internals().infer_shape` tells all shapes with nothing computed. Count ResNet-18's
#    operations from that. (In the graph's `tojson()`, a layer's second input is its weight.)
# 3. **What would AlexNet need?** For each published point, find the effective bandwidth that meets
#    it, by a ring and by key, without latency and overlap. Which structure comes closer to one
#    constant?

# %% [markdown]
# ### Answer 1
#
# The efficiency is $\frac{1}{ks + 1 - s}$, one half where $k = 1 + 1/s$: 21 for 5 %. From 22 on it
# is below.

# %% tags=["solution"]
s = 0.05
share = {k: 1 / (k * (s + (1 - s) / k)) for k in range(1, 40)}
assert np.isclose(share[21], 0.5) and share[22] < 0.5 < share[20], "half at 1 + 1/s"

# %% [markdown]
# ### Answer 2
#
# Outputs and weights have shapes in the graph.

# %% tags=["solution"]
import json

graph = both["ResNet-18"](mx.sym.var("data"))
inside = graph.get_internals()
shapes = dict(zip(inside.list_outputs(), inside.infer_shape(data=(1, 1, 28, 28))[1]))
nodes, total = json.loads(graph.tojson())["nodes"], 0
for node in nodes:
    if node["op"] in ("Convolution", "FullyConnected"):
        weight = shapes[nodes[node["inputs"][1][0]]["name"]]
        total += 2 * int(np.prod(shapes[node["name"] + "_output"])) * int(np.prod(weight[1:]))
assert total == sum(by_hand["ResNet-18"]), "graph, hooks and paper should count the same"

# %% [markdown]
# ### Answer 3
#
# By key all points need between 2.7 and 5.3 GB/s. By a ring AlexNet's falls from 3.6 to 0.5.

# %% tags=["solution"]
needed = {}
for name, k in points[:-1]:
    size, top, _, n, throughput = published[name]
    seconds_more = k * n / throughput[k] - n / throughput[1]
    for way, part in (("one bucket", size / k), ("by key", max(size / k, top))):
        needed[way, name, k] = bandwidth = 2 * (k - 1) * part / seconds_more
        assert np.isclose(predicted(name, k, 0, bandwidth)[way], truths[name, k])
for way in ("one bucket", "by key"):
    for name in ("ResNet-152", "Inception-v3", "AlexNet"):
        print(f"{way:10} {name:12}", *(f"k = {k}: {needed[way, name, k] / 1e9:.1f} GB/s "
                                       for k in (2, 4, 8, 16)))
