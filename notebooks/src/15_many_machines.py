# %% [markdown]
# # 15 · Many machines
#
# When one machine is not enough, training runs on several, and sooner or later one of them fails.
# This chapter gets the training back, bit for bit.
#
# ## What you'll do
#
# Start processes with `torchrun`, and write a training program that can be killed. Kill it, and
# resume. Leave parts out of its checkpoint. Let a whole machine leave.
#
# ## What you'll learn
#
# - how a process learns its place among many;
# - what a checkpoint must hold, how to write it, and how to test it;
# - which missing part does damage.
#
# ## What you need
#
# Chapter 14, and PyTorch (`make setup TORCH=1`). No GPU and no second machine. Reading takes
# {reading time}, running about a minute and a half.

# %% tags=["torch"]
try:
    import torch
except ImportError as error:
    raise ImportError("This chapter needs PyTorch: `make setup TORCH=1` installs it") from error

import tempfile
from pathlib import Path

from helpers import load_data
from helpers.cluster import Failed, torchrun

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)  # our shared disk

# %% [markdown]
# ## torchrun: who am I?
#
# Each machine runs `torchrun` once, and `torchrun` starts one process for each of the machine's
# devices. The `torchrun`s meet at an address that all were told, the *rendezvous*, and there the
# machines are put in order.
#
# ![Two machines. On machine 0, torchrun has started two processes, with rank 0 and rank 1; on
# machine 1, two with rank 2 and rank 3. Their local ranks are 0 and 1 on each machine. Both
# torchruns point to the rendezvous.](src/drawings/torchrun.svg)
#
# How does a process learn its place? `torchrun` sets variables in its environment. `RANK` is its
# number in the whole job, `LOCAL_RANK` its number on its machine, `GROUP_RANK` the machine's
# number, and `WORLD_SIZE` the number of processes. This program prints them:

# %% tags=["torch"]
who = """
import os, sys

line = ""
for name in ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"]:
    line += f"{name} {os.environ[name]}  "
sys.stdout.write(line + "\\n")
"""
with open(folder / "who.py", "w") as file:
    file.write(who)

# %% [markdown]
# On each of two machines, the same command is run. HOST is the one that keeps the rendezvous.
#
# ```
# torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:9000 who.py
# ```
#
# Here we run it twice on this computer. **Predict:** what does the last process print?

# %% tags=["torch", "fold"]
# measure: what who.py prints on two machines; each is a torchrun on this computer
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # 0 means: any port that is free
        return listener.getsockname()[1]


def start_machine(port, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run"]  # this is `torchrun`
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    command += arguments
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


port = free_port()
options = ["--nnodes=2", "--nproc-per-node=2", str(folder / "who.py")]
first = start_machine(port, *options)
second = start_machine(port, *options)
text = first.communicate(timeout=200)[0] + second.communicate(timeout=200)[0]
lines = sorted(text.splitlines())
for line in lines:
    print(line.strip())

# %% tags=["torch", "fold"]
# check: four processes, each rank once, two on each machine
expected = []
for rank in range(4):
    line = f"RANK {rank} LOCAL_RANK {rank % 2} GROUP_RANK {rank // 2} WORLD_SIZE 4"
    expected.append(line.split())
assert [line.split() for line in lines] == expected

# %% [markdown]
# On a machine with GPUs, `LOCAL_RANK` chooses the process's device: `cuda:0`, `cuda:1`.
#
# **Mind:** the rendezvous listens on all addresses of its machine, and so does the store in which
# the processes find each other. Put a firewall in front.
#
# From now on we start `torchrun` here, by `helpers.cluster.torchrun`. It returns what each process
# printed.
#
# ## A program that can be killed
#
# If a process fails, `torchrun` ends the others. With `--max-restarts` it then starts *all* of them
# anew (`torch/distributed/run.py`). The new processes have their program and their arguments.
# Everything else is gone, unless it is in a file, a *checkpoint*. What must that hold?
#
# ![Four things change during training: the model's weights, the optimizer's momentum, the step, and
# the random state of each rank. All four go into the checkpoint. New processes read all four from
# it.](src/drawings/checkpoint.svg)
#
# Cells that begin with `# resumable_train.py` also go into a file that you keep,
# [resumable_train.py](resumable_train.py). It trains LeNet, with dropout, so that random numbers
# matter:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
"""Trains LeNet so that it can be killed: torchrun --nproc-per-node=2 resumable_train.py --help"""

import argparse
import os
import signal
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAST = 48  # steps: three epochs of 16


def dropout_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))

