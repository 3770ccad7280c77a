# %% [markdown]
# # 17 · What one device holds
#
# *Why does a model not fit on a device, and what can one device do before you need a second?* A
# training step holds weights, gradients, the optimizer's state, and what the layers keep for the
# backward pass, the **activations**. A device can do without most of the activations: it keeps the
# input of each block of layers, and computes the rest once more when the backward pass needs it.
# This is called **recomputation**, or *activation checkpointing*, or *gradient checkpointing* (T.
# Chen et al., 2016, arXiv:1604.06174). (Elsewhere a *checkpoint* is a file in which a training run
# is saved. Here it is an input that was kept.)
#
# > **What you'll do:** write a small transformer, predict to the byte what its blocks keep, and
# > write recomputation in a few lines.
# >
# > **What you'll learn:** what takes the memory of a step; what recomputation saves and what it
# > costs; what dropout has to do with it.
# >
# > **What you need:** chapters 13 and 16, no GPU, and PyTorch 2.13 or newer: `make setup TORCH=1`
# > installs it. Reading takes {reading time}, running about 20 seconds.

# %% tags=["torch"]
import math
import weakref
from pathlib import Path

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
# its number in the alphabet. A batch is 16 sequences of 32 tokens. The label of each token is the
# token that comes next.

# %%
text = Path("../LICENSE").read_text()
alphabet = sorted(set(text))  # also the space and the end of a line
ids = torch.tensor([alphabet.index(character) for character in text])
print(len(ids), "tokens,", len(alphabet), "different ones")

x = ids[3000:3000 + 16 * 32].view(16, 32).clone()  # memory of its own: later we count it
y = ids[3001:3001 + 16 * 32].view(16, 32).clone()
print("inputs of the first sequence:", repr(text[3000:3032]))
print("labels of the first sequence:", repr(text[3001:3033]))

# %% [markdown]
# In the network each token is a row of `width` numbers. In **attention** a token gathers from the
# others what it can use:
#
# 1. Three matrices turn each token into a *query* (what it looks for), a *key* (what it can be
#    found by) and a *value* (what it has to give).
# 2. The product of a token's query and a key, another token's or its own, is a *score*.
# 3. A softmax turns a token's scores into **attention weights**, which add up to 1.
# 4. The token's result is the sum of all values, each one times its weight.
#
# The network is to predict the next token, so a token mustn't see later ones. Their scores are set
# to minus infinity, and the softmax turns these into weights of 0. Such attention is called
# **causal**. Here are the weights of four tokens whose scores are all 0:

# %%
scores = torch.zeros(4, 4)  # a row for each query, a column for each key
later = torch.ones(4, 4, dtype=torch.bool).triu(1)  # True where the key comes after the query
print(scores.masked_fill(later, -math.inf).softmax(dim=1))

# %% [markdown]
# The first token sees only itself, and the last one sees all four. Several **heads** do these steps
# side by side: each takes its own part of every query, key and value, a part of the width. A last
# matrix, the **output projection** `join`, brings their results together.

# %%
class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(width, width)

    def by_heads(self, x):
        n, tokens, width = x.shape
        heads = width // self.head_width
        x = x.view(n, tokens, heads, self.head_width)
        return x.transpose(1, 2)  # [n, heads, tokens, head_width]

    def forward(self, x):
        query = self.by_heads(self.query(x))
        key = self.by_heads(self.key(x))
        value = self.by_heads(self.value(x))
        scores = query @ key.transpose(2, 3)  # [n, heads, tokens, tokens]
        scores = scores / math.sqrt(self.head_width)
        tokens = x.shape[1]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).softmax(dim=3)
        mixed = weights @ value  # [n, heads, tokens, head_width]
        mixed = mixed.transpose(1, 2)  # [n, tokens, heads, head_width]
        return self.join(mixed.flatten(2))  # [n, tokens, width]

