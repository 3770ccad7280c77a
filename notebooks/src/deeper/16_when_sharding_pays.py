# %% [markdown]
# # Deeper · When sharding pays
#
# Stage 3 of chapter 16 saves memory, and sends weights in each pass. *How many tokens must each GPU
# compute, so that these messages cost little time?* We hide messages behind layers, compute when
# there is enough to hide behind, and compare with two published trainings, on up to 1,536 GPUs.
#
# > **What you'll do:** see prefetching on a timeline; compute how long messages and layers take;
# > put two published trainings beside that.
# >
# > **What you'll learn:** what decides whether messages can be hidden, and what doesn't; what
# > became of a step's time when GPUs were added, with a batch that grew and with a fixed one.
# >
# > **What you need:** chapter 16, no GPU, and PyTorch 2.13 or newer. Reading takes {reading time}.

# %% tags=["torch"]
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from helpers.plotting import show, timeline

sys.path.insert(0, "..")  # where chapter 14's ranks.py is
from ranks import ranks

# %% [markdown]
# ## Prefetching
#
# A layer that gathers its weight when it begins must wait for it. But the layer that comes next is
# known. So its weight can be gathered while this layer computes: that is called **prefetching**. To
# see it, we take four layers on two ranks, and make the link and the layers slow:

# %%
def slow_gather(shard, events):
    begin = time.perf_counter()
    time.sleep(0.005)  # a slow link
    weight = shard.new_empty(16, 16)
    dist.all_gather_single(weight, shard)
    events.append(("link", begin, time.perf_counter()))
    return weight


def slow_layer(x, weight, events):
    begin = time.perf_counter()
    time.sleep(0.040)  # a large product
    y = torch.tanh(x @ weight.T)
    events.append(("layers", begin, time.perf_counter()))
    return y

# %% [markdown]
# A second thread does the gathering. `submit` gives it something to do and returns at once;
# `result` waits until that is done. With prefetching, the next weight is asked for *before* the
# layer computes:

# %%
def forward_pass(prefetching):
    events = []
    shards = []
    for number in range(4):
        torch.manual_seed(number)
        weight = torch.randn(16, 16)
        shards.append(weight.chunk(dist.get_world_size())[dist.get_rank()])
    link = ThreadPoolExecutor(1)  # one thread
    x = torch.ones(1, 16)
    if prefetching:
        coming = link.submit(slow_gather, shards[0], events)
        for number in range(4):
            weight = coming.result()
            if number < 3:
                coming = link.submit(slow_gather, shards[number + 1], events)
            x = slow_layer(x, weight, events)
    else:
        for shard in shards:
            weight = link.submit(slow_gather, shard, events).result()
            x = slow_layer(x, weight, events)
    return x, events


without, events_without = ranks(forward_pass, False)[0]  # of rank 0
with_it, events_with = ranks(forward_pass, True)[0]
assert torch.equal(with_it, without)

# %% tags=["fold", "measured"]
# draw: when rank 0 gathers and computes, without and with prefetching
panels = {}
for name, events in [("without prefetching", events_without), ("with", events_with)]:
    first = min(begin for lane, begin, end in events)
    lanes = {"link": [], "layers": []}
    for lane, begin, end in events:
        kind = "communication" if lane == "link" else "compute"
        lanes[lane].append((1000 * (begin - first), 1000 * (end - begin), kind))
    panels[name] = lanes
during = {}  # how many gathers begin before the layer before them has ended
for name, lanes in panels.items():
    during[name] = 0
    for layer, gather in zip(lanes["layers"], lanes["link"][1:]):
        begin, length, kind = layer
        if gather[0] < begin + length:
            during[name] += 1
assert during["without prefetching"] == 0
longest = max(begin + length for begin, length, _ in panels["without prefetching"]["layers"])
title = f"With prefetching, {during['with']} of 3 later weights come while a layer computes"
fig, _ = timeline(title, panels, dict.fromkeys(panels, (-2, longest + 2)))
show(fig, alt=f"{title}. Timelines of four gathers and four layers. Without prefetching they take "
     "turns.")