# %% [markdown]
# ### The step tells which images come next
#
# Which 32 of the 512 images are in a step's batch? If the step's number alone decides, a checkpoint
# needs only that. The epoch's number is the seed of its order:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def batch_rows(step):
    epoch = step // 16
    place = step % 16  # in the epoch
    generator = torch.Generator().manual_seed(epoch)  # the same order on every rank
    order = torch.randperm(512, generator=generator)
    return order[32 * place : 32 * place + 32]

# %% [markdown]
# All ranks draw the same order, and each takes its share of every batch:

# %% tags=["torch"]
rows = batch_rows(step=20)
print("rank 0 of 2:", rows[0::2])  # every second row, from the first
print("rank 1 of 2:", rows[1::2])

# %% tags=["torch", "fold"]
# check: each epoch has every image once, whatever the number of ranks, and an order of its own
for k in [1, 2, 3, 5]:
    seen = []
    for step in range(16, 32):
        for rank in range(k):
            share = batch_rows(step)[rank::k]
            assert len(share) > 0, "every rank has images in every step"
            seen.extend(share.tolist())
    assert sorted(seen) == list(range(512)), "each image once"
assert not torch.equal(batch_rows(0), batch_rows(16)), "another order in the next epoch"

# %% [markdown]
# ### What the checkpoint holds
#
# Four things. Each rank has random numbers of its own, so that the ranks don't drop the same units.
# `all_gather_object` collects their states.

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def snapshot(model, optimizer, step):
    random_states = [None] * dist.get_world_size()
    dist.all_gather_object(random_states, torch.get_rng_state())
    return {
        "model": model.module.state_dict(),  # `module` is the network within DDP
        "optimizer": optimizer.state_dict(),  # the momentum
        "step": step,  # steps that are done
        "random": random_states,  # one for each rank: the next dropout masks
    }

# %% [markdown]
# ### How it is written
#
# What if the process is killed *while it writes*? So it writes another file, and renames that when
# it is complete. Whoever opens the name finds the old file or the new one, whole (POSIX, `rename`).
# (`fsync` is for a power failure, which we can't test.) The disk is one that all machines share.

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def save(state, path):
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)  # the rename


def checkpoint(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)  # all ranks take part
    if dist.get_rank() == 0:  # one writes for all
        save(state, path)

# %% [markdown]
# ### The way back
#
# Each thing goes where it came from:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def restore(path, model, optimizer):
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):  # a rank that is new keeps its own
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]

# %% [markdown]
# ### The program
#
# A training with DDP (chapter 14) begins like this. Before the first step, each rank seeds its own
# dropout masks:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def new_training(seed):
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 * seed + dist.get_rank())
    return model, optimizer

# %% [markdown]
# The accident, for the test: with `--kill-at 22`, rank 1 kills itself before step 22, but only at
# its first start.

# %% tags=["torch", "fold", "file:resumable_train.py"]
# check: what `--kill-at` and `--leave-at` do, at the first start only
def accident(step, options):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if step == options.kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == options.leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)


# %% [markdown]
# The loop saves before every fourth step, and at the end. We keep loss and weights of each step, to
# compare them.

