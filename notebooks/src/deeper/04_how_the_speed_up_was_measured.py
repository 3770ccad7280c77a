# %% [markdown]
# # Deeper · How the speed-up was measured
#
# Chapter 04 says how much faster two devices are than one. Such a number is easily wrong, and a
# wrong one looks just like a right one.
#
# > **What you'll do:** measure in four wrong ways, and see what each does to the result. Build a
# > fair round. Give two devices each kind of the course's settings alone, and see how much faster
# > they get. Find out what the all-reduce costs.
# >
# > **What you'll learn:** to wait, to warm up, to repeat, and to look at who else uses the machine;
# > how contestants take turns, and which rounds don't count; what scratch space, threads and
# > allocator have to do with two devices.
# >
# > **What you need:** chapter 04. No GPU. Reading takes {reading time}. Running takes about two
# > minutes.

# %%
import os
import sys
import time

from helpers import devices
from helpers.by_hand import get_params, init_params, train_batch
from helpers.engine import ALLOCATOR, SETTINGS
from helpers.timing import Others, Team, in_turns, spread

from mxnet import nd

# %% [markdown]
# ## Four ways to be wrong
#
# **1. Not waiting.** `helpers.by_hand` has chapter 04's network and step. We take twelve steps on
# two devices and look at the clock twice: when Python has started them all, and when the devices
# have done them. **Predict:** what share of the time has passed at the first look?

# %%
two = devices(2)
x = nd.random.uniform(shape=(256, 1, 28, 28))
y = nd.zeros(256)
replicas = [get_params(init_params(), two[0]), get_params(init_params(), two[1])]
train_batch(x, y, replicas, two, lr=0.01)
nd.waitall()

begin = time.perf_counter()
for step in range(12):
    train_batch(x, y, replicas, two, lr=0.01)
started = time.perf_counter() - begin
nd.waitall()
done = time.perf_counter() - begin

print(f"started after {started:.3f} s, done after {done:.3f} s")
assert started < 0.7 * done

# %% [markdown]
# A program that doesn't wait measures how fast Python fills the queues. `nd.waitall` waits for all
# work; `asscalar` and `asnumpy` wait for what they return.
#
# **2. A cold start.** `lenet_contestant.py`, beside chapter 04, is a program that trains for as
# many steps as each line that it reads says. A `Team` starts such programs, sends them a line, and
# waits for their answer. A program has the settings of its environment: `stock` has none of this
# course's, `ours` has all of them. Here is one program, from its first step:

# %%
allocator = {variable: str(value) for number, value, variable in ALLOCATOR}
everything = SETTINGS | allocator
stock = {name: value for name, value in os.environ.items() if name not in everything}
ours = stock | everything

CONTESTANT = "../lenet_contestant.py"


def program(*arguments):
    return [sys.executable, CONTESTANT, "--kind", two[0].device_type, *arguments]


first = str(two[0].device_id)
second = str(two[1].device_id)
team = Team([program("--devices", first, second)], order="1", environment=ours)
for step in range(1, 7):
    begin = time.perf_counter()
    team()  # one step
    seconds = time.perf_counter() - begin
    print(f"step {step}: {seconds:.3f} s")
team.close()

# %% [markdown]
# The first step took longest in our runs. We didn't test why: it takes memory from the system,
# among others. On GPUs the first steps also contain cuDNN's trials of algorithms
# (`MXNET_CUDNN_AUTOTUNE_DEFAULT`, `cudnn_convolution-inl.h`, MXNet 1.9.1).
#
# **3. Measuring once.** Steps 2 to 6 differ from one another too, so no single one is the answer.
#
# **4. While others work.** `Others` says what share of the machine's CPU time went to other
# programs while its block ran. Here is the same training without and with a neighbour that keeps
# one core busy:

# %% tags=["fold"]
# measure: six steps on two devices, three times alone and three times beside a busy program
import signal
import subprocess

BUSY = "import time; end = time.time() + 60\nwhile time.time() < end: pass"


def start_neighbour():
    """A program that is nobody's child, so that its work isn't counted as ours."""
    shell = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, BUSY]
    return int(subprocess.check_output(shell))


def six_steps():
    for _ in range(6):
        train_batch(x, y, replicas, two, lr=0.01)
    nd.waitall()


for who in ["alone", "beside a busy program"]:
    neighbour = start_neighbour() if who != "alone" else None
    try:
        for _ in range(3):
            with Others() as others:
                begin = time.perf_counter()
                six_steps()
                seconds = time.perf_counter() - begin
            theirs = others.share * os.cpu_count() * seconds
            print(f"{who:22} {seconds:.2f} s, in which others used {theirs:.2f} s of CPU time")
    finally:
        if neighbour:
            os.kill(neighbour, signal.SIGKILL)

