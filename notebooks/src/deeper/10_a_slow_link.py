# %% [markdown]
# # Deeper · A slow link
#
# In chapter 10 overlap shortened a step over a slow link. What if there is no link, and the cores
# do the copying? Where there is one, which gradient should go first? And how many steps may be on
# their way at the same time?
#
# > **What you'll do:** measure overlap where the cores themselves copy. Build a link that takes the
# > most urgent message first, and find out when the next step begins and what that can save. Then
# > bound how far Python runs ahead.
# >
# > **What you'll learn:** how little overlap won where the cores themselves copied; what it brings
# > if the first layer's gradient goes first, and that the weights stay the same; how many steps can
# > be on their way, and how a program bounds them.
# >
# > **What you need:** chapters 08 and 10, and two cores. No GPU and no data. Reading takes
# > {reading time}, running about a minute.

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
# *joined* into one event with a bulk size of 15, and *apart*, an event for each operator, with 0.
# The weights begin equal each time.

# %%
class Training(NamedTuple):
    net: gluon.Block
    trainer: gluon.Trainer
    x_shards: list
    y_shards: list
    n: int  # images in a batch


def begin_training(net, n, bulk_size):
    mx.random.seed(0)
    x_shards = split_and_load(nd.random.uniform(shape=(n, 1, 28, 28)), pair)
    y_shards = split_and_load(nd.arange(n) % 10, pair)
    net.initialize(mx.init.Xavier(), ctx=pair)
    net(x_shards[0])  # the first call makes the weights of all devices in ctx
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
# Does overlap win anything without a link? Our network is *wide*: dense layers with many weights,
# and little work for each. So its all-reduce takes a good part of the step.

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

weights = 0
for parameter in wide_apart.net.collect_params().values():
    weights += parameter.data(pair[0]).size
print(f"{weights:,} weights")

# %% [markdown]
# We time two ways in turns, and divide round by round. When do we say that one is shorter? If the
# whole middle half of the ratios lies below 1:

# %%
def verdict(ratios):
    low, median, high = spread(ratios)
    if high < 1:
        word = "below 1"
    elif low > 1:
        word = "above 1"
    else:
        word = "this run doesn't decide"
    return f"{median:.2f} (middle half {low:.2f} to {high:.2f}): {word}"


print(verdict([0.90, 0.94, 0.96]))
print(verdict([0.90, 0.94, 1.30]))

# %% [markdown]
# Apart, the engine finds the overlap by itself. Joined is chapter 10's control: no gradient can
# leave before its device's pass has ended. **Predict:** is the step apart shorter, and by how much?

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: the wide network's step, joined and apart; how busy the devices are
COUNT = 7
ROUNDS = 9


def three_plain_steps(training):  # a longer turn is easier to time
    for _ in range(3):
        plain_step(training, wait=False)


def busy(recording, lane):
    """The share of the time in which a lane does something."""
    return sum(event.duration for event in recording.lanes[lane]) / recording.length


def median_of(recordings):
    """The one of median length."""
    return sorted(recordings, key=lambda each: each.length)[len(recordings) // 2]


times = in_turns({"joined": partial(three_plain_steps, wide_joined),
                  "apart": partial(three_plain_steps, wide_apart)}, ROUNDS, quiet=0.05)
print("three steps:")
print_times(times)
print("apart / joined, round by round:", verdict(times["apart"] / times["joined"]))

ways = {"joined": wide_joined, "apart": wide_apart}
recordings = {name: [] for name in ways}
for _ in range(COUNT):
    for name, training in ways.items():
        recordings[name].append(record(plain_step, training, False))
for name, several in recordings.items():
    for lane in ["cpu(0)", "cpu(1)"]:
        share = spread([busy(each, lane) for each in several]).median
        print(f"{name}: {lane} is busy for {share:.0%} of the step")
joined = median_of(recordings["joined"])
apart = median_of(recordings["apart"])

# %% tags=["fold"]
# draw: a step of the wide network, joined and apart
panels = {"joined: communication after compute": joined.rows,
          "apart: communication among compute": apart.rows}
most = 1 + max(joined.length, apart.length)
fig, _ = timeline("Joined, copies come after compute; apart, they lie among it", panels,
                  dict.fromkeys(panels, (-1, most)))
show(fig, alt="Two panels with rows for Python and two devices. Above, communication comes after "
              "compute; below, it lies among it. The first device has long updates, while the "
              "second has little to do.")

# %% tags=["fold", "trains"]
# check: a copy begins before its device's pass has ended if apart, not if joined or after waitall
def copies_before_end(recording):
    """For each lane: ms from the first copy's begin to the last backward operator's end."""
    found = []
    for events in recording.lanes.values():
        copies = [event.start for event in events if event.name == "CopyCPU2CPU"]
        ends = [event.end for event in events
                if event.name == "ImperativeBulk" or event.name.startswith("_backward")]
        found.append(ends[-1] - copies[0])
    return found


def work_of(recording):
    """Names of events but the backward pass's: it is one event or several."""
    return sorted(event.name for event in recording.events
                  if event.name != "ImperativeBulk" and not event.name.startswith("_backward"))


# ResNet-18's backward pass is several bulks: it overlaps by default.
resnet = begin_training(gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=True), 32, 15)
plain_step(resnet, wait=False)
held = record(plain_step, wide_apart, True)
for recording, expected in [(apart, True), (joined, False), (held, False),
                            (record(plain_step, resnet, False), True)]:
    for milliseconds in copies_before_end(recording):
        assert (milliseconds > 2e-3) == expected, "whether a copy begins before the pass has ended"
