# %% [markdown]
# # 10 · Asynchrony and overlap
#
# Your Python program doesn't compute. It hands out work and goes on (chapter 01). So a clock in the
# program shows little of what happens. This chapter reads the engine's own records, adds up where
# the time of a step goes, and measures how much of it overlap saves.
#
# ## What you'll do
#
# Record training steps with MXNet's profiler and draw them as timelines. Split the time of a step
# into five parts, for three networks, and compare the sum with the clock. Then overlap
# communication with the backward pass, and with the next step.
#
# ## What you'll learn
#
# - what a clock sees with and without `waitall`;
# - how to read a trace, and how to check that you read it right;
# - where two devices lose time, part by part;
# - when communication overlaps with the backward pass, and when that saves time;
# - how much the sizes of layers can matter, and how to find out.
#
# ## What you need
#
# Chapters 01 and 06 to 08, two cores, and 4 GB of free memory. No GPU and no data: random images
# will do, if these operators' time doesn't depend on the pictures, as we assume.
# Reading takes {reading time}, running one to two minutes.

# %%
import time

from helpers.plotting import BLUE, GREEN, GREY, ORANGE, figure, show, timeline
from helpers.timing import Others

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd, profiler
from mxnet.gluon import nn

# %% [markdown]
# Everything here runs on two simulated devices, even if you have GPUs: a GPU's trace has other
# names.

# %%
pair = [mx.cpu(r) for r in range(2)]
k = len(pair)

# %% [markdown]
# ## The queue
#
# A call such as `a + 1` checks shapes, makes an empty array for the result, puts the work into the
# engine's queue and returns. We can prove it without a clock, by an operator that does nothing
# until somebody opens a gate. `CustomOp` is MXNet's way to write an operator in Python.

# %%
import threading

gate, log = threading.Event(), []


class Gate(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        log.append("the gate has opened" if gate.wait(timeout=600) else "nobody has opened it")
        self.assign(out_data[0], req[0], in_data[0])


# %%
@mx.operator.register("gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


# %% [markdown]
# **Predict:** a hundred additions depend on the gate. Where does Python stop, and what is in the
# log when the cell ends?

# %%
gate.clear(), log.clear()
x = nd.Custom(nd.zeros(3, ctx=pair[1]), op_type="gate")
for _ in range(100):
    x = x + 1
assert log == [], "Python has not waited"
print("100 additions handed out; the log:", log)

# %% [markdown]
# It doesn't stop. The array `x` has a shape, a type and a device, and no values yet. Reading them
# waits. We open the gate, and read.

# %%
gate.set()
assert x.asnumpy().tolist() == [100.0] * 3, "reading waits for all that the values depend on"
print("the log:", log)
assert log == ["the gate has opened"], "it must open because we opened it"

# %% [markdown]
# ## What a clock sees
#
# Three networks will show three kinds of step: chapter 06's LeNet, Gluon's own ResNet-18 for small
# images, and dense layers with many weights and little work for each.

# %%
def lenet(channels=(20, 50)):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(channels[0], kernel_size=3, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Conv2D(channels[1], kernel_size=5, activation="relu"), nn.MaxPool2D(2, 2),
            nn.Dense(128, activation="relu"), nn.Dense(10))
    return net


# %%
def resnet18():
    return gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=True)


def wide():
    net = nn.HybridSequential()
    net.add(*[nn.Dense(2048, activation="relu") for _ in range(4)], nn.Dense(10))
    return net


# %% [markdown]
# A `Training` holds a network, its Trainer, and shards that are already on their devices. The
# weights begin equal each time. `options`, if there are any, go to `hybridize` (chapter 08).

# %%
from collections import Counter, namedtuple

Training = namedtuple("Training", "net trainer shards size")
softmax = gluon.loss.SoftmaxCrossEntropyLoss()


def prepare(make, size, devices=pair, on_store=None, **options):
    mx.random.seed(0)
    batch = nd.random.uniform(shape=(size, 1, 28, 28)), nd.arange(size) % 10
    shards = list(zip(*(gluon.utils.split_and_load(a, devices) for a in batch)))
    net = make()
    net.initialize(mx.init.Xavier(), ctx=devices)
    if options:
        net.hybridize(**options)
    for x, _ in shards:
        net(x)
    return Training(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01},
                                       update_on_kvstore=on_store), shards, size)


# %% [markdown]
# The step has a place to do something between the backward pass and the all-reduce.

# %% tags=["trains"]
def step(training, between=lambda: None):
    with autograd.record():
        losses = [softmax(training.net(x), y) for x, y in training.shards]
    autograd.backward(losses)
    between()
    training.trainer.step(training.size)
    return losses


# %% [markdown]
# We read the clock twice: when the loop ends, and when the work has ended. The first three steps
# are warm-up: they fetch memory, and the store gets its keys.

# %% tags=["measured"]
usual = prepare(lenet, 128)
for _ in range(3):
    step(usual)
nd.waitall()
begin = time.perf_counter()
for _ in range(20):
    step(usual)
naive = time.perf_counter() - begin
nd.waitall()
true = time.perf_counter() - begin
print(f"20 steps: {naive * 1e3:.0f} ms when the loop ended, {true * 1e3:.0f} ms when the work did; "
      f"{20 * 128 / naive:,.0f} or {20 * 128 / true:,.0f} images/s")

# %% [markdown]
# The smaller time is what Python took to hand out twenty steps. d2l's chapter calls `npx.waitall()`
# before its timer stops, and asks what removing it does. The epoch looks shorter. **Predict:** do
# the weights change, if nobody ever waits, or if everybody waits all the time?

# %%
def weights(net):
    return [a.asnumpy() for p in net.collect_params().values() for a in p.list_data()]


def trained(wait=lambda: None, steps=8, **options):
    training = prepare(lenet, 128, **options)
    for _ in range(steps):
        step(training, between=wait)
        wait()
    return weights(training.net)


