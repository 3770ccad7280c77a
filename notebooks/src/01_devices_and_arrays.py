# %% [markdown]
# # 01 · Devices and arrays
#
# With a second device, training can take half the time. To get there, you must know where each
# array is, when its computation is done, and what a copy costs.
#
# ![Device 0 has x = 1 and 2, device 1 has 3 and 4, each with a copy of w = 0. Their gradients, −30
# and −150, are added. The sum, −180, goes to both, and both have w =
# 1.8.](src/drawings/one_weight.svg)
#
# > **What you'll do:** train a model with one weight on two devices, time copies, and find errors
# > that appear at the wrong line.
# >
# > **What you'll learn:** where an array, its gradient and what you load from a file live, and what
# > a copy costs; why Python goes on while devices work, and what that means for clocks and errors.
# >
# > **What you need:** Python and NumPy. **No GPU.** Reading takes {reading time}, running less than
# > a minute. Folded cells check what the text says, and say where it comes from. If one prints
# > nothing, it has found nothing wrong.

# %% [markdown]
# ## One weight on two devices
#
# A *device* is something with memory and cores. `devices(2)` returns two GPUs if MXNet can use
# two. Otherwise it returns two *simulated* devices, `cpu(0)` and `cpu(1)`, which share one memory.
# Import `helpers` before `mxnet`: it makes settings, such as one core for each device, that MXNet
# reads while it loads.

# %% tags=["measured"]
from helpers import devices

import mxnet as mx
from mxnet import autograd, nd

two = devices(2)
a = nd.array([1, 2, 3], ctx=two[1])
print(a)

# %% [markdown]
# After the `@` stands the array's device, its *context*. An operation runs on the device that holds
# its inputs, and leaves its result there.

# %%
b = nd.exp(a) * 2 + 1
print("on the same device:", b.context == two[1])

# %% [markdown]
# Now the four examples of the picture, two on each device; for each, $y = 3x$. The model is $wx$.
# Each device gets a copy of its weight, a *replica*. `attach_grad` sets memory aside for the
# gradient, on the same device.

# %%
x_shards = [nd.array([1, 2], ctx=two[0]), nd.array([3, 4], ctx=two[1])]
y_shards = [3 * x_shards[0], 3 * x_shards[1]]
weights = [nd.zeros(1, ctx=two[0]), nd.zeros(1, ctx=two[1])]
for weight in weights:
    weight.attach_grad()

# %% [markdown]
# By hand, the gradient of $(wx - y)^2$ at $w = 0$ is $-2xy$. So the first device has
# $-2\,(1 \cdot 3 + 2 \cdot 6) = -30$, and the second −150. PyTorch notes what is computed at
# all times, MXNet only within `record`. Then `backward` writes the gradient. (It overwrites the old
# one, without a `zero_grad`.)

# %%
def find_gradients():
    for x, y, weight in zip(x_shards, y_shards, weights):  # for each device
        with autograd.record():
            loss = ((weight * x - y) ** 2).sum()
        loss.backward()


find_gradients()
first = weights[0].grad
second = weights[1].grad
print(first.asscalar(), "and", second.asscalar())

# %% tags=["fold"]
# check: the gradients are those of the picture, each on the device of its weight
assert b.context == two[1], "a result is where its inputs are"
assert [first.asscalar(), second.asscalar()] == [-30, -150]
assert [first.context, second.context] == two and two[0] != two[1]

# %% [markdown]
# For the gradient of all four examples we add the two. One must move first: `as_in_context` brings
# the second to the first device.

# %%
total = first + second.as_in_context(two[0])
print(total.asscalar())

# %% [markdown]
# ### When arrays on two devices meet
#
# What if you forget to move? We try it on a `pair` of devices that is simulated on every machine:

# %%
pair = [mx.cpu(0), mx.cpu(1)]
here = nd.array([1, 2, 3], ctx=pair[0])
there = nd.array([10, 20, 30], ctx=pair[1])
print(here + there)

# %% tags=["fold"]
# check: the sum of the gradients, and the sum across simulated devices
# On GPUs: GetContext in src/imperative/imperative_utils.h (MXNet 1.9.1) compares kinds of devices.
# Reports of what two GPUs do: issues 18265, 11275 and 21119 of apache/mxnet.
assert total.asscalar() == -180 and total.context == two[0]
assert (here + there).asnumpy().tolist() == [11, 22, 33]

