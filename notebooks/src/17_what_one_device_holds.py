# %% [markdown]
# # 17 · What one device holds
#
# *Why does a model not fit on a device, and what can one device do before you need a second?* A
# training step holds weights, gradients, the optimizer's state, and what the layers keep for the
# backward pass: their **activations**. These can be given up. A layer's input is kept, and the rest
# is computed once more when the backward pass needs it. That is called **recomputation**, or
# *activation checkpointing*, or *gradient checkpointing* (T. Chen et al., 2016, arXiv:1604.06174).
# (Elsewhere a *checkpoint* is a file with a saved training. Here it is an input that was kept.)
#
# > **What you'll do:** write a small transformer, predict to the byte what autograd keeps for it,
# > and write recomputation in a few lines.
# >
# > **What you'll learn:** what takes the memory of a step; what recomputation saves and what it
# > costs; how it goes wrong without an error.
# >
# > **What you need:** chapters 13 and 16, no GPU, and PyTorch: `make setup TORCH=1` installs it.
# > Reading takes {reading time}, running about 20 seconds.

# %% tags=["torch"]
import math
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import transformer
from helpers import your_turn
from helpers.plotting import curves, show

torch.set_num_threads(1)  # one core is our device

# %% [markdown]
# ## A small transformer
#
# Our network is a transformer that learns to continue a text. The text is the course's own license.
# Its **tokens**, the pieces that the network reads, are single characters, and a token's *id* is
# its number in the alphabet. How many different tokens there are is called the size of the
# **vocabulary**, here 76.

# %%
text = Path("../LICENSE").read_text()
alphabet = sorted(set(text))  # also the space and the end of a line
id_of = {character: number for number, character in enumerate(alphabet)}
ids = torch.tensor([id_of[character] for character in text])
print(f"{len(text):,} characters, {len(alphabet)} different ones")


def make_batch(n, tokens):
    """n pieces of the text, and for each character in them the one that comes next."""
    first = torch.randint(len(ids) - tokens, (n, 1))
    positions = first + torch.arange(tokens)  # [n, tokens]
    return ids[positions], ids[positions + 1]


torch.manual_seed(0)
x, y = make_batch(n=16, tokens=32)
print("inputs:", repr("".join(alphabet[number] for number in x[0])))
print("labels:", repr("".join(alphabet[number] for number in y[0])))

# %% [markdown]
# In the network each token is a row of `width` numbers. Tokens meet in **attention**, where each
# token gathers from the others what it can use. Three matrices turn each token into a *query* (what
# it looks for), a *key* (what it can be found by) and a *value* (what it has to give). The product
# of one token's query and another one's key is a *score*. A softmax turns a token's scores into
# **attention weights**, and the token's result is the mean of all values, weighted by these.
#
# Several **heads** do that, each with its own part of the width, and a last matrix, the **output
# projection** `join`, brings their results together. Because the network is to predict the later
# tokens, it mustn't see them: their scores are set to minus infinity, so that their weights are 0.
# Such attention is called **causal**.

# %%
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(width, width)

    def by_heads(self, x):
        """[n, tokens, width] -> [n, heads, tokens, width / heads]"""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        query = self.by_heads(self.query(x))
        key = self.by_heads(self.key(x))
        value = self.by_heads(self.value(x))
        scores = query @ key.transpose(2, 3)  # [n, heads, tokens, tokens]
        scores = scores / math.sqrt(query.shape[3])
        tokens = x.shape[1]
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device)
        later = mask.triu(1)  # True where the key comes after the query
        weights = scores.masked_fill(later, -math.inf).softmax(dim=3)
        mixed = (weights @ value).transpose(1, 2).flatten(2)  # [n, tokens, width]
        return self.join(mixed)

# %% [markdown]
# The other part of a block, an **MLP**, works on each token alone. Between its matrices is GELU, a
# smooth ReLU. Before attention and before the MLP a LayerNorm scales each token's numbers to mean 0
# and deviation 1. The results of attention and of the MLP are *added* to what came in, so that
# gradients can also pass unchanged:

# %%
class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))

# %% [markdown]
# The network begins with two tables of rows, one for tokens and one for positions, whose sum goes
# through the blocks. At the end a matrix gives a number, a *logit*, to each token of the
# vocabulary:

# %%
class Transformer(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, tokens, dropout=0.0):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            self.blocks.append(Block(width, heads, dropout))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x):  # [n, tokens] -> [n, tokens, vocabulary]
        positions = torch.arange(x.shape[1], device=x.device)
        x = self.dropout(self.token(x) + self.place(positions))
        x = self.blocks(x)
        return self.output(self.norm(x))