# %%
never, always = trained(), trained(wait=nd.waitall)
untrained = weights(prepare(lenet, 128).net)
assert all((a == b).all() for a, b in zip(never, always)), "waiting must not change a result"
assert all((a != b).any() for a, b in zip(never, untrained)), "all of them have learned"
print("with and without waiting:", len(never), "arrays equal to the bit")

# %% [markdown]
# The engine is told which arrays each operator reads and writes (in chapter 08 once wrongly), and
# starts it when those are ready. `waitall` is for clocks, for errors (chapter 01), and to bound the
# queue.
#
# ## A trace
#
# MXNet's profiler writes down when each operator began and ended.

# %%
import json
import tempfile

folder = tempfile.TemporaryDirectory()
trace_file = f"{folder.name}/trace.json"
profiler.set_config(profile_imperative=True, profile_symbolic=True, profile_api=False,
                    continuous_dump=False, filename=trace_file)

# %% [markdown]
# The file has the format of Chrome's trace viewer. An event is a small JSON object: `ph` is `"B"`
# for begin or `"E"` for end, `ts` the time in microseconds, `pid` a device, `tid` a
# thread. Events with `"M"` name the devices. MXNet 1.9.1 writes those into its first file only, and
# begins every later one with a stray comma (`Profiler::DumpProfile` in `src/profiler/profiler.cc`),
# so we repair the comma and remember the names. `DeleteVariable` is the engine's own housekeeping.

# %%
Event = namedtuple("Event", "device thread name start duration")  # ms
tracks = {}


def read(text):
    raw = json.loads(text.replace("[\n,", "[", 1))["traceEvents"]
    tracks.update({e["pid"]: e["args"]["name"] for e in raw if e["ph"] == "M"})
    begun, events = {}, []
    for e in raw:
        key = e.get("pid"), e.get("tid"), e["name"]
        if e["ph"] == "B":
            begun[key] = e["ts"]
        elif e["ph"] == "E" and e["name"] != "DeleteVariable":
            start = begun.pop(key)
            events.append(Event(tracks[e["pid"]], e["tid"], e["name"],
                                start / 1e3, (e["ts"] - start) / 1e3))
    return sorted(events, key=lambda event: event.start)


# %% [markdown]
# First a hand-made trace whose answer we know: two devices, three operators.

# %%
def made(phase, ts, pid, name):
    return {"name": name, "ph": phase, "ts": ts, "pid": pid, "tid": 70 + pid}


names = [{"name": "", "ph": "M", "args": {"name": f"cpu/{r}"}, "pid": r} for r in range(2)]
by_hand = read(json.dumps({"traceEvents": [
    *names, made("B", 2000, 1, "dot"), made("B", 1000, 0, "dot"), made("E", 1500, 0, "dot"),
    made("B", 1500, 0, "ElementwiseSum"), made("E", 5000, 1, "dot"),
    made("E", 4000, 0, "ElementwiseSum")]}))
assert by_hand == [("cpu/0", 70, "dot", 1.0, 0.5), ("cpu/0", 70, "ElementwiseSum", 1.5, 2.5),
                   ("cpu/1", 71, "dot", 2.0, 3.0)], "in the order in which they began, in ms"

# %% [markdown]
# Then real ones. A recording also notes three times, on the profiler's clock: when Python began,
# when it had handed out all the work, and when the work was done.

# %%
Recording = namedtuple("Recording", "events begin handed end")


def now():
    return time.time() * 1e3  # ms


def record(work):
    nd.waitall()
    profiler.set_state("run")
    begin, _, handed = now(), work(), now()
    nd.waitall()
    end = now()
    profiler.set_state("stop")
    profiler.dump(finished=False)
    with open(trace_file) as file:
        events = read(file.read())
    for event in events:
        assert begin - 1 < event.start <= event.start + event.duration < end + 1, "one clock"
    return Recording(events, begin, handed, end)


def length(recording):
    return recording.end - recording.begin


# %% [markdown]
# Five products on one device and three on the other must appear as five and three events:

# %%
matrices = [nd.ones((300, 300), ctx=device) for device in pair]
products = record(lambda: [nd.dot(m, m) for m, n in zip(matrices, (5, 3)) for _ in range(n)])
found = Counter((e.name, e.device) for e in products.events)
assert found == {("dot", "cpu/0"): 5, ("dot", "cpu/1"): 3}, "where the inputs are"

# %% [markdown]
# ## A step on two devices
#
# One recording may be odd. So we record several, and look at the one of median length.

