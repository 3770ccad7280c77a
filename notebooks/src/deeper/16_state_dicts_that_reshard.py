# %% [markdown]
# # Deeper · State dicts that reshard
#
# A training that is sharded four ways is saved, and must go on with two ranks, or with one. Whose
# part is in the file?
#
# > **What you'll do:** train five steps on four ranks, save, and go on in other ways: on two ranks,
# > on one, with plain Adam. Then load what doesn't fit, and see what happens.
# >
# > **What you'll learn:** how state is gathered so that any number of ranks can load it; which of
# > two files to save: whole weights, or one file a rank; what can go wrong without an error.
# >
# > **What you need:** chapter 16, no GPU, and PyTorch 2.13 or newer. Reading takes {reading time},
# > running about 20 seconds.

# %% tags=["torch"]
import math
import sys
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.compare import largest_difference

# Where chapter 16's sharded_train.py is, and chapter 14's ranks.py.
sys.path.insert(0, "..")
from ranks import ranks
from sharded_train import FSDP, ShardedGradients, ShardedOptimizer

# %% [markdown]
# ## Ten steps without a break
#
# How do we know that nothing was lost? A run that was saved after five steps, and goes on in
# another way, must come to the weights of ten steps in one process. The network's sizes are odd, so
# that shards are unequal. Numbers are float64, so that rounding stays below $10^{-12}$.

# %% tags=["trains"]
generator = torch.Generator().manual_seed(16)
batches = []
for step in range(10):
    # 24: for 1, 2, 3 and 4 ranks.
    x = torch.randn(24, 7, generator=generator).double()
    y = torch.randint(3, (24,), generator=generator)
    batches.append((x, y))