# %% [markdown]
# On two cores the neighbour made the same training take much longer, at worst nearly twice as long.
# Nothing in those seconds says so: only the other number does.
#
# ## A fair round
#
# So contestants are warm, take turns, and are measured several times, and a round in which others
# used the machine doesn't count. If a machine gets slower for a while, it gets slower for all. A
# contestant is a function without arguments; a `Team` can be called like one.

# %%
def one_round(contestants):
    seconds = {}
    for name, contestant in contestants.items():
        begin = time.perf_counter()
        contestant()  # returns when its work is done
        seconds[name] = time.perf_counter() - begin
    return seconds

# %% tags=["measured"]
one_team = Team([program("--devices", first)], order="6", environment=ours)
two_team = Team([program("--devices", first, second)], order="6", environment=ours)
contestants = {"one device": one_team, "two devices": two_team}
one_round(contestants)  # warms up

for attempt in range(5):
    with Others() as others:
        row = one_round(contestants)
    ratio = row["one device"] / row["two devices"]
    word = "kept" if others.share <= 0.02 else "discarded"
    print(f"{word:9}: two devices are {ratio:.2f} times as fast; others' share {others.share:.0%}")

one_team.close()
two_team.close()

# %% [markdown]
# Each round gives a ratio of its own, of two measurements that were made one right after the other.
# `helpers.timing.in_turns` does the same, in a random order, until enough rounds are kept, but
# takes at most twice as many. If fewer than three of them were quiet, it uses all, and says so.

# %%
def compete(teams, rounds):
    contestants = {}
    try:
        for name, (commands, environment) in teams.items():
            contestants[name] = Team(commands, order="6", environment=environment)
        return in_turns(contestants, rounds, quiet=0.02)  # seconds of each, [rounds]
    finally:
        for team in contestants.values():
            team.close()

# %% [markdown]
# ## What the settings bring
#
# `import helpers` makes three kinds of settings before MXNet is loaded:
#
# - *threads*: an operator uses one core, and so a simulated device is one core;
# - *scratch space*: operators that need temporary memory find it in 64 places and not in four,
#   which all CPU contexts share;
# - *allocator*: memory that is freed stays with the program, so that the next operator needn't ask
#   the system for it.
#
# Two devices train with none of them, with one kind, and with all. **Predict:** which kind matters
# most?

# %%
threads = {name: SETTINGS[name] for name in ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]}
scratch = {"MXNET_CPU_TEMP_COPY": SETTINGS["MXNET_CPU_TEMP_COPY"]}

kinds = {
    "none": {},
    "threads": threads,
    "scratch space": scratch,
    "allocator": allocator,
    "all": everything,
}
for kind, settings in kinds.items():
    print(f"{kind:13}", settings)
assert SETTINGS == threads | scratch

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
teams = {}
for kind, settings in kinds.items():
    teams[kind] = ([program("--devices", first, second)], stock | settings)
times = compete(teams, ROUNDS)

for kind in kinds:
    low, median, high = spread(times["none"] / times[kind])
    print(f"{kind:13} {median:.2f} times as fast as none "
          f"(half of the rounds: {low:.2f} to {high:.2f})")

# %% tags=["fold"]
# draw: two devices with each kind of setting, as multiples of none, a dot a round
from helpers.plotting import bars, show

ratios = {kind.replace(" ", "\n"): times["none"] / times[kind] for kind in kinds}
fig, ax = bars("Two devices, with each kind of setting", "speed, as a multiple of none", ratios)
ax.axhline(1, color="black", lw=1, ls="--")
show(fig, alt="Speed of two devices as a multiple of that without settings: none, threads alone, "
              "scratch space alone, allocator alone, and all; a dot a round, with medians.")

# %% tags=["fold"]
# check: the contestant finds the settings that it is given, and no others of the course's
for kind, settings in kinds.items():
    with Team([program("--devices", first)], environment=stock | settings) as team:
        (found,) = [ready.split()[1:] for ready in team.ready]
    found = {setting for setting in found if setting.split("=")[0] in everything}
    assert found == {f"{name}={value}" for name, value in settings.items()}, f"{kind}: {found}"

