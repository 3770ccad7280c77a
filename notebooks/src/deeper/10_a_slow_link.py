# %% [markdown]
# # Deeper · A slow link
#
# In chapter 10 overlap shortened a step over a slow link. What if there is no such link, and a copy
# is work for the cores? And over the slow link: which gradient should go first, and how many steps
# may be on their way at the same time?
#
# ## What you'll do
#
# Measure overlap where the cores themselves copy. Build a link that takes the most urgent message
# first, see the next step begin before the link is done with this one, and find out what that can
# save. Then bound how far Python runs ahead.
#
# ## What you'll learn
#
# - why overlap wins little where the cores themselves copy;
# - what it brings if the first layer's gradient goes first, and that the weights stay the same;
# - how many steps can be on their way, and how a program bounds them.
#
# ## What you need
#
# Chapters 08 and 10, and two cores. No GPU and no data. Reading takes {reading time}, running about
# a minute.

# %%
import queue
import threading
from functools import partial
from itertools import count
from time import sleep
from typing import NamedTuple

from helpers import split_and_load
from helpers.networks import lenet
from helpers.plotting import show, timeline
from helpers.timing import Others, in_turns, print_times, spread
from helpers.trace import record

import mxnet as mx
from mxnet import autograd, gluon, nd, profiler
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# A `Training` is a network, its Trainer and its shards. As in chapter 10, the backward pass is
# *joined* with a bulk size of 15, and *apart* with 0. The weights begin equal each time.

# %%
class Training(NamedTuple):
    net: gluon.Block
    trainer: gluon.Trainer
    x_shards: list
    y_shards: list
    n: int


def begin_training(net, n, bulk_size):
    mx.random.seed(0)
    x_shards = split_and_load(nd.random.uniform(shape=(n, 1, 28, 28)), pair)
    y_shards = split_and_load(nd.arange(n) % 10, pair)
    net.initialize(mx.init.Xavier(), ctx=pair)
    net(x_shards[0])  # the first call makes the weights
    net.hybridize(forward_bulk_size=0, backward_bulk_size=bulk_size)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    return Training(net, trainer, x_shards, y_shards, n)

# %% tags=["trains"]
def forward_and_backward(training):
    losses = []
    with autograd.record():
        for x_shard, y_shard in zip(training.x_shards, training.y_shards):
            losses.append(cross_entropy(training.net(x_shard), y_shard))
    autograd.backward(losses)
    return losses


def plain_step(training, wait):
    forward_and_backward(training)
    if wait:
        nd.waitall()  # no overlap
    training.trainer.step(training.n)

# %% [markdown]
# ## Copies that the cores make
#
# Does overlap win anything without a link? Our network is *wide*: it has 12 million weights in
# dense layers, and little work for each. So its all-reduce takes a good part of the step.

# %% tags=["trains"]
def wide():
    net = nn.HybridSequential()
    for _ in range(4):
        net.add(nn.Dense(2048, activation="relu"))
    net.add(nn.Dense(10))
    return net


wide_joined = begin_training(wide(), 32, bulk_size=15)
wide_apart = begin_training(wide(), 32, bulk_size=0)
for training in [wide_joined, wide_apart]:
    for _ in range(2):
        plain_step(training, wait=False)  # warms up

# %% [markdown]
# Apart, the engine finds the overlap by itself. With `waitall` before the all-reduce there is none.
# **Predict:** which of the two steps is shorter, and by how much?

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: the wide network's step, joined and apart, with waitall before the all-reduce and without
COUNT = 7
ROUNDS = 9