# %% [markdown]
# The sum is right, since simulated devices share memory. On them a forgotten move can't be seen.
#
# **On GPUs, always move:** `a + b.as_in_context(a.context)`. MXNet 1.9.1 compares only *kinds* of
# devices: to add arrays of a GPU and a CPU raises at once. Those of two GPUs pass this check, and
# users report a right sum, an error that comes later, or a crash.
#
# ### Twenty steps
#
# Both replicas make the same step, $w \leftarrow w - 0.01 \cdot \text{sum}$. It is the step that
# one device would make with all four examples. The sum is made on the first device and moves to
# each. `weight[:] =` writes into a replica. (Nothing is recorded here, so there is no `no_grad`.)

# %%
def step_on_both():
    find_gradients()
    first = weights[0].grad
    second = weights[1].grad.as_in_context(two[0])
    total = first + second
    for weight in weights:
        total_here = total.as_in_context(weight.context)
        weight[:] = weight - 0.01 * total_here


# %% tags=["trains"]
for weight in weights:
    weight[:] = 0  # so that this cell can be run again

for step in range(20):
    step_on_both()
    if step in [0, 1, 2, 19]:
        print(f"step {step:2}: w = {weights[0].asscalar():.4f} and {weights[1].asscalar():.4f}")

# %% tags=["fold"]
# check: each step is that of one device with all four examples, on both replicas
alone = nd.zeros(1)
alone.attach_grad()
x = nd.array([1, 2, 3, 4])
for weight in weights:
    weight[:] = 0
for step in range(20):
    with autograd.record():
        loss = ((alone * x - 3 * x) ** 2).sum()
    loss.backward()
    alone -= 0.01 * alone.grad
    step_on_both()
    for weight, device in zip(weights, two):
        assert abs(weight.asscalar() - alone.asscalar()) < 1e-6, f"step {step}"
        assert weight.context == device and weight.grad.context == device
    assert weights[0].asscalar() == weights[1].asscalar(), "the replicas stay equal"
    assert step > 0 or abs(alone.asscalar() - 1.8) < 1e-6, "the picture"
assert abs(alone.asscalar() - 3) < 1e-6, "not y = 3x"

# %% [markdown]
# This is *data parallelism*. In each step:
#
# 1. each device holds a *replica* of the model;
# 2. the batch is cut into *shards*, one for each device (chapter 02);
# 3. each device computes the gradient of its shard, all at the same time;
# 4. every device receives the sum of these gradients (chapter 03);
# 5. every device makes the same update, so the replicas stay equal (chapter 04).
#
# Other ways are in deeper: Three ways to divide a network.

# %% [markdown]
# ## Where an array lives
#
# Where is an array if you don't say where? On `cpu(0)`, also on a machine with GPUs. **Predict:**
# what does `a` hold at the end?

# %%
a = nd.array([1, 2, 3])
same = a.as_in_context(mx.cpu(0))
moved = a.as_in_context(mx.cpu(1))
same[0] = 100
moved[0] = 50
print("a is on", a.context, "and holds", a.asnumpy())
print("the same object?", same is a, moved is a)

# %% tags=["fold"]
# check: as_in_context returns the array itself where there is nothing to move
assert (a.context, moved.context) == (mx.cpu(0), mx.cpu(1)) and mx.cpu() == mx.cpu(0)
assert same is a and moved is not a
assert (a.asnumpy().tolist(), moved.asnumpy().tolist()) == ([100, 2, 3], [50, 2, 3])

# %% [markdown]
# `a` was already on `cpu(0)`. So `same` is `a`, and writing to it changed `a`. `moved` is a copy.
# `copyto` always copies. It takes a device, or an array that it fills:

# %%
a = nd.array([1, 2, 3])
duplicate = a.copyto(mx.cpu(0))
duplicate[0] = 100
print("a holds", a.asnumpy())

target = nd.zeros(3, ctx=mx.cpu(1))
a.copyto(target)
print("target holds", target.asnumpy(), "on", target.context)

