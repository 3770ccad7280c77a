# %% [markdown]
# # Deeper · Tokens and the vocabulary
#
# In chapter 18 each rank has a part of the matrices of all blocks. But what goes from block to
# block, the hidden states, is whole on every rank, and so are the two ends of the network: the
# embedding, and the output layer with its logits. *Can these be divided, too, and what must the
# ranks send then?* We divide the hidden states by tokens, and then both ends by the vocabulary.
# Each of these cuts has its own mistakes that raise no error.
#
# ![A block on two ranks, from left to right; grids of four tokens by four numbers. In the norm rank
# 0 has all numbers of tokens 0 and 1, rank 1 those of tokens 2 and 3. A bar, gather, leads to
# attention, where each rank has half of the numbers of all tokens. A bar, sum and scatter, leads to
# the next norm, again by tokens. Another gather leads to the MLP, by numbers, and another sum and
# scatter to the next block.](../src/drawings/block_by_tokens.svg)
#
# > **What you'll do:** divide a block by tokens, then the embedding, the output layer and the loss
# > by the vocabulary, and compare all gradients with those of one process.
# >
# > **What you'll learn:** what sequence parallelism sends and saves; which gradients are partial
# > then; a loss over a divided vocabulary from three numbers a token.
# >
# > **What you need:** chapters 17 and 18, no GPU, and PyTorch 2.13 or newer.
# > Reading takes {reading time}, running about 15 seconds.

# %% tags=["torch"]
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from helpers.compare import largest_difference

sys.path.insert(0, "..")  # where the course's programs are
import tensor_parallel
from ranks import ranks
from transformer import Block, Transformer

# %% [markdown]
# ## An all-reduce has two halves
#
# A ring all-reduce is a reduce-scatter, after which each rank has a part of the sum, and an
# all-gather, after which each has all of it (chapter 03). Here two ranks have a part of the sum for
# four tokens, one number a token. They add up by an all-reduce, and then in two halves:

# %%
parts = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 40])]


def sum_in_two_halves():
    part = parts[dist.get_rank()]
    total = part.clone()
    dist.all_reduce(total)

    mine = torch.empty(2)  # of this rank's tokens
    dist.reduce_scatter(mine, list(part.chunk(2)))
    gathered = [torch.empty(2), torch.empty(2)]
    dist.all_gather(gathered, mine)
    assert torch.equal(torch.cat(gathered), total)
    return total, mine


for rank, (total, mine) in enumerate(ranks(sum_in_two_halves)):
    print(f"rank {rank}: all-reduce {total.tolist()}, after the first half {mine.tolist()}")

# %% [markdown]
# Between the two halves each rank has only its own tokens. In a block of chapter 18 a sum is
# followed by an addition and a norm (and by dropout, where there is any), and all of these work on
# each token alone. So **the second half can wait until after the next norm**. Until then a rank
# computes and holds only its own tokens, as in the picture. That is called **sequence parallelism**
# (V. Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2).
#
# ## The two exchanges
#
# Hidden states are `[n, tokens, width]`, so we cut along dimension 1. What comes after a gather is
# used by each rank in its own way, as after `copy_to_ranks`. So each rank has found a part of the
# gradient of *all* tokens. These parts are added up, and each rank takes the sum for its own
# tokens. After a sum and scatter each rank knows the gradient of its own tokens, but it has
# computed with parts of all tokens. So the gradients are gathered. Each exchange does backward what
# the other does forward:

# %%
def gather(mine):
    """[n, tokens / k, width] -> [n, tokens, width]"""
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.cat(parts, dim=1)


def sum_and_scatter(part):
    """[n, tokens, width] -> [n, tokens / k, width]"""
    pieces = []  # one for each rank
    for piece in part.chunk(dist.get_world_size(), dim=1):
        pieces.append(piece.contiguous())
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces)
    return mine


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine):
        return gather(mine)

    @staticmethod
    def backward(ctx, gradient):
        return sum_and_scatter(gradient)


class SumAndScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return sum_and_scatter(part)

    @staticmethod
    def backward(ctx, gradient):
        return gather(gradient)