def median_recording(training, wait):
    """Of some recordings the one of median length."""
    recordings = [record(plain_step, training, wait) for _ in range(COUNT)]
    return sorted(recordings, key=lambda each: each.length)[COUNT // 2]


free = median_recording(wide_apart, wait=False)
held = median_recording(wide_apart, wait=True)
times = in_turns({
    "joined, waits": partial(plain_step, wide_joined, wait=True),
    "joined, ahead": partial(plain_step, wide_joined, wait=False),
    "apart, waits": partial(plain_step, wide_apart, wait=True),
    "apart, ahead": partial(plain_step, wide_apart, wait=False),
}, ROUNDS)
print_times(times)
for name, way, against in [("running ahead", "joined, ahead", "joined, waits"),
                           ("overlap", "apart, ahead", "joined, ahead")]:
    low, median, high = spread(times[way] / times[against])
    print(f"with {name:14} {median:.2f} times as long (middle half {low:.2f} to {high:.2f})")

# %% tags=["fold"]
# draw: the wide network's step apart, with overlap and without
panels = {"apart: communication among compute": free.rows,
          "apart, waitall: communication after compute": held.rows}
most = 1 + max(free.length, held.length)
fig, _ = timeline("The same work for the same cores, in another order", panels,
                  dict.fromkeys(panels, (-1, most)))
show(fig, alt="Two panels with rows for Python and two devices. Above, communication lies among "
              "compute; below, all of it comes after. The first device has long updates, while the "
              "second has little to do.")

# %% tags=["fold", "trains"]
# check: the wide network overlaps only if apart and without waitall; ResNet-18 does by default
def copies_before_end(recording):
    """For each lane: ms from the first copy's begin to the last backward operator's end."""
    found = []
    for events in recording.lanes.values():
        copies = [event.start for event in events if event.name == "CopyCPU2CPU"]
        ends = [event.end for event in events
                if event.name == "ImperativeBulk" or event.name.startswith("_backward")]
        found.append(ends[-1] - copies[0])
    return found


resnet = begin_training(gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=True), 32, 15)
plain_step(resnet, wait=False)
for recording, expected in [(free, True), (held, False),
                            (record(plain_step, wide_joined, False), False),
                            (record(plain_step, resnet, False), True)]:
    for milliseconds in copies_before_end(recording):
        assert (milliseconds > 2e-3) == expected, "whether a copy begins before the pass has ended"
assert sorted(event.name for event in free.events) == sorted(
    event.name for event in held.events), "the same work, only at other times"

# %% [markdown]
# The control is chapter 10's: *joined, ahead* has no overlap. Against it, overlap saved at most a
# tenth in our quiet runs, and often nothing. On a CPU device a copy is work for the very core that
# computes: whatever the order, the core has the same to do. (The long updates are the store's, all
# on `cpu(0)`. ResNet-18 overlaps by default, since its pass is several bulks.)
#
# **Keep:** overlap pays where something *beside* the cores carries the data.
#
# ## A link that takes the most urgent first
#
# So back to chapter 10's link, which does that. Which gradient should it carry first? There,
# messages go in the order of arrival, and the *last* layer's gradient is ready first. But the next
# step begins with the *first* layer, and needs that layer's new weights first.
#
# So each message gets a priority, its layer's place in the network. **The lowest number goes
# first.** Python's `PriorityQueue` does that. It compares tuples from the left: of two messages of
# equal priority, the one with the lower ticket number goes first.

# %%
waiting = queue.PriorityQueue()
waiting.put((7, 0, "dense"))  # priority, ticket, what it is
waiting.put((2, 1, "second layer"))
waiting.put((0, 2, "first layer, from cpu(0)"))
waiting.put((0, 3, "first layer, from cpu(1)"))
while not waiting.empty():
    print(waiting.get())

# %% [markdown]
# A link is such a queue and a thread that empties it. `carry` puts a message into the queue and
# waits until it has arrived. (Who holds the `road` closes the link. We need that at the end.)

# %%
track = profiler.Domain("link")  # a lane of its own in recordings


class Queued(NamedTuple):
    priority: int  # compared first
    ticket: int  # compared next; no two are equal
    nbytes: int
    arrived: threading.Event