# %% tags=["fold"]
# check: copyto copies on the same device, and returns the array that it was given
assert (a.asnumpy().tolist(), duplicate.asnumpy().tolist()) == ([1, 2, 3], [100, 2, 3])
assert a.copyto(target) is target and target.context == pair[1]
assert target.asnumpy().tolist() == [1, 2, 3]

# %% [markdown]
# So use `as_in_context` to *read*, and `copyto` if you will *write* to the array or its copy. The
# gradient doesn't travel with its array:

# %%
weight = nd.array([1, 2, 3], ctx=pair[0])
weight.attach_grad()
replica = weight.copyto(pair[1])
print("the copy's gradient:", replica.grad)
replica.attach_grad()
print("now on", replica.grad.context)

# %% tags=["fold"]
# check: a copy has no gradient memory until it is attached, and a gradient is with its array
assert weight.copyto(pair[1]).grad is None and weight.as_in_context(pair[1]).grad is None
assert (weight.grad.context, replica.grad.context) == (pair[0], pair[1])

# %% [markdown]
# For a replica: move first, then attach. **Predict:** `weight` is on `cpu(1)`. Where is it after it
# has been saved and loaded?

# %%
import tempfile

weight = nd.array([1, 2, 3], ctx=pair[1])
with tempfile.TemporaryDirectory() as folder:
    nd.save(f"{folder}/weight.params", [weight])  # a list of arrays
    loaded = nd.load(f"{folder}/weight.params")
print("saved and loaded:", loaded[0].context)

# %% tags=["fold"]
# check: saved, pickled or deep-copied, it comes back on cpu(0), with its values
# NDArray::Load in src/ndarray/ndarray.cc (MXNet 1.9.1) reads into cpu(0), and moves to GPUs only.
import copy
import pickle

assert weight.context == pair[1]
for again in [loaded[0], pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight)]:
    assert again.context == mx.cpu(0) and again.asnumpy().tolist() == [1, 2, 3]

# %% [markdown]
# On `cpu(0)`: MXNet reads saved values into it, whichever CPU context they had. So move what you
# have loaded. (`pickle` and `copy.deepcopy` do the same.) **On GPUs:** a build with CUDA then
# copies the array to the GPU whose number was saved.

# %% [markdown]
# ## Work that isn't done yet
#
# When Python comes back from `nd.dot`, is the product there? We read the clock after the call, and
# again after `wait_to_read`, which returns once the values exist. **Predict:** does the call take
# about as long as the product?

# %% tags=["measured"]
from time import perf_counter

A0 = nd.random.uniform(shape=(1200, 1200), ctx=two[0])
A0.wait_to_read()

begin = perf_counter()
product = nd.dot(A0, A0)
called = perf_counter() - begin
product.wait_to_read()
done = perf_counter() - begin
print(f"the call returned after {called * 1e3:.2f} ms")
print(f"the product was there after {done * 1e3:.2f} ms")

# %% [markdown]
# The call only puts the work into the device's queue. The device takes it from there, and Python
# goes on:
#
# ![After two calls, product p1 runs on the first device and p2 on the second. After four calls p3
# and p4 wait in the queues, and Python is already at the next
# line.](src/drawings/two_queues.svg)
#
# This is *asynchrony*. The loop in `find_gradients` keeps both devices busy at the same time. **An
# operation starts only when its inputs are ready**, also when they come from the other device's
# queue. So `step_on_both` adds the right gradients, and Python needn't wait for them. Here are the
# four products of the picture, recorded:

# %% tags=["fold"]
# draw: four products on two devices, and Python's calls, as recorded
from helpers.plotting import GREY, show, timeline
from helpers.trace import record

halves = [A0.copyto(device) for device in pair]
for half in halves:
    nd.dot(half, half)
nd.waitall()


def four_products():
    for rank in [0, 1, 0, 1]:
        nd.dot(halves[rank], halves[rank])


