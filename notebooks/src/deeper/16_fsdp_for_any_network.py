# %% [markdown]
# # Deeper · FSDP for any network
#
# Chapter 16 wrote a linear layer's two passes by hand, so that autograd saves only a shard. How
# does the `FSDP` of [sharded_train.py](../sharded_train.py) do that for a layer whose formulas it
# doesn't know?
#
# > **What you'll do:** try each piece alone on one linear layer, make the step to any module, put
# > the pieces together and train.
# >
# > **What you'll learn:** how to notice that a layer reads its weight; how to change what autograd
# > saves; how to do both for a module that one doesn't know.
# >
# > **What you need:** chapter 16, no GPU, and PyTorch 2.13 or newer. Reading takes {reading time},
# > running about 20 seconds.

# %% tags=["torch"]
import sys
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers.compare import largest_difference

# Where chapter 16's sharded_train.py is, and chapter 14's ranks.py.
sys.path.insert(0, "..")
from ranks import ranks
from sharded_train import FSDP

# %% tags=["fold"]
# define: `my_part`, `reduce_scatter`, `gather_whole` and `mean_shard`, as in chapter 16
def my_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def reduce_scatter(whole):
    shard = whole.new_empty(len(whole) // dist.get_world_size())
    dist.reduce_scatter_single(shard, whole)
    return shard


def gather_whole(shard):
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_single(whole, shard)
    return whole


def mean_shard(gradient):
    total = reduce_scatter(gradient.reshape(-1))
    return total / dist.get_world_size()

# %% [markdown]
# ## Notice that a weight is read
#
# Nobody should have to rewrite a network for us. So its layers stay as they are, and we find out
# when one reads `self.weight`. A module keeps its parameters in a dictionary, `_parameters`. Python
# looks there last, by the module's `__getattr__`. A *property* of the class is found first, and
# runs a function of ours. The layer exists already, but Python lets us change an object's class;
# what is in the object stays:

# %%
class Watched(nn.Linear):
    @property
    def weight(self):
        print("the weight is read")
        return self._parameters["weight"]


layer = nn.Linear(4, 2)
layer.__class__ = Watched
output = layer(torch.ones(1, 4))

# %% tags=["fold"]
# check: each call reads the weight once; the output is as before the class was changed
import io
from contextlib import redirect_stdout


def what_is_printed(layer):
    text = io.StringIO()
    with redirect_stdout(text):
        output = layer(torch.ones(1, 4))
    return text.getvalue(), output


layer.__class__ = Watched
watched = what_is_printed(layer)
layer.__class__ = nn.Linear
plain = what_is_printed(layer)
assert watched[0] == "the weight is read\n" and plain[0] == ""
assert torch.equal(watched[1], plain[1]) and torch.equal(plain[1], output)

# %% [markdown]
# So `_parameters` can keep the shard, while the layer gets the whole weight.
#
# ## Gather forward, reduce backward
#
# The property will return a weight that an autograd function has made from the shard. This one only
# gathers. PyTorch knows the layer's formulas and brings the whole weight's gradient to `backward`,
# which makes the shard's gradient from it.

# %%
class GatherAndWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        return gather_whole(shard).view(shape)

    @staticmethod
    def backward(ctx, gradient):
        # One for the shard; the shape has none.
        return mean_shard(gradient), None

# %% [markdown]
# On two ranks the weight is `[[0, 1, 2, 3], [4, 5, 6, 7]]`, a row on each, and the input is ones on
# rank 0, twos on rank 1. `F.linear` computes, which knows nothing of shards:

# %%
def ordinary_layer():
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    weight = GatherAndWait.apply(shard, (2, 4))
    x = torch.full((1, 4), 1.0 + dist.get_rank())
    y = F.linear(x, weight)
    y.sum().backward()
    return y.tolist(), shard.grad.tolist()


for rank, (y, gradient) in enumerate(ranks(ordinary_layer)):
    print(f"rank {rank}: output {y}, gradient of its shard {gradient}")

# %% tags=["fold"]
# check: outputs of the whole weight, and each shard's gradient is the mean of 1 and 2
assert ranks(ordinary_layer) == [([[6, 22]], [1.5] * 4), ([[12, 44]], [1.5] * 4)]

# %% [markdown]
# Both outputs were computed with the whole weight, and each shard gets the mean of 1 and 2.
#
# ## What does autograd save?
#
# Dropping our variable frees nothing: autograd has saved the whole weight. We can give autograd two
# functions, which PyTorch calls *pack* and *unpack* (ours will be `save_note` and `gather_again`).
# The first gets each tensor that is saved, and returns what is kept in its place. The second gets
# that back when the backward pass needs the tensor. What does a linear layer save?

# %%
def print_shape(tensor):
    print("saved:", tuple(tensor.shape))
    return tensor


def as_it_is(saved):
    return saved


# Only the gradient of x needs the weight.
x = torch.ones(3, 4, requires_grad=True)
layer = nn.Linear(4, 2)
with saved_tensors_hooks(print_shape, as_it_is):
    y = layer(x)

# %% tags=["fold"]
# check: the input and the transposed weight; only the input, if that needs no gradient
def saved_shapes(x):
    shapes = []

    def note_shape(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with saved_tensors_hooks(note_shape, as_it_is):
        layer(x)
    return shapes


assert saved_shapes(x) == [(3, 4), (4, 2)]
assert saved_shapes(x.detach()) == [(3, 4)]

# %% [markdown]
# The input, and the weight, transposed.
#
# ## Recognize the weight
#
# Our pack function must recognize a gathered weight, transposed or not. A tensor and its
# transpose are two objects that share one memory, the *storage*. The storage is a Python object,
# too, the same one at each call, so it can get an attribute, a *mark*:

# %%
weight = torch.arange(8.0).view(2, 4)
transposed = weight.t()
weight.untyped_storage().mark = "gathered"
print("one object:", transposed is weight)
print("the mark, found from the transpose:", transposed.untyped_storage().mark)

# %% tags=["fold"]
# check: the mark stays though no variable has the storage; a copy has none
import gc

gc.collect()
assert transposed is not weight
assert transposed.untyped_storage().mark == "gathered"
assert not hasattr(transposed.clone().untyped_storage(), "mark")

# %% [markdown]
# A copy has a storage of its own, without the mark. Where a layer saves one, it stays whole.
#
# What must we remember to make the transpose again from a gathered weight? Its shape, and its
# *stride*: how many numbers further in memory the next row begins, and the next column.
# `as_strided` makes a tensor from these and the memory. For a slice, such as `weight[1:]`, we also
# need the *offset*, the place in memory where it begins.

# %%
print("the weight's shape and stride:", tuple(weight.shape), weight.stride())
print("the transpose's:", tuple(transposed.shape), transposed.stride())
again = weight.as_strided(size=(4, 2), stride=(1, 4))
print("made from the weight's memory:", again.tolist())
print("a slice's offset:", weight[1:].storage_offset())

# %% tags=["fold"]
# check: `as_strided` gives the transpose, and with the offset the slice
assert torch.equal(again, transposed)
assert torch.equal(weight.as_strided((1, 4), (4, 1), 4), weight[1:])
assert (weight.stride(), transposed.stride()) == ((4, 1), (1, 4))

# %% [markdown]
# ## Save a note
#
# Now the mark is the shard itself. Where a saved tensor's storage has one, autograd keeps a *note*:
# the shard, the tensor's shape, its stride and its offset.

# %%
def gather_and_mark(shard, shape):
    whole = GatherAndWait.apply(shard, shape)
    storage = whole.untyped_storage()
    storage.shard = shard  # the mark
    return whole


def save_note(tensor):
    storage = tensor.untyped_storage()
    if hasattr(storage, "shard"):
        return {"shard": storage.shard, "shape": tensor.shape, "stride": tensor.stride(),
                "offset": tensor.storage_offset()}
    else:
        return tensor

# %% [markdown]
# When the backward pass needs the weight, unpack gathers again. It needs only the shard's numbers
# (`detach`): the shard's gradient comes through the forward pass's `GatherAndWait`.

# %%
def gather_again(saved):
    if isinstance(saved, dict):  # a note
        shard = saved["shard"].detach()
        whole = gather_whole(shard)
        return whole.as_strided(saved["shape"], saved["stride"], saved["offset"])
    else:
        return saved

# %% [markdown]
# ## Is the weight freed?
#
# `is_held` calls a layer and deletes its variable of the gathered weight. A *weak reference*, which
# keeps nothing alive, tells whether the weight's storage still exists.

# %% tags=["fold"]
# define: `is_still_there`: gloo's threads let go a moment later, so it looks again for up to 5 s
import time


def is_still_there(memory):
    end = time.perf_counter() + 5
    while memory() is not None and time.perf_counter() < end:
        time.sleep(0.01)
    return memory() is not None

# %%
def is_held(pack, unpack):
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.ones(1, 4, requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        weight = gather_and_mark(shard, (2, 4))
        y = F.linear(x, weight)
    memory = weakref.ref(weight.untyped_storage())
    del weight
    held = is_still_there(memory)
    # Y has lived till here, and what autograd saved for it.
    y.sum().backward()
    return held


held_without_notes = ranks(is_held, as_it_is, as_it_is)
held_with_notes = ranks(is_held, save_note, gather_again)
print("held without notes, on each rank:", held_without_notes)
print("held with notes:", held_with_notes)

# %% tags=["fold"]
# check: held only without notes; with them all gradients are the same, a slice's is right, too
def both_gradients(pack, unpack):
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.full((1, 4), 1.0 + dist.get_rank(), requires_grad=True)
    with saved_tensors_hooks(pack, unpack):
        y = F.linear(x, gather_and_mark(shard, (2, 4)))
    y.sum().backward()
    return shard.grad.tolist(), x.grad.tolist()


columns = torch.arange(8.0).view(2, 4).sum(0).tolist()  # what x's gradient adds up
assert held_without_notes == [True, True]
assert held_with_notes == [False, False]
for pack, unpack in [(as_it_is, as_it_is), (save_note, gather_again)]:
    assert ranks(both_gradients, pack, unpack) == [([1.5] * 4, [columns])] * 2


def gradient_through_a_slice():
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.ones(1, 4, requires_grad=True)
    with saved_tensors_hooks(save_note, gather_again):
        y = F.linear(x, gather_and_mark(shard, (2, 4))[1:])
    y.sum().backward()
    return x.grad.tolist()


assert ranks(gradient_through_a_slice) == [[[4, 5, 6, 7]]] * 2, "the second row"

# %% [markdown]
# **With notes autograd doesn't hold the whole weight, so Python frees it.**
#
# ## A module that we don't know
#
# So far we knew the layer: it reads a `weight` of shape 2 x 4. A module that we don't know lists
# its own parameters. For each name we make a property, which remembers the whole shape, and cut the
# parameter to a shard. `type(name, bases, attributes)` makes a class that has these properties:

# %%
def gather_when_read(name, shape):
    def read(module):
        shard = module._parameters[name]
        return gather_and_mark(shard, shape)
    return property(read)


def shard_module(module):
    properties = {}
    # Not those of modules in it.
    for name, p in module.named_parameters(recurse=False):
        properties[name] = gather_when_read(name, p.shape)
        flat = p.data.reshape(-1)
        # A copy, so that the whole is freed.
        p.data = my_part(flat).clone()
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), properties)

# %% [markdown]
# A convolution, on two ranks:

# %%
def one_convolution():
    torch.manual_seed(16)
    layer = nn.Conv1d(1, 4, kernel_size=3)  # 12 weights, 4 biases
    x = torch.arange(10.0).view(1, 1, 10)
    whole_output = layer(x)
    shard_module(layer)
    kept = [len(p) for p in layer.parameters()]
    return kept, torch.allclose(layer(x), whole_output)


for rank, (kept, same) in enumerate(ranks(one_convolution)):
    print(f"rank {rank} keeps weights and biases {kept}; the output is the same: {same}")

# %% tags=["fold"]
# check: each rank keeps half, the layer computes with the whole
assert ranks(one_convolution) == [([6, 2], True)] * 2

# %% [markdown]
# The layer reads the whole weight; `parameters()` and `state_dict()` look into `_parameters`, so an
# optimizer gets the shards. (Here sizes must be divisible, and no two modules share a parameter.)
#
# ## All together

# %%
class FirstFSDP(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        for module in net.modules():
            shard_module(module)

    def forward(self, x):
        with saved_tensors_hooks(save_note, gather_again):
            return self.net(x)

# %% [markdown]
# Autograd remembers unpack with each note, so the backward pass needs no `with`. We train a small
# network on two ranks, and compare with one process.

# %% tags=["fold", "trains"]
# define: five batches, `tanh_net`, and `train_parts`, which trains by a rank's parts of batches
generator = torch.Generator().manual_seed(16)
batches = []
for step in range(5):
    x = torch.randn(12, 8, generator=generator).double()
    y = torch.randint(4, (12,), generator=generator)
    batches.append((x, y))


def tanh_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def train_parts(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches:
        if dist.is_initialized():  # not in one process
            x, y = my_part(x), my_part(y)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if isinstance(model, FSDP):
            model.finish_gradient_synchronization()
        optimizer.step()

# %% tags=["trains"]
def train_first(make=tanh_net):
    model = FirstFSDP(make())
    train_parts(model)
    return model.net.state_dict()


net = tanh_net()
train_parts(net)
on_rank_0, on_rank_1 = ranks(train_first)
for name, weight in net.state_dict().items():
    shards = [on_rank_0[name], on_rank_1[name]]
    joined = torch.cat(shards).view(weight.shape)
    same = largest_difference(joined, weight) < 1e-12
    print(f"{name}: {len(shards[0])} of {weight.numel()} on rank 0, all as in one process:", same)

# %% tags=["fold", "trains"]
# check: as one process, a convolution, too; not without the mean over ranks; shards are copies
from unittest.mock import patch


class NotReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        return gather_whole(shard).view(shape)

    @staticmethod
    def backward(ctx, gradient):
        return my_part(gradient.reshape(-1)), None


def conv_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, kernel_size=3), nn.Tanh(),
                         nn.LayerNorm(6), nn.Flatten(), nn.Linear(24, 4)).double()


def train_first_by(function, make):
    with patch.dict(globals(), GatherAndWait=function):
        return train_first(make)


def differences(function, make):
    net = make()
    train_parts(net)
    on_both = ranks(train_first_by, function, make)
    found = []
    for name, weight in net.state_dict().items():
        joined = torch.cat([shards[name] for shards in on_both]).view(weight.shape)
        found.append(largest_difference(joined, weight))
    return found


def bytes_kept():
    parameters = list(FirstFSDP(tanh_net()).parameters())
    return [p.untyped_storage().nbytes() for p in parameters], [p.nbytes for p in parameters]


assert max(differences(GatherAndWait, tanh_net)) < 1e-12
assert max(differences(GatherAndWait, conv_net)) < 1e-12
assert not max(differences(NotReduced, tanh_net)) < 1e-3
for in_memory, of_shards in ranks(bytes_kept):
    assert in_memory == of_shards, "the whole is still in memory"

# %% [markdown]
# ## The program's `FSDP`
#
# The pieces are the same:
#
# | here | in `sharded_train.py` |
# | --- | --- |
# | `shard_module` | `read_through`, and `Cut`, which pads shards with zeros |
# | `GatherAndWait` | `Gather`, which sends a gradient and doesn't wait |
# | a mark on the storage | `lent`, a dictionary by the storage's address |
# | a note, a dictionary | `Note`, which has the parameter's version, too |
#
# (PyTorch's `fully_shard` gathers in hooks before a module's forward and backward pass, its
# documentation says.) Our `FSDP` refuses an LSTM, which keeps a list of its weights. With padding
# sizes needn't be divisible. `scale` is one number: all ranks but one keep a zero.

# %%
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(16)
        # 8 numbers in, 3 rows of 6 out.
        self.conv = nn.Conv1d(1, 3, kernel_size=3)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Linear(18, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x.unsqueeze(1)))
        x = self.norm(x) * self.scale
        return self.last(x.flatten(1))

