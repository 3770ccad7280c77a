# %% [markdown]
# # Deeper · What the second device brings
#
# In chapter 08 two devices with twice the batch did 1.8 times as many images a second as one. Why
# not 2 times? What if the batch stays the same? And what does it cost in memory?
#
# > **What you'll do:** measure two kinds of speed-up, see where the time of a step goes, and
# > measure what a training keeps in memory.
# >
# > **What you'll learn:** what strong and weak scaling are, and what they gain; into which parts a
# > step's time goes, for LeNet and for ResNet-18; when it pays to hand over a whole graph, and what
# > `static_shape` adds; what takes the memory, and which part grows with the batch; how a larger
# > batch with a larger rate can start slowly.
# >
# > **What you need:** chapter 08, no GPU, and 4 GB of free memory. Reading takes {reading time},
# > running about three minutes on two cores that have nothing else to do.

# %%
from helpers import devices, split_and_load
from helpers.networks import hybrid_resnet18, lenet
from helpers.plotting import BLUE, GREEN, GREY, ORANGE, bars, curves, figure, show
from helpers.timing import in_new_processes, in_turns, print_times, spread

import numpy as onp
from mxnet import autograd, gluon, init, np, npx

npx.set_np()
two = devices(2)
one = two[:1]
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

# %% [markdown]
# ## Strong and weak scaling
#
# A second device can be used in two ways. Which brings more images a second?
#
# ![One device takes a batch of 32 images. Strong scaling: two devices take 16 each of the same 32.
# Weak scaling: two devices take 32 each, a batch of 64.](../src/drawings/two_scalings.svg)
#
# - **Strong scaling:** the batch stays, and each device gets half. The averaged gradient is the
#   same, except that each BatchNorm sees half a batch (chapter 09).
# - **Weak scaling:** the shard stays, and the batch doubles, as from d2l's 256 to 512. It is
#   another training: chapter 08 shows what else may change.
#
# This function prepares a network and returns one training step of it. Images are random, and are
# split once: reading and splitting are not what we measure.

# %% tags=["trains"]
def ready_step(net, devices_used, n):
    net.initialize(init.Xavier(), ctx=devices_used)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01})
    x_shards = split_and_load(np.random.uniform(size=(n, 1, 28, 28)), devices_used)
    y_shards = split_and_load(np.zeros(n), devices_used)

    def step():
        losses = []
        with autograd.record():
            for x_shard, y_shard in zip(x_shards, y_shards):
                losses.append(cross_entropy(net(x_shard), y_shard))
        autograd.backward(losses)
        trainer.step(n)

    return step

# %% [markdown]
# Three steps of chapter 08's network: on one device with 32 images, and on two with the same batch
# and with twice the batch. The network is one graph. `static_alloc` keeps its memory from pass to
# pass, and `static_shape` tells it that shapes stay the same; what each brings comes later.

# %%
def resnet():
    net = hybrid_resnet18(10)
    net.hybridize(static_alloc=True, static_shape=True)
    return net


def three_steps():  # nothing else holds these networks, so they are freed after use
    return {
        "one device": ready_step(resnet(), one, 32),
        "strong": ready_step(resnet(), two, 32),
        "weak": ready_step(resnet(), two, 64),
    }

# %% [markdown]
# `in_turns` runs them in rounds, so that what disturbs the machine hits all of them. It leaves out
# rounds in which other programs took more than 5 % of the machine, and returns for each step an
# array of seconds, one a round. So each round has a speed-up of its own, and we print the median of
# those. **Predict:** which speed-up is higher, strong or weak?

# %% tags=["measured", "trains", "few:ROUNDS = 11=>ROUNDS = 1"]
ROUNDS = 11
times = in_turns(three_steps(), ROUNDS, quiet=0.05)
print_times(times, "ms")  # the median; in brackets, where half of the rounds lie