gather_tokens = GatherTokens.apply
sum_and_scatter_tokens = SumAndScatterTokens.apply

# %% [markdown]
# [tensor_parallel.py](../tensor_parallel.py), the module that you keep, has two functions of the
# same names. On the same input they should do the same, forward and backward:

# %%
def both_passes(gather, scatter):
    torch.manual_seed(dist.get_rank())
    mine = torch.randn(2, 4, 3).double().requires_grad_()
    part = torch.randn(2, 8, 3).double().requires_grad_()
    gathered = gather(mine)
    scattered = scatter(part)
    gathered.square().sum().backward()
    scattered.square().sum().backward()
    return gathered.detach(), scattered.detach(), mine.grad, part.grad


ours = ranks(both_passes, gather_tokens, sum_and_scatter_tokens)
theirs = ranks(both_passes, tensor_parallel.gather_tokens, tensor_parallel.sum_and_scatter_tokens)
for rank in [0, 1]:
    for found, expected in zip(ours[rank], theirs[rank]):
        assert torch.equal(found, expected)
print("gathered ", list(ours[0][0].shape), " gradient", list(ours[0][2].shape))
print("scattered", list(ours[0][1].shape), " gradient", list(ours[0][3].shape))

# %% [markdown]
# ## A block by tokens
#
# The column layers of chapter 18 began with `copy_to_ranks`. Now the gather comes before them, once
# for attention and once for the MLP, so they send nothing. The row layers end with
# `sum_and_scatter_tokens` instead of `sum_over_ranks`. Each rank adds the bias to its own tokens:

# %%
def my_part(tensor, dim):
    """A copy of this rank's part."""
    k = dist.get_world_size()
    if tensor.shape[dim] % k:
        raise ValueError(f"{tensor.shape[dim]} don't divide by {k} ranks")
    return tensor.detach().chunk(k, dim)[dist.get_rank()].clone()


class Columns(nn.Module):
    def __init__(self, whole):  # an nn.Linear
        super().__init__()
        self.weight = nn.Parameter(my_part(whole.weight, 0))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(my_part(whole.bias, 0))

    def forward(self, x):  # all tokens
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.weight = nn.Parameter(my_part(whole.weight, 1))
        self.bias = nn.Parameter(whole.bias.detach().clone())

    def forward(self, x):
        return sum_and_scatter_tokens(F.linear(x, self.weight)) + self.bias


class BlockByTokens(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.norm1 = block.norm1
        self.attention = block.attention
        self.attention.query = Columns(block.attention.query)
        self.attention.key = Columns(block.attention.key)
        self.attention.value = Columns(block.attention.value)
        self.attention.join = Rows(block.attention.join)
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.mlp.up = Columns(block.mlp.up)
        self.mlp.down = Rows(block.mlp.down)
        self.dropout = block.dropout

    def forward(self, x):  # [n, tokens / k, width], this rank's tokens
        x = x + self.dropout(self.attention(gather_tokens(self.norm1(x))))
        return x + self.dropout(self.mlp(gather_tokens(self.norm2(x))))

# %% [markdown]
# Is it the block of one process? We compare the output, the gradient of the input, and those of all
# parameters. The loss is the sum of all squares, so a rank adds up those of its own tokens, and the
# ranks' losses together are the whole loss.

# %%
def make_block():
    torch.manual_seed(18)
    return Block(width=16, heads=4).double()


def make_hidden():
    torch.manual_seed(0)
    return torch.randn(8, 32, 16).double()


block = make_block()
hidden = make_hidden().requires_grad_()
y = block(hidden)
y.square().sum().backward()
whole = {"y": y.detach(), "input": hidden.grad}
whole["gradients"] = {name: p.grad for name, p in block.named_parameters()}
print(f"one process: {len(whole['gradients'])} parameters")

# %% [markdown]
# The same on ranks. Gradients of shards are joined before we compare them:

# %%
cut_along = {"query.weight": 0, "key.weight": 0, "value.weight": 0, "join.weight": 1,
             "up.weight": 0, "up.bias": 0, "down.weight": 1,
             "token.weight": 0, "output.weight": 0, "output.bias": 0}


def joined(tensors):
    """{name: this rank's part} -> {name: whole}"""
    found = {}
    for name, tensor in tensors.items():
        last_two = ".".join(name.split(".")[-2:])
        if last_two in cut_along:
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, tensor)
            found[name] = torch.cat(parts, cut_along[last_two])
        else:
            found[name] = tensor
    return found


