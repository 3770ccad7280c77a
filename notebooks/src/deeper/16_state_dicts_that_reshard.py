# %% [markdown]
# # Deeper · Checkpoints that reshard
#
# A sharded training is saved by three ranks, and must go on with two, or with one. *Whose part is
# in which file, and who finds it again?* PyTorch answers with **distributed checkpoints**, the
# module `torch.distributed.checkpoint`: each rank writes its shards, and a table says which part of
# which weight lies where. So any number of ranks can load them, which is called **resharding**.
#
# > **What you'll do:** save on three ranks, look into the files, and go on in other ways.
# >
# > **What you'll learn:** what a distributed checkpoint has in it, and who writes what; how another
# > number of ranks loads it; two mistakes that raise no error.
# >
# > **What you need:** chapters 15 and 16, no GPU, and PyTorch 2.13 or newer.
# > Reading takes {reading time}, running about 10 seconds.

# %% tags=["torch"]
import sys
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 14's ranks.py is
from ranks import ranks

# In one process PyTorch warns that it loads in one process.
warnings.filterwarnings("ignore", "torch.distributed is disabled")

# %% [markdown]
# ## Ten steps without a break
#
# A training that is saved after five steps and goes on elsewhere must come to the weights of ten
# steps in one process. So that is our first run. The network has odd sizes, so that shards will be
# unequal, and float64, so that only last digits may differ.

# %% tags=["trains"]
batches = []
torch.manual_seed(0)
for step in range(10):
    x = torch.randn(24, 7).double()
    y = torch.randint(3, (24,))
    batches.append((x, y))


def make_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def my_part(tensor):
    if not dist.is_initialized():  # in one process
        return tensor
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def train(net, adam, first, last):
    for x, y in batches[first:last]:
        adam.zero_grad()
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()
        adam.step()


net = make_net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
train(net, adam, 0, 10)
unbroken = net.state_dict()

# %% [markdown]
# ## Save on three ranks
#
# `fully_shard` divides each weight by its rows, and each shard, a `DTensor`, knows of which whole
# it is a part. `get_state_dict` returns the weights and Adam's means, both by the weights' names.
# All ranks call `save`, and each writes a file:

# %% tags=["trains"]
def sharded():
    net = make_net()
    fully_shard(net)
    return net, torch.optim.Adam(net.parameters(), lr=0.01)


def save_after_five(folder):
    net, adam = sharded()
    train(net, adam, 0, 5)
    weights, state = get_state_dict(net, adam)
    checkpoint.save({"weights": weights, "adam": state, "step": 5}, checkpoint_id=folder)
    return tuple(weights["0.weight"].to_local().shape)


scratch = TemporaryDirectory()
folder = f"{scratch.name}/after_five"
for rank, shape in enumerate(ranks(save_after_five, folder, world=3, seconds=120)):
    print(f"rank {rank} of 3 holds {shape} of 0.weight")
print(sorted(file.name for file in Path(folder).iterdir()))

# %% [markdown]
# ## What is in the files?
#
# The table is in `.metadata`, which rank 0 writes. **Predict:** which files have a part of
# `0.weight`, and which have the number of steps, which all three ranks gave to `save`?

# %% tags=["predict"]
table = checkpoint.FileSystemReader(folder).read_metadata()
for key in ["weights.0.weight", "adam.state.0.weight.exp_avg", "step"]:
    print(key)
    for index, place in table.storage_data.items():
        if index.fqn == key and index.offset is None:
            print(f"    in {place.relative_path}")
        elif index.fqn == key:
            print(f"    in {place.relative_path} from row {index.offset[0]} on")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Each file has its rank's rows of the weight and of Adam's mean: two, two and one. The number of
# steps is in one file only.
#
# </details>
#
# What is the same on all ranks is written once, by one of the ranks that have it. The planner
# spreads such entries (`dedup_save_plans` in `torch/distributed/checkpoint/_dedup_save_plans.py`),
# so don't rely on which. The table says where each row of a weight lies, and not how many ranks
# there were. It is renamed into place when all files are written (`filesystem.py`), so a save into
# a new folder that is killed midway has no `.metadata`: don't save over the old folder.
# (`async_save` writes while the training goes on.)
#
# ## Load on another number of ranks
#
# `load` fills the tensors that it gets, each rank those that it holds *now*, and reads for that
# only the pieces that have a part of them. What isn't a tensor, such as the step, is put into the
# dictionary:

# %% tags=["trains"]
def load(folder, net, adam):
    weights, state = get_state_dict(net, adam)
    saved = {"weights": weights, "adam": state, "step": 0}
    checkpoint.load(saved, checkpoint_id=folder)
    set_state_dict(net, adam, model_state_dict=saved["weights"], optim_state_dict=saved["adam"])
    return saved["step"]


