# %% [markdown]
# # 12 · Unequal devices
#
# So far all devices were alike. Now one is slower, for example an old GPU beside a new one. A step
# ends when the last device is done, so all others wait for the slowest one. Such a device is called
# a **straggler**. How must a batch be cut so that nobody waits, and is it then still the same
# training?
#
# ![A slow device needs three times as long for an image. The fast one alone needs some time for 256
# images. On equal shards of 128, the fast one waits for the slow one, and both together take longer
# than the fast one alone. With 192 and 64 images they are done together, and
# sooner.](src/drawings/shares_by_speed.svg)
#
# > **What you'll do:** make a device slow, cut batches by speed, train in three ways and time them.
# >
# > **What you'll learn:** what a straggler costs; how to cut a batch by speed, in whole images; why
# > means need weights then; what to do with a slow device.
# >
# > **What you need:** chapters 02, 05 and 10, and two idle cores. Reading takes {reading time},
# > running about half a minute.

# %% tags=["measured"]
from statistics import median
from time import perf_counter

from helpers import load_data, your_turn
from helpers.compare import largest_difference
from helpers.networks import lenet

import mxnet as mx
from mxnet import autograd, gluon, nd

pair = [mx.cpu(0), mx.cpu(1)]
data = load_data("mnist", limit=1024)
print(data)
images = nd.array(data.train_images)
labels = nd.array(data.train_labels)

# %% [markdown]
# ## A device made slow
#
# Our two devices are alike, so we make the second one slow: it does all its work three times. Each
# `backward` writes over the gradient of the `backward` before it (chapter 05), so the gradient is
# still right, but it comes late. (We can't use `time.sleep`, because it would stop Python, which
# dispatches the work of *both* devices.)

# %% tags=["trains"]
passes = {pair[0]: 1, pair[1]: 3}
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def compute(net, x, y):
    """The forward and backward pass of one device."""
    for _ in range(passes[x.context]):
        with autograd.record():
            loss = cross_entropy(net(x), y).sum()
        loss.backward()

# %% [markdown]
# The network is chapter 06's LeNet, with the same weights each time:

# %%
def new_lenet(devices, dtype="float32"):
    mx.random.seed(11)
    net = lenet()
    net.cast(dtype)
    net.initialize(mx.init.Xavier(), ctx=devices)
    net(nd.zeros((1, 1, 28, 28), ctx=devices[0], dtype=dtype))  # makes the weights
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    return net, trainer

# %% [markdown]
# How fast is each device? A data sheet doesn't say how fast a device is on *this* network, so we
# measure. Each device computes the same 128 images eleven times, while the other one has nothing to
# do, and we take the median. By what we have done to the slow one, the first should be about three
# times as fast:

# %% tags=["measured", "trains"]
def images_per_second(device):
    net, _ = new_lenet([device])
    x = images[:128].as_in_context(device)
    y = labels[:128].as_in_context(device)
    seconds = []
    for _ in range(11):
        begin = perf_counter()
        compute(net, x, y)
        nd.waitall()
        seconds.append(perf_counter() - begin)
    return 128 / median(seconds)


speeds = [images_per_second(pair[0]), images_per_second(pair[1])]
print(f"{pair[0]}: {speeds[0]:,.0f} images/s")
print(f"{pair[1]}: {speeds[1]:,.0f} images/s")
print(f"The first is {speeds[0] / speeds[1]:.1f} times as fast.")

# %% [markdown]
# ## Equal shards, or shares by speed?
#
# Let us first count on paper. Say that the fast device alone takes one second for a batch, and the
# slow one $h$ times as long for an image. (In the drawing $h$ is 3.)
#
# - With *equal shards* each has half of the batch. The slow device takes $\frac{h}{2}$ seconds for
#   its half, and the fast one waits for it.
# - With *shares by speed* nobody waits. The fast device does 1 batch a second and
#   the slow one $\frac1h$, so together a batch takes $1 / (1 + \frac1h)$ seconds.
#
# **Predict:** for which $h$ is the fast device faster alone than both with equal shards?

