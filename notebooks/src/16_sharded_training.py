# %% [markdown]
# # 16 · Sharded training
#
# Data parallelism divides the batch and copies everything else: each device holds all weights, all
# gradients and the whole **optimizer state**. For the optimizer Adam these are two running means
# for each weight, of its gradient and of the gradient's square. *What must a device really hold,
# and for how long?* One can divide these three as well, one after the other:
#
# ![Four panels, each with four ranks. In data parallelism every rank holds all weights, gradients
# and state. In stage 1 each holds a quarter of the state, in stage 2 also a quarter of the
# gradients, in stage 3 a quarter of everything.](src/drawings/who_holds_what.svg)
#
# That is **ZeRO**, *Zero Redundancy Optimizer* (S. Rajbhandari et al., 2020, arXiv:1910.02054).
# PyTorch calls its third stage **FSDP**, *Fully Sharded Data Parallel*. From here on a **shard** is
# a rank's part of a weight, a gradient or the state, no longer of a batch.
#
# > **What you'll do:** write the three stages, compare each with one process, and measure what it
# > holds during a step.
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

from helpers import your_turn
from helpers.compare import largest_difference
from helpers.plotting import BLUE, GREY, ORANGE, figure, show
from ranks import ranks

# %% [markdown]
# ## What one device holds
#
# First one process trains, without any sharding, so that we know what must come out. The network
# has eight equal layers without biases, so its parameters are eight weights. All numbers are in
# float64, so that only last digits may differ:

# %% tags=["your-turn"]
def make_net():
    torch.manual_seed(16)
    net = nn.Sequential()
    for _ in range(8):
        net.append(nn.Linear(64, 64, bias=False))
        net.append(nn.Tanh())
    return net.double()


torch.manual_seed(0)
batches = []
for step in range(5):
    x = torch.randn(24, 64).double()
    y = torch.randint(64, (24,))
    batches.append((x, y))

# %% [markdown]
# It trains with Adam for five steps:

# %% tags=["your-turn"]
net = make_net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
for x, y in batches:
    net.zero_grad()
    F.cross_entropy(net(x), y).backward()
    adam.step()
one_process = net.state_dict()

# %% [markdown]
# What does it hold? We count the numbers in weights, gradients and Adam's means. (A gradient may
# also be `None`. Then it takes no memory.)

# %% tags=["your-turn"]
def numbers_held(net, adam):
    held = 0
    for p in net.parameters():
        held += p.numel()
        if p.grad is not None:
            held += p.grad.numel()
    for means in adam.state.values():
        held += means["exp_avg"].numel()
        held += means["exp_avg_sq"].numel()
    return held


size = sum(p.numel() for p in net.parameters())
print(size, "parameters,", numbers_held(net, adam) / size, "numbers held per parameter")

# %% [markdown]
# A weight, its gradient and two means: four numbers per parameter. In float32 these are **16 bytes
# per parameter**, so 7 billion parameters take 112 GB on every device, no matter how many devices
# there are. (The **activations**, which layers keep for the backward pass, are extra. We leave them
# out.)
#
# ## Two halves of an all-reduce
#
# Data parallelism adds up the gradients of all ranks by an all-reduce. If a rank is to hold only
# its shard of a gradient, it needs only its shard of the sum. Chapter 03's ring did that in its
# first half, the **reduce-scatter**. The second half, the **all-gather**, gives every rank the
# shards of all. PyTorch has both, and each writes into its first argument:

# %% tags=["your-turn"]
def reduce_scatter(whole):
    """[k * n] on each rank -> [n], this rank's shard of the sum."""
    shard = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(shard, whole)
    return shard


def gather_whole(shard):
    """An all-gather: [n] -> [k * n], the shards of all ranks."""
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_single(whole, shard)
    return whole

# %% [markdown]
# **Predict:** rank 0 has `0 1 2 3`, rank 1 has `0 10 20 30`. What does each get from a
# reduce-scatter, and then from an all-gather?

# %% tags=["predict"]
def two_halves():
    whole = torch.arange(4) * 10 ** dist.get_rank()
    shard = reduce_scatter(whole)
    gathered = gather_whole(shard)
    return f"its shard of the sum is {shard.tolist()}, all shards are {gathered.tolist()}"


from_0, from_1 = ranks(two_halves)
print("rank 0:", from_0)
print("rank 1:", from_1)

# %% [markdown]
# <details><summary>What came out</summary>
#
# The sum is `0 11 22 33`. Rank 0 gets its first half, rank 1 its second, and after the all-gather
# both have all of it.
#
# </details>
#
# Gradients are averaged, so a rank needs its shard of the *mean*. And `my_part` gives a rank its
# part of a tensor, for example of a batch. (All our sizes are divisible by the number of ranks.)