def by_tokens():
    block = BlockByTokens(make_block())
    hidden = my_part(make_hidden(), 1).requires_grad_()
    y = block(hidden)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in block.named_parameters()}
    return {"y": y.detach(), "input": hidden.grad, "gradients": joined(gradients)}

# %% [markdown]
# **Predict:** on two ranks, are the output and the gradient of the input right? For which of the 13
# parameters is the gradient wrong?

# %% tags=["predict"]
for rank, found in enumerate(ranks(by_tokens)):
    print(f"rank {rank}")
    for what in ["y", "input"]:
        expected = whole[what].chunk(2, dim=1)[rank]
        right = largest_difference(found[what], expected) < 1e-12
        print(f"    {what} equal to 1e-12: {right}")
        assert right
    wrong = []
    for name, gradient in found["gradients"].items():
        if largest_difference(gradient, whole["gradients"][name]) > 1e-12:
            wrong.append(name)
    print("    wrong gradients:", *wrong)

# %% tags=["fold"]
# check: what came out, on the last rank
norms = ["norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"]
assert sorted(wrong) == sorted([*norms, "attention.join.bias", "mlp.down.bias"])

# %% [markdown]
# <details><summary>What came out</summary>
#
# Output and gradient of the input are right. The gradients of both norms and of both row layers'
# biases are wrong.
#
# </details>
#
# The divided matrices have seen all tokens, by the gathers. But a norm and the bias of a row layer
# are whole on every rank, and each rank used them for its own tokens only. So its gradient is
# partial, because it lacks what the other tokens add. This is data parallelism over the tokens of a
# sequence, and it needs what data parallelism needs, **an all-reduce of these gradients after the
# backward pass**. They are added up, and not averaged, because there is one loss, of all tokens.

# %%
def add_up_partial(net):
    for name, p in net.named_parameters():
        last_two = ".".join(name.split(".")[-2:])
        if last_two not in cut_along:  # whole on every rank, used for its own tokens
            dist.all_reduce(p.grad)


def by_tokens_summed():
    block = BlockByTokens(make_block())
    hidden = my_part(make_hidden(), 1)
    block(hidden).square().sum().backward()
    add_up_partial(block)
    return joined({name: p.grad for name, p in block.named_parameters()})


for rank, found in enumerate(ranks(by_tokens_summed)):
    right = largest_difference(found, whole["gradients"]) < 1e-12
    print(f"rank {rank}: all gradients equal to 1e-12: {right}")
    assert right

# %% [markdown]
# If this sum is left out, no error says so. Each rank makes its own steps with its norms, and the
# copies drift apart. (In Megatron-LM's versions of 2024 the sum is in `_allreduce_layernorm_grads`,
# `megatron/core/distributed/finalize_model_grads.py`.)
#
# ## What is held?
#
# In chapter 18 the hidden states are whole on every rank, and autograd keeps some of them. So there
# only a part of the activations is divided. Now we count what autograd keeps for one block of both
# kinds. Chapter 17 has the formula for a whole block: for each token $16 \cdot \text{width} +
# \text{heads} \cdot \text{tokens} + 4$ numbers, which is 388 here, and the mask of attention.
# **Predict:** does each of two ranks hold half of the activations now? If not, what is still whole?

# %% tags=["predict"]
def divide_as_in_chapter_18(block):
    attention = block.attention
    attention.query = tensor_parallel.ColumnLinear(attention.query)
    attention.key = tensor_parallel.ColumnLinear(attention.key)
    attention.value = tensor_parallel.ColumnLinear(attention.value)
    attention.join = tensor_parallel.RowLinear(attention.join)
    block.mlp.up = tensor_parallel.ColumnLinear(block.mlp.up)
    block.mlp.down = tensor_parallel.RowLinear(block.mlp.down)


