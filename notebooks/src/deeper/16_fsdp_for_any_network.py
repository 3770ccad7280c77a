# %% [markdown]
# # Deeper · FSDP for any network
#
# Chapter 16 wrote a linear layer's two passes by hand, so that autograd saves only a shard. How
# does `FSDP` do that for a layer whose formulas it doesn't know?
#
# ## What you'll do
#
# Try each piece alone on one linear layer, put the pieces together and train. Then shard layers for
# which chapter 16 has no formulas.
#
# ## What you'll learn
#
# - how to notice that a layer reads its weight;
# - how to change what autograd saves;
# - what else the program's `FSDP` needs, and why.
#
# ## What you need
#
# Chapter 16, no GPU, and PyTorch 2.13 or newer. Reading takes {reading time}, running about 20
# seconds.

# %% tags=["torch"]
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 16's sharded_train.py is, and chapter 14's ranks.py
from ranks import ranks
from sharded_train import FSDP, Collectives

# %% tags=["fold"]
# define: `my_part`, `gather_whole` and `mean_shard`, as in chapter 16
def my_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def gather_whole(shard):
    whole, wait = Collectives().all_gather(shard)
    wait()
    return whole


def mean_shard(gradient):
    total, wait = Collectives().reduce_scatter(gradient.reshape(-1))
    wait()
    return total / dist.get_world_size()

# %% [markdown]
# ## Notice that a weight is read
#
# Nobody should have to rewrite a network for us. So its layers stay as they are, and we find out
# when one reads `self.weight`. A module keeps its parameters in a dictionary, `_parameters`. There
# its `__getattr__` looks, which Python asks only when it finds no `weight` elsewhere. A *property*
# of the class is found before, and runs a function of ours. The layer exists already, but an object
# can get another class, and keeps what is in it:

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
# which makes the shard's gradient from it. Nothing is kept in `ctx`.

# %%
class GatherAndWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        return gather_whole(shard).view(shape)

    @staticmethod
    def backward(ctx, gradient):
        return mean_shard(gradient), None  # one for the shard; the shape has none

# %% [markdown]
# As in chapter 16 the weight is `[[0, 1, 2, 3], [4, 5, 6, 7]]`, a row on each rank, and the input
# is ones on rank 0, twos on rank 1. Now `F.linear` computes, which knows nothing of shards:

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
# The same outputs and gradients as from the function that we wrote for linear layers.
#
# ## What does autograd save?
#
# Dropping our variable frees nothing: autograd has saved the whole weight. We can give autograd two
# functions. The first gets each tensor that is saved, and returns what is kept in its place. The
# second gets that back when the backward pass needs the tensor. What does a linear layer save?

# %%
def print_shape(tensor):
    print("saved:", tuple(tensor.shape))
    return tensor


def as_it_is(saved):
    return saved


x = torch.ones(3, 4, requires_grad=True)  # only the gradient of x needs the weight
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
# Our first function must recognize a gathered weight, also a transposed one. A tensor and its
# transpose are two objects that share one memory, the *storage*. The storage is a Python object,
# too, so it can get an attribute, a *mark*:

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
# What must we remember to make the transpose again from a gathered weight? Its shape, and its
# *stride*: how many numbers further in memory the next row begins, and the next column.
# `as_strided` looks at the memory only, whatever shape the weight has there. For a slice, such as
# `weight[1:]`, we also need the *offset*, the place in memory where it begins.

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
# When the backward pass needs the weight, the second function gathers again. It needs only the
# shard's numbers, so it takes them without autograd's record (`detach`): the shard's gradient comes
# through `GatherAndWait` of the forward pass.

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
# `is_held` calls a layer and deletes its own variable of the gathered weight. A *weak reference*,
# which keeps nothing alive, tells whether the weight's storage still exists. Gloo's threads let go
# of what they sent a moment later. So `is_held` looks until the storage is gone, for 10 s at most;
# where autograd holds it, half a second is enough to see that it stays.

# %% tags=["fold"]
# define: `is_held`, which looks until the weight's storage is gone, or `seconds` are over
import time
import weakref


def is_held(save, load, seconds):
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.ones(1, 4, requires_grad=True)
    with saved_tensors_hooks(save, load):
        weight = gather_and_mark(shard, (2, 4))
        y = F.linear(x, weight)
    memory = weakref.ref(weight.untyped_storage())
    del weight
    end = time.perf_counter() + seconds
    while memory() is not None and time.perf_counter() < end:
        time.sleep(0.01)  # gloo's threads let go of what they sent a moment later
    held = memory() is not None
    y.sum().backward()
    return held

# %%
def held_without_notes():
    return is_held(save=as_it_is, load=as_it_is, seconds=0.5)


def held_with_notes():
    return is_held(save=save_note, load=gather_again, seconds=10)


