# %% [markdown]
# # 10 · Asynchrony and overlap
#
# Your Python program doesn't compute. It hands out work and goes on, and two devices do the work
# side by side (chapter 01). That is what makes a loop over devices parallel. It also makes clocks
# lie, and it raises a question: while a device is still in its backward pass, does the sum of the
# first gradients already travel? This chapter looks, in the engine's own records.
#
# ## What you'll do
#
# Read the profiler's file into a timeline with a lane for each device, check that you read it
# right, and use it to see which work overlaps with which. Then take the overlap away, and measure
# whether it was worth anything.
#
# ## What you'll learn
#
# - what a clock sees with and without `waitall`, and what `waitall` changes besides (nothing);
# - how to read a trace: tracks, threads, pairs of events, and what can be checked about them;
# - which of a step's operators are communication, and how many there must be;
# - why backward and all-reduce do *not* overlap for a small network as MXNet comes, and how to
#   make them;
# - what two steps in flight bring, and where the last part of a speed-up goes.
#
# ## What you need
#
# Chapters 01, 06 and 07. No GPU, but two cores: the profiler tells no more CPU devices apart than
# there are cores. No data either: what an operator costs doesn't depend on what is in the picture,
# so random images will do. Reading takes {reading time}, running about one.

# %%
import time

from helpers.plotting import show, timeline

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd, profiler
from mxnet.gluon import nn

# %% [markdown]
# All of this chapter runs on simulated devices, named directly, even if you have GPUs. A GPU has
# streams of its own for copies, which MXNet's CPU devices have not, and its trace has other names.

# %%
pair = [mx.cpu(r) for r in range(2)]

# %% [markdown]
# ## The queue
#
# A call such as `a + 1` checks shapes, makes an empty array for the result, puts the work into the
# engine's queue and returns. We can prove it without a clock. Here is an operator that does nothing
# until somebody opens a gate. (`CustomOp` is MXNet's way to write an operator in Python. It has
# a time-out, so that a forgotten gate blocks nothing for good.)

# %%
import threading

gate, log = threading.Event(), []


