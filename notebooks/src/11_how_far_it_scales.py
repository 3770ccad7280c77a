# %% [markdown]
# # 11 · How far it scales
#
# Two devices were faster than one, in every chapter so far. Are four faster than two? Are sixteen?
# A measurement answers for the machine that it was made on. To say anything about another one you
# need a model: a formula with a few constants, fitted to what was measured, and honest about what
# it leaves unexplained. This chapter measures, fits, predicts, and checks its own predictions.
#
# ## What you'll do
#
# Train LeNet on 1, 2 and 4 devices with several batch sizes, fit two laws to the times, count every
# operation of LeNet and ResNet-18, predict which of them gains more from a second device, find out,
# and predict 4, 8 and 16 GPUs from what is published about their links. At the end you map batch
# size against learning rate.
#
# ## What you'll learn
#
# - strong and weak scaling, speed-up and efficiency, and which of them a published figure shows;
# - fitting a law by least squares, and reading its residuals: when three points say nothing;
# - operations per gradient byte, and why a CPU differs from a GPU;
# - what a prediction rests on, and which assumption it depends on most;
# - which learning rate goes with which batch.
#
# ## What you need
#
# Chapters 03, 04 and 06 to 08. No GPU, and 3 GB of free memory. Reading takes {reading time},
# running about a minute on two cores that have nothing else to do.

# %%
from helpers import devices, load_data
from helpers.device import cores
from helpers.timing import Others
from helpers.training import Batches, accuracy, fit

# %% [markdown]
# Those first, since MXNet reads its settings once.

# %%
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# ## Devices, and what they run on
#
# Four devices of one kind: GPUs where there are two or more of them, else simulated ones. With
# simulated devices the number that matters is another one. A core computes for one device at a
# time, so $k$ devices on $c$ cores work as $\min(k, c)$ at once. No program can change that. The
# images are MNIST's, or digits where it can't be had.

# %% tags=["measured"]
kind = devices(2)[0].device_type
real = kind == "gpu"
places = [mx.Context(kind, r) for r in range(min(4, mx.context.num_gpus()) if real else 4)]
counts = [k for k in (1, 2, 4) if k <= len(places)]
at_once = {k: k if real else min(k, cores()) for k in counts}
data = load_data("mnist", limit=3840)
print(f"{cores()} cores; devices that compute at once: {at_once}\n{data}")

# %% [markdown]
# **Predict:** if four devices work as two at once, is training on four as fast as on two, faster,
# or slower? Keep your answer; the first measurement has it.
#
# ## Speed-up and efficiency
#
# $T_k(n)$ is the time of a step on $k$ devices with a batch of $n$ images. There are two ways to
# ask how well it scales:
#
# - **strong scaling**: the same batch on more devices. Speed-up $T_1(n) / T_k(n)$, ideally $k$;
# - **weak scaling**: as many images *for each device*, so the batch grows. A step should take as
#   long as before; efficiency $T_1(n) / T_k(kn)$, ideally 1.
#
# Efficiency is the speed-up as a share of the ideal. In general, with images per second in place of
# times, it covers both:

# %%
def efficiency(rate, rate_of_one, k):
    return rate / (k * rate_of_one)


assert efficiency(rate=1500, rate_of_one=1000, k=2) == 0.75

# %% [markdown]
# Try it on something published. *The Straight Dope*, "Training on multiple GPUs with gluon", prints
# these seconds for each epoch of MNIST, first with `run(1, 64, .3)` and then with `run(2, 128,
# .6)`: devices, batch size, learning rate. **Predict:** is that strong scaling or weak? What is the
# speed-up, and how much longer is a *step*?

# %%
one, two = np.median([4.9, 4.7, 4.6, 4.7, 4.7]), np.median([2.8, 2.8, 2.8, 2.8, 2.9])  # seconds
steps = [-(-60_000 // batch) for batch in (64, 128)]
print(f"speed-up {one / two:.2f}, efficiency {efficiency(60_000 / two, 60_000 / one, 2):.0%}")
print(f"a step takes {1e3 * one / steps[0]:.1f} ms, then {1e3 * two / steps[1]:.1f} ms")

# %% [markdown]
# Each GPU has 64 images in both runs, so it is *weak* scaling. The steps are half as many and each
# takes longer by about a fifth: that fifth is the price of the second GPU. What would
# `run(2, 64, .3)` have shown, the strong scaling? The page can't say. Nor can it say what would
# happen with four GPUs: two numbers determine any law with two constants, and check none.
#
# ## Measuring
#
# LeNet once more. The width of the hidden layer is an argument, because that one layer has most of
# the parameters but little of the arithmetic: a knob for the bytes of the gradient.

# %%
def lenet(width=128):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(width, activation="relu"), nn.Dense(10))
    return net


# %% [markdown]
# Initialised on a list of devices, with a first pass that makes the parameters:

# %%
def start(net, contexts):
    net.initialize(mx.init.Xavier(), ctx=contexts)
    net(nd.zeros((2, 1, 28, 28), ctx=contexts[0]))
    return net


# %% [markdown]
# And a Trainer for it. The rate is small, since this is about time, not about learning.

# %%
def trainer_of(net, **options):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, **options)


# %% [markdown]
# Only what is trained has a gradient. Float32 takes four bytes.

# %%
def gradients(net):  # one shape for each array of gradients
    return [p.shape for p in net.collect_params().values() if p.grad_req != "null"]


def gradient_bytes(net):
    return sum(4 * int(np.prod(shape)) for shape in gradients(net))


# %% [markdown]
# **Predict:** by what factor do the bytes grow when the hidden layer goes from 128 to 2,048 units?

# %%
widths = (128, 2048)
sizes = {width: gradient_bytes(start(lenet(width), [mx.cpu()])) for width in widths}
assert sizes[128] == 4 * 129_068, "the LeNet of chapters 04 to 07"
print({width: f"{size:,} bytes" for width, size in sizes.items()},
      f"{sizes[2048] / sizes[128]:.1f} times as many")

# %% [markdown]
# Loss and split are Gluon's own.

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()
split = gluon.utils.split_and_load

# %% [markdown]
# A training step is chapter 06's, bare: no loss is looked at, so that nothing waits.

