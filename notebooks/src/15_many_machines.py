# %% [markdown]
# # 15 · Many machines
#
# Training on several machines sooner or later loses one of them. This chapter gets it back, bit for
# bit.
#
# ## What you'll do
#
# Start processes with `torchrun`. Write a training program, kill it, and resume. Leave parts out of
# its checkpoint. Let a whole machine leave.
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
# {reading time}, running about two minutes.

# %% tags=["torch", "fold"]
# check: PyTorch is installed; `folder` is a temporary one, for all processes
try:
    import torch
except ImportError as error:
    raise ImportError("This chapter needs PyTorch: `make setup TORCH=1` installs it") from error

import tempfile
from pathlib import Path

from helpers.cluster import Failed
from ranks import ranks

scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)  # our shared disk

# %% [markdown]
# ## torchrun: who am I?
#
# Each machine runs `torchrun` once, and `torchrun` starts one process for each of the machine's
# devices. All `torchrun`s meet at the *rendezvous*, an address that one machine, HOST, keeps. There
# each machine gets its number.
#
# ![Two machines. On machine 0, torchrun has started two processes, with rank 0 and rank 1; on
# machine 1, two with rank 2 and rank 3. Their local ranks are 0 and 1 on each machine. Machine 0
# is HOST and keeps the rendezvous; both torchruns point to it.](src/drawings/torchrun.svg)
#
# How does a process learn its place? `torchrun` sets variables in its environment. `RANK` is its
# number in the whole job, `LOCAL_RANK` that on its machine, `GROUP_RANK` the machine's number, and
# `WORLD_SIZE` the number of processes. `who.py` prints the four, `os.environ["RANK"]` and so on.

# %% tags=["torch", "fold"]
# define: who.py, a program that prints the four variables
program = """
import os

line = ""
for name in ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"]:
    line += f"{name} {os.environ[name]}  "
print(line)
"""
with open(folder / "who.py", "w") as file:
    file.write(program)

# %% [markdown]
# On each of two machines, the same command is run (`c10d` is PyTorch's own rendezvous):
#
# ```
# torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:9000 who.py
# ```
#
# Here we run it twice on this computer:

# %% tags=["torch", "fold"]
# measure: what who.py prints on two machines; each is a torchrun on this computer
import re
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
lines = sorted(re.findall(r"RANK .*?WORLD_SIZE \d+", text))  # two may have shared a line
for line in lines:
    print(line)

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
# `torchrun` listens on all addresses of its machine: put a firewall in front.
#
# ## A program that can be killed
#
# If a process fails, `torchrun` ends the others. With `--max-restarts` it then starts *all* of them
# anew. They know only their program and their arguments. Everything else is gone, unless it is in a
# file, a *checkpoint*. What must that hold?
#
# ![Four things change during training: the model's weights, the optimizer's momentum, the step, and
# the random state of each rank. All four go into the checkpoint. New processes read all four from
# it.](src/drawings/checkpoint.svg)
#
# Cells that begin with `# resumable_train.py` go into a program that you keep,
# [resumable_train.py](resumable_train.py). So do three folded ones: imports and network, an
# accident, the command line. `dist` is `torch.distributed`, `F` is `torch.nn.functional`.

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: the program's imports, and LeNet with dropout, so that random numbers matter
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


def dropout_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 20, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(50 * 4 * 4, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))

# %% [markdown]
# A training with DDP (chapter 14) begins like this. The ranks' random numbers differ, so that they
# don't drop the same units:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def new_training(seed):
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 * seed + dist.get_rank())  # own dropout masks for each rank
    return model, optimizer

