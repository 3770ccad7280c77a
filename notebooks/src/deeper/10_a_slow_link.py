# %% [markdown]
# # Deeper · A slow link
#
# In chapter 10 overlap shortened a step over a slow link. What if there is no such link, and a copy
# is work for the cores? And over the slow link: which gradient should go first, and how many steps
# may be on their way at the same time?
#
# ## What you'll do
#
# Measure overlap on the wide network, whose copies take as long as its compute. Build a link that
# takes the most urgent message first, and see the next step begin before the link is done with this
# one. Then bound how far Python runs ahead.
#
# ## What you'll learn
#
# - why overlap wins little where the cores themselves copy;
# - why the first layer's gradient should go first, and that no weight gets stale by that;
# - how many steps can be in flight, and how a program bounds them.
#
# ## What you need
#
# Chapters 08 and 10, and two cores. No GPU and no data. Reading takes {reading time}, running about
# a minute.

# %%
import queue
import threading
from functools import partial
from time import sleep
from typing import NamedTuple

from helpers import split_and_load
from helpers.networks import lenet
from helpers.plotting import show, timeline
from helpers.timing import in_turns, print_times, spread
from helpers.trace import record

import mxnet as mx
from mxnet import autograd, gluon, nd, profiler
from mxnet.gluon import nn

pair = [mx.cpu(0), mx.cpu(1)]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()
OPERATORS_APART = {"forward_bulk_size": 0, "backward_bulk_size": 0}

# %% [markdown]
# A `Training` is a network, its Trainer and its shards. The weights begin equal each time.
# `options`, if there are any, go to `hybridize`.

# %%
class Training(NamedTuple):
    net: gluon.Block
    trainer: gluon.Trainer
    x_shards: list
    y_shards: list
    n: int


def begin_training(net, n, **options):
    mx.random.seed(0)
    x_shards = split_and_load(nd.random.uniform(shape=(n, 1, 28, 28)), pair)
    y_shards = split_and_load(nd.arange(n) % 10, pair)
    net.initialize(mx.init.Xavier(), ctx=pair)
    net(x_shards[0])  # makes the weights now
    if options:
        net.hybridize(**options)
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
# The wide network has 12 million weights in four dense layers of 2048, and little work for each. So
# a step on two devices copies about as long as it computes. It should win most by overlap, if there
# is something to win. ResNet-18 has more operators than fit into a bulk, so its gradients get ready
# in several groups as it comes.

# %% tags=["trains"]
def wide():
    net = nn.HybridSequential()
    for _ in range(4):
        net.add(nn.Dense(2048, activation="relu"))
    net.add(nn.Dense(10))
    return net


def resnet18_v1():
    return gluon.model_zoo.vision.resnet18_v1(classes=10, thumbnail=True)


wide_bulks = begin_training(wide(), 32)
wide_apart = begin_training(wide(), 32, **OPERATORS_APART)
resnet = begin_training(resnet18_v1(), 32, static_alloc=True, static_shape=True)
for training in [wide_bulks, wide_apart, resnet]:
    for _ in range(2):
        plain_step(training, wait=False)  # warms up

# %% [markdown]
# Does the all-reduce overlap with the backward pass? On each lane we look when the first copy of a
# gradient begins, and when the last backward operator ends. The time between them is the overlap.
# (A hybridised network's bulks share the name `ImperativeBulk`, forward and backward. Only the last
# one's end matters.)

# %%
def overlaps(recording):
    found = {}
    for lane, events in recording.lanes.items():
        copies = []
        pass_end = 0
        for event in events:
            if event.name == "CopyCPU2CPU":
                copies.append(event.start)
            elif event.name == "ImperativeBulk" or event.name.startswith("_backward"):
                pass_end = event.end
        found[lane] = pass_end - copies[0]  # ms; 0 or less: no overlap
    return found

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3"]
# check: ResNet-18, and wide with operators apart, overlap; with waitall or in bulks wide doesn't
COUNT = 7