def make_net(dropout=0.0):
    torch.manual_seed(17)
    return Transformer(len(alphabet), width=64, heads=4, layers=4, tokens=32, dropout=dropout)


net = make_net()
print(net(x).shape)

# %% [markdown]
# [transformer.py](transformer.py), the file that you keep, has the same network, but for one thing:
# its attention stores the width of a head instead of the number of heads. (Chapter 18 needs that.)

# %% tags=["fold"]
# check: transformer.py computes the same, and no logit depends on a later token
theirs = transformer.Transformer(len(alphabet), width=64, heads=4, layers=4, tokens=32)
theirs.load_state_dict(net.state_dict())
assert torch.equal(theirs(x), net(x))

changed = x.clone()
changed[:, -1] = (x[:, -1] + 1) % len(alphabet)
same = net(changed) == net(x)  # [n, tokens, vocabulary]
assert same[:, :-1].all()
assert not same[:, -1].all()

# %% [markdown]
# Its loss is that of any classification, for each token the cross-entropy of the next one:

# %%
def loss_of(net, x, y):
    return F.cross_entropy(net(x).flatten(0, 1), y.flatten())


print(f"loss {loss_of(net, x, y):.2f}; if all characters were equally likely: "
      f"{math.log(len(alphabet)):.2f}")

# %% [markdown]
# ## What a step holds
#
# What does a training step of this network hold? For each parameter there are its weight, its
# gradient and Adam's two moments (chapter 16's means), 16 bytes in float32. Activations come on
# top. We count what autograd **saves for backward** by `saved_tensors_hooks`, which calls a
# function of ours with each tensor that is saved, and another one when the backward pass uses it.
# Tensors that share memory share a *storage*, and so an address, and count once. A *weak*
# dictionary of the storages forgets what has been freed, as in chapter 16. Parameters are left out,
# because they are there anyway.

# %%
def address(tensor):
    """Where its memory is. Tensors that share memory have the same address."""
    return tensor.untyped_storage()._cdata


class Kept:
    """Notes how much memory autograd keeps, without the parameters of net."""

    def __init__(self, net):
        self.parameters = {address(p) for p in net.parameters()}
        self.alive = weakref.WeakValueDictionary()  # {address: memory}, only what still exists
        self.noted = []  # bytes, each time that a tensor is saved or used

    def note(self):
        self.noted.append(sum(memory.nbytes() for memory in self.alive.values()))

    def save(self, tensor):
        if address(tensor) not in self.parameters:
            self.alive[address(tensor)] = tensor.untyped_storage()
        self.note()
        return tensor

    def use(self, tensor):
        self.note()
        return tensor

# %% [markdown]
# Here is what is kept when the forward pass ends. (`net` is passed twice: for its parameters, and
# as an argument of `loss_of`.)

# %%
def bytes_kept(net, function, *inputs):
    """What autograd keeps for function(*inputs)."""
    kept = Kept(net)
    with saved_tensors_hooks(kept.save, kept.use):
        function(*inputs)
    return kept.noted[-1]  # after the last save


net = make_net()
parameters = sum(p.numel() for p in net.parameters())
print(f"{16 * parameters:,} bytes for weights, gradients and Adam's moments")
print(f"{bytes_kept(net, loss_of, net, x, y):,} bytes of activations")

# %% [markdown]
# Activations are three quarters of the memory here. They grow with the number of sequences in a
# batch, and the other three don't. So a device can take fewer sequences at a time and add up the
# gradients (*gradient accumulation*, chapter 14), down to a single sequence.
#
# ## What autograd keeps, to the byte
#
# Which tensors are these? For its backward pass a matrix product needs both of its factors, GELU
# its input, and a softmax its output. So we can read from the code what a block keeps. In the
# picture each bar is what an operation keeps for each token:
#
# ![A block from top to bottom, and beside each operation how many numbers it keeps for each token.
# Norm 66; query, key, value 64; query times key 128; softmax by heads 128; weights times value 64;
# output projection 64; plus what came in. Norm 66; up 64; GELU 256; down 256; plus what came in.
# Together 1,156.](src/drawings/block_keeps.svg)
#
# Three things are not obvious. Besides its input a norm keeps two numbers, the token's mean
# and 1 / deviation. The matrices of query, key and value share their input, so it counts once. And
# the product with the values needs the attention weights, too, but the softmax has kept them
# already. As a formula, in the picture's order:

# %%
def kept_by_block(n, tokens, width, heads):
    """Bytes, in float32."""
    numbers = width + 2  # norm; these are for each token
    numbers += width  # query, key, value
    numbers += 2 * width  # query times key
    numbers += heads * tokens  # softmax
    numbers += width  # weights times value
    numbers += width  # output projection
    numbers += width + 2  # norm
    numbers += width  # up
    numbers += 4 * width  # GELU
    numbers += 4 * width  # down
    mask = tokens * tokens  # a byte each, once for all sequences
    return 4 * n * tokens * numbers + mask


hidden = torch.randn(16, 32, 64, requires_grad=True)
print(f"formula {kept_by_block(16, 32, 64, 4):,}")
print(f"counted {bytes_kept(net, net.blocks[0], hidden):,}")

# %% tags=["fold"]
# check: the formula for this size and two others
for n, tokens, width, heads in [(16, 32, 64, 4), (3, 7, 24, 2), (1, 50, 16, 8)]:
    block = Block(width, heads, dropout=0.0)
    hidden = torch.randn(n, tokens, width, requires_grad=True)
    assert bytes_kept(block, block, hidden) == kept_by_block(n, tokens, width, heads)

# %% [markdown]
# The formula matches. In short, a block keeps $16 \cdot \text{width} + \text{heads} \cdot
# \text{tokens} + 4$ numbers for each token. So the longer the sequences, the larger is the share of
# attention weights: in one sequence of 512 they would be 2,048 of 3,076 numbers.
#
# The whole step keeps the activations of all blocks, and something at both ends of the network,
# such as the ids of the tokens and what the loss keeps. The folded `kept_at_the_ends` counts these
# in the same way.

# %% tags=["fold"]
# define: `kept_at_the_ends(n, tokens, width, vocabulary)`, the bytes before and after the blocks
def kept_at_the_ends(n, tokens, width, vocabulary):
    last_norm = width + 2
    output = width
    loss = vocabulary
    numbers = n * tokens * (last_norm + output + loss) + 1  # and the mean's divisor
    whole_numbers = n * tokens + tokens + n * tokens  # ids of tokens, of positions, labels
    return 4 * numbers + 8 * whole_numbers

# %%
block_bytes = kept_by_block(16, 32, 64, 4)
end_bytes = kept_at_the_ends(16, 32, 64, len(alphabet))
predicted = 4 * block_bytes + end_bytes
print(f"4 blocks {4 * block_bytes:,} + ends {end_bytes:,} = {predicted:,} bytes")
assert bytes_kept(net, loss_of, net, x, y) == predicted

# %% [markdown]
# ## Recomputation
#
# The backward pass works on one block at a time. So why should a step keep the activations of all
# four? It can keep each block's *input*, and compute the rest from it when it is needed:
#
# ![Two panels over the same time. All are kept: the activations of blocks 1 to 4 pile up in the
# forward pass, four high, and go one after the other in the backward pass. Recomputed: a thin layer
# of inputs, and in the backward pass four teeth, for blocks 4, 3, 2 and 1, each one block high. It
# ends later.](src/drawings/saw.svg)
#
# Memory is drawn to scale, with the inputs in grey. The price is time: each tooth begins with a
# second forward pass of its block.
#
# ### Your turn: the backward pass
#
# Write it, before you scroll on. When the backward pass reaches a block, it has the block's
# function, its input `x` and the gradient of the block's output. Compute the output anew, send the
# gradient backward from there, and return the gradient of `x`. You need three things:
#
# - In a backward pass autograd records nothing, except inside `with torch.enable_grad():`.
# - `x` is a result of the blocks before it, which get their own turn later. `x.detach()` has the
#   same numbers without this history, and `.requires_grad_()` asks for its gradient.
# - `output.backward(gradient)` begins with a given gradient.

# %% tags=["fold", "your-turn"]
# define: cases for your function, with a layer whose weight is 3, on one row and on two
layer = nn.Linear(1, 1, bias=False)
nn.init.constant_(layer.weight, 3.0)


def gradients_after(values, gradient):
    layer.zero_grad()
    values.requires_grad_()
    x = 1 * values  # a result, as in the network
    with torch.no_grad():  # as in a backward pass
        returned = run_again(layer, x, gradient)
    return {"returned": returned, "weight.grad": layer.weight.grad,
            "x's source has a gradient": values.grad is not None}


one_row = (torch.tensor([[4.0]]), torch.tensor([[2.0]]))
due_on_one = {"returned": torch.tensor([[6.0]]), "weight.grad": torch.tensor([[8.0]]),
              "x's source has a gradient": False}
two_rows = (torch.tensor([[2.0], [5.0]]), torch.tensor([[1.0], [10.0]]))
due_on_two = {"returned": torch.tensor([[3.0], [30.0]]), "weight.grad": torch.tensor([[52.0]]),
              "x's source has a gradient": False}
