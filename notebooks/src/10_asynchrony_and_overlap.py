# %% [markdown]
# # 10 · Asynchrony and overlap
#
# Python hands out work and goes on (chapter 01). So its clock says little about what the devices
# do. In this chapter you look at the devices themselves.
#
# ![Two lanes from left to right. cpu(0): idle because of Python, compute, waiting, communication,
# update. cpu(1): idle because of Python, a longer compute, communication,
# waiting.](src/drawings/lane_parts.svg)
#
# A *lane* shows what one device does. It computes, communicates or updates weights. Or it is idle:
# because Python is still handing out the work (*Python*), or for any other reason (*waiting*).
#
# ## What you'll do
#
# Record training steps and draw their lanes. Find out what `waitall` costs. Then let communication
# overlap with the backward pass, and measure what that wins.
#
# ## What you'll learn
#
# - how to record what the devices do, and how to check that you read it right;
# - what `waitall` does to a clock, to the weights and to the time of a step;
# - when communication overlaps with the backward pass, and what can prevent it;
# - how to measure what overlap wins, with a control.
#
# ## What you need
#
# Chapters 01, 06 and 07, and two cores. No GPU and no data: random images will do, if the
# operators' time doesn't depend on the pictures, as we assume. Reading takes {reading time},
# running less than a minute.

# %%
import threading
from time import perf_counter, sleep

from helpers import split_and_load
from helpers.networks import lenet
from helpers.timing import in_turns, print_times, spread
from helpers.trace import record

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd, profiler

# %% [markdown]
# ## The lanes of a step
#
# What do two devices do during a training step? We take LeNet, as in chapter 06, and 128 random
# images, 64 for each device. The devices are simulated, even if you have GPUs: a GPU's recording
# has other names.

# %%
pair = [mx.cpu(0), mx.cpu(1)]
x_shards = split_and_load(nd.random.uniform(shape=(128, 1, 28, 28)), pair)
y_shards = split_and_load(nd.arange(128) % 10, pair)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def new_lenet():
    mx.random.seed(0)
    net = lenet()
    net.initialize(mx.init.Xavier(), ctx=pair)
    net(x_shards[0])  # makes the weights now: the same each time
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, trainer

# %% [markdown]
# The step is in two functions, since later something will happen between the two.

# %% tags=["trains"]
def backward_pass(net):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


def train_once(net, trainer):
    backward_pass(net)
    trainer.step(128)  # all-reduce and update


net, trainer = new_lenet()
for _ in range(3):
    train_once(net, trainer)  # warms up: the store gets its keys

# %% [markdown]
# MXNet's profiler notes when each operator begins and ends. `record` calls a function, waits until
# all work is done, and returns what was noted: *events*. An event is one operator on one lane, with
# times in ms since the recording began.

# %% tags=["measured", "trains"]
recording = record(train_once, net, trainer)
for event in recording.events[:3]:
    print(event)
print(f"handed out after {recording.handed_out:.1f} ms, done after {recording.length:.1f} ms")

# %% tags=["fold"]
# draw: the lanes of a step, and its end enlarged
from helpers.plotting import show, timeline

rows = recording.rows
lanes = {lane: rows[lane] for lane in ["cpu(0)", "cpu(1)"]}
last = max(event.end for event in recording.events if event.kind == "compute")
computing = 0
for events in recording.lanes.values():
    computing += sum(event.duration for event in events if event.kind == "compute") / len(pair)
title = f"LeNet: a device computes for {computing:.0f} of {recording.length:.0f} ms, on average"
fig, _ = timeline(title, {"a step": rows, "its end": lanes},
                  {"its end": (last - 0.3, recording.length + 0.1)})
show(fig, alt="Three rows: Python, which hands out the work at first, and two devices, which "
              "mostly compute. Below, the end enlarged: short copies, sums and updates.")

# %% tags=["fold"]
# check: compute is most of what each lane does; no lane does two things at once; where products are
def check_lanes(recording, names=("cpu(0)", "cpu(1)")):
    assert tuple(recording.lanes) == names, "a lane for each device"
    for lane, events in recording.lanes.items():
        for before, after in zip(events, events[1:]):  # the clock counts whole microseconds
            assert before.end <= after.start + 2e-3, f"{lane}: {before} and {after}"


