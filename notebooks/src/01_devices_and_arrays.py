# %% [markdown]
# # 01 · Devices and arrays
#
# A second device can halve the time of training, or do nothing at all, and the difference is
# decided by questions as plain as *where is this array?* and *has this computation happened yet?*
# MXNet answers both, if asked. This chapter teaches you to ask, to move arrays only when you mean
# to, and to say beforehand what a move will cost.
#
# ## What you'll do
#
# Run one network on two devices and check its gradient against one device's. Create arrays on a
# device, move them, catch them sharing memory. See an operation return before it is done. Measure
# copies from 4 KB to 64 MB, fit a two-number model to them, and predict a copy that you haven't
# measured yet.
#
# ## What you'll learn
#
# - how model parallelism differs from data parallelism, and why this course is about the second;
# - what a *context* is, how to read an array's, and how it decides where computation happens;
# - when `as_in_context` copies, when `copyto` does, and where gradients end up;
# - why a clock lies about MXNet unless you wait, and why errors come late;
# - what a copy costs: latency + size / bandwidth, with both numbers from your own machine.
#
# ## What you need
#
# Python, and arrays as in NumPy. **No GPU.** Reading takes {reading time}, running less than
# a minute.

# %% [markdown]
# ## Two devices, two ways to use them
#
# A *device* is something with memory and cores of its own: a GPU, or the host's CPU. Everything
# here needs two, so we begin there. `helpers` is imported before MXNet, because MXNet reads its
# settings once, while it loads, and `helpers` makes the settings under which simulated devices
# really work side by side.

# %%
from helpers import devices

import mxnet as mx
from mxnet import autograd, nd

# %% [markdown]
# `devices(2)` gives two GPUs if the machine has them. If not, it gives two *simulated* devices:
# MXNet lets us write `cpu(0)`, `cpu(1)` and so on, and gives each name a queue of work and a
# thread to do it. With one core to a thread, they compute at the same time, as two small GPUs
# would. One thing they don't imitate: they have no memory of their own. It will matter below, and
# we say so wherever it does.

# %% tags=["measured"]
two = devices(2)

# %% [markdown]
# ### Model parallelism: one network, cut between layers
#
# Suppose that a network is too large for one device's memory. Then its layers can be dealt out:
# the first layer's weights live on one device, the second's on the other, and whatever passes
# between the layers has to cross. Our network has four weights in the first layer and two in the
# second, all whole numbers, so you can check everything by hand.

# %%
def two_layers(first, second):
    W1 = nd.array([[1, -1], [-1, 1]], ctx=first)
    W2 = nd.array([[3], [5]], ctx=second)
    W1.attach_grad()
    W2.attach_grad()
    return W1, W2

# %% [markdown]
# The input `x` is on the first device, and so is the hidden layer `h` computed from it. One call,
# `h.as_in_context(second)`, carries `h` across; the second layer goes on from there. The call is
# inside `autograd.record()`, so MXNet notes it down like any other operation, and
# `backward` will have to undo it like any other.

# %%
def gradients(first, second):
    x = nd.array([[1, 2], [3, 1]], ctx=first)  # two examples, two features
    W1, W2 = two_layers(first, second)
    with autograd.record():
        h = nd.relu(nd.dot(x, W1))
        loss = nd.dot(h.as_in_context(second), W2).sum()
    loss.backward()
    return W1.grad, W2.grad

# %% [markdown]
# First with both layers on the same device. This is our reference: an ordinary two-layer network,
# with nothing to cross. For the first example, the hidden layer before the ReLU is $(-1, 1)$, for
# the second $(2, -2)$, so each example keeps one hidden unit.

# %%
alone = gradients(two[0], two[0])
for grad in alone:
    print(grad.asnumpy().tolist())

# %% [markdown]
# **Before you run this:** now `W2` is on the second device. On which device will the gradient of
# `W1` be? To compute it, the error signal has to get back from the second device to the first. Who
# sends it?

# %%
apart = gradients(two[0], two[1])
assert apart[0].context == two[0], "a gradient lives where its weights live"
assert apart[1].context == two[1], "a gradient lives where its weights live"
for one, other in zip(alone, apart, strict=True):
    same = (one.asnumpy() == other.asnumpy()).all()
    assert same, "moving h changes where the work is done, never what is computed"