class Gate(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        gate.wait(timeout=20)
        log.append("the gate has opened")
        self.assign(out_data[0], req[0], in_data[0])


# %% [markdown]
# It gets a name by which MXNet finds it:

# %%
@mx.operator.register("gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


# %% [markdown]
# A hundred additions that all depend on the gate. **Predict:** where does Python stop, and what is
# in the log when the cell ends?

# %%
x = nd.Custom(nd.zeros(3, ctx=pair[1]), op_type="gate")
for _ in range(100):
    x = x + 1
print("100 additions handed out; the log:", log)

# %% [markdown]
# It doesn't stop. The array `x` has a shape, a type and a device, and no values yet. Nobody notices
# until somebody asks for the values. So we open the gate, and ask.

# %%
gate.set()
assert x.asnumpy().tolist() == [100.0] * 3, "asking waits for all that the answer depends on"
print("the log:", log)

# %% [markdown]
# An error waits in the same queue, and appears at the line that asks, which may be far from the
# one that is wrong: chapter 01 showed that.
#
# ## What a clock sees
#
# **Predict:** ten products of 1000 × 1000 matrices, with the clock read when the loop ends and
# when the work has. Which factor lies between?

# %% tags=["measured"]
a = nd.random.uniform(shape=(1000, 1000))
nd.dot(a, a).wait_to_read()
begin = time.perf_counter()
results = [nd.dot(a, a) for _ in range(10)]
naive = time.perf_counter() - begin
nd.waitall()
true = time.perf_counter() - begin
print(f"without waitall {naive * 1e3:.2f} ms, with {true * 1e3:.1f} ms: "
      f"wrong by a factor of {true / naive:,.0f}")

# %% [markdown]
# The first number is no measurement of the products at all. It is the time it takes Python to say
# "please" ten times, and it would be about the same for matrices of any size.
#
# ### A training step
#
# Now chapter 06's LeNet. The shards are on their devices beforehand, since splitting was chapter
# 02's subject.

# %%
size = 128
mx.random.seed(0)
images = nd.random.uniform(shape=(size, 1, 28, 28))
labels = nd.arange(size) % 10
shards = list(zip(*(gluon.utils.split_and_load(a, pair) for a in (images, labels))))

# %% [markdown]
# The network, from equal weights each time it is started. `options`, if there are any, go to
# `hybridize` (chapter 08); we'll want that later.

# %%
def start(kvstore="device", on_store=None, **options):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(20, kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(50, kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    mx.random.seed(0)
    net.initialize(mx.init.Xavier(), ctx=pair)
    if options:
        net.hybridize(**options)
    for x, _ in shards:
        net(x)
    return net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05},
                              kvstore=kvstore, update_on_kvstore=on_store)


# %% [markdown]
# The step, with a place to do something between the backward pass and the sum. By default nothing
# is done there.

# %% tags=["trains"]
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def step(net, trainer, between=lambda: None):
    with autograd.record():
        losses = [softmax(net(x), y) for x, y in shards]
    autograd.backward(losses)
    between()
    trainer.step(size)
    return losses


# %% [markdown]
# A loop that times itself twice, at the end of the loop and at the end of the work. First two
# steps that nobody times: in the very first, memory is fetched and the store gets its keys.

# %%
def two_clocks(training, steps):
    for _ in range(2):
        step(*training)
    nd.waitall()
    begin = time.perf_counter()
    for _ in range(steps):
        step(*training)
    handed_out = time.perf_counter() - begin
    nd.waitall()
    return handed_out, time.perf_counter() - begin  # seconds


# %% [markdown]
# **Predict** how many images a second the naive clock gives.

# %% tags=["measured"]
naive, true = two_clocks(start(), steps=20)
queued = (true - naive) / true * 20
print(f"naive {20 * size / naive:,.0f} images/s, true {20 * size / true:,.0f}: "
      f"too high by a factor of {true / naive:.1f}")
print(f"when the loop ended, about {queued:.0f} of 20 steps were still in the queue")

# %% [markdown]
# The d2l chapter calls `npx.waitall()` at the end of each epoch, before its timer stops, and asks
# what removing it does. The clock is one half of the answer: the epoch *looks* shorter, and
# whatever waits next (there: the evaluation, outside the timer) pays for it. The other half:
# **predict** whether the weights change if nobody ever waits, or if everybody waits all the time.

# %%
def weights(net):
    return [a.asnumpy() for p in net.collect_params().values() for a in p.list_data()]


def trained(wait, steps=8, **options):
    net, trainer = start(**options)
    for _ in range(steps):
        step(net, trainer, between=wait)
        wait()
    return weights(net)


# %% [markdown]
# All replicas, entry by entry:

# %%
never, always = trained(wait=lambda: None), trained(wait=nd.waitall)
untrained = weights(start()[0])
assert all((a == b).all() for a, b in zip(never, always)), "waiting must not change a result"
assert all((a != b).any() for a, b in zip(never, untrained)), "all of them have learned"
print(len(never), "arrays equal to the bit")

# %% [markdown]
# Nothing changes. The engine knows for each operator which arrays it reads and writes, and starts
# it when those are ready. `waitall` is for clocks, for reading values, and for errors. (And for
# memory: a loop that never waits keeps the batches of all queued steps alive.)
#
# ## The profiler
#
# To see what happened inside, MXNet's profiler writes down the beginning and the end of every
# operator. It has to be set up once in a process.

# %%
import tempfile

folder = tempfile.TemporaryDirectory()
trace_file = f"{folder.name}/trace.json"
profiler.set_config(profile_imperative=True, profile_symbolic=True, continuous_dump=True,
                    filename=trace_file)

# %% [markdown]
# The file is in the format of Chrome's trace viewer (open `chrome://tracing` and load one). An
# event is a small JSON object: `ph` is its phase, `"B"` for begin, `"E"` for end; `ts` is the time
# in millionths of a second; `pid` names the track, a device; `tid` the thread. `"M"` events say
# what a track is called.
#
# If you dump more than once, MXNet 1.9.1 writes several lists one after another, and `json.load`
# can't read that. So we take the objects out of the text one at a time. `DeleteVariable` and
# `WaitForVar` are the engine's own housekeeping, when an array is freed or waited for. We leave
# them out.

# %%
import json
import re
from collections import Counter, namedtuple

Event = namedtuple("Event", "device thread name start duration")  # ms
HOUSEKEEPING = "DeleteVariable", "WaitForVar"
OBJECT = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\}")  # one that holds at most one other

# %% [markdown]
# A begin is kept until its end turns up; then the two are an event.

# %%
def read(text):
    raw = [json.loads(found) for found in OBJECT.findall(text)]
    tracks = {e["pid"]: e["args"]["name"] for e in raw if e["ph"] == "M"}
    open_, events = {}, []
    for e in raw:
        if e["ph"] == "B":
            open_[e["pid"], e["tid"], e["name"]] = e["ts"]
        elif e["ph"] == "E" and e["name"] not in HOUSEKEEPING:
            begin = open_.pop((e["pid"], e["tid"], e["name"]))
            events.append(Event(tracks[e["pid"]], e["tid"], e["name"],
                                begin / 1e3, (e["ts"] - begin) / 1e3))
    return sorted(events, key=lambda event: event.start)


# %% [markdown]
# Can we trust it? First a trace made by hand, of which we know the answer: two devices, three
# operators, in two lists.

# %%
def made(phase, ts, pid, name):
    return {"name": name, "ph": phase, "ts": ts, "pid": pid, "tid": 70 + pid}


# %% [markdown]
# The second product comes first in the file, as it may:

# %%
names = [{"ph": "M", "args": {"name": f"cpu/{r}"}, "pid": r, "name": "track"} for r in (0, 1)]
first = [*names, made("B", 2000, 1, "dot"), made("E", 5000, 1, "dot"),
         made("B", 1000, 0, "dot"), made("E", 1500, 0, "dot")]
second = [made("B", 1500, 0, "sum"), made("E", 4000, 0, "sum")]
text = "\n".join(json.dumps({"traceEvents": part}, indent=1) for part in (first, second))

# %% [markdown]
# In the order in which they began, times in ms:

# %%
assert read(text) == [("cpu/0", 70, "dot", 1.0, 0.5), ("cpu/0", 70, "sum", 1.5, 2.5),
                      ("cpu/1", 71, "dot", 2.0, 3.0)], "the trace that we made ourselves"

# %% [markdown]
# Then a recording of real work. The file grows from recording to recording; the profiler's clock is
# that of `time.time()`, so a recording's events are those between its two readings.

# %%
def record(work):
    nd.waitall()
    begin = time.time() * 1e3
    profiler.set_state("run")
    work()
    nd.waitall()
    profiler.set_state("stop")
    end = time.time() * 1e3
    profiler.dump()
    with open(trace_file) as file:
        return [e for e in read(file.read()) if begin <= e.start <= end]


# %% [markdown]
# **Predict** what is found for five products on one device and three on the other.

# %%
def products():
    for device, count in zip(matrices, (5, 3)):
        for _ in range(count):
            nd.dot(device, device)


# %% [markdown]
# One matrix on each:

# %%
matrices = [nd.ones((300, 300), ctx=device) for device in pair]
events = record(products)
print(Counter(f"{e.name} on {e.device}" for e in events))

# %% [markdown]
# As many as were called, each on the device where its input lives.
#
# ## A step on two devices
#
# A step of LeNet, recorded after three that nobody looks at.

# %%
def recorded(training, between=lambda: None):
    for _ in range(3):
        step(*training, between)
    return record(lambda: step(*training, between))


# %% [markdown]
# **Predict:** how many threads did the work of two devices, and how many tracks are there?

# %%
usual = start()
begin = time.time() * 1e3
events = recorded(usual)
wall = time.time() * 1e3 - begin
print(sorted({e.device for e in events}), "by", len({e.thread for e in events}), "threads")

# %% [markdown]
# Three tracks, two threads! `cpu pinned` is memory in which the store keeps its copy of the
# weights, and work on it has a track of its own. But a thread does one thing at a time, whatever
# the track, and each device has one. So a *lane* is a thread, named after its device.

# %%
def lanes(events):
    home = {e.thread: e.device for e in events if e.device.startswith("cpu/")}
    return {device: [e for e in events if home[e.thread] == device]
            for device in sorted(home.values())}


# %% [markdown]
# Every event must then be in a lane:

# %%
both = lanes(events)
print(list(both))
assert sum(len(lane) for lane in both.values()) == len(events), "each event has its lane"

# %% [markdown]
# Three things must be true of any correct reading, whatever the machine did. **Predict** them
# before you read the assertions.

# %%
def check(lanes, wall):
    for device, lane in lanes.items():
        for before, after in zip(lane, lane[1:]):
            end = before.start + before.duration
            assert end <= after.start + 1e-3, f"{device}: {after.name} began within {before.name}"
        assert sum(e.duration for e in lane) <= wall, f"{device} was busy for longer than we waited"
    forward = [[e.name for e in lane if e.name in LAYERS] for lane in lanes.values()]
    assert all(names == forward[0] != [] for names in forward), "the same network on each device"


LAYERS = "Convolution", "Pooling", "FullyConnected"
check(both, wall)
print(Counter(e.name for e in both["cpu/0"] if e.name in LAYERS))

# %% [markdown]
# (A millionth of a second is the clock's grain, hence `1e-3`.) No lane does two things at once, no
# lane was busy for longer than we waited, and each has gone through the six layers that the network
# has.
#
# ### Which of it is communication
#
# The network has eight parameters. With chapter 07 in mind, **predict:** how many copies, sums and
# updates are there in a step on two devices?

# %%
def counts(events):
    found = Counter(e.name for e in events)
    return {name: found[name] for name in ("CopyCPU2CPU", "ElementwiseSum", "multi_sgd_update")}


# %% [markdown]
# Asserted from the two numbers that should decide it:

# %%
P, k = len(usual[0].collect_params().keys()), len(pair)
print(counts(events))
assert counts(events) == {"CopyCPU2CPU": (2 * k + 1) * P, "ElementwiseSum": P,
                          "multi_sgd_update": P}, "from the number of parameters and devices"

# %% [markdown]
# For each parameter: each of $k$ devices copies its gradient into a buffer of the device that owns
# the key, the owner adds them up, an update makes new weights in the store, and those are copied to
# the owner and from there to $k$ devices: $2k + 1$ copies. The replicas that live on the owner are
# copied as well. The shards were there beforehand, so *every* copy in this trace is communication.
#
# Where do sums and updates run? Chapter 07 gave each key an owner. **Predict:** does the update run
# there too?

# %%
for name in ("ElementwiseSum", "multi_sgd_update"):
    print(name, {device: sum(e.name == name for e in lane) for device, lane in both.items()})

# %% [markdown]
# The sums run on the owners. The updates all run on the first device's thread: the store's weights
# are in host memory, and that thread looks after it. The other device's thread has no part in
# them. We'll come back to that.
#
# ### The timeline
#
# `helpers.plotting.timeline` draws lanes. It wants to know what kind of work each event is:

# %%
def kind(event):
    moved = event.name.startswith("Copy") or event.name in ("ElementwiseSum", "KVStoreReduce")
    return "communication" if moved else "compute"


def drawn(events, since):
    return {device: [(e.start - since, e.duration, kind(e)) for e in lane]
            for device, lane in lanes(events).items()}


# %% [markdown]
# And when a lane has nothing to do, between the step's first event and its last:

# %%
def span(events):
    return events[0].start, max(e.start + e.duration for e in events)


def idle(events):
    begin, end = span(events)
    return {device: 1 - sum(e.duration for e in lane) / (end - begin)
            for device, lane in lanes(events).items()}


assert np.allclose(list(idle(read(text)).values()), [0.25, 0.25]), "3 of 4 ms each, made by hand"

# %% [markdown]
# **Predict:** which part of the step is communication? Above you see all of it, below the end.

# %% tags=["measured"]
begin, end = span(events)
late = max(next(e.start for e in lane if kind(e) == "communication") for lane in both.values())
window = late - begin - 0.5 * (end - late), end - begin + 0.05 * (end - late)
waits = max(idle(events).values())
fig, _ = timeline(f"A device waits for up to {waits:.0%} of a step of {end - begin:.0f} ms",
                  {"the step": drawn(events, begin), "its end": drawn(events, begin)},
                  {"its end": window})
show(fig, alt="Two lanes, a device each, busy with compute almost throughout; below, the last "
     "part enlarged, with copies and sums after the compute.")

# %% [markdown]
# There are three kinds of gaps to look for. At the start a lane waits for Python, the second one
# until the first one's work has been handed out. When a device has finished its backward pass, it
# waits for the other's gradients, since a sum needs both. And among the copies at the end, a lane
# waits for the other one's sums and updates.
#
# ## Does backward overlap with all-reduce?
#
# In principle it can. The gradient of the *last* layer is ready first, and could be summed while
# the layers before it are still being worked on. Nobody has to program that: the sum depends on
# one gradient, not on the whole backward pass, and the engine knows it. Does it happen? That is a
# question of structure and needs no stop-watch: on each lane, **does the first gradient's copy
# start before the last backward operator has ended?**

# %%
def backward(event):
    return event.name.startswith(("_backward", "ImperativeBulk"))


def head_start(events):
    """ms from each lane's first gradient copy to the end of its backward pass; < 0: none"""
    ends = {device: max(e.start + e.duration for e in lane if backward(e))
            for device, lane in lanes(events).items()}
    return {device: ends[device] - next(e.start for e in lane if e.name == "CopyCPU2CPU")
            for device, lane in lanes(events).items()}


# %% [markdown]
# A lane's first copy must be of a gradient, for new weights come out of gradients that were copied
# before. **Predict**, with the timeline in mind, which sign comes out.

# %%
assert all(ms <= 1e-3 for ms in head_start(events).values()), "this would be overlap"
print({device: sum(backward(e) for e in lane) for device, lane in both.items()},
      "backward events; no copy before their end")

# %% [markdown]
# No overlap at all, and the count says why: the whole backward pass is *one* event, a **bulk**. To
# save itself work, the engine joins up to 15 operators of a backward pass into one piece
# (`MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD`). Its gradients are all ready when the piece has ended,
# and not before. LeNet's backward pass fits into one piece. A network with more layers needs more,
# and then the gradients leave a piece at a time. **Predict** how many pieces twenty dense layers
# make, each of which has two backward operators: the layer's and its relu's.

# %%
deep = nn.HybridSequential()
deep.add(*[nn.Dense(8, activation="relu", in_units=8) for _ in range(20)])
deep.initialize(ctx=pair[0])
rows = nd.ones((4, 8), ctx=pair[0])

# %% [markdown]
# The first pass warms up, the second is recorded:

# %%
def deep_pass():
    with autograd.record():
        out = deep(rows)
    out.backward()


deep_pass()
print(sum(backward(e) for e in record(deep_pass)), "pieces for 40 backward operators")

# %% [markdown]
# ### Taken apart
#
# A hybridised network can be told how large its bulks may be. With 0 each operator is on its own,
# and does the same.

# %%
apart = {"forward_bulk_size": 0, "backward_bulk_size": 0}
assert all((a == b).all() for a, b in zip(never, trained(wait=lambda: None, **apart))), (
    "bulks must not change a result")
single = start(**apart)
free = recorded(single)

# %% [markdown]
# **Predict:** which operators does it consist of now?

# %%
print("events in a backward pass:", Counter(e.name for e in lanes(free)["cpu/0"] if backward(e)))

# %% [markdown]
# Now the sum may start early, and to have something to compare with we take that away again: a
# `waitall` between backward and step.

# %%
held = recorded(single, between=nd.waitall)
assert all(ms <= 1e-3 for ms in head_start(held).values()), "waitall has waited for backward"
assert counts(free) == counts(held) == counts(events), "the same work, only at other times"

# %% [markdown]
# **Predict:** where are the orange bars with the overlap, and where without?

# %% tags=["measured"]
gained = {device: ms for device, ms in head_start(free).items() if ms > 0}
title = (f"The first gradient leaves {max(gained.values()):.0f} ms before backward has ended"
         if gained else "In this recording no gradient left early")
panels = {"each operator on its own": drawn(free, free[0].start),
          "the same, with waitall before the sum": drawn(held, held[0].start)}
fig, _ = timeline(title, panels)
show(fig, alt="Two panels of two lanes each. Above, copies and sums lie among the backward "
     "operators; below, all of them come after.")
for device, ms in head_start(free).items():
    print(f"{device}: first copy {abs(ms):.1f} ms {'before' if ms > 0 else 'after'} the end of "
          "its backward pass")

# %% [markdown]
# Where it says *before*, the engine has found the overlap by itself. It isn't *guaranteed* at each
# step: Python has to get to `trainer.step` before the backward pass is through. Usually it does,
# since it only hands out work. (The last thing that a lane computes is the gradient of the *first*
# layer. That sum can overlap with nothing.)
#
# ### Is it worth it?
#
# Three ways, in turn: bulks as MXNet comes; each operator on its own, with overlap; and the same
# without. On a CPU device a copy is work for the very core that computes. Overlap can fill gaps
# with it, but can't make it go away. **Predict** the order.

# %%
def rounds(ways, count=5, steps=6):
    times = {name: [] for name in ways}
    for _ in range(count + 1):
        for name, work in ways.items():
            nd.waitall()
            begin = time.perf_counter()
            work(steps)
            nd.waitall()
            times[name].append((time.perf_counter() - begin) / steps * 1e3)
    return {name: np.array(row[1:]) for name, row in times.items()}  # ms a step


def report(times, against):
    for name, row in times.items():
        low, middle, high = np.percentile(row / times[against], [25, 50, 75])
        print(f"{name}: {np.median(row):.1f} ms a step" + (name != against) * (
            f", {middle:.2f} times {against!r} (middle half {low:.2f} to {high:.2f})"))


# %% [markdown]
# The first round warms up and is left out. Each round's time is divided by that of the way it is
# compared with, in the same round.

# %% tags=["measured"]
def repeat(training, between=lambda: None):
    return lambda steps: [step(*training, between) for _ in range(steps)]


overlap = rounds({"with overlap": repeat(single), "without": repeat(single, nd.waitall),
                  "as it comes": repeat(usual)})
report(overlap, "with overlap")

# %% [markdown]
# If the middle halves reach to both sides of 1, your machine shows no difference. Note also that
# "without" has two losses in it: no overlap, and devices that stand still until Python, woken up by
# the end of the backward pass, has handed out the sums. How much overlap *could* bring is bounded
# by the communication there is: compare the orange in the timeline. For half a megabyte of
# gradients that is little. For a network with many more weights per operation, or with devices
# further apart, it can decide whether a second device pays; other frameworks sort gradients into
# buckets just for this.
#
# ## Two steps in flight
#
# The same d2l exercise goes on: how could training be changed so that up to two steps overlap? The
# engine would let any number of steps pile up in its queue, so overlap needs no programming. What
# has to be programmed is the *bound*. `lag=0` waits for the loss of the step just handed out,
# `lag=1` for that of the step before, and so on.

# %%
def run(training, steps, lag, marks=None):
    """lag: wait for the loss of so many steps ago; None: for everything, after each step"""
    losses = []
    for t in range(steps):
        begin = time.time() * 1e3
        losses.append(step(*training))
        if marks is not None:
            marks.append((begin, time.time() * 1e3))
        if lag is None:
            nd.waitall()
        elif t >= lag:
            for loss in losses[t - lag]:
                loss.wait_to_read()
    nd.waitall()


# %% [markdown]
# `fit` in `helpers.training` reads losses with a lag of two, in bursts: while steps are short it
# lets up to 32 pile up, so that Python wakes up less often. The results can't differ, and they
# don't:

# %%
for lag in (None, 0, 1, 2):
    training = start()
    run(training, 8, lag)
    assert all((a == b).all() for a, b in zip(never, weights(training[0]))), f"lag {lag}"
print("whatever it waits for: equal to the bit")

# %% [markdown]
# Four steps of each kind, with Python's own times for handing them out.

# %%
def watched(lag, steps=4):
    run(usual, 3, lag)
    marks = []
    return record(lambda: run(usual, steps, lag, marks)), marks


# %% [markdown]
# The same operators in each, four times those of a step:

# %%
seen = {lag: watched(lag) for lag in (None, 0, 1, 2)}
for found, _ in seen.values():
    assert counts(found) == {name: 4 * count for name, count in counts(events).items()}

# %% [markdown]
# How many steps are incomplete when Python begins another? A step ends with its copies, sums and
# updates, and all steps have as many: so count those that have ended.

# %%
def incomplete(events, marks):
    tracked = [e for e in events if e.name in counts(events)]
    each = len(tracked) // len(marks)
    ended = [sum(e.start + e.duration <= begin for e in tracked) for begin, _ in marks]
    return [t - count / each for t, count in enumerate(ended)]


# %% [markdown]
# **Predict** the largest possible number for `waitall` after each step, and for a lag of 0, 1, 2.
# (A step's loss needs *all* the weights that the step before it has made.)

# %%
assert max(incomplete(*seen[None])) == 0, "Python was waiting, so nothing was left"
for lag in (0, 1, 2):
    most = max(incomplete(*seen[lag]))
    assert most <= lag + 1, f"lag {lag}: {most} steps are incomplete"
print("at most 0 with waitall, and at most lag + 1 otherwise")

# %% [markdown]
# So waiting for the newest loss is less than waiting for everything: its backward pass, sums and
# updates may be incomplete. "At most" is what the engine promises. Here is what happened, in steps.
# (A step counts as half complete when half of its copies, sums and updates have ended, which are
# short and come late.)

# %% tags=["measured"]
for lag, (found, marks) in seen.items():
    name = "waitall" if lag is None else f"lag {lag}"
    print(f"{name}: incomplete when Python began each step",
          [round(steps, 2) for steps in incomplete(found, marks)])
late = {device: [e.name for e in lane].index("mean") > [e.name for e in lane].index(
    "ImperativeBulk") for device, lane in both.items()}
print("in the first trace the loss came after the backward pass:", late)

# %% [markdown]
# Look at the last line. The loss's final operator, `mean`, needs the picked probabilities; the
# backward bulk doesn't, and can be queued before it. Where it says `True`, the loss stood in line
# behind the whole backward pass. Then a program that waits for the newest loss waits for nearly all
# of the step, and it is a lag of *one* that keeps two steps in flight: one that the devices
# work on, and one in the queue.
#
# **Predict:** with a lag of one, what is gone from the picture: the time that Python takes, or the
# gaps?

# %% tags=["measured"]
panels, shares = {}, []
for lag, name in ((None, "waitall after each step"), (1, "two steps in flight (lag 1)")):
    found, marks = seen[lag]
    zero = marks[0][0]
    panels[name] = {"Python": [(b - zero, e - b, "python") for b, e in marks], **drawn(found, zero)}
    shares.append(np.mean(list(idle(found).values())))
fig, _ = timeline("Devices wait {:.0%} of the time; with two steps in flight {:.0%}".format(
    *shares), panels)
show(fig, alt="Two panels with lanes for Python and two devices, four steps each. Above, each step "
     "begins with Python handing out work; below, Python is ahead of the devices.")

# %% [markdown]
# Python takes as long as before, but while the devices work; so gaps that were due to it can close.
# Now look at the *devices'* lanes: do their steps overlap as well, in the second panel? They can't.
# The first layer of a step needs weights that both backward passes of the step before it have a
# share in, and those of the first layer come last. A fact of structure again:

# %%
def named(name):
    return [[e for e in lane if e.name == name] for lane in lanes(seen[1][0]).values()]


for t in range(3):
    ended = max(lane[t].start + lane[t].duration for lane in named("ImperativeBulk"))
    began = min(lane[2 * t + 2].start for lane in named("Convolution"))  # two layers a step
    assert began >= ended - 1e-3, f"step {t + 2} computes with weights that are not there yet"
print("no forward pass begins before all backward passes of the step before have ended")

# %% [markdown]
# "Two steps in flight" means that Python's part of one step overlaps with the devices' part of
# another. A program whose steps really overlap on the devices trains with old weights: another
# algorithm (asynchronous SGD), with other results.
#
# **Predict** the gain.

# %% tags=["measured"]
def loop(lag):
    return lambda steps: run(usual, steps, lag)


flight = rounds({"waitall": loop(None), "lag 0": loop(0), "lag 1": loop(1), "lag 2": loop(2),
                 "never wait": loop(6)})
report(flight, "waitall")

# %% [markdown]
# A ratio whose middle half reaches to both sides of 1 is no gain. More than one step in the queue
# can't help much, where Python is quicker with a step than the devices are: they always have a next
# one. A longer queue costs memory, and an interrupt or an error takes longer to show.
#
# And why is the gain no larger, if it is small for you? On a GPU machine Python has a core to
# itself. Here the devices *are* the cores. While Python hands out work, on two cores, a device has
# to step aside, and no order of things changes that.
#
# A program that *reads* a value at each step, a printed loss or a metric, waits too. Chapter 06
# measured what it costs, and that it depends on the place.
#
# ## Where the rest of the speed-up goes
#
# Two devices take more than half as long as one (chapters 04 and 06). What is missing has several
# causes, and each leaves its own trace. How to look for:
#
# | suspect | its trace |
# | --- | --- |
# | Python | CPU time of the main thread per step, by `time.thread_time` |
# | memory fetched anew, page by page | page faults per step, counted by the system |
# | devices share cache and memory | an operator takes longer while the other lane is busy |
# | copies into and out of the store's buffers | orange bars, counted above |
# | updates that run on one device only | updates on one lane, gaps on the other |
# | scratch space shared by devices | convolutions of two lanes that never run at the same time |
#
# The first three can only be measured.

# %%
import resource


def per_step(steps=10):
    faults, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.thread_time()
    begin = time.perf_counter()
    run(usual, steps, lag=1)
    taken = [1e3 * (time.perf_counter() - begin), 1e3 * (time.thread_time() - cpu),
             resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults]
    return np.array(taken) / steps  # ms, ms, page faults


# %% [markdown]
# For the third, forward and backward passes only, of one device alone and of both.

# %%
def passes(which):
    with autograd.record():
        losses = [softmax(usual[0](x), y) for x, y in which]
    autograd.backward(losses)


# %% [markdown]
# The median of five recordings, of the time that the first lane was busy:

# %%
def busy_ms(which, count=5):
    found = [record(lambda: passes(which)) for _ in range(count)]
    return np.median([sum(e.duration for e in lanes(events)["cpu/0"]) for events in found])


# %% [markdown]
# **Predict** which of the suspects weighs most on your machine.

# %% tags=["measured"]
wall, python, faults = per_step()
alone, beside = busy_ms(shards[:1]), busy_ms(shards)
lane = Counter()
for e in seen[1][0]:
    lane[e.name if e.name in counts(events) else "other operators"] += e.duration / 4 / k
print(f"a step takes {wall:.1f} ms; Python's part of it {python:.1f} ms; page faults {faults:.0f}")
print(f"operators of cpu/0 in a pass: alone {alone:.1f} ms, beside cpu/1 {beside:.1f} ms: "
      f"{beside / alone:.2f} times as long")
print("a step's events, ms a lane:", {name: round(ms, 2) for name, ms in lane.most_common()})

# %% [markdown]
# Read it so: Python's time is taken from the two cores together. What operators take longer beside
# each other is the machine's own limit: no framework can win it back on these cores. Copies, sums
# and updates are there in ms, and what is not in any of these is in the gaps.
#
# ### Updates and copies: another way round
#
# With `update_on_kvstore=False` (chapter 07) the store only sums, and each device updates its own
# replica. **Predict** the number of copies and updates, and where the updates run.

# %%
own = start(on_store=False)
each = recorded(own)
print(counts(each))

# %% [markdown]
# Three assertions: copies, lanes, and the same training.

# %%
assert counts(each)["CopyCPU2CPU"] == 2 * k * P, "no copy of the weights in the store"
per_lane = [sum(e.name == "multi_sgd_update" for e in lane) for lane in lanes(each).values()]
assert per_lane[0] == per_lane[1] > 0, "each device updates its own replica"
assert all((a == b).all() for a, b in zip(never, trained(lambda: None, on_store=False)))

# %% [markdown]
# A copy fewer for each parameter, updates on both lanes, several parameters in one call (*multi*),
# and the same weights to the bit. Whether that is to be seen on the clock is another question.
#
# ### Scratch space
#
# An operator such as a convolution needs scratch space, and MXNet's CPU devices take it from a
# common pool of `MXNET_CPU_TEMP_COPY` pieces, which `helpers` sets to 64. The setting counts only
# when MXNet starts, so it takes a new process to see what a pool of *one* does. The program below
# runs convolutions on both devices.

# %%
PROGRAM = """
import sys
import helpers, mxnet as mx
from mxnet import nd, profiler
profiler.set_config(profile_imperative=True, continuous_dump=True, filename=sys.argv[1])
data = [[nd.ones(s, ctx=mx.cpu(r)) for s in ((16, 20, 13, 13), (50, 20, 5, 5))] for r in range(2)]
for _ in range(2):  # the first time warms up
    for _ in range(30):
        for x, w in data:
            nd.Convolution(x, w, no_bias=True, kernel=(5, 5), num_filter=50)
    nd.waitall()
    profiler.set_state("run")
profiler.set_state("stop")
profiler.dump()
"""

# %% [markdown]
# We read its trace with the same function, and count the pairs of convolutions that ran at the same
# time on different lanes.

# %%
import os
import subprocess
import sys


def together(pieces):
    file = f"{folder.name}/pool{pieces}.json"
    subprocess.run([sys.executable, "-c", PROGRAM, file], check=True, env={
        **os.environ, "MXNET_CPU_TEMP_COPY": str(pieces), "PYTHONPATH": os.pathsep.join(sys.path)})
    with open(file) as trace:
        lane = lanes([e for e in read(trace.read()) if e.name == "Convolution"])
    assert [len(found) for found in lane.values()] == [30, 30], "all of them, on each device"
    return sum(a.start + 1e-3 < b.start + b.duration and b.start + 1e-3 < a.start + a.duration
               for a in lane["cpu/0"] for b in lane["cpu/1"])


# %% [markdown]
# **Predict** the number for a pool of one.

# %%
assert together(1) == 0, "two operators can't use the same scratch space at the same time"
print("one scratch space: no two convolutions at the same time")

# %% [markdown]
# Two devices, and never both in a convolution. With 64 pieces they hardly ever want the same one:

# %% tags=["measured"]
print("64 pieces:", together(64), "pairs of convolutions ran at the same time")

# %% [markdown]
# In a timeline this fault looks like gaps in front of convolutions while the other lane is busy.
# As MXNet comes, the pool has four pieces; chapter 04 measures what that does to training.
#
# ### What did not help
#
# Not every idea does. On the machine where this was written they made no difference, each raced
# against the usual step in one run: hybridising LeNet or its loss, smaller and larger bulks in the
# forward pass, updates on each device, another way of scheduling the threads, one memory arena for
# both, huge pages, and the allocator's settings given before the process starts rather than from
# inside it. What did help beside scratch space: that `fit` reads losses in bursts, so that Python
# wakes up less often (chapter 06), that each hop writes into an array that already exists
# (chapter 03), and that ResNet-18's relu takes arrays in the layout of the convolutions
# (chapter 08).
#
# ## Summary
#
# - Calls hand out work. A clock that doesn't wait measures Python. `waitall` changes no result.
# - A trace is pairs of events on tracks. Lanes are threads; check that no lane does two things at
#   once, and count operators against what was called.
# - A step on $k$ devices with $P$ parameters has $(2k + 1) P$ copies, $P$ sums and $P$ updates,
#   all updates on one lane. With `update_on_kvstore=False` it has $2 k P$ copies, and each device
#   updates.
# - A bulk of operators gives its gradients away only when it has ended. As MXNet comes, LeNet's
#   backward is one bulk, and nothing overlaps. Taken apart, the engine finds the overlap itself.
# - Steps in flight overlap Python with the devices, not devices' steps with each other. Bound them
#   by waiting for an older loss; the newest may stand behind the whole backward pass.
# - Claims about overlap are claims of structure. Gains are measured, in turn, and may be nothing.
#
# Next, chapter 11: how far it scales, measured and predicted.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs",
# exercise 3, and "Asynchronous Computation"; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets; MXNet's documentation, *Dependency Engine for Deep
# Learning*.

# %% [markdown]
# ## Exercises
#
# 1. **Three devices.** How many copies and sums has a step on three devices? Write the formula
#    down, then count. (The profiler has tracks for as many CPU devices as there are cores; count
#    by name.)
# 2. **The other store.** With `kvstore="local"` the sum is made on the host. Which name has the
#    sum in the trace, how many copies are there for a parameter, and is there an `ElementwiseSum`?
# 3. **Larger pieces.** `backward_bulk_size=4` joins four operators. From how many pieces does the
#    backward pass of the network consist then, with 1, 4 and 15? What does that mean for the
#    moment at which the first gradient may leave?
# 4. **The slow operator.** Which operator takes most of a forward pass of `usual`'s network, and
#    is it where most of the arithmetic is? Write max pooling anew, as the largest of four slices
#    of its input. Show that it gives the same numbers and, behind a relu, the same gradients. Race
#    the two.

# %% [markdown]
# ### Answer 1
#
# $(2k + 1) P$ copies and $P$ sums: seven copies a parameter.

# %% tags=["solution", "trains"]
three = [mx.cpu(r) for r in range(3)]
net = nn.Dense(5, in_units=7)
net.initialize(ctx=three)
trainer = gluon.Trainer(net.collect_params(), "sgd")
pieces = [nd.ones((4, 7), ctx=device) for device in three]


def three_steps():
    for _ in range(3):
        with autograd.record():
            outputs = [net(x) for x in pieces]
        autograd.backward(outputs)
        trainer.step(12)


three_steps()
assert counts(record(three_steps)) == {"CopyCPU2CPU": 3 * 7 * 2, "ElementwiseSum": 3 * 2,
                                       "multi_sgd_update": 3 * 2}, "7 copies a parameter and step"

# %% [markdown]
# ### Answer 2
#
# `KVStoreReduce`. Each device's gradient is copied to the host, and the new weights
# from there to each device: $2k$ copies a parameter, none in between.

# %% tags=["solution"]
host = recorded(start(kvstore="local"))
assert counts(host)["CopyCPU2CPU"] == 2 * k * P and counts(host)["ElementwiseSum"] == 0
assert sum(e.name == "KVStoreReduce" for e in host) == P, "one sum for each parameter"

# %% [markdown]
# ### Answer 3
#
# The larger the pieces, the fewer there are, and the later the first gradient may
# leave: at the end of the piece in which it is made.

# %% tags=["solution"]
found = {}
for most in (1, 4, 15):
    events = recorded(start(forward_bulk_size=0, backward_bulk_size=most))
    found[most] = sum(backward(e) for e in lanes(events)["cpu/0"])
assert found[1] > found[4] > found[15] >= 1
print("pieces of the backward pass, the loss's own among them:", found)

# %% [markdown]
# ### Answer 4
#
# Each slice takes one corner of every 2 x 2 window.

# %% tags=["solution"]
def four_slices(x):  # [n, channels, even, even] -> [n, channels, half, half]
    a, b, c, d = (nd.slice(x, begin=(None, None, i, j), end=(None,) * 4, step=(1, 1, 2, 2))
                  for i in (0, 1) for j in (0, 1))
    return nd.maximum(nd.maximum(a, b), nd.maximum(c, d))


def pooling(x):
    return nd.Pooling(x, kernel=(2, 2), stride=(2, 2), pool_type="max")


# %% [markdown]
# Where several entries of a window are zero after relu, the two send the gradient to different
# ones. But relu lets none of it through at zero, so behind it all is equal, to the bit.

# %% tags=["solution"]
def both_ways(way, x):
    x.attach_grad()
    with autograd.record():
        out = way(nd.relu(x))
    out.backward(nd.arange(out.size).reshape(out.shape))
    return out.asnumpy(), x.grad.asnumpy()


x = nd.random.normal(shape=(64, 20, 26, 26))
for ours, theirs in zip(both_ways(four_slices, x), both_ways(pooling, x)):
    assert (ours == theirs).all(), "the same numbers and gradients"

# %% [markdown]
# And the clock, first by operator, then for the two poolings:

# %% tags=["solution", "measured"]
spent = Counter()
for e in record(lambda: passes(shards[:1])):
    spent[e.name if e.name in LAYERS else "all else, backward among it"] += e.duration
print({name: f"{ms:.1f} ms" for name, ms in spent.most_common()})
report(rounds({name: lambda steps, way=way: [both_ways(way, x) for _ in range(steps)]
               for name, way in (("four slices", four_slices), ("Pooling", pooling))}), "Pooling")

# %% [markdown]
# Convolutions have nearly all of the arithmetic, and pooling none to speak of. If it takes long
# nevertheless, your processor is one for which MXNet's CPU library, oneDNN, has no fast pooling in
# this layout: with `DNNL_VERBOSE=1` in the environment it names the implementation that it took.
