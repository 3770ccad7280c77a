# %% [markdown]
# # Assignment 8: sharded training in PyTorch
#
# **You will** write an optimizer whose state is sharded, a linear layer whose weight is sharded,
# and the arithmetic that tells which stage of sharding fits into a device's memory.
#
# **You need** chapter 16, and PyTorch (`make setup TORCH=1`). **Time**: about three hours.
# **Points**: 12, of which 2 are for words.
#
# **You may use** anything in PyTorch. Of `torch.distributed`: `get_rank`, `get_world_size`,
# `broadcast`, `all_reduce`, `all_gather`, `all_gather_single`, `reduce_scatter`,
# `reduce_scatter_single` and `barrier`, with or without `async_op=True`, with the operations SUM,
# AVG, PRODUCT, MIN and MAX, `broadcast_object_list` and `all_gather_object`. Call them as
# `dist.all_reduce(...)`. What you start with `async_op=True` has arrived after `wait()`, and not
# before. The output comes first: `all_gather_single(whole, part)`, `reduce_scatter_single(part,
# whole)`. (Their older names, `all_gather_into_tensor` and `reduce_scatter_tensor`, do too.) When
# it is marked there is nothing else: no `send`, no groups of some ranks.
#
# Write your code in the cells that say so, and nowhere else: those cells are all that will be
# read. Each exercise is tested in the open, so that you can see how you are doing, and again,
# on other values and with one to four ranks, when it is marked. A solution cell may define more
# than what is asked for.
#
# A solution cell is run as plain Python, after the cells above it that give you imports and
# functions: without magics such as `%timeit`, and without variables from cells that only show
# something. It may call what your solution cells above it define, as you wrote it: if that is
# wrong, so is what calls it.
#
# **When something is wrong**: as long as a class isn't written, its tests end with `NameError`. If
# one rank waits for a message that another doesn't send, a test ends after 30 seconds with
# `TimeoutError`. If their messages have different lengths, gloo may end the process
# (`TerminatedWorkerError`), or the tensors hold something else. If an output and an input don't fit
# each other, PyTorch's error names both lengths (`Check failed: …`).

# %% tags=["given"]
import gc
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

# %% [markdown]
# Both sharded exercises use one layout. Some tensors are *flattened*, row by row, and written one
# after the other. Zeros are added at the end, as few as possible, until the number of ranks divides
# the length. Then rank 0 has the first of that many equal *shards*, rank 1 the second, and so on.
# Three ranks share a matrix $((1, 2), (3, 4))$ and a vector $(5)$ as $(1, 2)$, $(3, 4)$ and
# $(5, 0)$. This is not the chapter's layout, which shards each tensor by itself.
#
# All tensors are in float64. All ranks begin with equal tensors, so there is nothing to broadcast.

# %% tags=["given"]
def copy(tensor):
    return None if tensor is None else tensor.detach().clone().numpy()


# %% [markdown]
# `ranks` runs a function in several processes and returns what each returned; it is chapter 14's.
# To try your classes, give `on_each` a function and one list of arguments for each rank.
# `logged` runs a function and returns the messages that it sent, with how many numbers this rank
# put into each. (It sees those that are called as `dist.…`.)

# %%
import inspect

from ranks import ranks

PUT = ("input", "input_tensor", "input_list", "tensor")  # what `dist` calls what a rank puts in


def call_with(function, given):
    return function(*given[dist.get_rank()])


def on_each(function, given):
    return ranks(call_with, function, given, world=len(given), seconds=30)


def logged(function, *given):
    log = []

    def noting(name, inner):
        def call(*args, **options):
            found = inspect.signature(inner).bind(*args, **options).arguments
            put = next((found[key] for key in PUT if key in found), [])
            tensors = put if isinstance(put, list) else [put]
            log.append((name, sum(t.numel() for t in tensors if torch.is_tensor(t))))
            return inner(*args, **options)
        return call

    kept = {name: getattr(dist, name) for name in dir(dist) if name.startswith(
        ("all_gather", "all_reduce", "barrier", "broadcast", "reduce_scatter"))}
    try:
        for name, inner in kept.items():
            kind = "_".join(name.split("_")[:2]).replace("broadcast_object", "broadcast")
            setattr(dist, name, noting(kind, inner))
        function(*given, log.append)
    finally:
        for name, inner in kept.items():
            setattr(dist, name, inner)
    return log


