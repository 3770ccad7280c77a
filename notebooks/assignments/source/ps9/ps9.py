# %% [markdown]
# # Assignment 9: the divided model in PyTorch
#
# **You will** write a column and a row layer whose gradients are those of one process, the list of
# one pipeline stage that may hold only so many micro-batches, and the sums that make the gradients
# of a mesh right.
#
# **You need** chapters 18 to 20, and PyTorch (`make setup TORCH=1`). **Time**: about two hours.
# **Points**: 12, of which 2 are for words.
#
# **You may use** anything in PyTorch. Of `torch.distributed`: `get_rank`, `get_world_size`,
# `broadcast`, `all_reduce`, `all_gather`, `all_gather_single`, `reduce_scatter`,
# `reduce_scatter_single` and `barrier`, with or without `async_op=True`. (Before PyTorch 2.13 the
# two with *single* were `all_gather_into_tensor` and `reduce_scatter_tensor`.) Call them as
# `dist.all_reduce(...)`. When it is marked there is nothing else: no `send`, no groups of some
# ranks. (Exercise 3 has a function that sums over a group.)
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
# **When something is wrong**: as long as a cell isn't written, its tests end with
# `NotImplementedError`. If one rank waits for a message that another doesn't send, a test ends
# after 30 seconds with `TimeoutError`. (A busy computer may take as long to start new processes:
# run the cell again before you look for a mistake.) If their messages have different lengths, gloo
# may end the process (`TerminatedWorkerError`), or the tensors hold something else.

# %% tags=["given"]
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def copy(tensor):
    return None if tensor is None else tensor.detach().clone().numpy()


def my_part(tensor, dim):
    """A copy of this rank's part of a tensor that is cut along `dim`: rank 0 has the first part."""
    k = dist.get_world_size()
    return tensor.detach().chunk(k, dim)[dist.get_rank()].clone()


# %% [markdown]
# `ranks` runs a function in several processes and returns what each returned; it is chapter 14's.
# To try your code, give `on_each` a function and one list of arguments for each rank. `logged` runs
# a function and returns the messages that it sent, with how many numbers this rank put into each.

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
            log.append((name, sum(t.numel() for t in tensors)))
            return inner(*args, **options)
        return call

    names = ["all_gather", "all_gather_single", "all_reduce", "barrier", "broadcast",
             "reduce_scatter", "reduce_scatter_single"]
    kept = {name: getattr(dist, name) for name in names}
    try:
        for name, inner in kept.items():
            setattr(dist, name, noting(name.removesuffix("_single"), inner))
        function(*given, log.append)
    finally:
        for name, inner in kept.items():
            setattr(dist, name, inner)
    return log


ranks(dist.get_rank, world=4, seconds=300)  # the processes start now, and stay

# %% [markdown]
# ## 1. A column and a row layer (4 points)
#
# Both are made from an `nn.Linear`, with a bias or without, that nobody uses afterwards. All ranks
# compute on the same examples, and each finds the same loss, so the gradient of what is whole on
# all ranks is complete on each. The number of ranks divides whatever is cut.
#
# `ColumnLinear(linear, gather)`:
#
# 1. `.weight` and `.bias` are parameters: the rows of the weight and the numbers of the bias that
#    belong to this rank's part of the outputs. A bias that isn't there is `None`.
# 2. It is called with the whole `x`, `[..., inputs]`, of one dimension or more. It returns this
#    rank's part of the outputs, `[..., outputs / ranks]`. If `gather` is true, it returns all
#    outputs, in their order, on all ranks.
# 3. Forward it sends nothing, but with `gather` one all-gather, of its part. Backward, if `x` needs
#    a gradient, it sends one all-reduce of that gradient, and else nothing: the gather sends
#    nothing backward. (Autograd doesn't call a function's `backward` if no input needs a gradient.)
#
# `RowLinear(linear)`:
#
# 1. `.weight` has the columns that belong to this rank's part of the *inputs*. `.bias` is whole on
#    all ranks, or `None`.
# 2. It is called with this rank's part of `x`, `[..., inputs / ranks]`, and returns the whole
#    outputs.
# 3. Forward it sends one all-reduce of the outputs, backward nothing.
#
# After the backward pass all gradients are those of one process: of weights and biases, as far as
# this rank has them, and of the input. `x` may be used elsewhere, too, as in a transformer's
# `x + layers(x)`. All of that holds for one rank as well, which sends the same messages.
#
# Autograd doesn't look into messages: write a `torch.autograd.Function` for each exchange, in the
# same cell. About thirty-five lines, most of them for three such functions.