assert work_of(apart) == work_of(joined) == work_of(held), "the same work, only at other times"
for recording in [joined, apart]:
    updates = {event.lane for event in recording.events if event.kind == "update"}
    assert updates == {"cpu(0)"}, "the store updates on cpu(0)"

# %% [markdown]
# (The figure shows one recorded step of each kind, the one of median length; the verdict is on
# many.) In our quiet runs the median of the ratios saved a tenth at most, and
# often the run didn't decide. A guess at the cause: `cpu(0)` has the most to do, since Trainer's
# store makes the long updates there alone. It is busy for most of the step either way, and another
# order leaves it as much to do. (We haven't tried the updates on both devices.)
#
# **Keep:** where one lane has most of the work, another order may save little.
#
# ## A link that takes the most urgent first
#
# Back to chapter 10's link, which works *beside* the cores. What should it carry first? There,
# messages go in the order of arrival, and the *last* layer's gradient is ready first. But the next
# step begins with the *first* layer, and needs that layer's new weights first.
#
# So each message gets a priority: its parameter's place in the network, 0 for the first. **The
# lowest number goes first.** Python's `PriorityQueue` does that. It compares tuples from the left:
# of two messages of equal priority, the one with the lower ticket number goes first.

# %%
waiting = queue.PriorityQueue()
waiting.put((7, 0, "last parameter"))  # priority, ticket, what it is
waiting.put((2, 1, "third parameter"))
waiting.put((0, 2, "first parameter, from cpu(0)"))
waiting.put((0, 3, "first parameter, from cpu(1)"))
while not waiting.empty():
    print(waiting.get())

# %% [markdown]
# A link is such a queue and a thread that empties it. `carry` puts a message into the queue and
# waits until it has arrived. To transmit it, as in chapter 10, is to sleep for as long as a real
# link would take; the profiler notes when.

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
        threading.Thread(target=self.work, daemon=True).start()

    def carry(self, nbytes, priority):
        message = Queued(priority, next(self.tickets), nbytes, threading.Event())
        self.waiting.put(message)
        message.arrived.wait()

    def work(self):
        while True:
            message = self.waiting.get()  # waits until there is one
            self.transmit(message)
            message.arrived.set()  # ends the wait in carry

    def transmit(self, message):
        task = profiler.Task(track, f"message {message.priority}")
        task.start()
        sleep(message.nbytes / self.rate)
        task.stop()

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
        sleep(0.02)  # so that they come in this order
    for thread in threads:
        thread.join()


recording = record(send_four, PriorityLink(rate=1e6))
sent = recording.lanes["link"]  # its events
for event in sent:
    print(event.name)

# %% tags=["fold"]
# check: the order of the four messages, and that the long one took its time
assert [event.name for event in sent] == ["message 9", "message 1", "message 2", "message 3"]
assert sent[0].duration >= 300, "300,000 bytes at 1 MB/s"

# %% [markdown]
# What is on its way isn't interrupted. Of those that wait, the most urgent goes next.
#
# Now a step over this link. As in chapter 10 we take LeNet and 128 images, and a link whose
# messages take about as long as forward and backward pass. The operator `send_first`, defined in a
# folded cell, calls `link.carry` with a priority, and returns its input unchanged.

