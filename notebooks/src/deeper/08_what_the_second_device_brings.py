# %% [markdown]
# # Deeper · What the second device brings
#
# In chapter 08 two devices did 1.8 times as many images a second as one, with twice the batch. Why
# not 2 times? What if the batch stays the same? And what does it cost in memory?
#
# ## What you'll do
#
# Measure the speed-up in two ways, ask MXNet's profiler where the time of a step goes, find out
# why hybridising brings little on one device, measure the memory of a training, stage by stage, and
# see what held chapter 08's larger batch back.
#
# ## What you'll learn
#
# - what strong and weak scaling are, and how to measure them with their spread;
# - into which parts a step's time goes, on one device and on two, for LeNet and for ResNet-18;
# - when it pays to hand over a whole graph;
# - what takes the memory, and which part grows with the batch;
# - how a larger batch with a larger rate can start slowly.
#
# ## What you need
#
# Chapter 08, no GPU, and 4 GB of free memory. Reading takes {reading time}, running about two
# minutes on two cores that have nothing else to do.

# %%
from helpers import devices, split_and_load
from helpers.memory import allocated
from helpers.networks import HybridResidual, hybrid_resnet18, lenet
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, bars, curves, figure, show
from helpers.timing import Others, in_new_processes, in_turns, print_times, spread

# %%
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as onp
from d2l import mxnet as d2l
from mxnet import autograd, gluon, init, np, npx, profiler

npx.set_np()
two = devices(2)
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# ## Strong and weak scaling
#
# A second device can be used in two ways:
#
# ![One device takes a batch of 32 images. Strong scaling: two devices take 16 each of the same 32.
# Weak scaling: two devices take 32 each, a batch of 64.](../src/drawings/two_scalings.svg)
#
# - **Strong scaling:** the batch stays, and each device gets half. The averaged gradient is the
#   same, except that each BatchNorm sees half a batch (chapter 09).
# - **Weak scaling:** the shard stays, and the batch doubles. d2l's 256 and 512 are that. It is
#   another training: chapter 08 shows what else may change.
#
# The function below prepares a network and returns one training step of it. Images are random, and
# are split once: reading and splitting are not what we measure.

# %% tags=["trains"]
def ready_step(net, used, n):
    net.initialize(init.Xavier(), ctx=used)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    x_shards = split_and_load(np.random.uniform(size=(n, 1, 28, 28)), used)
    y_shards = split_and_load(np.zeros(n), used)

    def step():
        losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                losses.append(cross_entropy(net(x_shard), y_shard))
        autograd.backward(losses)
        trainer.step(n)

    return step


def run_steps(step, count):
    for _ in range(count):
        step()

# %% [markdown]
# Three settings: one device with 32 images, and two devices with the same batch or with twice the
# batch. Images a second are compared with one device's.

# %%
STEPS = 2


def three_settings(make):
    return {
        "one device": partial(run_steps, ready_step(make(), two[:1], 32), STEPS),
        "strong": partial(run_steps, ready_step(make(), two, 32), STEPS),
        "weak": partial(run_steps, ready_step(make(), two, 64), STEPS),
    }


def speed_ups(times):
    """Images a second, one device's = 1; one number a round."""
    return {
        "strong": times["one device"] / times["strong"],
        "weak": 2 * times["one device"] / times["weak"],  # twice the images
    }

# %% [markdown]
# Networks come from chapter 08. The settings take turns, in rounds, so that whatever disturbs the
# machine hits all of them. Rounds in which other programs took more than 5 % of the machine are
# taken again. **Predict:** which speed-up is higher, strong or weak?

# %%
def hybridised():
    net = hybrid_resnet18(10)
    net.hybridize(static_alloc=True, static_shape=True)
    return net

