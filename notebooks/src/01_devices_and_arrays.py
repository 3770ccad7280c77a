# %% [markdown]
# # 01 · Devices and arrays
#
# A second device can save time in training, but only while both devices work at the same time.
# **When does that happen?**
#
# > **What you'll do:** train one weight on two devices; record who works when; let both work at the
# > same time, and see what stops that.
# >
# > **What you'll learn:** where an array and its gradient live; why Python goes on while devices
# > work, and what follows for clocks, copies and errors.
# >
# > **What you need:** Python and NumPy. **No GPU.** Reading takes {reading time}, running about
# > ten seconds.
#
# ## One weight on two devices
#
# ![Device 0 has x = 1 and 2, device 1 has 3 and 4, each with a copy of w = 0. Their gradients, −30
# and −150, are added. The sum, −180, goes to both, and both have w =
# 1.8.](src/drawings/one_weight.svg)
#
# The model is $wx$, and in all four examples $y = 3x$. Each device gets two of them, its **shard**,
# and a copy of the weight, a **replica**.
#
# A **device** has memory and cores of its own, such as the GPUs `mx.gpu(0)` and `mx.gpu(1)`. (In a
# terminal, `nvidia-smi` lists NVIDIA GPUs and shows how busy each is.) We take two *simulated*
# devices: they compute on one core each and share the machine's memory. Import `helpers` before
# `mxnet`, because it sets environment variables that MXNet reads on import.

# %%
from helpers import your_turn

import mxnet as mx
from mxnet import autograd, nd

pair = [mx.cpu(0), mx.cpu(1)]
a = nd.array([1, 2, 3], ctx=pair[1])
print(2 * a)
print("without ctx:", nd.array([1, 2, 3]).context)

# %% [markdown]
# After the `@` stands the array's device, its **context**. An operation runs on the device of its
# inputs, and its result stays there. Without `ctx` an array is on `cpu(0)`, even if there are GPUs.
#
# Here are the shards and the replicas. `attach_grad` gives a weight a buffer for its gradient.

# %%
x_shards = [nd.array([1, 2], ctx=pair[0]), nd.array([3, 4], ctx=pair[1])]
y_shards = [3 * x_shards[0], 3 * x_shards[1]]
weights = [nd.zeros(1, ctx=pair[0]), nd.zeros(1, ctx=pair[1])]
for weight in weights:
    weight.attach_grad()

# %% [markdown]
# By hand, the gradient of $(wx - y)^2$ at $w = 0$ is $-2xy$. So the first device has
# $-2\,(1 \cdot 3 + 2 \cdot 6) = -30$, and the second −150. MXNet records operations for the
# backward pass only inside `autograd.record()`. Then `backward` writes the gradient over the old
# one, so none has to be set to zero first.

# %%
def find_gradients(x_shards, y_shards, weights):
    for x, y, weight in zip(x_shards, y_shards, weights):  # for each device
        with autograd.record():
            loss = ((weight * x - y) ** 2).sum()
        loss.backward()


find_gradients(x_shards, y_shards, weights)
for weight in weights:
    print(weight.grad.asscalar(), "on", weight.grad.context)

# %% [markdown]
# The gradient of all four examples is the sum of the two. To be added, both must be on one device,
# so `as_in_context` moves the second:

# %%
first = weights[0].grad
second = weights[1].grad.as_in_context(pair[0])
print(first + second)
print("without a move:", (first + weights[1].grad).asscalar())

# %% [markdown]
# Without a move the sum is right, too, but only because simulated devices share memory. **On GPUs,
# always move.** MXNet 1.9.1 doesn't refuse to add arrays of two GPUs, and users report an error
# that comes later (apache/mxnet issue 18265) or a crash (issue 21119). (If there is nothing to
# move, `as_in_context` returns the array itself; `copyto` always copies. See deeper: MXNet's
# surprises.)
#
# ### Your turn: a step
#
# Both replicas take the same step, $w \leftarrow w - 0.01 \cdot \text{sum}$. Write it before you
# scroll on. The weights that your function gets have no gradient buffers yet, so attach them.

# %% tags=["fold", "your-turn"]
# define: cases for your step: x, y and weights of both devices, and the weights that are due
def on_both(first, second):
    return [nd.array(first, ctx=pair[0]), nd.array(second, ctx=pair[1])]


