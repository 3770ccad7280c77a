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
# > **What you'll do:** record training steps and draw their timelines. Find out what `waitall`
# > does to a step. Let gradients leave during the backward pass, and measure what that saves.
# >
# > **What you'll learn:** how to read a timeline; whether a step needs a wait; when communication
# > can overlap with computing, what *exposed communication* is, and how to measure what overlap
# > saves.
# >
# > **What you need:** chapters 01, 06, 07 and 08, and two cores. No GPU and no data: random images
# > will do. Reading takes {reading time}, running less than a minute.

# %%
import threading
from time import perf_counter, sleep

from helpers import split_and_load, your_turn
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
    # Each operator is an event of its own; none are joined (see the box on buckets).
    net.hybridize(forward_bulk_size=0, backward_bulk_size=0)
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
# What are these short ones? We take one parameter, the weight of the first dense layer, with a
# trainer of its own, and record its `step`:

# %% tags=["measured", "trains"]
dense_trainer = gluon.Trainer([net[4].weight], "sgd", {"learning_rate": 0.01})
forward_backward(net)
dense_trainer.step(256)  # the store gets its key
forward_backward(net)  # a trainer wants new gradients for each step

one_parameter = record(dense_trainer.step, 256)
for event in one_parameter.events:
    print(f"{event.lane}  {event.start:5.2f} to {event.end:5.2f} ms  {event.name}")

# %% [markdown]
# Two copies bring both devices' gradients into the store. One sum adds them up, and one update
# makes the new weight. Three copies bring it back: one to a device, and from there one to each
# replica (`CommDevice::Broadcast` in `comm.h`, 1.9.1). So one parameter takes five copies.
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
    """All parameters of a new LeNet, from both devices, after eight steps."""
    net, trainer = new_lenet()
    for _ in range(8):
        step(net, trainer)
    weights = []
    for parameter in net.collect_params().values():
        for replica in parameter.list_data():
            weights.append(replica.asnumpy())
    return weights


def all_equal(weights, others):
    for weight, other in zip(weights, others, strict=True):
        if not (weight == other).all():
            return False
    return True


without = weights_after_eight(train_once)
waited = weights_after_eight(train_and_wait)
print("equal to the bit:", all_equal(without, waited))

# %% [markdown]
# <details><summary>What came out</summary>
#
# They do. The engine knows which arrays each operator reads and writes, and starts it when these
# are ready. So the weights need no `waitall`. It is for clocks, for errors (chapter 01), and to
# keep Python from running so far ahead that waiting batches fill the memory.
#
# </details>
#
# What does waiting change, then? To see it in a timeline, we also note when Python dispatches each
# step. A `profiler.Domain` is a row of the timeline, and a `profiler.Task` is an event in it:

# %% tags=["trains"]
python_row = profiler.Domain("Python")


def dispatch_a_step():
    event = profiler.Task(python_row, "step")
    event.start()
    train_once(net, trainer)
    event.stop()


def three_without_waiting():
    for _ in range(3):
        dispatch_a_step()


def three_with_waitall():
    for _ in range(3):
        dispatch_a_step()
        nd.waitall()


waiting = record(three_with_waitall)
free = record(three_without_waiting)

# %% tags=["fold", "measured"]
# draw: three steps with waitall after each, and without
most = max(waiting.length, free.length)
panels = {"waitall after each step": waiting.rows, "no waitall": free.rows}
fig, _ = timeline("With waitall, Python dispatches a step when the one before is done", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels. Above, Python dispatches a step, waits until the devices have done it, "
              "and dispatches the next. Below, it dispatches all three at the beginning.")

# %% [markdown]
# With `waitall` Python dispatches the second step only when the first one is done. Until the second
# step's first operators arrive, both devices are idle. Without `waitall` these operators are in the
# queue already. How long do both devices wait? (The gaps in which only *one* device is idle have
# other causes. In some of them it waits for the other's gradients.)