# %% tags=["your-turn"]
def mean_shard(gradient):
    """This rank's shard of the mean gradient."""
    total = reduce_scatter(gradient.flatten())
    return total / dist.get_world_size()


def my_part(tensor):
    parts = tensor.chunk(dist.get_world_size())
    return parts[dist.get_rank()]

# %% [markdown]
# ## Stage 1: the optimizer's state
#
# Must every rank update all weights? To change one number of a weight, Adam needs only that
# number's gradient and two means. So a rank can update *its shard*, with means for its shard only,
# and then the new shards are gathered.
#
# We make the shard a **view**: it shares the weight's memory and needs none of its own. (`detach`,
# `flatten`, `chunk` and `[:2]` copy nothing here.) Here the
# weight is four zeros, and Adam gets a view of the first two. **Predict:** what is in the weight
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
# The first two numbers have changed, by the learning rate (as with any gradient in Adam's first
# step), and the others haven't. Adam reads the shard's `.grad`, and
# doesn't ask who has put it there.
#
# </details>
#
# So each weight `p` of the network gets such a view, `p.shard`. After an update the new shards of
# all ranks are gathered into each rank's weights:

# %% tags=["your-turn"]
def make_shards(net):
    """Give each weight its p.shard, and return all shards, for Adam."""
    shards = []
    for p in net.parameters():
        p.shard = my_part(p.detach().flatten())  # a view of p
        shards.append(p.shard)
    return shards


def gather_weights(net):
    for p in net.parameters():
        whole = gather_whole(p.shard)
        p.detach().copy_(whole.view_as(p))

# %% [markdown]
# This is what one rank does in stage 1, from top to bottom. All ranks make the same network, from
# one seed, and each takes its part of every batch. After the backward pass the gradients are
# reduced, and the whole ones are freed. We count just before the gradients are reduced, when all of
# them are still whole:

# %% tags=["your-turn"]
def stage_1():
    net = make_net()
    adam = torch.optim.Adam(make_shards(net), lr=0.01)
    for x, y in batches:
        adam.zero_grad()  # frees the gradients of the shards
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()
        held = numbers_held(net, adam)
        for p in net.parameters():
            p.shard.grad = mean_shard(p.grad)
            p.grad = None  # frees the whole gradient
        adam.step()  # updates my shard of each weight
        gather_weights(net)
    return net.state_dict(), held

# %% [markdown]
# Two ranks run it, and we compare the weights of both with those of one process:

# %% tags=["your-turn"]
def report(results):
    for weights, held in results:
        same = largest_difference(weights, one_process) < 1e-12
        print(f"as one process: {same}, numbers held per parameter: {held / size}")


report(ranks(stage_1))

# %% [markdown]
# Both ranks end with the weights of one process, and hold one number less for each parameter,
# because they have half of the two means.
#
# ## Stage 2: gradients
#
# When is a whole gradient needed? Only until it has been reduced. In stage 1 all whole gradients
# are held until the backward pass has ended. But chapter 14's **hook** is a function that PyTorch
# calls as soon as a weight's gradient is ready. So the hook can reduce this gradient and free it,
# before the backward pass reaches the next layer. `stage_2` gets the hook as an argument:

# %% tags=["your-turn"]
def stage_2(hook):
    net = make_net()
    adam = torch.optim.Adam(make_shards(net), lr=0.01)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)  # NEW
    for x, y in batches:
        net.zero_grad()  # frees whole gradients, if the hook has left any
        adam.zero_grad()
        F.cross_entropy(net(my_part(x)), my_part(y)).backward()  # calls the hook
        held = numbers_held(net, adam)
        for p in net.parameters():
            memory = p.shard.grad.untyped_storage()  # also what it would keep alive as a view
            held += memory.nbytes() // 8  # 8 bytes a number
        adam.step()
        gather_weights(net)
    return net.state_dict(), held

# %% [markdown]
# ### Your turn: `reduce_and_free`
#
# Write that hook, before you scroll on. It gets a weight `p`, whose whole gradient is `p.grad`. The
# cell trains with it on two ranks and on four. Then a rank should hold, for each parameter, the
# weight, $1/k$ of the gradient and $1/k$ of each mean: $1 + 3/k$ numbers, which are 2.5 and 1.75.

# %% tags=["your-turn"]
def reduce_and_free(p):
    """The hook: p.shard.grad becomes this rank's shard of the mean; p.grad is freed."""
    ...


