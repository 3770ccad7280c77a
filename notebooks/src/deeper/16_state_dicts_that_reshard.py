# %% [markdown]
# # Deeper · State dicts that reshard
#
# A training that is sharded four ways is saved, and must go on with two ranks, or with one. Whose
# part is in the file?
#
# ## What you'll do
#
# Train five steps on four ranks, save, and go on in other ways: on two ranks, on one, with plain
# Adam. Then load what doesn't fit, and see what is said.
#
# ## What you'll learn
#
# - how state is gathered so that any number of ranks can load it;
# - which of two files to save: whole weights, or one file a rank;
# - why a shard has to say whose it is.
#
# ## What you need
#
# Chapter 16, no GPU, and PyTorch. Reading takes {reading time}, running about 20 seconds.

# %% tags=["torch"]
import copy
import gc
import sys
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 16's sharded_train.py is, and chapter 14's ranks.py
from ranks import ranks
from sharded_train import FSDP, ShardedGradients, ShardedOptimizer

# %% [markdown]
# ## Ten steps without a break
#
# How do we know that nothing was lost? Ten steps in one process are the oracle. A run that was
# saved after five steps and goes on in another way must come to the same weights. The sizes are
# odd, so that shards are padded.

# %%
generator = torch.Generator().manual_seed(16)
batches = []
for step in range(10):
    x = torch.randn(24, 7, generator=generator).double()
    y = torch.randint(3, (24,), generator=generator)
    batches.append((x, y))


def odd_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()


# %% tags=["trains"]
def adam(params):
    return torch.optim.Adam(params, lr=0.01)


def train_steps(model, optimizer, batches):
    for x, y in batches:
        if dist.is_initialized():
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
            y = y.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()


net = odd_net()
train_steps(net, adam(net.parameters()), batches)
unbroken = net.state_dict()
print("trained:", ", ".join(unbroken))

# %% [markdown]
# ## Stage 1: gather the state
#
# Each rank has Adam's means for its shard only. Weights are whole on every rank, so
# `net.state_dict()` is as always. `optimizer.state_dict()` gathers the means, so all ranks call it:

# %% tags=["trains"]
def five_with_stage_1():
    net = odd_net()
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    train_steps(net, optimizer, batches[:5])
    mine = [tuple(state["exp_avg"].shape) for state in optimizer.local.state.values()]
    return net.state_dict(), optimizer.state_dict(), mine


saved = ranks(five_with_stage_1, world=4)
for rank, (weights, state, mine) in enumerate(saved):
    print(f"rank {rank} of 4: Adam's first mean of each shard is {mine}")
weights, state, mine = saved[0]
print("saved:", [tuple(values["exp_avg"].shape) for values in state["state"].values()])

# %% [markdown]
# What is saved has the parameters' own shapes. Nothing in it says that there were four ranks. So
# plain Adam, in one process, can load it:

# %% tags=["trains"]
net = odd_net()
net.load_state_dict(weights)
optimizer = adam(net.parameters())
optimizer.load_state_dict(copy.deepcopy(state))  # a copy: Adam goes on in the arrays that it gets
train_steps(net, optimizer, batches[5:])
print("four ranks, then plain Adam, equal ten steps:",
      largest_difference(net.state_dict(), unbroken) < 1e-12)

# %% tags=["trains"]
def go_on_with(kind, weights, state):
    net = odd_net()
    net.load_state_dict(weights)
    optimizer = kind(net.parameters(), torch.optim.Adam, lr=0.01)
    optimizer.load_state_dict(state)  # each rank takes its shard of it
    train_steps(net, optimizer, batches[5:])
    return net.state_dict()


for world in [1, 2, 3]:
    found = ranks(go_on_with, ShardedOptimizer, weights, state, world=world)
    print(f"four ranks, then {world}:", largest_difference(found, unbroken) < 1e-12)
found = ranks(go_on_with, ShardedGradients, weights, state)
print("four ranks, then stage 2 on 2:", largest_difference(found, unbroken) < 1e-12)

# %% tags=["fold"]
# check: they are equal, and a run that forgets the state is not
def forgets(weights, state):
    return go_on_with(ShardedOptimizer, weights, {**state, "state": {}})


for world in [1, 2, 3]:
    found = ranks(go_on_with, ShardedOptimizer, weights, state, world=world)
    assert largest_difference(found, unbroken) < 1e-12, world
found = ranks(go_on_with, ShardedGradients, weights, state)
assert largest_difference(found, unbroken) < 1e-12
assert not largest_difference(ranks(forgets, weights, state), unbroken) < 1e-3
print("checked")

# %% [markdown]
# To gather costs memory: every rank has the whole state for a moment. Where that doesn't fit, each
# rank saves its own shards, and `torch.distributed.checkpoint` cuts anew when it loads.
#
# ## Stage 3: two kinds of file
#
# In stage 3 the weights are sharded, too. `gather_full_params` and `gather_optimizer_state` give
# what one process would save:

# %% tags=["trains"]
def five_with_stage_3():
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    train_steps(model, optimizer, batches[:5])
    return model.gather_full_params(), model.gather_optimizer_state(optimizer)


weights, state = ranks(five_with_stage_3, world=4)[0]
net = odd_net()
net.load_state_dict(weights)
optimizer = adam(net.parameters())
optimizer.load_state_dict(copy.deepcopy(state))
train_steps(net, optimizer, batches[5:])
print("stage 3 on four ranks, then plain Adam:",
      largest_difference(net.state_dict(), unbroken) < 1e-12)