# %% tags=["fold", "measured"]
# measure: for how long both devices are idle before the second step, with waitall
second_step = waiting.lanes["Python"][1]
on_devices = [event for event in waiting.events if event.lane != "Python"]
work_ends = max(event.end for event in on_devices if event.start < second_step.start)
work_begins = min(event.start for event in on_devices if event.start > second_step.start)
print(f"both devices are idle for {work_begins - work_ends:.1f} ms")

# %% [markdown]
# Compared with a whole step this is so short that the picture hardly shows it. (There is a middle
# way: waiting after each step for the loss of the step *before* it bounds how far Python runs
# ahead, and steps can still overlap.)
#
# ## When can communication begin?
#
# Must the all-reduce wait for the end of the backward pass? The *last* layer's gradient is ready
# first, so it could be sent while the pass goes on with the layers before it. In MXNet the engine
# can do that by itself: in our network each gradient comes from an operator of its own, and a copy
# of a gradient needs nothing but this gradient.
#
# ![At the end: the link carries three gradients after the backward pass, and all of that time is
# exposed. At once: it starts with layer 3's as soon as that is ready, and only layer 1's is
# exposed.](src/drawings/overlap.svg)
#
# Communication that runs beside computing is **overlapped**. Communication while no device computes
# is **exposed communication**, which makes the step longer.
#
# Which gradients should be sent together, then?
#
# > **Buckets.** Each message has a cost of its own, whatever is in it (chapter 01). So libraries
# > put several gradients into a **bucket**, which leaves as a whole, with its last gradient.
# > PyTorch's DDP does so (chapter 14). The larger the buckets, the fewer messages, but the later
# > the first one leaves.
# >
# > MXNet has an example of what a bucket costs. To have fewer operators to schedule, its
# > engine joins up to 15 of a backward pass into one, a *bulk*
# > (`MXNET_EXEC_BULK_EXEC_MAX_NODE_TRAIN` in `env_var.md`, 1.9.1). All gradients of a bulk become
# > ready when it ends. By default LeNet's whole backward pass is one bulk (exercise 2), so a device
# > could send no gradient before its pass has ended. That is why `new_lenet` has
# > `backward_bulk_size=0`.
#
# ## A link beside the cores
#
# Between our simulated devices there is little to win: the copies are short, and the cores that
# copy are those that compute. Between machines, a network carries data *beside* the cores. So we
# imitate a slow link of 50 MB/s, over which all gradients go before Trainer adds them up. How
# long will it take for each? In the order of the backward pass:

# %%
BYTES_A_MS = 50_000
ms_for_bytes = 0  # of a step: both devices' gradients
for layer in [net[5], net[4], net[2], net[0]]:
    for parameter in [layer.weight, layer.bias]:
        for gradient in parameter.list_grad():
            ms = 4 * gradient.size / BYTES_A_MS  # 4 bytes a number
            ms_for_bytes += ms
        print(f"{type(layer).__name__:6} {str(parameter.shape):16} {ms:6.3f} ms on each device")
print(f"for all of them, from both devices: {ms_for_bytes:.1f} ms")

# %% [markdown]
# The dense layer's weight has most of the bytes, and it is ready early. When may its message leave?
# When three things are true:
#
# 1. its gradient is ready;
# 2. the array `after`, which it is told to wait for, is ready;
# 3. the link is free.
#
# If sending is an *operator* with two inputs, `gradient` and `after`, MXNet's engine sees to points
# 1 and 2: it starts an operator when its inputs are ready, and Python doesn't wait. For point 3 we
# take a *lock*, which one thread at a time can hold. MXNet runs an operator that is written in
# Python, a `CustomOp`, in a thread beside the devices' (`custom-inl.h`, 1.9.1). So while a message
# sleeps, the devices can go on computing:

# %%
link_is_free = threading.Lock()
link = profiler.Domain("link")  # messages become a row of the timeline


class Send(mx.operator.CustomOp):
    def forward(self, is_train, req, in_data, out_data, aux):
        gradient, after = in_data  # both are ready
        seconds = 4 * gradient.size / BYTES_A_MS / 1000
        with link_is_free:  # waits for the lock, and gives it back at the end
            message = profiler.Task(link, "message")
            message.start()
            sleep(seconds)
            message.stop()
        # It arrives as it was. req[0] says how to write: here, over what is there.
        self.assign(out_data[0], req[0], gradient)