# %% tags=["trains"]
def train_step(net, trainer, x, y, contexts):
    xs, ys = split(x, contexts), split(y, contexts)
    with autograd.record():
        losses = [softmax(net(a), b) for a, b in zip(xs, ys)]
    autograd.backward(losses)
    trainer.step(len(x))


# %% [markdown]
# The clock is read after `waitall` (chapter 01), and never on a first step.

# %%
import time


def seconds(action, repeats):
    nd.waitall()
    begin = time.perf_counter()
    for _ in range(repeats):
        action()
    nd.waitall()
    return (time.perf_counter() - begin) / repeats


# %% [markdown]
# The same images for every measurement; which ones makes no difference to the clock.

# %%
x, y = nd.array(data.train_images[:256]), nd.array(data.train_labels[:256])

# %% [markdown]
# Now a grid: two widths, three batch sizes, 1, 2 and 4 devices. One grid serves both questions.
# Along a row of equal batch it is strong scaling; along the diagonal (1, 64), (2, 128), (4, 256) it
# is weak. Each round goes through all combinations, so that a machine that gets slower does so for
# all; the first round warms up and is not kept.

# %%
batch_sizes = (64, 128, 256)
grid = [(w, n, k) for w in widths for n in batch_sizes for k in counts]
nets = {(w, k): start(lenet(w), places[:k]) for w in widths for k in counts}
trainers = {key: trainer_of(net) for key, net in nets.items()}

# %% [markdown]
# It takes **about 20 seconds**, and several times as long if other programs run.

# %% tags=["measured"]
import sys

from tqdm import tqdm

samples = {point: [] for point in grid}
with Others() as others:
    for _ in tqdm(range(6), "rounds", file=sys.stdout, ncols=79, leave=False):
        for w, n, k in grid:
            job = nets[w, k], trainers[w, k], x[:n], y[:n], places[:k]
            samples[w, n, k].append(seconds(lambda job=job: train_step(*job), repeats=2))
times = {point: np.median(values[1:]) for point, values in samples.items()}
print(f"other programs took {others.share:.0%} of the machine's time")

# %% [markdown]
# If others took more than a few per cent, the figures below show their work as well as yours: close
# them and run the cell again. A table of what was found, for LeNet as we know it:

# %% tags=["measured"]
print("batch  devices   ms/step  images/s  speed-up  efficiency")
for n in batch_sizes:
    for k in counts:
        t, t1 = times[128, n, k], times[128, n, 1]
        print(f"{n:5}  {k:7}  {1e3 * t:8.1f}  {n / t:8,.0f}  {t1 / t:8.2f}"
              f"  {efficiency(n / t, n / t1, k):9.0%}")
print("weak, 64 images a device:", *(
    f"{k}: {times[128, 64, 1] / times[128, 64 * k, k]:.0%}" for k in counts))

# %% [markdown]
# Both kinds of scaling, with what $\min(k, \text{cores})$ allows as a dashed line:

# %% tags=["measured"]
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

best = max(times[128, 256, 1] / times[128, 256, k] for k in counts)
fig, ax = figure(f"At batch 256 the best speed-up is {best:.2f}; {max(at_once.values())} devices "
                 "compute at once", "devices", "images/s over those of one device")
ax.plot(counts, [at_once[k] for k in counts], "--", color="black", label="devices at once")
for n, look, color in zip(batch_sizes, ("o-", "s-.", "^:"), (BLUE, ORANGE, GREEN)):
    ax.plot(counts, [times[128, n, 1] / times[128, n, k] for k in counts], look, color=color,
            label=f"strong, batch {n}")
ax.plot(counts, [k * times[128, 64, 1] / times[128, 64 * k, k] for k in counts], "D-",
        color=GREY, label="weak, 64 images a device")
ax.set(xticks=counts, ylim=(0, None))
ax.legend(fontsize=8)
show(fig, alt="Throughput on 1, 2 and 4 devices as a multiple of one device's, for three batch "
     "sizes and for 64 images a device, below a dashed line for the devices at once.")

# %% [markdown]
# Where the dashed line is flat, more devices are only more work to organise: smaller shards, more
# messages, more operations for Python to start. So on two cores four simulated devices can't beat
# two, and may well be slower. On a machine with four cores the line rises to four.
#
# Three reasons keep a curve below the line: work that isn't divided, talk between devices, and
# cores that slow each other down. To tell them apart we need laws.
#
# ## Fitting, with the answer known
#
# Least squares finds the constants for which the sum of squared residuals is smallest. As in
# chapter 01 we take *relative* residuals, or the longest times would be all that counts, and we
# allow no constant below zero, since no part of a step takes negative time. `nnls` is SciPy's
# least squares of that kind.

# %%
from scipy.optimize import nnls

# %% [markdown]
# `columns` has a row for each measurement and a column for each constant. Columns are brought to
# equal length first, because a start takes microseconds and a byte a fraction of a nanosecond.

# %%
def fit_law(columns, times):  # constants >= 0, and residuals as shares of the times
    rows = columns / times[:, None]
    scale = np.linalg.norm(rows, axis=0)
    scaled, _ = nnls(rows / scale, np.ones(len(times)))
    return scaled / scale, columns @ (scaled / scale) / times - 1


# %% [markdown]
# ### Amdahl's law
#
# Gene Amdahl (1967) divides a program into a part $s$ that stays as it is and a part $1 - s$ that
# is shared by $p$ workers: $T = T_1 \left(s + \frac{1-s}{p}\right)$. It is linear in two constants,
# $T = a + b/p$, with $s = a/(a+b)$. However many workers there are, the speed-up stays below $1/s$.
#
# %%
def amdahl(workers, times):
    p = np.array(workers, dtype=float)
    (a, b), residuals = fit_law(np.stack([np.ones_like(p), 1 / p], axis=1), np.array(times))
    return a / (a + b), residuals


# %% [markdown]
# First times that we make ourselves, with $s = 0.1$. **Predict** the limit of the speed-up.

# %%
s, residuals = amdahl([1, 2, 4, 8], [0.1 + 0.9 / p for p in (1, 2, 4, 8)])
assert abs(s - 0.1) < 1e-9 and np.abs(residuals).max() < 1e-9, "exact data, exact constants"
print(f"serial part {s:.3f}, so the speed-up stays below {1 / s:.1f}")