recording = record(four_products)
lanes = recording.rows  # for each lane: start, length and kind
returned = recording.handed_out
last = max(event.end for event in recording.events)
title = f"Four calls return in {returned:.1f} ms, the devices work for {last:.0f} ms"
fig, axes = timeline(title, {"": lanes})
axes[0].axvline(returned, color="black", ls="--", lw=1)
axes[0].plot([returned / 2] * 2, [-0.3, 0.3], color=GREY, lw=5)  # too short to be seen otherwise
axes[0].text(returned + last / 60, 0.1, "all calls have returned, Python goes on", fontsize=9)
for rank in range(2):
    for number, (start, length, _) in enumerate(lanes[f"cpu({rank})"]):
        axes[0].text(start + length / 2, rank + 1, f"p{2 * number + rank + 1}", color="white",
                     ha="center", va="center")
        axes[0].plot([start, start], [rank + 0.6, rank + 1.4], color="white", lw=2)
show(fig, alt="A timeline with a row for Python and one for each device. Python's four calls end "
              "at the left edge; each device then computes two products, one after the other.")

# %% tags=["fold"]
# check: two products on each device, one after the other; all calls were back before one ended
for rank in range(2):
    (start, length, _), (following, *_) = lanes[f"cpu({rank})"]
    assert -1 < start and start + length <= following + 0.1, "one after the other"
    assert returned < start + length, "Python waited"
starts = [lanes[f"cpu({rank})"][1][0] for rank in range(2)]
assert max(start for start, *_ in [lanes["cpu(0)"][0], lanes["cpu(1)"][0]]) < min(starts), (
    "a device waited for the other")

# %% [markdown]
# Do two products take half as long on two devices as on one? Medians and quartiles of ten rounds:

# %% tags=["fold", "measured", "few:rounds=10=>rounds=3"]
# measure: two products on one device, and one on each of two
from helpers.timing import in_turns, print_times, spread

A1 = A0.as_in_context(two[1])


def both_on_one():
    nd.dot(A0, A0)
    nd.dot(A0, A0)


def one_on_each():
    nd.dot(A0, A0)
    nd.dot(A1, A1)


times = in_turns({"both on one": both_on_one, "one on each": one_on_each}, rounds=10)
print_times(times)
ratio = spread(times["both on one"]).median / spread(times["one on each"]).median
print(f"two devices are {ratio:.2f} times as fast as one")

# %% [markdown]
# If two cores were free, that is near 2. If another program kept one busy, it is less.
#
# So when does Python wait?
#
# - `nd.waitall()` waits for all work on all devices.
# - Calls that need values wait for these: `x.asnumpy()`, `x.asscalar()`, `print(x)`, `if x:`.
# - Most operators don't wait, nor do `as_in_context`, `copyto` and `backward()`.
#
# So **wait before you stop a clock**, or you measure how fast Python fills the queues.

# %% tags=["fold"]
# check: what waits and what doesn't, measured with a slow product; inputs are waited for
# On simulated devices wait_to_read may also wait for other work on cpu(0), where MXNet 1.9.1 queues
# the wait (WaitForVar in src/engine/threaded_engine.cc); there is none here.
big = nd.ones((1000, 1000), ctx=pair[1])


def waits(call):
    """Whether `call` takes most of the time until its product is there, or hardly any of it.

    What waits does so every time; what doesn't may be held up once, by other work on this machine.
    """
    shares = []
    for _ in range(5):
        nd.waitall()
        begin = perf_counter()
        call(nd.dot(big, big))
        called = perf_counter() - begin
        nd.waitall()
        shares.append(called / (perf_counter() - begin))
    share = min(shares)
    assert share < 0.2 or share > 0.45, f"neither: {share:.0%}"
    return share > 0.45


def square_and_back(weight):
    weight.attach_grad()
    with autograd.record():
        loss = nd.dot(weight, weight).sum()
    loss.backward()


for call in [lambda x: x.wait_to_read(), lambda x: x.asnumpy(), lambda x: x[0, 0].asscalar(),
             lambda x: str(x), lambda x: bool(x[0, 0] > 0), lambda x: nd.waitall()]:
    assert waits(call)
for call in [lambda x: x, lambda x: x + 1, lambda x: x.as_in_context(pair[0]),
             lambda x: x.copyto(pair[0]), square_and_back]:
    assert not waits(call)

# The product is in one device's queue, its sum with 1 in the other's; nobody waits in between.
# (Operators count the inputs that they wait for: OprBlock in src/engine/threaded_engine.h.)
for _ in range(5):
    following = nd.dot(big, big).as_in_context(pair[0]) + 1
    assert following.min().asscalar() == 1001, "it began before its input was ready"

