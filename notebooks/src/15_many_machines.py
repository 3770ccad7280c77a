# %% [markdown]
# # 15 · Many machines
#
# A long training on many machines sooner or later loses a process, and then the whole job ends.
# Here we kill a training on purpose, and bring it back.
#
# > **What you'll do:** start processes with `torchrun`. Write a training program, kill it, and
# > resume. Leave out parts of its checkpoint. Let a machine leave.
# >
# > **What you'll learn:** how a process learns its place among many; what a checkpoint must hold,
# > how to write it, and how to test it; what a resumed training does if a part of its checkpoint is
# > missing.
# >
# > **What you need:** chapter 14, and PyTorch (`make setup TORCH=1`). No GPU and no second machine.
# > Reading takes {reading time}, running about two minutes.

# %% tags=["torch", "fold"]
# define: `folder`, a temporary one for all processes; the chapter needs PyTorch
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
# Each machine runs `torchrun` once. It starts as many processes as we say, usually one for each
# device. All `torchrun`s meet at one address, the *rendezvous*, on a machine that we
# call HOST. There each machine gets its number.
#
# ![Two machines. On machine 0, torchrun has started two processes, with rank 0 and rank 1; on
# machine 1, two with rank 2 and rank 3. Their local ranks are 0 and 1 on each machine. Machine 0
# is HOST and keeps the rendezvous; both torchruns point to it.](src/drawings/torchrun.svg)
#
# How does a process learn its place? `torchrun` sets variables in its environment, among them:
#
# - `RANK`: the process's number in the whole job;
# - `LOCAL_RANK`: its number on its machine;
# - `WORLD_SIZE`: how many processes there are.
#
# `who.py` prints them, `os.environ["RANK"]` and so on.

# %% tags=["torch", "fold"]
# define: who.py, a program that prints the three variables
program = """
import os

line = ""
for name in ["RANK", "LOCAL_RANK", "WORLD_SIZE"]:
    line += f"{name} {os.environ[name]}  "
print(line)
"""
with open(folder / "who.py", "w") as file:
    file.write(program)

# %% [markdown]
# The same command is run on each machine (`rdzv` is the rendezvous, `c10d` PyTorch's own kind, 9000
# a port):
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
lines_of = []  # of each machine
for machine in [first, second]:
    text = machine.communicate(timeout=200)[0]
    lines_of.append(sorted(re.findall(r"RANK .*?WORLD_SIZE \d+", text)))  # two may share a line
lines_of.sort()
for lines in lines_of:
    print("\n".join(lines))

# %% tags=["torch", "fold"]
# check: four processes, each rank once, two on each machine
for machine in range(2):
    assert len(lines_of[machine]) == 2
    for local_rank in range(2):
        expected = f"RANK {2 * machine + local_rank} LOCAL_RANK {local_rank} WORLD_SIZE 4"
        assert lines_of[machine][local_rank].split() == expected.split()