# %%
def typical(training, between=lambda: None, count=7):
    for _ in range(3):
        step(training, between)
    return sorted((record(lambda: step(training, between)) for _ in range(count)),
                  key=length)[count // 2]


seen = typical(usual)
print(sorted({e.device for e in seen.events}), len({e.thread for e in seen.events}), "threads")

# %% [markdown]
# `cpu pinned` is host memory, in which the store keeps its copy of the weights. Each device has one
# thread, and the first device's also looks after the host's memory. So a *lane* is a thread, named
# after its device.

# %%
def lanes(events):
    home = {e.thread: e.device for e in events if e.device.startswith("cpu/")}
    return {device: [e for e in events if home.get(e.thread) == device]
            for device in sorted(set(home.values()))}


# %% [markdown]
# Three things hold for a correct reading, whatever the machine did: each device has a thread of its
# own, every event is in a lane, and no lane does two things at once. (The clock counts whole
# microseconds.)

# %%
def check(events):
    homes = {(e.thread, e.device) for e in events if e.device.startswith("cpu/")}
    assert len(homes) == len(lanes(events)) == len(pair), "a thread for each device"
    assert sum(len(lane) for lane in lanes(events).values()) == len(events), "each has its lane"
    for device, lane in lanes(events).items():
        for before, after in zip(lane, lane[1:]):
            end = before.start + before.duration
            assert end <= after.start + 2e-3, f"{device}: {after.name} began within {before.name}"


check(seen.events)

# %% [markdown]
# **Predict:** LeNet has eight parameters. With chapter 07 in mind, how many copies, sums and
# updates are there in a step on two devices?

# %%
def counts(events):
    found = Counter(e.name for e in events)
    return {name: found[name] for name in ("CopyCPU2CPU", "ElementwiseSum", "multi_sgd_update")}


P = sum(p.grad_req != "null" for p in usual.net.collect_params().values())
print(counts(seen.events))
assert counts(seen.events) == {"CopyCPU2CPU": (2 * k + 1) * P, "ElementwiseSum": P,
                               "multi_sgd_update": P}, "from the numbers of parameters and devices"

# %% [markdown]
# For each parameter, each of $k$ devices copies its gradient into a buffer on the key's owner, the
# owner adds them up, an update makes new weights in the store, and those are copied to the owner
# and from there to $k$ devices. The shards were there beforehand, so every copy in this trace is
# communication. Where do sums and updates run?

# %%
for name in ("ElementwiseSum", "multi_sgd_update"):
    print(name, {device: sum(e.name == name for e in lane)
                 for device, lane in lanes(seen.events).items()})

# %% [markdown]
# The owners share the sums, by size and not by number: `cpu/0` has the one large parameter. All
# updates run on the first device's thread, because the store's weights are in host memory. **On
# GPUs:** the weights stay on the GPU that owns the key, and that GPU updates them (chapter 07).
#
# ### The timeline

# %%
COMMUNICATION = "CopyCPU2CPU", "ElementwiseSum", "KVStoreReduce", "add_n", "send::CopyCPU2CPU"


def kind(event):
    if event.name in COMMUNICATION:
        return "communication"
    return "update" if event.name.endswith("_update") else "compute"


def drawn(recording):
    python = {"Python": [(0, recording.handed - recording.begin, "Python")]}
    return python | {device: [(e.start - recording.begin, e.duration, kind(e)) for e in lane]
                     for device, lane in lanes(recording.events).items()}


# %% tags=["measured"]
last = max(e.start + e.duration for e in seen.events if kind(e) == "compute") - seen.begin
busy = np.mean([sum(e.duration for e in lane if kind(e) == "compute")
                for lane in lanes(seen.events).values()])
whole = drawn(seen)
fig, _ = timeline(f"LeNet: a device computes for {busy:.0f} of {length(seen):.0f} ms, on average",
                  {"the step": whole, "its end": {d: whole[d] for d in lanes(seen.events)}},
                  {"its end": (last - 0.3, length(seen) + 0.1)})
show(fig, alt="Three lanes: Python, which hands out the work at first, and two devices, which "
     "mostly compute. Below, the end enlarged: short copies, sums and updates, and the loss.")

# %% [markdown]
# To look at a recording more closely, write it to a file and open that at
# [ui.perfetto.dev](https://ui.perfetto.dev).

# %%
def save(path):
    """The latest recording, with the names of its devices."""
    with open(trace_file) as file:
        raw = json.loads(file.read().replace("[\n,", "[", 1))["traceEvents"]
    named = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
             for pid, name in tracks.items()]
    with open(path, "w") as file:
        json.dump(named + [e for e in raw if e["ph"] in "BE"], file)


save(f"{folder.name}/step.json")

# %% [markdown]
# ## Where the time goes
#
# At each moment of a step a lane computes, communicates, updates weights, or is idle. Idle time
# while Python is still handing out work we count as *Python*, the rest as *waiting*: for the other
# lane, or for the engine itself. (Compute is wall time, so it includes moments in which Python or
# another program had the core.)

# %%
PARTS = "compute", "communication", "update", "Python", "waiting"


def budget(recording):
    """ms of the step in each part, a mean over the lanes"""
    events, begin, handed, end = recording
    parts, found = Counter(), lanes(events)
    for lane in found.values():
        edges = [begin, *(t for e in lane for t in (e.start, e.start + e.duration)), end]
        for event in lane:
            parts[kind(event)] += event.duration
        for stop, start in zip(edges[::2], edges[1::2]):  # from one event's end to the next's begin
            assert start > stop - 2e-3, "a lane does one thing at a time"
            python = max(0, min(start, handed) - stop)
            parts["Python"] += python
            parts["waiting"] += start - stop - python
    return np.array([parts[part] / len(found) for part in PARTS])


# %% [markdown]
# A hand-made recording has each kind once. Python has handed out everything after 1.75 of 5 ms:

# %%
def at(device, name, start, duration):
    return Event(f"cpu/{device}", 70 + device, name, start, duration)


kinds = [at(0, "dot", 1, 0.5), at(0, "CopyCPU2CPU", 1.5, 1), at(0, "sgd_mom_update", 2.5, 1.5),
         at(1, "dot", 2, 2), at(1, "ElementwiseSum", 4, 1)]
expected = (0.5 + 2) / 2, (1 + 1) / 2, 1.5 / 2, (1 + 1.75) / 2, (1 + 0.25) / 2
assert np.allclose(budget(Recording(kinds, 0, 1.75, 5)), expected), "lane by lane, on paper"

# %% [markdown]
# Within a recording the parts fill the step by construction. Do they add up to a step that isn't
# recorded, too? We take turns: a step with the clock only, then one recorded, on one device and on
# two. Before them goes a step that nobody measures: straight after another network's, a step of the
# wide network took up to 5 % longer. We sort the steps by length and average the middle third or
# more, so that one disturbed step doesn't count.

