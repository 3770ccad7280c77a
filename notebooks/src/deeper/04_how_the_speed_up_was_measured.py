# %% [markdown]
# # Deeper · How the speed-up was measured
#
# Chapter 04 says how much faster two devices are than one. Such a number is easily wrong, and a
# wrong one looks just like a right one.
#
# > **What you'll do:** measure in wrong ways, let six contestants take turns, and give two devices
# > each kind of the course's settings alone.
# >
# > **What you'll learn:** what a measurement has to keep out; which baseline answers which doubt;
# > what scratch space, threads and allocator have to do with two devices.
# >
# > **What you need:** chapter 04. No GPU. Reading takes {reading time}, running about two minutes.

# %%
import os
import subprocess
import sys
from time import perf_counter

from helpers import devices
from helpers.by_hand import get_params, init_params, train_batch
from helpers.engine import ALLOCATOR, SETTINGS
from helpers.timing import Team, race, spread

import numpy as np
from mxnet import nd

# %% [markdown]
# ## Ways to be wrong
#
# **Not waiting.** We take twelve steps on two devices and look at the clock twice: when Python has
# handed them all out, and when the devices have done them. **Predict:** what share of the time has
# passed at the first look?

# %% tags=["predict"]
two = devices(2)
x = nd.random.uniform(shape=(256, 1, 28, 28))
y = nd.zeros(256)
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
train_batch(x, y, replicas, two, lr=0.01)
nd.waitall()

begin = perf_counter()
for step in range(12):
    train_batch(x, y, replicas, two, lr=0.01)
handed_out = perf_counter() - begin
nd.waitall()
done = perf_counter() - begin

print(f"handed out after {handed_out:.3f} s, done after {done:.3f} s")

# %% tags=["fold"]
# check: what came out
assert handed_out < 0.5 * done

# %% [markdown]
# <details><summary>What came out</summary>
#
# Less than half: a program that doesn't wait measures how fast Python fills the queues.
#
# </details>
#
# **Measuring while others work.** [lenet_contestant.py](../lenet_contestant.py) is a program that
# takes as many steps as each line that it reads says; a `Team` starts it, and a call of the team
# sends it a line and waits for its answer. One program trains on one device with both cores,
# another on two devices. Each takes six steps, first alone, then beside a third program that keeps
# one core busy. **Predict:** which of them loses more?

# %% tags=["predict"]
contestant = f"../lenet_contestant.py --kind {two[0].device_type}"
on_first = f"{contestant} --devices {two[0].device_id}"
on_second = f"{contestant} --devices {two[1].device_id}"
on_both = f"{contestant} --devices {two[0].device_id} {two[1].device_id}"


def team_of(line):
    return Team([[sys.executable, *line.split()]], order="6")


teams = {"both cores": team_of(f"{on_first} --threads 2"), "two devices": team_of(on_both)}


def time_each(where):
    for name, team in teams.items():
        team()  # warms up
        begin = perf_counter()
        team()
        print(f"{name:11} {where}: {perf_counter() - begin:.2f} s")


BUSY = "import time; end = time.time() + 30\nwhile time.time() < end: pass"

time_each("alone")
neighbour = subprocess.Popen([sys.executable, "-c", BUSY])
time_each("beside a busy program")
neighbour.kill()
for team in teams.values():
    team.close()

# %% [markdown]
# <details><summary>What came out</summary>
#
# On two cores both take longer, and *both cores* loses more. Nothing in those seconds says why, and
# we haven't tested it.
#
# </details>
#
# **So contestants are warm, take turns, and are measured several times, and a round in which others
# used the machine doesn't count.** `helpers.timing.race` does that, by `Team` and `in_turns`: after
# two rounds to warm up it goes on in a random order, so that whatever slows the machine for a while
# slows all. A round in which other programs used more than 2 % of the machine is taken again. We
# compare within a round, and print the median of these ratios and the middle half of them.
#
# ## Six contestants
#
# All train on 256 images a step; two trainings or programs have half of them each. The others are
# there to answer a doubt:
#
# | contestant | is | answers |
# | --- | --- | --- |
# | *one device* | one device, one core | |
# | *both cores* | one device, two threads an operator | would a larger device do? |
# | *two devices* | two devices, one core each | |
# | *no messages* | two trainings in one program | what does the all-reduce cost? |
# | *two programs* | the same as two programs | what does it cost to run both in one? |
# | *stock MXNet* | one device without any of the course's settings | is our *one device* slow? |

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 1", "few:STEPS = 8=>STEPS = 1"]
ROUNDS = 9
STEPS = 8

allocator = {variable: str(value) for number, value, variable in ALLOCATOR}
ours = SETTINGS | allocator
stock = {name: value for name, value in os.environ.items() if name not in ours}

