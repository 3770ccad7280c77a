# %% [markdown]
# # 15 · Kill it, and resume
#
# The longer a training takes and the more machines it needs, the more likely it is to lose a
# process. *What must be on the disk, so that it can go on as if nothing had happened?*
#
# > **What you'll do:** kill a training, resume it, and compare it with one that nobody killed.
# > Write what a checkpoint holds, and leave out its parts one at a time.
# >
# > **What you'll learn:** what a checkpoint must hold, how to write it, and how to test it; which
# > process gets which rank; what helps if a process hangs instead of dying.
# >
# > **What you need:** chapter 14, and PyTorch (`make setup TORCH=1`). No GPU and no second machine.
# > Reading takes {reading time}, running about a minute.

# %% tags=["torch"]
import copy
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import resumable_train
from helpers import load_data, your_turn
from helpers.cluster import Failed, torchrun
from ranks import ranks

# %% [markdown]
# ## Kill it
#
# [resumable_train.py](resumable_train.py), which lies beside this notebook, trains LeNet with DDP
# on 512 images: 48 steps of 32 images each, so three epochs. Before every fourth step, beginning
# with step 0, it writes a **checkpoint**, a file from which the training can go on. In a terminal
# it is started like chapter 14's script:
#
# ```
# torchrun --standalone --nproc-per-node=2 resumable_train.py FOLDER killed --kill-at 22
# ```
#
# All machines must be able to see FOLDER. It holds the images, and the checkpoint will be
# `killed.pt`, after the name of the training. Here it is a temporary folder:

# %% tags=["torch", "measured"]
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)

data = load_data("mnist", limit=512)
print(data)
images = torch.tensor(data.train_images - data.train_images.mean())
labels = torch.tensor(data.train_labels).long()
torch.save([images, labels], folder / "data.pt")

# %% [markdown]
# With `--kill-at 22` rank 1 sends itself the signal SIGKILL before step 22. No process can catch
# that signal. An operating system sends the same one if memory runs out. `helpers.cluster.torchrun`
# runs the command, and raises `Failed` if a process fails. (In its message rank 1 is `worker 1`.)
# **Predict:** which step is the surviving checkpoint from, and can rank 0 go on?

# %% tags=["torch", "trains", "predict"]
# So that a new training begins:
(folder / "killed.pt").unlink(missing_ok=True)
arguments = [folder, "killed", "--kill-at", 22]
try:
    torchrun("resumable_train.py", nproc=2, arguments=arguments, log=None)
except Failed as error:
    print(error)

left = torch.load(folder / "killed.pt")
print("the surviving checkpoint is from step", left["step"])

# %% [markdown]
# <details><summary>What came out</summary>
#
# The last checkpoint was written before step 20, so steps 20 and 21 are lost. Rank 0 couldn't go on
# alone, because each step needs the gradients of both ranks. So torchrun ends all processes once
# one has failed.
#
# </details>
#
# ## And resume
#
# We start the same command again, without `--kill-at`. The new processes find `killed.pt`, and go
# on from there. The steps done since that checkpoint are done again:
#
# ![Two rows of steps. In the first the training is killed after step 21; checkpoints were written
# before the steps 12, 16 and 20. The second row, of new processes, begins at step 20, from the last
# checkpoint: steps 20 and 21 are done twice.](src/drawings/kill_and_resume.svg)
#
# With a second name, `whole`, the program trains once more afterwards, from step 0 and without a
# kill. That is our reference. At the end of each training rank 0 writes a file, for example
# `killed.weights`, with all weights after each step since it last began. **Predict:** how far from
# the weights of `whole` are those of the training that was killed?

# %% tags=["torch", "trains", "predict"]
# If this cell is run again, the surviving checkpoint must be there again:
torch.save(left, folder / "killed.pt")
(folder / "whole.pt").unlink(missing_ok=True)

printed = torchrun("resumable_train.py", nproc=2, arguments=[folder, "killed", "whole"], log=None)
print(printed[0], end="")