# %% tags=["measured", "trains", "few:ROUNDS = 7=>ROUNDS = 1"]
ROUNDS = 7
times = in_turns(three_settings(hybridised), ROUNDS, warm_up=1, quiet=0.05)
print_times(times, "s")
ours = speed_ups(times)
for way, ratios in ours.items():
    low, median, high = spread(ratios)
    print(f"{way}: {median:.2f} times one device (half of the rounds from {low:.2f} to {high:.2f})")

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 5=>ROUNDS = 1"]
# measure: the same with d2l's blocks, layer by layer
ROUNDS = 5


def blocks_of_d2l():
    return d2l.resnet18(10)


times = in_turns(three_settings(blocks_of_d2l), ROUNDS, warm_up=1, quiet=0.05)
theirs = speed_ups(times)
for way, ratios in theirs.items():
    low, median, high = spread(ratios)
    print(f"d2l's blocks, {way}: {median:.2f} times one device "
          f"(half of the rounds from {low:.2f} to {high:.2f})")

# %% tags=["fold"]
# draw: the speed-up in each round, and the medians
values = {"hybridised\nstrong": ours["strong"], "hybridised\nweak": ours["weak"],
          "d2l's blocks\nstrong": theirs["strong"], "d2l's blocks\nweak": theirs["weak"]}
fig, ax = bars("Two devices: the same batch (strong), and twice the batch (weak)",
               "images/s, one device's = 1", values)
ax.axhline(1, color="black", lw=0.7)
ax.axhline(2, color="black", lw=0.7, ls=":")
ax.set_ylim(0, max(2.1, ax.get_ylim()[1]))
show(fig, alt="Speed-up of two devices over one in each round, ours and d2l's blocks, at the same "
     "batch and at twice the batch, with medians and a dotted line at two.")

# %% [markdown]
# In quiet rounds weak scaling was ahead of strong for our network. d2l's blocks had too few quiet
# rounds to tell. A guess: all-reduce and update
# take as long for 32 images as for 64, so twice the batch pays for them half as often. Where two
# spreads overlap on your machine, there is no winner.
#
# **On GPUs** the first epoch contains cuDNN's search for the fastest algorithms
# (`MXNET_CUDNN_AUTOTUNE_DEFAULT`). d2l's `timer.avg()` averages over it; leave it out.
#
# ## Where the time goes
#
# Why not 2? d2l's early edition expects more from ResNet-18 than from LeNet: it computes more, so
# communication would be the smaller part. Is it? MXNet's profiler adds up what each operator took,
# on all devices. This function records some steps and returns a time for each operator's name:

# %% tags=["trains"]
folder = tempfile.TemporaryDirectory()
profiler.set_config(profile_imperative=True, profile_symbolic=True, profile_api=False,
                    aggregate_stats=True, filename=f"{folder.name}/profile.json")


def profiled(step, steps):
    """Milliseconds of a step by the clock, and of each operator in it, by its name."""
    npx.waitall()
    profiler.dumps(reset=True)  # forget what was before
    profiler.set_state("run")
    begin = time.perf_counter()
    run_steps(step, steps)
    npx.waitall()
    milliseconds = 1000 * (time.perf_counter() - begin) / steps
    profiler.set_state("stop")

    table = json.loads(profiler.dumps(reset=True, format="json"))
    operators = {}
    for operator, row in table["Time"]["operator"].items():
        operators[operator] = row["Total"] / steps
    return milliseconds, operators

# %% [markdown]
# We sort operators by their names into three kinds of work. Which of a step of LeNet on two devices
# are no compute?

# %% tags=["trains"]
def lenet_hybridised():
    net = lenet()
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def kind_of_work(operator):
    if operator.startswith("Copy") or "ElementwiseSum" in operator:
        return "communication"
    if "sgd" in operator:
        return "update"
    return "compute"


step = ready_step(lenet_hybridised(), two, 32)
run_steps(step, 2)  # warms up
milliseconds, operators = profiled(step, steps=1)
for operator in sorted(operators):
    if kind_of_work(operator) != "compute":
        print(f"{operator:17}", kind_of_work(operator))

