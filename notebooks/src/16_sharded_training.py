# %% [markdown]
# # 16 · Sharded training
#
# Data parallelism divides the batch and copies everything else: weights, gradients and the
# optimizer's *state*. When that no longer fits, it is divided, too: *sharded*. (So here a shard is
# a part of a weight, a gradient or the state, no longer of a batch.) ZeRO (*Zero Redundancy
# Optimizer*, S. Rajbhandari et al., 2020, arXiv:1910.02054) does it in three
# stages. PyTorch calls the third FSDP, *Fully Sharded Data Parallel*.
#
# ![Four panels, each with four ranks. In data parallelism every rank holds all weights, gradients
# and state. In stage 1 each holds a quarter of the state, in stage 2 also a quarter of the
# gradients, in stage 3 a quarter of everything.](src/drawings/who_holds_what.svg)
#
# > **What you'll do:** write all three stages, check each against one process, measure the memory.
# >
# > **What you'll learn:** what a parameter costs in memory, and what each stage saves; how FSDP
# > holds a whole weight only while a layer uses it; where sharding goes wrong.
# >
# > **What you need:** chapters 03 and 14, no GPU, and PyTorch 2.13 or newer: `make setup TORCH=1`
# > installs it. Reading takes {reading time}, running about a minute on two cores.

# %% tags=["torch"]
import torch
import torch.distributed as dist
from ranks import ranks
from torch import nn

# %% [markdown]
# Chapter 14's `ranks` runs a function in several processes. Some cells also go into a program to
# keep, [sharded_train.py](sharded_train.py).

# %% tags=["fold", "file:sharded_train.py", "trains"]
# define: how sharded_train.py begins: how to run it, how to use it, what it imports
"""Sharded data parallelism after ZeRO: stages 1 and 2 as optimizers, stage 3 as FSDP.

    torchrun --standalone --nproc-per-node=2 sharded_train.py --stage 3    # trains, see --help

In a program of your own, which every rank runs on its share of the batch:

    copy_from_rank_0(net)                                                      # stage 1
    optimizer = ShardedOptimizer(net.parameters(), torch.optim.Adam, lr=1e-3)

    model = FSDP(net)                                                          # stage 3
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_function(model(x), y).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Needs PyTorch 2.13 or newer. (With 2.11 layers don't read whole weights.)
"""

import argparse
import os
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

if not hasattr(dist, "reduce_scatter_single"):  # as in PyTorch before 2.13
    raise ImportError(f"PyTorch {torch.__version__}: sharded_train.py needs 2.13 or newer")

# %% [markdown]
# ## What is held
#
# What does a parameter cost? In float32 it takes 4 bytes, and its gradient 4 more. Adam's state is
# two running means for it: another 8. That makes **16 bytes a parameter** on every device: 7
# billion parameters need 112 GB. What layers keep for the backward pass comes on top; we leave it
# out.
#
# ## Two halves of an all-reduce
#
# How does a device get only its part of a sum? A *reduce-scatter* gives rank 0 the first part of
# the sum, rank 1 the second: its *shard*. An *all-gather* gives the shards of all to everybody.
# Both together are an all-reduce, as in chapter 03's ring.

# %%
def reduce_scatter(whole):  # [ranks * n] -> [n], this rank's shard of the sum
    shard = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(shard, whole)  # the tensor for the result comes first
    return shard


def gather_whole(shard):  # an all-gather: [n] -> [ranks * n], the shards of all ranks
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_single(whole, shard)
    return whole

# %% [markdown]
# **Predict:** rank 0 has `0 1 2 3`, rank 1 has `0 10 20 30`. What does each get from a
# reduce-scatter?

# %%
def two_halves():
    whole = torch.arange(4) * 10 ** dist.get_rank()
    shard = reduce_scatter(whole)
    gathered = gather_whole(shard)
    return shard.tolist(), gathered.tolist()


for rank, (shard, gathered) in enumerate(ranks(two_halves)):
    print(f"rank {rank}: its shard of the sum is {shard}, all shards are {gathered}")

# %% tags=["fold"]
# check: both halves, on 1 to 4 ranks
def halves_are_right():
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = reduce_scatter(torch.arange(12.0 * world) * (rank + 1))
    total = torch.arange(12.0 * world) * sum(range(world + 1))
    right = torch.equal(shard, total[12 * rank :][:12])
    return right and torch.equal(gather_whole(shard), total)


assert ranks(two_halves) == [([0, 11], [0, 11, 22, 33]), ([22, 33], [0, 11, 22, 33])]
for world in [1, 2, 3, 4]:
    assert all(ranks(halves_are_right, world=world)), world

# %% [markdown]
# Gradients are averaged over the ranks. (Chapter 14's DDP divides before it sends, for types whose
# sum could overflow.)

# %%
def mean_shard(gradient):  # this rank's shard of the mean gradient
    total = reduce_scatter(gradient.reshape(-1))
    return total / dist.get_world_size()

# %% [markdown]
# ## Stage 1: the optimizer's state
#
# Must every device update all weights? For one number of a weight, Adam needs only that number's
# gradient and two means. So each rank can update *its shard*, and the shards are gathered. First
# one process trains a small network to compare with: 55,050 parameters, in float64.

# %% tags=["fold", "measured", "trains"]
# define: ten batches of 24 images, the network, `train`, and one process's weights in the end
from helpers import load_data

data = load_data("mnist", limit=2560)
pixels = torch.tensor(data.train_images - data.train_images.mean()).flatten(1)
labels = torch.tensor(data.train_labels).long()
batches = list(zip(pixels[:240].double().split(24), labels[:240].split(24)))
print(f"{len(batches)} batches of {len(batches[0][0])} images ({data.name})")


def make_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, 10)).double()


def train(model, optimizer, batches):
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


net = make_net()
train(net, torch.optim.Adam(net.parameters(), lr=0.01), batches)
one_process = net.state_dict()

# %% [markdown]
# A shard can be a *view* of its parameter, without memory of its own. So when Adam changes the
# shard, it changes the parameter. It reads the shard's `.grad` and doesn't ask who set it:

# %%
weight = nn.Parameter(torch.zeros(4))
shard = weight.detach()[:2]  # a view
shard.grad = torch.ones(2)
torch.optim.Adam([shard], lr=0.01).step()  # a first step is about lr
print(weight.data)

# %% [markdown]
# Now two ranks. Both make the same network, from one seed, and take half of each batch. Adam gets
# only shards, so it has state only for them.

# %%
def my_part(tensor):  # this rank's part of a parameter, or of a batch
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


class FirstZeRO:
    def __init__(self, params, lr):
        self.params = list(params)
        for p in self.params:
            flat = p.detach().reshape(-1)
            p.shard = my_part(flat)  # a view: what changes it changes p
        self.adam = torch.optim.Adam([p.shard for p in self.params], lr=lr)

    def step(self):
        for p in self.params:
            self.reduce(p)
        self.update_and_gather()

    def reduce(self, p):
        p.shard.grad = mean_shard(p.grad)

    def update_and_gather(self):
        self.adam.step()  # updates this rank's shard of each p
        for p in self.params:
            whole = gather_whole(p.shard)
            p.data.copy_(whole.view(p.shape))  # the other shards, too

# %% [markdown]
# `compare` trains on two ranks, counts the numbers that each keeps, and compares with one process.

# %% tags=["fold"]
# define: `my_batches`, a rank's shares of all batches, and `compare`
from helpers.compare import largest_difference


def my_batches():
    return [(my_part(x), my_part(y)) for x, y in batches]


def train_with(kind):
    net = make_net()
    optimizer = kind(net.parameters(), lr=0.01)
    train(net, optimizer, my_batches())
    means = sum(values["exp_avg"].numel() for values in optimizer.adam.state.values())
    whole = sum(p.grad.numel() for p in net.parameters() if p.grad is not None)
    of_shards = sum(p.shard.grad.numel() for p in net.parameters())
    return net.state_dict(), means, whole, of_shards


def compare(kind, whole_gradients):
    for rank, (weights, means, whole, of_shards) in enumerate(ranks(train_with, kind)):
        print(f"rank {rank} of 2: Adam's first mean has {means:,} numbers, whole gradients have "
              f"{whole:,}, shards' gradients {of_shards:,}")
        assert largest_difference(weights, one_process) < 1e-12, "not as one process"
        assert means == of_shards == 27_525, "half of 55,050"
        assert whole == whole_gradients, "not as many whole gradients"
    print("both ranks have one process's weights, to 1e-12")

# %% tags=["trains"]
compare(FirstZeRO, whole_gradients=55_050)

# %% [markdown]
# Half of the state is on each rank, and the result is the same. (The whole gradients are still
# there. The program's class frees the shards'.)
#
# ## Stage 2: gradients
#
# Why keep a whole gradient once it is reduced? When it is complete (chapter 14's hook tells us), we
# reduce it and free it. (A second backward pass in a step would overwrite the first one's.)

# %% tags=["trains"]
class SecondZeRO(FirstZeRO):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        for p in self.params:
            p.register_post_accumulate_grad_hook(self.reduce_and_free)

    def reduce_and_free(self, p):  # NEW: during the backward pass
        self.reduce(p)
        p.grad = None

    def step(self):  # NEW: all is reduced already
        self.update_and_gather()


compare(SecondZeRO, whole_gradients=0)

# %% [markdown]
# No whole gradient is left, only the shards' halves.

# %% tags=["fold"]
# check: mistakes are noticed: not gathered, gradients too large, in wrong order, not freed
class NotGathered(FirstZeRO):
    def update_and_gather(self):
        self.adam.step()


