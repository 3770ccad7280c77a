# %% [markdown]
# # 16 · Sharded training
#
# Data parallelism divides the batch and copies everything else: each device holds all weights, all
# gradients and the whole **optimizer state**. For the optimizer Adam these are two running means
# for each weight, of its gradient and of the gradient's square.
# *What must a device really hold, and for how long?* **ZeRO** (*Zero Redundancy Optimizer*,
# S. Rajbhandari et al., 2020, arXiv:1910.02054) divides these three as well, in three stages,
# ZeRO-1 to ZeRO-3. PyTorch calls the third **FSDP**, *Fully Sharded Data Parallel*. From here on a
# **shard** is a rank's part of a weight, a gradient or the state, no longer of a batch.
#
# ![Four panels, each with four ranks. In data parallelism every rank holds all weights, gradients
# and state. In stage 1 each holds a quarter of the state, in stage 2 also a quarter of the
# gradients, in stage 3 a quarter of everything.](src/drawings/who_holds_what.svg)
#
# > **What you'll do:** write the three stages, and count what each holds, reduces and gathers.
# >
# > **What you'll learn:** what a parameter costs in memory; what each stage saves; how FSDP holds a
# > whole weight only while its layer computes.
# >
# > **What you need:** chapters 03 and 14, no GPU, and PyTorch 2.13 or newer: `make setup TORCH=1`
# > installs it. Reading takes {reading time}, running less than a minute on two cores.

# %% tags=["torch"]
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import sharded_train
from helpers import your_turn
from helpers.compare import largest_difference
from helpers.plotting import BLUE, GREY, ORANGE, figure, show
from ranks import ranks

# %% [markdown]
# ## What one device holds
#
# First one process trains, without any sharding, so that we know what must come out. The network
# has four equal layers, and it trains with Adam, in float64, so that only last digits may differ:

# %% tags=["your-turn"]
def make_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 16), nn.Tanh(),
                         nn.Linear(16, 16)).double()


torch.manual_seed(0)
batches = []
for step in range(5):
    x = torch.randn(24, 16).double()
    y = torch.randint(16, (24,))
    batches.append((x, y))

net = make_net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
for x, y in batches:
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    adam.step()
one_process = net.state_dict()

# %% [markdown]
# What does it hold for each parameter?

# %% tags=["your-turn"]
size = sum(p.numel() for p in net.parameters())
held = 0
for p in net.parameters():
    held += p.numel() + p.grad.numel()
    means = adam.state[p]  # the two running means
    held += means["exp_avg"].numel() + means["exp_avg_sq"].numel()
print(size, "parameters,", held / size, "numbers held for each")

# %% [markdown]
# A weight, its gradient and two means: four numbers a parameter. In float32 these are **16 bytes a
# parameter**, so 7 billion parameters take 112 GB on every device, no matter how many devices there
# are. (With weights and gradients of 2 bytes each, in *mixed precision*, it is 16, too: exercise 3.
# The **activations**, which layers keep for the backward pass, are extra. We leave them out.)
#
# ## Two halves of an all-reduce
#
# To hold only its shard of a gradient, a rank needs only its shard of the sum. Chapter 03's ring
# did that in its first half, the **reduce-scatter**. The second half, the **all-gather**, gives the
# shards of all ranks to everybody. We also count how many numbers are reduced and gathered, for
# later. (Each call of `ranks` takes the variables of this notebook along, so it begins with zeros.)

# %% tags=["your-turn"]
counted = {"reduced": 0, "gathered": 0}  # numbers


def reduce_scatter(whole):
    """[k * n] on each rank -> [n], this rank's shard of the sum."""
    shard = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(shard, whole)  # writes into its first argument
    counted["reduced"] += len(whole)
    return shard


def gather_whole(shard):
    """An all-gather: [n] -> [k * n], the shards of all ranks."""
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_single(whole, shard)
    counted["gathered"] += len(whole)
    return whole

