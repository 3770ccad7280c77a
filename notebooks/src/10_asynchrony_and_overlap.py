# %% [markdown]
# # 10 · Asynchrony and overlap
#
# Python dispatches work, and the devices carry it out (chapter 01). What do they do during a
# training step, and can they compute **while** gradients are sent? To see that, we record steps and
# draw them as **timelines**:
#
# ![Two rows from left to right. cpu(0): compute, idle, communicate, update. cpu(1): idle, a longer
# compute, communicate, idle.](src/drawings/lane_parts.svg)
#
# > **What you'll do:** record training steps and draw their timelines. Find out whether a step
# > needs `waitall`. Let gradients leave during the backward pass, and measure what that saves.
# >
# > **What you'll learn:** how to read a timeline; when communication can overlap with computing,
# > what *exposed communication* is, and how to measure what overlap saves.
# >
# > **What you need:** chapters 01, 06, 07 and 08, and two cores. No GPU and no data: random images
# > will do. Reading takes {reading time}, running less than a minute.

# %%
import threading
from time import perf_counter, sleep

from helpers import split_and_load, your_turn
from helpers.compare import largest_difference
from helpers.networks import lenet
from helpers.timing import in_turns, print_times, spread
from helpers.trace import record

import mxnet as mx
from mxnet import autograd, gluon, nd, profiler

# %% [markdown]
# ## The timeline of a step
#
# What do two devices do during a training step? We take LeNet, as in chapter 06, and 256 random
# images, 128 for each device. The devices are simulated, even if you have GPUs.

# %%
pair = [mx.cpu(0), mx.cpu(1)]
x_shards = split_and_load(nd.random.uniform(shape=(256, 1, 28, 28)), pair)
y_shards = split_and_load(nd.arange(256) % 10, pair)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()


def new_lenet():
    mx.random.seed(0)
    net = lenet()
    net.initialize(mx.init.Xavier(), ctx=pair)
    # Operators stay apart, so that each gradient is ready as soon as possible (more below).
    net.hybridize(forward_bulk_size=0, backward_bulk_size=0)
    net(x_shards[0])  # the first call makes the weights
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return net, trainer

# %% [markdown]
# Later, gradients will be sent between the backward pass and the update. So the step is in two
# functions.

# %% tags=["trains"]
def forward_backward(net):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(x_shards, y_shards):
            losses.append(cross_entropy(net(x_shard), y_shard))
    autograd.backward(losses)


def train_once(net, trainer):
    forward_backward(net)
    trainer.step(256)  # all-reduce and update


net, trainer = new_lenet()
for _ in range(3):
    train_once(net, trainer)  # warms up: the store gets its keys

# %% [markdown]
# MXNet's profiler notes when each operator begins and ends. `record` (chapter 01) calls a function,
# waits until all work is done, and returns what was noted: *events*. An event is one operator on
# one device, with times in ms since the recording began. Here are the first three.
# (`SetValueOp`, if it is among them, fills an array with one value.)

# %% tags=["measured", "trains"]
recording = record(train_once, net, trainer)
for event in recording.events[:3]:
    print(f"{event.lane}  {event.start:5.2f} to {event.end:5.2f} ms  {event.name}")
print(f"all work was done after {recording.length:.1f} ms")

# %% tags=["fold", "measured"]
# draw: the timeline of a step
from helpers.plotting import show, timeline

fig, _ = timeline("A training step on two devices", {"": recording.rows})
show(fig, alt="Three rows: Python, which dispatches the work at first, and two devices, which "
              "compute for most of the step. Communication and updates are hairlines.")

# %% [markdown]
# Most of what the devices do is compute. Communication and updates are short, most of them
# hairlines. (Python needs a core, too. So with two cores in all, a device may begin late.)
#
# ## Does a step need `waitall`?
#
# We read the clock after a loop of twenty steps, and again after `waitall`. **Predict:** how far
# apart are the two?

# %% tags=["predict", "measured", "trains"]
nd.waitall()
begin = perf_counter()
for _ in range(20):
    train_once(net, trainer)
looped = perf_counter() - begin
nd.waitall()
done = perf_counter() - begin
print(f"the loop took {looped / 20 * 1e3:.1f} ms a step, the work {done / 20 * 1e3:.1f} ms a step")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The work took much longer. The first number is only what Python took to dispatch a step. A
# program that stops its clock there reports a speed that doesn't exist.
#
# </details>
#
# **Wait before you stop a clock.** Should one wait after each step, too? We train a network for
# eight steps without waiting, and the same network with `waitall` after each step. **Predict:** do
# they get the same weights?