x_of_both = on_both([1, 2], [3, 4])
y_of_both = on_both([3, 6], [9, 12])
cases = [
    ((x_of_both, y_of_both, on_both([0], [0])), on_both([1.8], [1.8])),
    ((on_both([1], [2, 5]), on_both([3], [6, 15]), on_both([2], [2])), on_both([2.6], [2.6])),
    ((x_of_both, y_of_both, on_both([3], [3])), on_both([3], [3])),
]

# %% tags=["your-turn"]
def one_step(x_shards, y_shards, weights):
    """Return both weights, a list, after a step with learning rate 0.01, each on its device."""
    ...


your_turn(one_step, cases)

# %% [markdown]
# ### Twenty steps
#
# `weight[:] =` writes new values into the replica, which keeps its gradient buffer.

# %%
def step_on_both(x_shards, y_shards, weights):
    find_gradients(x_shards, y_shards, weights)
    first = weights[0].grad
    second = weights[1].grad.as_in_context(first.context)
    total = first + second
    for weight in weights:
        total_here = total.as_in_context(weight.context)
        weight[:] = weight - 0.01 * total_here


# %% tags=["trains"]
for weight in weights:
    weight[:] = 0  # so that this cell can be run again

for step in range(20):
    step_on_both(x_shards, y_shards, weights)
    if step in [0, 1, 2, 19]:
        print(f"step {step:2}: w = {weights[0].asscalar():.4f} and {weights[1].asscalar():.4f}")

# %% [markdown]
# Both replicas learn $y = 3x$, and they stay equal: they start equal and subtract the same sum.
# This is **data parallelism**. In each step
#
# 1. each device has a replica of the model, and its shard of the batch (chapter 02);
# 2. each device computes the gradient of its shard;
# 3. every device receives the sum of these gradients (chapter 03);
# 4. every device makes the same update (chapter 04).
#
# Besides data parallelism there is *model parallelism*, which divides the model itself (chapters 18
# to 20).

# %% [markdown]
# ## Who works when?
#
# A second device saves time if both compute their gradients at the same time. Do they? MXNet's
# profiler notes when each operation begins and ends. `helpers.trace.record` (not autograd's)
# calls a function with its arguments, and returns what was noted: a list of `events`, each with a
# device (its `lane`), a start and an end. **Predict:** do the times of `cpu(0)` and of `cpu(1)`
# overlap?

# %% tags=["predict", "measured"]
from helpers.trace import record

small = record(find_gradients, x_shards, y_shards, weights)
for event in small.events:
    print(f"{event.lane}  {event.start:5.2f} to {event.end:5.2f} ms  {event.name}")

# %% [markdown]
# Two events overlap from the later start to the earlier end. We add that up over all pairs of an
# event of `cpu(0)` and one of `cpu(1)`. `lanes` has the list of each device's events.

# %% tags=["measured", "predict"]
def both_at_once(recording):
    shared = 0
    for ours in recording.lanes["cpu(0)"]:
        for theirs in recording.lanes["cpu(1)"]:
            later_start = max(ours.start, theirs.start)
            earlier_end = min(ours.end, theirs.end)
            if later_start < earlier_end:
                shared += earlier_end - later_start
    return shared


def report(recording):
    returned = recording.handed_out  # when the function returned
    done = recording.length  # when all its work was done
    print(f"Python returned after {returned:.2f} ms")
    print(f"both devices worked for {both_at_once(recording):.2f} of {done:.2f} ms")


report(small)

# %% [markdown]
# <details><summary>What came out</summary>
#
# On quiet cores they take turns: `cpu(0)` has finished before `cpu(1)` gets its first operation.
# (`SetValueOp` and `ImperativeBulk` are a device's backward pass.)
#
# </details>
#
# A call such as `loss.backward()` only hands out work: it puts operations into the device's queue
# (**dispatch**), and Python goes on to the next line. This is **asynchronous** execution:
#
# ![After two calls, device 0 runs its forward pass, its backward pass waits in the queue, and
# device 1 is idle. After four calls both devices run their forward passes, their backward passes
# wait, and Python is already at the next line.](src/drawings/two_queues.svg)
#
# In the picture device 0 is still busy when device 1 gets its work. For that, its work must last
# long enough. So we take four million examples for each device, all with $x = 1$ and $y = 3$.
# **Predict:** for what fraction of the time do both work now?

# %% tags=["predict", "measured"]
x_large = [nd.ones(4_000_000, ctx=pair[0]), nd.ones(4_000_000, ctx=pair[1])]
y_large = [3 * x_large[0], 3 * x_large[1]]
for weight in weights:
    weight[:] = 0