speed_ups = {  # one a round
    "strong": times["one device"] / times["strong"],
    "weak": 2 * times["one device"] / times["weak"],  # twice the images
}
for way, ratios in speed_ups.items():
    print(f"{way}: {spread(ratios).median:.2f} times the images a second of one device")
quiet_rounds = ROUNDS > 1 and spread(speed_ups["strong"]).low > 1.6
if not quiet_rounds:
    print("which is ahead isn't checked: the run is short, or others used the machine")

# %% tags=["fold"]
# draw: the speed-up in each round, the medians, and which way is ahead
strong, weak = spread(speed_ups["strong"]), spread(speed_ups["weak"])
if weak.low > strong.high:
    verdict = "Twice the batch (weak) gains more than the same batch (strong)"
elif strong.low > weak.high:
    verdict = "The same batch (strong) gains more than twice the batch (weak)"
else:
    verdict = "The same batch (strong), twice the batch (weak): no winner here"
fig, ax = bars(verdict, "images/s, one device's = 1", speed_ups)
ax.axhline(1, color="black", lw=0.7)
ax.axhline(2, color="black", lw=0.7, ls=":")
ax.set_ylim(0, max(2.1, ax.get_ylim()[1]))
show(fig, alt="Speed-up of two devices over one in each round, at the same batch and at twice the "
     "batch, with medians and a dotted line at two.")
if quiet_rounds:
    assert weak.median > strong.median, "weak scaling was ahead in each of our quiet runs"

# %% [markdown]
# A dot is a round. In each of our quiet runs weak scaling's median was a little ahead, 1.9 to
# strong's 1.8, though the rounds overlap. **Neither gives 2.**
#
# ## Where the time goes
#
# Why not 2? We look at strong scaling, where the work is the same. d2l's early edition expects more
# from ResNet-18 than from LeNet: it computes more, so communication would take a smaller share of
# its step. Does it?
#
# MXNet's profiler adds up how long each operator ran, on all devices. `profiled` records steps:

# %% tags=["fold", "trains"]
# define: profiled(step, steps), milliseconds of a step by the clock, and of each operator in it
import json
import tempfile
import time

from helpers.timing import Others
from mxnet import profiler

folder = tempfile.TemporaryDirectory()
profiler.set_config(profile_imperative=True, profile_symbolic=True, profile_api=False,
                    aggregate_stats=True, filename=f"{folder.name}/profile.json")


def run_steps(step, count):
    for _ in range(count):
        step()


def profiled(step, steps):
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
        if operator != "DeleteVariable":  # the engine tidies up
            operators[operator] = row["Total"] / steps
    return milliseconds, operators

# %% [markdown]
# We sort operators by their names into three kinds of work. Communication is what the store does:
# it copies gradients, and adds up those of both devices.

# %%
def kind_of_work(operator):
    if operator.startswith("Copy") or operator == "ElementwiseSum":
        return "communication"
    if "sgd" in operator:
        return "update"
    return "compute"

# %% tags=["fold", "trains"]
# measure: a step of LeNet on two devices, by operators
def lenet_as_graph():
    net = lenet()
    net.hybridize(static_alloc=True, static_shape=True)
    return net


lenet_step = ready_step(lenet_as_graph(), two, 32)
run_steps(lenet_step, 2)  # warms up
milliseconds, operators = profiled(lenet_step, steps=1)
print(f"a step of LeNet with 32 images, on two devices: {milliseconds:.2f} ms; in it, on both:")
compute = 0
for operator in sorted(operators):
    kind = kind_of_work(operator)
    if kind == "compute":
        compute += operators[operator]
    else:
        print(f"{operator:16} {kind:13} {operators[operator]:5.2f} ms")
print(f"all others       compute       {compute:5.2f} ms")

# %% [markdown]
# A step of $t$ seconds on $k$ devices offers $k\,t$ seconds of *device time*. The part in which no
# operator ran we call *waiting*. Here are means of 40 steps:

# %% tags=["trains"]
def device_time(step, num_devices, steps):
    """Milliseconds of device time a step, by kind of work."""
    milliseconds, operators = profiled(step, steps)
    spent = {"compute": 0, "communication": 0, "update": 0}
    for operator, taken in operators.items():
        spent[kind_of_work(operator)] += taken
    spent["waiting"] = num_devices * milliseconds - sum(spent.values())
    return spent


spent = device_time(lenet_step, num_devices=2, steps=40)
for kind, taken in spent.items():
    print(f"{kind:13} {taken:5.2f} ms")

# %% [markdown]
# Now the same for LeNet with 32 and 256 images and for ResNet-18 with 32, each on one device and
# with the same batch on two. We look at what two devices spend *more* than one, in % of one
# device's step. With nothing more the speed-up would be 2; with 25 % more it is 2/1.25 = 1.6.
# **Predict:** which has the larger share of communication at batch 32, LeNet or ResNet-18?

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 7=>ROUNDS = 1"]
# measure: the device time that two devices spend more than one, in the median of seven rounds
def unrecorded(step, steps):
    """Seconds of so many steps, by the clock alone."""
    npx.waitall()
    begin = time.perf_counter()
    run_steps(step, steps)
    npx.waitall()
    return time.perf_counter() - begin


ROUNDS = 7
KINDS_OF_WORK = ["compute", "communication", "update", "waiting"]
WORKLOADS = {  # name: (what makes the network, images, how many steps are recorded at once)
    "LeNet, 32": (lenet_as_graph, 32, 40),
    "LeNet, 256": (lenet_as_graph, 256, 6),
    "ResNet-18, 32": (resnet, 32, 1),
}


def measure_budgets():
    """(name, number of devices): what device_time and unrecorded return, one a round."""
    ready = {}  # freed with its networks in the end
    budgets = {}
    clock_times = {}
    for name, (make, n, steps) in WORKLOADS.items():
        for num_devices in [1, 2]:
            ready[name, num_devices] = (ready_step(make(), two[:num_devices], n), steps)
    ready["ResNet-18, 16", 1] = (ready_step(resnet(), one, 16), 1)  # one shard, on one device
    for key, (step, _) in ready.items():
        run_steps(step, 2)  # warms up
        budgets[key] = []
        clock_times[key] = []
    for _ in range(ROUNDS):
        for (name, num_devices), (step, steps) in ready.items():
            budgets[name, num_devices].append(device_time(step, num_devices, steps))
            clock_times[name, num_devices].append(unrecorded(step, steps))
    return budgets, clock_times


with Others() as others:
    budgets, clock_times = measure_budgets()


def total(budget):
    return sum(budget.values())


