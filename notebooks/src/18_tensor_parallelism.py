# %% [markdown]
# # 18 · Tensor parallelism
#
# In data parallelism each rank computes whole layers, for its share of the examples. But a layer
# may be too large for one device, or there may be only one example. Then each rank can hold *a part
# of every large layer*, and all ranks work on the same examples. That is **tensor parallelism**.
# *What must the ranks send, so that the result is that of one process?*
#
# ![Two ranks, one below the other. Both have the input 1, 2. Rank 0 has the first two columns of A,
# finds 3 and −2 in the middle, ReLU makes them 3 and 0, and its two rows of B give 3 and 6. Rank 1
# has the other columns and rows and finds 2 and 4. The all-reduce gives both 5 and
# 10.](src/drawings/two_matrices.svg)
#
# > **What you'll do:** divide two matrices among two ranks, then each block of a transformer; leave
# > out one of the sums, and see what notices.
# >
# > **What you'll learn:** why the first matrix is cut by columns and the second by rows; what is
# > sent forward, and what backward; how to test a divided layer.
# >
# > **What you need:** chapter 17 for the network, 14 for processes, 16 for `autograd.Function`, 03
# > for the ring, no GPU, and PyTorch 2.13 or newer: `make setup TORCH=1` installs it. Reading takes
# > {reading time}, running less than a minute on two cores.

# %% tags=["torch"]
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers import your_turn
from helpers.compare import largest_difference
from ranks import ranks
from transformer import Transformer

# %% [markdown]
# ## Two matrices on two ranks
#
# An MLP is two matrices with an activation function between them. Here is a small one, with whole
# numbers, so that we can compute everything by hand. The input `x` is one token with two numbers:

# %%
x = torch.tensor([[1.0, 2]])
A = torch.tensor([[1.0, 2, 0, -1],
                  [1, -2, 2, 1]])
B = torch.tensor([[1.0, 2],
                  [3, 1],
                  [0, 1],
                  [2, 0]])

middle = F.relu(x @ A)
y = middle @ B
print("x @ A: ", (x @ A).tolist())
print("middle:", middle.tolist())
print("y:     ", y.tolist())

# %% [markdown]
# Now two ranks do it, as in the picture. Each has two of the four columns of `A`, so it finds two
# of the four numbers in the middle. ReLU takes each number alone, so nothing needs to be sent here.
# Each number in the middle is multiplied by one row of `B`, so a rank needs only the two rows that
# belong to its numbers. Their product is as long as `y`, but it is only a part of the sum. An
# all-reduce adds up both parts:

# %%
def two_matrices():
    rank = dist.get_rank()
    columns = A.chunk(2, dim=1)[rank]
    rows = B.chunk(2, dim=0)[rank]
    part = F.relu(x @ columns) @ rows
    total = part.clone()
    dist.all_reduce(total)
    return part, total


for rank, (part, total) in enumerate(ranks(two_matrices)):
    print(f"rank {rank}: its part is {part.tolist()}, the sum {total.tolist()}")
    assert torch.equal(total, y)

# %% [markdown]
# So **two matrices need one all-reduce**, and no rank needs a whole matrix. A rank's columns or
# rows are its **shard** of the matrix, as in chapter 16. A tensor that is the same on all ranks,
# such as `x`, is **replicated**. One that is only a term of a sum over the ranks, such as `part`,
# is **partial**.
#
# Could `A` also be cut by rows? Each rank then needs only one of the two numbers of `x`, and its
# product has one term of each of the four numbers of `x @ A`. **Predict:** if each rank applies
# ReLU to its product, and then these are added up, is the sum equal to `middle`?

# %% tags=["predict"]
def rows_first():
    rank = dist.get_rank()
    number = x.chunk(2, dim=1)[rank]
    row = A.chunk(2, dim=0)[rank]
    return number @ row


part_0, part_1 = ranks(rows_first)
print("sum of the parts:     ", (part_0 + part_1).tolist())
print("ReLU first, then sum: ", (F.relu(part_0) + F.relu(part_1)).tolist())
print("sum first, then ReLU: ", F.relu(part_0 + part_1).tolist())

