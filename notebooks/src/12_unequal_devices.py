# %% [markdown]
# # 12 · Unequal devices
#
# Up to here all devices were alike. Then equal shards are right: everybody finishes at the same
# time. But a machine may have a new GPU beside an old one, or you may wonder whether the CPU should
# help the GPU. How would you divide the work? And is it worth the trouble? *Dive into Deep
# Learning* asks just that in an exercise, in its early edition and in today's. This chapter
# answers it: by measurement, and with an assertion for each step.
#
# ## What you'll do
#
# Make a device slower by a factor that you choose, measure what each device can do, cut batches in
# proportion, prove that the gradient doesn't notice, predict what it brings, measure it, and find
# out where it stops being worth it.
#
# ## What you'll learn
#
# - whole images in proportion to speeds: largest remainder, and never an empty shard;
# - why sums need no weights and means do, and on which data that mistake can't be seen;
# - what to expect: $k \cdot \min v$ from equal shards, $\sum v$ from proportional ones;
# - how to follow a speed that changes, and which clock tells you nothing;
# - what speaks against it: communication, BatchNorm, memory, other numerics.
#
# ## What you need
#
# Chapters 02, 05 and 06. No GPU. Reading takes {reading time}, running less than one on two
# cores that have nothing else to do.

# %%
from helpers import devices, load_data
from helpers.timing import Others

# %% [markdown]
# Those first, since MXNet reads its settings once.

# %%
import itertools
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

# %% [markdown]
# Two devices for speed, a GPU each if there are two, and images to compute with.

# %% tags=["measured"]
two = devices(2)
data = load_data("mnist", limit=640)
print(data)

# %% [markdown]
# Chapter 06's LeNet, from the same weights each time.

# %%
def start(places, dtype="float32"):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    net.cast(dtype)
    mx.random.seed(11)
    net.initialize(mx.init.Xavier(), ctx=places)
    net(nd.zeros((1, 1, 28, 28), ctx=places[0], dtype=dtype))
    return net


# %% [markdown]
# ## A device made slower
#
# Few machines have two unequal devices, and then nobody knows by how much. So we make one slow on
# purpose. A `time.sleep` in Python wouldn't do: it would hold up the queues of both devices. The
# slow device must be *busy*. What a device does with its shard is this:

# %%
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def work(net, x, y):
    with autograd.record():
        loss = softmax(net(x), y)  # a number for each image
    loss.backward()


# %% [markdown]
# A device with **handicap** $h$ does it $h$ times: first $(h-1) \cdot n$ images for nothing, then
# its $n$ images in earnest. All of it goes into the device's own queue, and the other device
# doesn't notice. With $h = 1.5$ every second image is computed twice. We repeat the backward pass
# too. Repeating the forward pass alone would be simpler, but how much slower that makes a device
# depends on the network. This way the factor is known beforehand, and it grows with the shard, as
# it does for a device that really is slow.

# %%
def slow_work(net, x, y, handicap=1):
    extra = round((handicap - 1) * len(x))
    while extra > 0:
        part = min(extra, len(x))
        work(net, x[:part], y[:part])
        extra -= part
    work(net, x, y)


# %% [markdown]
# A batch to try it on, and for all that follows:

# %%
x, y = nd.array(data.train_images[:256]), nd.array(data.train_labels[:256])

# %% [markdown]
# How many images does the device compute for a shard of ten? A hook, called after each forward pass
# of the network, counts them. **Predict** for handicaps of 1, 1.5 and 3.

# %%
net, counted = start([mx.cpu()]), []
hook = net.register_forward_hook(lambda block, inputs, output: counted.append(len(inputs[0])))
for handicap in (1, 1.5, 3):
    counted.clear()
    slow_work(net, x[:10], y[:10], handicap)
    print(f"handicap {handicap}: {sum(counted)} images, in passes of {counted}")
hook.detach()

# %% [markdown]
# And the gradient? `backward` *replaces* the gradient that was there (`grad_req="write"`, chapter
# 05), and a device works off its queue in order. So nothing should be left of the extra work.

# %%
work(net, x[:10], y[:10])
plain = net[0].weight.grad().asnumpy()
slow_work(net, x[:10], y[:10], handicap=3)
assert (net[0].weight.grad().asnumpy() == plain).all(), "the same bits, only later"
assert np.abs(plain).max() > 0, "a gradient of zero would prove nothing"

# %% [markdown]
# ## How fast is each device?
#
# In images per second, forward and backward, without any talk. As always: a first round that isn't
# kept, `waitall` before the clock is read, all candidates in turn.

# %%
def seconds(action, repeats):
    nd.waitall()
    begin = time.perf_counter()
    for _ in range(repeats):
        action()
    nd.waitall()
    return (time.perf_counter() - begin) / repeats


# %% [markdown]
# From here on the second device has a handicap of 3. We measure it without one too, or we could not
# tell what the handicap did from what the device is. A shard of 128 images for each:

# %%
handicaps, pair = [1, 3], start(two)
halves = [(x[:128].as_in_context(d), y[:128].as_in_context(d)) for d in two]

# %% [markdown]
# **Predict** three numbers: first device, second device as it is, second device with its handicap.

# %% tags=["measured"]
rounds = []
for _ in range(6):
    rounds.append([128 / seconds(lambda r=r, h=h: slow_work(pair, *halves[r], h), 2)
                   for r, h in ((0, 1), (1, 1), (1, 3))])
first, unhindered, second = np.median(rounds[1:], axis=0)
speeds = [first, second]
print(f"{two[0]}: {first:,.0f} images/s; {two[1]}: {second:,.0f}, or {unhindered:,.0f} without "
      "handicap")
print(f"the handicap makes it {unhindered / second:.2f} times as slow; 3 was asked for")