# %% [markdown]
# Two things that a fit can do to you. **Predict:** how large are the residuals for two points only,
# whatever they are? Here they are *The Straight Dope*'s two times.

# %%
s, residuals = amdahl([1, 2], [4.7, 2.8])
print(f"two points: s = {s:.2f}, largest residual {np.abs(residuals).max():.0%}")

# %% [markdown]
# Two points fit without any residual, so a perfect fit means nothing: points minus constants, the
# *degrees of freedom*, is zero.
#
# And **predict:** a machine of two cores with *no* serial part at all is measured on 1, 2 and 4
# devices. What does Amdahl's law find, if you put $k$ for $p$?

# %%
s, residuals = amdahl([1, 2, 4], [1, 0.5, 0.5])
print(f"two cores, p = k: s = {s:.2f}, largest residual {np.abs(residuals).max():.0%}")
s, residuals = amdahl([1, 2, 2], [1, 0.5, 0.5])
print(f"two cores, p = 2: s = {s:.2f}, largest residual {np.abs(residuals).max():.0%}")

# %% [markdown]
# A serial part of a third, in a program that has none: the missing cores were put down to it. With
# three points one degree of freedom is left, and it is enough to see that something is wrong with
# the first line. So $p$ has to be the number of devices that compute at once.
#
# Your machine, for each batch. **Predict:** does the serial part grow or shrink with the batch?

# %% tags=["measured"]
serial = {}
for n in batch_sizes:
    row = [times[128, n, k] for k in counts]
    for name, workers in (("p = k", counts), ("at once", [at_once[k] for k in counts])):
        serial[n, name], residuals = amdahl(workers, row)
        print(f"batch {n:3}, {name:7}: s = {serial[n, name]:.2f}, residuals",
              *(f"{r:+.0%}" for r in residuals), f"(degrees of freedom: {len(row) - 2})")
falls = serial[256, "at once"] < serial[64, "at once"]
print("in this run it is", "smaller" if falls else "not smaller", "for 256 than for 64")

# %% [markdown]
# Amdahl's "part" is no constant of the program. Python's work and the messages take as long for 64
# images as for 256, so as a *share* they should be smaller for the larger batch. That is the way
# out that John Gustafson (1988) pointed to: grow the work with the machine, and the serial part
# matters less. It is weak scaling. Whether your run shows it is in the last line; with one degree
# of freedom, noise can easily hide it.
#
# ### Compute + α + β · bytes
#
# A law with reasons in it. A step of network $w$ with $n$ images on $k$ devices takes
#
# $$T = \varphi_w + \gamma_w \frac{n}{p} + \alpha \cdot 2(k-1)A + \beta \cdot 2(k-1)S_w$$
#
# - $\varphi_w$: what a step costs whatever the batch, such as the update of the weights;
# - $\gamma_w$: computing one image, shared by $p$ devices at once;
# - $\alpha$: starting one message. Each of the $A$ arrays of gradients makes $2(k-1)$ (chapter 03);
# - $\beta$: sending one byte. All $2(k-1)$ copies of the $S_w$ bytes cross the same memory here.

# %%
def terms(w, n, k, p, arrays=8):
    """One row of the law: what each of the constants is multiplied by."""
    own = [value if w == width else 0 for width in widths for value in (1, n / p)]
    return [*own, 2 * (k - 1) * arrays, 2 * (k - 1) * sizes[w]]


print(terms(128, n=64, k=2, p=2))

# %% [markdown]
# **Predict:** with a single network, measured at all batch sizes and device counts, can the fit
# tell α from β? The rank of the columns is the number of constants that can be told apart.

# %%
def table(points):
    return np.array([terms(w, n, k, min(k, 2)) for w, n, k in points], dtype=float)


def rank(columns):
    columns = columns[:, columns.any(axis=0)]
    return np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0)), columns.shape[1]


# %% [markdown]
# A planned measurement, then, on a machine of two cores: nine points of the narrow network, and as
# many of the wide one.

# %%
every = [(w, n, k) for w in widths for n in (64, 128, 256) for k in (1, 2, 4)]
print("one network:  rank {} of {}".format(*rank(table(every[:9]))))
print("two networks: rank {} of {}".format(*rank(table(every))))

# %% [markdown]
# It can't. In one network messages and bytes are always in the same proportion, so any share of
# the time could be blamed on either. With the second network, 16 times as wide, it can. A fit
# would have given *some* answer in both cases, so look at the rank first.
#
# Then the answer must come out where it is known:

# %%
known = np.array([2e-3, 6e-4, 8e-3, 9e-4, 50e-6, 0.2e-9])  # φ, γ of each network, then α, β
found, residuals = fit_law(table(every), table(every) @ known)
assert np.allclose(found, known, rtol=1e-6), "on exact data the fit must find its constants"
assert np.abs(residuals).max() < 1e-9, "and leave nothing over"

# %% [markdown]
# How exact are the constants if the times are not? The same made-up times, each wrong by about 5%,
# two hundred times over. **Predict:** which constants survive, γ or β?

# %%
rng = np.random.default_rng(10)
truth = table(every) @ known
noisy = [fit_law(table(every), truth * (1 + 0.05 * rng.standard_normal(len(truth))))[0]
         for _ in range(200)]
spread = np.std(noisy, axis=0) / known

# %% [markdown]
# How far the constants scatter, as a share of the true ones:

# %%
for name, share in zip(("φ 128", "γ 128", "φ 2048", "γ 2048", "α", "β"), spread):
    print(f"{name:7} ±{share:.0%}")
assert spread[1] < 0.1 and spread[3] < 0.1 < spread[4], "computing dominates, so it is known best"

# %% [markdown]
# What makes up most of the times is known well. The rest is not, however good the fit looks. Keep
# that in mind for your own constants. The same law, and your times:

# %%
columns = np.array([terms(w, n, k, at_once[k]) for w, n, k in grid], dtype=float)
measured = np.array([times[point] for point in grid])
law, misfit = fit_law(columns, measured)