class PriorityLink:
    def __init__(self, rate):
        self.rate = rate  # bytes a second
        self.waiting = queue.PriorityQueue()
        self.tickets = count()  # 0, 1, 2, ...
        self.road = threading.Lock()
        threading.Thread(target=self.work, daemon=True).start()

    def carry(self, nbytes, priority):
        message = Queued(priority, next(self.tickets), nbytes, threading.Event())
        self.waiting.put(message)
        message.arrived.wait()

    def work(self):
        while True:
            message = self.waiting.get()  # waits until there is one
            with self.road:
                task = profiler.Task(track, f"message {message.priority}")
                task.start()
                sleep(message.nbytes / self.rate)
                task.stop()
            message.arrived.set()

# %% [markdown]
# Four messages, sent by four threads. The first is long (0.3 s), and on its way when the others
# come. **Predict** the order of the others, whose priorities are 3, 1 and 2.

# %%
def send_four(link):
    threads = []
    for nbytes, priority in [(300_000, 9), (1_000, 3), (1_000, 1), (1_000, 2)]:
        thread = threading.Thread(target=link.carry, args=(nbytes, priority))
        thread.start()
        threads.append(thread)
        sleep(0.02)
    for thread in threads:
        thread.join()


sent = record(send_four, PriorityLink(rate=1e6)).lanes["link"]
for event in sent:
    print(event.name)

# %% tags=["fold"]
# check: the order of the four messages, and that the long one took its time
assert [event.name for event in sent] == ["message 9", "message 1", "message 2", "message 3"]
assert sent[0].duration >= 300, "300,000 bytes at 1 MB/s"

# %% [markdown]
# As in chapter 10, an operator sends a gradient: `send_first` calls `link.carry`, now with a
# priority, and returns its input unchanged. (It is folded here.)

# %% tags=["fold"]
# measure: the operator `send_first`, by MXNet's CustomOp, which gets its arguments as text
class SendFirst(mx.operator.CustomOp):
    def __init__(self, priority):
        super().__init__()
        self.priority = priority

    def forward(self, is_train, req, in_data, out_data, aux):
        link.carry(4 * in_data[0].size, self.priority)  # 4 bytes a number
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("send_first")
class SendFirstProp(mx.operator.CustomOpProp):
    def __init__(self, priority):
        super().__init__()
        self.priority = int(priority)

    def create_operator(self, context, shapes, dtypes):
        return SendFirst(self.priority)

# %% [markdown]
# `out=grad` writes what arrives over the gradient. So Trainer's sum of this parameter has to wait
# for its messages, and for no others. With `by_layer` the priority is the parameter's place in the
# network. Otherwise all have priority 0, and go in the order of arrival.

# %% tags=["trains"]
def step_by_priority(training, by_layer):
    losses = forward_and_backward(training)
    for place, parameter in enumerate(training.net.collect_params().values()):
        priority = 0
        if by_layer:
            priority = place
        for grad in parameter.list_grad():
            nd.Custom(grad, op_type="send_first", priority=priority, out=grad)  # NEW: priority
    training.trainer.step(training.n)
    return losses


far = begin_training(lenet(), 128, bulk_size=0)
plain_step(far, wait=False)  # warms up

# %% tags=["fold", "measured", "trains"]
# measure: a link whose messages take about as long as the two passes
lengths = []
for _ in range(5):
    lengths.append(record(forward_and_backward, far).length)
passes = sorted(lengths)[2]  # ms, the median

nbytes = 0
for parameter in far.net.collect_params().values():
    for grad in parameter.list_grad():
        nbytes += 4 * grad.size
link = PriorityLink(rate=nbytes / (passes / 1e3))
print(f"the passes take {passes:.1f} ms; the link gets a rate of {link.rate / 1e6:.0f} MB/s, "
      "so that the messages take as long")

# %% [markdown]
# Is every message sent, and are the weights right? Eight steps of each kind:

# %% tags=["fold", "trains"]
# check: whatever the order, the weights are those of Trainer to the bit, and all messages are sent
def arrays_of(net):
    arrays = []
    for parameter in net.collect_params().values():
        arrays += [replica.asnumpy() for replica in parameter.list_data()]
    return arrays


plain = begin_training(lenet(), 128, bulk_size=0)
for _ in range(8):
    plain_step(plain, wait=False)
