# %% [markdown]
# # Deeper · FSDP for any network
#
# Chapter 16 wrote a linear layer's two passes by hand, so that it holds a whole weight only while
# it computes. *How can that be done for a layer whose formulas one doesn't know?* There are two
# obstacles: the layer reads its whole weight, and autograd keeps it until the backward pass.
# PyTorch's `fully_shard` puts hooks round the layer and empties the weight's memory. The `FSDP` of
# [sharded_train.py](../sharded_train.py) lets autograd keep a note instead. We write both.
#
# > **What you'll do:** empty a weight that autograd keeps, and fill it again in time; shard a
# > network by hooks; look into PyTorch's `fully_shard`; then let autograd keep notes.
# >
# > **What you'll learn:** what `fully_shard` does, by which functions; how to change what autograd
# > saves; two mistakes that raise no error.
# >
# > **What you need:** chapter 16, no GPU, and PyTorch 2.13 or newer. Reading takes {reading time},
# > running about 15 seconds.

# %% tags=["torch"]
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import fully_shard

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where chapter 16's sharded_train.py and chapter 14's ranks.py are
from ranks import ranks
from sharded_train import FSDP

# %% [markdown]
# From chapter 16 we take these. (All our sizes are divisible by two, since `my_part` doesn't pad.)

# %%
def my_part(tensor):
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def gather_whole(shard):
    whole = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_single(whole, shard)
    return whole


def mean_shard(gradient):
    """This rank's shard of the mean gradient."""
    shard = gradient.new_empty(gradient.numel() // dist.get_world_size())
    dist.reduce_scatter_single(shard, gradient.flatten())
    return shard / dist.get_world_size()

# %% [markdown]
# ## A weight whose memory is emptied
#
# A tensor is two things: a *storage*, which has the numbers, and what says how to read them, such
# as a shape. A storage can be resized, also to nothing. **Predict:** autograd keeps the weight for
# the backward pass, transposed. If we empty the weight's storage and fill it with ten times the
# numbers, which ones does autograd have?

# %% tags=["predict"]
weight = nn.Parameter(torch.arange(8.0).view(2, 4))
x = torch.ones(1, 4, requires_grad=True)
y = F.linear(x, weight)
storage = weight.untyped_storage()

storage.resize_(0)
print("bytes of the weight now:", storage.nbytes(), "and its shape:", tuple(weight.shape))

storage.resize_(8 * 4)  # eight numbers, four bytes each
weight.data.copy_(10 * torch.arange(8.0).view(2, 4))
y.sum().backward()
print("the gradient of x:", x.grad.tolist())
assert x.grad.tolist() == [[40, 60, 80, 100]]

# %% [markdown]
# <details><summary>What came out</summary>
#
# The new ones. The transpose that autograd keeps has the same storage, so that the gradient of `x`,
# the sum of the weight's rows, is ten times as large.
#
# </details>
#
# So autograd may keep the weight: we empty it, and only must fill it in time. (We wrote through
# `.data`, since autograd refuses a backward pass with a weight that was changed in place. It
# compares a counter, the tensor's *version*, which `.data` doesn't touch.)
#
# ## Hooks round a module
#
# When must it be filled, and when emptied? Before and after the module computes, in both passes.
# PyTorch can call a function of ours at each of these four moments. `Unit` manages one module's
# parameters. The optimizer must see the shards, so they stand in the module's dictionary
# `_parameters`, and the whole weights only while it computes:

# %%
class Unit:
    def __init__(self, module):
        self.module = module
        self.shards = {}
        self.wholes = {}
        for name, p in module.named_parameters(recurse=False):  # not of modules in it
            self.shards[name] = nn.Parameter(my_part(p.detach().flatten()).clone())
            self.wholes[name] = nn.Parameter(p.detach().clone())
            self.wholes[name].register_post_accumulate_grad_hook(self.gradient_came)
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)

    def gather(self):
        for name, whole in self.wholes.items():
            whole.untyped_storage().resize_(whole.nbytes)
            numbers = gather_whole(self.shards[name].detach())
            whole.data.copy_(numbers.view_as(whole))
            self.module._parameters[name] = whole

    def free(self):
        for name, whole in self.wholes.items():
            whole.untyped_storage().resize_(0)
            self.module._parameters[name] = self.shards[name]

    def before_forward(self, module, inputs):
        self.gather()

    def after_forward(self, module, inputs, output):
        self.free()
        if output.requires_grad:  # it doesn't under torch.no_grad()
            output.register_hook(self.before_backward)  # called with the output's gradient

    def before_backward(self, gradient):
        self.gather()

    def gradient_came(self, p):  # called when the gradient of a whole weight is ready
        if all(whole.grad is not None for whole in self.wholes.values()):
            for name, whole in self.wholes.items():
                shard = self.shards[name]
                if shard.grad is None:
                    shard.grad = mean_shard(whole.grad)
                else:  # of an earlier backward pass
                    shard.grad += mean_shard(whole.grad)
                whole.grad = None
            self.free()