def bytes_kept(net, x):
    """What autograd keeps for net(x), without the parameters; memory counts once."""
    parameters = set()  # addresses
    for p in net.parameters():
        parameters.add(p.untyped_storage().data_ptr())
    kept = {}  # bytes, by address

    def note(tensor):
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in parameters:
            kept[memory.data_ptr()] = memory.nbytes()
        return tensor

    def as_it_is(tensor):
        return tensor

    with saved_tensors_hooks(note, as_it_is):
        net(x)
    return sum(kept.values())


def kept_in_both_ways():
    whole_states = make_block()
    divide_as_in_chapter_18(whole_states)
    all_tokens = make_hidden().requires_grad_()
    divided = BlockByTokens(make_block())
    my_tokens = my_part(make_hidden(), 1).requires_grad_()
    return bytes_kept(whole_states, all_tokens), bytes_kept(divided, my_tokens)


one, _ = ranks(kept_in_both_ways, world=1)[0]
chapter_18, ours = ranks(kept_in_both_ways)[0]
print(f"1 rank                          {one:,} bytes")
print(f"2 ranks, as in chapter 18, each {chapter_18:,} ({chapter_18 / one:.2f})")
print(f"2 ranks, by tokens, each        {ours:,} ({ours / one:.2f})")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Not quite: it is 0.54, where chapter 18's block has 0.59. The inputs of attention and of the MLP
# are still whole, because they were gathered, and a matrix keeps its input.
#
# </details>
#
# The two inputs are $2 \cdot \text{width}$ of the 388 numbers. All others are divided, so we can
# say to the byte what a rank keeps:

# %%
def kept_by_a_rank(k):
    gathered = 2 * 16  # numbers for each token
    numbers = (388 - gathered) / k + gathered
    mask = 32 * 32  # bytes
    return 8 * 8 * 32 * numbers + mask  # 8 bytes, 8 sequences, 32 tokens


assert kept_by_a_rank(1) == one
assert kept_by_a_rank(2) == ours
for k in [2, 4]:
    print(f"{k} ranks, by the formula: {kept_by_a_rank(k) / one:.3f}, and 1/k is {1 / k:.3f}")

# %% [markdown]
# The more ranks there are, the more the whole inputs count. The paper goes one step further. It
# keeps only the rank's own tokens of them, and gathers them once more in the backward pass. Then
# all is divided, but a block sends two more gathers (exercise 1).
#
# ## What is sent?
#
# We count the exchanges of one step, as chapter 18 did with its all-reduces. In the picture there
# are four in the forward pass.

# %%
def exchanges_of_a_step():
    """(name, bytes of all tokens' hidden states) of each exchange in a block."""
    sent = []
    all_gather = dist.all_gather
    reduce_scatter = dist.reduce_scatter

    def noted_gather(parts, mine):
        sent.append(("gather", sum(part.nbytes for part in parts)))
        all_gather(parts, mine)

    def noted_scatter(mine, pieces):
        sent.append(("scatter", sum(piece.nbytes for piece in pieces)))
        reduce_scatter(mine, pieces)

    block = BlockByTokens(make_block())
    hidden = my_part(make_hidden(), 1).requires_grad_()
    dist.all_gather = noted_gather  # until the end of this step
    dist.reduce_scatter = noted_scatter
    block(hidden).square().sum().backward()
    dist.all_gather = all_gather
    dist.reduce_scatter = reduce_scatter
    return sent


sent = ranks(exchanges_of_a_step)[0]
print("forward: ", sent[:4])
print("backward:", sent[4:])

# %% [markdown]
# There are four gathers and four scatters, each of the size of all hidden states. In a ring each of
# them sends $(k-1)/k$ of that, which is half of what an all-reduce sends. Chapter 18's block needs
# four all-reduces of this size, if attention copies its input once.
#
# **So dividing by tokens saves memory, and no more of the hidden states is sent** (the paper's
# section 4.2.2). What comes on top is small: the gradients of norms and biases, once a step, six
# times `width` numbers a block. But whoever gathers the inputs once more sends a quarter more, ten
# such exchanges instead of eight.
#
# ## The embedding, by its rows
#
# The vocabulary of a real model has tens of thousands of tokens, so that the embedding and the
# output layer are large matrices. We cut them as well. Each rank has the rows of *its* tokens of
# the vocabulary. It looks up those, and puts zeros where another rank has the row. So each rank has
# a part of the sum, and what follows is divided by tokens of the *sequence*. That is a sum and
# scatter, as after a row layer:

# %%
class VocabularyRows(nn.Module):
    def __init__(self, whole):  # an nn.Embedding
        super().__init__()
        self.weight = nn.Parameter(my_part(whole.weight, 0))

    def forward(self, tokens):  # [n, tokens], the same on all ranks
        size = len(self.weight)
        first = dist.get_rank() * size
        here = (tokens >= first) & (tokens < first + size)
        row = torch.where(here, tokens - first, 0)
        part = F.embedding(row, self.weight) * here.unsqueeze(2)  # zeros for another rank's tokens
        return sum_and_scatter_tokens(part)


def four_tokens():
    whole = nn.Embedding(6, 1)
    with torch.no_grad():
        whole.weight.copy_(torch.arange(6).reshape(6, 1) * 10)  # the row of token t is 10 t
    tokens = torch.tensor([[5, 0, 2, 3]])
    theirs = tensor_parallel.VocabularyEmbedding(whole)(tokens)  # all tokens, on every rank
    ours = VocabularyRows(whole)(tokens)
    assert torch.equal(gather(ours), theirs)
    return ours.flatten().tolist()


for rank, mine in enumerate(ranks(four_tokens)):
    print(f"rank {rank}: {mine}")

# %% [markdown]
# Rank 1 has the row of token 5, and rank 0 got it, because the first two places of the sequence are
# rank 0's. (The module's `VocabularyEmbedding` ends with a sum instead, for chapter 18's blocks.)
#
# Our `my_part` refuses a vocabulary that doesn't divide by the ranks, such as GPT-2's 50,257, which
# is odd. It must be **padded** first with rows that no token uses, whose logits the loss should
# leave out. Many networks use one matrix for both ends (**tied weights**). Both ends are cut in the
# same way, so that a rank can use one part for both, too.
#
# ## The loss from three numbers a token
#
# The output layer is a column layer, so that a rank gets the logits of its part of the vocabulary,
# for all tokens. There are many of them, for each token as many as the vocabulary is large, and
# they shouldn't be sent. The cross-entropy of a token with logits $z$ and the label $c$ is
#
# $$\log \sum_i e^{z_i - m} - (z_c - m), \quad m = \max_i z_i.$$
#
# (Without $m$ it is the same number, but an exponential may overflow.) Three numbers of it need the
# other ranks' logits: the largest logit, the sum of the exponentials, and the logit of the label,
# which one of the ranks has.
#
# ![Rank 0 has the logits 3 and 1, rank 1 has 5 and 2. The largest is 3 on rank 0 and 5 on rank 1,
# together 5. The sums of the exponentials, less 5, are 0.154 and 1.050, together 1.203. Rank 0 has
# the label's logit, 1 less 5, which is −4, and rank 1 has 0, together −4. The loss is log 1.203
# plus 4.](../src/drawings/three_numbers.svg)
#
# The largest must come first, because all ranks must subtract the same number. The loss doesn't
# depend on $m$, so no gradient goes through it. The two sums are `sum_over_ranks` of chapter 18:
# all ranks compute the same loss from them, so backward nothing is sent.

# %%
def my_labels(shifted, labels):
    """The number of each label, and 0 where another rank has it."""
    size = shifted.shape[-1]
    first = dist.get_rank() * size
    here = (labels >= first) & (labels < first + size)
    column = torch.where(here, labels - first, 0)
    found = shifted.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    return torch.where(here, found, 0.0)


def divided_loss(logits, labels):
    """[..., vocabulary / k], labels [...] -> the mean over all labels, on every rank."""
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    shifted = logits - largest.unsqueeze(-1)
    exponentials = tensor_parallel.sum_over_ranks(shifted.exp().sum(-1))
    of_label = tensor_parallel.sum_over_ranks(my_labels(shifted, labels))
    return (exponentials.log() - of_label).mean()