# %% [markdown]
# Expect a little more or less than 3: other programs take their share, and they don't take it
# evenly. Each device was measured *alone*, so these are speeds at best. When both work at once they
# share the machine's memory, and on two cores Python has to fit in as well. We'll see in a moment
# what that costs.
#
# In your own training, measure with your own network and at about the shard size that you are going
# to use. Gigahertz or published operations per second don't tell: what a device makes of *this*
# network counts.
#
# ## Cutting in proportion
#
# If device $i$ does $v_i$ images a second and gets $n_i$ of them, it takes $n_i / v_i$ seconds. A
# step takes as long as the *slowest* takes. Nobody waits if all of these are equal, so
# $n_i = n \, v_i / \sum_j v_j$.
#
# Images are whole, though. Rounding each number for itself won't do. **Predict:** ten images for
# four equal devices, each share rounded. How many images get lost?

# %%
print([round(10 * share) for share in (0.25, 0.25, 0.25, 0.25)])

# %% [markdown]
# The method of the **largest remainder** is older than computers; parliaments hand out seats by it
# (Hamilton, 1792). Round everything down, then give what is left over, one each, to those who lost
# most by it. We need one thing besides: nobody may end up with nothing. Chapter 05 saw what becomes
# of a device without images: it hands in its old gradient again. So every device starts from at
# least one, and if that was too much, take one from the devices that are furthest above their
# exact share.

# %%
def cut(n, speeds):
    """Whole shard sizes in proportion to speeds; they add up to n, and none is below 1."""
    speeds = np.asarray(speeds, dtype="float64")
    if not (np.isfinite(speeds) & (speeds > 0)).all():
        raise ValueError(f"cut(speeds={speeds.tolist()}): each must be a positive number")
    if n < len(speeds):
        raise ValueError(f"cut(n={n}): too few images for {len(speeds)} devices; leave some out")
    due = n * speeds / speeds.sum()
    sizes = np.maximum(np.floor(due), 1).astype(int)
    while sizes.sum() != n:
        one = np.sign(n - sizes.sum())
        claim = np.where(sizes + one >= 1, one * (due - sizes), -np.inf)
        sizes[claim.argmax()] += one
    return sizes.tolist()


# %% [markdown]
# **Predict** the four results.

# %%
print(cut(256, [3, 1]), cut(10, [1, 1, 1, 1]), cut(100, [0.2, 0.3, 0.4]), cut(5, [100, 1, 1]))

# %% [markdown]
# Equal speeds give chapter 02's uneven split, the longer shards first. In the last case the slow
# ones are due far less than one image and get one. Four examples are no proof. These properties
# must hold for *any* speeds:

# %%
def check_cut(n, speeds):
    sizes, due = cut(n, speeds), n * speeds / speeds.sum()
    assert sum(sizes) == n, f"{sizes}: images lost or doubled"
    assert min(sizes) >= 1, f"{sizes}: an empty shard hands in its old gradient"
    assert due.min() < 1 or np.abs(sizes - due).max() < 1, f"{sizes}: off by a whole image"
    order = np.argsort(speeds)
    assert (np.diff(np.array(sizes)[order]) >= 0).all(), f"{sizes}: a slower one got more"
    assert cut(n, 1024 * speeds) == sizes, "only the ratio of speeds may count"


# %% [markdown]
# Five thousand times, with up to 16 devices, up to 599 images, and speeds that differ by a factor
# of up to 10,000, so that many devices are due less than one image:

# %%
rng = np.random.default_rng(11)
for _ in range(5000):
    k = rng.integers(1, 17)
    check_cut(int(rng.integers(k, 600)), 10 ** rng.uniform(-2, 2, k))

# %% [markdown]
# And an outside oracle: of *all* ways to cut $n$ images into $k$ shards with at least one each,
# none is closer to what is due. For small numbers a computer can look at all of them.

# %%
def all_cuts(n, k):  # [ways, k]
    every = itertools.product(range(1, n + 1), repeat=k)
    return np.array([way for way in every if sum(way) == n])


assert all_cuts(4, 2).tolist() == [[1, 3], [2, 2], [3, 1]]

# %% [markdown]
# Closest in the sense of least squares:

# %%
def beyond_due(cuts, n, speeds):
    return ((np.array(cuts) - n * speeds / speeds.sum()) ** 2).sum(axis=-1)


# %% [markdown]
# **Predict:** does a device that is due less than one image, and gets one, spoil it?

# %%
for _ in range(300):
    k = int(rng.integers(1, 5))
    n, some = int(rng.integers(k, 12)), 10 ** rng.uniform(-2, 2, k)
    best = beyond_due(all_cuts(n, k), n, some).min()
    assert beyond_due(cut(n, some), n, some) <= best + 1e-9, f"{cut(n, some)}: {some}"
print("5,000 random cases keep the rules; in 300 small ones no cut is better")

# %% [markdown]
# What can't be done must be refused:

# %%
for n, some in ((2, [1, 1, 1]), (8, [1, 0]), (8, [1, float("nan")])):
    try:
        cut(n, some)
    except ValueError as error:
        print(error)

# %% [markdown]
# MXNet itself once had this. `Module`, its interface before Gluon, takes a `work_load_list`, and
# the function behind it is still there. **Predict:** ten images for four devices of equal load, and
# for six.

# %%
from mxnet.executor_manager import _split_input_slice

for loads in ([3, 2], [1] * 4, [1] * 6):
    try:
        sizes = [s.stop - s.start for s in _split_input_slice(10, loads)]
    except ValueError as error:
        sizes = error
    print(f"loads {loads}: Module {sizes}, ours {cut(10, loads)}")

# %% [markdown]
# It rounds each share for itself, and the last device gets the rest: twice what the others have in
# one case, nothing in the other, which it refuses. Where shares come out whole the two agree. Gluon
# has nothing of the kind: `split_and_load` knows equal shards only. So we load them ourselves.

# %%
def load(batch, sizes, places):
    ends = np.cumsum([0, *sizes]).tolist()
    return [batch[a:b].as_in_context(d) for a, b, d in zip(ends, ends[1:], places)]