# %% [markdown]
# **Predict:** rank 0 has `0 1 2 3`, rank 1 has `0 10 20 30`. What does each get from a
# reduce-scatter, and then from an all-gather?

# %% tags=["predict"]
def two_halves():
    whole = torch.arange(4) * 10 ** dist.get_rank()
    shard = reduce_scatter(whole)
    gathered = gather_whole(shard)
    return shard.tolist(), gathered.tolist()


for rank, (shard, gathered) in enumerate(ranks(two_halves)):
    print(f"rank {rank}: its shard of the sum is {shard}, all shards are {gathered}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The sum is `0 11 22 33`. Rank 0 gets its first half, rank 1 its second, and after the all-gather
# both have all of it.
#
# </details>
#
# Gradients are averaged, so a rank needs its shard of the *mean*. `my_part` gives a rank its part
# of a tensor: of a batch, or of the numbers of a weight, one after the other. All our sizes are
# divisible by the number of ranks.

# %% tags=["your-turn"]
def my_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def mean_shard(gradient):
    """This rank's shard of the mean gradient."""
    total = reduce_scatter(gradient.flatten())
    return total / dist.get_world_size()

# %% [markdown]
# ## Stage 1: the optimizer's state
#
# Must every rank update all weights? To change one number of a weight, Adam needs only that
# number's gradient and two means. So a rank can update *its shard*, with means for its shard only,
# and then the new shards are gathered.
#
# We make the shard a **view**: it shares the weight's memory and needs none of its own. Here the
# weight is four zeros, and Adam gets a view of the first two. (Adam's first step changes a number
# by the learning rate, however large its gradient is.) **Predict:** what is in the weight
# afterwards?

# %% tags=["predict"]
weight = nn.Parameter(torch.zeros(4))
shard = weight.detach()[:2]  # a view
shard.grad = torch.ones(2)
adam = torch.optim.Adam([shard], lr=0.01)
adam.step()
print(weight.data)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The first two numbers have changed, and the others haven't. Adam reads the shard's `.grad`, and
# doesn't ask who has put it there.
#
# </details>
#
# Memory that tensors share must be counted once. So `numbers_held` looks at the memory of all that
# the network and Adam hold, and takes each address once:

# %% tags=["your-turn"]
def numbers_held(net, adam):
    tensors = []
    for p in net.parameters():
        tensors += [p, p.grad]
    for p in adam.param_groups[0]["params"]:  # what Adam updates
        tensors += [p, p.grad]
    for means in adam.state.values():
        tensors += [means["exp_avg"], means["exp_avg_sq"]]
    sizes = {}  # by the address of the memory
    for tensor in tensors:
        if tensor is not None:
            memory = tensor.untyped_storage()  # of a view: that of the whole tensor
            address = memory.data_ptr()
            sizes[address] = memory.nbytes() / 8  # float64: 8 bytes a number
    return sum(sizes.values())

# %% [markdown]
# After an update `gather_weights` gathers the new shards into each rank's weights, and after a
# training `report` compares with one process:

# %% tags=["your-turn"]
def gather_weights(net):
    for p in net.parameters():
        whole = gather_whole(p.shard)
        p.detach().copy_(whole.view_as(p))


def report(results):
    for weights, held, _ in results:
        same = largest_difference(weights, one_process) < 1e-12
        print(f"as one process: {same}, numbers held for each parameter: {held / size}")

# %% [markdown]
# This is what one rank does in stage 1, from top to bottom. All ranks make the same network, from
# one seed, and each takes its part of every batch. The shard of the mean gradient overwrites its
# part of the whole gradient, so that it needs no memory of its own. We count what is held just
# before the update:

# %%
def stage_1():
    net = make_net()
    for p in net.parameters():
        p.shard = my_part(p.detach().flatten())  # a view of p
    adam = torch.optim.Adam([p.shard for p in net.parameters()], lr=0.01)
    for x, y in batches:
        net.zero_grad()  # the whole gradients
        adam.zero_grad()  # the gradients of the shards
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()
        for p in net.parameters():
            place = my_part(p.grad.flatten())  # a view of p.grad
            place.copy_(mean_shard(p.grad))
            p.shard.grad = place
        held = numbers_held(net, adam)
        adam.step()  # updates my shard of each p
        gather_weights(net)
    return net.state_dict(), held, counted


results_1 = ranks(stage_1)
report(results_1)

# %% [markdown]
# Both ranks end with the weights of one process, and hold one number less for each parameter,
# because they have half of the two means. (The limit, `1e-12`, is so small because Adam hardly sees
# how large a gradient is: without the division in `mean_shard` the weights differ by only
# $10^{-5}$.)
#
# ## Stage 2: gradients
#
# When is a whole gradient needed? Only until it has been reduced. In stage 1 all gradients wait
# until the backward pass has ended. But chapter 14's hook tells us when a gradient is ready. So it
# can be reduced then, and freed. `stage_2` gets the hook as an argument:

# %% tags=["your-turn"]
def stage_2(hook):
    net = make_net()
    for p in net.parameters():
        p.shard = my_part(p.detach().flatten())
        p.register_post_accumulate_grad_hook(hook)  # NEW
    adam = torch.optim.Adam([p.shard for p in net.parameters()], lr=0.01)
    for x, y in batches:
        net.zero_grad()
        adam.zero_grad()
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()  # calls the hook
        held = numbers_held(net, adam)
        adam.step()
        gather_weights(net)
    return net.state_dict(), held, counted

# %% [markdown]
# ### Your turn: `reduce_and_free`
#
# Write that hook, before you scroll on. It gets a parameter `p`, whose whole gradient is `p.grad`.
# (Setting it to `None` frees it, unless a view of it is left.) The cell trains with it on two ranks
# and on four. Of a weight's four numbers a rank should hold the weight, $1/k$ of the gradient and
# $1/k$ of each mean.

# %% tags=["your-turn"]
def reduce_and_free(p):
    """The hook: p.shard.grad becomes this rank's shard of the mean; p.grad is freed."""
    ...


def train_with_it(k):
    results = ranks(stage_2, reduce_and_free, world=k)
    weights, held, _ = results[0]  # of rank 0
    same = largest_difference(weights, one_process) < 1e-12
    return {"as one process": same, "held": held / size}


cases = [((2,), {"as one process": True, "held": 2.5}),
         ((4,), {"as one process": True, "held": 1.75})]
your_turn(train_with_it, cases, stubs=[reduce_and_free])

# %% [markdown]
# Here is ours. `mean_shard` reads the whole gradient, so it comes first:

# %% tags=["solution", "your-turn"]
def reduce_and_free(p):
    p.shard.grad = mean_shard(p.grad)
    p.grad = None


your_turn(train_with_it, cases, stubs=[reduce_and_free])
results_2 = ranks(stage_2, reduce_and_free)
report(results_2)

# %% [markdown]
# Now each rank also holds only half of the gradients. (During the backward pass there still are
# whole ones, but only a layer's at a time, because the hook is called before the pass reaches the
# next layer. This count can't show that. The curves at the end do.)
#
# The next hook forgets to free. `zero_grad` frees the gradients later, at the beginning of the next
# step. **Predict:** are the weights right, and how many numbers are held for each parameter?

# %% tags=["predict"]
def frees_late(p):
    p.shard.grad = mean_shard(p.grad)


report(ranks(stage_2, frees_late))

# %% [markdown]
# <details><summary>What came out</summary>
#
# The weights are right. But just before the update a rank holds all whole gradients, as in stage 1,
# and in addition those of its shards: 3.5 numbers, more than stage 1's 3.
#
# </details>
#
# **Right weights don't show that memory was saved.** That is why we count, and *before* `step`: a
# gradient that is freed in `step` or later still occupied memory up to then.
#
# ## Stage 3: weights
#
# When is a whole weight needed? Only while its layer computes. So the layer can gather it, use it
# and free it, in the forward pass and again in the backward pass. (FSDP's words are *unshard* and
# *reshard*.)
#
# ![The last two of four layers, from left to right in time. A thin bar is the rank's shard, always
# there. In the forward pass layer 3 is gathered, used and freed, then layer 4. In the backward pass
# layer 4 is gathered again and freed, then layer 3, and each sends its gradient to be
# reduced.](src/drawings/gathered_weight.svg)
#
# There is an obstacle. Autograd keeps what the backward pass will need. What does it keep for
# `x @ weight.T`? `saved_tensors_hooks` takes two functions. The first is called with each tensor
# that is saved, and returns what is to be kept for it; the second gets that back later:

# %%
def note(tensor):
    print("saved:", tuple(tensor.shape))
    return tensor


x = torch.ones(1, 4, requires_grad=True)
weight = torch.ones(2, 4, requires_grad=True)
with saved_tensors_hooks(note, lambda kept: kept):
    y = x @ weight.T

# %% [markdown]
# It keeps `x` and the whole weight, transposed, because the gradient of `x` is computed with it.
# Deleting our own variable would free nothing. So we write both passes of the layer ourselves, as a
# `torch.autograd.Function`. What `forward` saves in `ctx`, `backward` finds there: here `x` and the
# weight's *shard*. `backward` gets the gradient of the output, and returns one for each argument of
# `forward`:

# %%
class LinearFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight_shard, bias_shard):
        inputs = x.shape[1]
        weight = gather_whole(weight_shard).view(-1, inputs)  # [outputs, inputs]
        bias = gather_whole(bias_shard)
        ctx.save_for_backward(x, weight_shard)  # not the whole weight
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient):  # [n, outputs]
        x, weight_shard = ctx.saved_tensors
        inputs = x.shape[1]
        weight = gather_whole(weight_shard).view(-1, inputs)  # again
        for_x = gradient @ weight
        for_weight = mean_shard(gradient.T @ x)
        for_bias = mean_shard(gradient.sum(0))
        return for_x, for_weight, for_bias

