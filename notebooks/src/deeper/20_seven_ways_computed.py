# %% [markdown]
# # Deeper · Seven ways, computed
#
# *My model doesn't fit on a device, or trains too slowly. Which way of dividing it helps, and how
# many bytes does a device then hold and send?* Seven ways are in use. You have built data, sharded
# data, tensor and pipeline parallelism (chapters 14, 16, 18 and 19); sequence parallelism is in
# deeper: Tokens and the vocabulary. Here each way becomes a function of a few lines that computes
# with your own numbers. Context and expert parallelism are new, so they get a small program on
# several ranks.
#
# ![Four ways to cut, each with a square that is cut for the devices 0 to 3. Data: the batch is cut
# between sequences, and each has all weights. Context: the batch is cut between tokens, and each
# has all weights. Pipeline: the weights are cut between layers, and each has the whole batch.
# Tensor: the weights are cut across the width of every layer, and each has the whole
# batch.](../src/drawings/four_cuts.svg)
#
# > **What you'll do:** compute seven ways with your own sizes, and run attention and experts that
# > are divided among ranks.
# >
# > **What you'll learn:** what each way divides, holds and sends; what its bytes grow with; which
# > ways go inside a machine when several are combined.
# >
# > **What you need:** chapters 16 to 19, best also 20, no GPU, and PyTorch 2.13 or newer. Reading
# > takes {reading time}, running about 20 seconds.

# %% tags=["torch"]
import math
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, "..")  # where the chapters' modules are
from pipeline import one_f_one_b, train_step
from ranks import ranks
from transformer import Transformer

# %% [markdown]
# ## Your numbers
#
# These are our numbers. Put in yours, and run the notebook again. (The sentences tell ours.)

# %%
k = 8  # devices
n = 8  # sequences in a step, of all devices together; a multiple of k
tokens = 4096  # in a sequence
width = 4096  # numbers of a token between the layers
layers = 32

# %% [markdown]
# Our model is the transformer of chapter 17, without what stands before and after its blocks. The
# matrices of one layer have $12h^2$ weights, where $h$ is the width: $4h^2$ in attention and $8h^2$
# in the MLP. (Norms and biases are much smaller, and left out.) Chapter 17 found that a layer keeps
# $16h$ numbers for each token, where attention doesn't keep its attention weights, as with
# `F.scaled_dot_product_attention`. So this is what one device would hold if it did everything
# alone. Like all functions below, this one counts *numbers*, not bytes:

# %%
def alone(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers
    activations = 16 * width * tokens * layers  # of one sequence: it takes one after the other
    sent = 0
    return weights, activations, sent


def show_way(way):
    weights, activations, sent = way(k, n, tokens, width, layers)
    held = 16 * weights / 1e9  # GB, with gradients and Adam's state
    kept = 2 * activations / 1e9  # in 16 bits
    print(f"{way.__name__:9} holds {held:5.1f} + {kept:4.1f} = {held + kept:5.1f} GB,",
          f"sends {2 * sent / 1e9:4.1f} GB")


show_way(alone)
weights, _, _ = alone(k, n, tokens, width, layers)
print(f"{weights / 1e9:.1f} billion weights")

# %% [markdown]
# We count 16 bytes a weight: 2 for itself, 2 for its gradient, and 12 for a copy in float32 and
# Adam's two means (deeper: bfloat16 and scaled losses). Activations have 2 bytes a number. So this
# model doesn't fit on an A100 with 80 GB.
#
# How long does the computing take? Each weight takes 6 operations for each token: 2 forward and 4
# backward. Attention also multiplies queries by keys, and its weights by the values. For $s$ tokens
# in a sequence these two products take $4sh$ operations forward and $8sh$ backward, for each token
# and layer:

# %%
OPERATIONS = 312e12 / 2  # a second: we assume half of an A100's peak


def operations(n, tokens, width, layers):
    of_weights = 6 * 12 * width**2
    of_attention = 12 * tokens * width
    return (of_weights + of_attention) * n * tokens * layers  # n * tokens are all tokens


seconds = operations(n, tokens, width, layers) / OPERATIONS
print(f"computing takes {seconds:.1f} s a step")

# %% [markdown]
# The two products take $12sh / 72h^2 = s/6h$ times as many operations as the weights: here a sixth,
# and with 128k tokens more than five times as many.
#
# The picture above shows where one can cut. The batch is a table of sequences by tokens, and the
# weights are a table of layers by width. Each can be cut in two directions. These four cuts are
# data, context, pipeline and tensor parallelism. The other three ways, sharded data, sequence and
# expert parallelism, are built on them.
#
# ## Cut the batch: data, and sharded data
#
# **Data parallelism** gives each device a part of the sequences and all weights. Once a step the
# gradients are summed by an all-reduce. In a ring each device sends $2(k-1)/k$ times as many
# numbers as the array has (chapter 03). If a device has several sequences, it takes one after the
# other.

# %%
def data(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers
    activations = 16 * width * tokens * layers
    sent = 2 * (k - 1) / k * weights  # gradients, by an all-reduce
    return weights, activations, sent


show_way(data)

# %% [markdown]
# That makes training faster, because each device computes for fewer sequences. But it doesn't make
# the model fit. **Sharded data parallelism** (ZeRO's stage 3, or FSDP, chapter 16) keeps a part of
# each weight, gradient and state on each device. Weights are gathered in the forward pass and again
# in the backward pass, and gradients are reduced and scattered. Each of these three is half of an
# all-reduce, and happens for each sequence that the device takes. **Predict:** what does a device
# hold now, and how many times as much as with data parallelism does it send?

# %% tags=["predict"]
def sharded(k, n, tokens, width, layers):
    all_weights = 12 * width**2 * layers
    weights = all_weights / k
    activations = 16 * width * tokens * layers
    once = (k - 1) / k * all_weights  # all weights gathered, or all gradients scattered
    sent = 3 * once * n / k
    return weights, activations, sent


show_way(sharded)

# %% [markdown]
# <details><summary>What came out</summary>
#
# It holds an eighth of weights, gradients and state, 12.9 GB instead of 103.1, and all of its
# activations. It sends 33.8 GB, 1.5 times as much: three halves of an all-reduce instead of two.
#
# </details>
#
# (We left out the layer that is whole while it computes. FSDP can also leave weights gathered from
# one sequence to the next, as in chapter 20's program; then it sends less and holds more.)
#
# ## Cut the model: tensor, sequence and pipeline
#
# **Tensor parallelism** cuts the width of every layer: some heads of attention, and a part of the
# MLP's middle. Each layer has four all-reduces of the hidden states, two forward and two backward
# (chapter 18). Of the 16 numbers that a layer keeps for each token and each number of the width, 12
# are inside attention and MLP, so they are divided. The other 4 are the inputs of the two norms, of
# attention and of the MLP, which each device has whole. **Predict:** with our numbers, which sends
# more, data or tensor parallelism, and how many times as much?

# %% tags=["predict"]
def tensor(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers / k
    activations = (4 + 12 / k) * width * tokens * layers
    all_reduce = 2 * (k - 1) / k * n * tokens * width
    sent = 4 * layers * all_reduce
    return weights, activations, sent


show_way(tensor)
_, _, by_data = data(k, n, tokens, width, layers)
_, _, by_tensor = tensor(k, n, tokens, width, layers)
print(f"tensor sends {by_tensor / by_data:.1f} times as much as data")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Tensor parallelism sends 60.1 GB, 2.7 times as much as data parallelism. The one sends
# activations, which grow with the tokens of a step. The other sends gradients, which don't. The
# quotient is $4nsh / 12h^2 = ns / 3h$ for $n$ sequences of $s$ tokens and the width $h$, whatever
# $k$ is. So with more than $3h$ tokens a step tensor parallelism sends more.
#
# </details>
#
# In return it divides the weights without ever gathering them, and even a single sequence is
# computed by all devices together.
#
# **Sequence parallelism** is added to tensor parallelism. It divides those other 4 numbers, too: a
# device has only its part of the tokens wherever a norm computes. An all-reduce is a reduce-scatter
# and an all-gather, and between these two halves each device has its own tokens. So the four
# all-reduces become eight halves, which send as many bytes. But what was gathered for the forward
# pass isn't kept, so it is gathered once more in the backward pass, once for attention and once for
# the MLP (V. Korthikanti et al., 2022, arXiv:2205.05198, section 4.2.2).
# (For tensor parallelism alone their equation 2 has $10 + 24/k$ bytes, besides attention weights,
# and our $4 + 12/k$ numbers are $8 + 24/k$ bytes: they count two dropout masks, too.)

# %%
def sequence(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers / k
    activations = 16 / k * width * tokens * layers
    half = (k - 1) / k * n * tokens * width  # of an all-reduce
    sent = (8 + 2) * layers * half
    return weights, activations, sent


show_way(sequence)

# %% [markdown]
# **Pipeline parallelism** cuts between the layers. A stage sends one activation forward and one
# gradient back for each micro-batch, here one sequence (chapter 19). It has only some of the
# layers. But the first stage keeps the activations of several micro-batches at a time, with 1F1B as
# many as there are stages.

# %%
def pipeline(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers / k
    micro_batches = min(k, n)  # kept at a time by the first stage
    activations = micro_batches * 16 * width * tokens * layers / k
    neighbours = min(k - 1, 2)  # of a stage in the middle; the first and the last have one
    sent = neighbours * n * tokens * width
    return weights, activations, sent


show_way(pipeline)
bubble = (k - 1) / (n + k - 1)
print(f"each stage is idle for {100 * bubble:.0f} % of the time")

# %% [markdown]
# With our numbers a pipeline sends least by far. Its price is the bubble of chapter 19: with as
# many micro-batches as stages, devices are idle for nearly half of the time. With 64 sequences
# instead of 8 it would be 10 %.
#
# Do real stages send that? We count it for four blocks of width 16 and 8 sequences of 8 tokens,
# with two stages and with four. Messages go through `batch_isend_irecv`:

# %%
torch.manual_seed(0)
hidden = torch.randn(8, 8, 16).double()  # what goes into the first block
target = torch.randn(8, 8, 16).double()


def numbers_sent(stages):
    rank = dist.get_rank()
    sizes = []
    exchange = dist.batch_isend_irecv

    def noted(messages):
        for each in messages:
            if each.op is dist.isend:
                sizes.append(each.tensor.numel())
        return exchange(messages)

    dist.batch_isend_irecv = noted  # until the end of this step
    net = Transformer(vocabulary=20, width=16, heads=4, layers=4, tokens=8).double()
    blocks = 4 // stages  # of each stage
    stage = net.blocks[rank * blocks:(rank + 1) * blocks]
    steps = one_f_one_b(stages, micro_batches=8)[rank]
    train_step(stage, steps, hidden, target, F.mse_loss, 8, shape=(1, 8, 16))
    dist.batch_isend_irecv = exchange
    return sum(sizes)


for stages in [2, 4]:
    counted = ranks(numbers_sent, stages, world=stages)
    _, _, by_formula = pipeline(stages, n=8, tokens=8, width=16, layers=4)
    print(f"{stages} stages send {counted} numbers; formula {by_formula:,}")
    assert max(counted) == by_formula

# %% [markdown]
# Of four stages, those in the middle send what the formula says, and those at the ends half of it,
# because they have one neighbour.
#
# ## Context: attention over keys that lie elsewhere
#
# What if a single sequence is too long for a device? **Context parallelism** cuts it between
# tokens, everywhere, and each device has all weights. Norms and MLPs take each token alone, so they
# need no message. But in attention each token needs the keys and values of *all* tokens. **Ring
# attention** (H. Liu et al., 2023, arXiv:2310.01889) brings them one block after the other:
#
# ![Four devices in a ring. Each keeps the queries of its own tokens. The keys and values go from
# device to device, so that after three hops each device has seen those of all
# tokens.](../src/drawings/ring_attention.svg)
#
# For that, attention must be computed in parts. Let us try two parts, for eight tokens of width 4,
# without heads and without the mask of later tokens:

# %%
torch.manual_seed(1)
queries = torch.randn(8, 4).double()
keys = 3 * torch.randn(8, 4).double()  # large scores, so that some keys count much more
values = torch.randn(8, 4).double()


def attention(query, key, value):
    scores = query @ key.T / math.sqrt(4)
    return scores.softmax(dim=1) @ value


whole = attention(queries, keys, values)
first = attention(queries, keys[:4], values[:4])
second = attention(queries, keys[4:], values[4:])
mean = (first + second) / 2
print("the first query's result:", [round(number, 3) for number in whole[0].tolist()])
print("the mean of two parts:   ", [round(number, 3) for number in mean[0].tolist()])

# %% [markdown]
# The mean is wrong, because each softmax divides by the sum of its own part only. So a part must
# also tell its sum. A softmax is $e^{\text{score}}$ divided by the sum of all of them, and to keep
# these numbers small, the largest score is subtracted first. The parts may have different largest
# scores, so a part tells its own, too, and is scaled by $e^{\text{its largest} - \text{the largest
# of all}}$:

# %%
def part_of_attention(query, key, value):
    scores = query @ key.T / math.sqrt(4)
    largest = scores.max(dim=1, keepdim=True).values
    powers = (scores - largest).exp()
    return largest, powers.sum(dim=1, keepdim=True), powers @ value


largest_1, sum_1, result_1 = part_of_attention(queries, keys[:4], values[:4])
largest_2, sum_2, result_2 = part_of_attention(queries, keys[4:], values[4:])
largest = torch.maximum(largest_1, largest_2)
scale_1 = (largest_1 - largest).exp()
scale_2 = (largest_2 - largest).exp()
combined = (scale_1 * result_1 + scale_2 * result_2) / (scale_1 * sum_1 + scale_2 * sum_2)
print("equal to 1e-12:", torch.allclose(combined, whole, rtol=0, atol=1e-12))
assert torch.allclose(combined, whole, rtol=0, atol=1e-12)

# %% [markdown]
# FlashAttention does the same with blocks on one device (T. Dao et al., 2022, arXiv:2205.14135,
# section 3.1). On several ranks, the blocks come round the ring. I am rank $r$. My queries stay
# here. In hop $j$ I have the keys and values of rank $(r - j) \bmod k$, I add their part, and I
# send them on to rank $r + 1$.

# %%
def ring_attention():
    rank = dist.get_rank()
    query = queries.chunk(4)[rank]
    block = torch.stack([keys.chunk(4)[rank], values.chunk(4)[rank]])
    largest, total, result = part_of_attention(query, block[0], block[1])
    sent = 0
    for hop in range(1, 4):
        received = torch.empty_like(block)
        sending = dist.isend(block, (rank + 1) % 4)
        dist.recv(received, (rank - 1) % 4)
        sending.wait()
        sent += block.numel()
        block = received

        new, new_sum, new_result = part_of_attention(query, block[0], block[1])
        old = largest
        largest = torch.maximum(old, new)
        total = (old - largest).exp() * total + (new - largest).exp() * new_sum
        result = (old - largest).exp() * result + (new - largest).exp() * new_result
    return result / total, sent


on_rank = ranks(ring_attention, world=4)
joined = torch.cat([result for result, _ in on_rank])
print("equal to 1e-12:", torch.allclose(joined, whole, rtol=0, atol=1e-12))
print("numbers sent by each rank:", [sent for _, sent in on_rank])
assert torch.allclose(joined, whole, rtol=0, atol=1e-12)
assert on_rank[0][1] == 2 * (4 - 1) / 4 * 8 * 4  # the next sentence's formula

# %% [markdown]
# Each rank sends three blocks of 2 keys and 2 values with 4 numbers each, which is $2(k-1)/k \cdot
# sh$. The backward pass needs keys and values once more, and their gradients go round with them:
# two more such rounds, at least, so three for keys and as many for values. And each device has all
# weights, but saw only some of the tokens. So the gradients of the weights are summed, as in data
# parallelism:

# %%
def context(k, n, tokens, width, layers):
    weights = 12 * width**2 * layers
    activations = 16 * width * tokens / k * layers
    around = (k - 1) * n * tokens / k * width  # keys once round the ring, without the last hop
    sent = 6 * around * layers + 2 * (k - 1) / k * weights
    return weights, activations, sent


show_way(context)

# %% [markdown]
# So context parallelism cuts activations, not weights: it is for long sequences, and is combined
# with ways that divide weights. While a device computes with one block, the next can be on its way.
# In a causal model the last tokens have the most keys, so that ranks with later tokens compute
# more, unless tokens are dealt out differently (W. Brandon et al., 2023, arXiv:2311.09431). Llama 3
# gathers all keys and values instead of sending them round, because other masks are easier then,
# such as one that keeps documents apart, and because its queries share keys, so that there are
# fewer of them (arXiv:2407.21783, section 3.3.2).
#
# ## Experts: each token goes to one of many MLPs
#
# The last way comes with another kind of model. A layer with a **mixture of experts** has several
# MLPs, the *experts*, and a small matrix, the *router*, that sends each token to one of them (W.
# Fedus et al., *Switch Transformers*, 2021, arXiv:2101.03961, section 2.1) or to two (D. Lepikhin
# et al., *GShard*, 2020, arXiv:2006.16668, section 2.2). So there are many more weights, and a
# token still uses only a few of them. In **expert parallelism** each device has some of the experts
# and a part of the sequences. Tokens travel to their experts and back:
#
# ![Two devices, each with six tokens and one expert. Tokens of either device that chose the other's
# expert cross over, and their results come back.](../src/drawings/experts.svg)
#
# Each rank has something different for each other rank. Such an exchange is called an
# **all-to-all**. Here are twelve tokens, two experts and a router. In one process:

# %%
torch.manual_seed(3)
x = torch.randn(12, 4).double()
router = torch.randn(4, 2).double()
experts = [torch.nn.Linear(4, 4).double() for _ in range(2)]


def choose(x):
    probability, choice = (x @ router).softmax(dim=1).max(dim=1)
    return probability.unsqueeze(1), choice


with torch.no_grad():
    probability, choice = choose(x)
    expected = torch.empty_like(x)
    for number in range(12):
        mlp = experts[choice[number]]
        expected[number] = probability[number] * mlp(x[number])
print("chosen experts:", choice[:6].tolist(), choice[6:].tolist())

# %% [markdown]
# (The result is multiplied by the router's probability, because otherwise the router would get no
# gradient.) Now rank 0 has the first six tokens and expert 0, and rank 1 the others and expert 1. A
# rank puts its tokens in the order of their experts, and first tells each rank how many will come.
# **Predict:** how many tokens does each rank send away, and how many does each expert compute?

# %% tags=["predict"]
def one_expert_each():
    rank = dist.get_rank()
    mine = x.chunk(2)[rank]
    probability, choice = choose(mine)
    order = choice.argsort(stable=True)
    to_rank = choice.bincount(minlength=2)  # how many tokens go to each rank
    from_rank = torch.empty_like(to_rank)
    dist.all_to_all_single(from_rank, to_rank)
    leave, come = to_rank.tolist(), from_rank.tolist()

    arrived = torch.empty(sum(come), 4).double()
    dist.all_to_all_single(arrived, mine[order], come, leave)
    with torch.no_grad():
        computed = experts[rank](arrived)
    returned = torch.empty_like(mine)
    dist.all_to_all_single(returned, computed, leave, come)

    result = torch.empty_like(mine)
    result[order] = returned  # back to their places
    return probability * result, leave[1 - rank], len(arrived)


on_rank = ranks(one_expert_each)
for rank, (result, away, computed) in enumerate(on_rank):
    print(f"rank {rank}: sends {away} of 6 tokens away, its expert computes {computed}")
joined = torch.cat([result for result, _, _ in on_rank])
print("equal to 1e-12:", torch.allclose(joined, expected, rtol=0, atol=1e-12))
assert torch.allclose(joined, expected, rtol=0, atol=1e-12)

# %% [markdown]
# <details><summary>What came out</summary>
#
# Rank 0 sends 4 of its 6 tokens away, and rank 1 sends 3. Expert 0 computes 5 tokens and expert 1
# computes 7. The result is that of one process.
#
# </details>
#
# So the experts' work is uneven, and it depends on the tokens. Both papers set a limit, the
# **capacity**: what an expert gets beyond it passes the layer unchanged. And both add an
# **auxiliary loss**, which is smallest where the router spreads its tokens evenly (section 2.2 in
# both).
#
# If tokens are spread evenly, $(k-1)/k$ of a device's tokens travel, twice forward, and their
# gradients twice backward. The weights of attention are on all devices, and their gradients are
# summed. With $k$ experts in each layer a device has one of them, so it holds as much as before:

# %%
def expert(k, n, tokens, width, layers):
    shared = 4 * width**2 * layers  # those of attention
    own = 8 * width**2 * layers  # one expert in each layer
    weights = shared + own
    activations = 16 * width * tokens * layers
    all_to_all = (k - 1) / k * n / k * tokens * width
    sent = 4 * all_to_all * layers + 2 * (k - 1) / k * shared
    return weights, activations, sent


show_way(expert)
print(f"{(4 + 8 * k) * width**2 * layers / 1e9:.1f} billion weights on all devices together")

# %% [markdown]
# So this row is about another model, with more weights than that of the other rows. Its activations
# are those of a token that visits one expert, and we took tokens to be spread evenly.
#
# ## All seven
#
# An A100's NVLink sends 300 GB/s to others inside a machine. Between machines each GPU has a
# network card of 25 GB/s. (These are chapter 18's numbers.) Here are bytes divided by these, beside
# the time of computing. **Predict:** of which ways do the messages take longer than the computing,
# if devices are in different machines?

# %% tags=["predict"]
NVLINK = 300e9  # bytes a second
CARD = 25e9

ways = [data, sharded, tensor, sequence, context, pipeline, expert]
seconds = operations(n, tokens, width, layers) / k / OPERATIONS
print(f"computing: {seconds:.2f} s on each of {k} devices")
print("            GB held  GB sent   in a machine   between")
for way in ways:
    weights, activations, sent = way(k, n, tokens, width, layers)
    held = 16 * weights + 2 * activations
    print(f"{way.__name__:10} {held / 1e9:8.1f} {2 * sent / 1e9:8.1f}",
          f"{2 * sent / NVLINK:11.2f} s {2 * sent / CARD:9.2f} s")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Between machines it is four of the seven: sharded data, tensor, sequence and context. Inside a
# machine it is none.
#
# </details>
#
# These are bytes over bandwidth, not measured times, and no latency is in them. How much of such a
# time a step really waits depends on what can be sent *while* something else is computed. The
# gradients of data parallelism can leave during the backward pass, and the weights of the next
# layer can come while this one computes (chapters 14 and 16). The next block of keys can come
# during this one. But in the forward pass of tensor parallelism the next layer needs the sum before
# it can begin (chapter 18), and an expert needs its tokens. What overlap is worth on a given link
# must be measured (deeper: What overlap is worth).
#
# **What grows?** Your model, batch or number of devices may be larger. We double one at a time.
# (With twice the devices we take twice the sequences, too, so that each computes as much as
# before.) **Predict:** which ways send no more if the number of sequences doubles? Which send no
# more if devices *and* sequences double?

# %% tags=["predict"]
def computed(k, n, tokens, width, layers):
    return 0, 0, operations(n, tokens, width, layers) / k  # instead of what is sent


print("             twice the sequences   twice as wide   twice devices and sequences")
for way in [computed, *ways]:
    _, _, before = way(k, n, tokens, width, layers)
    _, _, sequences = way(k, 2 * n, tokens, width, layers)
    _, _, wider = way(k, n, tokens, 2 * width, layers)
    _, _, devices = way(2 * k, 2 * n, tokens, width, layers)
    print(f"{way.__name__:10} {sequences / before:14.1f} {wider / before:19.1f}",
          f"{devices / before:20.1f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# With twice the sequences only data parallelism sends as much as before, because gradients are as
# large as the weights, whatever the batch. With twice the devices and sequences data, sharded and
# expert parallelism send nearly as much as before. In the last two that is because each device has
# as many sequences as before. In the other ways all sequences pass through every device.
#
# </details>
#
# The 2.0 of sharded data parallelism comes from our assumption that a device takes one sequence
# after the other. If it takes two together, it gathers as often as before, so that the factor is
# 1.0, but it keeps the activations of two.
#
# Read the table against its first row, the computing of a device. With more sequences the computing
# grows and data parallelism's messages don't, so a larger batch helps it. A larger batch doesn't
# help tensor parallelism, whose messages grow as fast as the computing. But a *wider* model does:
# computing grows nearly four times, and its messages twice. And tensor parallelism can't grow with
# the number of devices as data parallelism can: that is why it stays small, and data parallelism is
# put around it.
#
# ## Combined
#
# Large models use several ways at once, on a mesh (chapter 20). The model of this cell has 64
# billion weights, and it is trained on 64 GPUs, eight in each of eight machines, with 512 sequences
# a step. On *data × pipeline × tensor* ranks, each GPU has the tensor part of its stage, for the
# sequences of its data rank:

# %%
def on_mesh(data_ranks, stages, tensor_ranks):
    n, tokens, width, layers = 512, 4096, 8192, 80
    mine = n / data_ranks  # sequences, each a micro-batch
    weights = 12 * width**2 * layers / (stages * tensor_ranks)
    kept = min(stages, mine)  # micro-batches at a time
    activations = kept * (4 + 12 / tensor_ranks) * width * tokens * layers / stages
    all_reduces = 4 * mine * layers / stages  # each of the hidden states of one sequence
    by_tensor = all_reduces * 2 * (tensor_ranks - 1) / tensor_ranks * tokens * width
    by_pipeline = min(stages - 1, 2) * mine * tokens * width  # to one neighbour or two
    by_data = 2 * (data_ranks - 1) / data_ranks * weights
    bubble = (stages - 1) / (mine + stages - 1)
    return 16 * weights, 2 * activations, 2 * by_tensor, 2 * by_pipeline, 2 * by_data, bubble


print("  data pipeline tensor   GB held   GB by tensor, pipeline, data   bubble")
for shape in [(64, 1, 1), (8, 1, 8), (4, 2, 8), (2, 4, 8), (1, 8, 8)]:
    of_weights, kept, by_tensor, by_pipeline, by_data, bubble = on_mesh(*shape)
    print(f"{shape[0]:6} {shape[1]:8} {shape[2]:6} {(of_weights + kept) / 1e9:9.0f}",
          f"{by_tensor / 1e9:14.0f} {by_pipeline / 1e9:9.0f} {by_data / 1e9:5.0f}",
          f"{100 * bubble:7.1f} %")

# %% [markdown]
# With eight tensor ranks a GPU holds less, and with more stages still less. The first mesh of this
# list that fits in 80 GB is 2 × 4 × 8. **Predict:** on this mesh, the dimension that goes inside a
# machine sends 300 GB/s, and the others 25. How long do the messages of a step take if tensor is
# inside, and how long if tensor goes between machines and the other two inside?

# %% tags=["predict"]
_, _, by_tensor, by_pipeline, by_data, _ = on_mesh(2, 4, 8)
others = by_pipeline + by_data
computing = operations(n=512, tokens=4096, width=8192, layers=80) / 64 / OPERATIONS
print(f"tensor inside:  {by_tensor / NVLINK:5.1f} s + {others / CARD:4.1f} s")
print(f"tensor between: {by_tensor / CARD:5.1f} s + {others / NVLINK:4.1f} s")
print(f"computing:      {computing:5.1f} s")

# %% [markdown]
# <details><summary>What came out</summary>
#
# With tensor inside a machine, the messages take 8.0 and 1.5 seconds. With tensor between machines
# they take 96.2 seconds, more than the computing.
#
# </details>
#
# Tensor parallelism sends most bytes. It also waits most often, for four all-reduces in each layer
# and for each sequence, and each has a *latency*, too (chapter 03). So **tensor goes inside a
# machine, a pipeline goes across machines until the model fits, and data parallelism takes the
# rest**. This is the advice of D. Narayanan et al. (2021, arXiv:2104.04473, section 3). Sequence
# parallelism goes where tensor goes. Context parallelism is the next dimension outwards in Llama 3
# (arXiv:2407.21783, section 3.3.2), and sharding goes with data. In chapter 20 the last dimension
# of a mesh has consecutive ranks, so there *tensor* is the last one.
#
# What the functions leave out: embeddings and the output layer, which also can be divided (chapter
# 18); recomputation, which keeps less and computes more (chapter 17); kernels that skip what a
# causal mask hides, which halves attention's two products; gradients summed in float32,
# which are twice as many bytes; Adam's state sharded over the data ranks; and Megatron's pipelines,
# in which each tensor rank sends only its part of an activation (section 4.1 of the same paper).
# And a way that sends little may still be slow. Only a measurement on your own machines tells the
# time.
#
# ## Summary
#
# | way | divides | sends in a step |
# | --- | --- | --- |
# | data (chapter 14) | sequences | gradients of weights, once |
# | sharded (chapter 16) | sequences, and where weights are kept | weights twice, gradients |
# | tensor (chapter 18) | the width of each layer | hidden states, 4 all-reduces a layer |
# | sequence | the same; tokens elsewhere | hidden states, 10 halves a layer |
# | pipeline (chapter 19) | layers | hidden states between stages |
# | context | tokens | keys, values, their gradients; gradients of weights |
# | expert | sequences, and experts | tokens 4 times; gradients of shared weights |
#
# - **The weights don't fit:** shard them, or divide the model by tensor or pipeline parallelism.
#   **The activations don't fit:** first recompute (chapter 17), then sequence or context
#   parallelism. **All fits, and it is slow:** data parallelism, with a batch that grows with the
#   devices.
# - The batch can be cut between sequences or tokens, the weights between layers or across the
#   width.
# - Gradients don't grow with the tokens of a step. Activations do, and they don't grow with the
#   square of the width as most computing does. So a larger batch helps data parallelism, and a
#   wider model tensor parallelism.
# - Attention can be computed over parts of the keys, if each part tells its largest score and its
#   sum.
# - Experts make a model larger without more computing for a token. An all-to-all brings tokens to
#   them, and their work is as even as the router makes it.
#
# PyTorch 2.13 has `DistributedDataParallel`, `fully_shard`, `ColwiseParallel` with
# `RowwiseParallel`, `SequenceParallel`, `PipelineStage` with `Schedule1F1B`, and as an experiment
# `context_parallel`. For experts it has the all-to-all.
#
# **Further reading.** Narayanan et al. is the paper to read first. *The Ultra-Scale Playbook*
# (huggingface.co/spaces/nanotron/ultrascale-playbook) goes through all of these with measurements,
# and *picotron* (github.com/huggingface/picotron) has most of them in little code. *How to Scale
# Your Model* (jax-ml.github.io/scaling-book) does the same arithmetic for TPUs.