# %% [markdown]
# Images must keep their labels and none may be lost. With rows that know their number we can see
# both: two batches cut at the same places stay aligned.

# %%
four = [mx.cpu(r) for r in range(4)]
shards = load(nd.arange(100), cut(100, [7, 1, 5, 2]), four)
assert [s.context for s in shards] == four, "each shard on its own device"
together = np.concatenate([s.asnumpy() for s in shards]).tolist()
assert together == list(range(100)), "every row once, and in its place"
print([len(s) for s in shards])

# %% [markdown]
# ## The gradient must not notice
#
# A step is right if all replicas get the gradient that *one* device computes from the whole batch.
# We compare in float64, so that $10^{-12}$ can tell a mistake from rounding.

# %%
x64, y64 = x[:64].astype("float64"), y[:64]

# %% [markdown]
# The function below does what a training step does up to the update, and returns all gradients:
# for each parameter a list, one array a device. `weigh` says what is done to the losses of a shard
# before `backward`, and `divide` what is done to the sum over devices after it.

# %%
def gradients(sizes, weigh, divide, places=four, x=x64, y=y64):
    places = places[: len(sizes)]
    net = start(places, "float64")
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    with autograd.record():
        losses = [weigh(softmax(net(a), b))
                  for a, b in zip(load(x, sizes, places), load(y, sizes, places))]
    autograd.backward(losses)
    trainer.allreduce_grads()
    return [[g.asnumpy() / divide for g in p.list_grad()] for p in net.collect_params().values()]


# %% [markdown]
# The oracle is one device. `apart` takes the worst of all parameters and *all* replicas, as a share
# of the parameter's largest entry.

# %%
def apart(found, truth):
    return np.max([np.abs(replica - whole).max() / np.abs(whole).max()
                   for replicas, (whole,) in zip(found, truth) for replica in replicas])


truth = gradients([64], weigh=lambda loss: loss, divide=64)
assert all(np.abs(whole).max() > 0 for (whole,) in truth), "nothing is proved by zeros"

# %% [markdown]
# Now 64 images on three devices, cut 40, 16 and 8. The losses stay as they are, a number for each
# image, so `backward` gives sums; the all-reduce adds those up; and one division by $n$ makes the
# mean. That is what `step(batch_size)` does. **Predict:** does it need a weight for each device?

# %%
sizes = cut(64, [5, 2, 1])
far = apart(gradients(sizes, weigh=lambda loss: loss, divide=64), truth)
assert far <= 1e-12, f"sums over unequal shards are {far:.1e} off"
print(sizes, "sums, divided once by 64: equal to one device to 1e-12, on all replicas")

# %% [markdown]
# None at all. A sum over 64 images doesn't care who adds which. That is the reason why this course,
# like Gluon, keeps sums: `split_and_load`, the loss for each image, and one division by the size of
# the whole batch. If you only ever train this way, you can stop worrying about weights here.
#
# ### Means do need weights
#
# PyTorch's losses take the *mean* over a shard unless told otherwise, and its
# `DistributedDataParallel` then takes the mean over devices; many other listings do the same. A
# case that you can do in your head first. The gradients of four images are 1, 2, 3 and 10, and the
# devices have the first three and the last one.
#
# **Predict** the true mean, and the mean of the two means.

# %%
shards = [np.array([1, 2, 3]), np.array([10])]
print("true mean", np.concatenate(shards).mean(), " mean of means",
      np.mean([shard.mean() for shard in shards]))

# %% [markdown]
# Why? In a mean of $k$ means, an image of shard $i$ counts $\frac{1}{k \, n_i}$, where
# $\frac{1}{n}$ would be right. The fewer images a device has, the more each of them counts.

# %%
from fractions import Fraction

for sizes in ([3, 1], [192, 64], [128, 128]):
    counts = [Fraction(1, len(sizes) * n) for n in sizes]
    print(sizes, "an image counts", *counts, "instead of", Fraction(1, sum(sizes)))

# %% [markdown]
# With 192 and 64, each image on the slow device counts three times as much as one on the fast
# device. The remedy is a weight $n_i / n$ for each mean, and a sum instead of the mean over
# devices: $\sum_i \frac{n_i}{n} \cdot \frac{1}{n_i} \sum_{j \in i} g_j = \frac{1}{n} \sum_j g_j$.
#
# LeNet, both ways. **Predict** which of them is within $10^{-12}$. First with weights:

# %%
sizes = [40, 16, 8]
weighted = apart(gradients(sizes, lambda loss: loss.mean() * (len(loss) / 64), divide=1), truth)
assert weighted <= 1e-12, f"weighted means are {weighted:.1e} off"
print(sizes, "means, weighted by", [n / 64 for n in sizes], "and added: equal to 1e-12")

# %% [markdown]
# And the mean of means, with the same shards:

# %%
plain = apart(gradients(sizes, lambda loss: loss.mean(), divide=3), truth)
assert plain > 1e-3, f"a mean of means over {sizes} should be seen, but is only {plain:.1e} off"
print("not weighted: more than a thousandth of a parameter's largest entry off")

# %% [markdown]
# ### Where it can't be seen
#
# A test with equal shards passes. So does one whose shards have the same mean. Both would let the
# mistake through.

# %%
same = apart(gradients([16] * 4, lambda loss: loss.mean(), divide=4), truth)
assert same <= 1e-12, "with equal shards the mean of means is the mean"
shards = [np.array([1, 4, 7]), np.array([4])]
assert np.mean([s.mean() for s in shards]) == np.concatenate(shards).mean() == 4
print("equal shards, or shards with equal means: nothing to see")

# %% [markdown]
# How far off is it where it can be seen? That depends on how the images of one shard differ from
# those of another. We cut the batch 48 to 16: once in its own order, and once sorted by class, so
# that the second device has the highest digits only. The distance is that of the whole gradient, as
# a share of its length.