# %% [markdown]
# <details><summary>What came out</summary>
#
# It isn't. The second number of `x @ A` is 2 − 4, so ReLU should make it 0. But one rank has the 2
# and the other has the −4, and ReLU keeps the 2. So the parts must be added up before ReLU.
#
# </details>
#
# An activation function needs finished sums. If rows came first, there would have to be an
# all-reduce in the middle, too. **So the first matrix is cut by columns and the second by rows**
# (M. Shoeybi et al., *Megatron-LM*, 2019, arXiv:1909.08053, section 3).
#
# ## What is sent backward?
#
# To train, we need the gradients of `A` and `B`, and also that of `x`, because in a network other
# layers come before these two. Let the loss be the sum of `y`, so that the gradient of `y` is all
# ones. Both ranks have `y`, so both compute the same loss and know this gradient without any
# message. From there each rank goes backward through its own rows and columns, from right to left:
#
# ![The same two ranks, from right to left. Both have the gradient 1, 1 of y. Rank 0 finds 3, 0 in
# the middle, and for x 3, 3. Rank 1 finds 1, 2 in the middle, and for x −2, 4. The all-reduce gives
# both 1, 7.](src/drawings/two_matrices_backward.svg)
#
# On the way a rank finds the gradients of its own columns and rows, without the other rank. But `x`
# was used by both ranks, so its gradient is a sum, and each rank has found only one part of it. The
# layers before need the whole sum. So there are two exchanges, one in each direction:
#
# | | forward | backward |
# | --- | --- | --- |
# | `copy_to_ranks`, before the first matrix | `x` stays as it is | all gradients are added up |
# | `sum_over_ranks`, after the second | all parts are added up | the gradient stays as it is |
#
# ### Your turn: backward through a copy
#
# Write the backward pass of `copy_to_ranks` before you scroll on. It gets the gradient that *this*
# rank has found, and returns the one that goes on to the layers before. Leave the tensor that it
# gets as it is, because it isn't yours: autograd may need it elsewhere. The folded cell only tests
# your function, on two ranks and on three.

# %% tags=["fold", "your-turn"]
# define: cases for your function: the ranks' gradients, and what is due on each rank
def try_on_one_rank(gradients):  # of all ranks
    mine = torch.tensor(gradients[dist.get_rank()])
    returned = backward_of_copy(mine)
    return {"returned": returned, "given, afterwards": mine}


def backward_of_copy_on_ranks(*gradients):
    return ranks(try_on_one_rank, gradients, world=len(gradients))


on_two = ([3.0, 3.0], [-2.0, 4.0])  # rank 0's gradient, rank 1's
due_on_two = [{"returned": [1.0, 7.0], "given, afterwards": [3.0, 3.0]},
              {"returned": [1.0, 7.0], "given, afterwards": [-2.0, 4.0]}]
on_three = ([1.0], [10.0], [100.0])
due_on_three = [{"returned": [111.0], "given, afterwards": [1.0]},
                {"returned": [111.0], "given, afterwards": [10.0]},
                {"returned": [111.0], "given, afterwards": [100.0]}]
cases = [(on_two, due_on_two), (on_three, due_on_three)]

# %% tags=["your-turn"]
def backward_of_copy(gradient):
    """The sum of all ranks' gradients; `gradient` itself stays as it is."""
    ...


your_turn(backward_of_copy_on_ranks, cases, stubs=[backward_of_copy])

# %% [markdown]
# Here are ours. As in chapter 16, a `torch.autograd.Function` has both passes of an operation. Each
# of these two does forward what the other does backward:

# %%
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
    def forward(ctx, x):
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


copy_to_ranks = CopyToRanks.apply
sum_over_ranks = SumOverRanks.apply

# %% [markdown]
# With them autograd goes through the matrices on both ranks. First the gradients of one process:

# %%
def leaf(tensor):
    """A copy that gets a gradient."""
    return tensor.clone().requires_grad_()


whole_x = leaf(x)
whole_A = leaf(A)
whole_B = leaf(B)
y = F.relu(whole_x @ whole_A) @ whole_B
y.sum().backward()
grad_x = whole_x.grad
grad_A = whole_A.grad
grad_B = whole_B.grad
print("gradient of x:", grad_x.tolist())

# %% [markdown]
# And now those of two ranks, each with its columns and rows:

# %%
def both_passes():
    rank = dist.get_rank()
    my_x = leaf(x)
    columns = leaf(A.chunk(2, dim=1)[rank])
    rows = leaf(B.chunk(2, dim=0)[rank])
    part = F.relu(copy_to_ranks(my_x) @ columns) @ rows
    y = sum_over_ranks(part)
    y.sum().backward()
    return my_x.grad, columns.grad, rows.grad