# %% [markdown]
# If each gather takes less time than a layer, only the first weight is waited for. The price is
# memory, since two whole weights are there at the same time.
#
# PyTorch's `fully_shard` prefetches by itself. In the backward pass, each group of parameters
# starts to gather the one that is needed next (`_backward_prefetch` in
# `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`). In the forward pass Python runs ahead
# of the GPU, and so has asked for the next weight before a layer has been computed. (Where Python
# is too slow for that, `set_modules_to_forward_prefetch` says what to ask for earlier.)
#
# ## When is there enough to hide behind?
#
# For each weight, each token costs 6 operations, 2 in the forward pass and 4 in the backward pass
# (attention's scores are left out). And each weight is gathered in the forward pass, gathered again
# in the backward pass, and its gradient is reduced. In bfloat16, with gradients in float32, these
# are 2 + 2 + 4 bytes, whatever the number of tokens.
#
# The GPUs are in machines of eight. A ring goes through all GPUs of a machine and then to the next
# machine, so each byte enters a machine once. We assume a machine with eight network adapters of
# 400 Gbit/s each, that share this work, and GPUs that do 300 TFLOP/s, about a third of what an
# H100's data sheet promises. **Predict:** what changes the share of messages most: ten times the
# weights, ten times the GPUs, or ten times the tokens on each?

# %% tags=["predict"]
def computing_seconds(weights, tokens, flops=300e12):
    """Of one step; tokens are those of one GPU."""
    return 6 * weights * tokens / flops


def message_seconds(weights, gpus, bytes_each=2 + 2 + 4, adapter_bits=400e9):
    """Of one step, if nothing hides them."""
    machine_bytes = 8 * adapter_bits / 8  # in a second: eight adapters, eight bits a byte
    sent = bytes_each * weights * (gpus - 1) / gpus
    return sent / machine_bytes


print("  weights    GPUs  tokens   computing  messages")
for weights, gpus, tokens in [(8e9, 128, 1000), (80e9, 128, 1000), (8e9, 1280, 1000),
                              (8e9, 128, 10_000)]:
    computing = computing_seconds(weights, tokens)
    messages = message_seconds(weights, gpus)
    print(f"{weights / 1e9:4.0f} billion {gpus:5} {tokens:7,} {computing:9.2f} s {messages:7.2f} s,"
          f" {messages / computing:.0%} of the computing")

# %% [markdown]
# <details><summary>What came out</summary>
#
# The tokens; the others hardly change it. Ten times the weights compute ten times as long and send
# ten times as much. Ten times the GPUs change neither, since each receives all weights anyhow.
#
# </details>
#
# Messages can hide if they take less time than the computing. The weights cancel out, and what is
# left is a number of tokens: **bytes a weight × a GPU's operations a second ÷ (6 × a machine's
# bytes a second)**.

# %%
for adapter_bits in [400e9, 100e9, 25e9]:
    machine_bytes = 8 * adapter_bits / 8
    tokens = (2 + 2 + 4) * 300e12 / (6 * machine_bytes)
    print(f"adapters of {adapter_bits / 1e9:3.0f} Gbit/s: at least {tokens:6,.0f} tokens on a GPU")

# %% [markdown]
# So add GPUs as long as each of them has that many tokens *in one pass*. (By default several passes
# before an update don't help, because stage 3 sends all of that in each of them. To leave the
# gradients unreduced until the last, by `set_requires_gradient_sync(False)`, saves up to half of
# the bytes, for the memory of whole gradients.) This is a lower limit, for a link at its full rate
# and with everything hidden. How far from it are real trainings?
#
# ## A batch that grows with the GPUs
#
# PyTorch's project torchtitan trained Llama 3.1, with 8 billion weights, by FSDP on 8 H100s, one
# machine, and on 128. Each had two sequences of 8,192 tokens, so 16 times the GPUs took 16 times
# the batch. It publishes the tokens a second of each GPU and the GPUs' memory. **Predict:** how
# much longer is a step on 128 GPUs?