class Summed(SecondZeRO):
    def reduce(self, p):
        super().reduce(p)
        p.shard.grad *= 10


class Shifted(FirstZeRO):
    def reduce(self, p):
        super().reduce(p)
        p.shard.grad = p.shard.grad.flip(0)


for mistake in [NotGathered, Summed, Shifted]:
    found = [result[0] for result in ranks(train_with, mistake)]
    assert not largest_difference(found, one_process) < 1e-5, mistake.__name__


class NotFreed(SecondZeRO):
    def reduce_and_free(self, p):
        self.reduce(p)


for _, _, whole, _ in ranks(train_with, NotFreed):
    assert whole == 55_050, "not 0: `compare` would notice"

# %% [markdown]
# ## Any size, any network
#
# The program has both stages for nearly any network, `ShardedOptimizer` and `ShardedGradients`. Its
# classes needn't be read. `Collectives` has our `reduce_scatter` and `gather_whole`, `Cut` our
# `my_part`, which pads shards with zeros where a size isn't divisible by the number of ranks:

# %% tags=["fold", "file:sharded_train.py"]
# define: `Collectives`, both halves, which return at once, with a function that waits
class Collectives:
    """The halves of an all-reduce. Each returns its result and a function that waits for it."""

    def reduce_scatter(self, whole):  # [ranks * n] -> [n], this rank's shard of the sum
        shard = whole.new_empty(len(whole) // dist.get_world_size())
        sending = dist.reduce_scatter_single(shard, whole, async_op=True)
        return shard, sending.wait  # the function itself: who wants the result calls it

    def all_gather(self, shard):  # [n] -> [ranks * n], the shards of all ranks
        whole = shard.new_empty(len(shard) * dist.get_world_size())
        sending = dist.all_gather_single(whole, shard, async_op=True)
        return whole, sending.wait

# %% tags=["fold", "file:sharded_train.py"]
# define: `Cut`, a tensor as one row of numbers, padded and cut
class Cut:
    """A tensor of `shape`, flat, padded with zeros, and cut into equal shards, one a rank."""

    def __init__(self, shape, number=0):
        self.shape = shape
        self.number = number  # of the tensor, the same on all ranks
        self.numbers = shape.numel()
        self.ranks = dist.get_world_size()
        self.size = (self.numbers + self.ranks - 1) // self.ranks  # of a shard, rounded up
        self.begin = dist.get_rank() * self.size

    def mine(self, whole):
        """This rank's shard without the padding: a view, if `whole` is contiguous."""
        return whole.reshape(-1)[self.begin : self.begin + self.size]

    def pad(self, flat, count):
        """`flat`, filled up to `count` shards."""
        missing = count * self.size - len(flat)
        return F.pad(flat, (0, missing)) if missing else flat

    def join(self, flat):
        """The tensor, from all shards one after the other: a view."""
        return flat[: self.numbers].view(self.shape)

    def shard(self, whole):
        """A copy of this rank's shard, padded, with as many dimensions as the tensor has."""
        ones = [1] * (len(self.shape) - 1)
        shape = [self.size, *ones] if self.shape else []
        return self.pad(self.mine(whole), 1).clone().reshape(shape)

# %% tags=["fold"]
# measure: each rank's part of ten numbers, and of two; 0 is padding
def padded_part(n):
    dist.barrier()  # no rank ends before all have met
    return Cut(torch.Size([n])).shard(torch.arange(1, n + 1)).tolist()


for n in [10, 2]:
    print(n, "numbers on four ranks:", *ranks(padded_part, n, world=4))

# %% tags=["fold", "file:sharded_train.py"]
# define: `ShardedOptimizer` and `ShardedGradients`, stages 1 and 2 for any network
# Before training, all ranks get rank 0's values; what can't be shared is refused.
def copy_from_rank_0(module):
    """All ranks begin with rank 0's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    refuse_empty(tensors)
    refuse_sharded(tensors)
    refuse_different([(t.shape, t.dtype, t.requires_grad) for t in tensors])
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, src=0)
        tensor.detach().copy_(whole)


def refuse_empty(tensors):
    if any(tensor.is_meta or nn.parameter.is_lazy(tensor) for tensor in tensors):
        raise ValueError("a parameter or buffer has no values to share, it is on the meta device "
                         "or lazy: initialise the module before")


def refuse_sharded(tensors):
    if any(hasattr(tensor, "cut") or hasattr(tensor, "device_mesh") for tensor in tensors):
        raise ValueError("these parameters are sharded already: build the module anew")


def refuse_different(facts):
    """Raises where the ranks' facts about what they share differ."""
    kinds = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, facts)
    if any(each != kinds[0] for each in kinds):
        raise ValueError("the ranks' modules differ in their parameters or buffers")


def refuse_other_order(order, device):
    """Raises where `order`, a number made of what was sent, isn't the same on all ranks."""
    both = torch.tensor([order, -order], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    if both[0] != -both[1]:
        raise RuntimeError("the ranks used different parameters, or in another order, so their "
                           "messages were mixed up: go back to the last checkpoint, and let all "
                           "ranks take the same way through the module")


# Optimizers that look at a parameter as a whole: a shard of it gives another update.
WHOLE = {"Adafactor", "LBFGS", "Muon"}
SINGLE = {"step", "mu", "eta", "mu_product"}  # numbers that optimizers keep beside their arrays


def needs_whole(optimizer_cls):
    """Whether it is one of those, or was made from one."""
    return any(base.__name__ in WHOLE for base in optimizer_cls.__mro__)


def parameters_of(optimizer):
    """The parameters of all groups, in the order of its `state_dict`."""
    parameters = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def copy_options(source, target):
    """A parameter group's learning rate and so on, not its parameters."""
    target.update((name, value) for name, value in source.items() if name != "params")


def convert_state(saved, parameters, convert):
    """An optimizer's `saved` state, each value of it converted by `convert(p, key, value)`."""
    state = {}
    for number, values in saved["state"].items():
        state[number] = {}
        for key, value in values.items():
            value = torch.as_tensor(value)
            state[number][key] = convert(parameters[number], key, value).clone()
    return {"state": state, "param_groups": [dict(group) for group in saved["param_groups"]]}


def shard_of_state(cut, key, value):
    """This rank's part of a whole value of an optimizer's state."""
    if value.dim() and value.shape != cut.shape:
        raise ValueError(f"saved: {key} has shape {tuple(value.shape)}, not {tuple(cut.shape)}")
    is_array = value.shape == cut.shape and key not in SINGLE
    return cut.mine(value) if is_array else value


def clip(grads, largest, also=()):
    """Scales `grads`, shards of all ranks, so that their norm together is at most `largest`."""
    device = grads[0].device if grads else None
    square = torch.zeros((), device=device)
    for grad in grads:
        square = square + grad.abs().square().sum()
    dist.all_reduce(square)
    norm = square.sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1)
    for grad in [*grads, *also]:
        grad.mul_(factor.to(grad.dtype))
    return norm