# %% tags=["trains"]
lenet_training = begin_training(lenet(), 128, bulk_size=0)
plain_step(lenet_training, wait=False)  # warms up

# %% tags=["fold", "measured", "trains"]
# measure: the time of the passes, and from it the link's rate
lengths = []
for _ in range(5):
    lengths.append(record(forward_and_backward, lenet_training).length)
passes = sorted(lengths)[2]  # ms, the median

nbytes = 0
for parameter in lenet_training.net.collect_params().values():
    for grad in parameter.list_grad():
        nbytes += 4 * grad.size
link = PriorityLink(rate=nbytes / (passes / 1e3))
print(f"the passes alone take {passes:.1f} ms; the link gets a rate of {link.rate / 1e6:.0f} MB/s, "
      "so that the messages take as long")

# %% tags=["fold"]
# define: the operator `send_first`
class SendFirst(mx.operator.CustomOp):
    def __init__(self, priority):
        super().__init__()
        self.priority = priority

    def forward(self, is_train, req, in_data, out_data, aux):
        link.carry(4 * in_data[0].size, self.priority)  # 4 bytes a number
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("send_first")
class SendFirstProp(mx.operator.CustomOpProp):
    def __init__(self, priority):  # MXNet hands it on as text
        super().__init__()
        self.priority = int(priority)

    def create_operator(self, context, shapes, dtypes):
        return SendFirst(self.priority)

# %% [markdown]
# Python hands the messages out from the first layer to the last, in either case. But a message gets
# to the link only when its gradient is ready, and the last layer's is ready first. With `by_layer`
# the priority is the parameter's place in the network. Otherwise all have priority 0, and go in the
# order of arrival. `out=grad` writes what arrives over the gradient, so Trainer's sum of this
# parameter has to wait for its messages, and for no others.

# %% tags=["trains"]
def step_by_priority(training, by_layer):
    losses = forward_and_backward(training)
    for place, parameter in enumerate(training.net.collect_params().values()):
        priority = 0
        if by_layer:
            priority = place
        for grad in parameter.list_grad():
            # calls link.carry(bytes of grad, priority)
            nd.Custom(grad, op_type="send_first", priority=priority, out=grad)
    training.trainer.step(training.n)
    return losses


def several_by_priority(training, steps, by_layer):
    for _ in range(steps):
        step_by_priority(training, by_layer)

# %% [markdown]
# Is every message sent, and are the weights right? In eight steps, each of LeNet's 8 parameters
# has a gradient on 2 devices: 8 · 8 · 2 = 128 messages.

# %% tags=["fold", "trains"]
# check: all messages are sent, each with its priority; in any order, none changes a weight
def arrays_of(net):
    arrays = []
    for parameter in net.collect_params().values():
        arrays += [replica.asnumpy() for replica in parameter.list_data()]
    return arrays


plain = begin_training(lenet(), 128, bulk_size=0)
for _ in range(8):
    plain_step(plain, wait=False)
P = len(plain.net.collect_params().keys())


for by_layer in [False, True]:
    linked = begin_training(lenet(), 128, bulk_size=0)
    recording = record(several_by_priority, linked, 8, by_layer)
    found = sorted(event.name for event in recording.lanes["link"])
    priorities = range(P) if by_layer else [0] * P
    assert found == sorted([f"message {each}" for each in priorities] * 8 * len(pair))
    for ours, whole in zip(arrays_of(linked.net), arrays_of(plain.net), strict=True):
        assert (ours == whole).all(), "another weight than plain_step's"
    print(f"by_layer={by_layer}: {len(found)} messages, the weights equal plain_step's to the bit")

# With `by_layer`, a message's priority is its parameter's place.
noted = []
carry = link.carry


def noting(nbytes, priority):
    noted.append((priority, nbytes))
    carry(nbytes, priority)


link.carry = noting
step_by_priority(linked, by_layer=True)
nd.waitall()
del link.carry  # the class's again
expected = []
for place, parameter in enumerate(linked.net.collect_params().values()):
    expected += [(place, 4 * parameter.data(device).size) for device in pair]
assert sorted(noted) == sorted(expected), "another parameter's priority"

# %% [markdown]
# ## When does step 2 begin?
#
# What does the order change? We record two steps, in the *order of arrival* and *first layer
# first*. **Predict** for each: does step 2 begin before or after the end of step 1's last message?

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3"]
# measure: when step 2 begins, and for how long the link carries nothing
COUNT = 7
WAYS = {"order of arrival": False, "first layer first": True}  # by_layer