print("held without notes:", ranks(held_without_notes))
print("held with notes:", ranks(held_with_notes))

# %% tags=["fold"]
# check: held without notes, not with them; with notes gradients are the same, a slice's is right
def both_gradients(save, load):
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.full((1, 4), 1.0 + dist.get_rank(), requires_grad=True)
    with saved_tensors_hooks(save, load):
        y = F.linear(x, gather_and_mark(shard, (2, 4)))
    y.sum().backward()
    return shard.grad.tolist(), x.grad.tolist()


columns = torch.arange(8.0).view(2, 4).sum(0).tolist()  # what x's gradient adds up
assert ranks(held_without_notes) == [True, True]
assert ranks(held_with_notes) == [False, False]
for save, load in [(as_it_is, as_it_is), (save_note, gather_again)]:
    assert ranks(both_gradients, save, load) == [([1.5] * 4, [columns])] * 2


def gradient_through_a_slice():
    shard = my_part(torch.arange(8.0)).clone().requires_grad_()
    x = torch.ones(1, 4, requires_grad=True)
    with saved_tensors_hooks(save_note, gather_again):
        y = F.linear(x, gather_and_mark(shard, (2, 4))[1:])
    y.sum().backward()
    return x.grad.tolist()


assert ranks(gradient_through_a_slice) == [[[4, 5, 6, 7]]] * 2, "the second row"

# %% [markdown]
# **With notes nobody holds the whole weight, so Python frees it.**
#
# ## All together
#
# `FirstFSDP` keeps a shard of each parameter. Its linear layers gather when they read, and autograd
# keeps notes. `layer.weight` goes through the property and is whole; `parameters()` and
# `state_dict()` look into `_parameters`, so Adam gets the shards.

# %%
class GatheredLinear(nn.Linear):
    @property
    def weight(self):
        shape = (self.out_features, self.in_features)
        return gather_and_mark(self._parameters["weight"], shape)

    @property
    def bias(self):
        shape = (self.out_features,)
        return gather_and_mark(self._parameters["bias"], shape)


class FirstFSDP(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        for p in net.parameters():
            flat = p.data.reshape(-1)
            p.data = my_part(flat).clone()  # a copy, so that the whole is freed
        for layer in net:
            if isinstance(layer, nn.Linear):
                layer.__class__ = GatheredLinear

    def forward(self, x):
        with saved_tensors_hooks(save_note, gather_again):
            return self.net(x)

# %% [markdown]
# Autograd remembers the second function with each note, so the backward pass needs no `with`. We
# train a small network on two ranks, and compare with one process.

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
def train_first():
    model = FirstFSDP(tanh_net())
    train_parts(model)
    return model.net.state_dict()


net = tanh_net()
train_parts(net)
on_rank_0, on_rank_1 = ranks(train_first)
for name, weight in net.state_dict().items():
    joined = torch.cat([on_rank_0[name], on_rank_1[name]]).view(weight.shape)
    print(f"{name}: {len(on_rank_0[name])} of {weight.numel()} on rank 0, joined as one process's:",
          largest_difference(joined, weight) < 1e-12)

# %% tags=["fold", "trains"]
# check: all are as one process's, and shards are copies; without the mean over ranks they are not
from unittest.mock import patch


class NotReduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        return gather_whole(shard).view(shape)

    @staticmethod
    def backward(ctx, gradient):
        return my_part(gradient.reshape(-1)), None


def differences(function):
    on_both = ranks(train_first_by, function)
    found = []
    for name, weight in net.state_dict().items():
        joined = torch.cat([shards[name] for shards in on_both]).view(weight.shape)
        found.append(largest_difference(joined, weight))
    return found


def train_first_by(function):
    with patch.dict(globals(), GatherAndWait=function):
        return train_first()


def bytes_kept():
    parameters = list(FirstFSDP(tanh_net()).parameters())
    return [p.untyped_storage().nbytes() for p in parameters], [p.nbytes for p in parameters]


assert max(differences(GatherAndWait)) < 1e-12
assert not max(differences(NotReduced)) < 1e-3
for in_memory, of_shards in ranks(bytes_kept):
    assert in_memory == of_shards, "the whole is still in memory"

# %% [markdown]
# ## What else the program's `FSDP` does
#
# The pieces are the same:
#
# | here | in `sharded_train.py` |
# | --- | --- |
# | `GatheredLinear`, written for one layer | `read_through` makes such a class for each module |
# | `GatherAndWait` | `Gather` |
# | a mark on the storage | `lent`, a dictionary by the storage's address |
# | a note, a dictionary | `Note`, which counts the parameter's changes, too |
#
# So it shards a convolution, a norm, or a parameter of one's own:

# %%
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(16)
        self.conv = nn.Conv1d(1, 3, kernel_size=3)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.last = nn.Linear(18, 4)

    def forward(self, x):
        x = torch.relu(self.conv(x.unsqueeze(1)))
        x = self.norm(x) * self.scale
        return self.last(x.flatten(1))

# %% [markdown]
# On two and on three ranks, where some sizes aren't divisible (`largest_difference` compares each
# rank's weights with one process's):

# %% tags=["trains"]
def train_mixed():
    model = FSDP(Mixed().double())
    train_parts(model)
    return model.gather_full_params()


mixed = Mixed().double()
train_parts(mixed)
for k in [2, 3]:
    difference = largest_difference(ranks(train_mixed, world=k), mixed.state_dict())
    print(f"{k} ranks, as one process: {difference < 1e-12}")

# %% tags=["fold", "trains"]
# check: on 1, 2 and 3 ranks every rank's weights are as one process's
for k in [1, 2, 3]:
    assert largest_difference(ranks(train_mixed, world=k), mixed.state_dict()) < 1e-12, k

# %% [markdown]
# Two of what is new:
#
# ### A gradient that comes later
#
# `Gather.backward` begins to send a gradient and returns at once. The shard's gradient isn't there
# yet, so it can't be returned. `FSDP` sets the shard's `.grad` later itself, and hands `Gather` the
# shard in a tuple, where autograd doesn't look for arguments. But is `backward` called, if autograd
# sees no argument that needs a gradient? We try it with a number that nobody uses, the `anchor`:

# %%
class Announce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor):
        return torch.ones(3)

    @staticmethod
    def backward(ctx, gradient):
        print("backward is called")
        return None