# %%
def middle(rows):
    rows = np.array(rows)
    order = np.argsort(rows.sum(axis=1))
    return rows[order[len(order) // 3:len(order) - len(order) // 3]].mean(axis=0)


def clock(training):
    nd.waitall()
    begin = time.perf_counter()
    step(training)
    nd.waitall()
    return [1e3 * (time.perf_counter() - begin)]  # ms


# %%
def compare(make, size, rounds, **options):
    ways = [prepare(make, size, devices, **options) for devices in (pair[:1], pair)]
    for training in ways * 2:
        step(training)
    with Others() as others:
        rows = [[(step(t), clock(t), budget(record(lambda t=t: step(t))))[1:]
                 for t in ways] for _ in range(rounds)]
    clocks, parts = (np.array([middle([row[i][j] for row in rows]) for i in range(2)])
                     for j in range(2))
    totals = np.array([[[sum(each) for each in way] for way in row] for row in rows])
    low, high = np.percentile(totals, [25, 75], axis=0)
    quiet = others.share <= 0.02 and ((high - low) <= 0.04 * np.median(totals, axis=0)).all()
    lost = np.percentile([row[1][1] - row[0][1] / 2 for row in rows], [25, 50, 75], axis=0)
    return clocks[:, 0], parts, lost, quiet  # ms; what each part loses: quartiles over the rounds


# %% [markdown]
# The sum is only checked where the machine was quiet: other programs took at most 2 % of the
# processor, and the middle half of all times is no wider than 4 %. Otherwise "disturbed" is
# printed.

# %%
def add_up(name, clocks, parts, lost, quiet):
    print(f"{name}: speed-up {clocks[0] / clocks[1]:.2f}"
          + " (disturbed: sum not checked)" * (not quiet))
    for clock_ms, row in zip(clocks, parts):
        rest = 1 - row.sum() / clock_ms
        print(f"  {clock_ms:6.1f} ms =", " + ".join(
            f"{ms:.1f} {part}" for ms, part in zip(row, PARTS)), f"; clock minus sum {rest:+.1%}")
        assert not quiet or abs(rest) <= 0.05, "recorded and unrecorded steps must agree"


# %% [markdown]
# ResNet-18 is hybridised as in chapter 08. **Predict:** which part of LeNet's step on two devices
# is the largest after compute? And of the wide network's?

# %% tags=["measured", "few: 5=> 3", "few: 9)=> 5)", "few: 12)=> 5)"]
static = {"static_alloc": True, "static_shape": True}
budgets = {"LeNet, batch 256": compare(lenet, 256, 9),
           "ResNet-18, batch 32": compare(resnet18, 32, 5, **static),
           "wide, batch 32": compare(wide, 32, 12)}
for name, found in budgets.items():
    add_up(name, *found)

# %% [markdown]
# Of each pair of lines the first is one device, the second two. With a speed-up of 2 a step would
# take half of one device's time; the rest is lost. For each part: its mean over two lanes, minus
# half of its time on one device, divided by the time lost. The medians over the rounds needn't add
# up to 100 %; the brackets have the middle half.

# %% tags=["measured"]
for name, (clocks, _, lost, _) in budgets.items():
    missing = clocks[1] - clocks[0] / 2
    print(f"{name}: {missing:.1f} ms longer than half:", ", ".join(
        f"{part} {median / missing:.0%} ({low / missing:.0%} to {high / missing:.0%})"
        for part, low, median, high in zip(PARTS, *lost)))

# %% tags=["measured"]
import matplotlib.pyplot as plt

COLORS = dict(zip(PARTS, (BLUE, ORANGE, GREEN, GREY, "white")))
over = [2 * clocks[1] / clocks[0] for clocks, *_ in budgets.values()]
fig, ax = figure("Two devices take {:.2f}, {:.2f}, {:.2f} times half of one's time".format(*over),
                 "step time / half of one device's (thick line: the clock)", size=(7.0, 3.4))
for row, (clocks, parts, *_) in enumerate(budgets.values()):
    for at_row, values in ((row - 0.2, parts[0] / 2), (row + 0.2, parts[1])):
        values = values / (clocks[0] / 2)
        ax.barh([at_row] * 5, values, 0.36, left=np.cumsum(values) - values, edgecolor="black",
                color=COLORS.values(), hatch=("", "//", "xx", "", ""), lw=0.5)
    ax.plot([2 * clocks[1] / clocks[0]] * 2, (row, row + 0.4), color="black", lw=3)
ax.axvline(1, color="black", ls=":", lw=1)
ax.set_yticks(range(3), [f"{name}\nhalf of one,\ntwo devices" for name in budgets], fontsize=8)
ax.invert_yaxis()
fig.legend([plt.Rectangle((0, 0), 1, 1, fc=c, ec="black", lw=0.5) for c in COLORS.values()],
           PARTS, loc="outside lower right", ncols=5, fontsize=8)
show(fig, alt="Three pairs of bars, each split into five parts. The upper bar of a pair is half of "
     "one device's step, the lower one two devices' step, which is longer. A thick line marks what "
     "the clock said.")

# %% [markdown]
# In our runs:
#
# - *LeNet* misses half of one device's time by a few ms, partly in Python and waiting. What compute
#   adds varies from run to run.
# - *ResNet-18* loses to compute (exercise 2 tries to separate two causes), to communication and to
#   waiting.
# - *The wide network* is slower on two devices. It communicates for half as long as one device
#   computes, or longer. Its updates are not divided: each step updates every weight, here on one
#   lane; the mean over lanes counts half of that time. Meanwhile the other lane waits. (One device
#   has no store, and updates several arrays at a time.)
#
# ## Does the backward pass overlap with the all-reduce?
#
# The gradient of the *last* layer is ready first, and could be summed while the backward pass goes
# on. Nobody has to program that: a parameter's sum needs its gradient from each device, not the
# whole pass, and the engine knows it. Does it happen? On each lane: does the first gradient's copy
# start before the last backward operator has ended?

# %%
def backward(event):
    """Or forward: a hybridised network's bulks share a name. Only the last one's end matters."""
    return "_backward" in event.name or event.name == "ImperativeBulk"


def head_start(recording):
    """ms from each lane's first gradient copy to the end of its backward pass; < 0: no overlap"""
    found = []
    for lane in lanes(recording.events).values():
        passes = [e for e in lane if backward(e)]
        copy = next(e for e in lane if e.name == "CopyCPU2CPU")
        found.append(passes[-1].start + passes[-1].duration - copy.start)
    return np.array(found)


# %% [markdown]
# Tried on two lanes made by hand, the first with 2 ms of overlap, the second without:

# %%
lane = [at(0, "_backward_dot", 1, 1), at(0, "CopyCPU2CPU", 2, 0.5),
        at(0, "_backward_dot", 2.5, 1.5), at(0, "CopyCPU2CPU", 4, 0.5),
        at(1, "_backward_dot", 1, 2), at(1, "CopyCPU2CPU", 3.5, 1)]
assert np.allclose(head_start(Recording(lane, 0, 1, 5)), [2, -0.5])

# %% [markdown]
# **Predict** the sign for LeNet, with the timeline in mind.

# %%
assert (head_start(seen) <= 2e-3).all(), "this would be overlap"
print([sum(backward(e) for e in lane) for lane in lanes(seen.events).values()],
      "backward event on each lane; no copy before its end")

# %% [markdown]
# No overlap within a lane, and the count says why: the whole backward pass is *one* event, a
# **bulk**. To save overhead, the engine joins up to 15 operators of a backward pass
# (`MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD`), and a bulk's gradients are all ready when it ends,
# not before. A hybridised network can be told how large its bulks may be. With 0 each of its
# operators is on its own. (PyTorch's DDP joins *gradients* into buckets, which limits overlap too:
# chapter 14.)

# %%
apart = {"forward_bulk_size": 0, "backward_bulk_size": 0}
assert all((a == b).all() for a, b in zip(never, trained(**apart))), "bulks change no result"

# %% [markdown]
# ResNet-18 has more operators than fit into a bulk, so its gradients become ready in several groups
# with the default bulk size. The wide network has more to communicate. We record it with each
# operator on its own, and in turns with a `waitall` before the all-reduce, which takes the overlap
# away. We look at the pair whose ratio is the median.

# %%
big, single = prepare(resnet18, 32, **static), prepare(wide, 32, **apart)
typical(single, count=1)
pairs = [[record(lambda b=b: step(single, b)) for b in (lambda: None, nd.waitall)]
         for _ in range(7)]
free, held = sorted(pairs, key=lambda pair: length(pair[0]) / length(pair[1]))[len(pairs) // 2]
assert (head_start(held) <= 2e-3).all(), "waitall has waited for the backward pass"
assert (head_start(free) > 0).all(), "overlap on each lane"
assert counts(free.events) == counts(held.events), "the same work, only at other times"
passes = [sum(backward(e) for e in lane) for lane in lanes(free.events).values()]
assert min(passes) >= 10, "each operator on its own"

# %% tags=["measured"]
groups = typical(big, count=5)
assert (head_start(groups) > 0).all(), "the first gradients don't wait for the last"
most = 1 + max(length(free), length(held))
names = "ResNet-18, default bulks", "wide, each operator on its own", "wide, with waitall"
first = [min(e.start for e in recording.events if e.name == "CopyCPU2CPU") - recording.begin
         for recording in (free, held)]
fig, _ = timeline(
    "Wide: the first gradient leaves after {:.0f} ms, with waitall after {:.0f}".format(*first),
    dict(zip(names, map(drawn, (groups, free, held)))), {name: (-1, most) for name in names[1:]})
show(fig, alt="Three panels with lanes for Python and two devices. In the first two, communication "
     "lies among the backward operators; in the last, all of it comes after them. The first lane "
     "has long updates, while the second has nothing to do.")

# %% [markdown]
# The engine finds the overlap by itself. Is it worth anything? We race with and without, in turns,
# and divide within each round.

# %%
def rounds(ways, count=7):
    times = {name: [] for name in ways}
    for _ in range(count + 1):
        for name, work in ways.items():
            nd.waitall()
            begin = time.perf_counter()
            steps = work()
            nd.waitall()
            times[name].append((time.perf_counter() - begin) / steps * 1e3)
    return {name: np.array(row[1:]) for name, row in times.items()}  # ms; the first warms up


def report(times, against):
    for name, row in times.items():
        low, middle, high = np.percentile(row / times[against], [25, 50, 75])
        print(f"{name}: {np.median(row):.1f} ms a step" + (name != against) * (
            f"; ratio to {against!r} {middle:.2f} (middle half {low:.2f} to {high:.2f})"))


# %% tags=["measured", "few: 5)=> 2)", "few: 9)=> 3)"]
def repeat(training, steps, between=lambda: None):
    def work():
        for _ in range(steps):
            step(training, between)
            nd.waitall()
        return steps
    return work


bulks = prepare(wide, 32)
assert (head_start(typical(bulks, count=3)) <= 2e-3).all(), "with default bulks no overlap"
report(rounds({"ResNet-18 without overlap": repeat(big, 1, nd.waitall),
               "with": repeat(big, 1)}, 5), "ResNet-18 without overlap")
report(rounds({"wide without overlap": repeat(single, 2, nd.waitall), "with": repeat(single, 2),
               "not hybridised": repeat(bulks, 2)}, 9), "wide without overlap")

# %% [markdown]
# In our runs overlap saved nothing to a tenth for the wide network, part of which may be Python's,
# and a few per cent or nothing for ResNet-18. The wide network as it comes has no overlap, and was
# fastest here. On a CPU device a copy is work for the very core that computes, so there is little
# to gain.
#
# ## A link of its own
#
# We imitate the ideal case, in which something other than the computing cores moves the data. A
# `Link` carries one message at a time, at a set rate, and sleeps meanwhile. Of the messages that
# wait, it takes the one of lowest priority number first.

# %%
import itertools
import queue


class Link:
    def __init__(self, rate):
        self.rate, self.log = rate, []  # bytes a ms
        self.waiting, self.tickets = queue.PriorityQueue(), itertools.count()
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            priority, _, size, arrived = self.waiting.get()
            self.open.wait()
            begin = now()
            time.sleep(size / self.rate / 1e3)
            self.log.append((begin, now() - begin, priority, size))
            arrived.set()

    def carry(self, size, priority):
        arrived = threading.Event()
        self.waiting.put((priority, next(self.tickets), size, arrived))
        arrived.wait()


# %% [markdown]
# Four messages, 20 ms apart: the first goes at once, the others by priority.

# %%
slow = Link(rate=1e3)
threads = [threading.Thread(target=slow.carry, args=each)
           for each in ((3e5, 9), (1e3, 3), (1e3, 1), (1e3, 2))]
for thread in threads:
    thread.start()
    time.sleep(0.02)
for thread in threads:
    thread.join()
assert [priority for *_, priority, _ in slow.log] == [9, 1, 2, 3]
assert slow.log[0][1] >= 300, "3e5 bytes take 300 ms"

# %% [markdown]
# Each device sends its gradients through a link by an operator of ours. It waits in a thread of its
# own, not in a lane.

# %%
link = Link(rate=50e3)


class Send(mx.operator.CustomOp):
    priority = 0

    def forward(self, is_train, req, in_data, out_data, aux):
        link.carry(4 * in_data[0].size, self.priority)
        self.assign(out_data[0], req[0], in_data[0])


# %%
@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def __init__(self, priority):
        super().__init__()
        self.priority = priority

    def create_operator(self, context, shapes, dtypes):
        operator = Send()
        operator.priority = int(self.priority)
        return operator


# %% [markdown]
# A step whose all-reduce uses the link: each device sends its gradient, then each adds the two
# and updates its own replica. With `by_layer`, a parameter's priority is its place in the network.

# %% tags=["trains"]
def linked(training, by_layer=False, between=lambda: None):
    net, _, shards, size = training
    with autograd.record():
        losses = [softmax(net(x), y) for x, y in shards]
    autograd.backward(losses)
    between()
    for place, p in enumerate(net.collect_params().values()):
        sent = [nd.Custom(g, op_type="send", priority=place if by_layer else 0)
                for g in p.list_grad()]
        for w in p.list_data():
            total = nd.add_n(*[g.as_in_context(w.context) for g in sent])
            nd.sgd_update(w, total, lr=0.01, rescale_grad=1 / size, out=w)
    return losses


# %% [markdown]
# It must train as Trainer does, whatever the order of the messages, and send all of them:

# %%
for by_layer in (False, True):
    training, link.log = prepare(lenet, 128, **apart), []
    for _ in range(8):
        linked(training, by_layer)
    assert all((a == b).all() for a, b in zip(never, weights(training.net))), f"{by_layer=}"
    sizes = [4 * p.data(pair[0]).size for p in training.net.collect_params().values()]
    messages = [(place if by_layer else 0, size) for place, size in enumerate(sizes)]
    assert Counter(sent[2:] for sent in link.log) == Counter(8 * k * messages), "all messages"

# %% [markdown]
# A loop that bounds how far Python runs ahead, and the first of three ways: backward pass,
# all-reduce and next step strictly one after the other. The link should take twice as long as the
# computing on any machine, so we set its rate by that.

# %%
def loop(training, steps, one=step, lag=1):
    """lag: after each step, wait for the loss of `lag` steps before; None: for everything"""
    losses = []
    for t in range(steps):
        losses.append(one(training))
        if lag is None:
            nd.waitall()
        elif t >= lag:
            for loss in losses[t - lag]:
                loss.wait_to_read()
    return steps


def in_sequence(training):
    losses = linked(training, between=nd.waitall)
    nd.waitall()
    return losses


# %% tags=["measured"]
far = prepare(lenet, 128, **apart)
alone = np.mean([sum(e.duration for e in lane if kind(e) == "compute")
                 for lane in lanes(seen.events).values()])
link.rate = k * sum(sizes) / (2 * alone)
print(f"a step needs {alone:.1f} ms of compute on each device and {2 * alone:.1f} ms of the "
      f"link, which carries {link.rate / 1e3:.0f} MB/s")

# %% [markdown]
# The second way overlaps the messages with the backward pass, in the order of arrival. The third
# sends those of the *first* layer first. **Predict** from the two numbers: how long is a step in
# sequence, and how short can it get?

# %% tags=["measured", "few: 9)=> 3)"]
WAYS = {"in sequence": in_sequence, "overlapped": linked,
        "first layer first": lambda t: linked(t, by_layer=True)}
times = rounds({name: lambda one=one: loop(far, 3, one) for name, one in WAYS.items()}, 9)
report(times, "in sequence")
report({name: times[name] for name in list(WAYS)[1:]}, "overlapped")

# %% [markdown]
# By these numbers a step in sequence takes their sum, and an overlapped one at least the larger.
# All three take longer than that. How long were lanes and link busy? We record two steps of each:

# %%
def with_link(one):
    """length, by how many ms the second step begins before the link is done, that begin, lanes"""
    link.log = []
    recording = record(lambda: loop(far, 2, one))
    second = min([e for e in lane if e.name == "Convolution"][2].start  # of two in a step
                 for lane in lanes(recording.events).values())
    ahead = sum(link.log[k * P - 1][:2]) - second  # the last message of the first step ends
    sent = [(t - recording.begin, ms, "communication") for t, ms, *_ in link.log]
    _, *rows = drawn(recording).items()  # without Python's, which waits here as well
    return length(recording), ahead, second - recording.begin, {**dict(rows), "link": sent}


# %% tags=["measured", "few:one[1])[3]=>one[1])[1]", "few:for _ in range(7)]=>for _ in range(3)]"]
recorded = [[with_link(one) for one in WAYS.values()] for _ in range(7)]
found = {name: sorted(each, key=lambda one: one[1])[3] for name, each in zip(WAYS, zip(*recorded))}
for name, (*_, panel) in found.items():
    print(name, ", ".join(f"{lane} {sum(ms for _, ms, _ in spans) / 2:.0f} ms a step"
                          for lane, spans in panel.items()))

# %% [markdown]
# The messages take longer than their size says, perhaps since a sleeping thread wakes late. When
# does the second step begin? (In the figure, at the dotted line.)

# %% tags=["measured"]
ahead = np.array([[each[1] for each in row] for row in recorded])
assert (ahead[:, 0] <= 0).all(), "in sequence the next step begins when the link is done"
for name, (low, median, high) in zip(WAYS, np.percentile(ahead, [25, 50, 75], axis=0).T):
    print(f"{name}: {median:+.1f} ms before the link is done with the first "
          f"(middle half {low:.1f} to {high:.1f})")
whole, _, begins, panels = zip(*found.values())
fig, axes = timeline(f"First layer first: step 2 begins {median:.1f} ms before the link\n"
                     "is done with step 1 (median of seven recordings)",
                     dict(zip(found, panels)), {name: (-0.5, max(whole) + 0.5) for name in found})
for ax, begin in zip(axes, begins):
    ax.axvline(begin, color="black", ls=":")
show(fig, alt="Three panels with lanes for two devices and the link. Above, devices and link work "
     "in turns. In the middle the link begins during the backward pass. Below, step 2 begins while "
     "the link still carries messages of step 1.")

# %% [markdown]
# Now overlap pays, since the link works while the lanes compute (and Python hands out work while
# the others wait). The *first* layer's gradients are ready last, and its weights are needed first.
# In order of arrival its gradients wait behind the large dense layer's. With priorities they go
# next, and the next forward pass can begin while other messages still wait. No weight is stale:
# each layer waits for its own update, and the weights above were equal to the bit.
#
# **On GPUs:** Trainer asks for something like it, with `priority=-i` for parameter *i*, but in
# *alphabetical* order: in LeNet that is the order of the layers, while ResNet-18's last layer,
# `dense0`, comes before `stage1` (`gluon/trainer.py` at 1.9.1). Copies to and from a GPU have
# queues and threads of their own, which obey priorities. Ordinary work, on a CPU device or a GPU,
# is done first come, first served (`kCopyQueue` and `kWorkerQueue` in
# `src/engine/threaded_engine_perdevice.cc`). The sums are ordinary work, so they need the GPU's
# cores (`ElementwiseSum` in `src/ndarray/ndarray.cc`).
#
# ## Steps in flight
#
# d2l's exercise goes on: how could up to two steps overlap? The engine would let any number of
# steps pile up. What you have to program is a limit, such as `loop`'s: wait for an older loss.
# **Predict:** the link carries nothing, so no all-reduce ends. How many steps does Python hand out
# with a lag of 0, 1 and 2?

# %%
def stops_after(steps, lag):
    begun = threading.Semaphore(0)
    link.open.clear()
    thread = threading.Thread(target=loop, args=(
        far, 6, lambda training: begun.release() or linked(training), lag))
    thread.start()
    reached = all(begun.acquire(timeout=20) for _ in range(steps))
    more = begun.acquire(timeout=0.3)
    link.open.set()
    thread.join()
    nd.waitall()
    return reached and not more


for lag, steps in ((None, 1), (0, 2), (1, 3), (2, 4)):
    assert stops_after(steps, lag), "lag + 2 steps"

# %% [markdown]
# Step 1's loss is ready although the link is closed. Step 2's isn't: it needs the weights after
# step 1's all-reduce. With lag 0 Python waits for step 1's loss, hands out step 2, and stops at its
# loss. Each further lag allows one more step; `waitall` stops after the first. So d2l's two steps
# can overlap with `lag=0` already. Does it save time?

# %% tags=["measured", "few: 5)=> 2)"]
LAGS = {"waitall": None, "lag 0": 0, "lag 1": 1, "lag 2": 2, "never wait": 8}
report(rounds({name: lambda lag=lag: loop(usual, 8, lag=lag) for name, lag in LAGS.items()}, 5),
       "waitall")

# %% [markdown]
# In most runs a lag of 0 or 1 is no faster than `waitall` after each step; the loop that never
# waits is. We don't know why. (In the first timeline little of the step is left
# to overlap with the next.)
#
# ## Sizes that fit
#
# In MXNet's CPU build, convolutions run in oneDNN, which says what it does if `DNNL_VERBOSE=1` is
# set when a process starts. LeNet has 20 and 50 channels. What if it had 16 and 48, with 0.78 times
# the arithmetic? **Predict** which of the two has the larger speed-up.

# %%
import os
import subprocess
import sys

PROGRAM = """
import sys
from mxnet import autograd, nd
from mxnet.gluon import nn
first, second = (int(channels) for channels in sys.argv[1:])
net = nn.HybridSequential()
net.add(nn.Conv2D(first, 3, activation="relu"), nn.MaxPool2D(2, 2), nn.Conv2D(second, 5))
net.initialize()
with autograd.record():
    out = net(nd.ones((64, 1, 28, 28)))
out.backward()
nd.waitall()
"""

# %% [markdown]
# Each line that oneDNN prints names an operator and the implementation that it took:

# %%
def implementations(channels):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, channels)], check=True,
                          capture_output=True, text=True, env={**os.environ, "DNNL_VERBOSE": "1"})
    fields = [line.split(",") for line in done.stdout.splitlines() if ",exec," in line]
    return dict(Counter(each[4] for each in fields if each[3] == "convolution"))