# %%
def off(order):
    args = nd.array(x64.asnumpy()[order], dtype="float64"), nd.array(y64.asnumpy()[order])
    found = gradients([48, 16], lambda loss: loss.mean(), 2, x=args[0], y=args[1])
    gaps, wholes = zip(*((a[1] - b[0], b[0]) for a, b in zip(found, truth)))
    return np.sqrt(sum((g**2).sum() for g in gaps) / sum((w**2).sum() for w in wholes))


# %% [markdown]
# **Predict** which is further from the truth.

# %% tags=["measured"]
orders = {"in its own order": np.arange(64), "sorted by class": y64.asnumpy().argsort()}
for name, order in orders.items():
    print(f"{name}: off by {off(order):.0%} of the gradient's length ({data.name})")

# %% [markdown]
# Read it with care: this is one batch of 64 at the start of training, and the second device's 16
# images count as much as the first one's 48. If images are *dealt at random*, the mistake has no
# direction. It is worth being exact about that. Let each of four images be drawn from three kinds,
# with gradients 0, 1 and 5, and look at all $3^4 = 81$ draws.

# %%
kinds = np.array([0, 1, 5])
draws = np.array(list(itertools.product(kinds, repeat=4)))
assert draws.shape == (81, 4)

# %% [markdown]
# Three images on one device, the fourth on the other. **Predict:** over all draws, is the mean of
# means off?

# %%
estimates = draws[:, :3].mean(axis=1) / 2 + draws[:, 3] / 2
assert np.isclose(estimates.mean(), kinds.mean(), rtol=1e-12), "on average it is right"
print(f"on average {estimates.mean():.1f}, as it should be; the variance is that of a mean of "
      f"{kinds.var() / estimates.var():.1f} images, not of {kinds.var() / draws.mean(1).var():.1f}")

# %% [markdown]
# On average it is right, but it is *noisier*, as if a quarter of the batch had been left out. A
# weighted mean with weights $w_j$ is worth $1 / \sum w_j^2$ equally weighted images. Here the
# weights are $\frac{1}{k n_i}$, and there are $n_i$ of each, so it is worth
# $k^2 / \sum_i \frac{1}{n_i}$:

# %%
def effective_batch(sizes):
    return len(sizes) ** 2 / sum(1 / n for n in sizes)


assert np.isclose(effective_batch([3, 1]), kinds.var() / estimates.var())

# %% [markdown]
# **Predict** what a batch of 256 is worth if one device has 255 images of it.

# %%
for sizes in ([128, 128], [192, 64], [240, 16], [255, 1]):
    print(sizes, f"is worth a batch of {effective_batch(sizes):.0f}")

# %% [markdown]
# So on shuffled data nobody sees anything, except that training is as restless as with a smaller
# batch. If what a device gets depends on *what it is*, because the batch is sorted or each device
# reads its own part of the data, then the result is biased: always in the direction of the slow
# device's images.
#
# ### All the way through training
#
# Does it hold for a training, with Gluon's `step`? In float64, on 640 images.

# %%
images, labels = (nd.array(a, dtype="float64")
                  for a in (data.train_images[:640], data.train_labels[:640]))

# %% [markdown]
# Ten steps, every one of them cut in another way, as if speeds changed all the time. The weights
# must be those of one device.

# %% tags=["trains"]
def ten_steps(k):
    net, losses, rng = start(four[:k], "float64"), [], np.random.default_rng(5)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.2})
    for a in range(0, 640, 64):
        sizes, x, y = cut(64, rng.uniform(1, 9, k)), images[a : a + 64], labels[a : a + 64]
        with autograd.record():
            parts = [softmax(net(s), t)
                     for s, t in zip(load(x, sizes, four), load(y, sizes, four))]
        autograd.backward(parts)
        trainer.step(64)
        losses.append(sum(part.sum().asscalar() for part in parts) / 64)
    return [[w.asnumpy() for w in p.list_data()] for p in net.collect_params().values()], losses


# %% [markdown]
# **Predict** how far three devices are from one.

# %% tags=["trains"]
(truth_after, losses), (found, _) = ten_steps(1), ten_steps(3)
assert np.mean(losses[-3:]) < 0.97 * np.mean(losses[:3]), "compare only while the loss falls"
far = apart(found, truth_after)
assert far <= 1e-12, f"after ten steps the weights are {far:.1e} apart"
print("ten steps, ten different cuts: the weights of one device, to 1e-12")

# %% [markdown]
# That is worth more than it may seem. A cut is a matter of speed alone, so nothing has to be tuned
# again when it changes: not the learning rate, nor the batch. You may change it in the middle of a
# training, or give it to somebody with other devices.
#
# ## What it should bring
#
# Before you measure, predict. A step ends when the slowest device has ended. So a cut into $n_i$
# makes this many images per second:

# %%
def predicted(sizes, speeds, cost=0):
    """Images/s of a step that ends with the slowest device, then takes `cost` seconds to talk."""
    return sum(sizes) / (max(n / v for n, v in zip(sizes, speeds)) + cost)


assert np.isclose(predicted([128, 128], [1600, 400]), 2 * 400), "equal shards: k times the slowest"
assert np.isclose(predicted([192, 48], [1600, 400]), 1600 + 400), "in proportion: all of the speeds"

# %% [markdown]
# Equal shards make $k \cdot \min v$, proportional ones $\sum v$. For two devices, the second $h$
# times as slow, in multiples of the fast one alone, that is $2/h$ and $1 + 1/h$. The gain of one
# over the other is $(h+1)/2$.
#
# **Predict:** from which handicap on are *equal* shards no faster than the fast device alone?

# %%
print("handicap  equal shards  in proportion  gain")
for h in (1, 1.5, 2, 3, 4, 6, 10, 30):
    equal, fair = 2 / h, 1 + 1 / h
    print(f"{h:8}  {equal:12.2f}  {fair:13.2f}  {fair / equal:4.1f}")