class ShardedOptimizer(torch.optim.Optimizer):
    """ZeRO's stage 1: an `optimizer_cls` that has state for this rank's shard of the parameters.

    `step` takes the mean of all ranks' gradients, updates this rank's shard and gathers the rest:
    all ranks call it, and `state_dict`, too. `optimizer_cls` must be elementwise, as SGD and Adam
    are. `p.grad` is this rank's gradient only: clip it by this class's `clip_grad_norm`, not by
    torch's, and use no GradScaler. For frozen parameters and buffers call copy_from_rank_0(module)
    first; later buffers, such as BatchNorm's statistics, stay each rank's own.
    """

    collectives = Collectives()

    def __init__(self, params, optimizer_cls, **options):
        if not isinstance(optimizer_cls, type):
            raise TypeError("optimizer_cls should be a class, such as torch.optim.Adam; its "
                            "options follow it")
        if needs_whole(optimizer_cls):
            raise ValueError(f"optimizer_cls={optimizer_cls.__name__} needs whole tensors; take "
                             "one that is elementwise, such as Adam")
        self.optimizer_cls = optimizer_cls
        self.options = options
        self.cuts = {}  # by parameter
        self.shards = {}
        self.local = None  # the optimizer of the shards
        super().__init__(params, options)

    def add_param_group(self, group):
        super().add_param_group(group)
        group = self.param_groups[-1]
        refuse_empty(group["params"])
        refuse_sharded(group["params"])
        refuse_different([(p.shape, p.dtype) for p in group["params"]])
        for p in group["params"]:
            if not p.is_contiguous():
                raise ValueError(f"the parameter of shape {tuple(p.shape)} should be contiguous: "
                                 "module.to(memory_format=torch.contiguous_format)")
            dist.broadcast(p.detach(), src=0)
            self.cuts[p] = Cut(p.shape, len(self.cuts))
            self.shards[p] = self.cuts[p].mine(p.detach())  # shares the parameter's memory
        own = {**group, "params": [self.shards[p] for p in group["params"]]}
        if self.local is None:
            self.local = self.optimizer_cls([own], **self.options)
            self.defaults = self.local.defaults
        else:
            self.local.add_param_group(own)
        copy_options(self.local.param_groups[-1], group)

    def reduce(self, p):
        """Adds this rank's shard of the mean gradient of `p` to what it has."""
        cut = self.cuts[p]
        shard = self.shards[p]
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        total, wait = self.collectives.reduce_scatter(cut.pad(gradient.reshape(-1), cut.ranks))
        wait()
        mean = total[: len(shard)] / cut.ranks
        shard.grad = mean if shard.grad is None else shard.grad + mean

    def reduce_all(self):
        """As `reduce`, from zero, for each parameter that has a gradient on any rank."""
        device = next(iter(self.shards)).device
        users = torch.tensor([p.grad is not None for p in self.shards], dtype=int, device=device)
        dist.all_reduce(users)
        for p, count in zip(self.shards, users.tolist()):
            self.shards[p].grad = None
            if count > 0:
                self.reduce(p)

    def gather(self, p, shard):
        whole, wait = self.collectives.all_gather(self.cuts[p].pad(shard, 1))
        wait()
        return self.cuts[p].join(whole)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.check_groups()
        for p, shard in self.shards.items():
            if p.shape != self.cuts[p].shape:
                raise RuntimeError(f"a parameter had shape {tuple(self.cuts[p].shape)} and has "
                                   f"{tuple(p.shape)}: make the optimizer after such a change")
            shard.data = self.cuts[p].mine(p.detach())  # where p's data has been replaced
        self.reduce_all()
        for group, local in zip(self.param_groups, self.local.param_groups):
            copy_options(group, local)  # a schedule may have changed them
        self.local.step()
        for group, local in zip(self.param_groups, self.local.param_groups):
            copy_options(local, group)  # some optimizers count in them
        for p, shard in self.shards.items():
            if shard.grad is not None:
                p.copy_(self.gather(p, shard))
        self.forget()
        return loss

    def forget(self):
        """After a step: `p.grad` has all that a next one needs."""
        for shard in self.shards.values():
            shard.grad = None

    # What follows completes it; a step needs no more.

    @torch.no_grad()
    def clip_grad_norm(self, largest):
        """As torch's clip_grad_norm_ in one process: returns the norm before. All ranks call it."""
        self.reduce_all()
        shards = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        return clip(shards, largest, also=self.local_grads())

    def local_grads(self):
        return [p.grad for p in self.shards if p.grad is not None]

    def state_dict(self):
        """What one process would save, whole. Communicates, so all ranks call it."""
        saved = convert_state(self.local.state_dict(), list(self.shards), self.whole)
        for source, target in zip(self.param_groups, saved["param_groups"]):
            copy_options(source, target)
        return saved

    def whole(self, p, key, value):
        return self.gather(p, value) if value.dim() else value

    def load_state_dict(self, saved):
        """From `state_dict`, of as many ranks as it may have been, or of one process."""
        self.local.load_state_dict(convert_state(saved, list(self.shards), self.own))
        for group, local in zip(self.param_groups, self.local.param_groups):
            copy_options(local, group)

    def own(self, p, key, value):
        return shard_of_state(self.cuts[p], key, value)

    # What would be wrong in silence is refused.

    def check_groups(self):
        for group, local in zip(self.param_groups, self.local.param_groups, strict=True):
            listed = [id(self.shards.get(p)) for p in group["params"]]
            if listed != [id(shard) for shard in local["params"]]:
                raise RuntimeError("a parameter group was edited: call add_param_group, or make "
                                   "the optimizer anew")

    def refuse_hook(self, *given, **options):
        raise RuntimeError("hooks of state_dict and load_state_dict are not called here: change "
                           "what state_dict returns, or what you load")

    register_state_dict_pre_hook = refuse_hook
    register_state_dict_post_hook = refuse_hook
    register_load_state_dict_pre_hook = refuse_hook
    register_load_state_dict_post_hook = refuse_hook

    def __getstate__(self):
        raise TypeError("this optimizer can't be copied or pickled: take its state_dict()")


class ShardedGradients(ShardedOptimizer):
    """ZeRO's stage 2: reduces each gradient as soon as it is complete, and frees it.

    All ranks must use the same parameters in the same order in every backward pass, each of which
    sends. After it `p.grad` is only a mark, NaN everywhere: the gradient is that of
    `optimizer.shards[p]`. Clear it in any way that PyTorch has, clip it by `clip_grad_norm`.
    """

    def add_param_group(self, group):
        if self.local is None:
            self.marks = {}
            self.order = 0
        super().add_param_group(group)
        before = weakref.WeakMethod(self.take_mark_away)  # weak: the parameters don't keep us
        after = weakref.WeakMethod(self.reduce_and_mark)
        for p in self.param_groups[-1]["params"]:
            dtype = p.dtype if p.is_floating_point() or p.is_complex() else None
            mark = torch.full((), torch.nan, dtype=dtype, device=p.device).expand(p.shape)
            self.marks[p] = mark
            mark.is_mark = True  # it has the memory of one number
            if getattr(p.grad, "is_mark", False):
                p.grad = None  # of an optimizer that was there before
            if p.requires_grad:
                here = weakref.ref(p)
                p.register_hook(lambda gradient, here=here: call(before, here()))
                p.register_post_accumulate_grad_hook(lambda p: call(after, p))

    def drop_cleared(self, p):
        """Where `p.grad` is None, or zero in place of NaN, it was cleared."""
        if p.grad is self.marks[p] and not p.grad.as_strided((), ()).isnan():
            p.grad.fill_(torch.nan)
            self.shards[p].grad = None
        if p.grad is None:
            self.shards[p].grad = None

    def take_mark_away(self, p):
        self.drop_cleared(p)
        if getattr(p.grad, "is_mark", False):
            p.grad = None

    def reduce_and_mark(self, p):
        if getattr(p.grad, "is_mark", False):
            raise RuntimeError("another ShardedGradients has taken this gradient")
        made = self.marks[p].dtype
        if p.dtype != made:
            raise RuntimeError(f"a parameter was {made} and is {p.dtype}: make the optimizer after "
                               "such a change")
        self.order = hash((self.order, self.cuts[p].number))
        self.reduce(p)
        p.grad = self.marks[p]

    def reduce_all(self):  # is done
        for p in self.shards:
            self.drop_cleared(p)
            if p.grad is not None and p.grad is not self.marks[p]:
                raise RuntimeError("a gradient did not come by a backward pass: its parameter was "
                                   "frozen when this optimizer was made, or it was set by hand")
        refuse_other_order(self.order, next(iter(self.shards)).device)

    def local_grads(self):
        return []

    def forget(self):
        pass  # until it is cleared

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none=True)
        for p in self.shards:
            self.drop_cleared(p)


def call(weak, *given):
    method = weak()
    if method is not None:
        method(*given)