P = len(plain.net.collect_params().keys())


def steps_by_priority(training, steps, by_layer):
    for _ in range(steps):
        step_by_priority(training, by_layer)


for by_layer in [False, True]:
    linked = begin_training(lenet(), 128, bulk_size=0)
    recording = record(steps_by_priority, linked, 8, by_layer)
    found = sorted(event.name for event in recording.lanes["link"])
    priorities = range(P) if by_layer else [0] * P
    assert found == sorted([f"message {each}" for each in priorities] * 8 * len(pair))
    for ours, whole in zip(arrays_of(linked.net), arrays_of(plain.net), strict=True):
        assert (ours == whole).all(), "a stale weight"
    print(f"by_layer={by_layer}: {len(found)} messages, the weights equal plain_step's to the bit")

# %% [markdown]
# ## First layer first
#
# What does the order change? Two steps, once in the *order of arrival* and once *first layer
# first*. **Predict:** in which of them can step 2 begin before the link is done with step 1?

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3"]
# measure: by how many ms step 2 begins before the link is done with step 1, and when the link idles
COUNT = 7
WAYS = {"order of arrival": False, "first layer first": True}  # by_layer


def second_begins(recording):
    """When the third convolution of a lane begins: there are two in a step's forward pass."""
    begins = []
    for lane in ["cpu(0)", "cpu(1)"]:
        convolutions = [event for event in recording.lanes[lane] if event.name == "Convolution"]
        begins.append(convolutions[2].start)
    return min(begins)


def ahead(recording):
    """How much earlier that is than the end of the first step's last message."""
    return recording.lanes["link"][len(pair) * P - 1].end - second_begins(recording)


def idle(recording):
    """How long the link carries nothing between its first message and its last."""
    messages = recording.lanes["link"]
    return messages[-1].end - messages[0].start - sum(each.duration for each in messages)


recorded = {name: [] for name in WAYS}
with Others() as others:
    for _ in range(COUNT):
        for name, by_layer in WAYS.items():
            recorded[name].append(record(steps_by_priority, far, 2, by_layer))
heads = {}
idles = {}
for name, recordings in recorded.items():
    heads[name] = spread([ahead(each) for each in recordings])
    idles[name] = spread([idle(each) for each in recordings])
    print(f"{name:17} step 2 begins {abs(heads[name].median):.1f} ms "
          f"{'before' if heads[name].median > 0 else 'after'} the end of step 1's last message; "
          f"the link idles {idles[name].median:.1f} ms")

# %% tags=["fold", "measured"]
# check: in the order of arrival step 2 begins when the link is done; first layer first, before
assert heads["order of arrival"].median <= 0, "the first layer's message is the last"
assert heads["first layer first"].median > 2, "step 2 begins early"
if others.share <= 0.05:
    assert idles["first layer first"].median < idles["order of arrival"].median
else:
    print("the machine was busy with other things: when the link idles isn't checked")