# %% [markdown]
# ### What the checkpoint holds
#
# Four things. `all_gather_object` fills a list with one object from each rank:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def snapshot(model, optimizer, step):
    random_states = [None] * dist.get_world_size()  # to be filled
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
# it is complete. A reader gets the old checkpoint or the new one, never half of one.

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def save(state, path):
    with open(f"{path}.new", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # onto the disk, against a power failure
    os.replace(f"{path}.new", path)  # the rename


def checkpoint(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)  # all ranks take part
    if dist.get_rank() == 0:  # one writes for all
        save(state, path)

# %% tags=["torch", "fold"]
# define: `print_parts` prints what a checkpoint holds
def print_parts(saved):
    print("model:    ", len(saved["model"]), "arrays")
    print("optimizer:", len(saved["optimizer"]["state"]), "arrays of momentum")
    print("step:     ", saved["step"])
    print("random:   ", len(saved["random"]), "states")

# %% [markdown]
# We try it with `ranks` of chapter 14, which runs a function in two processes. They write a
# checkpoint before they have trained. **Predict:** what does it hold?

# %% tags=["torch"]
def save_new(path, seed):
    model, optimizer = new_training(seed)
    checkpoint(model, optimizer, step=0, path=path)


ranks(save_new, folder / "new.pt", 0)
new = torch.load(folder / "new.pt")
print_parts(new)

# %% [markdown]
# No momentum yet.
#
# ### The step tells which images come next
#
# We train on 512 images, 32 in a step:

# %% tags=["torch", "measured", "fold"]
# define: 512 images and their labels, in data.pt
from helpers import load_data

data = load_data("mnist", limit=512)
images = torch.tensor(data.train_images - data.train_images.mean())
labels = torch.tensor(data.train_labels).long()
torch.save([images, labels], folder / "data.pt")
print(data)

# %% [markdown]
# Which 32? If the step's number alone decides, a checkpoint needs only that. The epoch's number is
# the seed of its order:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def batch_rows(step):
    epoch = step // 16
    place = step % 16  # in the epoch
    generator = torch.Generator().manual_seed(epoch)  # the same order on every rank
    order = torch.randperm(512, generator=generator)
    return order[32 * place : 32 * place + 32]

# %% [markdown]
# Each rank takes its share of every batch:

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
# So this is a step:

# %% tags=["torch", "file:resumable_train.py", "trains"]
# resumable_train.py
def train_step(step, model, optimizer, images, labels):
    rank = dist.get_rank()
    k = dist.get_world_size()
    rows = batch_rows(step)[rank::k]
    optimizer.zero_grad()
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    return loss.item()

# %% [markdown]
# ### The way back
#
# Each thing goes where it came from. (If there are more ranks than before, the new ones keep their
# random state.)

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def restore(path, model, optimizer):
    saved = torch.load(path)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]

# %% [markdown]
# `go_on` reads a checkpoint, trains a few steps, and writes the checkpoint again:

# %% tags=["torch", "trains"]
def go_on(path, steps):
    model, optimizer = new_training(seed=0)
    begin = restore(path, model, optimizer)
    for step in range(begin, begin + steps):
        loss = train_step(step, model, optimizer, images, labels)
    checkpoint(model, optimizer, begin + steps, path)
    return loss  # of the last step

# %% [markdown]
# Four steps; then, from the start again, three and one. **Predict:** do the last losses agree?

# %% tags=["torch", "trains", "measured"]
torch.save(new, folder / "small.pt")
at_once = ranks(go_on, folder / "small.pt", 4)

torch.save(new, folder / "small.pt")
ranks(go_on, folder / "small.pt", 3)
in_two = ranks(go_on, folder / "small.pt", 1)
print("four steps:   ", at_once)
print("three and one:", in_two)

# %% tags=["torch", "fold"]
# check: they agree in all digits; the ranks' losses differ, and four steps are recorded
assert at_once == in_two
assert at_once[0] != at_once[1]
assert torch.load(folder / "small.pt")["step"] == 4

# %% [markdown]
# ### The program, whole
#
# It takes 48 steps, three epochs of 16, and saves before every fourth and at the end. Its files are
# in one folder, which all machines must see:
#
# - `data.pt`: images and labels;
# - `NAME.pt`: the checkpoint of the training NAME. If it is there, training goes on from it;
# - `NAME.rank0`, `NAME.rank1`: a rank's results, loss and weights of each step.
#
# It can have an accident: with `--kill-at 22`, rank 1 kills itself before step 22, if it has not
# been restarted.

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: the accident, by `--kill-at` or `--leave-at`, at the first start only
def accident(step, kill_at, leave_at):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if step == kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)

# %% tags=["torch", "file:resumable_train.py", "trains"]
# resumable_train.py
LAST = 48


