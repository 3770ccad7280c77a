# %% [markdown]
# # Deeper · What overlap is worth
#
# Chapter 14 sends gradients in three ways: naive, overlapped, in buckets. A fourth is *flat*: all
# gradients in one bucket, after the pass. Which of them is the fastest depends on the link. *On
# which link is it worth the trouble to fill buckets?*
#
# > **What you'll do:** measure when the gradients of a real backward pass are ready, and compute
# > when their messages would arrive by a link whose latency you choose.
# >
# > **What you'll learn:** what overlap saves, what it can't hide, and how large a bucket should be.
# >
# > **What you need:** chapter 14, and PyTorch. No GPU. Reading takes {reading time}.

# %% tags=["torch"]
import sys
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, "..")  # where chapter 14's program is
from ddp_train import fill_buckets
from helpers.plotting import show, timeline

# %% [markdown]
# ## When gradients are ready
#
# Between GPUs there is hardware of its own that carries messages, while the GPUs compute (nearly:
# NCCL's kernels take a part of the GPU). Between two processes of this machine there is none, so
# the cores that compute carry the messages, too. So we measure a real pass, and compute the rest.
#
# The network has 22 layers with 44 gradients, 22 MB in all. A hook notes when each is ready. Of ten
# passes we keep the shortest:

# %% tags=["measured"]
torch.set_num_threads(1)
layers = []
for _ in range(21):
    layers += [nn.Linear(512, 512), nn.ReLU()]
net = nn.Sequential(*layers, nn.Linear(512, 10))
ready = []  # of one pass: (ms after it began, parameter)


def note(p):
    ready.append((1000 * (perf_counter() - begin), p))


for p in net.parameters():
    p.register_post_accumulate_grad_hook(note)

pass_ms = float("inf")
for _ in range(10):
    net.zero_grad()
    loss = F.cross_entropy(net(torch.ones(64, 512)), torch.arange(64) % 10)
    ready.clear()
    begin = perf_counter()
    loss.backward()
    lasted = 1000 * (perf_counter() - begin)
    if lasted < pass_ms:
        pass_ms = lasted
        gradients = list(ready)

print(f"the pass lasts {pass_ms:.1f} ms")
for moment, p in gradients[:3] + gradients[-1:]:
    print(f"    after {moment:5.1f} ms {p.nbytes:8,} bytes are ready")

# %% [markdown]
# ## The link
#
# It carries one message after the other. Each takes a latency, and then its bytes over the rate
# (chapter 03's alpha–beta model). We fix the rate where overlap can save most: all bytes together
# take as long as the pass. (Overlap never saves more than the shorter of the two.)

# %%
total = sum(p.nbytes for moment, p in gradients)
rate = total / pass_ms  # bytes a ms


def carry(messages, latency):
    """(begin, end) of each message, given when it can begin, and its bytes."""
    spans = []
    free = 0  # when the link has carried all so far
    for moment, nbytes in messages:
        begin = max(moment, free)
        free = begin + latency + nbytes / rate
        spans.append((begin, free))
    return spans

# %% [markdown]
# What each way hands to the link, and when. Buckets hold at most a sixth of all bytes:

# %%
moment_of = {p: moment for moment, p in gradients}


def in_buckets(cap_bytes):
    messages = []
    for bucket in fill_buckets([p for moment, p in gradients], cap_bytes):
        last_ready = max(moment_of[p] for p in bucket)
        nbytes = sum(p.nbytes for p in bucket)
        messages.append((last_ready, nbytes))
    return messages


ways = {
    "naive": [(pass_ms, p.nbytes) for moment, p in gradients],
    "flat": [(pass_ms, total)],
    "overlapped": [(moment, p.nbytes) for moment, p in gradients],
    "buckets": in_buckets(total / 6),
}
for name, messages in ways.items():
    print(f"{name:10} {len(messages):3} messages")

# %% [markdown]
# ## Which way is the fastest?
#
# When has the last message arrived, in lengths of the pass? 1 would mean that everything was
# hidden. We try four latencies, from a twentieth of the pass to none. **Predict:** which way wins
# for the largest latency, and which without any?

# %% tags=["predict", "measured"]
print("latency            ", *[f"{name:>10}" for name in ways])
for share in [1 / 20, 1 / 200, 1 / 2000, 0]:
    ends = []
    for messages in ways.values():
        last_begin, last_end = carry(messages, share * pass_ms)[-1]
        ends.append(f"{last_end / pass_ms:10.2f}")
    print(f"{share:6.2%} of the pass  ", *ends)

# %% [markdown]
# <details><summary>What came out</summary>
#
# For the largest latency buckets win: seven latencies are a third of a pass, less than the early
# start saves. *Overlapped* loses even to *flat*, because 44 latencies are 2.2 passes. Without any
# latency *overlapped* wins: its first message leaves at once, while the first bucket waits until it
# is full.
#
# </details>
#
# **Buckets are worth it where all messages' latencies together (their number times one latency)
# aren't small against the pass.** Here are the four ways for the largest latency:

# %% tags=["fold", "measured"]
# draw: the four timelines; a white line begins each message
panels = {}
for name, messages in ways.items():
    spans = carry(messages, pass_ms / 20)
    panels[f"{name}: the last ends after {spans[-1][1] / pass_ms:.1f} passes"] = {
        "pass": [(0, pass_ms, "compute")],
        "link": [(begin, end - begin, "communication") for begin, end in spans]}
ends = {name: carry(messages, pass_ms / 20)[-1][1] for name, messages in ways.items()}
title = f"With a latency of a twentieth of the pass: {min(ends, key=ends.get)} first"
fig, axes = timeline(title, panels)
for ax, messages in zip(axes, ways.values()):
    ax.set_xlim(0, max(ends.values()))
    for begin, end in carry(messages, pass_ms / 20):
        ax.vlines(begin, 0.8, 1.2, color="white", lw=1)
show(fig, f"{title}. Four timelines of a backward pass and of the link. Naive: 44 messages after "
     "the pass. Flat: one after it. Overlapped: 44 that begin during it. Buckets: few that begin "
     "during it.")

# %% [markdown]
# What can't be hidden? The last bucket, because it isn't ready before the pass ends; and what still
# waits for the link by then.
#
# ## How large is a good bucket?
#
# The same for six limits. **Predict:** is the best one small, large, or between?

# %% tags=["predict", "measured"]
latency = pass_ms / 20
print(f"in one latency the link could carry {latency * rate / 2**20:.1f} MB")
for cap_mb in [1.1, 2.5, 3.5, 5, 11, 25]:
    messages = in_buckets(cap_mb * 2**20)
    last_begin, last_end = carry(messages, latency)[-1]
    print(f"at most {cap_mb:4} MB: {len(messages):2} buckets, {last_end / pass_ms:.2f} passes")

# %% [markdown]
# <details><summary>What came out</summary>
#
# Between. Small buckets pay many latencies, and the largest one holds everything, so that it begins
# when the pass has ended.
#
# </details>
#
# **A good bucket is large against what the link could carry in one latency, and small against all
# that is sent.** PyTorch's default of 25 MB holds this whole network but for the megabyte that is
# ready first (by default the first bucket has 1 MB): for a network of this size on such a link,
# `bucket_cap_mb=5` would hide more.
#
# ## Summary
#
# - Overlap hides messages behind the pass, but not the last one, nor what still waits for the link.
# - Many small messages pay many latencies, one large one begins late. Which matters more depends on
#   the latency against the pass: compute it, as here, with the rate of your link, before you tune.
#
# All this is a model of the link: it supposes that sending costs the computing device nothing.