# %% [markdown]
# ## 1. A sharded optimizer (4 points)
#
# `ShardedOptimizer(params, optimizer_class, **options)` is stage 1 for all parameters together:
#
# 1. `params` are the parameters in their order: a list, or an iterator such as
#    `net.parameters()`. Sizes are any, there may be fewer numbers than ranks, and parameters of no
#    dimensions. Raise `ValueError` if there is none.
# 2. All of them are sharded together, in the layout above: one flat tensor. `.inner` is the
#    optimizer that updates this rank's shard: an `optimizer_class`, made with `options`. It has
#    one tensor (or `nn.Parameter`) of one dimension: the shard with its zeros. So its state has as
#    many numbers as the shard, twice as many with Adam. After each step that tensor has the
#    shard's new values.
# 3. `step()` takes the mean of all ranks' gradients, updates the shards, and gives all ranks all
#    new values, in the same `Parameter` objects as before. A gradient that is `None` counts as
#    zeros, even where it is `None` on all ranks: a parameter without a gradient still decays, and
#    moves on with its momentum. (Chapter 16's program leaves it alone.)
# 4. `step()` sends two messages, even where there is only one rank: a reduce-scatter, into which
#    each rank puts its flat gradient with its zeros, and an all-gather, into which each puts its
#    shard. Nothing else is sent, neither then nor before.
# 5. `step()` leaves the parameters' gradients as they are, `None` too, and `zero_grad()` clears
#    them: to zeros or to `None`, as you like. The caller's list of parameters stays as it is.
#
# Nobody else writes into the parameters. All of them get the same options, and the optimizer works
# element by element, as SGD, Adam and AdamW do. About twenty-four lines.