def second_begins(recording):
    """When the third convolution of a lane begins: there are two in a step's forward pass."""
    begins = []
    for lane in ["cpu(0)", "cpu(1)"]:
        convolutions = [event for event in recording.lanes[lane] if event.name == "Convolution"]
        begins.append(convolutions[2].start)
    return min(begins)


def first_sent(recording):
    """When the link is done with the first step."""
    return recording.lanes["link"][len(pair) * P - 1].end


def ahead(recording):
    """How much earlier the second step begins."""
    return first_sent(recording) - second_begins(recording)


def idle(recording):
    """How long the link carries nothing between its first message and its last."""
    messages = recording.lanes["link"]
    return messages[-1].end - messages[0].start - sum(each.duration for each in messages)


recorded = {name: [] for name in WAYS}
with Others() as others:
    for _ in range(COUNT):
        for name, by_layer in WAYS.items():
            recorded[name].append(record(several_by_priority, lenet_training, 2, by_layer))
heads = {}
idles = {}
for name, recordings in recorded.items():
    heads[name] = spread([ahead(each) for each in recordings])
    idles[name] = spread([idle(each) for each in recordings])
    side = "before" if heads[name].median > 0 else "after"
    print(f"{name}: step 2 begins {abs(heads[name].median):.1f} ms {side} the end of step 1's last "
          f"message.\n    From its first message to its last the link idles for "
          f"{idles[name].median:.1f} ms")

# %% tags=["fold", "measured"]
# check: step 2 begins after the first layer's messages; with enough quiet recordings, also when
for recording in recorded["first layer first"]:
    for name in ["message 0", "message 1"]:  # the first layer's weight and bias
        ends = [event.end for event in recording.lanes["link"] if event.name == name]
        assert second_begins(recording) > ends[len(pair) - 1], "a step too early"
if COUNT == 7 and others.share <= 0.05:
    assert heads["order of arrival"].median <= 0, "the first layer's message is the last"
    assert heads["first layer first"].median > 2, "step 2 begins early"
    assert idles["first layer first"].median < idles["order of arrival"].median
else:
    print("too few recordings, or a busy machine: how early step 2 begins isn't checked")