def train_with_it(k):
    results = ranks(stage_2, reduce_and_free, world=k)
    weights, held = results[0]  # of rank 0
    if largest_difference(weights, one_process) > 1e-12:
        return "other weights than one process"
    return held / size


cases = [((2,), 2.5), ((4,), 1.75)]
your_turn(train_with_it, cases, stubs=[reduce_and_free])

# %% [markdown]
# Here is ours. It does what stage 1 did after the backward pass:

# %% tags=["solution", "your-turn"]
def reduce_and_free(p):
    p.shard.grad = mean_shard(p.grad)
    p.grad = None


your_turn(train_with_it, cases, stubs=[reduce_and_free])
report(ranks(stage_2, reduce_and_free))

# %% [markdown]
# Now each rank also holds only half of the gradients.
#
# The next hook forgets to free. **Predict:** are the weights right, and how many numbers are held
# for each parameter?

# %% tags=["predict"]
def another_hook(p):
    p.shard.grad = mean_shard(p.grad)


report(ranks(stage_2, another_hook))

# %% [markdown]
# <details><summary>What came out</summary>
#
# The weights are right. But the whole gradients stay until `net.zero_grad()`, at the beginning of
# the next step. So a rank holds all of them, as in stage 1, and in addition those of its shards:
# 3.5 numbers, more than stage 1's 3.
#
# </details>
#
# **Right weights don't show that memory was saved.** That is why we count.
#
# ## Stage 3: weights
#
# When is a whole weight needed? Only while its layer computes. So the layer can gather it, use it
# and free it, in the forward pass and again in the backward pass. (FSDP's words are *unshard* and
# *reshard*.)
#
# ![What one of four ranks holds of four weights, at eight moments: while the layers 1 to 4 compute
# in the forward pass, and 4 to 1 in the backward pass. At each moment the weight of the layer that
# computes is whole, and of the others there is a quarter.](src/drawings/gathered_weight.svg)
#
# There is an obstacle: **autograd keeps what the backward pass will need**. What does it keep of
# `y = x @ weight.T`? PyTorch shows it as `y.grad_fn._saved_self`, which is `x`, and
# `y.grad_fn._saved_mat2`. We delete our own variable, and look:

# %%
x = torch.ones(1, 4, requires_grad=True)
weight = torch.ones(2, 4, requires_grad=True)
y = x @ weight.T
del weight
print("kept: a tensor of shape", tuple(y.grad_fn._saved_mat2.shape))

# %% [markdown]
# The whole weight is still there, transposed, because the gradient of `x` will be computed with it.
# So gathering a weight before the layer and deleting it afterwards would free nothing.
#
# We therefore write both passes of the layer ourselves, as a `torch.autograd.Function`. Autograd
# keeps nothing but what `forward` saves in `ctx`, and `backward` finds it there: here `x` and the
# weight's *shard*. `backward` gets the gradient of the output, $g$, and returns one gradient for
# each argument of `forward`. For $y = x W^T$ these are $g W$ for $x$ and $g^T x$ for $W$. (Each
# rank goes on with its own gradient of `x`, because it has its own examples. The weight is
# everybody's, so its gradient is averaged.)

# %%
class LinearFromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard):
        ctx.save_for_backward(x, shard)  # not the whole weight
        weight = gather_whole(shard).view(-1, x.shape[1])  # [outputs, inputs]
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):  # [n, outputs]
        x, shard = ctx.saved_tensors
        weight = gather_whole(shard).view(-1, x.shape[1])  # gathered again
        for_x = gradient @ weight
        for_weight = gradient.T @ x
        return for_x, mean_shard(for_weight)

# %% [markdown]
# In both passes `weight` is a local variable, so it is freed when the function returns.
#
# In the network a layer of ours takes the place of each `nn.Linear`. Its parameter is the shard. It
# is a copy, since a view would keep the whole weight's memory alive.

# %%
class ShardedLinear(nn.Module):
    def __init__(self, layer):  # an nn.Linear
        super().__init__()
        shard = my_part(layer.weight.detach().flatten())
        self.weight = nn.Parameter(shard.clone())

    def forward(self, x):
        return LinearFromShards.apply(x, self.weight)


def shard_layers(net):
    for number in range(len(net)):
        if isinstance(net[number], nn.Linear):
            net[number] = ShardedLinear(net[number])

# %% [markdown]
# Then the loop is that of one process, because the layers do all the sending. (So all ranks must
# use the same layers, because all ranks must send in the same order, chapter 14.) To compare, we
# gather the weights at the end:

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
    weights = {}
    for name, shard in net.state_dict().items():
        weights[name] = gather_whole(shard).view(64, 64)
    return weights, held


report(ranks(stage_3))