# %% tags=["fold"]
# draw: two steps in two orders, each the recording of median head start
chosen = {name: sorted(each, key=ahead)[COUNT // 2] for name, each in recorded.items()}
panels = {}
for name, recording in chosen.items():
    panels[name] = {lane: row for lane, row in recording.rows.items() if lane != "Python"}
most = max(recording.length for recording in chosen.values())
fig, axes = timeline("First layer first: step 2 (dotted line) begins while step 1 is being sent",
                     panels, dict.fromkeys(panels, (-0.5, most + 0.5)))
for ax, recording in zip(axes, chosen.values()):
    ax.axvline(second_begins(recording), color="black", ls=":")
show(fig, alt="Two panels with lanes for two devices and the link. Above, step 2 begins when the "
              "link has carried all of step 1. Below, it begins while the link still carries "
              "messages of step 1.")

# %% [markdown]
# In the order of arrival, the first layer's gradient is the last to go. With priorities it goes
# next, and the next forward pass begins while other messages still wait. No weight is stale, that
# is, from a step too early: each layer waits for its own update.
#
# Does it save time? The link has the same bytes to carry. What can be saved is the time in which it
# has *nothing* to carry: in the order of arrival, from the end of one step's messages until the
# next step has its first gradient. First layer first, a part of the next pass is done by then. We
# time eight steps:

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
ways = {
    "order of arrival": partial(steps_by_priority, far, 8, by_layer=False),
    "first layer first": partial(steps_by_priority, far, 8, by_layer=True),
}
times = in_turns(ways, ROUNDS, quiet=0.05)
print_times(times)
low, median, high = spread(times["first layer first"] / times["order of arrival"])
print(f"first layer first / order of arrival: {median:.2f} (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# Where the whole middle half is below 1, it saved time. In our runs it saved from nothing to a
# quarter. **Keep:** first layer first saves at most the time in which the link would have been
# idle.
#
# **On GPUs:** Trainer asks for something like it, with `priority=-i` for parameter *i*. (There, the
# *highest* number goes first.) But *i* counts in alphabetical order: ResNet-18's last layer,
# `dense0`, comes before `stage1` (`gluon/trainer.py` at 1.9.1). Copies to and from a GPU obey
# priorities; ordinary work is done first come, first served (`kCopyQueue` and `kWorkerQueue` in
# `src/engine/threaded_engine_perdevice.cc`).
#
# ## Steps on their way
#
# An exercise of *Dive into Deep Learning* asks: how could up to two steps overlap? Two just did,
# since Python ran ahead. But the engine would let any number of steps pile up, and each step's
# batch must stay in memory until it is read. What you have to program is a bound: wait for the loss
# of an older step. `lag` says how many steps older.

# %% tags=["trains"]
def train_with_lag(step, steps, lag):
    history = []  # each step's losses, one a device
    for number in range(steps):
        history.append(step())
        old = number - lag  # lag 0: this step; lag 1: the one before
        if old >= 0:
            for loss in history[old]:
                loss.wait_to_read()

# %% [markdown]
# **Predict:** the link is closed, so no all-reduce ends. How many steps does Python hand out with a
# lag of 0, 1 and 2?

# %% tags=["fold", "trains"]
# check: how many steps Python hands out while the link is closed
def handed_out(expected, lag):
    """`expected`, if Python hands out that many steps and stops there; otherwise another number."""
    begun = threading.Semaphore(0)

    def step():
        begun.release()
        losses = step_by_priority(far, by_layer=False)
        if lag is None:
            nd.waitall()
        return losses

    thread = threading.Thread(target=train_with_lag, args=(step, 6, lag or 0))
    with link.road:  # it is closed
        thread.start()
        steps = 0
        while steps < expected and begun.acquire(timeout=60):
            steps += 1
        if begun.acquire(timeout=0.5):
            steps += 1
    thread.join()
    nd.waitall()
    return steps


for lag, expected in [(None, 1), (0, 2), (1, 3), (2, 4)]:
    steps = handed_out(expected, lag)
    print("waitall:" if lag is None else f"lag {lag}:  ", steps)
    assert steps == expected

# %% [markdown]
# Step 1's loss is ready although the link is closed. Step 2's isn't: it needs the weights after
# step 1's all-reduce. With lag 0 Python waits for step 1's loss, hands out step 2, and stops at its
# loss. So two steps can overlap with a lag of 0 already. Each further lag allows one more step;
# `waitall` after each step allows one.
#
# ## Summary
#
# - Where the cores themselves copy, overlap saved little: a tenth at most.
# - A slow link beside the cores should carry the first layer's gradients first. Then the next step
#   begins while the link still carries the others, and no weight is stale. It saves at most the
#   time in which the link would have been idle.
# - The engine bounds nothing. Waiting for the loss of `lag` steps before allows `lag` + 2 steps on
#   their way.
#
# **Further reading.** A. Jayarajan et al., *Priority-based Parameter Propagation for Distributed
# DNN Training* (2019), arXiv:1905.03960; *Dive into Deep Learning*, "Concise Implementation for
# Multiple GPUs", exercise 3.