# %% tags=["fold", "trains"]
# check: stages 1 and 2 equal one process: odd sizes, shared and frozen parameters, 1 to 3 ranks
class Untidy(nn.Module):
    """Odd sizes, a scalar, tied, frozen and unused parameters, a buffer, values of each rank."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Linear(784, 30), nn.LayerNorm(30)
        self.first, self.last = nn.Linear(30, 30), nn.Linear(30, 30)
        self.last.weight = self.first.weight  # tied
        self.frozen = nn.Linear(30, 30).requires_grad_(False)
        self.unused, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.zeros(30))
        torch.manual_seed(16 + (dist.get_rank() if dist.is_initialized() else 0))
        for values in self.double().state_dict().values():
            nn.init.normal_(values, 0, 0.2)

    def forward(self, x):
        x = self.norm(self.stem(x)) + self.shift
        return self.last(self.scale * self.frozen(torch.relu(self.first(x))))


def finish(model):
    if hasattr(model, "finish_gradient_synchronization"):
        model.finish_gradient_synchronization()


def train_untidy(make):
    net = Untidy()
    trained = [p for p in net.parameters() if p.requires_grad]
    groups = [{"params": trained[:3]}, {"params": trained[3:], "lr": 0.003}]
    model, optimizer = make(net, groups)
    for number, (x, y) in enumerate(batches[:5]):
        optimizer.zero_grad()
        if dist.is_initialized():
            x, y = my_part(x), my_part(y)
        for half_x, half_y in zip(x.chunk(2), y.chunk(2)):
            F.cross_entropy(model(half_x), half_y).backward()
            finish(model)
        optimizer.step()
        if number == 1:
            optimizer.param_groups[1]["lr"] = 0.03
    return getattr(model, "gather_full_params", net.state_dict)()


def plain(net, groups, kind=torch.optim.Adam):
    return net, kind(groups, lr=0.01)


def stage1(net, groups, kind=torch.optim.Adam, cls=ShardedOptimizer):
    copy_from_rank_0(net)
    return net, cls(groups, kind, lr=0.01)


def stage2(net, groups, kind=torch.optim.Adam):
    return stage1(net, groups, kind, cls=ShardedGradients)


def not_copied(net, groups):
    return net, ShardedOptimizer(groups, torch.optim.Adam, lr=0.01)


untidy = train_untidy(plain)
for stage in [stage1, stage2]:
    for world in [3, 2, 1]:
        assert largest_difference(ranks(train_untidy, stage, world=world), untidy) < 1e-12, world
assert not largest_difference(ranks(train_untidy, not_copied), untidy) < 1e-3, "frozen, buffers"
print("stages 1 and 2 equal one process to 1e-12")


def as_our_functions():
    whole = torch.arange(8.0) * (dist.get_rank() + 1)
    shard, wait = Collectives().reduce_scatter(whole)
    wait()
    gathered, wait_for_all = Collectives().all_gather(shard)
    wait_for_all()
    return torch.equal(shard, reduce_scatter(whole)) and torch.equal(gathered, gather_whole(shard))


for world in [1, 2, 4]:
    assert all(ranks(as_our_functions, world=world)), world

# %% [markdown]
# ## Stage 3: weights
#
# When is a whole weight needed? Only while its layer computes. The last two of three layers:
#
# ![The last two layers of a network, from left to right in time. A thin bar is the rank's
# shard, always there. In the forward pass layer 2 is gathered, used and freed, then layer 3. In the
# backward pass layer 3 is gathered again and freed, then layer 2, and each sends its gradient to be
# reduced.](src/drawings/gathered_weight.svg)
#
# ### A layer that keeps shards
#
# A layer can gather its weight, use it and drop it. But autograd keeps what the backward pass
# needs, and for `x @ weight.T` that is the whole weight: the gradient of `x` is computed with it.
# So we write a linear layer's two passes ourselves, as a `torch.autograd.Function`. `forward` saves
# in `ctx` what `backward` will need: the weight's *shard*. `backward` gets the output's gradient,
# and returns one for each argument of `forward`:

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
        for_weight = mean_shard(gradient.T @ x)  # flat, as weight_shard is
        for_bias = mean_shard(gradient.sum(0))
        return for_x, for_weight, for_bias

# %% [markdown]
# On two ranks, the weight has the rows `0 1 2 3` and `4 5 6 7`, a row a rank. Rank 0's input is
# four ones, rank 1's four twos. The loss is the sum of the outputs, so on each rank the gradient of
# a row is the rank's input. **Predict** the outputs, and the mean gradients.

# %%
def one_layer():
    weight = torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, 7]])
    weight_shard = my_part(weight.reshape(-1)).requires_grad_()
    bias_shard = torch.zeros(1)
    x = torch.ones(1, 4) * (dist.get_rank() + 1)
    y = LinearFromShards.apply(x, weight_shard, bias_shard)
    y.sum().backward()
    return y.tolist(), weight_shard.grad.tolist()


for rank, (y, gradient) in enumerate(ranks(one_layer)):
    print(f"rank {rank}: output {y}, gradient of its shard {gradient}")

# %% tags=["fold"]
# check: outputs and gradients of this layer; of another they are those of PyTorch's own layer
assert ranks(one_layer) == [([[6, 22]], [1.5] * 4), ([[12, 44]], [1.5] * 4)]


def as_pytorch():
    torch.manual_seed(dist.get_rank())
    x = torch.randn(5, 4, requires_grad=True)
    torch.manual_seed(16)
    weight = torch.randn(6, 4, requires_grad=True)
    bias = torch.randn(6, requires_grad=True)
    shards = [my_part(p.detach().reshape(-1)).clone().requires_grad_() for p in (weight, bias)]
    found = []
    for y in F.linear(x, weight, bias), LinearFromShards.apply(x, *shards):
        y.square().sum().backward()
        found.append([y.detach(), x.grad])
        x.grad = None
    for p, shard in zip([weight, bias], shards):
        dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        found[0].append(my_part(p.grad.reshape(-1)))
        found[1].append(shard.grad)
    return largest_difference(*found)


assert max(ranks(as_pytorch)) < 1e-4

# %% [markdown]
# Both ranks computed with the whole weight, and each shard gets the mean of 1 and 2.
#
# Is the whole weight still in memory between the forward and the backward pass?

# %% tags=["fold"]
# check: autograd holds a gathered weight in an ordinary linear layer, and not in our function
import time
from unittest.mock import patch


class Gathered(torch.autograd.Function):
    """A whole tensor from shards: an ordinary layer computes with it."""

    @staticmethod
    def forward(ctx, shard):
        return gather_whole(shard)

    @staticmethod
    def backward(ctx, gradient):
        return mean_shard(gradient)


def ordinary(x, weight_shard, bias_shard):
    return F.linear(x, Gathered.apply(weight_shard).view(2, 4), Gathered.apply(bias_shard))


def our_function(x, weight_shard, bias_shard):
    return LinearFromShards.apply(x, weight_shard, bias_shard)


def holds_whole(layer, seconds):
    weight_shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.ones(1, 4, requires_grad=True)  # else no layer saves its weight
    gather = dist.all_gather_single
    memories = []

    def noting(whole, shard, **options):
        if len(whole) == 8:
            memories.append(weakref.ref(whole.untyped_storage()))
        return gather(whole, shard, **options)

    with patch.object(dist, "all_gather_single", noting):
        y = layer(x, weight_shard, torch.zeros(1))
    (memory,) = memories
    end = time.perf_counter() + seconds
    while memory() is not None and time.perf_counter() < end:
        time.sleep(0.01)  # gloo's threads let go of what they sent a moment later
    held = memory() is not None
    y.sum().backward()
    assert weight_shard.grad.tolist() == [1] * 4
    assert x.grad.tolist() == [[4, 6, 8, 10]]
    return held


assert ranks(holds_whole, ordinary, 0.5) == [True, True]  # looks for half a second
print("an ordinary layer that gets a gathered weight: still held")
assert ranks(holds_whole, our_function, 10) == [False, False]
print("our function: freed")

# %% [markdown]
# **Autograd keeps only our shard of the weight. Nobody holds the whole one, so Python frees it.**
#
# ### A small FSDP
#
# `ShardedLinear` is made from an ordinary layer. `first_fsdp` puts one in the place of each.

# %%
def copy_shard(p):
    flat = p.detach().reshape(-1)
    return nn.Parameter(my_part(flat).clone())  # a copy, so that the whole can be freed


class ShardedLinear(nn.Module):
    def __init__(self, layer):  # an nn.Linear
        super().__init__()
        self.weight = copy_shard(layer.weight)
        self.bias = copy_shard(layer.bias)

    def forward(self, x):
        return LinearFromShards.apply(x, self.weight, self.bias)


def first_fsdp(net):
    for number, layer in enumerate(net):
        if isinstance(layer, nn.Linear):
            net[number] = ShardedLinear(layer)
    return net

# %% [markdown]
# An ordinary Adam updates the shards, and the next forward pass gathers them. On two ranks:

# %% tags=["fold"]
# define: `join_and_compare` trains, joins both ranks' shards, and compares with one process
def train_shards(kind):
    model = kind(make_net())
    for p in model.parameters():
        assert p.untyped_storage().nbytes() == p.nbytes, "the whole is still in memory"
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), my_batches())
    return model.state_dict()


def join_and_compare(kind):
    on_rank_0, on_rank_1 = ranks(train_shards, kind)
    for name, weight in one_process.items():
        joined = torch.cat([on_rank_0[name], on_rank_1[name]]).view(weight.shape)
        print(f"{name}: {len(on_rank_0[name]):,} of {weight.numel():,} on rank 0")
        assert largest_difference(joined, weight) < 1e-12, "not as one process"
    print("joined, they are one process's weights, to 1e-12")

# %% tags=["trains"]
join_and_compare(first_fsdp)

# %% [markdown]
# Half of each parameter is on a rank, with its gradient and Adam's means. (The numbers count ReLUs,
# too: the drawing's layer 3 is `4`.)
#
# ### A note in place of the weight
#
# We can't write the formulas of all layers. PyTorch has them, but saves the whole weight. So we
# have it save a *note*. `saved_tensors_hooks` takes two functions. The first gets each tensor that
# is to be saved, and returns what is saved in its place. The second gets that in the backward pass.
# In one process, with two shards in a list:

# %%
from torch.autograd.graph import saved_tensors_hooks

shards = [torch.tensor([1.0, 2]), torch.tensor([3.0, 4])]


def gather_shards():
    print("gathered")
    return torch.cat(shards)


def note_instead(tensor):  # the first function
    if tensor.data_ptr() == weight.data_ptr():  # it is `weight`, made in the next cell
        return "the weight"  # the note
    return tensor


def weight_again(saved):  # the second
    if isinstance(saved, str):  # a note
        return gather_shards()
    return saved

# %% [markdown]
# The functions stay with what was saved, so the second is called when the block has ended:

# %%
x = torch.full((4,), 2.0, requires_grad=True)
with saved_tensors_hooks(note_instead, weight_again):
    weight = gather_shards()
    y = (x * weight).square()
del weight  # the last variable that holds it
y.sum().backward()
print("gradient of x:", x.grad)

# %% tags=["fold"]
# check: with the note the whole weight is freed after the forward pass, without it is held
import contextlib
import io


def still_held(hooks):
    global weight  # note_instead looks at it
    x = torch.full((4,), 2.0, requires_grad=True)
    with contextlib.redirect_stdout(io.StringIO()), hooks:
        weight = gather_shards()
        y = (x * weight).square()
        memory = weakref.ref(weight.untyped_storage())
        del weight
        found = memory() is not None
        y.sum().backward()
    assert x.grad.tolist() == [4, 16, 36, 64], "2 times x times the square of each weight"
    return found


assert not still_held(saved_tensors_hooks(note_instead, weight_again))
assert still_held(contextlib.nullcontext())
print("between the passes the whole weight is freed; without the note it is held")

# %% [markdown]
# ### FSDP for any network
#
# The program's `FSDP` does so for nearly any module (not an LSTM). When a layer reads its weight, a
# *property* of its class runs instead, and gathers it; the whole weight's gradient goes to the
# shard by a reduce-scatter, as in `LinearFromShards`. More in deeper: FSDP for any network.

# %% tags=["fold", "file:sharded_train.py"]
# define: what `FSDP` stands on: properties for all parameters, saving, loading, clipping, refusals
def read_through(owner, fsdp):
    """From now on `owner.weight` asks `fsdp` for the whole weight; the shard is what is stored."""
    owner.fsdp = weakref.ref(fsdp)
    reads = {}
    for name, p in owner._parameters.items():
        if p is not None:
            reads[name] = property(make_read(name), refuse_write)
    if reads:  # a class of the same name, with these properties
        owner.__class__ = type(type(owner).__name__, (type(owner),), reads)
    owner.register_forward_pre_hook(enter, prepend=True)
    owner.register_forward_hook(leave, always_call=True)


def make_read(name):
    def read(owner):
        p = owner._parameters.get(name)
        if p is None:
            refuse_write(owner)
        return fsdp_of(owner).read(p)
    return read


def fsdp_of(owner):
    fsdp = owner.fsdp()
    if fsdp is None:
        raise RuntimeError("the FSDP object of this module is gone, and with it the way to the "
                           "other ranks' shards: keep it")
    return fsdp


def enter(owner, inputs):
    fsdp_of(owner).depth += 1


def leave(owner, inputs, output):
    fsdp_of(owner).depth -= 1


class Gather(torch.autograd.Function):
    """A whole tensor from shards; backwards, the whole gradient to shards of the mean."""

    @staticmethod
    def forward(ctx, anchor, given):
        ctx.given = given
        ctx.set_materialize_grads(False)  # a gradient that is None stays None
        shard, fsdp = given
        return fsdp.lend(shard)

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True: FSDP's gradients have no derivatives")
        shard, fsdp = ctx.given
        if gradient is not None:
            fsdp.send(shard, gradient)
        return None, None


UNFINISHED = ("finish_gradient_synchronization() was not called after the last backward pass: call "
              "it after each; gradients add up")


def before_step(optimizer, given, options):
    """Raises where an ordinary optimizer would step with what FSDP has made of its parameters."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            cut = getattr(p, "cut", None)
            if cut is None:
                continue
            if needs_whole(type(optimizer)):
                raise ValueError(f"{type(optimizer).__name__} needs whole tensors, FSDP's are "
                                 "shards; take one that is elementwise, such as Adam")
            if cut.fsdp() is not None and cut.fsdp().sent:
                raise RuntimeError(UNFINISHED)
            for key, value in optimizer.state.get(p, {}).items():
                if torch.is_tensor(value) and value.dim() and value.shape == cut.shape != p.shape:
                    raise ValueError(f"the optimizer's {key} is of the whole parameter: load what "
                                     "is whole by FSDP's load_optimizer_state")