# %% [markdown]
# In the network a layer of ours takes the place of each `nn.Linear`. Its parameters are shards.
# They are copies, since a view would keep the whole weight's memory alive.

# %%
class ShardedLinear(nn.Module):
    def __init__(self, layer):  # an nn.Linear
        super().__init__()
        weight_shard = my_part(layer.weight.detach().flatten())
        bias_shard = my_part(layer.bias.detach())
        self.weight = nn.Parameter(weight_shard.clone())
        self.bias = nn.Parameter(bias_shard.clone())

    def forward(self, x):
        return LinearFromShards.apply(x, self.weight, self.bias)


def shard_layers(net):
    for number, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[number] = ShardedLinear(layer)

# %% [markdown]
# Then the loop is that of one process, because the layers do all the sending. (So all ranks must
# use the same layers in the same order: a message has no name, chapter 14.) To compare, we gather
# the weights at the end:

# %%
def stage_3():
    net = make_net()
    shard_layers(net)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for x, y in batches:
        net.zero_grad()
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()
        held = numbers_held(net, adam)
        adam.step()
    counted_in_training = dict(counted)  # a copy: what follows isn't training
    weights = {}
    for name, shard in net.state_dict().items():
        weights[name] = gather_whole(shard).view_as(one_process[name])
    return weights, held, counted_in_training