# %% [markdown]
# A **block** is attention and an **MLP**, which works on each token alone. Between the MLP's two
# matrices is GELU, a smooth ReLU. Before both parts a LayerNorm scales each token's numbers to mean
# 0 and deviation 1. Their results are *added* to what came in, so that gradients can also pass
# unchanged:

# %%
class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x

# %% [markdown]
# The network begins with two tables of rows, one for the tokens and one for their positions. The
# sum of a token's two rows goes through the blocks. At the end a matrix gives a number, a *logit*,
# to each token of the **vocabulary**, which is the alphabet here:

# %%
class Transformer(nn.Module):
    def __init__(self, vocabulary, width, heads, layers, tokens):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(tokens, width)
        self.blocks = nn.Sequential()
        for _ in range(layers):
            self.blocks.append(Block(width, heads))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary)

    def forward(self, x):  # [n, tokens] -> [n, tokens, vocabulary]
        positions = torch.arange(x.shape[1])
        x = self.token(x) + self.place(positions)
        x = self.blocks(x)
        return self.output(self.norm(x))

# %% [markdown]
# The loss is that of any classification, the cross-entropy of each token's label:

# %%
def make_net():
    torch.manual_seed(17)
    return Transformer(len(alphabet), width=64, heads=4, layers=4, tokens=32)


def loss_of(net, x, y):
    logits = net(x)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


net = make_net()
print(net(x).shape)
print(f"loss {loss_of(net, x, y):.2f}")

# %% [markdown]
# [transformer.py](transformer.py), the file that you keep, has the same network, and can also have
# dropout:

# %%
theirs = transformer.Transformer(len(alphabet), width=64, heads=4, layers=4, tokens=32)
theirs.load_state_dict(net.state_dict())
assert torch.equal(theirs(x), net(x))

# %% [markdown]
# ## What a step holds
#
# For each parameter a training step holds its weight, its gradient and Adam's two moments (chapter
# 16's means). These are four numbers, 16 bytes in float32. The activations come on top. Autograd
# can tell us what it keeps: inside `saved_tensors_hooks(save, use)` it calls `save` with each
# tensor that it **saves for backward**, and `use` when the backward pass needs one. We note a
# tensor by the *address* of its memory, because tensors that share memory must count once. First
# for a single GELU of twelve numbers:

# %%
def address(tensor):
    memory = tensor.untyped_storage()  # what the tensor lies in
    return memory.data_ptr()


kept = {}  # {address: bytes}


def save(tensor):
    memory = tensor.untyped_storage()
    kept[address(tensor)] = memory.nbytes()
    return tensor


def use(tensor):
    return tensor


twelve = torch.ones(3, 4, requires_grad=True)
with saved_tensors_hooks(save, use):
    F.gelu(twelve)
print("bytes kept:", list(kept.values()))

# %% [markdown]
# GELU keeps one tensor, its input of 12 × 4 bytes. Now the whole network. Layers also save their
# parameters, but these are there anyway, so we take them out again.

# %%
def bytes_kept(module, x):
    """What autograd keeps for module(x), besides the module's parameters."""
    kept.clear()
    with saved_tensors_hooks(save, use):
        module(x)
    for p in module.parameters():
        kept.pop(address(p), None)  # if it is there
    return sum(kept.values())


parameters = sum(p.numel() for p in net.parameters())
print(f"weights, gradients, moments:   {16 * parameters:9,} bytes")
print(f"activations, of 16 sequences:  {bytes_kept(net, x):9,} bytes")
print(f"activations, of one sequence:  {bytes_kept(net, x[:1].clone()):9,} bytes")