find_gradients(x_large, y_large, weights)  # the first time is slower

large = record(find_gradients, x_large, y_large, weights)
report(large)
# %% tags=["fold"]
# check: what came out
assert large.handed_out < 0.3 * large.length, "Python waited"
assert both_at_once(large) > 0, "one device after the other"

# %% [markdown]
# <details><summary>What came out</summary>
#
# For most of the time. Python hands out as many operations as before, but now each takes the device
# much longer. (If other programs use a core meanwhile, it is less.)
#
# </details>
#
# Now we print, within the loop, what each device has found. **Predict:** for how long do both work?

# %% tags=["predict", "measured"]
def find_and_print(x_shards, y_shards, weights):
    for x, y, weight in zip(x_shards, y_shards, weights):
        with autograd.record():
            loss = ((weight * x - y) ** 2).sum()
        loss.backward()
        print("loss", loss.asscalar(), "gradient", weight.grad.asscalar())  # NEW


printed = record(find_and_print, x_large, y_large, weights)
report(printed)
# %% tags=["fold"]
# check: what came out
assert both_at_once(printed) == 0, "Python didn't wait"

# %% [markdown]
# <details><summary>What came out</summary>
#
# Not at all. `asscalar` waits until the value is there, and only then does Python hand out the
# second device's work.
#
# </details>
#
# Here are the three recordings as **timelines**. A thin gap in a bar is where one operation ends
# and the next begins.

# %% tags=["fold", "measured"]
# draw: the three recordings, a row each for Python and for the devices
from helpers.plotting import show, timeline

done = f"4,000,000 examples: Python is done after {large.handed_out:.0f} ms"
fig, _ = timeline("Who works when", {"2 examples for each device": small.rows,
                                     done: large.rows,
                                     "4,000,000 examples, and a print": printed.rows})
show(fig, alt="Three timelines with rows for Python and two devices. With 2 examples cpu(1) works "
              "after cpu(0), with 4,000,000 side by side, and with a print after it again.")

# %% [markdown]
# **Two devices work at the same time if the first is still busy when Python hands out the second's
# first operation, and if nothing makes Python wait in between.** (How much *faster* that is,
# chapter 04 asks.)
#
# Anything that needs values blocks until they are computed: `x.asscalar()`, `x.asnumpy()`,
# `print(x)`, `if x:`. `x.wait_to_read()` waits for one array, `nd.waitall()` for all work. So
# **wait before you stop the timer**, or you measure how long Python hands out work:

# %% tags=["measured"]
from time import perf_counter

begin = perf_counter()
find_gradients(x_large, y_large, weights)
too_early = perf_counter() - begin
nd.waitall()
right = perf_counter() - begin
print(f"without waiting {1000 * too_early:.0f} ms, after waitall {1000 * right:.0f} ms")

# %% [markdown]
# But `step_on_both` adds two gradients, and never waits for them. Might it read them before they
# are there? We set them to zero, so that a premature read would show up. Each of eight million
# examples has the gradient −6 at $w = 0$, so $w$ should become $0.01 \cdot 48{,}000{,}000 =
# 480{,}000$:

# %% tags=["trains"]
for weight in weights:
    weight[:] = 0
    weight.grad[:] = 0

step_on_both(x_large, y_large, weights)
print("w =", weights[0].asscalar(), "and", weights[1].asscalar())
for weight in weights:
    assert weight.asscalar() == 480_000, "a gradient was read before it was there"

# %% [markdown]
# Both gradients were there in time, because MXNet's **engine**, which runs the queues, **starts an
# operation only when its inputs are ready**, whichever device computes them. So a device that needs
# the other's result waits for it, while Python goes on.
#
# ## What does a copy cost?
#
# Gradients must move between devices. We copy a million numbers as one array, and as a thousand
# arrays. **Predict:** how many times as long do a thousand copies take?

# %% tags=["predict", "measured"]
def copy_all(sources):
    for source in sources:
        source.copyto(pair[1])


for number in [1, 1_000]:
    size = 1_000_000 // number
    sources = []
    for _ in range(number):
        sources.append(nd.ones(size, ctx=pair[0]))
    copies = record(copy_all, sources)
    print(f"{number:5,} copies: {copies.length:6.2f} ms, "
          f"Python returned after {copies.handed_out:.2f} ms")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Many times as long, although the bytes are the same, because each copy has a fixed cost, too. Here