# %% [markdown]
# A zero among the constants does not say that messages are free. It says that this measurement
# could not tell their price from none.

# %% tags=["measured"]
for name, value, unit, factor in zip(
        ("φ 128", "γ 128", "φ 2048", "γ 2048", "α", "β"), law,
        ("ms a step", "µs an image") * 2 + ("µs a message", "ns a byte"),
        (1e3, 1e6, 1e3, 1e6, 1e6, 1e9)):
    print(f"{name:7} {factor * value:8.3g} {unit}", "(not seen)" if value == 0 else "")
print(f"{len(grid)} points, {len(law)} constants, {len(grid) - len(law)} degrees of freedom")

# %% [markdown]
# Residuals show where a law is wrong: if they have a pattern, something is left out; if they are
# scattered, what is left is noise.

# %% tags=["measured"]
fig, ax = figure(f"Largest residual {np.abs(misfit).max():.0%}, median "
                 f"{np.median(np.abs(misfit)):.0%}, of {len(grid)} step times",
                 "batch and width of the hidden layer", "(law − measured) / measured, %")
labels = [f"{n}\n{w}" for w in widths for n in batch_sizes]
for k, marker, color in zip(counts, "osD", (BLUE, ORANGE, GREEN)):
    values = [100 * r for r, point in zip(misfit, grid) if point[2] == k]
    ax.plot(np.arange(len(labels)) + 0.12 * np.log2(2 * k) - 0.24, values, marker, color=color,
            label=f"k = {k}")
ax.axhline(0, color=GREY, lw=1)
ax.set_xticks(range(len(labels)), labels)
fig.legend(ncols=3, fontsize=8, loc="outside lower center")
show(fig, alt="Relative residuals of the fitted law for each batch size, width and number of "
     "devices, around a line at zero.")

# %% [markdown]
# If all points of one $k$ are on the same side, the law is wrong about the devices, not about the
# batch. If the smallest batches lie apart, it is wrong about what a step costs whatever the batch.
#
# ## All-reduce by itself
#
# There is a more direct way to α and β: measure all-reduce alone, as chapter 03 did, for arrays of
# several sizes on two devices. Then predict from the two constants what the network's own
# all-reduce takes.

# %%
def store_allreduce(entries, contexts):
    arrays, store = [nd.zeros(entries, ctx=d) for d in contexts], mx.kvstore.create("device")
    store.init(0, arrays[0])
    return lambda: (store.push(0, arrays), store.pull(0, out=arrays))


entries = 4 ** np.arange(5, 12)  # 4 KB to 16 MB
actions = [store_allreduce(int(n), places[:2]) for n in entries]

# %% [markdown]
# A line, start + bytes / bandwidth, by the same least squares:

# %% tags=["measured"]
trials = [[seconds(action, 3) for action in actions] for _ in range(8)]
alone = np.median(trials[1:], axis=0)
(alpha, beta), off = fit_law(np.stack([np.ones(len(entries)), 4 * entries], axis=1), alone)
print(f"α {1e6 * alpha:.0f} µs for each array, 1/β {1e-9 / max(beta, 1e-15):.1f} GB/s,",
      f"largest residual {np.abs(off).max():.0%}, {len(entries) - 2} degrees of freedom")
print(f"the law of the whole step had {2e6 * law[4]:.0f} µs for the two messages of an array")

# %% [markdown]
# If the last two differ, which is right? Both, of different things. In a whole step a further
# device costs more than messages: Python starts all of its operations too, and the core that it
# should have may not be free. The law has no other constant to put that in. A constant is not what
# it is called; it is whatever grew along with its column.
#
# **Predict:** LeNet's eight arrays, about half a megabyte. Are they start, or bytes?
#
# `trainer.allreduce_grads()` is the all-reduce of a training step and nothing else (chapter 07).
# The prediction adds up $\alpha + \beta \cdot \text{bytes}$ over the arrays, as if each waited for
# the one before.

# %%
def predicted_allreduce(net, alpha, beta):
    return len(gradients(net)) * alpha + beta * gradient_bytes(net)


example = start(lenet(), [mx.cpu()])
assert np.isclose(predicted_allreduce(example, 1e-4, 1e-9), 8e-4 + 516_272e-9)

# %% [markdown]
# Prediction and measurement, for the narrow and the wide network on two devices:

# %% tags=["measured"]
for w in widths:
    net = nets[w, 2]
    reducer = trainer_of(net, update_on_kvstore=False)
    train_step(net, reducer, x, y, places[:2])
    found = np.median([seconds(reducer.allreduce_grads, 3) for _ in range(7)][1:])
    guess = predicted_allreduce(net, alpha, beta)
    verdict = "within a factor of 2" if 0.5 < guess / found < 2 else (
        "too high: arrays overlap" if guess > found else "too low")
    print(f"width {w:4}: predicted {1e3 * guess:5.2f} ms ({len(gradients(net)) * alpha / guess:.0%}"
          f" of it starts), measured {1e3 * found:5.2f} ms, {verdict};",
          f"{found / times[w, 128, 2]:.0%} of a step with batch 128")

# %% [markdown]
# The sum leaves out two things that pull in opposite directions. Nothing makes the second array
# wait for the first, and the queues can work on several at once (chapter 10): that makes it too
# high. And Trainer's own loop over the parameters is Python, which our measurement of a bare store
# did not have: that makes it too low. Compare the predicted shares: the narrow network's all-reduce
# is more start and less bytes than the wide one's.
#
# ## Two networks
#
# *Dive into Deep Learning* and its early edition train ResNet-18 on two GPUs and say why that pays:
# ResNet's computation takes long, and sending gradients is short beside it, shorter than it was for
# LeNet. That can be counted. ResNet-18 has more arithmetic, but more gradients too.
#
# **Predict:** by what factor does ResNet-18 have more operations for each byte of gradients? 2? 20?
# 200?
#
# The network is that of chapter 08, written for `mx.nd` arrays.

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


# %% [markdown]
# Around it, one convolution before and one dense layer after:

# %%
def resnet18(classes=10, channels=(64, 128, 256, 512)):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, padding=1), nn.BatchNorm(),
            nn.Activation("relu"))
    for width, stride in zip(channels, (1, 2, 2, 2)):
        net.add(Residual(width, stride, project=stride > 1), Residual(width))
    net.add(nn.GlobalAvgPool2D(), nn.Dense(classes))
    return net


# %% [markdown]
# Is it the same network? At least it has as many parameters as chapter 08 counted, and found equal
# to d2l's:

# %%
both = {"LeNet": example, "ResNet-18": start(resnet18(), [mx.cpu()])}
assert gradient_bytes(both["ResNet-18"]) == 4 * 11_175_818, "chapter 08 counted 11,175,818"
for name, net in both.items():
    print(f"{name:9} {gradient_bytes(net) // 4:>10,} parameters in {len(gradients(net))} arrays")

# %% [markdown]
# ### Counting operations
#
# Every number that leaves a convolution or a dense layer is a sum of products: one for each weight
# of its channel or unit. With a multiplication and an addition counted as two operations, an image
# costs a layer $2 \cdot \text{numbers out} \cdot \text{weights of one channel}$. Biases, norms,
# pooling and relu are left out: one or a few operations for each number out, against tens to
# thousands.
#
# A *forward hook* is a function that Gluon calls after a layer has computed. It sees the real
# layer and the real output, so nothing rests on what we believe the shapes to be.

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
# LeNet by hand: the first layer gives 20 channels of 26×26, each number a sum over 3×3 weights; the
# second 50 of 9×9, each over 20×5×5; then 128 numbers over 800 and 10 over 128.

# %%
by_hand = [2 * 20 * 26**2 * 3**2, 2 * 50 * 9**2 * 20 * 5**2, 2 * 128 * 800, 2 * 10 * 128]
counted = list(operations(both["LeNet"], (1, 28, 28)).values())
assert counted == by_hand, f"{counted} counted, {by_hand} by hand"
print(f"LeNet, an image forward: {sum(counted):,} operations,",
      f"{counted[1] / sum(counted):.0%} of them in the second convolution")

# %% [markdown]
# ResNet-18 on paper. A 3×3 convolution from $a$ to $c$ channels that gives $h \times h$ pixels
# costs $2 \cdot 9ac \cdot h^2$. In stage 1 there are four from 64 to 64 at 28×28. Each further
# stage halves $h$ (28, 14, 7, 4) and doubles $c$: one convolution that changes the width, three
# that keep it, and a 1×1 shortcut. 7 is odd, so the last stage has 4×4 and not 3½.

# %%
def stage(a, c, h):
    shortcut = 2 * a * c * h**2 if a != c else 0
    return 2 * 9 * a * c * h**2 + 3 * 2 * 9 * c * c * h**2 + shortcut


# %% [markdown]
# The whole network, and what the hooks say:

# %%
paper = [2 * 9 * 1 * 64 * 28**2]
paper += [stage(a, c, h) for a, c, h in ((64, 64, 28), (64, 128, 14), (128, 256, 7), (256, 512, 4))]
paper += [2 * 512 * 10]
counted = operations(both["ResNet-18"], (1, 28, 28))
assert sum(counted.values()) == sum(paper), f"{counted}, on paper {paper}"
print("stem, four stages, dense, in millions:", *(f"{count / 1e6:.1f}" for count in paper))

# %% [markdown]
# Two ways, one number. The third way is in the first exercise. The stages' costs differ by a third
# at most, while most of the bytes are in the last.
#
# **Training** is counted as three forward passes. Going backward, each layer computes two products
# of the same size as its forward one: the gradient of its weights, from its inputs and the
# gradient of its outputs; and the gradient of its inputs, for the layer before. The first layer
# has no layer before it and skips the second, so three is a little too much. By how much?

# %%
forward = {name: operations(net, (1, 28, 28)) for name, net in both.items()}
work = {name: 3 * sum(layers.values()) for name, layers in forward.items()}

# %% [markdown]
# (Too much by $f$ in $3F - f$, where $f$ is the first layer's share of $F$.)

# %%
for name, layers in forward.items():
    first = next(iter(layers.values()))
    print(f"{name:9} {work[name] / 1e6:8,.1f} million operations an image,",
          f"too many by {first / (work[name] - first):.2%}")

# %% [markdown]
# Now the ratios. Remember your prediction.

# %%
traffic = {name: gradient_bytes(net) for name, net in both.items()}
arrays = {name: len(gradients(net)) for name, net in both.items()}
for name in both:
    print(f"{name:9} {work[name] / traffic[name]:5.1f} operations an image and gradient byte,",
          f"{work[name] / arrays[name] / 1e6:5.1f} million an image and array")

# %% [markdown]
# And where that comes from:

# %%
times_as = {what: of["ResNet-18"] / of["LeNet"] for what, of in
            (("operations", work), ("bytes", traffic), ("arrays", arrays))}
print("ResNet-18 has", ", ".join(f"{n:.1f} times the {what}" for what, n in times_as.items()))
print("so {:.1f} times the operations for each byte, {:.1f} times for each array".format(
    *(times_as["operations"] / times_as[what] for what in ("bytes", "arrays"))))

# %% [markdown]
# For each *byte* there is little between the two: a factor of 2.3. LeNet's bytes alone would not
# make it scale much worse. For each *array* there is a factor of 21. A message has a start as well
# as bytes, and beside LeNet's short step it is the starts that are long. So the claim should hold,
# but mostly for another reason than the amount of data.
#
# ### What decides
#
# Whether talk matters depends on the machine as much as on the network. While a byte is sent, a
# device could have done *rate × β* operations; while a message starts, *rate × α*. Two machines:
# yours, and a GPU with published figures, NVIDIA's Tesla V100 (SXM2): 15.7 TFLOP/s in float32 at
# its peak. PCI Express 3.0 moves 8 gigabits a second on each of 16 lanes, 128 bits of every 130
# being data. Two more numbers we have to **assume**: 30% of the peak is reached, and a message
# starts in 10 µs.

# %%
rate_gpu, start_gpu = 0.3 * 15.7e12, 10e-6
pcie, nvlink = 16 * 8e9 * 128 / 130 / 8, 6 * 25e9  # bytes/s each way
print(f"PCIe 3.0 x16 {pcie / 1e9:.2f} GB/s, NVLink 2.0 {nvlink / 1e9:.0f} GB/s each way")