def loss_and_gradient(loss_function, logits, labels):
    part = my_part(logits, -1).requires_grad_()
    loss = loss_function(part, labels)
    loss.backward()
    return loss.detach(), part.grad


logits = torch.tensor([[3.0, 1, 5, 2]]).double().requires_grad_()
label = torch.tensor([1])
expected = F.cross_entropy(logits, label)
expected.backward()
print(f"one process: {expected:.4f}, gradient {[f'{g:.3f}' for g in logits.grad[0]]}")
for rank, (loss, gradient) in enumerate(ranks(loss_and_gradient, divided_loss, logits, label)):
    print(f"rank {rank}:      {loss:.4f}, gradient {[f'{g:.3f}' for g in gradient[0]]}")
    assert largest_difference(loss, expected) < 1e-12
    assert largest_difference(gradient, logits.grad.chunk(2, dim=1)[rank]) < 1e-12

# %% [markdown]
# Both ranks find the loss of one process, and each the gradient of its own logits. For each token
# three numbers are added up or compared, instead of a vocabulary's. (Section 3 of the Megatron-LM
# paper, M. Shoeybi et al., 2019, arXiv:1909.08053, joins output layer and loss for this reason.)
#
# What if we subtract something else? Here are two shorter versions. One subtracts nothing, so it
# sends one number less. The other subtracts what this rank can find by itself, the largest of
# *its* logits. **Predict:** which of the three losses are right for the logits 3, 1, 5, 2? And for
# 1003, 1001, 1005, 1002, whose loss is the same?

# %% tags=["predict"]
def nothing_subtracted(logits, labels):
    exponentials = tensor_parallel.sum_over_ranks(logits.exp().sum(-1))
    of_label = tensor_parallel.sum_over_ranks(my_labels(logits, labels))
    return (exponentials.log() - of_label).mean()


def its_own_largest(logits, labels):
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    exponentials = tensor_parallel.sum_over_ranks(shifted.exp().sum(-1))
    of_label = tensor_parallel.sum_over_ranks(my_labels(shifted, labels))
    return (exponentials.log() - of_label).mean()