# %% [markdown]
# From 2 on. A second device half as fast brings nothing, if it is given half of the work; a slower
# one does harm. In proportion it never does harm, in this model. But look at the third column: it
# goes to 1. And what we called gain grows without limit only because equal shards get so bad. There
# are *two* comparisons, and the honest one is with the best that you could have done before.
#
# ## What it brings
#
# Now for real: the slow device has its handicap in every step, then Gluon's `step`, which sums the
# gradients, updates and hands the weights out. Shards are cut before the clock starts.

# %%
def model(places):
    net = start(places)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})


alone, both = model(two[:1]), model(two)

# %% [markdown]
# The rate of such a step, for any cut and any handicaps:

# %% tags=["trains"]
def rate(net_and_trainer, sizes, handicaps, repeats=1):
    (net, trainer), n, places = net_and_trainer, sum(sizes), two[: len(sizes)]
    shards = list(zip(load(x[:n], sizes, places), load(y[:n], sizes, places), handicaps))

    def step():
        for images, labels, handicap in shards:
            slow_work(net, images, labels, handicap)
        trainer.step(n)

    return n / seconds(step, repeats)  # images/s


# %% [markdown]
# Three ways to train with a batch of 256, in turn: the fast device alone, equal shards, and shards
# cut by the speeds that were measured above. **Predict** from your machine's two speeds what comes
# out. It takes about ten seconds.

# %% tags=["measured"]
shares = cut(256, speeds)
ways = [(alone, [256], [1]), (both, [128, 128], handicaps), (both, shares, handicaps)]
with Others() as others:
    rounds = np.array([[rate(*way, repeats=2) for way in ways] for _ in range(6)])[1:]
print(f"batch 256, cut {shares}; other programs took {others.share:.0%} of the machine's time")

# %% [markdown]
# Beside the predictions:

# %% tags=["measured"]
expected = [predicted(sizes, speeds) for _, sizes, _ in ways]
names = "fast device alone", "equal shards", "in proportion"
for name, want, got in zip(names, expected, np.median(rounds, axis=0)):
    print(f"{name:17}: predicted {want:6,.0f}, measured {got:6,.0f} images/s, "
          f"{got / want - 1:+.0%}")
gains = rounds[:, 2] / rounds[:, 1]
print(f"gain over equal shards: predicted {expected[2] / expected[1]:.2f}, measured "
      f"{np.median(gains):.2f}, from {gains.min():.2f} to {gains.max():.2f}")

# %% [markdown]
# The predictions know nothing of communication, of Python, which has no core of its own on a
# machine with as many devices as cores, or of two cores that share a cache and a memory (chapter
# 04's trainings that never communicate). So expect measurements below them, proportional shards
# most, since only there both devices are busy all the time. In the *ratio* some of that cancels.
#
# And if *other programs* hold one of two cores, there is another law. Two simulated devices that
# share one core do not wait for each other: the *work* adds up. Equal shards are
# $n \frac{1+h}{2}$ images' worth of it, proportional ones $\frac{2 h n}{1+h}$. So there is less to
# gain, $\frac{(1+h)^2}{4h}$ in place of $\frac{1+h}{2}$.

# %%
for h in (1, 2, 3, 6):
    equal, fair = (1 + h) / 2, np.dot([h / (1 + h), 1 / (1 + h)], [1, h])
    assert np.isclose(equal / fair, (1 + h) ** 2 / (4 * h))
    print(f"handicap {h}: gain {(1 + h) / 2:.2f} with a core each, {equal / fair:.2f} on one core")

# %% [markdown]
# Now measured for other handicaps. Each round goes through all of them; about ten seconds.

# %% tags=["measured"]
tries, samples = (1, 1.5, 2, 3, 4, 6), []
with Others() as others:
    for _ in range(5):
        samples.append([[rate(both, sizes, [1, h]) for sizes in ([128, 128], cut(256, [1, 1 / h]))]
                        for h in tries])
samples = np.array(samples[1:])  # [rounds, handicaps, 2]
curve = samples[..., 1] / samples[..., 0]
print(f"other programs took {others.share:.0%} of the machine's time")

# %% [markdown]
# **Predict** on which side of the dashed line your points lie, and where furthest.

# %% tags=["measured"]
from helpers.plotting import BLUE, GREY, ORANGE, figure, show

h = np.linspace(1, 6, 50)
middle = np.median(curve, axis=0)
fig, ax = figure(f"At handicap 6, proportional shards are {middle[-1]:.1f} times as fast as equal "
                 "ones", "handicap of the second device", "images/s over those of equal shards")
ax.plot(h, (h + 1) / 2, "--", color="black", label="predicted: (h + 1) / 2")
ax.plot(h, (h + 1) ** 2 / (4 * h), ":", color=GREY, lw=2, label="if both shared one core")
ax.errorbar(tries, middle, (middle - curve.min(axis=0), curve.max(axis=0) - middle), fmt="o",
            color=BLUE, capsize=4, label="measured: median, least and most")
ax.legend()
show(fig, alt="The gain of proportional over equal shards for six handicaps, with a dashed line "
     "for the prediction and a dotted one for two devices on one core.")

# %% [markdown]
# Points near the dashed line: the devices had a core each. Points near the dotted one: they didn't,
# and the share of other programs says why. Below both: communication, and what Python takes, which
# are a larger part of the shorter step. The gain is real in either case, but only on the dashed
# line do devices wait for each other as real ones do.
#
# ## When it is not worth it
#
# ### Communication
#
# The fast device alone needs no all-reduce. With a partner each step takes $c$ seconds of talk.
# Alone a step takes $T = n / v_1$; together $\frac{T}{1 + 1/h} + c$. The partner saves
# $\frac{T}{h + 1}$, so it pays as long as
#
# $$h < \frac{T}{c} - 1.$$
#
# A step of 20 ms alone and 4 ms of talk: up to which handicap?

# %%
def break_even(alone, cost):
    return alone / cost - 1


print(f"handicap {break_even(20, 4):.0f}")