# %% [markdown]
# Autograd sent it. The derivative of a copy to the second device is a copy back to the first, so
# each gradient arrived where its weights are, and its values are those of one device. That is
# *model parallelism*, and it costs one call for each crossing. So why isn't that the whole course?
#
# Look at who works when. The second device can't begin its layer before `h` arrives, and on the
# way back the first waits for the second. The figure draws one training step, taking a backward
# pass to be twice the work of a forward pass (Kaplan et al., 2020, arXiv:2001.08361, section 2.1).

# %%
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show

# start and length of each piece, in units of one layer's forward pass; row; colour; name
BY_LAYER = [(0, 1, 3, BLUE, "layer 1"), (1, 1, 2, ORANGE, "layer 2"),
            (2, 2, 2, ORANGE, "layer 2, backward"), (4, 2, 3, BLUE, "layer 1, backward")]
BY_DATA = [(s, n, row, c, t) for row in (0, 1) for s, n, c, t in
           [(0, 0.5, BLUE, "1"), (0.5, 0.5, ORANGE, "2"),
            (1, 1, ORANGE, "2, back"), (2, 1, BLUE, "1, back"), (3, 0.3, GREEN, "")]]

# %% [markdown]
# The lower two rows are the other way: *each device has the whole network and half of the
# examples*. Nobody waits for anybody until the end, when the gradients are summed, drawn here as
# a thin green bar. How thick it really is depends on the devices and the network; you will measure
# it in chapters 03 and 04.

# %%
fig, ax = figure("Cut by layer, one device always waits; cut by data, both work",
                 xlabel="time (one layer's forward pass on the whole batch = 1)")
for start, length, row, colour, text in BY_LAYER + BY_DATA:
    ax.barh(row, length, left=start, height=0.7, color=colour, edgecolor="white")
    ink = "white" if colour == BLUE else "black"
    ax.text(start + length / 2, row, text, ha="center", va="center", color=ink)
ax.text(3.36, 0.5, "green: sum of gradients", va="center")
ax.set_yticks(range(4), ["data, device 1", "data, device 0", "layers, device 1",
                         "layers, device 0"])
show(fig, alt="Timeline of one training step. Cut by layer, the two devices take turns. Cut "
              "by data, both are busy throughout and finish in about half the time.")

# %% [markdown]
# ### Why a single layer won't spread by itself
#
# You may wonder why MXNet doesn't just run each layer on both devices. A layer is an *operator*,
# one function that is started on one device. Inside the device it spreads as far as it can:
# NVIDIA's datasheet gives the Tesla V100 5,120 cores, and one large matrix product occupies them
# all, because they see the same memory. The second device sees a different memory. For it to help,
# someone must cut the data, send a part, and put the results together again. Operators don't do
# that; you do.
#
# ### Data parallelism: one batch, cut between examples
#
# This is the way that the rest of the course takes. With $k$ devices, in each training step:
#
# 1. each device holds a full copy of the parameters, a *replica*;
# 2. the batch is cut into $k$ *shards*, one a device (chapter 02);
# 3. each device computes its gradient from its shard, all at the same time;
# 4. the gradients are summed, and every device gets the sum (chapter 03);
# 5. each device makes the same update, so the replicas stay equal (chapter 04).
#
# The model must fit on one device, and that is the price. What you get for it is that devices meet
# once a step, whatever the number of layers.

# %% [markdown]
# ## The devices here
#
# How many GPUs does MXNet see? A 0 may mean that there are none, or that this MXNet was built
# without GPU support; the plain `mxnet` package is. Nothing in the course needs a GPU.

# %%
print("GPUs that MXNet can use:", mx.context.num_gpus())

# %% [markdown]
# NVIDIA's driver comes with a program that knows more, `nvidia-smi`. Asked without options it
# prints a wide table. We ask for the columns that matter here, and ask only where the program
# exists.

# %% tags=["measured"]
from shutil import which
from subprocess import CalledProcessError, run

columns = "index,name,memory.used,memory.total,utilization.gpu,pcie.link.width.current"
if which("nvidia-smi"):
    ask = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv"]
    print(run(ask, capture_output=True, text=True).stdout)
else:
    print("no nvidia-smi here, so no NVIDIA driver: see the sample below")