# %% [markdown]
# A rank holds half of each of the four numbers, and the weights are still those of one process.
#
# What does sharding cost in communication? In stages 1 and 2 a step has a reduce-scatter of each
# gradient and an all-gather of each weight. That is as much as data parallelism's all-reduce, which
# consists of the same two halves. In stage 3 each weight is gathered twice, once in each pass, so
# it communicates **one and a half times as much** (section 7 of ZeRO's paper finds the same).
#
# We can't write out every layer's backward pass. How PyTorch shards layers whose formulas it
# doesn't know is in deeper: FSDP for any network.
#
# ## What is held during a step
#
# So far we counted at one moment, and only what we knew of. Is a weight really whole only while its
# layer computes? The folded cell defines `Bytes`. Within its block it adds up the memory of *all*
# tensors after each operation, the backward pass included, and appends the sum to its list `noted`.
# (`note()` appends one at any other time.)

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
# We take one step, and then note the two passes of a second, because Adam's means are there only
# after the first. The batch has two examples, so that activations hardly count:

# %%
def bytes_in_a_step(net, adam):
    """Memory after each operation of the forward pass, and of the backward pass."""
    x = torch.ones(2, 64).double()
    y = torch.arange(2)
    with Bytes() as memory:
        F.cross_entropy(net(x), y).backward()  # the first step
        adam.step()
        adam.zero_grad()
        memory.noted.clear()
        memory.note()  # before the second
        loss = F.cross_entropy(net(x), y)
        operations = len(memory.noted)  # of the forward pass
        loss.backward()
    forward = memory.noted[:operations]
    backward = memory.noted[operations:]
    return forward, backward

# %% [markdown]
# Each of these functions is one way to train. (We leave out data parallelism's all-reduce, which
# writes into the gradients' own memory.)

# %%
def in_data_parallel():
    net = make_net()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return bytes_in_a_step(net, adam)


def in_stage_2():
    net = make_net()
    adam = torch.optim.Adam(make_shards(net), lr=0.01)
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(reduce_and_free)
    return bytes_in_a_step(net, adam)


def in_stage_3():
    net = make_net()
    shard_layers(net)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    return bytes_in_a_step(net, adam)

# %% [markdown]
# Four ranks run each of them, and we look at rank 0. At the beginning of a step there are no
# gradients. The **peak** is the most that is held in the two passes. **Predict:** how many numbers
# per parameter does each way hold at the beginning?

# %% tags=["measured", "predict"]
curves = {
    "data parallel": ranks(in_data_parallel, world=4)[0],
    "stage 2": ranks(in_stage_2, world=4)[0],
    "stage 3": ranks(in_stage_3, world=4)[0],
}
for name in curves:
    forward, backward = curves[name]
    first = forward[0] / 8 / size  # float64: 8 bytes a number
    peak = max(backward) / 8 / size
    print(f"{name}: {first:.2f} numbers per parameter at first, {peak:.2f} at the peak")

# %% [markdown]
# <details><summary>What came out</summary>
#
# At first there are a weight and two means: 3 numbers in data parallelism, $1 + 2/4 = 1.5$ in stage
# 2, and $3/4$ in stage 3. At the peak data parallelism has one more, the whole gradient. Stage 2
# has about 0.5 more: 0.25 for the gradients' shards, and 0.125 each for one layer's whole gradient
# and for the copy of it that PyTorch reduces. Stage 3 has that layer's whole weight as well.
#
# </details>
#
# The figure shows both passes. From left to right are their operations, each pass stretched to one
# width:

# %% tags=["fold", "measured"]
# draw: numbers per parameter in the two passes
fig, ax = figure("What is held in the two passes", "", "numbers per parameter")
for (name, (forward, backward)), color in zip(curves.items(), [GREY, ORANGE, BLUE]):
    places = np.concatenate([np.linspace(0, 1, len(forward)), np.linspace(1, 3, len(backward))])
    noted = np.concatenate([forward, backward]) / 8 / size
    ax.plot(places, noted, color=color, lw=2, drawstyle="steps-post")
    highest = noted.argmax()
    ax.text(0.03, noted[: len(forward)].max() + 0.08, name, color=color, weight="bold")
    ax.text(places[highest], noted[highest] + 0.08, f"{noted[highest]:.1f}", color=color,
            weight="bold", ha="right")
ax.axvline(1, color="lightgrey", zorder=0)
ax.set_xticks([0.5, 2], ["forward pass", "backward pass"])
ax.tick_params(axis="x", length=0)
ax.set(xlim=(0, 3), ylim=(0, 4.5), yticks=[0, 1, 2, 3, 4])
show(fig, alt="Numbers per parameter in both passes. Data parallelism: 3 in the forward pass, then "
     "eight stairs up to 4 in the backward pass. Stage 2: 1.5, then eight teeth that climb to 2. "
     "Stage 3: 0.75 with eight low teeth, then eight higher ones that climb to 1.4.")