# %% [markdown]
# The rest, such as `Convolution`, is compute. (`DeleteVariable` is the engine tidying up; we leave
# it out.) A step of $t$ seconds on $k$ devices
# offers $k\,t$ seconds of device time. We call the rest, in which no operator ran, *waiting*:

# %% tags=["trains"]
KINDS_OF_WORK = ["compute", "communication", "update", "waiting"]


def device_time(step, num_devices, steps):
    """Milliseconds of device time a step, by kind of work."""
    milliseconds, operators = profiled(step, steps)
    spent = dict.fromkeys(KINDS_OF_WORK, 0.0)
    for operator, its_time in operators.items():
        if operator != "DeleteVariable":
            spent[kind_of_work(operator)] += its_time
    spent["waiting"] = num_devices * milliseconds - sum(spent.values())
    return spent

# %% [markdown]
# LeNet and ResNet-18, each on one device and with the same batch on two, in turns. **Predict:**
# which spends the larger share on communication?

# %%
workloads = {}  # (name, number of devices): a step, and how many of them are recorded at once
for name, make, n, steps in [("LeNet, 32", lenet_hybridised, 32, 40),
                             ("LeNet, 256", lenet_hybridised, 256, 6),
                             ("ResNet-18, 32", hybridised, 32, 1)]:
    for used in [two[:1], two]:
        step = ready_step(make(), used, n)
        run_steps(step, 2)  # warms up
        workloads[name, len(used)] = step, steps

# %% tags=["trains", "few:ROUNDS = 7=>ROUNDS = 1"]
ROUNDS = 7
spent = {}  # (name, number of devices): what device_time returned, one a round
for workload in workloads:
    spent[workload] = []
with Others() as others:
    for _ in range(ROUNDS):
        for (name, num_devices), (step, steps) in workloads.items():
            spent[name, num_devices].append(device_time(step, num_devices, steps))

# %% tags=["fold", "measured"]
# measure: shares of device time, speed-ups by the same clock, and what keeps them below 2
def share_of(kind, rounds):
    return onp.array([each[kind] / sum(each.values()) for each in rounds])


def median_of(kind, rounds):
    return onp.median([each[kind] for each in rounds])


def whole_step(rounds):
    return onp.median([sum(each.values()) for each in rounds])


NAMES = ["LeNet, 32", "LeNet, 256", "ResNet-18, 32"]
print(f"other programs took {others.share:.0%} of the machine")
print("shares of device time")
for (name, num_devices), rounds in spent.items():
    devices_used = "1 device " if num_devices == 1 else "2 devices"
    shares = [f"{kind} {onp.median(share_of(kind, rounds)):5.1%}" for kind in KINDS_OF_WORK]
    print(f"{name:13} images, {devices_used}: {', '.join(shares)}")

print("speed-up of two devices; device time that they took more than one, in % of one's step")
lost = {}  # name: {kind of work: what two devices take more, one device's whole step = 1}
for name in NAMES:
    alone, together = spent[name, 1], spent[name, 2]
    lost[name] = {kind: (median_of(kind, together) - median_of(kind, alone)) / whole_step(alone)
                  for kind in KINDS_OF_WORK}
    speed_up = 2 * whole_step(alone) / whole_step(together)
    terms = [f"{kind} {share:+.1%}" for kind, share in lost[name].items()]
    print(f"{name:13} images: {speed_up:.2f} times; {', '.join(terms)}")
ratio = whole_step(spent["ResNet-18, 32", 2]) / whole_step(spent["LeNet, 32", 2])
print(f"ResNet-18's step takes {ratio:.0f} times as long as LeNet's, on two devices at batch 32")

# %% tags=["fold"]
# draw: device time of a step by kind of work, one device's as 1
fig, ax = figure("Where the device time of a step goes", "", "device time, one device's = 1")
labels, bottoms = [], onp.zeros(6)
for name, num_devices in spent:
    labels.append(f"{name}\n{num_devices} device{'s' * (num_devices > 1)}")