# %% [markdown]
# **A sample, made up, not from this machine:** two GPUs while a script trains on the first only.
#
# | index | name | memory.used | memory.total | utilization.gpu | pcie.link.width.current |
# | --- | --- | --- | --- | --- | --- |
# | 0 | Tesla V100 | 9,210 MiB | 16,160 MiB | 97 % | 16 |
# | 1 | Tesla V100 | 3 MiB | 16,160 MiB | 0 % | 16 |
#
# - **index** is the 1 in `mx.gpu(1)`, unless the variable `CUDA_VISIBLE_DEVICES` renumbers the
#   GPUs.
# - **memory.used** of **memory.total** tells you whether a replica fits. A GPU that you think you
#   are using, and that holds next to nothing, has been given no data.
# - **utilization.gpu** is the share of time in which *something* ran on the GPU, not how many of
#   its cores were busy. In the sample the second GPU does nothing while its owner believes
#   that both are training, and this column is how to catch it.
# - **pcie.link.width.current** is the number of lanes to the host. 16 is the most; a card in a
#   narrow slot shows 8 or 4 and copies that much slower.

# %% [markdown]
# ### What connects them
#
# A multi-GPU server often looks like the left half of the next figure: a CPU with the host's
# memory, and several GPUs, each with a memory of its own, behind a switch. The first cell says how
# to draw a box and a link.

# %%
def box(ax, x, y, wide, high, text, colour):
    ax.bar(x, high, wide, y, align="edge", color=colour, alpha=0.35, edgecolor="black")
    ax.text(x + wide / 2, y + high / 2, text, ha="center", va="center", fontsize=9)


def link(ax, x, low, high, text):
    ax.plot([x, x], [low, high], color="black", linewidth=2)
    ax.text(x + 0.15, (low + high) / 2, text, va="center", fontsize=9)

# %% [markdown]
# The left half, with the links' speeds as their makers give them. PCI Express 3.0 moves 8 gigabits
# a second on each lane, 128 of every 130 bits being data (PCI-SIG, base specification 3.0): 16
# lanes make 15.75 GB/s in each direction, rounded to 16 in the figure. For the Tesla V100 NVIDIA's
# datasheet gives 900 GB/s to its own memory, and 300 GB/s over NVLink, both directions together. A
# channel of DDR4-3200 host memory moves 3,200 million times 8 bytes a second (JEDEC, JESD79-4),
# 25.6 GB/s, and servers have several channels.

# %%
def draw_server(ax):
    box(ax, 0, 6, 3.4, 1.5, "host memory\n25.6 GB/s a channel", GREY)
    box(ax, 5, 6, 3.4, 1.5, "CPU", BLUE)
    box(ax, 0, 3.8, 10.2, 0.9, "PCIe switch", "white")
    ax.plot([3.4, 5], [6.75, 6.75], color="black", linewidth=2)
    link(ax, 6.7, 4.7, 6, "PCIe 3.0 x16, 16 GB/s each way")
    for i in range(4):
        box(ax, 2.7 * i, 1, 2.1, 1.7, f"GPU {i}\nits memory:\n900 GB/s", GREEN)
        link(ax, 2.7 * i + 1.05, 2.7, 3.8, "16 GB/s")
    for i in range(3):
        ax.plot([2.7 * i + 2.1, 2.7 * i + 2.7], [1.8, 1.8], color=GREEN, linestyle=":", lw=3)
    ax.text(5.1, 0.5, "dotted: NVLink, where fitted, 300 GB/s a GPU", ha="center", fontsize=9)

# %% [markdown]
# **Before you run this:** the right half is a machine without GPUs. Its two simulated devices are
# two cores with a thread each. Which boxes of the left half have no counterpart there?

# %%
fig, ax = figure("GPUs have memories of their own; simulated devices share the host's",
                 size=(9.6, 4.4))
draw_server(ax)
box(ax, 12.6, 6, 5.4, 1.5, "host memory\nevery array is here", GREY)
for i in range(2):
    box(ax, 12.6 + 3.2 * i, 1, 2.2, 1.7, f"cpu({i}):\na core,\na thread", BLUE)
    link(ax, 13.7 + 3.2 * i, 2.7, 6, "memory\nbus")
ax.text(5.1, 7.9, "a server with four GPUs", ha="center", fontweight="bold")
ax.text(15.3, 7.9, "two simulated devices", ha="center", fontweight="bold")
ax.set(ylim=(0, 8.6))
ax.set_axis_off()
show(fig, alt="Left, a server: CPU and host memory above a PCIe switch, below it four GPUs, "
              "each with its own memory. Right: two CPU cores linked to one host memory.")

# %% [markdown]
# The switch, the links below it and the memories at the bottom: nothing on the right has to be
# crossed. A "copy" from `cpu(0)` to `cpu(1)` goes from host memory to host memory. It is a real
# copy that takes real time, so all that you learn here about *when* to copy holds on GPUs. How
# *long* it takes doesn't carry over; that, you measure on each machine. Note also the steep step
# on the left, from 900 GB/s inside a GPU to 16 GB/s out of it: data should stay where they are.