resumed = torch.load(folder / "killed.weights")
whole = torch.load(folder / "whole.weights")
for step in [20, 21, 47]:
    difference = (resumed[step] - whole[step]).abs().max().item()
    print("step", step, "largest difference of a weight:", difference)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The largest difference is 0.0: after each of these steps they are equal, bit for bit.
#
# </details>
#
# **So a checkpoint is tested by a kill, and by comparing bit for bit.** Do that on two ranks. On
# three the last digits may differ, because gradients may be added up in another order (exercise 1).
# On GPUs even two uninterrupted runs may differ; `torch.use_deterministic_algorithms(True)` removes
# one source of that (see PyTorch's *Reproducibility*).
#
# torchrun can do the second start itself. With `--max-restarts=1` it starts *all* processes anew
# when one has failed, once. It brings back no state: the new processes have their program, its
# arguments and what is in files. (In a restarted process our program doesn't kill itself again.)

# %% tags=["torch", "trains"]
(folder / "restarted.pt").unlink(missing_ok=True)
arguments = [folder, "restarted", "--kill-at", 22]
printed = torchrun("resumable_train.py", nproc=2, arguments=arguments, max_restarts=1, log=None)
print(printed[0], end="")

restarted = torch.load(folder / "restarted.weights")
assert torch.equal(restarted[47], whole[47])

# %% [markdown]
# The second line is from the restart, which went on from step 20, and ended with the weights of
# `whole`.
#
# ## What must a checkpoint hold?
#
# It must hold all that changes during the training. To see what that is, we take a network so small
# that one process is enough for eight steps. Like LeNet in the program it has **dropout**: in each
# training step random numbers choose which units are left out. And its optimizer has **momentum**,
# a running sum of the gradients so far.

# %% tags=["torch", "your-turn", "trains"]
torch.manual_seed(1)
inputs = torch.randn(8, 4)  # one row for each step


def small_training():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return net, optimizer


def small_steps(net, optimizer, begin, end):
    for step in range(begin, end):
        optimizer.zero_grad()
        loss = (net(inputs[step]) - 1).square().sum()
        loss.backward()
        optimizer.step()


net, optimizer = small_training()
small_steps(net, optimizer, 0, 8)
uninterrupted = net[2].bias.item()
print("bias of the last layer after eight steps:", round(uninterrupted, 4))

# %% [markdown]
# ### Your turn: interrupt, and go on
#
# Write both halves of it before you scroll on. `keep` is called after some of the eight steps, and
# puts into a dictionary all that must be kept. `go_on` stands for a new process: it calls
# `small_training()`, and goes on with nothing but a copy of that dictionary. You will need
# `state_dict` and `load_state_dict`, which networks and optimizers have, and two functions of
# `torch` for its random numbers, `get_rng_state` and `set_rng_state`. (`small_training` seeds them,
# so set them after it.)

# %% tags=["torch", "your-turn", "trains"]
def keep(net, optimizer, step):
    """A dictionary with all that must be kept after `step` steps."""
    ...


def go_on(kept):
    """Begin anew, restore what was kept, do the steps up to 8, and return the network."""
    ...


def interrupted(done):
    net, optimizer = small_training()
    small_steps(net, optimizer, 0, done)
    kept = keep(net, optimizer, done)
    loaded = copy.deepcopy(kept)  # stands for a file that is written and read
    net = go_on(loaded)
    return net[2].bias.item()


after_2 = ((2,), uninterrupted)
after_5 = ((5,), uninterrupted)
after_7 = ((7,), uninterrupted)
cases = [after_2, after_5, after_7]
your_turn(interrupted, cases, stubs=[keep, go_on])

# %% [markdown]
# (If yours returns 0.830 after 2 steps, the weights are missing; if it returns 0.675, the momentum;
# and if 0.838, the random state, or it was set too early.)

# %% [markdown]
# ## On several ranks
#
# In the program a checkpoint holds the same four: the model's weights, the optimizer's momentum,
# the step, and the random state. But there is **a random state for each rank**, and only one of
# everything else. Why? After each step weights and momentum are the same on all ranks (chapter 14).
# But each rank draws its own random numbers for dropout, so that two ranks don't leave out the same
# units.
#
# This is the program's function, written once more. `all_gather_object` takes any Python object
# from each rank, here its random state, and fills a list with all of them:

# %% tags=["torch"]
def snapshot(model, optimizer, step):
    random_states = [None] * dist.get_world_size()  # a place for each rank's
    dist.all_gather_object(random_states, torch.get_rng_state())
    return {
        "model": model.module.state_dict(),  # `module` is the network within DDP
        "optimizer": optimizer.state_dict(),
        "step": step,  # steps that are done
        "random": random_states,
    }

# %% [markdown]
# The program's `restore` puts each part back where it came from, as your `go_on` does. Each rank
# takes its own random state from the list.
#
# (On GPUs dropout draws its numbers there, so a checkpoint must also hold each rank's
# `torch.cuda.get_rng_state()`. And there give `torch.load` the argument `map_location="cpu"`: else
# every rank would load onto the GPU of rank 0, which wrote the file.)
#
# ### The step says which images come next
#
# A checkpoint doesn't say which images were used already. Why not? Its `step` counts the steps that
# are done, so it is also the number of the next one. For that to be enough, a step's images must
# depend on its number alone. So each epoch has its own order, from a generator of its own. Every
# rank makes the same order. Of a step's rows rank 0 takes the first, the third and so on, and rank
# 1 the others:

# %% tags=["torch"]
def batch_rows(step):
    epoch = step // 16  # an epoch is 512 images: 16 steps of 32
    step_in_epoch = step % 16
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(512, generator=generator)
    first = 32 * step_in_epoch
    return order[first : first + 32]


rows = batch_rows(20)
print("first rows of step 20:", rows[:8].tolist())
print("of these rank 0 takes:", rows[:8:2].tolist())
print("         rank 1 takes:", rows[1:8:2].tolist())

# The program does the same:
assert torch.equal(rows, resumable_train.batch_rows(20))

# %% [markdown]
# ## What if a part is missing?
#
# Imagine four programs, each of which gets one part wrong. To see what happens, we change one part
# in copies of `left`, the checkpoint of step 20, and let the program go on from each copy. Two of
# the four forget a part, so that it is as at the start of a training. So first we take the parts
# from there, on two ranks (by chapter 14's `ranks`):

# %% tags=["torch"]
def snapshot_of_new():
    model, optimizer = resumable_train.new_training()
    return snapshot(model, optimizer, step=0)


new = ranks(snapshot_of_new)[0]
print("parts:", list(new))
assert new.keys() == left.keys()  # our snapshot has what the program's has

# %% [markdown]
# Four programs, and what is wrong in the checkpoint that each would find:

# %% tags=["torch"]
def save_changed(name, part, value):
    checkpoint = dict(left)  # a copy
    checkpoint[part] = value
    torch.save(checkpoint, folder / f"{name}.pt")


save_changed("new_momentum", "optimizer", new["optimizer"])
save_changed("step_16", "step", 16)  # knows only the epoch, which began at step 16
save_changed("new_random_states", "random", new["random"])
of_rank_0 = left["random"][0]
save_changed("rank_0_twice", "random", [of_rank_0, of_rank_0])

# %% [markdown]
# The program goes on from each of them. **Predict:** with which of them does it stop with an error?
# With which does it end with the weights of `whole`?

# %% tags=["torch", "trains", "predict"]
names = ["new_momentum", "step_16", "new_random_states", "rank_0_twice"]
torchrun("resumable_train.py", nproc=2, arguments=[folder, *names], log=None)
for name in names:
    weights = torch.load(folder / f"{name}.weights")
    print(name, "ends as whole:", torch.equal(weights[47], whole[47]))