# %% tags=["ranks"] nbgrader={"grade_id": "layers", "solution": true}
class ColumnLinear(nn.Module):
    """A linear layer of which each rank has some outputs."""

    def __init__(self, linear, gather):
        super().__init__()
        ### BEGIN SOLUTION
        self.gather = gather
        self.weight = nn.Parameter(my_part(linear.weight, 0))
        self.bias = None if linear.bias is None else nn.Parameter(my_part(linear.bias, 0))
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        y = F.linear(CopyToRanks.apply(x), self.weight, self.bias)
        return GatherFromRanks.apply(y) if self.gather else y
        ### END SOLUTION


class RowLinear(nn.Module):
    """A linear layer of which each rank has some inputs."""

    def __init__(self, linear):
        super().__init__()
        ### BEGIN SOLUTION
        self.weight = nn.Parameter(my_part(linear.weight, 1))
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        ### END SOLUTION

    def forward(self, x):
        ### BEGIN SOLUTION
        y = SumOverRanks.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class GatherFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        return my_part(gradient, -1)
        ### END SOLUTION


# %% [markdown]
# The tests call your classes through this function: one rank's training of some layers, with
# $\tanh$ between them. A layer is "column", "gathered" (a column layer with `gather`) or "row", with
# its whole weight and bias. Where the output is as long as `x`, `x` is added, as in a transformer.
# `note` is called when a forward pass has ended.


# %% tags=["driver"]
def train_layers(layers, steps, wants_x, note):
    """([(output, gradient of x, gradients of weight and bias of each layer), ...] for each step,
    weight and bias of each layer at the end)."""
    made = []
    for kind, weight, bias in layers:
        linear = nn.Linear(*weight.shape[::-1], bias is not None, dtype=torch.float64)
        for p, array in zip(linear.parameters(), (weight, bias)):
            p.data.copy_(torch.tensor(array))
        made.append(RowLinear(linear) if kind == "row" else
                    ColumnLinear(linear, kind == "gathered"))
    both = [[layer.weight, layer.bias] for layer in made]
    optimizer = torch.optim.SGD([p for pair in both for p in pair if p is not None], lr=0.1)
    history = []
    for x, y in steps:
        optimizer.zero_grad()
        x = torch.tensor(x, requires_grad=wants_x)
        output = x
        for i, layer in enumerate(made):
            output = layer(torch.tanh(output) if i else output)
        note("forward pass ended")
        if output.shape == x.shape:
            output = output + x
        (output - torch.tensor(y)).pow(2).mean().backward()
        gradients = [[p if p is None else copy(p.grad) for p in pair] for pair in both]
        history.append((copy(output), copy(x.grad), gradients))
        optimizer.step()
    return history, [[copy(p) for p in pair] for pair in both]


# %% [markdown]
# One layer with the weights 1 and 3 and the biases 5 and 6 turns 2 into 7 and 12. With the targets
# 6 and 10 the slopes of the mean squared error are 1 and 2. Each is the gradient of a bias; twice
# that is the gradient of a weight; and $1 \cdot 1 + 2 \cdot 3 = 7$ is that of the input, of which
# rank 0 finds 1 and rank 1 finds 6.

# %%
tiny = [["gathered", np.array([[1.0], [3.0]]), np.array([5.0, 6.0])]]
example = [np.array([[2.0]]), np.array([[6.0, 10.0]])]

# Column, then row, for x of three numbers, and what one process finds. The output is added to x.
rng = np.random.default_rng(18)
pair = [["column", rng.normal(size=(4, 3)), rng.normal(size=4)],
        ["row", rng.normal(size=(3, 4)), rng.normal(size=3)]]
batch = [rng.normal(size=(5, 3)), rng.normal(size=(5, 3))]
up, up_bias, down, down_bias, x = [
    torch.tensor(array, requires_grad=True)
    for array in (pair[0][1], pair[0][2], pair[1][1], pair[1][2], batch[0])]
whole_output = torch.tanh(x @ up.T + up_bias) @ down.T + down_bias + x
(whole_output - torch.tensor(batch[1])).pow(2).mean().backward()