# %% tags=["fold"]
# draw: two steps in two orders, each the recording of median head start
chosen = {name: sorted(each, key=ahead)[COUNT // 2] for name, each in recorded.items()}
panels = {}
windows = {}
for name, recording in chosen.items():
    panels[name] = {}
    for lane, row in recording.rows.items():
        if lane != "Python":
            panels[name][lane] = [(start - first_sent(recording), duration, kind)
                                  for start, duration, kind in row]
begins = min(-first_sent(recording) for recording in chosen.values())
ends = max(recording.length - first_sent(recording) for recording in chosen.values())
fig, axes = timeline("Dotted: step 2 begins. At 0 the link is done with step 1", panels,
                     dict.fromkeys(panels, (begins - 0.5, ends + 0.5)))
for ax, recording in zip(axes, chosen.values()):
    ax.axvline(0, color="black", lw=0.8)
    ax.axvline(-ahead(recording), color="black", ls=":", lw=1.8)
first = [event for event in chosen["first layer first"].lanes["link"]
         if event.name == "message 0"][0].start - first_sent(chosen["first layer first"])
axes[1].annotate("the first layer's message", (first, 2.25), (begins, 2.42), fontsize=8,
                 va="center", arrowprops={"arrowstyle": "->"})
show(fig, alt="Two panels with lanes for two devices and the link; time 0 is when the link has "
              "carried all of step 1. Above, step 2 begins then. Below, it begins earlier, soon "
              "after the first layer's message, while other messages are still to come.")

# %% [markdown]
# In the order of arrival, the first layer's gradient is the last to go. With priorities it goes as
# soon as what is on its way has arrived, and the next forward pass begins while others still wait.
# No weight is stale, that is, from a step too early: each layer waits for its own update.
#
# Does it save time? The link has the same bytes to carry. If messages take as long in either order,
# what can be saved is the time in which it carries *nothing*: because no gradient is ready, or
# because Python is slow to hand it the next. Above all that is from the end of one step's messages
# until the next step has its first gradient. First layer first, a part of the next pass is done by
# then. We time eight steps, with 7 such pauses between. **Predict** from the idle times above: how
# many per cent can that save?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
ways = {
    "order of arrival": partial(several_by_priority, lenet_training, 8, by_layer=False),
    "first layer first": partial(several_by_priority, lenet_training, 8, by_layer=True),
}
times = in_turns(ways, ROUNDS, quiet=0.05)  # a round in which others used over 5 % is taken again
print_times(times)
ratios = times["first layer first"] / times["order of arrival"]  # round by round
print("first layer first / order of arrival, round by round:", verdict(ratios))

shorter = idles["order of arrival"].median - idles["first layer first"].median  # ms, a pause
of_all = 1e3 * spread(times["order of arrival"]).median
print(f"7 pauses, each shorter by {shorter:.1f} ms, are {7 * shorter / of_all:.0%} of this time")

# %% [markdown]
# In our quiet runs the median saved about a tenth at most, and most runs didn't decide. The last
# line says how much there is to save, if each pause gets shorter by as much as between the two
# recorded steps. Where it doesn't agree with the ratio, two recorded steps were too few to predict
# eight. **Keep:** by this reasoning, first layer first can only save time in which the link would
# be idle. Our runs neither confirm nor refute it.
#
# **On GPUs:** copies to and from a GPU obey priorities (`kCopyQueue` in
# `src/engine/threaded_engine_perdevice.cc` at 1.9.1), and Trainer gives them: `priority=-i` for
# parameter *i*. (There the *highest* number goes first.) But *i* counts in alphabetical order if
# Trainer gets `collect_params()` itself, as here: ResNet-18's last layer, `dense0`, then comes
# before `stage1` (`gluon/trainer.py`). A list, `list(net.collect_params().values())`, keeps its
# order.
#
# ## Steps on their way
#
# How many steps can overlap? Two just did, since Python ran ahead. But the engine would let any
# number of steps pile up, and each step's batch must stay in memory until it is read. What you have
# to program is a bound: wait for the loss of an older step. `lag` says how many steps older.

# %% tags=["trains"]
def train_with_lag(step, steps, lag):
    history = []  # each step's losses, one a device
    for number in range(steps):
        history.append(step())
        old = number - lag  # lag 0: this step; lag 1: the one before
        if old >= 0:
            for loss in history[old]:  # of all devices
                loss.wait_to_read()

# %% [markdown]
# **Predict:** the link is closed, so no all-reduce ends. How many steps does Python hand out with
# `waitall` after each step, and with a lag of 0, 1 and 2?

# %% tags=["fold", "trains"]
# check: how many steps Python hands out while the link is closed
class ClosableLink(PriorityLink):
    road = threading.Lock()  # who holds it closes the link

    def transmit(self, message):
        with self.road:
            super().transmit(message)


def handed_out(expected, lag):
    """`expected`, if Python hands out that many steps and stops there; otherwise another number."""
    begun = threading.Semaphore(0)

    def step():
        begun.release()
        losses = step_by_priority(lenet_training, by_layer=False)
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


link = ClosableLink(link.rate)
for lag, expected in [(None, 1), (0, 2), (1, 3), (2, 4)]:
    steps = handed_out(expected, lag)
    print("waitall:" if lag is None else f"lag {lag}:  ", steps)
    assert steps == expected

# %% [markdown]
# With `waitall` it is one. With lag 0, Python waits only for step 1's *loss*, and that is ready
# although the link is closed. So it hands out step 2, and stops: step 2's loss needs the weights
# after step 1's all-reduce. Two steps can overlap with a lag of 0 already. Each further lag allows
# one more.
# **Keep:** a lag allows `lag` + 2 steps on their way.
#
# ## Summary
#
# - Where the cores themselves copy, overlap saved little in our quiet runs: a tenth at most.
# - A slow link beside the cores can carry the first layer's gradients first. Then the next step
#   begins while the link still carries the others, and no weight is stale. By our reasoning it can
#   only save time in which the link would be idle; our runs neither confirm nor refute that.
# - The engine bounds nothing. Waiting for the loss of `lag` steps before allows `lag` + 2 steps on
#   their way.
#
# **Further reading.** A. Jayarajan et al., *Priority-based Parameter Propagation for Distributed
# DNN Training* (2019), arXiv:1905.03960; *Dive into Deep Learning*, "Concise Implementation for
# Multiple GPUs", exercise 3.