def refuse_random(*given, **options):
    raise RuntimeError("this is one rank's shard of a parameter: initialise the module before FSDP "
                       "wraps it, or call load_full_params")


def refuse_direct(p):
    raise RuntimeError("a gradient came to a shard itself: a parameter was used outside of a "
                       "forward, in another method, by parameters() or from a list. There it is "
                       "this rank's shard. Use it in a forward, by its name")


def refuse_gradients(p):
    """From now on it raises if autograd itself brings a gradient to `p`: Gather's go by `send`."""
    if not p.is_floating_point() and not p.is_complex():
        return  # has none
    trained = p.requires_grad
    p.requires_grad_(True)  # a frozen parameter takes no hook, and may be unfrozen later
    p.register_post_accumulate_grad_hook(refuse_direct)
    p.requires_grad_(trained)


def refuse_load(module, saved, prefix, *rest):
    if not prefix:  # as in `module.load_state_dict`, not in that of FSDP
        raise ValueError("this module is sharded: shards are loaded by FSDP's load_state_dict, "
                         "whole weights by its load_full_params")


def refuse_write(owner, value=None):
    raise RuntimeError("FSDP reads this weight: parametrize, prune, remove or replace it before "
                       "FSDP wraps the module")


def refuse_shared_memory(module):
    tensors = [*module.parameters(), *module.buffers()]
    places = [tensor.data_ptr() for tensor in tensors if tensor.numel() > 0]
    for p in module.parameters():
        if p.numel() > 0 and places.count(p.data_ptr()) > 1:
            raise ValueError("two tensors have one memory, which their shards would not have: tie "
                             "them as one parameter, a.weight = b.weight")


class Sharded(nn.Module):
    """What programs want of an FSDP module beside training."""

    def refuse(self, module):
        """Raises for what FSDP can't do, before anything is changed."""
        for each in module.modules():
            if isinstance(each, nn.RNNBase):
                raise ValueError("module has an nn.RNN, LSTM or GRU, which keep lists of their "
                                 "weights")
            if isinstance(each, nn.parallel.DistributedDataParallel):
                raise ValueError("module is wrapped by DDP already: wrap what is in it")
            if getattr(each, "max_norm", None) is not None:
                raise ValueError("module has an embedding with max_norm, which writes into its "
                                 "weight: that would be lost")
        if next(module.parameters(), None) is None:
            raise ValueError("module has no parameters, so nothing to shard: use it as it is")
        for p in module.parameters():
            if hasattr(p, "cut"):
                continue  # refuse_sharded says so
            if p._post_accumulate_grad_hooks or p._backward_hooks:
                raise ValueError("a parameter has hooks, made for the whole of it: register them "
                                 "after wrapping, by register_post_accumulate_grad_hook, and wrap "
                                 "before you make DDP or ShardedGradients")

    def shard_parameters(self, module):
        """Every parameter becomes this rank's shard of it, and is read through `read`."""
        self.refuse(module)
        copy_from_rank_0(module)
        refuse_shared_memory(module)
        device = next(iter(module.parameters())).device
        # The shard's gradient comes after Gather.backward, which autograd calls for this number.
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.depth = 0  # in how many modules' calls we are
        self.order = 0  # a number made of all that was gathered and sent
        self.arrived = {}  # parameters whose gradients came since the last backward pass
        for number, p in enumerate(module.parameters()):
            p.cut = Cut(p.shape, number)
            p.cut.fsdp = weakref.ref(self)
            p.data = p.cut.shard(p.data)
            p.uniform_ = refuse_random  # nn.init's functions call one of these
            p.normal_ = refuse_random
            p.ndimension = refuse_random
            refuse_gradients(p)
        for owner in module.modules():
            read_through(owner, self)
            owner.register_load_state_dict_pre_hook(refuse_load)
        for register in register_optimizer_step_pre_hook, register_optimizer_step_post_hook:
            hook = register(before_step)  # after a step, too: its closure may have forgotten it
            weakref.finalize(self, hook.remove)  # it looks at optimizers while this object lives

    def in_a_pass(self):
        """In a call of the module or of a part of it, or in autograd, as checkpoint's calls are."""
        return self.depth > 0 or torch._C._current_graph_task_id() >= 0

    def cast(self, value):
        change = self.compute_dtype and torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if change else value

    def cast_all(self, inputs, options):
        cast_inputs = [self.cast(value) for value in inputs]
        cast_options = {name: self.cast(value) for name, value in options.items()}
        return cast_inputs, cast_options

    def count_for_order(self, p, what):
        """For `refuse_other_order`: 0 is for a weight gathered, 1 for a gradient sent."""
        if not hasattr(p, "cut") or p.numel() != p.cut.size:
            raise RuntimeError("a parameter was replaced or copied after FSDP had sharded it")
        self.order = hash((self.order, p.cut.number, what))

    def start(self, p):
        """Begins to gather `p`: all shards one after the other, and a function that waits."""
        self.count_for_order(p, 0)
        return self.collectives.all_gather(self.cast(p.detach().reshape(-1)))

    def arrive(self, p, mean):
        p.grad = mean if p.grad is None else p.grad + mean
        self.arrived[p] = p.grad, p.grad._version

    def end_of_backward(self):
        self.check_parameters()
        self.check_gradients()
        self.lent.clear()
        refuse_other_order(self.order, self.anchor.device)
        for p in self.arrived:
            self.run_hooks(p)
        self.arrived.clear()

    def named(self):
        return dict(self.module.named_parameters(remove_duplicate=False))

    @torch.no_grad()
    def gather_full_params(self):
        """The wrapped module's `state_dict`, whole, buffers as on this rank. All ranks call it."""
        self.check_parameters()
        found = {}
        for name, value in self.module.state_dict().items():
            found[name] = value.clone() if torch.is_tensor(value) else value
        for name, p in self.named().items():
            if name in found:
                whole, wait = self.collectives.all_gather(p.detach().reshape(-1))
                wait()
                found[name] = p.cut.join(whole).clone()
        return found

    @torch.no_grad()
    def load_full_params(self, saved):
        """Whole weights and buffers as rank 0 has them, by `module`'s names. All ranks call it."""
        self.check_parameters()
        own = {}
        named = self.named()
        facts = {name: tuple(getattr(value, "shape", ())) for name, value in saved.items()}
        refuse_different(list(facts.items()))
        for name, value in saved.items():
            if name in named:
                cut = named[name].cut
                if value.shape != cut.shape:
                    raise ValueError(f"saved: {name} has shape {tuple(value.shape)}, not "
                                     f"{tuple(cut.shape)}")
            own[name] = value
            if torch.is_tensor(value):
                whole = value.to(next(iter(named.values())).device).contiguous().clone()
                dist.broadcast(whole, src=0)
                own[name] = cut.shard(whole) if name in named else whole
        own = {f"module.{name}": value for name, value in own.items()}
        own["_extra_state"] = self.get_extra_state()
        super().load_state_dict(own)

    def get_extra_state(self):
        """With `state_dict`, which has this rank's shards: whose they are."""
        return {"rank": dist.get_rank(), "ranks": dist.get_world_size()}

    def set_extra_state(self, state):
        if state != self.get_extra_state():
            raise ValueError(f"these are the shards of {state}, not of {self.get_extra_state()}: "
                             "every rank loads what it saved, or all call load_full_params with "
                             "what gather_full_params gave")

    def load_state_dict(self, saved, *given, **options):
        """This rank's shards, from `state_dict`."""
        if "_extra_state" not in saved:
            raise ValueError("these are not the shards that FSDP's state_dict has: for whole "
                             "weights call load_full_params on all ranks")
        self.set_extra_state(saved["_extra_state"])  # before anything is loaded
        return super().load_state_dict(saved, *given, **options)

    def gather_optimizer_state(self, optimizer):
        """What `optimizer` would save in one process. All ranks call it."""
        parameters = parameters_of(optimizer)
        return convert_state(optimizer.state_dict(), parameters, self.whole_state)

    def load_optimizer_state(self, optimizer, saved):
        """From `gather_optimizer_state`, of as many ranks as it was, or of one process."""
        parameters = parameters_of(optimizer)
        optimizer.load_state_dict(convert_state(saved, parameters, self.own_state))

    def whole_state(self, p, key, value):
        if key in SINGLE or value.shape != p.shape:
            return value
        whole, wait = self.collectives.all_gather(value.reshape(-1))
        wait()
        return p.cut.join(whole)

    def own_state(self, p, key, value):
        part = shard_of_state(p.cut, key, value)
        return part if part is value else p.cut.shard(value)

    @torch.no_grad()
    def clip_grad_norm(self, largest):
        """As torch's clip_grad_norm_ in one process: returns the norm before. All ranks call it."""
        if self.sent:
            raise RuntimeError(UNFINISHED)
        return clip([p.grad for p in self.parameters() if p.grad is not None], largest)

    def run_hooks(self, p):
        if p._backward_hooks:
            raise RuntimeError("register_hook on a shard: gradients come by another way; take "
                               "register_post_accumulate_grad_hook")
        for hook in list((p._post_accumulate_grad_hooks or {}).values()):
            if hook is not refuse_direct:
                hook(p)

    def __getstate__(self):
        raise TypeError("FSDP can't be copied or pickled: take gather_full_params() of it")

    def check_parameters(self):
        for p in self.module.parameters():
            if not hasattr(p, "cut"):
                raise RuntimeError("a parameter was added or replaced after FSDP was made: do it "
                                   "before, or its gradient stays this rank's own")

    def check_gradients(self):
        """Raises unless gradients came since the last forward, and are as they came."""
        trained = any(p.requires_grad for p in self.parameters())
        if trained and self.lent and not self.arrived:
            raise RuntimeError("no gradient came since the forward pass: call backward(), without "
                               "inputs=, and then finish_gradient_synchronization()")
        for p, (gradient, version) in self.arrived.items():
            if p.grad is not gradient or gradient._version != version:
                raise RuntimeError("a gradient was changed or removed before its mean was there: "
                                   "clip or clear after finish_gradient_synchronization()")