# %% tags=["ranks"] nbgrader={"grade_id": "sharded", "solution": true}
class ShardedOptimizer:
    """Stage 1: each rank updates its shard of all parameters, taken as one flat tensor."""

    ### BEGIN SOLUTION
    def __init__(self, params, optimizer_class, **options):
        self.params = list(params)
        if not self.params:
            raise ValueError("there is no parameter to optimize")
        shards = self.flatten(self.params).chunk(dist.get_world_size())
        self.shard = shards[dist.get_rank()].clone()
        self.inner = optimizer_class([self.shard], **options)

    def flatten(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    @torch.no_grad()
    def step(self):
        flat = self.flatten([torch.zeros_like(p) if p.grad is None else p.grad
                             for p in self.params])
        total = torch.empty_like(self.shard)
        dist.reduce_scatter_single(total, flat)
        self.shard.grad = total / dist.get_world_size()
        self.inner.step()
        dist.all_gather_single(flat, self.shard)
        begin = 0
        for p in self.params:
            p.copy_(flat[begin:begin + p.numel()].view_as(p))
            begin += p.numel()

    def zero_grad(self):
        for p in self.params:
            p.grad = None
    ### END SOLUTION


# %% [markdown]
# The tests call your class through this function: one rank's training. Each step has a gradient
# for each parameter, or `None`, which a backward pass adds to what is there, and says whether the
# gradients are cleared before. `note` is called before each of your steps. Where `inside` is true
# your class gets a list, else an iterator.


# %% tags=["driver"]
def look_inside(inner):
    """(class, shapes of what it updates, how many numbers its state has, values of the first)."""
    tensors = [p for group in inner.param_groups for p in group["params"]]
    state = [value for each in inner.state.values() for value in each.values()]
    return (type(inner).__name__, [tuple(p.shape) for p in tensors],
            [value.numel() for value in state if torch.is_tensor(value) and value.dim()],
            copy(tensors[0]))


def train_sharded(arrays, kind, options, steps, inside, note):
    """(the parameters after each step, whether it left each gradient as it was, what is inside at
    the end, if `inside`)."""
    params = [nn.Parameter(torch.tensor(array)) for array in arrays]
    optimizer = ShardedOptimizer(params if inside else iter(params), getattr(torch.optim, kind),
                                 **options)
    history, left = [], []
    for clear, gradients in steps:
        if clear:
            optimizer.zero_grad()
        losses = [(p * torch.tensor(g)).sum() for p, g in zip(params, gradients) if g is not None]
        if losses:
            sum(losses).backward()
        note("backward pass ended")
        before = [copy(p.grad) for p in params]
        optimizer.step()
        history.append([copy(p) for p in params])
        left.append([p.grad is None if old is None else np.array_equal(old, copy(p.grad))
                     for old, p in zip(before, params)])
    return history, left, look_inside(optimizer.inner) if inside else None


# %% [markdown]
# Three numbers on two ranks: the parameters $(1, 2)$ and $3$, so the shards are $(1, 2)$ and
# $(3, 0)$. The gradients are $(1, 1)$ and $1$ on rank 0, $(3, 5)$ and nothing on rank 1; their
# means $(2, 3)$ and $0.5$.

# %%
arrays = [np.array([1.0, 2.0]), np.array(3.0)]
by_hand = [[True, [np.array([1.0, 1.0]), np.array(1.0)]]], [[True, [np.array([3.0, 5.0]), None]]]
nothing = [True, [None, None]]   # a step without gradients


def ignore(word):
    pass


# %% nbgrader={"grade_id": "sharded-values", "points": 2}
for rank, (history, left, _) in enumerate(on_each(train_sharded, [
        [arrays, "SGD", {"lr": 1.0}, steps, False, ignore] for steps in by_hand])):
    (vector, number), = history
    assert np.allclose(vector, [-1, -1]), f"rank {rank}: (1, 2) - (2, 3) isn't {vector}"
    assert np.allclose(number, 2.5), f"rank {rank}: 3 - 0.5 isn't {number}"
    assert left == [[True, True]], f"rank {rank}: the step changed a gradient: {left}"

# Momentum goes on where there is no gradient: 0.5 of (2, 3), and 0.5 of 0.5.
for rank, (history, _, _) in enumerate(on_each(train_sharded, [
        [arrays, "SGD", {"lr": 1.0, "momentum": 0.5}, [*steps, nothing], False, ignore]
        for steps in by_hand])):
    assert np.allclose(history[1][0], [-2, -2.5]), \
        f"rank {rank}, second step, no gradients: {history[1][0]}, not (-2, -2.5)"
    assert np.allclose(history[1][1], 2.25), \
        f"rank {rank}, second step, no gradients: {history[1][1]}, not 2.25"

# %% nbgrader={"grade_id": "sharded-messages", "points": 1}
due = ["backward pass ended", ("reduce_scatter", 4), ("all_gather", 2)] * 2
for rank, log in enumerate(on_each(logged, [
        [train_sharded, arrays, "Adam", {"lr": 0.1}, steps * 2, False] for steps in by_hand])):
    assert log == due, f"rank {rank}, two steps: {log}, not {due}"

# %% nbgrader={"grade_id": "sharded-care", "points": 1}
for rank, (_, _, found) in enumerate(on_each(train_sharded, [
        [arrays, "Adam", {"lr": 0.1}, steps, True, ignore] for steps in by_hand])):
    kind, shapes, numbers, shard = found
    assert (kind, shapes) == ("Adam", [(2,)]), f"rank {rank}: {kind} updates {shapes}"
    assert numbers == [2, 2], f"rank {rank}: arrays of {numbers} numbers in Adam's state"
    assert np.allclose(shard, [[0.9, 1.9], [2.9, 0]][rank]), f"rank {rank}: the shard is {shard}"
three = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([5.0])]   # of three ranks, as further up
for rank, (_, _, found) in enumerate(on_each(train_sharded, [
        [three, "SGD", {"lr": 1.0}, [nothing], True, ignore]] * 3)):
    assert np.allclose(found[3], [[1, 2], [3, 4], [5, 0]][rank]), (
        f"rank {rank} of three: the shard is {found[3]}, not {[[1, 2], [3, 4], [5, 0]][rank]}")
try:
    on_each(train_sharded, [[[], "SGD", {"lr": 1.0}, [], False, ignore]] * 2)