# %% [markdown]
# On two and on three ranks, where some sizes aren't divisible:

# %% tags=["trains"]
def train_mixed():
    model = FSDP(Mixed().double())
    train_parts(model)
    return model.gather_full_params()


mixed = Mixed().double()
train_parts(mixed)
for k in [2, 3]:
    on_rank_0 = ranks(train_mixed, world=k)[0]
    difference = largest_difference(on_rank_0, mixed.state_dict())
    print(f"{k} ranks, as one process: {difference < 1e-12}")

# %% tags=["fold", "trains"]
# check: on 1, 2 and 3 ranks every rank's weights are as one process's; an LSTM is refused
for k in [1, 2, 3]:
    assert largest_difference(ranks(train_mixed, world=k), mixed.state_dict()) < 1e-12, k


def wrap_an_lstm():
    try:
        FSDP(nn.LSTM(4, 4))
    except ValueError as error:
        return str(error)


for said in ranks(wrap_an_lstm):
    assert "LSTM" in said

# %% [markdown]
# ## A weight that has changed
#
# A note has no numbers. **Predict:** what happens if weights are multiplied by 10 between the
# forward and the backward pass?

# %%
def change_between_passes(wrap, factor):
    model = wrap(tanh_net())
    x = torch.ones(1, 8, dtype=torch.float64, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error).split(":")[0]
    return f"no error, the gradient of x begins with {x.grad[0, 0]:.4f}"