# %% tags=["fold", "file:sharded_train.py"]
# define: `FSDP` for any network
class Lent(NamedTuple):
    """A whole weight that a layer has been given."""

    storage: weakref.ref  # its memory, as long as somebody holds it
    dtype: torch.dtype
    p: nn.Parameter  # whose weight it is
    version: int  # of p, so that a change is noticed


class Note(NamedTuple):
    """What autograd saves in the place of a lent weight, or of a view of it."""

    p: nn.Parameter
    version: int
    shape: torch.Size
    stride: tuple
    offset: int


class Sending(NamedTuple):
    """A gradient under way."""

    p: nn.Parameter
    total: torch.Tensor  # this rank's shard of the sum, there after `wait()`
    wait: object


class FSDP(Sharded):
    """ZeRO's stage 3: `module` keeps this rank's shard of each parameter, gradient and their state.

    All ranks run every pass, through the same layers in the same order, and after each backward
    pass call finish_gradient_synchronization(): then the gradients are there. In a forward, by its
    name (`self.weight`), a parameter is read whole, a copy: what is written into it is lost. Read
    elsewhere, or by parameters(), it is this rank's shard, with as many dimensions, as are its
    gradient and the optimizer's state. So take an optimizer that is elementwise, such as Adam, clip
    by this class's clip_grad_norm and not by torch's, and use no GradScaler. Buffers, such as
    BatchNorm's statistics, stay each rank's own after the start. Each rank saves and loads its own
    state_dict, the optimizer's, too; for what is whole, all ranks call gather_full_params and
    load_full_params, and gather_optimizer_state and load_optimizer_state.

    With `compute_dtype`, parameters and tensor arguments are cast, buffers aren't.
    """

    collectives = Collectives()

    def __init__(self, module, compute_dtype=None):
        super().__init__()
        self.shard_parameters(module)
        self.module = module
        self.compute_dtype = compute_dtype
        self.lent = {}  # `Lent`, by address
        self.sent = []  # `Sending`, oldest first

    def forward(self, *inputs, **options):
        if self.sent and torch.is_grad_enabled():
            raise RuntimeError(UNFINISHED)
        inputs, options = self.cast_all(inputs, options)
        with torch.autograd.graph.saved_tensors_hooks(self.save_note, self.gather_again):
            result = self.module(*inputs, **options)
        if not torch.is_grad_enabled():
            self.lent.clear()
        return result

    # 1. A parameter is read.
    def read(self, p):
        if not self.in_a_pass():
            return p
        if p.requires_grad:
            return Gather.apply(self.anchor, (p, self))
        return self.lend(p)

    # 2. Gather it, for the forward and again for the backward pass.
    def fetch(self, p):
        whole, wait = self.start(p)
        wait()
        return p.cut.join(whole)

    # 3. Free it: autograd saves a note in its place.
    def lend(self, p):
        whole = self.fetch(p)
        storage = weakref.ref(whole.untyped_storage())
        self.lent[whole.data_ptr()] = Lent(storage, whole.dtype, p, p._version)
        return whole

    def save_note(self, tensor):  # called for each tensor that autograd saves
        lent = self.lent.get(tensor.untyped_storage().data_ptr())
        if lent is None or lent.storage() is None:
            return tensor  # not a lent weight, though it may lie where one was
        if tensor.dtype != lent.dtype or tensor.is_conj():
            return tensor  # not as it was lent
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return Note(lent.p, lent.version, shape, stride, offset)

    def gather_again(self, saved):  # called when the backward pass needs it
        if not isinstance(saved, Note):
            return saved
        if saved.p._version != saved.version:
            raise RuntimeError("a parameter was changed between the forward and the backward pass")
        return self.fetch(saved.p).as_strided(saved.shape, saved.stride, saved.offset)

    # 4. Send its gradient, and don't wait.
    def send(self, p, gradient):
        self.receive(most=1)
        self.count_for_order(p, 1)
        flat = p.cut.pad(gradient.reshape(-1), p.cut.ranks)
        total, wait = self.collectives.reduce_scatter(flat)
        self.sent.append(Sending(p, total, wait))

    def receive(self, most=0):
        while len(self.sent) > most:
            p, total, wait = self.sent.pop(0)
            wait()
            self.arrive(p, total.to(p.dtype).view_as(p) / p.cut.ranks)

    def finish_gradient_synchronization(self):
        """To be called after each backward pass, before the optimizer's step."""
        self.receive()
        self.end_of_backward()

# %% [markdown]
# While a gradient is sent, the backward pass goes on. (At most two are under way, since they take
# memory.) A new line in the loop waits for the rest:
#
# ```python
# F.cross_entropy(model(x), y).backward()
# model.finish_gradient_synchronization()  # NEW
# optimizer.step()
# ```

# %% tags=["fold", "trains"]
# check: `FSDP` equals one process, on 1 to 3 ranks, and with wrong gradients it doesn't
def train_fsdp(kind):
    model = kind(make_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in my_batches():
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    stored = sum(p.numel() for p in model.parameters())
    return model.gather_full_params(), stored


def stage3(net, groups, kind=torch.optim.Adam, cls=FSDP):
    groups = [dict(group, params=list(group["params"])) for group in groups]
    return cls(net), kind(groups, lr=0.01)


class SummedWeights(FSDP):
    def send(self, p, gradient):
        super().send(p, gradient * (1 + p.cut.number))


for rank, (weights, stored) in enumerate(ranks(train_fsdp, FSDP)):
    print(f"rank {rank} stores {stored:,} of 55,050 numbers")
    assert largest_difference(weights, one_process) < 1e-12, "not as one process"
for world in [3, 2, 1]:
    assert largest_difference(ranks(train_untidy, stage3, world=world), untidy) < 1e-12, world
found = [weights for weights, _ in ranks(train_fsdp, SummedWeights)]
assert not largest_difference(found, one_process) < 1e-5
print("stage 3 equals one process to 1e-12")

# %% [markdown]
# PyTorch's own FSDP is `fully_shard`. Each call makes a group that is gathered together: here each
# layer, and finally what is left of the network. It waits within `backward()`, so the loop needs no
# new line:
#
# ```python
# from torch.distributed.fsdp import fully_shard
#
# for layer in net:
#     fully_shard(layer)
# fully_shard(net)
# optimizer = torch.optim.Adam(net.parameters(), lr=0.01)  # after fully_shard: new parameters
# ```

# %% tags=["fold", "trains"]
# check: called in this way PyTorch's FSDP equals one process, too
def train_pytorchs():
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    train(net, torch.optim.Adam(net.parameters(), lr=0.01), my_batches())
    return {name: shard.full_tensor() for name, shard in net.state_dict().items()}


for weights in ranks(train_pytorchs):
    assert largest_difference(weights, one_process) < 1e-12, "not as one process"

# %% [markdown]
# ## What it saves, and what it costs
#
# We count tensors' memory on four ranks, in bytes a parameter. A batch is one image, so what layers
# keep hardly counts. **Predict:** of the 16 bytes, 4 are the weight's and 8 Adam's; how many of
# these 12 does a rank hold between steps, in stage 1 and in stage 3?

# %% tags=["fold", "trains"]
# measure: between steps, gradients, peak; first `Bytes`, which counts, is tried on three tensors
import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    """The bytes of the tensors seen in this block that still exist, and their peak."""

    def __enter__(self):
        self.alive, self.peak = {}, 0
        return super().__enter__()

    @property
    def now(self):
        return sum(self.alive.values())

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        result = operation(*given, **(options or {}))
        for tensor in filter(torch.is_tensor, tree_leaves((given, result))):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result


with Bytes() as memory:
    x = torch.zeros(1000)
    y, z = x[10:], x + 1  # y has no memory of its own
    del x
    assert memory.now == 8000, "y keeps x's storage"
    del y
    assert (memory.now, memory.peak) == (4000, 8000)


def data_parallel(net, groups, kind=torch.optim.Adam):
    def average(*_):
        for p in net.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
    copy_from_rank_0(net)
    optimizer = kind(groups, lr=0.01)
    optimizer.register_step_pre_hook(average)
    return net, optimizer


def wide_net(width=256):
    torch.manual_seed(16)
    layers = [nn.Linear(784, width)]
    for _ in range(4):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))