except ValueError as error:
    print("As it should be, ValueError:", error)
else:
    raise AssertionError("no parameters, and no ValueError")

# %% [markdown]
# ## 2. A sharded layer (4 points)
#
# `ShardedLinear(linear)` is stage 3 for one layer. `linear` is an `nn.Linear` with a bias or
# without.
#
# 1. Its weight and then its bias, in the layout above, are one flat tensor. This rank's shard,
#    with its zeros, is `.shard`, an `nn.Parameter`. The module has no other parameter and no
#    buffer. The shard has memory of its own: a view of the flat tensor would keep all of it alive.
# 2. The module is called with `x`, `[..., inputs]`, of one dimension or more, and returns
#    $x W^\top + b$, `[..., outputs]`.
# 3. After the backward pass `.shard.grad` is this rank's shard of the gradient of weight and bias,
#    the mean over ranks. If there is a gradient already, it is added. `x` gets the gradient of this
#    rank's own loss.
# 4. The forward pass sends one all-gather, of the shards, even where there is only one rank, and
#    then *forgets*: as long as the layer isn't computing, the whole weight is kept nowhere and in
#    no form, not in pieces, in another type or outside tensors either. (Its shard and `x` it may
#    keep.)
# 5. The backward pass sends what is needed, in this order. If `x` needs a gradient: an all-gather
#    of the shards. Then, if `.shard` needs one (it doesn't if somebody froze it): a reduce-scatter
#    of the flat gradient, with its zeros. What needs a gradient is the same on all ranks. (Under
#    `torch.no_grad()` there is no backward pass, so the forward pass's message is the only one.)
# 6. `unshard()` sends an all-gather and returns `(weight, bias)`, whole, in the shapes that they
#    had in `linear`, as they are now. A bias that isn't there is `None`.
#
# Autograd doesn't look into messages: write a `torch.autograd.Function`. Its `ctx.needs_input_grad`
# says which of its inputs need a gradient. Each pass and each rank has its own `x`, and a pass may
# come through the layer twice. What needs a gradient may change from pass to pass. An optimizer may
# change the shards between a backward pass and the next forward pass. About thirty lines.


# %% tags=["ranks"] nbgrader={"grade_id": "linear", "solution": true}
class ShardedLinear(nn.Module):
    """Stage 3: a linear layer that keeps this rank's shard of its weight and bias."""

    ### BEGIN SOLUTION
    def __init__(self, linear):
        super().__init__()
        self.shapes = [p.shape for p in (linear.weight, linear.bias) if p is not None]
        flat = self.flatten(linear.parameters())
        self.shard = nn.Parameter(flat.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def flatten(self, tensors):
        flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
        return F.pad(flat, (0, -len(flat) % dist.get_world_size()))

    def unshard(self):
        flat = self.shard.new_empty(len(self.shard) * dist.get_world_size())
        dist.all_gather_single(flat, self.shard.detach())
        sizes = [shape.numel() for shape in self.shapes]
        pieces = flat[:sum(sizes)].split(sizes)
        return *map(torch.Tensor.view, pieces, self.shapes), *[None] * (2 - len(sizes))

    def forward(self, x):
        return Gathered.apply(x, self.shard, self)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return F.linear(x, *layer.unshard())

    @staticmethod
    def backward(ctx, gradient):
        (x,), layer, mean = ctx.saved_tensors, ctx.layer, None
        of_x = gradient @ layer.unshard()[0] if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            rows = gradient.reshape(-1, gradient.shape[-1]) / dist.get_world_size()
            parts = [rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0)]
            mean = torch.empty_like(layer.shard)
            dist.reduce_scatter_single(mean, layer.flatten(parts[:len(layer.shapes)]))
        return of_x, mean, None
    ### END SOLUTION


# %% [markdown]
# One rank's training of some layers with $\tanh$ between them. Each step has pieces, pairs of
# inputs and targets, whose gradients add up. `note` is called when a forward pass has ended.
# `infer` computes without gradients, doubles the shards, and asks for the whole. `use` lets several
# passes come through one layer, each as often as it says.