# %% [markdown]
# <details><summary>What came out</summary>
#
# None of them stops with an error, and none ends with the weights of `whole`.
#
# </details>
#
# What do they do instead? With **new momentum** the running sum of the gradients begins again at
# zero. With **step 16** the four batches of steps 16 to 19 come twice, so 128 of the epoch's 512
# images. With **new random states** the random numbers of step 0 are drawn again. If **rank 0's
# state** is taken for both ranks, both leave out the same units. Comparing the ranks' weights
# with each other would show none of this, since DDP gives both the same gradients in any case.
#
# **No error tells you that a part was forgotten. A kill and a comparison do.** In a program of your
# own look for what else changes: the scheduler of the learning rate (exercise 2), the place in a
# `DataLoader`, and the random states of NumPy, of Python and of each GPU.
#
# ## How to write it
#
# All ranks take part in the snapshot, and rank 0 writes for all. It could write over the old
# checkpoint, or into a temporary file, which it renames when it is complete. A rename replaces the
# old file in one go, so it is **atomic**. (The program's `write` saves to a file, and waits until
# the bytes are on the disk.)

# %% tags=["torch"]
def overwrite(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)
    if dist.get_rank() == 0:
        resumable_train.write(state, path)


def write_and_rename(model, optimizer, step, path):
    state = snapshot(model, optimizer, step)
    if dist.get_rank() == 0:
        resumable_train.write(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # the rename

# %% [markdown]
# A process may be killed while it writes, or the disk may be full. We imitate a full disk: these
# processes may write no file longer than 200,000 bytes, and a checkpoint is longer. The old one,
# from step 20, is there already. **Predict:** what does `torch.load` find after each of the two
# functions?

# %% tags=["torch", "predict"]
def on_full_disk(way, path):
    model, optimizer = resumable_train.new_training()
    longest = 200_000  # bytes
    # From now on the operating system won't let this process write a file longer than that.
    resource.setrlimit(resource.RLIMIT_FSIZE, (longest, longest))
    way(model, optimizer, 24, path)


for way in [overwrite, write_and_rename]:
    path = folder / "old.pt"
    torch.save(left, path)
    try:
        ranks(on_full_disk, way, path)
    except (OSError, RuntimeError):
        print(f"{way.__name__}: writing failed")
    try:
        print("    there is a checkpoint from step", torch.load(path)["step"])
    except RuntimeError as error:
        print("    torch.load:", str(error).split(":")[0])

# %% [markdown]
# <details><summary>What came out</summary>
#
# `overwrite` has left a piece of the new checkpoint, which can't be read, so the whole training is
# lost. `write_and_rename` has left the old one.
#
# </details>
#
# **So write to a temporary file, and rename it when it is complete.** Then one of the two, the old
# checkpoint or the new one, is always there.
#
# ## Which process gets which rank?
#
# So far `--standalone` said that there is one machine. On several, each runs torchrun once. It
# starts as many processes as we say, usually one for each device. All torchruns meet at one
# address, the **rendezvous** (`rdzv` in torchrun's options), on a machine that we call HOST.
#
# ![Two machines, HOST and another one, with a torchrun on each, which has started two processes.
# Their local ranks are 0 and 1 on each machine; their ranks aren't known yet. The rendezvous is on
# HOST, and both torchruns point to it.](src/drawings/torchrun.svg)
#
# There the processes get their **rank**, their number in the whole job. The **local rank** is a
# process's number on its machine. It chooses the device, `cuda:0` or `cuda:1`. torchrun tells both
# by environment variables, `RANK` and `LOCAL_RANK`. A small program prints them, and then waits to
# be ended. (It sends nothing to other ranks.)

# %% tags=["torch", "measured"]
# %%writefile {folder}/who.py
import os
import sys
import time

rank = os.environ["RANK"]
world = os.environ["WORLD_SIZE"]
local_rank = os.environ["LOCAL_RANK"]
print(f"{sys.argv[1]}: rank {rank} of {world}, local rank {local_rank}", flush=True)
time.sleep(300)

# %% [markdown]
# The job may have one machine or two (`--nnodes=1:2`). That is called **elastic**: machines may
# join and leave. HOST is started first and alone, and another machine joins later. Both run
#
# ```
# torchrun --nnodes=1:2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:9000 who.py NAME
# ```
#
# (c10d is the name of PyTorch's own rendezvous.) Here both are this computer, by two of its
# addresses. `start_machine` is that command with two options more: by which address the machine is
# known, and a shorter wait for other machines.

# %% tags=["torch", "fold"]
# define: `start_machine` and `end`, for a torchrun; `show_lines`, what all processes have printed
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))  # 0 means: any port that is free
    port = listener.getsockname()[1]