# %% [markdown]
# The folded cell gives it the name `send`, two inputs, and an output as large as the gradient.

# %% tags=["fold"]
# define: what MXNet must know of the operator "send": its inputs, the shape of what it writes
@mx.operator.register("send")
class SendProp(mx.operator.CustomOpProp):
    def list_arguments(self):
        return ["gradient", "after"]

    def infer_shape(self, in_shape):
        return in_shape, [in_shape[0]], []

    def create_operator(self, context, shapes, dtypes):
        return Send()

# %% [markdown]
# What arrives is written over the gradient (`out`). So whoever reads the gradient afterwards, such
# as Trainer, waits for the message. Here we send 500,000 bytes, which should take 10 ms:

# %% tags=["measured"]
def send(gradient, after):
    nd.Custom(gradient, after, op_type="send", out=gradient)


def send_one():
    gradient = nd.ones(125_000, ctx=pair[0])
    send(gradient, after=gradient)  # nothing more to wait for


for event in record(send_one).lanes["link"]:
    print(f"{event.lane}  {event.start:5.2f} to {event.end:5.2f} ms  {event.name}")

# %% [markdown]
# ## At the end, or at once?
#
# Here is a step that sends each gradient **at once**, when it is ready:

# %%
def step_at_once(net, trainer):
    forward_backward(net)
    for parameter in net.collect_params().values():
        for gradient in parameter.list_grad():
            send(gradient, after=gradient)
    trainer.step(256)

# %% [markdown]
# Is that faster? We need a **control** that doesn't overlap, and otherwise differs as little as
# possible: the same messages, **at the end** of the backward passes. So `after` must be an array
# that is ready only when both devices have computed all gradients. The first layer's gradients come
# last, so the sum of both devices' is such an array. (A `waitall` instead would make Python wait,
# too, and then the steps would differ in two things.)

# %%
def step_at_the_end(net, trainer):
    forward_backward(net)
    grad_0, grad_1 = net[0].bias.list_grad()  # the first layer's, on both devices
    total = grad_0 + grad_1.copyto(pair[0])
    # What each device's messages wait for.
    all_ready = {pair[0]: total, pair[1]: total.copyto(pair[1])}
    for parameter in net.collect_params().values():
        for gradient in parameter.list_grad():
            send(gradient, after=all_ready[gradient.context])  # NEW
    trainer.step(256)

# %% [markdown]
# The link must not change what is learnt. Are the weights those of the steps without a link?

# %% tags=["trains"]
for step in [step_at_once, step_at_the_end]:
    print(step.__name__, "equal to the bit:", all_equal(weights_after_eight(step), without))

# %% tags=["fold", "trains"]
# check: Python doesn't wait in them: no image arrives, and two steps are dispatched all the same
for step in [step_at_once, step_at_the_end]:
    link_is_free.acquire()  # so nothing arrives
    timer = threading.Timer(30, link_is_free.release)  # ends a step that waits
    timer.start()
    for x_shard in x_shards:
        send(x_shard, after=x_shard)  # from now on the images aren't ready
    step(net, trainer)
    step(net, trainer)  # needs what the first one learns
    assert timer.is_alive(), f"{step.__name__}: Python waited"
    timer.cancel()
    link_is_free.release()  # all is sent and computed now
    nd.waitall()

# %% [markdown]
# We record one step of each kind. From the control we also note when the first backward pass begins
# and when the last one ends, for a comparison below:

# %% tags=["trains"]
at_once = record(step_at_once, net, trainer)
at_the_end = record(step_at_the_end, net, trainer)

backward = [event for event in at_the_end.events if event.name.startswith("_backward")]
passes_begin = min(event.start for event in backward)
passes_end = max(event.end for event in backward)