# %% [markdown]
# The formula against the prediction that it comes from: at that handicap both must be as fast.

# %%
by_itself = predicted([20], [1000])
with_help = predicted([16, 4], [1000, 1000 / 4], cost=0.004)
assert np.isclose(by_itself, with_help), "at the break-even both must be equally fast"

# %% [markdown]
# What is $c$ on your machine? Give each device a *single* image. There is hardly anything to
# compute, so what a step on two devices takes longer than one on one device is the price of having
# a partner: the all-reduce, and Python, which has twice as many operators to start.

# %% tags=["measured"]
steps = [(2 / rate(both, [1, 1], [1, 1], 10), 1 / rate(alone, [1], [1], 10)) for _ in range(8)]
together, single = np.median(steps[1:], axis=0)
cost = max(together - single, 1e-6)
print(f"one image each: {1e3 * together:.1f} ms on two devices, {1e3 * single:.1f} ms on one")

# %% [markdown]
# **Predict:** is the limit for $h$ higher for a batch of 32 or for one of 256?

# %% tags=["measured"]
for n in (32, 64, 128, 256):
    limit = break_even(n / first, cost)
    print(f"batch {n:3}: {1e3 * n / first:5.0f} ms alone, so a partner pays "
          + (f"up to handicap {limit:.0f}" if limit > 1 else "never, not even at full speed"))

# %% [markdown]
# The larger the batch, the slower a helper may be. Now measured, against the fast device alone, for
# a small batch of 32:

# %% tags=["measured"]
slow_ones, small = (1, 2, 4, 8, 16), []
for _ in range(6):
    base = rate(alone, [32], [1], 3)
    small.append([rate(both, cut(32, [1, 1 / h]), [1, h], 3) / base for h in slow_ones])
gained = np.median(small[1:], axis=0)
print("batch 32, over the fast device alone:", np.round(gained, 2).tolist())

# %% [markdown]
# And beside it, for 256:

# %% tags=["measured"]
large = []
for _ in range(4):
    base = rate(alone, [256], [1])
    large.append([rate(both, cut(256, [1, 1 / h]), [1, h]) / base for h in (2, 8)])
print("batch 256, handicaps 2 and 8:", np.round(np.median(large[1:], axis=0), 2).tolist())

# %% [markdown]
# The prediction now is `predicted` with the cost and with sizes from `cut`, so it has corners: a
# device that is due a third of an image gets a whole one. **Predict** what that does to the small
# batch's curve on its right.

# %%
def curve_of(n, handicaps):
    return [predicted(cut(n, [1, 1 / h]), [first, first / h], cost) / first for h in handicaps]


# %% [markdown]
# Lines are predictions, marks are what was measured:

# %% tags=["measured"]
lost = [h for h, gain in zip(slow_ones, gained) if gain < 1]
fig, ax = figure(f"At batch 32, a helper with handicap {min(lost)} already slows training" if lost
                 else "At batch 32, every helper that was tried was some help",
                 "handicap of the helper", "images/s over the fast device alone")
h = np.geomspace(1, 32, 120)
for n, color, look, at, points in ((32, ORANGE, "-o", slow_ones, small),
                                   (256, BLUE, "--s", (2, 8), large)):
    ax.plot(h, curve_of(n, h), look[:-1], color=color, label=f"batch {n}, predicted")
    ax.plot(at, np.median(points[1:], axis=0), look[-1], color=color, label=f"batch {n}, measured")
ax.axhline(1, color="black", lw=1)
ax.set(xscale="log", ylim=(0, 2.4), xticks=[1, 2, 4, 8, 16, 32], xticklabels=[1, 2, 4, 8, 16, 32])
ax.minorticks_off()
ax.legend(fontsize=8, ncols=2)
show(fig, alt="Throughput of the fast device with a helper, over that of the fast device alone, "
     "against the helper's handicap, for batches of 32 and 256; a line at 1 is no gain.")

# %% [markdown]
# Where a curve is below 1 the helper is in the way. On the right of the small batch's curve there
# is a second reason beside talk: the helper has one image, which is too many, and everybody waits
# for it. Measured points below the curve are what the model leaves out: Python's time for the extra
# passes, cores that are shared, and that a shard of a few images is computed at a lower rate than
# one of 128. Marks far below both curves say that the devices had no core each; on a shared core a
# helper with a handicap is only more work. So treat the formula as an upper limit, and measure
# before you decide.
#
# ### Speeds that aren't constant
#
# A device with a fixed cost in each step takes $a_i + n_i / v_i$. Which speed is right for `cut`
# then? None that was measured at another size. But cut, look, and cut again finds it. Two devices
# that compute 1,600 images a second, the second with 60 ms of fixed cost:

# %%
fixed, true_speeds = np.array([0, 0.060]), np.array([1600, 1600])
sizes = [128, 128]
for _ in range(5):
    times = fixed + sizes / true_speeds
    print(sizes, "take", *(f"{1000 * t:.0f} ms" for t in times))
    sizes = cut(256, sizes / times)  # the speeds that were just seen

# %% [markdown]
# When it stands still, $n_i$ is in proportion to $n_i / t_i$, so all $t_i$ are equal, to an image.
# No model of the devices was needed.

# %%
assert cut(256, sizes / (fixed + sizes / true_speeds)) == sizes, "it stands still"
times = fixed + sizes / true_speeds
assert np.ptp(times) <= 1 / 1600, "and there they end within an image of each other"

# %% [markdown]
# There is a trap in it. Time each device's *whole step*, until it can go on, and all have the same
# time, since they wait for each other in the all-reduce. **Predict** what `cut` makes of that.

# %%
sizes = [100, 156]
waited = np.full(2, max(fixed + sizes / true_speeds))
assert cut(256, sizes / waited) == sizes, "equal times: it stays wherever it is"
print("from", sizes, "to", cut(256, sizes / waited))

