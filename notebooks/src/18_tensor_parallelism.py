# %% [markdown]
# # 18 · Tensor parallelism
#
# In data parallelism each rank computes whole layers, for its share of the examples. But a layer
# may be too large for one device. Then each rank can hold *a part of every large layer*, and all
# ranks work on the same examples. That is **tensor parallelism**. *What must the ranks send, so
# that the result is that of one process?*
#
# > **What you'll do:** divide two matrices among two ranks, then each block of a transformer; leave
# > out one of the sums, and see what notices.
# >
# > **What you'll learn:** how to cut the matrices of a block; what is sent forward, and what
# > backward; how to test a divided layer.
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
# Now two ranks do it. Each has two of the four columns of `A`, so it finds two of the four numbers
# in the middle. ReLU takes each number alone, so nothing needs to be sent here. Each number in the
# middle is multiplied by one row of `B`, so a rank needs only the two rows that belong to its
# numbers. Their product is as long as `y`, but it is only a part of the sum. An all-reduce adds up
# both parts:
#
# ![Two ranks, one below the other. Both have the input 1, 2. Rank 0 has the first two columns of A,
# finds 3 and −2 in the middle, ReLU makes them 3 and 0, and its two rows of B give 3 and 6. Rank 1
# has the other columns and rows and finds 2 and 4. The all-reduce gives both 5 and
# 10.](src/drawings/two_matrices.svg)
#
# A rank's columns or rows are its **shard** of the matrix, as in chapter 16. `my_shard` cuts a
# tensor into as many parts as there are ranks, and copies this rank's:

# %%
def my_shard(tensor, dim):
    """A copy of this rank's part of `tensor`, cut along `dim`."""
    k = dist.get_world_size()
    rank = dist.get_rank()
    return tensor.detach().chunk(k, dim)[rank].clone()


def two_matrices():
    columns = my_shard(A, 1)
    rows = my_shard(B, 0)
    my_middle = F.relu(x @ columns)
    part = my_middle @ rows
    total = part.clone()
    dist.all_reduce(total)
    return part, total


for part, total in ranks(two_matrices):
    print(f"the rank's part is {part.tolist()}, the sum {total.tolist()}")
    assert torch.equal(total, y)

# %% [markdown]
# So **two matrices need one all-reduce**, and no rank needs a whole matrix. A tensor that is the
# same on all ranks, such as `x`, is **replicated**. One that is only a term of a sum over the
# ranks, such as `part`, is **partial**.
#
# Could `A` also be cut by rows? Each rank then needs only one of the two numbers of `x`, and its
# product has one term of each of the four numbers of `x @ A`. **Predict:** if each rank applies
# ReLU to its product, and the results are added up, is the sum equal to `middle`?

# %% tags=["predict"]
def rows_first():
    number = my_shard(x, 1)
    rows = my_shard(A, 0)
    return number @ rows


part_0, part_1 = ranks(rows_first)
print("part of rank 0:       ", part_0.tolist())
print("part of rank 1:       ", part_1.tolist())
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
# layers come before these two. Let the loss be the sum of `y`. Then the gradient of `y` is all
# ones, and both ranks know it, because both have `y`. From there each goes backward through its own
# rows and columns, and finds their gradients without the other rank. But `x` was used by both
# ranks, so its gradient is a sum, and each rank has found only one part of it:
#
# ![From right to left. Both ranks have the gradient 1, 1 of y. Through its rows of B and its
# columns of A rank 0 finds 3, 3 as its part of the gradient of x, and rank 1 finds −2, 4. The
# all-reduce gives both 1, 7.](src/drawings/two_matrices_backward.svg)
#
# The layers before need the whole sum. So there are two exchanges, one in each direction:
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
# define: cases for your function: the ranks' gradients, and what each rank should return
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
# Here is ours. As in chapter 16, a `torch.autograd.Function` has both passes of an operation:

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


copy_to_ranks = CopyToRanks.apply

# %% [markdown]
# The other exchange does forward what this one does backward, and the other way round:

# %%
class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


sum_over_ranks = SumOverRanks.apply