def start_machine(name, address):
    # This is `torchrun`:
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nnodes=1:2", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.2:{port}"]
    # Once there are enough machines, others may join at once for so many seconds:
    command += [f"--local-addr={address}", "--rdzv-conf=last_call_timeout=3"]
    command += [folder / "who.py", name]
    with open(folder / "who.txt", "a") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL)


def end(machines):
    for machine in machines:
        machine.terminate()
    for machine in machines:
        machine.wait()


def show_lines(processes):
    """Print the lines of a job of so many processes, once there are as many."""
    for _ in range(1500):
        text = (folder / "who.txt").read_text()
        lines = {line for line in text.splitlines() if f" of {processes}," in line}
        if len(lines) == processes:
            print(*sorted(lines), sep="\n")
            return
        time.sleep(0.1)
    raise TimeoutError(f"{processes} processes should have printed; there is: {text}")

# %% [markdown]
# **Predict:** HOST's two processes have the ranks 0 and 1 while it is alone. Do they keep them once
# the other machine has joined?

# %% tags=["torch", "predict"]
(folder / "who.txt").write_text("")  # start_machine adds what its processes print
machines = []
try:
    host = start_machine("HOST", "127.0.0.2")
    machines.append(host)
    show_lines(processes=2)

    other = start_machine("other", "127.0.0.1")
    machines.append(other)
    show_lines(processes=4)
finally:  # also after an error
    end(machines)

# %% [markdown]
# <details><summary>What came out</summary>
#
# No: HOST's processes now have the ranks 2 and 3, and those of the other machine 0 and 1.
#
# </details>
#
# When the machine joined, torchrun ended HOST's processes, and started all four anew. So for a
# training that is a kill and a resume, too. Each time this rendezvous assigns the ranks anew, here
# in the order of the two addresses, compared as strings: the other machine's 127.0.0.1 comes before
# HOST's 127.0.0.2. (Machines without a given address are ordered by their names: `_NodeDesc` in
# `dynamic_rendezvous.py`.) So HOST isn't guaranteed rank 0.
#
# **So a rank is a number for one start only.** What rank 1 has written on its own disk may lie on a
# machine that is rank 0 after a restart, or on one that is gone. That is why our checkpoint is in a
# folder that all machines see, and why a random state belongs to a rank and not to a machine.
#
# > **In PyTorch 2.13** a training, unlike `who.py`, doesn't go on when rank 0 moves to another
# > machine. In our tries with gloo HOST's processes failed or waited. After
# > `export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` on both machines it went on.
#
# ## A rank that hangs
#
# A process may also hang, for example because two of its threads wait for each other. It hasn't
# ended, so torchrun, which waits for processes to end, sees nothing, and the other ranks wait for
# its messages. What ends their waiting is a **time-out**. Here rank 1 sleeps, and rank 0 waits in
# `all_reduce` for five seconds at most:

# %% tags=["torch", "measured"]
def one_hangs():
    group = dist.new_group(timeout=timedelta(seconds=5))
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1), group=group)


try:
    ranks(one_hangs)
except RuntimeError as error:
    print(error)

# %% [markdown]
# The rank that failed is rank 0, which waited. Rank 1, the one that hangs, notices nothing; `ranks`
# ended it, as torchrun ends all processes once one has failed. So a time-out makes a hang visible,
# as the failure of a rank that waits, and from there on all is as above: restart, and resume.
#
# In a program the time-out is the argument `timeout` of `init_process_group`. If you give none, it
# is 30 minutes, and with NCCL 10 (PyTorch's documentation, for both). Choose it longer than
# anything that ranks may legitimately wait for, such as rank 0's writing of a large checkpoint.
#
# MXNet trains across machines in a different way: deeper: The parameter server.