# %% [markdown]
# So the clock must be read *before* the talk. On our devices: a thread for each device waits for
# the last gradient that its backward pass writes, the first layer's, and notes the time.

# %%
from concurrent.futures import ThreadPoolExecutor


def when_written(gradient):
    gradient.wait_to_read()
    return time.perf_counter()


# %% [markdown]
# All work is started first, then the threads. So a wait never holds up another device's work.

# %%
def finish_times(net, sizes, handicaps):
    shards = list(zip(load(x, sizes, two), load(y, sizes, two), handicaps))
    nd.waitall()
    begin = time.perf_counter()
    for images, labels, handicap in shards:
        slow_work(net, images, labels, handicap)
    with ThreadPoolExecutor(len(two)) as pool:
        return np.array(list(pool.map(when_written, net[0].weight.list_grad()))) - begin


# %% [markdown]
# We begin with equal shards and know nothing of handicaps. After three rounds they change places,
# as if another program had moved from one device to the other. **Predict** the sizes of each round.

# %% tags=["measured"]
sizes = [128, 128]
finish_times(both[0], sizes, [1, 1])  # warm up
for handicaps_now in [[1, 3]] * 3 + [[3, 1]] * 3:
    times = finish_times(both[0], sizes, handicaps_now)
    print(f"handicaps {handicaps_now}: {sizes[0]:3} and {sizes[1]:3} images took",
          " and ".join(f"{1e3 * t:.0f} ms" for t in times))
    sizes = cut(256, sizes / times)
print("next:", sizes)

# %% [markdown]
# A handicap of 3 asks for 192 and 64, or the other way about. Where devices have a core each, one
# look is enough to come near. Where they share one, the device that ends first leaves it to the
# other, which then looks faster than it is: it takes a few looks more. In a long training you'd
# look every few hundred steps and smooth what you see, for each look makes the devices wait for
# each other. And since a step's result doesn't depend on the cut, the weights won't show that you
# did, except in their last digits.
#
# ### BatchNorm
#
# There is an exception. A layer that computes statistics does so from its *own shard*
# (chapter 09), so there the cut does change the result, and a small shard's statistics are noisier.
# If you average the devices' running statistics when you save the network, weigh them. The four
# numbers from above once more, 1, 2 and 3 on the first device and 10 on the second. **Predict:**
# which of the two averages is the batch's mean?

# %%
norm = nn.BatchNorm(momentum=0)  # keeps the last batch's statistics only
norm.initialize(ctx=four[:2])
with autograd.record():
    outputs = [norm(shard) for shard in load(nd.array([[1], [2], [3], [10]]), [3, 1], four)]
autograd.backward(outputs)  # which is when the running statistics are written
means = [m.asscalar() for m in norm.running_mean.list_data()]
print("devices", means, " plain", np.mean(means), " weighted", np.average(means, weights=[3, 1]))

# %% [markdown]
# Means can be weighted. For variances not even that is enough: the second device's is zero, since
# it has one image, and what lies *between* the shards is in none of them. ResNet-18 is therefore a
# worse candidate for very unequal shards than LeNet, although it computes longer between two talks.
#
# ### Memory and numerics
#
# A slower device is often a smaller one, and its memory may not hold what is due to it: then its
# shard has a limit, and the others share the rest (second exercise). Two kinds of device also
# compute in a different order, so their gradients of the *same* images differ in the last digits.
# That does no harm to replicas as long as there is one sum and one update, whose result is handed
# to all: the default (chapter 07). With `update_on_kvstore=False` each device updates by its own
# arithmetic, and replicas may drift apart.
#
# ## CPU and GPU together
#
# Gluon takes `initialize(ctx=[mx.gpu(0), mx.cpu(0)])` as it takes any list, and no function of this
# chapter cares what kind a device is. Should you? **Predict** the gain over the GPU alone if it is
# 10, 30 or 100 times as fast as the CPU, and what an all-reduce may cost at most.

# %%
for h in (10, 30, 100):
    print(f"GPU {h:3} times as fast: gain at best {1 / h:.1%}; pays only if the talk takes less "
          f"than {1 / (h + 1):.1%} of the GPU's step; batch 256 is cut {cut(256, [h, 1])}")

# %% [markdown]
# The talk crosses from GPU memory to the host's and back in each step, and the same CPU has other
# work: Python, the loader, and starting the GPU's operators. So between a GPU and a CPU the answer
# is no, with rare exceptions: a step that is very long, or a GPU that is very old. Two GPUs of
# different generations, within a factor of two or three and on the same link, are another matter.
#
# If you try it, name a CPU whose number no GPU of the list has, such as `cpu(1)` beside `gpu(0)`.
# In MXNet's source (`InitMergeBuffer` in `src/kvstore/comm.h`) the store `device` tells the
# places for its sums apart by their *number* alone. By our reading `gpu(0)` and `cpu(0)` are one
# to it, and all sums land on the one named last.
#
# Where there is a GPU, the next cell trains on such a list and compares with one device.
# **We have not run that branch**: the machines this course was written on have no GPU that MXNet
# 1.9.1 runs on. If it fails on yours, believe your machine.

# %% tags=["measured"]
if mx.context.num_gpus() == 0:
    print("no GPU here, so there is nothing to mix")
else:
    mixed = [mx.gpu(0), mx.cpu(1)]
    far = apart(gradients([56, 8], lambda loss: loss, 64, places=mixed), truth)
    assert far <= 1e-10, f"the gradient on {mixed} is {far:.1e} off"
    net, jobs = start(mixed), [(x[:128].as_in_context(d), y[:128].as_in_context(d)) for d in mixed]
    tried = [[128 / seconds(lambda job=job: work(net, *job), 3) for job in jobs] for _ in range(4)]
    found = np.median(tried[1:], axis=0)
    print(f"gradient equal to 1e-10; images/s {found.round()}; batch 256 is cut {cut(256, found)}")