# %% [markdown]
# On a machine with GPUs, `LOCAL_RANK` chooses the process's device: `cuda:0`, `cuda:1`.
#
# ## A program that can be killed
#
# If a process fails, `torchrun` ends the others. With `--max-restarts` it then starts *all* of them
# anew. They have only their program, its arguments and `torchrun`'s variables. All else is gone,
# unless it is in a file, a *checkpoint*. What must that hold?
#
# ![Four things change during training: the model's weights, the optimizer's momentum, the step, and
# the random state of each rank. All four go into the checkpoint. New processes read all four from
# it.](src/drawings/checkpoint.svg)
#
# We write [resumable_train.py](resumable_train.py), which lies beside this notebook. Cells that
# begin with its name show its parts. In outline:
#
# ```
# begin a new training
# if there is a checkpoint: restore what it holds
# for each step that is left:
#     before every fourth step: write a checkpoint
#     train on this step's images
# ```
#
# It trains LeNet with *dropout*: in each training step, random numbers choose for each image which
# units of a layer are left out. The choice is the image's *mask*.

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
# A training with DDP (chapter 14) begins like this (`dist` is `torch.distributed`):

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def new_training():
    torch.manual_seed(0)  # the same first weights in every run
    model = DistributedDataParallel(dropout_lenet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(dist.get_rank())  # from now on, each rank has its own dropout masks
    return model, optimizer

# %% [markdown]
# ### What the checkpoint holds
#
# The four parts of the figure. Each rank draws masks from its own random numbers; its *random
# state* says which come next. (Chapter 14's program saves after whole epochs only and seeds each
# epoch anew, so it needs no random state.) `all_gather_object` fills a list with one object from
# each rank:

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
# If a process were killed while it overwrites the old checkpoint, half a new one would be left. So
# write a second file, and rename it when it is complete.

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: `write` returns when the bytes are on the disk, so what is renamed later is complete
def write(state, path):
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def save(state, path):
    write(state, f"{path}.new")
    os.replace(f"{path}.new", path)  # the rename

# %% [markdown]
# After each step, weights and momentum are the same on all ranks (chapter 14). So rank 0 writes for
# all:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def checkpoint(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)  # all ranks take part
    if dist.get_rank() == 0:
        save(state, path)

# %% [markdown]
# A training that hasn't begun has this checkpoint:

# %% tags=["torch", "fold"]
# measure: what is in the checkpoint `new`, from before any training, by two processes
def save_new(path):
    model, optimizer = new_training()
    checkpoint(model, optimizer, step=0, path=path)


def print_parts(saved):
    print("model:    ", len(saved["model"]), "arrays, weights and biases")
    print("optimizer:", len(saved["optimizer"]["state"]), "arrays of momentum")
    print("step:     ", saved["step"])
    print("random:   ", len(saved["random"]), "states")


ranks(save_new, folder / "new.pt")  # as in chapter 14
new = torch.load(folder / "new.pt")
print_parts(new)

# %% [markdown]
# No momentum yet: the optimizer makes it in its first step.
#
# ### The step tells which images come next
#
# We train on 512 images, 32 in a step. So an epoch has 16 steps.

# %% tags=["torch", "measured", "fold"]
# define: 512 images and their labels, in data.pt
from helpers import load_data

data = load_data("mnist", limit=512)
images = torch.tensor(data.train_images - data.train_images.mean())
labels = torch.tensor(data.train_labels).long()
torch.save([images, labels], folder / "data.pt")
print(data)

# %% [markdown]
# Which 32 come next? Here the step alone decides, whatever the number of ranks. Each epoch has an
# order of its own, from a generator of its own: that leaves the masks' generator as it is.

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def batch_rows(step):
    epoch = step // 16
    generator = torch.Generator().manual_seed(epoch)  # the same on every rank
    order = torch.randperm(512, generator=generator)
    first = 32 * (step % 16)  # the step's place in its epoch
    return order[first : first + 32]

# %% [markdown]
# Each rank takes its share. We look at the first eight rows of a batch:

# %% tags=["torch"]
rows = batch_rows(step=20)[:8]
print("of the batch:", rows)
print("rank 0 of 2: ", rows[0::2])  # every second row, from the first
print("rank 1 of 2: ", rows[1::2])

# %% tags=["torch", "fold"]
# check: each epoch has each image once, if 1, 2, 3 or 5 ranks share it; three epochs, three orders
for k in [1, 2, 3, 5]:
    for epoch in range(3):
        seen = []
        for step in range(16 * epoch, 16 * epoch + 16):
            for rank in range(k):
                share = batch_rows(step)[rank::k]
                assert len(share) > 0, "every rank has images in every step"
                seen.extend(share.tolist())
        assert sorted(seen) == list(range(512)), "each image once"
first_batches = set()
for first_step in [0, 16, 32]:
    first_batches.add(tuple(batch_rows(first_step).tolist()))
assert len(first_batches) == 3, "each epoch has an order of its own"

# %% [markdown]
# So this is a step (`F` is `torch.nn.functional`):

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
# Each part goes where it came from. (A rank that joins later, as in *Elastic* below, has no random
# state in there, and keeps that of `new_training`.)

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def restore(path, model, optimizer):
    saved = torch.load(path)  # loads data only: code hidden in it isn't run
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    rank = dist.get_rank()
    if rank < len(saved["random"]):  # otherwise it has joined later
        torch.set_rng_state(saved["random"][rank])
    return saved["step"]

# %% tags=["torch", "fold"]
# check: `torch.load` refuses a file with code in it (from PyTorch 2.6 on)
import pickle


class MakesFolder:
    def __reduce__(self):  # what pickle would call to load it
        return os.mkdir, (f"{folder}/made",)


torch.save(MakesFolder(), folder / "harmful.pt")
try:
    torch.load(folder / "harmful.pt")
    raise AssertionError("it should be refused")
except pickle.UnpicklingError:
    assert not (folder / "made").exists()

# %% [markdown]
# ### The program, whole
#
# If the training has a checkpoint, it goes on from there:

# %% tags=["torch", "file:resumable_train.py"]
# resumable_train.py
def begin_or_resume(name, path):
    model, optimizer = new_training()
    begin = 0
    if os.path.exists(path):
        begin = restore(path, model, optimizer)
    print(f'training "{name}" begins at step {begin}; ranks: {dist.get_world_size()}')
    return model, optimizer, begin

# %% [markdown]
# It takes 48 steps, three epochs, and works in a folder that all machines must see. Only for our
# comparison, it keeps losses and weights of each step, and each rank writes its own at the end.
#
# With `--kill-at 22`, `accident` kills rank 1 before step 22, but not after a restart.
# `flat_weights` returns all weights as one vector.

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: `accident` (as the command line asks, at the first start only) and `flat_weights`
def accident(step, options):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return
    if step == options.kill_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == options.leave_at:
        os.kill(os.getppid(), signal.SIGTERM)  # its torchrun: the whole machine leaves
        time.sleep(60)


def flat_weights(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()

# %% tags=["torch", "file:resumable_train.py", "trains"]
# resumable_train.py
def train_or_resume(name, options):  # `options`: of the command line
    path = f"{options.folder}/{name}.pt"
    images, labels = torch.load(f"{options.folder}/data.pt")
    model, optimizer, begin = begin_or_resume(name, path)
    losses = {}
    weights = {}
    for step in range(begin, 48):
        if step % 4 == 0:
            checkpoint(model, optimizer, step, path)
        accident(step, options)
        losses[step] = train_step(step, model, optimizer, images, labels)
        weights[step] = flat_weights(model)
    checkpoint(model, optimizer, 48, path)
    torch.save([losses, weights], f"{options.folder}/{name}.rank{dist.get_rank()}")

# %% tags=["torch", "fold", "file:resumable_train.py"]
# define: the command line, for the file only
if __name__ == "__main__" and "__file__" in globals():  # a notebook has no `__file__`
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="where data.pt is, and checkpoints go")
    parser.add_argument("names", nargs="+", help="of the trainings, done one after the other")
    parser.add_argument("--kill-at", type=int, help="step before which rank 1 is killed")
    parser.add_argument("--leave-at", type=int, help="step before which this machine leaves")
    options = parser.parse_args()
    try:
        dist.init_process_group("gloo")
        for name in options.names:
            train_or_resume(name, options)
        dist.destroy_process_group()
    except RuntimeError:  # the other process is gone
        time.sleep(2)  # torchrun names the first that it finds dead: let that be the other one
        raise

# %% [markdown]
# ## Kill it, and resume
#
# In a terminal, the program is started like this:
#
# ```
# torchrun --nproc-per-node=2 --max-restarts=0 resumable_train.py FOLDER NAME --kill-at 22
# ```
#
# Here `run_anew` does it, and returns what each rank printed.

# %% tags=["torch", "fold"]
# define: `run_anew`; `read_weights`, by step; `resume`, which runs the program on given checkpoints
from helpers.cluster import torchrun


def run_anew(name, kill_at=None, max_restarts=0):
    (folder / f"{name}.pt").unlink(missing_ok=True)
    arguments = [folder, name]
    if kill_at is not None:
        arguments += ["--kill-at", kill_at]
    return torchrun("resumable_train.py", nproc=2, arguments=arguments,
                    max_restarts=max_restarts, log=None)


def read_weights(name, rank=0):
    losses, weights = torch.load(folder / f"{name}.rank{rank}")
    return weights


def resume(checkpoints, nproc=2):
    """Write each checkpoint under its name, run the program on all, and return their weights."""
    for name, saved in checkpoints.items():
        torch.save(saved, folder / f"{name}.pt")
    torchrun("resumable_train.py", nproc=nproc, arguments=[folder, *checkpoints], timeout=300,
             log=None)
    return {name: read_weights(name) for name in checkpoints}

# %% [markdown]
# First a run without accident:

# %% tags=["torch", "trains"]
printed = run_anew("whole")
print(printed[0], end="")

whole = read_weights("whole")
print(len(whole), "steps;", len(whole[47]), "weights after the last one, step 47")

# %% tags=["torch", "fold"]
# check: it learns, and both ranks have the same weights after each step
by_step, weights = torch.load(folder / "whole.rank0")
losses = list(by_step.values())
assert sum(losses[-8:]) < 0.7 * sum(losses[:8]), "it learns"
of_rank_1 = read_weights("whole", rank=1)
assert len(whole) == 48
for step in whole:
    assert torch.equal(whole[step], of_rank_1[step]), "replicas are equal"

# %% [markdown]
# Now rank 1 is killed before step 22, and no restart is allowed. `run_anew` raises `Failed`, and
# calls the rank `worker 1`. **Predict:** of which step is the checkpoint that is left?

# %% tags=["torch", "trains"]
try:
    run_anew("killed", kill_at=22)
except Failed as error:
    print(error)

left = torch.load(folder / "killed.pt")
print_parts(left)

# %% [markdown]
# So steps 20 and 21 must be done again. Now one restart is allowed. **Predict:** how far will the
# weights be from the unbroken run's?

# %% tags=["torch", "trains"]
printed = run_anew("again", kill_at=22, max_restarts=1)
print(printed[0], end="")

again = read_weights("again")
for step in [20, 21, 47]:
    difference = (again[step] - whole[step]).abs().max().item()
    print("step", step, "largest difference of a weight:", difference)

# %% [markdown]
# None: bit for bit. The last checkpoints of both runs are the same too, in all four parts.

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
# With three ranks or more, last digits may differ: a rounded sum of three depends on the order, and
# DDP may change that (`should_rebuild_buckets` in c10d's `reducer.hpp`). A sum of two doesn't.

# %% tags=["torch", "trains", "fold"]
# check: without a kill, too, three steps and then one more give what four give, in all digits
def go_on(folder, steps):
    images, labels = torch.load(folder / "data.pt")
    model, optimizer = new_training()
    begin = restore(folder / "small.pt", model, optimizer)
    for step in range(begin, begin + steps):
        loss = train_step(step, model, optimizer, images, labels)
    checkpoint(model, optimizer, begin + steps, folder / "small.pt")
    return loss  # of the last step


torch.save(new, folder / "small.pt")
at_once = ranks(go_on, folder, 4)
after_four = torch.load(folder / "small.pt")

torch.save(new, folder / "small.pt")
ranks(go_on, folder, 3)
in_two = ranks(go_on, folder, 1)  # losses on both ranks
assert at_once == in_two
assert at_once[0] != at_once[1], "each rank has its own images and masks"
assert after_four["step"] == 4
assert same(torch.load(folder / "small.pt"), after_four)

# %% [markdown]
# **Test a checkpoint by a kill, and compare bit for bit.** Test it on two ranks: on three or more,
# the order of a sum may change last digits without a mistake.
#
# **On GPUs** even two unbroken runs may differ. On an H200 (PyTorch 2.11) one process with chapter
# 14's program, run twice for three epochs of MNIST, ended with weights up to 0.2 apart. With
# `torch.use_deterministic_algorithms(True)`, and the environment variable `CUBLAS_WORKSPACE_CONFIG`
# that it asks for (see PyTorch's *Reproducibility*), two runs and a resumed one ended equal, bit
# for bit.
#
# ### Killed while it writes
#
# Is the rename needed? One process overwrites a checkpoint by `write`, another uses `save`. Both
# are killed when half of the new one is written:

# %% tags=["torch", "fold"]
# check: written in place, it is torn; by `save`, never, killed half-way or at any moment after it
half_way = """
import os, shutil, signal, sys, torch
from resumable_train import save, write

old = sys.argv[1] + "/killed.pt"
complete = os.stat(old).st_size
state = torch.load(old)
state["step"] = 24  # the new one
sync = os.fsync

def killed(number):  # in place of fsync
    assert os.fstat(number).st_size == complete, "a part is still in Python's buffer"
    os.ftruncate(number, complete // 2)
    os.kill(os.getpid(), signal.SIGKILL)

def killed_later(moment):  # `moment` bytecodes after fsync
    def count(frame, event, argument):
        nonlocal moment
        frame.f_trace_opcodes = True
        if event == "opcode":
            moment -= 1
        if moment < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return count

    def sync_then_count(number):
        sync(number)
        frame = sys._getframe(1)
        while frame is not None:  # those that run already
            frame.f_trace_opcodes = True
            frame.f_trace = count
            frame = frame.f_back
        sys.settrace(count)

    return sync_then_count

def status_of(way, path, in_place_of_fsync):
    shutil.copy(old, path)
    if os.fork() == 0:
        os.fsync = in_place_of_fsync
        way(state, path)
        sys.settrace(None)
        os._exit(0)
    return os.wait()[1]

for way in [save, write]:
    assert status_of(way, f"{sys.argv[1]}/{way.__name__}.pt", killed) == signal.SIGKILL
path = sys.argv[1] + "/later.pt"
moment = 0
steps = []
while status_of(save, path, killed_later(moment)) == signal.SIGKILL:
    steps.append(torch.load(path)["step"])
    moment += 1
assert torch.load(path)["step"] == 24, "not killed: the new one"
assert steps[0] == 20 and steps[-1] == 24 and steps == sorted(steps), "the old one, then the new"
"""
subprocess.run([sys.executable, "-c", half_way, folder], check=True)
assert same(torch.load(folder / "save.pt"), left), "the old one, whole"
complete = (folder / "killed.pt").stat().st_size
assert 0 < (folder / "save.pt.new").stat().st_size < complete, "the new one, torn, aside"
try:
    torch.load(folder / "write.pt")
    raise AssertionError("in place it should be torn")
except RuntimeError as error:
    print("written in place: torch.load says:", str(error).split(":")[0])
print("by `save`:        the old checkpoint, of step", torch.load(folder / "save.pt")["step"])

# %% [markdown]
# ## What if a part is missing?
#
# Four programs forget something. Their checkpoints are copies of `left`, that of step 20, with one
# part changed. (`new` is from before any training.)

# %% tags=["torch"]
mistakes = {  # `{**left, "step": 16}` is a copy of `left` with another step
    "no momentum": {**left, "optimizer": new["optimizer"]},  # that of a new optimizer
    "no step": {**left, "step": 16},  # only the epoch is saved: that of step 20 began at 16
    "no random states": {**left, "random": new["random"]},  # those of new processes
    "no rank 1": {**left, "random": [left["random"][0], left["random"][0]]},  # rank 0's for both
}

# %% [markdown]
# **Predict:** which of them raises an error when it is resumed? Which ends with the weights of the
# unbroken run?

# %% tags=["torch", "trains"]
runs = resume(mistakes)  # by name, the weights after each step; raises `Failed` at an error
for name, weights in runs.items():
    equal = torch.equal(weights[47], whole[47])
    print(f"{name}: no error; as if unbroken: {equal}")

# %% [markdown]
# Here the unbroken run tells. A long training isn't done twice. Would the loss tell? Correct runs
# differ, too: with another seed's dropout masks a run ends with other weights, and is just as good.
# So we resume `left` with the masks of 8 seeds, which are other ones, but none comes twice, and see
# how far the losses of *correct runs* lie apart.
#
# **Predict:** whose loss lies outside theirs soon after the resumption, and whose at the end?

# %% tags=["torch", "trains", "fold"]
# define: `correct_runs`, `left` resumed with 8 seeds' masks; `loss_of_all`, of the 512 images
def random_states(seed):
    """Those of a new training on two ranks, with another seed."""
    states = []
    for rank in range(2):
        states.append(torch.Generator().manual_seed(100 * seed + rank).get_state())
    return states


def loss_of_all(weights):
    """The loss of all 512 images, without dropout."""
    net = dropout_lenet().eval()
    nn.utils.vector_to_parameters(weights, net.parameters())
    with torch.no_grad():
        return F.cross_entropy(net(images), labels).item()


assert same(random_states(0), new["random"])
others = {"seed 0": left}
for seed in range(1, 8):
    others[f"seed {seed}"] = {**left, "random": random_states(seed)}
correct_runs = resume(others)
correct_losses = {}  # by step
for step in [24, 47]:
    correct_losses[step] = [loss_of_all(weights[step]) for weights in correct_runs.values()]

# %% tags=["torch", "measured", "fold"]
# draw: losses of the 512 images, of the four and of correct runs, after step 24 and at the end
import matplotlib.pyplot as plt

from helpers.plotting import BLUE, GREY, ORANGE, show


def far_out(step):
    """The mistakes whose loss is outside the correct ones, by more than half of their width."""
    lowest, highest = min(correct_losses[step]), max(correct_losses[step])
    margin = (highest - lowest) / 2
    found = []
    for name, weights in runs.items():
        if not lowest - margin < loss_of_all(weights[step]) < highest + margin:
            found.append(name)
    return found


fig, axes = plt.subplots(1, 2, figsize=(7.0, 2.9), sharey=True, layout="constrained")
for ax, step in zip(axes, [24, 47]):
    ax.axvspan(min(correct_losses[step]), max(correct_losses[step]), color=GREY, alpha=0.3, lw=0)
    ax.plot(correct_losses[step], [0] * 8, "o", color=BLUE, alpha=0.6)
    for row, weights in enumerate(runs.values(), start=1):
        ax.plot(loss_of_all(weights[step]), row, "X", color=ORANGE, mec="black", ms=9)
    ax.set(title=f"after step {step}", xlabel="loss")
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_yticks(range(5), ["8 correct runs", *runs])
axes[0].set_ylim(4.5, -0.5)
soon, late = len(far_out(24)), len(far_out(47))
fig.suptitle(f"{soon} of 4 mistakes stand out after step 24, {late} at the end")
outside = [" and ".join(far_out(step)) or "none" for step in [24, 47]]
show(fig, alt="Losses of all 512 images. A grey band has those of 8 correct runs. Crosses outside "
              f"it after step 24: {outside[0]}; after step 47: {outside[1]}.")

# %% tags=["torch", "fold"]
# check: soon two losses tell, at the end none; nor do the weights: other masks move them as far
assert same(correct_runs["seed 0"], again), "`left` as it is, is the unbroken run"
for step, margin in [(24, 1 / 2), (47, 1 / 10)]:  # of the correct runs' width
    lowest, highest = min(correct_losses[step]), max(correct_losses[step])
    width = highest - lowest
    for name, weights in runs.items():
        loss = loss_of_all(weights[step])
        inside = lowest - margin * width < loss < highest + margin * width
        stands_out = step == 24 and name in ["no momentum", "no step"]
        assert inside != stands_out, (step, name)
assert loss_of_all(runs["no momentum"][24]) > max(correct_losses[24])
assert loss_of_all(runs["no step"][24]) < min(correct_losses[24])


def from_unbroken(weights):
    """From the unbroken run's at the end."""
    return torch.linalg.norm(weights[47] - whole[47]).item()


farthest = max(from_unbroken(weights) for weights in correct_runs.values())
for name, weights in runs.items():
    assert 0.4 < from_unbroken(weights) / farthest < 1.3, name
# "no step" trains 52 steps, not 48: the last four lower its loss.
assert loss_of_all(runs["no step"][47]) < loss_of_all(runs["no step"][43])

# %% [markdown]
# Soon after the resumption, two losses tell: *no momentum* is above the correct runs, *no step*
# below, with four more steps done. At the end none does. So we look at what each run *does*. All
# four do what no correct run does:

# %% tags=["torch", "measured", "fold"]
# measure: what each of the four does, beside correct runs
def step_length(run):
    """Length of the first step after the resumption, from the weights in the checkpoint."""
    return torch.linalg.norm(run[min(run)] - whole[19]).item()


def images_twice(resumed_at):
    """How many images are trained on twice in the second epoch."""
    times_seen = torch.zeros(512)
    for step in [*range(16, 20), *range(resumed_at, 32)]:  # before and after the resumption
        times_seen[batch_rows(step)] += 1
    return (times_seen == 2).sum().item()


def draw_masks(state, steps):
    """The masks that a rank draws in its next steps, and its state afterwards."""
    torch.set_rng_state(state)
    drawn = [F.dropout(torch.ones(16, 128)) for _ in range(steps)]
    return drawn, torch.get_rng_state()


def next_masks(saved):
    """The masks of the next step's 32 images, on both ranks."""
    of_both = []
    for state in saved["random"]:
        drawn, _ = draw_masks(state, 1)
        of_both.append(drawn[0])
    return torch.cat(of_both)


def masks_of_step_0(saved):
    return (next_masks(saved) == next_masks(new)).all(dim=1).sum().item()


def different_masks(saved):
    return len(torch.unique(next_masks(saved), dim=0))


mine = torch.get_rng_state()
too_short = step_length(runs["no momentum"]) / step_length(again)
correct_lengths = [step_length(run) / step_length(again) for run in correct_runs.values()]
twice_correct = images_twice(min(again))
twice = images_twice(min(runs["no step"]))
rows = [
    ("", "what is measured", "correct", "mistake"),
    ("no momentum", "first step's length (unbroken: 100 %)", f"{min(correct_lengths):.0%} or more",
     f"{too_short:.0%}"),
    ("no step", "images trained on twice in the epoch", twice_correct, twice),
    ("no random states", "masks of step 0 that come again", masks_of_step_0(left),
     masks_of_step_0(mistakes["no random states"])),
    ("no rank 1", "different masks for 32 images", different_masks(left),
     different_masks(mistakes["no rank 1"])),
]
for name, what, of_correct, of_mistake in rows:
    print(f"{name:17} {what:37} {of_correct:>11} {of_mistake:>8}")

for name, weights in {**correct_runs, **runs}.items():  # other masks don't make the step so short
    relative = step_length(weights) / step_length(again)
    assert (relative < 0.75) == (name == "no momentum"), name
assert twice_correct == 0
assert twice == 128
for name, saved in {**others, **mistakes}.items():
    assert masks_of_step_0(saved) == (32 if name == "no random states" else 0), name
    assert different_masks(saved) == (16 if name == "no rank 1" else 32), name
for rank in range(2):  # these are the program's masks: 20 steps of them lead to its state
    assert torch.equal(draw_masks(new["random"][rank], 20)[1], left["random"][rank])
torch.set_rng_state(mine)

# %% [markdown]
# Without momentum, which adds up many gradients, the first step is too short. Without the step,
# four batches come twice. Without random states, the masks of step 0 come again. Without rank 1's
# state, both ranks draw the same 16 masks.
#
# So short a training can't show how much harm that does. **But no error tells of it, nor does the
# loss at the end. Comparing bit for bit does.**
#
# NumPy's, Python's and a GPU's generators have random states of their own: save those you use.
#
# ## Elastic: a machine leaves
#
# An *elastic* job goes on with fewer machines, or more. `--nnodes=1:2` accepts one or two:
#
# ```
# torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d \
#     --rdzv-endpoint=HOST:9000 resumable_train.py FOLDER elastic
# ```
#
# Before step 22, one of two machines leaves, on purpose. The other's process fails then, and is
# started anew. It prints:

# %% tags=["torch", "trains", "fold"]
# measure: what the machine that stays prints
settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
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
# It goes on alone, from step 20. It can't end like the unbroken run, since one rank draws other
# masks than two. It ends like one rank that resumes `left`, also of step 20: bit for bit.

# %% tags=["torch", "trains", "fold"]
# check: it began again at step 20, alone; its weights are one rank's, not those of the unbroken run
alone = resume({"alone": left}, nproc=1)["alone"]
elastic = read_weights("elastic")
assert elastic_printed.splitlines()[-1] == 'training "elastic" begins at step 20; ranks: 1'
assert same(elastic, alone)
assert list(elastic) == list(range(20, 48))
for step in elastic:
    assert not torch.equal(elastic[step], whole[step])

# %% [markdown]
# HOST must stay: it holds the rendezvous. If the number of ranks doesn't divide 32, DDP's mean is
# not the batch's (exercise 2).
#
# MXNet's own way over several machines: deeper: The parameter server. What links and memory allow,
# and how often to save: deeper: Costs on paper.

# %% [markdown]
# ## Summary
#
# - `torchrun` gives each process a rank and a local rank. After a failure it ends the rest and, if
#   `--max-restarts` (default 0) allows, starts all anew. It brings back no state.
# - A checkpoint holds model, optimizer, step, and each rank's random state. With it, LeNet on two
#   ranks ended bit for bit like the unbroken run.
# - Write aside, then rename. Test a checkpoint by a kill.
# - Without momentum, step or random states, no error came, and the loss at the end didn't tell.
#
# **Further reading.** *Torch Distributed Elastic* in PyTorch's documentation. Its `SECURITY.md`
# says why a rendezvous belongs behind a firewall.

# %% [markdown]
# ## Exercises
#
# 1. **Seeds that differ.** Suppose `batch_rows` seeded its generator with the rank as well. Show
#    for two ranks that images are lost and doubled, and count them in an epoch.
# 2. **Three ranks come back.** 32 images on three ranks are 11, 11 and 10, and DDP takes the mean
#    of the three gradients. Show with numbers that a mean of means is not the batch's mean. By what
#    must each rank multiply the *sum* of its losses?
# 3. **A schedule.** Let `torch.optim.lr_scheduler.StepLR` halve the learning rate every 10 steps. A
#    program resumes at step 24, and forgot the scheduler's state, so a new one counts its own calls
#    of `step` from 0. Which part of the checkpoint holds the present rate? At which step is the
#    next halving, and when should it be?

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
model, optimizer = new_training()
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