# it is mostly Python's, which hands out each of them.
#
# </details>
#
# On a link between machines it is the link's **latency** (chapter 03). Either way, **send few large
# arrays instead of many small ones**.
#
# ## Where is an error raised?
#
# Here are two mistakes: arrays whose shapes don't fit, and a normal distribution with a negative
# width. **Predict:** which lines does this cell print?

# %% tags=["predict"]
try:
    nd.ones((2, 3)) + nd.ones((4, 5))
except mx.MXNetError as error:
    print(str(error).splitlines()[-1])

try:
    noise = nd.random.normal(0, -1, shape=(2, 2), ctx=pair[0])  # a width of -1
    print("after noise")
    doubled = 2 * noise
    print("after doubled")
    print(doubled.asnumpy())
except mx.MXNetError as error:
    print(str(error).splitlines()[-1])

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both errors, "after noise" and "after doubled". The wrong shape is raised at its own line, because
# shapes are checked before an operation is queued. The width is looked at only when the operation
# runs, so the error is raised by `asnumpy`, which waits.
#
# </details>
#
# **An error that shows only while an operation runs is raised where Python waits for the result,
# and the line with the mistake is above.** To find it, run the program again with
# `MXNET_ENGINE_TYPE=NaiveEngine`, so that each line waits for its work (deeper: MXNet's surprises).
#
# ## Summary
#
# - An operation runs on the device of its inputs, once these are ready.
# - Two devices work at the same time if the first is still busy when the second gets its work, and
#   if Python doesn't wait in between.
# - Wait before you stop the timer. An error that shows while an operation runs is raised where you
#   wait.
# - A copy has a fixed cost: send few large arrays.
#
# To search on: *asynchronous execution*; on GPUs *CUDA streams*, and PyTorch's
# `torch.cuda.synchronize`.
#
# **Further reading.** A. Zhang et al., *Dive into Deep Learning*, "Asynchronous Computation" and
# "Training on Multiple GPUs".

# %% [markdown]
# ## Exercises
#
# 1. **Where is the border?** Record `find_gradients` for 2 to 2,000,000 examples on each device,
#    ten times as many each time. From which number on do both work at the same time?
# 2. **Print, and overlap.** Change `find_and_print` so that it prints the same lines, and both
#    devices still work at the same time.

# %% [markdown]
# ### Answer to *Your turn*
#
# The weights get gradient buffers. The rest is `find_gradients` and `step_on_both` in one.

# %% tags=["solution", "your-turn"]
def one_step(x_shards, y_shards, weights):
    for x, y, weight in zip(x_shards, y_shards, weights):
        weight.attach_grad()
        with autograd.record():
            loss = ((weight * x - y) ** 2).sum()
        loss.backward()

    first = weights[0].grad
    second = weights[1].grad.as_in_context(first.context)
    total = first + second

    new_weights = []
    for weight in weights:
        total_here = total.as_in_context(weight.context)
        new_weights.append(weight - 0.01 * total_here)
    return new_weights


your_turn(one_step, cases)

# %% [markdown]
# ### Answer 1
#
# It depends on the machine. The border is where a device's work lasts about until the other gets
# its first operation.

# %% tags=["solution", "measured"]
for n in [2, 20, 200, 2_000, 20_000, 200_000, 2_000_000]:
    x_many = [nd.ones(n, ctx=pair[0]), nd.ones(n, ctx=pair[1])]
    y_many = [3 * x_many[0], 3 * x_many[1]]
    find_gradients(x_many, y_many, weights)  # the first time is slower
    recording = record(find_gradients, x_many, y_many, weights)
    shared = both_at_once(recording) / recording.length
    print(f"{n:9,} examples for each device: both work for {shared:4.0%} of the time")

# %% [markdown]
# ### Answer 2
#
# Keep the losses, and read them after the loop, when both devices have their work.

# %% tags=["solution", "measured"]
def find_then_print(x_shards, y_shards, weights):
    losses = []
    for x, y, weight in zip(x_shards, y_shards, weights):
        with autograd.record():
            loss = ((weight * x - y) ** 2).sum()
        loss.backward()
        losses.append(loss)
    for loss, weight in zip(losses, weights):
        print("loss", loss.asscalar(), "gradient", weight.grad.asscalar())


for weight in weights:
    weight[:] = 0

recording = record(find_then_print, x_large, y_large, weights)
report(recording)
assert both_at_once(recording) > 0, "one device after the other"
