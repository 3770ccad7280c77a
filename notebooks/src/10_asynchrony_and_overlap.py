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
# > **What you'll do:** record training steps and draw their lanes. Find out what `waitall` does.
# > Let communication overlap with the backward pass, and measure what that wins.
# >
# > **What you'll learn:** how to record what the devices do; what `waitall` does to a clock, to the
# > weights and to a step's time; when communication overlaps with the backward pass, and what can
# > prevent it; how to measure what overlap wins, against a control.
# >
# > **What you need:** chapters 01, 06, 07 and 08, and two cores. No GPU and no data: random images
# > will do. Reading takes {reading time}, running less than a minute.

# %%
import threading
from functools import partial
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
# images, 64 for each device. The devices are simulated, even if you have GPUs.

# %%
pair = [mx.cpu(0), mx.cpu(1)]
x_shards = split_and_load(nd.random.uniform(shape=(128, 1, 28, 28)), pair)
y_shards = split_and_load(nd.arange(128) % 10, pair)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def new_lenet():
    mx.random.seed(0)
    net = lenet()
    net.initialize(mx.init.Xavier(), ctx=pair)
    net(x_shards[0])  # the first call makes the weights
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, trainer

# %% [markdown]
# Later something will happen between backward pass and update, so the step is in two functions.

# %% tags=["trains"]
def two_passes(net):  # forward and backward
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


def train_once(net, trainer):
    two_passes(net)
    trainer.step(128)  # all-reduce and update


net, trainer = new_lenet()
for _ in range(3):
    train_once(net, trainer)  # warms up: the store gets its keys

# %% [markdown]
# MXNet's profiler notes when each operator begins and ends. `record` calls a function, waits until
# all work is done, and returns what was noted: *events*. An event is one operator on one lane, with
# times in ms since the recording began. Here are the first three:

# %% tags=["measured", "trains"]
recording = record(train_once, net, trainer)
for event in recording.events[:3]:
    print(event)
print(f"done after {recording.length:.1f} ms")

# %% tags=["fold"]
# draw: the lanes of a step, and its end enlarged
from helpers.plotting import show, timeline

rows = recording.rows
lanes = {lane: rows[lane] for lane in ["cpu(0)", "cpu(1)"]}
last = max(event.end for event in recording.events if event.name == "ImperativeBulk")
computing = 0
for events in recording.lanes.values():
    computing += sum(event.duration for event in events if event.kind == "compute") / len(pair)
title = f"LeNet: a device computes for {computing:.0f} of {recording.length:.0f} ms, on average"
fig, _ = timeline(title, {"a step": rows, "its end": lanes},
                  {"its end": (last - 0.1, recording.length + 0.05)})
show(fig, alt="Three rows: Python, which hands out the work at first, and two devices, which "
              "mostly compute. Below, the end enlarged: short copies, sums and updates.")

# %% tags=["fold"]
# check: compute is most of what each lane does; no lane does two things at once
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
# Most of what the devices do is compute. Communication and update come at the step's end, and are
# short.
#
# Do we read this right? We count. LeNet has eight parameters. **Predict**, with chapter 07 in mind:
# how many copies, sums and updates has a step on two devices?

# %%
names = [event.name for event in recording.events]
for name in ["CopyCPU2CPU", "ElementwiseSum", "multi_sgd_update"]:
    print(f"{name:16} {names.count(name)}")

# %% [markdown]
# For each parameter, both devices copy their gradient into the store. One sum adds them up, and one
# update makes new weights. Three copies bring the new weights back: one to a device, and from there
# one to each replica. That is 2 + 3 copies, a sum and an update for each of 8 parameters.

# %% tags=["fold"]
# check: 5 copies, a sum and an update for each parameter, and on which devices
P = len(net.collect_params().keys())
assert P == 8
assert names.count("CopyCPU2CPU") == (2 * len(pair) + 1) * P
assert names.count("ElementwiseSum") == names.count("multi_sgd_update") == P
for name, where in [("ElementwiseSum", ["cpu(0)", "cpu(1)"]), ("multi_sgd_update", ["cpu(0)"])]:
    assert sorted({event.lane for event in recording.events if event.name == name}) == where