# %% tags=["predict", "trains"]
def train_and_wait(net, trainer):
    train_once(net, trainer)
    nd.waitall()


def weights_after_eight(step):
    net, trainer = new_lenet()
    for _ in range(8):
        step(net, trainer)
    weights = []
    for parameter in net.collect_params().values():
        weights.extend(parameter.list_data())  # one on each device
    return weights


without = weights_after_eight(train_once)
waited = weights_after_eight(train_and_wait)
print("equal to the bit:", largest_difference(waited, without) == 0)

# %% [markdown]
# <details><summary>What came out</summary>
#
# They do. The engine knows which arrays each operator reads and writes, and starts it when these
# are ready. So the weights need no `waitall`. It is for clocks, for errors (chapter 01), and to
# keep Python from running so far ahead that waiting batches fill the memory.
#
# </details>
#
# ## When can communication begin?
#
# Must the all-reduce wait for the end of the backward pass? The *last* layer's gradient is ready
# first, so it could be sent while the pass goes on with the layers before it:
#
# ![Two panels with rows for the backward pass and the link. At the end: the link carries three
# gradients after the pass. At once: it begins with layer 3's while the pass goes on with layer 2.
# The time in which only the link works is marked as exposed.](src/drawings/overlap.svg)
#
# Communication that runs beside computing is **overlapped**. Communication while no device computes
# is **exposed communication**, which makes the step longer.
#
# In MXNet the engine can overlap by itself, because a copy of a gradient needs nothing but this
# gradient. But by default it joins up to 15 operators of a backward pass into one, a *bulk*
# (`MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN` in `env_var.md`, 1.9.1), and all gradients of a bulk become
# ready when it ends. LeNet's whole backward pass would be one bulk (exercise 1), so a device could
# send no gradient before its pass has ended. That is why `new_lenet` has `backward_bulk_size=0`.
#
# ## A link beside the cores
#
# Between our simulated devices there is little to win: the copies are short, and the cores that
# copy are those that compute. Between machines, a network carries data *beside* the cores. So we
# imitate a slow link of 50 MB/s, over which all gradients go before Trainer adds them up. How
# long will each gradient take?

# %%
BYTES_A_MS = 50_000
total = 0
for parameter in net.collect_params().values():
    gradient = parameter.grad(pair[0])
    ms = 4 * gradient.size / BYTES_A_MS  # 4 bytes a number
    print(f"{str(gradient.shape):16} {ms:6.3f} ms")
    total += 2 * ms  # both devices send
print(f"for all of them, from both devices: {total:.1f} ms")

# %% [markdown]
# The backward pass goes from the bottom of this list to its top. The weight of a dense layer, the
# one of shape (128, 800), has most of the bytes, and it is ready early.
#
# A message is an *operator* whose code is in Python, a `CustomOp`. MXNet's engine starts it when
# its input, a gradient, is ready, and runs it in a thread beside the devices' (`custom-inl.h`,
# 1.9.1). So while a message sleeps, the devices can go on computing. The link carries one message
# at a time. For that there is a *lock*, which only one thread can hold:

# %%
link_is_free = threading.Lock()
link = profiler.Domain("link")  # messages become a row of the timeline