def median_recording(training, wait):
    """Of some recordings the one of median length."""
    recordings = [record(plain_step, training, wait) for _ in range(COUNT)]
    return sorted(recordings, key=lambda each: each.length)[COUNT // 2]


groups = median_recording(resnet, wait=False)
free = median_recording(wide_apart, wait=False)
held = median_recording(wide_apart, wait=True)
bulks = median_recording(wide_bulks, wait=False)
for name, recording, expected in [("ResNet-18, as it comes", groups, True),
                                  ("wide, operators apart", free, True),
                                  ("wide, operators apart, waitall", held, False),
                                  ("wide, as it comes", bulks, False)]:
    print(f"{name:30} " + ", ".join(f"{lane} {ms:+.1f} ms"
                                    for lane, ms in overlaps(recording).items()))
    for milliseconds in overlaps(recording).values():
        assert (milliseconds > 2e-3) == expected, name
assert sorted(event.name for event in free.events) == sorted(
    event.name for event in held.events), "the same work, only at other times"

# %% tags=["fold"]
# draw: the wide network's step with and without overlap, and ResNet-18's
panels = {"ResNet-18, default bulks": groups.rows, "wide, operators apart": free.rows,
          "wide, operators apart, waitall before the all-reduce": held.rows}
most = 1 + max(free.length, held.length)
fig, _ = timeline("Communication among the backward operators, and after them", panels,
                  {name: (-1, most) for name in panels if name.startswith("wide")})
show(fig, alt="Three panels with rows for Python and two devices. In the first two, communication "
              "lies among the backward operators; in the last, all of it comes after them. The "
              "first lane has long updates, while the second has nothing to do.")

# %% [markdown]
# The engine finds the overlap by itself. Is it worth anything? For the wide network we measure four
# ways, with chapter 10's control: in bulks nothing overlaps, whether Python waits or not.

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
# measure: what overlap wins where cores copy: the wide network in four ways, ResNet-18 in two
ROUNDS = 9
ways = {
    "wide in bulks, waits": partial(plain_step, wide_bulks, wait=True),
    "wide in bulks": partial(plain_step, wide_bulks, wait=False),
    "wide apart, waits": partial(plain_step, wide_apart, wait=True),
    "wide apart": partial(plain_step, wide_apart, wait=False),
    "ResNet-18, waits": partial(plain_step, resnet, wait=True),
    "ResNet-18": partial(plain_step, resnet, wait=False),
}
times = in_turns(ways, ROUNDS)
print_times(times)
print()
for what, way, against in [("wide: handing out ahead", "wide in bulks", "wide in bulks, waits"),
                           ("wide: operators apart", "wide apart, waits", "wide in bulks, waits"),
                           ("wide: overlap and handing out", "wide apart", "wide apart, waits"),
                           ("ResNet-18: overlap and handing out", "ResNet-18",
                            "ResNet-18, waits")]:
    low, median, high = spread(times[way] / times[against])
    print(f"{what:34} {median:.2f} times the step (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# In our quiet runs overlap saved nothing to a tenth for the wide network, and nothing to a few per
# cent for ResNet-18. On a CPU device a copy is work for the very core that computes, so there is
# little to gain. The wide network as it comes has no overlap, and was fastest.
#
# ## A link that takes the most urgent first
#
# Now back to chapter 10's link, which carries data beside the cores. There, messages go in the
# order of arrival. The *last* layer's gradient is ready first. But the next step begins with the
# *first* layer, and needs that layer's new weights first. So let each message have a priority: of
# those that wait, the one with the lowest number goes first. Python's `PriorityQueue` does that:

# %%
waiting = queue.PriorityQueue()
for message in [(7, "dense"), (0, "first layer"), (2, "second layer")]:
    waiting.put(message)
while not waiting.empty():
    print(waiting.get())

# %% [markdown]
# A link is such a queue and a thread that empties it. With equal priorities the message that came
# first should go first, so each gets a ticket number. The link can be closed: then no message
# arrives. We shall need that at the end.

# %%
track = profiler.Domain("link")  # a lane of its own in recordings


class Queued(NamedTuple):
    priority: int
    ticket: int
    nbytes: int
    arrived: threading.Event


class PriorityLink:
    def __init__(self, rate):
        self.rate = rate  # bytes a second
        self.waiting = queue.PriorityQueue()
        self.tickets = 0
        self.lock = threading.Lock()
        self.open = threading.Event()
        self.open.set()
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            message = self.waiting.get()
            self.open.wait()
            task = profiler.Task(track, f"message {message.priority}")
            task.start()
            sleep(message.nbytes / self.rate)
            task.stop()
            message.arrived.set()

    def carry(self, nbytes, priority):
        with self.lock:  # several threads send
            message = Queued(priority, self.tickets, nbytes, threading.Event())
            self.tickets += 1
        self.waiting.put(message)
        message.arrived.wait()

# %% [markdown]
# Four messages. The first is long, and goes at once. **Predict** the order of the others, whose
# priorities are 3, 1 and 2.

# %%
def send_four():
    threads = []
    for nbytes, priority in [(300_000, 9), (1_000, 3), (1_000, 1), (1_000, 2)]:
        thread = threading.Thread(target=trial.carry, args=(nbytes, priority))
        thread.start()
        threads.append(thread)
        sleep(0.02)  # the others arrive while the first is on its way
    for thread in threads:
        thread.join()


trial = PriorityLink(rate=1e6)
sent = record(send_four).lanes["link"]
for event in sent:
    print(event.name)
assert [event.name[-1] for event in sent] == ["9", "1", "2", "3"]
assert sent[0].duration >= 300, "300,000 bytes at 1 MB/s"

# %% [markdown]
# An operator sends a gradient, as in chapter 10, now with its priority. (MXNet hands an operator's
# arguments over as text.)

# %%
class SendFirst(mx.operator.CustomOp):
    def __init__(self, priority):
        super().__init__()
        self.priority = priority

    def forward(self, is_train, req, in_data, out_data, aux):
        link.carry(4 * in_data[0].size, self.priority)
        self.assign(out_data[0], req[0], in_data[0])


@mx.operator.register("send_first")
class SendFirstProp(mx.operator.CustomOpProp):
    def __init__(self, priority):
        super().__init__()
        self.priority = int(priority)

    def create_operator(self, context, shapes, dtypes):
        return SendFirst(self.priority)

# %% [markdown]
# In the step, `by_layer` gives a parameter its place in the network as priority. Without it all
# have priority 0: they go in the order of arrival.

# %% tags=["trains"]
def step_by_priority(training, by_layer):
    losses = forward_and_backward(training)
    for place, parameter in enumerate(training.net.collect_params().values()):
        priority = 0
        if by_layer:
            priority = place
        for grad in parameter.list_grad():
            nd.Custom(grad, op_type="send_first", priority=priority, out=grad)
    training.trainer.step(training.n)
    return losses

# %% [markdown]
# The link should take twice as long as the two passes, so that messages wait for one another.

# %% tags=["trains"]
far = begin_training(lenet(), 128, **OPERATORS_APART)
plain_step(far, wait=False)
lengths = []
for _ in range(5):
    lengths.append(record(forward_and_backward, far).length)
passes = sorted(lengths)[2]  # ms, the median

nbytes = 0
for parameter in far.net.collect_params().values():
    for grad in parameter.list_grad():
        nbytes += 4 * grad.size
link = PriorityLink(rate=nbytes / (2 * passes / 1e3))
print(f"the passes take {passes:.1f} ms, the messages {2 * passes:.1f} ms")

# %% tags=["fold", "trains"]
# check: whatever the order, the weights are those of Trainer to the bit, and all messages are sent
def arrays_of(net):
    arrays = []
    for parameter in net.collect_params().values():
        arrays += [replica.asnumpy() for replica in parameter.list_data()]
    return arrays


plain = begin_training(lenet(), 128, **OPERATORS_APART)
for _ in range(8):
    plain_step(plain, wait=False)
P = len(plain.net.collect_params().keys())


def eight_steps(training, by_layer):
    for _ in range(8):
        step_by_priority(training, by_layer)


for by_layer in [False, True]:
    linked = begin_training(lenet(), 128, **OPERATORS_APART)
    recording = record(eight_steps, linked, by_layer)
    found = sorted(event.name for event in recording.lanes["link"])
    priorities = range(P) if by_layer else [0] * P
    assert found == sorted([f"message {each}" for each in priorities] * 8 * len(pair))
    for ours, whole in zip(arrays_of(linked.net), arrays_of(plain.net), strict=True):
        assert (ours == whole).all(), "a stale weight"

# %% [markdown]
# ## First layer first
#
# Two steps in three ways: *in sequence*, with `waitall` after the passes and after the step; in the
# *order of arrival*; and *first layer first*.
#
# **Predict:** in which of them can step 2 begin before the link is done with step 1?

# %% tags=["trains"]
def two_steps_in_sequence():
    for _ in range(2):
        forward_and_backward(far)
        nd.waitall()
        for parameter in far.net.collect_params().values():
            for grad in parameter.list_grad():
                nd.Custom(grad, op_type="send_first", priority=0, out=grad)
        far.trainer.step(far.n)
        nd.waitall()


def two_steps_over_link(by_layer):
    for _ in range(2):
        step_by_priority(far, by_layer)


WAYS = {
    "in sequence": two_steps_in_sequence,
    "order of arrival": partial(two_steps_over_link, by_layer=False),
    "first layer first": partial(two_steps_over_link, by_layer=True),
}

# %% tags=["fold", "measured", "trains", "few:COUNT = 7=>COUNT = 3"]
# measure: by how many ms step 2 begins before the link is done with step 1
COUNT = 7


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


recorded = {name: [record(way) for _ in range(COUNT)] for name, way in WAYS.items()}
medians = {}
for name, recordings in recorded.items():
    low, medians[name], high = spread([ahead(each) for each in recordings])
    print(f"{name:17} {medians[name]:+6.1f} ms before the link is done with step 1 "
          f"(middle half {low:+.1f} to {high:+.1f})")

# %% tags=["fold"]
# check: in sequence the next step begins when the link is done; first layer first, before that
assert max(ahead(each) for each in recorded["in sequence"]) <= 0
assert medians["first layer first"] > 2, "step 2 begins early"
assert medians["first layer first"] > medians["order of arrival"] + 1

# %% tags=["fold"]
# draw: two steps in three ways, each the recording of median head start
chosen = {name: sorted(each, key=ahead)[COUNT // 2] for name, each in recorded.items()}
panels = {}
for name, recording in chosen.items():
    panels[name] = {lane: row for lane, row in recording.rows.items() if lane != "Python"}
most = max(recording.length for recording in chosen.values())
fig, axes = timeline("First layer first: step 2 (dotted line) begins while step 1 is being sent",
                     panels, dict.fromkeys(panels, (-0.5, most + 0.5)))
for ax, recording in zip(axes, chosen.values()):
    ax.axvline(second_begins(recording), color="black", ls=":")
show(fig, alt="Three panels with lanes for two devices and the link. Above, devices and link work "
              "in turns. In the middle the link begins during the backward pass. Below, step 2 "
              "begins while the link still carries messages of step 1.")

# %% [markdown]
# In the order of arrival, the first layer's gradient waits behind the large dense layer's. With
# priorities it goes next, and the next forward pass begins while other messages still wait. No
# weight is stale: each layer waits for its own update, and the weights above were equal to the bit.
# Does it save time?

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
times = in_turns(WAYS, ROUNDS)
print_times(times)
low, median, high = spread(times["first layer first"] / times["order of arrival"])
print(f"first layer first / order of arrival: {median:.2f} (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# The last two differ in nothing but the order of the messages. (The first differs from them in two
# things, overlap and Python's waiting; chapter 10 separates these.)
#
# **On GPUs:** Trainer asks for something like it, with `priority=-i` for parameter *i*, but in
# *alphabetical* order: in LeNet that is the order of the layers, while ResNet-18's last layer,
# `dense0`, comes before `stage1` (`gluon/trainer.py` at 1.9.1). Copies to and from a GPU have
# queues and threads of their own, which obey priorities. Ordinary work, on a CPU device or a GPU,
# is done first come, first served (`kCopyQueue` and `kWorkerQueue` in
# `src/engine/threaded_engine_perdevice.cc`).
#
# ## Steps in flight
#
# d2l's exercise goes on: how could up to two steps overlap? The engine would let any number of
# steps pile up. What you have to program is a bound: wait for the loss of an older step. `lag` says
# how many steps older.

# %% tags=["trains"]
def train_with_lag(step, steps, lag):
    history = []  # each step's losses, one a device
    for number in range(steps):
        history.append(step())
        if number >= lag:
            for loss in history[number - lag]:
                loss.wait_to_read()

# %% [markdown]
# **Predict:** the link is closed, so no all-reduce ends. How many steps does Python hand out with a
# lag of 0, 1 and 2?

# %% tags=["fold", "trains"]
# check: with the link closed, Python hands out lag + 2 steps; with waitall after each step, one
def handed_out(expected, lag):
    """`expected`, if Python hands out that many steps and stops there; otherwise another number."""
    begun = threading.Semaphore(0)

    def step():
        begun.release()
        return step_by_priority(far, by_layer=False)

    def step_and_wait():
        step()
        nd.waitall()

    def work():
        if lag == "waitall":
            for _ in range(6):
                step_and_wait()
        else:
            train_with_lag(step, 6, lag)

    link.open.clear()
    thread = threading.Thread(target=work)
    thread.start()
    count = 0
    while count < expected and begun.acquire(timeout=60):
        count += 1
    if begun.acquire(timeout=0.5):
        count += 1
    link.open.set()
    thread.join()
    nd.waitall()
    return count


for lag, expected in [("waitall", 1), (0, 2), (1, 3), (2, 4)]:
    count = handed_out(expected, lag)
    print(lag if lag == "waitall" else f"lag {lag}", "-", count, "step" if count == 1 else "steps")
    assert count == expected

# %% [markdown]
# Step 1's loss is ready although the link is closed. Step 2's isn't: it needs the weights after
# step 1's all-reduce. With lag 0 Python waits for step 1's loss, hands out step 2, and stops at its
# loss. Each further lag allows one more step; `waitall` stops after the first. So d2l's two steps
# can overlap with a lag of 0 already. Does it save time, on a step without the link?

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 5=>ROUNDS = 2"]
# measure: eight steps of LeNet with waitall after each, with a lag of 0, 1 and 2, without waiting
ROUNDS = 5
usual = begin_training(lenet(), 128)


def usual_step():
    losses = forward_and_backward(usual)
    usual.trainer.step(usual.n)
    return losses


def eight_with_waitall():
    for _ in range(8):
        usual_step()
        nd.waitall()


ways = {"waitall": eight_with_waitall}
for lag in [0, 1, 2]:
    ways[f"lag {lag}"] = partial(train_with_lag, usual_step, 8, lag)
ways["never wait"] = partial(train_with_lag, usual_step, 8, 8)
times = in_turns(ways, ROUNDS)
print_times(times)
for name in list(ways)[1:]:
    low, median, high = spread(times[name] / times["waitall"])
    print(f"{name:10} / waitall: {median:.2f} (middle half {low:.2f} to {high:.2f})")

# %% [markdown]
# In most of our runs a lag of 0 or 1 was no faster than `waitall` after each step; the loop that
# never waits was. We don't know why. (Little of such a step is left to overlap with the next.)
#
# ## Summary
#
# - Where the cores themselves copy, overlap won nothing to a tenth.
# - If the first layer's gradients go first, the next step can begin while a slow link still carries
#   the others. No weight is stale.
# - The engine bounds nothing. Waiting for the loss of `lag` steps before bounds a loop to `lag` + 2
#   steps in flight.
#
# **Further reading.** A. Jayarajan et al., *Priority-based Parameter Propagation for Distributed
# DNN Training* (2019), arXiv:1905.03960; *Dive into Deep Learning*, "Concise Implementation for
# Multiple GPUs", exercise 3.