# %% [markdown]
# In data parallelism each of eight layers adds its gradient in the backward pass. In stage 2 a
# layer's whole gradient appears, is reduced to a shard, and is freed, so there are teeth. In stage
# 3 there are teeth in the forward pass, too: a layer gathers its weight, an eighth of all weights,
# and frees it before the next one gathers. In the backward pass the teeth are higher, because the
# whole weight, the whole gradient and, here, the copy that PyTorch reduces are there together.
# And they climb, because the gradients of the shards stay.
#
# (The update isn't recorded. Adam needs temporary arrays there, for one weight at a time.)
#
# **Whether a model fits depends on the peak of a step**, and on its activations. How high the teeth
# are depends on the layers: of a hundred equal ones, one would be a hundredth of all.
#
# ## And PyTorch's?
#
# PyTorch's FSDP is the function `fully_shard`. Each call makes a group of parameters that is
# gathered and freed together: here the weight of one linear layer. (The last call, for the whole
# network, takes the parameters that no layer has taken; here there are none.) A parameter is then a
# `DTensor`, which knows that it is a shard: `to_local()` is this rank's part, `full_tensor()`
# gathers all.

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
    return net

# %% [markdown]
# The loop is the usual one. What does a rank keep of the first weight, and are all weights those of
# one process?

# %%
def compare_pytorch():
    net = by_pytorch()
    weights = {}
    for name, p in net.named_parameters():
        weights[name] = p.full_tensor()
    kept = net[0].weight.to_local()
    return largest_difference(weights, one_process), tuple(kept.shape)


for difference, shape in ranks(compare_pytorch):
    print(f"as one process: {difference < 1e-12}, kept of the first weight: {shape}")

# %% [markdown]
# A rank keeps half of the rows. PyTorch doesn't replace the layers: hooks before and after each of
# them gather its weight and free it (documentation of `fully_shard`). And a layer that gathers when
# it begins must wait for its weight, so PyTorch gathers the next weight while a layer computes.
# That is called **prefetching** (there is a timeline in deeper: When sharding pays).
#
# When a sharded training is saved, each rank writes its shards. How another number of ranks reads
# them is in deeper: Checkpoints that reshard. And [sharded_train.py](sharded_train.py), beside this
# notebook, has the three stages as a program to keep.
#
# ## Summary
#
# On $k$ ranks, with Adam in float32, at the end of the backward pass:
#
# | | weights | gradients | state | bytes per parameter | reduced + gathered |
# | --- | --- | --- | --- | --- | --- |
# | data parallel | 4 | 4 | 8 | $16$ | 1 + 1 |
# | stage 1 | 4 | 4 | $8/k$ | $8 + 8/k$ | 1 + 1 |
# | stage 2 | 4 | $4/k$ | $8/k$ | $4 + 12/k$ | 1 + 1 |
# | stage 3 | $4/k$ | $4/k$ | $8/k$ | $16/k$ | 1 + 2 |
#
# The last column says how often each parameter is reduced and gathered in a step.
#
# - A device needs a whole gradient only until it is reduced, and a whole weight only while its
#   layer computes. The peak of a step is above what is in the table.
# - All stages compute what one process does, if ranks have equal parts of a batch and the optimizer
#   works on each number alone, as Adam does.
# - Equal weights don't show that memory was saved: count what is held, and look at the peak.
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
# 2. **Which stage?** 7.5 billion parameters are trained with Adam in **mixed precision**: 2 bytes
#    for a weight and for a gradient, 12 for the optimizer's state. How many GPUs of 40 GB does each
#    stage need, with 10 GB for activations?

# %% [markdown]
# ### Answer 1
#
# Each rank adds up the squares of its shards. One all-reduce adds up these sums. PyTorch's function
# would find the norm of one rank's shards, so that each rank would scale by a factor of its own.

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
    return of_shards, clip(net, 0.01), clip(net, 0.02)


net = make_net()
x, y = batches[0]
F.cross_entropy(net(x), y).backward()
norm = nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()
print(f"one process: {norm:.3f}")
for of_shards, before, after in ranks(norms):
    print(f"a rank's shards: {of_shards:.3f}, all: {before:.3f}, clipped to {after:.3f}")
    assert abs(before - norm) < 1e-12
    assert abs(after - 0.01) < 1e-12

# %% [markdown]
# ### Answer 2
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