# %% [markdown]
# Activations are three quarters of the memory here. They grow with the number of sequences, and the
# other three don't. (One sequence keeps a little more than a sixteenth, since each block keeps its
# table `later` once in any case.) So a device can take fewer sequences at a time and add up
# their gradients before the update (**gradient accumulation**), down to a single sequence. What if
# even that is too large?
#
# ## What a block keeps, to the byte
#
# Nearly all activations are in the blocks. Which tensors are they? For its backward pass a matrix
# product needs both of its factors, GELU its input, and a softmax its output. So we can read from
# the code what a block keeps. In the picture each bar is what an operation keeps for each token:
#
# ![A block from top to bottom, and beside each operation how many numbers it keeps for each token.
# Norm 66; query, key, value 64; query times key 128; softmax by heads 128; weights times value 64;
# output projection 64; plus what came in. Norm 66; up 64; GELU 256; down 256; plus what came in.
# Together 1,156.](src/drawings/block_keeps.svg)
#
# Three things are not obvious. Besides its input a norm keeps two numbers, the token's mean and
# 1 / deviation. The matrices of query, key and value share their input, so it counts once. And the
# product with the values needs the attention weights, too, but the softmax has kept them already.
# As a formula, in the picture's order:

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
    mask = tokens * tokens  # `later`, a byte each, once for all sequences
    return 4 * n * tokens * numbers + mask

# %% [markdown]
# We compare the formula with what is counted, for a block of our network and for a smaller one:

# %%
hidden = torch.randn(16, 32, 64, requires_grad=True)  # what goes into a block
block_bytes = kept_by_block(n=16, tokens=32, width=64, heads=4)
print(f"formula {block_bytes:,}")
print(f"counted {bytes_kept(net.blocks[0], hidden):,}")

small_block = Block(width=24, heads=2)
small_hidden = torch.randn(3, 7, 24, requires_grad=True)
print(f"formula {kept_by_block(n=3, tokens=7, width=24, heads=2):,}")
print(f"counted {bytes_kept(small_block, small_hidden):,}")

# %% [markdown]
# The formula matches to the byte. In short, a block keeps $16 \cdot \text{width} + \text{heads}
# \cdot \text{tokens} + 4$ numbers for each token, and the mask.
#
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
# The inputs are the low stairs. The price is time: each tooth begins with a second forward pass of
# its block.
#
# ### Your turn: the backward pass
#
# Write it before you scroll on. When the backward pass reaches a block, it has the block's
# function, its input `x` and the gradient of the block's output. Compute the output again, send the
# gradient backward from there, and return the gradient of `x`. You need three things:
#
# - In a backward pass autograd normally records nothing, except inside `with torch.enable_grad():`.
# - `x` is a result of the blocks before it, which get their own turn later. `x.detach()` has the
#   same numbers without this history, and `.requires_grad_()` asks for its gradient.
# - `output.backward(gradient)` begins with a given gradient.

# %% tags=["fold", "your-turn"]
# define: a case for your function, with a layer whose weight is 3
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


given = (torch.tensor([[2.0], [5.0]]), torch.tensor([[1.0], [10.0]]))
due = {"returned": torch.tensor([[3.0], [30.0]]), "weight.grad": torch.tensor([[52.0]]),
       "x's source has a gradient": False}
cases = [(given, due)]

# %% tags=["your-turn"]
def run_again(function, x, gradient):
    """Compute function(x) again; `gradient` is the gradient of that result. Return that of x.

    The parameters' gradients are added to their .grad. What x was computed from gets none.
    """
    ...


your_turn(gradients_after, cases, stubs=[run_again])  # gradients_after calls run_again

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
# Its call is `FirstRecompute.apply(block, x)`. To use it in the network, we put each block into a
# module that computes it in a `way`, a function of the block and `x`. Later there will be other
# ways.

# %%
def first_way(block, x):
    return FirstRecompute.apply(block, x)


class Recomputed(nn.Module):
    def __init__(self, block, way):
        super().__init__()
        self.block = block
        self.way = way

    def forward(self, x):
        return self.way(self.block, x)


def recompute_blocks(net, way):
    for number in range(len(net.blocks)):
        net.blocks[number] = Recomputed(net.blocks[number], way)
    return net


plain = make_net()
thrifty = recompute_blocks(make_net(), first_way)

# %% [markdown]
# Does the second network find the same gradients as the first?