results_3 = ranks(stage_3)
report(results_3)

# %% [markdown]
# A rank holds half of each of the four numbers.
#
# We can't write out every layer's backward pass. How PyTorch shards layers whose formulas it
# doesn't know is in deeper: FSDP for any network.
#
# ## What each stage reduces and gathers
#
# Sharding saves memory. What does it cost in communication? An all-reduce of all gradients, as in
# data parallelism, reduces 1,088 numbers in each step and gathers 1,088. **Predict** both numbers
# for the three stages.

# %% tags=["predict"]
steps = len(batches)
for stage, results in enumerate([results_1, results_2, results_3], 1):
    _, _, counted_in_5 = results[0]  # by rank 0
    print(f"stage {stage}: in a step {counted_in_5['reduced'] // steps:,} reduced, "
          f"{counted_in_5['gathered'] // steps:,} gathered")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Stages 1 and 2 reduce and gather as much as data parallelism. Stage 3 gathers each weight twice,
# and a bias, which the backward pass doesn't need, once.
#
# </details>
#
# So stage 3 communicates **up to one and a half times as much**. (We count the lengths of whole
# tensors. What goes over a wire depends on the library.) With gradient accumulation (chapter 14)
# stage 1 can add up whole gradients and reduce them once. Stage 2 has no room for them, so it must
# reduce in each pass. So must stage 3, which also gathers the weights twice in each pass. What that
# costs in time, and what published runs say, is in deeper: When sharding pays.
#
# ## And PyTorch's?
#
# PyTorch's FSDP is the function `fully_shard`. Each call makes a group of parameters that is
# gathered and freed together: here those of each linear layer. (The last call takes what no layer
# has taken, which is nothing here.) A parameter is then a `DTensor`, which knows that it is a
# shard: `to_local()` is this rank's part, `full_tensor()` gathers all. The loop is the usual one,
# because `backward()` waits for messages, as with PyTorch's DDP (chapter 14).