# %% [markdown]
# On a quiet machine scratch space alone brought most: 1.7 to 1.9 in our runs. As MXNet comes, an
# operator that needs one of the four shared spaces has to wait while another uses it
# (`src/resource.cc`); we think that this is the cause. On a busy machine all of this shrinks. As a
# rule of thumb, two rows whose halves overlap have no winner.
#
# Threads alone brought nothing, or cost some. The course sets them because they make a simulated
# device one core. Otherwise a speed-up would mix devices with threads.
#
# Chapter 04's *stock MXNet* is one device with none of the settings. On x86 an operator then gets
# half of the logical processors (`src/engine/openmp.cc`, MXNet 1.9.1): one of two, so on two cores
# it has no more of them than *one device*.
#
# **On GPUs:** an operator runs on one GPU, so *stock MXNet* is one device there too. Scratch space
# and allocator are settings for CPUs: each GPU has scratch space and a pool of memory of its own
# (`src/resource.cc`, `src/storage/storage.cc`, MXNet 1.9.1).
#
# ## What the all-reduce costs
#
# Two trainings that never communicate, each on half of the batch, do the work of two devices
# without an all-reduce. How much faster are they? One device and two programs that share nothing
# run in the same rounds, as in chapter 04.

# %% tags=["measured", "few:ROUNDS = 9=>ROUNDS = 2"]
ROUNDS = 9
teams = {
    "one device": ([program("--devices", first)], ours),
    "two devices": ([program("--devices", first, second)], ours),
    "never communicate": ([program("--devices", first, second, "--apart")], ours),
    "two processes": ([program("--devices", first, "--images", "128"),
                       program("--devices", second, "--images", "128")], ours),
}
times = compete(teams, ROUNDS)

for name in ["one device", "never communicate", "two processes"]:
    low, median, high = spread(times[name] / times["two devices"])
    print(f"two devices take {1 / median:.2f} times as long as {name} "
          f"(half of the rounds: {1 / high:.2f} to {1 / low:.2f})")

# %% [markdown]
# The second line is what `train_batch` on two devices does more: the all-reduce, with the waiting
# that it causes. If its range includes 1, this run shows no cost. Eight arrays of 129,068 numbers
# in all are little beside the convolutions. That doesn't hold for every network; deeper: Counting
# operations, predicting GPUs asks when it does. In the third line each half has a process of its
# own, so the two don't share Python and the engine either.

# %% tags=["fold"]
# check: LeNet's 129,068 parameters; a program trains on what it is told, then answers
import psutil

arrays = init_params()
assert len(arrays) == 8 and sum(array.size for array in arrays) == 129_068
place, other = str(two[0]), str(two[1])
told = {  # arguments: the answer, and how many devices work
    ("--devices", first): (f"3072 images, 1 trainings: {place}", 1),
    ("--devices", first, second): (f"3072 images, 1 trainings: {place} {other}", 2),
    ("--devices", first, second, "--apart"): (f"3072 images, 2 trainings: {place} {other}", 2),
    ("--devices", first, "--images", "128"): (f"1536 images, 1 trainings: {place}", 1),
}


def thread_seconds(process):
    """CPU seconds that each of its threads has used: {thread: seconds}."""
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


working = {}
for arguments, (answer, number) in told.items():
    before = set(psutil.Process().children())
    with Team([program(*arguments)], order="12", environment=ours) as team:
        (contestant,) = set(psutil.Process().children()) - before
        start = thread_seconds(contestant)
        assert team() == [answer], arguments
        end = thread_seconds(contestant)
        time.sleep(0.5)
        late = sum(thread_seconds(contestant).values()) - sum(end.values())
        assert late < 0.1, "it answered before it was done"
    used = [seconds - start.get(thread, 0) for thread, seconds in end.items()]
    working[arguments] = sum(seconds > 0.25 * sum(used) for seconds in used)

# %% [markdown]
# A program says itself which devices it used. Can that be trusted? If all shards were sent to
# device 0, its answer would be the same. But on a CPU each device has a thread of its own, and the
# system counts each thread's CPU time. So we count the threads that did more than a quarter of the
# work:

# %% tags=["fold"]
# check: as many threads work as a program has devices
for arguments, (answer, number) in told.items():
    if two[0].device_type == "cpu" and psutil.LINUX:
        print(f"{' '.join(arguments):24} {working[arguments]} working threads")
        assert working[arguments] == number, "the work is elsewhere"

# %% [markdown]
# ## Summary
#
# - Wait before each look at the clock, and take some steps before the first.
# - Let contestants take turns, compare them round by round, and say how much rounds differ.
# - Look at who else uses the machine, and leave disturbed rounds out.
# - Of the course's settings, scratch space alone brought two devices most, on a quiet machine.
# - A program's own word isn't proof of where it works; the CPU time of its threads is.
# - The number to compare with is what two trainings reach that never communicate.