for rank, (of_x, of_columns, of_rows) in enumerate(ranks(both_passes)):
    print(f"rank {rank}: gradient of x", of_x.tolist())
    assert torch.equal(of_x, grad_x)
    assert torch.equal(of_columns, grad_A.chunk(2, dim=1)[rank])
    assert torch.equal(of_rows, grad_B.chunk(2, dim=0)[rank])

# %% [markdown]
# Why doesn't `sum_over_ranks` add up gradients backward, too? Because all ranks compute the *same*
# loss from the same `y`. If each rank's gradient of `y` were added, that one loss would count once
# for each rank.
#
# ## Two layers
#
# Now as layers, a **column-parallel** and a **row-parallel** one. PyTorch's `nn.Linear` stores its
# matrix transposed, as `[outputs, inputs]`. So what was a column of our `A` is a row of `weight`,
# and a column layer cuts along dimension 0. It also takes its shard of the bias, which has one
# number for each output. A shard is a copy, so that the whole weight can be freed. (Here each rank
# first builds the whole network. One that is too large must be built in parts.)

# %%
def my_shard(tensor, dim):
    """A copy of this rank's shard, cut along `dim`."""
    k = dist.get_world_size()
    return tensor.detach().chunk(k, dim)[dist.get_rank()].clone()


class ColumnLinear(nn.Module):
    def __init__(self, whole):  # an nn.Linear
        super().__init__()
        self.weight = nn.Parameter(my_shard(whole.weight, 0))  # [outputs / k, inputs]
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(my_shard(whole.bias, 0))

    def forward(self, x):
        return F.linear(copy_to_ranks(x), self.weight, self.bias)

# %% [markdown]
# A row layer cuts `weight` along dimension 1, that of the inputs. The bias belongs to the whole
# sum, so each rank keeps all of it. But where must it be added? Here are two versions. Each gets
# four ones, divided among the ranks, all its weights are 1, and its bias is 10. **Predict:** what
# does each of them return on two ranks, and on four?

# %% tags=["predict"]
class RowLinear(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(my_shard(whole.weight, 1))  # [outputs, inputs / k]
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return sum_over_ranks(F.linear(x, self.weight)) + self.bias


class BiasOnEveryRank(RowLinear):
    def forward(self, x):
        return sum_over_ranks(F.linear(x, self.weight, self.bias))


def sum_of_four_ones(layer_class):
    whole = nn.Linear(4, 1)
    nn.init.constant_(whole.weight, 1)
    nn.init.constant_(whole.bias, 10)
    layer = layer_class(whole)
    my_ones = my_shard(torch.ones(4), 0)
    return layer(my_ones).item()


sums = []
for layer_class in [RowLinear, BiasOnEveryRank]:
    for world in [2, 4]:
        on_ranks = ranks(sum_of_four_ones, layer_class, world=world)
        print(f"{layer_class.__name__} on {world} ranks:", on_ranks)
        sums.append(on_ranks)

# %% tags=["fold"]
# check: what came out
assert sums == [[14] * 2, [14] * 4, [24] * 2, [44] * 4]

# %% [markdown]
# <details><summary>What came out</summary>
#
# The first returns 14. The second adds the bias on every rank, *before* the all-reduce, so that it
# counts twice on two ranks and four times on four.
#
# </details>
#
# No error says so, and in a network whose biases begin at 0 even the first outputs are right.

# %% [markdown]
# ## Attention, by heads
#
# In attention there is a softmax between the matrices, which doesn't take each number alone. But
# each *head* works alone: its attention weights come from its own part of the queries and keys. So
# we cut between heads. The matrices of queries, keys and values are cut by columns, so that a rank
# has all that its heads need. The output projection is cut by rows.
#
# ![A block, from left to right, on two ranks. Both have the whole norm. Then rank 0 has heads 0 and
# 1, rank 1 heads 2 and 3. After another whole norm each has half of the MLP. Four bars join the
# ranks: before attention and before the MLP a sum backward, after each of them a sum
# forward.](src/drawings/block_on_ranks.svg)
#
# What goes from layer to layer, the **hidden states**, is whole on every rank, and so are norms,
# embeddings and the output layer. They get the same input everywhere, so they compute the same
# everywhere. And all ranks call the same layers in the same order, so that their messages, which
# have no names (chapter 14), match. The attention of [transformer.py](transformer.py) needs no
# change, because it stores the width of a head and finds from it how many heads its matrices have.
# So there can't be more ranks than heads.

# %%
def divide(net, column, row):
    for block in net.blocks:
        attention = block.attention
        attention.query = column(attention.query)
        attention.key = column(attention.key)
        attention.value = column(attention.value)
        attention.join = row(attention.join)
        block.mlp.up = column(block.mlp.up)
        block.mlp.down = row(block.mlp.down)

# %% [markdown]
# ## A transformer on 1, 2 and 4 ranks
#
# Our transformer has two blocks with four heads and width 16, and learns the text of chapter 17.
# All ranks get *the same* batch, 8 pieces of 32 letters. First one process, in float64: the logits,
# the loss and all gradients.

# %% tags=["fold", "trains"]
# define: `make_net()`, `make_batch(step)` and `loss_of(net, x, y)`, like chapter 17's
text = Path("../LICENSE").read_text()
alphabet = sorted(set(text))
ids = torch.tensor([alphabet.index(letter) for letter in text])


def make_net():
    torch.manual_seed(18)
    return Transformer(len(alphabet), width=16, heads=4, layers=2, tokens=32).double()


def make_batch(step):
    """Eight pieces of the text, and for each letter in them the letter that comes next."""
    torch.manual_seed(step)
    first = torch.randint(len(ids) - 32, (8, 1))
    positions = first + torch.arange(32)
    return ids[positions], ids[positions + 1]


def loss_of(net, x, y):
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())