# %% [markdown]
# Why doesn't it add up gradients, too? All ranks compute the *same* loss from the same `y`, so each
# rank already has the whole gradient of `y`. A sum over two ranks would double it.
#
# With both exchanges autograd goes through the matrices on each rank. First one process:

# %%
whole_x = x.clone().requires_grad_()
whole_A = A.clone().requires_grad_()
whole_B = B.clone().requires_grad_()
y = F.relu(whole_x @ whole_A) @ whole_B
y.sum().backward()

grad_x = whole_x.grad
grad_A = whole_A.grad
grad_B = whole_B.grad
print("gradient of x:", grad_x.tolist())

# %% [markdown]
# Now two ranks, each with its columns and rows. Their gradients should be the shards of the whole
# ones:

# %%
def both_passes():
    my_x = x.clone().requires_grad_()
    columns = my_shard(A, 1).requires_grad_()
    rows = my_shard(B, 0).requires_grad_()

    my_middle = F.relu(copy_to_ranks(my_x) @ columns)
    y = sum_over_ranks(my_middle @ rows)
    y.sum().backward()

    assert torch.equal(columns.grad, my_shard(grad_A, 1))
    assert torch.equal(rows.grad, my_shard(grad_B, 0))
    return my_x.grad


for of_x in ranks(both_passes):
    print("gradient of x:", of_x.tolist())
    assert torch.equal(of_x, grad_x)

# %% [markdown]
# ## Two layers
#
# Now as layers, a **column-parallel** and a **row-parallel** one. Each is made from an `nn.Linear`,
# of which it takes this rank's shard. PyTorch stores the matrix of an `nn.Linear` transposed, as
# `[outputs, inputs]`. So what was a column of our `A` is a row of `weight`, and a column layer cuts
# along dimension 0. It also cuts the bias, if there is one, which has one number for each output:

# %%
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
# A row layer cuts `weight` along dimension 1, that of the inputs. Its bias belongs to the whole
# sum, so each rank keeps all of it, and adds it *after* the all-reduce. If each of two ranks added
# it before, it would count twice. No error would say so, and as long as biases are 0 the outputs
# would even be right.