# %%
def gradients(net):
    """All of them, in one row of numbers."""
    net.zero_grad()
    loss_of(net, x, y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


print("all gradients equal, bit for bit:", torch.equal(gradients(thrifty), gradients(plain)))

# %% [markdown]
# They are equal to the last bit, because the same operations work on the same numbers.
#
# **Predict:** a plain block keeps 2,368,512 bytes. Its input is 512 rows of 64 numbers, which are
# 131,072 bytes. How many bytes are kept when the forward pass of all four blocks ends, plain and
# recomputed?

# %% tags=["predict"]
print(f"plain:      {bytes_kept(plain.blocks, hidden):,}")
print(f"recomputed: {bytes_kept(thrifty.blocks, hidden):,}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The plain blocks keep four times as much as one, 9,474,048 bytes. The recomputed blocks keep
# 524,288 bytes, which are the four inputs and nothing else.
#
# </details>
#
# ## The peak
#
# But in the backward pass activations come back. So what matters is the largest amount at any time
# in the step, the **peak**. Each time that autograd saves or uses a tensor, `MemoryLog` notes how
# much is kept at this moment. (It sees only what autograd saves. Results that are needed for a
# moment, such as scores and gradients of activations, come on top.) Its dictionary is a *weak* one:
# it doesn't keep the memory alive, and forgets what has been freed.

# %%
class MemoryLog:
    def __init__(self, module):
        self.parameters = {address(p) for p in module.parameters()}  # don't count
        self.alive = weakref.WeakValueDictionary()  # {address: memory}, only what still exists
        self.noted = []  # bytes

    def note(self, tensor):
        if address(tensor) not in self.parameters:
            self.alive[address(tensor)] = tensor.untyped_storage()
        total = 0
        for memory in self.alive.values():
            total += memory.nbytes()
        self.noted.append(total)
        return tensor


def bytes_in_a_step(blocks):
    log = MemoryLog(blocks)
    with saved_tensors_hooks(log.note, log.note):  # when it saves a tensor, and when it uses one
        output = blocks(hidden)
        output.sum().backward()
    return log.noted

# %% [markdown]
# **Predict:** how high is the peak of the recomputed blocks? (The 2,368,512 bytes of a block
# include its input.)

# %% tags=["predict"]
plain_noted = bytes_in_a_step(plain.blocks)
thrifty_noted = bytes_in_a_step(thrifty.blocks)
print(f"plain:      {max(plain_noted):,}")
print(f"recomputed: {max(thrifty_noted):,}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The peak is the first tooth. It has the 2,368,512 bytes of block 4, and 131,072 bytes for each of
# the three blocks before it, whose inputs are still kept. That makes 2,761,728. The plain blocks
# have their peak when the forward pass ends.
#
# </details>
#
# Here is everything that was noted. It is the drawing's hill and saw, but the recomputed blocks'
# forward pass is short, because it saves only four tensors:

# %% tags=["fold", "measured"]
# draw: what is kept during a step
lines = {}
for label, noted in [("plain", plain_noted), ("recomputed", thrifty_noted)]:
    lines[label] = (range(len(noted)), [each / 1e6 for each in noted])
fig, ax = curves("A hill, and a saw", "tensors saved or used so far", "MB kept", lines)
show(fig, alt="Megabytes kept during a step. Plain: up to 9.5, and down to almost 0. Recomputed: "
     "four teeth, the first up to 2.8, the last up to 2.4.")

# %% [markdown]
# ## What it costs
#
# Recomputation saves memory and adds operations. PyTorch's `FlopCounterMode` counts the
# floating-point operations of all matrix products inside its `with`. **Predict:** let the forward
# pass of the four blocks count as 1. How much is the backward pass, without recomputation and with
# it?

# %% tags=["predict"]
def backward_in_forwards(blocks):
    with FlopCounterMode(display=False) as forward:
        output = blocks(hidden)
    with FlopCounterMode(display=False) as backward:
        output.sum().backward()
    return backward.get_total_flops() / forward.get_total_flops()


print("plain:     ", backward_in_forwards(plain.blocks))
print("recomputed:", backward_in_forwards(thrifty.blocks))

# %% [markdown]
# <details><summary>What came out</summary>
#
# Without recomputation the backward pass takes 2, as it is drawn above, because each product has
# two gradients, one for each factor. With recomputation it takes 3.
#
# </details>
#
# With the forward pass, a step takes 3 without recomputation, and 4 with it. So recomputing whole
# blocks costs a third more operations in matrix products.
#
# ## Dropout
#
# So far nothing in our blocks was random. Many transformers also have dropout, which sets numbers
# to 0 at random and scales up the others. Here a dropout of one half gets eight ones, so that some
# become 0 and the others 2. **Predict:** where is the gradient 0, and where 2?

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
# The training run goes on without an error, with wrong gradients. So the second pass must draw what
# the first one drew. We save the **random state** before the first pass, and set it before the
# second. `fork_rng` then puts back the state that was there before its `with`, so that what is
# drawn later doesn't change. (This is the CPU's random state. A GPU has one of its own, which
# `recompute` in transformer.py and PyTorch's `checkpoint` save as well.)

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
# `recompute` in [transformer.py](transformer.py) does the same, also for several inputs and
# outputs. PyTorch's own function is called `checkpoint`. We compare all of them with a plain step,
# in a network with dropout:

# %%
def by_pytorch(function, x):
    return checkpoint(function, x, use_reentrant=False)


def gradients_with_dropout(way):
    torch.manual_seed(17)
    net = transformer.Transformer(len(alphabet), 64, heads=4, layers=4, tokens=32, dropout=0.1)
    if way is not None:
        recompute_blocks(net, way)
    return gradients(net)


expected = gradients_with_dropout(None)  # a plain step
first = gradients_with_dropout(first_way)
second = gradients_with_dropout(Recompute.apply)
theirs = gradients_with_dropout(transformer.recompute)
pytorchs = gradients_with_dropout(by_pytorch)
print("FirstRecompute:  ", torch.equal(first, expected))
print("Recompute:       ", torch.equal(second, expected))
print("transformer.py's:", torch.equal(theirs, expected))
print("PyTorch's:       ", torch.equal(pytorchs, expected))

# %% [markdown]
# `FirstRecompute` is wrong, as it must be. The others' gradients are those of the plain step, bit
# for bit. In your own program, write `checkpoint(block, x, use_reentrant=False)`.
#
# ## What is still too large
#
# Now a large model: 32 blocks of width 4,096, and a step with one sequence of 4,096 tokens. On
# PyTorch's `meta` device tensors have shapes and no memory. So we can make the model there and
# count its parameters, and our formulas tell the rest:

# %%
with torch.device("meta"):
    large = Transformer(vocabulary=32_000, width=4096, heads=32, layers=32, tokens=4096)
large_parameters = sum(p.numel() for p in large.parameters())
large_block = kept_by_block(1, 4096, 4096, heads=32)
large_input = 4 * 4096 * 4096
large_peak = large_block + 31 * large_input
print(f"{large_parameters:,} parameters")
print(f"weights, gradients, moments: {16 * large_parameters / 1e9:6.1f} GB")
print(f"activations of 32 blocks:    {32 * large_block / 1e9:6.1f} GB")
print(f"kept at the peak, recomputed:{large_peak / 1e9:6.1f} GB")

# %% [markdown]
# Recomputation makes the blocks' activations small, even in this model: 5.3 GB instead of 103.6,
# without what each operation needs for a moment. Two thirds of the 103.6 are attention weights,
# 131,072 of 196,612 numbers a token. PyTorch's own attention need not keep these (exercise 2). And
# in **bfloat16** a number has two bytes instead of four. Which parts of a step may be in 16 bits is
# the question of deeper: bfloat16 and scaled losses.
#
# But the weights, gradients and Adam's moments still take 107.6 GB, more than an A100 with 80 GB
# has. They stay, whatever is recomputed. So a part of them must be elsewhere, best on a second
# device. Chapter 16 shards these three, and each rank still computes whole layers. The other way is
# to divide the layers themselves.
#
# ## Summary
#
# - A step holds weights, gradients, the optimizer's state and activations. With Adam in float32 the
#   first three take 16 bytes a parameter. Activations grow with the batch.
# - What autograd keeps can be read from the code, and counted by `saved_tensors_hooks`.
# - Recomputation keeps a block's input and computes the block twice. On our CPU the gradients
#   are equal bit for bit, and the matrix products are those of four forward passes instead of
#   three. At the peak the blocks keep one block's activations and the inputs of the others.
# - The second forward pass must do what the first one did. So it needs the first one's random
#   state. Without it dropout's gradients are wrong, and no error says so.
# - Weights, gradients and the optimizer's state stay. When they don't fit, a part of
#   them must be elsewhere, best on a second device.
#
# Next, chapter 18: a layer's matrices, divided among ranks.
#
# **Further reading.** T. Chen et al., *Training Deep Nets with Sublinear Memory Cost* (2016),
# arXiv:1604.06174. V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer
# Models* (2022), arXiv:2205.05198.

# %% [markdown]
# ## Exercises
#
# 1. **A budget.** The four blocks may keep 6 MB at most, at any time in the step. How many of them
#    must be recomputed, and does it matter which? First use the formulas, then measure the peaks.
# 2. **PyTorch's attention.** Change `Attention.forward`: let
#    `F.scaled_dot_product_attention(query, key, value, is_causal=True)` compute `mixed`. What does
#    a block keep now? Which terms of the formula change?

# %% [markdown]
# ### Answer to *Your turn*
#
# The gradient goes in at `output.backward`. (`output.sum().backward()` would begin with ones, and
# only inside the `with`, where the sum is recorded.)

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
# Two blocks must be recomputed. With $m$ of them the forward pass ends with $m$ inputs and the
# activations of $4 - m$ blocks: 7.2 MB for one, 5.0 MB for two. And it matters which: the *last*
# block must not be among them. Its tooth would stand on the activations of the two plain blocks,
# and the peak would be 7.2 MB. If another block is recomputed instead, the last one's
# activations are already freed by then.

# %% tags=["solution"]
def peak_with(recomputed):
    """With these blocks recomputed."""
    some = make_net()
    for number in recomputed:
        some.blocks[number] = Recomputed(some.blocks[number], Recompute.apply)
    peak = max(bytes_in_a_step(some.blocks))
    print(f"blocks {recomputed} recomputed: peak {peak:,}")
    return peak


input_bytes = 4 * 16 * 32 * 64
assert peak_with([0]) == 3 * block_bytes + input_bytes
assert peak_with([0, 1]) == 2 * block_bytes + 2 * input_bytes
assert peak_with([1, 2]) == 2 * block_bytes + 2 * input_bytes
assert peak_with([2, 3]) == 3 * block_bytes + input_bytes

# %% [markdown]
# ### Answer 2
#
# The attention weights and the mask are no longer kept. Instead a block keeps one number for each
# head and token, from which the backward pass finds the weights again. So it is $16 \cdot
# \text{width} + \text{heads} + 4$ numbers a token, and long sequences keep no more for each token
# than short ones. (This is FlashAttention, recomputation within one operation: T. Dao et al., 2022,
# arXiv:2205.14135.)

# %% tags=["solution"]
class PyTorchsAttention(Attention):
    def forward(self, x):
        query = self.by_heads(self.query(x))
        key = self.by_heads(self.key(x))
        value = self.by_heads(self.value(x))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.join(mixed.transpose(1, 2).flatten(2))


block = Block(width=64, heads=4)
before = block(hidden)
attention = PyTorchsAttention(width=64, heads=4)
attention.load_state_dict(block.attention.state_dict())
block.attention = attention
assert (block(hidden) - before).abs().max() < 1e-5

found = bytes_kept(block, hidden)
print(f"a block keeps {found:,} bytes instead of {block_bytes:,}")
assert found == 4 * 16 * 32 * (16 * 64 + 4 + 4)