def go_on(folder):
    net, adam = sharded()
    step = load(folder, net, adam)
    train(net, adam, step, 10)
    return {name: weight.full_tensor() for name, weight in net.state_dict().items()}


for k in [1, 2, 3]:
    differences = []
    for weights in ranks(go_on, folder, world=k):
        differences.append(largest_difference(weights, unbroken))
    same = max(differences) < 1e-12
    print(f"3 ranks, then {k}: equal to ten steps:", same)
    assert same

# %% [markdown]
# The same function loads a plain network with plain Adam in a process that knows of no ranks:

# %% tags=["trains"]
net = make_net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
step = load(folder, net, adam)
train(net, adam, step, 10)
print("in one process:", largest_difference(net.state_dict(), unbroken) < 1e-12)
assert largest_difference(net.state_dict(), unbroken) < 1e-12

# %% [markdown]
# (Whoever wants one file for `torch.load` takes the function `dcp_to_torch_save` of
# `torch/distributed/checkpoint/format_utils.py`.)
#
# ## A mistake: the optimizer's own state dict
#
# For `torch.save` one takes `adam.state_dict()`. `load` fills what it gets, and nothing else.
# **Predict:** what does a new Adam, which hasn't taken a step, load by it?

# %% tags=["predict", "trains"]
def save_own(folder):
    net, adam = sharded()
    train(net, adam, 0, 5)
    state = {"weights": net.state_dict(), "adam": adam.state_dict()}
    checkpoint.save(state, checkpoint_id=folder)


def go_on_with_own(folder):
    net, adam = sharded()
    saved = {"weights": net.state_dict(), "adam": adam.state_dict()}
    checkpoint.load(saved, checkpoint_id=folder)
    net.load_state_dict(saved["weights"])
    adam.load_state_dict(saved["adam"])
    loaded = len(adam.state)
    train(net, adam, 5, 10)
    return loaded, {name: weight.full_tensor() for name, weight in net.state_dict().items()}


own = f"{scratch.name}/own"
ranks(save_own, own)
means = []
for key in checkpoint.FileSystemReader(own).read_metadata().state_dict_metadata:
    if key.endswith(".exp_avg"):
        means.append(key)
loaded, weights = ranks(go_on_with_own, own)[0]
print(f"parameters with Adam's means, in the files: {len(means)}, and when loaded: {loaded}")
print("equal to ten steps:", largest_difference(weights, unbroken) < 1e-12)
assert len(means) == 4 and loaded == 0

# %% [markdown]
# <details><summary>What came out</summary>
#
# None, and no error: all means are in the files, but a new Adam has none that could be filled. It
# begins anew, with the right weights and the wrong steps.
#
# </details>
#
# `get_state_dict` avoids that: where the optimizer has no state and the parameters no gradients, as
# after a start, it lets it take a step with gradients and a rate of zero (`_init_optim_state` in
# `torch/distributed/checkpoint/state_dict.py`), so that there are means to be filled.
#
# ## A mistake: shards that are plain tensors
#
# Chapter 16's own stage 3 keeps shards as plain tensors. Rank 0 has `0 1 2 3`, rank 1 has
# `4 5 6 7`. Each saves its shard under one name, and loads it. **Predict:** what does each get
# back?

# %% tags=["predict"]
def save_and_load(folder):
    shard = torch.arange(8.0).chunk(2)[dist.get_rank()]
    checkpoint.save({"weight": shard}, checkpoint_id=folder)
    loaded = torch.zeros(4)
    checkpoint.load({"weight": loaded}, checkpoint_id=folder)
    return loaded.tolist()


for rank, loaded in enumerate(ranks(save_and_load, f"{scratch.name}/plain")):
    print(f"rank {rank} loads {loaded}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Both get `0 1 2 3`. Rank 1's shard was never written.
#
# </details>
#
# A plain tensor is taken for a replica, which all ranks have alike, so one of them is written. **A
# shard must say that it is one**, as a `DTensor` does, or have a name of its own on each rank.
#
# ## Summary
#
# - A distributed checkpoint is a file a rank and a table of what lies where. It doesn't depend on
#   the number of ranks: three saved, and one, two, three and plain Adam went on, equal to 1e-12.
#   ([train_transformer.py](../train_transformer.py) of chapter 20 saves in this way.)
# - `load` fills what it gets. A new optimizer's own `state_dict()` is empty, so nothing is loaded,
#   without an error: take `get_state_dict` and `set_state_dict`.
# - Shards that are plain tensors count as replicas: all but one are lost, without an error.