# %% tags=["torch", "file:resumable_train.py", "trains"]
# resumable_train.py
def train_from(begin, path, model, optimizer, options):
    rank = dist.get_rank()
    k = dist.get_world_size()
    images, labels = torch.load(f"{options.folder}/data.pt")
    losses = []
    weights = []
    for step in range(begin, LAST):
        if step % 4 == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, options)
        rows = batch_rows(step)[rank::k]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    checkpoint(model, optimizer, LAST, path)
    return torch.tensor(losses), torch.stack(weights)

# %% [markdown]
# And the program itself. If there is a checkpoint, it goes on from there. It can do several
# trainings, one after the other, each with a checkpoint of its own.

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def train_all(options):
    dist.init_process_group("gloo")
    for name in options.names:
        path = f"{options.folder}/{name}.pt"
        model, optimizer = new_training(options.seed)
        begin = 0
        if os.path.exists(path):
            begin = restore(path, model, optimizer)
        print(f"{name} begins at step {begin}; ranks: {dist.get_world_size()}")
        results = train_from(begin, path, model, optimizer, options)
        torch.save(results, f"{options.folder}/{name}.rank{dist.get_rank()}")
    dist.destroy_process_group()

# %% tags=["torch", "fold", "file:resumable_train.py"]
# check: the options are read where this is a file (a notebook is `__main__` too, but no file)
if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where data.pt is, and checkpoints go")
    parser.add_argument("names", nargs="+", help="of the trainings")
    parser.add_argument("--seed", type=int, default=0, help="of the dropout masks")
    parser.add_argument("--kill-at", type=int, help="step before which rank 1 is killed")
    parser.add_argument("--leave-at", type=int, help="step before which this machine leaves")
    try:
        train_all(parser.parse_args())
    except RuntimeError:  # the other process is gone
        time.sleep(2)  # torchrun names the first that it finds dead: let that be the other one
        raise

# %% [markdown]
# ## Kill it, and resume
#
# 512 images go to the shared disk:

# %% tags=["torch", "measured"]
data = load_data("mnist", limit=512)
images = torch.tensor(data.train_images - data.train_images.mean())
labels = torch.tensor(data.train_labels).long()
torch.save([images, labels], folder / "data.pt")
print(data)


# %% [markdown]
# `run_anew` removes the checkpoint of an earlier run, and starts the program on two ranks. It
# returns what each rank printed:

# %% tags=["torch"]
def run_anew(name, *options, max_restarts=0):
    (folder / f"{name}.pt").unlink(missing_ok=True)
    return torchrun("resumable_train.py", 2, arguments=[folder, name, *options],
                    max_restarts=max_restarts, log=None)

# %% [markdown]
# First a run without accident:

# %% tags=["torch", "trains"]
printed = run_anew("whole")
print(printed[0], end="")
losses, whole = torch.load(folder / "whole.rank0")
print("weights after each step:", list(whole.shape))

# %% tags=["torch", "fold"]
# check: it learns, and both ranks have the same weights after each step
_, of_rank_1 = torch.load(folder / "whole.rank1")
assert torch.equal(whole, of_rank_1), "replicas are equal"
assert losses[-8:].mean() < 0.7 * losses[:8].mean(), "it learns"

# %% [markdown]
# Now rank 1 is killed before step 22, in the second epoch, and `torchrun` may not restart. The
# helper raises `Failed`. **Predict:** at which step is the checkpoint that is left?

# %% tags=["torch", "trains"]
try:
    run_anew("killed", "--kill-at", "22")
except Failed as error:
    print(str(error).split(" after")[0])

left = torch.load(folder / "killed.pt")
print("step:     ", left["step"])
print("model:    ", len(left["model"]), "arrays")
print("optimizer:", len(left["optimizer"]["state"]), "arrays of momentum")
print("random:   ", len(left["random"]), "states")

# %% [markdown]
# Steps 20 and 21 are lost, and have to be done again. This time one restart is allowed.
# **Predict:** how far from the unbroken run will the weights end?

# %% tags=["torch", "trains"]
printed = run_anew("again", "--kill-at", "22", max_restarts=1)
print(printed[0], end="")