def ignore(word):
    pass


# %% nbgrader={"grade_id": "layers-values", "points": 2}
for rank, (history, _) in enumerate(on_each(train_layers, [[tiny, [example], True, ignore]] * 2)):
    output, _, gradients = history[0]
    assert np.allclose(output, [7, 12]), f"rank {rank}: 7 and 12, not {output}"
    found = [array.item() for array in gradients[0]]
    expected = [[2, 1], [4, 2]][rank]
    assert np.allclose(found, expected), \
        f"rank {rank}: the gradients of weight and bias are {found}, not {expected}"
for rank, (history, _) in enumerate(on_each(train_layers, [[pair, [batch], True, ignore]] * 2)):
    output, _, gradients = history[0]
    mine = slice(2 * rank, 2 * rank + 2)
    for what, found, expected in (
            ("output", output, whole_output.detach()),
            ("gradient of the column layer's weight", gradients[0][0], up.grad[mine]),
            ("gradient of the column layer's bias", gradients[0][1], up_bias.grad[mine]),
            ("gradient of the row layer's weight", gradients[1][0], down.grad[:, mine]),
            ("gradient of the row layer's bias", gradients[1][1], down_bias.grad)):
        assert found.shape == expected.shape and np.allclose(found, expected), \
            f"column, then row, rank {rank}: the {what} is {found}, not {expected}"

# %% nbgrader={"grade_id": "layers-input", "points": 1}
for rank, (history, _) in enumerate(on_each(train_layers, [[tiny, [example], True, ignore]] * 2)):
    _, of_x, _ = history[0]
    assert np.allclose(of_x, 7), f"rank {rank}: the gradient of x is {of_x}, not 7"
for rank, (history, _) in enumerate(on_each(train_layers, [[pair, [batch], True, ignore]] * 2)):
    _, of_x, _ = history[0]
    assert np.allclose(of_x, x.grad), \
        f"column, then row, rank {rank}: the gradient of x is {of_x}, not {x.grad}"

# %% nbgrader={"grade_id": "layers-messages", "points": 1}
for layers, step, expected in (
        (tiny, example, [("all_gather", 1), "forward pass ended", ("all_reduce", 1)]),
        (pair, batch, [("all_reduce", 15), "forward pass ended", ("all_reduce", 15)])):
    for wants_x in (True, False):
        due = expected if wants_x else expected[:-1]
        for rank, log in enumerate(on_each(logged, [[train_layers, layers, [step], wants_x]] * 2)):
            assert log == due, f"rank {rank}, x needs a gradient: {wants_x}: {log}, not {due}"

# %% [markdown]
# ## 2. A stage that holds few micro-batches (3 points)
#
# A stage *holds* a micro-batch from its forward pass to its backward pass. In 1F1B the first of
# eight stages holds up to eight. Suppose that the memory has room for `most`.
#
# `steps_of(stage, stages, micro_batches, most)` returns the list of one stage, of pairs
# `("forward", i)` and `("backward", i)`. These rules say which it is:
#
# 1. Each micro-batch `i`, from 0 on, has one forward and one backward pass, both in the order of
#    the micro-batches.
# 2. The stage never holds more than `most` micro-batches, and never more than 1F1B does: one for
#    each stage from this one to the last, this one included.
# 3. As long as it may hold one more, and there is one left, its next step is a forward pass, and
#    else a backward pass.
#
# Stages count from 0. Raise `ValueError` if there is no such stage, or if `micro_batches` or `most`
# is below 1. About ten lines.


# %% nbgrader={"grade_id": "schedule", "solution": true}
def steps_of(stage, stages, micro_batches, most):
    """The forward and backward passes of one stage, in their order."""
    ### BEGIN SOLUTION
    if not 0 <= stage < stages or micro_batches < 1 or most < 1:
        raise ValueError(f"stage {stage} of {stages}, {micro_batches} micro-batches, most={most}")
    warm_up = min(micro_batches, stages - stage, most)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(micro_batches):
        steps.append(("backward", i))
        if warm_up + i < micro_batches:
            steps.append(("forward", warm_up + i))
    return steps
    ### END SOLUTION


# %% [markdown]
# F0 is short for the forward pass of micro-batch 0, B0 for its backward pass.


# %%
def in_short(steps):
    return " ".join(kind[0].upper() + str(i) for kind, i in steps)