# %%
from torch.distributed.fsdp import fully_shard


def by_pytorch():
    net = make_net()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)  # after fully_shard: new parameters
    for x, y in batches:
        net.zero_grad()
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()
        adam.step()
    kept = sum(p.to_local().numel() for p in net.parameters())
    weights = {}
    for name, shard in net.state_dict().items():
        weights[name] = shard.full_tensor()  # an all-gather
    return weights, kept


for (ours, _, _), (theirs, kept) in zip(results_3, ranks(by_pytorch)):
    print("ours:     ", ours["6.bias"][:3])
    print("PyTorch's:", theirs["6.bias"][:3], f"keeps {kept} of {size} weights")
    assert largest_difference(theirs, ours) < 1e-12

# %% [markdown]
# Both arrive at the same weights, and each rank keeps half of them. PyTorch doesn't replace the
# layers: hooks before and after each of them gather its weight and free it (documentation of
# `fully_shard`). With the option `reshard_after_forward=False` the weight stays whole until the
# backward pass, and is gathered once. A network that doesn't fit on one device is made on PyTorch's
# `meta` device, where it takes no memory, and filled after `fully_shard`.
#
# ## What is held during a step
#
# So far we counted at one moment, and only what we knew of. `Bytes` adds up the memory of *all*
# tensors after each operation within its block, the backward pass included, and appends the sum to
# its list `noted`. `note()` appends one at any other time. (PyTorch calls
# `Bytes.__torch_dispatch__` for each operation. `Bytes` remembers the memory of each tensor by a
# *weak* reference, which keeps nothing alive.)

# %% tags=["fold"]
# define: `Bytes`, with `noted`, the memory of all tensors after each operation, and `note()`
import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.alive = weakref.WeakValueDictionary()  # forgets what nobody else holds
        self.noted = []

    def note(self):
        self.noted.append(sum(memory.nbytes() for memory in self.alive.values()))

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        result = operation(*given, **(options or {}))  # does what is to be done
        for value in tree_leaves((given, result)):  # all that it was given, and its result
            if torch.is_tensor(value):
                memory = value.untyped_storage()
                self.alive[memory._cdata] = memory
        self.note()
        return result

# %% [markdown]
# We compare three ways. Each of these functions prepares a network, and returns what Adam is to
# update. (We leave out data parallelism's all-reduce, which writes into the gradients' own memory.)

# %%
def in_data_parallel(net):
    return list(net.parameters())


def in_stage_2(net):
    for p in net.parameters():
        p.shard = my_part(p.detach().flatten())
        p.register_post_accumulate_grad_hook(reduce_and_free)
    return [p.shard for p in net.parameters()]