# %% [markdown]
# ## Creating arrays on a device
#
# In MXNet, the name of a device is a *context*: `mx.cpu(0)`, `mx.gpu(1)`. Each array has one, for
# life. **Before you run this:** where is an array if you don't say where?

# %%
a = nd.array([1, 2, 3])
print(a.context)

# %% [markdown]
# In host memory, also where there are GPUs, and a training script that forgets this trains on the
# CPU. Every function that makes an array takes `ctx=`, and an array that is printed shows its
# context after the `@`.

# %%
b = nd.ones((2, 3), ctx=two[1])
b

# %% [markdown]
# **Where does `nd.exp(b)` run?** There is no `ctx=` in the call, and none is needed: an operation
# runs on the device that holds its input, and its result stays there. So you place the data once,
# and the computation follows.

# %%
c = nd.exp(b) * 2 + 1
assert c.context == two[1], "the result of an operation is where its inputs are"

# %% [markdown]
# A context is only a name, and making one doesn't check that the device exists. `mx.gpu(7)` is
# fine until an array is created there. `mx.cpu(7)` never fails, on any machine: when it is first
# used, MXNet starts one more thread, whether or not a core is free for it. Two names are the same
# device exactly if they compare equal.

# %%
assert mx.cpu() == mx.cpu(0), "without a number, it is device 0"
assert two[0] != two[1], "devices(2) must give two different devices"

# %% [markdown]
# That second line is worth a habit. Apache MXNet's own tutorial falls back to
# `[mx.cpu(), mx.cpu()]` where there is no GPU. It looks like two devices and is one,
# twice, with two shards queueing for the same thread. `devices(k)` never gives one device twice.

# %% [markdown]
# ## Moving arrays
#
# An array never changes its context, so to move it is to make another array elsewhere. There are
# two ways, and the difference between them is a common source of wrong training. The first is
# `as_in_context`.

# %%
a = nd.array([1, 2, 3], ctx=two[0])
there = a.as_in_context(two[1])
assert there.context == two[1], "as_in_context gives an array on the device that you name"
assert a.context == two[0], "the original stays where it was"

# %% [markdown]
# **Before you run this:** now ask for `a` on the device where it already is. Do you get a copy, or
# `a` itself? What will `a` hold after we write to what we got?

# %%
here = a.as_in_context(two[0])
here[0] = 100
assert here is a, "already there: as_in_context returns the very same object"
print(a.asnumpy())

# %% [markdown]
# The name says it: give me this array *as it is in that context*. Nothing to do means nothing
# done, which is fast and mostly what you want. But `here` and `a` are two names for one array;
# they *alias*. On two devices, code like this writes to a copy on one of them and to the original
# on the other. Remember this in chapter 02, where shards are made.
#
# The second way is `copyto`, which always copies.

# %%
a = nd.array([1, 2, 3], ctx=two[0])
copy = a.copyto(two[0])
copy[0] = 100
assert copy is not a, "copyto makes a new array, even on the same device"
assert a[0].asscalar() == 1, "writing to a copy must leave the original alone"

# %% [markdown]
# `copyto` also takes an array instead of a context. Then it writes into that array, which keeps
# its place and its memory, and returns it. When the same thing is copied again and again, as
# gradients are in every step, this saves asking for new memory each time.

# %%
target = nd.zeros(3, ctx=two[1])
result = a.copyto(target)
assert result is target, "given an array, copyto fills it and returns it"
print(target.asnumpy())

# %% [markdown]
# ### Gradients stay with their array
#
# `attach_grad` sets aside memory for a gradient, on the array's own device. A moved array is a new
# array, and it comes *without* one. So the order for a replica's parameters is: move first, then
# attach.

# %%
w = nd.array([1, 2, 3], ctx=two[0])
w.attach_grad()
replica = w.copyto(two[1])
assert replica.grad is None, "a copy has the values, not the gradient memory"
replica.attach_grad()
assert replica.grad.context == two[1], "gradient memory is on the array's device"

# %% [markdown]
# | you write | on the same device | on another device |
# | --- | --- | --- |
# | `a.as_in_context(d)` | `a` itself | a new array |
# | `a.copyto(d)` | a new array | a new array |
# | `a.copyto(b)` | `b`, overwritten | `b`, overwritten |
#
# The rule of thumb: `as_in_context` to *read* an array somewhere, `copyto` if either side will
# *write*.