cases = [(one_row, due_on_one), (two_rows, due_on_two)]

# %% tags=["your-turn"]
def run_again(function, x, gradient):
    """Compute function(x) again, whose gradient is `gradient`, and return the gradient of x.

    The parameters' gradients are added to their .grad. What x was computed from gets none.
    """
    ...


your_turn(gradients_after, cases, stubs=[run_again])

# %% [markdown]
# Here is ours, as a `torch.autograd.Function` (chapter 16). `forward` saves the input alone.
# Autograd doesn't record inside a `Function`, so it keeps nothing of what the block computes there:

# %%
class FirstRecompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)  # once more, and now autograd keeps
        output.backward(gradient)  # the parameters' gradients, too
        return None, x.grad  # for each argument of forward

# %% [markdown]
# To use it in the network, we put each block into a module that calls the block in this way:

# %%
class Recomputed(nn.Module):
    def __init__(self, block, way):
        super().__init__()
        self.block = block
        self.way = way  # way(block, x) computes the block

    def forward(self, x):
        return self.way(self.block, x)


def recompute_blocks(net, way):
    for number in range(len(net.blocks)):
        net.blocks[number] = Recomputed(net.blocks[number], way)
    return net


def gradients(net):
    """All of them, in one row of numbers."""
    torch.manual_seed(1)  # so that dropout, if there is any, begins in the same way
    net.zero_grad()
    loss_of(net, x, y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


plain = make_net()
thrifty = recompute_blocks(make_net(), FirstRecompute.apply)
print("all gradients equal, bit for bit:", torch.equal(gradients(thrifty), gradients(plain)))

# %% [markdown]
# They are equal to the last bit, because the same operations work on the same numbers.
#
# **Predict:** the plain step keeps 9,904,388 bytes when its forward pass ends, 430,340 of them at
# the ends of the network. A block's input is 512 rows of 64 numbers. How many bytes are kept now?

# %% tags=["predict"]
counted = bytes_kept(thrifty, loss_of, thrifty, x, y)
print(f"counted: {counted:,}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# 954,628 bytes are kept, a tenth. Of each block only the input is left, 131,072 bytes instead of
# 2,368,512:
#
# </details>

# %%
input_bytes = 4 * 16 * 32 * 64
print(f"4 inputs {4 * input_bytes:,} + ends {end_bytes:,}")
assert counted == 4 * input_bytes + end_bytes

# %% [markdown]
# ## What it costs
#
# Memory is saved, and operations are added. PyTorch's `FlopCounterMode` counts the floating-point
# operations of all matrix products inside its `with`. We compare with PyTorch's own function, too,
# which is called `checkpoint`. **Predict:** let the forward pass of the four blocks count as 1. How
# many forward passes' worth of operations is the backward pass, without recomputation and with it?

# %% tags=["predict"]
def by_pytorch(function, x):
    return checkpoint(function, x, use_reentrant=False)


thrifty_pytorch = recompute_blocks(make_net(), by_pytorch)
hidden = torch.randn(16, 32, 64, requires_grad=True)
backward_in_forwards = {}
for name, each in [("plain", plain), ("recomputed", thrifty), ("by PyTorch", thrifty_pytorch)]:
    with FlopCounterMode(display=False) as forward:
        output = each.blocks(hidden)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    unit = forward.get_total_flops()
    times = backward.get_total_flops() / unit
    print(f"{name}: {unit:,} forward, {times:.2f} times that backward")
    backward_in_forwards[name] = round(times, 2)

# %% tags=["fold"]
# check: what came out
assert backward_in_forwards == {"plain": 2, "recomputed": 3, "by PyTorch": 2.69}

# %% [markdown]
# <details><summary>What came out</summary>
#
# Without recomputation the backward pass takes 2, as it is drawn above, because each product has
# two gradients, one for each factor. With ours it takes 3. Together with the forward pass that is
# 4 instead of 3. PyTorch's takes 2.69, because it stops the second forward pass early, when it has
# all that is to be kept (`early_stop` in `torch/utils/checkpoint.py`). So the block's last product,
# `down`, isn't computed again.
#
# </details>
#
# So recomputing whole blocks costs up to a third more operations in matrix products, the only ones
# that are counted.
#
# ## Memory during a step
#
# Little is kept when the forward pass ends. But in the backward pass activations come back, so what
# matters is the largest amount at any time, the **peak**. `Kept` notes the amount whenever autograd
# saves a tensor, and whenever the backward pass uses one. What has been freed no longer counts.

# %%
def bytes_in_a_step(net):
    kept = Kept(net)
    with saved_tensors_hooks(kept.save, kept.use):
        loss = loss_of(net, x, y)
        forward_ends = len(kept.noted)
        loss.backward()
    kept.note()
    return kept.noted, forward_ends


all_kept, all_forward = bytes_in_a_step(plain)
saw, saw_forward = bytes_in_a_step(thrifty)
print(f"peak of the plain step:       {max(all_kept):,}")
print(f"peak with recomputed blocks:  {max(saw):,}")

# %% tags=["fold", "measured"]
# draw: what is kept during a step, with both passes equally wide
lines = {}
for label, noted, ends in [("all kept", all_kept, all_forward), ("recomputed", saw, saw_forward)]:
    places = np.interp(np.arange(len(noted)), [0, ends, len(noted) - 1], [0, 1, 2])
    lines[label] = (places, np.array(noted) / 1e6)
fig, ax = curves("A hill, and a saw", "", "MB kept", lines)
ax.set_xticks([0.5, 1.5], ["forward pass", "backward pass"])
ax.axvline(1, color="lightgrey", zorder=0)
show(fig, alt="Megabytes kept during a step. All kept: up to 9.9 in the forward pass, and down to "
     "0 in the backward pass. Recomputed: up to 1 in the forward pass, then four teeth, the first "
     "up to 2.8, the last up to 2.4.")

# %% [markdown]
# Those are the drawing's hill and saw. In a tooth a block's activations are computed again and then
# freed. The first tooth is the highest, because it belongs to the last block, so that the inputs of
# the three blocks before it are still kept. Its height, plus the ids, is the peak, unless more is
# kept when the forward pass ends. That is so with a large vocabulary, whose logits are large.

# %% tags=["fold"]
# check: this peak as a formula, with 76 different tokens and with 2,000
def peak_when_recomputed(n, tokens, width, heads, layers, vocabulary):
    one_input = 4 * n * tokens * width
    id_bytes = 8 * (n * tokens + tokens + n * tokens)
    first_tooth = (layers - 1) * one_input + kept_by_block(n, tokens, width, heads) + id_bytes
    forward_end = layers * one_input + kept_at_the_ends(n, tokens, width, vocabulary)
    print(f"vocabulary of {vocabulary}: first tooth {first_tooth:,}, forward pass ends at "
          f"{forward_end:,}")
    return max(first_tooth, forward_end)


assert max(all_kept) == predicted
assert max(saw) == peak_when_recomputed(16, 32, 64, 4, 4, vocabulary=76)
larger = recompute_blocks(Transformer(2000, 64, 4, 4, 32), FirstRecompute.apply)
noted, _ = bytes_in_a_step(larger)
assert max(noted) == peak_when_recomputed(16, 32, 64, 4, 4, vocabulary=2000)

# %% [markdown]
# **With recomputation the peak of what is kept is one block's activations and the inputs of the
# others, or the end of the forward pass, if that is more.** With a vocabulary of 2,000 it is the
# end, because there the logits take more than a block's activations.
#
# Some memory isn't kept, but lives for a moment, for example the gradients that go from operation
# to operation. Chapter 16's counter, `Bytes`, notes all tensors after each operation, and the
# function `peak_of_all` in the folded cell uses it.

# %% tags=["fold"]
# define: `peak_of_all(net, x, y)`, the peak of all but weights and their gradients; measure it
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    def __init__(self, left_out):
        super().__init__()
        self.left_out = left_out  # addresses
        self.alive = weakref.WeakValueDictionary()
        self.noted = []

    def __torch_dispatch__(self, operation, types, given=(), options=None):
        result = operation(*given, **(options or {}))
        for value in tree_leaves((given, result)):
            if torch.is_tensor(value) and address(value) not in self.left_out:
                self.alive[address(value)] = value.untyped_storage()
        self.noted.append(sum(memory.nbytes() for memory in self.alive.values()))
        return result


def peak_of_all(net, x, y):
    left_out = set()
    for p in net.parameters():
        p.grad = torch.zeros_like(p)
        left_out.add(address(p))
        left_out.add(address(p.grad))
    with Bytes(left_out) as memory:
        loss_of(net, x, y).backward()
    return max(memory.noted)


for name, each in [("plain", plain), ("recomputed", thrifty)]:
    print(f"{name}: {peak_of_all(each, x, y):,} bytes at the peak")

# %% [markdown]
# Of all tensors but weights, gradients and moments, the recomputed step holds 3.6 MB at its peak,
# and the plain one 10.2 MB. (What autograd keeps had peaks of 2.8 and 9.9 MB.)
#
# ## Dropout
#
# Is `FirstRecompute` right for any block? Dropout sets numbers to 0 at random and scales up the
# others. Here a dropout of one half gets eight ones, so that some become 0 and the others 2.
# **Predict:** where is the gradient 0, and where 2?

# %% tags=["predict"]
torch.manual_seed(0)
ones = torch.ones(8, requires_grad=True)
output = FirstRecompute.apply(nn.Dropout(0.5), ones)
output.sum().backward()
print("output:  ", output.tolist())
print("gradient:", ones.grad.tolist())

# %% [markdown]
# <details><summary>What came out</summary>
#
# It should be 0 where the output is 0. But at three places it is 2, although the output there is 0.
# The second forward pass has drawn other random numbers, so the gradient is that of another
# function.
#
# </details>
#
# Such a training goes on without an error, with wrong gradients. So the second pass must draw what
# the first one drew. We save the **random state** before the first, and set it before the
# second. When the block of `fork_rng` ends, it puts back the state that was there before, so that
# what is drawn later doesn't change.

# %%
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.random_state = torch.get_rng_state()  # NEW
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng():  # NEW
            torch.set_rng_state(ctx.random_state)  # NEW
            output = ctx.function(x)
        output.backward(gradient)
        return None, x.grad


# %% [markdown]
# `recompute` in [transformer.py](transformer.py) is the same for several inputs and outputs, and
# saves a GPU's random state, too. (On GPUs it is untried.) We compare four ways with a plain step:
# our first, our second, transformer.py's and PyTorch's.

# %%
expected = gradients(make_net(dropout=0.1))  # plain
equal = {}
for name, way in [("FirstRecompute", FirstRecompute.apply), ("Recompute", Recompute.apply),
                  ("transformer.py's", transformer.recompute), ("PyTorch's", by_pytorch)]:
    found = gradients(recompute_blocks(make_net(dropout=0.1), way))
    equal[name] = torch.equal(found, expected)
    print(f"{name}: equal gradients: {equal[name]}")

# %% tags=["fold"]
# check: what came out
assert list(equal.values()) == [False, True, True, True]

# %% [markdown]
# `FirstRecompute` is wrong, as it must be. The others' gradients are those of the plain step, bit
# for bit.
#
# Ours starts a backward pass inside a backward pass, which is called a **reentrant** checkpoint.
# Somebody may want one gradient only, by `torch.autograd.grad(loss, x)`. The inner `backward` would
# still add to the `.grad` of all parameters, so transformer.py raises an error there. PyTorch's
# `checkpoint` with `use_reentrant=False` works by hooks like those that we count with, and has no
# such limit.
#
# ## Running statistics
#
# BatchNorm keeps a running mean, to be used after the training. In each forward pass the new one is
# 0.9 times the old one plus 0.1 times the batch's mean (chapter 09). Below, the batch's mean is 10,
# and the running mean begins with 0. **Predict** the running mean after one step, plain and with
# recomputation.

# %% tags=["predict"]
def plainly(function, x):
    return function(x)


for name, way in [("plain", plainly), ("ours", Recompute.apply), ("PyTorch's", by_pytorch)]:
    norm = nn.BatchNorm1d(1)
    two_numbers = torch.tensor([[8.0], [12.0]], requires_grad=True)
    way(norm, two_numbers).sum().backward()
    print(f"{name}: running mean {norm.running_mean.item():.2f},",
          f"{norm.num_batches_tracked.item()} batches")

# %% [markdown]
# <details><summary>What came out</summary>
#
# In a plain step it becomes 1.00. With recomputation it becomes 1.90, and BatchNorm counts two
# batches. PyTorch's `checkpoint` does the same.
#
# </details>
#
# What a block changes besides its result, it changes twice. Loss and gradients are right, because
# in training BatchNorm uses the batch's own mean. But the running mean forgets faster than it
# should, and it is what evaluation uses. So keep such a layer out of what is recomputed. Our
# network has only LayerNorms, which keep nothing from step to step.
#
# ## What stays held
#
# What does recomputation leave, in our network and in a large one? The large one wouldn't fit here.
# But on PyTorch's `meta` device tensors have shapes and no memory, so that we can count its
# parameters, and let it take a step with one sequence of 4,096 tokens.

# %%
with torch.device("meta"):
    large = Transformer(32_000, width=4096, heads=32, layers=32, tokens=4096)
    tokens = torch.zeros(1, 4096, dtype=torch.int64)
    labels = torch.zeros(1, 4096, dtype=torch.int64)
large_parameters = sum(p.numel() for p in large.parameters())
large_kept = bytes_kept(large, loss_of, large, tokens, labels)
large_attention = 32 * 4 * 32 * 4096 * 4096  # layers, bytes, heads, tokens, tokens
print(f"{large_parameters:,} parameters")
print(f"activations {large_kept / 1e9:.1f} GB, of them attention weights "
      f"{large_attention / 1e9:.1f} GB")

# %% tags=["fold"]
# check: our formulas find the same
assert large_kept == 32 * kept_by_block(1, 4096, 4096, 32) + kept_at_the_ends(1, 4096, 4096, 32_000)

# %% [markdown]
# And now both networks. The second row is what autograd keeps in a plain step. The third row is the
# peak of all tensors besides those of the first row, with all blocks recomputed:

# %%
recompute_blocks(large, FirstRecompute.apply)
rows = [
    ("weights, gradients, moments", 16 * parameters, 16 * large_parameters),
    ("activations", predicted, large_kept),
    ("recomputed, all at the peak", peak_of_all(thrifty, x, y), peak_of_all(large, tokens, labels)),
]
for name, small_bytes, large_bytes in rows:
    print(f"{name:28} {small_bytes / 1e6:5.1f} MB {large_bytes / 1e9:6.1f} GB")

# %% [markdown]
# Recomputation makes the large model's activations small: at the peak there are 9.1 GB instead of
# more than 104. Our code writes attention out, so that two thirds of what is kept are attention
# weights. PyTorch's `F.scaled_dot_product_attention` doesn't save them (answer 3 counts it). And in
# **bfloat16** a number has two bytes. Which parts of a training may be in 16 bits is the question
# of deeper: bfloat16 and scaled losses.
#
# The weights, gradients and Adam's moments still take 108 GB, more than an A100 with 80 GB has.
# They stay, whatever is recomputed. So a part of them must be kept elsewhere: in the host's memory,
# which is slow to reach (*offloading*), or on a second device. Chapter 16 shards these three, and
# each rank still computes whole layers. The other way is to divide the layers themselves.
#
# ## Summary
#
# - A step holds weights, gradients, the optimizer's state and activations. With Adam in float32 the
#   first three take 16 bytes a parameter. Activations grow with the batch. In long sequences most
#   of them are attention weights, where attention is written out.
# - What autograd keeps can be read from the code, and counted by `saved_tensors_hooks`.
# - Recomputation keeps a block's input and computes the block twice. On a CPU the gradients are
#   equal bit for bit, and the operations are at most those of four forward passes instead of three.
#   What is kept at the peak is one block's activations and the inputs of the others, or the end of
#   the forward pass, if that is more.
# - The second forward pass must do what the first one did, so it needs the first one's random
#   state. What a block changes besides its result, such as running statistics, it changes twice.
# - In your own program: `checkpoint(block, x, use_reentrant=False)`, which stops early, and whose
#   gradients may be asked for in any way.
#
# Next, chapter 18: a layer's matrices, divided among ranks.
#
# **Further reading.** T. Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016),
# arXiv:1604.06174. V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer
# Models* (2022), arXiv:2205.05198.

# %% [markdown]
# ## Exercises
#
# 1. **A budget.** Autograd may keep 6 MB at most, at any time in the step. How many of the four
#    blocks must be recomputed, and does it matter which? First use the formulas, then measure the
#    peaks.
# 2. **Segments.** Chen et al. recompute several blocks at a time, as one function. Then fewer
#    inputs are kept, but a tooth is higher. Write a formula for the peak with segments of $b$
#    blocks, and compare it with the measured peaks of our network for $b$ = 1, 2, 4. From how many
#    blocks on are segments of two better than single blocks?
# 3. **Only the attention weights.** They take much memory and, as long as the sequence is short
#    against 6 × width, few operations. Change `Attention.forward`: `transformer.recompute`, which
#    takes several inputs, computes what comes after queries, keys and values, up to the product of
#    attention weights and values. What does a block keep then? How many operations does a step
#    take?

# %% [markdown]
# ### Answer to *Your turn*
#
# The gradient goes in at `output.backward`; `output.sum().backward()` inside the `with` would begin
# with ones.

# %% tags=["solution", "your-turn"]
def run_again(function, x, gradient):
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        output = function(x)
    output.backward(gradient)
    return x.grad


your_turn(gradients_after, cases, stubs=[run_again])

# %% [markdown]
# ### Answer 1
#
# Two blocks must be recomputed. With $m$ of them the forward pass ends with $m$ inputs, the
# activations of $4 - m$ blocks, and the ends: 7.7 MB for one, 5.4 MB for two. And it matters which:
# the *last* block must not be among them. Its tooth would stand on the activations of the two plain
# blocks, and the peak would be 7.2 MB. When the backward pass recomputes another block, the last
# one's activations are already freed.

# %% tags=["solution"]
import itertools

for which in [(0,), *itertools.combinations(range(4), 2)]:
    some = make_net()
    for number in which:
        some.blocks[number] = Recomputed(some.blocks[number], Recompute.apply)
    noted, _ = bytes_in_a_step(some)
    at_the_end = len(which) * input_bytes + (4 - len(which)) * block_bytes + end_bytes
    print(f"blocks {which} recomputed: peak {max(noted):,}; forward pass ends at {at_the_end:,}")
    if 3 not in which:
        assert max(noted) == at_the_end
    else:
        id_bytes = x.nbytes + y.nbytes + 8 * 32
        assert max(noted) == 3 * block_bytes + input_bytes + id_bytes

# %% [markdown]
# ### Answer 2
#
# For $L$ blocks the highest tooth is $L/b - 1$ inputs and the activations of $b$ blocks. (With $b =
# 4$ almost nothing is saved.) Segments of two save half of the inputs and add a block's
# activations, which are as much as 18 inputs, so they are better from 38 blocks on. Where layers
# keep about as much as their input, the best $b$ is about $\sqrt{L}$, and the peak grows like
# $\sqrt{L}$: hence the paper's title.

# %% tags=["solution"]
def peak_with_segments(layers, b):
    return (layers // b - 1) * input_bytes + b * block_bytes + 8 * (2 * 16 * 32 + 32)


for b in [1, 2, 4]:
    some = make_net()
    segments = nn.Sequential()
    for first in range(0, 4, b):
        segments.append(Recomputed(some.blocks[first:first + b], Recompute.apply))
    some.blocks = segments
    noted, _ = bytes_in_a_step(some)
    print(f"segments of {b}: {max(noted):,}")
    assert max(noted) == max(peak_with_segments(4, b), 4 // b * input_bytes + end_bytes)

print(f"a block keeps {block_bytes / input_bytes:.1f} inputs")
for layers in [36, 38]:
    peaks = [peak_with_segments(layers, b) for b in [1, 2]]
    print(f"{layers} blocks: {peaks[0]:,} with single blocks, {peaks[1]:,} with segments of two")
assert peak_with_segments(36, 2) > peak_with_segments(36, 1)
assert peak_with_segments(38, 2) < peak_with_segments(38, 1)

# %% [markdown]
# ### Answer 3
#
# A block no longer keeps the attention weights and the mask. Queries, keys and values are kept as
# before, now as inputs. Two products in each block are computed again, so a step of the blocks
# takes as many operations as 3.08 forward passes instead of 3. Korthikanti et al. call that
# *selective* recomputation. FlashAttention recomputes attention weights inside one operation (T.
# Dao et al., 2022, arXiv:2205.14135). PyTorch's `F.scaled_dot_product_attention` doesn't save them
# either: on a CPU it keeps query, key, value, their result, and 4 bytes for each head and token.

# %% tags=["solution"]
def mix(query, key, value):
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    tokens = query.shape[2]
    later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(dim=3) @ value


class SelectiveAttention(Attention):
    def forward(self, x):
        query = self.by_heads(self.query(x))
        key = self.by_heads(self.key(x))
        value = self.by_heads(self.value(x))
        mixed = transformer.recompute(mix, query, key, value)
        return self.join(mixed.transpose(1, 2).flatten(2))


selective = make_net()
for block in selective.blocks:
    attention = SelectiveAttention(width=64, heads=4)
    attention.load_state_dict(block.attention.state_dict())
    block.attention = attention
assert torch.equal(gradients(selective), gradients(make_net()))

weight_bytes = 4 * 16 * 32 * 4 * 32  # 16 sequences of 32 tokens, 4 heads, 32 tokens
kept = bytes_kept(selective, selective.blocks[0], hidden)
print(f"a block keeps {kept:,} bytes instead of {block_bytes:,}")
assert kept == block_bytes - weight_bytes - 32 * 32  # and the mask
with FlopCounterMode(display=False) as forward:
    output = selective.blocks(hidden)
with FlopCounterMode(display=False) as backward:
    output.sum().backward()
print(f"{1 + backward.get_total_flops() / forward.get_total_flops():.2f} forward passes a step")

query, key, value = torch.randn(3, 16, 4, 32, 16, requires_grad=True).unbind()
kept = bytes_kept(net, F.scaled_dot_product_attention, query, key, value)
print(f"PyTorch's attention keeps {kept:,} bytes")