def products():
    for matrix, count in [(nd.ones((300, 300), ctx=pair[0]), 5),
                          (nd.ones((300, 300), ctx=pair[1]), 3)]:
        for _ in range(count):
            nd.dot(matrix, matrix)


check_lanes(recording)
for events in recording.lanes.values():
    computing = sum(event.duration for event in events if event.kind == "compute")
    assert computing > 0.5 * sum(event.duration for event in events), "mostly compute"
found = [(event.lane, event.name) for event in record(products).events if event.name == "dot"]
assert sorted(found) == [("cpu(0)", "dot")] * 5 + [("cpu(1)", "dot")] * 3

# %% [markdown]
# Most of what the devices do is compute. Communication and update come at its end, and are short.
#
# Do we read this right? We count. LeNet has eight parameters. **Predict**, with chapter 07 in mind:
# how many copies, sums and updates has a step on two devices?

# %%
names = [event.name for event in recording.events]
for name in ["CopyCPU2CPU", "ElementwiseSum", "multi_sgd_update"]:
    print(f"{name:16} {names.count(name)}")

# %% [markdown]
# For each parameter, both devices copy their gradient into the store, one sum adds them up, and one
# update makes new weights there. Three copies bring these back: one to a device, and from there one
# to each replica. That is 5 copies, a sum and an update for each of 8 parameters. With $k$ devices
# and $P$ parameters it is $(2k + 1)P$ copies, $P$ sums and $P$ updates.
#
# All updates are on `cpu(0)`, whose thread also looks after the store's weights in host memory.
# **On GPUs** these stay on the GPU that owns the key, and it updates them (chapter 07).

# %% tags=["fold"]
# check: (2 k + 1) P copies, P sums and P updates; the owners share the sums; cpu(0) updates
P = len(net.collect_params().keys())
assert P == 8
assert names.count("CopyCPU2CPU") == (2 * len(pair) + 1) * P
assert names.count("ElementwiseSum") == names.count("multi_sgd_update") == P
where = {name: {event.lane for event in recording.events if event.name == name}
         for name in ["ElementwiseSum", "multi_sgd_update"]}
assert where == {"ElementwiseSum": {"cpu(0)", "cpu(1)"}, "multi_sgd_update": {"cpu(0)"}}

# %% [markdown]
# ## What `waitall` costs
#
# When does a loop of twenty steps end? We read the clock twice: after the loop, and after
# `waitall`. **Predict:** how far apart are the two?

# %% tags=["measured", "trains"]
nd.waitall()
begin = perf_counter()
for _ in range(20):
    train_once(net, trainer)
looped = perf_counter() - begin
nd.waitall()
done = perf_counter() - begin
print(f"the loop took {looped / 20 * 1e3:.1f} ms a step, the work {done / 20 * 1e3:.1f} ms a step")