# %% [markdown]
# ## What `waitall` costs
#
# We read the clock after a loop of twenty steps, and again after `waitall`. **Predict:** how far
# apart are the two?

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
# check: a hundred additions are handed out while none of them can run
class Gate(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        log.append("open" if gate.wait(timeout=600) else "nobody has opened it")
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


assert looped < 0.9 * done, "Python waited"
# Nothing can run on `pair[1]` while the gate is closed, and yet Python hands out 100 additions.
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
# reports a speed that doesn't exist.
#
# Does waiting change what is learnt? We train eight steps without waiting, and eight with `waitall`
# after each backward pass and each step.

# %% tags=["fold", "trains"]
# check: the same weights to the bit, with and without waiting
def train_eight(wait, **bulks):
    net, trainer = new_lenet()
    if bulks:
        net.hybridize(**bulks)
    for _ in range(8):
        two_passes(net)
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
print(f"{P} parameters on {len(pair)} devices: equal to the bit")

# %% [markdown]
# The weights are the same. The engine knows which arrays each operator reads and writes, and
# starts it when these are ready. So waiting is for clocks, and for errors (chapter 01).
#
# What does it do, then? Here are three steps, with `waitall` after each and without:

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


def least_disturbed(wait):
    """Of five recordings the shortest."""
    recordings = [record(steps_noted, net, trainer, wait) for _ in range(5)]
    return min(recordings, key=lambda each: each.length)


waiting = least_disturbed(nd.waitall)
free = least_disturbed(no_wait)
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
# A gap *under* a grey bar is Python's: with `waitall` a device is idle in each step until Python
# hands out its operators. Without, the second and the third step are in its queue already. (A gap
# before the updates is another: a device waits for the other's gradients.) Does it cost time? Three
# steps are too few to tell, so eight of each kind take turns:

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: ms a step, with waitall after each step and without
ROUNDS = 9


def wait_each_step():
    for _ in range(8):
        train_once(net, trainer)
        nd.waitall()


def wait_once():
    for _ in range(8):
        train_once(net, trainer)


times = in_turns({"waitall each step": wait_each_step, "no waitall": wait_once}, ROUNDS, quiet=0.05)
times_a_step = {name: seconds / 8 for name, seconds in times.items()}
print_times(times_a_step)
waits, never_waits = [spread(seconds) for seconds in times_a_step.values()]
if waits.low <= never_waits.high and never_waits.low <= waits.high:
    print("the brackets overlap: no winner")
else:
    print("the brackets don't overlap")

# %% [markdown]
# Each line has the median of the rounds, and in brackets their middle half. Where the brackets
# overlap, this measurement can't tell what Python's gaps cost; where they don't, the difference of
# the medians is the cost of waiting in each step. (From one cell to another the same step may take
# longer or less, as the machine's load changes. So compare times within a cell only.)
#
# **Keep:** wait before you stop a clock. Waiting in every step brings nothing.
#
# ## When can communication begin?
#
# Must the all-reduce wait for the end of the backward pass? The *last* layer's gradient is ready
# first. It could be sent while the pass goes on:
#
# ![Above, the link carries three gradients after the backward pass. Below, it starts with layer 3's
# as soon as that is ready, and ends earlier.](src/drawings/overlap.svg)
#
# Nobody has to program that: a parameter's sum needs only its own gradients, and the engine knows
# it. Does it happen? One thing can prevent it. By default the engine joins up to 15 operators into
# one, a **bulk**, so that it has fewer to schedule. A bulk ends as a whole, and its gradients are
# ready only then.
#
# A hybridised network (chapter 08) can be told how many operators a bulk may have; 0 is for none.
# We allow none in the forward pass, so that each bulk that we see is of the backward pass. A
# recording calls it `ImperativeBulk`. Here is the LeNet with bulks of up to 15, on `cpu(0)`:

# %% tags=["trains"]
def lenet_in_bulks(size):
    net, trainer = new_lenet()
    net.hybridize(forward_bulk_size=0, backward_bulk_size=size)  # NEW
    for _ in range(3):
        train_once(net, trainer)
    return net, trainer


def backward_events(recording):
    names = []
    for event in recording.lanes["cpu(0)"]:
        if event.name == "ImperativeBulk" or event.name.startswith("_backward"):
            names.append(event.name)
    return names


net_joined, trainer_joined = lenet_in_bulks(15)  # as is the default
recording_joined = record(train_once, net_joined, trainer_joined)
print(backward_events(recording_joined))

# %% [markdown]
# The whole backward pass is *joined* in one bulk. So no gradient can leave before its device's pass
# has ended. And without bulks?

# %% tags=["trains"]
net_apart, trainer_apart = lenet_in_bulks(0)
recording_apart = record(train_once, net_apart, trainer_apart)
for name in backward_events(recording_apart):
    print(name)

# %% [markdown]
# The bulk that is left is the loss's, which isn't hybridised. (Before, it was joined with the
# rest.) All other operators are *apart*, from the last layer to the first, and gradients get ready
# one by one.

# %% tags=["fold", "trains"]
# check: one event joined, ten apart, on both devices; the weights are the same
for each, expected in [(recording, 1), (recording_joined, 1), (recording_apart, 10)]:
    check_lanes(each)
    for lane in each.lanes.values():
        names = [event.name for event in lane]
        backward = [name for name in names if "_backward" in name or name == "ImperativeBulk"]
        assert len(backward) == expected
for size in [15, 0]:
    assert_same(train_eight(no_wait, forward_bulk_size=0, backward_bulk_size=size), never)

# %% [markdown]
# ## A link beside the cores
#
# What can overlap win? Here little: copies are short, and the cores that copy are those that
# compute. So we imitate a slow link that carries data *beside* the cores, as between machines. A
# step's gradients are to take about as long as its passes, so that there is much to overlap:

# %% tags=["measured", "trains"]
lengths = []
for _ in range(5):
    lengths.append(record(two_passes, net_apart).length)
passes_ms = np.median(lengths)

nbytes = 0  # of all gradients, on both devices
for parameter in net_apart.collect_params().values():
    for grad in parameter.list_grad():
        nbytes += 4 * grad.size  # 4 bytes a number
rate = nbytes / (passes_ms / 1000)  # bytes a second
print(f"{nbytes:,} bytes in {passes_ms:.1f} ms: {rate / 1e6:.0f} MB/s")

# %% [markdown]
# The link carries one message at a time, and sleeps as long as that takes:

# %% tags=["measured"]
one_at_a_time = threading.Lock()
link = profiler.Domain("link")  # its tasks become a lane of the recording


def carry(size):  # in bytes
    with one_at_a_time:
        message = profiler.Task(link, "message")
        message.start()  # the profiler notes when it starts and stops
        sleep(size / rate)
        message.stop()


print(f"500,000 bytes should take {500_000 / rate * 1e3:.1f} ms")
for event in record(carry, 500_000).events:
    print(event.lane, event.name, f"{event.duration:.1f} ms")

# %% [markdown]
# The engine must know that a message waits for its gradient. So sending becomes an operator. `send`
# calls `carry`, and returns the gradient unchanged. It sleeps in a thread of its own, so no lane is
# busy meanwhile. It has a second input, `after`: it reads nothing from it, but can't begin before
# `after` is ready, too.

# %% tags=["fold"]
# define: the operator `send`, in Python, by MXNet's CustomOp
class Send(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        gradient, _ = in_data
        carry(4 * gradient.size)
        self.assign(out_data[0], req[0], gradient)  # it arrives unchanged


@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["gradient", "after"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], []

    def create_operator(self, context, shapes, dtypes):
        return Send()


assert nd.Custom(nd.array([1, 2, 3]), nd.zeros(1), op_type="send").asnumpy().tolist() == [1, 2, 3]

# %% [markdown]
# How do we measure what overlap wins? `waitall` before the messages would prevent overlap, but also
# keep Python from running ahead. We need a **control**, a step that differs in overlap alone: in
# ours Python runs ahead, too, but each message waits for both backward passes.
#
# So we make an array that is ready only when both passes have ended. The first layer's gradients
# are ready last, so the sum of both devices' is such an array. (The bias is as good as the weight,
# and smaller.) `send` wants its inputs on one device, so each device gets a copy:

# %%
def when_both_ended(net):
    bias_grad_0, bias_grad_1 = net[0].bias.list_grad()  # of the first layer
    total = bias_grad_0 + bias_grad_1.as_in_context(pair[0])
    return {pair[0]: total, pair[1]: total.as_in_context(pair[1])}

# %% [markdown]
# In the step each gradient crosses the link before Trainer adds it up. A held message gets that
# array as `after`; another gets the gradient itself, and so waits for nothing more. `out=grad`
# writes what arrives over the gradient, so Trainer's sum has to wait for it. Python hands the
# messages out from the first layer to the last. But a message takes the link only when its inputs
# are ready, so the first layer's don't block the others.

# %% tags=["trains"]
def step_over_link(net, trainer, hold):
    two_passes(net)
    if hold:
        both_ended = when_both_ended(net)
    for parameter in net.collect_params().values():
        for grad in parameter.list_grad():
            after = grad  # nothing but itself to wait for
            if hold:
                after = both_ended[grad.context]
            nd.Custom(grad, after, op_type="send", out=grad)  # NEW
    trainer.step(128)

# %% tags=["fold", "trains"]
# check: over the link the weights are the same to the bit, and every gradient is sent
for size, hold in [(15, False), (0, False), (0, True)]:
    sent_net, sent_trainer = new_lenet()
    sent_net.hybridize(forward_bulk_size=0, backward_bulk_size=size)
    for _ in range(8):
        sent = record(step_over_link, sent_net, sent_trainer, hold)
        assert len(sent.lanes["link"]) == len(pair) * P, "a message for each gradient"
        check_lanes(sent, ("cpu(0)", "cpu(1)", "link"))
        assert sum(event.duration for event in sent.lanes["link"]) > 0.99e3 * nbytes / rate
    assert_same(arrays_of(sent_net), never)


# What Trainer adds up is what arrives: a link that doubles it changes the weights.
def double(self, is_train, req, in_data, out_data, aux):
    self.assign(out_data[0], req[0], 2 * in_data[0])  # the gradient, not `after`


unchanged = Send.forward
Send.forward = double
try:
    doubled_net, doubled_trainer = new_lenet()
    for _ in range(8):
        step_over_link(doubled_net, doubled_trainer, hold=False)
    doubled = arrays_of(doubled_net)
finally:
    Send.forward = unchanged
for ours, whole in zip(doubled, never, strict=True):
    assert (ours != whole).any(), "Trainer adds up what was there before"

# %% [markdown]
# ## What overlap wins
#
# We time the LeNet without bulks: *held* is the control, *at once* may overlap. **Predict:**
# sending takes about as long as the passes. By how much is *at once* shorter, at most?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9
WAYS = {
    "held": partial(step_over_link, net_apart, trainer_apart, hold=True),
    "at once": partial(step_over_link, net_apart, trainer_apart, hold=False),
    "the passes alone": partial(two_passes, net_apart),
}
times = in_turns(WAYS, ROUNDS, quiet=0.05)  # rounds in which others used over 5 % are taken again
print_times(times)

held_time = spread(times["held"])
at_once_time = spread(times["at once"])
passes_time = spread(times["the passes alone"])
saved = held_time.median - at_once_time.median
print(f"overlap saves {1e3 * saved:.1f} ms, {saved / passes_time.median:.0%} of the passes")

# %% tags=["fold"]
# check: overlap saves time; in a quiet run clearly, and over a quarter of the passes' time
widths = []
for seconds in times.values():
    low, median, high = spread(seconds)
    widths.append((high - low) / median)
assert saved > 0, "overlap saves time"
if max(widths) < 0.05:  # a quiet run
    assert at_once_time.high < held_time.low, "clearly shorter"
    assert saved > 0.25 * passes_time.median, "a good part of the passes' time"

# %% [markdown]
# The two differ only in when a message may leave, so the difference is overlap's. Where does the
# time go? Here is a step of each kind:

# %% tags=["fold", "measured", "trains"]
# draw: a step over the link, held and at once; the printed line is the upper panel's sum
def pass_ends(recording):
    """When each device's backward pass has ended, in ms."""
    ends = []
    for lane in ["cpu(0)", "cpu(1)"]:
        ends.append(max(event.end for event in recording.lanes[lane]
                        if "_backward" in event.name or event.name == "ImperativeBulk"))
    return ends


def head_start(recording):
    """ms from the first message to the end of the backward pass on the device that ends first."""
    return min(pass_ends(recording)) - recording.lanes["link"][0].start


def recorded_steps(net, trainer, hold, count=7):
    """Some recordings, in the order of their head starts."""
    recordings = [record(step_over_link, net, trainer, hold) for _ in range(count)]
    return sorted(recordings, key=head_start)


def typical(recordings):
    """The one with the median head start."""
    return recordings[len(recordings) // 2]


all_held = recorded_steps(net_apart, trainer_apart, hold=True)
held = typical(all_held)
at_once = typical(recorded_steps(net_apart, trainer_apart, hold=False))
passes_end = max(pass_ends(held))
messages = held.lanes["link"]
last_arrives = messages[-1].end
print(f"held: {passes_end:.1f} ms for the passes, {last_arrives - passes_end:.1f} ms for "
      f"{len(messages)} messages, {held.length - last_arrives:.1f} ms for the last updates,")
print(f"{held.length:.1f} ms in all")
panels = {"held": held.rows, "at once": at_once.rows}
most = max(held.length, at_once.length)
fig, _ = timeline("At once, gradients leave while the devices still compute", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels with rows for Python, two devices and the link. Above, the link begins "
              "when both devices have computed all; below, it begins while both still compute.")

# %% tags=["fold", "trains"]
# check: the first message leaves after both passes (held), after one (bulks), or before (at once)
for each in all_held:
    assert each.lanes["link"][0].start > max(pass_ends(each)) - 2e-3, "this would be overlap"
assert head_start(at_once) > 0, "no overlap"
for each in recorded_steps(net_joined, trainer_joined, hold=False):
    assert head_start(each) < 2e-3, "joined, and yet a gradient left early"

# %% [markdown]
# *Held*, the parts follow one another, as printed. *At once*, the link works beside the passes.
# More than the shorter of the two, passes or messages, can't be saved. And the link has nothing to
# carry until the first gradient is ready. (The messages take longer than their bytes alone would:
# the figure has gaps between them, probably while Python calls the next `send`.) Which message
# should go first, and how far Python may run ahead, is in deeper: A slow link.
#
# **On GPUs** copies between devices have queues and threads of their own (`kCopyQueue` in
# `threaded_engine_perdevice.cc` at 1.9.1), so they can run beside computing. PyTorch's DDP joins
# *gradients* into buckets, which limits overlap too (chapter 14).
#
# ## Summary
#
# - Calls hand out work. A clock that doesn't wait measures Python.
# - A lane is compute, communication, update, or idle: because of Python, or waiting (deeper: A
#   step's time budget adds them up).
# - `waitall` changed no weight. After it, devices are idle until the next step's first operators
#   come.
# - A gradient can be sent when its bulk has ended. By default LeNet's backward pass is one bulk.
# - Over a slow link that works beside the cores, overlap saved time: against a control in which
#   Python runs ahead, too, but no gradient leaves before both passes have ended.
#
# **Further reading.** *Dive into Deep Learning*, "Asynchronous Computation", and "Concise
# Implementation for Multiple GPUs", exercise 3; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets.

# %% [markdown]
# ## Exercises
#
# 1. **Three devices.** How many copies and sums has a step on $k$ devices with $P$ parameters?
#    Write the formula down, then count on three, by name. (The profiler has no more lanes than
#    the machine has cores.)
# 2. **Bulks of three.** With `backward_bulk_size=3`, has the backward pass more events than with
#    15, and fewer than with 0? Does the first message leave before its end?
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
# More than one, since a bulk has at most three operators now, and fewer than without bulks. The
# first bulks hold the last layers, so messages still leave early. (`typical`, `recorded_steps` and
# `head_start` are in folded cells above.)

# %% tags=["solution", "trains"]
net_three, trainer_three = new_lenet()
net_three.hybridize(forward_bulk_size=0, backward_bulk_size=3)
for _ in range(3):
    step_over_link(net_three, trainer_three, hold=False)
recording_three = typical(recorded_steps(net_three, trainer_three, hold=False))
events_joined = len(backward_events(recording_joined))
events_three = len(backward_events(recording_three))
events_apart = len(backward_events(recording_apart))
print(f"{events_joined} event with bulks of 15, {events_three} of 3, {events_apart} without bulks")
assert events_joined < events_three < events_apart
assert head_start(recording_three) > 0, "overlap"

# %% [markdown]
# ### Answer 3
#
# $2 k P$ copies, none of weights. Each device updates its own replica. The weights are those of the
# eight steps in the chapter's folded check, to the bit.

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