times = race({
    "one device": on_first,
    "both cores": f"{on_first} --threads 2",
    "two devices": on_both,
    "no messages": f"{on_both} --apart",
    "two programs": [f"{on_first} --images 128", f"{on_second} --images 128"],
    "stock MXNet": f"{on_first} --stock",
}, STEPS, ROUNDS, environments={"stock MXNet": stock})
speeds = {name: STEPS * 256 / seconds for name, seconds in times.items()}

print("              images/s   times one device: median (middle half)")
for name, speed in speeds.items():
    low, median, high = spread(speed / speeds["one device"])
    print(f"{name:12}  {np.median(speed):8,.0f}   {median:.2f} ({low:.2f} to {high:.2f})")

# %% tags=["fold", "figure:speedup"]
# draw: images per second of each contestant, a dot a round
from helpers.plotting import bars, show

larger = np.median(speeds["both cores"] / speeds["one device"])
more = np.median(speeds["two devices"] / speeds["one device"])
labels = ["one device,\none core", "one device,\nboth cores", "two\ndevices", "no\nmessages",
          "two\nprograms", "stock\nMXNet"]
fig, ax = bars(f"Times one core: one device with both cores {larger:.2f}, two devices {more:.2f}",
               "images per second", dict(zip(labels, speeds.values())))
twice = 2 * np.median(speeds["one device"])
ax.set_ylim(0, 1.15 * max(twice, *map(np.max, speeds.values())))  # room for the line
ax.axhline(twice, color="black", lw=1, ls="--")
ax.text(-0.4, 1.01 * twice, "twice one device", va="bottom", fontsize=9)
show(fig, alt="Images per second of each round, with medians: one device with one core, one device "
              "with both cores, two devices, two trainings that send no messages, two programs, "
              "and stock MXNet; a line at twice one device.")

# %% [markdown]
# How to read it? We call one contestant faster than another only if their brackets don't overlap.
# That is the course's rule, and no statistical test.
#
# - *both cores* against *two devices*: is a larger device as good as two? With GPUs the larger
#   device is another GPU, or one that wasn't split (MIG).
# - *two devices* against *no messages*: only a gap between these two can be the all-reduce, with
#   the waiting that it causes. (When messages cost more is asked in deeper: Costs on paper.)
# - *no messages* against 2: what is missing there can't be the all-reduce. We haven't tested what
#   it is.
# - *stock MXNet* against *one device*: if it isn't faster, our baseline is no straw man. On x86 its
#   OpenMP operators get half of the logical processors (`src/engine/openmp.cc`, MXNet 1.9.1). That
#   is one of two, so it can't stand for *both cores*.
#
# **The measure of a speed-up is what the same machine reaches in the best other way, not 2.**
#
# ## What the settings bring
#
# `import helpers` makes three kinds of settings before MXNet is loaded. *Threads*: an operator uses
# one core, so that a simulated device is one core. *Scratch space*: operators that need temporary
# memory find it in 64 places and not in four; all CPU contexts share them, and take them in turn.
# *Allocator*: memory that is freed stays with the program. Two devices train with none of them,
# with one kind, and with all. **Predict:** which kind matters most?

# %% tags=["measured", "predict"]
threads = {name: SETTINGS[name] for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]}
scratch = {"MXNET_CPU_TEMP_COPY": SETTINGS["MXNET_CPU_TEMP_COPY"]}
kinds = {
    "none": {},
    "threads": threads,
    "scratch space": scratch,
    "allocator": allocator,
    "all": ours,
}

lines = {}
environments = {}
for kind, settings in kinds.items():
    lines[kind] = f"{on_both} --stock"
    environments[kind] = stock | settings
times = race(lines, STEPS, ROUNDS, environments)

for kind in kinds:
    low, median, high = spread(times["none"] / times[kind])
    print(f"{kind:13} {median:.2f} times as fast as none ({low:.2f} to {high:.2f})")

# %% [markdown]
# <details><summary>What came out</summary>
#
# On quiet cores scratch space alone brings most.
#
# </details>
#
# As MXNet comes, an operator that needs one of the
# four shared spaces has to wait while another uses it (`src/resource.cc`); we think that this is
# the cause. GPUs don't share scratch space or a pool of memory: each has its own
# (`src/resource.cc`, `src/storage/storage.cc`, MXNet 1.9.1). So two of the settings have no
# counterpart there. The threads still concern CPU work, such as reading data.
#
# ## Summary
#
# - Wait before each look at the clock, warm up, take turns, repeat, and leave disturbed rounds out.
# - Name the baseline. For two CPU devices ours is one device with both cores, the fastest
#   *other* way to train this one network that we tried.
# - Of the course's settings, scratch space alone brings two devices most.
