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
from statistics import median
from time import perf_counter, sleep

from helpers import split_and_load
from helpers.networks import lenet
from helpers.timing import Others, in_turns, print_times, spread
from helpers.trace import record

import mxnet as mx
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
def forward_backward(net):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


def train_once(net, trainer):
    forward_backward(net)
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
# short. (Python needs a core, too. With two cores in all, a device may begin late.)
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
# check: Python hands out a hundred additions while none of them can run
class Gate(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        log.append("open" if gate.wait(timeout=60) else "nobody has opened it")
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("gate")
class GateProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Gate()


assert looped < 0.9 * done, "Python waited"
# Nothing that reads `x` can run while the gate is closed, and yet Python hands out 100 additions.
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
        forward_backward(net)
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
# Look at where the second step begins. With `waitall` both devices are idle there, until Python
# hands out their operators. Without, these are in the queue already. The gaps before the updates
# are another matter: there a device waits for the other's gradients. Does `waitall` cost time?
# Three steps are too few to tell, so eight of each kind take turns:

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
    longer = 1e3 * (waits.median - never_waits.median)
    print(f"the brackets are apart: with waitall a step takes {longer:+.1f} ms")

# %% [markdown]
# Each line has the median of the rounds, and in brackets their middle half. If the brackets
# overlap, we say that there is no winner. (Compare times within a cell only: the machine's load
# changes from one cell to another.)
#
# **Keep:** wait before you stop a clock, but not in every step.
#
# ## When can communication begin?
#
# Must the all-reduce wait for the end of the backward pass? The *last* layer's gradient is ready
# first. It could be sent while the pass goes on:
#
# ![Above, held: the link carries three gradients after the backward pass. Below, at once: it starts
# with layer 3's as soon as that is ready, and ends earlier.](src/drawings/overlap.svg)
#
# Nobody has to program that: a parameter's sum needs only its own gradients, and the engine knows
# it. Does it happen? One thing can prevent it. By default the engine joins up to 15 operators of a
# backward pass into one, a **bulk**, so that it has fewer to schedule. A bulk ends as a whole, and
# its gradients are ready only then.
#
# A hybridised network (chapter 08) can be told how many operators a bulk may have; 0 is for none.
# In a recording a bulk is one event, `ImperativeBulk`. Here is LeNet's backward pass on `cpu(0)`
# with bulks of up to 15. (In the forward pass we allow none, so that all bulks that we see are the
# backward pass's.)

# %% tags=["fold"]
# define: `backward_events`, the names of the backward pass's events on cpu(0)
def backward_events(recording):
    names = []
    for event in recording.lanes["cpu(0)"]:
        if event.name == "ImperativeBulk" or event.name.startswith("_backward"):
            names.append(event.name)
    return names

# %% tags=["trains"]
def lenet_in_bulks(size):
    net, trainer = new_lenet()
    net.hybridize(forward_bulk_size=0, backward_bulk_size=size)  # NEW
    for _ in range(3):
        train_once(net, trainer)
    return net, trainer


net_joined, trainer_joined = lenet_in_bulks(15)  # as is the default
recording_joined = record(train_once, net_joined, trainer_joined)
print(backward_events(recording_joined))

# %% [markdown]
# One event: the whole backward pass is *joined* in a bulk. So no gradient can leave before its
# device's pass has ended. And without bulks?

# %% tags=["trains"]
net_apart, trainer_apart = lenet_in_bulks(0)
recording_apart = record(train_once, net_apart, trainer_apart)
for name in backward_events(recording_apart):
    print(name)

# %% [markdown]
# Now the operators are *apart*, from the last layer to the first, and gradients get ready one by
# one. (The bulk that is left is the loss's backward pass: the loss isn't hybridised.)

# %% tags=["fold", "trains"]
# check: one event joined, ten apart, on both devices; the same weights; twenty layers: more bulks
for each, expected in [(recording, 1), (recording_joined, 1), (recording_apart, 10)]:
    check_lanes(each)
    for lane in each.lanes.values():
        names = [event.name for event in lane]
        backward = [name for name in names if "_backward" in name or name == "ImperativeBulk"]
        assert len(backward) == expected
for size in [15, 0]:
    assert_same(train_eight(no_wait, forward_bulk_size=0, backward_bulk_size=size), never)

twenty = gluon.nn.HybridSequential()
for _ in range(20):
    twenty.add(gluon.nn.Dense(5, in_units=5))
twenty.initialize()
twenty.hybridize(forward_bulk_size=0)  # so that each bulk is of the backward pass


def backward_of_twenty():
    with autograd.record():
        out = twenty(nd.ones((3, 5)))
    out.backward()


backward_of_twenty()
names = backward_events(record(backward_of_twenty))
assert names.count("ImperativeBulk") > 1, f"twenty layers in several bulks: {names}"

# %% [markdown]
# ## A link beside the cores
#
# What can overlap win? Here little: copies are short, and the cores that copy are those that
# compute. So we imitate a slow link that carries data *beside* the cores, as between machines. Over
# it we send gradients in two ways, as in the drawing:
#
# - *held*: every message waits until both devices have computed all gradients.
# - *at once*: a message leaves as soon as its gradient is ready.
#
# *Held* is our **control**: it differs from *at once* in overlap, and in one small sum that it
# waits for. (With `waitall` before the messages Python couldn't run ahead, so it would differ in
# that, too.)
#
# We make the link so slow that a step's gradients take as long as its forward and backward pass:

# %% tags=["measured", "trains"]
lengths = []  # of forward and backward pass, in ms
for _ in range(5):
    lengths.append(record(forward_backward, net_apart).length)
passes_ms = median(lengths)

gradient_bytes = 0  # on both devices
for parameter in net_apart.collect_params().values():
    for gradient in parameter.list_grad():
        gradient_bytes += 4 * gradient.size  # 4 bytes a number
link_speed = gradient_bytes / passes_ms  # bytes a millisecond
print(f"{gradient_bytes:,} bytes in {passes_ms:.1f} ms: {link_speed:,.0f} bytes a ms")

# %% [markdown]
# `send(gradient, after)` sends a gradient over this link: it sleeps as long as its bytes take. It
# is an operator, so Python hands it out and goes on. The engine begins it when both `gradient` and
# `after` are ready, and sends one message at a time. What arrives is written over the gradient, so
# whoever reads the gradient afterwards, such as Trainer, waits for the message.

# %% tags=["fold"]
# define: `send`, an operator in a thread of its own
one_at_a_time = threading.Lock()
link = profiler.Domain("link")  # its tasks become a lane of the recording


class Send(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        gradient, _ = in_data
        with one_at_a_time:
            message = profiler.Task(link, "message")
            message.start()  # the profiler notes when it starts and stops
            sleep(4 * gradient.size / link_speed / 1000)
            message.stop()
        self.assign(out_data[0], req[0], gradient)  # it arrives unchanged


@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["gradient", "after"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], []

    def create_operator(self, context, shapes, dtypes):
        return Send()


def send(gradient, after):
    nd.Custom(gradient, after, op_type="send", out=gradient)


gradient = nd.array([1, 2, 3])
send(gradient, after=nd.zeros(1))
assert gradient.asnumpy().tolist() == [1, 2, 3]

# %% tags=["measured"]
def send_one():
    gradient = nd.ones(125_000, ctx=pair[0])  # 500,000 bytes
    send(gradient, after=gradient)  # nothing more to wait for


print(f"500,000 bytes should take {500_000 / link_speed:.1f} ms")
for event in record(send_one).lanes["link"]:
    print(event.lane, event.name, f"{event.duration:.1f} ms")

# %% [markdown]
# A held message needs an `after` that is ready only when both devices have computed all gradients.
# The first layer's gradients come last. So the sum of both devices' is such an array:

# %% tags=["fold"]
# define: `when_both_ended`, an array on each device that is ready when both have all gradients
def when_both_ended(net):
    bias_grad_0, bias_grad_1 = net[0].bias.list_grad()  # of the first layer
    total = bias_grad_0 + bias_grad_1.as_in_context(pair[0])
    return {pair[0]: total, pair[1]: total.as_in_context(pair[1])}

# %% [markdown]
# In our step each gradient crosses the link before Trainer adds it up:

# %% tags=["trains"]
def step_over_link(net, trainer, hold):
    forward_backward(net)
    if hold:
        both_ended = when_both_ended(net)  # for each device an array
    for parameter in net.collect_params().values():
        for gradient in parameter.list_grad():
            if hold:
                send(gradient, after=both_ended[gradient.context])
            else:
                send(gradient, after=gradient)
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
        carried = sum(event.duration for event in sent.lanes["link"])
        assert carried > 0.99 * gradient_bytes / link_speed
    assert_same(arrays_of(sent_net), never)

# *Held* lets Python run ahead: it hands out a whole step while nobody can read the batch.
gate, log = threading.Event(), []
open_shards = x_shards
x_shards = [nd.Custom(x_shard, op_type="gate") for x_shard in open_shards]
step_over_link(sent_net, sent_trainer, hold=True)
assert log == [], "Python waited for the devices"
gate.set()
nd.waitall()
x_shards = open_shards
assert log == ["open", "open"]


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
# We time *held* and *at once*, both without bulks, and what you have by default: *joined*, all
# messages at once, but the backward pass in one bulk. **Predict** the order of the three. The
# messages take about as long as the two passes: how much can *at once* save, at most?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 3"]
ROUNDS = 9


def step_held():
    step_over_link(net_apart, trainer_apart, hold=True)


def step_joined():
    step_over_link(net_joined, trainer_joined, hold=False)


def step_at_once():
    step_over_link(net_apart, trainer_apart, hold=False)


def passes_joined():
    forward_backward(net_joined)


def passes_apart():
    forward_backward(net_apart)


WAYS = {
    "held": step_held,
    "joined": step_joined,
    "at once": step_at_once,
    "the passes alone, joined": passes_joined,
    "the passes alone, apart": passes_apart,
}
with Others() as others:
    # Disturbed rounds are taken again.
    times = in_turns(WAYS, ROUNDS, quiet=0.05)
print_times(times)

# %% [markdown]
# What does overlap save, and what does it cost to do without bulks?

# %% tags=["measured"]
typical_times = {name: spread(seconds).median for name, seconds in times.items()}
saved = typical_times["held"] - typical_times["at once"]
passes_time = typical_times["the passes alone, apart"]
print(f"at once against held: {1e3 * saved:.1f} ms saved, {saved / passes_time:.0%} of the passes")

joined, apart = spread(times["the passes alone, joined"]), spread(times["the passes alone, apart"])
if apart.low > joined.high:
    print(f"without bulks the passes take {1e3 * (apart.median - joined.median):.1f} ms more")
else:
    print("without bulks the passes aren't seen to take longer")

# %% tags=["fold"]
# check: overlap saves time; in a quiet run over a quarter of the passes' time, and less if joined
from helpers.device import cores

if cores() >= 2 and ROUNDS == 9 and others.share < 0.05:
    assert spread(times["at once"]).high < spread(times["held"]).low, "clearly shorter"
    assert saved > 0.25 * passes_time, "a good part of the passes' time"
    assert typical_times["at once"] < spread(times["joined"]).low, "a bulk holds them back"

# %% [markdown]
# *Held* and *at once* differ in when a message may leave, and in the small sum that *held* waits
# for, so nearly all that is saved is overlap's. In *joined* a device's gradients leave when its
# pass has ended, so they overlap only with the other device's pass. (All three take longer than you
# may have expected from the passes and the messages alone; why, we haven't measured.)
#
# Should you do without bulks, then? If your links are slow, try
# `net.hybridize(backward_bulk_size=0)`, and keep it if your step gets shorter. (A network of many
# layers has several bulks, so its first gradients leave early even with them.)
#
# Where does the time go? Here is a step of each kind:

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
recording_held = typical(all_held)
all_at_once = recorded_steps(net_apart, trainer_apart, hold=False)
recording_at_once = typical(all_at_once)
passes_end = max(pass_ends(recording_held))
messages = recording_held.lanes["link"]
last_arrives = messages[-1].end
done = recording_held.length
print(f"held: {passes_end:.1f} ms for the passes, {last_arrives - passes_end:.1f} ms for "
      f"{len(messages)} messages, {done - last_arrives:.1f} ms for the last updates,")
print(f"{done:.1f} ms in all")
panels = {"held": recording_held.rows, "at once": recording_at_once.rows}
most = max(recording_held.length, recording_at_once.length)
fig, _ = timeline("At once, gradients leave while the devices still compute", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels with rows for Python, two devices and the link. Above, the link begins "
              "when both devices have computed all; below, it begins while both still compute.")

# %% tags=["fold", "trains"]
# check: the first message leaves after both passes (held), after one (bulks), or before (at once)
for each in all_held:
    assert each.lanes["link"][0].start > max(pass_ends(each)) - 2e-3, "this would be overlap"
assert head_start(all_at_once[-1]) > 0, "no overlap"
for each in recorded_steps(net_joined, trainer_joined, hold=False):
    assert head_start(each) < 2e-3, "joined, and yet a gradient left early"

# %% [markdown]
# *Held*, the parts follow one another, as printed. *At once*, the link works beside the passes.
#
# **On GPUs** copies between devices have queues and threads of their own (`kCopyQueue` in
# `threaded_engine_perdevice.cc` at 1.9.1), so they can run beside computing. PyTorch's DDP joins
# *gradients* into buckets, which limits overlap too (chapter 14).
#
# ## Summary
#
# - Calls hand out work. A clock that doesn't wait measures Python.
# - A lane is compute, communication, update, or idle: because of Python, or waiting.
# - `waitall` changed no weight. After it, devices are idle until the next step's first operators
#   come.
# - A gradient can be sent when its bulk has ended. By default LeNet's backward pass is one bulk; on
#   a slow link it pays to try without.
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