_, again = torch.load(folder / "again.rank0")
difference = (again - whole[20:]).abs().max().item()
print("largest difference of a weight, after any of the last 28 steps:", difference)

# %% [markdown]
# Bit for bit. And the last checkpoints of both runs are the same in all four parts:

# %% tags=["torch", "fold"]
# check: after step 48 the checkpoints are equal: weights, momentum, step, both random states
def same(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(a[i], b[i]) for i in range(len(a)))
    return a == b


assert difference == 0
of_whole = torch.load(folder / "whole.pt")
of_again = torch.load(folder / "again.pt")
for part in ["model", "optimizer", "step", "random"]:
    assert same(of_whole[part], of_again[part]), part
    assert not same(of_whole[part], left[part]), f"{part} should have changed since step 20"
assert left["step"] == 20
assert of_whole["step"] == 48
assert not same(of_whole["random"][0], of_whole["random"][1]), "each rank has its own"

# %% [markdown]
# **Test a checkpoint by a kill, and compare bit for bit.**
#
# (With three ranks or more, last digits may differ, since DDP reorders its buckets after a
# process's first step: `should_rebuild_buckets` in c10d's `reducer.hpp`. **On GPUs** so may those
# of some operators, unless you call `use_deterministic_algorithms`.)
#
# ### Killed while it writes
#
# Is the rename needed? We kill two processes when half of the new checkpoint is written: one writes
# into the old file, one calls `save`.

# %% tags=["torch", "fold"]
# check: two processes killed half-way: in place the checkpoint is torn, with `save` it is the old
half_way = """
import os, shutil, signal, sys, torch
from resumable_train import save

def killed(number):  # in place of fsync
    os.ftruncate(number, os.fstat(number).st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

def save_in_place(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())

os.fsync = killed
state = torch.load(sys.argv[1] + "/killed.pt")
for write in [save, save_in_place]:
    path = f"{sys.argv[1]}/{write.__name__}.pt"
    shutil.copy(sys.argv[1] + "/killed.pt", path)
    if os.fork() == 0:
        write(state, path)
        os._exit(0)
    assert os.wait()[1] == signal.SIGKILL, "it was killed"
"""
subprocess.run([sys.executable, "-c", half_way, folder], check=True)
assert same(torch.load(folder / "save.pt"), left), "the old one, whole"
complete = (folder / "killed.pt").stat().st_size
assert 0 < (folder / "save.pt.new").stat().st_size < complete, "the new one, torn, aside"
try:
    torch.load(folder / "save_in_place.pt")
    raise AssertionError("in place it should be torn")
except RuntimeError as error:
    print("written in place:", str(error).split(":")[0])
print("by `save`:        the old checkpoint, of step", torch.load(folder / "save.pt")["step"])

# %% [markdown]
# ## What if a part is missing?
#
# A test must also fail when it should. We take the checkpoint that the killed run left, and put
# into one part what a *new* process has there, as if the program had forgotten this part. A new
# process has no momentum, and its random numbers begin at its seed:

# %% tags=["torch"]
no_momentum = {**left["optimizer"], "state": {}}  # a copy of it, with another "state"
new_0 = torch.Generator().manual_seed(0).get_state()  # rank 0's, when it is new
new_1 = torch.Generator().manual_seed(1).get_state()  # rank 1's

# %% [markdown]
# Four cases. The second knows its epoch only, and begins it again. The fourth gives rank 0's random
# state to rank 1, too.

# %% tags=["torch"]
rank_0 = left["random"][0]
forgot = {
    "optimizer": {**left, "optimizer": no_momentum},
    "step in the epoch": {**left, "step": 16},
    "random states": {**left, "random": [new_0, new_1]},
    "rank 1's random state": {**left, "random": [rank_0, rank_0]},
}

# %% [markdown]
# We resume from all four. For comparison, we also start an *unbroken* run with other dropout masks,
# from the first step on. **Predict:** which of them raises an error, or has a loss that looks
# wrong?