# %% [markdown]
# ### Is the complexity worth it?
#
# The *code* is small: `cut`, `load` and a division by $n$. Most of the cost is overhead:
# speeds to measure and to measure again, a batch size below which it turns into a loss, BatchNorm
# that depends on the cut. In order of trouble saved:
#
# 1. Compare with the fast device *alone*. If $1 + 1/h$ isn't worth having, leave the slow one out.
# 2. Give it something that nobody waits for: evaluation, another experiment, preparing images.
# 3. If it is about equal, say within a tenth, use equal shards.
# 4. Else cut in proportion, keep sums, measure the speeds before the talk, and assert the gradient.
#
# A different way out is not to wait at all: each device updates when it is ready
# (`dist_async` across machines, chapter 15). Then nobody needs shares, but the steps are no longer
# those of one device, and nothing in this chapter can be asserted.

# %% [markdown]
# ## Summary
#
# - A step ends with the slowest device. Equal shards make $k \cdot \min v$, proportional ones
#   $\sum v$. With two devices, a second one half as fast or slower is useless on equal shards.
# - Largest remainder makes whole shards that add up; an empty shard would hand in an old gradient.
# - Sums divided once by $n$ are right for any cut. Means need weights $n_i / n$; a test on equal
#   shards can't see that they are missing, and on shuffled data they only make the batch smaller.
# - A helper pays while $h < T/c - 1$. Small batches and whole images lower that limit.
# - Cut by the speeds last seen, read before the all-reduce, and the devices end together.
#
# Next, chapter 13: the same training in PyTorch, and whether it computes the same gradients.
#
# **Further reading.** *Dive into Deep Learning*, Concise Implementation for Multiple GPUs, and its
# early edition, Gluon Implementation for Multi-GPU Computation; M. L. Balinski and H. P. Young,
# *Fair Representation* (1982), on whole shares and what can go wrong with them.

# %% [markdown]
# ## Exercises
#
# 1. **The best cut.** Largest remainder is closest to what is due. Is it also *fastest*, that is,
#    has it the least $\max_i n_i / v_i$ of all cuts into whole images? Write a cut that is, and
#    find speeds where the two differ.
# 2. **A small memory.** The second of three devices has memory for `limit` images only. Write
#    `cut_within(n, speeds, limits)` that gives nobody more than fits, and shares the rest in
#    proportion.
# 3. **Whom to leave out.** Each device beyond the first adds $c$ seconds of talk to a step. Given
#    speeds and $c$, which devices should train?

# %% [markdown]
# ### Answer 1
#
# Give the images out one at a time, each to the device that would be done with it
# first. Each time the maximum grows as little as it can.

# %% tags=["solution"]
def fastest_cut(n, speeds):
    sizes = np.ones(len(speeds), dtype=int)
    for _ in range(n - len(speeds)):
        sizes[np.argmin((sizes + 1) / speeds)] += 1
    return sizes.tolist()


# %% [markdown]
# Against all cuts there are. In a batch of 256 an image more or less is nothing; in one of ten it
# is something.

# %% tags=["solution"]
differ = 0
for _ in range(300):
    k = int(rng.integers(1, 5))
    n, some = int(rng.integers(k, 12)), rng.uniform(1, 5, k)
    best, ours = (all_cuts(n, k) / some).max(axis=1).min(), max(fastest_cut(n, some) / some)
    assert np.isclose(ours, best), "no cut into whole images may be faster"
    differ += max(cut(n, some) / some) > best * (1 + 1e-9)
assert differ > 0, "there are speeds for which largest remainder is not the fastest"

# %% [markdown]
# ### Answer 2
#
# Cut as before. Whoever got too much gets the limit and leaves the table; what is
# left is cut among the others, until nobody has too much.

# %% tags=["solution"]
def cut_within(n, speeds, limits):
    if n > sum(limits):
        raise ValueError(f"cut_within(n={n}): memory for {sum(limits)} images only")
    speeds, limits = np.array(speeds, dtype="float64"), np.array(limits)
    sizes, free = np.zeros_like(limits), np.ones(len(limits), dtype=bool)
    while free.any():
        sizes[free] = cut(n - sizes[~free].sum(), speeds[free])
        over = free & (sizes > limits)
        if not over.any():
            break
        sizes[over], free = limits[over], free & ~over
    return sizes.tolist()


assert cut_within(256, [2, 1, 1], [999, 40, 999]) == [144, 40, 72], "40 fit, and 216 shared 2 to 1"

# %% [markdown]
# And for random speeds and limits:

# %% tags=["solution"]
for _ in range(1000):
    limits = rng.integers(1, 50, 4)
    n = int(rng.integers(4, max(5, limits.sum() + 1)))
    sizes = cut_within(n, rng.uniform(0.1, 9, 4), limits)
    assert sum(sizes) == n and min(sizes) >= 1 and (sizes <= limits).all()

# %% [markdown]
# ### Answer 3
#
# For a given number of devices the fastest ones are best, since only the sum of
# speeds counts. So try the fastest one, the fastest two, and so on. Looking at all subsets confirms
# it.

# %% tags=["solution"]
def step_time(n, chosen, cost):
    return n / sum(chosen) + cost * (len(chosen) - 1)


def who_trains(n, speeds, cost):
    ranked = sorted(speeds, reverse=True)
    return min((ranked[:k] for k in range(1, len(ranked) + 1)),
               key=lambda chosen: step_time(n, chosen, cost))


# %% [markdown]
# An example, and all subsets of five devices, for speeds and costs at random:

# %% tags=["solution"]
assert who_trains(256, [1600, 1600, 800, 100], 0.005) == [1600, 1600, 800], "100 is left out"
for _ in range(200):
    some, c = rng.uniform(50, 2000, 5).tolist(), 10 ** rng.uniform(-4, -1)
    every = [s for k in range(1, 6) for s in itertools.combinations(some, k)]
    best = min(step_time(256, s, c) for s in every)
    assert np.isclose(step_time(256, who_trains(256, some, c), c), best)