# %% nbgrader={"grade_id": "schedule-steps", "points": 2}
for given, expected in (((3, 4, 3, 8), "F0 B0 F1 B1 F2 B2"),
                        ((1, 4, 4, 8), "F0 F1 F2 B0 F3 B1 B2 B3"),
                        ((1, 4, 4, 2), "F0 F1 B0 F2 B1 F3 B2 B3"),
                        ((0, 2, 3, 1), "F0 B0 F1 B1 F2 B2")):
    found = in_short(steps_of(*given))
    assert found == expected, f"steps_of{given}: {found}, not {expected}"
assert steps_of(0, 1, 1, 1) == [("forward", 0), ("backward", 0)], "a list of pairs"

# %% nbgrader={"grade_id": "schedule-edges", "points": 1}
found = in_short(steps_of(0, 4, 2, 8))
assert found == "F0 F1 B0 B1", f"only two micro-batches: {found}, not F0 F1 B0 B1"
for wrong in ((4, 4, 8, 8), (-1, 4, 8, 8), (0, 4, 0, 8), (0, 4, 8, 0)):
    try:
        steps_of(*wrong)
    except ValueError as error:
        print("As it should be, ValueError:", error)
    else:
        raise AssertionError(f"steps_of{wrong}: no ValueError")

# %% [markdown]
# ## 3. Which group sums which gradient (3 points)
#
# On a mesh of shape `(data ranks, tensor ranks)` each row is a tensor group, with the same examples
# and different parts of matrices. Each column is a data group, with the same parts and different
# examples, equally many. On 2 × 2:
#
# | | tensor rank 0 | tensor rank 1 |
# | --- | --- | --- |
# | **data rank 0** | rank 0 | rank 1 |
# | **data rank 1** | rank 2 | rank 3 |
#
# `sum_over` sums over one of this rank's two groups. (It gathers from all ranks and adds up those
# of the group, so *all* ranks of the mesh have to call it, in the same order.)


# %% tags=["given"]
def sum_over(group, tensor, shape):
    """The sum of `tensor` over this rank's group, "data" or "tensor": a new tensor."""
    data_ranks, tensor_ranks = shape
    parts = [torch.empty_like(tensor) for _ in range(data_ranks * tensor_ranks)]
    dist.all_gather(parts, tensor.contiguous())
    row, column = divmod(dist.get_rank(), tensor_ranks)
    members = {"data": parts[column::tensor_ranks],
               "tensor": parts[row * tensor_ranks:(row + 1) * tensor_ranks]}
    return torch.stack(members[group]).sum(0)


# %% [markdown]
# `synchronize(gradients, kinds, shape)` is called after the backward pass. `gradients` is a list of
# tensors, what this rank has found for each parameter from the mean loss of its own examples.
# `kinds` says of each parameter which it is:
#
# - `"sharded"`: each tensor rank has a part of the parameter (of a column layer's weight, for
#   example), and the gradient of its part.
# - `"replicated"`: each rank has the whole parameter, and tensor ranks have found the same, finished
#   gradient, as that of a row layer's bias.
# - `"partial"`: each rank has the whole parameter, but each tensor rank has seen only some of the
#   tokens in it, as a LayerNorm does in sequence parallelism. So each has found one term of the sum
#   that is the gradient.
#
# It returns two things, on each rank:
#
# 1. A list of the gradients of the mean loss over all data ranks' examples, of a sharded parameter
#    this rank's part. You may write into the tensors that you got, or make new ones.
# 2. The norm of the whole gradient, as a `float`: the root of the sum of the squares of all its
#    numbers, in which each number of each parameter counts once.
#
# About fourteen lines.


# %% tags=["ranks"] nbgrader={"grade_id": "mesh", "solution": true}
def synchronize(gradients, kinds, shape):
    """(this rank's gradients for the whole batch, the norm of the whole gradient)."""
    ### BEGIN SOLUTION
    means = []
    square = 0
    for gradient, kind in zip(gradients, kinds):
        if kind == "partial":
            gradient = sum_over("tensor", gradient, shape)
        mean = sum_over("data", gradient, shape) / shape[0]
        means.append(mean)
        of_this = mean.square().sum()
        if kind == "sharded":
            of_this = sum_over("tensor", of_this, shape)
        square += of_this.item()
    return means, square ** 0.5
    ### END SOLUTION