def train_or_resume(folder, name, seed, kill_at, leave_at):
    path = f"{folder}/{name}.pt"
    images, labels = torch.load(f"{folder}/data.pt")
    model, optimizer = new_training(seed)
    begin = 0
    if os.path.exists(path):
        begin = restore(path, model, optimizer)
    print(f"{name} begins at step {begin}; ranks: {dist.get_world_size()}")

    losses = {}  # by step
    weights = {}
    for step in range(begin, LAST):
        if step % 4 == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, kill_at, leave_at)
        losses[step] = train_step(step, model, optimizer, images, labels)
        weights[step] = nn.utils.parameters_to_vector(model.parameters()).detach()
    checkpoint(model, optimizer, LAST, path)

    results = {"losses": losses, "weights": weights}
    torch.save(results, f"{folder}/{name}.rank{dist.get_rank()}")

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: the command line, where this is a file (a notebook is `__main__` too, but no file)
if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where data.pt is, and checkpoints go")
    parser.add_argument("names", nargs="+", help="of the trainings, done one after the other")
    parser.add_argument("--seed", type=int, default=0, help="of the dropout masks")
    parser.add_argument("--kill-at", type=int, help="step before which rank 1 is killed")
    parser.add_argument("--leave-at", type=int, help="step before which this machine leaves")
    options = parser.parse_args()
    try:
        dist.init_process_group("gloo")
        for name in options.names:
            train_or_resume(options.folder, name, options.seed, options.kill_at,
                            options.leave_at)
        dist.destroy_process_group()
    except RuntimeError:  # the other process is gone
        time.sleep(2)  # torchrun names the first that it finds dead: let that be the other one
        raise

# %% [markdown]
# ## Kill it, and resume
#
# In a terminal, one starts the program like this:
#
# ```
# torchrun --nproc-per-node=2 --max-restarts=0 resumable_train.py FOLDER NAME --kill-at 22
# ```
#
# Here `run_anew` does it, without an older checkpoint, and returns what each rank printed.

# %% tags=["torch", "fold"]
# define: `run_anew` starts the program from its beginning; `read_results`; `resume`, for later
from helpers.cluster import torchrun


def run_anew(name, kill_at=None, max_restarts=0):
    (folder / f"{name}.pt").unlink(missing_ok=True)
    arguments = [folder, name]
    if kill_at is not None:
        arguments += ["--kill-at", kill_at]
    return torchrun("resumable_train.py", nproc=2, arguments=arguments,
                    max_restarts=max_restarts, log=None)


def read_results(name, rank=0):
    return torch.load(folder / f"{name}.rank{rank}")


def resume(checkpoints, nproc=2):
    """Write each checkpoint under its name, run the program on all, and return the results."""
    for name, saved in checkpoints.items():
        torch.save(saved, folder / f"{name}.pt")
    torchrun("resumable_train.py", nproc=nproc, arguments=[folder, *checkpoints], timeout=300,
             log=None)
    return {name: read_results(name) for name in checkpoints}

# %% [markdown]
# First a run without accident:

# %% tags=["torch", "trains"]
printed = run_anew("whole")
print(printed[0], end="")

whole = read_results("whole")["weights"]  # by step
print(len(whole), "steps,", len(whole[47]), "weights")

# %% tags=["torch", "fold"]
# check: it learns, and both ranks have the same weights after each step
losses = list(read_results("whole")["losses"].values())
assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), "it learns"
of_rank_1 = read_results("whole", rank=1)["weights"]
assert len(whole) == 48
for step in whole:
    assert torch.equal(whole[step], of_rank_1[step]), "replicas are equal"

# %% [markdown]
# Now rank 1 is killed before step 22, in the second epoch, and no restart is allowed. `run_anew`
# raises `Failed`. **Predict:** at which step is the checkpoint that is left?

# %% tags=["torch", "trains"]
try:
    run_anew("killed", kill_at=22)
except Failed as error:
    print(error)

left = torch.load(folder / "killed.pt")
print_parts(left)

# %% [markdown]
# Steps 20 and 21 have to be done again. This time one restart is allowed. **Predict:** how far from
# the unbroken run will the weights be?

# %% tags=["torch", "trains"]
printed = run_anew("again", kill_at=22, max_restarts=1)
print(printed[0], end="")

again = read_results("again")["weights"]
for step in [20, 21, 47]:
    difference = (again[step] - whole[step]).abs().max().item()
    print("step", step, "largest difference of a weight:", difference)

# %% [markdown]
# None: bit for bit. And the last checkpoints of both runs are the same in all four parts:

# %% tags=["torch", "fold"]
# check: no step from 20 on differs, and after step 47 the checkpoints are equal in all four parts
def same(a, b):
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(a[i], b[i]) for i in range(len(a)))
    return a == b


assert list(again) == list(range(20, 48))
for step in again:
    assert torch.equal(again[step], whole[step])
of_whole = torch.load(folder / "whole.pt")
of_again = torch.load(folder / "again.pt")
for part in ["model", "optimizer", "step", "random"]:
    assert same(of_whole[part], of_again[part]), part
    assert not same(of_whole[part], left[part]), f"{part} should have changed since step 20"
assert left["step"] == 20
assert of_whole["step"] == 48
assert not same(of_whole["random"][0], of_whole["random"][1]), "each rank has its own"
# That DDP may change the order: `should_rebuild_buckets` in c10d's `reducer.hpp`.