# %% tags=["fold"]
# check: the loop ends long before the work; a hundred additions are handed out while none can run
class Gate(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        log.append("open" if gate.wait(timeout=600) else "nobody has opened it")
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


assert looped < 0.9 * done, "Python waited"
gate = threading.Event()
log = []
x = nd.Custom(nd.zeros(3, ctx=pair[1]), op_type="gate")
for _ in range(100):
    x = x + 1
assert log == [], "nothing has run, and Python is here"
gate.set()
assert x.asnumpy().tolist() == [100, 100, 100] and log == ["open"], "reading waits"

# %% [markdown]
# The first number is what Python took to hand out a step. A program that stops its clock there
# reports a speed that doesn't exist. (*Dive into Deep Learning* asks what happens without
# `npx.waitall()` before its timer stops. This.)
#
# Does waiting change what is learnt? We train eight steps, once without waiting, and once with
# `waitall` after each backward pass and each step.

# %% tags=["fold", "trains"]
# check: the same weights to the bit, with and without waiting
def train_eight(wait, **bulks):
    net, trainer = new_lenet()
    if bulks:
        net.hybridize(**bulks)
    for _ in range(8):
        backward_pass(net)
        wait()
        trainer.step(128)
        wait()
    return arrays_of(net)


def arrays_of(net):
    arrays = []
    for parameter in net.collect_params().values():
        arrays += [replica.asnumpy() for replica in parameter.list_data()]
    return arrays


def no_wait():
    pass


def assert_same(found, expected):
    for ours, whole in zip(found, expected, strict=True):
        assert (ours == whole).all(), "other weights"


never = train_eight(no_wait)
assert_same(train_eight(nd.waitall), never)
untrained, _ = new_lenet()
assert all((ours != old).any() for ours, old in zip(never, arrays_of(untrained))), "all learned"
print(len(never), "arrays of weights: equal to the bit")

# %% [markdown]
# The weights are the same. The engine knows which arrays each operator reads and writes, and starts
# it when these are ready. So `waitall` is for clocks, for errors (chapter 01), and to bound how
# much work is queued (deeper: A slow link).
#
# What does it cost? Here are three steps, with `waitall` after each and without:

# %% tags=["fold", "trains"]
# draw: three steps with waitall after each, and without
host = profiler.Domain("Python")


def steps_noted(net, trainer, wait):
    for _ in range(3):
        task = profiler.Task(host, "step")
        task.start()
        train_once(net, trainer)
        task.stop()
        wait()


waiting = record(steps_noted, net, trainer, nd.waitall)
free = record(steps_noted, net, trainer, no_wait)
title = "With waitall Python hands out a step only when the one before is done"
most = max(waiting.length, free.length)
panels = {"waitall after each step": waiting.rows, "no waitall": free.rows}
fig, _ = timeline(title, panels, dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels. Above, Python hands out a step, waits until the devices have done it, "
              "and hands out the next. Below it hands out all three at the beginning.")

# %% tags=["fold"]
# check: with waitall a step is handed out when the one before is done; without, before that
for recorded, waits in [(waiting, True), (free, False)]:
    check_lanes(recorded, ("Python", "cpu(0)", "cpu(1)"))
    _, second, _ = recorded.lanes["Python"]
    updates = [event for event in recorded.events if event.kind == "update"]
    assert len(updates) == 3 * P
    first_done = max(event.end for event in updates[:P])
    assert (second.start > first_done) == waits, "when the second step was handed out"

# %% [markdown]
# With `waitall`, both devices are idle between two steps, until Python hands out the next one.
# Without it, that is already in their queues. We let eight steps of each kind take turns. (The
# clock stops when all eight are done, in any case.)

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: eight steps with waitall after each, and eight without, in turns
ROUNDS = 9


def wait_each_step():
    for _ in range(8):
        train_once(net, trainer)
        nd.waitall()


def wait_once():
    for _ in range(8):
        train_once(net, trainer)


times = in_turns({"waitall each step": wait_each_step, "no waitall": wait_once}, ROUNDS, quiet=0.05)
print_times(times)

# %% [markdown]
# Each line has the median time of eight steps and, in brackets, where the middle half of the
# rounds lies. If these ranges overlap, these lines alone don't settle it. In our quiet runs
# waiting cost up to a tenth of a step. (Why so much, we don't know. Deeper: A slow link.)
#
# **Keep:** wait before you stop a clock, and not in every step.
#
# ## When can communication begin?
#
# Must the all-reduce wait for the end of the backward pass? It shouldn't. The gradient of the
# *last* layer is ready first. It could be sent while the pass goes on:
#
# ![Above, the link carries three gradients after the backward pass. Below, it starts with layer 3's
# as soon as that is ready, and ends earlier.](src/drawings/overlap.svg)
#
# Nobody has to program that. A parameter's sum needs only its own gradients, and the engine knows
# it. Does it happen? Here are the events of LeNet's backward pass on `cpu(0)`. (Operators that run
# as one, a *bulk*, are one event, named `ImperativeBulk`.)

# %%
def backward_events(recording):
    names = []
    for event in recording.lanes["cpu(0)"]:
        if event.name == "ImperativeBulk" or event.name.startswith("_backward"):
            names.append(event.name)
    return names


print(backward_events(recording))

# %% [markdown]
# There is only one. To save work, the engine joins up to 15 operators of a backward pass into a
# **bulk** (`MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN_BWD`). All gradients of a bulk are ready when it
# ends, not before. So here no gradient can leave before its device's pass has ended. A hybridised
# network (chapter 08) can be told how many operators its bulks may join; 0 is for none:

# %% tags=["trains"]
net_apart, trainer_apart = new_lenet()
net_apart.hybridize(forward_bulk_size=0, backward_bulk_size=0)  # NEW
for _ in range(3):
    train_once(net_apart, trainer_apart)

recording_apart = record(train_once, net_apart, trainer_apart)
for name in backward_events(recording_apart):
    print(name)

# %% [markdown]
# The bulk that is left is the loss's. All other operators are on their own now, from the last layer
# to the first, and gradients get ready one by one.

# %% tags=["fold", "trains"]
# check: one bulk without, ten events with size 0 on both devices; no weight changes
for each, expected in [(recording, 1), (recording_apart, 10)]:
    check_lanes(each)
    for lane in each.lanes.values():
        names = [event.name for event in lane]
        backward = [name for name in names if "_backward" in name or name == "ImperativeBulk"]
        assert len(backward) == expected
assert_same(train_eight(no_wait, forward_bulk_size=0, backward_bulk_size=0), never)

# %% [markdown]
# ## A slow link
#
# What can overlap win? Here little: LeNet's copies are short, and a copy is work for the very core
# that computes. So let us imitate a slow link that carries data *beside* the cores, as between
# machines. It carries one message at a time, and sleeps as long as that takes. We choose its rate
# so that a step's gradients take as long as forward and backward pass:

# %% tags=["measured", "trains"]
lengths = []
for _ in range(5):
    lengths.append(record(backward_pass, net).length)
passes_ms = np.median(lengths)  # forward and backward

nbytes = 0  # of all gradients, on both devices
for parameter in net.collect_params().values():
    for grad in parameter.list_grad():
        nbytes += 4 * grad.size  # 4 bytes a number
rate = nbytes / (passes_ms / 1000)  # bytes a second
print(f"{nbytes:,} bytes in {passes_ms:.1f} ms: {rate / 1e6:.0f} MB/s")

# %%
link = threading.Lock()  # one message at a time
track = profiler.Domain("link")  # its tasks become a lane of the recording


def carry(nbytes):
    with link:
        message = profiler.Task(track, "message")  # the profiler notes when it starts and stops
        message.start()
        sleep(nbytes / rate)
        message.stop()


for event in record(carry, 500_000).events:
    print(event.lane, event.name, f"{event.duration:.1f} ms")

# %% [markdown]
# The engine must know that a message waits for its gradient. So sending becomes an operator.
# MXNet's way to write one in Python takes two classes. A `CustomOp` computes the output, here the
# input unchanged. A `CustomOpProp`, registered under a name, creates it; its other arguments play
# no part here. The operator sleeps in a thread of its own, so no lane is busy meanwhile.

# %%
class Send(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        carry(4 * in_data[0].size)
        self.assign(out_data[0], req[0], in_data[0])  # it arrives unchanged


@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Send()


print(nd.Custom(nd.array([1, 2, 3]), op_type="send").asnumpy())

# %% [markdown]
# In the step, each gradient crosses the link before Trainer adds it up. `out=grad` writes it back
# to its place. Python hands the messages out from the first layer to the last, but each starts when
# its gradient is ready, so the last layer's goes first. With `wait=True` Python waits for the whole
# backward pass before.

# %% tags=["trains"]
def step_over_link(net, trainer, wait):
    backward_pass(net)
    if wait:
        nd.waitall()
    for parameter in net.collect_params().values():
        for grad in parameter.list_grad():
            nd.Custom(grad, op_type="send", out=grad)  # NEW
    trainer.step(128)

# %% tags=["fold", "trains"]
# check: over the link the weights are the same to the bit, and every gradient is sent
for bulks in [{}, {"forward_bulk_size": 0, "backward_bulk_size": 0}]:
    sent_net, sent_trainer = new_lenet()
    if bulks:
        sent_net.hybridize(**bulks)
    for _ in range(8):
        sent = record(step_over_link, sent_net, sent_trainer, False)
        assert len(sent.lanes["link"]) == len(pair) * P, "a message for each gradient"
        check_lanes(sent, ("cpu(0)", "cpu(1)", "link"))
        assert sum(event.duration for event in sent.lanes["link"]) > 0.99e3 * nbytes / rate
    assert_same(arrays_of(sent_net), never)


# What Trainer adds up is what arrives: a link that doubles it changes the weights.
def double(self, is_train, req, in_data, out_data, aux):
    self.assign(out_data[0], req[0], 2 * in_data[0])


unchanged = Send.forward
Send.forward = double
try:
    doubled_net, doubled_trainer = new_lenet()
    for _ in range(8):
        step_over_link(doubled_net, doubled_trainer, wait=False)
    doubled = arrays_of(doubled_net)
finally:
    Send.forward = unchanged
for ours, whole in zip(doubled, never, strict=True):
    assert (ours != whole).any(), "Trainer adds up what was there before"

# %% [markdown]
# ## What overlap wins
#
# Is it enough to time this step with `wait=True` and `wait=False`? No: waiting takes away *two*
# things, overlap and Python's handing out ahead. A **control** separates them. In one bulk nothing
# can leave before a device's backward pass has ended, whether Python waits or not. So we measure
# four ways, and beside them the two passes alone:
#
# | | Python waits | Python doesn't wait |
# | --- | --- | --- |
# | **one bulk** | no overlap | almost no overlap: the control |
# | **each operator on its own** | no overlap | **overlap** |
#
# **Predict:** sending takes as long as the passes. Which ways are shorter, and by how much at most?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 3"]
from functools import partial

ROUNDS = 9
WAYS = {
    "one bulk, waits": partial(step_over_link, net, trainer, wait=True),
    "one bulk": partial(step_over_link, net, trainer, wait=False),
    "on their own, waits": partial(step_over_link, net_apart, trainer_apart, wait=True),
    "on their own": partial(step_over_link, net_apart, trainer_apart, wait=False),
    "the passes alone": partial(backward_pass, net),
}
times = in_turns(WAYS, ROUNDS)
print_times(times)

# %% [markdown]
# Of the four ways only the last is clearly shorter. (The control isn't quite without overlap: the
# device that ends first sends while the other still computes.) In ratios, round by round:

# %% tags=["fold", "measured"]
# measure: what handing out ahead, small bulks, and overlap do to the time of a step
for what, way, against in [
        ("handing out ahead", "one bulk", "one bulk, waits"),
        ("no bulks", "on their own, waits", "one bulk, waits"),
        ("overlap", "on their own", "one bulk")]:
    low, median, high = spread(times[way] / times[against])
    print(f"{what:17}: {median:.2f} times the step (middle half {low:.2f} to {high:.2f})")
saved = spread((times["one bulk"] - times["on their own"]) / times["the passes alone"]).median
print(f"overlap saved {saved:.0%} of the passes' time")
by_handing_out = spread(
    (times["one bulk, waits"] - times["one bulk"]) / times["the passes alone"]).median
widths = []
for seconds in times.values():
    low, median, high = spread(seconds)
    widths.append((high - low) / median)
assert saved > 0, "overlap saves time"
if max(widths) < 0.05:  # a quiet run
    assert saved > 0.25, "a good part of the passes' time"
    assert saved > 2 * by_handing_out, "it is the overlap"

# %% tags=["fold", "trains"]
# draw: a step over the link, in one bulk and each operator on its own
def head_start(recording):
    """ms from the first message to the end of the backward pass on the device that ends first."""
    ends = []
    for lane in ["cpu(0)", "cpu(1)"]:
        ends.append(max(event.end for event in recording.lanes[lane]
                        if "_backward" in event.name or event.name == "ImperativeBulk"))
    return min(ends) - recording.lanes["link"][0].start


def typical(net, trainer, count=7):
    """Of some recordings the one with the median head start."""
    recordings = [record(step_over_link, net, trainer, False) for _ in range(count)]
    return sorted(recordings, key=head_start)[count // 2]


joined = typical(net, trainer)
overlapped = typical(net_apart, trainer_apart)
panels = {"one bulk": joined.rows, "each operator on its own": overlapped.rows}
most = max(joined.length, overlapped.length)
fig, _ = timeline("On their own, gradients leave while the devices still compute", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels with rows for Python, two devices and the link. Above, the link begins "
              "when a device has computed all; below, it begins while both still compute.")

# %% tags=["fold"]
# check: in one bulk the first message leaves after the pass, on their own before its end
assert head_start(joined) < 2e-3, "this would be overlap"
assert head_start(overlapped) > 0, "no overlap"
for each in [(net, trainer), (net_apart, trainer_apart)]:
    waiting = record(step_over_link, *each, True)
    assert head_start(waiting) < 2e-3, "Python waited, and yet there is overlap"

# %% [markdown]
# Overlap saved a good part of the passes' time, and the control shows that it *is* the overlap: in
# "one bulk" Python runs ahead, too, and wins less by that. At most the passes'
# time could be saved: then the link would work all the while. But it has nothing to send until the
# first gradient is ready.
#
# **On GPUs** copies between devices have queues and threads of their own (`kCopyQueue` in
# `src/engine/threaded_engine_perdevice.cc` at MXNet 1.9.1), so they can run beside computing. The
# sums still need a GPU's cores (`ElementwiseSum` in `src/ndarray/ndarray.cc`). PyTorch's DDP joins
# *gradients* into buckets, which limits overlap too (chapter 14).
#
# ## Summary
#
# - Calls hand out work. A clock that doesn't wait measures Python.
# - A lane is compute, communication, update, or idle: because of Python, or waiting (deeper: A
#   time budget that closes adds them up).
# - With Trainer's defaults, a step on $k \ge 2$ CPU devices has $(2k + 1)P$ copies, $P$ sums and
#   $P$ updates for $P$ parameters.
# - `waitall` changed no weight. Where it stands in each step, devices are idle until the next
#   step's first operators come.
# - A gradient can be sent when its bulk has ended. LeNet's backward pass is one bulk, so no
#   gradient leaves before a device's pass has ended, unless it is told to have smaller ones.
# - Over a slow link that works beside the cores, overlap saved time. A control, in which Python
#   runs ahead, too, but gradients leave only after a device's pass, showed that it was the overlap.
#
# **Further reading.** *Dive into Deep Learning*, "Asynchronous Computation", and "Concise
# Implementation for Multiple GPUs", exercise 3; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets.

# %% [markdown]
# ## Exercises
#
# 1. **Three devices.** How many copies and sums has a step on three devices? Write the formula
#    down, then count. (Count by name: the profiler has no more lanes than cores.)
# 2. **Bulks of three.** With `backward_bulk_size=3`, how many events has the backward pass? Does
#    the first message leave before its end?
# 3. **Update on each device.** With `update_on_kvstore=False` the store only sums. Predict the
#    number of copies, and where the updates run. Are the weights the same?

# %% [markdown]
# ### Answer 1
#
# $(2k + 1) P$ copies and $P$ sums: seven copies a parameter.

# %% tags=["solution", "trains"]
three = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
dense = gluon.nn.Dense(5, in_units=7)
dense.initialize(ctx=three)
dense_trainer = gluon.Trainer(dense.collect_params(), "sgd")


def dense_step():
    outputs = []
    with autograd.record():
        for device in three:
            outputs.append(dense(nd.ones((4, 7), ctx=device)))
    autograd.backward(outputs)
    dense_trainer.step(12)


dense_step()
names = [event.name for event in record(dense_step).events]
print(names.count("CopyCPU2CPU"), "copies,", names.count("ElementwiseSum"), "sums")
assert names.count("CopyCPU2CPU") == 7 * 2, "weight and bias"
assert names.count("ElementwiseSum") == names.count("multi_sgd_update") == 2

# %% [markdown]
# ### Answer 2
#
# The loss has a bulk of its own, and the network's bulks have at most three operators. The first of
# them holds the last layers, so messages still leave early, with fewer events.

# %% tags=["solution", "trains"]
net_three, trainer_three = new_lenet()
net_three.hybridize(forward_bulk_size=0, backward_bulk_size=3)
for _ in range(3):
    step_over_link(net_three, trainer_three, wait=False)
recording_three = typical(net_three, trainer_three)
print(len(backward_events(recording_three)), "events")
assert 1 < len(backward_events(recording_three)) < 10
assert head_start(recording_three) > 0, "overlap"

# %% [markdown]
# ### Answer 3
#
# $2 k P$ copies, none of weights. Each device updates its own replica. The weights are the same to
# the bit.

# %% tags=["solution", "trains"]
net_own, _ = new_lenet()
trainer_own = gluon.Trainer(net_own.collect_params(), "sgd", {"learning_rate": 0.01},
                            update_on_kvstore=False)
for _ in range(8):
    recording_own = record(train_once, net_own, trainer_own)
names = [event.name for event in recording_own.events]
print(names.count("CopyCPU2CPU"), "copies")
assert names.count("CopyCPU2CPU") == 2 * len(pair) * P
updates = [event.lane for event in recording_own.events if event.kind == "update"]
print("updates on", sorted(set(updates)))
assert updates.count("cpu(0)") == updates.count("cpu(1)") > 0, "each device updates its replica"
assert_same(arrays_of(net_own), never)