def in_stage_3(net):
    shard_layers(net)
    return list(net.parameters())

# %% [markdown]
# Four ranks take two steps in float32, and we keep what was noted in the second, up to the update.
# The network has eight equal layers, and batches have two examples, so that activations hardly
# count:

# %%
def eight_layers():
    torch.manual_seed(16)
    net = nn.Sequential()
    for _ in range(8):
        net.append(nn.Linear(64, 64))
        net.append(nn.Tanh())
    return net


def bytes_in_a_step(prepare):
    """Bytes a parameter after each operation, of the forward pass and of the backward pass."""
    net = eight_layers()
    numbers = sum(p.numel() for p in net.parameters())
    adam = torch.optim.Adam(prepare(net), lr=0.01)
    x = torch.ones(2, 64)
    y = torch.arange(2)
    with Bytes() as memory:
        for step in range(2):  # what the first step noted is overwritten
            adam.zero_grad()
            memory.noted = []
            memory.note()  # before the first operation
            loss = F.cross_entropy(net(x), y)
            forward = memory.noted
            memory.noted = []
            loss.backward()
            backward = memory.noted
            memory.noted = []
            adam.step()
    return np.array(forward) / numbers, np.array(backward) / numbers

# %% tags=["measured"]
curves = {}
peaks = {}
for name, prepare in [("data parallel", in_data_parallel), ("stage 2", in_stage_2),
                      ("stage 3", in_stage_3)]:
    forward, backward = ranks(bytes_in_a_step, prepare, world=4)[0]  # of rank 0
    curves[name] = forward, backward
    peaks[name] = backward.max()
    print(f"{name}: {forward[0]:.1f} bytes a parameter at first, {peaks[name]:.1f} at most")

assert peaks["stage 2"] < 9
assert peaks["stage 3"] < 6

# %% tags=["fold", "measured"]
# draw: bytes a parameter during a step
fig, ax = figure("The highest point of a curve is what must fit", "", "bytes a parameter")
for (name, (forward, backward)), color in zip(curves.items(), [GREY, ORANGE, BLUE]):
    places = np.concatenate([np.linspace(0, 1, len(forward)), np.linspace(1, 3, len(backward))])
    noted = np.concatenate([forward, backward])
    ax.plot(places, noted, color=color, lw=2, drawstyle="steps-post")
    highest = noted.argmax()
    ax.text(0.03, forward.max() + 0.3, name, color=color, weight="bold")
    ax.text(places[highest], noted[highest] + 0.3, f"{noted[highest]:.1f}", color=color,
            weight="bold", ha="right")
ax.axvline(1, color="lightgrey", zorder=0)
ax.set_xticks([0.5, 2], ["forward pass", "backward pass"])
ax.tick_params(axis="x", length=0)
ax.set(xlim=(0, 3), ylim=(0, 18), yticks=[0, 4, 8, 12, 16])
show(fig, alt="Bytes a parameter during a step. Data parallelism: 12 in the forward pass, then "
     "eight stairs up to 16 in the backward pass. Stage 2: 6, then eight teeth that climb to 8. "
     "Stage 3: 3 with eight low teeth, then eight higher ones that climb to 5.5.")

# %% [markdown]
# From left to right are the operations of a step, each pass stretched to one width. Data
# parallelism begins with 12 bytes a parameter, for weights and means, and each of eight layers adds
# its gradient, up to 16. Stage 2 begins with 6. A layer's whole gradient appears, is reduced to a
# shard, and is freed. Stage 3 begins with 3. In its forward pass a layer gathers its weight, half a
# byte a parameter, and frees it before the next one gathers. In the backward pass the teeth are
# higher: the whole weight, the whole gradient and, here, the reduce-scatter's copy of it are there
# together. And they climb, because the gradients of the shards stay.
#
# **Whether a model fits depends on the peak of a step**, and on its activations. The two assertions
# fail on mistakes that the counts above can't see: on a stage 2 that reduces after the pass and not
# during it, and on a stage 3 that saves the whole weight for the backward pass. How high the teeth
# are depends on the layers: of a hundred equal ones, one would be a hundredth of all.
#
# A layer that gathers when it begins must wait for its weight. So FSDP gathers the next weight
# while a layer computes: that is called **prefetching**. There is a timeline of it in deeper: When
# sharding pays.
#
# ## The program that you keep
#
# [sharded_train.py](sharded_train.py) has the three stages for nearly any network, as the classes
# `ShardedOptimizer`, `ShardedGradients` and `FSDP`, which raise an error for most mistakes that
# would otherwise go unnoticed. They pad what isn't divisible, such as our layers on three ranks.
# After `backward()` `FSDP` needs an extra call, which waits for gradients. They find what one
# process finds:

# %%
def by_the_program(stage):
    net = make_net()
    model, adam = sharded_train.make_stage(stage, net, lr=0.01)
    for x, y in batches:
        adam.zero_grad()
        F.cross_entropy(model(my_part(x)), my_part(y)).backward()
        if stage == 3:
            model.finish_gradient_synchronization()
        adam.step()
    return model.gather_full_params() if stage == 3 else net.state_dict()


for stage in [1, 2, 3]:
    for world in [2, 3]:
        assert largest_difference(ranks(by_the_program, stage, world=world), one_process) < 1e-12

# %% [markdown]
# As a program it trains a small network on ten patterns with noise:
#
# ```
# torchrun --standalone --nproc-per-node=2 sharded_train.py --stage 3
# ```
#
# To save a training, shards must be gathered, or each rank saves its own. In stage 3 that concerns
# the weights, in all stages Adam's means. How another number of ranks finds them again is in
# deeper: Checkpoints that reshard.
#
# ## Summary
#
# On $k$ ranks, with Adam in float32, before the update:
#
# | | weights | gradients | state | bytes a parameter | reduced + gathered |
# | --- | --- | --- | --- | --- | --- |
# | data parallel | 4 | 4 | 8 | $16$ | 1 + 1 |
# | stage 1 | 4 | 4 | $8/k$ | $8 + 8/k$ | 1 + 1 |
# | stage 2 | 4 | $4/k$ | $8/k$ | $4 + 12/k$ | 1 + 1 |
# | stage 3 | $4/k$ | $4/k$ | $8/k$ | $16/k$ | 1 + up to 2 |
#
# The last column is for each parameter, in a step with one backward pass.
#
# - A device needs a whole gradient only until it is reduced, and a whole weight only while its
#   layer computes. The peak of a step is above what is in the table.
# - All stages compute what one process does, if shares are equal and the optimizer works on each
#   number alone, as Adam does.
# - Equal weights don't show that memory was saved: count what is held before the update, and look
#   at the peak.
# - Only stage 3 communicates more than data parallelism.
#
# Next, chapter 17: the activations, which sharding leaves as they are.
#
# **Further reading.** Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data
# Parallel* (2023), arXiv:2304.11277.

# %% [markdown]
# ## Exercises
#
# 1. **Clipping.** Gradients are scaled down where their *norm*, the root of the sum of all squares,
#    is too large. In our stage 3 a rank has only shards of them. Write `clip(net, largest)`, with
#    one message of one number. The norm before and after must be that of one process. What would
#    happen with `nn.utils.clip_grad_norm_`?
# 2. **Two backward passes.** Change the hook and the loop of stage 2, so that each batch goes
#    through in two parts, whose gradients add up. What does `reduce_and_free` do wrong? How much is
#    reduced and gathered in a step?
# 3. **Which stage?** 7.5 billion parameters are trained with Adam in **mixed precision**: 2 bytes
#    for a weight and for a gradient, 12 for the optimizer's state. How many GPUs of 40 GB does each
#    stage need, with 10 GB for activations?

# %% [markdown]
# ### Answer 1
#
# Each rank adds up the squares of its shards. One all-reduce adds up these sums. PyTorch's function
# would find the norm of one rank's shards, so that each rank would scale by a factor of its own.
# With `fully_shard` it is right, because there a gradient knows that it is a shard.