# %% tags=["driver"]
def make_sharded(layers, frozen):
    """layers: [[weight, bias or None], ...], arrays. frozen: numbers of layers not to train."""
    sharded = []
    for i, (weight, bias) in enumerate(layers):
        linear = nn.Linear(*weight.shape[::-1], bias is not None, dtype=torch.float64)
        for p, array in zip(linear.parameters(), (weight, bias)):
            p.data.copy_(torch.tensor(array))
        sharded.append(ShardedLinear(linear))
        sharded[-1].shard.requires_grad_(i not in frozen)
    return sharded


def pass_through(sharded, x):
    for i, layer in enumerate(sharded):
        x = layer(torch.tanh(x) if i else x)
    return x


def train_layers(layers, frozen, kind, options, steps, wants_x, note):
    """(outputs and gradients of x for each piece, shards' gradients of each step, shards)."""
    sharded = make_sharded(layers, frozen)
    trained = [layer.shard for i, layer in enumerate(sharded) if i not in frozen]
    optimizer = getattr(torch.optim, kind)(trained, **options)
    outputs, of_x, gradients = [], [], []
    for pieces in steps:
        optimizer.zero_grad()
        for x, y in pieces:
            x = torch.tensor(x, requires_grad=wants_x)
            output = pass_through(sharded, x)
            note("forward pass ended")
            (output - torch.tensor(y)).pow(2).mean().backward()
            outputs.append(copy(output))
            of_x.append(copy(x.grad))
        gradients.append([copy(layer.shard.grad) for layer in sharded])
        optimizer.step()
    return outputs, of_x, gradients, [copy(layer.shard) for layer in sharded]


def infer(layers, x, note):
    """(the output, each layer's weight and bias once the shards have been doubled)."""
    sharded = make_sharded(layers, [])
    with torch.no_grad():
        output = pass_through(sharded, torch.tensor(x))
        note("forward pass ended")
        for layer in sharded:
            layer.shard.mul_(2)
    return copy(output), [[copy(whole) for whole in layer.unshard()] for layer in sharded]


def use(weight, bias, passes, note):
    """(outputs and gradients of x for each pass, the shard's gradient after each: nobody clears it).

    A pass is x, how often it comes through the layer, and whether x and the shard need a gradient.
    """
    (layer,) = make_sharded([[weight, bias]], [])
    outputs, of_x, of_shard = [], [], []
    for x, times, wants_x, trained in passes:
        x = torch.tensor(x, requires_grad=wants_x)
        layer.shard.requires_grad_(trained)
        output = pass_through([layer] * times, x)
        note("forward pass ended")
        if output.requires_grad:
            output.pow(2).mean().backward()
        outputs.append(copy(output))
        of_x.append(copy(x.grad))
        of_shard.append(copy(layer.shard.grad))
    return outputs, of_x, of_shard


# %% [markdown]
# One weight, 2, and a bias, 1: two ranks have a number each. Rank 0 has the input 1 and the target
# 2, rank 1 the input 3 and the target 5, so the outputs are 3 and 7, and the squared errors' slopes
# 2 and 4. For the weight that makes 2 and 12, in the mean 7, for the bias 3; for the inputs, each
# its own, 4 and 8.

# %%
one = np.ones((1, 1))
tiny = [[2 * one, np.ones(1)]]
examples = [[one, 2 * one]], [[3 * one, 5 * one]]

# %% nbgrader={"grade_id": "linear-values", "points": 2}
for rank, (outputs, of_x, gradients, shards) in enumerate(on_each(train_layers, [
        [tiny, [], "SGD", {"lr": 0.5}, [pieces], True, ignore] for pieces in examples])):
    for what, found, expected in (
            ("output", outputs[0], [3, 7]), ("gradient of x", of_x[0], [4, 8]),
            ("gradient of the shard", gradients[0][0], [7, 3]), ("shard", shards[0], [-1.5, -0.5])):
        assert np.allclose(found, expected[rank]), \
            f"rank {rank}: the {what} is {found}, not {expected[rank]}"