# %% [markdown]
# ## Errors that come late
#
# Wrong shapes raise at the call. Errors that depend on *values* come when the work is done. Here,
# `tell` runs a function and prints the last line of its error:

# %%
def tell(what, function):
    try:
        function()
        print(f"{what}: no error")
    except mx.MXNetError as error:
        print(f"{what}: {str(error).splitlines()[-1]}")

# %% [markdown]
# A normal distribution can't have a negative width. We ask for such numbers, add 1, and wait three
# times. **Predict:** which of the waits raise?

# %%
noise = nd.random.normal(0, -1, shape=(2, 2), ctx=pair[0])  # a width of -1
shifted = noise + 1
print("Python is here")
tell("wait", shifted.wait_to_read)
tell("wait again", shifted.wait_to_read)
tell("noise itself", noise.wait_to_read)

# %% [markdown]
# Only the first. `shifted` needs `noise`, so the error was passed on to it, and `noise` no longer
# has it. It comes out where we wait, and only once. After that both look like good arrays, but were
# never computed.
#
# Now **two** operations fail: the second, `take`, asks for entry 7 of an array of three. We read
# only the first. **Predict:** which of the two calls of `waitall` raises?

# %%
def fail_twice():
    noise = nd.random.normal(0, -1, shape=(2, 2), ctx=pair[0])
    three_entries = nd.arange(3, ctx=pair[0])
    entry = nd.take(three_entries, nd.array([7]), mode="raise")  # there is no entry 7
    return noise, entry


noise, entry = fail_twice()
tell("read noise", noise.asnumpy)
tell("waitall", nd.waitall)
tell("waitall again", nd.waitall)

# %% [markdown]
# The first, since nobody had read `entry`. If `waitall` comes before any read, it raises one error
# and *forgets the other*:

# %%
noise, entry = fail_twice()
tell("waitall", nd.waitall)
tell("read noise", noise.asnumpy)
tell("read entry", entry.asnumpy)

# %% tags=["fold"]
# check: what is raised where, in five runs of each order
def raised(function):
    try:
        function()
    except mx.MXNetError as error:
        return next(word for word in ["scale", "indices", "shape"] if word in str(error).lower())
    return None


assert raised(lambda: nd.ones(2) + nd.ones(3)) == "shape", "a wrong shape raises at the call"
for _ in range(5):
    noise = nd.random.normal(0, -1, shape=(2, 2), ctx=pair[0])
    shifted = noise + 1
    assert [raised(array.wait_to_read) for array in [shifted, shifted, noise]] == [
        "scale", None, None]
    noise, entry = fail_twice()
    good = nd.ones(3) + 1
    found = [raised(call) for call in [noise.asnumpy, good.asnumpy, nd.waitall, nd.waitall]]
    assert found == ["scale", None, "indices", None]
    noise, entry = fail_twice()
    assert [raised(array.asnumpy) for array in [entry, noise]] == ["indices", "scale"]
    assert raised(nd.waitall) is None
    noise, entry = fail_twice()
    found = [raised(call) for call in [nd.waitall, nd.waitall, noise.asnumpy, entry.asnumpy]]
    assert found == ["scale", None, None, None]
    kept = [fail_twice(), fail_twice()]
    assert [raised(nd.waitall), raised(nd.waitall)] == ["scale", None], "one clears all four"
    for array in [*kept[0], *kept[1]]:
        assert raised(array.asnumpy) is None, "an error was left over"
# So says ThreadedEngine::WaitForAll in src/engine/threaded_engine.cc (MXNet 1.9.1), too.

# %% [markdown]
# One `waitall` raises at most one error, and clears all. So **after an `MXNetError`, call
# `nd.waitall()` inside a `try`**: whether it raises or not, no old error is left. Then start again
# from data that you trust.
#
# ### Find the line
#
# The line that failed is *above* the one that raises. The part of MXNet that runs the
# queues is its *engine*. Another one, `NaiveEngine`, does all work in the call itself: slow, but
# good for finding a mistake. It must be chosen before MXNet starts:
# `MXNET_ENGINE_TYPE=NaiveEngine python train.py`. We run this program with both engines:

# %%
program = """import helpers
from mxnet import nd

noise = nd.random.normal(0, -1, shape=(2, 2))
shifted = noise + 1
print(shifted.asnumpy())
"""

# %% tags=["fold"]
# measure: at which line of the program the error comes out, with each engine
import os
import re
import subprocess
import sys
from pathlib import Path

FAILS_AT = {"ThreadedEnginePerDevice": 6, "NaiveEngine": 4}
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "train.py")
    path.write_text(program)
    searched = os.pathsep.join(place for place in sys.path if place)
    children = {}
    for engine in FAILS_AT:
        settings = {**os.environ, "MXNET_ENGINE_TYPE": engine, "PYTHONPATH": searched}
        children[engine] = subprocess.Popen([sys.executable, path], env=settings, text=True,
                                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for engine, child in children.items():
        said = child.communicate(timeout=300)[1]
        assert child.returncode == 1 and "scale parameter" in said, said
        number = int(re.search(r'train\.py", line (\d+)', said)[1])
        print(f"{engine:23}  line {number}: {program.splitlines()[number - 1]}")
        assert number == FAILS_AT[engine], "another line"
# %% [markdown]
# The usual engine, `ThreadedEnginePerDevice`, points at the line that waits, `NaiveEngine` at the
# one with the mistake.

# %% [markdown]
# ## What a copy costs
#
# How long does a copy from one device to the other take? We copy four sizes (a KB is 1,000
# bytes). The helper `in_turns` calls the functions of a dictionary in turn, for thirty
# rounds, and waits for all work before it starts or stops its clock. `spread` gives median and
# quartiles, and `print_times` prints them. **Predict:** the largest copy has 16,000 times the bytes
# of the smallest. How many times as long does it take?

# %% tags=["measured", "few:rounds=30=>rounds=10"]
from functools import partial

from helpers.timing import in_turns, print_times, spread

SIZES = {"4 KB": 4_000, "64 KB": 64_000, "1 MB": 1_000_000, "64 MB": 64_000_000}

copies = {}  # for each size a function that makes one copy
for name, nbytes in SIZES.items():
    source = nd.ones(nbytes // 4, ctx=two[0])  # a float32 has 4 bytes
    target = nd.zeros(nbytes // 4, ctx=two[1])
    copies[name] = partial(source.copyto, target)  # calling it calls source.copyto(target)

times = in_turns(copies, rounds=30)
print_times(times)
smallest = spread(times["4 KB"]).median
largest = spread(times["64 MB"]).median
print(f"64 MB take {largest / smallest:,.0f} times as long as 4 KB")

# %% tags=["fold", "measured"]
# check: a copy of 64 KB takes less than 8 times as long as one of 4 KB, with 16 times the bytes
# For 64 MB after 1 MB it is over 16 times. By the fastest, which other work delays least.
fastest = {name: min(times[name]) for name in SIZES}
of_small = fastest["64 KB"] / fastest["4 KB"]
of_large = fastest["64 MB"] / fastest["1 MB"]
assert of_small < 8 and of_large > 16

# %% [markdown]
# **A copy has a fixed cost, whatever its size; for large ones the bytes count, too.** (Chapter 03
# calls the fixed cost *latency*. By their medians, two small sizes may change places: that is
# noise.) Each of
# these copies was started and waited for. **Predict:** what is cheaper, eight copies of 64 KB that
# are waited for together, or one of 512 KB?

# %% tags=["fold", "measured", "few:rounds=50=>rounds=20"]
# measure: one copy of 64 KB, eight of them, and one with the bytes of all eight
sources = []
targets = []
for _ in range(8):
    sources.append(nd.ones(16_000, ctx=two[0]))
    targets.append(nd.zeros(16_000, ctx=two[1]))
large_source = nd.ones(8 * 16_000, ctx=two[0])
large_target = nd.zeros(8 * 16_000, ctx=two[1])


def eight_copies():
    for source, target in zip(sources, targets):
        source.copyto(target)


def one_copy():
    large_source.copyto(large_target)


assert large_source.size == sum(source.size for source in sources), "as many bytes"
eight_copies()
one_copy()
for target in [*targets, large_target]:
    assert target.min().asscalar() == 1, "a copy has not arrived"
ways = {"one of 64 KB": partial(sources[0].copyto, targets[0]), "eight of 64 KB": eight_copies,
        "one of 512 KB": one_copy}
times_of_eight = in_turns(ways, rounds=50)
print_times(times_of_eight)
eight = min(times_of_eight["eight of 64 KB"])
large = min(times_of_eight["one of 512 KB"])
print(f"in the fastest rounds the eight took {eight / large:.1f} times as long as the large one")
assert large < eight, "one large copy is cheaper than eight small ones"

# %% [markdown]
# The one large copy, at least in the fastest rounds. The eight needn't take eight times as long as
# one: each has its own start, but they share one wait. So **send few, large arrays**. **On GPUs** a
# copy crosses a link between them, so measure there.

# %% [markdown]
# ## Summary
#
# - Data parallelism: a replica and a shard on each device, summed gradients, the same update.
# - An operation runs where its inputs are, once they are ready. Move arrays before they meet.
# - `as_in_context` returns the same array if nothing needs to move. A copy has no gradient memory.
# - Most operators return before they are done. Wait before you stop a clock.
# - An error that depends on values comes out where you wait, or never. Clear with `waitall`; find
#   the line with `NaiveEngine`.
# - A copy has a fixed cost, and its bytes: send few, large arrays.
#
# **Further reading.** A. Zhang et al., *Dive into Deep Learning*, "Asynchronous Computation" and
# "Training on Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **A lost gradient.** Move an array with a gradient to the other device *before* `record()`,
#    and compute a loss from it there. Where does its gradient end up?
# 2. **The line above.** Write `first_failing(calls)`, which takes a list of functions, runs them in
#    order, and returns the place of the first whose work fails, or None. Use the usual engine.
# 3. **Your own machine (open).** Measure the copies again while another program keeps a core busy,
#    and for copies within one device. Then time eight arrays of 64 KB copied into one, sent, and
#    copied out again, all of it on the clock. Is that cheaper than eight copies?

# %% [markdown]
# ### Answer 1
#
# Nowhere: `backward` raises, since nothing in the loss has a gradient attached; the move was not
# recorded. Give the moved array one, and the error is gone. The original's gradient is still 0,
# and nothing is said.

# %% tags=["solution"]
v = nd.array([1, 2], ctx=two[0])
v.attach_grad()
moved = v.copyto(two[1])
with autograd.record():
    loss = (moved * moved).sum()
try:
    loss.backward()
    raise RuntimeError("backward should find nothing to differentiate")
except mx.MXNetError as error:
    print("without a gradient of its own:", str(error).splitlines()[-1][:60])

moved.attach_grad()
with autograd.record():
    loss = (moved * moved).sum()
loss.backward()
print("gradient of the moved array:", moved.grad.asnumpy())
print("gradient of the original:   ", v.grad.asnumpy())
assert moved.grad.asnumpy().tolist() == [2, 4], "the derivative of the sum of v² is 2v"
assert v.grad.asnumpy().tolist() == [0, 0], "the move was not recorded"

# %% [markdown]
# ### Answer 2
#
# Wait after each one. What failed earlier must be cleared first, or its error is taken for that of
# the first call.

# %% tags=["solution"]
def first_failing(calls):
    clear()
    for place, call in enumerate(calls):
        try:
            call()
            nd.waitall()
        except mx.MXNetError:
            clear()
            return place
    return None


def clear():
    try:
        nd.waitall()
    except mx.MXNetError:
        pass  # it has cleared the others, too


def fine():
    return nd.ones(3) + 1


fail_twice()  # and nobody waits
assert first_failing([fine, fine]) is None, "an earlier error was taken for that of a call"
assert first_failing([fine, fail_twice, fine, fail_twice]) == 1
assert first_failing([fine, fine, lambda: nd.ones(2) + nd.ones(3)]) == 2, "at the call"

# %% [markdown]
# ### Answer 3
#
# A good answer lets the cases take turns, gives medians with their spread, and says which
# differences are larger than it. It counts the copies into the one array and out of it,
# and doesn't name a cause that it hasn't tested.