class Send(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        gradient = in_data[0]
        seconds = 4 * gradient.size / BYTES_A_MS / 1000
        with link_is_free:  # waits for the lock, and gives it back at the end
            message = profiler.Task(link, "message")
            message.start()
            sleep(seconds)
            message.stop()
        # It arrives as it was. req[0] says how to write: here, over what is there.
        self.assign(out_data[0], req[0], gradient)

# %% [markdown]
# MXNet must know the operator's name:

# %% tags=["fold"]
# define: the operator's name is `send`
@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def create_operator(self, context, shapes, dtypes):
        return Send()

# %% [markdown]
# `send` takes a gradient, and what arrives is written over it (`out`). So whatever reads the
# gradient afterwards, such as Trainer, waits for the message. Here we send 500,000 bytes, which
# should take 10 ms:

# %% tags=["measured"]
def send(gradient):
    nd.Custom(gradient, op_type="send", out=gradient)


recording = record(send, nd.ones(125_000, ctx=pair[0]))
for event in recording.lanes["link"]:
    print(f"{event.lane}  {event.start:5.2f} to {event.end:5.2f} ms  {event.name}")

# %% [markdown]
# ## At the end, or at once?
#
# Now a step in which each gradient is sent **at once**, when it is ready, and for comparison a step
# that sends all of them **at the end** of the backward passes. They differ in one line:

# %%
def send_gradients(net):
    parameters = list(net.collect_params().values())
    parameters.reverse()  # the last layer's first
    for parameter in parameters:
        for gradient in parameter.list_grad():  # one on each device
            send(gradient)


def step_at_once(net, trainer):
    forward_backward(net)
    send_gradients(net)
    trainer.step(256)


def step_at_the_end(net, trainer):
    forward_backward(net)
    nd.waitall()  # NEW: all gradients are ready
    send_gradients(net)
    trainer.step(256)

# %% [markdown]
# The link must not change what is learnt. Are the weights those of the steps without a link?

# %% tags=["trains"]
for step in [step_at_once, step_at_the_end]:
    found = weights_after_eight(step)
    print(step.__name__, "equal to the bit:", largest_difference(found, without) == 0)

# %% [markdown]
# Now eight steps of each kind take turns, for several rounds. We wait after each step of either
# kind, because the question is what overlaps within one step.

# %%
def eight_at_the_end():
    for _ in range(8):
        step_at_the_end(net, trainer)
        nd.waitall()


def eight_at_once():
    for _ in range(8):
        step_at_once(net, trainer)
        nd.waitall()

# %% [markdown]
# Each line will show the median of the rounds, and in brackets their middle half, the *spread*. The
# course has one rule for "faster": **if two spreads overlap, there is no winner.** (With
# `quiet=0.05`, a round in which other programs used more than 5 % of the machine is taken again.)
#
# **Predict:** by their bytes alone, the messages of a step take 20.7 ms. Which step is faster, and
# by how much: by less than half of these 20.7 ms, or by more?

# %% tags=["predict", "measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
contestants = {"eight at the end": eight_at_the_end, "eight at once": eight_at_once}
times = in_turns(contestants, ROUNDS, quiet=0.05)
print_times(times)

at_the_end = spread(times["eight at the end"])
at_once = spread(times["eight at once"])
if at_once.high < at_the_end.low:
    saved = (at_the_end.median - at_once.median) / 8
    print(f"at once is faster, by {1000 * saved:.1f} ms a step")
else:
    print("at once is not faster")

# %% [markdown]
# <details><summary>What came out</summary>
#
# In our run *at once* was faster, by more than half of the 20.7 ms. (It can save even more than
# these, because the messages take longer than their bytes alone, as we'll see. And with other
# programs running, the spreads may overlap.) In a single step overlap can't hide more than the
# backward passes take, since before them no gradient is ready and after them there is nothing to
# compute.
#
# </details>
#
# To see where the time goes, we record one step of each kind:

# %% tags=["trains"]
recordings = {
    "at the end": record(step_at_the_end, net, trainer),
    "at once": record(step_at_once, net, trainer),
}

# %% tags=["fold", "measured"]
# draw: a step at the end, and a step at once
panels = {}
for name, recording in recordings.items():
    panels[name] = recording.rows
    del panels[name]["Python"]
most = max(recording.length for recording in recordings.values())
fig, _ = timeline("At once, gradients leave while the devices still compute", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels with rows for two devices and the link. Above, the link begins when both "
              "devices have computed all; below, it begins while both still compute.")

# %% [markdown]
# (*At the end* Python waits as well, and dispatches the messages only then. That takes some time,
# too: see the gap between the end of the computing and the first message.)
#
# ## Your turn: how much is exposed?
#
# Read a recording: `messages` has the start and end of each message, in whole ms, and
# `computing` those of each computation, on any device. How long does the link work while no device
# computes? Write it before you scroll on. (A message from 10 to 15 takes the five ms 10, 11, 12,
# 13, 14. A set of them may help, since two devices can compute at the same time.)

# %% tags=["your-turn"]
def exposed(messages, computing):
    """How many ms the link works while no device computes."""
    ...


partly = ([(10, 15)], [(0, 12)])  # messages, computing
at_the_end_of_it = ([(6, 8), (8, 12)], [(0, 6)])
two_devices = ([(2, 5), (7, 10)], [(0, 4), (3, 8)])
in_a_gap = ([(1, 8)], [(5, 9), (0, 2)])
cases = [(partly, 3), (at_the_end_of_it, 6), (two_devices, 2), (in_a_gap, 3)]  # ms that are due
your_turn(exposed, cases)

# %% [markdown]
# Ours does it with the microseconds of a recording:

# %% tags=["measured"]
def exposed_ms(recording):
    sending = set()
    computing = set()
    for event in recording.events:
        microseconds = range(round(1000 * event.start), round(1000 * event.end))
        if event.lane == "link":
            sending.update(microseconds)
        elif event.kind == "compute":
            computing.update(microseconds)
    return len(sending - computing) / 1000


for name, recording in recordings.items():
    messages = sum(event.duration for event in recording.lanes["link"])
    print(f"{name:10} {messages:.1f} ms of messages, {exposed_ms(recording):.1f} ms exposed, "
          f"in a step of {recording.length:.1f} ms")

# %% [markdown]
# Both steps send the same messages. *At the end* all the time of the messages is exposed, while *at
# once* hides most of it beside computing. So **ask not how long communication takes, but how much
# of it is exposed.** (These are single steps, which vary. The rounds above say what is saved.) It
# depends on how long the messages take and how long the backward pass takes. If the link were ten
# times as fast, there would be little to hide (exercise 2). If it were ten times as slow, the
# messages would take much longer than the backward pass, and most of them would stay exposed.
#
# (The messages take longer than the 20.7 ms of their bytes, probably because `sleep` returns late.)
#
# **On GPUs**, MXNet's engine has queues and threads for copies beside those for computing
# (`threaded_engine_perdevice.cc`, 1.9.1), so that both can run at the same time. PyTorch's DDP
# sends gradients during the backward pass, too, several in a message (chapter 14).
#
# ## Summary
#
# - A timeline shows when each device computes, communicates, updates or is idle. Without a wait,
#   Python's clock shows only how long Python took to dispatch.
# - `waitall` changes no weight.
# - A gradient can be sent when it is ready: the last layer's first.
# - Exposed communication, while no device computes, makes a step longer.
# - In a single step overlap can hide at most the shorter of two times: that of the backward passes,
#   from the start of the first to the end of the last, or that of the communication.
#
# **Further reading.** *Dive into Deep Learning*, "Asynchronous Computation", and "Concise
# Implementation for Multiple GPUs", exercise 3; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets.

# %% [markdown]
# ## Exercises
#
# 1. **In a bulk.** In `new_lenet`, leave `backward_bulk_size` out, so that MXNet's default holds.
#    Then set it to 3. How many events has the backward pass on `cpu(0)`, compared with 0? And when
#    can the first message leave, by default?
# 2. **A faster link.** Make the link ten times as fast. Predict for both steps how much is exposed,
#    then measure it.

# %% [markdown]
# ### Answer to *Your turn*

# %% tags=["solution", "your-turn"]
def exposed(messages, computing):
    """How many ms the link works while no device computes."""
    sending = set()
    for begin, end in messages:
        sending.update(range(begin, end))
    busy = set()
    for begin, end in computing:
        busy.update(range(begin, end))
    return len(sending - busy)


your_turn(exposed, cases)

# %% [markdown]
# ### Answer 1
#
# By default the whole pass is one event, so a device's messages leave when its pass has ended.
# (They can still overlap with the other device's pass.) With 3 there are several, and the first
# bulks hold the last layers. Without bulks each operator is an event; the one bulk that is
# left is the loss's, which isn't hybridised. (We don't count two `_zeros_without_dtype`, which only
# make zeros.)

# %% tags=["solution", "trains"]
def bulk_events(recording, lane):
    found = []
    for event in recording.lanes[lane]:
        if event.name == "ImperativeBulk" or event.name.startswith("_backward"):
            found.append(event)
    return found


sizes = {"the default": {}, "3": {"backward_bulk_size": 3}, "0": {"backward_bulk_size": 0}}
for name, options in sizes.items():
    bulk_net, bulk_trainer = new_lenet()
    bulk_net.hybridize(forward_bulk_size=0, **options)
    for _ in range(3):
        step_at_once(bulk_net, bulk_trainer)
    recording = record(step_at_once, bulk_net, bulk_trainer)
    print("backward_bulk_size", name, "events", len(bulk_events(recording, "cpu(0)")))
    if name == "the default":
        end_on_0 = bulk_events(recording, "cpu(0)")[-1].end
        end_on_1 = bulk_events(recording, "cpu(1)")[-1].end
        # 0.002 ms, since the profiler counts whole microseconds.
        assert recording.lanes["link"][0].start > min(end_on_0, end_on_1) - 0.002

# %% [markdown]
# ### Answer 2
#
# The bytes take a tenth of the time. *At the end* more than that is exposed, because the cost of
# each message stays. *At once* little is left.

# %% tags=["solution", "measured", "trains"]
BYTES_A_MS = 500_000
for step in [step_at_the_end, step_at_once]:
    recording = record(step, net, trainer)
    print(f"{step.__name__}: {exposed_ms(recording):.1f} of {recording.length:.1f} ms exposed")
BYTES_A_MS = 50_000