# %% [markdown]
# **Test a checkpoint by a kill, and compare bit for bit.**
#
# (With three ranks or more, last digits may differ: a rounded sum of three depends on the order,
# which DDP may change; a sum of two doesn't.)
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
    print("written in place: torch.load says:", str(error).split(":")[0])
print("by `save`:        the old checkpoint, of step", torch.load(folder / "save.pt")["step"])

# %% [markdown]
# ## What if a part is missing?
#
# Suppose that the program forgets a part. The run will differ, but so does one with another seed,
# and that is as good. It is *damage* if a run does what no unbroken run does, with any seed.
#
# We take `left`, the checkpoint of step 20, and replace one part, mostly by what a new process has:

# %% tags=["torch"]
both_rank_0 = [left["random"][0], left["random"][0]]
forgot = {
    "no momentum": {**left, "optimizer": new["optimizer"]},  # a copy of `left`, but for this
    "no step": {**left, "step": 16},  # it knows the epoch only, and begins it again
    "no random states": {**left, "random": new["random"]},
    "not rank 1's state": {**left, "random": both_rank_0},  # both go on with rank 0's
}

# %% [markdown]
# To compare, we resume from `left` as it is, and with the random states of another seed. `resume`
# writes each checkpoint under its name and starts the program, which goes on from there.
# **Predict:** which run raises an error, or has a loss that looks wrong?

# %% tags=["torch", "trains", "measured"]
ranks(save_new, folder / "seed_1.pt", 1)
seed_1 = torch.load(folder / "seed_1.pt")
another_seed = {**left, "random": seed_1["random"]}

runs = resume({"unbroken": left, "another seed": another_seed, **forgot})
for name, run in runs.items():
    last_losses = [run["losses"][step] for step in range(40, 48)]
    print(f"{name:18} mean loss of the last 8 steps {sum(last_losses) / 8:.2f}")

# %% [markdown]
# None, and no loss stands out. How far are the weights from the unbroken run's?

# %% tags=["torch", "measured", "fold"]
# draw: distance of the weights from the unbroken run's, for each missing part and another seed
from helpers.plotting import curves, show

assert same(runs["unbroken"]["weights"], again), "`left` as it is, is the unbroken run"
lines = {}
far = {}  # at the end
for name in ["another seed", *forgot]:
    distances = []
    for step in range(20, 48):
        difference = torch.linalg.norm(runs[name]["weights"][step] - whole[step])
        distances.append(100 * (difference / torch.linalg.norm(whole[step])).item())
    lines[name] = (range(20, 48), distances)
    far[name] = distances[-1]
for name in forgot:
    assert 0.4 < far[name] / far["another seed"] < 1.3, name
assert min(far, key=far.get) == "no momentum"
title = "The weights move away, whether a part is missing or not"
fig, ax = curves(title, "step", "distance of the weights (%)", lines)
ax.set_ylim(bottom=0)
show(fig, alt="How far the weights are from the unbroken run's, for steps 20 to 47, in runs that "
              "resumed with another seed, without momentum, step, random states, or rank 1's own. "
              "All move away steadily; another seed ends between those with a missing part.")

# %% [markdown]
# Another seed moves them as well. So neither loss nor distance tells. What did each part do?
#
# **No momentum: damage.** The momentum is a sum of many gradients. It starts from zero, so the
# first step is too short:

# %% tags=["torch", "measured", "fold"]
# measure: the length of the first step after the resumption
before = whole[19]  # the weights in the checkpoint, after 20 steps
expected = torch.linalg.norm(whole[20] - before)
for name in ["another seed", *forgot]:
    weights = runs[name]["weights"]
    first_step = torch.linalg.norm(weights[min(weights)] - before)
    print(f"{name:18} first step: {first_step / expected:.0%} of the unbroken run's length")
    assert (first_step < 0.75 * expected) == (name == "no momentum"), name

# %% [markdown]
# In the figure it ends nearest: it alone has the unbroken run's images *and* masks.
#
# **No step: damage.** The second epoch begins again, so its first images are trained on twice:

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
# Then why the lowest loss? It has trained four steps longer, 52 in all, and they lowered it:

# %% tags=["torch", "measured", "fold"]
# measure: loss of all 512 images, without dropout, after equally many steps
def loss_of_all(weights):
    net = dropout_lenet().eval()
    nn.utils.vector_to_parameters(weights, net.parameters())
    with torch.no_grad():
        return F.cross_entropy(net(images), labels).item()