def settle(memory):  # until gloo's threads have let go of what they sent, for 5 s at most
    readings = [memory.now]
    while len(readings) < 500 and readings[-10:] != 10 * readings[-1:]:
        time.sleep(0.01)
        readings.append(memory.now)


def backward(model, x, y):
    F.cross_entropy(model(x), y).backward()
    finish(model)


def held(make):
    x, y = pixels[:1].clone(), labels[:1].clone()
    with Bytes() as memory:
        net = wide_net()
        size = sum(p.numel() for p in net.parameters())
        model, optimizer = make(net, [{"params": list(net.parameters())}])
        backward(model, x, y)
        optimizer.step()  # makes Adam's state
        optimizer.zero_grad()
        settle(memory)
        rest = memory.peak = memory.now
        backward(model, x, y)
        settle(memory)
        gradients = memory.now - rest
        optimizer.step()
    return np.array([rest, gradients, memory.peak]) / size


assert largest_difference(ranks(train_untidy, data_parallel), untidy) < 1e-12
stages = {"data parallel": data_parallel, "stage 1": stage1, "stage 2": stage2, "stage 3": stage3}
memory = {}
for name, make in stages.items():
    memory[name] = np.max(ranks(held, make, world=4), axis=0)

# %% tags=["fold", "measured"]
# draw: memory of the stages on four ranks
from helpers.plotting import BLUE, ORANGE, figure, show

names = list(memory)
rest, gradients, peak = np.transpose(list(memory.values()))
share = memory["stage 3"][2] / memory["data parallel"][2]
title = f"Stage 3: a quarter of the memory between steps, {share:.0%} at a step's peak"
fig, ax = figure(title, "", "bytes a parameter")
ax.bar(names, rest, color=BLUE, label="between steps: weights, Adam's means")
ax.bar(names, gradients, bottom=rest, color=ORANGE, hatch="//", label="gradients")
ax.hlines(peak, np.arange(4) - 0.2, np.arange(4) + 0.2, color="black", label="peak of a step")
ax.legend()
show(fig, alt="Bars of memory between steps and of gradients, and a mark at the peak, for data "
     "parallelism and the three stages on four ranks.")
for name, (rest, gradients, peak) in memory.items():
    print(f"{name:14} between steps {rest:4.1f}, gradients {gradients:.1f}, peak {peak:.1f}")

# %% tags=["fold"]
# check: what a rank holds between steps, and of gradients, by the table below; two of the peaks
k = 4
by_the_table = {"data parallel": (12, 4), "stage 1": (4 + 8 / k, 4), "stage 2": (4 + 8 / k, 4 / k),
                "stage 3": (12 / k, 4 / k)}
for name, expected in by_the_table.items():
    assert np.allclose(memory[name][:2], expected, atol=0.08), (name, memory[name])
largest = 784 * 256 / sum(p.numel() for p in wide_net().parameters())  # of the weights
peak = 16 + 2 * 4 * largest
assert np.isclose(memory["data parallel"][2], peak, atol=0.08), "Adam's arrays"
print(f"the largest weight has {largest:.2f} of all numbers")
print(f"16 + 2 x 4 x {largest:.2f} is {peak:.1f}")
assert memory["stage 3"][2] < 0.45 * memory["data parallel"][2], "its peak, too"

# %% [markdown]
# Between steps data parallelism holds the weights and Adam's two means, 12 bytes a parameter.
# Stages 1 and 2 divide the means by 4: $4 + 8/4 = 6$. Stage 2 divides the gradients, too. Stage 3
# divides everything: $12/4 = 3$. A step's peak is higher, and it decides whether there is room. In
# data parallelism it is all 16, and two arrays that Adam makes on a CPU, each as large as the
# largest weight (the printed line). In stages 2 and 3 whole gradients are there for a moment, in
# stage 3 whole weights, too. In stage 1 whole gradients stay until they are cleared.
#
# And saving? In stage 3 no rank has all weights, and in no stage all of Adam's state. So shards are
# gathered first, or each rank saves its own (deeper: State dicts that reshard).
#
# What is sent in a step of one forward and one backward pass, where each weight is used once? In
# stages 1 and 2 an all-reduce's two halves, as in data parallelism. Stage 3 reduces each weight's
# gradient once and gathers the weight at most twice, so up to three halves. **Predict:** which
# weights does it gather twice?

# %% tags=["fold"]
# check: what stages 1 and 2 send; what stage 3 gathers, with at most two gradients under way
def count_numbers(kind):
    net = make_net()
    optimizer = kind(net.parameters(), lr=0.01)
    with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduces:
        with patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gathers:
            train(net, optimizer, my_batches()[:1])
    reduced = sum(len(call.args[1]) for call in reduces.call_args_list)
    gathered = sum(len(call.args[0]) for call in gathers.call_args_list)
    return reduced, gathered


for name, kind in [("stage 1", FirstZeRO), ("stage 2", SecondZeRO)]:
    reduced, gathered = ranks(count_numbers, kind)[0]
    print(f"{name}: {reduced:,} numbers reduce-scattered, {gathered:,} all-gathered")
    assert (reduced, gathered) == (55_050, 55_050)


class Noting(FSDP):
    def __init__(self, module):
        super().__init__(module)
        self.names = [name for name, p in module.named_parameters()]
        self.gathered = []
        self.at_gather = []  # how many gradients are under way then
        self.most = 0

    def fetch(self, p):
        self.gathered.append(self.names[p.cut.number])
        self.at_gather.append(len(self.sent))
        return super().fetch(p)

    def send(self, p, gradient):
        super().send(p, gradient)
        self.most = max(self.most, len(self.sent))


class WaitsAtOnce(Noting):
    def send(self, p, gradient):
        super().send(p, gradient)
        self.receive(most=0)


class NeverWaits(Noting):
    def receive(self, most=0):
        super().receive(most if most == 0 else 1000)


def watch(kind):
    model = kind(make_net())
    loss = F.cross_entropy(model(batches[0][0]), batches[0][1])
    forward = list(model.gathered)
    model.gathered.clear()
    loss.backward()
    model.finish_gradient_synchronization()
    return forward, model.gathered, model.at_gather[-1], model.most


expected = {"waits at once": (WaitsAtOnce, 0, 1), "two under way": (Noting, 2, 2),
            "waits at the end": (NeverWaits, 2, 6)}
for name, (kind, at_gather, most) in expected.items():
    for result in ranks(watch, kind):
        assert result[2:] == (at_gather, most), (name, result[2:])


forward, again, _, _ = ranks(watch, Noting)[0]
print("gathered in the forward pass:", ", ".join(forward))
print("gathered again in the backward pass:", ", ".join(again))
assert forward == list(one_process)
assert again == ["4.weight", "2.weight"]


def gather_a_layer_used_again():
    layer = nn.Linear(4, 4)
    model = Noting(nn.Sequential(layer, layer, layer))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    model.finish_gradient_synchronization()
    return model.gathered.count("0.weight")


assert ranks(gather_a_layer_used_again) == [6, 6]

# %% [markdown]
# A bias isn't needed again, nor is the first weight, since images need no gradient. So in such a
# step stage 3 sends **up to one and a half times as much**; with several passes, or where a layer
# is used again, it sends more. What that costs in time is in deeper: When sharding pays.
#
# ## Two traps
#
# ### 1. The norm of a shard
#
# *Clipping* scales gradients down where their norm, the root of the sum of squares, is too large.
# With our FSDP, PyTorch's `clip_grad_norm_` finds the norm of one rank's shards, so each rank would
# scale by a factor of its own. Use `model.clip_grad_norm`. (With `fully_shard` PyTorch's is right.)

# %% tags=["fold", "trains", "measured"]
# check: the norm of each rank's shards, and of all by FSDP's method; with `fully_shard` it is right
def norms():
    model = FSDP(make_net())
    backward(model, my_part(batches[0][0]), my_part(batches[0][1]))
    of_shards = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return of_shards, model.clip_grad_norm(1e9).item()