# %% [markdown]
# ## When arrays on two devices meet
#
# What is `a + b` if `a` is on one device and `b` on the other? MXNet never moves an array on its
# own, since a copy that nobody asked for is a copy that nobody notices. We try it, in a process of
# its own, and you will see why.

# %%
import sys

program = f"""
import helpers
import mxnet as mx
a = mx.nd.array([1, 2, 3], ctx=mx.{two[0]})
b = mx.nd.array([10, 20, 30], ctx=mx.{two[1]})
print(a + b)
"""

# %% [markdown]
# **Before you run this:** choose one. It raises an error; it gives the right sum; it takes the
# process down. And if there is a sum, on which device is it?

# %%
try:
    child = run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    print("no error:", child.stdout)
except CalledProcessError as error:
    print(f"failed, exit status {error.returncode}:", error.stderr[-300:])

# %% [markdown]
# All three are right somewhere.
#
# - **Simulated devices** give the sum, on the device of the first operand. They share the host's
#   memory, so an operator that reads another device's array finds what it looks for. Here the
#   simulation is kinder than the real thing, and a program that works on it can still be wrong.
# - **A GPU and a CPU** raise an error at once. Before it starts an operator, MXNet compares the
#   *kinds* of device: "require all inputs live on the same context", says the message.
# - **Two GPUs** are of the same kind, so that check passes, and the operator is started with an
#   address in another GPU's memory. Bug reports (apache/mxnet 11275, 18265 and 21119, the last
#   with the 1.9.1 that you are using) show all that can follow: `an illegal memory access was
#   encountered`, not in the line of the `+` but where the result is read; a crash of the process;
#   or, if the one GPU can reach the other's memory directly, the right sum, slowly.
#
# After an illegal access, the GPU is unusable to that process until it ends; hence the process
# of its own. The safe habit costs one call and works on every machine: *say where.*

# %%
a = nd.array([1, 2, 3], ctx=two[0])
b = nd.array([10, 20, 30], ctx=two[1])
total = a + b.as_in_context(a.context)
assert total.context == a.context, "both inputs on a's device, so the sum is too"
print(total.asnumpy())

# %% [markdown]
# ## Work that isn't done yet
#
# When Python comes back from `nd.dot`, has the product been computed? To find out, we look at the
# clock twice: once right after the call, and again after `wait_to_read()`, which returns when the
# array's values are there.

# %%
A = nd.random.uniform(shape=(1500, 1500), ctx=two[0])
A.wait_to_read()

# %% [markdown]
# **Before you run this:** the product of two matrices of side 1,500 takes 1,500³ multiplications
# and about as many additions. What fraction of the whole time will the call itself take: all of
# it, half, a hundredth?

# %% tags=["measured"]
from time import perf_counter

start = perf_counter()
product = nd.dot(A, A)
called = perf_counter() - start
product.wait_to_read()
done = perf_counter() - start
print(f"the call returned after {called * 1e3:.2f} ms, the product was there after "
      f"{done * 1e3:.2f} ms")

# %% [markdown]
# The call only puts the work into the device's queue. Python runs ahead, and the device's thread
# takes one piece of work after the other. This *asynchrony* is what lets one Python program keep
# many devices busy: it fills one queue, then the next, and both devices compute while Python goes
# on. The loop below looks sequential and is not.

# %%
products = []
for device in two:
    local = A.as_in_context(device)
    products.append(nd.dot(local, local))
nd.waitall()

# %% [markdown]
# `nd.waitall()` waits for everything, on all devices. Some calls wait because they need the
# values, and the rest don't:
#
# | waits | doesn't wait |
# | --- | --- |
# | `x.wait_to_read()`, `nd.waitall()` | arithmetic, `nd.dot`, every other operator |
# | `x.asnumpy()`, `x.asscalar()`, `float(x)` | `x.as_in_context(d)`, `x.copyto(d)` |
# | `print(x)`, `if x:` | `x.shape`, `x.dtype`, `x.context`, `backward()` |
#
# Two things follow. A clock that is stopped without waiting measures how fast Python fills a
# queue, and nothing else. And a stray `print(loss)` in a training loop makes every device finish
# before the next gets work. Both products are in now. They are equal, or nearly: GPUs of different
# models may add in a different order.

# %%
first, second = [p.asnumpy() for p in products]
gap = abs(first - second).max()
assert gap <= 1e-5 * first.max(), "the same product on two devices should be the same"

# %% [markdown]
# ### Errors come late, and only once
#
# If the work happens later, so do its errors. A normal distribution can't have a negative
# width. **Before you run this:** which line raises, the one that asks for the numbers, the one
# that adds 1, or the one that waits?