def odd_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def train_steps(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()
    return loss.item()


net = odd_net()
optimizer = adam(net.parameters())
loss = train_steps(net, optimizer, batches)
unbroken = net.state_dict()
print(f"loss after ten steps: {loss:.3f}")

# %% [markdown]
# On several ranks each has its part of every batch. Gradients are averaged inside FSDP, or inside
# the optimizer of stage 1 or 2.

# %% tags=["fold"]
# define: `my_part` and `my_batches`, a rank's part of every batch, as in chapter 16
def my_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def my_batches():
    return [(my_part(x), my_part(y)) for x, y in batches]


# %% [markdown]
# ## Stage 1: gather the state
#
# Each rank has Adam's means for its shard only. How does that become one file for any number of
# ranks? A shard is as long as the numbers divided by the ranks, rounded up; the last ones may be
# shorter, or empty. By hand, for 5 x 7 weights, on four ranks and then on two:

# %%
numbers = torch.arange(35)  # 5 x 7 weights, flat
on_four = numbers.split(math.ceil(35 / 4))
print("on four ranks:", [len(shard) for shard in on_four])

# A zero at its end: all ranks must send equally many numbers.
filled = F.pad(on_four[3], (0, 1))
gathered = torch.cat([on_four[0], on_four[1], on_four[2], filled])
print("gathered:", len(gathered))

whole = gathered[:35].view(5, 7)  # the padding is cut off
print("saved:", tuple(whole.shape), "with a last row of", whole[4].tolist())

on_two = whole.flatten().split(math.ceil(35 / 2))
print("on two ranks:", [len(shard) for shard in on_two])

# %% [markdown]
# `optimizer.state_dict()` does that with each of Adam's means. So all ranks call it: rank 0 alone
# would wait for the others. Weights are whole on every rank in stage 1, and `net.state_dict()` is
# as always. Rank 0 writes the file.

# %% tags=["trains"]
folder = TemporaryDirectory()
path = f"{folder.name}/stage_1.pt"


def save_with_stage_1(path):
    net = odd_net()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    train_steps(net, optimizer, my_batches()[:5])
    adam_state = optimizer.state_dict()  # all ranks
    if dist.get_rank() == 0:
        torch.save({"weights": net.state_dict(), "adam": adam_state}, path)
    adam_of_shards = optimizer.local
    return [len(values["exp_avg"]) for values in adam_of_shards.state.values()]


lengths = ranks(save_with_stage_1, path, world=4)
whole_lengths = [p.numel() for p in odd_net().parameters()]
print(f"numbers in Adam's first mean, of parameters with {whole_lengths} numbers:")
for rank in range(4):
    print(f"rank {rank} of 4: {lengths[rank]}")

saved = torch.load(path)
for number, values in saved["adam"]["state"].items():
    print(f"in the file, parameter {number}: {tuple(values['exp_avg'].shape)}")

# %% [markdown]
# Five numbers in shards of 2, or three in shards of 1, don't reach rank 3. In the file nothing says
# that there were four ranks. So plain Adam, in one process, can load it:

# %% tags=["trains"]
def go_on_with_plain_adam(path):
    saved = torch.load(path)
    net = odd_net()
    net.load_state_dict(saved["weights"])
    optimizer = adam(net.parameters())
    optimizer.load_state_dict(saved["adam"])
    train_steps(net, optimizer, batches[5:])
    return net.state_dict()


weights = go_on_with_plain_adam(path)
print("four ranks, then plain Adam, equal ten steps:",
      largest_difference(weights, unbroken) < 1e-12)

# %% [markdown]
# Any number of ranks can load it, too: each takes its shards. And if we load the weights and forget
# Adam's state?

# %% tags=["trains"]
def go_on_from(path, with_adams_state):
    saved = torch.load(path)
    net = odd_net()
    net.load_state_dict(saved["weights"])
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    if with_adams_state:
        optimizer.load_state_dict(saved["adam"])
    train_steps(net, optimizer, my_batches()[5:])
    return net.state_dict()


def go_on_with_stage_1(path):
    return go_on_from(path, with_adams_state=True)


def forget_adams_state(path):
    return go_on_from(path, with_adams_state=False)


for world in [1, 2, 3]:
    weights = ranks(go_on_with_stage_1, path, world=world)[0]
    print(f"four ranks, then {world}:", largest_difference(weights, unbroken) < 1e-12)
forgotten = ranks(forget_adams_state, path, world=2)[0]
away = float(largest_difference(forgotten, unbroken))
print(f"Adam's state forgotten: a weight is off by {away:.0%} of its array's largest")

# %% tags=["fold"]
# check: equal on every rank, and with stage 2; with Adam's state forgotten, not equal
def go_on_with_stage_2(path):
    saved = torch.load(path)
    net = odd_net()
    net.load_state_dict(saved["weights"])
    optimizer = ShardedGradients(net.parameters(), torch.optim.Adam, lr=0.01)
    optimizer.load_state_dict(saved["adam"])
    train_steps(net, optimizer, my_batches()[5:])
    return net.state_dict()


for world in [1, 2, 3]:
    found = ranks(go_on_with_stage_1, path, world=world)
    assert largest_difference(found, unbroken) < 1e-12, world
assert largest_difference(ranks(go_on_with_stage_2, path), unbroken) < 1e-12
assert not largest_difference(ranks(forget_adams_state, path), unbroken) < 1e-3
assert largest_difference(go_on_with_plain_adam(path), unbroken) < 1e-12
print("stage 2 can go on with it, too")

# %% [markdown]
# **A gathered state fits any number of ranks.** But every rank has it whole for a moment. Where
# that doesn't fit, each rank saves its own shards. (PyTorch's `torch.distributed.checkpoint` writes
# files, one a rank, that another number of ranks can load; ours can't.)
#
# ## Stage 3: two kinds of file
#
# In stage 3 the weights are sharded, too. What to save? One kind of file is gathered, as before:

# %% tags=["trains"]
def save_with_stage_3(path):
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    train_steps(model, optimizer, my_batches()[:5])
    weights = model.gather_full_params()  # all ranks
    adam_state = model.gather_optimizer_state(optimizer)
    if dist.get_rank() == 0:
        torch.save({"weights": weights, "adam": adam_state}, path)


def go_on_with_stage_3(path):
    saved = torch.load(path)
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    # Each rank takes its shards.
    model.load_full_params(saved["weights"])
    model.load_optimizer_state(optimizer, saved["adam"])
    train_steps(model, optimizer, my_batches()[5:])
    return model.gather_full_params()


path_3 = f"{folder.name}/stage_3.pt"
ranks(save_with_stage_3, path_3, world=4)
for world in [1, 2, 3]:
    weights = ranks(go_on_with_stage_3, path_3, world=world)[0]
    print(f"stage 3 on four ranks, then on {world}:", largest_difference(weights, unbroken) < 1e-12)

# %% tags=["fold", "trains"]
# check: on every rank, and with plain Adam in one process
for world in [1, 2, 3]:
    found = ranks(go_on_with_stage_3, path_3, world=world)
    assert largest_difference(found, unbroken) < 1e-12, world
assert largest_difference(go_on_with_plain_adam(path_3), unbroken) < 1e-12
print("plain Adam goes on with it, too")

# %% [markdown]
# The other kind: each rank writes a file of its own shards, and nothing has to be sent. In stage 3
# shards keep their padding, so that all have one shape: of five biases rank 0 has three, rank 1
# two and a zero. **Predict:** both ranks load *rank 0's* file, and copy each tensor in it to the
# parameter of its name, as PyTorch's `load_state_dict` does. Which five biases has the network?

# %%
def load_rank_0s_shards(folder):
    model = FSDP(odd_net())
    torch.save(model.state_dict(), f"{folder}/rank_{dist.get_rank()}.pt")
    dist.barrier()  # all have written
    saved = torch.load(f"{folder}/rank_0.pt")
    for name, p in model.named_parameters():
        p.data.copy_(saved[name])
    return model.gather_full_params()


mixed_up = ranks(load_rank_0s_shards, folder.name, world=2)[0]
for name, weights in [("right ", odd_net().state_dict()), ("loaded", mixed_up)]:
    print(name, [round(value, 2) for value in weights["0.bias"].tolist()])

# %% [markdown]
# No error, and a wrong network: two of rank 0's numbers stand in rank 1's place, too. So the
# `state_dict` of our `FSDP` also says whose shards they are. PyTorch saves what a module's
# `get_extra_state` returns, and gives it to `set_extra_state` when the module is loaded. In short,
# with a shorter message:
#
# ```python
# def get_extra_state(self):
#     return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
#
# def set_extra_state(self, state):
#     if state != self.get_extra_state():
#         raise ValueError(f"these are the shards of {state}")
# ```

# %%
def load_rank_0s_file(folder):
    model = FSDP(odd_net())
    torch.save(model.state_dict(), f"{folder}/fsdp_{dist.get_rank()}.pt")
    dist.barrier()
    try:
        model.load_state_dict(torch.load(f"{folder}/fsdp_0.pt"))
    except ValueError as error:
        return str(error)
    return "loaded"


for rank, said in enumerate(ranks(load_rank_0s_file, folder.name, world=2)):
    print(f"rank {rank}: {said}")
rank_0s_file = torch.load(f"{folder.name}/fsdp_0.pt")
print("in rank 0's file:", ", ".join(rank_0s_file.keys()))
print("whose they are:", rank_0s_file["_extra_state"])

# %% [markdown]
# Rank 1 refuses. Rank 0 has loaded its own file and goes on. If nobody catches rank 1's error, rank
# 0's first message waits until rank 1 has ended, and then fails.
#
# Adam's shards don't say whose they are. So keep them in one file with the model's, and load the
# model's first.
#
# All names in this file begin with `module.`, so the plain network can't load it. Many then try
# `strict=False`:

# %%
net = odd_net()
result = net.load_state_dict(rank_0s_file, strict=False)
print("no error")
print("parameters that were missing in the file:", ", ".join(result.missing_keys))
print("not used of the file:", ", ".join(result.unexpected_keys))

# %% [markdown]
# Nothing was loaded, and only those who look at the result find out. (Our `FSDP` refuses whole
# weights, even with `strict=False`.) What to call, on all ranks:
#
# | stage | the file fits | save by | load by |
# | --- | --- | --- | --- |
# | 1, 2: weights | any ranks | `net.state_dict` | `net.load_state_dict` |
# | 1, 2: Adam's | any ranks, plain Adam | `optimizer.state_dict` | `optimizer.load_state_dict` |
# | 3: weights | any ranks, or no FSDP | `gather_full_params` | `load_full_params` |
# | 3: Adam's | any ranks, plain Adam | `gather_optimizer_state` | `load_optimizer_state` |
# | 3, not gathered | its own rank, of as many | both `state_dict`s | both `load_state_dict`s |
#
# "Both" are the model's and the optimizer's.

# %% tags=["fold"]
# check: with own files it goes on, with another rank's Adam it is wrong; who refuses what
def go_on_with_own_file(folder, other):
    rank = dist.get_rank()
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    train_steps(model, optimizer, my_batches()[:5])
    saved = {"weights": model.state_dict(), "state": optimizer.state_dict()}
    torch.save(saved, f"{folder}/both_{rank}.pt")
    dist.barrier()
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    model.load_state_dict(torch.load(f"{folder}/both_{rank}.pt")["weights"])
    file = f"{folder}/both_{1 - rank if other else rank}.pt"
    optimizer.load_state_dict(torch.load(file)["state"])
    train_steps(model, optimizer, my_batches()[5:])
    return model.gather_full_params()


assert largest_difference(ranks(go_on_with_own_file, folder.name, False), unbroken) < 1e-12
found = ranks(go_on_with_own_file, folder.name, True)
away = float(largest_difference(found, unbroken))
print(f"with the other rank's Adam state: no error, a weight is off by {away:.0%}")
assert not largest_difference(found, unbroken) < 1e-3, "the other's means: wrong, without an error"


def load_whole_weights(strict):
    model = FSDP(odd_net())
    matrices = [name for name, p in model.named_parameters() if p.dim() >= 2]
    try:
        model.load_state_dict(odd_net().state_dict(), strict=strict)
    except ValueError as error:
        return matrices, str(error)
    return matrices, "loaded"


said = ranks(load_rank_0s_file, folder.name)
assert said[0] == "loaded" and "every rank loads what it saved" in said[1]


def first_message_afterwards(folder):
    if load_rank_0s_file(folder) != "loaded":
        return "refused"  # and this rank ends, as an error would end it
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "its first message failed"
    return "its first message was answered"


assert ranks(first_message_afterwards, folder.name) == ["its first message failed", "refused"]
for strict in [True, False]:
    for matrices, said in ranks(load_whole_weights, strict):
        assert matrices == ["module.0.weight", "module.2.weight"]
        assert "load_full_params" in said
assert largest_difference(net.state_dict(), odd_net().state_dict()) == 0, "nothing was loaded"
right = odd_net().state_dict()["0.bias"]
for found in ranks(load_rank_0s_shards, folder.name):
    assert torch.equal(found["0.bias"], torch.cat([right[:3], right[:2]]))

# %% [markdown]
# ## Summary
#
# Whose part is in the file? Everybody's, or one rank's, and then the file must say whose.
#
# - To gather is to join the shards, cut the padding off and reshape. A gathered file doesn't depend
#   on the number of ranks: any number, and plain Adam, can go on with it, to $10^{-12}$.
# - A file of shards is right for the rank that wrote it. Loaded by another it gives a wrong
#   network, without an error, unless it is checked.
# - `load_state_dict(..., strict=False)` raises nothing when no key matches. Look at what it
#   returns.
#
# ## Exercises
#
# 1. Save on two ranks with stage 3, load on three by `state_dict`. What is said?
# 2. Write `whole_mean(model, optimizer, p)`: Adam's first mean of one of FSDP's parameters, whole,
#    with one all-gather. (`p.cut` joins shards.) Check it against one process.

# %% [markdown]
# ### Answer 1
#
# The shapes differ, but that isn't what is said: the ranks are compared first.

# %% tags=["solution"]
def shards():
    return FSDP(odd_net()).state_dict()


def load_shards(files):
    try:
        FSDP(odd_net()).load_state_dict(files[dist.get_rank() % 2])
    except ValueError as error:
        return str(error)


files = ranks(shards)
answers = ranks(load_shards, files, world=3)
print("rank 0:", answers[0])
for said in answers:
    assert "'ranks': 2" in said and "'ranks': 3" in said

# %% [markdown]
# ### Answer 2

# %% tags=["solution", "trains"]
def whole_mean(model, optimizer, p):
    shard = optimizer.state[p]["exp_avg"]
    flat, wait = model.collectives.all_gather(shard.reshape(-1))
    wait()
    return p.cut.join(flat).clone()


def mean_of_first_weight():
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    train_steps(model, optimizer, batches[:1])
    return whole_mean(model, optimizer, model.module[0].weight)


net = odd_net()
optimizer = adam(net.parameters())
train_steps(net, optimizer, batches[:1])
expected = optimizer.state[net[0].weight]["exp_avg"]
for found in ranks(mean_of_first_weight, world=4):
    assert largest_difference(found, expected) < 1e-12