for kind, color, hatch in zip(KINDS_OF_WORK, [BLUE, ORANGE, GREEN, GREY], ["", "//", "xx", ".."]):
    heights = onp.array([median_of(kind, rounds) / whole_step(spent[name, 1])
                         for (name, num_devices), rounds in spent.items()])
    ax.bar(range(6), heights, bottom=bottoms, color=color, hatch=hatch, edgecolor="white",
           label=kind, width=0.7)
    bottoms += heights
ax.set_xticks(range(6), labels, fontsize=8)
ax.axhline(1, color="black", lw=0.7)
ax.legend(frameon=False, fontsize=8, ncols=4, loc="upper center")
ax.set_ylim(0, 1.25 * bottoms.max())
show(fig, alt="Six stacked bars of device time: compute, communication, update and waiting, for "
     "LeNet with 32 and 256 images and ResNet-18 with 32, on one device and on two.")

# %% tags=["fold"]
# check: ResNet-18 communicates far longer than LeNet; its parameters and its step beside LeNet's
of_lenet = median_of("communication", spent["LeNet, 32", 2])
of_resnet = median_of("communication", spent["ResNet-18, 32", 2])
assert of_resnet > 10 * of_lenet, "87 times the bytes should take longer"


def count_parameters(net):
    net.initialize()
    net(np.zeros((1, 1, 28, 28)))  # from now on the shapes of its parameters are known
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return sum(int(onp.prod(p.shape)) for p in trained)


assert count_parameters(hybridised()) == 11_175_818 and count_parameters(lenet()) == 129_068
assert round(count_parameters(hybridised()) / count_parameters(lenet())) == 87 > ratio
for rounds in spent.values():
    assert min(share_of("waiting", rounds)) > -0.02, "more work than there was time"

# %% [markdown]
# A bar of height 1 on two devices would be a speed-up of 2. What is above 1 is lost; the lines
# above say to what. (The profiler itself costs time, most where operators are short: the speed-ups
# here are those of recorded steps.)
#
# **ResNet-18's communication isn't the smaller part.** It has 87 times LeNet's parameters
# (11,175,818 to 129,068), so 87 times the bytes are sent, and its step takes less than 87 times as
# long. At batch 32 its share was above LeNet's in the run above and in most others, but not in
# all. Why compute takes longer on two devices than on one is asked in deeper: A time budget that
# closes.
#
# **On GPUs** the shares may be quite different; we measured none.
#
# ## Why hybridising brings little on one device
#
# One graph in place of 64 operators should save Python a lot of work. It does. But is Python's work
# what the step waits for? Python only hands operators over, and goes on; the engine's threads
# compute. So we stop two clocks: when Python is done, and when everything is. Beside the whole
# network stands a thin one with a single image, where there is little to compute.

# %%
def clocks(step):
    """Milliseconds until Python has handed over the step, and until it is done."""
    npx.waitall()
    begin = time.perf_counter()
    step()
    handed_over = time.perf_counter() - begin
    npx.waitall()
    done = time.perf_counter() - begin
    return 1000 * handed_over, 1000 * done

# %%
steps_to_time = {}  # (network, way): a step
for name, channels, n in [("whole network, 32 images", (64, 128, 256, 512), 32),
                          ("thin network, 1 image", (4, 4, 8, 8), 1)]:
    for way in ["layer by layer", "one graph"]:
        net = hybrid_resnet18(10, channels)
        if way == "one graph":
            net.hybridize(static_alloc=True, static_shape=True)
        step = ready_step(net, two[:1], n)
        run_steps(step, 2)  # warms up
        steps_to_time[name, way] = step

# %% [markdown]
# They take turns. Of the rounds we show the one that was done first, the least disturbed:

# %% tags=["measured", "trains", "few:ROUNDS = 9=>ROUNDS = 5"]
ROUNDS = 9
rounds = {}  # (network, way): (handed over, done), one pair a round
for network_and_way in steps_to_time:
    rounds[network_and_way] = []
for _ in range(ROUNDS):
    for network_and_way, step in steps_to_time.items():
        rounds[network_and_way].append(clocks(step))

ways = {}
for (name, way), pairs in rounds.items():
    pairs.sort(key=lambda pair: pair[1])  # by when the step was done
    handed_over, done = pairs[0]
    ways[name, way] = handed_over, done
    print(f"{name}, {way:14}: Python is done after {handed_over:5.1f} ms, the step after "
          f"{done:6.1f} ms")

# %% tags=["fold"]
# check: Python is a small part of the whole network's step, and most of the thin one's
whole_python, whole_step = ways["whole network, 32 images", "layer by layer"]
thin_python, thin_step = ways["thin network, 1 image", "layer by layer"]
_, thin_graph = ways["thin network, 1 image", "one graph"]
assert whole_python < 0.15 * whole_step, "Python is done long before the whole network"
assert thin_python > 0.5 * thin_step, "with little to compute, Python is most of it"
assert thin_graph < 0.9 * thin_step, "and then one graph saves time"

# %% [markdown]
# In the whole network Python is done long before the engine, in either way: what hybridising saves
# was hidden behind the computing. In the thin network Python takes most of the step, and one graph
# makes it much shorter. **Hybridise where operators are many and short.** What else one graph
# brings to the whole network, such as memory allocated once, we haven't separated.
#
# d2l's blocks differ from ours in one more thing: relu is `npx.relu` there and `npx.activation`
# here. Values are the same, but on a CPU the second takes arrays in the layout in which oneDNN's
# convolutions leave them (`src/operator/nn/activation.cc` at 1.9.1). So a comparison of d2l's
# blocks with ours, hybridised, changes two things at once.

# %% tags=["fold"]
# check: `npx.relu` and `npx.activation` give the same values
a = np.random.normal(size=(4, 8, 5, 5))
assert (npx.relu(a) == npx.activation(a, act_type="relu")).all()
assert HybridResidual(8).projection is None

# %% [markdown]
# ## Where the memory goes
#
# What does training on two devices keep in memory? A fresh process trains two steps, and asks
# the C library after each stage how much is allocated (`helpers.memory.allocated`). The stages are:
# weights and gradients; the first forward and backward pass; the first `trainer.step`, which makes
# the store; and the steps after it.
#
# We run it with shards of 8, 16 and 24 images, so that we see what grows with the images; on three
# devices; and with 1 and 64 scratch spaces. Operators borrow these, and `helpers` sets 64 (deeper:
# How the speed-up was measured).

# %% tags=["fold", "trains"]
# measure: MB that each stage of a training on simulated devices adds, in a new process
def memory_by_stage(setting):
    import os

    os.environ["MXNET_CPU_TEMP_COPY"] = str(setting["spaces"])  # read when MXNet is imported

    import mxnet as mx
    from helpers.memory import allocated
    from helpers.networks import hybrid_resnet18
    from mxnet import autograd, gluon, init, np, npx

    npx.set_np()
    cpus = [mx.cpu(number) for number in range(setting["devices"])]
    shard = setting["shard"]
    net = hybrid_resnet18(10)
    net.hybridize(static_alloc=True, static_shape=True)
    entropy = gluon.loss.SoftmaxCrossEntropyLoss()
    shards = [(np.zeros((shard, 1, 28, 28), ctx=cpu), np.zeros(shard, ctx=cpu)) for cpu in cpus]
    net.infer_shape(shards[0][0])
    added = {}
    last = 0

    def look(stage):
        nonlocal last
        npx.waitall()
        now = allocated() / 1e6
        added[stage] = now - last
        last = now

    look("before")
    net.initialize(init.Zero(), ctx=cpus)  # Xavier's would take more for a while
    look("weights and gradients")
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    for number in range(setting["steps"]):
        with autograd.record():
            losses = [entropy(net(x), y) for x, y in shards]
        autograd.backward(losses)
        if number == 0:
            look("first passes")
        trainer.step(len(cpus) * shard)
        if number == 0:
            look("store")
    look("later steps")
    return added