# %%
noise = nd.random.normal(0, -1, shape=(2, 2), ctx=two[0])
shifted = noise + 1
try:
    shifted.wait_to_read()
    raised = False
except mx.MXNetError as error:
    raised = True
    print(str(error).splitlines()[-1].split(" : ")[-1])
assert raised, "the error of the first line should come out where we wait"

# %% [markdown]
# The first two lines only queued work, and the error came out of the third. So when a message
# points at an innocent line, look *upwards*; calling `nd.waitall()` after each suspect line finds
# the culprit. Worse, MXNet 1.9.1 raises such an error only once. Read `shifted` again and you get
# no error, but whatever happened to be in its memory. After an `MXNetError`, believe none of the
# arrays that were in the making; start again from data you trust.

# %% [markdown]
# ## What a copy costs
#
# Everything is in place to measure a copy: two devices, `copyto` into an array that is there
# already, and a clock that waits.

# %%
def seconds(copy, *arguments):
    start = perf_counter()
    copy(*arguments).wait_to_read()
    return perf_counter() - start

# %% [markdown]
# A processor keeps what it used last in its *caches*, small memories much faster than the host's.
# Copy the same few bytes again and again, and you measure the cache. So we make two large arrays
# and copy a different stretch of them each time. Both are waited for now, or the first copy would
# be charged for making them.