assert largest_difference(net.state_dict(), unbroken) < 1e-12

# %% tags=["trains"]
def go_on_with_stage_3(weights, state):
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    model.load_full_params(weights)  # after wrapping; each rank takes its shard of it
    model.load_optimizer_state(optimizer, state)
    train_steps(model, optimizer, batches[5:])
    return model.gather_full_params()


for world in [1, 2, 3]:
    found = ranks(go_on_with_stage_3, weights, state, world=world)
    print(f"stage 3 on four ranks, then on {world}:", largest_difference(found, unbroken) < 1e-12)
    assert largest_difference(found, unbroken) < 1e-12, world

# %% [markdown]
# `state_dict` is the other kind: this rank's shards, without a message. **Predict:** rank 0's file
# is loaded by both ranks. The keys match, and so do the shapes. What happens?

# %%
def load_rank_0s_file():
    model = FSDP(odd_net())
    files = [None] * dist.get_world_size()
    dist.all_gather_object(files, model.state_dict())
    shapes = {name: tuple(shard.shape) for name, shard in files[0].items()
              if torch.is_tensor(shard)}
    try:
        model.load_state_dict(files[0])
        said = "loaded"
    except ValueError as error:
        said = str(error)
    return shapes, said


for rank, (shapes, said) in enumerate(ranks(load_rank_0s_file)):
    print(f"rank {rank}: {said}")
print("in the file:", shapes)

# %% [markdown]
# Rank 1 refuses. Without more, it would have had rank 0's half of each weight in both places, and
# no error. So FSDP writes into its `state_dict` whose shards they are, by PyTorch's
# `get_extra_state`, and compares that when it loads.
#
# A shard has as many dimensions as its parameter: a matrix's is a column. So groups that are made
# by dimension or by name are right after wrapping, too, such as the usual "no weight decay for
# biases". Whole weights that are handed to `load_state_dict` are refused even with `strict=False`,
# which would load none of them and say nothing:

# %%
def load_whole_weights(strict):
    model = FSDP(odd_net())
    by_dimension = [name for name, p in model.named_parameters() if p.dim() >= 2]
    try:
        model.load_state_dict(odd_net().state_dict(), strict=strict)
        said = "loaded"
    except ValueError as error:
        said = str(error)
    return by_dimension, said


by_dimension, said = ranks(load_whole_weights, False)[0]
print("matrices:", by_dimension)
print("strict=False:", said)

# %% tags=["fold"]
# check: rank 0 loads its own, rank 1 doesn't; whole weights are refused either way
results = ranks(load_rank_0s_file)
assert results[0][1] == "loaded" and "every rank loads what it saved" in results[1][1]
for strict in [True, False]:
    for by_dimension, said in ranks(load_whole_weights, strict):
        assert by_dimension == ["module.0.weight", "module.2.weight"]
        assert "load_full_params" in said
print("so it is")

# %% [markdown]
# | you have | you want | all ranks call |
# | --- | --- | --- |
# | stage 1 or 2 | any number of ranks, or plain Adam | `optimizer.state_dict()` |
# | stage 3 | any number of ranks, or no FSDP | `gather_full_params`, `gather_optimizer_state` |
# | stage 3, too large to gather | as many ranks | `state_dict()` of both, a file a rank |
#
# ## Dropped is freed
#
# A last question about state: is it freed when an object is dropped? A hook on a parameter that
# holds its optimizer keeps it, and with it all state, as long as the parameter lives; PyTorch's
# hooks are not seen by Python's garbage collector. So ours hold a *weak* reference:

# %%
class Holds(ShardedGradients):
    """With a hook that holds it."""

    def add_param_group(self, group):
        super().add_param_group(group)
        for p in self.param_groups[-1]["params"]:
            p.register_post_accumulate_grad_hook(self.look)

    def look(self, p):
        pass


def is_freed(kind):
    net = odd_net()
    optimizer = kind(net.parameters(), torch.optim.Adam)
    train_steps(net, optimizer, batches[:1])
    still_there = weakref.ref(optimizer)
    weight_there = weakref.ref(net[0].weight)
    del optimizer
    del net
    gc.collect()
    return still_there() is None, weight_there() is None


for kind in [Holds, ShardedGradients]:
    optimizer_freed, weight_freed = ranks(is_freed, kind)[0]
    print(f"{kind.__name__}: optimizer freed {optimizer_freed}, weights freed {weight_freed}")

# %% tags=["fold"]
# check: and FSDP's, too, with the module
def fsdp_is_freed():
    model = FSDP(odd_net())
    optimizer = adam(model.parameters())
    train_steps(model, optimizer, batches[:1])
    there = [weakref.ref(model), weakref.ref(model.module[0].weight)]
    del model, optimizer
    gc.collect()
    return [each() is None for each in there]


assert ranks(is_freed, Holds) == [(False, False)] * 2
assert ranks(is_freed, ShardedGradients) == [(True, True)] * 2
assert ranks(fsdp_is_freed) == [[True, True]] * 2
print("freed")

# %% [markdown]
# ## Summary
#
# - A state that was gathered has no trace of the number of ranks: any number, and plain Adam, go on
#   with it, to $10^{-12}$.
# - A file of shards is right for the rank that wrote it, and must say so.
# - `load_state_dict(..., strict=False)` is silent about keys that don't match.
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
for said in ranks(load_shards, files, world=3):
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