# %% tags=["torch", "trains", "measured"]
run_anew("another seed", "--seed", "1")
for name, state in forgot.items():
    torch.save(state, folder / f"{name}.pt")
torchrun("resumable_train.py", 2, arguments=[folder, *forgot], timeout=300, log=None)

print(f"{'unbroken':22} loss of the last 8 steps {losses[-8:].mean():.2f}")
weights_of = {}
for name in ["another seed", *forgot]:
    its_losses, weights_of[name] = torch.load(folder / f"{name}.rank0")
    print(f"{name:22} loss of the last 8 steps {its_losses[-8:].mean():.2f}")

# %% [markdown]
# Nothing raised, and without the unbroken run none of these losses would look wrong. How far are
# the weights from the unbroken run's?

# %% tags=["torch", "measured", "fold"]
# draw: distance of the weights from the unbroken run's, for each missing part and another seed
from helpers.plotting import curves, show

labels_of = {
    "another seed": "unbroken, another seed",
    "optimizer": "no optimizer state: damage",
    "step in the epoch": "no step in the epoch: damage",
    "random states": "no random states",
    "rank 1's random state": "not rank 1's random state",
}
lines = {}
far = {}
for name, label in labels_of.items():
    difference = torch.linalg.norm(weights_of[name][-28:] - whole[-28:], dim=1)  # last 28 steps
    far[name] = difference / torch.linalg.norm(whole[-28:], dim=1)
    lines[label] = (range(21, 49), 100 * far[name])
for name in forgot:
    assert 0.02 < far[name][-1] < far["another seed"][-1], name
title = "Another seed moves the weights further than any missing part"
fig, ax = curves(title, "step", "distance of the weights (%)", lines)
ax.set_ylim(bottom=0)
show(fig, alt="How far the weights are from the unbroken run's over 28 steps after a resumption "
              "without optimizer state, step, random states, or rank 1's own, and in an unbroken "
              "run with another seed: that is the furthest; those without a part move away.")

# %% [markdown]
# Every run moves away, and the unbroken one with another seed is the furthest. So a distance is not
# damage. *Damage* is what nobody meant the training to do. What did each missing part do?
#
# **Optimizer: damage.** The momentum is a sum of many gradients, and it starts from zero. So the
# first step after the resumption is too short:

# %% tags=["torch", "measured", "fold"]
# measure: the length of the first step after the resumption
before = whole[19]  # the weights in the checkpoint, after 20 steps
expected = torch.linalg.norm(whole[20] - before)
for name in forgot:
    first_step = torch.linalg.norm(weights_of[name][0] - before)
    print(f"{name:22} first step: {first_step / expected:.0%} of the unbroken run's length")
    assert (first_step < 0.75 * expected) == (name == "optimizer"), name

# %% [markdown]
# With Adam, the second moments and the count of its steps are lost, too.
#
# **Step: damage.** The second epoch begins again, so its first images are trained on twice:

# %% tags=["torch", "fold"]
# measure: how many images are seen twice in the second epoch
for resumed_at in [20, 16]:
    times_seen = torch.zeros(512)
    for step in [*range(16, 20), *range(resumed_at, 32)]:  # before and after the resumption
        times_seen[batch_rows(step)] += 1
    twice = (times_seen == 2).sum().item()
    print(f"resumed at step {resumed_at}: {twice} of 512 images are seen twice in the second epoch")
assert twice == 128

# %% [markdown]
# A learning rate that changes with the step would be wrong, too (exercise 3).
#
# **Random states: no damage.** Dropout draws other masks, as good as those of another seed.
#
# **Rank 1's random state: hardly any.** From then on both ranks draw the same masks, one for each
# half of the batch. Each is still drawn fairly, but there are half as many of them.
#
# Where random numbers also shuffle the images, though, a lost state shows some images twice and
# others not at all. NumPy's, Python's and a GPU's generators have states of their own.
#
# ## Elastic: a machine leaves
#
# With `--nnodes=1:2`, `torchrun` accepts one or two machines. If one joins or leaves, it starts all
# processes anew, on the machines that are there (`run.py`, "Membership Changes"). We start two
# machines of one process each, and one leaves before step 22. **Predict:** at which step does the
# other go on?