# %% tags=["solution"]
def clip(net, largest):
    square = torch.zeros(1).double()
    for p in net.parameters():
        square += p.grad.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    for p in net.parameters():
        p.grad *= (largest / norm).clamp(max=1)
    return norm.item()


def norms():
    net = make_net()
    shard_layers(net)
    x, y = batches[0]
    F.cross_entropy(net(my_part(x)), my_part(y)).backward()
    of_shards = nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
    return of_shards, clip(net, 0.1), clip(net, 0.2)


def norm_by_pytorch():
    net = make_net()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    x, y = batches[0]
    F.cross_entropy(net(my_part(x)), my_part(y)).backward()
    return nn.utils.clip_grad_norm_(net.parameters(), 0.1).full_tensor().item()


net = make_net()
x, y = batches[0]
F.cross_entropy(net(x), y).backward()
norm = nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
print(f"one process: {norm:.3f}")
for rank, (of_shards, before, after) in enumerate(ranks(norms)):
    print(f"rank {rank}: its shards {of_shards:.3f}, all {before:.3f}, clipped to {after:.3f}")
    assert abs(before - norm) < 1e-12
    assert abs(after - 0.1) < 1e-12
for found in ranks(norm_by_pytorch):
    assert abs(found - norm) < 1e-12

# %% [markdown]
# ### Answer 2
#
# `reduce_and_free` overwrites the first part's shard. Each of two passes reduces all gradients, and
# the weights are gathered once.

# %% tags=["solution"]
def adds_up(p):
    shard = mean_shard(p.grad)
    p.grad = None
    if p.shard.grad is None:
        p.shard.grad = shard
    else:
        p.shard.grad += shard


def stage_2_in_two_parts(hook):
    net = make_net()
    for p in net.parameters():
        p.shard = my_part(p.detach().flatten())
        p.register_post_accumulate_grad_hook(hook)
    adam = torch.optim.Adam([p.shard for p in net.parameters()], lr=0.01)
    for x, y in batches:
        adam.zero_grad()
        x_0, x_1 = my_part(x).chunk(2)
        y_0, y_1 = my_part(y).chunk(2)
        loss = F.cross_entropy(net(x_0), y_0) / 2
        loss.backward()
        loss = F.cross_entropy(net(x_1), y_1) / 2
        loss.backward()
        adam.step()
        gather_weights(net)
    return net.state_dict(), counted


for hook in [reduce_and_free, adds_up]:
    weights, on_rank_0 = ranks(stage_2_in_two_parts, hook)[0]
    print(f"{hook.__name__}: as one process: {largest_difference(weights, one_process) < 1e-12},",
          f"in a step {on_rank_0['reduced'] // steps:,} reduced,",
          f"{on_rank_0['gathered'] // steps:,} gathered")

# %% [markdown]
# ### Answer 3
#
# Weights and gradients take 2 bytes here, and the optimizer keeps another copy of the weights, in 4
# bytes, beside its means. In stage 1 whole weights and gradients take 30 GB, all that there is, so
# it doesn't fit on any number of GPUs. By the table stage 2 needs at least 7 GPUs and stage 3 at
# least 4. Both then fill the 30 GB to the last byte, so that for the peak of a step you need more.
# (For 64 GPUs table 1 of ZeRO's paper has the same 31.4, 16.6 and 1.88 GB.)

# %% tags=["solution"]
def gigabytes(stage, k):
    a_parameter = {1: 4 + 12 / k, 2: 2 + 14 / k, 3: 16 / k}
    return 7.5 * a_parameter[stage]


for stage in [1, 2, 3]:
    fitting = [k for k in range(1, 10_000) if gigabytes(stage, k) <= 30]
    print(f"stage {stage}: {gigabytes(stage, 64):.3g} GB on 64 GPUs, fewest GPUs: {fitting[:1]}")