net = make_net()
backward(net, *batches[0])
right = nn.utils.clip_grad_norm_(net.parameters(), 1e9).item()
both = ranks(norms)
for rank, (of_shards, ours) in enumerate(both):
    print(f"rank {rank}: its shards' norm is {of_shards / right:.2f} of one process's, "
          f"model.clip_grad_norm's is {ours / right:.2f} of it")


def norm_with_fully_shard():
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    backward(net, my_part(batches[0][0]), my_part(batches[0][1]))
    return nn.utils.clip_grad_norm_(net.parameters(), 1e9).full_tensor().item()


assert np.allclose(ranks(norm_with_fully_shard), right, rtol=1e-12)
assert np.isclose(np.hypot(both[0][0], both[1][0]), right, rtol=1e-12)
assert both[0][0] < 0.99 * right and np.isclose(both[1][1], right, rtol=1e-12)

# %% [markdown]
# ### 2. Different layers
#
# Rank 0 uses layer `a`, whose weights are all 1, rank 1 layer `b`, all 10. Four ones come in, so
# right are 4 on rank 0 and 40 on rank 1. **Predict** what comes out.

# %% tags=["fold"]
# define: `Either`: rank 0 uses its layer `a`, all ones, rank 1 its layer `b`, all tens
class Either(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        nn.init.constant_(self.a.weight, 1)
        nn.init.constant_(self.b.weight, 10)

    def forward(self, x):
        if dist.get_rank() == 0:
            return self.a(x)
        return self.b(x)

# %%
def evaluate_either():
    model = FSDP(Either())
    with torch.no_grad():
        return model(torch.ones(1, 4)).tolist()


print(ranks(evaluate_either))

# %% [markdown]
# A message doesn't say whose weight it is. So the ranks' all-gathers met, and both computed with
# half of `a` and half of `b`. After a backward pass our FSDP notices it:

# %% tags=["fold", "trains"]
# check: after a backward pass it raises on both ranks, in an evaluation it doesn't
def use_either():
    model = FSDP(Either())
    model(torch.ones(1, 4)).sum().backward()
    try:
        model.finish_gradient_synchronization()
    except RuntimeError as error:
        return str(error)


print(ranks(use_either)[0])
for error in ranks(use_either):
    assert "in another order" in error
assert ranks(evaluate_either) == [[[4, 4, 40, 40]]] * 2, "half of a and half of b, no error"

# %% [markdown]
# ## The program
#
# `torchrun --standalone --nproc-per-node=2 sharded_train.py` trains a small network on ten patterns
# with noise. It ends with:

# %% tags=["fold", "file:sharded_train.py", "trains"]
# define: what sharded_train.py does when it is run: it trains, with the stage that you ask for
def make_images(n, seed):
    """Ten patterns of 28 x 28, with noise: something to learn where there is no data set."""
    patterns = torch.randn(10, 784, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (n,), generator=source)
    return patterns[labels] + 8 * torch.randn(n, 784, generator=source), labels


def train_stage(stage, steps, batch_size, lr):
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.manual_seed(16)
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                        nn.Linear(256, 10)).to(device)
    total = sum(p.numel() for p in net.parameters())
    if stage == 3:
        model = FSDP(net)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    else:
        model = net
        copy_from_rank_0(net)
        kind = ShardedOptimizer if stage == 1 else ShardedGradients
        optimizer = kind(net.parameters(), torch.optim.Adam, lr=lr)
    for step in range(steps):
        x, y = make_images(batch_size, seed=1 + step * ranks + rank)  # this rank's share
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        if stage == 3:
            model.finish_gradient_synchronization()
        (model if stage == 3 else optimizer).clip_grad_norm(1.0)
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    x, y = make_images(1000, seed=0)
    with torch.no_grad():
        hits = (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    kept = sum(p.numel() for p in model.parameters())
    print(f"rank {rank}: {hits / 10:.1f} % right; weights kept: {kept:,} of {total:,}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__" and "__file__" in globals():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it by torchrun --standalone --nproc-per-node=2 sharded_train.py")
    train_stage(**vars(options))

# %% tags=["fold", "measured"]
# measure: what the program prints last, stage 3 on two ranks
from helpers.cluster import torchrun

printed = torchrun("sharded_train.py", nproc=2, arguments=["--stage", "3"], log=None)[0]
print(printed.splitlines()[-1])

# %% [markdown]
# ## Summary
#
# On $k$ ranks:
#
# | | weights, gradients and Adam's state: bytes a parameter |
# | --- | --- |
# | data parallel | $16$ |
# | stage 1 | $8 + 8/k$ |
# | stage 2 | $4 + 12/k$ |
# | stage 3 | $16/k$ |
#
# - In a step with one forward and one backward pass, each weight used once, stage 3 sends at most
#   three halves of an all-reduce, the others two.
# - Stage 3 gathers a weight when its layer computes, and frees it.
# - With equal shares and an elementwise optimizer, such as Adam, all stages compute what one
#   process does. In stage 3 all ranks must use the same layers in the same order.
# - Take the first stage that fits. To save, gather the shards, or save each rank's.
#
# Next: [the map](map.md).
#
# **Further reading.** Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data
# Parallel* (2023), arXiv:2304.11277.

# %% [markdown]
# ## Exercises
#
# 1. **Clipping.** Write `clip(model, largest)` for FSDP, with one message of one number. Compare
#    the norm before and after with one process.
# 2. **Prefetching.** When stage 3 reads a weight, start to gather the next one, by the order of the
#    step before. (Open the two cells of `Sharded` and `FSDP` first: `start` begins to gather,
#    `fetch` waits.)
# 3. **Which stage?** 7.5 billion parameters are trained with Adam in *mixed precision*: 2 bytes for
#    a weight and for a gradient, 12 for the optimizer's state. How many GPUs of 40 GB does each
#    stage need, with 10 GB for what layers pass on?

# %% [markdown]
# ### Answer 1
#
# Each rank adds up the squares of its shards' entries. One all-reduce adds up these sums.

# %% tags=["solution", "trains"]
def clip_by_hand(model, largest):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    square = sum(grad.square().sum() for grad in grads)
    dist.all_reduce(square)
    norm = square.sqrt()
    for grad in grads:
        grad *= (largest / norm).clamp(max=1)
    return norm.item()


def clip_twice(largest):
    model = FSDP(make_net())
    backward(model, my_part(batches[0][0]), my_part(batches[0][1]))
    return clip_by_hand(model, largest), clip_by_hand(model, largest)


for factor, left in [(0.5, 0.5), (2, 1)]:  # half the norm; a norm that is small enough stays
    for before, after in ranks(clip_twice, factor * right):
        assert np.isclose(before, right, rtol=1e-12)
        assert np.isclose(after, left * right, rtol=1e-12)

# %% [markdown]
# ### Answer 2
#
# The order is noted in the first step. In the next ones `ahead` is the weight that is being
# gathered. An evaluation, without gradients, isn't in the order: it gathers as before. A step that
# reads in another order raises an error.

# %% tags=["solution", "trains"]
class Prefetching(FSDP):
    def __init__(self, module):
        super().__init__(module)
        self.order_of_reads = []
        self.seen = []
        self.ahead = None
        self.prefetched = 0
        self.evaluating = False

    def forward(self, x):
        self.evaluating = not torch.is_grad_enabled()
        y = super().forward(x)
        self.evaluating = False
        return y

    def fetch(self, p):
        if self.evaluating:
            return super().fetch(p)
        place = len(self.seen)
        self.seen.append(p)
        if self.order_of_reads:
            assert self.order_of_reads[place] is p, "the order has changed"
        if self.ahead is None:
            gathered, wait = self.start(p)
        else:
            gathered, wait = self.ahead
            self.prefetched += 1
        self.ahead = None
        if place + 1 < len(self.order_of_reads):
            self.ahead = self.start(self.order_of_reads[place + 1])
        wait()
        return p.cut.join(gathered)

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        assert self.ahead is None, "the order has changed"
        self.order_of_reads = self.seen
        self.seen = []


def train_and_evaluate():
    model = Prefetching(make_net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prefetched = []  # in each step
    for x, y in my_batches():
        with torch.no_grad():
            model(x)
        before = model.prefetched
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        prefetched.append(model.prefetched - before)
    return model.gather_full_params(), prefetched


for weights, prefetched in ranks(train_and_evaluate):
    print("weights prefetched in each step:", prefetched)
    assert largest_difference(weights, one_process) < 1e-12
    assert prefetched == [0] + 9 * [7], "all 8 reads but a step's first"

# %% [markdown]
# ### Answer 3
#
# The optimizer keeps a copy of the weights in 4 bytes beside Adam's means. Stages 1 and 2 keep
# whole weights of 2 bytes, stage 1 whole gradients too: 30 GB, so stage 1 doesn't fit on any number
# of GPUs; stage 2 needs 7 and stage 3 needs 4. On 64 GPUs each holds 31.4, 16.6 or 1.88 GB (table 1
# of ZeRO's paper).

# %% tags=["solution"]
def gigabytes(k, billions=7.5):
    return [billions * each for each in (4 + 12 / k, 2 + 14 / k, 16 / k)]


table = {4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
         256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)}
for k, row in table.items():
    assert np.allclose(gigabytes(k), row, rtol=0.005, atol=0.005), "as in the paper's table"


def fewest(stage):
    for k in range(1, 10_000):
        if gigabytes(k)[stage - 1] <= 30:
            return k


assert [fewest(1), fewest(2), fewest(3)] == [None, 7, 4]