# %% [markdown]
# NVLink 2.0: the V100 has six links of 25 GB/s each way, 300 GB/s in all (NVIDIA, *Tesla V100 GPU
# Architecture*, 2017). **Predict:** while a message starts, how many images of LeNet could a V100
# have trained on?

# %%
links = {"PCIe 3.0": pcie, "NVLink 2.0": nvlink}
print(f"V100 and PCIe: a byte is worth {rate_gpu / pcie:,.0f} operations, "
      f"a start {rate_gpu * start_gpu / 1e6:.0f} million,")
print(f"as many as training {rate_gpu * start_gpu / work['LeNet']:.1f} images of LeNet takes")

# %% [markdown]
# Beside that your machine. Its rate is LeNet's operations over the time of an image, at batch 256
# on one device.

# %% tags=["measured"]
rate_here = work["LeNet"] / (times[128, 256, 1] / 256)
print(f"one device here: {rate_here / 1e9:.0f} GFLOP/s in training LeNet")
print(f"a byte is worth {rate_here * beta:.1f} operations, a start {rate_here * alpha / 1e6:.2f}"
      f" million, as many as {rate_here * alpha / work['LeNet']:.2f} images of LeNet")
print(f"the V100 computes {rate_gpu / rate_here:,.0f} times as fast,",
      f"sends {pcie * beta:,.1f} and starts {alpha / start_gpu:,.1f} times as fast")

# %% [markdown]
# On simulated devices, that last line is why a CPU differs from a GPU. From a core to a GPU,
# computing gets faster by far more than sending and starting do. So where a core spends its time
# computing, a GPU may spend it on talk, with the same network and the same batch. LeNet's weakness
# on two GPUs is then easily missed on two cores. If two devices disappoint you here although
# all-reduce is a few per cent of the step, look at Python, which starts every operation and
# competes for the same cores (chapter 10), and at what else the machine is doing.
#
# ### Predict, then measure
#
# A batch of 32 for both, on one device, and then on two: $T_2 = T_1 / p$ plus the all-reduce of
# α and β. ResNet-18 is hybridised (chapter 08). **Predict** the two speed-ups. It takes about 15
# seconds: a step of ResNet-18 is more than a second on a slow core.

# %%
def job(make, k, n=32):
    net = start(make(), places[:k])
    net.hybridize(static_alloc=True, static_shape=True)
    return net, trainer_of(net), x[:n], y[:n], places[:k]


# %% [markdown]
# One step of ResNet-18 at a time, fifteen of LeNet; one device and two in turn, five times, of
# which the first is not kept.

# %% tags=["measured"]
gains = {}
for name, make, repeats in (("LeNet", lenet, 15), ("ResNet-18", resnet18, 1)):
    jobs = [job(make, k) for k in (1, 2)]
    trials = [[seconds(lambda j=j: train_step(*j), repeats) for j in jobs]
              for _ in tqdm(range(5), name, file=sys.stdout, ncols=79, leave=False)]
    t1, t2 = np.median(trials[1:], axis=0)
    talk = predicted_allreduce(jobs[0][0], alpha, beta)
    guess, gains[name] = t1 / (t1 / at_once[2] + talk), t1 / t2
    print(f"{name:9} batch 32: {1e3 * t1:5.0f} and {1e3 * t2:5.0f} ms, {32 / t1:5,.0f} and"
          f" {32 / t2:5,.0f} images/s; speed-up predicted {guess:.2f}, measured {gains[name]:.2f}")
low, high = sorted(gains.values())
print("neither gains: are two cores free?" if high < 1.05 else "both gain about the same"
      if high < 1.05 * low else f"{max(gains, key=gains.get)} gains more")
print(f"LeNet at batch 256: {times[128, 256, 1] / times[128, 256, 2]:.2f}")

# %% [markdown]
# The prediction knows of computing and of all-reduce. It doesn't know of Python's own time, which
# is in neither and weighs on LeNet's short steps, nor of cores that share a memory, which slow
# each other down. Where it is too high, those are the first two to suspect. Larger batches help
# LeNet as they do everywhere: more computing for the same talk. So "ResNet gains more" is a
# statement about a batch size too; those pages train at one only, 256 for each GPU.
#
# ## 4, 8 and 16 GPUs: a prediction
#
# Here is one you can hold against a machine some day. *Dive into Deep Learning* suggests trying up
# to 16 GPUs. The model: computing is shared; then a ring (chapter 03) all-reduces each array in
# $2(k-1)$ messages of a $k$-th of its bytes.
#
# **Assumptions.** Every GPU has its link to itself. 30% of the peak is reached, whatever the size
# of the shard. Messages start in 10 µs, one after the other. Nothing overlaps. Loading data and
# Python cost nothing. NVIDIA's DGX-1 joins eight V100s by NVLink; sixteen take the switch of its
# DGX-2, which we take to be as fast.

# %%
def ring_seconds(k, arrays, size, start, bandwidth):
    """Time of all-reducing `arrays` arrays of `size` bytes in all, one after another, by rings."""
    return 2 * (k - 1) * (arrays * start + size / k / bandwidth)


# %% [markdown]
# With it, strong scaling: the same batch on $k$ GPUs, as a multiple of one GPU's speed.

# %%
def predicted_speedup(name, k, images, bandwidth, start=start_gpu, rate=rate_gpu):
    alone = images * work[name] / rate
    return alone / (alone / k + ring_seconds(k, arrays[name], traffic[name], start, bandwidth))


# %% [markdown]
# Before it is believed: one GPU gives 1, and if talk is free $k$ give $k$. With starts free and a
# step that is all talk, a ring takes $2\frac{k-1}{k}$ of the time of one copy.

# %%
assert predicted_speedup("LeNet", 1, 256, pcie) == 1, "one device doesn't talk"
assert np.isclose(predicted_speedup("LeNet", 16, 256, 1e30, start=0), 16), "free talk"
assert np.isclose(ring_seconds(8, 1, 1e9, 0, 1e9), 2 * 7 / 8), "chapter 03's byte count"