# %% tags=["fold"]
# check: messages leave and arrive when they should
tick = 0.002  # ms; the profiler counts whole microseconds
for recording in [at_once, at_the_end]:
    messages = recording.lanes["link"]
    assert len(messages) == 16
    for message, following in zip(messages, messages[1:]):
        assert following.start > message.end - tick, "two messages at the same time"

    # Before the first update two messages have arrived, before the second four, and so on.
    updates = [event for event in recording.events if event.kind == "update"]
    assert len(updates) == 8
    for number, update in enumerate(updates, start=1):
        arrived = [message for message in messages if message.end < update.start + tick]
        assert len(arrived) >= 2 * number, "an update came before its messages"
assert at_the_end.lanes["link"][0].start > passes_end - tick, "a message left early"

# %% [markdown]
# Now eight steps of each kind take turns, for several rounds. We wait after each step of either
# kind, because otherwise the control's last messages could overlap with the next step's forward
# pass. Each line shows the median of the rounds, and in brackets their middle half, the *spread*.
# The course has one rule for "faster": **if two spreads overlap, there is no winner.**

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
# (With `quiet=0.05`, a round in which other programs used more than 5 % of the machine is taken
# again.) **Predict:** which step is faster? And how much can it win, at most?

# %% tags=["predict", "measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
contestants = {"at the end": eight_at_the_end, "at once": eight_at_once}
of_eight = in_turns(contestants, ROUNDS, quiet=0.05)
of_one = {}
for name, seconds in of_eight.items():
    of_one[name] = seconds / 8
print_times(of_one)

control = spread(of_one["at the end"])
overlapping = spread(of_one["at once"])
if overlapping.high < control.low:
    print(f"at once is faster, by {1000 * (control.median - overlapping.median):.1f} ms")
else:
    print("at once is not faster")
print(f"for comparison: the backward passes take {passes_end - passes_begin:.1f} ms")

# %% [markdown]
# <details><summary>What came out</summary>
#
# *At once* is faster. In a single step it can't win more than the backward passes take, since
# before them no gradient is ready and after them there is nothing to compute. And it can't win more
# than the messages take, of course. How long they really take is printed below the picture.
#
# </details>
#
# Here are the two steps that we recorded:

# %% tags=["fold", "measured"]
# draw: a step at the end, and a step at once
most = max(at_the_end.length, at_once.length)
panels = {"at the end": at_the_end.rows, "at once": at_once.rows}
fig, _ = timeline("At once, gradients leave while the devices still compute", panels,
                  dict.fromkeys(panels, (-1, most + 1)))
show(fig, alt="Two panels with rows for Python, two devices and the link. Above, the link begins "
              "when both devices have computed all; below, it begins while both still compute.")

# %% [markdown]
# *At the end*, the parts follow one another, so we can add them up. Does the link take as long as
# its bytes alone would?

# %% tags=["measured"]
messages = at_the_end.lanes["link"]
first_leaves = messages[0].start
last_arrives = messages[-1].end
sending = sum(message.duration for message in messages)
print(f"{first_leaves:5.1f} ms until the first message leaves")
print(f"{sending:5.1f} ms for {len(messages)} messages, "
      f"whose bytes alone would take {ms_for_bytes:.1f} ms")
print(f"{last_arrives - first_leaves - sending:5.1f} ms between messages")
print(f"{at_the_end.length - last_arrives:5.1f} ms for the last updates")

# %% [markdown]
# It takes longer, and some time passes between messages. We haven't tested why. Our link is a toy
# whose threads sleep and wake up for each message, so this isn't a real link's latency
# (chapter 03). *At once* sends as many messages, so it pays this cost, too.
#
# ## Your turn: how much is exposed?
#
# Read a recording: `messages` has the begin and the end of each message, in whole ms, and
# `computing` those of each computation, on any device. How long does the link work while no device
# computes? Write it before you scroll on. (A message from 10 to 15 takes the five ms 10, 11, 12,
# 13, 14. A set of them may help, since two devices can compute at the same time.)

# %% tags=["your-turn"]
def exposed(messages, computing):
    """How many ms the link works while no device computes."""
    ...