for needs_gradient in [False, True]:
    print("an argument needs a gradient:", needs_gradient)
    anchor = torch.zeros((), requires_grad=needs_gradient)
    x = torch.ones(3, requires_grad=True)
    y = Announce.apply(anchor) * x
    y.sum().backward()

# %% tags=["fold"]
# check: `backward` is called only in the second case
def is_called(needs_gradient):
    x = torch.ones(3, requires_grad=True)
    text = io.StringIO()
    with redirect_stdout(text):
        y = Announce.apply(torch.zeros((), requires_grad=needs_gradient)) * x
        y.sum().backward()
    return text.getvalue() != ""


assert (is_called(False), is_called(True)) == (False, True)

# %% [markdown]
# Only if an argument needs a gradient. So `Gather` gets an `anchor` that does.
#
# ### A weight that has changed
#
# A note has no numbers. **Predict:** what happens if a weight is changed between the forward and
# the backward pass?

# %%
def change_between_passes(kind):
    model = kind(tanh_net())
    x = batches[0][0].clone().requires_grad_()
    y = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(10)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


for kind in [FirstFSDP, FSDP]:
    print(f"{kind.__name__}: {ranks(change_between_passes, kind)[0]}")

# %% tags=["fold"]
# check: `FSDP` raises on both ranks, `FirstFSDP` doesn't; through `.data` neither notices it
def gradient_of_x(factor):
    model = FirstFSDP(tanh_net())
    x = batches[0][0].clone().requires_grad_()
    y = model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    y.sum().backward()
    return x.grad


assert ranks(change_between_passes, FirstFSDP) == ["no error"] * 2
for said in ranks(change_between_passes, FSDP):
    assert "changed between the forward and the backward pass" in said
assert not torch.allclose(ranks(gradient_of_x, 10)[0], ranks(gradient_of_x, 1)[0])


def change_through_data():
    model = FSDP(tanh_net())
    x = batches[0][0].clone().requires_grad_()
    y = model(x)
    for p in model.parameters():
        p.data.mul_(10)
    y.sum().backward()
    return x.grad


for found in ranks(change_through_data):
    assert torch.allclose(found, 100 * ranks(gradient_of_x, 1)[0]), "wrong, without an error"

# %% [markdown]
# `FirstFSDP` gathers the new numbers and gives a wrong gradient, without an error. PyTorch counts
# the changes made to a tensor in place, its *version*, and a `Note` has the version from the
# forward pass. A change through `.data` isn't counted: `FSDP` doesn't notice it either. **Don't
# change weights between the passes; `FSDP` notices what PyTorch counts.**
#
# ## Summary
#
# - A property in a layer's class notices when the layer reads a weight; an object can be given such
#   a class.
# - An autograd function gathers forward and reduces backward, so any layer computes with the whole
#   weight, and the shard gets its mean gradient.
# - Saved-tensor hooks let autograd keep a note in place of a gathered weight. A mark on its storage
#   is found from the transpose, too.
# - A gradient that is sent in the background can't be returned. An `anchor` makes autograd call
#   `backward`.
# - A note holds the weight's version, so that a change in place between the passes is noticed (not
#   one through `.data`, which isn't counted).