# %% tags=["trains"]
def first_pass(net):
    x, y = make_batch(0)
    logits = net(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {"logits": logits.detach(), "loss": loss.detach(), "gradients": gradients}


def by_one_process():
    return first_pass(make_net())


whole = ranks(by_one_process, world=1)[0]
print(f"one process: loss {whole['loss']:.3f}")

# %% [markdown]
# Then the same with divided blocks. To compare, the folded function `joined` joins the shards of
# all ranks, in a column layer along dimension 0 of the weight, in a row layer along dimension 1.

# %% tags=["fold"]
# define: `joined(tensors)`, {name: this rank's shard, or what is whole} -> {name: whole}
cut_along = {"query.weight": 0, "key.weight": 0, "value.weight": 0, "join.weight": 1,
             "up.weight": 0, "up.bias": 0, "down.weight": 1}


def joined(tensors):
    found = dict(tensors)
    for name, tensor in tensors.items():
        for ending, dim in cut_along.items():
            if name.endswith(ending):
                shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
                dist.all_gather(shards, tensor)
                found[name] = torch.cat(shards, dim)
    return found

# %% tags=["trains"]
def by_ranks(column, row):
    net = make_net()
    divide(net, column, row)
    found = first_pass(net)
    found["gradients"] = joined(found["gradients"])
    return found


for world in [1, 2, 4]:
    worst = 0
    for found in ranks(by_ranks, ColumnLinear, RowLinear, world=world):
        for what in ["logits", "loss", "gradients"]:
            worst = max(worst, largest_difference(found[what], whole[what]))
    print(f"{world} ranks: loss {found['loss']:.3f}, all equal to 1e-12: {worst < 1e-12}")
    assert worst < 1e-12

# %% [markdown]
# Logits, loss and all gradients are those of one process. The embeddings come before all blocks,
# and their gradients are right, so the gradient of the blocks' input is right as well.
#
# ### PyTorch's
#
# In PyTorch a plan says how each layer is cut, and `parallelize_module` does it. The parameters of
# these layers become **DTensors**, which know how they are divided: `Shard(0)` is cut along
# dimension 0, `Replicate()` is whole on every rank, and `Partial()` waits for its sum. Their
# gradients are DTensors, too, and `full_tensor` joins them. The layers' outputs, and so the logits,
# are ordinary tensors. A **device mesh** says which ranks take part, here all.

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def by_pytorch():
    net = make_net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.join": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in net.blocks:
        parallelize_module(block, mesh, plan)

    found = first_pass(net)
    for name, gradient in found["gradients"].items():
        if isinstance(gradient, DTensor):
            found["gradients"][name] = gradient.full_tensor()
    return found


ours = ranks(by_ranks, ColumnLinear, RowLinear)[0]
for theirs in ranks(by_pytorch):
    worst = 0
    for what in ["logits", "loss", "gradients"]:
        worst = max(worst, largest_difference(theirs[what], ours[what]))
    print(f"PyTorch's: loss {theirs['loss']:.3f}, equal to ours to 1e-12: {worst < 1e-12}")
    assert worst < 1e-12

# %% [markdown]
# [tensor_parallel.py](tensor_parallel.py) is the module that you keep. Its functions and layers
# have the same names as ours. They also work in a group of some ranks, and raise an error if sizes
# don't divide.

# %% tags=["fold"]
# check: the module's layers find the same gradients
import tensor_parallel

kept = ranks(by_ranks, tensor_parallel.ColumnLinear, tensor_parallel.RowLinear)[0]
assert largest_difference(kept["gradients"], ours["gradients"]) == 0

# %% [markdown]
# ## Without `copy_to_ranks`
#
# Now we leave out one of the two exchanges, `copy_to_ranks`. Then a column layer is a plain layer
# with fewer outputs, as one might well write it. **Predict:** are the logits right? Is the loss
# right? Which gradients are wrong, of the two blocks and of what comes before and after them?

# %% tags=["predict"]
class ColumnWithoutSum(ColumnLinear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


without_sum = ranks(by_ranks, ColumnWithoutSum, RowLinear)
right_names = []  # by rank
for rank, found in enumerate(without_sum):
    right = []
    for name, gradient in found["gradients"].items():
        if largest_difference(gradient, whole["gradients"][name]) < 1e-12:
            right.append(name)
    print(f"rank {rank}: loss {found['loss']:.3f}; of {len(found['gradients'])} gradients only "
          "these are right:")
    print("   ", *right)
    right_names.append(right)

# %% tags=["fold"]
# check: what came out
for found, right in zip(without_sum, right_names):
    assert largest_difference(found["logits"], whole["logits"]) < 1e-12
    assert largest_difference(found["loss"], whole["loss"]) < 1e-12
    wrong = set(found["gradients"]) - set(right)
    assert len(wrong) == 24
    for name in right:
        assert name.startswith(("blocks.1.mlp.", "norm.", "output."))
    for name in wrong:
        assert not name.startswith(("blocks.1.mlp.", "norm.", "output."))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Logits and loss are right. So are the gradients of the last MLP, and of what comes after it: a
# norm and the output layer. All 24 others are wrong.
#
# </details>
#
# Logits and loss are computed forward, where nothing is missing. Backward, the last MLP gets the
# right gradient of its output, and finds its own gradients by itself. But the gradient of its
# *input* lacks what the other rank would add, so that everything before it gets a wrong one. No
# error says so. **A test of one MLP that looks at its output and its own gradients passes.**
#
# Does the training show it? We train for 100 steps with the sum and without, and take the loss of a
# new batch. Then each rank saves the network, as one would do after a training: it joins the
# divided weights, and adds its own copy of what is whole on every rank.

# %% tags=["trains"]
def after_training(column):
    net = make_net()
    divide(net, column, RowLinear)
    adam = torch.optim.Adam(net.parameters(), lr=0.03)
    for step in range(100):
        adam.zero_grad()
        loss_of(net, *make_batch(step)).backward()
        adam.step()
    with torch.no_grad():
        loss = loss_of(net, *make_batch(1000)).item()
    return loss, joined(net.state_dict())

# %% [markdown]
# One process loads what a rank has saved, and should find that rank's loss of the new batch.
# **Predict:** do the ranks' losses, or those of the loaded networks, show that the sum is missing?

# %% tags=["predict", "trains"]
results = {}
for column in [ColumnLinear, ColumnWithoutSum]:
    print(column.__name__)
    results[column] = []
    for rank, (loss, saved) in enumerate(ranks(after_training, column)):
        net = make_net()
        net.load_state_dict(saved)
        with torch.no_grad():
            loaded = loss_of(net, *make_batch(1000)).item()
        print(f"    rank {rank}: loss {loss:.3f}, saved and loaded {loaded:.3f};",
              f"a weight of the last norm: {saved['norm.weight'][0]:.3f}")
        results[column].append((loss, loaded, saved["norm.weight"]))

# %% tags=["fold", "trains"]
# check: what came out
for loss, loaded, _ in results[ColumnLinear]:
    assert abs(loaded - loss) < 1e-12
for loss, loaded, _ in results[ColumnWithoutSum]:
    assert abs(loaded - loss) > 0.01
(loss_of_0, _, norm_of_0), (loss_of_1, _, norm_of_1) = results[ColumnLinear]
assert loss_of_0 == loss_of_1
assert torch.equal(norm_of_0, norm_of_1)
(loss_of_0, _, norm_of_0), (loss_of_1, _, norm_of_1) = results[ColumnWithoutSum]
assert loss_of_0 != loss_of_1
assert not torch.equal(norm_of_0, norm_of_1)

# %% [markdown]
# <details><summary>What came out</summary>
#
# One rank's loss doesn't show it: without the sum each rank finds even a *lower* loss here.
# But with the sum both ranks find the same loss, to the last bit, and their copies of the last norm
# are equal. Without it the ranks' losses differ, and so do these copies, and what was saved has
# another loss than either rank found.
#
# </details>
#
# In the first step, all that comes before the last MLP gets wrong gradients, different ones on each
# rank. So from the second step on the ranks have other hidden states, and then everything is wrong,
# the last norm too. A saved network consists of this rank's own copies and of *both* ranks' shards.
# These were never trained together.
#
# **So a falling loss is no test.** Compare the gradient of the input with that of one process, and,
# during training, compare the ranks' losses with each other. (A mistake that is the same on all
# ranks keeps these equal. Exercise 1 shows some.) Ranks can drift apart in two more ways, when they
# clip gradients or drop numbers at random. Chapter 20 has both.
#
# ## What is sent?
#
# The folded function takes the place of `dist.all_reduce` during a step, and notes what is sent.
# Hidden states are `[8, 32, 16]`: 8 sequences, 32 tokens, width 16, and 8 bytes per number.
# **Predict:** how many all-reduces are there in our two blocks, forward and backward, and of how
# many bytes is each? (Count the layers in `divide`, not the bars in the drawing, where one bar
# stands for all layers that have the same input.)

# %% tags=["fold"]
# define: `sent_in_a_step(net)`, the bytes of each all-reduce, of both passes
def sent_in_a_step(net):
    sent = []
    original = dist.all_reduce

    def noted(tensor, *args, **options):
        sent.append(tensor.nbytes)
        original(tensor, *args, **options)

    dist.all_reduce = noted  # until the end of this step
    loss = loss_of(net, *make_batch(0))
    forward = list(sent)
    sent.clear()
    loss.backward()
    dist.all_reduce = original
    return forward, sent

# %% tags=["predict"]
def sent_by_our_layers():
    net = make_net()
    divide(net, ColumnLinear, RowLinear)
    return sent_in_a_step(net)


forward, backward = ranks(sent_by_our_layers)[0]
print("forward: ", forward)
print("backward:", backward)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Each has 32,768 bytes. Forward there are two per block. Backward there are four per block, because
# attention has three column layers, and each adds up the gradient of its own input.
#
# </details>
#
# The three layers of attention have the same input, so one sum would do: copy the input once,
# before all three. Exercise 2 does it, and then there are **four all-reduces per block, two forward
# and two backward**, as in the drawing and in the paper. Each is the size of the hidden states. In
# a ring a rank sends $2(k-1)/k$ times as many bytes as the array has (chapter 03). So it sends in a
# step
#
# $$4 \cdot \text{blocks} \cdot \frac{2(k-1)}{k} \cdot \text{tokens} \cdot \text{width} \cdot
# \text{bytes per number}.$$
#
# How long does that take? Let us compute it for 8 GPUs, 32 blocks of width 4,096, 8 sequences of
# 4,096 tokens and 2 bytes per number. Inside a machine an A100 sends 300 GB/s, by NVLink. Between
# machines each GPU has a network card of 25 GB/s. For comparison, this step's computation: a block
# has $12 \cdot \text{width}^2$ weights. Per token a weight takes 2 operations forward, one
# multiplication and one addition, and 4 backward (chapter 17), together 6. We assume
# 156 · 10¹² operations a second, half of an A100's peak in bfloat16.

# %%
k = 8
tokens = 8 * 4096
bytes_of_one = 2 * (k - 1) / k * tokens * 4096 * 2  # all-reduce
sent = 4 * 32 * bytes_of_one
print(f"each GPU sends {sent / 1e9:.1f} GB in a step")
print(f"    inside a machine, 300 GB/s: {sent / 300e9:.1f} s")
print(f"    between machines,  25 GB/s: {sent / 25e9:.1f} s")
operations = 6 * 32 * 12 * 4096 ** 2 * tokens / k
print(f"and computes for {operations / 156e12:.1f} s")

# %% [markdown]
# So inside a machine the messages take about a fifth of the computing time, or more, because a
# message gets at most the full rate of its link. Between machines they take longer than this step's
# computation. In the forward pass the next layer needs the sum at once, so it can't be hidden
# behind other work, as DDP hides its buckets. **That is why tensor parallelism wants the fast links
# inside a machine.**
#
# ## What is held?
#
# The reason for all this was memory. How much does a rank hold in its blocks? We count the bytes of
# the weights, and of the **activations**, by a short form of chapter 17's `bytes_kept`.

# %% tags=["fold"]
# define: `bytes_kept(net, function, *inputs)`, what autograd keeps, without net's parameters
def bytes_kept(net, function, *inputs):
    parameters = {p.untyped_storage()._cdata for p in net.parameters()}  # addresses
    kept = {}  # by its address, how many bytes were saved

    def save(tensor):
        memory = tensor.untyped_storage()
        if memory._cdata not in parameters:
            kept[memory._cdata] = memory.nbytes()
        return tensor

    def use(tensor):
        return tensor

    with saved_tensors_hooks(save, use):
        function(*inputs)
    return sum(kept.values())

# %%
def bytes_held():
    net = make_net()
    divide(net, ColumnLinear, RowLinear)
    of_weights = sum(p.nbytes for p in net.blocks.parameters())
    hidden = torch.ones(8, 32, 16).double().requires_grad_()
    return of_weights, bytes_kept(net.blocks, net.blocks, hidden)


one_weights, one_activations = ranks(bytes_held, world=1)[0]
for world in [1, 2, 4]:
    weights, activations = ranks(bytes_held, world=world)[0]
    print(f"{world} ranks: {weights:,} bytes of weights ({weights / one_weights:.2f}),",
          f"{activations:,} of activations ({activations / one_activations:.2f})")

# %% [markdown]
# The weights are divided, except for norms and the biases of row layers. Of the activations only
# those *between* the two matrices are divided. What comes before and after them, such as the norms'
# inputs, is whole on every rank. **Sequence parallelism** divides this by tokens: the copy becomes
# an all-gather, and the sum a reduce-scatter (V. Korthikanti et al., 2022, arXiv:2205.05198,
# section 4.2). How it is written, and how the vocabulary is divided, is in deeper: Tokens and the
# vocabulary.
#
# ## Summary
#
# - Each rank has some columns of the first matrix and the rows of the second that belong to them.
#   In between nothing is sent, because an activation function takes each number alone, and
#   attention each head.
# - Forward, the parts of the output are added up after the second matrix. Backward, the gradients
#   of the input are added up before the first.
# - Without the backward sum outputs, loss and the gradients of the *last* divided pair are right.
#   All gradients before it are wrong, without an error. A test must look at the gradient of the
#   input.
# - If attention copies its input once, there are four all-reduces per block, each the size of the
#   hidden states. So tensor parallelism needs fast links.
#
# Next, chapter 19: how to divide a network across machines, where these messages would cost too
# much. There each rank has whole layers, and sends only between neighbours.
#
# **Further reading.** Section 3 of the Megatron-LM paper: its figures 3 and 4 show our two
# exchanges, and the four of a block. PyTorch's tutorial *Large Scale Transformer model training
# with Tensor Parallel*.

# %% [markdown]
# ## Exercises
#
# 1. **Four wrong blocks.** The cells below have a right block, four wrong ones, and a test. Say of
#    each whether it passes the test, before you run it. Then write a stricter test, which only the
#    right one passes.
# 2. **One sum instead of three.** Divide the network so that attention adds up the gradient of its
#    input only once. Show that all gradients are those of one process, and count again. (After
#    `module.register_forward_pre_hook(function)` PyTorch calls `function(module, inputs)` before
#    each forward pass, and what it returns becomes the input.)
# 3. **Against data parallelism**, on paper. The two matrices of an MLP of width $h$ and the four of
#    attention have $12 h^2$ weights together. In data parallelism their gradients are added up once
#    a step. For how many tokens a step does a rank send the same number of bytes in both ways? How
#    many sequences of 4,096 tokens is that for $h = 4{,}096$?

# %%
bias = torch.tensor([1.0, 5.0])


def right(x, columns, rows, bias):
    part = F.relu(copy_to_ranks(x) @ columns) @ rows
    return sum_over_ranks(part) + bias


def not_copied(x, columns, rows, bias):
    part = F.relu(x @ columns) @ rows
    return sum_over_ranks(part) + bias


def copied_twice(x, columns, rows, bias):
    part = F.relu(copy_to_ranks(copy_to_ranks(x)) @ columns) @ rows
    return sum_over_ranks(part) + bias


def half_of_the_bias_inside(x, columns, rows, bias):
    part = F.relu(copy_to_ranks(x) @ columns) @ rows
    return sum_over_ranks(part + bias / 2)


class SumInBothPasses(SumOverRanks):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def sum_in_both_passes(x, columns, rows, bias):
    part = F.relu(copy_to_ranks(x) @ columns) @ rows
    return SumInBothPasses.apply(part) + bias


blocks = [right, not_copied, copied_twice, half_of_the_bias_inside, sum_in_both_passes]

# %% [markdown]
# And the test, which knows what one process finds:

# %%
def passes(block):
    rank = dist.get_rank()
    my_x = leaf(torch.tensor([[1.0, 2]]))
    columns = leaf(A.chunk(2, dim=1)[rank])
    rows = leaf(B.chunk(2, dim=0)[rank])
    y = block(my_x, columns, rows, leaf(bias))
    y.sum().backward()
    right_y = torch.equal(y, torch.tensor([[6.0, 15]]))
    right_columns = torch.equal(columns.grad, grad_A.chunk(2, dim=1)[rank])
    right_rows = torch.equal(rows.grad, grad_B.chunk(2, dim=0)[rank])
    return right_y and right_columns and right_rows


for block in blocks:
    print(f"{block.__name__:24} passes: {all(ranks(passes, block))}")

# %% [markdown]
# ### Answer to *Your turn*
#
# `all_reduce` works in place, so it gets a copy.

# %% tags=["solution", "your-turn"]
def backward_of_copy(gradient):
    total = gradient.clone()
    dist.all_reduce(total)
    return total


your_turn(backward_of_copy_on_ranks, cases, stubs=[backward_of_copy])

# %% [markdown]
# ### Answer 1
#
# Three of them pass. `not_copied` and `copied_twice` have the right output and the right gradients
# of their matrices, but the gradient of `x` lacks the other rank's part, or counts twice.
# `half_of_the_bias_inside` adds up two halves of the bias, so the output is right, but the gradient
# of the bias is half of what it should be, on all ranks alike. The test looked at neither of these
# two gradients.

# %% tags=["solution"]
whole_x, whole_A, whole_B, whole_bias = leaf(x), leaf(A), leaf(B), leaf(bias)
whole_y = F.relu(whole_x @ whole_A) @ whole_B + whole_bias
weights_of_y = torch.tensor([1.0, 3.0])  # so that its gradient isn't just ones
(whole_y * weights_of_y).sum().backward()
whole_y = whole_y.detach()
of_x, of_A, of_B, of_bias = whole_x.grad, whole_A.grad, whole_B.grad, whole_bias.grad


def passes_all(block):
    rank = dist.get_rank()
    my_x = leaf(x)
    columns = leaf(A.chunk(2, dim=1)[rank])
    rows = leaf(B.chunk(2, dim=0)[rank])
    my_bias = leaf(bias)
    y = block(my_x, columns, rows, my_bias)
    (y * weights_of_y).sum().backward()
    right_y = torch.equal(y, whole_y)
    right_x = torch.equal(my_x.grad, of_x)
    right_columns = torch.equal(columns.grad, of_A.chunk(2, dim=1)[rank])
    right_rows = torch.equal(rows.grad, of_B.chunk(2, dim=0)[rank])
    right_bias = torch.equal(my_bias.grad, of_bias)
    return right_y and right_x and right_columns and right_rows and right_bias


for block in blocks:
    print(f"{block.__name__:24} passes: {all(ranks(passes_all, block))}")
    assert all(ranks(passes_all, block)) == (block is right)

# %% [markdown]
# ### Answer 2
#
# The column layers don't copy any more. Instead a hook copies the input of attention, and that of
# the MLP. The gradients of the three layers' inputs are then added up on the rank, by autograd,
# before they are sent.

# %% tags=["solution"]
def copy_first(module, inputs):
    return copy_to_ranks(inputs[0])


def with_one_copy():
    net = make_net()
    divide(net, ColumnWithoutSum, RowLinear)
    for block in net.blocks:
        block.attention.register_forward_pre_hook(copy_first)
        block.mlp.register_forward_pre_hook(copy_first)
    forward, backward = sent_in_a_step(net)
    net.zero_grad()
    gradients = first_pass(net)["gradients"]
    return len(forward), len(backward), joined(gradients)


for forward, backward, gradients in ranks(with_one_copy):
    print(f"{forward} all-reduces forward, {backward} backward")
    assert forward == backward == 4  # two per block
    assert largest_difference(gradients, whole["gradients"]) < 1e-12

# %% [markdown]
# ### Answer 3
#
# Both are all-reduces, so $2(k-1)/k$ and the bytes per number cancel. Data parallelism adds up $12
# h^2$ numbers per block, tensor parallelism four times $n h$ for $n$ tokens. These are equal for $n
# = 3h$. With $h = 4{,}096$ that is 12,288 tokens, three sequences. With more tokens a step tensor
# parallelism sends more. (But it divides the weights, and data parallelism doesn't.)