# %% tags=["torch", "trains", "fold"]
# measure: what the machine that stays prints
settings = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1"}
os.environ.update(settings)
(folder / "elastic.pt").unlink(missing_ok=True)
port = free_port()
options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
waits = "last_call_timeout=6,keep_alive_interval=1"  # seconds
work = ["resumable_train.py", str(folder), "elastic"]
leaves = start_machine(port, *options, f"--rdzv-conf=is_host=0,{waits}", *work, "--leave-at", "22")
time.sleep(2)  # so that it is there when the other begins to wait for it
stays = start_machine(port, *options, f"--rdzv-conf=is_host=1,{waits}", *work)
try:
    elastic_printed = stays.communicate(timeout=200)[0]
finally:
    stays.terminate()
    leaves.terminate()
    leaves.communicate()
for name in settings:
    del os.environ[name]
print(elastic_printed, end="")

# %% [markdown]
# It goes on alone, from the checkpoint that both had written. Is the result right? It can't be
# that of the unbroken run on two ranks, since one rank draws other masks. So we compare it with
# the killed run's checkpoint, which is the same one, resumed on one rank:

# %% tags=["torch", "trains"]
torch.save(left, folder / "alone.pt")
torchrun("resumable_train.py", 1, arguments=[folder, "alone"], log=None)

_, elastic = torch.load(folder / "elastic.rank0")
_, alone = torch.load(folder / "alone.rank0")
print("largest difference:", (elastic - alone).abs().max().item())

# %% tags=["torch", "fold"]
# check: the machine that stayed began again at step 20, alone, and there is no difference
assert elastic_printed.splitlines()[-1] == "elastic begins at step 20; ranks: 1"
assert torch.equal(elastic, alone)
assert not torch.equal(alone, whole[20:]), "two ranks would have made another run"

# %% [markdown]
# Bit for bit. A step has 32 images on any number of ranks, so weights, momentum and step still fit.
# The random states don't: rank 0 now draws the masks of all 32 images. And where the number of
# ranks doesn't divide 32, DDP's mean is not the batch's (exercise 2).
#
# If the machine that keeps the rendezvous is lost, the job ends (`run.py`, "Failure Modes").
#
# MXNet's own way over several machines: deeper: The parameter server. What links and memory allow,
# and how often to save: deeper: Costs on paper.

# %% [markdown]
# ## Summary
#
# - `torchrun` gives each process a rank and a local rank. After a failure it ends the rest and, if
#   `--max-restarts` (default 0) allows, starts all anew. It brings back no state.
# - A checkpoint holds model, optimizer, step, and each rank's random state. Resumed from it, LeNet
#   on two ranks ended bit for bit like the unbroken run.
# - Write aside, then rename. Test a checkpoint by a kill.
# - No error says that a part is missing. A lost optimizer state or step does damage; a lost random
#   state is another seed, if it decides dropout only.
#
# **Further reading.** *Torch Distributed Elastic* in PyTorch's documentation.

# %% [markdown]
# ## Exercises
#
# 1. **Seeds that differ.** Suppose `batch_rows` seeded its generator with the rank as well. Show
#    for two ranks that images are lost and doubled, and count them in an epoch.
# 2. **Three ranks come back.** 32 images on three ranks are 11, 11 and 10, and DDP takes the mean
#    of the three gradients. Show with numbers that a mean of means is not the batch's mean. By what
#    must each rank multiply the *sum* of its losses?
# 3. **A schedule.** Let `torch.optim.lr_scheduler.StepLR` halve the learning rate every 10 steps. A
#    program resumes at step 24, and forgot the scheduler's state. Which part of its checkpoint
#    holds the present rate? At which step is the next halving, and when should it be?