def ordinary_network(net):
    return net


print("times 10, ordinary network:", change_between_passes(ordinary_network, 10))
print("times 10, FSDP:            ", ranks(change_between_passes, FSDP, 10)[0])
print("times 10, FirstFSDP:       ", ranks(change_between_passes, FirstFSDP, 10)[0])
print("times 1, FirstFSDP:        ", ranks(change_between_passes, FirstFSDP, 1)[0])

# %% tags=["fold"]
# check: only `FirstFSDP` is wrong without an error; through `.data` `FSDP` is wrong, too
def gradient_of_x(factor):
    model = FirstFSDP(tanh_net())
    x = batches[0][0].clone().requires_grad_()
    y = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    y.sum().backward()
    return x.grad


def change_through_data():
    model = FSDP(tanh_net())
    x = batches[0][0].clone().requires_grad_()
    y = model(x)
    for p in model.parameters():
        p.data.mul_(10)
    y.sum().backward()
    return x.grad


assert "modified by an inplace operation" in change_between_passes(ordinary_network, 10)
for said in ranks(change_between_passes, FirstFSDP, 10):
    assert "no error" in said
for said in ranks(change_between_passes, FSDP, 10):
    assert "changed between the forward and the backward pass" in said
right = ranks(gradient_of_x, 1)[0]
for found in [*ranks(gradient_of_x, 10), *ranks(change_through_data)]:
    assert torch.allclose(found, 100 * right), "wrong, without an error"

# %% [markdown]
# `FirstFSDP` gathers the new numbers, and its gradient is 100 times too large. PyTorch counts the
# changes made to a tensor in place, its *version*, and compares it in the backward pass. So does
# `FSDP`: a `Note` has the version from the forward pass. A change through `.data` isn't counted, so
# `FSDP` doesn't notice it. **Don't change weights between the passes.**
#
# ## Summary
#
# - A property in a module's class notices when the module reads a weight. Such a class can be made
#   from the names of its parameters, and given to an object that exists.
# - An autograd function gathers forward and reduces backward, so a layer that reads its weights by
#   name computes with the whole ones, and the shard gets its mean gradient. (An LSTM keeps a list
#   of its weights: `FSDP` refuses it.)
# - Saved-tensor hooks let autograd keep a note in place of a gathered weight. A mark on its storage
#   is found from the transpose, too.
# - `FSDP`'s note has the weight's version, so that a change in place between the passes is noticed
#   (not one through `.data`, which isn't counted).