# %% tags=["measured"]
settings = {
    "shards of 8": {"devices": 2, "shard": 8, "spaces": 1, "steps": 2},
    "shards of 16": {"devices": 2, "shard": 16, "spaces": 1, "steps": 2},
    "shards of 24": {"devices": 2, "shard": 24, "spaces": 1, "steps": 2},
    "three devices": {"devices": 3, "shard": 8, "spaces": 1, "steps": 2},
    "64 spaces": {"devices": 2, "shard": 16, "spaces": 64, "steps": 4},
}
measured = in_new_processes(memory_by_stage, settings.values())
memory = dict(zip(settings, measured))  # MB by setting and stage
for setting, stages in memory.items():
    print(f"{setting:13}", end=" ")
    for stage in ["weights and gradients", "first passes", "store", "later steps"]:
        print(f"  {stage} {stages[stage]:5.0f} MB", end="")
    print()

# %% [markdown]
# What should it be? The weights of one replica are 11,175,818 numbers of 4 bytes. On $k$ devices
# weights and gradients take $2k$ times that. The store needs a buffer for each device's gradient
# and, as it makes the update, its own copy of the weights (chapter 07): $k + 1$ times.

# %% tags=["measured"]
weights = 4 * 11_175_818 / 1e6  # MB
print(f"weights of one replica: {weights:.0f} MB")
for setting in ["shards of 16", "three devices"]:
    stages = memory[setting]
    print(f"{setting}: weights and gradients {stages['weights and gradients'] / weights:.1f} times "
          f"that, the store {stages['store'] / weights:.1f} times")

small, large, largest = memory["shards of 8"], memory["shards of 16"], memory["shards of 24"]
per_image = (large["first passes"] - small["first passes"]) / (32 - 16)
whatever = large["first passes"] - 32 * per_image
print(f"the passes: {per_image:.1f} MB an image, and {whatever:.0f} MB whatever the batch, one "
      f"scratch space included")
print(f"for shards of 24 that predicts {whatever + 48 * per_image:.0f} MB; there were "
      f"{largest['first passes']:.0f} MB")

many = memory["64 spaces"]
scratch = (many["first passes"] + many["store"] + many["later steps"]
           - large["first passes"] - large["store"] - large["later steps"])
print(f"63 more scratch spaces: {scratch:.0f} MB after four steps")

# %% tags=["fold"]
# check: 2 k and k + 1 times the weights; the passes' law; nothing grows after the first step
for k, setting in [(2, "shards of 8"), (2, "shards of 16"), (3, "three devices")]:
    assert abs(memory[setting]["weights and gradients"] / weights - 2 * k) < 0.05, setting
    assert abs(memory[setting]["store"] / weights - (k + 1)) < 0.05, setting
predicted = whatever + 48 * per_image
assert abs(predicted / largest["first passes"] - 1) < 0.05, "the passes of 48 images"
assert large["later steps"] < 0.01 * (large["first passes"] + large["store"]), "it grows"
assert large["first passes"] > large["weights and gradients"], "the second largest part"
kept = large["weights and gradients"] + large["first passes"] + large["store"]
assert scratch > kept, "scratch spaces should take most"

# `allocated` sees 10 MB come and go.
block = onp.empty(10_000_000, "uint8")
before = allocated()
del block
assert 0.9e7 < before - allocated() < 1.1e7, "what was freed is no longer counted"

# %% tags=["fold"]
# draw: memory of two devices with 16 images each, by what takes it
parts = {"weights,\ngradients": large["weights and gradients"], "store": large["store"],
         "passes of\n32 images": large["first passes"], "63 scratch\nspaces": scratch}