# %% [markdown]
# ## Summary
#
# - If a process fails, torchrun ends the others and, if `--max-restarts` allows, starts all anew.
#   What isn't in a file is lost.
# - A checkpoint holds all that changes: model, optimizer, step, and each rank's random state. With
#   these our training on two ranks ended as if nobody had killed it, bit for bit. When one was
#   forgotten, it ended elsewhere, without an error.
# - Write to a temporary file, then rename. Test by a kill.
# - Ranks are assigned anew at each start. A time-out ends the waiting for a rank that hangs.
#
# **Further reading.** *Torch Distributed Elastic* in PyTorch's documentation, and there
# `torch.distributed.checkpoint`, whose `async_save` writes while the training goes on. PyTorch's
# `SECURITY.md` says why a rendezvous belongs behind a firewall.

# %% [markdown]
# ## Exercises
#
# 1. **Three ranks.** Kill the program at step 22 on three ranks, resume it, and compare it with one
#    that nobody killed. How far apart are the weights after step 20, the first that was resumed?
# 2. **A schedule.** Let `small_training` also make a scheduler,
#    `torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)`, whose `step()` is called
#    after each step and halves the learning rate after every third. A program that is interrupted
#    after 5 steps saves net, optimizer, step and random state, but not the scheduler. Which
#    learning rates do its steps 5, 6 and 7 have, and which should they have?

# %% [markdown]
# ### Answer to *Your turn*
#
# `state_dict` returns the arrays themselves, no copies. So copy them or write them to a file before
# the training goes on.

# %% tags=["torch", "solution", "your-turn", "trains"]
def keep(net, optimizer, step):
    return {
        "net": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "random": torch.get_rng_state(),
    }


def go_on(kept):
    net, optimizer = small_training()
    net.load_state_dict(kept["net"])
    optimizer.load_state_dict(kept["optimizer"])
    torch.set_rng_state(kept["random"])
    small_steps(net, optimizer, kept["step"], 8)
    return net


your_turn(interrupted, cases, stubs=[keep, go_on])

# %% [markdown]
# ### Answer 1
#
# They differ by rounding. A new DDP packs the gradients of its first pass in another order than
# later ones (chapter 14). At another place in the bucket the three numbers of a sum can be added up
# in another order.

# %% tags=["torch", "solution", "measured", "trains"]
for name in ["three_killed", "three_whole"]:
    (folder / f"{name}.pt").unlink(missing_ok=True)
try:
    arguments = [folder, "three_killed", "--kill-at", 22]
    torchrun("resumable_train.py", nproc=3, arguments=arguments, log=None)
except Failed:
    pass
arguments = [folder, "three_killed", "three_whole"]
torchrun("resumable_train.py", nproc=3, arguments=arguments, log=None)

resumed = torch.load(folder / "three_killed.weights")
uninterrupted_three = torch.load(folder / "three_whole.weights")
difference = (resumed[20] - uninterrupted_three[20]).abs().max().item()
print(f"step 20: largest difference of a weight: {difference:.0e}")
assert difference < 1e-6

# %% [markdown]
# ### Answer 2
#
# The optimizer's state holds the present rate, so step 5 is right. But the new scheduler counts its
# calls from zero: it would halve the rate before step 8, where it is due before step 6.

# %% tags=["torch", "solution", "trains"]
def learning_rates(done, keep_scheduler):
    net, optimizer = small_training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    used = []
    for step in range(8):
        if step == done:
            saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
            net, optimizer = small_training()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
            optimizer.load_state_dict(saved["optimizer"])
            if keep_scheduler:
                scheduler.load_state_dict(saved["scheduler"])
        used.append(optimizer.param_groups[0]["lr"])
        small_steps(net, optimizer, step, step + 1)
        scheduler.step()
    return used


for keep_scheduler in [True, False]:
    print("scheduler kept:", keep_scheduler, learning_rates(5, keep_scheduler))
assert learning_rates(5, True) == learning_rates(0, True)
assert learning_rates(5, False)[5] == learning_rates(5, True)[5]
assert learning_rates(5, False)[6:] != learning_rates(5, True)[6:]