# %% [markdown]
# It has no formula of a layer. But it expects that the module returns one tensor, and that the loss
# depends on each of its parameters: a gradient that never comes blocks the unit. We try it on a
# network with a convolution and a norm, against one process:

# %% tags=["trains"]
def make_net():
    torch.manual_seed(16)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv1d(1, 4, kernel_size=3), nn.Tanh(),
                         nn.LayerNorm(6), nn.Flatten(), nn.Linear(24, 4)).double()


torch.manual_seed(0)
batches = []
for step in range(5):
    x = torch.randn(12, 8).double()
    y = torch.randint(4, (12,))
    batches.append((x, y))

net = make_net()
adam = torch.optim.Adam(net.parameters(), lr=0.01)
for x, y in batches:
    adam.zero_grad()
    F.cross_entropy(net(x), y).backward()
    adam.step()
one_process = net.state_dict()


def bytes_held(units):
    held = 0
    for unit in units:
        for whole in unit.wholes.values():
            held += whole.untyped_storage().nbytes()
    return held


def by_units():
    net = make_net()
    units = [Unit(module) for module in net if list(module.parameters())]
    adam = torch.optim.Adam(net.parameters(), lr=0.01)  # of the shards
    for x, y in batches:
        adam.zero_grad()
        loss = F.cross_entropy(net(my_part(x)), my_part(y))
        between = bytes_held(units)
        loss.backward()
        after = bytes_held(units)
        adam.step()
    weights = {}
    for name, shard in net.state_dict().items():
        weights[name] = gather_whole(shard).view_as(one_process[name])
    return weights, between, after


for rank, (weights, between, after) in enumerate(ranks(by_units)):
    same = largest_difference(weights, one_process) < 1e-12
    print(f"rank {rank}: as one process: {same}; bytes of whole weights between the passes: "
          f"{between}, after them: {after}")
    assert same and between == 0 and after == 0

# %% [markdown]
# Between the passes autograd keeps all weights, and they have no bytes. After them all are empty
# again.
#
# ## In PyTorch
#
# `fully_shard` does this, at the same first three moments, and at a later fourth. These are its
# functions, in `torch/distributed/fsdp/_fully_shard` of PyTorch 2.13:
#
# | `Unit` | PyTorch's function | in |
# | --- | --- | --- |
# | `before_forward` | `_pre_forward`, which calls | `_fsdp_state.py` |
# | | the group's `pre_forward` | `_fsdp_param_group.py` |
# | `after_forward` | `_post_forward`: `reshard`; `register_hook` on the output | `_fsdp_state.py` |
# | `before_backward` | `_pre_backward`: `unshard` | `_fsdp_state.py` |
# | `gradient_came` | `post_backward`: `reshard`, then reduces | `_fsdp_param_group.py` |
# | `resize_` | `alloc_storage` and `free_storage` | `_fsdp_param.py` |
# | `_parameters[name] =` | `unsafe_setattr_param` | `_fsdp_param.py` |
# | `.data.copy_` | `foreach_all_gather_copy_out` | `_fsdp_collectives.py` |
#
# Four things are different. A group is all parameters of one call of `fully_shard`, which travel in
# one message. `_pre_backward` also begins to gather the next group. The copying function writes
# under `_unsafe_preserve_version_counter`, which does what `.data` does here. And `post_backward`
# is called by an autograd function through which the module's *inputs* go
# (`RegisterPostBackwardFunction`), so that its turn in the backward pass is after the module's.
#
# If a module's inputs need no gradient, as in the first layer, nothing follows it in the backward
# pass. Such groups are reduced at the end, by a callback (`_root_post_backward_final_callback`).
# Let us look at one weight, in attributes that aren't meant for us:

# %%
def look_inside():
    net = make_net()
    for module in net:
        if list(module.parameters()):
            fully_shard(module)
    fully_shard(net)
    x, y = batches[0]
    output = net(my_part(x))
    of_conv = net[1]._get_fsdp_state()._fsdp_param_groups[0].fsdp_params[0]
    whole = of_conv._unsharded_param
    after_forward = whole.untyped_storage().nbytes()
    during_backward = []

    def note(gradient):
        during_backward.append(whole.untyped_storage().nbytes())

    whole.register_hook(note)  # called with its gradient
    F.cross_entropy(output, my_part(y)).backward()
    return tuple(whole.shape), after_forward, during_backward, whole.untyped_storage().nbytes()


shape, after_forward, during_backward, at_the_end = ranks(look_inside)[0]
print("the convolution's weight", shape, "has", after_forward, "bytes after the forward pass,",
      during_backward[0], "in the backward pass,", at_the_end, "after it")

# %% [markdown]
# Twelve numbers of eight bytes, at the moment its gradient comes. (As the first layer, it is
# emptied at the end of the pass.)
#
# ## A mistake: the optimizer comes first
#
# Ours and PyTorch's put new parameters in the place of the old ones. **Predict:** what happens if
# the optimizer was made before?

# %% tags=["predict", "trains"]
def has_learned(optimizer_is_made):
    net = nn.Linear(8, 4).double()
    adam = torch.optim.Adam(net.parameters())
    fully_shard(net)
    if optimizer_is_made == "after":
        adam = torch.optim.Adam(net.parameters())
    before = net.weight.full_tensor().clone()
    x, y = batches[0]
    F.cross_entropy(net(my_part(x)), my_part(y)).backward()
    adam.step()
    return not torch.equal(net.weight.full_tensor(), before)


for made in ["before", "after"]:
    print(f"optimizer made {made} fully_shard: has learned: {ranks(has_learned, made)[0]}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Made before, it holds the old parameters, which get no gradients any more. Nothing is learned, and
# there is no error.
#
# </details>
#
# ## The other way: a note
#
# Hooks round a module have a limit: the weight is whole only while *its module* computes. Where
# another module reads it, as in networks whose last layer shares the embedding's weight, both must
# be one unit. (Our notes would cut a shared weight twice; the program's `FSDP` cuts it once.) Could
# one notice each *read* instead? A module keeps its parameters in a dictionary, in which Python
# looks last. A *property* of the class is found first, and runs a function of ours. And an object
# that exists can get another class:

# %%
class Watched(nn.Linear):
    @property
    def weight(self):
        print("the weight is read")
        return self._parameters["weight"]


layer = nn.Linear(4, 2)
layer.__class__ = Watched
y = layer(torch.ones(1, 4))

# %% [markdown]
# So `_parameters` can keep the shard, and the property returns a whole weight, made from the shard
# by an autograd function. Autograd then brings the whole gradient to its `backward`:

# %%
class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, shape):
        return gather_whole(shard).view(shape)

    @staticmethod
    def backward(ctx, gradient):
        return mean_shard(gradient), None  # for the shard; the shape has none

# %% [markdown]
# ### What autograd keeps
#
# This weight is new in each pass, so that nothing can fill it again. But autograd must not keep it.
# Two functions decide what is kept: one gets each tensor that is saved, and returns what is kept
# for it; the other gets that back. Ours keeps a *note* for a gathered weight: its shard, and how to
# read the numbers. How does it know a gathered weight, which may be a transpose or a slice? By its
# storage, on which we write the shard as an attribute:

# %%
def gather_and_mark(shard, shape):
    whole = Gather.apply(shard, shape)
    storage = whole.untyped_storage()
    storage.shard = shard  # the mark
    return whole


def save_note(tensor):
    storage = tensor.untyped_storage()
    if not hasattr(storage, "shard"):
        return tensor
    return {"shard": storage.shard, "shape": tensor.shape, "stride": tensor.stride(),
            "offset": tensor.storage_offset()}


def gather_again(saved):
    if not isinstance(saved, dict):
        return saved
    whole = gather_whole(saved["shard"].detach())
    return whole.as_strided(saved["shape"], saved["stride"], saved["offset"])