# %%
LARGEST = 64_000_000  # bytes
source = nd.ones(LARGEST // 4, ctx=two[0])  # a float32 has 4 bytes
target = nd.zeros(LARGEST // 4, ctx=two[1])
nd.waitall()

# %% [markdown]
# A single measurement is at the mercy of whatever else the machine does, so we take 21 and keep
# their median. Slices alias the large arrays, which is just what we want: copying to a slice of
# `target` asks for no new memory.

# %%
from statistics import median


def copy_seconds(size):
    n = size // 4
    starts = [i * n % (len(source) - n + 1) for i in range(21)]
    pairs = [(source[at : at + n], target[at : at + n]) for at in starts]
    nd.waitall()
    return median(seconds(here.copyto, there) for here, there in pairs)

# %% [markdown]
# Ten sizes from 4 KB to 64 MB, each the same factor larger than the one before, so that they are
# evenly spaced on a logarithmic axis. (Here 1 KB is $10^3$ and 1 MB is $10^6$ bytes.)

# %%
import numpy as np

sizes = np.geomspace(4e3, LARGEST, 10)
print(*(f"{size / 1e3:,.0f}" for size in sizes), "KB")

# %% [markdown]
# **Before you go on:** from the first size to the last is a factor of 16,000. By what factor will
# the time grow: by 16,000, by more, by much less? Sketch the curve.
#
# Our model of a copy has two parts: a *latency* $L$ that is paid once, however little is sent, and
# the size divided by the *bandwidth* $B$:
#
# $$t(s) = L + \frac{s}{B}$$
#
# How should the line be fitted? Plain least squares would look only at the largest copies, whose
# errors in seconds dwarf all others. We want each size to count the same, so we minimise the
# *relative* errors, $(L + s_i/B - t_i)/t_i$. Dividing each row of the linear system by $t_i$ does
# it: the right-hand side becomes 1. `nnls` is least squares whose solution can't be negative, as
# neither a latency nor a bandwidth is.

# %% tags=["trains"]
from scipy.optimize import nnls


def fit(sizes, times):
    rows = np.stack([1 / times, sizes / times], axis=1)
    latency, per_byte = nnls(rows, np.ones(len(times)))[0]
    return latency, 1 / per_byte

# %% [markdown]
# A fit should be tried first where the answer is known. For times made from a latency of 0.5 and a
# bandwidth of 4, in whatever units, it has to find just these two.

# %% tags=["trains"]
known = np.array([1.0, 2.0, 8.0])
found = fit(known, 0.5 + known / 4)
assert np.allclose(found, (0.5, 4)), "on exact data the fit must find latency and bandwidth"

# %% [markdown]
# Now your machine. Besides latency and bandwidth the cell prints the model's largest relative
# error, because a fit without its error is half a result.

# %% tags=["measured", "trains"]
times = np.array([copy_seconds(int(size)) for size in sizes])
latency, bandwidth = fit(sizes, times)
worst = np.abs((latency + sizes / bandwidth) / times - 1).max()
print(f"latency {latency * 1e6:.0f} µs, bandwidth {bandwidth / 1e9:.1f} GB/s, "
      f"largest error of the fit {worst:.0%}")

# %% [markdown]
# On a log-log plot the model is a level stretch, where latency is all that counts, that bends into
# a slope, where bandwidth is. The bend is at $s = L \cdot B$: there both parts cost the same, and
# the copy runs at half of its bandwidth.

# %% tags=["measured"]
fig, ax = figure(f"Below {latency * bandwidth / 1e6:.2g} MB, a copy is mostly latency",
                 "size of the copy (MB)", "time (µs)")
s = np.geomspace(sizes[0], sizes[-1], 200)
ax.loglog(s / 1e6, 1e6 * (latency + s / bandwidth), color=ORANGE, label="fit: L + s/B")
ax.axhline(1e6 * latency, color=GREY, linestyle=":", label="latency alone: L")
ax.loglog(s / 1e6, 1e6 * s / bandwidth, color=GREY, linestyle="--", label="size alone: s/B")
ax.loglog(sizes / 1e6, 1e6 * times, "o", color=BLUE, label="measured, median of 21")
ax.set_ylim(1e6 * min(latency, times.min()) / 3)
ax.legend(frameon=False)
show(fig, alt="Copy time against size on logarithmic axes. The measured points are level for "
              "small sizes and rise in proportion for large ones; the fitted curve follows.")

# %% [markdown]
# How to read your two numbers depends on your devices.
#
# - **Simulated devices:** the bandwidth is that of the host's memory, counted once though each
#   byte is read *and* written, and no wire is involved. The latency is what MXNet takes to hand
#   work to another thread and to hear that it is done. It can change from one minute to the next,
#   with what the operating system does with the two threads. Points far from the curve are mostly
#   the doing of caches and of other programs, of which a model with two numbers knows nothing.
# - **GPUs:** compare the bandwidth with the links in the figure above. Far less than the link
#   offers often means that the copy went through the host.
#
# ### A prediction
#
# A model is worth something if it says what you haven't measured. Chapter 04 trains a LeNet whose
# gradients have to travel in every step. These are the shapes of its parameters.

# %%
shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
parameters = sum(int(np.prod(shape)) for shape in shapes)
print(f"{parameters:,} parameters, {4 * parameters:,} bytes as float32")

# %% [markdown]
# **Before you run this:** work out the prediction from your own $L$ and $B$, on paper. Will
# latency or size dominate?

# %% tags=["measured"]
size = 4 * parameters
predicted, measured = latency + size / bandwidth, copy_seconds(size)
print(f"predicted {predicted * 1e6:.0f} µs, of which latency {latency / predicted:.0%}; "
      f"measured {measured * 1e6:.0f} µs")

# %% [markdown]
# Compare the difference with the largest error of the fit: a model can't be trusted further than
# that. If it is far larger, run the cell again; another program may have had the machine. Look at
# latency's share, too: it is paid for each array that is sent, so if it is a large part of the
# price, sending LeNet's eight arrays one by one costs far more than sending them as one. Exercise
# 3 takes it from there, and chapter 03 adds up what a whole all-reduce costs.

# %% [markdown]
# ## Summary
#
# - In *model parallelism* the layers are on different devices, which take turns; in *data
#   parallelism* each device has a replica of the model and a shard of the batch, and all work at
#   once.
# - A context names a device. Arrays are created with `ctx=` and stay there; an operation runs
#   where its inputs are, and its result and gradients stay there too.
# - `as_in_context` returns the same object if nothing needs to move; `copyto` always copies. Write
#   only to what you know to be a copy.
# - Don't let arrays from two devices meet. Two GPUs may raise late, crash, or work; simulated
#   devices share memory and always work. Say where: `b.as_in_context(a.context)`.
# - Operators return before they are done. Wait before you stop a clock; an error comes out where
#   you wait, once.
# - A copy takes latency + size / bandwidth. Small arrays pay for latency, large ones for
#   bandwidth.
#
# **Further reading.** *Deep Learning: The Straight Dope*, chapters on NDArray and on training with
# multiple GPUs from scratch; Apache MXNet's tutorial on multiple GPUs with Gluon. Both inspired
# this chapter.

# %% [markdown]
# ## Exercises
#
# 1. **Same memory?** For `a = nd.arange(4, ctx=two[0])`, say of each whether writing to it changes
#    `a`: `a.as_in_context(two[0])`, `a.as_in_context(two[1])`, `a.copyto(two[0])`, `a.copy()`,
#    `a[1:3]`, `a.reshape((2, 2))`. Then write code that finds out.
# 2. **A lost gradient.** In `gradients` above, `h` crossed *inside* `record()`. Move an array with
#    an attached gradient to the other device *before* `record()`, compute a loss from it there,
#    and go back. Where does the gradient end up?
# 3. **Eight arrays or one?** On a link with a latency of 50 µs and a bandwidth of 10 GB/s, how
#    long do LeNet's parameters take as one array, and how long as eight, each sent after the one
#    before has arrived? From what size on does a copy use more than half of the bandwidth?
# 4. **A sum that harms nothing.** Write `total(arrays)`, which adds up arrays on different devices
#    and returns the sum on the first one's device. The inputs must be as they were before. What is
#    wrong with starting from `result = arrays[0]` and going on with `result += …`?
#
# The answers are folded: try first, then open them.

# %% [markdown]
# ### Answer 1
#
# Write to the candidate, and look at `a`. Three change it: the array that was
# already there, the slice and the reshaped array, which are all windows on the same memory. The
# array on the other device, `copyto` and `copy` are copies.

# %% tags=["solution"]
views = {
    "as_in_context, same device": lambda a: a.as_in_context(two[0]),
    "as_in_context, other device": lambda a: a.as_in_context(two[1]),
    "copyto, same device": lambda a: a.copyto(two[0]),
    "copy": lambda a: a.copy(),
    "slice": lambda a: a[1:3],
    "reshape": lambda a: a.reshape((2, 2)),
}
shared = []
for name, view in views.items():
    a = nd.arange(4, ctx=two[0])
    view(a)[:] = -1
    if (a.asnumpy() < 0).any():
        shared.append(name)
assert shared == ["as_in_context, same device", "slice", "reshape"], "three share a's memory"

# %% [markdown]
# ### Answer 2
#
# With the moved array, since to autograd that one is where everything began: the
# move wasn't recorded. It needs an `attach_grad` of its own, or `backward` raises. The original's
# gradient stays 0, without a word. Just so, in data parallelism, each replica gets a gradient of
# its own, and bringing them together is up to you.

# %% tags=["solution"]
w = nd.array([1, 2], ctx=two[0])
w.attach_grad()
moved = w.as_in_context(two[1])
moved.attach_grad()
with autograd.record():
    loss = (moved * moved).sum()
loss.backward()
assert moved.grad.asnumpy().tolist() == [2, 4], "the derivative of the sum of w² is 2w"
assert w.grad.asnumpy().tolist() == [0, 0], "the move was not recorded: no gradient comes back"

# %% [markdown]
# ### Answer 3
#
# One array pays the latency once, eight pay it eight times; the time for the bytes
# is the same. Hence 102 µs against 452 µs, as the cell prints. Half the bandwidth is reached at
# $L \cdot B$, here 500 KB, nearly all of LeNet. This is why libraries for distributed training pack
# many small gradients into large buckets. (On MXNet's queues, eight copies sent without waiting in
# between overlap a part of their latencies. Try it.)

# %% tags=["solution"]
L, B = 50e-6, 10e9  # seconds, bytes per second
one_array = L + 4 * parameters / B
eight_arrays = len(shapes) * L + 4 * parameters / B
print(f"one array {one_array * 1e6:.0f} µs, eight {eight_arrays * 1e6:.0f} µs, "
      f"half the bandwidth from {L * B / 1e3:.0f} KB")
assert round(one_array * 1e6) == 102, "one latency of 50 µs, and 51.6 µs for the bytes"
assert round(eight_arrays * 1e6) == 452, "eight latencies, and the same bytes"
assert np.isclose(L * B / (L + L * B / B), B / 2), "at L·B bytes, bytes per second are B/2"

# %% [markdown]
# ### Answer 4
#
# `result = arrays[0]` gives the first array a second name, and `+=` then writes to
# it: the caller's array has become the sum. Starting from a copy avoids that. `as_in_context`
# is enough for the others, since they are only read. In chapter 03 the overwriting is what we
# want, and we will say so.

# %% tags=["solution"]
def total(arrays):
    result = arrays[0].copyto(arrays[0].context)
    for array in arrays[1:]:
        result += array.as_in_context(result.context)
    return result


parts = [nd.array([1, 2], ctx=two[0]), nd.array([10, 20], ctx=two[1])]
summed = total(parts)
assert summed.asnumpy().tolist() == [11, 22], "every array must be counted once"
assert summed.context == two[0], "the sum belongs on the first array's device"
assert [p.asnumpy().tolist() for p in parts] == [[1, 2], [10, 20]], "inputs must not change"