fig, ax = bars("Scratch spaces take most of the memory, and we asked for them", "MB", parts)
for place, megabytes in enumerate(parts.values()):
    ax.text(place, megabytes, f"{megabytes:.0f}", ha="center", va="bottom")
show(fig, alt="Four bars of memory on two devices: weights and gradients, the store, the passes of "
     "32 images, and 63 scratch spaces, which are the highest.")

# %% [markdown]
# The largest part is our own doing: MXNet's default is 4 scratch spaces, `helpers` sets 64, and
# each grows with what operators ask of it. With fewer, simulated devices wait for one another
# (deeper: How the speed-up was measured). **On GPUs** MXNet has one for each device
# (`MXNET_GPU_TEMP_COPY`, `src/resource.cc` at 1.9.1). The second largest, what the passes allocate,
# grows with the shard, and so decides how many images fit.
#
# ## What held the larger batch back
#
# Chapter 08's run with batch 512 was behind from the start. Why? Look at the training loss of the
# two stored runs:

# %% tags=["fold"]
# draw: training loss against images, means of 1,536; last batches left out
full = json.loads(Path("../src/results/resnet18.json").read_text())["runs"]
names = {"resnet18-1x256": "1 device, batch 256", "resnet18-2x512": "2 devices, batch 512"}
thousands = 1.536 * onp.arange(1, 79)
loss_of = {}
for name, label in names.items():
    first_epoch, second_epoch = full[name][0]
    loss_of[label] = onp.array(first_epoch["losses"][:39] + second_epoch["losses"][:39])
lines = {label: (thousands, loss) for label, loss in loss_of.items()}
lines["guessing: ln 10"] = (thousands, onp.full(78, onp.log(10)))
fig, ax = curves("One run each: batch 512 stays near guessing for 18 thousand images",
                 "thousand images", "training loss", lines, logy=True)
ax.set_yticks([0.02, 0.1, 0.5, 2], ["0.02", "0.1", "0.5", "2"])
ax.set_yticks([], minor=True)
show(fig, alt="Loss against images on a logarithmic axis: batch 512 stays near that of guessing "
     "for 18 thousand images, and above batch 256 through the first epoch.")

small, large = loss_of.values()
assert (large[:39] > small[:39]).all(), "batch 512 is behind all through the first epoch"
assert large[0] > onp.log(10), "it begins above guessing"
assert abs(large[2:12] - onp.log(10)).max() < 0.5 and large[12] < 1.8, "near guessing till 18"
assert thousands[11] > 18
assert (small[10:12] < 0.1).all() and (small[:10] > 0.1).all(), "by then the other is below 0.1"

# %% [markdown]
# At batch 512 and rate 0.2 the loss begins above that of guessing, $\ln 10 = 2.3$, and stays near
# it for 18,000 images. So this start *can* be slow; whether the batch or the rate made it so, one
# run each can't say. A usual remedy is *warm-up*, a rate that begins low and rises (Goyal et al.,
# 2017, section 2.2; deeper: Batch, rate and warm-up).
#
# ## Summary
#
# - Strong scaling divides one batch, weak scaling doubles it. Weak scaling looked better by images
#   a second for our network, and is a different training.
# - A speed-up below 2 is device time spent otherwise: on communication, update and waiting, and on
#   compute that takes longer. In most runs ResNet-18 spent a larger share on communication than
#   LeNet.
# - Hybridising saves Python's time. It pays where Python is what the step waits for.
# - Memory on $k$ devices, with plain SGD: $2k$ times the weights for weights and gradients, $k + 1$
#   times for the store, an amount for the passes that grows with the images, and scratch space,
#   here the largest. (Measured on two and three devices.)
# - A larger batch with a larger rate can spend its first images near guessing.
#
# **Further reading.** P. Goyal et al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677.