# %% tags=["measured"]
from concurrent.futures import ThreadPoolExecutor

both = (20, 50), (16, 48)
with ThreadPoolExecutor() as pool:  # two processes at once
    for channels, names in zip(both, pool.map(implementations, both)):
        print(channels, names)

# %% [markdown]
# Both networks, on one device and on two, in turns:

# %%
def products_of(a, b):  # multiplications of both convolutions and both dense layers, an image
    return a * 9 * 26**2 + a * b * 25 * 9**2 + b * 16 * 128 + 128 * 10


print(f"{products_of(16, 48) / products_of(20, 50):.2f} times the arithmetic")
fit = {(c, len(d)): repeat(prepare(lambda c=c: lenet(c), 256, d), 3)
       for c in ((20, 50), (16, 48)) for d in (pair[:1], pair)}

# %% tags=["measured", "few: 6)=> 2)"]
times = rounds(fit, 6)
for c in ((20, 50), (16, 48)):
    low, median, high = np.percentile(times[c, 1] / times[c, 2], [25, 50, 75])
    print(c, "images/s on one device and on two:", *(
        f"{256e3 / np.median(times[c, n]):,.0f}" for n in (1, 2)),
        f"; speed-up {median:.2f} (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# On this machine, with AVX-512, the convolutions with 16 and 48 channels got a kernel of their own,
# `jit:avx512_common`, and those with 20 and 50 a general matrix product, `x64:gemm:jit`. The
# network with 16 and 48 channels is more than twice as fast on one device: faster than the other on
# two. In most of our runs its speed-up was smaller, in some by less than the noise. *A better
# speed-up is not a faster program*, so look at images per second too.
#
# ## Summary
#
# - Calls hand out work. A clock that doesn't wait measures Python. `waitall` changed no weight.
# - A trace is pairs of events; a lane is a thread. Check that no lane does two things at once, and
#   count operators. With Trainer's defaults on $k \ge 2$ CPU devices, a step has $(2k + 1) P$
#   copies, $P$ sums and $P$ updates for $P$ parameters with gradients.
# - A step is compute, communication, update, Python and waiting.
# - A bulk's gradients are ready when all of it has ended. With smaller or more bulks the all-reduce
#   overlaps with the backward pass. On our imitated link, which sleeps while it carries, that saved
#   a fifth to a quarter of the time.
# - If the first layer's gradients go first, the next step can begin earlier on a slow link, with no
#   stale weights.
# - Sizes that fit the library's kernels can matter more than a second device.
#
# Next, chapter 11: how far it scales, measured and predicted.
#
# **Further reading.** *Dive into Deep Learning*, "Concise Implementation for Multiple GPUs",
# exercise 3, and "Asynchronous Computation"; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets; A. Jayarajan et al., *Priority-based Parameter
# Propagation for Distributed DNN Training* (2019), arXiv:1905.03960.

# %% [markdown]
# ## Exercises
#
# 1. **Three devices.** How many copies and sums has a step on three devices? Write the formula
#    down, then count. (Count by name: the profiler has no more tracks than cores.)
# 2. **Half of the images, more than half of the time.** On two devices, ResNet-18's compute is more
#    than half of one device's. How much is due to the smaller shard, and how much to both devices
#    computing at once? Measure all three in turns.
# 3. **Update on each device.** With `on_store=False` the store only sums. Predict the number of
#    copies and where updates run. Are the weights the same? Does the wide network's step get
#    shorter?

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
assert counts(record(three_steps).events) == {
    "CopyCPU2CPU": 3 * 7 * 2, "ElementwiseSum": 3 * 2, "multi_sgd_update": 3 * 2}, "7 a parameter"

# %% [markdown]
# ### Answer 2
#
# One device with the whole batch, one device with the shard of 16 images, and both devices:

# %% tags=["solution", "measured", "few:for _ in range(4)])=>for _ in range(2)])"]
ways = [*(prepare(resnet18, n, pair[:1], **static) for n in (32, 16)), big]
for training in ways:
    step(training)
computes = np.array([[budget(record(lambda t=t: step(t)))[0] for t in ways] for _ in range(4)])
for name, column in (("the shard alone", computes[:, 1]), ("beside the other", computes[:, 2])):
    low, median, high = np.percentile(2 * column / computes[:, 0], [25, 50, 75])
    print(f"{name}: {median:.2f} times half of the whole batch ({low:.2f} to {high:.2f})")

# %% [markdown]
# Neither effect is stable, and in some runs each is no larger than the noise: one run printed
# 0.98 and 1.13, another 1.05 and 1.05.

# %% [markdown]
# ### Answer 3
#
# $2 k P$ copies, none of weights; each device updates its own replica; the same weights to the bit.

# %% tags=["solution"]
own = prepare(lenet, 128, on_store=False)
each = typical(own).events
assert counts(each)["CopyCPU2CPU"] == 2 * k * P, "no copy of the weights in the store"
per_lane = [sum(e.name == "multi_sgd_update" for e in lane) for lane in lanes(each).values()]
assert per_lane[0] == per_lane[1] > 0, "each device updates its own replica"
assert all((a == b).all() for a, b in zip(never, trained(on_store=False)))

# %% [markdown]
# Does the wide network's step get shorter? We time both in turns, then take a budget of each:

# %% tags=["solution", "measured", "few: 9)=> 3)", "few:for _ in range(9)]=>for _ in range(3)]"]
ways = {"updates in the store": bulks,
        "on each device": prepare(wide, 32, on_store=False)}
report(rounds({name: repeat(training, 2) for name, training in ways.items()}, 9),
       "updates in the store")
for name, training in ways.items():
    row = middle([budget(record(lambda t=training: step(t))) for _ in range(9)])
    print(name, ", ".join(f"{part} {ms:.1f} ms" for part, ms in zip(PARTS, row)))

# %% [markdown]
# In our runs it was from a seventh shorter to a little longer: the lanes wait less, but each weight
# is updated twice, and the lanes' mean of updates grew to 1.7 times or more. The parts are of other
# steps than the times.