# %% tags=["predict"]
weights = 8_030_261_248
tokens = 2 * 8192
seconds_8 = tokens / 5762
seconds_128 = tokens / 5605
messages = message_seconds(weights, gpus=128)
print(f"a step on 8 GPUs takes {seconds_8:.2f} s, on 128 GPUs {seconds_128:.2f} s, "
      f"{seconds_128 / seconds_8 - 1:.1%} more; all messages would take {messages:.2f} s")

saved = 82.4 - 67.0  # GiB on each GPU
by_chapter_16 = 16 * weights * (1 / 8 - 1 / 128) / 2**30  # 16 bytes a weight
print(f"each GPU holds {saved:.1f} GiB less; by chapter 16's table {by_chapter_16:.1f}")

# %% [markdown]
# <details><summary>What came out</summary>
#
# 2.8 % longer. With 16 times as many tokens as the limit for such adapters, nearly everything can
# be hidden. (One machine has the same messages, over NVLink, about 0.12 s of them. So the
# difference doesn't tell how many were hidden.)
#
# </details>
#
# (Source: torchtitan's `benchmarks/llama3_h100_202412_torchtitan.md`, the rows without `compile`;
# one reading each. Its GPUs were limited to 500 W instead of 700, and slower computing hides more.)
#
# ## A fixed batch
#
# D. Narayanan et al. (2021, arXiv:2104.04473, table 2) trained 174.6 billion weights by ZeRO's
# stage 3, always with 1,536 sequences of 2,048 tokens in a step, on A100s, with eight adapters of
# 200 Gbit/s a machine. They publish the days that 300 billion tokens would take. With more GPUs
# each has fewer tokens, and as many messages. Let the step of 384 GPUs be all computing, which can
# be divided, and add all messages, of 2 + 2 + 2 bytes: a rough estimate, which counts them twice,
# since the step of 384 GPUs has some, too. **Predict:** how much faster are 1,536 GPUs than 384?

# %% tags=["predict"]
steps = 300e9 / (1536 * 2048)  # of the whole training
days = {384: 90, 768: 74, 1536: 74}
seconds_384 = days[384] * 24 * 3600 / steps
for gpus in days:
    published = days[gpus] * 24 * 3600 / steps
    tokens = 1536 * 2048 // gpus
    computing = seconds_384 * 384 / gpus
    messages = message_seconds(174.6e9, gpus, bytes_each=2 + 2 + 2, adapter_bits=200e9)
    print(f"{gpus:5} GPUs, {tokens:5,} tokens each: {computing:3.0f} s to compute and "
          f"{messages:.0f} s of messages; published {published:.0f} s")
flops = 6 * 174.6e9 * (1536 * 2048 / 384) / seconds_384  # if all of the step is computing
limit = (2 + 2 + 2) * flops / (6 * 200e9)  # eight adapters: 200 GB a second
print(f"at {flops / 1e12:.0f} TFLOP/s the limit is {limit:.0f} tokens")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Four times the GPUs are only 1.2 times as fast, 67 s instead of 82, and they are no faster than
# twice the GPUs. By our estimate 20 s and 5 s would do: 2,048 tokens are four times the limit, and
# the step still took over three times its computing.
#
# </details>
#
# The missing forty seconds aren't in our formula. Each of 1,536 GPUs has a single sequence, which
# it may compute less efficiently; the paper names communication between machines (section 5.2). If
# all of it was messages, they ran at a ninth of the full rate. We can't separate the two. So the
# formula says when sharding *can't* be cheap, and not that it will be.
#
# ## Summary
#
# - Prefetching gathers the next weight while a layer computes, for the memory of a second one.
# - Whether messages can be hidden depends on the tokens of each GPU in one pass, not on the model's
#   size. By bandwidth alone, it hardly depends on the number of GPUs; a ring's latencies, left out
#   here, grow with it.
# - Published: with a batch that grew, a step on 128 GPUs was 2.8 % longer than on 8. With a fixed
#   batch, 1,536 GPUs were no faster than 768.
# - Take the first stage that fits. Stages 1 and 2 send no more than data parallelism (with one
#   backward pass a step); stage 3 is for a replica that doesn't fit. And measure: what bandwidths
#   predict may be far too good.