# %%
class RowLinear(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(my_shard(whole.weight, 1))  # [outputs, inputs / k]
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return sum_over_ranks(F.linear(x, self.weight)) + self.bias

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
# ranks: before attention and before the MLP, dashed, a sum in the backward pass, after each of them
# a sum in the forward pass.](src/drawings/block_on_ranks.svg)
#
# What goes from block to block, the **hidden states**, is whole on every rank. So are norms,
# embeddings and the output layer, which get the same input on all ranks and so compute the same.
#
# Our network is the transformer of chapter 17, with two blocks, four heads and width 16, in
# float64. The attention of [transformer.py](transformer.py) needs no change, because it stores the
# width of a head and finds from it how many heads its matrices have. (So there can't be more ranks
# than heads.)

# %% tags=["fold"]
# define: `make_net()`, `loss_of(net, x, y)` as in chapter 17, and `make_batch(step)`
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


def numbers_in_blocks():
    net = make_net()
    divide(net, ColumnLinear, RowLinear)
    return sum(p.numel() for p in net.blocks.parameters())


for world in [1, 2, 4]:
    on_ranks = ranks(numbers_in_blocks, world=world)
    print(f"{world} ranks: each has {on_ranks[0]:,} numbers of the blocks' parameters")

# %% [markdown]
# All matrices of the blocks are divided, and only norms and the biases of row layers are whole.
# (Here each rank first builds the whole network. One that is too large must be built in parts.)
#
# ## Is it equal to one process?
#
# All ranks get *the same* batch, 8 pieces of chapter 17's text, 32 letters each. First one process
# computes the loss and all gradients:

# %%
net = make_net()
x_text, y_text = make_batch(0)
loss = loss_of(net, x_text, y_text)
loss.backward()

whole_loss = loss.item()
whole_gradients = {}
for name, p in net.named_parameters():
    whole_gradients[name] = p.grad
print(f"loss {whole_loss:.3f}, {len(whole_gradients)} gradients")

# %% [markdown]
# Each rank then compares its gradients with these. Where it has only a shard, it cuts the whole
# gradient in the same way:

# %%
def right_gradients(net):
    """The names of the gradients that are those of one process."""
    names = []
    for name, p in net.named_parameters():
        expected = whole_gradients[name]
        if p.shape == expected.shape:
            pass  # a whole parameter
        elif p.shape[0] == expected.shape[0]:  # of a row layer, which has all outputs
            expected = my_shard(expected, 1)
        else:  # of a column layer
            expected = my_shard(expected, 0)
        if largest_difference(p.grad, expected) < 1e-12:
            names.append(name)
    return names

# %% [markdown]
# Here are the divided networks. Each rank returns its loss and these names:

# %%
def by_ranks(column, row):
    net = make_net()
    divide(net, column, row)
    loss = loss_of(net, x_text, y_text)
    loss.backward()
    return loss.item(), right_gradients(net)


for world in [1, 2, 4]:
    for loss, right in ranks(by_ranks, ColumnLinear, RowLinear, world=world):
        assert abs(loss - whole_loss) < 1e-12
        assert len(right) == len(whole_gradients)
    print(f"{world} ranks: loss {loss:.3f}, {len(right)} gradients right")

# %% [markdown]
# The loss and all gradients are those of one process, including those of the embeddings, which come
# before all blocks.
#
# [tensor_parallel.py](tensor_parallel.py) is the module that you keep. Its functions and layers
# have the same names as ours. They also work in a group of some ranks, and raise an error if sizes
# don't divide.

# %%
import tensor_parallel

of_the_module = ranks(by_ranks, tensor_parallel.ColumnLinear, tensor_parallel.RowLinear)
assert of_the_module == ranks(by_ranks, ColumnLinear, RowLinear)

# %% [markdown]
# ### PyTorch's
#
# In PyTorch a plan says how each layer is cut. The `*` stands for any block:

# %%
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

plan = {
    "blocks.*.attention.query": ColwiseParallel(),
    "blocks.*.attention.key": ColwiseParallel(),
    "blocks.*.attention.value": ColwiseParallel(),
    "blocks.*.attention.join": RowwiseParallel(),
    "blocks.*.mlp.up": ColwiseParallel(),
    "blocks.*.mlp.down": RowwiseParallel(),
}

# %% [markdown]
# `parallelize_module` divides the network by this plan over a **device mesh**, an arrangement of
# ranks. The parameters of these layers become DTensors, as in chapter 16. A DTensor knows how it is
# divided:

# %%
def divided_by_pytorch():
    net = make_net()
    mesh = init_device_mesh("cpu", (2,))  # two ranks, in a row
    return parallelize_module(net, mesh, plan)


def placements_of_up():
    net = divided_by_pytorch()
    return str(net.blocks[0].mlp.up.weight.placements)


print("up.weight is divided as", ranks(placements_of_up)[0])

# %% [markdown]
# `Shard(dim=0)` is what our column layer does. The gradients are DTensors, too. `full_tensor`
# gathers one from all ranks, so that we can compare it:

# %%
def gradients_by_pytorch():
    net = divided_by_pytorch()
    loss_of(net, x_text, y_text).backward()
    gradients = {}
    for name, p in net.named_parameters():
        gradients[name] = p.grad
        if isinstance(p.grad, DTensor):
            gradients[name] = p.grad.full_tensor()
    return gradients


for gradients in ranks(gradients_by_pytorch):
    assert largest_difference(gradients, whole_gradients) < 1e-12
print(len(gradients), "gradients, equal to those of one process")

# %% [markdown]
# ## Without `copy_to_ranks`
#
# Now we leave out one of the two exchanges, `copy_to_ranks`. Then a column layer is a plain layer
# with fewer outputs, which is how anyone might write it at first. **Predict:** is the loss right?
# Which gradients are right: of the two blocks, of the embeddings before them, of the norm and the
# output layer after them?

# %% tags=["predict"]
class ColumnWithoutSum(ColumnLinear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


on_ranks = ranks(by_ranks, ColumnWithoutSum, RowLinear)
loss, right = on_ranks[0]
print(f"loss {loss:.6f}, of one process {whole_loss:.6f}")
print(f"{len(right)} of {len(whole_gradients)} gradients are right:")
for name in right:
    print("   ", name)
assert on_ranks[1] == on_ranks[0]  # both ranks find the same

# %% [markdown]
# <details><summary>What came out</summary>
#
# The loss is right. So are the gradients of the last MLP, and of what comes after it: a norm and
# the output layer. All 24 others are wrong.
#
# </details>
#
# The loss is computed forward, where nothing is missing. Backward, the last MLP gets the right
# gradient of its output, and finds its own gradients by itself. But the gradient of its *input*
# lacks what the other rank would add, so that everything before it gets a wrong one. No error says
# so. **A test of one MLP that looks at its output and its own gradients passes.**
#
# Does the training show it? We train for 100 steps with the sum and without, and take each rank's
# loss of a new batch. **Predict:** are the losses without the sum higher? Are those of both ranks
# equal?

# %% tags=["predict", "trains"]
def train(column):
    net = make_net()
    divide(net, column, RowLinear)
    adam = torch.optim.Adam(net.parameters(), lr=0.03)
    for step in range(100):
        x, y = make_batch(step)
        adam.zero_grad()
        loss_of(net, x, y).backward()
        adam.step()
    x, y = make_batch(1000)
    return loss_of(net, x, y).item()


for column in [ColumnLinear, ColumnWithoutSum]:
    loss_0, loss_1 = ranks(train, column)
    print(f"{column.__name__}: rank 0 {loss_0:.3f}, rank 1 {loss_1:.3f},",
          f"equal: {loss_0 == loss_1}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Without the sum both ranks find even a *lower* loss here. But these two losses differ, and with
# the sum they are equal, to the last bit.
#
# </details>
#
# Both ranks get the same sums from all row layers. So their losses can differ only because their
# copies of what should be whole, such as norms and embeddings, have drifted apart: each rank's
# gradients lack what the *other* rank would add. The ranks no longer train one network.
#
# **So a falling loss is no test.** Compare the gradient of a layer's input with that of one
# process, and, during training, compare the ranks' losses with each other. (A mistake that is the
# same on all ranks keeps these equal. Exercise 1 shows some.)
#
# ## What is sent?
#
# The folded function takes the place of `dist.all_reduce` during a step, and notes what is sent.
# Hidden states are `[8, 32, 16]`: 8 sequences, 32 tokens, width 16, and 8 bytes per number.
# **Predict:** how many all-reduces are there in our two blocks, forward and backward, and of how
# many bytes is each?

# %% tags=["fold"]
# define: `sent_in_a_step(net)`, the bytes of each all-reduce, of both passes
def sent_in_a_step(net):
    sent = []
    original = dist.all_reduce

    def noted(tensor, *args, **options):
        sent.append(tensor.nbytes)
        original(tensor, *args, **options)

    dist.all_reduce = noted  # until the end of this step
    loss = loss_of(net, x_text, y_text)
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
# attention has three column layers, and each adds up the gradient of its own input. (In the drawing
# of the block one bar stands for all three.)
#
# </details>
#
# The three layers of attention have the same input, so one sum would do: copy the input once,
# before all three. Exercise 2 does it, and then there are **four all-reduces per block, two forward
# and two backward**, as in the drawing, and as Megatron-LM has it. Each is the size of the hidden
# states.
#
# How much is that in a large network? We take 8 GPUs, 32 blocks of width 4,096, 8 sequences of
# 4,096 tokens, and 2 bytes per number. In a ring a rank sends $2(k-1)/k$ times as many bytes as the
# array has (chapter 03). Inside a machine an A100 sends 300 GB/s, by NVLink. Between machines
# we take a network card of 25 GB/s for each GPU, and each GPU in a machine of its own:

# %%
k = 8
hidden_bytes = 8 * 4096 * 4096 * 2  # sequences, tokens, width, bytes per number
bytes_of_one = 2 * (k - 1) / k * hidden_bytes  # all-reduce
sent = 32 * 4 * bytes_of_one  # four in each block
print(f"the hidden states have {hidden_bytes / 1e9:.2f} GB")
print(f"each GPU sends {bytes_of_one / 1e9:.2f} GB in one all-reduce, {sent / 1e9:.1f} in a step")
print(f"at least {sent / 300e9:.1f} s inside a machine")
print(f"at least {sent / 25e9:.1f} s if each GPU is in a machine of its own")

# %% [markdown]
# In the forward pass the next layer needs the sum at once. So, unlike DDP's buckets, it can't
# simply be hidden behind other work, and all ranks wait for it. **That is why tensor parallelism
# belongs on the fast links inside a machine.**
#
# The hidden states are still whole on every rank, and so are the embeddings and the output layer.
# How to divide these as well is in deeper: Tokens and the vocabulary.
#
# ## Summary
#
# - Each rank has some columns of the first matrix and the rows of the second that belong to them.
#   In between nothing is sent, because an activation function takes each number alone, and
#   attention each head.
# - Forward, the parts of the output are added up after the second matrix. Backward, the gradients
#   of the input are added up before the first.
# - Without the backward sum the loss and the gradients of the *last* divided pair are right. All
#   gradients before it are wrong, without an error. A test must look at the gradient of the input.
# - If attention copies its input once, there are four all-reduces per block, each the size of the
#   hidden states. So tensor parallelism needs fast links.
#
# Next, chapter 19: how to divide a network across machines, where these messages would cost too
# much. There each rank has whole layers, and sends only to its neighbours.
#
# **Further reading.** Section 3 of the Megatron-LM paper: its figures 3 and 4 show our two
# exchanges, and the four of a block. PyTorch's tutorial *Large Scale Transformer model training
# with Tensor Parallel*.

# %% [markdown]
# ## Exercises
#
# 1. **Sums in wrong places.** Change `both_passes` in three ways: leave out `copy_to_ranks`; call
#    it twice, one around the other; add up gradients also in the backward pass of `sum_over_ranks`.
#    Before you run each, say: is `y` right? Which of the gradients of `x`, of the columns and
#    of the rows are wrong, and how? Are they equal on both ranks?
# 2. **One sum instead of three.** Divide the network so that attention adds up the gradient of its
#    input only once. Show that all gradients are those of one process, and count again. (After
#    `module.register_forward_pre_hook(function)` PyTorch calls `function(module, inputs)` before
#    each forward pass, and what it returns becomes the input.)

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
# In all three `y` is right. Without `copy_to_ranks` only the gradient of `x` is wrong: each rank
# has its own part. With two copies the sum, which is on both ranks, is added up once more, so the
# gradient of `x` is twice the right one. With the sum in both passes the loss counts twice, so all
# gradients are twice the right ones. The last two mistakes are the same on both ranks, so comparing
# the ranks doesn't show them.

# %% tags=["solution"]
def no_copy(x):
    return x


def two_copies(x):
    return copy_to_ranks(copy_to_ranks(x))


class SumInBothPasses(SumOverRanks):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def gradient_of_x(copy, add_up, times):
    """That of x; those of columns and rows are `times` the right ones."""
    my_x = x.clone().requires_grad_()
    columns = my_shard(A, 1).requires_grad_()
    rows = my_shard(B, 0).requires_grad_()
    y = add_up(F.relu(copy(my_x) @ columns) @ rows)
    y.sum().backward()
    assert y.tolist() == [[5, 10]]
    assert torch.equal(columns.grad, times * my_shard(grad_A, 1))
    assert torch.equal(rows.grad, times * my_shard(grad_B, 0))
    return my_x.grad.tolist()


print("no copy:           ", ranks(gradient_of_x, no_copy, sum_over_ranks, 1))
print("two copies:        ", ranks(gradient_of_x, two_copies, sum_over_ranks, 1))
print("sum in both passes:", ranks(gradient_of_x, copy_to_ranks, SumInBothPasses.apply, 2))

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
    return len(forward), len(backward), right_gradients(net)


for forward, backward, right in ranks(with_one_copy):
    print(f"{forward} all-reduces forward, {backward} backward, {len(right)} gradients right")
    assert forward == backward == 4  # two per block
    assert len(right) == len(whole_gradients)