# %% [markdown]
# **Predict:** with a batch of 256 in all, which of the four is best on 16 GPUs, which is worst, and
# is the worst above 1?

# %%
print("predicted speed-up, batch 256        k = 2    k = 4    k = 8   k = 16")
for name in both:
    for link, bandwidth in links.items():
        row = [predicted_speedup(name, k, 256, bandwidth) for k in (2, 4, 8, 16)]
        print(f"{name + ', ' + link:32}", *(f"{value:8.2f}" for value in row))

# %% [markdown]
# Each network has a best number of GPUs:

# %%
ks = np.arange(1, 17)
best = {name: max(ks, key=lambda k, name=name: predicted_speedup(name, k, 256, pcie))
        for name in both}
print("fastest over PCIe:", ", ".join(f"{name} on {k}" for name, k in best.items()))

# %% [markdown]
# Dashed, because nobody has measured it:

# %%
fig, ax = figure("Predicted over PCIe: LeNet peaks at {} GPUs, ResNet-18 at {}".format(
    *best.values()), "GPUs (V100), batch 256 in all", "speed-up over one GPU", size=(7, 3.8))
ax.plot(ks, ks, ":", color="black", label="ideal")
for name, color in (("LeNet", ORANGE), ("ResNet-18", BLUE)):
    for link, marker in zip(links, "os"):
        row = [predicted_speedup(name, k, 256, links[link]) for k in ks]
        ax.plot(ks, row, "--", marker=marker, markevery=[1, 3, 7, 15], color=color,
                label=f"{name}, {link}, predicted")
ax.loglog(base=2)
ax.set(xticks=[1, 2, 4, 8, 16], xticklabels=[1, 2, 4, 8, 16],
       yticks=[0.25, 0.5, 1, 2, 4, 8, 16], yticklabels=["¼", "½", 1, 2, 4, 8, 16])
ax.legend(fontsize=8)
show(fig, alt="Dashed lines of predicted speed-up on 1 to 16 GPUs, for two links: LeNet's fall "
     "from 2 GPUs on, ResNet-18's rise up to about 10.")

# %% [markdown]
# LeNet gains a little from two GPUs, next to nothing from four, and on eight it is slower than on
# one, with either link: not its bytes matter but its starts. A link nearly ten times as fast hardly
# helps. ResNet-18 gains more from every number of GPUs, and yet it too has a best number: each
# further GPU adds starts and leaves less computing to share. 76 arrays, one after the other, are
# not a good way to do it, which is why real systems join them (third exercise).
#
# How far does it rest on what was assumed? Change one assumption at a time, for ResNet-18 on 8 GPUs
# over PCIe. **Predict** which one counts most.

# %%
base = {"images": 256, "bandwidth": pcie, "start": start_gpu, "rate": rate_gpu}
print(f"as assumed: {predicted_speedup('ResNet-18', 8, **base):.2f}")
for name in base:
    row = [predicted_speedup("ResNet-18", 8, **base | {name: base[name] * f}) for f in (0.5, 2)]
    print("{:9} halved {:.2f}, doubled {:.2f}".format(name, *row))

# %% [markdown]
# More images do what a slower GPU does: both make computing longer beside the talk. The guess of
# 30% counts as much as the batch size, and the guess of 10 µs more than the link's bandwidth, the
# only one of the four that stands in a specification. So read "3 to 6", not the second decimal.
#
# And weak scaling, as d2l has it: 256 images *for each* GPU.

# %%
for name in both:
    row = [predicted_speedup(name, k, 256 * k, pcie) / k for k in (2, 4, 8, 16)]
    print(f"{name:9} predicted efficiency over PCIe, k = 2, 4, 8, 16:",
          *(f"{value:.0%}" for value in row))

# %% [markdown]
# With the batch grown, even LeNet gets something out of it, though far less than ResNet-18: d2l's
# claim, for GPUs, under our assumptions. But a batch of 4,096 on 16 GPUs trains differently from
# one of 256. That price is not on the clock.
#
# ## Batch size against learning rate
#
# *Dive into Deep Learning* asks what batch size and learning rate go with the number of GPUs. The
# devices have no say in it: on any number of them the same batch gives the same step (chapters 04
# and 06). So we can map batch against rate on *one* device. The rule of thumb is to raise the rate
# with the batch, twice the rate for twice the batch (Goyal et al., 2017): it keeps the way that is
# gone for each image the same, as long as the gradient hardly changes meanwhile.
#
# **Predict:** on a map with batch and rate both doubling from cell to cell, what shape has the area
# of good results?
#
# Many trainings want a small network: the LeNet of MXNet's tutorial (chapter 06).