partly = (([(10, 15)], [(0, 12)]), 3)
at_the_end_of_it = (([(6, 8), (8, 12)], [(0, 6)]), 6)
two_devices = (([(2, 5), (7, 10)], [(0, 4), (3, 8)]), 2)
in_a_gap = (([(1, 8)], [(0, 2), (5, 9)]), 3)
beside_a_longer = (([(0, 12)], [(0, 10), (2, 3), (4, 6)]), 2)
not_sorted = (([(0, 12)], [(4, 6), (0, 10)]), 2)
cases = [partly, at_the_end_of_it, two_devices, in_a_gap, beside_a_longer, not_sorted]
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


for name, recording in [("at the end", at_the_end), ("at once", at_once)]:
    print(f"{name:10} {exposed_ms(recording):5.1f} ms exposed, in a step of "
          f"{recording.length:.1f} ms")
assert abs(exposed_ms(at_the_end) - sending) < 0.1  # ms: all messages are exposed

# %% [markdown]
# Both steps send the same messages. *At the end* all the time of the messages is exposed, while *at
# once* hides most of it beside computing. (The time won may be shorter than the time hidden:
# while one device computes, the other one may have to wait for a message.) So **ask not how long
# communication takes, but how much of it is exposed.** That depends on how long the messages take
# and how long the backward pass takes. If the link were ten times as fast, there would be little to
# hide (exercise 3). If it were ten times as slow, the messages would take much longer than the
# backward pass, and most of them would stay exposed.
#
# Overlap can also go on beyond a step. The next forward pass needs the first layer's weights first,
# so **priority scheduling** sends these gradients before others that wait (P3: Jayarajan et al.,
# 2019, arXiv:1905.03960, in MXNet's `p3store_dist.h`; ByteScheduler: Peng et al., 2019).
#
# **On GPUs**, MXNet's engine has queues and threads for copies beside those for computing
# (`threaded_engine_perdevice.cc`, 1.9.1), so that both can run at the same time. In PyTorch, DDP
# sends a bucket when all its gradients are ready and the buckets before it have been sent (chapter
# 14). Overlap isn't free there: NCCL runs a collective as a kernel (*Overview of NCCL*), and that
# takes resources from kernels that compute.
#
# ## Summary
#
# - A timeline shows when each device computes, communicates, updates or is idle. Python's clock
#   shows how long Python took to dispatch.
# - `waitall` changes no weight. After it, the devices are idle until Python dispatches the next
#   step.
# - A gradient can be sent when it is ready: the last layer's first. A bucket leaves with its last
#   gradient.
# - Exposed communication, while no device computes, makes a step longer.
# - In a single step overlap can save at most the shorter of two times: that of the backward passes,
#   from the first one's begin to the last one's end, or that of the communication.
# - A control should differ from the experiment only in what is being tested. Here that is when the
#   messages leave.
#
# **Further reading.** *Dive into Deep Learning*, "Asynchronous Computation", and "Concise
# Implementation for Multiple GPUs", exercise 3; S. Li et al., *PyTorch Distributed* (2020),
# arXiv:2006.15704, for overlap by buckets.

# %% [markdown]
# ## Exercises
#
# 1. **Three devices.** How many copies and sums has a step on $k$ devices with $P$ parameters?
#    Write the formula down, then count on three, by name.
# 2. **In a bulk.** In `new_lenet`, leave `backward_bulk_size` out, so that MXNet's default holds.
#    Then set it to 3. How many events has the backward pass on `cpu(0)`, compared with 0? And when
#    can the first message leave, by default?
# 3. **A faster link.** Make the link ten times as fast. Predict for both steps how much is exposed,
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


for name, options in [("the default", {}), ("3", {"backward_bulk_size": 3}),
                      ("0", {"backward_bulk_size": 0})]:
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
# ### Answer 3
#
# The bytes take a tenth of the time. *At the end* more than that is exposed, because the cost of
# each message stays. *At once* little is left.

# %% tags=["solution", "measured", "trains"]
BYTES_A_MS = 500_000
for step in [step_at_the_end, step_at_once]:
    recording = record(step, net, trainer)
    print(f"{step.__name__}: {exposed_ms(recording):.1f} of {recording.length:.1f} ms exposed")
BYTES_A_MS = 50_000