# %% [markdown]
# (A *stride* says how many numbers further in memory the next row begins, and the next column. A
# transpose has the same numbers and its strides exchanged.)
#
# ### Any module
#
# A module lists its own parameters. For each name we make a property, and
# `type(name, bases, attributes)` makes a class that has them all:

# %%
def gather_when_read(name, shape):
    def read(module):
        return gather_and_mark(module._parameters[name], shape)
    return property(read)


def shard_module(module):
    properties = {}
    for name, p in module.named_parameters(recurse=False):
        properties[name] = gather_when_read(name, p.shape)
        p.data = my_part(p.data.flatten()).clone()  # a copy, so that the whole is freed
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), properties)


class NoteFSDP(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        for module in net.modules():
            shard_module(module)

    def forward(self, x):
        with saved_tensors_hooks(save_note, gather_again):
            return self.net(x)


def by_notes():
    model = NoteFSDP(make_net())
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches:
        adam.zero_grad()
        F.cross_entropy(model(my_part(x)), my_part(y)).backward()
        adam.step()
    weights = {}
    for name, shard in model.net.state_dict().items():
        weights[name] = gather_whole(shard).view_as(one_process[name])
    return weights


for weights in ranks(by_notes):
    print("as one process:", largest_difference(weights, one_process) < 1e-12)
    assert largest_difference(weights, one_process) < 1e-12

# %% [markdown]
# Right weights don't prove that autograd keeps notes. So we count what `save_note` gets, and look
# at what it returns:

# %%
def count_what_is_kept():
    model = NoteFSDP(make_net())
    kept = []

    def save(tensor):
        kept.append(save_note(tensor))
        return kept[-1]

    x, y = batches[0]
    with saved_tensors_hooks(save, gather_again):
        model.net(my_part(x))
    notes = 0
    gathered = 0
    for saved in kept:
        if isinstance(saved, dict):
            notes += 1
        elif hasattr(saved.untyped_storage(), "shard"):
            gathered += 1
    return len(kept), notes, gathered


saved, notes, gathered = ranks(count_what_is_kept)[0]
print(f"{saved} tensors saved: {notes} as notes, {gathered} gathered weights")
assert notes > 0 and gathered == 0

# %% [markdown]
# The program's `FSDP` has the same pieces: `read_through` makes the properties, `Gather` sends a
# gradient without waiting, and `Note` is the note. It pads what isn't divisible, and refuses an
# LSTM, which keeps a list of its weights and so reads none by name.
#
# ## A mistake: a weight that changes between the passes
#
# The weight is gathered anew for the backward pass. **Predict:** what happens, in each of these
# ways, if all weights are multiplied by 10 between the two passes?

# %% tags=["predict"]
def by_fully_shard(net):
    for layer in [net[0], net[2]]:
        fully_shard(layer)
    return fully_shard(net)


def as_it_is(net):
    return net


def change_between_passes(wrap, factor):
    torch.manual_seed(16)
    model = wrap(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double())
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


print("fully_shard, times 1:", ranks(change_between_passes, by_fully_shard, 1)[0])
for name, wrap in [("ordinary network", as_it_is), ("fully_shard", by_fully_shard),
                   ("our notes", NoteFSDP), ("the program's FSDP", FSDP)]:
    print(f"{name}, times 10: {ranks(change_between_passes, wrap, 10)[0]}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# An ordinary network raises an error. `fully_shard` and our notes take the new weights without one,
# and the gradient is 100 times too large.
#
# </details>
#
# An ordinary network compares versions. PyTorch's FSDP must switch that off to fill a weight, and
# our note has no version. The program's `Note` has the shard's version, so it refuses. So change no
# weight between a forward pass and its backward pass, for example by an `optimizer.step()` while
# another micro-batch is under way.
#
# ## Summary
#
# - `fully_shard` puts hooks round a module. It fills the memory of its weights before the module
#   computes and empties it afterwards, in both passes. (The root's own weights stay whole until the
#   backward pass.) Autograd keeps the tensors, without bytes.
# - `fully_shard` makes new parameters, so make the optimizer after it.
# - The other way notices each read by a property, and lets autograd keep a note.
# - Both gather the weights as they are *now* for the backward pass. Unless versions are compared, a
#   change between the passes is a wrong gradient without an error. (For the root's own weights
#   `fully_shard` raises one.)
#
# **Further reading.** Y. Zhao et al. (2023), arXiv:2304.11277, on the first version of PyTorch's
# FSDP.