# %%
def small_lenet():
    net = nn.HybridSequential()
    net.add(nn.Conv2D(6, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(16, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(120, activation="relu"), nn.Dense(84, activation="relu"), nn.Dense(10))
    return net


# %% [markdown]
# How much smaller it is, we can count now:

# %%
small = 3 * sum(operations(start(small_lenet(), [mx.cpu()]), (1, 28, 28)).values())
print(f"{work['LeNet'] / small:.1f} times fewer operations than LeNet")

# %% [markdown]
# One training, from the same weights each time. If its loss is not a number, it has no accuracy.

# %% tags=["trains"]
def trained_accuracy(batch, rate, images, test, epochs=1):
    mx.random.seed(10)
    net = start(small_lenet(), places[:1])
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": rate})
    try:
        fit(net, trainer, Batches(*images, batch), places[:1], epochs, progress=False)
    except FloatingPointError:
        return np.nan
    return accuracy(net, test, places[:1])


# %% [markdown]
# Every training sees 3,840 images: fifteen steps of 256, or 240 of 16. Thirty trainings, then.

# %%
batches, lrs = [16, 32, 64, 128, 256], [0.025, 0.05, 0.1, 0.2, 0.4, 0.8]
size = min(3840, len(data.train_labels) // 256 * 256)
images = data.train_images[:size], data.train_labels[:size]
test = Batches(data.test_images[:1000], data.test_labels[:1000], 250, shuffle=False)
pairs = [(batch, lr) for lr in lrs for batch in batches]

# %% [markdown]
# This takes **about 20 seconds**.

# %% tags=["measured"]
bar = tqdm(pairs, "trainings", file=sys.stdout, ncols=79, leave=False)
cells = [trained_accuracy(*pair, images, test, epochs=3840 // size) for pair in bar]
heat = np.array(cells).reshape(len(lrs), len(batches))
print(f"{len(cells)} trainings of {3840 // size * size:,} images ({data.name}),",
      f"{np.sum(~(heat > 0.2))} of them learned next to nothing")

# %% [markdown]
# The map. Cells with the same rate for each image of the batch lie on diagonals.

# %% tags=["measured"]
row, column = np.unravel_index(np.nanargmax(heat), heat.shape)
fig, ax = figure(f"Best after {size * (3840 // size):,} images: batch {batches[column]} at rate "
                 f"{lrs[row]:g} ({data.name})", "batch size", "learning rate", size=(7, 3.8))
picture = ax.imshow(heat, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=1)
for (i, j), value in np.ndenumerate(heat):
    ax.text(j, i, "no number" if np.isnan(value) else f"{value:.0%}", ha="center", va="center",
            fontsize=9, color="black" if not value < 0.6 else "white")
ax.set_xticks(range(len(batches)), batches)
ax.set_yticks(range(len(lrs)), lrs)
fig.colorbar(picture, label="test accuracy")
show(fig, alt="Heat map of test accuracy for five batch sizes and six learning rates.")

# %% [markdown]
# Is the rule borne out? Take each cell and its neighbours: with the batch doubled and the rate
# kept, and with both doubled. Which changes the accuracy less? We take medians, since a few cells
# lie beside a cliff.

# %% tags=["measured"]
kept, scaled = heat[:-1, 1:] - heat[:-1, :-1], heat[1:, 1:] - heat[:-1, :-1]
change = {name: 100 * np.nanmedian(np.abs(difference)) for name, difference in
          (("batch doubled, rate kept", kept), ("both doubled", scaled))}
for name, value in change.items():
    print(f"{name}: the accuracy changes by {value:.1f} points (median)")
print("changes less:", min(change, key=change.get), f"({data.name})")

# %% [markdown]
# Where the rule holds, accuracy stays about the same along a diagonal. Two things end it. A rate
# can be too high for *any* batch: a step follows the slope of the place where it begins, however
# exactly a large batch measures that slope. And a step twice as long is only as good as two short
# ones while the slope stays what it was, which early in training it doesn't. More epochs give a
# large batch the steps that it lacks, and take back the time that it saved. This is one seed and
# one small network: a map, not a law.
#
# It is also the other half of the answer to "how far does it scale". More devices are fast only
# with larger batches, and larger batches learn as well only up to a point.

# %% [markdown]
# ## Summary
#
# - Strong scaling keeps the batch, weak scaling the batch *of each device*. Published figures often
#   grow batch, rate and devices together.
# - $k$ simulated devices on $c$ cores are $\min(k, c)$ at once. Leave that out of a law and it
#   finds a serial part that isn't there.
# - Try a fit on times that you made yourself; look at the rank of its columns, its degrees of
#   freedom and its residuals, in that order.
# - ResNet-18 has 202.5 times LeNet's operations and 86.6 times its bytes: 2.3 times the operations
#   for each byte, but 21 times for each array. Starts, more than bytes, hold LeNet back.
# - From a core to a GPU, computing gets faster by far more than talk does. So the same network
#   scales differently on the two.
# - A prediction is as good as its worst assumption: state them all, and vary each.
# - The learning rate goes with the batch, and only so far.
#
# Next, chapter 12: devices that are not equal, and how to share work among them.
#
# **Further reading.** G. Amdahl, *Validity of the single processor approach* (1967); J. Gustafson,
# *Reevaluating Amdahl's law* (1988); *Dive into Deep Learning*, Concise Implementation for Multiple
# GPUs, and its early edition, Gluon Implementation for Multi-GPU Computation; *The Straight Dope*,
# "Training on multiple GPUs with gluon"; NVIDIA, *Tesla V100 GPU Architecture* (2017); PCI-SIG,
# *PCI Express Base Specification*, revision 3.0 (2010); P. Goyal et al., *Accurate, large
# minibatch SGD* (2017), arXiv:1706.02677.

# %% [markdown]
# ## Exercises
#
# 1. **A third count.** Called with a symbol, `net(mx.sym.var("data"))` gives its graph, from which
#    `get_internals().infer_shape` tells all shapes with nothing computed. Count ResNet-18's
#    operations from that.
# 2. **Half the efficiency.** By Amdahl's law with a serial part of 5%, from which number of workers
#    on is the efficiency below one half? Find the formula for any $s$.
# 3. **One buffer.** All gradients of LeNet are joined to one array before the all-reduce (chapter
#    03's third exercise). What becomes of the predicted speed-up on 8 GPUs over PCIe at batch 256?
#    Is it the bytes' turn now?

# %% [markdown]
# ### Answer 1
#
# Outputs and weights have shapes in the graph. A node's second input is its weight.

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
assert total == sum(forward["ResNet-18"].values()), "graph and hooks should count the same"

# %% [markdown]
# ### Answer 2
#
# The efficiency is $\frac{1}{k s + 1 - s}$. It is one half where $ks + 1 - s = 2$,
# that is at $k = 1 + 1/s$: 21 for 5%. From 22 on it is below.

# %% tags=["solution"]
s = 0.05
share = {k: 1 / (k * (s + (1 - s) / k)) for k in range(1, 40)}
assert np.isclose(share[21], 0.5) and share[22] < 0.5 < share[20], "half at 1 + 1/s"

# %% [markdown]
# ### Answer 3
#
# An eighth of the starts. They still are most of the talk, 14 of 10 µs, but now
# eight GPUs are faster than one.

# %% tags=["solution"]
computing = 256 * work["LeNet"] / rate_gpu
talk = ring_seconds(8, 1, traffic["LeNet"], start_gpu, pcie)
before, after = predicted_speedup("LeNet", 8, 256, pcie), computing / (computing / 8 + talk)
assert before < 1 < after, "one buffer makes the difference between slower and faster"
print(f"speed-up {before:.2f}, then {after:.2f}; starts: {14 * start_gpu / talk:.0%} of the talk")