for rank, (_, _, gradients, _) in enumerate(on_each(train_layers, [
        [tiny, [], "SGD", {"lr": 0.5}, [[*pieces, [x[0], y[0]]]], True, ignore]
        for pieces in examples for (x, y) in pieces])):
    assert np.allclose(gradients[0][0], [14, 6][rank]), \
        f"rank {rank}: the same again as an x of one dimension: {gradients[0]}, not {[14, 6][rank]}"
# 0.5 comes through 2x + 1 as 2, in float64 tanh(2), and then as y; y**2 has the slope 2y.
t, k = np.tanh(2), 1 - np.tanh(2)**2
y = 2 * t + 1
for rank, (_, of_x, of_shard) in enumerate(on_each(use, [
        [*tiny[0], [[one / 2, 2, True, True]], ignore]] * 2)):
    for what, found, expected in (("x", of_x[0], 2 * y * 2 * k * 2), (
            "the shard", of_shard[0], [2 * y * (t + 2 * k * 0.5), 2 * y * (1 + 2 * k)][rank])):
        assert np.allclose(found, expected), \
            f"rank {rank}, twice through the layer: the gradient of {what} is {found}, not {expected}"
for rank, (output, ((weight, bias),)) in enumerate(on_each(infer, [[tiny, one, ignore]] * 2)):
    assert np.allclose([output.item(), weight.item(), bias.item()], [3, 4, 2]), f"rank {rank}"
    assert (weight.shape, bias.shape) == ((1, 1), (1,)), f"rank {rank}: {weight}, {bias}"

# %% nbgrader={"grade_id": "linear-messages", "points": 1}
rng = np.random.default_rng(16)
two = [[rng.normal(size=(3, 2)), rng.normal(size=3)], [rng.normal(size=(1, 3)), None]]
batch = [rng.normal(size=(4, 2)), np.zeros((4, 1))]  # 9 numbers and 3, with zeros 10 and 4
gather1, gather2 = ("all_gather", 5), ("all_gather", 2)
reduce1, reduce2 = ("reduce_scatter", 10), ("reduce_scatter", 4)
forward = [gather1, gather2, "forward pass ended"]
for wants_x, frozen, expected in ((True, [], [gather2, reduce2, gather1, reduce1]),
                                  (False, [], [gather2, reduce2, reduce1]),
                                  (False, [0], [reduce2]),
                                  (True, [0], [gather2, reduce2, gather1])):
    for log in on_each(logged, [
            [train_layers, two, frozen, "SGD", {"lr": 0.1}, [[batch]], wants_x]] * 2):
        assert log == forward + expected, \
            f"frozen layers {frozen}, x needs a gradient: {wants_x}: {log}, not {forward + expected}"
for log in on_each(logged, [[infer, two, batch[0]]] * 2):
    assert log == forward + [gather1, gather2], f"without gradients, then unshard(): {log}"

# %% [markdown]
# What is kept? `Kept` counts the bytes of all tensors that are made in its block, as chapter 16's
# `Bytes` does, and those of Python's and NumPy's larger objects, as far as they still exist.

# %% tags=["driver"]
import tracemalloc

from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kept(TorchDispatchMode):
    def __enter__(self):
        self.known = {}
        tracemalloc.start()
        return super().__enter__()

    def __exit__(self, *error):
        tracemalloc.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        result = operation(*given, **(options or {}))
        for tensor in tree_leaves(result):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                self.known.setdefault(storage._cdata, StorageWeakRef(storage))
        return result

    def count(self, *tensors):
        """Bytes besides those of `tensors`, once messages have let go of theirs."""
        mine = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        found = []
        for attempt in range(5):
            others = (trace.size for trace in tracemalloc.take_snapshot().traces)
            found.append(sum(map(count_bytes, self.known.values()))
                         + sum(size for size in others if size >= 1000) - mine)
            if found[-1] < 5000:
                break
            gc.collect() if attempt == 2 else time.sleep(0.01)
        return min(found)


def count_bytes(weak):
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return 0 if storage is None else storage.nbytes()