# %% tags=["driver"]
def synchronize_arrays(gradients, kinds, shape):
    means, norm = synchronize([torch.tensor(array) for array in gradients], kinds, tuple(shape))
    return [copy(mean) for mean in means], norm


# %% [markdown]
# One parameter of each kind, on 2 × 2 (try 3 × 1 and 1 × 3 yourself). The sharded one has a number
# on each tensor rank, the others one number.

# %%
KINDS = ["sharded", "replicated", "partial"]
found_by = [[1.0, 3.0, 1.0], [5.0, 3.0, 2.0], [3.0, 5.0, 3.0], [7.0, 5.0, 4.0]]  # ranks 0 to 3
on_mesh = [[[np.array([number]) for number in numbers], KINDS, (2, 2)] for numbers in found_by]

# %% nbgrader={"grade_id": "mesh-gradients", "points": 2}
for rank, (means, _) in enumerate(on_each(synchronize_arrays, on_mesh)):
    for kind, mean, expected in zip(KINDS, means, ([2, 6][rank % 2], 4, 5)):
        assert np.allclose(mean, expected), f"rank {rank}, {kind}: {mean}, not {expected}"

# %% nbgrader={"grade_id": "mesh-norm", "points": 1}
for rank, (_, norm) in enumerate(on_each(synchronize_arrays, on_mesh)):
    assert isinstance(norm, float), f"rank {rank}: the norm is a {type(norm).__name__}"
    assert np.isclose(norm, 9), f"rank {rank}: the norm is {norm}, and 4 + 36 + 16 + 25 is 81"

# %% [markdown]
# ## 4. In your words (2 points)
#
# A model of 40 billion parameters is trained with Adam in mixed precision, 16 bytes for each
# parameter: weight, gradient and Adam's state. Data ranks shard nothing. There are four machines of
# eight GPUs of 80 GB, some of which must stay free, and links between machines are ten times slower
# than those inside. All activations of one micro-batch take 160 GB; count all of them as divided
# among stages and tensor ranks, as with sequence parallelism, and stages as equally large. A step
# has 16 micro-batches, which the data ranks share equally.
#
# Choose data × pipeline × tensor and a schedule, and say which dimension is inside a machine.
# Compare your mesh with two others: what the fullest GPU holds, in GB, and how large the bubble is.
# Then: the training runs, no error is raised, and the loss falls. Name two wrong or missing sums
# that the program could contain all the same, and for each a test that finds it.

# %% [markdown] nbgrader={"grade_id": "which-mesh", "points": 2, "solution": true}
# One point for the mesh with its numbers. Parameters, gradients and state take 640 GB. 4 × 1 × 8
# needs 80 GB on each GPU, before any activations: too much. 2 × 2 × 8 needs 40 GB, and 10 GB for
# each micro-batch that a stage holds. Each data rank has 8 micro-batches. With 1F1B the first stage
# holds two, so 60 GB; with GPipe all eight, 120 GB. The bubble is 1 / (8 + 1), 11 %. 1 × 4 × 8
# needs 20 GB and 5 GB for each of up to four, so 40 GB: it fits, too, but with 16 micro-batches the
# bubble is 3 / 19, 16 %. 2 × 4 × 4 needs 40 GB and up to four times 10 GB: 80 GB, nothing is left.
# So 2 × 2 × 8 with 1F1B. Tensor is inside a machine, because each block sends forward and backward,
# and waits for it. Pipeline and data go over machines: an activation for each micro-batch, and
# gradients once a step, which can be sent during the backward pass. 1 × 4 × 8 is right, too, if
# somebody says what the room is for and what it costs.
#
# One point for two sums with a test each. For example: the input's gradient isn't summed over
# tensor in the column layer's backward pass (compare the gradient of the input, or of a layer
# before, with one process); replicated gradients are summed over tensor (ranks agree, so only one
# process finds it); gradients are divided by the tensor ranks (a mesh with different numbers of
# data and tensor ranks finds it, 2 × 2 doesn't); squares of replicated parameters count once for
# each tensor rank, or those of shards only on their own rank, so clipping takes another factor
# (compare the norm, in a step that is clipped). The test is in float64, against one process that
# has the whole batch, after some steps with SGD: Adam hides a constant factor. A loss that falls is
# no test, and ranks that agree aren't either.