small = logits.detach()
large = small + 1000
for loss_function in [divided_loss, nothing_subtracted, its_own_largest]:
    (of_small, _), _ = ranks(loss_and_gradient, loss_function, small, label)
    (of_large, _), _ = ranks(loss_and_gradient, loss_function, large, label)
    print(f"{loss_function.__name__:18} small logits {of_small:.3f}, large ones {of_large:.3f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Only the first has both right. With nothing subtracted the small logits are right, and the large
# ones give infinity, because $e^{1005}$ overflows. With its own largest both are 2.782, which is
# wrong.
#
# </details>
#
# The third is harder to notice, because it is a finite number for all logits, and the same on both
# ranks. So a divided loss needs two tests: large logits catch the second version, and ranks whose
# largest logits differ catch the third.
#
# ## All of it together
#
# The pieces fit each other. The embedding's sum and scatter leaves each rank its own tokens, which
# is what the blocks take. Before the output layer comes a gather, as before every column layer. The
# table of places is whole on every rank, and each uses the rows of its own tokens. So its gradient
# is partial, like those of the norms.

# %% tags=["trains"]
text = Path("../../LICENSE").read_text()
alphabet = sorted(set(text))  # 76 letters
letters = torch.tensor([alphabet.index(letter) for letter in text])
torch.manual_seed(0)
first = torch.randint(len(letters) - 32, (8, 1))
places = first + torch.arange(32)
x = letters[places]
labels = letters[places + 1]


def make_net():
    torch.manual_seed(18)
    return Transformer(len(alphabet), width=16, heads=4, layers=2, tokens=32).double()


def divide(net):
    net.token = VocabularyRows(net.token)
    net.output = Columns(net.output)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = BlockByTokens(block)


def forward(net, x):
    """This rank's logits, [n, tokens, vocabulary / k]."""
    my_places = my_part(torch.arange(32), 0)
    hidden = net.token(x) + net.place(my_places)  # [n, tokens / k, width]
    hidden = net.blocks(hidden)
    return net.output(gather_tokens(net.norm(hidden)))


def all_divided():
    net = make_net()
    divide(net)
    loss = divided_loss(forward(net, x), labels)
    loss.backward()
    add_up_partial(net)
    held = sum(p.numel() for p in net.parameters())
    return loss.detach(), joined({name: p.grad for name, p in net.named_parameters()}), held


net = make_net()
loss = F.cross_entropy(net(x).flatten(0, 1), labels.flatten())
loss.backward()
gradients = {name: p.grad for name, p in net.named_parameters()}
parameters = sum(p.numel() for p in net.parameters())
print(f"one process: loss {loss:.3f}, {parameters:,} parameters")
for rank, (found_loss, found, held) in enumerate(ranks(all_divided)):
    right = largest_difference(found, gradients) < 1e-12
    print(f"rank {rank}:      loss {found_loss:.3f}, {held:,} parameters,",
          f"all gradients equal to 1e-12: {right}")
    assert right
    assert largest_difference(found_loss, loss) < 1e-12

# %% [markdown]
# Loss and all gradients are those of one process. **So both ends can be divided, too**, and for
# that the ranks send one more scatter and one more gather in each direction, once for the whole
# network, and three numbers a token for the loss. Logits are not sent. The module's `cross_entropy`
# does with these logits what ours does:

# %%
def both_losses():
    net = make_net()
    divide(net)
    logits = forward(net, x).detach()
    found = []
    for loss_function in [divided_loss, tensor_parallel.cross_entropy]:
        part = logits.clone().requires_grad_()
        loss = loss_function(part, labels)
        loss.backward()
        found.append((loss.detach(), part.grad))
    return found


for ours, theirs in ranks(both_losses):
    assert torch.equal(ours[0], theirs[0])
    assert largest_difference(ours[1], theirs[1]) < 1e-15

# %% [markdown]
# ## Two more mistakes that raise no error
#
# **Dropout with the wrong seed.** With chapter 18's layers each rank has all hidden states, and
# these copies must stay equal, so that dropout needs the same seed on all ranks. Where
# each rank has *its own* tokens, the same seed means that rank 1's first token loses just the
# numbers that rank 0's first token loses. But what tokens lose should be independent. So each rank
# needs a seed of its own there, and also for dropout inside attention, where each has its own
# heads. (Megatron-LM keeps several random states, among others the default one and
# `model-parallel-rng`, in
# `megatron/core/tensor_parallel/random.py`.)
#
# **One matrix for query, key and value.** Many networks keep these three matrices as one, whose
# outputs are all queries, then all keys, then all values. With four heads they are q0 q1 q2 q3 k0
# k1 k2 k3 v0 v1 v2 v3. Cut in two like other column layers, rank 0 gets q0 q1 q2 q3 k0 k1, and
# takes a third each for its queries, keys and values. So it uses q2 and q3 as keys, and k0 and k1
# as values. All shapes are right, so nothing raises an error. The outputs must be put in order by
# heads first, so that rank 0 gets q0 q1 k0 k1 v0 v1. (Megatron-LM stores q0 k0 v0 q1 k1 v1 and so
# on, which can be cut between any two heads: `megatron/core/transformer/attention.py`.)
#
# ## Summary
#
# - **Tokens.** An all-reduce is a reduce-scatter and an all-gather. With the next norm between
#   them, hidden states are divided by tokens, and the same number of bytes is sent.
# - A rank holds $1/k$ of the activations, but for the gathered inputs of the column layers. If it
#   gathers them again in the backward pass, it holds $1/k$ of these, too, and sends a quarter more.
# - Norms, biases of row layers and places have seen only this rank's tokens. Their gradients must
#   be added up over the ranks. If that is forgotten, no error says so.
# - **Vocabulary.** Embedding and output layer are cut by the vocabulary. The embedding ends with a
#   sum and scatter, and the output layer begins with a gather. The loss needs three numbers a
#   token: the largest logit *of all ranks*, the sum of the exponentials, the label's logit. Test it
#   with large logits, which overflow if nothing is subtracted, and with ranks whose largest differ.
# - Dropout needs equal masks where the ranks have the same tensor, and different masks where each
#   has a part.
#
# **Further reading.** Sections 4 and 5 of the paper by Korthikanti et al. In PyTorch
# `SequenceParallel` is a style for norms in a plan of `parallelize_module`, and `loss_parallel` is
# the divided loss (`torch/distributed/tensor/parallel/style.py` and `loss.py`).

# %% [markdown]
# ## Exercises
#
# 1. **Gather again.** Write an autograd Function of this rank's tokens and of a column layer's
#    weight. It keeps only these two, and gathers the tokens once more in its backward pass. Show
#    for an MLP that the gradients are those of `Columns`, and that a rank of two keeps half.
# 2. **A gather too much.** Leave the output layer whole: gather, apply `net.output` to all tokens
#    on every rank, and take PyTorch's cross-entropy. Which gradients are wrong, and by which
#    factor? Mend it.

# %% [markdown]
# ### Answer 1
#
# The gradient of the weight needs all tokens, and that of the tokens needs only the weight. So the
# second gather can run while the other product is computed, as the paper has it. Ours doesn't.

# %% tags=["solution"]
class ColumnsOfTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mine, weight):
        ctx.save_for_backward(mine, weight)
        return gather(mine) @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        mine, weight = ctx.saved_tensors
        of_mine = sum_and_scatter(gradient @ weight)
        x = gather(mine)
        of_weight = gradient.flatten(0, 1).t() @ x.flatten(0, 1)
        return of_mine, of_weight


class PlainMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.up = Columns(mlp.up)
        self.down = Rows(mlp.down)

    def forward(self, mine):
        return self.down(F.gelu(self.up(gather_tokens(mine))))


class ThriftyMLP(PlainMLP):
    def forward(self, mine):
        up = ColumnsOfTokens.apply(mine, self.up.weight) + self.up.bias
        return self.down(F.gelu(up))


def mlp_by_tokens(kind):
    mlp = kind(make_block().mlp)
    mine = my_part(make_hidden(), 1).requires_grad_()
    kept = bytes_kept(mlp, mine)
    mlp(mine).square().sum().backward()
    gradients = {name: p.grad for name, p in mlp.named_parameters()}
    return kept, gradients | {"input": mine.grad}


kept_by_one = ranks(mlp_by_tokens, PlainMLP, world=1)[0][0]
for plain, thrifty in zip(ranks(mlp_by_tokens, PlainMLP), ranks(mlp_by_tokens, ThriftyMLP)):
    print(f"of one rank's {kept_by_one:,} bytes: {plain[0]:,}, gathered again {thrifty[0]:,}")
    assert thrifty[0] * 2 == kept_by_one
    assert largest_difference(plain[1], thrifty[1]) < 1e-12

# %% [markdown]
# ### Answer 2
#
# Each rank computes the same loss from all tokens, so each finds the *whole* gradient of what was
# gathered, and not a part of it. The backward pass of `gather_tokens` adds up these copies. So all
# that comes before the gather gets $k$ times the right gradient, and the output layer's is right.
# A gather that stands before what all ranks do alike must take this rank's tokens of the gradient,
# and add nothing up.

# %% tags=["solution"]
class GatherForAll(GatherTokens):
    @staticmethod
    def backward(ctx, gradient):
        return my_part(gradient, 1)


def with_whole_output(gather_function):
    net = make_net()
    divide(net)
    net.output = make_net().output
    my_places = my_part(torch.arange(32), 0)
    hidden = net.blocks(net.token(x) + net.place(my_places))
    logits = net.output(gather_function(net.norm(hidden)))
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    of_output = net.output.weight.grad.clone()
    add_up_partial(net)
    of_up = joined({"up.weight": net.blocks[0].mlp.up.weight.grad})["up.weight"]
    return of_output, of_up


for gather_function, factor in [(gather_tokens, 2), (GatherForAll.apply, 1)]:
    for of_output, of_up in ranks(with_whole_output, gather_function):
        assert largest_difference(of_output, gradients["output.weight"]) < 1e-12
        assert largest_difference(of_up, factor * gradients["blocks.0.mlp.up.weight"]) < 1e-12
    print(f"gradients before the gather: times {factor}")