no_step = runs["no step"]["weights"]
print(f"unbroken, 48 steps: {loss_of_all(whole[47]):.2f}")
print(f"no step,  48 steps: {loss_of_all(no_step[43]):.2f}")
print(f"no step,  52 steps: {loss_of_all(no_step[47]):.2f}")
assert loss_of_all(no_step[43]) > loss_of_all(no_step[47])

# %% [markdown]
# **No random states: mild.** They are again what they were before step 0. So the masks of the first
# steps are repeated, for other images.
#
# **Not rank 1's state: mild.** Both ranks draw the same masks. A batch should have 32, one for each
# image; now it has 16, each for two images:

# %% tags=["torch", "fold"]
# measure: the masks of step 20, drawn from the states in the checkpoints
def masks(state, steps):
    """The masks that a rank draws in its next steps, and its state afterwards."""
    torch.set_rng_state(state)
    drawn = [F.dropout(torch.ones(16, 128)) for _ in range(steps)]
    return drawn, torch.get_rng_state()


def masks_of_a_batch(states):
    both = [masks(state, 1)[0][0] for state in states]
    return torch.cat(both)


mine = torch.get_rng_state()
at_step_0 = masks_of_a_batch(new["random"])
for name in ["unbroken", "no random states", "not rank 1's state"]:
    saved = forgot.get(name, left)
    at_step_20 = masks_of_a_batch(saved["random"])
    different = len(torch.unique(at_step_20, dim=0))
    repeated = torch.equal(at_step_20, at_step_0)
    line = f"{name:18} {different} different masks in step 20"
    if repeated:
        line += ", those of step 0"
    print(line)
    assert different == (16 if name == "not rank 1's state" else 32)
    assert repeated == (name == "no random states")
for rank in range(2):  # these are the program's masks: 20 steps of them lead to its state
    assert torch.equal(masks(new["random"][rank], 20)[1], left["random"][rank])
torch.set_rng_state(mine)

# %% [markdown]
# Strictly, no unbroken run does these two things either. But each mask is a fair one, and each
# image is seen once an epoch.
#
# Where random numbers also shuffle the images, a lost state does damage: some images come twice,
# others not at all. NumPy's, Python's and a GPU's generators have states of their own.
#
# ## Elastic: a machine leaves
#
# With `--nnodes=1:2`, `torchrun` accepts one or two machines. If one joins or leaves, all processes
# start anew, on the machines that are there. Of two machines with one process each, one leaves
# before step 22. The other prints:

# %% tags=["torch", "trains", "fold"]
# measure: what the machine that stays prints
settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
            # A store that is shared over restarts still has the addresses of those who are gone.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
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
# It goes on alone, from step 20. Its result can't be the unbroken run's, since rank 0 now draws the
# masks of all 32 images. It should be that of `left`, resumed on one rank:

# %% tags=["torch", "trains", "measured", "fold"]
# measure: the last weights, compared with those of `left` on one rank, and of the unbroken run
alone = resume({"alone": left}, nproc=1)["alone"]["weights"]
elastic = read_results("elastic")["weights"]
from_alone = (elastic[47] - alone[47]).abs().max().item()
from_whole = (elastic[47] - whole[47]).abs().max().item()
print("largest difference from one rank:         ", from_alone)
print("largest difference from the unbroken run: ", from_whole)

# %% tags=["torch", "fold"]
# check: the machine that stayed began again at step 20, alone; it is one rank's run, not two ranks'
assert elastic_printed.splitlines()[-1] == "elastic begins at step 20; ranks: 1"
assert same(elastic, alone)
assert list(elastic) == list(range(20, 48))
assert not torch.equal(elastic[20], whole[20])

# %% [markdown]
# Where the number of ranks doesn't divide 32, DDP's mean is not the batch's (exercise 2).
#
# If HOST is lost, the job ends (`torch/distributed/run.py`, "Failure Modes").
#
# MXNet's own way over several machines: deeper: The parameter server. What links and memory allow,
# and how often to save: deeper: Costs on paper.

# %% [markdown]
# ## Summary
#
# - `torchrun` gives each process a rank and a local rank. After a failure it ends the rest and, if
#   `--max-restarts` (default 0) allows, starts all anew. It brings back no state.
# - A checkpoint holds model, optimizer, step, and each rank's random state. So LeNet on two ranks
#   ended bit for bit like the unbroken run.
# - Write aside, then rename. Test a checkpoint by a kill.
# - No error says that a part is missing. A lost momentum or step does damage; a lost random state
#   is mild if it decides dropout only.
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