def keep(weight, bias, x):
    """(names of parameters and buffers, the shard's bytes, those of its memory, how many bytes are
    kept besides shard, x, output and gradients, at five moments)."""
    more = []
    with Kept() as kept:
        x, output = torch.tensor(x, requires_grad=True), None

        def note_more():
            more.append(kept.count(layer.shard, layer.shard.grad, x, x.grad, output))

        (layer,) = make_sharded([[weight, bias]], [])
        note_more()
        output = layer(x)
        note_more()
        output.mean().backward()
        note_more()
        with torch.no_grad():
            output = layer(x)
        note_more()
        layer.unshard()
        note_more()
    return ([name for name, _ in [*layer.named_parameters(), *layer.named_buffers()]],
            layer.shard.nbytes, layer.shard.untyped_storage().nbytes(), more)


# %% nbgrader={"grade_id": "linear-forgets", "points": 1}
# On three ranks a weight of 128 x 160 numbers of 8 bytes: a second shard is less than half of it.
for rank, (names, shard, memory_of_it, more) in enumerate(on_each(
        keep, [[np.ones((128, 160)), np.ones(128), np.ones((1, 160))]] * 3)):
    assert names == ["shard"], f"rank {rank}: the module has {names}"
    assert shard == memory_of_it == 54960, \
        f"rank {rank}: the shard has {shard} bytes and its memory {memory_of_it}, not 54960 both"
    for kept, when in zip(more, ("when the layer is made", "before the backward pass", "after it",
                                 "after a pass without gradients", "after unshard()")):
        assert kept < 128 * 160 * 8 // 2, f"rank {rank}: {kept} bytes too many are kept {when}"

# %% [markdown]
# ## 3. What fits (2 points)
#
# Training with Adam in mixed precision: a weight takes 2 bytes, its gradient 2, and the optimizer's
# state 12 (a master weight and two running means). Stage 0 is data parallelism, stages 1, 2 and 3
# are those of chapter 16. What a stage shards is taken as one flat tensor, and each rank counts a
# whole shard, with its padding.
#
# `memory(numbers, ranks, stage)`: the bytes that a rank holds of weights, gradients and state when
# the backward pass has ended, for a model of so many numbers.
#
# `most(limit, ranks, stage)`: how many numbers the largest model has for which a rank needs at most
# `limit` bytes.
#
# All arguments are whole numbers, of any size: models may have more numbers than a float64 can
# tell apart, and more bytes than 64 bits can count. Both return an `int`, exactly. Raise
# `ValueError` if `numbers` or `limit` is below 0, `ranks` below 1, or the stage is none of these
# four. Don't try one count after the other: `most` has to answer within a second, for limits of
# fifty digits (on such numbers `bisect` fails with an `OverflowError`).
#
# About fifteen lines for both.