# %% [markdown]
# ### Answer 1
#
# Each rank takes another half of the images, so an image is missed by both with probability ¼.

# %% tags=["torch", "solution"]
times_seen = torch.zeros(512)
for rank in range(2):
    order = torch.randperm(512, generator=torch.Generator().manual_seed(1000 + rank))
    for place in range(16):
        rows = order[32 * place : 32 * place + 32]
        times_seen[rows[rank::2]] += 1
lost = (times_seen == 0).sum().item()
doubled = (times_seen == 2).sum().item()
print(f"{lost} of 512 images are lost, and {doubled} are doubled: about a quarter")
assert times_seen.sum() == 512
assert lost == doubled > 100

# %% [markdown]
# ### Answer 2
#
# With $s$ for the sum of the losses of a rank, DDP's mean is $(s_0 + s_1 + s_2) / 3$ if each rank
# takes its sum. The batch's mean is $(s_0 + s_1 + s_2) / 32$. So each rank multiplies its sum by
# 3/32, and any $k$ ranks by $k/32$. We check it on three processes, resumed from the killed run's
# checkpoint, without dropout, against one.

# %% tags=["torch", "solution", "trains"]
three = """
import sys, torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from resumable_train import batch_rows, new_training, restore

dist.init_process_group("gloo")
rank, k = dist.get_rank(), dist.get_world_size()
model, optimizer = new_training(seed=0)
begin = restore(sys.argv[1] + "/killed.pt", model, optimizer)
model.eval()
images, labels = torch.load(sys.argv[1] + "/data.pt")
for step in range(begin, 32):
    rows = batch_rows(step)[rank::k]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[rows]), labels[rows], reduction="sum")
    (loss * k / 32).backward()
    optimizer.step()
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
torch.save(weights, f"{sys.argv[1]}/{k}-ranks-{rank}")
dist.destroy_process_group()
"""
(folder / "three.py").write_text(three)
for k in [1, 3]:
    torchrun(folder / "three.py", k, arguments=[folder], env={"PYTHONPATH": os.getcwd()}, log=None)
of_one = torch.load(folder / "1-ranks-0")
for rank in range(3):
    off = (torch.load(folder / f"3-ranks-{rank}") - of_one).abs().max() / of_one.abs().max()
    assert off < 1e-4, f"rank {rank} is {off} off"
print("three ranks equal one to 1e-4 of the largest weight (float32)")

sums = [11 * 1.0, 11 * 2.0, 10 * 4.0]  # ranks whose images have a loss of 1, of 2 and of 4
mean_of_means = (1.0 + 2.0 + 4.0) / 3
print(f"mean of means {mean_of_means:.3f}, mean of the batch {sum(sums) / 32:.3f}")
assert mean_of_means != sum(sums) / 32
assert abs(sum(s * 3 / 32 for s in sums) / 3 - sum(sums) / 32) < 1e-12

# %% [markdown]
# ### Answer 3
#
# The optimizer's state holds the present rate, so the first steps are right. But the scheduler
# counts from zero again: it halves the rate ten steps after the restart, at step 34 and not at 30.

# %% tags=["torch", "solution", "trains"]
def rates(begin, optimizer_state, scheduler_state):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    if scheduler_state is not None:
        scheduler.load_state_dict(scheduler_state)
    found = []
    for step in range(begin, 40):
        if step == 24:
            saved = optimizer.state_dict(), scheduler.state_dict()
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
        scheduler.step()
    return found, saved


unbroken, (optimizer_state, scheduler_state) = rates(0, None, None)
complete, _ = rates(24, optimizer_state, scheduler_state)
without, _ = rates(24, optimizer_state, None)
print("with the scheduler's state:", complete)
print("without:                   ", without)
assert complete == unbroken[24:]
assert without[0] == unbroken[24], "the rate itself is in the optimizer's state"
assert without != unbroken[24:]