def median_round(name, num_devices):
    rounds = sorted(budgets[name, num_devices], key=total)
    return rounds[len(rounds) // 2]  # one round as it was, so its parts add up


quiet = others.share <= 0.05
if not quiet:
    print(f"other programs took {others.share:.0%} of the machine: shares aren't checked below")
more = {}  # name: {kind of work: what two devices spend more, one device's step = 1}
communication = {}  # name: its share of two devices' time
for name in WORKLOADS:
    alone, together = median_round(name, 1), median_round(name, 2)
    more[name] = {}
    for kind in KINDS_OF_WORK:
        more[name][kind] = (together[kind] - alone[kind]) / total(alone)
    communication[name] = together["communication"] / total(together)
    percent = 100 * total(more[name])
    by_clock = onp.median(clock_times[name, 1]) / onp.median(clock_times[name, 2])
    print(f"{name:13} two devices spend {percent:+.0f} %: speed-up {2 / (1 + percent / 100):.2f} "
          f"(not recorded: {by_clock:.2f}); communication is {communication[name]:.1%}")
ratio = total(median_round("ResNet-18, 32", 2)) / total(median_round("LeNet, 32", 2))
print(f"ResNet-18's step takes {ratio:.0f} times as long as LeNet's, on two devices at batch 32")
whole_compute = median_round("ResNet-18, 32", 1)["compute"]
shard_compute = 2 * median_round("ResNet-18, 16", 1)["compute"]
both_compute = median_round("ResNet-18, 32", 2)["compute"]
print("ResNet-18's compute, where one device with 32 images takes 1:")
print(f"    one device, 16 images and 16 more: {shard_compute / whole_compute:.2f}")
print(f"    two devices, 16 images each:       {both_compute / whole_compute:.2f}")

# %% tags=["fold"]
# check: the sum is the speed-up; shares and bytes of communication, LeNet's and ResNet-18's
def count_parameters(net):
    net.initialize()
    net(np.zeros((1, 1, 28, 28)))  # from now on the shapes of its parameters are known
    trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
    return sum(int(onp.prod(p.shape)) for p in trained)


for name in WORKLOADS:
    alone, together = median_round(name, 1), median_round(name, 2)
    speed_up = 2 * total(alone) / total(together)  # seconds are device time / number of devices
    assert abs(speed_up - 2 / (1 + total(more[name]))) < 1e-9
    assert alone["communication"] == 0, "one device has no store: ResNet-18's sums don't count"
    assert together["communication"] > 0
for rounds in budgets.values():
    for budget in rounds:
        assert budget["waiting"] > -0.02 * total(budget), "more work than there was time"
if quiet:
    assert communication["LeNet, 256"] < 0.6 * communication["LeNet, 32"], "a larger batch"
    assert more["LeNet, 32"]["update"] < 0.05 and more["ResNet-18, 32"]["update"] < 0.05, "no loss"
    assert ratio < 87, "ResNet-18's step is less than 87 times as long"
of_lenet = median_round("LeNet, 32", 2)["communication"]
of_resnet = median_round("ResNet-18, 32", 2)["communication"]
assert of_resnet > 10 * of_lenet, "87 times the bytes should take longer"
assert count_parameters(resnet()) == 11_175_818 and count_parameters(lenet()) == 129_068
assert round(11_175_818 / 129_068) == 87

# %% tags=["fold"]
# draw: on what two devices spend more, or less, than one
largest = {}
for name in ["LeNet, 32", "ResNet-18, 32"]:
    largest[name] = max(more[name], key=more[name].get)
title = (f"At batch 32 LeNet loses most to {largest['LeNet, 32']}, "
         f"ResNet-18 to {largest['ResNet-18, 32']}")
fig, ax = figure(title, "", "what two devices spend more,\n% of one device's step")
places = onp.arange(3)
for number, (kind, color, hatch) in enumerate(
        zip(KINDS_OF_WORK, [BLUE, ORANGE, GREEN, GREY], ["", "//", "xx", ".."])):
    heights = [100 * more[name][kind] for name in WORKLOADS]
    ax.bar(places + 0.2 * (number - 1.5), heights, width=0.18, color=color, hatch=hatch,
           edgecolor="white", label=kind)
    for place, height in zip(places + 0.2 * (number - 1.5), heights):
        ax.text(place, max(height, 0), f"{height:+.1f}", ha="center", va="bottom", fontsize=8)
ax.axhline(0, color="black", lw=0.7)
ax.set_xticks(places, [f"{name} images" for name in WORKLOADS])
ax.legend(frameon=False, fontsize=9)
show(fig, alt="For LeNet with 32 and 256 images and ResNet-18 with 32, four bars each: how much "
     "more device time two devices spend than one on compute, communication, update and waiting.")

# %% [markdown]
# In our quiet runs LeNet's recorded steps lost most to waiting, and ResNet-18's to compute: two
# devices took longer than one for the same 32 images. (Update isn't divided: the store makes it
# once, as one device does. Why it took a little less: see deeper: A step's time budget, "Where are
# the updates?") If steps that aren't recorded have the higher speed-up, recording adds waiting.
#
# Why does ResNet-18 compute longer? Each device has a smaller shard, and another one that computes
# at the same time. The last two lines above tell them apart. The first is of a device by itself,
# 16 images and then 16 more: above 1, small shards would have a price of their own. By as much as
# the second is higher, working side by side costs here.
#
# And communication? A small loss in all three. ResNet-18's step takes less than 87 times as long as
# LeNet's, and it has 87 times the parameters, so 87 times the bytes to send. So its share of
# communication isn't clearly the smaller one. With batch 256 LeNet computes more for the same
# bytes, and its share is smaller. **Look where the time goes before you blame communication.**
# (**On GPUs** shares may differ; we measured none.)
#
# ## Does a step wait for Python?
#
# Python only hands operators over, and goes on; the engine's threads compute. With one graph
# (chapter 08) there is less to hand over. When does that make a step shorter? We stop two clocks:
# when Python is done, and when everything is. Python shares the cores with the engine's threads, so
# both clocks vary: of several tries we take the one that was done first.

# %% tags=["trains"]
def clocks(step):
    """Milliseconds until the step is done, and until Python has handed it over."""
    npx.waitall()
    begin = time.perf_counter()
    step()
    handed_over = time.perf_counter() - begin
    npx.waitall()
    done = time.perf_counter() - begin
    return 1000 * done, 1000 * handed_over


tries = []
for _ in range(30):
    tries.append(clocks(lenet_step))
lenet_done, lenet_python = min(tries)  # of pairs the one whose first number is smallest
print(f"LeNet on two devices: Python is done after {lenet_python:.1f} ms, the step after "
      f"{lenet_done:.1f} ms")

# %% [markdown]
# Now ResNet-18 on one device: the *whole* network with 32 images, and a *thin* one, of 4 to 8
# channels, with a single image. **Predict:** which gets faster as one graph?

# %% tags=["fold", "trains", "few:ROUNDS = 9=>ROUNDS = 5"]
# measure: the two clocks of four steps; of nine tries the one that was done first
ROUNDS = 9
steps_to_time = {}
for name, channels, n in [("whole network", (64, 128, 256, 512), 32),
                          ("thin network", (4, 4, 8, 8), 1)]:
    for way in ["layer by layer", "one graph"]:
        net = hybrid_resnet18(10, channels)
        if way == "one graph":
            net.hybridize(static_alloc=True, static_shape=True)
        step = ready_step(net, one, n)
        run_steps(step, 2)  # warms up
        steps_to_time[f"{name}, {way}"] = step

pairs = {}  # name: (done, handed over), one pair a round
for name in steps_to_time:
    pairs[name] = []
for _ in range(ROUNDS):
    for name, step in steps_to_time.items():
        pairs[name].append(clocks(step))


best = {}
for name in pairs:
    best[name] = min(pairs[name])  # the least disturbed round
    done, handed_over = best[name]
    print(f"{name:29} Python is done after {handed_over:.1f} ms, the step after {done:.1f} ms")
del net, step, steps_to_time  # frees the networks

# %% tags=["fold"]
# check: Python is a small part of the whole network's step, and most of the thin one's
whole_done, whole_python = best["whole network, layer by layer"]
thin_done, thin_python = best["thin network, layer by layer"]
graph_done, graph_python = best["thin network, one graph"]
assert whole_python < 0.15 * whole_done, "Python is done long before the whole network"
assert thin_python > 0.5 * thin_done, "with little to compute, Python is most of it"
assert graph_done < 0.9 * thin_done, "and then one graph saves time"
assert lenet_python > 2 * whole_python / whole_done * lenet_done, "a larger part of LeNet's step"

# %% [markdown]
# In the whole network Python is done long before the engine, either way, so on one device the graph
# saves hardly anything. In the thin network the step ends when Python does, and one graph makes
# both much shorter. **Hybridise where operators are many and short.** (LeNet on two devices lies
# between. Which part of its waiting is for Python? See deeper: A step's time budget.)
#
# Does that hold on two devices? We compare four ways to run the whole network. `CPU time` is what
# all threads together have computed; while a device waits, it stands still. **Predict:** Python
# needs only some percent of the step. Do the four speed-ups differ?

# %% tags=["fold", "measured", "trains", "few:ROUNDS = 5=>ROUNDS = 1"]
# measure: 32 images on one and on two devices, in four ways; the fastest of five rounds
ROUNDS = 5
WAYS = {  # name: how the network is hybridised
    "layer by layer": None,
    "one graph": {},
    "  with static_alloc": {"static_alloc": True},
    "  and static_shape": {"static_alloc": True, "static_shape": True},
}


def fastest_round(options):
    """Number of devices: milliseconds until done, until Python is done, of CPU time."""
    ready = {}
    rounds = {1: [], 2: []}
    for num_devices in rounds:
        net = hybrid_resnet18(10)
        if options is not None:
            net.hybridize(**options)
        ready[num_devices] = ready_step(net, two[:num_devices], 32)
        run_steps(ready[num_devices], 2)  # warms up
    for _ in range(ROUNDS):
        for num_devices, step in ready.items():
            npx.waitall()
            begin = time.process_time()
            done, handed_over = clocks(step)
            cpu_time = 1000 * (time.process_time() - begin)
            rounds[num_devices].append((done, handed_over, cpu_time))
    return {num_devices: min(rounds[num_devices]) for num_devices in rounds}


done_after = {}  # on two devices
speed_up_of = {}
python_of = {}
cpu_time_of = {}
print("ms                  one device  two devices  speed-up   on two: Python  CPU time")
with Others() as others:
    for way, options in WAYS.items():
        fastest = fastest_round(options)
        on_one = fastest[1][0]
        on_two, python_of[way], cpu_time_of[way] = fastest[2]
        done_after[way] = on_two
        speed_up_of[way] = on_one / on_two
        print(f"{way:19} {on_one:10.0f} {on_two:12.0f} {speed_up_of[way]:9.2f} "
              f"{python_of[way]:16.0f} {cpu_time_of[way]:9.0f}")
if others.share <= 0.05 and ROUNDS > 1:
    for way in ["layer by layer", "one graph", "  with static_alloc"]:
        assert speed_up_of["  and static_shape"] > 1.1 * speed_up_of[way], way
        saved = done_after[way] - done_after["  and static_shape"]
        less_work = (cpu_time_of[way] - cpu_time_of["  and static_shape"]) / 2  # on each core
        assert less_work < 0.5 * saved, f"{way}: work is most of what is saved"
    assert max(python_of.values()) < 100, "Python is done early"
else:
    print("these aren't checked: the run is short, or others used the machine")

# %% [markdown]
# They do. On a quiet machine the last brings 1.8 times, and the others less, graph or not. It isn't
# Python, which is done early in all four. Nor is it mostly work: the CPU time saved, divided by two
# cores, is less than half of the time saved. So most of that was *waiting*.
#
# By our reading, it is waiting for a *scratch space*, memory that an operator borrows while it
# runs. `helpers` asks for 64 of them. In the first three ways each operator borrows the next in
# turn, and two devices can meet in one. With `static_shape` each graph keeps one for good
# (`AttachOpResources` in `src/executor/`, 1.9.1). A trial agrees: layer by layer, both devices'
# threads stood still for 24 % of the time with 64 or 128 spaces, and for 5 % with 256 (26 November
# 2026, beside other programs). **One graph saves Python's time; `static_shape` saved waiting.**
#
# ## Where the memory goes
#
# Which part of the memory decides how many images fit? A new process trains two steps, and asks the
# C library after each stage how much is allocated. `initialize` makes *weights and gradients*; then
# come the *first passes*, forward and backward; the first `trainer.step` makes the *store*
# (chapter 07).

# %% tags=["fold", "trains"]
# define: measure_memory(num_devices, shard), MB that each stage adds, in a new process
def memory_by_stage(setting):
    import os

    os.environ["MXNET_CPU_TEMP_COPY"] = str(setting["scratch_spaces"])  # read by MXNet's import

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


def measure_memory(num_devices, shard, scratch_spaces=1, steps=2):
    setting = {"devices": num_devices, "shard": shard,
               "scratch_spaces": scratch_spaces, "steps": steps}
    (added,) = in_new_processes(memory_by_stage, [setting])
    return added

# %% tags=["measured"]
memory = {}  # MB by images and stage
for shard in [8, 16, 24]:
    images = 2 * shard
    memory[images] = measure_memory(num_devices=2, shard=shard)

print("MB on two devices  weights, gradients  first passes  store")
for images, added in memory.items():
    print(f"{images} images {added['weights and gradients']:27.0f} {added['first passes']:13.0f} "
          f"{added['store']:6.0f}")

# %% [markdown]
# What should it be? The weights of one replica are 11,175,818 numbers of 4 bytes. On $k$ devices
# weights and gradients take $2k$ times that. The store needs a buffer for each device's gradient
# and, as it makes the update, its own copy of the weights: $k + 1$ times. **Predict:** how many
# times is that for three devices?

# %%
weights = 4 * 11_175_818 / 1e6  # MB
print(f"weights of one replica: {weights:.0f} MB")
on_two = memory[32]
on_three = measure_memory(num_devices=3, shard=8)
for k, added in [(2, on_two), (3, on_three)]:
    both = added["weights and gradients"] / weights
    store = added["store"] / weights
    print(f"{k} devices: weights and gradients take {both:.1f} times that, the store {store:.1f}")

# %% [markdown]
# Only the passes grow with the images. By how much? From 16 and 32 images we predict what 48 take:

# %% tags=["measured"]
passes_16 = memory[16]["first passes"]
passes_32 = memory[32]["first passes"]
passes_48 = memory[48]["first passes"]
per_image = (passes_32 - passes_16) / (32 - 16)
for_no_image = passes_16 - 16 * per_image
predicted = for_no_image + 48 * per_image
print(f"each image takes {per_image:.1f} MB, and {for_no_image:.0f} MB don't depend on images")
print(f"48 images: {predicted:.0f} MB predicted, {passes_48:.0f} MB measured")

# %% tags=["fold"]
# check: weights and gradients are 2 k times, the store k + 1; later steps add nothing
from helpers.memory import allocated

for k, added in [(2, memory[16]), (2, memory[32]), (2, memory[48]), (3, on_three)]:
    assert abs(added["weights and gradients"] / weights - 2 * k) < 0.05, k
    assert abs(added["store"] / weights - (k + 1)) < 0.05, k
    assert added["later steps"] < 0.01 * added["first passes"], "it grows"
assert abs(predicted / passes_48 - 1) < 0.05, "the passes of 48 images"
assert for_no_image > 0, "and something whatever the batch"

# `allocated` sees 10 MB come and go.
block = onp.empty(10_000_000, "uint8")
before = allocated()
del block
assert 0.9e7 < before - allocated() < 1.1e7, "what was freed is no longer counted"

# %% [markdown]
# Later steps add nothing. But one part is our own doing: the scratch spaces. Each grows to what its
# largest borrower asks for (`src/resource.cc`, 1.9.1). MXNet has 4 for all CPU devices. Above we
# took 1; `helpers` asks for 64, so that simulated devices wait for one another less than with 4
# (deeper: How the speed-up was measured). What do they take?

# %% tags=["fold"]
# draw: memory of two devices with 32 images, and what 64 scratch spaces take more than one
added = memory[32]
many = measure_memory(2, 16, scratch_spaces=64, steps=4)  # the spaces grow for some steps
kept = added["weights and gradients"] + added["first passes"] + added["store"]
scratch = sum(many.values()) - many["before"] - kept - added["later steps"]
parts = {"weights,\ngradients": added["weights and gradients"], "store": added["store"],
         "passes of\n32 images": added["first passes"], "64 scratch spaces\nin place of 1": scratch}
fig, ax = bars("Scratch spaces take most of the memory, and we asked for them", "MB", parts)
for place, megabytes in enumerate(parts.values()):
    ax.text(place, megabytes, f"{megabytes:.0f}", ha="center", va="bottom")
ax.set_ylim(0, 1.15 * scratch)
show(fig, alt="Four bars of memory on two devices: weights and gradients, the store, the passes of "
     "32 images, and what 64 scratch spaces take more than one, which is the highest.")
assert scratch > kept, "scratch spaces should take most"
assert added["first passes"] > added["weights and gradients"], "the second largest part"

# %% [markdown]
# Scratch space hardly grew with the images here, so **the passes decide how many images fit.** **On
# GPUs** each device has one scratch space (same file); whether it grows we haven't measured.
#
# ## How the larger batch began
#
# Chapter 08's run with batch 512 and rate 0.2 was behind the one with 256 and 0.1 from the start.
# Did it only make half as many updates from the same images? The stored training losses:

# %% tags=["fold"]
# draw: training loss against images; each point is the mean of 1,536 images
from pathlib import Path

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
ax.axvline(60, color="black", lw=0.7)
ax.text(59, 3, "end of epoch 1", ha="right", va="bottom", fontsize=8)
ax.set_yticks([0.02, 0.1, 0.5, 2], ["0.02", "0.1", "0.5", "2"])
ax.set_yticks([], minor=True)
show(fig, alt="Loss against images on a logarithmic axis: batch 512 stays near that of guessing "
     "for 18 thousand images, and above batch 256 through the first epoch.")

of_256, of_512 = loss_of.values()
for label, loss, size in zip(loss_of, [of_256, of_512], [256, 512]):
    place = 36 * size // 1536 - 1  # where 36 updates have been made
    print(f"{label}: loss {loss[place]:.2f} after 36 updates ({36 * size:,} images)")
assert of_256[5] < 0.25 and of_512[11] > 2.2, "as many updates, and far behind"
assert (of_512[:39] > of_256[:39]).all(), "batch 512 is behind all through the first epoch"
assert of_512[0] > onp.log(10), "it begins above guessing"
assert abs(of_512[2:12] - onp.log(10)).max() < 0.5 and of_512[12] < 1.8, "near guessing till 18"
assert thousands[11] > 18
assert (of_256[10:12] < 0.1).all() and (of_256[:10] > 0.1).all(), "by then the other is below 0.1"

# %% [markdown]
# No: after as many updates batch 512 was still where guessing is ($\ln 10 = 2.3$). **A larger batch
# with a larger rate can start slowly**; which of the two made it so, one run each can't say. A
# usual remedy is *warm-up*, a rate that begins low and rises (Goyal et al., 2017, section 2.2;
# deeper: Batch, rate and warm-up).
#
# ## Summary
#
# - Strong scaling divides one batch; weak scaling doubles it, and is a different training. Weak
#   scaling's median was a little ahead in each of our quiet runs, but rounds overlap: no winner.
# - Why not 2? In recorded steps LeNet's devices waited, and ResNet-18's, side by side, computed
#   longer. (By the clock, in deeper: A step's time budget, LeNet loses less.) Communication was the
#   smaller loss.
# - One graph saves Python's time. It pays where Python is what the step waits for. `static_shape`
#   also saved waiting on two devices, by our reading for scratch space.
# - Memory on $k$ devices (two and three, plain SGD): $2k$ times the weights for weights and
#   gradients, $k + 1$ times for the store, an amount for the passes that grows with the images, and
#   scratch space, here the largest.
# - A larger batch with a larger rate can spend its first images near guessing.
#
# **Further reading.** P. Goyal et al., *Accurate, large minibatch SGD* (2017), arXiv:1706.02677.