# %% nbgrader={"grade_id": "memory", "solution": true}
def memory(numbers, ranks, stage):
    """Bytes of weights, gradients and optimizer state on a rank."""
    ### BEGIN SOLUTION
    if numbers < 0 or ranks < 1 or stage not in (0, 1, 2, 3):
        raise ValueError(f"{numbers} numbers on {ranks} ranks in stage {stage}")
    shard = -(-numbers // ranks)
    return sum(each * (shard if stage >= sharded_from else numbers)
               for each, sharded_from in ((12, 1), (2, 2), (2, 3)))
    ### END SOLUTION


def most(limit, ranks, stage):
    """The largest count of numbers for which a rank needs `limit` bytes or fewer."""
    ### BEGIN SOLUTION
    if limit < memory(0, ranks, stage):
        raise ValueError(f"limit={limit}")
    fits, too_many = 0, limit * ranks + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if memory(middle, ranks, stage) <= limit:
            fits = middle
        else:
            too_many = middle
    return fits
    ### END SOLUTION


# %% [markdown]
# Ten numbers on four ranks: shards of three. Sharded, the state takes 36 bytes in place of 120,
# the gradients 6 in place of 20, and the weights too.

# %% nbgrader={"grade_id": "memory-bytes", "points": 1}
found = [memory(10, 4, stage) for stage in range(4)]
assert found == [160, 76, 62, 48], (
    f"ten numbers, four ranks, stages 0 to 3: {found} bytes, not [160, 76, 62, 48]")
found = memory(10**20 + 1, 2, 3)
assert found == 16 * (5 * 10**19 + 1), (
    f"10**20 + 1 numbers, two ranks, stage 3: {found}, not {16 * (5 * 10**19 + 1)}: exactly, so "
    "by whole numbers")
for wrong in ((-1, 4, 0), (10, 0, 0), (10, 4, 4), (10, 4, -1)):
    try:
        memory(*wrong)
    except ValueError as error:
        print("As it should be, ValueError:", error)
    else:
        raise AssertionError(f"memory{wrong}: no ValueError")

# %% nbgrader={"grade_id": "memory-most", "points": 1}
for limit, stage, expected in ((160, 0, 10), (159, 0, 9), (76, 1, 10), (75, 1, 9), (62, 2, 10),
                               (48, 3, 12), (47, 3, 8), (15, 3, 0), (0, 0, 0)):
    found = most(limit, 4, stage)
    assert found == expected, f"{limit} bytes, 4 ranks, stage {stage}: {found}, not {expected}"
found = most(16 * 10**20 + 15, 4, 3)
assert found == 4 * 10**20, (
    f"16 * 10**20 + 15 bytes, 4 ranks, stage 3: {found}, not {4 * 10**20}: exactly, so by whole "
    "numbers")
for wrong in ((-1, 4, 0), (10, 0, 0), (10, 4, 4), (10, 4, -1)):
    try:
        most(*wrong)
    except ValueError as error:
        print("As it should be, ValueError:", error)
    else:
        raise AssertionError(f"most{wrong}: no ValueError")

# %% [markdown]
# ## 4. In your words (2 points)
#
# A model of 2.5 billion parameters is to be trained with Adam in mixed precision on 8 GPUs of 24
# GB each. Activations of one small batch take 6 GB. A step accumulates the gradients of four
# small batches on each GPU. Which stage do you take (0 is data parallelism), and why neither the
# stage before nor the next one? Compare the three: what a GPU holds, in GB, counted as in
# exercise 3 and with the activations (messages need no room of their own: they go out in small
# pieces); how many times in a step it sends as many numbers as there are weights (an all-reduce
# counts as two, a reduce-scatter or an all-gather as one); where it waits for messages. Then: a
# colleague has written that stage by hand. Name two tests that it must pass before it trains for
# a month, and for each a mistake that it would find.

# %% [markdown] nbgrader={"grade_id": "which-stage", "points": 2, "solution": true}
# One point for the decision with its numbers. Data parallelism holds 16 bytes a parameter, 40 GB:
# too much without any activations. Stage 1 holds 2 + 2 + 12/8 = 5.5, 13.75 GB, with activations
# 19.75 of 24 GB: it fits. Stage 2 holds 2 + 14/8 = 3.75, about 9.4 GB. In units of the weights'
# bytes times 7/8: data parallelism and stage 1 send 2 in a step, if gradients are added up on
# each GPU and sent once. Stage 2 keeps only shards of gradients, so each small batch has its own
# reduce-scatter: 4 + 1. (Stage 3 gathers twice and reduces once for each: 12.) So stage 1; the
# next one sends more, for memory that nobody needs. Stage 2 is right, too, if somebody says that
# 4.25 GB are too little for what the formula leaves out (peaks, fragments), and what it costs. (A
# flat copy of all gradients, as a short solution of exercise 1 makes it, would take 5 GB more,
# 24.75 in all: so stage 1 fits only because its messages go out in pieces.) All three wait for
# gradients at the end of the backward pass, as far as messages didn't go out during it; with four
# small batches, data parallelism and stage 1 can send only during the last one, stage 2 during
# each. Stages 1 and 2 wait once more: the all-gather comes after the update, when there is no
# backward pass left to hide it behind. (In both each GPU updates an eighth, so the update itself
# is shorter.)
#
# One point for two tests, each with a mistake that it finds and the loss doesn't show. The weights
# after several steps against one process that has all examples, in float64, on 1, 2 and more
# ranks, with sizes that the number of ranks doesn't divide, parameters without gradients, momentum
# or Adam (plain SGD doesn't see a state that is lost). Equal weights on all ranks, exactly. Then:
# a checkpoint that is resumed equals a run without a break, on another number of ranks too;
# clipping uses the norm of the whole gradient; memory and messages, measured, are those of the
# formulas.