# %% tags=["predict"]
print("   h   equal shards   shares by speed")
for h in [1, 1.1, 1.5, 2, 3, 30]:
    equal = h / 2
    by_speed = 1 / (1 + 1 / h)
    print(f"{h:4}   {equal:12.2f}   {by_speed:15.2f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# For every $h$ above 2. At 2 the slow device takes as long for its half as the fast one for the
# whole batch. With $h = 3$ a step with equal shards takes 1.5 seconds, so one straggler makes *two*
# devices slower than one.
#
# </details>
#
# With shares by speed a step never takes longer than on the fast device alone. But with $h = 30$
# the second device saves only 3 %. (This count leaves out the all-reduce, which a single device
# doesn't need.)
#
# ## Whole images
#
# So each device gets images in proportion to its speed: the fast one of ours $\frac34$ of a batch
# of 256, which is 192 images. Giving each device as much work as it can do in the same time is
# called **load balancing**. But shares aren't always whole numbers. Say that three devices do 2, 3
# and 4 images in the same time, and the batch has 100. **Predict:** if each share is rounded, do
# they add up to 100?

# %% tags=["predict"]
exact = [100 * speed / 9 for speed in [2, 3, 4]]
rounded = [round(share) for share in exact]
print("exact:  ", [f"{share:.2f}" for share in exact])
print("rounded:", rounded, "together", sum(rounded))

# %% [markdown]
# <details><summary>What came out</summary>
#
# They add up to 99, because all three were rounded down. So one image of each batch would be
# skipped, and there would be no error.
#
# </details>
#
# Therefore we round the *ends* of the shards instead. The first device is entitled to 22.22 images,
# so its shard ends at image 22. The first two are entitled to 55.56 together, so the second shard
# ends at 56, and the third at 100, so that no image is lost. The sizes are the distances between
# the ends: 22, 34 and 44.
#
# ### Your turn: shares by speed
#
# Write it, before you scroll on.

# %% tags=["your-turn"]
def shares_by_speed(n, speeds):
    """How many of n images each device gets, with rounded ends: a list that adds up to n."""
    ...


three_speeds = ((100, [2, 3, 4]), [22, 34, 44])
ours_and_slow = ((256, [3, 1]), [192, 64])
three_alike = ((10, [5, 5, 5]), [3, 4, 3])
one_device = ((7, [1600]), [7])
share_cases = [three_speeds, ours_and_slow, three_alike, one_device]
your_turn(shares_by_speed, share_cases)

# %% [markdown]
# Here is ours:

# %%
def shares_by_speed(n, speeds):
    sizes = []
    begin = 0
    speed_so_far = 0
    for speed in speeds:
        speed_so_far += speed
        end = round(n * speed_so_far / sum(speeds))
        sizes.append(end - begin)
        begin = end
    return sizes


print("speeds 3 and 1:   ", shares_by_speed(256, [3, 1]))
print("speeds 2, 3 and 4:", shares_by_speed(100, [2, 3, 4]))
print("speeds 300 and 1: ", shares_by_speed(100, [300, 1]))

# %% [markdown]
# In the last line the slow device gets no image at all. Take such a device out of the training:
# MXNet can't copy an empty shard, and if the loop only skips the device, its old gradient is added
# again (chapter 02).
#
# ## Is it the same training?
#
# Now we can write a step for any cut. Each device sums over its shard, and `trainer.step(n)` adds
# the sums and divides once, by the images of the whole batch:

# %% tags=["trains"]
def split_by_sizes(batch, sizes, devices):
    shards = []
    begin = 0
    for size, device in zip(sizes, devices):
        end = begin + size
        shards.append(batch[begin:end].as_in_context(device))
        begin = end
    return shards


def train_step(net, trainer, x, y, sizes, devices):
    x_shards = split_by_sizes(x, sizes, devices)
    y_shards = split_by_sizes(y, sizes, devices)
    for x_shard, y_shard in zip(x_shards, y_shards):
        compute(net, x_shard, y_shard)
    trainer.step(sum(sizes))

# %% [markdown]
# Three steps in float64, with another cut in each: are the weights on both devices those of one
# device that trains alone, on whole batches?

# %% tags=["trains"]
net, trainer = new_lenet(pair, "float64")
alone, alone_trainer = new_lenet([pair[0]], "float64")
begin = 0
for sizes in [[48, 16], [8, 56], [31, 33]]:
    x = images[begin:begin + 64].astype("float64")
    y = labels[begin:begin + 64]
    begin = begin + 64
    train_step(net, trainer, x, y, sizes, pair)
    compute(alone, x, y)
    alone_trainer.step(64)

expected = [parameter.data() for parameter in alone.collect_params().values()]
for device in pair:
    found = [parameter.data(device) for parameter in net.collect_params().values()]
    difference = largest_difference(found, expected)
    print(f"{device} equal to 1e-12: {difference < 1e-12}")
    assert difference < 1e-12

# %% [markdown]
# They are. So with sums it doesn't matter where a batch is cut. (With BatchNorm it does, because
# each device normalises by its own shard, chapter 09.)
#
# ### And with means?
#
# In PyTorch it is usual to take the *mean* loss of a shard, and then the mean of the devices'
# gradients (chapter 14): on two devices both have the factor $\frac12$. Let us try other factors,
# again in float64. (One device computes both shards here, which changes no gradient.) We cut
# the 64 images into 32 and 32, with the factors $\frac12$ and $\frac12$; into 48 and 16, with the
# same factors; and into 48 and 16, with the factors $\frac34$ and $\frac14$. **Predict:** which of
# the three give the same gradient as a single device?

# %% tags=["trains", "predict"]
def mean_gradients(x, y):
    """LeNet's gradients of the mean loss."""
    net, _ = new_lenet([pair[0]], "float64")
    with autograd.record():
        loss = cross_entropy(net(x), y).mean()
    loss.backward()
    return [parameter.grad() for parameter in net.collect_params().values()]


x = images[:64].astype("float64")
y = labels[:64]
whole = mean_gradients(x, y)
equal = []
for size, factor in [(32, 0.5), (48, 0.5), (48, 0.75)]:
    other_factor = 1 - factor
    first = mean_gradients(x[:size], y[:size])
    second = mean_gradients(x[size:], y[size:])
    found = []
    for of_first, of_second in zip(first, second):
        found.append(factor * of_first + other_factor * of_second)
    same = largest_difference(found, whole) < 1e-12
    print(f"shards of {size} and {64 - size}, factors {factor} and {other_factor}: "
          f"equal to 1e-12: {same}")
    equal.append(same)

# %% tags=["fold"]
# check: what came out
assert equal == [True, False, True]

# %% [markdown]
# <details><summary>What came out</summary>
#
# The first and the third. In the second case the last 16 images count as much as the other 48
# together. On equal shards $\frac12$ *is* the share of the images, so there the mistake doesn't
# show.
#
# </details>
#
# **If each device averages its loss, weight its gradient by $\frac{n_i}{n}$, its share of the
# images.** (The mistake with PyTorch's DDP, and a rank without any example: deeper: DDP's cases.)
#
# ## Three trainings
#
# What does the clock say? We train in three ways: on the fast device alone, with equal shards, and
# with shares by the speeds that we measured (perhaps not quite 192 and 64). Each way is a function
# that does four steps of 256 images, with a network of its own:

# %% tags=["measured", "trains"]
def four_steps(net, trainer, sizes, devices):
    for begin in [0, 256, 512, 768]:
        x = images[begin:begin + 256]
        y = labels[begin:begin + 256]
        train_step(net, trainer, x, y, sizes, devices)


fast = pair[:1]
net_1, trainer_1 = new_lenet(fast)
net_2, trainer_2 = new_lenet(pair)
net_3, trainer_3 = new_lenet(pair)
measured_sizes = shares_by_speed(256, speeds)


def fast_device_alone():
    four_steps(net_1, trainer_1, [256], fast)


def with_equal_shards():
    four_steps(net_2, trainer_2, [128, 128], pair)


def with_shares_by_speed():
    four_steps(net_3, trainer_3, measured_sizes, pair)


print("shares by speed:", measured_sizes)

# %% [markdown]
# `in_turns`, a helper, calls all three in each of nine rounds, in a random order, so that whatever
# disturbs the machine hits all alike. It returns the seconds of each:

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 1"]
from helpers.timing import in_turns, print_times, spread

ROUNDS = 9
contestants = {
    "fast device alone": fast_device_alone,
    "equal shards": with_equal_shards,
    "shares by speed": with_shares_by_speed,
}
times = in_turns(contestants, ROUNDS)

# %% [markdown]
# We print the median of a step, and in brackets the interquartile range of the rounds. As in
# chapter 04, neither of two ways is faster if their brackets overlap. **Predict:** how long does a
# step take in each way, if it takes 1 on the fast device alone?

# %% tags=["measured", "predict"]
steps = {}
for way in times:
    steps[way] = times[way] / 4  # four steps in a turn
print_times(steps)

fast_alone = spread(steps["fast device alone"])
equally = spread(steps["equal shards"])
by_speed = spread(steps["shares by speed"])
h = speeds[0] / speeds[1]
paper = 1 / (1 + 1 / h)
print(f"equal shards:    {equally.median / fast_alone.median:.2f} of alone, on paper {h / 2:.2f}")
print(f"shares by speed: {by_speed.median / fast_alone.median:.2f} of alone, on paper {paper:.2f}")
print("shares by speed are faster than the fast device alone:", by_speed.high < fast_alone.low)

# %% [markdown]
# <details><summary>What came out</summary>
#
# With equal shards a step takes longer than on the fast device alone. Shares by speed put that
# right, but they save less than on paper. The all-reduce is far too short to be the reason (chapter
# 11). Probably it is that two busy devices slow each other: in chapter 11 a step of two devices
# took longer than a step of one and the all-reduce together. With shares by speed both are busy for
# the whole step, with equal shards only for half of it. (Where the last line says False, the
# measurement can't show that the slow device saves any time at all.)
#
# </details>
#
# And who waits? Here is one single step of each of the last two ways, as MXNet's profiler recorded
# it (chapter 10):

# %% tags=["fold", "measured", "trains"]
# draw: who works when in a step with equal shards, and in one with shares by speed
from helpers.plotting import show, timeline
from helpers.trace import record

ways = {"equal shards": [128, 128], "shares by speed": measured_sizes}
panels = {}
longest = 0
busy = {}  # for what part of the step the fast device works
net, trainer = new_lenet(pair)
train_step(net, trainer, images[:256], labels[:256], [128, 128], pair)  # warms up
for name, sizes in ways.items():
    recording = record(train_step, net, trainer, images[:256], labels[:256], sizes, pair)
    rows = recording.rows
    panels[f"{name}: {sizes[0]} and {sizes[1]} images"] = {
        "fast": rows["cpu(0)"], "slow": rows["cpu(1)"]}
    longest = max(longest, recording.length)
    milliseconds = sum(event.duration for event in recording.lanes["cpu(0)"])
    busy[name] = milliseconds / recording.length
title = (f"In these two steps the fast device works for {busy['equal shards']:.0%} of the time "
         f"with equal shards,\nfor {busy['shares by speed']:.0%} with shares by speed")
fig, _ = timeline(title, panels, dict.fromkeys(panels, (0, longest + 1)))
show(fig, alt="Two timelines with a row for each device. With equal shards the fast device ends "
              "long before the slow one. With shares by speed it works for more of the step.")

# %% [markdown]
# With equal shards the fast device has nothing to do for much of the step, while the straggler does
# its three passes. With shares by speed it waits much less.
#
# ## What to do with a slow device
#
# 1. **If it is much slower, leave it out**, or let it evaluate. It saves little computing, and the
#    all-reduce that it needs takes time, too. A CPU beside a GPU is the extreme case.
# 2. **If it is nearly as fast, keep equal shards**, which are simpler. With $h = 1.1$ a step takes
#    0.55 instead of 0.52 seconds, by the count on paper.
# 3. **Otherwise cut by measured speed**, compare with the fast device alone before you keep it, and
#    train with sums, or with weighted means. If speeds change during the training, or with the
#    share (a GPU may be less efficient with 64 images than with 128), measure again (exercise 3).
#    If examples differ in length, as sentences do, then balance the work, not the number of
#    examples.
#
# (We slowed down a CPU core. On unequal GPUs we have measured nothing, so use your own speeds.)
#
# Libraries leave this to you: PyTorch's `DistributedSampler` gives all devices equally many images,
# and so does Gluon's `split_and_load` (with `even_split=False` nearly so).
#
# No cut helps where a *different* device is late in each step, for example because of the network
# between machines. One way out is to start a few more workers than needed, and to make each step
# with the gradients that come first (**backup workers**; Chen et al., *Revisiting Distributed
# Synchronous SGD*, 2016). With asynchronous training nobody waits at all, but gradients are old
# (deeper: The parameter server).
#
# ## Summary
#
# - A step takes as long as its slowest device, the straggler. With equal shards a device that is
#   three times as slow makes two devices slower than one.
# - Load balancing: shares in proportion to measured speeds, in whole images that add up to the
#   batch. Whether the slow device saves any time then has to be measured.
# - Sums, divided once by $n$, are right for any cut. Means need the weights $\frac{n_i}{n}$.
# - A device that is much slower than the others is better left out.
#
# Next, chapter 13: the same in PyTorch.

# %% [markdown]
# ## Exercises
#
# 1. **The largest remainder.** Write `cut(n, speeds)` in another way: round each exact share down,
#    then give one image each to the devices with the largest remainders, the lower number first if
#    two have the same. Compare it with `shares_by_speed` for 10 images on four equal devices, and
#    for 4 images and the speeds 7, 6 and 7. Which is closer to the exact shares?
# 2. **Whom to leave out.** Shares are by speed, and the all-reduce takes $c$ seconds for each
#    device beyond the first. Given $n$, the speeds and $c$, which devices should train?
# 3. **Follow the speed.** Divide each batch by the speeds just seen, $n_i / t_i$, where $t_i$ is
#    device $i$'s time for its shard. In a simulation that begins with equal shares, let one device
#    be three times as slow, or have a fixed cost of 60 ms in each step. Where do the shares settle?
#    What happens if $t_i$ is the time of the *whole step*?

# %% [markdown]
# ### Answer to *Your turn*
#
# A running sum of the speeds, and its end rounded. Each shard begins where the one before ended.

# %% tags=["solution", "your-turn"]
def shares_by_speed(n, speeds):
    sizes = []
    begin = 0
    speed_so_far = 0
    for speed in speeds:
        speed_so_far += speed
        end = round(n * speed_so_far / sum(speeds))
        sizes.append(end - begin)
        begin = end
    return sizes


your_turn(shares_by_speed, share_cases)

# %% [markdown]
# ### Answer 1
#
# `_split_input_slice` is what `Module` uses, MXNet's interface before Gluon. It rounds each share,
# and the last device gets what is left over.

# %% tags=["solution"]
from mxnet.executor_manager import _split_input_slice


def cut(n, speeds):
    exact = [n * speed / sum(speeds) for speed in speeds]
    sizes = [int(share) for share in exact]  # rounded down
    remainders = [share - size for share, size in zip(exact, sizes)]
    left_over = n - sum(sizes)
    # `sorted` keeps the order of equal ones, so the lower number comes first.
    largest_first = sorted(range(len(speeds)), key=lambda rank: -remainders[rank])
    for rank in largest_first[:left_over]:
        sizes[rank] += 1
    return sizes


for n, given in [(10, [1, 1, 1, 1]), (4, [7, 6, 7])]:
    slices = _split_input_slice(n, given)
    print(n, "images, speeds", given)
    print("    largest remainder:", cut(n, given))
    print("    shares_by_speed:  ", shares_by_speed(n, given))
    print("    Module:           ", [part.stop - part.start for part in slices])
assert cut(10, [1, 1, 1, 1]) == [3, 3, 2, 2]
assert cut(4, [7, 6, 7]) == [2, 1, 1]

# %% [markdown]
# In the second case the exact shares are 1.4, 1.2 and 1.4. The largest remainder is closer, while
# rounded ends give most images to the slowest device. In a batch of 256 one image more or less
# makes little difference.

# %% [markdown]
# ### Answer 2
#
# For a given number of devices the fastest are best, because only the sum of their speeds counts.
# So try the fastest one, the fastest two, and so on.

# %% tags=["solution"]
def who_trains(n, speeds, c):
    fastest_first = sorted(speeds, reverse=True)
    best = None
    for k in range(1, len(speeds) + 1):
        seconds = n / sum(fastest_first[:k]) + c * (k - 1)
        if best is None or seconds < best:
            best = seconds
            team = fastest_first[:k]
    return team


print(who_trains(256, [1600, 1600, 800, 100], c=0.005))
assert who_trains(256, [1600, 1600, 800, 100], c=0.005) == [1600, 1600, 800]

# %% [markdown]
# ### Answer 3
#
# The shares follow, and they settle where all devices take equally long, unless a fixed cost is too
# large (last line).

# %% tags=["solution"]
def follow(speeds, fixed):
    """Shares of 256 images on two devices, after 400 steps; and the seconds of each."""
    sizes = [128, 128]
    for step in range(400):
        seconds = [fixed[rank] + sizes[rank] / speeds[rank] for rank in [0, 1]]
        seen = [sizes[rank] / seconds[rank] for rank in [0, 1]]
        sizes = [256 * speed / sum(seen) for speed in seen]
    return sizes, seconds


for speeds_of_two, fixed in [([1600, 1600], [0, 0]), ([1600, 533], [0, 0]),
                             ([1600, 1600], [0, 0.06]), ([1600, 1600], [0, 0.3])]:
    sizes, seconds = follow(speeds_of_two, fixed)
    print(f"speeds {speeds_of_two}, fixed {fixed}: shares {sizes[0]:.0f} and {sizes[1]:.0f}, "
          f"{seconds[0]:.3f} s and {seconds[1]:.3f} s")

# %% [markdown]
# A device whose fixed cost alone exceeds the time of the other for the whole batch ends without any
# image. Keep exact shares from step to step, and round only to cut: if the shares themselves are
# rounded, a change of less than half an image is lost.
#
# The step ends with the all-reduce, in which all wait for each other. So all whole steps take
# equally long: $n_i / t_i$ is in proportion to $n_i$, and the shares stay wherever they are.
# Measure each device by itself, before the all-reduce.
